"""Guards: conditions on a key, checked in the same commit as the write they protect."""

from __future__ import annotations

import asyncio
import contextlib
import operator
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

import limpet
from limpet.conformance.support import next_event
from limpet.errors import Conflict, InvalidValue, LockLost

if TYPE_CHECKING:
    from limpet.conformance.conftest import Elapse

# No two of these are equal in their encoding, although Python compares some as equal.
DISTINCT: tuple[Any, ...] = (
    None,
    False,
    True,
    0,
    1,
    -1,
    0.0,
    -0.0,
    1.0,
    1e22,
    "",
    "1",
    "null",
    "\u00e9",
    "e\u0301",
    [],
    [1],
    [1.0],
    [True],
    [[1]],
    {},
    {"a": 1},
    {"a": 1.0},
    {"a": None},
    {"a": 1, "b": None},
    b"",
    b"1",
    b"null",
    b'{"a":1}',
    limpet.Fields(),
    limpet.Fields(a=1),
    limpet.Fields(a=True),
    limpet.Fields(a="1"),
    limpet.Fields(a=b"1"),
)

Verb = Callable[[limpet.Store, Any], Awaitable[object]]

# Every write that takes a guard, on a key that holds an integer.
VERBS: dict[str, Verb] = {
    "put": lambda store, expect: store.put("key", 7, expect=expect),
    "add": lambda store, expect: store.add("key", 6, expect=expect),
    "delete": lambda store, expect: store.delete("key", expect=expect),
    "take": lambda store, expect: store.take("key", expect=expect),
    "touch": lambda store, expect: store.touch("key", 60, expect=expect),
    "persist": lambda store, expect: store.persist("key", expect=expect),
    "batch": lambda store, expect: store.batch().expect("key", expect).put("key", 7).commit(),
}

every_verb = pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS.keys())

# Expectations that an entry of version 1 with the value {"a": 1} meets, and a missing key does not.
MET_BY_AN_ENTRY: dict[str, Callable[[limpet.Entry], Any]] = {
    "entry": lambda entry: entry,
    "version": lambda entry: limpet.Version(entry.version),
    "revision": lambda entry: limpet.Revision(entry.revision),
    "present": lambda entry: limpet.PRESENT,
    "equals": lambda entry: limpet.equals({"a": 1}),
    "field": lambda entry: limpet.field("a") == 1,
}

every_expectation = pytest.mark.parametrize("expectation", MET_BY_AN_ENTRY.values(), ids=MET_BY_AN_ENTRY.keys())


async def holds(store: limpet.Store, key: str, expectation: Any) -> bool:
    """Whether a guard holds now, checked by a batch without writes."""
    try:
        await store.batch().expect(key, expectation).commit()
    except Conflict:
        return False
    return True


# The entry --------------------------------------------------------------------


async def test_an_entry_guards_its_own_replacement(store: limpet.Store) -> None:
    """`expect=entry` holds only while that very entry of this namespace is current."""
    await store.put("key", "old")
    seen = await store.entry("key")

    after = await store.put("key", "new", expect=seen)

    assert (after.version, await store.get("key")) == (2, "new")


async def test_an_entry_does_not_hold_after_an_equal_write(store: limpet.Store) -> None:
    """`expect=entry` holds only while that very entry of this namespace is current.

    The value and all that a reader sees of it is the same, but it is another entry.
    """
    seen = await store.put("key", "same")
    written = await store.put("key", "same")

    with pytest.raises(Conflict):
        await store.put("key", "mine", expect=seen)

    assert await store.entry("key") == written


async def test_an_entry_does_not_hold_after_a_touch(store: limpet.Store) -> None:
    """`expect=entry` holds only while that very entry of this namespace is current."""
    seen = await store.put("key", 1)
    touched = await store.touch("key", 60)

    assert not await holds(store, "key", seen)
    assert await holds(store, "key", touched)


async def test_an_entry_does_not_hold_for_its_double(store: limpet.Store) -> None:
    """`expect=entry` holds only while that very entry of this namespace is current.

    Deleted and made again with the same value, the key has the same version. Only the revision differs.
    """
    seen = await store.put("key", "same")
    await store.delete("key")
    double = await store.put("key", "same")
    assert double.version == seen.version

    with pytest.raises(Conflict) as refused:
        await store.put("key", "mine", expect=seen)

    assert refused.value.current == double


async def test_an_entry_does_not_hold_for_its_double_after_an_expiry(store: limpet.Store, elapse: Elapse) -> None:
    """`expect=entry` holds only while that very entry of this namespace is current."""
    seen = await store.put("key", "same", ttl=0.1)
    await elapse(0.15)
    double = await store.put("key", "same")
    assert double.version == seen.version

    with pytest.raises(Conflict):
        await store.delete("key", expect=seen)

    assert await store.entry("key") == double


async def test_an_entry_of_another_key_does_not_hold(store: limpet.Store) -> None:
    """`expect=entry` holds only while that very entry of this namespace is current."""
    other = await store.put("other", 1)
    before = await store.put("key", 1)

    with pytest.raises(Conflict):
        await store.put("key", 2, expect=other)

    assert await store.entry("key") == before


async def test_of_many_who_hold_the_same_entry_one_writes(store: limpet.Store) -> None:
    """`expect=entry` holds only while that very entry of this namespace is current."""
    seen = await store.put("key", "old")

    async def write(number: int) -> int | None:
        with contextlib.suppress(Conflict):
            await store.put("key", number, expect=seen)
            return number
        return None

    answers = await asyncio.gather(*(write(number) for number in range(16)))

    winners = [number for number in answers if number is not None]
    assert winners == [await store.get("key")]


async def test_what_entry_returned_guards_the_first_write(store: limpet.Store) -> None:
    """`expect=None` holds when there is no such key, as when `entry` returned None."""
    seen = await store.entry("key")
    assert seen is None

    created = await store.put("key", "mine", expect=seen)

    with pytest.raises(Conflict) as refused:
        await store.put("key", "late", expect=seen)
    assert created.version == 1
    assert refused.value.current == created


async def test_none_holds_again_after_the_key_ended(store: limpet.Store) -> None:
    """`expect=None` holds when there is no such key, as when `entry` returned None."""
    await store.put("key", 1)
    await store.delete("key")

    assert (await store.put("key", 2, expect=None)).version == 1


async def test_none_does_not_mean_a_null_value(store: limpet.Store) -> None:
    """`expect=None` holds when there is no such key, as when `entry` returned None."""
    before = await store.put("key", None)

    with pytest.raises(Conflict):
        await store.put("key", 1, expect=None)

    assert await store.entry("key") == before


# Version and revision ---------------------------------------------------------


async def test_a_version_holds_at_that_version_alone(store: limpet.Store) -> None:
    """`limpet.Version(n)` holds at that version of the key."""
    for value in range(3):
        await store.put("key", value)

    held = [number for number in range(7) if await holds(store, "key", limpet.Version(number))]

    assert held == [3]


async def test_a_version_outlives_a_touch(store: limpet.Store) -> None:
    """`limpet.Version(n)` holds at that version of the key.

    A touch does not write the value, so the version stays and its guard holds.
    """
    await store.put("key", 1)
    await store.touch("key", 60)

    assert (await store.put("key", 2, expect=limpet.Version(1))).version == 2


async def test_a_version_is_that_of_its_own_key(store: limpet.Store) -> None:
    """`limpet.Version(n)` holds at that version of the key."""
    await store.put("other", 1)
    await store.put("other", 2)
    await store.put("key", 1)

    assert not await holds(store, "key", limpet.Version(2))
    assert await holds(store, "other", limpet.Version(2))


async def test_a_revision_holds_at_that_revision_alone(store: limpet.Store) -> None:
    """`limpet.Revision(n)` holds at that revision of the key."""
    first = await store.put("key", 1)
    other = await store.put("other", 1)
    last = await store.put("key", 2)
    later = await store.put("other", 2)
    used = [entry.revision for entry in (first, other, last, later)]
    numbers = {0, *used, *(number - 1 for number in used), *(number + 1 for number in used)}

    held = [number for number in sorted(numbers) if await holds(store, "key", limpet.Revision(number))]

    assert held == [last.revision]


async def test_a_revision_moves_with_a_touch(store: limpet.Store) -> None:
    """`limpet.Revision(n)` holds at that revision of the key."""
    written = await store.put("key", 1)
    touched = await store.touch("key", 60)
    assert touched is not None

    assert not await holds(store, "key", limpet.Revision(written.revision))
    assert await holds(store, "key", limpet.Revision(touched.revision))


async def test_a_version_repeats_and_a_revision_does_not(store: limpet.Store) -> None:
    """A version may repeat after a delete, so the revision is the safe token.

    One agent reads. Another deletes the key and makes it again. The version that the first one read now matches
    another entry.
    """
    seen = await store.put("key", "first life")
    await store.delete("key")
    await store.put("key", "second life")

    assert await holds(store, "key", limpet.Version(seen.version))
    assert not await holds(store, "key", limpet.Revision(seen.revision))


async def test_revisions_of_many_lives_are_all_different(store: limpet.Store) -> None:
    """A version may repeat after a delete, so the revision is the safe token."""
    lives = []
    for _ in range(10):
        lives.append(await store.put("key", "same"))
        await store.delete("key")
    current = await store.put("key", "same")

    assert {life.version for life in lives} == {1}
    assert len({life.revision for life in [*lives, current]}) == 11
    assert [life for life in lives if await holds(store, "key", limpet.Revision(life.revision))] == []


# Absent and present -----------------------------------------------------------


async def test_absent_holds_when_there_is_no_such_key(store: limpet.Store) -> None:
    """`limpet.ABSENT` holds when there is no such key."""
    await store.put("deleted", 1)
    await store.delete("deleted")
    await store.put("key longer", 1)

    assert (await store.put("key", 1, expect=limpet.ABSENT)).version == 1
    assert (await store.put("deleted", 2, expect=limpet.ABSENT)).version == 1


async def test_absent_fails_on_every_value(store: limpet.Store) -> None:
    """`limpet.ABSENT` holds when there is no such key."""
    held = []
    for value in DISTINCT:
        await store.put("key", value)
        held.append(await holds(store, "key", limpet.ABSENT))

    assert not any(held)


async def test_of_many_who_expect_absence_one_writes(store: limpet.Store) -> None:
    """`limpet.ABSENT` holds when there is no such key."""

    async def write(number: int) -> int | None:
        with contextlib.suppress(Conflict):
            await store.put("key", number, expect=limpet.ABSENT)
            return number
        return None

    answers = await asyncio.gather(*(write(number) for number in range(16)))

    assert [number for number in answers if number is not None] == [await store.get("key")]


async def test_present_holds_whatever_the_key_holds(store: limpet.Store) -> None:
    """`limpet.PRESENT` holds when the key exists, whatever its value.

    Null, zero and empty values are present like any other.
    """
    held = []
    for value in DISTINCT:
        await store.put("key", value)
        held.append(await holds(store, "key", limpet.PRESENT))

    assert all(held)


async def test_present_fails_when_there_is_none(store: limpet.Store) -> None:
    """`limpet.PRESENT` holds when the key exists, whatever its value."""
    await store.put("deleted", 1)
    await store.delete("deleted")

    for key in ("missing", "deleted"):
        with pytest.raises(Conflict):
            await store.put(key, 1, expect=limpet.PRESENT)

    assert (await store.keys()).keys == []


# Equality ---------------------------------------------------------------------


async def test_equals_tells_every_two_values_apart(store: limpet.Store) -> None:
    """`limpet.equals(value)` holds when the value is equal in its encoding: 1, 1.0 and true are three values."""
    for stored, value in enumerate(DISTINCT):
        await store.put("key", value)

        held = [index for index, other in enumerate(DISTINCT) if await holds(store, "key", limpet.equals(other))]

        assert held == [stored]


async def test_equals_lets_a_write_happen(store: limpet.Store) -> None:
    """`limpet.equals(value)` holds when the value is equal in its encoding: 1, 1.0 and true are three values."""
    await store.put("key", {"state": "idle", "tries": [1, 2.5, None]})

    after = await store.put("key", "mine", expect=limpet.equals({"state": "idle", "tries": (1, 2.5, None)}))

    assert after.version == 2


async def test_equals_does_not_depend_on_who_wrote_the_value(store: limpet.Store) -> None:
    """`limpet.equals(value)` holds when the value is equal in its encoding: 1, 1.0 and true are three values.

    Meta and time to live are beside the value, and another life of the key may hold the same.
    """
    await store.put("key", "same")
    await store.delete("key")
    await store.put("key", "same", ttl=60, meta={"by": "another"})

    assert await holds(store, "key", limpet.equals("same"))


async def test_members_may_come_in_any_order(store: limpet.Store) -> None:
    """The order of members does not matter to equality."""
    await store.put("key", {"b": {"y": 1, "x": [{"d": 1, "c": 2}]}, "a": 1, "é": 1, "🦪": 2})
    nested = {"x": [{"c": 2, "d": 1}], "y": 1}

    assert await holds(store, "key", limpet.equals({"🦪": 2, "é": 1, "a": 1, "b": nested}))
    assert not await holds(store, "key", limpet.equals({"🦪": 1, "é": 2, "a": 1, "b": nested}))


async def test_the_fields_of_a_record_may_come_in_any_order(store: limpet.Store) -> None:
    """The order of members does not matter to equality."""
    record = store.record("key")
    await record.set(b={"y": 1, "x": 2})
    await record.set(a=b"raw")

    assert await holds(store, "key", limpet.equals(limpet.Fields(a=b"raw", b={"x": 2, "y": 1})))
    assert await holds(store, "key", limpet.field("b") == {"x": 2, "y": 1})


async def test_the_order_of_a_list_matters(store: limpet.Store) -> None:
    """The order of members does not matter to equality.

    Members of an object have no order. Items of a list have.
    """
    await store.put("key", [1, 2])

    assert not await holds(store, "key", limpet.equals([2, 1]))


@pytest.mark.parametrize("value", [limpet.Fields(state="idle", n=1), {"state": "idle", "n": 1}], ids=["record", "json"])
async def test_a_field_guards_the_whole_write(store: limpet.Store, value: object) -> None:
    """`limpet.field(name) == value` holds when that field is equal."""
    await store.put("key", value)

    after = await store.put("key", "mine", expect=limpet.field("state") == "idle")

    with pytest.raises(Conflict):
        await store.put("key", "late", expect=limpet.field("state") == "idle")
    assert await store.entry("key") == after


async def test_a_field_is_equal_by_its_encoding(store: limpet.Store) -> None:
    """`limpet.field(name) == value` holds when that field is equal."""
    plain = [value for value in DISTINCT if not isinstance(value, limpet.Fields)]
    for stored, value in enumerate(plain):
        await store.record("key").put({"state": value, "other": "x"})

        held = [
            index
            for index, other in enumerate(plain)
            if await holds(store, "key", operator.eq(limpet.field("state"), other))
        ]

        assert held == [stored]


async def test_a_field_that_is_missing_equals_nothing(store: limpet.Store) -> None:
    """`limpet.field(name) == value` holds when that field is equal."""
    await store.record("record").put({"other": None})
    await store.put("object", {"other": {"state": None}})
    null_state: Any = operator.eq(limpet.field("state"), None)

    assert not await holds(store, "record", null_state)
    assert not await holds(store, "object", null_state)


@pytest.mark.parametrize("value", [None, 1, "state", '{"state":1}', [{"state": 1}], ["state", 1], b'{"state":1}'])
async def test_a_value_without_fields_meets_no_field_guard(store: limpet.Store, value: object) -> None:
    """`limpet.field(name) == value` holds when that field is equal."""
    before = await store.put("key", value)

    with pytest.raises(Conflict) as refused:
        await store.put("key", 2, expect=limpet.field("state") == 1)

    assert refused.value.current == before


async def test_a_field_may_have_any_name(store: limpet.Store) -> None:
    """`limpet.field(name) == value` holds when that field is equal.

    A name is no path: a dot does not reach into an object.
    """
    names = ["a.b", "$text", "$json", 'quo"te', "it's", "%", "[0]", "new\nline", "é", "🦪"]
    await store.record("key").put({name: number for number, name in enumerate(names)})
    await store.put("nested", {"a": {"b": 0}})

    held = [name for number, name in enumerate(names) if await holds(store, "key", limpet.field(name) == number)]

    assert held == names
    assert not await holds(store, "nested", limpet.field("a.b") == 0)


# When a guard fails -----------------------------------------------------------


@every_verb
async def test_a_guard_that_fails_changes_nothing(store: limpet.Store, verb: Verb) -> None:
    """When a guard fails, nothing changes, no revision is used, and Conflict is raised."""
    before = await store.put("key", 1, ttl=600, meta={"by": "me"})
    revision = (await store.status()).revision
    async with store.watch() as watch:
        with pytest.raises(Conflict):
            await verb(store, limpet.Version(2))

        assert await store.entry("key") == before
        assert (await store.status()).revision == revision
        await store.put("end", 1)
        assert (await next_event(watch)).key == "end"


async def test_a_guard_that_fails_on_a_missing_key_makes_nothing(store: limpet.Store) -> None:
    """When a guard fails, nothing changes, no revision is used, and Conflict is raised."""
    await store.put("other", 1)
    revision = (await store.status()).revision

    with pytest.raises(Conflict):
        await store.put("key", 1, expect=limpet.PRESENT)
    with pytest.raises(Conflict):
        await store.add("key", expect=limpet.Version(1))

    assert (await store.keys()).keys == ["other"]
    assert (await store.status()).revision == revision


async def test_a_refused_writer_can_go_on(store: limpet.Store) -> None:
    """When a guard fails, nothing changes, no revision is used, and Conflict is raised.

    The next write of the key gets the next version, as if there had been no refused one.
    """
    await store.put("key", 1)
    for _ in range(5):
        with pytest.raises(Conflict):
            await store.put("key", 2, expect=limpet.Version(9))

    assert (await store.put("key", 3)).version == 2


async def test_a_conflict_has_what_was_found(store: limpet.Store) -> None:
    """Conflict carries the key, what was expected, the version and revision found, and the entry found."""
    await store.put("key", "old")
    current = await store.put("key", {"now": [1]}, ttl=600, meta={"by": "another"})

    with pytest.raises(Conflict) as refused:
        await store.put("key", "mine", expect=limpet.Version(41))

    conflict = refused.value
    assert conflict.key == "key"
    assert "version 41" in conflict.expected
    assert (conflict.actual_version, conflict.actual_revision) == (2, current.revision)
    assert conflict.current == current
    assert conflict.current is not None
    assert (conflict.current.value, conflict.current.meta) == ({"now": [1]}, {"by": "another"})


async def test_a_conflict_names_the_expected_revision(store: limpet.Store) -> None:
    """Conflict carries the key, what was expected, the version and revision found, and the entry found."""
    seen = await store.put("key", 1)
    await store.put("key", 2)

    with pytest.raises(Conflict) as refused:
        await store.delete("key", expect=seen)

    assert str(seen.revision) in refused.value.expected


@pytest.mark.parametrize("value", [b"\0raw", limpet.Fields(text="a", raw=b"\xff")], ids=["bytes", "record"])
async def test_the_entry_of_a_conflict_serves_for_the_next_try(store: limpet.Store, value: object) -> None:
    """Conflict carries the key, what was expected, the version and revision found, and the entry found.

    The caller need not read again: the entry of the conflict is complete, and can guard the next write.
    """
    await store.put("key", value)

    with pytest.raises(Conflict) as refused:
        await store.put("key", "mine", expect=limpet.ABSENT)
    found = refused.value.current

    assert found == await store.entry("key")
    assert found is not None
    assert found.value == value
    assert (await store.put("key", "mine", expect=found)).version == 2


async def test_a_conflict_in_a_batch_names_the_key_that_differs(store: limpet.Store) -> None:
    """Conflict carries the key, what was expected, the version and revision found, and the entry found."""
    await store.put("a", 1)
    found = await store.put("b", 2)

    with pytest.raises(Conflict) as refused:
        await store.batch().expect("a", limpet.Version(1)).expect("b", limpet.Version(5)).put("c", 3).commit()

    assert (refused.value.key, refused.value.current) == ("b", found)


@every_expectation
async def test_a_guard_finds_nothing_on_a_missing_key(
    store: limpet.Store, expectation: Callable[[limpet.Entry], Any]
) -> None:
    """A guard on a missing key fails with nothing found."""
    ended = await store.put("key", {"a": 1})
    await store.delete("key")

    with pytest.raises(Conflict) as refused:
        await store.put("key", "mine", expect=expectation(ended))

    conflict = refused.value
    assert (conflict.key, conflict.current, conflict.actual_version, conflict.actual_revision) == (
        "key",
        None,
        None,
        None,
    )


@pytest.mark.parametrize("number", [0, 1, 2**53])
async def test_no_number_stands_for_a_missing_key(store: limpet.Store, number: int) -> None:
    """A guard on a missing key fails with nothing found."""
    for expectation in (limpet.Version(number), limpet.Revision(number)):
        with pytest.raises(Conflict) as refused:
            await store.put("key", 1, expect=expectation)

        assert refused.value.current is None


async def test_null_is_not_found_on_a_missing_key(store: limpet.Store) -> None:
    """A guard on a missing key fails with nothing found."""
    for expectation in (limpet.equals(None), limpet.equals(limpet.Fields()), operator.eq(limpet.field("a"), None)):
        with pytest.raises(Conflict) as refused:
            await store.put("key", 1, expect=expectation)

        assert refused.value.current is None


@every_expectation
async def test_a_guard_finds_nothing_on_an_expired_key(
    store: limpet.Store, elapse: Elapse, expectation: Callable[[limpet.Entry], Any]
) -> None:
    """A guard on an expired key fails as on a missing one."""
    expired = await store.put("key", {"a": 1}, ttl=0.1)
    await elapse(0.15)

    with pytest.raises(Conflict) as refused:
        await store.put("key", "mine", expect=expectation(expired))

    assert (refused.value.current, refused.value.actual_version, refused.value.actual_revision) == (None, None, None)
    assert await store.entry("key") is None


async def test_an_expired_key_meets_the_guards_of_a_missing_one(store: limpet.Store, elapse: Elapse) -> None:
    """A guard on an expired key fails as on a missing one."""
    for key in ("absent", "none"):
        await store.put(key, 1, ttl=0.1)
    await elapse(0.15)

    assert (await store.put("absent", 2, expect=limpet.ABSENT)).version == 1
    assert (await store.put("none", 2, expect=None)).version == 1


@every_verb
async def test_a_write_under_a_guard_of_an_expired_key_does_nothing(
    store: limpet.Store, elapse: Elapse, verb: Verb
) -> None:
    """A guard on an expired key fails as on a missing one."""
    expired = await store.put("key", 1, ttl=timedelta(milliseconds=100))
    await elapse(0.15)

    with pytest.raises(Conflict):
        await verb(store, expired)

    assert await store.entry("key") is None


@every_verb
async def test_every_write_is_refused_by_its_guard(store: limpet.Store, verb: Verb) -> None:
    """Every write takes a guard: put, add, delete, take and touch."""
    before = await store.put("key", 1)

    for expectation in (limpet.ABSENT, None, limpet.Version(2), limpet.equals(1.0)):
        with pytest.raises(Conflict):
            await verb(store, expectation)

    assert await store.entry("key") == before


@every_verb
async def test_every_write_happens_under_its_guard(store: limpet.Store, verb: Verb) -> None:
    """Every write takes a guard: put, add, delete, take and touch."""
    before = await store.put("key", 1)

    await verb(store, before)

    assert await store.entry("key") != before


async def test_writes_under_a_guard_answer_as_without(store: limpet.Store) -> None:
    """Every write takes a guard: put, add, delete, take and touch."""
    for key in ("add", "delete", "take"):
        await store.put(key, 1)
    touched = await store.put("touch", 1)

    assert await store.add("add", 2, expect=limpet.equals(1)) == 3
    assert await store.delete("delete", expect=limpet.PRESENT) is True
    assert await store.take("take", expect=limpet.Version(1)) == 1
    again = await store.touch("touch", 60, expect=touched)
    assert again is not None
    assert again.revision > touched.revision


@pytest.mark.parametrize("name", ["delete", "take", "touch", "persist"])
async def test_a_guard_turns_a_missing_key_into_a_conflict(store: limpet.Store, name: str) -> None:
    """Every write takes a guard: put, add, delete, take and touch.

    Without a guard these answer a missing key by False, the default or None.
    """
    with pytest.raises(Conflict):
        await VERBS[name](store, limpet.PRESENT)


async def test_a_counter_can_be_moved_from_a_known_value_only(store: limpet.Store) -> None:
    """Every write takes a guard: put, add, delete, take and touch."""
    await store.put("key", 10)

    async def spend() -> bool:
        with contextlib.suppress(Conflict):
            await store.add("key", -10, expect=limpet.equals(10))
            return True
        return False

    assert sum(await asyncio.gather(*(spend() for _ in range(8)))) == 1
    assert await store.get("key") == 0


@pytest.mark.parametrize(
    "expectation",
    [0, 1, True, False, 1.0, "1", "ABSENT", b"", [], {}, {"version": 1}, (), ..., limpet.KEEP, limpet.Version],
    ids=repr,
)
async def test_nothing_else_can_be_expected(store: limpet.Store, expectation: Any) -> None:
    """Anything else as an expectation is InvalidValue."""
    before = await store.put("key", 1)

    for verb in VERBS.values():
        with pytest.raises(InvalidValue):
            await verb(store, expectation)

    assert await store.entry("key") == before


@pytest.mark.parametrize(
    "filter_",
    [
        limpet.field("a") != 1,
        limpet.field("a") < 1,
        limpet.field("a") >= 1,
        limpet.field("a").in_([1]),
        limpet.field("a").not_in([1]),
        limpet.field("a").exists(),
        (limpet.field("a") == 1) & (limpet.field("b") == 2),
        (limpet.field("a") == 1) & (limpet.field("a") == 1),
    ],
)
async def test_only_one_equality_of_one_field_can_be_expected(store: limpet.Store, filter_: limpet.Filter) -> None:
    """Anything else as an expectation is InvalidValue."""
    before = await store.put("key", {"a": 1, "b": 2})

    with pytest.raises(InvalidValue):
        await store.put("key", 2, expect=filter_)

    assert await store.entry("key") == before


@pytest.mark.parametrize("number", ["1", 1.0, True, None, [1]], ids=repr)
@pytest.mark.parametrize("kind", [limpet.Version, limpet.Revision])
async def test_a_version_or_revision_is_an_integer(store: limpet.Store, kind: Any, number: Any) -> None:
    """Anything else as an expectation is InvalidValue.

    A version that came as text from a form would otherwise never hold, and "1" is not found where there is 1.
    """
    before = await store.put("key", 1)

    with pytest.raises(InvalidValue):
        await store.put("key", 2, expect=kind(number))

    assert await store.entry("key") == before


# Numbers ----------------------------------------------------------------------


@pytest.mark.refused_early
@pytest.mark.parametrize("number", [-1, 2**63, 10**30, True, 1.0, "1", None])
async def test_a_number_that_no_engine_can_hold_is_refused(store: limpet.Store, number: Any) -> None:
    """A version, a revision or a fencing token is an integer from 0 to 2^63-1; anything else is InvalidValue."""
    for guard in (limpet.Version(number), limpet.Revision(number)):
        with pytest.raises(InvalidValue):
            await store.put("k", 1, expect=guard)
    with pytest.raises(InvalidValue):
        await store.put("k", 1, fence=limpet.Fence("lock", number))
    with pytest.raises(InvalidValue):
        store.batch().fence(limpet.Fence("lock", number))
    if number is not None:
        with pytest.raises(InvalidValue):
            store.lock("lock", ttl=60, token=number)

    assert await store.get("k") is None


@pytest.mark.parametrize("number", [0, 2**53 - 1, 2**53, 2**53 + 1, 2**63 - 1])
async def test_a_number_that_no_entry_has_is_a_conflict(store: limpet.Store, number: int) -> None:
    """A version, a revision or a fencing token is an integer from 0 to 2^63-1; anything else is InvalidValue."""
    await store.put("k", 1)

    for guard in (limpet.Version(number), limpet.Revision(number)):
        with pytest.raises(Conflict):
            await store.put("k", 2, expect=guard)
    with pytest.raises(LockLost):
        await store.put("k", 2, fence=limpet.Fence("lock", number))

    assert await store.get("k") == 1
