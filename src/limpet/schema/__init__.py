"""The SQL tables: the statements for an empty database, and the schema revision that this release needs.

The migrations here take a schema from one revision to the next, with Alembic. Opening a store whose
schema is current, or an empty database, does not need Alembic: the static files hold the same
migrations, rendered as SQL.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from limpet.errors import Corrupt

log = logging.getLogger("limpet.schema")

REVISIONS: Final = ("0001", "0002")
"""The revisions that this release knows, oldest first."""

REVISION: Final = REVISIONS[-1]
"""The revision that this release works on."""

VERSION_TABLE: Final = "limpet_schema"

SHARED_SCHEMA: Final = "public"
"""The schema that all programs of a PostgreSQL database share by default. The view ``state`` is not made there."""

TAKEN_ON_POSTGRES: Final = (
    "SELECT c.relname::text FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
    " WHERE n.nspname = {schema} AND c.relname IN ('plugin_kv_storage', 'state')"
    " AND c.relkind IN ('r', 'p', 'v', 'm', 'f') AND NOT EXISTS"
    " (SELECT 1 FROM pg_catalog.pg_trigger t WHERE t.tgrelid = c.oid AND t.tgname = 'limpet_refuse') ORDER BY 1"
)
"""The names of our views that another table or view has in a schema. Only our views have this trigger."""

TAKEN_ON_SQLITE: Final = (
    "SELECT name FROM sqlite_master WHERE lower(name) = 'plugin_kv_storage' AND"
    " (type = 'table' OR type = 'view' AND instr(sql, 'limpet_entries') = 0)"
)
"""The same in a SQLite file."""


def ddl(engine: str) -> str:
    """The statements that make an empty database ready for this release."""
    # Imported here, because only an empty database needs it.
    from importlib.resources import files

    return files(__name__).joinpath(f"{engine}.sql").read_text(encoding="utf-8")


def in_schema(statements: str, schema: str) -> str:
    """PostgreSQL's statements with the name of a schema, quoted, in place of ``{schema}``."""
    # The bodies of functions contain the name too, and a name with $$ in it would end them.
    quotes, number = "$$", 0
    while quotes in schema:
        number += 1
        quotes = f"$limpet{number}$"
    return statements.replace("$$", quotes).replace("{schema}", schema)


def is_behind(revision: str | None) -> bool:
    """Whether a schema is at an earlier revision, and can be migrated to the one this release needs."""
    return revision in REVISIONS[:-1]


def describe_taken(name: str) -> str:
    """Explain what follows when another table or view has the name of one of our views."""
    return (
        f"there is a table or view {name} that Limpet did not make: it is left as it is, it is not read, "
        "and it does not show what Limpet stores"
    )


def warn_of_taken(names: Sequence[str], shown: str) -> None:
    """Log that another table or view has the name of one of our views."""
    for name in names:
        log.warning("%s: %s", shown, describe_taken(name))


def require(revision: str | None, shown: str) -> None:
    """Refuse a schema that this release cannot work on.

    Raises:
        Corrupt: Neither waiting nor another request helps: an operator has to migrate the store, or to use
            another release.
    """
    if revision == REVISION:
        return
    if revision is None:
        raise Corrupt(f"{shown} has no schema revision: its table {VERSION_TABLE} is empty or missing")
    if is_behind(revision):
        raise Corrupt(
            f"{shown} has schema revision {revision}, and this release needs {REVISION}: "
            "run 'limpet migrate up', or open it with ?migrate=auto"
        )
    raise Corrupt(
        f"{shown} has schema revision {revision}, and this release knows none after {REVISION}: "
        "use the release of Limpet that wrote it, or a later one"
    )
