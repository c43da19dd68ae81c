"""Watching over HTTP, behind a real server: resuming, slow clients, and the end of it all."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

import limpet
from limpet.server import events
from limpet.server.events import Streams
from limpet.server.http import streams_of
from tests.processes import ROOT as CHECKOUT
from tests.server.http_support import PATIENCE_S, Face, Scoped, face, in_thread, listening, until


class Received:
    """One message of a stream."""

    def __init__(self, lines: list[str]) -> None:
        fields = [line.partition(": ")[::2] for line in lines]
        self.comments = [text for name, text in fields if name == ""]
        named = {name: text for name, text in fields if name}
        self.id = named.get("id")
        self.event = named.get("event")
        self.retry = named.get("retry")
        self.data: Any = json.loads(named["data"]) if "data" in named else None


class Stream:
    """An open stream, read as a browser would."""

    def __init__(self, response: httpx2.Response) -> None:
        self.response = response
        self.last_id: str | None = None
        self._lines = response.aiter_lines()

    async def next(self) -> Received | None:
        """The next message, comments among them; None at the end."""
        lines: list[str] = []
        async with asyncio.timeout(PATIENCE_S):
            async for line in self._lines:
                if line:
                    lines.append(line)
                    continue
                received = Received(lines)
                self.last_id = received.id or self.last_id
                return received
        return None

    async def event(self) -> Received:
        """The next event."""
        while True:
            received = await self.next()
            assert received is not None, "the stream has ended"
            if received.event is not None:
                return received

    async def rest(self) -> list[Received]:
        """Everything until the end."""
        found = []
        while (received := await self.next()) is not None:
            found.append(received)
        return found


@pytest.fixture
async def made() -> AsyncIterator[Face]:
    async with face() as found:
        yield found


@pytest.fixture
async def http(made: Face) -> AsyncIterator[httpx2.AsyncClient]:
    async with listening(made) as url, client(url) as found:
        yield found


def client(url: str, token: str = "root") -> httpx2.AsyncClient:
    headers = {"Authorization": f"Bearer {token}"}
    return httpx2.AsyncClient(base_url=f"{url}/v1/shop/", headers=headers, timeout=PATIENCE_S, trust_env=False)


@contextlib.asynccontextmanager
async def watching(http: httpx2.AsyncClient, query: str = "", last: str | None = None) -> AsyncIterator[Stream]:
    """A stream whose watch has begun."""
    headers = {} if last is None else {"Last-Event-ID": last}
    async with http.stream("GET", f"watch{query}", headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        stream = Stream(response)
        opened = await stream.next()
        assert opened is not None
        assert opened.comments == ["watching"]
        yield stream


# What is sent -----------------------------------------------------------------


async def test_changes_come_as_they_happen(http: httpx2.AsyncClient) -> None:
    async with watching(http, "?pattern=game/*") as stream:
        assert stream.response.headers["Content-Type"].startswith("text/event-stream")
        assert stream.response.headers["Cache-Control"] == "no-store"
        await http.put("entries/other", json=0)
        await http.put("entries/game/1", json={"turn": "alice\n"})
        await http.patch("records/game/r", json={"set": {"a": 1}})
        await http.post("touch/game/1", json={"ttl": 60})
        await http.delete("entries/game/1")
        received = [await stream.event() for _ in range(4)]

    assert [(one.event, one.data["key"]) for one in received] == [
        ("put", "game/1"),
        ("patch", "game/r"),
        ("touch", "game/1"),
        ("delete", "game/1"),
    ]
    assert received[0].data["value"] == {"turn": "alice\n"}
    assert all(one.id == one.data["position"] for one in received)


async def test_existing_entries_come_first_if_requested(http: httpx2.AsyncClient) -> None:
    await http.put("entries/a", json=1)
    await http.put("entries/b", json=2)
    async with watching(http, "?initial=true") as stream:
        received = [await stream.event() for _ in range(3)]
        await http.put("entries/c", json=3)
        received.append(await stream.event())

    assert [(one.event, one.data["key"]) for one in received] == [
        ("put", "a"),
        ("put", "b"),
        ("synced", ""),
        ("put", "c"),
    ]
    assert [one.id is None for one in received] == [True, True, False, False]


async def test_a_stream_is_resumed_from_where_it_was_even_before_its_first_event(http: httpx2.AsyncClient) -> None:
    async with watching(http) as stream:
        begun = stream.last_id
    assert begun is not None
    await http.put("entries/a", json=1)

    async with watching(http, last=begun) as stream:
        assert (await stream.event()).data["key"] == "a"
    async with watching(http, f"?after={begun}") as stream:
        assert (await stream.event()).data["key"] == "a"
    async with watching(http, "?after=0") as stream:
        assert (await stream.event()).data["key"] == "a"


async def test_a_browser_that_comes_back_says_how_far_it_was(http: httpx2.AsyncClient) -> None:
    """It asks for the same URL again, so its position goes before what the URL says."""
    await http.put("entries/a", json=1)
    async with watching(http, "?initial=true") as stream:
        await stream.event()
        synced = (await stream.event()).id
    await http.put("entries/b", json=2)

    for query in ("?initial=true", "?after=0"):
        async with watching(http, query, last=synced) as stream:
            assert (await stream.event()).data["key"] == "b"


async def test_a_position_that_the_log_does_not_hold_is_410(http: httpx2.AsyncClient) -> None:
    for position in (b"elsewhere:shop:1:1", b"99", b"x\xe9"):
        refused = await http.get("watch", headers={b"Last-Event-ID": position})
        assert (refused.status_code, refused.json()["code"]) == (410, "compacted")


async def test_a_watch_that_the_log_leaves_behind_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The position is good when the watch begins, and trimmed before it reads on."""
    window = limpet.Window(age_ms=0, changes=1, age_ms_min=0)
    async with face(window=window) as made, listening(made) as url, client(url) as http:
        for turn in range(10):
            await http.put("entries/k", json=turn)
        store = made.dispatcher.store("shop")
        begin = limpet.Watch.__aenter__

        async def begin_and_trim(watch: limpet.Watch) -> limpet.Watch:
            found = await begin(watch)
            await store.trim()
            return found

        monkeypatch.setattr(limpet.Watch, "__aenter__", begin_and_trim)
        async with watching(http, "?after=1") as stream:
            (last_message,) = await stream.rest()

    assert (last_message.event, last_message.data["status"], last_message.data["code"]) == (
        "compacted",
        410,
        "compacted",
    )


async def test_heartbeats_tell_how_far_the_log_is(http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who watches a quiet key must not come back with a position that was trimmed long ago."""
    monkeypatch.setattr(events, "HEARTBEAT_S", 0.05)
    async with watching(http, "?pattern=quiet") as stream:
        begun = stream.last_id
        await http.put("entries/busy", json=1)
        while stream.last_id == begun:
            received = await stream.next()
            assert received is not None
            assert (received.comments, received.data) == (["still here"], None)
        moved = stream.last_id
        await http.put("entries/quiet", json=1)

    async with watching(http, "?pattern=quiet", last=moved) as stream:
        assert (await stream.event()).data["key"] == "quiet"


async def test_no_event_is_written_into_a_log(http: httpx2.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        async with watching(http) as stream:
            await http.put("entries/k", json="secret")
            await stream.event()

    assert "secret" not in caplog.text


async def test_a_head_of_a_watch_opens_no_stream(made: Face, http: httpx2.AsyncClient) -> None:
    head = await http.head("watch")

    assert (head.status_code, head.content) == (200, b"")
    assert len(streams_of(made.app)) == 0


# Under load -------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["memory:", "sqlite:///{tmp}/state.db"], ids=["memory", "sqlite"])
async def test_a_client_that_loses_its_connection_again_and_again_misses_nothing(engine: str, tmp_path: Path) -> None:
    async with face(engine.format(tmp=tmp_path)) as made, listening(made) as url, client(url) as http:
        await _lose_connections(made, http)


async def _lose_connections(made: Face, http: httpx2.AsyncClient) -> None:
    """Four writers, and a reader that is cut off twenty times at moments of no choice of its own."""
    total, writers = 3000, 4
    rolls = random.Random(7)
    store = made.dispatcher.store("shop")

    async def write(number: int) -> None:
        for turn in range(total // writers):
            await store.put(f"w{number}/{turn % 10}", turn)
            await asyncio.sleep(0)

    seen: list[int] = []
    cuts = 0
    async with watching(http) as stream:
        last = stream.last_id
    writing = [asyncio.ensure_future(write(number)) for number in range(writers)]
    while len(seen) < total:
        async with watching(http, last=last) as stream:
            upto = len(seen) + rolls.randint(1, 2 * total // 20)
            while len(seen) < min(upto, total):
                received = await stream.event()
                seen.append(received.data["revision"])
                last = received.id
        cuts += 1
    await asyncio.gather(*writing)

    assert cuts >= 15
    assert seen == sorted(set(seen))
    assert len(seen) == total


async def test_a_slow_client_delays_no_one_and_misses_nothing(made: Face, http: httpx2.AsyncClient) -> None:
    """It reads nothing while more is written than lies in the buffers between."""
    text = "x" * 100_000
    async with watching(http) as stream:
        for turn in range(100):
            await made.dispatcher.store("shop").put("k", f"{turn}{text}")
        seen = [(await stream.event()).data["version"] for _ in range(100)]

    assert seen == list(range(1, 101))


async def test_what_a_client_leaves_behind_is_cleared_away(made: Face, http: httpx2.AsyncClient) -> None:
    streams = streams_of(made.app)
    for _ in range(5):
        async with watching(http), watching(http):
            assert len(streams) >= 2
    await until(lambda: len(streams) == 0)

    assert made.session.hub("shop")._watchers == 0


# Who may ----------------------------------------------------------------------


async def test_a_stream_ends_when_its_token_is_no_longer_good(made: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "RECHECK_S", 0.05)
    async with listening(made) as url:
        async with client(url, "shop") as http, watching(http) as stream:
            del made.tokens.callers["shop"]
            last_message = (await stream.rest())[-1]
            assert (last_message.event, last_message.data["status"]) == ("unauthorized", 401)
            assert (await http.get("watch")).status_code == 401
        made.tokens.callers["shop"] = Scoped("shop", "shop")
        async with client(url, "shop") as http, watching(http) as stream:
            made.tokens.callers["shop"] = Scoped("shop", "shop", rights=["read"])
            last_message = (await stream.rest())[-1]
            assert (last_message.event, last_message.data["status"]) == ("permission_denied", 403)


async def test_a_busy_stream_ends_too_when_its_token_is_no_longer_good(
    made: Face, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "RECHECK_S", 0.05)
    async with listening(made) as url, client(url) as root, client(url, "shop") as http, watching(http) as stream:
        writing = asyncio.ensure_future(_write_on(root))
        await stream.event()
        del made.tokens.callers["shop"]
        last_message = (await stream.rest())[-1]
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)

    assert last_message.event == "unauthorized"


async def _write_on(http: httpx2.AsyncClient) -> None:
    while True:
        await http.post("incr/n")


async def test_a_caller_of_a_prefix_hears_of_it_alone(made: Face) -> None:
    async with (
        listening(made) as url,
        client(url) as root,
        client(url, "team") as http,
        watching(http, "?pattern=team/a/*&initial=true") as stream,
    ):
        for key in ("team/ab/x", "team/b", "team/a", "team/a/mine", "zzz"):
            await root.put(f"entries/{key}", json=1)
        await root.post("batch", json={"writes": [{"op": "delete", "key": key} for key in ("zzz", "team/a/mine")]})
        received = [await stream.event() for _ in range(3)]

    assert [(one.event, one.data["key"]) for one in received] == [
        ("synced", ""),
        ("put", "team/a/mine"),
        ("delete", "team/a/mine"),
    ]


async def test_there_is_a_bound_to_streams(made: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = streams_of(made.app)
    monkeypatch.setattr(streams, "_most", 3)
    monkeypatch.setattr(streams, "_most_per_caller", 2)
    async with (
        listening(made) as url,
        client(url) as root,
        client(url, "shop") as shop,
        client(url, "viewer") as viewer,
        watching(root),
        watching(shop),
    ):
        async with watching(shop):
            for http in (shop, viewer):
                refused = await http.get("watch")
                assert (refused.status_code, refused.json()["code"]) == (429, "rate_limited")
                assert refused.headers["Retry-After"] == "1"
        await until(lambda: len(streams) == 2)
        async with watching(viewer):
            pass


def test_no_stream_begins_after_the_end() -> None:
    streams = Streams(most=1)
    streams.check_room("caller")
    streams.close()

    with pytest.raises(limpet.errors.Closed):
        streams.check_room("caller")


# Waiting ----------------------------------------------------------------------


async def test_who_goes_away_while_waiting_is_not_given_the_lock(made: Face, http: httpx2.AsyncClient) -> None:
    token = (await http.post("locks/l", json={"ttl": 60})).json()["token"]
    waiting = asyncio.ensure_future(http.post("locks/l", json={"ttl": 60, "wait": 30}))
    await until(lambda: made.session.hub("shop")._watchers == 1)

    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await until(lambda: made.session.hub("shop")._watchers == 0)
    await http.delete(f"locks/l?token={token}")

    assert (await http.get("locks")).json()["locks"] == []
    assert (await http.post("locks/l", json={"ttl": 60})).status_code == 201


# The end ----------------------------------------------------------------------


async def test_a_stream_ends_cleanly_when_the_store_is_closed(made: Face) -> None:
    async with listening(made) as url, client(url) as http, watching(http) as stream:
        await made.session.close()
        assert await stream.rest() == []


async def test_all_streams_end_cleanly_when_the_service_says_so(made: Face, http: httpx2.AsyncClient) -> None:
    async with watching(http) as first, watching(http, "?initial=true") as second:
        streams_of(made.app).close()
        assert await first.rest() == []
        assert [one.event for one in await second.rest()] in ([], ["synced"])
    refused = await http.get("watch")
    assert (refused.status_code, refused.json()["code"]) == (503, "closed")
    assert (await http.get("keys")).status_code == 200


async def test_a_client_that_takes_nothing_is_left_when_the_service_ends(made: Face) -> None:
    """Its buffers are full, so the end of the stream cannot be sent to it."""
    async with listening(made) as url:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        with socket.create_connection(address) as stalled:
            request = "GET /v1/shop/watch HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer root\r\n\r\n"
            stalled.sendall(request.encode())
            await until(lambda: len(streams_of(made.app)) == 1)
            for _ in range(30):
                await made.dispatcher.store("shop").put("k", "x" * 900_000)
            await until(lambda: _is_stuck(made))
            streams_of(made.app).close()
            await until(lambda: len(streams_of(made.app)) == 0)


def _is_stuck(made: Face) -> bool:
    """Whether the server waits for a client to take what it was sent."""
    assert made.server is not None
    return any(line.flow.write_paused for line in made.server.server_state.connections)  # type: ignore[union-attr]


SERVER = """
import asyncio, sys
import uvicorn
from tests.server.http_support import face

async def main():
    async with face() as made:
        config = uvicorn.Config(made.app, port=int(sys.argv[1]), log_level="info", lifespan="off")
        await uvicorn.Server(config).serve()

asyncio.run(main())
"""


def test_a_server_with_open_streams_ends_soon_after_sigterm() -> None:
    """By itself, with only uvicorn to end it: two seconds is what an operator waits."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(port)], cwd=CHECKOUT, env={**os.environ}, stderr=subprocess.PIPE, text=True
    )
    clients: list[socket.socket] = []
    try:
        clients = [_listener(port) for _ in range(5)]
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        errors = process.communicate(timeout=PATIENCE_S)[1]
        took = time.monotonic() - began
        ends = [_read_to_end(one) for one in clients]
    finally:
        for one in clients:
            one.close()
        if process.poll() is None:
            process.kill()
            process.wait()

    assert "Traceback" not in errors
    # The last chunk of each is the empty one: it was ended, and not cut off.
    assert [end.endswith(b"0\r\n\r\n") for end in ends] == [True] * 5
    print(f"it took {took:.2f} s")
    assert took < 10, "two seconds, on a machine that has nothing else to do"


def _listener(port: int) -> socket.socket:
    """A client whose watch has begun."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            found = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    found.sendall(b"GET /v1/shop/watch HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer root\r\n\r\n")
    received = b""
    while b": watching" not in received:
        received += found.recv(4096)
    return found


def _read_to_end(one: socket.socket) -> bytes:
    found = b""
    while part := one.recv(4096):
        found += part
    return found


# The bytes themselves ---------------------------------------------------------

RAW = {
    "no ascii": b"GET /v1/shop/entries/\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    "no percent-encoding": b"GET /v1/shop/entries/%zz HTTP/1.1\r\nHost: x\r\n\r\n",
    "no http": b"hello\r\n\r\n",
    "no path": b"GET  HTTP/1.1\r\nHost: x\r\n\r\n",
    "two lengths": b"PUT /v1/shop/entries/k HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n1",
    "a length that is none": b"PUT /v1/shop/entries/k HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n1",
    "a length and chunks": b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
    "a huge length": b"PUT /v1/shop/entries/k HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer root\r\n"
    b"Content-Type: application/octet-stream\r\nContent-Length: 99999999999\r\n\r\nx",
    "bad chunks": b"PUT /v1/shop/entries/k HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "an absolute target": b"GET http://elsewhere/v1/shop/entries/%ff HTTP/1.1\r\nHost: x\r\n\r\n",
    "a header of control characters": b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \x01\r\n\r\n",
}


def test_bytes_that_are_no_request_are_4xx_and_the_server_goes_on() -> None:
    with in_thread() as url:
        port = int(url.rpartition(":")[2])
        for name, raw in RAW.items():
            with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as line:
                line.sendall(raw)
                answer = line.recv(4096)
            assert answer.startswith(b"HTTP/1.1 4"), f"{name}: {answer!r}"
        with httpx2.Client(trust_env=False) as http:
            assert http.get(f"{url}/healthz").status_code == 200
