"""One connection to NATS, on which any number of requests are under way at a time.

The driver connects, authenticates and notices when the connection is dead. Requests bypass its queues: all
frames of one turn of the loop are written together, and each reply is delivered to its waiter, which is
found by the token that ends the reply's subject. A connection that broke stays broken. Nothing is buffered and
nothing is sent again, so a frame that is sent once arrives once or never.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections.abc import Callable
from typing import Any, Final

from nats.aio.client import Client
from nats.protocol.parser import Parser

from limpet.errors import PermissionDenied

__all__ = ["ApiError", "Connection", "ConnectionLost", "NoReply", "NoResponders"]

CONNECT_S: Final = 5
REQUEST_S: Final = 5.0
TICK_S: Final = 0.25
PING_S: Final = 5
CLOSE_S: Final = 2.0

Handler = Callable[[bytes, bytes, bytes, bytes], None]
"""Takes a message: its subject, its reply subject, its headers, its body."""


class ConnectionLost(Exception):
    """The connection broke. It is unknown whether the last requests were applied."""


class NoReply(Exception):
    """No reply came in time. It is unknown whether the request was applied."""


class NoResponders(Exception):
    """No one listens to that subject now: the request did nothing."""


class ApiError(Exception):
    """JetStream refused a request, with an error code."""

    def __init__(self, code: int, description: str) -> None:
        super().__init__(description)
        self.code = code


class Connection:
    """A connection, and the waiters for replies on it."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._inbox: bytes = client.new_inbox().encode() + b"."
        self._tokens = itertools.count()
        self._waiting: dict[bytes, tuple[asyncio.Future[tuple[bytes, bytes]], float, str]] = {}
        self._handlers: dict[bytes, Handler] = {}
        self._numbers = itertools.count(2)
        self._out: list[bytes] = []
        self._ticker: asyncio.TimerHandle | None = None
        # For how long this process has stood still. Requests are not late for it: their replies may have come.
        self._stalled_s = 0.0
        self.is_lost = False
        self.denied: str | None = None

    @classmethod
    async def connect(cls, servers: list[str], **options: Any) -> Connection:
        """Connect to the first of these servers that can be reached."""
        last_error: Exception = OSError("no server is known")
        for server in servers:
            client = Client()
            # The callbacks are needed before there is a connection that they can call.
            opened: list[Connection] = []
            errors: list[Exception] = []

            async def on_closed(opened: list[Connection] = opened) -> None:
                for connection in opened:
                    connection.abort()

            async def on_error(
                error: Exception, opened: list[Connection] = opened, errors: list[Exception] = errors
            ) -> None:
                errors.append(error)
                for connection in opened:
                    connection.on_error(str(error))

            try:
                async with asyncio.timeout(CONNECT_S):
                    await client.connect(
                        servers=[server],
                        allow_reconnect=False,
                        max_reconnect_attempts=1,
                        reconnect_time_wait=0,
                        connect_timeout=CONNECT_S,
                        ping_interval=PING_S,
                        closed_cb=on_closed,
                        error_cb=on_error,
                        **options,
                    )
            except Exception as error:
                last_error = next((one for one in errors if isinstance(one, OSError)), error)
                await _discard(client)
                continue
            except BaseException:
                await _discard(client)
                raise
            connection = cls(client)
            opened.append(connection)
            connection.open()
            return connection
        raise last_error

    @property
    def server_info(self) -> dict[str, Any]:
        """What the server reported about itself when we connected."""
        found: dict[str, Any] = self._client._server_info
        return found

    @property
    def servers(self) -> list[str]:
        """All servers of the cluster that are known by now."""
        return [server.geturl() for server in self._client.servers]

    def open(self) -> None:
        """Subscribe to all replies that are addressed to us."""
        self._client._ps = _Parser(self._client, self._on_message)
        self._write(b"SUB " + self._inbox + b"* 1\r\n")

    # Requests -----------------------------------------------------------------

    def request(
        self, subject: str, body: bytes = b"", headers: bytes = b"", *, wait_s: float | None = None
    ) -> asyncio.Future[tuple[bytes, bytes]]:
        """Send a request. The result is the reply's headers and body, or `ConnectionLost`, or `NoReply`."""
        waiter: asyncio.Future[tuple[bytes, bytes]] = self._loop.create_future()
        if self.is_lost:
            waiter.set_exception(ConnectionLost())
            return waiter
        token = b"%x" % next(self._tokens)
        self._waiting[token] = (waiter, self._loop.time() - self._stalled_s + (wait_s or REQUEST_S), subject)
        if self._ticker is None:
            self._ticker = self._loop.call_later(TICK_S, self._tick)
        self.send(subject, body, headers, self._inbox + token)
        return waiter

    def send(self, subject: str, body: bytes = b"", headers: bytes = b"", reply: bytes = b"") -> None:
        """Send a message without waiting for a reply."""
        if headers:
            size = len(headers)
            first = b"HPUB %b %b %d %d\r\n" % (subject.encode(), reply, size, size + len(body))
            self._write(b"".join((first, headers, body, b"\r\n")))
        else:
            self._write(b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), reply, len(body), body))

    def subscribe(self, handler: Handler) -> tuple[str, bytes]:
        """Pass messages to a function. Returns the subject to send them to, and the number of the subscription."""
        number = b"%d" % next(self._numbers)
        # Messages that a consumer delivers keep their own subject, so each consumer needs its own subscription. Its
        # subject is a word longer than those of replies: otherwise a key could be taken for the token of a reply.
        subject = b"%bw.%b" % (self._inbox, number)
        self._handlers[number] = handler
        self._write(b"SUB %b %b\r\n" % (subject, number))
        return subject.decode(), number

    def unsubscribe(self, number: bytes) -> None:
        """Pass no more messages to that function."""
        if self._handlers.pop(number, None) is not None:
            self._write(b"UNSUB %b\r\n" % number)

    # Bytes ------------------------------------------------------------------

    def _write(self, frame: bytes) -> None:
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(frame)

    def _flush(self) -> None:
        frames, self._out = self._out, []
        if not self.is_lost:
            # The driver's own flush would copy all this through a queue and a task.
            self._client._transport.write(b"".join(frames))

    def _on_message(self, words: list[bytes], reply: bytes, headers: bytes, body: bytes) -> None:
        subject, number = words[1], words[2]
        if number == b"1":
            entry = self._waiting.pop(subject[len(self._inbox) :], None)
            if entry is not None and not entry[0].done():
                entry[0].set_result((headers, body))
        elif number in self._handlers:
            self._handlers[number](subject, reply, headers, body)

    def _tick(self) -> None:
        """Fail requests whose reply is overdue."""
        if self._client.is_closed:
            # The driver has given up, and calls back only after it has flushed its own buffer.
            self.abort()
            return
        now = self._loop.time()
        if self._ticker is not None and now - self._ticker.when() > TICK_S:
            self._stalled_s += now - self._ticker.when()
        now -= self._stalled_s
        overdue: list[bytes] = []
        for token, (waiter, until, _) in self._waiting.items():
            if until <= now or waiter.cancelled():
                overdue.append(token)
        for token in overdue:
            waiter = self._waiting.pop(token)[0]
            if not waiter.done():
                waiter.set_exception(NoReply())
        self._ticker = self._loop.call_later(TICK_S, self._tick) if self._waiting else None

    def on_error(self, message: str) -> None:
        """Fail the requests to a forbidden subject. The server names the subject, and not the request."""
        forbidden = _FORBIDDEN.search(message)
        if forbidden is None:
            return
        self.denied = forbidden[0]
        for token, (waiter, _, subject) in list(self._waiting.items()):
            # The server reports the subject in lower case.
            if subject.lower() == forbidden[1].lower() or "subscription" in message:
                del self._waiting[token]
                if not waiter.done():
                    waiter.set_exception(PermissionDenied(f"NATS: {forbidden[0]}"))

    def abort(self) -> None:
        """Treat the connection as lost, and fail all waiters."""
        if self.is_lost:
            return
        self.is_lost = True
        if self._ticker is not None:
            self._ticker.cancel()
        waiting, self._waiting = self._waiting, {}
        for waiter, _, _ in waiting.values():
            if not waiter.done():
                waiter.set_exception(ConnectionLost())
        self._handlers.clear()

    async def close(self) -> None:
        """Close the connection."""
        self.abort()
        await _discard(self._client)


_FORBIDDEN: Final = re.compile(r'permissions violation for (?:publish|subscription) to "([^"]*)"', re.IGNORECASE)


async def _discard(client: Any) -> None:
    """Close a connection, whatever state it is in. The driver would leave a socket open whose handshake failed."""
    transport = client._transport
    with contextlib.suppress(Exception):
        async with asyncio.timeout(CLOSE_S):
            await client.close()
    if transport:
        with contextlib.suppress(Exception):
            transport.close()
        with contextlib.suppress(Exception):
            # Bytes that a paused server does not read would keep the socket open.
            transport._io_writer.transport.abort()


class _Parser(Parser):
    """Parses messages, and leaves all other frames to the driver."""

    def __init__(self, client: Any, on_message: Callable[[list[bytes], bytes, bytes, bytes], None]) -> None:
        self._on_message = on_message
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._needed_bytes = 0
        super().__init__(client)

    def reset(self) -> None:
        super().reset()
        self._kept, self._kept_bytes, self._needed_bytes = [], 0, 0

    async def parse(self, data: bytes = b"") -> None:
        if self._kept:
            self._kept.append(data)
            self._kept_bytes += len(data)
            if self._kept_bytes < self._needed_bytes:
                return
            data = b"".join(self._kept)
        at, end, on_message = 0, len(data), self._on_message
        needed = 0
        while at < end:
            line_end = data.find(b"\r\n", at)
            if line_end < 0:
                break
            words = data[at:line_end].split()
            kind = words[0] if words else b""
            if kind == b"HMSG":
                start = line_end + 2
                body, stop = start + int(words[-2]), start + int(words[-1])
                if stop + 2 > end:
                    needed = stop + 2 - at
                    break
                on_message(words, words[3] if len(words) == 6 else b"", data[start:body], data[body:stop])
                at = stop + 2
            elif kind == b"MSG":
                start = line_end + 2
                stop = start + int(words[-1])
                if stop + 2 > end:
                    needed = stop + 2 - at
                    break
                on_message(words, words[3] if len(words) == 5 else b"", b"", data[start:stop])
                at = stop + 2
            else:
                await super().parse(data[at : line_end + 2])
                at = line_end + 2
        rest = data[at:]
        self._kept = [rest] if rest else []
        self._kept_bytes, self._needed_bytes = len(rest), needed
