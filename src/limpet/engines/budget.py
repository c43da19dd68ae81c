"""A fair share of the event loop for engine calls that complete without waiting."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from limpet.clock import has_loop

__all__ = ["PAUSE_S", "SCAN_CALLS", "Budget"]

SCAN_CALLS: Final = 25
"""A scan counts as this many calls: as many as reading its entries one by one might take."""

PAUSE_S: Final = 0.0005
"""The pause that calls which never suspend make for another thread of their engine."""


class Budget:
    """A fair share of the event loop, and of the interpreter, for calls that never suspend.

    Reads that complete in place would starve every other task of their loop. So when a turn of
    the loop has lasted long enough, each further call waits for the next turn. And another
    thread that works for the engine would get the interpreter only once in five milliseconds,
    so while one does, calls pause, with a loop or without.

    Args:
        turn_s: How long a turn may last.
        calls: The clock is read after every so many calls.
        timer: The clock.
        others: Whether another thread works for the engine.
    """

    def __init__(
        self,
        turn_s: float = 0.001,
        calls: int = 25,
        *,
        timer: Callable[[], float] = time.perf_counter,
        others: Callable[[], bool] = lambda: False,
    ) -> None:
        self._turn_s = turn_s
        self._calls = calls
        self._timer = timer
        self._others = others
        self._left = calls
        self._began = 0.0
        self._renewing: asyncio.AbstractEventLoop | None = None

    def spent(self, calls: int = 1) -> bool:
        """Count a call, or one that is worth several. True means: await `renewed` before going on."""
        self._left -= calls
        return self._left < 0 and self._is_over()

    def _is_over(self) -> bool:
        """Whether this turn has lasted long enough. If not, the next calls are free."""
        if self._timer() - self._began > self._turn_s and (has_loop() or self._others()):
            return True
        self._left = self._calls
        return False

    async def renewed(self) -> None:
        """Wait for the next turn of the loop, or pause for the other thread."""
        pause_s = PAUSE_S if self._others() else 0.0
        if not has_loop():
            time.sleep(pause_s)  # noqa: ASYNC251 - no loop runs
            self._renew()
            return
        loop = asyncio.get_running_loop()
        if self._renewing is not loop:
            # Scheduled before this task's own wake-up, so the next turn starts with a full budget.
            self._renewing = loop
            loop.call_later(pause_s, self._renew) if pause_s else loop.call_soon(self._renew)
        await asyncio.sleep(pause_s)

    def _renew(self) -> None:
        self._left = self._calls
        self._began = self._timer()
        self._renewing = None
