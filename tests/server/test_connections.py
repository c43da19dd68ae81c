"""The bounds of HTTP connections, with small ones: each is met, and said once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
import uvicorn

from limpet.server.connections import Bounds, Connections, JoiningTransport
from tests.server.http_support import until

PATIENCE_S = 120.0
LONG_S = 600.0
PATIENT = Bounds(head_s=LONG_S, body_s=LONG_S, idle_s=LONG_S, body_bytes_per_s=1.0)
"""Nothing is late within a test, so that only what a test makes short can end a connection."""


class Application:
    """Answers with how much it was sent. What is under /held waits until it is let go."""

    def __init__(self) -> None:
        self.let_go = asyncio.Event()
        self.running = 0
        self.left = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while scope["path"] != "/unread":
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left += 1
                return
            body += message["body"]
            if not message["more_body"]:
                break
        if scope["path"] == "/held":
            self.running += 1
            await self.let_go.wait()
        text = str(len(body)).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(text))]})
        await send({"type": "http.response.body", "body": text})


class Served:
    def __init__(self, connections: Connections, application: Application, port: int) -> None:
        self.connections, self.application, self.port = connections, application, port
        self.lines: list[Line] = []

    async def connect(self, sent: bytes = b"") -> Line:
        line = Line(*await asyncio.open_connection("127.0.0.1", self.port, limit=1_000_000))
        self.lines.append(line)
        line.send(sent)
        return line


class Line:
    """A connection as a caller has it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, sent: bytes) -> None:
        self.writer.write(sent)

    async def status(self) -> int:
        """The status of the next answer."""
        async with asyncio.timeout(PATIENCE_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
            await self.reader.readexactly(int(lines[b"content-length"]))
        return int(head.split()[1])

    async def is_closed(self) -> bool:
        """Wait until it is, by its end or by a reset."""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE_S):
                await self.reader.read()
        return True


@contextlib.asynccontextmanager
async def serve(bounds: Bounds) -> AsyncIterator[Served]:
    connections, application = Connections(bounds), Application()
    config = uvicorn.Config(
        application,
        http=cast(Any, connections.make),
        log_config=None,
        lifespan="off",
        ws="none",
        timeout_keep_alive=int(LONG_S),
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.ensure_future(server._serve([listener]))
        looking = asyncio.ensure_future(connections.check_deadlines())
        await until(lambda: server.started)
        served = Served(connections, application, listener.getsockname()[1])
        try:
            yield served
        finally:
            application.let_go.set()
            for line in served.lines:
                line.writer.close()
            await asyncio.gather(*(line.writer.wait_closed() for line in served.lines), return_exceptions=True)
            looking.cancel()
            server.force_exit = server.should_exit = True
            await asyncio.gather(serving, looking, return_exceptions=True)


GET = b"GET /a HTTP/1.1\r\nHost: a\r\n\r\n"
HALF = b"GET /a HTTP/1.1\r\nHost"


def put(size: int, path: str = "/a") -> bytes:
    return b"PUT %s HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % (path.encode(), size)


# Sizes ------------------------------------------------------------------------


async def test_headers_have_a_size_and_a_number() -> None:
    async with serve(PATIENT) as served:
        fits = await served.connect(b"GET /a HTTP/1.1\r\nX-Long: %s\r\n\r\n" % (b"x" * 60_000))
        assert await fits.status() == 200
        fits.send(b"GET /a HTTP/1.1\r\n%s\r\n" % (b"A: b\r\n" * 100))
        assert await fits.status() == 200

        for head in (
            b"X-Long: %s\r\n\r\n" % (b"x" * 70_000),
            b"A: b\r\n" * 101 + b"\r\n",
            (b"X: %s\r\n" % (b"x" * 1_000)) * 70 + b"\r\n",
        ):
            line = await served.connect(b"GET /a HTTP/1.1\r\n" + head)
            assert await line.status() == 431
            assert await line.is_closed()
        line = await served.connect(b"GET /%s HTTP/1.1\r\nA: b\r\n" % (b"x" * 70_000))
        assert await line.status() == 431


@pytest.mark.parametrize(
    "beginning",
    [
        b"GET /",
        b"GET /a HTTP/1.1\r\nX-Endless: ",
        b"PUT /unread HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-Trailer: ",
        b"PUT /unread HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1;endless=",
    ],
    ids=["url", "header", "trailer", "chunk extension"],
)
async def test_what_never_ends_is_cut_off(beginning: bytes) -> None:
    """None of these reaches the application, so that no part above could count it."""
    async with serve(PATIENT) as served:
        line = await served.connect(beginning)
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 100_000_000:
                line.send(b"x" * 50_000)
                await line.writer.drain()
                sent += 50_000
        assert sent < 100_000_000
        assert await line.is_closed()


async def test_a_body_may_be_larger_than_headers() -> None:
    async with serve(PATIENT) as served:
        line = await served.connect(put(3_000_000) + b"x" * 3_000_000)
        assert await line.status() == 200
        chunks = b"".join(b"%x\r\n%s\r\n" % (1, b"x") for _ in range(200_000))
        line.send(b"PUT /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
        assert await line.status() == 200


async def test_what_is_not_http_is_refused() -> None:
    async with serve(PATIENT) as served:
        line = await served.connect(b"\x16\x03\x01 hello\r\n\r\n")
        assert await line.status() == 400
        assert await line.is_closed()


async def test_a_wish_to_upgrade_is_passed_over() -> None:
    async with serve(PATIENT) as served:
        line = await served.connect(b"GET /a HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        assert await line.status() == 200


# Times ------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", HALF, b"\r\n"], ids=["nothing", "half a request", "an empty line"])
async def test_headers_that_do_not_come_end_a_connection(sent: bytes) -> None:
    async with serve(PATIENT._replace(head_s=0.1)) as served:
        line = await served.connect(sent)
        assert await line.status() == 408
        assert await line.is_closed()


async def test_headers_that_trickle_end_a_connection() -> None:
    """Each byte is news, and none of them is a reason to wait for longer."""
    async with serve(PATIENT._replace(head_s=0.5)) as served:
        line = await served.connect(HALF)
        closed = asyncio.ensure_future(line.is_closed())
        while not closed.done():
            line.send(b"x")
            await asyncio.sleep(0.02)
        assert len(served.connections) == 0


async def test_a_body_that_trickles_ends_a_connection() -> None:
    async with serve(PATIENT._replace(body_s=0.5, body_bytes_per_s=1e9)) as served:
        line = await served.connect(put(1_000_000))
        answer = asyncio.ensure_future(line.status())
        while not answer.done():
            line.send(b"x")
            await asyncio.sleep(0.02)
        assert answer.result() == 408
        assert await line.is_closed()
        await until(lambda: served.application.left == 1)


@pytest.mark.slow
async def test_a_slow_body_that_gets_on_has_more_time() -> None:
    async with serve(PATIENT._replace(body_s=0.1, body_bytes_per_s=1.0)) as served:
        line = await served.connect(put(200) + b"x" * 100)
        await asyncio.sleep(2.5)
        line.send(b"x" * 100)
        assert await line.status() == 200


async def test_a_body_that_nobody_wants_ends_a_connection_too() -> None:
    """It was answered before it had come, and then it never comes, or never ends."""
    async with serve(PATIENT._replace(body_s=0.5)) as served:
        line = await served.connect(put(1_000_000_000, "/unread"))
        assert await line.status() == 200
        closed = asyncio.ensure_future(line.is_closed())
        while not closed.done():
            with contextlib.suppress(ConnectionError):
                line.send(b"x" * 10_000)
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("sent", [b"", b"\r\n"], ids=["nothing", "an empty line"])
async def test_a_connection_that_was_answered_is_not_kept_for_ever(sent: bytes) -> None:
    async with serve(PATIENT._replace(idle_s=0.1)) as served:
        line = await served.connect(GET)
        assert await line.status() == 200
        line.send(sent)
        assert await line.is_closed()


@pytest.mark.slow
async def test_an_answer_may_take_as_long_as_it_takes() -> None:
    async with serve(Bounds(head_s=0.1, body_s=0.1, idle_s=0.1)) as served:
        line = await served.connect(b"GET /held HTTP/1.1\r\nHost: a\r\n\r\n")
        await until(lambda: served.application.running == 1)
        await asyncio.sleep(2.5)
        served.application.let_go.set()
        assert await line.status() == 200


async def test_a_late_request_is_not_told_in_place_of_the_answer_to_an_earlier_one() -> None:
    async with serve(PATIENT._replace(head_s=0.1)) as served:
        line = await served.connect(b"GET /held HTTP/1.1\r\nHost: a\r\n\r\n" + HALF)
        async with asyncio.timeout(PATIENCE_S):
            assert await line.reader.read() == b""


@pytest.mark.slow
async def test_requests_that_come_at_once_are_answered_in_turn() -> None:
    async with serve(PATIENT._replace(head_s=5.0, idle_s=0.1)) as served:
        line = await served.connect(b"GET /held HTTP/1.1\r\nHost: a\r\n\r\n" + put(3) + b"abc" + GET)
        await until(lambda: served.application.running == 1)
        await asyncio.sleep(2.5)
        served.application.let_go.set()
        assert [await line.status() for _ in range(3)] == [200, 200, 200]


# Numbers ----------------------------------------------------------------------


async def test_half_requests_make_room_for_whole_ones(caplog: pytest.LogCaptureFixture) -> None:
    async with serve(PATIENT._replace(connections=10)) as served:
        idle = await served.connect(GET)
        assert await idle.status() == 200
        busy = await served.connect(b"GET /held HTTP/1.1\r\nHost: a\r\n\r\n")
        await until(lambda: served.application.running == 1)
        with caplog.at_level(logging.WARNING, "limpet.http"):
            half = [await served.connect(HALF) for _ in range(50)]
            late = await served.connect(GET)
            assert await late.status() == 200
        assert len(served.connections) <= 10
        for line in half[:40]:
            assert await line.is_closed()

        served.application.let_go.set()
        assert await busy.status() == 200
        idle.send(GET)
        assert await idle.status() == 200

    (said,) = [record.getMessage() for record in caplog.records if "make room" in record.getMessage()]
    assert "127.0.0.1" in said


async def test_when_all_are_being_answered_another_is_refused() -> None:
    async with serve(PATIENT._replace(connections=3)) as served:
        busy = [await served.connect(b"GET /held HTTP/1.1\r\nHost: a\r\n\r\n") for _ in range(3)]
        await until(lambda: served.application.running == 3)

        late = await served.connect()
        assert await late.status() == 503
        assert await late.is_closed()

        served.application.let_go.set()
        assert [await line.status() for line in busy] == [200, 200, 200]
        again = await served.connect(GET)
        assert await again.status() == 200


async def test_the_log_says_what_happened_once_and_then_in_a_sum(caplog: pytest.LogCaptureFixture) -> None:
    async with serve(PATIENT) as served:
        with caplog.at_level(logging.WARNING, "limpet.http"):
            for _ in range(5):
                assert await (await served.connect(b"nonsense\r\n\r\n")).status() == 400
            assert len(caplog.records) == 1
            served.connections.sum_up()
        assert len(caplog.records) == 2
        assert "4 more" in caplog.records[1].getMessage()


# Joining ----------------------------------------------------------------------


class Written(asyncio.Transport):
    """A transport that keeps what it is given to write."""

    def __init__(self) -> None:
        super().__init__()
        self.packets: list[bytes] = []
        self.is_open = True

    def write(self, data: Any) -> None:
        self.packets.append(bytes(data))

    def is_closing(self) -> bool:
        return not self.is_open

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def close(self) -> None:
        self.is_open = False

    def abort(self) -> None:
        self.is_open = False


async def test_what_is_written_in_one_turn_is_sent_as_one() -> None:
    """Head and body of a response, and responses to requests that came together."""
    below = Written()
    joining = JoiningTransport(below, asyncio.get_running_loop())

    joining.write(b"head ")
    joining.write(b"body")
    assert below.packets == []
    await asyncio.sleep(0)
    joining.write(b"another")
    await asyncio.sleep(0)

    assert below.packets == [b"head body", b"another"]


async def test_what_is_large_is_not_held_until_the_turn_is_over() -> None:
    """A stream that never waits would fill the memory, and would not notice a caller who does not read."""
    below = Written()
    joining = JoiningTransport(below, asyncio.get_running_loop())
    for _ in range(10):
        joining.write(bytes(20_000))

    assert [len(packet) for packet in below.packets] == [80_000, 80_000]
    await asyncio.sleep(0)
    assert sum(map(len, below.packets)) == 200_000


async def test_a_close_sends_what_is_left_and_an_abort_does_not() -> None:
    closed, aborted, lost = Written(), Written(), Written()
    transports = [JoiningTransport(below, asyncio.get_running_loop()) for below in (closed, aborted, lost)]
    for one in transports:
        one.write(b"last words")

    transports[0].close()
    transports[1].abort()
    lost.is_open = False
    await asyncio.sleep(0)

    assert (closed.packets, aborted.packets, lost.packets) == ([b"last words"], [], [])
    assert not closed.is_open
    assert not aborted.is_open
