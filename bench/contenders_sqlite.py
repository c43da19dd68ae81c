"""Stores on SQLite: Limpet, its peers, and what SQLite itself can do in the same time.

Each has its own file in WAL mode and reads its sync setting from its own connection. ``FULL``
means that a write is on the disk when the call returns, ``NORMAL`` that a power cut may lose it.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import limpet
import limpet.sync
from bench.contenders import BlockingContender, Contender, LimpetWriter, Role, Void, Writer, load
from bench.workload import Job, decode, encode

T = TypeVar("T")
Synchronous = Literal["FULL", "NORMAL"]

_LEVELS = {"1": "NORMAL", "2": "FULL"}
_TABLE = "CREATE TABLE pairs (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID"
_UPSERT = "INSERT INTO pairs VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
_SELECT = "SELECT value FROM pairs WHERE key = ?"


def _expected_settings(synchronous: Synchronous) -> dict[str, str]:
    return {"journal_mode": "wal", "synchronous": synchronous}


def _settings(journal_mode: Any, synchronous: Any) -> dict[str, str]:
    mode = journal_mode.decode() if isinstance(journal_mode, bytes) else str(journal_mode)
    return {"journal_mode": mode, "synchronous": _LEVELS.get(str(synchronous), str(synchronous))}


def _settings_of(connection: Any) -> dict[str, str]:
    return _settings(*(connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")))


# Limpet -----------------------------------------------------------------------


class LimpetFull(LimpetWriter):
    name = "Limpet FULL"
    note = "versions, revisions, a log row of every change, TTL"
    synchronous: ClassVar[Synchronous] = "FULL"
    expects = _expected_settings("FULL")

    async def open(self, folder: Path) -> None:
        self.path = folder / "limpet.db"
        self.store = await limpet.open(f"sqlite:///{self.path}?synchronous={self.synchronous.lower()}")

    async def settings(self) -> dict[str, str]:
        return _settings_of(_writer_of(self.store))


class LimpetNormal(LimpetFull):
    name = "Limpet NORMAL"
    synchronous = "NORMAL"
    expects = _expected_settings("NORMAL")


class LimpetBlockingFull(BlockingContender):
    name = "Limpet, blocking, FULL"
    role = "limpet"
    note = LimpetFull.note
    synchronous: ClassVar[Synchronous] = "FULL"
    expects = _expected_settings("FULL")

    def open(self, folder: Path) -> None:
        self._store = limpet.sync.open(f"sqlite:///{folder / 'limpet.db'}?synchronous={self.synchronous.lower()}")

    def put(self, key: str, value: Any) -> None:
        self._store.put(key, value)

    def get(self, key: str) -> Any:
        return self._store.get(key)

    def fill(self, jobs: Iterable[Job]) -> None:
        pending = list(jobs)
        for start in range(0, len(pending), 128):
            draft = self._store.batch()
            for key, value in pending[start : start + 128]:
                draft.put(key, value)
            draft.commit()

    def settings(self) -> dict[str, str]:
        return _settings_of(_writer_of(self._store._twin))

    def close(self) -> None:
        self._store.close()


class LimpetBlockingNormal(LimpetBlockingFull):
    name = "Limpet, blocking, NORMAL"
    synchronous = "NORMAL"
    expects = _expected_settings("NORMAL")


def _writer_of(store: limpet.Store) -> Any:
    """The very connection that commits."""
    engine: Any = store._session.engine
    assert engine._writer.connection is not None, "nothing was written yet"
    return engine._writer.connection


# Peers ------------------------------------------------------------------------


class Aiosqlite(Contender):
    name = "aiosqlite upsert"
    note = "a key and a value; commits one by one"
    expects = _expected_settings("FULL")

    async def open(self, folder: Path) -> None:
        # Autocommit: tasks that share a connection would commit each other's transactions.
        self.connection = await load("aiosqlite").connect(folder / "pairs.db", isolation_level=None)
        await self.connection.execute("PRAGMA journal_mode = WAL")
        await self.connection.execute("PRAGMA synchronous = FULL")
        await self.connection.execute(_TABLE)

    async def put(self, key: str, value: Any) -> None:
        # One trip to its thread, where execute and close would be two.
        await self.connection.execute_fetchall(_UPSERT, (key, encode(value)))

    async def get(self, key: str) -> Any:
        ((found,),) = await self.connection.execute_fetchall(_SELECT, (key,))
        return decode(found)

    async def fill(self, jobs: Iterable[Job]) -> None:
        await self.connection.execute("BEGIN")
        await self.connection.executemany(_UPSERT, [(key, encode(value)) for key, value in jobs])
        await self.connection.execute("COMMIT")

    async def settings(self) -> dict[str, str]:
        return await _awaited_settings_of(self.connection)

    async def close(self) -> None:
        await self.connection.close()


class LanggraphSqlite(Contender):
    name = "LangGraph AsyncSqliteStore"
    note = "groups the calls of one loop turn; no versions, no log; set to WAL"
    expects = _expected_settings("FULL")

    async def open(self, folder: Path) -> None:
        self._connection = await load("aiosqlite").connect(folder / "store.db", isolation_level=None)
        await self._connection.execute("PRAGMA journal_mode = WAL")
        await self._connection.execute("PRAGMA synchronous = FULL")
        self._store = load("langgraph.store.sqlite.aio").AsyncSqliteStore(self._connection)
        await self._store.setup()

    async def put(self, key: str, value: Any) -> None:
        await self._store.aput(("bench",), key, value)

    async def get(self, key: str) -> Any:
        return (await self._store.aget(("bench",), key)).value

    async def settings(self) -> dict[str, str]:
        return await _awaited_settings_of(self._store.conn)

    async def close(self) -> None:
        await self._connection.close()


class PyKeyValueDisk(Contender):
    name = "py-key-value DiskStore"
    note = "on diskcache; blocks the loop; commits one by one"
    expects = _expected_settings("FULL")

    async def open(self, folder: Path) -> None:
        self._cache = _diskcache(folder, "FULL")
        # It treats an empty cache as missing, and would then have none.
        self._cache.set("first", b"")
        self._store = load("key_value.aio.stores.disk").DiskStore(disk_cache=self._cache)

    async def put(self, key: str, value: Any) -> None:
        await self._store.put(key, value)

    async def get(self, key: str) -> Any:
        return await self._store.get(key)

    async def fill(self, jobs: Iterable[Job]) -> None:
        with self._cache.transact():
            for job in jobs:
                await self.put(*job)

    async def settings(self) -> dict[str, str]:
        return _settings_of_cache(self._cache)

    async def close(self) -> None:
        self._cache.close()


class DiskcacheFull(BlockingContender):
    name = "diskcache FULL"
    note = "blocking; TTL; no eviction; commits one by one"
    synchronous: ClassVar[Synchronous] = "FULL"
    expects = _expected_settings("FULL")

    def open(self, folder: Path) -> None:
        self._cache = _diskcache(folder, self.synchronous)

    def put(self, key: str, value: Any) -> None:
        # Bytes go into the row as they are, which is faster than letting it pickle the object.
        self._cache.set(key, encode(value))

    def get(self, key: str) -> Any:
        return decode(self._cache.get(key))

    def fill(self, jobs: Iterable[Job]) -> None:
        with self._cache.transact():
            super().fill(jobs)

    def settings(self) -> dict[str, str]:
        return _settings_of_cache(self._cache)

    def close(self) -> None:
        self._cache.close()


class DiskcacheNormal(DiskcacheFull):
    name = "diskcache NORMAL"
    synchronous = "NORMAL"
    expects = _expected_settings("NORMAL")


def _diskcache(folder: Path, synchronous: Synchronous) -> Any:
    """A cache that evicts nothing, which is both fair and its fastest."""
    level = {"NORMAL": 1, "FULL": 2}[synchronous]
    return load("diskcache").Cache(str(folder), eviction_policy="none", cull_limit=0, sqlite_synchronous=level)


def _settings_of_cache(cache: Any) -> dict[str, str]:
    return _settings(*(cache._sql(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")))


async def _awaited_settings_of(connection: Any) -> dict[str, str]:
    found = []
    for name in ("journal_mode", "synchronous"):
        ((setting,),) = await connection.execute_fetchall(f"PRAGMA {name}")
        found.append(setting)
    return _settings(*found)


# Limits -----------------------------------------------------------------------


def _tune(connection: sqlite3.Connection) -> None:
    """Set it up as Limpet does, so that the limit is one."""
    for setting in ("journal_mode = WAL", "synchronous = FULL", "wal_autocheckpoint = 4000"):
        connection.execute(f"PRAGMA {setting}")
    connection.execute("PRAGMA cache_size = -65536")
    connection.execute("PRAGMA mmap_size = 268435456")


class RawBatched(BlockingContender):
    """The standard library's sqlite3 with the caller's calls already in hand, 64 to a transaction."""

    name = "sqlite3, 64 a transaction"
    role = "limit"
    note = "a key and a value, nothing else"
    expects = _expected_settings("FULL")

    def open(self, folder: Path) -> None:
        self._connection = sqlite3.connect(folder / "pairs.db", isolation_level=None)
        _tune(self._connection)
        self._create()

    def _create(self) -> None:
        self._connection.execute(_TABLE)

    def put_all(self, jobs: Sequence[Job]) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.executemany(_UPSERT, [(key, encode(value)) for key, value in jobs])
        self._connection.execute("COMMIT")

    def get_all(self, jobs: Sequence[Job]) -> list[Any]:
        self._connection.execute("BEGIN")
        found = [decode(self._connection.execute(_SELECT, job).fetchone()[0]) for job in jobs]
        self._connection.execute("COMMIT")
        return found

    def put(self, key: str, value: Any) -> None:
        self.put_all([(key, value)])

    def get(self, key: str) -> Any:
        return self.get_all([(key,)])[0]

    def fill(self, jobs: Iterable[Job]) -> None:
        self.put_all(list(jobs))

    def settings(self) -> dict[str, str]:
        return _settings_of(self._connection)

    def close(self) -> None:
        self._connection.close()


_VERSIONED = (
    "CREATE TABLE pairs (key TEXT PRIMARY KEY, value BLOB NOT NULL, version INTEGER NOT NULL,"
    " revision INTEGER NOT NULL) WITHOUT ROWID"
)
_LOG = (
    "CREATE TABLE log (revision INTEGER PRIMARY KEY, key TEXT NOT NULL, value BLOB NOT NULL, version INTEGER NOT NULL)"
)
_UPSERT_VERSION = (
    "INSERT INTO pairs VALUES (?, ?, ?, ?) ON CONFLICT (key) DO UPDATE"
    " SET value = excluded.value, version = excluded.version, revision = excluded.revision"
)
_INSERT_LOG = "INSERT INTO log (key, value, version, revision) VALUES (?, ?, ?, ?)"


class RawSameWork(RawBatched):
    """As above, with the work that a version, a revision and a log need: a read, a log row, a counter."""

    name = "sqlite3, the same work"
    note = "64 a transaction; reads the row, writes it and a log row, moves a counter"

    def _create(self) -> None:
        self._connection.execute(_VERSIONED)
        self._connection.execute(_LOG)
        self._connection.execute("CREATE TABLE counter (revision INTEGER NOT NULL)")
        self._connection.execute("INSERT INTO counter VALUES (0)")

    def put_all(self, jobs: Sequence[Job]) -> None:
        execute = self._connection.execute
        execute("BEGIN IMMEDIATE")
        (revision,) = execute("SELECT revision FROM counter").fetchone()
        rows = []
        for key, value in jobs:
            found = execute("SELECT value, version, revision FROM pairs WHERE key = ?", (key,)).fetchone()
            revision += 1
            rows.append((key, encode(value), 1 if found is None else found[1] + 1, revision))
        self._connection.executemany(_UPSERT_VERSION, rows)
        self._connection.executemany(_INSERT_LOG, rows)
        execute("UPDATE counter SET revision = ?", (revision,))
        execute("COMMIT")


class OneTransaction(Writer):
    """A guarded put and a batch as one would write them by hand: a transaction each, in a thread of its own."""

    name = "sqlite3, a transaction a call"
    role: ClassVar[Role] = "limit"
    note = "compares, writes the row and a log row; commits one by one; no TTL"
    expects = _expected_settings("FULL")

    async def open(self, folder: Path) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._revisions: dict[str, int] = {}
        await self._run(self._open, folder)

    def _open(self, folder: Path) -> None:
        self._connection = sqlite3.connect(folder / "pairs.db", isolation_level=None)
        _tune(self._connection)
        self._connection.execute(_VERSIONED)
        self._connection.execute(_LOG)

    async def put(self, key: str, value: Any) -> None:
        await self.batch([(key, value)])

    async def get(self, key: str) -> Any:
        (found,) = await self._run(lambda: self._connection.execute(_SELECT, (key,)).fetchone())
        return decode(found)

    async def load(self, keys: Iterable[str]) -> int:
        def load() -> tuple[list[Any], int]:
            rows = [self._connection.execute(_SELECT_VERSION, (key,)).fetchone() for key in wanted]
            return rows, self._connection.execute("SELECT count(*) FROM log").fetchone()[0]

        wanted = list(keys)
        rows, logged = await self._run(load)
        self._revisions = {key: revision for key, (_, revision) in zip(wanted, rows, strict=True)}
        written: int = sum(version for version, _ in rows)
        if written != logged:
            raise Void(f"{self.name}: {written} writes, and {logged} rows in the log")
        return written

    async def guarded(self, key: str, value: Any) -> None:
        ((_, revision),) = await self._run(self._write, [(key, encode(value))], self._revisions[key])
        self._revisions[key] = revision

    async def batch(self, jobs: Sequence[Job]) -> None:
        await self._run(self._write, [(key, encode(value)) for key, value in jobs])

    def _write(self, pairs: Sequence[tuple[str, bytes]], expected: int | None = None) -> list[tuple[int, int]]:
        """Write all in one transaction. Returns the version and the revision of each."""
        execute, written = self._connection.execute, []
        execute("BEGIN IMMEDIATE")
        for key, body in pairs:
            version, revision = execute(_SELECT_VERSION, (key,)).fetchone() or (0, 0)
            if expected is not None and revision != expected:
                execute("ROLLBACK")
                raise Void(f"{self.name}: a guard has failed that holds")
            # The key of the log numbers the changes.
            cursor = execute("INSERT INTO log (key, value, version) VALUES (?, ?, ?)", (key, body, version + 1))
            written.append((version + 1, cursor.lastrowid or 0))
            execute(_UPSERT_VERSION, (key, body, *written[-1]))
        execute("COMMIT")
        return written

    async def fill(self, jobs: Iterable[Job]) -> None:
        await self.batch(list(jobs))

    async def settings(self) -> dict[str, str]:
        return await self._run(lambda: _settings_of(self._connection))

    async def close(self) -> None:
        await self._run(self._connection.close)
        self._thread.shutdown()

    async def _run(self, call: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)


_SELECT_VERSION = "SELECT version, revision FROM pairs WHERE key = ?"
