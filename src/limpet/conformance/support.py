"""What the tests of the suite share: the sync API made awaitable, patience, and failing engines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from limpet.clock import ManualClock
from limpet.engine import Engine
from limpet.errors import Ambiguous, Unavailable
from limpet.model import Batch, Commit, Event, Refusal
from limpet.request_ids import new_request_id
from limpet.session import Session

T = TypeVar("T")

# Less than the hub waits before it looks by itself: what is promised is a wake-up.
PATIENCE_S = 28.0
QUIET_S = 0.15


# Enough for every client and watcher of a test to block at once; asyncio's own pool is small.
_threads = ThreadPoolExecutor(128, thread_name_prefix="blocking-face")


def in_thread(call: Callable[[], T]) -> asyncio.Future[T]:
    """Run something that blocks in a thread."""
    return asyncio.get_running_loop().run_in_executor(_threads, call)


class Blocking:
    """An object of the sync API behind the names of the async one.

    Each call runs in a thread, as callers of the sync API do, so that the same tests hold for both.
    """

    _PLAIN = frozenset({"name", "traits", "key", "token", "lost", "fence", "dropped"})
    _AT_ONCE = frozenset({"check"})
    _MAKES = frozenset({"namespace", "batch", "record", "lock", "election", "edit", "typed"})
    _ITERATES = frozenset({"scan", "history", "observe"})

    def __init__(self, twin: Any) -> None:
        self._twin = twin

    def __getattr__(self, name: str) -> Any:
        # A draft is chained: only its commit waits.
        chained = hasattr(self._twin, "_attempt") and name != "commit"
        if name in self._PLAIN and not (chained and name == "fence"):
            return getattr(self._twin, name)
        if name == "watch":
            return lambda *args, **options: _BlockingWatch(lambda: self._twin.watch(*args, **options))
        method = getattr(self._twin, name)
        if name in self._AT_ONCE:
            return method
        if chained or name in self._MAKES:
            return lambda *args, **options: Blocking(method(*args, **options))
        if name in self._ITERATES:
            return lambda *args, **options: _iterate(lambda: method(*args, **options))
        return lambda *args, **options: in_thread(lambda: method(*args, **options))

    async def __aenter__(self) -> Any:
        entered = await in_thread(self._twin.__enter__)
        return self if entered is self._twin else entered

    async def __aexit__(self, *error: Any) -> None:
        await in_thread(lambda: self._twin.__exit__(*error))

    def __repr__(self) -> str:
        return repr(self._twin)


async def _iterate(make: Callable[[], Iterable[Any]]) -> AsyncIterator[Any]:
    items = await in_thread(lambda: iter(make()))
    end = object()
    while (item := await in_thread(lambda: next(items, end))) is not end:
        yield item


class _BlockingWatch:
    """A watch of the sync API, polled in a thread. An event whose caller gave up is kept for the next call."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._twin: Any = None
        self._answer: asyncio.Future[Event | None] | None = None

    @property
    def dropped(self) -> int:
        return int(self._twin.dropped)

    @property
    def position(self) -> str | None:
        found: str | None = self._twin.position
        return found

    async def __aenter__(self) -> _BlockingWatch:
        if self._twin is None:
            self._twin = await in_thread(self._make)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __aiter__(self) -> _BlockingWatch:
        return self

    async def __anext__(self) -> Event:
        await self.__aenter__()
        if self._answer is None:
            self._answer = in_thread(lambda: next(self._twin, None))
        event = await asyncio.shield(self._answer)
        self._answer = None
        if event is None:
            raise StopAsyncIteration
        return event

    async def aclose(self) -> None:
        if self._twin is not None:
            await in_thread(self._twin.close)


async def next_event(watch: Any) -> Event:
    """The next event, or a failure after some patience."""
    event: Event = await asyncio.wait_for(anext(watch), PATIENCE_S)
    return event


async def next_events(watch: Any, count: int) -> list[Event]:
    """The next so many events."""
    return [await next_event(watch) for _ in range(count)]


async def assert_quiet(watch: Any) -> None:
    """Fail if the watch delivers anything within a moment."""
    try:
        event = await asyncio.wait_for(anext(watch), QUIET_S)
    except TimeoutError:
        return
    raise AssertionError(f"unexpected event {event!r}")


def assert_counted(store: Any, found_bytes: int, expected_bytes: int) -> None:
    """Fail unless a store, or an engine, counts its bytes right: those of the values, or of what hides them."""
    assert found_bytes > expected_bytes if store.traits.encrypted else found_bytes == expected_bytes


def session_of(store: Any) -> Session:
    """The session behind a store of either face."""
    while not hasattr(store, "_session"):
        store = store._twin
    found: Session = store._session
    return found


def stands_still(store: Any) -> bool:
    """Whether the time of a store stands still until it is turned."""
    return isinstance(session_of(store).clock, ManualClock)


class Failing:
    """An engine in front of another, whose commits fail a given number of times.

    ``before`` fails a commit that then was not applied; ``after`` applies it and loses the answer.
    """

    def __init__(self, engine: Engine, *, before: int = 0, after: int = 0) -> None:
        self._engine = engine
        self.before = before
        self.after = after
        self.commits = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def commit(self, namespace: str, batch: Batch) -> Commit | Refusal:
        self.commits += 1
        if self.before > 0:
            self.before -= 1
            raise Unavailable("the line is cut, nothing was sent")
        since = (await self._engine.status(namespace)).revision
        # Name the request, so that its outcome can be looked up when the reply is lost.
        request_id = batch.request_id or new_request_id()
        outcome = await self._engine.commit(namespace, msgspec.structs.replace(batch, request_id=request_id))
        if self.after > 0:
            self.after -= 1
            raise Ambiguous("the line is cut, the answer is lost", request_id=request_id, since=since)
        return outcome


class InnerLine:
    """Loses replies between an engine and its store, for engines that have no connection which could be cut."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._failing: list[Failing] = []
        self._requested = 0

    def attach(self, store: Any) -> None:
        """Put this line under a store."""
        self._failing.append(fail(store))

    @property
    def cuts(self) -> int:
        """See `Line.cuts`."""
        return self._requested - sum(failing.after for failing in self._failing)

    def cut(self) -> None:
        """See `Line.cut`."""
        self._requested += 1
        self._failing[0].after += 1


class Raising:
    """An engine in front of another, whose commits raise an unforeseen error."""

    def __init__(self, engine: Engine, error: BaseException) -> None:
        self._engine = engine
        self._error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def commit(self, namespace: str, batch: Batch) -> Commit | Refusal:
        raise self._error


class Counting:
    """An engine in front of another that counts the commits, and those that were refused."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.commits = self.refused = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def commit(self, namespace: str, batch: Batch) -> Commit | Refusal:
        self.commits += 1
        outcome = await self._engine.commit(namespace, batch)
        self.refused += isinstance(outcome, Refusal)
        return outcome


@contextlib.contextmanager
def raising(store: Any, error: BaseException) -> Iterator[None]:
    """Let every commit of a store raise an error."""
    session = session_of(store)
    engine, session.engine = session.engine, Raising(session.engine, error)
    try:
        yield
    finally:
        session.engine = engine


def count(store: Any) -> Counting:
    """Put an engine that counts under a store."""
    session = session_of(store)
    counting = session.engine = Counting(session.engine)
    return counting


async def wait_for_queue(store: Any, callers: int, *key: str) -> None:
    """Wait until so many callers stand in line for a lock, or for an update of a key."""
    async with asyncio.timeout(PATIENCE_S):
        while session_of(store).turns.waiting(key) != callers:  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.001)


def fail(store: Any, *, before: int = 0, after: int = 0) -> Failing:
    """Put a failing engine under a store."""
    session = session_of(store)
    failing = Failing(session.engine, before=before, after=after)
    session.engine = failing
    return failing
