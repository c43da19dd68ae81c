"""Watching: notifications between processes, polling in addition, and a pooler that passes no notifications on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import limpet
from limpet.engines import server_engine
from limpet.engines.postgres import sql
from limpet.errors import LimpetError
from tests.postgres.proxy import Pooler
from tests.postgres.support import Process, Spy, connected, engine_of, log_of, server, until, url_of
from tests.processes import PATIENCE_S

LISTENERS = "SELECT pid FROM pg_stat_activity WHERE query LIKE 'LISTEN %' AND query LIKE '%' || $1 || '%'"


async def next_event(events: limpet.Watch) -> Any:
    return await asyncio.wait_for(anext(events), PATIENCE_S)


async def listener(connection: Any, store: limpet.Store) -> int:
    """The backend that listens for a store, as soon as there is one."""
    store_id = (await store.status()).store_id
    return int(await until(lambda: connection.fetchval(LISTENERS, store_id)))


@pytest.fixture
def no_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let watchers poll so seldom that only a notification can wake them."""
    monkeypatch.setattr(server_engine, "POLL_S", 600.0)


@pytest.fixture
async def far(url: str) -> AsyncIterator[Process]:
    """A process that puts each value that it receives."""
    with Process("puts", url) as process:
        assert await process.receive_async() == "ready"
        yield process


async def test_a_change_of_another_process_notifies(no_polling: None, store: limpet.Store, far: Process) -> None:
    async with store.watch() as events:
        for value in range(5):
            far.send(value)
            event = await next_event(events)
            assert (event.key, event.value, event.revision) == ("key", value, await far.receive_async())


async def test_a_planned_commit_notifies_as_well(no_polling: None, store: limpet.Store, url: str) -> None:
    async with limpet.open(url, sweep=False) as other, store.watch() as events:
        await other.add("count", 3)

        assert (await next_event(events)).value == 3


async def test_a_refused_commit_notifies_no_one(store: limpet.Store, url: str) -> None:
    async with connected() as connection:
        received: list[str] = []
        await connection.execute(sql.WILL_LISTEN, engine_of(store)._channel)
        await connection.add_listener(engine_of(store)._channel, lambda *notification: received.append(notification[3]))
        with pytest.raises(limpet.errors.Conflict):
            await store.put("key", 1, expect=limpet.PRESENT)
        await store.delete("key")
        await store.namespace("other").put("key", 1)
        await until(lambda: connection.fetchval("SELECT 1") if received else connection.fetchval("SELECT NULL"))

        # The one that changed something, and nothing before it.
        assert received == ["other"]


async def test_without_a_listener_commits_notify_no_one(store: limpet.Store) -> None:
    """A notification makes all commits of the server wait for each other."""
    async with connected() as connection:
        received: list[str] = []
        channel = engine_of(store)._channel
        await connection.add_listener(channel, lambda *notification: received.append(notification[3]))
        await store.put("key", 1)
        await asyncio.gather(*(store.put(f"key/{number}", 1) for number in range(10)))
        await store.add("count")
        await connection.execute("SELECT pg_notify($1, 'the end')", channel)
        await until(lambda: connection.fetchval("SELECT 1" if received else "SELECT NULL"))

        assert received == ["the end"]


async def test_a_commit_in_flight_is_seen_by_a_watch_that_begins(no_polling: None, store: limpet.Store) -> None:
    """It found no listener and notifies no one, so the listener waits for it and reads the log after it."""
    await store.put("earlier", 1)
    engine = engine_of(store)
    put = f"SELECT {engine._schema_name}.limpet_put({', '.join(['$1', '$2', '$3', '9', '$4', '$5', *['NULL'] * 9])})"
    async with connected() as connection:
        commit = connection.transaction()
        await commit.start()
        await connection.execute(put, store.name, engine._channel, "a-request", ["late"], ["12345"])
        async with store.watch() as events:
            next_one = asyncio.create_task(next_event(events))
            await until(
                lambda: connection.fetchval("SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
            )
            assert not next_one.done()
            await commit.commit()

            assert (await next_one).key == "late"


async def test_a_watch_goes_on_when_its_listener_is_terminated(
    store: limpet.Store, far: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It polls meanwhile, and the listener connects again."""
    async with store.watch() as events, connected() as connection:
        far.send("before")
        assert (await next_event(events)).value == "before"
        pid = await listener(connection, store)

        assert await connection.fetchval("SELECT pg_terminate_backend($1)", pid)
        far.send("without a listener")
        assert (await next_event(events)).value == "without a listener"

        store_id = (await store.status()).store_id
        again = await until(lambda: connection.fetchval(f"{LISTENERS} AND pid <> {pid}", store_id))
        assert again != pid
        # Only now, because the listener also waits that long before it connects again.
        monkeypatch.setattr(server_engine, "POLL_S", 600.0)
        far.send("once more")
        assert (await next_event(events)).value == "once more"
        far.send("after")
        assert (await next_event(events)).value == "after"


async def test_every_connection_of_a_store_may_be_ended_by_an_operator(store: limpet.Store, url: str) -> None:
    """Reads, writes and watches go on, each change is seen once."""
    named = f"{url}&application_name={engine_of(store)._schema}"
    async with limpet.open(named, sweep=False) as other, other.watch() as events, connected() as connection:
        for value in range(6):
            await other.put("key", value)
            await other.add("count", 1)
            assert [(await next_event(events)).key for _ in range(2)] == ["key", "count"]
            end = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = $1"
            assert await connection.fetchval(end, engine_of(store)._schema) >= 1
            assert await other.get("key") == value
        assert await other.get("count") == 6
        assert [change.revision for change in await log_of(store)] == [*range(1, 13)]


async def test_no_connection_listens_before_a_watch_starts(store: limpet.Store) -> None:
    await store.put("key", 1)

    async with connected() as connection:
        assert await connection.fetchval(LISTENERS, (await store.status()).store_id) is None


# Behind a pooler ------------------------------------------------------------------


@pytest.fixture
def pooler() -> Iterator[Pooler]:
    """A pooler in transaction mode before the shared server."""
    with Pooler(server()) as running:
        yield running


async def test_behind_a_pooler_nothing_listens_and_nothing_is_prepared(schema: str, spy: Spy) -> None:
    async with limpet.open(url_of(schema, pooler="yes"), sweep=False) as store, store.watch() as events:
        await store.put("key", 1)
        assert (await next_event(events)).value == 1
        engine = engine_of(store)

        assert not [statement for statement in await spy.statements() if "LISTEN" in statement]
        assert not engine._listeners
        assert [tuple(row) for row in await engine._fetch("SELECT name FROM pg_prepared_statements")] == []


async def test_without_the_option_statements_are_prepared(schema: str) -> None:
    """Or the test above would prove nothing."""
    async with limpet.open(url_of(schema), sweep=False) as store:
        await store.put("key", 1)
        assert await engine_of(store)._fetch("SELECT name FROM pg_prepared_statements") != []


async def test_a_store_works_through_a_pooler_in_transaction_mode(schema: str, pooler: Pooler) -> None:
    """Each transaction runs on another connection, without any session state."""
    url = url_of(schema, pooler.url, pooler="yes")
    async with limpet.open(url) as store, limpet.open(url) as other, store.watch() as events:
        before = pooler.transactions
        entry = await store.put("key", {"a": 1e22}, ttl=60)
        assert await other.entry("key") == entry
        assert await other.add("count", 3, request_id="mine") == 3
        assert await store.add("count", 3, request_id="mine") == 3
        with pytest.raises(limpet.errors.Conflict):
            await other.create("key", 1)
        await asyncio.gather(*(one.add("sum", 1) for one in (store, other) for _ in range(20)))
        await asyncio.gather(*(one.put(f"many/{n}", n) for n, one in enumerate([store, other] * 10)))
        await store.record("job").put({"state": "pending"})
        assert await other.record("job").swap("state", "pending", "claimed")
        async with other.lock("door", ttl=30) as lock:
            await other.put("fenced", 1, fence=lock)
        assert await store.take("fenced") == 1
        assert await store.get("sum") == 40
        assert len((await other.keys("many/")).keys) == 20
        assert pooler.transactions > before + 20

        log = [change for change in await log_of(store) if change.family == "data"]
        assert [(await next_event(events)).revision for _ in log] == [change.revision for change in log]


async def test_a_pooler_without_the_option_does_not_work(schema: str, pooler: Pooler) -> None:
    """The emulation is as strict as a real pooler."""
    async with limpet.open(url_of(schema, pooler="yes"), sweep=False):
        pass

    async def write() -> None:
        async with limpet.open(url_of(schema, pooler.url), sweep=False) as store:
            for number in range(3):
                await store.put("key", number)

    with pytest.raises(LimpetError):
        await write()
