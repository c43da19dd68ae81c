"""What an engine keeps of its file in memory, valid for as long as no process commits.

In WAL mode every commit, of any process, changes a header of 48 bytes at the start of the
file's shared memory (sqlite.org/walformat.html). Reading the header takes a fifth of a
microsecond, reading a row takes ten. So what was read is kept for as long as the header stays
the same, and over our own commits, which count the header up by one.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, ClassVar, Final

from limpet.engines.sqlite.rows import READ, RECORDED_MS, NamespaceCounters, to_entry
from limpet.engines.sqlite.turns import NextWriter
from limpet.model import Entry, StoredFamily

if TYPE_CHECKING:
    from limpet.engines.sqlite.connections import Connection
    from limpet.engines.sqlite.group import GroupTransaction

CACHED_MAX: Final = 12_288
CACHED_BYTES_MAX: Final = 2_048

UNKNOWN: Final[Any] = object()
"""Stands for an entry that is not cached, because None stands for one that is absent."""

_NO_HEADER: Final = b""

EntryId = tuple[str, StoredFamily, str]
"""A namespace, a family and a key."""


class CachedFile:
    """A database file as one engine reads it: from the cache while that is valid, else through a connection.

    Attributes:
        wal: The header to compare with; None while it cannot be read, and then nothing is cached.
        cache: What is kept under the header that it names.
    """

    def __init__(self) -> None:
        self.wal: WalHeader | None = None
        self.cache: Cache | None = None

    def attach(self, connection: Connection) -> None:
        """Begin to follow the header of the file that a connection has opened. The caller holds OPENING."""
        if self.wal is None:
            self.wal = WalHeader.join(connection)
            self.cache = None if self.wal is None else Cache(_NO_HEADER)

    def detach(self) -> None:
        """Forget the header with the last connection. The caller holds OPENING."""
        # The file may lose its WAL index then, and the next process to open it makes another.
        wal, self.wal, self.cache = self.wal, None, None
        if wal is not None:
            wal.leave()

    def forget(self) -> None:
        """Drop the cache."""
        self.cache = None

    def wal_stamp(self) -> tuple[WalHeader, bytes] | None:
        """A value that every commit of every process changes; None when it cannot be read."""
        # The bytes alone are not enough: a new WAL index may repeat the header of an earlier one.
        wal = self.wal
        return None if wal is None else (wal, wal.read())

    def read(self, reader: Connection, entry_id: EntryId) -> Entry | None:
        """The stored entry, expired or not: from the cache, as long as no process has committed since."""
        cache, header, wal = self.cache, _NO_HEADER, self.wal
        if wal is not None:
            # Before the row, never after: else a commit in between would pass for one that the row shows.
            header = wal.read()
            if cache is None or cache.header != header:
                cache = self.cache = Cache(header)
            else:
                known: Entry | None = cache.entries.get(entry_id, UNKNOWN)
                if known is not UNKNOWN:
                    return known
        row = reader.execute(READ, entry_id).fetchone()
        entry = None if row is None else to_entry(row)
        if cache is not None:
            cache.keep(header, entry_id, entry)
        return entry

    def recorded_ms(self, reader: Connection, namespace: str) -> int:
        """The time of the latest commit: from the cache, as long as no process has committed since."""
        cache, wal = self.cache, self.wal
        # Before the row, never after, as for entries.
        header = _NO_HEADER if wal is None else wal.read()
        if cache is not None and cache.header == header:
            known = cache.times_ms.get(namespace)
            if known is not None:
                return known
        row = reader.execute(RECORDED_MS, (namespace,)).fetchone()
        recorded_ms: int = 0 if row is None else row[0]
        if cache is not None:
            cache.keep_time(header, namespace, recorded_ms)
        return recorded_ms

    def valid_cache(self) -> Cache | None:
        """The cache if it shows the file as it is. The caller has begun a write transaction."""
        cache, wal = self.cache, self.wal
        return cache if cache is not None and wal is not None and cache.header == wal.read() else None

    def carry_over(self, cache: Cache | None, group: GroupTransaction) -> None:
        """Go on after a commit of ours with what was valid before it and what it wrote.

        If another process has committed since, the cache starts empty.
        """
        if self.wal is None:
            self.cache = None
            return
        header = self.wal.read()
        if cache is None or commit_count(header) != (commit_count(cache.header) + 1) % 2**32:
            self.cache = Cache(header)
            return
        cache.carry(header, group)
        self.cache = cache


def commit_count(header: bytes) -> int:
    """The commits counted in a header."""
    return int.from_bytes(header[8:12], sys.byteorder)


class Cache:
    """Entries as they are in the file for as long as the header stays the same."""

    def __init__(self, header: bytes) -> None:
        self.header = header
        self.entries: dict[EntryId, Entry | None] = {}
        self.counters: dict[str, NamespaceCounters] = {}
        self.times_ms: dict[str, int] = {}
        self._lock = threading.RLock()

    def keep(self, header: bytes, entry_id: EntryId, entry: Entry | None) -> None:
        """Keep an entry, or its absence, that was read after this header."""
        with self._lock:
            if header == self.header:
                self._put(entry_id, entry, 0 if entry is None else entry.weight_bytes)

    def keep_time(self, header: bytes, namespace: str, recorded_ms: int) -> None:
        """Keep the time of a namespace's latest commit, which was read after this header."""
        with self._lock:
            if header == self.header:
                self.times_ms[namespace] = recorded_ms

    def carry(self, header: bytes, group: GroupTransaction) -> None:
        """Go on under the header of our own commit, with the changes that it made."""
        with self._lock:
            for namespace, (plan, counters) in group.plans.items():
                for change, weight_bytes in plan.changes:
                    entry = change.entry
                    self._put((namespace, change.family, entry.key), change.after, weight_bytes)
                for (family, key), kept in plan.kept.items():
                    self._put((namespace, family, key), kept, kept.weight_bytes)
                if plan.changes:
                    self.times_ms[namespace] = counters.at_ms
            if len(self.counters) > CACHED_MAX:
                self.counters.clear()
            if len(self.times_ms) > CACHED_MAX:
                self.times_ms.clear()
            self.header = header

    def _put(self, entry_id: EntryId, entry: Entry | None, weight_bytes: int) -> None:
        entries = self.entries
        if weight_bytes > CACHED_BYTES_MAX and entry is not None:
            entries.pop(entry_id, None)
            return
        if len(entries) >= CACHED_MAX and entry_id not in entries:
            # Dictionaries keep their order, so the first is the oldest.
            del entries[next(iter(entries))]
        entries[entry_id] = entry


class WalHeader:
    """The start of a file's shared memory, mapped for reading.

    Closing any descriptor of a file drops all locks that the process has on it, SQLite's own
    included. So one header is shared by all engines on the file, and its descriptor is closed
    only after SQLite has removed the shared memory, which happens when no process uses it.
    """

    _headers: ClassVar[dict[tuple[int, int], WalHeader]] = {}

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._users = 0
        self._map: mmap.mmap | None = None
        with contextlib.suppress(OSError, ValueError):
            self._map = mmap.mmap(descriptor, mmap.PAGESIZE, prot=mmap.PROT_READ)
        self.next_writer = NextWriter.at(descriptor)

    @classmethod
    def join(cls, connection: Connection) -> WalHeader | None:
        """The header of the file that a connection has open; None where it cannot be mapped.

        The caller holds OPENING.
        """
        cls._close_removed()
        # The path that SQLite uses: behind a symbolic link, the shared memory is beside the file itself.
        path = os.fsdecode(connection.execute("PRAGMA database_list").fetchone()[2]) + "-shm"
        try:
            status = os.stat(path)
            header = cls._headers.get((status.st_dev, status.st_ino))
            if header is None:
                header = cls._headers[status.st_dev, status.st_ino] = cls(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except OSError:
            return None
        if header._map is None:
            return None
        header._users += 1
        return header

    def leave(self) -> None:
        """End one use. The caller holds OPENING."""
        self._users -= 1
        self._close_removed()

    @classmethod
    def _close_removed(cls) -> None:
        for inode, header in list(cls._headers.items()):
            if header._users == 0 and os.fstat(header._descriptor).st_nlink == 0:
                del cls._headers[inode]
                os.close(header._descriptor)

    @classmethod
    def forget_all(cls) -> None:
        """Close all, first of all in a child: it has no locks to lose yet, and may reuse these descriptors later."""
        for header in cls._headers.values():
            os.close(header._descriptor)
        cls._headers.clear()

    def read(self) -> bytes:
        """The 48 bytes that every commit changes."""
        assert self._map is not None
        return self._map[:48]
