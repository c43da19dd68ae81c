"""Values as a model sees them: members by their paths, long ones in parts, and what differs between two.

A path is a JSON Pointer (RFC 6901): ``/hotel/nights`` is the member ``nights`` of the member ``hotel``, ``/steps/0``
the first item of a list, and the empty path the whole value. In a change, ``/steps/-`` is the place behind the last
item.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from limpet.errors import InvalidValue
from limpet.merge import are_same
from limpet.model import ABSENT
from limpet.protocol.json import plain

__all__ = ["CHARS_MAX", "Part", "cut", "differences", "find", "pointer", "remove", "replace", "size_of"]

CHARS_MAX: Final = 16_000
"""How many characters of a value one answer holds, as JSON. A model pays for each of them."""
MEMBERS_MAX: Final = 100
"""How many members one outline has."""
NAMED_MAX: Final = 20
NAME_CHARS_MAX: Final = 500
"""How many members a message names, and with how many characters."""

_INDEX: Final = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)


class Part(msgspec.Struct, frozen=True):
    """What fits into an answer.

    Attributes:
        value: The value, or its part from the offset on.
        next_offset: Where the next part begins; UNSET after the last.
        members: In place of a value that is too long: its members by their paths, with their lengths.
    """

    value: Any = UNSET
    next_offset: int | UnsetType = UNSET
    members: dict[str, int] | UnsetType = UNSET


# Paths ------------------------------------------------------------------------


def pointer(names: Sequence[str]) -> str:
    """The path of a member, from its names."""
    return "".join("/" + name.replace("~", "~0").replace("/", "~1") for name in names)


def _names_of(path: str) -> list[str]:
    if not path:
        return []
    if not path.startswith("/"):
        raise InvalidValue(f"a path begins with a slash, such as '/plan/steps/0': write {'/' + path!r}")
    return [name.replace("~1", "/").replace("~0", "~") for name in path[1:].split("/")]


def find(value: Any, path: str) -> Any:
    """The member under a path, or an error that names those that are there."""
    for depth, name in enumerate(names := _names_of(path)):
        step = _step(value, name)
        if step is None:
            there = ", ".join(repr(pointer([*names[:depth], each])) for each in _members_of(value)[:NAMED_MAX])
            missing = pointer(names[: depth + 1])[:NAME_CHARS_MAX]
            raise InvalidValue(f"there is no {missing!r}: {there[:NAME_CHARS_MAX] or 'no members are'} there")
        value = value[step]
    return value


def replace(value: Any, path: str, new: Any) -> None:
    """Put a value under a path. The object or the list that holds it must be there."""
    holder, name = _holder(value, path)
    if isinstance(holder, list) and name == "-":
        holder.append(new)
    elif isinstance(holder, dict):
        holder[name] = new
    elif (step := _step(holder, name)) is not None:
        holder[step] = new
    else:
        raise InvalidValue(f"{path!r} has no place: put a value into an object, an item of a list, or behind it as '-'")


def remove(value: Any, path: str) -> None:
    """Remove a member that is there."""
    find(value, path)
    holder, name = _holder(value, path)
    del holder[_step(holder, name)]


def _holder(value: Any, path: str) -> tuple[Any, str]:
    names = _names_of(path)
    if not names:
        raise InvalidValue("the empty path is the whole value: use put to replace it, or delete to end it")
    return find(value, pointer(names[:-1])), names[-1]


def _step(value: Any, name: str) -> Any:
    """The key or the index by which a member is reached; None if there is no such member."""
    if isinstance(value, dict):
        return name if name in value else None
    is_item = isinstance(value, list) and _INDEX.fullmatch(name) is not None and int(name) < len(value)
    return int(name) if is_item else None


def _members_of(value: Any) -> Sequence[str]:
    """The names of all members."""
    return [*value] if isinstance(value, dict) else [*map(str, range(len(value)))] if isinstance(value, list) else []


def differences(one: Any, other: Any, names: tuple[str, ...] = ()) -> Iterator[str]:
    """The paths under which two values differ. A list is one value."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        if not are_same(one, other):
            yield pointer(names)
        return
    for name in {**one, **other}:
        yield from differences(one.get(name, ABSENT), other.get(name, ABSENT), (*names, name))


# Parts ------------------------------------------------------------------------


def size_of(value: Any) -> int:
    """How many characters a value has, as JSON."""
    return len(msgspec.json.encode(plain(value)).decode())


def cut(value: Any, *, path: str = "", offset: int = 0) -> Part:
    """The part of a value that fits into an answer. An offset counts characters of a text, items, or members."""
    if offset < 0 or (offset and not isinstance(value, str | list | dict)):
        raise InvalidValue("an offset is 0 or more, and only a text, a list and an object are read in parts")
    if not offset and size_of(value) <= CHARS_MAX:
        return Part(plain(value))
    if isinstance(value, str):
        end = offset + CHARS_MAX
        return Part(value[offset:end], end if end < len(value) else UNSET)
    if isinstance(value, list):
        return _cut_list(value, path, offset)
    if isinstance(value, dict):
        return _outline(value, path, offset)
    raise InvalidValue("raw bytes of this size are not for a model: read them by the command line or by HTTP")


def _outline(value: dict[str, Any], path: str, offset: int) -> Part:
    names = _members_of(value)
    end, size = offset, 0
    while end < len(names) and end - offset < MEMBERS_MAX and size <= CHARS_MAX:
        end, size = end + 1, size + len(names[end])
    members = {path + pointer([name]): size_of(value[name]) for name in names[offset:end]}
    return Part(members=members, next_offset=end if end < len(names) else UNSET)


def _cut_list(items: list[Any], path: str, offset: int) -> Part:
    end, size = offset, 0
    while end < len(items) and size + (more := size_of(items[end])) <= CHARS_MAX:
        end, size = end + 1, size + more
    if end == offset < len(items):
        # Not even one item fits: its path leads on.
        item, end = {f"{path}/{offset}": size_of(items[offset])}, end + 1
        return Part(next_offset=end if end < len(items) else UNSET, members=item)
    return Part(items[offset:end], end if end < len(items) else UNSET)
