"""Verbs on many keys: reading several at one moment, deleting by prefix, and listing folders and namespaces."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

import limpet
from limpet.conformance.conftest import Elapse, OpenStore
from limpet.conformance.support import count, next_events, session_of
from limpet.errors import InvalidKey, InvalidValue, LockLost

# entries and get_many ---------------------------------------------------------


async def test_entries_have_the_order_of_the_keys(store: limpet.Store, elapse: Elapse) -> None:
    """`entries` gives the entries of several keys, in the order of the keys and with None for an absent one."""
    await store.put("a", 1, meta={"by": "me"})
    await store.put("b", b"\x00")
    await store.record("c").put({"x": 1})
    await store.put("short", 1, ttl=0.1)
    await store.put("gone", 1)
    await store.delete("gone")
    await elapse(0.2)

    found = await store.entries(["c", "gone", "a", "short", "missing", "b"])

    assert found == [await store.entry("c"), None, await store.entry("a"), None, None, await store.entry("b")]
    assert found[2] is not None
    assert (found[2].value, found[2].meta) == (1, {"by": "me"})


async def test_entries_take_any_iterable_of_keys(store: limpet.Store) -> None:
    """`entries` gives the entries of several keys, in the order of the keys and with None for an absent one."""
    await store.put("a", 1)
    a = await store.entry("a")

    assert await store.entries(("b", "a")) == [None, a]
    assert await store.entries(key for key in ("a", "b")) == [a, None]
    assert await store.entries({"a": "its value does not matter"}) == [a]


async def test_get_many_has_what_is_there(store: limpet.Store) -> None:
    """`get_many` gives the values of several keys; an absent key is not in the result."""
    await store.put("a", {"x": [1]})
    await store.put("null", None)
    await store.put("raw", b"\x01")

    found = await store.get_many(["raw", "missing", "null", "a"])

    assert found == {"raw": b"\x01", "null": None, "a": {"x": [1]}}
    assert list(found) == ["raw", "null", "a"]


async def test_several_keys_are_read_at_one_moment(store: limpet.Store) -> None:
    """Several keys are read at one moment: of a batch, either all writes are seen or none."""
    keys = [f"k{number}" for number in range(8)]
    over = asyncio.Event()

    async def write() -> None:
        for number in range(40):
            batch = store.batch()
            for key in keys:
                batch = batch.put(key, number)
            await batch.commit()
        over.set()

    async def read() -> None:
        while not over.is_set():
            assert len({entry and entry.value for entry in await store.entries(keys)}) == 1
            assert len({*(await store.get_many(keys)).values()}) <= 1
            await asyncio.sleep(0)

    await asyncio.gather(write(), read(), read())


async def test_a_key_may_be_named_twice(store: limpet.Store) -> None:
    """A key that is named twice is read once, and `entries` gives its entry twice."""
    await store.put("a", 1)
    a = await store.entry("a")

    assert await store.entries(["a", "missing", "a", "missing"]) == [a, None, a, None]
    assert await store.get_many(["a", "missing", "a"]) == {"a": 1}


async def test_a_read_of_many_keys_is_limited(store: limpet.Store) -> None:
    """One read names up to 1,000 keys; more is InvalidValue, and none gives an empty result."""
    keys = [f"k/{number}" for number in range(1001)]
    await store.put(keys[999], "last")

    found = await store.entries(keys[:1000])

    assert [entry.value for entry in found if entry is not None] == ["last"]
    assert await store.get_many(keys[:1000]) == {keys[999]: "last"}
    assert await store.entries([]) == []
    assert await store.get_many([]) == {}
    for read in (store.entries, store.get_many):
        with pytest.raises(InvalidValue, match="1,000"):
            await read(keys)


@pytest.mark.refused_early
@pytest.mark.parametrize("keys", ["key", b"key"])
async def test_one_key_is_not_several(store: limpet.Store, keys: Any) -> None:
    """One read names up to 1,000 keys; more is InvalidValue, and none gives an empty result."""
    for read in (store.entries, store.get_many):
        with pytest.raises(InvalidValue, match="a list"):
            await read(keys)


@pytest.mark.refused_early
async def test_each_key_of_a_read_is_checked(store: limpet.Store) -> None:
    """The message of InvalidKey names what is wrong with the key."""
    for read in (store.entries, store.get_many):
        with pytest.raises(InvalidKey, match="empty"):
            await read(["a", ""])


# delete_prefix ----------------------------------------------------------------


async def test_delete_prefix_deletes_what_starts_with_it(store: limpet.Store, elapse: Elapse) -> None:
    """`delete_prefix` deletes the keys that start with the prefix, and returns how many there were."""
    for key in ("a", "k", "k/", "k/1", "k/2\U0010ffff", "k0", "z"):
        await store.put(key, 1)
    await store.put("k/short", 1, ttl=0.1)
    async with store.lock("k/lock", ttl=60):
        await elapse(0.2)

        assert await store.delete_prefix("k/") == 3
        assert [lock.name for lock in await store.locks()] == ["k/lock"]

    assert (await store.keys()).keys == ["a", "k", "k0", "z"]
    assert await store.delete_prefix("k/") == 0
    assert await store.delete_prefix("") == 4
    assert (await store.keys()).keys == []


async def test_delete_prefix_is_limited(store: limpet.Store) -> None:
    """`delete_prefix` with a limit deletes so many keys at most, the first ones in key order."""
    for number in range(5):
        await store.put(f"k/{number}", number)

    assert await store.delete_prefix("k/", limit=2) == 2
    assert (await store.keys()).keys == ["k/2", "k/3", "k/4"]
    assert await store.delete_prefix("k/", limit=3) == 3
    assert await store.delete_prefix("k/", limit=3) == 0


@pytest.mark.refused_early
@pytest.mark.parametrize("options", [{"limit": 0}, {"limit": True}, {"limit": 1.0}, {"limit": "1"}])
async def test_an_invalid_limit_deletes_nothing(store: limpet.Store, options: dict[str, Any]) -> None:
    """`delete_prefix` with a limit deletes so many keys at most, the first ones in key order."""
    await store.put("k", 1)

    with pytest.raises(InvalidValue):
        await store.delete_prefix("", **options)

    assert await store.get("k") == 1


async def test_delete_prefix_takes_bounded_batches(store: limpet.Store) -> None:
    """`delete_prefix` deletes in batches of up to 128 keys: each happens as a whole, all of them together do not."""
    for start in (0, 100, 200):
        batch = store.batch()
        for number in range(start, start + 100):
            batch = batch.put(f"k/{number:03}", number)
        await batch.commit()
    counted = count(store)

    async with store.watch("k/*") as watch:
        assert await store.delete_prefix("k/") == 300
        events = await next_events(watch, 300)

    assert counted.commits == 3
    assert [event.op for event in events] == ["delete"] * 300
    assert len({event.commit for event in events}) == 3


async def test_delete_prefix_ends_beside_a_writer(store: limpet.Store, open_store: OpenStore) -> None:
    """What is written while `delete_prefix` runs may be deleted or not; what stood there before is deleted."""
    other = await open_store()
    keys = [f"k/{number:03}" for number in range(200)]
    for key in keys:
        await store.put(key, "before")
    over = asyncio.Event()
    written: dict[str, int] = {}

    async def write() -> None:
        number = 0
        while not over.is_set():
            number += 1
            for key in (f"k/new/{number:06}", f"k/{number % 7:03}"):
                written[key] = (await other.put(key, number)).revision
            await asyncio.sleep(0)

    writing = asyncio.create_task(write())
    deleted = await store.delete_prefix("k/")
    over.set()
    await writing

    left = {entry.key: entry async for entry in store.scan("k/")}
    assert deleted >= 193
    assert "before" not in {entry.value for entry in left.values()}
    assert {entry.revision for entry in left.values()} <= {*written.values()}


async def test_delete_prefix_may_be_fenced(store: limpet.Store) -> None:
    """A fence fits every write, and batches."""
    await store.put("k/1", 1)
    async with store.lock("guard", ttl=60) as lock:
        assert await store.delete_prefix("k/", fence=lock) == 1
        fence = lock.fence
    await store.put("k/2", 2)

    for prefix in ("k/", "nothing/"):
        with pytest.raises(LockLost):
            await store.delete_prefix(prefix, fence=fence)

    assert await store.get("k/2") == 2


# children and namespaces ------------------------------------------------------


def shown(page: Any) -> list[tuple[str, int | None]]:
    """The keys of a page, and its folders with their numbers of keys."""
    return [(child.key, child.keys if child.is_folder else None) for child in page.children]


async def test_children_are_one_level_below_a_prefix(store: limpet.Store, elapse: Elapse) -> None:
    """`children` gives the keys directly below a prefix, and the folders there with the number of keys in each."""
    for key in ("a", "jobs", "jobs/", "jobs/a", "jobs/a/1", "jobs/a/2/x", "jobs/b/1", "jobs0", "z/1"):
        await store.put(key, 1)
    await store.put("jobs/c/1", 1, ttl=0.1)
    await elapse(0.2)

    assert shown(await store.children()) == [("a", None), ("jobs", None), ("jobs/", 5), ("jobs0", None), ("z/", 1)]
    found = await store.children("jobs/")
    assert shown(found) == [("jobs/", None), ("jobs/a", None), ("jobs/a/", 2), ("jobs/b/", 1)]
    assert (found.truncated, found.cursor) == (False, None)
    assert shown(await store.children("jobs")) == [("jobs", None), ("jobs/", 5), ("jobs0", None)]
    assert shown(await store.children("jobs/a/")) == [("jobs/a/1", None), ("jobs/a/2/", 1)]
    assert shown(await store.children("nothing/")) == []


async def test_a_large_folder_is_counted(store: limpet.Store) -> None:
    """`children` gives the keys directly below a prefix, and the folders there with the number of keys in each."""
    for folder in ("l", "m"):
        for start in range(0, 1200, 100):
            batch = store.batch()
            for number in range(start, start + 100):
                batch = batch.put(f"k/{folder}/{number:04}", number)
            await batch.commit()
    await store.put("k/m/deep/er", 1)
    await store.put("k/n", 1)
    scans, engine = 0, session_of(store).engine

    class Watching:
        """Counts the entries that scans return."""

        def __getattr__(self, name: str) -> Any:
            return getattr(engine, name)

        async def scan(self, *args: Any, **options: Any) -> Any:
            nonlocal scans
            page = await engine.scan(*args, **options)
            scans += len(page.entries)
            return page

    session_of(store).engine = Watching()
    try:
        found = await store.children("k/")
    finally:
        session_of(store).engine = engine

    assert shown(found) == [("k/l/", 1200), ("k/m/", 1201), ("k/n", None)]
    assert scans < 200


async def test_a_delimiter_may_be_any_text(store: limpet.Store) -> None:
    """The key of a folder ends with the delimiter, which may be any text."""
    for key in ("a.b.c", "a.b", "a::b::c", "a::b", "a::", "\U0010ffff\U0010ffff", "é→1", "é→2"):
        await store.put(key, 1)

    assert shown(await store.children(delimiter=".")) == [
        *(("a.", 2), ("a::", None), ("a::b", None), ("a::b::c", None), ("é→1", None), ("é→2", None)),
        ("\U0010ffff\U0010ffff", None),
    ]
    assert shown(await store.children("a", delimiter="::")) == [("a.b", None), ("a.b.c", None), ("a::", 3)]
    assert shown(await store.children("a::", delimiter="::")) == [("a::", None), ("a::b", None), ("a::b::", 1)]
    assert shown(await store.children("é", delimiter="→")) == [("é→", 2)]
    assert shown(await store.children("\U0010ffff", delimiter="\U0010ffff")) == [("\U0010ffff\U0010ffff", 1)]


@pytest.mark.refused_early
@pytest.mark.parametrize(
    "options", [{"delimiter": ""}, {"delimiter": "\0"}, {"delimiter": 1}, {"limit": 0}, {"limit": 10_001}]
)
async def test_odd_delimiters_and_limits_are_refused(store: limpet.Store, options: dict[str, Any]) -> None:
    """The key of a folder ends with the delimiter, which may be any text."""
    with pytest.raises(InvalidValue):
        await store.children(**options)


async def test_children_come_in_pages(store: limpet.Store) -> None:
    """`children` come in key order, in pages that go on after a key or a folder."""
    random = Random(5)
    keys = sorted({"".join(random.choices("ab/", k=random.randint(1, 6))) for _ in range(250)})
    for start in range(0, len(keys), 128):
        batch = store.batch()
        for key in keys[start : start + 128]:
            batch = batch.put(key, 1)
        await batch.commit()

    for prefix in ("", "a", "a/", "b/a", "/"):
        expected: dict[str, int | None] = {}
        for key in keys:
            if key.startswith(prefix):
                head, mark, _ = key[len(prefix) :].partition("/")
                name = prefix + head + mark
                expected[name] = (expected.get(name) or 0) + 1 if mark else None
        for limit in (1, 3, 1000):
            found: list[tuple[str, int | None]] = []
            after: str | None = None
            while True:
                page = await store.children(prefix, limit=limit, after=after)
                assert len(page.children) <= limit
                found += shown(page)
                if not page.truncated:
                    break
                after = page.cursor
            assert found == list(expected.items()), (prefix, limit)


async def test_namespaces_are_listed(store: limpet.Store, open_store: OpenStore) -> None:
    """`namespaces` gives the names of all namespaces of the engine that were written to, sorted."""
    other = store.namespace(f"{store.name}-other")
    assert not {store.name, other.name} & {*(await store.namespaces())}

    await store.put("k", 1)
    await other.put("k", 1)

    found = await (await open_store()).namespaces()
    assert {store.name, other.name} <= {*found}
    assert found == sorted(found)
