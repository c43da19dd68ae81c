"""The statements that the SQLite engine runs, and the rows of its tables as entries and changes.

Connections return text as bytes, so that a JSON value is not decoded only to be encoded again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from limpet.commit.group import Counters
from limpet.engines.sql_columns import SWEPT, as_stored, as_text
from limpet.engines.sql_indexes import literal
from limpet.keys import Span
from limpet.model import BEGINNING, Change, Entry, fingerprint
from limpet.schema import VERSION_TABLE

if TYPE_CHECKING:
    from limpet.engines.sqlite.connections import Connection

PAGE_BYTES_MAX: Final = 4_000_000
"""A page ends behind the entry or change with which its values exceed this size."""

# Entries ------------------------------------------------------------------------

_COLUMNS: Final = "key, kind, value, version, revision, created_revision, created_ms, updated_ms, expires_ms, meta"
READ: Final = f"SELECT {_COLUMNS} FROM limpet_entries WHERE namespace = ? AND family = ? AND key = ?"
_READ_SEVERAL: Final = f"SELECT {_COLUMNS} FROM limpet_entries WHERE namespace = ? AND family = ? AND key IN"
_SCAN: Final = (
    "SELECT {columns} FROM limpet_entries WHERE namespace = ? AND family = ? AND key >= ? AND key < ?"
    " AND (expires_ms IS NULL OR expires_ms > ?) ORDER BY key{order} LIMIT ?"
)
_WITHOUT_VALUE: Final = _COLUMNS.replace("kind, value", "NULL, NULL")
SCANS: Final = {
    (values, reverse): _SCAN.format(columns=_COLUMNS if values else _WITHOUT_VALUE, order=" DESC" if reverse else "")
    for values in (False, True)
    for reverse in (False, True)
}
"""The statement of a scan: with values or without, and in which order."""
_IN_SPAN: Final = "namespace = ? AND family = ? AND key >= ? AND key < ?"
# Without the condition on the expiry, which stands behind the value, the count reads no value.
COUNT: Final = (
    f"SELECT (SELECT count(*) FROM limpet_entries WHERE {_IN_SPAN})"
    f" - (SELECT count(*) FROM limpet_entries INDEXED BY limpet_due WHERE {_IN_SPAN} AND expires_ms <= ?)"
)
NAMESPACES: Final = "SELECT namespace FROM limpet_namespaces WHERE revision > 0"
WRITE: Final = (
    f"INSERT INTO limpet_entries (namespace, family, {_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
    " ON CONFLICT (namespace, family, key) DO UPDATE SET kind = excluded.kind, value = excluded.value,"
    " version = excluded.version, revision = excluded.revision, created_revision = excluded.created_revision,"
    " created_ms = excluded.created_ms, updated_ms = excluded.updated_ms, expires_ms = excluded.expires_ms,"
    " meta = excluded.meta"
)
ERASE: Final = "DELETE FROM limpet_entries WHERE namespace = ? AND family = ? AND key = ?"
# A part for each family, as the index has them. So no receipt is stepped over, and no family read beyond the limit.
DUE: Final = (
    "WITH wanted (namespace, now_ms, count) AS (SELECT ?, ?, ?) SELECT key, revision, family FROM ("
    + " UNION ALL ".join(
        "SELECT * FROM (SELECT key, revision, family, expires_ms FROM limpet_entries"
        f" WHERE namespace = (SELECT namespace FROM wanted) AND family = '{family}'"
        " AND expires_ms <= (SELECT now_ms FROM wanted) ORDER BY expires_ms LIMIT (SELECT count FROM wanted))"
        for family in SWEPT
    )
    + ") ORDER BY expires_ms LIMIT (SELECT count FROM wanted)"
)

# Receipts, and marks of superseded requests, which no caller reads.
_EXPIRED_RECEIPTS: Final = (
    "FROM limpet_entries WHERE namespace = ? AND expires_ms <= ? AND family IN ('receipt', 'superseded')"
)
HAS_EXPIRED_RECEIPTS: Final = f"SELECT 1 {_EXPIRED_RECEIPTS}"
DROP_EXPIRED_RECEIPTS: Final = f"DELETE {_EXPIRED_RECEIPTS}"

# The log ------------------------------------------------------------------------

_TOTALS: Final = ("total_keys", "total_bytes", "logged_changes", "logged_bytes")
_LOG_COLUMNS: Final = "op, revision, last_revision, at_ms, cause, family, " + _COLUMNS.replace(
    " revision,", " entry_revision,"
)
_APPEND: Final = "INSERT INTO limpet_changes (namespace, size_bytes, {columns}) VALUES ({marks})"
APPEND_TO_LOG: Final = _APPEND.format(columns=_LOG_COLUMNS, marks=", ".join("?" * 18))
APPEND_LAST: Final = _APPEND.format(columns=f"{_LOG_COLUMNS}, {', '.join(_TOTALS)}", marks=", ".join("?" * 22))
"""Appends the last change of a commit, which has the counters as well."""
CHANGES: Final = (
    f"SELECT {_LOG_COLUMNS} FROM limpet_changes WHERE namespace = ? AND revision > ? ORDER BY revision LIMIT ?"
)
CHANGES_IN_SPAN: Final = (
    f"SELECT {_LOG_COLUMNS} FROM limpet_changes WHERE namespace = ? AND revision > ? AND family = 'data'"
    " AND key >= ? AND key < ? ORDER BY revision LIMIT ?"
)
CHANGES_OF_REQUEST: Final = (
    f"SELECT {_LOG_COLUMNS} FROM limpet_changes WHERE namespace = ? AND revision > ? AND cause = ?"
)
LAST_CHANGE_UP_TO: Final = (
    f"SELECT {_LOG_COLUMNS.replace('kind, value', 'NULL, NULL')} FROM limpet_changes"
    " WHERE namespace = ? AND revision <= ? ORDER BY revision DESC LIMIT 1"
)
OLDEST_CHANGES: Final = (
    "SELECT revision, at_ms, size_bytes FROM limpet_changes WHERE namespace = ? ORDER BY revision LIMIT ?"
)
DROP_CHANGES: Final = "DELETE FROM limpet_changes WHERE namespace = ? AND revision <= ?"

# Namespaces and the store -------------------------------------------------------

COUNTERS: Final = (
    "SELECT revision, at_ms, keys, size_bytes, log_changes, log_bytes, floor, floor_print, dropped_changes,"
    " dropped_bytes FROM limpet_counters WHERE namespace = ?"
)
SAVE_COUNTERS: Final = "INSERT OR REPLACE INTO limpet_namespaces VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
RECORDED_MS: Final = "SELECT at_ms FROM limpet_counters WHERE namespace = ?"
REVISIONS: Final = (
    "SELECT namespace, revision, at_ms FROM limpet_counters WHERE namespace IN (SELECT value FROM json_each(?))"
)
SKIP_REVISIONS: Final = (
    "UPDATE limpet_namespaces AS n"
    " SET revision = ? + (SELECT c.revision FROM limpet_counters AS c WHERE c.namespace = n.namespace)"
)
OUR_TABLES: Final = f"SELECT name FROM sqlite_master WHERE name IN ('limpet_store', '{VERSION_TABLE}')"
FOREIGN_TABLES: Final = (
    "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name NOT GLOB 'limpet_*' AND name NOT GLOB 'sqlite_*'"
)
SCHEMA_REVISION: Final = f"SELECT version_num FROM {VERSION_TABLE}"
STORE: Final = "SELECT id, epoch FROM limpet_store"
RAISE_EPOCH: Final = "UPDATE limpet_store SET epoch = epoch + 1"
INDEX_NAMES: Final = "SELECT name FROM sqlite_master WHERE type = 'index'"


@functools.cache
def read_several(count: int) -> str:
    """The statement that reads this many keys of one family."""
    return f"{_READ_SEVERAL} ({', '.join('?' * count)})"


def indexed(namespace: str) -> str:
    """The condition for entries of a namespace that can have fields. An index and its searches must use the same."""
    return f"namespace = {literal(namespace)} AND family = 'data' AND kind IN ('json', 'record')"


def upper_bound(span: Span) -> str | bytes:
    """The upper end of a span for SQL, where every text is less than every blob."""
    return b"" if span.stop is None else span.stop


# Rows ---------------------------------------------------------------------------


class NamespaceCounters(Counters):
    """The counters of a namespace, and where its log begins.

    The last change of each commit has them. The row of the namespace has only what such a change cannot say.

    Attributes:
        has_row: Whether the namespace has its row, which its first commit writes.
        dropped_changes: Changes that are no longer in the log.
        dropped_bytes: Their keys and values together.
    """

    namespace: str = ""
    floor: int = 0
    floor_print: str | None = None
    dropped_changes: int = 0
    dropped_bytes: int = 0
    has_row: bool = False

    @classmethod
    def load(cls, connection: Connection, namespace: str) -> NamespaceCounters:
        """Read the counters; all zero where nothing was written yet."""
        row = connection.execute(COUNTERS, (namespace,)).fetchone()
        if row is None:
            return cls(namespace=namespace)
        revision, at_ms, keys, size_bytes, log_changes, log_bytes, floor, floor_print, *dropped = row
        dropped_changes, dropped_bytes = dropped
        return cls(
            revision,
            at_ms,
            keys,
            size_bytes,
            log_changes,
            log_bytes,
            namespace,
            floor,
            floor_print.decode() if floor_print else None,
            dropped_changes,
            dropped_bytes,
            has_row=True,
        )

    def save(self, connection: Connection) -> None:
        """Write the row of the namespace."""
        row = (self.revision, self.floor, self.at_ms, self.keys, self.size_bytes)
        dropped = (self.dropped_changes, self.dropped_bytes)
        connection.execute(SAVE_COUNTERS, (self.namespace, *row, *dropped, self.floor_print))
        self.has_row = True

    def drop(self, changes: int, size_bytes: int) -> None:
        """Count changes that are dropped from the log."""
        self.log_changes -= changes
        self.log_bytes -= size_bytes
        self.dropped_changes += changes
        self.dropped_bytes += size_bytes

    def totals(self) -> tuple[int, int, int, int]:
        """What the last change of a commit says of the counters."""
        logged_changes, logged_bytes = self.dropped_changes + self.log_changes, self.dropped_bytes + self.log_bytes
        return self.keys, self.size_bytes, logged_changes, logged_bytes

    def fingerprint_at(self, connection: Connection, revision: int) -> str:
        """The fingerprint of the change at a revision, or of the last one before it."""
        row = connection.execute(LAST_CHANGE_UP_TO, (self.namespace, revision)).fetchone()
        return self.floor_print or BEGINNING if row is None else fingerprint(to_change(row))


def to_entry(row: Sequence[Any]) -> Entry:
    """Decode a row of entries."""
    key, kind, value, version, revision, created_revision, created_ms, updated_ms, expires_ms, meta = row
    return Entry(
        key.decode(),
        value if kind == b"json" else None if kind is None else as_stored(kind.decode(), value),
        version,
        revision,
        created_revision,
        created_ms,
        updated_ms,
        expires_ms,
        meta,
    )


def entry_row(entry: Entry) -> tuple[Any, ...]:
    """Encode an entry, without its namespace and family."""
    stored = entry.stored
    kind, value = ("json", stored.decode()) if type(stored) is bytes and stored[0] else as_text(stored)
    return (
        entry.key,
        kind,
        value,
        entry.version,
        entry.revision,
        entry.created_revision,
        entry.created_ms,
        entry.updated_ms,
        entry.expires_ms,
        None if entry.meta_json is None else entry.meta_json.decode(),
    )


def to_change(row: Sequence[Any]) -> Change:
    """Decode a row of the log."""
    op, revision, last_revision, at_ms, cause, family, *entry = row
    cause = None if cause is None else cause.decode()
    return Change(op.decode(), to_entry(entry), revision, last_revision, at_ms, cause, family.decode())


def change_row(change: Change, row: tuple[Any, ...]) -> tuple[Any, ...]:
    """Encode a change whose entry is already encoded, without its namespace and size."""
    if change.op == "touch":
        # A touch does not write the value, so the log does not repeat it.
        row = (row[0], None, None, *row[3:])
    return (change.op, change.revision, change.commit, change.at_ms, change.origin, change.family, *row)


def take_changes(rows: Iterable[Sequence[Any]], limit: int) -> tuple[list[Change], bool]:
    """The changes of one page, and whether a limit ended it rather than the end of the rows."""
    changes: list[Change] = []
    size_bytes = 0
    for row in rows:
        changes.append(to_change(row))
        size_bytes += changes[-1].entry.size_bytes
        if len(changes) == limit or size_bytes > PAGE_BYTES_MAX:
            return changes, True
    return changes, False
