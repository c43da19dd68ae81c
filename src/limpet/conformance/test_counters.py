"""Counters."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import limpet
from limpet.conformance.conftest import Elapse, OpenStore
from limpet.conformance.support import next_event
from limpet.errors import Conflict, InvalidTTL, InvalidValue, TypeMismatch

INT_MIN, INT_MAX = -(2**63), 2**63 - 1


async def test_add_counts_from_zero(store: limpet.Store) -> None:
    """`add` returns the new value, and a missing key counts as zero."""
    assert await store.add("hits") == 1
    assert await store.add("hits", 41) == 42


async def test_what_add_returns_is_what_is_stored(store: limpet.Store) -> None:
    """`add` returns the new value, and a missing key counts as zero."""
    for step in (1, 5, 100, 10**12):
        returned = await store.add("hits", step)
        assert type(returned) is int
        assert returned == await store.get("hits")


async def test_a_deleted_counter_counts_as_zero(store: limpet.Store) -> None:
    """`add` returns the new value, and a missing key counts as zero."""
    await store.add("hits", 7)
    await store.delete("hits")

    assert await store.add("hits", 2) == 2
    assert await store.take("hits") == 2
    assert await store.add("hits", 3) == 3


async def test_an_expired_counter_counts_as_zero(store: limpet.Store, elapse: Elapse) -> None:
    """`add` returns the new value, and a missing key counts as zero."""
    await store.add("hits", 7, ttl=0.1)
    await elapse(0.2)

    assert await store.add("hits") == 1
    entry = await store.entry("hits")
    assert entry is not None
    assert (entry.version, entry.expires_at) == (1, None)


async def test_counters_do_not_count_for_each_other(store: limpet.Store) -> None:
    """`add` returns the new value, and a missing key counts as zero."""
    assert await store.add("a", 1) == 1
    assert await store.add("b", 10) == 10
    assert await store.add("A", 100) == 100

    assert await store.add("a", 1) == 2
    assert await store.add("b", 1) == 11


async def test_add_counts_in_a_batch(store: limpet.Store) -> None:
    """`add` returns the new value, and a missing key counts as zero."""
    await store.put("b", 5)

    commit = await store.batch().add("a").add("b", 2).add("c", -3).commit()

    assert [entry and entry.value for entry in commit.entries] == [1, 7, -3]
    assert [await store.get(key) for key in ("a", "b", "c")] == [1, 7, -3]


async def test_add_takes_negative_steps(store: limpet.Store) -> None:
    """`add` takes negative steps and zero."""
    assert await store.add("stock", -3) == -3
    assert await store.add("stock", 5) == 2
    assert await store.add("stock", -2) == 0
    assert await store.add("stock", -1) == -1


async def test_add_takes_zero(store: limpet.Store) -> None:
    """`add` takes negative steps and zero."""
    await store.put("stock", 5)

    assert await store.add("stock", 0) == 5


async def test_adding_zero_to_a_missing_key_makes_a_counter(store: limpet.Store) -> None:
    """`add` takes negative steps and zero."""
    assert await store.add("stock", 0) == 0

    entry = await store.entry("stock")
    assert entry is not None
    assert (entry.value, type(entry.value), entry.version) == (0, int, 1)


async def test_adding_zero_is_still_a_write(store: limpet.Store) -> None:
    """`add` takes negative steps and zero."""
    before = await store.put("stock", 5)

    await store.add("stock", 0)

    after = await store.entry("stock")
    assert after is not None
    assert after.version == 2
    assert after.revision > before.revision


async def test_a_counter_is_an_integer_to_get(store: limpet.Store) -> None:
    """A counter is an ordinary integer that `get` and `put` see."""
    await store.add("hits", 42)

    found = await store.get("hits")

    assert (found, type(found)) == (42, int)
    assert [(entry.kind, entry.value) async for entry in store.scan()] == [("json", 42)]


async def test_a_counter_can_be_put(store: limpet.Store) -> None:
    """A counter is an ordinary integer that `get` and `put` see."""
    await store.add("hits", 5)
    await store.put("hits", 100)
    assert await store.add("hits") == 101

    await store.create("other", -1)
    assert await store.add("other") == 0


async def test_a_counter_counts_its_writes(store: limpet.Store) -> None:
    """A counter is an ordinary integer that `get` and `put` see."""
    await store.add("hits")
    await store.put("hits", 7)
    await store.add("hits", 5)

    entry = await store.entry("hits")

    assert entry is not None
    assert (entry.value, entry.version) == (12, 3)


async def test_a_counter_can_be_expected_updated_and_taken(store: limpet.Store) -> None:
    """A counter is an ordinary integer that `get` and `put` see."""
    await store.add("hits", 4)

    await store.put("hits", 5, expect=limpet.equals(4))
    await store.update("hits", lambda found: found * 2)
    assert await store.add("hits", 1, expect=limpet.equals(10)) == 11
    with pytest.raises(Conflict):
        await store.add("hits", 1, expect=limpet.equals(10))

    assert await store.take("hits") == 11


async def test_a_watcher_sees_the_counter(store: limpet.Store) -> None:
    """A counter is an ordinary integer that `get` and `put` see."""
    async with store.watch("hits") as watch:
        await store.add("hits", 41)
        events = [await next_event(watch)]
        await store.add("hits")
        events.append(await next_event(watch))

    assert [(event.op, event.value) for event in events] == [("put", 41), ("put", 42)]


@pytest.mark.parametrize("other", [1.0, True, None, "1", [1], b"1"])
async def test_add_needs_an_integer(store: limpet.Store, other: object) -> None:
    """`add` to anything but an integer is TypeMismatch and changes nothing."""
    before = await store.put("hits", other)

    with pytest.raises(TypeMismatch):
        await store.add("hits")

    assert await store.entry("hits") == before


async def test_add_is_not_fooled_by_what_looks_like_an_integer(store: limpet.Store) -> None:
    """`add` to anything but an integer is TypeMismatch and changes nothing."""
    values: list[object] = [0.0, -0.0, 1e22, False, "", "0", " 1", b"", b"0", b"-1", [], {}, {"1": 1}, "\u0661"]
    for other in values:
        before = await store.put("hits", other)
        with pytest.raises(TypeMismatch):
            await store.add("hits", 0)
        assert await store.entry("hits") == before


async def test_add_to_a_record_is_refused(store: limpet.Store) -> None:
    """`add` to anything but an integer is TypeMismatch and changes nothing."""
    for fields in ({}, {"n": 1}):
        before = await store.record("hits").put(fields)
        with pytest.raises(TypeMismatch):
            await store.add("hits")
        assert await store.entry("hits") == before


async def test_a_mismatch_says_what_was_needed(store: limpet.Store) -> None:
    """`add` to anything but an integer is TypeMismatch and changes nothing."""
    await store.put("hits", "one")

    with pytest.raises(TypeMismatch, match=r"'hits'.*integer") as raised:
        await store.add("hits")

    assert (raised.value.key, raised.value.expected) == ("hits", "an integer")


async def test_a_mismatch_keeps_ttl_meta_and_revision(store: limpet.Store) -> None:
    """`add` to anything but an integer is TypeMismatch and changes nothing."""
    before = await store.put("hits", "one", ttl=60, meta={"by": "me"})

    with pytest.raises(TypeMismatch):
        await store.add("hits", 1, ttl=5, meta={"by": "you"})

    assert await store.entry("hits") == before
    assert (await store.status()).revision == before.revision


@pytest.mark.parametrize(
    "step", [1.0, 0.5, True, False, "1", None, b"1", [1], float("nan"), 2**63, -(2**63) - 1, 10**30]
)
async def test_a_step_must_be_an_integer(store: limpet.Store, step: Any) -> None:
    """A step that is not an integer is InvalidValue."""
    before = await store.put("hits", 5)

    with pytest.raises(InvalidValue):
        await store.add("hits", step)
    with pytest.raises(InvalidValue):
        await store.batch().put("other", 1).add("hits", step).commit()

    assert await store.entry("hits") == before
    assert await store.entry("other") is None


async def test_a_bad_step_makes_no_counter(store: limpet.Store) -> None:
    """A step that is not an integer is InvalidValue."""
    step: Any = 1.0

    with pytest.raises(InvalidValue):
        await store.add("hits", step)

    assert await store.entry("hits") is None


async def test_a_counter_reaches_its_edges(store: limpet.Store) -> None:
    """A counter that would leave -2^63 to 2^63-1 is an error and stays as it was."""
    assert await store.add("up", INT_MAX) == INT_MAX
    assert await store.add("down", INT_MIN) == INT_MIN
    assert await store.add("up", INT_MIN) == -1
    assert await store.add("down", INT_MAX) == -1
    assert await store.add("step", INT_MAX - 1) == INT_MAX - 1
    assert await store.add("step") == INT_MAX
    assert await store.get("step") == INT_MAX


async def test_a_counter_does_not_overflow(store: limpet.Store) -> None:
    """A counter that would leave -2^63 to 2^63-1 is an error and stays as it was."""
    await store.put("hits", INT_MAX)

    with pytest.raises(InvalidValue):
        await store.add("hits")

    assert await store.get("hits") == INT_MAX


@pytest.mark.parametrize(
    ("start", "step"),
    [
        (INT_MAX, 1),
        (INT_MAX, INT_MAX),
        (1, INT_MAX),
        (INT_MIN, -1),
        (INT_MIN, INT_MIN),
        (-1, INT_MIN),
        (INT_MAX - 5, 6),
    ],
)
async def test_a_counter_beyond_an_edge_stays_as_it_was(store: limpet.Store, start: int, step: int) -> None:
    """A counter that would leave -2^63 to 2^63-1 is an error and stays as it was."""
    before = await store.put("hits", start, ttl=60, meta={"by": "me"})

    with pytest.raises(InvalidValue, match="hits"):
        await store.add("hits", step)

    assert await store.entry("hits") == before
    assert (await store.status()).revision == before.revision
    assert await store.add("hits", 0) == start


async def test_a_counter_beyond_an_edge_refuses_its_batch(store: limpet.Store) -> None:
    """A counter that would leave -2^63 to 2^63-1 is an error and stays as it was."""
    await store.put("full", INT_MAX)
    before = await store.put("hits", 1)

    with pytest.raises(InvalidValue):
        await store.batch().add("hits").add("full").put("other", 1).commit()

    assert await store.entry("hits") == before
    assert (await store.keys()).keys == ["full", "hits"]


async def test_concurrent_adds_all_count(store: limpet.Store) -> None:
    """Concurrent adds all count."""
    await asyncio.gather(*(store.add("hits") for _ in range(64)))

    assert await store.get("hits") == 64


async def test_concurrent_adds_each_get_their_own_value(store: limpet.Store) -> None:
    """Concurrent adds all count.

    No two of them get the same number, so a counter can issue unique numbers.
    """
    numbers = await asyncio.gather(*(store.add("next") for _ in range(64)))

    assert sorted(numbers) == list(range(1, 65))


async def test_concurrent_adds_of_several_stores_all_count(open_store: OpenStore) -> None:
    """Concurrent adds all count."""
    stores = [await open_store() for _ in range(4)]

    numbers = await asyncio.gather(*(store.add("hits") for _ in range(25) for store in stores))

    assert sorted(numbers) == list(range(1, 101))
    assert await stores[0].get("hits") == 100
    entry = await stores[1].entry("hits")
    assert entry is not None
    assert entry.version == 100


async def test_concurrent_steps_up_and_down_end_at_their_sum(open_store: OpenStore) -> None:
    """Concurrent adds all count."""
    stores = [await open_store() for _ in range(2)]
    steps = [number if number % 3 else -2 * number for number in range(60)]

    await asyncio.gather(*(stores[step % 2].add("stock", step) for step in steps))

    assert await stores[0].get("stock") == sum(steps)


async def test_concurrent_adds_in_batches_all_count(open_store: OpenStore) -> None:
    """Concurrent adds all count."""
    stores = [await open_store() for _ in range(2)]

    await asyncio.gather(
        *(store.batch().add("a").add("b", 2).commit() for _ in range(20) for store in stores),
        *(store.add("a") for _ in range(20) for store in stores),
    )

    assert [await stores[0].get(key) for key in ("a", "b")] == [80, 80]


async def test_a_crowd_stops_at_the_edge(open_store: OpenStore) -> None:
    """Concurrent adds all count.

    Ten are left before the limit, and of thirty concurrent callers ten succeed.
    """
    stores = [await open_store() for _ in range(2)]
    await stores[0].put("hits", INT_MAX - 10)

    answers = await asyncio.gather(*(stores[number % 2].add("hits") for number in range(30)), return_exceptions=True)

    granted = [answer for answer in answers if isinstance(answer, int)]
    refused = [answer for answer in answers if isinstance(answer, InvalidValue)]
    assert sorted(granted) == list(range(INT_MAX - 9, INT_MAX + 1))
    assert len(refused) == 20
    assert await stores[0].get("hits") == INT_MAX


# A window of time -------------------------------------------------------------


async def test_a_new_counter_gets_a_ttl(store: limpet.Store, elapse: Elapse) -> None:
    """`add` with `ttl_if_new` gives a missing key this time to live, and leaves that of an entry as it is."""
    assert await store.add("tries", ttl_if_new=10) == 1
    first = await store.entry("tries")
    await elapse(4)
    assert await store.add("tries", 2, ttl_if_new=10) == 3
    second = await store.entry("tries")
    await elapse(7)

    assert first is not None
    assert second is not None
    assert first.expires_at is not None
    assert (first.expires_at - first.created_at).total_seconds() == 10
    assert second.expires_at == first.expires_at
    assert await store.get("tries") is None
    assert await store.add("tries", ttl_if_new=10) == 1


async def test_a_counter_that_is_there_gets_no_ttl(store: limpet.Store) -> None:
    """`add` with `ttl_if_new` gives a missing key this time to live, and leaves that of an entry as it is."""
    await store.add("forever")
    await store.add("forever", ttl_if_new=10)
    commit = await store.batch().add("forever", ttl_if_new=10).add("new", ttl_if_new=10).commit()

    assert [entry and entry.expires_at is None for entry in commit.entries] == [True, False]


async def test_a_repeated_add_with_a_ttl_of_its_own(store: limpet.Store) -> None:
    """A repeated add gives the value of the first."""
    assert await store.add("n", ttl_if_new=10, request_id="once") == 1
    assert await store.add("n", ttl_if_new=10, request_id="once") == 1
    with pytest.raises(Conflict):
        await store.add("n", ttl_if_new=11, request_id="once")
    with pytest.raises(Conflict):
        await store.maximum("n", 1, ttl_if_new=10, request_id="once")


@pytest.mark.refused_early
async def test_a_counter_has_one_ttl(store: limpet.Store) -> None:
    """`ttl` and `ttl_if_new` together are InvalidTTL."""
    for count in (store.add, store.minimum, store.maximum):
        with pytest.raises(InvalidTTL, match="twice"):
            await count("n", 1, ttl=10, ttl_if_new=10)
        with pytest.raises(InvalidTTL, match="twice"):
            await count("n", 1, ttl=None, ttl_if_new=10)
        with pytest.raises(InvalidTTL):
            await count("n", 1, ttl_if_new=0)


# Minimum and maximum ----------------------------------------------------------


async def test_the_smaller_and_the_larger_number_are_kept(store: limpet.Store) -> None:
    """`minimum` keeps the smaller of the two numbers, `maximum` the larger; a missing key takes the given one."""
    assert [await store.maximum("high", number) for number in (-5, -7, 3, 2, 3)] == [-5, -5, 3, 3, 3]
    assert [await store.minimum("low", number) for number in (5, 7, -3, 0)] == [5, 5, -3, -3]
    assert await store.get_many(["high", "low"]) == {"high": 3, "low": -3}
    assert await store.maximum("high", INT_MAX) == INT_MAX
    assert await store.minimum("low", INT_MIN) == INT_MIN


async def test_concurrent_maxima_keep_the_largest(store: limpet.Store) -> None:
    """`minimum` keeps the smaller of the two numbers, `maximum` the larger; a missing key takes the given one."""
    found = await asyncio.gather(*(store.maximum("high", number * 7 % 40) for number in range(40)))

    assert await store.get("high") == 39
    assert 39 in found


async def test_a_minimum_is_a_write(store: limpet.Store, elapse: Elapse) -> None:
    """`minimum` and `maximum` have the limits and errors of `add`, and write also when the number stays."""
    await store.minimum("low", 1, ttl=100, meta={"m": 1})
    before = await store.entry("low")
    await store.minimum("low", 2, ttl_if_new=5)
    after = await store.entry("low")

    assert before is not None
    assert after is not None
    assert (after.value, after.version, after.meta) == (1, 2, {"m": 1})
    assert after.expires_at == before.expires_at
    await elapse(101)
    assert await store.minimum("low", 2) == 2


async def test_other_values_have_no_maximum(store: limpet.Store) -> None:
    """`minimum` and `maximum` have the limits and errors of `add`, and write also when the number stays."""
    for number, value in enumerate([None, True, 1.5, "1", [1], b"1", limpet.Fields(a=1)]):
        before = await store.put(f"k{number}", value)
        for keep in (store.minimum, store.maximum):
            with pytest.raises(TypeMismatch, match="an integer"):
                await keep(f"k{number}", 1)
        assert await store.entry(f"k{number}") == before
    with pytest.raises(Conflict):
        await store.maximum("new", 1, expect=limpet.PRESENT)


@pytest.mark.refused_early
@pytest.mark.parametrize("number", [1.0, True, "1", None, 2**63, -(2**63) - 1])
async def test_a_maximum_is_an_integer(store: limpet.Store, number: Any) -> None:
    """`minimum` and `maximum` have the limits and errors of `add`, and write also when the number stays."""
    for keep in (store.minimum, store.maximum):
        with pytest.raises(InvalidValue):
            await keep("n", number)


async def test_a_batch_keeps_minimum_and_maximum(store: limpet.Store) -> None:
    """A batch puts, creates, adds, keeps minimum and maximum, sets, swaps, touches, takes and deletes."""
    await store.put("low", 5)
    commit = await store.batch().minimum("low", 3).maximum("high", 9).add("n", 2).commit()

    assert [entry and entry.value for entry in commit.entries] == [3, 9, 2]
