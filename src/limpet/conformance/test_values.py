"""Values: what may be stored, how it comes back, how large it may be."""

# The contract, which the docstrings quote, writes `bytes` and `meta` small.
# ruff: noqa: D403

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import pathlib
import string
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import pytest

import limpet
from limpet.conformance.conftest import OpenStore
from limpet.conformance.support import next_event
from limpet.errors import Conflict, InvalidValue, LimpetError, TypeMismatch, ValueTooLarge

INT_MIN, INT_MAX = -(2**63), 2**63 - 1


async def drain(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


def exact(value: Any) -> Any:
    """The value with explicit types, so that 1, 1.0 and True differ, and 0.0 and -0.0."""
    if isinstance(value, dict):
        return type(value), {name: exact(item) for name, item in value.items()}
    if isinstance(value, list):
        return type(value), [exact(item) for item in value]
    return type(value), repr(value)


async def assert_kept(store: limpet.Store, *values: object) -> None:
    """Fail unless each value comes back exactly: alone, in a list, in an object and as a field."""
    for value in values:
        for whole in (value, [value], {"member": value}, limpet.Fields(field=value)):
            written = await store.put("k", whole)
            assert exact(written.value) == exact(whole)
            assert exact(await store.get("k")) == exact(whole)


async def assert_refused(store: limpet.Store, *values: object) -> None:
    """Fail unless each value is refused: alone, in a list, in an object and as a field."""
    for value in values:
        for whole in (value, [value], {"member": value}, [{"deep": [value]}], limpet.Fields(field=[value])):
            with pytest.raises(InvalidValue):
                await store.put("k", whole)
    assert (await store.status()).revision == 0


def nested(depth: int, kind: str = "list") -> Any:
    """Lists, objects or both in turn, nested this deep."""
    value: Any = "core"
    for level in range(depth):
        value = [value] if kind == "list" or (kind == "both" and level % 2) else {"m": value}
    return value


# What comes back --------------------------------------------------------------


async def test_every_kind_of_json_comes_back(store: limpet.Store) -> None:
    """null, booleans, integers, floats, strings, lists and objects come back as they went in."""
    await assert_kept(store, None, True, False, 0, -1, 42, 1.5, -2.25, "", "text", [], {}, [[]], [{}], {"": {}})


async def test_a_mixed_document_comes_back(store: limpet.Store) -> None:
    """null, booleans, integers, floats, strings, lists and objects come back as they went in."""
    document = {
        "players": [{"name": "Ada", "score": 3, "rank": 1.0, "out": False}, {"name": "", "score": -3, "out": None}],
        "empty": {"list": [], "object": {}, "string": "", "null": None, "zero": 0, "false": False},
        "order": [3, 1, 2, [None, [None]], {"b": 1, "a": 2}],
    }

    await assert_kept(store, document)


async def test_a_value_comes_back_by_every_road(store: limpet.Store) -> None:
    """null, booleans, integers, floats, strings, lists and objects come back as they went in."""
    value = {"int": 1, "float": 1.0, "flag": True, "null": None, "text": "\u00e9\0", "list": [-0.0, 1e22]}
    seen: list[Any] = []

    def look(found: Any) -> Any:
        seen.append(found)
        return found

    async with store.watch("k") as watch:
        seen.append((await store.put("k", value)).value)
        seen.append((await next_event(watch)).value)
    seen.append(await store.get("k"))
    seen += [entry.value for entry in await drain(store.scan())]
    seen += [event.value for event in await drain(store.history("k"))]
    await store.update("k", look)
    with pytest.raises(Conflict) as raised:
        await store.create("k", 1)
    seen.append(raised.value.current and raised.value.current.value)
    entry = (await store.batch().put("l", value).commit()).entries[0]
    seen.append(entry and entry.value)
    seen.append(await store.take("k"))

    assert [exact(found) for found in seen] == [exact(value)] * 9


async def test_lists_keep_their_order(store: limpet.Store) -> None:
    """null, booleans, integers, floats, strings, lists and objects come back as they went in."""
    value = [*range(200, 0, -1), *"zebra", None, True, [3, 2, 1]]

    await store.put("k", value)

    assert await store.get("k") == value


async def test_integers_and_floats_stay_apart(store: limpet.Store) -> None:
    """An integer stays an integer and a float stays a float: `1` is not `1.0`."""
    await assert_kept(store, 1, 1.0, 0, 0.0, -1, -1.0, 100, 100.0, 2**53, float(2**53), 10**18, 1e18)


async def test_large_integers_lose_no_digit(store: limpet.Store) -> None:
    """An integer stays an integer and a float stays a float: `1` is not `1.0`.

    An engine that keeps numbers as doubles would lose the last digits of these.
    """
    await assert_kept(store, 2**53 + 1, -(2**53) - 1, 2**62 + 1, 123456789012345678, 10**15 + 1, INT_MAX - 1)


async def test_booleans_are_no_numbers(store: limpet.Store) -> None:
    """An integer stays an integer and a float stays a float: `1` is not `1.0`."""
    await assert_kept(store, [True, 1, 1.0, False, 0, 0.0, -0.0])


async def test_negative_zero_keeps_its_sign(store: limpet.Store) -> None:
    """`-0.0` keeps its sign, and `1e22` stays a float."""
    await assert_kept(store, -0.0, 0.0, [-0.0, 0.0, 0])


async def test_large_floats_stay_floats(store: limpet.Store) -> None:
    """`-0.0` keeps its sign, and `1e22` stays a float.

    A JSON type that keeps numbers as decimals would write these without a point, and read them as integers.
    """
    await assert_kept(store, 1e15, 1e16, 1e17, 1e21, 1e22, 1e23, -1e22, 1e100, 1e300, float(2**63), float(2**64))


async def test_floats_at_the_edges_lose_no_bit(store: limpet.Store) -> None:
    """`-0.0` keeps its sign, and `1e22` stays a float."""
    edges = [5e-324, -5e-324, 2.225073858507201e-308, 2.2250738585072014e-308, 1.7976931348623157e308]
    awkward = [0.1, 0.1 + 0.2, 1 / 3, 1e-5, 1e-7, 123456789.12345679, 9007199254740993.0, 4.35, 1.1e-10, 5e-10]

    await assert_kept(store, *edges, *(-edge for edge in edges), *awkward)


async def test_u0000_inside_a_string_is_kept(store: limpet.Store) -> None:
    """U+0000 inside a string is legal."""
    await assert_kept(store, "\0", "a\0b", "\0\0", "end\0", "\\u0000", "\\0", "\0\\u0000")


async def test_u0000_in_the_name_of_a_member_is_kept(store: limpet.Store) -> None:
    """U+0000 inside a string is legal."""
    await assert_kept(store, {"\0": 1, "a\0b": "\0", "": 2})


async def test_every_character_is_kept(store: limpet.Store) -> None:
    """Any text is kept exactly, in keys of objects too."""
    plane = "".join(chr(code) for code in range(0x10000) if not 0xD800 <= code <= 0xDFFF)
    beyond = "".join(chr(code) for code in range(0x10000, 0x110000, 37))

    await assert_kept(store, plane, beyond)


async def test_text_that_is_code_elsewhere_is_kept(store: limpet.Store) -> None:
    """Any text is kept exactly, in keys of objects too."""
    await assert_kept(
        store,
        "'; DROP TABLE limpet_entries; --",
        '"quoted" \\ and / and \\/ and \\n',
        "line\nline\r\nline\ttab\x0b\x0c\x1b\x7f\x85\u2028\u2029",
        "</script><!-- & &amp; %00 %s {} {0} $1 ?1 :name",
        "null",
        "true",
        "1",
        "1.0",
        "NaN",
        " padded ",
        "\ufeffwith a mark",
        "caf\u00e9 cafe\u0301 \ufb01 \u212b",
        "\U0001f469\u200d\U0001f52c \U0001f1e9\U0001f1ea \u202eabc\u202c",
        "\ud7ff\ue000\ufffe\uffff\U0010ffff",
    )


async def test_any_text_names_a_member(store: limpet.Store) -> None:
    """Any text is kept exactly, in keys of objects too."""
    names = [
        "",
        " ",
        "a.b",
        "a[0]",
        "$",
        "__proto__",
        "caf\u00e9",
        "cafe\u0301",
        "A",
        "a",
        '"',
        "\\",
        "\n",
        "\U0001f600",
    ]
    names += [*string.punctuation, "$text", "$bytes", "$json", "kind", "value", "\ufeff", "x" * 5000]

    await assert_kept(store, {name: name for name in names})


async def test_members_that_look_like_our_own_marks_are_kept(store: limpet.Store) -> None:
    """Any text is kept exactly, in keys of objects too.

    An engine may mark bytes and records inside its own encoding. No value may be taken for such a mark.
    """
    marks = ["$text", "$bytes", "$json", "$raw", "$", "$$", "__bytes__", "!", "kind"]
    for mark in marks:
        await assert_kept(store, {mark: "QUJD"}, {mark: {mark: "QUJD"}}, {mark: None, "!": 1}, {mark: 1, "$text": "x"})


async def test_the_names_of_fields_are_kept(store: limpet.Store) -> None:
    """Any text is kept exactly, in keys of objects too."""
    names = [*string.punctuation, "$text", "caf\u00e9", "cafe\u0301", "A", "a", "\n", "\U0001f600", "\U0010ffff", " "]
    fields = limpet.Fields({name: name for name in names})

    await store.put("k", fields)

    assert exact(await store.get("k")) == exact(fields)


# Bytes, tuples, and kinds -----------------------------------------------------


async def test_bytes_come_back(store: limpet.Store) -> None:
    """bytes come back as the same bytes, empty bytes included."""
    for value in (b"", b"\0", b"\0\0", bytes(range(256)), b"text", b"42", b"null", b'{"a":1}', b"\xff\xfe", b"\x80"):
        await store.put("k", value)
        assert exact(await store.get("k")) == exact(value)


async def test_bytes_come_back_as_fields(store: limpet.Store) -> None:
    """bytes come back as the same bytes, empty bytes included."""
    values = (b"", b"\0", bytes(range(256)), b"text", b"42", b'{"$text":"x"}', b"\xff\xfe", "\u00e9".encode(), b"\r\n")
    fields = limpet.Fields({f"f{number}": value for number, value in enumerate(values)}, text="text", number=42)

    await store.put("k", fields)

    assert exact(await store.get("k")) == exact(fields)


async def test_bytes_come_back_by_every_road(store: limpet.Store) -> None:
    """bytes come back as the same bytes, empty bytes included."""
    for value in (b"", b"\0\xff"):
        await store.put("k", value)
        roads = [
            next(entry.value for entry in await drain(store.scan())),
            [event.value for event in await drain(store.history("k"))][-1],
            await store.take("k"),
        ]
        assert roads == [value] * 3


async def test_other_kinds_of_bytes_come_back_as_bytes(store: limpet.Store) -> None:
    """bytes come back as the same bytes, empty bytes included."""
    for value in (bytearray(b"\0raw"), memoryview(b"\0raw"), memoryview(b"r_a_w_")[::2]):
        await store.put("k", value)
        assert exact(await store.get("k")) == exact(bytes(value))


async def test_text_and_bytes_are_two_values(store: limpet.Store) -> None:
    """bytes come back as the same bytes, empty bytes included."""
    await store.put("text", "raw")
    await store.put("bytes", b"raw")

    assert [exact(await store.get(key)) for key in ("text", "bytes")] == [exact("raw"), exact(b"raw")]


async def test_tuples_come_back_as_lists(store: limpet.Store) -> None:
    """Tuples come back as lists."""
    await store.put("k", (1, (2, ()), {"m": (3,)}))

    assert exact(await store.get("k")) == exact([1, [2, []], {"m": [3]}])


async def test_a_tuple_in_a_field_comes_back_as_a_list(store: limpet.Store) -> None:
    """Tuples come back as lists."""
    await store.put("k", limpet.Fields(f=(1, (2,))), meta={"tags": ("a", "b")})

    found = await store.entry("k")

    assert found is not None
    assert exact(found.value) == exact(limpet.Fields(f=[1, [2]]))
    assert found.meta == {"tags": ["a", "b"]}


async def test_an_entry_says_what_kind_it_holds(store: limpet.Store) -> None:
    """The kind of an entry is `json`, `bytes` or `record`."""
    kinds: list[tuple[object, str]] = [
        (None, "json"),
        ({"a": 1}, "json"),
        ("", "json"),
        (b"", "bytes"),
        (b'{"a":1}', "bytes"),
        (limpet.Fields(), "record"),
        (limpet.Fields(a=1), "record"),
    ]
    for value, kind in kinds:
        written = await store.put("k", value)
        found = await store.entry("k")
        scanned = [entry.kind for entry in await drain(store.scan())]
        assert (written.kind, found and found.kind, scanned) == (kind, kind, [kind])


async def test_an_object_and_a_record_of_the_same_members_are_two_kinds(store: limpet.Store) -> None:
    """The kind of an entry is `json`, `bytes` or `record`."""
    await store.put("object", {"a": 1})
    await store.put("record", limpet.Fields(a=1))

    assert type(await store.get("object")) is dict
    assert isinstance(await store.get("record"), limpet.Fields)


# What is refused --------------------------------------------------------------


async def test_integers_reach_to_their_edges(store: limpet.Store) -> None:
    """Integers reach from -2^63 to 2^63-1; a larger one is InvalidValue."""
    await assert_kept(store, INT_MIN, INT_MIN + 1, INT_MAX - 1, INT_MAX)


async def test_integers_beyond_their_edges_are_refused(store: limpet.Store) -> None:
    """Integers reach from -2^63 to 2^63-1; a larger one is InvalidValue."""
    await assert_refused(store, INT_MAX + 1, INT_MIN - 1, 2**64 - 1, 2**64, -(2**64), 10**30, 10**5000)


async def test_what_is_no_finite_number_is_refused(store: limpet.Store) -> None:
    """NaN and the infinities are InvalidValue."""
    await assert_refused(store, float("nan"), -float("nan"), float("inf"), -float("inf"), 1e308 * 10)


async def test_no_meta_and_no_update_brings_in_what_is_no_finite_number(store: limpet.Store) -> None:
    """NaN and the infinities are InvalidValue."""
    before = await store.put("k", 1.5)

    for value in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(InvalidValue):
            await store.put("k", 1, meta={"m": [value]})
        with pytest.raises(InvalidValue):
            await store.update("k", lambda found, value=value: found * value)
        with pytest.raises(InvalidValue):
            await store.put("k", 1, expect=limpet.field("f") == value)

    assert await store.entry("k") == before


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Word(enum.StrEnum):
    YES = "yes"


class Point(NamedTuple):
    x: int
    y: int


class Text(str):
    __slots__ = ()


class Number(int):
    pass


async def test_other_objects_are_refused(store: limpet.Store) -> None:
    """bytes, sets, datetimes, Decimals, Enums and other objects inside a JSON value are InvalidValue."""
    times = [datetime.datetime.now(datetime.UTC), datetime.date(2024, 1, 1), datetime.time(1), datetime.timedelta(1)]
    numbers = [decimal.Decimal(1), 1j, Number(1), Level.LOW]
    containers = [{1}, frozenset({1}), collections.deque([1]), collections.OrderedDict(a=1), Point(1, 2), range(3)]
    others = [Colour.RED, Word.YES, Text("a"), uuid.UUID(int=1), pathlib.PurePath("a"), object(), int, len, ..., store]

    await assert_refused(store, *times, *numbers, *containers, *others)


async def test_bytes_inside_a_json_value_are_refused(store: limpet.Store) -> None:
    """bytes, sets, datetimes, Decimals, Enums and other objects inside a JSON value are InvalidValue."""
    for raw in (b"", b"raw", bytearray(b"raw"), memoryview(b"raw")):
        for whole in ([raw], {"member": raw}, [{"deep": [raw]}], limpet.Fields(field=[raw])):
            with pytest.raises(InvalidValue):
                await store.put("k", whole)

    assert (await store.status()).revision == 0


async def test_an_iterator_is_refused_and_left_alone(store: limpet.Store) -> None:
    """bytes, sets, datetimes, Decimals, Enums and other objects inside a JSON value are InvalidValue."""
    items = iter([1, 2, 3])

    with pytest.raises(InvalidValue):
        await store.put("k", items)

    assert list(items) == [1, 2, 3]


async def test_our_own_words_are_no_values(store: limpet.Store) -> None:
    """bytes, sets, datetimes, Decimals, Enums and other objects inside a JSON value are InvalidValue."""
    await assert_refused(store, limpet.ABSENT, limpet.KEEP, limpet.PRESENT, limpet.ANY)


async def test_a_record_inside_a_json_value_is_refused(store: limpet.Store) -> None:
    """bytes, sets, datetimes, Decimals, Enums and other objects inside a JSON value are InvalidValue."""
    for whole in ([limpet.Fields(a=1)], {"m": limpet.Fields()}, limpet.Fields(f=limpet.Fields(a=1))):
        with pytest.raises(InvalidValue):
            await store.put("k", whole)


async def test_a_member_name_must_be_a_str(store: limpet.Store) -> None:
    """A member name that is not a str is InvalidValue."""
    for name in (1, 1.5, True, None, b"name", ("a",), Word.YES, Text("a")):
        await assert_refused(store, {name: 1}, {"good": 1, name: 2})


async def test_a_field_name_must_be_a_str_too(store: limpet.Store) -> None:
    """A member name that is not a str is InvalidValue.

    The name of a field follows the rules of keys, and so does its error.
    """
    names: list[Any] = [1, None, b"name", "", "a\0b", "x" * 1025]
    for name in names:
        with pytest.raises(limpet.errors.RequestError):
            await store.put("k", limpet.Fields({name: 1}))

    assert (await store.status()).revision == 0


async def test_a_lone_surrogate_in_a_string_is_refused(store: limpet.Store) -> None:
    """A lone surrogate anywhere in a value is InvalidValue."""
    await assert_refused(store, "\ud800", "a\udfff", "\ude00\ud83d", "\ud83d" + "\ude00", "x" * 10_000 + "\ud800")


async def test_a_lone_surrogate_in_a_member_name_is_refused(store: limpet.Store) -> None:
    """A lone surrogate anywhere in a value is InvalidValue."""
    await assert_refused(store, {"\ud800": 1}, {"good": 1, "a\udc00": None}, {"deep": {"\udfff": {}}})


async def test_a_lone_surrogate_in_a_meta_is_refused(store: limpet.Store) -> None:
    """A lone surrogate anywhere in a value is InvalidValue."""
    for meta in ({"by": "\ud800"}, {"\ud800": "by"}, {"by": ["\udfff"]}):
        with pytest.raises(InvalidValue):
            await store.put("k", 1, meta=meta)


@pytest.mark.parametrize("kind", ["list", "object", "both"])
async def test_nesting_of_128_is_accepted(store: limpet.Store, kind: str) -> None:
    """Nesting deeper than 128 is InvalidValue, and exactly 128 is accepted."""
    value = nested(128, kind)

    await store.put("k", value)
    await store.put("field", limpet.Fields(f=value))

    assert await store.get("k") == value
    assert await store.record("field").get("f") == value


@pytest.mark.refused_early
@pytest.mark.parametrize("kind", ["list", "object", "both"])
async def test_nesting_of_129_is_refused(store: limpet.Store, kind: str) -> None:
    """Nesting deeper than 128 is InvalidValue, and exactly 128 is accepted."""
    for value in (nested(129, kind), limpet.Fields(f=nested(129, kind)), [1, nested(128, kind)]):
        with pytest.raises(InvalidValue, match="128"):
            await store.put("k", value)

    assert (await store.status()).revision == 0


async def test_empty_containers_count_as_nesting(store: limpet.Store) -> None:
    """Nesting deeper than 128 is InvalidValue, and exactly 128 is accepted."""
    deepest: Any = []
    for _ in range(127):
        deepest = [deepest]

    await store.put("k", deepest)

    with pytest.raises(InvalidValue):
        await store.put("k", [deepest])
    assert await store.get("k") == deepest


async def test_nesting_without_end_is_refused(store: limpet.Store) -> None:
    """Nesting deeper than 128 is InvalidValue, and exactly 128 is accepted.

    Neither a list that holds itself nor a very deep one may end in a crash.
    """
    ring: list[Any] = []
    ring.append(ring)
    knot: dict[str, Any] = {}
    knot["again"] = [knot]

    for value in (ring, knot, nested(100_000), nested(100_000, "object")):
        with pytest.raises(InvalidValue):
            await store.put("k", value)


@pytest.mark.refused_early
@pytest.mark.parametrize(
    ("value", "path"),
    [
        (float("nan"), "$"),
        ([1, float("inf")], "$[1]"),
        ({"a": [1, {"b": float("nan")}]}, "$.a[1].b"),
        ({"a": {"b": {1, 2}}}, "$.a.b"),
        ([[[], [b"raw"]]], "$[0][1][0]"),
        ({"a": [{1: "x"}]}, "$.a[0]"),
        ({"a": [2**63]}, "$.a[0]"),
        ({"a": ("good", "\ud800")}, "$.a[1]"),
        ({"a": {"\ud800": 1}}, "$.a"),
        (limpet.Fields(good=1, bad=[None, object()]), "$.bad[1]"),
        (limpet.Fields(bad="\ud800"), "$.bad"),
    ],
    ids=["root", "list", "deep", "set", "lists", "name", "int", "surrogate", "surrogate-name", "field", "field-root"],
)
async def test_invalid_value_names_the_path(store: limpet.Store, value: object, path: str) -> None:
    """InvalidValue names the path of what cannot be stored."""
    with pytest.raises(InvalidValue) as raised:
        await store.put("k", value)

    assert raised.value.path == path
    assert str(raised.value).endswith(f"at {path}")


async def test_invalid_value_names_the_path_in_a_meta(store: limpet.Store) -> None:
    """InvalidValue names the path of what cannot be stored."""
    with pytest.raises(InvalidValue) as raised:
        await store.put("k", 1, meta={"by": [datetime.date(2024, 1, 1)]})

    assert raised.value.path == "$.meta.by[0]"


async def test_the_path_of_something_deep_stays_readable(store: limpet.Store) -> None:
    """InvalidValue names the path of what cannot be stored."""
    with pytest.raises(InvalidValue) as raised:
        await store.put("k", nested(5000))
    path = raised.value.path

    assert path is not None
    assert path.startswith("$[0][0]")
    assert len(path) < 200


async def test_the_message_of_invalid_value_can_be_printed(store: limpet.Store) -> None:
    """InvalidValue names the path of what cannot be stored.

    A name on that path that UTF-8 cannot carry must not break the log it is reported in.
    """
    for value in ({"\ud800": float("nan")}, {"a\nb": float("nan")}, {"x" * 100_000: float("nan")}):
        with pytest.raises(InvalidValue) as raised:
            await store.put("k", value)

        said = str(raised.value).encode()
        assert len(said) < 300
        assert b"\n" not in said


Write = Callable[[Any, Any], Awaitable[object]]

WRITES: dict[str, Write] = {
    "put": lambda store, value: store.put("k", value),
    "put with meta": lambda store, value: store.put("k", "new", meta={"bad": value}),
    "put of a record": lambda store, value: store.put("k", limpet.Fields(good=1, bad=[value])),
    "update": lambda store, value: store.update("k", lambda found: [value]),
    "batch": lambda store, value: store.batch().put("l", 1).put("k", [value]).commit(),
    "batch in front": lambda store, value: store.batch().put("k", [value]).put("l", 1).commit(),
    "record.put": lambda store, value: store.record("k").put({"bad": [value]}),
    "record.set": lambda store, value: store.record("k").set(good=1, bad=[value]),
    "record.swap": lambda store, value: store.record("k").swap("a", 1, [value]),
}


@pytest.mark.parametrize("write", WRITES)
async def test_a_refused_value_leaves_the_key_untouched(store: limpet.Store, write: str) -> None:
    """A refused value leaves the key untouched."""
    before = await store.put("k", limpet.Fields(a=1), ttl=3600, meta={"by": "me"})

    for value in (float("nan"), 2**63, "\ud800", object(), nested(129)):
        with pytest.raises(InvalidValue):
            await WRITES[write](store, value)

    assert await store.entry("k") == before
    assert (await store.keys()).keys == ["k"]
    assert (await store.status()).revision == before.revision


async def test_a_refused_value_makes_no_key(store: limpet.Store) -> None:
    """A refused value leaves the key untouched."""
    with pytest.raises(InvalidValue):
        await store.create("k", [object()])
    with pytest.raises(InvalidValue):
        await store.batch().create("k", [object()]).commit()

    assert (await store.keys()).keys == []
    assert (await store.create("k", 1)).version == 1


# Copies -----------------------------------------------------------------------


async def test_changing_what_was_put_changes_nothing(store: limpet.Store) -> None:
    """A value that is returned is never the caller's own object."""
    value: dict[str, Any] = {"list": [1, 2], "object": {"a": 1}}
    meta = {"tags": ["a"]}
    written = await store.put("k", value, meta=meta)

    value["list"].append(3)
    value["object"]["b"] = 2
    meta["tags"].append("b")

    expected = {"list": [1, 2], "object": {"a": 1}}
    found = await store.entry("k")
    assert found is not None
    assert (written.value, await store.get("k"), found.meta) == (expected, expected, {"tags": ["a"]})


async def test_what_is_returned_is_another_object(store: limpet.Store) -> None:
    """A value that is returned is never the caller's own object."""
    value: dict[str, Any] = {"list": [1]}

    written = await store.put("k", value)
    first, second = await store.get("k"), await store.get("k")

    for found in (written.value, first, second):
        assert found == value
        assert found is not value
        assert found["list"] is not value["list"]
    assert first is not second


async def test_a_buffer_may_be_used_again(store: limpet.Store) -> None:
    """A value that is returned is never the caller's own object."""
    buffer = bytearray(b"first")
    await store.put("k", buffer)
    await store.put("field", limpet.Fields(f=buffer))

    buffer[:] = b"other"

    assert await store.get("k") == b"first"
    assert await store.record("field").get("f") == b"first"


async def test_a_draft_holds_the_value_as_it_was_when_drafted(store: limpet.Store) -> None:
    """A value that is returned is never the caller's own object."""
    value = [1]
    fields: dict[str, Any] = {"f": [1]}
    draft = store.batch().put("k", value).set("r", fields)

    value.append(2)
    fields["f"].append(2)
    fields["g"] = 3
    await draft.commit()

    assert await store.get("k") == [1]
    assert await store.get("r") == {"f": [1]}


async def test_what_the_function_of_update_returned_is_not_kept_alive(store: limpet.Store) -> None:
    """A value that is returned is never the caller's own object."""
    live: list[Any] = [1]

    written = await store.update("k", lambda found: live)
    live.append(2)

    assert written is not None
    assert written.value == [1]
    assert await store.get("k") == [1]


async def test_changing_what_was_read_changes_nothing(store: limpet.Store) -> None:
    """Changing what was read changes nothing in the store."""
    original = {"list": [1, 2], "object": {"a": 1}}
    await store.put("k", original)

    found = await store.get("k")
    found["list"].clear()
    found["object"]["b"] = 2
    found["new"] = True

    assert await store.get("k") == original
    assert [entry.value for entry in await drain(store.scan())] == [original]


async def test_changing_the_value_of_an_entry_changes_neither(store: limpet.Store) -> None:
    """Changing what was read changes nothing in the store."""
    await store.put("k", [1], meta={"tags": ["a"]})
    entry = await store.entry("k")
    assert entry is not None

    entry.value.append(2)
    entry.meta["tags"].append("b")
    entry.meta["new"] = 1

    assert (entry.value, entry.meta) == ([1], {"tags": ["a"]})
    assert await store.entry("k") == entry
    assert (await store.put("k", 2, expect=entry)).version == 2


async def test_an_entry_cannot_be_changed(store: limpet.Store) -> None:
    """Changing what was read changes nothing in the store."""
    entry: Any = await store.put("k", 1)

    for name in ("key", "version", "revision"):
        with pytest.raises(AttributeError):
            setattr(entry, name, 99)

    assert await store.entry("k") == entry


async def test_changing_the_argument_of_update_and_failing_changes_nothing(store: limpet.Store) -> None:
    """Changing what was read changes nothing in the store."""
    await store.put("k", {"list": [1]})

    def spoil(found: Any) -> Any:
        found["list"].append(2)
        raise LookupError

    with pytest.raises(LookupError):
        await store.update("k", spoil)

    assert await store.get("k") == {"list": [1]}


async def test_changing_the_fields_of_a_record_changes_nothing(store: limpet.Store) -> None:
    """Changing what was read changes nothing in the store."""
    await store.put("k", limpet.Fields(a=[1], b=b"raw"))

    found = await store.get("k")
    found["a"].append(2)
    found["c"] = 3
    del found["b"]

    assert await store.get("k") == {"a": [1], "b": b"raw"}


async def test_changing_the_entry_of_a_conflict_changes_nothing(store: limpet.Store) -> None:
    """Changing what was read changes nothing in the store."""
    await store.put("k", [1])
    with pytest.raises(Conflict) as raised:
        await store.create("k", 2)
    assert raised.value.current is not None

    raised.value.current.value.append(2)

    assert await store.get("k") == [1]


# Sizes ------------------------------------------------------------------------


async def test_a_value_may_be_as_large_as_the_limit(open_store: OpenStore) -> None:
    """A value may be exactly as large as the limit, and one byte more is ValueTooLarge."""
    store = await open_store(max_value_bytes=100)

    for value in ("x" * 98, [1] * 48 + [10], b"x" * 100, limpet.Fields(ab="x" * 96), limpet.Fields(ab=b"x" * 98)):
        assert (await store.put("k", value)).value == value


async def test_a_value_may_not_be_a_byte_larger_than_the_limit(open_store: OpenStore) -> None:
    """A value may be exactly as large as the limit, and one byte more is ValueTooLarge."""
    store = await open_store(max_value_bytes=100)
    before = await store.put("k", "small")

    for value in ("x" * 99, [1] * 48 + [100], b"x" * 101, limpet.Fields(ab="x" * 97), limpet.Fields(ab=b"x" * 99)):
        with pytest.raises(ValueTooLarge):
            await store.put("k", value)

    assert await store.entry("k") == before


async def test_text_counts_in_bytes_of_utf8(open_store: OpenStore) -> None:
    """A value may be exactly as large as the limit, and one byte more is ValueTooLarge.

    Not in characters, and not in escapes: a character counts one to four bytes.
    """
    store = await open_store(max_value_bytes=100)

    for letter, most in (("x", 98), ("\u00e9", 49), ("\u20ac", 32), ("\U0001f600", 24)):
        await store.put("k", letter * most)
        with pytest.raises(ValueTooLarge) as raised:
            await store.put("k", letter * (most + 1))
        assert raised.value.size_bytes == 2 + len(letter.encode()) * (most + 1)


async def test_every_write_minds_the_limit(open_store: OpenStore) -> None:
    """A value may be exactly as large as the limit, and one byte more is ValueTooLarge."""
    store: Any = await open_store(max_value_bytes=100)
    before = await store.put("k", "small")
    large = b"x" * 101
    writes: list[Callable[[], Awaitable[object]]] = [
        lambda: store.put("k", large),
        lambda: store.put("k", large, request_id="r-1"),
        lambda: store.create("new", large),
        lambda: store.update("k", lambda found: large),
        lambda: store.batch().put("new", 1).put("k", large).commit(),
        lambda: store.record("k").put({"f": large}),
        lambda: store.record("k").set(f=large),
        lambda: store.namespace(f"{store.name}-b").put("k", large),
    ]

    for write in writes:
        with pytest.raises(ValueTooLarge):
            await write()

    assert await store.entry("k") == before
    assert (await store.keys()).keys == ["k"]
    assert (await store.status()).revision == before.revision
    assert await store.outcome("r-1") is None


async def test_value_too_large_names_size_and_limit(open_store: OpenStore) -> None:
    """ValueTooLarge names the size and the limit."""
    store = await open_store(max_value_bytes=2000)

    with pytest.raises(ValueTooLarge, match=r"3,002 bytes.*2,000") as raised:
        await store.put("game/abc", "x" * 3000)

    error = raised.value
    assert (error.key, error.size_bytes, error.limit_bytes) == ("game/abc", 3002, 2000)
    assert "game/abc" in str(error)
    assert error.code == "value_too_large"


async def test_value_too_large_names_the_size_of_the_whole_record(open_store: OpenStore) -> None:
    """ValueTooLarge names the size and the limit."""
    store = await open_store(max_value_bytes=100)
    before = await store.record("r").put({"old": b"x" * 87})

    with pytest.raises(ValueTooLarge) as raised:
        await store.record("r").set(new=b"x" * 8)

    assert (raised.value.key, raised.value.size_bytes, raised.value.limit_bytes) == ("r", 101, 100)
    assert await store.entry("r") == before
    assert (await store.record("r").set(new=b"x" * 7)).size_bytes == 100


async def test_the_size_of_bytes_is_their_length(open_store: OpenStore) -> None:
    """The size of bytes is their length, and of a record its names and encoded fields."""
    store = await open_store(max_value_bytes=100)
    for raw in (b"\0" * 100, b"\xff" * 100, b'"' * 100):
        assert (await store.put("k", raw)).size_bytes == 100

    with pytest.raises(ValueTooLarge) as raised:
        await store.put("k", b"\xff" * 101)

    assert raised.value.size_bytes == 101
    assert (await store.put("k", b"")).size_bytes == 0


async def test_the_size_of_a_record_is_its_names_and_fields(open_store: OpenStore) -> None:
    """The size of bytes is their length, and of a record its names and encoded fields."""
    store = await open_store(max_value_bytes=50)
    # Names 2 + 2 + 4, and then "xx" in quotes, three bytes as they are, and the four letters of null.
    fields = limpet.Fields({"ab": "xx", "\u00e9": b"\xff\0\xff", "\U0001f600": None})

    assert (await store.put("k", fields)).size_bytes == 8 + 4 + 3 + 4
    with pytest.raises(ValueTooLarge) as raised:
        await store.put("k", limpet.Fields({**fields, "more": b"x" * 28}))
    assert (raised.value.size_bytes, raised.value.limit_bytes) == (51, 50)
    assert (await store.put("k", limpet.Fields({**fields, "more": b"x" * 27}))).size_bytes == 50


async def test_a_record_without_fields_has_no_size(store: limpet.Store) -> None:
    """The size of bytes is their length, and of a record its names and encoded fields."""
    assert (await store.put("k", limpet.Fields())).size_bytes == 0


async def test_the_limit_is_a_million_bytes(store: limpet.Store) -> None:
    """The limit is 1,000,000 bytes unless the store was opened with another."""
    largest = bytes(range(250)) * 4000
    await store.put("bytes", largest)
    await store.put("json", "x" * 999_998)

    for value in (largest + b"x", "x" * 999_999):
        with pytest.raises(ValueTooLarge) as raised:
            await store.put("k", value)
        assert (raised.value.size_bytes, raised.value.limit_bytes) == (1_000_001, 1_000_000)

    assert await store.get("bytes") == largest
    assert await store.get("json") == "x" * 999_998
    assert await store.get("k") is None


async def test_another_limit_may_be_larger(open_store: OpenStore) -> None:
    """The limit is 1,000,000 bytes unless the store was opened with another."""
    store = await open_store(max_value_bytes=1_000_100)

    await store.put("k", b"x" * 1_000_100)

    assert await store.get("k") == b"x" * 1_000_100
    with pytest.raises(ValueTooLarge):
        await store.put("k", b"x" * 1_000_101)


async def test_the_limit_is_of_the_store_and_not_of_the_place(open_store: OpenStore) -> None:
    """The limit is 1,000,000 bytes unless the store was opened with another.

    A store with a smaller limit reads what one with a larger limit wrote.
    """
    small, large = await open_store(max_value_bytes=10), await open_store(max_value_bytes=20)

    written = await large.put("k", b"x" * 20)

    assert await small.entry("k") == written
    with pytest.raises(ValueTooLarge):
        await small.put("k", b"x" * 11)
    assert await small.take("k") == b"x" * 20


async def test_the_smallest_limit_is_one_byte(open_store: OpenStore) -> None:
    """The limit is 1,000,000 bytes unless the store was opened with another."""
    store = await open_store(max_value_bytes=1)

    assert (await store.put("k", 7)).value == 7
    with pytest.raises(ValueTooLarge):
        await store.put("k", 77)


# Meta -------------------------------------------------------------------------


async def test_meta_is_kept_beside_the_value(store: limpet.Store) -> None:
    """meta is a JSON object of at most 8,192 bytes beside the value."""
    meta = {"by": "trivia", "tags": ["a", 1, 1.0, None, True], "deep": {"caf\u00e9": "\0"}}

    written = await store.put("k", b"raw", meta=meta)

    found = await store.entry("k")
    assert found == written
    assert exact(written.meta) == exact(meta)
    assert await store.get("k") == b"raw"
    assert [exact(entry.meta) for entry in await drain(store.scan())] == [exact(meta)]


async def test_every_kind_of_value_has_a_meta(store: limpet.Store) -> None:
    """meta is a JSON object of at most 8,192 bytes beside the value."""
    entries = [
        await store.put("json", 1, meta={"by": "me"}),
        await store.put("bytes", b"", meta={"by": "me"}),
        await store.put("record", limpet.Fields(a=1), meta={"by": "me"}),
        await store.create("created", 1, meta={"by": "me"}),
        (await store.batch().put("batch", 1, meta={"by": "me"}).commit()).entries[0],
        await store.update("updated", lambda found: 1, meta={"by": "me"}),
    ]
    await store.add("counter", meta={"by": "me"})
    entries.append(await store.entry("counter"))

    assert [entry and entry.meta for entry in entries] == [{"by": "me"}] * 7


async def test_meta_may_be_as_large_as_its_limit(store: limpet.Store) -> None:
    """meta is a JSON object of at most 8,192 bytes beside the value."""
    for letter, count in (("x", 8184), ("\u00e9", 4092), ("\U0001f600", 2046)):
        meta = {"m": letter * count}
        assert (await store.put("k", 1, meta=meta)).meta == meta


async def test_meta_may_not_be_a_byte_larger(store: limpet.Store) -> None:
    """meta is a JSON object of at most 8,192 bytes beside the value."""
    before = await store.put("k", 1)

    with pytest.raises(ValueTooLarge, match=r"8,193 bytes.*8,192") as raised:
        await store.put("k", 2, meta={"m": "x" * 8185})
    with pytest.raises(ValueTooLarge):
        await store.put("k", 2, meta={"m": "\u00e9" * 4093})

    assert (raised.value.size_bytes, raised.value.limit_bytes) == (8193, 8192)
    assert await store.entry("k") == before


async def test_meta_does_not_count_against_the_value(open_store: OpenStore) -> None:
    """meta is a JSON object of at most 8,192 bytes beside the value."""
    store = await open_store(max_value_bytes=10)
    meta = {"m": "x" * 8184}

    written = await store.put("k", b"x" * 10, meta=meta)

    assert (written.size_bytes, written.meta) == (10, meta)


@pytest.mark.refused_early
@pytest.mark.parametrize("meta", ["text", 5, [["a", 1]], b"{}", ("a",), True, {"bad": b"raw"}, {1: "a"}, {"a": {1, 2}}])
async def test_a_meta_that_is_no_json_object_is_refused(store: limpet.Store, meta: Any) -> None:
    """meta is a JSON object of at most 8,192 bytes beside the value."""
    with pytest.raises(InvalidValue):
        await store.put("k", 1, meta=meta)

    assert await store.entry("k") is None


async def test_a_put_without_meta_leaves_none(store: limpet.Store) -> None:
    """A put without meta leaves the entry without meta."""
    assert (await store.put("k", 1)).meta == {}
    assert (await store.put("k", 1, meta={"by": "me"})).meta == {"by": "me"}

    written = await store.put("k", 2)

    found = await store.entry("k")
    assert found is not None
    assert (written.meta, found.meta) == ({}, {})


async def test_an_empty_meta_is_none(store: limpet.Store) -> None:
    """A put without meta leaves the entry without meta."""
    plain = await store.put("plain", 1)
    empty = await store.put("empty", 1, meta={})

    assert (plain.meta, empty.meta) == ({}, {})


async def test_a_put_may_keep_the_meta(store: limpet.Store) -> None:
    """A put without meta leaves the entry without meta.

    A caller that wants to keep it passes KEEP.
    """
    await store.put("k", 1, meta={"by": "me"})

    assert (await store.put("k", 2, meta=limpet.KEEP)).meta == {"by": "me"}
    assert (await store.put("new", 1, meta=limpet.KEEP)).meta == {}


# Secrets ----------------------------------------------------------------------

HIDDEN = "hunter2"

FAILURES: dict[str, tuple[type[LimpetError], Callable[[Any], Awaitable[object]]]] = {
    "too large": (ValueTooLarge, lambda store: store.put("k", HIDDEN * 200_000)),
    "too large bytes": (ValueTooLarge, lambda store: store.put("k", HIDDEN.encode() * 200_000)),
    "too large record": (ValueTooLarge, lambda store: store.record("k").put({"f": HIDDEN * 200_000})),
    "too large meta": (ValueTooLarge, lambda store: store.put("k", 1, meta={"m": HIDDEN * 2000})),
    "surrogate": (InvalidValue, lambda store: store.put("k", {"f": f"{HIDDEN}\ud800"})),
    "object": (InvalidValue, lambda store: store.put("k", [Text(HIDDEN)])),
    "bytes": (InvalidValue, lambda store: store.put("k", [HIDDEN.encode()])),
    "integer": (InvalidValue, lambda store: store.put("k", 27_182_818_284_590_452_353)),
    "meta": (InvalidValue, lambda store: store.put("k", 1, meta=HIDDEN)),
    "step": (InvalidValue, lambda store: store.add("k", HIDDEN)),
    "expectation": (InvalidValue, lambda store: store.put("k", 1, expect=HIDDEN)),
    "mismatch of a counter": (TypeMismatch, lambda store: store.add("text")),
    "mismatch of a record": (TypeMismatch, lambda store: store.record("text").set(f=HIDDEN)),
    "conflict": (Conflict, lambda store: store.create("text", HIDDEN)),
    "conflict of equals": (Conflict, lambda store: store.put("text", HIDDEN, expect=limpet.equals(HIDDEN * 2))),
    "conflict of a field": (
        Conflict,
        lambda store: store.put("record", HIDDEN, expect=limpet.field("f") == HIDDEN * 2),
    ),
    "stale request": (Conflict, lambda store: store.put("k", HIDDEN * 2, request_id="r-1")),
}


@pytest.mark.parametrize("failure", FAILURES)
async def test_no_error_shows_the_value(store: limpet.Store, failure: str) -> None:
    """An error message never holds the value."""
    await store.put("text", HIDDEN)
    await store.record("record").put({"f": HIDDEN})
    await store.put("k", HIDDEN, request_id="r-1")
    expected, act = FAILURES[failure]

    with pytest.raises(expected) as raised:
        await act(store)

    shown = f"{raised.value} {raised.value!r} {raised.value.args!r}"
    assert HIDDEN not in shown
    assert "27182818" not in shown.replace("_", "").replace(",", "")


async def test_no_repr_shows_the_value(store: limpet.Store) -> None:
    """An error message never holds the value.

    This includes everything that is likely to be logged: entries, events, drafts and handles.
    """
    entry = await store.put("k", HIDDEN, meta={"m": HIDDEN})
    things: list[object] = [entry, store, store.record("k"), store.batch().put("k", HIDDEN)]
    things += await drain(store.history("k"))
    things += [await store.batch().put("k", HIDDEN).commit()]

    assert [thing for thing in things if HIDDEN in repr(thing)] == []
