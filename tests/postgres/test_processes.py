"""Many processes on one namespace: nothing lost, nothing twice, and every watcher sees all of it in order."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest

import limpet
import limpet.sync
from tests.postgres.support import LONG, Process, connected, log_of, new_schema, url_of
from tests.processes import PATIENCE_S
from tests.servers import Postgres

pytestmark = pytest.mark.slow

PROCESSES = 4
WRITERS = 4
# Writes of each writer: 24 000 in all, or 3 040.
WRITES = 1500 if LONG else 190


class Watcher:
    """A watch of the sync API, in its own thread."""

    def __init__(self, url: str) -> None:
        self.events: list[list[Any]] = []
        self._store = limpet.sync.open(url)
        self._watch = self._store.watch()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        for event in self._watch:
            if event.key == "end":
                return
            self.events.append([event.revision, event.commit, event.op, event.key, event.value])

    def end(self) -> list[list[Any]]:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        self._store.close()
        return self.events


async def watched(store: limpet.Store, events: limpet.Watch) -> list[list[Any]]:
    delivered = []
    async for event in events:
        if event.key == "end":
            break
        delivered.append([event.revision, event.commit, event.op, event.key, event.value])
    return delivered


async def run_writers(url: str, server: Postgres | None = None) -> None:
    """Let all processes write while three watch, perhaps with a server that restarts; then compare everything."""
    with ExitStack() as stack:
        writers = [
            stack.enter_context(Process("writes", url, f"p{index}", WRITERS, WRITES)) for index in range(PROCESSES)
        ]
        far = stack.enter_context(Process("watches", url))
        for process in (*writers, far):
            assert await process.receive_async() == "ready"
        near = await asyncio.to_thread(Watcher, url)
        async with limpet.open(url) as store, store.watch() as events:
            here = asyncio.create_task(watched(store, events))

            for process in writers:
                process.send("begin")
            for how in ("fast", "immediate"):
                # When the first writer has done another third of its work.
                await writers[0].receive_async()
                if server is not None:
                    await asyncio.to_thread(server.restart, how)
            for process in writers[1:]:
                assert await process.receive_async() == WRITES // 3
                assert await process.receive_async() == 2 * (WRITES // 3)
            acknowledged = [change for process in writers for change in await process.receive_async()]
            await store.put("end", True)
            deliveries = [await here, await far.receive_async(), await asyncio.to_thread(near.end)]

            log = [change for change in await log_of(store) if change.key != "end"]
            counters = {entry.key: entry.value async for entry in store.scan("count/")}
            entries = {entry.key: entry async for entry in store.scan()}

    # What was acknowledged is in the log, each of it once, and nothing else is.
    assert Counter((change.commit, change.op, change.key) for change in log) == Counter(map(tuple, acknowledged))
    named = Counter((change.key, change.entry.value) for change in log if change.op == "put")
    assert named.most_common(1)[0][1] == 1
    # The counters counted each add, one by one.
    for key, value in counters.items():
        assert [change.entry.value for change in log if change.key == key] == [*range(1, value + 1)]
    assert sum(counters.values()) == sum(key.startswith("count/") for _, _, key in acknowledged)
    assert len(counters) == 4
    # The entries agree with the log.
    last = {change.key: change for change in log}
    assert {key: change.entry for key, change in last.items() if change.after is not None} == {
        key: entry for key, entry in entries.items() if key != "end"
    }
    # Every watcher saw all of it, in order.
    revisions = [change.revision for change in log]
    assert revisions == sorted(set(revisions))
    seen = [[c.revision, c.commit, c.op, c.key, None if c.op == "delete" else c.entry.value] for c in log]
    for one in deliveries:
        assert one == seen


async def test_many_processes_write_and_watchers_see_every_change_once(url: str) -> None:
    await run_writers(url)


async def test_a_server_that_is_restarted_under_them_loses_no_write(own_server: Postgres) -> None:
    """Once as an operator does it, once as if its processes had been killed."""
    await run_writers(url_of("restarted", own_server.url), own_server)


async def test_processes_that_open_an_empty_schema_at_once_make_one_store() -> None:
    """Of the processes that find no tables, one creates them. The others wait for it, and then find them."""
    with ExitStack() as stack:
        openers = [stack.enter_context(Process("opens")) for _ in range(8)]
        assert [await opener.receive_async() for opener in openers] == ["ready"] * 8

        for _ in range(40 if LONG else 5):
            schema = new_schema()
            for opener in openers:
                opener.send(url_of(schema))
            answers = [await opener.receive_async() for opener in openers]

            assert [problem for _, problem in answers] == [None] * 8
            assert len({store_id for store_id, _ in answers}) == 1
            async with connected() as connection:
                hits = f"SELECT value FROM {schema}.limpet_entries WHERE key = 'hits'"
                assert await connection.fetchval(hits) == "8"
                await connection.execute(f"DROP SCHEMA {schema} CASCADE")


async def test_a_client_that_is_stopped_in_its_transaction_holds_up_the_others_for_seconds_only(url: str) -> None:
    """The server ends a transaction that has been idle for five seconds. Its client, once resumed, retries."""
    async with limpet.open(url, sweep=False) as store:
        await store.add("count", 1)
        with Process("stops_inside", url) as stopped:
            _, status = await asyncio.to_thread(os.waitpid, stopped.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            began = time.monotonic()

            await store.put("other", 1)

            # It holds the namespace, so this cannot have gone at once; nor did it take a client's own patience.
            assert 1 < time.monotonic() - began < 20
            assert await store.get("count") == 1
            os.kill(stopped.pid, signal.SIGCONT)
            assert await stopped.receive_async() == 4

        assert [(change.key, change.revision) for change in await log_of(store)] == [
            ("count", 1),
            ("other", 2),
            ("count", 3),
        ]
