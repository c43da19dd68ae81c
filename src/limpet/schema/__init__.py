"""The SQL tables: what an empty database is made from, and at which revision its schema must be.

A schema goes from revision to revision by the migrations here, which stand on Alembic. Opening a
store that is as this release needs it, or that is empty, does without: the static files are the
same migrations, rendered.
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
"""The one that this release works on."""

VERSION_TABLE: Final = "limpet_schema"

SHARED_SCHEMA: Final = "public"
"""The schema that all programs of a PostgreSQL database share by default. The view ``state`` is not made there."""

TAKEN_ON_POSTGRES: Final = (
    "SELECT c.relname::text FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
    " WHERE n.nspname = {schema} AND c.relname IN ('plugin_kv_storage', 'state')"
    " AND c.relkind IN ('r', 'p', 'v', 'm', 'f') AND NOT EXISTS"
    " (SELECT 1 FROM pg_catalog.pg_trigger t WHERE t.tgrelid = c.oid AND t.tgname = 'limpet_refuse') ORDER BY 1"
)
"""The names of our views that something else has in a schema. Only our views have this trigger."""

TAKEN_ON_SQLITE: Final = (
    "SELECT name FROM sqlite_master WHERE lower(name) = 'plugin_kv_storage' AND"
    " (type = 'table' OR type = 'view' AND instr(sql, 'limpet_entries') = 0)"
)
"""The same in a file."""


def ddl(engine: str) -> str:
    """The statements that make an empty database ready for this release."""
    # Only an empty database needs what it takes to find a file of the package.
    from importlib.resources import files

    return files(__name__).joinpath(f"{engine}.sql").read_text(encoding="utf-8")


def in_schema(statements: str, schema: str) -> str:
    """PostgreSQL's statements with the name of a schema, quoted, for ``{schema}``."""
    # The name stands in the bodies of functions too, and may hold what would end them.
    quotes, number = "$$", 0
    while quotes in schema:
        number += 1
        quotes = f"$limpet{number}$"
    return statements.replace("$$", quotes).replace("{schema}", schema)


def is_behind(revision: str | None) -> bool:
    """Whether a schema can be migrated to what this release needs."""
    return revision in REVISIONS[:-1]


def describe_taken(name: str) -> str:
    """What it means that something else has the name of one of our views."""
    return (
        f"there is a table or view {name} that Limpet did not make: it is left as it is, what is in it is not read, "
        "and it does not show what Limpet stores"
    )


def warn_of_taken(names: Sequence[str], shown: str) -> None:
    """Log that something else has the name of one of our views."""
    for name in names:
        log.warning("%s: %s", shown, describe_taken(name))


def require(revision: str | None, shown: str) -> None:
    """Refuse a schema that this release cannot work on.

    Raises:
        Corrupt: Waiting does not help, and neither would another request: somebody has to migrate the
            store, or to use another release.
    """
    if revision == REVISION:
        return
    if revision is None:
        raise Corrupt(f"{shown} does not say its schema revision: its table {VERSION_TABLE} is empty or missing")
    if is_behind(revision):
        raise Corrupt(
            f"{shown} has schema revision {revision}, and this release needs {REVISION}: "
            "run 'limpet migrate up', or open it with ?migrate=auto"
        )
    raise Corrupt(
        f"{shown} has schema revision {revision}, and this release knows none after {REVISION}: "
        "use the release of Limpet that wrote it, or a later one"
    )
