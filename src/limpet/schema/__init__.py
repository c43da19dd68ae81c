"""The SQL tables. The static files here are what an empty database is made from."""

from __future__ import annotations

from importlib.resources import files

SCHEMA_VERSION = 1


def ddl(engine: str) -> str:
    """The statements that make an empty database ready for this release."""
    return files(__name__).joinpath(f"{engine}.sql").read_text()
