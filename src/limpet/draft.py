"""Drafting a batch: names checked, values encoded, guards gathered, then one commit.

Every write of the store is drafted here, so that there is one door with one set of checks.
A draft is used once. A put that nothing guards goes through the same door, without one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, Self

import msgspec

from limpet import codec
from limpet.checks import check_condition, check_filter, check_guard, check_number, check_step, check_write
from limpet.clock import ttl_to_ms
from limpet.errors import (
    Conflict,
    InvalidKey,
    InvalidValue,
    LimpetError,
    LockLost,
    NotFound,
    TypeMismatch,
    ValueTooLarge,
)
from limpet.keys import (
    BATCH_BYTES_MAX,
    BATCH_GUARDS_MAX,
    BATCH_WRITES_MAX,
    META_BYTES_MAX,
    OPERANDS_MAX,
    check_key,
)
from limpet.model import (
    ABSENT,
    ANY,
    KEEP,
    PRESENT,
    Add,
    Batch,
    Commit,
    Condition,
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
    Sentinel,
    Test,
    Touch,
    Version,
    Write,
)

if TYPE_CHECKING:
    from limpet.session import Session

__all__ = ["TTL", "Draft", "Expectation", "Fence", "Fencing", "Meta", "equals", "field", "plain_put", "request_digest"]

TTL = float | timedelta | None
"""Seconds, a timedelta, or None for never."""

Meta = Mapping[str, Any] | None
"""A JSON object beside the value."""

Expectation = (
    Entry | None | Version | Revision | Equals | Filter | Literal[Sentinel.ABSENT, Sentinel.PRESENT, Sentinel.ANY]
)
"""What a write may expect of its key. An entry means: unchanged since. None means: absent, as `entry` returned it."""

RECEIPT_MS: Final = 600_000


class Fence(msgspec.Struct, frozen=True):
    """A lock's name and fencing token, for writing under a lock that was acquired elsewhere."""

    name: str
    token: int
    namespace: str | None = None


class Fencing(Protocol):
    """What can fence a write: a held lock."""

    @property
    def fence(self) -> Fence:
        """The lock's name and token."""
        ...


class field:  # noqa: N801 - reads as a word of the filter language
    """A field of a record or a top-level member of a JSON object: ``limpet.field("state") != "done"``."""

    def __init__(self, name: str) -> None:
        self._name = check_key(name)

    def _test(self, comparison: Any, *operands: object) -> Filter:
        return Filter((Test(self._name, comparison, tuple(codec.encode_field(operand) for operand in operands)),))

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
        return self._test("in", *self._few(values))

    def not_in(self, values: Iterable[object]) -> Filter:
        """The field holds none of these, or does not exist."""
        return self._test("not_in", *self._few(values))

    def _few(self, values: Iterable[object]) -> list[object]:
        """The operands of a test, which every entry of a scan is compared with."""
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
            self._guards.append(Guard(check_key(key), _condition(expectation)))
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
        return self._write(*_put(key, value, ttl, meta, self._session.value_bytes_max))

    def create(self, key: str, value: object, *, ttl: TTL = None, meta: Meta = None) -> Self:
        """Put a value under a key that must not exist."""
        return self.expect(key, ABSENT).put(key, value, ttl=ttl, meta=meta)

    def add(
        self,
        key: str,
        by: int = 1,
        *,
        ttl: TTL | Literal[Sentinel.KEEP] = KEEP,
        meta: Meta | Literal[Sentinel.KEEP] = KEEP,
    ) -> Self:
        """Add to a counter. A missing key counts as zero."""
        return self._write(Add(check_key(key), check_step(by), _ttl_ms(ttl), _meta_json(key, meta)))

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
        if type(if_exists) is not bool:
            raise InvalidValue(f"if_exists is True or False, not something of type {type(if_exists).__name__}")
        cleared = {check_key(name) for name in unset}
        written: dict[str, bytes] = {}
        for name, value in given.items():
            if name in cleared:
                raise InvalidValue(f"field {name!r} is both set and unset")
            if value is ABSENT:
                cleared.add(check_key(name))
            else:
                written[check_key(name)] = codec.encode_field(value, name)
        size_bytes = codec.size_bytes(written)
        if size_bytes > self._session.value_bytes_max:
            raise ValueTooLarge(key, size_bytes=size_bytes, limit_bytes=self._session.value_bytes_max)
        patch = Patch(check_key(key), written, tuple(sorted(cleared)), if_exists, _ttl_ms(ttl), _meta_json(key, meta))
        return self._write(patch, size_bytes)

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
        """Write a field, and others with it, if it holds what is expected; ABSENT means no such field."""
        condition = FieldEquals(check_key(name), ABSENT if expected is ABSENT else codec.encode_field(expected, name))
        self._guards.append(Guard(check_key(key), condition))
        others = as_fields(set)
        if name in others:
            raise InvalidValue(f"field {name!r} is both swapped and set")
        return self.set(key, {name: new, **others}, if_exists=True, ttl=ttl)

    def touch(self, key: str, ttl: TTL) -> Self:
        """Change only when the key expires. A missing key stays missing."""
        ttl_ms = None if ttl is None else ttl_to_ms(ttl)
        return self._write(Touch(check_key(key), ttl_ms))

    def delete(self, key: str) -> Self:
        """End the key. A missing key stays missing."""
        return self._write(Delete(check_key(key)))

    def take(self, key: str) -> Self:
        """End the key; the commit's ``ended`` has what it held."""
        return self._write(Delete(check_key(key), take=True))

    def include(self, *writes: Write, guards: Iterable[Guard] = (), request: bytes | None = None) -> Self:
        """Add writes and guards of any family as they are, for features that keep something beside the data.

        Args:
            writes: What to write, encoded.
            guards: What to guard.
            request: What was asked, in the feature's own words. A retry is known by that, and not by the writes,
                which may depend on what was found. The same request must make as many writes each time.
        """
        if request is not None and type(request) is not bytes:
            raise InvalidValue(f"a request is bytes, not something of type {type(request).__name__}")
        checked = [check_guard(guard) for guard in guards]
        sizes_bytes = [check_write(write) for write in writes]
        self._guards += checked
        self._request = self._request if request is None else request
        for write, size_bytes in zip(writes, sizes_bytes, strict=True):
            self._write(write, size_bytes)
        return self

    # Committing ---------------------------------------------------------------

    async def commit(self) -> Commit:
        """Make it happen, all of it or nothing. Raises `Conflict` when a guard does not hold."""
        outcome = await self._session.commit(self._namespace, self._batch())
        if isinstance(outcome, Refusal):
            raise self._error_of(outcome)
        return outcome

    def _briefly(self) -> Self:
        """Have no fields of records sent back: the caller has no use for them."""
        self._is_brief = True
        return self

    async def _attempt(self) -> Commit | Refusal:
        """Like `commit`, but a refusal is returned instead of raised."""
        return await self._session.commit(self._namespace, self._batch())

    def _batch(self) -> Batch:
        """What was drafted, held to the limits."""
        if self._is_used:
            raise InvalidValue("a batch is committed once: draft another, or give it a request_id and repeat it whole")
        self._is_used = True
        guards, writes = tuple(self._guards), tuple(self._writes)
        # One write under one guard is what most callers commit, and within the limits of numbers.
        if len(writes) != 1 or len(guards) > 1:
            self._check_limits()
        bytes_max = self._session.value_bytes_max
        if self._request_id is None:
            return Batch(guards, writes, value_bytes_max=bytes_max, is_brief=self._is_brief)
        digest = digest_of(guards, writes) if self._request is None else request_digest(self._request)
        about = (self._request_id, digest, RECEIPT_MS)
        return Batch(guards, writes, *about, value_bytes_max=bytes_max, is_brief=self._is_brief)

    def _error_of(self, refusal: Refusal) -> LimpetError:
        """A refusal as the error that its caller catches."""
        key, found, guard = refusal.key, refusal.found, refusal.guard
        match refusal.reason:
            case "guard":
                assert guard is not None
                if isinstance(guard.condition, HeldBy):
                    return LockLost(key, token=guard.condition.token)
                return Conflict(key, expected=_in_words(guard.condition), current=found)
            case "stale_request":
                return Conflict(key, expected="the same request", current=None, reason="stale_request")
            case "type":
                kind = None if found is None else found.kind
                names = {"json": "another JSON value", "bytes": "raw bytes", "record": "a record", None: "nothing"}
                return TypeMismatch(key, expected=refusal.needs, found=names[kind])
            case "size":
                return ValueTooLarge(
                    key, size_bytes=refusal.size_bytes, limit_bytes=self._session.value_bytes_max, what="the record"
                )
            case "overflow":
                return InvalidValue(f"counter {key!r} would leave -2^63 to 2^63-1")
            case "missing":
                return NotFound(key)

    def _write(self, write: Write, size_bytes: int = 0) -> Self:
        self._writes.append(write)
        self._bytes += size_bytes
        return self

    def _check_limits(self) -> None:
        if not self._writes and not self._guards:
            raise InvalidValue("an empty batch asks for nothing")
        places = [(write.family, write.key) for write in self._writes]
        # One value has a limit of its own, which a store may be opened with.
        if len(places) > 1 and self._bytes > BATCH_BYTES_MAX:
            raise ValueTooLarge(places[0][1], size_bytes=self._bytes, limit_bytes=BATCH_BYTES_MAX, what="the batch")
        written = {*places}
        if len(written) < len(places):
            _, twice = next(place for place in places if places.count(place) > 1)
            raise InvalidKey(twice, "a batch writes each key at most once")
        if len(places) > BATCH_WRITES_MAX:
            raise InvalidValue(f"a batch holds up to {BATCH_WRITES_MAX} writes, this one has {len(places)}")
        apart = {(guard.family, guard.key) for guard in self._guards} - written
        if len(apart) > BATCH_GUARDS_MAX:
            raise InvalidValue(f"a batch guards up to {BATCH_GUARDS_MAX} keys it does not write, this one {len(apart)}")


def plain_put(
    key: str,
    value: object,
    ttl: TTL | Literal[Sentinel.KEEP],
    meta: Meta | Literal[Sentinel.KEEP],
    value_bytes_max: int,
) -> Batch:
    """A batch of one put that nothing guards. Most writes are one, and need no draft."""
    put, _ = _put(key, value, ttl, meta, value_bytes_max)
    return Batch((), (put,), value_bytes_max=value_bytes_max)


def _put(
    key: str,
    value: object,
    ttl: TTL | Literal[Sentinel.KEEP],
    meta: Meta | Literal[Sentinel.KEEP],
    value_bytes_max: int,
) -> tuple[Put, int]:
    """A put, held to its limits, and what its value counts."""
    stored = codec.encode(value)
    size_bytes = codec.size_bytes(stored)
    if size_bytes > value_bytes_max:
        raise ValueTooLarge(key, size_bytes=size_bytes, limit_bytes=value_bytes_max)
    ttl_ms = None if ttl is None else _ttl_ms(ttl)
    meta_json = None if meta is None else _meta_json(key, meta)
    return Put(check_key(key), stored, ttl_ms, meta_json), size_bytes


def as_fields(fields: Mapping[str, object] | None) -> Mapping[str, object]:
    """Fields to write, none where nothing is given."""
    if fields is None:
        return {}
    if not isinstance(fields, Mapping):
        raise InvalidValue(f"the fields of a record are a mapping, not something of type {type(fields).__name__}")
    return fields


def _condition(expectation: Expectation) -> Condition:
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


def _ttl_ms(ttl: TTL | Literal[Sentinel.KEEP]) -> int | Literal[Sentinel.KEEP] | None:
    return ttl if ttl is None or ttl is KEEP else ttl_to_ms(ttl)


def _meta_json(key: str, meta: Meta | Literal[Sentinel.KEEP]) -> bytes | Literal[Sentinel.KEEP] | None:
    if meta is None or meta is KEEP:
        return meta
    if not isinstance(meta, Mapping):
        raise InvalidValue(f"meta is a JSON object, not of type {type(meta).__name__}")
    encoded = codec.encode_field(dict(meta), "meta")
    if len(encoded) > META_BYTES_MAX:
        raise ValueTooLarge(key, size_bytes=len(encoded), limit_bytes=META_BYTES_MAX, what="meta")
    return encoded if meta else None


_encode_request = msgspec.msgpack.Encoder(order="sorted").encode


def digest_of(guards: tuple[Guard, ...], writes: tuple[Write, ...]) -> bytes:
    """A hash of what is asked. The fence is not part of it: a retry may come under a newer token."""
    asked = [(type(guard.condition).__name__, guard) for guard in guards if guard.family == "data"]
    done = [(type(write).__name__, write) for write in writes]
    return request_digest(_encode_request((asked, done)))


def request_digest(request: bytes) -> bytes:
    """The hash by which a request is known again."""
    import hashlib

    return hashlib.blake2b(request, digest_size=16).digest()


def _in_words(condition: Condition) -> str:
    if condition is ABSENT:
        return "no such key"
    return "the key to exist" if condition is PRESENT else str(condition)
