"""Turns: callers of one process that want the same key are served one after the other, in the order they came.

A turn saves failed attempts and is fair. It decides nothing: whether a write happens is decided in its commit, so a
turn may be cut short, skipped, or forgotten after a fork, and nothing is lost. A waiter suspends on its event loop, or
blocks its thread where there is no loop; the callers of one queue may be on different loops and threads.

Code of the application (the function of an update) may run between joining and leaving, and it may wait for another
caller in the same queue, which would never be served. Two rules keep that from becoming a deadlock: code that runs
inside a turn does not wait for another turn at first (`is_inside`), and a turn lasts for a limited time while others
wait. Then the next caller is served, and the caller that had the turn goes on without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable, Iterable
from contextvars import ContextVar
from typing import Literal

from limpet.clock import call_on, has_loop, wake

__all__ = ["Turn", "Turns", "is_inside"]

_entered: ContextVar[tuple[Turn, ...]] = ContextVar("limpet_turns", default=())


def is_inside(key: Hashable | None = None) -> bool:
    """Whether this code runs inside a turn, of this key or of any: in the task that has it, or in one started there."""
    entered = _entered.get()
    return bool(entered) and any(turn.is_up and (key is None or turn.key == key) for turn in entered)


class Turns:
    """Queues of callers, one for each key that is wanted now."""

    def __init__(self) -> None:
        self.forget()
        _all.add(self)

    def forget(self) -> None:
        """Drop all queues, as in a child after a fork, where the other callers do not exist."""
        # Reentrant, because the garbage collector may end a coroutine, which then leaves its queue, while this thread
        # holds the lock.
        self._lock = threading.RLock()
        self._queues: dict[Hashable, OrderedDict[Turn, None]] = {}

    def turn(self, key: Hashable) -> Turn:
        """Make a turn for a key, not in its queue yet."""
        return Turn(self, key)

    @contextlib.asynccontextmanager
    async def hold(self, keys: Iterable[Hashable]) -> AsyncIterator[None]:
        """Hold the turns of several keys at once. All callers must give the keys in the same order."""
        turns = [self.turn(key) for key in keys]
        try:
            for turn in turns:
                if not turn.join():
                    await turn.wait()
            yield
        finally:
            for turn in turns:
                turn.leave()

    def __len__(self) -> int:
        """How many keys are wanted now."""
        return len(self._queues)

    def waiting(self, key: Hashable) -> int:
        """How many callers are in the queue of a key, the one that is served included."""
        return len(self._queues.get(key, ()))

    def _join(self, turn: Turn) -> None:
        with self._lock:
            queue = self._queues.setdefault(turn.key, OrderedDict())
            queue[turn] = None
            if len(queue) == 1:
                turn._begin()
            else:
                turn._state = "waiting"

    def _leave(self, turn: Turn) -> None:
        with self._lock:
            turn._state = "out"
            queue = self._queues.get(turn.key)
            if queue is None or turn not in queue:
                return
            was_first = next(iter(queue)) is turn
            del queue[turn]
            while was_first and queue and not next(iter(queue))._begin():
                # Its loop is closed, so that it will never leave by itself.
                queue.popitem(last=False)
            if not queue:
                del self._queues[turn.key]

    def _end_overdue(self, turn: Turn) -> float:
        """End overdue turns ahead of one that waits. Returns for how many seconds the first may still go on."""
        with self._lock:
            # After a fork the queue is gone, and there is nothing to wait for.
            while turn._state == "waiting" and (queue := self._queues.get(turn.key)):
                first = next(iter(queue))
                left_s = first._ends - time.monotonic()
                if left_s > 0:
                    return left_s
                self._leave(first)
            return 0.0


class Turn:
    """A caller's place in the queue of a key. A caller that joins must leave, whatever happens in between."""

    __slots__ = ("__weakref__", "_ends", "_lasts_s", "_outer", "_state", "_turns", "_wake", "key")

    def __init__(self, turns: Turns, key: Hashable) -> None:
        self.key = key
        self._turns = turns
        self._state: Literal["out", "waiting", "up"] = "out"
        self._lasts_s = self._ends = math.inf
        self._wake: Callable[[], object] | None = None
        # The turns inside which this one was joined, while it is in the queue.
        self._outer: tuple[Turn, ...] | None = None

    @property
    def is_up(self) -> bool:
        """Whether this is the caller that is served now."""
        return self._state == "up"

    def join(self, *, lasts_s: float = math.inf) -> bool:
        """Join the queue at its end. True when no caller is ahead; otherwise `wait`.

        Args:
            lasts_s: How long this turn may last while others wait. It is measured in real time, also under a manual
                clock, because it keeps this process from a deadlock.
        """
        self._lasts_s, self._wake = lasts_s, None
        outer = _entered.get()
        if outer:
            # A task that was started inside a turn may outlive it.
            outer = tuple(turn for turn in outer if turn.is_up)
        _entered.set((*outer, self))
        self._outer = outer
        self._turns._join(self)
        return self._state == "up"

    async def wait(self) -> None:
        """Wait until all callers ahead have left, or have had the turn for too long."""
        loop = asyncio.get_running_loop() if has_loop() else None
        while (left_s := self._turns._end_overdue(self)) > 0:
            if loop is None:
                self._block(left_s)
            else:
                await self._suspend(loop, left_s)

    def leave(self) -> None:
        """Leave the queue, from any place in it, and let the next caller be served."""
        self._turns._leave(self)
        if self._outer is not None:
            _entered.set(self._outer)
            self._outer = None

    def _begin(self) -> bool:
        """Start this turn. False when its waiter cannot be woken any more. The caller holds the lock."""
        self._state = "up"
        self._ends = math.inf if self._lasts_s == math.inf else time.monotonic() + self._lasts_s
        return self._wake is None or self._wake() is not False

    def _block(self, left_s: float) -> None:
        woken = threading.Event()
        if self._set_wake(woken.set):
            woken.wait(min(left_s, threading.TIMEOUT_MAX))

    async def _suspend(self, loop: asyncio.AbstractEventLoop, left_s: float) -> None:
        waiter: asyncio.Future[None] = loop.create_future()
        if not self._set_wake(functools.partial(_wake_on, loop, waiter)):
            return
        timer = None if left_s == math.inf else loop.call_later(left_s, wake, waiter)
        try:
            await waiter
        finally:
            if timer is not None:
                timer.cancel()

    def _set_wake(self, wake: Callable[[], object]) -> bool:
        """Set how to wake this waiter. False when there is nothing to wait for any more."""
        with self._turns._lock:
            self._wake = wake
            return self._state == "waiting"


def _wake_on(loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[None]) -> bool:
    """End a wait on a loop of any thread. False when the loop is closed."""
    if has_loop() and asyncio.get_running_loop() is loop:
        wake(waiter)
        return True
    call_on(loop, wake, waiter)
    return not loop.is_closed()


_all: weakref.WeakSet[Turns] = weakref.WeakSet()


def _after_fork() -> None:
    for turns in list(_all):
        turns.forget()


os.register_at_fork(after_in_child=_after_fork)
