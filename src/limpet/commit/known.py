"""What a process knows of the entries of a namespace, to plan on.

Any of it may be out of date. The engine compares it, so that an old plan costs a second round trip and nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Set
from typing import Final

from limpet import codec
from limpet.commit.group import EntryId
from limpet.commit.relative import Moment
from limpet.commit.storage import Head, Stale, Unit
from limpet.model import Batch, Commit, Entry, Equals, FieldEquals, Refusal, Revision, Version

__all__ = ["CONTENDED_S", "KnownEntries", "expects_version", "find_named"]

KNOWN_MAX: Final = 16_384
BYTES_MAX: Final = 2_048
CONTENDED_S: Final = 0.5
"""How long an entry counts as contended after another process was faster."""


class KnownEntries:
    """What this process has last seen of the entries of a namespace, and of its time."""

    def __init__(self) -> None:
        self._heads: dict[EntryId, Head] = {}
        # Entries that a request in flight names, and those who wait for them.
        self._in_flight: set[EntryId] = set()
        self._waiters: list[asyncio.Future[None]] = []
        # Until when each entry counts as contended.
        self._contended: dict[EntryId, float] = {}
        # Contended entries that this process was the last to write, as far as it knows.
        self._won: set[EntryId] = set()
        self._seen_ms = 0
        self._seen_at = 0.0

    # Entries ------------------------------------------------------------------

    def find(self, entry_id: EntryId) -> Head:
        """The entry as it was last seen; absent if it was never seen."""
        return self._heads.get(entry_id, _ABSENT)

    def set(self, entry_id: EntryId, head: Head) -> None:
        """Remember an entry, with its value if that is small."""
        heads, entry = self._heads, head.entry
        if entry_id[0] in ("receipt", "superseded"):
            # Each is of use once at most.
            return
        stored = None if entry is None else entry.stored
        if stored is not None and (len(stored) if type(stored) is bytes else codec.size_bytes(stored)) > BYTES_MAX:
            assert entry is not None
            weight_bytes = entry.weight_bytes if head.weight_bytes is None else head.weight_bytes
            head = Head(entry.without_value(), weight_bytes)
        if len(heads) >= KNOWN_MAX and entry_id not in heads:
            del heads[next(iter(heads))]
        heads[entry_id] = head

    def learn(self, batch: Batch, commit: Commit) -> None:
        """Remember the entries that a batch has left which was committed in another way."""
        for write, entry in zip(batch.writes, commit.entries, strict=True):
            entry_id: EntryId = (write.family, write.key)
            if entry is None or entry.stored is None:
                self._heads.pop(entry_id, None)
            else:
                self.set(entry_id, Head(entry))
            if entry_id in self._contended:
                self._won.add(entry_id)

    def correct(self, stale: Stale) -> None:
        """Learn what is there instead of what was expected."""
        self._see_time(stale.now_ms)
        for entry_id, head in stale.found.items():
            self.set(entry_id, head)

    def advance(self, unit: Unit, moment: Moment) -> dict[int, Entry]:
        """Learn what a unit has left. Returns its entries as they were stored, by the identity of those of the plan."""
        self._see_time(moment.now_ms)
        stored: dict[int, Entry] = {}
        contended = self._contended
        for change, weight_bytes in unit.changes:
            after, head = change.after, _ABSENT
            if after is not None:
                stored[id(after)] = entry = moment.resolve(after)
                head = Head(entry, weight_bytes)
            entry_id: EntryId = (change.family, change.entry.key)
            self.set(entry_id, head)
            if entry_id in contended:
                self._won.add(entry_id)
        return stored

    # Time ---------------------------------------------------------------------

    def now_ms(self) -> int:
        """About the time of the server: the last that was seen, and what has passed since."""
        return self._seen_ms + int((time.monotonic() - self._seen_at) * 1000)

    def _see_time(self, now_ms: int) -> None:
        self._seen_ms, self._seen_at = now_ms, time.monotonic()

    # Requests in flight ---------------------------------------------------------

    async def reserve(self, named: Set[EntryId]) -> None:
        """Wait until no request in flight names one of these entries: a plan on such an entry would be stale."""
        while not self._in_flight.isdisjoint(named):
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        self._in_flight |= named

    def release(self, named: Set[EntryId]) -> None:
        """Let others plan on these entries."""
        self._in_flight -= named
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    # Contention ---------------------------------------------------------------

    def note_contended(self, unit: Unit, stale: Stale) -> bool:
        """Note the entries that have changed under a unit, and return whether there are any.

        One that was only not known yet is not among them.
        """
        changed = []
        for entry_id, expected in unit.expected.items():
            found = stale.found.get(entry_id, _ABSENT).entry
            if expected.revision >= 0 and (found is None or found.revision != expected.revision):
                changed.append(entry_id)
        self._contend(changed)
        return bool(changed)

    def note_left_out(self, batch: Batch) -> None:
        """Note that an entry had not the revision that a batch expects, which was sent in another way.

        If this process itself wrote the entry since, no other is known to contend for it.
        """
        for guard in batch.guards:
            entry = self.find((guard.family, guard.key)).entry
            condition = guard.condition
            if isinstance(condition, Revision) and entry is not None and entry.revision <= condition.number:
                self._contend([(guard.family, guard.key)])

    def note_refused(self, batch: Batch, refusal: Refusal) -> None:
        """Note that a batch was refused which was sent in another way, and remember the entry found."""
        self.note_left_out(batch)
        guard, found = refusal.guard, refusal.found
        if guard is not None and found is not None and found.stored is not None:
            self.set((guard.family, guard.key), Head(found))

    def _contend(self, entry_ids: Iterable[EntryId]) -> None:
        until = time.monotonic() + CONTENDED_S
        self._contended.update((entry_id, until) for entry_id in entry_ids)

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

    def note_read(self, entry_ids: Iterable[EntryId]) -> None:
        """Note that entries are read: who reads one is not the first to know what is there."""
        if self._won:
            self._won.difference_update(entry_ids)

    def names_contended(self, batch: Batch) -> bool:
        """Whether a batch names a contended entry."""
        if not self._contended:
            return False
        now = time.monotonic()
        self._contended = {entry_id: until for entry_id, until in self._contended.items() if until > now}
        return any(entry_id in self._contended for entry_id in find_named(batch))


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
_ABSENT: Final = Head()
