"""The sync API, where it offers more than the same verbs.

Every other test of the suite runs through it as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import os
import random
import signal
import threading
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

import limpet
from limpet import sync
from limpet.conformance.support import count as count_commits
from limpet.conformance.support import session_of
from limpet.errors import Closed, Compacted, Conflict, InvalidKey, LockHeld

pytestmark = pytest.mark.face("sync")

# Less than the hub's polling interval: the contract promises a wake-up, and polling must not hide a missing one.
PATIENCE_S = 28.0
QUIET_S = 0.1
CHILD_S = 300


@pytest.fixture
def namespace() -> str:
    return f"t-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def blocking(url: str, namespace: str) -> Iterator[sync.Store]:
    """A store of the sync API as its users open it, on the host's clock."""
    with sync.open(url, namespace=namespace) as store:
        yield store


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Run the work in so many threads that begin at the same moment."""
    start = threading.Barrier(count)

    def run(number: int) -> Any:
        start.wait()
        return work(number)

    with ThreadPoolExecutor(count) as threads:
        return [each.result(PATIENCE_S) for each in [threads.submit(run, number) for number in range(count)]]


def in_background(work: Callable[[], Any]) -> Future[Any]:
    """Run the work in its own daemon thread, which does not keep the process from ending."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


# The same verbs ---------------------------------------------------------------


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


@pytest.mark.parametrize(
    ("face", "twin"),
    [(getattr(sync, name), getattr(limpet, name)) for name in ("Store", "Record", "Lock", "Election", "Draft")],
    ids=["Store", "Record", "Lock", "Election", "Draft"],
)
def test_no_verb_is_missing(face: type, twin: type) -> None:
    """The same verbs work without await, in any thread."""
    assert public(twin) <= public(face) | {"key"}


@pytest.mark.parametrize("name", sorted(public(limpet.Store) - {"name", "traits"}))
def test_a_verb_takes_the_same_arguments(name: str) -> None:
    """The same verbs work without await, in any thread."""
    ours = inspect.signature(getattr(sync.Store, name)).parameters
    theirs = inspect.signature(getattr(limpet.Store, name)).parameters
    # A thread cannot be cancelled, so the sync API has no `cancel` option for the loss of a lock or a lead.
    expected = [each for each in theirs if (name, each) not in (("lock", "cancel"), ("election", "cancel"))]

    assert list(ours) == expected
    assert [ours[each].default for each in ours] == [theirs[each].default for each in expected]


def test_verbs_answer_without_await(blocking: sync.Store) -> None:
    """The same verbs work without await, in any thread."""
    entry = blocking.put("a", {"b": [1, 2]}, meta={"by": "me"})
    record = blocking.record("r")
    record.set(x=1, y=b"2")

    assert blocking.get("a") == {"b": [1, 2]}
    assert blocking.entry("a") == entry
    assert blocking.add("n", 5) == 5
    assert blocking.keys().keys == ["a", "n", "r"]
    assert [each.key for each in blocking.scan(where=limpet.field("x") == 1)] == ["r"]
    assert [event.op for event in blocking.history("n")] == ["put"]
    assert record.fields() == {"x": 1, "y": b"2"}
    assert record.swap("x", 1, 2)
    changed = blocking.update("n", lambda found: found + 1)
    assert changed is not None
    assert changed.value == 6
    assert blocking.batch().delete("a").take("n").commit().ended[1] is not None
    assert blocking.touch("r", 60) is not None
    assert blocking.status().keys == 1
    assert blocking.take("r") == {"x": 2, "y": b"2"}
    with pytest.raises(Conflict):
        blocking.put("r", 1, expect=limpet.PRESENT)


@pytest.mark.parametrize("on_loop", [False, True])
def test_an_async_function_runs_for_a_caller_that_does_not_await(blocking: sync.Store, on_loop: bool) -> None:
    """`run` runs an async function of the async store, and gives what it returns or raises."""

    async def move(store: limpet.Store) -> list[str]:
        await store.put("a", 1)
        await store.create("b", await store.take("a"))
        return [entry.key async for entry in store.scan()]

    async def wait(store: limpet.Store) -> int:
        async with store.lock("gate", ttl=10) as lock:
            await asyncio.sleep(0.001)
            return (await store.put("c", 1, fence=lock)).version

    assert blocking.run(move, on_loop=on_loop) == ["b"]
    with pytest.raises(Conflict):
        blocking.run(move, on_loop=on_loop)
    assert blocking.run(wait, on_loop=True) == 1


def test_verbs_work_in_threads_that_did_not_open_the_store(blocking: sync.Store) -> None:
    """The same verbs work without await, in any thread."""

    def work(number: int) -> list[str]:
        blocking.put(f"{number}/a", number)
        blocking.record(f"{number}/r").set(x=number)
        with blocking.watch(f"{number}/*") as watch, blocking.lock(f"job-{number}", ttl=60) as lock:
            blocking.add(f"{number}/n", number, fence=lock)
            assert next(watch).value == number
        return [entry.key for entry in blocking.scan(f"{number}/")]

    assert in_threads(8, work) == [[f"{number}/{key}" for key in "anr"] for number in range(8)]


def test_a_store_may_be_opened_and_closed_in_different_threads(url: str, namespace: str) -> None:
    """The same verbs work without await, in any thread."""
    store = in_background(lambda: sync.open(url, namespace=namespace)).result(PATIENCE_S)
    in_background(lambda: store.put("a", 1)).result(PATIENCE_S)
    assert store.get("a") == 1

    in_background(store.close).result(PATIENCE_S)

    with pytest.raises(Closed):
        store.get("a")
    with pytest.raises(Closed):
        next(iter(store.scan()))
    store.close()


def test_a_with_block_closes_the_store(url: str, namespace: str) -> None:
    """The same verbs work without await, in any thread."""
    with sync.open(url, namespace=namespace) as store:
        store.put("a", 1)
        other = store.namespace(f"{namespace}-b")
        other.put("a", 2)

    for each in (store, other):
        with pytest.raises(Closed):
            each.get("a")


def test_closing_in_many_threads_at_once_is_closing(url: str, namespace: str) -> None:
    """The same verbs work without await, in any thread."""
    for _ in range(5):
        store = sync.open(url, namespace=namespace)
        close = store.close
        in_threads(6, lambda _: close())  # noqa: B023 - the threads are done before the next turn
        with pytest.raises(Closed):
            store.put("a", 1)


def test_a_watch_is_an_iterator(blocking: sync.Store) -> None:
    """The same verbs work without await, in any thread."""
    with blocking.watch("a*") as watch:
        reading = in_background(lambda: [next(watch) for _ in range(100)])
        entries = [blocking.put(f"a{number}", number) for number in range(100)]

        events = reading.result(PATIENCE_S)

    assert [event.entry for event in events] == entries


def test_a_watch_begins_when_it_is_made(blocking: sync.Store) -> None:
    """The same verbs work without await, in any thread."""
    blocking.put("before", 1)
    watch = blocking.watch()
    blocking.put("after", 1)

    assert next(watch).key == "after"
    with pytest.raises(Compacted):
        blocking.watch(after="nonsense")
    watch.close()


def test_a_watch_can_be_polled(blocking: sync.Store) -> None:
    """The same verbs work without await, in any thread.

    A poll that times out loses no event: the next one gets it.
    """
    with blocking.watch() as watch:
        assert watch.poll(0.05) is None
        writing = in_background(lambda: [blocking.put(f"a{number}", number).revision for number in range(300)])
        seen: list[int] = []
        while len(seen) < 300:
            event = watch.poll(0.001)
            if event is not None:
                seen.append(event.revision)

        assert seen == writing.result(PATIENCE_S)
        assert watch.poll(0.05) is None


def test_closing_the_store_ends_a_watch_in_another_thread(url: str, namespace: str) -> None:
    """The same verbs work without await, in any thread."""
    store = sync.open(url, namespace=namespace)
    watch = store.watch()
    reading = in_background(lambda: [event.key for event in watch])
    store.put("a", 1)
    with contextlib.suppress(TimeoutError):
        reading.result(QUIET_S)

    store.close()

    assert reading.result(PATIENCE_S) == ["a"]
    assert list(watch) == []
    watch.close()


def test_closing_the_store_never_leaves_a_thread_behind(url: str, namespace: str) -> None:
    """The same verbs work without await, in any thread.

    The thread is in the middle of reading when the store closes, at one moment or another.
    """
    dice = random.Random(3)
    with sync.open(url, namespace=namespace) as writer:
        for start in range(0, 2000, 100):
            draft = writer.batch()
            for number in range(start, start + 100):
                draft.put(f"{number:04}", number)
            draft.commit()
    for _ in range(12):
        store = sync.open(url, namespace=namespace)
        watch = store.watch(after=0)
        reading = in_background(lambda: [event.value for event in watch])  # noqa: B023 - read before the next turn
        with contextlib.suppress(TimeoutError):
            reading.result(dice.random() * 0.05)

        store.close()

        seen = reading.result(5)
        assert seen == list(range(len(seen)))


def test_closing_a_watch_from_another_thread_ends_it(blocking: sync.Store) -> None:
    """The same verbs work without await, in any thread."""
    watch = blocking.watch()
    reading = in_background(lambda: [event.key for event in watch])
    blocking.put("a", 1)
    with contextlib.suppress(TimeoutError):
        reading.result(QUIET_S)

    watch.close()

    assert reading.result(5) == ["a"]
    assert list(watch) == []
    assert watch.poll(0.05) is None


def test_a_lock_may_change_threads(blocking: sync.Store) -> None:
    """The same verbs work without await, in any thread."""
    lock = blocking.lock("job", ttl=60)
    in_background(lock.acquire).result(PATIENCE_S)
    with pytest.raises(LockHeld):
        in_background(blocking.lock("job", ttl=60).acquire).result(PATIENCE_S)

    in_background(lock.release).result(PATIENCE_S)

    assert blocking.locks() == []


def test_a_thread_waits_for_a_lock(blocking: sync.Store) -> None:
    """The same verbs work without await, in any thread."""
    inside: list[int] = []

    def work(number: int) -> int | None:
        with blocking.lock("job", ttl=60, wait=PATIENCE_S) as lock:
            inside.append(number)
            assert inside == [number]
            blocking.add("n", fence=lock)
            inside.remove(number)
            return lock.token

    tokens = in_threads(6, work)

    assert len({*tokens}) == 6
    assert blocking.get("n") == 6


def test_two_stores_of_one_process_see_each_other(blocking: sync.Store, url: str, namespace: str) -> None:
    """The same verbs work without await, in any thread."""
    with sync.open(url, namespace=namespace) as other, other.watch() as watch:
        entry = blocking.put("a", 1)

        assert other.entry("a") == entry
        assert next(watch).entry == entry


async def test_both_faces_share_a_place(blocking: sync.Store, url: str, namespace: str) -> None:
    """The same verbs work without await, in any thread."""
    async with limpet.open(url, namespace=namespace) as store, store.watch() as watch:
        entry = await asyncio.to_thread(blocking.put, "a", 1)

        assert (await asyncio.wait_for(anext(watch), PATIENCE_S)).entry == entry
        await store.put("a", 2)
        assert await asyncio.to_thread(blocking.get, "a") == 2


# Inside a running loop --------------------------------------------------------

CALLS: dict[str, Callable[[sync.Store], Any]] = {
    "get": lambda store: store.get("a"),
    "entry": lambda store: store.entry("a"),
    "keys": lambda store: store.keys(),
    "scan": lambda store: list(store.scan()),
    "history": lambda store: list(store.history("a")),
    "put": lambda store: store.put("a", 2),
    "create": lambda store: store.create("b", 2),
    "update": lambda store: store.update("a", lambda _: 2),
    "add": lambda store: store.add("a"),
    "delete": lambda store: store.delete("a"),
    "take": lambda store: store.take("a"),
    "touch": lambda store: store.touch("a", 5),
    "batch": lambda store: store.batch().put("a", 2).commit(),
    "record": lambda store: store.record("r").set(a=2),
    "mapping": lambda store: store.mapping().update(a=2),
    "locks": lambda store: store.locks(),
    "status": lambda store: store.status(),
    "sweep": lambda store: store.sweep(),
    "acquire": lambda store: store.lock("job", ttl=60).acquire(),
    "watch": lambda store: store.watch(),
}


@pytest.mark.parametrize("call", CALLS)
async def test_inside_a_loop_it_refuses(blocking: sync.Store, call: str) -> None:
    """Called inside a running event loop, the sync API refuses and names what to do instead."""
    entry = await asyncio.to_thread(blocking.put, "a", 1)

    with pytest.raises(RuntimeError, match=r"limpet\.open\(\).*asyncio\.to_thread"):
        CALLS[call](blocking)

    assert [each async for each in in_a_thread(blocking)] == [entry]
    assert await asyncio.to_thread(blocking.locks) == []


async def in_a_thread(store: sync.Store) -> Any:
    for entry in await asyncio.to_thread(lambda: list(store.scan())):
        yield entry


async def test_inside_a_loop_a_with_block_refuses(blocking: sync.Store) -> None:
    """Called inside a running event loop, the sync API refuses and names what to do instead."""
    lock = blocking.lock("job", ttl=60)

    with pytest.raises(RuntimeError, match=r"asyncio\.to_thread"):
        lock.__enter__()

    assert await asyncio.to_thread(blocking.locks) == []


async def test_inside_a_loop_it_does_not_open(url: str, namespace: str) -> None:
    """Called inside a running event loop, the sync API refuses and names what to do instead."""
    before = threading.active_count()

    with pytest.raises(RuntimeError, match=r"limpet\.open\(\).*asyncio\.to_thread"):
        sync.open(url, namespace=namespace)

    assert threading.active_count() == before


async def test_inside_a_loop_a_watch_refuses(blocking: sync.Store) -> None:
    """Called inside a running event loop, the sync API refuses and names what to do instead."""
    watch = await asyncio.to_thread(blocking.watch)
    await asyncio.to_thread(blocking.put, "a", 1)

    with pytest.raises(RuntimeError, match=r"asyncio\.to_thread"):
        next(watch)
    with pytest.raises(RuntimeError, match=r"asyncio\.to_thread"):
        watch.poll(0.01)

    assert (await asyncio.to_thread(next, watch)).key == "a"
    await asyncio.to_thread(watch.close)


async def test_beside_a_loop_it_works(blocking: sync.Store) -> None:
    """Called inside a running event loop, the sync API refuses and names what to do instead.

    The advice of the error works: the same call in another thread.
    """
    with pytest.raises(RuntimeError):
        blocking.put("a", 1)

    await asyncio.to_thread(blocking.put, "a", 1)

    assert await asyncio.to_thread(blocking.get, "a") == 1


# Threads ----------------------------------------------------------------------


def test_adds_of_threads_all_count(blocking: sync.Store) -> None:
    """Threads that write at once lose nothing."""
    numbers = in_threads(8, lambda _: [blocking.add("n") for _ in range(50)])

    assert blocking.get("n") == 400
    assert sorted(number for each in numbers for number in each) == list(range(1, 401))


def test_updates_of_threads_all_count(blocking: sync.Store) -> None:
    """Threads that write at once lose nothing."""

    def work(number: int) -> None:
        for turn in range(10):
            addition = [[number, turn]]
            blocking.update("list", lambda found: (found or []) + addition)  # noqa: B023 - called before the next turn

    in_threads(4, work)

    assert sorted(blocking.get("list")) == [[number, turn] for number in range(4) for turn in range(10)]


def test_threads_that_update_one_key_all_succeed(blocking: sync.Store) -> None:
    """However many callers of one opened store update the same key at once, every update succeeds."""
    engine = count_commits(blocking)

    in_threads(16, lambda _: [blocking.update("n", lambda found: (found or 0) + 1) for _ in range(12)])

    assert blocking.get("n") == 192
    assert engine.refused <= 19


def test_an_update_inside_an_update_of_the_same_key_does_not_wait_for_it(blocking: sync.Store) -> None:
    """The function of `update` may itself update the same key, or wait for another caller that does."""
    calls: list[object] = []

    def outer(found: int | None) -> int:
        calls.append(found)
        if len(calls) == 1:
            blocking.update("n", lambda found: (found or 0) + 1)
        return (found or 0) + 10

    blocking.update("n", outer)

    assert calls == [None, 1]
    assert blocking.get("n") == 11


def test_the_function_of_an_update_may_wait_for_another_thread(blocking: sync.Store) -> None:
    """The function of `update` may itself update the same key, or wait for another caller that does."""
    calls: list[object] = []

    def outer(found: int | None) -> int:
        calls.append(found)
        if len(calls) == 1:
            in_threads(1, lambda _: blocking.update("n", lambda found: (found or 0) + 1))
        return (found or 0) + 10

    in_threads(1, lambda _: blocking.update("n", outer))

    assert blocking.get("n") == 11


def test_a_function_that_takes_long_holds_up_no_other_thread(blocking: sync.Store) -> None:
    """A function that is given to a verb runs in the thread that called the verb, and delays no other."""
    began, go_on = threading.Event(), threading.Event()
    threads: list[int] = []

    def slowly(found: object) -> str:
        threads.append(threading.get_ident())
        began.set()
        assert go_on.wait(PATIENCE_S)
        return "late"

    def work(number: int) -> None:
        if number == 0:
            blocking.update("slow", slowly)
            assert threads == [threading.get_ident()]
            return
        assert began.wait(PATIENCE_S)
        blocking.put("quick", 1)
        with blocking.lock("job", ttl=60):
            assert blocking.get("quick") == 1
        go_on.set()

    in_threads(2, work)

    assert blocking.get("slow") == "late"


def test_threads_that_wait_for_a_lock_get_it_in_order(blocking: sync.Store) -> None:
    """Callers of one opened store that wait for a lock get it in the order they came."""
    first = blocking.lock("job", ttl=60).acquire()
    order: list[int] = []

    def wait_for_queue(callers: int) -> None:
        give_up = time.monotonic() + PATIENCE_S
        while session_of(blocking).turns.waiting(("lock", blocking.name, "job")) != callers:
            assert time.monotonic() < give_up
            time.sleep(0.001)

    def work(number: int) -> None:
        wait_for_queue(number)
        with blocking.lock("job", ttl=60, wait=60):
            order.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    wait_for_queue(6)
    first.release()
    for thread in threads:
        thread.join()

    assert order == list(range(6))


def test_puts_of_threads_are_all_there(blocking: sync.Store) -> None:
    """Threads that write at once lose nothing."""

    def work(number: int) -> list[limpet.Entry]:
        return [blocking.put(f"{number}/{turn:02}", [number, turn]) for turn in range(50)]

    entries = [entry for each in in_threads(8, work) for entry in each]

    assert sorted(blocking.scan(), key=lambda entry: entry.revision) == sorted(
        entries, key=lambda entry: entry.revision
    )
    assert len({entry.revision for entry in entries}) == 400


def test_batches_of_threads_stay_whole(blocking: sync.Store) -> None:
    """Threads that write at once lose nothing.

    Each batch moves something from one account to another; a reader in between sees no half of it.
    """
    blocking.batch().put("a", 1000).put("b", 0).commit()
    seen: list[int] = []

    def work(number: int) -> None:
        if number == 0:
            for _ in range(100):
                seen.append(sum(entry.value for entry in blocking.scan()))
        else:
            for _ in range(30):
                blocking.batch().add("a", -number).add("b", number).commit()

    in_threads(5, work)

    assert {*seen} == {1000}
    assert (blocking.get("a"), blocking.get("b")) == (700, 300)


def test_of_threads_that_create_one_wins(blocking: sync.Store) -> None:
    """Threads that write at once lose nothing."""

    def work(number: int) -> int | None:
        try:
            blocking.create("a", number)
        except Conflict:
            return None
        return number

    winners = [number for number in in_threads(8, work) if number is not None]

    assert winners == [blocking.get("a")]


def test_threads_of_two_stores_lose_nothing(url: str, namespace: str) -> None:
    """Threads that write at once lose nothing."""
    with sync.open(url, namespace=namespace) as first, sync.open(url, namespace=namespace) as second:
        in_threads(6, lambda number: [(first, second)[number % 2].add("n") for _ in range(40)])

        assert first.get("n") == second.get("n") == 240


def test_closing_while_threads_write_loses_nothing_acknowledged(url: str, namespace: str) -> None:
    """Threads that write at once lose nothing.

    What was acknowledged before the store closed is there when it is opened again.
    """
    store = sync.open(url, namespace=namespace)
    begun = threading.Barrier(5)
    with sync.open(url, namespace=namespace) as again:

        def work(number: int) -> int:
            begun.wait()
            for done in range(100_000):
                try:
                    store.put(f"{number}/{done:06}", done)
                except Closed:
                    return done
            return -1

        writing = [in_background(functools.partial(work, number)) for number in range(4)]
        begun.wait()
        with contextlib.suppress(TimeoutError):
            writing[0].result(QUIET_S)
        store.close()
        done = [each.result(PATIENCE_S) for each in writing]

        assert min(done) >= 0
        assert [sum(1 for _ in again.scan(f"{number}/")) for number in range(4)] == done


# The dict ---------------------------------------------------------------------


def test_a_mapping_is_a_dict_of_the_keys_under_a_prefix(blocking: sync.Store) -> None:
    """The sync API offers a dict of the keys under a prefix."""
    blocking.put("config", 0)
    blocking.put("config0", 0)
    config = blocking.mapping("config/")

    config["theme"] = "dark"
    config["size"] = {"w": 1}

    assert isinstance(config, MutableMapping)
    assert dict(config) == {"size": {"w": 1}, "theme": "dark"}
    assert list(config) == ["size", "theme"]
    assert len(config) == 2
    assert config == {"theme": "dark", "size": {"w": 1}}
    assert blocking.get("config/theme") == "dark"
    assert blocking.keys().keys == ["config", "config/size", "config/theme", "config0"]


def test_a_mapping_without_a_prefix_has_all_keys(blocking: sync.Store) -> None:
    """The sync API offers a dict of the keys under a prefix."""
    blocking.put("a", 1)
    blocking.put("b/c", 2)

    assert dict(blocking.mapping()) == {"a": 1, "b/c": 2}


def test_a_mapping_tells_missing_keys(blocking: sync.Store) -> None:
    """The sync API offers a dict of the keys under a prefix."""
    mapping = blocking.mapping("p/")
    mapping["none"] = None

    with pytest.raises(KeyError, match="missing"):
        mapping["missing"]
    with pytest.raises(KeyError, match="missing"):
        del mapping["missing"]
    with pytest.raises(KeyError, match="missing"):
        mapping.pop("missing")
    assert mapping.pop("missing", 7) == 7
    assert mapping.get("missing") is None
    assert "missing" not in mapping
    assert not mapping.__contains__(17)
    assert mapping["none"] is None
    assert "none" in mapping
    assert mapping.setdefault("none", 5) is None
    assert mapping.pop("none", 5) is None
    assert "none" not in mapping
    with pytest.raises(KeyError):
        mapping.popitem()


def test_a_mapping_refuses_what_is_no_key(blocking: sync.Store) -> None:
    """The sync API offers a dict of the keys under a prefix."""
    mapping = blocking.mapping("p/")

    for key in ("a\0b", "a" * 1025):
        with pytest.raises(InvalidKey):
            mapping[key] = 1
    mapping[""] = "the prefix itself"

    assert dict(mapping) == {"": "the prefix itself"}
    assert blocking.get("p/") == "the prefix itself"


def test_a_mapping_gives_values_and_not_references(blocking: sync.Store) -> None:
    """The sync API offers a dict of the keys under a prefix."""
    mapping = blocking.mapping()
    mapping["a"] = [1]

    mapping["a"].append(2)

    assert mapping["a"] == [1]


def test_a_mapping_iterates_over_many_keys(blocking: sync.Store) -> None:
    """The sync API offers a dict of the keys under a prefix."""
    expected = {}
    for start in range(0, 2300, 100):
        draft = blocking.batch()
        for number in range(start, start + 100):
            draft.put(f"p/{number:05}", number)
            expected[f"{number:05}"] = number
        draft.commit()
    blocking.put("q", "other")
    mapping = blocking.mapping("p/")

    assert len(mapping) == 2300
    assert list(mapping) == sorted(expected)
    assert dict(mapping.items()) == expected
    assert sum(mapping.values()) == sum(expected.values())


def test_a_mapping_may_change_while_it_is_read(blocking: sync.Store) -> None:
    """The sync API offers a dict of the keys under a prefix."""
    mapping = blocking.mapping("p/")
    mapping.update({f"{number:02}": number for number in range(20)})

    for key in mapping:
        del mapping[key]

    assert dict(mapping) == {}


def test_of_threads_that_pop_one_gets_the_value(blocking: sync.Store) -> None:
    """The sync API offers a dict of the keys under a prefix."""
    mapping = blocking.mapping("jobs/")
    for turn in range(10):
        mapping["job"] = turn

        answers = in_threads(6, lambda _: mapping.pop("job", None))

        assert [answer for answer in answers if answer is not None] == [turn]


def test_of_threads_that_set_a_default_one_wins(blocking: sync.Store) -> None:
    """The sync API offers a dict of the keys under a prefix."""
    mapping = blocking.mapping("jobs/")

    answers = in_threads(8, lambda number: mapping.setdefault("owner", number))

    assert {*answers} == {mapping["owner"]}


@pytest.mark.parametrize("seed", range(4))
def test_a_mapping_does_what_a_dict_does(blocking: sync.Store, seed: int) -> None:
    """The sync API offers a dict of the keys under a prefix.

    Both get the same hundreds of random calls and must give the same answers.
    """
    dice = random.Random(seed)
    mapping, model = blocking.mapping("p*/%_"), dict[str, Any]()
    keys = ["a", "A", "b", "", "é", "a/b", "*", "\U0010ffff"]
    values: list[Any] = [None, True, 0, 1, 1.5, "text", b"raw", [1, [2]], {"x": {}}]

    def calls(key: str, value: Any) -> dict[str, Callable[[Any], Any]]:
        return {
            "set": lambda it: it.__setitem__(key, value),
            "set again": lambda it: it.__setitem__(key, value),
            "get": lambda it: it[key],
            "get or": lambda it: it.get(key, "default"),
            "del": lambda it: it.__delitem__(key),
            "in": lambda it: key in it,
            "pop": lambda it: it.pop(key),
            "pop or": lambda it: it.pop(key, "default"),
            "setdefault": lambda it: it.setdefault(key, value),
            "update": lambda it: it.update({key: value, "b": 2}),
            "update by name": lambda it: it.update(a=value),
            "len": len,
            "bool": bool,
            "clear": lambda it: it.clear() if dice_roll < 0.1 else None,
            "keys": lambda it: sorted(it.keys()),
            "items": lambda it: sorted(it.items(), key=lambda item: item[0]),
        }

    def answer(call: Callable[[Any], Any], it: Any) -> Any:
        try:
            return call(it)
        except KeyError as error:
            return ("KeyError", error.args)

    for _ in range(300):
        dice_roll = dice.random()
        name, call = dice.choice(list(calls(dice.choice(keys), dice.choice(values)).items()))
        assert answer(call, mapping) == answer(call, model), name
        assert dict(mapping) == model, name


# Forks ------------------------------------------------------------------------


def fork_child(work: Callable[[], object]) -> Callable[[], int]:
    """Fork and run the work in the child. Returns a function that waits for its exit code."""
    with warnings.catch_warnings():
        # Newer Pythons warn of a fork in a process that has threads, which this tests on purpose.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = 1
        try:
            # A child that hangs is ended by the system.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(CHILD_S)
            work()
            code = 0
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(code)
    return lambda: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_child(work: Callable[[], object]) -> int:
    """Fork, run the work in the child and return its exit code."""
    return fork_child(work)()


def is_shared(store: sync.Store) -> bool:
    """Whether another process sees the writes of this one. A fork copies the memory engine."""
    return store.traits.durability != "none"


def test_a_child_goes_on_after_a_fork(blocking: sync.Store) -> None:
    """A child after a fork goes on with its own connections."""
    blocking.put("a", 1)

    def work() -> None:
        assert blocking.get("a") == 1
        blocking.put("b", 2)
        assert blocking.add("a", 5) == 6
        assert [entry.value for entry in blocking.scan()] == [6, 2]
        assert blocking.batch().put("c", 3).delete("b").put("d", 4).commit().entries[0] is not None

    assert in_child(work) == 0

    assert dict(blocking.mapping()) == ({"a": 6, "c": 3, "d": 4} if is_shared(blocking) else {"a": 1})
    assert blocking.add("a", 100) == (106 if is_shared(blocking) else 101)


def test_a_child_watches_and_locks(blocking: sync.Store) -> None:
    """A child after a fork goes on with its own connections.

    Watches and locks live on a loop in a thread, and threads do not survive a fork.
    """
    watch = blocking.watch()
    with blocking.lock("parent", ttl=60):

        def work() -> None:
            with blocking.watch("child") as own, blocking.lock("child", ttl=60) as lock:
                entry = blocking.put("child", 1, fence=lock)
                assert next(own).entry == entry
                assert [found.name for found in blocking.locks()] == ["child", "parent"]
                with pytest.raises(LockHeld):
                    blocking.lock("parent", ttl=60).acquire()

        assert in_child(work) == 0
        assert [found.name for found in blocking.locks()] == ["parent"]
    blocking.put("parent", 2)

    assert [next(watch).key for _ in range(1 + is_shared(blocking))][-1] == "parent"
    watch.close()


def test_a_child_that_closes_its_store_leaves_the_parents(blocking: sync.Store) -> None:
    """A child after a fork goes on with its own connections."""
    blocking.put("a", 1)
    watch = blocking.watch()

    def work() -> None:
        blocking.put("b", 2)
        blocking.close()
        with pytest.raises(Closed):
            blocking.get("a")

    assert in_child(work) == 0

    entry = blocking.put("c", 3)
    assert blocking.get("a") == 1
    assert [next(watch) for _ in range(1 + is_shared(blocking))][-1].entry == entry
    watch.close()


def test_a_child_of_a_writing_parent_goes_on(blocking: sync.Store) -> None:
    """A child after a fork goes on with its own connections.

    Other threads of the parent are writing and watching, and the locks of Python that they hold at
    that moment must not stay locked in the child.
    """
    over = threading.Event()
    watch = blocking.watch("parent/*")

    def write(number: int) -> int:
        done = 0
        while not over.wait(0.001):
            done = blocking.add(f"parent/{number}")
        return done

    def read() -> list[limpet.Event]:
        events = [next(watch)]
        while events[-1].key != "parent/end":
            events.append(next(watch))
        return events

    def work() -> None:
        for _ in range(5):
            blocking.add("children")
        with blocking.watch("children") as own:
            blocking.add("children")
            next(own)

    writing = [in_background(functools.partial(write, number)) for number in range(3)]
    reading = in_background(read)
    try:
        for _ in range(8):
            assert in_child(work) == 0
    finally:
        over.set()
    done = [each.result(PATIENCE_S) for each in writing]
    blocking.put("parent/end", 1)

    assert [blocking.get(f"parent/{number}") for number in range(3)] == done
    events = reading.result(PATIENCE_S)
    for number, count in enumerate(done):
        key = f"parent/{number}"
        delivered = [(event.op, event.key, event.value) for event in events if event.key == key]
        assert delivered == [("put", key, value) for value in range(1, count + 1)]
    assert [event.revision for event in events] == sorted({event.revision for event in events})
    assert blocking.get("children") == (48 if is_shared(blocking) else None)


def test_a_child_outlives_the_store_of_its_parent(url: str, namespace: str) -> None:
    """A child after a fork goes on with its own connections.

    The parent closes its store and the child goes on writing. Every write of the child that was acknowledged is there.
    """
    store = sync.open(url, namespace=namespace)
    store.put("parent", 1)
    (from_parent, to_child), (from_child, to_parent) = os.pipe(), os.pipe()
    shared = is_shared(store)

    def work() -> None:
        store.put("before", 1)
        os.write(to_parent, b"1")
        os.read(from_parent, 1)
        store.put("after", 1)
        assert store.get("after") == 1
        os.write(to_parent, b"2")
        os.read(from_parent, 1)

    waiting = fork_child(work)
    os.read(from_child, 1)
    store.close()
    os.write(to_child, b"1")
    # Wait for the last output of the child, or for the end of the pipe.
    os.close(to_parent)
    os.read(from_child, 1)
    with sync.open(url, namespace=namespace) as again:
        meanwhile = [*again.mapping()]
        os.write(to_child, b"2")
        code = waiting()
        afterwards = [*again.mapping()]
    for end in (from_parent, to_child, from_child):
        os.close(end)

    assert meanwhile == afterwards == (["after", "before", "parent"] if shared else ["parent"])
    assert code == 0


def test_a_child_may_open_a_store_of_its_own(blocking: sync.Store, url: str, namespace: str) -> None:
    """A child after a fork goes on with its own connections."""
    blocking.put("a", 1)

    def work() -> None:
        with sync.open(url, namespace=namespace) as own:
            assert own.get("a") == 1
            own.put("b", 2)
            assert blocking.get("b") == 2

    assert in_child(work) == 0

    assert blocking.get("b") == (2 if is_shared(blocking) else None)


def test_a_child_of_a_child_goes_on(blocking: sync.Store) -> None:
    """A child after a fork goes on with its own connections."""
    blocking.add("n")

    def work() -> None:
        blocking.add("n")
        assert in_child(lambda: blocking.add("n")) == 0
        blocking.add("n")

    assert in_child(work) == 0

    assert blocking.add("n") == (5 if is_shared(blocking) else 2)


def test_a_child_makes_request_ids_of_its_own(blocking: sync.Store) -> None:
    """A child after a fork goes on with its own connections.

    If parent and child made the same request id, a write of one would count as a retry of the other's.
    """
    blocking.put("a", 1)
    reader, writer = os.pipe()

    def work() -> None:
        blocking.put("a", 2)
        os.write(writer, (limpet.new_request_id() + "\n").encode())

    for _ in range(3):
        assert in_child(work) == 0
    os.close(writer)
    blocking.put("a", 2)
    with open(reader) as lines:
        children = lines.read().split()

    assert len({*children, limpet.new_request_id()}) == 4
