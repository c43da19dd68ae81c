"""A server on NATS subjects to ask, on SQLite and on PostgreSQL, and the hands of a plugin to ask with."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import json
import os
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

import nats as driver
import pytest
from nats.aio.client import Client

from limpet.clock import ManualClock
from limpet.opening import open_session
from limpet.server.dispatch import Call, Dispatcher
from limpet.server.subjects import PluginSubjects
from limpet.session import Session
from tests.servers import Nats

PATIENCE_S: Final = 120.0
ENGINES: Final = ("sqlite", "postgres")


@functools.cache
def nats_server() -> Nats:
    """A NATS server of this process alone: on any other, another process may serve the same subjects."""
    server = Nats(Path(tempfile.mkdtemp(prefix="limpet-subjects-")), "max_payload: 1MB\n")
    server.start()
    atexit.register(server.stop)
    return server


class Observer:
    """Keeps what came of every request."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def done(self, call: Call) -> None:
        self.calls.append(call)


class Plugins:
    """A connection to NATS with more patience than a plugin has, and what serves it."""

    def __init__(
        self,
        client: Client,
        session: Session,
        served: PluginSubjects,
        observer: Observer,
        turn: Callable[[float], None],
    ) -> None:
        self.client = client
        self.session = session
        self.served = served
        self.observer = observer
        self.turn = turn

    async def publish(self, subject: str, body: bytes) -> None:
        await self.client.publish(subject, body)

    async def request(self, subject: str, body: bytes = b"", timeout: float = PATIENCE_S) -> Any:  # noqa: ASYNC109
        return await self.client.request(subject, body, timeout=timeout)

    async def ask(self, name: str, plugin: str = "my-plugin", /, **members: Any) -> dict[str, Any]:
        """Ask for an operation by its members, and read the reply."""
        return await self.say(f"db.kv.{plugin}.{name}", json.dumps(members).encode())

    async def say(self, subject: str, body: bytes) -> dict[str, Any]:
        reply: dict[str, Any] = json.loads((await self.request(subject, body)).data)
        return reply


@contextlib.asynccontextmanager
async def opened(url: str, clock: Any = None) -> AsyncIterator[Session]:
    """A session with its sweeper."""
    session = await open_session(url, clock=clock, max_value_bytes=1_000_000, window=None)
    try:
        yield session
    finally:
        await session.close()


@contextlib.asynccontextmanager
async def serving(session: Session, *, nats_url: str | None = None, **options: Any) -> AsyncIterator[PluginSubjects]:
    """A server on a connection of its own."""
    connection = await driver.connect(nats_url or nats_server().url, allow_reconnect=False)
    observers, more = options.pop("observers", ()), options.pop("dispatcher", {})
    dispatcher = Dispatcher(session.with_value_limit(65_536), "nats", observers=observers, **more)
    served = PluginSubjects(dispatcher, connection, **options)
    await served.start()
    try:
        yield served
    finally:
        await served.drain()
        await connection.close()


@contextlib.asynccontextmanager
async def connected(**options: Any) -> AsyncIterator[Client]:
    """A connection to NATS."""
    client = await driver.connect(nats_server().url, **options)
    try:
        yield client
    finally:
        await client.close()


async def eventually(holds: Callable[[], Any]) -> Any:
    """Wait until something holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not (found := holds()):  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)
    return found


@contextlib.asynccontextmanager
async def plugins_on(engine: str, folder: Path, config: pytest.Config) -> AsyncIterator[Plugins]:
    """A server on an engine that nothing is stored in."""
    clock: ManualClock | None = None
    if engine == "sqlite":
        url = f"sqlite:///{folder}/state.db"
        clock = ManualClock()
    else:
        url = f"{os.environ['LIMPET_TEST_POSTGRES']}?schema=subjects_{os.getpid()}"

    def turn(seconds: float) -> None:
        if clock is not None:
            clock.advance(seconds)
        else:
            # The schema is shared by the tests of this process, and time must not go back in it.
            _database_ms[0] += round(seconds * 1000)
            config.hook.pytest_limpet_turn(url=url, now_ms=_database_ms[0])

    observer = Observer()
    async with opened(url, clock) as session, serving(session, observers=[observer]) as served, connected() as client:
        turn(1)
        yield Plugins(client, session, served, observer, turn)
        if engine == "postgres" and not session.closed:
            await _clear(served)


_database_ms: Final = [time.time_ns() // 1_000_000]


async def _clear(served: PluginSubjects) -> None:
    """The next test uses the same schema: making one takes longer than most tests."""
    for store in [*served._dispatcher._stores.values()]:
        for key in [entry.key async for entry in store.scan()]:
            await store.delete(key)
        await store.sweep()


class RawLine:
    """A connection that sends what no driver would."""

    def __init__(self, port: int | None = None) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port or nats_server().port), PATIENCE_S)
        self._socket.recv(65_536)
        self._socket.sendall(b'CONNECT {"verbose":false,"pedantic":false,"headers":true,"no_responders":true}\r\n')

    def send(self, frames: bytes) -> None:
        """Send, and wait until NATS has read all of it."""
        self._socket.sendall(frames + b"PING\r\n")
        received = b""
        while b"PONG\r\n" not in received:
            part = self._socket.recv(65_536)
            assert part, f"NATS ended the connection: {received!r}"
            received += part

    def close(self) -> None:
        self._socket.close()
