"""Time: how long an entry lives, and how it ends.

Where the engine uses our clock, these tests set it to the millisecond. Where the clock is a server's they wait,
and only check that an entry exists well before it expires and is gone well after.
"""

# ruff: noqa: D403 - a docstring here is a line of the contract, and some of those begin with the name of a verb.

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

import limpet
from limpet.conformance.support import (
    PATIENCE_S,
    fail,
    next_event,
    session_of,
    stands_still,
)
from limpet.errors import Conflict, Corrupt, InvalidTTL, LimpetError, LockLost, NotFound, Unavailable
from limpet.model import Batch

if TYPE_CHECKING:
    from limpet.conformance.conftest import Elapse, OpenStore, SetBack

MS = timedelta(milliseconds=1)


@pytest_asyncio.fixture(loop_scope="module")
async def store(open_store: OpenStore) -> limpet.Store:
    """A store without a sweeper in the background: what expired stays unswept until a test sweeps it."""
    return await open_store(sweep=False)


async def all_keys(store: limpet.Store) -> list[str]:
    """All keys of the store."""
    return (await store.keys()).keys


async def put_many(store: limpet.Store, count: int, ttl: float) -> list[str]:
    """Put many entries that expire at the same moment. Returns their keys."""
    keys = [f"{number:04}" for number in range(count)]
    for start in range(0, count, 128):
        draft = store.batch()
        for key in keys[start : start + 128]:
            draft.put(key, 1, ttl=ttl)
        await draft.commit()
    return keys


async def events_until_now(store: limpet.Store, watch: limpet.Watch) -> list[limpet.Event]:
    """The events of a watch for all that happened so far."""
    await store.put("~now", None)
    events: list[limpet.Event] = []
    while (event := await next_event(watch)).key != "~now":
        events.append(event)
    return events


async def asleep(store: limpet.Store, clock: limpet.ManualClock, count: int) -> None:
    """Wait until so many background sweepers sleep, so that advancing the clock wakes them."""
    deadline = time.monotonic() + PATIENCE_S
    while stands_still(store) and clock.sleepers < count:
        assert time.monotonic() < deadline, "the sweeper does not run"
        await asyncio.sleep(0.001)


# How long ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ttl", "lives"),
    [
        (1, timedelta(seconds=1)),
        (3600, timedelta(hours=1)),
        (1.5, timedelta(milliseconds=1500)),
        (0.25, timedelta(milliseconds=250)),
        (timedelta(seconds=2), timedelta(seconds=2)),
        (timedelta(days=365, milliseconds=1), timedelta(days=365, milliseconds=1)),
        (10 * 365 * 86_400, timedelta(days=3650)),
    ],
    ids=str,
)
async def test_a_time_to_live_counts_from_the_write(store: limpet.Store, ttl: Any, lives: timedelta) -> None:
    """A time to live is seconds as int or float, or a timedelta; None is never."""
    entry = await store.put("key", 1, ttl=ttl)

    assert entry.expires_at == entry.updated_at + lives
    assert entry.expires_at.tzinfo is UTC
    assert await store.entry("key") == entry


async def test_none_is_never(store: limpet.Store, elapse: Elapse) -> None:
    """A time to live is seconds as int or float, or a timedelta; None is never."""
    entries = [await store.put("put", 1), await store.put("none", 1, ttl=None), await store.create("create", 1)]
    await elapse(3)

    assert [entry.expires_at for entry in entries] == [None] * 3
    assert await store.sweep() == 0
    assert await all_keys(store) == ["create", "none", "put"]


async def test_every_write_that_makes_a_key_takes_a_time_to_live(store: limpet.Store) -> None:
    """A time to live is seconds as int or float, or a timedelta; None is never."""
    minute = timedelta(minutes=1)
    await store.put("put", 1, ttl=60)
    await store.create("create", 1, ttl=60.0)
    await store.add("add", ttl=minute)
    await store.update("update", lambda _: 1, ttl=60)
    await store.record("record").put({"a": 1}, ttl=minute)
    await store.batch().put("batch put", 1, ttl=60).add("batch add", ttl=60).set("batch set", {"a": 1}, ttl=60).commit()

    lives = {entry.key: entry.expires_at and entry.expires_at - entry.created_at async for entry in store.scan()}

    assert lives == dict.fromkeys(
        ["put", "create", "add", "update", "record", "batch put", "batch add", "batch set"], minute
    )


NO_TTL: dict[str, Any] = {
    "zero": 0,
    "zero float": 0.0,
    "minus zero": -0.0,
    "zero timedelta": timedelta(0),
    "negative": -1,
    "a little negative": -0.0001,
    "negative timedelta": timedelta(milliseconds=-1),
    "far below": -(10**400),
    "true": True,
    "false": False,
    "nan": math.nan,
    "infinite": math.inf,
    "minus infinite": -math.inf,
    "beyond every float": 10**400,
    "str": "60",
    "bytes": b"60",
    "decimal": Decimal(60),
    "fraction": Fraction(60),
    "complex": 60 + 0j,
    "list": [60],
    "absent": limpet.ABSENT,
    "object": {},
}

every_wrong_ttl = pytest.mark.parametrize("ttl", NO_TTL.values(), ids=NO_TTL.keys())


async def test_a_time_to_live_ends_at_a_hundred_years(store: limpet.Store) -> None:
    """A time to live is at most 100 years; more is InvalidTTL."""
    century = 100 * 365 * 86_400
    kept = await store.put("kept", 1, ttl=century)

    with pytest.raises(InvalidTTL):
        await store.put("refused", 1, ttl=century * 2)

    assert kept.expires_at is not None
    assert await store.get("refused") is None


@every_wrong_ttl
async def test_a_put_with_a_wrong_time_to_live_does_nothing(store: limpet.Store, ttl: Any) -> None:
    """Zero, negative, bool, NaN, infinite and other types are InvalidTTL."""
    before = await store.put("key", 1, ttl=600)

    with pytest.raises(InvalidTTL):
        await store.put("key", 2, ttl=ttl)
    with pytest.raises(InvalidTTL):
        await store.create("new", 2, ttl=ttl)

    assert [entry async for entry in store.scan()] == [before]


@every_wrong_ttl
async def test_every_other_verb_refuses_a_wrong_time_to_live(store: limpet.Store, ttl: Any) -> None:
    """Zero, negative, bool, NaN, infinite and other types are InvalidTTL."""
    count = await store.put("count", 1, ttl=600)
    record = await store.record("record").put({"a": 1}, ttl=600)
    revision = (await store.status()).revision

    with pytest.raises(InvalidTTL):
        await store.touch("count", ttl)
    with pytest.raises(InvalidTTL):
        await store.add("count", ttl=ttl)
    with pytest.raises(InvalidTTL):
        await store.update("count", lambda _: 2, ttl=ttl)
    with pytest.raises(InvalidTTL):
        await store.record("record").put({"a": 2}, ttl=ttl)
    with pytest.raises(InvalidTTL):
        await store.record("record").swap("a", 1, 2, ttl=ttl)
    with pytest.raises(InvalidTTL):
        store.batch().put("new", 1, ttl=ttl)

    assert [entry async for entry in store.scan()] == [count, record]
    assert (await store.status()).revision == revision


async def test_a_touch_to_keep_is_no_time_to_live(store: limpet.Store) -> None:
    """Zero, negative, bool, NaN, infinite and other types are InvalidTTL."""
    keep: Any = limpet.KEEP
    before = await store.put("key", 1, ttl=600)

    with pytest.raises(InvalidTTL):
        await store.touch("key", keep)

    assert await store.entry("key") == before


@pytest.mark.parametrize(
    ("ttl", "lives_ms"),
    [
        (0.0001, 1),
        (1e-9, 1),
        (5e-324, 1),
        (0.001, 1),
        (0.0010001, 2),
        (0.0011, 2),
        (0.9999, 1000),
        (0.07, 70),
        (1.001, 1001),
        (2.007, 2007),
        (4.35, 4350),
        (1.0001, 1001),
        (timedelta(microseconds=1), 1),
        (timedelta(microseconds=1001), 2),
        (timedelta(milliseconds=2), 2),
        (timedelta(days=30, microseconds=1), 30 * 86_400_000 + 1),
    ],
    ids=str,
)
async def test_a_time_to_live_rounds_up_to_a_millisecond(store: limpet.Store, ttl: Any, lives_ms: int) -> None:
    """A time to live has a resolution of 1 ms and rounds up, never early.

    2.007 * 1000 is a little more than 2007, which is a rounding error of floats and not a longer time to live.
    """
    entry = await store.put("key", 1, ttl=ttl)

    assert entry.expires_at == entry.updated_at + lives_ms * MS


async def test_the_shortest_life_is_a_millisecond(store: limpet.Store, elapse: Elapse) -> None:
    """A time to live has a resolution of 1 ms and rounds up, never early."""
    await store.put("key", 1, ttl=0.0001)
    # On a clock that stands still the entry is there; on a server's it may be gone already.
    if stands_still(store):
        assert await store.get("key") == 1

    await elapse(0.001)

    assert await store.get("key") is None


async def test_a_touch_rounds_up_as_well(store: limpet.Store, elapse: Elapse) -> None:
    """A time to live has a resolution of 1 ms and rounds up, never early."""
    before = await store.put("key", 1)
    await elapse(0.05)

    touched = await store.touch("key", 100.0001)

    assert touched is not None
    assert touched.expires_at is not None
    assert touched.expires_at >= before.updated_at + timedelta(seconds=100, milliseconds=51)
    assert touched.expires_at.microsecond % 1000 == 0


# The moment -------------------------------------------------------------------


async def test_an_entry_ends_at_its_moment(store: limpet.Store, elapse: Elapse) -> None:
    """An entry is there until its expiry time and absent from that time on."""
    exact = stands_still(store)
    entry = await store.put("key", 1, ttl=2)

    await elapse(1.999 if exact else 0.5)
    assert await store.entry("key") == entry

    await elapse(0.001 if exact else 2.0)
    assert await store.entry("key") is None


async def test_each_entry_has_its_own_moment(store: limpet.Store, elapse: Elapse) -> None:
    """An entry is there until its expiry time and absent from that time on."""
    for number in range(1, 6):
        await store.put(f"{number}", 1, ttl=number * 0.6)
    await store.put("never", 1)

    for number in range(1, 6):
        await elapse(0.6)
        assert f"{number}" not in await all_keys(store)
        if stands_still(store):
            assert await all_keys(store) == [*(str(later) for later in range(number + 1, 6)), "never"]

    assert await all_keys(store) == ["never"]


async def test_a_counter_starts_anew_after_its_moment(store: limpet.Store, elapse: Elapse) -> None:
    """An entry is there until its expiry time and absent from that time on.

    A counter with a time to live is a window: the new one keeps nothing of the old one, not even its ttl.
    """
    assert await store.add("hits", 5, ttl=0.2, meta={"window": 1}) == 5
    await elapse(0.25)

    assert await store.add("hits", 2) == 2

    entry = await store.entry("hits")
    assert entry is not None
    assert (entry.version, entry.expires_at, entry.meta) == (1, None, {})


async def test_an_expired_value_of_another_kind_is_in_nobodys_way(store: limpet.Store, elapse: Elapse) -> None:
    """An entry is there until its expiry time and absent from that time on."""
    for key in ("add", "set"):
        await store.put(key, "text", ttl=0.2)
    await elapse(0.25)

    assert await store.add("add") == 1
    assert (await store.record("set").set(a=1)).value == {"a": 1}


async def test_there_is_nothing_to_end_after_the_moment(store: limpet.Store, elapse: Elapse) -> None:
    """An entry is there until its expiry time and absent from that time on."""
    await store.put("delete", 1, ttl=0.2)
    await store.put("take", 1, ttl=0.2)
    await elapse(0.25)
    revision = (await store.status()).revision

    assert await store.delete("delete") is False
    assert await store.take("take", "default") == "default"
    commit = await store.batch().delete("delete").take("take").commit()

    assert (commit.entries, commit.ended) == ((None, None), (None, None))
    assert (await store.status()).revision == revision


async def test_update_finds_nothing_after_the_moment(store: limpet.Store, elapse: Elapse) -> None:
    """An entry is there until its expiry time and absent from that time on."""
    await store.put("key", "old", ttl=0.2)
    await elapse(0.25)
    found: list[Any] = []

    def change(value: Any) -> str:
        found.append(value)
        return "new"

    entry = await store.update("key", change)

    assert found == [None]
    assert entry is not None
    assert (entry.version, entry.value, entry.expires_at) == (1, "new", None)


async def test_field_writes_find_no_record_after_the_moment(store: limpet.Store, elapse: Elapse) -> None:
    """An entry is there until its expiry time and absent from that time on."""
    for key in ("set", "swap", "strict", "read"):
        await store.record(key).put({"old": 1}, ttl=0.2)
    await elapse(0.25)

    assert await store.record("swap").swap("old", 1, 2) is False
    with pytest.raises(NotFound):
        await store.record("strict").set(new=1, if_exists=True)
    assert await store.record("read").fields() is None
    entry = await store.record("set").set(new=1)

    assert (entry.version, entry.value, entry.expires_at) == (1, {"new": 1}, None)
    assert await all_keys(store) == ["set"]


async def test_a_new_life_has_its_own_beginning(store: limpet.Store, elapse: Elapse) -> None:
    """An entry is there until its expiry time and absent from that time on."""
    first = await store.put("key", 1, ttl=0.2)
    await elapse(0.25)

    second = await store.put("key", 1)

    assert second.version == 1
    assert second.created_revision == second.revision > first.revision
    assert second.created_at >= first.created_at + timedelta(milliseconds=200)


# Expired is absent ------------------------------------------------------------


@pytest_asyncio.fixture(params=["unswept", "swept"], loop_scope="module")
async def expired(request: pytest.FixtureRequest, store: limpet.Store, elapse: Elapse) -> list[str]:
    """The keys b and d of a to e have expired, and were swept or not."""
    for key in "abcde":
        await store.put(f"key {key}", {"n": 1}, ttl=0.2 if key in "bd" else None)
    await elapse(0.25)
    if request.param == "swept":
        await store.sweep()
    return ["key b", "key d"]


async def test_get_and_entry_find_no_expired_key(store: limpet.Store, expired: list[str]) -> None:
    """An expired entry is absent at once: for get, entry, keys and scan, swept or not."""
    for key in expired:
        assert await store.get(key, "default") == "default"
        assert await store.entry(key) is None


async def test_keys_lists_no_expired_key(store: limpet.Store, expired: list[str]) -> None:
    """An expired entry is absent at once: for get, entry, keys and scan, swept or not."""
    page = await store.keys()

    assert (page.keys, page.count, page.truncated) == (["key a", "key c", "key e"], 3, False)
    assert (await store.keys(expired[0])).keys == []


async def test_expired_keys_take_no_place_on_a_page(store: limpet.Store, expired: list[str]) -> None:
    """An expired entry is absent at once: for get, entry, keys and scan, swept or not.

    They are not among the keys of a page, and do not make it report that more follow.
    """
    await store.delete("key e")

    first = await store.keys(limit=1)
    second = await store.keys(limit=1, after=first.cursor)

    assert (first.keys, first.truncated) == (["key a"], True)
    assert (second.keys, second.truncated) == (["key c"], False)
    assert (await store.keys(after=expired[0])).keys == ["key c"]


async def test_scan_finds_no_expired_key(store: limpet.Store, expired: list[str]) -> None:
    """An expired entry is absent at once: for get, entry, keys and scan, swept or not."""
    assert [entry.key async for entry in store.scan()] == ["key a", "key c", "key e"]
    assert [entry.key async for entry in store.scan(limit=2)] == ["key a", "key c"]
    assert [entry.key async for entry in store.scan(after=expired[0])] == ["key c", "key e"]


async def test_a_filtered_scan_finds_no_expired_key(store: limpet.Store, expired: list[str]) -> None:
    """An expired entry is absent at once: for get, entry, keys and scan, swept or not."""
    n = limpet.field("n")

    for where in (n == 1, n != 2, n.exists(), n >= 0, n.in_([1]), n.not_in([])):
        found = [entry.key async for entry in store.scan(where=where)]
        assert (found, set(found) & set(expired)) == (["key a", "key c", "key e"], set())


async def test_another_store_finds_no_expired_key(
    store: limpet.Store, open_store: OpenStore, expired: list[str]
) -> None:
    """An expired entry is absent at once: for get, entry, keys and scan, swept or not."""
    other = await open_store(sweep=False)

    assert await all_keys(other) == await all_keys(store) == ["key a", "key c", "key e"]
    assert [await other.get(key) for key in expired] == [None, None]


async def test_thousands_of_expired_keys_hide_nothing(store: limpet.Store, elapse: Elapse) -> None:
    """An expired entry is absent at once: for get, entry, keys and scan, swept or not."""
    await put_many(store, 1200, ttl=2)
    await store.put("0600 and alive", 1)
    await elapse(2.1)

    assert await all_keys(store) == ["0600 and alive"]
    assert [entry.key async for entry in store.scan()] == ["0600 and alive"]


async def test_no_guard_but_absence_holds_for_an_expired_key(store: limpet.Store, expired: list[str]) -> None:
    """An expired entry is absent for every guard and for create."""
    latest = (await store.status()).revision
    guards: list[Any] = [
        limpet.PRESENT,
        limpet.Version(1),
        limpet.equals({"n": 1}),
        limpet.field("n") == 1,
        *(limpet.Revision(number) for number in range(max(0, latest - 30), latest + 2)),
    ]
    for key in expired:
        for guard in guards:
            with pytest.raises(Conflict) as refused:
                await store.batch().expect(key, guard).put("written", 1).commit()
            assert (refused.value.key, refused.value.current) == (key, None)

        await store.batch().expect(key, limpet.ABSENT).expect(key, None).commit()

    assert await store.entry("written") is None


async def test_the_remaining_time_becomes_less(store: limpet.Store, elapse: Elapse) -> None:
    """`remaining` gives the seconds until a key expires, by the time of the store; None when it never does."""
    await store.put("short", 1, ttl=30)
    await store.put("lasting", 1)

    before = await store.remaining("short")
    await elapse(0.25)
    after = await store.remaining("short")
    await store.touch("short", 60)
    touched = await store.remaining("short")

    assert before is not None
    assert after is not None
    assert touched is not None
    assert after + 0.25 <= before <= 30 < touched <= 60
    assert await store.remaining("lasting") is None


async def test_nothing_remains_of_what_is_absent(store: limpet.Store, elapse: Elapse) -> None:
    """`remaining` of a key that is absent, or has expired, is 0.0."""
    await store.put("key", 1, ttl=0.1)
    await elapse(0.15)

    assert [await store.remaining(key) for key in ("key", "never was")] == [0.0, 0.0]


async def test_create_finds_no_expired_key(store: limpet.Store, expired: list[str]) -> None:
    """An expired entry is absent for every guard and for create."""
    for key in expired:
        entry = await store.create(key, "new")

        assert (entry.version, entry.value, entry.expires_at) == (1, "new", None)
        with pytest.raises(Conflict):
            await store.create(key, "late")


async def test_of_all_who_create_an_expired_key_one_succeeds(store: limpet.Store, expired: list[str]) -> None:
    """An expired entry is absent for every guard and for create."""
    answers = await asyncio.gather(*(store.create(expired[0], n) for n in range(12)), return_exceptions=True)

    made = [answer for answer in answers if isinstance(answer, limpet.Entry)]
    assert [type(answer) for answer in answers if answer not in made] == [Conflict] * 11
    assert [await store.entry(expired[0])] == made


async def test_a_key_can_be_created_from_its_moment_on(store: limpet.Store, elapse: Elapse) -> None:
    """An expired entry is absent for every guard and for create."""
    exact = stands_still(store)
    await store.create("key", "first", ttl=2)

    await elapse(1.999 if exact else 0.5)
    with pytest.raises(Conflict):
        await store.create("key", "early")
    await elapse(0.001 if exact else 2.0)

    assert (await store.create("key", "second")).version == 1


# What each verb does to it ----------------------------------------------------


async def test_put_replaces_the_ttl(store: limpet.Store, elapse: Elapse) -> None:
    """put with a ttl replaces it, and without one removes it."""
    await store.put("longer", 1, ttl=0.2)
    await store.put("shorter", 1, ttl=600)

    longer, shorter = await store.put("longer", 2, ttl=600), await store.put("shorter", 2, ttl=0.2)
    await elapse(0.25)

    assert longer.expires_at == longer.updated_at + timedelta(seconds=600)
    assert shorter.expires_at == shorter.updated_at + timedelta(seconds=0.2)
    assert await all_keys(store) == ["longer"]


async def test_put_counts_the_new_ttl_from_now(store: limpet.Store, elapse: Elapse) -> None:
    """put with a ttl replaces it, and without one removes it."""
    before = await store.put("key", 1, ttl=60)
    await elapse(0.1)

    after = await store.put("key", 1, ttl=60)

    assert before.expires_at is not None
    assert after.expires_at is not None
    assert after.expires_at >= before.expires_at + timedelta(milliseconds=100)
    assert after.expires_at == after.updated_at + timedelta(seconds=60)


async def test_put_removes_the_ttl(store: limpet.Store, elapse: Elapse) -> None:
    """put with a ttl replaces it, and without one removes it."""
    for key in ("put", "none", "record", "batch"):
        await store.put(key, limpet.Fields(a=1), ttl=2)

    await store.put("put", 2)
    await store.put("none", 2, ttl=None)
    await store.record("record").put({"a": 2})
    await store.batch().put("batch", 2).commit()
    await elapse(2.1)

    assert {entry.key: entry.expires_at async for entry in store.scan()} == dict.fromkeys(
        ["batch", "none", "put", "record"]
    )


async def test_keep_keeps_the_ttl(store: limpet.Store, elapse: Elapse) -> None:
    """put with KEEP keeps the ttl."""
    before = await store.put("key", 1, ttl=600)
    await elapse(0.05)

    after = await store.put("key", 2, ttl=limpet.KEEP)
    again = await store.batch().put("key", limpet.Fields(), ttl=limpet.KEEP).commit()

    assert (after.value, after.version, after.expires_at) == (2, 2, before.expires_at)
    assert after.updated_at > before.updated_at
    assert [entry and entry.expires_at for entry in again.entries] == [before.expires_at]


async def test_an_entry_that_was_kept_ends_at_its_old_moment(store: limpet.Store, elapse: Elapse) -> None:
    """put with KEEP keeps the ttl."""
    await store.put("key", 1, ttl=2)
    await elapse(0.5)
    await store.put("key", 2, ttl=limpet.KEEP)

    await elapse(1.5)

    assert await store.get("key") is None
    assert await store.sweep() == 1


async def test_there_is_nothing_to_keep_for_a_new_key(store: limpet.Store, elapse: Elapse) -> None:
    """put with KEEP keeps the ttl.

    The new entry must not get the expiry of the old one: it would be gone at once.
    """
    await store.put("expired", 1, ttl=0.2)
    await store.put("deleted", 1, ttl=600)
    await store.delete("deleted")
    await store.put("forever", 1)
    await elapse(0.25)

    entries = [await store.put(key, 2, ttl=limpet.KEEP) for key in ("new", "expired", "deleted", "forever")]

    assert [entry.expires_at for entry in entries] == [None] * 4
    assert len(await all_keys(store)) == 4


KeepingWrite = Callable[[limpet.Store], Awaitable[object]]

KEEPING: dict[str, KeepingWrite] = {
    "add": lambda store: store.add("count"),
    "add zero": lambda store: store.add("count", 0),
    "update": lambda store: store.update("count", lambda value: value + 1),
    "set": lambda store: store.record("record").set(b=1),
    "unset": lambda store: store.record("record").set(unset=["a"]),
    "swap": lambda store: store.record("record").swap("a", 1, 2),
    "update of a record": lambda store: store.update("record", lambda fields: fields),
    "batch add": lambda store: store.batch().add("count").commit(),
    "batch set": lambda store: store.batch().set("record", {"b": 1}).commit(),
    "batch swap": lambda store: store.batch().swap("record", "a", 1, 2).commit(),
}

every_keeping_write = pytest.mark.parametrize("write", KEEPING.values(), ids=KEEPING.keys())


@every_keeping_write
async def test_changing_a_value_keeps_the_ttl(store: limpet.Store, elapse: Elapse, write: KeepingWrite) -> None:
    """add, set, swap and update keep the ttl."""
    before = {
        "count": await store.put("count", 1, ttl=600),
        "record": await store.record("record").put({"a": 1}, ttl=600),
    }
    await elapse(0.05)

    await write(store)

    (changed,) = [entry async for entry in store.scan() if entry != before[entry.key]]
    assert (changed.version, changed.expires_at) == (2, before[changed.key].expires_at)


@every_keeping_write
async def test_changing_a_value_without_a_ttl_gives_it_none(store: limpet.Store, write: KeepingWrite) -> None:
    """add, set, swap and update keep the ttl."""
    await store.put("count", 1)
    await store.record("record").put({"a": 1})

    await write(store)

    assert [entry.expires_at async for entry in store.scan()] == [None, None]


async def test_a_counter_that_counts_still_ends_at_its_moment(store: limpet.Store, elapse: Elapse) -> None:
    """add, set, swap and update keep the ttl.

    Otherwise a rate limit that is hit all the time would never be lifted.
    """
    await store.add("hits", ttl=2)
    for _ in range(3):
        await elapse(0.5)
        await store.add("hits")
    await elapse(0.5)

    assert await store.get("hits") is None
    assert await store.add("hits") == 1


async def test_a_verb_that_is_given_a_ttl_sets_it(store: limpet.Store) -> None:
    """add, set, swap and update keep the ttl.

    Unless the call gives one: each of them takes a new ttl, or None for never.
    """
    minute = timedelta(minutes=1)
    for ttl, lives in ((60, minute), (None, None)):
        await store.put("count", 1, ttl=600)
        await store.put("value", 1, ttl=600)
        await store.record("record").put({"a": 1}, ttl=600)

        await store.add("count", ttl=ttl)
        await store.update("value", lambda value: value, ttl=ttl)
        await store.record("record").swap("a", 1, 2, ttl=ttl)

        async for entry in store.scan():
            assert (entry.expires_at and entry.expires_at - entry.updated_at) == lives


# Touch and persist ------------------------------------------------------------


@pytest.mark.parametrize("value", [None, 1, b"\0raw", limpet.Fields(a=1, b=b"\xff")], ids=repr)
async def test_touch_changes_only_the_ttl(store: limpet.Store, elapse: Elapse, value: object) -> None:
    """touch changes only the ttl: new revision, same version, same value, same times."""
    await store.put("key", value, meta={"by": "me"})
    before = await store.put("key", value, meta={"by": "me"}, ttl=60)
    await elapse(0.1)

    after = await store.touch("key", 600)

    assert after is not None
    assert await store.entry("key") == after
    assert after.revision > before.revision
    assert after.expires_at is not None
    assert after.expires_at >= before.updated_at + timedelta(seconds=600.1)
    same = ("key", "version", "value", "kind", "meta", "created_revision", "created_at", "updated_at")
    assert [getattr(after, name) for name in same] == [getattr(before, name) for name in same]


async def test_touch_moves_the_moment_both_ways(store: limpet.Store, elapse: Elapse) -> None:
    """touch changes only the ttl: new revision, same version, same value, same times."""
    await store.put("longer", 1, ttl=2)
    await store.put("shorter", 1, ttl=600)
    await store.put("first", 1)
    await store.put("beat", 1, ttl=2)

    await store.touch("longer", 600)
    await store.touch("shorter", 2)
    await store.touch("first", 2)
    for _ in range(3):
        await elapse(0.7)
        await store.touch("beat", 2)

    assert await all_keys(store) == ["beat", "longer"]


async def test_touch_is_one_change(store: limpet.Store) -> None:
    """touch changes only the ttl: new revision, same version, same value, same times."""
    await store.put("key", 1)
    async with store.watch() as watch:
        touched = await store.touch("key", 60)
        events = await events_until_now(store, watch)

    assert touched is not None
    assert [(event.op, event.key, event.revision) for event in events] == [("touch", "key", touched.revision)]


async def test_the_write_after_a_touch_counts_on(store: limpet.Store) -> None:
    """touch changes only the ttl: new revision, same version, same value, same times."""
    await store.put("key", 1)
    for _ in range(3):
        await store.touch("key", 60)

    after = await store.put("key", 2)

    assert after.version == 2


async def test_a_record_is_touched_as_a_whole(store: limpet.Store) -> None:
    """touch changes only the ttl: new revision, same version, same value, same times."""
    before = await store.record("key").put({"a": 1})

    after = await store.record("key").touch(60)

    assert after is not None
    assert (after.version, after.value, after.updated_at) == (1, {"a": 1}, before.updated_at)
    assert after.expires_at is not None


async def test_persist_removes_the_ttl(store: limpet.Store, elapse: Elapse) -> None:
    """persist removes the ttl."""
    before = await store.put("key", 1, ttl=2, meta={"by": "me"})

    after = await store.persist("key")
    await elapse(2.1)

    assert after is not None
    assert (after.expires_at, after.version, after.value, after.meta) == (None, 1, 1, {"by": "me"})
    assert after.updated_at == before.updated_at
    assert await store.sweep() == 0
    assert await store.entry("key") == after


async def test_touch_with_none_is_persist(store: limpet.Store, elapse: Elapse) -> None:
    """persist removes the ttl."""
    for key in ("touch", "record", "batch"):
        await store.record(key).put({"a": 1}, ttl=2)

    await store.touch("touch", None)
    await store.record("record").touch(None)
    await store.batch().touch("batch", None).commit()
    await elapse(2.1)

    assert {entry.key: entry.expires_at async for entry in store.scan()} == dict.fromkeys(["batch", "record", "touch"])


async def test_what_never_expires_can_be_persisted(store: limpet.Store) -> None:
    """persist removes the ttl."""
    before = await store.put("key", 1)

    after = await store.persist("key")

    assert after is not None
    assert (after.expires_at, after.version, after.value) == (None, before.version, before.value)


async def test_a_missing_key_cannot_be_touched(store: limpet.Store) -> None:
    """touch and persist of a missing key give None and change nothing."""
    await store.put("deleted", 1)
    await store.delete("deleted")
    revision = (await store.status()).revision
    async with store.watch() as watch:
        for key in ("missing", "deleted"):
            assert await store.touch(key, 60) is None
            assert await store.persist(key) is None
            assert await store.record(key).touch(60) is None
        assert (await store.status()).revision == revision
        assert await events_until_now(store, watch) == []

    assert await all_keys(store) == ["~now"]


async def test_an_expired_key_cannot_be_touched_back_to_life(store: limpet.Store, elapse: Elapse) -> None:
    """touch and persist of a missing key give None and change nothing."""
    await store.put("key", 1, ttl=0.2)
    await elapse(0.25)
    revision = (await store.status()).revision

    assert await store.touch("key", 60) is None
    assert await store.persist("key") is None

    assert await store.entry("key") is None
    assert (await store.status()).revision == revision
    assert await store.sweep() == 1


async def test_reading_does_not_lengthen_a_life(store: limpet.Store, elapse: Elapse) -> None:
    """Reading never refreshes."""
    before = await store.record("key").put({"a": 1}, ttl=2)
    async with store.watch() as watch:
        for _ in range(3):
            await elapse(0.5)
            await store.get("key")
            await store.record("key").get("a")
            await store.keys()
            assert [entry async for entry in store.scan(where=limpet.field("a") == 1)] == [before]
            assert [event.op async for event in store.history("key")] == ["put"]
            await store.batch().expect("key", before).commit()
        assert await store.entry("key") == before
        assert await events_until_now(store, watch) == []

    await elapse(0.5)
    assert await store.entry("key") is None


async def test_a_refused_write_does_not_lengthen_a_life(store: limpet.Store, elapse: Elapse) -> None:
    """Reading never refreshes."""
    before = await store.put("key", 1, ttl=2)
    await elapse(0.5)
    with pytest.raises(Conflict):
        await store.put("key", 2, ttl=600, expect=limpet.ABSENT)
    assert await store.entry("key") == before

    await elapse(1.5)

    assert await store.entry("key") is None


# The sweeper ------------------------------------------------------------------


async def test_the_sweeper_makes_one_expire_change(store: limpet.Store, elapse: Elapse) -> None:
    """The sweeper records an expiry with one expire change."""
    async with store.watch() as watch:
        entry = await store.put("key", "secret", ttl=0.2, meta={"by": "me"})
        put = await next_event(watch)
        await elapse(0.25)
        assert await store.sweep() == 1
        assert await store.sweep() == 0
        (expire,) = await events_until_now(store, watch)

    assert (put.op, expire.op, expire.key) == ("put", "expire", "key")
    assert expire.revision > entry.revision
    assert (expire.value, expire.cause) == (None, None)
    assert expire.entry is not None
    assert (expire.entry.version, expire.entry.meta) == (1, {"by": "me"})


async def test_the_sweeper_comes_not_a_millisecond_early(store: limpet.Store, elapse: Elapse) -> None:
    """The sweeper records an expiry with one expire change."""
    exact = stands_still(store)
    entry = await store.put("key", 1, ttl=2)

    await elapse(1.999 if exact else 0.5)
    assert await store.sweep() == 0
    assert await store.entry("key") == entry
    await elapse(0.001 if exact else 2.0)

    assert await store.sweep() == 1


async def test_the_sweeper_ends_more_than_a_batch_holds(store: limpet.Store, elapse: Elapse) -> None:
    """The sweeper records an expiry with one expire change."""
    keys = await put_many(store, 300, ttl=2)
    await store.put("alive", 1, ttl=600)
    async with store.watch() as watch:
        await elapse(2.1)
        assert await store.sweep() == 300
        events = await events_until_now(store, watch)

    assert sorted((event.op, event.key) for event in events) == [("expire", key) for key in keys]
    assert (await store.status()).keys == 2


async def test_the_sweeper_leaves_what_has_time(store: limpet.Store, elapse: Elapse) -> None:
    """The sweeper records an expiry with one expire change."""
    forever, later = await store.put("forever", 1), await store.put("later", 1, ttl=600)
    await store.put("now", 1, ttl=0.2)
    await elapse(0.25)

    assert await store.sweep() == 1

    assert [entry async for entry in store.scan()] == [forever, later]


async def test_the_revision_of_an_expiry_is_its_own(store: limpet.Store, elapse: Elapse) -> None:
    """The sweeper records an expiry with one expire change."""
    async with store.watch() as watch:
        await store.put("a", 1, ttl=0.2)
        await store.put("b", 1, ttl=0.2)
        events = [await next_event(watch), await next_event(watch)]
        await elapse(0.25)
        await store.sweep()
        events += await events_until_now(store, watch)

    revisions = [event.revision for event in events]
    assert len(revisions) == 4
    assert revisions == sorted(set(revisions))


Rebirth = Callable[[limpet.Store], Awaitable[object]]

REBIRTHS: dict[str, tuple[Rebirth, str]] = {
    "put": (lambda store: store.put("key", 2), "put"),
    "put with KEEP": (lambda store: store.put("key", 2, ttl=limpet.KEEP), "put"),
    "create": (lambda store: store.create("key", 2), "put"),
    "add": (lambda store: store.add("key"), "put"),
    "update": (lambda store: store.update("key", lambda _: 2), "put"),
    "set": (lambda store: store.record("key").set(a=1), "patch"),
    "batch": (lambda store: store.batch().put("key", 2).commit(), "put"),
}


@pytest.mark.parametrize(("write", "op"), REBIRTHS.values(), ids=REBIRTHS.keys())
async def test_a_key_that_is_written_again_before_the_sweep_has_one_expire_event(
    store: limpet.Store, elapse: Elapse, write: Rebirth, op: str
) -> None:
    """An expired incarnation has exactly one expire event, even when the key is written again before the sweeper runs.

    The write that makes the new entry first logs the expiry of the old one, as a separate change.
    """
    async with store.watch() as watch:
        first = await store.put("key", 1, ttl=0.2, meta={"life": 1})
        assert (await next_event(watch)).entry == first
        await elapse(0.25)
        await write(store)
        second = await store.entry("key")
        assert await store.sweep() == 0
        events = await events_until_now(store, watch)

    assert [(event.op, event.key) for event in events] == [("expire", "key"), (op, "key")]
    assert second is not None
    revisions = [first.revision, *(event.revision for event in events)]
    assert revisions == sorted(set(revisions))
    assert events[-1].entry == second
    for ended in events[:-1]:
        assert ended.entry is not None
        assert (ended.entry.version, ended.entry.meta, ended.value, ended.cause) == (1, {"life": 1}, None, None)
    assert (second.version, second.meta, second.created_revision) == (1, {}, second.revision)


async def test_expiries_that_were_written_over_or_swept_are_delivered(store: limpet.Store, elapse: Elapse) -> None:
    """An expired incarnation has exactly one expire event, even when the key is written again before the sweeper runs.

    One entry is written over, and another is swept.
    """
    await store.put("over", 1, ttl=0.2)
    await store.put("swept", 1, ttl=0.2)
    async with store.watch() as watch:
        await elapse(0.25)
        again = await store.put("over", 2)
        assert await store.sweep() == 1
        events = await events_until_now(store, watch)

    happened = [("expire", "over"), ("put", "over"), ("expire", "swept")]
    assert [(event.op, event.key) for event in events] == happened
    assert [event.entry for event in events if event.op == "put"] == [again]
    assert (again.version, again.created_revision) == (1, again.revision)


async def test_a_key_that_is_swept_and_written_again_has_one_expire_event(store: limpet.Store, elapse: Elapse) -> None:
    """An expired incarnation has exactly one expire event, even when the key is written again before the sweeper runs.

    When the sweeper has logged an expiry, the write does not log it again.
    """
    async with store.watch() as watch:
        await store.put("key", 1, ttl=0.2)
        events = [await next_event(watch)]
        await elapse(0.25)
        await store.sweep()
        events.append(await next_event(watch))
        await store.put("key", 2)
        await store.sweep()
        events += await events_until_now(store, watch)

    assert [event.op for event in events] == ["put", "expire", "put"]


async def test_every_life_of_a_key_has_its_own_expire_event(store: limpet.Store, elapse: Elapse) -> None:
    """An expired incarnation has exactly one expire event, even when the key is written again before the sweeper runs.

    Four entries expire one after the other, two of them ended by the sweeper and two by the next write.
    """
    ops: list[str] = []
    async with store.watch() as watch:
        for life in range(4):
            await store.put("key", life, ttl=0.2)
            ops += [event.op for event in await events_until_now(store, watch)]
            await elapse(0.25)
            if life % 2:
                await store.sweep()
                ops += [event.op for event in await events_until_now(store, watch)]

    assert ops == ["put", "expire", "put", "expire"] * 2


async def test_a_key_that_could_not_be_ended_has_one_expire_event(store: limpet.Store, elapse: Elapse) -> None:
    """An expired incarnation has exactly one expire event, even when the key is written again before the sweeper runs.

    Deleting, taking or touching an expired entry does nothing, and makes no event.
    """
    async with store.watch() as watch:
        await store.put("key", 1, ttl=0.2)
        events = [await next_event(watch)]
        await elapse(0.25)
        await store.delete("key")
        await store.take("key")
        await store.touch("key", 60)
        await store.sweep()
        events += await events_until_now(store, watch)

    assert [event.op for event in events] == ["put", "expire"]


async def test_writers_who_race_for_an_expired_key_log_one_expiry(
    store: limpet.Store, open_store: OpenStore, elapse: Elapse
) -> None:
    """An expired incarnation has exactly one expire event, even when the key is written again before the sweeper runs.

    Of all callers that write and sweep at once, one logs the expiry of the old entry, and before any other change.
    """
    other = await open_store(sweep=False)
    async with store.watch() as watch:
        await store.put("key", 0, ttl=0.2)
        assert (await next_event(watch)).value == 0
        await elapse(0.25)
        writes = [(store, other)[number % 2].add("key") for number in range(12)]
        await asyncio.gather(*writes, store.sweep(), other.sweep())
        events = await events_until_now(store, watch)

    happened = [("expire", "key", None), *(("put", "key", number) for number in range(1, 13))]
    assert [(event.op, event.key, event.value) for event in events] == happened
    assert await store.get("key") == 12


REPRIEVES: dict[str, Callable[[limpet.Store], Awaitable[object]]] = {
    "put": lambda store: store.put("key", 2),
    "put with a ttl": lambda store: store.put("key", 2, ttl=600),
    "touch": lambda store: store.touch("key", 600),
    "persist": lambda store: store.persist("key"),
    "batch": lambda store: store.batch().touch("key", 600).commit(),
}


@pytest.mark.parametrize("write", REPRIEVES.values(), ids=REPRIEVES.keys())
async def test_an_old_moment_sweeps_nothing(
    store: limpet.Store, elapse: Elapse, write: Callable[[limpet.Store], Awaitable[object]]
) -> None:
    """An entry that was written again is not swept at its old expiry time."""
    await store.put("key", 1, ttl=2)
    await write(store)
    entry = await store.entry("key")
    await elapse(2.1)

    assert await store.sweep() == 0
    assert await store.entry("key") == entry


async def test_a_new_life_is_not_swept_by_the_moment_of_the_old_one(store: limpet.Store, elapse: Elapse) -> None:
    """An entry that was written again is not swept at its old expiry time."""
    await store.put("expired", 1, ttl=0.2)
    await store.put("deleted", 1, ttl=0.2)
    await store.delete("deleted")
    await store.put("deleted", 2, ttl=600)
    await elapse(0.25)
    await store.put("expired", 2, ttl=600)

    assert await store.sweep() == 0
    assert await all_keys(store) == ["deleted", "expired"]


async def test_an_entry_is_swept_by_its_latest_moment(store: limpet.Store, elapse: Elapse) -> None:
    """An entry that was written again is not swept at its old expiry time."""
    await store.put("key", 1, ttl=600)
    await store.put("key", 2, ttl=0.5)
    await store.touch("key", 0.2)
    await elapse(0.25)

    assert await store.sweep() == 1
    assert (await store.status()).keys == 0


@pytest.mark.face("async")
async def test_a_sweeper_that_comes_late_ends_nothing(store: limpet.Store, elapse: Elapse) -> None:
    """An entry that was written again is not swept at its old expiry time.

    A sweeper lists what is due, is delayed, and commits that list. Meanwhile the keys were written anew.
    """
    engine = session_of(store).engine
    await store.put("forever", 1, ttl=0.2)
    await store.put("again", 1, ttl=0.2)
    await elapse(0.25)
    seen = await engine.due(store.name)
    entries = [await store.put("again", 2, ttl=0.2), await store.put("forever", 2)]
    revision = (await store.status()).revision

    await engine.commit(store.name, Batch((), tuple(seen), limpet.new_request_id()))

    assert sorted(expire.key for expire in seen) == ["again", "forever"]
    assert (await store.status()).revision == revision
    if stands_still(store):
        assert [entry async for entry in store.scan()] == entries


async def test_two_sweepers_end_each_entry_once(store: limpet.Store, open_store: OpenStore, elapse: Elapse) -> None:
    """Two sweepers end each entry once."""
    other = await open_store(sweep=False)
    keys = await put_many(store, 300, ttl=2)
    async with store.watch() as watch:
        await elapse(2.1)
        counts = await asyncio.gather(*(sweeper.sweep() for sweeper in (store, other, store, other)))
        events = await events_until_now(store, watch)

    assert sum(counts) == 300
    assert sorted((event.op, event.key) for event in events) == [("expire", key) for key in keys]


async def test_one_sweeper_finds_nothing_after_the_other(
    store: limpet.Store, open_store: OpenStore, elapse: Elapse
) -> None:
    """Two sweepers end each entry once."""
    other = await open_store(sweep=False)
    await put_many(store, 10, ttl=0.2)
    await elapse(0.25)

    assert (await store.sweep(), await other.sweep()) == (10, 0)


async def test_two_background_sweepers_end_each_entry_once(
    store: limpet.Store, open_store: OpenStore, elapse: Elapse, clock: limpet.ManualClock
) -> None:
    """Two sweepers end each entry once."""
    for _ in range(2):
        await open_store()
    await asleep(store, clock, 2)
    keys = await put_many(store, 200, ttl=0.5)
    async with store.watch(after=(await store.status()).revision) as watch:
        await elapse(2.5)
        ended = [await next_event(watch) for _ in keys]
        await asleep(store, clock, 2)
        await elapse(2.5)
        late = await events_until_now(store, watch)

    assert sorted((event.op, event.key) for event in ended) == [("expire", key) for key in keys]
    assert late == []


async def test_the_sweeper_runs_by_itself(open_store: OpenStore, elapse: Elapse, clock: limpet.ManualClock) -> None:
    """The sweeper runs by itself: an expiry is in the log at most 2 s later."""
    swept = await open_store()
    await asleep(swept, clock, 1)
    async with swept.watch() as watch:
        entry = await swept.put("key", 1, ttl=0.5)
        events = [await next_event(watch)]
        await elapse(2.5)
        events.append(await next_event(watch))

    assert [(event.op, event.key) for event in events] == [("put", "key"), ("expire", "key")]
    assert events[1].revision > entry.revision
    assert (await swept.status()).keys == 0


async def test_the_sweeper_runs_again_and_again(
    open_store: OpenStore, elapse: Elapse, clock: limpet.ManualClock
) -> None:
    """The sweeper runs by itself: an expiry is in the log at most 2 s later."""
    swept = await open_store()
    async with swept.watch() as watch:
        for life in range(3):
            await asleep(swept, clock, 1)
            await swept.put("key", life, ttl=0.1)
            assert (await next_event(watch)).op == "put"
            await elapse(2.1)
            assert (await next_event(watch)).op == "expire"


async def test_the_sweeper_runs_for_every_namespace_that_was_opened(
    open_store: OpenStore, elapse: Elapse, clock: limpet.ManualClock
) -> None:
    """The sweeper runs by itself: an expiry is in the log at most 2 s later."""
    swept = await open_store()
    other = swept.namespace(f"{swept.name}-other")
    await asleep(swept, clock, 1)
    async with other.watch() as watch:
        await other.put("key", 1, ttl=0.5)
        assert (await next_event(watch)).op == "put"
        await elapse(2.5)

        assert (await next_event(watch)).op == "expire"


@pytest.mark.parametrize("error", [Unavailable("it is away"), Corrupt("a table is away")], ids=["passing", "broken"])
async def test_the_sweeper_outlives_a_failure(
    open_store: OpenStore,
    elapse: Elapse,
    clock: limpet.ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    error: LimpetError,
) -> None:
    """The sweeper goes on by itself after the engine has failed."""
    swept = await open_store()
    await asleep(swept, clock, 1)
    engine = session_of(swept).sweeper._engine
    due, failures = engine.due, [error]

    async def fail_once(namespace: str, *, limit: int = 500) -> Any:
        if failures:
            raise failures.pop()
        return await due(namespace, limit=limit)

    monkeypatch.setattr(engine, "due", fail_once)
    async with swept.watch() as watch:
        await swept.put("key", 1, ttl=0.5)
        assert (await next_event(watch)).op == "put"
        for _ in range(4):
            await asleep(swept, clock, 1)
            await elapse(1.1)

        assert (await next_event(watch)).op == "expire"
    assert failures == []


# The clock --------------------------------------------------------------------


async def test_a_host_that_sets_its_clock_back_does_not_turn_time_back(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock never goes back."""
    store = await open_store(clock=limpet.SystemClock(), sweep=False)
    first = await store.put("first", 1)
    before = (await store.status()).now_ms
    right_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: right_ns() - 3600 * 10**9)

    second = await store.put("second", 1, ttl=60)
    again = await store.put("first", 2)

    assert (await store.status()).now_ms >= before
    assert first.created_at <= second.created_at <= again.updated_at
    assert second.expires_at is not None
    assert second.expires_at >= first.updated_at + timedelta(seconds=60)


async def test_a_store_with_a_slow_clock_does_not_turn_time_back(
    store: limpet.Store, open_store: OpenStore, elapse: Elapse
) -> None:
    """The clock never goes back.

    Another process opens the same database, and its clock is behind. Expired entries stay expired, and its writes
    are not older than those before them.
    """
    await store.put("expired", 1, ttl=1)
    await elapse(2)
    latest = await store.put("latest", 1)

    slow = await open_store(clock=limpet.ManualClock(), sweep=False)
    written = await slow.put("written", 1)

    assert await slow.get("expired") is None
    assert await all_keys(slow) == ["latest", "written"]
    assert written.created_at >= latest.updated_at


async def test_later_revisions_are_not_earlier_in_time(open_store: OpenStore) -> None:
    """The clock never goes back."""
    stores = [await open_store(clock=limpet.SystemClock(), sweep=False) for _ in range(2)]

    entries = await asyncio.gather(*(stores[n % 2].put(f"key {n % 5}", n) for n in range(40)))

    in_order = sorted(entries, key=lambda entry: entry.revision)
    for key in {entry.key for entry in entries}:
        times = [entry.updated_at for entry in in_order if entry.key == key]
        assert times == sorted(times)
    if stores[0].traits.engine != "nats":
        # With NATS each process reads the server's time now and then, so times of two keys may differ by a round trip.
        times = [entry.updated_at for entry in in_order]
        assert times == sorted(times)
    assert all(entry.created_at <= entry.updated_at for entry in entries)


# After the clock was set back ---------------------------------------------------


async def test_what_has_expired_stays_so_for_every_store(
    store: limpet.Store, open_store: OpenStore, elapse: Elapse, set_back: SetBack
) -> None:
    """Reads and guards use one time: the engine's clock, or the latest recorded in the namespace if that is later."""
    other = await open_store(sweep=False)
    await store.put("expired", 1, ttl=1)
    await store.record("record").put({"a": 1}, ttl=1)
    await store.lock("lock", ttl=1).acquire()
    await elapse(2)
    latest = await store.put("latest", 1)

    await set_back(60)

    for each in (store, other, await open_store(sweep=False)):
        assert await each.get("expired") is None
        assert await each.entry("expired") is None
        assert await each.record("record").get("a") is None
        assert await all_keys(each) == ["latest"]
        assert [entry.key async for entry in each.scan()] == ["latest"]
        assert [entry.key async for entry in each.scan(where=limpet.field("a") == 1)] == []
        assert await each.locks() == []
        assert (await each.status()).now_ms >= latest.updated_at.timestamp() * 1000
    assert await other.sweep() == 3


FIRST_LOOKS: dict[str, Callable[[limpet.Store], Awaitable[Any]]] = {
    "get": lambda store: store.get("expired"),
    "field": lambda store: store.record("record").get("a"),
    "keys": all_keys,
    "scan": lambda store: values_of(store.scan("e")),
    "filtered scan": lambda store: values_of(store.scan(where=limpet.field("a") == 1)),
    "locks": lambda store: store.locks(),
    "guard": lambda store: refused(store.put("expired", 1, expect=limpet.PRESENT)),
    "sweep": lambda store: store.sweep(),
}
FOUND = {"keys": ["latest"], "scan": [], "filtered scan": [], "locks": [], "guard": True, "sweep": 3}


async def test_the_first_look_of_a_store_uses_the_recorded_time(
    store: limpet.Store, open_store: OpenStore, elapse: Elapse, set_back: SetBack
) -> None:
    """Reads and guards use one time: the engine's clock, or the latest recorded in the namespace if that is later.

    A store that was opened after the clock was set back has seen no later time itself.
    """
    await store.put("expired", 1, ttl=1)
    await store.record("record").put({"a": 1}, ttl=1)
    await store.lock("lock", ttl=1).acquire()
    await elapse(2)
    await store.put("latest", 1)
    await set_back(60)

    for name, look in FIRST_LOOKS.items():
        fresh = await open_store(sweep=False)

        assert await look(fresh) == FOUND.get(name), name

        await fresh.close()


async def values_of(entries: AsyncIterator[limpet.Entry]) -> list[Any]:
    return [entry.value async for entry in entries]


async def refused(write: Awaitable[Any]) -> bool:
    try:
        await write
    except Conflict:
        return True
    return False


async def test_guards_agree_with_reads_after_the_clock_was_set_back(
    store: limpet.Store, open_store: OpenStore, elapse: Elapse, set_back: SetBack
) -> None:
    """Reads and guards use one time: the engine's clock, or the latest recorded in the namespace if that is later."""
    other = await open_store(sweep=False)
    for key in ("created", "touched", "guarded", "added"):
        await store.put(key, 5, ttl=1)
    lock = store.lock("lock", ttl=1)
    await lock.acquire()
    await elapse(2)
    await store.put("latest", 1)

    await set_back(60)

    assert (await other.create("created", 2)).version == 1
    assert await other.touch("touched", ttl=60) is None
    with pytest.raises(Conflict):
        await other.put("guarded", 1, expect=limpet.PRESENT)
    assert await other.add("added") == 1
    with pytest.raises(LockLost):
        await store.put("fenced", 1, fence=lock)
    await other.lock("lock", ttl=60).acquire()
    assert [each.name for each in await store.locks()] == ["lock"]
    assert await all_keys(store) == ["added", "created", "latest"]


@pytest.mark.parametrize("look", ["get", "keys", "scan", "locks", "status"])
async def test_what_a_store_has_seen_expire_does_not_come_back_for_it(
    store: limpet.Store, elapse: Elapse, set_back: SetBack, look: str
) -> None:
    """An entry that a store has seen as expired stays expired for it, recorded or not."""
    await store.put("expired", 1, ttl=1)
    lock = store.lock("lock", ttl=1)
    await lock.acquire()
    await elapse(2)
    seen_ms = 0
    match look:
        case "get":
            assert await store.get("expired") is None
        case "keys":
            assert await all_keys(store) == []
        case "scan":
            assert [entry async for entry in store.scan()] == []
        case "locks":
            assert await store.locks() == []
        case _:
            seen_ms = (await store.status()).now_ms

    await set_back(60)

    assert (await store.status()).now_ms >= seen_ms
    if look != "status":
        assert await store.get("expired") is None
        assert await all_keys(store) == []
        assert await store.locks() == []
        with pytest.raises(LockLost):
            await store.put("fenced", 1, fence=lock)
        assert (await store.create("expired", 2)).version == 1


async def test_a_sweep_records_its_time(
    store: limpet.Store, open_store: OpenStore, elapse: Elapse, set_back: SetBack
) -> None:
    """Every commit records its time, those of the sweeper too."""
    await store.put("expired", 1, ttl=1)
    before = await store.status()
    await elapse(2)
    assert await store.sweep() == 1

    await set_back(60)

    other = await open_store(sweep=False)
    assert (await other.status()).now_ms >= before.now_ms + 1000
    assert (await other.create("expired", 1)).created_at.timestamp() * 1000 >= before.now_ms + 1000


async def test_time_stands_still_until_the_clock_has_caught_up(
    store: limpet.Store, open_store: OpenStore, elapse: Elapse, set_back: SetBack
) -> None:
    """After the clock was set back, time stands still until the clock has caught up: nothing ends early."""
    other = await open_store(sweep=False)
    latest = await store.put("latest", 1)
    if not await set_back(10):
        return
    entry = await other.put("entry", 1, ttl=2)
    lock = other.lock("lock", ttl=2)
    await lock.acquire()
    assert entry.created_at == latest.updated_at
    assert {(await each.status()).behind_ms for each in (store, other)} == {10_000}

    await elapse(10)
    assert {(await each.status()).behind_ms for each in (store, other)} == {0}
    assert [await each.get("entry") for each in (store, other)] == [1, 1]
    await elapse(1.999)
    assert [await each.get("entry") for each in (store, other)] == [1, 1]
    await store.put("fenced", 1, fence=lock)
    await elapse(0.001)
    assert [await each.get("entry") for each in (store, other)] == [None, None]
    with pytest.raises(LockLost):
        await store.put("fenced", 2, fence=lock)


async def test_a_wait_for_a_lock_goes_on_while_time_stands_still(
    store: limpet.Store, open_store: OpenStore, elapse: Elapse, set_back: SetBack
) -> None:
    """After the clock was set back, time stands still until the clock has caught up: nothing ends early.

    A lock that is about to end has hardly any time left, for as long as time stands still. A waiter does not try
    again all the time.
    """
    other = await open_store(sweep=False)
    await store.lock("lock", ttl=1).acquire()
    await elapse(0.999)
    await store.put("latest", 1)
    if not await set_back(10):
        return
    counting = fail(other)
    waiting = asyncio.ensure_future(other.lock("lock", ttl=1, wait=60).acquire())
    for _ in range(50):
        await elapse(0.02)
    assert not waiting.done()
    assert counting.commits <= 15

    while not waiting.done():
        await elapse(1)
    await waiting
