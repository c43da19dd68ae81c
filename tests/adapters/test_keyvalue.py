"""The adapter for py-key-value-aio: its protocols, and what is added to them."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from key_value.aio.errors import (
    DeserializationError,
    InvalidKeyError,
    InvalidTTLError,
    SerializationError,
    ValueTooLargeError,
)
from key_value.aio.protocols.key_value import (
    AsyncCullProtocol,
    AsyncDestroyCollectionProtocol,
    AsyncDestroyStoreProtocol,
    AsyncEnumerateCollectionsProtocol,
    AsyncEnumerateKeysProtocol,
    AsyncKeyValue,
    AsyncKeyValueProtocol,
)
from key_value.aio.stores.memory import MemoryStore

import limpet
from limpet.adapters.keyvalue import KeyValue
from tests.engines import ENGINES, unique, url_of

NAMES = ["", "a", "a/b", "/", "%2F", "~", "~a", "*", "ä 世", "\0", "\ud800", "a" * 2000, "ä/" * 600, "a" * 1024]


@pytest.fixture
async def kv(url: str) -> AsyncIterator[KeyValue]:
    """The adapter on an engine."""
    async with KeyValue(url, namespace=unique()) as opened:
        yield opened


def test_every_protocol_is_there() -> None:
    kv: AsyncKeyValue = KeyValue("memory:")

    for protocol in (
        *(AsyncKeyValueProtocol, AsyncEnumerateKeysProtocol, AsyncEnumerateCollectionsProtocol, AsyncCullProtocol),
        *(AsyncDestroyStoreProtocol, AsyncDestroyCollectionProtocol),
    ):
        assert isinstance(kv, protocol)


# Merging ----------------------------------------------------------------------


async def read_modify_write(kv: AsyncKeyValue, name: str) -> None:
    """What FastMCP's sessions do for one tool: read the whole, change a member, write the whole."""
    raw = await kv.get("session") or {"state": {}}
    state = {**raw["state"], name: 1}
    await asyncio.sleep(0.001)
    await kv.put("session", {**raw, "state": state})


async def run_tools(kv: AsyncKeyValue, count: int = 20) -> set[str]:
    await asyncio.gather(*(read_modify_write(kv, f"tool-{number}") for number in range(count)))
    kept = await kv.get("session")
    return set() if kept is None else set(kept["state"])


async def test_twenty_tools_of_one_session_keep_all_their_values(kv: KeyValue) -> None:
    assert await run_tools(kv) == {f"tool-{number}" for number in range(20)}


async def test_without_merging_they_lose_values(url: str) -> None:
    """Why it matters: the framework's own store in memory, and ours without merging, keep fewer than 20."""
    async with KeyValue(url, merge=False, namespace=unique()) as plain:
        assert len(await run_tools(plain)) < 20
    assert len(await run_tools(MemoryStore())) < 20


async def test_tools_of_two_adapters_keep_all_their_values(url: str) -> None:
    """Two adapters have nothing in common but the engine, like two processes."""
    namespace = unique()
    async with KeyValue(url, namespace=namespace) as one, KeyValue(url, namespace=namespace) as other:
        await asyncio.gather(*(read_modify_write([one, other][number % 2], f"tool-{number}") for number in range(20)))
        kept = await one.get("session")
        assert kept is not None
        assert len(kept["state"]) == 20


PROCESS = """
import asyncio, sys
from limpet.adapters.keyvalue import KeyValue

async def tool(kv, name):
    raw = await kv.get("session") or {}
    await asyncio.sleep(0.001)
    await kv.put("session", {**raw, name: 1})

async def main():
    async with KeyValue(sys.argv[1], namespace=sys.argv[2]) as kv:
        await asyncio.gather(*(tool(kv, f"{sys.argv[3]}-{number}") for number in range(10)))

asyncio.run(main())
"""


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "memory"])
async def test_tools_of_two_processes_keep_all_their_values(engine: str, tmp_path: Path) -> None:
    url, namespace = url_of(engine, tmp_path), unique()
    async with KeyValue(url, namespace=namespace) as kv:
        await kv.put("session", {})
        command = [sys.executable, "-c", PROCESS, url, namespace]
        running = [await asyncio.create_subprocess_exec(*command, name) for name in "ab"]
        assert [await process.wait() for process in running] == [0, 0]
        kept = await kv.get("session")
        assert kept is not None
        assert len(kept) == 20


async def someone_else(kv: KeyValue, value: dict[str, Any]) -> None:
    """Read and write in a task of its own."""

    async def work() -> None:
        await kv.get("k")
        await kv.put("k", value)

    await asyncio.create_task(work())


async def test_a_put_keeps_what_others_wrote_since_the_read(kv: KeyValue) -> None:
    await kv.put("k", {"a": 1, "b": 1, "c": 1})
    await someone_else(kv, {"a": 2, "b": 1, "d": 2})

    await kv.put("k", {"a": 1, "b": 3, "c": 1, "e": 3})

    assert await kv.get("k") == {"a": 2, "b": 3, "d": 2, "e": 3}


async def test_of_two_changes_of_a_member_the_later_wins(kv: KeyValue) -> None:
    await kv.put("k", {"a": 1})
    await someone_else(kv, {"a": 2})

    await kv.put("k", {"a": 3})

    assert await kv.get("k") == {"a": 3}


async def test_a_second_put_after_a_merge_deletes_nothing_of_others(kv: KeyValue) -> None:
    """The caller has never seen the member that was merged in, so that its next value lacks it is no deletion."""
    await kv.put("k", {"a": 1})
    await someone_else(kv, {"a": 1, "theirs": 2})
    await kv.put("k", {"a": 3})

    await kv.put("k", {"a": 4})
    assert await kv.get("k") == {"a": 4, "theirs": 2}

    await kv.put("k", {"a": 4})
    assert await kv.get("k") == {"a": 4}


async def test_what_was_deleted_or_expired_is_written_whole(kv: KeyValue) -> None:
    await kv.put("k", {"a": 1})
    await asyncio.create_task(kv.delete("k"))
    await kv.put("k", {"a": 1, "b": 2})
    assert await kv.get("k") == {"a": 1, "b": 2}

    await kv.delete("k")
    await kv.put("k", {"a": 1})
    assert await kv.get("k") == {"a": 1}

    await kv.destroy_collection("default_collection")
    await kv.put("k", {"a": 2})
    assert await kv.get("k") == {"a": 2}


async def test_a_put_by_a_task_that_has_read_nothing_replaces_the_value() -> None:
    """It is the library's contract for put: only a caller that has seen a member can have kept or deleted it."""
    async with KeyValue("memory:") as kv:
        await asyncio.create_task(kv.put("k", {"a": 1}))
        await asyncio.create_task(kv.put("k", {"b": 1}))
        assert await kv.get("k") == {"b": 1}


async def test_put_many_merges_each_key(kv: KeyValue) -> None:
    await kv.put_many(["k", "l"], [{"a": 1}, {"a": 1}])
    await someone_else(kv, {"a": 1, "b": 2})

    await kv.put_many(["k", "l", "m"], [{"a": 3}, {"a": 3}, {"a": 3}])

    assert await kv.get_many(["k", "l", "m"]) == [{"a": 3, "b": 2}, {"a": 3}, {"a": 3}]


async def test_a_value_that_was_read_may_be_changed_in_place(kv: KeyValue) -> None:
    """What the adapter remembers is not the object that its caller has."""
    await kv.put("k", {"inner": {"a": 1}})
    value = await kv.get("k")
    assert value is not None
    await someone_else(kv, {"inner": {"a": 1, "b": 2}})
    value["inner"]["c"] = 3

    await kv.put("k", value)

    assert await kv.get("k") == {"inner": {"a": 1, "b": 2, "c": 3}}


# The contract of the library ----------------------------------------------------


@pytest.mark.parametrize("merge", [True, False])
async def test_it_answers_as_the_store_of_the_library_does(url: str, merge: bool) -> None:
    """The same random calls, one after the other, to both."""
    theirs, dice = MemoryStore(), random.Random(7)
    async with KeyValue(url, merge, namespace=unique()) as ours:
        for step in range(150):
            key, keys = dice.choice("abc"), dice.sample("abcd", dice.randint(0, 4))
            collection = dice.choice([None, "one", "t/wo"])
            value = {dice.choice("xyz"): dice.choice([1, 1.5, None, [1], {"n": step}]), "step": step % 3}
            calls: list[tuple[str, dict[str, Any]]] = [
                ("get", {"key": key}),
                ("ttl", {"key": key}),
                ("put", {"key": key, "value": value}),
                ("put", {"key": key, "value": value}),
                ("delete", {"key": key}),
                ("get_many", {"keys": keys}),
                ("ttl_many", {"keys": keys}),
                ("put_many", {"keys": keys, "values": [value] * len(keys)}),
                ("delete_many", {"keys": keys}),
            ]
            call, arguments = dice.choice(calls)
            arguments["collection"] = collection
            assert await getattr(ours, call)(**arguments) == await getattr(theirs, call)(**arguments), (step, call)
            assert sorted(await ours.keys(collection)) == sorted(await theirs.keys(collection))


async def test_any_name_is_a_key_and_a_collection(kv: KeyValue) -> None:
    for collection in filter(None, NAMES):
        await kv.put_many(NAMES, [{"at": number} for number in range(len(NAMES))], collection=collection)
        assert await kv.get_many(NAMES, collection=collection) == [{"at": number} for number in range(len(NAMES))]
        assert sorted(await kv.keys(collection)) == sorted(NAMES)
    assert sorted(await kv.collections()) == sorted(filter(None, NAMES))

    for collection in filter(None, NAMES):
        assert await kv.destroy_collection(collection)
        assert not await kv.destroy_collection(collection)
    assert await kv.collections() == []


async def test_listing_takes_a_limit(kv: KeyValue) -> None:
    for number in range(5):
        await kv.put_many(["a", "b", "c"], [{}] * 3, collection=f"c{number}")

    assert await kv.keys("c1", limit=2) == ["a", "b"]
    assert await kv.keys("c1", limit=0) == []
    assert await kv.collections(limit=3) == ["c0", "c1", "c2"]


async def test_names_that_are_too_long_to_be_kept_are_refused() -> None:
    async with KeyValue("memory:") as kv:
        with pytest.raises(InvalidKeyError):
            await kv.put("k" * 10_000, {})


async def test_destroying_leaves_other_keys_of_the_namespace(url: str) -> None:
    async with limpet.open(url, namespace=unique()) as store:
        await store.put("mine", 1)
        kv = KeyValue(store)
        await kv.put("k", {"a": 1})

        assert await store.get("kv/default_collection/k") == {"a": 1}
        assert await kv.destroy()
        assert (await store.keys()).keys == ["mine"]
        assert await kv.get("k") is None


async def test_an_entry_expires(kv: KeyValue) -> None:
    await kv.put("k", {"a": 1}, ttl=0.3)
    await kv.put("l", {"a": 1}, ttl=100)
    await kv.put("m", {"a": 1})

    value, remaining = await kv.ttl("k")
    assert value == {"a": 1}
    assert remaining is not None
    assert 0 <= remaining <= 0.3
    (_, long), (_, never), absent = await kv.ttl_many(["l", "m", "n"])
    assert long is not None
    assert 95 < long <= 100
    assert never is None
    assert absent == (None, None)

    await asyncio.sleep(0.35)
    assert await kv.get("k") is None
    await kv.cull()
    assert await kv.keys() == ["l", "m"]


async def test_a_merge_sets_the_time_to_live_of_its_own_put(kv: KeyValue) -> None:
    await kv.put("k", {"a": 1})
    await someone_else(kv, {"a": 1, "b": 2})

    await kv.put("k", {"a": 2}, ttl=100)

    assert (await kv.ttl("k"))[1] is not None


@pytest.mark.parametrize("ttl", [0, -1, True, "soon", float("nan"), float("inf"), 1e300])
async def test_a_wrong_ttl_is_refused(ttl: Any) -> None:
    async with KeyValue("memory:") as kv:
        with pytest.raises(InvalidTTLError):
            await kv.put("k", {}, ttl=ttl)
        with pytest.raises(InvalidTTLError):
            await kv.put_many(["k"], [{}], ttl=ttl)
        assert await kv.get("k") is None


@pytest.mark.parametrize("value", [{"a": {1}}, {"a": b""}, {1: 1}, {"a": float("nan")}, {"a": 2**63}])
async def test_a_value_that_is_not_json_is_refused(value: Any) -> None:
    async with KeyValue("memory:") as kv:
        for _ in range(2):  # The second time there is a base.
            with pytest.raises(SerializationError):
                await kv.put("k", value)
            with pytest.raises(SerializationError):
                await kv.put_many(["l", "k"], [{}, value])
            assert await kv.get("k") is None


async def test_other_mistakes_of_a_caller_are_refused() -> None:
    async with KeyValue("memory:") as kv:
        with pytest.raises(ValueTooLargeError):
            await kv.put("k", {"a": "x" * 1_000_000})
        with pytest.raises(TypeError):
            await kv.put("k", [1])  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            await kv.put(1, {})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="2 values for 1 keys"):
            await kv.put_many(["k"], [{}, {}])


async def test_more_values_than_a_batch_takes_are_stored(kv: KeyValue) -> None:
    """More than 128 writes, and more than 4 MB."""
    keys = [f"k{number:03}" for number in range(150)]
    await kv.put_many(keys, [{"a": "x" * 40_000}] * 150)

    assert await kv.keys() == keys
    assert sum(value is not None for value in await kv.get_many(keys)) == 150
    assert await kv.delete_many([*keys, "none", keys[0]]) == 150


async def test_what_the_adapter_has_not_written_is_refused() -> None:
    async with limpet.open("memory:") as store:
        await store.put("kv/default_collection/k", 5)
        kv = KeyValue(store)

        with pytest.raises(DeserializationError):
            await kv.get("k")
        await kv.put("k", {"a": 1})
        assert await kv.get("k") == {"a": 1}

        await store.put("kv/default_collection/k", limpet.Fields(raw=b"x"))
        await kv.put("k", {"a": 2})
        assert await kv.get("k") == {"a": 2}


# Opening and closing --------------------------------------------------------------


def test_one_adapter_serves_one_loop_after_the_other(url: str) -> None:
    """It is made where no loop runs, as at the import of a module."""
    kv = KeyValue(url, namespace=unique())

    async def add(number: int, close: bool) -> Any:
        await kv.put(f"k{number}", {"a": number})
        found = await kv.keys()
        if close:
            await kv.close()
        return found

    assert asyncio.run(add(1, close=True)) == ["k1"]
    assert asyncio.run(add(2, close=True)) == ["k1", "k2"]


@pytest.mark.parametrize("engine", ["memory:", "sqlite:///{folder}/state.db"])
def test_a_loop_may_end_without_closing(engine: str, tmp_path: Path) -> None:
    kv = KeyValue(engine.format(folder=tmp_path))

    async def add(number: int) -> list[str]:
        await kv.put(f"k{number}", {})
        return await kv.keys()

    async def end() -> None:
        assert await add(3) == ["k1", "k2", "k3"]
        await kv.close()

    assert asyncio.run(add(1)) == ["k1"]
    assert asyncio.run(add(2)) == ["k1", "k2"]
    asyncio.run(end())


def test_two_loops_in_two_threads_have_a_store_each(url: str) -> None:
    kv = KeyValue(url, namespace=unique())
    failures: list[BaseException] = []

    async def work(name: str) -> None:
        async with kv:
            for number in range(5):
                await kv.put(f"{name}{number}", {})

    def run(name: str) -> None:
        try:
            asyncio.run(work(name))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    async def count() -> int:
        async with kv:
            return len(await kv.keys())

    assert failures == []
    assert asyncio.run(count()) == 10


async def test_many_first_calls_open_one_store(tmp_path: Path) -> None:
    kv = KeyValue(f"sqlite:///{tmp_path}/state.db")

    stores = await asyncio.gather(*(kv._lazy.open() for _ in range(10)))

    assert len({id(store) for store in stores}) == 1
    await kv.close()


async def test_closing_ends_what_a_url_has_opened_and_leaves_a_given_store_open() -> None:
    kv = KeyValue("memory:")
    async with kv:
        await kv.put("k", {"a": 1})
        opened = await kv._lazy.open()
    with pytest.raises(limpet.errors.Closed):
        await opened.get("k")
    assert await kv.get("k") == {"a": 1}
    await kv.close()
    await kv.close()

    async with limpet.open("memory:") as store:
        async with KeyValue(store):
            pass
        assert await store.get("k") is None


def test_only_a_url_or_an_async_store_is_taken() -> None:
    with limpet.sync.open("memory:") as store, pytest.raises(TypeError, match=r"limpet\.open"):
        KeyValue(store)  # type: ignore[arg-type]


def test_the_default_is_the_store_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIMPET_URL", f"memory:{unique()}")

    async def work() -> Any:
        async with KeyValue() as kv:
            await kv.put("k", {"a": 1})
            return await kv.get("k")

    assert asyncio.run(work()) == {"a": 1}
