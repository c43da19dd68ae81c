"""A proxy between a client and its server that does something to one certain request.

It passes everything on, until a request has a pattern in it: then it loses the reply, or cuts the
line before the request arrives, or keeps the request and delivers it when the client has long gone.
It takes what it reads from a line at once for one request, so tests have one on a line at a time.
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
    """Runs on a thread of its own."""

    def __init__(self, url: str, commit: bytes, greet: Greet) -> None:
        """Stand before a server; ``commit`` tells a write by, ``greet`` says what a line for a kept one begins with."""
        self._server = urlsplit(url)
        self._commit = commit
        self._greet = greet
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._rule: tuple[Fault, bytes] | None = None
        self._after_s = 0.0
        self._kept: list[bytes] = []
        self._lines: set[asyncio.Task[None]] = set()
        self.is_done = False
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
        """Do this to the next request that has the pattern in it, and to no other. A lost reply is noticed later."""
        self.is_done = False
        self._rule = (fault, pattern or self._commit)
        self._after_s = after_s

    def move(self, url: str) -> None:
        """Stand before another server from now on."""
        self._server = urlsplit(url)

    def deliver(self) -> bytes:
        """Let the request that was kept arrive now, and return what the server says to it."""
        return bytes(self._do(self._deliver()))

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _listen(self) -> int:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._listener.sockets[0].getsockname()[1]
        return port

    async def _end(self) -> None:
        self._listener.close()
        for line in self._lines:
            line.cancel()
        await asyncio.gather(*self._lines, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._lines.add(task)
        far_reader, far_writer = await self._connect()
        replies = asyncio.create_task(_pass_on(far_reader, writer))
        try:
            while asked := await self._request(reader):
                rule = self._rule
                if rule is None or re.search(rule[1], asked) is None:
                    far_writer.write(asked)
                    continue
                self._rule, self.is_done = None, True
                if rule[0] == "keep":
                    self._kept.append(asked)
                elif rule[0] == "lose":
                    replies.cancel()
                    await asyncio.gather(replies, return_exceptions=True)
                    far_writer.write(asked)
                    await far_reader.read(2**16)
                    await asyncio.sleep(self._after_s)
                return
        finally:
            self._lines.discard(task)
            replies.cancel()
            for end in (writer, far_writer):
                with contextlib.suppress(Exception):
                    end.close()

    async def _request(self, reader: asyncio.StreamReader) -> bytes:
        """What comes next on a line; nothing at its end."""
        return await reader.read(2**24)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        assert self._server.port is not None
        return await asyncio.open_connection("127.0.0.1", self._server.port)

    async def _deliver(self) -> bytes:
        reader, writer = await self._connect()
        kept = self._kept.pop()
        await self._greet(reader, writer, kept)
        writer.write(kept)
        answer = await reader.read(2**16)
        writer.close()
        return answer


class HttpProxy(Proxy):
    """Before a server that speaks HTTP, whose requests come in several pieces."""

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
        while told := await reader.read(2**24):
            writer.write(told)
        writer.close()
