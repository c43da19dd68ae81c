"""A server that dies, and one that comes back with less than it had."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

import limpet
from limpet.errors import Ambiguous, Compacted, LockLost, Unavailable
from tests.redis.support import command
from tests.servers import Redis, redis

pytestmark = pytest.mark.slow

ALWAYS = {"appendonly": "yes", "appendfsync": "always"}


async def write(store: limpet.Store, name: str, done: asyncio.Event, acknowledged: dict[str, int]) -> None:
    """Count one key up until stopped, and remember the acknowledged values."""
    number = 0
    while not done.is_set():
        with contextlib.suppress(Unavailable, Ambiguous):
            number = await store.add(name, 1)
            acknowledged[name] = number


async def test_a_killed_server_with_aof_always_loses_and_doubles_nothing() -> None:
    with redis(ALWAYS) as server:
        async with limpet.open(server.url, sweep=False) as store:
            acknowledged: dict[str, int] = {}
            revisions: list[int] = []
            for _ in range(5):
                done = asyncio.Event()
                writers = [asyncio.create_task(write(store, f"key/{n}", done, acknowledged)) for n in range(8)]
                await asyncio.sleep(0.3)
                await asyncio.to_thread(server.restart, "immediate")
                await asyncio.sleep(0.1)
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


async def lossy_failover(primary: Redis, replica: Redis, store: limpet.Store) -> limpet.Store:
    """Write changes that the replica never gets, and promote it."""
    await _caught_up(primary, replica)
    await command(store, "CONFIG", "SET", "repl-diskless-sync", "yes")
    await _cut_off(replica)
    await store.put("lost", 1)
    await store.put("kept", "newer")
    primary.stop("immediate")
    await _promote(replica)
    return await limpet.open(replica.url, sweep=False)


async def _caught_up(primary: Redis, replica: Redis) -> None:
    """Wait until a replica has all that was written."""
    written = (await _say(primary, "INFO", "replication"))["master_repl_offset"]
    async with asyncio.timeout(120):
        while True:
            there = await _say(replica, "INFO", "replication")
            if there["master_link_status"] == "up" and there["slave_repl_offset"] >= written:
                return
            await asyncio.sleep(0.02)


async def _cut_off(replica: Redis) -> None:
    await _say(replica, "REPLICAOF", "127.0.0.1", "1")


async def _promote(replica: Redis) -> None:
    await _say(replica, "REPLICAOF", "NO", "ONE")


async def _say(server: Redis, *words: str) -> Any:
    from redis.asyncio import Redis as Client

    async with Client.from_url(server.url) as client:
        return await client.execute_command(*words)


@pytest.fixture
def pair() -> Any:
    with redis(ALWAYS) as primary, redis({**ALWAYS, "replicaof": f"127.0.0.1 {primary.port}"}) as replica:
        yield primary, replica


async def test_after_a_failover_no_revision_is_given_out_again(pair: tuple[Redis, Redis]) -> None:
    primary, replica = pair
    store = await limpet.open(primary.url, sweep=False)
    await store.put("kept", "old")
    lock = await store.lock("door", ttl=600).acquire()
    promoted = await lossy_failover(primary, replica, store)
    try:
        lost = 4
        assert await promoted.get("kept") == "old"

        entry = await promoted.put("kept", "after")

        assert entry.revision > lost + 100_000
        # The lock was taken before; its holder is still fenced, and no other holder gets its token.
        await promoted.put("fenced", 1, fence=lock)
        await promoted._session.engine.commit("default", promoted.batch().delete("fenced")._make_batch())
    finally:
        await promoted.close()
        with contextlib.suppress(Exception):
            await store.close()


async def test_after_a_failover_a_token_that_was_lost_does_not_hold(pair: tuple[Redis, Redis]) -> None:
    primary, replica = pair
    store = await limpet.open(primary.url, sweep=False)
    await store.put("kept", "old")
    await _caught_up(primary, replica)
    await _cut_off(replica)
    lost = await store.lock("door", ttl=600).acquire()
    primary.stop("immediate")
    await _promote(replica)
    async with limpet.open(replica.url, sweep=False) as promoted:
        again = await promoted.lock("door", ttl=600).acquire()

        assert lost.token is not None
        assert again.token is not None
        assert again.token > lost.token
        with pytest.raises(LockLost):
            await promoted.put("key", 1, fence=lost.fence)
        await promoted.put("key", 1, fence=again)
    with contextlib.suppress(Exception):
        await store.close()


async def test_a_watcher_who_saw_what_was_lost_is_told(pair: tuple[Redis, Redis]) -> None:
    primary, replica = pair
    store = await limpet.open(primary.url, sweep=False)
    first = await store.put("kept", "old")
    promoted = await lossy_failover(primary, replica, store)
    try:
        for is_mended in (False, True):
            if is_mended:
                await promoted.put("kept", "after")
            with pytest.raises(Compacted):
                await promoted._session.engine.changes("default", 3)
        feed = await promoted._session.engine.changes("default", first.revision)
        assert [change.entry.value for change in feed.changes] == ["after"]
    finally:
        await promoted.close()
        with contextlib.suppress(Exception):
            await store.close()


async def test_restarts_that_lose_nothing_leave_the_log_whole() -> None:
    """A restart may have lost something, and revisions skip. But who has missed nothing goes on, over any number."""
    with redis(ALWAYS) as server:
        async with limpet.open(server.url, sweep=False) as store:
            async with store.watch("*") as events:
                for number in range(4):
                    await store.put("key", number)
                    await asyncio.to_thread(server.restart, "immediate")
                assert [(await anext(events)).value for _ in range(4)] == [0, 1, 2, 3]

            assert [event.value async for event in store.history("key")] == [0, 1, 2, 3]
