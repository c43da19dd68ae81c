"""The store: one namespace of an opened engine, and every verb on it.

Each verb drafts a batch or asks the engine, waits for nothing but the engine and the
clock, and returns. What a write does is decided in `limpet.transition`.
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from limpet.checks import check_filter
from limpet.clock import Clock
from limpet.codec import decode
from limpet.draft import TTL, Draft, Expectation, Fence, Fencing, Meta, plain_put
from limpet.election import Election
from limpet.engine import Indexing, Sealing
from limpet.errors import Compacted, Conflict, Contention, InvalidValue, TransientError
from limpet.hub import Watch, event_of, position_prefix
from limpet.index import check_field, make_probes
from limpet.keys import (
    PAGE_BYTES,
    PAGE_MAX,
    VALUE_BYTES_MAX,
    Span,
    check_key,
    check_namespace,
    fit,
    key_span,
    pattern_span,
    prefix_span,
)
from limpet.lock import Lock, LockInfo, lock_info
from limpet.model import (
    ABSENT,
    ANY,
    KEEP,
    UNCHANGED,
    Change,
    Commit,
    Entry,
    Event,
    Filter,
    LogPage,
    Resealed,
    Seals,
    Sentinel,
    Status,
    Traits,
    Window,
)
from limpet.opening import open_session
from limpet.record import Record
from limpet.request_ids import is_made_here
from limpet.retry import jitter_s
from limpet.session import Session
from limpet.transition import read_receipt
from limpet.turns import Turn, is_inside

if TYPE_CHECKING:
    from limpet.encryption.keyring import Keyring

__all__ = ["Opening", "Page", "Store", "open", "take_turn"]

SCAN_PAGE: Final = 500
FIRST_READ: Final = 8
UPDATE_ATTEMPTS: Final = 256
UPDATE_TURN_S: Final = 2.0
UPDATE_TURN_S_MAX: Final = 60.0


class Page(msgspec.Struct, frozen=True):
    """Some keys, in order. When ``truncated``, pass ``cursor`` as ``after`` to go on."""

    keys: list[str]
    truncated: bool
    cursor: str | None

    @property
    def count(self) -> int:
        """How many keys are on this page."""
        return len(self.keys)


class Store:
    """One namespace. Get one from `limpet.open`, others of the same engine from `namespace`."""

    def __init__(self, session: Session, name: str) -> None:
        self.name = check_namespace(name)
        self._session = session
        session.sweeper.watch_over(name)

    @property
    def traits(self) -> Traits:
        """What this engine promises where engines differ."""
        return self._session.engine.traits

    def namespace(self, name: str) -> Store:
        """Another namespace of the same engine. It is closed together with this one."""
        return Store(self._session, name)

    # Reading ------------------------------------------------------------------

    async def get(self, key: str, default: Any = None) -> Any:
        """The value under a key, or the default when there is none."""
        # Straight to the engine: the most used verb goes through one coroutine less.
        try:
            (entry,) = await self._session.engine.read(self.name, (check_key(key),))
        except TransientError:
            entry = await self._session.read_again(self.name, key)
        return default if entry is None or entry.stored is None else decode(entry.stored)

    async def entry(self, key: str) -> Entry | None:
        """The value with its version, revision, times and meta; None when there is none."""
        return await self._session.read(self.name, check_key(key))

    async def keys(self, prefix: str = "", *, limit: int = 1000, after: str | None = None) -> Page:
        """A page of keys that start with the prefix, in code-point order."""
        if type(limit) is not int or not 1 <= limit <= PAGE_MAX:
            raise InvalidValue(f"a page holds 1 to {PAGE_MAX:,} keys")
        found: list[str] = []
        span: Span | None = _span_after(prefix_span(prefix), after)
        while span is not None and len(found) < limit:
            part = await self._slice(span, values=False, limit=limit - len(found))
            found += [entry.key for entry in part.entries]
            span = None if part.cursor is None else _span_after(span, part.cursor)
        return Page(found, span is not None, found[-1] if span is not None else None)

    async def scan(
        self, prefix: str = "", *, where: Filter | None = None, limit: int | None = None, after: str | None = None
    ) -> AsyncIterator[Entry]:
        """Entries whose keys start with the prefix, in code-point order; with ``where``, those that match."""
        if limit is not None and (type(limit) is not int or limit < 1):
            raise InvalidValue("a scan is limited to one entry or more")
        if where is not None:
            check_filter(where)
        span: Span | None = _span_after(prefix_span(prefix), after)
        left = limit
        found = None if where is None or span is None else await self._found_by_index(span, where)
        if found is not None:
            async for entry in found:
                if left == 0:
                    return
                yield entry
                left = None if left is None else left - 1
            return
        while span is not None and left != 0:
            part = await self._slice(span, where=where, limit=SCAN_PAGE if left is None else min(left, SCAN_PAGE))
            for entry in part.entries:
                yield entry
            left = None if left is None else left - len(part.entries)
            span = None if part.cursor is None else _span_after(span, part.cursor)

    async def _found_by_index(self, span: Span, where: Filter) -> AsyncIterator[Entry] | None:
        """The entries that match, if there is an index that finds them."""
        engine, wanted = self._indexing, make_probes(where)
        if not wanted or engine is None:
            return None
        keys = await self._session.retrying(lambda: engine.candidates(self.name, span, wanted))
        return None if keys is None else self._matching(sorted({*keys}), where)

    async def _matching(self, keys: list[str], where: Filter) -> AsyncIterator[Entry]:
        engine = self._session.engine
        # A read ends at no number of bytes, so that how many keys it has follows from what those before it held.
        first, count = 0, FIRST_READ
        while first < len(keys):
            page = keys[first : first + count]
            found = await self._session.retrying(functools.partial(engine.read, self.name, page))
            for entry in found:
                if entry is not None and entry.stored is not None and where.matches(entry.stored):
                    yield entry
            size_bytes = sum(entry.size_bytes for entry in found if entry is not None)
            first += count
            count = min(SCAN_PAGE, 4 * count, max(1, PAGE_BYTES * count // max(1, size_bytes)))

    async def index(self, field: str) -> bool:
        """Keep an index of a field, so that scans with ``where`` on it need not read every entry.

        It serves equality with numbers, strings and bytes, and the order of numbers. It costs its part of every
        write, and changes no answer. False on an engine that keeps none.
        """
        engine, field = self._indexing, check_field(field)
        if engine is None:
            return False
        await engine.index(self.name, field)
        return True

    async def unindex(self, field: str) -> None:
        """Keep an index no more."""
        engine, field = self._indexing, check_field(field)
        if engine is not None:
            await engine.unindex(self.name, field)

    async def indexes(self) -> list[str]:
        """The fields that have an index."""
        engine = self._indexing
        return [] if engine is None else await engine.indexes(self.name)

    @property
    def _indexing(self) -> Indexing | None:
        """The engine, if it keeps indexes."""
        self._session.check_open()
        engine = self._session.engine
        return engine if isinstance(engine, Indexing) else None

    # Encryption ---------------------------------------------------------------

    async def reseal(self, *, after: str | None = None, limit: int | None = None) -> Resealed:
        """Encrypt with the current key what older keys have encrypted, or what is not encrypted yet.

        That is the data, then the audit trail of the namespace, then what can be recovered of what expired.
        No write of others is lost, and whoever is interrupted may start again. Each entry is put back as it is, so its
        version grows by one, and the cause of the change starts with ``limpet-reseal-``.

        Args:
            after: Go on here: the cursor of an earlier call.
            limit: Look at this many entries at most; None for all.
        """
        if limit is not None and (type(limit) is not int or limit < 1):
            raise InvalidValue("encrypting anew is limited to one entry or more")
        if after is not None and not isinstance(after, str):
            raise InvalidValue(
                f"a cursor is what an earlier call returned, not something of type {type(after).__name__}"
            )
        engine, cursor = self._sealing, after
        looked_at = resealed = 0
        while limit is None or looked_at < limit:
            page = SCAN_PAGE if limit is None else min(SCAN_PAGE, limit - looked_at)
            part = await self._session.retrying(functools.partial(engine.reseal, self.name, after=cursor, limit=page))
            looked_at, resealed, cursor = looked_at + part.looked_at, resealed + part.resealed, part.cursor
            if cursor is None:
                break
        return Resealed(looked_at, resealed, cursor)

    async def seals(self) -> list[Seals]:
        """How many entries, and how many changes in the log, are encrypted with which key."""
        engine = self._sealing
        return await self._session.retrying(lambda: engine.seals(self.name))

    @property
    def _sealing(self) -> Sealing:
        self._session.check_open()
        engine = self._session.engine
        if not isinstance(engine, Sealing):
            raise InvalidValue("this store is not encrypted: open it with encryption=limpet.Keyring(…)")
        return engine

    async def _slice(self, span: Span, *, where: Filter | None = None, values: bool = True, limit: int) -> Any:
        engine = self._session.engine
        return await self._session.retrying(
            lambda: engine.scan(self.name, span, where=where, values=values, limit=limit)
        )

    # Writing ------------------------------------------------------------------

    async def put(
        self,
        key: str,
        value: object,
        *,
        ttl: TTL | Literal[Sentinel.KEEP] = None,
        expect: Expectation = ANY,
        fence: Fencing | Fence | None = None,
        request_id: str | None = None,
        meta: Meta | Literal[Sentinel.KEEP] = None,
    ) -> Entry:
        """Replace the whole value under a key.

        Args:
            key: The key.
            value: Any JSON value, raw bytes, or `Fields` for a record.
            ttl: Seconds until it expires; None for never, KEEP to leave it as it is.
            expect: What the key must be for the write to happen: an entry read before, a version, ABSENT …
            fence: A lock that must still be held.
            request_id: Makes the call safe to repeat for ten minutes, across crashes.
            meta: A small JSON object beside the value.

        Raises:
            Conflict: The key is not as expected.
            LockLost: The fence no longer holds.
        """
        if expect is ANY and fence is None and request_id is None:
            batch = plain_put(key, value, ttl, meta, self._session.value_bytes_max)
            commit = await self._session.commit(self.name, batch)
            assert isinstance(commit, Commit), "there is nothing to refuse it by"
            return _only(commit)
        draft = self._draft(key, expect, fence, request_id).put(key, value, ttl=ttl, meta=meta)
        return _only(await draft.commit())

    async def create(
        self,
        key: str,
        value: object,
        *,
        ttl: TTL = None,
        fence: Fencing | Fence | None = None,
        request_id: str | None = None,
        meta: Meta = None,
    ) -> Entry:
        """Put a value under a key that must not exist. Raises `Conflict` when it does."""
        return await self.put(key, value, ttl=ttl, expect=ABSENT, fence=fence, request_id=request_id, meta=meta)

    async def update(
        self,
        key: str,
        change: Callable[[Any], Any] | Callable[[Any], Awaitable[Any]],
        *,
        ttl: TTL | Literal[Sentinel.KEEP] = KEEP,
        fence: Fencing | Fence | None = None,
        meta: Meta | Literal[Sentinel.KEEP] = KEEP,
    ) -> Entry | None:
        """Change a value by a function of the value found (None when there is none).

        The function, plain or async, runs again only when another writer wrote in between. Tasks and threads
        that update the same key through one opened store take turns, in the order they came. A function that
        runs for longer than two seconds while others wait may lose its turn to others, and then runs again.

        Returning ABSENT deletes the key; then the answer is None. Returning UNCHANGED writes nothing and checks
        no fence; then the answer is the entry found, or None.

        Raises:
            Contention: Other processes kept writing in between.
        """
        if not callable(change):
            raise TypeError(f"update takes a function of the value, not something of type {type(change).__name__}")
        clock = self._session.clock
        turn = self._session.turns.turn(("update", self.name, check_key(key)))
        found: Entry | None = None
        try:
            for attempt in range(1, UPDATE_ATTEMPTS + 1):
                if attempt == 1 or not turn.is_up:
                    await take_turn(turn, attempt)
                    found = await self.entry(key)
                value = change(None if found is None else found.value)
                if inspect.isawaitable(value):
                    value = await value
                if value is UNCHANGED:
                    return found
                asked = clock.monotonic()
                try:
                    if value is not ABSENT:
                        return await self.put(key, value, ttl=ttl, expect=found, fence=fence, meta=meta)
                    if found is not None:
                        await self.delete(key, expect=found, fence=fence)
                    return None
                except Conflict as conflict:
                    found = conflict.current
                # Another process writes this key as well. About a round trip at first, so that few attempts are in
                # vain, and less on each further one, so that who has tried for long is ahead of who has just come.
                await clock.sleep(2 * jitter_s(clock.monotonic() - asked) / attempt)
            raise Contention(key, attempts=UPDATE_ATTEMPTS)
        finally:
            turn.leave()

    async def add(
        self,
        key: str,
        by: int = 1,
        *,
        ttl: TTL | Literal[Sentinel.KEEP] = KEEP,
        expect: Expectation = ANY,
        fence: Fencing | Fence | None = None,
        request_id: str | None = None,
        meta: Meta | Literal[Sentinel.KEEP] = KEEP,
    ) -> int:
        """Add to a counter, in one step. Returns its new value; a missing key counts as zero."""
        draft = self._draft(key, expect, fence, request_id).add(key, by, ttl=ttl, meta=meta)
        number: int = _only(await draft.commit()).value
        return number

    async def delete(
        self,
        key: str,
        *,
        expect: Expectation = ANY,
        fence: Fencing | Fence | None = None,
        request_id: str | None = None,
    ) -> bool:
        """End a key. False when there was none."""
        commit = await self._draft(key, expect, fence, request_id).delete(key).commit()
        return commit.ended[0] is not None

    async def take(
        self,
        key: str,
        default: Any = None,
        *,
        expect: Expectation = ANY,
        fence: Fencing | Fence | None = None,
        request_id: str | None = None,
    ) -> Any:
        """Get and delete in one step: of all who try, one gets the value."""
        commit = await self._draft(key, expect, fence, request_id).take(key).commit()
        ended = commit.ended[0]
        return default if ended is None else ended.value

    async def touch(
        self,
        key: str,
        ttl: TTL,
        *,
        expect: Expectation = ANY,
        fence: Fencing | Fence | None = None,
        request_id: str | None = None,
    ) -> Entry | None:
        """Change only when a key expires. None when there is no such key."""
        commit = await self._draft(key, expect, fence, request_id).touch(key, ttl).commit()
        return commit.entries[0]

    async def persist(
        self,
        key: str,
        *,
        expect: Expectation = ANY,
        fence: Fencing | Fence | None = None,
        request_id: str | None = None,
    ) -> Entry | None:
        """Let a key never expire. None when there is no such key."""
        return await self.touch(key, None, expect=expect, fence=fence, request_id=request_id)

    def batch(self, *, request_id: str | None = None) -> Draft:
        """Guards and writes that happen together or not at all."""
        return Draft(self._session, self.name, request_id)

    def record(self, key: str) -> Record:
        """A key whose fields are written one by one."""
        return Record(self, key)

    async def outcome(self, request_id: str) -> Commit | None:
        """What became of a request: its commit, or None when it was not applied.

        Of a request that was given an id, the entries that a put left come without their values,
        which the caller has. The id of an `Ambiguous` write that was given none is looked for in the log.
        """
        found = await self._session.read(self.name, check_key(request_id), family="receipt")
        if found is not None:
            return msgspec.structs.replace(read_receipt(found).commit, replayed=True)
        return await self._outcome_in_log(request_id) if is_made_here(request_id) else None

    async def _outcome_in_log(self, request_id: str) -> Commit | None:
        status = await self.status()
        after = status.floor
        caused: list[Change] = []
        while after < status.revision and not caused:
            feed = await self._feed(after)
            caused = [change for change in feed.changes if change.cause == request_id]
            after = feed.next_after
        if not caused:
            return None
        entries = tuple(change.after for change in caused)
        ended = tuple(change.entry if change.after is None else None for change in caused)
        return Commit(caused[-1].commit, entries, ended, caused[-1].at_ms, replayed=True)

    # Locking ------------------------------------------------------------------

    def lock(
        self,
        name: str,
        *,
        ttl: float | timedelta,
        wait: float = 0.0,
        holder: str | None = None,
        cancel: bool = True,
        token: int | None = None,
    ) -> Lock:
        """A lease on a name, to be used with ``async with``.

        Args:
            name: What to lock. Locks and keys never collide.
            ttl: How long the lease lasts without being renewed.
            wait: How many seconds to wait for it; 0 raises `LockHeld` at once.
            holder: Who is shown as its holder; the host and process when not given.
            cancel: Whether losing the lock cancels the body.
            token: Takes up a lock that another handle acquired under this token, to refresh or release it.
        """
        return Lock(self._session, self.name, name, ttl=ttl, wait=wait, holder=holder, cancel=cancel, token=token)

    def election(
        self,
        name: str,
        *,
        ttl: float | timedelta,
        wait: float | None = None,
        candidate: str | None = None,
        cancel: bool = True,
    ) -> Election:
        """A candidate to lead, to be used with ``async with``.

        Args:
            name: What to lead. The lead is the lock of this name.
            ttl: How long the others wait for a leader that is not heard of.
            wait: How many seconds to wait for the lead, then `LockHeld` is raised; None for as long as it takes.
            candidate: Who is shown as the leader; the host and process when not given.
            cancel: Whether losing the lead cancels the body.
        """
        return Election(self._session, self.name, name, ttl=ttl, wait=wait, candidate=candidate, cancel=cancel)

    async def locks(self, prefix: str = "") -> list[LockInfo]:
        """The locks that are held now, with their holders."""
        found, _ = await lock_page(self, prefix)
        return found

    # The log ------------------------------------------------------------------

    def watch(
        self,
        pattern: str = "*",
        *,
        after: str | int | None = None,
        initial: bool = False,
        overflow: Literal["resume", "drop"] = "resume",
    ) -> Watch:
        """Changes as they happen, in revision order.

        Args:
            pattern: ``*`` for all keys, ``config/*`` for what starts so, otherwise one exact key.
            after: Resume after this position of an event, or after this revision.
            initial: Deliver what there is first, then one `Synced`, then changes.
            overflow: ``drop`` skips and counts what a slow watcher cannot take; the default never skips.
        """
        return Watch(
            self._session.hub(self.name), pattern_span(pattern), after=after, initial=initial, overflow=overflow
        )

    async def history(self, key: str) -> AsyncIterator[Event]:
        """The changes of a key that are still in the log, oldest first."""
        span = key_span(key)
        status = await self.status()
        prefix, after = position_prefix(status, self.name), status.floor
        while after < status.revision:
            try:
                feed = await self._feed(after, span)
            except Compacted as gone:
                # Trimmed while we read: what is left starts later.
                after = gone.oldest if gone.oldest is not None else status.revision
                continue
            for change in feed.changes:
                yield event_of(change, prefix)
            after = feed.next_after

    async def _feed(self, after: int, span: Span | None = None) -> LogPage:
        return await self._session.retrying(lambda: self._session.engine.changes(self.name, after, span=span))

    async def status(self) -> Status:
        """The namespace at a glance."""
        return await self._session.retrying(lambda: self._session.engine.status(self.name))

    async def sweep(self) -> int:
        """End what has expired, now. Happens by itself within two seconds."""
        return await self._session.sweeper.sweep(self.name)

    async def trim(self) -> int:
        """Drop what the log need not keep, now. Happens by itself."""
        return await self._session.sweeper.trim(self.name)

    async def close(self) -> None:
        """End watches and background work and let go of the engine."""
        await self._session.close()

    def _draft(self, key: str, expect: Expectation, fence: Fencing | Fence | None, request_id: str | None) -> Draft:
        draft = Draft(self._session, self.name, request_id)
        if expect is not ANY:
            draft.expect(key, expect)
        if fence is not None:
            draft.fence(fence)
        return draft

    def __repr__(self) -> str:
        return f"Store({self.name!r} on {self.traits.engine})"


async def take_turn(turn: Turn, attempt: int) -> None:
    """Wait for the turn to update a key. It lasts longer on each attempt, so that a slow function gets through.

    An update inside the function of another one does not wait for a turn at first, because callers that hold one turn
    and wait for another may wait for each other. It never waits for the turn that it is inside of.
    """
    if is_inside() and (attempt == 1 or is_inside(turn.key)):
        return
    lasts_s = min(UPDATE_TURN_S_MAX, UPDATE_TURN_S * 2.0 ** (attempt - 1))
    if not turn.join(lasts_s=lasts_s):
        await turn.wait()


async def lock_page(
    store: Store, prefix: str, *, after: str | None = None, limit: int | None = None
) -> tuple[list[LockInfo], bool]:
    """Locks that are held now, in the order of their names, and whether there are more."""
    engine, status = store._session.engine, await store.status()
    span: Span | None = _span_after(prefix_span(prefix), after)
    found: list[LockInfo] = []
    while span is not None and (limit is None or len(found) < limit):
        count = SCAN_PAGE if limit is None else min(SCAN_PAGE, limit - len(found))
        scan = functools.partial(engine.scan, store.name, span, family="lock", limit=count)
        part = await store._session.retrying(scan)
        found += [lock_info(entry, status.now_ms) for entry in part.entries]
        span = None if part.cursor is None else _span_after(span, part.cursor)
    return found, span is not None


async def latest_changes(store: Store, key: str, *, limit: int, before: int | None = None) -> tuple[list[Event], bool]:
    """The latest changes of a key, those before a revision if one is given, and whether there may be older ones.

    They come oldest first, and end after `PAGE_BYTES`. A log is read forwards only, so it is read backwards in steps:
    the first is of a few revisions, and each later one four times as long.
    """
    span, status = key_span(key), await store.status()
    prefix, floor = position_prefix(status, store.name), status.floor
    stop, step = status.revision if before is None else min(before - 1, status.revision), 4
    found: deque[Change] = deque()
    size_bytes, has_more = 0, False
    while stop > floor and len(found) <= limit and size_bytes <= PAGE_BYTES:
        part: deque[Change] = deque()
        after = start = max(floor, stop - step)
        while after < stop:
            try:
                feed = await store._feed(after, span)
            except Compacted as gone:
                after = floor = start = stop if gone.oldest is None else gone.oldest
                continue
            part.extend(change for change in feed.changes if change.revision <= stop)
            after = feed.next_after
            has_more |= _drop_oldest(part, limit - len(found) + 1)
        found.extendleft(reversed(part))
        size_bytes = sum(change.entry.size_bytes for change in found)
        stop, step = start, 4 * step
    has_more |= _drop_oldest(found, limit) or stop > floor
    return [event_of(change, prefix) for change in found], has_more


def _drop_oldest(changes: deque[Change], most: int) -> bool:
    """Keep the latest changes that make up a page. Whether one was dropped."""
    kept = fit([change.entry.size_bytes for change in reversed(changes)][:most])
    has_more = kept < len(changes)
    while len(changes) > kept:
        changes.popleft()
    return has_more


def _only(commit: Commit) -> Entry:
    entry = commit.entries[0]
    assert entry is not None
    return entry


def _span_after(span: Span, after: str | None) -> Span:
    """The rest of a span behind a key. No key contains U+0000, so nothing lies in between."""
    return span if after is None else Span(max(span.start, check_key(after) + "\0"), span.stop)


# Opening ----------------------------------------------------------------------


class Opening:
    """A store about to be opened: ``async with limpet.open(…) as store`` or ``store = await limpet.open(…)``."""

    def __init__(self, opening: Callable[[], Awaitable[Store]]) -> None:
        self._opening = opening
        self._store: Store | None = None

    def __await__(self) -> Generator[Any, None, Store]:
        return self._opening().__await__()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"there is no store yet to ask for {name!r}: write 'async with limpet.open(…) as store', "
            "or 'store = await limpet.open(…)'"
        )

    async def __aenter__(self) -> Store:
        self._store = await self._opening()
        return self._store

    async def __aexit__(self, *_: object) -> None:
        if self._store is not None:
            await self._store.close()


def open(
    url: str | None = None,
    *,
    namespace: str = "default",
    clock: Clock | None = None,
    max_value_bytes: int = VALUE_BYTES_MAX,
    window: Window | None = None,
    sweep: bool = True,
    encryption: Keyring | None = None,
) -> Opening:
    """Open a namespace of an engine.

    Args:
        url: ``memory:``, ``memory:name``, ``sqlite:///file.db``; ``LIMPET_URL`` or ``./limpet.db`` when not given.
        namespace: The keyspace to work in.
        clock: Where time comes from, for engines that use the host's; a `ManualClock` in tests.
        max_value_bytes: The largest value that is accepted.
        window: How much of the log is kept.
        sweep: Whether this process ends expired entries and trims the log in the background.
        encryption: The keys that values are encrypted with; when not given, those that the URL names by
            ``?encryption=env:NAME`` or ``file:PATH``, those in ``LIMPET_ENCRYPTION_KEYS``, or none.

    Returns:
        An `Opening`: use it with ``async with``, or await it and close the store yourself.
    """

    async def opening() -> Store:
        check_namespace(namespace)
        session = await open_session(
            url, clock=clock, max_value_bytes=max_value_bytes, window=window, encryption=encryption
        )
        store = Store(session, namespace)
        if sweep:
            session.sweeper.start()
        return store

    return Opening(opening)
