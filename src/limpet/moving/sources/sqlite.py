"""A table of a SQLite file."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import quote

from limpet.errors import InvalidValue, Unavailable
from limpet.moving.entries import Brought, Rejected
from limpet.moving.sources.tables import ASIDE, DONE, STATE_NAMESPACE, TABLES, choose_table, item_of, plain_name
from limpet.schema import ddl
from limpet.urls import Address

__all__ = ["SqliteTable"]

BUSY_S: Final = 30.0
ROWS: Final = 500


class SqliteTable:
    """The table ``plugin_kv_storage`` or ``state`` of a SQLite file."""

    needs_place = False

    def __init__(self, address: Address, into: Address, table: str | None) -> None:
        self.shown = str(address)
        path = Path(address.path.removeprefix("///"))
        if not path.is_file():
            raise InvalidValue(f"there is nothing to adopt at {address}: no such file")
        self._is_in_place = into.scheme == "sqlite" and Path(into.path.removeprefix("///")).resolve() == path.resolve()
        try:
            self._file = sqlite3.connect(
                f"file:{quote(str(path))}?mode=rw", uri=True, timeout=BUSY_S, isolation_level=None
            )
            self._file.row_factory = sqlite3.Row
            found = {
                name: [column[1] for column in self._file.execute(f'PRAGMA table_info("{name}")')]
                for (name,) in self._file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
                if plain_name(name) in TABLES
            }
        except sqlite3.Error as error:
            raise InvalidValue(f"{address} cannot be read: {error}") from error
        self._table, self._suffix = choose_table(found, table, self.shown)
        self._columns = [name for name in TABLES[self._table] if name in found[self._stored_name]]

    @property
    def _stored_name(self) -> str:
        return f"{self._table}{self._suffix}"

    async def count(self) -> int | None:
        """See `ForeignData.count`."""
        (count,) = self._file.execute(f'SELECT count(*) FROM "{self._stored_name}"').fetchone()
        return int(count)

    async def read(self) -> AsyncIterator[Brought | Rejected]:
        """See `ForeignData.read`. In pages, so that no reader holds up the file's writers."""
        keys = ["plugin_name", "key"] if "plugin_name" in self._columns else ["key"]
        names, order = ", ".join(f'"{name}"' for name in self._columns), ", ".join(keys)
        marks = ", ".join("?" * len(keys))
        after: tuple[object, ...] | None = None
        while True:
            where = "" if after is None else f"WHERE ({order}) > ({marks})"
            statement = f'SELECT {names} FROM "{self._stored_name}" {where} ORDER BY {order} LIMIT {ROWS}'
            rows = self._file.execute(statement, after or ()).fetchall()
            for row in rows:
                yield item_of(self._table, dict(row), time.time_ns() // 1_000_000)
            if len(rows) < ROWS:
                return
            after = tuple(rows[-1][name] for name in keys)

    async def ended(self, namespace: str, keys: Sequence[str]) -> list[str]:
        """See `WithRows.ended`."""
        if self._table == "state":
            if namespace != STATE_NAMESPACE:
                return []
            where, names = "key = ?", []
        else:
            where, names = "plugin_name = ? AND key = ?", [namespace]
        statement = f'SELECT 1 FROM "{self._stored_name}" WHERE {where}'
        return [key for key in keys if self._file.execute(statement, [*names, key]).fetchone() is None]

    async def hand_over(self) -> str | None:
        """See `ForeignData.hand_over`."""
        if not self._is_in_place or self.is_done:
            return None
        if self._suffix != ASIDE:
            self._swap(f'ALTER TABLE "{self._table}" RENAME TO "{self._table}{ASIDE}"', _view(self._table))
            self._suffix = ASIDE
        return f"the table {self._table} is now {self._table}{DONE}, and a view has its place"

    async def finish(self) -> None:
        """See `ForeignData.finish`. The table stays, to go back to."""
        self._swap(f'ALTER TABLE "{self._stored_name}" RENAME TO "{self._table}{DONE}"')
        self._suffix = DONE

    async def give_back(self) -> str:
        """See `WithRows.give_back`."""
        if self._suffix:
            self._swap(
                f'DROP VIEW IF EXISTS "{self._table}"', f'ALTER TABLE "{self._stored_name}" RENAME TO "{self._table}"'
            )
            self._suffix = ""
        return f"the table {self._table} is in its place, as it was"

    @property
    def is_done(self) -> bool:
        """See `WithRows.is_done`."""
        return self._suffix == DONE

    def _swap(self, *statements: str) -> None:
        """Run statements in one transaction."""
        try:
            self._file.execute("BEGIN IMMEDIATE")
            # A renaming would also look into views, of other programs, that name what is not there.
            self._file.execute("PRAGMA legacy_alter_table = ON")
            for statement in statements:
                self._file.execute(statement)
            self._file.execute("COMMIT")
        except sqlite3.Error as error:
            if self._file.in_transaction:
                self._file.execute("ROLLBACK")
            raise Unavailable(f"{self.shown} could not be changed, and stays as it was: {error}") from error

    async def close(self) -> None:
        """See `ForeignData.close`."""
        self._file.close()


def _view(table: str) -> str:
    """The statement that makes the view of a name."""
    found = re.search(rf"CREATE VIEW IF NOT EXISTS {table}\b.*?;", ddl("sqlite"), re.DOTALL)
    if found is None:
        raise InvalidValue(f"SQLite stores have no view {table}: adopt the table into another store")
    return found[0].rstrip(";")
