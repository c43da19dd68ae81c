"""The memory engine: the reference, for tests and for state that may go with the process.

State is encoded bytes, never a caller's live object. A commit is planned and applied
under one lock, so any number of threads and loops may share it. Each open of ``memory:``
makes a private store; ``memory:name`` is shared in the process and lives as long as it.
"""

from __future__ import annotations

import os
import random
import threading
import uuid
import weakref
from collections.abc import Sequence

from limpet.clock import Clock, has_loop
from limpet.engines.budget import SCAN_CALLS, Budget
from limpet.engines.memory_namespace import Namespace
from limpet.engines.wakeup import Wakeup
from limpet.errors import Closed
from limpet.keys import Span
from limpet.model import (
    Batch,
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
    live,
)
from limpet.urls import Address

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
        self.namespaces: dict[str, Namespace] = {}
        _memories.add(self)

    def state(self, namespace: str) -> Namespace:
        found = self.namespaces.get(namespace)
        if found is None:
            with self.lock:
                found = self.namespaces.setdefault(namespace, Namespace(self.store_id))
        return found


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
        reverse: bool = False,
    ) -> ScanPage:
        """See `Engine.scan`."""
        if self._budget.spent(SCAN_CALLS):
            await self._budget.renewed()
        state = self._state(namespace)
        now_ms = state.now_ms(self._memory.clock)
        found: list[Entry] = []
        with self._memory.lock:
            entries = state.map[family]
            for key in state.sorted_keys[family].between(span, entries, reverse=reverse):
                entry = live(entries[key], now_ms)
                if entry is None or (
                    where is not None and entry.stored is not None and not where.matches(entry.stored)
                ):
                    continue
                if len(found) == limit:
                    return ScanPage(found, found[-1].key)
                found.append(entry if values else entry.without_value())
        return ScanPage(found, None)

    async def count(self, namespace: str, span: Span, *, family: Family = "data") -> int:
        """See `Engine.count`."""
        state = self._state(namespace)
        now_ms = state.now_ms(self._memory.clock)
        with self._memory.lock:
            stored = state.sorted_keys[family].count(span, state.map[family])
            return stored - state.count_expired(family, span, now_ms)

    async def namespaces(self) -> list[str]:
        """See `Engine.namespaces`."""
        self._check_open()
        with self._memory.lock:
            return sorted(name for name, state in self._memory.namespaces.items() if state.counters.revision)

    async def commit(self, namespace: str, batch: Batch) -> Commit | Refusal:
        """See `Engine.commit`."""
        if self._budget.spent():
            await self._budget.renewed()
        memory = self._memory
        state = self._state(namespace)
        with memory.lock:
            now_ms, counters = state.now_ms(memory.clock), state.counters
            if memory.skips and state.will_change(batch, now_ms):
                counters.revision += random.randrange(4)
            revision = counters.revision
            outcome = state.commit(batch, now_ms)
            has_changed = counters.revision != revision
        if has_changed:
            memory.wakeup.notify(namespace)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def changes(
        self, namespace: str, after: int, *, span: Span | None = None, limit: int = 500, wait_s: float = 0.0
    ) -> LogPage:
        """See `Engine.changes`."""
        wakeup = self._memory.wakeup
        token = wakeup.token(namespace)
        page = self._read_log(namespace, after, span, limit)
        if page.changes or wait_s <= 0 or not has_loop():
            return page
        await wakeup.wait(namespace, token, wait_s)
        return self._read_log(namespace, after, span, limit)

    async def due(self, namespace: str, *, limit: int = 500) -> list[Expire]:
        """See `Engine.due`."""
        state = self._state(namespace)
        with self._memory.lock:
            return state.find_due(state.now_ms(self._memory.clock), limit)

    async def trim(self, namespace: str, window: Window) -> int:
        """See `Engine.trim`."""
        state = self._state(namespace)
        with self._memory.lock:
            return state.trim(window, state.now_ms(self._memory.clock))

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

    def _check_open(self) -> None:
        if self._closed:
            raise Closed

    def _state(self, namespace: str) -> Namespace:
        if self._closed:
            raise Closed
        return self._memory.namespaces.get(namespace) or self._memory.state(namespace)

    def _read_log(self, namespace: str, after: int, span: Span | None, limit: int) -> LogPage:
        state = self._state(namespace)
        with self._memory.lock:
            return state.read_log(after, span, limit)


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
