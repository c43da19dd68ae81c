"""Turns of the writers of one file, in any number of processes.

SQLite lets one connection write at a time and gives the others no order: each sleeps longer from try to try, and one
that has just committed begins again while they sleep. So the writers agree on one place, that of the next writer. A
writer that finds the file locked takes the place, keeps it until it has begun, and tries often meanwhile. A writer that
finds the place taken does not begin, unless it is still in its own turn, which lasts `TURN_S`.

Which of the others gets the place next is mostly chance. In an exact order the same process would come first in each
round, and only the first of a round can replace an entry that all have read.

The place decides nothing: SQLite's own lock does. A writer that waits for the place in vain, because the process that
has it was stopped, goes on without it.
"""

from __future__ import annotations

import fcntl
import sqlite3
import struct
import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from limpet.engines.sqlite.cache import WalHeader

TURN_S: Final = 0.005
"""How long a writer may go on while another has the place. One commit each costs more: the cache starts empty, and an
entry that was read before the turn is old."""

LOOK_S: Final = 0.0005
"""For how long a writer that has found the place free does not look again. A look is a call of the system."""

IDLE_S: Final = 0.0003
"""After so long without a commit the turn of a writer is over."""

POLL_S: Final = 0.001
"""The longest time between two tries. A writer waits so long before it first tries to take the place, so that one which
has just committed does not come before those that wait already."""

SHORT_POLL_S: Final = 0.00005
LONG_S: Final = 0.03
"""A writer that has waited for so long tries to take the place as often as it can."""

PLACE_S: Final = 0.1
"""How long to wait for the place alone."""

ALONE_S: Final = 0.1
"""How long to do without the place after waiting for it in vain; at most `ALONE_S_MAX`."""

ALONE_S_MAX: Final = 2.0

# Far beyond the end of the shared memory. SQLite locks bytes 120 to 128 of it (sqlite.org/walformat.html).
_BYTE: Final = 1 << 40
_LAYOUT: Final = "hhqqi0q"
_LOCK: Final = struct.pack(_LAYOUT, fcntl.F_WRLCK, 0, _BYTE, 1, 0)
_UNLOCK: Final = struct.pack(_LAYOUT, fcntl.F_UNLCK, 0, _BYTE, 1, 0)


class NextWriter:
    """The place of the writer that comes next: a lock on a byte of the file's shared memory.

    It is a lock of the descriptor (an open file description lock). SQLite's own locks are of the process, and neither
    kind ends the other. The kernel releases it when the process ends.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        # The engines of this process share the descriptor, so the lock on the byte excludes only other processes.
        self._thread_lock = threading.Lock()

    @classmethod
    def at(cls, descriptor: int) -> NextWriter | None:
        """The place of a file that is open for writing; None where there are no such locks, as on macOS."""
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _LOCK)
        except (AttributeError, OSError):
            return None
        return cls(descriptor)

    def is_taken(self) -> bool:
        """Whether a writer of any process has the place."""
        if self._thread_lock.locked():
            return True
        found: bytes = fcntl.fcntl(self._descriptor, fcntl.F_OFD_GETLK, _LOCK)
        return found[:2] != _UNLOCK[:2]

    def take(self) -> bool:
        """Take the place unless another writer has it."""
        if not self._thread_lock.acquire(blocking=False):
            return False
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _LOCK)
        except OSError:
            self._thread_lock.release()
            return False
        return True

    def give_back(self) -> None:
        """Let another writer take the place."""
        fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _UNLOCK)
        self._thread_lock.release()


class WriterTurns:
    """The turns of one writer. Only the thread that holds the writer's lock uses them."""

    def __init__(self) -> None:
        self._turn_ends = 0.0
        self._free_until = 0.0
        self._alone_until = 0.0
        self._alone_s = ALONE_S

    def begin(self, writer: sqlite3.Connection, wal: WalHeader | None, busy_s: float) -> None:
        """Begin a write transaction in turn. The connection has no busy timeout of its own.

        Raises:
            sqlite3.OperationalError: The file stayed locked for ``busy_s``, or cannot be written.
        """
        place = None if wal is None else wal.next_writer
        if self._may_begin(place) and _try_to_begin(writer) is None:
            return
        began = time.monotonic()
        deadline = began + busy_s
        if wal is None or place is None or began < self._alone_until:
            _begin_until(deadline, writer, POLL_S)
        elif _take_or_begin(place, writer, began, deadline):
            try:
                _await_end_of_turn(wal)
                _begin_until(deadline, writer, SHORT_POLL_S)
            finally:
                place.give_back()
            self._turn_ends = time.monotonic() + TURN_S
            self._alone_s = ALONE_S
        else:
            # Its owner may be stopped. If so, each further time alone is longer.
            self._alone_until = time.monotonic() + self._alone_s
            self._alone_s = min(2 * self._alone_s, ALONE_S_MAX)

    def _may_begin(self, place: NextWriter | None) -> bool:
        if place is None:
            return True
        now = time.monotonic()
        if now < self._free_until or now < self._turn_ends or now < self._alone_until:
            return True
        if place.is_taken():
            return False
        self._free_until = now + LOOK_S
        return True


def _take_or_begin(place: NextWriter, writer: sqlite3.Connection, began: float, deadline: float) -> bool:
    """Take the place; or begin without it, if it was taken for `PLACE_S`. Returns whether the place was taken."""
    while True:
        # More often from try to try, so that a writer that has waited for long is likely to come before the others.
        waited_s = time.monotonic() - began
        time.sleep(max(SHORT_POLL_S, POLL_S * (1 - waited_s / LONG_S)))
        if place.take():
            return True
        if (now := time.monotonic()) >= min(deadline, began + PLACE_S):
            error = _try_to_begin(writer)
            if error is None:
                return False
            if now >= deadline:
                raise error


def _await_end_of_turn(wal: WalHeader) -> None:
    """Let the present writer go on while it commits, until its turn is over."""
    header, changed_at = wal.read(), time.monotonic()
    end = changed_at + TURN_S
    while (now := time.monotonic()) < min(end, changed_at + IDLE_S):
        time.sleep(SHORT_POLL_S)
        if (latest := wal.read()) != header:
            header, changed_at = latest, now


def _begin_until(deadline: float, writer: sqlite3.Connection, poll_s: float) -> None:
    """Try to begin until the deadline, less often from try to try."""
    while (error := _try_to_begin(writer)) is not None:
        if time.monotonic() >= deadline:
            raise error
        time.sleep(poll_s)
        poll_s = min(POLL_S, 1.25 * poll_s)


def _try_to_begin(writer: sqlite3.Connection) -> sqlite3.OperationalError | None:
    """Begin a write transaction. Returns the error if another connection has the file locked."""
    try:
        writer.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        if not (getattr(error, "sqlite_errorname", None) or "").startswith("SQLITE_BUSY"):
            raise
        return error
    return None
