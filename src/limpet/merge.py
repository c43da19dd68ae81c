"""Merging three versions of a value: the one both began with, mine, and theirs.

Objects and records are merged member by member, at every depth. Anything else is one value, a list too: no rule can say
which part of a list was meant. A member that one side has changed, added or removed is taken from that side. A member
that both have changed to different values is a clash, which the caller decides.

Values are as a store returns them. ABSENT stands for no such member, and for no such key.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec

from limpet.model import ABSENT

__all__ = ["Clash", "are_same", "merge"]


class Clash(msgspec.Struct, frozen=True):
    """A member that two writers have changed to different values.

    Attributes:
        path: The names of the members from the top down; empty for the whole value.
        base: What it was when the edit began; ABSENT where there was no such member.
        mine: What the edit has made of it; ABSENT where it was removed.
        theirs: What another writer has made of it; ABSENT where it was removed.
    """

    path: tuple[str, ...]
    base: Any
    mine: Any
    theirs: Any


def merge(base: Any, mine: Any, theirs: Any, decide: Callable[[Clash], Any], path: tuple[str, ...] = ()) -> Any:
    """Merge what two writers have made of a value. ``decide`` returns what to keep of a clash."""
    if are_same(theirs, base) or are_same(mine, theirs):
        return mine
    if are_same(mine, base):
        return theirs
    if not isinstance(mine, dict) or type(mine) is not type(theirs):
        return decide(Clash(path, base, mine, theirs))
    before = base if type(base) is type(mine) else {}
    merged = type(mine)()
    for name in {**theirs, **mine}:
        base_item, my_item, their_item = (each.get(name, ABSENT) for each in (before, mine, theirs))
        kept = merge(base_item, my_item, their_item, decide, (*path, name))
        if kept is not ABSENT:
            merged[name] = kept
    return merged


def are_same(one: Any, other: Any) -> bool:
    """Whether two values have the same encoding: 1, 1.0 and true are three values, and -0.0 is not 0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_same(item, other[name]) for name, item in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(are_same, one, other))
    if isinstance(one, float):
        return one == other and math.copysign(1, one) == math.copysign(1, other)
    return bool(one == other)
