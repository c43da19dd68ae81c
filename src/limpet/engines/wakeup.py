"""Waking callers that wait for changes of a namespace."""

from __future__ import annotations

import asyncio
import threading

from limpet.clock import call_on, wake

__all__ = ["Wakeup"]


class Wakeup:
    """Wakes the waiters of a namespace, across event loops and threads.

    A waiter takes a token before it reads the log and waits with that token. A change committed between the two has
    replaced the token, so the wait returns at once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens: dict[str, object] = {}
        self._waiting: dict[str, list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]]] = {}
        self._for_all = object()

    def token(self, namespace: str) -> object:
        """Identify the latest notification of a namespace: a new object after each."""
        return self._tokens.get(namespace, self._for_all)

    def notify(self, namespace: str) -> None:
        """Wake every waiter of this namespace."""
        # Replace the token, then look for waiters; a waiter registers, then compares its token. Either the notifier or
        # the waiter sees the other, so this takes no lock when no caller waits.
        self._tokens[namespace] = object()
        if namespace in self._waiting:
            with self._lock:
                waiting = self._waiting.pop(namespace, ())
            for loop, waiter in waiting:
                call_on(loop, wake, waiter)

    def notify_all(self) -> None:
        """Wake the waiters of all namespaces, because the engine closes."""
        self._for_all = object()
        self._tokens.clear()
        for namespace in list(self._waiting):
            self.notify(namespace)

    async def wait(self, namespace: str, token: object, timeout_s: float) -> None:
        """Wait for a notification later than the token, or until the timeout. Needs a running loop."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        with self._lock:
            self._waiting.setdefault(namespace, []).append((loop, waiter))
        timer = loop.call_later(timeout_s, wake, waiter)
        try:
            if self.token(namespace) is token:
                await waiter
        finally:
            timer.cancel()
            with self._lock:
                waiting = self._waiting.get(namespace, [])
                if (loop, waiter) in waiting:
                    waiting.remove((loop, waiter))
                if not waiting:
                    self._waiting.pop(namespace, None)
