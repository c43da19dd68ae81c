"""The log keeps every change: of a key that changes as fast as it can, no watcher and no history misses one."""

# ruff: noqa: D403 - a docstring here quotes the contract, and some of its lines begin with the name of a verb.

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest

import limpet
from limpet.conformance.conftest import Elapse, OpenStore
from limpet.conformance.support import assert_quiet, next_event, next_events
from limpet.conformance.test_primitives import Primitives
from limpet.errors import Compacted
from limpet.model import Add, Delete, Patch, Put, Touch, Write

ROUNDS = 1000


async def overwrite(store: limpet.Store, rounds: int) -> list[tuple[str, object]]:
    """Put, delete and put a key again, as fast as it goes. Returns what happened."""
    happened: list[tuple[str, object]] = []
    for number in range(rounds):
        await store.put("hot", number)
        assert await store.delete("hot")
        await store.put("hot", [number])
        happened += [("put", number), ("delete", None), ("put", [number])]
    return happened


def seen(events: list[limpet.Event]) -> list[tuple[str, object]]:
    """What events say, after a check of their order."""
    revisions = [event.revision for event in events]
    assert revisions == sorted(set(revisions))
    return [(event.op, event.value) for event in events]


async def test_every_change_of_a_hot_key_is_delivered(store: limpet.Store, open_store: OpenStore) -> None:
    """A change that is overwritten at once is delivered like any other, with its own value.

    One watcher reads while another store writes, one reads only afterwards, and one resumes from before all of it.
    """
    other = await open_store()
    start = await store.put("start", 1)
    count = 3 * ROUNDS
    async with store.watch("hot") as watch, store.watch("hot") as slow:
        reading = asyncio.create_task(next_events(watch, count))
        happened = await overwrite(other, ROUNDS)
        assert seen(await reading) == happened
        assert seen(await next_events(slow, count)) == happened
        await assert_quiet(watch)
    async with store.watch("hot", after=start.revision) as resumed:
        assert seen(await next_events(resumed, count)) == happened
        await assert_quiet(resumed)


async def test_a_watch_resumes_between_any_two_changes_of_a_key(store: limpet.Store, open_store: OpenStore) -> None:
    """A watch resumes after the position of any event."""
    start = await store.put("start", 1)
    happened = await overwrite(store, 4)
    async with store.watch("hot", after=start.revision) as watch:
        events = await next_events(watch, len(happened))

    other = await open_store()
    for number, event in enumerate(events[:-1]):
        async with other.watch("hot", after=event.position) as resumed:
            assert seen(await next_events(resumed, len(happened) - number - 1)) == happened[number + 1 :]


async def test_history_has_every_change_of_a_hot_key(store: limpet.Store, open_store: OpenStore) -> None:
    """`history` gives the changes of a key that are still in the log, oldest first."""
    await store.put("other", 1)
    happened = await overwrite(store, 100)
    await store.put("other", 2)

    for reader in (store, await open_store()):
        assert seen([event async for event in reader.history("hot")]) == happened


async def test_history_has_every_kind_of_change(store: limpet.Store, elapse: Elapse) -> None:
    """History includes deletions and the changes after them."""
    await store.put("key", 1)
    await store.add("key", 4)
    await store.touch("key", 60)
    assert await store.take("key") == 5
    await store.record("key").put({"a": 1})
    await store.record("key").set(b=2)
    await store.put("key", "short", ttl=0.2)
    await elapse(0.3)
    await store.put("key", "again")

    events = [event async for event in store.history("key")]

    assert [(event.op, event.entry and event.entry.version) for event in events] == [
        *(("put", 1), ("put", 2), ("touch", 2), ("delete", 2)),
        *(("put", 1), ("patch", 2), ("put", 3), ("expire", 3), ("put", 1)),
    ]
    values = [event.value for event in events]
    assert values == [1, 5, None, None, {"a": 1}, {"a": 1, "b": 2}, "short", None, "again"]


async def test_many_touches_keep_the_value(store: limpet.Store, open_store: OpenStore) -> None:
    """touch changes only the ttl: new revision, same version, same value, same times.

    A heartbeat touches its key over and over, and what it was put with stays.
    """
    first = await store.put("key", {"held": "by me"}, ttl=60)
    for number in range(ROUNDS):
        last = await store.touch("key", 61 + number % 7)

    assert last is not None
    for reader in (store, await open_store()):
        entry = await reader.entry("key")
        assert entry is not None
        assert (entry.value, entry.version, entry.created_revision) == ({"held": "by me"}, 1, first.revision)
        assert (entry.revision, entry.expires_at) == (last.revision, last.expires_at)
    events = [event async for event in store.history("key")]
    assert [event.op for event in events] == ["put"] + ["touch"] * ROUNDS


RETRIED: dict[str, tuple[Write, ...]] = {
    "put": (Put("hot", b'"mine"', meta_json=b'{"by":"me"}'),),
    "add": (Add("hot", 1000),),
    "touch": (Touch("hot", 60_000),),
    "take": (Delete("hot", take=True),),
    "patch": (Patch("record", {"mine": b"1"}),),
    "batch": (Add("hot", 1000), Put("beside", b"1")),
}


@pytest.mark.parametrize("case", RETRIED)
async def test_a_retry_behind_many_other_changes_is_answered(open_store: OpenStore, case: str) -> None:
    """A request that was applied before returns its first result and changes nothing.

    More than a thousand changes of the same key came after it, and its first reply was lost.
    """
    primitives = Primitives(await open_store(namespace=f"q-{uuid.uuid4().hex[:12]}", sweep=False))
    await primitives.must_commit(Put("hot", b"1"), Patch("record", {"first": b"1"}))
    since = (await primitives.status()).revision
    first = await primitives.must_commit(*RETRIED[case], request_id="mine")
    for number in range(ROUNDS + 100):
        await primitives.must_commit(Put("hot", b"%d" % number))
        if case == "patch":
            await primitives.must_commit(Patch("record", {"other": b"%d" % number}))
    before = (await primitives.status()).revision

    again = await primitives.must_commit(*RETRIED[case], request_id="mine", retry_since=since)

    assert again.replayed
    assert (again.revision, again.ended, again.at_ms) == (first.revision, first.ended, first.at_ms)
    if case != "touch":
        assert again.entries == first.entries
    assert (await primitives.status()).revision == before


async def test_a_key_that_changed_more_often_than_the_log_keeps_is_reported(open_store: OpenStore) -> None:
    """A position that was trimmed is Compacted, never a silent gap.

    All changes are of one key, so the entry that it holds has a revision above all that were dropped.
    """
    window = limpet.Window(changes=20, age_ms_min=0)
    store: Any = await open_store(namespace=f"q-{uuid.uuid4().hex[:12]}", window=window, sweep=False)
    start = await store.put("start", 1)
    happened = await overwrite(store, 30)
    assert await store.trim() == 71

    with pytest.raises(Compacted):
        await next_event(store.watch("hot", after=start.revision))
    assert seen([event async for event in store.history("hot")]) == happened[-20:]
    assert await store.get("hot") == [29]
    assert await store.get("start") == 1
