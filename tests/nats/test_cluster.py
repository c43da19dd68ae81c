"""Three servers that keep each other's streams, and leaders that are killed under load.

``LIMPET_NATS_LONG=1`` kills twenty of them instead of two.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import random
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

import limpet
from limpet.conformance.linearizability import Recorder, check_order, check_watch
from limpet.conformance.test_histories import COUNTER, END, KEYS, Client
from limpet.engines.nats import connection as nats_connection
from limpet.errors import TransientError
from limpet.model import Event
from tests.engines import unique
from tests.nats.support import stream_of
from tests.servers import Nats, nats_cluster

pytestmark = pytest.mark.slow

KILLS = 20 if os.environ.get("LIMPET_NATS_LONG") else 2
CLIENTS = 8


@pytest.fixture(scope="module")
def cluster() -> Iterator[list[Nats]]:
    with nats_cluster() as servers:
        yield servers


def url_of(servers: list[Nats]) -> str:
    return f"nats://{','.join(f'127.0.0.1:{server.port}' for server in servers)}?replicas=3"


async def opened(servers: list[Nats], namespace: str, **options: Any) -> limpet.Store:
    """A store, when the servers have found each other."""
    async with asyncio.timeout(120):
        while True:
            try:
                store = await limpet.open(url_of(servers), namespace=namespace, sweep=False, **options)
                await patient(functools.partial(store.put, "ready", 1))
            except (TransientError, limpet.errors.InvalidValue):
                await asyncio.sleep(0.2)
            else:
                return store


async def patient(call: Any) -> Any:
    """Try until it can be done: an election takes longer than the store is patient."""
    async with asyncio.timeout(120):
        while True:
            try:
                return await call()
            except TransientError:
                await asyncio.sleep(0.1)


async def leader_of(store: limpet.Store, servers: list[Nats]) -> Nats:
    info = await patient(lambda: stream_of(store).info())
    return servers[int(info["cluster"]["leader"].removeprefix("n"))]


async def test_reads_come_from_the_leader_of_three_copies(cluster: list[Nats]) -> None:
    store = await opened(cluster, unique())
    try:
        assert (await stream_of(store).info())["config"]["num_replicas"] == 3
        assert not stream_of(store).direct
        for number in range(30):
            entry = await store.put("key", number)
            assert await store.entry("key") == entry
        await store.batch().put("a", 1).put("b", 2).expect("key", entry).commit()
        assert (await store.keys()).keys == ["a", "b", "key", "ready"]
    finally:
        await store.close()


class Load:
    """Clients that read and write through all kinds of calls, and record the results."""

    def __init__(self, namespace: str) -> None:
        self.recorder = Recorder()
        self.values = itertools.count(1)
        self.namespace = namespace
        self.is_over = False
        self.answered_at = time.monotonic()
        self.silences: list[float] = []

    def dice(self, number: int) -> random.Random:
        """The chances of a client."""
        return random.Random(number)

    async def client(self, number: int, store: limpet.Store) -> None:
        """Make calls until stopped."""
        dice, client = self.dice(100 + number), Client(cast("Any", self), number, store, {})
        kinds = [client.get, client.put, client.guarded, client.create, client.delete, client.add, client.batch]
        while not self.is_over:
            try:
                await dice.choice(kinds)(dice.choice(KEYS))
            except TransientError:
                await asyncio.sleep(0.05)
            else:
                self.silences.append(time.monotonic() - self.answered_at)
                self.answered_at = time.monotonic()


@pytest.mark.timeout(600 + 60 * KILLS)
async def test_a_killed_leader_loses_and_doubles_nothing(cluster: list[Nats], monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls fail while the others choose a new leader; what was acknowledged stays, once, and watches go on."""
    # An election takes longer than a store is patient. Here every call is repeated until it is answered, so that
    # nothing is left that may or may not have happened.
    monkeypatch.setattr(nats_connection, "REQUEST_S", 1.0)
    for entry_id in ("session", "retry"):
        monkeypatch.setattr(f"limpet.{entry_id}.ATTEMPTS", 500)
    load = Load(unique())
    stores = [await opened(cluster, load.namespace) for _ in range(3)]
    async with stores[0].watch() as one, stores[1].watch() as other, asyncio.TaskGroup() as tasks:
        watches = [tasks.create_task(_until_the_end(watch)) for watch in (one, other)]
        clients = [tasks.create_task(load.client(number, stores[number % 3])) for number in range(CLIENTS)]
        for _ in range(KILLS):
            await asyncio.sleep(1.0)
            leader = await leader_of(stores[2], cluster)
            await asyncio.to_thread(leader.stop, "immediate")
            before = len(load.recorder.operations)
            async with asyncio.timeout(120):
                # Two are enough to go on.
                while sum(op.outcome == "done" for op in load.recorder.operations[before:]) < 50:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            await asyncio.to_thread(leader.start)
        load.is_over = True
        await asyncio.wait(clients)
        last = Client(cast("Any", load), CLIENTS, stores[2], {})
        while last.known.get(END) is None:
            await last.put(END)
        watched = [await watch for watch in watches]
    for key in (*KEYS, COUNTER):
        await patient(lambda key=key: last.get(key))
    for store in stores:
        await store.close()

    operations = load.recorder.operations
    final = {key: last.known[key] for key in (*KEYS, COUNTER, END)}
    done = [op for op in operations if op.outcome == "done"]
    unknown = [op for op in operations if op.outcome == "unknown"]
    silent_s = max(load.silences)
    print(f"{KILLS} leaders killed, {len(done)} calls done, {len(unknown)} unknown, silent for {silent_s:.1f} s")
    problems = [check_watch(events, operations, final) for events in watched]
    problems.append(check_order(operations, watched[0]))
    assert [problem for problem in problems if problem] == []
    assert len(done) > 100 * KILLS


async def test_a_lock_and_its_fence_hold_over_a_killed_leader(
    cluster: list[Nats], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_connection, "REQUEST_S", 1.0)
    store = await opened(cluster, unique())
    try:
        first = await store.lock("door", ttl=120).acquire()
        leader = await leader_of(store, cluster)
        await asyncio.to_thread(leader.restart, "immediate")

        await patient(lambda: store.put("key", 1, fence=first, request_id="mine"))
        assert (await patient(lambda: store.put("key", 1, fence=first, request_id="mine"))).version == 1
        with pytest.raises(limpet.errors.LockHeld):
            await patient(lambda: store.lock("door", ttl=10).acquire())
        await patient(first.release)
        second = await patient(lambda: store.lock("door", ttl=120).acquire())
        assert second.token > first.token if first.token else True
        with pytest.raises(limpet.errors.LockLost):
            await patient(lambda: store.put("key", 2, fence=limpet.Fence("door", token=1)))
    finally:
        await store.close()


async def _until_the_end(watch: Any) -> list[Event]:
    events: list[Event] = []
    async for event in watch:
        events.append(event)
        if event.key == END:
            break
    return events
