"""What can go wrong beneath the engine, and what its callers hear of it.

The database is always a real one. A spy on the connection makes one statement fail, before it was done or
after, where no real fault could be timed so well.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import sqlite3
import tempfile
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import limpet
import limpet.sync
from limpet.clock import has_loop
from limpet.engines.sqlite import connections
from limpet.engines.sqlite.engine import SqliteEngine
from limpet.engines.sqlite.rows import COUNTERS
from limpet.errors import Ambiguous, Corrupt, InvalidValue, LimpetError, PermissionDenied, Unavailable
from tests.processes import PATIENCE_S
from tests.sqlite.support import Gate, Process, Queue, Spy, Times, batch, open_sqlite, put, sqlite_error


class QuickClock(limpet.ManualClock):
    """Sleeping is over at once, and is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.slept = 0

    async def sleep(self, seconds: float) -> None:
        self.slept += 1
        if has_loop():
            await asyncio.sleep(0)


@pytest.fixture
def quick() -> QuickClock:
    return QuickClock()


def io_error() -> sqlite3.OperationalError:
    return sqlite_error("SQLITE_IOERR_FSYNC", "disk I/O error")


# An I/O error at COMMIT ---------------------------------------------------------


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_an_io_error_at_commit_leaves_the_outcome_open(engine: SqliteEngine, spy: Spy, moment: str) -> None:
    """Ambiguous is the honest answer: recovery may find the commit in the WAL, or not."""
    getattr(spy, moment)["COMMIT"] = Times(1, io_error)

    with pytest.raises(Ambiguous) as caught:
        await engine.commit("default", batch(put("key", 1), request_id="mine"))

    assert caught.value.request_id == "mine"
    assert caught.value.since == 0
    assert "state.db" in str(caught.value)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("api", ["async", "sync"])
async def test_an_io_error_at_commit_is_settled_by_the_store(
    url: str, quick: QuickClock, spy: Spy, moment: str, api: str
) -> None:
    """A write whose reply was lost is retried by the store itself and applied once."""
    if api == "async":
        store: Any = await limpet.open(url, clock=quick, sweep=False)
        add, close = store.add, store.close
    else:
        store = await asyncio.to_thread(limpet.sync.open, url, clock=quick, sweep=False)

        async def add(*args: Any) -> int:
            return int(await asyncio.to_thread(store.add, *args))

        async def close() -> None:
            await asyncio.to_thread(store.close)

    await add("hits", 10)
    getattr(spy, moment)["COMMIT"] = Times(1, io_error)

    assert await add("hits", 5) == 15

    spy.before.clear()
    spy.after.clear()
    assert await add("hits", 1) == 16
    await close()
    async with limpet.open(url, clock=quick, sweep=False) as store:
        assert [event.value for event in [e async for e in store.history("hits")]] == [10, 15, 16]


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_what_cannot_be_settled_is_reported_with_its_request_id(
    url: str, quick: QuickClock, spy: Spy, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`outcome` gives the result of a request id, or None when it was not applied.

    The answer is lost, and then the file cannot be reached, so the store gives up and names the id to ask for.
    """

    monkeypatch.setattr(connections, "BUSY_TIMEOUT_MS", 20)

    def lose(_: sqlite3.Connection) -> None:
        spy.before["BEGIN IMMEDIATE"] = Times(1_000_000, lambda: sqlite_error("SQLITE_BUSY", "database is locked"))
        raise io_error()

    async with limpet.open(url, clock=quick, sweep=False) as store:
        getattr(spy, moment)["COMMIT"] = lose

        with pytest.raises(Ambiguous) as caught:
            await store.put("key", 1, request_id="mine")

        spy.before.clear()
        spy.after.clear()
        assert caught.value.request_id == "mine"
        outcome = await store.outcome("mine")
        entry = await store.entry("key")
        if moment == "before":
            assert (outcome, entry) == (None, None)
        else:
            assert outcome is not None
            assert entry is not None
            assert (entry.version, entry.revision) == (1, outcome.revision)


async def test_a_lost_answer_loses_it_for_the_whole_group(url: str, quick: QuickClock, spy: Spy) -> None:
    """A write whose reply was lost is retried by the store itself and applied once.

    Thirty-two callers share the transaction whose answer was lost. Each finds its own result again.
    """
    async with limpet.open(url, clock=quick, sweep=False) as store:
        spy.after["COMMIT"] = Times(1, io_error)

        values = await asyncio.gather(*(store.add("hits") for _ in range(32)))

        assert sorted(values) == [*range(1, 33)]
        assert await store.get("hits") == 32


# An error before COMMIT ---------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["SQLITE_IOERR_WRITE", "SQLITE_IOERR_READ", "SQLITE_FULL", "SQLITE_NOMEM", "SQLITE_LOCKED"]
)
async def test_an_error_before_commit_is_not_applied_and_tried_again(
    url: str, quick: QuickClock, spy: Spy, name: str
) -> None:
    """A call that fails for a moment is tried again by the store, at most 5 times."""
    async with limpet.open(url, clock=quick, sweep=False) as store:
        spy.before[COUNTERS] = failing = Times(4, lambda: sqlite_error(name, "it failed"))

        entry = await store.put("key", 1)

        assert (failing.left, entry.version) == (0, 1)
        failing.left = 5
        with pytest.raises(Unavailable, match=r"state\.db"):
            await store.put("key", 2)
        assert failing.left == 0
        assert await store.entry("key") == entry


async def test_a_full_disk_at_commit_is_not_applied(engine: SqliteEngine, spy: Spy) -> None:
    """A full disk is known not to have taken the commit, so no caller needs to be left in doubt."""
    spy.before["COMMIT"] = Times(1, lambda: sqlite_error("SQLITE_FULL", "database or disk is full"))

    with pytest.raises(Unavailable, match=r"state\.db"):
        await engine.commit("default", batch(put("key", 1)))

    assert await engine.read("default", ["key"]) == [None]
    await engine.commit("default", batch(put("key", 2)))


async def test_a_transaction_that_failed_does_not_stay_open(engine: SqliteEngine, url: str, spy: Spy) -> None:
    """After an error another process must be able to write at once, and so must we."""
    spy.before[COUNTERS] = Times(1, lambda: sqlite_error("SQLITE_IOERR_READ", "disk I/O error"))
    with pytest.raises(Unavailable):
        await engine.commit("default", batch(put("key", 1)))

    with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"), timeout=0)) as other:
        other.execute("BEGIN IMMEDIATE")

    await engine.commit("default", batch(put("key", 2)))


# Another process writes -------------------------------------------------------------


@pytest.fixture
def blocker(url: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[sqlite3.Connection]:
    """Another connection, which may hold a write transaction for longer than any caller waits."""
    monkeypatch.setattr(connections, "BUSY_TIMEOUT_MS", 20)
    with limpet.sync.open(url, sweep=False):
        pass
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        yield connection


async def test_a_writer_that_never_ends_makes_the_file_unavailable(
    url: str, quick: QuickClock, blocker: sqlite3.Connection
) -> None:
    """A call that fails for a moment is tried again by the store, at most 5 times."""
    async with limpet.open(url, clock=quick, sweep=False) as store:
        blocker.execute("BEGIN IMMEDIATE")

        with pytest.raises(Unavailable, match=r"state\.db.*locked") as caught:
            await store.put("key", 1)

        # Between five attempts.
        assert quick.slept == 4
        assert (caught.value.retryable, caught.value.outcome) == (True, "unavailable")
        blocker.execute("ROLLBACK")
        assert await store.get("key") is None
        assert (await store.put("key", 2)).version == 1


@pytest.mark.parametrize("api", ["async", "sync"])
async def test_a_writer_that_ends_in_time_is_waited_for(
    url: str, blocker: sqlite3.Connection, spy: Spy, api: str
) -> None:
    """A call that fails for a moment is tried again by the store, at most 5 times."""

    class Ending(QuickClock):
        async def sleep(self, seconds: float) -> None:
            if self.slept == 2:
                blocker.execute("ROLLBACK")
            await super().sleep(seconds)

    clock = Ending()
    if api == "async":
        async with limpet.open(url, clock=clock, sweep=False) as store:
            blocker.execute("BEGIN IMMEDIATE")
            entry = await store.put("key", 1)
    else:

        def use() -> limpet.Entry:
            with limpet.sync.open(url, clock=clock, sweep=False) as store:
                blocker.execute("BEGIN IMMEDIATE")
                return store.put("key", 1)

        blocker.close()
        blocker = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None, check_same_thread=False)
        entry = await asyncio.to_thread(use)
        blocker.close()

    assert (entry.version, clock.slept) == (1, 3)


async def test_reading_goes_on_beside_a_writer(url: str, quick: QuickClock, blocker: sqlite3.Connection) -> None:
    """A read sees every commit that was acknowledged before it began.

    Another process holds the writer's place; readers do not need it.
    """
    async with limpet.open(url, clock=quick, sweep=False) as store:
        await store.put("key", 1)
        blocker.execute("BEGIN IMMEDIATE")
        blocker.execute("DELETE FROM limpet_entries")

        assert await store.get("key") == 1
        assert (await store.keys()).keys == ["key"]
        assert [event.value async for event in store.history("key")] == [1]


# A file that cannot be used -------------------------------------------------------


async def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=r"nowhere/state\.db: No such file or directory"):
        await limpet.open(f"sqlite:///{tmp_path}/nowhere/state.db")


async def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    (tmp_path / "folder.db").mkdir()

    with pytest.raises(InvalidValue, match=r"folder\.db"):
        await limpet.open(f"sqlite:///{tmp_path}/folder.db")


@pytest.mark.parametrize("content", [b"This is a diary.\n" * 100, b"SQLite format 3\0" + b"\x07" * 5_000])
def test_a_file_that_is_not_a_database_is_corrupt_and_stays_as_it_is(url: str, path: Path, content: bytes) -> None:
    path.write_bytes(content)

    with pytest.raises(Corrupt, match=r"state\.db.*not a database"):
        limpet.sync.open(url)

    assert path.read_bytes() == content


async def test_a_schema_of_the_future_is_refused(url: str, path: Path) -> None:
    """A newer release wrote this file; an older one must not guess."""
    async with limpet.open(url) as store:
        await store.put("key", 1)
    with contextlib.closing(sqlite3.connect(path)) as rows, rows:
        rows.execute("UPDATE limpet_schema SET version_num = '0099'")

    with pytest.raises(Corrupt, match=r"state\.db has schema revision 0099, and this release knows none after 0002"):
        await limpet.open(url)


async def test_a_store_table_without_its_row_is_corrupt(url: str, path: Path) -> None:
    """An operator emptied the table that holds the id of the store."""
    async with limpet.open(url):
        pass
    with contextlib.closing(sqlite3.connect(path)) as rows, rows:
        rows.execute("DELETE FROM limpet_store")

    with pytest.raises(Corrupt, match=r"state\.db"):
        await limpet.open(url)


async def test_a_file_system_without_wal_is_named(url: str, spy: Spy) -> None:
    """The message must say which file it is about."""

    class Old(connections.Connection):
        def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
            return super().execute(sql.replace("= WAL", "= DELETE"), parameters)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "Connection", Old)
        with pytest.raises(Corrupt, match=r"state\.db.*WAL"):
            await limpet.open(url)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users may enter."""
    folder = Path(tempfile.mkdtemp(prefix="limpet-"))
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


def test_a_file_that_may_not_be_written_is_named(open_folder: Path) -> None:
    path = open_folder / "state.db"
    with limpet.sync.open(f"sqlite:///{path}", sweep=False) as store:
        store.put("key", 1)
    path.chmod(0o444)

    with Process("opens_as_another_user", f"sqlite:///{path}") as process:
        name, message = process.receive()

    assert name == "PermissionDenied"
    assert str(path) in message
    assert re.search("permission denied|readonly|read-only", message, re.IGNORECASE)


def test_a_folder_that_may_not_be_written_is_named(open_folder: Path) -> None:
    """The WAL lies beside the file, so the folder must be writable as well."""
    path = open_folder / "state.db"
    with limpet.sync.open(f"sqlite:///{path}", sweep=False) as store:
        store.put("key", 1)
    path.chmod(0o666)
    open_folder.chmod(0o555)

    with Process("opens_as_another_user", f"sqlite:///{path}") as process:
        name, message = process.receive()

    assert name == "PermissionDenied"
    assert str(path) in message


async def test_a_writer_that_may_not_write_is_denied_and_replaced(url: str, quick: QuickClock, spy: Spy) -> None:
    """Nothing is applied, and the engine goes on when the file can be written again."""
    async with limpet.open(url, clock=quick, sweep=False) as store:
        spy.after["BEGIN IMMEDIATE"] = lambda writer: writer.executescript("PRAGMA query_only = ON")

        with pytest.raises(PermissionDenied, match=r"state\.db.*readonly"):
            await store.put("key", 1)

        spy.after.clear()
        assert await store.get("key") is None
        assert (await store.put("key", 2)).version == 1


def test_damaged_pages_are_corrupt_and_not_absent(url: str, path: Path, quick: QuickClock) -> None:
    """Absent, unreadable and unavailable are three different answers."""
    limpet.sync.open(url, clock=quick, sweep=False).close()
    empty_bytes = path.stat().st_size
    with limpet.sync.open(url, clock=quick, sweep=False) as store:
        for number in range(200):
            store.put(f"key/{number:03}", "x" * 500)
    content = bytearray(path.read_bytes())
    content[empty_bytes:] = b"\xff" * (len(content) - empty_bytes)
    path.write_bytes(content)

    with limpet.sync.open(url, clock=quick, sweep=False) as store:
        with pytest.raises(Corrupt, match=r"state\.db"):
            assert [store.get(f"key/{number:03}") for number in range(200)] == ["x" * 500] * 200
        with pytest.raises(Corrupt, match=r"state\.db"):
            list(store.scan())


@pytest.mark.parametrize("kind", ["json", "record"])
async def test_a_value_that_was_damaged_by_hand_is_corrupt(url: str, path: Path, quick: QuickClock, kind: str) -> None:
    """Absent, unreadable and unavailable are three different answers. The message does not show the value."""
    async with limpet.open(url, clock=quick, sweep=False) as store:
        await store.put("key", limpet.Fields(a=1) if kind == "record" else {"a": 1})
        with contextlib.closing(sqlite3.connect(path)) as rows, rows:
            rows.execute("UPDATE limpet_entries SET value = '{secret' WHERE key = 'key'")

        with pytest.raises(Corrupt) as caught:
            await store.get("key")

    assert "secret" not in str(caught.value)


# What an error of SQLite becomes --------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("SQLITE_AUTH", PermissionDenied),
        ("SQLITE_BUSY", Unavailable),
        ("SQLITE_BUSY_SNAPSHOT", Unavailable),
        ("SQLITE_CANTOPEN", Unavailable),
        ("SQLITE_CONSTRAINT_TRIGGER", Unavailable),
        ("SQLITE_CORRUPT", Corrupt),
        ("SQLITE_CORRUPT_INDEX", Corrupt),
        ("SQLITE_ERROR", Unavailable),
        ("SQLITE_FULL", Unavailable),
        ("SQLITE_INTERRUPT", Unavailable),
        ("SQLITE_IOERR_CORRUPTFS", Corrupt),
        ("SQLITE_IOERR_READ", Unavailable),
        ("SQLITE_LOCKED", Unavailable),
        ("SQLITE_NOMEM", Unavailable),
        ("SQLITE_NOTADB", Corrupt),
        ("SQLITE_PERM", PermissionDenied),
        ("SQLITE_PROTOCOL", Unavailable),
        ("SQLITE_READONLY", PermissionDenied),
        ("SQLITE_READONLY_DBMOVED", Unavailable),
        ("SQLITE_READONLY_DIRECTORY", PermissionDenied),
        ("SQLITE_SCHEMA", Unavailable),
    ],
)
async def test_each_code_has_its_error(engine: SqliteEngine, name: str, expected: type[LimpetError]) -> None:
    error = sqlite3.OperationalError("a message of SQLite")
    error.sqlite_errorname = name

    assert type(engine._connections.translate(error)) is expected


async def test_the_words_of_a_trigger_are_not_shown(url: str, path: Path, quick: QuickClock) -> None:
    async with limpet.open(url, clock=quick, sweep=False) as store:
        with contextlib.closing(sqlite3.connect(path)) as rows, rows:
            rows.execute(
                "CREATE TRIGGER no BEFORE INSERT ON limpet_entries WHEN NEW.key = 'boom'"
                " BEGIN SELECT RAISE(ABORT, 'S3CRET'); END"
            )
        with pytest.raises(LimpetError) as caught:
            await store.put("boom", 1)

    assert "S3CRET" not in "".join(traceback.format_exception(caught.value))
    assert "SQLITE_CONSTRAINT" in str(caught.value)


@pytest.mark.parametrize("verb", ["open", "reopen", "read", "write"])
def test_a_process_without_descriptors_may_try_later(url: str, verb: str) -> None:
    """That passes. Nothing is damaged, and the same call succeeds afterwards."""
    with limpet.sync.open(url, sweep=False) as store:
        store.put("key", 1)

    with Process("runs_out_of_descriptors", url, verb) as process:
        assert process.receive() == ["Unavailable", True]
        assert process.receive() == 1


# The file of another program ------------------------------------------------------


def _others(path: Path, mode: str) -> None:
    """The database of another program."""
    with contextlib.closing(sqlite3.connect(path)) as rows, rows:
        rows.execute(f"PRAGMA journal_mode = {mode}")
        rows.execute("CREATE TABLE players (name TEXT)")
        rows.execute("INSERT INTO players VALUES ('alice')")


@pytest.mark.parametrize("mode", ["delete", "truncate", "persist"])
def test_the_journal_mode_of_a_file_of_others_is_not_changed(url: str, path: Path, mode: str) -> None:
    """The change is for good, and the other program may not work with it."""
    _others(path, mode)
    content = path.read_bytes()

    with pytest.raises(InvalidValue, match=r"state\.db holds tables that are not Limpet's.*\?journal=wal"):
        limpet.sync.open(url)

    assert path.read_bytes() == content
    assert [one.name for one in path.parent.iterdir() if not one.name.endswith("-journal")] == [path.name]


async def test_the_journal_mode_of_a_file_of_others_is_changed_where_that_is_allowed(url: str, path: Path) -> None:
    _others(path, "delete")

    async with limpet.open(f"{url}?journal=wal") as store:
        await store.put("key", 1)
    async with limpet.open(url) as store:
        assert await store.get("key") == 1

    with contextlib.closing(sqlite3.connect(path)) as rows:
        assert rows.execute("SELECT name FROM players").fetchall() == [("alice",)]


async def test_a_file_of_others_that_is_in_wal_mode_is_shared(url: str, path: Path) -> None:
    _others(path, "wal")

    async with limpet.open(url) as store:
        await store.put("key", 1)


# A full disk ----------------------------------------------------------------------


async def test_a_full_disk_is_unavailable_and_passes(url: str, quick: QuickClock, spy: Spy) -> None:
    """A call that fails for a moment is tried again by the store, at most 5 times.

    SQLite itself is configured so that the file may not grow, and fails as it does on a full disk.
    """
    engine = await open_sqlite(url, quick)
    await engine.commit("default", batch(put("small", 1)))
    await engine.close()
    spy.opened = lambda connection: connection.execute("PRAGMA max_page_count = 20")
    async with limpet.open(url, clock=quick, sweep=False) as store:
        written = 0

        async def fill() -> None:
            nonlocal written
            while written < 1_000:
                await store.put(f"key/{written}", "x" * 5_000)
                written += 1

        with pytest.raises(Unavailable, match=r"state\.db.*full") as caught:
            await fill()

        assert caught.value.outcome == "unavailable"
        assert 0 < written < 30
        assert (await store.keys("key/")).count == written
        assert await store.get("small") == 1
        spy.opened = None
        assert (await store.put(f"key/{written}", "x" * 5_000)).version == 1
        status = await store.status()
        assert (status.keys, status.revision) == (written + 2, written + 2)


def test_a_file_that_may_not_grow_is_reported_and_passes(url: str) -> None:
    """An acknowledged write is there when durable storage is opened again.

    The operating system refuses to let any file of the process grow. The write that met this is reported, the
    ones before it are kept, and the process goes on when there is room again.
    """
    with Process("outgrows", url, 600_000) as process:
        name, message, written, found, before, after = process.receive()

    assert name in ("Unavailable", "Ambiguous")
    assert "state.db" in message
    assert written > 5
    assert found == written
    assert (before, after) == ("x", "x")
    with limpet.sync.open(url) as store:
        assert store.keys("key/").count == written


# Interrupts -----------------------------------------------------------------------


@pytest.mark.parametrize("statement", ["BEGIN IMMEDIATE", "COMMIT"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_interrupt_of_one_thread_is_not_an_answer_to_others(
    url: str, quick: QuickClock, spy: Spy, statement: str, moment: str
) -> None:
    """Threads that write at once lose nothing.

    This thread commits for another one as well when Ctrl-C hits it. The other gets the true outcome: its write is
    applied, once.
    """
    gate = Gate()
    with limpet.sync.open(url, sweep=False, clock=quick) as store:
        engine: Any = store._twin._session.engine
        # The other waits between queueing and going on, until all of this is over.
        engine._writer.queue = Queue(after=lambda: gate() if threading.current_thread() is other else None)
        added: list[int] = []
        other = threading.Thread(target=lambda: added.append(store.add("hits", 10)))
        other.start()
        gate.await_thread()
        getattr(spy, moment)[statement] = Times(1, KeyboardInterrupt)

        with pytest.raises(KeyboardInterrupt):
            store.add("hits", 1)

        gate.open()
        other.join(PATIENCE_S)
        assert added == [10]
        committed = (moment, statement) == ("after", "COMMIT")
        assert store.get("hits") == (11 if committed else 10)
        assert store.add("hits", 100) == (111 if committed else 110)


async def test_an_interrupt_of_a_thread_is_not_silence_for_a_task(engine: SqliteEngine, spy: Spy) -> None:
    """Threads that write at once lose nothing.

    A thread without a loop commits for tasks of a loop as well. When it is interrupted, they are still answered.
    """
    engine._writer._flush = lambda loop: None  # type: ignore[method-assign]
    waiting = asyncio.create_task(engine.commit("default", batch(put("task", 1), request_id="mine")))
    await asyncio.sleep(0)
    spy.before["COMMIT"] = Times(1, KeyboardInterrupt)

    def write() -> None:
        with pytest.raises(KeyboardInterrupt), contextlib.suppress(StopIteration):
            engine.commit("default", batch(put("thread", 1))).send(None)

    await asyncio.to_thread(write)

    with pytest.raises(Ambiguous) as caught:
        await asyncio.wait_for(waiting, PATIENCE_S)
    assert caught.value.request_id == "mine"
    assert await engine.read("default", ["task", "thread"]) == [None, None]
