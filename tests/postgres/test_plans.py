"""Query plans: the server uses an index, for any number of entries and with or without statistics."""

from __future__ import annotations

import asyncio
import json
import string
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
import pytest

import limpet
from limpet.engines.postgres.engine import PostgresEngine, open_over
from limpet.errors import Unavailable
from limpet.keys import key_span, prefix_span
from limpet.model import ABSENT, PRESENT, Add, Delete, Guard, Revision, Touch, Window
from tests.postgres.support import Spy, batch, connected, contend, engine_of, new_schema, put, server, url_of

MANY = 20_000

FILL = f"""
INSERT INTO {{schema}}.limpet_entries
    (namespace, family, key, kind, value, stored, size_bytes, version, revision, created_revision, created_ms,
     updated_ms, expires_ms)
SELECT 'default', 'data', 'group/' || n % 40 || '/' || n, 'json', to_jsonb(n), n::text::bytea, 20, 1, n, n, 0, 0,
    CASE WHEN n % 100 = 0 THEN 1 END
FROM generate_series(1, {MANY}) AS n;
INSERT INTO {{schema}}.limpet_changes
    (namespace, revision, last_revision, at_ms, op, family, size_bytes, key, kind, value, version, entry_revision,
     created_revision, created_ms, updated_ms)
SELECT 'default', n, n, 0, 'put', 'data', 20, 'group/' || n % 40 || '/' || n, 'json', n::text::bytea, 1, n, n, 0, 0
FROM generate_series(1, {MANY}) AS n;
INSERT INTO {{schema}}.limpet_namespaces
    (namespace, revision, floor, at_ms, keys, size_bytes, log_changes, log_bytes)
VALUES ('default', {MANY}, 0, 0, {MANY}, {MANY} * 20, {MANY}, {MANY} * 20);
"""


@pytest.fixture(params=["analysed", "not analysed"])
async def filled(engine: PostgresEngine, request: pytest.FixtureRequest) -> PostgresEngine:
    """Many entries and as many changes. The server has analysed them, or not yet."""
    async with connected() as connection:
        await connection.execute(engine._sql(FILL))
        if request.param == "analysed":
            await connection.execute(engine._sql("ANALYZE {schema}.limpet_entries, {schema}.limpet_changes"))
    return engine


def nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """A plan and all that is below it."""
    return [plan, *(node for below in plan.get("Plans", ()) for node in nodes(below))]


async def assert_by_index(spy: Spy, table: str, index: str, condition: str, scans: int = 1, bounded: int = 1) -> None:
    """Check that the last statement uses an index: with its parameters, and in the generic plan.

    Of its scans, so many are bounded by the condition.
    """
    statement, parameters = (await spy.calls())[-1]
    async with connected() as connection:
        await connection.execute("SET plan_cache_mode = force_generic_plan")
        await connection.execute(f"PREPARE checked AS {statement}")
        any_parameters = ", ".join(["NULL"] * len(parameters))
        for explained in (
            await connection.fetchval(f"EXPLAIN (FORMAT JSON) {statement}", *parameters),
            await connection.fetchval(f"EXPLAIN (FORMAT JSON) EXECUTE checked ({any_parameters})"),
        ):
            found = nodes(json.loads(explained)[0]["Plan"])
            assert [node for node in found if node["Node Type"] == "Seq Scan" and node["Relation Name"] == table] == []
            used = [node for node in found if node.get("Index Name") in (f"{table}_pkey", index)]
            assert {node["Index Name"] for node in used} == {index}
            assert [condition in node["Index Cond"] for node in used].count(True) == bounded
            assert len(used) == scans


async def test_a_thousand_of_many_keys_by_prefix_are_a_range_of_the_index(filled: PostgresEngine, spy: Spy) -> None:
    page = await filled.scan("default", prefix_span("group/7/"), limit=1000)

    assert len(page.entries) == MANY // 40
    await assert_by_index(spy, "limpet_entries", "limpet_entries_pkey", "key >=")
    await assert_by_index(spy, "limpet_entries", "limpet_entries_pkey", "key <")


async def test_keys_alone_are_a_range_of_the_index(filled: PostgresEngine, spy: Spy) -> None:
    page = await filled.scan("default", prefix_span("group/"), values=False, limit=1000)

    assert (len(page.entries), page.cursor is None) == (1000, False)
    await assert_by_index(spy, "limpet_entries", "limpet_entries_pkey", "key >=")


async def test_reading_by_key_looks_each_one_up(filled: PostgresEngine, spy: Spy) -> None:
    found = await filled.read("default", [f"group/{n % 40}/{n}" for n in range(1, 60)])

    assert sum(entry is not None for entry in found) == 59
    await assert_by_index(spy, "limpet_entries", "limpet_entries_pkey", "key = ")


async def test_what_is_due_is_found_by_its_time(filled: PostgresEngine, spy: Spy) -> None:
    assert len(await filled.due("default", limit=500)) == MANY // 100

    await assert_by_index(spy, "limpet_entries", "limpet_due", "expires_ms <=")
    await assert_by_index(spy, "limpet_entries", "limpet_due", "family = ")


async def test_what_is_due_comes_in_the_order_of_its_time(engine: PostgresEngine) -> None:
    """Of all families the earliest, and receipts of none."""
    families = {"lock": 4, "data": 3, "receipt": 1, "sequence": 5, "audit": 2}
    async with connected() as connection:
        for family, expires_ms in families.items():
            await connection.execute(
                engine._sql(
                    "INSERT INTO {schema}.limpet_entries (namespace, family, key, kind, value, stored, size_bytes,"
                    " version, revision, created_revision, created_ms, updated_ms, expires_ms)"
                    " VALUES ('default', $1, 'k', 'json', '1', '1', 2, 1, 1, 1, 0, 0, $2)"
                ),
                family,
                expires_ms,
            )

    assert [each.family for each in await engine.due("default", limit=3)] == ["audit", "data", "lock"]


async def test_the_log_is_read_from_where_a_watcher_stands(filled: PostgresEngine, spy: Spy) -> None:
    page = await filled.changes("default", MANY - 10)

    assert len(page.changes) == 10
    # Once for the changes, and once for the one that they follow, which is not looked for below the floor.
    await assert_by_index(spy, "limpet_changes", "limpet_changes_pkey", "revision >", scans=2, bounded=2)
    await assert_by_index(spy, "limpet_changes", "limpet_changes_pkey", "revision > n.floor", scans=2)
    await assert_by_index(spy, "limpet_changes", "limpet_changes_pkey", "revision <=", scans=2)


async def test_a_count_reads_only_entries_that_have_expired(filled: PostgresEngine, spy: Spy) -> None:
    """The others are counted in the index, and those that expire by their time: not by reading all of the span."""
    assert await filled.count("default", prefix_span("group/7/")) == MANY // 40
    assert await filled.count("default", prefix_span("group/")) == MANY - MANY // 100
    statement, parameters = (await spy.calls())[-1]
    async with connected() as connection:
        await connection.execute("SET max_parallel_workers_per_gather = 0")
        plan = await connection.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", *parameters)
    found = nodes(json.loads(plan)[0]["Plan"])
    removed = [node.get("Rows Removed by Filter", 0) for node in found]
    (due,) = (node for node in found if node.get("Index Name") == "limpet_due")
    assert due["Actual Rows"] == MANY // 100
    assert max(removed) < MANY // 100


async def test_the_oldest_change_is_looked_for_from_the_floor_on(filled: PostgresEngine, spy: Spy) -> None:
    """What was trimmed stays in the index until it is vacuumed, and each trim would go through it."""
    window = Window(age_ms=10**15, changes=10, age_ms_min=0)
    while await filled.trim("default", window):
        pass

    assert (await filled.status("default")).log_changes == 10
    await filled.trim("default", window)
    calls = [call for call in await spy.calls() if "ORDER BY revision LIMIT" in call[0]]
    async with connected() as connection:
        plan = await connection.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {calls[-1][0]}", *calls[-1][1])
    top = json.loads(plan)[0]["Plan"]
    assert top["Actual Rows"] == 1
    assert top["Shared Hit Blocks"] + top["Shared Read Blocks"] < 10


async def test_a_page_of_the_log_from_its_floor_reads_nothing_that_was_trimmed(
    filled: PostgresEngine, spy: Spy
) -> None:
    while await filled.trim("default", Window(age_ms=10**15, changes=10, age_ms_min=0)):
        pass

    assert len((await filled.changes("default", MANY - 10)).changes) == 10
    statement, parameters = (await spy.calls())[-1]
    async with connected() as connection:
        plan = await connection.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", *parameters)
    top = json.loads(plan)[0]["Plan"]
    assert top["Shared Hit Blocks"] + top["Shared Read Blocks"] < 20


async def test_commits_and_retries_never_look_through_a_whole_table(filled: PostgresEngine, spy: Spy) -> None:
    """Within the functions on the server no plan can be seen, so the server's own counters are read."""
    count = "SELECT sum(seq_scan)::int FROM pg_stat_user_tables WHERE schemaname = $1 AND relname <> 'limpet_store'"
    flush = "SELECT pg_stat_force_next_flush()"

    async with connected() as connection:
        await filled._fetch(flush)
        before = await connection.fetchval(count, filled._schema)
        for number in range(1, 20):
            key = f"group/{number}/{number}"
            await filled.commit("default", batch(put(key, 1), Touch("group/1/41", None), Delete("group/1/81")))
            await filled.commit("default", batch(Add("count", 1), put(key, 2), digest=b"d", receipt_ms=1))
            await filled.commit("default", batch(put(key, 3), retry_since=MANY))
            (found,) = await filled.read("default", [key])
            assert found is not None
            expected = (Guard(key, Revision(found.revision)),)
            await asyncio.gather(
                filled.commit("default", batch(put(key, 4), guards=expected)),
                filled.commit("default", batch(put("other", 4), guards=(Guard("other", ABSENT),))),
            )
            await filled.commit("default", batch(put(key, 5)))
            await filled.read("default", [key])
            await filled.changes("default", MANY, span=key_span(key))
        # Each connection has to flush its own counters.
        await filled._fetch(flush)
        assert await connection.fetchval(count, filled._schema) == before
        scans = "SELECT idx_scan FROM pg_stat_user_tables WHERE schemaname = $1 AND relname = 'limpet_entries'"
        assert await connection.fetchval(scans, filled._schema) > 60


async def put_expecting(engine: PostgresEngine, number: int) -> None:
    """Puts with expected revisions, which the function for puts looks up."""
    keys = [f"{number}/{letter}" for letter in string.ascii_lowercase]
    await asyncio.gather(*(engine.commit("other", batch(put(key, 1), guards=(Guard(key, ABSENT),))) for key in keys))


async def apply_each_kind(engine: PostgresEngine, number: int) -> None:
    """Writes of each kind, over entries that are known and such that are not, in one group and under a lock."""
    for key in (f"{number}/a", f"{number}/b"):
        await engine.commit("other", batch(put(key, 1), Add(f"{key}/n", 1), digest=b"d", receipt_ms=60_000))
        engine._committer.forget("other")
        await asyncio.gather(
            engine.commit("other", batch(Touch(key, 60_000), put("other", number), guards=(Guard(key, PRESENT),))),
            engine.commit("other", batch(Add(f"{key}/n", 1))),
        )
        contend(engine, "other", key)
        await engine.commit("other", batch(Delete(key)))


@pytest.mark.parametrize("write", [put_expecting, apply_each_kind])
async def test_entries_are_looked_up_by_key_in_sessions_of_a_caller(
    schema: str, write: Callable[[PostgresEngine, int], Awaitable[None]]
) -> None:
    """Such a session has its own settings. It planned these lookups when the table was small, and now it is large."""
    count = "SELECT seq_scan FROM pg_stat_user_tables WHERE schemaname = $1 AND relname = 'limpet_entries'"
    async with connected() as observer:
        await observer.execute(f"CREATE SCHEMA {schema}")
        settings = {"search_path": schema}
        async with asyncpg.create_pool(server(), min_size=1, max_size=1, server_settings=settings) as pool:
            engine = await open_over(pool)
            await engine.commit("other", batch(put("first", 1)))
            await observer.execute(f"ANALYZE {schema}.limpet_entries")
            for number in range(10):
                await write(engine, number)
            await observer.execute(engine._sql(FILL))
            await engine._fetch("SELECT pg_stat_force_next_flush()")
            before = await observer.fetchval(count, schema)

            await write(engine, 10)

            await engine._fetch("SELECT pg_stat_force_next_flush()")
            assert await observer.fetchval(count, schema) == before
            await engine.close()


async def test_what_was_planned_on_an_empty_table_reads_no_whole_table_later(engine: PostgresEngine) -> None:
    """The session keeps its plans, and the table has grown since by what another process wrote."""
    count = "SELECT sum(seq_scan)::int FROM pg_stat_user_tables WHERE schemaname = $1 AND relname <> 'limpet_store'"
    async with connected() as observer:
        for number in range(10):
            await apply_each_kind(engine, number)
        await observer.execute(engine._sql(FILL))
        await engine._fetch("SELECT pg_stat_force_next_flush()")
        before = await observer.fetchval(count, engine._schema)

        await apply_each_kind(engine, 10)

        await engine._fetch("SELECT pg_stat_force_next_flush()")
        assert await observer.fetchval(count, engine._schema) == before


async def test_an_index_may_take_longer_than_any_other_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large table is indexed in minutes, and the limit that ends a forgotten transaction would end that."""
    monkeypatch.setattr("limpet.engines.postgres.connections._TRANSACTION_MS", 300)
    async with limpet.open(url_of(new_schema()), sweep=False) as store:
        engine = engine_of(store)
        with pytest.raises(Unavailable):
            await engine._run("SELECT pg_sleep(2)")

        await engine._define("SELECT pg_sleep(0.6)")
