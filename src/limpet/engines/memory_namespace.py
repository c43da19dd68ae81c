"""One namespace in memory: the map and the log, and the map's keys in order of name and of expiry.

The memory engine holds its lock around every call that reads more than one entry or writes.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_right
from collections.abc import Iterable
from typing import Final

import msgspec

from limpet.clock import Clock
from limpet.commit.group import Counters, GroupPlan
from limpet.commit.log import check_after
from limpet.engines.sorted_keys import SortedKeys
from limpet.errors import LimpetError
from limpet.keys import Span
from limpet.model import (
    BEGINNING,
    FAMILIES,
    Batch,
    Change,
    Commit,
    Entry,
    Expire,
    Family,
    LogPage,
    Refusal,
    StoredFamily,
    Window,
    fingerprint,
    join_origin,
    live,
)
from limpet.transition import find_plain_write, plan, plan_write

__all__ = ["Namespace"]

_Expiry = tuple[int, Family, str, int]
"""When an entry expires, its family and key, and its revision. Out of date once the entry has another revision."""

_UNLOGGED: Final[tuple[StoredFamily, ...]] = ("receipt", "superseded")
"""The families that a commit writes without a change in the log."""


class Namespace:
    """The state of one namespace.

    Attributes:
        is_halfway: Whether some changes of a batch are in the map, and others not yet.
    """

    def __init__(self, store_id: str) -> None:
        self._store_id = store_id
        self.counters = Counters()
        self.floor = 0
        self.floor_print = BEGINNING
        self.map: dict[StoredFamily, dict[str, Entry]] = {family: {} for family in (*FAMILIES, *_UNLOGGED)}
        self.sorted_keys: dict[Family, SortedKeys] = {family: SortedKeys() for family in FAMILIES}
        self.expiries: list[_Expiry] = []
        self.log: list[Change] = []
        self.is_halfway = False
        self._latest_ms = 0

    def now_ms(self, clock: Clock) -> int:
        """The time of the namespace: the clock's, or the latest time it has had if that is later."""
        now_ms = clock.now_ms()
        if now_ms > self._latest_ms:  # noqa: PLR1730 - max() takes longer than reading the clock
            self._latest_ms = now_ms
        return self._latest_ms

    def find(self, family: StoredFamily, key: str) -> Entry | None:
        """The entry under a key, expired or not."""
        return self.map[family].get(key)

    # Committing ---------------------------------------------------------------

    def commit(self, batch: Batch, now_ms: int) -> Commit | Refusal | LimpetError:
        """Commit a batch, and return its outcome."""
        if batch.request_id is not None:
            return self._commit_request(batch, now_ms)
        # Without a request id there is no retry, no mark and no receipt: the plan is all there is to a batch.
        write, revision = find_plain_write(batch), self.counters.revision
        current = None if write is None else self.map[write.family].get(write.key)
        if write is not None and (current is None or current.expires_ms is None):
            planned = plan_write(write, current, batch.value_bytes_max, now_ms, revision + 1, None)
        else:
            planned = plan(batch, self.find, now_ms=now_ms, revision=revision)
        if isinstance(planned, Refusal):
            return planned
        if len(planned.changes) == 1:
            (change,) = planned.changes
            self._store(change, change.entry.weight_bytes)
            return planned.commit
        # Weigh all before the first is stored: if one cannot be weighed, the batch fails and leaves nothing here.
        weights = [change.entry.weight_bytes for change in planned.changes]
        self.is_halfway = True
        for change, weight_bytes in zip(planned.changes, weights, strict=True):
            self._store(change, weight_bytes)
        self.is_halfway = False
        return planned.commit

    def _commit_request(self, batch: Batch, now_ms: int) -> Commit | Refusal | LimpetError:
        group, outcome = self._plan_request(batch, now_ms)
        self.is_halfway = len(group.changes) > 1
        for change, weight_bytes in group.changes:
            self._store(change, weight_bytes)
        self.is_halfway = False
        for (family, key), entry in group.kept.items():
            self.map[family][key] = entry
        return outcome

    def will_change(self, batch: Batch, now_ms: int) -> bool:
        """Whether a batch will use a revision."""
        return bool(self._plan_request(batch, now_ms)[0].changes)

    def _plan_request(self, batch: Batch, now_ms: int) -> tuple[GroupPlan, Commit | Refusal | LimpetError]:
        group = GroupPlan(self.find, self.find_changes, msgspec.structs.replace(self.counters), now_ms)
        return group, group.add(batch, None)

    def find_changes(self, after: int, origin: str) -> Iterable[Change]:
        """The changes after a revision that have this origin."""
        log = itertools.islice(self.log, self._find_first(after), None)
        return (change for change in log if change.origin == origin)

    def _store(self, change: Change, weight_bytes: int) -> None:
        family, entry = change.family, change.entry
        key, entries = entry.key, self.map[family]
        before = entries.get(key)
        self.counters.count(change, None if before is None else before.weight_bytes, weight_bytes)
        self.log.append(change)
        if change.op in ("delete", "expire"):
            entries.pop(key, None)
            return
        if before is None:
            self.sorted_keys[family].add(key)
        entries[key] = entry
        if entry.expires_ms is not None:
            heapq.heappush(self.expiries, (entry.expires_ms, family, key, entry.revision))

    # The log and what has expired ----------------------------------------------

    def read_log(self, after: int, span: Span | None, limit: int) -> LogPage:
        """See `Engine.changes`."""
        check_after(after, floor=self.floor, revision=self.counters.revision)
        first = self._find_first(after)
        before = fingerprint(self._with_cause(self.log[first - 1])) if first else self.floor_print
        if not limit:
            return LogPage([], after, before)
        log: Iterable[Change] = itertools.islice(self.log, first, None)
        if span is not None:
            log = (change for change in log if change.family == "data" and change.key in span)
        found = [self._with_cause(change) for change in itertools.islice(log, limit)]
        return LogPage(found, found[-1].revision if len(found) == limit else self.counters.revision, before)

    def find_due(self, now_ms: int, limit: int) -> list[Expire]:
        """See `Engine.due`."""
        due: list[_Expiry] = []
        while self.expiries and self.expiries[0][0] <= now_ms and len(due) < limit:
            item = heapq.heappop(self.expiries)
            if self._is_current(item):
                due.append(item)
        for item in due:
            heapq.heappush(self.expiries, item)
        return [Expire(key, revision, family) for _, family, key, revision in due]

    def count_expired(self, family: Family, span: Span, now_ms: int) -> int:
        """Count the entries of a span that have expired and were not swept."""
        count, places = 0, [0]
        # Below an item of a heap, all are later.
        while places:
            place = places.pop()
            if place < len(self.expiries) and (item := self.expiries[place])[0] <= now_ms:
                count += item[1] == family and item[2] in span and self._is_current(item)
                places += (2 * place + 1, 2 * place + 2)
        return count

    def trim(self, window: Window, now_ms: int) -> int:
        """See `Engine.trim`."""
        for unlogged in _UNLOGGED:
            kept = self.map[unlogged]
            for key in [key for key, entry in kept.items() if live(entry, now_ms) is None]:
                del kept[key]
        for family in self.sorted_keys:
            self.sorted_keys[family].tidy(self.map[family])
        # Items of entries that were written again would otherwise stay until they are due.
        if len(self.expiries) > 64 + 2 * sum(len(entries) for entries in self.map.values()):
            self.expiries = [item for item in self.expiries if self._is_current(item)]
            heapq.heapify(self.expiries)
        counters = self.counters
        oldest = ((change.revision, change.at_ms, change.entry.weight_bytes) for change in self.log)
        dropped, freed_bytes, floor = window.excess(
            oldest, count=counters.log_changes, size_bytes=counters.log_bytes, now_ms=now_ms
        )
        if dropped:
            self.floor, self.floor_print = floor, fingerprint(self._with_cause(self.log[dropped - 1]))
            del self.log[:dropped]
            counters.log_changes -= dropped
            counters.log_bytes -= freed_bytes
        return dropped

    def _find_first(self, after: int) -> int:
        """The place in the log of the first change after a revision."""
        return bisect_right(self.log, after, key=lambda change: change.revision)

    def _is_current(self, item: _Expiry) -> bool:
        """Whether this is still when the entry expires. One that was written again has another item."""
        entry = self.find(item[1], item[2])
        return entry is not None and entry.revision == item[3]

    def _with_cause(self, change: Change) -> Change:
        """The change with its cause. A commit without a request id gets one from its revision when it is read."""
        if change.cause is not None or change.op == "expire":
            return change
        return msgspec.structs.replace(change, origin=join_origin(f"{self._store_id}-{change.commit:x}", change.writer))
