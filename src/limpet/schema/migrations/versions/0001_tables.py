"""Revision 0001: the tables, and on PostgreSQL the functions that write them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from limpet.schema.migrate import on_postgres, run, schema_name

revision = "0001"
down_revision = None

_NAME = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_JSON = sa.LargeBinary().with_variant(postgresql.JSONB(), "postgresql")

_LOGGED = ("log_changes", "log_bytes")
_DROPPED = ("dropped_changes", "dropped_bytes")
_SQLITE_TOTALS = ("total_keys", "total_bytes", "logged_changes", "logged_bytes")

# The counters of a namespace as its last commit left them. The last row of its log has them, or while the log is empty
# the row of the namespace, which is written by its first commit, by a trim, and when revisions are skipped.
_SQLITE_COUNTERS = """CREATE VIEW limpet_counters AS
SELECT n.namespace, max(n.revision, ifnull(c.revision, 0)) AS revision, n.floor,
    max(n.at_ms, ifnull(c.at_ms, 0)) AS at_ms,
    ifnull(c.total_keys, n.keys) AS keys, ifnull(c.total_bytes, n.size_bytes) AS size_bytes,
    ifnull(c.logged_changes, n.dropped_changes) - n.dropped_changes AS log_changes,
    ifnull(c.logged_bytes, n.dropped_bytes) - n.dropped_bytes AS log_bytes,
    n.dropped_changes, n.dropped_bytes, n.floor_print
FROM limpet_namespaces AS n LEFT JOIN limpet_changes AS c ON c.namespace = n.namespace
    AND c.revision = (SELECT max(m.revision) FROM limpet_changes AS m WHERE m.namespace = n.namespace)"""

_FUNCTIONS = Path(__file__).with_name("0001_functions.sql")


def upgrade() -> None:
    """Make the tables and functions, and give the store its id."""
    schema = schema_name()
    op.create_table(
        "limpet_store",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("epoch", _NUMBER, nullable=False),
        comment="One row: the id and the epoch of this store.",
        schema=schema,
    )
    op.create_table(
        "limpet_namespaces",
        sa.Column("namespace", _NAME, nullable=False, primary_key=True),
        sa.Column("revision", _NUMBER, nullable=False),
        sa.Column("floor", _NUMBER, nullable=False),
        sa.Column("at_ms", _NUMBER, nullable=False),
        sa.Column("keys", _NUMBER, nullable=False),
        sa.Column("size_bytes", _NUMBER, nullable=False),
        *[sa.Column(name, _NUMBER, nullable=False) for name in (_LOGGED if on_postgres() else _DROPPED)],
        *([sa.Column("superseded", postgresql.JSONB())] if on_postgres() else []),
        sa.Column("floor_print", sa.Text),
        comment="One row for each namespace: its counters. A writer holds its lock.",
        schema=schema,
        postgresql_with={"fillfactor": 20},
        sqlite_with_rowid=False,
    )
    stored: list[sa.Column[Any]] = [
        sa.Column("stored", sa.LargeBinary, nullable=False),
        sa.Column("is_lossy", sa.Boolean),
        sa.Column("size_bytes", _NUMBER, nullable=False),
    ]
    # The size of the replaced value, to subtract from the counters of the namespace.
    replaced = sa.Column("replaced_bytes", _NUMBER, nullable=False, server_default="0")
    op.create_table(
        "limpet_entries",
        sa.Column("namespace", _NAME, nullable=False, primary_key=True),
        sa.Column("family", _NAME, nullable=False, primary_key=True),
        sa.Column("key", _NAME, nullable=False, primary_key=True),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("value", _JSON, nullable=on_postgres()),
        *(stored if on_postgres() else []),
        sa.Column("version", _NUMBER, nullable=False),
        sa.Column("revision", _NUMBER, nullable=False),
        sa.Column("created_revision", _NUMBER, nullable=False),
        sa.Column("created_ms", _NUMBER, nullable=False),
        sa.Column("updated_ms", _NUMBER, nullable=False),
        sa.Column("expires_ms", _NUMBER),
        sa.Column("meta", sa.Text),
        *([replaced] if on_postgres() else []),
        comment="The map. The value is in stored, to the byte. In value it is as jsonb, for queries: raw bytes have no"
        " such form, and where is_lossy is true it is only an approximation, as of 1e22, -0.0 and U+0000.",
        schema=schema,
        postgresql_with={"fillfactor": 80},
        sqlite_with_rowid=False,
    )
    op.create_index(
        "limpet_due",
        "limpet_entries",
        ["namespace", "family", "expires_ms"],
        schema=schema,
        postgresql_where=sa.text("expires_ms IS NOT NULL"),
        sqlite_where=sa.text("expires_ms IS NOT NULL"),
    )
    op.create_table(
        "limpet_changes",
        sa.Column("namespace", _NAME, nullable=False, primary_key=True),
        sa.Column("revision", _NUMBER, nullable=False, primary_key=True),
        sa.Column("last_revision", _NUMBER, nullable=False),
        sa.Column("at_ms", _NUMBER, nullable=False),
        sa.Column("op", sa.Text, nullable=False),
        sa.Column("family", sa.Text, nullable=False),
        sa.Column("cause", sa.Text),
        sa.Column("size_bytes", _NUMBER, nullable=False),
        sa.Column("key", _NAME, nullable=False),
        sa.Column("kind", sa.Text),
        sa.Column("value", sa.LargeBinary),
        sa.Column("version", _NUMBER, nullable=False),
        sa.Column("entry_revision", _NUMBER, nullable=False),
        sa.Column("created_revision", _NUMBER, nullable=False),
        sa.Column("created_ms", _NUMBER, nullable=False),
        sa.Column("updated_ms", _NUMBER, nullable=False),
        sa.Column("expires_ms", _NUMBER),
        sa.Column("meta", sa.Text),
        *[sa.Column(name, _NUMBER) for name in ([] if on_postgres() else _SQLITE_TOTALS)],
        comment="The log. A value is stored to the byte.",
        schema=schema,
        sqlite_with_rowid=False,
    )
    if not on_postgres():
        run(_SQLITE_COUNTERS)
        run("INSERT INTO limpet_store VALUES (lower(hex(randomblob(8))), 1)")
        return
    # A driver takes one statement at a time, and each of these begins with its comment.
    for function in re.split(r"\n\n(?=-- )", _FUNCTIONS.read_text(encoding="utf-8")):
        run(function.rstrip().removesuffix(";"))
    run("INSERT INTO {schema}.limpet_store VALUES (left(replace(gen_random_uuid()::text, '-', ''), 16), 1)")


def downgrade() -> None:
    """Remove the tables and functions, with everything that is stored."""
    schema = schema_name()
    if on_postgres():
        for function in ("put_one", "put", "apply", "time", "revision", "take", "notify", "stored", "now_ms"):
            run(f"DROP FUNCTION {{schema}}.limpet_{function}")
    else:
        run("DROP VIEW limpet_counters")
    for table in ("limpet_changes", "limpet_entries", "limpet_namespaces", "limpet_store"):
        op.drop_table(table, schema=schema)
