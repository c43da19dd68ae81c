"""Recoverable copies of entries that expire, so that an expiry is logged and the expired value can be recovered.

An entry with a time to live has a copy in the family ``recoverable`` of its namespace, written in the same commit:

    live/<key>              while the entry lasts
    over/<key>              after it expired, for as long as it can be recovered

The first process that finds the entry gone and its copy still under ``live/`` moves the copy and logs the expiry, so
each expiry is logged once. That is checked when the key is written or recovered, in the process that put the entry when
its time is over, and by every store that is used with ``async with``.

In an audited namespace, `limpet.semantic.audit` writes and moves the copies instead, in the commits of its rows.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, ClassVar, Final

import msgspec

from limpet.clock import has_loop
from limpet.codec import Stored, encode_field
from limpet.errors import BrokenError, Conflict, InvalidValue, LimpetError, PermissionDenied
from limpet.model import ABSENT, Delete, Entry, Guard, Put, Revision, Write, split_writer
from limpet.semantic.background import BackgroundTask
from limpet.semantic.families import read_family, scan_family
from limpet.semantic.model import Semantics, directive_of
from limpet.session import Session
from limpet.store import Store

__all__ = [
    "GRACE_S",
    "KeyCopies",
    "RecoverableCopies",
    "expired_key",
    "expired_keys",
    "live_copy",
    "live_key",
    "log_expiry",
    "move_copy",
    "read_copies",
]

log = logging.getLogger("limpet.semantic")

GRACE_S: Final = 86_400.0
"""How long an expired entry can be recovered by default."""
CHECK_S: Final = 2.0
"""How often the background task checks for expiries."""
TIMER_MARGIN_S: Final = 0.05
TIMERS_MAX: Final = 10_000


# One mechanism for audited and other namespaces ----------------------------------


def live_key(key: str) -> str:
    """Where the copy of an entry is while the entry lasts."""
    return f"live/{key}"


def expired_key(key: str) -> str:
    """Where the copy of an entry is after the entry expired."""
    return f"over/{key}"


def live_copy(key: str, stored: Stored, ttl_ms: int, grace_ms: int, meta: Mapping[str, Any]) -> Put:
    """The write of a copy that outlives its entry by the time to recover it."""
    return Put(live_key(key), stored, ttl_ms + grace_ms, encode_field(dict(meta)), family="recoverable")


def move_copy(key: str, live: Entry, now_ms: int) -> list[Write]:
    """The writes that move the copy of an entry that expired, for the rest of the time to recover it."""
    writes: list[Write] = [Delete(live_key(key), family="recoverable")]
    left_ms = 0 if live.expires_ms is None else live.expires_ms - now_ms
    if left_ms > 0 and live.stored is not None:
        _, meta_json = split_writer(live.meta_json)
        writes.append(Put(expired_key(key), live.stored, left_ms, meta_json, family="recoverable"))
    return writes


async def read_copies(store: Store, names: Sequence[str]) -> list[Entry | None]:
    """Copies by their names, see `live_key` and `expired_key`."""
    return await read_family(store, names, "recoverable")


async def expired_keys(store: Store, grace_ms: int) -> AsyncIterator[str]:
    """The keys whose entries expired, by their copies, and whose copies were not moved yet."""
    now_ms = (await store.status()).now_ms
    async for copy in scan_family(store, live_key(""), "recoverable", values=False):
        if copy.expires_ms is not None and copy.expires_ms - grace_ms <= now_ms:
            yield copy.key.removeprefix(live_key(""))


def log_expiry(key: str, meta: dict[str, Any]) -> None:
    """Log that an entry expired, with its purpose. Never a value."""
    semantics = meta.get("semantics", {})
    members = {
        "event": "kvExpire",
        "key": key,
        "purpose": str(semantics.get("purpose", "")),
        "directive": directive_of(str(meta.get("writer", ""))),
        "semantics": semantics,
        "version": meta.get("version"),
    }
    names = ("key", "purpose", "directive", "version")
    log.info("kvExpire %s", " ".join(f"{name}={members[name]}" for name in names), extra=members)


# Namespaces without a trail -------------------------------------------------------


class KeyCopies(msgspec.Struct, frozen=True):
    """The copies of one key.

    Attributes:
        live: That of an entry that lasts, or that expired and whose copy was not moved yet.
        expired: That of an entry that expired.
    """

    live: Entry | None
    expired: Entry | None


class RecoverableCopies(BackgroundTask):
    """The copies of a namespace that is not audited. In the background, it records expiries."""

    task_name: ClassVar[str] = "limpet-expiries"

    def __init__(self, store: Store, grace_s: float) -> None:
        if not grace_s > 0:
            raise InvalidValue("the time to recover must be more than zero seconds")
        super().__init__()
        self._store = store
        self._session = store._session
        self._grace_ms = round(grace_s * 1000)
        self._may_read = True

    # With a write -----------------------------------------------------------------

    async def load(self, keys: Sequence[str]) -> list[KeyCopies]:
        """The copies of some keys."""
        names = [name for key in keys for name in (live_key(key), expired_key(key))]
        try:
            found = await read_copies(self._store, names)
        except PermissionDenied:
            # A token that may write and not read. Its entries are written without copies.
            self._may_read = False
            return [KeyCopies(None, None) for _ in keys]
        return [KeyCopies(*pair) for pair in zip(found[::2], found[1::2], strict=True)]

    def plan(
        self,
        key: str,
        copies: KeyCopies,
        stored: Stored | None,
        semantics: Semantics | None,
        writer: str,
        spec_ref: str | None,
        version: int | None,
    ) -> tuple[list[Write], list[Guard]]:
        """The writes and guards of the copies, with a change that leaves ``stored`` under the key, or no entry."""
        writes: list[Write] = []
        guards: list[Guard] = []
        if not self._may_read:
            return writes, guards
        if copies.live is not None:
            # Another process may record its expiry at the same time.
            guards.append(Guard(copies.live.key, Revision(copies.live.revision), "recoverable"))
        if stored is not None and semantics is not None and semantics.ttl_ms is not None:
            meta: dict[str, Any] = {"writer": writer, "semantics": semantics.to_dict()}
            meta |= {} if spec_ref is None else {"specRef": spec_ref}
            meta |= {} if version is None else {"version": version}
            writes.append(live_copy(key, stored, semantics.ttl_ms, self._grace_ms, meta))
        elif copies.live is not None:
            writes.append(Delete(copies.live.key, family="recoverable"))
        # A delete that finds such a copy finds no entry and ends nothing, so the copy stays recoverable.
        if copies.expired is not None and stored is not None:
            writes.append(Delete(copies.expired.key, family="recoverable"))
        return writes, guards

    # Expiry -----------------------------------------------------------------------

    async def record_expiry(self, key: str, live: Entry) -> bool:
        """Move the copy of an entry that expired and log the expiry, once.

        Returns:
            False when the entry is there, or another process was first.
        """
        now_ms = (await self._store.status()).now_ms
        guards = [Guard(key, ABSENT), Guard(live_key(key), Revision(live.revision), "recoverable")]
        try:
            await self._store.batch().include(*move_copy(key, live, now_ms), guards=guards).commit()
        except Conflict:
            return False
        log_expiry(key, live.meta)
        return True

    async def recoverable(self, key: str) -> Entry | None:
        """The copy of an entry that expired; None when it can no longer be recovered."""
        (copies,) = await self.load([key])
        if copies.live is not None and await self._store.entry(key) is None:
            await self.record_expiry(key, copies.live)
            # Read again in any case: if another process was first, it has moved the copy.
            (copies,) = await self.load([key])
        return copies.expired

    async def record_expiries(self) -> int:
        """Record every expiry that was not recorded yet. Returns how many this call recorded."""
        recorded = 0
        async for key in expired_keys(self._store, self._grace_ms):
            recorded += await self.record_if_expired(key)
        return recorded

    async def record_if_expired(self, key: str) -> bool:
        """Record the expiry of a key that has a copy and no entry. False when there is nothing to record."""
        (copies,) = await self.load([key])
        if copies.live is None or await self._store.entry(key) is not None:
            return False
        return await self.record_expiry(key, copies.live)

    async def _run(self) -> None:
        while True:
            await self._session.clock.sleep(CHECK_S)
            try:
                await self.record_expiries()
            except (BrokenError, PermissionDenied):
                # A caller that may not read the whole namespace records the expiries of its own entries, by timers.
                return
            except LimpetError as error:
                log.warning("the check for expiries in namespace %s is tried again: %s", self._store.name, error.code)

    def check_later(self, key: str, entry: Entry) -> None:
        """Record the expiry of an entry of this process at its time. Without a loop, a later call records it."""
        if has_loop() and entry.expires_ms is not None and self._may_read:
            _timers_of(self._session).add(self, key, entry)


class _Timer(msgspec.Struct, frozen=True):
    """When to check an entry, by the monotonic clock."""

    due: float
    revision: int
    copies: RecoverableCopies


class _ExpiryTimers:
    """When to check the entries that this process has put, on one loop."""

    def __init__(self, session: Session) -> None:
        self._clock = session.clock
        self._background = session.background
        # By namespace and key.
        self._timers: dict[tuple[str, str], _Timer] = {}
        self._changed = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None

    def add(self, copies: RecoverableCopies, key: str, entry: Entry) -> None:
        """Check an entry at its end, instead of what the key held before."""
        assert entry.expires_ms is not None
        name = (copies._store.name, key)
        if len(self._timers) >= TIMERS_MAX and name not in self._timers:
            return
        lasts_s = (entry.expires_ms - entry.updated_ms) / 1000
        self._timers[name] = _Timer(self._clock.monotonic() + lasts_s + TIMER_MARGIN_S, entry.revision, copies)
        self._changed.set()
        if self._task is None or self._task.done():
            self._task = self.loop.create_task(self._run(), name="limpet-expiries")
            self._background.add(self._task)
            self._task.add_done_callback(self._background.discard)

    async def _run(self) -> None:
        try:
            await self._run_while_due()
        finally:
            self._timers.clear()

    async def _run_while_due(self) -> None:
        while self._timers:
            at = min(timer.due for timer in self._timers.values())
            self._changed.clear()
            sleeping = asyncio.ensure_future(self._clock.sleep(max(0.0, at - self._clock.monotonic())))
            changed = asyncio.ensure_future(self._changed.wait())
            try:
                await asyncio.wait([sleeping, changed], return_when=asyncio.FIRST_COMPLETED)
            finally:
                sleeping.cancel()
                changed.cancel()
            now = self._clock.monotonic()
            for name, timer in list(self._timers.items()):
                if timer.due <= now:
                    await self._check(name, timer)

    async def _check(self, name: tuple[str, str], timer: _Timer) -> None:
        key = name[1]
        try:
            entry = await timer.copies._store.entry(key)
            if entry is None:
                await timer.copies.record_if_expired(key)
        except BrokenError:
            self._timers.clear()
            return
        except LimpetError:
            self._postpone(name, timer)
            return
        if entry is not None and entry.revision == timer.revision:
            # The engine's clock is a little behind ours.
            self._postpone(name, timer)
        elif self._is_current(name, timer):
            self._timers.pop(name, None)

    def _postpone(self, name: tuple[str, str], timer: _Timer) -> None:
        if self._is_current(name, timer):
            due = self._clock.monotonic() + 5 * TIMER_MARGIN_S
            self._timers[name] = _Timer(due, timer.revision, timer.copies)

    def _is_current(self, name: tuple[str, str], timer: _Timer) -> bool:
        """Whether the key was not put again meanwhile, with its own timer."""
        return self._timers.get(name, timer).revision == timer.revision


_timers: weakref.WeakKeyDictionary[Session, _ExpiryTimers] = weakref.WeakKeyDictionary()


def _timers_of(session: Session) -> _ExpiryTimers:
    found = _timers.get(session)
    if found is None or found.loop is not asyncio.get_running_loop():
        found = _timers[session] = _ExpiryTimers(session)
    return found
