"""Python values as bytes, and back.

A stored value describes itself. JSON is its canonical text: compact, members sorted,
UTF-8. Raw bytes are a zero byte, which no JSON text starts with, and then the bytes.
A record is a mapping from field names to either. Two values are equal in a guard
exactly when their stored forms are equal, so 1, 1.0 and true are three different values.

msgspec would silently turn NaN into null, sets into lists and datetimes into strings.
`encode` refuses all of that first, naming the path, before anything leaves the process.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

import msgspec

from limpet.errors import Corrupt, InvalidValue
from limpet.keys import check_key

__all__ = ["Fields", "Kind", "Stored", "decode", "encode", "encode_field", "kind_of", "member", "size_bytes"]

Stored = bytes | Mapping[str, bytes]
"""A value at rest: one encoded value, or a record's encoded fields."""

Kind = Literal["json", "bytes", "record"]

DEPTH_MAX: Final = 128
INT_MIN: Final = -(2**63)
INT_MAX: Final = 2**63 - 1
_INF: Final = math.inf

_encode_into = msgspec.json.Encoder(order="sorted").encode_into
_decode_json = msgspec.json.Decoder().decode
_split_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode

# JSON scalars that need no further check.
_PLAIN: Final = frozenset({str, bool, type(None)})
_RAW: Final = frozenset({bytes, bytearray, memoryview})


_SPARE_BYTES_MAX: Final = 65_536
_spare: list[bytearray] = []


def _encode_json(value: object) -> bytes:
    """Encode as canonical JSON, in bytes of exactly that size.

    Bytes that msgspec returns keep the buffer they were written in, which is half as large
    again, for as long as they live. So it writes into buffers that are reused.
    """
    try:
        buffer = _spare.pop()
    except IndexError:
        buffer = bytearray()
    _encode_into(value, buffer)
    encoded = bytes(buffer)
    if len(encoded) <= _SPARE_BYTES_MAX:
        _spare.append(buffer)
    return encoded


class Fields(dict[str, Any]):
    """A record's fields. As a value to `put` it makes a record; reading a record gives one."""

    def __repr__(self) -> str:
        return f"Fields({super().__repr__()})"


def encode(value: object) -> Stored:
    """Encode a value. Raises `InvalidValue` with the path of the part that cannot be stored."""
    if isinstance(value, Fields):
        return {check_key(name): encode_field(item, name) for name, item in value.items()}
    return encode_field(value)


def encode_field(value: object, name: str | None = None) -> bytes:
    """Encode a JSON value or raw bytes."""
    if _is_json(value, 1):
        try:
            return _encode_json(value)
        except UnicodeEncodeError:
            raise _refusal(value, name) from None
    if type(value) in _RAW:
        return b"\0" + bytes(value)  # type: ignore[call-overload, no-any-return]
    raise _refusal(value, name)


def decode(stored: Stored) -> Any:
    """Decode to a fresh Python value: never an object that the store or another caller holds."""
    if not isinstance(stored, bytes):
        return Fields((name, decode(item)) for name, item in stored.items())
    if stored and stored[0] == 0:
        return stored[1:]
    try:
        return _decode_json(stored)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt("a stored value is not JSON") from error


def kind_of(stored: Stored) -> Kind:
    """Whether this is a JSON value, raw bytes or a record."""
    if not isinstance(stored, bytes):
        return "record"
    return "bytes" if stored[0] == 0 else "json"


def size_bytes(stored: Stored) -> int:
    """Return the size that the limits count: the encoding; for a record, its names and encoded fields."""
    if not isinstance(stored, bytes):
        return sum(len(name.encode()) + size_bytes(item) for name, item in stored.items())
    return len(stored) - 1 if stored[0] == 0 else len(stored)


def member(stored: Stored, name: str) -> bytes | None:
    """Get one field of a record, or one top-level member of a JSON object; None when it is absent."""
    if not isinstance(stored, bytes):
        return stored.get(name)
    if stored[:1] != b"{":
        return None
    try:
        found = _split_members(stored).get(name)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt("a stored value is not JSON") from error
    return None if found is None else bytes(found)


def counter(stored: Stored) -> int | None:
    """Read the integer of a counter; None when the value is not an integer."""
    if not isinstance(stored, bytes) or not stored.lstrip(b"-").isdigit():
        return None
    return int(stored)


DIGITS_MAX: Final = 200
_DECIMAL: Final = re.compile(rb"-?[0-9]{1,%d}\Z" % DIGITS_MAX)


def number(field: bytes) -> int | float | None:
    """Read an encoded field as a number: a JSON number, or raw bytes of decimal digits. None for anything else."""
    if field[:1] == b"\0":
        return int(field[1:]) if _DECIMAL.match(field, 1) else None
    value = decode(field)
    return value if type(value) in (int, float) else None


def _is_json(value: Any, depth: int) -> bool:
    """Whether this is JSON and nothing that only resembles it. Kept minimal, because it runs on every value put."""
    kind = type(value)
    if kind is dict:
        if depth > DEPTH_MAX:
            return False
        for name, item in value.items():
            if type(name) is not str:
                return False
            kind = type(item)
            # Most members pass here, without a call.
            if kind in _PLAIN or (kind is int and INT_MIN <= item <= INT_MAX):
                continue
            if not _is_json(item, depth + 1):
                return False
        return True
    if kind is list or kind is tuple:
        if depth > DEPTH_MAX:
            return False
        for item in value:  # noqa: SIM110 - all() over a generator takes twice as long
            if type(item) not in _PLAIN and not _is_json(item, depth + 1):
                return False
        return True
    if kind is float:
        return bool(-_INF < value < _INF)
    return kind in _PLAIN or (kind is int and INT_MIN <= value <= INT_MAX)


# A refused value is walked a second time, to find where and why.


def _refusal(value: object, name: str | None) -> InvalidValue:
    steps, problem = _find_fault(value, 1)
    path = "$" + "".join([f".{_printable(name)}"] * (name is not None) + steps)
    if len(path) > 80:
        path = f"{path[:38]}...{path[-38:]}"
    return InvalidValue(problem, path=path)


def _find_fault(value: Any, depth: int) -> tuple[list[str], str]:
    """Find the first part of a value that cannot be stored: the path to it, and what is wrong with it."""
    kind = type(value)
    if kind in (dict, list, tuple) and depth > DEPTH_MAX:
        return [], f"nested deeper than {DEPTH_MAX}"
    members: Iterable[tuple[str, Any]] = ()
    if kind is dict:
        for name in value:
            if type(name) is not str:
                return [], f"a member name is of type {type(name).__name__}, not str"
            if not _is_utf8(name):
                return [], f"a member name {_SURROGATE}"
        members = ((f".{_printable(name)}", item) for name, item in value.items())
    elif kind is list or kind is tuple:
        members = ((f"[{index}]", item) for index, item in enumerate(value))
    elif kind is int:
        return [], "an integer is outside -2^63 to 2^63-1"
    elif kind is float:
        return [], "a float is not finite, which JSON cannot hold"
    elif kind is str:
        return [], f"a string {_SURROGATE}"
    else:
        advice = "raw bytes stand alone or as a field" if kind in _RAW else "convert it first"
        return [], f"a value of type {kind.__name__} is not JSON ({advice})"
    step, item = next((step, item) for step, item in members if not (_is_json(item, depth + 1) and _is_utf8(item)))
    steps, problem = _find_fault(item, depth + 1)
    return [step, *steps], problem


_SURROGATE: Final = "holds a lone surrogate, which UTF-8 cannot carry"


def _is_utf8(value: Any) -> bool:
    try:
        _encode_json(value)
    except UnicodeEncodeError:
        return False
    return True


def _printable(name: object) -> str:
    """Format a member's name for a message, whatever characters it holds."""
    text = str(name)
    return text if text.isprintable() else ascii(text)[1:-1]
