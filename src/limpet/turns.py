"""Turns: callers of one process that want the same thing are served one after the other, in the order they came.

A turn saves work and is fair. It decides nothing: whether a write happens is decided in its commit, so a turn may be
cut short, skipped, or forgotten after a fork, and nothing is lost by it. A waiter suspends on its event loop, or blocks
its thread where there is no loop; the callers of one line may be on different loops and threads.

What runs between joining and leaving may be code of the application (the function of an update), and that code may
wait for another caller in the same line, which would never be served. Two rules keep that from becoming a deadlock:
code that runs inside a turn does not wait for another turn at first (`is_inside`), and a turn lasts for a limited time
while others wait. Then the line moves on, and the caller that held the turn goes on without it.
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
    """Whether this code runs inside a turn, at this key or at any: in the task that has it, or in one started there."""
    entered = _entered.get()
    return bool(entered) and any(turn.is_up and (key is None or turn.key == key) for turn in entered)


class Turns:
    """Lines of callers, one line for each key that is wanted now."""

    def __init__(self) -> None:
        self.forget()
        _all.add(self)

    def forget(self) -> None:
        """Start anew, as in a child after a fork: the other callers stayed behind."""
        # Reentrant, because a coroutine that is collected by the garbage collector leaves its line wherever this
        # thread happens to be.
        self._lock = threading.RLock()
        self._lines: dict[Hashable, OrderedDict[Turn, None]] = {}

    def turn(self, key: Hashable) -> Turn:
        """A turn at a key, not in line yet."""
        return Turn(self, key)

    @contextlib.asynccontextmanager
    async def hold(self, keys: Iterable[Hashable]) -> AsyncIterator[None]:
        """Have the turn at several keys at once. Whoever wants several names them in the same order."""
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
        return len(self._lines)

    def waiting(self, key: Hashable) -> int:
        """How many callers are in line for a key, the one that is served included."""
        return len(self._lines.get(key, ()))

    def _join(self, turn: Turn) -> None:
        with self._lock:
            line = self._lines.setdefault(turn.key, OrderedDict())
            line[turn] = None
            if len(line) == 1:
                turn._begin()
            else:
                turn._state = "waiting"

    def _leave(self, turn: Turn) -> None:
        with self._lock:
            turn._state = "out"
            line = self._lines.get(turn.key)
            if line is None or turn not in line:
                return
            was_first = next(iter(line)) is turn
            del line[turn]
            while was_first and line and not next(iter(line))._begin():
                # Its loop is closed, so that it will never leave by itself.
                line.popitem(last=False)
            if not line:
                del self._lines[turn.key]

    def _move_on(self, turn: Turn) -> float:
        """End what is overdue ahead of a turn that waits. Returns for how many seconds the first may go on."""
        with self._lock:
            # A line that is not there any more stayed behind in a fork.
            while turn._state == "waiting" and (line := self._lines.get(turn.key)):
                first = next(iter(line))
                left_s = first._ends - time.monotonic()
                if left_s > 0:
                    return left_s
                self._leave(first)
            return 0.0


class Turn:
    """A caller's place in the line of a key. Whoever joins leaves in the end, whatever happened in between."""

    __slots__ = ("__weakref__", "_ends", "_lasts_s", "_outer", "_state", "_turns", "_wake", "key")

    def __init__(self, turns: Turns, key: Hashable) -> None:
        self.key = key
        self._turns = turns
        self._state: Literal["out", "waiting", "up"] = "out"
        self._lasts_s = self._ends = math.inf
        self._wake: Callable[[], object] | None = None
        # The turns that this one was joined inside of, while it is in line.
        self._outer: tuple[Turn, ...] | None = None

    @property
    def is_up(self) -> bool:
        """Whether this is the caller that is served now."""
        return self._state == "up"

    def join(self, *, lasts_s: float = math.inf) -> bool:
        """Join the line at its end. True when nobody is ahead; otherwise `wait`.

        Args:
            lasts_s: How long this turn may last while others wait. It is measured in real time, also under a manual
                clock: what must not happen is that this process stands still.
        """
        self._lasts_s, self._wake = lasts_s, None
        outer = _entered.get()
        if outer:
            # A task that was started inside a turn may live on when that is over.
            outer = tuple(turn for turn in outer if turn.is_up)
        _entered.set((*outer, self))
        self._outer = outer
        self._turns._join(self)
        return self._state == "up"

    async def wait(self) -> None:
        """Wait until everyone ahead has left, or held the turn for too long."""
        loop = asyncio.get_running_loop() if has_loop() else None
        while (left_s := self._turns._move_on(self)) > 0:
            if loop is None:
                self._block(left_s)
            else:
                await self._suspend(loop, left_s)

    def leave(self) -> None:
        """Leave the line, from any place in it, and let the next caller be served."""
        self._turns._leave(self)
        if self._outer is not None:
            _entered.set(self._outer)
            self._outer = None

    def _begin(self) -> bool:
        """Be served from now on. False when nobody can be woken any more. The caller holds the lock."""
        self._state = "up"
        self._ends = math.inf if self._lasts_s == math.inf else time.monotonic() + self._lasts_s
        return self._wake is None or self._wake() is not False

    def _block(self, left_s: float) -> None:
        came = threading.Event()
        if self._set_wake(came.set):
            came.wait(min(left_s, threading.TIMEOUT_MAX))

    async def _suspend(self, loop: asyncio.AbstractEventLoop, left_s: float) -> None:
        came: asyncio.Future[None] = loop.create_future()
        if not self._set_wake(functools.partial(_wake_on, loop, came)):
            return
        timer = None if left_s == math.inf else loop.call_later(left_s, wake, came)
        try:
            await came
        finally:
            if timer is not None:
                timer.cancel()

    def _set_wake(self, wake: Callable[[], object]) -> bool:
        """Say how to be woken. False when there is nothing to wait for any more."""
        with self._turns._lock:
            self._wake = wake
            return self._state == "waiting"


def _wake_on(loop: asyncio.AbstractEventLoop, sleeper: asyncio.Future[None]) -> bool:
    """End a wait on a loop of any thread. False when the loop is closed."""
    if has_loop() and asyncio.get_running_loop() is loop:
        wake(sleeper)
        return True
    call_on(loop, wake, sleeper)
    return not loop.is_closed()


_all: weakref.WeakSet[Turns] = weakref.WeakSet()


def _after_fork() -> None:
    for turns in list(_all):
        turns.forget()


os.register_at_fork(after_in_child=_after_fork)
