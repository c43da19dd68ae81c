"""The merge of three versions, by example and by property."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import limpet
from limpet import codec
from limpet.merge import Clash, are_same, merge
from limpet.model import ABSENT

NAMES = st.sampled_from(["a", "b", "c"])
SCALARS = st.sampled_from([None, True, False, 0, 1, 1.0, 0.0, -0.0, "", "x"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=8,
)
OBJECTS = st.dictionaries(NAMES, VALUES, max_size=3)
WHOLES = st.one_of(st.just(ABSENT), VALUES, OBJECTS)

Path = tuple[str, ...]


def refuse(clash: Clash) -> Any:
    raise AssertionError(f"a clash at {clash.path}")


def merged(base: Any, mine: Any, theirs: Any) -> tuple[Any, list[Clash]]:
    """The merge where each clash is kept as it was, and the clashes."""
    clashes: list[Clash] = []

    def note(clash: Clash) -> Any:
        clashes.append(clash)
        return clash.base

    return merge(base, mine, theirs, note), clashes


def at(value: Any, path: Path) -> Any:
    """What is at a path; ABSENT where there is nothing."""
    for name in path:
        value = value.get(name, ABSENT) if isinstance(value, dict) else ABSENT
    return value


def paths(value: Any, path: Path = ()) -> set[Path]:
    inner = value.items() if isinstance(value, dict) else ()
    return {path}.union(*(paths(item, (*path, name)) for name, item in inner))


# By example -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "mine", "theirs", "wanted"),
    [
        ({"a": 1, "b": 1}, {"a": 2, "b": 1}, {"a": 1, "b": 3}, {"a": 2, "b": 3}),
        ({"a": 1}, {"a": 1, "b": 2}, {"a": 1, "c": 3}, {"a": 1, "b": 2, "c": 3}),
        ({"a": 1, "b": 1}, {"a": 1}, {"a": 2, "b": 1}, {"a": 2}),
        ({"a": 1, "b": 1}, {"a": 1}, {"b": 1}, {}),
        ({"d": {"x": 1, "y": 1}}, {"d": {"x": 2, "y": 1}}, {"d": {"x": 1, "y": 3}}, {"d": {"x": 2, "y": 3}}),
        ({}, {"d": {"x": 1}}, {"d": {"y": 2}}, {"d": {"x": 1, "y": 2}}),
        (ABSENT, {"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
        ({"a": [1]}, {"a": [1, 2]}, {"a": [1]}, {"a": [1, 2]}),
        ({"a": [1]}, {"a": [1, 2]}, {"a": [1, 2]}, {"a": [1, 2]}),
        ({"a": 1}, {"a": 2}, {"a": 2}, {"a": 2}),
        ({"a": 1}, {"a": 1}, ABSENT, ABSENT),
        ({"a": 1}, {"a": 1}, [1], [1]),
        ({"a": 1}, {"a": 1.0}, {"a": 1}, {"a": 1.0}),
    ],
)
def test_what_one_side_changed_is_kept(base: Any, mine: Any, theirs: Any, wanted: Any) -> None:
    assert are_same(merge(base, mine, theirs, refuse), wanted)


@pytest.mark.parametrize(
    ("base", "mine", "theirs", "clash"),
    [
        ({"a": 1}, {"a": 2}, {"a": 3}, Clash(("a",), 1, 2, 3)),
        ({"a": 1}, {"a": 1.0}, {"a": True}, Clash(("a",), 1, 1.0, True)),
        ({"a": 1}, {}, {"a": 3}, Clash(("a",), 1, ABSENT, 3)),
        ({"a": 1}, {"a": 2}, {}, Clash(("a",), 1, 2, ABSENT)),
        ({}, {"a": 2}, {"a": 3}, Clash(("a",), ABSENT, 2, 3)),
        ({"d": {"x": 1}}, {"d": {"x": 2}}, {"d": {"x": 3}}, Clash(("d", "x"), 1, 2, 3)),
        ({"d": {"x": 1}}, {"d": {"x": 2}}, {}, Clash(("d",), {"x": 1}, {"x": 2}, ABSENT)),
        ({"d": {"x": 1}}, {"d": {"x": 2}}, {"d": 5}, Clash(("d",), {"x": 1}, {"x": 2}, 5)),
        ({"a": [1]}, {"a": [1, 2]}, {"a": [0, 1]}, Clash(("a",), [1], [1, 2], [0, 1])),
        ({"a": 1}, {"a": 2}, ABSENT, Clash((), {"a": 1}, {"a": 2}, ABSENT)),
        ({"a": 1}, {"a": 2}, None, Clash((), {"a": 1}, {"a": 2}, None)),
        ({"a": 1}, {"a": 1, "b": 1}, limpet.Fields(a=1), Clash((), {"a": 1}, {"a": 1, "b": 1}, limpet.Fields(a=1))),
    ],
)
def test_a_member_that_both_changed_is_a_clash(base: Any, mine: Any, theirs: Any, clash: Clash) -> None:
    assert merged(base, mine, theirs)[1] == [clash]
    kept = object()
    assert at(merge(base, mine, theirs, lambda _: kept), clash.path) is kept


def test_a_clash_may_be_decided_as_no_member() -> None:
    assert merge({"a": 1, "b": 1}, {"a": 2, "b": 1}, {"a": 3, "b": 1}, lambda _: ABSENT) == {"b": 1}


def test_a_merged_record_is_a_record() -> None:
    made = merge(limpet.Fields(a=b"1"), limpet.Fields(a=b"1", b=1), limpet.Fields(a=b"2"), refuse)

    assert (type(made), made) == (limpet.Fields, {"a": b"2", "b": 1})


# By property ----------------------------------------------------------------------


@given(WHOLES, WHOLES)
def test_a_merge_with_what_only_one_side_changed_is_mine(base: Any, mine: Any) -> None:
    """Where only one side has changed anything, the result is that side."""
    assert are_same(merge(base, mine, base, refuse), mine)
    assert are_same(merge(base, base, mine, refuse), mine)
    assert are_same(merge(base, mine, mine, refuse), mine)


@given(WHOLES, WHOLES, WHOLES)
@settings(max_examples=500)
def test_a_merge_is_symmetric(base: Any, mine: Any, theirs: Any) -> None:
    ours, clashes = merged(base, mine, theirs)
    others, mirrored = merged(base, theirs, mine)

    assert are_same(ours, others)
    turned = {clash.path: Clash(clash.path, clash.base, clash.theirs, clash.mine) for clash in mirrored}
    assert clashes == [turned[clash.path] for clash in clashes]
    assert len(turned) == len(clashes)


@given(st.one_of(st.just(ABSENT), OBJECTS), OBJECTS, OBJECTS)
@settings(max_examples=1_000)
def test_no_member_that_one_side_changed_is_lost(base: Any, mine: Any, theirs: Any) -> None:
    """Outside of clashes, each path has what the side has there that changed it; both, where neither did."""
    result, clashes = merged(base, mine, theirs)
    clashed = [clash.path for clash in clashes]

    for path in paths(base) | paths(mine) | paths(theirs):
        if any(path[: len(each)] == each or each[: len(path)] == path for each in clashed):
            continue
        before, my_item, their_item = at(base, path), at(mine, path), at(theirs, path)
        if are_same(their_item, before):
            assert are_same(at(result, path), my_item)
        elif are_same(my_item, before):
            assert are_same(at(result, path), their_item)


@given(WHOLES, WHOLES, WHOLES)
@settings(max_examples=500)
def test_a_clash_is_a_member_that_both_changed_to_different_values(base: Any, mine: Any, theirs: Any) -> None:
    for clash in merged(base, mine, theirs)[1]:
        assert are_same(clash.mine, at(mine, clash.path))
        assert are_same(clash.theirs, at(theirs, clash.path))
        assert not are_same(clash.mine, clash.theirs)
        assert not are_same(clash.mine, clash.base)
        assert not are_same(clash.theirs, clash.base)
        # Two objects are merged, never a clash.
        assert not (isinstance(clash.mine, dict) and isinstance(clash.theirs, dict))


@given(VALUES, VALUES)
def test_values_are_the_same_where_their_encodings_are(one: Any, other: Any) -> None:
    assert are_same(one, other) == (codec.encode(one) == codec.encode(other))
