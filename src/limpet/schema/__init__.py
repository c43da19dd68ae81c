"""The SQL tables: what an empty database is made from, and at which revision its schema must be.

A schema goes from revision to revision by the migrations here, which stand on Alembic. Opening a
store that is as this release needs it, or that is empty, does without: the static files are the
same migrations, rendered.
"""

from __future__ import annotations

from typing import Final

from limpet.errors import Corrupt

REVISIONS: Final = ("0001", "0002")
"""The revisions that this release knows, oldest first."""

REVISION: Final = REVISIONS[-1]
"""The one that this release works on."""

VERSION_TABLE: Final = "limpet_schema"


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
