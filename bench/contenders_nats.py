"""Stores on NATS JetStream: Limpet, and the key-value store of the driver that it is built on.

Each has its own bucket on one server. A guarded put expects the revision that the key last got.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import limpet
from bench.contenders import LimpetWriter, Role, Writer, gather_all, load
from bench.workload import Job, decode, encode


class OnNats(Writer):
    """A contender on the server whose URL it is given."""

    keeps_files = False

    def __init__(self, url: str) -> None:
        self.url = url


class LimpetNats(LimpetWriter, OnNats):
    name = "Limpet"
    note = "versions, revisions, TTL, safe retries"

    async def open(self, folder: Path) -> None:
        self.store = await limpet.open(self.url)


class NatsPy(OnNats):
    name = "nats-py KV"
    note = "the value alone; update compares the revision"

    async def open(self, folder: Path) -> None:
        self.client = await load("nats").connect(self.url.partition("?")[0])
        self.bucket = await self.client.jetstream().create_key_value(bucket="peer")

    async def put(self, key: str, value: Any) -> None:
        await self.bucket.put(key, encode(value))

    async def get(self, key: str) -> Any:
        return decode((await self.bucket.get(key)).value)

    async def guarded(self, key: str, value: Any) -> None:
        self._revisions[key] = await self.bucket.update(key, encode(value), last=self._revisions[key])

    async def load(self, keys: Iterable[str]) -> int:
        wanted = list(keys)
        found = await gather_all(self.bucket.get, wanted)
        self._revisions: dict[str, int] = {key: entry.revision for key, entry in zip(wanted, found, strict=True)}
        # The stream numbers its messages, and each is a write.
        return max(self._revisions.values())

    async def batch(self, jobs: Sequence[Job]) -> None:
        """Guarded messages at once: the bucket has no step for several keys."""
        await asyncio.gather(*(self.guarded(*job) for job in jobs))

    async def close(self) -> None:
        await self.client.close()


class ByHand(LimpetNats):
    """One guarded message per put, with a header as long as ours, on the connection that the engine uses.

    No key is checked, nothing is planned, no entry made: this is the limit of the server and the connection.
    """

    name = "a guarded message by hand"
    role: ClassVar[Role] = "limit"
    note = "what Limpet sends, without its checks, plans, entries and retries"
    lacks = frozenset({"batch"})

    async def open(self, folder: Path) -> None:
        # A new one: messages that it has not sent itself would refuse its own without end.
        namespace = f"by-hand-{os.urandom(4).hex()}"
        self.store = await limpet.open(self.url, namespace=namespace)
        await self.store.put("begin", 0)
        engine: Any = self.store._session.engine
        self._connection = await engine.connection()
        self._subject = engine._namespaces[namespace].stream.subjects.of
        self._number = load("limpet.engines.nats.stream").await_ack
        self._last: dict[str, int] = {}

    async def load(self, keys: Iterable[str]) -> int:
        return max(self._last.values())

    async def put(self, key: str, value: Any) -> None:
        # A caller that comes while another writes the key is refused, and tries again.
        while True:
            head = _HEAD % self._last.get(key, 0)
            try:
                self._last[key] = await self._number(
                    self._connection.request(self._subject(("data", key)), encode(value), head)
                )
                return
            except load("limpet.engines.nats.stream").KeyChanged:
                await asyncio.sleep(0)

    async def guarded(self, key: str, value: Any) -> None:
        await self.put(key, value)


class BatchByHand(ByHand):
    """The same messages where each is synced: those of one turn of the loop go as one atomic batch."""

    name = "an atomic batch by hand"
    lacks = frozenset({"guarded"})

    async def open(self, folder: Path) -> None:
        await super().open(folder)
        self._at_once = asyncio.Semaphore(_BATCHES_MAX)
        self._waiting: dict[str, tuple[bytes, asyncio.Future[int]]] = {}
        self._sending: asyncio.Task[None] | None = None

    async def put(self, key: str, value: Any) -> None:
        loop = asyncio.get_running_loop()
        while key in self._waiting:
            await self._waiting[key][1]
        answer: asyncio.Future[int] = loop.create_future()
        self._waiting[key] = (encode(value), answer)
        if self._sending is None:
            self._sending = loop.create_task(self._send_all())
        await answer

    async def _send_all(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting, {}
            await self._send({key: body for key, (body, _) in group.items()})
            for key, (_, answer) in group.items():
                answer.set_result(self._last[key])
        self._sending = None

    async def batch(self, jobs: Sequence[Job]) -> None:
        async with self._at_once:
            await self._send({key: encode(value) for key, value in jobs})

    async def _send(self, bodies: dict[str, bytes]) -> None:
        name, reply = os.urandom(9).hex().encode(), None
        for number, (key, body) in enumerate(bodies.items(), 1):
            more = b"Nats-Batch-Id: %b\r\nNats-Batch-Sequence: %d\r\n" % (name, number)
            head = (_HEAD % self._last.get(key, 0))[:-2] + more
            if number < len(bodies):
                self._connection.send(self._subject(("data", key)), body, head + b"\r\n")
            else:
                head += b"Nats-Batch-Commit: 1\r\n\r\n"
                reply = self._connection.request(self._subject(("data", key)), body, head)
        first = await self._number(reply) - len(bodies) + 1
        self._last |= zip(bodies, range(first, first + len(bodies)), strict=True)


_BATCHES_MAX = 50
"""Batches that the server takes at once of one stream."""

_HEAD = (
    b"NATS/1.0\r\nNats-Expected-Last-Subject-Sequence: %d\r\n"
    b"Limpet: put j 12 1234 1700000000000 1700000000000 0 123456 0 1700000000000 204 0123456789abcdef-1234\r\n\r\n"
)

CONTENDERS: tuple[type[OnNats], ...] = (LimpetNats, NatsPy, ByHand)
