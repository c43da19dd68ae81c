"""Stores on NATS JetStream: Limpet, and the key-value store of the driver that it is built on.

Each has its own bucket on one server. A guarded put expects the revision that the same caller last got,
so it succeeds unless two callers use the same key.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, ClassVar

import limpet
from bench.contenders import Contender, Role, load
from bench.workload import decode, encode


class OnNats(Contender):
    """A contender on the server whose URL it is given."""

    keeps_files = False

    def __init__(self, url: str) -> None:
        self.url = url
        self.known: dict[str, Any] = {}

    async def guarded(self, key: str, value: Any) -> None:
        """Put over what was last put."""
        raise NotImplementedError


class LimpetNats(OnNats):
    name = "Limpet"
    role: ClassVar[Role] = "limpet"
    note = "versions, revisions, TTL, safe retries"

    async def open(self, folder: Path) -> None:
        self.store = await limpet.open(self.url)

    async def put(self, key: str, value: Any) -> None:
        await self.store.put(key, value)

    async def get(self, key: str) -> Any:
        return await self.store.get(key)

    async def guarded(self, key: str, value: Any) -> None:
        expected = self.known.pop(key, None) or await self.store.entry(key)
        try:
            self.known[key] = await self.store.put(key, value, expect=expected)
        except limpet.errors.Conflict as conflict:
            self.known[key] = conflict.current

    async def close(self) -> None:
        await self.store.close()


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
        expected = self.known.pop(key, None) or (await self.bucket.get(key)).revision
        try:
            self.known[key] = await self.bucket.update(key, encode(value), last=expected)
        except load("nats.js.errors").KeyWrongLastSequenceError:
            self.known.pop(key, None)

    async def close(self) -> None:
        await self.client.close()


class ByHand(LimpetNats):
    """One guarded message per put, with a header as long as ours, on the connection that the engine uses.

    No key is checked, nothing is planned, no entry made: this is the limit of the server and the connection.
    """

    name = "a guarded message by hand"
    role: ClassVar[Role] = "limit"
    note = "what Limpet sends, without its checks, plans, entries and retries"

    async def open(self, folder: Path) -> None:
        self.store = await limpet.open(self.url, namespace="by-hand")
        await self.store.put("begin", 0)
        engine: Any = self.store._session.engine
        self._connection = await engine.connection()
        self._subject = engine._namespaces["by-hand"].stream.subjects.of
        self._number = load("limpet.engines.nats.stream").await_ack
        self._last: dict[str, int] = {}

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

    async def open(self, folder: Path) -> None:
        await super().open(folder)
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
            name, reply = os.urandom(9).hex().encode(), None
            for number, (key, (body, _)) in enumerate(group.items(), 1):
                more = b"Nats-Batch-Id: %b\r\nNats-Batch-Sequence: %d\r\n" % (name, number)
                head = (_HEAD % self._last.get(key, 0))[:-2] + more
                if number < len(group):
                    self._connection.send(self._subject(("data", key)), body, head + b"\r\n")
                else:
                    head += b"Nats-Batch-Commit: 1\r\n\r\n"
                    reply = self._connection.request(self._subject(("data", key)), body, head)
            first = await self._number(reply) - len(group) + 1
            for number, (key, (_, answer)) in enumerate(group.items(), first):
                self._last[key] = number
                answer.set_result(number)
        self._sending = None


_HEAD = (
    b"NATS/1.0\r\nNats-Expected-Last-Subject-Sequence: %d\r\n"
    b"Limpet: put j 12 1234 1700000000000 1700000000000 0 123456 0 1700000000000 204 0123456789abcdef-1234\r\n\r\n"
)

CONTENDERS: tuple[type[OnNats], ...] = (LimpetNats, NatsPy, ByHand)
