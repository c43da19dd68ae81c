"""A cluster of three servers: a namespace is on one of them, and may move to another."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis as Client
from redis.crc import key_slot

import limpet
from limpet.engines.redis.cluster import RedisCluster
from limpet.errors import Conflict, InvalidValue
from tests.servers import Redis, free_port, redis

pytestmark = pytest.mark.slow

SLOTS = 16_384
NAMES = [f"space-{number}" for number in range(12)]


def say(server: Redis, *words: Any) -> Any:
    with Client.from_url(server.url) as client:
        return client.execute_command(*words)


@pytest.fixture(scope="module")
def cluster() -> Iterator[list[Redis]]:
    """Three servers with a third of the slots each."""
    settings = {"cluster-enabled": "yes", "appendonly": "yes", "appendfsync": "always"}
    with contextlib.ExitStack() as stack:
        buses = [free_port() for _ in range(3)]
        servers = [stack.enter_context(redis({**settings, "cluster-port": str(bus)})) for bus in buses]
        third = SLOTS // 3 + 1
        for number, server in enumerate(servers):
            first = number * third
            say(server, "CLUSTER", "ADDSLOTSRANGE", first, min(first + third, SLOTS) - 1)
            say(server, "CLUSTER", "MEET", "127.0.0.1", servers[0].port, buses[0])
        for server in servers:
            while b"cluster_state:ok" not in say(server, "CLUSTER", "INFO") or len(say(server, "CLUSTER", "SLOTS")) < 3:
                time.sleep(0.05)
        yield servers


def home(cluster: list[Redis], namespace: str) -> Redis:
    slot = key_slot(f"{{{namespace}}}".encode())
    for first, last, primary, *_ in say(cluster[0], "CLUSTER", "SLOTS"):
        if first <= slot <= last:
            return next(server for server in cluster if server.port == primary[1])
    raise AssertionError("no server serves it")


def move(cluster: list[Redis], namespace: str, to: Redis) -> None:
    """Move the slot of a namespace, with all that is in it."""
    slot, source = key_slot(f"{{{namespace}}}".encode()), home(cluster, namespace)
    names = {server.port: say(server, "CLUSTER", "MYID") for server in cluster}
    say(to, "CLUSTER", "SETSLOT", slot, "IMPORTING", names[source.port])
    say(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", names[to.port])
    keys = say(source, "CLUSTER", "GETKEYSINSLOT", slot, 1000)
    say(source, "MIGRATE", "127.0.0.1", to.port, "", 0, 10_000, "KEYS", *keys)
    for server in (to, source, *cluster):
        say(server, "CLUSTER", "SETSLOT", slot, "NODE", names[to.port])


async def test_any_server_leads_to_every_namespace(cluster: list[Redis]) -> None:
    stores = [await limpet.open(server.url, sweep=False) for server in cluster]
    try:
        assert isinstance(stores[0]._session.engine, RedisCluster)
        homes = {home(cluster, name).port for name in NAMES}
        assert len(homes) == 3
        for name in NAMES:
            spaces = [store.namespace(name) for store in stores]
            first = await spaces[0].put("key", name)
            assert await spaces[1].get("key") == name
            with pytest.raises(Conflict):
                await spaces[2].create("key", 1)
            assert (await spaces[2].put("key", 2, expect=first)).version == 2
            await spaces[0].record("job").put({"state": "open", "n": 7})
            assert await spaces[1].index("n")
            assert [entry.key async for entry in spaces[2].scan(where=limpet.field("n") == 7)] == ["job"]
            assert [event.value async for event in spaces[1].history("key")] == [name, 2]
        assert len({(await store.status()).store_id for store in stores}) == 1
        assert stores[0].traits.durability == "disk"
    finally:
        for store in stores:
            await store.close()


async def test_a_namespace_that_moves_is_found_again_and_its_watch_goes_on(cluster: list[Redis]) -> None:
    async with limpet.open(cluster[0].url, namespace="wanderer", sweep=False) as store:
        counted = 0
        async with store.watch("count") as events:
            for _ in range(3):
                source = home(cluster, "wanderer")
                for _ in range(5):
                    counted += 1
                    assert await store.add("count") == counted
                target = cluster[(cluster.index(source) + 1) % 3]
                await asyncio.to_thread(move, cluster, "wanderer", target)
                assert home(cluster, "wanderer") is target
                assert await store.get("count") == counted

            assert [(await anext(events)).value for _ in range(counted)] == list(range(1, counted + 1))


async def test_a_lock_holds_across_a_move(cluster: list[Redis]) -> None:
    async with limpet.open(cluster[0].url, namespace="locked", sweep=False) as store:
        lock = await store.lock("door", ttl=60).acquire()
        source = home(cluster, "locked")
        await asyncio.to_thread(move, cluster, "locked", cluster[(cluster.index(source) + 1) % 3])

        await store.put("key", 1, fence=lock)
        assert [held.token for held in await store.locks()] == [lock.token]


async def test_a_cluster_needs_the_hash_tag(cluster: list[Redis]) -> None:
    with pytest.raises(InvalidValue, match="hash tag"):
        await limpet.open(f"{cluster[0].url}?hash_tag=none")


async def test_a_cluster_has_no_test_clock(cluster: list[Redis]) -> None:
    with pytest.raises(InvalidValue, match="clock=test is not for a cluster"):
        await limpet.open(f"{cluster[0].url}?clock=test")


async def test_a_new_epoch_is_one_of_all_servers(cluster: list[Redis]) -> None:
    names = [f"epoch-{number}" for number in range(12)]
    async with limpet.open(cluster[0].url, sweep=False) as store:
        before = {name: await store.namespace(name).put("k", 1) for name in names}
        epoch = (await store.status()).epoch
        engine = store._session.engine
        assert isinstance(engine, RedisCluster)

        assert await engine.raise_epoch(1000) == epoch + 1

    async with limpet.open(cluster[1].url, sweep=False) as store:
        assert len({home(cluster, name).port for name in names}) == 3
        for name in names:
            assert (await store.namespace(name).status()).epoch == epoch + 1
            assert (await store.namespace(name).put("k", 2)).revision > before[name].revision + 1000
