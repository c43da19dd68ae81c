"""Tenants on one server, an attacker, and the comparison after an attack."""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

import asyncpg
from click.testing import Result

import limpet.sync
from limpet.isolation import postgres as grants
from tests.cli.support import Limpet

SECRET = "the-cake-is-in-the-cellar"
MINE, THEIRS = "alpha", "state"
"""THEIRS is the name of a namespace that also has its own view."""

# How the server refuses: not allowed, no such table, no such function; and the error of limpet_put for a namespace of
# which it sees no row.
REFUSALS = {"42501", "42P01", "42883", "LP001"}
NOTHING = ("SELECT 0", "INSERT 0 0", "UPDATE 0", "DELETE 0", "MERGE 0", "FETCH 0")


def server() -> str:
    return os.environ["LIMPET_TEST_POSTGRES"]


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def unique(what: str) -> str:
    """A name that no other test has."""
    return f"{what}_{uuid.uuid4().hex[:12]}"


def url_of(role: str = "postgres", schema: str | None = None, base: str | None = None) -> str:
    """The URL of the shared server, or of another, for a role."""
    scheme, _, target = (base or server()).partition("postgres@")
    url = f"{scheme}{quote(role, safe='')}@{target}"
    return url if schema is None else f"{url}?schema={quote(schema, safe='')}"


def grant(schema: str, *words: str, base: str | None = None) -> Result:
    """``limpet grant`` as the superuser. Not from within a running loop."""
    return Limpet(url_of(schema=schema, base=base))("grant", *words)


def granted(schema: str, *words: str, base: str | None = None) -> None:
    done = grant(schema, *words, "--apply", base=base)
    assert done.exit_code == 0, done.output


@contextlib.asynccontextmanager
async def connected(url: str | None = None) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(url or server())
    try:
        yield connection
    finally:
        await connection.close()


def now(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine where no loop runs."""
    return asyncio.run(work)


def execute(*statements: str, url: str | None = None) -> None:
    """Run statements as the superuser, or as the role of a URL."""

    async def run() -> None:
        async with connected(url) as connection:
            for statement in statements:
                await connection.execute(statement)

    now(run())


@contextlib.contextmanager
def swept_away(schemas: Sequence[str], roles: Sequence[str]) -> Iterator[None]:
    """Remove schemas and roles afterwards."""
    try:
        yield
    finally:
        execute(*(f"DROP SCHEMA IF EXISTS {quoted(schema)} CASCADE" for schema in schemas))
        for role in roles:
            who = quoted(role)
            with contextlib.suppress(asyncpg.UndefinedObjectError):
                execute(f"DROP OWNED BY {who} CASCADE", f"DROP ROLE {who}")


# Tenants ----------------------------------------------------------------------


class Tenants(NamedTuple):
    """An attacker and its victim. The attacker also has a schema where it may create anything."""

    victim: str
    attacker: str
    victims_schema: str
    attackers_schema: str
    workshop: str

    @property
    def words(self) -> dict[str, str]:
        """The names that statements of an attack may use."""
        return {
            "b": quoted(self.victims_schema),
            "w": quoted(self.workshop),
            "victim": quoted(self.victim),
            "victim_plain": self.victim,
            "attacker": quoted(self.attacker),
            "their_policy": quoted(f"limpet_role_{self.victim}"),
            "b_plain": self.victims_schema,
            "mine": MINE,
            "theirs": THEIRS,
        }

    @property
    def attackers_url(self) -> str:
        return url_of(self.attacker)


@contextlib.contextmanager
def tenants(*, share: bool) -> Iterator[Tenants]:
    """Two tenants with a schema each, or with a namespace each of one schema."""
    victim, attacker, workshop, schema = map(unique, ("victim", "attacker", "workshop", "tenants"))
    other = schema if share else unique("tenants")
    with swept_away([workshop, schema, other], [victim, attacker]):
        granted(schema, victim, "--login", *(("-n", THEIRS) if share else ()))
        granted(other, attacker, "--login", *(("-n", MINE) if share else ()))
        execute(f"CREATE SCHEMA {quoted(workshop)} AUTHORIZATION {quoted(attacker)}")
        found = Tenants(victim, attacker, schema, other, workshop)
        _fill(attacker, other, MINE, "nothing worth hiding")
        _fill(victim, schema, THEIRS, SECRET)
        # Statistics hold values of rows too.
        execute(f"ANALYZE {quoted(schema)}.limpet_entries", f"ANALYZE {quoted(schema)}.limpet_changes")
        yield found


def _fill(role: str, schema: str, namespace: str, secret: str) -> None:
    """Fill every table, with the secret wherever a text can be."""
    with limpet.sync.open(url_of(role, schema), namespace=namespace, sweep=False) as store:
        store.put("diary", {"text": secret})
        store.put(f"about/{secret}", secret.encode(), meta={"by": secret})
        store.put("paid", secret, request_id=f"request of {secret}")
        store.record("job").put({"state": secret})
        store.take("paid")
        store.lock(f"lock of {secret}", ttl=3600, holder=secret).acquire()
    superseded = f"jsonb_build_object('{secret}', 1)"
    execute(f"UPDATE {quoted(schema)}.limpet_namespaces SET superseded = {superseded} WHERE namespace = '{namespace}'")


# An attack and its result -----------------------------------------------------


class AttackResult(NamedTuple):
    """What the statements of an attack returned."""

    state: str | None
    status: str
    output: str

    @property
    def is_refused(self) -> bool:
        return self.state in REFUSALS or (self.state is None and self.status in NOTHING)

    @property
    def is_done(self) -> bool:
        return self.state is None and self.status not in NOTHING


async def attempt(connection: Any, statements: Sequence[str]) -> AttackResult:
    """Run statements up to the first that fails, and collect all output."""
    output: list[str] = []
    status = ""
    connection.add_log_listener(lambda _, message: output.append(str(message)))
    try:
        for statement in statements:
            prepared = await connection.prepare(statement)
            rows = await prepared.fetch()
            status = prepared.get_statusmsg()
            output.append(repr(rows))
    except asyncpg.PostgresError as error:
        output.append(repr(error.as_dict()))
        return AttackResult(error.sqlstate, status, "\n".join(output))
    # A message of the log listener comes with the next turn of the loop.
    await asyncio.sleep(0)
    return AttackResult(None, status, "\n".join(output))


async def attempt_as_superuser(statements: Sequence[str]) -> AttackResult:
    """Run the statements as a superuser and roll them back, to see the result of a success."""
    async with connected() as connection:
        transaction = connection.transaction()
        await transaction.start()
        try:
            return await attempt(connection, statements)
        finally:
            await transaction.rollback()


_CATALOGS = {
    "pg_namespace": "oid = {schema}",
    "pg_class": "relnamespace = {schema}",
    "pg_proc": "pronamespace = {schema}",
    "pg_policy": "polrelid IN (SELECT oid FROM pg_class WHERE relnamespace = {schema})",
    "pg_trigger": "tgrelid IN (SELECT oid FROM pg_class WHERE relnamespace = {schema})",
    "pg_rewrite": "ev_class IN (SELECT oid FROM pg_class WHERE relnamespace = {schema})",
    "pg_authid": "rolname IN ('{victim}', '{attacker}')",
    "pg_auth_members": "(SELECT count(*) FROM pg_authid WHERE oid IN (roleid, member)"
    " AND rolname IN ('{victim}', '{attacker}')) > 0",
}
# Statistics of the server are not changes.
_COUNTS = "'{relpages,reltuples,relallvisible,relallfrozen,relfrozenxid,relminmxid}'::text[]"


async def fingerprint(tenants: Tenants) -> list[Any]:
    """Everything that belongs to the victim: rows, rights, policies, functions, and its role."""
    schema = quoted(tenants.victims_schema)
    names = {"schema": f"'{schema}'::regnamespace", "victim": tenants.victim, "attacker": tenants.attacker}
    parts = [
        f"SELECT '{table}', t::text FROM {schema}.{table} t"
        + (f" WHERE namespace <> '{MINE}'" if table in grants._NAMESPACED_TABLES else "")
        for table in grants._TABLE_RIGHTS
    ]
    for catalog, condition in _CATALOGS.items():
        parts.append(f"SELECT '{catalog}', (to_jsonb(c) - {_COUNTS})::text FROM {catalog} c WHERE ")
        parts[-1] += condition.format_map(names)
    async with connected() as connection:
        rows: list[Any] = await connection.fetch(" UNION ALL ".join(parts) + " ORDER BY 1, 2")
    assert {row[0] for row in rows} >= {*grants._TABLE_RIGHTS, *_CATALOGS} - {"pg_auth_members"}
    return rows
