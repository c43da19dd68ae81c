"""The memory that a server uses, for many keys and under attack: ``./dev load --memory`` and ``--attack``.

The attacks need only access to the port: half requests on many connections, headers that never end, bodies that
trickle, and scans of everything at once. While they last, another caller must be answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from bench.run import ROOT, say

if TYPE_CHECKING:
    from bench.load import Board, Send

KEYS: Final = 100_000
VALUE: Final = "x" * 486
"""488 bytes of JSON."""

FILES: Final = 400
CONNECTIONS: Final = 500
HEADER_BYTES: Final = 400_000_000
LARGE: Final = 150
SCANS: Final = 4
HELD_S: Final = 35.0


def used_mb(pid: int) -> tuple[float, float]:
    """The private memory of a process, and its resident memory with the files that it maps."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    kb = {name: int(size) for name, size in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    return (kb["Private_Clean"] + kb["Private_Dirty"] - _mapped_kb(pid)) / 1024, kb["Rss"] / 1024


def _mapped_kb(pid: int) -> int:
    """Pages of a database file that only this process maps are counted as private, and are not its memory."""
    found, is_file = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_file = line.endswith(".db")
        elif is_file and line.startswith("Private_Clean"):
            found += int(line.split()[1])
    return found


async def memory(board: Board, send: Send, process: subprocess.Popen[str]) -> None:
    """Many keys of 50 characters and 488 bytes, stored by batches and listed, over NATS."""
    await _store(send, range(1))
    before = used_mb(process.pid)
    await _store(send, range(KEYS))
    stored = used_mb(process.pid)
    count, after = 0, None
    while True:
        parameters: dict[str, Any] = {"limit": 10_000} if after is None else {"limit": 10_000, "after": after}
        answer = await send("many-7", "list", parameters)
        count, after = count + answer["count"], answer["keys"][-1]
        if not answer["truncated"]:
            break
    listed = used_mb(process.pid)
    assert count == KEYS, count
    say(f"\nMemory for {KEYS:,} keys: {before[0]:.0f} MB private and {before[1]:.0f} MB resident before")
    board.at_most("private memory grows by, when stored", stored[0] - before[0], 50, "MB")
    board.at_most("private memory grows by, when listed", listed[0] - before[0], 50, "MB")
    board.at_most("resident memory grows by, when listed", listed[1] - before[1], 100, "MB")


async def _store(send: Send, numbers: range) -> None:
    async def some(few: range) -> None:
        writes = [{"op": "put", "key": f"player/{number:043}", "value": VALUE} for number in few]
        answer = await send("many-7", "batch", {"writes": writes})
        assert answer.get("success"), answer

    for first in range(0, len(numbers), 400):
        await asyncio.gather(
            *(some(numbers[one : one + 100]) for one in range(first, min(first + 400, len(numbers)), 100))
        )


# Under attack -------------------------------------------------------------------


async def attack(board: Board, store: str) -> None:
    """All attacks, one after the other, while another caller calls and the memory is measured."""
    # With fewer files than connections, as on many systems.
    words = ["sh", "-c", f'ulimit -n {FILES} && exec "$@"', "sh", sys.executable, "-m", "limpet", "--url", store]
    words += ["serve", "--http", "127.0.0.1:0", "--log-level", "warning"]
    process = await asyncio.create_subprocess_exec(*words, cwd=ROOT, stderr=subprocess.PIPE)
    assert process.stderr is not None
    try:
        while not (line := (await process.stderr.readline()).decode()).startswith("limpet: serving http at "):
            assert line, "the server did not start"
        logged = asyncio.ensure_future(process.stderr.read())
        address = urlsplit(line.split()[-1])
        server = _Server(address.hostname or "127.0.0.1", address.port or 80)
        for number in range(LARGE):
            assert await server.put(f"large/{number:03}", json.dumps("x" * 990_000).encode()) in (200, 201)
        for what, attacking in (
            (f"{CONNECTIONS} half requests", server.half_open(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-")),
            (f"{CONNECTIONS} trickling bodies", server.half_open(_head("PUT", "/v1/default/entries/a", 1_000) + b"1")),
            (f"{HEADER_BYTES // 1_000_000} MB of headers", server.endless_headers()),
            (f"{SCANS} scans of {LARGE} MB", server.scans()),
        ):
            say(f"\n{what}")
            before = used_mb(process.pid)[1]
            watched = _Watched(server, process.pid)
            async with watched, attacking as result:
                pass
            say(f"  {result}; {watched.answers} replies to another caller, the slowest after {watched.slowest_s:.2f} s")
            board.at_most("callers that were not answered", watched.failures, 0, "")
            board.at_most("resident memory grows by", watched.highest_mb - before, 100, "MB")
    finally:
        process.terminate()
    await process.wait()
    say(f"\nThe log\n{(await logged).decode()}")


class _Watched:
    """Calls the server and measures its memory, as long as an attack lasts."""

    def __init__(self, server: _Server, pid: int) -> None:
        self.answers = self.failures = 0
        self.slowest_s = self.highest_mb = 0.0
        self._server, self._pid = server, pid
        self._is_last = False

    async def __aenter__(self) -> None:
        self._task = asyncio.ensure_future(self._call())

    async def __aexit__(self, *_: object) -> None:
        # One more call, to check that the server still answers.
        self._is_last = True
        await self._task

    async def _call(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._is_last
            began = time.perf_counter()
            try:
                async with asyncio.timeout(10):
                    assert await self._server.put("other", b"1") in (200, 201)
                self.answers += 1
            except (OSError, TimeoutError, AssertionError, asyncio.IncompleteReadError):
                self.failures += 1
            self.slowest_s = max(self.slowest_s, time.perf_counter() - began)
            self.highest_mb = max(self.highest_mb, used_mb(self._pid)[1])
            await asyncio.sleep(0.05)


class _Server:
    """The server, by plain connections, so that an attack controls every byte."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)

    async def put(self, key: str, body: bytes) -> int:
        """Put a value on a new connection. Returns the status."""
        status, _ = await self._request(_head("PUT", f"/v1/default/entries/{key}", len(body)) + body)
        return status

    async def _request(self, request: bytes) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection(*self._address)
        try:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            size = re.search(rb"content-length: (\d+)", head.lower())
            assert size is not None
            return int(head.split()[1]), await reader.readexactly(int(size[1]))
        finally:
            writer.close()

    @contextlib.asynccontextmanager
    async def half_open(self, beginning: bytes) -> AsyncIterator[str]:
        """Many connections that never finish their request, and send a byte a second."""
        connections = [await asyncio.open_connection(*self._address) for _ in range(CONNECTIONS)]
        for _, writer in connections:
            writer.write(beginning)
        held: list[int] = []
        try:
            until = time.perf_counter() + HELD_S
            while time.perf_counter() < until:
                await asyncio.sleep(1)
                open_now = [writer for reader, writer in connections if not reader.at_eof() and not writer.is_closing()]
                for writer in open_now:
                    writer.write(b"1")
                held.append(len(open_now))
            yield f"the server held {max(held)} of them, after {HELD_S:.0f} s {held[-1]}"
        finally:
            for _, writer in connections:
                writer.close()

    @contextlib.asynccontextmanager
    async def endless_headers(self) -> AsyncIterator[str]:
        """One connection that sends headers as fast as it can."""
        _, writer = await asyncio.open_connection(*self._address)
        sent = 0
        with contextlib.suppress(ConnectionError):
            writer.write(b"GET /healthz HTTP/1.1\r\n")
            while sent < HEADER_BYTES:
                writer.write(b"X-Endless: " + b"x" * 100_000 + b"\r\n")
                await writer.drain()
                sent += 100_000
        writer.close()
        yield f"the server closed the connection after {sent / 1e6:.1f} MB at most"

    @contextlib.asynccontextmanager
    async def scans(self) -> AsyncIterator[str]:
        """Several callers that read everything, with the largest limit."""
        sizes = await asyncio.gather(*(self._scan() for _ in range(SCANS)))
        largest = max(max(each) for each in sizes)
        yield f"{sum(map(len, sizes))} pages, the largest of {largest / 1e6:.1f} MB"

    async def _scan(self) -> list[int]:
        sizes, after = [], ""
        while True:
            path = f"/v1/default/scan?prefix=large/&limit=10000{after}"
            _, body = await self._request(_head("GET", path, 0))
            sizes.append(len(body))
            page = json.loads(body)
            if page["cursor"] is None:
                return sizes
            after = f"&after={page['cursor']}"


def _head(method: str, path: str, size: int) -> bytes:
    kind = f"Content-Type: application/json\r\nContent-Length: {size}\r\n" if size else ""
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{kind}\r\n".encode()
