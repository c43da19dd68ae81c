"""One connection to a Redis server: a command goes out, and one reply comes back.

The driver connects: it finds the server, logs in and selects the database. After that its layers are
left out, because they take longer than the server does. hiredis packs the commands and parses the
replies, and one command at a time is under way on a connection.

The sender's callback gets the reply in the same turn of the loop in which it arrives. The reply is an
exception if the server reports an error, if the connection breaks, or if the reply takes too long.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any, Final

import hiredis
from redis import exceptions
from redis.asyncio import ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from limpet.model import Durability

__all__ = ["REPLY_S", "Connection", "connect", "create_pool", "read_durability", "read_info"]

CONNECT_S: Final = 10.0
REPLY_S: Final = 60.0

_INCOMPLETE: Final = object()


def create_pool(url: str) -> Any:
    """The driver's pool for a URL, which makes our connections."""
    return ConnectionPool.from_url(
        url,
        socket_connect_timeout=CONNECT_S,
        # We keep our own deadline; the driver's can lose a cancellation.
        socket_timeout=None,
        # A command that the driver sends again by itself could be applied twice.
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )


async def connect(driver: Any) -> Connection:
    """Let a connection of the driver connect, and take it over."""
    try:
        await driver.connect()
        return Connection(driver)
    except BaseException:
        _abort(driver)
        raise


def _abort(driver: Any) -> None:
    # Not disconnect, which waits for the other side.
    if driver._writer is not None:
        driver._writer.transport.abort()
    driver._reader = driver._writer = None


class Connection(asyncio.Protocol):
    """A connection that was taken over from the driver."""

    def __init__(self, driver: Any) -> None:
        # Keep a reference: the driver's objects close the socket when they are garbage-collected.
        self._driver = driver
        self._transport = driver._writer.transport
        self._reader = hiredis.Reader(
            protocolError=exceptions.InvalidResponse, replyError=driver._parser.parse_error, notEnoughData=_INCOMPLETE
        )
        self._loop = asyncio.get_running_loop()
        self._on_reply: Callable[[Any], None] | None = None
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._transport.set_protocol(self)

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be sent any more."""
        return bool(self._transport.is_closing())

    def send(self, command: tuple[Any, ...], on_reply: Callable[[Any], None]) -> None:
        """Send a command; the callback gets its reply. No other command may be under way."""
        assert self._on_reply is None, "one command at a time is under way on a connection"
        packed = hiredis.pack_command(command)
        self._on_reply = on_reply
        if self.is_closed:
            self.connection_lost(None)
            return
        self._deadline = self._loop.time() + REPLY_S
        if self._timer is None:
            self._timer = self._loop.call_later(REPLY_S, self._check_deadline)
        self._transport.write(packed)

    async def request(self, *command: Any) -> Any:
        """Send a command and wait for its reply. A caller that is cancelled here must abort the connection."""
        reply = self._loop.create_future()
        self.send(command, functools.partial(_resolve, reply))
        return await reply

    def abort(self) -> None:
        """Close the connection at once, even with a command under way."""
        _abort(self._driver)
        if self._timer is not None:
            self._timer.cancel()

    def _check_deadline(self) -> None:
        """Abort a connection whose reply is overdue. One timer serves many commands."""
        self._timer = None
        if self._on_reply is None:
            return
        left_s = self._deadline - self._loop.time()
        if left_s <= 0:
            self.abort()
        else:
            self._timer = self._loop.call_later(left_s, self._check_deadline)

    # Callbacks of the transport -------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol.data_received`."""
        self._reader.feed(data)
        reply = self._reader.gets()
        if reply is not _INCOMPLETE:
            self._deliver(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol.connection_lost`."""
        self.abort()
        error = exceptions.ConnectionError("the connection to the server is closed")
        error.__cause__ = exc
        self._deliver(error)

    def _deliver(self, reply: Any) -> None:
        on_reply, self._on_reply = self._on_reply, None
        if on_reply is not None:
            on_reply(reply)


def _resolve(waiter: asyncio.Future[Any], reply: Any) -> None:
    if waiter.done():
        return
    if isinstance(reply, Exception):
        waiter.set_exception(reply)
    else:
        waiter.set_result(reply)


async def read_info(connection: Connection, section: str, name: str) -> str:
    """One value of INFO; empty where the server does not report it."""
    text: bytes = await connection.request("INFO", section)
    for row in text.decode().splitlines():
        key, _, value = row.partition(":")
        if key == name:
            return value
    return ""


async def _read_setting(connection: Connection, name: str, default: str) -> str:
    """A setting of the server, or the default for a user that may not read settings."""
    try:
        found = await connection.request("CONFIG", "GET", name)
    except exceptions.ResponseError:
        return default
    return found[1].decode() if found else default


async def read_durability(connection: Connection, replicas: int) -> Durability:
    """What an acknowledged write survives, by the settings of the server."""
    if await read_info(connection, "persistence", "aof_enabled") != "1":
        return "none"
    # A user without CONFIG GET gets the default of Redis.
    sync = await _read_setting(connection, "appendfsync", "everysec")
    if sync == "everysec":
        # While a sync runs in the background, Redis replies before it has written its file, for up to two seconds.
        # With "no" it writes the file before it replies, and only never syncs.
        return "seconds"
    if sync != "always" or await _read_setting(connection, "no-appendfsync-on-rewrite", "no") == "yes":
        return "process"
    return "quorum" if replicas else "disk"
