"""The eight primitives as msgpack: the requests of a client to a Limpet server, and the server's replies.

Both sides use this one module. Most structs of `limpet.model` are encoded as they are, member by member. A write, a
condition and an outcome are each one of several kinds: they are arrays that begin with the name of their kind. The
reply to a put has an entry without its value, which the caller knows.

Bytes that cannot be decoded raise `InvalidValue`, whose message names the place and never the content. Whether the
values make sense is checked elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from limpet.errors import Ambiguous, InvalidValue, LimpetError, Unavailable
from limpet.keys import Span
from limpet.model import (
    ABSENT,
    KEEP,
    PRESENT,
    Add,
    Batch,
    Commit,
    Condition,
    Delete,
    Entry,
    Equals,
    Expire,
    Family,
    FieldEquals,
    Filter,
    Guard,
    HeldBy,
    Patch,
    Put,
    Reason,
    Refusal,
    Revision,
    Sentinel,
    Touch,
    Traits,
    Version,
    Write,
)
from limpet.protocol.codes import CODES

__all__ = [
    "MEDIA",
    "UNEXPECTED",
    "Changes",
    "Commits",
    "Due",
    "Entries",
    "Expiries",
    "Failure",
    "Limits",
    "Outcome",
    "Outcomes",
    "Read",
    "Scan",
    "Served",
    "decode",
    "decode_batch",
    "decode_outcome",
    "encode",
    "encode_batch",
    "encode_outcome",
    "error_of",
    "failure_of",
]

MEDIA: Final = "application/msgpack"

Outcome = Commit | Refusal | Exception
Plain = str | int | float | None
T = TypeVar("T")


# Requests -----------------------------------------------------------------------


class Read(msgspec.Struct, frozen=True):
    """Read entries by key."""

    keys: list[str]
    family: Family = "data"


class Scan(msgspec.Struct, frozen=True):
    """Read a span in key order."""

    span: Span
    family: Family = "data"
    where: Filter | None = None
    values: bool = True
    limit: int = 500


class Commits(msgspec.Struct, frozen=True):
    """Batches of one request. Each has its own outcome in the reply; see `decode_batch`."""

    batches: list[msgspec.Raw]


class Changes(msgspec.Struct, frozen=True):
    """Read the log after a revision, and wait for changes if there are none."""

    after: int
    span: Span | None = None
    limit: int = 500
    wait_s: float = 0.0


class Due(msgspec.Struct, frozen=True):
    """List the entries that have expired."""

    limit: int = 500


# Replies ------------------------------------------------------------------------

Entries = list[Entry | None]
Expiries = list[Expire]
Outcomes = list[msgspec.Raw]


class Limits(msgspec.Struct, frozen=True):
    """The limits of one request to a server."""

    request_bytes: int
    batches: int
    keys: int
    wait_s: float


class Served(msgspec.Struct, frozen=True):
    """The traits and limits of a server."""

    traits: Traits
    limits: Limits


class Failure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """An error: its code, its message, and its other attributes."""

    code: str
    message: str
    attributes: dict[str, Plain] = {}


class _CommitReply(msgspec.Struct, frozen=True, array_like=True, tag="commit"):
    commit: Commit


class _RefusalReply(msgspec.Struct, frozen=True, array_like=True, tag="refusal"):
    """A refusal. The guard that failed is given by its index in the batch."""

    reason: Reason
    key: str
    found: Entry | None
    at_ms: int
    guard: int | None
    needs: str
    size_bytes: int


_Reply = _CommitReply | _RefusalReply | Failure


# Bytes ----------------------------------------------------------------------------

_encode = msgspec.msgpack.Encoder().encode
_decoders: Final[dict[Any, Callable[[Any], Any]]] = {}


def encode(value: Any) -> bytes:
    """Encode a struct of the model, a list of them, or one of the requests and replies above."""
    return _encode(value)


def decode(body: bytes | msgspec.Raw, shape: type[T]) -> T:
    """Decode bytes, and check them against a type."""
    decoder = _decoders.get(shape)
    if decoder is None:
        decoder = _decoders[shape] = msgspec.msgpack.Decoder(shape).decode
    try:
        found: T = decoder(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidValue(_describe(error)) from None
    return found


def _describe(error: Exception) -> str:
    """What is wrong, and where; without the content, which may be a secret."""
    _, at, path = str(error).partition(" - at ")
    kind = "does not have the expected form" if isinstance(error, msgspec.ValidationError) else "is not msgpack"
    return f"the message {kind}{at}{path}"


# Batches --------------------------------------------------------------------------

_KEEP: Final = True
"""Stands for KEEP: neither a time to live nor a meta is ever a bool."""

_Stored = bytes | dict[str, bytes]


class _Absent(msgspec.Struct, frozen=True, array_like=True, tag="absent"):
    pass


class _Present(msgspec.Struct, frozen=True, array_like=True, tag="present"):
    pass


class _Version(msgspec.Struct, frozen=True, array_like=True, tag="version"):
    number: int


class _Revision(msgspec.Struct, frozen=True, array_like=True, tag="revision"):
    number: int


class _Equals(msgspec.Struct, frozen=True, array_like=True, tag="equals"):
    stored: _Stored


class _FieldEquals(msgspec.Struct, frozen=True, array_like=True, tag="field"):
    name: str
    stored: bytes | None


class _HeldBy(msgspec.Struct, frozen=True, array_like=True, tag="held"):
    token: int


class _Guard(msgspec.Struct, frozen=True, array_like=True):
    key: str
    condition: _Absent | _Present | _Version | _Revision | _Equals | _FieldEquals | _HeldBy
    family: Family


class _Put(msgspec.Struct, frozen=True, array_like=True, tag="put"):
    key: str
    stored: _Stored
    ttl_ms: int | bool | None
    meta_json: bytes | bool | None
    family: Family


class _Add(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    key: str
    by: int
    ttl_ms: int | bool | None
    meta_json: bytes | bool | None
    family: Family


class _Patch(msgspec.Struct, frozen=True, array_like=True, tag="patch"):
    key: str
    fields: dict[str, bytes]
    unset: tuple[str, ...]
    if_exists: bool
    ttl_ms: int | bool | None
    meta_json: bytes | bool | None
    family: Family


class _Touch(msgspec.Struct, frozen=True, array_like=True, tag="touch"):
    key: str
    ttl_ms: int | None
    family: Family


class _Delete(msgspec.Struct, frozen=True, array_like=True, tag="delete"):
    key: str
    take: bool
    family: Family


class _Expire(msgspec.Struct, frozen=True, array_like=True, tag="expire"):
    key: str
    revision: int
    family: Family


class _Batch(msgspec.Struct, frozen=True, array_like=True):
    guards: list[_Guard]
    writes: list[_Put | _Add | _Patch | _Touch | _Delete | _Expire]
    request_id: str | None
    digest: bytes
    receipt_ms: int | None
    retry_since: int | None
    value_bytes_max: int
    is_brief: bool = False


def encode_batch(batch: Batch) -> bytes:
    """Encode a batch."""
    guards = [(guard.key, _encode_condition(guard.condition), guard.family) for guard in batch.guards]
    writes = [_encode_write(write) for write in batch.writes]
    about = (batch.request_id, batch.digest, batch.receipt_ms, batch.retry_since, batch.value_bytes_max, batch.is_brief)
    return _encode((guards, writes, *about))


def _encode_condition(condition: Condition) -> Sequence[Any]:
    match condition:
        case Version(number):
            return "version", number
        case Revision(number):
            return "revision", number
        case HeldBy(token):
            return "held", token
        case Equals(stored):
            return "equals", _plain(stored)
        case FieldEquals(name, stored):
            return "field", name, stored if isinstance(stored, bytes) else None
        case Sentinel.PRESENT:
            return ("present",)
        case Sentinel.ABSENT:
            return ("absent",)


def _encode_write(write: Write) -> Sequence[Any]:
    key, family = write.key, write.family
    match write:
        case Put():
            return "put", key, _plain(write.stored), _encode_keep(write.ttl_ms), _encode_keep(write.meta_json), family
        case Add():
            return "add", key, write.by, _encode_keep(write.ttl_ms), _encode_keep(write.meta_json), family
        case Patch():
            about = (dict(write.fields), write.unset, write.if_exists)
            return "patch", key, *about, _encode_keep(write.ttl_ms), _encode_keep(write.meta_json), family
        case Touch():
            return "touch", key, write.ttl_ms, family
        case Delete():
            return "delete", key, write.take, family
        case Expire():
            return "expire", key, write.revision, family


def _plain(stored: bytes | Mapping[str, bytes]) -> _Stored:
    return stored if isinstance(stored, bytes) else dict(stored)


def _encode_keep(item: Any) -> Any:
    return _KEEP if item is KEEP else item


def decode_batch(body: bytes | msgspec.Raw) -> Batch:
    """Decode a batch."""
    sent = decode(body, _Batch)
    return Batch(
        tuple(Guard(guard.key, _decode_condition(guard.condition), guard.family) for guard in sent.guards),
        tuple(_decode_write(write) for write in sent.writes),
        sent.request_id,
        sent.digest,
        sent.receipt_ms,
        sent.retry_since,
        sent.value_bytes_max,
        sent.is_brief,
    )


def _decode_condition(sent: Any) -> Condition:
    match sent:
        case _Version(number):
            return Version(number)
        case _Revision(number):
            return Revision(number)
        case _HeldBy(token):
            return HeldBy(token)
        case _Equals(stored):
            return Equals(stored)
        case _FieldEquals(name, stored):
            return FieldEquals(name, ABSENT if stored is None else stored)
        case _Present():
            return PRESENT
        case _:
            return ABSENT


def _decode_write(sent: Any) -> Write:
    match sent:
        case _Put():
            return Put(sent.key, sent.stored, _decode_keep(sent.ttl_ms), _decode_keep(sent.meta_json), sent.family)
        case _Add():
            return Add(sent.key, sent.by, _decode_keep(sent.ttl_ms), _decode_keep(sent.meta_json), sent.family)
        case _Patch():
            about = (sent.fields, sent.unset, sent.if_exists)
            return Patch(sent.key, *about, _decode_keep(sent.ttl_ms), _decode_keep(sent.meta_json), sent.family)
        case _Touch():
            return Touch(sent.key, sent.ttl_ms, sent.family)
        case _Delete():
            return Delete(sent.key, sent.take, sent.family)
        case _:
            return Expire(sent.key, sent.revision, sent.family)


def _decode_keep(item: Any) -> Any:
    if item is False:
        raise InvalidValue(
            "the message does not have the expected form: true stands for keep, and false has no meaning"
        )
    return KEEP if item is _KEEP else item


# Outcomes -------------------------------------------------------------------------


def encode_outcome(outcome: Outcome, batch: Batch) -> msgspec.Raw:
    """Encode the outcome of a batch."""
    reply: _Reply
    if isinstance(outcome, Commit):
        reply = _CommitReply(_without_puts(outcome, batch))
    elif isinstance(outcome, Refusal):
        index = None if outcome.guard is None else batch.guards.index(outcome.guard)
        about = (outcome.reason, outcome.key, _abridge(outcome.found, batch), outcome.at_ms)
        reply = _RefusalReply(*about, index, outcome.needs, outcome.size_bytes)
    else:
        reply = failure_of(outcome)
    return msgspec.Raw(_encode(reply))


def decode_outcome(body: msgspec.Raw, batch: Batch) -> Commit | Refusal | Failure:
    """Decode the outcome of a batch, and add the values that its caller has put."""
    reply: _Reply = decode(body, _Reply)  # type: ignore[arg-type]
    match reply:
        case _CommitReply(commit):
            return _with_puts(commit, batch)
        case _RefusalReply():
            if reply.guard is not None and not 0 <= reply.guard < len(batch.guards):
                raise InvalidValue("the server reports a guard that the batch does not have")
            guard = None if reply.guard is None else batch.guards[reply.guard]
            about = (reply.reason, reply.key, reply.found, reply.at_ms)
            return Refusal(*about, guard, reply.needs, reply.size_bytes)
        case _:
            return reply


def _without_puts(commit: Commit, batch: Batch) -> Commit:
    entries = tuple(
        entry.without_value() if entry is not None and isinstance(write, Put) else _abridge(entry, batch)
        for entry, write in zip(commit.entries, batch.writes, strict=True)
    )
    return msgspec.structs.replace(commit, entries=entries)


def _abridge(entry: Entry | None, batch: Batch) -> Entry | None:
    """An entry as the reply to a batch has it: for a brief batch, a record without its fields."""
    return entry.without_value() if entry is not None and batch.is_brief and entry.kind == "record" else entry


def _with_puts(commit: Commit, batch: Batch) -> Commit:
    if not len(commit.entries) == len(commit.ended) == len(batch.writes):
        raise InvalidValue("the server reports other writes than the batch has")
    entries = tuple(
        msgspec.structs.replace(entry, stored=write.stored) if entry is not None and isinstance(write, Put) else entry
        for entry, write in zip(commit.entries, batch.writes, strict=True)
    )
    return msgspec.structs.replace(commit, entries=entries)


# Errors ---------------------------------------------------------------------------

_KINDS: Final = {kind.code: kind for kind in CODES}
UNEXPECTED: Final = "error"


def failure_of(error: Exception) -> Failure:
    """An error for the wire. Of an error that is not ours nothing is sent: its message may contain anything."""
    if not isinstance(error, LimpetError):
        return Failure(UNEXPECTED, "internal error")
    attributes = {name: item for name, item in vars(error).items() if isinstance(item, Plain)}
    return Failure(error.code, str(error), attributes)


def error_of(failure: Failure) -> LimpetError | None:
    """The error that a failure stands for, as far as it means the same on this side; None for an unknown code."""
    kind = _KINDS.get(failure.code)
    if kind is None:
        return None
    if failure.code == "closed":
        # The server closes its engine when it stops. This engine goes on when a server is there again.
        return Unavailable(f"the server is closing: {failure.message}")
    if kind is Ambiguous:
        request_id, since = failure.attributes.get("request_id"), failure.attributes.get("since")
        return Ambiguous(
            failure.message,
            request_id=request_id if isinstance(request_id, str) else None,
            since=since if isinstance(since, int) else 0,
        )
    error = kind.__new__(kind, failure.message)
    error.args = (failure.message,)
    error.__dict__.update(_DEFAULTS.get(failure.code, {}), **failure.attributes)
    return error


# Attributes that our code reads from these errors. An older server may not send them.
_DEFAULTS: Final[dict[str, dict[str, Plain]]] = {"rate_limited": {"retry_after": 1.0}, "compacted": {"oldest": None}}
