"""Filters: what `where` lets through."""

# ruff: noqa: D403 - a docstring here is a line of the contract, and some of those begin with the name of an operator.

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pytest

import limpet
from limpet.errors import InvalidValue

if TYPE_CHECKING:
    from limpet.conformance.conftest import Elapse

field: Any = limpet.field("field")

# One of each kind and the neighbours that a careless comparison would mix up. None of them is in order.
VALUES: dict[str, Any] = {
    "null": None,
    "false": False,
    "true": True,
    "int -1": -1,
    "int 0": 0,
    "int 1": 1,
    "int 2": 2,
    "int 10": 10,
    "int 2^53": 2**53,
    "int 2^53+1": 2**53 + 1,
    "int max": 2**63 - 1,
    "int min": -(2**63),
    "float -0.0": -0.0,
    "float 0.0": 0.0,
    "float 0.5": 0.5,
    "float 1.0": 1.0,
    "float 1.5": 1.5,
    "float 2^53": float(2**53),
    "float 1e300": 1e300,
    "float -1e300": -1e300,
    "float 5e-324": 5e-324,
    "str empty": "",
    "str 1": "1",
    "str 10": "10",
    "str 2": "2",
    "str A": "A",
    "str a": "a",
    "str aa": "aa",
    "str null": "null",
    "str true": "true",
    "str é": "\u00e9",
    "str e and accent": "e\u0301",
    "str last of the plane": "\uffff",
    "str oyster": "🦪",
    "list empty": [],
    "list 1": [1],
    "list 1.0": [1.0],
    "list str": ["1"],
    "object empty": {},
    "object 1": {"a": 1},
    "object 1.0": {"a": 1.0},
    "object mark": {"$text": "1"},
    "bytes empty": b"",
    "bytes 0": b"\0",
    "bytes 1": b"1",
    "bytes 10": b"10",
    "bytes a": b"a",
    "bytes null": b"null",
    "bytes 255": b"\xff",
}

# Entries without the field, and values that have no fields at all.
NO_FIELD: dict[str, Any] = {
    "absent in a record": limpet.Fields(other=1),
    "absent in an object": {"other": 1},
    "absent in an empty record": limpet.Fields(),
    "absent in an empty object": {},
    "absent in depth": {"other": {"field": 1}},
    "no object null": None,
    "no object int": 1,
    "no object true": True,
    "no object str": "field",
    "no object str like json": '{"field":1}',
    "no object list": ["field", {"field": 1}],
    "no object bytes": b'{"field":1}',
}

ORDERS: dict[str, Callable[[Any, Any], Any]] = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}

every_order = pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())


def encoding(value: object) -> str | bytes:
    """The form by which values are equal: their bytes, or their JSON with sorted members."""
    return value if isinstance(value, bytes) else json.dumps(value, sort_keys=True)


def rank(value: object) -> type | None:
    """The kind of a value, within which values have an order; None for kinds without one."""
    if isinstance(value, bool):
        return None
    return next((kind for kind in (int, float, str, bytes) if isinstance(value, kind)), None)


def comparable(left: object, right: object) -> bool:
    """Whether one may come before the other at all."""
    ranks = {rank(left), rank(right)}
    return None not in ranks and (len(ranks) == 1 or ranks == {int, float})


async def put_all(store: limpet.Store, values: Mapping[str, object]) -> None:
    """Put many values, as many at once as a batch holds."""
    items = list(values.items())
    for start in range(0, len(items), 128):
        draft = store.batch()
        for key, value in items[start : start + 128]:
            draft.put(key, value)
        await draft.commit()


async def put_table(store: limpet.Store) -> dict[str, Any]:
    """Every value as a field of a record and, where it is JSON, as a member of an object. Returns values by key."""
    table: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for name, value in VALUES.items():
        table[f"record {name}"] = value
        if not isinstance(value, bytes):
            table[f"object {name}"] = value
    for key, value in table.items():
        fields = {"field": value, "other": 1}
        values[key] = limpet.Fields(fields) if key.startswith("record") else fields
    await put_all(store, values)
    await put_all(store, NO_FIELD)
    return table


async def matches(store: limpet.Store, where: limpet.Filter, prefix: str = "") -> list[str]:
    """The keys of a filtered scan, in its order."""
    return [entry.key async for entry in store.scan(prefix, where=where)]


# Where ------------------------------------------------------------------------


async def test_where_looks_at_records_and_at_objects(store: limpet.Store) -> None:
    """`where` tests record fields and members of JSON objects."""
    await store.record("a record").put({"state": "open", "n": 1})
    await store.record("b record").put({"state": "shut", "n": 1})
    await store.put("c object", {"state": "open", "n": 2})
    await store.put("d object", {"state": "shut", "n": 2})

    assert await matches(store, limpet.field("state") == "open") == ["a record", "c object"]
    assert await matches(store, limpet.field("n") == 2) == ["c object", "d object"]


async def test_where_does_not_look_into_depth(store: limpet.Store) -> None:
    """`where` tests record fields and members of JSON objects."""
    await store.put("nested", {"a": {"b": 1}})
    await store.record("field").put({"a": {"b": 1}})
    await store.put("flat", {"a.b": 1})
    await store.put("list", [{"a.b": 1, "b": 1}])

    assert await matches(store, limpet.field("a.b") == 1) == ["flat"]
    assert await matches(store, limpet.field("b").exists()) == []


async def test_where_takes_any_name(store: limpet.Store) -> None:
    """`where` tests record fields and members of JSON objects."""
    names = ["$text", "$bytes", "$json", "$", "a.b", '"', "'", "\\", "%", "_", "*", "[0]", "a b", "\n", "é", "e\u0301"]
    names += ["🦪", "NULL", "Name", "name", "field') OR ('1'='1"]
    await put_all(store, {f"r/{name}": limpet.Fields({name: "x", "other": b"y"}) for name in names})
    await put_all(store, {f"o/{name}": {name: "x", "other": "y"} for name in names})

    for name in names:
        assert await matches(store, limpet.field(name) == "x") == [f"o/{name}", f"r/{name}"]
        assert await matches(store, limpet.field(name).exists()) == [f"o/{name}", f"r/{name}"]


async def test_where_sees_the_fields_as_they_are_now(store: limpet.Store) -> None:
    """`where` tests record fields and members of JSON objects."""
    job = store.record("job")
    await job.put({"state": "pending"})
    assert await matches(store, limpet.field("state") == "pending") == ["job"]

    await job.swap("state", "pending", "done")
    assert await matches(store, limpet.field("state") == "pending") == []
    assert await matches(store, limpet.field("state") == "done") == ["job"]

    await job.set(unset=["state"])
    assert await matches(store, limpet.field("state").exists()) == []


async def test_where_gives_whole_entries(store: limpet.Store) -> None:
    """`where` tests record fields and members of JSON objects."""
    entry = await store.record("record").put({"a": 1, "b": b"\xff"}, ttl=600, meta={"by": "me"})
    await store.put("other", {"a": 2})

    assert [found async for found in store.scan(where=limpet.field("a") == 1)] == [entry]


async def test_where_is_a_filter_and_nothing_else(store: limpet.Store) -> None:
    """`where` tests record fields and members of JSON objects."""
    await store.put("a", {"state": "open"})
    for where in ({"state": "open"}, "state", True, limpet.equals(1)):
        wrong: Any = where

        with pytest.raises(InvalidValue):
            await matches(store, wrong)


# Equality ---------------------------------------------------------------------


async def test_eq_matches_equal_encodings_alone(store: limpet.Store) -> None:
    """eq and in match equal encodings: 1, 1.0 and true are three values."""
    table = await put_table(store)

    for operand in VALUES.values():
        expected = sorted(key for key, value in table.items() if encoding(value) == encoding(operand))
        assert await matches(store, field == operand) == expected
        assert len(expected) == (1 if isinstance(operand, bytes) else 2)


async def test_in_matches_equal_encodings_alone(store: limpet.Store) -> None:
    """eq and in match equal encodings: 1, 1.0 and true are three values."""
    table = await put_table(store)
    values = list(VALUES.values())

    for start in range(len(values)):
        operands = values[start::7]
        encodings = {encoding(operand) for operand in operands}
        expected = sorted(key for key, value in table.items() if encoding(value) in encodings)
        assert await matches(store, field.in_(operands)) == expected


async def test_in_takes_one_many_or_none(store: limpet.Store) -> None:
    """eq and in match equal encodings: 1, 1.0 and true are three values."""
    table = await put_table(store)

    assert await matches(store, field.in_([])) == []
    assert await matches(store, field.in_([1])) == ["object int 1", "record int 1"]
    assert await matches(store, field.in_(value for value in [1, 1, 1.0, "absent"])) == [
        "object float 1.0",
        "object int 1",
        "record float 1.0",
        "record int 1",
    ]
    assert await matches(store, field.in_(VALUES.values())) == sorted(table)


async def test_equal_objects_may_have_their_members_in_any_order(store: limpet.Store) -> None:
    """eq and in match equal encodings: 1, 1.0 and true are three values."""
    await store.record("record").put({"field": {"b": [{"y": 1, "x": 2}], "a": 1}})
    await store.put("object", {"field": {"a": 1, "b": [{"x": 2, "y": 1}]}})

    assert await matches(store, field == {"b": [{"x": 2, "y": 1}], "a": 1}) == ["object", "record"]
    assert await matches(store, field.in_([{"a": 1, "b": [{"y": 1, "x": 2}]}])) == ["object", "record"]


async def test_text_and_bytes_are_never_equal(store: limpet.Store) -> None:
    """eq and in match equal encodings: 1, 1.0 and true are three values."""
    await store.record("bytes").put({"field": b"same"})
    await store.record("text").put({"field": "same"})
    await store.record("mark").put({"field": {"$text": "same"}})

    assert await matches(store, field == b"same") == ["bytes"]
    assert await matches(store, field == "same") == ["text"]
    assert await matches(store, field == {"$text": "same"}) == ["mark"]


async def test_ne_is_all_that_eq_is_not(store: limpet.Store) -> None:
    """ne is the exact complement of eq, so an absent field matches it."""
    table = await put_table(store)
    everything = sorted([*table, *NO_FIELD])

    for operand in VALUES.values():
        equal, unequal = await matches(store, field == operand), await matches(store, field != operand)
        assert sorted(equal + unequal) == everything


async def test_ne_matches_an_absent_field(store: limpet.Store) -> None:
    """ne is the exact complement of eq, so an absent field matches it.

    A job that has no state yet is not done. SQL would lose it to a null.
    """
    await store.put("a", {"state": "done"})
    await store.put("b", {"state": "open"})
    await store.put("c", {})
    await store.record("d").put({"state": None})
    await store.record("e").put({"other": "done"})

    assert await matches(store, limpet.field("state") != "done") == ["b", "c", "d", "e"]


async def test_ne_null_matches_an_absent_field(store: limpet.Store) -> None:
    """ne is the exact complement of eq, so an absent field matches it."""
    await store.record("null").put({"field": None})
    await store.record("absent").put({})
    await store.record("there").put({"field": 0})

    assert await matches(store, operator.eq(field, None)) == ["null"]
    assert await matches(store, operator.ne(field, None)) == ["absent", "there"]


async def test_not_in_is_all_that_in_is_not(store: limpet.Store) -> None:
    """not_in is the exact complement of in, so an absent field matches it."""
    table = await put_table(store)
    everything, values = sorted([*table, *NO_FIELD]), list(VALUES.values())

    for count in (0, 1, 3, len(values)):
        for start in range(0, len(values), 12):
            operands = values[start : start + count]
            among, apart = await matches(store, field.in_(operands)), await matches(store, field.not_in(operands))
            assert sorted(among + apart) == everything


async def test_not_in_matches_an_absent_field(store: limpet.Store) -> None:
    """not_in is the exact complement of in, so an absent field matches it."""
    table = await put_table(store)

    assert await matches(store, field.not_in(VALUES.values())) == sorted(NO_FIELD)
    assert await matches(store, field.not_in([])) == sorted([*table, *NO_FIELD])


async def test_not_in_with_null_among_its_values_still_matches(store: limpet.Store) -> None:
    """not_in is the exact complement of in, so an absent field matches it.

    In SQL a null among the values makes NOT IN match nothing at all.
    """
    await store.put("a", {"field": None})
    await store.put("b", {"field": 1})
    await store.put("c", {"field": 2})
    await store.put("d", {})

    assert await matches(store, field.not_in([None, 1])) == ["c", "d"]


# Order ------------------------------------------------------------------------


async def compare(store: limpet.Store, order: Callable[[Any, Any], Any], operands: list[Any]) -> None:
    """Check an operator against its truth table, over all values."""
    table = await put_table(store)
    for operand in operands:
        expected = sorted(key for key, value in table.items() if comparable(value, operand) and order(value, operand))
        assert await matches(store, order(field, operand)) == expected


@every_order
async def test_numbers_are_compared_with_numbers(store: limpet.Store, order: Callable[[Any, Any], Any]) -> None:
    """lt, le, gt and ge match numbers with numbers, whether int or float."""
    await compare(store, order, [value for value in VALUES.values() if rank(value) in (int, float)])


async def test_an_int_and_a_float_stand_in_one_order(store: limpet.Store) -> None:
    """lt, le, gt and ge match numbers with numbers, whether int or float."""
    for key, number in {"a": 1, "b": 1.0, "c": 1.5, "d": 2, "e": 2.0, "f": 10}.items():
        await store.put(key, {"field": number})

    assert await matches(store, field < 2) == ["a", "b", "c"]
    assert await matches(store, field <= 2.0) == ["a", "b", "c", "d", "e"]
    assert await matches(store, field > 1.0) == ["c", "d", "e", "f"]
    assert await matches(store, field >= 1.5) == ["c", "d", "e", "f"]


async def test_large_numbers_are_compared_exactly(store: limpet.Store) -> None:
    """lt, le, gt and ge match numbers with numbers, whether int or float.

    2^53 + 1 is no float. An engine that turns it into one takes it for 2^53.
    """
    await store.put("float", {"field": float(2**53)})
    await store.put("int", {"field": 2**53 + 1})
    await store.put("most", {"field": 2**63 - 1})

    assert await matches(store, field > float(2**53)) == ["int", "most"]
    assert await matches(store, field >= 2**53 + 1) == ["int", "most"]
    assert await matches(store, field < 2**53 + 1) == ["float"]
    assert await matches(store, field < float(2**63)) == ["float", "int", "most"]
    assert await matches(store, field >= float(2**63)) == []


async def test_numbers_are_not_compared_as_text(store: limpet.Store) -> None:
    """lt, le, gt and ge match numbers with numbers, whether int or float."""
    for number in (-10, -9, 9, 10, 100):
        await store.put(f"{number:+04}", {"field": number})

    assert await matches(store, field < 10) == ["+009", "-009", "-010"]
    assert await matches(store, field > -10) == ["+009", "+010", "+100", "-009"]


@every_order
async def test_text_is_compared_with_text(store: limpet.Store, order: Callable[[Any, Any], Any]) -> None:
    """lt, le, gt and ge match str with str and bytes with bytes.

    The order is that of code points, as for keys: no language, no case, and the oyster behind U+FFFF.
    """
    await compare(store, order, [value for value in VALUES.values() if isinstance(value, str)])


@every_order
async def test_bytes_are_compared_with_bytes(store: limpet.Store, order: Callable[[Any, Any], Any]) -> None:
    """lt, le, gt and ge match str with str and bytes with bytes."""
    await compare(store, order, [value for value in VALUES.values() if isinstance(value, bytes)])


async def test_times_as_text_stand_in_order(store: limpet.Store) -> None:
    """lt, le, gt and ge match str with str and bytes with bytes."""
    for day in ("2024-12-31", "2025-01-01", "2025-01-02"):
        await store.record(f"job {day}").put({"day": day})

    assert await matches(store, limpet.field("day") < "2025-01-01") == ["job 2024-12-31"]
    assert await matches(store, limpet.field("day") >= "2025") == ["job 2025-01-01", "job 2025-01-02"]


@every_order
async def test_nothing_else_has_an_order(store: limpet.Store, order: Callable[[Any, Any], Any]) -> None:
    """lt, le, gt and ge match nothing else: no bool, no null, no mixed types."""
    await put_table(store)

    for operand in (None, True, False, [], [1], ["1"], {}, {"a": 1}):
        assert await matches(store, order(field, operand)) == []


@every_order
async def test_a_bool_is_no_number_in_an_order(store: limpet.Store, order: Callable[[Any, Any], Any]) -> None:
    """lt, le, gt and ge match nothing else: no bool, no null, no mixed types."""
    await put_all(store, {"true": {"field": True}, "false": {"field": False}, "null": limpet.Fields(field=None)})

    for operand in (-1, 0, 1, 2, 0.5, "", "true", b""):
        assert await matches(store, order(field, operand)) == []


async def test_mixed_types_are_on_neither_side(store: limpet.Store) -> None:
    """lt, le, gt and ge match nothing else: no bool, no null, no mixed types.

    Text is neither below a number nor above it. An engine that sorts by type would find it on one side.
    """
    await put_table(store)

    for operand, kinds in ((1, ("int", "float")), ("1", ("str",)), (b"1", ("bytes",))):
        found = {
            key.split(" ")[1] for where in (field < operand, field >= operand) for key in await matches(store, where)
        }
        assert found == set(kinds)


@every_order
async def test_an_absent_field_has_no_order(store: limpet.Store, order: Callable[[Any, Any], Any]) -> None:
    """lt, le, gt and ge match nothing else: no bool, no null, no mixed types."""
    await put_all(store, NO_FIELD)

    for operand in VALUES.values():
        assert await matches(store, order(field, operand)) == []


# Existence --------------------------------------------------------------------


async def test_exists_matches_every_field_that_is_there(store: limpet.Store) -> None:
    """exists matches a field that is there, null included."""
    table = await put_table(store)

    assert await matches(store, field.exists()) == sorted(table)


async def test_exists_tells_null_from_absence(store: limpet.Store) -> None:
    """exists matches a field that is there, null included."""
    await store.record("record").put({"field": None})
    await store.put("object", {"field": None})
    await store.record("none").put({"Field": 1})

    assert await matches(store, field.exists()) == ["object", "record"]


# Together ---------------------------------------------------------------------


async def test_joined_filters_must_all_match(store: limpet.Store) -> None:
    """Filters joined by `&` must all match."""
    for number in range(30):
        await store.record(f"{number:02}").put({"two": number % 2, "three": number % 3, "five": number % 5})
    two, three, five = (limpet.field(name) == 0 for name in ("two", "three", "five"))

    assert await matches(store, two & three) == ["00", "06", "12", "18", "24"]
    assert await matches(store, two & three & five) == ["00"]
    assert await matches(store, two & (three & five)) == ["00"]
    assert await matches(store, five & two) == ["00", "10", "20"]


async def test_filters_of_one_field_make_a_range(store: limpet.Store) -> None:
    """Filters joined by `&` must all match."""
    for number in range(20):
        await store.put(f"{number:02}", {"field": number})

    assert await matches(store, (field >= 5) & (field < 8)) == ["05", "06", "07"]
    assert await matches(store, (field > 5) & (field <= 8) & (field != 7)) == ["06", "08"]
    assert await matches(store, (field > 8) & (field < 5)) == []
    assert await matches(store, (field == 5) & (field == 6)) == []


async def test_every_operator_can_be_joined(store: limpet.Store) -> None:
    """Filters joined by `&` must all match."""
    await put_table(store)
    where = field.exists() & field.not_in([1, "1"]) & field.in_([1, 1.0, "1", 2, 0]) & (field != 0) & (field >= 1)

    assert await matches(store, where) == ["object float 1.0", "object int 2", "record float 1.0", "record int 2"]


async def test_a_filter_that_was_joined_stays_what_it_was(store: limpet.Store) -> None:
    """Filters joined by `&` must all match."""
    await store.put("a", {"x": 1, "y": 1})
    await store.put("b", {"x": 1, "y": 2})
    x, y = limpet.field("x") == 1, limpet.field("y") == 2

    assert await matches(store, x & y) == ["b"]
    assert await matches(store, x) == ["a", "b"]
    assert await matches(store, y) == ["b"]


# Many entries -----------------------------------------------------------------


async def test_a_filtered_scan_crosses_pages(store: limpet.Store) -> None:
    """A filtered scan still goes in key order and finds every match."""
    await put_all(store, {f"{n:04}": limpet.Fields(n=n, third=n % 3 == 0) for n in range(1300)})

    thirds = await matches(store, operator.eq(limpet.field("third"), True))
    others = await matches(store, operator.ne(limpet.field("third"), True))

    assert thirds == [f"{n:04}" for n in range(0, 1300, 3)]
    assert others == [f"{n:04}" for n in range(1300) if n % 3]


async def test_a_match_is_found_behind_thousands_that_do_not(store: limpet.Store) -> None:
    """A filtered scan still goes in key order and finds every match.

    An engine may end a page after so many entries. The scan must go on, even if that page matched nothing.
    """
    rare = {0, 1, 5_000, 5_001, 5_299}
    await put_all(store, {f"{n:04}": {"rare": n in rare} for n in range(5_300)})

    assert await matches(store, operator.eq(limpet.field("rare"), True)) == [f"{n:04}" for n in sorted(rare)]


async def test_a_filtered_scan_keeps_to_its_prefix(store: limpet.Store) -> None:
    """A filtered scan still goes in key order and finds every match."""
    await put_all(store, {f"{prefix}/{n}": {"n": n} for prefix in ("a", "b", "c") for n in range(4)})

    assert await matches(store, limpet.field("n") >= 2, prefix="b/") == ["b/2", "b/3"]


async def test_the_limit_counts_matches(store: limpet.Store) -> None:
    """A filtered scan still goes in key order and finds every match."""
    await put_all(store, {f"{n:04}": {"odd": n % 2} for n in range(1100)})
    odd = limpet.field("odd") == 1

    for limit in (1, 3, 500, 501, 549):
        found = [entry.key async for entry in store.scan(where=odd, limit=limit)]
        assert found == [f"{n:04}" for n in range(1, 1100, 2)][:limit]


async def test_a_filtered_scan_goes_on_after_a_key(store: limpet.Store) -> None:
    """A filtered scan still goes in key order and finds every match.

    The key to go on after need not match, nor exist.
    """
    await put_all(store, {f"{n:02}": {"odd": n % 2} for n in range(20)})
    odd = limpet.field("odd") == 1

    for after in ("13", "14", "13x"):
        assert [entry.key async for entry in store.scan(where=odd, after=after)] == ["15", "17", "19"]
    assert [entry.key async for entry in store.scan(where=odd, after="04", limit=2)] == ["05", "07"]


async def test_pages_of_matches_make_the_whole(store: limpet.Store) -> None:
    """A filtered scan still goes in key order and finds every match."""
    await put_all(store, {f"{n:03}": {"n": n % 7} for n in range(300)})
    where, found, after = limpet.field("n").in_([2, 5]), list[str](), None

    while page := [entry.key async for entry in store.scan(where=where, limit=10, after=after)]:
        found += page
        after = page[-1]

    assert found == [f"{n:03}" for n in range(300) if n % 7 in (2, 5)]


async def test_a_filtered_scan_goes_in_code_point_order(store: limpet.Store) -> None:
    """A filtered scan still goes in key order and finds every match."""
    keys = ["🦪", "\uffff", "é", "e\u0301", "z", "Z", "a/b", "a", "a b", "a\n", "%", "\U0010ffff"]
    await put_all(store, {key: {"n": 1} for key in keys})

    assert await matches(store, limpet.field("n") == 1) == sorted(keys)


async def test_a_filtered_scan_leaves_out_what_expired(store: limpet.Store, elapse: Elapse) -> None:
    """A filtered scan still goes in key order and finds every match."""
    await store.put("a", {"n": 1}, ttl=0.1)
    await store.put("b", {"n": 1})
    await store.put("c", {"n": 2}, ttl=0.1)
    await elapse(0.15)

    assert await matches(store, limpet.field("n") == 1) == ["b"]
    assert await matches(store, limpet.field("n") != 1) == []


async def test_a_filter_is_of_bounded_size(store: limpet.Store) -> None:
    """A test compares with up to 1,000 values, a filter has up to 32 tests, and more is InvalidValue."""
    await put_all(store, {"a": {"field": 999}, "b": {"field": 1_000}})
    assert await matches(store, field.in_(range(1_000))) == ["a"]
    assert await matches(store, field.not_in(range(1_000))) == ["b"]
    for build in (field.in_, field.not_in):
        with pytest.raises(InvalidValue):
            build(range(1_001))

    where = field.exists()
    for number in range(31):
        where = where & (field != number)
    assert await matches(store, where) == ["a", "b"]
    with pytest.raises(InvalidValue):
        where & field.exists()


# Values without fields --------------------------------------------------------


async def test_a_value_that_is_no_object_matches_nothing_but_complements(store: limpet.Store) -> None:
    """A value that is not an object has no fields."""
    values = {key: value for key, value in NO_FIELD.items() if key.startswith("no object")}
    await put_all(store, values)

    for where in (field.exists(), field == 1, field.in_([1, None]), field < 2, field >= ""):
        assert await matches(store, where) == []
    for where in (field != 1, field.not_in([1, None])):
        assert await matches(store, where) == sorted(values)


async def test_bytes_and_text_that_look_like_an_object_are_none(store: limpet.Store) -> None:
    """A value that is not an object has no fields."""
    await store.put("bytes", b'{"field":1}')
    await store.put("text", '{"field":1}')
    await store.put("object", {"field": 1})

    assert await matches(store, field == 1) == ["object"]
    assert await matches(store, field != 1) == ["bytes", "text"]


async def test_neither_items_nor_letters_are_fields(store: limpet.Store) -> None:
    """A value that is not an object has no fields."""
    await store.put("list", ["field", "0"])
    await store.put("text", "field")
    await store.put("pairs", [["field", 1]])

    for name in ("field", "0", "length", "f"):
        assert await matches(store, limpet.field(name).exists()) == []


# Members below, and alternatives -----------------------------------------------


async def keys_of(store: limpet.Store, where: Any, prefix: str = "") -> list[str]:
    return [entry.key async for entry in store.scan(prefix, where=where)]


async def test_a_member_below_is_tested(store: limpet.Store) -> None:
    """A field of several names leads to a member below: an object is looked into, and anything else has no members."""
    city = limpet.field("address", "city")
    for key, address in {
        "a": {"city": "Oslo"},
        "b": {"city": "Bergen"},
        "c": {"city": {"name": "Oslo"}},
        "d": "Oslo",
        "e": ["city"],
        "f": None,
        "g": {},
    }.items():
        await store.put(f"json/{key}", {"address": address})
        await store.record(f"record/{key}").put({"address": address})
    await store.put("none", {"city": "Oslo"})
    await store.record("raw").put({"address": b'{"city":"Oslo"}'})

    for kind in ("json/", "record/"):
        assert await keys_of(store, city == "Oslo", kind) == [f"{kind}a"]
        assert await keys_of(store, city.exists(), kind) == [f"{kind}{key}" for key in "abc"]
        assert await keys_of(store, city != "Oslo", kind) == [f"{kind}{key}" for key in "bcdefg"]
        assert await keys_of(store, city < "C", kind) == [f"{kind}b"]
        assert await keys_of(store, limpet.field("address", "city", "name") == "Oslo", kind) == [f"{kind}c"]
    assert await keys_of(store, city.exists() & (city == "Oslo")) == ["json/a", "record/a"]
    assert await keys_of(store, city.in_(["Oslo"])) == ["json/a", "record/a"]


async def test_an_index_knows_no_member_below(store: limpet.Store) -> None:
    """An index changes no result of a scan, only how long it takes."""
    await store.put("a", {"n": {"n": 1}})
    await store.put("b", {"n": 1})
    await store.put("c", {"n": 2, "m": 1})
    if not store.traits.encrypted:
        await store.index("n")
    n = limpet.field("n")

    assert await keys_of(store, limpet.field("n", "n") == 1) == ["a"]
    assert await keys_of(store, (n == 1) | (limpet.field("m") == 1)) == ["b", "c"]
    assert await keys_of(store, (n == 2) & ((n == 1) | (limpet.field("m") == 1))) == ["c"]


async def test_one_of_several_filters_must_match(store: limpet.Store) -> None:
    """Of filters joined by `|`, one must match; `&` and `|` may be mixed."""
    a, b, c = (limpet.field(name) == 1 for name in "abc")
    for number in range(8):
        present = {name: 1 for bit, name in enumerate("abc") if number >> bit & 1}
        await store.put(f"{number}", present)

    def matching(test: Callable[[bool, bool, bool], bool]) -> list[str]:
        return [f"{n}" for n in range(8) if test(bool(n & 1), bool(n & 2), bool(n & 4))]

    assert await keys_of(store, a | b) == matching(lambda a, b, c: a or b)
    assert await keys_of(store, a | b | c) == matching(lambda a, b, c: a or b or c)
    assert await keys_of(store, (a | b) & c) == matching(lambda a, b, c: (a or b) and c)
    assert await keys_of(store, a | (b & c)) == matching(lambda a, b, c: a or (b and c))
    assert await keys_of(store, (a | b) & (b | c)) == matching(lambda a, b, c: (a or b) and (b or c))
    assert await keys_of(store, ((a | b) & c) | (a & b)) == matching(lambda a, b, c: ((a or b) and c) or (a and b))
    assert [entry.key async for entry in store.scan(where=a | c, limit=2, reverse=True)] == ["7", "6"]


@pytest.mark.refused_early
async def test_alternatives_count_as_tests(store: limpet.Store) -> None:
    """A test compares with up to 1,000 values, a filter has up to 32 tests, and more is InvalidValue."""
    test: limpet.Filter = limpet.field("a") == 1
    wide: limpet.Filter = test
    for _ in range(31):
        wide |= test
    with pytest.raises(InvalidValue, match="32"):
        wide | test
    with pytest.raises(InvalidValue, match="32"):
        wide & test
    deep: limpet.Filter = test
    for _ in range(40):
        deep = limpet.model.Filter((), ((deep, test),))
    for where in (deep, limpet.model.Filter((), ((test,),)), limpet.model.Filter(test.tests, ((),))):
        with pytest.raises(InvalidValue):
            await keys_of(store, where)


@pytest.mark.refused_early
async def test_a_guard_is_one_equality_of_a_field(store: limpet.Store) -> None:
    """A guard on a field is one equality of a field, and no filter of several tests or names."""
    a = limpet.field("a") == 1
    for wrong in (a | a, a & a, limpet.field("a", "b") == 1, limpet.field("a") != 1):
        with pytest.raises(InvalidValue, match="one equality"):
            await store.put("k", 1, expect=wrong)
