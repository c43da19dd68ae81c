"""The cache of the SQLite engine: equal to the file and within its bounds, whatever a store does, and under load."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest

import limpet
import limpet.sync
from limpet import hub
from limpet.engines.sqlite import cache as sqlite_cache
from limpet.engines.sqlite import forks
from limpet.engines.sqlite.engine import SqliteEngine
from limpet.engines.sqlite.foreign import FEW
from limpet.errors import Conflict, TypeMismatch
from tests.sqlite.cache_scenes import COUNTERS, PAIR, Ledger, Peer
from tests.sqlite.cache_support import (
    CACHED,
    LONG,
    UNCACHED,
    by_hand,
    check_cache,
    disable_cache,
    engine_of,
    in_thread,
    keeps,
    number,
)
from tests.sqlite.support import batch, in_place, open_sqlite, put, together

pytestmark = pytest.mark.timeout(600 * LONG)


# Bounds -------------------------------------------------------------------------


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
        connection = stack.enter_context(closing(by_hand(path, raw=True)))
        stores = [store, store.namespace("beside")]
        for _ in range(LONG * 400):
            chosen = dice.choice(stores)
            with suppress(Conflict, TypeMismatch):
                do_something(chosen, dice, clock)
            for key in ("count", f"key/{dice.randrange(6)}", f"record/{dice.randrange(4)}"):
                dice.choice(stores).entry(key)
            chosen.outcome(f"request/{dice.randrange(40)}")
            in_place(engine_of(store).read("default", ["door"], family="lock"))
            compared += check_cache(engine_of(store), connection)
    assert compared > LONG * 200


async def test_what_a_group_leaves_is_what_the_file_holds(
    engine: SqliteEngine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group may write one key several times, in several namespaces; some of it is refused."""
    monkeypatch.setattr(sqlite_cache, "CACHED_MAX", 8)
    monkeypatch.setattr(sqlite_cache, "CACHED_BYTES_MAX", 1_000)
    dice = random.Random(5)
    compared = 0
    with closing(by_hand(path, raw=True)) as connection:
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
            compared += check_cache(engine, connection)
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


def test_many_readers_leave_the_cache_correct(url: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads fill, push out and rewrite at the same time, and what is kept stays right and within its bounds."""
    monkeypatch.setattr(sqlite_cache, "CACHED_MAX", 20)
    monkeypatch.setattr(sqlite_cache, "CACHED_BYTES_MAX", 800)
    with (
        limpet.sync.open(f"{url}?synchronous=normal", sweep=False) as store,
        closing(by_hand(path, raw=True)) as connection,
    ):
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
        assert check_cache(engine_of(store), connection)


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


@pytest.mark.slow
@pytest.mark.parametrize("caching", [CACHED, UNCACHED])
async def test_news_of_another_process_come_soon(
    url: str, path: Path, monkeypatch: pytest.MonkeyPatch, caching: str
) -> None:
    """Writes through one store wake the watchers of another, long before the wait would end by itself."""
    if caching == UNCACHED:
        disable_cache(monkeypatch.setattr)
    rounds = LONG * 30
    dice = random.Random(11)
    async with limpet.open(url, sweep=False) as store, store.watch("news") as watch:
        with Peer("obeys", url, path, caching) as there:
            await asyncio.to_thread(there.receive)
            for turn in range(1, rounds + 1):
                await asyncio.sleep(dice.random() * 0.03)
                telling = asyncio.create_task(asyncio.to_thread(there.do, "send", "news"))
                event = await asyncio.wait_for(anext(watch), hub.WAIT_S / 2)
                assert event.value == turn
                await telling


async def test_a_waiter_leaves_the_file_alone(url: str, path: Path) -> None:
    """A waiter reads the header only. The log is read when a process has committed."""
    engine = await open_sqlite(url, limpet.SystemClock())
    reads: list[int] = []
    log_page = engine._log_page

    def counted(*args: Any) -> Any:
        reads.append(1)
        return log_page(*args)

    engine._log_page = counted  # type: ignore[assignment, method-assign]
    try:
        await engine.changes("default", 0, wait_s=0.3)
        alone = len(reads)

        waiting = asyncio.create_task(engine.changes("default", 0, wait_s=0.5))
        with closing(by_hand(path)) as connection:
            for turn in range(1, 4):
                await asyncio.sleep(0.1)
                connection.execute("UPDATE limpet_store SET epoch = ?", (turn,))
        await waiting

        assert alone <= 2
        assert len(reads) - alone >= 4
    finally:
        await engine.close()


async def test_a_foreign_commit_wakes_the_waiters_of_its_namespace(url: str) -> None:
    """Of many awaited namespaces one changes. The logs of the others are not read."""
    async with limpet.open(url, sweep=False) as store, limpet.open(url, sweep=False) as other:
        engine = store._session.engine
        assert isinstance(engine, SqliteEngine)
        log_page, reads, have_read_twice = engine._log_page, list[str](), asyncio.Event()

        def counted(namespace: str, *rest: Any) -> Any:
            reads.append(namespace)
            if len(reads) == 2 * len(names):
                have_read_twice.set()
            return log_page(namespace, *rest)

        engine._log_page = counted  # type: ignore[assignment, method-assign]
        names = [f"n{number}" for number in range(2 * FEW)]
        waiting = {name: asyncio.create_task(engine.changes(name, 0, wait_s=600)) for name in names}
        await asyncio.sleep(0)
        # At first all of them are woken, because their revisions are not known yet.
        await other.namespace("n0").put("k", 1)
        await waiting.pop("n0")
        await have_read_twice.wait()
        reads.clear()

        await other.namespace("n3").put("k", 1)
        page = await waiting.pop("n3")

        assert [change.key for change in page.changes] == ["k"]
        assert reads == ["n3"]
        assert not any(task.done() for task in waiting.values())
        for task in waiting.values():
            task.cancel()


async def test_news_that_come_while_we_look_are_not_slept_through(url: str, clock: limpet.ManualClock) -> None:
    """Another process commits when we have read the log and not yet begun to wait."""
    engine, second = await open_sqlite(url, clock), await open_sqlite(url, clock)
    try:
        log_page, pages = engine._log_page, list[Any]()

        def slow_page(*args: Any) -> Any:
            pages.append(log_page(*args))
            if len(pages) == 1:
                in_thread(lambda: in_place(second.commit("default", batch(put("key", 1)))))
            return pages[-1]

        engine._log_page = slow_page  # type: ignore[assignment, method-assign]
        began = time.monotonic()
        found = await engine.changes("default", 0, wait_s=10.0)

        assert [change.key for change in found.changes] == ["key"]
        assert time.monotonic() - began < 5
    finally:
        await engine.close()
        await second.close()


async def test_a_watch_goes_on_when_the_file_was_let_go_of(url: str, path: Path) -> None:
    """A fork closes all connections, and the shared memory goes with them. A waiter reads again."""
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


@pytest.mark.slow
def test_time_goes_forward_for_all_readers(url: str, path: Path, tmp_path: Path, capsys: Any) -> None:
    """A read never goes back, and is never behind what was acknowledged to any caller before it began.

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
            stack.enter_context(Peer("counts", address, ledger, index * 4, api, seconds))
            for index, api in enumerate(("threads", "tasks", "threads"))
        ]
        disturber = stack.enter_context(Peer("disturbs", address, path, seconds))
        assert [process.receive() for process in (*workers, disturber)] == ["ready"] * 4

        together([*workers, disturber])
        reports = [worker.receive() for worker in workers]
        disturbances = disturber.receive()

        book = Ledger(str(ledger))
        counted = [store.get(f"count/{counter}") for counter in range(COUNTERS)]
        pair = [store.get("left"), store.get("right")]

    if LONG > 1:
        with capsys.disabled():
            for problems, reads, adds, fetched in reports:
                print(f"\n{reads:,} reads, {fetched:,} of them from the file, {adds:,} adds, {len(problems)} problems")
            print(f"{disturbances:,} disturbances in {seconds} s")
    assert [problems for problems, *_ in reports] == [[], [], []]
    assert counted == [book.begun(counter) for counter in range(COUNTERS)]
    assert pair == [book.begun(PAIR)] * 2
    for _, reads, adds, fetched in reports:
        # Most reads came from memory, or this was no test of it.
        assert reads > 500
        assert adds > 10
        assert fetched < reads
