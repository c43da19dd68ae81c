"""Helpers: a spy on the engine's connections, gates to hold a thread at, other processes to talk to.

A spy changes the replies of the database, never the database: beneath it is the real one.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from limpet.clock import Clock
from limpet.engines.sqlite import connections
from limpet.engines.sqlite.engine import SqliteEngine
from limpet.model import Batch, Entry, Put, Write
from limpet.opening import open_engine
from tests import processes
from tests.processes import PATIENCE_S

ROOT = Path(__file__).parents[2]

T = TypeVar("T")

Hook = Callable[[sqlite3.Connection], object]


class Spy:
    """Sees the statements of writers, in order, and may step in before or after one.

    ``before["COMMIT"]`` runs instead of the statement when it raises; ``after["COMMIT"]`` runs when
    the statement has been done, so that raising there loses its answer. ``opened`` runs on each new connection.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.before: dict[str, Hook] = {}
        self.after: dict[str, Hook] = {}
        self.opened: Hook | None = None
        self.statements: list[str] = []
        spy = self

        class Spied(connections.Connection):
            writes = False

            def __init__(self, *args: Any, **more: Any) -> None:
                super().__init__(*args, **more)
                if spy.opened is not None:
                    spy.opened(self)

            def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
                if sql == "BEGIN IMMEDIATE":
                    self.writes = True
                if not self.writes:
                    return super().execute(sql, parameters)
                spy.statements.append(sql)
                if sql in spy.before:
                    spy.before[sql](self)
                cursor = super().execute(sql, parameters)
                if sql in spy.after:
                    spy.after[sql](self)
                return cursor

        monkeypatch.setattr(connections, "Connection", Spied)

    def count(self, sql: str) -> int:
        """How often writers ran this statement."""
        return self.statements.count(sql)

    def forget(self) -> None:
        """Count from here on."""
        self.statements.clear()


def sqlite_error(name: str, message: str) -> sqlite3.OperationalError:
    """An error as the driver raises it."""
    error = sqlite3.OperationalError(message)
    error.sqlite_errorname = name
    return error


class Times:
    """A hook that raises the first so many times it is called."""

    def __init__(self, times: int, error: Callable[[], BaseException]) -> None:
        self.left = times
        self._error = error

    def __call__(self, _: sqlite3.Connection) -> None:
        if self.left > 0:
            self.left -= 1
            raise self._error()


class Gate:
    """Holds each thread that comes until it is opened."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._opened = threading.Event()

    def __call__(self, *_: object) -> None:
        self._reached.set()
        assert self._opened.wait(PATIENCE_S), "no thread opened the gate"

    def await_thread(self) -> None:
        """Wait until a thread stands here."""
        assert self._reached.wait(PATIENCE_S), "no thread came to the gate"

    def open(self) -> None:
        self._opened.set()


class Queue(deque[Any]):
    """The engine's queue of commits, with places to stop before and after queueing."""

    def __init__(self, *, before: Callable[[], object] = bool, after: Callable[[], object] = bool) -> None:
        super().__init__()
        self._before, self._after = before, after

    def append(self, ticket: Any, /) -> None:
        self._before()
        super().append(ticket)
        self._after()


class VanishingLoop(asyncio.SelectorEventLoop):
    """A loop whose owner closes it just before another thread calls into it, which saw it open a moment ago."""

    vanishes = False

    def call_soon_threadsafe(self, *args: Any, **more: Any) -> asyncio.Handle:  # type: ignore[override]
        if self.vanishes:
            self.close()
        return super().call_soon_threadsafe(*args, **more)

    def __del__(self) -> None:
        # A test that failed has not come to closing it, and must not fail the next test as well.
        if not self.is_closed():
            self.close()

    def leave(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Begin some work, stop where it waits, and vanish when next called."""
        task = self.create_task(work)
        # No caller will ever wait for it, which is intended here.
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        self.call_soon(self.stop)
        self.run_forever()
        self.vanishes = True
        return task


def in_place(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine where no loop runs, as the sync API does."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("it suspended")


def until(is_so: Callable[[], object]) -> None:
    """Wait for something that another thread or process does."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.001)


_numbers = iter(range(1, 1_000_000_000))


def batch(*writes: Write, **more: Any) -> Batch:
    """A batch without guards, under an id of its own."""
    more = {"guards": (), "request_id": f"request-{next(_numbers)}", **more}
    return Batch(writes=writes, **more)


def put(key: str, number: int) -> Put:
    return Put(key, b"%d" % number)


async def open_sqlite(url: str, clock: Clock) -> SqliteEngine:
    engine = await open_engine(url, clock)
    assert isinstance(engine, SqliteEngine)
    return engine


async def stored(engine: SqliteEngine, keys: Sequence[str], namespace: str = "default") -> dict[str, bytes]:
    """What is stored under these keys, leaving out those that are not there."""
    found: Iterable[Entry | None] = await engine.read(namespace, keys)
    return {entry.key: entry.stored for entry in found if entry is not None and isinstance(entry.stored, bytes)}


class Process(processes.Process):
    """A function of ``tests.sqlite.workers`` in a process of its own."""

    module = "tests.sqlite.workers"


def together(processes: Sequence[Process]) -> None:
    """Let processes that wait for it begin at the same moment."""
    moment = time.monotonic() + 0.02
    for process in processes:
        process.send(moment)
