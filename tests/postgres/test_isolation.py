"""One tenant's role can neither read, write nor list what is another's, whatever it tries.

Every attack runs as the attacker's own login and must be refused by the server, or give nothing.
It also runs as a superuser and must succeed there, so that none fails for being misspelt. What the
victim has is the same afterwards, and the output of the attack does not contain the secret.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import asyncpg
import pytest

import limpet
import limpet.sync
from limpet.commit import relative
from limpet.engines.postgres import sql
from limpet.errors import Compacted, InvalidNamespace, InvalidValue, PermissionDenied
from limpet.isolation import postgres as grants
from limpet.model import Batch, Put, Window
from limpet.opening import open_engine
from limpet.request_ids import new_request_id
from limpet.schema import ddl
from tests.cli.support import Limpet
from tests.postgres.isolation import (
    MINE,
    SECRET,
    THEIRS,
    AttackResult,
    Tenants,
    attempt,
    attempt_as_superuser,
    connected,
    execute,
    fingerprint,
    grant,
    granted,
    now,
    quoted,
    server,
    swept_away,
    tenants,
    unique,
    url_of,
)
from tests.servers import postgres, postgres_programs


@pytest.fixture(scope="module")
def separated() -> Iterator[Tenants]:
    """Two tenants with a schema each."""
    with tenants(share=False) as found:
        yield found


@pytest.fixture(scope="module")
def shared() -> Iterator[Tenants]:
    """Two tenants with a namespace each of one schema."""
    with tenants(share=True) as found:
        yield found


# The attacks ------------------------------------------------------------------
#
# In the statements, b is the victim's schema, and w a schema where the attacker may create anything.
# Of several statements the last is the attack; the others prepare it.

Statements = str | tuple[str, ...]

ROWS = {
    "limpet_schema": "VALUES ('planted')",
    "limpet_store": "VALUES ('x', 1)",
    "limpet_namespaces": "VALUES ('planted', 0, 0, 0, 0, 0, 0, 0, NULL)",
    "limpet_entries": "(namespace, family, key, kind, stored, size_bytes, version, revision, created_revision,"
    " created_ms, updated_ms) VALUES ('{theirs}', 'data', 'planted', 'json', '1', 1, 1, 1, 1, 1, 1)",
    "limpet_changes": "(namespace, revision, last_revision, at_ms, op, family, size_bytes, key, version,"
    " entry_revision, created_revision, created_ms, updated_ms)"
    " VALUES ('{theirs}', 999, 999, 1, 'put', 'data', 1, 'planted', 1, 1, 1, 1, 1)",
}
TABLES = tuple(ROWS)
NAMESPACED = TABLES[2:]
PUT = {
    "ns": "'{theirs}'",
    "channel": "'x'",
    "cause": "'x'",
    "weight": "6",
    "families": "ARRAY['data']",
    "keys": "ARRAY['diary']",
    "kinds": "ARRAY['json']",
    "vals": "ARRAY['1']",
    "approximations": "ARRAY[NULL]",
    "weights": "ARRAY['6']",
    "ttls": "ARRAY[NULL]",
    "metas": "ARRAY['']",
    "causes": "ARRAY['x']",
}
ONE = {**dict.fromkeys(("ns", "channel", "cause", "weight"), "'1'"), "ns": "'{theirs}'", "name": "'diary'"}
ONE |= {"sent": "'1'", "fam": "'data'", "sort": "'json'"}
APPLY = {
    **{name: value for name, value in PUT.items() if name not in ("cause", "weight", "ttls")},
    "name": "'x'",
    **dict.fromkeys(("unit_changes", "unit_logs", "units", "versions"), "ARRAY['1']"),
    **dict.fromkeys(("unit_keys", "unit_sizes"), "ARRAY['0']"),
    "ops": "ARRAY['put']",
    "sizes": "ARRAY['6']",
    **dict.fromkeys(
        ("revisions", "last_revisions", "entry_revisions", "created_revisions"), f"ARRAY['{relative.BASE + 1}']"
    ),
    **dict.fromkeys(("createds", "updateds"), f"ARRAY['{relative.NOW}']"),
    "expires": "ARRAY[NULL]",
}
# It expects what no entry is, so that it is returned.
READ = {
    "read_units": "ARRAY['1']",
    "read_families": "ARRAY['data']",
    "read_keys": "ARRAY['diary']",
    "read_revisions": "ARRAY['-2']",
    "read_expired": "ARRAY['false']",
    "read_values": "ARRAY['true']",
}


def call(function: str, arguments: dict[str, str], schema: str = "{b}") -> str:
    """A call of a function of the store, with named arguments. Those not given are NULL."""
    found = re.search(rf"CREATE FUNCTION {{schema}}\.{function}\((.*?)\)\s+RETURNS", ddl("postgres"), re.DOTALL)
    assert found is not None
    taken = dict(argument.split()[:2] for argument in found[1].split(","))
    assert set(arguments) <= set(taken)
    given = ", ".join(f"{name} => {arguments.get(name, 'NULL')}::{kind}" for name, kind in taken.items())
    return f"SELECT * FROM {schema}.{function}({given})"


WRITE = call("limpet_apply", APPLY)
NOISY = (
    "CREATE OR REPLACE FUNCTION {w}.noisy(x text) RETURNS boolean LANGUAGE plpgsql COST 0.0000001 AS"
    " $$ BEGIN RAISE NOTICE 'saw %', x; RETURN true; END $$"
)
TRAP = "CREATE OR REPLACE FUNCTION {w}.trap() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$"


def on_tables(tables: tuple[str, ...], condition: str = "") -> Iterator[tuple[str, Statements]]:
    """Each verb on each table."""
    for table in tables:
        place = f"{{b}}.{table}"
        column = {"limpet_schema": "version_num", "limpet_store": "id"}.get(table, "namespace")
        yield f"select {table}", f"SELECT * FROM {place} {condition}"
        yield f"insert {table}", f"INSERT INTO {place} {ROWS[table]} RETURNING 1"
        yield f"update {table}", f"UPDATE {place} SET {column} = {column} {condition} RETURNING 1"
        yield f"delete {table}", f"DELETE FROM {place} {condition} RETURNING 1"
        yield f"truncate {table}", f"TRUNCATE {place}"


# Refused wherever the victim is.
ANYWHERE: dict[str, Statements] = {
    # Acting as another role.
    "set role": "SET ROLE {victim}",
    "set role by a setting": "SELECT set_config('role', '{victim_plain}', false)",
    "set session authorization": "SET SESSION AUTHORIZATION {victim}",
    "become the superuser": "SET ROLE postgres",
    "become a member": "GRANT {victim} TO {attacker}",
    "become one who reads all": "GRANT pg_read_all_data TO {attacker}",
    "become one above policies": "ALTER ROLE {attacker} BYPASSRLS",
    "become one above all": "ALTER ROLE {attacker} SUPERUSER",
    "make a role above policies": "CREATE ROLE planted BYPASSRLS",
    "set the password of another": "ALTER ROLE {victim} PASSWORD 'x'",
    "bend the search path of another": "ALTER ROLE {victim} SET search_path = {w}",
    "take over what is another's": "REASSIGN OWNED BY {victim} TO {attacker}",
    "drop what is another's": "DROP OWNED BY {victim}",
    # The tables themselves.
    "alter a table": "ALTER TABLE {b}.limpet_entries ADD COLUMN planted text",
    "rename a table": "ALTER TABLE {b}.limpet_entries RENAME TO planted",
    "own a table": "ALTER TABLE {b}.limpet_entries OWNER TO {attacker}",
    "drop a table": "DROP TABLE {b}.limpet_changes",
    "drop the schema": "DROP SCHEMA {b} CASCADE",
    "rename the schema": "ALTER SCHEMA {b} RENAME TO planted",
    "own the schema": "ALTER SCHEMA {b} OWNER TO {attacker}",
    "make a table in the schema": "CREATE TABLE {b}.planted (x int)",
    "make a function in the schema": "CREATE FUNCTION {b}.planted() RETURNS int LANGUAGE sql RETURN 1",
    "replace a function": "CREATE OR REPLACE FUNCTION {b}.limpet_now_ms() RETURNS bigint LANGUAGE sql RETURN 1",
    "alter a function": "ALTER FUNCTION {b}.limpet_take SECURITY DEFINER",
    "drop a function": "DROP FUNCTION {b}.limpet_apply",
    "a trigger": (
        TRAP,
        "CREATE TRIGGER t BEFORE INSERT ON {b}.limpet_entries FOR EACH ROW EXECUTE FUNCTION {w}.trap()",
    ),
    "a rule": "CREATE RULE planted AS ON INSERT TO {b}.limpet_entries DO INSTEAD NOTHING",
    "an index": "CREATE INDEX ON {b}.limpet_entries (key)",
    "an index on what a function sees": (
        "CREATE OR REPLACE FUNCTION {w}.still(x text) RETURNS text IMMUTABLE LANGUAGE sql RETURN x",
        "CREATE INDEX ON {b}.limpet_entries ({w}.still(key))",
    ),
    "statistics": "CREATE STATISTICS {w}.planted ON namespace, key FROM {b}.limpet_entries",
    "a comment": "COMMENT ON TABLE {b}.limpet_entries IS 'planted'",
    "a foreign key": (
        'CREATE TABLE {w}.pointing (namespace text COLLATE "C", revision bigint,'
        " FOREIGN KEY (namespace, revision) REFERENCES {b}.limpet_changes)"
    ),
    "a child table": "CREATE TABLE {w}.child () INHERITS ({b}.limpet_entries)",
    "a publication": "CREATE PUBLICATION planted FOR TABLE {b}.limpet_entries",
    # Row-level security.
    "disable row security": "ALTER TABLE {b}.limpet_entries DISABLE ROW LEVEL SECURITY",
    "no longer force row security": "ALTER TABLE {b}.limpet_entries NO FORCE ROW LEVEL SECURITY",
    "switch row security off": ("SET row_security = off", "SELECT * FROM {b}.limpet_entries"),
    "switch triggers off": ("SET session_replication_role = replica", "SELECT 1"),
    "make a policy": "CREATE POLICY planted ON {b}.limpet_entries TO {attacker} USING (true)",
    "widen a policy": "ALTER POLICY {their_policy} ON {b}.limpet_entries TO PUBLIC",
    "turn a policy": "ALTER POLICY {their_policy} ON {b}.limpet_changes USING (false)",
    "drop a policy": "DROP POLICY {their_policy} ON {b}.limpet_entries",
    # The functions.
    "call limpet_take": "SELECT * FROM {b}.limpet_take('{theirs}')",
    "call limpet_apply": WRITE,
    "call limpet_put": call("limpet_put", PUT),
    "call limpet_put_one": call("limpet_put_one", ONE),
    "delete by limpet_apply": call("limpet_apply", {**APPLY, "ops": "ARRAY['delete']"}),
    "touch by limpet_apply": call("limpet_apply", {**APPLY, "ops": "ARRAY['touch']"}),
    "be shown what was expected otherwise": call("limpet_apply", {**APPLY, **READ}),
    "be shown a lock": call(
        "limpet_apply", {**APPLY, **READ, "read_families": "ARRAY['lock']", "read_keys": "ARRAY['nightly']"}
    ),
    "be shown what is there and write nothing": call(
        "limpet_apply", {**{name: APPLY[name] for name in ("ns", "channel", "name", "unit_changes")}, **READ}
    ),
    # Names that mean something else.
    "a temporary table in front": (
        "CREATE TEMP TABLE limpet_namespaces (namespace text, revision bigint, floor bigint, at_ms bigint,"
        " keys bigint, size_bytes bigint, log_changes bigint, log_bytes bigint)",
        "INSERT INTO pg_temp.limpet_namespaces VALUES ('{theirs}', 0, 0, 0, 0, 0, 0, 0)",
        "SET search_path = pg_temp, {b}",
        "SELECT * FROM {b}.limpet_take('{theirs}')",
    ),
    "a function in front": (
        "CREATE OR REPLACE FUNCTION {w}.limpet_take(text) RETURNS text LANGUAGE sql RETURN $1",
        "CREATE OR REPLACE FUNCTION {w}.limpet_now_ms() RETURNS bigint LANGUAGE sql RETURN 0",
        "SET search_path = {w}, {b}",
        WRITE,
    ),
    "a built-in function in front": (
        "CREATE OR REPLACE FUNCTION {w}.pg_notify(text, text) RETURNS void LANGUAGE sql AS 'SELECT'",
        "SET search_path = {w}, pg_catalog",
        WRITE,
    ),
    "a function in a searched schema": (
        "CREATE FUNCTION public.convert_from(bytea, text) RETURNS text LANGUAGE sql RETURN ''"
    ),
    "a table in a searched schema": "CREATE TABLE public.planted (x int)",
    "a new schema": "CREATE SCHEMA planted",
    "an operator in the catalog": "CREATE FUNCTION pg_catalog.planted() RETURNS int LANGUAGE sql RETURN 1",
    # The server around them.
    "a trigger on events": (
        "CREATE OR REPLACE FUNCTION {w}.event() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN END $$",
        "CREATE EVENT TRIGGER planted ON ddl_command_end EXECUTE FUNCTION {w}.event()",
    ),
    "a function of the server's own": (
        "CREATE FUNCTION {w}.inside() RETURNS int LANGUAGE internal AS 'pg_backend_pid'"
    ),
    "an extension": "CREATE EXTENSION vector",
    "a server elsewhere": "CREATE FOREIGN DATA WRAPPER planted",
    "a program": "COPY (SELECT 1) TO PROGRAM 'cat > /dev/null'",
    "a program that reads a table": "COPY {b}.limpet_changes TO PROGRAM 'cat > /dev/null'",
    "a file": "SELECT pg_read_file('PG_VERSION')",
    "a folder": "SELECT * FROM pg_ls_dir('base')",
    "the passwords": "SELECT * FROM pg_authid",
    "the statistics": "SELECT stavalues1::text FROM pg_statistic",
    "the statistics of a table": (
        "SELECT most_common_vals::text, histogram_bounds::text FROM pg_stats"
        " WHERE schemaname = '{b_plain}' AND tablename = 'limpet_entries'"
    ),
    "a large object from a file": "SELECT lo_import('/etc/hostname')",
    "a setting of the server": "SELECT set_config('log_statement', 'all', false)",
}

# Refused where the victim's schema is another one.
ANOTHER_SCHEMA: dict[str, Statements] = {
    **ANYWHERE,
    **dict(on_tables(TABLES)),
    "call limpet_now_ms": "SELECT {b}.limpet_now_ms()",
    "the view plugin_kv_storage": "SELECT * FROM {b}.plugin_kv_storage",
    "the view state": "SELECT * FROM {b}.state",
    "a view over it": "CREATE VIEW {w}.eyes AS SELECT * FROM {b}.limpet_entries",
    "a function over it": (
        "CREATE FUNCTION {w}.rights() RETURNS SETOF text LANGUAGE plpgsql SECURITY DEFINER AS"
        " $$ BEGIN RETURN QUERY SELECT key FROM {b}.limpet_entries; END $$",
        "SELECT * FROM {w}.rights()",
    ),
    "a table like it": "CREATE TABLE {w}.alike (LIKE {b}.limpet_entries)",
    "a copy of it": "CREATE TABLE {w}.loot AS TABLE {b}.limpet_entries",
    "a materialized view over it": "CREATE MATERIALIZED VIEW {w}.stale AS TABLE {b}.limpet_changes",
    "a cursor over it": "DECLARE loot CURSOR WITH HOLD FOR TABLE {b}.limpet_entries",
    "lock a table": "DO $$ BEGIN LOCK TABLE {b}.limpet_entries; END $$",
    "lock a table to read it": "DO $$ BEGIN LOCK TABLE {b}.limpet_namespaces IN ACCESS SHARE MODE; END $$",
    "explain a select": "EXPLAIN SELECT * FROM {b}.limpet_entries",
    "explain a delete": "EXPLAIN ANALYZE DELETE FROM {b}.limpet_entries",
    "one row by ctid": "SELECT * FROM {b}.limpet_entries WHERE ctid = '(0,1)'",
    "a sample": "SELECT * FROM {b}.limpet_entries TABLESAMPLE SYSTEM (100)",
    "rows by a noisy function": (NOISY, "SELECT * FROM {b}.limpet_entries WHERE {w}.noisy(key)"),
    "by the search path": ("SET search_path = {b}", "SELECT * FROM limpet_entries"),
    "a function by the search path": ("SET search_path = {b}", "SELECT limpet_take('{theirs}')"),
    "the type of a row": "SELECT NULL::{b}.limpet_entries IS NULL",
    "how large a table is": "SELECT pg_relation_size('{b}.limpet_entries')",
    "grant a table": "GRANT ALL ON {b}.limpet_entries TO {attacker}",
    "grant the schema": "GRANT ALL ON SCHEMA {b} TO {attacker}",
    "grant a function": "GRANT EXECUTE ON FUNCTION {b}.limpet_apply TO {attacker}",
    "revoke from another": "REVOKE ALL ON {b}.limpet_entries FROM {victim}",
    "learn the channel": "SELECT 'limpet_' || id FROM {b}.limpet_store",
}

THEIR_ROWS = "WHERE namespace = '{theirs}'"
OTHER_ROWS = "WHERE namespace <> '{mine}'"

# Refused where the victim's rows are in the same tables.
SAME_SCHEMA: dict[str, Statements] = {
    **ANYWHERE,
    **dict(on_tables(NAMESPACED, THEIR_ROWS)),
    **{f"other rows, {name}": statements for name, statements in on_tables(NAMESPACED, OTHER_ROWS)},
    "insert limpet_store": "INSERT INTO {b}.limpet_store VALUES ('x', 1) RETURNING 1",
    "update limpet_store": "UPDATE {b}.limpet_store SET epoch = 9 RETURNING 1",
    "delete limpet_store": "DELETE FROM {b}.limpet_store RETURNING 1",
    "truncate limpet_store": "TRUNCATE {b}.limpet_store",
    "update limpet_schema": "UPDATE {b}.limpet_schema SET version_num = '9' RETURNING 1",
    "delete limpet_schema": "DELETE FROM {b}.limpet_schema RETURNING 1",
    "the view plugin_kv_storage": "SELECT * FROM {b}.plugin_kv_storage WHERE plugin_name = '{theirs}'",
    "move a row to them": (
        "UPDATE {b}.limpet_entries SET namespace = '{theirs}', key = 'moved'"
        " WHERE namespace = '{mine}' AND key = 'diary' RETURNING 1"
    ),
    "move a counter": "UPDATE {b}.limpet_namespaces SET namespace = 'gamma' WHERE namespace = '{mine}' RETURNING 1",
    "overwrite on conflict": (
        "INSERT INTO {b}.limpet_entries (namespace, family, key, kind, stored, size_bytes, version, revision,"
        " created_revision, created_ms, updated_ms) VALUES ('{theirs}', 'data', 'diary', 'json', '1', 1, 1, 1, 1, 1, 1)"
        " ON CONFLICT (namespace, family, key) DO UPDATE SET value = '0' RETURNING 1"
    ),
    "learn by a conflict": (
        "INSERT INTO {b}.limpet_namespaces VALUES ('delta', 0, 0, 0, 0, 0, 0, 0) ON CONFLICT DO NOTHING RETURNING 1"
    ),
    "merge": (
        "MERGE INTO {b}.limpet_entries e USING (VALUES ('{theirs}')) AS v (n) ON e.namespace = v.n"
        " WHEN MATCHED THEN DELETE"
    ),
    "lock a row": "SELECT * FROM {b}.limpet_namespaces WHERE namespace = '{theirs}' FOR UPDATE",
    "rewind a counter": "UPDATE {b}.limpet_namespaces SET revision = 0 WHERE namespace <> '{mine}'",
    "raise a floor": "UPDATE {b}.limpet_namespaces SET floor = 9 WHERE namespace = '{theirs}'",
    "rows by ctid": "SELECT * FROM {b}.limpet_entries WHERE ctid >= '(0,0)' AND namespace <> '{mine}'",
    "delete by ctid": (
        "DELETE FROM {b}.limpet_entries WHERE namespace <> '{mine}' AND ctid = ANY (ARRAY(SELECT"
        " format('(%s,%s)', page, item)::tid FROM generate_series(0, 3) page, generate_series(1, 60) item))"
    ),
    "a sample": "SELECT * FROM {b}.limpet_entries TABLESAMPLE SYSTEM (100) WHERE namespace = '{theirs}'",
    "a view with its owner's eyes": (
        "CREATE VIEW {w}.eyes AS SELECT * FROM {b}.limpet_entries",
        "SELECT * FROM {w}.eyes WHERE namespace = '{theirs}'",
    ),
    "a function with its owner's rights": (
        "CREATE FUNCTION {w}.rights() RETURNS SETOF text LANGUAGE sql SECURITY DEFINER AS"
        " $$ SELECT key FROM {b}.limpet_entries WHERE namespace = '{theirs}' $$",
        "SELECT * FROM {w}.rights()",
    ),
    "a cursor": (
        "DECLARE loot CURSOR WITH HOLD FOR SELECT * FROM {b}.limpet_entries WHERE namespace = '{theirs}'",
        "FETCH ALL FROM loot",
    ),
}

# Allowed, and must not reveal what they reveal to a superuser: in rows, in messages or in errors.
REVEALING: dict[str, Statements] = {
    **{f"all of {table}": f"SELECT json_agg(t) FROM {{b}}.{table} t" for table in NAMESPACED if table != NAMESPACED[0]},
    "all of the view plugin_kv_storage": "SELECT json_agg(t) FROM {b}.plugin_kv_storage t",
    "all of the view state": "SELECT json_agg(t) FROM {b}.state t",
    "greatest and least": "SELECT min(key), max(key) FROM {b}.limpet_entries WHERE family = 'lock'",
    "what a noisy function is shown": (NOISY, "SELECT {w}.noisy(t::text) FROM {b}.limpet_entries t"),
    "a noisy filter": (NOISY, "SELECT 1 FROM {b}.limpet_entries WHERE {w}.noisy(key)"),
    "a noisy filter of the log": (NOISY, "SELECT 1 FROM {b}.limpet_changes WHERE {w}.noisy(cause)"),
    "a noisy filter of the view": (NOISY, "SELECT 1 FROM {b}.plugin_kv_storage WHERE {w}.noisy(key)"),
    "a noisy join": (
        NOISY,
        "SELECT 1 FROM {b}.limpet_entries e JOIN {b}.limpet_changes c ON {w}.noisy(e.key || c.key)",
    ),
    "a noisy order": (NOISY, "SELECT 1 FROM {b}.limpet_entries ORDER BY {w}.noisy(key)"),
    "a noisy update": (NOISY, "UPDATE {b}.limpet_entries SET version = version WHERE {w}.noisy(key)"),
    "a noisy operator": (
        "CREATE FUNCTION {w}.noisy_too(x text, y text) RETURNS boolean LANGUAGE plpgsql COST 0.0000001 AS"
        " $$ BEGIN RAISE NOTICE 'saw %', x; RETURN true; END $$",
        "CREATE OPERATOR {w}.=== (FUNCTION = {w}.noisy_too, LEFTARG = text, RIGHTARG = text)",
        "SELECT 1 FROM {b}.limpet_entries WHERE key OPERATOR({w}.===) 'x'",
    ),
    "an error": "SELECT 1 FROM {b}.limpet_entries WHERE namespace <> '{mine}' AND key ~ 'about' AND key::int = 1",
    "an error in the log": (
        "SELECT 1 FROM {b}.limpet_changes"
        " WHERE namespace <> '{mine}' AND key = 'diary' AND convert_from(value, 'UTF8')::int = 1"
    ),
    "a copy": ("CREATE TABLE {w}.loot AS TABLE {b}.limpet_entries", "SELECT json_agg(t) FROM {w}.loot t"),
    "a materialized view": (
        "CREATE MATERIALIZED VIEW {w}.stale AS TABLE {b}.limpet_changes",
        "SELECT json_agg(t) FROM {w}.stale t",
    ),
}

# Allowed with a warning of the server, and without effect.
WITHOUT_EFFECT: dict[str, Statements] = {
    "grant a table": "GRANT ALL ON {b}.limpet_entries TO {attacker}",
    "grant the schema": "GRANT ALL ON SCHEMA {b} TO {attacker}",
    "grant a function": "GRANT EXECUTE ON FUNCTION {b}.limpet_apply TO PUBLIC",
    "revoke from another": "REVOKE ALL ON {b}.limpet_entries FROM {victim}",
    "explain a delete": "EXPLAIN ANALYZE DELETE FROM {b}.limpet_entries WHERE namespace = '{theirs}'",
    "explain what is there": "EXPLAIN (ANALYZE, VERBOSE) SELECT * FROM {b}.limpet_entries WHERE key > 'about/'",
    "notify their channel": "SELECT pg_notify('limpet_' || id, '{theirs}') FROM {b}.limpet_store",
}


def statements_of(tenants: Tenants, statements: Statements) -> list[str]:
    """The statements of an attack on these tenants."""
    words = tenants.words
    return [one.format_map(words) for one in ((statements,) if isinstance(statements, str) else statements)]


async def attack(tenants: Tenants, statements: Statements) -> AttackResult:
    """Attack, and check that the victim is as before and its secret is not in the output."""
    before = await fingerprint(tenants)
    async with connected(tenants.attackers_url) as connection:
        outcome = await attempt(connection, statements_of(tenants, statements))
    assert await fingerprint(tenants) == before
    assert SECRET not in outcome.output
    return outcome


@pytest.mark.parametrize("name", ANOTHER_SCHEMA)
async def test_a_role_reaches_nothing_in_the_schema_of_another(separated: Tenants, name: str) -> None:
    could = await attempt_as_superuser(statements_of(separated, ANOTHER_SCHEMA[name]))

    outcome = await attack(separated, ANOTHER_SCHEMA[name])

    assert could.is_done, could
    assert outcome.is_refused, outcome


@pytest.mark.parametrize("name", SAME_SCHEMA)
async def test_a_role_reaches_no_row_of_another_in_a_schema_they_share(shared: Tenants, name: str) -> None:
    could = await attempt_as_superuser(statements_of(shared, SAME_SCHEMA[name]))

    outcome = await attack(shared, SAME_SCHEMA[name])

    assert could.is_done, could
    assert outcome.is_refused, outcome


@pytest.mark.parametrize("name", REVEALING)
async def test_a_role_learns_nothing_of_the_rows_of_another(shared: Tenants, name: str) -> None:
    could = await attempt_as_superuser(statements_of(shared, REVEALING[name]))

    await attack(shared, REVEALING[name])

    assert SECRET in could.output


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
async def test_what_the_server_lets_through_is_without_effect(shared: Tenants, name: str) -> None:
    outcome = await attack(shared, WITHOUT_EFFECT[name])

    assert outcome.state is None


def test_there_are_enough_attacks() -> None:
    """A list that lost half of its rows would pass all the same."""
    assert len(ANOTHER_SCHEMA) >= 100
    assert len(SAME_SCHEMA) + len(REVEALING) + len(WITHOUT_EFFECT) >= 120


CRAFTED = [
    "{theirs}",
    "{theirs}' --",
    "x'; DELETE FROM {b}.limpet_entries; --",
    "x'); TRUNCATE {b}.limpet_entries; --",
    "x $$; RESET ROLE; $$",
    '"; SET ROLE {victim_plain}; "',
    "../{theirs}",
    "{b}.limpet_entries",
    "{theirs}\\",
    "%",
    "*",
    "",
]


@pytest.mark.parametrize("argument", CRAFTED)
async def test_a_crafted_argument_of_ones_own_functions_reaches_no_other_tenant(
    separated: Tenants, argument: str
) -> None:
    """They accept any argument, which only names something in the caller's own schema."""
    own, crafted = quoted(separated.attackers_schema), argument.format_map(separated.words)
    written = {**APPLY, "ns": "$1", "keys": "ARRAY[$2]"}
    shown = {**written, **READ, "read_keys": "ARRAY[$2]"}
    puts = {**PUT, "ns": "$1", "keys": "ARRAY[$2]"}
    one = {**ONE, "ns": "$1", "name": "$2"}
    before = await fingerprint(separated)

    async with connected(separated.attackers_url) as connection:
        outputs = [
            await connection.fetch(f"SELECT * FROM {own}.limpet_take($1)", crafted),
            await connection.fetch(call("limpet_apply", written, own), crafted, crafted or "k"),
            await connection.fetch(call("limpet_apply", shown, own), crafted, crafted or "k"),
            await connection.fetch(call("limpet_put", puts, own), crafted, crafted or "k"),
            await connection.fetch(call("limpet_put_one", one, own), crafted, crafted or "k"),
        ]

    assert SECRET not in repr(outputs)
    assert await fingerprint(separated) == before


async def test_the_rows_of_another_cannot_be_copied_out_or_in(separated: Tenants, shared: Tenants) -> None:
    async def copied(tenants: Tenants, query: str) -> bytes:
        parts: list[bytes] = []

        async def keep(part: bytes) -> None:
            parts.append(part)

        async with connected(tenants.attackers_url) as connection:
            await connection.copy_from_query(query.format_map(tenants.words), output=keep)
        return b"".join(parts)

    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await copied(separated, "SELECT * FROM {b}.limpet_entries")
    own = await copied(shared, "SELECT * FROM {b}.limpet_entries")
    assert b"diary" in own
    assert SECRET.encode() not in own
    async with connected(shared.attackers_url) as connection:
        # The server refuses COPY into a table with policies.
        with pytest.raises(asyncpg.FeatureNotSupportedError):
            await connection.copy_records_to_table(
                "limpet_namespaces", schema_name=shared.victims_schema, records=[("planted", *[0] * 7, None, None)]
            )


# Through the store ------------------------------------------------------------

VERBS: dict[str, Callable[[limpet.Store], Awaitable[Any]]] = {
    "put": lambda store: store.put("diary", 1),
    "create": lambda store: store.create("planted", 1),
    "put as expected": lambda store: store.put("diary", 1, expect=limpet.Version(1)),
    "put if absent": lambda store: store.put("diary", 1, expect=limpet.ABSENT),
    "put under a request id": lambda store: store.put("diary", 1, request_id=f"request of {SECRET}"),
    "add": lambda store: store.add("count", 1),
    "update": lambda store: store.update("diary", lambda _: 1),
    "delete": lambda store: store.delete("diary"),
    "take": lambda store: store.take("diary"),
    "touch": lambda store: store.touch("diary", ttl=1),
    "record": lambda store: store.record("job").set({"state": "stolen"}),
    "swap": lambda store: store.record("job").swap("state", SECRET, "stolen"),
    "batch": lambda store: store.batch().put("a", 1).delete("diary").commit(),
    "lock": lambda store: store.lock(f"lock of {SECRET}", ttl=9).acquire(),
}


@pytest.mark.parametrize("name", VERBS)
async def test_every_verb_that_writes_is_refused_in_the_namespace_of_another(shared: Tenants, name: str) -> None:
    before = await fingerprint(shared)

    async with limpet.open(url_of(shared.attacker, shared.victims_schema), namespace=THEIRS, sweep=False) as store:
        with pytest.raises(PermissionDenied) as refused:
            await VERBS[name](store)

    assert SECRET not in str(refused.value)
    assert await fingerprint(shared) == before


async def test_every_verb_that_reads_finds_nothing_in_the_namespace_of_another(shared: Tenants) -> None:
    async with limpet.open(url_of(shared.attacker, shared.victims_schema), namespace=THEIRS, sweep=False) as store:
        assert await store.get("diary") is None
        assert await store.record("job").entry() is None
        assert (await store.keys()).keys == []
        assert [entry async for entry in store.scan("")] == []
        assert [entry async for entry in store.scan("", where=limpet.field("text") == SECRET)] == []
        assert [event async for event in store.history("diary")] == []
        assert await store.locks() == []
        assert await store.outcome(f"request of {SECRET}") is None
        status = await store.status()
        assert (status.revision, status.keys, status.log_changes) == (0, 0, 0)
        with pytest.raises(Compacted):
            await anext(aiter(store.watch("*", after=1)))


async def test_the_schema_of_another_cannot_even_be_opened(separated: Tenants) -> None:
    before = await fingerprint(separated)

    with pytest.raises(PermissionDenied):
        await limpet.open(url_of(separated.attacker, separated.victims_schema))

    assert await fingerprint(separated) == before


async def test_the_keys_of_another_count_for_nothing_in_ones_own_guards(shared: Tenants) -> None:
    """Both have the same key, and a guard reads the one of its own namespace."""
    async with limpet.open(url_of(shared.attacker, shared.victims_schema), namespace=MINE, sweep=False) as store:
        assert await store.get("planted") is None
        entry = await store.put("planted", 1, expect=limpet.ABSENT)
        await store.delete("planted", expect=entry)
        own = await store.get("diary")

    assert own == {"text": "nothing worth hiding"}


# What else there is to see ----------------------------------------------------


async def test_the_channel_of_a_store_is_hidden_from_other_roles(separated: Tenants) -> None:
    """Its name contains the store's id, and the last statement of a connection is shown only to its own role."""
    async with connected() as superuser, connected(url_of(separated.victim)) as listening:
        store_id = await superuser.fetchval(f"SELECT id FROM {quoted(separated.victims_schema)}.limpet_store")
        await listening.execute(f'LISTEN "limpet_{store_id}"')
        activity = "SELECT query FROM pg_stat_activity WHERE pid = $1"
        pid = listening.get_server_pid()
        async with connected(separated.attackers_url) as connection:
            shown = await connection.fetchval(activity, pid)
            channels = await connection.fetch("SELECT pg_listening_channels()")
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await connection.fetch(f"SELECT id FROM {quoted(separated.victims_schema)}.limpet_store")
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await connection.fetch("SELECT pg_cancel_backend($1)", pid)
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await connection.fetch("SELECT pg_terminate_backend($1)", pid)

        assert store_id in await superuser.fetchval(activity, pid)
    assert shown == "<insufficient privilege>"
    assert channels == []


async def test_a_doorbell_in_a_shared_schema_tells_a_namespace_and_nothing_more(shared: Tenants) -> None:
    """Tenants of one schema share its channel, and a notification gives no access to the rows."""
    received: asyncio.Queue[str] = asyncio.Queue()
    async with connected(shared.attackers_url) as connection:
        store_id = await connection.fetchval(f"SELECT id FROM {quoted(shared.victims_schema)}.limpet_store")
        await connection.execute(sql.WILL_LISTEN, f"limpet_{store_id}")
        await connection.add_listener(f"limpet_{store_id}", lambda *notification: received.put_nowait(notification[3]))
        url = url_of(shared.victim, shared.victims_schema)
        async with limpet.open(url, namespace=THEIRS, sweep=False) as store:
            await store.put(f"about/{SECRET}", SECRET)
        notified = await asyncio.wait_for(received.get(), 30)

    assert notified == THEIRS


async def test_the_catalogs_show_names_and_no_more(separated: Tenants) -> None:
    """Every role that may connect can list schemas, tables and policies, so no name may contain a secret."""
    async with connected(separated.attackers_url) as connection:
        names = await connection.fetch(
            "SELECT relname FROM pg_class WHERE relnamespace = $1::regnamespace", quoted(separated.victims_schema)
        )
        tables = "SELECT * FROM information_schema.tables WHERE table_schema = $1"
        listed = await connection.fetch(tables, separated.victims_schema)

    assert "limpet_entries" in {row[0] for row in names}
    assert listed == []


# What a granted role can do ---------------------------------------------------


@pytest.fixture
def schema() -> Iterator[str]:
    """The name of a schema for this test alone, not created yet."""
    name = unique("granted")
    with swept_away([name], []):
        yield name


@pytest.fixture
def role() -> Iterator[str]:
    """The name of a role for this test alone, not created yet."""
    name = unique("role")
    yield name
    with swept_away([], [name]):
        pass


async def everything(url: str, namespace: str) -> None:
    """Use the whole of a store: every kind of commit, reading, watching, sweeping and trimming."""
    async with limpet.open(url, namespace=namespace, sweep=False) as store, store.watch("*") as events:
        entry = await store.put("a", {"n": 1}, ttl=60)
        assert (await anext(events)).key == "a"
        await store.put("a", {"n": 2}, expect=entry)
        assert await store.touch("a", ttl=90) is not None
        assert await store.add("count", 2) == 2
        await store.update("count", lambda number: number + 1)
        await store.record("job").put({"state": "open"})
        assert await store.record("job").swap("state", "open", "done")
        await store.batch().expect("a", limpet.PRESENT).put("b", b"raw").commit()
        await store.batch().put("b", b"raw").put("c", 1).commit()
        await store.put("once", 1, request_id="once")
        assert (await store.put("once", 1, request_id="once")).version == 1
        assert await store.outcome("once") is not None
        async with store.lock("nightly", ttl=30) as lock:
            await store.put("report", 1, fence=lock)
        assert await store.take("c") == 1
        assert await store.delete("b")
        assert [entry.key async for entry in store.scan("", where=limpet.field("state") == "done")] == ["job"]
        assert (await store.keys()).keys == ["a", "count", "job", "once", "report"]
        assert len([event async for event in store.history("a")]) == 3
        await store.put("soon", 1, ttl=0.001)
    engine = await open_engine(url, limpet.SystemClock())
    try:
        # Sent again, as the session does after a connection broke and the result is unknown.
        again = Batch((), (Put("again", b"1"),), request_id=new_request_id(), retry_since=0)
        await engine.commit(namespace, again)
        while not (due := await engine.due(namespace)):
            await engine.status(namespace)
        assert [write.key for write in due] == ["soon"]
        await engine.commit(namespace, Batch((), tuple(due)))
        assert await engine.trim(namespace, Window(changes=1, age_ms_min=0)) > 0
    finally:
        await engine.close()


@pytest.mark.parametrize("namespaces", [(), ("alpha",), ("alpha", "beta")], ids=["schema", "one", "two"])
def test_a_granted_role_can_do_everything(schema: str, role: str, namespaces: tuple[str, ...]) -> None:
    granted(schema, role, "--login", *(word for name in namespaces for word in ("-n", name)))

    for namespace in namespaces or ("alpha", "beta"):
        now(everything(url_of(role, schema), namespace))


RIGHTS = [
    *(
        (f"{right} ON {{schema}}.{table}")
        for table, rights in grants._TABLE_RIGHTS.items()
        for right in rights.split(", ")
    ),
    *(f"EXECUTE ON FUNCTION {{schema}}.{name}" for name in grants._WRITE_FUNCTIONS),
    "USAGE ON SCHEMA {schema}",
]


@pytest.mark.parametrize("right", RIGHTS)
def test_a_role_is_granted_nothing_that_it_does_not_need(schema: str, role: str, right: str) -> None:
    granted(schema, role, "--login")

    execute(f"REVOKE {right} FROM {{role}}".format(schema=quoted(schema), role=quoted(role)))

    with pytest.raises(PermissionDenied):
        now(everything(url_of(role, schema), "alpha"))


def test_a_role_that_may_only_read_reads_and_watches(schema: str, role: str) -> None:
    granted(schema, role, "--login", "--read-only")

    async def watched() -> None:
        async with (
            limpet.open(url_of(schema=schema), namespace="state") as writer,
            limpet.open(url_of(role, schema), namespace="state", sweep=False) as reader,
            reader.watch("*") as events,
        ):
            await writer.put("k", {"n": 1})
            assert (await anext(events)).value == {"n": 1}
            assert await reader.get("k") == {"n": 1}
            assert (await reader.status()).keys == 1
            for name, verb in VERBS.items():
                with pytest.raises(PermissionDenied):
                    await verb(reader)
                assert name
        async with connected(url_of(role)) as connection:
            assert await connection.fetchval(f"SELECT value FROM {quoted(schema)}.state") == '{"n": 1}'
            for table in ("limpet_entries", "limpet_changes", "limpet_namespaces"):
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await connection.execute(f"DELETE FROM {quoted(schema)}.{table}")

    now(watched())


def test_a_role_that_may_only_read_one_namespace_reads_no_other(schema: str, role: str) -> None:
    granted(schema, role, "--login", "--read-only", "-n", "state")
    for namespace in ("state", "other"):
        with limpet.sync.open(url_of(schema=schema), namespace=namespace) as writer:
            writer.put("k", namespace)

    async def seen() -> list[str]:
        async with connected(url_of(role)) as connection:
            return [
                row[0] for row in await connection.fetch(f"SELECT plugin_name FROM {quoted(schema)}.plugin_kv_storage")
            ]

    assert now(seen()) == ["state"]


def test_roles_of_the_whole_schema_and_the_owner_are_not_held_by_the_policies_of_others(schema: str, role: str) -> None:
    """They were granted first, and later policies must not hide their rows from them."""
    other = unique("role")
    with swept_away([schema], [other]):
        granted(schema, role, "--login")
        granted(schema, other, "--login", "-n", "alpha")

        now(everything(url_of(role, schema), "beta"))
        now(everything(url_of(schema=schema), "gamma"))
        now(everything(url_of(other, schema), "alpha"))


def test_an_owner_who_is_no_superuser_keeps_working_behind_forced_policies(schema: str, role: str) -> None:
    owner = unique("owner")
    execute(f"CREATE ROLE {owner} LOGIN", f"CREATE SCHEMA {schema} AUTHORIZATION {owner}")
    with swept_away([schema], [owner]):
        limpet.sync.open(url_of(owner, schema)).close()
        granted(schema, role, "--login", "-n", "alpha")

        now(everything(url_of(owner, schema), "alpha"))

        async def forced() -> list[Any]:
            async with connected() as connection:
                found: list[Any] = await connection.fetch(
                    "SELECT relname, relrowsecurity AND relforcerowsecurity FROM pg_class c"
                    " WHERE relnamespace = $1::regnamespace AND relkind = 'r' AND EXISTS (SELECT FROM pg_attribute"
                    " WHERE attrelid = c.oid AND attname = 'namespace')",
                    schema,
                )
                return found

        forced_tables = {name: is_forced for name, is_forced in now(forced())}
        assert forced_tables == dict.fromkeys(grants._NAMESPACED_TABLES, True)


def test_nothing_in_a_schema_of_ours_was_forgotten(schema: str) -> None:
    """A table, view or function that a migration adds needs a line in the grants."""
    limpet.sync.open(url_of(schema=schema)).close()

    async def made() -> tuple[set[str], set[str], set[str]]:
        async with connected() as connection:
            relations = await connection.fetch(
                "SELECT relname, relkind = 'v' FROM pg_class WHERE relnamespace = $1::regnamespace AND relkind <> 'i'",
                schema,
            )
            functions = await connection.fetch(
                "SELECT proname FROM pg_proc WHERE pronamespace = $1::regnamespace", schema
            )
            views = await connection.fetch(
                "SELECT relname FROM pg_class c JOIN pg_trigger t ON t.tgrelid = c.oid AND tgname = 'limpet_refuse'"
                " WHERE relnamespace = $1::regnamespace",
                schema,
            )
            tables = {name for name, is_view in relations if not is_view}
            assert {name for name, is_view in relations if is_view} == {row[0] for row in views}
            return tables, {row[0] for row in views}, {row[0] for row in functions}

    tables, views, functions = now(made())
    assert tables == set(grants._TABLE_RIGHTS)
    assert views == {"plugin_kv_storage", "state"}
    assert functions == set(grants._FUNCTIONS)


# Granting again, less, and not at all -----------------------------------------


def rights_of(role: str, schema: str) -> Any:
    """The rights of a role in a schema, from the catalogs."""

    async def found() -> Any:
        async with connected() as connection:
            return await connection.fetch(
                "SELECT relname::text, acl.privilege_type FROM pg_class, aclexplode(relacl) acl"
                " WHERE relnamespace = $1::regnamespace AND acl.grantee = $2::regrole"
                " UNION ALL SELECT proname, acl.privilege_type FROM pg_proc, aclexplode(proacl) acl"
                " WHERE pronamespace = $1::regnamespace AND acl.grantee = $2::regrole"
                " UNION ALL SELECT nspname, acl.privilege_type FROM pg_namespace, aclexplode(nspacl) acl"
                " WHERE oid = $1::regnamespace AND acl.grantee = $2::regrole"
                " UNION ALL SELECT tablename, policyname || qual || with_check FROM pg_policies"
                " WHERE schemaname = $3 AND roles = ARRAY[$4::name] ORDER BY 1, 2",
                quoted(schema),
                quoted(role),
                schema,
                role,
            )

    return now(found())


@pytest.mark.parametrize("words", [(), ("-n", "alpha"), ("--read-only",)], ids=["schema", "namespace", "read-only"])
def test_granting_again_changes_nothing(schema: str, role: str, words: tuple[str, ...]) -> None:
    granted(schema, role, *words)
    before = rights_of(role, schema)

    granted(schema, role, *words)

    assert before
    assert rights_of(role, schema) == before


@pytest.mark.parametrize("wider", [(), ("-n", "beta"), ("--read-only",), ("-n", "alpha", "-n", "beta")], ids=str)
def test_the_last_grant_is_the_one_that_counts(schema: str, role: str, wider: tuple[str, ...]) -> None:
    """A narrower grant must not leave the wider one in force."""
    granted(schema, role, "-n", "alpha", "--read-only")
    expected = rights_of(role, schema)

    granted(schema, role, *wider)
    granted(schema, role, "-n", "alpha", "--read-only")

    assert rights_of(role, schema) == expected


def test_a_role_that_was_renamed_does_not_keep_its_old_policy(schema: str, role: str) -> None:
    granted(schema, role)
    name = unique("renamed")
    execute(f"ALTER ROLE {role} RENAME TO {name}")
    with swept_away([schema], [name]):
        granted(schema, name, "-n", "alpha")

        assert {row[1] for row in rights_of(name, schema) if "limpet_role" in row[1]} == {
            f"limpet_role_{name}(namespace = 'alpha'::text)(namespace = 'alpha'::text)"
        }


def test_revoking_takes_everything_back_so_that_the_role_can_go(schema: str, role: str) -> None:
    other = unique("role")
    with swept_away([schema], [other]):
        granted(schema, other, "--login")
        granted(schema, role, "--login", "-n", "alpha")
        granted(schema, role, "--revoke")
        granted(schema, role, "--revoke")

        assert rights_of(role, schema) == []
        with pytest.raises(PermissionDenied):
            limpet.sync.open(url_of(role, schema))
        execute(f"DROP ROLE {role}")
        now(everything(url_of(other, schema), "alpha"))


@pytest.mark.parametrize(
    "standing",
    ["ALTER ROLE {role} SUPERUSER", "ALTER ROLE {role} BYPASSRLS", "ALTER ROLE {role} CREATEROLE"]
    + [f"GRANT {above} TO {{role}}" for above in ("pg_read_all_data", "pg_execute_server_program", "postgres")],
)
def test_a_role_that_no_grant_can_hold_is_refused(schema: str, role: str, standing: str) -> None:
    execute(f"CREATE ROLE {role}", standing.format(role=role))

    done = grant(schema, role, "-n", "alpha", "--apply")

    assert done.exit_code == 7
    assert f"role {role} is, or is a member of, the owner of the tables" in done.stderr
    assert "no grant can restrict it" in done.stderr
    assert rights_of(role, schema) == []


def test_a_role_without_login_cannot_connect_and_is_let_in_later(schema: str, role: str) -> None:
    granted(schema, role)
    with pytest.raises(PermissionDenied):
        limpet.sync.open(url_of(role, schema))

    granted(schema, role, "--login")
    limpet.sync.open(url_of(role, schema)).close()
    # A grant without --login leaves the right to log in as it is.
    granted(schema, role)
    limpet.sync.open(url_of(role, schema)).close()


def test_a_member_of_a_granted_role_is_isolated_like_the_role(schema: str, role: str) -> None:
    member = unique("member")
    granted(schema, role, "-n", "alpha")
    execute(f"CREATE ROLE {member} LOGIN IN ROLE {role}")
    with swept_away([schema], [member]):
        now(everything(url_of(member, schema), "alpha"))
        with limpet.sync.open(url_of(member, schema), namespace="beta") as store, pytest.raises(PermissionDenied):
            store.put("k", 1)


@pytest.mark.slow
def test_a_grant_gives_up_on_tables_that_stay_locked(schema: str, role: str) -> None:
    """While it waits for its lock, every new writer waits behind it."""
    granted(schema, role)

    async def held() -> Any:
        async with connected() as connection, connection.transaction():
            await connection.execute(f"LOCK TABLE {quoted(schema)}.limpet_entries IN ROW EXCLUSIVE MODE")
            return await asyncio.to_thread(grant, schema, role, "-n", "alpha", "--apply")

    done = now(held())
    assert done.exit_code == 6
    assert "the tables were locked for five seconds and nothing was granted" in done.stderr


def test_everybodys_right_to_leave_things_in_public_is_taken_away(role: str) -> None:
    """Up to PostgreSQL 14, every role could create there by default. The store may be in that schema."""
    database = unique("database")
    base = server().rpartition("/")[0] + f"/{database}"
    execute(f"CREATE DATABASE {database}")
    try:
        execute("GRANT CREATE ON SCHEMA public TO PUBLIC", url=base)
        plant = "CREATE FUNCTION public.convert_from(bytea, text) RETURNS text LANGUAGE sql RETURN ''"
        granted("public", role, "--login", base=base)

        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            execute(plant, url=url_of(role, base=base))
        now(everything(url_of(role, "public", base=base), "alpha"))
    finally:
        execute(f"DROP DATABASE {database} WITH (FORCE)")


@pytest.mark.slow
def test_isolation_holds_on_an_older_server_too(role: str) -> None:
    with postgres(release="16") as older:
        for name in ("alpha", "state"):
            granted("shared", f"{role}_{name}", "--login", "-n", name, base=older.url)
        now(everything(url_of(f"{role}_state", "shared", base=older.url), "state"))
        attacker = url_of(f"{role}_alpha", "shared", base=older.url)
        with limpet.sync.open(attacker, namespace="state") as store:
            assert store.keys().keys == []
            with pytest.raises(PermissionDenied):
                store.put("k", 1)

        async def seen() -> Any:
            async with connected(attacker.partition("?")[0]) as connection:
                return await connection.fetch("SELECT * FROM shared.state UNION ALL SELECT * FROM shared.state")

        assert now(seen()) == []


# Names ------------------------------------------------------------------------

NAMES = [
    "UPPER Case",
    "o'hara",
    'say "hi"',
    '"; DROP TABLE limpet_store; --',
    "'; DROP TABLE limpet_store; --",
    "$limpet$; DROP TABLE limpet_store; $limpet$",
    "$limpet$ $limpet_$",
    "back\\slash \\' \\",
    ":name :'name' :\"name\"",
    "%I %s %L %",
    "{schema} {0} {}",
    "Ünïcødé 表 🐚",
    "select",
    "current_user",
    " ",
    "a" * 63,
    "ü" * 31,
]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_any_name_is_a_name_to_psql_and_to_us(name: str) -> None:
    """As a role and as a schema. It is used in this one test, because all tests share the server."""
    psql = [str(postgres_programs() / "psql"), "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", "--dbname", server()]
    with swept_away([name], [name]):
        limpet.sync.open(url_of(schema=name)).close()
        script = grant(name, name, "--login", "-n", "alpha").stdout
        for _ in range(2):
            done = subprocess.run(psql, input=script, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stderr) == (0, "")
        with limpet.sync.open(url_of(name, name), namespace="alpha") as store:
            assert store.put("k", 1).version == 1

        granted(name, name)
        with limpet.sync.open(url_of(name, name), namespace="beta") as store:
            assert store.put("k", 1).version == 1

        granted(name, name, "--revoke")
        with pytest.raises(PermissionDenied):
            limpet.sync.open(url_of(name, name))


@pytest.mark.parametrize("schema", ["line\nbreak", "line\n, ((", "$$", "$$; SELECT; $$", "$limpet$ $$"], ids=ascii)
def test_the_name_of_a_schema_is_never_taken_for_sql(schema: str, role: str) -> None:
    """The name is inside comments and function bodies, which it must not end. It may be refused."""
    with swept_away([schema], []):
        try:
            limpet.sync.open(url_of(schema=schema)).close()
        except InvalidValue:
            return
        granted(schema, role, "--login", "-n", "alpha")
        now(everything(url_of(role, schema), "alpha"))


@pytest.mark.parametrize("role", ["line\nbreak\n-- \\q", "$$", "$$; SELECT; $$"], ids=ascii)
def test_the_name_of_a_role_is_never_taken_for_sql(schema: str, role: str) -> None:
    with swept_away([schema], [role]):
        granted(schema, role, "--login", "-n", "alpha")
        now(everything(url_of(role, schema), "alpha"))


@pytest.mark.parametrize("role", ["", "a" * 64, "ü" * 32, "nul\0", "lone\ud800", "public", "none", "pg_monitor"])
def test_a_name_that_no_role_can_have_is_refused(role: str) -> None:
    """To PostgreSQL even "public" in quotes is the group of all roles, and a long name is truncated to another."""
    for script in (grants.grant_sql, grants.revoke_sql):
        with pytest.raises(InvalidValue, match="role"):
            script(role, schema="s")


@pytest.mark.parametrize("schema", ["", "a" * 64, "nul\0", "pg_catalog"])
def test_a_name_that_no_schema_can_have_is_refused(schema: str) -> None:
    for script in (grants.grant_sql, grants.revoke_sql):
        with pytest.raises(InvalidValue, match="schema"):
            script("r", schema=schema)


@pytest.mark.parametrize("namespace", ["", "A", "a b", "a'", "a" * 101, "ä", "*"])
def test_a_name_that_no_namespace_can_have_is_refused(namespace: str) -> None:
    with pytest.raises(InvalidNamespace):
        grants.grant_sql("r", schema="s", namespaces=["fine", namespace])


def test_roles_with_long_names_do_not_share_a_policy() -> None:
    names = {grants._policy(role) for role in ("a" * 63, "a" * 62 + "b", "a" * 51, "owner", "hash_x")}

    assert len(names) == 5
    assert "limpet_owner" not in names
    assert max(len(name.encode()) for name in names) <= 63


# The command ------------------------------------------------------------------


def test_printing_connects_to_nothing() -> None:
    done = Limpet("postgresql://admin:hunter2@192.0.2.1/app?schema=trivia")("grant", "trivia")

    assert done.exit_code == 0
    assert done.stdout == grants.grant_sql("trivia", schema="trivia")
    assert "hunter2" not in done.stdout


def test_json_tells_what_was_granted(schema: str, role: str) -> None:
    run = Limpet(url_of(schema=schema))

    printed = run.json("grant", role, "-n", "b", "-n", "a", "-n", "b", "--read-only")
    applied = run.json("grant", role, "--apply")
    revoked = run.json("grant", role, "--revoke", "--apply")

    facts = [
        tuple(one[name] for name in ("role", "schema", "namespaces", "access", "applied"))
        for one in (printed, applied, revoked)
    ]
    assert facts == [
        (role, schema, ["a", "b"], "read", False),
        (role, schema, None, "write", True),
        (role, schema, None, "none", True),
    ]
    assert printed["sql"] == grants.grant_sql(role, schema=schema, namespaces=["a", "b"], read_only=True)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("grant", "r", "--revoke", "-n", "a"), 2, "--revoke takes everything back"),
        (("grant", "r", "--revoke", "--read-only"), 2, "--revoke takes everything back"),
        (("grant", "r", "--revoke", "--login"), 2, "--revoke takes everything back"),
        (("-n", "a", "grant", "r"), 2, "give --namespace after grant"),
        (("grant", "r", "--url", "sqlite:///x.db"), 7, "sqlite:///x.db has no roles"),
        (("grant", "public"), 7, "is reserved by PostgreSQL"),
        (("grant", "r", "-n", "A"), 7, "'A'"),
        (("grant", "no_such_role", "--revoke", "--apply"), 7, 'role "no_such_role" does not exist'),
    ],
)
def test_a_grant_that_cannot_be_is_refused_with_a_reason(
    schema: str, words: tuple[str, ...], code: int, message: str
) -> None:
    limpet.sync.open(url_of(schema=schema)).close()

    done = Limpet(url_of(schema=schema))(*words)

    assert (done.exit_code, message in done.stderr) == (code, True), done.stderr


def test_a_role_that_may_not_grant_gets_an_error_that_says_so(schema: str, role: str) -> None:
    granted(schema, role, "--login")

    done = Limpet(url_of(role, schema))("grant", role, "--apply")

    assert done.exit_code == 7
    assert "Grants need the owner of the tables, or a superuser" in done.stderr


def test_the_error_of_an_unreachable_server_has_no_password() -> None:
    for words in (("--apply",), ("--apply", "--revoke")):
        done = Limpet("postgresql://admin:hunter2@127.0.0.1:1/app?schema=trivia")("grant", "trivia", *words)

        assert done.exit_code == 6
        assert "cannot be reached now" in done.stderr
        assert "hunter2" not in done.output


def test_a_namespace_of_the_environment_does_not_narrow_a_grant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIMPET_NAMESPACE", "alpha")

    assert Limpet("postgresql://db/app")("grant", "r").stdout == grants.grant_sql("r", schema="public")
