"""Checks of a SQLite file from the outside, read-only: the store is not opened, and nothing is changed.

A damaged file, or one of another program, is reported; checking it must not repair it or add our tables to it.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import quote

from limpet.clock import format_duration
from limpet.engine import Finding
from limpet.engines.sqlite.rows import FOREIGN_TABLES
from limpet.model import Window
from limpet.schema import REVISION, VERSION_TABLE, is_behind

__all__ = ["examine"]

SWEEP_S_MAX: Final = 10.0
TRIM_S_MAX: Final = 60.0
WAL_BYTES_MAX: Final = 64_000_000

_KEEP_OPEN: Final = (
    "No process keeps the store open and cleans it up: a program that does, or 'limpet watch', clears it in seconds."
)
_RESTORE: Final = "Stop the writers, and restore a backup: 'limpet restore FILE' keeps the present file beside it."

_COUNTERS: Final = """
    SELECT namespace, keys, log_changes, log_bytes, revision,
           (SELECT count(*) FROM limpet_entries e WHERE e.namespace = n.namespace AND family = 'data'),
           (SELECT count(*) FROM limpet_changes c WHERE c.namespace = n.namespace),
           (SELECT max(revision) FROM limpet_entries e WHERE e.namespace = n.namespace
             AND family NOT IN ('receipt', 'superseded')),
           (SELECT min(at_ms) FROM limpet_changes c WHERE c.namespace = n.namespace)
      FROM limpet_counters n ORDER BY namespace"""
_UNREADABLE: Final = """
    SELECT count(*) FROM limpet_entries WHERE kind IN ('json', 'record') AND NOT json_valid(CAST(value AS TEXT))"""
_OVERDUE: Final = """
    SELECT count(*), min(expires_ms) FROM limpet_entries
     WHERE family NOT IN ('receipt', 'superseded') AND expires_ms <= ?"""


def examine(file: Path) -> Iterator[Finding]:
    """Check a file. The first bad finding that makes the others meaningless is the last."""
    # Open it read-only, so that the check changes nothing.
    try:
        with contextlib.closing(
            sqlite3.connect(f"file:{quote(str(file))}?mode=ro", uri=True, isolation_level=None)
        ) as database:
            yield from _examine_database(file, database)
    except sqlite3.OperationalError as error:
        yield Finding(
            "integrity", "bad", f"{file} cannot be read now: {error}", "Check the owner and mode of it and its folder."
        )
    except sqlite3.DatabaseError as error:
        yield Finding("integrity", "bad", f"{file} cannot be read: {error}", _RESTORE)


def _examine_database(file: Path, database: sqlite3.Connection) -> Iterator[Finding]:
    database.text_factory = lambda text: text.decode(errors="replace")
    schema = _check_schema(file, database)
    yield schema
    if schema.level == "bad":
        return
    yield _check_integrity(database)
    yield _check_journal(file, database)
    # One transaction, so that counters and rows are of one moment.
    database.execute("BEGIN")
    yield from _check_namespaces(database)
    yield _check_values(database)
    yield _check_expired(database)


def _check_schema(file: Path, database: sqlite3.Connection) -> Finding:
    if database.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (VERSION_TABLE,)).fetchone() is None:
        return Finding(
            "schema",
            "bad",
            f"{file} is a SQLite file without a Limpet store",
            "Check that it is the right file: a write would add Limpet's tables to it.",
        )
    row = database.execute(f"SELECT version_num FROM {VERSION_TABLE}").fetchone()
    found = "no revision" if row is None else f"revision {row[0]}"
    if row is None or row[0] != REVISION:
        can_go_on = row is not None and is_behind(row[0])
        return Finding(
            "schema",
            "bad",
            f"the schema has {found}, and this release needs revision {REVISION}",
            "'limpet migrate up' brings it there." if can_go_on else "Use the release of Limpet that wrote it.",
        )
    return Finding("schema", "ok", f"the schema has {found}, as this release needs")


def _check_integrity(database: sqlite3.Connection) -> Finding:
    problems = [row[0] for row in database.execute("PRAGMA integrity_check(3)")]
    if problems == ["ok"]:
        return Finding("integrity", "ok", "SQLite finds no damage in the file")
    return Finding("integrity", "bad", f"SQLite finds damage: {'; '.join(map(str, problems))}", _RESTORE)


def _check_journal(file: Path, database: sqlite3.Connection) -> Finding:
    (mode,) = database.execute("PRAGMA journal_mode").fetchone()
    if mode != "wal":
        if database.execute(FOREIGN_TABLES).fetchone() is not None:
            found = f"the journal mode is {mode}, and the file holds tables that are not Limpet's"
            return Finding("journal", "warn", found, "Limpet needs wal: open it with ?journal=wal to allow the change.")
        return Finding("journal", "warn", f"the journal mode is {mode}", "The next write through Limpet makes it wal.")
    wal = Path(f"{file}-wal")
    size_bytes = wal.stat().st_size if wal.exists() else 0
    found = f"the journal mode is wal, and its file has {size_bytes:,} bytes"
    if size_bytes > WAL_BYTES_MAX:
        return Finding(
            "journal",
            "warn",
            found,
            "A reader that never ends keeps SQLite from emptying it: end it.",
        )
    return Finding("journal", "ok", found)


def _check_namespaces(database: sqlite3.Connection) -> Iterator[Finding]:
    """Compare the counters of each namespace with its rows, and the length of its log with what should be kept."""
    names: list[str] = []
    wrong: list[str] = []
    long: list[str] = []
    window, now_ms = Window(), time.time() * 1000
    rows = database.execute(_COUNTERS).fetchall()
    for namespace, keys, log_changes, log_bytes, revision, keys_found, changes_found, newest, oldest_ms in rows:
        names.append(f"{namespace} ({keys_found:,} keys)")
        if (keys, log_changes) != (keys_found, changes_found) or (newest or 0) > revision:
            wrong.append(namespace)
        age_s = 0.0 if oldest_ms is None else (now_ms - oldest_ms) / 1000
        if (
            log_changes > window.changes or log_bytes > window.size_bytes or age_s > window.age_ms / 1000 + TRIM_S_MAX
        ) and age_s > window.age_ms_min / 1000 + TRIM_S_MAX:
            long.append(
                f"{namespace} ({log_changes:,} changes, {log_bytes:,} bytes, back to {format_duration(age_s)} ago)"
            )
    yield Finding("namespaces", "ok", ", ".join(names) or "nothing was written yet")
    if wrong:
        yield Finding("counts", "bad", f"the counts of {', '.join(wrong)} do not match its rows", _RESTORE)
    else:
        yield Finding("counts", "ok", "the counts of every namespace match its rows")
    if long:
        yield Finding("log", "warn", f"the log is longer than needed: {', '.join(long)}", _KEEP_OPEN)
    else:
        changes, size_bytes = sum(row[2] for row in rows), sum(row[3] for row in rows)
        yield Finding("log", "ok", f"the log has {changes:,} changes of {size_bytes:,} bytes")


def _check_values(database: sqlite3.Connection) -> Finding:
    (unreadable,) = database.execute(_UNREADABLE).fetchone()
    if unreadable:
        return Finding("values", "bad", f"{unreadable:,} values cannot be read", "Delete or restore those keys.")
    return Finding("values", "ok", "every value can be read")


def _check_expired(database: sqlite3.Connection) -> Finding:
    now_ms = time.time() * 1000
    count, earliest_ms = database.execute(_OVERDUE, (now_ms - SWEEP_S_MAX * 1000,)).fetchone()
    if count:
        since = format_duration((now_ms - earliest_ms) / 1000)
        found = f"{count:,} entries have expired, the first {since} ago, and wait to be swept; reads do not see them"
        return Finding("expired", "warn", found, _KEEP_OPEN)
    return Finding("expired", "ok", "nothing that has expired waits to be swept")
