"""What tests of the HTTP engine and of the primitives behind it share: a server in this process, and who asks it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import uvicorn
from starlette.applications import Starlette

from limpet.clock import Clock
from limpet.errors import PermissionDenied
from limpet.keys import Span, prefix_span
from limpet.opening import open_session
from limpet.server.dispatch import Call, Caller, Callers, Dispatcher
from limpet.server.engine_routes import routes
from limpet.server.operations import Right
from limpet.session import Session
from tests.served import Root


class Scope(NamedTuple):
    """Rights on the keys of a namespace that begin with a prefix."""

    namespace: str
    prefix: str
    rights: str


class Guest:
    """A caller with scopes, whose token is its name."""

    def __init__(self, name: str, *scopes: Scope, writer: str | None = None) -> None:
        self.name = name
        self.writer = writer
        self._scopes = scopes

    def may(self, namespace: str, right: Right, spans: Sequence[Span]) -> bool:
        whole = [scope for scope in self._scopes if scope.namespace == namespace and right in scope.rights.split()]
        return bool(whole) and all(any(_holds(prefix_span(one.prefix), span) for one in whole) for span in spans)


def _holds(outer: Span, inner: Span) -> bool:
    ends = outer.stop is None or (inner.stop is not None and inner.stop <= outer.stop)
    return outer.start <= inner.start and ends


class Guests:
    """Callers by their tokens."""

    def __init__(self, *known: Guest) -> None:
        self._known = {one.name: one for one in known}

    async def caller_of(self, token: str | None, client: str | None) -> Caller:
        if token not in self._known:
            raise PermissionDenied("this token is not known")
        return self._known[token]


class Book:
    """An observer that keeps what it hears."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def done(self, call: Call) -> None:
        self.calls.append(call)


class Running(NamedTuple):
    """A server in this process."""

    url: str
    session: Session
    app: Starlette
    ending: asyncio.Event
    book: Book

    def as_(self, token: str) -> str:
        """The URL with a token."""
        return self.url.replace("://", f"://{token}@")


class _Server(uvicorn.Server):
    """Leaves signals to pytest."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def application(
    callers: Callers | None = None,
    *,
    url: str = "memory:",
    clock: Clock | None = None,
    value_bytes_max: int = 1_000_000,
    observers: Sequence[Any] = (),
    **dispatcher: Any,
) -> AsyncIterator[Running]:
    """What a server runs, on its own engine and without a port; ``dispatcher`` takes the options of `Dispatcher`."""
    session = await open_session(url, clock=clock, max_value_bytes=value_bytes_max, window=None)
    ending, book = asyncio.Event(), Book()
    served = Dispatcher(session, "http", observers=(book, *observers), **dispatcher)
    app = Starlette(routes=routes(session, callers=callers or Root(), dispatcher=served, ending=ending))
    try:
        yield Running("", session, app, ending, book)
    finally:
        await session.close()


@contextlib.asynccontextmanager
async def running(
    callers: Callers | None = None, *, certificate: tuple[str, str] | None = None, **options: Any
) -> AsyncIterator[Running]:
    """A server; ``options`` are those of `application`."""
    files = {} if certificate is None else {"ssl_certfile": certificate[0], "ssl_keyfile": certificate[1]}
    config: Any = {"log_config": None, "lifespan": "off", "loop": "asyncio", "timeout_graceful_shutdown": 5, **files}
    async with application(callers, **options) as server:
        web = _Server(uvicorn.Config(server.app, **config))
        with socket.socket(proto=socket.IPPROTO_TCP) as listening:
            listening.bind(("127.0.0.1", 0))
            task = asyncio.create_task(web.serve(sockets=[listening]))
            try:
                while not web.started:  # noqa: ASYNC110 - uvicorn sets no event
                    await asyncio.sleep(0.005)
                scheme = "http" if certificate is None else "https"
                yield server._replace(url=f"{scheme}://127.0.0.1:{listening.getsockname()[1]}")
            finally:
                server.ending.set()
                web.should_exit = True
                await task


class Behind:
    """An engine behind another, for a test to get in between."""

    def __init__(self, session: Session) -> None:
        self._engine = session.engine
        session.engine = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def packed(thing: Any) -> bytes:
    return msgspec.msgpack.encode(thing)
