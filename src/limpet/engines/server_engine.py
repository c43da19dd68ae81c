"""What engines behind a network share: connections that are kept, and calls that travel together.

All reads of one turn of the loop are one request to the server, and so are all commits of one
namespace; while these travel, the next gather. Where two may travel at a time, many callers are
split in halves, so that the server works for some while this process works for others. What a
request looks like, and what an error of the driver means, is the engine's own.

`GroupingEngine` has the calls that travel together, for an engine whose driver keeps connections by
itself; `ServerEngine` adds the connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
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
    "request_group",
    "weight_bytes",
    "with_last_positions",
]

GROUP_MAX: Final = 256
GROUP_BYTES_MAX: Final = 16_000_000
CONNECTIONS_MAX: Final = 8
POLL_S: Final = 0.5

SPLIT_MIN: Final = 32

CommitResult = Commit | Refusal | Exception
ReadResult = Entry | Exception | None
PendingRead = tuple[Sequence[str], "asyncio.Future[list[Entry | None]]"]
T = TypeVar("T")


class GroupingEngine(ABC):
    """An engine whose reads and commits travel together."""

    # How many groups of a namespace travel at a time, and how many keys one request may ask for.
    _reads_at_once = 1
    _commits_at_once = 1
    _keys_at_once: int | None = None

    def __init__(self, display_name: str) -> None:
        self._display_name = display_name
        self._closed = False
        # The latest time of each namespace that this handle has seen, which a server may not have recorded.
        self._seen_ms: dict[str, int] = {}
        self._init_process_state()
        _engines.add(self)

    def _init_process_state(self) -> None:
        """What a process must have of its own. Runs again in a child after a fork."""
        self._wakeup = Wakeup()
        self._commits: dict[str, Queue[Ticket]] = {}
        self._reads: dict[tuple[str, Family], Queue[PendingRead]] = {}
        self._tasks: set[asyncio.Future[Any]] = set()
        self._latest: dict[str, int] = {}

    # What an engine must know -------------------------------------------------

    @abstractmethod
    async def _read_all(self, namespace: str, family: Family, keys: list[str]) -> Sequence[ReadResult]:
        """Read entries by key, in one request. A key may come twice; an entry may be broken by itself."""

    @abstractmethod
    async def _commit_group(self, namespace: str, group: list[Ticket], since: int) -> Sequence[CommitResult]:
        """Commit batches in their order, and tell what became of each. None of them is as old as ``since``.

        Whatever is raised means that nothing was applied. An error that is not ours, or `NotApplied`, may be the fault
        of one batch: then each is committed by itself.
        If something may have been applied, the outcome is `Ambiguous`.
        """

    @abstractmethod
    def _translate_driver_error(self, error: Exception) -> Exception:
        """A driver's error as ours, for something that was not applied or that may be asked again."""

    # Reading ------------------------------------------------------------------

    async def read(self, namespace: str, keys: Sequence[str], *, family: Family = "data") -> list[Entry | None]:
        """See `Engine.read`."""
        self._check_open()
        place = (namespace, family)
        queue = self._reads.get(place)
        if queue is None:
            queue = self._reads[place] = Queue()
        answer: asyncio.Future[list[Entry | None]] = asyncio.get_running_loop().create_future()
        queue.waiting.append((keys, answer))
        if queue.workers < self._reads_at_once:
            self._start_task(self._answer_reads(namespace, family, queue))
            queue.workers += 1
        return await answer

    async def _answer_reads(self, namespace: str, family: Family, queue: Queue[PendingRead]) -> None:
        """Read what is asked for in one request, and again until nobody asks."""
        while queue.waiting:
            asked = queue.take(self._count_reads(queue.waiting), self._reads_at_once)
            try:
                found = await self._read_all(namespace, family, [key for keys, _ in asked for key in keys])
            except Exception as error:
                found = await self._read_each(namespace, family, asked, error)
            queue.travelling -= 1
            at = 0
            for keys, answer in asked:
                if not answer.done():
                    _answer(answer, found[at : at + len(keys)])
                at += len(keys)
        queue.workers -= 1
        if not queue.workers:
            del self._reads[namespace, family]

    async def _read_each(
        self, namespace: str, family: Family, asked: list[PendingRead], error: Exception
    ) -> Sequence[ReadResult]:
        """What is read when a group could not be: what is wrong with one question fails no other."""
        if len(asked) == 1 or not is_fault_of_one(error):
            return [error] * sum(len(keys) for keys, _ in asked)
        found: list[ReadResult] = []
        for keys, _ in asked:
            try:
                found += await self._read_all(namespace, family, [*keys])
            except Exception as own:
                found += [own] * len(keys)
        return found

    def _count_reads(self, waiting: list[PendingRead]) -> int:
        """How many questions go together. The keys of one are never parted: they are read at one moment."""
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
            self._start_task(self._commit_queued(namespace, queue))
            queue.workers += 1
        try:
            return await ticket.answer
        except asyncio.CancelledError:
            # Not begun: it never will. Begun: it will be finished, whoever hears of it.
            with contextlib.suppress(ValueError):
                queue.waiting.remove(ticket)
            raise

    async def _commit_queued(self, namespace: str, queue: Queue[Ticket]) -> None:
        """Commit group after group until nobody is left."""
        while queue.waiting:
            group = queue.take(_group_size(queue.waiting), self._commits_at_once)
            # As known before they leave: other groups may come back while these are on their way.
            since = self._latest.get(namespace, 0)
            try:
                outcomes = await self._commit_group(namespace, group, since)
            except Exception as error:
                outcomes = await self._commit_each(namespace, group, since, error)
            queue.travelling -= 1
            for ticket, outcome in zip(group, outcomes, strict=True):
                if not ticket.answer.done():
                    if isinstance(outcome, Exception):
                        ticket.answer.set_exception(outcome)
                    else:
                        ticket.answer.set_result(outcome)
        queue.workers -= 1
        if not queue.workers:
            del self._commits[namespace]

    async def _commit_each(
        self, namespace: str, group: list[Ticket], since: int, error: Exception
    ) -> Sequence[CommitResult]:
        """What becomes of a group of which nothing was applied: what is wrong with one batch fails no other."""
        if not is_fault_of_one(error):
            return [error] * len(group)
        if len(group) == 1:
            return [commit_error(group[0].batch, error)]
        outcomes: list[CommitResult] = []
        for ticket in group:
            try:
                outcomes += await self._commit_group(namespace, [ticket], since)
            except Exception as own:
                outcomes.append(commit_error(ticket.batch, own))
        return outcomes

    def _record_revision(self, namespace: str, revision: int) -> None:
        if revision > self._latest.get(namespace, 0):
            self._latest[namespace] = revision
            self._wakeup.notify(namespace)

    def _observe_time(self, namespace: str, told_ms: int) -> int:
        """The time that the server tells, or the latest that this handle has seen if that is later."""
        if told_ms > self._seen_ms.get(namespace, 0):
            self._seen_ms[namespace] = told_ms
        return self._seen_ms[namespace]

    def _ambiguous(self, request_id: str, since: int, problem: object) -> Ambiguous:
        text = f"cannot tell whether {self._display_name} took the commit: {type(problem).__name__}"
        return Ambiguous(text, request_id=request_id, since=since)

    # Work ---------------------------------------------------------------------

    def _start_task(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _finish_tasks(self) -> None:
        """Wait for the groups that are on their way."""
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

    # What an engine must know of its connections --------------------------------

    @abstractmethod
    async def _read_log(self, namespace: str, after: int, limit: int, span: Span | None) -> LogPage:
        """Read the log, without waiting."""

    @abstractmethod
    async def _disconnect(self, connection: Any) -> None:
        """Close a connection that is in order."""

    @abstractmethod
    def _abort(self, connection: Any) -> None:
        """Let go of a connection at once, whatever is on the line."""

    @abstractmethod
    def _is_closed(self, connection: Any) -> bool:
        """Whether a connection is closed."""

    @abstractmethod
    def _is_connection_lost(self, error: BaseException) -> bool:
        """Whether the line broke, so that nobody can say what the server made of the last request."""

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
            feed = await self._read_log(namespace, after, limit, span)
            left = deadline - loop.time()
            if feed.changes or left <= 0:
                return feed
            await self._wakeup.wait(namespace, token, min(left, POLL_S))

    @abstractmethod
    def _listen_to(self, namespace: str) -> None:
        """Arrange that commits of other processes to this namespace wake its waiters here."""

    def _keep_listening(self, name: str, listen: Callable[[], Awaitable[None]]) -> None:
        """Listen in the background. Whenever the line breaks, it is laid again."""

        async def listening() -> None:
            while True:
                with contextlib.suppress(Exception):
                    await listen()
                await asyncio.sleep(POLL_S)

        if name not in self._listeners:
            task = asyncio.get_running_loop().create_task(listening(), name="limpet-listener")
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
        """A connection: one that lies idle here, or another."""
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
        """Let others have a connection; one that was lost is nobody's any more."""
        self._return_to_pool(connection, lost=lost)

    def _return_to_pool(self, connection: Any, *, lost: bool = False) -> None:
        """The same, where nothing has to be waited for."""
        if lost or self._closed:
            # What goes wrong with a connection after its work is done is nobody's trouble.
            with contextlib.suppress(Exception):
                self._abort(connection)
        else:
            # Should it have been cut meanwhile, whoever takes it next will see.
            self._idle.append(connection)
        self._free_slots.release()

    def _borrow_connection(self) -> BorrowedConnection:
        """A connection, for as long as it is used."""
        return BorrowedConnection(self)


class BorrowedConnection:
    """What `async with` needs to lend a connection. A decorated generator would take three times as long."""

    __slots__ = ("_connection", "_engine")

    def __init__(self, lender: ServerEngine) -> None:
        self._engine = lender

    async def __aenter__(self) -> Any:
        self._connection = await self._engine._acquire()
        return self._connection

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        # Whoever is cancelled leaves an answer on the line that is for nobody.
        lost = error is not None and (not isinstance(error, Exception) or self._engine._is_connection_lost(error))
        await self._engine._release(self._connection, lost=lost)


class Queue(Generic[T]):
    """Calls that wait to travel together, those that see to it, and how many groups are on their way."""

    __slots__ = ("travelling", "waiting", "workers")

    def __init__(self) -> None:
        self.waiting: list[T] = []
        self.workers = 0
        self.travelling = 0

    def take(self, size: int, at_once: int) -> list[T]:
        """The next group: as many as may go, or half of many when another group can travel beside it."""
        if at_once > 1 and not self.travelling and size >= SPLIT_MIN:
            size = (size + 1) // 2
        group, self.waiting = self.waiting[:size], self.waiting[size:]
        self.travelling += 1
        return group


def _answer(answer: asyncio.Future[list[Any]], found: Sequence[ReadResult]) -> None:
    for one in found:
        if isinstance(one, Exception):
            answer.set_exception(one)
            return
    answer.set_result(found if isinstance(found, list) else [*found])


class Ticket:
    """One caller's place in the queue of commits."""

    __slots__ = ("answer", "batch", "weight_bytes")

    def __init__(self, batch: Batch, answer: asyncio.Future[Commit | Refusal]) -> None:
        self.batch = batch
        self.answer = answer
        self.weight_bytes = 0
        for write in batch.writes:
            if type(write) is Put:
                self.weight_bytes += weight_bytes(write)

    @property
    def named_entries(self) -> Iterable[Write | Guard]:
        """Everything that names an entry."""
        return (*self.batch.writes, *self.batch.guards)


def weight_bytes(put: Put) -> int:
    """What a put counts in totals: its key and its value."""
    key, stored = put.key, put.stored
    size_bytes = len(stored) - (stored[0] == 0) if type(stored) is bytes else codec.size_bytes(stored)
    return size_bytes + (len(key) if key.isascii() else len(key.encode()))


def with_last_positions(group: list[Ticket]) -> Iterator[tuple[int, Ticket]]:
    """Each with the place of its last write in the group."""
    mark = 0
    for ticket in group:
        mark += len(ticket.batch.writes)
        yield mark, ticket


_NUMBERED: Final = re.compile(r"([0-9a-f]+-[0-9a-f]+)\.[0-9]+\Z")


def request_group(request_id: str) -> str:
    """The name of the call in which a batch was first asked for; its own name if its caller gave it one."""
    numbered = _NUMBERED.match(request_id)
    return numbered[1] if numbered else request_id


def _group_size(queue: list[Ticket]) -> int:
    """How many of those who wait go together: as many as one message to the server can well carry."""
    total_bytes = 0
    for number, ticket in enumerate(queue[:GROUP_MAX]):
        total_bytes += ticket.weight_bytes
        if total_bytes > GROUP_BYTES_MAX:
            return max(1, number)
    return min(len(queue), GROUP_MAX)


# Forks ------------------------------------------------------------------------
#
# A connection cannot be used by two processes. A child leaves those of its parent alone, to the
# point of never closing them, and makes its own when it next needs one.

_engines: weakref.WeakSet[GroupingEngine] = weakref.WeakSet()
_inherited: list[object] = []


def _after_fork_in_child() -> None:
    for engine in list(_engines):
        _inherited.append(dict(vars(engine)))
        engine._init_process_state()


os.register_at_fork(after_in_child=_after_fork_in_child)
