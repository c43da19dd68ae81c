"""Stores in memory: Limpet, its peers, and what a dict can do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import limpet
from bench.contenders import AnyContender, BlockingContender, Contender, load
from bench.workload import decode, encode


class LimpetMemory(Contender):
    name = "Limpet"
    role = "limpet"
    note = "versions, revisions, a log of every change, TTL"

    async def open(self, folder: Path) -> None:
        self._store = await limpet.open("memory:")

    async def put(self, key: str, value: Any) -> None:
        await self._store.put(key, value)

    async def get(self, key: str) -> Any:
        return await self._store.get(key)

    async def close(self) -> None:
        await self._store.close()


class LitestarMsgspec(Contender):
    name = "litestar + msgspec"
    note = "stores bytes, so the value is encoded for it; TTL"

    async def open(self, folder: Path) -> None:
        self._store = load("litestar.stores.memory").MemoryStore()
        self._encode: Callable[[Any], bytes] = encode
        self._decode: Callable[[bytes], Any] = decode

    async def put(self, key: str, value: Any) -> None:
        await self._store.set(key, self._encode(value))

    async def get(self, key: str) -> Any:
        return self._decode(await self._store.get(key))


class LitestarOrjson(LitestarMsgspec):
    name = "litestar + orjson"

    async def open(self, folder: Path) -> None:
        await super().open(folder)
        orjson = load("orjson")
        self._encode, self._decode = orjson.dumps, orjson.loads


class Aiocache(Contender):
    name = "aiocache"
    note = "TTL; its per-call timeout is switched off"

    async def open(self, folder: Path) -> None:
        # The default timeout wraps each call in asyncio.wait_for, which costs more than the call.
        self._cache = load("aiocache").SimpleMemoryCache(timeout=0)

    async def put(self, key: str, value: Any) -> None:
        await self._cache.set(key, value)

    async def get(self, key: str) -> Any:
        return await self._cache.get(key)


class AiocacheJson(Aiocache):
    name = "aiocache + json"

    async def open(self, folder: Path) -> None:
        serializer = load("aiocache.serializers").JsonSerializer()
        self._cache = load("aiocache").SimpleMemoryCache(serializer=serializer, timeout=0)


class PyKeyValueMemory(Contender):
    name = "py-key-value"
    note = "collections, TTL"

    async def open(self, folder: Path) -> None:
        self._store = load("key_value.aio.stores.memory").MemoryStore()

    async def put(self, key: str, value: Any) -> None:
        await self._store.put(key, value)

    async def get(self, key: str) -> Any:
        return await self._store.get(key)


class LanggraphMemory(Contender):
    name = "langgraph InMemoryStore"
    note = "namespaces, search"

    async def open(self, folder: Path) -> None:
        self._store = load("langgraph.store.memory").InMemoryStore()

    async def put(self, key: str, value: Any) -> None:
        await self._store.aput(("bench",), key, value)

    async def get(self, key: str) -> Any:
        return (await self._store.aget(("bench",), key)).value


class Cachetools(BlockingContender):
    name = "cachetools TTLCache"
    note = "blocking; one TTL for all keys; not safe for threads"

    def open(self, folder: Path) -> None:
        self._cache = load("cachetools").TTLCache(maxsize=10_000_000, ttl=86_400)

    def put(self, key: str, value: Any) -> None:
        self._cache[key] = value

    def get(self, key: str) -> Any:
        return self._cache[key]


class DictFloor(Contender):
    name = "dict behind async def"
    role = "floor"
    note = "keeps the caller's own object"

    async def open(self, folder: Path) -> None:
        self._dict: dict[str, Any] = {}

    async def put(self, key: str, value: Any) -> None:
        self._dict[key] = value

    async def get(self, key: str) -> Any:
        return self._dict[key]


class BytesLimit(Contender):
    name = "dict of encoded bytes"
    role = "limit"
    note = "the least that keeps a value of its own"

    async def open(self, folder: Path) -> None:
        self._dict: dict[str, bytes] = {}

    async def put(self, key: str, value: Any) -> None:
        self._dict[key] = encode(value)

    async def get(self, key: str) -> Any:
        return decode(self._dict[key])


CONTENDERS: tuple[type[AnyContender], ...] = (
    LimpetMemory,
    LitestarMsgspec,
    LitestarOrjson,
    AiocacheJson,
    PyKeyValueMemory,
    Aiocache,
    LanggraphMemory,
    Cachetools,
    BytesLimit,
    DictFloor,
)
