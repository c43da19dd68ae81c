"""Checkpoints beside the writer.

SQLite copies the pages of the write-ahead log into the file when the log has become long. By itself it does so in the
commit that made it long, and the callers of that commit wait for all of it: 10 ms in a small store, 30 in a large one.
Here a thread copies while commits go on. As long as they do, it would never reach the end of the log, so it keeps the
writer waiting for the last pages, which are few. The commit after that begins the log anew.

Readers are never kept waiting. While one of them still needs the log, it grows.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import TYPE_CHECKING, Final

from limpet.errors import Closed, LimpetError

if TYPE_CHECKING:
    from limpet.engines.sqlite.cache import CachedFile
    from limpet.engines.sqlite.connections import Connection, Connections

PAGES = 4_000
"""The length of the log from which on it is copied."""

PAGES_ALONE: Final = 12_000
"""The length from which on a commit copies it, if the thread does not manage to, or the length cannot be read."""

FEW_PAGES: Final = 200
PASSES: Final = 4
"""How often to copy beside the writer, until few pages are left."""

LOCK_S: Final = 0.05
"""How long to wait for the writer. A fork has its lock until no connection is in use, this one too."""

PAUSE_S: Final = 0.02
"""The time between two tries, for where a reader keeps the log in use."""


class Checkpoints:
    """The checkpoints of one engine."""

    def __init__(self, connections: Connections, cached: CachedFile, writer_lock: threading.Lock) -> None:
        self._connections = connections
        self._cached = cached
        self._writer_lock = writer_lock
        self._is_due = threading.Event()
        self._thread: threading.Thread | None = None
        self._ends = False

    def note_commit(self) -> None:
        """Start a checkpoint if the log has become long. The caller holds the writer's lock."""
        wal = self._cached.wal
        if wal is None or _page_count(wal.read()) < PAGES or self._ends:
            return
        self._is_due.set()
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="limpet-sqlite-checkpoint", daemon=True)
            # The commit is done, whatever happens here. Without a thread, one that makes the log too long copies it.
            with contextlib.suppress(RuntimeError):
                thread.start()
                self._thread = thread

    def stop(self) -> None:
        """End the thread. The connections are closed for new uses."""
        self._ends = True
        self._is_due.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while self._is_due.wait() and not self._ends:
            self._is_due.clear()
            try:
                self._checkpoint()
            except Closed:
                return
            except LimpetError:
                # Nothing is lost: the log stays as it is, and a later commit asks again.
                pass
            time.sleep(PAUSE_S)

    def _checkpoint(self) -> None:
        with self._connections.reading() as reader:
            for _ in range(PASSES):
                left = self._copy(reader)
                if left <= FEW_PAGES:
                    break
            if left > 0 and self._writer_lock.acquire(timeout=LOCK_S):
                try:
                    self._copy(reader)
                finally:
                    self._writer_lock.release()

    def _copy(self, reader: Connection) -> int:
        """Copy what no reader needs any more. Returns how many pages of the log are left; 0 if another process copies.

        Pages that came meanwhile are left, too.
        """
        busy, _, copied = reader.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        wal = self._cached.wal
        return 0 if busy or wal is None else _page_count(wal.read()) - int(copied)


def _page_count(header: bytes) -> int:
    """The pages in the log, from the header of its index."""
    return int.from_bytes(header[16:20], sys.byteorder)
