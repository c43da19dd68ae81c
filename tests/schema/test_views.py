"""The views: what an operator reads with plain SQL, and cannot write."""

from __future__ import annotations

import sqlite3
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

import limpet
import limpet.sync
from limpet.schema import migrate
from tests.cli.support import Limpet
from tests.schema.support import FIRST, ask, engine_of, run_script, target_of
from tests.servers import postgres

RECENT = """
SELECT plugin_name, key, updated_at
FROM plugin_kv_storage
ORDER BY updated_at DESC
LIMIT 20;
"""
BY_PLUGIN = """
SELECT plugin_name, COUNT(*) as key_count
FROM plugin_kv_storage
GROUP BY plugin_name;
"""
EXPIRED = """
SELECT plugin_name, key, expires_at
FROM plugin_kv_storage
WHERE expires_at < CURRENT_TIMESTAMP;
"""

# A value, how it reads, and how it does in jsonb.
VALUES: dict[str, tuple[Any, str, str]] = {
    "object": ({"b": 1, "a": [True, None]}, '{"a":[true,null],"b":1}', '{"a": [true, null], "b": 1}'),
    "text": ("grün", '"grün"', '"grün"'),
    "number": (3, "3", "3"),
    "null": (None, "null", "null"),
    "bytes": (b"\x00\xff", "\\x00ff", '"\\\\x00ff"'),
    "no-bytes": (b"", "\\x", '"\\\\x"'),
    "huge": (1e22, "1e22", "10000000000000000000000"),
    "minus-zero": ([-0.0], "[-0.0]", "[0.0]"),
    "nul": ("a\0b", '"a\\u0000b"', '"a\ufffdb"'),
}


@pytest.fixture
def filled(url: str) -> str:
    """Two plugins, of which one has an entry that has expired and was not swept."""
    with limpet.sync.open(url, namespace="trivia", sweep=False) as store:
        store.put("game/1", {"turn": "alice"})
        store.put("game/2", {"turn": "bob"}, ttl=3600)
        store.put("game/0", {"turn": "carol"}, ttl=3600)
    with limpet.sync.open(url, namespace="quotes", sweep=False) as store:
        store.put("last", 7)
        store.lock("nightly", ttl=60).acquire()
    ask(url, "UPDATE limpet_entries SET expires_ms = 1700000000123 WHERE key = 'game/0'")
    ask(url, "UPDATE limpet_entries SET updated_ms = updated_ms + 5000 WHERE key = 'game/1'")
    return url


def test_the_latest_writes_are_found(filled: str) -> None:
    rows = ask(filled, RECENT)

    assert rows[0][:2] == ("trivia", "game/1")
    assert {row[:2] for row in rows} == {
        ("trivia", "game/0"),
        ("trivia", "game/1"),
        ("trivia", "game/2"),
        ("quotes", "last"),
    }


def test_the_keys_of_each_plugin_are_counted(filled: str) -> None:
    """A lock is no key of a plugin."""
    assert sorted(ask(filled, BY_PLUGIN)) == [("quotes", 1), ("trivia", 3)]


def test_what_has_expired_and_was_not_swept_is_found(filled: str) -> None:
    ((plugin, key, expires_at),) = ask(filled, EXPIRED)

    assert (plugin, key) == ("trivia", "game/0")
    moment = datetime(2023, 11, 14, 22, 13, 20, 123_000, tzinfo=UTC)
    assert expires_at == (moment if engine_of(filled) == "postgres" else "2023-11-14 22:13:20.123")


def test_times_are_those_of_the_entry(url: str) -> None:
    with limpet.sync.open(url, sweep=False) as store:
        first = store.put("key", 1, ttl=60)
        second = store.put("key", 2, ttl=90)

    ((expires_at, created_at, updated_at),) = ask(
        url, "SELECT expires_at, created_at, updated_at FROM plugin_kv_storage"
    )

    expected = (second.expires_at, first.created_at, second.updated_at)
    if engine_of(url) == "sqlite":
        assert None not in expected
        expected = tuple(f"{moment:%F %T}.{moment.microsecond // 1000:03}" for moment in expected if moment)  # type: ignore[assignment]
    assert (expires_at, created_at, updated_at) == expected


def test_every_kind_of_value_can_be_read(url: str) -> None:
    with limpet.sync.open(url, namespace="state", sweep=False) as store:
        for key, (value, _, _) in VALUES.items():
            store.put(key, value)
        store.record("record").put({"state": "open", "blob": b"\xff"})

    shown = dict(ask(url, "SELECT key, value FROM plugin_kv_storage"))

    assert shown.pop("record") == '{"blob":{"$bytes":"/w=="},"state":"open"}'
    assert shown == {key: text for key, (_, text, _) in VALUES.items()}


def test_the_view_state_shows_the_nearest_jsonb(postgres_url: str) -> None:
    with limpet.sync.open(postgres_url, namespace="state", sweep=False) as store:
        for key, (value, _, _) in VALUES.items():
            store.put(key, value)

    shown = dict(ask(postgres_url, "SELECT key, value::text FROM state"))

    assert shown == {key: nearest for key, (_, _, nearest) in VALUES.items()}
    assert ask(postgres_url, "SELECT value -> 'b' FROM state WHERE value @> '{\"b\": 1}'") == [("1",)]


def test_the_view_state_shows_live_entries_of_one_namespace(postgres_url: str) -> None:
    with limpet.sync.open(postgres_url, namespace="state", sweep=False) as store:
        store.put("kept", 1)
        entry = store.put("kept", 2)
        store.put("leased", 1, ttl=3600)
        store.put("over", 1, ttl=3600)
        store.lock("held", ttl=60).acquire()
    with limpet.sync.open(postgres_url, namespace="other", sweep=False) as store:
        store.put("elsewhere", 1)
    ask(postgres_url, "UPDATE limpet_entries SET expires_ms = limpet_now_ms() WHERE key = 'over'")

    rows = ask(postgres_url, "SELECT * FROM state ORDER BY key")

    assert [row[0] for row in rows] == ["kept", "leased"]
    assert rows[0] == ("kept", "2", 2, entry.updated_at)


@pytest.mark.parametrize("condition", ["key = 'key/17'", "key >= 'key/17' AND key < 'key/18'"])
@pytest.mark.parametrize("view", ["state", "plugin_kv_storage"])
def test_a_condition_on_the_key_is_looked_up_in_the_index(postgres_url: str, view: str, condition: str) -> None:
    with limpet.sync.open(postgres_url, namespace="state", sweep=False) as store:
        for first in range(0, 500, 100):
            draft = store.batch()
            for number in range(first, first + 100):
                draft.put(f"key/{number}", {"number": number})
            draft.commit()
    run_script(postgres_url, "ANALYZE limpet_entries")
    plugin = "" if view == "state" else "plugin_name = 'state' AND "

    plan = "\n".join(row[0] for row in ask(postgres_url, f"EXPLAIN SELECT * FROM {view} WHERE {plugin}{condition}"))

    assert "limpet_entries_pkey" in plan
    (index_condition,) = [line for line in plan.splitlines() if "Index Cond" in line and "family = " in line]
    assert "key = " in index_condition or "key >= " in index_condition
    assert "namespace = 'state'" in index_condition


# Writing ----------------------------------------------------------------------

WRITES = {
    "insert": "INSERT INTO {view} (key) VALUES ('new')",
    "update": "UPDATE {view} SET key = 'other' WHERE key = 'key'",
    "delete": "DELETE FROM {view} WHERE key = 'key'",
}


@pytest.mark.parametrize("write", WRITES)
def test_the_database_refuses_to_write_through_a_view(url: str, write: str) -> None:
    with limpet.sync.open(url, namespace="state", sweep=False) as store:
        store.put("key", 1)
    before = ask(url, "SELECT * FROM limpet_entries")

    for view in ["plugin_kv_storage"] if engine_of(url) == "sqlite" else ["plugin_kv_storage", "state"]:
        with pytest.raises((sqlite3.OperationalError, asyncpg.PostgresError)) as refused:
            ask(url, WRITES[write].format(view=view))

        if isinstance(refused.value, asyncpg.PostgresError):
            assert refused.value.sqlstate == "55000"
            assert str(refused.value).startswith(f"limpet: the view {view} is for reading only")
            assert "through the store" in str(refused.value)
        else:
            assert "cannot modify plugin_kv_storage because it is a view" in str(refused.value)
    assert ask(url, "SELECT * FROM limpet_entries") == before


# Names that are taken ---------------------------------------------------------

TAKEN = {
    "table": "CREATE TABLE {name} (mine text)",
    "view": "CREATE VIEW {name} AS SELECT 'mine' AS mine",
    "type": "CREATE TYPE {name} AS ENUM ('mine')",
}


@pytest.mark.parametrize("name", ["plugin_kv_storage", "state"])
@pytest.mark.parametrize("kind", TAKEN)
def test_a_foreign_object_under_a_name_is_left_alone(postgres_url: str, kind: str, name: str) -> None:
    target = target_of(postgres_url)
    run_script(postgres_url, f'CREATE SCHEMA "{target.schema}"')
    run_script(postgres_url, TAKEN[kind].format(name=name))

    with limpet.sync.open(postgres_url, sweep=False) as store:
        store.put("key", 1)
    assert is_theirs(postgres_url, kind, name)
    migrate.down(target, FIRST)
    assert is_theirs(postgres_url, kind, name)
    migrate.up(target)
    assert is_theirs(postgres_url, kind, name)

    # The other one was made.
    other = "state" if name == "plugin_kv_storage" else "plugin_kv_storage"
    assert ask(postgres_url, f"SELECT relkind FROM pg_class WHERE oid = '{other}'::regclass") == [(b"v",)]


def is_theirs(url: str, kind: str, name: str) -> bool:
    if kind == "type":
        return ask(url, f"SELECT 'mine'::{name}::text") == [("mine",)]
    columns = f"SELECT attname FROM pg_attribute WHERE attrelid = '{name}'::regclass AND attnum > 0"
    return ask(url, columns) == [("mine",)]


@pytest.mark.parametrize("kind", ["table", "view"])
def test_a_foreign_object_in_a_file_is_left_alone(sqlite_url: str, kind: str) -> None:
    theirs = TAKEN[kind].format(name="plugin_kv_storage")
    ask(sqlite_url, "PRAGMA journal_mode = WAL")
    ask(sqlite_url, theirs)
    look = "SELECT sql FROM sqlite_master WHERE name = 'plugin_kv_storage'"

    with limpet.sync.open(sqlite_url, sweep=False) as store:
        store.put("key", 1)
    assert ask(sqlite_url, look) == [(theirs,)]
    migrate.down(target_of(sqlite_url), FIRST)
    migrate.up(target_of(sqlite_url))

    assert ask(sqlite_url, look) == [(theirs,)]
    with limpet.sync.open(sqlite_url) as store:
        assert store.get("key") == 1


def taken(url: str, name: str) -> None:
    """Make a table of another program under this name."""
    if engine_of(url) == "sqlite":
        ask(url, "PRAGMA journal_mode = WAL")
    else:
        run_script(url, f'CREATE SCHEMA "{target_of(url).schema}"')
    run_script(url, f"CREATE TABLE {name} (mine text); INSERT INTO {name} VALUES ('theirs')")


def test_a_name_that_is_taken_is_shown_everywhere(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """In the log at every opening, by doctor and by migrate status. An operator would look into the wrong table."""
    assert_shown(url, "plugin_kv_storage", caplog)


def test_a_state_that_is_taken_is_shown_too(postgres_url: str, caplog: pytest.LogCaptureFixture) -> None:
    assert_shown(postgres_url, "state", caplog)


def assert_shown(url: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    taken(url, name)

    with limpet.sync.open(url, sweep=False) as store:
        store.put("key", 1)

    (line,) = [record for record in caplog.records if record.name == "limpet.schema"]
    assert line.levelname == "WARNING"
    assert f"table or view {name} that Limpet did not make" in line.getMessage()
    doctor = Limpet(url)("doctor")
    assert doctor.exit_code == 0
    assert f"warn  names       there is a table or view {name} that Limpet did not make" in doctor.stdout
    assert f"taken        there is a table or view {name}" in Limpet(url)("migrate", "status").stdout
    assert f'"taken":["{name}"]' in Limpet(url)("--json", "migrate", "status").stdout
    assert ask(url, f"SELECT mine FROM {name}") == [("theirs",)]


def test_names_that_are_ours_are_no_news(url: str, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        limpet.sync.open(url, sweep=False).close()

    assert [record for record in caplog.records if record.name == "limpet.schema"] == []
    assert "ok    names       no other program has the name" in Limpet(url)("doctor").stdout
    assert '"taken":[]' in Limpet(url)("--json", "migrate", "status").stdout


def test_in_the_schema_that_all_share_the_name_state_is_left_to_others(caplog: pytest.LogCaptureFixture) -> None:
    """An application that makes its own table there later must not find a view of ours in its way."""
    with postgres() as running:
        url = running.url
        with limpet.sync.open(url, namespace="state", sweep=False) as store:
            store.put("key", 1)
        run_script(f"{url}?schema=public", "CREATE TABLE state (mine text)")
        with limpet.sync.open(url, namespace="state", sweep=False) as store:
            assert store.get("key") == 1
        migrate.down(target_of(url), FIRST)
        migrate.up(target_of(url))

        assert is_theirs(f"{url}?schema=public", "table", "state")
        assert ask(f"{url}?schema=public", "SELECT plugin_name, key FROM plugin_kv_storage") == [("state", "key")]
        assert [record for record in caplog.records if record.name == "limpet.schema"] == []


def test_a_view_under_another_name_is_still_ours(postgres_url: str) -> None:
    limpet.sync.open(postgres_url).close()
    run_script(postgres_url, 'ALTER VIEW state RENAME TO "The ""state"""')

    migrate.down(target_of(postgres_url), FIRST)

    assert ask(postgres_url, "SELECT 1 FROM pg_views WHERE schemaname = current_schema()") == []


def test_a_view_far_ahead_in_time_is_shown(url: str) -> None:
    with limpet.sync.open(url, sweep=False) as store:
        entry = store.put("key", 1, ttl=timedelta(days=36_000))

    ((shown,),) = ask(url, "SELECT expires_at FROM plugin_kv_storage")

    assert entry.expires_at is not None
    assert str(shown).startswith(f"{entry.expires_at:%F %T}")
