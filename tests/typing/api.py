"""Every public verb once, with the type that a caller's type checker must see.

``./dev check`` holds the types to this by mypy; `tests/typing/test_api.py` runs it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, assert_type

import limpet
import limpet.sync
from limpet import ChildPage, Commit, Entry, Event, Fence, LockInfo, Page, Status, Traits, TypedEntry
from limpet.codec import Fields
from limpet.model import Resealed, Seals


@dataclass
class Point:
    """A model."""

    x: int


async def use_typed(points: limpet.Typed[Point]) -> None:
    """The verbs of a view."""
    assert_type(points.prefix, str)
    assert_type(await points.create("a", Point(1)), TypedEntry[Point])
    assert_type(await points.put("a", Point(2), expect=await points.entry("a")), TypedEntry[Point])
    assert_type(await points.get("a"), Point | None)
    found = await points.entry("a")
    assert_type(found, TypedEntry[Point] | None)
    assert found is not None
    assert_type(found.value, Point)
    assert_type(found.version, int)
    assert_type(
        await points.update("a", lambda point: limpet.ABSENT if point is None else Point(point.x + 1)),
        TypedEntry[Point] | None,
    )
    scanned = points.scan()
    assert_type(scanned, AsyncIterator[TypedEntry[Point]])
    assert [entry.value.x async for entry in scanned] == [3]
    assert_type(await points.delete("a"), bool)


def use_sync_typed(points: limpet.sync.Typed[Point]) -> None:
    """The verbs of a view without await."""
    assert_type(points.create("a", Point(1)), TypedEntry[Point])
    assert_type(points.put("a", Point(2)), TypedEntry[Point])
    assert_type(points.get("a"), Point | None)
    assert_type(points.entry("a"), TypedEntry[Point] | None)
    assert_type(points.update("a", lambda point: point or limpet.ABSENT), TypedEntry[Point] | None)
    assert_type(points.scan(), Iterator[TypedEntry[Point]])
    assert_type(points.delete("a"), bool)
    assert_type(points.prefix, str)


async def use_store(store: limpet.Store) -> None:
    """The verbs of a store."""
    assert_type(store.name, str)
    assert_type(store.traits, Traits)
    assert_type(store.namespace("other"), limpet.Store)
    assert_type(await store.put("a", 1, ttl=60, expect=limpet.ABSENT, meta={"by": "me"}), Entry)
    assert_type(await store.create("b", {"n": 1}, ttl=timedelta(minutes=1)), Entry)
    assert_type(await store.get("a"), Any)
    assert_type(await store.entry("a"), Entry | None)
    assert_type(await store.entries(["a", "x"]), list[Entry | None])
    assert_type(await store.get_many(["a", "x"]), dict[str, Any])
    assert_type(await store.children("a"), ChildPage)
    assert_type(await store.namespaces(), list[str])
    assert_type(await store.append("log/", {"m": 1}, ttl=60, meta={"by": "me"}), Entry)
    assert_type(await store.delete_prefix("x/"), int)
    assert_type(await store.add("n", 2, expect=limpet.ANY), int)
    assert_type(await store.maximum("n", 2, ttl_if_new=60), int)
    assert_type(await store.minimum("n", 2), int)
    assert_type(await store.update("a", lambda value: value + 1), Entry | None)
    async with store.edit("b", on_conflict=lambda path, base, mine, theirs: mine) as doc:
        assert_type(doc, dict[str, Any])
    assert_type(await store.touch("a", 60), Entry | None)
    assert_type(await store.persist("a"), Entry | None)
    assert_type(await store.keys("a", limit=10), Page)
    scanned = store.scan(where=limpet.field("n") == 1)
    assert_type(scanned, AsyncIterator[Entry])
    assert [entry.key async for entry in scanned] == ["b"]
    history = store.history("a")
    assert_type(history, AsyncIterator[Event])
    assert (await anext(history)).op == "put"
    assert_type(await store.take("b"), Any)
    assert_type(await store.delete("a", expect=limpet.PRESENT), bool)
    assert_type(await store.outcome(limpet.new_request_id()), Commit | None)
    assert_type(await store.locks(), list[LockInfo])
    assert_type(await store.index("n"), bool)
    assert_type(await store.indexes(), list[str])
    await store.unindex("n")
    assert_type(await store.status(), Status)
    assert_type(await store.sweep(), int)
    assert_type(await store.trim(), int)
    assert_type(store.batch(), limpet.Draft)
    assert_type(store.record("r"), limpet.Record)
    assert_type(await store.remaining("a"), float | None)
    assert_type(store.typed(Point, "point/"), limpet.Typed[Point])
    assert_type(store.lock("l", ttl=10), limpet.Lock)
    assert_type(store.election("e", ttl=10), limpet.Election)
    assert_type(store.watch("*"), limpet.Watch)


async def use_encrypted_store(store: limpet.Store) -> None:
    """The verbs of a store with keys, and its end."""
    assert_type(await store.reseal(), Resealed)
    assert_type(await store.seals(), list[Seals])
    await store.close()


async def use_record(record: limpet.Record) -> None:
    """The verbs of a record."""
    assert_type(record.key, str)
    assert_type(await record.put({"n": 1}), Entry)
    assert_type(await record.set({"n": 2}, state="new"), Entry)
    assert_type(await record.swap("state", "new", "done"), bool)
    assert_type(await record.get("n"), Any)
    assert_type(await record.fields(), Fields | None)
    assert_type(await record.entry(), Entry | None)
    assert_type(await record.touch(60), Entry | None)
    assert_type(await record.delete(), bool)


async def use_draft(store: limpet.Store) -> None:
    """The verbs of a batch."""
    async with store.lock("gate", ttl=10) as lock:
        draft = store.batch(request_id=limpet.new_request_id())
        assert_type(draft.put("p", 1), limpet.Draft)
        assert_type(draft.create("c", 1), limpet.Draft)
        assert_type(draft.add("n"), limpet.Draft)
        assert_type(draft.minimum("low", 1), limpet.Draft)
        assert_type(draft.maximum("high", 1, ttl_if_new=60), limpet.Draft)
        assert_type(draft.set("r", {"state": "new"}), limpet.Draft)
        assert_type(draft.touch("t", 60), limpet.Draft)
        assert_type(draft.delete("d"), limpet.Draft)
        assert_type(draft.take("k"), limpet.Draft)
        assert_type(draft.expect("x", limpet.ABSENT), limpet.Draft)
        assert_type(draft.fence(lock), limpet.Draft)
        assert_type(draft.include(), limpet.Draft)
        assert_type(await draft.commit(), Commit)
        assert_type(await store.batch().swap("r", "state", "new", "done").commit(), Commit)


async def use_lock(lock: limpet.Lock) -> None:
    """The verbs of a lock."""
    assert_type(lock.name, str)
    assert_type(await lock.acquire(), limpet.Lock)
    assert_type(lock.token, int | None)
    assert_type(lock.lost, bool)
    assert_type(lock.fence, Fence)
    lock.check()
    await lock.refresh(timedelta(seconds=20))
    await lock.release()
    async with lock as held:
        assert_type(held, limpet.Lock)


async def use_election(election: limpet.Election) -> None:
    """The verbs of an election."""
    assert_type(election.name, str)
    assert_type(await election.campaign(), limpet.Election)
    assert_type(election.token, int | None)
    assert_type(election.lost, bool)
    assert_type(election.fence, Fence)
    election.check()
    assert_type(await election.leader(), LockInfo | None)
    leaders = election.observe()
    assert_type(leaders, AsyncIterator[LockInfo | None])
    assert await anext(leaders) is not None
    await election.resign()


async def use_watch(store: limpet.Store) -> None:
    """The verbs of a watch."""
    async with store.watch("w*", initial=True) as watch:
        assert_type(watch, limpet.Watch)
        await store.put("w", 1)
        assert_type(await anext(watch), Event)
        assert_type(watch.position, str | None)
        assert_type(watch.dropped, int)
        async for event in watch:
            assert_type(event, Event)
            await watch.aclose()


def use_sync_store(store: limpet.sync.Store) -> None:
    """The verbs of a store of the sync API."""
    assert_type(store.name, str)
    assert_type(store.traits, Traits)
    assert_type(store.namespace("other"), limpet.sync.Store)
    assert_type(store.put("a", 1, ttl=60, expect=limpet.ABSENT, meta={"by": "me"}), Entry)
    assert_type(store.create("b", {"n": 1}, ttl=timedelta(minutes=1)), Entry)
    assert_type(store.get("a"), Any)
    assert_type(store.entry("a"), Entry | None)
    assert_type(store.entries(["a", "x"]), list[Entry | None])
    assert_type(store.get_many(["a", "x"]), dict[str, Any])
    assert_type(store.children("a"), ChildPage)
    assert_type(store.namespaces(), list[str])
    assert_type(store.append("log/", 1), Entry)
    assert_type(store.delete_prefix("x/"), int)
    assert_type(store.add("n", 2, expect=limpet.ANY), int)
    assert_type(store.maximum("n", 2, ttl_if_new=60), int)
    assert_type(store.minimum("n", 2), int)
    assert_type(store.update("a", lambda value: value + 1), Entry | None)
    with store.edit("b") as doc:
        assert_type(doc, dict[str, Any])
    assert_type(store.touch("a", 60), Entry | None)
    assert_type(store.persist("a"), Entry | None)
    assert_type(store.keys("a", limit=10), Page)
    assert_type(store.scan(where=limpet.field("n") == 1), Iterator[Entry])
    assert_type(store.history("a"), Iterator[Event])
    assert_type(store.mapping("m/"), limpet.sync.Mapping)
    assert_type(store.take("b"), Any)
    assert_type(store.delete("a", expect=limpet.PRESENT), bool)
    assert_type(store.outcome(limpet.new_request_id()), Commit | None)
    assert_type(store.locks(), list[LockInfo])
    assert_type(store.index("n"), bool)
    assert_type(store.indexes(), list[str])
    store.unindex("n")
    assert_type(store.status(), Status)
    assert_type(store.sweep(), int)
    assert_type(store.trim(), int)
    assert_type(store.remaining("a"), float | None)
    assert_type(store.run(lambda awaited: awaited.add("n")), int)
    assert_type(store.typed(Point, "point/"), limpet.sync.Typed[Point])
    assert_type(store.batch(), limpet.sync.Draft)
    assert_type(store.record("r"), limpet.sync.Record)
    assert_type(store.lock("l", ttl=10), limpet.sync.Lock)
    assert_type(store.election("e", ttl=10), limpet.sync.Election)
    watch = store.watch("*")
    assert_type(watch, limpet.sync.Watch)
    watch.close()


def use_sync_encrypted_store(store: limpet.sync.Store) -> None:
    """The verbs of a store with keys, and its end."""
    assert_type(store.reseal(), Resealed)
    assert_type(store.seals(), list[Seals])
    store.close()


def use_sync_record(record: limpet.sync.Record) -> None:
    """The verbs of a record of the sync API."""
    assert_type(record.key, str)
    assert_type(record.put({"n": 1}), Entry)
    assert_type(record.set({"n": 2}, state="new"), Entry)
    assert_type(record.swap("state", "new", "done"), bool)
    assert_type(record.get("n"), Any)
    assert_type(record.fields(), Fields | None)
    assert_type(record.entry(), Entry | None)
    assert_type(record.touch(60), Entry | None)
    assert_type(record.delete(), bool)


def use_sync_draft(store: limpet.sync.Store) -> None:
    """The verbs of a batch of the sync API."""
    with store.lock("gate", ttl=10) as lock:
        draft = store.batch(request_id=limpet.new_request_id())
        assert_type(draft.put("p", 1), limpet.sync.Draft)
        assert_type(draft.create("c", 1), limpet.sync.Draft)
        assert_type(draft.add("n"), limpet.sync.Draft)
        assert_type(draft.minimum("low", 1), limpet.sync.Draft)
        assert_type(draft.maximum("high", 1, ttl_if_new=60), limpet.sync.Draft)
        assert_type(draft.set("r", {"state": "new"}), limpet.sync.Draft)
        assert_type(draft.touch("t", 60), limpet.sync.Draft)
        assert_type(draft.delete("d"), limpet.sync.Draft)
        assert_type(draft.take("k"), limpet.sync.Draft)
        assert_type(draft.expect("x", limpet.ABSENT), limpet.sync.Draft)
        assert_type(draft.fence(lock), limpet.sync.Draft)
        assert_type(draft.include(), limpet.sync.Draft)
        assert_type(draft.commit(), Commit)
        assert_type(store.batch().swap("r", "state", "new", "done").commit(), Commit)


def use_sync_lock(lock: limpet.sync.Lock) -> None:
    """The verbs of a lock of the sync API."""
    assert_type(lock.name, str)
    assert_type(lock.acquire(), limpet.sync.Lock)
    assert_type(lock.token, int | None)
    assert_type(lock.lost, bool)
    assert_type(lock.fence, Fence)
    lock.check()
    lock.refresh(timedelta(seconds=20))
    lock.release()
    with lock as held:
        assert_type(held, limpet.sync.Lock)


def use_sync_election(election: limpet.sync.Election) -> None:
    """The verbs of an election of the sync API."""
    assert_type(election.name, str)
    assert_type(election.campaign(), limpet.sync.Election)
    assert_type(election.token, int | None)
    assert_type(election.lost, bool)
    assert_type(election.fence, Fence)
    election.check()
    assert_type(election.leader(), LockInfo | None)
    leaders = election.observe()
    assert_type(leaders, Iterator[LockInfo | None])
    assert next(leaders) is not None
    election.resign()


def use_sync_watch(store: limpet.sync.Store) -> None:
    """The verbs of a watch of the sync API."""
    with store.watch("w*", initial=True) as watch:
        assert_type(watch, limpet.sync.Watch)
        store.put("w", 1)
        assert_type(next(watch), Event)
        assert_type(watch.poll(0.01), Event | None)
        assert_type(watch.position, str | None)
        assert_type(watch.dropped, int)
        store.put("w", 2)
        for event in watch:
            assert_type(event, Event)
            watch.close()
