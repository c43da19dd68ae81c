"""Opening: who may, what is refused with which error, and the tables that it creates."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import asyncpg
import pytest

import limpet
from limpet.engines.sql_indexes import quoted
from limpet.errors import Corrupt, InvalidValue, LimpetError, PermissionDenied, Unavailable
from limpet.faces import state
from limpet.model import Commit
from limpet.opening import open_engine
from tests.postgres.support import (
    batch,
    blocked_by,
    connected,
    engine_of,
    log_of,
    new_schema,
    open_postgres,
    put,
    url_of,
)
from tests.servers import Postgres, free_port, postgres

SECRET = "hush-hush"


@pytest.fixture(scope="module")
def guarded() -> Iterator[Postgres]:
    """A server for this module alone, which requires a password of every role but its superuser."""

    async def guard() -> None:
        async with connected(running.url) as connection:
            file = await connection.fetchval("SHOW hba_file")
            lines = "('host all postgres 127.0.0.1/32 trust'), ('host all all 127.0.0.1/32 scram-sha-256')"
            await connection.execute(f"COPY (VALUES {lines}) TO '{file}'")
            await connection.execute("CREATE ROLE stranger LOGIN PASSWORD 'right'; SELECT pg_reload_conf()")
        # The server reads the file a moment later.
        with contextlib.suppress(asyncpg.InvalidPasswordError):
            while True:
                async with connected(running.url.replace("postgres@", "stranger:wrong@")):
                    pass

    with postgres() as running:
        asyncio.run(guard())
        yield running


@pytest.fixture
async def guest(guarded: Postgres) -> AsyncIterator[str]:
    """The URL for a role that may create schemas there."""
    async with connected(guarded.url) as connection:
        await connection.execute(f"CREATE ROLE guest LOGIN PASSWORD '{SECRET}'")
        await connection.execute("GRANT CREATE ON DATABASE postgres TO guest")
    yield guarded.url.replace("postgres@", f"guest:{SECRET}@")
    async with connected(guarded.url) as connection:
        await connection.execute("DROP OWNED BY guest CASCADE; DROP ROLE guest")


async def refused(url: str) -> LimpetError:
    """The error that opening raises. It shows no password, in whatever form it is printed."""
    with pytest.raises(LimpetError) as raised:
        await limpet.open(url, sweep=False)
    text = str(raised.value) + repr(raised.value)
    assert SECRET not in text
    assert "wrong-word" not in text
    return raised.value


# Who may come in ------------------------------------------------------------------


async def test_the_right_password_opens(guest: str) -> None:
    async with limpet.open(url_of("rooms", guest), sweep=False) as store:
        assert (await store.put("key", 1)).version == 1
        assert SECRET not in repr(store) + repr(store._session.engine)


async def test_a_wrong_password_is_permission_denied(guest: str) -> None:
    error = await refused(url_of("rooms", guest.replace(SECRET, "wrong-word")))

    assert type(error) is PermissionDenied
    assert "guest" in str(error)


async def test_an_unknown_role_is_permission_denied(guest: str) -> None:
    assert type(await refused(url_of("rooms", guest.replace("guest:", "no-such-role:")))) is PermissionDenied


async def test_an_unknown_database_is_an_invalid_value(guest: str) -> None:
    error = await refused(url_of("rooms", guest.removesuffix("/postgres") + "/nowhere"))

    assert type(error) is InvalidValue
    assert "nowhere" in str(error)


async def test_a_port_without_a_server_is_unavailable(guest: str, guarded: Postgres) -> None:
    error = await refused(url_of("rooms", guest.replace(str(guarded.port), str(free_port()))))

    assert type(error) is Unavailable
    assert "127.0.0.1" in str(error)


async def test_an_unknown_host_is_unavailable(guest: str) -> None:
    error = await refused(url_of("rooms", guest.replace("127.0.0.1", "nowhere.invalid")))

    assert type(error) is Unavailable
    assert "nowhere.invalid" in str(error)


@pytest.mark.parametrize("port", ["port", "99999", "-1"])
async def test_a_port_that_is_none_is_an_invalid_value(guest: str, guarded: Postgres, port: str) -> None:
    assert type(await refused(url_of("rooms", guest.replace(str(guarded.port), port)))) is InvalidValue


@pytest.mark.parametrize(
    "option",
    ["shema=x", "password=wrong-word", "user=x", "statement_cache_size=1", "pooler=perhaps", "sslmode=sometimes"],
)
async def test_an_option_that_is_not_known_is_an_invalid_value(guest: str, option: str) -> None:
    """A misspelt option would silently be without effect."""
    error = await refused(f"{guest}?{option}")

    assert type(error) is InvalidValue
    assert option.partition("=")[0] in str(error)


@pytest.mark.parametrize("name", ["", "x" * 64, "é" * 32, "with\0zero", "pg_mine"])
async def test_a_schema_that_cannot_be_is_an_invalid_value(name: str) -> None:
    assert type(await refused(url_of(name))) is InvalidValue


async def test_a_role_that_may_not_make_tables_works_where_there_are_some(guest: str, guarded: Postgres) -> None:
    """Another role created them, and granted what the engine needs."""
    schema = new_schema()
    async with limpet.open(url_of(schema, guarded.url), sweep=False) as store:
        await store.put("key", 1)
    async with connected(guarded.url) as connection:
        await connection.execute("REVOKE CREATE ON DATABASE postgres FROM guest")
        await connection.execute(f"GRANT USAGE ON SCHEMA {schema} TO guest")
        await connection.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO guest")

    async with limpet.open(url_of(schema, guest), sweep=False) as store:
        assert (await store.put("key", 2)).version == 2
        assert await store.add("count", 3, request_id="mine") == 3
        assert await store.take("key") == 2
        assert await store.trim() == 0
        assert [change.op for change in await log_of(store)] == ["put", "put", "put", "delete"]


async def test_a_role_that_may_not_make_tables_is_denied_where_there_are_none(guest: str, guarded: Postgres) -> None:
    async with connected(guarded.url) as connection:
        await connection.execute("REVOKE CREATE ON DATABASE postgres FROM guest")

    assert type(await refused(url_of(new_schema(), guest))) is PermissionDenied


async def test_a_role_that_may_make_tables_in_its_schema_alone_makes_them(guest: str, guarded: Postgres) -> None:
    schema = new_schema()
    async with connected(guarded.url) as connection:
        await connection.execute("REVOKE CREATE ON DATABASE postgres FROM guest")
        await connection.execute(f"CREATE SCHEMA {schema}; GRANT USAGE, CREATE ON SCHEMA {schema} TO guest")

    async with limpet.open(url_of(schema, guest), sweep=False) as store:
        assert (await store.put("key", 1)).version == 1


async def test_a_role_that_may_only_read_is_denied_its_writes(guest: str, guarded: Postgres) -> None:
    schema = new_schema()
    async with limpet.open(url_of(schema, guarded.url), sweep=False) as store:
        await store.put("key", 1)
    async with connected(guarded.url) as connection:
        await connection.execute(f"GRANT USAGE ON SCHEMA {schema} TO guest")
        await connection.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO guest")

    async with limpet.open(url_of(schema, guest), sweep=False) as store:
        assert await store.get("key") == 1
        with pytest.raises(PermissionDenied):
            await store.put("key", 2)
        with pytest.raises(PermissionDenied):
            await store.add("count")


# What is made ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ['A "b" é', "two words", "UPPER", "x" * 63, "é" * 31, "a.b", "a'b", "a%b?c&d=e", "{schema}", "a$$b", "\\"]
)
async def test_any_schema_that_postgresql_takes_can_be_named(name: str) -> None:
    async with connected() as connection:
        try:
            async with limpet.open(url_of(name), sweep=False) as store:
                await store.put("key", {"a": 1})
                assert await store.add("count", 2, request_id="mine") == 2
                assert [entry.key async for entry in store.scan()] == ["count", "key"]
            async with limpet.open(url_of(name), sweep=False) as again:
                assert await again.get("count") == 2
            assert await connection.fetchval(f"SELECT count(*) FROM {quoted(name)}.limpet_entries") == 3
        finally:
            await connection.execute(f"DROP SCHEMA IF EXISTS {quoted(name)} CASCADE")


async def test_the_tables_of_others_in_the_schema_are_left_alone(schema: str) -> None:
    async with connected() as connection:
        await connection.execute(f"CREATE SCHEMA {schema} CREATE TABLE state (key text)")
        async with limpet.open(url_of(schema), sweep=False) as store:
            await store.put("key", 1)
        tables = await connection.fetch("SELECT relname FROM pg_class WHERE relnamespace = $1::regnamespace", schema)

    assert "state" in {name for (name,) in tables}


async def test_a_store_keeps_its_identity(url: str) -> None:
    async with limpet.open(url, sweep=False) as store:
        first = (await store.status()).store_id
    async with limpet.open(url, sweep=False) as store:
        assert (await store.status()).store_id == first


async def test_a_store_without_its_id_is_refused(url: str, schema: str) -> None:
    async with limpet.open(url, sweep=False):
        pass
    async with connected() as connection:
        await connection.execute(f"DELETE FROM {schema}.limpet_store")

    assert type(await refused(url)) is Corrupt


async def test_a_failed_opening_leaves_no_connection_behind(url: str, schema: str) -> None:
    async with limpet.open(url, sweep=False):
        pass
    async with connected() as connection:
        await connection.execute(f"DELETE FROM {schema}.limpet_store")
        named = f"{url}&application_name={schema}"
        for _ in range(3):
            await refused(named)
        left = "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1"
        assert await connection.fetchval(left, schema) == 0


# How durable ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({}, "disk"),
        ({"synchronous_commit": "local"}, "disk"),
        ({"synchronous_commit": "off"}, "seconds"),
        ({"fsync": "off"}, "process"),
        ({"fsync": "off", "synchronous_commit": "off"}, "none"),
        ({"synchronous_standby_names": "'*'"}, "quorum"),
        ({"synchronous_standby_names": "'*'", "synchronous_commit": "local"}, "disk"),
    ],
)
async def test_the_word_for_durability_is_what_the_server_is_set_to(
    guarded: Postgres, settings: dict[str, str], word: str
) -> None:
    url = url_of("durable", guarded.url)
    async with limpet.open(url, sweep=False):
        pass
    async with connected(guarded.url) as connection:
        try:
            for name, value in settings.items():
                await connection.execute(f"ALTER SYSTEM SET {name} = {value}")
            # Wait until the server has read it, which a new connection shows.
            await connection.execute("SELECT pg_reload_conf()")
            await settled(guarded.url, {name: value.strip("'") for name, value in settings.items()})
            # Nothing is written here: a commit would wait for the standby, which does not exist.
            async with limpet.open(url, sweep=False) as store:
                assert store.traits.durability == word
        finally:
            await connection.execute("ALTER SYSTEM RESET ALL")
            await connection.execute("SELECT pg_reload_conf()")
            await settled(guarded.url, {"fsync": "on", "synchronous_commit": "on", "synchronous_standby_names": ""})


async def settled(url: str, settings: dict[str, str]) -> None:
    """Wait until new connections see these settings."""
    for name, value in settings.items():
        found = None
        while found != value:
            async with connected(url) as connection:
                found = await connection.fetchval(f"SHOW {name}")


async def test_the_word_is_that_of_our_own_connections(guarded: Postgres) -> None:
    """A role may have its own settings."""
    async with limpet.open(url_of("durable", guarded.url), sweep=False):
        pass
    async with connected(guarded.url) as connection:
        await connection.execute("CREATE ROLE hasty SUPERUSER LOGIN PASSWORD 'x'")
        await connection.execute("ALTER ROLE hasty SET synchronous_commit = off")
        try:
            url = url_of("durable", guarded.url.replace("postgres@", "hasty:x@"))
            async with limpet.open(url, sweep=False) as store:
                assert store.traits.durability == "seconds"
        finally:
            await connection.execute("DROP ROLE hasty")


# Isolation levels and older servers -----------------------------------------------


ODD_DEFAULTS = {
    "repeatable read": "default_transaction_isolation = 'repeatable read'",
    "serializable": "default_transaction_isolation = 'serializable'",
    "read only": "default_transaction_read_only = on",
}


@contextlib.asynccontextmanager
async def odd_role(server: Postgres, default: str) -> AsyncIterator[str]:
    """The URL for a role whose transactions have other defaults."""
    async with connected(server.url) as connection:
        await connection.execute("CREATE ROLE odd SUPERUSER LOGIN PASSWORD 'x'")
        await connection.execute(f"ALTER ROLE odd SET {ODD_DEFAULTS[default]}")
    try:
        yield server.url.replace("postgres@", "odd:x@")
    finally:
        async with connected(server.url) as connection:
            await connection.execute("DROP OWNED BY odd CASCADE; DROP ROLE odd")


async def write_from_all_sides(stores: Sequence[limpet.Store]) -> None:
    """Let stores write the same keys at once, in every way that the engine has. Nothing is lost, and nothing fails."""

    async def write(store: limpet.Store, name: str) -> None:
        for number in range(15):
            await asyncio.gather(store.put(f"own/{name}", number), store.put("shared", number), store.add("count", 1))
        await store.record("job").set({name: 1})
        await store.touch("shared", None)
        async with store.lock("door", ttl=60, wait=60) as lock:
            await store.put("fenced", name, fence=lock)
        assert await store.get(f"own/{name}") == 14
        assert f"own/{name}" in [key async for key in _keys(store)]

    await asyncio.gather(*(write(store, str(index)) for index, store in enumerate(stores)))
    assert await stores[0].get("count") == 15 * len(stores)
    assert len(await stores[0].record("job").fields() or {}) == len(stores)
    await stores[0].trim()


async def _keys(store: limpet.Store) -> AsyncIterator[str]:
    async for entry in store.scan():
        yield entry.key


@pytest.mark.parametrize("pooler", ["no", "yes"])
@pytest.mark.parametrize("default", ODD_DEFAULTS)
async def test_a_default_of_the_role_changes_nothing(guarded: Postgres, default: str, pooler: str) -> None:
    """The engine sets what it needs, whatever the defaults of the role are."""
    async with odd_role(guarded, default) as role, contextlib.AsyncExitStack() as stack:
        url = url_of(new_schema(), role, pooler=pooler)
        stores = [await stack.enter_async_context(limpet.open(url, sweep=False)) for _ in range(5)]

        await write_from_all_sides(stores)


@pytest.mark.parametrize("pooler", ["no", "yes"])
@pytest.mark.parametrize("default", ["repeatable read", "serializable"])
async def test_a_commit_that_waits_for_another_is_not_refused(guarded: Postgres, default: str, pooler: str) -> None:
    """Under such a default, the server refuses a statement that waited for a row that has changed since."""
    schema = new_schema()
    async with odd_role(guarded, default) as role, connected(guarded.url) as other, connected(guarded.url) as third:
        engine = await open_postgres(url_of(schema, role, pooler=pooler))
        try:
            await engine.commit("default", batch(put("key", 1)))
            await other.execute("BEGIN")
            await other.execute(f"UPDATE {schema}.limpet_namespaces SET revision = revision + 1")
            waiting = asyncio.ensure_future(engine.commit("default", batch(put("key", 2))))
            await blocked_by(third, other.get_server_pid())
            await other.execute("COMMIT")

            assert isinstance(await waiting, Commit)
        finally:
            await engine.close()


@pytest.mark.parametrize("default", ODD_DEFAULTS)
async def test_a_default_that_comes_later_changes_nothing(guarded: Postgres, default: str) -> None:
    """Behind a pooler, the next statement may run on a connection that was opened after the role was changed."""
    async with odd_role(guarded, default) as role, contextlib.AsyncExitStack() as stack:
        url = url_of(new_schema(), role, pooler="yes")
        async with connected(guarded.url) as connection:
            await connection.execute("ALTER ROLE odd RESET ALL")
            stores = [await stack.enter_async_context(limpet.open(url, sweep=False)) for _ in range(5)]
            await asyncio.gather(*(store.put("key", 1) for store in stores))
            await connection.execute(f"ALTER ROLE odd SET {ODD_DEFAULTS[default]}")
            await connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'odd'")

        await write_from_all_sides(stores)


@pytest.mark.parametrize("default", ODD_DEFAULTS)
async def test_a_default_of_a_pool_changes_nothing(guarded: Postgres, default: str) -> None:
    async with odd_role(guarded, default) as role:
        schema = new_schema()
        async with connected(guarded.url) as connection:
            await connection.execute(f"CREATE SCHEMA {schema}")
        async with asyncpg.create_pool(role, min_size=1, server_settings={"search_path": schema}) as pool:
            await state.state_set(pool, "key", {"n": 0})

            await asyncio.gather(*(state.state_set(pool, f"key/{number % 3}", number) for number in range(60)))

            assert await state.state_get(pool, "key") == {"n": 0}


# Replicas -------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_replica_is_refused_until_it_is_promoted(own_server: Postgres) -> None:
    """A store that was open meanwhile reads there, and writes again as soon as it can."""
    url = url_of("rooms", own_server.url)
    async with limpet.open(url, sweep=False) as store:
        await store.put("key", 1)
        store_id = (await store.status()).store_id
        async with connected(own_server.url) as connection:
            # A server that starts beside this file is a standby.
            folder = await connection.fetchval("SHOW data_directory")
            await connection.execute(f"COPY (SELECT '') TO '{folder}/standby.signal'")
        await asyncio.to_thread(own_server.restart)

        error = await refused(url)
        assert type(error) is Unavailable
        assert "replica" in str(error)
        assert await store.get("key") == 1
        with pytest.raises(Unavailable, match="read-only"):
            await store.put("key", 2)
        with pytest.raises(Unavailable, match="read-only"):
            await store.add("count")

        async with connected(own_server.url) as connection:
            assert await connection.fetchval("SELECT pg_promote()")
        assert (await store.put("key", 3)).version == 2
        async with limpet.open(url, sweep=False) as other:
            assert (await other.status()).store_id == store_id
            assert await other.get("key") == 3


async def test_a_new_epoch_refuses_the_positions_of_the_old_one(url: str, schema: str) -> None:
    """An operator does this after a failover that may have lost commits, which no program can notice."""
    async with limpet.open(url, sweep=False) as store, store.watch() as events:
        await store.put("key", 1)
        position = (await anext(events)).position
    async with connected() as connection:
        await connection.execute(f"UPDATE {schema}.limpet_store SET epoch = epoch + 1")
        await connection.execute(f"UPDATE {schema}.limpet_namespaces SET revision = revision + 1000000")

    async with limpet.open(url, sweep=False) as store:
        assert (await store.put("key", 2)).revision > 1_000_000
        with pytest.raises(limpet.errors.Compacted):
            async with store.watch(after=position):
                pass
        async with store.watch(initial=True) as again:
            assert (await anext(again)).value == 2


@pytest.mark.slow
async def test_postgresql_16_runs_the_main_verbs() -> None:
    with postgres(release="16") as older:
        async with connected(older.url) as connection:
            assert (await connection.fetchval("SHOW server_version")).startswith("16")
        async with limpet.open(url_of("older", older.url), sweep=False) as store, store.watch() as events:
            entry = await store.put("key", {"a": [1, 1.0, 1e22, "\0"]}, ttl=60, meta={"by": "me"})
            assert await store.entry("key") == entry
            with pytest.raises(limpet.errors.Conflict):
                await store.put("key", 2, expect=limpet.ABSENT)
            await store.put("key", 2, expect=entry)
            assert await store.add("count", 3, request_id="mine") == 3
            assert await store.add("count", 3, request_id="mine") == 3
            record = store.record("job")
            await record.put({"state": "pending", "blob": b"\xff"})
            assert await record.swap("state", "pending", "claimed")
            await store.batch().delete("key").put("other", None).commit()
            async with store.lock("door", ttl=60) as lock:
                await store.put("fenced", 1, fence=lock)
            assert await store.take("other", "gone") is None
            await store.put("brief", 1, ttl=0.001)
            while await store.sweep() == 0:
                pass
            assert [entry.key async for entry in store.scan()] == ["count", "fenced", "job"]
            assert [found.key async for found in store.scan(where=limpet.field("state") == "claimed")] == ["job"]
            assert [change.op async for change in store.history("key")] == ["put", "put", "delete"]
            keys = [(await anext(events)).key for _ in range(10)]
            assert keys == ["key", "key", "count", "job", "job", "key", "other", "fenced", "other", "brief"]
            assert await engine_of(store).due("default") == []


@pytest.mark.slow
async def test_a_caller_cancelled_while_opening_leaves_no_connection(schema: str) -> None:
    """The driver warns of a connection that is collected without being closed."""
    async with limpet.open(url_of(schema), sweep=False):
        pass
    warnings: list[Any] = []
    before, sys.unraisablehook = sys.unraisablehook, warnings.append
    try:
        for wait_ms in range(0, 60, 3):
            opening = asyncio.ensure_future(open_engine(url_of(schema), limpet.SystemClock()))
            await asyncio.sleep(wait_ms / 3000)
            opening.cancel()
            (engine,) = await asyncio.gather(opening, return_exceptions=True)
            if not isinstance(engine, BaseException):
                await engine.close()
            gc.collect()
    finally:
        sys.unraisablehook = before
    assert warnings == []
