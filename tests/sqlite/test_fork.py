"""Forks: the child gets what was acknowledged, goes on by itself, and harms no other process.

Each scene runs in a process of its own, because pytest's has threads and descriptors of other people.
"""

from __future__ import annotations

import pytest

import limpet
import limpet.sync
from tests.sqlite.support import Process

pytestmark = pytest.mark.slow


def test_a_fork_while_threads_write_loses_nothing(url: str) -> None:
    """A child after a fork goes on with its own connections.

    Four threads add, each to a counter of its own, while the process forks ten times; each child writes keys of
    its own and leaves by `os._exit`. A thread is nearly always inside a transaction, so the child must not
    inherit the belief that a thread holds the writer's lock.
    """
    with Process("forks_among_threads", url, 10) as process:
        written, problems = process.receive()

    assert problems == []
    with limpet.sync.open(url) as store:
        assert [store.get(f"thread/{index}") for index in range(4)] == written
        assert [store.get(f"child/{number}/kept") for number in range(10)] == [f"child/{n}" for n in range(10)]
        assert [store.get(f"child/{number}/count") for number in range(10)] == [5] * 10


def test_a_parent_that_closes_leaves_its_child_safe(url: str) -> None:
    """A child after a fork goes on with its own connections.

    SQLite remembers, for the whole process, which locks it holds on a file. A child that inherits this memory
    and not the locks is invisible to its parent, which on closing takes itself for the last and removes the WAL.
    """
    with Process("forks_and_closes", url) as process:
        assert process.receive() == "acknowledged"

    with limpet.sync.open(url) as store:
        assert [store.get(key) for key in ("parent", "child/before", "child/after")] == [1, 1, 2]


def test_a_parent_that_closes_at_once_leaves_its_child_safe(url: str) -> None:
    """A child after a fork goes on with its own connections.

    Whatever the child must do to be safe, it may not depend on being faster than its parent, which closes at once
    and later opens the file again, writes and closes.
    """
    with Process("forks_and_closes_at_once", url) as process:
        assert process.receive() == "acknowledged"

    with limpet.sync.open(url) as store:
        assert [store.get(key) for key in ("parent", "child/before", "child/after")] == [2, 1, 2]


def test_a_fork_while_threads_open_connections_is_harmless(url: str) -> None:
    """A child after a fork goes on with its own connections.

    SQLite has locks of its own, which a thread may hold while it opens a connection. In the child no thread would
    ever let go of them.
    """
    with Process("forks_among_openers", url, 40) as process:
        assert process.receive() == []

    with limpet.sync.open(url) as store:
        assert store.keys("child/").count == 40


@pytest.mark.parametrize("moment", ["wakeup", "transaction"])
def test_a_fork_may_come_at_any_moment(url: str, moment: str) -> None:
    """A child after a fork goes on with its own connections.

    Another thread holds the lock of the wakeups, or is between BEGIN and COMMIT. It does not exist in the child,
    and nothing that it held may be waited for there.
    """
    with Process("forks_at_a_bad_moment", url, moment) as process:
        assert process.receive() == 1

    with limpet.sync.open(url) as store:
        assert store.get("child") == 1


def test_time_does_not_go_back_in_a_child(url: str) -> None:
    """The clock never goes back."""
    with Process("forks_after_the_clock_was_set_back", url) as process:
        parent_ms, child_ms = process.receive()

    assert parent_ms == 2_000_000
    assert child_ms >= parent_ms
