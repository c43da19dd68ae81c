"""Two servers between a client and PostgreSQL, each on a loop in its own thread.

`Proxy` passes everything on, until a test injects a fault into a certain request: lose its reply, close
the connection before it, delay it, or keep it and deliver it long after the client has gone. It reads
just enough of the protocol to separate requests: each ends with a Sync or is a simple query.

`Pooler` shares server connections as poolers in transaction mode do: after a transaction, the next one
of the same client runs on another connection, without any session state.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import struct
import threading
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal, Self
from urllib.parse import urlsplit, urlunsplit

PATIENCE_S = 120.0

_SSL_REQUEST = 80877103
_CANCEL_REQUEST = 80877102

Fault = Literal["lose", "lose commit", "cut", "delay", "keep"]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Server:
    """A listening socket on a loop in its own thread."""

    def __init__(self, url: str) -> None:
        self._parts = urlsplit(url)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def url(self) -> str:
        """The URL of PostgreSQL through this server."""
        port: int = self._listening.sockets[0].getsockname()[1]
        return urlunsplit(self._parts._replace(netloc=f"{self._parts.username}@127.0.0.1:{port}"))

    def __enter__(self) -> Self:
        self._thread.start()
        self._listening: asyncio.Server = self._run(asyncio.start_server(self._accept, "127.0.0.1", 0))
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    async def _stop(self) -> None:
        self._listening.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._abort_all()

    async def _abort_all(self) -> None:
        for writer in list(self._writers):
            await self._abort(writer)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            await self._abort(writer)
            self._tasks.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise NotImplementedError

    async def _connect(self) -> Streams:
        assert self._parts.hostname is not None
        reader, writer = await asyncio.open_connection(self._parts.hostname, self._parts.port)
        self._writers.add(writer)
        return reader, writer

    async def _abort(self, writer: asyncio.StreamWriter) -> None:
        self._writers.discard(writer)
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    async def _startup(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """The startup message of a client. TLS is declined."""
        while True:
            head = await reader.readexactly(8)
            length, code = struct.unpack("!ii", head)
            rest = await reader.readexactly(length - 8)
            if code != _SSL_REQUEST:
                return head + rest
            writer.write(b"N")


async def _message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """The next message: its kind, and all of it."""
    head = await reader.readexactly(5)
    (length,) = struct.unpack("!i", head[1:])
    return head[:1], head + await reader.readexactly(length - 4)


async def _messages(reader: asyncio.StreamReader) -> AsyncIterator[tuple[bytes, bytes]]:
    with contextlib.suppress(asyncio.IncompleteReadError, OSError):
        while True:
            yield await _message(reader)


def _error_of(message: bytes) -> str:
    """The text of an ErrorResponse."""
    fields = message[5:].split(b"\0")
    return next(field[1:].decode() for field in fields if field[:1] == b"M")


@dataclass
class _Rule:
    """A fault for the n-th request from now that matches a pattern."""

    pattern: str
    fault: Fault
    left: int
    stays_down: bool
    met: threading.Event = field(default_factory=threading.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)
    kept: tuple[Streams, bytes] | None = None


class Proxy(_Server):
    """Passes requests on, and injects faults."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._rule: _Rule | None = None
        self._last: _Rule | None = None
        self._down = False
        self.faults = 0
        self.requests: list[str] = []
        # The size of all requests and replies that were passed on.
        self.passed_bytes = 0

    def fault(self, fault: Fault, pattern: str = "", *, nth: int = 1, stays_down: bool = False) -> None:
        """Inject a fault into the n-th request from now on that matches the pattern, and into no other.

        ``lose`` lets the server reply, then closes the connection without passing the reply on; ``lose commit`` waits
        for a reply after which no transaction is open. ``cut`` closes it
        without passing the request on. ``delay`` holds the request until `release`. ``keep`` closes the client's side
        and holds the request until `deliver`. With ``stays_down``, all other connections are closed too, and new ones
        refused, until `resume`.
        """
        self._rule = self._last = _Rule(pattern, fault, nth, stays_down)

    def await_fault(self) -> None:
        """Wait until the fault has happened."""
        assert self._last is not None
        assert self._last.met.wait(PATIENCE_S), f"no request matched {self._last.pattern!r}"

    @property
    def is_done(self) -> bool:
        """Whether the fault has happened."""
        return self._last is not None and self._last.met.is_set()

    def release(self) -> None:
        """Pass on the delayed request."""
        assert self._last is not None
        self._loop.call_soon_threadsafe(self._last.released.set)

    def deliver(self) -> str | None:
        """Pass on the kept request. Returns the server's error, or None if it succeeded."""
        return self._run(self._deliver())  # type: ignore[no-any-return]

    async def _deliver(self) -> str | None:
        assert self._last is not None
        assert self._last.kept is not None
        (reader, writer), request = self._last.kept
        writer.write(request)
        error = None
        async for kind, message in _messages(reader):
            if kind == b"E":
                error = _error_of(message)
            if kind == b"Z":
                break
        await self._abort(writer)
        return error

    def stop(self) -> None:
        """Close all connections, and refuse new ones, until `resume`."""
        self._down = True
        self._run(self._abort_all())

    def resume(self) -> None:
        """Accept connections again."""
        self._down = False

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._down:
            return
        first = await self._startup(reader, writer)
        server = await self._connect()
        server[1].write(first)
        if struct.unpack("!i", first[4:8])[0] == _CANCEL_REQUEST:
            await server[0].read()
            await self._abort(server[1])
            return
        proxied = _ProxiedConnection(self, (reader, writer), server)
        replies = asyncio.ensure_future(proxied.pass_replies())
        try:
            await proxied.pass_requests()
        finally:
            replies.cancel()
            await asyncio.gather(replies, return_exceptions=True)
            if not proxied.is_kept:
                await self._abort(server[1])

    def _report_fault(self) -> None:
        assert self._last is not None
        self._down = self._last.stays_down
        if self._down:
            for writer in self._writers:
                writer.transport.abort()
        self.faults += 1
        self._last.met.set()

    def _rule_for(self, statement: str) -> _Rule | None:
        self.requests.append(statement)
        rule = self._rule
        if rule is None or re.search(rule.pattern, statement) is None:
            return None
        rule.left -= 1
        if rule.left:
            return None
        self._rule = None
        return rule


class _ProxiedConnection:
    """One client's connection, and the server connection for it."""

    def __init__(self, proxy: Proxy, client: Streams, server: Streams) -> None:
        self._proxy = proxy
        self._client, self._server = client, server
        self._names: dict[bytes, str] = {}
        self._loses: _Rule | None = None
        self.is_kept = False

    async def pass_replies(self) -> None:
        kept = b""
        async for kind, message in _messages(self._server[0]):
            if self._loses is None:
                self._proxy.passed_bytes += len(message)
                self._client[1].write(message)
                continue
            kept += message
            if kind != b"Z":
                continue
            if self._loses.fault == "lose" or message.endswith(b"I"):
                self._proxy._report_fault()
                break
            # The transaction is still open: its end may be the next request.
            self._proxy._rule, self._loses = self._loses, None
            self._proxy._rule.left = 1
            self._client[1].write(kept)
            kept = b""
        await self._proxy._abort(self._client[1])

    async def pass_requests(self) -> None:
        request = b""
        statement = ""
        async for kind, message in _messages(self._client[0]):
            request += message
            body = message[5:]
            if kind == b"P":
                name, text = body.split(b"\0")[:2]
                self._names[name] = text.decode()
            elif kind == b"B":
                statement = self._names[body.split(b"\0")[1]]
            elif kind == b"Q":
                statement = body[:-1].decode()
            if kind not in b"SQHXp":
                continue
            rule = self._proxy._rule_for(statement) if statement and kind in b"SQ" else None
            if rule is not None and not await self._inject(rule, request):
                return
            self._proxy.passed_bytes += len(request)
            self._server[1].write(request)
            request, statement = b"", ""

    async def _inject(self, rule: _Rule, request: bytes) -> bool:
        """Inject the fault of a rule. Returns whether the request is still passed on."""
        if rule.fault in ("lose", "lose commit"):
            self._loses = rule
            return True
        if rule.fault == "keep":
            self.is_kept = True
            rule.kept = (self._server, request)
        self._proxy._report_fault()
        if rule.fault == "delay":
            await rule.released.wait()
            return True
        return False


class Pooler(_Server):
    """Shares two connections for each client, as poolers in transaction mode share all of theirs."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.transactions = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await self._startup(reader, writer)
        servers: list[Streams] = []
        for _ in range(2):
            servers.append(await self._connect())
            servers[-1][1].write(first)
            greeting = b""
            while not greeting.endswith(b"Z\0\0\0\5I"):
                greeting += (await _message(servers[-1][0]))[1]
        writer.write(greeting)
        is_over = asyncio.Event()

        async def pass_replies() -> None:
            while True:
                kind, message = await _message(servers[0][0])
                writer.write(message)
                if kind == b"Z":
                    if message.endswith(b"I"):
                        self.transactions += 1
                        await self._discard_state(servers[0])
                        servers.reverse()
                    is_over.set()

        replies = asyncio.ensure_future(pass_replies())
        try:
            async for kind, message in _messages(reader):
                if kind == b"X":
                    break
                servers[0][1].write(message)
                if kind in b"SQ":
                    await is_over.wait()
                    is_over.clear()
        finally:
            replies.cancel()
            await asyncio.gather(replies, return_exceptions=True)
            for _, server_writer in servers:
                await self._abort(server_writer)

    async def _discard_state(self, streams: Streams) -> None:
        text = b"DISCARD ALL\0"
        streams[1].write(b"Q" + struct.pack("!i", len(text) + 4) + text)
        while (await _message(streams[0]))[0] != b"Z":
            pass
