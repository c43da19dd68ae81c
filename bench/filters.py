"""A sweeper's query over 100,000 records: which have not been touched for long?

Limpet uses an index. LangGraph's stores use their own search, which reads all records. On Redis the
alternative is what people write by hand: SCAN for the keys, then HGET of each.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import limpet
from bench import goals
from bench.contenders import load
from bench.run import Run, say
from bench.words import brief, table
from tests.servers import postgres, redis

RECORDS = 100_000
STUCK = 20
QUERIES = 20
BATCH = 128

Query = Callable[[], Awaitable[int]]
Opened = Callable[[], contextlib.AbstractAsyncContextManager[Query]]


def measure(run: Run) -> None:
    records = run.options.scaled(RECORDS, 2_000)
    file = run.folder / "filter.db"
    with contextlib.ExitStack() as servers:
        _race(
            run,
            "SQLite",
            lambda: _limpet(f"sqlite:///{file}", records),
            ("LangGraph search", lambda: _langgraph_sqlite(run.folder / "langgraph-filter.db", records)),
            goals.FILTER_SQLITE,
        )
        url = servers.enter_context(postgres()).url
        _race(
            run,
            "PostgreSQL",
            lambda: _limpet(f"{url}?schema=filter_limpet", records),
            ("LangGraph search", lambda: _langgraph_postgres(url, records)),
            goals.FILTER_POSTGRES,
        )
        server_url = servers.enter_context(redis()).url.rpartition("/")[0]
        _race(
            run,
            "Redis",
            lambda: _limpet(f"{server_url}/1", records),
            ("SCAN and HGET", lambda: _scan_and_hget(f"{server_url}/2", records)),
            goals.FILTER_REDIS,
        )


def _race(run: Run, engine: str, ours: Opened, theirs: tuple[str, Opened], goal: goals.Goal) -> None:
    name, other = theirs
    found = run.runner.run(_both(ours, other, run.options.scaled(2 if engine == "Redis" else 7, 1)))
    rows = [["Limpet, with an index", f"{brief(min(found[0]) * 1000)} ms"], [name, f"{brief(min(found[1]) * 1000)} ms"]]
    records = run.options.scaled(RECORDS, 2_000)
    say(f"\n{engine}: {STUCK} of {records:,} records by a field")
    say(table(["", "a query takes"], rows))
    ratios = [slow / fast for fast, slow in zip(*found, strict=True)]
    run.findings.judge("filter", f"{engine} filter by an index, x {name}", "x", ratios, goal)


async def _both(ours: Opened, theirs: Opened, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds for a query, round by round and in turn."""
    found: tuple[list[float], list[float]] = ([], [])
    async with ours() as mine, theirs() as other:
        for _ in range(rounds):
            for query, times, count in ((mine, found[0], QUERIES), (other, found[1], 1)):
                began = time.perf_counter()
                for _ in range(count):
                    if await query() != STUCK:
                        raise AssertionError("a query gave a wrong result")
                times.append((time.perf_counter() - began) / count)
    return found


def _fields(number: int) -> dict[str, Any]:
    """The fields of a record. Every so many records there is one that was not touched for long."""
    return {"state": "running", "worker": f"worker-{number % 50}", "updated_at": 1_700_000_000_000 + number}


BEFORE = 1_700_000_000_000 + STUCK


@contextlib.asynccontextmanager
async def _limpet(url: str, records: int) -> AsyncIterator[Query]:
    stuck = (limpet.field("updated_at") < BEFORE) & limpet.field("state").not_in(["completed", "failed", "cancelled"])
    async with limpet.open(url, sweep=False) as store:
        for first in range(0, records, BATCH):
            draft = store.batch()
            for number in range(first, min(first + BATCH, records)):
                draft.put(f"tasks/{number:06}", limpet.Fields(_fields(number)))
            await draft.commit()
        await store.index("updated_at")

        async def query() -> int:
            return len([entry async for entry in store.scan("tasks/", where=stuck)])

        yield query


@contextlib.asynccontextmanager
async def _langgraph_sqlite(path: Path, records: int) -> AsyncIterator[Query]:
    connection = await load("aiosqlite").connect(path, isolation_level=None)
    try:
        await connection.execute("PRAGMA journal_mode = WAL")
        store = load("langgraph.store.sqlite.aio").AsyncSqliteStore(connection)
        await store.setup()
        yield await _langgraph(store, records)
    finally:
        await connection.close()


@contextlib.asynccontextmanager
async def _langgraph_postgres(url: str, records: int) -> AsyncIterator[Query]:
    rows = load("psycopg.rows")
    connection = await load("psycopg").AsyncConnection.connect(url, autocommit=True, row_factory=rows.dict_row)
    try:
        await connection.execute("CREATE SCHEMA filter_langgraph")
        await connection.execute("SET search_path = filter_langgraph")
        store = load("langgraph.store.postgres.aio").AsyncPostgresStore(connection)
        await store.setup()
        yield await _langgraph(store, records)
    finally:
        await connection.close()


async def _langgraph(store: Any, records: int) -> Query:
    op = load("langgraph.store.base").PutOp
    for first in range(0, records, 500):
        numbers = range(first, min(first + 500, records))
        await store.abatch([op(("tasks",), f"{number:06}", _fields(number)) for number in numbers])

    async def query() -> int:
        return len(await store.asearch(("tasks",), filter={"updated_at": {"$lt": BEFORE}}, limit=1000))

    return query


@contextlib.asynccontextmanager
async def _scan_and_hget(url: str, records: int) -> AsyncIterator[Query]:
    async with load("redis.asyncio").Redis.from_url(url) as client:
        for first in range(0, records, 1000):
            async with client.pipeline(transaction=False) as pipe:
                for number in range(first, min(first + 1000, records)):
                    pipe.hset(f"tasks:{number:06}", mapping=_fields(number))
                await pipe.execute()

        async def query() -> int:
            count = 0
            async for key in client.scan_iter(match="tasks:*", count=1000):
                state, updated_at = await client.hmget(key, "state", "updated_at")
                count += int(updated_at) < BEFORE and state not in (b"completed", b"failed", b"cancelled")
            return count

        yield query
