"""Python values as bytes, and back.

What is stored describes itself. JSON is its canonical text: compact, members sorted,
UTF-8. Raw bytes are a zero byte, which no JSON text starts with, and then the bytes.
A record is a mapping from field names to either. Two values are equal in a guard
exactly when what is stored is equal, so 1, 1.0 and true are three different values.

The encoder below would silently turn NaN into null, sets into lists and datetimes into
strings. `encode` refuses all of that first, by path, before anything leaves the process.
"""

from __future__ import annotations

import math
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

_encode_json = msgspec.json.Encoder(order="sorted").encode
_decode_json = msgspec.json.Decoder().decode
_split_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode

# Every JSON scalar that needs no further look.
_PLAIN: Final = frozenset({str, bool, type(None)})
_RAW: Final = frozenset({bytes, bytearray, memoryview})


class Fields(dict[str, Any]):
    """A record's fields. As a value to `put` it makes a record; reading a record gives one."""

    def __repr__(self) -> str:
        return f"Fields({super().__repr__()})"


def encode(value: object) -> Stored:
    """The stored form of a value. Raises `InvalidValue` naming the path of what cannot be stored."""
    if isinstance(value, Fields):
        return {check_key(name): encode_field(item, name) for name, item in value.items()}
    return encode_field(value)


def encode_field(value: object, name: str | None = None) -> bytes:
    """The stored form of a JSON value or of raw bytes."""
    if type(value) in _RAW:
        return b"\0" + bytes(value)  # type: ignore[call-overload, no-any-return]
    try:
        _check(value, 1)
        return _encode_json(value)
    except _Fault as fault:
        raise _refuse(fault, name) from None
    except UnicodeEncodeError:
        raise _refuse(_surrogate(value), name) from None


def decode(stored: Stored) -> Any:
    """A fresh Python value: never an object that the store or another caller holds."""
    if not isinstance(stored, bytes):
        return Fields((name, decode(item)) for name, item in stored.items())
    if stored[:1] == b"\0":
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
    """What counts against the limits: the encoding; for a record, its names and encoded fields."""
    if not isinstance(stored, bytes):
        return sum(len(name.encode()) + size_bytes(item) for name, item in stored.items())
    return len(stored) - 1 if stored[0] == 0 else len(stored)


def member(stored: Stored, name: str) -> bytes | None:
    """One field of a record, or one top-level member of a JSON object. None when there is none."""
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
    """The integer that a counter holds, or None when this is not one."""
    if not isinstance(stored, bytes) or not stored.lstrip(b"-").isdigit():
        return None
    return int(stored)


class _Fault(Exception):
    """Why a value cannot be stored. Collects its path on the way out, so that good values pay nothing."""

    def __init__(self, problem: str) -> None:
        self.problem = problem
        self.steps: list[str] = []


def _check(value: Any, depth: int) -> None:
    """Refuse what JSON cannot hold, by raising `_Fault`."""
    kind = type(value)
    if kind is dict:
        for name in value:
            if type(name) is not str:
                raise _Fault(f"a member name is of type {type(name).__name__}, not str")
        _check_items(value.items(), ".{}", depth)
    elif kind is list or kind is tuple:
        _check_items(enumerate(value), "[{}]", depth)
    elif kind is int:
        if not INT_MIN <= value <= INT_MAX:
            raise _Fault("an integer is outside -2^63 to 2^63-1")
    elif kind is float:
        if not math.isfinite(value):
            raise _Fault("a float is not finite, which JSON cannot hold")
    elif kind not in _PLAIN:
        advice = "raw bytes stand alone or as a field" if kind in _RAW else "convert it first"
        raise _Fault(f"a value of type {kind.__name__} is not JSON ({advice})")


def _check_items(items: Iterable[tuple[Any, Any]], step: str, depth: int) -> None:
    if depth > DEPTH_MAX:
        raise _Fault(f"nested deeper than {DEPTH_MAX}")
    for name, item in items:
        kind = type(item)
        # Most leaves are done with here, without a call.
        if kind in _PLAIN or (kind is int and INT_MIN <= item <= INT_MAX):
            continue
        try:
            _check(item, depth + 1)
        except _Fault as fault:
            fault.steps.append(step.format(_printable(name)))
            raise


def _surrogate(value: Any) -> _Fault:
    """Where the lone surrogate is. Runs only after the encoder has found that there is one."""
    problem = "a string holds a lone surrogate, which UTF-8 cannot carry"
    if isinstance(value, dict):
        steps = [(f".{_printable(name)}", item) for name, item in value.items()]
        if not all(_is_clean(name) for name in value):
            return _Fault(f"a member name or {problem}")
    elif isinstance(value, list | tuple):
        steps = [(f"[{index}]", item) for index, item in enumerate(value)]
    else:
        return _Fault(problem)
    step, item = next((step, item) for step, item in steps if not _is_clean(item))
    fault = _surrogate(item)
    fault.steps.append(step)
    return fault


def _is_clean(value: Any) -> bool:
    try:
        _encode_json(value)
    except UnicodeEncodeError:
        return False
    return True


def _printable(name: object) -> str:
    """A member's name as a message can show it, whatever it is made of."""
    text = str(name)
    return text if text.isprintable() else ascii(text)[1:-1]


def _refuse(fault: _Fault, name: str | None) -> InvalidValue:
    steps = [*fault.steps, f".{_printable(name)}"] if name is not None else fault.steps
    path = "$" + "".join(reversed(steps))
    if len(path) > 80:
        path = f"{path[:38]}...{path[-38:]}"
    return InvalidValue(fault.problem, path=path)
