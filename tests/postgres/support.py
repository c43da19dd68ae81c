"""Helpers: schemas of one's own, batches, a spy on statements, other processes to talk to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import asyncpg
import pytest

import limpet
from limpet.engines.postgres.engine import PostgresEngine
from limpet.engines.sql_indexes import quoted
from limpet.model import Batch, Entry, Put, Write
from limpet.opening import open_engine
from limpet.request_ids import new_request_id
from tests import processes
from tests.processes import PATIENCE_S

ROOT = Path(__file__).parents[2]
LONG = bool(os.environ.get("LIMPET_POSTGRES_LONG"))
"""Whether the long forms of the tests are asked for."""

T = TypeVar("T")


def server() -> str:
    """The URL of the server that all tests share, as its superuser."""
    return os.environ["LIMPET_TEST_POSTGRES"]


def new_schema() -> str:
    return f"engine_{uuid.uuid4().hex[:16]}"


def url_of(schema: str, server_url: str | None = None, **options: str) -> str:
    """How to open a schema."""
    more = "".join(f"&{name}={quote(value)}" for name, value in options.items())
    return f"{server_url or server()}?schema={quote(schema)}{more}"


@contextlib.asynccontextmanager
async def connected(url: str | None = None) -> AsyncIterator[Any]:
    """A connection that knows nothing of Limpet."""
    connection = await asyncpg.connect(url or server())
    try:
        yield connection
    finally:
        await connection.close()


async def open_postgres(url: str) -> PostgresEngine:
    engine = await open_engine(url, limpet.SystemClock())
    assert isinstance(engine, PostgresEngine)
    return engine


def engine_of(store: limpet.Store) -> PostgresEngine:
    engine = store._session.engine
    assert isinstance(engine, PostgresEngine)
    return engine


# Batches ----------------------------------------------------------------------


def batch(*writes: Write, **more: Any) -> Batch:
    """A batch without guards, under an id of its own."""
    more = {"guards": (), "request_id": new_request_id(), **more}
    return Batch(writes=writes, **more)


def put(key: str, number: int) -> Put:
    return Put(key, b"%d" % number)


async def stored(engine: PostgresEngine, keys: Sequence[str], namespace: str = "default") -> dict[str, bytes]:
    """What is stored under these keys, leaving out those that are not there."""
    found: list[Entry | None] = await engine.read(namespace, keys)
    return {entry.key: entry.stored for entry in found if entry is not None and isinstance(entry.stored, bytes)}


async def log_of(store: limpet.Store) -> list[Any]:
    """The whole log of a namespace, in order."""
    engine, found, after = store._session.engine, [], 0
    while True:
        feed = await engine.changes(store.name, after)
        found += feed.changes
        if feed.next_after == after:
            return found
        after = feed.next_after


# Waiting ----------------------------------------------------------------------


async def until(is_so: Callable[[], Awaitable[T]]) -> T:
    """Wait for something that the server can tell. Each question is a round trip, so nobody spins."""
    deadline = time.monotonic() + PATIENCE_S
    while not (answer := await is_so()):
        assert time.monotonic() < deadline, "it did not come to pass"
        await asyncio.sleep(0.002)
    return answer


async def blocked_by(connection: Any, pid: int) -> int:
    """Wait until somebody waits for a lock that this backend holds. Returns how many do."""
    count = "SELECT count(*) FROM pg_stat_activity WHERE $1 = ANY (pg_blocking_pids(pid))"
    return await until(lambda: connection.fetchval(count, pid))


class Holder:
    """Somebody else's transaction, which holds a namespace until it is let go."""

    def __init__(self, connection: Any, schema: str) -> None:
        self._connection = connection
        self._schema = quoted(schema)

    async def hold(self, namespace: str) -> None:
        await self._connection.execute("BEGIN")
        await self._connection.execute(f"SELECT {self._schema}.limpet_take($1)", namespace)

    async def await_waiting(self) -> None:
        """Wait until somebody stands before the namespace."""
        async with connected() as other:
            await blocked_by(other, self._connection.get_server_pid())

    async def let_go(self) -> None:
        await self._connection.execute("ROLLBACK")


# What the engine says to its server ---------------------------------------------


class Spy:
    """Sees every statement of the engine's connections, in order, once its answer has come."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._records: list[Any] = []
        connect = asyncpg.connect

        async def connect_spied(*args: Any, **more: Any) -> Any:
            connection = await connect(*args, **more)
            # The tests' own connections have no such bound.
            if "command_timeout" in more:
                connection.add_query_logger(self._heard)
            return connection

        monkeypatch.setattr(asyncpg, "connect", connect_spied)

    def _heard(self, record: Any) -> None:
        # On a new connection the driver first asks, for itself, what an array is.
        if "typeinfo_tree" not in record.query and "'jit'" not in record.query:
            self._records.append(record)

    async def asked(self) -> list[tuple[str, Sequence[Any]]]:
        """The statements so far, with their parameters."""
        # The driver tells in the turn after the answer.
        await asyncio.sleep(0)
        return [(record.query, record.args) for record in self._records]

    async def said(self) -> list[str]:
        """The statements so far."""
        return [statement for statement, _ in await self.asked()]

    async def count(self, text: str) -> int:
        """How many statements contain this."""
        return sum(text in statement for statement in await self.said())

    async def forget(self) -> None:
        """Count from here on."""
        await self.said()
        self._records.clear()


# Other processes ----------------------------------------------------------------


class Process(processes.Process):
    """A function of ``tests.postgres.workers`` in a process of its own."""

    module = "tests.postgres.workers"
