"""The shapes of requests, member by member.

A request is checked against its shape here and nowhere else, before any of it reaches an engine. A message names the
member that is wrong and never shows its value.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from limpet.codec import DEPTH_MAX, INT_MAX, INT_MIN
from limpet.draft import Expectation, equals
from limpet.draft import field as field_test
from limpet.errors import InvalidValue
from limpet.model import ABSENT, PRESENT, Filter, Revision, Version
from limpet.protocol.json import field_of
from limpet.semantic.keys import KEY_MAX
from limpet.semantic.model import Held, InvalidField, Semantics, parse_document

TTL = int | float | None
Bytes = bytes
"""Raw bytes, which JSON carries as base64: msgspec decodes it."""
Int64 = Annotated[int, msgspec.Meta(ge=INT_MIN, le=INT_MAX)]
"""An integer that every engine can compare."""
KV_PAGE_MAX: Final = 1000
REASON_MAX: Final = 500
KV_KEY: Final = {
    "type": "string",
    "pattern": r"^tenant/[a-z0-9._~@:+=-]+/project/[a-z0-9._~@:+=-]+(/[a-z0-9._~@:+=-]+)+$",
    "maxLength": KEY_MAX,
}
# For descriptions alone: `limpet.semantic.keys` checks a key, and names the part that is wrong.
KvKey = Annotated[str, msgspec.Meta(extra_json_schema=KV_KEY)]


class InvalidJSON(InvalidValue):
    """The body of a request is not a JSON object."""


class MissingField(InvalidValue):
    """A member that the request needs is missing."""

    def __init__(self, name: str) -> None:
        super().__init__(f"Missing required field: {name}")
        self.field = name


class InvalidSubject(InvalidValue):
    """No operation has this subject, or its reply would go to a subject of another caller."""

    def __init__(self, subject: str, problem: str = "Invalid subject format") -> None:
        shown = subject if len(subject) <= 120 else f"{subject[:117]}..."
        super().__init__(f"{problem}: {shown}")


class InvalidReply(InvalidValue):
    """The reply subject is no inbox of the caller. It gets no reply, and the request is not run."""

    def __init__(self, plugin: str) -> None:
        super().__init__(f"a reply goes to a subject below _INBOX or _INBOX_{plugin}: choose such a reply subject")


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request. Unknown members are ignored, as the first plugins were promised."""


class Strict(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request in which an unknown member is an error."""


class Expect(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a key must be: one of these."""

    version: Int64 | UnsetType = UNSET
    revision: Int64 | UnsetType = UNSET
    absent: bool | UnsetType = UNSET
    value: Any = UNSET
    field: str | UnsetType = UNSET
    equals: Any = UNSET

    def expectation(self) -> Expectation:
        """The expectation as a store takes it."""
        given = (self.version, self.revision, self.absent, self.value, self.field)
        if sum(one is not UNSET for one in given) != 1 or (self.equals is not UNSET) != (self.field is not UNSET):
            raise InvalidValue(
                "expect has one of version, revision, absent, value, or field together with equals", path="$.expect"
            )
        if not isinstance(self.version, UnsetType):
            return Version(self.version)
        if not isinstance(self.revision, UnsetType):
            return Revision(self.revision)
        if not isinstance(self.absent, UnsetType):
            return ABSENT if self.absent else PRESENT
        if not isinstance(self.field, UnsetType):
            expected: Filter = field_test(self.field) == field_of(self.equals)
            return expected
        return equals(self.value)


class Fence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A lock that must be held under this token."""

    name: str
    token: Int64


class Guarded(Strict, frozen=True, kw_only=True):
    """A write, with what it expects, its fence and its request id."""

    expect: Expect | None = None
    fence: Fence | None = None
    request_id: str | None = None


class Get(Request, frozen=True, kw_only=True):
    """Read a value."""

    key: str


class Set(Request, frozen=True, kw_only=True):
    """Replace a value, whatever there is."""

    key: str
    value: Any
    ttl: TTL = None
    request_id: str | None = None


class Delete(Request, frozen=True, kw_only=True):
    """End a key."""

    key: str
    expect: Expect | None = None
    fence: Fence | None = None
    request_id: str | None = None


class DeletePrefix(Strict, frozen=True, kw_only=True):
    """End the keys that start with a prefix, as many as the limit allows."""

    prefix: str
    limit: int = 1000
    fence: Fence | None = None


class List(Request, frozen=True, kw_only=True):
    """A page of keys."""

    prefix: str = ""
    limit: int = 1000
    after: str | None = None
    reverse: bool = False


class Entry(Strict, frozen=True, kw_only=True):
    """Read a value with its version, revision, times and meta; or these alone."""

    key: str
    with_value: bool = True


class Remaining(Strict, frozen=True, kw_only=True):
    """Read how long a key has left."""

    key: str


class Entries(Strict, frozen=True, kw_only=True):
    """Read several keys at one moment."""

    keys: list[str]
    with_value: bool = True


class Put(Guarded, frozen=True, kw_only=True):
    """Replace a value, or a record, or raw bytes: the one that is given."""

    key: str
    value: Any = UNSET
    fields: dict[str, Any] | UnsetType = UNSET
    bytes: Bytes | UnsetType = UNSET
    ttl: TTL = None
    keep_ttl: bool = False
    meta: dict[str, Any] | None = None


class Append(Strict, frozen=True, kw_only=True):
    """Put a value, or a record, or raw bytes, under a new key of the prefix."""

    prefix: str
    value: Any = UNSET
    fields: dict[str, Any] | UnsetType = UNSET
    bytes: Bytes | UnsetType = UNSET
    ttl: TTL = None
    meta: dict[str, Any] | None = None
    fence: Fence | None = None
    request_id: str | None = None


class Cas(Strict, frozen=True, kw_only=True):
    """Replace a value if the key is as expected."""

    key: str
    value: Any
    expect: Expect
    ttl: TTL = None
    fence: Fence | None = None
    request_id: str | None = None


class Incr(Guarded, frozen=True, kw_only=True):
    """Add to a counter, or keep the smaller or the larger number."""

    key: str
    by: Int64 | UnsetType = UNSET
    minimum: Int64 | UnsetType = UNSET
    maximum: Int64 | UnsetType = UNSET
    ttl: TTL | UnsetType = UNSET
    ttl_if_new: TTL = None


class Take(Guarded, frozen=True, kw_only=True):
    """Get and delete in one step."""

    key: str


class Touch(Guarded, frozen=True, kw_only=True):
    """Change only when a key expires; null for never."""

    key: str
    ttl: TTL


class Swap(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One field, what it must hold, and what it shall hold. Without ``expected`` there must be no such field."""

    field: str
    new: Any
    expected: Any = UNSET


class FieldsOf(Strict, frozen=True, kw_only=True):
    """Read fields of a record, write some of them, or swap one: the one that is given."""

    key: str
    get: list[str] | UnsetType | None = UNSET
    set: dict[str, Any] | UnsetType = UNSET
    unset: list[str] | UnsetType = UNSET
    swap: Swap | UnsetType = UNSET
    if_exists: bool = False
    fence: Fence | None = None
    request_id: str | None = None


class BatchGuard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a key must be for the batch to happen."""

    key: str
    expect: Expect


class BatchWrite(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One write of a batch."""

    op: Literal["put", "create", "add", "set", "touch", "delete", "take"]
    key: str
    value: Any = UNSET
    fields: dict[str, Any] | UnsetType = UNSET
    bytes: Bytes | UnsetType = UNSET
    by: Int64 | UnsetType = UNSET
    minimum: Int64 | UnsetType = UNSET
    maximum: Int64 | UnsetType = UNSET
    unset: list[str] = []
    if_exists: bool = False
    or_keep: bool = False
    ttl: TTL | UnsetType = UNSET
    ttl_if_new: TTL = None
    meta: dict[str, Any] | None = None


class Batch(Strict, frozen=True, kw_only=True):
    """Guards and writes that happen together or not at all."""

    writes: list[BatchWrite] = []
    guards: list[BatchGuard] = []
    fences: list[Fence] = []
    request_id: str | None = None


class Where(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One test of a field, or of the member that ``path`` leads to below it; or ``any`` of several lists of tests."""

    field: str | UnsetType = UNSET
    path: list[str] = []
    any: list[list[Where]] | UnsetType = UNSET
    op: Literal["eq", "ne", "lt", "le", "gt", "ge", "in", "not_in", "exists"] = "eq"
    value: Any = UNSET

    def filter(self) -> Filter:
        """The test as a store takes it."""
        if isinstance(self.field, UnsetType) == isinstance(self.any, UnsetType):
            raise InvalidValue("a test has one of field and any", path="$.where")
        if not isinstance(self.any, UnsetType):
            return _join(operator.or_, [filter_of(tests) for tests in self.any])
        assert isinstance(self.field, str)
        field = field_test(self.field, *self.path)
        if self.op == "exists":
            return field.exists()
        if self.value is UNSET:
            raise MissingField("value")
        if self.op in ("in", "not_in"):
            if not isinstance(self.value, list):
                raise InvalidValue(f"{self.op} takes a list of values", path="$.where")
            # Lazily, so that a list with too many values is refused before all of them are decoded.
            return (field.in_ if self.op == "in" else field.not_in)(map(field_of, self.value))
        compare: Callable[[Any, Any], Filter] = getattr(operator, self.op)
        return compare(field, field_of(self.value))


def filter_of(tests: Sequence[Where]) -> Filter:
    """Tests that must all hold, as a filter."""
    return _join(operator.and_, [test.filter() for test in tests])


def _join(join: Callable[[Filter, Filter], Filter], filters: list[Filter]) -> Filter:
    if not filters:
        raise InvalidValue("a list of tests has one or more", path="$.where")
    return functools.reduce(join, filters)


class Scan(Strict, frozen=True, kw_only=True):
    """A page of entries, filtered."""

    prefix: str = ""
    where: list[Where] = []
    limit: int = 100
    after: str | None = None
    values: bool = True
    reverse: bool = False


class Children(Strict, frozen=True, kw_only=True):
    """A page of one level of keys: those directly below a prefix, and the folders there."""

    prefix: str = ""
    delimiter: str = "/"
    limit: int = 1000
    after: str | None = None


class History(Strict, frozen=True, kw_only=True):
    """The latest changes of a key that are still in the log, oldest first."""

    key: str
    limit: int = 100
    before: Int64 | None = None


class Watch(Strict, frozen=True, kw_only=True):
    """Changes as they happen. They are a stream; there is nothing to run."""

    pattern: str = "*"
    after: str | Int64 | None = None
    initial: bool = False


class Deliver(Watch, frozen=True, kw_only=True):
    """Changes as they happen, sent to a subject that the caller listens to: where it wants replies, or another."""

    deliver: str | None = None


class Unwatch(Strict, frozen=True, kw_only=True):
    """Have no more changes sent."""

    watch: str


class Lock(Strict, frozen=True, kw_only=True):
    """A lease on a name."""

    name: str
    ttl: int | float
    wait: int | float = 0
    holder: str | None = None


class Refresh(Strict, frozen=True, kw_only=True):
    """Extend a lease from now on."""

    name: str
    token: Int64
    ttl: int | float


class Unlock(Strict, frozen=True, kw_only=True):
    """Give a lease back by its token; or, for those with the right ``admin``, end another's and say why."""

    name: str
    token: Int64 | None = None
    reason: str | None = None


class Locks(Strict, frozen=True, kw_only=True):
    """Who holds what."""

    prefix: str = ""
    limit: int = 1_000
    after: str | None = None


class Outcome(Strict, frozen=True, kw_only=True):
    """What became of a request."""

    request_id: str


class Status(Strict, frozen=True, kw_only=True):
    """The namespace at a glance."""


class Semantic(Strict, frozen=True, kw_only=True, rename="camel"):
    """A request for semantic entries, spelt as their documents are. An error names the member that is wrong."""


class KvGet(Semantic, frozen=True, kw_only=True):
    """Read an envelope."""

    key: KvKey


class KvPut(Semantic, frozen=True, kw_only=True):
    """Put a value in its envelope, if the key has the version that is expected."""

    key: KvKey
    value: dict[str, Any]
    last_writer: str
    semantics: Semantics
    expected_version: Int64 | None = None
    request_id: str | None = None
    spec_ref: str | None = None
    held: Held | None = None


class KvDelete(Semantic, frozen=True, kw_only=True):
    """End a key, if it has the version that is expected."""

    key: KvKey
    last_writer: str
    expected_version: Int64 | None = None
    request_id: str | None = None
    held: Held | None = None


class KvList(Semantic, frozen=True, kw_only=True):
    """A page of envelopes, of one purpose or of all."""

    prefix: str
    purpose: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=KV_PAGE_MAX)] = 100
    after: str | None = None


class KvItemPut(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True, tag_field="op", tag="put"):
    """A put of a batch."""

    key: KvKey
    value: dict[str, Any]
    semantics: Semantics
    expected_version: Int64 | None = None
    spec_ref: str | None = None


class KvItemDelete(
    msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True, tag_field="op", tag="delete"
):
    """A delete of a batch."""

    key: KvKey
    expected_version: Int64 | None = None


class KvBatch(Semantic, frozen=True, kw_only=True):
    """Puts and deletes that happen together or not at all."""

    items: list[KvItemPut | KvItemDelete]
    last_writer: str
    request_id: str | None = None
    held: Held | None = None


class Primitive(Request, frozen=True, kw_only=True):
    """A primitive of the engine: ``what`` is a batch, or a request of `limpet.protocol.engine_msgpack`."""

    what: Any
    reason: str | None = None
    """Why an admin writes a lock that it does not hold."""


R = TypeVar("R", bound=Request)


def parse(body: bytes) -> Any:
    """Decode the JSON of a request. Raises `InvalidJSON`, which has the position and never the value."""
    try:
        return _decode(body)
    except UnicodeDecodeError:
        raise InvalidJSON("Invalid JSON: it is not UTF-8") from None
    except RecursionError:
        raise InvalidJSON(f"Invalid JSON: nested deeper than {DEPTH_MAX}") from None
    except msgspec.DecodeError as error:
        raise InvalidJSON(f"Invalid JSON: {error}") from None


_decode = msgspec.json.Decoder().decode


def request_of(shape: type[R], members: Any) -> R:
    """Make a request of this shape out of its members. Raises `MissingField` and `InvalidValue`, naming the member."""
    if not isinstance(members, Mapping):
        raise InvalidJSON("Invalid JSON: a request is an object")
    for name in _required(shape):
        if name not in members:
            raise MissingField(name)
    if issubclass(shape, Semantic):
        try:
            return parse_document(members, shape)
        except InvalidField as error:
            raise InvalidField(error.field, _strip_value(error.problem)) from None
    try:
        return msgspec.convert(members, shape)
    except msgspec.ValidationError as error:
        raise InvalidValue(_strip_value(str(error))) from None


def _required(shape: type[Request]) -> Sequence[str]:
    found = _REQUIRED.get(shape)
    if found is None:
        found = _REQUIRED[shape] = [field.encode_name for field in msgspec.structs.fields(shape) if field.required]
    return found


_REQUIRED: dict[type[Request], Sequence[str]] = {}


def _strip_value(problem: str) -> str:
    """The message of msgspec, without the word that was sent where another was expected."""
    text, at, path = problem.partition(" - at ")
    if text.startswith("Invalid enum value"):
        text = "it is not one of the known words"
    elif text.startswith("Object contains unknown field"):
        text = "the request has an unknown member"
    return f"{text}{at}{path}"
