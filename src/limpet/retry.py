"""Retries: how often, how long apart, and only for calls that change nothing.

A call gives up after a few attempts. Background work never does, as long as its store is open: an `Outage` computes how
long it waits, and logs one line when the work begins to fail and one when it works again.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Awaitable, Callable, Iterator
from typing import Final, TypeVar

from limpet.clock import Clock
from limpet.errors import LimpetError, TransientError

__all__ = ["ATTEMPTS", "Outage", "jitter_s", "pause_s", "reason_of", "retry"]

T = TypeVar("T")

ATTEMPTS: Final = 5
JITTER_S_MIN: Final = 0.0005
JITTER_S_MAX: Final = 0.02
OUTAGE_S: Final = 1.0
OUTAGE_S_MAX: Final = 10.0
CAUSES_MAX: Final = 8


def pause_s(attempt: int, *, first: float = 0.02, longest: float = 1.0) -> float:
    """Compute how long to wait after the n-th failed attempt: twice as long each time, with jitter."""
    return min(longest, first * 2.0 ** (attempt - 1)) * (0.5 + random.random())


def jitter_s(took_s: float) -> float:
    """Compute how long to wait after losing to another writer: up to as long as the attempt took, about a round trip.

    It does not grow with the attempts. The writer that won can start its next write at once, so a loser that waited
    longer each time would never get the key.
    """
    return random.uniform(0, min(max(took_s, JITTER_S_MIN), JITTER_S_MAX))


async def retry(clock: Clock, call: Callable[[], Awaitable[T]], *, attempt: int = 1) -> T:
    """Run a call that changes nothing, and run it again after transient errors."""
    while attempt < ATTEMPTS:
        try:
            return await call()
        except TransientError:
            await clock.sleep(pause_s(attempt))
            attempt += 1
    return await call()


class Outage:
    """A continuing failure of background work, from its first failed attempt to the next success."""

    def __init__(self, log: logging.Logger, what: str) -> None:
        self._log = log
        self._what = what
        self._failures = 0

    @property
    def is_on(self) -> bool:
        """Whether the last attempt failed."""
        return self._failures > 0

    def record_failure(self, error: BaseException) -> float:
        """Record a failed attempt, and log the first. Returns how many seconds to wait before the next attempt."""
        if not self._failures:
            code = error.code if isinstance(error, LimpetError) else "internal"
            text = "%s failed and is tried again until it works: code=%s reason=%s"
            facts = {"error_code": code, "reason": reason_of(error)}
            self._log.error(text, self._what, code, facts["reason"], extra=facts)
        self._failures += 1
        return min(OUTAGE_S_MAX, OUTAGE_S * 2.0 ** (self._failures - 1))

    def record_success(self) -> None:
        """Record an attempt that worked, and log the end of an outage."""
        if self._failures:
            self._log.info("%s works again, after %d failed attempts", self._what, self._failures)
        self._failures = 0


_SQLSTATE: Final = re.compile(r"[0-9A-Z]{5}", re.ASCII)


def reason_of(error: BaseException) -> str:
    """Describe a failure for a log: the types of the errors from the outside in, and the SQLSTATE if there is one.

    Their messages are left out: a driver may quote a value, name a file or hold an address in them.
    """
    return " from ".join(dict.fromkeys(_describe(one) for one in _walk_causes(error)))


def _describe(error: BaseException) -> str:
    state = getattr(error, "sqlstate", None)
    name = type(error).__name__
    return f"{name} {state}" if isinstance(state, str) and _SQLSTATE.fullmatch(state) else name


def _walk_causes(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    for _ in range(CAUSES_MAX):
        if found is None:
            return
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
