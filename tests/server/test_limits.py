"""Rates and quotas: what passes, what does not, and how far a burst can run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import limpet
from limpet import ManualClock, Store
from limpet.errors import Conflict, InvalidNamespace, InvalidValue, RateLimited
from limpet.server import limits
from limpet.server.dispatch import Dispatcher, TrustedCaller
from limpet.server.limits import Limit, NamespaceLimits, Quotas, Rates, checks_of, limits_of
from limpet.server.operations import OPERATIONS
from limpet.server.requests import request_of
from tests.engines import url_of


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> AsyncIterator[Store]:
    url = url_of(request.param, tmp_path)
    async with limpet.open(url, namespace="trivia", clock=clock, sweep=False) as store:
        yield store


class Counter:
    """A dispatcher with limits, and a caller."""

    def __init__(self, store: Store, clock: ManualClock, **settings: Any) -> None:
        rates, quotas = checks_of(limits_of(settings), clock)
        observers = [] if quotas is None else [quotas]
        self.dispatcher = Dispatcher(
            store._session, "nats", checks=[one for one in (rates, quotas) if one], observers=observers
        )

    async def ask(self, operation: str, namespace: str = "trivia", **members: Any) -> dict[str, Any]:
        row = OPERATIONS[operation]
        return await self.dispatcher.run(row, namespace, request_of(row.request, members), TrustedCaller())

    async def passes(self, operation: str, count: int, **members: Any) -> int:
        """How many of so many requests at once pass."""
        requests = [
            self.ask(
                operation, **{name: f"{text}{number}" if name == "key" else text for name, text in members.items()}
            )
            for number in range(count)
        ]
        answers = await asyncio.gather(*requests, return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, BaseException)]
        assert all(isinstance(one, RateLimited) for one in refused), refused
        return count - len(refused)


# Rates ------------------------------------------------------------------------


async def test_a_burst_passes_and_then_so_many_a_second(store: Store, clock: ManualClock) -> None:
    counter = Counter(store, clock, rate=10, burst=20)

    assert await counter.passes("get", 50, key="k") == 20
    clock.advance(1)
    assert await counter.passes("get", 50, key="k") == 10
    clock.advance(3600)
    assert await counter.passes("get", 50, key="k") == 20


async def test_whoever_is_refused_is_told_when_to_come_again(store: Store, clock: ManualClock) -> None:
    counter = Counter(store, clock, rate=4, burst=1)
    await counter.ask("get", key="k")

    with pytest.raises(RateLimited) as refused:
        await counter.ask("get", key="k")
    assert refused.value.retry_after == pytest.approx(0.25)
    clock.advance(0.25)
    await counter.ask("get", key="k")


async def test_a_namespace_does_not_spend_what_is_anothers(store: Store, clock: ManualClock) -> None:
    counter = Counter(store, clock, rate=1, namespaces={"quick": {"rate": "none"}})
    await counter.ask("get", key="k")

    await counter.ask("get", "other", key="k")
    for _ in range(5):
        await counter.ask("get", "quick", key="k")
    with pytest.raises(RateLimited, match="'trivia' takes 1 requests a second"):
        await counter.ask("get", key="k")


async def test_a_batch_counts_as_its_writes_and_passes_when_all_is_saved_up(store: Store, clock: ManualClock) -> None:
    counter = Counter(store, clock, rate=1, burst=10)
    writes = [{"op": "put", "key": str(number), "value": 1} for number in range(8)]
    await counter.ask("batch", writes=writes)

    with pytest.raises(RateLimited) as refused:
        await counter.ask("batch", writes=writes)
    assert refused.value.retry_after == pytest.approx(6)
    clock.advance(8)
    large = [{"op": "put", "key": str(number), "value": 1} for number in range(100)]
    await counter.ask("batch", writes=large)


async def test_a_refused_request_changes_nothing(store: Store, clock: ManualClock) -> None:
    counter = Counter(store, clock, rate=1)
    await counter.ask("set", key="a", value=1)

    with pytest.raises(RateLimited):
        await counter.ask("set", key="b", value=1)
    assert (await store.keys()).keys == ["a"]


async def test_very_many_namespaces_take_no_more_room_than_many(store: Store, clock: ManualClock) -> None:
    rates = Rates(NamespaceLimits(Limit(rate=1), {}), clock)
    rates._buckets._max = 100
    for number in range(1000):
        await rates.check(
            store.namespace(f"n{number}"), OPERATIONS["get"], request_of(OPERATIONS["get"].request, {"key": "k"})
        )

    assert len(rates._buckets) == 100


# Quotas -----------------------------------------------------------------------


async def test_a_namespace_holds_its_quota_of_keys_and_no_more(store: Store, clock: ManualClock) -> None:
    counter = Counter(store, clock, keys=10)

    assert await counter.passes("set", 50, key="k", value=1) == 10
    assert (await store.status()).keys == 10


async def test_semantic_writes_are_held_to_rates_and_quotas_too(store: Store, clock: ManualClock) -> None:
    semantic: dict[str, Any] = {"value": {"text": "x" * 100}, "semantics": {"purpose": "cursor"}}
    place, by = "tenant/acme/project/docs/", {"lastWriter": "a:b"}
    items = [{"op": "put", "key": f"{place}{number}", **semantic} for number in range(4)]

    assert await Counter(store, clock, keys=3).passes("kv_put", 5, key=place, **semantic, **by) == 3
    with pytest.raises(RateLimited, match="3 keys"):
        await Counter(store, clock, keys=3).ask("kv_batch", items=items, **by)
    with pytest.raises(RateLimited, match="400 bytes"):
        await Counter(store, clock, bytes=400).ask("kv_batch", "other", items=items, **by)
    counter = Counter(store, clock, rate=1, burst=4)
    await counter.ask("kv_batch", "other", items=items, **by)
    with pytest.raises(RateLimited, match="1 requests a second"):
        await counter.ask("kv_get", "other", key=f"{place}0")


async def test_a_burst_does_not_run_past_a_quota_whatever_is_under_way(store: Store, clock: ManualClock) -> None:
    """What was let in and is not written yet would be missing from what the engine says."""
    counter = Counter(store, clock, keys=100)
    found = await asyncio.gather(*(counter.passes("set", 60, key=f"{part}-", value=1) for part in "abcde"))
    clock.advance(5)
    found += await asyncio.gather(*(counter.passes("set", 60, key=f"{part}-", value=1) for part in "vwxyz"))

    assert sum(found) == (await store.status()).keys == 100


async def test_a_quota_of_bytes_counts_keys_and_values(store: Store, clock: ManualClock) -> None:
    counter = Counter(store, clock, bytes=1000)

    # Each is 2 bytes of a key and 98 of a string with its quotes.
    assert await counter.passes("set", 50, key="k", value="x" * 96) == 10
    assert (await store.status()).size_bytes == 1000


@pytest.fixture
async def full(store: Store, clock: ManualClock) -> Counter:
    """A namespace that has no room left."""
    await store.put("a", "x" * 96)
    await store.put("b", 1)
    await store.record("r").set({"f": "y" * 90, "g": 1})
    return Counter(store, clock, keys=3, bytes=(await store.status()).size_bytes)


WELCOME: list[tuple[str, dict[str, Any]]] = [
    ("get", {"key": "a"}),
    ("list", {}),
    ("scan", {}),
    ("delete", {"key": "a"}),
    ("take", {"key": "a"}),
    ("touch", {"key": "a", "ttl": 10}),
    ("set", {"key": "a", "value": "z" * 96}),
    ("set", {"key": "a", "value": 1}),
    ("put", {"key": "a", "value": "z" * 96}),
    ("put", {"key": "a", "bytes": "AAAA"}),
    ("put", {"key": "a", "fields": {"f": 1}}),
    ("fields", {"key": "r", "set": {"f": "z" * 90}}),
    ("fields", {"key": "r", "get": None}),
    ("fields", {"key": "r", "unset": ["g"]}),
    ("fields", {"key": "r", "swap": {"field": "g", "expected": 1, "new": 2}}),
    ("batch", {"writes": [{"op": "delete", "key": "a"}, {"op": "touch", "key": "b", "ttl": 1}]}),
    ("batch", {"writes": [{"op": "put", "key": "a", "value": 1}, {"op": "set", "key": "r", "fields": {"g": 3}}]}),
    ("lock", {"name": "x", "ttl": 10}),
    ("locks", {}),
    ("status", {}),
]


@pytest.mark.parametrize(("operation", "members"), WELCOME)
async def test_where_there_is_no_room_one_can_read_delete_and_replace(
    full: Counter, operation: str, members: dict[str, Any]
) -> None:
    await full.ask(operation, **members)


@pytest.mark.parametrize(
    ("operation", "members"),
    [
        ("set", {"key": "new", "value": 1}),
        ("set", {"key": "a", "value": "z" * 97}),
        ("cas", {"key": "new", "value": 1, "expect": {"absent": True}}),
        ("incr", {"key": "new"}),
        ("append", {"prefix": "new", "value": 1}),
        ("put", {"key": "new", "bytes": "AAAA"}),
        ("fields", {"key": "r", "set": {"h": 1}}),
        ("fields", {"key": "new", "set": {"h": 1}}),
        ("batch", {"writes": [{"op": "delete", "key": "a"}, {"op": "create", "key": "new", "value": 1}]}),
        ("batch", {"writes": [{"op": "add", "key": "new"}]}),
    ],
)
async def test_where_there_is_no_room_nothing_grows(full: Counter, operation: str, members: dict[str, Any]) -> None:
    with pytest.raises(RateLimited, match="'trivia' is full: it may hold") as refused:
        await full.ask(operation, **members)
    assert refused.value.retry_after > 0


async def test_room_that_was_made_can_be_used_within_the_second(full: Counter, clock: ManualClock) -> None:
    await full.ask("delete", key="b")
    clock.advance(limits.REFRESH_S)

    await full.ask("set", key="c", value=1)


async def test_what_somebody_else_wrote_counts_within_a_second(store: Store, clock: ManualClock) -> None:
    counter = Counter(store, clock, keys=10)
    await counter.ask("set", key="first", value=1)
    for number in range(9):
        await store.put(f"by-another-server-{number}", 1)

    clock.advance(limits.REFRESH_S)
    with pytest.raises(RateLimited):
        await counter.ask("set", key="last", value=1)


async def test_a_write_that_failed_takes_no_room(store: Store, clock: ManualClock) -> None:
    counter = Counter(store, clock, keys=2)
    await store.put("a", 1)
    for _ in range(20):
        with pytest.raises(Conflict):
            await counter.ask("cas", key="b", value=1, expect={"version": 7})

    await counter.ask("set", key="b", value=1)


async def test_writing_the_same_keys_over_and_over_does_not_use_up_a_quota(store: Store, clock: ManualClock) -> None:
    counter = Counter(store, clock, keys=5, bytes=10_000)
    for number in range(200):
        await counter.ask("set", key=f"k{number % 4}", value="x" * 100)

    await counter.ask("set", key="the fifth", value=1)


async def test_a_quota_that_nobody_hears_the_end_of_heals_by_itself(store: Store, clock: ManualClock) -> None:
    quotas = Quotas(NamespaceLimits(Limit(keys=2), {}), clock)
    row = OPERATIONS["set"]
    lost = [request_of(row.request, {"key": str(number), "value": 1}) for number in range(2)]
    for request in lost:
        await quotas.check(store, row, request)
    last = request_of(row.request, {"key": "last", "value": 1})
    with pytest.raises(RateLimited):
        await quotas.check(store, row, last)

    clock.advance(limits.RUNNING_S_MAX + 1)
    await quotas.check(store, row, last)


# Settings ---------------------------------------------------------------------


def test_a_namespace_takes_over_what_it_does_not_say() -> None:
    found = limits_of({"rate": 100, "keys": 1000, "namespaces": {"big": {"keys": "none", "bytes": 5}}})

    assert found.of("any") == Limit(rate=100, keys=1000)
    assert found.of("big") == Limit(rate=100, keys=None, bytes=5)
    assert Limit(rate=0.5).burst_max == 1
    assert Limit(rate=50).burst_max == 50


def test_without_limits_there_are_no_gates(clock: ManualClock) -> None:
    assert checks_of(limits_of({}), clock) == (None, None)
    rates, quotas = checks_of(limits_of({"namespaces": {"a": {"rate": 1}}}), clock)
    assert isinstance(rates, Rates)
    assert quotas is None


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"rate": 0}, InvalidValue),
        ({"rate": -1}, InvalidValue),
        ({"rate": float("inf")}, InvalidValue),
        ({"rate": float("nan")}, InvalidValue),
        ({"rate": "fast"}, InvalidValue),
        ({"rate": True}, InvalidValue),
        ({"burst": 0.5}, InvalidValue),
        ({"keys": -1}, InvalidValue),
        ({"keys": 1.5}, InvalidValue),
        ({"speed": 1}, InvalidValue),
        ({"namespaces": {"Not A Name": {}}}, InvalidNamespace),
        ({"namespaces": {"a": 5}}, InvalidValue),
        ({"namespaces": []}, InvalidValue),
    ],
)
def test_a_limit_that_means_nothing_is_refused(settings: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        limits_of(settings)
