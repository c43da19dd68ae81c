"""Indexes on a field as SQL: the indexed expressions, and the conditions that search them.

`limpet.index` defines what an index must find. A record is a JSON object in these tables, with its
raw bytes wrapped (see `limpet.engines.sql_columns`). So a field is a number, a text or neither by its
JSON type, or by the content of a wrapping. A field that is neither is indexed as the text ''.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any

from limpet import codec
from limpet.codec import DIGITS_MAX
from limpet.index import IndexProbe

__all__ = [
    "literal",
    "postgres_expressions",
    "postgres_name",
    "postgres_parts",
    "quoted",
    "sqlite_expression",
    "sqlite_name",
    "sqlite_parts",
]

TEXT_MAX = 200


def literal(text: str) -> str:
    """A text as a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


def quoted(identifier: str) -> str:
    """A name as a quoted identifier of SQL."""
    return '"' + identifier.replace('"', '""') + '"'


# SQLite: one index, where every number comes before every text ------------------


def sqlite_name(namespace: str, field: str) -> str:
    """The name of an index. It contains the length of the namespace, so that the field can be split off."""
    return f"limpet_index {len(namespace)} {namespace} {field}"


def sqlite_expression(field: str) -> str:
    """The indexed value of a field; NULL where the entry has no such field."""
    path = '$."' + field + '"'
    member = f"value, {literal(path)}"
    inner = literal(path + '."$text"')
    text = f"json_extract(value, {inner})"
    is_decimal = (
        f"({text} GLOB '[0-9]*' OR {text} GLOB '-[0-9]*') AND substr({text}, 2) NOT GLOB '*[^0-9]*'"
        f" AND length(ltrim({text}, '-')) <= {DIGITS_MAX}"
    )
    return (
        f"CASE json_type({member}) WHEN 'integer' THEN json_extract({member}) WHEN 'real' THEN json_extract({member})"
        f" WHEN 'text' THEN json_extract({member})"
        f" WHEN 'object' THEN CASE WHEN kind <> 'record' THEN '' WHEN {is_decimal} THEN CAST({text} AS NUMERIC)"
        f" ELSE coalesce({text}, '') END"
        f" ELSE CASE WHEN json_type({member}) IS NOT NULL THEN '' END END"
    )


def sqlite_parts(wanted: IndexProbe) -> Iterator[tuple[str, list[Any]]]:
    """The ranges to search, as conditions on the expression."""
    field = sqlite_expression(wanted.name)
    if wanted.has_numbers:
        yield f"{field} >= ? AND {field} <= ? AND {field} < ''", [wanted.low, wanted.high]
    if wanted.all_texts:
        yield f"{field} >= ''", []
    for operand in wanted.texts:
        # SQLite's JSON functions cut a text at U+0000.
        yield f"{field} = ?", [_text(operand).partition("\0")[0]]


# PostgreSQL: one index of numbers, and one of texts -------------------------------


def postgres_name(namespace: str, field: str) -> str:
    """The prefix of the names of both indexes: a hash, because an identifier has room for 63 bytes."""
    return "limpet_index_" + hashlib.sha256(f"{len(namespace)} {namespace} {field}".encode()).hexdigest()[:24]


def postgres_expressions(field: str) -> tuple[str, str]:
    """The indexed values of a field as a number and as a text; NULL where it is not one."""
    name = literal(field)
    member, raw = f"(value -> {name})", f"(value -> {name} ->> '$text')"
    is_decimal = f"{raw} ~ '^-?[0-9]{{1,{DIGITS_MAX}}}$'"
    number = (
        f"CASE jsonb_typeof({member}) WHEN 'number' THEN (value ->> {name})::numeric"
        f" WHEN 'object' THEN CASE WHEN kind = 'record' AND {is_decimal} THEN {raw}::numeric END END"
    )
    text = (
        f"CASE jsonb_typeof({member}) WHEN 'number' THEN NULL WHEN 'string' THEN left(value ->> {name}, {TEXT_MAX})"
        f" WHEN 'object' THEN CASE WHEN kind <> 'record' THEN '' WHEN {is_decimal} THEN NULL"
        f" ELSE left(coalesce({raw}, ''), {TEXT_MAX}) END"
        f" ELSE CASE WHEN {member} IS NOT NULL THEN '' END END"
    )
    return f"({number})", f'({text}) COLLATE "C"'


def postgres_parts(wanted: IndexProbe, first: int) -> Iterator[tuple[str, list[Any]]]:
    """The ranges to search, as conditions on an expression; operands are numbered from ``first``."""
    number, text = postgres_expressions(wanted.name)
    if wanted.has_numbers:
        bounds = [(sign, bound) for sign, bound in ((">=", wanted.low), ("<=", wanted.high)) if math.isfinite(bound)]
        signs = [f"{number} {sign} ${first + at}::text::numeric" for at, (sign, _) in enumerate(bounds)]
        yield " AND ".join(signs) or f"{number} IS NOT NULL", [repr(bound) for _, bound in bounds]
    if wanted.all_texts:
        yield f"{text} IS NOT NULL", []
    elif wanted.texts:
        # jsonb cannot hold U+0000; U+FFFD is stored instead.
        texts = [_text(operand).replace("\0", "\ufffd")[:TEXT_MAX] for operand in wanted.texts]
        yield f"{text} = ANY (${first}::text[])", [texts]


def _text(operand: bytes) -> str:
    """The text that an index has for an encoded operand; empty for bytes that are not UTF-8."""
    if operand[:1] != b"\0":
        decoded: str = codec.decode(operand)
        return decoded
    try:
        return operand[1:].decode()
    except UnicodeDecodeError:
        return ""
