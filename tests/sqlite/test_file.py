"""The file: readable by plain SQL, private to its owner, searched by index, and true to its own time."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import sqlite3
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import limpet
import limpet.sync
from limpet.engines.sql_columns import SWEPT
from limpet.engines.sqlite import connections
from limpet.engines.sqlite import rows as sqlite_rows
from limpet.engines.sqlite.engine import SqliteEngine
from limpet.engines.sqlite.rows import CHANGES, DUE, HAS_EXPIRED_RECEIPTS
from limpet.errors import Corrupt, InvalidValue
from limpet.keys import prefix_span
from limpet.model import Commit
from limpet.schema import ddl
from tests.sqlite.support import batch, open_sqlite, put

Ask = Callable[..., list[Any]]


@pytest.fixture
def ask(path: Path) -> Ask:
    """Plain SQL on the file, beside the processes that have it open."""

    def run(sql: str, *parameters: object) -> list[Any]:
        with contextlib.closing(sqlite3.connect(path)) as rows, rows:
            return rows.execute(sql, parameters).fetchall()

    return run


# Readable -------------------------------------------------------------------------


def test_values_are_readable_by_plain_sql(url: str, ask: Ask) -> None:
    """An operator with nothing but `sqlite3` sees JSON as JSON and bytes as a blob."""
    bytes_field = b"\xff\x00"
    with limpet.sync.open(url, sweep=False) as store:
        store.put("json", {"ünï": [1, 2.5, None, "a\0b"]}, meta={"by": "me"})
        store.put("number", 7)
        store.put("bytes", b"\x00\xff{")
        fields = {"state": "open", "tries": 3, "text": b"plain", "raw": bytes_field, "odd": {"$x": 1}}
        store.record("record").put(fields)

        rows = {
            key: (kind, type_, value, valid)
            for key, kind, type_, value, valid in ask(
                "SELECT key, kind, typeof(value), value, json_valid(value) FROM limpet_entries"
            )
        }
        assert rows["json"][:2] == ("json", "text")
        assert json.loads(rows["json"][2]) == {"ünï": [1, 2.5, None, "a\0b"]}
        assert rows["number"] == ("json", "text", "7", 1)
        assert rows["bytes"][:3] == ("bytes", "blob", b"\x00\xff{")
        assert rows["record"][:2] == ("record", "text")
        assert [rows[key][3] for key in ("json", "number", "record")] == [1, 1, 1]
        assert json.loads(rows["record"][2]) == {
            "state": "open",
            "tries": 3,
            "text": {"$text": "plain"},
            "raw": {"$bytes": base64.b64encode(bytes_field).decode()},
            "odd": {"$json": {"$x": 1}},
        }
        assert ask("SELECT json_extract(value, '$.state') FROM limpet_entries WHERE key = 'record'") == [("open",)]
        assert ask("SELECT json_extract(meta, '$.by') FROM limpet_entries WHERE key = 'json'") == [("me",)]
        # And what looks odd in the file still reads as it was written.
        assert store.record("record").fields() == fields


def test_the_log_is_readable_by_plain_sql(url: str, ask: Ask) -> None:
    """The log shows what happened, to which key, when, and by which request."""
    with limpet.sync.open(url, sweep=False, clock=limpet.ManualClock(1_700_000_000)) as store:
        store.put("a", 1, request_id="first")
        store.record("r").set(x=1)
        store.touch("a", 60)
        store.batch().put("a", 2).delete("r").commit()

    assert ask(
        "SELECT revision, last_revision, op, key, value, version, at_ms FROM limpet_changes ORDER BY revision"
    ) == [
        (1, 1, "put", "a", "1", 1, 1_700_000_000_000),
        (2, 2, "patch", "r", '{"x":1}', 1, 1_700_000_000_000),
        (3, 3, "touch", "a", None, 1, 1_700_000_000_000),
        (4, 5, "put", "a", "2", 2, 1_700_000_000_000),
        (5, 5, "delete", "r", None, 1, 1_700_000_000_000),
    ]
    assert ask("SELECT cause FROM limpet_changes WHERE revision = 1") == [("first",)]


def test_the_row_of_a_namespace_agrees_with_its_tables(url: str, ask: Ask) -> None:
    """Keys and bytes count what is stored."""
    with limpet.sync.open(url, sweep=False) as store:
        for number in range(20):
            store.put(f"kéy/{number}", {"n": "é" * number})
            store.put(f"bytes/{number}", b"x" * number)
        for number in range(0, 20, 2):
            store.delete(f"kéy/{number}")
            store.touch(f"bytes/{number}", 60)
        store.put("kéy/1", "short")
        status = store.status()

    ((keys, size_bytes),) = ask(
        "SELECT count(*), sum(length(CAST(key AS BLOB)) + length(CAST(value AS BLOB))) FROM limpet_entries"
        " WHERE family = 'data'"
    )
    ((changes, log_bytes),) = ask("SELECT count(*), sum(size_bytes) FROM limpet_changes")
    assert (status.keys, status.size_bytes) == (keys, size_bytes) == (30, size_bytes)
    assert (status.log_changes, status.log_bytes) == (changes, log_bytes)


# The schema -----------------------------------------------------------------------


def objects_of(connection: sqlite3.Connection) -> set[tuple[str, str, str]]:
    return {
        (kind, name, re.sub(r"\s+", " ", sql))
        for kind, name, sql in connection.execute("SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL")
    }


def test_the_static_schema_is_what_the_engine_makes(url: str, path: Path) -> None:
    """A database made by hand from the file of statements is the one that the engine makes."""
    with limpet.sync.open(url):
        pass

    with contextlib.closing(sqlite3.connect(path)) as made, contextlib.closing(sqlite3.connect(":memory:")) as by_hand:
        by_hand.executescript(ddl("sqlite"))
        assert objects_of(made) == objects_of(by_hand)
        assert {name for _, name, _ in objects_of(made)} == {
            "limpet_schema",
            "limpet_store",
            "limpet_namespaces",
            "limpet_entries",
            "limpet_changes",
            "limpet_due",
            "limpet_counters",
            "plugin_kv_storage",
        }


def statements() -> dict[str, str]:
    """Every statement that the engine may run."""
    found = {name: text for name, text in vars(sqlite_rows).items() if name.isupper() and isinstance(text, str)}
    kept = {
        name: text
        for name, text in found.items()
        if text.startswith(("SELECT", "INSERT", "DELETE", "UPDATE")) and "{" not in text
    }
    kept["_READ_SEVERAL"] += "(?, ?)"
    return kept


@pytest.mark.parametrize("name", statements())
def test_every_statement_fits_the_static_schema(name: str) -> None:
    """The static statements make exactly what the engine uses."""
    with contextlib.closing(sqlite3.connect(":memory:")) as by_hand:
        by_hand.executescript(ddl("sqlite"))
        statement = statements()[name]

        plan = by_hand.execute(f"EXPLAIN {statement}", (None,) * statement.count("?")).fetchall()

    assert plan


def test_a_database_made_by_hand_can_be_opened(url: str, path: Path) -> None:
    """Where a deployment makes its tables itself, the engine uses them."""
    with contextlib.closing(sqlite3.connect(path)) as by_hand, by_hand:
        by_hand.executescript(ddl("sqlite"))
        by_hand.execute("UPDATE limpet_store SET id = 'by-hand', epoch = 4")

    with limpet.sync.open(url) as store:
        status = store.status()
        store.put("key", 1)

    assert (status.store_id, status.epoch) == ("by-hand", 4)


# The way to the rows --------------------------------------------------------------


@pytest.fixture
def many(path: Path, url: str) -> Iterator[sqlite3.Connection]:
    """A file of 3,000 keys, 60 of them with a time to live, as plain SQL sees it."""
    with limpet.sync.open(url, sweep=False) as store:
        for first in range(0, 3_000, 100):
            draft = store.batch()
            for number in range(first, first + 100):
                draft.put(f"{number % 30:02}/{number:05}", number, ttl=1_000 + number if number % 50 == 0 else None)
            draft.commit()
    with contextlib.closing(sqlite3.connect(path)) as rows:
        yield rows


def way(rows: sqlite3.Connection, statement: str, parameters: tuple[object, ...]) -> str:
    return "; ".join(row[3] for row in rows.execute(f"EXPLAIN QUERY PLAN {statement}", parameters))


def effort(rows: sqlite3.Connection, statement: str, parameters: tuple[object, ...]) -> int:
    """How many steps of SQLite's machine it takes to run this to its end."""
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += 1

    rows.set_progress_handler(count, 1)
    try:
        rows.execute(statement, parameters).fetchall()
    finally:
        rows.set_progress_handler(None, 1)
    return steps


def test_what_is_due_is_found_by_its_index(many: sqlite3.Connection) -> None:
    """An entry is due from the millisecond it expires, and not before."""
    due = ("default", 0, 500)

    found = way(many, DUE, due)

    assert found.count("USING INDEX limpet_due (namespace=? AND family=? AND expires_ms<?)") == len(SWEPT)
    assert effort(many, DUE, due) < 300
    assert many.execute("SELECT count(*) FROM limpet_entries WHERE expires_ms IS NOT NULL").fetchone() == (60,)


@pytest.mark.parametrize("family", ["data", "receipt"])
def test_what_expires_in_one_way_is_not_in_the_way_of_the_rest(path: Path, url: str, family: str) -> None:
    """However many entries wait for the sweeper, a trim finds its receipts at once; and the other way round."""
    with limpet.sync.open(url, sweep=False) as store:
        store.put("key", 1)
    with contextlib.closing(sqlite3.connect(path)) as rows:
        searches = {"data": (HAS_EXPIRED_RECEIPTS, ("default", 9)), "receipt": (DUE, ("default", 9, 500))}
        before = effort(rows, *searches[family])
        rows.execute(
            "INSERT INTO limpet_entries WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n LIMIT 2000)"
            " SELECT 'default', ?, 'k' || n, 'json', '1', 1, n, n, 0, 0, 1, NULL FROM n",
            (family,),
        )

        assert effort(rows, *searches[family]) <= before + 10


def test_what_is_due_comes_in_the_order_of_its_time(many: sqlite3.Connection) -> None:
    """Of all families the earliest, and receipts of none."""
    many.executemany(
        "INSERT INTO limpet_entries VALUES ('default', ?, ?, 'json', '1', 1, 1, 1, 0, 0, ?, NULL)",
        [("lock", "l", 4), ("data", "d", 3), ("receipt", "r", 1), ("sequence", "s", 5), ("audit", "a", 2)],
    )

    found = many.execute(DUE, ("default", 9, 3)).fetchall()

    assert [key for key, _, _ in found] == ["a", "d", "l"]


async def test_a_scan_of_a_prefix_reads_only_that_prefix(many: sqlite3.Connection, url: str) -> None:
    """A prefix matches exactly the keys that start with it.

    A prefix of few keys must not cost the reading of all the keys behind it.
    """
    seen: list[tuple[str, tuple[object, ...]]] = []

    class Listening(connections.Connection):
        def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
            if sql.startswith("SELECT") and "ORDER BY key" in sql:
                seen.append((sql, parameters))
            return super().execute(sql, parameters)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "Connection", Listening)
        engine = await open_sqlite(url, limpet.SystemClock())
        for prefix, count in (("00/0000", 1), ("03/", 100), ("nothing/", 0)):
            assert len((await engine.scan("default", prefix_span(prefix))).entries) == count
        await engine.close()

    one, hundred, none = seen
    assert "USING PRIMARY KEY" in way(many, *one)
    assert "SCAN" not in way(many, *one)
    assert "TEMP B-TREE" not in way(many, *one)
    assert effort(many, *none) < 100
    assert effort(many, *one) < 200
    assert effort(many, *one) * 5 < effort(many, *hundred) < 5_000


def test_the_log_is_read_from_where_one_stands(many: sqlite3.Connection) -> None:
    """A watch resumes after a revision of this store."""
    found = way(many, CHANGES, ("default", 2_990, 500))

    assert "USING PRIMARY KEY (namespace=? AND revision>?)" in found
    assert "TEMP B-TREE" not in found
    assert effort(many, CHANGES, ("default", 2_999, 500)) < 200


# Private, durable -----------------------------------------------------------------


@pytest.fixture
def generous_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("generous_umask")
def test_a_new_file_is_its_owners_alone(path: Path, url: str) -> None:
    """The values may be secrets, so neither the file nor what lies beside it may be read by others."""
    with limpet.sync.open(url) as store:
        store.put("key", "secret")

        modes = {found.name: stat.S_IMODE(found.stat().st_mode) for found in path.parent.iterdir()}

    assert modes == {"state.db": 0o600, "state.db-wal": 0o600, "state.db-shm": 0o600}


@pytest.mark.usefixtures("generous_umask")
def test_the_mode_of_a_file_that_was_there_is_left_alone(path: Path, url: str) -> None:
    """Who shares a file with a group has decided to."""
    path.touch()
    path.chmod(0o660)

    with limpet.sync.open(url) as store:
        store.put("key", 1)

    assert stat.S_IMODE(path.stat().st_mode) == 0o660


@pytest.mark.parametrize(
    ("option", "level", "durability"),
    [
        ("", 2, "disk"),
        ("?synchronous=full", 2, "disk"),
        ("?synchronous=FULL", 2, "disk"),
        ("?synchronous=extra", 3, "disk"),
        ("?synchronous=normal", 1, "process"),
    ],
)
async def test_durability_is_as_the_url_asks(url: str, option: str, level: int, durability: str) -> None:
    """`traits` describes the engine: its name, its durability, whose clock it uses."""
    engine = await open_sqlite(url + option, limpet.SystemClock())
    assert engine._writer.connection is not None

    assert engine._writer.connection.execute("PRAGMA synchronous").fetchone() == (level,)
    assert engine._writer.connection.execute("PRAGMA journal_mode").fetchone() == (b"wal",)
    assert (engine.traits.engine, engine.traits.durability) == ("sqlite", durability)
    # A writer that is replaced after a fault must not be a weaker one.
    engine._writer.abandon()
    assert engine._writer.begin().execute("PRAGMA synchronous").fetchone() == (level,)
    engine._writer.abandon()
    await engine.close()


@pytest.mark.parametrize("option", ["?synchronous=off", "?synchronous=", "?sync=full", "?mode=ro", "?synchronous=1"])
def test_an_option_that_would_do_nothing_or_harm_is_refused(url: str, path: Path, option: str) -> None:
    """An unknown option in the URL is refused, not ignored."""
    with pytest.raises(InvalidValue, match="synchronous"):
        limpet.sync.open(url + option)

    assert not path.exists()


@pytest.mark.parametrize("wrong", ["sqlite:", "sqlite:state.db", "sqlite:/state.db", "sqlite://state.db", "sqlite:///"])
async def test_a_url_without_three_slashes_is_refused_with_advice(wrong: str) -> None:
    """Two slashes would make the file's name a host, and the file another one than was meant."""
    with pytest.raises(InvalidValue, match=r"sqlite:///relative\.db or sqlite:////absolute/path\.db"):
        await limpet.open(wrong)


async def test_a_relative_path_is_of_the_folder_at_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An acknowledged write is there when durable storage is opened again.

    A program that changes its folder keeps its file: connections that are opened later go to the same one.
    """
    monkeypatch.chdir(tmp_path)
    os.mkdir("elsewhere")
    async with limpet.open("sqlite:///a%20b.db") as store:
        await store.put("key", 1)
        monkeypatch.chdir(tmp_path / "elsewhere")

        # A filtered scan has a connection of its own.
        assert [entry.value async for entry in store.scan(where=limpet.field("x") != 1)] == [1]

    assert os.listdir(tmp_path / "elsewhere") == []
    assert "a b.db" in os.listdir(tmp_path)


# Over the years ---------------------------------------------------------------------


async def test_the_store_keeps_its_name_over_reopening(url: str) -> None:
    """A watch resumes after the store was closed and opened again."""
    async with limpet.open(url) as store:
        await store.put("key", 1)
        first = await store.status()
    async with limpet.open(url) as store, store.watch(after=first.revision) as watch:
        again = await store.status()
        await store.put("key", 2)
        event = await anext(watch)

    assert (again.store_id, again.epoch, again.revision) == (first.store_id, first.epoch, first.revision)
    assert event.position is not None
    async with limpet.open(url) as store:
        await store.put("key", 3)
        async with store.watch(after=event.position) as watch:
            assert (await anext(watch)).value == 3


async def test_two_files_are_two_stores(tmp_path: Path) -> None:
    """A position of another store or namespace is Compacted."""
    ids = set()
    for number in range(10):
        async with limpet.open(f"sqlite:///{tmp_path}/{number}.db") as store:
            ids.add((await store.status()).store_id)

    assert len(ids) == 10


async def test_a_clock_that_was_set_back_does_not_take_the_store_along(url: str) -> None:
    """The clock never goes back.

    The host's clock is an hour behind when the file is opened again. Entries do not become older than their past,
    what has expired stays so, and revisions go on.
    """
    late, early = limpet.ManualClock(1_700_003_600), limpet.ManualClock(1_700_000_000)
    async with limpet.open(url, clock=late, sweep=False) as store:
        before = await store.put("key", 1)
        await store.put("short", 1, ttl=10)
        late.advance(20)
        last = await store.put("last", 1)
    async with limpet.open(url, clock=early, sweep=False) as store:
        assert await store.get("short") is None
        assert (await store.keys()).keys == ["key", "last"]
        assert (await store.status()).now_ms >= last.updated_ms

        after = await store.put("key", 2)
        fresh = await store.put("fresh", 1, ttl=60)

        assert after.updated_ms >= last.updated_ms
        assert after.created_ms == before.created_ms
        assert after.revision > last.revision
        assert fresh.expires_ms is not None
        assert fresh.expires_ms >= last.updated_ms + 60_000
        assert await store.sweep() == 1
        assert [event.op async for event in store.history("short")] == ["put", "expire"]
        rows = (await store._session.engine.changes("default", 0)).changes
        assert [change.at_ms for change in rows] == sorted(change.at_ms for change in rows)


async def test_two_processes_with_different_clocks_write_one_time(url: str) -> None:
    """The clock never goes back.

    Two who share the file disagree about the time by a minute. In the file it only goes forward.
    """
    ahead, behind = limpet.ManualClock(1_700_000_060), limpet.ManualClock(1_700_000_000)
    async with (
        limpet.open(url, clock=ahead, sweep=False) as one,
        limpet.open(url, clock=behind, sweep=False) as other,
    ):
        times = []
        for _ in range(3):
            times.append((await one.put("key", 1)).updated_ms)
            times.append((await other.put("key", 1)).updated_ms)
            ahead.advance(1)
            behind.advance(1)

        assert times == sorted(times)
        entry = await other.entry("key")
        assert entry is not None
        assert entry.created_ms <= entry.updated_ms


async def test_a_receipt_and_a_lock_are_kept_in_the_file(url: str, ask: Ask) -> None:
    """A receipt survives a restart where entries do."""
    async with limpet.open(url) as store:
        assert await store.add("hits", request_id="once") == 1
        await store.lock("door", ttl=600).acquire()
    async with limpet.open(url) as store:
        assert await store.add("hits", request_id="once") == 1
        assert [info.name for info in await store.locks()] == ["door"]

    assert sorted(ask("SELECT family, key FROM limpet_entries")) == [
        ("data", "hits"),
        ("lock", "door"),
        ("receipt", "once"),
    ]


async def test_trimming_is_seen_in_the_file(engine: SqliteEngine, clock: limpet.ManualClock, ask: Ask) -> None:
    """Trimming moves the floor, so that a watcher behind it gets Compacted."""
    for number in range(10):
        await engine.commit("default", batch(put("key", number)))
        clock.advance(60)

    dropped = await engine.trim("default", limpet.Window(age_ms=300_000, age_ms_min=0))

    # The ages are 600, 540 … 60 seconds.
    assert dropped == 5
    assert ask("SELECT min(revision), count(*) FROM limpet_changes") == [(6, 5)]
    assert ask("SELECT floor, log_changes FROM limpet_counters") == [(5, 5)]
    assert ask("SELECT value, version FROM limpet_entries") == [("9", 10)]


async def test_counters_stay_when_the_whole_log_is_dropped(
    engine: SqliteEngine, url: str, clock: limpet.ManualClock
) -> None:
    """They stand in the log, and then in the row of the namespace."""
    await engine.commit("default", batch(put("key", 1), put("other", 22)))
    await engine.commit("default", batch(put("key", 333)))
    before = await engine.status("default")
    assert (before.keys, before.size_bytes, before.log_changes) == (2, 13, 3)
    clock.advance(60)

    assert await engine.trim("default", limpet.Window(changes=0, age_ms_min=0)) == 3

    other = await open_sqlite(url, clock)
    for opened in (engine, other):
        found = await opened.status("default")
        assert (found.revision, found.keys, found.size_bytes) == (before.revision, 2, 13)
        assert (found.floor, found.log_changes, found.log_bytes) == (before.revision, 0, 0)
    await other.commit("default", batch(put("key", 4444)))
    found = await engine.status("default")
    assert (found.keys, found.size_bytes, found.log_changes, found.log_bytes) == (2, 14, 1, 7)
    await other.close()


async def test_a_superseded_mark_goes_after_an_hour(engine: SqliteEngine, clock: limpet.ManualClock, ask: Ask) -> None:
    """Meanwhile it is not counted, listed or expired."""
    superseded = "SELECT key FROM limpet_entries WHERE family = 'superseded'"
    outcome = await engine.commit("default", batch(put("a", 1), request_id="mine", retry_since=0))

    clock.advance(3599)
    await engine.trim("default", limpet.Window())
    assert ask(superseded) == [("mine",)]
    clock.advance(1)
    assert await engine.due("default") == []
    assert (await engine.status("default")).keys == 1
    await engine.trim("default", limpet.Window())

    assert isinstance(outcome, Commit)
    assert ask(superseded) == []


@pytest.mark.parametrize(
    "sql",
    [
        "CREATE TABLE limpet_entries (mine)",
        "CREATE VIEW limpet_changes AS SELECT 1",
        "CREATE TABLE mine (a); CREATE INDEX limpet_namespaces ON mine (a)",
    ],
)
async def test_a_file_in_which_a_name_is_taken_is_refused_for_good(tmp_path: Path, sql: str) -> None:
    """Trying again would not help, so the error does not suggest it."""
    with contextlib.closing(sqlite3.connect(tmp_path / "app.db")) as others:
        others.execute("PRAGMA journal_mode = WAL")
        others.executescript(sql)

    with pytest.raises(Corrupt, match=r"app\.db cannot hold the tables of a store: .*limpet_"):
        await limpet.open(f"sqlite:///{tmp_path}/app.db")

    with contextlib.closing(sqlite3.connect(tmp_path / "app.db")) as others:
        assert others.execute("SELECT count(*) FROM sqlite_master WHERE name = 'limpet_store'").fetchone() == (0,)
