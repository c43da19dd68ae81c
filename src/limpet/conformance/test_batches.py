"""Batches: guards and writes that happen together or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import pytest

import limpet
from limpet.conformance.support import next_event
from limpet.errors import Conflict, InvalidKey, InvalidValue, LimpetError, NotFound, TypeMismatch, ValueTooLarge

if TYPE_CHECKING:
    from limpet.conformance.conftest import Elapse, OpenStore

INT_MAX = 2**63 - 1


async def put_all(store: limpet.Store, keys: Iterable[str], value: object) -> limpet.Commit:
    """Put the same value under several keys in one batch."""
    draft = store.batch()
    for key in keys:
        draft.put(key, value)
    return await draft.commit()


async def all_keys(store: limpet.Store) -> list[str]:
    """All keys of the store."""
    return (await store.keys(limit=10_000)).keys


async def everything(store: limpet.Store) -> list[limpet.Entry]:
    """All entries, with their versions and revisions."""
    return [entry async for entry in store.scan()]


async def events_until_now(store: limpet.Store, watch: limpet.Watch) -> list[limpet.Event]:
    """The events of a watch for all that happened so far."""
    await store.put("~now", None)
    events: list[limpet.Event] = []
    while (event := await next_event(watch)).key != "~now":
        events.append(event)
    return events


# Together or not at all -------------------------------------------------------


async def test_all_writes_of_a_batch_happen(store: limpet.Store) -> None:
    """All writes of a batch happen, or none."""
    await store.put("gone", 1)
    await store.put("count", 1)

    await store.batch().put("new", "value").delete("gone").add("count", 4).set("record", {"a": 1}).commit()

    assert {entry.key: entry.value async for entry in store.scan()} == {"count": 5, "new": "value", "record": {"a": 1}}


async def test_no_write_happens_when_one_guard_of_many_fails(store: limpet.Store) -> None:
    """All writes of a batch happen, or none."""
    keys = [f"key/{number:02}" for number in range(20)]
    await put_all(store, keys, 1)
    before = await everything(store)
    draft = store.batch()
    for key in keys:
        draft.expect(key, limpet.Version(2 if key == keys[-1] else 1)).put(key, 2)

    with pytest.raises(Conflict):
        await draft.commit()

    assert await everything(store) == before


async def test_a_reader_never_finds_half_a_batch(store: limpet.Store) -> None:
    """All writes of a batch happen, or none.

    A writer always leaves the same value in three keys. A reader that guards one of them must see the same in all.
    """
    keys = ["a", "b", "c"]
    await put_all(store, keys, 0)
    written = asyncio.Event()
    halves: list[limpet.Entry | None] = []

    async def write() -> None:
        for number in range(1, 40):
            await put_all(store, keys, number)
            await asyncio.sleep(0)
        written.set()

    async def read() -> None:
        while not written.is_set():
            seen = await store.entry("a")
            assert seen is not None
            check = store.batch().expect("a", seen)
            for key in keys[1:]:
                check.expect(key, limpet.equals(seen.value))
            try:
                await check.commit()
            except Conflict as conflict:
                if conflict.key != "a":
                    halves.append(conflict.current)
            await asyncio.sleep(0)

    await asyncio.gather(write(), read(), read())

    assert halves == []


async def test_a_watcher_sees_all_of_a_batch(store: limpet.Store) -> None:
    """All writes of a batch happen, or none."""
    keys = [f"key/{number:02}" for number in range(20)]
    async with store.watch() as watch:
        commit = await put_all(store, keys, 1)
        events = await events_until_now(store, watch)

    assert [(event.op, event.key) for event in events] == [("put", key) for key in keys]
    assert {event.commit for event in events} == {commit.revision}


async def test_batches_sent_together_have_each_their_own_fate(store: limpet.Store) -> None:
    """All writes of a batch happen, or none.

    An engine may commit several batches as a group. A refused batch must not make others fail, and others must not
    make it succeed.
    """
    await store.put("text", "no counter")

    async def send(number: int) -> bool:
        draft = store.batch().put(f"{number:02}/first", number)
        if number % 4 == 1:
            draft.expect("text", limpet.ABSENT)
        if number % 4 == 3:
            draft.add("text")
        with contextlib.suppress(Conflict, TypeMismatch):
            await draft.put(f"{number:02}/last", number).commit()
            return True
        return False

    done = await asyncio.gather(*(send(number) for number in range(32)))

    assert done == [number % 2 == 0 for number in range(32)]
    assert await all_keys(store) == [
        *(f"{number:02}/{name}" for number in range(0, 32, 2) for name in ("first", "last")),
        "text",
    ]


# Guards -----------------------------------------------------------------------


async def test_a_guard_does_not_see_the_writes_of_its_batch(store: limpet.Store) -> None:
    """Guards see the state before the batch."""
    with pytest.raises(Conflict) as refused:
        await store.batch().put("a", 1).expect("a", limpet.PRESENT).put("b", 1).commit()

    assert (refused.value.key, refused.value.current) == ("a", None)
    assert await all_keys(store) == []


async def test_a_key_may_be_written_that_is_expected_to_be_absent(store: limpet.Store) -> None:
    """Guards see the state before the batch.

    The order of the calls does not matter: the guard comes after the write here, and holds all the same.
    """
    commit = await store.batch().put("a", 1).put("b", 1).expect("b", limpet.ABSENT).expect("a", None).commit()

    assert [entry and entry.version for entry in commit.entries] == [1, 1]


async def test_a_key_may_be_ended_that_is_expected_to_be_there(store: limpet.Store) -> None:
    """Guards see the state before the batch."""
    held = await store.put("a", "held")

    await store.batch().delete("a").expect("a", held).put("b", 1).expect("a", limpet.equals("held")).commit()

    assert await all_keys(store) == ["b"]


async def test_two_keys_exchange_their_values(store: limpet.Store) -> None:
    """Guards see the state before the batch."""
    await store.put("a", 1)
    await store.put("b", 2)

    draft = store.batch().expect("a", limpet.equals(1)).put("a", 2).expect("b", limpet.equals(2)).put("b", 1)
    await draft.commit()

    assert (await store.get("a"), await store.get("b")) == (2, 1)


async def test_several_guards_of_one_key_must_all_hold(store: limpet.Store) -> None:
    """Guards see the state before the batch."""
    entry = await store.put("a", {"state": "idle"})
    met: tuple[Any, ...] = (
        entry,
        limpet.Version(1),
        limpet.PRESENT,
        limpet.equals({"state": "idle"}),
        limpet.field("state") == "idle",
    )
    draft, refused = store.batch().put("b", 1), store.batch().put("b", 2)
    for expectation in met:
        draft.expect("a", expectation)
        refused.expect("a", expectation)

    await draft.commit()
    with pytest.raises(Conflict):
        await refused.expect("a", limpet.Version(2)).commit()

    assert await store.get("b") == 1


async def test_the_guard_of_a_swap_sees_the_state_before(store: limpet.Store) -> None:
    """Guards see the state before the batch."""
    await store.record("job").put({"state": "idle"})

    await store.batch().swap("job", "state", "idle", "busy").expect("job", limpet.field("state") == "idle").commit()
    with pytest.raises(Conflict):
        await store.batch().swap("job", "state", "idle", "busy").put("log", 1).commit()

    assert await all_keys(store) == ["job"]


async def test_guards_take_an_expired_key_for_absent(store: limpet.Store, elapse: Elapse) -> None:
    """Guards see the state before the batch."""
    expired = await store.put("a", 1, ttl=0.1)
    await elapse(0.15)

    with pytest.raises(Conflict) as refused:
        await store.batch().expect("a", expired).put("b", 1).commit()
    await store.batch().expect("a", limpet.ABSENT).put("b", 2).commit()

    assert refused.value.current is None
    assert await all_keys(store) == ["b"]


# Refusal ----------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[limpet.Draft], Any], type[LimpetError]]] = {
    "guard": (lambda draft: draft.expect("text", limpet.Version(9)), Conflict),
    "created twice": (lambda draft: draft.create("text", 1), Conflict),
    "swap lost": (lambda draft: draft.swap("record", "a", 2, 3), Conflict),
    "wrong type": (lambda draft: draft.add("text"), TypeMismatch),
    "no record": (lambda draft: draft.set("text", {"a": 1}), TypeMismatch),
    "missing record": (lambda draft: draft.set("missing", {"a": 1}, if_exists=True), NotFound),
    "overflow": (lambda draft: draft.add("full"), InvalidValue),
    "record too large": (lambda draft: draft.set("record", {"b": b"x" * 999_990}), ValueTooLarge),
}


@pytest.mark.parametrize(("spoil", "error"), REFUSED.values(), ids=REFUSED.keys())
async def test_a_refused_batch_leaves_no_trace(
    store: limpet.Store, spoil: Callable[[limpet.Draft], Any], error: type[LimpetError]
) -> None:
    """A refused batch leaves no trace: no change, no event, no revision."""
    await store.put("text", "text")
    await store.put("full", INT_MAX)
    await store.put("count", 1, ttl=600)
    await store.put("ends", 1)
    await store.record("record").put({"a": b"x" * 20})
    before, revision = await everything(store), (await store.status()).revision
    async with store.watch() as watch:
        draft = store.batch().put("new", 1).add("count").touch("ends", 60).take("ended").create("made", 1)
        draft.create("kept", 1, or_keep=True)
        spoil(draft)
        with pytest.raises(error):
            await draft.delete("other").put("last", 1).commit()

        assert await everything(store) == before
        assert (await store.status()).revision == revision
        assert await events_until_now(store, watch) == []


async def test_a_refused_batch_makes_no_expiry_official(store: limpet.Store, elapse: Elapse) -> None:
    """A refused batch leaves no trace: no change, no event, no revision.

    A write on an expired key logs the expiry before itself. A refused write must not do even that.
    """
    await store.put("text", "text")
    await store.put("expired", 1, ttl=0.1)
    await elapse(0.15)
    async with store.watch() as watch:
        revision = (await store.status()).revision
        with pytest.raises(TypeMismatch):
            await store.batch().put("expired", 2).add("text").commit()
        assert await store.entry("expired") is None
        assert (await store.status()).revision == revision

        written = await store.put("expired", 3)
        events = await events_until_now(store, watch)

    happened = [("expire", "expired"), ("put", "expired")]
    assert [(event.op, event.key) for event in events] == happened
    assert written.version == 1


async def test_a_refused_batch_can_be_sent_again_when_the_state_fits(store: limpet.Store) -> None:
    """A refused batch leaves no trace: no change, no event, no revision."""

    def transfer() -> Any:
        draft = store.batch().expect("open", limpet.PRESENT)
        return draft.add("from", -5).add("to", 5).commit()

    with pytest.raises(Conflict):
        await transfer()
    await store.put("open", True)
    await transfer()

    assert (await store.get("from"), await store.get("to")) == (-5, 5)


# Revisions --------------------------------------------------------------------


async def test_revisions_grow_in_the_order_of_the_writes(store: limpet.Store) -> None:
    """Each change has its own revision, growing in the order of the writes."""
    earlier = await store.put("m", 0)
    keys = ["z", "a", "m", "🦪", "b"]

    commit = await put_all(store, keys, 1)

    revisions = [entry.revision for entry in commit.entries if entry is not None]
    assert len(revisions) == len(keys)
    assert earlier.revision < revisions[0]
    assert revisions == sorted(set(revisions))


async def test_every_kind_of_change_has_its_own_revision(store: limpet.Store) -> None:
    """Each change has its own revision, growing in the order of the writes."""
    await put_all(store, ["take", "delete", "touch"], 1)
    await store.record("swap").put({"a": 1})
    async with store.watch() as watch:
        draft = store.batch().take("take").put("put", 1).touch("touch", 60).swap("swap", "a", 1, 2).delete("delete")
        commit = await draft.add("add").commit()
        events = await events_until_now(store, watch)

    assert [(event.op, event.key) for event in events] == [
        ("delete", "take"),
        ("put", "put"),
        ("touch", "touch"),
        ("patch", "swap"),
        ("delete", "delete"),
        ("put", "add"),
    ]
    revisions = [event.revision for event in events]
    assert revisions == sorted(set(revisions))
    assert revisions[-1] == commit.revision


async def test_an_expiry_in_a_batch_has_its_own_revision(store: limpet.Store, elapse: Elapse) -> None:
    """Each change has its own revision, growing in the order of the writes.

    Writing an expired key makes two changes, and the later writes get later revisions.
    """
    await put_all(store, ["first", "last"], 1)
    await store.put("expired", 1, ttl=0.1)
    async with store.watch() as watch:
        await elapse(0.15)
        commit = await store.batch().put("first", 2).put("expired", 2).put("last", 2).commit()
        events = await events_until_now(store, watch)

    happened = [("put", "first"), ("expire", "expired"), ("put", "expired"), ("put", "last")]
    assert [(event.op, event.key) for event in events] == happened
    revisions = [event.revision for event in events]
    assert revisions == sorted(set(revisions))
    made = [event.revision for event in events if event.op == "put"]
    assert [entry.revision for entry in commit.entries if entry is not None] == made


async def test_a_write_that_changes_nothing_has_no_revision(store: limpet.Store) -> None:
    """Each change has its own revision, growing in the order of the writes."""
    async with store.watch() as watch:
        commit = await store.batch().delete("x").put("a", 1).touch("y", 60).take("z").commit()
        events = await events_until_now(store, watch)

    assert [(event.op, event.key, event.revision) for event in events] == [("put", "a", commit.revision)]


async def test_a_revision_that_was_skipped_names_nothing(store: limpet.Store) -> None:
    """Revisions may skip numbers; do not count on consecutive ones."""
    entries = [await store.put("key", number) for number in range(10)]
    used = {entry.revision for entry in entries}
    skipped = set(range(entries[0].revision, entries[-1].revision)) - used

    for number in sorted(skipped)[:30]:
        with pytest.raises(Conflict):
            await store.put("key", "mine", expect=limpet.Revision(number))

    assert await store.entry("key") == entries[-1]


async def test_revisions_give_order_and_not_distance(store: limpet.Store) -> None:
    """Revisions may skip numbers; do not count on consecutive ones.

    Whatever lies between two revisions, a watch that goes on after the first gets the second next.
    """
    revisions = [(await store.put(f"key-{number}", number)).revision for number in range(10)]

    assert revisions == sorted(set(revisions))
    for revision, following in itertools.pairwise(revisions):
        async with store.watch(after=revision) as watch:
            assert (await next_event(watch)).revision == following


async def test_a_namespace_ends_where_its_last_change_was(store: limpet.Store) -> None:
    """Revisions may skip numbers; do not count on consecutive ones."""
    assert (await store.status()).revision == 0
    for number in range(10):
        commit = await put_all(store, ["a", "b"], number)

        assert (await store.status()).revision == commit.revision


# The commit -------------------------------------------------------------------


async def test_a_commit_has_the_entries_in_the_order_of_the_writes(store: limpet.Store) -> None:
    """The commit has the last revision and, for each write, the entry after it."""
    keys = [f"key/{(number * 37) % 100:02}" for number in range(100)]

    commit = await put_all(store, keys, 1)

    assert [entry and entry.key for entry in commit.entries] == keys
    last = commit.entries[-1]
    assert last is not None
    assert commit.revision == last.revision


async def test_the_entries_of_a_commit_are_those_that_are_read(store: limpet.Store) -> None:
    """The commit has the last revision and, for each write, the entry after it."""
    await store.put("put", 1, ttl=60)
    await store.put("add", 1, ttl=60, meta={"by": "me"})
    await store.put("touch", b"raw", meta={"by": "me"})
    await store.record("set").put({"a": 1, "b": b"\xff"})
    await store.record("swap").put({"a": 1})
    draft = store.batch().put("put", 2).add("add").touch("touch", 60).create("create", 1, ttl=60)

    commit = await draft.set("set", {"c": 1}, unset=["a"]).swap("swap", "a", 1, 2).commit()

    keys = ["put", "add", "touch", "create", "set", "swap"]
    assert list(commit.entries) == [await store.entry(key) for key in keys]
    assert [entry and entry.value for entry in commit.entries] == [2, 2, b"raw", 1, {"b": b"\xff", "c": 1}, {"a": 2}]


async def test_a_commit_shows_where_no_entry_is_left(store: limpet.Store) -> None:
    """The commit has the last revision and, for each write, the entry after it."""
    await put_all(store, ["delete", "take"], 1)

    draft = store.batch().delete("delete").put("put", 1).take("take").touch("missing", 60).delete("nowhere")
    commit = await draft.commit()

    assert [entry and entry.key for entry in commit.entries] == [None, "put", None, None, None]
    assert commit.revision == (await store.status()).revision


async def test_a_commit_has_what_was_taken(store: limpet.Store) -> None:
    """The commit has the last revision and, for each write, the entry after it.

    A commit has the entry that each write ended, with its value if it was taken.
    """
    values = ["text", b"raw", None, limpet.Fields(a=1, b=b"\0")]
    for number, value in enumerate(values):
        await store.put(str(number), value)
    draft = store.batch().put("put", 1)
    for number in range(len(values)):
        draft.take(str(number))

    commit = await draft.delete("put/missing").commit()

    taken = [entry.value for entry in commit.ended if entry is not None]
    assert taken == values
    assert [entry is None for entry in commit.ended] == [True, False, False, False, False, True]


async def test_a_commit_that_changes_nothing_names_the_revision_there_is(store: limpet.Store) -> None:
    """The commit has the last revision and, for each write, the entry after it."""
    await store.put("a", 1)
    revision = (await store.status()).revision

    commit = await store.batch().delete("x").touch("y", 60).commit()

    assert (commit.revision, commit.entries) == (revision, (None, None))
    assert (await store.status()).revision == revision


# Guarding what is not written -------------------------------------------------


async def test_a_key_that_is_only_guarded_is_not_changed(store: limpet.Store) -> None:
    """A batch may guard keys that it does not write, and those are not changed."""
    config = await store.put("config", {"open": True}, ttl=600, meta={"by": "me"})
    async with store.watch() as watch:
        draft = store.batch().expect("config", config).expect("missing", limpet.ABSENT)
        commit = await draft.put("a", 1).put("b", 1).commit()
        events = await events_until_now(store, watch)

    assert await store.entry("config") == config
    assert await store.entry("missing") is None
    assert [event.key for event in events] == ["a", "b"]
    assert len(commit.entries) == 2


async def test_a_key_that_is_only_guarded_decides_about_the_writes(store: limpet.Store) -> None:
    """A batch may guard keys that it does not write, and those are not changed."""
    seen = await store.put("config", 1)
    changed = await store.put("config", 2)

    with pytest.raises(Conflict) as refused:
        await store.batch().expect("config", seen).put("a", 1).commit()

    assert (refused.value.key, refused.value.current) == ("config", changed)
    assert await store.entry("a") is None


async def test_an_expired_key_that_is_only_guarded_waits_for_the_sweeper(store: limpet.Store, elapse: Elapse) -> None:
    """A batch may guard keys that it does not write, and those are not changed."""
    await store.put("expired", 1, ttl=0.1)
    await elapse(0.15)
    async with store.watch() as watch:
        commit = await store.batch().expect("expired", limpet.ABSENT).put("a", 1).commit()
        events = await events_until_now(store, watch)

    assert [(event.op, event.key) for event in events if event.commit == commit.revision] == [("put", "a")]


async def test_two_who_guard_what_the_other_writes_do_not_both_pass(store: limpet.Store) -> None:
    """A batch may guard keys that it does not write, and those are not changed.

    Of two doctors on call, one may leave. Each guards that the other stays: write skew would let both go.
    """
    for number in range(10):
        names = (f"{number}/ann", f"{number}/bob")
        await put_all(store, names, "on call")

        async def leave(me: str, other: str) -> bool:
            with contextlib.suppress(Conflict):
                await store.batch().expect(other, limpet.equals("on call")).put(me, "gone").commit()
                return True
            return False

        assert sum(await asyncio.gather(leave(*names), leave(*reversed(names)))) == 1


async def test_a_batch_without_writes_checks_its_guards(store: limpet.Store) -> None:
    """A batch without writes only checks its guards."""
    entry = await store.put("a", 1)
    before = await store.status()
    async with store.watch() as watch:
        commit = await store.batch().expect("a", entry).expect("b", limpet.ABSENT).commit()
        events = await events_until_now(store, watch)

    assert (commit.revision, commit.entries, commit.ended) == (before.revision, (), ())
    assert events == []
    assert await store.entry("a") == entry


async def test_a_batch_without_writes_can_be_refused(store: limpet.Store) -> None:
    """A batch without writes only checks its guards."""
    entry = await store.put("a", 1)
    revision = (await store.status()).revision

    with pytest.raises(Conflict) as refused:
        await store.batch().expect("b", limpet.ABSENT).expect("a", limpet.equals(2)).commit()

    assert (refused.value.key, refused.value.current) == ("a", entry)
    assert (await store.status()).revision == revision


async def test_a_check_of_an_empty_namespace_passes(store: limpet.Store) -> None:
    """A batch without writes only checks its guards."""
    commit = await store.batch().expect("a", None).commit()

    assert (commit.revision, commit.entries) == (0, ())


# Limits -----------------------------------------------------------------------

TWICE: dict[str, Callable[[limpet.Draft], limpet.Draft]] = {
    "put, put": lambda draft: draft.put("key", 1).put("key", 2),
    "put, delete": lambda draft: draft.put("key", 1).delete("key"),
    "delete, put": lambda draft: draft.delete("key").put("key", 1),
    "delete, create": lambda draft: draft.delete("key").create("key", 1),
    "add, add": lambda draft: draft.add("key").add("key"),
    "put, touch": lambda draft: draft.put("key", 1).touch("key", 60),
    "set, set": lambda draft: draft.set("key", {"a": 1}).set("key", {"b": 1}),
    "swap, swap": lambda draft: draft.swap("key", "a", 1, 2).swap("key", "b", 1, 2),
    "take, take": lambda draft: draft.take("key").take("key"),
    "far apart": lambda draft: draft.put("key", 1).put("a", 1).put("b", 1).add("key"),
}


@pytest.mark.parametrize("twice", TWICE.values(), ids=TWICE.keys())
async def test_no_key_is_written_twice(store: limpet.Store, twice: Callable[[limpet.Draft], limpet.Draft]) -> None:
    """Each key is written at most once in a batch; twice is InvalidKey."""
    before = await store.record("key").put({"a": 1, "b": 1})

    with pytest.raises(InvalidKey) as refused:
        await twice(store.batch().put("other", 1)).commit()

    assert refused.value.key == "key"
    assert await everything(store) == [before]


async def test_a_key_may_be_guarded_and_written(store: limpet.Store) -> None:
    """Each key is written at most once in a batch; twice is InvalidKey."""
    await store.put("key", 1)

    commit = await store.batch().expect("key", limpet.Version(1)).expect("key", limpet.equals(1)).add("key").commit()

    assert [entry and entry.value for entry in commit.entries] == [2]


async def test_keys_that_look_alike_are_two_keys_in_a_batch(store: limpet.Store) -> None:
    """Each key is written at most once in a batch; twice is InvalidKey."""
    keys = ["key", "Key", "key ", "\u00e9", "e\u0301", "a%", "a_"]

    await put_all(store, keys, 1)

    assert await all_keys(store) == sorted(keys)


async def test_a_batch_of_128_writes_is_accepted(store: limpet.Store) -> None:
    """A batch holds up to 128 writes."""
    keys = [f"key/{number:03}" for number in range(128)]

    commit = await put_all(store, keys, 1)

    assert len(commit.entries) == 128
    assert await all_keys(store) == keys


async def test_a_batch_of_129_writes_is_refused(store: limpet.Store) -> None:
    """A batch holds up to 128 writes."""
    with pytest.raises(InvalidValue):
        await put_all(store, [f"key/{number:03}" for number in range(129)], 1)

    assert await all_keys(store) == []


async def test_writes_of_every_kind_count(store: limpet.Store) -> None:
    """A batch holds up to 128 writes.

    A write that would change nothing is counted too.
    """
    draft = store.batch()
    for number in range(43):
        draft.put(f"put/{number}", 1).delete(f"delete/{number}").touch(f"touch/{number}", 60)

    with pytest.raises(InvalidValue):
        await draft.commit()

    assert await all_keys(store) == []


async def test_a_full_batch_may_guard_all_it_writes(store: limpet.Store) -> None:
    """A batch holds up to 128 writes.

    Guards of written keys are not counted, and 16 others fit beside them.
    """
    keys = [f"key/{number:03}" for number in range(128)]
    await put_all(store, keys, 1)
    draft = store.batch()
    for key in keys:
        draft.expect(key, limpet.equals(1)).put(key, 2)
    for number in range(16):
        draft.expect(f"other/{number}", limpet.ABSENT)

    commit = await draft.commit()

    assert [entry and entry.value for entry in commit.entries] == [2] * 128


async def test_a_batch_guards_16_other_keys(store: limpet.Store) -> None:
    """A batch guards up to 16 keys that it does not write."""
    keys = [f"key/{number:02}" for number in range(16)]
    await put_all(store, keys, 1)
    draft = store.batch().put("written", 1)
    for key in keys:
        draft.expect(key, limpet.PRESENT)

    await draft.commit()

    assert await store.get("written") == 1


async def test_a_batch_does_not_guard_17_other_keys(store: limpet.Store) -> None:
    """A batch guards up to 16 keys that it does not write."""
    draft = store.batch().put("written", 1)
    for number in range(17):
        draft.expect(f"key/{number}", limpet.ABSENT)

    with pytest.raises(InvalidValue):
        await draft.commit()

    assert await all_keys(store) == []


async def test_a_check_guards_16_keys_and_no_more(store: limpet.Store) -> None:
    """A batch guards up to 16 keys that it does not write."""
    draft = store.batch()
    for number in range(16):
        draft.expect(f"key/{number}", limpet.ABSENT)
    await draft.commit()

    wider = store.batch()
    for number in range(17):
        wider.expect(f"key/{number}", limpet.ABSENT)
    with pytest.raises(InvalidValue):
        await wider.commit()


async def test_keys_and_not_guards_are_counted(store: limpet.Store) -> None:
    """A batch guards up to 16 keys that it does not write."""
    entry = await store.put("key", 1)
    draft = store.batch().put("written", 1)
    for _ in range(17):
        draft.expect("key", entry)

    await draft.commit()

    assert await store.get("written") == 1


async def test_a_batch_may_hold_exactly_its_limit(store: limpet.Store) -> None:
    """The values of a batch of several writes are together at most 4,000,000 bytes."""
    draft = store.batch()
    for key in "abcd":
        draft.put(key, key.encode() * 1_000_000)

    await draft.commit()

    assert [len(entry.value) async for entry in store.scan()] == [1_000_000] * 4


async def test_a_batch_may_not_hold_a_byte_more(store: limpet.Store) -> None:
    """The values of a batch of several writes are together at most 4,000,000 bytes."""
    draft = store.batch()
    for key in "abcd":
        draft.put(key, key.encode() * 1_000_000)

    with pytest.raises(ValueTooLarge) as refused:
        await draft.put("e", b"x").commit()

    assert (refused.value.size_bytes, refused.value.limit_bytes) == (4_000_001, 4_000_000)
    assert await all_keys(store) == []


async def test_json_and_fields_count_by_their_encoding(store: limpet.Store) -> None:
    """The values of a batch of several writes are together at most 4,000,000 bytes.

    A text counts its quotes, a field its name and its encoding.
    """

    def draft(spare: int) -> limpet.Draft:
        batch = store.batch().put("a", "x" * 999_998).put("b", limpet.Fields(name=b"x" * 999_996))
        return batch.set("c", {"name": "x" * 999_994}).put("d", ["x" * (999_996 - spare)])

    await draft(0).commit()
    with pytest.raises(ValueTooLarge) as refused:
        await draft(1).put("e", 10).commit()

    assert refused.value.size_bytes == 4_000_001
    assert await store.entry("e") is None


async def test_a_batch_of_one_write_is_held_to_the_limit_of_a_value(open_store: OpenStore) -> None:
    """A batch of one write is held to the limit of a value alone."""
    store = await open_store(max_value_bytes=4_500_000)
    large = b"x" * 4_500_000
    await store.put("put", large)
    await store.batch().put("batch", large).commit()
    await store.create("guarded", large)

    for key in ("put", "batch", "guarded"):
        assert await store.get(key) == large
    with pytest.raises(ValueTooLarge):
        await store.put("more", large + b"x")
    with pytest.raises(ValueTooLarge):
        await store.batch().put("more", large).put("and", 1).commit()
    assert await store.get("more") is None


async def test_an_empty_batch_is_refused(store: limpet.Store) -> None:
    """An empty batch is InvalidValue."""
    with pytest.raises(InvalidValue):
        await store.batch().commit()

    assert (await store.status()).revision == 0


async def test_a_batch_is_not_applied_twice_by_committing_it_twice(store: limpet.Store) -> None:
    """A batch is committed once; committing it again is InvalidValue, whatever became of it."""
    draft = store.batch().add("visits")
    await draft.commit()

    with pytest.raises(InvalidValue, match="once"):
        await draft.commit()

    assert await store.get("visits") == 1


async def test_a_refused_batch_is_drafted_anew(store: limpet.Store) -> None:
    """A batch is committed once; committing it again is InvalidValue, whatever became of it."""
    draft = store.batch().expect("leader", limpet.PRESENT).add("visits")
    with pytest.raises(Conflict):
        await draft.commit()
    await store.put("leader", "worker-1")

    with pytest.raises(InvalidValue, match="once"):
        await draft.commit()

    assert await store.get("visits") is None


async def test_a_batch_that_expects_anything_is_empty(store: limpet.Store) -> None:
    """An empty batch is InvalidValue."""
    with pytest.raises(InvalidValue):
        await store.batch().expect("key", limpet.ANY).commit()


# Writes -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "key"), [("add", "text"), ("add", "float"), ("add", "record"), ("set", "text"), ("set", "bytes")]
)
async def test_a_last_write_of_the_wrong_type_undoes_all_before_it(store: limpet.Store, verb: str, key: str) -> None:
    """A write of the wrong type refuses the whole batch.

    127 good writes come first, and not one of them may stay.
    """
    await store.batch().put("text", "1").put("float", 1.0).put("bytes", b"1").set("record", {"a": 1}).commit()
    before, revision = await everything(store), (await store.status()).revision
    draft = store.batch()
    for number in range(127):
        draft.put(f"key/{number:03}", number)

    with pytest.raises(TypeMismatch) as refused:
        await (draft.add(key) if verb == "add" else draft.set(key, {"a": 1})).commit()

    assert refused.value.key == key
    assert await everything(store) == before
    assert (await store.status()).revision == revision


async def test_a_first_write_of_the_wrong_type_stops_those_behind_it(store: limpet.Store) -> None:
    """A write of the wrong type refuses the whole batch."""
    text = await store.put("text", "1")

    with pytest.raises(TypeMismatch):
        await store.batch().add("text").put("a", 1).delete("text/b").commit()

    assert await everything(store) == [text]


async def test_the_type_is_that_before_the_batch(store: limpet.Store) -> None:
    """A write of the wrong type refuses the whole batch."""
    await store.put("a", "text")

    with pytest.raises(TypeMismatch):
        await store.batch().put("b", 1).add("a").commit()
    await store.put("a", 1)
    await store.batch().put("b", "text").add("a").commit()

    assert (await store.get("a"), await store.get("b")) == (2, "text")


async def test_a_swap_in_a_value_that_is_no_record_refuses_the_batch(store: limpet.Store) -> None:
    """A write of the wrong type refuses the whole batch."""
    plain = await store.put("plain", {"a": 1})

    with pytest.raises(TypeMismatch):
        await store.batch().put("b", 1).swap("plain", "a", 1, 2).commit()

    assert await everything(store) == [plain]


async def test_a_batch_has_every_verb(store: limpet.Store) -> None:
    """A batch puts, creates, adds, keeps minimum and maximum, sets, swaps, touches, takes and deletes."""
    await put_all(store, ["add", "touch", "take", "delete"], 1)
    await store.record("set").put({"a": 1, "b": 1})
    await store.record("swap").put({"state": "idle", "by": None})
    draft = store.batch().put("put", 1, ttl=60, meta={"by": "me"}).create("create", 1, ttl=60).add("add", 2)
    draft.set("set", {"c": 1}, unset=["a"]).swap("swap", "state", "idle", "busy", set={"by": "me"})

    commit = await draft.touch("touch", 60).take("take").delete("delete").commit()

    assert {entry.key: entry.value async for entry in store.scan()} == {
        "add": 3,
        "create": 1,
        "put": 1,
        "set": {"b": 1, "c": 1},
        "swap": {"state": "busy", "by": "me"},
        "touch": 1,
    }
    expires = [entry.key for entry in commit.entries if entry is not None and entry.expires_at is not None]
    assert expires == ["put", "create", "touch"]
    assert commit.ended[6] is not None
    assert commit.ended[6].value == 1


async def test_a_batch_creates_only_what_is_not_there(store: limpet.Store) -> None:
    """A batch puts, creates, adds, keeps minimum and maximum, sets, swaps, touches, takes and deletes."""
    there = await store.put("there", 1)

    with pytest.raises(Conflict) as refused:
        await store.batch().create("new", 1).create("there", 2).commit()

    assert refused.value.current == there
    assert await everything(store) == [there]


async def test_a_batch_keeps_what_is_there(store: limpet.Store) -> None:
    """`create` with `or_keep` in a batch keeps the entry that is there, and the rest of the batch goes on."""
    there = await store.put("there", {"a": 1}, ttl=60, meta={"by": "me"})
    raw = await store.put("raw", b"1")
    record = await store.record("record").put({"a": b"1"})
    async with store.watch() as watch:
        draft = store.batch().create("there", 2, or_keep=True).create("raw", 2, ttl=1, or_keep=True)
        draft.create("record", 2, or_keep=True).create("new", {"b": 2}, ttl=60, meta={"by": "you"}, or_keep=True)
        commit = await draft.add("count").commit()
        events = await events_until_now(store, watch)

    assert [(event.op, event.key) for event in events] == [("put", "new"), ("put", "count")]
    assert commit.entries[:3] == (there, raw, record)
    assert commit.entries[3] == await store.entry("new")
    assert (await store.entries(["there", "raw", "record"])) == [there, raw, record]
    new = commit.entries[3]
    assert new is not None
    assert (new.value, new.version, new.meta, new.expires_at is None) == ({"b": 2}, 1, {"by": "you"}, False)


async def test_a_commit_names_what_it_has_kept(store: limpet.Store) -> None:
    """The commit has the entry that was kept, and its key is in `kept`."""
    large = await store.put("large", "x" * 10_000)
    before = (await store.status()).revision

    some = await store.batch().create("large", 1, or_keep=True).create("new", 2, or_keep=True).commit()
    everything_kept = await store.batch().create("large", 1, or_keep=True).create("new", 3, or_keep=True).commit()
    nothing_kept = await store.batch().create("other", 1, or_keep=True).put("large", 2).commit()

    assert (some.kept, everything_kept.kept, nothing_kept.kept) == (("large",), ("large", "new"), ())
    assert everything_kept.entries == (large, some.entries[1])
    assert before < some.revision == everything_kept.revision < nothing_kept.revision


async def test_a_batch_does_not_keep_what_has_expired(store: limpet.Store, elapse: Elapse) -> None:
    """An expired entry is absent for every guard and for create."""
    await store.put("expired", 1, ttl=0.1)
    await elapse(0.15)

    commit = await store.batch().create("expired", 2, or_keep=True).commit()

    assert commit.kept == ()
    assert await store.get("expired") == 2
    assert [(event.op, event.value) async for event in store.history("expired")] == [
        ("put", 1),
        ("expire", None),
        ("put", 2),
    ]


async def test_a_refused_batch_keeps_nothing(store: limpet.Store) -> None:
    """`create` with `or_keep` in a batch keeps the entry that is there, and the rest of the batch goes on."""
    await store.put("there", 1)

    with pytest.raises(Conflict):
        await store.batch().expect("there", limpet.equals(2)).create("there", 3, or_keep=True).put("new", 1).commit()
    guarded = await store.batch().expect("there", limpet.equals(1)).create("there", 3, or_keep=True).commit()
    with pytest.raises(InvalidValue, match="or_keep"):
        store.batch().create("there", 1, or_keep="yes")  # type: ignore[arg-type]

    assert guarded.kept == ("there",)
    assert await all_keys(store) == ["there"]


async def test_of_many_that_create_or_keep_one_creates(store: limpet.Store, open_store: OpenStore) -> None:
    """`create` with `or_keep` in a batch keeps the entry that is there, and the rest of the batch goes on."""
    other = await open_store()

    commits = await asyncio.gather(
        *(
            (store, other)[number % 2].batch().create("one", number, or_keep=True).add("count").commit()
            for number in range(12)
        )
    )

    made = [commit for commit in commits if not commit.kept]
    assert len(made) == 1
    assert {commit.entries[0] for commit in commits} == {await store.entry("one")}
    assert await store.get("count") == 12


async def test_of_many_batches_that_take_the_same_key_one_gets_it(store: limpet.Store) -> None:
    """A batch puts, creates, adds, keeps minimum and maximum, sets, swaps, touches, takes and deletes."""
    await store.put("job", "the job")

    commits = await asyncio.gather(
        *(store.batch().take("job").put(f"log/{number}", 1).commit() for number in range(12))
    )

    assert [commit.ended[0].value for commit in commits if commit.ended[0] is not None] == ["the job"]


# Racing -----------------------------------------------------------------------

Model = dict[str, tuple[int, int]]
"""Value and version of each key, as one order of the batches would leave them."""


class Plan:
    """The description of a batch, to be sent to a store and to be replayed on a model."""

    def __init__(self, number: int, dice: random.Random, keys: list[str]) -> None:
        chosen = dice.sample(keys, dice.randint(1, len(keys)))
        # The first write always changes something, so that no two commits share a revision.
        self.writes = [
            ("put" if at == 0 else dice.choice(["put", "add", "add", "delete"]), key) for at, key in enumerate(chosen)
        ]
        self.guards = [(key, dice.random() < 0.7) for key in dice.sample(keys, dice.randint(0, 2))]
        self.number = number

    async def send(self, store: limpet.Store) -> limpet.Commit | None:
        draft = store.batch()
        for key, present in self.guards:
            draft.expect(key, limpet.PRESENT if present else limpet.ABSENT)
        for verb, key in self.writes:
            match verb:
                case "put":
                    draft.put(key, self.number * 1000)
                case "add":
                    draft.add(key)
                case _:
                    draft.delete(key)
        try:
            return await draft.commit()
        except Conflict:
            return None

    def replay(self, model: Model) -> list[tuple[int, int] | None]:
        """Apply it to the model. Returns the value and version that each write leaves."""
        assert [key in model for key, _ in self.guards] == [present for _, present in self.guards]
        left: list[tuple[int, int] | None] = []
        for verb, key in self.writes:
            value, version = model.get(key, (0, 0))
            if verb == "delete":
                model.pop(key, None)
                left.append(None)
            else:
                model[key] = (self.number * 1000 if verb == "put" else value + 1, version + 1)
                left.append(model[key])
        return left


@pytest.mark.parametrize("seed", range(3))
async def test_racing_batches_leave_the_state_of_one_order(
    store: limpet.Store, open_store: OpenStore, seed: int
) -> None:
    """Concurrent batches leave a state that some order of them would leave.

    The revisions of the commits give that order. Replayed in it, one after another, every guard holds, every
    write leaves the entry that its caller got, and the end is the state of the store.
    """
    dice = random.Random(seed)
    stores = [store, await open_store()]
    plans = [Plan(number, dice, ["a", "b", "c", "d"]) for number in range(1, 81)]

    commits = await asyncio.gather(*(plan.send(stores[at % 2]) for at, plan in enumerate(plans)))

    model: Model = {}
    done = [(commit, plan) for commit, plan in zip(commits, plans, strict=True) if commit is not None]
    assert len({commit.revision for commit, _ in done}) == len(done) > 10
    for commit, plan in sorted(done, key=lambda pair: pair[0].revision):
        returned = [None if entry is None else (entry.value, entry.version) for entry in commit.entries]
        assert returned == plan.replay(model)
    assert {entry.key: (entry.value, entry.version) async for entry in store.scan()} == model


async def test_racing_transfers_keep_the_sum(store: limpet.Store, open_store: OpenStore) -> None:
    """Concurrent batches leave a state that some order of them would leave."""
    accounts = ["a", "b", "c"]
    await put_all(store, accounts, 100)
    stores = [store, await open_store()]
    dice = random.Random(5)

    async def transfer(at: int, source: str, target: str) -> None:
        await stores[at % 2].batch().add(source, -7).add(target, 7).commit()

    await asyncio.gather(*(transfer(at, *dice.sample(accounts, 2)) for at in range(60)))

    assert sum([entry.value async for entry in store.scan()]) == 300
    assert sum([entry.version async for entry in store.scan()]) == 3 + 2 * 60


async def test_racing_batches_in_opposite_order_all_finish(store: limpet.Store, open_store: OpenStore) -> None:
    """Concurrent batches leave a state that some order of them would leave.

    Two callers that write the same keys in opposite order are the classic deadlock. Each must get through, and
    both keys end with the same writer.
    """
    stores = [store, await open_store()]

    async def write(number: int) -> limpet.Commit:
        keys = ["a", "b", "c", "d"] if number % 2 else ["d", "c", "b", "a"]
        return await put_all(stores[number // 2 % 2], keys, number)

    commits = await asyncio.gather(*(write(number) for number in range(40)))

    last = max(commits, key=lambda commit: commit.revision)
    assert last.entries[0] is not None
    assert [entry.value async for entry in store.scan()] == [last.entries[0].value] * 4
    assert {entry.version async for entry in store.scan()} == {40}


async def test_of_racing_batches_over_a_common_key_one_wins(store: limpet.Store, open_store: OpenStore) -> None:
    """Concurrent batches leave a state that some order of them would leave."""
    stores = [store, await open_store()]
    seen = await store.put("job", "free")

    async def claim(number: int) -> bool:
        draft = stores[number % 2].batch().expect("job", seen).put("job", number)
        with contextlib.suppress(Conflict):
            await draft.put(f"claim/{number}", number).put("owner", number).commit()
            return True
        return False

    won = await asyncio.gather(*(claim(number) for number in range(16)))

    assert sum(won) == 1
    winner = won.index(True)
    assert await all_keys(store) == [f"claim/{winner}", "job", "owner"]
    assert (await store.get("job"), await store.get("owner")) == (winner, winner)


# Cancelling -------------------------------------------------------------------


async def is_done(store: limpet.Store, keys: list[str]) -> bool:
    """Whether the keys exist, read in one commit. Fails when only some of them do."""
    absent, present = store.batch(), store.batch()
    for key in keys:
        absent.expect(key, limpet.ABSENT)
        present.expect(key, limpet.PRESENT)
    try:
        await absent.commit()
    except Conflict:
        await present.commit()
        return True
    return False


@pytest.mark.face("async")
async def test_a_batch_that_is_cancelled_is_whole_or_nothing(store: limpet.Store) -> None:
    """Cancelling a caller leaves the batch done or not done, never half.

    The caller is cancelled after no turn of the loop, after one, after two, and so on.
    """
    for turns in range(30):
        keys = [f"{turns}/{number}" for number in range(12)]
        caller = asyncio.create_task(put_all(store, keys, turns))
        for _ in range(turns):
            await asyncio.sleep(0)
        caller.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await caller

        answered = caller.done() and not caller.cancelled()
        assert await is_done(store, keys) or not answered


@pytest.mark.face("async")
async def test_a_batch_that_runs_out_of_time_is_whole_or_nothing(store: limpet.Store) -> None:
    """Cancelling a caller leaves the batch done or not done, never half."""
    for tenths_ms in range(30):
        keys = [f"{tenths_ms}/{number}" for number in range(12)]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(put_all(store, keys, b"x" * 10_000), tenths_ms / 10_000)

        await is_done(store, keys)


@pytest.mark.face("async")
async def test_cancelling_one_caller_leaves_the_others_alone(store: limpet.Store) -> None:
    """Cancelling a caller leaves the batch done or not done, never half.

    Batches that were sent together may share a commit. A caller that leaves does not affect the others.
    """
    dice = random.Random(3)
    for round_ in range(10):
        keys = [[f"{round_}/{number}/{part}" for part in "abc"] for number in range(20)]
        callers = [asyncio.create_task(put_all(store, part, 1)) for part in keys]
        for _ in range(dice.randrange(4)):
            await asyncio.sleep(0)
        cancelled = dice.sample(range(20), 10)
        for number in cancelled:
            callers[number].cancel()
        answers = await asyncio.gather(*callers, return_exceptions=True)

        for number, answer in enumerate(answers):
            done = await is_done(store, keys[number])
            assert done or isinstance(answer, asyncio.CancelledError)
            assert number in cancelled or isinstance(answer, limpet.Commit)


@pytest.mark.face("async")
async def test_a_store_goes_on_after_a_caller_was_cancelled(store: limpet.Store) -> None:
    """Cancelling a caller leaves the batch done or not done, never half."""
    transfers = [asyncio.create_task(store.batch().add("from", -1).add("to", 1).commit()) for _ in range(40)]
    await asyncio.sleep(0)
    for transfer in transfers[::3]:
        transfer.cancel()
    await asyncio.gather(*transfers, return_exceptions=True)

    commit = await store.batch().add("from", 0).add("to", 0).commit()

    left, right = (entry.value for entry in commit.entries if entry is not None)
    assert left + right == 0
    assert 26 <= right <= 40
