"""The tables as one description for both databases.

A change of a table begins here. A new revision in `migrations/versions` then makes it in existing
databases; it repeats the columns it needs, because a revision must not change when this description
does. Tests check that both make the same catalog.
"""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

# Keys are ordered by code point, whatever the collation of the database. SQLite does so by default.
_NAME: Final = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
_NUMBER: Final = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
# In SQLite such a column takes any value: JSON is text there, and raw bytes are a blob.
_JSON: Final = sa.LargeBinary().with_variant(postgresql.JSONB(), "postgresql")


SQLITE_TOTALS: Final = ("total_keys", "total_bytes", "logged_changes", "logged_bytes")
"""What the last change of a commit says: entries of the data and their size, changes ever made and their size."""


def tables(engine: str, schema: str | None = None) -> sa.MetaData:
    """The tables of an engine, ``sqlite`` or ``postgres``."""
    metadata = sa.MetaData(schema=schema)
    on_postgres = engine == "postgres"

    sa.Table(
        "limpet_store",
        metadata,
        _text("id"),
        _number("epoch"),
        comment="One row: the id and the epoch of this store.",
    )

    # The ids of superseded requests, and when their retries came: a first attempt that arrives after its retry is
    # refused. They are in this row, because every writer has just read it.
    superseded = [sa.Column("superseded", postgresql.JSONB())] if on_postgres else []
    # On SQLite the last change of a commit has the counters, so that no other row needs to be written for them. The row
    # of a namespace has what they were when it was last written, and the view limpet_counters puts both together.
    logged = (
        [_number("log_changes"), _number("log_bytes")]
        if on_postgres
        else [_number("dropped_changes"), _number("dropped_bytes")]
    )
    sa.Table(
        "limpet_namespaces",
        metadata,
        _name("namespace", primary_key=True),
        _number("revision"),
        _number("floor"),
        _number("at_ms"),
        _number("keys"),
        _number("size_bytes"),
        *logged,
        *superseded,
        # The fingerprint of the change at the floor, which is no longer in the log.
        _text("floor_print", nullable=True),
        comment="One row for each namespace: its counters. A writer holds its lock.",
        # Every commit updates the row. With room on its page the new version stays there, and no index is updated.
        postgresql_with={"fillfactor": 20},
        sqlite_with_rowid=False,
    )

    # SQLite keeps any value to the byte, in one column.
    stored: list[sa.Column[Any]] = []
    if on_postgres:
        is_lossy = sa.Column("is_lossy", sa.Boolean)
        stored = [sa.Column("stored", sa.LargeBinary, nullable=False), is_lossy, _number("size_bytes")]
    # The size of the replaced value, to subtract from the counters of the namespace.
    replaced = [sa.Column("replaced_bytes", _NUMBER, nullable=False, server_default="0")] if on_postgres else []
    entries = sa.Table(
        "limpet_entries",
        metadata,
        _name("namespace", primary_key=True),
        _name("family", primary_key=True),
        _name("key", primary_key=True),
        _text("kind"),
        sa.Column("value", _JSON, nullable=on_postgres),
        *stored,
        _number("version"),
        _number("revision"),
        _number("created_revision"),
        _number("created_ms"),
        _number("updated_ms"),
        _number("expires_ms", nullable=True),
        _text("meta", nullable=True),
        *replaced,
        comment="The map. The value is in stored, to the byte. In value it is as jsonb, for queries: raw bytes have no"
        " such form, and where is_lossy is true it is only an approximation, as of 1e22, -0.0 and U+0000.",
        postgresql_with={"fillfactor": 80},
        sqlite_with_rowid=False,
    )
    # With the family, because receipts and the other families end in different ways: a search for the ones steps over
    # none of the others.
    expires, due = entries.c.expires_ms.is_not(None), ("namespace", "family", "expires_ms")
    sa.Index("limpet_due", *[entries.c[name] for name in due], postgresql_where=expires, sqlite_where=expires)

    sa.Table(
        "limpet_changes",
        metadata,
        _name("namespace", primary_key=True),
        _number("revision", primary_key=True),
        _number("last_revision"),
        _number("at_ms"),
        _text("op"),
        _text("family"),
        _text("cause", nullable=True),
        _number("size_bytes"),
        _name("key"),
        _text("kind", nullable=True),
        sa.Column("value", sa.LargeBinary),
        _number("version"),
        _number("entry_revision"),
        _number("created_revision"),
        _number("created_ms"),
        _number("updated_ms"),
        _number("expires_ms", nullable=True),
        _text("meta", nullable=True),
        *[_number(name, nullable=True) for name in ([] if on_postgres else SQLITE_TOTALS)],
        comment="The log. A value is stored to the byte.",
        sqlite_with_rowid=False,
    )
    return metadata


def _name(name: str, *, primary_key: bool = False) -> sa.Column[str]:
    return sa.Column(name, _NAME, nullable=False, primary_key=primary_key)


def _text(name: str, *, nullable: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=nullable)


def _number(name: str, *, nullable: bool = False, primary_key: bool = False) -> sa.Column[int]:
    return sa.Column(name, _NUMBER, nullable=nullable, primary_key=primary_key)
