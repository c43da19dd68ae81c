"""Errors of the driver: which of ours they become, and that none holds a value."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ssl
import traceback
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

import limpet
from limpet.engines.postgres.errors import translate_error
from limpet.errors import Corrupt, InvalidValue, LimpetError, PermissionDenied, Unavailable
from limpet.opening import open_engine
from tests.postgres.proxy import Fault, Proxy
from tests.postgres.support import batch, connected, put, url_of

SECRET = "S3CRET-planted"


async def settled(*calls: Any) -> list[Any]:
    return await asyncio.gather(*calls, return_exceptions=True)


def printed(error: BaseException) -> str:
    """An error as a logged traceback prints it, with its causes."""
    return "".join(traceback.format_exception(error)) + str(error) + repr(error)


# No value in a message ------------------------------------------------------------


RULES = {
    "a constraint": "ALTER TABLE limpet_entries ADD CONSTRAINT no_boom CHECK (key <> 'boom')",
    "a trigger's own message": (
        "CREATE FUNCTION say() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN IF NEW.key = 'boom' THEN RAISE EXCEPTION 'not %', convert_from(NEW.stored, 'UTF8')"
        " USING DETAIL = NEW.meta, HINT = NEW.meta, ERRCODE = {code}; END IF; RETURN NEW; END $$;"
        " CREATE TRIGGER say BEFORE INSERT OR UPDATE ON limpet_entries FOR EACH ROW EXECUTE FUNCTION say()"
    ),
}


@contextlib.asynccontextmanager
async def ruled(schema: str, rule: str) -> AsyncIterator[limpet.Store]:
    """A store whose database has its own rule against one key."""
    async with limpet.open(url_of(schema), sweep=False) as store:
        await store.put("before", 1)
        async with connected() as connection:
            await connection.execute(f"SET search_path = {schema}; {rule}")
        yield store


@pytest.mark.parametrize(
    "rule",
    [
        RULES["a constraint"],
        *(RULES["a trigger's own message"].format(code=f"'{code}'") for code in ("P0001", "23514", "42501", "53100")),
    ],
)
async def test_no_message_holds_a_value(schema: str, rule: str) -> None:
    meta = {"by": SECRET}
    async with ruled(schema, rule) as store:
        failed = await settled(
            store.put("boom", SECRET, meta=meta),
            store.put("boom", SECRET, meta=meta, ttl=60),
            store.record("boom").put({"field": SECRET}),
            store.create("boom", SECRET, request_id="mine"),
            store.batch().put("boom", SECRET).put("other", 1).commit(),
        )

    for error in failed:
        assert isinstance(error, LimpetError)
        assert SECRET not in printed(error)
        assert "SQLSTATE" in str(error)


async def test_a_rule_of_the_database_refuses_one_write_and_no_other(schema: str) -> None:
    async with ruled(schema, RULES["a constraint"]) as store:
        results = await settled(
            *(store.put(key, 1) for key in ("a", "boom", "c")), store.add("count"), store.add("boom")
        )

        assert [type(one).__name__ for one in results] == ["Entry", "InvalidValue", "Entry", "int", "InvalidValue"]
        assert "no_boom" in str(results[1])
        assert await store.get("a") == await store.get("c") == await store.get("count") == 1
        assert await store.get("boom") is None


async def test_a_message_of_the_server_that_names_things_is_shown(schema: str) -> None:
    async with limpet.open(url_of(schema), sweep=False) as store:
        async with connected() as connection:
            await connection.execute(f"ALTER TABLE {schema}.limpet_entries RENAME TO away")
        with pytest.raises(Unavailable, match=r'relation ".*limpet_entries" does not exist'):
            await store.get("key")


# What an error becomes --------------------------------------------------------------


async def test_a_table_that_is_away_is_unavailable_and_comes_back(schema: str) -> None:
    async with limpet.open(url_of(schema), sweep=False) as store:
        await store.put("key", 1)
        async with connected() as connection:
            for table in ("limpet_entries", "limpet_changes", "limpet_namespaces"):
                await connection.execute(f"ALTER TABLE {schema}.{table} RENAME TO away")
                calls = [store.put("key", 2), store.add("count"), store.sweep(), store.trim(), store.status()]
                failed = [one for one in await settled(*calls) if isinstance(one, Exception)]
                await connection.execute(f"ALTER TABLE {schema}.away RENAME TO {table}")

                assert {type(one) for one in failed} == {Unavailable}

        assert (await store.put("key", 3)).version == 2


async def test_a_right_that_is_away_is_permission_denied_and_comes_back(schema: str) -> None:
    async with connected() as connection:
        await connection.execute("DROP ROLE IF EXISTS clerk; CREATE ROLE clerk LOGIN SUPERUSER")
        url = url_of(schema).replace("postgres@", "clerk@")
        try:
            async with limpet.open(url, sweep=False) as store:
                await store.put("key", 1)
                await connection.execute("ALTER ROLE clerk NOSUPERUSER")
                await connection.execute(f"ALTER SCHEMA {schema} OWNER TO postgres")
                await connection.execute(f"ALTER TABLE {schema}.limpet_entries OWNER TO postgres")
                with pytest.raises(PermissionDenied):
                    await store.put("key", 2)
                await connection.execute("ALTER ROLE clerk SUPERUSER")
                assert (await store.put("key", 3)).version == 2
        finally:
            await connection.execute(f"DROP SCHEMA {schema} CASCADE; DROP OWNED BY clerk; DROP ROLE clerk")


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("08006", Unavailable),
        ("0A000", Unavailable),
        ("22003", Corrupt),
        ("22P05", InvalidValue),
        ("23514", InvalidValue),
        ("23505", Unavailable),
        ("25006", Unavailable),
        ("28P01", PermissionDenied),
        ("3D000", InvalidValue),
        ("3F000", Unavailable),
        ("40001", Unavailable),
        ("42501", PermissionDenied),
        ("42601", Unavailable),
        ("42703", Unavailable),
        ("42883", Unavailable),
        ("42P01", Unavailable),
        ("42P07", Corrupt),
        ("44000", InvalidValue),
        ("53100", Unavailable),
        ("53300", Unavailable),
        ("55P03", Unavailable),
        ("57014", Unavailable),
        ("57P03", Unavailable),
        ("58030", Unavailable),
        ("P0001", InvalidValue),
        ("XX000", Unavailable),
        ("XX001", Corrupt),
        ("XX002", Corrupt),
        ("ZZ999", Unavailable),
    ],
)
async def test_each_state_of_the_server_has_its_error(state: str, expected: type[LimpetError]) -> None:
    """The server itself raises each state, by a function."""
    async with connected() as connection:
        raising = f"DO $$ BEGIN RAISE EXCEPTION '{SECRET}' USING ERRCODE = '{state}'; END $$"
        with pytest.raises(asyncpg.PostgresError) as raised:
            await connection.execute(raising)

    error = translate_error(raised.value, "there")

    assert type(error) is expected
    assert SECRET not in printed(error) + printed(raised.value)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(), Unavailable),
        (ConnectionResetError(), Unavailable),
        (TimeoutError(), Unavailable),
        (ssl.SSLError(), Unavailable),
        (ssl.SSLCertVerificationError(), Unavailable),
        (asyncpg.InterfaceError("closed"), Unavailable),
        (asyncpg.InternalClientError("closed"), Unavailable),
        (asyncpg.exceptions.ClientConfigurationError("port"), InvalidValue),
        (UnicodeError(), InvalidValue),
    ],
)
def test_each_error_of_the_line_has_its_error(error: Exception, expected: type[LimpetError]) -> None:
    assert type(translate_error(error, "there")) is expected


# Opening over a connection that breaks ------------------------------------------------


@pytest.mark.parametrize("fault", ["cut", "lose"])
@pytest.mark.parametrize("is_new", [True, False])
async def test_opening_over_a_connection_that_breaks_raises_an_error_of_ours(
    schema: str, proxy: Proxy, fault: Fault, is_new: bool
) -> None:
    """It breaks once at each request of the opening."""
    if not is_new:
        async with limpet.open(url_of(schema), sweep=False):
            pass
    for nth in range(1, 30):
        proxy.fault(fault, nth=nth)
        try:
            engine = await open_engine(url_of(schema, proxy.url), limpet.SystemClock())
        except Unavailable:
            continue
        await engine.close()
        assert nth > 3
        break
    else:
        pytest.fail("it was never opened")


async def test_a_cancelled_call_leaves_no_error_behind(schema: str) -> None:
    """An error of a call that was cancelled is not logged by the loop."""
    logged: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
    engine = await open_engine(url_of(schema), limpet.SystemClock())
    for number in range(200):
        calls = [
            asyncio.ensure_future(one)
            for one in (
                engine.read("default", ("key",)),
                engine.commit("default", batch(put("key", number))),
                engine.changes("default", 0, wait_s=1),
                engine.status("default"),
            )
        ]
        await asyncio.sleep(number % 20 / 5000)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    await engine.close()
    gc.collect()
    await asyncio.sleep(0)

    assert logged == []
