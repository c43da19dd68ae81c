"""When entries expire on NATS: each entry that does has an alarm, a message whose subject names the time.

A process that sweeps follows the alarms alone, and not the whole stream.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import Any

from limpet.engines.nats.follower import Follower
from limpet.engines.nats.messages import EntryId, Message
from limpet.engines.nats.stream import NamespaceStream
from limpet.model import Expire

__all__ = ["Alarms"]


class Alarms(Follower):
    """Which entries expire, and when."""

    def __init__(self, stream: NamespaceStream, connect: Callable[[], Any]) -> None:
        super().__init__(stream, connect, stream.subjects.alarms)
        self._heap: list[tuple[int, EntryId]] = []
        # The message number of each alarm. An alarm that is set again gets a new number, and stays one alarm.
        self._numbers: dict[tuple[int, EntryId], int] = {}
        self._done: dict[int, int] = {}
        self._due_lock = asyncio.Lock()

    def clear(self) -> None:
        """Forget everything."""
        super().clear()
        self._heap = []
        self._numbers = {}
        self._done = {}

    def take(self, subject: str, seq: int, headers: bytes, stored_ms: int) -> None:
        """Add an alarm."""
        alarm = self._stream.subjects.parse_alarm(subject)
        if alarm not in self._numbers:
            heapq.heappush(self._heap, alarm)
        self._numbers[alarm] = seq

    async def due(self, limit: int) -> list[Expire]:
        """The entries that are due now, as the writes that expire them."""
        async with self._due_lock:
            while True:
                now_ms = self._stream.now_ms()
                passed: list[tuple[int, EntryId]] = []
                while self._heap and self._heap[0][0] <= now_ms and len(passed) < limit:
                    passed.append(heapq.heappop(self._heap))
                heap, numbers = self._heap, {item: self._numbers[item] for item in passed}
                kept = passed
                try:
                    last = await self._stream.load_all({entry_id: None for _, entry_id in passed})
                    # An alarm that was set again meanwhile is checked again.
                    kept = [
                        item
                        for item in passed
                        if _expires_ms(last[item[1]]) == item[0] or self._numbers.get(item) != numbers[item]
                    ]
                finally:
                    for item in kept:
                        heapq.heappush(heap, item)
                if heap is not self._heap:
                    # The alarms were cleared meanwhile, and are delivered again.
                    continue
                for item in set(passed) - set(kept):
                    second = item[0] // 1000
                    self._done[second] = max(numbers[item], self._done.get(second, 0))
                    del self._numbers[item]
                if kept or len(passed) < limit:
                    break
            await self._drop_done(now_ms)
        ends = (
            (entry_id, last[entry_id]) for expires_ms, entry_id in kept if _expires_ms(last[entry_id]) == expires_ms
        )
        return [Expire(entry_id[1], message.seq, entry_id[0]) for entry_id, message in ends if message is not None]

    async def _drop_done(self, now_ms: int) -> None:
        """Purge the alarms of past seconds in which no entry is left to expire."""
        first = self._heap[0][0] // 1000 if self._heap else now_ms
        over = [second for second in self._done if second < first and second < now_ms // 1000]
        for second in over:
            seq = self._done.pop(second)
            await self._stream.purge(f"{self._stream.subjects.alarms_of(second)}>", seq)


def _expires_ms(message: Message | None) -> int | None:
    return None if message is None or message.held is None else message.held.expires_ms
