"""One connection to NATS, on which any number of requests are under way at a time.

The driver connects, proves who we are and notices when the line is dead. Requests go past its queues:
all frames of one turn of the loop are written together, and each answer is handed to whoever waits
for it, found by the last word of its subject. A link that broke stays broken. Nothing is kept for
later and nothing is sent again, so whatever is sent once arrives once or never.
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

__all__ = ["Link", "LinkLost", "Refused", "Silent", "Unheard"]

CONNECT_S: Final = 5
REQUEST_S: Final = 5.0
TICK_S: Final = 0.25
PING_S: Final = 5
CLOSE_S: Final = 2.0

Handler = Callable[[bytes, bytes, bytes, bytes], None]
"""Takes a message: its subject, where to answer, its headers, its body."""


class LinkLost(Exception):
    """The line broke. Nobody can say what became of what was sent last."""


class Silent(Exception):
    """No answer came in time. Nobody can say what became of the request."""


class Unheard(Exception):
    """Nobody listens to that subject now: the request did nothing."""


class Refused(Exception):
    """The server says no, with a number of its own."""

    def __init__(self, code: int, problem: str) -> None:
        super().__init__(problem)
        self.code = code


class Link:
    """A connection and those who wait for answers on it."""

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
        self.is_lost = False
        self.denied: str | None = None

    @classmethod
    async def connect(cls, servers: list[str], **options: Any) -> Link:
        """Connect to the first of these servers that answers."""
        problem: Exception = OSError("no server is known")
        for server in servers:
            client = Client()
            heard: list[Link] = []
            problems: list[Exception] = []

            async def closed(heard: list[Link] = heard) -> None:
                for link in heard:
                    link.break_off()

            async def failed(error: Exception, heard: list[Link] = heard, problems: list[Exception] = problems) -> None:
                problems.append(error)
                for link in heard:
                    link.complain(str(error))

            try:
                async with asyncio.timeout(CONNECT_S):
                    await client.connect(
                        servers=[server],
                        allow_reconnect=False,
                        max_reconnect_attempts=1,
                        reconnect_time_wait=0,
                        connect_timeout=CONNECT_S,
                        ping_interval=PING_S,
                        closed_cb=closed,
                        error_cb=failed,
                        **options,
                    )
            except Exception as error:
                problem = next((one for one in problems if isinstance(one, OSError)), error)
                await _discard(client)
                continue
            except BaseException:
                await _discard(client)
                raise
            link = cls(client)
            heard.append(link)
            link.open()
            return link
        raise problem

    @property
    def facts(self) -> dict[str, Any]:
        """What the server said of itself."""
        found: dict[str, Any] = self._client._server_info
        return found

    @property
    def servers(self) -> list[str]:
        """All servers that are known by now."""
        return [server.geturl() for server in self._client.servers]

    def open(self) -> None:
        """Listen to everything that is addressed to us."""
        self._client._ps = _Parser(self._client, self._heard)
        self._write(b"SUB " + self._inbox + b"* 1\r\n")

    # Asking -------------------------------------------------------------------

    def ask(
        self, subject: str, body: bytes = b"", headers: bytes = b"", *, wait_s: float | None = None
    ) -> asyncio.Future[tuple[bytes, bytes]]:
        """Send a request. What comes is the answer's headers and body, or `LinkLost`, or `Silent`."""
        answer: asyncio.Future[tuple[bytes, bytes]] = self._loop.create_future()
        if self.is_lost:
            answer.set_exception(LinkLost())
            return answer
        token = b"%x" % next(self._tokens)
        self._waiting[token] = (answer, self._loop.time() + (wait_s or REQUEST_S), subject)
        if self._ticker is None:
            self._ticker = self._loop.call_later(TICK_S, self._tick)
        self.tell(subject, body, headers, self._inbox + token)
        return answer

    def tell(self, subject: str, body: bytes = b"", headers: bytes = b"", reply: bytes = b"") -> None:
        """Send a message that is not answered, or whose answer goes elsewhere."""
        if headers:
            size = len(headers)
            line = b"HPUB %b %b %d %d\r\n" % (subject.encode(), reply, size, size + len(body))
            self._write(b"".join((line, headers, body, b"\r\n")))
        else:
            self._write(b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), reply, len(body), body))

    def listen(self, handler: Handler) -> tuple[str, bytes]:
        """Have messages handed to a function. Returns the subject that they are to be sent to, and its number."""
        number = b"%d" % next(self._numbers)
        # What a consumer delivers keeps its own subject, so it takes a subscription to tell whose it is. It is a
        # word longer than those of answers: among them, a key might be taken for the name of one.
        subject = b"%bw.%b" % (self._inbox, number)
        self._handlers[number] = handler
        self._write(b"SUB %b %b\r\n" % (subject, number))
        return subject.decode(), number

    def forget(self, number: bytes) -> None:
        """Hand no more messages to that function."""
        if self._handlers.pop(number, None) is not None:
            self._write(b"UNSUB %b\r\n" % number)

    # The line -----------------------------------------------------------------

    def _write(self, frame: bytes) -> None:
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(frame)

    def _flush(self) -> None:
        frames, self._out = self._out, []
        if not self.is_lost:
            # The driver's own flush would copy all this through a queue and a task.
            self._client._transport.write(b"".join(frames))

    def _heard(self, words: list[bytes], reply: bytes, headers: bytes, body: bytes) -> None:
        _, subject, number, *_ = words
        if number == b"1":
            waiting = self._waiting.pop(subject[len(self._inbox) :], None)
            if waiting is not None and not waiting[0].done():
                waiting[0].set_result((headers, body))
        elif number in self._handlers:
            self._handlers[number](subject, reply, headers, body)

    def _tick(self) -> None:
        """Tell those who have waited too long. All wait equally long, so the oldest come first."""
        if self._client.is_closed:
            # The driver gave the line up, and says so only when it has got rid of what was not sent yet.
            self.break_off()
            return
        now = self._loop.time()
        late: list[bytes] = []
        for token, (answer, until, _) in self._waiting.items():
            if until <= now or answer.cancelled():
                late.append(token)
        for token in late:
            answer = self._waiting.pop(token)[0]
            if not answer.done():
                answer.set_exception(Silent())
        self._ticker = self._loop.call_later(TICK_S, self._tick) if self._waiting else None

    def complain(self, problem: str) -> None:
        """Take what the server says of no request in particular: which subject was forbidden."""
        forbidden = _FORBIDDEN.search(problem)
        if forbidden is None:
            return
        self.denied = forbidden[0]
        for token, (answer, _, subject) in list(self._waiting.items()):
            # The server tells it in small letters.
            if subject.lower() == forbidden[1].lower() or "subscription" in problem:
                del self._waiting[token]
                if not answer.done():
                    answer.set_exception(PermissionDenied(f"NATS: {forbidden[0]}"))

    def break_off(self) -> None:
        """Be lost, and tell whoever waits."""
        if self.is_lost:
            return
        self.is_lost = True
        if self._ticker is not None:
            self._ticker.cancel()
        waiting, self._waiting = self._waiting, {}
        for answer, _, _ in waiting.values():
            if not answer.done():
                answer.set_exception(LinkLost())
        self._handlers.clear()

    async def close(self) -> None:
        """Let go of the connection."""
        self.break_off()
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
            # What a server that stands still does not read would keep the socket open.
            transport._io_writer.transport.abort()


class _Parser(Parser):
    """Takes messages apart for us, and leaves all else to the driver."""

    def __init__(self, client: Any, heard: Callable[[list[bytes], bytes, bytes, bytes], None]) -> None:
        self._heard = heard
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
        at, end, heard = 0, len(data), self._heard
        needed = 0
        while at < end:
            line = data.find(b"\r\n", at)
            if line < 0:
                break
            words = data[at:line].split()
            kind = words[0] if words else b""
            if kind == b"HMSG":
                start = line + 2
                body, stop = start + int(words[-2]), start + int(words[-1])
                if stop + 2 > end:
                    needed = stop + 2 - at
                    break
                heard(words, words[3] if len(words) == 6 else b"", data[start:body], data[body:stop])
                at = stop + 2
            elif kind == b"MSG":
                start = line + 2
                stop = start + int(words[-1])
                if stop + 2 > end:
                    needed = stop + 2 - at
                    break
                heard(words, words[3] if len(words) == 5 else b"", b"", data[start:stop])
                at = stop + 2
            else:
                await super().parse(data[at : line + 2])
                at = line + 2
        rest = data[at:]
        self._kept = [rest] if rest else []
        self._kept_bytes, self._needed_bytes = len(rest), needed
