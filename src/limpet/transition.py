"""The only code that decides what a write does.

`plan` takes a batch and the current state, and returns either the changes that the batch
makes or why it is refused. It is pure: the time and the revision are arguments, it reads
through the function it is given, and it changes nothing. An engine applies the plan; an
engine whose server decides in its own language is compared with `plan` by a test.

Two rules shape the rest. An expired entry is absent, for every guard and every write. And
an incarnation that expired gets exactly one ``expire`` change: the sweeper's, or, if a
write recreates the key first, one that is put before the write's own change.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec

from limpet import codec
from limpet.codec import Stored
from limpet.errors import Corrupt
from limpet.model import (
    ABSENT,
    KEEP,
    PRESENT,
    Add,
    Batch,
    Change,
    Commit,
    Condition,
    Create,
    Delete,
    Entry,
    Equals,
    Family,
    FieldEquals,
    HeldBy,
    Import,
    Op,
    Patch,
    Put,
    Reason,
    Refusal,
    Revision,
    Rule,
    Touch,
    Version,
    Write,
    join_origin,
    join_writer,
    live,
    split_writer,
)

__all__ = [
    "Find",
    "Plan",
    "Receipt",
    "encode_receipt",
    "find_plain_write",
    "find_values_read",
    "make_receipt",
    "omit_puts",
    "plan",
    "plan_write",
    "read_receipt",
    "recall",
    "restore_puts",
]

Find = Callable[[Family, str], Entry | None]
"""Reads the map: the entry stored under a key of a family, expired or not."""


class Plan(msgspec.Struct, frozen=True, gc=False):
    """An accepted batch: the changes to apply and to log, and a receipt to store."""

    commit: Commit
    changes: tuple[Change, ...]
    receipt: Entry | None = None


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """The stored result of a request, and the hash by which the request is recognised."""

    digest: bytes
    commit: Commit


class _WriteRefused(Exception):
    """Raised inside a write; `_make_entry` turns it into a `Refusal`."""

    def __init__(self, reason: Reason, found: Entry | None, needs: str = "", size_bytes: int = 0) -> None:
        self.reason, self.found, self.needs, self.size_bytes = reason, found, needs, size_bytes


def plan(batch: Batch, find: Find, *, now_ms: int, revision: int, cause: str | None = None) -> Plan | Refusal:
    """Decide what a batch does to the state that `find` reads, at this time, after this revision.

    ``cause`` is the request id that the changes get in the log; the batch's own when not given.
    """
    if batch.receipt_ms is not None:
        receipt = live(find("receipt", _request_id(batch)), now_ms)
        if receipt is not None:
            return _replay(batch, receipt, now_ms)
    for guard in batch.guards:
        found = live(find(guard.family, guard.key), now_ms)
        if not _holds(guard.condition, found):
            return Refusal("guard", guard.key, found, now_ms, guard=guard)

    origin, writer = cause or batch.request_id, batch.writer
    if writer is not None or batch.request_id is not None:
        origin = join_origin(origin, writer)
    if len(batch.writes) == 1 and batch.receipt_ms is None and isinstance(batch.writes[0], _VALUE_WRITES):
        current = find(batch.writes[0].family, batch.writes[0].key)
        if current is None or current.expires_ms is None:
            return plan_write(batch.writes[0], current, batch.value_bytes_max, now_ms, revision + 1, origin, writer)
    # What each change needs but the last revision of the commit, which is known only at the end.
    drafts: list[tuple[Op, Entry, int, str | None, Family]] = []
    entries: list[Entry | None] = []
    ended: list[Entry | None] = []
    kept: list[str] = []
    for write in batch.writes:
        family = write.family
        stored = current = find(family, write.key)
        if stored is not None and stored.expires_ms is not None:
            current = live(stored, now_ms)
        after = before = None
        if isinstance(write, Create) and current is not None:
            after = current
            kept.append(write.key)
        elif isinstance(write, _MAKING_WRITES):
            if stored is not None and current is None:
                revision += 1
                # No request caused it, so it has no cause.
                drafts.append(("expire", stored.without_value(), revision, None, family))
            revision += 1
            made = _make_entry(write, current, batch.value_bytes_max, now_ms, revision, writer)
            if isinstance(made, Refusal):
                return made
            after = made
            drafts.append(("patch" if isinstance(write, Patch) else "put", after, revision, origin, family))
        elif isinstance(write, Touch):
            if current is not None:
                revision += 1
                after = _touch(write, current, now_ms, revision)
                drafts.append(("touch", after, revision, origin, family))
        elif isinstance(write, Delete):
            if current is not None:
                revision += 1
                before = current if write.take else current.without_value()
                drafts.append(("delete", before, revision, origin, family))
        elif stored is not None and current is None and stored.revision == write.revision:
            revision += 1
            before = stored.without_value()
            drafts.append(("expire", before, revision, None, family))
        entries.append(after)
        ended.append(before)

    changes = tuple([Change(op, entry, own, revision, now_ms, by, family) for op, entry, own, by, family in drafts])
    # A batch that changes nothing uses no revision; its commit has the latest one.
    commit = Commit(revision, tuple(entries), tuple(ended), now_ms, kept=tuple(kept))
    receipt = None if batch.receipt_ms is None else make_receipt(batch, commit, batch.receipt_ms)
    return Plan(commit, changes, receipt)


def plan_write(
    write: Put | Add | Patch,
    current: Entry | None,
    bytes_max: int,
    now_ms: int,
    revision: int,
    origin: str | None,
    writer: str | None = None,
) -> Plan | Refusal:
    """Decide what one write of a value does: to an entry that is live or absent, as the change of this revision.

    It is what `plan` returns for a batch of this write alone.
    """
    after = _make_entry(write, current, bytes_max, now_ms, revision, writer)
    if isinstance(after, Refusal):
        return after
    op: Op = "patch" if isinstance(write, Patch) else "put"
    change = Change(op, after, revision, revision, now_ms, origin, write.family)
    return Plan(Commit(revision, (after,), (None,), now_ms), (change,))


_VALUE_WRITES: Final = (Put, Add, Patch)
_MAKING_WRITES: Final = (Put, Create, Add, Patch)
_PUTTING_WRITES: Final = (Put, Create)


def find_plain_write(batch: Batch) -> Put | Add | Patch | None:
    """The only write of a batch, if that sets a value and the batch has no guard, no request id and no writer."""
    if batch.request_id is not None or batch.guards or len(batch.writes) != 1 or batch.writer is not None:
        return None
    write = batch.writes[0]
    return write if isinstance(write, _VALUE_WRITES) else None


def find_values_read(batch: Batch) -> Iterator[tuple[Family, str]]:
    """The entries whose values `plan` looks at, or returns. Of others it looks at the rest of the entry alone."""
    for write in batch.writes:
        if isinstance(write, Create | Add | Patch) or (isinstance(write, Delete) and write.take):
            yield write.family, write.key
    for guard in batch.guards:
        if isinstance(guard.condition, Equals | FieldEquals):
            yield guard.family, guard.key


def recall(batch: Batch, changes: Iterable[Change], find: Find) -> Commit | None:
    """Rebuild the commit that a batch made earlier from the log; None when the log has no change of it."""
    if batch.request_id is None:
        return None
    mine = {(change.family, change.key): change for change in changes if change.cause == batch.request_id}
    if not mine:
        return None
    entries: list[Entry | None] = []
    ended: list[Entry | None] = []
    kept: list[str] = []
    last = max(mine.values(), key=lambda change: change.revision)
    for write in batch.writes:
        change = mine.get((write.family, write.key))
        if change is None and isinstance(write, Create):
            entries.append(_load_kept(write, find, last.commit))
            kept.append(write.key)
        else:
            entries.append(None if change is None else _load_value(change, find))
        ended.append(None if change is None or change.after is not None else change.entry)
    return Commit(last.commit, tuple(entries), tuple(ended), last.at_ms, replayed=True, kept=tuple(kept))


def _load_kept(write: Create, find: Find, revision: int) -> Entry | None:
    """Get the entry that a commit has kept. None if it has changed since: the log of the commit does not have it."""
    current = find(write.family, write.key)
    return current if current is not None and current.revision < revision else None


def _load_value(change: Change, find: Find) -> Entry | None:
    """Get the entry after a change. A log may hold a touch without the value, which the touch did not change."""
    after = change.after
    if after is None or after.stored is not None:
        return after
    current = find(change.family, change.key)
    same = current is not None and (current.created_revision, current.version) == (
        after.created_revision,
        after.version,
    )
    return msgspec.structs.replace(after, stored=current.stored) if current is not None and same else after


def _holds(condition: Condition, found: Entry | None) -> bool:
    """Whether a condition holds. Every condition but ABSENT fails on a missing key."""
    if found is None:
        return condition is ABSENT
    match condition:
        case Revision(number):
            return found.revision == number
        case Version(number):
            return found.version == number
        case HeldBy(token):
            # Not the revision: the holder's own refresh changes it, and must not break its fence.
            return found.created_revision == token
        case Equals(stored):
            return found.stored == stored
        case FieldEquals(name, expected):
            held = codec.member(found.stored, name) if found.stored is not None else None
            return held is None if expected is ABSENT else held == expected
        case _:
            return condition is PRESENT


def _make_entry(
    write: Put | Create | Add | Patch,
    current: Entry | None,
    bytes_max: int,
    now_ms: int,
    revision: int,
    writer: str | None,
) -> Entry | Refusal:
    """Make the entry after a write that sets a value."""
    try:
        if isinstance(write, _PUTTING_WRITES):
            stored: Stored = write.stored
        else:
            stored = _add(write, current) if isinstance(write, Add) else _patch(write, current, bytes_max)
    except _WriteRefused as why:
        return Refusal(why.reason, write.key, why.found, now_ms, needs=why.needs, size_bytes=why.size_bytes)
    if type(write) is Import:
        return _import(write, revision)
    ttl_ms, meta_json = write.ttl_ms, write.meta_json
    if meta_json is KEEP:
        kept = None if current is None else current.meta_json
        # Without the name of the earlier writer.
        meta_json = None if kept is None else split_writer(kept)[1]
    if writer is not None and write.family == "data":
        meta_json = join_writer(meta_json, writer)
    if current is None:
        if isinstance(write, Add) and write.new_ttl_ms is not None:
            ttl_ms = write.new_ttl_ms
        return Entry(
            write.key,
            stored,
            1,
            revision,
            revision,
            now_ms,
            now_ms,
            None if ttl_ms is None or ttl_ms is KEEP else now_ms + ttl_ms,
            meta_json,
        )
    return Entry(
        write.key,
        stored,
        current.version + 1,
        revision,
        current.created_revision,
        current.created_ms,
        now_ms,
        current.expires_ms if ttl_ms is KEEP else None if ttl_ms is None else now_ms + ttl_ms,
        meta_json,
    )


def _import(write: Import, revision: int) -> Entry:
    """The entry as it was elsewhere, under a revision of this namespace. Whatever was there has ended."""
    meta_json = join_writer(None if write.meta_json is KEEP else write.meta_json, write.writer)
    times = write.created_ms, write.updated_ms, write.expires_ms
    return Entry(write.key, write.stored, write.version, revision, revision, *times, meta_json)


def _add(write: Add, current: Entry | None) -> bytes:
    number = write.by
    if current is not None:
        found = None if current.stored is None else codec.counter(current.stored)
        if found is None:
            raise _WriteRefused("type", current, needs="an integer")
        number = _COUNT[write.rule](found, write.by)
    if not codec.INT_MIN <= number <= codec.INT_MAX:
        raise _WriteRefused("overflow", current)
    return b"%d" % number


_COUNT: Final[dict[Rule, Callable[[int, int], int]]] = {"add": operator.add, "minimum": min, "maximum": max}


def _patch(write: Patch, current: Entry | None, bytes_max: int) -> Stored:
    if current is None:
        if write.if_exists:
            raise _WriteRefused("missing", None)
        fields: dict[str, bytes] = {}
    elif current.stored is None or isinstance(current.stored, bytes):
        raise _WriteRefused("type", current, needs="a record")
    else:
        fields = {name: item for name, item in current.stored.items() if name not in write.unset}
    fields.update(write.fields)
    size = codec.size_bytes(fields)
    if size > bytes_max:
        raise _WriteRefused("size", current, size_bytes=size)
    return fields


def _touch(write: Touch, current: Entry, now_ms: int, revision: int) -> Entry:
    """Change the expiry and the revision alone: version and update time stay, because the value was not written."""
    expires_ms = None if write.ttl_ms is None else now_ms + write.ttl_ms
    return msgspec.structs.replace(current, revision=revision, expires_ms=expires_ms)


# Receipts. A retry repeats the value of a put in its request, so the receipt does not store it.

_encode_receipt = msgspec.msgpack.Encoder().encode
_decode_receipt = msgspec.msgpack.Decoder(Receipt).decode


def make_receipt(batch: Batch, commit: Commit, receipt_ms: int) -> Entry:
    """Make the receipt of a batch."""
    return encode_receipt(_request_id(batch), batch.digest, omit_puts(commit, batch), receipt_ms)


def omit_puts(commit: Commit, batch: Batch) -> Commit:
    """A commit without the values that its batch has put."""
    entries = tuple(
        entry.without_value() if entry is not None and _value_put(write, commit) is not None else entry
        for entry, write in zip(commit.entries, batch.writes, strict=True)
    )
    return msgspec.structs.replace(commit, entries=entries)


def restore_puts(commit: Commit, batch: Batch) -> Commit:
    """A commit with the values that its batch has put."""
    entries = tuple(
        msgspec.structs.replace(entry, stored=stored)
        if entry is not None and (stored := _value_put(write, commit)) is not None
        else entry
        for entry, write in zip(commit.entries, batch.writes, strict=True)
    )
    return msgspec.structs.replace(commit, entries=entries)


def _value_put(write: Write, commit: Commit) -> Stored | None:
    """The value that a write has put; None for one that puts none, or has kept an entry."""
    if isinstance(write, Create) and write.key in commit.kept:
        return None
    return write.stored if isinstance(write, _PUTTING_WRITES) else None


def encode_receipt(request_id: str, digest: bytes, commit: Commit, receipt_ms: int) -> Entry:
    """Encode a receipt as an entry: the result of a request, under the id that its caller gave."""
    at_ms, revision = commit.at_ms, commit.revision
    body = _encode_receipt(Receipt(digest, commit))
    return Entry(request_id, b"\0" + body, 1, revision, revision, at_ms, at_ms, at_ms + receipt_ms)


def _request_id(batch: Batch) -> str:
    assert batch.request_id is not None, "a receipt is kept under the id that the caller gave"
    return batch.request_id


def read_receipt(entry: Entry) -> Receipt:
    """Decode a receipt."""
    assert isinstance(entry.stored, bytes)
    try:
        return _decode_receipt(entry.stored[1:])
    except msgspec.DecodeError as error:
        raise Corrupt(f"the receipt of request {entry.key!r} cannot be read; use another request id") from error


def _replay(batch: Batch, entry: Entry, now_ms: int) -> Plan | Refusal:
    """Return the first result of a request id that was used before, or refuse another request under it."""
    receipt = read_receipt(entry)
    if receipt.digest != batch.digest:
        return Refusal("stale_request", entry.key, None, now_ms)
    return Plan(msgspec.structs.replace(restore_puts(receipt.commit, batch), replayed=True), ())
