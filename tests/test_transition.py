"""The one function that decides what a write does, by example and by property, without any engine."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from limpet import codec
from limpet.errors import Corrupt
from limpet.model import (
    ABSENT,
    KEEP,
    PRESENT,
    Add,
    Batch,
    Change,
    Commit,
    Condition,
    Create,
    Delete,
    Entry,
    Equals,
    Expire,
    Family,
    FieldEquals,
    Guard,
    HeldBy,
    Import,
    Patch,
    Put,
    Refusal,
    Revision,
    Touch,
    Version,
    Write,
    live,
)
from limpet.transition import Find, Plan, plan, read_receipt, recall

NOW = 1_000_000
BASE = 50

Map = dict[tuple[Family, str], Entry]


def entry(
    stored: Any = b"1",
    *,
    key: str = "k",
    version: int = 3,
    revision: int = 40,
    created_revision: int = 20,
    expires_ms: int | None = None,
    meta_json: bytes | None = None,
) -> Entry:
    return Entry(key, stored, version, revision, created_revision, 500, 600, expires_ms, meta_json)


def finding(*entries: Entry, family: Family = "data") -> Find:
    found: Map = {(family, item.key): item for item in entries}
    return lambda family, key: found.get((family, key))


NOTHING = finding()


def batch(*writes: Write, guards: tuple[Guard, ...] = (), **options: Any) -> Batch:
    return Batch(guards, writes, options.pop("request_id", "r1"), **options)


def planned(wanted: Batch, find: Find = NOTHING, now_ms: int = NOW) -> Plan:
    outcome = plan(wanted, find, now_ms=now_ms, revision=BASE)
    assert isinstance(outcome, Plan)
    return outcome


def refused(wanted: Batch, find: Find = NOTHING) -> Refusal:
    outcome = plan(wanted, find, now_ms=NOW, revision=BASE)
    assert isinstance(outcome, Refusal)
    return outcome


# Writes, by example -----------------------------------------------------------


def test_a_put_begins_a_key() -> None:
    made = planned(batch(Put("k", b"7", 250, b'{"m":1}')))

    after = Entry("k", b"7", 1, 51, 51, NOW, NOW, NOW + 250, b'{"m":1}')
    assert made.commit == Commit(51, (after,), (None,), NOW)
    assert made.changes == (Change("put", after, 51, 51, NOW, "r1"),)
    assert made.receipt is None


def test_a_put_replaces_the_value_and_goes_on_with_the_key() -> None:
    before = entry(expires_ms=NOW + 1, meta_json=b"{}")

    made = planned(batch(Put("k", b"7")), finding(before))

    assert made.commit.entries == (Entry("k", b"7", 4, 51, 20, 500, NOW, None, None),)


@pytest.mark.parametrize("write", [Put("k", b"7", KEEP, KEEP), Add("k", 6), Patch("k", {"a": b"7"})])
def test_what_is_kept_is_kept(write: Write) -> None:
    stored: Any = {"b": b"1"} if isinstance(write, Patch) else b"1"
    before = entry(stored, expires_ms=NOW + 1, meta_json=b'{"m":1}')

    after = planned(batch(write), finding(before)).commit.entries[0]

    assert after is not None
    assert (after.expires_ms, after.meta_json, after.version) == (NOW + 1, b'{"m":1}', 4)


@pytest.mark.parametrize("write", [Put("k", b"7", KEEP, KEEP), Add("k", 6), Patch("k", {"a": b"7"})])
def test_where_nothing_is_there_is_nothing_to_keep(write: Write) -> None:
    after = planned(batch(write)).commit.entries[0]

    assert after is not None
    assert (after.expires_ms, after.meta_json, after.version) == (None, None, 1)


@pytest.mark.parametrize(
    ("before", "by", "after"),
    [(None, 5, b"5"), (b"1", 5, b"6"), (b"-3", 0, b"-3"), (b"0", codec.INT_MIN, b"-9223372036854775808")],
)
def test_an_add_counts(before: bytes | None, by: int, after: bytes) -> None:
    made = planned(batch(Add("k", by)), NOTHING if before is None else finding(entry(before)))

    assert made.changes[0].op == "put"
    assert made.changes[0].entry.stored == after


@pytest.mark.parametrize("stored", [b"1.0", b"true", b'"1"', b"null", b"\x001", {"a": b"1"}, None])
def test_an_add_needs_an_integer(stored: Any) -> None:
    before = entry(stored)

    assert refused(batch(Add("k", 1)), finding(before)) == Refusal("type", "k", before, NOW, needs="an integer")


@pytest.mark.parametrize(("stored", "by"), [(b"9223372036854775807", 1), (b"-1", codec.INT_MIN)])
def test_an_add_stays_in_its_range(stored: bytes, by: int) -> None:
    before = entry(stored)

    assert refused(batch(Add("k", by)), finding(before)) == Refusal("overflow", "k", before, NOW)


def test_a_patch_sets_and_clears_fields() -> None:
    before = entry({"a": b"1", "b": b"2", "c": b"3"})

    made = planned(batch(Patch("k", {"b": b"7", "d": b"8"}, ("c", "z"))), finding(before))

    assert made.changes[0].op == "patch"
    assert made.changes[0].entry.stored == {"a": b"1", "b": b"7", "d": b"8"}
    assert before.stored == {"a": b"1", "b": b"2", "c": b"3"}


def test_a_patch_makes_a_record_unless_it_must_exist() -> None:
    assert planned(batch(Patch("k", {"a": b"1"}, ("b",)))).changes[0].entry.stored == {"a": b"1"}
    assert refused(batch(Patch("k", {"a": b"1"}, if_exists=True))) == Refusal("missing", "k", None, NOW)


@pytest.mark.parametrize("stored", [b"{}", b"\0", None])
def test_a_patch_needs_a_record(stored: bytes | None) -> None:
    before = entry(stored)

    assert refused(batch(Patch("k", {})), finding(before)) == Refusal("type", "k", before, NOW, needs="a record")


def test_a_patch_counts_the_whole_record() -> None:
    before = entry({"a": b"12345"})
    wanted = Patch("k", {"b": b"123"})

    assert planned(batch(wanted, value_bytes_max=10), finding(before)).changes[0].entry.size_bytes == 10
    assert refused(batch(wanted, value_bytes_max=9), finding(before)) == Refusal(
        "size", "k", before, NOW, size_bytes=10
    )


@pytest.mark.parametrize(("ttl_ms", "expires_ms"), [(None, None), (10, NOW + 10)])
def test_a_touch_moves_only_the_time_and_the_revision(ttl_ms: int | None, expires_ms: int | None) -> None:
    before = entry(expires_ms=NOW + 5, meta_json=b"{}")

    made = planned(batch(Touch("k", ttl_ms)), finding(before))

    after = msgspec.structs.replace(before, revision=51, expires_ms=expires_ms)
    assert made.commit == Commit(51, (after,), (None,), NOW)
    assert made.changes == (Change("touch", after, 51, 51, NOW, "r1"),)


def test_a_delete_ends_a_key_and_shows_no_value() -> None:
    before = entry(meta_json=b'{"m":1}')

    made = planned(batch(Delete("k")), finding(before))

    ended = before.without_value()
    assert made.commit == Commit(51, (None,), (ended,), NOW)
    assert made.changes == (Change("delete", ended, 51, 51, NOW, "r1"),)


def test_a_take_shows_the_value() -> None:
    before = entry()

    made = planned(batch(Delete("k", take=True)), finding(before))

    assert made.commit.ended == (before,)
    assert made.changes[0].entry == before
    assert made.changes[0].after is None


@pytest.mark.parametrize("write", [Touch("k", 5), Delete("k"), Delete("k", take=True), Expire("k", 40)])
@pytest.mark.parametrize("found", [None, entry(expires_ms=NOW)])
def test_ending_or_touching_nothing_uses_no_revision(write: Write, found: Entry | None) -> None:
    if isinstance(write, Expire) and found is not None:
        write = Expire("k", 39)

    made = planned(batch(write), NOTHING if found is None else finding(found))

    assert made == Plan(Commit(BASE, (None,), (None,), NOW), ())


def test_an_expire_ends_the_entry_whose_time_has_come() -> None:
    before = entry(expires_ms=NOW, meta_json=b'{"m":1}')

    made = planned(batch(Expire("k", 40)), finding(before))

    ended = before.without_value()
    assert made.commit == Commit(51, (None,), (ended,), NOW)
    assert made.changes == (Change("expire", ended, 51, 51, NOW, None),)


@pytest.mark.parametrize("found", [entry(expires_ms=NOW + 1), entry(expires_ms=None)])
def test_an_expire_leaves_what_still_lives(found: Entry) -> None:
    assert planned(batch(Expire("k", 40)), finding(found)).changes == ()


@pytest.mark.parametrize(
    ("write", "stored"),
    [(Put("k", b"7", 9), b"1"), (Add("k", 7, 9), b"1"), (Patch("k", {"a": b"7"}, (), False, 9), {})],
)
def test_a_write_over_an_expired_entry_puts_the_expiry_first(write: Write, stored: Any) -> None:
    """The incarnation that expired gets its one expire event, and the new one begins at version 1."""
    old = entry(stored, expires_ms=NOW, meta_json=b"{}")

    made = planned(batch(write), finding(old))

    expiry, begin = made.changes
    assert expiry == Change("expire", old.without_value(), 51, 52, NOW, None)
    assert (begin.entry.version, begin.entry.revision, begin.entry.created_revision) == (1, 52, 52)
    assert (begin.entry.created_ms, begin.entry.expires_ms, begin.entry.meta_json) == (NOW, NOW + 9, None)
    assert (begin.revision, begin.commit, begin.cause) == (52, 52, "r1")
    assert made.commit.ended == (None,)


def test_a_refused_write_over_an_expired_entry_expires_nothing() -> None:
    old = entry({}, expires_ms=NOW)

    assert refused(batch(Patch("k", {}, if_exists=True)), finding(old)) == Refusal("missing", "k", None, NOW)


def test_each_change_of_a_batch_has_its_own_revision() -> None:
    find = finding(entry(key="b"), entry(key="d", expires_ms=NOW - 1))
    wanted = batch(Put("a", b"1"), Delete("b"), Delete("c"), Put("d", b"2"), Touch("e", None))

    made = planned(wanted, find)

    assert [(change.op, change.key, change.revision) for change in made.changes] == [
        ("put", "a", 51),
        ("delete", "b", 52),
        ("expire", "d", 53),
        ("put", "d", 54),
    ]
    assert {change.commit for change in made.changes} == {54}
    assert made.commit.revision == 54
    assert [after and after.revision for after in made.commit.entries] == [51, None, None, 54, None]


def test_a_refusal_in_the_middle_refuses_all() -> None:
    wanted = batch(Put("a", b"1"), Add("k", 1), Put("b", b"2"))

    assert refused(wanted, finding(entry(b"true"))).key == "k"


# Guards, by example -----------------------------------------------------------

FOUND = entry(b'{"n":1,"s":"x"}', version=3, revision=40, created_revision=20)
RECORD = entry({"n": b"1", "raw": b"\0x"})
VALUELESS = entry(None)


@pytest.mark.parametrize(
    ("condition", "found", "holds"),
    [
        (ABSENT, None, True),
        (ABSENT, FOUND, False),
        (PRESENT, None, False),
        (PRESENT, FOUND, True),
        (Version(3), FOUND, True),
        (Version(4), FOUND, False),
        (Version(3), None, False),
        (Revision(40), FOUND, True),
        (Revision(20), FOUND, False),
        (Revision(40), None, False),
        (HeldBy(20), FOUND, True),
        (HeldBy(40), FOUND, False),
        (HeldBy(20), None, False),
        (Equals(b'{"n":1,"s":"x"}'), FOUND, True),
        (Equals(b'{"n":1.0,"s":"x"}'), FOUND, False),
        (Equals({"n": b"1", "raw": b"\0x"}), RECORD, True),
        (Equals({"n": b"1"}), RECORD, False),
        (Equals(b"null"), None, False),
        (FieldEquals("n", b"1"), FOUND, True),
        (FieldEquals("n", b"1.0"), FOUND, False),
        (FieldEquals("raw", b"\0x"), RECORD, True),
        (FieldEquals("raw", b'"x"'), RECORD, False),
        (FieldEquals("z", ABSENT), FOUND, True),
        (FieldEquals("n", ABSENT), FOUND, False),
        (FieldEquals("z", b"1"), FOUND, False),
        (FieldEquals("z", ABSENT), None, False),
        (FieldEquals("n", ABSENT), entry(b"[1]"), True),
        (FieldEquals("n", ABSENT), VALUELESS, True),
        (FieldEquals("n", b"1"), VALUELESS, False),
    ],
)
def test_a_guard_holds_or_does_not(condition: Condition, found: Entry | None, holds: bool) -> None:
    guard = Guard("k", condition)
    wanted = batch(Put("other", b"1"), guards=(guard,))

    outcome = plan(wanted, NOTHING if found is None else finding(found), now_ms=NOW, revision=BASE)

    if holds:
        assert isinstance(outcome, Plan)
    else:
        assert outcome == Refusal("guard", "k", found, NOW, guard=guard)


def test_a_guard_takes_the_expired_for_absent() -> None:
    find = finding(entry(expires_ms=NOW))

    assert planned(batch(guards=(Guard("k", ABSENT),)), find).changes == ()
    assert refused(batch(guards=(Guard("k", Version(3)),)), find).found is None


def test_guards_see_the_state_before_the_batch() -> None:
    made = planned(batch(Put("k", b"1"), guards=(Guard("k", ABSENT),)))

    assert len(made.changes) == 1


def test_the_first_guard_that_fails_is_the_one_in_the_refusal() -> None:
    guards = (Guard("k", PRESENT), Guard("x", PRESENT), Guard("y", PRESENT))

    assert refused(batch(guards=guards), finding(entry())).guard == guards[1]


def test_families_do_not_meet() -> None:
    find = finding(entry(), family="lock")
    lock_guard = Guard("k", HeldBy(20), "lock")

    made = planned(batch(Put("k", b"1"), Delete("k", family="lock"), guards=(lock_guard, Guard("k", ABSENT))), find)

    assert [(change.op, change.family, change.entry.version) for change in made.changes] == [
        ("put", "data", 1),
        ("delete", "lock", 3),
    ]


# Receipts ---------------------------------------------------------------------


def with_receipt(*writes: Write, digest: bytes = b"d", **options: Any) -> Batch:
    return batch(*writes, digest=digest, receipt_ms=600_000, **options)


WANTED = with_receipt(
    Put("a", b'"secret"'),
    Add("n", 2),
    Patch("r", {"f": b"1"}),
    Delete("t", take=True),
    Touch("u", 5),
    Delete("gone"),
)
BEFORE = finding(entry(b"5", key="n"), entry({"e": b"0"}, key="r"), entry(key="t"), entry(key="u"))


def test_a_receipt_that_cannot_be_read_is_corrupt() -> None:
    """A receipt may be damaged, or of another version of Limpet: nothing is known of its request then."""
    damaged = Entry("r1", b"\0\xc1", 1, 1, 1, NOW, NOW, NOW + 600_000)

    with pytest.raises(Corrupt, match="receipt of request 'r1'"):
        read_receipt(damaged)


def test_a_receipt_is_an_entry_with_its_own_time() -> None:
    made = planned(WANTED, BEFORE)

    receipt = made.receipt
    assert receipt is not None
    assert (receipt.key, receipt.version, receipt.revision, receipt.expires_ms) == ("r1", 1, 55, NOW + 600_000)
    assert codec.kind_of(receipt.stored or b"") == "bytes"


def test_a_receipt_keeps_what_the_request_does_not_say() -> None:
    """A put's value is in the request already, so a receipt does not hold it a second time."""
    made = planned(WANTED, BEFORE)

    assert made.receipt is not None
    kept = read_receipt(made.receipt)
    assert kept.digest == b"d"
    assert b"secret" not in bytes(made.receipt.stored or b"")  # type: ignore[arg-type]
    put = made.commit.entries[0]
    assert put is not None
    assert kept.commit.entries == (put.without_value(), *made.commit.entries[1:])
    assert kept.commit.ended == made.commit.ended


def test_a_receipt_keeps_what_was_kept_and_not_what_was_created() -> None:
    kept = entry(b'"kept"', key="kept")
    wanted = with_receipt(Create("kept", b'"mine"'), Create("new", b'"secret"'))
    made = planned(wanted, finding(kept))

    assert made.receipt is not None
    assert made.commit.kept == ("kept",)
    assert [change.key for change in made.changes] == ["new"]
    assert b"secret" not in bytes(made.receipt.stored or b"")  # type: ignore[arg-type]
    again = planned(wanted, finding(made.receipt, family="receipt"))
    assert again == Plan(msgspec.structs.replace(made.commit, replayed=True), ())
    assert again.commit.entries[0] == kept


def test_a_request_seen_before_answers_with_its_first_result() -> None:
    made = planned(WANTED, BEFORE)
    assert made.receipt is not None

    again = planned(WANTED, finding(made.receipt, family="receipt"), now_ms=NOW + 599_999)

    assert again == Plan(msgspec.structs.replace(made.commit, replayed=True), ())


def test_a_request_id_with_another_request_is_stale() -> None:
    made = planned(WANTED, BEFORE)
    assert made.receipt is not None
    other = with_receipt(Put("a", b"2"), digest=b"e")

    assert refused(other, finding(made.receipt, family="receipt")) == Refusal("stale_request", "r1", None, NOW)


def test_a_receipt_is_forgotten_in_time() -> None:
    made = planned(WANTED, BEFORE)
    assert made.receipt is not None

    late = planned(with_receipt(Put("a", b"2"), digest=b"e"), finding(made.receipt, family="receipt"), NOW + 600_000)

    assert not late.commit.replayed


def test_a_request_without_a_receipt_asks_for_none() -> None:
    made = planned(WANTED, BEFORE)
    assert made.receipt is not None

    again = planned(batch(Put("a", b"1")), finding(made.receipt, family="receipt"))

    assert len(again.changes) == 1
    assert again.receipt is None


def test_a_refused_request_leaves_no_receipt() -> None:
    assert isinstance(
        plan(with_receipt(Put("a", b"1"), guards=(Guard("a", PRESENT),)), NOTHING, now_ms=NOW, revision=BASE), Refusal
    )


# Recalling from the log -------------------------------------------------------


def test_what_left_no_trace_is_not_recalled() -> None:
    other = planned(batch(Put("a", b"1"), request_id="r2")).changes

    assert recall(batch(Put("a", b"1")), other, NOTHING) is None
    assert recall(batch(Put("a", b"1")), (), NOTHING) is None


def test_a_batch_is_recalled_from_its_changes() -> None:
    wanted = batch(*WANTED.writes)
    made = planned(wanted, BEFORE)
    noise = planned(batch(Put("a", b"9"), request_id="r2")).changes

    assert recall(wanted, (*noise, *made.changes), NOTHING) == msgspec.structs.replace(made.commit, replayed=True)


def test_a_touch_without_its_value_is_recalled_with_the_value_that_is_there() -> None:
    """A log may leave out what a touch did not write."""
    wanted = batch(Touch("k", 5))
    made = planned(wanted, finding(entry(b"7")))
    lean = msgspec.structs.replace(made.changes[0], entry=made.changes[0].entry.without_value())

    touched_again = msgspec.structs.replace(made.changes[0].entry, revision=60, expires_ms=None)
    rewritten = msgspec.structs.replace(made.changes[0].entry, version=4, stored=b"8")
    reborn = msgspec.structs.replace(made.changes[0].entry, created_revision=60, stored=b"8")
    found = {
        name: recall(wanted, [lean], find)
        for name, find in {
            "same": finding(made.changes[0].entry),
            "touched again": finding(touched_again),
            "rewritten": finding(rewritten),
            "reborn": finding(reborn),
            "gone": NOTHING,
        }.items()
    }

    whole = msgspec.structs.replace(made.commit, replayed=True)
    bare = msgspec.structs.replace(whole, entries=(lean.entry,))
    assert found == {"same": whole, "touched again": whole, "rewritten": bare, "reborn": bare, "gone": bare}


# By property ------------------------------------------------------------------

KEYS = ("a", "b", "c")
keys = st.sampled_from(KEYS)
scalars = st.sampled_from([b"1", b"-5", b"1.0", b"null", b'{"f":1}', b"\0raw", b"9223372036854775807"])
records = st.dictionaries(st.sampled_from(["f", "g"]), scalars, max_size=2)
stored_values: st.SearchStrategy[Any] = scalars | records
ttls = st.sampled_from([None, 1, 1000])
kept_ttls: st.SearchStrategy[Any] = ttls | st.just(KEEP)
metas: st.SearchStrategy[Any] = st.sampled_from([None, KEEP, b'{"m":1}'])

entries = st.builds(
    Entry,
    key=st.just(""),
    stored=stored_values,
    version=st.integers(1, 5),
    revision=st.integers(30, 40),
    created_revision=st.integers(20, 30),
    created_ms=st.just(500),
    updated_ms=st.just(600),
    expires_ms=st.sampled_from([None, NOW - 1, NOW, NOW + 1]),
    meta_json=st.sampled_from([None, b"{}"]),
)
maps = st.dictionaries(st.tuples(st.sampled_from(["data", "lock"]), keys), entries, max_size=6).map(
    lambda found: {place: msgspec.structs.replace(item, key=place[1]) for place, item in found.items()}
)
conditions: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([ABSENT, PRESENT]),
    st.builds(Version, st.integers(1, 5)),
    st.builds(Revision, st.integers(30, 40)),
    st.builds(HeldBy, st.integers(20, 30)),
    st.builds(Equals, stored_values),
    st.builds(FieldEquals, st.sampled_from(["f", "g"]), scalars | st.just(ABSENT)),
)
families = st.sampled_from(["data", "data", "data", "lock"])
writes = st.one_of(
    st.builds(Put, keys, stored_values, kept_ttls, metas, families),
    st.builds(Add, keys, st.sampled_from([1, -1, 0, codec.INT_MAX]), kept_ttls, metas, families),
    st.builds(
        Add,
        keys,
        st.sampled_from([1, -1, 0, codec.INT_MAX]),
        family=families,
        rule=st.sampled_from(["add", "minimum", "maximum"]),
        new_ttl_ms=st.sampled_from([None, 10]),
    ),
    st.builds(Patch, keys, records, st.sampled_from([(), ("h",)]), st.booleans(), kept_ttls, metas, families),
    st.builds(
        Import,
        keys,
        stored_values,
        meta_json=st.sampled_from([None, b"{}"]),
        family=families,
        version=st.integers(1, 9),
        created_ms=st.integers(0, NOW),
        updated_ms=st.integers(0, NOW),
        expires_ms=st.sampled_from([None, 1, NOW + 5]),
    ),
    st.builds(Create, keys, stored_values, ttls, st.sampled_from([None, b'{"m":1}'])),
    st.builds(Touch, keys, ttls, families),
    st.builds(Delete, keys, st.booleans(), families),
    st.builds(Expire, keys, st.integers(30, 40), families),
)
guards = st.lists(st.builds(Guard, keys, conditions, families), max_size=1).map(tuple)
some_writes = st.lists(writes, max_size=4, unique_by=lambda write: (write.family, write.key)).map(tuple)
batches = st.builds(
    Batch,
    guards,
    some_writes,
    st.just("r1"),
    st.just(b"d"),
    st.sampled_from([None, 600_000]),
    value_bytes_max=st.sampled_from([20, 1_000_000]),
)

thorough = settings(max_examples=150, deadline=None)


def decide(wanted: Batch, state: Mapping[Any, Entry], revision: int = BASE) -> Plan | Refusal:
    return plan(wanted, lambda family, key: state.get((family, key)), now_ms=NOW, revision=revision)


@thorough
@given(wanted=batches, state=maps)
def test_planning_changes_nothing(wanted: Batch, state: Map) -> None:
    before = copy.deepcopy((wanted, state))

    first = decide(wanted, state)

    assert (wanted, state) == before
    assert decide(wanted, state) == first


@thorough
@given(wanted=batches, state=maps)
def test_a_refusal_has_nothing_but_a_reason(wanted: Batch, state: Map) -> None:
    outcome = decide(wanted, state)

    if isinstance(outcome, Refusal):
        assert outcome.found is None or outcome.found in state.values()
        assert outcome.found is None or live(outcome.found, NOW) is not None
        assert (outcome.guard is not None) == (outcome.reason == "guard")


@thorough
@given(wanted=batches, state=maps, revision=st.integers(50, 10_000))
def test_revisions_grow_to_that_of_the_commit(wanted: Batch, state: Map, revision: int) -> None:
    outcome = decide(wanted, state, revision)

    if isinstance(outcome, Plan):
        numbers = [change.revision for change in outcome.changes]
        assert numbers == list(range(revision + 1, revision + 1 + len(numbers)))
        assert outcome.commit.revision == revision + len(numbers)
        assert {change.commit for change in outcome.changes} <= {outcome.commit.revision}
        for change in outcome.changes:
            assert change.after is None or change.after.revision == change.revision


@thorough
@given(wanted=batches, state=maps)
def test_versions_go_on_or_start_again(wanted: Batch, state: Map) -> None:
    outcome = decide(wanted, state)

    imported = {(one.family, one.key): one for one in wanted.writes if isinstance(one, Import)}
    for change in outcome.changes if isinstance(outcome, Plan) else ():
        stored = state.get((change.family, change.key))
        before = live(stored, NOW)
        brought = imported.get((change.family, change.key))
        match change.op:
            case "put" if brought is not None:
                assert (change.entry.version, change.entry.created_revision) == (brought.version, change.revision)
                assert (change.entry.created_ms, change.entry.updated_ms) == (brought.created_ms, brought.updated_ms)
                assert change.entry.expires_ms == brought.expires_ms
            case "put" | "patch":
                assert change.entry.version == (1 if before is None else before.version + 1)
                assert change.entry.created_revision == (change.revision if before is None else before.created_revision)
                assert change.entry.created_ms == (NOW if before is None else before.created_ms)
                assert change.entry.updated_ms == NOW
            case "touch":
                assert before is not None
                assert (
                    msgspec.structs.replace(change.entry, revision=before.revision, expires_ms=before.expires_ms)
                    == before
                )
            case "delete":
                assert before is not None
                assert change.entry.without_value() == before.without_value()
            case "expire":
                assert stored is not None
                assert before is None
                assert change.entry == stored.without_value()
                assert change.cause is None


@thorough
@given(wanted=batches, state=maps)
def test_the_commit_tells_each_write_what_became_of_it(wanted: Batch, state: Map) -> None:
    outcome = decide(wanted, state)

    if isinstance(outcome, Plan):
        made = {(change.family, change.key): change for change in outcome.changes}
        for write, after, ended in zip(wanted.writes, outcome.commit.entries, outcome.commit.ended, strict=True):
            change = made.get((write.family, write.key))
            if isinstance(write, Create) and write.key in outcome.commit.kept:
                assert change is None
                assert after == live(state.get((write.family, write.key)), NOW)
            else:
                assert after == (None if change is None else change.after)
            assert ended == (None if change is None or change.after is not None else change.entry)


def _numbered_alike(item: Entry | None) -> Entry | None:
    """An entry without the numbers that an extra change before it moves."""
    if item is None or item.revision <= BASE:
        return item
    created = 0 if item.created_revision > BASE else item.created_revision
    return msgspec.structs.replace(item, revision=0, created_revision=created)


@thorough
@given(wanted=batches, state=maps)
def test_the_expired_is_absent_but_for_its_expiry(wanted: Batch, state: Map) -> None:
    request = msgspec.structs.replace(
        wanted, writes=tuple(write for write in wanted.writes if not isinstance(write, Expire))
    )
    alive = {place: item for place, item in state.items() if live(item, NOW) is not None}

    with_expired, without = decide(request, state), decide(request, alive)

    if isinstance(with_expired, Refusal) or isinstance(without, Refusal):
        assert with_expired == without
        return
    rest = [change for change in with_expired.changes if change.op != "expire"]
    assert [(change.op, change.family, _numbered_alike(change.entry)) for change in rest] == [
        (change.op, change.family, _numbered_alike(change.entry)) for change in without.changes
    ]
    assert list(map(_numbered_alike, with_expired.commit.entries)) == list(map(_numbered_alike, without.commit.entries))
    assert with_expired.commit.ended == without.commit.ended
    expired = [(change.family, change.key) for change in with_expired.changes if change.op == "expire"]
    recreated = [(write.family, write.key) for write in request.writes if isinstance(write, Put | Create | Add | Patch)]
    assert expired == [place for place in recreated if place in state and place not in alive]


@thorough
@given(wanted=batches, state=maps, lean=st.booleans())
def test_a_commit_is_recalled_from_its_own_changes(wanted: Batch, state: Map, lean: bool) -> None:
    """An expiry names no cause, so a batch of Expire is not recalled: it is never retried."""
    request = msgspec.structs.replace(
        wanted, writes=tuple(write for write in wanted.writes if not isinstance(write, Expire))
    )
    outcome = decide(request, state)
    if isinstance(outcome, Refusal):
        return
    after = dict(state)
    log = []
    for change in outcome.changes:
        if change.after is None:
            del after[change.family, change.key]
        else:
            after[change.family, change.key] = change.after
        bare = lean and change.op == "touch"
        log.append(msgspec.structs.replace(change, entry=change.entry.without_value()) if bare else change)

    recalled = recall(request, log, lambda family, key: after.get((family, key)))

    if any(change.cause is not None for change in log):
        assert recalled == msgspec.structs.replace(outcome.commit, replayed=True)
    else:
        assert recalled is None


@thorough
@given(wanted=batches, state=maps)
def test_a_repeated_request_gets_the_first_answer(wanted: Batch, state: Map) -> None:
    request = msgspec.structs.replace(wanted, receipt_ms=1000)
    outcome = decide(request, state)
    if isinstance(outcome, Refusal):
        return
    assert outcome.receipt is not None

    again = decide(request, {("receipt", "r1"): outcome.receipt})

    assert again == Plan(msgspec.structs.replace(outcome.commit, replayed=True), ())


def test_a_batch_without_a_name_is_not_found_in_the_log() -> None:
    """An expiry has no cause either, and is not to be taken for the work of a batch without a name."""
    expired = Change("expire", entry("a"), 7, 7, NOW)

    assert recall(Batch((), (Put("a", b"1"),)), [expired], NOTHING) is None
