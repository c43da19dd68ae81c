"""The eight primitives as msgpack: what a client of a Limpet server sends, and what the server answers.

Both sides use this one module. The nouns of `limpet.model` travel as they are, member by member, but for the few that
are one of several kinds: a write, a condition and an outcome are arrays that begin with the name of their kind. A put
answers with an entry without its value, which whoever put it knows.

What cannot be read is `InvalidValue`, which says where and never what. Whether it makes sense is not asked here.
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


# What is asked ------------------------------------------------------------------


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
    """Batches that travel together. Each is answered by an outcome of its own; see `decode_batch`."""

    batches: list[msgspec.Raw]


class Changes(msgspec.Struct, frozen=True):
    """Read the log after a revision, and wait for news if there is none."""

    after: int
    span: Span | None = None
    limit: int = 500
    wait_s: float = 0.0


class Due(msgspec.Struct, frozen=True):
    """What has expired."""

    limit: int = 500


# What is answered ---------------------------------------------------------------

Entries = list[Entry | None]
Expiries = list[Expire]
Outcomes = list[msgspec.Raw]


class Limits(msgspec.Struct, frozen=True):
    """What one request may ask of a server."""

    request_bytes: int
    batches: int
    keys: int
    wait_s: float


class Served(msgspec.Struct, frozen=True):
    """What a server says of itself."""

    traits: Traits
    limits: Limits


class Failure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """An error: its code, its message, and what else it carries."""

    code: str
    message: str
    attributes: dict[str, Plain] = {}


class _Done(msgspec.Struct, frozen=True, array_like=True, tag="commit"):
    commit: Commit


class _Refused(msgspec.Struct, frozen=True, array_like=True, tag="refusal"):
    """The guard that failed is told by its place in the batch."""

    reason: Reason
    key: str
    found: Entry | None
    at_ms: int
    guard: int | None
    needs: str
    size_bytes: int


_Answer = _Done | _Refused | Failure


# Bytes ----------------------------------------------------------------------------

_encode = msgspec.msgpack.Encoder().encode
_decoders: Final[dict[Any, Callable[[Any], Any]]] = {}


def encode(noun: Any) -> bytes:
    """A noun that travels as it is, a list of them, or one of the requests and answers above."""
    return _encode(noun)


def decode(body: bytes | msgspec.Raw, shape: type[T]) -> T:
    """What was encoded, held to its shape."""
    decoder = _decoders.get(shape)
    if decoder is None:
        decoder = _decoders[shape] = msgspec.msgpack.Decoder(shape).decode
    try:
        found: T = decoder(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidValue(_problem(error)) from None
    return found


def _problem(error: Exception) -> str:
    """What is wrong, and where; not what was found there, which may be a secret."""
    _, at, path = str(error).partition(" - at ")
    kind = "not of the shape that is asked for" if isinstance(error, msgspec.ValidationError) else "not msgpack"
    return f"what was sent is {kind}{at}{path}"


# Batches --------------------------------------------------------------------------

_KEPT: Final = True
"""Stands for KEEP. There is no time to live, and no meta, of this kind."""

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
    """A batch as it travels."""
    guards = [(guard.key, _condition(guard.condition), guard.family) for guard in batch.guards]
    writes = [_written(write) for write in batch.writes]
    about = (batch.request_id, batch.digest, batch.receipt_ms, batch.retry_since, batch.value_bytes_max, batch.is_brief)
    return _encode((guards, writes, *about))


def _condition(condition: Condition) -> Sequence[Any]:
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


def _written(write: Write) -> Sequence[Any]:
    key, family = write.key, write.family
    match write:
        case Put():
            return "put", key, _plain(write.stored), _kept(write.ttl_ms), _kept(write.meta_json), family
        case Add():
            return "add", key, write.by, _kept(write.ttl_ms), _kept(write.meta_json), family
        case Patch():
            about = (dict(write.fields), write.unset, write.if_exists)
            return "patch", key, *about, _kept(write.ttl_ms), _kept(write.meta_json), family
        case Touch():
            return "touch", key, write.ttl_ms, family
        case Delete():
            return "delete", key, write.take, family
        case Expire():
            return "expire", key, write.revision, family


def _plain(stored: bytes | Mapping[str, bytes]) -> _Stored:
    return stored if isinstance(stored, bytes) else dict(stored)


def _kept(item: Any) -> Any:
    return _KEPT if item is KEEP else item


def decode_batch(body: bytes | msgspec.Raw) -> Batch:
    """A batch that has travelled."""
    sent = decode(body, _Batch)
    return Batch(
        tuple(Guard(guard.key, _expected(guard.condition), guard.family) for guard in sent.guards),
        tuple(_write(write) for write in sent.writes),
        sent.request_id,
        sent.digest,
        sent.receipt_ms,
        sent.retry_since,
        sent.value_bytes_max,
        sent.is_brief,
    )


def _expected(sent: Any) -> Condition:
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


def _write(sent: Any) -> Write:
    match sent:
        case _Put():
            return Put(sent.key, sent.stored, _keep(sent.ttl_ms), _keep(sent.meta_json), sent.family)
        case _Add():
            return Add(sent.key, sent.by, _keep(sent.ttl_ms), _keep(sent.meta_json), sent.family)
        case _Patch():
            about = (sent.fields, sent.unset, sent.if_exists)
            return Patch(sent.key, *about, _keep(sent.ttl_ms), _keep(sent.meta_json), sent.family)
        case _Touch():
            return Touch(sent.key, sent.ttl_ms, sent.family)
        case _Delete():
            return Delete(sent.key, sent.take, sent.family)
        case _:
            return Expire(sent.key, sent.revision, sent.family)


def _keep(item: Any) -> Any:
    if item is False:
        raise InvalidValue("what was sent is not of the shape that is asked for: true keeps, and false is nothing")
    return KEEP if item is _KEPT else item


# Outcomes -------------------------------------------------------------------------


def encode_outcome(outcome: Outcome, batch: Batch) -> msgspec.Raw:
    """What became of a batch."""
    answer: _Answer
    if isinstance(outcome, Commit):
        answer = _Done(_without_puts(outcome, batch))
    elif isinstance(outcome, Refusal):
        place = None if outcome.guard is None else batch.guards.index(outcome.guard)
        about = (outcome.reason, outcome.key, _abridged(outcome.found, batch), outcome.at_ms)
        answer = _Refused(*about, place, outcome.needs, outcome.size_bytes)
    else:
        answer = failure_of(outcome)
    return msgspec.Raw(_encode(answer))


def decode_outcome(body: msgspec.Raw, batch: Batch) -> Commit | Refusal | Failure:
    """What became of a batch, with what its sender knows."""
    answer: _Answer = decode(body, _Answer)  # type: ignore[arg-type]
    match answer:
        case _Done(commit):
            return _with_puts(commit, batch)
        case _Refused():
            if answer.guard is not None and not 0 <= answer.guard < len(batch.guards):
                raise InvalidValue("the server tells of a guard that the batch does not have")
            guard = None if answer.guard is None else batch.guards[answer.guard]
            about = (answer.reason, answer.key, answer.found, answer.at_ms)
            return Refusal(*about, guard, answer.needs, answer.size_bytes)
        case _:
            return answer


def _without_puts(commit: Commit, batch: Batch) -> Commit:
    entries = tuple(
        entry.without_value() if entry is not None and isinstance(write, Put) else _abridged(entry, batch)
        for entry, write in zip(commit.entries, batch.writes, strict=True)
    )
    return msgspec.structs.replace(commit, entries=entries)


def _abridged(entry: Entry | None, batch: Batch) -> Entry | None:
    """An entry as it is told to the sender of a batch: of a brief one, a record without its fields."""
    return entry.without_value() if entry is not None and batch.is_brief and entry.kind == "record" else entry


def _with_puts(commit: Commit, batch: Batch) -> Commit:
    if not len(commit.entries) == len(commit.ended) == len(batch.writes):
        raise InvalidValue("the server tells of other writes than the batch has")
    entries = tuple(
        msgspec.structs.replace(entry, stored=write.stored) if entry is not None and isinstance(write, Put) else entry
        for entry, write in zip(commit.entries, batch.writes, strict=True)
    )
    return msgspec.structs.replace(commit, entries=entries)


# Errors ---------------------------------------------------------------------------

_KINDS: Final = {kind.code: kind for kind in CODES}
UNEXPECTED: Final = "error"


def failure_of(error: Exception) -> Failure:
    """An error as it travels. Of one that is not ours nothing is told: it may hold anything."""
    if not isinstance(error, LimpetError):
        return Failure(UNEXPECTED, "internal error")
    attributes = {name: item for name, item in vars(error).items() if isinstance(item, Plain)}
    return Failure(error.code, str(error), attributes)


def error_of(failure: Failure) -> LimpetError | None:
    """The error that it was on the server, as far as it means the same here; None when nobody knows what it was."""
    kind = _KINDS.get(failure.code)
    if kind is None:
        return None
    if failure.code == "closed":
        # The server's handle ends with the server. Ours goes on when there is a server again.
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


# What code of ours asks these errors for. An older server may not tell it.
_DEFAULTS: Final[dict[str, dict[str, Plain]]] = {"rate_limited": {"retry_after": 1.0}, "compacted": {"oldest": None}}
