"""Write the static files: ``python -m limpet.schema.render``, after every change of a revision.

An empty database is made from them, so that opening one does not need Alembic.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from limpet.schema import REVISION
from limpet.schema.migrate import render

ENGINES: Final = ("postgres", "sqlite")

_HEADS: Final = {
    "postgres": f"""\
-- Limpet's tables on PostgreSQL, schema revision {REVISION}. The word in braces stands for their schema.
-- Plain SQL can read all of it: a JSON value is jsonb, a record is a jsonb object of its fields.
""",
    "sqlite": f"""\
-- Limpet's tables on SQLite, schema revision {REVISION}. Plain SQL can read all of it:
-- a JSON value is JSON text, a record is a JSON object of its fields.
""",
}


def static(engine: str) -> str:
    """The content of the static file of an engine."""
    return f"{_HEADS[engine]}-- Written by python -m limpet.schema.render, from the migrations.\n\n{render(engine)}\n"


def write(folder: Path) -> None:
    """Write the files."""
    for engine in ENGINES:
        (folder / f"{engine}.sql").write_text(static(engine), encoding="utf-8")


if __name__ == "__main__":
    write(Path(__file__).parent)
