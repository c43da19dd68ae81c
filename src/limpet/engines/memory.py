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

_Expiry = tuple[int, Family, str, int]
"""When an entry expires, its family and key, and its revision. Out of date once the entry has another revision."""

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
        self.revision = 0
        self.floor = 0
        self.floor_print = BEGINNING
        self.map: dict[Family, dict[str, Entry]] = {family: {} for family in FAMILIES}
        self.sorted_keys: dict[Family, SortedKeys] = {family: SortedKeys() for family in FAMILIES}
        self.expiries: list[_Expiry] = []
        self.log: list[Change] = []
        self.size_bytes = 0
        self.log_bytes = 0
        self.is_halfway = False
        # The ids of superseded requests, and until when each is remembered.
        self.superseded: dict[str, int] = {}
        self._latest_ms = 0

    def now_ms(self, clock: Clock) -> int:
        """The time of the namespace: the clock's, or the latest time it has had if that is later."""
        now_ms = clock.now_ms()
        if now_ms > self._latest_ms:  # noqa: PLR1730 - max() takes longer than reading the clock
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
            self.sorted_keys[family].add(key)
        if entry.expires_ms is not None:
            heapq.heappush(self.expiries, (entry.expires_ms, family, key, entry.revision))

    def keep_receipt(self, receipt: Entry) -> None:
        self.map["receipt"][receipt.key] = receipt

    def check_superseded(self, batch: Batch, now_ms: int) -> None:
        """Remember which request a retry supersedes, and refuse a first attempt that arrives after its retry."""
        request_id = batch.request_id or ""
        if batch.retry_since is not None:
            self.superseded[request_id] = now_ms + SUPERSEDED_MS
        elif request_id in self.superseded and may_be_superseded(batch):
            raise superseded_error()


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
            if batch.retry_since is not None:
                earlier = recall(batch, state.log[_first_after(state.log, batch.retry_since) :], state.find)
                if earlier is not None:
                    return earlier
            now_ms = state.now_ms(memory.clock)
            if batch.request_id is not None:
                state.check_superseded(batch, now_ms)
            outcome = plan(batch, state.find, now_ms=now_ms, revision=state.revision)
            if isinstance(outcome, Refusal):
                return outcome
            if memory.skips and outcome.changes:
                again = plan(batch, state.find, now_ms=now_ms, revision=state.revision + random.randrange(4))
                assert not isinstance(again, Refusal)
                outcome = again
            changes = outcome.changes
            state.is_halfway = len(changes) > 1
            for change in changes:
                state.apply(change)
            state.is_halfway = False
            if outcome.receipt is not None:
                state.keep_receipt(outcome.receipt)
        if changes:
            memory.wakeup.notify(namespace)
        return outcome.commit

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
            receipts = state.map["receipt"]
            for key in [key for key, receipt in receipts.items() if live(receipt, now_ms) is None]:
                del receipts[key]
            state.superseded = {id: until_ms for id, until_ms in state.superseded.items() if until_ms > now_ms}
            oldest = ((change.revision, change.at_ms, change.entry.weight_bytes) for change in state.log)
            dropped, freed_bytes, floor = window.excess(
                oldest, count=len(state.log), size_bytes=state.log_bytes, now_ms=now_ms
            )
            if dropped:
                state.floor_print = fingerprint(self._with_cause(state.log[dropped - 1]))
                del state.log[:dropped]
                state.floor, state.log_bytes = floor, state.log_bytes - freed_bytes
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
            now_ms = state.now_ms(self._memory.clock)
            return Status(
                store_id=self._memory.store_id,
                epoch=1,
                revision=state.revision,
                floor=state.floor,
                keys=len(state.map["data"]),
                size_bytes=state.size_bytes,
                log_changes=len(state.log),
                log_bytes=state.log_bytes,
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
            if after < state.floor:
                raise Compacted(f"revision {after} was trimmed, the log starts after {state.floor}", oldest=state.floor)
            if after > state.revision:
                raise Compacted(f"revision {after} lies ahead of this store, which is at {state.revision}")
            first = _first_after(state.log, after)
            before = fingerprint(self._with_cause(state.log[first - 1])) if first else state.floor_print
            if not limit:
                return LogPage([], after, before)
            log: Iterable[Change] = itertools.islice(state.log, first, None)
            if span is not None:
                log = (change for change in log if change.family == "data" and change.key in span)
            found = [self._with_cause(change) for change in itertools.islice(log, limit)]
            return LogPage(found, found[-1].revision if len(found) == limit else state.revision, before)

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
