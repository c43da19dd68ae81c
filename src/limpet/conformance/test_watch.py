"""The log and watch."""

# ruff: noqa: D403 - a docstring here quotes the contract, and some of its lines begin with the name of a verb.

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import threading
import uuid
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest
import pytest_asyncio

import limpet
from limpet.conformance.conftest import Elapse, OpenStore
from limpet.conformance.support import (
    QUIET_S,
    assert_quiet,
    next_event,
    next_events,
    session_of,
    stands_still,
)
from limpet.errors import Compacted, InvalidKey, LimpetError, Unavailable
from limpet.model import LogPage

# Less than the hub's polling interval: the contract promises a wake-up, and polling must not hide a missing one.
SOON_S = 28.0
ENDED = ("delete", "expire")


def elsewhere() -> str:
    """A namespace that no store of the test sweeps or trims."""
    return f"q-{uuid.uuid4().hex[:12]}"


async def fill(store: limpet.Store, count: int, prefix: str = "k") -> list[tuple[str, int]]:
    """Put so many keys, in batches. Returns the revision of each."""
    made: list[tuple[str, int]] = []
    for start in range(0, count, 100):
        draft = store.batch()
        for number in range(start, min(count, start + 100)):
            draft.put(f"{prefix}{number:05}", number)
        commit = await draft.commit()
        made += [(entry.key, entry.revision) for entry in commit.entries if entry is not None]
    return made


async def until_key(watch: Any, key: str) -> list[limpet.Event]:
    """The events up to the first one of this key, which is included."""
    found = [await next_event(watch)]
    while found[-1].key != key:
        found.append(await next_event(watch))
    return found


async def until_synced(watch: Any) -> list[limpet.Event]:
    """The initial entries of a watch, and the Synced event after them."""
    found = [await next_event(watch)]
    while not isinstance(found[-1], limpet.Synced):
        found.append(await next_event(watch))
    return found


async def drain(watch: Any) -> list[limpet.Event]:
    """All events of a watch that ends."""
    return [event async for event in watch]


async def history(store: limpet.Store, key: str) -> list[limpet.Event]:
    return [event async for event in store.history(key)]


def replay(events: Iterable[limpet.Event]) -> dict[str, Any]:
    """The state that a watcher gets by applying every event."""
    state: dict[str, Any] = {}
    for event in events:
        if event.op in ("put", "patch"):
            state[event.key] = event.value
        elif event.op in ENDED:
            state.pop(event.key, None)
    return state


async def read_all(store: limpet.Store) -> dict[str, Any]:
    return {entry.key: entry.value async for entry in store.scan()}


def keys_and_revisions(events: Iterable[limpet.Event]) -> list[tuple[str, int]]:
    return [(event.key, event.revision) for event in events]


def ascend(events: Iterable[limpet.Event]) -> bool:
    """Whether each event has a greater revision than the one before."""
    return all(left.revision < right.revision for left, right in itertools.pairwise(events))


# Order ------------------------------------------------------------------------


async def test_a_watch_delivers_what_happens_in_order(store: limpet.Store) -> None:
    """A watch delivers each change once, in revision order."""
    async with store.watch() as watch:
        first = await store.put("b", 1)
        second = await store.put("a", 2)
        events = await next_events(watch, 2)
        await store.delete("b")
        events.append(await next_event(watch))
        third = await store.put("b", 3)
        events.append(await next_event(watch))
        await assert_quiet(watch)

    assert [(event.op, event.key) for event in events] == [("put", "b"), ("put", "a"), ("delete", "b"), ("put", "b")]
    assert [events[0].revision, events[1].revision, events[3].revision] == [
        first.revision,
        second.revision,
        third.revision,
    ]
    assert ascend(events)


async def test_eight_writers_at_once_are_seen_in_one_order(store: limpet.Store) -> None:
    """A watch delivers each change once, in revision order.

    Thousands of changes by eight writers: every acknowledged one arrives, none twice, none out of order.
    """
    made: list[limpet.Entry] = []

    async def write(writer: int) -> None:
        for number in range(250):
            made.append(await store.put(f"writer-{writer}/{number}", number))

    async with store.watch() as watch:
        reading = asyncio.create_task(next_events(watch, 2000))
        await asyncio.gather(*(write(writer) for writer in range(8)))
        events = await reading
        await assert_quiet(watch)

    assert ascend(events)
    assert [event.entry for event in events] == sorted(made, key=lambda entry: entry.revision)


async def test_eight_writers_of_a_few_keys_are_seen_in_one_order(store: limpet.Store) -> None:
    """A watch delivers each change once, in revision order.

    Each key is written dozens of times while the watch reads.
    """
    made: list[limpet.Entry] = []

    async def write(writer: int) -> None:
        for number in range(100):
            made.append(await store.put(f"writer-{writer}/{number % 7}", number))

    async with store.watch() as watch:
        reading = asyncio.create_task(until_key(watch, "end"))
        await asyncio.gather(*(write(writer) for writer in range(8)))
        made.append(await store.put("end", 1))
        events = await reading
        await assert_quiet(watch)

    assert ascend(events)
    made.sort(key=lambda entry: entry.revision)
    assert [event.entry for event in events] == made


async def test_a_touch_hides_no_value(store: limpet.Store) -> None:
    """A change that is overwritten at once is delivered like any other, with its own value.

    Without a watcher, hundreds of keys are written and then touched, twice. A watcher that resumes from before
    all of it gets each value, as it was written, and each touch.
    """
    start = await store.put("start", 1)
    keys = [f"k{number:03}" for number in range(600)]
    happened: list[tuple[str, str, int, int, object]] = []
    for ttl in (None, 50, 60):
        for first in range(0, len(keys), 100):
            draft = store.batch()
            for key in keys[first : first + 100]:
                draft = draft.put(key, key, ttl=40) if ttl is None else draft.touch(key, ttl)
            commit = await draft.commit()
            happened += [
                ("put" if ttl is None else "touch", entry.key, entry.revision, commit.revision, entry.expires_at)
                for entry in commit.entries
                if entry is not None
            ]
    await store.put("zz-end", 1)

    async with store.watch("k*", after=start.revision) as watch:
        events = await next_events(watch, len(happened))
        await assert_quiet(watch)

    found = [
        (event.op, event.key, event.revision, event.commit, event.entry and event.entry.expires_at) for event in events
    ]
    assert found == happened
    assert replay(events) == {key: key for key in keys}


async def test_what_changes_nothing_is_not_delivered(store: limpet.Store) -> None:
    """A watch delivers each change once, in revision order."""
    async with store.watch() as watch:
        await store.delete("missing")
        await store.touch("missing", 5)
        with pytest.raises(LimpetError):
            await store.put("missing", 1, expect=limpet.PRESENT)
        await store.put("end", 1)

        assert (await next_event(watch)).key == "end"


async def test_a_watcher_that_is_cancelled_goes_on_without_a_gap(store: limpet.Store) -> None:
    """A watch delivers each change once, in revision order.

    A caller that waits for an event may be cancelled at any moment. The next call gets the next change.
    """
    dice = random.Random(7)
    events: list[limpet.Event] = []
    async with store.watch() as watch:
        writing = asyncio.create_task(fill(store, 1500))
        while len(events) < 1500:
            asking = asyncio.ensure_future(anext(watch))
            if dice.random() < 0.3:
                await asyncio.sleep(dice.choice((0, 0, 0.001)))
                asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                events.append(await asyncio.wait_for(asking, SOON_S))
        await assert_quiet(watch)

    assert keys_and_revisions(events) == await writing


# Patterns ---------------------------------------------------------------------


async def test_a_star_watches_every_key(store: limpet.Store) -> None:
    """`*` watches all keys, a trailing `*` all keys with that prefix, and anything else one exact key."""
    keys = ["\x01", "*", "a", "a/b", "é", "\U0010ffff\U0010ffff"]
    async with store.watch("*") as watch:
        for key in keys:
            await store.put(key, 1)

        assert [event.key for event in await next_events(watch, len(keys))] == keys


async def test_a_trailing_star_watches_what_starts_so(store: limpet.Store) -> None:
    """`*` watches all keys, a trailing `*` all keys with that prefix, and anything else one exact key."""
    async with store.watch("config/*") as watch:
        for key in ["config", "config.", "config/", "config/a", "config0", "Config/a", "x/config/a", "config/z/y"]:
            await store.put(key, 1)

        assert [event.key for event in await next_events(watch, 3)] == ["config/", "config/a", "config/z/y"]
        await assert_quiet(watch)


async def test_anything_else_watches_one_key(store: limpet.Store) -> None:
    """`*` watches all keys, a trailing `*` all keys with that prefix, and anything else one exact key."""
    async with store.watch("a") as watch:
        for key in ["aa", "a/b", "A", "b", "a"]:
            await store.put(key, 1)
        events = [await next_event(watch)]
        await store.delete("aa")
        await store.delete("a")
        events.append(await next_event(watch))

        assert [(event.op, event.key) for event in events] == [("put", "a"), ("delete", "a")]
        await assert_quiet(watch)


async def test_a_star_inside_a_pattern_is_a_letter(store: limpet.Store) -> None:
    """`*` watches all keys, a trailing `*` all keys with that prefix, and anything else one exact key."""
    async with store.watch("a*b") as exact, store.watch("a**") as starts:
        for key in ["axb", "ab", "a*", "a*b", "a*bc"]:
            await store.put(key, 1)

        assert (await next_event(exact)).key == "a*b"
        await assert_quiet(exact)
        assert [event.key for event in await next_events(starts, 3)] == ["a*", "a*b", "a*bc"]
        await assert_quiet(starts)


@pytest.mark.parametrize("pattern", ["?", "[ab]", "a?", "%", "_", ".", "a.*b"])
async def test_no_other_character_of_a_pattern_has_meaning(store: limpet.Store, pattern: str) -> None:
    """`*` watches all keys, a trailing `*` all keys with that prefix, and anything else one exact key."""
    async with store.watch(pattern) as watch:
        for key in ["a", "b", "ab", "axb", "a/b", pattern]:
            await store.put(key, 1)

        assert (await next_event(watch)).key == pattern
        await assert_quiet(watch)


async def test_a_prefix_of_the_last_code_point_can_be_watched(store: limpet.Store) -> None:
    """`*` watches all keys, a trailing `*` all keys with that prefix, and anything else one exact key."""
    last = "\U0010ffff"
    async with store.watch(f"{last}*") as watch:
        for key in ["z", "\U0010fffe", last, last + "a", last + last]:
            await store.put(key, 1)

        assert [event.key for event in await next_events(watch, 3)] == [last, last + "a", last + last]


@pytest.mark.refused_early
@pytest.mark.parametrize("pattern", ["", "a\0b", "\0*", "a" * 1025])
async def test_a_pattern_that_can_match_no_key_is_refused(store: limpet.Store, pattern: str) -> None:
    """`*` watches all keys, a trailing `*` all keys with that prefix, and anything else one exact key."""
    with pytest.raises(InvalidKey):
        await next_event(store.watch(pattern))


# The beginning ----------------------------------------------------------------


async def test_a_watch_begins_when_it_is_entered(store: limpet.Store) -> None:
    """A watch begins when it is entered or first read, and delivers the changes after that."""
    await store.put("before", 1)
    watch = store.watch()
    await store.put("made but not entered", 1)

    async with watch:
        await store.put("after", 1)

        assert (await next_event(watch)).key == "after"


async def test_a_watch_begins_with_its_first_request(store: limpet.Store) -> None:
    """A watch begins when it is entered or first read, and delivers the changes after that."""
    watch = store.watch()
    await store.put("before", 1)
    await assert_quiet(watch)

    await store.put("after", 1)

    assert (await next_event(watch)).key == "after"
    await watch.aclose()


async def test_a_change_between_entering_and_reading_is_delivered(store: limpet.Store) -> None:
    """A watch begins when it is entered or first read, and delivers the changes after that."""
    async with store.watch() as watch:
        made = await fill(store, 30)
        await asyncio.sleep(0.05)

        assert keys_and_revisions(await next_events(watch, 30)) == made


# The initial entries ----------------------------------------------------------


async def test_initial_gives_what_there_is_and_then_the_changes(store: limpet.Store) -> None:
    """With `initial`, a watch gives the existing entries, then one Synced, then the changes."""
    b = await store.put("b", [1], meta={"by": "me"})
    a = await store.put("a", b"raw")
    async with store.watch(initial=True) as watch:
        before = await next_events(watch, 2)
        synced = await next_event(watch)
        c = await store.put("c", 3)
        after = await next_event(watch)
        await assert_quiet(watch)

    assert [event.entry for event in before] == [a, b]
    assert [event.op for event in before] == ["put", "put"]
    assert [event.position for event in before] == [None, None]
    assert isinstance(synced, limpet.Synced)
    assert synced.op == "synced"
    assert not any(isinstance(event, limpet.Synced) for event in [*before, after])
    assert after.entry == c


async def test_initial_gives_only_what_the_pattern_names(store: limpet.Store) -> None:
    """With `initial`, a watch gives the existing entries, then one Synced, then the changes."""
    for key in ["a", "a/1", "a/2", "b"]:
        await store.put(key, key)
    async with store.watch("a/*", initial=True) as watch:
        await store.put("b", 2)
        await store.put("a/3", 3)
        events = await next_events(watch, 4)

    assert [event.key for event in events if event.op != "synced"] == ["a/1", "a/2", "a/3"]
    assert sum(isinstance(event, limpet.Synced) for event in events) == 1


async def test_initial_leaves_out_what_has_expired(store: limpet.Store, elapse: Elapse) -> None:
    """With `initial`, a watch gives the existing entries, then one Synced, then the changes."""
    await store.put("gone", 1, ttl=0.2)
    await store.put("here", 1, ttl=60)
    await elapse(0.3)

    async with store.watch(initial=True) as watch:
        first, second = await next_events(watch, 2)

    assert first.key == "here"
    assert isinstance(second, limpet.Synced)


async def test_initial_on_nothing_is_synced_at_once(store: limpet.Store) -> None:
    """With `initial` and no matching entry, Synced comes at once."""
    await store.put("other", 1)
    for pattern in ["nothing/*", "nothing"]:
        async with store.watch(pattern, initial=True) as watch:
            assert isinstance(await next_event(watch), limpet.Synced)
            await assert_quiet(watch)


async def test_initial_in_an_empty_namespace_is_synced_at_once(store: limpet.Store) -> None:
    """With `initial` and no matching entry, Synced comes at once."""
    async with store.watch(initial=True) as watch:
        assert isinstance(await next_event(watch), limpet.Synced)
        await store.put("a", 1)
        assert (await next_event(watch)).key == "a"


async def meddle(store: limpet.Store, seed: int, turns: int) -> None:
    """Write at random, as several writers do at once."""
    dice = random.Random(seed)
    for turn in range(turns):
        key = f"k{dice.randrange(0, 1200, 17):05}"
        match dice.randrange(6):
            case 0 | 1:
                await store.put(key, [seed, turn])
            case 2:
                await store.delete(key)
            case 3:
                await store.touch(key, 1000)
            case 4:
                await store.record(f"record-{dice.randrange(5)}").set({f"f{seed}": turn})
            case _:
                other = f"new-{dice.randrange(20)}"
                await store.batch().put(key, turn).put(other, [turn]).delete(f"k{dice.randrange(1200):05}x").commit()


@pytest.mark.parametrize("keys", [0, 40, 1200])
async def test_nothing_is_lost_or_doubled_while_others_write(store: limpet.Store, keys: int) -> None:
    """Nothing is lost or doubled between the initial entries and the changes.

    Writers are at work before, while and after the watcher reads the initial entries. Applying every
    event must give exactly the state of the store.
    """
    await fill(store, keys)
    writing = [asyncio.create_task(meddle(store, seed, 60)) for seed in range(4)]
    await asyncio.sleep(0.02)

    async with store.watch(initial=True) as watch:
        events = await until_synced(watch)
        await asyncio.gather(*writing)
        await store.put("zz-end", True)
        events += await until_key(watch, "zz-end")

    (synced,) = [number for number, event in enumerate(events) if isinstance(event, limpet.Synced)]
    before, after = events[:synced], events[synced + 1 :]
    assert [event.key for event in before] == sorted({event.key for event in before})
    assert ascend(after)
    assert len({*keys_and_revisions(before), *keys_and_revisions(after)}) == len(before) + len(after)
    assert replay(events) == await read_all(store)


async def test_a_change_made_before_the_first_read_comes_once(store: limpet.Store) -> None:
    """Nothing is lost or doubled between the initial entries and the changes.

    The watch has begun and has read nothing yet. A write at this time is either among the entries
    or among the changes.
    """
    await store.put("a", 1)
    await store.put("b", 1)
    async with store.watch(initial=True) as watch:
        await store.put("a", 2)
        await store.delete("b")
        await store.put("c", 1)
        events = await until_synced(watch)
        await store.put("end", 1)
        events += await until_key(watch, "end")
        await assert_quiet(watch)

    changes = [pair for pair, event in zip(keys_and_revisions(events), events, strict=True) if event.op != "synced"]
    assert len({*changes}) == len(changes)
    assert replay(events) == {"a": 2, "c": 1, "end": 1}


# What an event carries --------------------------------------------------------


@pytest.mark.parametrize("value", [None, 0, "text", [1, {"a": 2.0}], b"", b"\x00raw", limpet.Fields(a=1, b=b"2")])
async def test_a_put_carries_the_value(store: limpet.Store, value: Any) -> None:
    """put and patch carry the whole value after the change."""
    async with store.watch() as watch:
        entry = await store.put("a", value, meta={"by": "me"}, ttl=60)
        event = await next_event(watch)

    assert event.op == "put"
    assert event.entry == entry
    assert event.value == value
    assert type(event.value) is type(value)


async def test_a_field_write_carries_the_whole_record(store: limpet.Store) -> None:
    """put and patch carry the whole value after the change."""
    record = store.record("r")
    await record.put({"a": 1, "b": b"2", "c": 3})
    async with store.watch() as watch:
        entry = await record.set({"a": 10}, unset=["c"])
        first = await next_event(watch)
        await record.swap("b", b"2", None)
        second = await next_event(watch)

    assert (first.op, second.op) == ("patch", "patch")
    assert first.entry == entry
    assert first.value == {"a": 10, "b": b"2"}
    assert second.value == {"a": 10, "b": None}


async def test_an_add_carries_the_sum(store: limpet.Store) -> None:
    """put and patch carry the whole value after the change."""
    events: list[limpet.Event] = []
    async with store.watch() as watch:
        for step in (3, 4, -10):
            await store.add("n", step)
            events.append(await next_event(watch))

    assert [(event.op, event.value) for event in events] == [("put", 3), ("put", 7), ("put", -3)]


async def test_each_event_has_the_value_of_its_own_time(store: limpet.Store) -> None:
    """put and patch carry the whole value after the change.

    A watcher that is late sees what each write made, not the present value of the key.
    """
    async with store.watch() as watch:
        entries = [await store.put("a", number) for number in range(20)]
        await store.put("end", 1)
        events = await until_key(watch, "end")

    assert [event.entry for event in events[:-1]] == entries


async def test_a_touch_carries_no_value(store: limpet.Store) -> None:
    """touch carries the entry without its value."""
    await store.put("a", "secret", meta={"by": "me"})
    async with store.watch() as watch:
        touched = await store.touch("a", 60)
        first = await next_event(watch)
        persisted = await store.persist("a")
        second = await next_event(watch)

    assert touched is not None
    assert persisted is not None
    assert (first.op, second.op) == ("touch", "touch")
    assert first.entry == touched.without_value()
    assert second.entry == persisted.without_value()
    assert first.entry.expires_at is not None
    assert second.entry.expires_at is None
    assert (first.value, second.value) == (None, None)


async def test_a_delete_carries_what_ended(store: limpet.Store) -> None:
    """delete and expire carry version and meta of the entry that ended, and no value."""
    await store.put("a", "secret")
    await store.put("a", "secret", meta={"by": "me"})
    async with store.watch() as watch:
        await store.delete("a")
        event = await next_event(watch)

    assert event.op == "delete"
    assert event.entry is not None
    assert (event.entry.version, event.entry.meta) == (2, {"by": "me"})
    assert event.entry.stored is None
    assert event.value is None


async def test_a_take_shows_its_value_to_the_taker_alone(store: limpet.Store) -> None:
    """delete and expire carry version and meta of the entry that ended, and no value."""
    await store.put("a", "secret", meta={"by": "me"})
    async with store.watch() as watch:
        assert await store.take("a") == "secret"
        event = await next_event(watch)

    assert event.op == "delete"
    assert event.entry is not None
    assert (event.entry.version, event.entry.meta) == (1, {"by": "me"})
    assert event.entry.stored is None
    happened = [("put", "a", "secret"), ("delete", "a", None)]
    assert [(past.op, past.key, past.value) for past in await history(store, "a")] == happened


async def test_an_expiry_carries_what_ended(store: limpet.Store, elapse: Elapse) -> None:
    """delete and expire carry version and meta of the entry that ended, and no value."""
    await store.put("a", "secret", meta={"by": "me"}, ttl=0.2)
    await store.put("a", "secret", meta={"by": "you"}, ttl=0.2)
    async with store.watch() as watch:
        await elapse(0.3)
        await store.sweep()
        event = await next_event(watch)

    assert event.op == "expire"
    assert event.entry is not None
    assert (event.entry.version, event.entry.meta) == (2, {"by": "you"})
    assert event.entry.stored is None
    assert event.value is None


async def test_events_of_a_batch_name_its_last_revision(store: limpet.Store) -> None:
    """The events of a batch carry the batch's last revision as their commit."""
    await store.put("old", 1)
    async with store.watch() as watch:
        commit = await store.batch().put("c", 1).delete("old").put("a", 2).add("b").commit()
        events = await next_events(watch, 4)

    assert [(event.op, event.key) for event in events] == [
        ("put", "c"),
        ("delete", "old"),
        ("put", "a"),
        ("put", "b"),
    ]
    assert ascend(events)
    assert {event.commit for event in events} == {commit.revision}
    assert events[-1].revision == commit.revision


async def test_a_single_write_is_its_own_commit(store: limpet.Store) -> None:
    """The events of a batch carry the batch's last revision as their commit."""
    async with store.watch() as watch:
        await store.put("a", 1)
        events = [await next_event(watch)]
        await store.touch("a", 9)
        events.append(await next_event(watch))
        await store.delete("a")
        events.append(await next_event(watch))

    assert [event.commit for event in events] == [event.revision for event in events]


async def test_batches_of_several_writers_are_not_interleaved(store: limpet.Store) -> None:
    """The events of a batch carry the batch's last revision as their commit."""
    made: list[tuple[str, str, int, int]] = []
    async with store.watch() as watch:

        async def write(writer: int) -> None:
            for number in range(25):
                draft = store.batch().put(f"a{writer}/{number}", number).put(f"b{writer}/{number}", number)
                commit = await draft.put("shared", writer).commit()
                entries = [entry for entry in commit.entries if entry is not None]
                made.extend(("put", entry.key, entry.revision, commit.revision) for entry in entries)

        await asyncio.gather(*(write(writer) for writer in range(4)))
        await store.put("end", 1)
        events = (await until_key(watch, "end"))[:-1]

    made.sort(key=lambda change: change[2])
    assert len(made) == 300
    assert [(event.op, event.key, event.revision, event.commit) for event in events] == made
    batches = [[*events] for _, events in itertools.groupby(events, key=lambda event: event.commit)]
    assert len(batches) == 100
    assert all(len({event.cause for event in batch}) == 1 for batch in batches)
    assert len({batch[0].cause for batch in batches}) == 100
    assert ascend(events)


async def test_an_event_names_the_request_that_caused_it(store: limpet.Store) -> None:
    """An event names its cause: the request id of the write."""
    async with store.watch() as watch:
        await store.put("a", 1, request_id="first-request")
        events = [await next_event(watch)]
        await store.batch(request_id="second-request").add("n").delete("a").commit()
        events += await next_events(watch, 2)

    assert [event.cause for event in events] == ["first-request", "second-request", "second-request"]


async def test_an_event_says_when_it_happened(store: limpet.Store, elapse: Elapse) -> None:
    """An event has the time of its commit, by the clock that decides about expiry."""
    async with store.watch() as watch:
        first = await store.put("a", 1)
        put = await next_event(watch)
        await elapse(0.3)
        await store.touch("a", 60)
        touch = await next_event(watch)
        await elapse(0.3)
        await store.delete("a")
        delete = await next_event(watch)

    assert put.at == first.created_at
    assert touch.at is not None
    assert delete.at is not None
    assert (touch.at - first.created_at).total_seconds() >= 0.3
    assert (delete.at - touch.at).total_seconds() >= 0.3


async def test_an_initial_entry_says_when_it_was_written(store: limpet.Store) -> None:
    """An event has the time of its commit, by the clock that decides about expiry."""
    entry = await store.put("a", 1)

    async with store.watch(initial=True) as watch:
        there, synced = await next_events(watch, 2)

    assert (there.at, synced.at) == (entry.updated_at, None)


async def test_writes_without_a_request_id_have_causes_of_their_own(store: limpet.Store) -> None:
    """An event names its cause: the request id of the write."""
    causes: list[str | None] = []
    async with store.watch() as watch:
        for number in range(5):
            await store.put("a", number)
            causes.append((await next_event(watch)).cause)

    assert all(causes)
    assert len({*causes}) == 5


async def test_an_expiry_has_no_cause(store: limpet.Store, elapse: Elapse) -> None:
    """An event names its cause: the request id of the write."""
    await store.put("swept", 1, ttl=0.2)
    async with store.watch() as watch:
        await elapse(0.3)
        await store.sweep()
        event = await next_event(watch)

    assert (event.op, event.cause) == ("expire", None)


# Resuming ---------------------------------------------------------------------


async def test_a_watch_resumes_after_every_event(store: limpet.Store) -> None:
    """A watch resumes after the position of any event.

    Among them are events in the middle of a batch: the rest of the batch follows.
    """
    events: list[limpet.Event] = []
    async with store.watch() as watch:
        for number in range(4):
            await store.put(f"a{number}", number)
            events.append(await next_event(watch))
            await store.batch().put(f"b{number}", number).delete(f"a{number}").put(f"c{number}", number).commit()
            events += await next_events(watch, 3)
            await store.touch(f"b{number}", 60)
            events.append(await next_event(watch))

    for done, event in enumerate(events, 1):
        left = events[done:]
        async with store.watch(after=event.position) as resumed:
            assert await next_events(resumed, len(left)) == left
    async with store.watch(after=events[-1].position) as resumed:
        await assert_quiet(resumed)
        await store.put("news", 1)
        assert (await next_event(resumed)).key == "news"


async def test_a_watch_resumes_after_synced(store: limpet.Store) -> None:
    """A watch resumes after the position of any event."""
    await store.put("a", 1)
    async with store.watch(initial=True) as watch:
        _, synced = await next_events(watch, 2)
    await store.put("b", 2)

    async with store.watch(after=synced.position) as resumed:
        assert (await next_event(resumed)).key == "b"


async def test_a_watch_resumes_where_it_began(store: limpet.Store) -> None:
    """A watch resumes after its own position, also if no event has come yet."""
    await store.put("before", 1)
    async with store.watch("quiet") as watch:
        begun = watch.position
    await store.put("news", 2)

    assert begun is not None
    async with store.watch(after=begun) as resumed:
        assert (await next_event(resumed)).key == "news"
        reached = resumed.position
    await store.put("more", 3)

    async with store.watch(after=reached) as resumed:
        assert (await next_event(resumed)).key == "more"


async def test_a_watch_that_waits_keeps_up(open_store: OpenStore) -> None:
    """A watch that waits keeps up while other keys change, and trimming does not make it Compacted."""
    window = limpet.Window(changes=5, age_ms_min=0)
    store = await open_store(namespace=elsewhere(), window=window, sweep=False)
    async with store.watch("quiet") as quiet, store.watch("end") as other:
        waiting = asyncio.create_task(next_event(quiet))
        await asyncio.sleep(0.05)
        await fill(store, 3500)
        await store.put("end", 1)
        await next_event(other)
        await store.trim()

        position = quiet.position
        async with store.watch("quiet", after=position) as resumed:
            await store.put("quiet", 2)

            assert (await next_event(resumed)).value == 2
        assert (await waiting).value == 2


async def test_a_position_serves_another_pattern(store: limpet.Store) -> None:
    """A watch resumes after the position of any event."""
    async with store.watch("a/*") as watch:
        await store.put("a/1", 1)
        position = (await next_event(watch)).position
    await store.put("b/1", 1)
    await store.put("a/2", 1)

    async with store.watch("b/*", after=position) as resumed:
        assert (await next_event(resumed)).key == "b/1"
    async with store.watch("a/2", after=position) as resumed:
        assert (await next_event(resumed)).key == "a/2"


async def test_a_resumed_watch_goes_from_the_past_into_the_present(store: limpet.Store) -> None:
    """A watch resumes after the position of any event."""
    async with store.watch() as watch:
        await store.put("start", 1)
        position = (await next_event(watch)).position
    past = await fill(store, 700, "past-")
    writing = asyncio.create_task(fill(store, 700, "present-"))

    async with store.watch(after=position) as resumed:
        events = await next_events(resumed, 1400)

    assert keys_and_revisions(events) == past + await writing


async def test_events_of_history_are_positions_too(store: limpet.Store) -> None:
    """A watch resumes after the position of any event."""
    await store.put("a", 1)
    await store.put("b", 1)
    (event,) = await history(store, "a")

    async with store.watch(after=event.position) as resumed:
        assert (await next_event(resumed)).key == "b"


async def test_a_watch_resumes_after_a_revision(store: limpet.Store) -> None:
    """A watch resumes after a revision of this store."""
    first = await store.put("a", 1)
    second = await store.put("b", 2)
    third = await store.put("c", 3)

    async with store.watch(after=first.revision) as watch:
        assert [event.entry for event in await next_events(watch, 2)] == [second, third]
    async with store.watch(after=third.revision) as watch:
        await assert_quiet(watch)


async def test_revision_zero_is_the_beginning(store: limpet.Store) -> None:
    """A watch resumes after a revision of this store."""
    made = await fill(store, 20)

    async with store.watch(after=0) as watch:
        assert keys_and_revisions(await next_events(watch, 20)) == made


async def test_the_revision_of_a_commit_is_behind_its_batch(store: limpet.Store) -> None:
    """A watch resumes after a revision of this store."""
    commit = await store.batch().put("a", 1).put("b", 1).commit()
    await store.put("c", 1)

    async with store.watch(after=commit.revision) as watch:
        assert (await next_event(watch)).key == "c"


async def test_a_position_outlives_the_store_that_gave_it(open_store: OpenStore) -> None:
    """A watch resumes after the store was closed and opened again."""
    before = await open_store()
    async with before.watch() as watch:
        await before.put("seen", 1)
        seen = await next_event(watch)
        missed = await before.put("missed", 2)
    await before.close()

    again = await open_store()
    async with again.watch(after=seen.position) as resumed:
        later = await again.put("later", 3)
        events = await next_events(resumed, 2)

    assert [event.entry for event in events] == [missed, later]


async def test_a_revision_outlives_the_store_that_gave_it(open_store: OpenStore) -> None:
    """A watch resumes after the store was closed and opened again."""
    before = await open_store()
    seen = await before.put("seen", 1)
    made = await fill(before, 50)
    await before.close()

    again = await open_store()
    async with again.watch(after=seen.revision) as resumed:
        assert keys_and_revisions(await next_events(resumed, 50)) == made


# Where a watch cannot begin ---------------------------------------------------


@pytest_asyncio.fixture(loop_scope="module")
async def trimmed(open_store: OpenStore) -> tuple[limpet.Store, list[limpet.Event]]:
    """A store with twenty changes, the first fifteen of them trimmed, and the events of all."""
    window = limpet.Window(changes=5, age_ms_min=0)
    store = await open_store(namespace=elsewhere(), window=window, sweep=False)
    async with store.watch() as watch:
        await fill(store, 20)
        events = await next_events(watch, 20)
    await store.trim()
    return store, events


async def test_a_trimmed_position_is_reported(trimmed: tuple[limpet.Store, list[limpet.Event]]) -> None:
    """A position that was trimmed is Compacted, never a silent gap."""
    store, events = trimmed
    for event in events[:14]:
        with pytest.raises(Compacted):
            await next_event(store.watch(after=event.position))


async def test_a_trimmed_revision_is_reported(trimmed: tuple[limpet.Store, list[limpet.Event]]) -> None:
    """A position that was trimmed is Compacted, never a silent gap."""
    store, events = trimmed
    for revision in (0, events[0].revision, events[13].revision):
        with pytest.raises(Compacted) as caught:
            await next_event(store.watch(after=revision))
        assert caught.value.oldest is not None
        assert revision < caught.value.oldest < events[15].revision


async def test_what_was_not_trimmed_can_be_resumed(trimmed: tuple[limpet.Store, list[limpet.Event]]) -> None:
    """A position that was trimmed is Compacted, never a silent gap."""
    store, events = trimmed
    for done in range(16, 20):
        async with store.watch(after=events[done - 1].position) as resumed:
            assert await next_events(resumed, 20 - done) == events[done:]


async def test_a_new_watch_does_not_mind_trimming(trimmed: tuple[limpet.Store, list[limpet.Event]]) -> None:
    """A position that was trimmed is Compacted, never a silent gap."""
    store, _ = trimmed
    async with store.watch("new") as plain, store.watch(initial=True) as whole:
        await store.put("new", 1)

        assert (await next_event(plain)).key == "new"
        assert len(await until_key(whole, "new")) in (21, 22)


async def test_a_watcher_that_falls_behind_trimming_gets_an_error(open_store: OpenStore) -> None:
    """A position that was trimmed is Compacted, never a silent gap.

    A watcher fell behind by more than the log keeps. It may still get every event. If it does not, it
    must get an error: it never gets an event with a gap before it.
    """
    window = limpet.Window(changes=5, age_ms_min=0)
    store = await open_store(namespace=elsewhere(), window=window, sweep=False)
    async with store.watch() as slow, store.watch("end") as quick:
        made = await fill(store, 3500)
        await store.put("end", 1)
        await next_event(quick)
        await store.trim()

        events: list[limpet.Event] = []
        try:
            events = await until_key(slow, "end")
        except Compacted:
            pass
        else:
            assert keys_and_revisions(events[:-1]) == made


async def test_a_position_of_another_namespace_is_reported(store: limpet.Store) -> None:
    """A position of another store or namespace is Compacted."""
    other = store.namespace(elsewhere())
    for each in (store, other):
        await fill(each, 5)
    (event,) = await history(other, "k00002")

    with pytest.raises(Compacted):
        await next_event(store.watch(after=event.position))
    async with other.watch(after=event.position) as watch:
        assert (await next_event(watch)).key == "k00003"


async def test_a_position_of_another_store_is_reported(store: limpet.Store) -> None:
    """A position of another store or namespace is Compacted."""
    await fill(store, 5)
    async with limpet.open("memory:", namespace=store.name) as other:
        await fill(other, 5)
        (event,) = await history(other, "k00002")

    with pytest.raises(Compacted):
        await next_event(store.watch(after=event.position))


@pytest.mark.parametrize("shape", ["", " ", ":", "1", "::::", "nonsense", "{}x", " {}", "{} ", "{}:1", "-{}", "{}é"])
async def test_an_invalid_position_is_reported(store: limpet.Store, shape: str) -> None:
    """A position of another store or namespace is Compacted."""
    await fill(store, 5)
    (event,) = await history(store, "k00002")

    with pytest.raises(Compacted):
        await next_event(store.watch(after=shape.format(event.position)))


@pytest.mark.parametrize("ahead", [1, 1000, 2**62])
async def test_a_revision_from_the_future_is_reported(store: limpet.Store, ahead: int) -> None:
    """A position or revision from the future is Compacted."""
    entry = await store.put("a", 1)

    with pytest.raises(Compacted):
        await next_event(store.watch(after=entry.revision + ahead))


async def test_a_revision_of_an_empty_namespace_is_in_the_future(store: limpet.Store) -> None:
    """A position or revision from the future is Compacted."""
    with pytest.raises(Compacted):
        await next_event(store.watch(after=1))


async def test_a_position_from_the_future_is_reported(store: limpet.Store) -> None:
    """A position or revision from the future is Compacted.

    A client has such a position after the database was restored from an older backup.
    """
    await store.put("a", 1)
    (event,) = await history(store, "a")
    assert event.position is not None
    place, change = event.position.rsplit(":", 1)
    revision, time_and_digest = change.split("-", 1)
    assert int(revision) == event.revision

    with pytest.raises(Compacted):
        await next_event(store.watch(after=f"{place}:{event.revision + 1000}-{time_and_digest}"))


def of_another_history(position: str | None) -> str:
    """The position of another change at the same revision of a store of the same name, as a restored backup has it."""
    assert position is not None
    rest, digest = position.rsplit("-", 1)
    return f"{rest}-{int(digest, 16) ^ 1:012x}"


async def test_a_position_of_another_history_is_reported(store: limpet.Store) -> None:
    """A position from another history of the store, as after a restored backup, is Compacted.

    The store has its old name and counts on from an old revision. So the revision of the position exists, but it
    is another change, and a watcher that went on after it would miss those before.
    """
    async with store.watch() as watch:
        made = await fill(store, 20)
        events = await next_events(watch, 20)

    for done, event in enumerate(events, 1):
        with pytest.raises(Compacted, match="another history"):
            await next_event(store.watch(after=of_another_history(event.position)))
        async with store.watch(after=event.position) as resumed:
            assert keys_and_revisions(await next_events(resumed, 20 - done)) == made[done:]


async def test_a_batch_of_another_history_is_reported(store: limpet.Store) -> None:
    """A position from another history of the store, as after a restored backup, is Compacted."""
    async with store.watch() as watch:
        await store.batch().put("a", 1).put("b", 2).put("c", 3).commit()
        await store.batch().delete("a").touch("b", 60).put("d", 4).commit()
        events = await next_events(watch, 6)

    for event in events[1:5]:
        with pytest.raises(Compacted):
            await next_event(store.watch(after=of_another_history(event.position)))
    for event in events[3:5]:
        async with store.watch("d", after=event.position) as resumed:
            assert (await next_event(resumed)).position == events[5].position


@pytest.mark.parametrize("other", ["key", "lock"])
async def test_the_position_of_a_watch_is_of_its_history(store: limpet.Store, other: str) -> None:
    """A position from another history of the store, as after a restored backup, is Compacted.

    The position of the watch is at a change that it does not deliver: of another key, or of a lock.
    """
    await store.put("a", 1)
    if other == "lock":
        await store.lock("a", ttl=60).acquire()
    else:
        await store.put("b", 1)
    async with store.watch("a") as watch:
        position = watch.position
    await store.put("c", 1)
    await store.put("a", 2)

    with pytest.raises(Compacted):
        await next_event(store.watch("a", after=of_another_history(position)))
    async with store.watch("a", after=position) as resumed:
        assert (await next_event(resumed)).value == 2


async def test_a_watch_that_went_on_has_a_position_of_its_history(store: limpet.Store) -> None:
    """A position from another history of the store, as after a restored backup, is Compacted."""
    async with store.watch("a") as watch:
        await store.put("a", 1)
        await next_event(watch)
        await fill(store, 5)
        await store.put("a", 2)
        await next_event(watch)
        position = watch.position

    with pytest.raises(Compacted):
        await next_event(store.watch("a", after=of_another_history(position)))
    await store.put("b", 3)
    await store.put("a", 3)
    async with store.watch("a", after=position) as resumed:
        assert (await next_event(resumed)).value == 3


async def test_the_position_of_synced_is_of_its_history(store: limpet.Store) -> None:
    """A position from another history of the store, as after a restored backup, is Compacted."""
    await fill(store, 3)
    async with store.watch("missing", initial=True) as watch:
        synced = await next_event(watch)
    assert isinstance(synced, limpet.Synced)
    await store.put("missing", 1)

    with pytest.raises(Compacted):
        await next_event(store.watch("missing", after=of_another_history(synced.position)))
    async with store.watch("missing", after=synced.position) as resumed:
        assert (await next_event(resumed)).key == "missing"


async def test_the_floor_is_of_its_history(trimmed: tuple[limpet.Store, list[limpet.Event]]) -> None:
    """A position from another history of the store, as after a restored backup, is Compacted.

    The change at the position was just trimmed. All changes after it are still in the log.
    """
    store, events = trimmed
    floor = (await store.status()).floor
    (event,) = (event for event in events if event.revision == floor)

    with pytest.raises(Compacted, match="another history"):
        await next_event(store.watch(after=of_another_history(event.position)))
    async with store.watch(after=event.position) as resumed:
        assert await next_events(resumed, 5) == events[15:]


async def test_a_trimmed_log_is_of_its_history(open_store: OpenStore) -> None:
    """A position from another history of the store, as after a restored backup, is Compacted.

    All changes were trimmed, and the position is at the last of them.
    """
    window = limpet.Window(changes=0, age_ms_min=0)
    store = await open_store(namespace=elsewhere(), window=window, sweep=False)
    async with store.watch() as watch:
        await store.batch().put("a", 1).put("b", 1).commit()
        position = (await next_events(watch, 2))[1].position
    await store.trim()

    for _ in range(2):
        with pytest.raises(Compacted, match="another history"):
            await next_event(store.watch(after=of_another_history(position)))
        async with store.watch(after=position) as resumed:
            assert resumed.position == position
            await store.put("c", 1)
            assert (await next_event(resumed)).key == "c"


async def test_a_history_is_the_same_after_opening_again(open_store: OpenStore) -> None:
    """A position from another history of the store, as after a restored backup, is Compacted."""
    before = await open_store()
    async with before.watch() as watch:
        await before.batch().put("a", 1).put("b", 1).commit()
        await before.put("c", 1)
        events = await next_events(watch, 3)
    await before.close()

    again = await open_store()
    for event in events:
        with pytest.raises(Compacted):
            await next_event(again.watch(after=of_another_history(event.position)))
    async with again.watch(after=events[1].position) as resumed:
        assert await next_event(resumed) == events[2]


async def test_a_position_that_names_no_change_is_reported(store: limpet.Store) -> None:
    """A position from another history of the store, as after a restored backup, is Compacted.

    It cannot be compared with the log.
    """
    await fill(store, 5)
    (event,) = await history(store, "k00002")
    assert event.position is not None
    place = event.position.rpartition(":")[0]

    for odd in (f"{event.revision}", f"{event.revision}-", f"{event.revision}-0", "-0-000000000000"):
        with pytest.raises(Compacted):
            await next_event(store.watch(after=f"{place}:{odd}"))


async def test_the_beginning_belongs_to_every_history(store: limpet.Store) -> None:
    """A watch resumes after its own position, also if no event has come yet.

    A watcher that has seen nothing has missed nothing.
    """
    async with store.watch() as watch:
        position = watch.position
    made = await fill(store, 5)

    async with store.watch(after=position) as resumed:
        assert keys_and_revisions(await next_events(resumed, 5)) == made


# Slow watchers ----------------------------------------------------------------


async def test_a_slow_watcher_gets_everything(store: limpet.Store) -> None:
    """A slow watcher misses nothing and delays no other.

    It is thousands of changes behind, more than any buffer in memory holds.
    """
    async with store.watch() as slow, store.watch("end") as quick:
        made = await fill(store, 3600)
        end = await store.put("end", 1)
        assert (await next_event(quick)).entry == end

        events = await next_events(slow, 3601)
        await assert_quiet(slow)

    assert keys_and_revisions(events) == [*made, ("end", end.revision)]


async def test_a_slow_watcher_that_reads_a_little_gets_everything(store: limpet.Store) -> None:
    """A slow watcher misses nothing and delays no other."""
    made: list[tuple[str, int]] = []
    events: list[limpet.Event] = []
    async with store.watch() as slow, store.watch("end") as quick:
        for turn in range(8):
            made += await fill(store, 500, f"{turn}-")
            events += await next_events(slow, 10 * turn)
        await store.put("end", 1)
        await next_event(quick)
        events += await next_events(slow, 4000 - len(events))

    assert keys_and_revisions(events) == made


async def test_a_watcher_that_never_reads_holds_up_no_other_caller(store: limpet.Store) -> None:
    """A slow watcher misses nothing and delays no other."""
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(5):
            await stack.enter_async_context(store.watch())
        quick = await stack.enter_async_context(store.watch())

        async with asyncio.timeout(4 * SOON_S):
            made = await fill(store, 1000)
            assert keys_and_revisions(await next_events(quick, 1000)) == made


async def test_a_dropping_watcher_says_how_many_it_dropped(store: limpet.Store) -> None:
    """With `overflow="drop"` a slow watcher skips changes, and counts how many it dropped."""
    async with store.watch(overflow="drop") as lazy, store.watch() as keen:
        await fill(store, 1000)
        await store.put("end", 1)
        whole = await next_events(keen, 1001)

        kept = await until_key(lazy, "end")
        dropped = lazy.dropped

    assert dropped > 0
    assert dropped + len(kept) == 1001
    assert kept == whole[-len(kept) :]


async def test_a_dropping_watcher_far_behind_counts_right(store: limpet.Store) -> None:
    """With `overflow="drop"` a slow watcher skips changes, and counts how many it dropped."""
    async with store.watch(overflow="drop") as lazy, store.watch("end") as keen:
        made = await fill(store, 3600)
        end = await store.put("end", 1)
        await next_event(keen)

        kept = await until_key(lazy, "end")
        dropped = lazy.dropped

    assert dropped > 0
    assert dropped + len(kept) == 3601
    assert ascend(kept)
    assert {*keys_and_revisions(kept)} <= {*made, ("end", end.revision)}


async def test_a_dropping_watcher_that_keeps_up_drops_nothing(store: limpet.Store) -> None:
    """With `overflow="drop"` a slow watcher skips changes, and counts how many it dropped."""
    async with store.watch(overflow="drop") as watch:
        for number in range(100):
            entry = await store.put("a", number)
            assert (await next_event(watch)).entry == entry

        assert watch.dropped == 0


async def test_a_watcher_drops_only_on_request(store: limpet.Store) -> None:
    """With `overflow="drop"` a slow watcher skips changes, and counts how many it dropped."""
    async with store.watch() as watch:
        await fill(store, 300)
        await next_events(watch, 300)

        assert watch.dropped == 0


# Many watchers, many stores ---------------------------------------------------


async def test_forty_watchers_see_every_change(store: limpet.Store) -> None:
    """Many watchers each see every change."""
    async with contextlib.AsyncExitStack() as stack:
        watches = [await stack.enter_async_context(store.watch()) for _ in range(40)]
        made = await fill(store, 50)

        for watch in watches:
            assert keys_and_revisions(await next_events(watch, 50)) == made


async def test_watchers_of_different_patterns_do_not_disturb_each_other(store: limpet.Store) -> None:
    """Many watchers each see every change."""
    async with store.watch("a*") as a, store.watch("b*") as b, store.watch("*") as everything:
        for number in range(50):
            await store.put(f"{'ab'[number % 2]}{number}", number)

        assert [event.value for event in await next_events(a, 25)] == list(range(0, 50, 2))
        assert [event.value for event in await next_events(b, 25)] == list(range(1, 50, 2))
        assert [event.value for event in await next_events(everything, 50)] == list(range(50))


async def test_a_watcher_that_joins_later_sees_what_comes_after(store: limpet.Store) -> None:
    """Many watchers each see every change."""
    async with store.watch() as first:
        await store.put("a", 1)
        async with store.watch() as second:
            await store.put("b", 1)
            assert (await next_event(second)).key == "b"
        async with store.watch() as third:
            await store.put("c", 1)
            assert (await next_event(third)).key == "c"

        assert [event.key for event in await next_events(first, 3)] == ["a", "b", "c"]


async def test_another_store_wakes_the_watchers(store: limpet.Store, open_store: OpenStore) -> None:
    """Writes through one store wake the watchers of another."""
    other = await open_store()
    async with store.watch() as watch:
        for number in range(10):
            waiting = asyncio.ensure_future(next_event(watch))
            await asyncio.sleep(0.005)
            entry = await other.put("a", number)
            assert (await waiting).entry == entry


async def test_writes_of_two_stores_are_one_log(store: limpet.Store, open_store: OpenStore) -> None:
    """Writes through one store wake the watchers of another."""
    other = await open_store()
    async with store.watch() as here, other.watch() as there:
        first, second = await asyncio.gather(fill(store, 400, "here-"), fill(other, 400, "there-"))
        seen_here, seen_there = await next_events(here, 800), await next_events(there, 800)

    assert seen_here == seen_there
    assert sorted(keys_and_revisions(seen_here)) == sorted(first + second)
    assert ascend(seen_here)


async def test_a_watch_does_not_see_another_namespace(store: limpet.Store) -> None:
    """Writes through one store wake the watchers of another."""
    other = store.namespace(elsewhere())
    async with store.watch() as watch:
        await other.put("a", "theirs")
        await store.put("a", "ours")

        assert (await next_event(watch)).value == "ours"
        await assert_quiet(watch)


# The end ----------------------------------------------------------------------


async def test_closing_the_store_ends_who_waits(open_store: OpenStore) -> None:
    """Closing the store ends its watches normally."""
    store = await open_store()
    plain, initial = store.watch(), store.watch("nothing/*", initial=True)
    async with plain, initial:
        waiting = [asyncio.create_task(drain(plain)), asyncio.create_task(drain(initial))]
        entry = await store.put("a", 1)
        await asyncio.sleep(0.1)

        await store.close()

        events, synced = await asyncio.wait_for(asyncio.gather(*waiting), SOON_S)

    assert [event.entry for event in events] == [entry]
    assert [event.op for event in synced] == ["synced"]


async def test_closing_the_store_ends_later_requests(open_store: OpenStore) -> None:
    """Closing the store ends its watches normally."""
    store = await open_store()
    watch = store.watch()
    await watch.__aenter__()

    await store.close()

    assert await asyncio.wait_for(drain(watch), SOON_S) == []
    with pytest.raises(StopAsyncIteration):
        await anext(watch)


async def test_closing_a_store_leaves_the_watches_of_another(store: limpet.Store, open_store: OpenStore) -> None:
    """Closing the store ends its watches normally."""
    other = await open_store()
    async with store.watch() as watch:
        waiting = asyncio.ensure_future(next_event(watch))
        await asyncio.sleep(0.05)
        await other.close()
        entry = await store.put("a", 1)

        assert (await waiting).entry == entry


async def test_closing_a_watch_leaves_the_others(store: limpet.Store) -> None:
    """Closing one watch leaves the others."""
    async with store.watch() as stays:
        async with store.watch() as goes:
            await store.put("a", 1)
            await next_event(goes)
        await store.put("b", 1)

        assert [event.key for event in await next_events(stays, 2)] == ["a", "b"]


async def test_a_closed_watch_gives_nothing_more(store: limpet.Store) -> None:
    """Closing one watch leaves the others."""
    watch = store.watch()
    async with watch:
        await store.put("a", 1)
        await next_event(watch)
    await store.put("b", 1)

    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(anext(watch), SOON_S)
    await watch.aclose()


async def test_closing_a_watch_ends_who_waits_in_it(store: limpet.Store) -> None:
    """Closing one watch leaves the others.

    One task waits for the next event, another closes the watch: the first stops waiting, and it gets
    no event that came after.
    """
    async with store.watch() as stays, store.watch() as goes:
        waiting = asyncio.create_task(drain(goes))
        await asyncio.sleep(0.05)

        await goes.aclose()
        entry = await store.put("a", 1)

        assert (await next_event(stays)).entry == entry
        assert await asyncio.wait_for(waiting, SOON_S) == []


class Following:
    """An engine in front of another that counts how often its log is read, and how many read it at once.

    ``instead`` is what a read that is cancelled does for once: it returns a ``result``, or raises an ``error``.
    """

    def __init__(self, engine: Any, instead: str | None = None) -> None:
        self._engine = engine
        self._instead = instead
        self.calls = self.running = self.most = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def changes(self, namespace: str, after: int, **options: Any) -> LogPage:
        self.calls += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            page: LogPage = await self._engine.changes(namespace, after, **options)
            return page
        except asyncio.CancelledError:
            instead, self._instead = self._instead, None
            if instead is None:
                raise
            if instead == "error":
                raise Unavailable("the wait was interrupted") from None
            return LogPage([], after, (await self._engine.changes(namespace, after, limit=0)).before)
        finally:
            self.running -= 1


def follow(store: Any, instead: str | None = None) -> Following:
    """Count the reads of the log by a store."""
    session = session_of(store)
    following = Following(session.engine, instead)
    session.engine = following
    return following


async def until(is_so: Callable[[], bool]) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(10):
        while not is_so():  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.005)


async def test_the_log_is_read_by_one_while_there_are_watches(store: limpet.Store) -> None:
    """After the last watch of a namespace has ended, its log is no longer read."""
    following = follow(store)
    for number in range(3):
        async with store.watch() as every, store.watch("a") as one:
            await until(lambda: following.running == 1)
            await store.put("a", number)
            assert [(await next_event(watch)).value for watch in (every, one)] == [number] * 2

        await until(lambda: following.running == 0)
        calls = following.calls
        await store.put("a", "later")
        await asyncio.sleep(QUIET_S)

        assert (following.running, following.calls) == (0, calls)
    assert following.most == 1


@pytest.mark.parametrize("instead", ["result", "error"])
async def test_a_read_that_missed_its_cancellation_is_the_last(
    store: limpet.Store, elapse: Elapse, instead: str
) -> None:
    """After the last watch of a namespace has ended, its log is no longer read.

    A wait may miss its cancellation, as when a change or an error of the driver comes at the same moment.
    """
    following = follow(store, instead)
    async with store.watch():
        await until(lambda: following.running == 1)

    async with store.watch() as watch:
        await until(lambda: following.running > 0)
        await elapse(1.0)
        for number in range(3):
            await store.put(f"key/{number}", number)
        assert [event.value for event in await next_events(watch, 3)] == [0, 1, 2]
        await assert_quiet(watch)
        assert following.running <= 1

    await until(lambda: following.running == 0)


async def test_a_closed_store_leaves_nothing_behind(open_store: OpenStore) -> None:
    """A closed store leaves no task and no thread behind."""
    tasks, threads = running_tasks(), running_threads()
    for instead in (None, "result", "error"):
        store = await open_store(clock=limpet.SystemClock())
        following = follow(store, instead)
        watch = store.watch()
        await watch.__aenter__()
        await until(lambda following=following: following.running == 1)  # type: ignore[misc]
        await store.put("a", 1)
        assert (await next_event(watch)).value == 1
        await store.update("a", lambda number: number + 1)
        assert [entry.value async for entry in store.scan()] == [2]

        await asyncio.wait_for(store.close(), 10)

        await until(lambda: running_tasks() <= tasks and running_threads() <= threads)
        assert following.running == 0


def running_tasks() -> set[asyncio.Task[Any]]:
    """The tasks of this loop that are not over."""
    return {task for task in asyncio.all_tasks() if not task.done()}


def running_threads() -> set[threading.Thread]:
    """The threads of this process, without those on which the suite itself waits."""
    return {one for one in threading.enumerate() if not one.name.startswith(("blocking-face", "asyncio_"))}


async def test_closing_the_last_watch_ends_who_waits_in_it(store: limpet.Store) -> None:
    """Closing one watch leaves the others."""
    watch = store.watch()
    await watch.__aenter__()
    waiting = asyncio.create_task(drain(watch))
    await asyncio.sleep(0.05)

    await watch.aclose()

    assert await asyncio.wait_for(waiting, SOON_S) == []


# History ----------------------------------------------------------------------


async def test_history_gives_the_changes_of_a_key(store: limpet.Store) -> None:
    """`history` gives the changes of a key that are still in the log, oldest first."""
    entries = [await store.put("a", number) for number in range(5)]
    for key in ["aa", "a/b", "A", "b"]:
        await store.put(key, "other")

    events = await history(store, "a")

    assert [event.entry for event in events] == entries
    assert ascend(events)
    assert await history(store, "never") == []


async def test_a_long_history_is_given_whole(store: limpet.Store) -> None:
    """`history` gives the changes of a key that are still in the log, oldest first."""
    for turn in range(13):
        await asyncio.gather(*(store.add("n") for _ in range(50)))
        await fill(store, 50, f"{turn}-")

    events = await history(store, "n")

    happened = [("put", "n", value) for value in range(1, 651)]
    assert [(event.op, event.key, event.value) for event in events] == happened
    assert ascend(events)


async def test_history_starts_where_the_log_starts(open_store: OpenStore) -> None:
    """`history` gives the changes of a key that are still in the log, oldest first."""
    store = await open_store(namespace=elsewhere(), window=limpet.Window(changes=6, age_ms_min=0), sweep=False)
    for number in range(10):
        await store.put("a", number)
        await store.put("b", number)
    await store.trim()

    happened = [("put", "a", 7), ("put", "a", 8), ("put", "a", 9)]
    assert [(event.op, event.key, event.value) for event in await history(store, "a")] == happened
    await fill(store, 6)
    await store.trim()
    assert await history(store, "a") == []


@pytest.mark.parametrize("key", ["*", "a*", "a*b", "é", "a b\n", "%", "\U0010ffff"])
async def test_history_takes_a_key_and_no_pattern(store: limpet.Store, key: str) -> None:
    """`history` gives the changes of a key that are still in the log, oldest first."""
    for other in ["a", "ab", "axb", key + "x", "z"]:
        await store.put(other, "other")
    await store.put(key, "this")

    assert [(event.key, event.value) for event in await history(store, key)] == [(key, "this")]


async def test_history_and_watch_give_the_same(store: limpet.Store) -> None:
    """`history` gives the changes of a key that are still in the log, oldest first."""
    writes: list[Callable[[], Awaitable[object]]] = [
        lambda: store.record("r").set(a=1),
        lambda: store.record("r").set({"b": b"2"}, request_id="a-request"),
        lambda: store.touch("r", 60),
        lambda: store.touch("r", 70),
        lambda: store.put("r", "plain", meta={"by": "me"}),
        lambda: store.persist("r"),
        lambda: store.delete("r", request_id="the-end"),
    ]
    events: list[limpet.Event] = []
    async with store.watch("r") as watch:
        for write in writes:
            await write()
            events.append(await next_event(watch))
            assert await history(store, "r") == events


async def test_history_shows_deletions(store: limpet.Store) -> None:
    """History includes deletions and the changes after them."""
    await store.put("a", 1)
    await store.put("a", 2)
    await store.delete("a")
    await store.put("a", 3)
    await store.take("a")

    events = await history(store, "a")

    happened = [
        ("put", "a", 1, 1),
        ("put", "a", 2, 2),
        ("delete", "a", None, 2),
        ("put", "a", 3, 1),
        ("delete", "a", None, 1),
    ]
    assert [(event.op, event.key, event.value, event.entry and event.entry.version) for event in events] == happened


async def test_history_of_a_key_that_is_gone_is_still_there(store: limpet.Store) -> None:
    """History includes deletions and the changes after them."""
    await store.put("a", 1)
    await store.delete("a")

    assert await store.entry("a") is None
    happened = [("put", "a"), ("delete", "a")]
    assert [(event.op, event.key) for event in await history(store, "a")] == happened


async def test_history_shows_expiries(store: limpet.Store, elapse: Elapse) -> None:
    """History includes deletions and the changes after them.

    One incarnation was swept, the next was written over before any sweeper came.
    """
    await store.put("a", 1, ttl=0.2)
    await elapse(0.3)
    await store.sweep()
    await store.put("a", 2, ttl=0.2)
    await elapse(0.3)
    await store.put("a", 3)

    events = await history(store, "a")

    happened = [(op, "a", 1) for op in ("put", "expire", "put", "expire", "put")]
    assert [(event.op, event.key, event.entry and event.entry.version) for event in events] == happened


# What a watch does not show ---------------------------------------------------


async def work_in_secret(store: limpet.Store, elapse: Elapse) -> None:
    """Use locks and receipts in every way, and leave two keys behind."""
    lock, fence = store.lock("a", ttl=60), store.lock("fence", ttl=60)
    await lock.acquire()
    await lock.refresh()
    await lock.release()
    await store.lock("a", ttl=0.1).acquire()
    await elapse(0.2)
    await store.sweep()
    await store.lock("held", ttl=60).acquire()
    await fence.acquire()
    await store.put("a", 1, request_id="receipt-1", fence=fence)
    await store.add("b", request_id="receipt-2")
    await store.delete("missing", request_id="receipt-3")


async def test_no_scan_shows_locks_and_receipts(store: limpet.Store, elapse: Elapse) -> None:
    """Locks and receipts appear in no scan, watch or history."""
    await work_in_secret(store, elapse)

    assert [entry.key async for entry in store.scan()] == ["a", "b"]
    assert (await store.keys()).keys == ["a", "b"]
    for key in ["held", "fence", "receipt-1", "receipt-2", "receipt-3"]:
        assert await store.entry(key) is None
    assert (await store.status()).keys == 2


async def test_no_watch_shows_locks_and_receipts(store: limpet.Store, elapse: Elapse) -> None:
    """Locks and receipts appear in no scan, watch or history."""
    start = await store.put("start", 1)
    async with store.watch() as everything, store.watch("a") as exact, store.watch("receipt-*") as receipts:
        await work_in_secret(store, elapse)
        await store.put("end", 1)

        assert [event.key for event in await until_key(everything, "end")] == ["a", "b", "end"]
        assert [event.value for event in await next_events(exact, 1)] == [1]
        await assert_quiet(exact)
        await assert_quiet(receipts)
    async with store.watch(after=start.revision) as resumed:
        assert [event.key for event in await until_key(resumed, "end")] == ["a", "b", "end"]
    async with store.watch(initial=True) as initial:
        assert [event.key for event in await next_events(initial, 5)] == ["a", "b", "end", "start", ""]
        await assert_quiet(initial)


async def test_no_history_shows_locks_and_receipts(store: limpet.Store, elapse: Elapse) -> None:
    """Locks and receipts appear in no scan, watch or history."""
    await work_in_secret(store, elapse)

    assert [event.op for event in await history(store, "a")] == ["put"]
    assert [event.op for event in await history(store, "b")] == ["put"]
    for key in ["held", "fence", "receipt-1", "receipt-2", "receipt-3"]:
        assert await history(store, key) == []


# The window of the log --------------------------------------------------------


def test_the_window_is_a_day_by_default() -> None:
    """The log keeps 24 hours, 100,000 changes or 256 MB, and always the last 60 seconds."""
    window = limpet.Window()

    assert window.age_ms == 24 * 60 * 60 * 1000
    assert window.changes == 100_000
    assert window.size_bytes == 256_000_000
    assert window.age_ms_min == 60_000


async def test_the_log_keeps_what_is_within_its_window(open_store: OpenStore, elapse: Elapse) -> None:
    """The log keeps 24 hours, 100,000 changes or 256 MB, and always the last 60 seconds."""
    store = await open_store(namespace=elsewhere(), sweep=False)
    made = await fill(store, 50)
    if stands_still(store):
        await elapse(24 * 3600 - 1)

    assert await store.trim() == 0
    async with store.watch(after=0) as watch:
        assert keys_and_revisions(await next_events(watch, 50)) == made


async def test_what_is_too_old_leaves_the_log(open_store: OpenStore, elapse: Elapse) -> None:
    """The log keeps 24 hours, 100,000 changes or 256 MB, and always the last 60 seconds."""
    window = limpet.Window(age_ms=800, age_ms_min=100)
    store = await open_store(namespace=elsewhere(), window=window, sweep=False)
    await store.put("a", "old")
    await elapse(0.9)
    await store.put("b", "young")

    assert await store.trim() == 1
    assert await history(store, "a") == []
    assert [event.value for event in await history(store, "b")] == ["young"]


async def test_the_day_ends_for_the_log(open_store: OpenStore, elapse: Elapse) -> None:
    """The log keeps 24 hours, 100,000 changes or 256 MB, and always the last 60 seconds.

    Where the engine uses our clock, a day passes at once; where it uses a server's, the test keeps a second instead.
    """
    probe = await open_store(namespace=elsewhere(), sweep=False)
    day_s = 24 * 3600.0 if stands_still(probe) else 1.0
    window = limpet.Window(age_ms=round(day_s * 1000), age_ms_min=0 if day_s == 1.0 else 60_000)
    store = await open_store(namespace=elsewhere(), window=window, sweep=False)
    await store.put("a", "yesterday")
    await elapse(day_s / 2)
    await store.put("b", "noon")
    assert await store.trim() == 0
    await elapse(day_s / 2 + 0.1)

    assert await store.trim() == 1
    assert await history(store, "a") == []
    assert [event.value for event in await history(store, "b")] == ["noon"]


async def test_what_is_too_much_leaves_the_log(open_store: OpenStore) -> None:
    """The log keeps 24 hours, 100,000 changes or 256 MB, and always the last 60 seconds."""
    window = limpet.Window(changes=100, age_ms_min=0)
    store = await open_store(namespace=elsewhere(), window=window, sweep=False)
    await fill(store, 100)
    assert await store.trim() == 0
    made = await fill(store, 30, "later-")

    assert await store.trim() == 30
    assert (await store.status()).log_changes == 100
    async with store.watch(after=made[0][1]) as watch:
        assert keys_and_revisions(await next_events(watch, 29)) == made[1:]


async def test_what_is_too_large_leaves_the_log(open_store: OpenStore) -> None:
    """The log keeps 24 hours, 100,000 changes or 256 MB, and always the last 60 seconds."""
    window = limpet.Window(size_bytes=10_000, age_ms_min=0)
    store = await open_store(namespace=elsewhere(), window=window, sweep=False)
    for number in range(15):
        await store.put(f"k{number:02}", bytes(1000))

    await store.trim()

    status = await store.status()
    assert 0 < status.log_bytes <= 10_000
    assert 5 <= status.log_changes < 10
    assert await history(store, "k00") == []
    assert len(await history(store, "k14")) == 1


async def test_the_last_minute_stays_whatever_the_size(open_store: OpenStore, elapse: Elapse) -> None:
    """The log keeps 24 hours, 100,000 changes or 256 MB, and always the last 60 seconds."""
    window = limpet.Window(changes=1, size_bytes=1, age_ms=1, age_ms_min=2000)
    store = await open_store(namespace=elsewhere(), window=window, sweep=False)
    made = await fill(store, 20)
    await elapse(0.5)

    assert await store.trim() == 0
    async with store.watch(after=0) as watch:
        assert keys_and_revisions(await next_events(watch, 20)) == made
    await elapse(1.6)
    assert await store.trim() == 20


async def test_trimming_keeps_the_entries(open_store: OpenStore) -> None:
    """Trimming drops the oldest changes and keeps the entries."""
    store = await open_store(namespace=elsewhere(), window=limpet.Window(changes=3, age_ms_min=0), sweep=False)
    await fill(store, 150)
    before = [entry async for entry in store.scan()]

    assert await store.trim() == 147

    assert [entry async for entry in store.scan()] == before
    assert len(before) == 150
    status = await store.status()
    assert (status.keys, status.log_changes) == (150, 3)
    assert status.revision == before[-1].revision
    assert (await store.put("k00000", "again")).version == 2


async def test_trimming_drops_the_oldest_changes(open_store: OpenStore) -> None:
    """Trimming drops the oldest changes and keeps the entries."""
    store = await open_store(namespace=elsewhere(), window=limpet.Window(changes=4, age_ms_min=0), sweep=False)
    entries = [await store.put(f"a{number}", number) for number in range(10)]

    assert await store.trim() == 6
    assert [len(await history(store, entry.key)) for entry in entries] == [0] * 6 + [1] * 4
    async with store.watch(after=entries[5].revision) as watch:
        assert [event.entry for event in await next_events(watch, 4)] == entries[6:]
    assert await store.trim() == 0


async def test_revisions_go_on_after_trimming(open_store: OpenStore) -> None:
    """Trimming drops the oldest changes and keeps the entries."""
    store = await open_store(namespace=elsewhere(), window=limpet.Window(changes=1, age_ms_min=0), sweep=False)
    before = await store.put("a", 1)
    await store.delete("a")
    await store.trim()

    after = await store.put("a", 1)

    assert after.revision > before.revision + 1


async def test_another_namespace_keeps_its_log(open_store: OpenStore) -> None:
    """Trimming drops the oldest changes and keeps the entries."""
    store = await open_store(namespace=elsewhere(), window=limpet.Window(changes=1, age_ms_min=0), sweep=False)
    other = store.namespace(elsewhere())
    await fill(store, 5)
    made = await fill(other, 5)
    await store.trim()

    async with other.watch(after=0) as watch:
        assert keys_and_revisions(await next_events(watch, 5)) == made
