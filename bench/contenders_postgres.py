"""Stores on PostgreSQL: Limpet, its peers, and what the driver can do in the same time.

One server, with fsync on, serves all of them; each has its own schema. The driver's
limit gets 64 calls handed over as one list, and makes one statement of them.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import limpet
from bench.contenders import Contender, LimpetWriter, Role, Void, Writer, load
from bench.workload import Job, decode, encode

EXPECTED = {"fsync": "on", "synchronous_commit": "on"}

_TABLE = 'CREATE TABLE pairs (key text COLLATE "C" PRIMARY KEY, value jsonb NOT NULL)'
_UPSERT = "INSERT INTO pairs VALUES ($1, $2::text::jsonb) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
_SELECT = "SELECT value::text FROM pairs WHERE key = $1"
_UPSERT_ALL = (
    "INSERT INTO pairs SELECT key, value::jsonb FROM unnest($1::text[], $2::text[]) AS given (key, value)"
    " ON CONFLICT (key) DO UPDATE SET value = excluded.value"
)
_SELECT_ALL = "SELECT key, value::text FROM pairs WHERE key = ANY ($1)"
_SETTINGS = "SELECT current_setting('fsync') AS fsync, current_setting('synchronous_commit') AS synchronous_commit"


class OnPostgres(Contender):
    """A contender on the server whose URL it is given."""

    expects = EXPECTED
    keeps_files = False

    def __init__(self, url: str) -> None:
        self.url = url
        self.schema = f"bench_{uuid.uuid4().hex[:8]}"

    async def connect(self, count: int) -> Any:
        """A pool of the driver in a new schema, with all its connections made."""
        asyncpg = load("asyncpg")
        connection = await asyncpg.connect(self.url)
        await connection.execute(f"CREATE SCHEMA {self.schema}")
        await connection.close()
        return await asyncpg.create_pool(
            self.url, min_size=count, max_size=count, server_settings={"search_path": self.schema}
        )


class LimpetPostgres(LimpetWriter, OnPostgres):
    name = "Limpet"
    note = "versions, revisions, a log row of every change, TTL"

    async def open(self, folder: Path) -> None:
        self.store = await limpet.open(f"{self.url}?schema={self.schema}")

    async def settings(self) -> dict[str, str]:
        engine: Any = self.store._session.engine
        return _settings((await engine._fetch(_SETTINGS))[0])


class ByHand(LimpetPostgres):
    """The very function of ours on the server, called for 64 callers with nothing of the store above it.

    No key is checked, no entry made: this is the limit of the server and the driver.
    """

    name = "our statement by hand"
    role: ClassVar[Role] = "limit"
    note = "the rows that Limpet writes, without its checks, entries and retries"

    async def open(self, folder: Path) -> None:
        await super().open(folder)
        # The first put of a namespace takes another way.
        await self.store.put("begin", 0)
        engine: Any = self.store._session.engine
        self._engine = engine
        self._connection = await engine._acquire()
        self._statement = engine._sql(load("limpet.engines.postgres.sql").PUT)
        self._array = load("limpet.engines.postgres.rows").array_text
        self._names = itertools.count(1)
        self._waiting: list[tuple[str, str, asyncio.Future[None]]] = []
        self._group: asyncio.Task[None] | None = None

    async def put(self, key: str, value: Any) -> None:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[None] = loop.create_future()
        self._waiting.append((key, encode(value).decode(), answer))
        if self._group is None:
            self._group = loop.create_task(self._put_groups())
        await answer

    async def _put_groups(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting, []
            await self._put_texts([key for key, _, _ in group], [text for _, text, _ in group])
            for *_, answer in group:
                answer.set_result(None)
        self._group = None

    async def _put_texts(self, keys: list[str], texts: list[str]) -> None:
        weight = sum(map(len, keys)) + sum(map(len, texts))
        place = ("default", self._engine._channel, f"{next(self._names):x}", weight)
        items = (self._array(keys), "\n".join(texts))
        await self._connection.fetch(self._statement, *place, *items, *[None] * 9, 0)

    async def close(self) -> None:
        await self._engine._release(self._connection)
        await super().close()


class InHand(ByHand):
    """The same statement, and that of a read, for calls that are already in hand, as the driver's limit has them."""

    name = "our statement, 64 in hand"
    note = "the rows that Limpet writes and reads, for one caller who has 64 calls in hand"

    async def put_all(self, jobs: list[Job]) -> None:
        keys, texts = [key for key, _ in jobs], [encode(value).decode() for _, value in jobs]
        await self._put_texts(keys, texts)

    async def get_all(self, jobs: list[Job]) -> list[Any]:
        keys = [key for (key,) in jobs]
        statement = self._engine._sql(self._engine._read_statement)
        rows = await self._connection.fetch(statement, "default", "data", self._array(keys))
        found = {row[0]: row[2] for row in rows}
        return [decode(found[key]) for key in keys]


class AsyncpgPool(OnPostgres):
    name = "asyncpg pool of 10"
    note = "a key and a value; commits one by one"
    connections = 10

    async def open(self, folder: Path) -> None:
        self.pool = await self.connect(self.connections)
        await self.pool.execute(_TABLE)

    async def put(self, key: str, value: Any) -> None:
        await self.pool.execute(_UPSERT, key, encode(value).decode())

    async def get(self, key: str) -> Any:
        return decode(await self.pool.fetchval(_SELECT, key))

    async def put_all(self, jobs: list[Job]) -> None:
        texts = [encode(value).decode() for _, value in jobs]
        await self.pool.execute(_UPSERT_ALL, [key for key, _ in jobs], texts)

    async def fill(self, jobs: Iterable[Job]) -> None:
        await self.put_all(list(jobs))

    async def settings(self) -> dict[str, str]:
        return _settings(await self.pool.fetchrow(_SETTINGS))

    async def close(self) -> None:
        await self.pool.close()


class RawUnnest(AsyncpgPool):
    """The driver on one connection it keeps, with the callers' calls already in hand."""

    name = "asyncpg, 64 a statement"
    role = "limit"
    note = "one unnest upsert, one ANY select; a key and a value, nothing else"
    connections = 1

    async def open(self, folder: Path) -> None:
        await super().open(folder)
        self._connection = await self.pool.acquire()

    async def put_all(self, jobs: list[Job]) -> None:
        texts = [encode(value).decode() for _, value in jobs]
        await self._connection.execute(_UPSERT_ALL, [key for key, _ in jobs], texts)

    async def get_all(self, jobs: list[Job]) -> list[Any]:
        rows = await self._connection.fetch(_SELECT_ALL, [key for (key,) in jobs])
        found = {key: text for key, text in rows}
        return [decode(found[key]) for (key,) in jobs]

    async def put(self, key: str, value: Any) -> None:
        await self.put_all([(key, value)])

    async def get(self, key: str) -> Any:
        return (await self.get_all([(key,)]))[0]

    async def settings(self) -> dict[str, str]:
        return _settings(await self._connection.fetchrow(_SETTINGS))

    async def close(self) -> None:
        await self.pool.release(self._connection)
        await self.pool.close()


class OneStatement(Writer, OnPostgres):
    """A guarded put and a batch as one would write them by hand: one statement each, which also writes the log.

    Its revisions come from a sequence, which does not order them by commit, so nothing could follow its log safely.
    """

    name = "asyncpg, a statement a call"
    role: ClassVar[Role] = "limit"
    note = "compares, writes the row and a log row; through a pool of 10; no TTL, nothing tried again"
    connections = AsyncpgPool.connections

    async def open(self, folder: Path) -> None:
        self.pool = await self.connect(self.connections)
        await self.pool.execute(_TABLES)
        self._revisions: dict[str, int] = {}

    async def put(self, key: str, value: Any) -> None:
        await self.batch([(key, value)])

    async def get(self, key: str) -> Any:
        return decode(await self.pool.fetchval("SELECT value::text FROM versioned WHERE key = $1", key))

    async def load(self, keys: Iterable[str]) -> int:
        rows = await self.pool.fetch(
            "SELECT key, revision, version FROM versioned WHERE key = ANY ($1::text[])", list(keys)
        )
        self._revisions = {key: revision for key, revision, _ in rows}
        written: int = sum(version for *_, version in rows)
        if written != await self.pool.fetchval("SELECT count(*) FROM log"):
            raise Void(f"{self.name}: {written} writes, and another number of rows in the log")
        return written

    async def guarded(self, key: str, value: Any) -> None:
        text, expected = encode(value).decode(), self._revisions[key]
        revision = await self.pool.fetchval(_GUARDED, key, text, expected)
        if revision is None:
            raise Void(f"{self.name}: a guard has failed that holds")
        self._revisions[key] = revision

    async def batch(self, jobs: Sequence[Job]) -> None:
        texts = [encode(value).decode() for _, value in jobs]
        await self.pool.fetch(_BATCH, [key for key, _ in jobs], texts)

    async def fill(self, jobs: Iterable[Job]) -> None:
        await self.batch(list(jobs))

    async def settings(self) -> dict[str, str]:
        return _settings(await self.pool.fetchrow(_SETTINGS))

    async def close(self) -> None:
        await self.pool.close()


_TABLES = """
CREATE SEQUENCE revisions;
CREATE TABLE versioned (key text COLLATE "C" PRIMARY KEY, value jsonb NOT NULL, version bigint NOT NULL,
    revision bigint NOT NULL);
CREATE TABLE log (revision bigint PRIMARY KEY, key text COLLATE "C" NOT NULL, value jsonb NOT NULL,
    version bigint NOT NULL)"""
_GUARDED = """
WITH written AS (
    UPDATE versioned SET value = $2::text::jsonb, version = version + 1, revision = nextval('revisions')
    WHERE key = $1 AND revision = $3 RETURNING revision, key, value, version
), logged AS (INSERT INTO log (revision, key, value, version) SELECT * FROM written)
SELECT revision FROM written"""
# In the order of their keys, so that two batches never wait for each other.
_BATCH = """
WITH written AS (
    INSERT INTO versioned (key, value, version, revision)
    SELECT key, value::jsonb, 1, nextval('revisions')
    FROM unnest($1::text[], $2::text[]) AS given (key, value) ORDER BY key
    ON CONFLICT (key) DO UPDATE
    SET value = excluded.value, version = versioned.version + 1, revision = excluded.revision
    RETURNING revision, key, value, version
), logged AS (INSERT INTO log (revision, key, value, version) SELECT * FROM written)
SELECT revision FROM written"""


class LanggraphPostgres(OnPostgres):
    name = "LangGraph AsyncPostgresStore"
    note = "groups the calls of one loop turn; no versions, no log"

    async def open(self, folder: Path) -> None:
        psycopg, rows = load("psycopg"), load("psycopg.rows")
        options = {"autocommit": True, "row_factory": rows.dict_row, "prepare_threshold": 0}
        self._connection = await psycopg.AsyncConnection.connect(self.url, **options)
        await self._connection.execute(f"CREATE SCHEMA {self.schema}")
        await self._connection.execute(f"SET search_path = {self.schema}")
        self._store = load("langgraph.store.postgres.aio").AsyncPostgresStore(self._connection)
        await self._store.setup()

    async def put(self, key: str, value: Any) -> None:
        await self._store.aput(("bench",), key, value)

    async def get(self, key: str) -> Any:
        return (await self._store.aget(("bench",), key)).value

    async def settings(self) -> dict[str, str]:
        cursor = await self._connection.execute(_SETTINGS)
        return _settings(list((await cursor.fetchone()).values()))

    async def close(self) -> None:
        await self._connection.close()


class PyKeyValuePostgres(OnPostgres):
    name = "py-key-value PostgreSQLStore"
    note = "collections, TTL; commits one by one"

    async def open(self, folder: Path) -> None:
        self._pool = await self.connect(10)
        self._store = load("key_value.aio.stores.postgresql").PostgreSQLStore(pool=self._pool)
        await self._store.setup()

    async def put(self, key: str, value: Any) -> None:
        await self._store.put(key, value)

    async def get(self, key: str) -> Any:
        return await self._store.get(key)

    async def settings(self) -> dict[str, str]:
        return _settings(await self._pool.fetchrow(_SETTINGS))

    async def close(self) -> None:
        await self._pool.close()


def _settings(row: Any) -> dict[str, str]:
    fsync, synchronous_commit = row
    return {"fsync": fsync, "synchronous_commit": synchronous_commit}


CONTENDERS: tuple[type[OnPostgres], ...] = (
    LimpetPostgres,
    AsyncpgPool,
    LanggraphPostgres,
    PyKeyValuePostgres,
    RawUnnest,
    ByHand,
    InHand,
)
