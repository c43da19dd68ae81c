"""The memory engine: the reference, for tests and for state that may go with the process.

State is encoded bytes, never a caller's live object. A commit is planned and applied
under one lock, so any number of threads and loops may share it. Each open of ``memory:``
makes a private store; ``memory:name`` is shared in the process and lives as long as it.
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
from typing import Final

import msgspec

from limpet.clock import Clock, has_loop
from limpet.commit.group import Counters, GroupPlan, find_plain_put
from limpet.commit.log import check_after
from limpet.engines.budget import SCAN_CALLS, Budget
from limpet.engines.sorted_keys import SortedKeys
from limpet.engines.wakeup import Wakeup
from limpet.errors import Closed, LimpetError
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
    Put,
    Refusal,
    ScanPage,
    Status,
    StoredFamily,
    Traits,
    Window,
    fingerprint,
    live,
)
from limpet.transition import plan_put
from limpet.urls import Address

_Expiry = tuple[int, Family, str, int]
"""When an entry expires, its family and key, and its revision. Out of date once the entry has another revision."""

_UNLOGGED: Final[tuple[StoredFamily, ...]] = ("receipt", "superseded")
"""The families that a commit writes without a change in the log."""

_shared: dict[str, _Memory] = {}
_shared_lock = threading.Lock()


async def open(address: Address, clock: Clock) -> MemoryEngine:
    """Open ``memory:`` (private) or ``memory:name`` (shared in the process)."""
    address.allow("skip_revisions")
    skips = address.take("skip_revisions", "no", ("no", "yes")) == "yes"
    if not address.path:
        return MemoryEngine(_Memory(clock, skips))
    with _shared_lock:
        memory = _shared.setdefault(address.path, _Memory(clock, skips))
    return MemoryEngine(memory)


class _Memory:
    """The namespaces of one memory, and the lock and the clock that its handles share."""

    def __init__(self, clock: Clock, skips: bool) -> None:
        self.clock = clock
        self.skips = skips
        self.store_id = uuid.uuid4().hex[:16]
        self.lock = threading.RLock()
        self.wakeup = Wakeup()
        self.namespaces: dict[str, _Namespace] = {}
        _memories.add(self)

    def state(self, namespace: str) -> _Namespace:
        found = self.namespaces.get(namespace)
        if found is None:
            with self.lock:
                found = self.namespaces.setdefault(namespace, _Namespace())
        return found


class _Namespace:
    """One namespace: the map and the log, and the map's keys in order of name and of expiry."""

    def __init__(self) -> None:
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
        return self.map[family].get(key)

    def find_changes(self, after: int, request_id: str) -> Iterable[Change]:
        log = itertools.islice(self.log, _first_after(self.log, after), None)
        return (change for change in log if change.cause == request_id)

    def apply(self, group: GroupPlan) -> None:
        """Make what a group does part of the map and of the log."""
        self.is_halfway = len(group.changes) > 1
        for change, _ in group.changes:
            self._store(change)
        self.is_halfway = False
        for (family, key), entry in group.kept.items():
            self.map[family][key] = entry

    def put(self, put: Put, now_ms: int) -> Commit | None:
        """Commit a put without a guard, in fewer steps than a group; None if it replaces an entry that expires."""
        current = self.map[put.family].get(put.key)
        if current is not None and current.expires_ms is not None:
            return None
        planned = plan_put(put, current, now_ms, self.counters.revision + 1, None)
        (change,) = planned.changes
        before_bytes = None if current is None else current.weight_bytes
        self.counters.count(change, before_bytes, change.entry.weight_bytes)
        self._store(change)
        return planned.commit

    def _store(self, change: Change) -> None:
        self.log.append(change)
        family, entry = change.family, change.entry
        key, entries = entry.key, self.map[family]
        if change.after is None:
            entries.pop(key, None)
            return
        if key not in entries:
            self.sorted_keys[family].add(key)
        entries[key] = entry
        if entry.expires_ms is not None:
            heapq.heappush(self.expiries, (entry.expires_ms, family, key, entry.revision))

    def drop_expired(self, now_ms: int) -> None:
        """Drop the receipts and the marks of superseded requests that have expired."""
        for family in _UNLOGGED:
            entries = self.map[family]
            for key in [key for key, entry in entries.items() if live(entry, now_ms) is None]:
                del entries[key]


class MemoryEngine:
    """A handle on one memory."""

    def __init__(self, memory: _Memory) -> None:
        self.traits = Traits(engine="memory", durability="none", clock="host", inline=True)
        self._memory = memory
        self._budget = Budget()
        self._closed = False

    async def read(self, namespace: str, keys: Sequence[str], *, family: Family = "data") -> list[Entry | None]:
        """See `Engine.read`."""
        if self._budget.spent():
            await self._budget.renewed()
        state = self._state(namespace)
        entries = state.map[family]
        if len(keys) == 1:
            entry = entries.get(keys[0])
            # Read the entry first, then the flag: a reader must not see one half of a batch without the other.
            if not state.is_halfway:
                if entry is None or entry.expires_ms is None:
                    return [entry]
                return [live(entry, state.now_ms(self._memory.clock))]
        with self._memory.lock:
            found = [entries.get(key) for key in keys]
        now_ms = state.now_ms(self._memory.clock)
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
        state = self._state(namespace)
        now_ms = state.now_ms(self._memory.clock)
        found: list[Entry] = []
        with self._memory.lock:
            entries = state.map[family]
            for key in state.sorted_keys[family].between(span, entries):
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
        memory = self._memory
        state = self._state(namespace)
        with memory.lock:
            now_ms = state.now_ms(memory.clock)
            if memory.skips and self._changes_something(state, batch, now_ms):
                state.counters.revision += random.randrange(4)
            revision, put = state.counters.revision, find_plain_put(batch)
            outcome: Commit | Refusal | LimpetError | None = None if put is None else state.put(put, now_ms)
            if outcome is None:
                group = GroupPlan(state.find, state.find_changes, state.counters, now_ms)
                outcome = group.add(batch, None)
                state.apply(group)
            has_changed = state.counters.revision != revision
        if has_changed:
            memory.wakeup.notify(namespace)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _changes_something(self, state: _Namespace, batch: Batch, now_ms: int) -> bool:
        """Whether a batch will use a revision."""
        trial = GroupPlan(state.find, state.find_changes, msgspec.structs.replace(state.counters), now_ms)
        trial.add(batch, None)
        return bool(trial.changes)

    async def changes(
        self, namespace: str, after: int, *, span: Span | None = None, limit: int = 500, wait_s: float = 0.0
    ) -> LogPage:
        """See `Engine.changes`."""
        wakeup = self._memory.wakeup
        token = wakeup.token(namespace)
        page = self._log_page(namespace, after, span, limit)
        if page.changes or wait_s <= 0 or not has_loop():
            return page
        await wakeup.wait(namespace, token, wait_s)
        return self._log_page(namespace, after, span, limit)

    async def due(self, namespace: str, *, limit: int = 500) -> list[Expire]:
        """See `Engine.due`."""
        state = self._state(namespace)
        now_ms = state.now_ms(self._memory.clock)
        with self._memory.lock:
            due: list[_Expiry] = []
            while state.expiries and state.expiries[0][0] <= now_ms and len(due) < limit:
                item = heapq.heappop(state.expiries)
                entry = state.find(item[1], item[2])
                # An entry that was written again has another item.
                if entry is not None and entry.revision == item[3]:
                    due.append(item)
            for item in due:
                heapq.heappush(state.expiries, item)
        return [Expire(key, revision, family) for _, family, key, revision in due]

    async def trim(self, namespace: str, window: Window) -> int:
        """See `Engine.trim`."""
        state = self._state(namespace)
        now_ms = state.now_ms(self._memory.clock)
        with self._memory.lock:
            state.drop_expired(now_ms)
            oldest = ((change.revision, change.at_ms, change.entry.weight_bytes) for change in state.log)
            dropped, freed_bytes, floor = window.excess(
                oldest, count=state.counters.log_changes, size_bytes=state.counters.log_bytes, now_ms=now_ms
            )
            if dropped:
                state.floor_print = fingerprint(self._with_cause(state.log[dropped - 1]))
                del state.log[:dropped]
                state.floor = floor
                state.counters.log_changes -= dropped
                state.counters.log_bytes -= freed_bytes
            for family in state.sorted_keys:
                state.sorted_keys[family].tidy(state.map[family])
            # Items of entries that were written again would otherwise stay until they are due.
            if len(state.expiries) > 64 + 2 * sum(len(entries) for entries in state.map.values()):
                state.expiries = [item for item in state.expiries if _is_current(state, item)]
                heapq.heapify(state.expiries)
            return dropped

    async def status(self, namespace: str) -> Status:
        """See `Engine.status`."""
        state = self._state(namespace)
        with self._memory.lock:
            counters, now_ms = state.counters, state.now_ms(self._memory.clock)
            return Status(
                store_id=self._memory.store_id,
                epoch=1,
                revision=counters.revision,
                floor=state.floor,
                keys=counters.keys,
                size_bytes=counters.size_bytes,
                log_changes=counters.log_changes,
                log_bytes=counters.log_bytes,
                now_ms=now_ms,
                behind_ms=max(0, now_ms - self._memory.clock.now_ms()),
            )

    async def close(self) -> None:
        """See `Engine.close`."""
        self._closed = True
        self._memory.wakeup.notify_all()

    def _state(self, namespace: str) -> _Namespace:
        if self._closed:
            raise Closed
        return self._memory.namespaces.get(namespace) or self._memory.state(namespace)

    def _log_page(self, namespace: str, after: int, span: Span | None, limit: int) -> LogPage:
        state = self._state(namespace)
        with self._memory.lock:
            check_after(after, floor=state.floor, revision=state.counters.revision)
            first = _first_after(state.log, after)
            before = fingerprint(self._with_cause(state.log[first - 1])) if first else state.floor_print
            if not limit:
                return LogPage([], after, before)
            log: Iterable[Change] = itertools.islice(state.log, first, None)
            if span is not None:
                log = (change for change in log if change.family == "data" and change.key in span)
            found = [self._with_cause(change) for change in itertools.islice(log, limit)]
            return LogPage(found, found[-1].revision if len(found) == limit else state.counters.revision, before)

    def _with_cause(self, change: Change) -> Change:
        """The change with its cause. A commit without a request id gets one from its revision when it is read."""
        if change.cause is not None or change.op == "expire":
            return change
        return msgspec.structs.replace(change, cause=f"{self._memory.store_id}-{change.commit:x}")


def _first_after(log: list[Change], after: int) -> int:
    return bisect_right(log, after, key=lambda change: change.revision)


def _is_current(state: _Namespace, item: _Expiry) -> bool:
    entry = state.find(item[1], item[2])
    return entry is not None and entry.revision == item[3]


# A fork copies the memory. Holding the locks meanwhile keeps the copy consistent, and the
# child gets locks that no thread of its parent holds.

_memories: weakref.WeakSet[_Memory] = weakref.WeakSet()
_locked: list[_Memory] = []


def _before_fork() -> None:
    for memory in list(_memories):
        memory.lock.acquire()
        _locked.append(memory)


def _after_fork_in_parent() -> None:
    while _locked:
        _locked.pop().lock.release()


def _after_fork_in_child() -> None:
    _locked.clear()
    for memory in list(_memories):
        memory.lock, memory.wakeup = threading.RLock(), Wakeup()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
