"""How much work requests make, counted and not timed; ``./dev load`` takes the time on a machine that is quiet."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from limpet.engines.sqlite.group import GroupWriter
from limpet.server.logs import Logs
from tests.server.subjects_support import Plugins, eventually

pytest_plugins = ["tests.server.subjects_fixtures"]


def counted(monkeypatch: pytest.MonkeyPatch, thing: Any, name: str) -> list[tuple[Any, ...]]:
    """The calls of a method from now on."""
    calls: list[tuple[Any, ...]] = []
    before = getattr(thing, name)

    def call(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return before(*args, **options)

    monkeypatch.setattr(thing, name, call)
    return calls


async def test_kv_sets_that_come_together_are_committed_together(
    sqlite_nats: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sqlite_nats.ask("set", key="first", value=1)
    groups = counted(monkeypatch, GroupWriter, "_commit_group")

    replies = await asyncio.gather(*(sqlite_nats.ask("set", key=f"k{number}", value=number) for number in range(200)))

    assert all(reply == {"success": True} for reply in replies)
    assert len(groups) <= 100


async def test_kv_get_is_one_read_and_no_commit(sqlite_nats: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    await sqlite_nats.ask("set", key="k", value=1)
    engine = sqlite_nats.session.engine
    reads, commits = (counted(monkeypatch, engine, name) for name in ("read", "commit"))

    await sqlite_nats.ask("get", key="k")

    assert (len(reads), commits) == (1, [])


async def test_kv_list_reads_what_it_lists(nats: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thousand keys, ten by their prefix: one scan with a start and an end."""
    for first in range(0, 1000, 100):
        writes = [
            {"op": "put", "key": f"{number % 100:02}/{number}", "value": 1} for number in range(first, first + 100)
        ]
        await nats.ask("batch", writes=writes)
    scans = counted(monkeypatch, nats.session.engine, "scan")

    reply = await nats.ask("list", prefix="07/")

    assert reply["count"] == 10
    assert [(span.start, span.stop) for _, span in scans] == [("07/", "070")]


async def test_kv_a_slow_request_holds_up_nobody_elses(nats: Plugins) -> None:
    await nats.ask("lock", name="door", ttl=600)
    waiting = asyncio.ensure_future(nats.ask("lock", name="door", ttl=600, wait=20))

    replies = await asyncio.gather(*(nats.ask("incr", key=f"k{number % 5}") for number in range(100)))

    assert all(reply["success"] for reply in replies)
    assert not waiting.done()
    waiting.cancel()


async def test_kv_requests_leave_nothing_behind(sqlite_nats: Plugins) -> None:
    """A server that ran for a year has kept nothing of the requests that it answered."""
    await asyncio.gather(*(sqlite_nats.ask("set", key=f"k{number}", value=1) for number in range(500)))
    served: Any = sqlite_nats.served

    await eventually(lambda: not served._tasks)

    assert (served._running, len(served._backlog), served._backlog_bytes) == (0, 0, 0)
    assert not any(vars(served._queue).values())


@pytest.mark.slow
async def test_kv_cleanup_performance(nats: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand expired keys are a few dozen commits, and each of them leaves one change."""
    for first in range(0, 10_000, 128):
        numbers = range(first, min(first + 128, 10_000))
        await nats.ask("batch", writes=[{"op": "put", "key": f"k{n}", "value": 1, "ttl": 60} for n in numbers])
    nats.turn(61)
    commits = counted(monkeypatch, nats.session.engine, "commit")

    ended = await nats.session.sweeper.sweep("my-plugin")

    assert ended == 10_000
    assert len(commits) <= 10_000 / 50 + 1
    assert (await nats.ask("status"))["keys"] == 0


async def test_kv_cleanup_logging(sqlite_nats: Plugins, caplog: pytest.LogCaptureFixture) -> None:
    """The sweeper tells the log, which sums it up when its time has come."""
    caplog.set_level(logging.INFO, "limpet.server")
    logs = Logs(sqlite_nats.session.clock, cleanup_interval_s=300)
    sqlite_nats.session.sweeper.listeners.append(logs.swept)
    for number in range(42):
        await sqlite_nats.ask("set", key=f"temp{number}", value=1, ttl=1)
    sqlite_nats.session.sweeper.start()

    async with asyncio.timeout(120):
        while "KV cleanup: " not in caplog.text:
            sqlite_nats.turn(60)
            await asyncio.sleep(0.02)

    assert "KV cleanup: removed 42 expired keys in" in caplog.text
