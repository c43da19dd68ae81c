"""The ten primitives as msgpack: the requests of a client to a Limpet server, and the server's replies.

Both sides use this one module. Batches, outcomes and everything else of `limpet.model` are encoded as they are: see
there. A reply leaves out what its caller knows, the values that the batch has put.

Bytes that cannot be decoded raise `InvalidValue`, whose message names the place and never the content. Whether the
values make sense is checked elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import msgspec

from limpet.errors import Ambiguous, InvalidValue, LimpetError, Unavailable
from limpet.keys import Span
from limpet.model import KEEP, Add, Batch, Commit, Entry, Expire, Family, Filter, Patch, Put, Refusal, Traits
from limpet.protocol.codes import CODES
from limpet.transition import omit_puts, restore_puts

__all__ = [
    "MEDIA",
    "UNEXPECTED",
    "Changes",
    "Commits",
    "Count",
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
    """Read a span in key order, or in its reverse."""

    span: Span
    family: Family = "data"
    where: Filter | None = None
    values: bool = True
    limit: int = 500
    reverse: bool = False


class Count(msgspec.Struct, frozen=True):
    """Count the entries of a span."""

    span: Span
    family: Family = "data"


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


_Reply = Commit | Refusal | Failure


# Bytes ----------------------------------------------------------------------------


def _encode_mapping(item: object) -> dict[str, bytes]:
    """A record may be any mapping; msgspec knows dictionaries."""
    if isinstance(item, Mapping):
        return dict(item)
    raise TypeError(f"something of type {type(item).__name__} has no form in msgpack")


_encode = msgspec.msgpack.Encoder(enc_hook=_encode_mapping).encode
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
    _, at, path = str(error).rpartition(" - at ")
    kind = "does not have the expected form" if isinstance(error, msgspec.ValidationError) else "is not msgpack"
    return f"the message {kind}{at}{path if at else ''}"


# Batches --------------------------------------------------------------------------


def encode_batch(batch: Batch) -> bytes:
    """Encode a batch."""
    return _encode(batch)


def decode_batch(body: bytes | msgspec.Raw) -> Batch:
    """Decode a batch."""
    batch = decode(body, Batch)
    for write in batch.writes:
        if isinstance(write, Put | Add | Patch) and write.ttl_ms == KEEP.value:
            # A time to live is decoded as a number. Nothing else has this write yet, so that it may still change.
            msgspec.structs.force_setattr(write, "ttl_ms", KEEP)
    return batch


# Outcomes -------------------------------------------------------------------------


def encode_outcome(outcome: Outcome, batch: Batch) -> msgspec.Raw:
    """Encode the outcome of a batch."""
    reply: _Reply
    if isinstance(outcome, Commit):
        reply = omit_puts(outcome, batch)
        if batch.is_brief:
            reply = msgspec.structs.replace(reply, entries=tuple(map(_abridge, reply.entries)))
    elif isinstance(outcome, Refusal):
        reply = msgspec.structs.replace(outcome, found=_abridge(outcome.found)) if batch.is_brief else outcome
    else:
        reply = failure_of(outcome)
    return msgspec.Raw(_encode(reply))


def _abridge(entry: Entry | None) -> Entry | None:
    """An entry as the reply to a brief batch has it: a record without its fields."""
    return entry.without_value() if entry is not None and entry.kind == "record" else entry


def decode_outcome(body: msgspec.Raw, batch: Batch) -> Commit | Refusal | Failure:
    """Decode the outcome of a batch, and add the values that its caller has put."""
    reply: _Reply = decode(body, _Reply)  # type: ignore[arg-type]
    if isinstance(reply, Commit):
        if not len(reply.entries) == len(reply.ended) == len(batch.writes):
            raise InvalidValue("the server reports other writes than the batch has")
        return restore_puts(reply, batch)
    if isinstance(reply, Refusal) and reply.guard is not None and reply.guard not in batch.guards:
        raise InvalidValue("the server reports a guard that the batch does not have")
    return reply


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
