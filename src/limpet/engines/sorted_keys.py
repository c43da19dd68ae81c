"""Keys in the order of a scan, for maps in the memory of this process."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from typing import Final

from limpet.keys import Span

__all__ = ["SortedKeys"]

FRESH_MAX: Final = 64


class SortedKeys:
    """The keys of a map in order. Writers only append; a scan sorts."""

    def __init__(self) -> None:
        self._sorted: list[str] = []
        self._fresh: list[str] = []

    def add(self, key: str) -> None:
        """Add a key that is new in the map."""
        # Beyond so many, sorting all keys again is quicker than inserting each.
        if len(self._fresh) <= FRESH_MAX:
            self._fresh.append(key)

    def between(self, span: Span, entries: Mapping[str, object], *, reverse: bool = False) -> Iterator[str]:
        """The keys of a span that are still in the map, in order; with ``reverse`` the last one first."""
        places = self._places(span, entries)
        chosen = reversed(places) if reverse else places
        return (key for key in map(self._sorted.__getitem__, chosen) if key in entries)

    def count(self, span: Span, entries: Mapping[str, object]) -> int:
        """Count the keys of a span that are still in the map, in a time that does not depend on how many they are."""
        self._add_fresh(entries)
        if len(self._sorted) > len(entries):
            # Once after a delete, and not in each count.
            self._sorted = [key for key in self._sorted if key in entries]
        return len(self._places(span, entries))

    def _places(self, span: Span, entries: Mapping[str, object]) -> range:
        """Where the keys of a span are among the sorted ones."""
        self._add_fresh(entries)
        start = bisect_left(self._sorted, span.start)
        stop = len(self._sorted) if span.stop is None else bisect_left(self._sorted, span.stop)
        return range(start, stop)

    def _add_fresh(self, entries: Mapping[str, object]) -> None:
        if len(self._fresh) > FRESH_MAX or self._is_stale(entries):
            self._sorted = sorted(entries)
        else:
            for key in self._fresh:
                at = bisect_left(self._sorted, key)
                if at == len(self._sorted) or self._sorted[at] != key:
                    insort(self._sorted, key, lo=at)
        self._fresh = []

    def tidy(self, entries: Mapping[str, object]) -> None:
        """Drop deleted keys when they are many."""
        if self._is_stale(entries):
            self._sorted, self._fresh = sorted(entries), []

    def _is_stale(self, entries: Mapping[str, object]) -> bool:
        # A deleted key stays until `tidy`, and is there twice if it was written again.
        return len(self._sorted) + len(self._fresh) > 64 + 2 * len(entries)
