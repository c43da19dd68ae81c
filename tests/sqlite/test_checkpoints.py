"""The write-ahead log is copied into the file beside the writer, and stays short."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

import limpet
from limpet.engines.sqlite import checkpoints
from limpet.engines.sqlite.checkpoints import PAGES_ALONE, Checkpoints
from limpet.engines.sqlite.connections import Connection
from limpet.engines.sqlite.engine import SqliteEngine
from limpet.model import Put
from tests.processes import PATIENCE_S
from tests.sqlite.cache_support import by_hand
from tests.sqlite.support import batch, in_place, open_sqlite

PAGE_BYTES = 4_096
THREAD = "limpet-sqlite-checkpoint"


def large_put(key: str, size_bytes: int) -> Put:
    return Put(key, b'"' + b"x" * size_bytes + b'"')


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


async def write(engine: SqliteEngine, commits: int, start: int = 0) -> None:
    for number in range(start, start + commits):
        await engine.commit("default", batch(*(large_put(f"key/{number}/{n}", 500) for n in range(20))))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(checkpoints, "PAGES", 100)
    return 100


async def test_a_log_begins_anew_beside_writers_that_never_stop(engine: SqliteEngine, short: int) -> None:
    """The pages that come meanwhile are copied while the writer waits, or it would grow for ever."""
    lengths: list[int] = []

    def times_begun() -> int:
        return sum(later < earlier for earlier, later in itertools.pairwise(lengths))

    async def go_on(task: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while times_begun() < 3:
            assert time.monotonic() < deadline
            await engine.commit("default", batch(large_put(f"{task}/{len(lengths) % 50}", 2_000)))
            assert engine._cached.wal is not None
            lengths.append(checkpoints._page_count(engine._cached.wal.read()))

    await asyncio.gather(*(go_on(task) for task in range(16)))

    assert max(lengths) < PAGES_ALONE


async def test_the_commit_that_makes_the_log_long_does_not_copy_it(engine: SqliteEngine, short: int) -> None:
    threads: list[str] = []
    copy = Checkpoints._copy

    def noted(self: Checkpoints, reader: Connection) -> int:
        threads.append(threading.current_thread().name)
        return copy(self, reader)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "_copy", noted)
        await write(engine, 30)
        until(lambda: bool(threads))

    assert {*threads} == {THREAD}
    assert engine._writer.connection is not None
    (pages,) = engine._writer.connection.execute("PRAGMA wal_autocheckpoint").fetchone()
    assert pages == PAGES_ALONE


async def test_a_reader_that_needs_the_log_is_not_disturbed(engine: SqliteEngine, path: Path, short: int) -> None:
    """Until it ends the log grows; then it is copied, and begins anew."""
    await write(engine, 1)
    with closing(by_hand(path)) as reader:
        reader.execute("BEGIN")
        (before,) = reader.execute("SELECT count(*) FROM limpet_entries").fetchone()
        await write(engine, 40, 1)
        (after,) = reader.execute("SELECT count(*) FROM limpet_entries").fetchone()
        assert before == after == 20
        reader.execute("COMMIT")

    async def is_anew() -> bool:
        wal = engine._cached.wal
        assert wal is not None
        await write(engine, 1, 50)
        return checkpoints._page_count(wal.read()) < short

    deadline = time.monotonic() + PATIENCE_S
    while not await is_anew():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def test_closing_ends_the_thread(url: str, clock: limpet.ManualClock, short: int) -> None:
    for turn in range(5):
        engine = in_place(open_sqlite(url, clock))
        in_place(write(engine, 20, 100 * turn))
        in_place(engine.close())
        assert THREAD not in [thread.name for thread in threading.enumerate()]


def test_a_commit_that_is_done_is_not_reported_as_failed(
    url: str, clock: limpet.ManualClock, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no thread can be started, a commit copies the log when it is much longer."""

    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    engine = in_place(open_sqlite(url, clock))
    in_place(write(engine, 30))

    assert in_place(engine.status("default")).keys == 600
    in_place(engine.close())
