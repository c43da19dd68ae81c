"""Threads, tasks and event loops on one engine: nothing is lost, one wins, none starves.

Every scene plays on the memory engine and on SQLite. Processes have tests of their own, beside the SQLite engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

import limpet
import limpet.sync
from limpet.conformance.support import count, session_of, wait_for_queue
from limpet.engine import Engine
from limpet.engines.budget import Budget
from limpet.errors import Closed, LockHeld
from limpet.model import Batch, Commit, Put
from limpet.opening import open_engine
from tests.sqlite.support import in_place

T = TypeVar("T")

THREADS = 8
TASKS = 64
PATIENCE_S = 120.0


@pytest.fixture(params=["memory", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory:{uuid.uuid4().hex}" if request.param == "memory" else f"sqlite:///{tmp_path}/state.db"


@pytest.fixture
def blocking(url: str) -> Iterator[limpet.sync.Store]:
    with limpet.sync.open(url) as store:
        yield store


def in_threads(work: Callable[[int], T], count: int = THREADS) -> list[T]:
    """Run this in so many threads that start together, and give what each returned."""
    start = threading.Barrier(count)

    def begin(index: int) -> T:
        start.wait(PATIENCE_S)
        return work(index)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count), timeout=PATIENCE_S))


# One place, many hands ------------------------------------------------------------


def test_threads_that_add_lose_nothing(blocking: limpet.sync.Store) -> None:
    """Threads that write at once lose nothing."""
    answers = in_threads(lambda _: [blocking.add("hits") for _ in range(50)])

    assert sorted(value for answer in answers for value in answer) == [*range(1, THREADS * 50 + 1)]
    entry = blocking.entry("hits")
    assert entry is not None
    assert (entry.value, entry.version) == (THREADS * 50, THREADS * 50)


def test_threads_that_append_lose_nothing(blocking: limpet.sync.Store) -> None:
    """Threads that write at once lose nothing."""
    answers = in_threads(lambda thread: [blocking.append("log/", [thread, number]) for number in range(50)])

    made = sorted((entry for answer in answers for entry in answer), key=lambda entry: entry.key)
    assert [entry.key for entry in made] == [f"log/{number:016}" for number in range(1, THREADS * 50 + 1)]
    assert [entry.revision for entry in made] == sorted(entry.revision for entry in made)
    assert list(blocking.scan("log/")) == made


async def test_tasks_that_add_lose_nothing(url: str) -> None:
    """Concurrent adds all count."""
    async with limpet.open(url) as store:

        async def work() -> list[int]:
            return [await store.add("hits") for _ in range(10)]

        answers = await asyncio.gather(*(work() for _ in range(TASKS)))

        assert sorted(value for answer in answers for value in answer) == [*range(1, TASKS * 10 + 1)]
        assert (await store.status()).revision == TASKS * 10


def test_one_thread_wins_each_round_of_a_field(blocking: limpet.sync.Store) -> None:
    """Of all callers that swap the same field at once, one wins."""
    rounds = 40
    record = blocking.record("state")
    record.put({"round": 0, "winner": None})
    again = threading.Barrier(THREADS)

    def play(index: int) -> list[bool]:
        won = []
        for number in range(rounds):
            again.wait(PATIENCE_S)
            won.append(record.swap("round", number, number + 1, set={"winner": index}))
        return won

    won = in_threads(play)

    assert [sum(of_round) for of_round in zip(*won, strict=True)] == [1] * rounds
    fields, entry = record.fields(), record.entry()
    assert fields is not None
    assert entry is not None
    assert fields["round"] == rounds
    assert won[fields["winner"]][-1] is True
    assert entry.version == rounds + 1


async def test_one_task_wins_each_round_of_a_field(url: str) -> None:
    """Of all callers that swap the same field at once, one wins."""
    async with limpet.open(url) as store:
        record = store.record("state")
        await record.put({"round": 0, "winner": None})

        for number in range(20):
            won = await asyncio.gather(
                *(record.swap("round", number, number + 1, set={"winner": index}) for index in range(TASKS))
            )

            assert sum(won) == 1
            assert await record.fields() == {"round": number + 1, "winner": won.index(True)}


async def test_threads_and_tasks_on_one_place_lose_nothing(url: str) -> None:
    """Two stores opened on the same storage see each other's writes.

    Threads of the sync API and tasks of a loop, each through its own store, and a watcher that sees it all.
    """
    total = THREADS * 30 + TASKS * 5
    async with limpet.open(url) as store, store.watch("hits") as watch:
        blocking = await asyncio.to_thread(limpet.sync.open, url)
        threads = asyncio.to_thread(in_threads, lambda _: [blocking.add("hits") for _ in range(30)])

        async def work() -> list[int]:
            return [await store.add("hits") for _ in range(5)]

        both = await asyncio.gather(threads, asyncio.gather(*(work() for _ in range(TASKS))))
        answers = [*both[0], *both[1]]
        events = [await asyncio.wait_for(anext(watch), PATIENCE_S) for _ in range(total)]

        assert sorted(value for answer in answers for value in answer) == [*range(1, total + 1)]
        assert [event.value for event in events] == [*range(1, total + 1)]
        assert await asyncio.to_thread(blocking.get, "hits") == total
        await asyncio.to_thread(blocking.close)


async def test_threads_and_tasks_compete_for_one_field(url: str) -> None:
    """Of all callers that swap the same field at once, one wins."""
    async with limpet.open(url) as store:
        blocking = await asyncio.to_thread(limpet.sync.open, url)
        record, twin = store.record("state"), blocking.record("state")
        await record.put({"round": 0})

        for number in range(15):

            def swap(_: int, number: int = number) -> bool:
                return twin.swap("round", number, number + 1)

            beside = asyncio.create_task(asyncio.to_thread(in_threads, swap))
            won = await asyncio.gather(*(record.swap("round", number, number + 1) for _ in range(TASKS)))
            assert sum(won) + sum(await beside) == 1

        await asyncio.to_thread(blocking.close)


def test_one_thread_takes_what_there_is_once(blocking: limpet.sync.Store) -> None:
    """Of all callers that take a key at once, one gets the value."""
    for number in range(100):
        blocking.put(f"job/{number}", number)

    taken = in_threads(lambda _: [blocking.take(f"job/{number}") for number in range(100)])

    for number in range(100):
        assert [answers[number] for answers in taken if answers[number] is not None] == [number]
    assert blocking.keys().count == 0


def test_one_thread_creates(blocking: limpet.sync.Store) -> None:
    """`create` succeeds once per incarnation of a key and then conflicts."""

    def create(index: int) -> list[int]:
        made = []
        for number in range(50):
            with contextlib.suppress(limpet.errors.Conflict):
                blocking.create(f"key/{number}", index)
                made.append(number)
        return made

    made = in_threads(create)

    assert sorted(number for own in made for number in own) == [*range(50)]
    for index, own in enumerate(made):
        assert all(blocking.get(f"key/{number}") == index for number in own)


def test_threads_that_update_lose_nothing(blocking: limpet.sync.Store) -> None:
    """Concurrent updates lose nothing."""

    def work(index: int) -> None:
        for number in range(10):
            blocking.update("list", lambda found: [*(found or []), [index, number]])  # noqa: B023 - called at once

    in_threads(work, 4)

    found = blocking.get("list")
    assert sorted(found) == [[index, number] for index in range(4) for number in range(10)]
    assert [[n for i, n in found if i == index] for index in range(4)] == [[*range(10)]] * 4


def test_a_lock_keeps_threads_apart(blocking: limpet.sync.Store) -> None:
    """With `wait`, acquiring waits for the release."""
    inside = 0

    def work(_: int) -> list[int]:
        nonlocal inside
        tokens = []
        for _ in range(5):
            with blocking.lock("door", ttl=30, wait=PATIENCE_S) as lock:
                inside += 1
                assert inside == 1
                assert lock.token is not None
                tokens.append(lock.token)
                blocking.put("guarded", blocking.get("guarded", 0) + 1, fence=lock)
                inside -= 1
        return tokens

    tokens = in_threads(work, 4)

    assert blocking.get("guarded") == 20
    assert len({token for own in tokens for token in own}) == 20
    assert all(own == sorted(own) for own in tokens)


# Many loops -----------------------------------------------------------------------


def test_loops_in_several_threads_share_a_place(url: str) -> None:
    """Many watchers each see every change.

    Four threads, each with a loop and a store of its own. All write, and all watch what all write.
    """
    loops, each = 4, 25
    watching = threading.Barrier(loops)

    async def live(index: int) -> list[tuple[int, str, int]]:
        async with limpet.open(url) as store, store.watch() as watch:
            await asyncio.to_thread(watching.wait, PATIENCE_S)
            for number in range(each):
                await store.put(f"loop/{index}", number)
            events = [await asyncio.wait_for(anext(watch), PATIENCE_S) for _ in range(loops * each)]
            return [(event.revision, event.key, event.value) for event in events]

    seen = in_threads(lambda index: asyncio.run(live(index)), loops)

    assert all(own == seen[0] for own in seen)
    assert [revision for revision, _, _ in seen[0]] == sorted({revision for revision, _, _ in seen[0]})
    for index in range(loops):
        assert [value for _, key, value in seen[0] if key == f"loop/{index}"] == [*range(each)]


def test_loops_in_several_threads_share_an_engine(url: str) -> None:
    """Threads that write at once lose nothing.

    The very same handle, used by four loops and by four threads that have none.
    """
    engine: Engine = asyncio.run(open_engine(url, limpet.SystemClock()))

    async def write(name: str, count: int) -> list[Any]:
        batches = [Batch((), (Put(f"{name}/{n}", b"%d" % n),), f"{name}-{n}") for n in range(count)]
        if asyncio._get_running_loop() is None:
            return [await engine.commit("default", batch) for batch in batches]
        return list(await asyncio.gather(*(engine.commit("default", batch) for batch in batches)))

    def work(index: int) -> list[Any]:
        if index % 2:
            return asyncio.run(write(f"loop-{index}", 40))
        return in_place(write(f"thread-{index}", 40))

    outcomes = [outcome for own in in_threads(work) for outcome in own]

    assert {type(outcome) for outcome in outcomes} == {Commit}
    assert len({outcome.revision for outcome in outcomes}) == len(outcomes) == THREADS * 40
    assert asyncio.run(engine.status("default")).keys == THREADS * 40
    asyncio.run(engine.close())


def test_loops_in_several_threads_append_through_one_store(url: str) -> None:
    """Each loop can wake only its own callers, and between them the guard of the commit decides."""

    async def open_store() -> limpet.Store:
        return await limpet.open(url, sweep=False)

    store = asyncio.run(open_store())

    async def append(index: int) -> list[limpet.Entry]:
        return await asyncio.gather(*(store.append("log/", [index, number]) for number in range(40)))

    made = [entry for own in in_threads(lambda index: asyncio.run(append(index)), 4) for entry in own]

    made.sort(key=lambda entry: entry.key)
    assert [entry.key for entry in made] == [f"log/{number:016}" for number in range(1, 161)]
    assert [entry.revision for entry in made] == sorted(entry.revision for entry in made)
    asyncio.run(store.close())


def test_a_loop_waits_for_what_a_thread_writes(url: str) -> None:
    """A wait ends early when a change arrives, from this process or another."""
    engine = asyncio.run(open_engine(url, limpet.SystemClock()))
    waiting = threading.Event()

    async def wait() -> list[str]:
        asyncio.get_running_loop().call_later(0.02, waiting.set)
        feed = await engine.changes("default", 0, wait_s=PATIENCE_S)
        return [change.key for change in feed.changes]

    def work(index: int) -> list[str]:
        if index > 0:
            return asyncio.run(wait())
        waiting.wait(PATIENCE_S)
        asyncio.run(engine.commit("default", Batch((), (Put("news", b"1"),), "id")))
        return ["news"]

    assert in_threads(work, 4) == [["news"]] * 4
    asyncio.run(engine.close())


# Fair shares ----------------------------------------------------------------------


CALLS = 50


class Turns:
    """Counts the turns of the loop, and the most that happened in one of them.

    The engine's budget is one whose turn is over whenever it reads the clock, so that calls are counted and
    no machine is too slow for the test.
    """

    def __init__(self, store: limpet.Store) -> None:
        engine: Any = session_of(store).engine
        engine._budget = Budget(0.0, CALLS, timer=itertools.count(1).__next__)
        self.count = 0
        self.calls = 0
        self.most_calls = 0

    async def run(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.count += 1
            self.most_calls, self.calls = max(self.most_calls, self.calls), 0


@pytest.mark.parametrize("readers", [1, TASKS])
@pytest.mark.parametrize("verb", ["get", "scan"])
async def test_readers_leave_the_loop_to_others(url: str, readers: int, verb: str) -> None:
    """A loop that does nothing but read starves no other task.

    A read completes in place, without suspending. Tasks that do nothing but read must still let others have
    their turn: in no turn of the loop may there be more than a fair number of reads.
    """
    reads = 6_400 if verb == "get" else 1_600
    async with limpet.open(url) as store:
        turns = Turns(store)
        await store.put("key", 1)

        async def read() -> None:
            for _ in range(reads // readers):
                if verb == "get":
                    assert await store.get("key") == 1
                else:
                    assert (await store.keys()).keys == ["key"]
                turns.calls += 1

        ticking = asyncio.create_task(turns.run())
        await asyncio.gather(*(read() for _ in range(readers)))
        ticking.cancel()

    # So many in a turn, and one for each reader that was let go on from the turn before.
    assert turns.most_calls <= CALLS + readers
    assert turns.count >= reads // (CALLS + readers)


async def test_writers_leave_the_loop_to_others(url: str) -> None:
    """A loop that does nothing but write starves no other task.

    The memory engine commits in place; that, too, is counted.
    """
    async with limpet.open(url) as store:
        turns = Turns(store)

        async def write(index: int) -> None:
            for number in range(50):
                await store.put(f"key/{index}", number)
                turns.calls += 1

        ticking = asyncio.create_task(turns.run())
        await asyncio.gather(*(write(index) for index in range(TASKS)))
        ticking.cancel()

    assert turns.most_calls <= CALLS + TASKS
    assert turns.count >= TASKS * 50 // (CALLS + TASKS)


@pytest.mark.slow
async def test_writers_are_not_starved_by_readers(url: str) -> None:
    """A loop that does nothing but read starves no other task.

    A read from the cache never lets go of the interpreter, which a commit in another thread needs after each of
    its statements. Unless readers pause, a commit takes a second, and all of these minutes.
    """
    async with limpet.open(url) as store:
        await store.put("key", 0)
        done = False

        async def read() -> None:
            while not done:
                await store.get("key")

        reading = [asyncio.create_task(read()) for _ in range(4)]
        async with asyncio.timeout(PATIENCE_S):
            for number in range(200):
                await store.put("key", number)
        done = True
        await asyncio.gather(*reading)


@pytest.mark.slow
def test_threads_that_write_are_not_starved_by_threads_that_read(url: str) -> None:
    """A loop that does nothing but read starves no other caller, neither in a thread nor on an event loop."""
    done = threading.Event()
    with limpet.sync.open(url) as store:
        store.put("key", 0)

        def read() -> None:
            while not done.is_set():
                store.get("key")

        def write() -> None:
            for number in range(200):
                store.put("key", number)

        readers = [threading.Thread(target=read, daemon=True) for _ in range(3)]
        writing = threading.Thread(target=write, daemon=True)
        for thread in (*readers, writing):
            thread.start()
        writing.join(PATIENCE_S)
        is_starved = writing.is_alive()
        done.set()
        for thread in (*readers, writing):
            thread.join()

    assert not is_starved


# Standing in line -----------------------------------------------------------------


@pytest.mark.slow
async def test_a_thousand_waiters_are_all_served(url: str) -> None:
    """In order, and each of them with three commits: one in vain, one that takes the lock, one that gives it back."""
    waiters, order = 1000, []
    async with limpet.open(url) as store:
        first = await store.lock("job", ttl=600).acquire()
        engine = count(store)

        async def work(number: int) -> None:
            async with store.lock("job", ttl=600, wait=600):
                order.append(number)

        working = [asyncio.create_task(work(number)) for number in range(waiters)]
        await wait_for_queue(store, waiters, "lock", "default", "job")
        await first.release()
        await asyncio.gather(*working)

    assert order == list(range(waiters))
    assert engine.commits <= 4 * waiters + 100


async def test_waiters_that_give_up_at_once_all_get_the_holder(url: str) -> None:
    async with limpet.open(url) as store:
        first = await store.lock("job", ttl=600, holder="first").acquire()

        answers = await asyncio.gather(
            *(store.lock("job", ttl=600, wait=0.05).acquire() for _ in range(200)), return_exceptions=True
        )

        held = [answer for answer in answers if isinstance(answer, LockHeld)]
        assert len(held) == 200
        assert {(each.holder, each.token) for each in held} == {("first", first.token)}
        assert len(session_of(store).turns) == 0


async def test_closing_ends_all_who_wait(url: str) -> None:
    store = await limpet.open(url)
    await store.lock("job", ttl=600).acquire()
    waiting = [asyncio.create_task(store.lock("job", ttl=600, wait=600).acquire()) for _ in range(50)]
    await wait_for_queue(store, 50, "lock", "default", "job")
    await store.close()

    answers = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), PATIENCE_S)

    assert {type(answer) for answer in answers} == {Closed}


def test_closing_ends_all_threads_that_wait(blocking: limpet.sync.Store) -> None:
    blocking.lock("job", ttl=600).acquire()

    def wait(number: int) -> BaseException | None:
        if number == 0:
            asyncio.run(wait_for_queue(blocking, THREADS - 1, "lock", "default", "job"))
            blocking.close()
            return None
        try:
            blocking.lock("job", ttl=600, wait=600).acquire()
        except Closed as closed:
            return closed
        return None

    assert {type(answer) for answer in in_threads(wait)[1:]} == {Closed}


def test_an_error_of_a_body_that_closed_the_store_is_not_hidden(blocking: limpet.sync.Store) -> None:
    def work() -> None:
        with blocking.lock("job", ttl=600):
            blocking.close()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()


def test_a_child_forked_inside_an_update_goes_on(blocking: limpet.sync.Store) -> None:
    """It has the turn of its parent, and the threads that stood behind it are not there."""
    behind: list[threading.Thread] = []
    children: list[int] = []

    def change(found: int | None) -> int:
        if not children:
            for _ in range(2):
                behind.append(threading.Thread(target=blocking.update, args=("k", lambda found: found + 1)))
                behind[-1].start()
            asyncio.run(wait_for_queue(blocking, 3, "update", "default", "k"))
            children.append(os.fork())
            if children[0] == 0:
                blocking.update("other", _plus_one)
                blocking.update("other", _plus_one)
                os._exit(0 if blocking.get("other") == 2 and len(session_of(blocking).turns) == 0 else 1)
        return (found or 0) + 1

    blocking.update("k", change)
    for thread in behind:
        thread.join()
    _, status = os.waitpid(children[0], 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert blocking.get("k") == 3


def test_threads_and_tasks_that_update_one_key_take_turns(url: str) -> None:
    """The stores of one opened engine share their turns, in any thread or task."""
    with limpet.sync.open(url) as blocking:
        engine = count(blocking)
        twin = blocking.namespace("default")
        in_threads(lambda number: [(blocking, twin)[number % 2].update("k", _plus_one) for _ in range(20)])

        assert blocking.get("k") == 20 * THREADS
        assert engine.refused <= 2 * THREADS


def _plus_one(found: int | None) -> int:
    return (found or 0) + 1
