"""The order of concurrent requests, key by key.

Requests for different keys run concurrently. A write waits for every earlier request that names one of its keys, a
read for the earlier writes of its keys; reads do not wait for each other. A request that covers many keys, such as a
list, waits for all earlier writes of its namespace.

This is bookkeeping only: it says which requests may start, and the caller starts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["KeyQueue", "Slot"]


class Slot:
    """One request in the queue, with a count of the earlier requests that it waits for.

    Attributes:
        namespace: The namespace of its keys.
        keys: The keys that it names, each once.
        writes: Whether it may change them.
        after_writes: Whether it waits for all earlier writes of the namespace.
        request: What the caller of the queue needs to start it.
    """

    __slots__ = ("_dependents", "_waits_for", "after_writes", "keys", "namespace", "request", "writes")

    def __init__(
        self, namespace: str, keys: Sequence[str], *, writes: bool, after_writes: bool = False, request: Any = None
    ) -> None:
        self.namespace = namespace
        self.keys = keys
        self.writes = writes
        self.after_writes = after_writes
        self.request = request
        self._waits_for = 0
        self._dependents: list[Slot] | None = None

    def _wait_for(self, earlier: Slot) -> None:
        if earlier._dependents is None:
            earlier._dependents = []
        earlier._dependents.append(self)
        self._waits_for += 1


class _KeyTail:
    """The end of the queue at one key: the latest write, and the reads that came after it."""

    __slots__ = ("reads", "write")

    def __init__(self) -> None:
        self.write: Slot | None = None
        self.reads: set[Slot] = set()


class KeyQueue:
    """The requests that run or wait."""

    def __init__(self) -> None:
        self._tails: dict[tuple[str, str], _KeyTail] = {}
        self._writes: dict[str, set[Slot]] = {}

    def enter(self, slot: Slot) -> bool:
        """Add a request at the end. True when it waits for no other and may start."""
        if slot.after_writes:
            for earlier in self._writes.get(slot.namespace, ()):
                slot._wait_for(earlier)
        for key in slot.keys:
            tail = self._tails.get((slot.namespace, key))
            if tail is None:
                tail = self._tails[slot.namespace, key] = _KeyTail()
            self._append(slot, tail)
        if slot.writes:
            self._writes.setdefault(slot.namespace, set()).add(slot)
        return slot._waits_for == 0

    def _append(self, slot: Slot, tail: _KeyTail) -> None:
        if not slot.writes:
            if tail.write is not None:
                slot._wait_for(tail.write)
            tail.reads.add(slot)
            return
        # The reads wait for the write before them, so a write that waits for the reads waits for that write too.
        for earlier in tail.reads or ([] if tail.write is None else [tail.write]):
            slot._wait_for(earlier)
        tail.write = slot
        tail.reads = set()

    def leave(self, slot: Slot) -> list[Slot]:
        """Remove a finished request. Returns the requests that may start now."""
        for key in slot.keys:
            tail = self._tails.get((slot.namespace, key))
            if tail is None:
                continue
            if tail.write is slot:
                tail.write = None
            else:
                tail.reads.discard(slot)
            if tail.write is None and not tail.reads:
                del self._tails[slot.namespace, key]
        if slot.writes:
            writes = self._writes[slot.namespace]
            writes.discard(slot)
            if not writes:
                del self._writes[slot.namespace]
        ready: list[Slot] = []
        for dependent in slot._dependents or ():
            dependent._waits_for -= 1
            if dependent._waits_for == 0:
                ready.append(dependent)
        return ready

    def __len__(self) -> int:
        """The number of keys that a request runs or waits at."""
        return len(self._tails)
