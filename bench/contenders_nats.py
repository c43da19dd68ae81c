"""Stores on NATS JetStream: Limpet, and the key-value store of the driver that it is built on.

Both have a bucket of their own on one server. A guarded put names the revision that the same caller
was last told, so it is granted unless two callers hold the same key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import limpet
from bench.contenders import Contender, load
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
    role = "limpet"
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


CONTENDERS: tuple[type[OnNats], ...] = (LimpetNats, NatsPy)
