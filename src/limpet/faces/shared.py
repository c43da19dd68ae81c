"""State that agents share: bytes under dotted keys, with expiry, watching and locks.

All agents that open the same URL and namespace see the same state. A key has no spaces and no dot at either end; a
pattern is ``*``, ``prefix.*`` or one exact key; a time to live of 0 means never.

This interface promises less than the store below it: it writes single keys, and a watcher that is too slow misses
changes. Where an agent needs more, ``fence=lock`` ties a write to a lock, and `StateStore.store` is the store itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import importlib
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from limpet import lock as _lock
from limpet.clock import Clock, SystemClock
from limpet.draft import TTL, Fence, Fencing
from limpet.election import Election
from limpet.errors import Ambiguous, InvalidValue, TransientError, TypeMismatch
from limpet.errors import Closed as ErrClosed
from limpet.errors import InvalidKey as ErrInvalidKey
from limpet.errors import InvalidTTL as ErrInvalidTTL
from limpet.errors import LockExpired as ErrLockExpired
from limpet.errors import LockHeld as ErrLockHeld
from limpet.errors import LockNotHeld as ErrLockNotHeld
from limpet.errors import NotFound as ErrNotFound
from limpet.hub import Watch as _Watch
from limpet.keys import PAGE_MAX, VALUE_BYTES_MAX, check_key
from limpet.model import Entry, Event, Synced
from limpet.session import Session
from limpet.store import Opening, Store
from limpet.store import open as open_store

__all__ = [
    "ErrClosed",
    "ErrInvalidKey",
    "ErrInvalidTTL",
    "ErrLockExpired",
    "ErrLockHeld",
    "ErrLockNotHeld",
    "ErrNotFound",
    "KeyValue",
    "Lock",
    "MemoryStore",
    "NATSStore",
    "Operation",
    "StateStore",
    "Watch",
    "cached",
    "configuration",
    "work_off",
]

BUCKET: Final = "agent-state"
HISTORY_MAX: Final = 64
"""The same bound as that of NATS's own buckets."""


class Operation(enum.IntEnum):
    """What happened to a key."""

    PUT = 0
    DELETE = 1


class KeyValue(msgspec.Struct, frozen=True):
    """A key with its value, or a change of it.

    Attributes:
        key: The key.
        value: Its bytes; empty for a key that ended.
        revision: The number of the change. Each change of the store has a greater one than all before it.
        operation: ``PUT``, or ``DELETE`` when the key ended, by hand or by its time.
        created: When the key began, UTC.
        modified: When it was written last, or when it ended, UTC.
    """

    key: str
    value: bytes
    revision: int
    operation: Operation
    created: datetime
    modified: datetime


class StateStore:
    """A store that agents share. `open` one, and await it or use it with ``async with``."""

    def __init__(self, opening: Awaitable[Store], *, ttl: TTL = None) -> None:
        self._opening = opening
        self._opened: Store | None = None
        self._ttl = ttl
        # Watches that were requested and have not begun yet.
        self._beginning: set[asyncio.Task[Any]] = set()

    @staticmethod
    def open(
        url: str | None = None,
        *,
        namespace: str = "default",
        ttl: TTL = None,
        max_value_size: int = VALUE_BYTES_MAX,
        clock: Clock | None = None,
    ) -> StateStore:
        """Open the store of a URL.

        Args:
            url: The URL of an engine; as in `limpet.open`.
            namespace: Agents that use the same one share their state.
            ttl: How long an entry lasts that is put without a time to live; None for ever.
            max_value_size: The largest value that is accepted, in bytes.
            clock: The clock for engines that use that of the host; a `ManualClock` in tests.
        """
        return StateStore(open_store(url, namespace=namespace, max_value_bytes=max_value_size, clock=clock), ttl=ttl)

    @property
    def store(self) -> Store:
        """The store below, which can do more."""
        if self._opened is None:
            raise ErrClosed("the store is not open yet: await it, or use it with 'async with'")
        return self._opened

    def __await__(self) -> Generator[Any, None, Self]:
        return self._open().__await__()

    async def _open(self) -> Self:
        if self._opened is None:
            self._opened = await self._opening
        return self

    async def close(self) -> None:
        """End the watches and close the store. Safe to call twice."""
        for task in self._beginning:
            task.cancel()
        if self._opened is not None:
            await self._opened.close()

    async def __aenter__(self) -> Self:
        return await self._open()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # Keys and values ----------------------------------------------------------

    async def _store_after_watches(self) -> Store:
        """The store below, once every requested watch has begun, so that the next change is delivered to them."""
        store = self.store
        if self._beginning:
            await asyncio.wait(self._beginning)
        return store

    async def get(self, key: str) -> bytes:
        """The value under a key. Raises `ErrNotFound` when it is absent or expired."""
        return (await self.get_key_value(key)).value

    async def get_key_value(self, key: str) -> KeyValue:
        """The value with its revision and times. Raises `ErrNotFound`."""
        entry = await (await self._store_after_watches()).entry(_check_key(key))
        if entry is None:
            raise ErrNotFound(key)
        return _key_value(entry)

    async def put(self, key: str, value: bytes, ttl: TTL = 0, *, fence: Fencing | Fence | None = None) -> None:
        """Put a value under a key, whether or not it exists.

        Args:
            key: The key.
            value: The bytes.
            ttl: Seconds until it expires; 0 for the default of the store, which is never unless it was opened with one.
            fence: A lock that must still be held.

        Raises:
            ErrInvalidKey: The key is empty or malformed.
            ErrInvalidTTL: The time to live is negative.
            LockLost: The fence no longer holds.
        """
        # False equals 0 in Python, and is a mistake here.
        store_ttl = self._ttl if ttl in (0, timedelta(0)) and ttl is not False else ttl
        store = await self._store_after_watches()
        await store.put(_check_key(key), _check_bytes(value), ttl=store_ttl, fence=fence)

    async def delete(self, key: str, *, fence: Fencing | Fence | None = None) -> bool:
        """End a key. False when there was none."""
        store = await self._store_after_watches()
        return await store.delete(_check_key(key), fence=fence)

    async def keys(self, pattern: str = "*") -> list[str]:
        """The keys that match a pattern, in order: ``*`` all, ``prefix.*`` those that start so, or one exact key."""
        store = await self._store_after_watches()
        if not _check_key(pattern).endswith("*"):
            return [pattern] if await store.entry(pattern) is not None else []
        prefix = pattern[:-1]
        page = await store.keys(prefix, limit=PAGE_MAX)
        keys = page.keys
        while page.truncated:
            page = await store.keys(prefix, limit=PAGE_MAX, after=page.cursor)
            keys += page.keys
        return keys

    def watch(self, pattern: str = "*") -> Watch:
        """The changes of the keys that match a pattern, as they happen: an async iterator of `KeyValue`.

        It begins now: the next changes of this agent are delivered. Changes of others are delivered from the moment
        that the next call of this agent returns, or that the watch is entered with ``async with``. It ends when the
        store closes.
        """
        events = self.store.watch(_check_key(pattern), overflow="drop")
        beginning = asyncio.get_running_loop().create_task(events.__aenter__(), name="limpet-watch")
        self._beginning.add(beginning)
        beginning.add_done_callback(self._beginning.discard)
        return Watch(events, beginning)

    # Locks --------------------------------------------------------------------

    async def lock(self, key: str, ttl: float | timedelta) -> Lock:
        """Take a lock for some seconds. Raises `ErrLockHeld` when another holder has it.

        A lock and a value may have the same key: they do not affect each other.
        """
        return Lock(await self.store.lock(_check_key(key), ttl=ttl).acquire())

    def election(self, key: str, ttl: float | timedelta, *, candidate: str | None = None) -> Election:
        """A candidate to lead, to be used with ``async with``; see `limpet.Store.election`."""
        return self.store.election(_check_key(key), ttl=ttl, candidate=candidate)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'not open' if self._opened is None else self._opened!r})"


class MemoryStore(StateStore):
    """A store in memory, for tests and for agents in one process. Nothing outlives it."""

    def __init__(self, *, ttl: TTL = None, max_value_size: int = VALUE_BYTES_MAX, clock: Clock | None = None) -> None:
        super().__init__(open_store("memory:", max_value_bytes=max_value_size, clock=clock), ttl=ttl)


class NATSStore(StateStore):
    """A store in NATS JetStream, on the server of an existing connection. It opens its own connection there."""

    def __init__(
        self,
        conn: Any,
        bucket: str = BUCKET,
        ttl: TTL = None,
        history: int = 1,
        max_value_size: int = VALUE_BYTES_MAX,
    ) -> None:
        """Prepare to open it.

        Args:
            conn: A client of nats-py that is connected.
            bucket: The bucket that it is kept in, named as a namespace is.
            ttl: How long an entry lasts that is put without a time to live; None for ever.
            history: How many changes of a key are kept at least, 1 to 64, while they are in the log: that keeps every
                change of the last 24 hours, up to 100,000 changes or 256 MB of all keys together.
            max_value_size: The largest value that is accepted, in bytes.

        Raises:
            InvalidValue: The history is not 1 to 64.
        """
        if type(history) is not int or not 1 <= history <= HISTORY_MAX:
            raise InvalidValue(
                f"history must be 1 to {HISTORY_MAX} on NATS, not {history!r}: for more, watch changes as they happen"
            )
        super().__init__(Opening(lambda: _open_over(conn, bucket, max_value_size)), ttl=ttl)


async def _open_over(conn: Any, bucket: str, max_value_size: int) -> Store:
    """A store on the server of a connection of nats-py."""
    engine = await importlib.import_module("limpet.engines.nats.engine").adopt(conn, bucket_prefix="")
    session = Session(engine, SystemClock(), value_bytes_max=max_value_size)
    session.sweeper.start()
    return Store(session, bucket)


class Watch:
    """Changes as they happen. A slow reader gets the last 64, and `dropped` counts those that it missed."""

    def __init__(self, events: _Watch, beginning: asyncio.Task[_Watch]) -> None:
        self._events = events
        self._beginning = beginning
        self._loop = beginning.get_loop()
        # Iteration raises why the watch could not begin. Without an iteration, asyncio would log the error: read it
        # here.
        beginning.add_done_callback(lambda done: done.cancelled() or done.exception())

    @property
    def dropped(self) -> int:
        """How many changes were dropped."""
        return self._events.dropped

    async def aclose(self) -> None:
        """End this watch, also for a task that waits for its next change."""
        self._beginning.cancel()
        await asyncio.wait([self._beginning])
        await self._events.aclose()

    def __del__(self) -> None:
        # End a watch that was dropped without being closed.
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            self._loop.call_soon_threadsafe(_abandon, self._events, self._beginning)

    async def __aenter__(self) -> Self:
        await self._begin()
        return self

    async def _begin(self) -> None:
        """Wait until it has begun. Raises why it could not."""
        if not self._beginning.done():
            await asyncio.wait([self._beginning])
        if not self._beginning.cancelled():
            self._beginning.result()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> KeyValue:
        await self._begin()
        if self._beginning.cancelled():
            # The store was closed, or this watch.
            raise StopAsyncIteration
        async for event in self._events:
            # A change of the time to live alone is neither a put nor a delete.
            if event.op != "touch":
                return _change(event)
        raise StopAsyncIteration


def _abandon(events: _Watch, beginning: asyncio.Task[_Watch]) -> None:
    """End a watch without its owner."""
    beginning.cancel()
    events._finish()


class Lock:
    """A lock that was taken. It does not renew itself: `refresh` it while the work goes on.

    ``async with`` releases it on all paths.
    """

    def __init__(self, lock: _lock.Lock) -> None:
        self._lock = lock

    @property
    def key(self) -> str:
        """The key that is locked."""
        return self._lock.name

    @property
    def token(self) -> int | None:
        """The fencing token, greater than every earlier one of this key. It stays readable after `unlock`."""
        return self._lock.token

    @property
    def fence(self) -> Fence:
        """The key and the token, to fence writes with."""
        return self._lock.fence

    async def refresh(self) -> None:
        """Extend it to its whole time to live, from now on. Raises `ErrLockExpired` or `ErrLockNotHeld`."""
        await self._lock.refresh()

    async def unlock(self) -> None:
        """Release it. Raises `ErrLockExpired` when its time was over, `ErrLockNotHeld` when it was released before."""
        await self._lock.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._lock._is_held:
            return
        try:
            await self.unlock()
        except (TransientError, Ambiguous) as failure:
            # The lease ends by itself, and the result of the body matters more.
            self._lock._warn("could not be released, and ends when its time is over", failure)
        except Exception as failure:
            # The error of the body matters more.
            if kind is None:
                raise
            if not isinstance(failure, ErrLockExpired):
                self._lock._warn("could not be released, and ends when its time is over", failure)

    def __repr__(self) -> str:
        return repr(self._lock)


def _check_key(key: str) -> str:
    """Return the key or the pattern, or raise: no spaces, and no dot at either end."""
    key = check_key(key)
    if any(map(str.isspace, key)):
        raise ErrInvalidKey(key, "it contains a space")
    if key.startswith(".") or key.endswith("."):
        raise ErrInvalidKey(key, "it starts or ends with a dot")
    return key


def _check_bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise InvalidValue(f"a shared value must be bytes, not of type {type(value).__name__}: encode it first")
    return value


def _key_value(entry: Entry) -> KeyValue:
    if not isinstance(entry.stored, bytes):
        raise TypeMismatch(entry.key, expected="bytes", found="a record")
    # JSON that others wrote there is returned as its text.
    value = entry.stored.removeprefix(b"\0")
    return KeyValue(entry.key, value, entry.revision, Operation.PUT, entry.created_at, entry.updated_at)


def _change(event: Event) -> KeyValue:
    entry, at = event.entry, event.at
    assert entry is not None
    assert at is not None
    if event.op in ("delete", "expire"):
        return KeyValue(event.key, b"", event.revision, Operation.DELETE, entry.created_at, at)
    return _key_value(entry)


# Recipes ----------------------------------------------------------------------


async def configuration(store: StateStore, pattern: str) -> AsyncIterator[dict[str, bytes]]:
    """All keys that match with their values, now and again after each change. Ends when the store closes."""
    known: dict[str, bytes] = {}
    is_complete = False
    async for event in store.store.watch(_check_key(pattern), initial=True):
        if isinstance(event, Synced):
            is_complete = True
        elif event.op in ("delete", "expire"):
            known.pop(event.key, None)
        elif event.op != "touch":
            known[event.key] = _change(event).value
        if is_complete:
            yield dict(known)


async def work_off(
    store: StateStore,
    task: str,
    work: Callable[[bytes], Awaitable[bytes]],
    *,
    ttl: float | timedelta = 60,
    keep: TTL = 86_400,
) -> bytes:
    """Do a task that no other worker is doing: ``tasks.<task>`` ends, and ``results.<task>`` gets the result.

    The lock ``task.<task>`` renews itself while the work goes on. Both keys change in one step, and only while it is
    held: however often a task is tried, one result counts.

    Args:
        store: The store.
        task: The name of the task.
        work: Makes the result from the value of the task.
        ttl: After how many seconds another worker may try when this one has crashed.
        keep: How many seconds the result is kept.

    Raises:
        ErrLockHeld: Another worker is doing it.
        ErrNotFound: The task does not exist, or has been done.
        LockLost: This worker was too slow, and another may be doing the task.
    """
    key = f"tasks.{task}"
    async with store.store.lock(_check_key(f"task.{task}"), ttl=ttl) as lock:
        result = _check_bytes(await work(await store.get(key)))
        done = (await store._store_after_watches()).batch().fence(lock).put(f"results.{task}", result, ttl=keep)
        await done.delete(key).commit()
    return result


async def cached(store: StateStore, key: str, compute: Callable[[], Awaitable[bytes]], ttl: float | timedelta) -> bytes:
    """The value under a key; when it is absent, it is computed and kept for some seconds."""
    with contextlib.suppress(ErrNotFound):
        return await store.get(key)
    value = await compute()
    await store.put(key, value, ttl)
    return value
