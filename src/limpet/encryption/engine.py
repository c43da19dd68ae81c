"""The encrypted engine: encryption in front of any other engine, the inner engine, which stores only raw bytes.

A batch that depends on no value passes through with its values encrypted, and the inner engine decides it as always. A
batch that depends on a value (a counter, a field, a guard on a value, a value that is taken) is decided here instead:
the entries are read and decrypted, `plan` decides, and the results are put under the condition that no entry has
changed since. If one has, the batch is planned again.

Families, keys, versions, times, sizes and request ids are not encrypted, and neither are locks with their holders.
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
    Create,
    Entry,
    Equals,
    Expire,
    Family,
    FieldEquals,
    Filter,
    Guard,
    Import,
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
    join_writer,
    split_writer,
)
from limpet.request_ids import new_request_id
from limpet.retry import jitter_s
from limpet.transition import encode_receipt, find_values_read, plan, read_receipt
from limpet.turns import Turns

__all__ = ["EncryptedEngine"]

ATTEMPTS_BEFORE_PAUSE: Final = 4
PAGE_ENTRIES: Final = 500
RESEAL_WRITES: Final = 64
RESEAL_BYTES: Final = 1_000_000
RECENTLY_SENT_MAX: Final = 64
REMEMBERED_BYTES_MAX: Final = 16_384
RESEAL_CAUSE: Final = "limpet-reseal-"
"""The prefix of the causes of changes that only replace the key of a value."""

# Lock entries contain only the holder name, which waiters must be able to read, and counters what keys tell as well.
_PLAIN_FAMILIES: Final[frozenset[Family]] = frozenset({"lock", "sequence"})
# A receipt cannot be encrypted with another key: its hash is made from the request, which is not stored. It expires
# within ten minutes.
_RESEALED_FAMILIES: Final[tuple[Family, ...]] = ("data", "audit", "recoverable")
# No entry has this revision, so a guard on it always fails.
_NEVER: Final = Revision(2**53 - 1)

_EntryId = tuple[Family, str]
_replace = msgspec.structs.replace


class _SentBatch(msgspec.Struct, frozen=True):
    """A batch as it was sent to the inner engine.

    Attributes:
        request: The batch of the caller.
        batch: The same with encrypted values.
        values: For each write, the plain value that is encrypted in it, if any.
        guards: The conditions under which it was planned. If one of them fails, it must be planned again.
    """

    request: Batch
    batch: Batch
    values: tuple[Stored | None, ...]
    guards: frozenset[tuple[_EntryId, Any]] = frozenset()

    def is_outdated(self, outcome: Commit | Refusal) -> bool:
        """Whether it was refused because an entry was written after it was planned."""
        guard = outcome.guard if isinstance(outcome, Refusal) else None
        return guard is not None and ((guard.family, guard.key), guard.condition) in self.guards

    def is_for(self, batch: Batch) -> bool:
        """Whether it was made for this very request."""
        return (self.request.guards, self.request.writes) == (batch.guards, batch.writes)


class EncryptedEngine:
    """An engine that encrypts before its inner engine stores, and decrypts what that returns."""

    def __init__(self, engine: Engine, keyring: Keyring, clock: Clock) -> None:
        self.traits: Traits = _replace(engine.traits, encrypted=True)
        self.taken: tuple[str, ...] | None = getattr(engine, "taken", None)
        self._inner = engine
        self._keyring = keyring
        self._clock = clock
        self._turns = Turns()
        self._recently_sent: dict[tuple[str, str], _SentBatch] = {}

    # The ten primitives -----------------------------------------------------

    async def read(self, namespace: str, keys: Sequence[str], *, family: Family = "data") -> list[Entry | None]:
        """See `Engine.read`."""
        # Take the ring first: then a key that is dropped while the entries travel still decrypts them.
        ring = self._keyring.ring()
        found = await self._inner.read(namespace, keys, family=family)
        return [None if entry is None else self._decrypt_entry(ring, namespace, family, entry) for entry in found]

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
        """See `Engine.scan`. A filter is applied here, because the inner engine cannot read the values."""
        ring = self._keyring.ring()
        if where is None:
            page = await self._inner.scan(namespace, span, family=family, values=values, limit=limit, reverse=reverse)
            return ScanPage(
                [self._decrypt_entry(ring, namespace, family, entry) for entry in page.entries], page.cursor
            )
        page = await self._inner.scan(namespace, span, family=family, limit=max(limit, PAGE_ENTRIES), reverse=reverse)
        found: list[Entry] = []
        for encrypted in page.entries:
            entry = self._decrypt_entry(ring, namespace, family, encrypted)
            if entry.stored is None or not where.matches(entry.stored):
                continue
            if len(found) == limit:
                return ScanPage(found, found[-1].key)
            found.append(entry if values else entry.without_value())
        return ScanPage(found, page.cursor)

    async def count(self, namespace: str, span: Span, *, family: Family = "data") -> int:
        """See `Engine.count`."""
        return await self._inner.count(namespace, span, family=family)

    async def namespaces(self) -> list[str]:
        """See `Engine.namespaces`."""
        return await self._inner.namespaces()

    async def commit(self, namespace: str, batch: Batch) -> Commit | Refusal:
        """See `Engine.commit`."""
        deciding = _deciding_entries(batch)
        if not deciding:
            return await self._commit_directly(namespace, batch)
        # Callers in this process that plan on the same entry take turns, so that they do not outdate each other.
        async with self._turns.hold([(namespace, *entry_id) for entry_id in deciding]):
            return await self._commit_planned(namespace, batch, deciding)

    async def changes(
        self, namespace: str, after: int, *, span: Span | None = None, limit: int = 500, wait_s: float = 0.0
    ) -> LogPage:
        """See `Engine.changes`."""
        ring = self._keyring.ring()
        page = await self._inner.changes(namespace, after, span=span, limit=limit, wait_s=wait_s)
        return _replace(page, changes=[self._decrypt_change(ring, namespace, change) for change in page.changes])

    async def due(self, namespace: str, *, limit: int = 500) -> list[Expire]:
        """See `Engine.due`."""
        return await self._inner.due(namespace, limit=limit)

    async def trim(self, namespace: str, window: Window) -> int:
        """See `Engine.trim`."""
        return await self._inner.trim(namespace, window)

    async def status(self, namespace: str) -> Status:
        """See `Engine.status`. Sizes are those of encrypted values."""
        return await self._inner.status(namespace)

    async def close(self) -> None:
        """See `Engine.close`."""
        await self._inner.close()

    # Indexes ------------------------------------------------------------------

    async def index(self, namespace: str, field: str) -> None:
        """Always refused: an index is made from values, which the inner engine cannot read."""
        raise InvalidValue(
            f"cannot keep an index of {field!r}: this store is encrypted, and an index would reveal its values. "
            "Scans with where= work without one, and read every entry of their prefix"
        )

    async def unindex(self, namespace: str, field: str) -> None:
        """Drop an index from before the store was encrypted."""
        if isinstance(self._inner, Indexing):
            await self._inner.unindex(namespace, field)

    async def indexes(self, namespace: str) -> list[str]:
        """The indexes from before the store was encrypted. They find no encrypted value."""
        return await self._inner.indexes(namespace) if isinstance(self._inner, Indexing) else []

    async def candidates(self, namespace: str, span: Span, wanted: Sequence[IndexProbe]) -> list[str] | None:
        """None: no index helps."""
        return None

    # Keys ---------------------------------------------------------------------

    async def raise_epoch(self, skip: int) -> int:
        """See `Restoring.raise_epoch`."""
        if not isinstance(self._inner, Restoring):
            raise InvalidValue(f"{self.traits.engine} has no epochs to raise")
        return await self._inner.raise_epoch(skip)

    @property
    def key_id(self) -> str:
        """The id of the key that encrypts new writes."""
        return self._keyring.current

    async def reseal(self, namespace: str, *, after: str | None = None, limit: int = PAGE_ENTRIES) -> Resealed:
        """Encrypt with the current key the entries that another key, or none, has encrypted: a page of one family.

        Each is put back as it is, under the condition that it was not written since.
        """
        family, key = _split_cursor(after)
        page = await self._inner.scan(namespace, Span(f"{key}\0" if key else "", None), family=family, limit=limit)
        done = 0
        ring = self._keyring.ring()
        group: list[Entry] = []
        weight_bytes = 0
        for entry in page.entries:
            if not _needs_reseal(entry, ring.current):
                continue
            group.append(entry)
            weight_bytes += entry.size_bytes
            if len(group) == RESEAL_WRITES or weight_bytes >= RESEAL_BYTES:
                done += await self._reseal_all(namespace, family, group)
                group, weight_bytes = [], 0
        done += await self._reseal_all(namespace, family, group)
        return Resealed(len(page.entries), done, _next_cursor(family, page.cursor))

    async def seals(self, namespace: str) -> list[Seals]:
        """Count what each key has encrypted, the current key first."""
        entries: Counter[str] = Counter()
        changes: Counter[str] = Counter()
        for family in _RESEALED_FAMILIES:
            span: Span | None = Span("", None)
            while span is not None:
                page = await self._inner.scan(namespace, span, family=family, limit=PAGE_ENTRIES)
                entries.update(key_id for entry in page.entries for key_id in _key_ids(entry))
                span = None if page.cursor is None else Span(page.cursor + "\0", None)
        status = await self._inner.status(namespace)
        after = status.floor
        while after < status.revision:
            log_page = await self._inner.changes(namespace, after)
            logged = (change.entry for change in log_page.changes if change.family not in _PLAIN_FAMILIES)
            changes.update(key_id for entry in logged for key_id in _key_ids(entry))
            after = log_page.next_after
        current = self._keyring.current
        names = sorted({current, *self._keyring.ids, *entries, *changes}, key=lambda name: (name != current, name))
        return [Seals(name, name == current, entries[name], changes[name]) for name in names]

    async def _reseal_all(self, namespace: str, family: Family, entries: list[Entry]) -> int:
        if not entries:
            return 0
        try:
            outcome = await self._inner.commit(namespace, self._reseal_batch(namespace, family, entries))
        except Ambiguous:
            outcome = None
        if isinstance(outcome, Commit):
            return len(entries)
        # One of them was written since, so each is tried by itself.
        return sum([await self._reseal_one(namespace, family, entry) for entry in entries])

    async def _reseal_one(self, namespace: str, family: Family, entry: Entry) -> bool:
        found: Entry | None = entry
        while True:
            if found is None or not _needs_reseal(found, self._keyring.current):
                return False
            started_at = time.monotonic()
            try:
                outcome = await self._inner.commit(namespace, self._reseal_batch(namespace, family, [found]))
            except Ambiguous:
                (found,) = await self._inner.read(namespace, (entry.key,), family=family)
                continue
            if isinstance(outcome, Commit):
                return True
            found = outcome.found
            await _pause(jitter_s(time.monotonic() - started_at))

    def _reseal_batch(self, namespace: str, family: Family, entries: list[Entry]) -> Batch:
        ring = self._keyring.ring()
        guards, writes = [], []
        for entry in entries:
            plain = self._decrypt_entry(ring, namespace, family, entry)
            assert plain.stored is not None
            stored = ring.encrypt_value(plain.stored, namespace, family, entry.key)
            writer, meta = split_writer(plain.meta_json)
            if meta is not None:
                meta = ring.encrypt_meta(meta, namespace, family, entry.key)
            guards.append(Guard(entry.key, Revision(entry.revision), family))
            writes.append(Put(entry.key, stored, KEEP, join_writer(meta, writer), family))
        return Batch(tuple(guards), tuple(writes), RESEAL_CAUSE + new_request_id())

    # Committing ---------------------------------------------------------------

    async def _commit_directly(self, namespace: str, batch: Batch) -> Commit | Refusal:
        """Commit a batch that depends on no value: the inner engine decides."""
        while True:
            ring = self._keyring.ring()
            writes, values = [], []
            for write in batch.writes:
                stored = _value_of(write)
                writes.append(_encrypt_write(ring, namespace, write, stored))
                values.append(stored)
            digest = b""
            if batch.receipt_ms is not None:
                digest = ring.digest(namespace, batch.request_id or "", batch.digest)
            sent = _SentBatch(batch, _replace(batch, writes=tuple(writes), digest=digest), tuple(values))
            outcome = await self._inner.commit(namespace, sent.batch)
            if not (isinstance(outcome, Refusal) and outcome.reason == "stale_request"):
                return self._decrypt_result(ring, namespace, sent, outcome)
            # It may be the same request, whose receipt was made with an older key.
            earlier = await self._find_earlier_result(ring, namespace, batch)
            if earlier is not None:
                return earlier

    async def _commit_planned(self, namespace: str, batch: Batch, deciding: list[_EntryId]) -> Commit | Refusal:
        """Commit a batch that depends on values: it is planned here, on the entries as they were read."""
        ring = self._keyring.ring()
        name = (namespace, batch.request_id or "")
        sent = None if batch.retry_since is None else self._recently_sent.pop(name, None)
        if sent is not None and sent.is_for(batch):
            # Send the very same batch again, so that the reply that was lost comes again.
            sent = _replace(sent, batch=_replace(sent.batch, retry_since=batch.retry_since))
            outcome = await self._send(namespace, sent)
            if not sent.is_outdated(outcome) and not _is_stale_request(outcome):
                return self._decrypt_result(ring, namespace, sent, outcome)
        found = await self._read_entries(namespace, batch, deciding)
        # The inner engine recognises repeated requests, so the plan leaves that out.
        planned_batch = _replace(batch, request_id=None, receipt_ms=None, digest=b"", retry_since=None)
        attempt = 0
        while True:
            attempt += 1
            ring = self._keyring.ring()
            started_at = time.monotonic()
            planned = plan(planned_batch, lambda family, key: found.get((family, key)), now_ms=0, revision=0)
            if isinstance(planned, Refusal):
                refused = _replace(planned, at_ms=self._clock.now_ms())
                return await self._find_earlier_result(ring, namespace, batch) or refused
            sent = self._encrypt_plan(ring, namespace, batch, planned.commit, found, deciding)
            outcome = await self._send(namespace, sent)
            if _is_stale_request(outcome):
                earlier = await self._find_earlier_result(ring, namespace, batch)
                if earlier is not None:
                    return earlier
            elif sent.is_outdated(outcome):
                assert isinstance(outcome, Refusal)
                assert outcome.guard is not None
                family, key = outcome.guard.family, outcome.guard.key
                now = outcome.found
                found[family, key] = None if now is None else self._decrypt_entry(ring, namespace, family, now)
            else:
                is_known = batch.retry_since is None
                return self._decrypt_result(ring, namespace, sent, outcome, is_known=is_known)
            await _pause(0.0 if attempt < ATTEMPTS_BEFORE_PAUSE else jitter_s(time.monotonic() - started_at))

    async def _read_entries(
        self, namespace: str, batch: Batch, deciding: list[_EntryId]
    ) -> dict[_EntryId, Entry | None]:
        """The entries on which a batch depends: by its writes, or by its guards."""
        wanted = dict.fromkeys([*deciding, *((guard.family, guard.key) for guard in batch.guards)])
        found: dict[_EntryId, Entry | None] = {}
        for family in dict.fromkeys(family for family, _ in wanted):
            keys = [key for its, key in wanted if its == family]
            for key, entry in zip(keys, await self.read(namespace, keys, family=family), strict=True):
                found[family, key] = entry
        return found

    def _encrypt_plan(
        self,
        ring: Ring,
        namespace: str,
        batch: Batch,
        commit: Commit,
        found: dict[_EntryId, Entry | None],
        deciding: list[_EntryId],
    ) -> _SentBatch:
        """The batch that does what was planned, if no entry on which it was planned has changed since."""
        writes: list[Write] = []
        values: list[Stored | None] = []
        results: list[Stored | None] = []
        for write, after in zip(batch.writes, commit.entries, strict=True):
            is_planned = isinstance(write, Add | Patch) and write.family not in _PLAIN_FAMILIES
            stored = after.stored if after is not None and is_planned else _value_of(write)
            encrypted_write = _encrypt_write(ring, namespace, write, stored)
            if isinstance(write, Add) and isinstance(encrypted_write, Put) and write.new_ttl_ms is not None:
                is_new = found[write.family, write.key] is None
                encrypted_write = _replace(encrypted_write, ttl_ms=write.new_ttl_ms) if is_new else encrypted_write
            writes.append(encrypted_write)
            values.append(stored)
            results.append(stored if is_planned else None)
        own = {entry_id: _unchanged(found[entry_id]) for entry_id in deciding}
        guards = [
            guard
            for guard in batch.guards
            if guard.family in _PLAIN_FAMILIES or not isinstance(guard.condition, Equals | FieldEquals)
        ]
        guards += [Guard(key, condition, family) for (family, key), condition in own.items()]
        digest = b""
        if batch.request_id is not None:
            # A receipt needs no value of a put, because a retry brings it along. These were computed here.
            digest = ring.digest(namespace, batch.request_id, batch.digest)
            digest += ring.encrypt_results(results, namespace, batch.request_id)
        encrypted = _replace(batch, guards=tuple(guards), writes=tuple(writes), digest=digest)
        return _SentBatch(batch, encrypted, tuple(values), frozenset(own.items()))

    async def _send(self, namespace: str, sent: _SentBatch) -> Commit | Refusal:
        """Send a batch that was planned here. It is remembered if it may be retried, to be sent again unchanged."""
        batch = sent.batch
        try:
            outcome = await self._inner.commit(namespace, batch)
        except Ambiguous as error:
            self._remember_sent(namespace, error.request_id, sent)
            raise
        # A caller that named its request, and has no receipt, may lose this reply and retry by the log.
        if (
            batch.receipt_ms is None
            and sum(size_bytes(each) for each in sent.values if each is not None) < REMEMBERED_BYTES_MAX
        ):
            self._remember_sent(namespace, batch.request_id, sent)
        return outcome

    def _remember_sent(self, namespace: str, request_id: str | None, sent: _SentBatch) -> None:
        if request_id is None:
            return
        while len(self._recently_sent) >= RECENTLY_SENT_MAX:
            self._recently_sent.pop(next(iter(self._recently_sent)), None)
        self._recently_sent[namespace, request_id] = _replace(sent, batch=_replace(sent.batch, request_id=request_id))

    async def _find_earlier_result(self, ring: Ring, namespace: str, batch: Batch) -> Commit | Refusal | None:
        """The earlier result of a request, by its receipt or by the log; None if it was not applied."""
        if batch.request_id is None or (batch.receipt_ms is None and batch.retry_since is None):
            return None
        (kept,) = await self._inner.read(namespace, (batch.request_id,), family="receipt")
        digest, results = b"", None
        if kept is not None:
            digest = read_receipt(kept).digest
            if digest[:DIGEST_BYTES] not in ring.digests(namespace, batch.request_id, batch.digest):
                return Refusal("stale_request", batch.request_id, None, self._clock.now_ms())
            results = self._decrypt_results(ring, namespace, batch.request_id, digest)
        elif batch.retry_since is None:
            return None
        # The inner engine takes this for the same request, and returns its earlier result. Should the receipt have
        # expired meanwhile, the guard that always fails keeps it from being applied.
        values = [
            write.stored if isinstance(write, Put | Create) else None if results is None else results[number]
            for number, write in enumerate(batch.writes)
        ]
        writes = [_lookup_of(write) for write in batch.writes]
        never = Guard(batch.writes[0].key if batch.writes else batch.guards[0].key, _NEVER)
        lookup = _replace(batch, guards=(never,), writes=tuple(writes), digest=digest)
        outcome = await self._inner.commit(namespace, lookup)
        if isinstance(outcome, Refusal):
            return None
        sent = _SentBatch(batch, lookup, tuple(values))
        return self._decrypt_result(ring, namespace, sent, outcome, is_known=results is not None)

    def _decrypt_results(self, ring: Ring, namespace: str, request_id: str, digest: bytes) -> list[Any] | None:
        """The values that are stored behind the hash of a request, if any are."""
        encrypted = digest[DIGEST_BYTES:]
        if not encrypted:
            return None
        return self._ring_for(ring, key_id_of(encrypted)).decrypt_results(encrypted, namespace, request_id)

    def _decrypt_result(
        self,
        ring: Ring,
        namespace: str,
        sent: _SentBatch,
        outcome: Commit | Refusal,
        *,
        is_known: bool = True,
    ) -> Commit | Refusal:
        """The result of the inner engine with its entries decrypted."""
        batch = sent.request
        if isinstance(outcome, Refusal):
            guard, found = outcome.guard, outcome.found
            family: Family = "data" if guard is None else guard.family
            if found is None:
                return outcome
            return _replace(outcome, found=self._decrypt_entry(ring, namespace, family, found))
        entries: list[Entry | None] = []
        for number, (write, entry) in enumerate(zip(batch.writes, outcome.entries, strict=True)):
            ours = sent.batch.writes[number]
            if entry is None:
                entries.append(None)
            elif isinstance(ours, Put | Create) and entry.stored == ours.stored and write.family not in _PLAIN_FAMILIES:
                # The value is the one that was sent, so it need not be decrypted.
                value = sent.values[number]
                if outcome.replayed and not is_known and not isinstance(write, Put | Create):
                    value = _unknown_value(batch, write)
                bare = self._decrypt_entry(ring, namespace, write.family, entry.without_value())
                entries.append(_replace(bare, stored=value))
            else:
                entries.append(self._decrypt_entry(ring, namespace, write.family, entry))
        ended = [
            None if entry is None else self._decrypt_ended(ring, namespace, write.family, entry)
            for write, entry in zip(batch.writes, outcome.ended, strict=True)
        ]
        return _replace(outcome, entries=tuple(entries), ended=tuple(ended))

    def _decrypt_ended(self, ring: Ring, namespace: str, family: Family, entry: Entry) -> Entry:
        """An entry that a write ended. It is gone, so a damaged meta does not make the commit fail."""
        try:
            return self._decrypt_entry(ring, namespace, family, entry)
        except Corrupt:
            if entry.stored is not None:
                raise
            return entry

    # Decrypting ---------------------------------------------------------------

    def _decrypt_entry(self, ring: Ring, namespace: str, family: Family, entry: Entry) -> Entry:
        if family in _PLAIN_FAMILIES:
            return entry
        if family == "receipt":
            return self._decrypt_receipt(ring, namespace, entry)
        stored = entry.stored
        if stored is not None:
            of_value = self._ring_for(ring, key_id_of_value(stored))
            stored, _ = of_value.decrypt_value(stored, namespace, family, entry.key)
        return self._with_plain_value(ring, namespace, family, entry, stored)

    def _with_plain_value(
        self, ring: Ring, namespace: str, family: Family, entry: Entry, stored: Stored | None
    ) -> Entry:
        """The entry with this value, which is plain already, and with its meta decrypted."""
        writer, meta = split_writer(entry.meta_json)
        if meta is not None:
            of_meta = self._ring_for(ring, key_id_of_meta(meta))
            meta = of_meta.decrypt_meta(meta, namespace, family, entry.key)
        return Entry(
            entry.key,
            stored,
            entry.version,
            entry.revision,
            entry.created_revision,
            entry.created_ms,
            entry.updated_ms,
            entry.expires_ms,
            join_writer(meta, writer),
        )

    def _decrypt_change(self, ring: Ring, namespace: str, change: Change) -> Change:
        entry, family = change.entry, change.family
        if family in _PLAIN_FAMILIES or family == "receipt":
            return change
        stored, op = entry.stored, change.op
        if stored is not None:
            of_value = self._ring_for(ring, key_id_of_value(stored))
            stored, is_patched = of_value.decrypt_value(stored, namespace, family, entry.key)
            op = "patch" if is_patched and op == "put" else op
        plain = self._with_plain_value(ring, namespace, family, entry, stored)
        return _replace(change, op=op, entry=plain)

    def _decrypt_receipt(self, ring: Ring, namespace: str, entry: Entry) -> Entry:
        """A receipt with the plain values that its request returned."""
        if entry.stored is None or entry.expires_ms is None:
            return entry
        receipt = read_receipt(entry)
        commit = receipt.commit
        results = self._decrypt_results(ring, namespace, entry.key, receipt.digest) or [None] * len(commit.entries)
        entries = []
        for one, result in zip(commit.entries, results, strict=True):
            plain = None if one is None else self._decrypt_entry(ring, namespace, "data", one)
            entries.append(plain if plain is None or result is None else _replace(plain, stored=result))
        ended = [None if one is None else self._decrypt_entry(ring, namespace, "data", one) for one in commit.ended]
        commit = _replace(commit, entries=tuple(entries), ended=tuple(ended))
        kept = encode_receipt(entry.key, receipt.digest[:DIGEST_BYTES], commit, entry.expires_ms - commit.at_ms)
        return _replace(entry, stored=kept.stored)

    def _ring_for(self, ring: Ring, key_id: str) -> Ring:
        """The ring that has this key: another process may use a new key before this one has read the new ring."""
        return ring if key_id in ring or key_id == PLAIN else self._keyring.ring()


# Batches and cursors ----------------------------------------------------------


def _split_cursor(cursor: str | None) -> _EntryId:
    """The family and key of a cursor. No key contains U+0000, so no key is read as a family."""
    if cursor is None:
        return _RESEALED_FAMILIES[0], ""
    name, mark, key = cursor.partition("\0")
    family = next((family for family in _RESEALED_FAMILIES if mark and family == name), None)
    return (_RESEALED_FAMILIES[0], check_key(cursor)) if family is None else (family, key)


def _next_cursor(family: Family, cursor: str | None) -> str | None:
    """The cursor after a page: a key of this family, or the beginning of the next family."""
    if cursor is not None:
        return cursor if family == _RESEALED_FAMILIES[0] else f"{family}\0{cursor}"
    following = _RESEALED_FAMILIES[_RESEALED_FAMILIES.index(family) + 1 :]
    return f"{following[0]}\0" if following else None


def _deciding_entries(batch: Batch) -> list[_EntryId]:
    """The entries whose values decide what a batch does, in an order that is the same for all callers.

    A value that is taken is decrypted before it is deleted, in case that fails.
    """
    return sorted({entry_id for entry_id in find_values_read(batch) if entry_id[0] not in _PLAIN_FAMILIES})


def _encrypt_write(ring: Ring, namespace: str, write: Write, stored: Stored | None) -> Write:
    """A write for the inner engine: one that makes a value becomes a put of the encrypted value."""
    if stored is None or not isinstance(write, Put | Create | Add | Patch):
        return write
    meta = write.meta_json
    if isinstance(meta, bytes):
        meta = ring.encrypt_meta(meta, namespace, write.family, write.key)
    encrypted = ring.encrypt_value(stored, namespace, write.family, write.key, is_patch=isinstance(write, Patch))
    if isinstance(write, Import | Create):
        return _replace(write, stored=encrypted, meta_json=meta)
    return Put(write.key, encrypted, write.ttl_ms, meta, write.family)


def _value_of(write: Write) -> Stored | None:
    """The value that a write brings, if it is to be encrypted."""
    return write.stored if isinstance(write, Put | Create) and write.family not in _PLAIN_FAMILIES else None


def _lookup_of(write: Write) -> Write:
    """A write in a request that only looks for its earlier result: it brings no value."""
    if isinstance(write, Create):
        return Create(write.key, b"\0")
    return Put(write.key, b"\0", family=write.family) if isinstance(write, Put | Add | Patch) else write


def _unchanged(entry: Entry | None) -> Any:
    """The condition that an entry is still as it was read."""
    return ABSENT if entry is None else Revision(entry.revision)


def _unknown_value(batch: Batch, write: Write) -> Stored | None:
    """The value of a write that was applied and whose value is not known any more. A counter must not be without it."""
    if isinstance(write, Add):
        raise Ambiguous(
            f"the counter {write.key!r} was moved, and its value then is not known any more: read it",
            request_id=batch.request_id,
            since=batch.retry_since or 0,
        )
    return None


def _is_stale_request(outcome: Commit | Refusal) -> bool:
    return isinstance(outcome, Refusal) and outcome.reason == "stale_request"


def _key_ids(entry: Entry) -> set[str]:
    """The keys that have encrypted an entry: a meta may have an older key than its value."""
    found = set() if entry.stored is None else {key_id_of_value(entry.stored)}
    _, meta = split_writer(entry.meta_json)
    return found if meta is None else found | {key_id_of_meta(meta)}


def _needs_reseal(entry: Entry, current: str) -> bool:
    return not _key_ids(entry) <= {current}


async def _pause(pause_s: float) -> None:
    """Wait, on the event loop or, without one, in this thread."""
    if has_loop():
        await asyncio.sleep(pause_s)
    else:
        time.sleep(pause_s)  # noqa: ASYNC251 - there is no loop to hold up
