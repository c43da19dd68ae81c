"""Entries that several processes write at the same time, and how each process gets its turn.

An entry is contended for a while after another process has changed it under a plan. The process that has written it
last is the first to know what is there, so that without a pause it would always be first again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Final

from limpet.commit.group import EntryId
from limpet.model import Batch, Equals, FieldEquals, Revision, StoredFamily, Version
from limpet.retry import JITTER_S_MAX

__all__ = ["CONTENDED_S", "Contention", "expects_version", "find_named"]

CONTENDED_S: Final = 0.5
"""How long an entry counts as contended after another process was faster."""


class Contention:
    """What this process knows of the contended entries of a namespace.

    Attributes:
        round_trip_s: How long the last request took.
    """

    def __init__(self) -> None:
        self.round_trip_s = 0.0
        # Until when each entry counts as contended.
        self._until: dict[EntryId, float] = {}
        # Those that this process was the last to write, as far as it knows.
        self._won: set[EntryId] = set()

    def note_lost(self, entry_ids: Iterable[EntryId]) -> None:
        """Note that another process has changed entries under a plan."""
        until = time.monotonic() + CONTENDED_S
        self._until.update((entry_id, until) for entry_id in entry_ids)

    def note_written(self, entry_id: EntryId) -> None:
        """Note that this process has written an entry."""
        if entry_id in self._until:
            self._won.add(entry_id)

    def note_read(self, family: StoredFamily, keys: Iterable[str]) -> None:
        """Note that entries are read: who reads one is not the first to know what is there."""
        if self._won:
            self._won.difference_update((family, key) for key in keys)

    def names_contended(self, batch: Batch) -> bool:
        """Whether a batch names a contended entry."""
        if not self._until:
            return False
        now = time.monotonic()
        self._until = {entry_id: until for entry_id, until in self._until.items() if until > now}
        return any(entry_id in self._until for entry_id in find_named(batch))

    def has_won(self, batches: Iterable[Batch]) -> bool:
        """Whether this process was the last to write a contended entry that one of the batches expects as it is.

        Says so once for each time.
        """
        if not self._won:
            return False
        found = any(
            expects_version(batch) and not self._won.isdisjoint(find_named(batch)) and self.names_contended(batch)
            for batch in batches
        )
        self._won.clear()
        return found

    async def let_others_write(self, batches: Iterable[Batch]) -> None:
        """Pause for a round trip if this process has won: the others have just lost, and would lose again."""
        if self.has_won(batches):
            await asyncio.sleep(min(self.round_trip_s, JITTER_S_MAX))


def find_named(batch: Batch) -> list[EntryId]:
    """The entries that a batch names. One that is written twice is named twice."""
    named: list[EntryId] = [(write.family, write.key) for write in batch.writes]
    if batch.guards:
        named = list(dict.fromkeys([*named, *((guard.family, guard.key) for guard in batch.guards)]))
    return named


def expects_version(batch: Batch) -> bool:
    """Whether a batch is refused if another writer was faster. Then holding only keeps the others waiting."""
    return any(isinstance(guard.condition, _VERSIONED) for guard in batch.guards)


_VERSIONED: Final = (Revision, Version, Equals, FieldEquals)
