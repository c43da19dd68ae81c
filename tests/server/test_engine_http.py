"""The engine of http: URLs: what its URL may say, whom it trusts, and what it makes of any answer."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import limpet
from limpet.engines.http import HttpEngine
from limpet.errors import (
    Ambiguous,
    Closed,
    InvalidValue,
    LimpetError,
    PermissionDenied,
    RateLimited,
    Unavailable,
    ValueTooLarge,
)
from limpet.model import Batch, Patch, Put
from limpet.protocol import engine_msgpack as wire
from tests.engines import unique
from tests.processes import unmeasured
from tests.server.engine_support import Guest, Guests, Running, Scope, running

SECRET = "hunter2"
GUESTS = Guests(Guest(SECRET, Scope("trivia", "", "read write lock reveal")))


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(GUESTS) as server:
        yield server


def engine_of(store: limpet.Store) -> HttpEngine:
    engine = store._session.engine
    assert isinstance(engine, HttpEngine)
    return engine


# URLs and tokens --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        (f"http://127.0.0.1:1?token={SECRET}", "LIMPET_TOKEN"),
        (f"http://me:{SECRET}@127.0.0.1:1", "a token alone"),
        ("http://", "host and port"),
        ("http://127.0.0.1:99999", "host and port"),
        ("http://127.0.0.1:port", "host and port"),
        ("http://127.0.0.1:1/a\nb", "host and port"),
        ("http://127.0.0.1:1?verify=no", "unknown option 'verify', known: ca, timeout"),
        ("http://127.0.0.1:1?timeout=soon", "seconds"),
        ("http://127.0.0.1:1?timeout=0", "seconds"),
        ("http://127.0.0.1:1?timeout=inf", "seconds"),
        ("http://127.0.0.1:1?ca=/etc/hosts", "https"),
        ("https://127.0.0.1:1?ca=/nowhere", "certificates"),
        (f"http://{SECRET}%0d%0aX-Other%3a1@127.0.0.1:1", "visible ASCII"),
    ],
)
async def test_a_url_that_cannot_be_used_says_why_and_no_secret(url: str, advice: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        await limpet.open(url)

    assert advice in str(refused.value)
    assert SECRET not in str(refused.value)


async def test_a_token_stands_before_the_host_or_in_the_environment(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with limpet.open(server.as_(SECRET), namespace="trivia") as store:
        await store.put("key", 1)
    monkeypatch.setenv("LIMPET_TOKEN", SECRET)
    async with limpet.open(server.url, namespace="trivia") as store:
        assert await store.get("key") == 1
    monkeypatch.delenv("LIMPET_TOKEN")
    with pytest.raises(PermissionDenied):
        await limpet.open(server.url)


async def test_a_token_is_shown_nowhere(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(0)
    async with limpet.open(server.as_(SECRET), namespace="trivia") as store:
        await store.put("key", 1)
        engine = engine_of(store)
        with pytest.raises(PermissionDenied) as refused:
            await engine.read("other", ["key"])
        shown = [repr(store), repr(engine), str(refused.value).replace(SECRET, "", 1)]

    assert not any(SECRET in text for text in [*shown, caplog.text])


async def test_a_path_in_front_is_the_servers_own(tmp_path: Path) -> None:
    url = f"{os.environ['LIMPET_TEST_HTTP']}/{unique('place')}/"
    async with limpet.open(url) as store, limpet.open(url.rstrip("/")) as same:
        await store.put("key", 1)

        assert await same.get("key") == 1


def test_what_is_missing_is_named_by_its_extra() -> None:
    script = "import sys; sys.modules['aiohttp'] = None; import limpet.sync; limpet.sync.open('https://host')"
    done = subprocess.run([sys.executable, "-c", script], env=unmeasured(), capture_output=True, text=True, check=False)

    assert "pip install 'limpet[http]'" in done.stderr


async def test_traits_are_the_servers_but_for_how_it_is_reached(server: Running, tmp_path: Path) -> None:
    async with (
        running(url=f"sqlite:///{tmp_path}/state.db") as on_file,
        limpet.open(on_file.url) as store,
    ):
        assert store.traits == limpet.Traits("http", "disk", "server", False)


# TLS ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("certificate")
    files = str(folder / "server.pem"), str(folder / "server.key")
    words = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=test"]
    ours = ["-addext", "subjectAltName=IP:127.0.0.1", "-out", files[0], "-keyout", files[1]]
    subprocess.run(["openssl", "req", "-x509", *words, *ours], check=True, capture_output=True)
    return files


async def test_a_certificate_that_is_named_is_trusted(certificate: tuple[str, str]) -> None:
    async with (
        running(certificate=certificate) as server,
        limpet.open(f"{server.url}?ca={certificate[0]}", namespace="trivia") as store,
    ):
        await store.put("key", 1)

        assert await store.get("key") == 1


async def test_a_certificate_that_nobody_vouches_for_is_refused(certificate: tuple[str, str]) -> None:
    async with running(certificate=certificate) as server:
        with pytest.raises(InvalidValue) as refused:
            await limpet.open(server.url)

    assert "?ca=FILE" in str(refused.value)


# Any answer ---------------------------------------------------------------------------


class _Answers(BaseHTTPRequestHandler):
    """A proxy that replies to commits with a fixed response, and to everything else as a server does."""

    protocol_version = "HTTP/1.1"
    response: tuple[int, dict[str, str], bytes] = (200, {}, b"")

    def do_GET(self) -> None:
        from limpet.protocol import engine_msgpack as wire
        from limpet.server.engine_routes import LIMITS

        traits = limpet.Traits("memory", "none", "host", True)
        self._say(200, {"Content-Type": wire.MEDIA}, wire.encode(wire.Served(traits, LIMITS)))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._say(*type(self).response)

    def _say(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, text in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def answering() -> Iterator[tuple[str, type[_Answers]]]:
    class Answers(_Answers):
        pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", Answers
        server.shutdown()
        thread.join()


PROBLEM = {"Content-Type": "application/problem+json"}


@pytest.mark.parametrize(
    ("status", "headers", "body", "of_a_read", "of_a_commit"),
    [
        (200, {}, b"", Unavailable, Ambiguous),
        (200, {}, b"<html>", Unavailable, Ambiguous),
        (200, {}, b"\x90", Unavailable, Ambiguous),
        (301, {"Location": "http://127.0.0.1:9/"}, b"", InvalidValue, InvalidValue),
        (400, PROBLEM, b'{"code": "invalid_key", "detail": "no", "key": "k"}', None, None),
        (400, {}, b"", InvalidValue, InvalidValue),
        (401, {}, b"", PermissionDenied, PermissionDenied),
        (403, {}, b"", PermissionDenied, PermissionDenied),
        (404, {}, b"", InvalidValue, InvalidValue),
        (408, {}, b"", Unavailable, Unavailable),
        (413, {}, b"", InvalidValue, InvalidValue),
        (429, {"Retry-After": "7"}, b"", RateLimited, RateLimited),
        (429, {"Retry-After": "Mon, 01 Jan 2035 00:00:00 GMT"}, b"", RateLimited, RateLimited),
        (500, {}, b"", Unavailable, Ambiguous),
        (500, PROBLEM, b"[]", Unavailable, Ambiguous),
        (502, {}, b"<html>", Unavailable, Ambiguous),
        (503, {"Retry-After": "1"}, b"", Unavailable, Ambiguous),
        (503, PROBLEM, b'{"code": "unavailable", "detail": "starting"}', Unavailable, Unavailable),
        (504, {}, b"", Unavailable, Ambiguous),
    ],
)
async def test_every_answer_has_a_meaning(
    answering: tuple[str, type[_Answers]],
    status: int,
    headers: dict[str, str],
    body: bytes,
    of_a_read: type[LimpetError] | None,
    of_a_commit: type[LimpetError] | None,
) -> None:
    """A proxy may reply in place of the server, and then the outcome of a commit is unknown."""
    url, answers = answering
    answers.response = (status, headers, body)
    async with limpet.open(url, sweep=False) as store:
        engine = engine_of(store)
        with pytest.raises(LimpetError) as read:
            await engine.read("default", ["key"])
        with pytest.raises(LimpetError) as commit:
            await engine.commit("default", Batch((), (Put("key", b"1"),)))

    assert type(read.value) is (of_a_read or limpet.errors.InvalidKey)
    assert type(commit.value) is (of_a_commit or limpet.errors.InvalidKey)
    if isinstance(commit.value, Ambiguous):
        assert commit.value.request_id is not None


async def test_something_else_that_answers_is_told_apart(answering: tuple[str, type[_Answers]]) -> None:
    url, answers = answering
    answers.do_GET = lambda self: self._say(200, {}, b"<html>")  # type: ignore[method-assign]
    with pytest.raises(InvalidValue, match="no Limpet server"):
        await limpet.open(url)
    answers.do_GET = lambda self: self._say(404, {}, b"")  # type: ignore[method-assign]
    with pytest.raises(InvalidValue, match="check the URL"):
        await limpet.open(url)


# Calls --------------------------------------------------------------------------------


async def test_calls_of_one_turn_travel_together(server: Running) -> None:
    """Each is answered by itself: one that is refused leaves the others alone."""
    async with limpet.open(server.as_(SECRET), namespace="trivia", sweep=False) as store:
        await store.put("taken", 1)
        sent = _count(engine_of(store))

        found = await asyncio.gather(
            *(store.put(f"key/{number}", number) for number in range(100)),
            store.create("taken", 2),
            store.add("taken", 1),
            return_exceptions=True,
        )
        assert [type(one).__name__ for one in found] == ["Entry"] * 100 + ["Conflict", "int"]
        assert sent["commit"] <= 3
        await asyncio.gather(*(store.get(f"key/{number % 50}") for number in range(100)))
        assert sent["read"] <= 3


async def test_a_group_that_is_too_large_for_a_request_goes_in_parts(server: Running) -> None:
    async with limpet.open(server.as_(SECRET), namespace="trivia", sweep=False) as store:
        sent = _count(engine_of(store))

        await asyncio.gather(*(store.record(f"r/{n}").set(field=b"\xff" * 700_000) for n in range(12)))

        assert sent["commit"] > 2
        assert (await store.status()).keys == 12


async def test_a_batch_that_is_too_large_for_a_request_is_refused_here(server: Running) -> None:
    async with limpet.open(server.as_(SECRET), namespace="trivia", sweep=False) as store:
        patches = tuple(Patch(f"r/{n}", {"f": b"\0" + bytes(999_000)}) for n in range(9))

        with pytest.raises(ValueTooLarge) as refused:
            await engine_of(store).commit("trivia", Batch((), patches))

    assert refused.value.limit_bytes == 8_000_000


def _count(engine: HttpEngine) -> dict[str, int]:
    sent = dict.fromkeys(("read", "commit"), 0)
    send = engine._send

    async def counting(request: Any, **options: Any) -> bytes:
        primitive = str(request.url).rpartition("/")[2]
        sent[primitive] = sent.get(primitive, 0) + 1
        return await send(request, **options)

    engine._send = counting  # type: ignore[method-assign]
    return sent


async def test_a_wait_longer_than_the_server_allows_is_asked_again(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with limpet.open(server.as_(SECRET), namespace="trivia", sweep=False) as store:
        engine = engine_of(store)
        engine._limits = type(engine._limits)(8_000_000, 128, 1000, 0.05)
        sent = _count(engine)

        assert (await engine.changes("trivia", 0, wait_s=0.3)).changes == []
        assert sent["changes"] > 1


async def test_whoever_waits_when_the_store_is_closed_is_told(server: Running) -> None:
    store = await limpet.open(server.as_(SECRET), namespace="trivia", sweep=False)
    waiting = asyncio.create_task(engine_of(store).changes("trivia", 0, wait_s=600))
    while not any(call.operation == "engine.changes" for call in server.book.calls):  # noqa: ASYNC110
        await asyncio.sleep(0.01)

    await store.close()

    with pytest.raises(Closed):
        await waiting


async def test_a_wait_that_is_given_up_leaves_the_server_too(server: Running) -> None:
    """Or those who left would be waited for until their time is over."""
    async with limpet.open(server.as_(SECRET), namespace="trivia", sweep=False) as store:
        waiting = asyncio.create_task(engine_of(store).changes("trivia", 0, wait_s=600))
        wakeup = server.session.engine._engine._memory.wakeup  # type: ignore[attr-defined]
        async with asyncio.timeout(120):
            while "trivia" not in wakeup._waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting
            while "trivia" in wakeup._waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert [call.error for call in server.book.calls if call.error is not None] == []


# The command line -----------------------------------------------------------------------


def cli(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "limpet", *words],
        env={**unmeasured(), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_the_command_line_works_over_a_server() -> None:
    url = f"{os.environ['LIMPET_TEST_HTTP']}/{unique('file')}"

    assert cli("--url", url, "put", "key", '{"a": 1}').returncode == 0
    assert cli("--url", url, "get", "key").stdout == '{"a":1}\n'
    assert cli("get", "nothing", LIMPET_URL=url).returncode == 3
    refused = cli("put", "key", "1", "--if-absent", LIMPET_URL=url)
    assert (refused.returncode, "conflict" in refused.stderr) == (4, True)


@pytest.mark.slow
def test_the_doctor_looks_at_a_server() -> None:
    url = f"{os.environ['LIMPET_TEST_HTTP']}/{unique('file')}"

    found = cli("--url", url, "doctor")

    assert found.returncode == 0, found.stdout
    assert "an acknowledged write survives a killed process" in found.stdout
    gone = cli("--url", "http://127.0.0.1:9", "doctor")
    assert gone.returncode != 0
    assert "cannot be reached now" in gone.stdout


# Connections --------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _taking_nothing(begun: asyncio.Event) -> AsyncIterator[str]:
    """The URL of a server that replies to the opening of a store, and then reads nothing more."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from limpet.server.engine_routes import LIMITS

        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            body = wire.encode(wire.Served(limpet.Traits("memory", "none", "host", True), LIMITS))
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            writer.close()
        else:
            begun.set()
            held.append(writer)

    held: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1_000)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        for writer in held:
            writer.transport.abort()
        server.close()


async def test_a_server_that_takes_nothing_of_a_large_request_is_given_up() -> None:
    """Whether it has handled the request is unknown, so the outcome of a commit is unknown too."""
    begun = asyncio.Event()
    async with _taking_nothing(begun) as url, limpet.open(f"{url}?timeout=0.3", sweep=False) as store:
        patches = tuple(Patch(f"r/{n}", {"f": b"\0" + bytes(999_000)}) for n in range(7))
        async with asyncio.timeout(20.0):
            with pytest.raises(Ambiguous):
                await engine_of(store).commit("trivia", Batch((), patches))

    assert begun.is_set()


async def test_a_server_that_does_not_reply_is_given_up() -> None:
    async with (
        _taking_nothing(asyncio.Event()) as url,
        limpet.open(f"{url}?timeout=0.3", sweep=False) as store,
    ):
        async with asyncio.timeout(20.0):
            with pytest.raises(Ambiguous):
                await engine_of(store).commit("trivia", Batch((), (Put("key", b"1"),)))
            with pytest.raises(Unavailable):
                await engine_of(store).read("trivia", ["key"])


def test_a_handle_works_on_one_loop_after_another() -> None:
    """Connections belong to a loop. Those of a loop that is gone are left to their sockets, without a word."""

    async def begin() -> limpet.Store:
        store = await limpet.open(f"{os.environ['LIMPET_TEST_HTTP']}/{unique('place')}", sweep=False)
        await store.put("key", 1)
        return store

    async def go_on(store: limpet.Store) -> None:
        await store.add("key", 1)

    async def end(store: limpet.Store) -> int:
        found: int = await store.get("key")
        await store.close()
        return found

    store = asyncio.run(begin())
    asyncio.run(go_on(store))
    assert asyncio.run(end(store)) == 2

    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()


LEAVES_ITS_PARENT_ALONE = """
import asyncio, gc, os, sys
import limpet

async def use(store):
    return await store.add("key", 1)

async def main():
    store = await limpet.open(sys.argv[1], sweep=False)
    await use(store)
    child = os.fork()
    if not child:
        asyncio.events._set_running_loop(None)
        print(asyncio.run(use(store)), flush=True)
        del store
        gc.collect()
        # With all that an interpreter does at its end.
        sys.exit(0)
    os.waitpid(child, 0)
    async with asyncio.timeout(20):
        print(await use(store), flush=True)

asyncio.run(main())
gc.collect()
"""


def test_a_child_that_ends_leaves_the_connections_of_its_parent_alone() -> None:
    """They share one epoll. And a store that was not closed logs no error."""
    url = f"{os.environ['LIMPET_TEST_HTTP']}/{unique('place')}"
    words = [sys.executable, "-c", LEAVES_ITS_PARENT_ALONE, url]
    done = subprocess.run(words, env=unmeasured(), capture_output=True, text=True, check=False, timeout=60)

    assert done.stdout.split() == ["2", "3"], done.stderr
    assert "nclosed" not in done.stderr
