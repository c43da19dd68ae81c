"""Helpers of the tests of the cache: reading its state, and writing to the file behind its back."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import limpet
import limpet.sync
from limpet.engines.sqlite import cache as sqlite_cache
from limpet.engines.sqlite.cache import WalHeader
from limpet.engines.sqlite.engine import SqliteEngine
from limpet.engines.sqlite.rows import READ, NamespaceCounters, to_entry
from tests.processes import PATIENCE_S
from tests.sqlite.support import stored

LONG = int(os.environ.get("LIMPET_CACHE_LONG", "1"))

CACHED, UNCACHED = "cached", "uncached"


def engine_of(store: limpet.sync.Store) -> Any:
    return store._twin._session.engine


def disable_cache(patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """Make the header unreadable, as where the shared memory cannot be mapped."""
    patch(WalHeader, "join", classmethod(lambda cls, path: None))


def by_hand(path: Path, *, raw: bool = False) -> sqlite3.Connection:
    """A connection that knows nothing of Limpet, as an operator has it; raw, with text as bytes."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5)
    if raw:
        connection.text_factory = bytes
    return connection


def in_thread(work: Callable[[], object]) -> None:
    """Run some work in a new thread, to its end."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def set_by_hand(connection: sqlite3.Connection, key: str, number: int) -> None:
    changed = connection.execute("UPDATE limpet_entries SET value = ? WHERE key = ?", (str(number), key))
    assert changed.rowcount == 1


def keeps(engine: SqliteEngine, key: str, namespace: str = "default") -> bool:
    """Whether the engine would read this from the cache, if no process commits before."""
    cache = engine._cached.cache
    assert cache is not None, "there is no cache, so this test proves nothing"
    return (namespace, "data", key) in cache.entries


async def number(engine: SqliteEngine, key: str, namespace: str = "default") -> int | None:
    """The number under a key, read alone, as only single keys are kept."""
    found = await stored(engine, [key], namespace)
    return int(found[key]) if key in found else None


def descriptors() -> int:
    return len(os.listdir("/dev/fd"))


_OUTSIDE = """
import json, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=0.05)
print(json.dumps([connection.execute(sql).fetchone() for sql in sys.argv[2:]]))
connection.close()
"""


def outside(path: Path, *statements: str) -> list[Any]:
    """Run statements in a process without Limpet, which opens the file and closes it again."""
    done = subprocess.run(
        [sys.executable, "-c", _OUTSIDE, str(path), *statements], capture_output=True, text=True, check=True
    )
    answers: list[Any] = json.loads(done.stdout)
    return answers


def set_key(number: int) -> str:
    return f"UPDATE limpet_entries SET value = '{number:d}' WHERE key = 'key'"


def check_counters(counters: Any, connection: sqlite3.Connection, namespace: str) -> None:
    """The counters of a namespace are what one counts in the file. Its time cannot be counted."""
    found = NamespaceCounters.load(connection, namespace)  # type: ignore[arg-type]
    assert (counters.revision, counters.floor) == (found.revision, found.floor)
    (keys,) = connection.execute(
        "SELECT count(*) FROM limpet_entries WHERE namespace = ? AND family = 'data'", (namespace,)
    ).fetchone()
    log_changes, log_bytes, revision = connection.execute(
        "SELECT count(*), coalesce(sum(size_bytes), 0), max(revision) FROM limpet_changes WHERE namespace = ?",
        (namespace,),
    ).fetchone()
    assert (counters.keys, counters.log_changes, counters.log_bytes) == (keys, log_changes, log_bytes)
    assert counters.size_bytes == found.size_bytes
    assert counters.revision >= (revision or 0)


def check_cache(engine: SqliteEngine, connection: sqlite3.Connection) -> bool:
    """What is kept is within its bounds, and is what the file holds. Whether anything is kept."""
    cache, wal = engine._cached.cache, engine._cached.wal
    assert cache is not None
    assert wal is not None
    assert len(cache.entries) <= sqlite_cache.CACHED_MAX
    assert (
        max((entry.size_bytes for entry in cache.entries.values() if entry), default=0) <= sqlite_cache.CACHED_BYTES_MAX
    )
    if cache.header != wal.read():
        # This cache is out of date, and will not be read again.
        return False
    for entry_id, entry in cache.entries.items():
        row = connection.execute(READ, entry_id).fetchone()
        assert entry == (None if row is None else to_entry(row)), entry_id
    for namespace, counters in cache.counters.items():
        check_counters(counters, connection, namespace)
    return bool(cache.entries)
