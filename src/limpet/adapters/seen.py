"""What a caller has seen: the base of a three-way merge (`limpet.merge`).

A framework that has only get and put changes one member of an object by reading the whole and writing the whole. Two
that do so at the same time lose a change. To keep both, a put has to know which object its caller changed: the *base*.

The base is what the same task read or wrote last under this key, or the task that started it did. Only that is right:
what another task read in the meantime has members that this caller never saw, and each of them would count as deleted.
A context variable with an immutable mapping is exactly this. A task starts with a copy of what its starter saw, shows
its own reads to no other task, and all of it is gone with the task.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from limpet.codec import decode
from limpet.draft import Expectation
from limpet.model import ABSENT, Entry, Revision

__all__ = ["Seen", "SeenKeys"]

SEEN_MAX: Final = 32
"""How many keys a task remembers. Past that, a write of the key read longest ago replaces the whole value."""

SEEN_BYTES_MAX: Final = 4_000_000


class Seen(NamedTuple):
    """An object as a caller knows it. ``stored`` is None for an absent key.

    ``revision`` is None if the store holds something else: after a merge, which has members of others.
    """

    stored: bytes | None
    revision: int | None

    @classmethod
    def of(cls, entry: Entry | None) -> Seen:
        """What a caller knows after reading this entry."""
        if entry is None or not isinstance(entry.stored, bytes):
            return cls(None, None)
        return cls(entry.stored, entry.revision)

    @property
    def expectation(self) -> Expectation | None:
        """What the store holds if no other task wrote; None if it is known to hold something else."""
        if self.stored is None:
            return ABSENT
        return None if self.revision is None else Revision(self.revision)

    @property
    def value(self) -> Mapping[str, Any]:
        """The object; an empty one for an absent key."""
        value = None if self.stored is None else decode(self.stored)
        return value if isinstance(value, dict) else {}


_numbers = itertools.count()
_seen: ContextVar[Mapping[tuple[int, str], Seen]] = ContextVar("limpet_seen", default=MappingProxyType({}))


class SeenKeys:
    """What the current task has seen through one adapter, by key."""

    def __init__(self) -> None:
        # A number and not the adapter itself, so that a task does not keep the adapter alive.
        self._number = next(_numbers)

    def get(self, key: str) -> Seen | None:
        """What this task read or wrote last; None if it did neither."""
        return _seen.get().get((self._number, key))

    def note(self, key: str, seen: Seen) -> None:
        """Remember what this task has just read or written."""
        place = (self._number, key)
        # A new mapping: the old one may be that of other tasks as well.
        known = {other: earlier for other, earlier in _seen.get().items() if other != place}
        known[place] = seen
        size_bytes = sum(len(each.stored or b"") for each in known.values())
        while len(known) > SEEN_MAX or (size_bytes > SEEN_BYTES_MAX and len(known) > 1):
            size_bytes -= len(known.pop(next(iter(known))).stored or b"")
        _seen.set(known)

    def note_deleted(self, prefix: str) -> None:
        """Remember that this task has just deleted all keys with a prefix."""
        for number, key in _seen.get():
            if number == self._number and key.startswith(prefix):
                self.note(key, Seen(None, None))
