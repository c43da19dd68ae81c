"""Time, injected.

A store reads its clock and never the operating system's, so a test can set time by hand.
`sleep` waits on the event loop when one is running in this thread and blocks the thread
when none is; that is what lets the sync API run the same coroutines.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final, Protocol

from limpet.errors import InvalidTTL, InvalidValue

__all__ = [
    "Clock",
    "ManualClock",
    "SystemClock",
    "call_on",
    "check_wait",
    "format_duration",
    "has_loop",
    "ttl_to_ms",
    "wake",
]

TTL_S_MAX: Final = 100 * 366 * 86_400


class Clock(Protocol):
    """The time as the store needs it."""

    def now_ms(self) -> int:
        """Milliseconds since 1970. It may be set back; an engine still keeps its own time from going back."""
        ...

    def monotonic(self) -> float:
        """Seconds from some fixed moment, for measuring durations. Never goes back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait that long, on the running loop or in this thread."""
        ...


def has_loop() -> bool:
    """Whether an event loop runs in this thread, so that waiting means suspending."""
    return asyncio._get_running_loop() is not None


class SystemClock:
    """The host's clock, guarded against going back."""

    def __init__(self) -> None:
        self._latest_ms = 0

    def now_ms(self) -> int:
        """The host's time, or the latest seen when the host's clock was set back."""
        now_ms = time.time_ns() // 1_000_000
        if now_ms > self._latest_ms:  # noqa: PLR1730 - max() takes longer than reading the time
            self._latest_ms = now_ms
        return self._latest_ms

    def monotonic(self) -> float:
        """The host's monotonic clock."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Suspend on the running loop; block the thread when there is none."""
        if has_loop():
            await asyncio.sleep(seconds)
        else:
            time.sleep(max(0.0, seconds))  # noqa: ASYNC251 - there is no loop to block


class ManualClock:
    """A clock that stands still until a test advances it.

    Sleepers, in tasks and in threads, wake when the clock passes the end of their sleep.
    """

    def __init__(self, start: float = 1_700_000_000.0) -> None:
        self._now_ms = round(start * 1000)
        self._set_back_ms = 0
        self._lock = threading.Lock()
        self._sleepers: list[tuple[int, Callable[[], None]]] = []

    def now_ms(self) -> int:
        """The time it was set to."""
        return self._now_ms

    def monotonic(self) -> float:
        """The same time in seconds, as if it had never been set back."""
        return self._passed_ms / 1000

    def after(self, seconds: float) -> int:
        """The `now_ms` that it will have once it has been advanced by so many seconds."""
        return self._now_ms + _round_up_ms(seconds)

    def advance(self, seconds: float) -> None:
        """Move the clock forward and wake the sleepers whose time is over."""
        with self._lock:
            self._now_ms = self.after(seconds)
            due = [wake for at_ms, wake in self._sleepers if at_ms <= self._passed_ms]
            self._sleepers = [(at_ms, wake) for at_ms, wake in self._sleepers if at_ms > self._passed_ms]
        for wake in due:
            wake()

    def set_back(self, seconds: float) -> None:
        """Set the time back, as an operator or NTP does to a host. Sleepers and `monotonic` do not notice."""
        with self._lock:
            self._now_ms -= _round_up_ms(seconds)
            self._set_back_ms += _round_up_ms(seconds)

    @property
    def _passed_ms(self) -> int:
        return self._now_ms + self._set_back_ms

    @property
    def sleepers(self) -> int:
        """How many sleepers wait, so that a test can wait until all work does."""
        return len(self._sleepers)

    async def sleep(self, seconds: float) -> None:
        """Wait until the clock has been advanced that far."""
        if not has_loop():
            if seconds > 0:
                event = threading.Event()
                self._add_sleeper(seconds, event.set)
                event.wait()
        elif seconds <= 0:
            await asyncio.sleep(0)
        else:
            loop = asyncio.get_running_loop()
            woken = loop.create_future()
            sleeper = self._add_sleeper(seconds, lambda: call_on(loop, wake, woken))
            try:
                await woken
            finally:
                # A cancelled sleeper is removed here; one that was woken is gone already.
                with self._lock:
                    if sleeper in self._sleepers:
                        self._sleepers.remove(sleeper)

    def _add_sleeper(self, seconds: float, wake: Callable[[], None]) -> tuple[int, Callable[[], None]]:
        with self._lock:
            sleeper = (self._passed_ms + _round_up_ms(seconds), wake)
            self._sleepers.append(sleeper)
        return sleeper


def call_on(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: object) -> None:
    """Schedule a callback on a loop of any thread. On a closed loop nothing waits for it, so it is dropped."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *args)


def wake(waiter: asyncio.Future[None]) -> None:
    """End a wait that may be over already."""
    if not waiter.done():
        waiter.set_result(None)


def check_wait(seconds: object, what: str) -> float:
    """Return how many seconds to wait, zero or more, infinity included. Raises `InvalidValue`."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
        raise InvalidValue(f"{what} is zero or more seconds, as an int or a float")
    try:
        return float(seconds)
    except OverflowError:
        return math.inf


def ttl_to_ms(ttl: float | timedelta) -> int:
    """Convert a time to live to whole milliseconds, rounded up: never early. Raises `InvalidTTL`."""
    if isinstance(ttl, timedelta):
        ttl = ttl.total_seconds()
    if isinstance(ttl, bool) or not isinstance(ttl, int | float):
        raise InvalidTTL(f"is of type {type(ttl).__name__}")
    if ttl != ttl:  # noqa: PLR0124 - only NaN differs from itself
        raise InvalidTTL("is not a number")
    if ttl <= 0:
        raise InvalidTTL("is not above zero")
    if ttl > TTL_S_MAX:
        raise InvalidTTL("is more than a hundred years")
    return _round_up_ms(ttl) or 1


def format_duration(seconds: float) -> str:
    """A duration as people write it: ``1h30m``."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    left, parts = round(seconds), ""
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)):
        count, left = divmod(left, size)
        parts += f"{count}{unit}" if count else ""
    return parts


def _round_up_ms(seconds: float) -> int:
    """Round up to milliseconds; but 2.007 s, which a float makes 2007.0000000000002 ms, are 2007."""
    nearest = round(seconds * 1000)
    return nearest if nearest / 1000 == seconds else math.ceil(seconds * 1000)
