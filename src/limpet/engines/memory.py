"""The memory engine: the reference, for tests and for state that may go with the process.

State is encoded bytes, never a caller's live object. A commit is planned and applied
under one lock, so any number of threads and loops may share it. ``memory:`` is private
to whoever opened it; ``memory:name`` is shared in the process and lives as long as it.
"""

from __future__ import annotations

import heapq
import itertools
import os
import random
import threading
import uuid
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Sequence

import msgspec

from limpet.clock import Clock, has_loop
from limpet.commit.receipts import SUPERSEDED_MS, may_be_superseded, superseded_error
from limpet.engines.budget import SCAN_CALLS, Budget
from limpet.engines.sorted_keys import SortedKeys
from limpet.engines.wakeup import Wakeup
from limpet.errors import Closed, Compacted
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
    Filter,
    LogPage,
    Refusal,
    ScanPage,
    Status,
    Traits,
    Window,
    fingerprint,
    live,
)
from limpet.transition import plan, recall
from limpet.urls import Address

_shared: dict[str, _Place] = {}
_shared_lock = threading.Lock()


async def open(address: Address, clock: Clock) -> MemoryEngine:
    """Open ``memory:`` (private) or ``memory:name`` (shared in the process)."""
    address.allow("skip_revisions")
    skips = address.take("skip_revisions", "no", ("no", "yes")) == "yes"
    if not address.path:
        return MemoryEngine(_Place(clock, skips))
    with _shared_lock:
        place = _shared.setdefault(address.path, _Place(clock, skips))
    return MemoryEngine(place)


class _Place:
    """The namespaces of one memory, and what their users share."""

    def __init__(self, clock: Clock, skips: bool) -> None:
        self.clock = clock
        self.skips = skips
        self.store_id = uuid.uuid4().hex[:16]
        self.lock = threading.RLock()
        self.wakeup = Wakeup()
        self.spaces: dict[str, _Space] = {}
        _places.add(self)

    def space(self, namespace: str) -> _Space:
        found = self.spaces.get(namespace)
        if found is None:
            with self.lock:
                found = self.spaces.setdefault(namespace, _Space())
        return found


class _Space:
    """One namespace: the map and the log, and the two orders in which the map is asked for."""

    def __init__(self) -> None:
        self.revision = 0
        self.floor = 0
        self.floor_print = BEGINNING
        self.map: dict[Family, dict[str, Entry]] = {family: {} for family in FAMILIES}
        self.order: dict[Family, SortedKeys] = {family: SortedKeys() for family in FAMILIES}
        self.expiries: list[tuple[int, Family, str, int]] = []
        self.log: list[Change] = []
        self.size_bytes = 0
        self.log_bytes = 0
        self.is_halfway = False
        # Requests that were asked for again, and until when that is remembered.
        self.superseded: dict[str, int] = {}
        self._latest_ms = 0

    def now_ms(self, clock: Clock) -> int:
        """The time of the namespace: the clock's, or the latest time it has had if that is later."""
        now_ms = clock.now_ms()
        if now_ms > self._latest_ms:  # noqa: PLR1730 - max() takes longer than asking for the time
            self._latest_ms = now_ms
        return self._latest_ms

    def find(self, family: Family, key: str) -> Entry | None:
        return self.map[family].get(key)

    def apply(self, change: Change) -> None:
        """Make a change part of the map and of the log."""
        family, entry = change.family, change.entry
        key, entries = entry.key, self.map[family]
        before = entries.get(key)
        weight_bytes = entry.weight_bytes
        self.log.append(change)
        self.log_bytes += weight_bytes
        self.revision = change.revision
        if family == "data":
            self.size_bytes -= 0 if before is None else before.weight_bytes
        if change.after is None:
            entries.pop(key, None)
            return
        entries[key] = entry
        if family == "data":
            self.size_bytes += weight_bytes
        if before is None:
            self.order[family].add(key)
        if entry.expires_ms is not None:
            heapq.heappush(self.expiries, (entry.expires_ms, family, key, entry.revision))

    def keep(self, receipt: Entry) -> None:
        self.map["receipt"][receipt.key] = receipt

    def hold_to_order(self, batch: Batch, now_ms: int) -> None:
        """Remember a retry that found nothing, and refuse a first attempt that comes after its own."""
        name = batch.request_id or ""
        if batch.retry_since is not None:
            self.superseded[name] = now_ms + SUPERSEDED_MS
        elif name in self.superseded and may_be_superseded(batch):
            raise superseded_error()


class MemoryEngine:
    """A handle on one memory."""

    def __init__(self, place: _Place) -> None:
        self.traits = Traits(engine="memory", durability="none", log="every", clock="host", inline=True)
        self._place = place
        self._budget = Budget()
        self._closed = False

    async def read(self, namespace: str, keys: Sequence[str], *, family: Family = "data") -> list[Entry | None]:
        """See `Engine.read`."""
        if self._budget.spent():
            await self._budget.renewed()
        space = self._space(namespace)
        entries = space.map[family]
        if len(keys) == 1:
            entry = entries.get(keys[0])
            # First the entry, then the look: what half a batch left is not to be seen before the other half.
            if not space.is_halfway:
                if entry is None or entry.expires_ms is None:
                    return [entry]
                return [live(entry, space.now_ms(self._place.clock))]
        with self._place.lock:
            found = [entries.get(key) for key in keys]
        now_ms = space.now_ms(self._place.clock)
        return [live(entry, now_ms) for entry in found]

    async def scan(
        self,
        namespace: str,
        span: Span,
        *,
        family: Family = "data",
        where: Filter | None = None,
        values: bool = True,
        limit: int = 500,
    ) -> ScanPage:
        """See `Engine.scan`."""
        if self._budget.spent(SCAN_CALLS):
            await self._budget.renewed()
        space = self._space(namespace)
        now_ms = space.now_ms(self._place.clock)
        found: list[Entry] = []
        with self._place.lock:
            entries = space.map[family]
            for key in space.order[family].between(span, entries):
                entry = live(entries[key], now_ms)
                if entry is None or (
                    where is not None and entry.stored is not None and not where.matches(entry.stored)
                ):
                    continue
                if len(found) == limit:
                    return ScanPage(found, found[-1].key)
                found.append(entry if values else entry.without_value())
        return ScanPage(found, None)

    async def commit(self, namespace: str, batch: Batch) -> Commit | Refusal:
        """See `Engine.commit`."""
        if self._budget.spent():
            await self._budget.renewed()
        place = self._place
        space = self._space(namespace)
        with place.lock:
            if batch.retry_since is not None:
                earlier = recall(batch, space.log[_index(space.log, batch.retry_since) :], space.find)
                if earlier is not None:
                    return earlier
            now_ms = space.now_ms(place.clock)
            if batch.request_id is not None:
                space.hold_to_order(batch, now_ms)
            outcome = plan(batch, space.find, now_ms=now_ms, revision=space.revision)
            if isinstance(outcome, Refusal):
                return outcome
            if place.skips and outcome.changes:
                again = plan(batch, space.find, now_ms=now_ms, revision=space.revision + random.randrange(4))
                assert not isinstance(again, Refusal)
                outcome = again
            changes = outcome.changes
            space.is_halfway = len(changes) > 1
            for change in changes:
                space.apply(change)
            space.is_halfway = False
            if outcome.receipt is not None:
                space.keep(outcome.receipt)
        if changes:
            place.wakeup.notify(namespace)
        return outcome.commit

    async def changes(
        self, namespace: str, after: int, *, span: Span | None = None, limit: int = 500, wait_s: float = 0.0
    ) -> LogPage:
        """See `Engine.changes`."""
        wakeup = self._place.wakeup
        token = wakeup.token(namespace)
        feed = self._feed(namespace, after, span, limit)
        if feed.changes or wait_s <= 0 or not has_loop():
            return feed
        await wakeup.wait(namespace, token, wait_s)
        return self._feed(namespace, after, span, limit)

    async def due(self, namespace: str, *, limit: int = 500) -> list[Expire]:
        """See `Engine.due`."""
        space = self._space(namespace)
        now_ms = space.now_ms(self._place.clock)
        with self._place.lock:
            come: list[tuple[int, Family, str, int]] = []
            while space.expiries and space.expiries[0][0] <= now_ms and len(come) < limit:
                item = heapq.heappop(space.expiries)
                entry = space.find(item[1], item[2])
                # What was written again since has an item of its own.
                if entry is not None and entry.revision == item[3]:
                    come.append(item)
            for item in come:
                heapq.heappush(space.expiries, item)
        return [Expire(key, revision, family) for _, family, key, revision in come]

    async def trim(self, namespace: str, window: Window) -> int:
        """See `Engine.trim`."""
        space = self._space(namespace)
        now_ms = space.now_ms(self._place.clock)
        with self._place.lock:
            receipts = space.map["receipt"]
            for key in [key for key, receipt in receipts.items() if live(receipt, now_ms) is None]:
                del receipts[key]
            space.superseded = {name: until for name, until in space.superseded.items() if until > now_ms}
            oldest = ((change.revision, change.at_ms, change.entry.weight_bytes) for change in space.log)
            dropped, freed_bytes, floor = window.excess(
                oldest, count=len(space.log), size_bytes=space.log_bytes, now_ms=now_ms
            )
            if dropped:
                space.floor_print = fingerprint(self._named(space.log[dropped - 1]))
                del space.log[:dropped]
                space.floor, space.log_bytes = floor, space.log_bytes - freed_bytes
            for family in space.order:
                space.order[family].tidy(space.map[family])
            # Items of entries that were written again would otherwise stay until their time.
            if len(space.expiries) > 64 + 2 * sum(len(entries) for entries in space.map.values()):
                space.expiries = [item for item in space.expiries if _is_current(space, item)]
                heapq.heapify(space.expiries)
            return dropped

    async def status(self, namespace: str) -> Status:
        """See `Engine.status`."""
        space = self._space(namespace)
        with self._place.lock:
            now_ms = space.now_ms(self._place.clock)
            return Status(
                store_id=self._place.store_id,
                epoch=1,
                revision=space.revision,
                floor=space.floor,
                keys=len(space.map["data"]),
                size_bytes=space.size_bytes,
                log_changes=len(space.log),
                log_bytes=space.log_bytes,
                now_ms=now_ms,
                behind_ms=max(0, now_ms - self._place.clock.now_ms()),
            )

    async def close(self) -> None:
        """See `Engine.close`."""
        self._closed = True
        self._place.wakeup.notify_all()

    def _space(self, namespace: str) -> _Space:
        if self._closed:
            raise Closed
        return self._place.spaces.get(namespace) or self._place.space(namespace)

    def _feed(self, namespace: str, after: int, span: Span | None, limit: int) -> LogPage:
        space = self._space(namespace)
        with self._place.lock:
            if after < space.floor:
                raise Compacted(f"revision {after} was trimmed, the log starts after {space.floor}", oldest=space.floor)
            if after > space.revision:
                raise Compacted(f"revision {after} lies ahead of this store, which is at {space.revision}")
            first = _index(space.log, after)
            before = fingerprint(self._named(space.log[first - 1])) if first else space.floor_print
            if not limit:
                return LogPage([], after, before)
            log: Iterable[Change] = itertools.islice(space.log, first, None)
            if span is not None:
                log = (change for change in log if change.family == "data" and change.key in span)
            found = [self._named(change) for change in itertools.islice(log, limit)]
            return LogPage(found, found[-1].revision if len(found) == limit else space.revision, before)

    def _named(self, change: Change) -> Change:
        """The change with its cause. A commit that nobody named is named when somebody looks, by its revision."""
        if change.cause is not None or change.op == "expire":
            return change
        return msgspec.structs.replace(change, cause=f"{self._place.store_id}-{change.commit:x}")


def _index(log: list[Change], after: int) -> int:
    return bisect_right(log, after, key=lambda change: change.revision)


def _is_current(space: _Space, item: tuple[int, Family, str, int]) -> bool:
    entry = space.find(item[1], item[2])
    return entry is not None and entry.revision == item[3]


# A fork copies the memory. Holding the locks meanwhile keeps the copy whole, and the
# child gets locks and bells that no thread of its parent holds.

_places: weakref.WeakSet[_Place] = weakref.WeakSet()


_held: list[_Place] = []


def _before_fork() -> None:
    for place in list(_places):
        place.lock.acquire()
        _held.append(place)


def _after_fork_in_parent() -> None:
    while _held:
        _held.pop().lock.release()


def _after_fork_in_child() -> None:
    _held.clear()
    for place in list(_places):
        place.lock, place.wakeup = threading.RLock(), Wakeup()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
