"""The view ``state``: what plain SQL sees of an agent, and that it can only read."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import asyncpg
import pytest

import limpet
from limpet.errors import InvalidValue
from limpet.faces.state import state_compare_and_set, state_delete, state_get, state_list, state_set
from tests.faces.support import Pools


async def test_a_value_can_be_read_by_plain_sql(pools: Pools, schema: str) -> None:
    plain, decoding = await pools.pool(schema), await pools.pool(schema, decodes=True)
    value = {"turn": "alice", "round": 3, "names": ["é", None]}
    await state_set(plain, "x", value)

    assert json.loads(await plain.fetchval("SELECT value FROM state WHERE key = 'x'")) == value
    assert await decoding.fetchval("SELECT value FROM state WHERE key = 'x'") == value


async def test_a_value_can_be_sought_with_the_operators_of_jsonb(pool: Any) -> None:
    await state_set(pool, "game/1", {"turn": "alice", "round": 3})
    await state_set(pool, "game/2", {"turn": "bob", "round": 10})

    assert await pool.fetchval("SELECT key FROM state WHERE value ->> 'turn' = 'alice'") == "game/1"
    assert await pool.fetchval("SELECT key FROM state WHERE (value -> 'round')::int > 5") == "game/2"
    assert await pool.fetchval("SELECT count(*) FROM state WHERE value @> '{\"round\": 3}'") == 1


async def test_it_has_the_key_the_value_the_version_and_the_time(pool: Any, schema: str, admin: Any) -> None:
    await state_set(pool, "x", 1)

    columns = await admin.fetch(
        "SELECT column_name, data_type FROM information_schema.columns"
        " WHERE table_schema = $1 AND table_name = 'state' ORDER BY ordinal_position",
        schema,
    )
    assert [tuple(column) for column in columns] == [
        ("key", "text"),
        ("value", "jsonb"),
        ("version", "bigint"),
        ("updated_at", "timestamp with time zone"),
    ]


async def test_a_new_key_has_version_1_and_the_time_of_now(pool: Any) -> None:
    before = await _now(pool)
    await state_set(pool, "x", 1)
    after = await _now(pool)

    version, updated_at = await pool.fetchrow("SELECT version, updated_at FROM state WHERE key = 'x'")
    assert version == 1
    assert before <= updated_at <= after


async def test_a_set_moves_value_version_and_time(pool: Any, store: limpet.Store) -> None:
    await state_set(pool, "x", "old")
    await pool.execute("UPDATE limpet_entries SET updated_ms = updated_ms - 60000")
    old = await pool.fetchrow("SELECT * FROM state")
    await state_set(pool, "x", "new")
    new = await pool.fetchrow("SELECT * FROM state")

    assert (old["value"], old["version"], new["value"], new["version"]) == ('"old"', 1, '"new"', 2)
    assert new["updated_at"] > old["updated_at"]
    entry = await store.entry("x")
    assert entry is not None
    assert new["updated_at"] == entry.updated_at


async def _now(pool: Any) -> datetime:
    """The time of the server in whole milliseconds, as an entry has it."""
    now: datetime = await pool.fetchval("SELECT date_trunc('milliseconds', clock_timestamp())")
    return now


async def test_a_deleted_key_is_no_row(pool: Any) -> None:
    await state_set(pool, "x", 1)
    await state_set(pool, "y", 1)
    await state_delete(pool, "x")

    assert [row[0] for row in await pool.fetch("SELECT key FROM state")] == ["y"]


async def test_null_is_a_row_with_json_null(pool: Any) -> None:
    await state_set(pool, "x", None)

    assert await pool.fetchval("SELECT value = 'null'::jsonb FROM state WHERE key = 'x'") is True


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO state (key, value) VALUES ('y', '1')",
        "INSERT INTO state (key, value, version, updated_at) VALUES ('y', '1', 1, now())",
        "INSERT INTO state (key, value) VALUES ('x', '1') ON CONFLICT DO NOTHING",
        "UPDATE state SET value = '2'",
        "UPDATE state SET version = version + 1 WHERE key = 'x'",
        "DELETE FROM state",
        "DELETE FROM state WHERE key = 'x'",
        "TRUNCATE state",
    ],
)
async def test_the_database_refuses_to_write_through_it(pool: Any, statement: str) -> None:
    """Such a row would have no revision, no change in the log, and no watcher would get it."""
    await state_set(pool, "x", "kept")

    with pytest.raises(asyncpg.PostgresError):
        await pool.execute(statement)

    assert await state_list(pool, keys_only=False) == [{"key": "x", "value": "kept"}]
    assert await pool.fetchval("SELECT version FROM state") == 1


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1e22, "10000000000000000000000"),
        (-0.0, "0.0"),
        (1.5e300, "15" + "0" * 299),
        ("a\0b", '"a\ufffdb"'),
        ({"\0": [-0.0, "\\u0000"]}, '{"\ufffd": [0.0, "\\\\u0000"]}'),
    ],
    ids=repr,
)
async def test_what_jsonb_cannot_hold_is_shown_in_its_nearest_form(pool: Any, value: object, shown: str) -> None:
    await state_set(pool, "x", value)

    found = await pool.fetchval("SELECT value::text FROM state WHERE key = 'x'")
    assert found.replace("-0.0", "0.0") == shown
    assert repr(await state_get(pool, "x")) == repr(value)


async def test_an_expired_entry_is_not_shown_swept_or_not(pool: Any, schema: str, admin: Any, server: str) -> None:
    async with limpet.open(f"{server}?schema={schema}", namespace="state", sweep=False) as store:
        await store.put("lasting", 1)
        await store.put("fleeting", 1, ttl=3600)
        assert await pool.fetchval("SELECT count(*) FROM state") == 2

        await admin.execute(f"UPDATE {schema}.limpet_entries SET expires_ms = updated_ms WHERE key = 'fleeting'")

        assert [row[0] for row in await pool.fetch("SELECT key FROM state")] == ["lasting"]
        assert await state_list(pool) == ["lasting"]
        await store.sweep()
        assert [row[0] for row in await pool.fetch("SELECT key FROM state")] == ["lasting"]


async def test_other_namespaces_locks_and_receipts_are_not_shown(pool: Any, store: limpet.Store) -> None:
    await store.put("x", 1, request_id="request/1")
    await store.namespace("other").put("elsewhere", 1)
    async with store.lock("x", ttl=60):
        assert [tuple(row) for row in await pool.fetch("SELECT key, value FROM state")] == [("x", "1")]


async def test_records_and_raw_bytes_of_other_writers_are_shown_as_json(pool: Any, store: limpet.Store) -> None:
    await store.record("record").put({"state": "open"})
    await store.put("raw", b"\x00\xff")

    rows = await pool.fetch("SELECT key, value FROM state ORDER BY key")
    assert [(key, json.loads(value)) for key, value in rows] == [("raw", "\\x00ff"), ("record", {"state": "open"})]


async def test_two_butlers_have_a_view_each(pools: Pools) -> None:
    one, other = [await pools.pool(await pools.schema()) for _ in range(2)]
    await state_set(one, "x", "of one")
    await state_set(other, "y", "of other")

    assert [tuple(row) for row in await one.fetch("SELECT key, value FROM state")] == [("x", '"of one"')]
    assert [tuple(row) for row in await other.fetch("SELECT key, value FROM state")] == [("y", '"of other"')]


@pytest.mark.parametrize("kind", ["TABLE state (key text, version int)", "VIEW state AS SELECT 'goal' AS key"])
async def test_a_state_of_another_program_is_refused_and_left_as_it_is(
    pools: Pools, schema: str, admin: Any, kind: str
) -> None:
    """Two states side by side, one of which no program reads, would be worse than an error."""
    pool = await pools.pool(schema)
    await pool.execute(f"CREATE {kind}")
    before = await pool.fetch("SELECT * FROM state")

    for call in (
        state_get(pool, "goal"),
        state_set(pool, "goal", 1),
        state_compare_and_set(pool, "goal", 7, 1),
        state_delete(pool, "goal"),
        state_list(pool),
    ):
        with pytest.raises(
            InvalidValue, match=f"{schema} has a table or view 'state' that Limpet did not make.*Rename"
        ):
            await call

    assert await pool.fetch("SELECT * FROM state") == before
    assert await pool.fetchval("SELECT to_regclass('limpet_entries')") is None
    await pool.execute(f"ALTER {kind.split(maxsplit=1)[0]} state RENAME TO old_state")
    assert await state_set(pool, "goal", 1) == 1
