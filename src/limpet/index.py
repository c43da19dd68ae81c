"""What an index on a field can look for.

An index helps a scan to find its entries and never decides: every entry it finds is held against
the filter like any other. So it may find too much, but nothing that matches may be missing. It
knows a field by a number or by a text. JSON numbers are numbers, and so are raw bytes of decimal
digits; JSON strings and other raw bytes are texts; anything else is not in it.
"""

from __future__ import annotations

import math
import re
from typing import Final

import msgspec

from limpet import codec
from limpet.errors import InvalidKey
from limpet.keys import check_key
from limpet.model import Filter, Test

__all__ = ["CANDIDATES_MAX", "IndexProbe", "check_field", "sought"]

CANDIDATES_MAX: Final = 50_000
"""With more than so many candidates, an index is no help: a scan then reads through."""

_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]+\Z')


class IndexProbe(msgspec.Struct, frozen=True):
    """A part of an index: numbers from ``low`` to ``high``, these texts, and all texts where ``odd``."""

    name: str
    low: float = math.inf
    high: float = -math.inf
    texts: tuple[bytes, ...] = ()
    odd: bool = False

    @property
    def has_numbers(self) -> bool:
        """Whether any number can be in it."""
        return self.low <= self.high


def check_field(name: str) -> str:
    """The name of a field that can have an index."""
    name = check_key(name)
    if not _PLAIN.match(name):
        raise InvalidKey(name, "the name of an indexed field holds no quotation mark, backslash or control character")
    return name


def sought(where: Filter) -> list[IndexProbe]:
    """What to look for in an index of each field; each finds all that match. Tests that no index helps are left out."""
    return [found for test in where.tests if (found := _sought(test)) is not None]


def _sought(test: Test) -> IndexProbe | None:
    if not _PLAIN.match(test.name):
        return None
    if test.comparison in ("lt", "le", "gt", "ge") and test.operands[0][:1] == b"\0" and not test.raw:
        # Bytes alone are ordered by their bytes, also those of digits.
        return None
    numbers, texts = [], []
    for operand in test.operands:
        number = codec.number(operand)
        if number is not None:
            numbers.append(number)
        elif operand[:1] in (b"\0", b'"') and not (test.raw and _is_json(operand[1:])):
            texts.append(operand)
        else:
            return None
    match test.comparison:
        case "eq" | "in":
            # One range over all of them: an index that finds too much is still right.
            low, high = (_below(min(numbers)), _above(max(numbers))) if numbers else (math.inf, -math.inf)
            return IndexProbe(test.name, low, high, tuple(texts))
        case "lt" | "le" if numbers:
            return IndexProbe(test.name, -math.inf, _above(numbers[0]), odd=test.raw)
        case "gt" | "ge" if numbers:
            return IndexProbe(test.name, _below(numbers[0]), math.inf, odd=test.raw)
        case _:
            return None


# A bound is in double precision, one step wider: an integer may be lost in it.


def _below(number: float) -> float:
    return math.nextafter(_double(number), -math.inf)


def _above(number: float) -> float:
    return math.nextafter(_double(number), math.inf)


def _double(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _is_json(text: bytes) -> bool:
    """Whether a JSON field could have this text."""
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True
