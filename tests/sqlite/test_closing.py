"""Closing, and event loops that come and go: no caller is left waiting, nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest

import limpet
import limpet.sync
from limpet.engines.sqlite.engine import SqliteEngine
from limpet.errors import Closed
from limpet.model import Commit
from tests.processes import PATIENCE_S
from tests.sqlite.support import Gate, Queue, Spy, VanishingLoop, batch, in_place, open_sqlite, put, stored


def limpet_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("limpet-")}


async def test_commits_that_began_are_finished(url: str, clock: limpet.ManualClock) -> None:
    """Commits that began are finished; later calls raise Closed."""
    engine = await open_sqlite(url, clock)
    tasks = [asyncio.create_task(engine.commit("default", batch(put(f"key/{n}", n)))) for n in range(300)]
    await asyncio.sleep(0)

    await engine.close()

    assert {type(await task) for task in tasks} == {Commit}
    with pytest.raises(Closed):
        await engine.commit("default", batch(put("late", 1)))
    async with limpet.open(url, clock=clock, sweep=False) as store:
        assert (await store.keys("key/")).count == 300
        assert await store.get("late") is None


async def test_closing_right_after_a_write_leaves_no_thread(url: str, clock: limpet.ManualClock) -> None:
    """Commits that began are finished; later calls raise Closed.

    The loop was about to hand the write to the writer's thread when the engine was closed, which did it instead.
    """
    before = limpet_threads()
    engine = await open_sqlite(url, clock)
    task = asyncio.create_task(engine.commit("default", batch(put("key", 1))))
    await asyncio.sleep(0)

    await engine.close()
    await task
    await asyncio.sleep(0)

    assert limpet_threads() == before


async def test_a_closed_engine_leaves_no_thread_and_no_file(path: Path, url: str) -> None:
    """The WAL is folded into the file by the last one to close."""
    before = limpet_threads()
    async with limpet.open(url) as store:
        await store.put("key", 1)
        assert [entry.key async for entry in store.scan(where=limpet.field("a") != 1)] == ["key"]

    assert limpet_threads() == before
    assert [found.name for found in path.parent.iterdir()] == ["state.db"]


@pytest.mark.parametrize("has_thread", [False, True])
async def test_a_commit_that_meets_a_close_is_answered(engine: SqliteEngine, has_thread: bool) -> None:
    """Commits that began are finished; later calls raise Closed.

    Another thread closes the engine after a task has checked that it is open and before it is queued.
    """
    before = limpet_threads()
    if has_thread:
        await engine.commit("default", batch(put("key", 1)))

    def close() -> None:
        closing = threading.Thread(target=lambda: asyncio.run(engine.close()))
        closing.start()
        closing.join(PATIENCE_S)

    engine._writer.queue = Queue(before=close)

    with pytest.raises(Closed):
        await asyncio.wait_for(engine.commit("default", batch(put("key", 2))), 60)
    assert limpet_threads() <= before


async def test_a_waiter_for_changes_is_notified_of_the_close(engine: SqliteEngine) -> None:
    """Callers that wait for changes are woken and get Closed."""
    waiting = asyncio.create_task(engine.changes("default", 0, wait_s=60.0))
    await asyncio.sleep(0)

    await engine.close()

    with pytest.raises(Closed):
        await asyncio.wait_for(waiting, 60)


def test_a_loop_that_vanished_with_a_waiter_harms_no_other_caller(url: str, clock: limpet.ManualClock) -> None:
    """Threads that write at once lose nothing.

    A task waits for its commit when its loop is closed, at the very moment when it is to be answered. The
    thread that committed for it has done nothing wrong, and gets its reply.
    """
    engine = asyncio.run(open_sqlite(url, clock))
    engine._writer._flush = lambda loop: None  # type: ignore[method-assign]
    loop = VanishingLoop()
    task = loop.leave(engine.commit("default", batch(put("task", 1))))

    outcome = in_place(engine.commit("default", batch(put("thread", 1))))

    assert isinstance(outcome, Commit)
    assert loop.is_closed()
    assert in_place(stored(engine, ["task", "thread"])) == {"task": b"1", "thread": b"1"}
    asyncio.run(engine.close())
    del task


def test_a_watcher_whose_loop_vanished_does_not_fail_a_commit(url: str, clock: limpet.ManualClock) -> None:
    """A slow watcher misses nothing and delays no other.

    The watcher's loop is closed just when the commit, which is durable already, rings for it.
    """
    engine = asyncio.run(open_sqlite(url, clock))
    loop = VanishingLoop()
    task = loop.leave(engine.changes("default", 0, wait_s=60.0))

    outcome = in_place(engine.commit("default", batch(put("key", 1))))

    assert isinstance(outcome, Commit)
    assert loop.is_closed()
    asyncio.run(engine.close())
    del task


def test_a_loop_that_was_closed_with_its_writes_under_way(url: str, clock: limpet.ManualClock, spy: Spy) -> None:
    """Cancelling a caller leaves the batch done or not done, never half.

    The program's loop ends while the writer's thread is in COMMIT. The engine, which others use, goes on.
    """
    engine = asyncio.run(open_sqlite(url, clock))
    gate = Gate()
    spy.before["COMMIT"] = gate

    async def write_and_leave() -> None:
        task = asyncio.create_task(engine.commit("default", batch(put("key", 1))))
        await asyncio.sleep(0)
        await asyncio.to_thread(gate.await_thread)
        task.cancel()

    asyncio.run(write_and_leave())
    gate.open()

    assert isinstance(asyncio.run(engine.commit("default", batch(put("other", 1)))), Commit)
    assert in_place(stored(engine, ["key", "other"])) == {"key": b"1", "other": b"1"}
    asyncio.run(engine.close())


def test_two_loops_that_write_for_the_first_time_share_one_writer(
    url: str, clock: limpet.ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commits that began are finished; later calls raise Closed.

    Two loops in two threads find no writer's thread yet, at the same moment. If each made one, closing would stop
    one of them and might wait for the other for ever.
    """
    before = limpet_threads()
    engine = asyncio.run(open_sqlite(url, clock))
    both = threading.Barrier(2)

    class Slow(threading.Thread):
        def __init__(self, *args: Any, **more: Any) -> None:
            if str(more.get("name")).startswith("limpet-sqlite-writer"):
                # A second one comes here only if nothing keeps it from doing so.
                with contextlib.suppress(threading.BrokenBarrierError):
                    both.wait(0.3)
            super().__init__(*args, **more)

    real = threading.Thread
    monkeypatch.setattr(threading, "Thread", Slow)
    writers = [
        real(target=lambda n=n: asyncio.run(engine.commit("default", batch(put(f"key/{n}", n))))) for n in range(2)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(PATIENCE_S)

    closing = real(target=lambda: asyncio.run(engine.close()), daemon=True)
    closing.start()
    closing.join(5)

    assert not closing.is_alive(), "closing waits for a writer that was not notified"
    assert limpet_threads() == before


@pytest.mark.parametrize("api", ["async", "sync"])
async def test_a_store_can_be_opened_and_closed_many_times(url: str, api: str) -> None:
    """A closed store raises Closed from every verb, and closing twice is allowed."""
    before = limpet_threads()
    for number in range(1, 21):
        if api == "async":
            store = await limpet.open(url)
            assert await store.add("hits") == number
            await store.close()
            await store.close()
        else:
            blocking = await asyncio.to_thread(limpet.sync.open, url)
            assert await asyncio.to_thread(blocking.add, "hits") == number
            await asyncio.to_thread(blocking.close)
            await asyncio.to_thread(blocking.close)

    assert limpet_threads() == before
