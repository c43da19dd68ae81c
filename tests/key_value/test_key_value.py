"""What the base of key-value engines does when the store under it fails, loses replies, or is shared."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

import limpet
from limpet.engines import key_value
from limpet.engines.key_value import KeyValueEngine, ReplyLost
from limpet.errors import Ambiguous, Closed, Corrupt, InvalidValue, Unavailable, ValueTooLarge
from limpet.model import PRESENT, Add, Batch, Commit, Delete, Guard, Put, Window
from limpet.session import Session
from tests.docs_support import ROOT
from tests.key_value.support import install
from tests.processes import PATIENCE_S, unmeasured

NAMESPACE = "shop"
Write = Callable[[bytes, bytes | None, Mapping[bytes, bytes | None]], Awaitable[bool]]
OpenEngine = Callable[[], Awaitable[Any]]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder in which the engine of the page is installed."""
    folder = tmp_path_factory.mktemp("table")
    install(folder)
    sys.path.insert(0, str(folder))
    try:
        yield folder
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("limpet_table", None)


@pytest_asyncio.fixture
async def open_engine(installed: Path, tmp_path: Path) -> AsyncIterator[OpenEngine]:
    """A function that opens the engine of the page on one file."""
    kind = importlib.import_module("limpet_table").TableEngine
    opened: list[KeyValueEngine] = []

    async def open_one() -> Any:
        engine = kind(f"{tmp_path}/state.table", limpet.SystemClock())
        await engine.begin()
        opened.append(engine)
        return engine

    yield open_one
    for engine in opened:
        await engine.close()


@pytest_asyncio.fixture
async def engine(open_engine: OpenEngine) -> Any:
    return await open_engine()


def add(key: str = "n", by: int = 1) -> Batch:
    return Batch((), (Add(key, by),))


async def count(engine: Any, key: str = "n") -> int:
    (entry,) = await engine.read(NAMESPACE, [key])
    return 0 if entry is None else int(entry.value)


# Lost replies -------------------------------------------------------------------


@pytest.mark.parametrize("is_applied", [True, False], ids=["applied", "not applied"])
async def test_a_retry_after_a_lost_reply_is_applied_once(
    engine: Any, monkeypatch: pytest.MonkeyPatch, is_applied: bool
) -> None:
    await engine.commit(NAMESPACE, add())
    lose_replies(engine, monkeypatch, times=1, is_applied=is_applied)

    with pytest.raises(Ambiguous) as lost:
        await engine.commit(NAMESPACE, add())
    for _ in range(300):
        await engine.commit(NAMESPACE, add("other"))
    assert lost.value.since == 1
    again = Batch((), (Add("n", 1),), lost.value.request_id, retry_since=lost.value.since)
    outcome = await engine.commit(NAMESPACE, again)

    assert await count(engine) == 2
    assert outcome.replayed is is_applied
    assert outcome.entries[0].value == 2


async def test_a_write_that_arrives_after_its_retry_does_nothing(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store was paused with the first attempt in its queue."""
    await engine.commit(NAMESPACE, add("other"))
    write: Write = engine.compare_and_write
    late: list[Any] = []

    async def delay(*request: Any) -> bool:
        late.append(request)
        raise ReplyLost from TimeoutError()

    monkeypatch.setattr(engine, "compare_and_write", delay)
    with pytest.raises(Ambiguous) as lost:
        await engine.commit(NAMESPACE, add())
    monkeypatch.undo()
    # Refused, so that the retry writes no change and leaves only its mark.
    guards = (Guard("missing", PRESENT),)
    again = Batch(guards, (Add("n", 1),), lost.value.request_id, retry_since=lost.value.since)
    await engine.commit(NAMESPACE, again)

    assert not await write(*late[0])
    assert await count(engine) == 0
    with pytest.raises(Unavailable, match="superseded"):
        await engine.commit(NAMESPACE, Batch((), (Add("n", 1),), lost.value.request_id))


async def test_a_store_hides_lost_replies(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = limpet.Store(Session(engine, limpet.SystemClock()), NAMESPACE)
    lose_replies(engine, monkeypatch, times=3, is_applied=True)

    for _ in range(5):
        await store.add("n")

    assert await store.get("n") == 5
    assert [event.value async for event in store.history("n")] == [1, 2, 3, 4, 5]


async def test_a_store_that_cannot_write_has_written_nothing(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: Any) -> bool:
        raise sqlite3.OperationalError("disk is full")

    monkeypatch.setattr(engine, "compare_and_write", refuse)
    with pytest.raises(Unavailable, match="OperationalError"):
        await engine.commit(NAMESPACE, add())
    monkeypatch.undo()

    assert await count(engine) == 0


def lose_replies(engine: Any, monkeypatch: pytest.MonkeyPatch, *, times: int, is_applied: bool) -> None:
    """Lose the replies to the next writes."""
    write: Write = engine.compare_and_write
    left = times

    async def lose(key: bytes, found: bytes | None, writes: Mapping[bytes, bytes | None]) -> bool:
        nonlocal left
        if left == 0:
            return await write(key, found, writes)
        left -= 1
        if is_applied:
            assert await write(key, found, writes)
        raise ReplyLost from ConnectionResetError()

    monkeypatch.setattr(engine, "compare_and_write", lose)


# Several writers ------------------------------------------------------------------


async def test_writers_that_meet_are_each_applied_once(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = [await open_engine() for _ in range(3)]
    beaten = 0
    for each in engines:
        write: Write = each.compare_and_write

        async def watched(*request: Any, write: Write = write) -> bool:
            nonlocal beaten
            is_written = await write(*request)
            beaten += not is_written
            return is_written

        monkeypatch.setattr(each, "compare_and_write", watched)

    async def work(each: Any) -> list[int]:
        return [(await each.commit(NAMESPACE, add())).entries[0].value for _ in range(40)]

    results = await asyncio.gather(*(work(each) for each in engines))

    assert sorted(number for result in results for number in result) == list(range(1, 121))
    assert beaten > 0


async def test_a_commit_that_never_gets_its_turn_ends_as_contention(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lose(*_: Any) -> bool:
        return False

    monkeypatch.setattr(key_value, "ATTEMPTS_MAX", 20)
    monkeypatch.setattr(engine, "compare_and_write", lose)

    with pytest.raises(Unavailable, match="faster 20 times"):
        await engine.commit(NAMESPACE, add())


async def test_a_batch_that_cannot_be_stored_fails_alone(engine: Any) -> None:
    bad = Batch((), (Delete("\ud800"),))

    results = await asyncio.gather(
        *(engine.commit(NAMESPACE, batch) for batch in (add(), bad, add())), return_exceptions=True
    )

    assert [type(result) for result in results] == [Commit, InvalidValue, Commit]
    assert await count(engine) == 2


async def test_batches_of_many_callers_are_written_in_parts(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write: Write = engine.compare_and_write
    sizes: list[int] = []

    async def measured(key: bytes, found: bytes | None, writes: Mapping[bytes, bytes | None]) -> bool:
        sizes.append(len(writes))
        if len(sizes) == 2:
            raise sqlite3.OperationalError("disk is full")
        return await write(key, found, writes)

    monkeypatch.setattr(engine, "rows_max", 60)
    monkeypatch.setattr(engine, "compare_and_write", measured)
    results = await asyncio.gather(
        *(engine.commit(NAMESPACE, add(f"k{number}")) for number in range(50)), return_exceptions=True
    )

    assert len(sizes) == 10
    assert max(sizes) <= 60
    # Twelve rows are counted for each, and one write failed.
    assert [isinstance(result, Unavailable) for result in results] == [5 <= number < 10 for number in range(50)]
    assert (await engine.status(NAMESPACE)).keys == 45


async def test_what_is_too_large_together_is_written_one_by_one(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write: Write = engine.compare_and_write

    async def limited(key: bytes, found: bytes | None, writes: Mapping[bytes, bytes | None]) -> bool:
        size_bytes = sum(len(value or b"") for value in writes.values())
        if size_bytes > 1_000:
            raise ValueTooLarge("the write", size_bytes=size_bytes, limit_bytes=1_000)
        return await write(key, found, writes)

    monkeypatch.setattr(engine, "compare_and_write", limited)
    large = Batch((), (Put("large", b'"' + b"x" * 2_000 + b'"'),))
    results = await asyncio.gather(
        *(engine.commit(NAMESPACE, batch) for batch in (add("a"), large, add("b"))), return_exceptions=True
    )

    assert [type(result) for result in results] == [Commit, ValueTooLarge, Commit]


WORKER = """
    import asyncio, json, sys
    import limpet

    async def work():
        async with limpet.open(sys.argv[1], namespace="shop") as store:
            while True:
                print(json.dumps([await store.add("n"), await store.add(sys.argv[2])]), flush=True)

    asyncio.run(work())
"""


def start_worker(installed: Path, folder: Path, number: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WORKER), f"table:{folder}/state.table", f"own{number}"],
        env={**unmeasured(), "PYTHONPATH": os.pathsep.join([str(installed), str(ROOT / "src")])},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.timeout(120)
async def test_processes_that_are_killed_lose_nothing_and_leave_no_half(
    open_engine: OpenEngine, installed: Path, tmp_path: Path
) -> None:
    """A counter is as high as the highest number that a worker has got, or higher by those that were on their way."""
    engine = await open_engine()
    workers = [start_worker(installed, tmp_path, number) for number in range(3)]
    try:
        while min([await count(engine, f"own{number}") for number in range(3)]) < 10:
            assert all(worker.poll() is None for worker in workers)
            await asyncio.sleep(0.05)
    finally:
        for worker in workers:
            worker.kill()
    printed = [[json.loads(line) for line in worker.communicate()[0].splitlines()] for worker in workers]

    got = [number for lines in printed for number, _ in lines]
    assert len(got) == len({*got})
    assert max(got) <= await count(engine) <= len(got) + len(workers)
    for number, lines in enumerate(printed):
        assert len(lines) <= await count(engine, f"own{number}") <= len(lines) + 1
    status = await engine.status(NAMESPACE)
    page = await engine.changes(NAMESPACE, 0, limit=10_000)
    assert status.revision == status.log_changes == len(page.changes)
    assert status.keys == 4


# What is stored -------------------------------------------------------------------


async def test_trimming_goes_on_until_all_that_is_over_is_gone(engine: Any, tmp_path: Path) -> None:
    for number in range(3):
        await asyncio.gather(*(engine.commit(NAMESPACE, add(f"k{number}/{each}")) for each in range(150)))

    assert await engine.trim(NAMESPACE, Window(changes=20, age_ms_min=0)) == 430
    assert await engine.trim(NAMESPACE, Window(changes=20, age_ms_min=0)) == 0
    status = await engine.status(NAMESPACE)
    assert (status.floor, status.log_changes, status.keys) == (430, 20, 450)
    # The entries, what is left of the log, the counters, and the row of the store.
    assert len(stored(tmp_path)) == 450 + 20 + 2


async def test_an_expiry_is_stored_once(engine: Any, tmp_path: Path) -> None:
    for ttl_ms in (60_000, 50_000, None, 40_000):
        await engine.commit(NAMESPACE, Batch((), (Put("a", b"1", ttl_ms),)))
    assert len([key for key in stored(tmp_path) if b"\0d" in key]) == 1

    await engine.commit(NAMESPACE, Batch((), (Put("a", b"1"),)))
    assert [key for key in stored(tmp_path) if b"\0d" in key] == []


async def test_a_damaged_entry_is_corrupt_and_harms_no_other(engine: Any, tmp_path: Path) -> None:
    await engine.commit(NAMESPACE, Batch((), (Put("a", b"1"), Put("b", b"2"))))
    with sqlite3.connect(tmp_path / "state.table") as connection:
        connection.execute("UPDATE rows SET value = x'c1' WHERE key = ?", (b"limpet\0nshop\0edata\0a",))

    results = await asyncio.gather(
        *(engine.read(NAMESPACE, [key]) for key in "ab"),
        *(engine.commit(NAMESPACE, add(key)) for key in "ab"),
        return_exceptions=True,
    )

    assert [isinstance(result, Corrupt) for result in results] == [True, False, True, False]
    assert await count(engine, "b") == 3


async def test_a_store_of_a_later_format_is_not_opened(open_engine: OpenEngine, tmp_path: Path) -> None:
    await open_engine()
    row = msgspec.msgpack.encode({"store_id": "x", "epoch": 1, "format": 99})
    with sqlite3.connect(tmp_path / "state.table") as connection:
        connection.execute("UPDATE rows SET value = ? WHERE key = ?", (row, b"limpet\0s"))

    with pytest.raises(Corrupt, match="format 99"):
        await open_engine()


async def test_a_lost_reply_while_opening_does_no_harm(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = importlib.import_module("limpet_table").TableEngine(f"{tmp_path}/state.table", limpet.SystemClock())
    lose_replies(engine, monkeypatch, times=1, is_applied=True)

    await engine.begin()

    assert (await engine.status(NAMESPACE)).revision == 0
    await engine.close()


async def test_a_store_that_keeps_nothing_is_not_opened(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = importlib.import_module("limpet_table").TableEngine(f"{tmp_path}/state.table", limpet.SystemClock())
    lose_replies(engine, monkeypatch, times=100, is_applied=False)

    with pytest.raises(Unavailable, match="does not keep what is written"):
        await engine.begin()
    with pytest.raises(Closed):
        await engine.status(NAMESPACE)


def stored(folder: Path) -> list[bytes]:
    with sqlite3.connect(folder / "state.table") as connection:
        return [key for (key,) in connection.execute("SELECT key FROM rows")]


# Waiting --------------------------------------------------------------------------


async def test_a_waiter_is_woken_also_where_waiting_for_the_store_fails(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = await open_engine(), await open_engine()

    async def fail(*_: Any) -> None:
        raise ConnectionResetError

    monkeypatch.setattr(reader, "wait_for_change", fail)
    waiting = asyncio.create_task(reader.changes(NAMESPACE, 0, wait_s=PATIENCE_S))
    await asyncio.sleep(0.1)
    await writer.commit(NAMESPACE, add())

    page = await asyncio.wait_for(waiting, 1)
    assert [change.key for change in page.changes] == ["n"]


async def test_a_waiter_gets_closed(engine: Any) -> None:
    waiting = asyncio.create_task(engine.changes(NAMESPACE, 0, wait_s=PATIENCE_S))
    await asyncio.sleep(0.05)
    await engine.close()

    with pytest.raises(Closed):
        await asyncio.wait_for(waiting, 1)
    await engine.close()
