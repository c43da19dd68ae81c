"""Waking callers that wait for changes of a namespace."""

from __future__ import annotations

import asyncio
import threading

from limpet.clock import call_on, wake

__all__ = ["Bell"]


class Bell:
    """Wakes those who wait for changes of a namespace, in whatever loop or thread they and the writer are.

    A wait names the mark it saw before it looked at the log, so that a change made in
    between is not slept through.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._marks: dict[str, object] = {}
        self._waiting: dict[str, list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]]] = {}
        self._for_all = object()

    def mark(self, namespace: str) -> object:
        """What the latest ring left: another object after each."""
        return self._marks.get(namespace, self._for_all)

    def ring(self, namespace: str) -> None:
        """Wake everybody who waits for this namespace."""
        # First the mark, then a look at who waits; who waits does it the other way round. So one
        # of the two sees the other, and ringing for nobody needs no lock.
        self._marks[namespace] = object()
        if namespace in self._waiting:
            with self._lock:
                waiting = self._waiting.pop(namespace, ())
            for loop, sleeper in waiting:
                call_on(loop, wake, sleeper)

    def ring_all(self) -> None:
        """Wake everybody, because an engine closes."""
        self._for_all = object()
        self._marks.clear()
        for namespace in list(self._waiting):
            self.ring(namespace)

    async def wait(self, namespace: str, mark: object, timeout_s: float) -> None:
        """Wait until it rings past this mark, or the time is over. Needs a running loop."""
        loop = asyncio.get_running_loop()
        sleeper: asyncio.Future[None] = loop.create_future()
        with self._lock:
            self._waiting.setdefault(namespace, []).append((loop, sleeper))
        timer = loop.call_later(timeout_s, wake, sleeper)
        try:
            if self.mark(namespace) is mark:
                await sleeper
        finally:
            timer.cancel()
            with self._lock:
                waiting = self._waiting.get(namespace, [])
                if (loop, sleeper) in waiting:
                    waiting.remove((loop, sleeper))
                if not waiting:
                    self._waiting.pop(namespace, None)
