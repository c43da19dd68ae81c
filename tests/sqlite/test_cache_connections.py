"""The cache of the SQLite engine, where connections, processes and files come and go.

Reading the header must harm no other user of the file: by the descriptors it keeps, or the locks that a close would
drop. And an engine that lost its connections must not go on with what it read before.
"""

from __future__ import annotations

import errno
import mmap
import os
import sqlite3
import threading
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

import limpet
import limpet.sync
from limpet.engines.sqlite import connections
from limpet.engines.sqlite.engine import SqliteEngine
from limpet.engines.sqlite.rows import APPEND_LAST
from limpet.errors import Corrupt, Unavailable
from tests.sqlite.cache_scenes import Peer
from tests.sqlite.cache_support import (
    LONG,
    by_hand,
    descriptors,
    engine_of,
    in_thread,
    keeps,
    number,
    outside,
    set_by_hand,
    set_key,
)
from tests.sqlite.support import Spy, Times, batch, in_place, open_sqlite, put, sqlite_error

pytestmark = pytest.mark.timeout(600 * LONG)


# Descriptors and locks ----------------------------------------------------------


def come_and_go(url: str, manner: str) -> None:
    """Open and close stores on a file, in one of several manners."""
    match manner:
        case "one by one":
            for _ in range(5):
                limpet.sync.open(url, sweep=False).close()
        case "several at once":
            stores = [limpet.sync.open(url, sweep=False) for _ in range(4)]
            for store in stores:
                store.get("key")
            for store in (stores[1], stores[0], stores[3], stores[2]):
                store.close()
        case _:
            with limpet.sync.open(url, sweep=False) as store:
                for _ in range(5):
                    in_thread(lambda: store.get("key"))


@pytest.fixture
def manner_of_failing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make it impossible to read the header, in one of several ways."""
    way = str(request.param)
    opening, mapping = os.open, mmap.mmap

    def refused(path: Any, *args: Any, **more: Any) -> int:
        if str(path).endswith("-shm"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return opening(path, *args, **more)

    class Unmapped(mapping):  # type: ignore[misc, valid-type]
        def __new__(cls, *args: Any, **more: Any) -> Any:
            if way == "too short":
                raise ValueError("mmap length is greater than file size")
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    if way == "no permission":
        monkeypatch.setattr(os, "open", refused)
    elif way in ("no memory", "too short"):
        monkeypatch.setattr(mmap, "mmap", Unmapped)
    return way


FAILINGS = ["no permission", "no memory", "too short"]


@pytest.mark.parametrize("manner_of_failing", ["none", *FAILINGS], indirect=True)
@pytest.mark.parametrize("manner", ["one by one", "several at once", "in threads"])
def test_a_store_that_closes_leaves_others_their_locks(
    url: str, path: Path, manner: str, manner_of_failing: str
) -> None:
    """Closing any descriptor of a file drops all locks that the process has on it, SQLite's own included.

    Another library in this process reads in a transaction, beside our stores. As long as it lasts no
    other process may begin the WAL anew.
    """
    with limpet.sync.open(url, sweep=False) as store:
        store.put("key", 1)
        reader = by_hand(path)
        reader.execute("BEGIN")
        assert reader.execute("SELECT value FROM limpet_entries").fetchall() == [("1",)]
        store.put("key", 2)

    with closing(reader):
        come_and_go(url, manner)

        # Busy, how many frames there are, and how many could be folded in.
        ((busy, frames, _),) = outside(path, "PRAGMA wal_checkpoint(TRUNCATE)")
        assert busy == 1
        assert frames > 0
        assert path.with_name("state.db-wal").stat().st_size > 0
        assert reader.execute("SELECT value FROM limpet_entries").fetchall() == [("1",)]
        reader.execute("COMMIT")

        set_by_hand(reader, "key", 3)
        assert outside(path, "SELECT value FROM limpet_entries") == [["3"]]
        with limpet.sync.open(url, sweep=False) as store:
            assert store.get("key") == 3


@pytest.mark.slow
def test_opening_and_closing_one_file_leaves_no_descriptor(url: str) -> None:
    """A program may open a store for each request it serves."""
    with limpet.sync.open(url, sweep=False) as store:
        store.put("key", 0)
    before = descriptors()

    for count in range(300):
        with limpet.sync.open(f"{url}?synchronous=normal", sweep=False) as store:
            assert store.add("key") == count + 1

    assert descriptors() <= before


@pytest.mark.slow
def test_opening_and_closing_many_files_leaves_no_descriptor(tmp_path: Path) -> None:
    """A program may have a store for each of its users."""
    limpet.sync.open(f"sqlite:///{tmp_path}/first.db", sweep=False).close()
    before = descriptors()

    for count in range(300):
        with limpet.sync.open(f"sqlite:///{tmp_path}/{count}.db?synchronous=normal", sweep=False) as store:
            assert store.get("key") is None

    assert descriptors() <= before


def test_a_file_that_others_hold_open_costs_a_descriptor_or_two(url: str, path: Path) -> None:
    """What may not be closed is at least not opened again and again, and is closed when it may be."""
    before = descriptors()
    with closing(by_hand(path)) as connection:
        limpet.sync.open(url, sweep=False).close()
        connection.execute("SELECT * FROM limpet_entries").fetchall()
        limpet.sync.open(url, sweep=False).close()
        held = descriptors()

        for _ in range(100):
            limpet.sync.open(url, sweep=False).close()

        assert descriptors() == held
    limpet.sync.open(url, sweep=False).close()
    assert descriptors() <= before


@pytest.mark.parametrize("manner_of_failing", FAILINGS, indirect=True)
def test_without_a_header_everything_works(url: str, path: Path, manner_of_failing: str) -> None:
    """Where the shared memory cannot be mapped, every read goes to the file, and that is all.

    What was opened in vain may not be closed again. It must not pile up either: each thread that reads opens a
    connection, and each connection tries anew.
    """
    with limpet.sync.open(url, sweep=False) as store, closing(by_hand(path)) as connection:
        store.put("key", 0)
        connection.execute("SELECT * FROM limpet_entries").fetchall()
        found: list[Any] = []

        def read() -> None:
            found.append(store.get("key"))

        def read_in_threads(first: int, count: int) -> None:
            for turn in range(first, first + count):
                set_by_hand(connection, "key", turn)
                in_thread(read)

        read_in_threads(0, 3)
        before = descriptors()
        read_in_threads(3, 30)

        assert engine_of(store)._cached.wal is None
        assert found == [*range(33)]
        assert store.add("key") == 33
        assert store.get("key") == 33
        assert descriptors() <= before


def test_opening_what_cannot_be_used_leaves_no_descriptor(url: str, path: Path) -> None:
    """A program that tries again and again to open a store of another release gets the reason each time."""
    limpet.sync.open(url, sweep=False).close()
    with closing(by_hand(path)) as connection:
        connection.execute("UPDATE limpet_schema SET version_num = '0099'")
    before = descriptors()

    for _ in range(20):
        with pytest.raises(Corrupt):
            in_place(open_sqlite(url, limpet.SystemClock()))

    assert descriptors() <= before


# Forks --------------------------------------------------------------------------


@pytest.mark.slow
def test_parent_and_child_see_each_other(url: str) -> None:
    """A child after a fork goes on with its own connections, and sees what its parent writes, and the other way."""
    with Peer("forks_and_takes_turns", f"{url}?synchronous=normal", LONG * 400) as process:
        assert process.receive() == [[], []]


@pytest.mark.slow
def test_a_fork_among_readers_of_the_cache_deceives_no_reader(url: str) -> None:
    """A child after a fork goes on with its own connections.

    What was read before the fork is forgotten by both.
    """
    with Peer("forks_among_cached_readers", f"{url}?synchronous=normal", LONG * 40) as process:
        problems, reads = process.receive()

    assert problems == []
    assert reads > 100


@pytest.mark.slow
@pytest.mark.parametrize("opens", [0, 3, 40])
@pytest.mark.parametrize("held_elsewhere", [False, True])
def test_a_child_that_closes_what_it_inherited_goes_on(url: str, held_elsewhere: bool, opens: int) -> None:
    """A child after a fork goes on with its own connections.

    A daemon closes all descriptors after its fork, those it does not know of as well, and their numbers go to what
    is opened next: files of its own, or SQLite's. While another process has the file open, its shared memory
    outlives the fork, and so would a descriptor of it that is closed later.
    """
    with ExitStack() as stack:
        if held_elsewhere:
            store = stack.enter_context(limpet.sync.open(url, sweep=False))
            assert store.get("count") is None
        with Peer("forks_as_a_daemon_does", url, opens) as process:
            assert process.receive() == [1, 1, 2, 2, 0, 2]


# Connections that come and go ---------------------------------------------------


def full() -> sqlite3.OperationalError:
    return sqlite_error("SQLITE_FULL", "database or disk is full")


@pytest.mark.parametrize("held_elsewhere", [False, True])
@pytest.mark.parametrize("statement", [APPEND_LAST, "COMMIT"], ids=["before", "at the end"])
async def test_a_store_that_lost_its_only_connection_begins_anew(
    engine: SqliteEngine, spy: Spy, path: Path, statement: str, held_elsewhere: bool
) -> None:
    """A writer that failed is let go of; where it was the only connection, the shared memory goes with it.

    Then another process opens the file, makes a new one, and writes. The header that was once mapped stays as it
    was for ever.
    """
    with ExitStack() as stack:
        if held_elsewhere:
            stack.enter_context(closing(by_hand(path))).execute("SELECT * FROM limpet_entries").fetchall()
        for turn in range(1, 8, 2):
            # The first commit of a connection starts a cache, the second is kept in it.
            await engine.commit("default", batch(put("beside", turn)))
            await engine.commit("default", batch(put("key", turn)))
            assert keeps(engine, "key")
            spy.before[statement] = Times(1, full)
            with pytest.raises(Unavailable):
                await engine.commit("default", batch(put("key", 99)))
            assert not engine._connections.threads
            outside(path, set_key(turn + 1))

            assert await number(engine, "key") == turn + 1

            # The reader that this took is let go of, so that the next writer is alone again.
            reader, owner = next(
                (one, owner) for one, owner in engine._connections.threads.items() if owner is not None
            )
            assert owner is threading.current_thread()
            with connections.OPENING:
                reader.gone = True
                engine._connections.disconnect(reader)


async def test_a_write_after_the_only_connection_was_lost_begins_from_the_file(
    engine: SqliteEngine, spy: Spy, path: Path
) -> None:
    """What is decided under guards is decided on what the file holds now."""
    await engine.commit("default", batch(put("beside", 1)))
    await engine.commit("default", batch(put("key", 1)))
    assert keeps(engine, "key")
    spy.before[APPEND_LAST] = Times(1, full)
    with pytest.raises(Unavailable):
        await engine.commit("default", batch(put("key", 99)))
    assert not engine._connections.threads
    outside(path, set_key(10))

    await engine.commit("default", batch(limpet.model.Add("key", 1)))

    assert await number(engine, "key") == 11


def test_threads_that_come_and_go_see_what_is_so(url: str, path: Path) -> None:
    """The connection of a thread that has ended is closed by the next to open one."""
    with limpet.sync.open(url, sweep=False) as store, closing(by_hand(path)) as connection:
        store.put("key", 0)
        found: list[Any] = []

        def read() -> None:
            found.append([store.get("key"), store.get("key")])

        for turn in range(1, 40):
            set_by_hand(connection, "key", turn)
            in_thread(read)
            if turn % 4 == 0:
                # With the writer gone too, the last connection is that of a thread that has ended.
                engine_of(store)._writer.abandon()

        assert found == [[turn, turn] for turn in range(1, 40)]
