"""The SQLite engine: one file, any number of tasks, threads and processes.

Writes are grouped. Whoever holds the writer lock commits everything that is queued in one
transaction: a writer thread for callers on an event loop, the calling thread itself where
there is no loop. Each batch of a group is planned on the state left by the ones before it
and has its own outcome; one that is refused leaves the others untouched.

Reads run in place on a connection of the reading thread, beside the writer: WAL gives each
its own snapshot. Scans that filter or page far go to a reader thread when there is a loop
to keep free.

Every write transaction begins with BEGIN IMMEDIATE: a read that later turns into a write
can fail in a way that no busy timeout cures.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import mmap
import os
import queue
import sqlite3
import sys
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

from limpet.clock import Clock, call_on, has_loop, wake
from limpet.commit.group import NotApplied, commit_error, is_fault_of_one
from limpet.commit.receipts import SUPERSEDED_MS, may_be_superseded, superseded_error
from limpet.engines.budget import SCAN_CALLS, Budget
from limpet.engines.sql_columns import as_stored, as_text
from limpet.engines.sql_indexes import literal, quoted, sqlite_expression, sqlite_name, sqlite_parts
from limpet.engines.wakeup import Wakeup
from limpet.errors import (
    Ambiguous,
    Closed,
    Compacted,
    Corrupt,
    InvalidValue,
    LimpetError,
    PermissionDenied,
    Unavailable,
)
from limpet.index import CANDIDATES_MAX, IndexProbe
from limpet.keys import Span
from limpet.model import (
    BEGINNING,
    Batch,
    Change,
    Commit,
    Durability,
    Entry,
    Expire,
    Family,
    Filter,
    LogPage,
    Refusal,
    ScanPage,
    Status,
    Traits,
    Window,
    fingerprint,
    live,
)
from limpet.request_ids import new_request_id
from limpet.schema import REVISION, TAKEN_ON_SQLITE, VERSION_TABLE, ddl, is_behind, require, warn_of_taken
from limpet.transition import plan, recall
from limpet.urls import Address

if TYPE_CHECKING:
    from limpet.schema.migrate import Place

T = TypeVar("T")

GROUP_MAX: Final = 256
FETCH_MAX: Final = 256
INLINE_ROWS_MAX: Final = 500
EXAMINED_MAX: Final = 5_000
SLICE_BYTES_MAX: Final = 4_000_000
POLL_S: Final = 0.02
BUSY_TIMEOUT_MS: Final = 5_000
CACHED_MAX: Final = 12_288
CACHED_BYTES_MAX: Final = 2_048

FOREIGN: Final = (
    "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name NOT GLOB 'limpet_*' AND name NOT GLOB 'sqlite_*'"
)
_OPTIONS: Final = ("synchronous", "migrate", "journal")
_COLUMNS: Final = "key, kind, value, version, revision, created_revision, created_ms, updated_ms, expires_ms, meta"
_READ: Final = f"SELECT {_COLUMNS} FROM limpet_entries WHERE namespace = ? AND family = ? AND key = ?"
_READ_SEVERAL: Final = f"SELECT {_COLUMNS} FROM limpet_entries WHERE namespace = ? AND family = ? AND key IN"
_SCAN: Final = (
    "SELECT {columns} FROM limpet_entries WHERE namespace = ? AND family = ? AND key >= ? AND key < ?"
    " AND (expires_ms IS NULL OR expires_ms > ?) ORDER BY key LIMIT ?"
)
_SCAN_ENTRIES: Final = _SCAN.format(columns=_COLUMNS)
_SCAN_KEYS: Final = _SCAN.format(columns=_COLUMNS.replace("kind, value", "NULL, NULL"))
_WRITE: Final = (
    f"INSERT INTO limpet_entries (namespace, family, {_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
    " ON CONFLICT (namespace, family, key) DO UPDATE SET kind = excluded.kind, value = excluded.value,"
    " version = excluded.version, revision = excluded.revision, created_revision = excluded.created_revision,"
    " created_ms = excluded.created_ms, updated_ms = excluded.updated_ms, expires_ms = excluded.expires_ms,"
    " meta = excluded.meta"
)
_ERASE: Final = "DELETE FROM limpet_entries WHERE namespace = ? AND family = ? AND key = ?"
_LOG_COLUMNS: Final = "op, revision, last_revision, at_ms, cause, family, " + _COLUMNS.replace(
    " revision,", " entry_revision,"
)
_LOG: Final = (
    f"INSERT INTO limpet_changes (namespace, size_bytes, {_LOG_COLUMNS})"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_CHANGES: Final = (
    f"SELECT {_LOG_COLUMNS} FROM limpet_changes WHERE namespace = ? AND revision > ? ORDER BY revision LIMIT ?"
)
_CHANGES_OF: Final = (
    f"SELECT {_LOG_COLUMNS} FROM limpet_changes WHERE namespace = ? AND revision > ? AND family = 'data'"
    " AND key >= ? AND key < ? ORDER BY revision LIMIT ?"
)
_LAST_UP_TO: Final = (
    f"SELECT {_LOG_COLUMNS.replace('kind, value', 'NULL, NULL')} FROM limpet_changes"
    " WHERE namespace = ? AND revision <= ? ORDER BY revision DESC LIMIT 1"
)
_CAUSED: Final = f"SELECT {_LOG_COLUMNS} FROM limpet_changes WHERE namespace = ? AND revision > ? AND cause = ?"
_DUE: Final = (
    "SELECT key, revision, family FROM limpet_entries WHERE namespace = ? AND expires_ms <= ?"
    " AND family NOT IN ('receipt', 'superseded') ORDER BY expires_ms LIMIT ?"
)
_OLDEST: Final = "SELECT revision, at_ms, size_bytes FROM limpet_changes WHERE namespace = ? ORDER BY revision LIMIT ?"
_DROP_CHANGES: Final = "DELETE FROM limpet_changes WHERE namespace = ? AND revision <= ?"
# Requests that were asked for again, because nobody knew whether the first call had arrived. Should it arrive now, it
# is too late. They lie among the entries, in a family that nobody else asks for.
_IS_SUPERSEDED: Final = "SELECT 1 FROM limpet_entries WHERE namespace = ? AND family = 'superseded' AND key = ?"
_SUPERSEDE: Final = (
    "INSERT OR REPLACE INTO limpet_entries (namespace, family, key, kind, value, version, revision, created_revision,"
    " created_ms, updated_ms, expires_ms) VALUES (?, 'superseded', ?, 'json', 'null', 1, 0, 0, ?, ?, ?)"
)
_OVER: Final = "FROM limpet_entries WHERE namespace = ? AND expires_ms <= ? AND family IN ('receipt', 'superseded')"
_RECEIPTS_OVER: Final = f"SELECT 1 {_OVER}"
_DROP_RECEIPTS: Final = f"DELETE {_OVER}"
_TALLY: Final = (
    "SELECT revision, floor, at_ms, keys, size_bytes, log_changes, log_bytes, floor_print"
    " FROM limpet_namespaces WHERE namespace = ?"
)
_SET_TALLY: Final = "INSERT OR REPLACE INTO limpet_namespaces VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
_RECORDED_MS: Final = "SELECT at_ms FROM limpet_namespaces WHERE namespace = ?"
_OURS: Final = f"SELECT name FROM sqlite_master WHERE name IN ('limpet_store', '{VERSION_TABLE}')"
_REVISION: Final = f"SELECT version_num FROM {VERSION_TABLE}"
_STORE: Final = "SELECT id, epoch FROM limpet_store"
_RAISE_EPOCH: Final = "UPDATE limpet_store SET epoch = epoch + 1"
_SKIP_REVISIONS: Final = "UPDATE limpet_namespaces SET revision = revision + ?"


@functools.cache
def _read_several(count: int) -> str:
    return f"{_READ_SEVERAL} ({', '.join('?' * count)})"


async def open(address: Address, clock: Clock) -> SqliteEngine:
    """Open ``sqlite:///relative.db`` or ``sqlite:////absolute/path.db``, making the file when there is none."""
    address.allow(*_OPTIONS)
    synchronous = address.take("synchronous", "full", ("full", "extra", "normal"))
    migrates = address.take("migrate", "no", ("no", "auto")) == "auto"
    switches = address.take("journal", "keep", ("keep", "wal")) == "wal"
    return SqliteEngine(_file(address), synchronous, clock, migrates=migrates, switches=switches)


def place(address: Address) -> Place:
    """Where the tables of a URL are, for whoever migrates them."""
    from limpet.schema.migrate import SqlitePlace

    address.allow(*_OPTIONS)
    return SqlitePlace(_file(address))


def _file(address: Address) -> str:
    if not address.path.startswith("///") or len(address.path) == 3:
        raise InvalidValue(f"{address}: write sqlite:///relative.db or sqlite:////absolute/path.db")
    if address.path == "///:memory:":
        raise InvalidValue(f"{address}: for a store in memory, write memory: (or memory:name to share it)")
    if "\0" in address.path:
        raise InvalidValue(f"{address}: a path holds no U+0000")
    return address.path[3:]


class SqliteEngine:
    """A handle on one database file."""

    def __init__(
        self, path: str, synchronous: str, clock: Clock, *, migrates: bool = False, switches: bool = False
    ) -> None:
        durability: Durability = "process" if synchronous == "normal" else "disk"
        self.traits = Traits(engine="sqlite", durability=durability, log="every", clock="host", inline=True)
        self._path = os.path.abspath(path)
        self._synchronous = synchronous
        self._clock = clock
        self._may_switch = switches
        self.taken: tuple[str, ...] = ()
        self._closed = False
        self._latest_ms = 0
        self._budget = Budget(others=self._is_writing)
        self._start()
        try:
            self._store_id, self._epoch = self._prepare(migrates)
        except BaseException:
            with _opening:
                self._let_go()
            raise
        _engines.add(self)

    def _start(self) -> None:
        """What a process must have of its own. Runs again in a child after a fork."""
        self._wakeup = Wakeup()
        self._readers = threading.local()
        self._connections: dict[_Connection, threading.Thread | None] = {}
        # While barred no read begins: a fork or a close waits until nobody is inside SQLite.
        self._barred = False
        self._bar = threading.Lock()
        self._writing = threading.Lock()
        self._writer: _Connection | None = None
        self._queue: deque[_Ticket] = deque()
        self._signals: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._flushing: set[asyncio.AbstractEventLoop] = set()
        self._scanner: ThreadPoolExecutor | None = None
        self._board: _Board | None = None
        self._cache: _Cache | None = None

    # The eight primitives -----------------------------------------------------

    async def read(self, namespace: str, keys: Sequence[str], *, family: Family = "data") -> list[Entry | None]:
        """See `Engine.read`."""
        if self._budget.spent():
            await self._budget.renewed()
        reader = self._enter()
        try:
            if len(keys) == 1:
                entry = self._read_one(reader, (namespace, family, keys[0]))
                if entry is None or entry.expires_ms is None:
                    return [entry]
                return [live(entry, self._time_ms(reader, namespace))]
            rows = reader.execute(_read_several(len(keys)), (namespace, family, *keys)).fetchall()
            now_ms = self._time_ms(reader, namespace)
        except sqlite3.Error as error:
            raise self._translated(error) from error
        finally:
            reader.uses -= 1
        found = {entry.key: live(entry, now_ms) for entry in map(_entry, rows)}
        return [found.get(key) for key in keys]

    async def scan(
        self,
        namespace: str,
        span: Span,
        *,
        family: Family = "data",
        where: Filter | None = None,
        values: bool = True,
        limit: int = 500,
    ) -> ScanPage:
        """See `Engine.scan`."""
        if self._budget.spent(SCAN_CALLS):
            await self._budget.renewed()
        if where is None and limit <= INLINE_ROWS_MAX:
            return self._slice(namespace, span, family, where, values, limit)
        return await self._aside(lambda: self._slice(namespace, span, family, where, values, limit))

    async def commit(self, namespace: str, batch: Batch) -> Commit | Refusal:
        """See `Engine.commit`."""
        self._check_open()
        ticket = _Ticket(namespace, batch)
        if not has_loop():
            self._queue.append(ticket)
            # Whoever gets the lock commits for all who queued; often that was somebody else.
            while ticket.outcome is None:
                with self._writing:
                    if ticket.outcome is None:
                        self._commit_queued()
            return ticket.result()
        loop = asyncio.get_running_loop()
        ticket.waiter = loop.create_future()
        self._queue.append(ticket)
        if loop not in self._flushing:
            # At the end of this turn, so that all writes of the turn share one transaction.
            self._flushing.add(loop)
            loop.call_soon(self._flush, loop)
        try:
            await ticket.waiter
        except asyncio.CancelledError:
            # Not begun: it never will. Begun: it will be finished, whoever hears of it.
            with contextlib.suppress(ValueError):
                self._queue.remove(ticket)
            raise
        return ticket.result()

    async def changes(
        self, namespace: str, after: int, *, span: Span | None = None, limit: int = 500, wait_s: float = 0.0
    ) -> LogPage:
        """See `Engine.changes`."""
        deadline = time.monotonic() + wait_s
        while True:
            token, sight = self._wakeup.token(namespace), self._sight()
            feed = self._feed(namespace, after, span, limit)
            if feed.changes or time.monotonic() >= deadline or not has_loop():
                return feed
            await self._news(namespace, token, sight, deadline)

    async def _news(self, namespace: str, token: object, sight: object, deadline: float) -> None:
        """Wait for a reason to read again. Commits of other processes do not notify; they change the WAL header."""
        while (left := deadline - time.monotonic()) > 0:
            await self._wakeup.wait(namespace, token, min(left, POLL_S))
            if self._wakeup.token(namespace) is not token or sight is None or self._sight() != sight:
                return

    async def due(self, namespace: str, *, limit: int = 500) -> list[Expire]:
        """See `Engine.due`."""
        with self._reading() as reader:
            rows = reader.execute(_DUE, (namespace, self._time_ms(reader, namespace), limit)).fetchall()
        return [Expire(key.decode(), revision, family.decode()) for key, revision, family in rows]

    async def trim(self, namespace: str, window: Window) -> int:
        """See `Engine.trim`."""
        if not self._needs_trim(namespace, window):
            return 0
        return await self._aside(lambda: self._trim(namespace, window))

    # Indexes ------------------------------------------------------------------

    async def index(self, namespace: str, field: str) -> None:
        """See `Indexing.index`."""
        name, expression = quoted(sqlite_name(namespace, field)), sqlite_expression(field)
        await self._aside(
            lambda: self._define(
                f"CREATE INDEX IF NOT EXISTS {name} ON limpet_entries ({expression}) WHERE {_indexed(namespace)}"
            )
        )

    async def unindex(self, namespace: str, field: str) -> None:
        """See `Indexing.unindex`."""
        await self._aside(lambda: self._define(f"DROP INDEX IF EXISTS {quoted(sqlite_name(namespace, field))}"))

    async def indexes(self, namespace: str) -> list[str]:
        """See `Indexing.indexes`."""
        prefix = sqlite_name(namespace, "")
        with self._reading() as reader:
            rows = reader.execute("SELECT name FROM sqlite_master WHERE type = 'index'").fetchall()
        names = [name.decode() for (name,) in rows]
        return sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))

    async def candidates(self, namespace: str, span: Span, wanted: Sequence[IndexProbe]) -> list[str] | None:
        """See `Indexing.candidates`."""
        indexed = await self.indexes(namespace)
        helpful = [one for one in wanted if one.name in indexed]
        if not helpful:
            return None
        return await self._aside(lambda: self._candidates(namespace, span, helpful))

    def _candidates(self, namespace: str, span: Span, wanted: Sequence[IndexProbe]) -> list[str] | None:
        best: list[str] | None = None
        with self._reading() as reader:
            for one in wanted:
                found: list[str] = []
                source = f"limpet_entries INDEXED BY {quoted(sqlite_name(namespace, one.name))}"
                for condition, operands in sqlite_parts(one):
                    sql = (
                        f"SELECT CAST(key AS BLOB) FROM {source} WHERE {_indexed(namespace)} AND {condition}"
                        " AND key >= ? AND key < ? LIMIT ?"
                    )
                    rows = reader.execute(sql, (*operands, span.start, _upper(span), CANDIDATES_MAX + 1))
                    found += [key.decode() for (key,) in rows]
                if len(found) <= CANDIDATES_MAX and (best is None or len(found) < len(best)):
                    best = found
        return best

    # Epochs -------------------------------------------------------------------

    async def raise_epoch(self, skip: int) -> int:
        """See `Restoring.raise_epoch`."""
        return await self._aside(lambda: self._raise_epoch(skip))

    def _raise_epoch(self, skip: int) -> int:
        with self._alone() as writer:
            writer.execute(_RAISE_EPOCH)
            writer.execute(_SKIP_REVISIONS, (skip,))
            _, self._epoch = writer.execute(_STORE).fetchone()
        return self._epoch

    def _define(self, sql: str) -> None:
        """Change the schema of the file."""
        with self._alone() as writer:
            writer.execute(sql)

    async def status(self, namespace: str) -> Status:
        """See `Engine.status`."""
        with self._reading() as reader:
            tally = _Tally.load(reader, namespace)
            _, self._epoch = reader.execute(_STORE).fetchone()
        now_ms = max(self._now_ms(), tally.at_ms)
        return Status(
            store_id=self._store_id,
            epoch=self._epoch,
            revision=tally.revision,
            floor=tally.floor,
            keys=tally.keys,
            size_bytes=tally.size_bytes,
            log_changes=tally.log_changes,
            log_bytes=tally.log_bytes,
            now_ms=now_ms,
            behind_ms=max(0, now_ms - self._clock.now_ms()),
        )

    async def close(self) -> None:
        """See `Engine.close`."""
        with self._bar:
            if self._closed:
                return
            with self._writing:
                while self._queue:
                    self._commit_queued()
                self._closed = self._barred = True
            self._wakeup.notify_all()
            with self._starting:
                thread = self._thread
            if thread is not None:
                self._signals.put(False)
                thread.join()
            if self._scanner is not None:
                self._scanner.shutdown()
            self._await_readers()
            with _opening:
                self._let_go()

    # Committing ---------------------------------------------------------------

    def _is_writing(self) -> bool:
        """Whether somebody commits or waits for it. A commit asks for the interpreter again after each statement."""
        return bool(self._queue) or self._writing.locked()

    def _flush(self, loop: asyncio.AbstractEventLoop) -> None:
        self._flushing.discard(loop)
        with self._starting:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._write_for_loops, name="limpet-sqlite-writer", daemon=True)
                self._thread.start()
        self._signals.put(True)
        if self._closed:
            # Whoever queued while the engine closed is told so; there is no thread left to do it.
            with self._writing:
                while self._queue:
                    self._commit_queued()

    def _write_for_loops(self) -> None:
        while self._signals.get():
            with self._writing:
                while self._queue:
                    self._commit_queued()

    def _commit_queued(self) -> None:
        """Commit one group and answer its callers. The caller holds self._writing."""
        group: list[_Ticket] = []
        while self._queue and len(group) < GROUP_MAX:
            try:
                group.append(self._queue.popleft())
            except IndexError:  # A waiter was cancelled between the look and the take.
                break
        if not group:
            return
        try:
            try:
                outcomes = self._commit_group(group)
            except Exception as error:
                outcomes = self._commit_each(group, error)
        except BaseException:
            # An interrupt of this thread is not the others' fault: they ask again.
            self._abandon()
            outcomes = [self._unknown(ticket, 0, "the commit was interrupted") for ticket in group]
            raise
        finally:
            # Not before now: whoever sees an outcome takes it as durable.
            for ticket, outcome in zip(group, outcomes, strict=True):
                ticket.outcome = outcome
            _answer(group)

    def _commit_each(self, group: list[_Ticket], error: Exception) -> Sequence[Commit | Refusal | Exception]:
        """What becomes of a group of which nothing was applied: what is wrong with one batch fails no other."""
        if not is_fault_of_one(error):
            return [error] * len(group)
        if len(group) == 1:
            return [commit_error(group[0].batch, error)]
        outcomes: list[Commit | Refusal | Exception] = []
        for ticket in group:
            try:
                outcomes += self._commit_group([ticket])
            except Exception as own:
                outcomes.append(commit_error(ticket.batch, own))
        return outcomes

    def _commit_group(self, group: list[_Ticket]) -> Sequence[Commit | Refusal | Exception]:
        """Commit a group in one transaction. An error raised from here means that nothing was applied."""
        if self._closed:
            raise Closed
        writer = self._begin()
        try:
            # Nobody else can commit from here on, so what the cache holds now stays true.
            cache = self._valid_cache()
            work = _Work(writer, cache)
            if len(group) > 1 or len(group[0].batch.writes) > 1:
                work.fetch(group)
            now_ms = self._now_ms()
            outcomes = [work.settle(ticket, now_ms) for ticket in group]
            if not work.write():
                writer.execute("ROLLBACK")
                return outcomes
        except Exception as error:
            self._abandon()
            if isinstance(error, _OF_ONE):
                raise NotApplied(self._translated(error)) from error
            raise self._translated(error) from error
        try:
            writer.execute("COMMIT")
        except sqlite3.Error as error:
            self._abandon()
            if _code(error).startswith(("SQLITE_FULL", "SQLITE_BUSY")):
                raise self._translated(error) from error
            # An I/O error here leaves it open: recovery may find the commit in the WAL.
            return [self._unknown(ticket, work.first_revisions[ticket.namespace], error) for ticket in group]
        # It is done. Whatever goes wrong from here on must not be taken for a commit that failed.
        try:
            self._cache = self._cache_after(cache, work)
        except Exception:
            self._cache = None
        for namespace in work.news:
            self._wakeup.notify(namespace)
        return outcomes

    def _sight(self) -> tuple[_Board, bytes] | None:
        """What every commit of every process changes; None when that cannot be seen."""
        # With the board, because what stood in a header may stand in that of the next one again.
        board = self._board
        return None if board is None else (board, board.header())

    def _valid_cache(self) -> _Cache | None:
        """The cache if it shows the file as it is. The caller has begun a write transaction."""
        cache, board = self._cache, self._board
        return cache if cache is not None and board is not None and cache.header == board.header() else None

    def _cache_after(self, cache: _Cache | None, work: _Work) -> _Cache | None:
        """What is known after a commit: what was known before and what was written, if no other came right behind."""
        if self._board is None:
            return None
        header = self._board.header()
        if cache is None or _commits(header) != (_commits(cache.header) + 1) % 2**32:
            return _Cache(header)
        cache.carry(header, work)
        return cache

    def _unknown(self, ticket: _Ticket, since: int, problem: object) -> Ambiguous:
        text = f"cannot tell whether {self._path} took the commit: {problem}"
        return Ambiguous(text, request_id=ticket.request_id, since=since)

    def _begin(self) -> _Connection:
        try:
            if self._writer is None:
                self._writer = self._connect()
            self._writer.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            raise self._translated(error) from error
        return self._writer

    def _abandon(self) -> None:
        """Let go of a writer whose transaction went wrong; the next group opens another."""
        # Its tallies have counted what did not happen.
        self._cache = None
        writer, self._writer = self._writer, None
        if writer is not None:
            with _opening, contextlib.suppress(sqlite3.Error):
                self._disconnect(writer)

    # Reading ------------------------------------------------------------------

    def _read_one(self, reader: _Connection, place: _Place) -> Entry | None:
        """What is under a key, expired or not: from the cache, as long as nobody has committed since."""
        cache, header, board = self._cache, _NO_HEADER, self._board
        if board is not None:
            # Before the row, never after: a commit in between must not pass for one that was seen.
            header = board.header()
            if cache is None or cache.header != header:
                cache = self._cache = _Cache(header)
            else:
                known: Entry | None = cache.entries.get(place, _UNKNOWN)
                if known is not _UNKNOWN:
                    return known
        row = reader.execute(_READ, place).fetchone()
        entry = None if row is None else _entry(row)
        if cache is not None:
            cache.keep(header, place, entry)
        return entry

    def _slice(
        self, namespace: str, span: Span, family: Family, where: Filter | None, values: bool, limit: int
    ) -> ScanPage:
        """Up to ``limit`` entries; with a filter, of at most so many examined, so that no slice takes for ever."""
        ask = limit if where is None else EXAMINED_MAX
        sql = _SCAN_ENTRIES if values or where is not None else _SCAN_KEYS
        found: list[Entry] = []
        examined, size_bytes, last = 0, 0, ""
        with self._reading() as reader:
            now_ms = self._time_ms(reader, namespace)
            parameters = (namespace, family, span.start, _upper(span), now_ms, ask + 1)
            with contextlib.closing(reader.execute(sql, parameters)) as rows:
                for row in rows:
                    if examined == ask or len(found) == limit or size_bytes > SLICE_BYTES_MAX:
                        return ScanPage(found, last)
                    entry = _entry(row)
                    examined, size_bytes, last = examined + 1, size_bytes + entry.size_bytes, entry.key
                    if where is None or (entry.stored is not None and where.matches(entry.stored)):
                        found.append(entry if values else entry.without_value())
        return ScanPage(found, None)

    def _feed(self, namespace: str, after: int, span: Span | None, limit: int) -> LogPage:
        with self._reading() as reader:
            # One snapshot for the tally and the rows, or a change in between would be in neither.
            reader.execute("BEGIN")
            try:
                tally = _Tally.load(reader, namespace)
                before = tally.fingerprint_at(reader, after)
                if span is None:
                    rows = reader.execute(_CHANGES, (namespace, after, limit))
                else:
                    rows = reader.execute(_CHANGES_OF, (namespace, after, span.start, _upper(span), limit))
                with contextlib.closing(rows):
                    changes, is_full = _first_changes(rows, limit)
            finally:
                reader.execute("COMMIT")
        if after < tally.floor:
            raise Compacted(f"revision {after} was trimmed, the log starts after {tally.floor}", oldest=tally.floor)
        if after > tally.revision:
            raise Compacted(f"revision {after} lies ahead of this store, which is at {tally.revision}")
        if not limit:
            return LogPage([], after, before)
        return LogPage(changes, changes[-1].revision if is_full else tally.revision, before)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[_Connection]:
        """This thread's connection, for as long as it is used."""
        reader = self._enter()
        try:
            yield reader
        except sqlite3.Error as error:
            raise self._translated(error) from error
        finally:
            reader.uses -= 1

    def _enter(self) -> _Connection:
        """This thread's own connection, counted as used until the caller takes one off its uses."""
        reader: _Connection | None = getattr(self._readers, "connection", None)
        if reader is None or reader.gone:
            reader = self._open_reader()
        reader.uses += 1
        if not self._barred and not reader.gone:
            return reader
        reader.uses -= 1
        self._check_open()
        with self._bar:
            pass
        return self._enter()

    def _open_reader(self) -> _Connection:
        self._check_open()
        try:
            reader = self._connect(reads=True)
        except sqlite3.Error as error:
            raise self._translated(error) from error
        self._readers.connection = reader
        return reader

    def _await_readers(self) -> None:
        """Wait until no thread is inside SQLite. The caller has barred the way."""
        while any(connection.uses for connection in list(self._connections)):
            time.sleep(0.0005)

    def _let_go(self) -> None:
        """Close all connections. The caller has barred the way, nobody is inside, and it holds _opening."""
        for connection in list(self._connections):
            connection.gone = True
            self._disconnect(connection)

    def _disconnect(self, connection: _Connection) -> None:
        """Close one connection. The caller holds _opening."""
        self._connections.pop(connection, None)
        connection.close()
        if not self._connections and self._board is not None:
            # With its last connection the file may lose its WAL index; the next to open it makes another.
            board, self._board, self._cache = self._board, None, None
            board.leave()

    async def _aside(self, work: Callable[[], T]) -> T:
        """Run longer work beside the loop; in place when there is none."""
        self._check_open()
        if not has_loop():
            return work()
        if self._scanner is None:
            self._scanner = ThreadPoolExecutor(1, thread_name_prefix="limpet-sqlite-reader")
        return await asyncio.get_running_loop().run_in_executor(self._scanner, work)

    # Trimming -----------------------------------------------------------------

    def _needs_trim(self, namespace: str, window: Window) -> bool:
        """Whether there is anything to drop, asked without taking the writer's place."""
        with self._reading() as reader:
            tally = _Tally.load(reader, namespace)
            now_ms = max(self._now_ms(), tally.at_ms)
            if reader.execute(_RECEIPTS_OVER, (namespace, now_ms)).fetchone() is not None:
                return True
            oldest = reader.execute(_OLDEST, (namespace, 1)).fetchall()
        return window.excess(oldest, count=tally.log_changes, size_bytes=tally.log_bytes, now_ms=now_ms)[0] > 0

    def _trim(self, namespace: str, window: Window) -> int:
        with self._alone() as writer:
            tally = _Tally.load(writer, namespace)
            now_ms = max(self._now_ms(), tally.at_ms)
            writer.execute(_DROP_RECEIPTS, (namespace, now_ms))
            oldest = writer.execute(_OLDEST, (namespace, EXAMINED_MAX)).fetchall()
            dropped, freed_bytes, floor = window.excess(
                oldest, count=tally.log_changes, size_bytes=tally.log_bytes, now_ms=now_ms
            )
            if dropped:
                tally.floor_print = tally.fingerprint_at(writer, floor)
                writer.execute(_DROP_CHANGES, (namespace, floor))
                tally.floor = floor
                tally.log_changes -= dropped
                tally.log_bytes -= freed_bytes
                tally.save(writer)
        return dropped

    @contextlib.contextmanager
    def _alone(self) -> Iterator[_Connection]:
        """The writer's connection in a transaction of its own, apart from the groups of commits."""
        with self._writing:
            self._check_open()
            writer = self._begin()
            try:
                yield writer
                writer.execute("COMMIT")
            except sqlite3.Error as error:
                self._abandon()
                raise self._translated(error) from error
            except BaseException:
                self._abandon()
                raise

    # The file -----------------------------------------------------------------

    def _prepare(self, migrates: bool) -> tuple[str, int]:
        """Make the tables when there are none, and read who this store is."""
        try:
            # The values may be secrets: a new file is its owner's alone. A file that is there is not
            # touched: closing any descriptor of it drops the locks that this process has on it.
            if not os.path.exists(self._path):
                _make_empty(self._path)
            elif os.path.isdir(self._path):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            elif not _is_writable(self._path):
                # SQLite would open it all the same, and refuse the first write only.
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            # Waiting makes no folder.
            raise InvalidValue(f"cannot open {self._path}: {error.strerror}") from error
        except PermissionError as error:
            raise PermissionDenied(f"cannot open {self._path}: {error.strerror}") from error
        except OSError as error:
            raise Unavailable(f"cannot open {self._path}: {error.strerror}") from error
        revision, identity = self._identify()
        if migrates and is_behind(revision):
            from limpet.schema.migrate import SqlitePlace, up

            up(SqlitePlace(self._path))
            revision, identity = self._identify()
        require(revision, self._path)
        if identity is None:
            raise Corrupt(f"{self._path} does not say what store it is: its table limpet_store is empty")
        store_id, epoch = identity
        warn_of_taken(self.taken, self._path)
        return store_id.decode(), epoch

    def _identify(self) -> tuple[str | None, Sequence[Any] | None]:
        """The file's revision; and if it is ours, the store's identity."""
        identity = None
        with self._writing:
            writer = self._begin()
            try:
                ours = writer.execute(_OURS).fetchall()
                if not ours:
                    for statement in ddl("sqlite").split(";\n"):
                        writer.execute(statement)
                row = writer.execute(_REVISION).fetchone() if len(ours) != 1 else None
                revision = None if row is None else row[0].decode()
                # Of another revision, nobody knows what its tables look like.
                if revision == REVISION:
                    identity = writer.execute(_STORE).fetchone()
                    self.taken = tuple(name.decode() for (name,) in writer.execute(TAKEN_ON_SQLITE))
                writer.execute("COMMIT")
            except sqlite3.Error as error:
                self._abandon()
                if _code(error) == "SQLITE_ERROR":
                    # Waiting frees no name that something else in the file has.
                    raise Corrupt(f"{self._path} cannot hold the tables of a store: {error}") from error
                raise self._translated(error) from error
        return revision, identity

    def _connect(self, *, reads: bool = False) -> _Connection:
        # Opening is being inside SQLite as well: a fork waits for it, and a close finds the
        # connection finished or not at all. Executing on a connection that another thread
        # closes crashes the interpreter.
        with _opening:
            self._check_open()
            self._forget_dead_threads()
            connection = self._connected(reads)
            self._connections[connection] = threading.current_thread() if reads else None
            if self._board is None:
                self._board = _Board.join(connection)
                self._cache = None if self._board is None else _Cache(_NO_HEADER)
            return connection

    def _forget_dead_threads(self) -> None:
        """Close what threads left behind. The caller holds _opening.

        Left to themselves, connections would be closed at any moment, during a fork too.
        """
        for connection, owner in list(self._connections.items()):
            if owner is not None and not owner.is_alive():
                self._disconnect(connection)

    def _connected(self, reads: bool) -> _Connection:
        connection = sqlite3.connect(
            self._path,
            timeout=BUSY_TIMEOUT_MS / 1000,
            isolation_level=None,
            check_same_thread=False,
            factory=_Connection,
        )
        try:
            connection.text_factory = bytes
            self._check_switch(connection)
            if not _use_wal(connection):
                raise Corrupt(f"{self._path} cannot use WAL; a network file system is no place for it")
            connection.execute(f"PRAGMA synchronous = {self._synchronous}")
            connection.execute("PRAGMA wal_autocheckpoint = 4000")
            # 8 MB for each connection, and no mapping of the file. 64 MB and a mapping of 256 MB were measured beside
            # it, at 10,000 and 100,000 keys: reads and writes took as much CPU, within the noise. A server of 100,000
            # keys grew by 85 MB for itself and by 160 MB with the mapping, against 32 MB (`./dev load --memory`).
            connection.execute("PRAGMA cache_size = -8192")
            connection.execute("PRAGMA mmap_size = 0")
            if reads:
                connection.execute("PRAGMA query_only = ON")
            # The first read opens the WAL index, which the board is mapped from.
            connection.execute("SELECT 1 FROM sqlite_master").fetchone()
        except BaseException:
            connection.close()
            raise
        return connection

    def _check_switch(self, connection: _Connection) -> None:
        """Refuse to change the journal mode of a file that others use: the change is for good, and theirs to make."""
        if self._may_switch:
            return
        (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
        if mode != b"wal" and connection.execute(FOREIGN).fetchone() is not None:
            raise InvalidValue(
                f"{self._path} holds tables that are not Limpet's, and its journal mode is {mode.decode()}: Limpet "
                "needs WAL, and the file would stay so. Give Limpet a file of its own, or allow the change with "
                "?journal=wal"
            )
        self._may_switch = True

    def _check_open(self) -> None:
        if self._closed:
            raise Closed

    def _now_ms(self) -> int:
        """The host's time, or the latest that this handle has seen if that is later."""
        now_ms = self._clock.now_ms()
        if now_ms > self._latest_ms:  # noqa: PLR1730 - max() takes longer than asking for the time
            self._latest_ms = now_ms
        return self._latest_ms

    def _time_ms(self, reader: _Connection, namespace: str) -> int:
        """The time of a namespace: the host's, or the latest that was recorded there if that is later."""
        return max(self._now_ms(), self._recorded_ms(reader, namespace))

    def _recorded_ms(self, reader: _Connection, namespace: str) -> int:
        """The time of the latest commit: from the cache, as long as nobody has committed since."""
        cache, board = self._cache, self._board
        # Before the row, never after, as for entries.
        header = _NO_HEADER if board is None else board.header()
        if cache is not None and cache.header == header:
            known = cache.times_ms.get(namespace)
            if known is not None:
                return known
        row = reader.execute(_RECORDED_MS, (namespace,)).fetchone()
        recorded_ms: int = 0 if row is None else row[0]
        if cache is not None:
            cache.keep_time(header, namespace, recorded_ms)
        return recorded_ms

    def _translated(self, error: Exception) -> Exception:
        """A driver's error as ours. Raised before COMMIT, so whatever was tried was not applied."""
        if isinstance(error, LimpetError) or not isinstance(error, sqlite3.Error):
            return error
        if self._closed:
            return Closed()
        name = _code(error)
        if name.startswith(_DAMAGED):
            return Corrupt(f"cannot use {self._path}: {error}")
        if name.startswith(_DENIED) and name != "SQLITE_READONLY_DBMOVED":
            return PermissionDenied(f"cannot use {self._path}: {error}")
        if name.startswith("SQLITE_CANTOPEN") and not _is_writable(os.path.dirname(self._path)):
            return PermissionDenied(f"cannot use {self._path}: its folder may not be written, and the WAL lies there")
        if name.startswith("SQLITE_CONSTRAINT"):
            # A trigger that is not ours says what it likes. The driver's error stays the cause of ours, and whoever
            # logs that prints it.
            error.args = (name,)
        return Unavailable(f"{self._path} cannot serve now: {error}")


# What is not here will pass, or an operator can mend it: a full disk, no descriptor left, a file that was moved.
_DAMAGED: Final = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_IOERR_CORRUPTFS")
_DENIED: Final = ("SQLITE_READONLY", "SQLITE_PERM", "SQLITE_AUTH")


# Something about a single row: it cannot be bound to its statement, or breaks a constraint or a trigger of the file.
_OF_ONE: Final = (sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.InterfaceError, sqlite3.DataError)


def _code(error: sqlite3.Error) -> str:
    return getattr(error, "sqlite_errorname", None) or ""


def _is_writable(path: str) -> bool:
    return os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


class _Connection(sqlite3.Connection):
    """A connection that can be referred to weakly and says how often it is in use right now."""

    uses = 0
    gone = False


class _Ticket:
    """One caller's place in the queue of commits."""

    __slots__ = ("batch", "namespace", "outcome", "request_id", "waiter")

    def __init__(self, namespace: str, batch: Batch) -> None:
        self.namespace = namespace
        self.batch = batch
        # A commit whose answer is lost is asked for again by its name, so none goes without.
        self.request_id = batch.request_id or new_request_id()
        self.outcome: Commit | Refusal | Exception | None = None
        self.waiter: asyncio.Future[None] | None = None

    def result(self) -> Commit | Refusal:
        assert self.outcome is not None
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def _answer(group: Iterable[_Ticket]) -> None:
    """Wake the callers of a group that wait on a loop, with one call into each loop."""
    waiting: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for ticket in group:
        if ticket.waiter is not None:
            waiting.setdefault(ticket.waiter.get_loop(), []).append(ticket.waiter)
    for loop, waiters in waiting.items():
        call_on(loop, _wake_all, waiters)


def _wake_all(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        wake(waiter)


class _Tally:
    """The row of a namespace, while it is being changed."""

    def __init__(self, namespace: str, row: Sequence[Any] | None) -> None:
        self.namespace = namespace
        counts: Sequence[int] = row[:7] if row else (0, 0, 0, 0, 0, 0, 0)
        self.floor_print: str | None = row[7].decode() if row and row[7] else None
        (
            self.revision,
            self.floor,
            self.at_ms,
            self.keys,
            self.size_bytes,
            self.log_changes,
            self.log_bytes,
        ) = counts

    @classmethod
    def load(cls, connection: _Connection, namespace: str) -> _Tally:
        return cls(namespace, connection.execute(_TALLY, (namespace,)).fetchone())

    def save(self, connection: _Connection) -> None:
        row = (self.revision, self.floor, self.at_ms, self.keys, self.size_bytes, self.log_changes, self.log_bytes)
        connection.execute(_SET_TALLY, (self.namespace, *row, self.floor_print))

    def fingerprint_at(self, connection: _Connection, revision: int) -> str:
        """The fingerprint of the change at a revision, or of the last one before it."""
        row = connection.execute(_LAST_UP_TO, (self.namespace, revision)).fetchone()
        return self.floor_print or BEGINNING if row is None else fingerprint(_change(row))


class _Work:
    """What a group makes of the file, gathered in memory and written at the end.

    Each batch sees the file as the batches before it in the group will leave it.
    """

    def __init__(self, writer: _Connection, cache: _Cache | None) -> None:
        self._writer = writer
        self._cached: dict[_Place, Entry | None] = {} if cache is None else cache.entries
        self._tallies: dict[str, _Tally] = {} if cache is None else cache.tallies
        self._fetched: dict[_Place, Sequence[Any] | None] = {}
        self.seen: dict[_Place, Entry | None] = {}
        self._rows: dict[_Place, tuple[Any, ...] | None] = {}
        self._log: list[tuple[Any, ...]] = []
        self.first_revisions: dict[str, int] = {}
        self.news: dict[str, _Tally] = {}
        self._has_superseded = False

    @property
    def changed(self) -> Iterable[_Place]:
        """What will be different."""
        return self._rows

    def fetch(self, group: Iterable[_Ticket]) -> None:
        """Read the data that batches will look at, in as few statements as will do. Locks and receipts are few."""
        for ticket in group:
            for asked in (*ticket.batch.writes, *ticket.batch.guards):
                if asked.family == "data":
                    place: _Place = (ticket.namespace, "data", asked.key)
                    if place not in self._cached:
                        self._fetched[place] = None
        for namespace in {place[0] for place in self._fetched}:
            wanted = [place[2] for place in self._fetched if place[0] == namespace]
            for start in range(0, len(wanted), FETCH_MAX):
                keys = wanted[start : start + FETCH_MAX]
                # A few lengths of statement serve all numbers of keys; asking for one twice does no harm.
                length = 1 << (len(keys) - 1).bit_length()
                keys += keys[-1:] * (length - len(keys))
                for row in self._writer.execute(_read_several(length), (namespace, "data", *keys)):
                    self._fetched[namespace, "data", row[0].decode()] = row

    def settle(self, ticket: _Ticket, now_ms: int) -> Commit | Refusal | Exception:
        """Decide one batch and take in what it changes."""
        namespace, batch = ticket.namespace, ticket.batch
        tally = self._tally(namespace)
        find = functools.partial(self._find, namespace)
        # Another process may have recorded a later time: its clock is a little ahead, or this one was set back.
        now_ms = max(now_ms, tally.at_ms)
        try:
            if batch.retry_since is not None and batch.request_id is not None:
                rows = self._writer.execute(_CAUSED, (namespace, batch.retry_since, batch.request_id)).fetchall()
                earlier = recall(batch, map(_change, rows), find)
                if earlier is not None:
                    return earlier
                until_ms = now_ms + SUPERSEDED_MS
                self._writer.execute(_SUPERSEDE, (namespace, batch.request_id, now_ms, now_ms, until_ms))
                self._has_superseded = True
            elif (
                may_be_superseded(batch)
                and self._writer.execute(_IS_SUPERSEDED, (namespace, batch.request_id)).fetchone()
            ):
                return superseded_error()
            outcome = plan(batch, find, now_ms=now_ms, revision=tally.revision, cause=ticket.request_id)
        except sqlite3.Error:
            raise
        except Exception as error:
            # A batch that cannot be decided is its caller's trouble and nobody else's.
            return error
        if isinstance(outcome, Refusal):
            return outcome
        for change in outcome.changes:
            self._apply(tally, change)
        if outcome.receipt is not None:
            place: _Place = (namespace, "receipt", outcome.receipt.key)
            self.seen[place], self._rows[place] = outcome.receipt, _entry_row(outcome.receipt)
        tally.at_ms = now_ms
        return outcome.commit

    def write(self) -> bool:
        """Bring everything gathered into the file's transaction. False when there was nothing."""
        writes = [(place[0], place[1], *row) for place, row in self._rows.items() if row is not None]
        if writes:
            self._writer.executemany(_WRITE, writes)
        if len(writes) < len(self._rows):
            self._writer.executemany(_ERASE, [place for place, row in self._rows.items() if row is None])
        if self._log:
            self._writer.executemany(_LOG, self._log)
            for tally in self.news.values():
                tally.save(self._writer)
        return bool(self._rows) or self._has_superseded

    def _tally(self, namespace: str) -> _Tally:
        found = self._tallies.get(namespace)
        if found is None:
            found = self._tallies[namespace] = _Tally.load(self._writer, namespace)
        self.first_revisions.setdefault(namespace, found.revision)
        return found

    def _find(self, namespace: str, family: Family, key: str) -> Entry | None:
        place = (namespace, family, key)
        found: Entry | None = self.seen.get(place, _UNKNOWN)
        if found is _UNKNOWN:
            found = self._cached.get(place, _UNKNOWN)
            if found is _UNKNOWN:
                fetched = place in self._fetched
                row = self._fetched[place] if fetched else self._writer.execute(_READ, place).fetchone()
                found = None if row is None else _entry(row)
            self.seen[place] = found
        return found

    def _apply(self, tally: _Tally, change: Change) -> None:
        entry, after = change.entry, change.after
        place = (tally.namespace, change.family, entry.key)
        before = self.seen[place]
        size_bytes = entry.weight_bytes
        tally.revision = change.revision
        tally.log_changes += 1
        tally.log_bytes += size_bytes
        if change.family == "data":
            if before is not None:
                tally.keys -= 1
                tally.size_bytes -= before.weight_bytes
            if after is not None:
                tally.keys += 1
                tally.size_bytes += size_bytes
        row = _entry_row(entry)
        self.seen[place], self._rows[place] = after, None if after is None else row
        self.news[tally.namespace] = tally
        self._log.append((tally.namespace, size_bytes, *_change_row(change, row)))


# The cache ----------------------------------------------------------------------
#
# In WAL mode every commit, of any process, changes a header of 48 bytes at the start of the
# file's shared memory (sqlite.org/walformat.html). Looking at it takes a fifth of a
# microsecond, reading a row takes ten. So what was read is kept for as long as the header
# stays the same, and over our own commits, which count it up by one.

_NO_HEADER: Final = b""
_UNKNOWN: Final[Any] = object()
_Place = tuple[str, Family, str]


def _commits(header: bytes) -> int:
    """The commits counted in a header."""
    return int.from_bytes(header[8:12], sys.byteorder)


class _Cache:
    """Entries as they are in the file for as long as the header stays the same."""

    def __init__(self, header: bytes) -> None:
        self.header = header
        self.entries: dict[_Place, Entry | None] = {}
        self.tallies: dict[str, _Tally] = {}
        self.times_ms: dict[str, int] = {}
        self._lock = threading.RLock()

    def keep(self, header: bytes, place: _Place, entry: Entry | None) -> None:
        """Keep what was read after this header was seen."""
        with self._lock:
            if header == self.header:
                self._put(place, entry)

    def keep_time(self, header: bytes, namespace: str, recorded_ms: int) -> None:
        """Keep the time of a namespace's latest commit, read after this header was seen."""
        with self._lock:
            if header == self.header:
                self.times_ms[namespace] = recorded_ms

    def carry(self, header: bytes, work: _Work) -> None:
        """Go on under the header of our own commit, knowing what it changed."""
        with self._lock:
            for place in work.changed:
                self._put(place, work.seen[place])
            for namespace, tally in work.news.items():
                self.times_ms[namespace] = tally.at_ms
            if len(self.tallies) > CACHED_MAX:
                self.tallies.clear()
            if len(self.times_ms) > CACHED_MAX:
                self.times_ms.clear()
            self.header = header

    def _put(self, place: _Place, entry: Entry | None) -> None:
        entries = self.entries
        if entry is not None and entry.size_bytes > CACHED_BYTES_MAX:
            entries.pop(place, None)
            return
        if len(entries) >= CACHED_MAX and place not in entries:
            # The one that has been there for longest.
            del entries[next(iter(entries))]
        entries[place] = entry


class _Board:
    """The start of a file's shared memory, mapped for reading.

    Closing any descriptor of a file drops all locks that the process has on it, SQLite's own
    included. So a board is shared by all who look at it, and its descriptors are closed only
    when SQLite has removed the file, which it does when nobody uses it any more.
    """

    _boards: ClassVar[dict[tuple[int, int], _Board]] = {}

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._users = 0
        self._map: mmap.mmap | None = None
        with contextlib.suppress(OSError, ValueError):
            self._map = mmap.mmap(descriptor, mmap.PAGESIZE, prot=mmap.PROT_READ)

    @classmethod
    def join(cls, connection: _Connection) -> _Board | None:
        """The board of the file that a connection is of; None where it cannot be mapped. The caller holds _opening."""
        cls._forget_removed()
        # As SQLite names it: behind a symbolic link, the shared memory lies beside the file.
        path = os.fsdecode(connection.execute("PRAGMA database_list").fetchone()[2]) + "-shm"
        try:
            status = os.stat(path)
            board = cls._boards.get((status.st_dev, status.st_ino))
            if board is None:
                board = cls._boards[status.st_dev, status.st_ino] = cls(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            return None
        if board._map is None:
            return None
        board._users += 1
        return board

    def leave(self) -> None:
        """Look no more. The caller holds _opening."""
        self._users -= 1
        self._forget_removed()

    @classmethod
    def _forget_removed(cls) -> None:
        for place, board in list(cls._boards.items()):
            if board._users == 0 and os.fstat(board._descriptor).st_nlink == 0:
                del cls._boards[place]
                os.close(board._descriptor)

    @classmethod
    def forget_all(cls) -> None:
        """In a child, before anything else: it has no locks to lose yet, and may later reuse these numbers."""
        for board in cls._boards.values():
            os.close(board._descriptor)
        cls._boards.clear()

    def header(self) -> bytes:
        """What every commit changes."""
        assert self._map is not None
        return self._map[:48]


# Rows -------------------------------------------------------------------------


def _entry(row: Sequence[Any]) -> Entry:
    key, kind, value, version, revision, created_revision, created_ms, updated_ms, expires_ms, meta = row
    return Entry(
        key.decode(),
        value if kind == b"json" else None if kind is None else as_stored(kind.decode(), value),
        version,
        revision,
        created_revision,
        created_ms,
        updated_ms,
        expires_ms,
        meta,
    )


def _entry_row(entry: Entry) -> tuple[Any, ...]:
    stored = entry.stored
    kind, value = ("json", stored.decode()) if type(stored) is bytes and stored[0] else as_text(stored)
    return (
        entry.key,
        kind,
        value,
        entry.version,
        entry.revision,
        entry.created_revision,
        entry.created_ms,
        entry.updated_ms,
        entry.expires_ms,
        None if entry.meta_json is None else entry.meta_json.decode(),
    )


def _change(row: Sequence[Any]) -> Change:
    op, revision, last_revision, at_ms, cause, family, *entry = row
    cause = None if cause is None else cause.decode()
    return Change(op.decode(), _entry(entry), revision, last_revision, at_ms, cause, family.decode())


def _first_changes(rows: Iterable[Sequence[Any]], limit: int) -> tuple[list[Change], bool]:
    """Changes up to the limit or to a bearable size, and whether that was the end of it."""
    changes: list[Change] = []
    size_bytes = 0
    for row in rows:
        changes.append(_change(row))
        size_bytes += changes[-1].entry.size_bytes
        if len(changes) == limit or size_bytes > SLICE_BYTES_MAX:
            return changes, True
    return changes, False


def _indexed(namespace: str) -> str:
    """The entries of a namespace that can have fields, as an index and its searches both say it."""
    return f"namespace = {literal(namespace)} AND family = 'data' AND kind IN ('json', 'record')"


def _upper(span: Span) -> str | bytes:
    """The upper end of a span for SQL, where every text is less than every blob."""
    return b"" if span.stop is None else span.stop


def _change_row(change: Change, row: tuple[Any, ...]) -> tuple[Any, ...]:
    if change.op == "touch":
        # It did not write the value, so the log does not repeat it.
        row = (row[0], None, None, *row[3:])
    return (change.op, change.revision, change.commit, change.at_ms, change.cause, change.family, *row)


def _use_wal(connection: _Connection) -> bool:
    """Switch to WAL. Two processes doing so at once meet a lock that the busy timeout does not wait for."""
    deadline = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return bool(mode == b"wal")


def _make_empty(path: str) -> None:
    """Make a file of nobody but its owner.

    It gets its name only when its descriptor is closed, because closing any descriptor of a
    file drops all locks that this process has on it, another store's included.
    """
    spare = f"{path}-{uuid.uuid4().hex}"
    os.close(os.open(spare, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        # Unlike a rename, a link never takes the place of a file that somebody made meanwhile.
        # Where there are no links SQLite makes the file itself, as readable as the umask says.
        with contextlib.suppress(FileExistsError, PermissionError):
            os.link(spare, path)
    finally:
        os.unlink(spare)


# Forks ------------------------------------------------------------------------
#
# SQLite remembers, for the whole process, which locks it has on a file. A child inherits that
# memory but not the locks, and its parent, on closing, would take itself for the last user and
# remove the log that the child goes on writing. So a fork waits until nobody is inside SQLite
# and closes all connections; parent and child open their own when they next need one.

_engines: weakref.WeakSet[SqliteEngine] = weakref.WeakSet()
_forks = threading.Lock()
_opening = threading.Lock()
_forking: list[SqliteEngine] = []


def _before_fork() -> None:
    _forks.acquire()
    for engine in list(_engines):
        engine._bar.acquire()
        if engine._closed:
            engine._bar.release()
            continue
        engine._barred = True
        engine._writing.acquire()
        engine._await_readers()
        _forking.append(engine)
    # Nobody opens another from here on.
    _opening.acquire()
    for engine in _forking:
        engine._let_go()
        engine._writer = None


def _after_fork_in_parent() -> None:
    _opening.release()
    while _forking:
        engine = _forking.pop()
        engine._barred = False
        engine._writing.release()
        engine._bar.release()
    _forks.release()


def _after_fork_in_child() -> None:
    _Board.forget_all()
    _opening.release()
    while _forking:
        _forking.pop()._start()
    _forks.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
