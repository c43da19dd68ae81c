"""The connections of one engine to its file: one for each thread that reads, and one for the writer.

A fork or a close must find no thread inside SQLite. So each use of a connection is counted, and
while the connections are paused no new use begins.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Final

from limpet.engines.sqlite.cache import CachedFile
from limpet.engines.sqlite.checkpoints import PAGES_ALONE
from limpet.engines.sqlite.rows import FOREIGN_TABLES
from limpet.errors import Closed, Corrupt, InvalidValue, LimpetError, PermissionDenied, Unavailable

BUSY_TIMEOUT_MS: Final = 5_000

OPENING: Final = threading.Lock()
"""Held while a connection of this process is opened or closed; a fork holds it too."""

# All others pass by themselves, or an operator can repair them: a full disk, no descriptor left, a moved file.
_DAMAGED: Final = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_IOERR_CORRUPTFS")
_DENIED: Final = ("SQLITE_READONLY", "SQLITE_PERM", "SQLITE_AUTH")


class Connection(sqlite3.Connection):
    """A connection that knows how often it is in use right now, and whether it was closed."""

    uses = 0
    gone = False


class Connections:
    """All connections of an engine in this process.

    Attributes:
        path: The file, absolute.
        closed: Whether the engine is closed, for good.
        paused: Whether no use may begin, because of a fork or a close. Changed under `pause_lock`.
        pause_lock: Held for as long as a pause lasts.
        threads: The open connections, each with the thread that reads on it; None for the writer's.
        busy_s: How long to wait for a lock of another connection.
    """

    def __init__(self, path: str, synchronous: str, cached: CachedFile, *, may_switch: bool) -> None:
        self.path = path
        self.closed = False
        self.paused = False
        self.pause_lock = threading.Lock()
        self.threads: dict[Connection, threading.Thread | None] = {}
        self.busy_s = BUSY_TIMEOUT_MS / 1000
        self._readers = threading.local()
        self._synchronous = synchronous
        self._cached = cached
        self._may_switch = may_switch

    def check_open(self) -> None:
        """Raise `Closed` after the engine was closed."""
        if self.closed:
            raise Closed

    # Reading ------------------------------------------------------------------

    def enter(self) -> Connection:
        """This thread's own connection, counted as used until the caller subtracts one from its ``uses``."""
        reader: Connection | None = getattr(self._readers, "connection", None)
        if reader is None or reader.gone:
            reader = self._open_reader()
        reader.uses += 1
        if not self.paused and not reader.gone:
            return reader
        reader.uses -= 1
        self.check_open()
        with self.pause_lock:
            pass
        return self.enter()

    @contextlib.contextmanager
    def reading(self) -> Iterator[Connection]:
        """This thread's own connection, for as long as it is used."""
        reader = self.enter()
        try:
            yield reader
        except sqlite3.Error as error:
            raise self.translate(error) from error
        finally:
            reader.uses -= 1

    def _open_reader(self) -> Connection:
        self.check_open()
        try:
            reader = self.connect(reads=True)
        except sqlite3.Error as error:
            raise self.translate(error) from error
        self._readers.connection = reader
        return reader

    # Opening and closing --------------------------------------------------------

    def connect(self, *, reads: bool = False) -> Connection:
        """Open another connection, for the calling thread to read on or for the writer."""
        # A fork must wait for a thread that opens a connection, and a close must find the
        # connection finished or not at all. Executing on a connection that another thread
        # closes crashes the interpreter.
        with OPENING:
            self.check_open()
            self._close_of_ended_threads()
            connection = self._connect(reads)
            self.threads[connection] = threading.current_thread() if reads else None
            self._cached.attach(connection)
            return connection

    def disconnect(self, connection: Connection) -> None:
        """Close one connection. The caller holds OPENING."""
        self.threads.pop(connection, None)
        connection.close()
        if not self.threads:
            self._cached.detach()

    def await_unused(self) -> None:
        """Wait until no thread is inside SQLite. The caller has paused the connections."""
        while any(connection.uses for connection in list(self.threads)):
            time.sleep(0.0005)

    def disconnect_all(self) -> None:
        """Close all connections. The caller has paused them and awaited their last use, and holds OPENING."""
        for connection in list(self.threads):
            connection.gone = True
            self.disconnect(connection)

    def _close_of_ended_threads(self) -> None:
        """Close the connections of threads that have ended. The caller holds OPENING.

        The garbage collector would close them at any moment, even during a fork.
        """
        for connection, owner in list(self.threads.items()):
            if owner is not None and not owner.is_alive():
                self.disconnect(connection)

    def _connect(self, reads: bool) -> Connection:
        connection = sqlite3.connect(
            self.path,
            timeout=self.busy_s,
            isolation_level=None,
            check_same_thread=False,
            factory=Connection,
        )
        try:
            connection.text_factory = bytes
            self._check_switch(connection)
            if not _use_wal(connection):
                raise Corrupt(
                    f"{self.path} cannot use WAL, which network file systems do not support: move it to a local disk"
                )
            connection.execute(f"PRAGMA synchronous = {self._synchronous}")
            connection.execute(f"PRAGMA wal_autocheckpoint = {PAGES_ALONE}")
            # 8 MB for each connection, and no mapping of the file. 64 MB and a mapping of 256 MB were measured beside
            # it, at 10,000 and 100,000 keys: reads and writes took as much CPU, within the noise. A server of 100,000
            # keys grew by 85 MB for itself and by 160 MB with the mapping, against 32 MB (`./dev load --memory`).
            connection.execute("PRAGMA cache_size = -8192")
            connection.execute("PRAGMA mmap_size = 0")
            if reads:
                connection.execute("PRAGMA query_only = ON")
            # The first read opens the WAL index, of which the cache maps the header.
            connection.execute("SELECT 1 FROM sqlite_master").fetchone()
            if not reads:
                # It waits for its turn by itself (turns.py), and once it has begun it waits for no other connection.
                connection.execute("PRAGMA busy_timeout = 0")
        except BaseException:
            connection.close()
            raise
        return connection

    def _check_switch(self, connection: Connection) -> None:
        """Refuse to change the journal mode of a file that others use: it stays changed, and they must agree."""
        if self._may_switch:
            return
        (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
        if mode != b"wal" and connection.execute(FOREIGN_TABLES).fetchone() is not None:
            raise InvalidValue(
                f"{self.path} holds tables that are not Limpet's, and its journal mode is {mode.decode()}: Limpet "
                "needs WAL, and the file would stay so. Give Limpet a file of its own, or allow the change with "
                "?journal=wal"
            )
        self._may_switch = True

    # Errors ---------------------------------------------------------------------

    def translate(self, error: Exception) -> Exception:
        """A driver's error as ours. It was raised before COMMIT, so nothing was applied."""
        if isinstance(error, LimpetError) or not isinstance(error, sqlite3.Error):
            return error
        if self.closed:
            return Closed()
        name = error_name(error)
        if name.startswith(_DAMAGED):
            return Corrupt(f"cannot use {self.path}: {error}")
        if name.startswith(_DENIED) and name != "SQLITE_READONLY_DBMOVED":
            return PermissionDenied(f"cannot use {self.path}: {error}")
        if name.startswith("SQLITE_CANTOPEN") and not _is_writable(os.path.dirname(self.path)):
            return PermissionDenied(f"cannot use {self.path}: its folder may not be written, and the WAL lies there")
        if name.startswith("SQLITE_CONSTRAINT"):
            # The message of a foreign trigger may contain anything. The driver's error stays the cause of ours, and
            # is printed with it in a log.
            error.args = (name,)
        return Unavailable(f"{self.path} cannot serve now: {error}")


def error_name(error: sqlite3.Error) -> str:
    """SQLite's name of an error; empty when the driver raised it by itself."""
    return getattr(error, "sqlite_errorname", None) or ""


# The file -----------------------------------------------------------------------


def make_file(path: str) -> None:
    """Make the file unless there is one, and check that it can be written."""
    try:
        # Values may be secrets, so a new file is readable by its owner alone. An existing file is
        # not opened: closing any descriptor of it drops the locks that this process has on it.
        if not os.path.exists(path):
            _make_empty(path)
        elif os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        elif not _is_writable(path):
            # SQLite would open it all the same, and refuse only the first write.
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        # Not Unavailable: trying again does not make a folder.
        raise InvalidValue(f"cannot open {path}: {error.strerror}") from error
    except PermissionError as error:
        raise PermissionDenied(f"cannot open {path}: {error.strerror}") from error
    except OSError as error:
        raise Unavailable(f"cannot open {path}: {error.strerror}") from error


def _make_empty(path: str) -> None:
    """Make an empty file that only its owner can read.

    It gets its name only when its descriptor is closed, because closing any descriptor of a
    file drops all locks that this process has on it, another store's included.
    """
    spare = f"{path}-{uuid.uuid4().hex}"
    os.close(os.open(spare, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        # Unlike a rename, a link never replaces a file that another process made meanwhile.
        # Where links are not supported SQLite makes the file itself, with the permissions of the umask.
        with contextlib.suppress(FileExistsError, PermissionError):
            os.link(spare, path)
    finally:
        os.unlink(spare)


def _is_writable(path: str) -> bool:
    return os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def _use_wal(connection: Connection) -> bool:
    """Switch to WAL. Two processes doing so at once meet a lock that the busy timeout does not wait for."""
    deadline = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return bool(mode == b"wal")
