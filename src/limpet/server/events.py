"""Watching over HTTP: server-sent events that can be resumed, and that end when they must.

An event's ``id`` is its position in the log, so a client that comes back with ``Last-Event-ID`` misses nothing and
sees nothing twice. The position is also told before the first event and with every heartbeat: whoever watches a quiet
key of a busy namespace would otherwise come back with a position that the log no longer holds.

No queue lies between the log and a client. One that reads slowly falls behind in the log, and holds nothing up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import anyio
import msgspec
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from limpet.errors import Closed, LimpetError, RateLimited, TransientError
from limpet.hub import Watch
from limpet.model import Event
from limpet.server.problems import Problem, document_of
from limpet.wire import event_as_json

__all__ = ["Streams", "WatchResponse"]

HEARTBEAT_S: Final = 15.0
RECHECK_S: Final = 5.0
RETRY_MS: Final = 1000
GRACE_S: Final = 1.0
STREAMS_MAX: Final = 1000
STREAMS_PER_CALLER_MAX: Final = 100

# It would write every event into the log at DEBUG, and an event has a value.
logging.getLogger("sse_starlette.sse").setLevel(logging.INFO)


class Streams:
    """Everything that stays open for long: watches, and waits for a lock. A service ends them all by `close`."""

    def __init__(self, *, most: int = STREAMS_MAX, most_per_caller: int = STREAMS_PER_CALLER_MAX) -> None:
        self._most, self._most_per_caller = most, most_per_caller
        self._open: set[WatchResponse] = set()
        self._callers: Counter[str] = Counter()
        self._ending = asyncio.Event()

    def __len__(self) -> int:
        return len(self._open)

    def check_room(self, caller: str) -> None:
        """Raise when there is no place for one more stream."""
        if self._ending.is_set():
            raise Closed("the server is about to end: ask another, or try again later")
        if len(self._open) >= self._most or self._callers[caller] >= self._most_per_caller:
            raise RateLimited("too many watches are open", retry_after=RETRY_MS / 1000)

    def take_up(self, stream: WatchResponse) -> None:
        """Count a stream in."""
        self._open.add(stream)
        self._callers[stream.caller] += 1

    def let_go(self, stream: WatchResponse) -> None:
        """Count a stream out."""
        if stream in self._open:
            self._open.discard(stream)
            self._callers -= Counter([stream.caller])

    async def ended(self) -> None:
        """Wait until they are to end."""
        await self._ending.wait()

    def close(self) -> None:
        """Let every stream end, and no new one begin. Called on the loop that serves them.

        A client gets the end of its stream at once. One that does not take what it is sent is left after a second.
        """
        self._ending.set()
        for stream in list(self._open):
            stream.end()


class WatchResponse(EventSourceResponse):
    """The events of a watch that has begun.

    Attributes:
        caller: Who watches.
    """

    def __init__(self, watch: Watch, streams: Streams, caller: str, recheck: Callable[[], Awaitable[None]]) -> None:
        self.caller = caller
        self._watch = watch
        self._streams = streams
        self._recheck = recheck
        self._ended = anyio.Event()
        self._limit = asyncio.timeout(None)
        super().__init__(
            self._messages(),
            # Heartbeats are ours: each tells a position, which must not overtake an event that is on its way.
            ping=0,
            shutdown_event=self._ended,
            shutdown_grace_period=GRACE_S,
        )
        streams.take_up(self)

    def end(self) -> None:
        """End it, and leave a client that does not take what it is sent."""
        self._ended.set()
        with contextlib.suppress(RuntimeError):  # It has not begun, or is over.
            self._limit.reschedule(asyncio.get_running_loop().time() + GRACE_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until there are no more, the client goes, or it is ended."""
        try:
            with contextlib.suppress(TimeoutError):
                async with self._limit:
                    await super().__call__(scope, receive, send)
        finally:
            self._streams.let_go(self)
            await self._watch.aclose()

    async def _messages(self) -> AsyncIterator[ServerSentEvent]:
        """What is sent, until there is no more."""
        yield ServerSentEvent(comment="watching", id=self._watch.position, retry=RETRY_MS)
        ended: asyncio.Future[Any] = asyncio.ensure_future(self._ended.wait())
        coming: asyncio.Future[Any] = _next_of(self._watch)
        loop = asyncio.get_running_loop()
        heard = checked = loop.time()
        try:
            while not ended.done():
                pause_s = max(0.0, min(heard + HEARTBEAT_S, checked + RECHECK_S) - loop.time())
                await asyncio.wait((coming, ended), timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
                if loop.time() >= checked + RECHECK_S:
                    await self._check_again()
                    checked = loop.time()
                if coming.done():
                    event = coming.result()
                    if event is None:
                        return
                    yield _message(event)
                    coming, heard = _next_of(self._watch), loop.time()
                elif loop.time() >= heard + HEARTBEAT_S:
                    yield ServerSentEvent(comment="still here", id=self._watch.position)
                    heard = loop.time()
        except (LimpetError, Problem) as error:
            # The log was trimmed past a slow client, or the token is no longer good.
            document = document_of(error)
            yield ServerSentEvent(_json(document), event=document["code"])
        finally:
            coming.cancel()
            ended.cancel()
            await asyncio.gather(coming, ended, return_exceptions=True)

    async def _check_again(self) -> None:
        """Raise when the caller may watch no longer."""
        # Where nobody can tell just now, it goes on: it was allowed, and the next look is soon.
        with contextlib.suppress(TransientError):
            await self._recheck()


def _next_of(watch: Watch) -> asyncio.Future[Event | None]:
    return asyncio.ensure_future(anext(watch, None))


def _message(event: Event) -> ServerSentEvent:
    return ServerSentEvent(_json(event_as_json(event)), event=event.op, id=event.position)


def _json(document: dict[str, Any]) -> str:
    return msgspec.json.encode(document).decode()
