"""A server holds out against callers that mean harm, or that are broken: through a real ``limpet serve``."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

import limpet
from limpet.server.service import _listen
from limpet.server.settings import ListenAddress
from tests.server.test_serve import HTTP, Running, serving

PATIENCE_S = 120.0
EVERYWHERE = "0.0.0.0:0"  # For a moment, and without a name that anybody knows.


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/state.db"


@pytest.fixture
def server(url: str) -> Iterator[Running]:
    with serving(url, *HTTP) as running:
        yield running


def connect(server: Running) -> socket.socket:
    place = urlsplit(server.http)
    assert place.hostname is not None
    assert place.port is not None
    return socket.create_connection((place.hostname, place.port), timeout=PATIENCE_S)


def status_of(connection: socket.socket) -> int:
    """The status of the next answer on a connection."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    response.read()
    return response.status


# Names ------------------------------------------------------------------------


def test_a_page_that_rebinds_its_name_to_this_machine_is_refused(server: Running) -> None:
    """To the browser such a page is of the same origin, so that only the name in Host gives it away."""
    rebound = {"Host": "evil.example", "Origin": "http://evil.example", "Sec-Fetch-Site": "same-origin"}
    with httpx2.Client(base_url=server.http) as client:
        written = client.put("/v1/default/entries/theme", json="owned", headers=rebound)
        assert (written.status_code, written.json()["code"]) == (421, "misdirected")
        assert "--host evil.example" in written.json()["detail"]
        assert client.get("/v1/default/entries/theme", headers=rebound).status_code == 421
        assert client.get("/healthz", headers=rebound).status_code == 421
        assert client.get("/v1/engine", headers=rebound).status_code == 421
        assert client.get("/v1/default/entries/theme").status_code == 404


def test_names_of_this_machine_are_answered_to_and_others_when_given(url: str) -> None:
    with (
        serving(url, *HTTP, "--host", "Limpet.Internal", LIMPET_SERVE_AUTH="none") as server,
        httpx2.Client(base_url=server.http) as client,
    ):
        for host in ("localhost", "LOCALHOST:1", "127.0.0.1:80", "[::1]:8080", "limpet.internal:8080", "localhost."):
            assert client.get("/readyz", headers={"Host": host}).status_code == 200, host
        for host in ("localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", "internal"):
            assert client.get("/readyz", headers={"Host": host}).status_code == 421, host


def test_a_request_without_a_name_is_refused(server: Running) -> None:
    with connect(server) as connection:
        connection.sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
        assert status_of(connection) == 421


@pytest.mark.parametrize(
    ("options", "answered", "refused"),
    [
        (("--insecure",), ("192.0.2.1:80", "[2001:db8::1]", "localhost"), ("evil.example",)),
        (("--insecure", "--host", "limpet"), ("192.0.2.1:80", "limpet:8080"), ("evil.example",)),
        (("--auth", "tokens"), ("any.example", "192.0.2.1"), ()),
        (("--auth", "tokens", "--host", "limpet"), ("limpet", "127.0.0.1"), ("any.example",)),
    ],
)
def test_which_names_a_server_for_other_machines_answers_to(
    url: str, options: tuple[str, ...], answered: tuple[str, ...], refused: tuple[str, ...]
) -> None:
    """Addresses cannot be rebound. A name can, and without tokens that would let any page in."""
    with (
        serving(url, "--http", EVERYWHERE, *options) as server,
        httpx2.Client(base_url=f"http://127.0.0.1:{urlsplit(server.http).port}") as client,
    ):
        for host in answered:
            assert client.get("/healthz", headers={"Host": host}).status_code == 200, host
        for host in refused:
            assert client.get("/healthz", headers={"Host": host}).status_code == 421, host


# Connections ------------------------------------------------------------------


def resident_bytes(server: Running) -> int:
    pages = Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


def test_half_requests_keep_no_caller_out(url: str) -> None:
    """More of them than there is room, and others are answered all the same; the log has one line about it."""
    with serving(url, *HTTP, "--connections", "60") as server, contextlib.ExitStack() as held:
        lines = [held.enter_context(connect(server)) for _ in range(200)]
        for line in lines[::2]:
            with contextlib.suppress(ConnectionError):
                line.sendall(b"PUT /v1/default/entries/a HTTP/1.1\r\nHost: localhost\r\nX-")
        for line in lines[1::2]:
            with contextlib.suppress(ConnectionError):
                line.sendall(b"PUT /v1/default/entries/a HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n1")

        for number in range(20):
            with httpx2.Client(base_url=server.http, timeout=PATIENCE_S) as client:
                assert client.put(f"/v1/default/entries/{number}", json=number).status_code == 201
                assert client.get("/healthz").status_code == 200

        server.process.terminate()
        code, said = server.ended()
    assert code == 0
    assert "Traceback" not in said
    assert said.count("was closed to make room") == 1
    assert "more connections were closed to make room" in said


def test_watches_leave_room_for_others(url: str) -> None:
    with (
        serving(url, *HTTP, "--connections", "8") as server,
        httpx2.Client(base_url=server.http, timeout=PATIENCE_S) as client,
        contextlib.ExitStack() as watches,
    ):
        for _ in range(6):
            opened = watches.enter_context(client.stream("GET", "/v1/default/watch", params={"pattern": "*"}))
            assert opened.status_code == 200
        assert client.get("/v1/default/watch", params={"pattern": "*"}).status_code == 429
        assert client.put("/v1/default/entries/a", json=1).status_code == 201


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_endless_headers_take_no_memory(server: Running) -> None:
    before = resident_bytes(server)
    sent = 0
    with connect(server) as line, contextlib.suppress(ConnectionError):
        line.sendall(b"GET /readyz HTTP/1.1\r\n")
        while sent < 200_000_000:
            line.sendall(b"X-Endless: " + b"x" * 100_000 + b"\r\n")
            sent += 100_000

    assert sent < 200_000_000
    assert resident_bytes(server) - before < 50_000_000
    with httpx2.Client(base_url=server.http) as client:
        assert client.get("/readyz").status_code == 200


def test_who_has_no_token_is_refused_before_a_body_is_read(url: str) -> None:
    with serving(url, *HTTP, "--auth", "tokens") as server:
        for path in ("/v1/default/entries/a", "/v1/default/engine/commit", "/v1/default/batch"):
            method = b"PUT" if "entries" in path else b"POST"
            with connect(server) as line:
                line.sendall(
                    b"%s %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                    b"Content-Length: 4000000\r\n\r\n" % (method, path.encode())
                )
                assert status_of(line) == 401, path


def test_as_many_files_are_opened_as_the_system_allows(url: str) -> None:
    """The soft limit is low by habit. What a server may not open, it does not give to connections."""
    words = [sys.executable, "-m", "limpet", "--url", url, "serve", *HTTP]
    low = ["sh", "-c", 'ulimit -S -n 100 && exec "$@"', "sh", *words]
    lowest = ["sh", "-c", 'ulimit -S -n 300 && ulimit -H -n 300 && exec "$@"', "sh", *words]
    for command, expected in ((low, None), (lowest, "up to 172 connections and not 1000")):
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            try:
                running = Running(process, faces=1)
                assert (expected is None) == ("HTTP: up to" not in "".join(running.said))
                assert expected is None or expected in "".join(running.said)
            finally:
                process.kill()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system has no such option")
async def test_a_caller_that_takes_nothing_of_its_answer_is_left_by_the_system() -> None:
    accepted: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()
    with _listen(ListenAddress("127.0.0.1", 0)) as listening:
        async with await asyncio.start_server(lambda _, writer: accepted.set_result(writer), sock=listening):
            _, writer = await asyncio.open_connection(*listening.getsockname())
            served = await accepted

            option = served.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert option == 30_000

            for end in (writer, served):
                end.close()


# Answers ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_large_scans_side_by_side_take_little_memory(url: str) -> None:
    """150 MB are stored. A caller that lists them gets pages, and the server never holds more than a few of them."""
    with limpet.sync.open(url) as store:
        for number in range(150):
            store.put(f"large/{number:03}", "x" * 990_000)

    def read_all(client: httpx2.Client) -> list[str]:
        found: list[str] = []
        parameters: dict[str, str] = {"prefix": "large/", "limit": "10000"}
        while True:
            answer = client.get("/v1/default/scan", params=parameters)
            assert len(answer.content) < 6_000_000
            page = answer.json()
            found += [entry["key"] for entry in page["entries"]]
            if page["cursor"] is None:
                return found
            parameters["after"] = page["cursor"]

    with serving(url, *HTTP) as server, httpx2.Client(base_url=server.http, timeout=PATIENCE_S) as client:
        client.get("/v1/default/scan", params={"limit": "1"}).raise_for_status()
        before = resident_bytes(server)
        with ThreadPoolExecutor(4) as callers:
            reading = [callers.submit(read_all, client) for _ in range(4)]
            highest = before
            while not all(one.done() for one in reading):
                assert client.get("/healthz").status_code == 200
                highest = max(highest, resident_bytes(server))
            assert [len(one.result()) for one in reading] == [150] * 4

    assert highest - before < 100_000_000


def test_a_reply_that_is_not_read_is_no_traceback_when_the_server_ends(url: str) -> None:
    with limpet.sync.open(url) as store:
        for number in range(10):
            store.put(f"large/{number}", "x" * 990_000)

    with serving(url, *HTTP) as server, contextlib.ExitStack() as callers:
        for _ in range(3):
            caller = callers.enter_context(connect(server))
            # More than the system keeps for a caller that does not read.
            caller.sendall(b"GET /v1/default/scan?prefix=large/ HTTP/1.1\r\nHost: localhost\r\n\r\n" * 8)
            assert caller.recv(1) == b"H"
        server.process.terminate()
        code, said = server.ended()

    assert code == 0
    assert "Traceback" not in said
    assert said.count("Server stopped") == 1
