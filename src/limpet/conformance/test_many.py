"""Verbs on many keys: reading several at one moment."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import limpet
from limpet.conformance.conftest import Elapse
from limpet.errors import InvalidKey, InvalidValue

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
