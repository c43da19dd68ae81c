"""The log of a namespace without its keys, for a process that sweeps and reads nothing else.

The size of a stream does not show whether its log is beyond the window, because the last messages of all keys count
too. A mirror of all keys would show it, and takes about a kilobyte of memory for each. This takes a fraction of that,
and only for changes after the floor.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from limpet.engines.nats.follower import Follower
from limpet.engines.nats.log import Log, LogItem
from limpet.engines.nats.messages import EntryId, parse_floor, parse_head
from limpet.engines.nats.stream import NamespaceStream
from limpet.model import Window

__all__ = ["LogFollower"]

# Of so many changes, a tenth is left for a while to another process, which may be trimming the log already.
MANY: Final = 10_000
LEFT: Final = 0.1
LEFT_S: Final = 30.0

_NO_KEY: Final[EntryId] = ("data", "")


class LogFollower(Follower):
    """The number, the time and the size of each change after the floor."""

    def __init__(self, stream: NamespaceStream, connect: Callable[[], Any]) -> None:
        super().__init__(stream, connect)
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        super().clear()
        self.log = Log()
        # When the first change was found that need not be kept, while no process has raised the floor since.
        self._beyond_at: float | None = None

    async def choose_first(self) -> str:
        """Begin after the floor."""
        self.position = self.log.floor = self.log.start = await self._stream.floor()
        return "by_start_sequence"

    def take(self, subject: str, seq: int, headers: bytes, stored_ms: int) -> None:
        """Add a message."""
        entry_id = self._stream.subjects.entry_id(subject)
        if subject == self._stream.subjects.floor:
            self.log.raise_floor(*parse_floor(headers))
            self._beyond_at = None
        elif entry_id is not None and entry_id[0] != "receipt":
            message = parse_head(entry_id[1], seq, headers)
            self.log.append(LogItem(seq, message.at_ms or stored_ms, message.weight_bytes, _NO_KEY))

    def is_beyond(self, window: Window) -> bool:
        """Whether this process should trim the log to a window. What is in the stream now was delivered."""
        log, now = self.log, time.monotonic()
        oldest = ((item.seq, item.at_ms, item.weight_bytes) for item in log.after(log.floor))
        dropped, _, _ = window.excess(oldest, count=len(log), size_bytes=log.size_bytes, now_ms=self._stream.now_ms())
        if len(log) < MANY or dropped > LEFT * len(log):
            return dropped > 0
        # For some of that every process that sweeps would have to follow all keys, as the one does that trims.
        if not dropped:
            self._beyond_at = None
        elif self._beyond_at is None:
            self._beyond_at = now
        return self._beyond_at is not None and now - self._beyond_at > LEFT_S
