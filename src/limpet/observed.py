"""Observing a store: which operations it ran, how long each took, and how it ended.

`limpet.store.ObservedStore` runs each verb of a plain store and reports it when it has ended, so a verb that is made
of others is one operation. What a verb returns to work with, such as a lock, reports its own verbs. A store that was
opened without an observer has nothing of this in its way.
"""

from __future__ import annotations

import functools
import inspect
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import msgspec

from limpet.draft import Draft
from limpet.edit import Edit
from limpet.election import Election
from limpet.errors import InvalidValue, LimpetError
from limpet.lock import Lock
from limpet.merge import Clash
from limpet.model import Commit
from limpet.record import Record

__all__ = [
    "ObservedDraft",
    "ObservedEdit",
    "ObservedElection",
    "ObservedLock",
    "ObservedRecord",
    "Observer",
    "Operation",
    "Reporter",
    "check_observer",
    "observe_verbs",
]

log = logging.getLogger(__name__)

T = TypeVar("T")


class Operation(msgspec.Struct, frozen=True, gc=False):
    """An operation of a store that has ended, as an observer gets it. It has neither keys nor values.

    Attributes:
        name: The verb: ``put``, ``get``; of what a verb returns ``batch.commit``, ``record.set``, ``lock.acquire``.
        namespace: The namespace of the store.
        seconds: How long it took, retries and waiting included; of ``scan`` and ``history`` without the caller's part.
        outcome: ``ok``, or the code of the error that the caller got: ``conflict``; ``cancelled`` when it was
            cancelled, ``error`` for an error that is not of Limpet, such as one of the caller's own function.
    """

    name: str
    namespace: str
    seconds: float
    outcome: str


class Observer(Protocol):
    """A function that gets each operation when it has ended, before the caller goes on. It must not block."""

    def __call__(self, operation: Operation, /) -> object:
        """Take an operation."""
        ...


def check_observer(observer: Observer) -> Observer:
    """Return an observer that never fails: an error of the given one is logged, the first time."""
    problem = _find_problem(observer)
    if problem:
        raise InvalidValue(f"an observer is a plain function of an Operation, not {problem}")
    failures: list[Exception] = []

    def call(operation: Operation) -> None:
        try:
            observer(operation)
        except Exception as error:
            if not failures:
                failures.append(error)
                log.warning("an observer failed; the store goes on, and logs no more of its failures", exc_info=True)

    return call


def _find_problem(observer: object) -> str | None:
    """What is given instead of an observer; None for an observer."""
    if isinstance(observer, type):
        return f"the class {observer.__name__}: give an object of it"
    if not callable(observer):
        return f"something of type {type(observer).__name__}"
    is_async = inspect.iscoroutinefunction(observer) or inspect.iscoroutinefunction(getattr(observer, "__call__", None))  # noqa: B004
    return "an async function" if is_async else None


class Reporter:
    """Reports the operations of one namespace."""

    def __init__(self, observer: Observer, namespace: str) -> None:
        self.observer = observer
        self._namespace = namespace

    async def run(self, name: str, work: Awaitable[T]) -> T:
        """Wait for an operation, and report it."""
        began = time.perf_counter()
        outcome = "ok"
        try:
            return await work
        except BaseException as error:
            outcome = _outcome_of(error)
            raise
        finally:
            self._report(name, time.perf_counter() - began, outcome)

    async def iterate(self, name: str, items: AsyncIterator[T]) -> AsyncIterator[T]:
        """Pass items on, and report the operation at their end, or when the caller wants no more of them."""
        seconds, outcome = 0.0, "ok"
        try:
            while True:
                began = time.perf_counter()
                try:
                    item = await anext(items)
                except StopAsyncIteration:
                    return
                except BaseException as error:
                    outcome = _outcome_of(error)
                    raise
                finally:
                    seconds += time.perf_counter() - began
                yield item
        finally:
            self._report(name, seconds, outcome)

    def _report(self, name: str, seconds: float, outcome: str) -> None:
        self.observer(Operation(name, self._namespace, seconds, outcome))


def _outcome_of(error: BaseException) -> str:
    if isinstance(error, LimpetError):
        return error.code
    return "error" if isinstance(error, Exception) else "cancelled"


def observe_verbs(kind: type, verbs: Iterable[str], prefix: str = "") -> None:
    """Let a class report verbs of its base, and run them on its ``_plain`` object, which reports nothing."""
    for name in verbs:
        setattr(kind, name, _observe_verb(getattr(kind, name), f"{prefix}{name}"))


def _observe_verb(verb: Callable[..., Any], name: str) -> Callable[..., Any]:
    is_iterated = inspect.isasyncgenfunction(verb)

    @functools.wraps(verb)
    def call(self: Any, /, *args: Any, **options: Any) -> Any:
        reporter: Reporter = self._reporter
        return (reporter.iterate if is_iterated else reporter.run)(name, verb(self._plain, *args, **options))

    return call


# What verbs of a store return to work with ------------------------------------


class ObservedDraft(Draft):
    """A batch that reports its commit."""

    __slots__ = ("_reporter",)

    def __init__(self, reporter: Reporter, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._reporter = reporter

    async def commit(self) -> Commit:
        """Make it happen, all of it or nothing."""
        return await observe_commit(self._reporter, self)


def observe_commit(reporter: Reporter, draft: Draft) -> Coroutine[Any, Any, Commit]:
    """Commit a batch, and report it."""
    return reporter.run("batch.commit", Draft.commit(draft))


class ObservedRecord(Record):
    """A record that reports its verbs."""

    def __init__(self, reporter: Reporter, plain: Record) -> None:
        super().__init__(plain._store, plain.key)
        self._plain = plain
        self._reporter = reporter


observe_verbs(ObservedRecord, ("entry", "fields", "get", "put", "set", "swap", "touch", "delete"), "record.")


class ObservedEdit(Edit):
    """An edit that reports its two parts: reading the copy, and writing it."""

    def __init__(self, reporter: Reporter, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._reporter = reporter

    async def _start(self) -> dict[str, Any]:
        return await self._reporter.run("edit.start", super()._start())

    async def _finish(self, decide: Callable[[Clash], Any] | None) -> None:
        await self._reporter.run("edit.finish", super()._finish(decide))


class ObservedLock(Lock):
    """A lock that reports its verbs, also those of its own renewal."""

    def __init__(self, reporter: Reporter, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._reporter = reporter

    async def acquire(self) -> Lock:
        """Take the lock."""
        return await self._reporter.run("lock.acquire", super().acquire())

    async def refresh(self, ttl: float | timedelta | None = None) -> None:
        """Extend the lease from now on."""
        await self._reporter.run("lock.refresh", super().refresh(ttl))

    async def release(self) -> None:
        """Give the lock back."""
        await self._reporter.run("lock.release", super().release())


class ObservedElection(Election):
    """An election whose lock reports its verbs."""

    def __init__(self, reporter: Reporter, *args: Any, **options: Any) -> None:
        self._make_lock = functools.partial(ObservedLock, reporter)
        super().__init__(*args, **options)
