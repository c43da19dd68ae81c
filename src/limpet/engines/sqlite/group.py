"""Group commit: the queue of batches, and the commit of one group in one transaction.

The thread that holds the writer's lock commits everything that is queued: a writer thread for
callers on an event loop, the calling thread itself where no loop runs. Each batch of a group is
planned on the state left by the batches before it and has its own outcome; a refused batch
leaves the others untouched.

Every write transaction begins with BEGIN IMMEDIATE: a read transaction that later writes can
fail in a way that no busy timeout cures.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from limpet.clock import call_on, wake
from limpet.commit.group import GroupPlan, NotApplied, commit_error, is_fault_of_one
from limpet.engines.sqlite.cache import UNKNOWN, Cache, CachedFile, EntryId
from limpet.engines.sqlite.checkpoints import Checkpoints
from limpet.engines.sqlite.connections import OPENING, Connection, Connections, error_name
from limpet.engines.sqlite.rows import (
    APPEND_LAST,
    APPEND_TO_LOG,
    CHANGES_OF_REQUEST,
    ERASE,
    READ,
    WRITE,
    NamespaceCounters,
    change_row,
    entry_row,
    read_several,
    to_change,
    to_entry,
)
from limpet.engines.sqlite.turns import WriterTurns
from limpet.engines.wakeup import Wakeup
from limpet.errors import Ambiguous, Closed
from limpet.model import Batch, Change, Commit, Entry, Refusal, StoredFamily
from limpet.request_ids import new_request_id

GROUP_MAX: Final = 256
FETCH_MAX: Final = 256

# Errors about a single row: it cannot be bound to its statement, or breaks a constraint or a trigger of the file.
_FAULT_OF_ONE: Final = (sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.InterfaceError, sqlite3.DataError)


class Ticket:
    """One batch in the queue, and its outcome once its group is committed."""

    __slots__ = ("batch", "namespace", "outcome", "request_id", "waiter")

    def __init__(self, namespace: str, batch: Batch) -> None:
        self.namespace = namespace
        self.batch = batch
        # A caller that lost the reply finds its commit by the request id, so every batch has one.
        self.request_id = batch.request_id or new_request_id()
        self.outcome: Commit | Refusal | Exception | None = None
        self.waiter: asyncio.Future[None] | None = None

    def result(self) -> Commit | Refusal:
        """Return the outcome, or raise it."""
        assert self.outcome is not None
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class GroupWriter:
    """The one writer of an engine: takes queued batches and commits them in groups.

    Attributes:
        queue: The tickets that no group has taken yet.
        lock: Held by the thread that writes.
        connection: The connection to write on; None until the first write, and after a write went wrong.
    """

    def __init__(self, connections: Connections, cached: CachedFile, wakeup: Wakeup, now_ms: Callable[[], int]) -> None:
        self.queue: deque[Ticket] = deque()
        self.lock = threading.Lock()
        self.connection: Connection | None = None
        self._connections = connections
        self._cached = cached
        self._wakeup = wakeup
        self._now_ms = now_ms
        self._turns = WriterTurns()
        self._checkpoints = Checkpoints(connections, cached, self.lock)
        self._signals: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._flushing: set[asyncio.AbstractEventLoop] = set()

    def is_busy(self) -> bool:
        """Whether a commit runs or waits."""
        return bool(self.queue) or self.lock.locked()

    # The queue ----------------------------------------------------------------

    def commit_in_place(self, ticket: Ticket) -> None:
        """Queue a batch and return once it has an outcome. Where no loop runs."""
        self.queue.append(ticket)
        # The thread that gets the lock commits for all who queued, so another may have done it already.
        while ticket.outcome is None:
            with self.lock:
                if ticket.outcome is None:
                    self.commit_queued()

    def enqueue(self, ticket: Ticket, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """Queue a batch for the writer thread. The future is done once the batch has an outcome."""
        waiter = ticket.waiter = loop.create_future()
        self.queue.append(ticket)
        if loop not in self._flushing:
            # At the end of this turn, so that all writes of the turn share one transaction.
            self._flushing.add(loop)
            loop.call_soon(self._flush, loop)
        return waiter

    def withdraw(self, ticket: Ticket) -> None:
        """Take back a batch whose caller was cancelled. One that a group has taken will be finished."""
        with contextlib.suppress(ValueError):
            self.queue.remove(ticket)

    def _flush(self, loop: asyncio.AbstractEventLoop) -> None:
        self._flushing.discard(loop)
        with self._starting:
            if self._thread is None and not self._connections.closed:
                self._thread = threading.Thread(target=self._write_for_loops, name="limpet-sqlite-writer", daemon=True)
                self._thread.start()
        self._signals.put(True)
        if self._connections.closed:
            # No thread is left to report this to batches that were queued while the engine closed.
            with self.lock:
                self._commit_all_queued()

    def _write_for_loops(self) -> None:
        while self._signals.get():
            with self.lock:
                self._commit_all_queued()

    def finish(self) -> None:
        """Commit all queued batches, and refuse later ones."""
        with self.lock:
            self._commit_all_queued()
            self._connections.closed = self._connections.paused = True

    def stop(self) -> None:
        """End the writer thread and the one of checkpoints."""
        with self._starting:
            thread = self._thread
        if thread is not None:
            self._signals.put(False)
            thread.join()
        self._checkpoints.stop()

    # One group ------------------------------------------------------------------

    def _commit_all_queued(self) -> None:
        while self.queue:
            self.commit_queued()

    def commit_queued(self) -> None:
        """Commit one group and wake its callers. The caller holds the lock."""
        group: list[Ticket] = []
        while self.queue and len(group) < GROUP_MAX:
            try:
                group.append(self.queue.popleft())
            except IndexError:  # The last ticket was withdrawn in between.
                break
        if not group:
            return
        try:
            try:
                outcomes = self._commit_group(group)
            except Exception as error:
                outcomes = self._commit_each(group, error)
        except BaseException:
            # An interrupt of this thread is not the fault of the other callers: they may retry.
            self.abandon()
            outcomes = [self._ambiguous(ticket, 0, "the commit was interrupted") for ticket in group]
            raise
        finally:
            # Not before now: a caller takes an outcome that it sees as durable.
            for ticket, outcome in zip(group, outcomes, strict=True):
                ticket.outcome = outcome
            _wake_callers(group)

    def _commit_each(self, group: list[Ticket], error: Exception) -> Sequence[Commit | Refusal | Exception]:
        """Commit each batch by itself after its group failed and nothing was applied: one bad batch fails no other."""
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

    def _commit_group(self, group: list[Ticket]) -> Sequence[Commit | Refusal | Exception]:
        """Commit a group in one transaction. An error raised from here means that nothing was applied."""
        if self._connections.closed:
            raise Closed
        writer = self.begin()
        try:
            # No other process can commit from here on, so a cache that is valid now stays valid.
            cache = self._cached.valid_cache()
            planned = GroupTransaction(writer, cache, self._now_ms())
            if len(group) > 1 or len(group[0].batch.writes) > 1:
                planned.fetch(group)
            outcomes = [planned.add(ticket) for ticket in group]
            if not planned.write():
                writer.execute("ROLLBACK")
                return outcomes
        except Exception as error:
            self.abandon()
            if isinstance(error, _FAULT_OF_ONE):
                raise NotApplied(self._connections.translate(error)) from error
            raise self._connections.translate(error) from error
        try:
            writer.execute("COMMIT")
        except sqlite3.Error as error:
            self.abandon()
            if error_name(error).startswith(("SQLITE_FULL", "SQLITE_BUSY")):
                raise self._connections.translate(error) from error
            # An I/O error here leaves it open: recovery may find the commit in the WAL.
            return [self._ambiguous(ticket, planned.first_revisions[ticket.namespace], error) for ticket in group]
        # It is committed. An error from here on must not be reported as a failed commit.
        try:
            self._cached.carry_over(cache, planned)
        except Exception:
            self._cached.forget()
        self._checkpoints.note_commit()
        for namespace, (plan, _) in planned.plans.items():
            if plan.changes:
                self._wakeup.notify(namespace)
        return outcomes

    def _ambiguous(self, ticket: Ticket, since: int, problem: object) -> Ambiguous:
        text = f"cannot tell whether {self._connections.path} took the commit: {problem}"
        return Ambiguous(text, request_id=ticket.request_id, since=since)

    # Transactions ---------------------------------------------------------------

    def begin(self) -> Connection:
        """Begin a write transaction, in turn with other processes. The caller holds the lock."""
        try:
            if self.connection is None:
                self.connection = self._connections.connect()
            self._turns.begin(self.connection, self._cached.wal, self._connections.busy_s)
        except sqlite3.Error as error:
            raise self._connections.translate(error) from error
        return self.connection

    def abandon(self) -> None:
        """Close a connection whose transaction went wrong; the next group opens another. The caller holds the lock."""
        # The cached counters have counted changes that did not happen.
        self._cached.forget()
        connection, self.connection = self.connection, None
        if connection is not None:
            with OPENING, contextlib.suppress(sqlite3.Error):
                self._connections.disconnect(connection)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A write transaction apart from the groups, for trimming and schema changes."""
        with self.lock:
            self._connections.check_open()
            writer = self.begin()
            try:
                yield writer
                writer.execute("COMMIT")
                self._checkpoints.note_commit()
            except sqlite3.Error as error:
                self.abandon()
                raise self._connections.translate(error) from error
            except BaseException:
                self.abandon()
                raise


def _wake_callers(group: Iterable[Ticket]) -> None:
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


class GroupTransaction:
    """What a group does to the file: the plan of each of its namespaces, written at the end.

    Attributes:
        plans: The plan of each namespace, with the row of the namespace as it will be.
        first_revisions: The revision of each namespace before the group.
    """

    def __init__(self, writer: Connection, cache: Cache | None, now_ms: int) -> None:
        self._writer = writer
        self._now_ms = now_ms
        self._cached: dict[EntryId, Entry | None] = {} if cache is None else cache.entries
        self._counters: dict[str, NamespaceCounters] = {} if cache is None else cache.counters
        self._fetched: dict[EntryId, Sequence[Any] | None] = {}
        self.plans: dict[str, tuple[GroupPlan, NamespaceCounters]] = {}
        self.first_revisions: dict[str, int] = {}

    def fetch(self, group: Iterable[Ticket]) -> None:
        """Read the data entries that the batches need, in as few statements as will do. Locks and receipts are few."""
        for ticket in group:
            for needed in (*ticket.batch.writes, *ticket.batch.guards):
                if needed.family == "data":
                    entry_id: EntryId = (ticket.namespace, "data", needed.key)
                    if entry_id not in self._cached:
                        self._fetched[entry_id] = None
        for namespace in {entry_id[0] for entry_id in self._fetched}:
            wanted = [entry_id[2] for entry_id in self._fetched if entry_id[0] == namespace]
            for start in range(0, len(wanted), FETCH_MAX):
                keys = wanted[start : start + FETCH_MAX]
                # A few lengths of statement serve all numbers of keys; a repeated key does no harm.
                length = 1 << (len(keys) - 1).bit_length()
                keys += keys[-1:] * (length - len(keys))
                for row in self._writer.execute(read_several(length), (namespace, "data", *keys)):
                    self._fetched[namespace, "data", row[0].decode()] = row

    def add(self, ticket: Ticket) -> Commit | Refusal | Exception:
        """Plan one batch, and add what it does to the group."""
        namespace = ticket.namespace
        planned = self.plans.get(namespace)
        if planned is None:
            planned = self.plans[namespace] = self._begin_plan(namespace)
        try:
            return planned[0].add(ticket.batch, ticket.request_id)
        except sqlite3.Error:
            raise
        except Exception as error:
            # A batch that cannot be planned fails alone.
            return error

    def _begin_plan(self, namespace: str) -> tuple[GroupPlan, NamespaceCounters]:
        counters = self._counters.get(namespace)
        if counters is None:
            counters = self._counters[namespace] = NamespaceCounters.load(self._writer, namespace)
        self.first_revisions[namespace] = counters.revision
        load, find_changes = functools.partial(self._load, namespace), functools.partial(self._find_changes, namespace)
        # Another process may have recorded a later time: its clock is a little ahead, or this one was set back.
        return GroupPlan(load, find_changes, counters, max(self._now_ms, counters.at_ms)), counters

    def _load(self, namespace: str, family: StoredFamily, key: str) -> Entry | None:
        entry_id = (namespace, family, key)
        found: Entry | None = self._cached.get(entry_id, UNKNOWN)
        if found is UNKNOWN:
            is_fetched = entry_id in self._fetched
            row = self._fetched[entry_id] if is_fetched else self._writer.execute(READ, entry_id).fetchone()
            found = None if row is None else to_entry(row)
        return found

    def _find_changes(self, namespace: str, after: int, request_id: str) -> Iterable[Change]:
        return map(to_change, self._writer.execute(CHANGES_OF_REQUEST, (namespace, after, request_id)).fetchall())

    def write(self) -> bool:
        """Write what the group does into the transaction. False when that is nothing."""
        rows: dict[EntryId, tuple[Any, ...] | None] = {}
        log: list[tuple[Any, ...]] = []
        last: list[tuple[Any, ...]] = []
        for namespace, (plan, counters) in self.plans.items():
            for change, weight_bytes in plan.changes:
                row = entry_row(change.entry)
                rows[namespace, change.family, row[0]] = None if change.after is None else row
                log.append((namespace, weight_bytes, *change_row(change, row)))
            for (family, key), entry in plan.kept.items():
                rows[namespace, family, key] = entry_row(entry)
            if plan.changes:
                # The last change of a commit has the counters as well.
                last.append((*log.pop(), *counters.totals()))
                if not counters.has_row:
                    counters.save(self._writer)
        writes = [(entry_id[0], entry_id[1], *row) for entry_id, row in rows.items() if row is not None]
        if len(writes) == 1:
            self._writer.execute(WRITE, writes[0])
        elif writes:
            self._writer.executemany(WRITE, writes)
        if len(writes) < len(rows):
            self._writer.executemany(ERASE, [entry_id for entry_id, row in rows.items() if row is None])
        if log:
            self._writer.executemany(APPEND_TO_LOG, log)
        for row in last:
            self._writer.execute(APPEND_LAST, row)
        return bool(rows)
