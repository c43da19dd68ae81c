"""The store: one namespace of an opened engine, and every verb on it.

Each verb drafts a batch or calls the engine, waits for nothing but the engine and the
clock, and returns. `limpet.transition` decides what a write does.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import msgspec

from limpet.append import append_entry
from limpet.checks import check_filter, check_flag
from limpet.clock import Clock
from limpet.codec import decode
from limpet.draft import TTL, Draft, Expectation, Fence, Fencing, Meta, make_put, refusal_error, single_put
from limpet.edit import Decide, Edit
from limpet.election import Election
from limpet.engine import Indexing, Sealing
from limpet.errors import Ambiguous, Compacted, Conflict, Contention, InvalidValue, TransientError
from limpet.folders import ChildPage, list_children
from limpet.hub import Watch, event_of, position_prefix
from limpet.index import check_field, make_probes
from limpet.keys import (
    PAGE_BYTES,
    PAGE_MAX,
    VALUE_BYTES_MAX,
    Span,
    check_key,
    check_namespace,
    key_span,
    pattern_span,
    prefix_span,
)
from limpet.lock import Lock, LockInfo
from limpet.many import delete_keys, read_entries, take_keys
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
    Refusal,
    Resealed,
    ScanPage,
    Seals,
    Sentinel,
    Status,
    Traits,
    Window,
)
from limpet.observed import (
    ObservedDraft,
    ObservedEdit,
    ObservedElection,
    ObservedLock,
    ObservedRecord,
    Observer,
    Reporter,
    check_observer,
    observe_commit,
    observe_verbs,
)
from limpet.opening import open_session
from limpet.pages import SCAN_PAGE, lock_page, span_after
from limpet.record import Record
from limpet.request_ids import is_generated
from limpet.retry import jitter_s
from limpet.session import Session
from limpet.transition import read_receipt
from limpet.turns import Turn, is_inside
from limpet.typed import Typed

if TYPE_CHECKING:
    from limpet.encryption.keyring import Keyring

__all__ = ["Opening", "Page", "Store", "open", "take_turn"]

T = TypeVar("T")

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
        session.sweeper.add_namespace(name)

    @property
    def traits(self) -> Traits:
        """The properties in which engines differ."""
        return self._session.engine.traits

    def namespace(self, name: str) -> Store:
        """Another namespace of the same engine. It is closed together with this one."""
        return Store(self._session, name)

    # Reading ------------------------------------------------------------------

    async def get(self, key: str, default: Any = None) -> Any:
        """The value under a key, or the default when the key is absent."""
        # Straight to the engine: the most used verb saves one coroutine.
        try:
            (entry,) = await self._session.engine.read(self.name, (check_key(key),))
        except TransientError:
            entry = await self._session.read_again(self.name, key)
        return default if entry is None or entry.stored is None else decode(entry.stored)

    async def entry(self, key: str) -> Entry | None:
        """The value with its version, revision, times and meta; None when the key is absent."""
        return await self._session.read(self.name, check_key(key))

    async def entries(self, keys: Iterable[str]) -> list[Entry | None]:
        """The entries of up to 1,000 keys, read at one moment; None in the place of a key that is absent.

        The result has the order of the keys, and a key that comes twice has its entry twice.
        """
        wanted = take_keys(keys)
        found = await read_entries(self, wanted)
        return [found[key] for key in wanted]

    async def get_many(self, keys: Iterable[str]) -> dict[str, Any]:
        """The values of up to 1,000 keys, read at one moment. A key that is absent is not in the result."""
        found = await read_entries(self, take_keys(keys))
        return {key: entry.value for key, entry in found.items() if entry is not None}

    async def remaining(self, key: str) -> float | None:
        """How many seconds are left until a key expires: None when it never does, 0.0 when there is no such key.

        It is counted by the time that decides about expiry, which may be a server's, and not by this host's clock.
        """
        entry = await self.entry(key)
        if entry is None:
            return 0.0
        return None if entry.expires_ms is None else max(0, entry.expires_ms - (await self.status()).now_ms) / 1000

    async def keys(
        self, prefix: str = "", *, limit: int = 1000, after: str | None = None, reverse: bool = False
    ) -> Page:
        """A page of keys that start with the prefix, in code-point order; with ``reverse`` the last ones first."""
        if type(limit) is not int or not 1 <= limit <= PAGE_MAX:
            raise InvalidValue(f"a page holds 1 to {PAGE_MAX:,} keys")
        check_flag(reverse, "reverse")
        found: list[str] = []
        span: Span | None = span_after(prefix_span(prefix), after, reverse=reverse)
        while span is not None and len(found) < limit:
            page = await self._scan_page(span, values=False, limit=limit - len(found), reverse=reverse)
            found += [entry.key for entry in page.entries]
            span = None if page.cursor is None else span_after(span, page.cursor, reverse=reverse)
        return Page(found, span is not None, found[-1] if span is not None else None)

    async def scan(
        self,
        prefix: str = "",
        *,
        where: Filter | None = None,
        limit: int | None = None,
        after: str | None = None,
        reverse: bool = False,
    ) -> AsyncIterator[Entry]:
        """Entries whose keys start with the prefix, in code-point order; with ``where``, those that match.

        With ``reverse`` the last ones come first, and the scan goes on before the key ``after``.
        """
        if limit is not None and (type(limit) is not int or limit < 1):
            raise InvalidValue("a scan is limited to one entry or more")
        if where is not None:
            check_filter(where)
        check_flag(reverse, "reverse")
        span: Span | None = span_after(prefix_span(prefix), after, reverse=reverse)
        left = limit
        found = None if where is None or span is None else await self._search_index(span, where, reverse)
        if found is not None:
            async for entry in found:
                if left == 0:
                    return
                yield entry
                left = None if left is None else left - 1
            return
        while span is not None and left != 0:
            count = SCAN_PAGE if left is None else min(left, SCAN_PAGE)
            page = await self._scan_page(span, where=where, limit=count, reverse=reverse)
            for entry in page.entries:
                yield entry
            left = None if left is None else left - len(page.entries)
            span = None if page.cursor is None else span_after(span, page.cursor, reverse=reverse)

    async def _search_index(self, span: Span, where: Filter, reverse: bool) -> AsyncIterator[Entry] | None:
        """Find the entries that match by an index; None when no index can."""
        engine, probes = self._indexing, make_probes(where)
        if not probes or engine is None:
            return None
        keys = await self._session.retry(lambda: engine.candidates(self.name, span, probes))
        return None if keys is None else self._read_matching(sorted({*keys}, reverse=reverse), where)

    async def _read_matching(self, keys: list[str], where: Filter) -> AsyncIterator[Entry]:
        engine = self._session.engine
        # A read by keys has no limit in bytes, so the number of keys follows from the size of the values before.
        first, count = 0, FIRST_READ
        while first < len(keys):
            some = keys[first : first + count]
            found = await self._session.retry(functools.partial(engine.read, self.name, some))
            for entry in found:
                if entry is not None and entry.stored is not None and where.matches(entry.stored):
                    yield entry
            size_bytes = sum(entry.size_bytes for entry in found if entry is not None)
            first += count
            count = min(SCAN_PAGE, 4 * count, max(1, PAGE_BYTES * count // max(1, size_bytes)))

    async def children(
        self, prefix: str = "", *, delimiter: str = "/", limit: int = 1000, after: str | None = None
    ) -> ChildPage:
        """One level below a prefix: its keys, and its folders with the number of keys in each.

        A folder is all keys that are the same up to the next delimiter. No value is read, and a large folder is
        counted by the engine. The listing and its counts are not of one moment.
        """
        return await list_children(self, prefix, delimiter=delimiter, limit=limit, after=after)

    async def namespaces(self) -> list[str]:
        """The names of all namespaces of this engine that were written to, sorted."""
        return await self._session.retry(self._session.engine.namespaces)

    async def index(self, field: str) -> bool:
        """Keep an index of a field, so that scans with ``where`` on it need not read every entry.

        It serves equality with numbers, strings and bytes, and the order of numbers. It makes every write a little
        slower, and changes no result. False, and nothing is done, on an engine without indexes: memory and NATS.
        """
        engine, field = self._indexing, check_field(field)
        if engine is None:
            return False
        await engine.index(self.name, field)
        return True

    async def unindex(self, field: str) -> None:
        """Drop the index of a field."""
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
        """Encrypt with the current key the entries that older keys have encrypted, or that are not encrypted yet.

        First the data, then the audit trail of the namespace, then the recoverable copies of expired entries. No
        concurrent write is lost, and an interrupted call may be repeated. Each entry is put back as it is, so its
        version grows by one, and the cause of the change starts with ``limpet-reseal-``.

        Args:
            after: Go on after the cursor of an earlier call.
            limit: Examine this many entries at most; None for all.
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
            count = SCAN_PAGE if limit is None else min(SCAN_PAGE, limit - looked_at)
            step = await self._session.retry(functools.partial(engine.reseal, self.name, after=cursor, limit=count))
            looked_at, resealed, cursor = looked_at + step.looked_at, resealed + step.resealed, step.cursor
            if cursor is None:
                break
        return Resealed(looked_at, resealed, cursor)

    async def seals(self) -> list[Seals]:
        """How many entries, and how many changes in the log, each key has encrypted."""
        engine = self._sealing
        return await self._session.retry(lambda: engine.seals(self.name))

    @property
    def _sealing(self) -> Sealing:
        self._session.check_open()
        engine = self._session.engine
        if not isinstance(engine, Sealing):
            raise InvalidValue("this store is not encrypted: open it with encryption=limpet.Keyring(…)")
        return engine

    async def _scan_page(self, span: Span, **options: Any) -> ScanPage:
        engine = self._session.engine
        return await self._session.retry(lambda: engine.scan(self.name, span, **options))

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
        if fence is None and request_id is None:
            session = self._session
            bytes_max, writer = session.value_bytes_max, session.writer
            batch = single_put(key, value, ttl=ttl, expect=expect, meta=meta, value_bytes_max=bytes_max, writer=writer)
            # Straight to the engine, as in `get`.
            try:
                outcome = await self._session.engine.commit(self.name, batch)
            except (Ambiguous, TransientError) as error:
                outcome = await self._session.commit_again(self.name, batch, error)
            if isinstance(outcome, Refusal):
                raise refusal_error(outcome, bytes_max)
            return _only(outcome)
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

    async def append(
        self,
        prefix: str,
        value: object,
        *,
        ttl: TTL = None,
        fence: Fencing | Fence | None = None,
        request_id: str | None = None,
        meta: Meta = None,
    ) -> Entry:
        """Put a value under a new key: the prefix and a number of 16 digits. The keys sort in the order of the commits.

        Of any number of callers and processes, each gets a key of its own, and a number never comes again. Callers of
        one opened store share commits.

        Args:
            prefix: What the key begins with, such as ``events/``.
            value: Any JSON value, raw bytes, or `Fields` for a record.
            ttl: Seconds until it expires; None for never.
            fence: A lock that must still be held.
            request_id: Makes the call safe to repeat for ten minutes, across crashes.
            meta: A small JSON object beside the value.
        """
        put = make_put(prefix, value, ttl, meta, self._session.value_bytes_max)
        return await append_entry(self, put, fence, request_id)

    async def update(
        self,
        key: str,
        change: Callable[[Any], Any] | Callable[[Any], Awaitable[Any]],
        *,
        ttl: TTL | Literal[Sentinel.KEEP] = KEEP,
        fence: Fencing | Fence | None = None,
        meta: Meta | Literal[Sentinel.KEEP] = KEEP,
    ) -> Entry | None:
        """Change a value by a function of the value found (None when the key is absent).

        The function, plain or async, runs again only when another writer wrote in between. Tasks and threads
        that update the same key through one opened store take turns, in the order they came. A function that
        runs for longer than two seconds while others wait may lose its turn to others, and then runs again.

        When the function returns ABSENT, the key is deleted and the result is None. When it returns UNCHANGED,
        nothing is written, no fence is checked, and the result is the entry found, or None.

        Raises:
            Contention: Other processes kept writing in between.
        """
        if not callable(change):
            raise TypeError(f"update takes a function of the value, not something of type {type(change).__name__}")
        return await self._change(
            key, lambda found: change(None if found is None else found.value), ttl=ttl, fence=fence, meta=meta
        )

    async def _change(
        self,
        key: str,
        change: Callable[[Entry | None], Any],
        *,
        ttl: TTL | Literal[Sentinel.KEEP],
        fence: Fencing | Fence | None,
        meta: Meta | Literal[Sentinel.KEEP],
    ) -> Entry | None:
        """Update a key by a function of the entry found."""
        clock = self._session.clock
        turn = self._session.turns.turn(("update", self.name, check_key(key)))
        found: Entry | None = None
        try:
            for attempt in range(1, UPDATE_ATTEMPTS + 1):
                if attempt == 1 or not turn.is_up:
                    await take_turn(turn, attempt)
                    found = await self.entry(key)
                value = change(found)
                if inspect.isawaitable(value):
                    value = await value
                if value is UNCHANGED:
                    return found
                started_at = clock.monotonic()
                try:
                    if value is not ABSENT:
                        return await self.put(key, value, ttl=ttl, expect=found, fence=fence, meta=meta)
                    if found is not None:
                        await self.delete(key, expect=found, fence=fence)
                    return None
                except Conflict as conflict:
                    found = conflict.current
                # Another process writes this key as well. Wait about a round trip at first, so that few attempts are
                # in vain, and less after each further one, so that a caller that has tried for long gets ahead.
                await clock.sleep(2 * jitter_s(clock.monotonic() - started_at) / attempt)
            raise Contention(key, attempts=UPDATE_ATTEMPTS)
        finally:
            turn.leave()

    def edit(
        self,
        key: str,
        *,
        on_conflict: Decide | None = None,
        ttl: TTL | Literal[Sentinel.KEEP] = KEEP,
        fence: Fencing | Fence | None = None,
        meta: Meta | Literal[Sentinel.KEEP] = KEEP,
    ) -> Edit:
        """A copy of an object or a record to work on, with ``async with``; at the end it is written.

        Nothing is held meanwhile. If others have written, each member that only one side has changed, added or
        removed is taken from that side, nested objects member by member. A member that both have changed to
        different values raises `Conflict` with its ``clashes``, and nothing is written. Nor is it when nothing
        changed, or when the body raises.

        Args:
            key: The key. Where there is none, the copy is an empty object.
            on_conflict: A function, plain or async, of the path of such a member and of its values in base, mine and
                theirs. It returns the value to keep, or ABSENT for none. It may run again when others keep writing.
            ttl: Seconds until it expires; None for never, KEEP to leave it as it is.
            fence: A lock that must be held at the end.
            meta: A small JSON object beside the value, or KEEP.
        """
        return Edit(self, key, on_conflict=on_conflict, ttl=ttl, fence=fence, meta=meta)

    async def add(
        self,
        key: str,
        by: int = 1,
        *,
        ttl: TTL | Literal[Sentinel.KEEP] = KEEP,
        ttl_if_new: float | timedelta | None = None,
        expect: Expectation = ANY,
        fence: Fencing | Fence | None = None,
        request_id: str | None = None,
        meta: Meta | Literal[Sentinel.KEEP] = KEEP,
    ) -> int:
        """Add to a counter, in one step. Returns its new value; a missing key counts as zero.

        With ``ttl_if_new`` a missing key gets this time to live, and the next adds leave it as it is: the counter
        covers a window of time.
        """
        draft = self._draft(key, expect, fence, request_id)
        return _number_in(await draft.add(key, by, ttl=ttl, ttl_if_new=ttl_if_new, meta=meta).commit())

    async def minimum(
        self,
        key: str,
        number: int,
        *,
        ttl: TTL | Literal[Sentinel.KEEP] = KEEP,
        ttl_if_new: float | timedelta | None = None,
        expect: Expectation = ANY,
        fence: Fencing | Fence | None = None,
        request_id: str | None = None,
        meta: Meta | Literal[Sentinel.KEEP] = KEEP,
    ) -> int:
        """Keep the smaller of the number found and this one, in one step, and return it. A missing key takes this one.

        It is a write also when the number stays.
        """
        draft = self._draft(key, expect, fence, request_id)
        return _number_in(await draft.minimum(key, number, ttl=ttl, ttl_if_new=ttl_if_new, meta=meta).commit())

    async def maximum(
        self,
        key: str,
        number: int,
        *,
        ttl: TTL | Literal[Sentinel.KEEP] = KEEP,
        ttl_if_new: float | timedelta | None = None,
        expect: Expectation = ANY,
        fence: Fencing | Fence | None = None,
        request_id: str | None = None,
        meta: Meta | Literal[Sentinel.KEEP] = KEEP,
    ) -> int:
        """Keep the larger of the number found and this one, in one step, and return it. A missing key takes this one.

        It is a write also when the number stays.
        """
        draft = self._draft(key, expect, fence, request_id)
        return _number_in(await draft.maximum(key, number, ttl=ttl, ttl_if_new=ttl_if_new, meta=meta).commit())

    async def delete(
        self,
        key: str,
        *,
        expect: Expectation = ANY,
        fence: Fencing | Fence | None = None,
        request_id: str | None = None,
    ) -> bool:
        """End a key. False when it did not exist."""
        commit = await self._draft(key, expect, fence, request_id).delete(key).commit()
        return commit.ended[0] is not None

    async def delete_prefix(
        self, prefix: str, *, limit: int | None = None, fence: Fencing | Fence | None = None
    ) -> int:
        """Delete the keys that start with a prefix, and return how many there were; with ``limit``, the first of them.

        They are deleted in batches of up to 128. Each batch happens as a whole, and all of them together do not: after
        an error, call it again. A key that is written meanwhile may be deleted or not.
        """
        return await delete_keys(self, prefix, limit, fence)

    async def take(
        self,
        key: str,
        default: Any = None,
        *,
        expect: Expectation = ANY,
        fence: Fencing | Fence | None = None,
        request_id: str | None = None,
    ) -> Any:
        """Get and delete in one step: of all callers that try, one gets the value."""
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

    def typed(self, model: type[T], prefix: str = "") -> Typed[T]:
        """The keys under a prefix as values of a model: a dataclass, a msgspec struct or a pydantic model."""
        return Typed(self, model, prefix)

    def batch(self, *, request_id: str | None = None) -> Draft:
        """Guards and writes that happen together or not at all."""
        return Draft(self._session, self.name, request_id)

    def _commit_batch(self, batch: Draft) -> Coroutine[Any, Any, Commit]:
        """Commit a batch of the sync API, whose own `commit` cannot be awaited."""
        return Draft.commit(batch)

    def record(self, key: str) -> Record:
        """A key whose fields are written one by one."""
        return Record(self, key)

    async def outcome(self, request_id: str) -> Commit | None:
        """The result of a request: its commit, or None when it was not applied.

        For a request with an id of the caller, entries of puts come without their values, which the
        caller has. The generated id of an `Ambiguous` write is searched in the log.
        """
        found = await self._session.read(self.name, check_key(request_id), family="receipt")
        if found is not None:
            return msgspec.structs.replace(read_receipt(found).commit, replayed=True)
        return await self._search_log(request_id) if is_generated(request_id) else None

    async def _search_log(self, request_id: str) -> Commit | None:
        status = await self.status()
        after = status.floor
        caused: list[Change] = []
        while after < status.revision and not caused:
            page = await self._log_page(after)
            caused = [change for change in page.changes if change.cause == request_id]
            after = page.next_after
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
            name: The name to lock. Locks and keys never collide.
            ttl: How long the lease lasts without being renewed.
            wait: How many seconds to wait for it; 0 raises `LockHeld` at once.
            holder: The name shown as its holder; the host and process when not given.
            cancel: Whether losing the lock cancels the body.
            token: Take up a lock that another handle acquired under this token, to refresh or release it.
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
            name: The name of the election. The lead is the lock of this name.
            ttl: How long the others wait for a leader that stops renewing.
            wait: How many seconds to wait for the lead, then `LockHeld` is raised; None for as long as it takes.
            candidate: The name shown as the leader; the host and process when not given.
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
            pattern: ``*`` for all keys, ``config/*`` for all that start with ``config/``, otherwise one exact key.
            after: Resume after this position of an event, or after this revision.
            initial: Deliver the existing entries first, then one `Synced`, then changes.
            overflow: ``drop`` skips and counts events that a slow watcher cannot take; the default never skips.
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
                page = await self._log_page(after, span)
            except Compacted as gone:
                # Trimmed while we read: the rest starts later.
                after = gone.oldest if gone.oldest is not None else status.revision
                continue
            for change in page.changes:
                yield event_of(change, prefix)
            after = page.next_after

    async def _log_page(self, after: int, span: Span | None = None) -> LogPage:
        return await self._session.retry(lambda: self._session.engine.changes(self.name, after, span=span))

    async def status(self) -> Status:
        """The counters of the namespace: its revision, its entries, its log and its time."""
        return await self._session.retry(lambda: self._session.engine.status(self.name))

    async def sweep(self) -> int:
        """End expired entries now. Happens by itself within two seconds."""
        return await self._session.sweeper.sweep(self.name)

    async def trim(self) -> int:
        """Drop changes that the log need not keep, now. Happens by itself."""
        return await self._session.sweeper.trim(self.name)

    async def close(self) -> None:
        """End watches and background work and close the engine."""
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


class ObservedStore(Store):
    """A store that reports its operations to an observer."""

    def __init__(self, session: Session, name: str, observer: Observer) -> None:
        super().__init__(session, name)
        self._plain = Store(session, name)
        self._reporter = Reporter(observer, name)

    def namespace(self, name: str) -> Store:
        """Another namespace of the same engine, which reports to the same observer."""
        return ObservedStore(self._session, name, self._reporter.observer)

    def batch(self, *, request_id: str | None = None) -> Draft:
        """Guards and writes that happen together or not at all."""
        return ObservedDraft(self._reporter, self._session, self.name, request_id)

    def _commit_batch(self, batch: Draft) -> Coroutine[Any, Any, Commit]:
        return observe_commit(self._reporter, batch)

    def record(self, key: str) -> Record:
        """A key whose fields are written one by one."""
        return ObservedRecord(self._reporter, self._plain.record(key))

    def edit(self, key: str, *, on_conflict: Decide | None = None, **options: Any) -> Edit:
        """A copy of an object or a record to work on."""
        options = {"ttl": KEEP, "fence": None, "meta": KEEP, **options}
        return ObservedEdit(self._reporter, self._plain, key, on_conflict=on_conflict, **options)

    def lock(self, name: str, **options: Any) -> Lock:
        """A lease on a name."""
        return ObservedLock(self._reporter, self._session, self.name, name, **options)

    def election(self, name: str, **options: Any) -> Election:
        """A candidate to lead."""
        return ObservedElection(self._reporter, self._session, self.name, name, **options)


def _is_verb(name: str, member: object) -> bool:
    is_awaited = inspect.iscoroutinefunction(member) or inspect.isasyncgenfunction(member)
    return is_awaited and not name.startswith("_") and name != "close"


observe_verbs(ObservedStore, [name for name, member in vars(Store).items() if _is_verb(name, member)])


def make_store(session: Session, name: str, observer: Observer | None) -> Store:
    """The store of a namespace, which reports to the observer if there is one."""
    return Store(session, name) if observer is None else ObservedStore(session, name, observer)


async def take_turn(turn: Turn, attempt: int) -> None:
    """Wait for the turn to update a key. It lasts longer on each attempt, so that a slow function gets through.

    An update inside the function of another one does not wait for a turn at first, because callers that hold one turn
    and wait for another may wait for each other. It never waits for a turn that it is already inside.
    """
    if is_inside() and (attempt == 1 or is_inside(turn.key)):
        return
    lasts_s = min(UPDATE_TURN_S_MAX, UPDATE_TURN_S * 2.0 ** (attempt - 1))
    if not turn.join(lasts_s=lasts_s):
        await turn.wait()


def _only(commit: Commit) -> Entry:
    entry = commit.entries[0]
    assert entry is not None
    return entry


def _number_in(commit: Commit) -> int:
    number: int = _only(commit).value
    return number


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
            f"there is no store yet that has {name!r}: write 'async with limpet.open(…) as store', "
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
    observer: Observer | None = None,
    writer: str | None = None,
) -> Opening:
    """Open a namespace of an engine.

    Args:
        url: The engine: ``memory:name``, ``sqlite:///file.db``, ``postgresql://…``, ``redis://…``, ``nats://…`` or
            ``https://…`` for a Limpet server; ``LIMPET_URL`` or ``./limpet.db`` when not given.
        namespace: The keyspace to work in.
        clock: Where time comes from, for engines that use the host's; a `ManualClock` in tests.
        max_value_bytes: The largest value that is accepted.
        window: How much of the log is kept.
        sweep: Whether this process ends expired entries and trims the log in the background.
        encryption: The keys that encrypt values; when not given, those that the URL names by
            ``?encryption=env:NAME`` or ``file:PATH``, those in ``LIMPET_ENCRYPTION_KEYS``, or none.
        observer: A function that is called with an `Operation` after each operation of the store.
        writer: A name of up to 64 characters that entries and changes of this store carry, such as ``agent-7``.

    Returns:
        An `Opening`: use it with ``async with``, or await it and close the store yourself.
    """

    async def opening() -> Store:
        check_namespace(namespace)
        observing = None if observer is None else check_observer(observer)
        session = await open_session(
            url, clock=clock, max_value_bytes=max_value_bytes, window=window, encryption=encryption, writer=writer
        )
        store = make_store(session, namespace, observing)
        if sweep:
            session.sweeper.start()
        return store

    return Opening(opening)
