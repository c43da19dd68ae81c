"""Forks of a process that has SQLite files open.

SQLite remembers, for the whole process, which locks it has on a file. A child inherits that
memory but not the locks, and its parent, on closing, would take itself for the last user and
remove the log that the child goes on writing. So a fork waits until no thread is inside SQLite
and closes all connections; parent and child open their own when they next need one.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol

from limpet.engines.sqlite.cache import WalHeader
from limpet.engines.sqlite.connections import OPENING


class Forkable(Protocol):
    """An engine as a fork sees it."""

    def pause(self) -> bool:
        """Wait until no thread is inside SQLite, and let none in. False for an engine that is closed."""

    def disconnect(self) -> None:
        """Close all connections. The caller has paused the engine and holds OPENING."""

    def resume(self) -> None:
        """Let threads in again."""

    def start(self) -> None:
        """Start again without the locks and connections of the parent, in a child."""


_engines: weakref.WeakSet[Forkable] = weakref.WeakSet()
_forks = threading.Lock()
_paused: list[Forkable] = []


def register(engine: Forkable) -> None:
    """Have the forks of this process wait for an engine, for as long as it is referred to."""
    _engines.add(engine)


def before_fork() -> None:
    """Pause all engines and close their connections."""
    _forks.acquire()
    for engine in list(_engines):
        if engine.pause():
            _paused.append(engine)
    # No thread opens another from here on.
    OPENING.acquire()
    for engine in _paused:
        engine.disconnect()


def after_fork_in_parent() -> None:
    """Let all engines go on."""
    OPENING.release()
    while _paused:
        _paused.pop().resume()
    _forks.release()


def after_fork_in_child() -> None:
    """Give all engines locks that no thread of the parent holds."""
    WalHeader.forget_all()
    OPENING.release()
    while _paused:
        _paused.pop().start()
    _forks.release()


os.register_at_fork(before=before_fork, after_in_parent=after_fork_in_parent, after_in_child=after_fork_in_child)
