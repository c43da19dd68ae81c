"""What the committer sends to an engine, and what it gets back.

A unit has what its plan has read, and what it writes. The engine compares the one with what is there; where all of it
is the same, it writes the other.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol

import msgspec

from limpet.commit.group import Counters, EntryId
from limpet.commit.relative import Moment
from limpet.errors import LimpetError
from limpet.model import Change, Entry

__all__ = [
    "ABSENT_REVISION",
    "UNKNOWN_REVISION",
    "Apply",
    "Expected",
    "Head",
    "Hold",
    "ReplyLost",
    "Stale",
    "Storage",
    "Unit",
]

ABSENT_REVISION: Final = -1
"""Expected where there is no entry. Not 0, which the receipt of a request that changes nothing may have."""
UNKNOWN_REVISION: Final = -2
"""Expected of an entry that must be read, in any case."""


class Head(msgspec.Struct, frozen=True, gc=False):
    """What is stored under a key: an entry, perhaps without its value; no entry for an absent key.

    Its weight is None where only the entry itself tells it.
    """

    entry: Entry | None = None
    weight_bytes: int | None = None


class Expected(msgspec.Struct, frozen=True, gc=False):
    """What a plan has read.

    Attributes:
        revision: The revision of the entry, `ABSENT_REVISION` or `UNKNOWN_REVISION`.
        has_expired: Whether the entry has expired, by the time of the engine.
        needs_value: Whether the reply must have the value if the entry is another.
        updated_ms: When the entry was updated, and
        expires_ms: when it expires. A server that lost its last writes gives their revisions again, to others.
    """

    revision: int = ABSENT_REVISION
    has_expired: bool = False
    needs_value: bool = False
    updated_ms: int = 0
    expires_ms: int | None = None


class Unit(msgspec.Struct, gc=False):
    """Batches that depend on each other: they are applied together or not at all.

    Revisions and times are those of a plan: see `limpet.commit.relative`.

    Attributes:
        expected: What the plan has read.
        changes: The changes, in the order of their revisions, each with its weight.
        kept: Receipts and marks of superseded requests, which leave no change in the log.
        counters: What the changes add to the counters of the namespace; the revision is the last one that is used.
    """

    expected: dict[EntryId, Expected]
    changes: list[tuple[Change, int]]
    kept: Mapping[EntryId, Entry]
    counters: Counters


class Stale(msgspec.Struct, frozen=True, gc=False):
    """A unit that was not applied, because an entry is not as expected: what is there for each that differs."""

    found: dict[EntryId, Head]
    now_ms: int


class ReplyLost(Exception):
    """A request was sent and its reply was lost: it may have been applied. Its cause is the error."""


class Storage(Protocol):
    """What the committer needs of an engine."""

    async def apply(self, namespace: str, name: str, units: Sequence[Unit]) -> Sequence[Moment | Stale | LimpetError]:
        """Apply each unit whose entries are all as expected, and return when that was.

        ``name`` is the name of the request: if a superseded mark has it, nothing is applied. The revisions of a unit
        follow its moment's without a gap. A unit without changes is only compared. An error in place of a unit means
        that this one was not applied. An error that is raised means that nothing was applied; `ReplyLost` means that
        this is unknown.
        """
        ...

    async def find_changes(self, namespace: str, after: int, origin: str) -> list[Change]:
        """The changes of this origin in the log after a revision."""
        ...


Apply = Callable[[str, Sequence[Unit]], Awaitable[Sequence[Moment | Stale | LimpetError]]]
"""Applies units to a namespace, under a name: `Storage.apply` of one namespace."""

Hold = Callable[[str], AbstractAsyncContextManager[Apply]]
"""Keeps other writers from a namespace, so that what is read does not change before it is written."""
