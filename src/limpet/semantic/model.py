"""The values of semantic entries: the envelope, the semantics, and their errors.

Documents are spelt in camelCase, as on every wire; names in Python are not. A document is checked against its struct,
and an error names the member that is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec

from limpet.clock import ttl_to_ms
from limpet.codec import INT_MAX, encode_field
from limpet.errors import Conflict, InvalidTTL, InvalidValue, TypeMismatch
from limpet.model import Entry
from limpet.protocol.json import plain

__all__ = [
    "BatchItem",
    "Delete",
    "Envelope",
    "Held",
    "InvalidField",
    "Put",
    "Semantics",
    "VersionConflict",
    "check_expected_version",
    "check_value",
    "check_writer",
    "directive_of",
    "envelope_of",
    "meta_of",
    "parse_document",
    "semantics_of",
]

Purpose = Literal["checkpoint", "feature_flag", "lock", "cursor"]
"""What an entry is for."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]

T = TypeVar("T")

_WRITER: Final = re.compile(r"[^\s:]{1,128}(?::\S{1,128})?\Z")
_AT: Final = re.compile(r"\A(?P<problem>.*) - at `\$\.?(?P<path>[^`]*)`\Z", re.DOTALL)
_MEMBER: Final = re.compile(r"(?:missing required|contains unknown) field `(?P<name>[^`]*)`")


class InvalidField(InvalidValue):
    """A request that breaks the shape of the envelope.

    Attributes:
        field: The member that is wrong, as in the document: ``value``, ``semantics.purpose``, ``lastWriter`` …
        problem: What is wrong with it.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field, self.problem = field, problem

    def to_dict(self) -> dict[str, Any]:
        """The error as a document."""
        return {"code": self.code, "field": self.field, "message": str(self)}


class VersionConflict(Conflict):
    """The key does not have the version that was expected, or a request id came back with another request.

    Nothing was written. Reload, and decide.

    Attributes:
        key: The key.
        expected_version: The version that the caller expected; 0 means that there should be no such key.
        version: The version found; None when there is no such key.
        revision: The revision found; None when there is no such key.
        value: The value found; None when there is no such key.
        reason: ``guard``; ``lock_expired`` where an entry of purpose lock was to be renewed and is over;
            ``stale_request`` where the request id was used before for another request.
        request_id: The request id, as in the log.
        is_value_public: Whether a server may send the value to its caller. False until `reveal_if` has allowed it.
    """

    code = "version_conflict"
    is_value_public = False
    # The core has two reasons; an expired lock is a guard that failed.
    reason: Literal["guard", "stale_request", "lock_expired"]  # type: ignore[assignment]

    def __init__(
        self,
        key: str,
        *,
        expected_version: int | None,
        current: Entry | None,
        request_id: str,
        reason: Literal["guard", "stale_request", "lock_expired"] = "guard",
    ) -> None:
        expected = "no such key" if expected_version == 0 else f"version {expected_version}"
        super().__init__(key, expected=expected, current=current)
        found = "there is no such key" if current is None else f"found version {current.version}"
        self.args = (
            {
                "guard": f"conflict on {key!r}: expected {expected}, {found}. Reload it and decide",
                "lock_expired": f"the lock {key!r} expired: acquire it again before going on",
                "stale_request": f"request id {request_id!r} was used before for another request: make a new one",
            }[reason],
        )
        self.reason = reason
        self.expected_version = expected_version
        self.request_id = request_id

    @property
    def version(self) -> int | None:
        """The version found."""
        return self.actual_version

    @property
    def revision(self) -> int | None:
        """The revision found."""
        return self.actual_revision

    @property
    def value(self) -> Any:
        """The value found, decoded afresh."""
        return None if self.current is None else self.current.value

    def to_dict(self, *, with_value: bool = True) -> dict[str, Any]:
        """The conflict as a document; without its value for a caller that may not read it."""
        document = {
            "code": self.code,
            "key": self.key,
            "reason": self.reason,
            "expectedVersion": self.expected_version,
            "version": self.version,
            "revision": self.revision,
            "requestId": self.request_id,
            "message": str(self),
        }
        return {**document, "value": self.value} if with_value else document

    def public_fields(self) -> dict[str, Any]:
        """The document without its message, and with the value found only for a caller that may see it."""
        fields = self.to_dict(with_value=False)
        del fields["message"]
        return {**fields, "value": plain(self.value)} if self.is_value_public else fields

    def reveal_if(self, may_see: Callable[[str], bool]) -> None:
        """See `LimpetError.reveal_if`."""
        self.is_value_public = may_see(self.key)


class Semantics(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """What an entry is for, who makes it and who should use it.

    Attributes:
        purpose: ``checkpoint``, ``feature_flag``, ``lock`` or ``cursor``.
        producer: Who makes it.
        consumer_hints: Who should use it.
        ttl_seconds: After how many seconds it expires; None for never.
    """

    purpose: Purpose
    producer: Name | None = None
    consumer_hints: Annotated[tuple[Name, ...], msgspec.Meta(max_length=16)] = ()
    ttl_seconds: int | float | None = None

    @property
    def ttl_ms(self) -> int | None:
        """After how many milliseconds it expires."""
        return None if self.ttl_seconds is None else ttl_to_ms(self.ttl_seconds)

    def to_dict(self) -> dict[str, Any]:
        """The semantics as a document."""
        document: dict[str, Any] = msgspec.to_builtins(self)
        document["consumerHints"] = [*self.consumer_hints]
        return {name: member for name, member in document.items() if member is not None}


class Envelope(msgspec.Struct, frozen=True):
    """An entry as the document describes it.

    Attributes:
        key: The key.
        value: The value: a JSON object. None where only the rest was requested.
        version: Counts the writes of this key. Starts at 1 again when a key ended and is made anew.
        revision: Grows with every change of the namespace, over all ends and beginnings.
        last_writer: ``<agent>:<directive>``, or a service account.
        semantics: What it is for.
        request_id: The request that wrote it.
        updated_at: When it was written, by the store's clock, UTC.
        spec_ref: The specification or decision that governs it.
        expires_at: When it expires, UTC; None for never.
        token: The revision that began it. Renewing keeps it: of a lock it is the fencing token.
        replayed: Whether this is the result of an earlier request that was repeated.
    """

    key: str
    value: dict[str, Any] | None
    version: int
    revision: int
    last_writer: str
    semantics: Semantics
    request_id: str
    updated_at: datetime
    spec_ref: str | None = None
    expires_at: datetime | None = None
    token: int = 0
    replayed: bool = False

    def to_dict(self, *, with_value: bool = True) -> dict[str, Any]:
        """The envelope as a document; without its value for a caller that may not read it."""
        document: dict[str, Any] = {
            "key": self.key,
            "value": self.value,
            "version": self.version,
            "revision": self.revision,
            "lastWriter": self.last_writer,
            "semantics": self.semantics.to_dict(),
            "requestId": self.request_id,
            "specRef": self.spec_ref,
            "updatedAt": _iso(self.updated_at),
            "expiresAt": None if self.expires_at is None else _iso(self.expires_at),
            "token": self.token if self.semantics.purpose == "lock" else None,
        }
        if not with_value:
            del document["value"]
        return {name: member for name, member in document.items() if member is not None}

    def __repr__(self) -> str:
        # A repr ends up in logs, and a value may be a secret.
        return f"Envelope({self.key!r}, version={self.version}, revision={self.revision})"


class Held(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of purpose lock that must still be held, by its key and token."""

    key: str
    token: Annotated[int, msgspec.Meta(ge=0, le=INT_MAX)]


def _iso(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Put(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True, tag_field="op", tag="put"):
    """A put of a batch."""

    key: str
    value: dict[str, Any]
    semantics: Semantics
    expected_version: int | None = None
    spec_ref: str | None = None

    def __repr__(self) -> str:
        return f"Put({self.key!r})"


class Delete(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True, tag_field="op", tag="delete"):
    """A delete of a batch."""

    key: str
    expected_version: int | None = None


BatchItem = Put | Delete

# Checking ---------------------------------------------------------------------


def parse_document(document: object, kind: type[T], field: str = "") -> T:
    """A document as a struct, or `InvalidField` naming the member that is wrong."""
    try:
        return msgspec.convert(document, kind)
    except UnicodeEncodeError:
        raise InvalidField(field or "request", "it holds a lone surrogate, which UTF-8 cannot carry") from None
    except msgspec.ValidationError as error:
        found = _AT.match(str(error))
        problem, path = (str(error), "") if found is None else (found["problem"], found["path"])
        member = _MEMBER.search(problem)
        names = (field, path, "" if member is None else member["name"])
        raise InvalidField(".".join(filter(None, names)) or "request", problem) from None


def semantics_of(semantics: Semantics | dict[str, Any]) -> Semantics:
    """Semantics, checked."""
    # A struct is checked too: its constructor does not check types.
    checked = parse_document(
        msgspec.to_builtins(semantics) if isinstance(semantics, Semantics) else semantics, Semantics, "semantics"
    )
    try:
        ttl_ms = checked.ttl_ms
    except InvalidTTL as error:
        raise InvalidField("semantics.ttlSeconds", str(error)) from None
    if checked.purpose == "lock" and ttl_ms is None:
        raise InvalidField("semantics.ttlSeconds", "a lock needs one, or it would outlive its holder")
    return checked


def check_writer(writer: object) -> str:
    """Return the writer: ``<agent>:<directive>``, or a service account."""
    if not isinstance(writer, str) or not _WRITER.match(writer):
        raise InvalidField("lastWriter", "a writer is <agent>:<directive> or a service account, without whitespace")
    return writer


def directive_of(writer: str) -> str:
    """The directive of a writer; of a service account, the account."""
    return writer.partition(":")[2] or writer


def check_value(value: object) -> dict[str, Any]:
    """Return the value: a JSON object."""
    if type(value) is not dict:
        raise InvalidField("value", f"a value is a JSON object, not of type {type(value).__name__}")
    try:
        encode_field(value)
    except InvalidValue as error:
        raise InvalidField("value", str(error)) from None
    return value


def check_expected_version(version: object) -> int | None:
    """Return the version that is expected: None for any, 0 for no such key."""
    if version is None or (type(version) is int and 0 <= version <= INT_MAX):
        return version
    raise InvalidField("expectedVersion", "it is a version, 0 for no such key, or none for any version")


# Stored -------------------------------------------------------------------------
#
# An envelope is stored as an entry: its value is the entry's value, and the rest is in its meta.


class _Meta(msgspec.Struct, rename="camel"):
    last_writer: str
    semantics: Semantics
    request_id: str
    spec_ref: str | None = None


def meta_of(
    writer: str, semantics: Semantics, request_id: str, spec_ref: str | None, value_hash: str | None = None
) -> dict[str, Any]:
    """The meta of an entry; with the hash of its value where it is audited."""
    meta: dict[str, Any] = {"lastWriter": writer, "semantics": semantics.to_dict(), "requestId": request_id}
    for name, member in (("specRef", spec_ref), ("hash", value_hash)):
        if member is not None:
            meta[name] = member
    return meta


def envelope_of(entry: Entry, *, replayed: bool = False) -> Envelope:
    """An entry in its envelope. Raises `TypeMismatch` for one that was put without an envelope."""
    value = entry.value
    try:
        meta = msgspec.convert(entry.meta, _Meta)
    except msgspec.ValidationError:
        raise TypeMismatch(entry.key, expected="an envelope", found="an entry without one") from None
    if not isinstance(value, dict | None):
        raise TypeMismatch(entry.key, expected="an envelope", found="an entry without one")
    return Envelope(
        entry.key,
        value,
        entry.version,
        entry.revision,
        meta.last_writer,
        meta.semantics,
        meta.request_id,
        entry.updated_at,
        meta.spec_ref,
        entry.expires_at,
        entry.created_revision,
        replayed,
    )
