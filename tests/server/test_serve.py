"""``limpet serve`` as a process: it starts, serves HTTP and NATS, and stops at a signal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import nats
import pytest

import limpet
from limpet.server.service import _listen
from limpet.server.settings import ListenAddress
from tests.cli.support import Limpet

PATIENCE_S = 120.0


class Running:
    """A server that was started, and where it is."""

    def __init__(self, process: subprocess.Popen[str], faces: int) -> None:
        self.process = process
        self.addresses: dict[str, str] = {}
        assert process.stderr is not None
        self.said: list[str] = []
        while len(self.addresses) < faces and (line := process.stderr.readline()):
            self.said.append(line)
            if line.startswith("limpet: serving "):
                name, _, place = line.removeprefix("limpet: serving ").strip().partition(" at ")
                self.addresses[name] = place

    @property
    def http(self) -> str:
        return self.addresses["http"]

    def ended(self) -> tuple[int, str]:
        """How it ended, and what it said last."""
        _, complaints = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, complaints


@contextlib.contextmanager
def serving(url: str, *options: str, **environment: str) -> Iterator[Running]:
    words = [sys.executable, "-m", "limpet", "--url", url, "serve", *options]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}) as process:
        try:
            running = Running(process, faces=("--http" in options) + ("--nats" in options))
            assert running.addresses, "".join(running.said)
            yield running
        finally:
            process.kill()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/state.db"


HTTP = ("--http", "127.0.0.1:0")


def test_what_is_put_over_http_is_there_for_everybody(url: str) -> None:
    with serving(url, *HTTP) as server, httpx2.Client(base_url=server.http) as client:
        assert client.get("/readyz").status_code == 200
        assert client.put("/v1/default/entries/theme", json="dark").status_code == 201

        assert Limpet(url)("get", "theme").stdout == '"dark"\n'
        assert Limpet(server.http)("get", "theme").stdout == '"dark"\n'
        with limpet.sync.open(server.http) as store:
            assert store.add("visits") == 1


async def test_both_faces_serve_the_same_state(url: str) -> None:
    bus = os.environ["LIMPET_TEST_NATS"]
    with serving(url, *HTTP, "--nats", bus, "--prefix", f"both{os.getpid()}.kv") as server:
        connection = await nats.connect(bus)
        kv = limpet.PluginClient(connection, "trivia", prefix=f"both{os.getpid()}.kv", timeout=60.0).kv
        await kv.set("score", 7)

        async with httpx2.AsyncClient(base_url=server.http) as client:
            assert (await client.get("/v1/trivia/entries/score")).json() == 7
        await connection.close()


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_it_ends_with_streams_open(url: str, sign: signal.Signals) -> None:
    with (
        serving(url, *HTTP) as server,
        httpx2.Client(base_url=server.http, timeout=PATIENCE_S) as client,
        client.stream("GET", "/v1/default/watch", params={"pattern": "*"}) as stream,
    ):
        lines = stream.iter_lines()
        client.put("/v1/default/entries/a", json=1)
        assert any("put" in line for line in lines)

        server.process.send_signal(sign)
        # Within two seconds on a quiet machine. One that waited for its clients would never end.
        code, complaints = server.ended()

    assert code == 0
    assert "Server stopped" in complaints
    assert "Traceback" not in complaints


def test_a_write_that_was_answered_survives_a_kill(url: str) -> None:
    with serving(url, *HTTP) as server, httpx2.Client(base_url=server.http) as client:
        for number in range(50):
            client.put(f"/v1/default/entries/k{number}", json=number).raise_for_status()
        server.process.kill()
        server.process.wait()

    with limpet.sync.open(url) as store:
        assert [store.get(f"k{number}") for number in range(50)] == list(range(50))


def test_tokens_are_asked_for(url: str) -> None:
    made = Limpet(url).json("token", "create", "ci", "--namespace", "default", "--right", "read", "--right", "reveal")
    with limpet.sync.open(url) as store:
        store.put("theme", "dark")

    with serving(url, *HTTP, "--auth", "tokens") as server, httpx2.Client(base_url=server.http) as client:
        theme = "/v1/default/entries/theme"
        assert client.get(theme).status_code == 401
        client.headers["Authorization"] = f"Bearer {made['token']}"
        assert client.get(theme).json() == "dark"
        assert client.put(theme, json="light").status_code == 403
        assert client.get("/v1/other/entries/theme").status_code == 403


def test_it_only_reads_when_told_to(url: str) -> None:
    with limpet.sync.open(url) as store:
        store.put("theme", "dark")

    with serving(url, *HTTP, "--read-only") as server, httpx2.Client(base_url=server.http) as client:
        assert client.get("/v1/default/entries/theme").json() == "dark"
        assert client.put("/v1/default/entries/theme", json=1).status_code == 403


@pytest.mark.slow
def test_what_expired_while_nobody_served_is_swept(url: str) -> None:
    """A namespace that a server has written to is known to the next one."""
    with serving(url, *HTTP) as server, httpx2.Client(base_url=server.http) as client:
        client.put("/v1/trivia/entries/session", json=1, headers={"Limpet-TTL": "0.5"}).raise_for_status()
        server.process.kill()
        server.process.wait()

    with serving(url, *HTTP):
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until and not _is_swept(url):
            time.sleep(0.1)

    assert _is_swept(url)


def _is_swept(url: str) -> bool:
    with limpet.sync.open(url, namespace="trivia", sweep=False) as store:
        return "expire" in [change.op for change in store.history("session")]


def test_logs_are_documents_when_asked_for(url: str) -> None:
    with serving(url, *HTTP, "--log-form", "json", "--log-level", "debug") as server:
        with httpx2.Client(base_url=server.http) as client:
            client.put("/v1/default/entries/theme", json="hush-hush").raise_for_status()
        server.process.terminate()
        _, said = server.ended()

    documents: list[dict[str, Any]] = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert any(document.get("key") == "theme" for document in documents)
    assert "hush-hush" not in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "code", "problem"),
    [
        (("--http", "0.0.0.0:8080"), 7, "other machines"),
        (("--http", "nowhere"), 7, "HOST:PORT"),
        (("--http", "127.0.0.1:0", "--certificate", "a"), 7, "both"),
        (("--nats", "nats://127.0.0.1:1"), 6, "cannot be reached"),
        (("--config", "none.toml"), 7, "none.toml"),
        (("--http", "127.0.0.1:0", "--certificate", "none.crt", "--certificate-key", "none.key"), 7, "none.crt"),
    ],
)
def test_what_cannot_be_served_is_told_at_once(url: str, options: tuple[str, ...], code: int, problem: str) -> None:
    words = [sys.executable, "-m", "limpet", "--url", url, "serve", *options]

    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False)

    assert done.returncode == code
    assert problem in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
async def test_the_largest_group_of_commits_is_taken(url: str) -> None:
    """The engine says what one request may hold, and the server in front of it takes that."""
    with serving(url, *HTTP) as server:
        async with limpet.open(server.http) as store:
            large = "x" * 900_000
            await asyncio.gather(*(store.put(f"large/{number}", large) for number in range(7)))
            draft = store.batch()
            for number in range(7):
                draft.expect(f"large/{number}", limpet.equals(large))

            assert (await draft.put("done", 1).commit()).entries


def test_a_port_that_is_taken_is_told(url: str) -> None:
    with serving(url, *HTTP) as server:
        place = server.http.removeprefix("http://")
        done = subprocess.run(
            [sys.executable, "-m", "limpet", "--url", url, "serve", "--http", place],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    assert done.returncode == 7
    assert f"cannot listen at {place}" in done.stderr


async def test_an_answer_waits_for_no_acknowledgement() -> None:
    """Or the body of every answer would come 40 ms after its head, wherever the loop is asyncio's own."""
    accepted: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()
    with _listen(ListenAddress("127.0.0.1", 0)) as listening:
        async with await asyncio.start_server(lambda _, writer: accepted.set_result(writer), sock=listening):
            _, writer = await asyncio.open_connection(*listening.getsockname())
            served = await accepted

            assert served.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

            for end in (writer, served):
                end.close()


@pytest.mark.slow
async def test_two_servers_share_one_store(url: str) -> None:
    with serving(url, *HTTP) as one, serving(url, *HTTP) as other:
        async with httpx2.AsyncClient() as client:
            counted = await asyncio.gather(
                *(
                    client.post(f"{server.http}/v1/default/incr/visits", json={}, timeout=PATIENCE_S)
                    for server in (one, other)
                    for _ in range(25)
                )
            )

    assert sorted(answer.json()["value"] for answer in counted) == list(range(1, 51))
