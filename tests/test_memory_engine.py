"""What is particular to the memory engine: shared places, orders kept beside the map, bounds, forks."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

import limpet
import limpet.sync
from limpet.engines import memory
from limpet.engines.memory import MemoryEngine
from limpet.errors import Closed, InvalidValue
from limpet.keys import Span, prefix_span
from limpet.model import Batch, Commit, Delete, Expire, Put, Touch, Window, Write
from limpet.opening import open_engine
from tests.processes import PATIENCE_S
from tests.sqlite.support import Process, VanishingLoop, in_place

EVERYTHING = prefix_span("")


@pytest.fixture
def clock() -> limpet.ManualClock:
    return limpet.ManualClock()


@pytest.fixture
async def engine(clock: limpet.ManualClock) -> AsyncIterator[MemoryEngine]:
    opened = await open_engine("memory:", clock)
    assert isinstance(opened, MemoryEngine)
    yield opened
    await opened.close()


_numbers = iter(range(1_000_000_000))


async def commit(engine: MemoryEngine, *writes: Write) -> Commit:
    outcome = await engine.commit("default", Batch((), writes, f"request-{next(_numbers)}"))
    assert isinstance(outcome, Commit)
    return outcome


# Places ---------------------------------------------------------------------------


async def test_a_memory_without_a_name_is_private() -> None:
    """`traits` describes the engine: its name, its durability, whose clock it uses."""
    async with limpet.open("memory:") as one, limpet.open("memory:") as other:
        await one.put("key", 1)

        assert await other.get("key") is None
        assert (one.traits.engine, one.traits.durability) == ("memory", "none")
        assert (await one.status()).store_id != (await other.status()).store_id


async def test_a_memory_with_a_name_is_shared_and_lives_with_the_process() -> None:
    """Two stores opened on the same storage see each other's writes."""
    url = f"memory:{uuid.uuid4().hex}"
    async with limpet.open(url) as one, limpet.open(url) as other:
        await one.put("key", 1)
        assert await other.get("key") == 1
        await one.close()
        # One handle is closed, not the place.
        assert await other.get("key") == 1
    async with limpet.open(url) as again:
        assert await again.get("key") == 1


def test_many_threads_that_open_a_name_at_once_get_one_place() -> None:
    """Two stores opened on the same storage see each other's writes."""
    for _ in range(20):
        url = f"memory:{uuid.uuid4().hex}"
        start = threading.Barrier(6)

        def add(url: str = url, start: threading.Barrier = start) -> None:
            start.wait(PATIENCE_S)
            with limpet.sync.open(url, sweep=False) as store:
                store.add("hits")

        threads = [threading.Thread(target=add) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        with limpet.sync.open(url, sweep=False) as store:
            assert store.get("hits") == 6


async def test_revisions_are_dense_unless_they_are_to_skip() -> None:
    """Revisions may skip numbers; do not count on consecutive ones."""
    async with limpet.open("memory:") as store:
        assert [(await store.put("key", n)).revision for n in range(20)] == [*range(1, 21)]
    async with limpet.open("memory:?skip_revisions=yes") as store:
        skipping = [(await store.put("key", n)).revision for n in range(50)]
        assert skipping == sorted(set(skipping))
        assert skipping[-1] > 50


@pytest.mark.parametrize("option", ["?skip=yes", "?skip_revisions=maybe", "?skip_revisions=", "?password=x"])
async def test_an_option_that_would_do_nothing_is_refused(option: str) -> None:
    """An unknown option in the URL is refused, not ignored."""
    with pytest.raises(InvalidValue, match="skip_revisions"):
        await limpet.open(f"memory:{option}")


# The order of the keys, and what is due ----------------------------------------------


@pytest.mark.parametrize("seed", range(5))
async def test_the_order_of_keys_survives_any_coming_and_going(engine: MemoryEngine, seed: int) -> None:
    """Order is code-point order of the keys.

    The engine keeps the order apart from the map and sorts when the order is read. Keys come, go and come back between
    looks, in small numbers and in large.
    """
    dice = random.Random(seed)
    expected: set[str] = set()
    for _ in range(120):
        for _ in range(dice.choice((0, 1, 3, 40, 100))):
            key = f"{dice.choice('aBé~')}{dice.randrange(60)}"
            if dice.random() < 0.6:
                await commit(engine, Put(key, b"1"))
                expected.add(key)
            else:
                await commit(engine, Delete(key))
                expected.discard(key)
        start, stop = sorted((dice.choice("AaBbé~"), dice.choice("AaBbé~")))
        span = dice.choice((EVERYTHING, Span(start, stop), Span(start, None)))
        found = [entry.key for entry in (await engine.scan("default", span, limit=10_000)).entries]
        assert found == sorted(key for key in expected if key in span)
        status = await engine.status("default")
        assert status.keys == len(expected)
        assert status.size_bytes == sum(len(key.encode()) + 1 for key in expected)


async def test_keys_that_are_gone_do_not_pile_up(engine: MemoryEngine) -> None:
    """Every queue, buffer, page and loop has a bound: names that are never used again must not stay for ever."""
    for number in range(2_000):
        await commit(engine, Put(f"job/{number}", b"1"))
        assert len((await engine.scan("default", EVERYTHING)).entries) == 1
        await commit(engine, Delete(f"job/{number}"))

    order = engine._memory.state("default").sorted_keys["data"]
    assert len(order._sorted) + len(order._fresh) < 500


async def test_writers_without_a_scan_do_not_pile_up_names(engine: MemoryEngine) -> None:
    """Every queue, buffer, page and loop has a bound, even when the order is never read."""
    for number in range(2_000):
        await commit(engine, Put(f"job/{number}", b"1"))
        await commit(engine, Delete(f"job/{number}"))

    await engine.trim("default", Window())

    order = engine._memory.state("default").sorted_keys["data"]
    assert len(order._sorted) + len(order._fresh) < 500


async def test_moments_that_are_over_do_not_pile_up(engine: MemoryEngine, clock: limpet.ManualClock) -> None:
    """An entry that was written again is not swept at its old expiry time.

    A key that is touched again and again leaves its old moments behind; trimming forgets them.
    """
    await commit(engine, Put("key", b"1", ttl_ms=1_000_000))
    for _ in range(1_000):
        await commit(engine, Touch("key", 1_000_000))

    await engine.trim("default", Window())

    assert len(engine._memory.state("default").expiries) < 100
    clock.advance(1_000)
    assert [expire.key for expire in await engine.due("default")] == ["key"]


async def test_what_is_due_is_listed_again_and_in_parts(engine: MemoryEngine, clock: limpet.ManualClock) -> None:
    """Listing them changes nothing; two callers get the same list."""
    revisions = [(await commit(engine, Put(f"key/{n}", b"1", ttl_ms=1_000 + n))).revision for n in range(10)]
    await commit(engine, Put("key/3", b"2", ttl_ms=60_000))
    await commit(engine, Put("key/4", b"2"))
    clock.advance(1.006)

    expected = [Expire(f"key/{n}", revisions[n]) for n in (0, 1, 2, 5, 6)]
    assert await engine.due("default") == expected
    assert await engine.due("default", limit=3) == expected[:3]
    assert await engine.due("default") == expected
    await commit(engine, *expected)
    assert await engine.due("default") == []


# Threads --------------------------------------------------------------------------


def test_readers_in_threads_see_whole_batches() -> None:
    """Several keys in one read come from one moment.

    Writers change two keys together while others read both, scan both, and follow the log.
    """
    with limpet.sync.open("memory:", sweep=False) as store:
        engine: Any = store._twin._session.engine
        store.batch().put("left", 0).put("right", 0).commit()
        stop = threading.Event()
        torn: list[Any] = []

        def write(first: int) -> None:
            for number in range(first, first + 3_000):
                store.batch().put("left", number).put("right", number).commit()

        def read() -> None:
            head = 0
            while not stop.is_set():
                both = in_place(engine.read("default", ["left", "right"]))
                scanned = in_place(engine.scan("default", EVERYTHING)).entries
                feed = in_place(engine.changes("default", head))
                revisions = [change.revision for change in feed.changes]
                if revisions != sorted(set(revisions)) or (revisions and revisions[0] <= head):
                    torn.append(revisions)
                # A commit is never seen by halves: its last change is always among what can be read.
                if feed.changes and feed.changes[-1].commit > feed.next_after and len(feed.changes) < 500:
                    torn.append(feed.next_after)
                head = feed.next_after
                for one, other in (both, scanned):
                    if one.value != other.value:
                        torn.append((one, other))

        threads = [threading.Thread(target=read) for _ in range(2)]
        threads += [threading.Thread(target=write, args=(first,)) for first in (0, 10_000)]
        for thread in threads:
            thread.start()
        for thread in threads[2:]:
            thread.join(PATIENCE_S)
        stop.set()
        for thread in threads[:2]:
            thread.join(PATIENCE_S)

        assert torn == []


def test_a_watcher_whose_loop_vanished_does_not_fail_a_commit() -> None:
    """A slow watcher misses nothing and delays no other.

    The watcher's loop is closed just when a commit, which has been applied already, wakes it.
    """

    engine = asyncio.run(open_engine("memory:", limpet.ManualClock()))
    loop = VanishingLoop()
    task = loop.leave(engine.changes("default", 0, wait_s=60.0))

    outcome = in_place(engine.commit("default", Batch((), (Put("key", b"1"),), "id")))

    assert isinstance(outcome, Commit)
    assert loop.is_closed()
    del task


async def test_a_close_between_reading_and_waiting_ends_the_wait(engine: MemoryEngine) -> None:
    """Callers that wait for changes are woken and get Closed.

    Another thread closes the engine after the log was read and before the wait.
    """
    wakeup: Any = engine._memory.wakeup
    wait = wakeup.wait

    async def late_wait(*args: Any) -> None:
        closing = threading.Thread(target=lambda: asyncio.run(engine.close()))
        closing.start()
        closing.join(PATIENCE_S)
        await wait(*args)

    wakeup.wait = late_wait

    with pytest.raises(Closed):
        await asyncio.wait_for(engine.changes("default", 0, wait_s=60.0), 60)


# Forks ----------------------------------------------------------------------------


def test_a_fork_copies_a_memory_whole() -> None:
    """A child after a fork goes on with its own connections.

    Threads add to two counters together while the process forks; every child finds them equal, can write to its
    copy, and leaves the parent's alone.
    """
    with Process("forks_a_memory", "") as process:
        results, left, right = process.receive()

    assert len(results) == 20
    for its_left, its_right, added, keys in results:
        assert its_left == its_right
        assert added == (its_left or 0) + 1_000_000
        assert keys == (["left", "right"] if its_left else ["left"])
    assert left == right
    assert left < 1_000_000


def test_a_place_that_is_made_during_a_fork_blocks_no_one() -> None:
    """A fork holds the locks of all places. One that another thread makes meanwhile was not held, and must not be
    let go, or the locks behind it would never be.
    """
    clock = limpet.ManualClock()
    places = [memory._Memory(clock, skips=False) for _ in range(5)]
    made: list[memory._Memory] = []

    class Lock:
        """A place's lock, whose holder finds that another thread has made a place."""

        def __init__(self) -> None:
            self._lock = threading.RLock()

        def acquire(self) -> bool:
            made.extend(memory._Memory(clock, skips=False) for _ in range(20))
            return self._lock.acquire()

        def release(self) -> None:
            self._lock.release()

    real, places[2].lock = places[2].lock, Lock()  # type: ignore[assignment]
    memory._before_fork()
    with contextlib.suppress(RuntimeError):
        memory._after_fork_in_parent()
    places[2].lock = real

    free: list[bool] = []

    def try_all() -> None:
        for place in [places[0], places[1], places[3], places[4]]:
            free.append(place.lock.acquire(timeout=0.2))

    trying = threading.Thread(target=try_all)
    trying.start()
    trying.join(PATIENCE_S)
    assert free == [True] * 4
    assert len(made) == 20


async def test_a_superseded_mark_is_dropped_after_an_hour(engine: MemoryEngine, clock: limpet.ManualClock) -> None:
    again = Batch((), (Put("a", b"1"),), "mine", retry_since=0)
    await engine.commit("default", again)
    space = engine._state("default")

    clock.advance(3599)
    await engine.trim("default", Window())
    assert list(space.map["superseded"]) == ["mine"]
    clock.advance(1)
    await engine.trim("default", Window())

    assert not space.map["superseded"]


async def test_a_count_looks_only_at_entries_that_have_expired(
    engine: MemoryEngine, clock: limpet.ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at all that will expire, and not at the others."""
    for number in range(100):
        await engine.commit("default", Batch((), (Put(f"{number:02}", b"1", 1000 * (number + 1)),)))
    state, looked = engine._memory.state("default"), 0
    is_current = type(state)._is_current

    def count(*arguments: Any) -> bool:
        nonlocal looked
        looked += 1
        return is_current(*arguments)

    monkeypatch.setattr(type(state), "_is_current", count)
    clock.advance(5.5)

    assert await engine.count("default", EVERYTHING) == 95
    assert looked == 5
    assert await engine.count("default", Span("03", "50")) == 45
