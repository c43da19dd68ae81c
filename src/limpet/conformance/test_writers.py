"""The names of writers: an entry has that of the writer of its value, an event that of the writer of its change."""

from __future__ import annotations

from typing import Any

import pytest

import limpet
from limpet.conformance.conftest import Elapse, OpenStore
from limpet.errors import Conflict, InvalidValue

# Everything that a name may hold and some part of a store may take for something else.
ODD = """a/b.c*>"'\\ [1,{}],é\u00a1中:=+%"""


async def history(store: limpet.Store, key: str) -> list[tuple[str, str | None]]:
    return [(event.op, event.writer) async for event in store.history(key)]


async def writer_of(store: limpet.Store, key: str) -> str | None:
    entry = await store.entry(key)
    assert entry is not None
    return entry.writer


async def test_a_store_has_the_name_of_its_writer(open_store: OpenStore) -> None:
    """A store may be opened with the name of a writer, and a store without one writes no name."""
    named, plain = await open_store(writer="agent-7"), await open_store()

    assert (await named.put("a", 1)).writer == "agent-7"
    assert (await plain.put("b", 1)).writer is None

    for store in (named, plain):
        assert await writer_of(store, "a") == "agent-7"
        assert await writer_of(store, "b") is None
        assert [(entry.key, entry.writer) async for entry in store.scan()] == [("a", "agent-7"), ("b", None)]
        assert await history(store, "a") == [("put", "agent-7")]
        assert await history(store, "b") == [("put", None)]


@pytest.mark.parametrize("name", ["x", ODD, "n" * 64, "é" * 64, "-", "None"])
async def test_a_name_is_kept_exactly(open_store: OpenStore, name: str) -> None:
    """A store may be opened with the name of a writer, and a store without one writes no name."""
    store = await open_store(writer=name)

    await store.put("a", {"x": 1}, meta={"m": [1, "é"]})
    await store.put("b", b"\x00raw")

    for key in ("a", "b"):
        assert await writer_of(store, key) == name
        assert await history(store, key) == [("put", name)]
    assert (await store.entry("a")).meta == {"m": [1, "é"]}  # type: ignore[union-attr]


async def test_every_write_of_a_value_has_its_writer(open_store: OpenStore) -> None:
    """`entry.writer` is the name of the writer of the value: of the last put, add, set, swap or update."""
    one, other = await open_store(writer="one"), await open_store(writer="other")

    async def write(store: limpet.Store) -> None:
        await store.put("put", 1)
        await store.add("add")
        await store.maximum("maximum", 5)
        await store.record("set").set({"x": 1})
        await store.update("update", lambda found: (found or 0) + 1)
        await store.put("keep", 1, ttl=limpet.KEEP, meta=limpet.KEEP)
        async with store.edit("edit") as doc:
            doc[f"n{len(doc)}"] = 1

    await write(one)
    await one.record("swap").put({"state": "new"})
    await write(other)
    assert await other.record("swap").swap("state", "new", "done")

    keys = ("put", "add", "maximum", "set", "update", "keep", "edit", "swap")
    for key in keys:
        assert await writer_of(one, key) == "other", key
        assert [writer for _, writer in await history(one, key)] == ["one", "other"], key
    assert (await one.append("log/", 1)).writer == "one"


async def test_a_write_without_a_name_has_none(open_store: OpenStore) -> None:
    """A write without a name leaves the entry without one, also where it keeps the meta."""
    named, plain = await open_store(writer="agent-7"), await open_store()
    for key in ("put", "keep", "update"):
        await named.put(key, 1, meta={"m": key})
    await named.put("add", 1, meta={"m": "add"})
    await named.put("bare", 1)
    await named.record("set").put({"x": 1}, meta={"m": "set"})

    await plain.put("put", 2, meta={"m": "put"})
    await plain.put("keep", 2, meta=limpet.KEEP, ttl=limpet.KEEP)
    await plain.update("update", lambda found: found + 1)
    await plain.add("add")
    await plain.add("bare")
    await plain.record("set").set({"y": 2})

    for key in ("put", "keep", "update", "add", "set"):
        entry = await plain.entry(key)
        assert entry is not None
        assert (entry.writer, entry.meta) == (None, {"m": key}), key
        assert [writer for _, writer in await history(plain, key)] == ["agent-7", None], key
    assert await writer_of(plain, "bare") is None


async def test_touch_is_no_write_of_the_value(open_store: OpenStore) -> None:
    """`touch` leaves the writer of an entry as it is."""
    one, other = await open_store(writer="one"), await open_store(writer="other")
    await one.put("a", 1, meta={"m": 1})

    touched = await other.touch("a", 60)

    assert touched is not None
    assert (touched.writer, touched.meta, touched.version) == ("one", {"m": 1}, 1)
    assert await writer_of(other, "a") == "one"
    assert (await one.persist("a")).writer == "one"  # type: ignore[union-attr]


async def test_an_event_has_its_writer(open_store: OpenStore, elapse: Elapse) -> None:
    """An event has the name of the writer of its change, also of a touch and a delete; an expiry has none."""
    one, other = await open_store(writer="one"), await open_store(writer="other")
    async with one.watch("*") as watch:
        await one.put("a", 1)
        await other.touch("a", 60)
        await other.delete("a")
        await one.put("short", 1, ttl=0.1)
        await elapse(0.2)
        await one.sweep()
        events = [await anext(watch) for _ in range(5)]

    assert [(event.op, event.writer) for event in events] == [
        ("put", "one"),
        ("touch", "other"),
        ("delete", "other"),
        ("put", "one"),
        ("expire", None),
    ]
    touch, delete, expire = events[1].entry, events[2].entry, events[4].entry
    assert (touch and touch.writer, delete and delete.writer, expire and expire.writer) == ("one", "one", "one")
    assert all(event.cause for event in events[:4])
    assert await history(one, "a") == [("put", "one"), ("touch", "other"), ("delete", "other")]


async def test_what_a_watch_begins_with_has_its_writer(open_store: OpenStore) -> None:
    """`entry.writer` is the name of the writer of the value: of the last put, add, set, swap or update."""
    one, other = await open_store(writer="one"), await open_store(writer="other")
    await one.put("a", 1)
    async with other.watch("*", initial=True) as watch:
        events = [await anext(watch) for _ in range(2)]

    assert [(event.op, event.writer) for event in events] == [("put", "one"), ("synced", None)]


async def test_a_batch_has_one_writer(open_store: OpenStore) -> None:
    """All changes of a batch have its writer."""
    store = await open_store(writer="agent-7")
    await store.put("gone", 1)
    await store.put("touched", 1)

    batch = store.batch(request_id="order-17").put("a", 1).add("n").set("r", {"x": 1}).delete("gone")
    commit = await batch.touch("touched", 60).commit()

    assert [entry and entry.writer for entry in commit.entries] == ["agent-7"] * 3 + [None, "agent-7"]
    for key in ("a", "n", "r", "gone", "touched"):
        *_, last = [event async for event in store.history(key)]
        assert (last.writer, last.cause) == ("agent-7", "order-17")


async def test_the_meta_is_independent_of_the_writer(open_store: OpenStore) -> None:
    """The meta and the writer are independent: neither changes the other."""
    one, other = await open_store(writer="one"), await open_store(writer="other")
    await one.put("a", 1, meta={"by": "me"})

    kept = await other.put("a", 2, meta=limpet.KEEP)
    assert (kept.meta, kept.writer) == ({"by": "me"}, "other")
    dropped = await other.put("a", 3)
    assert (dropped.meta, dropped.writer) == ({}, "other")
    large = {"m": "x" * 8_180}
    assert (await one.put("a", 4, meta=large)).meta == large
    found = await other.entry("a")
    assert found is not None
    assert (found.meta, found.writer) == (large, "one")


async def test_no_guard_looks_at_a_writer(open_store: OpenStore) -> None:
    """No guard looks at a writer: an entry written under another name passes the same guards."""
    one, other = await open_store(writer="one"), await open_store()
    first = await one.put("a", 1)

    second = await other.put("a", 2, expect=first)
    third = await one.put("a", 3, expect=limpet.Version(2))
    assert (second.version, third.version) == (2, 3)
    await other.put("a", 4, expect=limpet.equals(3))
    await one.record("r").put({"x": 1})
    await other.batch().expect("r", limpet.field("x") == 1).put("a", 5).commit()
    await one.delete("a", expect=limpet.Version(5))


async def test_a_request_of_another_writer_is_the_same(open_store: OpenStore) -> None:
    """A request repeated by another writer is the same request, and returns the first result."""
    one, other, plain = [await open_store(writer=name) for name in ("one", "other", None)]

    first = await one.put("a", 1, request_id="order-17")
    assert await other.put("a", 1, request_id="order-17") == first
    assert await plain.put("a", 1, request_id="order-17") == first
    assert await one.add("n", request_id="count-1") == 1
    assert await plain.add("n", request_id="count-1") == 1

    assert await history(one, "a") == [("put", "one")]
    assert [event.cause async for event in one.history("a")] == ["order-17"]
    outcome = await plain.outcome("order-17")
    assert outcome is not None
    assert [entry and entry.writer for entry in outcome.entries] == ["one"]


async def test_an_id_may_look_like_one_with_a_writer(open_store: OpenStore) -> None:
    """A store may be opened with the name of a writer, and a store without one writes no name."""
    plain, named = await open_store(), await open_store(writer="agent-7")

    await plain.put("a", 1, request_id="id\x1fagent-7")
    await named.put("a", 2, request_id="id\x1fagent-7\x1f")

    assert [(event.cause, event.writer) async for event in plain.history("a")] == [
        ("id\x1fagent-7", None),
        ("id\x1fagent-7\x1f", "agent-7"),
    ]


async def test_a_conflict_says_who_wrote(open_store: OpenStore) -> None:
    """What another writer finds in a Conflict has its writer."""
    one, other = await open_store(writer="one"), await open_store(writer="other")
    await one.put("a", 1)

    with pytest.raises(Conflict) as caught:
        await other.create("a", 2)
    assert caught.value.current is not None
    assert caught.value.current.writer == "one"


@pytest.mark.parametrize("writer", ["", "n" * 65, "a\nb", "a\x1fb", "\ud800", 7, b"agent"])
async def test_a_name_is_short_and_printable(open_store: OpenStore, writer: Any) -> None:
    """The name of a writer is 1 to 64 printable characters; anything else is InvalidValue."""
    with pytest.raises(InvalidValue, match="the name of a writer"):
        await open_store(writer=writer)
