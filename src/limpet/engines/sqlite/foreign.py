"""Noticing the commits of other processes, for callers that wait for a change.

A commit of this engine wakes the waiters of its namespaces by itself. One of another process changes the header of
the WAL index, so while a caller waits, one thread compares the header every few milliseconds. When it shows a foreign
commit, the thread wakes the waiters. Where many namespaces are awaited, it first reads the revisions of all of them in
one statement, and wakes the waiters of those that have changed. While no caller waits, it stands still.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from limpet.engines.sqlite.rows import REVISIONS

if TYPE_CHECKING:
    from limpet.engines.sqlite.cache import Cache, CachedFile, WalHeader
    from limpet.engines.sqlite.connections import Connections
    from limpet.engines.wakeup import Wakeup

LOOK_S: Final = 0.003
"""How often to compare the header. 333 times a second take half a percent of one core."""

LOOK_WITHOUT_HEADER_S: Final = 0.02
"""How often to read the revisions where the header cannot be mapped."""

FEW: Final = 4
"""Waiters of so many namespaces are woken without a look at the revisions, which costs as much as they do."""


class ForeignCommits:
    """Wakes the waiters of an engine for the commits of other processes, and of other engines of this one."""

    def __init__(self, connections: Connections, cached: CachedFile, wakeup: Wakeup) -> None:
        self._connections = connections
        self._cached = cached
        self._wakeup = wakeup
        self._lock = threading.Lock()
        self._awaited: Counter[str] = Counter()
        self._is_awaited = threading.Event()
        self._thread: threading.Thread | None = None
        self._ends = False
        # As they were at the last comparison.
        self._stamp: tuple[WalHeader, bytes] | None = None
        self._cache: Cache | None = None
        self._revisions: dict[str, tuple[int, int] | None] = {}

    @contextlib.contextmanager
    def awaited(self, namespace: str) -> Iterator[None]:
        """Have the waiters of a namespace woken. Begin before the log is read, so that no commit comes in between."""
        with self._lock:
            if not self._awaited:
                # What was committed while no caller waited concerns none.
                self._compare()
            self._awaited[namespace] += 1
            if self._thread is None and not self._ends:
                self._thread = threading.Thread(target=self._run, name="limpet-sqlite-watcher", daemon=True)
                self._thread.start()
        self._is_awaited.set()
        try:
            yield
        finally:
            with self._lock:
                self._awaited[namespace] -= 1
                if not self._awaited[namespace]:
                    del self._awaited[namespace]

    def end(self) -> None:
        """Let the thread end."""
        with self._lock:
            self._ends = True
        self._is_awaited.set()

    def join(self) -> None:
        """Wait until the thread has ended. The caller holds no lock of the connections, which it may need to end."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            if not self._awaited:
                self._is_awaited.clear()
                # A caller that came just before that has set it in vain.
                if not self._awaited and not self._ends:
                    self._is_awaited.wait()
            if self._ends:
                return
            time.sleep(LOOK_WITHOUT_HEADER_S if self._cached.wal is None else LOOK_S)
            with self._lock:
                has_foreign_commit, awaited = self._compare(), [*self._awaited]
            if has_foreign_commit:
                for namespace in self._find_changed(awaited):
                    self._wakeup.notify(namespace)

    def _compare(self) -> bool:
        """Whether another process may have committed since the last comparison. The caller holds the lock."""
        # The cache before the header. Where it has the present header and is the same object as before, all commits in
        # between were ours: after a foreign one the cache is replaced, and cannot get a later header.
        cache, stamp = self._cached.cache, self._cached.wal_stamp()
        has_only_ours = cache is not None and cache is self._cache and stamp is not None and cache.header == stamp[1]
        is_same = stamp is not None and stamp == self._stamp
        self._cache, self._stamp = cache, stamp
        return not is_same and not has_only_ours

    def _find_changed(self, awaited: list[str]) -> list[str]:
        """Find the namespaces that may have changed since the last call."""
        before, self._revisions = self._revisions, {}
        if len(awaited) <= FEW:
            return awaited
        try:
            with self._connections.reading() as reader:
                rows = reader.execute(REVISIONS, (json.dumps(awaited),)).fetchall()
        except Exception:
            # Each waiter reads the log by itself, and gets the error.
            return awaited
        self._revisions = dict.fromkeys(awaited)
        self._revisions |= {name.decode(): (revision, at_ms) for name, revision, at_ms in rows}
        return [name for name, found in self._revisions.items() if name not in before or before[name] != found]
