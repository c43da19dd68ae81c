"""The judges of histories, judged: what is right passes, what is wrong is named."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from limpet import codec
from limpet.conformance.linearizability import (
    UNSEEN,
    KeyState,
    Operation,
    Recorder,
    check_order,
    check_register,
    check_watch,
)
from limpet.model import ABSENT, PRESENT, Entry, Event, Op, Revision, Version

# Histories by hand ------------------------------------------------------------

numbers = itertools.count(1)


def put(
    value: object,
    at: tuple[int, int | None],
    made: tuple[int, int] | None = None,
    *,
    key: str = "a",
    op: Any = "put",
    expect: Any = None,
    call: int | None = None,
    cause: str | None = None,
    result: object = None,
) -> Operation:
    """A put or add; without a result, one that never got a reply."""
    left = None if made is None else KeyState(made[0], made[1], value if result is None else result)
    return Operation(
        client="writer",
        key=key,
        op=op,
        call=call or next(numbers),
        called=at[0],
        argument=value,
        expect=expect,
        cause=cause,
        returned=None if made is None else at[1],
        outcome="unknown" if made is None else "done",
        made=left,
        revision=None if made is None else made[1],
    )


def look(
    at: tuple[int, int],
    seen: tuple[int, int, object] | None,
    *,
    key: str = "a",
    op: Any = "get",
    expect: Any = None,
    outcome: Any = "done",
    revision: int | None = None,
    call: int | None = None,
    cause: str | None = None,
) -> Operation:
    """A get, a refusal, or a delete with the place it got."""
    return Operation(
        client="reader",
        key=key,
        op=op,
        call=call or next(numbers),
        called=at[0],
        expect=expect,
        cause=cause,
        returned=at[1],
        outcome=outcome,
        seen=None if seen is None else KeyState(*seen),
        revision=revision,
    )


def unanswered(
    at: int, *, key: str = "a", op: Any = "delete", cause: str | None = None, expect: Any = None
) -> Operation:
    """An operation that never got a reply."""
    return Operation("loser", key, op, next(numbers), at, expect=expect, cause=cause)


def event(
    revision: int,
    op: Op = "put",
    value: object = None,
    version: int = 1,
    *,
    key: str = "a",
    commit: int | None = None,
    cause: str | None = None,
) -> Event:
    stored = codec.encode_field(value) if op == "put" else None
    entry = Entry(key, stored, version, revision, 1, 0, 0)
    return Event(op, key, entry, revision, commit or revision, f"p{revision}", cause)


RIGHT: dict[str, list[Operation]] = {
    "nothing": [],
    "one after another": [put(1, (1, 2), (1, 1)), look((3, 4), (1, 1, 1)), put(2, (5, 6), (2, 2))],
    "a read beside a write may see either": [
        put(1, (1, 2), (1, 1)),
        put(2, (3, 10), (2, 2)),
        look((4, 5), (1, 1, 1)),
        look((6, 7), (2, 2, 2)),
    ],
    "a read that sees the new before its writer returns": [put(1, (1, 9), (1, 1)), look((2, 3), (1, 1, 1))],
    "an end and a new beginning": [
        put(1, (1, 2), (1, 1)),
        look((3, 4), (1, 1, UNSEEN), op="delete", revision=2),
        look((5, 6), None),
        put(2, (7, 8), (1, 3), expect=ABSENT),
        look((9, 10), (1, 3, 2)),
    ],
    "a delete of nothing": [look((1, 2), None, op="delete"), put(1, (3, 4), (1, 1))],
    "a guard that holds": [put(1, (1, 2), (1, 1)), put(2, (3, 4), (2, 2), expect=Revision(1))],
    "a guard by version": [put(1, (1, 2), (1, 1)), put(2, (3, 4), (2, 2), expect=Version(1))],
    "a guard by presence": [put(1, (1, 2), (1, 1)), put(2, (3, 4), (2, 2), expect=PRESENT)],
    "a guard that fails": [
        put(1, (1, 2), (1, 1)),
        look((3, 4), (1, 1, 1), op="put", expect=ABSENT, outcome="refused"),
        look((5, 6), (1, 1, 1), op="put", expect=Version(2), outcome="refused"),
    ],
    "a guard that fails on nothing": [look((1, 2), None, op="put", expect=PRESENT, outcome="refused")],
    "a counter": [
        put(2, (1, 2), (1, 1), op="add", result=2),
        put(3, (3, 9), (3, 3), op="add", result=6),
        put(1, (4, 8), (2, 2), op="add", result=3),
    ],
    "writes that overlap in the other order": [
        put(1, (1, 9), (2, 2)),
        put(2, (2, 8), (1, 1)),
        look((10, 11), (2, 2, 1)),
    ],
    "nothing seen while a key comes and goes": [
        put(1, (1, 2), (1, 1)),
        look((3, 10), (1, 1, UNSEEN), op="delete", revision=2),
        put(2, (4, 11), (1, 3)),
        look((5, 6), None),
        look((7, 8), (1, 3, 2)),
    ],
}


@pytest.mark.parametrize("history", RIGHT.values(), ids=RIGHT.keys())
@pytest.mark.parametrize("check", [check_register, check_order])
def test_what_is_right_passes(history: list[Operation], check: Callable[[list[Operation]], str | None]) -> None:
    assert check(history) is None


WRONG: dict[str, list[Operation]] = {
    "a stale read": [put(1, (1, 2), (1, 1)), put(2, (3, 4), (2, 2)), look((5, 6), (1, 1, 1))],
    "a stale read of nothing": [put(1, (1, 2), (1, 1)), look((3, 4), None)],
    "a read that goes back": [
        put(1, (1, 2), (1, 1)),
        put(2, (3, 20), (2, 2)),
        look((4, 5), (2, 2, 2)),
        look((6, 7), (1, 1, 1)),
    ],
    "a read that comes back to life": [
        put(1, (1, 2), (1, 1)),
        look((3, 4), (1, 1, 1), op="delete", revision=2),
        look((5, 6), (1, 1, 1)),
    ],
    "a read from the future": [look((1, 2), (1, 1, 1)), put(1, (3, 4), (1, 1))],
    "a read of a value that was never written": [put(1, (1, 2), (1, 1)), look((3, 4), (1, 1, 7))],
    "a lost write": [put(1, (1, 2), (1, 1)), put(2, (3, 4), (2, 2)), put(3, (5, 6), (2, 3))],
    "a lost delete": [
        put(1, (1, 2), (1, 1)),
        look((3, 4), (1, 1, 1), op="delete", revision=2),
        put(2, (5, 6), (2, 3)),
    ],
    "a write applied twice": [put(1, (1, 2), (1, 1)), put(2, (3, 4), (3, 3)), look((5, 6), (3, 3, 2))],
    "an add applied twice": [
        put(1, (1, 2), (1, 1), op="add", result=1),
        put(1, (3, 4), (2, 2), op="add", result=3),
    ],
    "two who took the same": [
        put(1, (1, 2), (1, 1)),
        look((3, 9), (1, 1, 1), op="delete", revision=2),
        look((4, 8), (1, 1, 1), op="delete", revision=3),
    ],
    "two who created the same": [put(1, (1, 9), (1, 1), expect=ABSENT), put(2, (2, 8), (2, 2), expect=ABSENT)],
    "a guard that was not checked": [
        put(1, (1, 2), (1, 1)),
        put(2, (3, 4), (2, 2)),
        put(3, (5, 6), (3, 3), expect=Revision(1)),
    ],
    "a guard that failed though it held": [
        put(1, (1, 2), (1, 1)),
        look((3, 4), (1, 1, 1), op="put", expect=Revision(1), outcome="refused"),
    ],
    "a guard that failed on nothing though it held": [
        look((1, 2), None, op="put", expect=ABSENT, outcome="refused"),
    ],
    "a refusal that found the past": [
        put(1, (1, 2), (1, 1)),
        put(2, (3, 4), (2, 2)),
        look((5, 6), (1, 1, 1), op="put", expect=ABSENT, outcome="refused"),
    ],
    "a version that went on after a delete": [
        put(1, (1, 2), (1, 1)),
        look((3, 4), (1, 1, 1), op="delete", revision=2),
        put(2, (5, 6), (2, 3)),
    ],
    "revisions that go back": [put(1, (1, 2), (1, 5)), put(2, (3, 4), (2, 4))],
    "a delete that found nothing where something was": [
        put(1, (1, 2), (1, 1)),
        look((3, 4), None, op="delete"),
        look((5, 6), (1, 1, 1)),
    ],
}


@pytest.mark.parametrize("history", WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("check", [check_register, check_order])
def test_what_is_wrong_is_reported(history: list[Operation], check: Callable[[list[Operation]], str | None]) -> None:
    assert check(history) is not None


def test_an_explanation_shows_the_operations_that_cannot_be() -> None:
    history = [put(1, (1, 2), (1, 1)), put(2, (3, 4), (2, 2)), look((5, 6), (1, 1, 1))]

    assert check_register(history) == (
        "key 'a': no order of its 3 operations explains their replies. The longest that does:\n"
        "  writer put 'a' 1 [1, 2] -> left 1 (version 1, revision 1)\n"
        "  writer put 'a' 2 [3, 4] -> left 2 (version 2, revision 2)\n"
        "leaves 2 (version 2, revision 2), and then this must come:\n"
        "  reader get 'a' [5, 6] -> found 1 (version 1, revision 1)\n"
        "but there was 2 (version 2, revision 2)."
    )
    assert check_order(history) == (
        "stale: after\n"
        "  writer put 'a' 2 [3, 4] -> left 2 (version 2, revision 2)\n"
        "had returned with revision 2, this was called, and still saw what was before it:\n"
        "  reader get 'a' [5, 6] -> found 1 (version 1, revision 1)"
    )


def test_an_operation_tells_what_it_was() -> None:
    assert str(unanswered(3, expect=ABSENT)) == "loser delete 'a' expecting limpet.ABSENT [3, ?] -> unknown"
    assert str(look((3, 4), (1, 1, UNSEEN), op="delete", revision=2)) == (
        "reader delete 'a' [3, 4] -> found something (version 1, revision 1) and became revision 2"
    )
    assert str(look((3, 4), None, op="put", expect=Version(2), outcome="refused")) == (
        "reader put 'a' None expecting Version(number=2) [3, 4] -> refused, found nothing"
    )


# Unknown outcomes -------------------------------------------------------------


def test_what_is_unknown_may_have_happened() -> None:
    history = [put(1, (1, 2), (1, 1)), put(2, (3, None), cause="x"), look((5, 6), (2, 2, 2))]

    assert check_register(history) is None
    assert check_order(history, [event(1, value=1), event(2, value=2, version=2, cause="x")]) is None


def test_what_is_unknown_may_not_have_happened() -> None:
    history = [put(1, (1, 2), (1, 1)), put(2, (3, None), cause="x"), unanswered(4, cause="y"), look((5, 6), (1, 1, 1))]

    assert check_register(history) is None
    assert check_order(history, [event(1, value=1)]) is None


def test_what_is_unknown_may_have_happened_late() -> None:
    history = [
        put(1, (1, 2), (1, 1)),
        unanswered(3, cause="x"),
        look((5, 6), (1, 1, 1)),
        look((7, 8), None),
    ]

    assert check_register(history) is None
    assert check_order(history, [event(1, value=1), event(2, "delete", cause="x")]) is None


def test_what_is_unknown_has_not_happened_before_it_was_sent() -> None:
    history = [look((1, 2), (1, 1, 1)), put(1, (3, None), cause="x")]

    assert check_register(history) is not None
    found = check_order(history, [event(1, value=1, cause="x")])
    assert found is not None
    assert "saw the future" in found


def test_what_is_unknown_happened_at_most_once() -> None:
    history = [put(1, (1, 2), (1, 1)), put(2, (3, None), cause="x"), look((5, 6), (3, 3, 2))]

    assert check_register(history) is not None
    log = [event(1, value=1), event(2, value=2, version=2, cause="x"), event(3, value=2, version=3, cause="x")]
    found = check_order(history, log)
    assert found is not None
    assert "applied 2 times" in found


def test_what_is_unknown_keeps_its_guard() -> None:
    history = [put(1, (1, 2), (1, 1)), put(2, (3, None), expect=ABSENT, cause="x"), look((5, 6), (2, 2, 2))]

    assert check_register(history) is not None
    assert check_order(history, [event(1, value=1), event(2, value=2, version=2, cause="x")]) is not None


def test_a_revision_that_no_caller_got_fails_no_guard() -> None:
    """The position of an unknown write shows when it is read, and from then on it counts."""
    unknown = put(1, (1, None))
    right = [unknown, put(2, (3, 4), (2, 6), expect=Revision(5))]
    wrong = [unknown, look((2, 3), (1, 4, 1)), put(2, (4, 5), (2, 6), expect=Revision(5))]

    assert check_register(right) is None
    assert check_register(wrong) is not None


def test_a_search_without_end_is_given_up_and_reported() -> None:
    history = [put(number, (1, None)) for number in range(12)]
    history.append(look((2, 3), (13, 13, 99)))

    found = check_register(history, steps_max=10_000)

    assert found is not None
    assert "undecided" in found


def test_the_order_of_an_unknown_place_needs_a_cause_and_a_log() -> None:
    with pytest.raises(ValueError, match="needs a cause"):
        check_order([put(1, (1, None), cause="x")])
    with pytest.raises(ValueError, match="needs a cause"):
        check_order([put(1, (1, None))], [])


def test_the_order_of_a_read_needs_its_revision() -> None:
    with pytest.raises(ValueError, match="shows no revision"):
        check_order(
            [put(1, (1, 2), (1, 1)), Operation("c", "a", "get", 0, 3, None, None, None, 4, "done", KeyState(1))]
        )


# Several keys and batches, which only the order of the revisions can judge -----


def batch(*parts: Operation) -> list[Operation]:
    for part in parts:
        part.call, part.called = parts[0].call, parts[0].called
    return list(parts)


def test_a_batch_has_one_moment() -> None:
    both = batch(put(1, (1, 10), (1, 1)), put(2, (1, 10), (1, 2), key="b"))

    assert check_order([*both, look((2, 3), (1, 1, 1)), look((4, 5), (1, 2, 2), key="b")]) is None
    assert check_order([*both, look((2, 3), (1, 1, 1)), look((4, 5), None, key="b")]) is not None


def test_a_batch_stands_together() -> None:
    both = batch(put(1, (1, 10), (1, 1)), put(2, (1, 10), (1, 3), key="b"))

    found = check_order([*both, put(3, (2, 9), (1, 2), key="c")])

    assert found is not None
    assert "torn" in found


def test_half_a_batch_is_reported() -> None:
    both = batch(put(1, (1, None), cause="x"), put(2, (1, None), key="b", cause="x"))

    assert check_order(both, []) is None
    assert check_order(both, [event(1, value=1, cause="x"), event(2, value=2, key="b", cause="x")]) is None
    found = check_order(both, [event(1, value=1, cause="x")])
    assert found is not None
    assert "half a batch" in found


def test_a_batch_may_delete_what_is_not_there() -> None:
    both = batch(put(1, (3, 4), (1, 2)), look((3, 4), None, key="b", op="delete"))

    assert check_order(both) is None
    assert check_order([put(7, (1, 2), (1, 1), key="b"), *both]) is not None


def test_a_guard_on_another_key_is_held_against_the_state_before_the_batch() -> None:
    """Write skew: each of two batches expects what the other one changes."""
    first = batch(put(1, (1, 9), (1, 1)), look((1, 9), None, key="b", op="check", expect=ABSENT))
    second = batch(put(2, (2, 8), (1, 2), key="b"), look((2, 8), None, op="check", expect=ABSENT))

    assert check_order(first) is None
    found = check_order([*first, *second])
    assert found is not None
    assert "just before its commit" in found


def test_a_batch_of_guards_alone_is_an_observation() -> None:
    before = [put(1, (1, 2), (1, 1)), put(2, (3, 4), (2, 2))]

    assert check_order([*before, look((5, 6), None, op="check", expect=Revision(2))]) is None
    assert check_order([*before, look((5, 6), None, op="check", expect=PRESENT)]) is None
    assert check_order([*before, look((5, 6), None, op="check", expect=Revision(1))]) is not None
    assert check_order([*before, look((5, 6), None, op="check", expect=ABSENT)]) is not None
    assert check_register([*before, look((5, 6), None, op="check", expect=Revision(1))]) is not None


def test_revisions_order_the_writes_of_different_keys() -> None:
    history = [put(1, (1, 2), (1, 2)), put(2, (3, 4), (1, 1), key="b")]

    assert check_register(history) is None
    found = check_order(history)
    assert found is not None
    assert "out of order" in found


def test_two_writes_of_one_revision_are_reported() -> None:
    found = check_order([put(1, (1, 2), (1, 1)), put(2, (3, 4), (1, 1), key="b")])

    assert found is not None
    assert "two writes have revision 1" in found


def test_a_read_under_another_key_is_reported() -> None:
    found = check_order([put(1, (1, 2), (1, 1)), look((3, 4), (1, 1, 1), key="b")])

    assert found is not None
    assert "no client wrote there" in found


def test_reads_of_nothing_are_given_to_the_gap_that_fits() -> None:
    """A read of nothing beside three gaps: the order must not insist on one of them."""
    life = [
        put(1, (1, 2), (1, 1)),
        look((3, 20), (1, 1, 1), op="delete", revision=2),
        put(2, (4, 21), (1, 3)),
        look((5, 22), (1, 3, 2), op="delete", revision=4),
        put(3, (6, 23), (1, 5)),
    ]

    assert check_order([*life, look((7, 8), None), look((9, 10), None)]) is None
    assert check_order([*life, look((7, 8), (1, 3, 2)), look((9, 10), None), look((11, 12), (1, 5, 3))]) is None
    assert check_order([*life, look((7, 8), (1, 5, 3)), look((9, 10), None)]) is not None
    assert check_order([*life, look((7, 8), (1, 3, 2)), look((9, 10), None), look((11, 12), (1, 3, 2))]) is not None


def test_a_lost_write_is_missing_in_the_log() -> None:
    history = [put(1, (1, 2), (1, 1)), put(2, (3, 4), (2, 2))]

    found = check_order(history, [event(1, value=1)])

    assert found is not None
    assert "a lost write" in found


def test_a_lost_write_that_got_no_revision_is_missing_in_the_log() -> None:
    deleted = look((3, 4), (1, 1, 1), op="delete", cause="x")

    found = check_order([put(1, (1, 2), (1, 1)), deleted], [event(1, value=1)])

    assert found is not None
    assert "a lost write" in found


@pytest.mark.parametrize(
    ("log", "problem"),
    [
        ([event(1, value=1), event(2, value=2, version=2)], "no client requested revision 2"),
        ([event(1, "delete")], "is a delete of 'a'"),
        ([event(1, value=1, key="b")], "is a put of 'b'"),
        ([event(1, value=2)], "holds 2"),
        ([event(1, value=1, version=2)], "holds 1 (version 2"),
    ],
)
def test_the_log_holds_what_was_requested_and_nothing_else(log: list[Event], problem: str) -> None:
    found = check_order([put(1, (1, 2), (1, 1))], log)

    assert found is not None
    assert problem in found


# Watches ----------------------------------------------------------------------


def entry(value: object, version: int, revision: int, key: str = "a") -> Entry:
    return Entry(key, codec.encode_field(value), version, revision, 1, 0, 0)


LIFE = [
    put(1, (1, 2), (1, 2), cause="one"),
    put(2, (3, 4), (2, 4), cause="two"),
    look((5, 6), (2, 4, UNSEEN), op="delete", revision=5, cause="three"),
    put(3, (7, 8), (1, 7), cause="four"),
    *batch(put(4, (9, 10), (2, 8), cause="five"), put(5, (9, 10), (1, 9), key="b", cause="five")),
]
EVENTS = [
    event(2, value=1, cause="one"),
    event(4, value=2, version=2, cause="two"),
    event(5, "delete", version=2, cause="three"),
    event(7, value=3, cause="four"),
    event(8, value=4, version=2, commit=9, cause="five"),
    event(9, value=5, key="b", commit=9, cause="five"),
]
FINAL = {"a": entry(4, 2, 8), "b": entry(5, 1, 9, "b")}


def test_a_watch_that_is_right_passes() -> None:
    assert check_watch(EVENTS, LIFE, FINAL) is None


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        (EVENTS[:2] + EVENTS[1:], "delivered twice: revision 4"),
        ([EVENTS[1], EVENTS[0], *EVENTS[2:]], "out of order: revision 2 came after 4"),
        (EVENTS[:1] + EVENTS[2:], "a lost write, acknowledged at revision 4 and not delivered"),
        (EVENTS[:-1], "a lost write, acknowledged at revision 9 and not delivered"),
        ([event(1, value=9), *EVENTS], "no client requested revision 1"),
        ([event(2, value=7, cause="one"), *EVENTS[1:]], "holds 7"),
        ([*EVENTS[:4], event(8, value=4, version=2), *EVENTS[5:]], "with the wrong commit, 8"),
        ([*EVENTS[:3], event(7, value=3, commit=5), *EVENTS[4:]], "part of an earlier commit"),
        ([*EVENTS[:4], event(8, value=4, version=2, commit=10), EVENTS[5]], "torn"),
        ([*EVENTS, event(10, value=4, version=3, cause="five")], "applied 2 times"),
    ],
)
def test_a_watch_that_is_wrong_is_reported(events: list[Event], problem: str) -> None:
    found = check_watch(events, LIFE, FINAL)

    assert found is not None
    assert problem in found


def test_the_events_of_a_watch_add_up() -> None:
    unknown = [put(1, (1, None), cause="x"), put(2, (2, None), cause="y")]
    events = [event(1, value=1, cause="x"), event(2, value=2, version=3, cause="y")]

    found = check_watch(events, unknown, {"a": entry(2, 3, 2)})

    assert found is not None
    assert "that is 2" in found


@pytest.mark.parametrize("final", [{}, {**FINAL, "a": entry(3, 1, 7)}, {**FINAL, "c": entry(0, 1, 1, "c")}])
def test_the_events_of_a_watch_leave_what_there_is(final: dict[str, Entry]) -> None:
    found = check_watch(EVENTS, LIFE, final)

    assert found is not None
    assert "the events leave" in found


# The recorder -----------------------------------------------------------------


def test_the_recorder_notes_moments_that_are_never_equal() -> None:
    recorder = Recorder()
    first = recorder.call("c", "a", "put", 1, expect=ABSENT, cause="x")
    second = recorder.call("d", "a", "get")
    part = recorder.call("c", "b", "put", 2, part_of=first)
    lost = recorder.call("e", "a", "delete")
    gone = recorder.call("f", "a", "delete")
    recorder.note_success(first, made=KeyState(1, 7, 1))
    recorder.note_refusal(second, None)
    recorder.note_success(part, seen=KeyState(1), revision=8)
    recorder.forget(gone)

    assert recorder.operations == [first, second, part, lost]
    assert (first.called, second.called, part.called, first.call == part.call) == (1, 2, 1, True)
    assert (first.outcome, first.revision, first.made) == ("done", 7, KeyState(1, 7, 1))
    assert (second.outcome, second.seen, second.writes) == ("refused", None, False)
    assert (part.revision, part.seen, lost.outcome, lost.returned) == (8, KeyState(1), "unknown", None)
    moments = [op.called for op in (first, second, lost)] + [op.returned for op in (first, second, part)]
    assert len(set(moments)) == len(moments)


def test_what_an_entry_shows() -> None:
    shown = entry(5, 2, 9)

    assert KeyState.of(shown) == KeyState(2, 9, 5)
    assert KeyState.of(shown.without_value()) == KeyState(2, 9, UNSEEN)
    assert KeyState.of(None) is None


# Histories by chance ----------------------------------------------------------


class Simulated:
    """A store in one variable, used by clients whose calls, effects and returns come in any order.

    ``fault`` names what goes wrong, once, at the ``at``-th write that it can go wrong with.
    """

    def __init__(self, seed: int, *, fault: str = "", unknown: float = 0.0, calls: int = 50) -> None:
        self.dice = random.Random(seed)
        self.recorder = Recorder()
        self.state: dict[str, KeyState] = {}
        self.revision = 0
        self.log: list[Event] = []
        self.values = itertools.count(100)
        self.causes = itertools.count(1)
        self.fault = fault
        self.fault_at = self.dice.randrange(1, 4) if fault == "torn" else self.dice.randrange(3, 15)
        self.struck: Operation | None = None
        self.unknown = unknown
        self.answers: dict[int, tuple[str, list[KeyState | None], list[Any]]] = {}
        self._run(calls)

    @property
    def history(self) -> list[Operation]:
        return self.recorder.operations

    @property
    def final(self) -> dict[str, Entry | None]:
        return {key: entry(held.value, held.version or 0, held.revision or 0, key) for key, held in self.state.items()}

    def _run(self, calls: int) -> None:
        under_way: list[tuple[list[Operation], str]] = []
        late: list[list[Operation]] = []
        clients = [f"c{number}" for number in range(6)]
        while calls or under_way:
            self.dice.shuffle(clients)
            free = [client for client in clients if all(parts[0].client != client for parts, _ in under_way)]
            if calls and free and self.dice.random() < 0.4:
                calls -= 1
                under_way.append((self._ask(free[0]), "sent"))
            elif under_way:
                parts, stage = under_way.pop(self.dice.randrange(len(under_way)))
                if stage == "sent" and self.dice.random() < self.unknown:
                    self.dice.choice([lambda _: None, self._effect, late.append])(parts)
                elif stage == "sent":
                    under_way.append((self._effect(parts) or parts, "done"))
                else:
                    self._return(parts)
            if late and self.dice.random() < 0.1:
                self._effect(late.pop())
        for key in ("a", "b", "n"):
            get = self.recorder.call("last", key, "get")
            self.recorder.note_success(get, seen=self.state.get(key))

    def _ask(self, client: str) -> list[Operation]:
        call, dice = self.recorder.call, self.dice
        key, cause = dice.choice("aab"), f"r{next(self.causes)}"
        known = self.state.get(key)
        expected: list[Any] = [ABSENT, PRESENT]
        if known is not None:
            expected += [Revision(known.revision or 0), Version(known.version or 0)]
        expect = dice.choice(expected)
        match dice.randrange(9):
            case 0 | 1 | 2:
                return [call(client, key, "get")]
            case 3:
                return [call(client, key, "put", next(self.values), cause=cause)]
            case 4 | 5:
                return [call(client, key, "put", next(self.values), expect=expect, cause=cause)]
            case 6:
                return [call(client, key, "delete", cause=cause)]
            case 7:
                return [call(client, "n", "add", dice.randrange(1, 5), cause=cause)]
            case _:
                first = call(client, "a", "put", next(self.values), expect=expect if key == "a" else None, cause=cause)
                second = call(client, "b", "put", next(self.values), cause=cause, part_of=first)
                return [first, second]

    def _effect(self, parts: list[Operation]) -> list[Operation]:
        """Do it, and keep the answer on the operation until it returns."""
        found = [self.state.get(op.key) for op in parts]
        if not all(self._expected(op, held) for op, held in zip(parts, found, strict=True)):
            self.answers[parts[0].call] = "refused", [found[0]], [None]
            return parts
        strikes = self._strikes(parts)
        last = self.revision + len(parts)
        made: list[KeyState | None] = []
        for number, (op, held) in enumerate(zip(parts, found, strict=True)):
            if op.op == "get" or (op.op == "delete" and held is None):
                made.append(held)
                continue
            if strikes == "torn" and number == 1:
                made.append(KeyState(1 if held is None else (held.version or 0) + 1, self.revision + 1, op.argument))
                continue
            self.revision += 1
            value = op.argument if op.op == "put" else (0 if held is None else held.value) + (op.argument or 0)
            after = (
                None
                if op.op == "delete"
                else KeyState(1 if held is None else (held.version or 0) + 1, self.revision, value)
            )
            made.append(KeyState(held.version, self.revision, UNSEEN) if after is None and held is not None else after)
            if strikes == "lost":
                continue
            self._keep(op, after, last)
            if strikes == "twice" and after is not None:
                self.revision += 1
                again = value + op.argument if op.op == "add" else value
                self._keep(op, KeyState((after.version or 0) + 1, self.revision, again), self.revision)
        self.answers[parts[0].call] = "done", found, made
        return parts

    def _keep(self, op: Operation, after: KeyState | None, commit: int) -> None:
        before = self.state.pop(op.key, None)
        if after is None:
            assert before is not None
            self.log.append(
                event(self.revision, "delete", None, before.version or 0, key=op.key, commit=commit, cause=op.cause)
            )
            return
        self.state[op.key] = after
        self.log.append(
            event(self.revision, "put", after.value, after.version or 0, key=op.key, commit=commit, cause=op.cause)
        )

    def _expected(self, op: Operation, held: KeyState | None) -> bool:
        match op.expect:
            case None:
                return True
            case Version(number):
                return held is not None and held.version == number
            case Revision(number):
                return held is not None and held.revision == number
            case condition:
                return (condition is ABSENT) == (held is None)

    def _strikes(self, parts: list[Operation]) -> str | None:
        writes = any(op.op != "get" and not (op.op == "delete" and op.key not in self.state) for op in parts)
        if self.struck is not None or not writes:
            return None
        if (self.fault == "torn" and len(parts) < 2) or (self.fault == "twice" and parts[0].op == "delete"):
            return None
        self.fault_at -= 1
        if self.fault_at > 0:
            return None
        self.struck = parts[0]
        return self.fault

    def _return(self, parts: list[Operation]) -> None:
        outcome, found, made = self.answers[parts[0].call]
        if outcome == "refused":
            self.recorder.note_refusal(parts[0], found[0])
            for op in parts[1:]:
                self.recorder.forget(op)
            return
        for op, held, left in zip(parts, found, made, strict=True):
            if op.op == "get" or (op.op == "delete" and held is None):
                self.recorder.note_success(op, seen=held)
            elif op.op == "delete":
                self.recorder.note_success(op, seen=held, revision=left.revision)
            else:
                self.recorder.note_success(op, made=left)


SEEDS = range(120)


def test_no_right_history_is_called_wrong() -> None:
    for seed in range(300):
        made = Simulated(seed, unknown=0.05)
        judgements = (
            check_register(made.history),
            check_order(made.history, made.log),
            check_watch(made.log, made.history, made.final),
        )
        assert judgements == (None, None, None), seed


def test_no_right_history_is_called_wrong_without_a_log() -> None:
    for seed in range(300):
        made = Simulated(seed)
        assert check_order(made.history) is None, seed


def test_the_answers_need_not_tell_the_places() -> None:
    """`add`, `take` and `delete` answer with a value or a yes; the log knows the rest."""
    for seed in range(60):
        made = Simulated(seed, unknown=0.05)
        for op in made.history:
            if op.op == "add" and op.made is not None:
                op.made, op.revision = KeyState(value=op.made.value), None
            elif op.op == "delete" and op.seen is not None:
                op.seen, op.revision = KeyState(value=op.seen.value), None

        assert check_register(made.history) is None, seed
        assert check_order(made.history, made.log) is None, seed
        assert check_watch(made.log, made.history, made.final) is None, seed


@pytest.mark.parametrize("fault", ["lost", "twice"])
def test_every_planted_write_fault_is_caught(fault: str) -> None:
    planted = 0
    for seed in SEEDS:
        made = Simulated(seed, fault=fault)
        if made.struck is None:
            continue
        planted += 1
        assert check_register(made.history) is not None, seed
        assert check_order(made.history) is not None, seed
        assert check_order(made.history, made.log) is not None, seed
        assert check_watch(made.log, made.history, made.final) is not None, seed
    assert planted > 60


@pytest.mark.parametrize("fault", ["lost", "twice", "torn"])
def test_every_planted_write_fault_is_caught_among_unknowns(fault: str) -> None:
    planted = 0
    for seed in SEEDS:
        made = Simulated(seed, fault=fault, unknown=0.05)
        # A request without a reply may be lost: that is no fault.
        if made.struck is None or (made.struck.outcome == "unknown" and fault == "lost"):
            continue
        planted += 1
        assert check_order(made.history, made.log) is not None, seed
    assert planted > 60


def _turns(made: Simulated, key: str) -> list[Operation]:
    """The puts of a key that have a place, in order."""
    return sorted(
        (op for op in made.history if op.key == key and op.op == "put" and op.outcome == "done"),
        key=lambda op: op.revision or 0,
    )


def test_every_planted_stale_read_is_caught() -> None:
    planted = 0
    for seed in SEEDS:
        made = Simulated(seed)
        places = _turns(made, "a")
        choices = [
            (get, old)
            for get in made.history
            if get.key == "a" and get.op == "get"
            for old, new in itertools.pairwise(places)
            if new.returned is not None and new.returned < get.called
        ]
        if not choices:
            continue
        get, old = made.dice.choice(choices)
        get.seen = old.made
        planted += 1
        assert check_register(made.history) is not None, seed
        assert check_order(made.history, made.log) is not None, seed
    assert planted > 60


def test_every_planted_read_of_the_future_is_caught() -> None:
    planted = 0
    for seed in SEEDS:
        made = Simulated(seed)
        choices = [
            (get, coming)
            for get in made.history
            if get.key == "a" and get.op == "get"
            for coming in _turns(made, "a")
            if get.returned is not None and coming.called > get.returned
        ]
        if not choices:
            continue
        get, coming = made.dice.choice(choices)
        get.seen = coming.made
        planted += 1
        assert check_register(made.history) is not None, seed
        assert check_order(made.history, made.log) is not None, seed
    assert planted > 60


@pytest.mark.parametrize("fault", ["missing", "twice", "swapped", "changed"])
def test_every_planted_watch_fault_is_caught(fault: str) -> None:
    for seed in SEEDS:
        made = Simulated(seed, unknown=0.05)
        events = list(made.log)
        at = made.dice.randrange(len(events) - 1)
        match fault:
            case "missing":
                events.pop(at)
            case "twice":
                events.insert(made.dice.randrange(at + 1, len(events)), events[at])
            case "swapped":
                events[at], events[at + 1] = events[at + 1], events[at]
            case _:
                at = next(number for number, change in enumerate(events) if change.op == "put" and change.key != "n")
                shown = events[at].entry
                assert shown is not None
                events[at] = msgspec.structs.replace(events[at], entry=msgspec.structs.replace(shown, stored=b"7"))
        assert check_watch(events, made.history, made.final) is not None, seed


def test_long_histories_are_judged_by_their_order() -> None:
    made = Simulated(1, calls=5_000, unknown=0.02)

    assert len(made.history) > 5_000
    assert check_order(made.history, made.log) is None
    assert check_watch(made.log, made.history, made.final) is None
