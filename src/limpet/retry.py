"""Trying again: how often, how long apart, and only what changes nothing."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from limpet.clock import Clock
from limpet.errors import TransientError

__all__ = ["ATTEMPTS", "pause_s", "retrying"]

T = TypeVar("T")

ATTEMPTS: Final = 5


def pause_s(attempt: int, *, first: float = 0.02, longest: float = 1.0) -> float:
    """How long to wait after the n-th failed attempt: twice as long each time, with jitter."""
    return min(longest, first * 2.0 ** (attempt - 1)) * (0.5 + random.random())


async def retrying(clock: Clock, call: Callable[[], Awaitable[T]], *, attempt: int = 1) -> T:
    """Run a call that changes nothing, again where that can help."""
    while attempt < ATTEMPTS:
        try:
            return await call()
        except TransientError:
            await clock.sleep(pause_s(attempt))
            attempt += 1
    return await call()
