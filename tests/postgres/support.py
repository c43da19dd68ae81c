"""Helpers: schemas, batches, a spy on statements, other processes."""

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
"""Whether to run the long forms of the tests."""

T = TypeVar("T")


def server() -> str:
    """The URL of the server that all tests share, as its superuser."""
    return os.environ["LIMPET_TEST_POSTGRES"]


def new_schema() -> str:
    return f"engine_{uuid.uuid4().hex[:16]}"


def url_of(schema: str, server_url: str | None = None, **options: str) -> str:
    """The URL of a schema."""
    more = "".join(f"&{name}={quote(value)}" for name, value in options.items())
    return f"{server_url or server()}?schema={quote(schema)}{more}"


@contextlib.asynccontextmanager
async def connected(url: str | None = None) -> AsyncIterator[Any]:
    """A plain connection of the driver."""
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
    """A batch with a new request id, and without guards unless given."""
    more = {"guards": (), "request_id": new_request_id(), **more}
    return Batch(writes=writes, **more)


def put(key: str, number: int) -> Put:
    return Put(key, b"%d" % number)


async def stored(engine: PostgresEngine, keys: Sequence[str], namespace: str = "default") -> dict[str, bytes]:
    """The stored values of those keys that exist."""
    found: list[Entry | None] = await engine.read(namespace, keys)
    return {entry.key: entry.stored for entry in found if entry is not None and isinstance(entry.stored, bytes)}


async def log_of(store: limpet.Store) -> list[Any]:
    """The whole log of a namespace, in order."""
    engine, found, after = store._session.engine, [], 0
    while True:
        page = await engine.changes(store.name, after)
        found += page.changes
        if page.next_after == after:
            return found
        after = page.next_after


def contend(engine: PostgresEngine, namespace: str, key: str) -> None:
    """Let an entry count as contended for a minute, so that commits which name it hold the namespace."""
    engine._committer.known(namespace).contention._until["data", key] = time.monotonic() + 60


# Waiting ----------------------------------------------------------------------


async def until(query: Callable[[], Awaitable[T]]) -> T:
    """Wait until a query of the server returns something true."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := await query()):
        assert time.monotonic() < deadline, "the condition did not become true"
        await asyncio.sleep(0.002)
    return found


async def blocked_by(connection: Any, pid: int) -> int:
    """Wait until another backend waits for a lock that this one holds. Returns how many do."""
    count = "SELECT count(*) FROM pg_stat_activity WHERE $1 = ANY (pg_blocking_pids(pid))"
    return await until(lambda: connection.fetchval(count, pid))


class Holder:
    """A transaction of another client, which locks a namespace until `release`."""

    def __init__(self, connection: Any, schema: str) -> None:
        self._connection = connection
        self._schema = quoted(schema)

    async def hold(self, namespace: str) -> None:
        await self._connection.execute("BEGIN")
        await self._connection.execute(f"SELECT {self._schema}.limpet_take($1)", namespace)

    async def await_waiter(self) -> None:
        """Wait until another backend waits for the namespace."""
        async with connected() as other:
            await blocked_by(other, self._connection.get_server_pid())

    async def release(self) -> None:
        await self._connection.execute("ROLLBACK")


# The statements of an engine ----------------------------------------------------


class Spy:
    """Records every statement of the engine's connections, in order, when its reply has come."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._records: list[Any] = []
        connect = asyncpg.connect

        async def connect_spied(*args: Any, **more: Any) -> Any:
            connection = await connect(*args, **more)
            # The connections of the tests themselves have no such timeout.
            if "command_timeout" in more:
                connection.add_query_logger(self._record)
            return connection

        monkeypatch.setattr(asyncpg, "connect", connect_spied)

    def _record(self, record: Any) -> None:
        # On a new connection the driver itself first queries the types of arrays.
        if "typeinfo_tree" not in record.query and "'jit'" not in record.query:
            self._records.append(record)

    async def calls(self) -> list[tuple[str, Sequence[Any]]]:
        """The statements so far, with their parameters."""
        # The driver logs a statement in the turn of the loop after its reply.
        await asyncio.sleep(0)
        return [(record.query, record.args) for record in self._records]

    async def statements(self) -> list[str]:
        """The statements so far."""
        return [statement for statement, _ in await self.calls()]

    async def count(self, text: str) -> int:
        """How many statements contain this."""
        return sum(text in statement for statement in await self.statements())

    async def forget(self) -> None:
        """Forget the statements so far."""
        await self.statements()
        self._records.clear()


# Other processes ----------------------------------------------------------------


class Process(processes.Process):
    """A function of ``tests.postgres.workers`` in its own process."""

    module = "tests.postgres.workers"
