"""Indexes: the same answers, found another way."""

from __future__ import annotations

import random
from typing import Any, Final

import pytest

import limpet
from limpet.conformance.test_filters import NO_FIELD, VALUES, matches, put_all
from limpet.errors import InvalidKey, InvalidValue
from limpet.model import Filter, Test

# Values that an index over text, doubles or JSON could mix up.
MORE: Final[dict[str, Any]] = {
    "str with U+0000": "a\0b",
    "str before it": "a",
    "str after it": "a\ufffdb",
    "str quoted": 'a"b\\c',
    "str long": "long" * 100,
    "str long and other": "long" * 100 + "er",
    "bytes 007": b"007",
    "bytes -5": b"-5",
    "bytes --5": b"--5",
    "bytes -": b"-",
    "bytes 1.5": b"1.5",
    "bytes digits": b"9" * 40,
    "bytes many digits": b"9" * 400,
    "bytes with zero": b"a\0b",
    "bytes zero first": b"\0\0",
    "bytes quoted": b'"a"',
    "bytes long": b"long" * 100,
    "bytes 2^53": b"9007199254740992",
    "bytes 2^53+1": b"9007199254740993",
}
EVERY: Final = VALUES | MORE
ORDERED: Final = [value for value in EVERY.values() if isinstance(value, int | float | str | bytes)]
FIELD: Final[Any] = limpet.field("field")


@pytest.fixture
def store(store: limpet.Store) -> limpet.Store:
    """A store that supports indexes. An encrypted store does not."""
    if store.traits.encrypted:
        pytest.skip("an encrypted store keeps no index")
    return store


async def put_every(store: limpet.Store, prefix: str) -> None:
    """Every value as a field of a record and as a member of an object, and entries without the field."""
    values: dict[str, object] = {}
    for name, value in EVERY.items():
        values[f"{prefix}record {name}"] = limpet.Fields(field=value, other=1)
        if not isinstance(value, bytes):
            values[f"{prefix}object {name}"] = {"field": value, "other": 1}
    await put_all(store, values)
    await put_all(store, {prefix + name: value for name, value in NO_FIELD.items()})


async def answers(store: limpet.Store, filters: list[Filter]) -> list[list[str]]:
    """The results of a scan with each filter."""
    return [await matches(store, where) for where in filters]


@pytest.mark.parametrize("comparison", ["eq", "lt", "ge"])
async def test_an_index_changes_no_answer(store: limpet.Store, comparison: str) -> None:
    """An index changes no result of a scan, only how long it takes."""
    operands = [*EVERY.values()] if comparison == "eq" else ORDERED
    filters = [getattr(FIELD, f"__{comparison}__")(operand) for operand in operands]
    await put_every(store, "before/")
    expected = await answers(store, filters)

    await store.index("field")

    assert await answers(store, filters) == expected
    assert any(expected)


async def test_an_index_changes_no_answer_about_many_values(store: limpet.Store) -> None:
    """An index changes no result of a scan, only how long it takes."""
    values = list(EVERY.values())
    filters = [FIELD.in_(values[start::9]) for start in range(9)]
    filters += [
        FIELD.in_([]),
        FIELD.in_(values),
        (FIELD > 1) & (FIELD < 2**53),
        (FIELD > 1) & (limpet.field("other") == 1),
    ]
    await put_every(store, "")
    expected = await answers(store, filters)

    await store.index("field")
    await store.index("other")

    assert await answers(store, filters) == expected


@pytest.mark.parametrize("comparison", ["eq", "ne", "le", "gt"])
async def test_an_index_changes_no_answer_about_raw_fields(store: limpet.Store, comparison: Any) -> None:
    """An index changes no result of a scan, only how long it takes."""
    operands = [value for value in EVERY.values() if isinstance(value, bytes)] + [b"true", b"2", b"1.0", b'"a"']
    filters = [Filter((Test("field", comparison, (b"\0" + operand,), raw=True),)) for operand in operands]
    await put_every(store, "")
    expected = await answers(store, filters)

    await store.index("field")

    assert await answers(store, filters) == expected
    assert any(expected)


async def test_an_index_holds_what_is_written_later(store: limpet.Store) -> None:
    """An index covers entries written before and after it was made, by any process."""
    await put_every(store, "a/")
    await store.index("field")
    await put_every(store, "b/")

    for operand in (1, "a", b"007", b"10"):
        found = await matches(store, operand == FIELD)
        assert [key[0] for key in found] == ["a"] * (len(found) // 2) + ["b"] * (len(found) // 2)
        assert found


async def test_a_scan_by_index_keeps_to_its_prefix_its_limit_and_its_order(store: limpet.Store) -> None:
    """An index changes no result of a scan, only how long it takes."""
    await store.index("n")
    for number in range(30):
        await store.put(f"{'ab'[number % 2]}/{29 - number:02}", {"n": number})
    where = limpet.field("n") >= 10

    assert await matches(store, where, "a/") == [f"a/{number:02}" for number in range(1, 20, 2)]
    assert [entry.key async for entry in store.scan("b/", where=where, limit=3)] == ["b/00", "b/02", "b/04"]
    assert [entry.key async for entry in store.scan("b/", where=where, after="b/14")] == ["b/16", "b/18"]
    assert [entry.key async for entry in store.scan(where=where)] == sorted(await matches(store, where))


async def test_an_index_follows_every_kind_of_write(store: limpet.Store) -> None:
    """An index covers entries written before and after it was made, by any process."""
    await store.index("n")
    drawn = random.Random(11)
    for _ in range(300):
        key = f"key/{drawn.randrange(12)}"
        value: Any = drawn.choice([1, 2, 2.5, "two", b"2", b"two", None, [2]])
        match drawn.randrange(9):
            case 0:
                await store.put(key, {"n": None if isinstance(value, bytes) else value})
            case 1:
                await store.put(key, limpet.Fields(n=value))
            case 2:
                await store.put(key, 2)
            case 3:
                await store.delete(key)
            case 4:
                await store.take(key)
            case 5:
                await store.touch(key, drawn.choice([60, None]))
            case 6:
                await store.batch().put(key, limpet.Fields(n=value, other=1)).delete(f"{key}/more").commit()
            case 7 if (await store.entry(key) or await store.put(key, limpet.Fields())).kind == "record":
                await store.record(key).set({"n": value})
            case _ if (await store.entry(key) or await store.put(key, limpet.Fields())).kind == "record":
                await store.record(key).set(unset=["n"], other=2)
            case _:
                pass
        if drawn.random() < 0.2:
            for operand in (2, 2.5, "two", b"2", b"two"):
                where = limpet.field("n") == operand
                assert await matches(store, where) == [
                    entry.key
                    async for entry in store.scan()
                    if entry.stored is not None and where.matches(entry.stored)
                ]


async def test_indexes_are_listed(store: limpet.Store) -> None:
    """Making an index that exists, or dropping one that does not, changes nothing."""
    names = ["updated_at", "état d'âme", "a.b", "$text", "a'b"]
    assert await store.indexes() == []
    kept = [await store.index(name) for name in names]
    again = [await store.index(name) for name in names]

    assert kept == again == [kept[0]] * len(names)
    assert await store.indexes() == (sorted(names) if kept[0] else [])
    assert await store.namespace("elsewhere").indexes() == []

    await store.unindex("a.b")
    await store.unindex("a.b")
    await store.unindex("never was")
    assert await store.indexes() == (sorted({*names} - {"a.b"}) if kept[0] else [])
    for name in names:
        await store.put("key", {name: 7})
        assert await matches(store, limpet.field(name) == 7) == ["key"]


@pytest.mark.refused_early
@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "", 7, None], ids=repr)
async def test_a_name_that_cannot_be_indexed_is_refused(store: limpet.Store, name: Any) -> None:
    """Making an index that exists, or dropping one that does not, changes nothing."""
    with pytest.raises((InvalidKey, InvalidValue)):
        await store.index(name)
    with pytest.raises((InvalidKey, InvalidValue)):
        await store.unindex(name)
    assert await store.indexes() == []
