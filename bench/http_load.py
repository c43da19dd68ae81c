"""A cheap load generator for HTTP: keep-alive connections in one thread, each with one request under way.

It reads of a response what it must: the status, and the length. So it takes little of the processor that the server
needs, and takes it from every server alike.
"""

from __future__ import annotations

import math
import re
import selectors
import socket
import time
from collections.abc import Iterator
from typing import Final

_LENGTH: Final = re.compile(rb"\r\ncontent-length: *([0-9]+)", re.IGNORECASE)
_HEAD_END: Final = b"\r\n\r\n"
_TIMEOUT_S: Final = 30.0
_CHUNK: Final = 65_536


class Callers:
    """So many callers, each on a connection of its own."""

    def __init__(self, port: int, count: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._connections = [_connect(port) for _ in range(count)]
        for connection in self._connections:
            self._selector.register(connection, selectors.EVENT_READ, connection)

    def run(self, requests: Iterator[bytes], seconds: float = math.inf) -> int:
        """Send one request after the other on each connection, for so long or until there are no more.

        Returns how many were answered: at least one on each connection, as far as there are so many.
        """
        until = time.perf_counter() + seconds
        begun: dict[socket.socket, bytes] = {}
        waiting = calls = 0
        for one, request in zip(self._connections, requests, strict=False):
            one.sendall(request)
            waiting += 1
        while waiting:
            ready = self._selector.select(_TIMEOUT_S)
            assert ready, "the server does not answer"
            for key, _ in ready:
                connection = key.data
                received = begun.pop(connection, b"") + connection.recv(_CHUNK)
                if not _is_complete(received):
                    begun[connection] = received
                    continue
                calls += 1
                following = next(requests, None) if time.perf_counter() < until else None
                if following is None:
                    waiting -= 1
                else:
                    connection.sendall(following)
        return calls

    def close(self) -> None:
        self._selector.close()
        for connection in self._connections:
            connection.close()


def exchange(port: int, request: bytes) -> bytes:
    """The body of the response to one request."""
    with _connect(port) as connection:
        connection.sendall(request)
        received = b""
        while not _is_complete(received):
            received += connection.recv(_CHUNK)
    return received.partition(_HEAD_END)[2]


def _connect(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _is_complete(received: bytes) -> bool:
    """Whether a response has arrived as a whole. Anything but a success voids the measurement."""
    head, end, body = received.partition(_HEAD_END)
    if not end:
        return False
    assert head[9:10] == b"2", f"the server answers {head.partition(_HEAD_END[:2])[0]!r}"
    length = _LENGTH.search(head)
    assert length is not None, "the response has no length"
    return len(body) >= int(length[1])
