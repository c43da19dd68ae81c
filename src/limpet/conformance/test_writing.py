"""Writing: put, create, delete, take, update, and the numbers that count writes."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

import limpet
from limpet.conformance.conftest import Elapse, OpenStore
from limpet.conformance.support import PATIENCE_S, count, in_thread, next_event, session_of, wait_for_queue
from limpet.engine import Engine
from limpet.errors import Conflict, InvalidKey, InvalidValue
from limpet.model import Entry, Family


async def drain(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


@pytest_asyncio.fixture(loop_scope="module")
async def racing(open_store: OpenStore) -> limpet.Store:
    """A store on the host's clock: after a conflict `update` pauses, and these tests do not advance a manual clock."""
    return await open_store(clock=limpet.SystemClock())


# Versions ---------------------------------------------------------------------


async def test_versions_count_the_writes_of_a_key(store: limpet.Store) -> None:
    """The first write of a key has version 1, and each write adds one."""
    versions = [(await store.put("k", number)).version for number in range(5)]

    assert versions == [1, 2, 3, 4, 5]
    entry = await store.entry("k")
    assert entry is not None
    assert entry.version == 5


async def test_every_kind_of_write_counts(store: limpet.Store) -> None:
    """The first write of a key has version 1, and each write adds one."""
    versions = [(await store.create("k", 1)).version]
    await store.add("k")
    versions.append((await store.put("k", limpet.Fields(a=1))).version)
    versions.append((await store.record("k").set(b=2)).version)
    await store.record("k").swap("b", 2, 3)
    updated = await store.update("k", lambda found: {**found})
    commit = await store.batch().put("k", None).commit()
    versions += [entry.version for entry in (updated, *commit.entries) if entry is not None]

    assert versions == [1, 3, 4, 6, 7]


async def test_keys_count_apart(store: limpet.Store) -> None:
    """The first write of a key has version 1, and each write adds one."""
    for _ in range(3):
        await store.put("a", 1)

    assert (await store.put("b", 1)).version == 1
    assert (await store.put("a", 1)).version == 4


async def test_reading_counts_nothing(store: limpet.Store) -> None:
    """The first write of a key has version 1, and each write adds one."""
    written = await store.put("k", 1)

    await store.get("k")
    await drain(store.scan())
    await store.keys()
    await drain(store.history("k"))

    assert await store.entry("k") == written
    assert (await store.put("k", 2)).version == 2


async def test_a_refused_write_counts_nothing(store: limpet.Store) -> None:
    """The first write of a key has version 1, and each write adds one."""
    await store.put("k", 1)

    with pytest.raises(Conflict):
        await store.put("k", 2, expect=limpet.Version(9))
    with pytest.raises(InvalidValue):
        await store.put("k", object())

    assert (await store.put("k", 3)).version == 2


async def test_versions_start_again_after_a_delete(store: limpet.Store) -> None:
    """After a delete the version starts at 1 again."""
    for number in range(3):
        await store.put("k", number)

    await store.delete("k")

    assert (await store.put("k", 1)).version == 1
    assert (await store.put("k", 1)).version == 2


async def test_versions_start_again_after_every_way_to_end(store: limpet.Store) -> None:
    """After a delete the version starts at 1 again."""
    versions = []
    await store.put("k", 1)
    await store.take("k")
    versions.append((await store.put("k", 1)).version)
    await store.update("k", lambda found: limpet.ABSENT)
    versions.append((await store.put("k", 1)).version)
    await store.batch().delete("k").commit()
    versions.append((await store.create("k", 1)).version)
    await store.record("k").delete()
    versions.append((await store.record("k").set(a=1)).version)

    assert versions == [1, 1, 1, 1]


async def test_versions_start_again_after_an_expiry(store: limpet.Store, elapse: Elapse) -> None:
    """After an expiry the version starts at 1 again."""
    await store.put("k", 1)
    await store.put("k", 2, ttl=0.1)
    await elapse(0.2)

    assert (await store.put("k", 3)).version == 1


async def test_versions_start_again_after_an_expiry_was_swept(store: limpet.Store, elapse: Elapse) -> None:
    """After an expiry the version starts at 1 again."""
    await store.put("k", 1)
    await store.put("k", 2, ttl=0.1)
    await elapse(0.2)
    await store.sweep()

    assert (await store.put("k", 3)).version == 1


async def test_every_write_starts_again_after_an_expiry(store: limpet.Store, elapse: Elapse) -> None:
    """After an expiry the version starts at 1 again."""
    for key in ("add", "create", "update", "batch"):
        await store.put(key, 7)
        await store.put(key, 7, ttl=0.1)
    await store.put("set", limpet.Fields(old=1), ttl=0.1)
    await elapse(0.2)

    await store.add("add")
    await store.create("create", 1)
    await store.update("update", lambda found: 1)
    await store.batch().put("batch", 1).commit()
    await store.record("set").set(new=1)

    found = {entry.key: (entry.version, entry.value) for entry in await drain(store.scan())}
    one = (1, 1)
    assert found == {"add": one, "create": one, "update": one, "batch": one, "set": (1, {"new": 1})}


# Revisions --------------------------------------------------------------------


async def test_revisions_grow_with_each_change(store: limpet.Store) -> None:
    """Each change of a namespace has a greater revision than every earlier one."""
    revisions = [(await store.put(f"k/{number % 3}", number)).revision for number in range(12)]

    assert revisions == sorted(set(revisions))
    assert revisions[0] > 0


async def test_every_kind_of_change_has_a_greater_revision(store: limpet.Store) -> None:
    """Each change of a namespace has a greater revision than every earlier one."""
    seen = [(await store.status()).revision]

    async def note() -> None:
        seen.append((await store.status()).revision)

    await store.put("k", 1)
    await note()
    await store.add("k")
    await note()
    await store.touch("k", 60)
    await note()
    await store.persist("k")
    await note()
    await store.update("k", lambda found: found)
    await note()
    await store.record("r").set(a=1)
    await note()
    await store.record("r").swap("a", 1, 2)
    await note()
    await store.take("k")
    await note()
    await store.delete("r")
    await note()

    assert seen == sorted(set(seen))


async def test_an_expiry_has_a_greater_revision(store: limpet.Store, elapse: Elapse) -> None:
    """Each change of a namespace has a greater revision than every earlier one."""
    written = await store.put("k", 1, ttl=0.1)
    last = await store.put("l", 1)
    await elapse(0.2)

    await store.sweep()

    events = await drain(store.history("k"))
    assert [event.op for event in events][-1] == "expire"
    assert events[-1].revision > last.revision > written.revision
    assert (await store.put("k", 2)).revision > events[-1].revision


async def test_concurrent_writes_have_revisions_of_their_own(open_store: OpenStore) -> None:
    """Each change of a namespace has a greater revision than every earlier one."""
    stores = [await open_store() for _ in range(3)]
    before = (await stores[0].put("k", 0)).revision

    entries = await asyncio.gather(*(stores[number % 3].put(f"k/{number % 7}", number) for number in range(60)))

    revisions = [entry.revision for entry in entries]
    assert len(set(revisions)) == 60
    assert min(revisions) > before
    assert (await stores[0].put("k", 1)).revision > max(revisions)


async def test_a_later_write_of_a_caller_has_a_greater_revision(open_store: OpenStore) -> None:
    """Each change of a namespace has a greater revision than every earlier one.

    Also when others write at once, and through other stores.
    """
    stores = [await open_store() for _ in range(4)]

    async def write(store: limpet.Store, name: str) -> list[int]:
        return [(await store.put(f"{name}/{number}", number)).revision for number in range(15)]

    for revisions in await asyncio.gather(*(write(store, f"w{at}") for at, store in enumerate(stores))):
        assert revisions == sorted(set(revisions))


async def test_the_version_grows_with_the_revision(open_store: OpenStore) -> None:
    """Each change of a namespace has a greater revision than every earlier one."""
    stores = [await open_store() for _ in range(3)]

    entries = await asyncio.gather(*(stores[number % 3].put("k", number) for number in range(45)))

    assert sorted(entry.version for entry in entries) == list(range(1, 46))
    by_version = sorted(entries, key=lambda entry: entry.version)
    assert [entry.revision for entry in by_version] == sorted(entry.revision for entry in entries)
    assert await stores[0].entry("k") == by_version[-1]


async def test_no_revision_is_used_again_after_a_delete(store: limpet.Store) -> None:
    """A revision is never used twice, not even across delete and recreation."""
    revisions = []
    for number in range(8):
        revisions.append((await store.put("k", number)).revision)
        await store.delete("k")
        revisions.append((await store.status()).revision)

    assert revisions == sorted(set(revisions))


async def test_an_old_revision_does_not_fit_a_recreated_key(store: limpet.Store) -> None:
    """A revision is never used twice, not even across delete and recreation."""
    old = await store.put("k", "same")
    await store.delete("k")
    new = await store.put("k", "same")

    assert (new.version, new.value) == (old.version, old.value)
    assert new.revision > old.revision
    with pytest.raises(Conflict):
        await store.put("k", 1, expect=old)
    with pytest.raises(Conflict):
        await store.put("k", 1, expect=limpet.Revision(old.revision))


async def test_no_revision_is_used_again_after_an_expiry(store: limpet.Store, elapse: Elapse) -> None:
    """A revision is never used twice, not even across delete and recreation."""
    old = await store.put("k", 1, ttl=0.1)
    await elapse(0.2)

    new = await store.put("k", 1)
    await store.sweep()

    revisions = [event.revision for event in await drain(store.history("k"))]
    assert revisions == sorted(set(revisions))
    assert new.revision > old.revision


async def test_no_revision_is_used_again_when_everything_was_deleted(
    store: limpet.Store, open_store: OpenStore
) -> None:
    """A revision is never used twice, not even across delete and recreation.

    An engine that counts from the greatest revision it finds stored would start again.
    """
    await store.put("a", 1)
    await store.put("b", 1)
    await store.delete("a")
    await store.delete("b")
    last = (await store.status()).revision

    again = await open_store()

    assert (await again.put("a", 1)).revision > last


async def test_a_refused_write_lends_its_revision_to_no_other_write(store: limpet.Store) -> None:
    """A revision is never used twice, not even across delete and recreation."""
    revisions = []
    for number in range(10):
        revisions.append((await store.put("k", number)).revision)
        with pytest.raises(Conflict):
            await store.create("k", number)

    assert revisions == sorted(set(revisions))


# Creation and update ----------------------------------------------------------


async def test_the_creation_stays_while_the_key_is_written(store: limpet.Store, elapse: Elapse) -> None:
    """The creation revision and time stay the same until the key ends."""
    first = await store.put("k", 1)
    created = (first.created_revision, first.created_at)
    assert created == (first.revision, first.updated_at)

    found: list[Entry | None] = []
    for number in range(3):
        await elapse(0.02)
        found.append(await store.put("k", number))
    await store.add("k")
    found.append(await store.entry("k"))
    found.append(await store.touch("k", 60))
    found.append(await store.persist("k"))
    found.append(await store.update("k", lambda value: {"a": value}))
    found.append(await store.put("k", limpet.Fields(a=1)))
    found.append(await store.record("k").set(b=2))
    found.append(await store.entry("k"))

    assert [entry and (entry.created_revision, entry.created_at) for entry in found] == [created] * 10


async def test_the_creation_moves_when_the_key_ends(store: limpet.Store, elapse: Elapse) -> None:
    """The creation revision and time stay the same until the key ends."""
    first = await store.put("k", 1)
    await elapse(0.05)
    await store.delete("k")

    second = await store.put("k", 1)

    assert second.created_revision == second.revision > first.created_revision
    assert second.created_at == second.updated_at > first.created_at


async def test_the_creation_moves_when_the_key_expires(store: limpet.Store, elapse: Elapse) -> None:
    """The creation revision and time stay the same until the key ends."""
    first = await store.put("k", 1, ttl=0.1)
    await elapse(0.2)

    second = await store.put("k", 1)

    assert second.created_revision == second.revision > first.created_revision
    assert second.created_at == second.updated_at > first.created_at


async def test_the_update_time_moves_with_each_write(store: limpet.Store, elapse: Elapse) -> None:
    """The update time moves with each write of the value."""
    times = [(await store.put("k", 1)).updated_at]
    for number in range(3):
        await elapse(0.02)
        times.append((await store.put("k", number)).updated_at)
    await elapse(0.02)
    await store.add("k")
    entry = await store.entry("k")
    assert entry is not None
    times.append(entry.updated_at)

    assert times == sorted(set(times))


async def test_the_update_time_moves_with_a_field(store: limpet.Store, elapse: Elapse) -> None:
    """The update time moves with each write of the value."""
    first = await store.record("k").put({"a": 1, "b": 1})
    await elapse(0.02)

    second = await store.record("k").set(a=2)

    assert second.updated_at > first.updated_at
    assert second.created_at == first.created_at


async def test_the_update_time_stands_still_without_a_write(store: limpet.Store, elapse: Elapse) -> None:
    """The update time moves with each write of the value."""
    written = await store.put("k", 1)
    await store.put("other", 1)
    await elapse(0.05)

    await store.get("k")
    touched = await store.touch("k", 60)
    await store.put("other", 2)
    with pytest.raises(Conflict):
        await store.create("k", 2)

    found = await store.entry("k")
    assert found == touched
    assert found is not None
    assert found.updated_at == written.updated_at


# Put --------------------------------------------------------------------------


async def test_a_put_replaces_the_whole_value(store: limpet.Store) -> None:
    """A put replaces the whole value."""
    await store.put("k", {"a": 1, "deep": {"b": [1, 2, 3]}})

    await store.put("k", {"deep": {}})

    assert await store.get("k") == {"deep": {}}


async def test_a_put_replaces_one_kind_by_another(store: limpet.Store) -> None:
    """A put replaces the whole value."""
    values = [{"a": 1}, limpet.Fields(b=2), b"raw", limpet.Fields(), "text", b"", None, limpet.Fields(a=b""), 5, [1]]
    for value in values:
        await store.put("k", value)
        found = await store.get("k")
        assert found == value
        assert type(found) is type(value)


async def test_a_put_of_less_leaves_nothing_of_more(store: limpet.Store) -> None:
    """A put replaces the whole value."""
    await store.put("k", limpet.Fields({f"f{number}": "x" * 100 for number in range(50)}))

    await store.put("k", limpet.Fields(only=1))

    assert await store.get("k") == {"only": 1}
    assert (await store.put("k", "s")).value == "s"


async def test_putting_an_equal_value_is_a_write(store: limpet.Store, elapse: Elapse) -> None:
    """Putting an equal value is still a write."""
    for value in (1, "same", {"a": [1]}, b"raw", None, limpet.Fields(a=1)):
        first = await store.put("k", value)
        await elapse(0.01)
        second = await store.put("k", value)
        assert second.version == first.version + 1
        assert second.revision > first.revision
        assert second.updated_at > first.updated_at


async def test_putting_an_equal_value_is_an_event(store: limpet.Store) -> None:
    """Putting an equal value is still a write."""
    await store.put("k", 1)
    async with store.watch("k") as watch:
        written = await store.put("k", 1)

        event = await next_event(watch)

    assert (event.op, event.value, event.revision) == ("put", 1, written.revision)


async def test_putting_an_equal_value_breaks_the_guard_of_others(store: limpet.Store) -> None:
    """Putting an equal value is still a write."""
    before = await store.put("k", 1)
    await store.put("k", 1)

    with pytest.raises(Conflict):
        await store.put("k", 2, expect=before)


async def test_a_put_changes_no_other_key(store: limpet.Store) -> None:
    """A put changes one key and no other."""
    others = ["a", "a/", "a/b/c", "A/B", "a/B", "a/b ", " a/b", "a/b\x01", "a_b", "a%", "b", "\u00e9"]
    before = [await store.put(key, key, ttl=60, meta={"key": key}) for key in others]

    await store.put("a/b", 1)
    await store.put("a/b", 2, ttl=5, meta={"by": "me"})
    await store.delete("a/b")
    await store.put("a/b", 3)

    assert [await store.entry(key) for key in others] == before
    assert (await store.keys()).keys == sorted([*others, "a/b"])


async def test_a_put_gives_the_entry_it_made(store: limpet.Store) -> None:
    """A put changes one key and no other."""
    await store.put("k", 1)

    written = await store.put("k", {"a": 1}, ttl=60, meta={"by": "me"})

    assert isinstance(written, Entry)
    assert await store.entry("k") == written
    assert (written.key, written.value, written.meta, written.version) == ("k", {"a": 1}, {"by": "me"}, 2)


# Create -----------------------------------------------------------------------


async def test_create_succeeds_once(store: limpet.Store) -> None:
    """`create` succeeds once per incarnation of a key and then conflicts."""
    created = await store.create("k", 1)

    with pytest.raises(Conflict) as raised:
        await store.create("k", 2)

    assert created.version == 1
    assert raised.value.key == "k"
    assert raised.value.current == created
    assert await store.entry("k") == created


async def test_create_conflicts_with_whatever_is_there(store: limpet.Store) -> None:
    """`create` succeeds once per incarnation of a key and then conflicts."""
    values: list[object] = [None, 0, "", b"", [], limpet.Fields()]
    for value in values:
        before = await store.put("k", value)
        with pytest.raises(Conflict):
            await store.create("k", "new")
        assert await store.entry("k") == before


async def test_create_succeeds_again_after_every_end(store: limpet.Store, elapse: Elapse) -> None:
    """`create` succeeds once per incarnation of a key and then conflicts."""
    await store.create("k", 1)
    await store.delete("k")
    await store.create("k", 2)
    await store.take("k")
    await store.create("k", 3, ttl=0.1)
    await elapse(0.2)

    created = await store.create("k", 4)

    assert (created.value, created.version) == (4, 1)
    with pytest.raises(Conflict):
        await store.create("k", 5)


async def test_of_all_who_create_at_once_one_succeeds(open_store: OpenStore) -> None:
    """`create` succeeds once per incarnation of a key and then conflicts."""
    stores = [await open_store() for _ in range(4)]

    answers = await asyncio.gather(
        *(stores[number % 4].create("k", number) for number in range(32)), return_exceptions=True
    )

    winners = [answer for answer in answers if isinstance(answer, Entry)]
    losers = [answer for answer in answers if isinstance(answer, Conflict)]
    assert (len(winners), len(losers)) == (1, 31)
    assert await stores[0].entry("k") == winners[0]
    assert {loser.actual_revision for loser in losers} == {winners[0].revision}


async def test_create_keeps_its_ttl_and_meta(store: limpet.Store, elapse: Elapse) -> None:
    """`create` succeeds once per incarnation of a key and then conflicts."""
    created = await store.create("k", 1, ttl=0.1, meta={"by": "me"})

    assert created.meta == {"by": "me"}
    assert created.expires_at is not None
    await elapse(0.2)
    assert await store.get("k") is None


# Delete -----------------------------------------------------------------------


async def test_delete_tells_whether_there_was_something(store: limpet.Store) -> None:
    """`delete` returns whether the key existed."""
    await store.put("k", 1)

    assert await store.delete("k") is True
    assert await store.delete("k") is False
    assert await store.get("k") is None


async def test_delete_ends_every_kind_of_value(store: limpet.Store) -> None:
    """`delete` returns whether the key existed."""
    values: list[object] = [None, False, 0, "", [], b"", limpet.Fields(), limpet.Fields(a=1), {"a": 1}]
    for value in values:
        await store.put("k", value)
        assert await store.delete("k") is True
        assert await store.entry("k") is None


async def test_of_all_who_delete_at_once_one_gets_true(open_store: OpenStore) -> None:
    """`delete` returns whether the key existed."""
    stores = [await open_store() for _ in range(4)]
    await stores[0].put("k", 1)

    answers = await asyncio.gather(*(stores[number % 4].delete("k") for number in range(32)))

    assert sorted(answers) == [False] * 31 + [True]


async def test_deleting_a_missing_key_uses_no_revision(store: limpet.Store) -> None:
    """Deleting a missing key returns False, uses no revision and makes no event."""
    await store.put("other", 1)
    await store.put("gone", 1)
    await store.delete("gone")
    before = await store.status()

    assert await store.delete("gone") is False
    assert await store.delete("never") is False
    assert await store.take("never") is None
    commit = await store.batch().delete("gone").delete("never").commit()

    assert commit.ended == (None, None)
    after = await store.status()
    assert (after.revision, after.log_changes) == (before.revision, before.log_changes)


async def test_deleting_a_missing_key_makes_no_event(store: limpet.Store) -> None:
    """Deleting a missing key returns False, uses no revision and makes no event."""
    async with store.watch() as watch:
        await store.delete("missing")
        await store.take("missing")
        await store.put("mark", 1)

        event = await next_event(watch)

    assert (event.op, event.key) == ("put", "mark")
    assert await drain(store.history("missing")) == []


async def test_deleting_an_expired_key_is_deleting_a_missing_one(open_store: OpenStore, elapse: Elapse) -> None:
    """Deleting a missing key returns False, uses no revision and makes no event."""
    store = await open_store(sweep=False)
    await store.put("k", 1, ttl=0.1)
    await elapse(0.2)

    assert await store.delete("k") is False
    await store.sweep()

    assert [event.op for event in await drain(store.history("k"))][-1] == "expire"
    assert await store.delete("k") is False


# Take -------------------------------------------------------------------------


async def test_take_gives_the_value_and_ends_the_key(store: limpet.Store) -> None:
    """`take` gives the value and ends the key in one step."""
    await store.put("k", {"a": [1]})

    assert await store.take("k") == {"a": [1]}
    assert await store.entry("k") is None
    assert (await store.keys()).keys == []


async def test_take_gives_every_kind_of_value(store: limpet.Store) -> None:
    """`take` gives the value and ends the key in one step."""
    records = [limpet.Fields(), limpet.Fields(a=1, b=b"")]
    values: list[object] = [None, False, 0, -0.0, "", [], {}, b"", b"\0\xff", *records]
    for value in values:
        await store.put("k", value)
        taken = await store.take("k", "default")
        assert (repr(taken), type(taken)) == (repr(value), type(value))
        assert await store.entry("k") is None


async def test_take_is_one_change(store: limpet.Store) -> None:
    """`take` gives the value and ends the key in one step."""
    await store.put("k", 1)
    async with store.watch() as watch:
        await store.take("k")
        await store.put("mark", 1)

        events = [await next_event(watch), await next_event(watch)]

    assert [(event.op, event.key) for event in events] == [("delete", "k"), ("put", "mark")]


async def test_take_gives_the_default_for_a_missing_key(store: limpet.Store) -> None:
    """`take` of a missing key gives the default."""
    default = object()

    assert await store.take("k") is None
    assert await store.take("k", default) is default
    assert await store.take("k", default=default) is default


async def test_take_gives_the_default_for_what_has_ended(store: limpet.Store, elapse: Elapse) -> None:
    """`take` of a missing key gives the default."""
    await store.put("deleted", 1)
    await store.put("taken", 1)
    await store.put("expired", 1, ttl=0.1)
    await store.delete("deleted")
    await store.take("taken")
    await elapse(0.2)

    assert [await store.take(key, "none") for key in ("deleted", "taken", "expired")] == ["none"] * 3


async def test_of_all_who_take_at_once_one_gets_the_value(open_store: OpenStore) -> None:
    """Of all callers that take a key at once, one gets the value."""
    stores = [await open_store() for _ in range(4)]
    await stores[0].put("job", {"id": 7})

    answers = await asyncio.gather(*(stores[number % 4].take("job", "late") for number in range(40)))

    assert answers.count({"id": 7}) == 1
    assert answers.count("late") == 39
    assert await stores[0].entry("job") is None


async def test_a_queue_that_many_take_from_gives_each_item_once(open_store: OpenStore) -> None:
    """Of all callers that take a key at once, one gets the value."""
    stores = [await open_store() for _ in range(3)]
    for number in range(20):
        await stores[0].put(f"job/{number:02}", number)

    async def work(store: limpet.Store) -> list[int]:
        mine = []
        for key in (await store.keys("job/")).keys:
            taken = await store.take(key)
            if taken is not None:
                mine.append(taken)
        return mine

    shares = await asyncio.gather(*(work(store) for store in stores * 2))

    assert sorted(number for share in shares for number in share) == list(range(20))


async def test_a_taker_and_writers_agree_on_what_was_taken(open_store: OpenStore) -> None:
    """Of all callers that take a key at once, one gets the value.

    Adds and takes run concurrently: the sum of what was taken and what is left is all that was added.
    """
    stores = [await open_store() for _ in range(2)]

    takes = [stores[number % 2].take("pot", 0) for number in range(20)]
    adds = [stores[number % 2].add("pot") for number in range(60)]
    mixed = [work for number in range(20) for work in (*adds[number * 3 : number * 3 + 3], takes[number])]
    answers = await asyncio.gather(*mixed)

    taken = sum(answers[3::4])
    assert taken + await stores[0].get("pot", 0) == 60


# Update -----------------------------------------------------------------------


async def test_update_stores_what_the_function_returns(store: limpet.Store) -> None:
    """`update` stores what the function returns."""
    await store.put("k", {"score": 1})

    written = await store.update("k", lambda found: {"score": found["score"] + 1})

    assert written is not None
    assert (written.value, written.version) == ({"score": 2}, 2)
    assert await store.entry("k") == written


async def test_update_stores_every_kind_of_value(store: limpet.Store) -> None:
    """`update` stores what the function returns.

    A function that returns None stores null: only ABSENT deletes.
    """
    await store.put("k", 1)
    for value in (None, False, 0, "", b"raw", limpet.Fields(a=1), [1], {"a": 1}):
        written = await store.update("k", lambda found, value=value: value)
        assert written is not None
        assert (written.value, type(await store.get("k"))) == (value, type(value))


async def test_update_gives_the_value_to_the_function(store: limpet.Store) -> None:
    """`update` stores what the function returns."""
    for value in ({"a": 1}, b"raw", limpet.Fields(a=1, b=b"raw"), 0):
        await store.put("k", value)
        seen: list[Any] = []

        def keep(found: Any, seen: list[Any] = seen) -> Any:
            seen.append(found)
            return found

        written = await store.update("k", keep)

        assert [(found, type(found)) for found in seen] == [(value, type(value))]
        assert written is not None
        assert written.value == value


async def test_an_update_that_changes_nothing_is_a_write(store: limpet.Store) -> None:
    """`update` stores what the function returns."""
    before = await store.put("k", 1)

    after = await store.update("k", lambda found: found)

    assert after is not None
    assert after.version == 2
    assert after.revision > before.revision


async def test_update_gives_none_for_a_missing_key(store: limpet.Store) -> None:
    """`update` gives the function None when there is no such key."""
    seen: list[Any] = []

    def begin(found: Any) -> Any:
        seen.append(found)
        return "begun"

    written = await store.update("k", begin)

    assert seen == [None]
    assert written is not None
    assert (written.value, written.version) == ("begun", 1)


async def test_update_gives_none_for_an_expired_key(store: limpet.Store, elapse: Elapse) -> None:
    """`update` gives the function None when there is no such key."""
    await store.put("k", "old", ttl=0.1)
    await elapse(0.2)

    written = await store.update("k", lambda found: [found])

    assert written is not None
    assert (written.value, written.version, written.expires_at) == ([None], 1, None)


async def test_update_deletes_when_the_function_returns_absent(store: limpet.Store) -> None:
    """`update` deletes the key when the function returns ABSENT, and then returns None."""
    await store.put("k", 1)
    await store.put("other", 1)

    assert await store.update("k", lambda found: limpet.ABSENT) is None

    assert (await store.keys()).keys == ["other"]
    assert [event.op for event in await drain(store.history("k"))][-1] == "delete"


async def test_update_of_a_missing_key_to_absent_does_nothing(store: limpet.Store) -> None:
    """`update` deletes the key when the function returns ABSENT, and then returns None."""
    before = (await store.status()).revision

    assert await store.update("k", lambda found: limpet.ABSENT) is None

    assert await store.entry("k") is None
    assert (await store.status()).revision == before


async def test_update_runs_the_function_once(store: limpet.Store) -> None:
    """`update` runs the function again only after a conflict."""
    runs: list[Any] = []

    def count(found: Any) -> Any:
        runs.append(found)
        return len(runs)

    for _ in range(3):
        await store.update("k", count)
        await store.put("other", 1)

    assert runs == [None, 1, 2]


async def test_update_does_not_run_again_after_another_error(store: limpet.Store) -> None:
    """`update` runs the function again only after a conflict."""
    runs: list[Any] = []
    bad: Any = object()

    def spoil(found: Any) -> Any:
        runs.append(found)
        return bad

    with pytest.raises(InvalidValue):
        await store.update("k", spoil)
    loose: Any = store
    with pytest.raises(InvalidKey):
        await loose.update("", spoil)

    assert runs == [None]


@pytest.mark.face("async")
async def test_update_runs_again_on_what_another_wrote(racing: limpet.Store, open_store: OpenStore) -> None:
    """`update` runs the function again only after a conflict."""
    other = await open_store(clock=limpet.SystemClock())
    await racing.put("k", [])
    seen: list[Any] = []

    async def append(found: list[str]) -> list[str]:
        seen.append(list(found))
        if len(seen) <= 2:
            await other.put("k", [*found, f"theirs {len(seen)}"])
        return [*found, "mine"]

    written = await asyncio.wait_for(racing.update("k", append), PATIENCE_S)

    assert seen == [[], ["theirs 1"], ["theirs 1", "theirs 2"]]
    assert written is not None
    assert written.value == ["theirs 1", "theirs 2", "mine"]
    assert await other.get("k") == written.value


@pytest.mark.face("async")
async def test_update_runs_again_when_the_key_was_deleted(racing: limpet.Store) -> None:
    """`update` runs the function again only after a conflict."""
    await racing.put("k", 1)
    seen: list[Any] = []

    async def count(found: Any) -> Any:
        seen.append(found)
        if len(seen) == 1:
            await racing.delete("k")
        return (found or 0) + 10

    written = await asyncio.wait_for(racing.update("k", count), PATIENCE_S)

    assert seen == [1, None]
    assert written is not None
    assert (written.value, written.version) == (10, 1)


@pytest.mark.face("async")
async def test_update_runs_again_when_the_key_was_created(racing: limpet.Store) -> None:
    """`update` runs the function again only after a conflict."""
    seen: list[Any] = []

    async def count(found: Any) -> Any:
        seen.append(found)
        if len(seen) == 1:
            await racing.create("k", 1)
        return (found or 0) + 10

    written = await asyncio.wait_for(racing.update("k", count), PATIENCE_S)

    assert seen == [None, 1]
    assert written is not None
    assert (written.value, written.version) == (11, 2)


@pytest.mark.face("async")
async def test_update_runs_again_when_the_key_was_made_anew(racing: limpet.Store) -> None:
    """`update` runs the function again only after a conflict.

    The same version and the same value, but another key: a guard on the version alone would not see it.
    """
    await racing.put("k", 1)
    runs = 0

    async def count(found: int) -> int:
        nonlocal runs
        runs += 1
        if runs == 1:
            await racing.delete("k")
            await racing.put("k", 1)
        return found + 1

    written = await asyncio.wait_for(racing.update("k", count), PATIENCE_S)

    assert runs == 2
    assert written is not None
    assert (written.value, written.version) == (2, 2)


@pytest.mark.face("async")
async def test_an_update_to_absent_runs_again_as_well(racing: limpet.Store) -> None:
    """`update` runs the function again only after a conflict."""
    await racing.put("k", "old")
    seen: list[Any] = []

    async def drop_old(found: Any) -> Any:
        seen.append(found)
        if len(seen) == 1:
            await racing.put("k", "new")
        return limpet.ABSENT if found == "old" else found

    written = await asyncio.wait_for(racing.update("k", drop_old), PATIENCE_S)

    assert seen == ["old", "new"]
    assert written is not None
    assert written.value == "new"


@pytest.mark.face("sync")
async def test_a_blocking_update_runs_again_on_what_another_wrote(racing: limpet.Store, open_store: OpenStore) -> None:
    """`update` runs the function again only after a conflict."""
    other = await open_store(clock=limpet.SystemClock())
    await racing.put("k", ["first"])
    seen: list[Any] = []
    running, written = threading.Event(), threading.Event()

    def append(found: list[str]) -> list[str]:
        seen.append(list(found))
        running.set()
        assert written.wait(PATIENCE_S)
        return [*found, "mine"]

    updating = asyncio.ensure_future(racing.update("k", append))
    await in_thread(lambda: running.wait(PATIENCE_S))
    await other.put("k", ["theirs"])
    written.set()
    entry = await updating

    assert seen == [["first"], ["theirs"]]
    assert entry is not None
    assert entry.value == ["theirs", "mine"]


@pytest.mark.face("async")
async def test_update_takes_an_async_function(store: limpet.Store) -> None:
    """`update` takes an async function as well."""
    await store.put("k", 1)

    async def double(found: int) -> int:
        await asyncio.sleep(0)
        return found * 2

    written = await store.update("k", double)

    assert written is not None
    assert (written.value, await store.get("k")) == (2, 2)


@pytest.mark.face("async")
async def test_update_takes_everything_that_can_be_awaited(store: limpet.Store) -> None:
    """`update` takes an async function as well."""

    class Adder:
        async def __call__(self, found: int) -> int:
            return found + 1

    async def add(step: int, found: int) -> int:
        return found + step

    await store.put("k", 0)
    for change in (Adder(), functools.partial(add, 10), lambda found: add(100, found), Adder().__call__):
        await store.update("k", change)

    assert await store.get("k") == 112


@pytest.mark.face("async")
async def test_an_async_function_may_use_the_store(store: limpet.Store) -> None:
    """`update` takes an async function as well."""
    await store.put("price", 5)
    await store.put("total", 10)

    async def add_price(found: int) -> int:
        await store.add("lookups")
        return found + int(await store.get("price"))

    await store.update("total", add_price)

    assert [await store.get(key) for key in ("total", "lookups")] == [15, 1]


@pytest.mark.face("async")
async def test_an_async_function_may_return_absent(store: limpet.Store) -> None:
    """`update` takes an async function as well."""
    await store.put("k", 1)

    async def end(found: Any) -> Any:
        return limpet.ABSENT

    assert await store.update("k", end) is None
    assert await store.entry("k") is None


class CountingReads:
    """An engine in front of another that counts how often it is read."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.reads = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def read(self, namespace: str, keys: Sequence[str], *, family: Family = "data") -> list[Entry | None]:
        self.reads += 1
        return await self._engine.read(namespace, keys, family=family)


async def never(found: Any) -> Any:
    raise AssertionError("was run")


class Never:
    async def __call__(self, found: Any) -> Any:
        raise AssertionError("was run")


@pytest.mark.face("sync")
async def test_the_blocking_face_refuses_an_async_function(store: limpet.Store) -> None:
    """The sync API takes plain functions only: an async one is a TypeError before anything is read."""
    before = await store.put("k", 1)
    session = session_of(store)
    counting: Any = CountingReads(session.engine)
    session.engine = counting

    for change in (never, functools.partial(never), Never(), Never().__call__):
        with pytest.raises(TypeError, match="async"):
            await store.update("k", change)

    assert counting.reads == 0
    assert await store.entry("k") == before
    assert counting.reads == 1


@pytest.mark.face("sync")
async def test_the_blocking_face_takes_any_plain_callable(store: limpet.Store) -> None:
    """The sync API takes plain functions only: an async one is a TypeError before anything is read."""

    class Adder:
        def __call__(self, found: int) -> int:
            return found + 1

    await store.put("k", 5)
    for change in (Adder(), functools.partial(pow, 2), abs, Adder().__call__):
        await store.update("k", change)

    assert await store.get("k") == 65


@pytest.mark.face("sync")
async def test_a_function_that_hides_a_coroutine_is_refused(store: limpet.Store) -> None:
    """In the sync API, a function that returns an awaitable is a TypeError and changes nothing."""
    before = await store.put("k", 1)

    async def hidden() -> int:
        return 2

    with pytest.raises(TypeError):
        await store.update("k", lambda _: hidden())

    assert await store.entry("k") == before


async def test_an_error_in_the_function_changes_nothing(store: limpet.Store) -> None:
    """An error in the function of `update` changes nothing."""
    before = await store.put("k", 1, ttl=60, meta={"by": "me"})
    trouble = LookupError("of the function")

    def fail(found: Any) -> Any:
        raise trouble

    with pytest.raises(LookupError) as raised:
        await store.update("k", fail)
    with pytest.raises(LookupError):
        await store.update("new", fail)

    assert raised.value is trouble
    assert await store.entry("k") == before
    assert (await store.keys()).keys == ["k"]
    assert (await store.status()).revision == before.revision


async def test_a_conflict_raised_by_the_function_is_its_own(store: limpet.Store) -> None:
    """An error in the function of `update` changes nothing.

    It is not mistaken for a conflict of the update itself, which would run the function again.
    """
    before = await store.put("k", 1)
    runs: list[Any] = []
    trouble = Conflict("elsewhere", expected="something", current=None)

    def fail(found: Any) -> Any:
        runs.append(found)
        raise trouble

    with pytest.raises(Conflict) as raised:
        await store.update("k", fail)

    assert raised.value is trouble
    assert runs == [1]
    assert await store.entry("k") == before


@pytest.mark.face("async")
async def test_an_error_in_an_async_function_changes_nothing(store: limpet.Store) -> None:
    """An error in the function of `update` changes nothing."""
    before = await store.put("k", 1)

    async def fail(found: Any) -> Any:
        await asyncio.sleep(0)
        raise LookupError

    with pytest.raises(LookupError):
        await store.update("k", fail)

    assert await store.entry("k") == before


@pytest.mark.face("async")
async def test_an_update_that_is_cancelled_in_its_function_changes_nothing(store: limpet.Store) -> None:
    """An error in the function of `update` changes nothing."""
    before = await store.put("k", 1)
    running = asyncio.Event()

    async def wait(found: Any) -> Any:
        running.set()
        await asyncio.Event().wait()

    updating = asyncio.ensure_future(store.update("k", wait))
    await running.wait()
    updating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await updating

    assert await store.entry("k") == before


async def test_an_update_of_a_crowd_succeeds(open_store: OpenStore) -> None:
    """However many callers of one opened store update the same key at once, every update succeeds.

    The test counts commits, not time: when two hundred updates did not take turns, half failed after ten thousand
    commits.
    """
    store, callers = await open_store(clock=limpet.SystemClock()), 200
    await store.put("k", 0)
    engine = count(store)

    found = await asyncio.gather(*(store.update("k", lambda found: found + 1) for _ in range(callers)))

    assert sorted(entry.value for entry in found if entry is not None) == list(range(1, callers + 1))
    assert await store.get("k") == callers
    assert engine.commits == callers + engine.refused
    assert engine.refused <= callers // 10


async def test_an_update_of_a_crowd_in_several_namespaces_succeeds(open_store: OpenStore) -> None:
    """However many callers of one opened store update the same key at once, every update succeeds."""
    store = await open_store(clock=limpet.SystemClock())
    stores = [store, store.namespace(f"{store.name}-b"), store.namespace(store.name)]

    await asyncio.gather(*(stores[number % 3].update("k", lambda found: (found or 0) + 1) for number in range(60)))

    assert [await each.get("k") for each in stores] == [40, 20, 40]


@pytest.mark.face("async")
async def test_updates_take_turns_in_the_order_they_came(open_store: OpenStore) -> None:
    """Callers of one opened store that update the same key take turns, in the order they came."""
    store = await open_store(clock=limpet.SystemClock())
    running, go_on = asyncio.Event(), asyncio.Event()
    order: list[int] = []

    async def change(found: int | None, number: int) -> int:
        running.set()
        await go_on.wait()
        order.append(number)
        return number

    updating = []
    for number in range(8):
        updating.append(asyncio.ensure_future(store.update("k", functools.partial(change, number=number))))
        await wait_for_queue(store, number + 1, "update", store.name, "k")
    await running.wait()
    await store.update("another", lambda _: 1)
    go_on.set()
    await asyncio.wait_for(asyncio.gather(*updating), PATIENCE_S)

    assert order == list(range(8))


@pytest.mark.face("async")
async def test_a_cancelled_update_leaves_its_turn_to_the_next(open_store: OpenStore) -> None:
    """Callers of one opened store that update the same key take turns, in the order they came."""
    store = await open_store(clock=limpet.SystemClock())

    async def wait(found: int | None) -> int:
        await asyncio.Event().wait()
        return 0

    updating = [asyncio.ensure_future(store.update("k", wait))]
    for number in range(3):
        updating.append(asyncio.ensure_future(store.update("k", lambda found: (found or 0) + 1)))
        await wait_for_queue(store, number + 2, "update", store.name, "k")
    updating[2].cancel()
    updating[0].cancel()

    done = await asyncio.wait_for(asyncio.gather(*updating, return_exceptions=True), PATIENCE_S)

    assert [isinstance(each, asyncio.CancelledError) for each in done] == [True, False, True, False]
    assert await store.get("k") == 2
    await wait_for_queue(store, 0, "update", store.name, "k")


@pytest.mark.face("async")
async def test_the_function_of_update_may_update_the_same_key(open_store: OpenStore) -> None:
    """The function of `update` may itself update the same key, or wait for another caller that does."""
    store = await open_store(clock=limpet.SystemClock())
    calls: list[Any] = []

    async def outer(found: int | None) -> int:
        calls.append(found)
        if len(calls) == 1:
            await store.update("k", lambda found: (found or 0) + 1)
            # In a separate task as well, which the function waits for.
            await asyncio.create_task(store.update("k", lambda found: (found or 0) + 10))
        return (found or 0) + 100

    others = [store.update("k", lambda found: (found or 0) + 1000) for _ in range(5)]
    await asyncio.wait_for(asyncio.gather(store.update("k", outer), *others), PATIENCE_S)

    assert await store.get("k") == 5111
    assert calls[0] is None
    assert len(calls) == 2


@pytest.mark.face("async")
async def test_an_update_inside_an_update_never_waits_for_it(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function of `update` may itself update the same key, or wait for another caller that does.

    Not even after a conflict with another store, when the inner update has to try again.
    """
    monkeypatch.setattr("limpet.store.UPDATE_TURN_S", 3600.0)
    store, other = [await open_store(clock=limpet.SystemClock()) for _ in range(2)]
    calls: list[str] = []

    async def inner(found: int | None) -> int:
        calls.append("inner")
        if calls.count("inner") == 1:
            await other.put("k", 1)
        return (found or 0) + 10

    async def outer(found: int | None) -> int:
        calls.append("outer")
        if calls.count("outer") == 1:
            await store.update("k", inner)
        return (found or 0) + 100

    await asyncio.wait_for(store.update("k", outer), PATIENCE_S)

    assert await store.get("k") == 111
    assert calls == ["outer", "inner", "inner", "outer"]


@pytest.mark.face("async")
async def test_the_function_of_update_may_wait_for_another_caller(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function of `update` may itself update the same key, or wait for another caller that does.

    The other caller waits for its turn meanwhile. The first one loses its turn, runs again, and gets through.
    """
    monkeypatch.setattr("limpet.store.UPDATE_TURN_S", 0.05)
    store = await open_store(clock=limpet.SystemClock())
    running = asyncio.Event()

    async def help_out() -> None:
        await running.wait()
        await store.update("k", lambda found: (found or 0) + 1)

    helping = asyncio.create_task(help_out())

    async def change(found: int | None) -> int:
        running.set()
        await helping
        return (found or 0) + 100

    await asyncio.wait_for(store.update("k", change), PATIENCE_S)

    assert await store.get("k") == 101


@pytest.mark.face("async")
async def test_updates_of_two_keys_inside_each_other_get_through(open_store: OpenStore) -> None:
    """The function of `update` may itself update the same key, or wait for another caller that does.

    Each of two callers has a turn and updates the key of the other.
    """
    store = await open_store(clock=limpet.SystemClock())
    started: list[str] = []
    both = asyncio.Event()

    async def change(found: int | None, other: str) -> int:
        if other not in started:
            started.append(other)
            if len(started) == 2:
                both.set()
            await both.wait()
            await store.update(other, lambda found: (found or 0) + 1)
        return (found or 0) + 10

    await asyncio.wait_for(
        asyncio.gather(
            store.update("a", functools.partial(change, other="b")),
            store.update("b", functools.partial(change, other="a")),
        ),
        PATIENCE_S,
    )

    assert [await store.get("a"), await store.get("b")] == [11, 11]


@pytest.mark.face("async")
async def test_a_slow_function_loses_races_and_gets_through(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many callers of one opened store update the same key at once, every update succeeds.

    Each function takes longer than a turn lasts, so that the next caller begins before it is done.
    """
    monkeypatch.setattr("limpet.store.UPDATE_TURN_S", 0.002)
    store = await open_store(clock=limpet.SystemClock())

    async def change(found: int | None) -> int:
        await asyncio.sleep(0.01)
        return (found or 0) + 1

    await asyncio.wait_for(asyncio.gather(*(store.update("k", change) for _ in range(20))), 3 * PATIENCE_S)

    assert await store.get("k") == 20


# Unchanged --------------------------------------------------------------------


async def test_update_to_unchanged_writes_nothing(store: limpet.Store) -> None:
    """`update` writes nothing when the function returns UNCHANGED, and then returns the entry found, or None."""
    before = await store.put("k", [1, 2], ttl=60, meta={"by": "me"})
    status = await store.status()

    found = await store.update("k", lambda found: limpet.UNCHANGED, ttl=5, meta={"by": "others"})

    assert found == before
    assert await store.entry("k") == before
    assert (await store.status()).revision == status.revision


async def test_update_of_a_missing_key_to_unchanged_makes_nothing(store: limpet.Store) -> None:
    """`update` writes nothing when the function returns UNCHANGED, and then returns the entry found, or None."""
    assert await store.update("k", lambda found: limpet.UNCHANGED) is None

    assert await store.entry("k") is None
    assert (await store.status()).revision == 0


async def test_update_decides_on_what_it_found(store: limpet.Store) -> None:
    """`update` writes nothing when the function returns UNCHANGED, and then returns the entry found, or None."""

    def join(found: list[str] | None) -> Any:
        return limpet.UNCHANGED if found and "ada" in found else [*(found or []), "ada"]

    versions = [(await store.update("players", join)).version for _ in range(3)]  # type: ignore[union-attr]

    assert versions == [1, 1, 1]
    with pytest.raises(InvalidValue):
        await store.put("k", limpet.UNCHANGED)


# Crowds of several stores -----------------------------------------------------


async def test_concurrent_updates_lose_nothing(open_store: OpenStore) -> None:
    """Concurrent updates lose nothing."""
    stores = [await open_store(clock=limpet.SystemClock()) for _ in range(3)]
    await stores[0].put("k", [])

    await asyncio.gather(
        *(stores[number % 3].update("k", lambda found, number=number: [*found, number]) for number in range(24))
    )

    found = await stores[0].entry("k")
    assert found is not None
    assert sorted(found.value) == list(range(24))
    assert found.version == 25


async def test_concurrent_updates_of_a_missing_key_lose_nothing(open_store: OpenStore) -> None:
    """Concurrent updates lose nothing."""
    stores = [await open_store(clock=limpet.SystemClock()) for _ in range(2)]

    await asyncio.gather(*(stores[number % 2].update("k", lambda found: (found or 0) + 1) for number in range(20)))

    assert await stores[0].get("k") == 20


@pytest.mark.face("async")
async def test_concurrent_async_updates_lose_nothing(open_store: OpenStore) -> None:
    """Concurrent updates lose nothing.

    Each waits between reading and writing, so that nearly all of them collide.
    """
    stores = [await open_store(clock=limpet.SystemClock()) for _ in range(2)]
    runs = 0

    async def increment(found: int | None) -> int:
        nonlocal runs
        runs += 1
        await asyncio.sleep(0.001)
        return (found or 0) + 1

    await asyncio.gather(*(stores[number % 2].update("k", increment) for number in range(12)))

    assert await stores[0].get("k") == 12
    assert runs > 12


async def test_updates_and_other_writes_lose_nothing(open_store: OpenStore) -> None:
    """Concurrent updates lose nothing."""
    stores = [await open_store(clock=limpet.SystemClock()) for _ in range(2)]
    await stores[0].put("k", 0)

    await asyncio.gather(
        *(stores[number % 2].update("k", lambda found: found + 100) for number in range(12)),
        *(stores[number % 2].add("k") for number in range(12)),
    )

    found = await stores[0].entry("k")
    assert found is not None
    assert (found.value, found.version) == (1212, 25)


async def test_concurrent_updates_that_end_the_key_lose_nothing(open_store: OpenStore) -> None:
    """Concurrent updates lose nothing.

    Some callers add to the key, others empty it: the sum of what was removed and what is left is all that was added.
    """
    stores = [await open_store(clock=limpet.SystemClock()) for _ in range(2)]

    async def empty(store: limpet.Store) -> int:
        emptied: list[int] = []

        def end(found: int | None) -> Any:
            emptied.append(found or 0)
            return limpet.ABSENT

        await store.update("box", end)
        return emptied[-1]

    def fill(found: int | None) -> int:
        return (found or 0) + 1

    filling = [stores[number % 2].update("box", fill) for number in range(15)]
    emptied = await asyncio.gather(*(empty(stores[number % 2]) for number in range(6)), *filling)

    assert sum(count for count in emptied if isinstance(count, int)) + await stores[0].get("box", 0) == 15
