"""Stores on Redis: Limpet, its peers, and what the driver can do in the same time.

One server, with its append-only file synced every second, serves all of them; each has its
own database. The driver's limit gets 64 calls handed over as one list, and makes one
command of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import limpet
from bench.contenders import Contender, LimpetWriter, Role, Void, Writer, load
from bench.workload import Job, decode, encode

EXPECTED = {"appendonly": "yes", "appendfsync": "everysec"}


class OnRedis(Contender):
    """A contender on the server whose URL it is given."""

    expects = EXPECTED
    keeps_files = False
    database: ClassVar[int]

    def __init__(self, url: str) -> None:
        self.url = f"{url.rpartition('/')[0]}/{self.database}"

    async def settings(self) -> dict[str, str]:
        async with load("redis.asyncio").Redis.from_url(self.url, decode_responses=True) as client:
            return {name: (await client.config_get(name))[name] for name in EXPECTED}


class LimpetRedis(LimpetWriter, OnRedis):
    name = "Limpet"
    note = "versions, revisions, a stream of every change, TTL"
    database = 1

    async def open(self, folder: Path) -> None:
        self.store = await limpet.open(self.url)


class RedisPy(OnRedis):
    name = "redis-py asyncio"
    note = "SET and GET of the encoded value, through its pool"
    database = 2

    async def open(self, folder: Path) -> None:
        self.client = load("redis.asyncio").Redis.from_url(self.url)

    async def put(self, key: str, value: Any) -> None:
        await self.client.set(key, encode(value))

    async def get(self, key: str) -> Any:
        return decode(await self.client.get(key))

    async def put_all(self, jobs: list[Job]) -> None:
        await self.client.mset({key: encode(value) for key, value in jobs})

    async def get_all(self, jobs: list[Job]) -> list[Any]:
        return [decode(text) for text in await self.client.mget([key for (key,) in jobs])]

    async def fill(self, jobs: Iterable[Job]) -> None:
        await self.put_all(list(jobs))

    async def close(self) -> None:
        await self.client.aclose()


class RawRedis(RedisPy):
    """The driver with the callers' calls already in hand."""

    name = "redis-py, 64 a command"
    role = "limit"
    note = "one MSET, one MGET; a key and a value, nothing else"
    database = 3

    async def put(self, key: str, value: Any) -> None:
        await self.put_all([(key, value)])

    async def get(self, key: str) -> Any:
        return (await self.get_all([(key,)]))[0]


class PyKeyValueRedis(OnRedis):
    name = "py-key-value RedisStore"
    note = "collections, TTL"
    database = 4

    async def open(self, folder: Path) -> None:
        self._store = load("key_value.aio.stores.redis").RedisStore(url=self.url)
        await self._store.setup()

    async def put(self, key: str, value: Any) -> None:
        await self._store.put(key, value)

    async def get(self, key: str) -> Any:
        return await self._store.get(key)


class AiocacheRedis(OnRedis):
    name = "aiocache RedisCache"
    note = "SET and GET through its JSON serializer"
    database = 5

    async def open(self, folder: Path) -> None:
        place = urlsplit(self.url)
        serializer = load("aiocache.serializers").JsonSerializer()
        self._store = load("aiocache.backends.redis").RedisCache(
            serializer=serializer, endpoint=place.hostname, port=place.port, db=self.database, timeout=None
        )

    async def put(self, key: str, value: Any) -> None:
        await self._store.set(key, value)

    async def get(self, key: str) -> Any:
        return await self._store.get(key)

    async def close(self) -> None:
        await self._store.close()


class Scripted(Writer, OnRedis):
    """A guarded put and a batch as one would write them by hand: one script call each, and a stream of the changes."""

    name = "redis-py, a script a call"
    role: ClassVar[Role] = "limit"
    note = "EVALSHA: compare, write the hash, XADD the change; no TTL, nothing tried again"
    database = 6

    async def open(self, folder: Path) -> None:
        self.client = load("redis.asyncio").Redis.from_url(self.url)
        self._guarded = await self.client.script_load(_GUARDED)
        self._batch = await self.client.script_load(_BATCH)
        self._revisions: dict[str, bytes] = {}

    async def put(self, key: str, value: Any) -> None:
        await self.batch([(key, value)])

    async def get(self, key: str) -> Any:
        return decode(await self.client.hget(key, "value"))

    async def load(self, keys: Iterable[str]) -> int:
        wanted = list(keys)
        async with self.client.pipeline(transaction=False) as pipeline:
            for key in wanted:
                pipeline.hmget(key, "revision", "version")
            rows = await pipeline.execute()
        self._revisions = {key: revision for key, (revision, _) in zip(wanted, rows, strict=True)}
        written = sum(int(version) for _, version in rows)
        if written != await self.client.xlen(_CHANGES):
            raise Void(f"{self.name}: {written} writes, and another number of changes in the stream")
        return written

    async def guarded(self, key: str, value: Any) -> None:
        revision = await self.client.evalsha(self._guarded, 2, key, _CHANGES, self._revisions[key], encode(value))
        if revision is None:
            raise Void(f"{self.name}: a guard has failed that holds")
        self._revisions[key] = revision

    async def batch(self, jobs: Sequence[Job]) -> None:
        keys, bodies = [key for key, _ in jobs], [encode(value) for _, value in jobs]
        await self.client.evalsha(self._batch, len(jobs) + 1, _CHANGES, *keys, *bodies)

    async def fill(self, jobs: Iterable[Job]) -> None:
        pending = list(jobs)
        for start in range(0, len(pending), 500):
            await self.batch(pending[start : start + 500])

    async def close(self) -> None:
        await self.client.aclose()


_CHANGES = "changes"
# The id of the change is the revision.
_GUARDED = """
if redis.call('HGET', KEYS[1], 'revision') ~= ARGV[1] then
    return false
end
local revision = redis.call('XADD', KEYS[2], '*', 'key', KEYS[1], 'value', ARGV[2])
redis.call('HSET', KEYS[1], 'value', ARGV[2], 'revision', revision)
redis.call('HINCRBY', KEYS[1], 'version', 1)
return revision
"""
_BATCH = """
local revisions = {}
for number, value in ipairs(ARGV) do
    local key = KEYS[number + 1]
    local revision = redis.call('XADD', KEYS[1], '*', 'key', key, 'value', value)
    redis.call('HSET', key, 'value', value, 'revision', revision)
    redis.call('HINCRBY', key, 'version', 1)
    revisions[number] = revision
end
return revisions
"""

CONTENDERS: tuple[type[OnRedis], ...] = (LimpetRedis, RedisPy, PyKeyValueRedis, AiocacheRedis, RawRedis)
