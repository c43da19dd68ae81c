"""Validation of requests for the engine's primitives: the same rules that a draft applies in the caller's process.

An engine trusts its caller. A request from the network was made by another program, so its names, values, times and
counts are checked here, before it reaches an engine. An error names the key and never the value.
"""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from limpet import codec
from limpet.checks import (
    check_batch_limits,
    check_filter,
    check_guard,
    check_number,
    check_value_size,
    check_write,
    check_writer,
)
from limpet.codec import Stored
from limpet.draft import digest_of
from limpet.errors import InvalidKey, InvalidValue, LimpetError
from limpet.keys import KEY_BYTES_MAX, KEYS_MAX, Span, check_key
from limpet.model import (
    ABSENT,
    Add,
    Batch,
    Create,
    Equals,
    FieldEquals,
    Guard,
    HeldBy,
    Import,
    Patch,
    Put,
    Touch,
    Write,
)
from limpet.protocol import engine_msgpack as wire
from limpet.sweep import SWEEP_MAX

__all__ = ["check_batch", "check_changes", "check_due", "check_read", "check_scan", "check_span", "is_ownership_proven"]

GUARDS_MAX: Final = 512
DIGEST_BYTES_MAX: Final = 64
RECEIPT_MS_MAX: Final = 2 * 86_400_000


def check_read(read: wire.Read) -> None:
    """Check the number of keys, and each key."""
    if len(read.keys) > KEYS_MAX:
        raise InvalidValue(f"one read has up to {KEYS_MAX} keys, this one {len(read.keys)}; read them in parts")
    for key in read.keys:
        check_key(key)


def check_scan(scan: wire.Scan) -> None:
    """Check the span, the limit and the filter."""
    check_span(scan.span)
    _check_page(scan.limit)
    if scan.where is not None:
        check_filter(scan.where)
        for test in scan.where.all_tests():
            for operand in test.operands:
                _check_encoded(test.name, operand)


def check_changes(changes: wire.Changes) -> None:
    """Check the revision, the limit, the wait and the span."""
    check_number(changes.after, "a revision")
    # An empty page is a valid request: it reads only which change the page would follow.
    if changes.limit != 0:
        _check_page(changes.limit)
    if not 0 <= changes.wait_s < float("inf"):
        raise InvalidValue("wait_s is zero or more seconds")
    if changes.span is not None:
        check_span(changes.span)


def check_due(due: wire.Due) -> None:
    """Check the limit."""
    _check_page(due.limit)


def check_batch(batch: Batch, *, value_bytes_max: int, any_lock: bool, writer: str | None = None) -> Batch:
    """Check a batch. Returns it with the server's own digest, limit and writer, as an engine may have it.

    Args:
        batch: The batch that was sent.
        value_bytes_max: The largest value that this server takes.
        writer: The name of the caller. One that the batch has itself stands behind it, or alone where there is none.
        any_lock: Whether locks may be written in any form, and not only as `limpet.lock` does it.
    """
    _check_envelope(batch)
    size_bytes = 0
    for write in batch.writes:
        size_bytes += _check_write(write, value_bytes_max)
        if write.family == "receipt":
            raise InvalidValue("receipts are written by the engine alone")
        if write.family == "lock":
            _check_lock(write, any_lock)
    for guard in batch.guards:
        _check_guard(guard)
    check_batch_limits(batch.guards, batch.writes, size_bytes=size_bytes, expiries_max=SWEEP_MAX)
    check_number(batch.value_bytes_max, "value_bytes_max")
    writers = [name for name in (writer, batch.writer) if name is not None]
    return msgspec.structs.replace(
        batch,
        digest=_extend_digest(batch),
        value_bytes_max=min(batch.value_bytes_max, value_bytes_max),
        writer="/".join(writers) or None,
    )


def _extend_digest(batch: Batch) -> bytes:
    """The caller's digest, followed by our own hash of the batch.

    A receipt is the reply to a repeated request, so a caller must not be able to forge a digest that matches it. The
    caller's digest comes first, because a semantic store recognises its request by it, see `limpet.semantic.store`.
    """
    if batch.receipt_ms is None:
        return b""
    content = digest_of(batch.guards, batch.writes)
    return batch.digest + hashlib.blake2b(content + batch.digest, digest_size=16).digest()


def _check_envelope(batch: Batch) -> None:
    """Check the members of a batch that a draft does not have. Its own limits are in `check_batch_limits`."""
    if len(batch.guards) > GUARDS_MAX:
        raise InvalidValue(f"a batch holds up to {GUARDS_MAX} guards, this one has {len(batch.guards)}")
    if batch.request_id is None:
        raise InvalidValue("a batch for a server has a request id, so that it can be repeated safely")
    check_key(batch.request_id)
    if batch.writer is not None:
        check_writer(batch.writer)
    if len(batch.digest) > DIGEST_BYTES_MAX:
        raise InvalidValue(f"a digest has up to {DIGEST_BYTES_MAX} bytes")
    if batch.receipt_ms is not None and not 0 < batch.receipt_ms <= RECEIPT_MS_MAX:
        raise InvalidValue("a receipt is kept for one millisecond to two days")
    if batch.retry_since is not None:
        check_number(batch.retry_since, "a revision")


def _check_write(write: Write, value_bytes_max: int) -> int:
    """Check a write. Returns the size of its values."""
    size_bytes = check_write(write)
    if isinstance(write, Put | Create | Patch):
        stored = write.fields if isinstance(write, Patch) else write.stored
        _check_canonical(write.key, stored)
        check_value_size(write.key, size_bytes, value_bytes_max)
    if isinstance(write, Put | Create | Patch | Add) and isinstance(write.meta_json, bytes):
        _check_encoded(write.key, write.meta_json)
    return size_bytes


def _check_lock(write: Write, any_form: bool) -> None:
    """Refuse a lock without a holder or an end, which later readers of the lock could not handle."""
    match write:
        case Import():
            is_valid = False
        case Put():
            is_valid = isinstance(write.ttl_ms, int) and isinstance(write.stored, bytes) and _names_holder(write.stored)
        case Touch():
            is_valid = write.ttl_ms is not None
        case Create() | Add() | Patch():
            is_valid = False
        case _:
            is_valid = True
    if not is_valid and not any_form:
        raise InvalidValue(f"{write.key!r}: a lock has a holder and a time to live")


def is_ownership_proven(write: Write, batch: Batch) -> bool:
    """Whether a write of a lock comes from its holder: the batch has the holder's token, or takes a free lock."""
    conditions = [guard.condition for guard in batch.guards if (guard.family, guard.key) == (write.family, write.key)]
    takes_free = isinstance(write, Put) and ABSENT in conditions
    return takes_free or any(isinstance(condition, HeldBy) for condition in conditions)


def _names_holder(stored: bytes) -> bool:
    found = codec.decode(stored)
    return isinstance(found, dict) and isinstance(found.get("holder"), str)


def _check_guard(guard: Guard) -> None:
    check_guard(guard)
    if guard.family == "receipt":
        raise InvalidValue("receipts are guarded by the engine alone")
    match guard.condition:
        case Equals(stored):
            _check_canonical(guard.key, stored)
        case FieldEquals(_, stored) if isinstance(stored, bytes):
            _check_encoded(guard.key, stored)
        case _:
            pass


def _check_canonical(key: str, stored: Stored) -> None:
    for encoded in [stored] if isinstance(stored, bytes) else stored.values():
        _check_encoded(key, encoded)


def _check_encoded(key: str, encoded: bytes) -> None:
    """Only the output of our own encoder is stored, because values are compared by their encoding."""
    if encoded[:1] == b"\0":
        return
    try:
        is_canonical = codec.encode_field(codec.decode(encoded)) == encoded
    except (LimpetError, RecursionError):
        is_canonical = False
    if not is_canonical:
        raise InvalidValue(f"the value for {key!r} is not canonical JSON")


def check_span(span: Span) -> None:
    """Check the bounds of a span."""
    for bound in (span.start, span.stop or ""):
        # A bound right after a key is that key with U+0000 at its end.
        if "\0" in bound[:-1] or len(bound.encode()) > KEY_BYTES_MAX + 1:
            raise InvalidKey(bound[:KEY_BYTES_MAX], "no key is, or follows, this bound of a span")


def _check_page(limit: int) -> None:
    # A limit has no maximum: a page may end early, and says so.
    if limit < 1:
        raise InvalidValue("the limit of a page is 1 or more")
