"""What a client may ask of an engine: the nouns of a request, held to the contract as a draft would hold them.

An engine trusts what stands above it. What comes over a wire was made by somebody else's program, so that names,
values, times and counts are looked at here, before an engine hears of them. What is wrong is raised, and told by its
key and never by its value.
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
)
from limpet.codec import Stored
from limpet.draft import digest_of
from limpet.errors import InvalidKey, InvalidValue, LimpetError
from limpet.keys import KEY_BYTES_MAX, Span, check_key
from limpet.model import (
    ABSENT,
    Add,
    Batch,
    Equals,
    FieldEquals,
    Guard,
    HeldBy,
    Patch,
    Put,
    Touch,
    Write,
)
from limpet.protocol import engine_msgpack as wire
from limpet.sweep import SWEEP_MAX

__all__ = ["check_changes", "check_due", "check_read", "check_scan", "checked_batch", "is_ownership_proven"]

KEYS_MAX: Final = 1_000
GUARDS_MAX: Final = 512
DIGEST_BYTES_MAX: Final = 64
RECEIPT_MS_MAX: Final = 2 * 86_400_000


def check_read(asked: wire.Read) -> None:
    """A read is of a few keys."""
    if len(asked.keys) > KEYS_MAX:
        raise InvalidValue(f"one read is of up to {KEYS_MAX} keys, this one of {len(asked.keys)}")
    for key in asked.keys:
        check_key(key)


def check_scan(asked: wire.Scan) -> None:
    """A scan is of a span, in pages."""
    _check_span(asked.span)
    _check_page(asked.limit)
    if asked.where is not None:
        check_filter(asked.where)
        for test in asked.where.tests:
            for operand in test.operands:
                _check_encoded(test.name, operand)


def check_changes(asked: wire.Changes) -> None:
    """The log is read in pages."""
    check_number(asked.after, "a revision")
    # A page of none asks what the changes after a revision follow.
    if asked.limit != 0:
        _check_page(asked.limit)
    if not 0 <= asked.wait_s < float("inf"):
        raise InvalidValue("a wait is of zero or more seconds")
    if asked.span is not None:
        _check_span(asked.span)


def check_due(asked: wire.Due) -> None:
    """What has expired is told in pages."""
    _check_page(asked.limit)


def checked_batch(batch: Batch, *, value_bytes_max: int, any_lock: bool) -> Batch:
    """A batch as an engine may have it.

    Args:
        batch: What was sent.
        value_bytes_max: The largest value that this server takes.
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
    return msgspec.structs.replace(
        batch, digest=_digest(batch), value_bytes_max=min(batch.value_bytes_max, value_bytes_max)
    )


def _digest(batch: Batch) -> bytes:
    """The caller's digest, and behind it a hash of our own: a receipt answers a request, so none may be made up.

    The caller's comes first because a semantic store knows its request again by it, see `limpet.semantic.store`.
    """
    if batch.receipt_ms is None:
        return b""
    asked = digest_of(batch.guards, batch.writes)
    return batch.digest + hashlib.blake2b(asked + batch.digest, digest_size=16).digest()


def _check_envelope(batch: Batch) -> None:
    """Check the members of a batch that a draft does not have. Its own limits are in `check_batch_limits`."""
    if len(batch.guards) > GUARDS_MAX:
        raise InvalidValue(f"a batch holds up to {GUARDS_MAX} guards, this one has {len(batch.guards)}")
    if batch.request_id is None:
        raise InvalidValue("a batch that travels has a request id, so that it can be asked for again")
    check_key(batch.request_id)
    if len(batch.digest) > DIGEST_BYTES_MAX:
        raise InvalidValue(f"a digest has up to {DIGEST_BYTES_MAX} bytes")
    if batch.receipt_ms is not None and not 0 < batch.receipt_ms <= RECEIPT_MS_MAX:
        raise InvalidValue("a receipt is kept for one millisecond to two days")
    if batch.retry_since is not None:
        check_number(batch.retry_since, "a revision")


def _check_write(write: Write, value_bytes_max: int) -> int:
    """Look at a write. Returns what its values count."""
    size_bytes = check_write(write)
    if isinstance(write, Put | Patch):
        stored = write.stored if isinstance(write, Put) else write.fields
        _check_canonical(write.key, stored)
        check_value_size(write.key, size_bytes, value_bytes_max)
    if isinstance(write, Put | Patch | Add) and isinstance(write.meta_json, bytes):
        _check_encoded(write.key, write.meta_json)
    return size_bytes


def _check_lock(write: Write, any_form: bool) -> None:
    """A lock that names no holder, or never ends, would trip whoever looks at it next."""
    match write:
        case Put():
            sound = isinstance(write.ttl_ms, int) and isinstance(write.stored, bytes) and _names_holder(write.stored)
        case Touch():
            sound = write.ttl_ms is not None
        case Add() | Patch():
            sound = False
        case _:
            sound = True
    if not sound and not any_form:
        raise InvalidValue(f"{write.key!r}: a lock has a holder and a time to live")


def is_ownership_proven(write: Write, batch: Batch) -> bool:
    """Whether a write of a lock is its holder's: the batch names the holder's token, or makes a lock that is free."""
    conditions = [guard.condition for guard in batch.guards if (guard.family, guard.key) == (write.family, write.key)]
    takes_free = isinstance(write, Put) and ABSENT in conditions
    return takes_free or any(isinstance(condition, HeldBy) for condition in conditions)


def _names_holder(stored: bytes) -> bool:
    found = codec.decode(stored)
    return isinstance(found, dict) and isinstance(found.get("holder"), str)


def _check_guard(guard: Guard) -> None:
    check_guard(guard)
    if guard.family == "receipt":
        raise InvalidValue("receipts are looked at by the engine alone")
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
    """Only what our own encoder would make is stored: values are compared by their encoding."""
    if encoded[:1] == b"\0":
        return
    try:
        sound = codec.encode_field(codec.decode(encoded)) == encoded
    except (LimpetError, RecursionError):
        sound = False
    if not sound:
        raise InvalidValue(f"the value for {key!r} is not canonical JSON")


def _check_span(span: Span) -> None:
    for bound in (span.start, span.stop or ""):
        # Behind a key, and before whatever follows it, there is U+0000.
        if "\0" in bound[:-1] or len(bound.encode()) > KEY_BYTES_MAX + 1:
            raise InvalidKey(bound[:KEY_BYTES_MAX], "no key is, or follows, this bound of a span")


def _check_page(limit: int) -> None:
    # However much is asked for: a page may end early, and says so.
    if limit < 1:
        raise InvalidValue("a page holds one or more")
