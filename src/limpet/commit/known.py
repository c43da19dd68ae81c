"""What a process knows of the entries of a namespace, to plan on.

Any of it may be out of date. The engine compares it, so that an old plan costs a second round trip and nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence, Set
from typing import Final

from limpet import codec
from limpet.commit.contention import Contention
from limpet.commit.group import EntryId
from limpet.commit.relative import Moment
from limpet.commit.storage import Head, Stale, Unit
from limpet.model import Batch, Commit, Entry, Refusal, Revision

__all__ = ["KnownEntries"]

KNOWN_MAX: Final = 16_384
BYTES_MAX: Final = 2_048


class KnownEntries:
    """What this process has last seen of the entries of a namespace, and of its time.

    Attributes:
        contention: What it knows of other processes that write them.
    """

    def __init__(self) -> None:
        self._heads: dict[EntryId, Head] = {}
        # Entries that a request in flight names, and those who wait for them.
        self._in_flight: set[EntryId] = set()
        self._waiters: list[asyncio.Future[None]] = []
        self.contention = Contention()
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
            self.contention.note_written(entry_id)

    def note_results(self, batches: Sequence[Batch], results: Sequence[Commit | Refusal | Exception | None]) -> None:
        """Learn from batches that were committed in another way; the result is None for one that was left out.

        What the many commits of a group leave is forgotten: to remember it takes as long as a fifth of a put, and is of
        use only if the next write of the entry must be planned.
        """
        for batch, result in zip(batches, results, strict=True):
            if type(result) is Commit:
                if len(batches) == 1:
                    self.learn(batch, result)
                elif self._heads:
                    self._forget_written(batch)
            elif isinstance(result, Refusal):
                self.note_refused(batch, result)

    def _forget_written(self, batch: Batch) -> None:
        for write in batch.writes:
            entry_id: EntryId = (write.family, write.key)
            if self._heads.pop(entry_id, None) is not None:
                self.contention.note_written(entry_id)

    def correct(self, stale: Stale) -> None:
        """Learn what is there instead of what was expected."""
        self.see_time(stale.now_ms)
        for entry_id, head in stale.found.items():
            self.set(entry_id, head)

    def advance(self, unit: Unit, moment: Moment) -> dict[int, Entry]:
        """Learn what a unit has left. Returns its entries as they were stored, by the identity of those of the plan."""
        self.see_time(moment.now_ms)
        stored: dict[int, Entry] = {}
        for change, weight_bytes in unit.changes:
            after, head = change.after, _ABSENT
            if after is not None:
                stored[id(after)] = entry = moment.resolve(after)
                head = Head(entry, weight_bytes)
            entry_id: EntryId = (change.family, change.entry.key)
            self.set(entry_id, head)
            self.contention.note_written(entry_id)
        return stored

    # Time ---------------------------------------------------------------------

    def now_ms(self) -> int:
        """About the time of the server: the last that was seen, and what has passed since."""
        return self._seen_ms + int((time.monotonic() - self._seen_at) * 1000)

    def see_time(self, now_ms: int) -> None:
        """Remember a time of the server."""
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

    def note_stale(self, unit: Unit, stale: Stale) -> bool:
        """Note the entries that have changed under a unit, and return whether there are any.

        One that was only not known yet is not among them.
        """
        changed = []
        for entry_id, expected in unit.expected.items():
            found = stale.found.get(entry_id, _ABSENT).entry
            if expected.revision >= 0 and (found is None or found.revision != expected.revision):
                changed.append(entry_id)
        self.contention.note_lost(changed)
        return bool(changed)

    def note_left_out(self, batch: Batch) -> None:
        """Note that an entry had not the revision that a batch expects, which was sent in another way.

        If this process itself wrote the entry since, no other is known to contend for it.
        """
        for guard in batch.guards:
            entry = self.find((guard.family, guard.key)).entry
            condition = guard.condition
            if isinstance(condition, Revision) and entry is not None and entry.revision <= condition.number:
                self.contention.note_lost([(guard.family, guard.key)])

    def note_refused(self, batch: Batch, refusal: Refusal) -> None:
        """Note that a batch was refused which was sent in another way, and remember the entry found."""
        self.note_left_out(batch)
        guard, found = refusal.guard, refusal.found
        if guard is not None and found is not None and found.stored is not None:
            self.set((guard.family, guard.key), Head(found))


_ABSENT: Final = Head()
