"""Odd arguments: values that a caller may pass by mistake, and every call of a function with one of them."""

from __future__ import annotations

import enum
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from decimal import Decimal
from typing import Any, Final

import limpet
from limpet.model import Guard, HeldBy, Import, Put, Touch

__all__ = ["ODD", "Call", "calls", "format_argument"]


class Colour(str, enum.Enum):  # noqa: UP042 - its str() differs from its value
    RED = "red"


class Number(int):
    pass


class Odd:
    """A type that no function of Limpet knows."""


ODD: Final[list[object]] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2**53,
    2**63 - 1,
    2**63,
    2**70,
    10**30,
    -(2**70),
    1.5,
    -0.5,
    1e308,
    math.nan,
    math.inf,
    -math.inf,
    Decimal("1.5"),
    1j,
    Number(3),
    "",
    "x",
    "\0",
    "\ud800",
    "a\ud800*",
    "*",
    "9" * 5000,
    "x" * 2_000,
    "\U0010ffff",
    b"",
    b"x",
    bytearray(b"x"),
    memoryview(b"x"),
    [],
    ["x"],
    [1],
    [[]],
    (),
    ("a", "b"),
    {},
    {1: 2},
    {"\ud800": 1},
    {"a": b""},
    {"": 1},
    {"a": Odd()},
    set(),
    {1},
    Odd(),
    Odd,
    dict,
    len,
    Colour.RED,
    timedelta(seconds=-1),
    timedelta.max,
    limpet.ABSENT,
    limpet.PRESENT,
    limpet.KEEP,
    limpet.ANY,
    limpet.Version(1),
    limpet.Version(10**30),
    limpet.Version(-1),
    limpet.Version(True),
    limpet.Version(1.5),  # type: ignore[arg-type]
    limpet.Version("1"),  # type: ignore[arg-type]
    limpet.Revision(10**30),
    limpet.Revision(None),  # type: ignore[arg-type]
    limpet.Fence("lock", 1),
    limpet.Fence("lock", None),  # type: ignore[arg-type]
    limpet.Fence("lock", "1"),  # type: ignore[arg-type]
    limpet.Fence("lock", True),
    limpet.Fence("lock", 2**70),
    limpet.Fence("lock", -1),
    limpet.Fence("", 1),
    limpet.Fence(None, 1),  # type: ignore[arg-type]
    limpet.Fence("\ud800", 1),
    limpet.Fence("lock", 1, 5),  # type: ignore[arg-type]
    limpet.Entry("k", b"1", None, None, 1, 1, 1),  # type: ignore[arg-type]
    limpet.Entry("k", b"1", 1, 10**30, 1, 1, 1),
    limpet.field("a") == 1,
    limpet.field("a") > 1,
    limpet.field("a").in_([]),
    limpet.model.Filter(()),
    limpet.model.Filter((), ((),)),
    limpet.model.Filter((), ((limpet.model.Filter(()),) * 2,)),
    limpet.model.Filter((), ((1, 2),)),  # type: ignore[arg-type]
    limpet.model.Filter((limpet.model.Test("a", "exists", path=(1,)),)),  # type: ignore[arg-type]
    limpet.model.Filter((1,)),  # type: ignore[arg-type]
    limpet.model.Filter((limpet.model.Test("a", "lt"),)),
    limpet.model.Filter((limpet.model.Test("a", "eq", (None,)),)),  # type: ignore[arg-type]
    limpet.model.Filter((limpet.model.Test(None, "eq", (b"1",)),)),  # type: ignore[arg-type]
    limpet.model.Filter((limpet.model.Test("a", "odd", (b"1",)),)),  # type: ignore[arg-type]
    limpet.model.Equals(None),  # type: ignore[arg-type]
    limpet.model.Equals({"a": 1}),  # type: ignore[dict-item]
    limpet.equals(1),
    Put("k", b"1"),
    Put("k", b""),
    Put("k", b"\xff"),
    Put("k", {"a": b"\xff"}),
    Put("k", b"1", None, b"{\xff"),
    Put("k", 5),  # type: ignore[arg-type]
    Put(5, b"1"),  # type: ignore[arg-type]
    Put("k", b"1", "x"),  # type: ignore[arg-type]
    Put("k", b"1", 10**30),
    Put("k", b"1", 0),
    Put("k", b"1", None, "x"),  # type: ignore[arg-type]
    Put("k", b"1", family="odd"),  # type: ignore[arg-type]
    Put("k", {"a": 5}),  # type: ignore[dict-item]
    Touch("k", True),
    Import("k", b"1", version=0, created_ms=1, updated_ms=1),
    Import("k", b"1", version=2**53, created_ms=1, updated_ms=1),
    Import("k", b"1", version=True, created_ms=1, updated_ms=1),
    Import("k", b"1", version=1, created_ms=-1, updated_ms=1),
    Import("k", b"1", version=1, created_ms=1, updated_ms=1 << 50),
    Import("k", b"1", version=1, created_ms=1, updated_ms=1, expires_ms=0),
    Import("k", b"1", 5, version=1, created_ms=1, updated_ms=1),
    Import("k", b"1", meta_json=limpet.KEEP, version=1, created_ms=1, updated_ms=1),
    Guard("k", None),  # type: ignore[arg-type]
    Guard(5, limpet.ABSENT),  # type: ignore[arg-type]
    Guard("k", limpet.Version(10**30)),
    Guard("k", HeldBy(None), "lock"),  # type: ignore[arg-type]
    [Guard("k", HeldBy("x"), "lock")],  # type: ignore[arg-type]
    [Guard("k", limpet.ABSENT, "odd")],  # type: ignore[arg-type]
    [Guard("k", limpet.KEEP)],  # type: ignore[arg-type]
]

Call = tuple[str, object, inspect.BoundArguments]
"""The name of a parameter, its odd value, and all arguments."""


def calls(function: Callable[..., Any], good: Mapping[str, object], odd: list[object] = ODD) -> Iterator[Call]:
    """Every call of a function in which one argument is odd. Other required arguments are taken from ``good``."""
    signature = inspect.signature(function)
    parameters = [one for one in signature.parameters.values() if one.name != "self"]
    signature = signature.replace(parameters=parameters)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = {one.name: good[one.name] for one in parameters if one.default is one.empty and one.kind not in variadic}
    for one, item in itertools.product(parameters, odd):
        if one.kind is one.VAR_KEYWORD:
            continue
        given = {**needed, one.name: (item,) if one.kind is one.VAR_POSITIONAL else item}
        # BoundArguments passes positional arguments in the order of this dict.
        arguments = signature.bind_partial()
        arguments.arguments = {each.name: given[each.name] for each in parameters if each.name in given}
        yield one.name, item, arguments


def format_argument(item: object) -> str:
    """An odd value as text for a message."""
    text = ascii(item)
    return text if len(text) < 60 else text[:57] + "..."
