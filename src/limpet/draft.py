"""Drafting a batch: names checked, values encoded, guards gathered, then one commit.

Every write of the store is drafted here and checked by `limpet.checks`. A draft is used once.
A single put skips the draft (`single_put`) and passes the same checks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, Self

import msgspec

from limpet import codec
from limpet.checks import (
    TTL_TWICE,
    check_batch_limits,
    check_condition,
    check_disjoint,
    check_filter,
    check_flag,
    check_guard,
    check_meta_size,
    check_number,
    check_step,
    check_value_size,
    check_write,
)
from limpet.clock import ttl_to_ms
from limpet.errors import (
    Conflict,
    InvalidTTL,
    InvalidValue,
    LimpetError,
    LockLost,
    NotFound,
    TypeMismatch,
    ValueTooLarge,
)
from limpet.keys import OPERANDS_MAX, check_key
from limpet.model import (
    ABSENT,
    ANY,
    KEEP,
    PRESENT,
    Add,
    Batch,
    Commit,
    Condition,
    Create,
    Delete,
    Entry,
    Equals,
    FieldEquals,
    Filter,
    Guard,
    HeldBy,
    Patch,
    Put,
    Refusal,
    Revision,
    Rule,
    Sentinel,
    Test,
    Touch,
    Version,
    Write,
)

if TYPE_CHECKING:
    from limpet.session import Session

__all__ = [
    "TTL",
    "Draft",
    "Expectation",
    "Fence",
    "Fencing",
    "Meta",
    "digest_of",
    "equals",
    "field",
    "make_put",
    "refusal_error",
    "request_digest",
    "single_put",
]

TTL = float | timedelta | None
"""Seconds, a timedelta, or None for never."""

Meta = Mapping[str, Any] | None
"""A JSON object beside the value."""

Expectation = (
    Entry | None | Version | Revision | Equals | Filter | Literal[Sentinel.ABSENT, Sentinel.PRESENT, Sentinel.ANY]
)
"""What a write may expect of its key. An entry means unchanged since it was read; None means absent."""

RECEIPT_MS: Final = 600_000


class Fence(msgspec.Struct, frozen=True):
    """A lock's name and fencing token, for writing under a lock that was acquired elsewhere."""

    name: str
    token: int
    namespace: str | None = None


class Fencing(Protocol):
    """An object that can fence a write: a held lock or a lead."""

    @property
    def fence(self) -> Fence:
        """The lock's name and token."""
        ...


class field:  # noqa: N801 - part of the filter language, where names are lower case
    """A field of a record or a member of a JSON object: ``limpet.field("state") != "done"``.

    More names lead to a member below: ``limpet.field("address", "city") == "Oslo"``.
    """

    def __init__(self, name: str, *below: str) -> None:
        self._name = check_key(name)
        self._path = tuple(check_key(each) for each in below)
        if len(below) >= codec.DEPTH_MAX:
            raise InvalidValue(f"a field has up to {codec.DEPTH_MAX} names, as deep as a value can be")

    def _test(self, comparison: Any, *operands: object) -> Filter:
        encoded = tuple(codec.encode_field(operand) for operand in operands)
        return Filter((Test(self._name, comparison, encoded, path=self._path),))

    def __eq__(self, other: object) -> Filter:  # type: ignore[override]
        return self._test("eq", other)

    def __ne__(self, other: object) -> Filter:  # type: ignore[override]
        return self._test("ne", other)

    def __lt__(self, other: object) -> Filter:
        return self._test("lt", other)

    def __le__(self, other: object) -> Filter:
        return self._test("le", other)

    def __gt__(self, other: object) -> Filter:
        return self._test("gt", other)

    def __ge__(self, other: object) -> Filter:
        return self._test("ge", other)

    def in_(self, values: Iterable[object]) -> Filter:
        """The field holds one of these."""
        return self._test("in", *self._take_operands(values))

    def not_in(self, values: Iterable[object]) -> Filter:
        """The field holds none of these, or does not exist."""
        return self._test("not_in", *self._take_operands(values))

    def _take_operands(self, values: Iterable[object]) -> list[object]:
        """List the operands of a test. They are limited, because every entry of a scan is compared with all of them."""
        taken = list(itertools.islice(values, OPERANDS_MAX + 1))
        if len(taken) > OPERANDS_MAX:
            raise InvalidValue(
                f"a test of {self._name!r} compares with up to {OPERANDS_MAX:,} values: scan for some of them at a time"
            )
        return taken

    def exists(self) -> Filter:
        """The field exists, whatever it holds."""
        return self._test("exists")

    __hash__ = None  # type: ignore[assignment]


def equals(value: object) -> Equals:
    """Expect exactly this value."""
    return Equals(codec.encode(value))


class Draft:
    """Guards and writes that will happen together or not at all.

    Every method returns the draft, so that calls can be chained; `commit` ends it.
    """

    __slots__ = (
        "_bytes",
        "_guards",
        "_is_brief",
        "_is_used",
        "_namespace",
        "_request",
        "_request_id",
        "_session",
        "_writes",
    )

    def __init__(self, session: Session, namespace: str, request_id: str | None = None) -> None:
        self._session = session
        self._namespace = namespace
        self._request_id = None if request_id is None else check_key(request_id)
        self._request: bytes | None = None
        self._guards: list[Guard] = []
        self._writes: list[Write] = []
        self._bytes = 0
        self._is_used = False
        self._is_brief = False

    # Guards -------------------------------------------------------------------

    def expect(self, key: str, expectation: Expectation) -> Self:
        """Let the batch happen only if the key is as expected."""
        if expectation is not ANY:
            self._guards.append(Guard(check_key(key), _make_condition(expectation)))
        return self

    def fence(self, lock: Fencing | Fence) -> Self:
        """Let the batch happen only while this lock is held under its token."""
        fence = lock if isinstance(lock, Fence) else getattr(lock, "fence", None)
        if not isinstance(fence, Fence):
            raise InvalidValue(
                f"a batch is fenced by a lock or by limpet.Fence(name, token), not by something of type "
                f"{type(lock).__name__}"
            )
        if fence.namespace is not None and fence.namespace != self._namespace:
            raise InvalidValue(
                f"lock {fence.name!r} is of namespace {fence.namespace!r} and cannot fence {self._namespace!r}"
            )
        self._guards.append(Guard(check_key(fence.name), HeldBy(check_number(fence.token, "a fencing token")), "lock"))
        return self

    # Writes -------------------------------------------------------------------

    def put(
        self,
        key: str,
        value: object,
        *,
        ttl: TTL | Literal[Sentinel.KEEP] = None,
        meta: Meta | Literal[Sentinel.KEEP] = None,
    ) -> Self:
        """Replace the whole value."""
        put = make_put(key, value, ttl, meta, self._session.value_bytes_max)
        return self._append(put, codec.size_bytes(put.stored))

    def create(self, key: str, value: object, *, ttl: TTL = None, meta: Meta = None, or_keep: bool = False) -> Self:
        """Put a value under a key that must not exist.

        With ``or_keep`` it may: then the entry stays as it is, and the rest of the batch goes on. The commit has the
        entry in its place, and the key among ``kept``.
        """
        check_flag(or_keep, "or_keep")
        if not or_keep:
            return self.expect(key, ABSENT).put(key, value, ttl=ttl, meta=meta)
        stored, size_bytes = _encode_value(key, value, self._session.value_bytes_max)
        ttl_ms = None if ttl is None else ttl_to_ms(ttl)
        meta_json = None if meta is None else _encode_meta_object(key, meta)
        return self._append(Create(check_key(key), stored, ttl_ms, meta_json), size_bytes)

    def add(
        self,
        key: str,
        by: int = 1,
        *,
        ttl: TTL | Literal[Sentinel.KEEP] = KEEP,
        ttl_if_new: float | timedelta | None = None,
        meta: Meta | Literal[Sentinel.KEEP] = KEEP,
    ) -> Self:
        """Add to a counter. A missing key counts as zero; ``ttl_if_new`` is its time to live then."""
        return self._count("add", key, by, ttl, ttl_if_new, meta)

    def minimum(
        self,
        key: str,
        number: int,
        *,
        ttl: TTL | Literal[Sentinel.KEEP] = KEEP,
        ttl_if_new: float | timedelta | None = None,
        meta: Meta | Literal[Sentinel.KEEP] = KEEP,
    ) -> Self:
        """Keep the smaller of the number found and this one, which a missing key takes."""
        return self._count("minimum", key, number, ttl, ttl_if_new, meta)

    def maximum(
        self,
        key: str,
        number: int,
        *,
        ttl: TTL | Literal[Sentinel.KEEP] = KEEP,
        ttl_if_new: float | timedelta | None = None,
        meta: Meta | Literal[Sentinel.KEEP] = KEEP,
    ) -> Self:
        """Keep the larger of the number found and this one, which a missing key takes."""
        return self._count("maximum", key, number, ttl, ttl_if_new, meta)

    def _count(
        self,
        rule: Rule,
        key: str,
        number: int,
        ttl: TTL | Literal[Sentinel.KEEP],
        ttl_if_new: float | timedelta | None,
        meta: Meta | Literal[Sentinel.KEEP],
    ) -> Self:
        new_ttl_ms = None if ttl_if_new is None else ttl_to_ms(ttl_if_new)
        if new_ttl_ms is not None and ttl is not KEEP:
            raise InvalidTTL(TTL_TWICE)
        key, number, meta_json = check_key(key), check_step(number), _encode_meta(key, meta)
        return self._append(Add(key, number, _convert_ttl(ttl), meta_json, rule=rule, new_ttl_ms=new_ttl_ms))

    def set(
        self,
        key: str,
        fields: Mapping[str, object] | None = None,
        /,
        *,
        unset: Iterable[str] = (),
        if_exists: bool = False,
        ttl: TTL | Literal[Sentinel.KEEP] = KEEP,
        meta: Meta | Literal[Sentinel.KEEP] = KEEP,
        **more: object,
    ) -> Self:
        """Write and clear single fields of a record."""
        given = {**as_fields(fields), **more}
        if isinstance(unset, str | bytes):
            raise InvalidValue("unset is a list of names, such as ['state'], not one name")
        check_flag(if_exists, "if_exists")
        cleared = {check_key(name) for name in unset}
        check_disjoint(given, cleared)
        written: dict[str, bytes] = {}
        for name, value in given.items():
            if value is ABSENT:
                cleared.add(check_key(name))
            else:
                written[check_key(name)] = codec.encode_field(value, name)
        size_bytes = codec.size_bytes(written)
        check_value_size(key, size_bytes, self._session.value_bytes_max)
        ttl_ms, meta_json = _convert_ttl(ttl), _encode_meta(key, meta)
        patch = Patch(check_key(key), written, tuple(sorted(cleared)), if_exists, ttl_ms, meta_json)
        return self._append(patch, size_bytes)

    def swap(
        self,
        key: str,
        name: str,
        expected: object,
        new: object,
        *,
        set: Mapping[str, object] | None = None,
        ttl: TTL | Literal[Sentinel.KEEP] = KEEP,
    ) -> Self:
        """Write a field, and others with it, if it holds the expected value; ABSENT means no such field."""
        condition = FieldEquals(check_key(name), ABSENT if expected is ABSENT else codec.encode_field(expected, name))
        self._guards.append(Guard(check_key(key), condition))
        others = as_fields(set)
        if name in others:
            raise InvalidValue(f"field {name!r} is both swapped and set")
        return self.set(key, {name: new, **others}, if_exists=True, ttl=ttl)

    def touch(self, key: str, ttl: TTL) -> Self:
        """Change only when the key expires. A missing key stays missing."""
        ttl_ms = None if ttl is None else ttl_to_ms(ttl)
        return self._append(Touch(check_key(key), ttl_ms))

    def delete(self, key: str) -> Self:
        """End the key. A missing key stays missing."""
        return self._append(Delete(check_key(key)))

    def take(self, key: str) -> Self:
        """End the key; the commit's ``ended`` has the entry with its value."""
        return self._append(Delete(check_key(key), take=True))

    def include(self, *writes: Write, guards: Iterable[Guard] = (), request: bytes | None = None) -> Self:
        """Add writes and guards of any family as they are, for features that store something beside the data.

        Args:
            writes: The writes, encoded.
            guards: The guards, encoded.
            request: The request in the feature's own encoding. A retry is recognised by it and not by the writes,
                which may depend on the entries found. The same request must make as many writes each time.
        """
        if request is not None and type(request) is not bytes:
            raise InvalidValue(f"a request is bytes, not something of type {type(request).__name__}")
        checked = [check_guard(guard) for guard in guards]
        sizes_bytes = [check_write(write) for write in writes]
        self._guards += checked
        self._request = self._request if request is None else request
        for write, size_bytes in zip(writes, sizes_bytes, strict=True):
            self._append(write, size_bytes)
        return self

    # Committing ---------------------------------------------------------------

    async def commit(self) -> Commit:
        """Make it happen, all of it or nothing. Raises `Conflict` when a guard does not hold."""
        outcome = await self._session.commit(self._namespace, self._make_batch())
        if isinstance(outcome, Refusal):
            raise self._error_of(outcome)
        return outcome

    def _make_brief(self) -> Self:
        """Let entries of records come back without their value: the caller does not need it."""
        self._is_brief = True
        return self

    async def _attempt(self) -> Commit | Refusal:
        """Like `commit`, but a refusal is returned instead of raised."""
        return await self._session.commit(self._namespace, self._make_batch())

    def _make_batch(self) -> Batch:
        """Make the batch, within the limits. It can be made once."""
        if self._is_used:
            raise InvalidValue("a batch is committed once: draft another, or give it a request_id and repeat it whole")
        self._is_used = True
        guards, writes = tuple(self._guards), tuple(self._writes)
        if not guards and not writes:
            raise InvalidValue("the batch is empty: add a write or a guard")
        # Most batches are one write with at most one guard, which no limit on numbers can concern.
        if len(writes) != 1 or len(guards) > 1:
            check_batch_limits(guards, writes, size_bytes=self._bytes)
        bytes_max, writer = self._session.value_bytes_max, self._session.writer
        if self._request_id is None:
            return Batch(guards, writes, value_bytes_max=bytes_max, is_brief=self._is_brief, writer=writer)
        digest = digest_of(guards, writes) if self._request is None else request_digest(self._request)
        receipt = (self._request_id, digest, RECEIPT_MS)
        return Batch(guards, writes, *receipt, value_bytes_max=bytes_max, is_brief=self._is_brief, writer=writer)

    def _error_of(self, refusal: Refusal) -> LimpetError:
        return refusal_error(refusal, self._session.value_bytes_max)

    def _append(self, write: Write, size_bytes: int = 0) -> Self:
        self._writes.append(write)
        self._bytes += size_bytes
        return self


def single_put(
    key: str,
    value: object,
    *,
    ttl: TTL | Literal[Sentinel.KEEP],
    expect: Expectation,
    meta: Meta | Literal[Sentinel.KEEP],
    value_bytes_max: int,
    writer: str | None,
) -> Batch:
    """Make a batch of one put, perhaps with a guard on its key. Most writes are one, and need no draft."""
    guards = () if expect is ANY else (Guard(check_key(key), _make_condition(expect)),)
    put = make_put(key, value, ttl, meta, value_bytes_max)
    return Batch(guards, (put,), value_bytes_max=value_bytes_max, writer=writer)


def refusal_error(refusal: Refusal, value_bytes_max: int) -> LimpetError:
    """Turn a refusal into the error that its caller catches."""
    key, found, guard = refusal.key, refusal.found, refusal.guard
    match refusal.reason:
        case "guard":
            assert guard is not None
            if isinstance(guard.condition, HeldBy):
                return LockLost(key, token=guard.condition.token)
            return Conflict(key, expected=_describe(guard.condition), current=found)
        case "stale_request":
            return Conflict(key, expected="the same request", current=None, reason="stale_request")
        case "type":
            kind = None if found is None else found.kind
            names = {"json": "another JSON value", "bytes": "raw bytes", "record": "a record", None: "nothing"}
            return TypeMismatch(key, expected=refusal.needs, found=names[kind])
        case "size":
            return ValueTooLarge(key, size_bytes=refusal.size_bytes, limit_bytes=value_bytes_max, what="the record")
        case "overflow":
            return InvalidValue(f"counter {key!r} would leave -2^63 to 2^63-1")
        case "missing":
            return NotFound(key)


def make_put(
    key: str,
    value: object,
    ttl: TTL | Literal[Sentinel.KEEP],
    meta: Meta | Literal[Sentinel.KEEP],
    value_bytes_max: int,
) -> Put:
    """Make a put, within the limits."""
    stored = codec.encode(value)
    # The size is never more than the length. Most values are far below the limit, and need not be measured.
    if type(stored) is not bytes or len(stored) > value_bytes_max:
        check_value_size(key, codec.size_bytes(stored), value_bytes_max)
    ttl_ms = None if ttl is None else _convert_ttl(ttl)
    meta_json = None if meta is None else _encode_meta(key, meta)
    return Put(check_key(key), stored, ttl_ms, meta_json)


def _encode_value(key: str, value: object, value_bytes_max: int) -> tuple[codec.Stored, int]:
    """Encode a value, within the limit. Returns it with its size."""
    stored = codec.encode(value)
    size_bytes = codec.size_bytes(stored)
    check_value_size(key, size_bytes, value_bytes_max)
    return stored, size_bytes


def as_fields(fields: Mapping[str, object] | None) -> Mapping[str, object]:
    """Check the fields of a record to write; None stands for no fields."""
    if fields is None:
        return {}
    if not isinstance(fields, Mapping):
        raise InvalidValue(f"the fields of a record are a mapping, not something of type {type(fields).__name__}")
    return fields


def _make_condition(expectation: Expectation) -> Condition:
    match expectation:
        case Entry():
            return Revision(check_number(expectation.revision, "the revision of an entry"))
        case None:
            return ABSENT
        case Filter():
            return check_filter(expectation).as_condition()
        case Equals() | Version() | Revision():
            return check_condition("", expectation)
        case Sentinel.ABSENT | Sentinel.PRESENT:
            return expectation
        case _:
            pass
    raise InvalidValue(
        f"cannot expect something of type {type(expectation).__name__}: give an entry, limpet.Version(n), "
        "limpet.Revision(n), limpet.ABSENT, limpet.PRESENT, limpet.equals(value) or limpet.field(name) == value"
    )


def _convert_ttl(ttl: TTL | Literal[Sentinel.KEEP]) -> int | Literal[Sentinel.KEEP] | None:
    return ttl if ttl is None or ttl is KEEP else ttl_to_ms(ttl)


def _encode_meta(key: str, meta: Meta | Literal[Sentinel.KEEP]) -> bytes | Literal[Sentinel.KEEP] | None:
    return meta if meta is None or meta is KEEP else _encode_meta_object(key, meta)


def _encode_meta_object(key: str, meta: Mapping[str, Any]) -> bytes | None:
    if not isinstance(meta, Mapping):
        raise InvalidValue(f"meta is a JSON object, not of type {type(meta).__name__}")
    encoded = codec.encode_field(dict(meta), "meta")
    check_meta_size(key, encoded)
    return encoded if meta else None


_encode_request = msgspec.msgpack.Encoder(order="sorted").encode


def digest_of(guards: tuple[Guard, ...], writes: tuple[Write, ...]) -> bytes:
    """Hash a request. The fence is not part of it: a retry may come under a newer token."""
    guarded = [(type(guard.condition).__name__, guard) for guard in guards if guard.family == "data"]
    written = [(type(write).__name__, write) for write in writes]
    return request_digest(_encode_request((guarded, written)))


def request_digest(request: bytes) -> bytes:
    """Make the hash by which a repeated request is recognised."""
    import hashlib

    return hashlib.blake2b(request, digest_size=16).digest()


def _describe(condition: Condition) -> str:
    if condition is ABSENT:
        return "no such key"
    return "the key to exist" if condition is PRESENT else str(condition)
