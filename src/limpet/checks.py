"""The one validator of guards, writes, filters and whole batches.

`limpet.draft` builds a batch from a caller's values and a server decodes one from a request; both check it here before
an engine gets it. An engine commits the batches of many callers together, and a batch that it could not encode would
fail them all. Names, types, ranges and limits are checked, and the first fault is raised; a message never holds a
value. Whether encoded values are canonical JSON is not checked here: only the server has to, which does not encode them
itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Final, get_args

from limpet import codec
from limpet.clock import TTL_S_MAX
from limpet.codec import Stored
from limpet.errors import InvalidKey, InvalidTTL, InvalidValue, ValueTooLarge
from limpet.keys import (
    BATCH_BYTES_MAX,
    BATCH_GUARDS_MAX,
    BATCH_WRITES_MAX,
    META_BYTES_MAX,
    OPERANDS_MAX,
    TESTS_MAX,
    WRITER_MAX,
    check_key,
)
from limpet.model import (
    ABSENT,
    FAMILIES,
    KEEP,
    Add,
    Comparison,
    Condition,
    Create,
    Delete,
    Equals,
    Expire,
    Family,
    FieldEquals,
    Filter,
    Guard,
    HeldBy,
    Import,
    Patch,
    Put,
    Revision,
    Rule,
    Sentinel,
    Test,
    Touch,
    Version,
    Window,
    Write,
)

__all__ = [
    "check_batch_limits",
    "check_condition",
    "check_disjoint",
    "check_filter",
    "check_flag",
    "check_guard",
    "check_meta_size",
    "check_number",
    "check_step",
    "check_value_size",
    "check_window",
    "check_write",
    "check_writer",
]

NUMBER_MAX: Final = codec.INT_MAX
TTL_MS_MAX: Final = 1000 * TTL_S_MAX
VERSION_MAX: Final = 2**53 - 1
TIME_MS_MAX: Final = 253_402_300_799_999
"""The last millisecond that a datetime can have."""

_COMPARISONS: Final = frozenset(get_args(Comparison))
_RULES: Final = frozenset(get_args(Rule))
TTL_TWICE: Final = "is given twice: ttl holds for every entry, and ttl_if_new for a new one alone"


def check_number(number: object, what: str) -> int:
    """Check a count, a version, a revision or a token: every engine can store and compare it."""
    if type(number) is not int:
        raise InvalidValue(f"{what} is an integer, not something of type {type(number).__name__}")
    if not 0 <= number <= NUMBER_MAX:
        raise InvalidValue(f"{what} is an integer from 0 to 2^63-1")
    return number


def check_step(by: object) -> int:
    """Check the step of a counter."""
    if type(by) is not int:
        raise InvalidValue(f"a counter moves by an integer, not by something of type {type(by).__name__}")
    if not codec.INT_MIN <= by <= codec.INT_MAX:
        raise InvalidValue("a counter moves by an integer from -2^63 to 2^63-1")
    return by


def check_flag(flag: object, what: str) -> None:
    """Check a flag: True or False, and nothing that only counts as such."""
    if type(flag) is not bool:
        raise InvalidValue(f"{what} is True or False, not something of type {type(flag).__name__}")


# Batches ----------------------------------------------------------------------


def check_batch_limits(
    guards: Sequence[Guard], writes: Sequence[Write], *, size_bytes: int, expiries_max: int = 0
) -> None:
    """Check a batch as a whole: each key written once, how many writes and guards, and their size together.

    Args:
        guards: The guards, each checked by itself.
        writes: The writes, each checked by itself.
        size_bytes: The size of all values.
        expiries_max: How many expiries may come on top of the writes, as a sweeper sends them.
    """
    # A single value has its own limit, which may be larger.
    if len(writes) > 1 and size_bytes > BATCH_BYTES_MAX:
        raise ValueTooLarge(writes[0].key, size_bytes=size_bytes, limit_bytes=BATCH_BYTES_MAX, what="the batch")
    written: set[tuple[Family, str]] = set()
    for write in writes:
        target = (write.family, write.key)
        if target in written:
            raise InvalidKey(write.key, "a batch writes each key at most once")
        written.add(target)
    expiries = sum(isinstance(write, Expire) for write in writes) if expiries_max else 0
    if len(writes) - expiries > BATCH_WRITES_MAX or expiries > expiries_max:
        raise InvalidValue(f"a batch holds up to {BATCH_WRITES_MAX} writes, this one has {len(writes)}")
    apart = {(guard.family, guard.key) for guard in guards} - written
    if len(apart) > BATCH_GUARDS_MAX:
        raise InvalidValue(f"a batch guards up to {BATCH_GUARDS_MAX} keys it does not write, this one {len(apart)}")


def check_value_size(key: str, size_bytes: int, limit_bytes: int) -> None:
    """Check the size of one value, or of the fields of one write, against the limit of the store."""
    if size_bytes > limit_bytes:
        raise ValueTooLarge(key, size_bytes=size_bytes, limit_bytes=limit_bytes)


def check_meta_size(key: str, meta_json: bytes) -> None:
    """Check the size of an encoded meta."""
    if len(meta_json) > META_BYTES_MAX:
        raise ValueTooLarge(key, size_bytes=len(meta_json), limit_bytes=META_BYTES_MAX, what="meta")


def check_disjoint(fields: Iterable[str], unset: Container[str]) -> None:
    """Check that no field is both set and unset."""
    for name in fields:
        if name in unset:
            raise InvalidValue(f"field {name!r} is both set and unset")


def check_guard(guard: object) -> Guard:
    """Check a guard: an engine can compare it."""
    if not isinstance(guard, Guard):
        raise InvalidValue(f"a batch is guarded by guards, not by something of type {type(guard).__name__}")
    _check_name(guard.key)
    _check_family(guard.family)
    check_condition(guard.key, guard.condition)
    return guard


def check_condition(key: str, condition: object) -> Condition:
    """Check a condition: an engine can compare it."""
    match condition:
        case Version(number):
            check_number(number, "a version")
        case Revision(number):
            check_number(number, "a revision")
        case HeldBy(token):
            check_number(token, "a fencing token")
        case Equals(stored):
            _check_stored(key, stored)
        case FieldEquals(name, stored):
            _check_name(name)
            if stored is not ABSENT:
                _check_encoded(key, stored)
        case Sentinel.ABSENT | Sentinel.PRESENT:
            pass
        case _:
            raise InvalidValue(f"a guard on {key!r} has a condition, not something of type {type(condition).__name__}")
    return condition


def check_write(write: object) -> int:
    """Check a write: an engine can encode it. Returns the size of its values."""
    if not isinstance(write, Put | Create | Add | Patch | Touch | Delete | Expire):
        raise InvalidValue(f"a batch is made of writes, not of something of type {type(write).__name__}")
    key = _check_name(write.key)
    _check_family(write.family)
    size_bytes = 0
    match write:
        case Put() | Create():
            size_bytes = _check_stored(key, write.stored)
        case Patch():
            _check_kind(write.fields, Mapping, f"the fields of {key!r}")
            _check_kind(write.unset, tuple, f"the fields of {key!r} to clear")
            size_bytes = _check_stored(key, write.fields)
            check_flag(write.if_exists, "if_exists")
            check_disjoint(map(_check_name, write.unset), write.fields)
        case Add():
            check_step(write.by)
            if write.rule not in _RULES:
                raise InvalidValue(f"an integer is written by one of the rules {', '.join(sorted(_RULES))}")
            _check_ttl(write.new_ttl_ms)
            if write.new_ttl_ms is not None and write.ttl_ms is not KEEP:
                raise InvalidTTL(TTL_TWICE)
        case Delete():
            check_flag(write.take, "take")
        case Expire():
            check_number(write.revision, "a revision")
        case Touch():
            _check_ttl(write.ttl_ms)
    if isinstance(write, Import):
        _check_import(write)
    if isinstance(write, Put | Create | Patch | Add):
        _check_meta(key, write.meta_json)
        if write.ttl_ms is not KEEP:
            _check_ttl(write.ttl_ms)
    return size_bytes


def check_writer(writer: object) -> str:
    """Check the name of a writer: it stands in logs and lists, so it is short and printable."""
    if not isinstance(writer, str):
        raise InvalidValue(f"the name of a writer is a str, not something of type {type(writer).__name__}")
    if not 1 <= len(writer) <= WRITER_MAX or not writer.isprintable():
        raise InvalidValue(f"the name of a writer has 1 to {WRITER_MAX} characters, all of them printable")
    return writer


# Filters and windows ----------------------------------------------------------


def check_filter(where: object) -> Filter:
    """Check a filter: it can test a value."""
    if not isinstance(where, Filter):
        raise InvalidValue("where is a filter such as limpet.field('state') != 'done'")
    _check_groups(where, TESTS_MAX)
    tests = list(itertools.islice(where.all_tests(), TESTS_MAX + 1))
    if not 0 < len(tests) <= TESTS_MAX:
        raise InvalidValue(f"a filter has 1 to {TESTS_MAX} tests")
    for test in tests:
        _check_kind(test, Test, "a test of a filter")
        _check_kind(test.operands, tuple, "the values of a test")
        if test.comparison not in _COMPARISONS:
            raise InvalidValue(f"a test of field {test.name!r} compares by one of {', '.join(sorted(_COMPARISONS))}")
        _check_name(test.name)
        _check_kind(test.path, tuple, "the path of a test")
        for name in test.path:
            _check_name(name)
        count = len(test.operands)
        wanted = {"exists": count == 0, "in": True, "not_in": True}.get(test.comparison, count == 1)
        if not wanted or count > OPERANDS_MAX:
            raise InvalidValue(
                f"a test of field {test.name!r} compares with {count:,} values: 'in' and 'not_in' take up to "
                f"{OPERANDS_MAX:,} values, 'exists' none and every other comparison one"
            )
        for operand in test.operands:
            _check_encoded(test.name, operand)
    return where


def _check_groups(where: object, depth: int) -> None:
    """Check how a filter is built. Two filters in each group, so that the number of tests bounds the depth as well."""
    _check_kind(where, Filter, "a part of a filter")
    assert isinstance(where, Filter)
    _check_kind(where.tests, tuple, "the tests of a filter")
    _check_kind(where.any_of, tuple, "the groups of a filter")
    if (not where.tests and not where.any_of) or not depth:
        raise InvalidValue(f"a filter has 1 to {TESTS_MAX} tests")
    for group in where.any_of:
        _check_kind(group, tuple, "a group of a filter")
        if not 2 <= len(group) <= TESTS_MAX:
            raise InvalidValue("filters are joined by | with one another: a group has two or more")
        for each in group:
            _check_groups(each, depth - 1)


def check_window(window: object) -> Window:
    """Check the bounds of a log: an engine can compare them."""
    if not isinstance(window, Window):
        raise InvalidValue(f"a window is a limpet.Window, not something of type {type(window).__name__}")
    for name in window.__struct_fields__:
        check_number(getattr(window, name), f"{name} of a window")
    return window


# Parts ------------------------------------------------------------------------


def _check_name(name: object) -> str:
    """Check a name: a plain str, because drivers treat subclasses of str differently."""
    checked = check_key(name)
    if type(name) is not str:
        raise InvalidKey(name, f"it is of type {type(name).__name__}, a kind of str: make it a plain str")
    return checked


def _check_family(family: object) -> None:
    if family not in FAMILIES:
        raise InvalidValue(f"a family is one of {', '.join(FAMILIES)}")


def _check_kind(item: object, kind: type, what: str) -> None:
    if not isinstance(item, kind):
        raise InvalidValue(f"{what} must be of type {kind.__name__}, not of type {type(item).__name__}")


def _check_stored(key: str, stored: Stored | object) -> int:
    if isinstance(stored, Mapping):
        for name, item in stored.items():
            _check_name(name)
            _check_encoded(key, item)
    else:
        _check_encoded(key, stored)
    return codec.size_bytes(stored)  # type: ignore[arg-type]


def _check_encoded(key: str, encoded: object) -> None:
    if type(encoded) is not bytes or not encoded:
        raise InvalidValue(
            f"the stored form for {key!r} is encoded bytes, not something of type {type(encoded).__name__}"
        )
    if encoded[0] != 0 and not _is_text(encoded):
        raise InvalidValue(
            f"the stored form for {key!r} is neither raw bytes, which begin with zero, nor JSON in UTF-8"
        )


def _is_text(encoded: bytes) -> bool:
    try:
        encoded.decode()
    except UnicodeDecodeError:
        return False
    return True


def _check_meta(key: str, meta_json: object) -> None:
    if meta_json is None or meta_json is KEEP:
        return
    if type(meta_json) is not bytes or meta_json[:1] != b"{" or not _is_text(meta_json):
        raise InvalidValue(f"meta for {key!r} is a JSON object")
    check_meta_size(key, meta_json)


def _check_import(write: Import) -> None:
    if not 0 < check_number(write.version, "a version") <= VERSION_MAX:
        raise InvalidValue("the version of an imported entry is an integer from 1 to 2^53-1")
    for time_ms in (write.created_ms, write.updated_ms, write.expires_ms or 0):
        if check_number(time_ms, "a time in milliseconds") > TIME_MS_MAX:
            raise InvalidValue(f"the times of {write.key!r} are before the year 10000")
    if write.expires_ms == 0 or write.ttl_ms is not None or write.meta_json is KEEP:
        raise InvalidValue(f"an import of {write.key!r} has its own meta and the time when it expires")
    if write.writer is not None:
        check_writer(write.writer)


def _check_ttl(ttl_ms: object) -> None:
    if ttl_ms is None:
        return
    if type(ttl_ms) is not int:
        raise InvalidTTL(f"is of type {type(ttl_ms).__name__}")
    if not 0 < ttl_ms <= TTL_MS_MAX:
        raise InvalidTTL("is not above zero, or more than a hundred years")
