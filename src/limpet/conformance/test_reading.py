"""Reading: get, entry, scan, and what a read guarantees."""

# The contract, which the docstrings quote, writes `null` small.
# ruff: noqa: D403

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncIterator, Sequence
from random import Random
from typing import Any

import pytest

import limpet
from limpet.conformance.conftest import Elapse, OpenStore
from limpet.errors import InvalidValue


async def drain(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


async def fill(store: limpet.Store, keys: Sequence[str]) -> None:
    """Put every key, each with itself as its value."""
    for start in range(0, len(keys), 128):
        batch = store.batch()
        for key in keys[start : start + 128]:
            batch = batch.put(key, key)
        await batch.commit()


async def scan_keys(store: limpet.Store, *args: Any, **options: Any) -> list[str]:
    """The keys that a scan gives."""
    return [entry.key async for entry in store.scan(*args, **options)]


# get and entry ----------------------------------------------------------------


async def test_get_gives_the_value(store: limpet.Store) -> None:
    """`get` gives the value, or the default when the key is absent."""
    await store.put("k", {"a": [1]})

    assert await store.get("k") == {"a": [1]}
    assert await store.get("k", "default") == {"a": [1]}


async def test_get_gives_the_default(store: limpet.Store) -> None:
    """`get` gives the value, or the default when the key is absent.

    The default is the caller's own object, whatever it is, and it is not stored.
    """
    default = object()

    assert await store.get("k") is None
    assert await store.get("k", default) is default
    assert await store.get("k", default=default) is default
    assert (await store.keys()).keys == []


async def test_get_gives_the_default_for_what_has_ended(store: limpet.Store, elapse: Elapse) -> None:
    """`get` gives the value, or the default when the key is absent."""
    await store.put("deleted", 1)
    await store.put("taken", 1)
    await store.put("expired", 1, ttl=0.1)

    await store.delete("deleted")
    await store.take("taken")
    await elapse(0.2)

    assert [await store.get(key, "none") for key in ("deleted", "taken", "expired")] == ["none"] * 3


async def test_get_gives_what_is_false_and_not_the_default(store: limpet.Store) -> None:
    """`get` gives the value, or the default when the key is absent."""
    values: list[object] = [False, 0, 0.0, "", [], {}, b""]
    for value in values:
        await store.put("k", value)
        assert await store.get("k", "default") == value


async def test_null_is_a_value_to_get(store: limpet.Store) -> None:
    """null is a value: `entry` always distinguishes it from absence, and `get` does by its default."""
    await store.put("null", None)

    assert await store.get("null", "none") is None
    assert await store.get("missing", "none") == "none"


async def test_null_is_a_value_to_entry(store: limpet.Store) -> None:
    """null is a value: `entry` always distinguishes it from absence, and `get` does by its default."""
    await store.put("null", None)

    entry = await store.entry("null")

    assert entry is not None
    assert (entry.value, entry.version) == (None, 1)
    assert await store.entry("missing") is None


async def test_null_is_a_value_to_scans_and_guards(store: limpet.Store) -> None:
    """null is a value: `entry` always distinguishes it from absence, and `get` does by its default."""
    await store.put("null", None)

    assert (await store.keys()).keys == ["null"]
    assert [entry.value for entry in await drain(store.scan())] == [None]
    assert (await store.put("null", None, expect=limpet.PRESENT)).version == 2
    assert await store.take("null", "none") is None
    assert await store.take("null", "none") == "none"


async def test_entry_gives_everything(store: limpet.Store, elapse: Elapse) -> None:
    """`entry` gives key, value, version, revision, times and meta, or None."""
    first = await store.put("k", 1)
    await elapse(0.05)
    await store.put("k", {"a": 1}, ttl=60, meta={"by": "me"})

    entry = await store.entry("k")

    assert entry is not None
    assert (entry.key, entry.value, entry.version, entry.meta) == ("k", {"a": 1}, 2, {"by": "me"})
    assert entry.created_revision == first.revision
    assert entry.revision > first.revision
    assert entry.created_at == first.created_at
    assert entry.updated_at > first.updated_at
    assert entry.expires_at == entry.updated_at + datetime.timedelta(seconds=60)


async def test_entry_of_a_new_key_starts_everything(store: limpet.Store) -> None:
    """`entry` gives key, value, version, revision, times and meta, or None."""
    await store.put("k", "v")

    entry = await store.entry("k")

    assert entry is not None
    assert (entry.version, entry.meta, entry.expires_at) == (1, {}, None)
    assert entry.created_revision == entry.revision > 0
    assert entry.created_at == entry.updated_at


async def test_entry_gives_none(store: limpet.Store, elapse: Elapse) -> None:
    """`entry` gives key, value, version, revision, times and meta, or None."""
    await store.put("deleted", 1)
    await store.put("expired", 1, ttl=0.1)
    await store.delete("deleted")
    await elapse(0.2)

    assert [await store.entry(key) for key in ("missing", "deleted", "expired")] == [None] * 3


async def test_every_road_gives_the_same_entry(store: limpet.Store) -> None:
    """`entry` gives key, value, version, revision, times and meta, or None."""
    await store.put("k", 1)
    written = await store.put("k", {"a": 1}, ttl=60, meta={"by": "me"})

    assert await store.entry("k") == written
    assert await drain(store.scan()) == [written]
    assert await drain(store.scan("k", limit=1)) == [written]


# Times ------------------------------------------------------------------------


async def test_times_are_aware_and_utc(store: limpet.Store) -> None:
    """Times are aware datetimes in UTC."""
    await store.put("k", 1, ttl=60)

    entry = await store.entry("k")

    assert entry is not None
    for time in (entry.created_at, entry.updated_at, entry.expires_at):
        assert isinstance(time, datetime.datetime)
        assert time.tzinfo is not None
        assert time.utcoffset() == datetime.timedelta(0)


async def test_times_are_those_of_the_engine(store: limpet.Store) -> None:
    """Times are aware datetimes in UTC."""
    before_ms = (await store.status()).now_ms
    entry = await store.put("k", 1)
    after_ms = (await store.status()).now_ms

    assert before_ms <= round(entry.created_at.timestamp() * 1000) <= after_ms


async def test_times_follow_each_other(store: limpet.Store, elapse: Elapse) -> None:
    """Times are aware datetimes in UTC."""
    times = []
    for number in range(4):
        times.append((await store.put("k", number)).updated_at)
        await elapse(0.02)

    assert times == sorted(set(times))
    assert times[-1] - times[0] >= datetime.timedelta(milliseconds=50)


# Freshness --------------------------------------------------------------------


async def test_a_read_sees_what_another_store_has_just_written(store: limpet.Store, open_store: OpenStore) -> None:
    """A read sees every commit that was acknowledged before it began."""
    other = await open_store()

    for number in range(50):
        written = await other.put("k", number)
        assert await store.get("k") == number
        assert await store.entry("k") == written


async def test_scans_and_pages_see_what_another_store_has_just_written(
    store: limpet.Store, open_store: OpenStore
) -> None:
    """A read sees every commit that was acknowledged before it began."""
    other = await open_store()
    expected: list[str] = []

    for number in range(20):
        await other.put(f"k/{number:02}", number)
        expected.append(f"k/{number:02}")
        assert (await store.keys()).keys == expected
        assert await scan_keys(store) == expected


async def test_a_read_sees_that_a_key_has_ended(store: limpet.Store, open_store: OpenStore) -> None:
    """A read sees every commit that was acknowledged before it began."""
    other = await open_store()

    for number in range(20):
        await other.put("k", number)
        assert await store.get("k") == number
        await other.delete("k")
        assert await store.get("k", "none") == "none"
        assert await scan_keys(store) == []


async def test_a_read_sees_the_whole_of_a_batch(store: limpet.Store, open_store: OpenStore) -> None:
    """A read sees every commit that was acknowledged before it began."""
    other = await open_store()

    for number in range(10):
        await other.batch().put("a", number).put("b", number).put("c", number).commit()
        assert [entry.value for entry in await drain(store.scan())] == [number] * 3


async def test_reads_see_every_one_of_many_writes_at_once(store: limpet.Store, open_store: OpenStore) -> None:
    """A read sees every commit that was acknowledged before it began."""
    other = await open_store()

    async def write_and_read(number: int) -> Any:
        writer, reader = (store, other) if number % 2 else (other, store)
        await writer.put(f"k/{number:03}", number)
        return await reader.get(f"k/{number:03}")

    assert await asyncio.gather(*(write_and_read(number) for number in range(60))) == list(range(60))


async def test_what_is_read_never_goes_back(store: limpet.Store, open_store: OpenStore) -> None:
    """A read sees every commit that was acknowledged before it began."""
    other = await open_store()
    await store.put("k", 0)
    seen: list[int] = []

    async def write() -> None:
        for number in range(1, 60):
            await other.put("k", number)

    async def read() -> None:
        while not seen or seen[-1] < 59:
            seen.append(await store.get("k"))
            await asyncio.sleep(0)

    await asyncio.gather(write(), read())

    assert seen == sorted(seen)


# Scans ------------------------------------------------------------------------


async def test_a_scan_gives_entries_in_key_order(store: limpet.Store) -> None:
    """`scan` gives the entries under a prefix in key order."""
    for key in ("user/b", "user/a", "team/a", "user/", "user", "users", "user/a/b"):
        await store.put(key, key.upper(), meta={"key": key})

    found = await drain(store.scan("user/"))

    assert [entry.key for entry in found] == ["user/", "user/a", "user/a/b", "user/b"]
    assert [entry.value for entry in found] == ["USER/", "USER/A", "USER/A/B", "USER/B"]
    assert [entry.meta for entry in found] == [{"key": entry.key} for entry in found]


async def test_a_scan_gives_whole_entries(store: limpet.Store) -> None:
    """`scan` gives the entries under a prefix in key order."""
    written = [
        await store.put("a", {"json": 1}, ttl=60),
        await store.put("b", b"\0raw", meta={"by": "me"}),
        await store.put("c", limpet.Fields(f=1, g=b"raw")),
        await store.put("d", None),
    ]

    assert await drain(store.scan()) == written


async def test_a_scan_of_nothing_gives_nothing(store: limpet.Store) -> None:
    """`scan` gives the entries under a prefix in key order."""
    assert await drain(store.scan()) == []
    await store.put("a", 1)
    assert await drain(store.scan("b")) == []


async def test_a_scan_gives_nothing_that_has_ended(store: limpet.Store, elapse: Elapse) -> None:
    """`scan` gives the entries under a prefix in key order."""
    await fill(store, ["a", "b", "c"])
    await store.put("d", 1, ttl=0.1)
    await store.delete("b")
    await elapse(0.2)

    assert await scan_keys(store) == ["a", "c"]


async def test_a_scan_may_be_left_early(store: limpet.Store) -> None:
    """`scan` gives the entries under a prefix in key order."""
    await fill(store, [f"k/{number:03}" for number in range(700)])

    async for entry in store.scan():
        assert entry.key == "k/000"
        break

    assert (await store.put("after", 1)).version == 1
    assert await scan_keys(store, limit=2) == ["after", "k/000"]


async def test_two_scans_at_once_do_not_disturb_each_other(store: limpet.Store) -> None:
    """`scan` gives the entries under a prefix in key order."""
    keys = [f"k/{number:03}" for number in range(600)]
    await fill(store, keys)

    first, second = store.scan(), store.scan("k/1")
    pairs = [((await anext(first)).key, (await anext(second)).key) for _ in range(100)]

    assert pairs == list(zip(keys[:100], keys[100:200], strict=True))
    assert [entry.key for entry in await drain(first)] == keys[100:]
    assert await drain(second) == []


async def test_a_scan_of_many_pages_gives_everything_once(store: limpet.Store) -> None:
    """A scan of many pages misses and repeats no entry that did not change meanwhile."""
    keys = [f"k/{number:04}" for number in range(1500)]
    await fill(store, keys)

    assert await scan_keys(store) == keys
    assert await scan_keys(store, "k/1") == keys[1000:]


@pytest.mark.parametrize("count", [499, 500, 501, 999, 1000, 1001])
async def test_a_scan_minds_the_seams_between_pages(store: limpet.Store, count: int) -> None:
    """A scan of many pages misses and repeats no entry that did not change meanwhile."""
    keys = [f"k/{number:04}" for number in range(count)]
    await fill(store, ["j", *keys, "l"])

    assert await scan_keys(store, "k/") == keys


async def test_a_scan_of_large_values_gives_everything_once(store: limpet.Store) -> None:
    """A scan of many pages misses and repeats no entry that did not change meanwhile.

    An engine may end a page by its bytes before it is full.
    """
    values = {f"k/{number:02}": bytes([number]) * 900_000 for number in range(24)}
    for key, value in values.items():
        await store.put(key, value)
    await store.put("k/24", 1)

    found = [(entry.key, entry.value) async for entry in store.scan("k/")]

    assert found == [*values.items(), ("k/24", 1)]
    assert (await store.keys("k/")).count == 25


async def test_a_scan_goes_on_while_others_write(store: limpet.Store, open_store: OpenStore) -> None:
    """A scan of many pages misses and repeats no entry that did not change meanwhile."""
    other = await open_store()
    standing = [f"k/{number:04}/standing" for number in range(1300)]
    await fill(store, standing)
    found: list[str] = []

    async for entry in store.scan():
        found.append(entry.key)
        if len(found) % 100 == 0:
            number = len(found)
            # Before, after, and right next to the position of the scan.
            await other.put(f"k/{number - 50:04}/behind", 1)
            await other.put(f"k/{number + 650:04}/ahead", 1)
            await other.put(f"{entry.key}/beside", 1)
            await other.delete(f"k/{number - 150:04}/behind")
            await other.delete(f"k/{number + 550:04}/ahead")

    assert found == sorted(set(found))
    assert [key for key in found if key.endswith("standing")] == standing


async def test_a_scan_goes_on_when_the_ground_under_it_is_deleted(store: limpet.Store, open_store: OpenStore) -> None:
    """A scan of many pages misses and repeats no entry that did not change meanwhile."""
    other = await open_store()
    keys = [f"k/{number:04}" for number in range(1200)]
    await fill(store, keys)
    standing = keys[1::2]
    found: list[str] = []

    async for entry in store.scan():
        found.append(entry.key)
        if len(found) == 250:
            for start in range(0, 1200, 200):
                batch = other.batch()
                for key in keys[start : start + 200 : 2]:
                    batch = batch.delete(key)
                await batch.commit()

    assert found == sorted(set(found))
    assert [key for key in found if key in set(standing)] == standing


async def test_what_is_written_again_is_not_repeated(store: limpet.Store, open_store: OpenStore) -> None:
    """A scan of many pages misses and repeats no entry that did not change meanwhile."""
    other = await open_store()
    keys = [f"k/{number:04}" for number in range(1100)]
    await fill(store, keys)
    found: list[str] = []

    async for entry in store.scan():
        found.append(entry.key)
        if len(found) % 50 == 0:
            await other.put(entry.key, "again")
            await other.put(keys[0], "again")
            await other.put(keys[-1], "again")

    assert found == keys


async def test_a_scan_can_be_limited(store: limpet.Store) -> None:
    """A scan can be limited, and can go on after a key."""
    keys = [f"k/{number}" for number in range(5)]
    await fill(store, [*keys, "l"])

    for limit in (1, 4, 5, 6):
        assert await scan_keys(store, "k/", limit=limit) == keys[:limit]


async def test_a_limit_reaches_over_pages(store: limpet.Store) -> None:
    """A scan can be limited, and can go on after a key."""
    keys = [f"k/{number:04}" for number in range(1100)]
    await fill(store, keys)

    for limit in (499, 500, 501, 1000, 1001, 1099):
        assert await scan_keys(store, limit=limit) == keys[:limit]


@pytest.mark.refused_early
@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "5"])
async def test_a_limit_below_one_is_refused(store: limpet.Store, limit: Any) -> None:
    """A scan can be limited, and can go on after a key."""
    with pytest.raises(InvalidValue):
        await scan_keys(store, limit=limit)


async def test_a_scan_can_go_on_after_a_key(store: limpet.Store) -> None:
    """A scan can be limited, and can go on after a key."""
    await fill(store, ["a", "k/a", "k/b", "k/c", "z"])

    assert await scan_keys(store, after="k/a") == ["k/b", "k/c", "z"]
    assert await scan_keys(store, "k/", after="k/a") == ["k/b", "k/c"]
    assert await scan_keys(store, "k/", after="k/a", limit=1) == ["k/b"]
    assert await scan_keys(store, "k/", after="k/c") == []


async def test_a_scan_can_go_on_after_a_key_that_is_not_there(store: limpet.Store) -> None:
    """A scan can be limited, and can go on after a key."""
    await fill(store, ["k/a", "k/c", "k/c\x01"])
    await store.put("k/b", 1)
    await store.delete("k/b")

    assert await scan_keys(store, "k/", after="k/b") == ["k/c", "k/c\x01"]
    assert await scan_keys(store, "k/", after="k/c") == ["k/c\x01"]
    assert await scan_keys(store, "k/", after="a") == ["k/a", "k/c", "k/c\x01"]
    assert await scan_keys(store, "k/", after="z") == []


async def test_a_scan_in_parts_is_the_whole_scan(store: limpet.Store) -> None:
    """A scan can be limited, and can go on after a key."""
    await fill(store, [f"k/{number:02}" for number in range(20)])
    whole = await drain(store.scan("k/"))

    for size in (1, 3, 10, 20):
        parts: list[Any] = []
        while part := await drain(store.scan("k/", limit=size, after=parts[-1].key if parts else None)):
            parts += part
        assert parts == whole


# In reverse -------------------------------------------------------------------


async def test_a_scan_in_reverse_begins_with_the_last_key(store: limpet.Store) -> None:
    """With `reverse`, `scan` and `keys` give the last keys first, and go on before the key given as `after`."""
    await fill(store, ["a", "k/a", "k/b", "k/c", "z"])

    assert await scan_keys(store, "k/", reverse=True) == ["k/c", "k/b", "k/a"]
    assert await scan_keys(store, "k/", reverse=True, after="k/b") == ["k/a"]
    assert await scan_keys(store, "k/", reverse=True, after="k/bb") == ["k/b", "k/a"]
    assert await scan_keys(store, "k/", reverse=True, after="z") == ["k/c", "k/b", "k/a"]
    assert await scan_keys(store, "k/", reverse=True, after="a") == []
    assert await scan_keys(store, "k/", reverse=True, limit=1) == ["k/c"]
    page = await store.keys("k/", limit=2, reverse=True)
    assert page == limpet.Page(["k/c", "k/b"], True, "k/b")
    assert await store.keys("k/", limit=2, reverse=True, after=page.cursor) == limpet.Page(["k/a"], False, None)


async def test_both_directions_agree_with_sorting(store: limpet.Store) -> None:
    """With `reverse`, `scan` and `keys` give the last keys first, and go on before the key given as `after`."""
    random = Random(11)
    letters = "ab/*é\x01\x7f\ud7ff\ue000\U0001f600\U0010ffff"
    keys = sorted({"".join(random.choices(letters, k=random.randint(1, 4))) for _ in range(300)})
    await fill(store, keys)

    for _ in range(60):
        prefix = "".join(random.choices(letters, k=random.choice((0, 0, 1, 2))))
        after = random.choice((None, None, random.choice(keys), prefix + "b", "".join(random.choices(letters, k=2))))
        limit, reverse = random.choice((1, 2, 7, 400)), random.random() < 0.6
        expected = [
            key
            for key in sorted(keys, reverse=reverse)
            if key.startswith(prefix) and (after is None or (key < after if reverse else key > after))
        ]
        page = await store.keys(prefix, limit=limit, after=after, reverse=reverse)
        assert page.keys == expected[:limit], (prefix, after, limit, reverse)
        assert (page.truncated, page.cursor) == (
            (True, expected[limit - 1]) if len(expected) > limit else (False, None)
        )
        assert await scan_keys(store, prefix, limit=limit, after=after, reverse=reverse) == expected[:limit]


async def test_a_scan_of_many_pages_in_reverse_is_whole(store: limpet.Store) -> None:
    """A scan of many pages misses and repeats no entry that did not change meanwhile."""
    keys = [f"k/{number:04}" for number in range(1100)]
    await fill(store, keys)
    found: list[str] = []

    async for entry in store.scan(reverse=True):
        found.append(entry.key)
        if len(found) % 200 == 0:
            await store.put(keys[0], "again")
            await store.put(f"{entry.key}/behind", 1)

    assert found == keys[::-1]


async def test_a_filtered_scan_in_reverse_has_the_same_matches(store: limpet.Store) -> None:
    """With `reverse`, `scan` and `keys` give the last keys first, and go on before the key given as `after`."""
    batch = store.batch()
    for number in range(100):
        batch = batch.put(f"k/{number:02}", {"n": number % 10})
    await batch.commit()
    expected = [f"k/{number:02}" for number in range(100) if number % 10 == 3]

    for indexed in (False, True):
        if indexed and not store.traits.encrypted:
            await store.index("n")
        where = limpet.field("n") == 3
        assert await scan_keys(store, where=where, reverse=True) == expected[::-1]
        assert await scan_keys(store, where=where, reverse=True, limit=3, after="k/83") == expected[5:8][::-1]


@pytest.mark.refused_early
@pytest.mark.parametrize("reverse", [None, 1, "yes"])
async def test_reverse_is_true_or_false(store: limpet.Store, reverse: Any) -> None:
    """With `reverse`, `scan` and `keys` give the last keys first, and go on before the key given as `after`."""
    for call in (store.keys(reverse=reverse), scan_keys(store, reverse=reverse)):
        with pytest.raises(InvalidValue):
            await call
