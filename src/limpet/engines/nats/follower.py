"""Following the messages of a stream, in their order and without their bodies.

The server delivers each message once. What a reader waits for is bounded: it ends when all messages have come that
were stored when it began, or in `Unavailable` when the server delivers none for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from limpet.engines.nats.connection import Connection, NoReply
from limpet.engines.nats.stream import NamespaceStream
from limpet.errors import Unavailable

__all__ = ["Follower", "RangeReader"]

T = TypeVar("T")

IDLE_S: Final = 60.0
LOOK_S: Final = 0.05
# After so long without a message, delivery is started again; each further time after twice as long.
STALL_S: Final = 2.0
# After so long without a message, waiters get an error. While messages come, they wait as long as it takes.
PROGRESS_S: Final = 10.0
# The ends of keys are kept at least twice as long after they were trimmed, so resuming misses none.
BEHIND_S_MAX: Final = 300.0


class Follower:
    """Follows the messages of a stream in their order, without their bodies.

    Attributes:
        position: The number of the last message that was delivered.
    """

    def __init__(self, stream: NamespaceStream, connect: Callable[[], Any], subject: str = ">") -> None:
        self._stream = stream
        self._connect = connect
        self._subject = subject
        self._connection: Connection | None = None
        # The connection that messages last came on, and the Limpet header of the last of them.
        self._last_connection: Connection | None = None
        self._last_header = b""
        self._number = b""
        self._name = ""
        self._delivered = 0
        self._store_id = ""
        self._moved = asyncio.Event()
        self._moved_at = 0.0
        self._stall_s = STALL_S
        self._used_at = 0.0
        self._caught_up_at = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None
        self._starting = asyncio.Lock()
        self.position = 0

    def take(self, subject: str, seq: int, headers: bytes, stored_ms: int) -> None:
        """Add a message, which the server stored at this time."""
        raise NotImplementedError

    async def choose_first(self) -> str:
        """Which messages come first, when nothing is known yet: all, or the last of each subject.

        Or, as ``by_start_sequence``, those after a position that this sets.
        """
        return "all"

    def clear(self) -> None:
        """Forget everything."""
        self.position = 0

    async def catch_up(self, until: int | None = None) -> None:
        """Wait until all messages that are in the stream now, or those up to a number, have been delivered."""
        loop = asyncio.get_running_loop()
        self._used_at = loop.time()
        await self._start()
        seq = await self._next_seq()
        if seq is None:
            self._caught_up_at = loop.time()
            return
        last = await self._last_seq() if until is None else until
        progress, progress_at = (self.position, seq), loop.time()
        while seq is not None and seq <= last:
            await self._wait_for(seq)
            if self.position >= last:
                break
            if progress != (self.position, seq):
                progress, progress_at = (self.position, seq), loop.time()
            elif loop.time() - progress_at > PROGRESS_S:
                raise Unavailable(
                    f"stream {self._stream.name}: the server has delivered no message for {PROGRESS_S:g} s, "
                    f"at message {self.position} of {last}; try again, or check what keeps the server busy"
                )
            seq = await self._next_seq()
        self._caught_up_at = loop.time()

    async def _next_seq(self) -> int | None:
        """The number of the next message that was not delivered yet."""
        get = self._stream.get
        found = await self._request(lambda: get({"seq": self.position + 1, "next_by_subj": self._subject}))
        return None if found is None else found[1]

    async def _last_seq(self) -> int:
        """The number of the last message in the stream."""
        info = await self._request(self._stream.info)
        return int(info["state"]["last_seq"])

    async def _request(self, request: Callable[[], Awaitable[T]]) -> T:
        """Make a request, and make it again for as long as messages come.

        Its reply comes on the same connection, and at first hundreds of thousands of messages may be before it.
        """
        while True:
            before = self.position
            try:
                return await request()
            except NoReply:
                if self.position == before:
                    raise

    async def _wait_for(self, seq: int) -> None:
        """Wait for a message, which may be dropped before it is delivered."""
        loop = asyncio.get_running_loop()
        if self.position >= seq:
            return
        self._moved.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await self._moved.wait()
        if self._starting.locked():
            # Another task is starting delivery, which may take a while.
            return
        is_stalled = loop.time() - self._moved_at > self._stall_s
        if is_stalled:
            self._stall_s *= 2
        if is_stalled or self._connection is None or self._connection.is_lost:
            self.stop()
            await self._start()

    async def _start(self) -> None:
        """Start delivery, from our position."""
        if self._is_running():
            return
        async with self._starting:
            if self._is_running():
                return
            connection: Connection = await self._connect()
            behind_s = asyncio.get_running_loop().time() - self._caught_up_at
            is_other = self._store_id != self._stream.store_id or behind_s > BEHIND_S_MAX
            if is_other or (self._last_connection not in (None, connection) and not await self._is_same_stream()):
                self.clear()
                self._store_id = self._stream.store_id
                # A load that is interrupted is resumed too, or it might never end.
                self._caught_up_at = asyncio.get_running_loop().time()
            self._last_connection = connection
            policy = "by_start_sequence" if self.position else await self.choose_first()
            delivered, self._number = connection.subscribe(self._on_message)
            self._connection, self._name, self._delivered = connection, os.urandom(8).hex(), 0
            config: dict[str, object] = {
                "name": self._name,
                "deliver_subject": delivered,
                "ack_policy": "none",
                "headers_only": True,
                "flow_control": True,
                "idle_heartbeat": 5_000_000_000,
                "inactive_threshold": 30_000_000_000,
                "mem_storage": True,
                "num_replicas": 1,
                "deliver_policy": policy,
                "filter_subject": self._subject,
            }
            if policy == "by_start_sequence":
                config["opt_start_seq"] = self.position + 1
            name = self._stream.name
            request = {"stream_name": name, "config": config, "action": "create"}
            try:
                await self._stream.api(f"CONSUMER.CREATE.{name}.{self._name}", request)
            except BaseException:
                self.stop()
                raise
            loop = asyncio.get_running_loop()
            self._moved_at = loop.time()
            if self._idle_timer is None:
                self._idle_timer = loop.call_later(IDLE_S, self._stop_if_idle)

    async def _is_same_stream(self) -> bool:
        """Whether the stream still has the message that was last delivered.

        A server may come back with a backup of the stream, which has the same name and other messages under the same
        numbers.
        """
        if not self.position or not self._last_header:
            return not self.position
        found = await self._stream.get({"seq": self.position})
        return found is not None and _limpet_header(found[2]) == self._last_header

    def _is_running(self) -> bool:
        return self._connection is not None and not self._connection.is_lost and self._store_id == self._stream.store_id

    def _on_message(self, subject: bytes, reply: bytes, headers: bytes, _: bytes) -> None:
        connection = self._connection
        if connection is None:
            return
        if headers.startswith(b"NATS/1.0 100"):
            stalled = headers.find(b"\r\nNats-Consumer-Stalled: ")
            if stalled >= 0:
                reply = headers[stalled + 25 : headers.index(b"\r\n", stalled + 2)]
            if reply:
                connection.send(reply.decode())
            return
        words = reply.split(b".")
        at = 5 if len(words) == 9 else 7
        seq, delivered, stored_ns = int(words[at]), int(words[at + 1]), int(words[at + 2])
        if delivered != self._delivered + 1:
            # A message is missing in between. The next read starts delivery again from our position.
            self.stop()
            return
        self._delivered = delivered
        self.take(subject.decode(), seq, headers, stored_ns // 1_000_000)
        self.position, self._last_header = seq, _limpet_header(headers)
        self._moved_at, self._stall_s = connection._loop.time(), STALL_S
        self._moved.set()

    def stop(self) -> None:
        """Stop delivery."""
        connection, self._connection = self._connection, None
        if connection is not None and not connection.is_lost:
            connection.unsubscribe(self._number)
            connection.send(f"$JS.API.CONSUMER.DELETE.{self._stream.name}.{self._name}")
        self._moved.set()

    def _stop_if_idle(self) -> None:
        loop = asyncio.get_running_loop()
        self._idle_timer = None
        if self._connection is None:
            return
        if loop.time() - self._used_at > IDLE_S:
            self.stop()
        else:
            self._caught_up_at = loop.time()
            self._idle_timer = loop.call_later(IDLE_S, self._stop_if_idle)


Delivered = tuple[str, int, bytes, int]
"""A message without its body: its subject, its number, its headers, and when it was stored."""


class RangeReader(Follower):
    """Reads the messages between two numbers once."""

    def __init__(
        self, stream: NamespaceStream, connect: Callable[[], Any], after: int, until: int, subject: str = ">"
    ) -> None:
        super().__init__(stream, connect, subject)
        self.position = after
        self._after = after
        self._until = until
        self._store_id = stream.store_id
        self._found: list[Delivered] = []

    def take(self, subject: str, seq: int, headers: bytes, stored_ms: int) -> None:
        """Add a message."""
        if seq <= self._until:
            self._found.append((subject, seq, headers, stored_ms))

    def clear(self) -> None:
        """Begin again."""
        self.position = self._after
        self._found = []

    async def read(self) -> list[Delivered]:
        """Read the messages, in their order."""
        self._caught_up_at = asyncio.get_running_loop().time()
        try:
            await self.catch_up(self._until)
        finally:
            self.stop()
            if self._idle_timer is not None:
                self._idle_timer.cancel()
        return self._found


def _limpet_header(headers: bytes) -> bytes:
    """The Limpet header of a message; empty where another program wrote it."""
    at = headers.find(b"\r\nLimpet: ")
    return b"" if at < 0 else headers[at + 2 : headers.index(b"\r\n", at + 2)]
