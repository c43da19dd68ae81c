"""Redis Cluster: a namespace is in one slot, and so on one server, by the hash tag in its keys.

Each server has its own engine, and a call goes to the one that serves the slot of its namespace. When a
slot has moved, or its server does not reply, the call fails with an error that may be retried, and the
next call reads the slot map again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
from redis.crc import key_slot

from limpet.engines.redis.engine import RedisEngine
from limpet.errors import Ambiguous, Unavailable
from limpet.index import IndexProbe
from limpet.keys import Span
from limpet.model import (
    Batch,
    Commit,
    Entry,
    Expire,
    Family,
    Filter,
    LogPage,
    Refusal,
    ScanPage,
    Status,
    Traits,
    Window,
)

Server = tuple[str, int]
"""A host and a port."""
Slots = list[tuple[int, int, Server]]
"""Ranges of slots, first and last, and the server of each."""
T = TypeVar("T")


class RedisCluster:
    """A handle on the servers of a cluster."""

    def __init__(
        self, first: RedisEngine, server: Server, open_server: Callable[[Server], Awaitable[RedisEngine]]
    ) -> None:
        self._open_server = open_server
        self._engines = {server: first}
        self._slots: Slots = []
        self._first = first
        self._store_id, self._epoch = "", 1

    @property
    def traits(self) -> Traits:
        """See `Engine.traits`."""
        return self._first.traits

    # The slot map ------------------------------------------------------------------

    async def _engine_of(self, slot: int) -> RedisEngine:
        if not self._slots:
            self._slots = await self._load_slots()
        for first, last, server in self._slots:
            if first <= slot <= last:
                if server not in self._engines:
                    self._engines[server] = await self._open_server(server)
                return self._engines[server]
        self._slots = []
        raise Unavailable(f"no server of the cluster serves slot {slot}")

    async def _load_slots(self) -> Slots:
        """Which server serves which slots, according to the first server that replies."""
        last_error: Exception | None = None
        for server, engine in [*self._engines.items()]:
            try:
                found = await engine._request("CLUSTER", "SLOTS")
            except Unavailable as error:
                last_error = error
                continue
            # A server may not know its own host name.
            return [(first, last, (primary[0].decode() or server[0], primary[1])) for first, last, primary, *_ in found]
        raise last_error or Unavailable("no server of the cluster replies")

    async def _on(self, namespace: str, call: Callable[[RedisEngine], Awaitable[T]]) -> T:
        try:
            engine = await self._engine_of(key_slot(f"{{{namespace}}}".encode()))
            return await call(engine)
        except (Unavailable, Ambiguous):
            self._slots = []
            raise

    async def prepare(self) -> None:
        """Learn the id of the store, from the server that keeps it."""
        engine = await self._engine_of(key_slot(b"limpet:store"))
        self._store_id, self._epoch = await engine.load_store_id()

    # The ten primitives -----------------------------------------------------

    async def read(self, namespace: str, keys: Sequence[str], *, family: Family = "data") -> list[Entry | None]:
        """See `Engine.read`."""
        return await self._on(namespace, lambda engine: engine.read(namespace, keys, family=family))

    async def scan(
        self,
        namespace: str,
        span: Span,
        *,
        family: Family = "data",
        where: Filter | None = None,
        values: bool = True,
        limit: int = 500,
        reverse: bool = False,
    ) -> ScanPage:
        """See `Engine.scan`."""
        options: dict[str, Any] = {"family": family, "where": where, "values": values, "limit": limit}
        options["reverse"] = reverse
        return await self._on(namespace, lambda engine: engine.scan(namespace, span, **options))

    async def count(self, namespace: str, span: Span, *, family: Family = "data") -> int:
        """See `Engine.count`."""
        return await self._on(namespace, lambda engine: engine.count(namespace, span, family=family))

    async def namespaces(self) -> list[str]:
        """See `Engine.namespaces`. Every server has its own."""
        firsts = {server: first for first, _, server in await self._load_slots()}
        found = [await (await self._engine_of(first)).namespaces() for first in firsts.values()]
        return sorted(name for names in found for name in names)

    async def commit(self, namespace: str, batch: Batch) -> Commit | Refusal:
        """See `Engine.commit`."""
        return await self._on(namespace, lambda engine: engine.commit(namespace, batch))

    async def changes(
        self, namespace: str, after: int, *, span: Span | None = None, limit: int = 500, wait_s: float = 0.0
    ) -> LogPage:
        """See `Engine.changes`."""
        return await self._on(
            namespace, lambda engine: engine.changes(namespace, after, span=span, limit=limit, wait_s=wait_s)
        )

    async def due(self, namespace: str, *, limit: int = 500) -> list[Expire]:
        """See `Engine.due`."""
        return await self._on(namespace, lambda engine: engine.due(namespace, limit=limit))

    async def trim(self, namespace: str, window: Window) -> int:
        """See `Engine.trim`."""
        return await self._on(namespace, lambda engine: engine.trim(namespace, window))

    async def status(self, namespace: str) -> Status:
        """See `Engine.status`."""
        found = await self._on(namespace, lambda engine: engine.status(namespace))
        return msgspec.structs.replace(found, store_id=self._store_id, epoch=self._epoch)

    async def close(self) -> None:
        """See `Engine.close`."""
        for engine in self._engines.values():
            await engine.close()

    # Epochs -------------------------------------------------------------------

    async def raise_epoch(self, skip: int) -> int:
        """See `Restoring.raise_epoch`. Every server has its own namespaces, and one of them keeps the epoch."""
        firsts = {server: first for first, _, server in await self._load_slots()}
        for first in firsts.values():
            await (await self._engine_of(first)).skip_revisions(skip)
        keeper = await self._engine_of(key_slot(b"limpet:store"))
        self._epoch = await keeper.next_epoch()
        return self._epoch

    # Indexes ------------------------------------------------------------------

    async def index(self, namespace: str, field: str) -> None:
        """See `Indexing.index`."""
        await self._on(namespace, lambda engine: engine.index(namespace, field))

    async def unindex(self, namespace: str, field: str) -> None:
        """See `Indexing.unindex`."""
        await self._on(namespace, lambda engine: engine.unindex(namespace, field))

    async def indexes(self, namespace: str) -> list[str]:
        """See `Indexing.indexes`."""
        return await self._on(namespace, lambda engine: engine.indexes(namespace))

    async def candidates(self, namespace: str, span: Span, wanted: Sequence[IndexProbe]) -> list[str] | None:
        """See `Indexing.candidates`."""
        return await self._on(namespace, lambda engine: engine.candidates(namespace, span, wanted))
