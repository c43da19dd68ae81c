"""The faults in front of an engine: programs do the same with them as without."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import limpet
import limpet.sync
from limpet.errors import Ambiguous, InvalidValue, Unavailable
from limpet.testing.chaos import FAULTS, Chaos
from tests.engines import ENGINES, unique, url_of


def chaotic(url: str, options: str) -> str:
    return f"chaos:{url}{'&' if '?' in url else '?'}{options}"


@pytest.fixture(params=ENGINES)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[limpet.Store]:
    """A store whose calls fail often, but not so often that a store gives up: that takes five failures in a row."""
    url = chaotic(url_of(request.param, tmp_path), "seed=1&rate=0.25&delay_ms=2")
    async with limpet.open(url, namespace=unique("chaos")) as store:
        yield store


async def test_every_write_is_applied_once(store: limpet.Store) -> None:
    async def work(number: int) -> None:
        for _ in range(5):
            await store.add("count")
            await store.update("sum", lambda found: (found or 0) + number)
            await store.batch().add("batches").put(f"last/{number}", number).commit()

    await asyncio.gather(*(work(number) for number in range(10)))

    found = await store.get("count"), await store.get("sum"), await store.get("batches")
    assert found == (50, 5 * sum(range(10)), 50)
    assert {fault for _, _, fault in Chaos.of(store).happened} == {*FAULTS}


async def test_a_watch_misses_nothing(store: limpet.Store) -> None:
    async with store.watch("n/*") as events:
        for number in range(40):
            await store.put(f"n/{number}", number)
        found = [(await asyncio.wait_for(anext(events), 30)).key for _ in range(40)]

    assert found == [f"n/{number}" for number in range(40)]


async def test_a_reply_that_is_lost_changes_nothing_for_the_caller(store: limpet.Store) -> None:
    switches = Chaos.of(store)
    switches.lose_replies(3)

    entry = await store.put("key", 1)

    assert (entry.version, await store.get("key")) == (1, 1)


async def test_where_no_reply_ever_comes_the_caller_learns_it_later() -> None:
    async with limpet.open("chaos:memory:?rate=0") as store:
        Chaos.of(store).lose_replies(5)
        with pytest.raises(Ambiguous) as lost:
            await store.add("count")

        assert lost.value.request_id is not None
        outcome = await store.outcome(lost.value.request_id)
        assert outcome is not None
        assert outcome.entries[0] == await store.entry("count")
        assert await store.add("count") == 2


async def test_while_it_is_down_every_call_fails_and_afterwards_none() -> None:
    async with limpet.open("chaos:memory:?rate=0") as store:
        await store.put("key", 1)
        with Chaos.of(store).down():
            for call in (store.get("key"), store.put("key", 2), store.keys(), store.status()):
                with pytest.raises(Unavailable):
                    await call

        assert await store.get("key") == 1


async def test_the_same_seed_meets_the_same_faults() -> None:
    async def run(seed: int) -> list[tuple[str, str]]:
        async with limpet.open(f"chaos:memory:?seed={seed}&rate=0.3&delay_ms=0", sweep=False) as store:
            for number in range(50):
                await store.put(f"key/{number}", number)
                await store.get(f"key/{number}")
            return [(call, fault) for _, call, fault in Chaos.of(store).happened]

    first, again, other = await run(7), await run(7), await run(8)
    assert first == again
    assert first != other


def test_a_blocking_store_has_faults_and_switches_too(tmp_path: Path) -> None:
    with limpet.sync.open(f"chaos:sqlite:///{tmp_path}/state.db?rate=0.3&seed=2") as store:
        for _ in range(50):
            store.add("count")
        Chaos.of(store).lose_replies()
        store.add("count")

        assert store.get("count") == 51
    with limpet.sync.open(f"sqlite:///{tmp_path}/state.db") as store:
        assert store.get("count") == 51


async def test_encryption_goes_in_front_of_the_faults() -> None:
    keyring = limpet.Keyring({"k1": os.urandom(32)})
    async with limpet.open("chaos:memory:?rate=0.3&seed=4", encryption=keyring) as store:
        for _ in range(30):
            await store.update("count", lambda found: (found or 0) + 1)

        assert await store.get("count") == 30
        assert (await store.seals())[0].entries == 1


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("chaos:", "stands in front of another URL"),
        ("chaos:?seed=1", "stands in front of another URL"),
        ("chaos:memory:?rate=2", "rate is a number from 0 to 1"),
        ("chaos:memory:?rate=often", "rate is a number from 0 to 1"),
        ("chaos:memory:?faults=fire", "faults are refused, lost, twice, delay, gap"),
        ("chaos:memory:?speed=3", "unknown option 'speed'"),
        ("chaos:nothing:", "unknown engine 'nothing'"),
    ],
)
async def test_what_is_wrong_with_a_url_is_told(url: str, complaint: str) -> None:
    with pytest.raises(InvalidValue, match=complaint):
        await limpet.open(url)


async def test_a_store_without_faults_has_no_switches() -> None:
    async with limpet.open("memory:") as store:
        with pytest.raises(InvalidValue, match="open it with chaos: in front of its URL"):
            Chaos.of(store)
