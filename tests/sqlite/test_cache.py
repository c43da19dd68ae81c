"""The cache of the SQLite engine: never out of date.

The engine keeps entries for as long as the header of the file's WAL index stays the same, and over its own
commits. Each test here would catch a stale read.

The loops are short; ``LIMPET_CACHE_LONG=20`` makes them twenty times as long.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

import limpet
import limpet.sync
from limpet.engines.sqlite import connections, forks
from limpet.engines.sqlite.cache import Cache, WalHeader, commit_count
from limpet.engines.sqlite.engine import SqliteEngine
from limpet.engines.sqlite.rows import APPEND_LAST, READ
from limpet.errors import Ambiguous, Unavailable
from limpet.model import Commit, Entry, Write
from tests.processes import PATIENCE_S
from tests.sqlite.cache_scenes import Party, Peer
from tests.sqlite.cache_support import (
    CACHED,
    LONG,
    UNCACHED,
    by_hand,
    check_cache,
    check_counters,
    disable_cache,
    engine_of,
    keeps,
    number,
    outside,
    set_by_hand,
    set_key,
)
from tests.sqlite.support import Gate, Hook, Spy, Times, batch, in_place, open_sqlite, put, sqlite_error

pytestmark = pytest.mark.timeout(600 * LONG)


class Rows:
    """Counts the single rows that the engine reads from the file, and steps in when one has been fetched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fetched = 0
        self.after: Callable[[], object] = bool
        rows = self

        class Row:
            def __init__(self, found: Any) -> None:
                self._found = found

            def fetchone(self) -> Any:
                return self._found

        class Watched(connections.Connection):
            def execute(self, sql: str, parameters: Any = (), /) -> Any:
                cursor = super().execute(sql, parameters)
                if sql != READ or parameters[1] == "superseded":
                    # A request that may be superseded looks for the mark of its retry, which is not kept.
                    return cursor
                with closing(cursor):
                    found = cursor.fetchone()
                rows.fetched += 1
                rows.after()
                return Row(found)

        monkeypatch.setattr(connections, "Connection", Watched)

    def once(self, work: Callable[[], object]) -> None:
        """Do this when the next row has been fetched, and not again."""

        def step_in() -> None:
            self.after = bool
            work()

        self.after = step_in


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Rows:
    """Stands on every connection that is opened from now on."""
    return Rows(monkeypatch)


@pytest.fixture
def other(path: Path, engine: SqliteEngine) -> Iterator[sqlite3.Connection]:
    """An operator's connection to the file of the engine."""
    with closing(by_hand(path)) as connection:
        yield connection


@pytest.fixture
async def second(url: str, clock: limpet.ManualClock, engine: SqliteEngine) -> AsyncIterator[SqliteEngine]:
    """Another engine of this process on the file."""
    opened = await open_sqlite(url, clock)
    yield opened
    await opened.close()


async def commit_then(engine: SqliteEngine, spy: Spy, hook: Hook, *writes: Write) -> None:
    """Commit, and run a hook between COMMIT and the read of the header."""
    spy.after["COMMIT"] = hook
    await engine.commit("default", batch(*writes))
    spy.after.clear()


# That there is a cache at all ---------------------------------------------------


async def test_what_was_read_is_not_read_again(rows: Rows, engine: SqliteEngine) -> None:
    """The other tests here would prove nothing about an engine that reads the file each time."""
    await engine.commit("default", batch(put("key", 1)))
    assert [await number(engine, key) for key in ("key", "absent")] == [1, None]
    rows.fetched = 0

    for _ in range(10):
        assert [await number(engine, key) for key in ("key", "absent")] == [1, None]

    assert rows.fetched == 0


async def test_what_was_written_here_is_not_read_again(rows: Rows, engine: SqliteEngine) -> None:
    """Our own commits change the header too, and we know what they changed."""
    await engine.commit("default", batch(put("key", 0), put("beside", 0)))
    rows.fetched = 0

    for count in range(1, 11):
        await engine.commit("default", batch(put("key", count)))
        assert [await number(engine, key) for key in ("key", "beside")] == [count, 0]

    # The very first commit of a connection starts a cache; the ones after it carry it on.
    assert rows.fetched <= 2


async def test_names_are_not_mixed_up(engine: SqliteEngine) -> None:
    """A key of one namespace or family is not that of another."""
    lock = batch(limpet.model.Put("key", b"3", family="lock"))
    await engine.commit("one", batch(put("key", 1)))
    await engine.commit("two", batch(put("key", 2)))
    await engine.commit("one", lock)

    for _ in range(2):
        assert [await number(engine, "key", space) for space in ("one", "two", "three")] == [1, 2, None]
        locks = [await engine.read(space, ["key"], family="lock") for space in ("one", "two")]
        assert [[entry and entry.stored for entry in found] for found in locks] == [[b"3"], [None]]


def test_what_a_caller_does_to_a_value_is_his_own_affair(url: str) -> None:
    """All callers get the same entry, and none may change it for the others."""
    with limpet.sync.open(url, sweep=False) as store:
        store.put("list", [1, {"a": 2}], meta={"by": ["me"]})
        store.record("record").put({"b": [1], "a": b"2"})
        for _ in range(2):
            store.get("list")[1]["a"] = 3
            store.get("list").append(4)
            store.entry("list").meta["by"].append("you")  # type: ignore[union-attr]
            store.record("record").fields()["b"].append(2)  # type: ignore[index]
            store.get("record")["c"] = 5

            entry = store.entry("list")
            assert entry is not None
            assert (entry.value, entry.meta) == ([1, {"a": 2}], {"by": ["me"]})
            assert store.record("record").fields() == {"a": b"2", "b": [1]}


def test_what_expires_is_absent_from_its_moment_on(url: str, clock: limpet.ManualClock) -> None:
    """An entry is there until its expiry time and absent from that time on.

    No process commits at that moment, so the header does not change.
    """
    with limpet.sync.open(url, sweep=False, clock=clock) as store:
        store.put("session", 1, ttl=10)
        assert store.get("session") == 1
        assert keeps(engine_of(store), "session")

        clock.advance(9.999)
        assert store.get("session") == 1
        clock.advance(0.001)
        assert store.get("session") is None
        assert store.create("session", 2).version == 1


def test_the_time_of_a_namespace_is_not_read_again(rows: Rows, url: str, path: Path, clock: limpet.ManualClock) -> None:
    """The time is that of the latest commit if the clock is behind it, and that is kept as entries are."""
    with limpet.sync.open(url, sweep=False, clock=clock) as one, limpet.sync.open(url, sweep=False, clock=clock) as two:
        two.put("session", 1, ttl=10)
        assert [one.get("session"), two.get("session")] == [1, 1]
        rows.fetched = 0
        for _ in range(10):
            assert [one.get("session"), two.get("session")] == [1, 1]
        assert rows.fetched == 0

        clock.advance(60)
        two.put("latest", 1)
        clock.set_back(60)

        assert [one.get("session"), two.get("session")] == [None, None]
        rows.fetched = 0
        for _ in range(10):
            assert [one.get("session"), two.get("session")] == [None, None]
        assert rows.fetched == 0
        with closing(by_hand(path)) as connection:
            connection.execute("UPDATE limpet_namespaces SET at_ms = 0")
            connection.execute("UPDATE limpet_changes SET at_ms = at_ms - 60000")
        assert one.get("session") == 1


# Other processes ----------------------------------------------------------------


@pytest.mark.parametrize("caching", [CACHED, UNCACHED])
def test_what_another_process_wrote_is_in_the_next_read(
    url: str, path: Path, clock: limpet.ManualClock, monkeypatch: pytest.MonkeyPatch, caching: str
) -> None:
    """A commit is in every read that begins after it was acknowledged, wherever either happens.

    Two processes take turns. One writes, deletes or lets something expire, and only when that is acknowledged the
    other reads it, and something else besides, or writes itself. In between the WAL is folded into the file and
    begun anew.
    """
    if caching == UNCACHED:
        disable_cache(monkeypatch.setattr)
    dice = random.Random(7)
    turns = LONG * (1500 if caching == CACHED else 300)
    address = f"{url}?synchronous=normal"
    keys = [f"key/{index}" for index in range(5)]
    known: dict[str, tuple[int, float | None]] = {}
    now = 0.0

    def expected(key: str) -> int | None:
        value, until_s = known.get(key, (None, None))
        return value if until_s is None or now < until_s else None

    with ExitStack() as stack:
        store = stack.enter_context(limpet.sync.open(address, sweep=False, clock=clock))
        there = stack.enter_context(Peer("obeys", address, path, caching))
        assert there.receive() == "ready"
        parties: list[Party | Peer] = [Party(store, str(path), clock), there]

        for turn in range(turns):
            writer, reader = dice.sample(parties, 2)
            key, beside = dice.sample(keys, 2)
            match dice.randrange(16):
                case 0 | 1 | 2 | 3 | 4 | 5:
                    ttl = dice.choice((None, None, 1.0, 2.5))
                    writer.do("put", key, turn, ttl)
                    known[key] = turn, None if ttl is None else now + ttl
                case 6 | 7:
                    writer.do("put_both", key, beside, turn)
                    known[key] = known[beside] = turn, None
                case 8 | 9:
                    # An add reads before it writes, and must not begin from what was once so.
                    before = expected(key)
                    assert writer.do("add", key, 1) == (before or 0) + 1
                    known[key] = (before or 0) + 1, None if before is None else known[key][1]
                case 10:
                    assert writer.do("delete", key) == (expected(key) is not None)
                    known.pop(key, None)
                case 11:
                    assert writer.do("touch", key, 1.5) == (expected(key) is not None)
                    if expected(key) is not None:
                        known[key] = known[key][0], now + 1.5
                case 12:
                    for party in parties:
                        party.do("advance", 0.5)
                    now += 0.5
                case 13:
                    writer.do("sweep")
                case 14:
                    mode = dice.choice(("PASSIVE", "FULL", "RESTART", "TRUNCATE"))
                    writer.do("by_hand", f"PRAGMA wal_checkpoint({mode})")
                case _:
                    if turn % 7 == 0:
                        writer.do("by_hand", "VACUUM")

            # Not all parties read each time, or none would ever write with a stale cache.
            for party in ((reader, writer), (reader,), (writer,), ())[turn % 4]:
                for name in (key, beside, key):
                    assert party.do("get", name) == expected(name), f"turn {turn}, {name}"


def test_a_counter_of_two_processes_never_stands_still(url: str, path: Path) -> None:
    """Concurrent adds all count.

    Two processes add in turns, and each add begins from what the other left a moment ago.
    """
    address = f"{url}?synchronous=normal"
    with limpet.sync.open(address, sweep=False) as store, Peer("obeys", address, path, CACHED) as there:
        there.receive()
        for turn in range(0, LONG * 1000, 2):
            assert store.add("count") == turn + 1
            assert there.do("add", "count", 1) == turn + 2


@pytest.mark.slow
def test_a_new_wal_index_of_the_same_file_is_seen_as_it_is(url: str, path: Path) -> None:
    """What was read is forgotten with the connection that read it.

    A killed process leaves its shared memory behind. The next to open the file begins it anew, in the same place,
    and its first header may look just as one did before.
    """
    with limpet.sync.open(url, sweep=False) as store:
        store.put("key", 0)
    for turn in range(5):
        with Peer("obeys", url, path, CACHED) as there:
            there.receive()
            with limpet.sync.open(url, sweep=False) as store:
                assert store.get("key") == turn
            there.do("add", "key", 1)
            there.kill()
        assert path.with_name("state.db-shm").exists()

        with limpet.sync.open(url, sweep=False) as store, closing(by_hand(path)) as connection:
            assert [store.get("key"), store.get("key")] == [turn + 1] * 2
            set_by_hand(connection, "key", 100)
            assert store.get("key") == 100
            set_by_hand(connection, "key", turn + 1)


def test_a_header_that_looks_as_before_deceives_no_reader(url: str, path: Path) -> None:
    """What was read is forgotten with the connection that read it.

    A fork closes all connections, and the shared memory goes with them. Meanwhile another process writes, folds
    the WAL into the file and leaves. The shared memory that we make then begins as ours did before: nothing in its
    header shows that the file has changed.
    """
    with limpet.sync.open(url, sweep=False) as store:
        store.put("key", 0)
    headers = set()
    with limpet.sync.open(url, sweep=False) as store:
        for turn in range(5):
            assert store.get("key") == turn
            assert keeps(engine_of(store), "key")
            headers.add(engine_of(store)._cached.wal.read())
            forks.before_fork()
            forks.after_fork_in_parent()
            outside(path, set_key(turn + 1))

            assert store.get("key") == turn + 1
    assert len(headers) == 1


_RECOVERED = """
import sqlite3, sys
path, count = sys.argv[1], int(sys.argv[2])
memory = open(path + "-shm", "r+b", buffering=0)
memory.seek(64)
byte = memory.read(1)[0]
memory.seek(64)
memory.write(bytes([byte ^ 1]))
connection = sqlite3.connect(path, isolation_level=None)
done = 0
while True:
    memory.seek(8)
    if int.from_bytes(memory.read(4), sys.byteorder) == count and done:
        break
    done += 1
    connection.execute("UPDATE limpet_entries SET value = ? WHERE key = 'key'", (str(done),))
print(done)
"""


def test_a_count_that_began_anew_deceives_no_reader(url: str, path: Path) -> None:
    """A process may die while it writes the header, and leave two copies of it that differ.

    The next one puts it right, and counts commits from zero. When it comes to the number that we know, the rest of
    the header is still another.
    """
    with limpet.sync.open(url, sweep=False) as store:
        for turn in range(20):
            store.put("key", turn)
        assert store.get("key") == 19
        count = commit_count(engine_of(store)._cached.wal.read())
        assert count >= 20

        command = [sys.executable, "-c", _RECOVERED, str(path), str(count)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)

        # Fewer would mean that it never began anew.
        assert int(done.stdout) == count
        assert commit_count(engine_of(store)._cached.wal.read()) == count
        assert store.get("key") == count
        assert store.add("key") == count + 1


# The same process ---------------------------------------------------------------


def test_a_second_engine_of_this_process_is_seen_at_once(url: str) -> None:
    """Two stores opened on the same storage see each other's writes."""
    address = f"{url}?synchronous=normal"
    with limpet.sync.open(address, sweep=False) as one, limpet.sync.open(address, sweep=False) as two:
        assert engine_of(one) is not engine_of(two)
        dice = random.Random(3)
        for turn in range(LONG * 500):
            writer, reader = dice.sample((one, two), 2)
            assert writer.add("count") == turn + 1
            writer.put("turn", turn)
            assert [reader.get("count"), reader.get("turn"), writer.get("turn")] == [turn + 1, turn, turn]
            if turn % 5 == 0:
                assert writer.take("turn") == turn
                assert [reader.get("turn"), writer.get("turn")] == [None, None]


def test_closing_one_engine_leaves_the_other_its_header(url: str, path: Path) -> None:
    """The header of a file is shared, and stays mapped for the engines that still read it."""
    with limpet.sync.open(url, sweep=False) as store, closing(by_hand(path)) as connection:
        store.put("key", 0)
        for turn in range(1, 10):
            limpet.sync.open(url, sweep=False).close()
            assert store.get("key") == turn - 1
            assert keeps(engine_of(store), "key")

            set_by_hand(connection, "key", turn)

            assert store.get("key") == turn


def test_rows_written_by_hand_are_seen_at_once(url: str, path: Path) -> None:
    """Whichever program writes to the file, and however: the file counts."""
    with limpet.sync.open(url, sweep=False) as store, closing(by_hand(path)) as connection:
        store.put("key", 1)
        store.put("doomed", 1)
        assert [store.get("key"), store.get("doomed"), store.get("made")] == [1, 1, None]

        connection.execute("BEGIN IMMEDIATE")
        set_by_hand(connection, "key", 2)
        assert store.get("key") == 1
        connection.execute("COMMIT")
        assert store.get("key") == 2

        connection.execute("DELETE FROM limpet_entries WHERE key = 'doomed'")
        assert store.get("doomed") is None

        connection.execute(
            "INSERT INTO limpet_entries SELECT namespace, family, 'made', kind, '3', version, revision,"
            " created_revision, created_ms, updated_ms, expires_ms, meta FROM limpet_entries WHERE key = 'key'"
        )
        assert store.get("made") == 3

        connection.execute("BEGIN IMMEDIATE")
        set_by_hand(connection, "key", 9)
        connection.execute("ROLLBACK")
        assert store.get("key") == 2


def test_a_file_behind_a_link_is_looked_at_where_it_is(tmp_path: Path) -> None:
    """A store that is opened through a symbolic link sees what others write to the file.

    SQLite keeps the shared memory beside the file that the link leads to. What lies beside the link is not it: here
    a leftover from the days before the file was moved, such as a killed process leaves.
    """
    (tmp_path / "disk").mkdir()
    path, link = tmp_path / "disk" / "state.db", tmp_path / "state.db"
    with limpet.sync.open(f"sqlite:///{path}", sweep=False) as store:
        store.put("key", 1)
        shutil.copy(f"{path}-shm", f"{link}-shm")
    link.symlink_to(path)

    with limpet.sync.open(f"sqlite:///{link}", sweep=False) as store, closing(by_hand(path)) as connection:
        assert store.get("key") == 1

        set_by_hand(connection, "key", 2)

        assert store.get("key") == 2
        assert store.add("key") == 3


async def test_a_write_begins_from_what_the_file_holds(
    engine: SqliteEngine, second: SqliteEngine, other: sqlite3.Connection
) -> None:
    """Guards see the state before the batch.

    That is the state of the file, and not what we last read of it; the counters of the namespace included.
    """
    for turn in range(1, 10):
        await engine.commit("default", batch(put("key", 0)))
        assert await number(engine, "key") == 0
        assert keeps(engine, "key")
        set_by_hand(other, "key", turn * 10)
        theirs = await second.commit("default", batch(put("beside", turn)))

        ours = await engine.commit("default", batch(limpet.model.Add("key", 1)))

        assert isinstance(theirs, Commit)
        assert isinstance(ours, Commit)
        assert ours.revision > theirs.revision
        assert [await number(engine, key) for key in ("key", "beside")] == [turn * 10 + 1, turn]


# Another commit right behind our own --------------------------------------------


async def test_a_commit_right_behind_ours_is_not_taken_for_ours(
    engine: SqliteEngine, spy: Spy, other: sqlite3.Connection
) -> None:
    """Another process commits between our COMMIT and our read of the header."""
    await engine.commit("default", batch(put("ours", 0), put("theirs", 0)))

    def come_behind(_: sqlite3.Connection) -> None:
        set_by_hand(other, "theirs", turn)

    for turn in range(1, 10):
        assert await number(engine, "theirs") == turn - 1
        assert keeps(engine, "theirs")
        await commit_then(engine, spy, come_behind, put("ours", turn))

        assert [await number(engine, key) for key in ("theirs", "ours")] == [turn, turn]


async def test_a_commit_right_behind_ours_may_undo_it(
    engine: SqliteEngine, spy: Spy, other: sqlite3.Connection
) -> None:
    """What we have just written is the first thing that another may change."""
    await engine.commit("default", batch(put("key", 0)))

    def come_behind(_: sqlite3.Connection) -> None:
        set_by_hand(other, "key", turn * 100)

    for turn in range(1, 10):
        assert await number(engine, "key") == (turn - 1) * 100
        await commit_then(engine, spy, come_behind, put("key", turn))

        assert await number(engine, "key") == turn * 100


async def test_revisions_go_on_from_a_commit_right_behind_ours(
    engine: SqliteEngine, second: SqliteEngine, spy: Spy
) -> None:
    """Each change has its own revision, growing in the order of the writes.

    The counters of a namespace are kept as the entries are, and another store moves them on.
    """
    revisions: list[int] = []

    def commit(committer: SqliteEngine) -> None:
        outcome = in_place(committer.commit("default", batch(put("key", len(revisions)))))
        assert isinstance(outcome, Commit)
        revisions.append(outcome.revision)

    def come_behind(_: sqlite3.Connection) -> None:
        spy.after.clear()
        commit(second)

    def take_turns() -> None:
        for _ in range(20):
            spy.after["COMMIT"] = come_behind
            commit(engine)
            commit(engine)

    await asyncio.to_thread(take_turns)

    assert len(revisions) == 60
    # The one behind is recorded before the one it came behind.
    in_order = [revision for one in range(0, 60, 3) for revision in (revisions[one + 1], revisions[one])]
    assert in_order == sorted(set(in_order))
    assert len(set(revisions)) == 60
    assert (await engine.status("default")).revision == max(revisions)


async def test_a_commit_after_our_look_is_not_taken_for_ours(
    engine: SqliteEngine, other: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process commits when we have read the header and have not yet gone on under it."""
    await engine.commit("default", batch(put("ours", 0), put("theirs", 0)))
    assert await number(engine, "theirs") == 0
    carry, carried = Cache.carry, list[bytes]()

    def slow_carry(self: Any, header: bytes, work: Any) -> None:
        set_by_hand(other, "theirs", 1)
        carry(self, header, work)
        carried.append(header)

    with monkeypatch.context() as patch:
        patch.setattr(Cache, "carry", slow_carry)
        await engine.commit("default", batch(put("ours", 1)))

    assert carried
    assert [await number(engine, key) for key in ("theirs", "ours")] == [1, 1]


async def test_a_header_read_by_halves_deceives_no_reader(
    engine: SqliteEngine, spy: Spy, other: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process is writing the header while we copy it.

    What we get has the count of our own commit and the rest of theirs, or the other way round. It resembles a
    header that never was, and nothing may be kept under it that is not so.
    """
    wal = engine._cached.wal
    assert wal is not None
    header = WalHeader.read
    await engine.commit("default", batch(put("ours", 0), put("theirs", 0)))

    for turn, cut in enumerate((4, 8, 12, 16, 20, 24, 32, 40), start=1):
        assert await number(engine, "theirs") == turn - 1
        halves: list[bytes] = []

        def come_behind(_: sqlite3.Connection, turn: int = turn, halves: list[bytes] = halves) -> None:
            halves.append(header(wal))
            set_by_hand(other, "theirs", turn)
            halves.append(header(wal))

        def torn(self: Any, turn: int = turn, cut: int = cut, halves: list[bytes] = halves) -> bytes:
            if len(halves) < 2:
                return header(self)
            ours, theirs = halves
            halves.clear()
            return ours[:cut] + theirs[cut:] if turn % 2 else theirs[:cut] + ours[cut:]

        monkeypatch.setattr(WalHeader, "read", torn)
        await commit_then(engine, spy, come_behind, put("ours", turn))
        monkeypatch.setattr(WalHeader, "read", header)

        assert [await number(engine, key) for key in ("theirs", "ours")] == [turn, turn]


@pytest.mark.parametrize("mode", ["PASSIVE", "RESTART", "TRUNCATE"])
async def test_a_checkpoint_right_behind_our_commit_changes_nothing(
    engine: SqliteEngine, spy: Spy, other: sqlite3.Connection, mode: str
) -> None:
    """A checkpoint may change the header and is no commit."""

    def checkpoint(_: sqlite3.Connection) -> None:
        other.execute(f"PRAGMA wal_checkpoint({mode})").fetchall()

    await engine.commit("default", batch(put("ours", 0), put("theirs", 0)))
    for turn in range(1, 10):
        await commit_then(engine, spy, checkpoint, put("ours", turn))

        assert [await number(engine, key) for key in ("theirs", "ours")] == [turn - 1, turn]
        set_by_hand(other, "theirs", turn)
        assert [await number(engine, key) for key in ("theirs", "ours")] == [turn, turn]


# Our own commits, while and when they fail --------------------------------------


@pytest.mark.parametrize("fails", [False, True])
async def test_nothing_is_seen_before_it_is_committed(engine: SqliteEngine, spy: Spy, fails: bool) -> None:
    """A read beside a commit sees the state before it, or after it, and what is rolled back is never seen."""
    await engine.commit("default", batch(put("key", 1)))
    assert await number(engine, "key") == 1
    gate = Gate()

    def step_in(_: sqlite3.Connection) -> None:
        gate()
        if fails:
            raise sqlite_error("SQLITE_FULL", "database or disk is full")

    spy.before["COMMIT"] = step_in
    writing = asyncio.create_task(engine.commit("default", batch(put("key", 2))))
    await asyncio.to_thread(gate.await_thread)
    beside = [await number(engine, "key") for _ in range(3)]
    gate.open()
    outcome = (await asyncio.gather(writing, return_exceptions=True))[0]

    assert beside == [1, 1, 1]
    assert isinstance(outcome, Unavailable if fails else Commit)
    assert await number(engine, "key") == (1 if fails else 2)


async def test_nothing_is_seen_by_halves(engine: SqliteEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that has seen one write of a batch sees the others.

    The commit is done, and the cache is being updated: it has the first key already, the second not yet.
    """
    for _ in range(2):
        await engine.commit("default", batch(put("left", 0), put("right", 0)))
    assert [keeps(engine, key) for key in ("left", "right")] == [True, True]
    gate, kept, really_put = Gate(), list[str](), Cache._put

    def slow_put(self: Any, entry_id: Any, entry: Entry | None, weight_bytes: int) -> None:
        kept.append(entry_id[2])
        if kept == ["left", "right"]:
            gate()
        really_put(self, entry_id, entry, weight_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(Cache, "_put", slow_put)
        writing = asyncio.create_task(engine.commit("default", batch(put("left", 1), put("right", 1))))
        await asyncio.to_thread(gate.await_thread)
        beside = [await number(engine, key) for key in ("left", "right", "left")]
        gate.open()
        await writing

    assert beside == [1, 1, 1]


async def test_a_commit_whose_answer_was_lost_is_read_from_the_file(engine: SqliteEngine, spy: Spy) -> None:
    """Ambiguous is the honest answer to the writer; a reader gets what the file holds."""
    await engine.commit("default", batch(put("key", 1)))
    assert await number(engine, "key") == 1
    spy.after["COMMIT"] = Times(1, lambda: sqlite_error("SQLITE_IOERR_FSYNC", "disk I/O error"))

    with pytest.raises(Ambiguous):
        await engine.commit("default", batch(put("key", 2)))

    assert await number(engine, "key") == 2


@pytest.mark.parametrize("moment", [APPEND_LAST, "COMMIT"], ids=["before", "at the end"])
@pytest.mark.parametrize("error", ["SQLITE_FULL", "SQLITE_IOERR_FSYNC", None])
def test_a_commit_that_failed_is_not_counted(
    url: str, path: Path, clock: limpet.ManualClock, spy: Spy, moment: str, error: str | None
) -> None:
    """A write that failed leaves nothing behind: no entry, and no change in the counters of the namespace.

    Nothing else was lost: other connections of the engine live on, and so might what they keep. Without a name the
    error is an interrupt, which may come at any moment.
    """

    def fail() -> BaseException:
        return KeyboardInterrupt() if error is None else sqlite_error(error, "it failed")

    engine = in_place(open_sqlite(url, clock))
    with closing(by_hand(path, raw=True)) as connection:
        in_place(engine.commit("default", batch(put("key", 0))))
        for turn in range(1, 6):
            assert in_place(number(engine, "key")) == turn - 1
            spy.before[moment] = Times(1, fail)
            with pytest.raises((Unavailable, Ambiguous, KeyboardInterrupt)):
                in_place(engine.commit("default", batch(put("key", 99), put(f"never/{turn}", 99))))

            assert [in_place(number(engine, key)) for key in ("key", f"never/{turn}")] == [turn - 1, None]
            for count in range(3):
                in_place(engine.commit("default", batch(put("key", turn), put(f"kept/{turn}/{count}", 1))))
            assert check_cache(engine, connection)
            check_counters(in_place(engine.status("default")), connection, "default")
    in_place(engine.close())


async def test_a_refused_batch_leaves_what_was_known(rows: Rows, engine: SqliteEngine) -> None:
    """A refused batch leaves no trace: no change, no event."""
    await engine.commit("default", batch(put("key", 1), put("beside", 1)))
    await engine.commit("default", batch(put("key", 2)))
    guard = limpet.model.Guard("beside", limpet.Version(99))
    rows.fetched = 0

    refusals = [await engine.commit("default", batch(put("key", 3), guards=(guard,))) for _ in range(3)]

    assert {type(refusal) for refusal in refusals} == {limpet.model.Refusal}
    assert [await number(engine, key) for key in ("key", "beside")] == [2, 1]


async def test_an_empty_group_changes_nothing(engine: SqliteEngine) -> None:
    """All who were queued may have been cancelled before their group began."""
    await engine.commit("default", batch(put("key", 1)))
    assert await number(engine, "key") == 1
    writer = engine._writer.connection

    with engine._writer.lock:
        engine._writer.commit_queued()

    assert engine._writer.connection is writer
    assert keeps(engine, "key")


# Readers that were held up ------------------------------------------------------


def reading(engine: SqliteEngine, key: str) -> tuple[threading.Thread, list[int | None]]:
    """A thread that reads one key, and what it found."""
    found: list[int | None] = []
    thread = threading.Thread(target=lambda: found.append(in_place(number(engine, key))))
    thread.start()
    return thread, found


@pytest.mark.parametrize("commits", [1, 2])
async def test_a_reader_that_was_held_up_does_not_bring_back_the_past(
    rows: Rows, engine: SqliteEngine, commits: int
) -> None:
    """A thread has fetched a row and not yet kept it when we commit, and go on under a new header."""
    await engine.commit("default", batch(put("beside", 0)))
    await engine.commit("default", batch(put("key", 0)))
    await engine.commit("default", batch(put("beside", 1)))
    # Only what is not kept is fetched.
    assert engine._cached.cache is not None
    engine._cached.cache.entries.pop(("default", "data", "key"))
    cache, gate = engine._cached.cache, Gate()
    rows.once(gate)
    thread, found = reading(engine, "key")
    await asyncio.to_thread(gate.await_thread)

    for count in range(1, commits + 1):
        await engine.commit("default", batch(put("key", count)))
    # Or the reader would have nothing to spoil.
    assert engine._cached.cache is cache
    gate.open()
    thread.join(PATIENCE_S)

    assert found == [0]
    assert await number(engine, "key") == commits


async def test_a_reader_that_was_held_up_does_not_bring_back_what_was_deleted(rows: Rows, engine: SqliteEngine) -> None:
    """The same with an entry that is gone, and with one that was not there."""
    await engine.commit("default", batch(put("gone", 0)))
    await engine.commit("default", batch(put("beside", 1)))
    assert engine._cached.cache is not None
    engine._cached.cache.entries.pop(("default", "data", "gone"), None)
    gates = [Gate(), Gate()]
    rows.once(gates[0])
    gone, found_gone = reading(engine, "gone")
    await asyncio.to_thread(gates[0].await_thread)
    rows.once(gates[1])
    made, found_made = reading(engine, "made")
    await asyncio.to_thread(gates[1].await_thread)

    await engine.commit("default", batch(limpet.model.Delete("gone"), put("made", 1)))
    for gate in gates:
        gate.open()
    gone.join(PATIENCE_S)
    made.join(PATIENCE_S)

    assert (found_gone, found_made) == ([0], [None])
    assert [await number(engine, key) for key in ("gone", "made")] == [None, 1]


async def test_a_row_is_not_kept_under_a_header_seen_later(
    rows: Rows, engine: SqliteEngine, other: sqlite3.Connection
) -> None:
    """Another process commits when the row has been fetched: what was fetched belongs to the header before."""
    await engine.commit("default", batch(put("key", 0)))
    for turn in range(1, 6):
        # So that the next read fetches its row.
        set_by_hand(other, "key", turn * 10)
        rows.once(lambda turn=turn: set_by_hand(other, "key", turn))  # type: ignore[misc]

        assert await number(engine, "key") == turn * 10
        assert await number(engine, "key") == turn


async def test_a_reader_held_up_over_many_headers_is_harmless(
    rows: Rows, engine: SqliteEngine, other: sqlite3.Connection
) -> None:
    """While it waits the cache is dropped, begun again and carried on; what it brings fits none of them."""
    await engine.commit("default", batch(put("key", 0), put("beside", 0)))
    set_by_hand(other, "beside", 1)
    gate = Gate()
    rows.once(gate)
    thread, found = reading(engine, "key")
    await asyncio.to_thread(gate.await_thread)

    for turn in range(1, 20):
        set_by_hand(other, "key", turn)
        assert await number(engine, "beside") == turn
        await engine.commit("default", batch(put("beside", turn + 1)))
    gate.open()
    thread.join(PATIENCE_S)

    assert found == [0]
    assert [await number(engine, key) for key in ("key", "beside")] == [19, 20]
