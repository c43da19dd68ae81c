"""A table of a PostgreSQL schema."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, Self

from limpet.engines.postgres.engine import schema_target
from limpet.errors import InvalidValue, PermissionDenied, Unavailable
from limpet.moving.entries import Brought, Rejected
from limpet.moving.sources.tables import ASIDE, DONE, STATE_NAMESPACE, TABLES, choose_table, item_of
from limpet.schema import ddl, in_schema
from limpet.urls import Address

__all__ = ["PostgresTable"]

ROWS: Final = 500
LOCK_S: Final = 30
"""How long to wait for the writers of a table that is renamed."""

_FORMS: Final = {
    "value": '"value"::text',
    "updated_at": "extract(epoch FROM updated_at)",
    "created_at": "extract(epoch FROM created_at)",
    "expires_at": "extract(epoch FROM expires_at)",
}
_TABLES_THERE: Final = (
    "SELECT c.relname::text, array_agg(a.attname::text) FROM pg_class c"
    " JOIN pg_namespace n ON n.oid = c.relnamespace"
    " JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped"
    " WHERE n.nspname = $1 AND c.relkind IN ('r', 'p') GROUP BY 1"
)


class PostgresTable:
    """The table ``state`` or ``plugin_kv_storage`` of a schema."""

    needs_place = False

    def __init__(self, connection: Any, schema: str, shown: str, is_in_place: bool) -> None:
        self._connection = connection
        self._schema = '"' + schema.replace('"', '""') + '"'
        self.shown = shown
        self._is_in_place = is_in_place
        self._table, self._suffix = "", ""
        self._columns: list[str] = []

    @classmethod
    async def open(cls, address: Address, into: Address, table: str | None) -> Self:
        """Connect, and find the table."""
        target, is_in_place = schema_target(address), False
        if into.scheme in ("postgresql", "postgres"):
            other = schema_target(into)
            is_in_place = (other.source, other.schema) == (target.source, target.schema)  # type: ignore[union-attr]
        try:
            import asyncpg
        except ModuleNotFoundError as missing:
            raise InvalidValue(f"{address} needs asyncpg: pip install 'limpet[postgres]'") from missing
        try:
            connection = await asyncpg.connect(target.source, timeout=LOCK_S)  # type: ignore[union-attr]
        except (OSError, asyncpg.PostgresError) as error:
            raise Unavailable(f"{address} cannot be reached: {type(error).__name__}") from None
        schema = target.schema or "public"
        made = cls(connection, schema, str(address), is_in_place)
        try:
            there = {name: list(columns) for name, columns in await connection.fetch(_TABLES_THERE, schema)}
            made._table, made._suffix = choose_table(there, table, f"schema {schema} of {address}")
        except BaseException:
            await connection.close()
            raise
        made._columns = [name for name in TABLES[made._table] if name in there[made._stored_name]]
        return made

    @property
    def _stored_name(self) -> str:
        return f"{self._table}{self._suffix}"

    async def count(self) -> int | None:
        """See `ForeignData.count`."""
        return int(await self._connection.fetchval(f"SELECT count(*) FROM {self._schema}.{self._stored_name}"))

    async def read(self) -> AsyncIterator[Brought | Rejected]:
        """See `ForeignData.read`. All rows are of one moment."""
        names = ", ".join(f"{_FORMS.get(name, name)} AS {name}" for name in self._columns)
        order = ", ".join(name for name in ("plugin_name", "key") if name in self._columns)
        statement = f"SELECT {names} FROM {self._schema}.{self._stored_name} ORDER BY {order}"
        async with self._connection.transaction(isolation="repeatable_read", readonly=True):
            async for row in self._connection.cursor(statement, prefetch=ROWS):
                found = {
                    name: float(item) if name.endswith("_at") and item is not None else item
                    for name, item in row.items()
                }
                yield item_of(self._table, found, time.time_ns() // 1_000_000)

    async def ended(self, namespace: str, keys: Sequence[str]) -> list[str]:
        """See `WithRows.ended`."""
        named = "AND t.plugin_name = $2" if self._table != "state" else "AND $2::text = $2"
        if self._table == "state" and namespace != STATE_NAMESPACE:
            return []
        statement = (
            f"SELECT k FROM unnest($1::text[]) AS k"
            f" WHERE NOT EXISTS (SELECT 1 FROM {self._schema}.{self._stored_name} t WHERE t.key = k {named})"
        )
        return [key for (key,) in await self._connection.fetch(statement, list(keys), namespace)]

    async def hand_over(self) -> str | None:
        """See `ForeignData.hand_over`."""
        if not self._is_in_place or self.is_done:
            return None
        if self._suffix != ASIDE:
            async with self._swap() as run:
                await run(f"LOCK TABLE {{schema}}.{self._table} IN ACCESS EXCLUSIVE MODE")
                await run(f"ALTER TABLE {{schema}}.{self._table} RENAME TO {self._table}{ASIDE}")
                await run(_view(self._table))
            self._suffix = ASIDE
        return f"the table {self._table} is now {self._table}{DONE}, and a view has its place"

    async def finish(self) -> None:
        """See `ForeignData.finish`. The table stays, to go back to."""
        async with self._swap() as run:
            await run(f"ALTER TABLE {{schema}}.{self._stored_name} RENAME TO {self._table}{DONE}")
        self._suffix = DONE

    async def give_back(self) -> str:
        """See `WithRows.give_back`."""
        if self._suffix:
            async with self._swap() as run:
                await run(f"DROP VIEW IF EXISTS {{schema}}.{self._table}")
                await run(f"ALTER TABLE {{schema}}.{self._stored_name} RENAME TO {self._table}")
            self._suffix = ""
        return f"the table {self._table} is in its place, as it was"

    @property
    def is_done(self) -> bool:
        """See `WithRows.is_done`."""
        return self._suffix == DONE

    def _swap(self) -> _Swap:
        return _Swap(self._connection, self._schema, self.shown)

    async def close(self) -> None:
        """See `ForeignData.close`."""
        await self._connection.close()


class _Swap:
    """A transaction that puts one table or view in the place of another."""

    def __init__(self, connection: Any, schema: str, shown: str) -> None:
        self._connection, self._schema, self._shown = connection, schema, shown
        self._transaction = connection.transaction()

    async def __aenter__(self) -> Any:
        await self._transaction.start()
        await self._connection.execute(f"SET LOCAL lock_timeout = '{LOCK_S}s'")
        return self._run

    async def _run(self, statement: str) -> None:
        import asyncpg

        try:
            await self._connection.execute(in_schema(statement, self._schema))
        except asyncpg.InsufficientPrivilegeError as error:
            raise PermissionDenied(f"{self._shown}: {error}: only the owner of a table can hand it over") from error
        except asyncpg.PostgresError as error:
            raise Unavailable(f"{self._shown}: handing over failed, and nothing changed: {error}") from error

    async def __aexit__(self, kind: object, *_: object) -> None:
        if kind is None:
            await self._transaction.commit()
        else:
            await self._transaction.rollback()


def _view(table: str) -> str:
    """The statements that make the view of a name, and have it refuse writes."""
    pattern = rf"CREATE VIEW \{{schema\}}\.{table}\b.*?EXECUTE FUNCTION \{{schema\}}\.limpet_refuse\(\);"
    found = re.search(pattern, ddl("postgres"), re.DOTALL)
    assert found is not None, "the schema has both views"
    return found[0]
