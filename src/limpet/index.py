"""What an index on a field can find.

An index narrows a scan down and never decides: every entry it finds is still tested against the filter. So it may find
too much, but it must not miss an entry that matches. It knows a field by a number or by a text. JSON numbers are
numbers, and so are raw bytes of decimal digits; JSON strings and other raw bytes are texts; anything else is not in the
index.
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

__all__ = ["CANDIDATES_MAX", "IndexProbe", "check_field", "make_probes"]

CANDIDATES_MAX: Final = 50_000
"""With more candidates than this an index does not help, and the scan reads every entry."""

_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]+\Z')


class IndexProbe(msgspec.Struct, frozen=True):
    """One search in an index.

    Attributes:
        name: The indexed field.
        low: The smallest number to find.
        high: The largest number to find; below ``low`` when no number is wanted.
        texts: The texts to find.
        all_texts: Whether to find every text, whatever ``texts`` holds.
    """

    name: str
    low: float = math.inf
    high: float = -math.inf
    texts: tuple[bytes, ...] = ()
    all_texts: bool = False

    @property
    def has_numbers(self) -> bool:
        """Whether any number can be found."""
        return self.low <= self.high


def check_field(name: str) -> str:
    """Return the name of a field that can have an index, or raise `InvalidKey`."""
    name = check_key(name)
    if not _PLAIN.match(name):
        raise InvalidKey(name, "the name of an indexed field holds no quotation mark, backslash or control character")
    return name


def make_probes(where: Filter) -> list[IndexProbe]:
    """Turn a filter into probes, each of which finds every match. Tests that no index can serve are left out."""
    return [probe for test in where.tests if (probe := _make_probe(test)) is not None]


def _make_probe(test: Test) -> IndexProbe | None:
    if not _PLAIN.match(test.name) or test.path:
        return None
    if test.comparison in ("lt", "le", "gt", "ge") and test.operands[0][:1] == b"\0" and not test.raw:
        # Raw bytes are ordered by their bytes, digits included; the index would order digits as numbers.
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
            # One range over all numbers: an index that finds too much is still right.
            low, high = (_round_down(min(numbers)), _round_up(max(numbers))) if numbers else (math.inf, -math.inf)
            return IndexProbe(test.name, low, high, tuple(texts))
        case "lt" | "le" if numbers:
            return IndexProbe(test.name, -math.inf, _round_up(numbers[0]), all_texts=test.raw)
        case "gt" | "ge" if numbers:
            return IndexProbe(test.name, _round_down(numbers[0]), math.inf, all_texts=test.raw)
        case _:
            return None


# A bound is a double, one step wider than the number, because a large integer may not be exact as a double.


def _round_down(number: float) -> float:
    return math.nextafter(_to_double(number), -math.inf)


def _round_up(number: float) -> float:
    return math.nextafter(_to_double(number), math.inf)


def _to_double(number: float) -> float:
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
