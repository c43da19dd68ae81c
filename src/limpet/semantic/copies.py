"""Copies of semantic entries that expire, so that an expiry is logged and what expired can be recovered.

An entry with a time to live has a copy in the family ``recoverable`` of its namespace, written in the same commit:

    live/<key>              while the entry lasts
    over/<key>              after it expired, for as long as it can be recovered

Whoever first notices that an entry is gone and its copy is still there moves the copy and writes a line to the log, so
there is one line for each expiry. It is noticed when the key is written or recovered, by the process that put the entry
when its time is over, and by every store that is used with ``async with``. An audited namespace has rows as well, and
does this by `limpet.semantic.audit`.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from limpet.clock import has_loop
from limpet.codec import Stored, encode_field
from limpet.errors import BrokenError, Conflict, InvalidValue, LimpetError, PermissionDenied
from limpet.keys import Span, prefix_span
from limpet.model import ABSENT, Delete, Entry, Guard, Put, Revision, ScanPage, Write
from limpet.semantic.model import Semantics, directive_of
from limpet.session import Session
from limpet.store import Store

__all__ = ["GRACE_S", "Copies", "Copy", "log_expiry"]

log = logging.getLogger("limpet.semantic")

GRACE_S: Final = 86_400.0
"""How long what expired can be recovered, unless told otherwise."""
LOOK_S: Final = 2.0
LATE_S: Final = 0.05
TIMERS_MAX: Final = 10_000


class Copy(msgspec.Struct, frozen=True):
    """What there is of a key beside its entry.

    Attributes:
        live: The copy of an entry that lasts, or that expired and was not noticed yet.
        over: The copy of an entry that expired.
    """

    live: Entry | None
    over: Entry | None


class Copies:
    """The copies of a namespace."""

    def __init__(self, store: Store, grace_s: float) -> None:
        if not grace_s > 0:
            raise InvalidValue("the time to recover is more than zero seconds")
        self._store = store
        self._session = store._session
        self._grace_ms = round(grace_s * 1000)
        self._task: asyncio.Task[None] | None = None
        self._is_allowed = True

    # With a write -----------------------------------------------------------------

    async def look(self, keys: Sequence[str]) -> list[Copy]:
        """What there is of some keys."""
        names = [name for key in keys for name in (f"live/{key}", f"over/{key}")]
        try:
            found = await self._read(names)
        except PermissionDenied:
            # A token that may write and not read. It leaves no copies, and its entries are written all the same.
            self._is_allowed = False
            return [Copy(None, None) for _ in keys]
        return [Copy(*pair) for pair in zip(found[::2], found[1::2], strict=True)]

    def plan(
        self,
        key: str,
        copy: Copy,
        stored: Stored | None,
        semantics: Semantics | None,
        writer: str,
        spec_ref: str | None,
        version: int | None,
    ) -> tuple[list[Write], list[Guard]]:
        """What is to be written with a change of the entry, which leaves ``stored``, or nothing."""
        writes: list[Write] = []
        guards: list[Guard] = []
        if not self._is_allowed:
            return writes, guards
        if copy.live is not None:
            # Somebody may notice at the same time that it expired.
            guards.append(Guard(copy.live.key, Revision(copy.live.revision), "recoverable"))
        if stored is not None and semantics is not None and semantics.ttl_ms is not None:
            meta: dict[str, Any] = {"writer": writer, "semantics": semantics.to_dict()}
            meta |= {} if spec_ref is None else {"specRef": spec_ref}
            meta |= {} if version is None else {"version": version}
            lasting = semantics.ttl_ms + self._grace_ms
            writes.append(Put(f"live/{key}", stored, lasting, encode_field(meta), family="recoverable"))
        elif copy.live is not None:
            writes.append(Delete(copy.live.key, family="recoverable"))
        if copy.over is not None and stored is not None:
            # A delete finds it only where the entry is gone already, and ends nothing.
            writes.append(Delete(copy.over.key, family="recoverable"))
        return writes, guards

    # Expiry -----------------------------------------------------------------------

    async def notice(self, key: str, live: Entry) -> bool:
        """Tell of an entry that expired, once. False when it is there, or somebody else was first."""
        name = f"live/{key}"
        now_ms = (await self._store.status()).now_ms
        left_ms = 0 if live.expires_ms is None else live.expires_ms - now_ms
        guards = [Guard(key, ABSENT), Guard(name, Revision(live.revision), "recoverable")]
        draft = self._store.batch().include(Delete(name, family="recoverable"), guards=guards)
        if left_ms > 0 and live.stored is not None:
            draft.include(Put(f"over/{key}", live.stored, left_ms, live.meta_json, family="recoverable"))
        try:
            await draft.commit()
        except Conflict:
            return False
        log_expiry(key, live.meta)
        return True

    async def recoverable(self, key: str) -> Entry | None:
        """The copy of what a key held when it expired; None when there is none any more."""
        (copy,) = await self.look([key])
        if copy.live is not None and await self._store.entry(key) is None and await self.notice(key, copy.live):
            (copy,) = await self.look([key])
        return copy.over

    async def notice_all(self) -> int:
        """Tell of everything that expired and was not noticed yet. Returns how much that was."""
        now_ms = (await self._store.status()).now_ms
        told = 0
        span: Span | None = prefix_span("live/")
        while span is not None:
            page = await self._session.retry(lambda part=span: self._scan(part))  # type: ignore[misc]
            due = [
                entry.key.removeprefix("live/")
                for entry in page.entries
                if entry.expires_ms is not None and entry.expires_ms - self._grace_ms <= now_ms
            ]
            for key in due:
                told += await self._notice_if_gone(key)
            span = None if page.cursor is None else Span(page.cursor + "\0", span.stop)
        return told

    async def _notice_if_gone(self, key: str) -> bool:
        (copy,) = await self.look([key])
        if copy.live is None or await self._store.entry(key) is not None:
            return False
        return await self.notice(key, copy.live)

    async def _scan(self, span: Span) -> ScanPage:
        return await self._session.engine.scan(self._store.name, span, family="recoverable", values=False)

    async def _read(self, names: list[str]) -> list[Entry | None]:
        engine = self._session.engine
        return await self._session.retry(lambda: engine.read(self._store.name, names, family="recoverable"))

    # In the background --------------------------------------------------------------

    def start(self) -> None:
        """Notice everything that expires, on the running loop."""
        if self._task is None or self._task.get_loop() is not asyncio.get_running_loop():
            self._task = asyncio.get_running_loop().create_task(self._run(), name="limpet-expiries")

    async def stop(self) -> None:
        """End."""
        task, self._task = self._task, None
        # In a child after a fork, the loop that it was on stayed behind with it.
        if task is not None and task.get_loop() is asyncio.get_running_loop():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self._session.clock.sleep(LOOK_S)
            try:
                await self.notice_all()
            except (BrokenError, PermissionDenied):
                # Whoever may not see the whole namespace looks after what it puts itself.
                return
            except LimpetError as error:
                log.warning("expiries of namespace %s will be looked for again: %s", self._store.name, error.code)

    def expect(self, key: str, entry: Entry) -> None:
        """Look at an entry of this process when its time is over. Without a loop, the next call that comes by does."""
        if has_loop() and entry.expires_ms is not None and self._is_allowed:
            _timers_of(self._session).add(self, key, entry)


class _Timers:
    """When to look at the entries that this process has put, on one loop."""

    def __init__(self, session: Session) -> None:
        self._clock = session.clock
        self._background = session.background
        self._due: dict[tuple[str, str], tuple[float, int, Copies]] = {}
        self._changed = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None

    def add(self, copies: Copies, key: str, entry: Entry) -> None:
        """Look at an entry when its time is over, and no longer at what the key held before."""
        assert entry.expires_ms is not None
        place = (copies._store.name, key)
        if len(self._due) >= TIMERS_MAX and place not in self._due:
            return
        lasts_s = (entry.expires_ms - entry.updated_ms) / 1000
        self._due[place] = (self._clock.monotonic() + lasts_s + LATE_S, entry.revision, copies)
        self._changed.set()
        if self._task is None or self._task.done():
            self._task = self.loop.create_task(self._run(), name="limpet-expiries")
            self._background.add(self._task)
            self._task.add_done_callback(self._background.discard)

    async def _run(self) -> None:
        try:
            await self._run_while_due()
        finally:
            self._due.clear()

    async def _run_while_due(self) -> None:
        while self._due:
            at = min(due for due, _, _ in self._due.values())
            self._changed.clear()
            sleeping = asyncio.ensure_future(self._clock.sleep(max(0.0, at - self._clock.monotonic())))
            changed = asyncio.ensure_future(self._changed.wait())
            try:
                await asyncio.wait([sleeping, changed], return_when=asyncio.FIRST_COMPLETED)
            finally:
                sleeping.cancel()
                changed.cancel()
            now = self._clock.monotonic()
            for place, (due, revision, copies) in list(self._due.items()):
                if due <= now:
                    await self._look(place, revision, copies)

    async def _look(self, place: tuple[str, str], revision: int, copies: Copies) -> None:
        key = place[1]
        try:
            entry = await copies._store.entry(key)
            if entry is None:
                await copies._notice_if_gone(key)
        except BrokenError:
            self._due.clear()
            return
        except LimpetError:
            self._again(place, copies, revision)
            return
        if entry is not None and entry.revision == revision:
            # The clock of the engine is a little behind ours.
            self._again(place, copies, revision)
        elif self._due.get(place, (0.0, revision, copies))[1] == revision:
            self._due.pop(place, None)

    def _again(self, place: tuple[str, str], copies: Copies, revision: int) -> None:
        if self._due.get(place, (0.0, revision, copies))[1] == revision:
            self._due[place] = (self._clock.monotonic() + 5 * LATE_S, revision, copies)


_timers: weakref.WeakKeyDictionary[Session, _Timers] = weakref.WeakKeyDictionary()


def _timers_of(session: Session) -> _Timers:
    found = _timers.get(session)
    if found is None or found.loop is not asyncio.get_running_loop():
        found = _timers[session] = _Timers(session)
    return found


def log_expiry(key: str, meta: dict[str, Any]) -> None:
    """One line of the log for an entry that expired, with what it was for. Never a value."""
    semantics = meta.get("semantics", {})
    told = {
        "event": "kvExpire",
        "key": key,
        "purpose": str(semantics.get("purpose", "")),
        "directive": directive_of(str(meta.get("writer", ""))),
        "semantics": semantics,
        "version": meta.get("version"),
    }
    shown = ("key", "purpose", "directive", "version")
    log.info("kvExpire %s", " ".join(f"{name}={told[name]}" for name in shown), extra=told)
