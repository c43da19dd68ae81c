"""Python values as bytes and back: exactly, canonically, or refused by path."""

from __future__ import annotations

import enum
import json
import math
import random
from collections import OrderedDict, namedtuple
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from limpet.codec import (
    DEPTH_MAX,
    INT_MAX,
    INT_MIN,
    Fields,
    counter,
    decode,
    encode,
    encode_field,
    kind_of,
    member,
    size_bytes,
)
from limpet.errors import Corrupt, InvalidKey, InvalidValue

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
scalars = (
    st.none() | st.booleans() | st.integers(INT_MIN, INT_MAX) | st.floats(allow_nan=False, allow_infinity=False) | texts
)
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=12
)
field_names = texts.filter(lambda name: name != "" and "\0" not in name)
record_values = st.dictionaries(field_names, json_values | st.binary(max_size=8), max_size=4).map(Fields)
thorough = settings(max_examples=200, deadline=None)


def exactly(value: Any) -> Any:
    """A value in a form in which 1, 1.0, True, 0.0 and -0.0 are five different things."""
    match value:
        case dict():
            return type(value), {name: exactly(item) for name, item in value.items()}
        case list():
            return list, [exactly(item) for item in value]
        case float():
            return float, value.hex()
        case _:
            return type(value), value


# What goes in comes out -------------------------------------------------------


@thorough
@given(json_values)
def test_any_json_comes_back_exactly(value: Any) -> None:
    stored = encode(value)

    assert exactly(decode(stored)) == exactly(value)
    assert kind_of(stored) == "json"


@thorough
@given(json_values)
def test_what_is_stored_is_plain_compact_sorted_json(value: Any) -> None:
    stored = encode(value)

    assert isinstance(stored, bytes)
    read = json.loads(stored)
    assert exactly(read) == exactly(value)
    assert not any(character in b" \n\t" for character in _outside_strings(stored))
    assert _is_sorted(json.loads(stored, object_pairs_hook=list), read)


def _outside_strings(text: bytes) -> bytes:
    kept, inside, escaped = bytearray(), False, False
    for byte in text:
        if not inside and byte != ord('"'):
            kept.append(byte)
        if byte == ord('"') and not escaped:
            inside = not inside
        escaped = inside and byte == ord("\\") and not escaped
    return bytes(kept)


def _is_sorted(pairs: Any, value: Any) -> bool:
    if isinstance(value, dict):
        names = [name for name, _ in pairs]
        return names == sorted(names) and all(_is_sorted(item, value[name]) for name, item in pairs)
    if isinstance(value, list):
        return all(_is_sorted(item, inner) for item, inner in zip(pairs, value, strict=True))
    return True


@thorough
@given(json_values, st.randoms(use_true_random=False))
def test_the_order_of_members_does_not_matter(value: Any, dice: random.Random) -> None:
    assert encode(_shuffled(value, dice)) == encode(value)


def _shuffled(value: Any, dice: random.Random) -> Any:
    if isinstance(value, dict):
        names = list(value)
        dice.shuffle(names)
        return {name: _shuffled(value[name], dice) for name in names}
    return [_shuffled(item, dice) for item in value] if isinstance(value, list) else value


@thorough
@given(json_values, json_values)
def test_equal_encodings_are_equal_values(one: Any, other: Any) -> None:
    assert (encode(one) == encode(other)) == (exactly(one) == exactly(other))


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (None, b"null"),
        (True, b"true"),
        (1, b"1"),
        (1.0, b"1.0"),
        (-0.0, b"-0.0"),
        (1e22, b"1e22"),
        (INT_MIN, b"-9223372036854775808"),
        (INT_MAX, b"9223372036854775807"),
        ('é\0"', b'"\xc3\xa9\\u0000\\""'),
        ({"b": [1, {}], "a": None}, b'{"a":null,"b":[1,{}]}'),
        ((1, (2,)), b"[1,[2]]"),
        (b"\xff", b"\0\xff"),
        (b"", b"\0"),
    ],
)
def test_the_stored_form_is_known(value: Any, stored: bytes) -> None:
    """Stored data and wires have this form, so changing it breaks everything that was written before."""
    assert encode(value) == stored


@pytest.mark.parametrize("one", [1, 1.0, True, "1", b"1", None, 0, 0.0, -0.0, False, "", b"", [], {}, [1]])
def test_no_two_of_these_are_equal(one: Any) -> None:
    others = [1, 1.0, True, "1", b"1", None, 0, 0.0, -0.0, False, "", b"", [], {}, [1]]

    assert [encode(one) == encode(other) for other in others].count(True) == 1


@thorough
@given(st.binary())
def test_bytes_come_back_as_bytes(value: bytes) -> None:
    for given_as in (value, bytearray(value), memoryview(value)):
        stored = encode(given_as)
        assert decode(stored) == value
        assert type(decode(stored)) is bytes
        assert kind_of(stored) == "bytes"
        assert size_bytes(stored) == len(value)


@thorough
@given(record_values)
def test_records_come_back_exactly(value: Fields) -> None:
    stored = encode(value)

    assert exactly(decode(stored)) == exactly(value)
    assert type(decode(stored)) is Fields
    assert kind_of(stored) == "record"
    assert size_bytes(stored) == sum(len(name.encode()) + size_bytes(encode(item)) for name, item in value.items())


def test_tuples_become_lists() -> None:
    assert decode(encode((1, (2, ())))) == [1, [2, []]]


def test_what_is_decoded_is_fresh_every_time() -> None:
    stored = encode({"a": [1]})

    decode(stored)["a"].append(2)

    assert decode(stored) == {"a": [1]}


def test_changing_what_was_encoded_changes_nothing() -> None:
    fields, raw = Fields(a=[1]), bytearray(b"x")
    record, stored = encode(fields), encode(raw)

    fields["a"].append(2)
    fields["b"] = 1
    raw[0] = 0

    assert decode(record) == {"a": [1]}
    assert decode(stored) == b"x"


def test_the_size_of_json_is_its_text() -> None:
    assert size_bytes(encode({"é": 1})) == len('{"é":1}'.encode())


def test_fields_show_what_they_are() -> None:
    assert repr(Fields(a=1)) == "Fields({'a': 1})"


# What is refused --------------------------------------------------------------


class Colour(enum.Enum):
    RED = "red"


class Word(str, enum.Enum):  # noqa: UP042 - a StrEnum is another thing
    RED = "red"


class Number(enum.IntEnum):
    ONE = 1


class Text(str):
    pass


class Whole(int):
    pass


Point = namedtuple("Point", "x y")

FOREIGN = [
    b"x",
    bytearray(b"x"),
    memoryview(b"x"),
    {1},
    frozenset(),
    datetime(2024, 1, 1),
    date(2024, 1, 1),
    timedelta(1),
    Decimal("1.5"),
    1j,
    UUID(int=1),
    Colour.RED,
    Word.RED,
    Number.ONE,
    Text("x"),
    Whole(1),
    Point(1, 2),
    OrderedDict(a=1),
    Fields(a=1),
    range(3),
    object(),
    len,
    msgspec.Raw(b"1"),
]


@pytest.mark.parametrize("value", FOREIGN, ids=lambda value: type(value).__name__)
def test_what_json_cannot_hold_is_refused_by_path(value: Any) -> None:
    for wrapped, path in (([value], "$[0]"), ({"a": [0, {"b": value}]}, "$.a[1].b"), (((value,),), "$[0][0]")):
        with pytest.raises(InvalidValue) as refusal:
            encode(wrapped)
        assert refusal.value.path == path
        assert str(refusal.value).startswith(f"a value of type {type(value).__name__} is not JSON")
        assert str(refusal.value).endswith(f" at {path}")


@pytest.mark.parametrize(
    "value",
    [value for value in FOREIGN if not isinstance(value, bytes | bytearray | memoryview | Fields)],
    ids=lambda value: type(value).__name__,
)
def test_what_json_cannot_hold_is_refused_at_the_top(value: Any) -> None:
    with pytest.raises(InvalidValue) as refusal:
        encode(value)

    assert refusal.value.path == "$"


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (INT_MAX + 1, "an integer is outside -2^63 to 2^63-1"),
        (INT_MIN - 1, "an integer is outside -2^63 to 2^63-1"),
        (10**400, "an integer is outside -2^63 to 2^63-1"),
        (math.nan, "a float is not finite"),
        (math.inf, "a float is not finite"),
        (-math.inf, "a float is not finite"),
        ({1: "x"}, "a member name is of type int, not str"),
        ({None: "x"}, "a member name is of type NoneType, not str"),
        ({Text("a"): "x"}, "a member name is of type Text, not str"),
        ("\ud800", "a string holds a lone surrogate"),
        ("ok\udfff", "a string holds a lone surrogate"),
        ({"\ud800": 1}, "a member name holds a lone surrogate"),
    ],
    ids=lambda value: ascii(value)[:20],
)
@pytest.mark.parametrize("steps", [(), ("a",), (1,), ("a", 1, "b")])
def test_what_json_cannot_carry_is_refused_by_path(value: Any, problem: str, steps: tuple[str | int, ...]) -> None:
    wrapped, path = value, ""
    for step in reversed(steps):
        wrapped = {"z": "fine", step: wrapped} if isinstance(step, str) else ["fine", wrapped]
        path = (f".{step}" if isinstance(step, str) else f"[{step}]") + path

    with pytest.raises(InvalidValue, match=problem.replace("^", r"\^")) as refusal:
        encode(wrapped)

    assert refusal.value.path == "$" + path


def test_a_field_is_named_in_the_path() -> None:
    with pytest.raises(InvalidValue) as refusal:
        encode(Fields(fine=1, outer={"inner": [math.nan]}))
    assert refusal.value.path == "$.outer.inner[0]"

    with pytest.raises(InvalidValue) as refusal:
        encode_field("\ud800", "name")
    assert refusal.value.path == "$.name"


@pytest.mark.parametrize("name", ["", "a\0", "\ud800", 1, None])
def test_the_names_of_fields_are_keys(name: Any) -> None:
    with pytest.raises(InvalidKey):
        encode(Fields({name: 1}))


@pytest.mark.parametrize("open_with", ["list", "dict", "tuple", "mixed"])
def test_nesting_has_an_end(open_with: str) -> None:
    def nested(depth: int) -> Any:
        value: Any = 1
        for level in range(depth):
            kind = ("list", "dict", "tuple")[level % 3] if open_with == "mixed" else open_with
            value = [value] if kind == "list" else {"a": value} if kind == "dict" else (value,)
        return value

    assert exactly(decode(encode(nested(DEPTH_MAX)))) is not None
    with pytest.raises(InvalidValue, match="nested deeper than 128"):
        encode(nested(DEPTH_MAX + 1))
    with pytest.raises(InvalidValue, match="nested deeper than 128"):
        encode(nested(5000))


def test_a_value_that_holds_itself_is_refused() -> None:
    circle: list[Any] = []
    circle.append(circle)

    with pytest.raises(InvalidValue, match="nested deeper"):
        encode(circle)


def test_a_long_path_is_shortened_in_the_middle() -> None:
    with pytest.raises(InvalidValue) as refusal:
        encode({"begin" * 20: {"middle": {"end" * 20: math.nan}}})

    path = refusal.value.path
    assert path is not None
    assert len(path) <= 80
    assert path.startswith("$.begin")
    assert "..." in path
    assert path.endswith("end")


@pytest.mark.parametrize("name", ["new\nline", "\ud800", "\x1b[31m", "\u202e"])
def test_a_path_can_be_printed(name: str) -> None:
    for value in ({name: math.nan}, {name: ["\ud800"]}, Fields({"a": {name: math.nan}})):
        with pytest.raises(InvalidValue) as refusal:
            encode(value)
        assert (refusal.value.path or "").isprintable()
        assert str(refusal.value).isprintable()


def test_a_refusal_does_not_show_the_value() -> None:
    for value in ({"a": Decimal("123456")}, {"a": "hush\ud800"}, [10**30], {"a": {"hush"}}):
        with pytest.raises(InvalidValue) as refusal:
            encode(value)
        assert not any(secret in str(refusal.value) for secret in ("123456", "hush", "000000"))


# Looking into what is stored --------------------------------------------------


@thorough
@given(st.dictionaries(texts, json_values, max_size=4), texts)
def test_a_member_is_found_in_its_encoding(value: dict[str, Any], other: str) -> None:
    stored = encode(value)

    for name in (*value, other):
        assert member(stored, name) == (encode(value[name]) if name in value else None)


@thorough
@given(record_values, field_names)
def test_a_field_is_found_in_its_encoding(value: Fields, other: str) -> None:
    stored = encode(value)

    for name in (*value, other):
        assert member(stored, name) == (encode(value[name]) if name in value else None)


@pytest.mark.parametrize("value", [None, 1, "a", ["a"], b'{"a":1}', [{"a": 1}]])
def test_what_is_no_object_has_no_members(value: Any) -> None:
    assert member(encode(value), "a") is None


@thorough
@given(json_values | st.binary())
def test_a_counter_is_an_integer_and_nothing_else(value: Any) -> None:
    assert counter(encode(value)) == (value if type(value) is int else None)


def test_a_record_is_no_counter() -> None:
    assert counter({"a": b"1"}) is None


DAMAGED = [b"", b"{", b'{"a":', b"nope", b"1 2", b'"\xff"', b"[1,]", b"{'a':1}"]


@pytest.mark.parametrize("stored", DAMAGED)
def test_what_is_damaged_is_corrupt(stored: bytes) -> None:
    with pytest.raises(Corrupt):
        decode(stored)


@pytest.mark.parametrize("stored", [stored for stored in DAMAGED if stored.startswith(b"{")])
def test_looking_into_what_is_damaged_is_corrupt(stored: bytes) -> None:
    """A filter meets it during a scan, and must not break with an error of the decoder."""
    with pytest.raises(Corrupt):
        member(stored, "a")
