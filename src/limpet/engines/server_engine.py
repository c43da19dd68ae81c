"""The common part of engines behind a network: grouped requests, and a pool of connections.

All reads of one namespace and family that are made in one turn of the event loop become one request to
the server, and so do all commits of one namespace. While one group is in flight, the next gathers. If an
engine allows two groups in flight, many callers are split in halves, so that the server works for one half
while this process works for the other. The form of a request and the meaning of a driver's error are left
to the engine.

`GroupingEngine` groups requests, for an engine whose driver pools connections by itself; `ServerEngine`
adds the pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Generic, TypeVar

from limpet import codec
from limpet.commit.group import commit_error, is_fault_of_one
from limpet.engines.wakeup import Wakeup
from limpet.errors import Ambiguous, Closed, LimpetError
from limpet.keys import Span
from limpet.model import Batch, Commit, Entry, Family, Guard, LogPage, Put, Refusal, Write

__all__ = [
    "CONNECTIONS_MAX",
    "GROUP_MAX",
    "POLL_S",
    "CommitResult",
    "GroupingEngine",
    "ReadResult",
    "ServerEngine",
    "Ticket",
    "weight_bytes",
    "with_last_positions",
]

GROUP_MAX: Final = 256
GROUP_BYTES_MAX: Final = 16_000_000
GROUP_WRITES_MAX: Final = 2_048
CONNECTIONS_MAX: Final = 8
POLL_S: Final = 0.5

SPLIT_MIN: Final = 32

CommitResult = Commit | Refusal | Exception
ReadResult = Entry | Exception | None
PendingRead = tuple[Sequence[str], "asyncio.Future[list[Entry | None]]"]
T = TypeVar("T")


class GroupingEngine(ABC):
    """An engine that sends reads and commits in groups."""

    # How many groups of a namespace may be in flight at once, and how many keys one request may read.
    _reads_at_once = 1
    _commits_at_once = 1
    _keys_at_once: int | None = None

    def __init__(self, display_name: str) -> None:
        self._display_name = display_name
        self._closed = False
        # The latest time of each namespace that this handle has seen. The server may not have recorded it.
        self._seen_ms: dict[str, int] = {}
        self._init_process_state()
        _engines.add(self)

    def _init_process_state(self) -> None:
        """Set the state that processes must not share. Runs again in a child after a fork."""
        self._wakeup = Wakeup()
        self._commits: dict[str, Queue[Ticket]] = {}
        self._reads: dict[tuple[str, Family], Queue[PendingRead]] = {}
        self._tasks: set[asyncio.Future[Any]] = set()
        self._latest: dict[str, int] = {}

    # What an engine implements --------------------------------------------------

    @abstractmethod
    async def _read_all(self, namespace: str, family: Family, keys: list[str]) -> Sequence[ReadResult]:
        """Read entries by key, in one request. A key may come twice; a damaged entry is an error in its place."""

    @abstractmethod
    async def _commit_group(self, namespace: str, group: list[Ticket], since: int) -> Sequence[CommitResult]:
        """Commit batches in their order, and return the result of each. All of them are later than ``since``.

        An error that is raised means that nothing was applied. If it is not a `LimpetError`, or is `NotApplied`, it may
        be the fault of one batch, and each batch is then committed by itself. If something may have been applied, the
        result is `Ambiguous`.
        """

    @abstractmethod
    def _translate_driver_error(self, error: Exception) -> Exception:
        """A driver's error as ours, for a request that was not applied or that may be sent again."""

    # Reading ------------------------------------------------------------------

    async def read(self, namespace: str, keys: Sequence[str], *, family: Family = "data") -> list[Entry | None]:
        """See `Engine.read`."""
        self._check_open()
        queue = self._reads.get((namespace, family))
        if queue is None:
            queue = self._reads[namespace, family] = Queue()
        future: asyncio.Future[list[Entry | None]] = asyncio.get_running_loop().create_future()
        queue.waiting.append((keys, future))
        if queue.workers < self._reads_at_once:
            self._start_task(self._run_reads(namespace, family, queue))
            queue.workers += 1
        return await future

    async def _run_reads(self, namespace: str, family: Family, queue: Queue[PendingRead]) -> None:
        """Read group after group until no caller waits."""
        while queue.waiting:
            group = queue.take(self._read_group_size(queue.waiting), self._reads_at_once)
            try:
                found = await self._read_all(namespace, family, [key for keys, _ in group for key in keys])
            except Exception as error:
                found = await self._read_each(namespace, family, group, error)
            queue.in_flight -= 1
            start = 0
            for keys, future in group:
                if not future.done():
                    _resolve_read(future, found[start : start + len(keys)])
                start += len(keys)
        queue.workers -= 1
        if not queue.workers:
            del self._reads[namespace, family]

    async def _read_each(
        self, namespace: str, family: Family, group: list[PendingRead], error: Exception
    ) -> Sequence[ReadResult]:
        """Read one by one after a group failed, so that the fault of one read fails no other."""
        if len(group) == 1 or not is_fault_of_one(error):
            return [error] * sum(len(keys) for keys, _ in group)
        found: list[ReadResult] = []
        for keys, _ in group:
            try:
                found += await self._read_all(namespace, family, [*keys])
            except Exception as own:
                found += [own] * len(keys)
        return found

    def _read_group_size(self, waiting: list[PendingRead]) -> int:
        """How many reads go together. The keys of one read are never split: they are read at one moment."""
        if self._keys_at_once is None:
            return len(waiting)
        total = 0
        for number, (keys, _) in enumerate(waiting):
            total += len(keys)
            if total > self._keys_at_once:
                return max(1, number)
        return len(waiting)

    # Committing ---------------------------------------------------------------

    async def commit(self, namespace: str, batch: Batch) -> Commit | Refusal:
        """See `Engine.commit`."""
        self._check_open()
        queue = self._commits.get(namespace)
        if queue is None:
            queue = self._commits[namespace] = Queue()
        ticket = Ticket(batch, asyncio.get_running_loop().create_future())
        queue.waiting.append(ticket)
        if queue.workers < self._commits_at_once:
            self._start_task(self._run_commits(namespace, queue))
            queue.workers += 1
        try:
            return await ticket.future
        except asyncio.CancelledError:
            # A commit that was not sent never will be. One that was sent is finished without its caller.
            with contextlib.suppress(ValueError):
                queue.waiting.remove(ticket)
            raise

    async def _run_commits(self, namespace: str, queue: Queue[Ticket]) -> None:
        """Commit group after group until no caller waits."""
        while queue.waiting:
            group = queue.take(_commit_group_size(queue.waiting), self._commits_at_once)
            # Read before the group is sent: other groups may return while it is in flight.
            since = self._latest.get(namespace, 0)
            try:
                results = await self._commit_group(namespace, group, since)
            except Exception as error:
                results = await self._commit_each(namespace, group, since, error)
            queue.in_flight -= 1
            for ticket, result in zip(group, results, strict=True):
                if not ticket.future.done():
                    if isinstance(result, Exception):
                        ticket.future.set_exception(result)
                    else:
                        ticket.future.set_result(result)
        queue.workers -= 1
        if not queue.workers:
            del self._commits[namespace]

    async def _commit_each(
        self, namespace: str, group: list[Ticket], since: int, error: Exception
    ) -> Sequence[CommitResult]:
        """Commit one by one after a group was not applied, so that the fault of one batch fails no other."""
        if not is_fault_of_one(error):
            return [error] * len(group)
        if len(group) == 1:
            return [commit_error(group[0].batch, error)]
        results: list[CommitResult] = []
        for ticket in group:
            try:
                results += await self._commit_group(namespace, [ticket], since)
            except Exception as own:
                results.append(commit_error(ticket.batch, own))
        return results

    def _record_revision(self, namespace: str, revision: int) -> None:
        if revision > self._latest.get(namespace, 0):
            self._latest[namespace] = revision
            self._wakeup.notify(namespace)

    def _observe_time(self, namespace: str, server_ms: int) -> int:
        """The time of the server, or the latest time that this handle has seen if that is later."""
        if server_ms > self._seen_ms.get(namespace, 0):
            self._seen_ms[namespace] = server_ms
        return self._seen_ms[namespace]

    def _ambiguous(self, request_id: str, since: int, cause: object) -> Ambiguous:
        text = f"cannot tell whether {self._display_name} took the commit: {type(cause).__name__}"
        return Ambiguous(text, request_id=request_id, since=since)

    # Tasks --------------------------------------------------------------------

    def _start_task(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _finish_tasks(self) -> None:
        """Wait for the groups that are in flight."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed

    def _translate(self, error: Exception) -> Exception:
        if isinstance(error, LimpetError):
            return error
        return Closed() if self._closed else self._translate_driver_error(error)


class ServerEngine(GroupingEngine):
    """An engine whose state is on a server."""

    def __init__(self, connect: Callable[[], Awaitable[Any]], display_name: str) -> None:
        self._open_connection = connect
        super().__init__(display_name)

    def _init_process_state(self) -> None:
        super()._init_process_state()
        self._idle: list[Any] = []
        self._free_slots = asyncio.Semaphore(CONNECTIONS_MAX)
        self._listeners: dict[str, asyncio.Task[None]] = {}

    # What an engine implements for its connections ------------------------------

    @abstractmethod
    async def _read_log(self, namespace: str, after: int, limit: int, span: Span | None) -> LogPage:
        """Read the log, without waiting."""

    @abstractmethod
    async def _disconnect(self, connection: Any) -> None:
        """Close a working connection, in the way that its protocol has for it."""

    @abstractmethod
    def _abort(self, connection: Any) -> None:
        """Close a connection at once, even with a request in flight."""

    @abstractmethod
    def _is_closed(self, connection: Any) -> bool:
        """Whether a connection is closed."""

    @abstractmethod
    def _is_connection_lost(self, error: BaseException) -> bool:
        """Whether the connection broke, so that the effect of the last request is unknown."""

    # Following ----------------------------------------------------------------

    async def changes(
        self, namespace: str, after: int, *, span: Span | None = None, limit: int = 500, wait_s: float = 0.0
    ) -> LogPage:
        """See `Engine.changes`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            self._check_open()
            if wait_s > 0:
                self._listen_to(namespace)
            token = self._wakeup.token(namespace)
            page = await self._read_log(namespace, after, limit, span)
            left_s = deadline - loop.time()
            if page.changes or left_s <= 0:
                return page
            await self._wakeup.wait(namespace, token, min(left_s, POLL_S))

    @abstractmethod
    def _listen_to(self, namespace: str) -> None:
        """Have the waiters of a namespace woken when another process commits there."""

    def _keep_listening(self, name: str, listen: Callable[[], Awaitable[None]]) -> None:
        """Listen in the background, and again whenever the connection breaks."""

        async def listen_forever() -> None:
            while True:
                with contextlib.suppress(Exception):
                    await listen()
                await asyncio.sleep(POLL_S)

        if name not in self._listeners:
            task = asyncio.get_running_loop().create_task(listen_forever(), name="limpet-listener")
            self._listeners[name] = task

    # Connections --------------------------------------------------------------

    async def close(self) -> None:
        """See `Engine.close`."""
        if self._closed:
            return
        self._closed = True
        self._wakeup.notify_all()
        await self._finish_tasks()
        for listener in self._listeners.values():
            listener.cancel()
        await asyncio.gather(*self._listeners.values(), return_exceptions=True)
        while self._idle:
            with contextlib.suppress(Exception):
                await self._disconnect(self._idle.pop())

    async def _acquire(self) -> Any:
        """Take an idle connection, or open another."""
        await self._free_slots.acquire()
        try:
            while self._idle:
                connection = self._idle.pop()
                if not self._is_closed(connection):
                    return connection
                self._abort(connection)
            return await self._open_connection()
        except BaseException as error:
            self._free_slots.release()
            if isinstance(error, Exception):
                raise self._translate(error) from error
            raise

    async def _release(self, connection: Any, *, lost: bool = False) -> None:
        """Give a connection back; one that was lost is aborted."""
        self._return_to_pool(connection, lost=lost)

    def _return_to_pool(self, connection: Any, *, lost: bool = False) -> None:
        """Do what `_release` does, for callers that cannot await."""
        if lost or self._closed:
            # The work on the connection is done, so that an error here concerns no caller.
            with contextlib.suppress(Exception):
                self._abort(connection)
        else:
            # If the server has closed it meanwhile, `_acquire` will see that.
            self._idle.append(connection)
        self._free_slots.release()

    def _borrow_connection(self) -> BorrowedConnection:
        """A connection for an ``async with``."""
        return BorrowedConnection(self)


class BorrowedConnection:
    """Acquires a connection and releases it. A decorated generator would take three times as long."""

    __slots__ = ("_connection", "_engine")

    def __init__(self, engine: ServerEngine) -> None:
        self._engine = engine

    async def __aenter__(self) -> Any:
        self._connection = await self._engine._acquire()
        return self._connection

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        # After a cancellation, the reply to the interrupted request would be read as that of the next one.
        lost = error is not None and (not isinstance(error, Exception) or self._engine._is_connection_lost(error))
        await self._engine._release(self._connection, lost=lost)


class Queue(Generic[T]):
    """Calls that wait for their group, with the number of tasks that send groups and of groups in flight."""

    __slots__ = ("in_flight", "waiting", "workers")

    def __init__(self) -> None:
        self.waiting: list[T] = []
        self.workers = 0
        self.in_flight = 0

    def take(self, size: int, at_once: int) -> list[T]:
        """Take the next group: ``size`` calls, or half of them if they are many and another group can be in flight."""
        if at_once > 1 and not self.in_flight and size >= SPLIT_MIN:
            size = (size + 1) // 2
        group, self.waiting = self.waiting[:size], self.waiting[size:]
        self.in_flight += 1
        return group


def _resolve_read(future: asyncio.Future[list[Any]], found: Sequence[ReadResult]) -> None:
    for one in found:
        if isinstance(one, Exception):
            future.set_exception(one)
            return
    future.set_result(found if isinstance(found, list) else [*found])


class Ticket:
    """One caller's batch in the queue of commits, and the future that the caller awaits."""

    __slots__ = ("batch", "future", "weight_bytes")

    def __init__(self, batch: Batch, future: asyncio.Future[Commit | Refusal]) -> None:
        self.batch = batch
        self.future = future
        self.weight_bytes = 0
        for write in batch.writes:
            if isinstance(write, Put):
                self.weight_bytes += weight_bytes(write)

    @property
    def named_entries(self) -> Iterable[Write | Guard]:
        """The writes and guards, each of which names an entry."""
        return (*self.batch.writes, *self.batch.guards)


def weight_bytes(put: Put) -> int:
    """The size that a put adds to totals: its key and its value."""
    key, stored = put.key, put.stored
    size_bytes = len(stored) - (stored[0] == 0) if type(stored) is bytes else codec.size_bytes(stored)
    return size_bytes + (len(key) if key.isascii() else len(key.encode()))


def with_last_positions(group: list[Ticket]) -> Iterator[tuple[int, Ticket]]:
    """Each ticket with the position of its last write in the group, counted from 1."""
    position = 0
    for ticket in group:
        position += len(ticket.batch.writes)
        yield position, ticket


def _commit_group_size(queue: list[Ticket]) -> int:
    """How many of the waiting commits go together: as many as one request can carry well."""
    total_bytes = writes = 0
    for number, ticket in enumerate(queue[:GROUP_MAX]):
        total_bytes += ticket.weight_bytes
        writes += len(ticket.batch.writes)
        if total_bytes > GROUP_BYTES_MAX or writes > GROUP_WRITES_MAX:
            return max(1, number)
    return min(len(queue), GROUP_MAX)


# Forks ------------------------------------------------------------------------
#
# Two processes cannot use one connection. A child leaves the connections of its parent alone, does not
# even close them, and opens its own when it needs one.

_engines: weakref.WeakSet[GroupingEngine] = weakref.WeakSet()
_inherited: list[object] = []


def _after_fork_in_child() -> None:
    for engine in list(_engines):
        _inherited.append(dict(vars(engine)))
        engine._init_process_state()


os.register_at_fork(after_in_child=_after_fork_in_child)
