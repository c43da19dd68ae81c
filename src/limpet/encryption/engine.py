"""The sealed engine: any other engine, of which it hides what the values are.

It stands in front of another engine and hands it raw bytes. A batch that looks at no value passes through with its
values sealed, and is decided where it always is. One that looks at a value (a counter, a field, an expectation of one,
a value that is taken) is decided here instead: what it looks at is read, `plan` says what becomes of it, and the result
is put there under the condition that nobody has written it meanwhile. Otherwise it is planned again.

Families, keys, versions, times, sizes and request ids stay as they are, and so do locks with their holders.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from limpet.clock import Clock, has_loop
from limpet.codec import Stored, size_bytes
from limpet.encryption.keyring import DIGEST_BYTES, PLAIN, Keyring, Ring, key_id_of, key_id_of_meta, key_id_of_value
from limpet.engine import Engine, Indexing, Restoring
from limpet.errors import Ambiguous, Corrupt, InvalidValue
from limpet.index import IndexProbe
from limpet.keys import Span, check_key
from limpet.model import (
    ABSENT,
    KEEP,
    Add,
    Batch,
    Change,
    Commit,
    Delete,
    Entry,
    Equals,
    Expire,
    Family,
    FieldEquals,
    Filter,
    Guard,
    LogPage,
    Patch,
    Put,
    Refusal,
    Resealed,
    Revision,
    ScanPage,
    Seals,
    Status,
    Traits,
    Window,
    Write,
)
from limpet.request_ids import new_request_id
from limpet.retry import jitter_s
from limpet.transition import encode_receipt, plan, read_receipt
from limpet.turns import Turns

__all__ = ["EncryptedEngine"]

CROWD: Final = 4
PAGE: Final = 500
RESEAL_WRITES: Final = 64
RESEAL_BYTES: Final = 1_000_000
UNSETTLED_MAX: Final = 64
SMALL_BYTES: Final = 16_384
CAUSE: Final = "limpet-reseal-"
"""What the causes of all changes start with that only seal a value anew."""

# Locks hold nothing but who holds them, and whoever waits for one shows that.
_OPEN: Final[frozenset[Family]] = frozenset({"lock"})
# A receipt cannot be sealed anew: its hash is made of a request that nobody keeps. It is forgotten in ten minutes.
_RESEALED: Final[tuple[Family, ...]] = ("data", "audit", "recoverable")
# No entry ever has it, so a guard on it holds for none.
_NEVER: Final = Revision(2**53 - 1)

_Place = tuple[Family, str]
_replace = msgspec.structs.replace


class _Sent(msgspec.Struct, frozen=True):
    """What was handed to the other engine for a batch.

    Attributes:
        asked: The batch.
        batch: The same with sealed values.
        values: For each write, the value that is sealed in it, if any.
        guards: The conditions that it was planned under. If one of them fails, it is to be planned again.
    """

    asked: Batch
    batch: Batch
    values: tuple[Stored | None, ...]
    guards: frozenset[tuple[_Place, Any]] = frozenset()

    def is_outdated(self, outcome: Commit | Refusal) -> bool:
        """Whether it was refused because somebody wrote after it was planned."""
        guard = outcome.guard if isinstance(outcome, Refusal) else None
        return guard is not None and ((guard.family, guard.key), guard.condition) in self.guards

    def is_for(self, batch: Batch) -> bool:
        """Whether it was made for this very request."""
        return (self.asked.guards, self.asked.writes) == (batch.guards, batch.writes)


class EncryptedEngine:
    """Another engine, sealed."""

    def __init__(self, engine: Engine, keyring: Keyring, clock: Clock) -> None:
        self.traits: Traits = _replace(engine.traits, encrypted=True)
        self.taken: tuple[str, ...] | None = getattr(engine, "taken", None)
        self._engine = engine
        self._keyring = keyring
        self._clock = clock
        self._turns = Turns()
        self._unsettled: dict[tuple[str, str], _Sent] = {}

    # The eight primitives -----------------------------------------------------

    async def read(self, namespace: str, keys: Sequence[str], *, family: Family = "data") -> list[Entry | None]:
        """See `Engine.read`."""
        # The ring of the beginning opens what is fetched, also if its key is dropped before it is here.
        ring = self._keyring.ring()
        found = await self._engine.read(namespace, keys, family=family)
        return [None if entry is None else self._opened(ring, namespace, family, entry) for entry in found]

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
        """See `Engine.scan`. A filter is held against what comes back: the other engine cannot look."""
        ring = self._keyring.ring()
        if where is None:
            part = await self._engine.scan(namespace, span, family=family, values=values, limit=limit)
            return ScanPage([self._opened(ring, namespace, family, entry) for entry in part.entries], part.cursor)
        part = await self._engine.scan(namespace, span, family=family, limit=max(limit, PAGE))
        found: list[Entry] = []
        for sealed in part.entries:
            entry = self._opened(ring, namespace, family, sealed)
            if entry.stored is None or not where.matches(entry.stored):
                continue
            if len(found) == limit:
                return ScanPage(found, found[-1].key)
            found.append(entry if values else entry.without_value())
        return ScanPage(found, part.cursor)

    async def commit(self, namespace: str, batch: Batch) -> Commit | Refusal:
        """See `Engine.commit`."""
        places = _looked_at(batch)
        if not places:
            return await self._commit_unseen(namespace, batch)
        # Of those in this process who would plan on the same entry, one does at a time.
        async with self._turns.hold([(namespace, *place) for place in places]):
            return await self._commit_planned(namespace, batch, places)

    async def changes(
        self, namespace: str, after: int, *, span: Span | None = None, limit: int = 500, wait_s: float = 0.0
    ) -> LogPage:
        """See `Engine.changes`."""
        ring = self._keyring.ring()
        feed = await self._engine.changes(namespace, after, span=span, limit=limit, wait_s=wait_s)
        opened = [self._opened_change(ring, namespace, change) for change in feed.changes]
        return _replace(feed, changes=opened)

    async def due(self, namespace: str, *, limit: int = 500) -> list[Expire]:
        """See `Engine.due`."""
        return await self._engine.due(namespace, limit=limit)

    async def trim(self, namespace: str, window: Window) -> int:
        """See `Engine.trim`."""
        return await self._engine.trim(namespace, window)

    async def status(self, namespace: str) -> Status:
        """See `Engine.status`. Bytes are those of sealed values."""
        return await self._engine.status(namespace)

    async def close(self) -> None:
        """See `Engine.close`."""
        await self._engine.close()

    # Indexes ------------------------------------------------------------------

    async def index(self, namespace: str, field: str) -> None:
        """Refused: an index is made of what the values hold, and that is hidden from the engine."""
        raise InvalidValue(
            f"cannot keep an index of {field!r}: this store is encrypted, and an index would show what it hides. "
            "Scans with where= work without one, and read every entry of their prefix"
        )

    async def unindex(self, namespace: str, field: str) -> None:
        """Drop an index from before the store was encrypted."""
        if isinstance(self._engine, Indexing):
            await self._engine.unindex(namespace, field)

    async def indexes(self, namespace: str) -> list[str]:
        """The indexes from before the store was encrypted. They find nothing that is sealed."""
        return await self._engine.indexes(namespace) if isinstance(self._engine, Indexing) else []

    async def candidates(self, namespace: str, span: Span, wanted: Sequence[IndexProbe]) -> list[str] | None:
        """None: no index helps."""
        return None

    # Keys ---------------------------------------------------------------------

    async def raise_epoch(self, skip: int) -> int:
        """See `Restoring.raise_epoch`."""
        if not isinstance(self._engine, Restoring):
            raise InvalidValue(f"{self.traits.engine} has no epochs to raise")
        return await self._engine.raise_epoch(skip)

    @property
    def key_id(self) -> str:
        """The id of the key that seals what is written now."""
        return self._keyring.current

    async def reseal(self, namespace: str, *, after: str | None = None, limit: int = PAGE) -> Resealed:
        """Seal the entries with the current key that are sealed with another, or not at all: a page of one family.

        Each is put back as it is, under the condition that nobody has written it meanwhile.
        """
        family, key = _place_of(after)
        part = await self._engine.scan(namespace, Span(f"{key}\0" if key else "", None), family=family, limit=limit)
        done = 0
        ring = self._keyring.ring()
        page: list[Entry] = []
        weight_bytes = 0
        for entry in part.entries:
            if not _is_older(entry, ring.current):
                continue
            page.append(entry)
            weight_bytes += entry.size_bytes
            if len(page) == RESEAL_WRITES or weight_bytes >= RESEAL_BYTES:
                done += await self._reseal_all(namespace, family, page)
                page, weight_bytes = [], 0
        done += await self._reseal_all(namespace, family, page)
        return Resealed(len(part.entries), done, _cursor_after(family, part.cursor))

    async def seals(self, namespace: str) -> list[Seals]:
        """How much is sealed with which key, the current one first."""
        entries: Counter[str] = Counter()
        changes: Counter[str] = Counter()
        for family in _RESEALED:
            span: Span | None = Span("", None)
            while span is not None:
                part = await self._engine.scan(namespace, span, family=family, limit=PAGE)
                entries.update(key_id for entry in part.entries for key_id in _key_ids(entry))
                span = None if part.cursor is None else Span(part.cursor + "\0", None)
        status = await self._engine.status(namespace)
        after = status.floor
        while after < status.revision:
            feed = await self._engine.changes(namespace, after)
            told = (change.entry for change in feed.changes if change.family not in _OPEN)
            changes.update(key_id for entry in told for key_id in _key_ids(entry))
            after = feed.next_after
        current = self._keyring.current
        names = sorted({current, *self._keyring.ids, *entries, *changes}, key=lambda name: (name != current, name))
        return [Seals(name, name == current, entries[name], changes[name]) for name in names]

    async def _reseal_all(self, namespace: str, family: Family, entries: list[Entry]) -> int:
        if not entries:
            return 0
        try:
            outcome = await self._engine.commit(namespace, self._resealing(namespace, family, entries))
        except Ambiguous:
            outcome = None
        if isinstance(outcome, Commit):
            return len(entries)
        # Somebody wrote one of them: then each by itself.
        return sum([await self._reseal_one(namespace, family, entry) for entry in entries])

    async def _reseal_one(self, namespace: str, family: Family, entry: Entry) -> bool:
        found: Entry | None = entry
        while True:
            if found is None or not _is_older(found, self._keyring.current):
                return False
            started_at = time.monotonic()
            try:
                outcome = await self._engine.commit(namespace, self._resealing(namespace, family, [found]))
            except Ambiguous:
                (found,) = await self._engine.read(namespace, (entry.key,), family=family)
                continue
            if isinstance(outcome, Commit):
                return True
            found = outcome.found
            await _pause(jitter_s(time.monotonic() - started_at))

    def _resealing(self, namespace: str, family: Family, entries: list[Entry]) -> Batch:
        ring = self._keyring.ring()
        guards, writes = [], []
        for entry in entries:
            opened = self._opened(ring, namespace, family, entry)
            assert opened.stored is not None
            sealed = ring.seal_value(opened.stored, namespace, family, entry.key)
            meta = opened.meta_json
            sealed_meta = None if meta is None else ring.seal_meta(meta, namespace, family, entry.key)
            guards.append(Guard(entry.key, Revision(entry.revision), family))
            writes.append(Put(entry.key, sealed, KEEP, sealed_meta, family))
        return Batch(tuple(guards), tuple(writes), CAUSE + new_request_id())

    # Committing ---------------------------------------------------------------

    async def _commit_unseen(self, namespace: str, batch: Batch) -> Commit | Refusal:
        """Commit a batch that looks at no value: the other engine decides."""
        while True:
            ring = self._keyring.ring()
            writes, values = [], []
            for write in batch.writes:
                stored = write.stored if isinstance(write, Put) and write.family not in _OPEN else None
                writes.append(_sealed_write(ring, namespace, write, stored))
                values.append(stored)
            digest = b""
            if batch.receipt_ms is not None:
                digest = ring.digest(namespace, batch.request_id or "", batch.digest)
            sent = _Sent(batch, _replace(batch, writes=tuple(writes), digest=digest), tuple(values))
            outcome = await self._engine.commit(namespace, sent.batch)
            if not (isinstance(outcome, Refusal) and outcome.reason == "stale_request"):
                return self._answer(ring, namespace, sent, outcome)
            # Perhaps the same request, under a key that was the current one then.
            earlier = await self._earlier(ring, namespace, batch)
            if earlier is not None:
                return earlier

    async def _commit_planned(self, namespace: str, batch: Batch, places: list[_Place]) -> Commit | Refusal:
        """Commit a batch that looks at values: it is planned here, on what is read."""
        ring = self._keyring.ring()
        name = (namespace, batch.request_id or "")
        sent = None if batch.retry_since is None else self._unsettled.pop(name, None)
        if sent is not None and sent.is_for(batch):
            # The very batch whose answer was lost, so that it is answered with what it did.
            sent = _replace(sent, batch=_replace(sent.batch, retry_since=batch.retry_since))
            outcome = await self._send(namespace, sent)
            if not sent.is_outdated(outcome) and not _is_stale(outcome):
                return self._answer(ring, namespace, sent, outcome)
        found = await self._look(namespace, batch, places)
        # Who may write, and what of a request is remembered, is decided by the other engine.
        asked = _replace(batch, request_id=None, receipt_ms=None, digest=b"", retry_since=None)
        attempt = 0
        while True:
            attempt += 1
            ring = self._keyring.ring()
            started_at = time.monotonic()
            planned = plan(asked, lambda family, key: found.get((family, key)), now_ms=0, revision=0)
            if isinstance(planned, Refusal):
                refused = _replace(planned, at_ms=self._clock.now_ms())
                return await self._earlier(ring, namespace, batch) or refused
            sent = self._planned(ring, namespace, batch, planned.commit, found, places)
            outcome = await self._send(namespace, sent)
            if _is_stale(outcome):
                earlier = await self._earlier(ring, namespace, batch)
                if earlier is not None:
                    return earlier
            elif sent.is_outdated(outcome):
                assert isinstance(outcome, Refusal)
                assert outcome.guard is not None
                place = (outcome.guard.family, outcome.guard.key)
                now = outcome.found
                found[place] = None if now is None else self._opened(ring, namespace, place[0], now)
            else:
                is_known = batch.retry_since is None
                return self._answer(ring, namespace, sent, outcome, is_known=is_known)
            await _pause(0.0 if attempt < CROWD else jitter_s(time.monotonic() - started_at))

    async def _look(self, namespace: str, batch: Batch, places: list[_Place]) -> dict[_Place, Entry | None]:
        """What a batch looks at: what it writes by looking, and what it is guarded by."""
        wanted = dict.fromkeys([*places, *((guard.family, guard.key) for guard in batch.guards)])
        found: dict[_Place, Entry | None] = {}
        for family in dict.fromkeys(family for family, _ in wanted):
            keys = [key for its, key in wanted if its == family]
            for key, entry in zip(keys, await self.read(namespace, keys, family=family), strict=True):
                found[family, key] = entry
        return found

    def _planned(
        self,
        ring: Ring,
        namespace: str,
        batch: Batch,
        commit: Commit,
        found: dict[_Place, Entry | None],
        places: list[_Place],
    ) -> _Sent:
        """The batch that does what was planned, if nobody has written since what it was planned on."""
        writes: list[Write] = []
        values: list[Stored | None] = []
        results: list[Stored | None] = []
        for write, after in zip(batch.writes, commit.entries, strict=True):
            is_planned = isinstance(write, Add | Patch) and write.family not in _OPEN
            is_put = isinstance(write, Put) and write.family not in _OPEN
            stored = after.stored if after is not None and (is_planned or is_put) else None
            writes.append(_sealed_write(ring, namespace, write, stored))
            values.append(stored)
            results.append(stored if is_planned else None)
        own = {place: _as_found(found[place]) for place in places}
        guards = [
            guard
            for guard in batch.guards
            if guard.family in _OPEN or not isinstance(guard.condition, Equals | FieldEquals)
        ]
        guards += [Guard(key, condition, family) for (family, key), condition in own.items()]
        digest = b""
        if batch.request_id is not None:
            # A receipt holds no value of a put, because whoever repeats one has it. Nobody has these.
            digest = ring.digest(namespace, batch.request_id, batch.digest)
            digest += ring.seal_results(results, namespace, batch.request_id)
        sealed = _replace(batch, guards=tuple(guards), writes=tuple(writes), digest=digest)
        return _Sent(batch, sealed, tuple(values), frozenset(own.items()))

    async def _send(self, namespace: str, sent: _Sent) -> Commit | Refusal:
        """Hand over a batch that was planned here. One that may be asked for again is kept, to be sent as it is."""
        batch = sent.batch
        try:
            outcome = await self._engine.commit(namespace, batch)
        except Ambiguous as error:
            self._keep(namespace, error.request_id, sent)
            raise
        # Whoever names a request and wants no receipt may lose the answer, and ask the log.
        if batch.receipt_ms is None and sum(size_bytes(each) for each in sent.values if each is not None) < SMALL_BYTES:
            self._keep(namespace, batch.request_id, sent)
        return outcome

    def _keep(self, namespace: str, request_id: str | None, sent: _Sent) -> None:
        if request_id is None:
            return
        while len(self._unsettled) >= UNSETTLED_MAX:
            self._unsettled.pop(next(iter(self._unsettled)), None)
        self._unsettled[namespace, request_id] = _replace(sent, batch=_replace(sent.batch, request_id=request_id))

    async def _earlier(self, ring: Ring, namespace: str, batch: Batch) -> Commit | Refusal | None:
        """What a request was answered earlier, as its receipt or the log tells; None when it was not applied."""
        if batch.request_id is None or (batch.receipt_ms is None and batch.retry_since is None):
            return None
        (kept,) = await self._engine.read(namespace, (batch.request_id,), family="receipt")
        digest, results = b"", None
        if kept is not None:
            digest = read_receipt(kept).digest
            if digest[:DIGEST_BYTES] not in ring.digests(namespace, batch.request_id, batch.digest):
                return Refusal("stale_request", batch.request_id, None, self._clock.now_ms())
            results = self._results(ring, namespace, batch.request_id, digest)
        elif batch.retry_since is None:
            return None
        # The same request to the eye of the other engine, but for a guard that never holds: whatever
        # has become of the receipt meanwhile, it does nothing.
        values = [
            write.stored if isinstance(write, Put) else None if results is None else results[number]
            for number, write in enumerate(batch.writes)
        ]
        writes = [
            Put(write.key, b"\0", family=write.family) if isinstance(write, Put | Add | Patch) else write
            for write in batch.writes
        ]
        never = Guard(batch.writes[0].key if batch.writes else batch.guards[0].key, _NEVER)
        asking = _replace(batch, guards=(never,), writes=tuple(writes), digest=digest)
        outcome = await self._engine.commit(namespace, asking)
        if isinstance(outcome, Refusal):
            return None
        sent = _Sent(batch, asking, tuple(values))
        return self._answer(ring, namespace, sent, outcome, is_known=results is not None)

    def _results(self, ring: Ring, namespace: str, request_id: str, digest: bytes) -> list[Any] | None:
        """The values that came with the hash of a request, if any did."""
        sealed = digest[DIGEST_BYTES:]
        if not sealed:
            return None
        return self._ring_for(ring, key_id_of(sealed)).open_results(sealed, namespace, request_id)

    def _answer(
        self,
        ring: Ring,
        namespace: str,
        sent: _Sent,
        outcome: Commit | Refusal,
        *,
        is_known: bool = True,
    ) -> Commit | Refusal:
        """What the other engine answered, opened."""
        batch = sent.asked
        if isinstance(outcome, Refusal):
            guard, found = outcome.guard, outcome.found
            family: Family = "data" if guard is None else guard.family
            return outcome if found is None else _replace(outcome, found=self._opened(ring, namespace, family, found))
        entries: list[Entry | None] = []
        for number, (write, entry) in enumerate(zip(batch.writes, outcome.entries, strict=True)):
            ours = sent.batch.writes[number]
            if entry is None:
                entries.append(None)
            elif isinstance(ours, Put) and entry.stored == ours.stored and write.family not in _OPEN:
                # Nothing came back but what was sent, so it need not be opened.
                value = sent.values[number]
                if outcome.replayed and not is_known and not isinstance(write, Put):
                    value = _forgotten(batch, write)
                bare = self._opened(ring, namespace, write.family, entry.without_value())
                entries.append(_replace(bare, stored=value))
            else:
                entries.append(self._opened(ring, namespace, write.family, entry))
        ended = [
            None if entry is None else self._ended(ring, namespace, write.family, entry)
            for write, entry in zip(batch.writes, outcome.ended, strict=True)
        ]
        return _replace(outcome, entries=tuple(entries), ended=tuple(ended))

    def _ended(self, ring: Ring, namespace: str, family: Family, entry: Entry) -> Entry:
        """What a write ended. It is gone, so a meta that does not open is no reason to say that anything failed."""
        try:
            return self._opened(ring, namespace, family, entry)
        except Corrupt:
            if entry.stored is not None:
                raise
            return entry

    # Opening ------------------------------------------------------------------

    def _opened(self, ring: Ring, namespace: str, family: Family, entry: Entry) -> Entry:
        if family in _OPEN:
            return entry
        if family == "receipt":
            return self._opened_receipt(ring, namespace, entry)
        stored, meta = entry.stored, entry.meta_json
        if stored is not None:
            of_value = self._ring_for(ring, key_id_of_value(stored))
            stored, _ = of_value.open_value(stored, namespace, family, entry.key)
        return self._with(ring, namespace, family, entry, stored, meta)

    def _with(
        self, ring: Ring, namespace: str, family: Family, entry: Entry, stored: Stored | None, meta: bytes | None
    ) -> Entry:
        """The entry with its value, which is open already, and its meta, which is not."""
        if meta is not None:
            of_meta = self._ring_for(ring, key_id_of_meta(meta))
            meta = of_meta.open_meta(meta, namespace, family, entry.key)
        return Entry(
            entry.key,
            stored,
            entry.version,
            entry.revision,
            entry.created_revision,
            entry.created_ms,
            entry.updated_ms,
            entry.expires_ms,
            meta,
        )

    def _opened_change(self, ring: Ring, namespace: str, change: Change) -> Change:
        entry, family = change.entry, change.family
        if family in _OPEN or family == "receipt":
            return change
        stored, op = entry.stored, change.op
        if stored is not None:
            of_value = self._ring_for(ring, key_id_of_value(stored))
            stored, is_patched = of_value.open_value(stored, namespace, family, entry.key)
            op = "patch" if is_patched and op == "put" else op
        return _replace(change, op=op, entry=self._with(ring, namespace, family, entry, stored, entry.meta_json))

    def _opened_receipt(self, ring: Ring, namespace: str, entry: Entry) -> Entry:
        """A receipt that holds what its request was answered."""
        if entry.stored is None or entry.expires_ms is None:
            return entry
        receipt = read_receipt(entry)
        commit = receipt.commit
        results = self._results(ring, namespace, entry.key, receipt.digest) or [None] * len(commit.entries)
        entries = []
        for one, result in zip(commit.entries, results, strict=True):
            opened = None if one is None else self._opened(ring, namespace, "data", one)
            entries.append(opened if opened is None or result is None else _replace(opened, stored=result))
        ended = [None if one is None else self._opened(ring, namespace, "data", one) for one in commit.ended]
        commit = _replace(commit, entries=tuple(entries), ended=tuple(ended))
        kept = encode_receipt(entry.key, receipt.digest[:DIGEST_BYTES], commit, entry.expires_ms - commit.at_ms)
        return _replace(entry, stored=kept.stored)

    def _ring_for(self, ring: Ring, key_id: str) -> Ring:
        """The ring that has this key. Somebody may have used a new one a moment before we heard of it."""
        return ring if key_id in ring or key_id == PLAIN else self._keyring.ring()


# Parts ------------------------------------------------------------------------


def _place_of(cursor: str | None) -> _Place:
    """The family and the key that a cursor stands for. No key has U+0000 in it, so none is taken for a family."""
    if cursor is None:
        return _RESEALED[0], ""
    name, mark, key = cursor.partition("\0")
    family = next((family for family in _RESEALED if mark and family == name), None)
    return (_RESEALED[0], check_key(cursor)) if family is None else (family, key)


def _cursor_after(family: Family, cursor: str | None) -> str | None:
    """Where to go on: behind a key of this family, or with the family that follows it."""
    if cursor is not None:
        return cursor if family == _RESEALED[0] else f"{family}\0{cursor}"
    following = _RESEALED[_RESEALED.index(family) + 1 :]
    return f"{following[0]}\0" if following else None


def _looked_at(batch: Batch) -> list[_Place]:
    """The entries whose values decide what a batch does, in an order that all agree on."""
    # What is taken must be seen to open before it is gone.
    places = {
        (write.family, write.key)
        for write in batch.writes
        if isinstance(write, Add | Patch) or (isinstance(write, Delete) and write.take)
    }
    places |= {(guard.family, guard.key) for guard in batch.guards if isinstance(guard.condition, Equals | FieldEquals)}
    return sorted(place for place in places if place[0] not in _OPEN)


def _sealed_write(ring: Ring, namespace: str, write: Write, stored: Stored | None) -> Write:
    """A write as the other engine gets it: one that makes a value puts it there, sealed."""
    if stored is None or not isinstance(write, Put | Add | Patch):
        return write
    meta = write.meta_json
    if isinstance(meta, bytes):
        meta = ring.seal_meta(meta, namespace, write.family, write.key)
    sealed = ring.seal_value(stored, namespace, write.family, write.key, is_patch=isinstance(write, Patch))
    return Put(write.key, sealed, write.ttl_ms, meta, write.family)


def _as_found(entry: Entry | None) -> Any:
    return ABSENT if entry is None else Revision(entry.revision)


def _forgotten(batch: Batch, write: Write) -> Stored | None:
    """The value that a request made which was applied, and whose value nobody remembers. A counter is nothing else."""
    if isinstance(write, Add):
        raise Ambiguous(
            f"the counter {write.key!r} was moved, and its value then is not known any more: read it",
            request_id=batch.request_id,
            since=batch.retry_since or 0,
        )
    return None


def _is_stale(outcome: Commit | Refusal) -> bool:
    return isinstance(outcome, Refusal) and outcome.reason == "stale_request"


def _key_ids(entry: Entry) -> set[str]:
    """The keys that an entry is sealed with: a meta may be older than its value."""
    found = set() if entry.stored is None else {key_id_of_value(entry.stored)}
    return found if entry.meta_json is None else found | {key_id_of_meta(entry.meta_json)}


def _is_older(entry: Entry, current: str) -> bool:
    return not _key_ids(entry) <= {current}


async def _pause(pause_s: float) -> None:
    """Let others finish."""
    if has_loop():
        await asyncio.sleep(pause_s)
    else:
        time.sleep(pause_s)  # noqa: ASYNC251 - there is no loop to hold up
