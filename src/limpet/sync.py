"""The sync API: the same verbs without await, in any thread.

There is no second implementation. A verb here makes the coroutine of `limpet.store` and runs
it to its end. On an engine whose calls complete in place that needs no event loop: nothing in
the coroutine ever suspends, so one `send` runs it in the caller's thread. Other engines, and
everything that waits (watches, locks and their renewal, the sweeper), run on one loop in a
thread that the store owns. A function that a caller gives to a verb still runs in the caller's
thread: on the loop it would delay all other callers, and could not call the store.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import inspect
import os
import queue
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, MutableMapping
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, Literal, NamedTuple, ParamSpec, Self, TypeVar

from limpet import edit as _edit
from limpet import election as _election
from limpet import hub as _hub
from limpet import lock as _lock
from limpet import opening as _opening
from limpet import record as _record
from limpet import store as _store
from limpet import typed as _typed
from limpet.clock import Clock, call_on, has_loop
from limpet.draft import TTL, Fence, Fencing, Meta
from limpet.draft import Draft as _Draft
from limpet.errors import Closed, Conflict, Unavailable
from limpet.keys import VALUE_BYTES_MAX, check_namespace
from limpet.lock import LockInfo
from limpet.model import ABSENT, KEEP, Commit, Entry, Event, Filter, Sentinel, Traits, Window
from limpet.observed import Observer, check_observer
from limpet.session import Session

if TYPE_CHECKING:
    from limpet.encryption.keyring import Keyring

__all__ = ["Draft", "Edit", "Election", "Lock", "Mapping", "Record", "Store", "Typed", "Watch", "open"]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_MISSING: Final = object()


class Runner:
    """Runs coroutines for callers that cannot await."""

    def __init__(self) -> None:
        self.inline = False
        self.background: Callable[[], None] | None = None
        self._stopped = False
        self.forget_loop()

    def forget_loop(self) -> None:
        """Reset, as in a child after a fork, where the loop's thread does not exist. The next call makes a new loop."""
        self.closing = threading.Lock()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine to its end: in this thread where nothing suspends, else on the loop."""
        if not self.inline:
            return self.wait(work)
        if has_loop():
            raise _would_block(work)
        if self._loop is None:
            self._get_loop(work)
        try:
            work.send(None)
        except StopIteration as done:
            result: R = done.value
            return result
        work.close()
        raise RuntimeError(
            "work that completes in place has waited for something else than the store: run it with on_loop=True"
        )

    def wait(self, work: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine on the loop and wait for it."""
        waiting = self._start(work)
        try:
            return waiting.result()
        except concurrent.futures.CancelledError:
            # Only a closing store cancels work.
            raise Closed from None
        except BaseException:
            # An interrupt came to this thread, so the work has to be cancelled from here.
            waiting.cancel()
            raise

    def run_with(
        self,
        function: Callable[[Any], Any],
        work: Callable[[Callable[[Any], Any] | Callable[[Any], Awaitable[Any]]], Coroutine[Any, Any, R]],
    ) -> R:
        """Run a coroutine that calls a plain function of the caller, which runs in this thread on every engine."""
        if self.inline:
            return self.run(work(function))
        calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()

        async def call(value: Any) -> Any:
            loop = asyncio.get_running_loop()
            made = _Call(value, contextvars.copy_context(), loop, loop.create_future())
            calls.put(made)
            result, error = await made.result
            if error is not None:
                raise error
            return result

        waiting: concurrent.futures.Future[R] | None = None
        try:
            waiting = self._start(work(call))
            waiting.add_done_callback(lambda _: calls.put(None))
            while (made := calls.get()) is not None:
                made.run(function)
            return waiting.result()
        except concurrent.futures.CancelledError:
            if waiting is not None and waiting.cancelled():
                raise Closed from None
            # The function itself has waited for a future that was cancelled.
            raise
        except BaseException:
            # The work would wait for a result that never comes.
            if waiting is not None:
                waiting.cancel()
            raise

    def _start(self, work: Coroutine[Any, Any, R]) -> concurrent.futures.Future[R]:
        """Start a coroutine on the loop."""
        if has_loop():
            raise _would_block(work)
        return asyncio.run_coroutine_threadsafe(work, self._get_loop(work))

    def _get_loop(self, work: Coroutine[Any, Any, Any] | None = None) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._stopped:
                if work is not None:
                    work.close()
                raise Closed
            if self._loop is None:
                try:
                    self._loop = asyncio.new_event_loop()
                except OSError as error:
                    if work is not None:
                        work.close()
                    raise Unavailable(f"no event loop can be made now: {error.strerror}") from error
                self._thread = threading.Thread(target=self._loop.run_forever, name="limpet-loop", daemon=True)
                self._thread.start()
                if self.background is not None:
                    self._loop.call_soon_threadsafe(self.background)
            return self._loop

    def start_in_background(self, work: Callable[[], None]) -> None:
        """Start work on the loop now, and again whenever a new loop is started."""
        self.background = work
        self._get_loop().call_soon_threadsafe(work)

    def stop(self) -> None:
        """End the loop and its thread."""
        with self._lock:
            self._stopped = True
            loop, self._loop = self._loop, None
            thread, self._thread = self._thread, None
        if loop is not None and thread is not None:
            asyncio.run_coroutine_threadsafe(_finish_tasks(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()


class _Call(NamedTuple):
    """A call of the caller's function. Work on the loop waits for its result, while the caller's thread runs it."""

    value: Any
    # `limpet.turns.is_inside` recognises by the context that the function runs inside an update.
    context: contextvars.Context
    loop: asyncio.AbstractEventLoop
    result: asyncio.Future[tuple[Any, Exception | None]]

    def run(self, function: Callable[[Any], Any]) -> None:
        """Call the function in this thread, and pass its result or its error to the loop."""
        result, raised = None, None
        try:
            result = self.context.run(function, self.value)
        except Exception as error:
            raised = error
        call_on(self.loop, self._set_result, (result, raised))

    def _set_result(self, outcome: tuple[Any, Exception | None]) -> None:
        # The work may have been cancelled meanwhile.
        if not self.result.done():
            self.result.set_result(outcome)


async def _finish_tasks() -> None:
    """Let tasks that got `Closed` finish by themselves, and cancel the others."""
    for _ in range(20):
        await asyncio.sleep(0)
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _would_block(work: Coroutine[Any, Any, Any]) -> RuntimeError:
    work.close()
    return RuntimeError(
        "a blocking store was called inside a running event loop, which it would stop: "
        "use limpet.open() and await there, or call it from another thread (asyncio.to_thread)"
    )


class Proxy:
    """A sync object in front of its async twin."""

    def __init__(self, twin: Any, runner: Runner) -> None:
        self._twin = twin
        self._runner = runner

    def __repr__(self) -> str:
        return f"sync.{self._twin!r}"


def mirror(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], *, on_loop: bool = False
) -> Callable[Concatenate[Any, P], R]:
    """Make the sync form of an async method; ``on_loop`` for one that needs a loop on every engine."""
    # By its name, because the twin may be of a class that does more, such as an observed store.
    name = method.__name__

    @functools.wraps(method)
    def call(self: Proxy, /, *args: P.args, **kwargs: P.kwargs) -> R:
        run = self._runner.wait if on_loop else self._runner.run
        work: Coroutine[Any, Any, R] = getattr(self._twin, name)(*args, **kwargs)
        return run(work)

    return call


def _iterate(run: Callable[[Coroutine[Any, Any, Any]], Any], items: AsyncIterator[R]) -> Iterator[R]:
    async def advance() -> Any:
        return await anext(items, _MISSING)

    while (item := run(advance())) is not _MISSING:
        yield item


class Store(Proxy):
    """One namespace, without await. Get one from `limpet.sync.open`."""

    _twin: _store.Store

    get = mirror(_store.Store.get)
    entry = mirror(_store.Store.entry)
    remaining = mirror(_store.Store.remaining)
    children = mirror(_store.Store.children)
    namespaces = mirror(_store.Store.namespaces)
    entries = mirror(_store.Store.entries)
    get_many = mirror(_store.Store.get_many)
    keys = mirror(_store.Store.keys)
    put = mirror(_store.Store.put)
    create = mirror(_store.Store.create)
    append = mirror(_store.Store.append)
    add = mirror(_store.Store.add)
    minimum = mirror(_store.Store.minimum)
    maximum = mirror(_store.Store.maximum)
    delete = mirror(_store.Store.delete)
    delete_prefix = mirror(_store.Store.delete_prefix)
    take = mirror(_store.Store.take)
    touch = mirror(_store.Store.touch)
    persist = mirror(_store.Store.persist)
    outcome = mirror(_store.Store.outcome)
    locks = mirror(_store.Store.locks)
    status = mirror(_store.Store.status)
    sweep = mirror(_store.Store.sweep)
    index = mirror(_store.Store.index)
    unindex = mirror(_store.Store.unindex)
    indexes = mirror(_store.Store.indexes)
    trim = mirror(_store.Store.trim)
    reseal = mirror(_store.Store.reseal)
    seals = mirror(_store.Store.seals)

    @property
    def name(self) -> str:
        """The namespace."""
        return self._twin.name

    @property
    def traits(self) -> Traits:
        """The properties in which engines differ."""
        return self._twin.traits

    def namespace(self, name: str) -> Store:
        """Another namespace of the same engine. It is closed together with this one."""
        return Store(self._twin.namespace(name), self._runner)

    def run(self, function: Callable[[_store.Store], Coroutine[Any, Any, R]], /, *, on_loop: bool = False) -> R:
        """Run an async function of the async store to its end, for code that is written once for both kinds of callers.

        Where the engine completes in place it runs in the caller's thread, and may then await nothing but the store's
        reads and writes. With ``on_loop`` it always runs on the store's own event loop, and may await anything: a
        sleep, a watch, a lock.
        """
        return (self._runner.wait if on_loop else self._runner.run)(function(self._twin))

    def update(
        self,
        key: str,
        change: Callable[[Any], Any],
        *,
        ttl: TTL | Literal[Sentinel.KEEP] = KEEP,
        fence: Fencing | Fence | None = None,
        meta: Meta | Literal[Sentinel.KEEP] = KEEP,
    ) -> Entry | None:
        """Change a value by a plain function of the value found; see `limpet.Store.update`."""
        if _is_async(change):
            raise TypeError("a blocking store updates by a plain function, and this one is async: use limpet.open()")
        return self._runner.run_with(
            require_plain(change), lambda changed: self._twin.update(key, changed, ttl=ttl, fence=fence, meta=meta)
        )

    def edit(
        self,
        key: str,
        *,
        on_conflict: _edit.Decide | None = None,
        ttl: TTL | Literal[Sentinel.KEEP] = KEEP,
        fence: Fencing | Fence | None = None,
        meta: Meta | Literal[Sentinel.KEEP] = KEEP,
    ) -> Edit:
        """A copy of an object or a record to work on, with ``with``; see `limpet.Store.edit`."""
        if _is_async(on_conflict):
            raise TypeError("a blocking store takes a plain function as on_conflict, and this one is async")
        return Edit(self._twin.edit(key, on_conflict=on_conflict, ttl=ttl, fence=fence, meta=meta), self._runner)

    def scan(
        self,
        prefix: str = "",
        *,
        where: Filter | None = None,
        limit: int | None = None,
        after: str | None = None,
        reverse: bool = False,
    ) -> Iterator[Entry]:
        """Entries whose keys start with the prefix, in code-point order or its reverse; see `limpet.Store.scan`."""
        twin = self._twin.scan(prefix, where=where, limit=limit, after=after, reverse=reverse)
        return _iterate(self._runner.run, twin)

    def history(self, key: str) -> Iterator[Event]:
        """The changes of a key that are still in the log, oldest first."""
        return _iterate(self._runner.run, self._twin.history(key))

    def watch(
        self,
        pattern: str = "*",
        *,
        after: str | int | None = None,
        initial: bool = False,
        overflow: Literal["resume", "drop"] = "resume",
    ) -> Watch:
        """Changes as they happen, in revision order, from now on; see `limpet.Store.watch`."""
        return Watch(self._twin.watch(pattern, after=after, initial=initial, overflow=overflow), self._runner)

    def lock(
        self,
        name: str,
        *,
        ttl: float | timedelta,
        wait: float = 0.0,
        holder: str | None = None,
        token: int | None = None,
    ) -> Lock:
        """A lease on a name, to be used with ``with``. Losing it sets ``lost`` and raises at exit."""
        twin = self._twin.lock(name, ttl=ttl, wait=wait, holder=holder, cancel=False, token=token)
        return Lock(twin, self._runner)

    def election(
        self, name: str, *, ttl: float | timedelta, wait: float | None = None, candidate: str | None = None
    ) -> Election:
        """A candidate to lead, to be used with ``with``. Losing the lead sets ``lost`` and raises at exit."""
        return Election(self._twin.election(name, ttl=ttl, wait=wait, candidate=candidate, cancel=False), self._runner)

    def batch(self, *, request_id: str | None = None) -> Draft:
        """Guards and writes that happen together or not at all."""
        draft = Draft(self._twin._session, self.name, request_id)
        draft._store, draft._runner = self._twin, self._runner
        return draft

    def typed(self, model: type[T], prefix: str = "") -> Typed[T]:
        """The keys under a prefix as values of a model: a dataclass, a msgspec struct or a pydantic model."""
        return Typed(self._twin.typed(model, prefix), self._runner)

    def record(self, key: str) -> Record:
        """A key whose fields are written one by one."""
        return Record(self._twin.record(key), self._runner)

    def mapping(self, prefix: str = "") -> Mapping:
        """The keys under a prefix as a dict."""
        return Mapping(self, prefix)

    def close(self) -> None:
        """End watches and background work and close the engine."""
        session = self._twin._session
        # When several threads close at once, one does it; the others must not stop the loop meanwhile.
        with self._runner.closing:
            if not session.closed:
                try:
                    self._runner.wait(session.close())
                finally:
                    self._runner.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_async(function: object) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def require_plain(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap a function so that it raises when it returns an awaitable, as a lambda may do."""

    def call(value: Any) -> Any:
        result = change(value)
        if inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()
            raise TypeError("a blocking store updates by a plain function, and this one returned an awaitable")
        return result

    return call


class Edit(Proxy):
    """A copy of an object or a record, to be used with ``with``. It is written at the end of the body."""

    _twin: _edit.Edit

    @property
    def key(self) -> str:
        """The key that is edited."""
        return self._twin.key

    def __enter__(self) -> dict[str, Any]:
        return self._runner.run(self._twin._start())

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        decide = _edit.call_with_parts(self._twin._on_conflict)
        if kind is not None:
            return
        if decide is None:
            self._runner.run(self._twin._finish(None))
        else:
            self._runner.run_with(require_plain(decide), self._twin._finish)


class Draft(_Draft):
    """Guards and writes that will happen together or not at all; `commit` blocks."""

    __slots__ = ("_runner", "_store")
    _runner: Runner
    _store: _store.Store

    def commit(self) -> Commit:  # type: ignore[override]
        """Make it happen, all of it or nothing. Raises `Conflict` when a guard does not hold."""
        return self._runner.run(self._store._commit_batch(self))


class Record(Proxy):
    """A handle on a key that holds a record."""

    _twin: _record.Record

    entry = mirror(_record.Record.entry)
    fields = mirror(_record.Record.fields)
    get = mirror(_record.Record.get)
    put = mirror(_record.Record.put)
    set = mirror(_record.Record.set)
    swap = mirror(_record.Record.swap)
    touch = mirror(_record.Record.touch)
    delete = mirror(_record.Record.delete)

    @property
    def key(self) -> str:
        """The record's key."""
        return self._twin.key


class Typed(Proxy, Generic[T]):
    """A view of the keys under a prefix as values of one model."""

    _twin: _typed.Typed[T]

    get = mirror(_typed.Typed[T].get)
    entry = mirror(_typed.Typed[T].entry)
    put = mirror(_typed.Typed[T].put)
    create = mirror(_typed.Typed[T].create)
    delete = mirror(_typed.Typed[T].delete)

    @property
    def prefix(self) -> str:
        """What its keys begin with."""
        return self._twin.prefix

    def update(
        self,
        key: str,
        change: Callable[[T | None], _typed.Changed[T]],
        *,
        ttl: TTL | Literal[Sentinel.KEEP] = KEEP,
        fence: Fencing | Fence | None = None,
        meta: Meta | Literal[Sentinel.KEEP] = KEEP,
    ) -> _typed.TypedEntry[T] | None:
        """Change a value by a plain function of the value found; see `limpet.Store.update`."""
        if _is_async(change):
            raise TypeError("a blocking store updates by a plain function, and this one is async: use limpet.open()")
        return self._runner.run_with(
            require_plain(change), lambda changed: self._twin.update(key, changed, ttl=ttl, fence=fence, meta=meta)
        )

    def scan(
        self,
        prefix: str = "",
        *,
        where: Filter | None = None,
        limit: int | None = None,
        after: str | None = None,
        reverse: bool = False,
    ) -> Iterator[_typed.TypedEntry[T]]:
        """Entries in code-point order; with ``where``, those that match. See `limpet.Store.scan`."""
        twin = self._twin.scan(prefix, where=where, limit=limit, after=after, reverse=reverse)
        return _iterate(self._runner.run, twin)


class Watch(Proxy):
    """Changes as they happen: an iterator that blocks until the next one.

    Closing it, or the store, from another thread ends it.
    """

    _twin: _hub.Watch

    def __init__(self, twin: _hub.Watch, runner: Runner) -> None:
        super().__init__(twin, runner)
        runner.wait(twin.__aenter__())

    @property
    def dropped(self) -> int:
        """How many events were dropped, with ``overflow="drop"``."""
        return self._twin.dropped

    @property
    def position(self) -> str | None:
        """Where to resume without missing anything, also if no event has come yet."""
        return self._twin.position

    def poll(self, timeout: float) -> Event | None:
        """The next event, or None when none came in so many seconds."""
        return self._next(timeout)

    def _next(self, timeout: float | None = None) -> Event | None:
        async def next_event() -> Event | None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    return await anext(self._twin, None)
            return None

        try:
            return self._runner.wait(next_event())
        except Closed:
            return None

    def close(self) -> None:
        """End this watch, also for a thread that waits in it."""
        with contextlib.suppress(Closed):
            self._runner.wait(self._twin.aclose())

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        event = self._next()
        if event is None:
            raise StopIteration
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Lease(Proxy):
    """The common part of a lock and a lead."""

    _twin: _lock.Lock | _election.Election

    @property
    def name(self) -> str:
        """The name of the lock, or of the election."""
        return self._twin.name

    @property
    def token(self) -> int | None:
        """The last fencing token; None before the first. It stays readable after the release."""
        return self._twin.token

    @property
    def lost(self) -> bool:
        """Whether the lock was held and then lost."""
        return self._twin.lost

    @property
    def fence(self) -> Fence:
        """The lock's name and token, to fence writes with."""
        return self._twin.fence

    def check(self) -> None:
        """Raise `LockLost` when it is lost, or when its lease may be over by now."""
        self._twin.check()

    def __enter__(self) -> Self:
        self._runner.wait(self._twin.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # If the body closed the store, the lease ends by itself. `Closed` must not hide an error of the body.
        with contextlib.suppress(Closed):
            self._runner.wait(self._twin.__aexit__(kind, error, trace))


class Lock(_Lease):
    """A lease on a name. It renews itself on the store's own loop while a ``with`` body runs."""

    _twin: _lock.Lock

    def acquire(self) -> Self:
        """Take the lock, waiting for it as long as ``wait`` allows. Raises `LockHeld`."""
        self._runner.wait(self._twin.acquire())
        return self

    def refresh(self, ttl: float | timedelta | None = None) -> None:
        """Extend the lease from now on."""
        self._runner.wait(self._twin.refresh(ttl))

    def release(self) -> None:
        """Give the lock back."""
        self._runner.wait(self._twin.release())


class Election(_Lease):
    """A candidate in an election. Its lead is renewed on the store's own loop."""

    _twin: _election.Election

    def campaign(self) -> Self:
        """Wait until no one else leads, and lead: until `resign`, or until the lead is lost. Raises `LockHeld`."""
        self._runner.wait(self._twin.campaign())
        return self

    def resign(self) -> None:
        """Give up the lead."""
        self._runner.wait(self._twin.resign())

    def leader(self) -> LockInfo | None:
        """The current leader; None when no one leads."""
        return self._runner.wait(self._twin.leader())

    def observe(self) -> Iterator[LockInfo | None]:
        """The current leader, and again whenever it changes. Ends when the store is closed in another thread."""
        observed = _iterate(self._runner.wait, self._twin.observe())
        yield next(observed)
        with contextlib.suppress(Closed):
            yield from observed


class Mapping(MutableMapping[str, Any]):
    """The keys under a prefix as a dict. Length and iteration scan; `pop` and `setdefault` are atomic."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def __getitem__(self, key: str) -> Any:
        entry = self._store.entry(self._prefix + key)
        if entry is None:
            raise KeyError(key)
        return entry.value

    def __setitem__(self, key: str, value: Any) -> None:
        self._store.put(self._prefix + key, value)

    def __delitem__(self, key: str) -> None:
        if not self._store.delete(self._prefix + key):
            raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._store.entry(self._prefix + key) is not None

    def __iter__(self) -> Iterator[str]:
        after: str | None = None
        while True:
            page = self._store.keys(self._prefix, after=after)
            for key in page.keys:
                yield key.removeprefix(self._prefix)
            if not page.truncated:
                return
            after = page.cursor

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def pop(self, key: str, default: Any = _MISSING) -> Any:
        """Get and delete in one step."""
        value = self._store.take(self._prefix + key, _MISSING)
        if value is not _MISSING:
            return value
        if default is _MISSING:
            raise KeyError(key)
        return default

    def setdefault(self, key: str, default: Any = None) -> Any:
        """The value; when the key is absent, the default is put there first. Of several callers, one default wins."""
        try:
            entry = self._store.put(self._prefix + key, default, expect=ABSENT)
        except Conflict as conflict:
            if conflict.current is None:
                raise
            entry = conflict.current
        return entry.value

    def __repr__(self) -> str:
        return f"Mapping({self._prefix!r} in {self._store!r})"


def open(
    url: str | None = None,
    *,
    namespace: str = "default",
    clock: Clock | None = None,
    max_value_bytes: int = VALUE_BYTES_MAX,
    window: Window | None = None,
    sweep: bool = True,
    encryption: Keyring | None = None,
    observer: Observer | None = None,
    writer: str | None = None,
) -> Store:
    """Open a namespace of an engine; see `limpet.open`. Close the store, or use it with ``with``."""
    check_namespace(namespace)
    observing = None if observer is None else check_observer(observer)
    runner = Runner()
    try:
        session = runner.wait(
            _opening.open_session(
                url, clock=clock, max_value_bytes=max_value_bytes, window=window, encryption=encryption, writer=writer
            )
        )
    except BaseException:
        runner.stop()
        raise
    runner.inline = session.engine.traits.inline
    if sweep:
        runner.start_in_background(session.sweeper.start)
    _opened[session] = runner
    return Store(_store.make_store(session, namespace, observing), runner)


# The loop's thread does not exist in a forked child; the child starts its own with its first call.

_opened: weakref.WeakKeyDictionary[Session, Runner] = weakref.WeakKeyDictionary()


def _after_fork() -> None:
    for session, runner in list(_opened.items()):
        runner.forget_loop()
        session.forget_loop()


os.register_at_fork(after_in_child=_after_fork)
