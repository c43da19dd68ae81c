"""Values in jsonb: an operator can query them, and they come back exactly, also those that jsonb cannot hold."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Iterator
from typing import Any

import asyncpg
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import limpet
from limpet import codec
from limpet.engines.sql_columns import as_text
from limpet.errors import Conflict
from limpet.model import Put
from tests.postgres.support import LONG, batch, connected, log_of, new_schema, open_postgres, url_of

# What jsonb cannot hold to the last bit: it keeps numbers as decimals, and no U+0000.
INEXACT: dict[str, Any] = {
    "1e16": 1e16,
    "1e22": 1e22,
    "-1e22": -1e22,
    "1.5e300": 1.5e300,
    "largest float": 1.7976931348623157e308,
    "negative zero": -0.0,
    "zero character": "\0",
    "zero character among others": 'a\0"b\\\0',
    "backslash before a zero character": "\\\0",
    "zero character in a member's name": {"\0": 1},
    "names that would meet": {"\0": 1, "\ufffd": 2},
    "deep inside": {"a": [{"b": [-0.0]}]},
    "beside a text like it": ["3e9", 3e19],
}

# Values that it can hold, though some look as if it could not.
EXACT: dict[str, Any] = {
    "null": None,
    "smallest integer": -(2**63),
    "largest integer": 2**63 - 1,
    "a whole float": 1.0,
    "a large whole float": 123456789012345.0,
    "tiny float": 5e-324,
    "small float": 1e-7,
    "negative small float": -0.05,
    "another": -0.001,
    "many digits": 0.1 + 0.2,
    "text like a number": "3e9",
    "text like a negative zero": "-0.0",
    "text like an escape": "\\u0000",
    "two backslashes and u0000": "\\\\u0000",
    "a name like an escape": {"\\u0000": "1e5"},
    "text with quotes": 'a"1e5"b',
    "text that ends in a backslash": ["\\", 1.5, "1e5\\"],
    "spaces and members in another order": {"b": 1, "aa": {"z": 1, "y": [1, 2]}},
    "U+FFFD": "\ufffd",
    "the last code point": "\U0010ffff",
    "U+2028": "\u2028\u2029\x7f\x1f",
}

VALUES = INEXACT | EXACT


@pytest.fixture(scope="module")
def schema() -> Iterator[str]:
    """One schema for all of this module. Each test has a namespace of its own."""
    name = new_schema()
    yield name

    async def drop() -> None:
        async with connected() as connection:
            await connection.execute(f"DROP SCHEMA {name} CASCADE")

    asyncio.run(drop())


@pytest.fixture
async def store(schema: str) -> AsyncIterator[limpet.Store]:
    async with limpet.open(url_of(schema), namespace=new_schema(), sweep=False) as opened:
        yield opened


def same(found: Any, expected: Any) -> bool:
    """Equal to the bit and in type: 1 is not 1.0, and -0.0 is not 0.0."""
    if isinstance(expected, float):
        return type(found) is float and struct.pack("d", found) == struct.pack("d", expected)
    if isinstance(expected, dict):
        return (
            isinstance(found, dict)
            and found.keys() == expected.keys()
            and all(same(found[k], expected[k]) for k in expected)
        )
    if isinstance(expected, list):
        return isinstance(found, list) and len(found) == len(expected) and all(map(same, found, expected))
    return type(found) is type(expected) and bool(found == expected)


def test_identical_differs_from_equal() -> None:
    assert same({"a": [1, 1.0, -0.0]}, {"a": [1, 1.0, -0.0]})
    for found, expected in ((1, 1.0), (True, 1), (0.0, -0.0), ([1], [1.0]), ({"a": 0.0}, {"a": -0.0})):
        assert not same(found, expected)


@pytest.mark.parametrize("name", VALUES)
async def test_a_value_comes_back_exactly_by_every_way(store: limpet.Store, name: str) -> None:
    value = VALUES[name]
    entry = await store.put("key", value)
    stored = entry.stored

    assert same(await store.get("key"), value)
    assert (await store.entry("key")) == entry
    assert [found.stored async for found in store.scan()] == [stored]
    assert [event.entry and event.entry.stored async for event in store.history("key")] == [stored]
    # A put that is refused shows what it found, by either way to commit.
    with pytest.raises(Conflict) as by_version:
        await store.put("key", 1, expect=limpet.Version(9))
    with pytest.raises(Conflict) as by_value:
        await store.put("key", 1, expect=limpet.equals("something else"))
    for conflict in (by_version.value, by_value.value):
        assert conflict.current is not None
        assert conflict.current.stored == stored
    # A guard on the very value holds, and what it guards is written.
    assert (await store.put("key", value, expect=limpet.equals(value))).version == 2
    touched = await store.touch("key", 60)
    assert touched is not None
    assert touched.stored == stored
    assert same(await store.take("key"), value)
    taken = (await log_of(store))[-1]
    assert (taken.op, taken.entry.stored) == ("delete", stored)


@pytest.mark.parametrize("name", VALUES)
async def test_a_field_and_a_member_come_back_exactly(store: limpet.Store, name: str) -> None:
    value = VALUES[name]
    record = store.record("record")
    await record.put({"field": value, "raw": b"\0\xff", "text": b"raw", "own": {"$text": 1}})
    await store.put("object", {"field": value})
    where = limpet.field("field") == value

    fields = await record.fields()
    assert fields is not None
    assert same(fields["field"], value)
    assert {**fields, "field": None} == {"field": None, "raw": b"\0\xff", "text": b"raw", "own": {"$text": 1}}
    assert [entry.key async for entry in store.scan(where=where)] == ["object", "record"]
    assert [entry.key async for entry in store.scan(where=limpet.field("field") != value)] == []
    assert await record.swap("field", value, "new")
    assert not await record.swap("field", value, "newer")
    assert (await store.put("object", 1, expect=where)).version == 2
    fields = await store.take("record")
    assert (fields["field"], fields["raw"]) == ("new", b"\0\xff")


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("way", ["function", "plan"])
async def test_the_row_says_where_jsonb_does_not_hold_the_value(
    store: limpet.Store, schema: str, name: str, way: str
) -> None:
    # A request with an id of its own is decided by us, any other by the function on the server.
    await store.put("key", VALUES[name], request_id=None if way == "function" else "mine")

    async with connected() as connection:
        sql = f"SELECT is_lossy, stored, value IS NULL FROM {schema}.limpet_entries WHERE family = 'data'"
        row = await connection.fetchrow(f"{sql} AND namespace = $1", store.name)
    assert tuple(row) == (None if name in EXACT else True, codec.encode_field(VALUES[name]), False)


async def test_raw_bytes_are_not_in_jsonb(store: limpet.Store, schema: str) -> None:
    await store.put("key", b"\0\xff")

    async with connected() as connection:
        sql = f"SELECT kind, value, stored FROM {schema}.limpet_entries WHERE namespace = $1"
        row = await connection.fetchrow(sql, store.name)
    assert tuple(row) == ("bytes", None, b"\0\xff")


# Any value -------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ["\0", "\\", "\\u0000", "\\\\u0000", '"', "1e5", "-0.0", "\\\0", '\\"1e5']
)
NUMBERS = (
    st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([0.0, -0.0, 1e15, 1e16, 1e17, -1e22, -0.05, -0.001, 1e-5, 123456789.0])
)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


class JsonbProbe:
    """An engine and a connection beside it, on a loop that lasts for all examples."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self.schema = new_schema()
        self._loop.run_until_complete(self._open())

    async def _open(self) -> None:
        self._engine = await open_postgres(url_of(self.schema))
        self._held = connected()
        self._connection = await self._held.__aenter__()

    def holds(self, stored: bytes) -> bool:
        """Whether jsonb gives back the very value."""
        return self._loop.run_until_complete(self._holds(stored))

    async def _holds(self, stored: bytes) -> bool:
        text = as_text(stored)[1]
        try:
            held = await self._connection.fetchval("SELECT $1::text::jsonb::text", text)
        except asyncpg.PostgresError:
            return False
        return msgspec.json.encode(msgspec.json.decode(held), order="sorted") == stored

    def close(self) -> None:
        async def leave() -> None:
            await self._connection.execute(f"DROP SCHEMA {self.schema} CASCADE")
            await self._held.__aexit__(None, None, None)
            await self._engine.close()

        self._loop.run_until_complete(leave())
        self._loop.close()

    def round_trip(self, values: list[Any]) -> tuple[list[Any], list[Any]]:
        """Put values through the engine. Returns what comes back, and whether jsonb holds only an approximation."""
        return self._loop.run_until_complete(self._round_trip(values))

    async def _round_trip(self, values: list[Any]) -> tuple[list[Any], list[Any]]:
        keys = [f"key/{number:03}" for number in range(len(values))]
        writes = [Put(key, codec.encode(value)) for key, value in zip(keys, values, strict=True)]
        await asyncio.gather(*(self._engine.commit("default", batch(write)) for write in writes))
        found = await self._engine.read("default", keys)
        is_lossy = await self._connection.fetch(
            f"SELECT is_lossy FROM {self.schema}.limpet_entries WHERE key = ANY ($1) ORDER BY key", keys
        )
        return [entry and entry.stored for entry in found], [row[0] for row in is_lossy]


@pytest.fixture(scope="module")
def probe() -> Iterator[JsonbProbe]:
    opened = JsonbProbe()
    yield opened
    opened.close()


@settings(
    max_examples=2_000 if LONG else 80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(values=st.lists(JSON, min_size=1, max_size=20))
def test_any_value_comes_back_exactly_and_the_row_says_what_jsonb_holds(probe: JsonbProbe, values: list[Any]) -> None:
    stored = [codec.encode_field(value) for value in values]

    found, is_lossy = probe.round_trip(values)

    assert found == stored
    assert [flag is None for flag in is_lossy] == [probe.holds(one) for one in stored]
