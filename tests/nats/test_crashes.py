"""A server that dies and comes back: nothing acknowledged is lost, and nothing happens twice."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

import limpet
from limpet.errors import Ambiguous, Unavailable
from tests.servers import nats

pytestmark = pytest.mark.slow

KILLS = 3


async def test_a_killed_server_loses_and_doubles_nothing() -> None:
    """It comes back with what it had written to its files, synced or not. Watchers go on where they were."""
    with nats() as server:
        async with limpet.open(server.url, sweep=False) as store:
            acknowledged: dict[str, int] = {}
            revisions: list[int] = []
            seen: list[tuple[str, int, int]] = []

            async def follow() -> None:
                async with store.watch("*") as watch:
                    ready.set()
                    async for event in watch:
                        seen.append((event.key, event.revision, event.value))

            ready = asyncio.Event()
            following = asyncio.create_task(follow())
            await ready.wait()
            for _ in range(KILLS):
                done = asyncio.Event()
                writers = [asyncio.create_task(_count(store, f"key/{n}", done, acknowledged)) for n in range(8)]
                await asyncio.sleep(0.3)
                await asyncio.to_thread(server.restart, "immediate")
                await asyncio.sleep(0.3)
                done.set()
                await asyncio.gather(*writers)
                revisions.append((await store.put("mark", 1)).revision)

            assert revisions == sorted(set(revisions))
            for name, number in acknowledged.items():
                entry = await store.entry(name)
                assert entry is not None
                # Each add is one version: none was lost, and none was done twice.
                assert entry.value == entry.version >= number
            assert min(acknowledged.values()) > 20
            last = {entry.key: entry.revision async for entry in store.scan()}
            async with asyncio.timeout(120):
                while {key: revision for key, revision, _ in seen} != last:  # noqa: ASYNC110 - the watch is a task
                    await asyncio.sleep(0.05)
            following.cancel()
            assert [revision for _, revision, _ in seen] == sorted({revision for _, revision, _ in seen})


async def _count(store: limpet.Store, name: str, done: asyncio.Event, acknowledged: dict[str, int]) -> None:
    """Count one key up until stopped, and remember the acknowledged values."""
    while not done.is_set():
        with contextlib.suppress(Unavailable, Ambiguous):
            acknowledged[name] = await store.add(name, 1)
