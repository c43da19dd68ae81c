"""A line to a Redis server: words go out, and one answer comes back.

The driver lays the line: it finds the server, says who we are and chooses the database. From then on
its layers are left out, for they take longer than the server does. Commands are packed and answers
read by hiredis, and one command is on a line at a time.

Whoever sends is called with the answer, in the same turn of the loop in which it arrives. It is an
exception when the server says so, when the line breaks, and when the answer takes too long.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any, Final

import hiredis
from redis import exceptions

__all__ = ["ANSWER_S", "Line", "lay"]

ANSWER_S: Final = 60.0

_MORE: Final = object()


async def lay(driver: Any) -> Line:
    """Have a connection of the driver laid, and take it over."""
    try:
        await driver.connect()
        return Line(driver)
    except BaseException:
        _abort(driver)
        raise


def _abort(driver: Any) -> None:
    # Not disconnect, which waits for the other side.
    if driver._writer is not None:
        driver._writer.transport.abort()
    driver._reader = driver._writer = None


class Line(asyncio.Protocol):
    """What was a connection of the driver."""

    def __init__(self, driver: Any) -> None:
        # Kept, for what the driver made closes the line when nobody refers to it any more.
        self._driver = driver
        self._transport = driver._writer.transport
        self._reader = hiredis.Reader(
            protocolError=exceptions.InvalidResponse, replyError=driver._parser.parse_error, notEnoughData=_MORE
        )
        self._loop = asyncio.get_running_loop()
        self._heard: Callable[[Any], None] | None = None
        self._until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._transport.set_protocol(self)

    @property
    def is_cut(self) -> bool:
        """Whether nothing can be sent any more."""
        return bool(self._transport.is_closing())

    def send(self, words: tuple[Any, ...], heard: Callable[[Any], None]) -> None:
        """Send a command, and have this called with the answer. The line has none on its way."""
        assert self._heard is None, "one command is on a line at a time"
        packed = hiredis.pack_command(words)
        self._heard = heard
        if self.is_cut:
            self.connection_lost(None)
            return
        self._until = self._loop.time() + ANSWER_S
        if self._timer is None:
            self._timer = self._loop.call_later(ANSWER_S, self._look_at_time)
        self._transport.write(packed)

    async def ask(self, *words: Any) -> Any:
        """Send a command and wait for its answer. Whoever is cancelled here must cut the line."""
        answer = self._loop.create_future()
        self.send(words, functools.partial(_tell, answer))
        return await answer

    def cut(self) -> None:
        """Let go of the line at once, whatever is on it."""
        _abort(self._driver)
        if self._timer is not None:
            self._timer.cancel()

    def _look_at_time(self) -> None:
        """Cut a line whose answer is overdue. One timer serves many commands."""
        self._timer = None
        if self._heard is None:
            return
        left_s = self._until - self._loop.time()
        if left_s <= 0:
            self.cut()
        else:
            self._timer = self._loop.call_later(left_s, self._look_at_time)

    # What the transport calls ---------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol.data_received`."""
        self._reader.feed(data)
        answer = self._reader.gets()
        if answer is not _MORE:
            self._tell(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol.connection_lost`."""
        self.cut()
        error = exceptions.ConnectionError("the line to the server is cut")
        error.__cause__ = exc
        self._tell(error)

    def _tell(self, answer: Any) -> None:
        heard, self._heard = self._heard, None
        if heard is not None:
            heard(answer)


def _tell(waiting: asyncio.Future[Any], answer: Any) -> None:
    if waiting.done():
        return
    if isinstance(answer, Exception):
        waiting.set_exception(answer)
    else:
        waiting.set_result(answer)
