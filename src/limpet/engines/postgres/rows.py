"""Entries and changes as rows of the tables, and spans and values as parameters of statements."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from limpet.codec import Stored
from limpet.engines.sql_columns import as_stored, as_text
from limpet.keys import KEY_BYTES_MAX, Span
from limpet.model import Change, Entry, fingerprint

__all__ = [
    "array_text",
    "change_from_row",
    "columns_from_rows",
    "decode_json",
    "digits",
    "encode_value",
    "entry_from_row",
    "fingerprint_from_row",
    "jsonb_approximation",
    "span_bounds",
]

# Greater than every key: more of the last code point than fit into a key.
_BEYOND_ALL_KEYS: Final = "\U0010ffff" * (KEY_BYTES_MAX // 4 + 1)

# Rows that come ---------------------------------------------------------------


def entry_from_row(row: Sequence[Any]) -> Entry:
    """The entry of a row of `sql.ENTRY_COLUMNS`."""
    key, kind, stored, version, revision, created_revision, created_ms, updated_ms, expires_ms, meta = row
    return Entry(
        key,
        None if kind is None else as_stored(kind, stored),
        version,
        revision,
        created_revision,
        created_ms,
        updated_ms,
        expires_ms,
        None if meta is None else meta.encode(),
    )


def change_from_row(row: Sequence[Any]) -> Change:
    """The change of a row of `sql.LOG_COLUMNS`."""
    op, revision, last_revision, at_ms, cause, family, *entry = row
    return Change(op, entry_from_row(entry), revision, last_revision, at_ms, cause, family)


def fingerprint_from_row(row: Sequence[Any]) -> str:
    """The fingerprint of the change of a row of `sql.FINGERPRINT_COLUMNS`."""
    revision, last_revision, at_ms, version, created_revision, family, cause = row
    entry = Entry("", None, version, revision, created_revision, 0, 0)
    return fingerprint(Change("put", entry, revision, last_revision, at_ms, cause, family))


# Parameters that go -----------------------------------------------------------


def encode_value(stored: Stored | None) -> tuple[str | None, str | None, str | None]:
    """A value as its kind, its text and, if jsonb cannot hold it exactly, an approximation that jsonb can hold.

    The text of raw bytes is hexadecimal.
    """
    kind, text = as_text(stored)
    if text is None:
        return None, None, None
    return (kind, text.hex(), None) if isinstance(text, bytes) else (kind, text, jsonb_approximation(text))


def array_text(items: Iterable[str]) -> str:
    """An array of texts as one text, which the server casts to the array."""
    return '{"' + '","'.join([item.replace("\\", "\\\\").replace('"', '\\"') for item in items]) + '"}'


def decode_json(json: Any) -> str | None:
    """The text of a meta, or None if the entry has none."""
    return None if json is None else json.decode()


def digits(number: Any) -> str | None:
    """A number as an item of an array of texts."""
    return None if number is None else str(number)


def columns_from_rows(rows: list[tuple[Any, ...]], width: int) -> list[list[Any]]:
    """Rows as columns, of which there are ``width`` even without a row."""
    return [list(column) for column in zip(*rows, strict=True)] or [[] for _ in range(width)]


def span_bounds(span: Span) -> tuple[str, str]:
    """A span as two texts of SQL, which cannot hold U+0000. No key holds it either, so U+0001 bounds the same keys."""
    stop = _BEYOND_ALL_KEYS if span.stop is None else span.stop.replace("\0", "\1")
    return span.start.replace("\0", "\1"), stop


# What jsonb cannot hold -------------------------------------------------------
#
# jsonb keeps numbers as decimals: 1e22 comes back as an integer, and -0.0 without its sign. Its
# strings cannot hold U+0000.

_EXPONENT: Final = re.compile(r"e[0-9]")
_STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*"')
_LOSSY_NUMBER: Final = re.compile(r"[0-9]e[0-9]|-0\.0(?![0-9])")
_NUL: Final = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")


def jsonb_approximation(text: str) -> str | None:
    """A JSON text that jsonb can hold instead of this one; None if jsonb holds this one exactly."""
    if "\\u0000" not in text and "-0.0" not in text and _EXPONENT.search(text) is None:
        return None
    replaced = _NUL.sub(r"\1\\ufffd", text)
    if replaced == text and _LOSSY_NUMBER.search(_STRING.sub('""', text)) is None:
        return None
    return replaced
