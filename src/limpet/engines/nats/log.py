"""The log of a namespace on NATS, as a process that follows the stream knows it: which messages are changes.

It has the number, the time and the size of each change, and not what it was: that is read from the stream. Its totals
are kept up to date, so counting and trimming do not depend on how long it is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from limpet.engines.nats.messages import EntryId
from limpet.model import BEGINNING

__all__ = ["Log", "LogItem"]


class LogItem(NamedTuple):
    """A change: the number of its message, its time, the size of its key and value, and its entry."""

    seq: int
    at_ms: int
    weight_bytes: int
    entry_id: EntryId


class Log:
    """The changes of a namespace after a number.

    Attributes:
        start: All changes after this number are here.
        floor: Up to where the log was trimmed.
        floor_print: The fingerprint of the change there.
        lost: Changes up to this number may have been dropped before this process has seen them.
        size_bytes: The size of the changes.
    """

    def __init__(self) -> None:
        self.start = 0
        self.floor = 0
        self.floor_print = BEGINNING
        self.lost = 0
        self.size_bytes = 0
        self._items: list[LogItem] = []
        # Items before this index were trimmed, and are removed when they are many.
        self._first = 0

    def __len__(self) -> int:
        return len(self._items) - self._first

    @property
    def oldest(self) -> int:
        """The earliest number after which all changes can be read."""
        return max(self.floor, self.lost)

    def append(self, item: LogItem) -> None:
        """Add the latest change."""
        self._items.append(item)
        self.size_bytes += item.weight_bytes

    def after(self, revision: int) -> Iterator[LogItem]:
        """The changes after a revision. Nothing may be added while they are read."""
        items = self._items
        return (items[index] for index in range(self._index_after(revision), len(items)))

    def last_until(self, revision: int) -> LogItem | None:
        """The change at a revision, or the last one before it; None if that was trimmed."""
        index = self._index_after(revision) - 1
        return self._items[index] if index >= self._first else None

    def raise_floor(self, floor: int, floor_print: str) -> list[LogItem]:
        """Trim the log, and return the changes that it no longer has."""
        if floor >= self.floor:
            self.floor, self.floor_print = floor, floor_print
        end = self._index_after(self.floor)
        dropped = self._items[self._first : end]
        self._first = end
        self.size_bytes -= sum(item.weight_bytes for item in dropped)
        if self._first > 1000 and self._first > len(self._items) // 2:
            del self._items[: self._first]
            self._first = 0
        return dropped

    def _index_after(self, revision: int) -> int:
        return bisect_right(self._items, revision, lo=self._first, key=lambda item: item.seq)
