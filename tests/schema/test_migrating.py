"""Going from revision to revision: what stays, who waits, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import asyncpg
import pytest

import limpet
import limpet.sync
from limpet.errors import Corrupt, InvalidValue, LimpetError, PermissionDenied, Unavailable
from limpet.schema import REVISION, REVISIONS, migrate
from limpet.schema.migrate import PostgresTarget, SqliteTarget
from tests.schema.support import FIRST, ask, catalog, engine_of, folder_of, make, run_script, target_of

PATIENCE_S = 120.0
SECRET = "hunter2"


def auto(url: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}migrate=auto"


@pytest.fixture
def old(url: str) -> str:
    """A store at the first revision, with something in it."""
    with limpet.sync.open(url, sweep=False) as store:
        store.put("key", 1)
    migrate.down(target_of(url), FIRST)
    return url


# What stays -------------------------------------------------------------------


def contents(url: str) -> dict[str, Any]:
    """Everything that a store can read of its content."""
    with limpet.sync.open(url, sweep=False) as store, limpet.sync.open(url, namespace="other", sweep=False) as other:
        status = store.status()
        return {
            "entries": [*store.scan(), *other.scan()],
            "history": [(event.op, event.revision, event.value) for event in store.history("game/1")],
            "locks": [(held.name, held.holder, held.token) for held in store.locks()],
            "numbers": (status.store_id, status.epoch, status.revision, status.keys, status.size_bytes),
            "log": (status.floor, status.log_changes, status.log_bytes),
            "outcome": store.outcome("order-17"),
        }


def test_everything_that_is_stored_survives_up_down_and_up(url: str) -> None:
    with limpet.sync.open(url, sweep=False) as store:
        store.put("game/1", {"turn": "alice", "big": 1e22, "nul": "\0"}, meta={"by": "test"})
        store.put("game/1", {"turn": "bob"}, ttl=3600)
        store.put("bytes", b"\x00\xff")
        store.record("job").put({"state": "open", "blob": b"\xff"})
        store.put("gone", 1)
        store.delete("gone")
        store.put("paid", 17, request_id="order-17")
        store.lock("nightly", ttl=3600, holder="alice").acquire()
    with limpet.sync.open(url, namespace="other", sweep=False) as store:
        store.put("key", "of another")
    before = contents(url)
    target = target_of(url)

    assert migrate.down(target, FIRST) == REVISION
    assert migrate.up(target) == FIRST
    assert contents(url) == before
    with limpet.sync.open(url) as store:
        assert store.put("game/1", 3).version == 3


def test_a_store_that_is_open_goes_on_while_its_schema_moves(url: str) -> None:
    with limpet.sync.open(url, sweep=False) as store:
        for _ in range(3):
            store.add("count")
            migrate.down(target_of(url), FIRST)
            store.add("count")
            migrate.up(target_of(url))
        assert store.add("count") == 7


def test_base_removes_everything_and_leaves_what_is_not_ours(url: str) -> None:
    make(url)
    ask(url, "CREATE TABLE songs (title text)")

    assert migrate.down(target_of(url), migrate.BASE) == REVISION

    assert migrate.current_revision(target_of(url)) is None
    left = {name for rows in catalog(url).values() for name in rows if "limpet" in name}
    assert left == set()
    assert ask(url, "SELECT * FROM songs") == []
    with limpet.sync.open(url) as store:
        assert store.put("key", 1).version == 1


def test_a_database_without_tables_gets_them(url: str) -> None:
    assert migrate.current_revision(target_of(url)) is None

    assert migrate.up(target_of(url)) is None

    with limpet.sync.open(url) as store:
        assert store.put("key", 1).version == 1
        assert len(store.status().store_id) == 16


def test_up_to_where_it_is_changes_nothing(url: str) -> None:
    make(url)
    before = catalog(url)

    assert migrate.up(target_of(url)) == REVISION
    assert migrate.up(target_of(url)) == REVISION

    assert catalog(url) == before


def test_a_migration_that_fails_leaves_nothing(old: str) -> None:
    """Something of theirs stands in the way, in the middle of it."""
    in_the_way = {
        "sqlite": "CREATE INDEX plugin_kv_storage ON limpet_entries (kind)",
        "postgres": "CREATE FUNCTION limpet_refuse() RETURNS int LANGUAGE sql RETURN 1",
    }
    ask(old, in_the_way[engine_of(old)])
    before = catalog(old)

    with pytest.raises(Corrupt, match=r"cannot be migrated: .*(already an index|already exists)"):
        migrate.up(target_of(old))

    assert catalog(old) == before
    assert migrate.current_revision(target_of(old)) == FIRST


@pytest.mark.parametrize(
    "name", ["""a "b" 'c' :d%""", "a$$b", "$limpet1$ $$", "line \n-- break", "{schema}"], ids=ascii
)
def test_a_schema_of_any_name_can_be_migrated(postgres_url: str, name: str) -> None:
    url = postgres_url.replace(f"schema={target_of(postgres_url).schema}", urlencode({"schema": name}))
    target = target_of(url)
    assert target.schema == name
    quoted = name.replace('"', '""')
    try:
        run_script(url, migrate.sql(target))
        migrate.down(target, FIRST)
        run_script(url, migrate.sql(target))
        with limpet.sync.open(url) as store:
            store.put("key", 1)
        assert ask(url, "SELECT key FROM plugin_kv_storage") == [("key",)]
        migrate.down(target, migrate.BASE)
        migrate.up(target)
        migrate.down(target, migrate.BASE)
        make(url)
    finally:
        run_script(url, f'DROP SCHEMA IF EXISTS "{quoted}" CASCADE')


# At opening -------------------------------------------------------------------


def test_an_older_schema_is_refused_and_the_error_names_the_ways_on(old: str) -> None:
    with pytest.raises(Corrupt) as refused:
        limpet.sync.open(old)

    message = str(refused.value)
    assert f"has schema revision {FIRST}, and this release needs {REVISION}" in message
    assert "'limpet migrate up'" in message
    assert "?migrate=auto" in message
    assert migrate.current_revision(target_of(old)) == FIRST


def test_an_older_schema_is_migrated_where_the_url_allows_it(old: str) -> None:
    with limpet.sync.open(auto(old)) as store:
        assert store.get("key") == 1

    assert migrate.current_revision(target_of(old)) == REVISION
    with limpet.sync.open(old) as store:
        assert store.get("key") == 1


async def test_an_older_schema_is_migrated_on_a_loop(new_url: Any) -> None:
    for engine in ("sqlite", "postgres"):
        url = new_url(engine)
        async with limpet.open(url) as store:
            await store.put("key", 1)
        await asyncio.to_thread(migrate.down, target_of(url), FIRST)

        async with limpet.open(auto(url)) as store:
            assert await store.get("key") == 1


@pytest.mark.parametrize("option", ["", "migrate=auto"])
def test_a_newer_schema_is_refused(url: str, option: str) -> None:
    make(url)
    ask(url, "UPDATE limpet_schema SET version_num = '0099'")
    before = catalog(url)

    with pytest.raises(Corrupt, match=rf"has schema revision 0099, and this release knows none after {REVISION}: use"):
        limpet.sync.open(auto(url) if option else url)

    for move in (migrate.up, migrate.sql, lambda target: migrate.down(target, FIRST)):
        with pytest.raises(Corrupt, match=f"0099, and this release knows none after {REVISION}"):
            move(target_of(url))
    assert catalog(url) == before


@pytest.mark.parametrize("statement", ["DELETE FROM limpet_schema", "DROP TABLE limpet_schema"])
def test_a_store_that_does_not_say_its_revision_is_corrupt(url: str, statement: str) -> None:
    make(url)
    ask(url, statement)

    with pytest.raises(Corrupt, match="limpet_schema"):
        limpet.sync.open(auto(url))


def test_a_word_that_the_option_does_not_know_is_refused(url: str) -> None:
    with pytest.raises(InvalidValue, match="migrate is one of no, auto"):
        limpet.sync.open(auto(url).replace("auto", "always"))


# At once ----------------------------------------------------------------------


@pytest.mark.slow
def test_several_processes_that_open_at_once_migrate_once(old: str) -> None:
    script = (
        "import sys, limpet.sync\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        f"with limpet.sync.open({auto(old)!r}, sweep=False) as store:\n"
        "    print(store.add('count'))\n"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    try:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in started:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        output = [process.communicate(timeout=PATIENCE_S) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()

    assert [err for _, err in output if err] == []
    assert sorted(int(out) for out, _ in output) == [1, 2, 3, 4]
    assert migrate.current_revision(target_of(old)) == REVISION


def test_several_threads_that_open_at_once_migrate_once(old: str) -> None:
    ready = threading.Barrier(4)

    def open_and_count() -> int:
        ready.wait(PATIENCE_S)
        with limpet.sync.open(auto(old), sweep=False) as store:
            return store.add("count")

    with ThreadPoolExecutor(4) as pool:
        counts = [pool.submit(open_and_count) for _ in range(4)]
        assert sorted(count.result(PATIENCE_S) for count in counts) == [1, 2, 3, 4]


async def test_several_tasks_of_one_loop_that_open_at_once_migrate_once(new_url: Any) -> None:
    url = new_url("postgres")
    async with limpet.open(url):
        pass
    await asyncio.to_thread(migrate.down, target_of(url), FIRST)

    async def open_and_count() -> int:
        async with limpet.open(auto(url), sweep=False) as store:
            return await store.add("count")

    assert sorted(await asyncio.gather(*(open_and_count() for _ in range(4)))) == [1, 2, 3, 4]


def test_migrating_waits_for_the_writer_of_a_file(sqlite_url: str) -> None:
    make(sqlite_url)
    target = target_of(sqlite_url)
    assert isinstance(target, SqliteTarget)
    with (
        contextlib.closing(sqlite3.connect(target.path, isolation_level=None)) as writer,
        ThreadPoolExecutor(1) as pool,
    ):
        writer.execute("BEGIN IMMEDIATE")
        moving = pool.submit(migrate.down, target, FIRST)
        # It holds no lock that the writer could meet, and has changed nothing.
        assert writer.execute("SELECT version_num FROM limpet_schema").fetchall() == [(REVISION,)]
        writer.execute("COMMIT")

        assert moving.result(PATIENCE_S) == REVISION


def test_migrating_waits_for_the_process_that_makes_the_tables(postgres_url: str) -> None:
    """The lock is the one under which the engine makes them."""
    target = target_of(postgres_url)
    assert isinstance(target, PostgresTarget)

    with ThreadPoolExecutor(2) as pool:
        with hold_lock(target):
            moving = pool.submit(migrate.up, target)
            making = pool.submit(make, postgres_url)
            wait_for_waiters(target, 2)
            assert not moving.done()
            assert not making.done()

        moving.result(PATIENCE_S)
        making.result(PATIENCE_S)
    assert migrate.current_revision(target) == REVISION


@contextlib.contextmanager
def hold_lock(target: PostgresTarget) -> Iterator[None]:
    """Hold the lock of a schema, as the engine does while it makes its tables."""
    with asyncio.Runner() as runner:
        connection = runner.run(asyncpg.connect(target.source))
        key = f"hashtextextended('limpet {target.schema}', 0)"
        runner.run(connection.execute(f"SELECT pg_advisory_lock({key})"))
        try:
            yield
        finally:
            runner.run(connection.close())


def wait_for_waiters(target: PostgresTarget, count: int) -> None:
    look = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    url = f"{target.source}?schema={target.schema}"
    until = time.monotonic() + PATIENCE_S
    while ask(url, look)[0][0] < count:
        assert time.monotonic() < until, "no process waits for the lock"
        time.sleep(0.02)


# What is refused --------------------------------------------------------------


@pytest.mark.parametrize("revision", ["0000", "9999", "", "head", "heads", "-1", "+1", "base:head"])
def test_a_revision_that_is_not_known_is_refused(url: str, revision: str) -> None:
    make(url)

    for move in (migrate.up, migrate.down, migrate.sql):
        with pytest.raises(InvalidValue, match=f"there is no schema revision {revision!r}".replace("+", r"\+")):
            move(target_of(url), revision)


def test_up_does_not_go_down_and_down_does_not_go_up(url: str) -> None:
    make(url)
    with pytest.raises(
        InvalidValue, match=f"is at schema revision {REVISION}: 'limpet migrate down {FIRST}' goes back"
    ):
        migrate.up(target_of(url), FIRST)
    migrate.down(target_of(url), FIRST)
    with pytest.raises(InvalidValue, match=f"is at schema revision {FIRST}: 'limpet migrate up {REVISION}' goes on"):
        migrate.down(target_of(url), REVISION)

    assert migrate.current_revision(target_of(url)) == FIRST


def test_where_there_is_no_store_there_is_nothing_to_take_down(url: str) -> None:
    with pytest.raises(InvalidValue, match="has no Limpet store in it"):
        migrate.down(target_of(url), FIRST)


def test_migrating_makes_no_file(sqlite_url: str) -> None:
    lost = folder_of(sqlite_url) / "lost.db"

    with pytest.raises(LimpetError, match=r"lost\.db"):
        migrate.up(SqliteTarget(str(lost)))

    assert not lost.exists()


@pytest.mark.parametrize("content", [b"This is a diary.\n" * 100])
def test_a_file_that_is_no_database_stays_as_it_is(sqlite_url: str, content: bytes) -> None:
    target = target_of(sqlite_url)
    assert isinstance(target, SqliteTarget)
    Path(target.path).write_bytes(content)

    with pytest.raises(Corrupt, match="not a database"):
        migrate.up(target)

    assert Path(target.path).read_bytes() == content


def test_a_server_that_is_not_there_is_unavailable_and_no_password_is_shown() -> None:
    target = target_of(f"postgresql://alice:{SECRET}@127.0.0.1:1/none")

    with pytest.raises(Unavailable) as refused:
        migrate.up(target)

    assert SECRET not in str(refused.value)
    assert SECRET not in repr(target)
    assert SECRET not in str(target)


def test_a_database_that_is_not_there_is_a_mistake_in_the_request(postgres_url: str) -> None:
    with pytest.raises(InvalidValue, match="does not exist"):
        migrate.up(target_of(postgres_url.replace("/postgres?", "/no_such_database?")))


def test_a_role_that_may_not_change_the_schema_is_denied(postgres_url: str) -> None:
    make(postgres_url)
    schema = str(target_of(postgres_url).schema)
    role = f"role_{schema}"
    run_script(postgres_url, f"CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA {schema} TO {role}")
    run_script(postgres_url, f"GRANT SELECT, UPDATE ON limpet_schema TO {role}")
    try:
        with pytest.raises(PermissionDenied, match=r"must be owner|permission denied"):
            migrate.down(target_of(postgres_url.replace("postgres@", f"{role}@")), FIRST)
    finally:
        run_script(postgres_url, f"DROP OWNED BY {role}; DROP ROLE {role}")
    assert migrate.current_revision(target_of(postgres_url)) == REVISION


# What `up` would run ----------------------------------------------------------


@pytest.mark.parametrize("start", [None, FIRST])
def test_the_script_does_what_up_does(url: str, new_url: Any, start: str | None) -> None:
    by_hand = new_url(engine_of(url))
    for target in (target_of(url), target_of(by_hand)):
        if start is not None:
            migrate.up(target, start)

    migrate.up(target_of(url))
    run_script(by_hand, migrate.sql(target_of(by_hand)))

    assert catalog(by_hand) == catalog(url)
    assert migrate.current_revision(target_of(by_hand)) == REVISION
    make(by_hand)


def test_the_script_goes_as_far_as_requested(url: str) -> None:
    run_script(url, migrate.sql(target_of(url), FIRST))

    assert migrate.current_revision(target_of(url)) == FIRST
    assert REVISIONS[-1] != FIRST


def test_a_script_that_comes_late_changes_nothing(old: str) -> None:
    """Another process has migrated since it was written."""
    script = migrate.sql(target_of(old))
    migrate.up(target_of(old))
    before = catalog(old)

    with contextlib.suppress(asyncpg.PostgresError, sqlite3.Error):
        run_script(old, script)

    assert catalog(old) == before
    assert migrate.current_revision(target_of(old)) == REVISION


def test_where_nothing_is_to_be_done_the_script_is_empty(url: str) -> None:
    make(url)

    assert migrate.sql(target_of(url)) == ""


# Without the tools ------------------------------------------------------------


def without(module: str, script: str) -> str:
    """The error of a program where a module is not installed."""
    hidden = f"import sys; sys.modules[{module!r}] = None\n"
    done = subprocess.run([sys.executable, "-c", hidden + script], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@pytest.mark.parametrize("module", ["alembic", "sqlalchemy"])
def test_without_the_tools_the_error_names_what_to_install(old: str, module: str) -> None:
    opening = f"import limpet.sync\nlimpet.sync.open({auto(old)!r})"
    commanding = f"from limpet.cli import main\nmain(['migrate', 'up', '--url', {old!r}])"

    for script in (opening, commanding):
        output = without(module, script)
        assert f"migrating needs {module}" in output
        assert "pip install 'limpet[migrate]'" in output
    assert "Traceback" not in output
    assert migrate.current_revision(target_of(old)) == FIRST


def test_an_up_to_date_store_needs_no_tools(url: str) -> None:
    make(url)
    script = f"import limpet.sync\nwith limpet.sync.open({auto(url)!r}) as store: print(store.add('count'))"

    assert without("sqlalchemy", script) == "1\n"
