"""An application with callers of certain rights, and a server to put it behind."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import httpx2
import uvicorn
from starlette.applications import Starlette

from limpet.errors import PermissionDenied
from limpet.keys import Span, prefix_span
from limpet.opening import open_session
from limpet.server.dispatch import Call, Caller, Dispatcher
from limpet.server.http import make_app, streams_of
from limpet.session import Session

PATIENCE_S = 120.0
ALL = ("read", "write", "lock", "reveal")


class Scoped:
    """A caller with certain rights on the keys that start with a prefix, in one namespace."""

    def __init__(self, name: str, namespace: str, prefix: str = "", rights: Sequence[str] = ALL) -> None:
        self.name = name
        self.writer: str | None = None
        self._namespace = namespace
        self._span = prefix_span(prefix)
        self._rights = rights

    def may(self, namespace: str, right: str, spans: Sequence[Span]) -> bool:
        return (
            namespace == self._namespace and right in self._rights and all(_within(span, self._span) for span in spans)
        )


def _within(span: Span, whole: Span) -> bool:
    ends = whole.stop is None or (span.stop is not None and span.stop <= whole.stop)
    return span.start >= whole.start and ends


class Everywhere:
    """A caller with every right on every namespace."""

    name = "root"
    writer = None

    def may(self, namespace: str, right: str, spans: Sequence[Span]) -> bool:
        return True


class Tokens:
    """Callers by their tokens."""

    def __init__(self, **callers: Caller) -> None:
        self.callers = callers

    async def caller_of(self, token: str | None, client: str | None) -> Caller:
        found = self.callers.get(token or "")
        if found is None:
            raise PermissionDenied("a token is needed" if token is None else "this token is not good")
        return found


class Notes:
    """An observer that keeps every call."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def done(self, call: Call) -> None:
        self.calls.append(call)


def tokens() -> Tokens:
    """All callers of these tests."""
    return Tokens(
        root=Everywhere(),
        shop=Scoped("shop", "shop"),
        team=Scoped("team", "shop", "team/a/"),
        reader=Scoped("reader", "shop", rights=["read"]),
        blind=Scoped("blind", "shop", rights=["read", "write"]),
        viewer=Scoped("viewer", "shop", rights=["read", "reveal"]),
        other=Scoped("other", "bank"),
    )


class Face:
    """An application on a session of its own, and clients of it."""

    def __init__(self, session: Session, **options: Any) -> None:
        self.session = session
        self.notes = Notes()
        self.tokens = tokens()
        self.is_ready = True
        self.server: uvicorn.Server | None = None
        self.dispatcher = Dispatcher(session, "http", observers=[self.notes], **options.pop("dispatcher", {}))
        self.app: Starlette = make_app(self.dispatcher, callers=self.tokens, ready=lambda: self.is_ready, **options)

    def client(self, token: str | None = "root") -> httpx2.AsyncClient:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        transport = httpx2.ASGITransport(self.app, raise_app_exceptions=False)
        return httpx2.AsyncClient(transport=transport, base_url="http://limpet.test/v1/shop/", headers=headers)


@contextlib.asynccontextmanager
async def face(url: str = "memory:", clock: Any = None, **options: Any) -> AsyncIterator[Face]:
    session = await open_session(url, clock=clock, max_value_bytes=1_000_000, window=options.pop("window", None))
    try:
        yield Face(session, **options)
    finally:
        await session.close()


async def until(holds: Callable[[], bool]) -> None:
    """Wait until another task has made something so."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 - the other task does not notify
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def listening(face: Face) -> AsyncIterator[str]:
    """The application behind uvicorn, on this loop. Yields its address."""
    config = uvicorn.Config(face.app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=2)
    server = face.server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.ensure_future(server._serve([listener]))
        await until(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            streams_of(face.app).close()
            server.should_exit = True
            await serving


@contextlib.contextmanager
def in_thread(**options: Any) -> Iterator[str]:
    """A server on a loop in a thread of its own. Yields its address."""
    begun: list[str] = []
    over = threading.Event()

    async def serve() -> None:
        async with face(**options) as made, listening(made) as url:
            begun.append(url)
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not begun and thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        yield begun[0]
    finally:
        over.set()
        thread.join(PATIENCE_S)
