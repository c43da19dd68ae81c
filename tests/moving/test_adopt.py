"""Adopting what other programs have stored: from their own layouts, with writers at work, killed and repeated."""

from __future__ import annotations

import asyncio
import json
import os
import shelve
import sqlite3
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import diskcache
import nats
import pytest
from redis.asyncio import Redis

import limpet
from limpet.errors import InvalidValue
from limpet.model import Entry
from limpet.moving.adopt import Adoption, adopt
from limpet.moving.sources import open_source
from limpet.urls import Address

pytestmark = pytest.mark.asyncio


async def adopted(
    source: str, into: str, *, namespace: str = "default", dry_run: bool = False, table: str | None = None
) -> Adoption:
    """Adopt as the command does."""
    data = await open_source(source, Address.parse(into), namespace=namespace, table=table)
    try:
        async with limpet.open(into, namespace=namespace, sweep=False) as store:
            return await adopt(store, data, policy="newer", dry_run=dry_run, progress=lambda _: None)
    finally:
        await data.close()


async def undone(source: str) -> None:
    data: Any = await open_source(source, Address.parse(source), namespace="default", table=None)
    await data.give_back()
    await data.close()


async def entries(url: str, namespace: str) -> dict[str, Entry]:
    async with limpet.open(url, namespace=namespace, sweep=False) as store:
        return {entry.key: entry async for entry in store.scan()}


@pytest.fixture
def target(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/target.db"


# The table of plugins -----------------------------------------------------------

# The statements of the document that describes this table.
PLUGIN_TABLE = """
CREATE TABLE plugin_kv_storage (
    plugin_name VARCHAR(100) NOT NULL,
    key VARCHAR(255) NOT NULL,
    value TEXT NOT NULL,
    expires_at TIMESTAMP WITH TIME ZONE NULL,
    created_at TIMESTAMP WITH TIME ZONE NOT NULL DEFAULT CURRENT_TIMESTAMP,
    updated_at TIMESTAMP WITH TIME ZONE NOT NULL DEFAULT CURRENT_TIMESTAMP,
    PRIMARY KEY (plugin_name, key)
);
CREATE INDEX idx_kv_expires_at ON plugin_kv_storage(expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX idx_kv_plugin_prefix ON plugin_kv_storage(plugin_name, key);
"""
CREATED = datetime(2025, 11, 22, 10, 0, 0, 123000, tzinfo=UTC)
UPDATED = datetime(2025, 12, 1, 8, 30, 0, tzinfo=UTC)
LATER = datetime(2099, 1, 1, tzinfo=UTC)
PLUGIN_ROWS: list[tuple[str, str, str, datetime | None]] = [
    ("trivia", "game_1", '{"players": ["alice", "bob"], "round": 2}', None),
    ("trivia", "é'; DROP TABLE x; --", '"\\u0000 text"', None),
    ("trivia", "float", "1.0", None),
    ("trivia", "session", "true", LATER),
    ("trivia", "over", "1", datetime(2025, 12, 2, tzinfo=UTC)),
    ("quote-db", "game_1", "null", None),
]
INSERT = "INSERT INTO plugin_kv_storage VALUES ({})"


def plugin_file(path: Path, rows: Any = PLUGIN_ROWS) -> str:
    with sqlite3.connect(path) as file:
        file.executescript(PLUGIN_TABLE)
        for name, key, value, ends in rows:
            at = [None if ends is None else ends.isoformat(sep=" "), CREATED.isoformat(sep=" "), "2025-12-01 08:30:00"]
            file.execute(INSERT.format("?, ?, ?, ?, ?, ?"), (name, key, value, *at))
    file.close()
    return f"sqlite:///{path}"


def assert_plugins(trivia: dict[str, Entry], quote: dict[str, Entry]) -> None:
    assert {key: entry.value for key, entry in trivia.items()} == {
        "game_1": {"players": ["alice", "bob"], "round": 2},
        "é'; DROP TABLE x; --": "\0 text",
        "float": 1.0,
        "session": True,
    }
    assert (quote["game_1"].value, len(quote)) == (None, 1)
    game = trivia["game_1"]
    assert (game.version, game.created_at, game.updated_at, game.expires_at) == (1, CREATED, UPDATED, None)
    assert trivia["session"].expires_at == LATER


async def test_a_table_of_plugins_is_copied_from_sqlite(tmp_path: Path, target: str) -> None:
    source = plugin_file(tmp_path / "bot.db")
    before = (tmp_path / "bot.db").read_bytes()

    looked = await adopted(source, target, dry_run=True)
    assert (looked.total.read, looked.total.written, looked.total.expired) == (6, 5, 1)
    assert await entries(target, "trivia") == {}
    done = await adopted(source, target)
    again = await adopted(source, target)

    assert_plugins(await entries(target, "trivia"), await entries(target, "quote-db"))
    assert (done.total.written, done.total.expired, done.handed_over) == (5, 1, None)
    assert (again.total.written, again.total.same) == (0, 5)
    assert (tmp_path / "bot.db").read_bytes() == before


async def test_a_table_of_plugins_is_adopted_in_its_sqlite_file(tmp_path: Path) -> None:
    url = plugin_file(tmp_path / "bot.db")
    with sqlite3.connect(tmp_path / "bot.db") as file:
        file.execute("CREATE TABLE quotes (id INTEGER PRIMARY KEY)")

    done = await adopted(url, f"{url}?journal=wal")

    assert done.handed_over is not None
    assert_plugins(await entries(url, "trivia"), await entries(url, "quote-db"))
    # A program that reads the table reads the view.
    rows = file.execute("SELECT plugin_name, key, value FROM plugin_kv_storage ORDER BY 1, 2").fetchall()
    assert len(rows) == 5
    assert rows[0] == ("quote-db", "game_1", "null")
    with pytest.raises(sqlite3.OperationalError, match="view"):
        file.execute("DELETE FROM plugin_kv_storage")
    file.close()
    with pytest.raises(InvalidValue, match="adopted before"):
        await adopted(url, url)
    await undone(url)
    with sqlite3.connect(tmp_path / "bot.db") as file:
        assert file.execute("SELECT count(*) FROM plugin_kv_storage").fetchone() == (6,)
        file.execute("DELETE FROM plugin_kv_storage")
    file.close()


async def test_what_cannot_be_stored_is_named_and_nothing_is_handed_over(tmp_path: Path) -> None:
    rows = [*PLUGIN_ROWS, ("trivia", "big", "123456789012345678901234567890", None), ("Trivia!", "k", "1", None)]
    url = plugin_file(tmp_path / "bot.db", [*rows, ("trivia", "broken", "{hunter2", None)])

    done = await adopted(url, f"{url}?journal=wal")

    assert (done.total.written, done.total.rejected, done.handed_over) == (5, 3, None)
    assert sorted(key for _, key, _ in done.total.examples) == ["big", "broken", "k"]
    assert "hunter2" not in str(done.total.examples)
    with sqlite3.connect(tmp_path / "bot.db") as file:
        assert file.execute("SELECT type FROM sqlite_master WHERE name = 'plugin_kv_storage'").fetchone() == ("table",)
    file.close()


@pytest.mark.parametrize("step", ["load", "hand_over", "last load", "finish"])
async def test_an_adoption_that_was_interrupted_is_repeated(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each step, with writes and deletes of the old program before the second run."""
    url = plugin_file(tmp_path / "bot.db")
    data: Any = await open_source(url, Address.parse(url), namespace="default", table=None)
    loads = 0

    class Killed(BaseException):
        pass

    original = data.read

    async def read() -> AsyncIterator[Any]:
        nonlocal loads
        loads += 1
        count = 0
        async for item in original():
            count += 1
            if (step, loads, count) in (("load", 1, 4), ("last load", 2, 4)):
                raise Killed
            yield item

    async def killed() -> None:
        raise Killed

    data.read = read
    if step in ("hand_over", "finish"):
        setattr(data, step, killed)
    async with limpet.open(f"{url}?journal=wal", sweep=False) as store:
        with pytest.raises(Killed):
            await adopt(store, data, policy="newer", dry_run=False, progress=lambda _: None)
    await data.close()
    with sqlite3.connect(tmp_path / "bot.db") as file:
        if step in ("load", "hand_over"):
            # The old program goes on, until its table is handed over.
            file.execute("DELETE FROM plugin_kv_storage WHERE key = 'float'")
            file.execute("UPDATE plugin_kv_storage SET value = '5', updated_at = '2025-12-03' WHERE key = 'session'")
    file.close()

    await adopted(url, url)

    found = await entries(url, "trivia")
    assert len(await entries(url, "quote-db")) == 1
    if step in ("load", "hand_over"):
        assert sorted(found) == ["game_1", "session", "é'; DROP TABLE x; --"]
        assert found["session"].value == 5
    else:
        assert len(found) == 4


async def test_a_hand_over_deletes_only_what_it_has_brought(tmp_path: Path) -> None:
    """Entries that came in other ways have no row in the table either."""
    url = plugin_file(tmp_path / "bot.db")
    (tmp_path / "bot.json").write_text('{"a": 1}')
    await adopted(f"json:{tmp_path}/bot.json", f"{url}?journal=wal", namespace="trivia")
    async with limpet.open(url, namespace="scores", sweep=False) as store:
        await store.put("b", 1)

    await adopted(url, url)

    assert (await entries(url, "trivia"))["a"].value == 1
    assert (await entries(url, "scores"))["b"].value == 1


async def test_nothing_is_lost_of_what_is_written_to_a_sqlite_file_meanwhile(tmp_path: Path) -> None:
    """Writers in processes of their own go on until the table is handed over, and keep a journal."""
    rows = [("old", f"k{number:03}", "0", None) for number in range(300)]
    url = plugin_file(tmp_path / "bot.db", rows)
    writers = []
    for number in range(2):
        command = [sys.executable, "-c", _WRITER, str(tmp_path / "bot.db"), str(number), str(tmp_path / f"j{number}")]
        writers.append(await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE))
    for writer in writers:
        assert writer.stdout is not None
        assert await writer.stdout.readline() == b"begun\n"

    done = await adopted(url, f"{url}?journal=wal")

    journal: dict[tuple[str, str], int | None] = {}
    for number, writer in enumerate(writers):
        assert await writer.wait() == 0
        for line in (tmp_path / f"j{number}").read_text().splitlines():
            plugin, key, value = line.split()
            journal[plugin, key] = None if value == "deleted" else int(value)
    found = {("old", key): entry.value for key, entry in (await entries(url, "old")).items()}
    for number in range(2):
        found |= {(f"w{number}", key): entry.value for key, entry in (await entries(url, f"w{number}")).items()}
    with sqlite3.connect(tmp_path / "bot.db") as file:
        table = {
            (name, key): int(value)
            for name, key, value in file.execute("SELECT plugin_name, key, value FROM plugin_kv_storage_before_limpet")
        }
    file.close()
    assert done.handed_over is not None
    assert found == table
    assert {key: value for key, value in journal.items() if value is not None}.items() <= found.items()
    assert not {key for key, value in journal.items() if value is None} & found.keys()
    assert len(journal) > 40


_WRITER = """
import sqlite3, sys, time
path, me, journal = sys.argv[1], int(sys.argv[2]), open(sys.argv[3], "w")
old = "plugin_name = 'old' AND key = ?"
file = sqlite3.connect(path, timeout=60, isolation_level=None)
put = "INSERT INTO plugin_kv_storage (plugin_name, key, value) VALUES (?, ?, ?) ON CONFLICT (plugin_name, key) " \\
    "DO UPDATE SET value = excluded.value, updated_at = CURRENT_TIMESTAMP"
try:
    for number in range(100_000):
        if number % 7 == 0 and me == 0:
            file.execute(f"DELETE FROM plugin_kv_storage WHERE {old}", (f"k{number % 300:03}",))
            done = "old", f"k{number % 300:03}", "deleted"
        else:
            done = f"w{me}", f"k{number % 60}", str(number)
            file.execute(put, done)
        if number == 40:
            print("begun", flush=True)
        # What is in the journal was acknowledged. The pause lets others begin: SQLite has no queue.
        print(*done, file=journal)
        time.sleep(0.002)
except sqlite3.OperationalError as error:
    assert "view" in str(error), error
"""


async def test_two_writes_in_one_second_are_told_apart(tmp_path: Path, target: str) -> None:
    """The column has whole seconds by default, and there is no version."""
    source = plugin_file(tmp_path / "bot.db")
    await adopted(source, target)
    with sqlite3.connect(tmp_path / "bot.db") as file:
        file.execute("UPDATE plugin_kv_storage SET value = '2' WHERE key = 'float'")
    file.close()

    await adopted(source, target)

    assert (await entries(target, "trivia"))["float"].value == 2


async def test_an_entry_that_the_store_has_written_later_is_kept(tmp_path: Path, target: str) -> None:
    source = plugin_file(tmp_path / "bot.db")
    async with limpet.open(target, namespace="trivia", sweep=False) as store:
        await store.put("game_1", "newer")

    done = await adopted(source, target)

    assert (done.total.written, done.total.kept) == (4, 1)
    assert (await entries(target, "trivia"))["game_1"].value == "newer"


# PostgreSQL -----------------------------------------------------------------------

STATE_TABLE = """
CREATE TABLE state (
    key TEXT PRIMARY KEY,
    value JSONB NOT NULL,
    updated_at TIMESTAMPTZ NOT NULL DEFAULT now(),
    version INTEGER NOT NULL DEFAULT 1
)"""
STATE_SET = """
INSERT INTO state (key, value, updated_at, version) VALUES ($1, $2::jsonb, now(), 1)
ON CONFLICT (key) DO UPDATE SET value = excluded.value, updated_at = now(), version = state.version + 1
RETURNING version"""


@pytest.fixture
async def schema() -> AsyncIterator[tuple[asyncpg.Connection, str]]:
    """A schema of a butler, and the URL of a store in it."""
    name, base = f"butler_{uuid.uuid4().hex[:8]}", os.environ["LIMPET_TEST_POSTGRES"]
    connection = await asyncpg.connect(base)
    await connection.execute(f"CREATE SCHEMA {name}")
    await connection.execute(f"SET search_path = {name}")
    yield connection, f"{base}?schema={name}"
    await connection.execute(f"DROP SCHEMA {name} CASCADE")
    await connection.close()


async def test_a_state_table_is_adopted_in_its_schema(schema: Any) -> None:
    """The goal is at version 7: compare-and-set goes on from there."""
    connection, url = schema
    await connection.execute(STATE_TABLE)
    for number in range(7):
        await connection.execute(STATE_SET, "goal", json.dumps({"n": number}))
    await connection.execute(STATE_SET, "é\n", '"x"')
    times = dict(await connection.fetch("SELECT key, updated_at FROM state"))

    done = await adopted(url, url)

    found = await entries(url, "state")
    shown = {key: (entry.value, entry.version) for key, entry in found.items()}
    assert shown == {"goal": ({"n": 6}, 7), "é\n": ("x", 1)}
    assert all(abs(found[key].updated_at - at) <= timedelta(milliseconds=1) for key, at in times.items())
    assert done.handed_over is not None
    rows = await connection.fetch("SELECT key, value, version FROM state ORDER BY key")
    assert [(row["key"], row["version"]) for row in rows] == [("goal", 7), ("é\n", 1)]
    with pytest.raises(asyncpg.PostgresError, match=r"for reading only|ON CONFLICT"):
        await connection.execute(STATE_SET, "goal", "1")

    from limpet.faces.state import CASConflictError, state_compare_and_set

    async with asyncpg.create_pool(
        os.environ["LIMPET_TEST_POSTGRES"],
        min_size=1,
        max_size=1,
        server_settings={"search_path": url.partition("schema=")[2]},
    ) as pool:
        assert await state_compare_and_set(pool, "goal", 7, {"n": 7}) == 8
        with pytest.raises(CASConflictError):
            await state_compare_and_set(pool, "goal", 7, {"n": 8})
    with pytest.raises(InvalidValue, match="adopted before"):
        await adopted(url, url)
    await undone(url)
    assert await connection.fetchval("SELECT version FROM state WHERE key = 'goal'") == 7
    assert await connection.fetchval(STATE_SET, "goal", "1") == 8


async def test_nothing_is_lost_of_what_is_written_meanwhile(schema: Any) -> None:
    """Four writers go on until the table is handed over. Their own journals tell what has to be in the store."""
    connection, url = schema
    await connection.execute(STATE_TABLE)
    for number in range(300):
        await connection.execute(STATE_SET, f"old/{number:03}", "0")
    name = url.partition("schema=")[2]
    journal: dict[str, tuple[int, int] | None] = {}
    began = asyncio.Event()

    async def write(writer: int) -> None:
        own = await asyncpg.connect(os.environ["LIMPET_TEST_POSTGRES"], server_settings={"search_path": name})
        try:
            for number in range(100_000):
                key = f"w{writer}/{number % 40}" if number % 3 else f"old/{(number * 7 + writer) % 300:03}"
                if writer == 0 and number % 11 == 0:
                    key = f"old/{number % 300:03}"
                    await own.execute("DELETE FROM state WHERE key = $1", key)
                    journal[key] = None
                elif writer == 0 or not key.startswith("old"):
                    journal[key] = (number, await own.fetchval(STATE_SET, key, str(number)))
                began.set()
        except asyncpg.PostgresError as error:
            # The view refuses it. It must not be written elsewhere.
            assert "ON CONFLICT" in str(error) or "reading only" in str(error)  # noqa: PT017
        finally:
            await own.close()

    writers = [asyncio.create_task(write(writer)) for writer in range(4)]
    await began.wait()
    done = await adopted(url, url)
    await asyncio.gather(*writers)

    found = {key: (entry.value, entry.version) for key, entry in (await entries(url, "state")).items()}
    rows = await connection.fetch("SELECT key, value::text, version FROM state_before_limpet")
    assert found == {key: (int(value), version) for key, value, version in rows}
    assert {key: item for key, item in journal.items() if item is not None}.items() <= found.items()
    assert not {key for key, item in journal.items() if item is None} & found.keys()
    assert done.last is not None
    assert done.last.read == len(rows)


async def test_a_table_of_plugins_is_adopted_in_its_schema(schema: Any) -> None:
    connection, url = schema
    await connection.execute(PLUGIN_TABLE)
    for name, key, value, ends in PLUGIN_ROWS:
        row = (name, key, value, ends, CREATED, UPDATED)
        await connection.execute(INSERT.format("$1, $2, $3, $4, $5, $6"), *row)

    await adopted(url, url)

    assert_plugins(await entries(url, "trivia"), await entries(url, "quote-db"))
    assert await connection.fetchval("SELECT count(*) FROM plugin_kv_storage") == 5


async def test_two_tables_are_chosen_from(schema: Any, target: str) -> None:
    connection, url = schema
    await connection.execute(STATE_TABLE)
    await connection.execute(PLUGIN_TABLE)
    await connection.execute(STATE_SET, "goal", "1")

    with pytest.raises(InvalidValue, match="--table"):
        await adopted(url, target)
    done = await adopted(url, target, table="state")
    assert (done.total.written, done.handed_over) == (1, None)


# Redis -----------------------------------------------------------------------------


@pytest.fixture
async def client() -> AsyncIterator[tuple[Redis, str, str]]:
    """A database with task records, as the document's own operations write them, under a name of the test's own."""
    url, gbe = os.environ["LIMPET_TEST_REDIS"].rpartition("/")[0] + "/60", f"gbe{uuid.uuid4().hex[:8]}"
    client = Redis.from_url(url)
    for number in range(300):
        name = f"{gbe}:state:tasks:email-send:job_{number}"
        fields: Any = {"state": "running", "worker": "w7", "updated_at": 1_700_000_000_000 + number, "raw": b"\xff\0"}
        await client.hset(name, mapping=fields)
    await client.pexpire(f"{gbe}:state:tasks:email-send:job_1", 3_600_000)
    await client.hset(f"{gbe}:other", "x", "1")
    yield client, url, gbe
    await client.aclose()


async def names(redis: Redis, pattern: str) -> list[bytes]:
    return [name async for name in redis.scan_iter(pattern, count=1000)]


async def test_redis_hashes_are_copied(client: Any, target: str) -> None:
    redis, url, gbe = client
    await redis.lpush(f"{gbe}:state:list", "x")

    done = await adopted(f"{url}?prefix={gbe}:state:", target)
    again = await adopted(f"{url}?prefix={gbe}:state:", target)

    found = await entries(target, gbe)
    assert (len(found), done.total.written, done.total.rejected) == (300, 300, 1)
    assert (again.total.written, again.total.same) == (0, 300)
    one = found["state:tasks:email-send:job_1"]
    assert one.value == {"state": b"running", "worker": b"w7", "updated_at": b"1700000000001", "raw": b"\xff\0"}
    assert one.updated_at == datetime.fromtimestamp(1_700_000_000.001, UTC)
    assert one.expires_at is not None
    assert abs(one.expires_at - datetime.now(UTC) - timedelta(hours=1)) < timedelta(seconds=60)


async def test_redis_hashes_are_copied_again_where_their_writers_went_on(client: Any, target: str) -> None:
    redis, url, gbe = client
    await adopted(f"{url}?prefix={gbe}:state:", target)
    await redis.hset(f"{gbe}:state:tasks:email-send:job_1", "state", "completed")
    async with limpet.open(target, namespace=gbe, sweep=False) as store:
        await store.record("state:tasks:email-send:job_2").set({"state": b"failed"})

    again = await adopted(f"{url}?prefix={gbe}:state:", target)

    found = await entries(target, gbe)
    assert (again.total.written, again.total.kept) == (1, 1)
    assert found["state:tasks:email-send:job_1"].value["state"] == b"completed"
    assert found["state:tasks:email-send:job_2"].value["state"] == b"failed"


async def test_redis_hashes_are_adopted_in_place(client: Any) -> None:
    """Readers find each hash under its name; a worker claims the job by compare-and-swap."""
    redis, url, gbe = client
    before = {name: await redis.hgetall(name) for name in await names(redis, f"{gbe}:state:*")}
    into = f"{url}?hash_tag=none"

    done = await adopted(f"{url}?prefix={gbe}:state:", into)
    again = await adopted(f"{url}?prefix={gbe}:state:", into)

    assert (done.total.written, done.total.rejected, again.total.read) == (300, 0, 0)
    assert {name: await redis.hgetall(name) for name in await names(redis, f"{gbe}:state:*")} == before
    assert await names(redis, f"before-limpet:{gbe}*") == []
    assert await redis.hgetall(f"{gbe}:other") == {b"x": b"1"}
    async with limpet.open(into, namespace=gbe, sweep=False) as store:
        record = store.record("state:tasks:email-send:job_2")
        assert await record.swap("state", b"running", b"completed")
        later = await store.entry("state:tasks:email-send:job_1")
    assert later is not None
    assert later.expires_at is not None
    assert await redis.hget(f"{gbe}:state:tasks:email-send:job_2", "state") == b"completed"


async def test_redis_hashes_are_adopted_in_place_after_an_interruption(client: Any) -> None:
    redis, url, gbe = client
    into = f"{url}?hash_tag=none"
    data: Any = await open_source(f"{url}?prefix={gbe}:state:", Address.parse(into), namespace="x", table=None)
    await data.hand_over()
    count = 0
    async for _ in data.read():
        count += 1
        if count == 100:
            break
    await data.close()
    assert 100 <= len(await names(redis, f"before-limpet:{gbe}*")) < 300

    await adopted(f"{url}?prefix={gbe}:state:", into)

    assert len(await entries(into, gbe)) == 300
    assert await names(redis, f"before-limpet:{gbe}*") == []


# NATS ------------------------------------------------------------------------------


@pytest.mark.parametrize(("history", "ttl"), [(1, None), (5, None), (1, 3600)])
async def test_a_bucket_is_adopted(target: str, history: int, ttl: int | None) -> None:
    url, bucket = os.environ["LIMPET_TEST_NATS"], f"agent-state-{uuid.uuid4().hex[:8]}"
    connection = await nats.connect(url)
    context = connection.jetstream()
    made = await context.create_key_value(bucket=bucket, history=history, ttl=ttl)
    for number in range(50):
        await made.put(f"task.{number}", b"%d" % number)
    await made.put("task.1", b"again")
    await made.put("task.2", b"\xff\0")
    await made.delete("task.3")

    done = await adopted(f"{url}?bucket={bucket}", target, namespace="agents")
    again = await adopted(f"{url}?bucket={bucket}", target, namespace="agents")

    found = await entries(target, "agents")
    last = await made.get("task.1")
    assert (len(found), done.total.written, again.total.same, again.total.written) == (49, 49, 49, 0)
    assert (found["task.1"].value, found["task.2"].value, found["task.9"].value) == (b"again", b"\xff\0", b"9")
    ends = found["task.1"].expires_at
    assert (ends is None) == (ttl is None)
    assert ends is None or abs(ends - found["task.1"].updated_at - timedelta(hours=1)) < timedelta(seconds=1)
    assert (last.value, last.revision) == (b"again", found["task.1"].version)
    await context.delete_key_value(bucket)
    await connection.close()


async def test_a_bucket_is_adopted_while_it_is_written(target: str) -> None:
    """Each key is found, as it was at some moment of the adoption; the second run brings what was written since."""
    url, bucket = os.environ["LIMPET_TEST_NATS"], f"busy-{uuid.uuid4().hex[:8]}"
    connection = await nats.connect(url)
    made = await connection.jetstream().create_key_value(bucket=bucket)
    for number in range(300):
        await made.put(f"k{number}", b"0")
    stop = asyncio.Event()
    latest: dict[str, int] = {}

    async def write(writer: int) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            latest[f"k{(number * 8 + writer) % 300}"] = number
            await made.put(f"k{(number * 8 + writer) % 300}", b"%d" % number)

    writers = [asyncio.create_task(write(writer)) for writer in (1, 2)]
    first = await adopted(f"{url}?bucket={bucket}", target)
    stop.set()
    await asyncio.gather(*writers)
    await adopted(f"{url}?bucket={bucket}", target)

    found = await entries(target, "default")
    assert first.total.read >= 300
    assert {key: int(entry.value) for key, entry in found.items()} == {**{f"k{n}": 0 for n in range(300)}, **latest}
    await connection.close()


async def test_values_of_a_bucket_may_be_json(target: str) -> None:
    url, bucket = os.environ["LIMPET_TEST_NATS"], f"json-{uuid.uuid4().hex[:8]}"
    connection = await nats.connect(url)
    made = await connection.jetstream().create_key_value(bucket=bucket)
    await made.put("a", b'{"n": 1.0}')
    await made.put("b", b"hunter2")

    done = await adopted(f"{url}?bucket={bucket}&values=json", target)

    assert {key: entry.value for key, entry in (await entries(target, "default")).items()} == {"a": {"n": 1.0}}
    assert done.total.examples == [("default", "b", "the value is not JSON")]
    await connection.close()


async def test_a_bucket_of_a_store_or_none_is_refused(target: str) -> None:
    url = os.environ["LIMPET_TEST_NATS"]
    async with limpet.open(f"{url}?bucket_prefix=adopt-", namespace="x", sweep=False) as store:
        await store.put("a", 1)

    with pytest.raises(InvalidValue, match="limpet copy"):
        await adopted(f"{url}?bucket=adopt-x", target)
    with pytest.raises(InvalidValue, match="has no bucket"):
        await adopted(f"{url}?bucket=missing", target)


# Files -----------------------------------------------------------------------------


async def test_json_files_are_adopted(tmp_path: Path, target: str) -> None:
    folder = tmp_path / "states"
    (folder / "game").mkdir(parents=True)
    (folder / "game" / "1.json").write_text('{"turn": "alice"}')
    (folder / "theme.json").write_text('"dark"')
    (folder / "broken.json").write_text("{")
    (tmp_path / "bot.json").write_text('{"a": 1, "b/c": [1.0], "": 5}')

    many, one = await adopted(str(folder), target), await adopted(f"json:{tmp_path}/bot.json", target)

    found = await entries(target, "default")
    assert {key: entry.value for key, entry in found.items()} == {
        "game/1": {"turn": "alice"},
        "theme": "dark",
        "a": 1,
        "b/c": [1.0],
    }
    assert [key for _, key, _ in many.total.examples + one.total.examples] == ["broken", ""]
    assert (await adopted(str(folder), target)).total.same == 2
    (folder / "theme.json").write_text('"light"')
    assert (await adopted(str(folder), target)).total.written == 1


async def test_a_shelf_is_adopted_and_runs_no_code(tmp_path: Path, target: str) -> None:
    class Attack:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path}/harm",)

    with shelve.open(str(tmp_path / "shelf")) as shelf:  # noqa: S301
        shelf["a"] = {"n": 1, "list": [1, "x", None]}
        shelf["b"] = b"raw"
        shelf["attack"] = Attack()

    done = await adopted(f"shelve:{tmp_path}/shelf", target)

    found = await entries(target, "default")
    assert {key: entry.value for key, entry in found.items()} == {"a": {"n": 1, "list": [1, "x", None]}, "b": b"raw"}
    assert [key for _, key, _ in done.total.examples] == ["attack"]
    assert not (tmp_path / "harm").exists()


async def test_a_cache_of_diskcache_is_adopted(tmp_path: Path, target: str) -> None:
    with diskcache.Cache(str(tmp_path / "cache")) as cache:
        cache["text"] = "x"
        cache["number"] = 5
        cache["object"] = {"n": [1, 2]}
        cache["bytes"] = b"\xff"
        cache["large text"] = "é" * 50_000
        cache["large bytes"] = b"x" * 50_000
        cache["large object"] = ["x" * 50_000]
        cache.set("later", 1, expire=3600)
        cache[("a", 1)] = "no text for a key"

    done = await adopted(f"diskcache:{tmp_path}/cache", target)

    found = await entries(target, "default")
    assert {key: entry.value for key, entry in found.items()} == {
        "text": "x",
        "number": 5,
        "object": {"n": [1, 2]},
        "bytes": b"\xff",
        "large text": "é" * 50_000,
        "large bytes": b"x" * 50_000,
        "large object": ["x" * 50_000],
        "later": 1,
    }
    assert found["later"].expires_at is not None
    assert (done.total.written, done.total.rejected) == (8, 1)


@pytest.mark.parametrize(
    "source", ["missing.json", "diskcache:missing", "shelve:missing", "sqlite:///missing.db", "http://x"]
)
async def test_what_is_not_there_is_an_error(source: str, target: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidValue):
        await adopted(source, target)
