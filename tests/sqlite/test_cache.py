"""What the SQLite engine remembers of what it read: never longer than it is true.

The engine keeps entries for as long as the header of the file's WAL index stays the same, and over its own
commits. Each test here would catch it answering with something that is no longer so, or harming others by the
way it looks: the descriptors it keeps, the memory it takes, the locks that a close would drop.

Other processes are this file as well: ``python -m tests.sqlite.test_cache SCENE ARGUMENTS``. The loops are short;
``LIMPET_CACHE_LONG=20`` makes them twenty times as long.
"""

from __future__ import annotations

import asyncio
import errno
import json
import mmap
import os
import random
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest

import limpet
import limpet.sync
from limpet import hub
from limpet.engines.sqlite import cache as sqlite_cache
from limpet.engines.sqlite import connections, forks
from limpet.engines.sqlite.cache import Cache, WalHeader, commit_count
from limpet.engines.sqlite.engine import SqliteEngine
from limpet.engines.sqlite.group import Counters
from limpet.engines.sqlite.rows import READ, SAVE_COUNTERS, to_entry
from limpet.errors import Ambiguous, Conflict, Corrupt, TypeMismatch, Unavailable
from limpet.model import Commit, Entry
from tests.processes import PATIENCE_S
from tests.sqlite.support import (
    Gate,
    Process,
    Spy,
    Times,
    batch,
    in_place,
    open_sqlite,
    put,
    sqlite_error,
    stored,
    together,
)
from tests.sqlite.workers import await_moment, hear, in_child, say

LONG = int(os.environ.get("LIMPET_CACHE_LONG", "1"))

pytestmark = pytest.mark.timeout(600 * LONG)

SEEING, BLIND = "seeing", "blind"


# Helpers ------------------------------------------------------------------------


def engine_of(store: limpet.sync.Store) -> Any:
    return store._twin._session.engine


def go_blind(patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let nobody see the header, as where the shared memory cannot be mapped."""
    patch(WalHeader, "join", classmethod(lambda cls, path: None))


def by_hand(path: Path) -> sqlite3.Connection:
    """A connection that knows nothing of Limpet, as an operator has it."""
    return sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5)


def set_by_hand(connection: sqlite3.Connection, key: str, number: int) -> None:
    changed = connection.execute("UPDATE limpet_entries SET value = ? WHERE key = ?", (str(number), key))
    assert changed.rowcount == 1


def keeps(engine: SqliteEngine, key: str, namespace: str = "default") -> bool:
    """Whether the engine would answer this from memory, if nobody commits before."""
    cache = engine._cached.cache
    assert cache is not None, "there is no cache, so this test proves nothing"
    return (namespace, "data", key) in cache.entries


async def number(engine: SqliteEngine, key: str, namespace: str = "default") -> int | None:
    """The number under a key, read alone, as only single keys are kept."""
    found = await stored(engine, [key], namespace)
    return int(found[key]) if key in found else None


def descriptors() -> int:
    return len(os.listdir("/dev/fd"))


_OUTSIDE = """
import json, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=0.05)
print(json.dumps([connection.execute(sql).fetchone() for sql in sys.argv[2:]]))
connection.close()
"""


def outside(path: Path, *statements: str) -> list[Any]:
    """What a process without Limpet is answered, which opens the file, asks, and closes it again."""
    done = subprocess.run(
        [sys.executable, "-c", _OUTSIDE, str(path), *statements], capture_output=True, text=True, check=True
    )
    answers: list[Any] = json.loads(done.stdout)
    return answers


def set_key(number: int) -> str:
    return f"UPDATE limpet_entries SET value = '{number:d}' WHERE key = 'key'"


class Peer(Process):
    """A scene of this file in a process of its own."""

    module = "tests.sqlite.test_cache"

    def do(self, verb: str, *args: object) -> Any:
        self.tell([verb, *args])
        return self.hear()


class Party:
    """Somebody with a store on the file, here or in a peer: does what it is told."""

    def __init__(self, store: limpet.sync.Store, path: str, clock: limpet.ManualClock) -> None:
        self._store, self._path, self._clock = store, path, clock
        # So that the WAL is folded into the file, and begun anew, all the time.
        engine_of(store)._writer.connection.execute("PRAGMA wal_autocheckpoint = 8")

    def do(self, verb: str, *args: Any) -> Any:
        return getattr(self, verb)(*args)

    def put(self, key: str, value: object, ttl: float | None) -> None:
        self._store.put(key, value, ttl=ttl)

    def put_both(self, one: str, other: str, value: object) -> None:
        self._store.batch().put(one, value).put(other, value).commit()

    def add(self, key: str, by: int) -> int:
        return self._store.add(key, by)

    def touch(self, key: str, ttl: float) -> bool:
        return self._store.touch(key, ttl) is not None

    def delete(self, key: str) -> bool:
        return self._store.delete(key)

    def get(self, key: str) -> Any:
        return self._store.get(key)

    def sweep(self) -> int:
        return self._store.sweep()

    def advance(self, seconds: float) -> None:
        self._clock.advance(seconds)

    def by_hand(self, sql: str) -> None:
        with closing(by_hand(Path(self._path))) as connection:
            connection.execute(sql).fetchall()

    def tell(self, key: str) -> float:
        """Add to a counter, and say when that was done."""
        self._store.add(key)
        return time.monotonic()


SCENES: dict[str, Callable[..., None]] = {}


def scene(function: Callable[..., None]) -> Callable[..., None]:
    SCENES[function.__name__] = function
    return function


@scene
def obeys(url: str, path: str, sight: str) -> None:
    """Does what it is told until there is nobody to tell it anything."""
    if sight == BLIND:
        go_blind()
    clock = limpet.ManualClock()
    with limpet.sync.open(url, sweep=False, clock=clock) as store:
        party = Party(store, path, clock)
        say("ready")
        while (order := hear()) is not None:
            say(party.do(*order))


class Rows:
    """Counts the single rows that the engine asks the file for, and steps in when one has been fetched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
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
                if sql != READ:
                    return cursor
                with closing(cursor):
                    found = cursor.fetchone()
                rows.asked += 1
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


# That there is a cache at all ---------------------------------------------------


async def test_what_was_read_is_not_read_again(rows: Rows, engine: SqliteEngine) -> None:
    """The other tests here would prove nothing about an engine that asks the file each time."""
    await engine.commit("default", batch(put("key", 1)))
    assert [await number(engine, key) for key in ("key", "absent")] == [1, None]
    rows.asked = 0

    for _ in range(10):
        assert [await number(engine, key) for key in ("key", "absent")] == [1, None]

    assert rows.asked == 0


async def test_what_was_written_here_is_not_read_again(rows: Rows, engine: SqliteEngine) -> None:
    """Our own commits change the header too, and we know what they changed."""
    await engine.commit("default", batch(put("key", 0), put("beside", 0)))
    rows.asked = 0

    for count in range(1, 11):
        await engine.commit("default", batch(put("key", count)))
        assert [await number(engine, key) for key in ("key", "beside")] == [count, 0]

    # The very first commit of a connection starts a cache; the ones after it carry it on.
    assert rows.asked <= 2


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
    """Everybody is handed the same entry, and nobody may change it for the others."""
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

    Nobody commits when a moment comes, so the header does not tell.
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


def test_the_time_of_a_namespace_is_not_asked_for_again(
    rows: Rows, url: str, path: Path, clock: limpet.ManualClock
) -> None:
    """The time is that of the latest commit if the clock is behind it, and that is kept as entries are."""
    with limpet.sync.open(url, sweep=False, clock=clock) as one, limpet.sync.open(url, sweep=False, clock=clock) as two:
        two.put("session", 1, ttl=10)
        assert [one.get("session"), two.get("session")] == [1, 1]
        rows.asked = 0
        for _ in range(10):
            assert [one.get("session"), two.get("session")] == [1, 1]
        assert rows.asked == 0

        clock.advance(60)
        two.put("latest", 1)
        clock.set_back(60)

        assert [one.get("session"), two.get("session")] == [None, None]
        rows.asked = 0
        for _ in range(10):
            assert [one.get("session"), two.get("session")] == [None, None]
        assert rows.asked == 0
        with closing(by_hand(path)) as connection:
            connection.execute("UPDATE limpet_namespaces SET at_ms = at_ms - 60000")
        assert one.get("session") == 1


# Other processes ----------------------------------------------------------------


@pytest.mark.parametrize("sight", [SEEING, BLIND])
def test_what_another_process_wrote_is_in_the_next_read(
    url: str, path: Path, clock: limpet.ManualClock, monkeypatch: pytest.MonkeyPatch, sight: str
) -> None:
    """A commit is in every read that begins after it was acknowledged, wherever either happens.

    Two processes take turns. One writes, deletes or lets something expire, and only when that is acknowledged the
    other reads it, and something else besides, or writes itself. In between the WAL is folded into the file and
    begun anew.
    """
    if sight == BLIND:
        go_blind(monkeypatch.setattr)
    dice = random.Random(7)
    turns = LONG * (1500 if sight == SEEING else 300)
    address = f"{url}?synchronous=normal"
    keys = [f"key/{index}" for index in range(5)]
    known: dict[str, tuple[int, float | None]] = {}
    now = 0.0

    def expected(key: str) -> int | None:
        value, until_s = known.get(key, (None, None))
        return value if until_s is None or now < until_s else None

    with ExitStack() as stack:
        store = stack.enter_context(limpet.sync.open(address, sweep=False, clock=clock))
        there = stack.enter_context(Peer("obeys", address, path, sight))
        assert there.hear() == "ready"
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

            # Not everybody reads each time, or nobody would ever write with something old in mind.
            for party in ((reader, writer), (reader,), (writer,), ())[turn % 4]:
                for asked in (key, beside, key):
                    assert party.do("get", asked) == expected(asked), f"turn {turn}, {asked}"


def test_a_counter_of_two_processes_never_stands_still(url: str, path: Path) -> None:
    """Concurrent adds all count.

    Two processes add in turns, and each add begins from what the other left a moment ago.
    """
    address = f"{url}?synchronous=normal"
    with limpet.sync.open(address, sweep=False) as store, Peer("obeys", address, path, SEEING) as there:
        there.hear()
        for turn in range(0, LONG * 1000, 2):
            assert store.add("count") == turn + 1
            assert there.do("add", "count", 1) == turn + 2


def test_a_new_wal_index_of_the_same_file_is_seen_as_it_is(url: str, path: Path) -> None:
    """What was read is forgotten with the connection that read it.

    A killed process leaves its shared memory behind. The next to open the file begins it anew, in the same place,
    and its first header may look just as one did before.
    """
    with limpet.sync.open(url, sweep=False) as store:
        store.put("key", 0)
    for turn in range(5):
        with Peer("obeys", url, path, SEEING) as there:
            there.hear()
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


def test_a_header_that_looks_as_before_deceives_nobody(url: str, path: Path) -> None:
    """What was read is forgotten with the connection that read it.

    A fork closes all connections, and the shared memory goes with them. Meanwhile another process writes, folds
    the WAL into the file and leaves. The shared memory that we make then begins as ours did before: nothing in its
    header tells that the file has changed.
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


def test_a_count_that_began_anew_deceives_nobody(url: str, path: Path) -> None:
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


def test_closing_one_engine_leaves_the_other_its_sight(url: str, path: Path) -> None:
    """The board of a file is shared, and stays for whoever still looks."""
    with limpet.sync.open(url, sweep=False) as store, closing(by_hand(path)) as connection:
        store.put("key", 0)
        for turn in range(1, 10):
            limpet.sync.open(url, sweep=False).close()
            assert store.get("key") == turn - 1
            assert keeps(engine_of(store), "key")

            set_by_hand(connection, "key", turn)

            assert store.get("key") == turn


def test_rows_written_by_hand_are_seen_at_once(url: str, path: Path) -> None:
    """Whoever writes to the file, and however: it is the file that is asked."""
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
    engine: SqliteEngine, other: sqlite3.Connection, url: str, clock: limpet.ManualClock
) -> None:
    """Guards see the state before the batch.

    That is the state of the file, and not what we last read of it; the counters of the namespace included.
    """
    second = await open_sqlite(url, clock)
    try:
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
    finally:
        await second.close()


# Another commit right behind our own --------------------------------------------


async def test_a_commit_right_behind_ours_is_not_taken_for_ours(
    engine: SqliteEngine, spy: Spy, other: sqlite3.Connection
) -> None:
    """Somebody commits between our COMMIT and our look at the header."""
    await engine.commit("default", batch(put("ours", 0), put("theirs", 0)))

    def come_behind(_: sqlite3.Connection) -> None:
        set_by_hand(other, "theirs", turn)

    for turn in range(1, 10):
        assert await number(engine, "theirs") == turn - 1
        assert keeps(engine, "theirs")
        spy.after["COMMIT"] = come_behind
        await engine.commit("default", batch(put("ours", turn)))
        spy.after.clear()

        assert [await number(engine, key) for key in ("theirs", "ours")] == [turn, turn]


async def test_a_commit_right_behind_ours_may_undo_it(
    engine: SqliteEngine, spy: Spy, other: sqlite3.Connection
) -> None:
    """What we have just written is the first thing that another may change."""
    await engine.commit("default", batch(put("key", 0)))
    for turn in range(1, 10):
        assert await number(engine, "key") == (turn - 1) * 100
        spy.after["COMMIT"] = lambda _, turn=turn: set_by_hand(other, "key", turn * 100)  # type: ignore[misc]
        await engine.commit("default", batch(put("key", turn)))
        spy.after.clear()

        assert await number(engine, "key") == turn * 100


async def test_revisions_go_on_from_a_commit_right_behind_ours(
    engine: SqliteEngine, spy: Spy, url: str, clock: limpet.ManualClock
) -> None:
    """Each change has its own revision, growing in the order of the writes.

    The counters of a namespace are kept as the entries are, and another store moves them on.
    """
    second = await open_sqlite(url, clock)
    try:
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
        # The one behind is told before the one it came behind.
        in_order = [revision for one in range(0, 60, 3) for revision in (revisions[one + 1], revisions[one])]
        assert in_order == sorted(set(in_order))
        assert len(set(revisions)) == 60
        assert (await engine.status("default")).revision == max(revisions)
    finally:
        await second.close()


async def test_a_commit_after_our_look_is_not_taken_for_ours(
    engine: SqliteEngine, other: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody commits when we have looked at the header and have not yet gone on under it."""
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


async def test_a_header_read_by_halves_deceives_nobody(
    engine: SqliteEngine, spy: Spy, other: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process is writing the header while we copy it.

    What we get has the count of our own commit and the rest of theirs, or the other way round. It resembles a
    header that never was, and nothing may be kept under it that is not so.
    """
    board = engine._cached.wal
    assert board is not None
    header = WalHeader.read
    await engine.commit("default", batch(put("ours", 0), put("theirs", 0)))

    for turn, cut in enumerate((4, 8, 12, 16, 20, 24, 32, 40), start=1):
        assert await number(engine, "theirs") == turn - 1
        halves: list[bytes] = []

        def come_behind(_: sqlite3.Connection, turn: int = turn, halves: list[bytes] = halves) -> None:
            halves.append(header(board))
            set_by_hand(other, "theirs", turn)
            halves.append(header(board))

        def torn(self: Any, turn: int = turn, cut: int = cut, halves: list[bytes] = halves) -> bytes:
            if len(halves) < 2:
                return header(self)
            ours, theirs = halves
            halves.clear()
            return ours[:cut] + theirs[cut:] if turn % 2 else theirs[:cut] + ours[cut:]

        monkeypatch.setattr(WalHeader, "read", torn)
        spy.after["COMMIT"] = come_behind
        await engine.commit("default", batch(put("ours", turn)))
        spy.after.clear()
        monkeypatch.setattr(WalHeader, "read", header)

        assert [await number(engine, key) for key in ("theirs", "ours")] == [turn, turn]


@pytest.mark.parametrize("mode", ["PASSIVE", "RESTART", "TRUNCATE"])
async def test_a_checkpoint_right_behind_our_commit_changes_nothing(
    engine: SqliteEngine, spy: Spy, other: sqlite3.Connection, mode: str
) -> None:
    """A checkpoint may change the header and is no commit."""
    await engine.commit("default", batch(put("ours", 0), put("theirs", 0)))
    for turn in range(1, 10):
        spy.after["COMMIT"] = lambda _: other.execute(f"PRAGMA wal_checkpoint({mode})").fetchall()
        await engine.commit("default", batch(put("ours", turn)))
        spy.after.clear()

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
    await asyncio.to_thread(gate.await_somebody)
    beside = [await number(engine, "key") for _ in range(3)]
    gate.open()
    outcome = (await asyncio.gather(writing, return_exceptions=True))[0]

    assert beside == [1, 1, 1]
    assert isinstance(outcome, Unavailable if fails else Commit)
    assert await number(engine, "key") == (1 if fails else 2)


async def test_nothing_is_seen_by_halves(engine: SqliteEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has seen one write of a batch sees the others.

    The commit is done, and the cache is being told of it: of the first key already, of the second not yet.
    """
    for _ in range(2):
        await engine.commit("default", batch(put("left", 0), put("right", 0)))
    assert [keeps(engine, key) for key in ("left", "right")] == [True, True]
    gate, told, really_put = Gate(), list[str](), Cache._put

    def slow_put(self: Any, place: Any, entry: Entry | None) -> None:
        told.append(place[2])
        if told == ["left", "right"]:
            gate()
        really_put(self, place, entry)

    with monkeypatch.context() as patch:
        patch.setattr(Cache, "_put", slow_put)
        writing = asyncio.create_task(engine.commit("default", batch(put("left", 1), put("right", 1))))
        await asyncio.to_thread(gate.await_somebody)
        beside = [await number(engine, key) for key in ("left", "right", "left")]
        gate.open()
        await writing

    assert beside == [1, 1, 1]


async def test_a_commit_whose_answer_was_lost_is_read_from_the_file(engine: SqliteEngine, spy: Spy) -> None:
    """Ambiguous is the honest answer to the writer; a reader is told what the file holds."""
    await engine.commit("default", batch(put("key", 1)))
    assert await number(engine, "key") == 1
    spy.after["COMMIT"] = Times(1, lambda: sqlite_error("SQLITE_IOERR_FSYNC", "disk I/O error"))

    with pytest.raises(Ambiguous):
        await engine.commit("default", batch(put("key", 2)))

    assert await number(engine, "key") == 2


@pytest.mark.parametrize("moment", [SAVE_COUNTERS, "COMMIT"], ids=["before", "at the end"])
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
    with closing(by_hand(path)) as connection:
        connection.text_factory = bytes
        in_place(engine.commit("default", batch(put("key", 0))))
        for turn in range(1, 6):
            assert in_place(number(engine, "key")) == turn - 1
            spy.before[moment] = Times(1, fail)
            with pytest.raises((Unavailable, Ambiguous, KeyboardInterrupt)):
                in_place(engine.commit("default", batch(put("key", 99), put(f"never/{turn}", 99))))

            assert [in_place(number(engine, key)) for key in ("key", f"never/{turn}")] == [turn - 1, None]
            for count in range(3):
                in_place(engine.commit("default", batch(put("key", turn), put(f"kept/{turn}/{count}", 1))))
            assert check_books(engine, connection)
            check_tally(in_place(engine.status("default")), connection, "default")
    in_place(engine.close())


async def test_a_refused_batch_leaves_what_was_known(rows: Rows, engine: SqliteEngine) -> None:
    """A refused batch leaves no trace: no change, no event."""
    await engine.commit("default", batch(put("key", 1), put("beside", 1)))
    await engine.commit("default", batch(put("key", 2)))
    guard = limpet.model.Guard("beside", limpet.Version(99))
    rows.asked = 0

    refusals = [await engine.commit("default", batch(put("key", 3), guards=(guard,))) for _ in range(3)]

    assert {type(refusal) for refusal in refusals} == {limpet.model.Refusal}
    assert [await number(engine, key) for key in ("key", "beside")] == [2, 1]


async def test_a_group_of_nobody_changes_nothing(engine: SqliteEngine) -> None:
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
    await asyncio.to_thread(gate.await_somebody)

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
    await asyncio.to_thread(gates[0].await_somebody)
    rows.once(gates[1])
    made, found_made = reading(engine, "made")
    await asyncio.to_thread(gates[1].await_somebody)

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


async def test_a_reader_held_up_over_many_headers_harms_nobody(
    rows: Rows, engine: SqliteEngine, other: sqlite3.Connection
) -> None:
    """While it waits the cache is dropped, begun again and carried on; what it brings fits none of them."""
    await engine.commit("default", batch(put("key", 0), put("beside", 0)))
    set_by_hand(other, "beside", 1)
    gate = Gate()
    rows.once(gate)
    thread, found = reading(engine, "key")
    await asyncio.to_thread(gate.await_somebody)

    for turn in range(1, 20):
        set_by_hand(other, "key", turn)
        assert await number(engine, "beside") == turn
        await engine.commit("default", batch(put("beside", turn + 1)))
    gate.open()
    thread.join(PATIENCE_S)

    assert found == [0]
    assert [await number(engine, key) for key in ("key", "beside")] == [19, 20]


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
                    thread = threading.Thread(target=lambda: store.get("key"))
                    thread.start()
                    thread.join()


@pytest.fixture
def manner_of_failing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make it impossible to look at the header, in one of several ways."""
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

    Somebody in this process reads in a transaction, beside our stores and without them. As long as it lasts no
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


def test_opening_and_closing_one_file_leaves_no_descriptor(url: str) -> None:
    """A program may open a store for each request it serves."""
    with limpet.sync.open(url, sweep=False) as store:
        store.put("key", 0)
    before = descriptors()

    for count in range(300):
        with limpet.sync.open(f"{url}?synchronous=normal", sweep=False) as store:
            assert store.add("key") == count + 1

    assert descriptors() <= before


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
    """Where the shared memory cannot be mapped, every read asks the file, and that is all.

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
                thread = threading.Thread(target=read)
                thread.start()
                thread.join()

        read_in_threads(0, 3)
        before = descriptors()
        read_in_threads(3, 30)

        assert engine_of(store)._cached.wal is None
        assert found == [*range(33)]
        assert store.add("key") == 33
        assert store.get("key") == 33
        assert descriptors() <= before


def test_opening_what_cannot_be_used_leaves_no_descriptor(url: str, path: Path) -> None:
    """A program that tries again and again to open a store of another release is told why each time."""
    limpet.sync.open(url, sweep=False).close()
    with closing(by_hand(path)) as connection:
        connection.execute("UPDATE limpet_schema SET version_num = '0099'")
    before = descriptors()

    for _ in range(20):
        with pytest.raises(Corrupt):
            in_place(open_sqlite(url, limpet.SystemClock()))

    assert descriptors() <= before


# Forks --------------------------------------------------------------------------


@scene
def forks_and_takes_turns(url: str, turns: str) -> None:
    """Parent and child write in turns, and each reads what the other wrote. Tells what they read wrongly."""
    with limpet.sync.open(url, sweep=False) as store:
        store.put("turn", -1)
        store.put("absent", -1)
        assert store.get("turn") == -1
        to_parent, to_child = os.pipe(), os.pipe()

        def play(mine: int, theirs: int, parity: int) -> list[Any]:
            wrong = []
            for turn in range(int(turns)):
                if turn % 2 != parity:
                    os.read(mine, 1)
                elif turn % 4 < 2:
                    store.batch().put("turn", turn).delete("absent").commit()
                else:
                    store.batch().put("turn", turn).put("absent", turn).commit()
                seen = [store.get("turn"), store.get("absent")]
                if seen != [turn, None if turn % 4 < 2 else turn]:
                    wrong.append([turn, *seen])
                if turn % 2 == parity:
                    # Not before now: the other goes on at once.
                    os.write(theirs, b"!")
            return wrong

        outcome = in_child(lambda: play(to_child[0], to_parent[1], 1))
        here = play(to_parent[0], to_child[1], 0)
        say([here, outcome()])


@scene
def forks_among_cached_readers(url: str, forks: str) -> None:
    """Forks while threads read the same few keys. Each child writes, and is read by its parent at once."""
    with limpet.sync.open(url, sweep=False) as store:
        # Threads that read from memory alone give way only so often.
        sys.setswitchinterval(0.0002)
        store.put("count", 0)
        stop, problems, reads = threading.Event(), list[Any](), [0] * 4
        known = 0

        def read(index: int) -> None:
            last = 0
            try:
                while not stop.is_set():
                    floor = max(last, known)
                    last = store.get("count")
                    if last < floor or store.get("absent") is not None:
                        problems.append([last, floor])
                    reads[index] += 1
            except BaseException as error:
                problems.append(repr(error))

        threads = [threading.Thread(target=read, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()

        def work() -> list[Any]:
            before = store.get("count")
            return [before, store.add("count"), store.get("count")]

        for turn in range(0, 2 * int(forks), 2):
            time.sleep(0.005)
            if store.add("count") != turn + 1:
                problems.append("an add was lost")
            try:
                told = in_child(work)()
            except AssertionError as error:
                problems.append(str(error))
                break
            known = turn + 2
            if told != [turn + 1, turn + 2, turn + 2] or store.get("count") != turn + 2:
                problems.append([turn, told])
        stop.set()
        for thread in threads:
            thread.join()
        say([problems, min(reads)])


@scene
def forks_as_a_daemon_does(url: str, opens: str) -> None:
    """The child closes all descriptors that it inherited, and perhaps opens files of its own, which get their numbers.

    Tells what it reads and writes then, and how many of its files it lost.
    """
    with limpet.sync.open(url, sweep=False) as store:
        before = store.add("count")

        def work() -> list[Any]:
            for name in os.listdir("/dev/fd"):
                with suppress(OSError):
                    # All but the pipes, by which it tells.
                    if int(name) > 2 and not stat.S_ISFIFO(os.fstat(int(name)).st_mode):
                        os.close(int(name))
            own = [os.open(sys.executable, os.O_RDONLY) for _ in range(int(opens))]
            told = [store.get("count"), store.add("count"), store.get("count")]
            lost = 0
            for descriptor in own:
                try:
                    lost += not os.path.samestat(os.fstat(descriptor), os.stat(sys.executable))
                except OSError:
                    lost += 1
            return [*told, lost]

        say([before, *in_child(work)(), store.get("count")])


def test_parent_and_child_see_each_other(url: str) -> None:
    """A child after a fork goes on with its own connections, and sees what its parent writes, and the other way."""
    with Peer("forks_and_takes_turns", f"{url}?synchronous=normal", LONG * 400) as process:
        assert process.hear() == [[], []]


def test_a_fork_among_readers_of_the_cache_deceives_nobody(url: str) -> None:
    """A child after a fork goes on with its own connections.

    What was read before the fork is forgotten by both.
    """
    with Peer("forks_among_cached_readers", f"{url}?synchronous=normal", LONG * 40) as process:
        problems, reads = process.hear()

    assert problems == []
    assert reads > 100


@pytest.mark.parametrize("opens", [0, 3, 40])
@pytest.mark.parametrize("held_elsewhere", [False, True])
def test_a_child_that_closes_what_it_inherited_goes_on(url: str, held_elsewhere: bool, opens: int) -> None:
    """A child after a fork goes on with its own connections.

    A daemon closes all descriptors after its fork, those it does not know of as well, and their numbers go to what
    is opened next: files of its own, or SQLite's. While another process has the file open, its shared memory
    outlives the fork, and so would a descriptor of it that somebody closes later.
    """
    with ExitStack() as stack:
        if held_elsewhere:
            store = stack.enter_context(limpet.sync.open(url, sweep=False))
            assert store.get("count") is None
        with Peer("forks_as_a_daemon_does", url, opens) as process:
            assert process.hear() == [1, 1, 2, 2, 0, 2]


# Connections that come and go ---------------------------------------------------


def full() -> sqlite3.OperationalError:
    return sqlite_error("SQLITE_FULL", "database or disk is full")


@pytest.mark.parametrize("held_elsewhere", [False, True])
@pytest.mark.parametrize("statement", [SAVE_COUNTERS, "COMMIT"], ids=["before", "at the end"])
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
    spy.before[SAVE_COUNTERS] = Times(1, full)
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
            thread = threading.Thread(target=read)
            thread.start()
            thread.join()
            if turn % 4 == 0:
                # With the writer gone too, the last connection is that of a thread that has ended.
                engine_of(store)._writer.abandon()

        assert found == [[turn, turn] for turn in range(1, 40)]


# Bounds -------------------------------------------------------------------------


def check_tally(tally: Any, connection: sqlite3.Connection, namespace: str) -> None:
    """The counters of a namespace are what one counts in the file. Its time is not: nobody could count it."""
    found = Counters.load(connection, namespace)  # type: ignore[arg-type]
    assert (tally.revision, tally.floor) == (found.revision, found.floor)
    (keys,) = connection.execute(
        "SELECT count(*) FROM limpet_entries WHERE namespace = ? AND family = 'data'", (namespace,)
    ).fetchone()
    log_changes, log_bytes, revision = connection.execute(
        "SELECT count(*), coalesce(sum(size_bytes), 0), max(revision) FROM limpet_changes WHERE namespace = ?",
        (namespace,),
    ).fetchone()
    assert (tally.keys, tally.log_changes, tally.log_bytes) == (keys, log_changes, log_bytes)
    assert tally.size_bytes == found.size_bytes
    assert tally.revision >= (revision or 0)


def check_books(engine: SqliteEngine, connection: sqlite3.Connection) -> bool:
    """What is kept is within its bounds, and is what the file holds. Whether anything is kept."""
    cache, wal = engine._cached.cache, engine._cached.wal
    assert cache is not None
    assert wal is not None
    assert len(cache.entries) <= sqlite_cache.CACHED_MAX
    assert (
        max((entry.size_bytes for entry in cache.entries.values() if entry), default=0) <= sqlite_cache.CACHED_BYTES_MAX
    )
    if cache.header != wal.read():
        # Nobody will ask this one again.
        return False
    for place, entry in cache.entries.items():
        row = connection.execute(READ, place).fetchone()
        assert entry == (None if row is None else to_entry(row)), place
    for namespace, tally in cache.counters.items():
        check_tally(tally, connection, namespace)
    return bool(cache.entries)


def do_something(store: limpet.sync.Store, dice: random.Random, clock: limpet.ManualClock) -> None:
    """One of all the things that a store can do, on one of a few keys."""
    key = f"key/{dice.randrange(6)}"
    value = dice.choice((1, -2.5, None, "text", [1, {"a": None}], b"raw\0bytes", "x" * dice.randrange(4000)))
    ttl = dice.choice((None, None, 1.0, 3.0))
    request_id = dice.choice((None, None, f"request/{dice.randrange(40)}"))
    meta = dice.choice((None, {"by": "dice"}))
    record = store.record(f"record/{dice.randrange(3)}")
    fields = {name: dice.choice((1, "a", b"b", b"\xff", {"$text": 1})) for name in dice.sample("abc", 2)}
    match dice.randrange(16):
        case 0 | 1 | 2:
            store.put(key, value, ttl=ttl, meta=meta, request_id=request_id)
        case 3:
            store.create(key, value, ttl=ttl)
        case 4:
            store.add("count", dice.randrange(-3, 4), request_id=request_id)
        case 5:
            record.put(fields, ttl=ttl)
        case 6:
            record.set(fields, unset={*"abc"} - {*fields})
        case 7:
            record.swap("a", 1, "a", set={"b": 2})
        case 8:
            store.touch(key, dice.choice((0.5, 5)))
        case 9:
            store.delete(key, request_id=request_id)
        case 10:
            store.take(key)
        case 11:
            store.batch(request_id=request_id).put(key, value).delete("count").add("other").commit()
        case 12:
            store.put(key, value, expect=limpet.Version(dice.randrange(4)))
        case 13:
            clock.advance(dice.choice((0.2, 1.5)))
            store.sweep()
        case 14:
            with store.lock("door", ttl=5) as lock:
                store.put(key, value, fence=lock)
        case _:
            if dice.random() < 0.3:
                clock.advance(700)
                store.trim()


@pytest.mark.parametrize(("count_max", "bytes_max"), [(16_384, 2_048), (4, 2_048), (1, 16)])
def test_what_is_kept_is_what_the_file_holds(
    url: str,
    path: Path,
    clock: limpet.ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    count_max: int,
    bytes_max: int,
) -> None:
    """After everything that a store can do, everything kept is compared with its row, and is within its bounds."""
    monkeypatch.setattr(sqlite_cache, "CACHED_MAX", count_max)
    monkeypatch.setattr(sqlite_cache, "CACHED_BYTES_MAX", bytes_max)
    dice = random.Random(count_max)
    compared = 0
    with ExitStack() as stack:
        store = stack.enter_context(limpet.sync.open(f"{url}?synchronous=normal", sweep=False, clock=clock))
        connection = stack.enter_context(closing(by_hand(path)))
        connection.text_factory = bytes
        stores = [store, store.namespace("beside")]
        for _ in range(LONG * 400):
            chosen = dice.choice(stores)
            with suppress(Conflict, TypeMismatch):
                do_something(chosen, dice, clock)
            for key in ("count", f"key/{dice.randrange(6)}", f"record/{dice.randrange(4)}"):
                dice.choice(stores).entry(key)
            chosen.outcome(f"request/{dice.randrange(40)}")
            in_place(engine_of(store).read("default", ["door"], family="lock"))
            compared += check_books(engine_of(store), connection)
    assert compared > LONG * 200


async def test_what_a_group_leaves_is_what_the_file_holds(
    engine: SqliteEngine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group may write one key several times, in several namespaces; some of it is refused."""
    monkeypatch.setattr(sqlite_cache, "CACHED_MAX", 8)
    monkeypatch.setattr(sqlite_cache, "CACHED_BYTES_MAX", 1_000)
    dice = random.Random(5)
    compared = 0
    with closing(by_hand(path)) as connection:
        connection.text_factory = bytes
        for _ in range(LONG * 100):
            commits = []
            for _ in range(dice.randrange(1, 12)):
                key = f"key/{dice.randrange(6)}"
                write = dice.choice(
                    (limpet.model.Put(key, b"1" * dice.randrange(1, 2000)), limpet.model.Delete(key), put(key, 7))
                )
                guards = (limpet.model.Guard("key/0", limpet.Version(dice.randrange(1, 4))),)
                commits.append(engine.commit(dice.choice("ab"), batch(write, guards=dice.choice(((), (), guards)))))
            await asyncio.gather(*commits)
            await number(engine, f"key/{dice.randrange(6)}", "a")
            compared += check_books(engine, connection)
    assert compared > LONG * 50


@pytest.mark.parametrize("count", [1, 3])
async def test_what_readers_push_out_is_not_taken_for_absent(engine: SqliteEngine, count: int) -> None:
    """Readers fill the cache while a group is being decided, and what was there a moment ago is there no more."""
    await engine.commit("default", batch(put("key", 0)))
    now_ms = engine._writer._now_ms

    def push_out() -> int:
        if engine._cached.cache is not None:
            engine._cached.cache.entries.clear()
        return now_ms()

    for turn in range(5):
        assert await number(engine, "key") == turn * count
        assert keeps(engine, "key")
        engine._writer._now_ms = push_out
        await asyncio.gather(
            *(engine.commit("default", batch(limpet.model.Add("key", 1), put(f"{n}", n))) for n in range(count))
        )
        engine._writer._now_ms = now_ms

        assert await number(engine, "key") == (turn + 1) * count


def test_many_readers_leave_the_books_in_order(url: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads fill, push out and rewrite at the same time, and what is kept stays right and within its bounds."""
    monkeypatch.setattr(sqlite_cache, "CACHED_MAX", 20)
    monkeypatch.setattr(sqlite_cache, "CACHED_BYTES_MAX", 800)
    with limpet.sync.open(f"{url}?synchronous=normal", sweep=False) as store, closing(by_hand(path)) as connection:
        connection.text_factory = bytes
        problems: list[str] = []
        for index in range(50):
            store.put(f"key/{index}", "x" * index * 20)

        def work(seed: int) -> None:
            dice = random.Random(seed)
            try:
                for _ in range(LONG * 1500):
                    index = dice.randrange(60)
                    if dice.random() < 0.05:
                        store.put(f"key/{index}", "x" * index * 20)
                    elif store.get(f"key/{index}", "x" * index * 20) != "x" * index * 20:
                        problems.append(f"key/{index}")
            except BaseException as error:
                problems.append(repr(error))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert problems == []
        store.get("key/1")
        assert check_books(engine_of(store), connection)


async def test_namespaces_take_no_more_room_than_there_is(
    engine: SqliteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every queue, page and loop has a bound: a program may have a namespace for each of its users.

    The counters of each are kept as well.
    """
    monkeypatch.setattr(sqlite_cache, "CACHED_MAX", 200)
    await engine.commit("default", batch(put("key", 1)))

    for start in range(0, 2000, 100):
        await asyncio.gather(*(engine.commit(f"user-{start + n}", batch(put("key", 1))) for n in range(100)))

    assert engine._cached.cache is not None
    assert len(engine._cached.cache.counters) <= sqlite_cache.CACHED_MAX


# Watching other processes -------------------------------------------------------


@pytest.mark.parametrize("sight", [SEEING, BLIND])
async def test_news_of_another_process_come_soon(
    url: str, path: Path, monkeypatch: pytest.MonkeyPatch, sight: str
) -> None:
    """Writes through one store wake the watchers of another, long before the wait would end by itself."""
    if sight == BLIND:
        go_blind(monkeypatch.setattr)
    rounds = LONG * 30
    dice = random.Random(11)
    async with limpet.open(url, sweep=False) as store, store.watch("news") as watch:
        with Peer("obeys", url, path, sight) as there:
            await asyncio.to_thread(there.hear)
            for turn in range(1, rounds + 1):
                await asyncio.sleep(dice.random() * 0.03)
                telling = asyncio.create_task(asyncio.to_thread(there.do, "tell", "news"))
                event = await asyncio.wait_for(anext(watch), hub.WAIT_S / 2)
                assert event.value == turn
                await telling


async def test_whoever_waits_leaves_the_file_alone(url: str, path: Path) -> None:
    """Waiting for news is a look at the header. The log is read when somebody has committed."""
    engine = await open_sqlite(url, limpet.SystemClock())
    looks: list[int] = []
    feed = engine._log_page

    def counted(*args: Any) -> Any:
        looks.append(1)
        return feed(*args)

    engine._log_page = counted  # type: ignore[assignment, method-assign]
    try:
        await engine.changes("default", 0, wait_s=0.3)
        alone = len(looks)

        waiting = asyncio.create_task(engine.changes("default", 0, wait_s=0.5))
        with closing(by_hand(path)) as connection:
            for turn in range(1, 4):
                await asyncio.sleep(0.1)
                connection.execute("UPDATE limpet_store SET epoch = ?", (turn,))
        await waiting

        assert alone <= 2
        assert len(looks) - alone >= 4
    finally:
        await engine.close()


async def test_news_that_come_while_we_look_are_not_slept_through(url: str, clock: limpet.ManualClock) -> None:
    """Another process commits when we have read the log and not yet begun to wait."""
    engine, second = await open_sqlite(url, clock), await open_sqlite(url, clock)
    try:
        feed, fed = engine._log_page, list[Any]()

        def slow_feed(*args: Any) -> Any:
            fed.append(feed(*args))
            if len(fed) == 1:
                thread = threading.Thread(target=lambda: in_place(second.commit("default", batch(put("key", 1)))))
                thread.start()
                thread.join(PATIENCE_S)
            return fed[-1]

        engine._log_page = slow_feed  # type: ignore[assignment, method-assign]
        began = time.monotonic()
        found = await engine.changes("default", 0, wait_s=10.0)

        assert [change.key for change in found.changes] == ["key"]
        assert time.monotonic() - began < 5
    finally:
        await engine.close()
        await second.close()


async def test_a_watch_goes_on_when_the_file_was_let_go_of(url: str, path: Path) -> None:
    """A fork closes all connections, and the shared memory goes with them. Whoever waits looks again."""
    async with limpet.open(url, sweep=False) as store, store.watch() as watch:
        await store.put("key", 0)
        assert (await anext(watch)).value == 0
        for turn in range(1, 6):
            forks.before_fork()
            forks.after_fork_in_parent()
            # What stood in the header may stand there again, though the file has changed meanwhile.
            other = await open_sqlite(url, limpet.SystemClock())
            await other.commit("default", batch(put("key", turn)))
            await other.close()
            assert await store.get("key") == turn

            event = await asyncio.wait_for(anext(watch), 60)
            assert event.value == turn


# Under load ---------------------------------------------------------------------

COUNTERS = 3
PAIR = COUNTERS
WORKERS_MAX = 16


class Ledger:
    """Shared memory in which each worker writes down, in places of its own, what it began and what was acknowledged."""

    SIZE = 2 * WORKERS_MAX * (COUNTERS + 1) * 8

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._numbers = memoryview(mmap.mmap(file.fileno(), self.SIZE)).cast("Q")

    def _place(self, worker: int, counter: int) -> int:
        return (worker * (COUNTERS + 1) + counter) * 2

    def begin(self, worker: int, counter: int) -> None:
        self._numbers[self._place(worker, counter)] += 1

    def acknowledge(self, worker: int, counter: int, value: int) -> None:
        self._numbers[self._place(worker, counter) + 1] = value

    def begun(self, counter: int) -> int:
        return sum(self._numbers[self._place(worker, counter)] for worker in range(WORKERS_MAX))

    def acknowledged(self, counter: int) -> int:
        return max(self._numbers[self._place(worker, counter) + 1] for worker in range(WORKERS_MAX))


class Blocking:
    """The blocking face, to be used as the other one: its coroutines never suspend."""

    def __init__(self, store: limpet.sync.Store) -> None:
        self._store = store

    async def get(self, key: str, default: object) -> Any:
        return self._store.get(key, default)

    async def add(self, key: str) -> int:
        return self._store.add(key)

    async def add_both(self, one: str, other: str) -> Any:
        return self._store.batch().add(one).add(other).commit()


class Awaiting:
    """The asynchronous face, with the same verbs."""

    def __init__(self, store: limpet.Store) -> None:
        self._store = store
        self.get, self.add = store.get, store.add

    async def add_both(self, one: str, other: str) -> Any:
        return await self._store.batch().add(one).add(other).commit()


class Reader:
    """Reads and adds, and checks that time goes forward."""

    def __init__(self, worker: int, ledger: Ledger, end: float) -> None:
        self._worker, self._ledger, self._end = worker, ledger, end
        self._seen = [0] * (COUNTERS + 1)
        self.problems: list[Any] = []
        self.reads = self.adds = 0

    async def run(self, store: Any) -> None:
        dice = random.Random(self._worker)
        try:
            while time.monotonic() < self._end and len(self.problems) < 10:
                roll = dice.random()
                if roll < 0.03:
                    await self._add(store, dice.randrange(COUNTERS))
                elif roll < 0.04:
                    await self._add_both(store)
                elif roll < 0.9:
                    await self._read(store, f"count/{(counter := dice.randrange(COUNTERS))}", counter)
                else:
                    # Both are added to together, so whatever was read first cannot be ahead.
                    for key in ("left", "right", "left"):
                        await self._read(store, key, PAIR)
        except Exception as error:
            self.problems.append(repr(error))

    async def _read(self, store: Any, key: str, counter: int) -> None:
        floor = max(self._ledger.acknowledged(counter), self._seen[counter])
        value = await store.get(key, 0)
        # Looked at afterwards: whoever began before we read is counted.
        ceiling = self._ledger.begun(counter)
        if not floor <= value <= ceiling:
            self.problems.append([key, floor, value, ceiling])
        self._seen[counter] = value
        self.reads += 1

    async def _add(self, store: Any, counter: int) -> None:
        floor = max(self._ledger.acknowledged(counter), self._seen[counter])
        self._ledger.begin(self._worker, counter)
        value = await store.add(f"count/{counter}")
        self._note(f"count/{counter}", counter, floor, value)

    async def _add_both(self, store: Any) -> None:
        floor = max(self._ledger.acknowledged(PAIR), self._seen[PAIR])
        self._ledger.begin(self._worker, PAIR)
        commit = await store.add_both("left", "right")
        left, right = (entry.value for entry in commit.entries)
        if left != right:
            self.problems.append(["pair", left, right])
        self._note("pair", PAIR, floor, left)

    def _note(self, key: str, counter: int, floor: int, value: int) -> None:
        if value <= floor:
            self.problems.append([key, "added", floor, value])
        self._ledger.acknowledge(self._worker, counter, value)
        self._seen[counter] = value
        self.adds += 1


@scene
def counts(url: str, ledger: str, first: str, face: str, seconds: str) -> None:
    """Four readers, in threads or in tasks. Tells what they read wrongly, and how much they read."""
    fetched = 0
    keep = Cache.keep

    def counted(self: Any, header: bytes, place: Any, entry: Entry | None) -> None:
        nonlocal fetched
        fetched += 1
        keep(self, header, place, entry)

    Cache.keep = counted  # type: ignore[assignment, method-assign]
    book = Ledger(ledger)

    def readers() -> list[Reader]:
        say("ready")
        await_moment()
        end = time.monotonic() + float(seconds)
        return [Reader(int(first) + index, book, end) for index in range(4)]

    async def in_tasks() -> list[Reader]:
        async with limpet.open(url, sweep=False) as store:
            working = readers()
            await asyncio.gather(*(reader.run(Awaiting(store)) for reader in working))
            return working

    def in_threads() -> list[Reader]:
        with limpet.sync.open(url, sweep=False) as store:
            working = readers()
            threads = [
                threading.Thread(target=lambda reader=reader: in_place(reader.run(Blocking(store))))
                for reader in working
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return working

    done = in_threads() if face == "threads" else asyncio.run(in_tasks())
    problems = [problem for reader in done for problem in reader.problems]
    say([problems, sum(reader.reads for reader in done), sum(reader.adds for reader in done), fetched])


@scene
def disturbs(url: str, path: str, seconds: str) -> None:
    """Folds the WAL into the file, opens and closes stores, writes to other namespaces, all the time."""
    say("ready")
    await_moment()
    end, dice, done = time.monotonic() + float(seconds), random.Random(13), 0
    while time.monotonic() < end:
        time.sleep(0.01)
        match dice.randrange(3):
            case 0:
                with closing(sqlite3.connect(path, isolation_level=None, timeout=0.01)) as connection:
                    mode = dice.choice(("PASSIVE", "FULL", "RESTART", "TRUNCATE"))
                    connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchall()
            case 1:
                with limpet.sync.open(url, sweep=False) as store:
                    store.get("count/0")
            case _:
                with limpet.sync.open(url, sweep=False) as store:
                    store.namespace("beside").add("count/0")
        done += 1
    say(done)


def test_time_goes_forward_for_everybody(url: str, path: Path, tmp_path: Path, capsys: Any) -> None:
    """A read never goes back, and is never behind what was acknowledged to anybody before it began.

    Three processes with four readers each, in threads and in tasks, read and add to a few counters, while a fourth
    disturbs them. What each began and what was acknowledged stands in shared memory, so that every read knows
    between which two numbers it must lie.
    """
    seconds = 5 * LONG
    address = f"{url}?synchronous=normal"
    ledger = tmp_path / "ledger"
    ledger.write_bytes(bytes(Ledger.SIZE))
    with limpet.sync.open(address, sweep=False) as store, ExitStack() as stack:
        workers = [
            stack.enter_context(Peer("counts", address, ledger, index * 4, face, seconds))
            for index, face in enumerate(("threads", "tasks", "threads"))
        ]
        disturber = stack.enter_context(Peer("disturbs", address, path, seconds))
        assert [process.hear() for process in (*workers, disturber)] == ["ready"] * 4

        together([*workers, disturber])
        told = [worker.hear() for worker in workers]
        disturbances = disturber.hear()

        book = Ledger(str(ledger))
        counted = [store.get(f"count/{counter}") for counter in range(COUNTERS)]
        pair = [store.get("left"), store.get("right")]

    if LONG > 1:
        with capsys.disabled():
            for problems, reads, adds, fetched in told:
                print(f"\n{reads:,} reads, {fetched:,} of them from the file, {adds:,} adds, {len(problems)} problems")
            print(f"{disturbances:,} disturbances in {seconds} s")
    assert [problems for problems, *_ in told] == [[], [], []]
    assert counted == [book.begun(counter) for counter in range(COUNTERS)]
    assert pair == [book.begun(PAIR)] * 2
    for _, reads, adds, fetched in told:
        # Most reads came from memory, or this was no test of it.
        assert reads > 500
        assert adds > 10
        assert fetched < reads


def main() -> None:
    name, *args = sys.argv[1:]
    SCENES[name](*args)


if __name__ == "__main__":
    main()
