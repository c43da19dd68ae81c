"""What a caller has seen, and the merge of what two callers have made of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from limpet.adapters import seen as seeing
from limpet.adapters.seen import Seen, SeenKeys
from limpet.codec import encode_field
from limpet.merge import merge

OBJECTS = st.dictionaries(
    st.sampled_from("abc"),
    st.recursive(
        st.sampled_from([0, 1, True, 1.0, None, "x", [1]]),
        lambda inner: st.dictionaries(st.sampled_from("ab"), inner),
        max_leaves=6,
    ),
)


def later_wins(base: Any, mine: Any, theirs: Any) -> Any:
    return merge(base, mine, theirs, lambda clash: clash.mine)


# A busy machine is no reason to fail.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize(
    ("base", "mine", "theirs", "merged"),
    [
        ({}, {"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
        ({"a": 1}, {"a": 1}, {"a": 2}, {"a": 2}),
        ({"a": 1}, {"a": 3}, {"a": 2}, {"a": 3}),
        ({"a": 1, "b": 2}, {"b": 2}, {"a": 1, "b": 2, "c": 3}, {"b": 2, "c": 3}),
        ({"a": 1}, {}, {"a": 2}, {}),
        ({"a": 1}, {"a": 2}, {}, {"a": 2}),
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, {"b": 2}, {"b": 3}),
        ({"a": 1}, {"a": True}, {"a": 1}, {"a": True}),
        ({}, {"s": {"a": 1}}, {"s": {"b": 2}}, {"s": {"a": 1, "b": 2}}),
        ({"s": {"a": 1}}, {"s": {}}, {"s": {"a": 1, "b": 2}}, {"s": {"b": 2}}),
        ({"s": {"a": 1}}, {"s": {"a": 1, "c": 3}}, {"s": 5}, {"s": {"a": 1, "c": 3}}),
        ({"s": 5}, {"s": {"a": 1}}, {"s": {"b": 1}}, {"s": {"a": 1, "b": 1}}),
        ({"l": [1]}, {"l": [1, 2]}, {"l": [1, 3]}, {"l": [1, 2]}),
    ],
)
def test_what_each_changed_is_kept(base: Any, mine: Any, theirs: Any, merged: Any) -> None:
    assert encode_field(later_wins(base, mine, theirs)) == encode_field(merged)


@unhurried
@given(OBJECTS, OBJECTS)
def test_a_merge_with_no_change_of_others_is_what_was_put(base: Any, mine: Any) -> None:
    assert encode_field(later_wins(base, mine, base)) == encode_field(mine)


@unhurried
@given(OBJECTS, OBJECTS)
def test_a_merge_of_no_change_is_what_others_put(base: Any, theirs: Any) -> None:
    assert encode_field(later_wins(base, base, theirs)) == encode_field(theirs)


@unhurried
@given(OBJECTS, OBJECTS, OBJECTS)
def test_no_member_that_only_others_made_is_lost(base: Any, mine: Any, theirs: Any) -> None:
    assert (theirs.keys() - base.keys()) | (mine.keys() - base.keys()) <= later_wins(base, mine, theirs).keys()


async def test_a_task_sees_what_its_starter_saw_and_not_what_its_siblings_see() -> None:
    seen = SeenKeys()
    seen.note("k", Seen(b"{}", 1))

    async def sibling(revision: int) -> Seen | None:
        before = seen.get("k")
        seen.note("k", Seen(b"{}", revision))
        await asyncio.sleep(0)
        assert seen.get("k") == Seen(b"{}", revision)
        return before

    assert [*await asyncio.gather(sibling(2), sibling(3))] == [Seen(b"{}", 1)] * 2
    assert seen.get("k") == Seen(b"{}", 1)


async def test_what_a_task_remembers_is_bounded() -> None:
    seen, other = SeenKeys(), SeenKeys()
    for number in range(100):
        seen.note(f"k{number}", Seen(b"{}", number))
    assert seen.get("k0") is None
    assert seen.get("k99") is not None
    assert len(seeing._seen.get()) == seeing.SEEN_MAX

    other.note("large", Seen(b"x" * seeing.SEEN_BYTES_MAX, 1))
    other.note("larger", Seen(b"x" * (seeing.SEEN_BYTES_MAX + 1), 1))
    assert list(seeing._seen.get()) == [(other._number, "larger")]
