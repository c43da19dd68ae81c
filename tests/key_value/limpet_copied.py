"""A key-value store in memory whose every verb suspends, as those of a store behind a network do.

A write makes another copy of all rows, so a snapshot is the copy that was there when it began.
"""

from __future__ import annotations

import asyncio
import random
from bisect import bisect_left
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from limpet.clock import Clock
from limpet.engines.key_value import KeyValueEngine, Snapshot
from limpet.model import Traits
from limpet.urls import Address

_places: dict[str, dict[bytes, bytes]] = {}


async def open(address: Address, clock: Clock) -> KeyValueEngine:
    """Open ``copied:NAME``, which is shared in the process."""
    engine = CopiedEngine(address.path, clock)
    await engine.begin()
    return engine


class CopiedEngine(KeyValueEngine):
    """An engine on copies of a dict."""

    def __init__(self, name: str, clock: Clock) -> None:
        self._name = name
        super().__init__(f"copied:{name}", Traits("copied", "none", "host", inline=False), clock)

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator[Snapshot]:
        """See `KeyValueEngine.snapshot`."""
        await _suspend()
        yield _Copy(_places.get(self._name, {}))

    async def compare_and_write(self, key: bytes, found: bytes | None, writes: Mapping[bytes, bytes | None]) -> bool:
        """See `KeyValueEngine.compare_and_write`."""
        await _suspend()
        rows = _places.get(self._name, {})
        is_same = rows.get(key) == found
        if is_same:
            changed = {**rows, **writes}
            _places[self._name] = {name: value for name, value in changed.items() if value is not None}
        await _suspend()
        return is_same

    def translate(self, error: Exception) -> Exception:
        """See `KeyValueEngine.translate`."""
        return error

    async def disconnect(self) -> None:
        """See `KeyValueEngine.disconnect`."""

    async def wait_for_change(self, key: bytes, found: bytes | None) -> None:
        """See `KeyValueEngine.wait_for_change`."""
        while _places.get(self._name, {}).get(key) == found:  # noqa: ASYNC110 - a store of another process is polled
            await asyncio.sleep(0.02)


class _Copy:
    def __init__(self, rows: dict[bytes, bytes]) -> None:
        self._rows = rows
        self._keys: list[bytes] | None = None

    async def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        await _suspend()
        return [self._rows.get(key) for key in keys]

    async def get_range(
        self, start: bytes, stop: bytes, limit: int, *, reverse: bool = False
    ) -> list[tuple[bytes, bytes]]:
        await _suspend()
        if self._keys is None:
            self._keys = sorted(self._rows)
        first, end = bisect_left(self._keys, start), bisect_left(self._keys, stop)
        chosen = self._keys[first:end][:: -1 if reverse else 1]
        return [(key, self._rows[key]) for key in chosen[:limit]]


async def _suspend() -> None:
    """Let others run, for one turn of the loop or a few."""
    for _ in range(random.randrange(1, 4)):
        await asyncio.sleep(0)


def pytest_limpet_line(url: str) -> Any:
    """There is no connection."""
    return False if url.startswith("copied:") else None


def pytest_limpet_stored(url: str, namespace: str) -> int | None:
    """Count the rows of a namespace."""
    start = b"limpet\0n" + namespace.encode() + b"\0"
    rows = _places.get(url.partition(":")[2])
    return None if rows is None else sum(key.startswith(start) for key in rows)
