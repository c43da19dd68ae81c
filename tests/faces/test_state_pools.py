"""The state functions over pools: whose state it is, and what is left of a pool when it is gone."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
from decimal import Decimal
from typing import Any

import asyncpg
import pytest

import limpet
from limpet.engines.postgres import engine as postgres
from limpet.errors import Closed, InvalidValue, LimpetError, PermissionDenied, Unavailable
from limpet.faces import state
from limpet.faces.state import (
    CASConflictError,
    state_compare_and_set,
    state_delete,
    state_get,
    state_list,
    state_set,
)
from limpet.isolation.postgres import grant_sql
from tests.faces.support import Pools, exactly
from tests.servers import free_port

ENTRIES = "SELECT count(*) FROM {}.limpet_entries"
CHANGES = "SELECT count(*) FROM {}.limpet_changes"


# A schema per agent ----------------------------------------------------------


async def test_two_butlers_of_one_database_do_not_see_each_other(pools: Pools) -> None:
    one, other = [await pools.pool(await pools.schema()) for _ in range(2)]
    await state_set(one, "key", "of one")
    await state_set(one, "only/one", 1)
    await state_set(other, "key", "of other")
    await state_set(other, "key", "of other, again")

    assert (await state_get(one, "key"), await state_get(other, "key")) == ("of one", "of other, again")
    assert await state_get(other, "only/one") is None
    assert (await state_list(one), await state_list(other)) == (["key", "only/one"], ["key"])
    assert await state_list(other, keys_only=False) == [{"key": "key", "value": "of other, again"}]


async def test_a_butler_does_not_change_what_another_has(pools: Pools) -> None:
    one, other = [await pools.pool(await pools.schema()) for _ in range(2)]
    await state_set(one, "key", "of one")

    await state_delete(other, "key")
    with pytest.raises(CASConflictError) as refused:
        await state_compare_and_set(other, "key", 1, "of other")
    assert await state_set(other, "key", "of other") == 1

    assert refused.value.actual_version is None
    assert await state_get(one, "key") == "of one"
    assert await state_set(one, "key", "of one, again") == 2


async def test_a_butler_needs_and_uses_nothing_outside_its_schema(pools: Pools, schema: str, admin: Any) -> None:
    role = await pools.role(schema)
    pool = await pools.pool(schema, server_settings={"role": role})

    await state_set(pool, "key", 1)

    places = await admin.fetch(
        "SELECT DISTINCT relnamespace::regnamespace FROM pg_class WHERE relowner = $1::regrole", role
    )
    assert {str(place[0]) for place in places} - {"pg_toast"} == {schema}
    assert await admin.fetchval(ENTRIES.format(schema)) == 1


async def test_a_role_for_each_butler_keeps_it_out_of_the_schemas_of_others(pools: Pools) -> None:
    """The search path decides where an agent works; its role decides what it may change."""
    mine, theirs = await pools.schema(), await pools.schema()
    me, they = await pools.role(mine), await pools.role(theirs)
    my_pool = await pools.pool(mine, server_settings={"role": me})
    their_pool = await pools.pool(theirs, server_settings={"role": they})
    await state_set(my_pool, "key", "mine")
    await state_set(their_pool, "key", "theirs")

    for table in ("limpet_entries", "limpet_changes", "limpet_namespaces"):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await my_pool.fetch(f"SELECT * FROM {theirs}.{table}")
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await my_pool.fetch(f"SELECT {theirs}.limpet_take('state')")
    assert await state_get(my_pool, "key") == "mine"


async def test_a_role_that_was_granted_a_schema_can_do_all_a_butler_does(
    pools: Pools, schema: str, admin: Any, caplog: pytest.LogCaptureFixture
) -> None:
    await state_set(await pools.pool(schema), "key", 1)
    role = await pools.role()
    await admin.execute(grant_sql(role, schema=schema))
    pool = await pools.pool(schema, server_settings={"role": role})

    assert await state_set(pool, "key", 2) == 2
    assert await state_compare_and_set(pool, "key", 2, 3) == 3
    assert await state_list(pool, keys_only=False) == [{"key": "key", "value": 3}]
    assert await pool.fetchval("SELECT version FROM state") == 3
    await state_delete(pool, "key")
    assert await state_get(pool, "key") is None
    assert caplog.records == []


async def test_a_role_that_may_only_read_can_get_and_list(pools: Pools, schema: str, admin: Any) -> None:
    await state_set(await pools.pool(schema), "key", 1)
    role = await pools.role()
    await admin.execute(grant_sql(role, schema=schema, read_only=True))
    pool = await pools.pool(schema, server_settings={"role": role})

    assert await state_get(pool, "key") == 1
    assert await state_list(pool) == ["key"]
    with pytest.raises(PermissionDenied):
        await state_set(pool, "key", 2)


async def test_a_butler_whose_role_may_not_use_the_schema_is_refused(pools: Pools) -> None:
    theirs = await pools.schema()
    stranger = await pools.pool(theirs, server_settings={"role": await pools.role()})

    with pytest.raises((InvalidValue, PermissionDenied)):
        await state_get(stranger, "key")


async def test_a_pool_that_works_in_no_schema_is_refused(pools: Pools) -> None:
    pool = await pools.pool("butler_that_is_not_there")

    with pytest.raises(InvalidValue, match="search_path"):
        await state_set(pool, "key", 1)


async def test_a_missing_schema_does_not_send_a_butler_to_the_next_one_of_its_path(pools: Pools, schema: str) -> None:
    """PostgreSQL passes over a schema that is missing. Two agents would then share the next one of their paths."""
    pool = await pools.pool(server_settings={"search_path": f"butler_that_is_not_there, {schema}"})

    with pytest.raises(InvalidValue, match="butler_that_is_not_there"):
        await state_set(pool, "key", 1)


async def test_the_first_schema_of_a_path_is_the_butlers(pools: Pools, schema: str) -> None:
    behind = await pools.schema()
    pool = await pools.pool(server_settings={"search_path": f'"$user", {schema}, {behind}'})

    await state_set(pool, "key", 1)

    assert await state_list(await pools.pool(schema)) == ["key"]
    assert await state_list(await pools.pool(behind)) == []


# Every kind of pool -------------------------------------------------------------


def _decimals(text: str) -> Any:
    return json.loads(text, parse_float=Decimal)


async def _decode_decimals(connection: Any) -> None:
    await connection.set_type_codec("jsonb", encoder=json.dumps, decoder=_decimals, schema="pg_catalog")


@pytest.mark.parametrize(
    "options",
    [
        {"min_size": 0, "max_size": 1},
        {"statement_cache_size": 0},
        {"max_inactive_connection_lifetime": 0.001},
        {"server_settings": {"default_transaction_isolation": "serializable"}},
        {"server_settings": {"standard_conforming_strings": "off", "DateStyle": "German", "bytea_output": "escape"}},
        {"server_settings": {"extra_float_digits": "-15", "TimeZone": "Asia/Kathmandu"}},
    ],
    ids=str,
)
async def test_the_settings_of_a_pool_make_no_difference(pools: Pools, schema: str, options: dict[str, Any]) -> None:
    pool = await pools.pool(schema, **options)
    value = {"text": "é\\\n", "numbers": [0.1, 1e22, -0.0, 2**63 - 1]}

    versions = await asyncio.gather(*(state_set(pool, "key", value) for _ in range(10)))

    assert sorted(versions) == list(range(1, 11))
    assert exactly(await state_list(pool, keys_only=False)) == exactly([{"key": "key", "value": value}])


async def test_a_path_that_is_set_whenever_a_connection_is_taken_counts(pools: Pools, schema: str) -> None:
    async def setup(connection: Any) -> None:
        await connection.execute(f"SET search_path TO {schema}")

    await state_set(await pools.pool(setup=setup), "key", 1)

    assert await state_list(await pools.pool(schema)) == ["key"]


async def test_a_schema_may_have_any_name(pools: Pools) -> None:
    name = await pools.schema('Agent "{schema}" %s; --')
    pool = await pools.pool(name)

    assert await state_set(pool, "key", 1) == 1
    assert await state_list(pool) == ["key"]


@pytest.mark.parametrize(
    "value", [None, 1, 1.0, 0.1, True, "text", '{"a": 1}', [1, "2"], {"a": [1e22, -0.0, "\0", 1.5e300]}], ids=repr
)
async def test_pools_that_decode_json_and_pools_that_do_not_give_equal_answers(
    pools: Pools, schema: str, value: object
) -> None:
    plain, decoding = await pools.pool(schema), await pools.pool(schema, decodes=True)
    decimals = await pools.pool(schema, init=_decode_decimals)
    await state_set(plain, "plain", value)
    await state_set(decoding, "decoding", value)
    await state_set(decimals, "decimals", value)

    for pool in (plain, decoding, decimals):
        for key in ("plain", "decoding", "decimals"):
            assert exactly(await state_get(pool, key)) == exactly(value)
        listed = await state_list(pool, keys_only=False)
        assert exactly([item["value"] for item in listed]) == exactly([value] * 3)


async def test_a_conflict_over_a_pool_that_decodes_json_brings_the_same_entry(pools: Pools, schema: str) -> None:
    found: list[limpet.Entry | None] = []
    for pool in (await pools.pool(schema), await pools.pool(schema, decodes=True)):
        if not found:
            await state_set(pool, "key", {"n": [1.0, 1e22]})
        with pytest.raises(CASConflictError) as refused:
            await state_compare_and_set(pool, "key", 9, "new")
        found.append(refused.value.current)

    assert found[0] is not None
    assert found[0] == found[1]


# Several pools on one schema ----------------------------------------------------


@pytest.mark.parametrize("isolation", ["read committed", "serializable"])
async def test_pools_that_meet_on_an_empty_schema_make_its_tables_once(
    pools: Pools, schema: str, isolation: str
) -> None:
    settings = {"default_transaction_isolation": isolation}
    several = [await pools.pool(schema, server_settings=settings) for _ in range(3)]

    versions = await asyncio.gather(*(state_set(pool, "key", 1) for pool in several))

    assert sorted(versions) == [1, 2, 3]


async def _meet(several: list[Any]) -> None:
    """Let each pool find the state, one after the other."""
    for pool in several:
        await state_list(pool)


async def test_sets_through_several_pools_count_versions_without_gaps(pools: Pools, schema: str) -> None:
    several = [await pools.pool(schema) for _ in range(3)]
    await _meet(several)

    versions = await asyncio.gather(*(state_set(pool, "key", 1) for _ in range(20) for pool in several))

    assert sorted(versions) == list(range(1, 61))


async def test_sets_through_serializable_pools_count_versions_without_gaps(pools: Pools, schema: str) -> None:
    several = [
        await pools.pool(schema, server_settings={"default_transaction_isolation": "serializable"}) for _ in range(3)
    ]
    await _meet(several)

    versions = await asyncio.gather(*(state_set(pool, "key", 1) for _ in range(20) for pool in several))

    assert sorted(versions) == list(range(1, 61))


async def test_of_twenty_through_several_pools_one_wins(pools: Pools, schema: str) -> None:
    several = [await pools.pool(schema) for _ in range(4)]
    version = await state_set(several[0], "key", "free")

    outcomes = await asyncio.gather(
        *(state_compare_and_set(pool, "key", version, "taken") for _ in range(5) for pool in several),
        return_exceptions=True,
    )

    assert [outcome for outcome in outcomes if not isinstance(outcome, CASConflictError)] == [2]


async def test_what_a_butler_sets_is_the_namespace_state_of_its_schema(pool: Any, store: limpet.Store) -> None:
    await state_set(pool, "from/pool", [1])
    await store.put("from/store", [2])
    await store.put("raw", b"\xff")
    await store.record("record").put({"state": "open", "blob": b"\xff"})
    await store.namespace("other").put("elsewhere", 1)

    assert await store.get("from/pool") == [1]
    assert await state_list(pool, keys_only=False) == [
        {"key": "from/pool", "value": [1]},
        {"key": "from/store", "value": [2]},
        {"key": "raw", "value": b"\xff"},
        {"key": "record", "value": {"state": "open", "blob": b"\xff"}},
    ]


async def test_what_a_butler_sets_can_be_watched_by_others(pool: Any, store: limpet.Store) -> None:
    async with asyncio.timeout(120), store.watch("key", after=0) as events:
        await state_set(pool, "key", "value")
        event = await anext(events)

    assert (event.op, event.value) == ("put", "value")


# One store for a pool -----------------------------------------------------------


class Openings:
    """Counts the engines that are opened over pools, and can hold one up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.begun = asyncio.Event()
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self._open_over = postgres.open_over
        monkeypatch.setattr(postgres, "open_over", self._open)

    async def _open(self, pool: Any, **claims: Any) -> Any:
        self.count += 1
        self.begun.set()
        await self.may_go_on.wait()
        return await self._open_over(pool, **claims)


@pytest.fixture
async def openings(monkeypatch: pytest.MonkeyPatch) -> Openings:
    return Openings(monkeypatch)


async def test_all_calls_on_a_pool_share_a_store(pool: Any, openings: Openings) -> None:
    await asyncio.gather(*(state_set(pool, f"key/{number}", number) for number in range(10)))
    await state_get(pool, "key/1")

    assert openings.count == 1
    assert len(await state_list(pool)) == 10


async def test_two_pools_have_a_store_each(pools: Pools, schema: str, openings: Openings) -> None:
    for pool in (await pools.pool(schema), await pools.pool(schema)):
        await state_set(pool, "key", 1)

    assert openings.count == 2


async def test_who_is_cancelled_while_a_store_opens_leaves_it_to_the_others(pool: Any, openings: Openings) -> None:
    openings.may_go_on.clear()
    first = asyncio.create_task(state_set(pool, "first", 1))
    second = asyncio.create_task(state_set(pool, "second", 1))
    await openings.begun.wait()

    first.cancel()
    await asyncio.wait([first])
    openings.may_go_on.set()

    assert await second == 1
    assert (openings.count, await state_list(pool)) == (1, ["second"])


async def test_an_opening_that_failed_is_tried_again_by_the_next_call(
    pools: Pools, admin: Any, openings: Openings
) -> None:
    pool = await pools.pool("butler_yet_to_come")
    failures = await asyncio.gather(*(state_get(pool, "key") for _ in range(3)), return_exceptions=True)
    assert [type(failure) for failure in failures] == [InvalidValue] * 3

    await pools.schema("butler_yet_to_come")

    assert await state_set(pool, "key", 1) == 1
    assert openings.count == 2


# The pool is its owner's --------------------------------------------------------


async def test_nothing_runs_on_after_a_call(pool: Any) -> None:
    before = asyncio.all_tasks()

    await state_set(pool, "key", 1)
    await asyncio.gather(*(state_set(pool, "key", number) for number in range(10)))
    await state_list(pool, keys_only=False)
    await state_delete(pool, "key")

    assert asyncio.all_tasks() - before == set()


async def test_no_connection_is_kept_between_calls(pool: Any) -> None:
    await state_set(pool, "key", 1)

    assert pool.get_idle_size() == pool.get_size()


async def test_a_pool_of_one_connection_can_be_closed_right_after_a_call(pools: Pools, schema: str) -> None:
    pool = await pools.pool(schema, max_size=1)
    await state_set(pool, "key", 1)

    async with asyncio.timeout(120):
        await pool.close()

    assert await state_get(await pools.pool(schema), "key") == 1


@pytest.mark.parametrize("used", [True, False], ids=["used", "unused"])
async def test_a_closed_pool_is_said_to_be_closed(pool: Any, used: bool) -> None:
    if used:
        await state_set(pool, "key", 1)
    await pool.close()

    for attempt in (
        lambda: state_get(pool, "key"),
        lambda: state_set(pool, "key", 1),
        lambda: state_compare_and_set(pool, "key", 1, 1),
        lambda: state_delete(pool, "key"),
        lambda: state_list(pool),
    ):
        with pytest.raises(Closed, match="the pool is closed"):
            await attempt()


def _known_pools() -> set[int]:
    gc.collect()
    return {id(known) for known in gc.get_objects() if type(known) is asyncpg.Pool}


async def test_a_closed_pool_is_forgotten_when_the_next_one_is_used(pools: Pools, schema: str) -> None:
    """A pool cannot be referred to weakly, so it is kept while it is open. It must not be kept for ever."""
    for _ in range(3):
        async with asyncpg.create_pool(pools.url, min_size=1, server_settings={"search_path": schema}) as closed:
            await state_set(closed, "key", 1)
    place = id(closed)
    del closed
    await state_set(await pools.pool(schema), "key", 1)

    assert place not in _known_pools()


async def test_a_closed_pool_is_forgotten_when_it_is_used_once_more(pools: Pools, schema: str) -> None:
    async with asyncpg.create_pool(pools.url, min_size=1, server_settings={"search_path": schema}) as closed:
        await state_set(closed, "key", 1)
    with pytest.raises(Closed):
        await state_get(closed, "key")
    place = id(closed)
    del closed

    assert place not in _known_pools()


def test_a_pool_that_was_left_open_is_forgotten_with_its_loop(server: str) -> None:
    """A program that starts a loop for each task, and closes nothing, must not gather pools."""

    async def leave_open() -> int:
        pools = Pools(server, await asyncpg.connect(server))
        pool = await asyncpg.create_pool(
            server, min_size=0, max_size=1, server_settings={"search_path": await pools.schema()}
        )
        await state_set(pool, "key", 1)
        async with pool.acquire() as connection:
            # Only so that no socket is left over; the pool does not count as closed by this.
            gone = asyncio.Event()
            connection.add_termination_listener(lambda _: gone.set())
            connection.terminate()
            await gone.wait()
        await pools.close()
        await pools.admin.close()
        return id(pool)

    place = asyncio.run(leave_open())
    assert place in _known_pools()

    asyncio.run(leave_open())

    assert place not in _known_pools()


async def test_connections_that_the_server_ended_are_replaced(pool: Any, schema: str, admin: Any) -> None:
    await state_set(pool, "key", 1)
    pid = await pool.fetchval("SELECT pg_backend_pid()")
    await admin.execute("SELECT pg_terminate_backend($1, 10000)", pid)

    assert await state_set(pool, "key", 2) == 2
    assert await state_get(pool, "key") == 2


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    url = f"postgresql://postgres@127.0.0.1:{free_port()}/postgres"
    async with asyncpg.create_pool(url, min_size=0) as pool:
        with pytest.raises(Unavailable):
            await state_get(pool, "key")


async def test_a_pool_that_was_not_awaited_is_an_error_of_ours(pools: Pools) -> None:
    with pytest.raises(LimpetError):
        await state_get(asyncpg.create_pool(pools.url), "key")


# The log ------------------------------------------------------------------------


async def _age(admin: Any, schema: str) -> None:
    """Let two days pass for what is in the log."""
    await admin.execute(f"UPDATE {schema}.limpet_changes SET at_ms = at_ms - 2 * 86400000")


async def test_the_first_write_through_a_pool_trims_the_log(pools: Pools, schema: str, admin: Any) -> None:
    """No sweeper runs over a pool of the caller, and a log that no process trims would grow for ever."""
    early = await pools.pool(schema)
    for number in range(5):
        await state_set(early, "key", number)
    await _age(admin, schema)

    await state_set(await pools.pool(schema), "key", "new")

    assert await admin.fetchval(CHANGES.format(schema)) == 1
    assert await state_get(early, "key") == "new"


async def test_from_there_every_so_many_writes_trim_it(
    pool: Any, schema: str, admin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "TRIM_WRITES", 3)
    counts = []
    for number in range(5):
        await state_set(pool, "key", number)
        counts.append(await admin.fetchval(CHANGES.format(schema)))
        await _age(admin, schema)

    assert counts == [1, 2, 3, 1, 2]


async def test_deletes_and_compared_sets_count_as_writes(
    pool: Any, schema: str, admin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "TRIM_WRITES", 3)
    await state_set(pool, "key", 1)
    await state_compare_and_set(pool, "key", 1, 2)
    await state_delete(pool, "key")
    await _age(admin, schema)

    await state_set(pool, "key", 3)

    assert await admin.fetchval(CHANGES.format(schema)) == 1


async def test_a_log_that_cannot_be_trimmed_does_not_spoil_the_write(
    pools: Pools, schema: str, admin: Any, caplog: pytest.LogCaptureFixture
) -> None:
    await state_set(await pools.pool(schema), "key", 1)
    role = await pools.role()
    await admin.execute(
        f"GRANT USAGE ON SCHEMA {schema} TO {role};"
        f"GRANT SELECT, INSERT, UPDATE ON ALL TABLES IN SCHEMA {schema} TO {role};"
        f"GRANT DELETE ON {schema}.limpet_entries TO {role}"
    )
    pool = await pools.pool(schema, server_settings={"role": role})
    await _age(admin, schema)

    with caplog.at_level(logging.WARNING, "limpet"):
        assert await state_set(pool, "key", 2) == 2

    assert [record.name for record in caplog.records] == ["limpet.faces.state"]
    assert "trimming the log" in caplog.text
