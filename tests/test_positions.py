"""Positions and histories: how a reader of the log finds out that the store was put back to an earlier state."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

import limpet
from limpet.engines import memory
from limpet.errors import Compacted
from limpet.model import BEGINNING, Change, Entry, fingerprint


def change(revision: int, at_ms: int = 1_700_000_000_000, *, cause: str | None = "r-1", key: str = "k") -> Change:
    entry = Entry(key, b"1", 1, revision, revision, at_ms, at_ms)
    return Change("put", entry, revision, revision, at_ms, cause)


def test_a_fingerprint_names_its_revision_and_shows_no_key() -> None:
    """A caller that may see a position may lack the right to see the key that changed, or its value."""
    assert fingerprint(change(7)).startswith("7-")
    assert fingerprint(change(7, key="a")) == fingerprint(change(7, key="b"))


def test_a_fingerprint_tells_two_histories_apart() -> None:
    """Store, epoch and revision repeat; the time and the cause do not."""
    one = fingerprint(change(7))

    assert one == fingerprint(change(7))
    assert len({one, fingerprint(change(7, cause="r-2")), fingerprint(change(7, cause=None)), BEGINNING}) == 4
    assert one != fingerprint(change(7, 1_700_000_000_001))


async def until(watch: limpet.Watch, key: str) -> None:
    while (await anext(watch)).key != key:
        pass


async def test_a_running_watch_is_compacted_when_the_store_is_restored() -> None:
    """The place is put back under a watcher, and gets more changes than were lost before the watcher looks again."""
    name, clock = "memory:put-back", limpet.ManualClock()
    async with limpet.open(name, clock=clock) as store, limpet.open(name) as writer:
        await writer.put("a", 1)
        place = memory._shared["put-back"]
        async with store.watch() as watch:
            await writer.put("b", 1)
            await anext(watch)
            with place.lock:
                space = place.namespaces[store.name]
                space.counters.revision = space.log[0].revision
                del space.log[1:]
            clock.advance(1)
            # Nothing here lets the watch look in between.
            await writer.put("c", 1)
            await writer.put("d", 1)

            with pytest.raises(Compacted, match="another history"):
                async with asyncio.timeout(120):
                    await anext(watch)


async def test_a_watch_that_was_away_is_compacted_too() -> None:
    """It does not look while the place is put back, and another watch starts before it looks again."""
    name, clock = "memory:put-back-unseen", limpet.ManualClock()
    async with limpet.open(name, clock=clock) as store, limpet.open(name) as writer:
        await writer.put("a", 1)
        place = memory._shared["put-back-unseen"]
        async with store.watch() as busy:
            await writer.put("b", 1)
            await anext(busy)
            with place.lock:
                space = place.namespaces[store.name]
                space.counters.revision = space.log[0].revision
                del space.log[1:]
            clock.advance(1)
            await writer.put("c", 1)
            await writer.put("d", 1)
            # The hub looks and ends; then another watch makes it follow again.
            await asyncio.sleep(0.01)
            async with store.watch() as other:
                await writer.put("e", 1)
                assert (await anext(other)).key == "e"

                with pytest.raises(Compacted, match="another history"):
                    await anext(busy)


async def test_a_watch_behind_the_hub_is_compacted_too() -> None:
    """It reads the log by itself, from where it stands."""
    name, clock = "memory:put-back-behind", limpet.ManualClock()
    async with limpet.open(name, clock=clock) as store, limpet.open(name) as writer:
        await writer.put("a", 1)
        place = memory._shared["put-back-behind"]
        async with store.watch() as slow, store.watch() as quick:
            for number in range(4000):
                await writer.put(f"k{number}", number)
                if number % 100 == 0:
                    await asyncio.sleep(0)
            assert (await anext(slow)).key == "k0"
            await until(quick, "k3999")
            with place.lock:
                space = place.namespaces[store.name]
                for number, change in enumerate(space.log):
                    space.log[number] = msgspec.structs.replace(change, at_ms=change.at_ms + 1)

            with pytest.raises(Compacted, match="another history"):
                await until(slow, "k3999")


async def test_an_observer_of_an_election_goes_on_when_the_store_is_put_back() -> None:
    """The present leader can be read, whatever the log has of the time in between."""
    name, clock = "memory:put-back-observed", limpet.ManualClock()
    async with limpet.open(name, clock=clock) as store, limpet.open(name) as writer:
        await writer.put("a", 1)
        place = memory._shared["put-back-observed"]
        observed = store.election("nightly", ttl=60).observe()
        assert await anext(observed) is None
        changed = asyncio.ensure_future(anext(observed))
        await writer.put("b", 1)
        await asyncio.sleep(0.01)
        with place.lock:
            space = place.namespaces[store.name]
            space.counters.revision = space.log[0].revision
            del space.log[1:]
        clock.advance(1)
        await writer.put("c", 1)
        await writer.put("d", 1)
        await asyncio.sleep(0.01)
        lead = await writer.election("nightly", ttl=60, candidate="a candidate").campaign()

        async with asyncio.timeout(120):
            while not changed.done():
                clock.advance(1)
                await asyncio.sleep(0.01)
        leader = await changed
        assert leader is not None
        assert (leader.holder, leader.token) == ("a candidate", lead.token)
        await lead.resign()
