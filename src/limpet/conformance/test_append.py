"""Appending: new keys under a prefix that sort in the order of their commits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import limpet
from limpet.conformance.conftest import Elapse, OpenStore
from limpet.errors import Conflict, InvalidKey, InvalidTTL, InvalidValue, LockLost, ValueTooLarge


async def test_append_puts_a_new_key(store: limpet.Store) -> None:
    """`append` puts a value under a new key: the prefix and a number of 16 digits, beginning with 1."""
    first = await store.append("log/", {"x": 1}, meta={"by": "me"})
    second = await store.append("log/", b"\x00")
    other = await store.append("jobs-", None)

    assert (first.key, first.value, first.meta, first.version) == ("log/0000000000000001", {"x": 1}, {"by": "me"}, 1)
    assert (second.key, second.value) == ("log/0000000000000002", b"\x00")
    assert other.key == "jobs-0000000000000001"
    assert await store.entries([first.key, second.key, other.key]) == [first, second, other]
    assert [entry async for entry in store.scan()] == [other, first, second]


async def test_appended_records_are_records(store: limpet.Store) -> None:
    """`append` takes what `put` takes: any value, a ttl and meta."""
    entry = await store.append("log/", limpet.Fields({"raw": b"\x01", "n": 1}))

    assert entry.kind == "record"
    assert await store.record(entry.key).get("raw") == b"\x01"


async def test_appended_entries_expire(store: limpet.Store, elapse: Elapse) -> None:
    """`append` takes what `put` takes: any value, a ttl and meta."""
    short = await store.append("log/", 1, ttl=0.1)
    await store.append("log/", 2)
    await elapse(0.2)

    assert await store.get(short.key) is None
    assert (await store.append("log/", 3)).key == "log/0000000000000003"
    assert [entry.value async for entry in store.scan("log/")] == [2, 3]


async def test_keys_sort_in_the_order_of_the_commits(open_store: OpenStore) -> None:
    """Of all callers and processes, a later commit of `append` has a greater key."""
    stores = [await open_store(clock=limpet.SystemClock()) for _ in range(3)]

    async def append(number: int) -> limpet.Entry:
        return await stores[number % 3].append("log/", number)

    made = await asyncio.gather(*map(append, range(60)))

    assert len({entry.key for entry in made}) == 60
    by_key = sorted(made, key=lambda entry: entry.key)
    assert [entry.revision for entry in by_key] == sorted(entry.revision for entry in made)
    assert [entry async for entry in stores[0].scan("log/")] == by_key


async def test_concurrent_appends_lose_nothing(store: limpet.Store) -> None:
    """Concurrent appends all survive, each under a key of its own."""
    values = range(300)

    made = await asyncio.gather(*(store.append("log/", value) for value in values))

    assert sorted(entry.value for entry in made) == list(values)
    assert [entry async for entry in store.scan("log/")] == sorted(made, key=lambda entry: entry.key)


async def test_a_number_never_comes_again(store: limpet.Store, open_store: OpenStore) -> None:
    """A number never comes again, also when its entry was deleted."""
    first = await store.append("log/", 1)
    last = await store.append("log/", 2)
    await store.delete(last.key)
    assert await store.delete_prefix("log/") == 1

    again = await store.append("log/", 3)
    elsewhere = await (await open_store()).append("log/", 4)

    assert first.key < last.key < again.key < elsewhere.key


async def test_a_key_of_an_append_is_never_overwritten(store: limpet.Store) -> None:
    """`append` overwrites nothing: it passes over keys that were put by their names."""
    await store.put("log/0000000000000003", "named")
    assert (await store.append("log/", 1)).key == "log/0000000000000004"
    await store.put("log/0000000000000005", "named")
    await store.put("log/0000000000000009", "named")
    await store.put("log/12", "another form")
    await store.put("log/x", "another form")

    assert (await store.append("log/", 2)).key == "log/0000000000000010"
    assert await store.get("log/0000000000000005") == "named"


async def test_the_counter_is_seen_nowhere(store: limpet.Store) -> None:
    """What `append` counts with appears in no scan, watch or history, and counts as no key."""
    async with store.watch("*") as watch:
        made = [await store.append("log/", number) for number in range(3)]
        events = [await asyncio.wait_for(anext(watch), 20) for _ in made]

    assert [event.entry for event in events] == made
    assert (await store.keys()).count == 3
    assert [event.key async for event in store.history("log/")] == []
    assert (await store.status()).keys == 3


async def test_an_append_with_a_lost_fence_changes_nothing(store: limpet.Store) -> None:
    """A fenced append after the lock was lost is LockLost, changes nothing and fails no other append."""
    async with store.lock("guard", ttl=60) as lock:
        assert (await store.append("log/", 1, fence=lock)).key == "log/0000000000000001"
        fence = lock.fence

    outcomes = await asyncio.gather(
        *(store.append("log/", number, fence=fence if number == 2 else None) for number in range(4)),
        return_exceptions=True,
    )

    assert isinstance(outcomes.pop(2), LockLost)
    assert [entry.value async for entry in store.scan("log/")] == [1, 0, 1, 3]
    assert all(isinstance(outcome, limpet.Entry) for outcome in outcomes)


async def test_a_repeated_append_gives_the_first_entry(store: limpet.Store, open_store: OpenStore) -> None:
    """A repeated append with the same request id gives the first entry, whatever was appended since."""
    first = await store.append("log/", {"x": 1}, request_id="once", meta={"m": 1})
    await store.append("log/", 2)

    assert await store.append("log/", {"x": 1}, request_id="once", meta={"m": 1}) == first
    assert await (await open_store()).append("log/", {"x": 1}, request_id="once", meta={"m": 1}) == first
    assert (await store.append("log/", 3)).key == "log/0000000000000003"
    assert [entry.value async for entry in store.scan("log/")] == [{"x": 1}, 2, 3]
    for prefix, value in (("log/", 2), ("other/", {"x": 1})):
        with pytest.raises(Conflict) as caught:
            await store.append(prefix, value, request_id="once", meta={"m": 1})
        assert caught.value.reason == "stale_request"


@pytest.mark.face("async")
async def test_concurrent_appends_share_commits(store: limpet.Store) -> None:
    """Appends of one opened store that wait at the same time share a commit."""
    async with store.watch("*") as watch:
        made = await asyncio.gather(*(store.append("log/", number) for number in range(100)))
        events = [await asyncio.wait_for(anext(watch), 20) for _ in made]

    assert [event.entry for event in events] == list(made)
    assert len({event.commit for event in events}) <= 2


@pytest.mark.face("async")
async def test_a_cancelled_append_is_done_or_not(store: limpet.Store) -> None:
    """Cancelling a caller of `append` leaves its entry there or not, and fails no other append."""
    appends = [asyncio.create_task(store.append("log/", number)) for number in range(20)]
    await asyncio.sleep(0)
    for task in appends[::3]:
        task.cancel()
    outcomes = await asyncio.gather(*appends, return_exceptions=True)

    made = [outcome for outcome in outcomes if isinstance(outcome, limpet.Entry)]
    assert {entry.value for entry in made} >= {n for n in range(20) if n % 3}
    after = await store.append("log/", "after")
    found = [entry async for entry in store.scan("log/")]
    assert found[-1] == after
    assert all(entry in found for entry in made)


async def test_an_append_that_is_too_large_fails_alone(open_store: OpenStore) -> None:
    """Invalid arguments of one caller fail no other caller."""
    store = await open_store(max_value_bytes=100)
    values: list[Any] = [1, b"x" * 101, {1, 2}, 2]

    outcomes = await asyncio.gather(*(store.append("log/", value) for value in values), return_exceptions=True)

    assert [type(outcome).__name__ for outcome in outcomes] == ["Entry", "ValueTooLarge", "InvalidValue", "Entry"]
    assert isinstance(outcomes[1], ValueTooLarge)


async def test_large_appends_are_shared_out(store: limpet.Store) -> None:
    """Concurrent appends all survive, each under a key of its own."""
    values = [bytes([number]) * 900_000 for number in range(10)]

    made = await asyncio.gather(*(store.append("log/", value) for value in values))

    assert sorted(entry.value for entry in made) == values


@pytest.mark.refused_early
async def test_the_prefix_of_an_append_is_a_key(store: limpet.Store) -> None:
    """The prefix of `append` is a key of up to 1,008 bytes."""
    for prefix in ("", "x" * 1009, "a\0", 1):
        with pytest.raises(InvalidKey):
            await store.append(prefix, 1)  # type: ignore[arg-type]
    with pytest.raises(InvalidTTL):
        await store.append("x", 1, ttl=0)
    with pytest.raises(InvalidValue):
        await store.append("x", float("nan"))


async def test_the_longest_prefix_of_an_append(store: limpet.Store) -> None:
    """The prefix of `append` is a key of up to 1,008 bytes."""
    assert (await store.append("x" * 1008, 1)).key == "x" * 1008 + "0000000000000001"


async def test_the_last_number_is_the_end(store: limpet.Store) -> None:
    """When the last number of 16 digits is used, `append` is InvalidValue and names the prefix."""
    await store.put("log/9999999999999998", "named")
    assert (await store.append("log/", 1)).key == "log/9999999999999999"

    with pytest.raises(InvalidValue, match="no number is left under 'log/'"):
        await store.append("log/", 2)
