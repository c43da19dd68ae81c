"""What is well with a store, and what is not.

The file is looked at first, without opening the store and without changing anything: a file that is
damaged, or that is not ours, is to be told and not to be mended or made ours by looking. The store
is opened last, if nothing speaks against it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, NamedTuple
from urllib.parse import quote

import limpet.sync
from limpet.cli.arguments import Setup
from limpet.cli.output import span
from limpet.engines.sqlite.rows import FOREIGN_TABLES
from limpet.errors import Corrupt, LimpetError
from limpet.model import Status, Traits, Window
from limpet.schema import REVISION, VERSION_TABLE, describe_taken, is_behind

Level = Literal["ok", "warn", "bad"]

CLOCK_S_MAX: Final = 1.0
DISK_BYTES_MIN: Final = 64_000_000
SAMPLE: Final = 500
SWEEP_S_MAX: Final = 10.0
TRIM_S_MAX: Final = 60.0
WAL_BYTES_MAX: Final = 64_000_000

_DECISIVE: Final = ("file", "schema", "integrity")
_STAYS_OPEN: Final = "Nobody keeps the store open: a program that does, or 'limpet watch', clears it up in seconds."
_RESTORE: Final = "Stop the writers, and put a backup in its place: 'limpet restore FILE' keeps what is there."
_SURVIVES: Final = {
    "none": "nothing: it ends with the process",
    "seconds": "a crash of the server only once it is some seconds old",
    "process": "a killed process, but not always a power cut",
    "disk": "a power cut",
    "quorum": "a lost machine",
}

_TALLIES: Final = """
    SELECT namespace, keys, log_changes, log_bytes, revision,
           (SELECT count(*) FROM limpet_entries e WHERE e.namespace = n.namespace AND family = 'data'),
           (SELECT count(*) FROM limpet_changes c WHERE c.namespace = n.namespace),
           (SELECT max(revision) FROM limpet_entries e WHERE e.namespace = n.namespace
             AND family NOT IN ('receipt', 'superseded')),
           (SELECT min(at_ms) FROM limpet_changes c WHERE c.namespace = n.namespace)
      FROM limpet_namespaces n ORDER BY namespace"""
_UNREADABLE: Final = """
    SELECT count(*) FROM limpet_entries WHERE kind IN ('json', 'record') AND NOT json_valid(CAST(value AS TEXT))"""
_OVERDUE: Final = """
    SELECT count(*), min(expires_ms) FROM limpet_entries
     WHERE family NOT IN ('receipt', 'superseded') AND expires_ms <= ?"""


class Finding(NamedTuple):
    """What one check found. ``warn`` wants an eye, ``bad`` a hand."""

    check: str
    level: Level
    finding: str
    advice: str | None = None


def examine(setup: Setup) -> Iterator[Finding]:
    """Look at a store from the outside in. What is bad ends the look where going on could do harm."""
    try:
        file = setup.file
    except LimpetError as error:
        yield Finding("url", "bad", str(error))
        return
    if file is not None:
        is_ours = True
        for finding in _examine_file(setup, file):
            yield finding
            is_ours = is_ours and not (finding.level == "bad" and finding.check in _DECISIVE)
        if not is_ours:
            return
    yield from _examine_store(setup)


# The file ---------------------------------------------------------------------


def _examine_file(setup: Setup, file: Path) -> Iterator[Finding]:
    if not file.is_file():
        problem = "is not a file" if file.exists() else "does not exist"
        yield Finding(
            "file", "bad", f"{file} {problem}{setup.why}", "Name the store by --url or LIMPET_URL; a write makes one."
        )
        return
    yield Finding("file", "ok", f"{file} has {file.stat().st_size:,} bytes")
    yield _is_writable(file)
    yield _has_room(file)
    # Read-only by name, so that looking changes nothing.
    try:
        with contextlib.closing(
            sqlite3.connect(f"file:{quote(str(file))}?mode=ro", uri=True, isolation_level=None)
        ) as database:
            yield from _examine_database(file, database)
    except sqlite3.OperationalError as error:
        yield Finding("integrity", "bad", f"{file} cannot be read now: {error}", "Mind its owner, mode and folder.")
    except sqlite3.DatabaseError as error:
        yield Finding("integrity", "bad", f"{file} cannot be read: {error}", _RESTORE)


def _is_writable(file: Path) -> Finding:
    # Beside the file SQLite makes its -wal and -shm.
    for place in (file, file.absolute().parent):
        if not os.access(place, os.W_OK):
            return Finding("writable", "bad", f"{place} may not be written by this user", "Mind its owner and mode.")
    return Finding("writable", "ok", "the file and its folder may be written by this user")


def _has_room(file: Path) -> Finding:
    free_bytes = shutil.disk_usage(file.absolute().parent).free
    found = f"{free_bytes:,} bytes are free on its disk"
    if free_bytes < DISK_BYTES_MIN:
        return Finding("disk", "warn", found, "A full disk refuses writes. Make room.")
    return Finding("disk", "ok", found)


def _examine_database(file: Path, database: sqlite3.Connection) -> Iterator[Finding]:
    database.text_factory = lambda text: text.decode(errors="replace")
    schema = _schema(file, database)
    yield schema
    if schema.level == "bad":
        return
    yield _integrity(database)
    yield _journal(file, database)
    # One moment for all that is compared.
    database.execute("BEGIN")
    yield from _tallies(database)
    yield _values(database)
    yield _expired(database)


def _schema(file: Path, database: sqlite3.Connection) -> Finding:
    if database.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (VERSION_TABLE,)).fetchone() is None:
        return Finding(
            "schema",
            "bad",
            f"{file} is a SQLite file and has no Limpet store in it",
            "Is it the right file? A write would add Limpet's tables to it.",
        )
    row = database.execute(f"SELECT version_num FROM {VERSION_TABLE}").fetchone()  # noqa: S608 - a name of ours
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


def _integrity(database: sqlite3.Connection) -> Finding:
    problems = [row[0] for row in database.execute("PRAGMA integrity_check(3)")]
    if problems == ["ok"]:
        return Finding("integrity", "ok", "SQLite finds no damage in the file")
    return Finding("integrity", "bad", f"SQLite finds damage: {'; '.join(map(str, problems))}", _RESTORE)


def _journal(file: Path, database: sqlite3.Connection) -> Finding:
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
        return Finding("journal", "warn", found, "A reader that never ends keeps it from being emptied. Find it.")
    return Finding("journal", "ok", found)


def _tallies(database: sqlite3.Connection) -> Iterator[Finding]:
    """What each namespace says it holds against what it holds, and its log against what should be kept."""
    names: list[str] = []
    wrong: list[str] = []
    long: list[str] = []
    window, now_ms = Window(), time.time() * 1000
    rows = database.execute(_TALLIES).fetchall()
    for namespace, keys, log_changes, log_bytes, revision, keys_found, changes_found, newest, oldest_ms in rows:
        names.append(f"{namespace} ({keys_found:,} keys)")
        if (keys, log_changes) != (keys_found, changes_found) or (newest or 0) > revision:
            wrong.append(namespace)
        age_s = 0.0 if oldest_ms is None else (now_ms - oldest_ms) / 1000
        if (
            log_changes > window.changes or log_bytes > window.size_bytes or age_s > window.age_ms / 1000 + TRIM_S_MAX
        ) and age_s > window.age_ms_min / 1000 + TRIM_S_MAX:
            long.append(f"{namespace} ({log_changes:,} changes, {log_bytes:,} bytes, back to {span(age_s)} ago)")
    yield Finding("namespaces", "ok", ", ".join(names) or "nothing was written yet")
    if wrong:
        yield Finding("counts", "bad", f"the counts of {', '.join(wrong)} do not match its rows", _RESTORE)
    else:
        yield Finding("counts", "ok", "the counts of every namespace match its rows")
    if long:
        yield Finding("log", "warn", f"the log is longer than it need be: {', '.join(long)}", _STAYS_OPEN)
    else:
        changes, size_bytes = sum(row[2] for row in rows), sum(row[3] for row in rows)
        yield Finding("log", "ok", f"the log has {changes:,} changes of {size_bytes:,} bytes")


def _values(database: sqlite3.Connection) -> Finding:
    (unreadable,) = database.execute(_UNREADABLE).fetchone()
    if unreadable:
        return Finding("values", "bad", f"{unreadable:,} values cannot be read", "Delete or restore those keys.")
    return Finding("values", "ok", "every value can be read")


def _expired(database: sqlite3.Connection) -> Finding:
    now_ms = time.time() * 1000
    count, earliest_ms = database.execute(_OVERDUE, (now_ms - SWEEP_S_MAX * 1000,)).fetchone()
    if count:
        since = span((now_ms - earliest_ms) / 1000)
        found = f"{count:,} entries have expired, the first {since} ago, and wait to be swept; reads do not see them"
        return Finding("expired", "warn", found, _STAYS_OPEN)
    return Finding("expired", "ok", "nothing that has expired waits to be swept")


# The store --------------------------------------------------------------------


def _encryption(store: limpet.sync.Store) -> Finding:
    """Whether what is there opens with the keys that are here. A page tells: keys are changed all at once."""
    if not store.traits.encrypted:
        return Finding("encryption", "ok", "values are not encrypted")
    try:
        looked_at = sum(1 for _ in store.scan(limit=SAMPLE))
    except Corrupt as error:
        return Finding("encryption", "bad", str(error), "Give it the keys that it was written with.")
    return Finding("encryption", "ok", f"values are encrypted, and {looked_at:,} that were looked at could be opened")


def _examine_store(setup: Setup) -> Iterator[Finding]:
    began = time.perf_counter()
    try:
        with setup.open() as store:
            traits, status = store.traits, store.status()
            encryption = _encryption(store)
    except LimpetError as error:
        yield Finding("open", "bad", str(error))
        return
    yield Finding("open", "ok", f"opened {setup.shown_url} in {(time.perf_counter() - began) * 1000:.0f} ms")
    level: Level = "warn" if traits.durability in ("none", "seconds") else "ok"
    yield Finding("durability", level, f"an acknowledged write survives {_SURVIVES[traits.durability]}")
    yield encryption
    # Only engines with tables have names that others can have.
    taken: tuple[str, ...] | None = getattr(store._twin._session.engine, "taken", None)
    if taken == ():
        yield Finding("names", "ok", "no other program has the name of one of Limpet's views")
    for name in taken or ():
        yield Finding("names", "warn", describe_taken(name), "Rename it, or give Limpet a place of its own.")
    yield _clock(status, traits)


def _clock(status: Status, traits: Traits) -> Finding:
    """Whether time stands still, or goes by another clock than this host's."""
    behind_s, ahead_s = status.behind_ms / 1000, status.now_ms / 1000 - time.time()
    if behind_s > CLOCK_S_MAX:
        found = (
            f"time stands still for {span(behind_s)}: the {traits.clock}'s clock is so much behind the latest time "
            "that was recorded in this namespace"
        )
        advice = (
            "The clock was set back. Until it has caught up, nothing expires and no lock runs out. Set it right if it "
            "is wrong; if it is right, wait, or delete the key or release the lock that cannot wait."
        )
        return Finding("clock", "warn", found, advice)
    if abs(ahead_s) > CLOCK_S_MAX:
        found = f"the store's time is {span(abs(ahead_s))} {'ahead of' if ahead_s > 0 else 'behind'} this host's clock"
        return Finding("clock", "warn", found, "What expires goes by the store's time. One of the two clocks is wrong.")
    return Finding("clock", "ok", "the store's time and this host's clock agree")
