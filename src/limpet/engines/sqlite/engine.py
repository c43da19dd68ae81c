"""The SQLite engine: one file, any number of tasks, threads and processes.

Writes are grouped: `GroupWriter` commits all queued batches in one transaction.

Reads run in place on a connection of the reading thread, beside the writer: WAL gives each
its own snapshot. A single key is read from the cache while that is valid. Scans that filter or
page far go to a reader thread when there is a loop to keep free.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, TypeVar

from limpet.clock import Clock, has_loop
from limpet.commit.log import check_after
from limpet.engines.budget import SCAN_CALLS, Budget
from limpet.engines.sql_indexes import quoted, sqlite_expression, sqlite_name, sqlite_parts
from limpet.engines.sqlite import forks
from limpet.engines.sqlite.cache import CachedFile
from limpet.engines.sqlite.connections import OPENING, Connection, Connections, error_name, make_file
from limpet.engines.sqlite.foreign import ForeignCommits
from limpet.engines.sqlite.group import GroupWriter, Ticket
from limpet.engines.sqlite.rows import (
    CHANGES,
    CHANGES_IN_SPAN,
    COUNT,
    DROP_CHANGES,
    DROP_EXPIRED_RECEIPTS,
    DUE,
    HAS_EXPIRED_RECEIPTS,
    INDEX_NAMES,
    NAMESPACES,
    OLDEST_CHANGES,
    OUR_TABLES,
    PAGE_BYTES_MAX,
    RAISE_EPOCH,
    SCANS,
    SCHEMA_REVISION,
    SKIP_REVISIONS,
    STORE,
    NamespaceCounters,
    indexed,
    read_several,
    take_changes,
    to_entry,
    upper_bound,
)
from limpet.engines.wakeup import Wakeup
from limpet.errors import Corrupt, InvalidValue
from limpet.index import CANDIDATES_MAX, IndexProbe
from limpet.keys import Span
from limpet.model import (
    Batch,
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
    live,
)
from limpet.schema import REVISION, TAKEN_ON_SQLITE, ddl, is_behind, require, warn_of_taken
from limpet.urls import Address

if TYPE_CHECKING:
    from limpet.schema.migrate import SchemaTarget

T = TypeVar("T")

INLINE_ROWS_MAX: Final = 500
EXAMINED_MAX: Final = 5_000

_OPTIONS: Final = ("synchronous", "migrate", "journal")


async def open(address: Address, clock: Clock) -> SqliteEngine:
    """Open ``sqlite:///relative.db`` or ``sqlite:////absolute/path.db``, making the file when there is none."""
    address.allow(*_OPTIONS)
    synchronous = address.take("synchronous", "full", ("full", "extra", "normal"))
    migrates = address.take("migrate", "no", ("no", "auto")) == "auto"
    may_switch = address.take("journal", "keep", ("keep", "wal")) == "wal"
    return SqliteEngine(_path(address), synchronous, clock, migrates=migrates, may_switch=may_switch)


def schema_target(address: Address) -> SchemaTarget:
    """Where the tables of a URL are, for migrations."""
    from limpet.schema.migrate import SqliteTarget

    address.allow(*_OPTIONS)
    return SqliteTarget(_path(address))


def _path(address: Address) -> str:
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
        self, path: str, synchronous: str, clock: Clock, *, migrates: bool = False, may_switch: bool = False
    ) -> None:
        durability: Durability = "process" if synchronous == "normal" else "disk"
        self.traits = Traits(engine="sqlite", durability=durability, clock="host", inline=True)
        self.taken: tuple[str, ...] = ()
        self._path = os.path.abspath(path)
        self._synchronous = synchronous
        self._may_switch = may_switch
        self._clock = clock
        self._latest_ms = 0
        self._budget = Budget(others=self._is_writing)
        self.start()
        try:
            self._store_id, self._epoch = self._prepare(migrates)
        except BaseException:
            with OPENING:
                self._connections.disconnect_all()
            raise
        forks.register(self)

    def start(self) -> None:
        """Make all that a process cannot share with another. Runs again in a child after a fork."""
        self._wakeup = Wakeup()
        self._cached = CachedFile()
        self._connections = Connections(self._path, self._synchronous, self._cached, may_switch=self._may_switch)
        self._writer = GroupWriter(self._connections, self._cached, self._wakeup, self._now_ms)
        self._foreign = ForeignCommits(self._connections, self._cached, self._wakeup)
        self._scanner: ThreadPoolExecutor | None = None

    # The ten primitives -----------------------------------------------------

    async def read(self, namespace: str, keys: Sequence[str], *, family: Family = "data") -> list[Entry | None]:
        """See `Engine.read`."""
        if self._budget.spent():
            await self._budget.renewed()
        reader = self._connections.enter()
        try:
            if len(keys) == 1:
                entry = self._cached.read(reader, (namespace, family, keys[0]))
                if entry is None or entry.expires_ms is None:
                    return [entry]
                return [live(entry, self._time_ms(reader, namespace))]
            rows = reader.execute(read_several(len(keys)), (namespace, family, *keys)).fetchall()
            now_ms = self._time_ms(reader, namespace)
        except sqlite3.Error as error:
            raise self._connections.translate(error) from error
        finally:
            reader.uses -= 1
        found = {entry.key: live(entry, now_ms) for entry in map(to_entry, rows)}
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
        reverse: bool = False,
    ) -> ScanPage:
        """See `Engine.scan`."""
        if self._budget.spent(SCAN_CALLS):
            await self._budget.renewed()
        if where is None and limit <= INLINE_ROWS_MAX:
            return self._scan_page(namespace, span, family, where, values, limit, reverse)
        return await self._aside(lambda: self._scan_page(namespace, span, family, where, values, limit, reverse))

    async def count(self, namespace: str, span: Span, *, family: Family = "data") -> int:
        """See `Engine.count`."""
        return await self._aside(lambda: self._count(namespace, span, family))

    async def namespaces(self) -> list[str]:
        """See `Engine.namespaces`."""
        with self._connections.reading() as reader:
            return sorted(name.decode() for (name,) in reader.execute(NAMESPACES).fetchall())

    async def commit(self, namespace: str, batch: Batch) -> Commit | Refusal:
        """See `Engine.commit`."""
        self._connections.check_open()
        ticket = Ticket(namespace, batch)
        if not has_loop():
            self._writer.commit_in_place(ticket)
            return ticket.result()
        waiter = self._writer.enqueue(ticket, asyncio.get_running_loop())
        try:
            await waiter
        except asyncio.CancelledError:
            self._writer.withdraw(ticket)
            raise
        return ticket.result()

    async def changes(
        self, namespace: str, after: int, *, span: Span | None = None, limit: int = 500, wait_s: float = 0.0
    ) -> LogPage:
        """See `Engine.changes`."""
        if wait_s <= 0 or not has_loop():
            return self._log_page(namespace, after, span, limit)
        deadline = time.monotonic() + wait_s
        with self._foreign.awaited(namespace):
            while True:
                token = self._wakeup.token(namespace)
                page = self._log_page(namespace, after, span, limit)
                left_s = deadline - time.monotonic()
                if page.changes or left_s <= 0:
                    return page
                await self._wakeup.wait(namespace, token, left_s)

    async def due(self, namespace: str, *, limit: int = 500) -> list[Expire]:
        """See `Engine.due`."""
        with self._connections.reading() as reader:
            rows = reader.execute(DUE, (namespace, self._time_ms(reader, namespace), limit)).fetchall()
        return [Expire(key.decode(), revision, family.decode()) for key, revision, family in rows]

    async def trim(self, namespace: str, window: Window) -> int:
        """See `Engine.trim`."""
        if not self._needs_trim(namespace, window):
            return 0
        return await self._aside(lambda: self._trim(namespace, window))

    async def status(self, namespace: str) -> Status:
        """See `Engine.status`."""
        with self._connections.reading() as reader:
            counters = NamespaceCounters.load(reader, namespace)
            _, self._epoch = reader.execute(STORE).fetchone()
        now_ms = max(self._now_ms(), counters.at_ms)
        return Status(
            store_id=self._store_id,
            epoch=self._epoch,
            revision=counters.revision,
            floor=counters.floor,
            keys=counters.keys,
            size_bytes=counters.size_bytes,
            log_changes=counters.log_changes,
            log_bytes=counters.log_bytes,
            now_ms=now_ms,
            behind_ms=max(0, now_ms - self._clock.now_ms()),
        )

    async def close(self) -> None:
        """See `Engine.close`."""
        connections = self._connections
        with connections.pause_lock:
            if connections.closed:
                return
            self._writer.finish()
            self._foreign.end()
            self._wakeup.notify_all()
            self._writer.stop()
            if self._scanner is not None:
                self._scanner.shutdown()
            connections.await_unused()
            with OPENING:
                connections.disconnect_all()
        self._foreign.join()

    # Indexes ------------------------------------------------------------------

    async def index(self, namespace: str, field: str) -> None:
        """See `Indexing.index`."""
        name, expression = quoted(sqlite_name(namespace, field)), sqlite_expression(field)
        await self._aside(
            lambda: self._define(
                f"CREATE INDEX IF NOT EXISTS {name} ON limpet_entries ({expression}) WHERE {indexed(namespace)}"
            )
        )

    async def unindex(self, namespace: str, field: str) -> None:
        """See `Indexing.unindex`."""
        await self._aside(lambda: self._define(f"DROP INDEX IF EXISTS {quoted(sqlite_name(namespace, field))}"))

    async def indexes(self, namespace: str) -> list[str]:
        """See `Indexing.indexes`."""
        prefix = sqlite_name(namespace, "")
        with self._connections.reading() as reader:
            rows = reader.execute(INDEX_NAMES).fetchall()
        names = [name.decode() for (name,) in rows]
        return sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))

    async def candidates(self, namespace: str, span: Span, wanted: Sequence[IndexProbe]) -> list[str] | None:
        """See `Indexing.candidates`."""
        fields = await self.indexes(namespace)
        helpful = [probe for probe in wanted if probe.name in fields]
        if not helpful:
            return None
        return await self._aside(lambda: self._candidates(namespace, span, helpful))

    def _candidates(self, namespace: str, span: Span, wanted: Sequence[IndexProbe]) -> list[str] | None:
        best: list[str] | None = None
        with self._connections.reading() as reader:
            for probe in wanted:
                found: list[str] = []
                source = f"limpet_entries INDEXED BY {quoted(sqlite_name(namespace, probe.name))}"
                for condition, operands in sqlite_parts(probe):
                    sql = (
                        f"SELECT CAST(key AS BLOB) FROM {source} WHERE {indexed(namespace)} AND {condition}"
                        " AND key >= ? AND key < ? LIMIT ?"
                    )
                    rows = reader.execute(sql, (*operands, span.start, upper_bound(span), CANDIDATES_MAX + 1))
                    found += [key.decode() for (key,) in rows]
                if len(found) <= CANDIDATES_MAX and (best is None or len(found) < len(best)):
                    best = found
        return best

    def _define(self, sql: str) -> None:
        """Change the schema of the file."""
        with self._writer.transaction() as writer:
            writer.execute(sql)

    # Epochs -------------------------------------------------------------------

    async def raise_epoch(self, skip: int) -> int:
        """See `Restoring.raise_epoch`."""
        return await self._aside(lambda: self._raise_epoch(skip))

    def _raise_epoch(self, skip: int) -> int:
        with self._writer.transaction() as writer:
            writer.execute(RAISE_EPOCH)
            writer.execute(SKIP_REVISIONS, (skip,))
            _, self._epoch = writer.execute(STORE).fetchone()
        return self._epoch

    # Forks ----------------------------------------------------------------------

    def pause(self) -> bool:
        """See `Forkable.pause`."""
        connections = self._connections
        connections.pause_lock.acquire()
        if connections.closed:
            connections.pause_lock.release()
            return False
        connections.paused = True
        self._writer.lock.acquire()
        connections.await_unused()
        return True

    def disconnect(self) -> None:
        """See `Forkable.disconnect`."""
        self._connections.disconnect_all()
        self._writer.connection = None

    def resume(self) -> None:
        """See `Forkable.resume`."""
        self._connections.paused = False
        self._writer.lock.release()
        self._connections.pause_lock.release()

    def _is_writing(self) -> bool:
        """Whether reads must pause: a commit needs the interpreter again after each statement."""
        return self._writer.is_busy()

    # Pages --------------------------------------------------------------------

    def _scan_page(
        self,
        namespace: str,
        span: Span,
        family: Family,
        where: Filter | None,
        values: bool,
        limit: int,
        reverse: bool,
    ) -> ScanPage:
        """Up to ``limit`` entries. With a filter, a page ends after `EXAMINED_MAX` entries, so that none takes long."""
        rows_max = limit if where is None else EXAMINED_MAX
        sql = SCANS[values or where is not None, reverse]
        found: list[Entry] = []
        examined, size_bytes, last = 0, 0, ""
        with self._connections.reading() as reader:
            now_ms = self._time_ms(reader, namespace)
            parameters = (namespace, family, span.start, upper_bound(span), now_ms, rows_max + 1)
            with contextlib.closing(reader.execute(sql, parameters)) as rows:
                for row in rows:
                    if examined == rows_max or len(found) == limit or size_bytes > PAGE_BYTES_MAX:
                        return ScanPage(found, last)
                    entry = to_entry(row)
                    examined, size_bytes, last = examined + 1, size_bytes + entry.size_bytes, entry.key
                    if where is None or (entry.stored is not None and where.matches(entry.stored)):
                        found.append(entry if values else entry.without_value())
        return ScanPage(found, None)

    def _count(self, namespace: str, span: Span, family: Family) -> int:
        bounds = (namespace, family, span.start, upper_bound(span))
        with self._connections.reading() as reader:
            now_ms = self._time_ms(reader, namespace)
            (count,) = reader.execute(COUNT, (*bounds, *bounds, now_ms)).fetchone()
        return int(count)

    def _log_page(self, namespace: str, after: int, span: Span | None, limit: int) -> LogPage:
        with self._connections.reading() as reader:
            # One snapshot for the counters and the rows, or a change in between would be in neither.
            reader.execute("BEGIN")
            try:
                counters = NamespaceCounters.load(reader, namespace)
                before = counters.fingerprint_at(reader, after)
                if span is None:
                    rows = reader.execute(CHANGES, (namespace, after, limit))
                else:
                    rows = reader.execute(CHANGES_IN_SPAN, (namespace, after, span.start, upper_bound(span), limit))
                with contextlib.closing(rows):
                    changes, is_full = take_changes(rows, limit)
            finally:
                reader.execute("COMMIT")
        check_after(after, floor=counters.floor, revision=counters.revision)
        if not limit:
            return LogPage([], after, before)
        return LogPage(changes, changes[-1].revision if is_full else counters.revision, before)

    async def _aside(self, work: Callable[[], T]) -> T:
        """Run longer work beside the loop; in place when none runs."""
        self._connections.check_open()
        if not has_loop():
            return work()
        if self._scanner is None:
            self._scanner = ThreadPoolExecutor(1, thread_name_prefix="limpet-sqlite-reader")
        return await asyncio.get_running_loop().run_in_executor(self._scanner, work)

    # Trimming -----------------------------------------------------------------

    def _needs_trim(self, namespace: str, window: Window) -> bool:
        """Whether there is anything to drop, without waiting for the writer."""
        with self._connections.reading() as reader:
            counters = NamespaceCounters.load(reader, namespace)
            now_ms = max(self._now_ms(), counters.at_ms)
            if reader.execute(HAS_EXPIRED_RECEIPTS, (namespace, now_ms)).fetchone() is not None:
                return True
            oldest = reader.execute(OLDEST_CHANGES, (namespace, 1)).fetchall()
        return window.excess(oldest, count=counters.log_changes, size_bytes=counters.log_bytes, now_ms=now_ms)[0] > 0

    def _trim(self, namespace: str, window: Window) -> int:
        with self._writer.transaction() as writer:
            counters = NamespaceCounters.load(writer, namespace)
            now_ms = max(self._now_ms(), counters.at_ms)
            writer.execute(DROP_EXPIRED_RECEIPTS, (namespace, now_ms))
            oldest = writer.execute(OLDEST_CHANGES, (namespace, EXAMINED_MAX)).fetchall()
            dropped, freed_bytes, floor = window.excess(
                oldest, count=counters.log_changes, size_bytes=counters.log_bytes, now_ms=now_ms
            )
            if dropped:
                counters.floor_print = counters.fingerprint_at(writer, floor)
                writer.execute(DROP_CHANGES, (namespace, floor))
                counters.floor = floor
                counters.drop(dropped, freed_bytes)
                counters.save(writer)
        return dropped

    # Opening --------------------------------------------------------------------

    def _prepare(self, migrates: bool) -> tuple[str, int]:
        """Make the file and its tables when there are none, and read the store's id and epoch."""
        make_file(self._path)
        revision, identity = self._identify()
        if migrates and is_behind(revision):
            from limpet.schema.migrate import SqliteTarget, up

            up(SqliteTarget(self._path))
            revision, identity = self._identify()
        require(revision, self._path)
        if identity is None:
            raise Corrupt(f"{self._path} has no store id: its table limpet_store is empty; restore a backup")
        store_id, epoch = identity
        warn_of_taken(self.taken, self._path)
        return store_id.decode(), epoch

    def _identify(self) -> tuple[str | None, Sequence[Any] | None]:
        """The file's revision; and if this release knows it, the store's id and epoch."""
        identity = None
        with self._writer.lock:
            writer = self._writer.begin()
            try:
                ours = writer.execute(OUR_TABLES).fetchall()
                if not ours:
                    for statement in ddl("sqlite").split(";\n"):
                        writer.execute(statement)
                row = writer.execute(SCHEMA_REVISION).fetchone() if len(ours) != 1 else None
                revision = None if row is None else row[0].decode()
                # The tables of another revision may be different.
                if revision == REVISION:
                    identity = writer.execute(STORE).fetchone()
                    self.taken = tuple(name.decode() for (name,) in writer.execute(TAKEN_ON_SQLITE))
                writer.execute("COMMIT")
            except sqlite3.Error as error:
                self._writer.abandon()
                if error_name(error) == "SQLITE_ERROR":
                    # Not Unavailable: another table of the file has one of our names, and trying again does not help.
                    raise Corrupt(f"{self._path} cannot hold the tables of a store: {error}") from error
                raise self._connections.translate(error) from error
        return revision, identity

    # Time -----------------------------------------------------------------------

    def _now_ms(self) -> int:
        """The host's time, or the latest that this handle has seen if that is later."""
        now_ms = self._clock.now_ms()
        if now_ms > self._latest_ms:  # noqa: PLR1730 - max() takes longer than reading the clock
            self._latest_ms = now_ms
        return self._latest_ms

    def _time_ms(self, reader: Connection, namespace: str) -> int:
        """The time of a namespace: the host's, or the latest that was recorded there if that is later."""
        return max(self._now_ms(), self._cached.recorded_ms(reader, namespace))
