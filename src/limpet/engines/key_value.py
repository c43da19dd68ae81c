r"""An engine on any ordered key-value store: ten primitives made of five small verbs.

A store that reads several keys and ranges at one moment, and that writes several keys if one of them is unchanged, is
enough for an engine. Everything else is here: what is stored under which key, grouped commits, retries and their marks,
receipts, expiry, the log and its window, waiting, and a time that never goes back. An engine is a subclass that has
the verbs, and a coroutine that opens it.

Every commit of a namespace rewrites the row of its counters, each time with another number. So if that row is as it
was read, nothing else of the namespace has changed either, and comparing this one row is enough.

Keys are bytes, in the order of bytes; values are msgpack, fields by their names. Below ``limpet\0``:

| key | value |
|---|---|
| ``s`` | the id and the epoch of the store, and the format of its rows |
| ``n`` namespace ``\0c`` | the counters of a namespace, the floor of its log, and the number of the row |
| ``n`` namespace ``\0e`` family ``\0`` key | an entry; receipts and marks of superseded requests are families too |
| ``n`` namespace ``\0l`` revision | a change of the log |
| ``n`` namespace ``\0d`` expiry family ``\0`` key | the revision of an entry that expires |
| ``n`` namespace ``\0k`` expiry family ``\0`` key | likewise of a receipt or mark, which trimming deletes |

Revisions and expiries are 8 bytes, the highest first.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, NoReturn, Protocol, TypeVar, cast

import msgspec

from limpet.clock import Clock
from limpet.commit.group import Counters, EntryId, GroupPlan, NotApplied, commit_error
from limpet.commit.log import check_after
from limpet.commit.storage import ReplyLost
from limpet.engines.server_engine import CommitResult, GroupingEngine, ReadResult, Ticket
from limpet.errors import Corrupt, Unavailable, ValueTooLarge
from limpet.keys import PAGE_BYTES, Span
from limpet.model import (
    BEGINNING,
    Batch,
    Change,
    Entry,
    Expire,
    Family,
    Filter,
    LogPage,
    ScanPage,
    Status,
    StoredFamily,
    Traits,
    Window,
    fingerprint,
    live,
)
from limpet.request_ids import new_request_id, request_group
from limpet.retry import ATTEMPTS, jitter_s

__all__ = ["KeyValueEngine", "ReplyLost", "Snapshot"]

T = TypeVar("T")

FORMAT: Final = 1
POLL_S: Final = 0.05
ROWS_AT_ONCE: Final = 100
"""How many rows one range reads: a row may have a megabyte."""
ATTEMPTS_MAX: Final = 1_000
"""How often a commit is planned again because others were faster. Each time, another commit was applied."""

_PREFIX: Final = b"limpet\0"
_STORE: Final = _PREFIX + b"s"
_LAST: Final = b"\xff"
"""Greater than every byte of UTF-8."""
_UNLOGGED: Final = ("receipt", "superseded")
_ROWS_OF_WRITE: Final = 5
"""Its entry, its change, that of an expiry before it, the old time of expiry and the new one."""
_ROWS_OF_BATCH: Final = 7
"""Receipt and mark, each with its old time of expiry and its new one, and the row of the namespace."""


class Snapshot(Protocol):
    """A store at one moment: all that is read by it was there together."""

    async def get(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        """Read values by key; the result has the order of the keys. None for a key that is not there."""
        ...

    async def get_range(
        self, start: bytes, stop: bytes, limit: int, *, reverse: bool = False
    ) -> Sequence[tuple[bytes, bytes]]:
        """Read the first keys from ``start`` up to, not including, ``stop``, with their values, in the order of bytes.

        At most ``limit`` of them; fewer only if there are no more. With ``reverse``, the last of them, last one first.
        """
        ...


class KeyValueEngine(GroupingEngine):
    """An engine on an ordered key-value store. See the module; the verbs come first.

    An error that a verb raises goes through `translate`, so a verb need not catch anything. Only `compare_and_write`
    must know one error from the others: a reply that was lost.
    """

    rows_max = 10_000
    """How many rows one write has at most. Batches of several callers share it; one batch alone may have 647."""

    _keys_at_once = 1_000

    def __init__(self, display_name: str, traits: Traits, clock: Clock) -> None:
        """Take the name of the store for messages, without its password."""
        self.traits = traits
        self._clock = clock
        self._store = _Store("", 0)
        super().__init__(display_name)

    # What an engine implements ----------------------------------------------------

    @abstractmethod
    def snapshot(self) -> AbstractAsyncContextManager[Snapshot]:
        """Begin to read the store as it is now, with all that was acknowledged before."""

    @abstractmethod
    async def compare_and_write(self, key: bytes, found: bytes | None, writes: Mapping[bytes, bytes | None]) -> bool:
        """Write all of these if the value of ``key`` is still ``found``, and nothing otherwise. Return whether it was.

        None stands for an absent key, and deletes one. Return once the writes are as durable as the traits say. If the
        store may or may not have written, raise `ReplyLost` from the error. Any other error means that nothing was
        written, and never will be; `ValueTooLarge` that the store takes no write of this size.
        """

    @abstractmethod
    def translate(self, error: Exception) -> Exception:
        """A driver's error as ours, such as `Unavailable`, for a call that wrote nothing; any other error as it is."""

    @abstractmethod
    async def disconnect(self) -> None:
        """Close files and connections. Called once, when no commit is in flight."""

    def reset(self) -> None:
        """Set the state that processes must not share, such as connections.

        Called when the engine is made, and in a child after a fork: what the parent had is left alone, not closed.
        """

    async def wait_for_change(self, key: bytes, found: bytes | None) -> None:
        """Return when the value of a key is no longer ``found``, or soon after; it may return without a reason.

        The caller then reads again, so that waiting a moment is enough. It is cancelled when no caller waits.
        """
        await asyncio.sleep(POLL_S)

    async def now_ms(self) -> int:
        """The time that decides about expiry, in milliseconds since 1970: this host's, or the store's if it has one.

        It may differ between hosts and go back. The engine keeps the latest time beside the counters.
        """
        return self._clock.now_ms()

    # Opening and closing ------------------------------------------------------------

    async def begin(self) -> None:
        """Read the id of the store, or give it one. The coroutine that opens an engine awaits this.

        If it fails, the engine is closed.
        """
        try:
            self._store = await self._find_store()
        except BaseException:
            await self.close()
            raise

    async def _find_store(self) -> _Store:
        for _ in range(ATTEMPTS):
            async with self._read() as snapshot:
                (found,) = await snapshot.get([_STORE])
            if found is not None:
                store = _decode(found, _Store, "the row of the store")
                if store.format != FORMAT:
                    raise Corrupt(f"{self._display_name} has rows of format {store.format}: update limpet")
                return store
            # Another process may be faster, and a reply may be lost: the next read tells.
            with contextlib.suppress(ReplyLost):
                await self._write(_STORE, None, {_STORE: _encode(_Store(uuid.uuid4().hex[:16], 1))})
        raise Unavailable(f"{self._display_name} does not keep what is written: check the store")

    def _init_process_state(self) -> None:
        super()._init_process_state()
        self.reset()

    async def close(self) -> None:
        """See `Engine.close`."""
        if self._closed:
            return
        self._closed = True
        self._wakeup.notify_all()
        await self._finish_tasks()
        await self.disconnect()

    # Reading --------------------------------------------------------------------

    async def _read_all(self, namespace: str, family: Family, keys: list[str]) -> Sequence[ReadResult]:
        rows = _Rows(namespace)
        async with self._read() as snapshot:
            head, *values = await snapshot.get([rows.head, *(rows.entry(family, key) for key in keys)])
        now_ms = await self._time(namespace, _head(head))
        return [_read_entry(value, key, now_ms) for key, value in zip(keys, values, strict=True)]

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
        self._check_open()
        rows, found, size_bytes = _Rows(namespace), list[Entry](), 0
        start, stop = rows.bounds(family, span)
        async with self._read() as snapshot:
            now_ms = await self._time(namespace, await _get_head(snapshot, rows))
            async with contextlib.aclosing(_walk(snapshot, start, stop, reverse=reverse)) as walk:
                async for _, value in walk:
                    entry = live(_decode(value, Entry, "an entry"), now_ms)
                    if entry is None or not _passes(entry, where):
                        continue
                    if len(found) == limit or size_bytes > PAGE_BYTES:
                        return ScanPage(found, found[-1].key)
                    found.append(entry if values else entry.without_value())
                    size_bytes += found[-1].weight_bytes
        return ScanPage(found, None)

    async def count(self, namespace: str, span: Span, *, family: Family = "data") -> int:
        """See `Engine.count`. Every row of the span is read, because its expiry is in it."""
        self._check_open()
        rows, total = _Rows(namespace), 0
        async with self._read() as snapshot:
            now_ms = await self._time(namespace, await _get_head(snapshot, rows))
            async with contextlib.aclosing(_walk(snapshot, *rows.bounds(family, span))) as walk:
                async for _, value in walk:
                    total += live(_decode(value, Entry, "an entry"), now_ms) is not None
        return total

    async def namespaces(self) -> list[str]:
        """See `Engine.namespaces`."""
        self._check_open()
        found: list[str] = []
        start = _PREFIX + b"n"
        async with self._read() as snapshot:
            # The row of the counters is the first of a namespace, and the next namespace begins behind all its rows.
            while rows := await snapshot.get_range(start, _PREFIX + b"n" + _LAST, 1):
                name = rows[0][0].removeprefix(_PREFIX + b"n").partition(b"\0")[0]
                found.append(name.decode())
                start = _PREFIX + b"n" + name + b"\1"
        return found

    async def due(self, namespace: str, *, limit: int = 500) -> list[Expire]:
        """See `Engine.due`."""
        self._check_open()
        rows = _Rows(namespace)
        async with self._read() as snapshot:
            now_ms = await self._time(namespace, await _get_head(snapshot, rows))
            found = await snapshot.get_range(rows.due(0), rows.due(now_ms + 1), limit)
        return [rows.read_due(key, value) for key, value in found]

    async def status(self, namespace: str) -> Status:
        """See `Engine.status`."""
        self._check_open()
        async with self._read() as snapshot:
            head = await _get_head(snapshot, _Rows(namespace))
        clock_ms = await self.now_ms()
        now_ms = await self._time(namespace, head)
        counters = head.counters
        return Status(
            store_id=self._store.store_id,
            epoch=self._store.epoch,
            revision=counters.revision,
            floor=head.floor,
            keys=counters.keys,
            size_bytes=counters.size_bytes,
            log_changes=counters.log_changes,
            log_bytes=counters.log_bytes,
            now_ms=now_ms,
            behind_ms=max(0, now_ms - clock_ms),
        )

    async def _time(self, namespace: str, head: _Head) -> int:
        """The time of a namespace: the store's, or the latest that was recorded or seen here, if that is later."""
        return self._observe_time(namespace, max(await self.now_ms(), head.counters.at_ms))

    # Committing -----------------------------------------------------------------

    async def _commit_group(self, namespace: str, group: list[Ticket], since: int) -> Sequence[CommitResult]:
        results: list[CommitResult] = []
        for part in _split(group, self.rows_max):
            try:
                results += await self._commit_part(namespace, [ticket.batch for ticket in part])
            except Exception as error:
                # Not raised: an earlier part was applied.
                results += await self._commit_each(namespace, part, since, error)
        return results

    async def _commit_part(self, namespace: str, batches: Sequence[Batch]) -> Sequence[CommitResult]:
        # A caller that lost the reply finds its commit by the request id, so every batch has one.
        causes = [batch.request_id or new_request_id() for batch in batches]
        for _ in range(ATTEMPTS_MAX):
            started_at = time.monotonic()
            planned = await self._plan(namespace, batches, causes)
            if not planned.writes:
                return planned.outcomes
            try:
                is_written = await self._write(planned.rows.head, planned.found, planned.writes)
            except ReplyLost as lost:
                cause = lost.__cause__ or lost
                return [self._ambiguous(request_id, planned.since, cause) for request_id in causes]
            if is_written:
                self._record_revision(namespace, planned.head.counters.revision)
                return planned.outcomes
            await asyncio.sleep(jitter_s(time.monotonic() - started_at))
        raise Unavailable(
            f"{self._display_name}: other processes were faster {ATTEMPTS_MAX:,} times in namespace {namespace!r}, and "
            "nothing changed; try again"
        )

    async def _plan(self, namespace: str, batches: Sequence[Batch], causes: Sequence[str]) -> _Planned:
        """Plan a group on what is stored now."""
        rows = _Rows(namespace)
        named = list(dict.fromkeys(entry_id for batch in batches for entry_id in _name_entries(batch)))
        async with self._read() as snapshot:
            found, *values = await snapshot.get([rows.head, *(rows.entry(*entry_id) for entry_id in named)])
            head = _head(found)
            earlier = await _find_changes(snapshot, rows, batches)
        loaded = _Loaded(zip(named, values, strict=True))
        now_ms = await self._time(namespace, head)
        since = head.counters.revision
        plan = GroupPlan(loaded.load, lambda after, origin: _after(earlier, after, origin), head.counters, now_ms)
        outcomes: list[CommitResult] = []
        for batch, cause in zip(batches, causes, strict=True):
            try:
                outcomes.append(plan.add(batch, cause))
            except Exception as error:
                # A batch that cannot be planned fails alone.
                outcomes.append(commit_error(batch, error))
        writes = _collect_writes(rows, plan, loaded)
        if writes:
            writes[rows.head] = head.encode_next()
        return _Planned(rows, head, found, since, outcomes, writes)

    # Following --------------------------------------------------------------------

    async def changes(
        self, namespace: str, after: int, *, span: Span | None = None, limit: int = 500, wait_s: float = 0.0
    ) -> LogPage:
        """See `Engine.changes`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        rows = _Rows(namespace)
        while True:
            self._check_open()
            token = self._wakeup.token(namespace)
            async with self._read() as snapshot:
                (found,) = await snapshot.get([rows.head])
                page = await _read_page(snapshot, rows, _head(found), after, span, limit)
            left_s = deadline - loop.time()
            if page.changes or left_s <= 0:
                return page
            after_wait = [
                loop.create_task(self._wakeup.wait(namespace, token, left_s)),
                loop.create_task(self._wait_or_pause(rows.head, found)),
            ]
            try:
                await asyncio.wait(after_wait, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in after_wait:
                    task.cancel()

    async def _wait_or_pause(self, key: bytes, found: bytes | None) -> None:
        try:
            await self.wait_for_change(key, found)
        except Exception:
            # The next read reports what is wrong, or works.
            await asyncio.sleep(POLL_S)

    # Trimming -----------------------------------------------------------------------

    async def trim(self, namespace: str, window: Window) -> int:
        """See `Engine.trim`. A step deletes a bounded number of rows; steps follow until one finds nothing."""
        self._check_open()
        rows, total = _Rows(namespace), 0
        for _ in range(ATTEMPTS_MAX):
            started_at = time.monotonic()
            async with self._read() as snapshot:
                (found,) = await snapshot.get([rows.head])
                head = _head(found)
                now_ms = await self._time(namespace, head)
                oldest = await snapshot.get_range(rows.change(head.floor + 1), rows.change_end, ROWS_AT_ONCE)
                over = await snapshot.get_range(rows.kept(0), rows.kept(now_ms + 1), ROWS_AT_ONCE)
            writes, dropped = _collect_trim(rows, head, window, now_ms, oldest, over)
            if not writes:
                return total
            writes[rows.head] = head.encode_next()
            try:
                is_written = await self._write(rows.head, found, writes)
            except ReplyLost as lost:
                raise Unavailable(f"{self._display_name} may have been trimmed: trim it again") from lost
            if is_written:
                total += dropped
            else:
                await asyncio.sleep(jitter_s(time.monotonic() - started_at))
        return total

    # Errors -------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _read(self) -> AsyncIterator[Snapshot]:
        try:
            async with self.snapshot() as snapshot:
                yield snapshot
        except Exception as error:
            self._raise(error)

    async def _write(self, key: bytes, found: bytes | None, writes: Mapping[bytes, bytes | None]) -> bool:
        try:
            return await self.compare_and_write(key, found, writes)
        except ReplyLost:
            raise
        except ValueTooLarge as error:
            # Too large together, or one of them is: each is then written by itself.
            raise NotApplied(error) from error
        except Exception as error:
            self._raise(error)

    def _raise(self, error: Exception) -> NoReturn:
        meaning = self._translate(error)
        if meaning is error:
            raise error
        raise meaning from error

    def _translate_driver_error(self, error: Exception) -> Exception:
        return self.translate(error)


# Rows -------------------------------------------------------------------------------


class _Store(msgspec.Struct, frozen=True):
    """The row of a store."""

    store_id: str
    epoch: int
    format: int = FORMAT


class _Head(msgspec.Struct):
    """The row of a namespace: its counters, the floor of its log, and how often the row was written."""

    counters: Counters
    floor: int = 0
    floor_print: str = BEGINNING
    number: int = 0

    def encode_next(self) -> bytes:
        """Encode the row as it is written: its number differs from every earlier one."""
        self.number += 1
        return _encode(self)


class _Planned(msgspec.Struct):
    """What a group does: the result of each batch, and what is written if the row of the namespace is as found."""

    rows: _Rows
    head: _Head
    found: bytes | None
    since: int
    outcomes: list[CommitResult]
    writes: dict[bytes, bytes | None]


class _Rows:
    """The keys of the rows of one namespace."""

    def __init__(self, namespace: str) -> None:
        self._prefix = _PREFIX + b"n" + namespace.encode() + b"\0"
        self.head = self._prefix + b"c"
        self.change_end = self._prefix + b"l" + _LAST * 9

    def entry(self, family: StoredFamily, key: str) -> bytes:
        return self._prefix + b"e" + _name(family, key)

    def bounds(self, family: Family, span: Span) -> tuple[bytes, bytes]:
        """The rows of the entries of a span: the first, and the end."""
        stop = self.entry(family, "") + _LAST if span.stop is None else self.entry(family, span.stop)
        return self.entry(family, span.start), stop

    def change(self, revision: int) -> bytes:
        return self._prefix + b"l" + revision.to_bytes(8)

    def due(self, expires_ms: int) -> bytes:
        """Where the entries begin that expire at this time or later."""
        return self._prefix + b"d" + expires_ms.to_bytes(8)

    def kept(self, expires_ms: int) -> bytes:
        """Where the receipts and marks begin that expire at this time or later."""
        return self._prefix + b"k" + expires_ms.to_bytes(8)

    def expiry(self, family: StoredFamily, entry: Entry | None) -> bytes | None:
        """The row that finds an entry by its expiry; None for one that does not expire."""
        if entry is None or entry.expires_ms is None:
            return None
        place = self.kept if family in _UNLOGGED else self.due
        return place(entry.expires_ms) + _name(family, entry.key)

    def entry_of(self, expiry: bytes) -> bytes:
        """The entry that a row of an expiry finds."""
        return self._prefix + b"e" + expiry[len(self._prefix) + 9 :]

    def read_due(self, expiry: bytes, value: bytes) -> Expire:
        family, _, key = expiry[len(self._prefix) + 9 :].decode().partition("\0")
        return Expire(key, _decode(value, int, "an expiry"), cast("Family", family))


def _name(family: StoredFamily, key: str) -> bytes:
    return family.encode() + b"\0" + key.encode()


_encode = msgspec.msgpack.Encoder().encode
_decoders: Final[dict[Any, msgspec.msgpack.Decoder[Any]]] = {}


def _decode(value: bytes, shape: type[T], what: str) -> T:
    decoder = _decoders.get(shape)
    if decoder is None:
        decoder = _decoders[shape] = msgspec.msgpack.Decoder(shape)
    try:
        found: T = decoder.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"{what} cannot be read: another program has written there, or the store is damaged") from error
    return found


def _head(value: bytes | None) -> _Head:
    return _Head(Counters()) if value is None else _decode(value, _Head, "the row of a namespace")


async def _get_head(snapshot: Snapshot, rows: _Rows) -> _Head:
    (found,) = await snapshot.get([rows.head])
    return _head(found)


async def _walk(
    snapshot: Snapshot, start: bytes, stop: bytes, *, reverse: bool = False
) -> AsyncGenerator[tuple[bytes, bytes], None]:
    """Go through a range, some rows at a time."""
    while True:
        found = await snapshot.get_range(start, stop, ROWS_AT_ONCE, reverse=reverse)
        for row in found:
            yield row
        if len(found) < ROWS_AT_ONCE:
            return
        last, _ = found[-1]
        start, stop = (start, last) if reverse else (last + b"\0", stop)


def _passes(entry: Entry, where: Filter | None) -> bool:
    return where is None or entry.stored is None or where.matches(entry.stored)


def _read_entry(value: bytes | None, key: str, now_ms: int) -> ReadResult:
    try:
        return None if value is None else live(_decode(value, Entry, f"the entry {key!r}"), now_ms)
    except Corrupt as error:
        return error


# Planning -----------------------------------------------------------------------------


class _Loaded:
    """The entries that a group names, as they are stored."""

    def __init__(self, rows: Iterable[tuple[EntryId, bytes | None]]) -> None:
        self._values = dict(rows)
        self._entries: dict[EntryId, Entry | None] = {}

    def load(self, family: StoredFamily, key: str) -> Entry | None:
        """See `Load`."""
        entry_id = (family, key)
        if entry_id not in self._entries:
            value = self._values[entry_id]
            self._entries[entry_id] = None if value is None else _decode(value, Entry, f"the entry {key!r}")
        return self._entries[entry_id]


def _split(group: Sequence[Ticket], rows_max: int) -> Iterable[list[Ticket]]:
    """Split a group into parts of at most so many rows, in their order; a batch is never split."""
    part: list[Ticket] = []
    total = 0
    for ticket in group:
        rows = _ROWS_OF_BATCH + _ROWS_OF_WRITE * len(ticket.batch.writes)
        if part and total + rows > rows_max:
            yield part
            part, total = [], 0
        part.append(ticket)
        total += rows
    yield part


def _name_entries(batch: Batch) -> Iterable[EntryId]:
    """The entries that a plan of a batch may read."""
    for one in (*batch.writes, *batch.guards):
        yield one.family, one.key
    if batch.request_id is not None:
        yield "receipt", batch.request_id
        yield "superseded", request_group(batch.request_id)


async def _find_changes(snapshot: Snapshot, rows: _Rows, batches: Sequence[Batch]) -> list[Change]:
    """The changes in the log of requests that are sent again, which are few: each reads what was logged since."""
    found: list[Change] = []
    retried = {batch.origin for batch in batches if batch.retry_since is not None}
    if retried:
        since = min(batch.retry_since for batch in batches if batch.retry_since is not None)
        async for _, value in _walk(snapshot, rows.change(since + 1), rows.change_end):
            change = _decode(value, Change, "a change of the log")
            if change.origin in retried:
                found.append(change)
    return found


def _after(changes: Iterable[Change], after: int, origin: str) -> Iterable[Change]:
    return [change for change in changes if change.revision > after and change.origin == origin]


def _collect_writes(rows: _Rows, plan: GroupPlan, loaded: _Loaded) -> dict[bytes, bytes | None]:
    """The rows that a plan writes: its log, and each entry as the last batch leaves it, with its expiry."""
    writes: dict[bytes, bytes | None] = {}
    written: dict[EntryId, None] = dict.fromkeys(plan.kept)
    for change, _ in plan.changes:
        writes[rows.change(change.revision)] = _encode(change)
        written[change.family, change.entry.key] = None
    for family, key in written:
        before, after = loaded.load(family, key), plan.entries[family, key]
        old, new = rows.expiry(family, before), rows.expiry(family, after)
        if old is not None:
            writes[old] = None
        if new is not None and after is not None:
            writes[new] = _encode(after.revision)
        # An entry that the group has made and ended was never there.
        if before is not None or after is not None:
            writes[rows.entry(family, key)] = None if after is None else _encode(after)
    return writes


async def _read_page(
    snapshot: Snapshot, rows: _Rows, head: _Head, after: int, span: Span | None, limit: int
) -> LogPage:
    revision = head.counters.revision
    check_after(after, floor=head.floor, revision=revision)
    before, at, size_bytes = head.floor_print, None, 0
    found: list[Change] = []
    # The change at the given revision comes first, unless it was trimmed: no revision is skipped.
    async with contextlib.aclosing(_walk(snapshot, rows.change(after), rows.change_end)) as walk:
        async for _, value in walk:
            change = _decode(value, Change, "a change of the log")
            if change.revision == after:
                before = fingerprint(change)
            if not limit:
                return LogPage([], after, before)
            if change.revision == after:
                continue
            if span is None or (change.family == "data" and change.key in span):
                found.append(change)
                at, size_bytes = None, size_bytes + len(value)
                if len(found) == limit or size_bytes > PAGE_BYTES:
                    return LogPage(found, change.revision, before)
            else:
                at = fingerprint(change)
    return LogPage(found, revision, before, at)


def _collect_trim(
    rows: _Rows,
    head: _Head,
    window: Window,
    now_ms: int,
    oldest: Sequence[tuple[bytes, bytes]],
    over: Sequence[tuple[bytes, bytes]],
) -> tuple[dict[bytes, bytes | None], int]:
    """The rows that one step of trimming deletes, and how many changes are among them. Moves the floor."""
    counters = head.counters
    log = [_decode(value, Change, "a change of the log") for _, value in oldest]
    weighed = ((change.revision, change.at_ms, change.entry.weight_bytes) for change in log)
    dropped, freed_bytes, floor = window.excess(
        weighed, count=counters.log_changes, size_bytes=counters.log_bytes, now_ms=now_ms
    )
    writes: dict[bytes, bytes | None] = {key: None for key, _ in oldest[:dropped]}
    for expiry, _ in over:
        writes[expiry] = writes[rows.entry_of(expiry)] = None
    if dropped:
        head.floor, head.floor_print = floor, fingerprint(log[dropped - 1])
        counters.log_changes -= dropped
        counters.log_bytes -= freed_bytes
    return writes, dropped
