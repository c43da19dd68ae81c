"""What is in Redis, as other programs see it, and what the engine makes of the server's settings."""

from __future__ import annotations

import asyncio

import pytest

import limpet
from limpet.errors import InvalidValue, PermissionDenied, Unavailable
from tests.engines import unique
from tests.redis.support import command, server
from tests.servers import redis


async def test_a_record_is_a_hash_of_exactly_its_fields() -> None:
    """Raw bytes are themselves, so a program that knows nothing of Limpet reads what it expects."""
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        await store.record("state:tasks:email-send:job_1").put({"state": b"pending", "updated_at": b"1700000000000"})

        found = await command(store, "HGETALL", f"{{{store.name}}}:state:tasks:email-send:job_1")

        assert dict(zip(found[::2], found[1::2], strict=True)) == {
            b"state": b"pending",
            b"updated_at": b"1700000000000",
        }


async def test_without_a_hash_tag_keys_are_as_the_document_writes_them() -> None:
    async with limpet.open(f"{server()}?hash_tag=none", namespace=unique(), sweep=False) as store:
        await store.record("state:job_1").put({"state": b"pending"})

        assert await command(store, "HGETALL", f"{store.name}:state:job_1") == [b"state", b"pending"]


@pytest.mark.parametrize(
    "field", [b"", b"\0", b"\0\0", b"\0x", b"x", b'"x"', b"\xff\0", "", "\0", "x", 1, None, {"a": [""]}]
)
async def test_any_field_comes_back(field: object) -> None:
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        await store.record("job").put({"field": field})
        await store.record("job").set(other=1)

        assert dict((await store.record("job").fields()) or {}) == {"field": field, "other": 1}


async def test_nothing_is_left_of_a_namespace_whose_keys_have_ended() -> None:
    """Except the counters and the log."""
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        await store.put("plain", 1, ttl=60)
        await store.record("job").put({"state": "open"})
        await store.put("was a record", limpet.Fields(a=1))
        await store.put("was a record", 1)
        for key in ("plain", "job", "was a record"):
            await store.delete(key)

        found = await command(store, "KEYS", f"*{store.name}*")

        assert sorted(found) == [f"limpet:{{{store.name}}}:{name}".encode() for name in ("data", "log")]


@pytest.mark.parametrize("look", ["get", "keys", "scan", "due"])
async def test_a_read_that_meets_something_expired_records_the_time_once(look: str) -> None:
    """The clock may be set back before the sweeper comes. A read that meets nothing of the kind writes nothing."""
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:

        async def read() -> bytes:
            match look:
                case "get":
                    await store.get("for a while")
                    await store.get("for an hour")
                case "keys":
                    await store.keys()
                case "scan":
                    assert [entry.key async for entry in store.scan()]
                case _:
                    await store._session.engine.due(store.name)
            counters: bytes = await command(store, "HGET", f"limpet:{{{store.name}}}:data", "")
            return counters

        await store.put("for an hour", 1, ttl=3600)
        before = await read()
        await asyncio.sleep(0.01)
        assert await read() == before
        entry = await store.put("for a while", 1, ttl=0.001)
        await asyncio.sleep(0.01)

        after = await read()

        assert entry.updated_ms < int.from_bytes(after[16:24], "big") >= (entry.expires_ms or 0)
        await asyncio.sleep(0.01)
        assert await read() == after


async def test_where_nothing_can_be_written_reads_answer_all_the_same() -> None:
    with redis() as running:
        async with limpet.open(running.url, sweep=False) as store:
            await store.put("for a while", "x" * 1000, ttl=0.05)
            await asyncio.sleep(0.1)
            await command(store, "CONFIG", "SET", "maxmemory", 1)

            assert await store.get("for a while") is None
            assert (await store.keys()).keys == []
            assert len(await store._session.engine.due(store.name)) == 1


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"appendonly": "no"}, "none"),
        ({"appendonly": "yes", "appendfsync": "everysec"}, "seconds"),
        ({"appendonly": "yes", "appendfsync": "no"}, "process"),
        ({"appendonly": "yes", "appendfsync": "always"}, "disk"),
        ({"appendonly": "yes", "appendfsync": "always", "no-appendfsync-on-rewrite": "yes"}, "process"),
    ],
)
async def test_durability_is_read_from_the_server(settings: dict[str, str], word: str) -> None:
    with redis(settings) as running:
        async with limpet.open(running.url, sweep=False) as store:
            assert store.traits.durability == word


async def test_a_server_that_evicts_is_refused_unless_that_is_allowed() -> None:
    with redis({"maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"}) as running:
        with pytest.raises(InvalidValue, match=r"maxmemory-policy allkeys-lru.*\?eviction=allow"):
            await limpet.open(running.url)
        async with limpet.open(f"{running.url}?eviction=allow", sweep=False) as store:
            await store.put("key", 1)


async def test_a_replica_is_refused() -> None:
    with (
        redis() as primary,
        redis({"replicaof": f"127.0.0.1 {primary.port}"}) as replica,
        pytest.raises(Unavailable, match="replica"),
    ):
        await limpet.open(replica.url)


async def test_a_wrong_password_is_refused_and_not_shown() -> None:
    with redis({"requirepass": "right"}) as running:
        with pytest.raises(PermissionDenied) as refused:
            await limpet.open(running.url.replace("redis://", "redis://:hush-hush@"))
        assert "hush" not in str(refused.value)


@pytest.mark.parametrize("kind", ["valkey", "redis"])
async def test_the_oldest_and_the_newest_server_answer_alike(kind: str) -> None:
    with redis({}, kind) as running:
        async with limpet.open(running.url, sweep=False) as store:
            async with store.watch() as events:
                await store.put("a", {"n": 1})
                assert (await anext(events)).value == {"n": 1}
            assert await store.add("count", 2**62) == 2**62
            assert (await store.put("a", 2, expect=limpet.field("n") == 1)).version == 2
            assert (await store.keys()).keys == ["a", "count"]
            async with store.lock("door", ttl=30) as lock:
                await store.put("b", 1, fence=lock)
            assert (await store.put("c", 1, request_id="x")) == (await store.put("c", 1, request_id="x"))
            assert len([event async for event in store.history("a")]) == 2


async def test_without_a_hash_tag_no_namespace_takes_the_names_of_ours() -> None:
    async with limpet.open(f"{server()}?hash_tag=none", namespace="limpet", sweep=False) as store:
        with pytest.raises(InvalidValue, match="hash tag"):
            await store.put("key", 1)
