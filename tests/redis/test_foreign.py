"""Another program wrote over a record, or has data of its own where a record would be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

import limpet
from limpet.errors import Corrupt, TypeMismatch
from tests.engines import unique
from tests.redis.support import command, server


@pytest.fixture
async def store() -> AsyncIterator[limpet.Store]:
    """A store with a record whose hash another program has replaced by a string."""
    async with limpet.open(server(), namespace=unique(), sweep=False) as opened:
        await opened.put("sound", 1)
        await opened.record("job").put({"x": 1})
        await command(opened, "SET", f"{{{opened.name}}}:job", "foreign")
        yield opened


async def settle(*calls: Any) -> list[str]:
    return [type(one).__name__ for one in await asyncio.gather(*calls, return_exceptions=True)]


async def assert_whole(store: limpet.Store) -> None:
    """The log has every change of the map, the totals count both, and writing goes on."""
    engine = store._session.engine
    status = await store.status()
    log = (await engine.changes(store.name, 0)).changes
    keys = (await store.keys()).keys
    assert [change.revision for change in log] == sorted({change.revision for change in log})
    last = {change.key: change for change in log}
    assert {key for key, change in last.items() if change.after is not None} == set(keys)
    assert (status.keys, status.log_changes) == (len(keys), len(log))
    assert (await store.put("after", 1)).revision > log[-1].revision


async def test_only_the_write_of_that_record_fails(store: limpet.Store) -> None:
    record = store.record("job")

    results = await settle(store.put("b", 1), record.set(y=2), store.touch("job", 60), store.put("c", 1))

    assert results == ["Entry", "Corrupt", "Corrupt", "Entry"]
    assert await store.get("b") == await store.get("c") == 1
    await assert_whole(store)


async def test_a_batch_with_that_record_leaves_no_trace(store: limpet.Store) -> None:
    with pytest.raises(Corrupt):
        await store.batch().put("sound", 2).set("job", {"y": 2}).put("fresh", 1).commit()

    assert await store.get("sound") == 1
    assert await store.get("fresh") is None
    await assert_whole(store)


WRITES: dict[str, Callable[[limpet.Store], Awaitable[Any]]] = {
    "set": lambda store: store.record("job").set(y=2),
    "swap": lambda store: store.record("job").swap("x", 1, 2),
    "touch": lambda store: store.touch("job", 60),
    "persist": lambda store: store.persist("job"),
    "batch with a set": lambda store: store.batch().put("sound", 2).set("job", {"y": 2}).commit(),
    "batch with a touch": lambda store: store.batch().put("sound", 2).touch("job", 60).put("fresh", 1).commit(),
}


@pytest.mark.parametrize("write", WRITES)
async def test_a_write_of_that_record_fails_before_anything_is_written(store: limpet.Store, write: str) -> None:
    """The server does not take back what a script has written before an error."""
    before = await everything(store)

    with pytest.raises(Corrupt):
        await WRITES[write](store)

    assert await everything(store) == before
    await assert_whole(store)


async def everything(store: limpet.Store) -> dict[bytes, Any]:
    """All that the server holds of a namespace, without its counters, which have the time."""
    found = {}
    for key in sorted(await command(store, "KEYS", f"*{{{store.name}}}*")):
        if key.endswith(b":data"):
            fields = await command(store, "HGETALL", key)
            pairs = dict(zip(fields[::2], fields[1::2], strict=True))
            found[key] = {name: text for name, text in pairs.items() if name}
        else:
            found[key] = await command(store, "DUMP", key)
    return found


async def test_only_the_read_of_that_record_fails(store: limpet.Store) -> None:
    assert await settle(store.get("sound"), store.get("job"), store.get("missing")) == ["int", "Corrupt", "NoneType"]


async def test_it_can_be_put_anew_and_deleted(store: limpet.Store) -> None:
    assert (await store.record("job").put({"y": 2})).version == 2
    assert dict(await store.record("job").fields() or {}) == {"y": 2}

    await command(store, "SET", f"{{{store.name}}}:job", "foreign")
    assert await store.delete("job")
    await assert_whole(store)


async def test_it_can_be_put_anew_and_deleted_by_a_process_that_has_not_seen_it(store: limpet.Store) -> None:
    async with limpet.open(server(), namespace=store.name, sweep=False) as other:
        assert (await other.put("job", {"y": 2}, ttl=60)).version == 2

    await store.record("job").put({"x": 1})
    await command(store, "SET", f"{{{store.name}}}:job", "foreign")
    async with limpet.open(server(), namespace=store.name, sweep=False) as other:
        assert await other.delete("job")
    await assert_whole(store)


# Data of another program, at a key that has no entry ------------------------------------------------------------

FIRST_WRITES: dict[str, Callable[[limpet.Store, str], Awaitable[Any]]] = {
    "put": lambda store, key: store.put(key, 1),
    "put of bytes": lambda store, key: store.put(key, b"1"),
    "put that expires": lambda store, key: store.put(key, 1, ttl=60),
    "create": lambda store, key: store.create(key, 1),
    "add": lambda store, key: store.add(key),
    "put of a record": lambda store, key: store.record(key).put({"x": 1}),
    "set of a field": lambda store, key: store.record(key).set(x=1),
    "batch": lambda store, key: store.batch().put("sound", 2).put(key, 1).commit(),
}
FOREIGN: dict[str, tuple[str, ...]] = {
    "hash": ("HSET", "state", "running"),
    "string": ("SET", "text"),
    "list": ("RPUSH", "item"),
}


@pytest.mark.parametrize("tag", ["namespace", "none"])
@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("write", FIRST_WRITES)
async def test_a_first_write_to_the_key_of_another_program_is_refused(write: str, kind: str, tag: str) -> None:
    async with limpet.open(f"{server()}?hash_tag={tag}", namespace=unique(), sweep=False) as store:
        await store.put("sound", 1)
        redis_key = f"{store.name if tag == 'none' else '{' + store.name + '}'}:tasks:7"
        verb, *rest = FOREIGN[kind]
        await command(store, verb, redis_key, *rest)
        await command(store, "PEXPIRE", redis_key, 600_000)
        dumped, revision = await command(store, "DUMP", redis_key), (await store.status()).revision

        with pytest.raises(TypeMismatch, match="did not write") as refused:
            await FIRST_WRITES[write](store, "tasks:7")

        assert repr(redis_key) in str(refused.value)
        assert kind in str(refused.value)
        assert "running" not in str(refused.value)
        assert await command(store, "DUMP", redis_key) == dumped
        assert await command(store, "PTTL", redis_key) > 0
        assert (await store.status()).revision == revision
        assert await store.get("tasks:7") is None
        await assert_whole(store)


async def test_others_of_the_same_call_are_written() -> None:
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        await command(store, "HSET", f"{{{store.name}}}:b", "state", "running")

        results = await settle(*(store.put(key, 1) for key in "abc"))

        assert results == ["Entry", "TypeMismatch", "Entry"]
        await assert_whole(store)


async def test_a_plain_value_does_not_become_a_record_over_foreign_data() -> None:
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        await store.put("job", 1)
        await command(store, "HSET", f"{{{store.name}}}:job", "state", "running")

        with pytest.raises(TypeMismatch, match="did not write"):
            await store.record("job").put({"x": 1})

        assert (await store.put("job", 2)).version == 2
        assert await store.delete("job")
        assert await command(store, "HGETALL", f"{{{store.name}}}:job") == [b"state", b"running"]


@pytest.mark.parametrize("ended", ["deleted", "expired", "expired as a plain value"])
async def test_a_key_whose_entry_has_ended_is_written_anew(ended: str) -> None:
    """The hash of an expired record lies there until it is swept, and is ours."""
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        if ended == "deleted":
            await store.record("job").put({"x": 1})
            await store.delete("job")
        elif ended == "expired":
            await store.put("job", limpet.Fields({"x": 1}), ttl=0.001)
        else:
            await store.put("job", 1, ttl=0.001)
        while await store.get("job") is not None:
            pass

        assert (await store.record("job").set(y=2)).version == 1
        assert dict(await store.record("job").fields() or {}) == {"y": 2}
        await assert_whole(store)
