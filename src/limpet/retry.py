"""Trying again: how often, how long apart, and only what changes nothing."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from limpet.clock import Clock
from limpet.errors import TransientError

__all__ = ["ATTEMPTS", "jitter_s", "pause_s", "retrying"]

T = TypeVar("T")

ATTEMPTS: Final = 5
JITTER_S_MIN: Final = 0.0005
JITTER_S_MAX: Final = 0.02


def pause_s(attempt: int, *, first: float = 0.02, longest: float = 1.0) -> float:
    """How long to wait after the n-th failed attempt: twice as long each time, with jitter."""
    return min(longest, first * 2.0 ** (attempt - 1)) * (0.5 + random.random())


def jitter_s(took_s: float) -> float:
    """How long to wait after another writer was first: up to as long as the attempt took, which is about a round trip.

    It does not grow with the attempts. The writer that was first plans its next write on its own answer, so one that
    waited longer each time would leave the key to it.
    """
    return random.uniform(0, min(max(took_s, JITTER_S_MIN), JITTER_S_MAX))


async def retrying(clock: Clock, call: Callable[[], Awaitable[T]], *, attempt: int = 1) -> T:
    """Run a call that changes nothing, again where that can help."""
    while attempt < ATTEMPTS:
        try:
            return await call()
        except TransientError:
            await clock.sleep(pause_s(attempt))
            attempt += 1
    return await call()
