"""A proxy between a client and its server that does something to one certain request.

It passes everything on, until a request contains a pattern: then it loses the reply, or cuts the connection
before the request arrives, or keeps the request and delivers it long after the client has gone. It takes all
bytes of one read for one request, so tests have one request at a time under way on a connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Literal, Self
from urllib.parse import urlsplit, urlunsplit

Fault = Literal["lose", "cut", "keep"]
Greet = Callable[[asyncio.StreamReader, asyncio.StreamWriter, bytes], Awaitable[None]]


class Proxy:
    """A proxy, which runs on its own thread."""

    def __init__(self, url: str, commit: bytes, greet: Greet) -> None:
        """Proxy a server; ``commit`` is the pattern of a write, ``greet`` opens the connection for a kept one."""
        self._server = urlsplit(url)
        self._commit = commit
        self._greet = greet
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._rule: tuple[Fault, bytes] | None = None
        self._after_s = 0.0
        self._kept: list[bytes] = []
        self._connections: set[asyncio.Task[None]] = set()
        self.is_done = False
        self.faults = 0
        self.url = ""

    def __enter__(self) -> Self:
        self._thread.start()
        port = self._do(self._listen())
        self.url = urlunsplit(self._server._replace(netloc=f"127.0.0.1:{port}"))
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def fault(self, fault: Fault, pattern: bytes | None = None, *, after_s: float = 0.0) -> None:
        """Apply a fault to the next request that contains the pattern. ``after_s`` delays the end of the connection."""
        self.is_done = False
        self._rule = (fault, pattern or self._commit)
        self._after_s = after_s

    def move(self, url: str) -> None:
        """Pass on to another server from now on."""
        self._server = urlsplit(url)

    def deliver(self) -> bytes:
        """Deliver the request that was kept, and return the server's reply."""
        return bytes(self._do(self._deliver()))

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _listen(self) -> int:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._listener.sockets[0].getsockname()[1]
        return port

    async def _end(self) -> None:
        self._listener.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        far_reader, far_writer = await self._connect()
        replies = asyncio.create_task(_pass_on(far_reader, writer))
        try:
            while request := await self._request(reader):
                rule = self._rule
                if rule is None or re.search(rule[1], request) is None:
                    far_writer.write(request)
                    continue
                self._rule, self.is_done = None, True
                if rule[0] == "keep":
                    self._kept.append(request)
                elif rule[0] == "lose":
                    replies.cancel()
                    await asyncio.gather(replies, return_exceptions=True)
                    far_writer.write(request)
                    await far_reader.read(2**16)
                    await asyncio.sleep(self._after_s)
                self.faults += 1
                return
        finally:
            self._connections.discard(task)
            replies.cancel()
            for end in (writer, far_writer):
                with contextlib.suppress(Exception):
                    end.close()

    async def _request(self, reader: asyncio.StreamReader) -> bytes:
        """Read the next request of a connection; empty at its end."""
        return await reader.read(2**24)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        assert self._server.port is not None
        return await asyncio.open_connection("127.0.0.1", self._server.port)

    async def _deliver(self) -> bytes:
        reader, writer = await self._connect()
        kept = self._kept.pop()
        await self._greet(reader, writer, kept)
        writer.write(kept)
        reply = await reader.read(2**16)
        writer.close()
        return reply


class HttpProxy(Proxy):
    """A proxy for HTTP, where a request may come in several reads."""

    def __init__(self, url: str, commit: bytes = rb"/engine/commit ") -> None:
        async def greet(_: asyncio.StreamReader, __: asyncio.StreamWriter, ___: bytes) -> None:
            pass

        super().__init__(url, commit, greet)

    async def _request(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: (\d+)", head)
            return head + (await reader.readexactly(int(length[1])) if length else b"")
        except asyncio.IncompleteReadError:
            return b""


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while reply := await reader.read(2**24):
            writer.write(reply)
        writer.close()
