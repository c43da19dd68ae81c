"""HTTP connections with bounds, so that no caller takes the server's memory, its files or its time.

There is a bound on what a caller may send before a request is complete, on how long that may take, and on how many
connections are open.

uvicorn with httptools has none of these, so its protocol is extended here. Other servers were measured instead (a small
application that sends 13 headers, two cores, 64 connections, CPU for one GET / one PUT of 200 bytes):

    uvicorn with httptools, as here   21 / 24 µs
    uvicorn with httptools            25 / 26 µs   no bounds
    granian, embedded, as ASGI        21 / 39 µs   bounds headers in size and time, but neither bodies in time nor
    granian, embedded, as RSGI        19 / 28 µs   connections; takes no socket, so that a free port is not known
    uvicorn with h11                  74 / 88 µs   bounds the size of headers only

Two more were measured with 8 connections, where uvicorn with httptools took 21 / 22: uvicorn with zttp 25 / 29, and
hypercorn 114 / 127. They bound the size of headers only.

The rules:

- A request line and headers have up to 64 KB and 100 lines. So have trailers and all else that is not passed on.
- They arrive within 10 seconds. A body has 30 seconds, and a second more for each 32 KB that came.
- A connection without a request is closed after 5 seconds.
- When all connections are taken, the one that the server has waited for longest is closed, half requests before idle
  connections. One whose request is being answered stays open; if all of them are, the new one is refused.
- The log has a line for the first connection that was closed for each reason, and a sum every minute after that.

A caller that does not read its reply is disconnected by the kernel (see `limpet.server.service`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from http import HTTPStatus
from typing import Any, Final, Literal, NamedTuple, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from limpet.server.http_errors import Problem, problem_response

__all__ = ["Bounds", "Connections"]

HEAD_BYTES_MAX: Final = 65_536
HEADERS_MAX: Final = 100
HEAD_S: Final = 10.0
BODY_S: Final = 30.0
BODY_BYTES_PER_S: Final = 32_000.0
IDLE_S: Final = 5.0
CHECK_S: Final = 1.0
HELD_BYTES_MAX: Final = 65_536
SUM_UP_S: Final = 60.0

log = logging.getLogger("limpet.http")


class Bounds(NamedTuple):
    """The bounds of a connection. See the rules above."""

    connections: int = 1_000
    head_bytes: int = HEAD_BYTES_MAX
    headers: int = HEADERS_MAX
    head_s: float = HEAD_S
    body_s: float = BODY_S
    body_bytes_per_s: float = BODY_BYTES_PER_S
    idle_s: float = IDLE_S


class Connections:
    """All connections of a server."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._open: set[Connection] = set()
        self._closed: Counter[str] = Counter()
        self._sum_up_at: float | None = None

    def __len__(self) -> int:
        return len(self._open)

    def make(self, *given: Any, **options: Any) -> Connection:
        """A connection, as uvicorn makes its protocols."""
        return Connection(self, *given, **options)

    def add(self, connection: Connection) -> None:
        """Count a new connection, and make room for it."""
        self._open.add(connection)
        if len(self._open) <= self.bounds.connections:
            return
        waiting = [one for one in self._open if one is not connection and one.makes_wait]
        if waiting:
            oldest = min(waiting, key=lambda one: (one.phase == "idle", one.waits_since))
            self.discard(oldest)
            self.note(oldest, "to make room for another, after keeping the server waiting longest")
            oldest.transport.abort()
        else:
            self.discard(connection)
            self.note(connection, "because there are as many as the server takes (--connections)")
            connection.refuse(Problem(503, "too_many_connections", "the server has no room for another connection"))

    def discard(self, connection: Connection) -> None:
        """Count a connection no more."""
        self._open.discard(connection)

    def note(self, connection: Connection, why: str) -> None:
        """Log why a connection is closed: the first time at once, then in a sum."""
        if self._sum_up_at is None:
            self._sum_up_at = asyncio.get_running_loop().time() + SUM_UP_S
        if why in self._closed:
            self._closed[why] += 1
            return
        self._closed[why] = 0
        client = connection.client[0] if connection.client else "unknown"
        log.warning("HTTP: a connection from %s was closed %s. More of these are summed up.", client, why)

    async def check_deadlines(self) -> None:
        """Close connections that are late, as long as this runs."""
        while True:
            await asyncio.sleep(CHECK_S)
            now = asyncio.get_running_loop().time()
            for connection in list(self._open):
                connection.check_deadline(now)
            if self._sum_up_at is not None and now >= self._sum_up_at:
                self.sum_up()

    def sum_up(self) -> None:
        """Log how many more connections were closed."""
        for why, count in self._closed.items():
            if count:
                log.warning("HTTP: %d more connections were closed %s.", count, why)
        self._closed.clear()
        self._sum_up_at = None


class JoiningTransport:
    """A transport that joins what is written in one turn of the loop: a response is sent as one, and so are several.

    uvicorn writes head and body apart, each of which would be a call of the system, and a packet.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held: list[bytes] = []
        self._held_bytes = 0
        self.is_closing = transport.is_closing
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading
        self.get_extra_info = transport.get_extra_info

    def write(self, data: bytes) -> None:
        """Send this at the end of the turn; at once what is large, so that a caller who does not read is noticed."""
        if not self._held:
            self._loop.call_soon(self._send_held)
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes > HELD_BYTES_MAX:
            self._send_held()

    def close(self) -> None:
        """Send what is left, and close."""
        self._send_held()
        self._transport.close()

    def abort(self) -> None:
        """Close, and send nothing more."""
        self._held = []
        self._transport.abort()

    def _send_held(self) -> None:
        held, self._held, self._held_bytes = self._held, [], 0
        # The caller may have left since.
        if held and not self.is_closing():
            self._transport.write(b"".join(held))


class Connection(HttpToolsProtocol):
    """A connection with bounds.

    Attributes:
        phase: Headers arrive (or nothing yet), a body arrives, the request is being answered, or it was answered and
            no other has begun.
        waits_since: Since when the server waits for the caller, by the clock of the loop.
        deadline: When that must end. It has no meaning while a request is being answered.
    """

    cycle: Any  # The latest request and its reply. None at first, though the type in uvicorn does not allow it.

    def __init__(self, connections: Connections, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.phase: Literal["head", "body", "answer", "idle"] = "head"
        self.waits_since = self.deadline = 0.0
        self._connections = connections
        self._bounds = connections.bounds
        self._head_bytes = self._withheld_bytes = 0
        self._has_moved = False
        self._problem: Problem | None = None

    @property
    def makes_wait(self) -> bool:
        """Whether the server waits for the caller. While it does not read, nothing can arrive."""
        return self.phase != "answer" and not self.flow.read_paused

    def check_deadline(self, now: float) -> None:
        """Close it if it is late."""
        if not self.makes_wait or now < self.deadline:
            return
        if self.phase == "idle":
            self.transport.close()
            return
        what = "headers" if self.phase == "head" else "body"
        self._connections.note(self, f"because the {what} of a request did not arrive in time")
        self.refuse(Problem(408, "request_timeout", f"the {what} of the request did not arrive in time"))

    def refuse(self, problem: Problem) -> None:
        """Send the problem, unless the caller would take it for the reply to an earlier request, and close."""
        if self.transport.is_closing():
            return
        is_answered = self.cycle is None or self.cycle.response_complete
        is_current = self.phase == "body" and not self.pipeline and not self.cycle.response_started
        if is_answered or is_current:
            response = problem_response(problem)
            head = [f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}".encode()]
            head += [name + b": " + text for name, text in (*response.raw_headers, (b"connection", b"close"))]
            self.transport.write(b"\r\n".join([*head, b"", bytes(response.body)]))
        self.transport.close()

    def shutdown(self) -> None:
        """End it with the server, without waiting for a request that has not arrived."""
        if self.phase == "body":
            self.refuse(Problem(503, "not_ready", "the server is about to end"))
        else:
            super().shutdown()

    def _wait(self, phase: Literal["head", "body", "idle"], seconds: float) -> None:
        self.phase = phase
        self.waits_since = self.loop.time()
        self.deadline = self.waits_since + seconds

    # Called by the transport -----------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(cast(asyncio.Transport, JoiningTransport(transport, self.loop)))
        self._wait("head", self._bounds.head_s)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """End it."""
        self._connections.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse the data, and count what the parser only keeps: a header or a trailer that does not end."""
        self._unset_keepalive_if_required()
        self._has_moved = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # It is served as an ordinary request.
        except httptools.HttpParserError:
            self._problem = self._problem or Problem(400, "invalid_request", "this is not a request of HTTP/1.1")
        self._withheld_bytes = 0 if self._has_moved else self._withheld_bytes + len(data)
        if self._withheld_bytes > self._bounds.head_bytes:
            self._problem = self._too_large()
        if self._problem is not None:
            self._connections.note(self, f"because {self._problem}")
            self.refuse(self._problem)

    # Called by the parser --------------------------------------------------------

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self._head_bytes = 0
        self._wait("head", self._bounds.head_s)

    def on_url(self, url: bytes) -> None:
        """Take a part of the request line."""
        super().on_url(url)
        self._head_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, or a trailer."""
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > self._bounds.head_bytes or len(self.headers) >= self._bounds.headers:
            self._problem = self._too_large()
            raise self._problem
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Pass the request to the application."""
        super().on_headers_complete()
        self._has_moved = True
        self._wait("body", self._bounds.body_s)

    def on_body(self, body: bytes) -> None:
        """Pass a part of the body on. After the reply is complete, it extends no deadline."""
        self._has_moved = True
        if not self.cycle.response_complete:
            self.deadline += len(body) / self._bounds.body_bytes_per_s
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Wait for the application now."""
        self._has_moved = True
        if self.cycle.response_complete:
            self._wait("idle", self._bounds.idle_s)
        else:
            self.phase = "answer"
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request, unless it has arrived."""
        super().on_response_complete()
        if self.phase == "answer" and self.cycle.response_complete:
            self._wait("idle", self._bounds.idle_s)

    def _too_large(self) -> Problem:
        bounds = self._bounds
        return Problem(
            431,
            "headers_too_large",
            f"a request has up to {bounds.headers} headers, of {bounds.head_bytes:,} bytes together",
        )
