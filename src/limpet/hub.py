"""The watch hub: the end of a namespace's log, read once for all its watchers.

One task follows the log of a watched namespace and keeps the last changes in memory. A
watcher is only a position in that log. While it keeps up it reads from the hub; when it has
fallen behind it reads the log itself, from its position. So a slow watcher never blocks a
writer, never makes a queue grow and never misses a change silently: it gets `Compacted`.

A watcher that waits is woken by changes of its own keys alone. Until then it has seen all that
the hub has, so it does not fall behind while other keys change.
"""

from __future__ import annotations

import asyncio
import logging
import re
import weakref
from bisect import bisect_right
from collections import deque
from typing import Final, Literal

from limpet.clock import Clock, wake
from limpet.commit.log import check_after
from limpet.engine import Engine
from limpet.errors import Closed, Compacted, InvalidValue, LimpetError, TransientError
from limpet.keys import Span
from limpet.model import BEGINNING, Change, Event, LogPage, Op, Status, Synced, fingerprint
from limpet.retry import Outage, retry
from limpet.waiters import Point, Topic, Waiter, Waiters, topic_of

__all__ = ["Hub", "Watch", "event_of"]

log = logging.getLogger("limpet.hub")

TAIL_MAX: Final = 1024
TAIL_BYTES_MAX: Final = 16_000_000
WAIT_S: Final = 30.0
RETRY_S: Final = 0.2
DROP_BEYOND: Final = 64


class Hub:
    """Follows the log of one namespace while it has watchers.

    Attributes:
        end: Up to where the log was read. By its fingerprint another history is recognised.
        failing_since: Since when the log cannot be read, by the monotonic clock; None while it can.
    """

    def __init__(self, engine: Engine, namespace: str, clock: Clock) -> None:
        self.engine = engine
        self.namespace = namespace
        self.clock = clock
        self._tail: list[Change] = []
        self._tail_bytes = 0
        self._floor = 0
        self.end = Point(0, BEGINNING)
        self._follower: asyncio.Task[None] | None = None
        self._watchers = 0
        self._watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        self._waiters = Waiters()
        self._end: LimpetError | None = None
        self.failing_since: float | None = None

    async def join(self) -> Status:
        """Add a watcher, and follow the log if it is the first. Returns the status from just before."""
        self._watchers += 1
        try:
            status = await retry(self.clock, lambda: self.engine.status(self.namespace))
            at = await self.fingerprint_at(status.revision) if self._follower is None else self.end.fingerprint
        except BaseException:
            self.leave()
            raise
        if self._follower is None:
            self._tail, self._tail_bytes = [], 0
            self._floor = status.revision
            self.end = Point(status.revision, at)
            self._end = None
            self._follower = asyncio.get_running_loop().create_task(self._follow(), name="limpet-hub")
        return status

    async def fingerprint_at(self, revision: int) -> str:
        """Get the fingerprint of the change at a revision, or of the last one before it."""
        if self._follower is not None and revision == self.end.revision:
            return self.end.fingerprint
        page = await retry(self.clock, lambda: self.engine.changes(self.namespace, revision, limit=0))
        return page.before

    def leave(self) -> None:
        """Remove a watcher; without any, stop following the log."""
        self._watchers -= 1
        if self._watchers == 0 and self._follower is not None:
            self._follower.cancel()
            self._follower = None

    def lags(self) -> list[int]:
        """Count how many revisions each watch is behind the hub."""
        return [max(0, self.end.revision - watch._last_delivered()) for watch in self._watches]

    async def changes(self, after: int, span: Span | None) -> LogPage | None:
        """Get the changes after a revision; None when there is none yet. Without a span, those of all families."""
        if self._end is not None:
            raise self._end
        if after < self._floor:
            return await self.engine.changes(self.namespace, after, span=span)
        if after >= self.end.revision:
            return None
        fresh = self._tail[bisect_right(self._tail, after, key=lambda change: change.revision) :]
        if span is not None:
            fresh = [change for change in fresh if change.family == "data" and change.key in span]
        return LogPage(fresh, self.end.revision, "", self.end.fingerprint)

    def add_waiter(self, topic: Topic) -> Waiter:
        """Add a caller that waits for the next change. It has seen all changes up to the hub's end."""
        return self._waiters.add(topic)

    def remove_waiter(self, waiter: Waiter) -> None:
        """Remove a caller that waits no more."""
        self._waiters.remove(waiter)

    def seen_by(self, waiter: Waiter) -> Point:
        """Up to where a waiter has missed nothing: the hub's end, or the point before the change that it waited for."""
        return waiter.due_after or self.end

    async def wait(self, topic: Topic) -> int:
        """Wait for a change after the hub's end, or for the end of the hub. Returns the revision to read on after."""
        waiter = self.add_waiter(topic)
        try:
            await waiter.future
            return self.seen_by(waiter).revision
        finally:
            self.remove_waiter(waiter)

    async def close(self) -> None:
        """Wake all watchers and let them end."""
        self._finish(Closed())
        follower, self._follower = self._follower, None
        if follower is not None:
            follower.cancel()
            await asyncio.gather(follower, return_exceptions=True)

    async def _follow(self) -> None:
        outage = Outage(log, f"reading the log of namespace {self.namespace}")
        # An engine may miss the cancellation, so that a follower that was replaced checks for itself.
        while self._follower is asyncio.current_task():
            try:
                # After a failure, do not wait for a change, so that a success shows at once that the log works again.
                wait_s = WAIT_S if self.failing_since is None else 0.0
                page = await self.engine.changes(self.namespace, self.end.revision, wait_s=wait_s)
            except TransientError:
                self._note_failure()
                await self.clock.sleep(RETRY_S)
                continue
            except LimpetError as error:
                if self._follower is asyncio.current_task():
                    self._note_failure()
                    self._finish(error)
                return
            except Exception as error:
                # The task must not end while watchers wait for it.
                self._note_failure()
                await self.clock.sleep(outage.record_failure(error))
                continue
            if self._follower is not asyncio.current_task():
                # Another follower has begun since, from another position.
                return
            self.failing_since = None
            outage.record_success()
            if page.before != self.end.fingerprint:
                self._finish(_other_history(self.end.revision))
                return
            self._add_page(page)

    def _add_page(self, page: LogPage) -> None:
        """Add what the log has after the hub's end, and wake those that wait for it."""
        before = self.end
        self.end = _end_of(page, before)
        self._tail.extend(page.changes)
        self._tail_bytes += sum(change.entry.size_bytes for change in page.changes)
        if len(self._tail) > 2 * TAIL_MAX or self._tail_bytes > TAIL_BYTES_MAX:
            self._shorten_tail()
        self._waiters.notify(page.changes, before)

    def _note_failure(self) -> None:
        if self.failing_since is None:
            self.failing_since = self.clock.monotonic()

    def _shorten_tail(self) -> None:
        """Drop the older half; a watcher that still needs it reads the log."""
        half = (len(self._tail) + 1) // 2
        self._floor = self._tail[half - 1].revision
        self._tail_bytes -= sum(change.entry.size_bytes for change in self._tail[:half])
        del self._tail[:half]

    def _finish(self, error: LimpetError) -> None:
        self._end = error
        # Set it on the present watches directly: a later one may reset `_end` before they have read it.
        for watch in self._watches:
            watch._end = error
        self._follower = self._follower if isinstance(error, Closed) else None
        self._waiters.notify_all(self.end)


class Watch:
    """Changes as they happen: an async iterator of events.

    It begins when it is entered with ``async with`` or when its first event is awaited. Closing
    the store ends it; `aclose` ends it alone.

    Attributes:
        dropped: How many events were dropped, with ``overflow="drop"``.
    """

    def __init__(
        self,
        hub: Hub,
        span: Span,
        *,
        after: str | int | None,
        initial: bool,
        overflow: Literal["resume", "drop"],
    ) -> None:
        if initial and after is not None:
            raise InvalidValue("a watch starts after a position or with the existing entries (initial=True), not both")
        if overflow not in ("resume", "drop"):
            raise InvalidValue("overflow is 'resume' or 'drop'")
        if after is not None and (isinstance(after, bool) or not isinstance(after, str | int)):
            raise InvalidValue(f"watch after a position or a revision, not something of type {type(after).__name__}")
        self.dropped = 0
        self._hub = hub
        self._span = span
        self._topic = topic_of(span)
        self._after = after
        self._initial = initial
        self._overflow = overflow
        # Up to where this watch has read. While it is behind the hub, the fingerprint may be that of an earlier change;
        # then no change of the span lies in between.
        self._cursor = Point(0, BEGINNING)
        self._prefix = ""
        self._ready: deque[Event] = deque()
        # Revisions of entries that the initial scan found, and that are newer than its starting point.
        self._known: dict[str, int] = {}
        self._scan_from: str | None = None
        self._end: LimpetError | None = None
        # One for each task that waits in this watch.
        self._waiters: list[Waiter] = []
        self._state: Literal["new", "scanning", "following", "ended"] = "new"

    async def __aenter__(self) -> Watch:
        if self._state == "new":
            await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> Event:
        if self._state == "new":
            await self._start()
        while not self._ready:
            if self._state == "ended":
                raise StopAsyncIteration
            try:
                if self._state == "scanning":
                    await self._scan()
                else:
                    await self._follow()
            except TransientError:
                await self._hub.clock.sleep(RETRY_S)
            except Closed:
                self._finish()
            except LimpetError:
                self._finish()
                raise
        return self._ready.popleft()

    @property
    def position(self) -> str | None:
        """Where to resume without missing anything, also if no event has come yet.

        None before the watch has begun, and while an event waits to be taken: then keep the event's own position.
        """
        is_idle = self._state == "following" and not self._ready
        return self._prefix + self._seen().fingerprint if is_idle else None

    async def aclose(self) -> None:
        """End this watch, also for a task that waits in it."""
        self._ready.clear()
        self._finish()

    def _finish(self) -> None:
        if self._state in ("scanning", "following"):
            self._hub.leave()
            self._hub._watches.discard(self)
            for waiter in self._waiters:
                wake(waiter.future)
        self._state = "ended"

    def _last_delivered(self) -> int:
        """The revision up to which all changes were delivered. Entries of the initial scan do not count."""
        has_change = bool(self._ready) and self._ready[0].position is not None
        return self._ready[0].revision - 1 if has_change else self._seen().revision

    def _seen(self) -> Point:
        """Up to where this watch has seen all changes of its span. While it waits, that moves on with the hub."""
        return max([self._cursor, *map(self._hub.seen_by, self._waiters)])

    async def _start(self) -> None:
        # Take the position before the scan. The other way round, a change made in between would be in neither.
        status = await self._hub.join()
        self._prefix = position_prefix(status, self._hub.namespace)
        self._state = "following"
        self._hub._watches.add(self)
        try:
            revision, known = _find_start(self._after, status, self._prefix)
            found = await self._hub.fingerprint_at(revision)
            if known is not None and found != known:
                raise _other_history(revision)
            self._cursor = Point(revision, found)
        except BaseException:
            self._finish()
            raise
        if self._initial:
            self._state, self._scan_from = "scanning", self._span.start

    async def _scan(self) -> None:
        assert self._scan_from is not None
        found = await self._hub.engine.scan(self._hub.namespace, Span(self._scan_from, self._span.stop))
        if self._state == "ended":
            return
        for entry in found.entries:
            if entry.revision > self._cursor.revision:
                self._known[entry.key] = entry.revision
            revision, at_ms = entry.revision, entry.updated_ms
            self._ready.append(
                Event("put", entry.key, entry, revision, revision, None, at_ms=at_ms, writer=entry.writer)
            )
        if found.cursor is None:
            revision, found_at = self._cursor
            self._ready.append(Synced("synced", "", None, revision, revision, self._prefix + found_at))
            self._state = "following"
        else:
            self._scan_from = found.cursor + "\0"

    async def _follow(self) -> None:
        if self._end is not None:
            raise self._end
        page = await self._hub.changes(self._cursor.revision, self._span)
        if page is None:
            await self._wait()
            return
        if self._state == "ended":  # Closed while the log was being read.
            return
        # The hub compares histories for watches that keep up. A page from the log itself is compared here, unless the
        # cursor is between two changes of the span, where this watch has seen no change to compare with.
        revision, at = self._cursor
        is_known = page.before and at.startswith(f"{revision}-")
        if is_known and page.before != at:
            raise _other_history(revision)
        fresh = [change for change in page.changes if change.revision > self._known.get(change.key, 0)]
        if self._overflow == "drop" and len(fresh) > DROP_BEYOND:
            self.dropped += len(fresh) - DROP_BEYOND
            fresh = fresh[-DROP_BEYOND:]
        self._ready.extend(event_of(change, self._prefix) for change in fresh)
        self._cursor = _end_of(page, self._cursor)
        if self._known and self._cursor.revision >= max(self._known.values()):
            self._known = {}

    async def _wait(self) -> None:
        """Wait until there may be something to read, and go on from just before it."""
        waiter = self._hub.add_waiter(self._topic)
        self._waiters.append(waiter)
        try:
            await waiter.future
        finally:
            self._cursor = self._seen()
            self._waiters.remove(waiter)
            self._hub.remove_waiter(waiter)


_WITH_VALUE: Final[tuple[Op, ...]] = ("put", "patch")


def event_of(change: Change, prefix: str) -> Event:
    """Make the event of a change."""
    entry = change.entry if change.op in _WITH_VALUE or change.entry.stored is None else change.entry.without_value()
    position = prefix + fingerprint(change)
    commit, at_ms = change.commit, change.at_ms
    return Event(change.op, change.key, entry, change.revision, commit, position, change.cause, at_ms, change.writer)


def position_prefix(status: Status, namespace: str) -> str:
    """Make the prefix of all positions of a namespace in this epoch of this storage."""
    return f"{status.store_id}:{namespace}:{status.epoch}:"


_FINGERPRINT: Final = re.compile(r"([0-9]{1,19})-([0-9a-f]{1,16})-([0-9a-f]{12})")


def _find_start(after: str | int | None, status: Status, prefix: str) -> tuple[int, str | None]:
    """Find the revision to continue after, and the fingerprint that a position has of it."""
    if after is None:
        return status.revision, None
    known = None
    if isinstance(after, str):
        known = after.removeprefix(prefix)
        if known == after:
            raise Compacted("the position belongs to another store, namespace or epoch")
        if _FINGERPRINT.fullmatch(known) is None:
            raise Compacted("the position does not identify its change, so it cannot be compared with the log")
        after = int(known.partition("-")[0])
    check_after(after, floor=status.floor, revision=status.revision)
    # A plain int: drivers treat subclasses of int, such as a member of an enum, differently.
    return int(after), known


def _other_history(revision: int) -> Compacted:
    return Compacted(
        f"revision {revision} is not the change that was seen before, so the position belongs to another history "
        "of this store, as after a restored backup"
    )


def _end_of(page: LogPage, before: Point) -> Point:
    """The end of a page that was read after a point."""
    at = page.at if page.at is not None else fingerprint(page.changes[-1]) if page.changes else before.fingerprint
    return Point(max(before.revision, page.next_after), at)
