"""Watching over HTTP: server-sent events that can be resumed, and that end when they must.

An event's ``id`` is its position in the log, so a client that comes back with ``Last-Event-ID`` misses nothing and
sees nothing twice. The position is also sent before the first event and with every heartbeat: a client that watches a
quiet key of a busy namespace would otherwise come back with a position that the log no longer holds.

No queue lies between the log and a client. A client that reads slowly falls behind in the log, and delays no one else.
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

from limpet.errors import Closed, RateLimited, RequestError, StateError, TransientError
from limpet.hub import Watch
from limpet.model import Event
from limpet.protocol.json import event_as_json
from limpet.retry import reason_of
from limpet.server.dispatch import Callers
from limpet.server.http_errors import Problem, document_of

__all__ = ["Streams", "WatchResponse", "until_refused"]

log = logging.getLogger("limpet.server")

HEARTBEAT_S: Final = 15.0
RECHECK_S: Final = 1.0
RETRY_MS: Final = 1000
GRACE_S: Final = 1.0
STREAMS_MAX: Final = 1000
STREAMS_PER_CALLER_MAX: Final = 100

# At DEBUG it would log every event, and an event has a value.
logging.getLogger("sse_starlette.sse").setLevel(logging.INFO)


class Streams:
    """The streams of a server, and its end, which waits for a lock end with too. A service calls `close`."""

    def __init__(self, *, most: int = STREAMS_MAX, most_per_caller: int = STREAMS_PER_CALLER_MAX) -> None:
        self._most, self._most_per_caller = most, most_per_caller
        self._open: set[WatchResponse] = set()
        self._callers: Counter[str] = Counter()
        self._ending = asyncio.Event()

    def __len__(self) -> int:
        return len(self._open)

    def check_room(self, caller: str) -> None:
        """Raise when no more streams may be open."""
        if self._ending.is_set():
            raise Closed("the server is about to end: use another, or try again later")
        if len(self._open) >= self._most or self._callers[caller] >= self._most_per_caller:
            raise RateLimited("too many watches are open", retry_after=RETRY_MS / 1000)

    def add(self, stream: WatchResponse) -> None:
        """Count a stream that begins."""
        self._open.add(stream)
        self._callers[stream.caller] += 1

    def discard(self, stream: WatchResponse) -> None:
        """Count a stream no more."""
        if stream in self._open:
            self._open.discard(stream)
            self._callers -= Counter([stream.caller])

    async def ended(self) -> None:
        """Wait until the server ends."""
        await self._ending.wait()

    def close(self) -> None:
        """End every stream, and let no new one begin. Called on the loop that serves them.

        A client gets the end of its stream at once. One that does not read is disconnected after a second.
        """
        self._ending.set()
        for stream in list(self._open):
            stream.end()


class WatchResponse(EventSourceResponse):
    """The events of a watch that has begun.

    Args:
        watch: Where the events come from.
        streams: All streams of the server, which this one is added to.
        caller: The name of the caller.
        until_refused: Waits until the caller may watch no longer, and returns why.
        given_id: Returns a request id of the log as the caller gave it, where the two differ.
    """

    def __init__(
        self,
        watch: Watch,
        streams: Streams,
        caller: str,
        *,
        until_refused: Callable[[], Awaitable[Exception]],
        given_id: Callable[[str | None], str | None] | None = None,
    ) -> None:
        self.caller = caller
        self._watch = watch
        self._streams = streams
        self._until_refused = until_refused
        self._given_id = given_id
        self._ended = anyio.Event()
        self._limit = asyncio.timeout(None)
        super().__init__(
            self._messages(),
            # We send our own heartbeats: each has a position, which must not be sent before an earlier event.
            ping=0,
            shutdown_event=self._ended,
            shutdown_grace_period=GRACE_S,
        )
        streams.add(self)

    def end(self) -> None:
        """End it, and disconnect a client that does not read."""
        self._ended.set()
        with contextlib.suppress(RuntimeError):  # It has not begun, or is over.
            self._limit.reschedule(asyncio.get_running_loop().time() + GRACE_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until there are no more, the client leaves, or the stream is ended."""
        try:
            with contextlib.suppress(TimeoutError):
                async with self._limit:
                    await super().__call__(scope, receive, send)
        finally:
            self._streams.discard(self)
            await self._watch.aclose()

    async def _messages(self) -> AsyncIterator[ServerSentEvent]:
        """The messages of the stream, until there are no more."""
        yield ServerSentEvent(comment="watching", id=self._watch.position, retry=RETRY_MS)
        ended: asyncio.Future[Any] = asyncio.ensure_future(self._ended.wait())
        coming: asyncio.Future[Any] = _next_of(self._watch)
        refused: asyncio.Future[Exception] = asyncio.ensure_future(self._until_refused())
        loop = asyncio.get_running_loop()
        sent_at = loop.time()
        try:
            while not ended.done():
                pause_s = max(0.0, sent_at + HEARTBEAT_S - loop.time())
                await asyncio.wait((coming, ended, refused), timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
                if refused.done():
                    raise refused.result()
                if coming.done():
                    event = coming.result()
                    if event is None:
                        return
                    yield self._message(event)
                    coming, sent_at = _next_of(self._watch), loop.time()
                elif loop.time() >= sent_at + HEARTBEAT_S:
                    yield ServerSentEvent(comment="still here", id=self._watch.position)
                    sent_at = loop.time()
        except Exception as error:
            # The log was trimmed past a slow client, the token is no longer good, or the store fails.
            if not isinstance(error, StateError | RequestError | Problem):
                log.error("KV watch failed: caller=%s reason=%s", self.caller, reason_of(error))
            document = document_of(error)
            yield ServerSentEvent(_json(document), event=document["code"])
        finally:
            for task in (coming, ended, refused):
                task.cancel()
            await asyncio.gather(coming, ended, refused, return_exceptions=True)

    def _message(self, event: Event) -> ServerSentEvent:
        document = event_as_json(event)
        if self._given_id is not None:
            document["cause"] = self._given_id(event.cause)
        return ServerSentEvent(_json(document), event=event.op, id=event.position)


async def until_refused(check: Callable[[], Awaitable[None]], callers: Callers) -> Exception:
    """Wait until a check raises, and return its error. The check runs when rights change, and every second."""
    while True:
        await _wait_for_change(callers, RECHECK_S)
        try:
            await check()
        except TransientError:
            # The stream was allowed, and whether it still is cannot be checked now. The next check is soon.
            continue
        except Exception as error:
            return error


async def _wait_for_change(callers: Callers, longest_s: float) -> None:
    """Wait until the rights of callers may have changed, and no longer than ``longest_s``."""
    changed = getattr(callers, "changed", None)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(longest_s):
            await (asyncio.Event().wait() if changed is None else changed())


def _next_of(watch: Watch) -> asyncio.Future[Event | None]:
    return asyncio.ensure_future(anext(watch, None))


def _json(document: dict[str, Any]) -> str:
    return msgspec.json.encode(document).decode()
