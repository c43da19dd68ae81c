"""Requests in the order in which they came, key by key.

Requests about different keys run side by side. A write waits for every earlier request that names one of its keys, a
read for the earlier writes of its keys; reads do not wait for each other. What looks at many keys at once, such as a
list, waits for all writes of its namespace that came before it.

This is bookkeeping only: it tells who may begin, and somebody else begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["Order", "Place"]


class Place:
    """A request among those that are under way.

    Attributes:
        namespace: Whose keys they are.
        keys: The keys that it names, each once.
        writes: Whether it may change them.
        after_writes: Whether it waits for all earlier writes of the namespace.
        request: Whatever the owner needs to begin it.
    """

    __slots__ = ("_ahead", "_behind", "after_writes", "keys", "namespace", "request", "writes")

    def __init__(
        self, namespace: str, keys: Sequence[str], *, writes: bool, after_writes: bool = False, request: Any = None
    ) -> None:
        self.namespace = namespace
        self.keys = keys
        self.writes = writes
        self.after_writes = after_writes
        self.request = request
        self._ahead = 0
        self._behind: list[Place] | None = None

    def _follow(self, earlier: Place) -> None:
        if earlier._behind is None:
            earlier._behind = []
        earlier._behind.append(self)
        self._ahead += 1


class _Line:
    """Who comes last at a key: the latest write, and the reads behind it."""

    __slots__ = ("reads", "write")

    def __init__(self) -> None:
        self.write: Place | None = None
        self.reads: set[Place] = set()


class Order:
    """The requests that are under way."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str], _Line] = {}
        self._writes: dict[str, set[Place]] = {}

    def enter(self, place: Place) -> bool:
        """Take a place at the end. True when nothing is ahead of it and it may begin."""
        if place.after_writes:
            for earlier in self._writes.get(place.namespace, ()):
                place._follow(earlier)
        for key in place.keys:
            line = self._lines.get((place.namespace, key))
            if line is None:
                line = self._lines[place.namespace, key] = _Line()
            self._queue(place, line)
        if place.writes:
            self._writes.setdefault(place.namespace, set()).add(place)
        return place._ahead == 0

    def _queue(self, place: Place, line: _Line) -> None:
        if not place.writes:
            if line.write is not None:
                place._follow(line.write)
            line.reads.add(place)
            return
        # The reads wait for the write before them, so waiting for them is waiting for it too.
        for earlier in line.reads or ([] if line.write is None else [line.write]):
            place._follow(earlier)
        line.write = place
        line.reads = set()

    def leave(self, place: Place) -> list[Place]:
        """Be done. Returns those that may begin now."""
        for key in place.keys:
            line = self._lines.get((place.namespace, key))
            if line is None:
                continue
            if line.write is place:
                line.write = None
            else:
                line.reads.discard(place)
            if line.write is None and not line.reads:
                del self._lines[place.namespace, key]
        if place.writes:
            writes = self._writes[place.namespace]
            writes.discard(place)
            if not writes:
                del self._writes[place.namespace]
        ready: list[Place] = []
        for follower in place._behind or ():
            follower._ahead -= 1
            if follower._ahead == 0:
                ready.append(follower)
        return ready

    def __len__(self) -> int:
        """How many keys somebody is at."""
        return len(self._lines)
