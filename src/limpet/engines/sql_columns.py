"""A stored value as the columns of a table, in a form that an operator can read.

JSON is JSON text. Raw bytes are themselves. A record is a JSON object of its fields; in it a
field of raw bytes is {"$text": …} when it is UTF-8 and {"$bytes": base64} when not, and a JSON
field of the same form is wrapped in {"$json": …}.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Final

import msgspec

from limpet import codec
from limpet.codec import Kind, Stored
from limpet.errors import Corrupt
from limpet.model import FAMILIES, Family

__all__ = ["SWEPT", "as_stored", "as_text"]

SWEPT: Final[tuple[Family, ...]] = tuple(family for family in FAMILIES if family != "receipt")
"""The families whose entries end by a change in the log. Receipts are dropped without one."""

_json_text = msgspec.json.encode
_split = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def as_text(stored: Stored | None) -> tuple[Kind | None, str | bytes | None]:
    """A stored value as its kind and its column: JSON as text, bytes as bytes."""
    if stored is None:
        return None, None
    if not isinstance(stored, bytes):
        members = (_json_text(name) + b":" + _member(item) for name, item in sorted(stored.items()))
        return "record", (b"{" + b",".join(members) + b"}").decode()
    if stored[:1] == b"\0":
        return "bytes", stored[1:]
    return "json", stored.decode()


def as_stored(kind: str, value: bytes) -> Stored:
    """The stored value, from the kind and the column that `as_text` made of it."""
    if kind == "json":
        return value
    if kind == "bytes":
        return b"\0" + value
    try:
        return {name: _unmember(bytes(item)) for name, item in _split(value).items()}
    except (msgspec.DecodeError, ValueError) as error:
        raise Corrupt("a stored record is not a JSON object of fields") from error


def _member(field: bytes) -> bytes:
    if field[:1] == b"\0":
        try:
            return b'{"$text":' + _json_text(field[1:].decode()) + b"}"
        except UnicodeDecodeError:
            return b'{"$bytes":"' + b64encode(field[1:]) + b'"}'
    return b'{"$json":' + field + b"}" if field.startswith(b'{"$') else field


def _unmember(text: bytes) -> bytes:
    if not text.startswith(b'{"$'):
        return text
    ((mark, inner),) = _split(text).items()
    if mark == "$json":
        return bytes(inner)
    content: str = codec.decode(bytes(inner))
    return b"\0" + (content.encode() if mark == "$text" else b64decode(content))
