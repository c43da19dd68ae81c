"""The storages for limits."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import limits.aio.strategies
import limits.storage
import limits.strategies
import pytest
from limits import RateLimitItem, RateLimitItemPerHour, RateLimitItemPerSecond
from limits.errors import StorageError
from limits.storage import storage_from_string

import limpet
from limpet.adapters.limits import AsyncStorage, Storage
from tests.engines import unique

STRATEGIES = ["fixed-window", "moving-window", "sliding-window-counter"]


def strategy(name: str, storage: limits.storage.Storage) -> limits.strategies.RateLimiter:
    made: Any = limits.strategies.STRATEGIES[name]
    limiter: limits.strategies.RateLimiter = made(storage)
    return limiter


@pytest.fixture
def storage(url: str) -> Iterator[Storage]:
    """A storage on an engine."""
    opened = Storage(url, namespace=unique())
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def begin_of_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    """No window ends while a test counts hits by the hour."""
    began, now = time.time(), time.time
    hour = began // 3600 * 3600 + 60
    monkeypatch.setattr("limpet.adapters.limits.time.time", lambda: hour + now() - began)


@pytest.mark.parametrize("name", STRATEGIES)
def test_of_many_threads_as_many_pass_as_the_limit_says(url: str, name: str) -> None:
    """Through two stores, which have nothing in common but the engine, like two processes."""
    namespace, limit, passed = unique(), RateLimitItemPerHour(5), list[bool]()
    storages = [Storage(url, namespace=namespace) for _ in range(2)]

    def hit(storage: Storage) -> None:
        passed.append(strategy(name, storage).hit(limit, "ann"))

    threads = [threading.Thread(target=hit, args=(storages[number % 2],)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for storage in storages:
        storage.close()

    assert sorted(passed) == [False] * 15 + [True] * 5


@pytest.mark.parametrize("name", STRATEGIES)
async def test_of_many_tasks_as_many_pass_as_the_limit_says(url: str, name: str) -> None:
    storage, limit = AsyncStorage(url, namespace=unique()), RateLimitItemPerHour(5)
    limiter = limits.aio.strategies.STRATEGIES[name](storage)  # type: ignore[abstract]

    passed = await asyncio.gather(*(limiter.hit(limit, "ann") for _ in range(50)))

    assert sum(passed) == 5
    assert (await limiter.get_window_stats(limit, "ann")).remaining == 0
    assert not await limiter.test(limit, "ann")
    await limiter.clear(limit, "ann")
    assert await limiter.hit(limit, "ann")
    await storage.close()


def test_it_answers_as_the_storage_of_the_library_does(storage: Storage) -> None:
    """The same random calls of all strategies, one after the other, to both."""
    dice, theirs = random.Random(5), limits.storage.MemoryStorage()
    items: list[RateLimitItem] = [RateLimitItemPerHour(4), RateLimitItemPerHour(20, 2)]
    for step in range(120):
        name, call = dice.choice(STRATEGIES), dice.choice(["hit", "hit", "hit", "test", "get_window_stats", "clear"])
        if call == "clear" and dice.random() < 0.6:
            continue
        item, who = dice.choice(items), dice.choice(["ann", "b/o/b", "\0"])
        options = {"cost": dice.choice([1, 1, 2, 5])} if call in ("hit", "test") else {}
        mine, reference = (getattr(strategy(name, each), call)(item, who, *[], **options) for each in (storage, theirs))
        if call == "get_window_stats":
            assert mine.remaining == reference.remaining, (step, name)
            assert abs(mine.reset_time - reference.reset_time) < 3600, (step, name)
        else:
            assert mine == reference, (step, name, call)
    theirs.timer.cancel()


def test_hits_are_forgotten_when_their_window_is_over() -> None:
    storage = Storage("memory:")
    limit, limiters = RateLimitItemPerSecond(2), [strategy(name, storage) for name in STRATEGIES]
    assert all(limiter.hit(limit, "ann", cost=2) for limiter in limiters)
    assert not any(limiter.hit(limit, "ann") for limiter in limiters)
    fixed = limiters[0].get_window_stats(limit, "ann")
    assert fixed.remaining == 0
    assert fixed.reset_time > 0

    time.sleep(2.1)
    assert all(limiter.get_window_stats(limit, "ann").remaining == 2 for limiter in limiters)
    assert all(limiter.hit(limit, "ann", cost=2) for limiter in limiters)
    storage.close()


def test_of_a_sliding_window_the_previous_one_counts_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    now, limit, storage = 1000 * 3600.0 + 1800, RateLimitItemPerHour(4), Storage("memory:")
    monkeypatch.setattr("limpet.adapters.limits.time.time", lambda: now)
    limiter = limits.strategies.SlidingWindowCounterRateLimiter(storage)
    assert limiter.hit(limit, cost=4)

    now += 3600  # in the middle of the next hour, where half of the four count
    assert limiter.get_window_stats(limit).remaining == 2
    assert limiter.hit(limit, cost=2)
    assert not limiter.hit(limit)
    now += 7200  # in the hour after the next, where none counts
    assert limiter.hit(limit, cost=4)
    storage.close()


def test_resetting_leaves_other_keys_of_the_namespace(url: str) -> None:
    with limpet.sync.open(url, namespace=unique()) as store:
        store.put("mine", 1)
        storage = Storage(store)
        for name in STRATEGIES:
            assert strategy(name, storage).hit(RateLimitItemPerHour(1), "ann")

        assert storage.reset() == 3
        assert store.keys().keys == ["mine"]
        storage.close()
        assert store.get("mine") == 1


def test_a_refused_hit_writes_nothing() -> None:
    with limpet.sync.open("memory:") as store:
        storage, limit = Storage(store), RateLimitItemPerHour(1)
        for name in STRATEGIES[1:]:
            limiter = strategy(name, storage)
            assert limiter.hit(limit, "ann")
            revision = store.status().revision
            assert not limiter.hit(limit, "ann")
            assert not limiter.hit(limit, "bob", cost=2)
            assert store.status().revision == revision


async def test_the_library_makes_a_storage_from_a_string(tmp_path: Path) -> None:
    blocking: Any = storage_from_string(f"limpet+sqlite:///{tmp_path}/state.db", namespace="shared")
    awaited: Any = storage_from_string(f"async+limpet+sqlite:///{tmp_path}/state.db", namespace="shared")

    assert isinstance(blocking, Storage)
    assert isinstance(awaited, AsyncStorage)
    assert await awaited.incr("k", 60) == 1
    assert blocking.incr("k", 60, 2) == 3  # without await on an event loop, as slowapi does
    assert await awaited.check()
    await awaited.close()
    blocking.close()


def test_errors_are_wrapped_when_that_is_wanted() -> None:
    plain, wrapped = Storage("memory:"), Storage("memory:", wrap_exceptions=True)
    plain.close()
    wrapped.close()

    with pytest.raises(limpet.errors.Closed):
        plain.get("k")
    with pytest.raises(StorageError):
        wrapped.get("k")
    assert not plain.check()


def test_a_wrong_store_or_prefix_is_refused() -> None:
    with pytest.raises(TypeError, match=r"limpet\.sync\.open"):
        Storage(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"limpet\.open"):
        AsyncStorage(5)  # type: ignore[arg-type]
    with pytest.raises(limpet.errors.InvalidKey):
        Storage("memory:", prefix="")
