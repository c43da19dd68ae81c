"""Filters as conditions of SQL, so that the server leaves out most entries that do not match.

The server may find more than what matches, and never less: jsonb takes 1 and 1.0 for equal, and holds
only an approximation of some values. Every entry that matches meets the conditions here; the engine
then checks each entry found with the filter itself.
"""

from __future__ import annotations

from typing import Any

from limpet import codec
from limpet.engines.postgres.rows import jsonb_approximation
from limpet.model import Filter, Test

__all__ = ["FIRST_OPERAND", "filter_sql"]

FIRST_OPERAND = 7
"""The number of the first operand: a scan itself has six parameters."""


def filter_sql(where: Filter) -> tuple[str, list[Any]]:
    """A filter as conditions, each with its AND, and their operands."""
    operands: list[Any] = []
    return "".join(f" AND {condition}" for condition in _conditions(where, operands)), operands


def _conditions(where: Filter, operands: list[Any]) -> list[str]:
    """The conditions that must all hold. Their operands are added to those of the conditions before them."""
    conditions: list[str] = []
    for test in where.tests:
        found = _condition(test, f"${len(operands) + FIRST_OPERAND}")
        if found is not None:
            conditions.append(found[0])
            operands += found[1]
    for group in where.any_of:
        count = len(operands)
        alternatives = [_conditions(each, operands) for each in group]
        if all(alternatives):
            joined = [" AND ".join(each) for each in alternatives]
            conditions.append(f"(({') OR ('.join(joined)}))")
        else:
            # One of them cannot be tested here, so any entry may match.
            del operands[count:]
    return conditions


def _condition(test: Test, operand: str) -> tuple[str, list[Any]] | None:
    """One test as a condition with at most one operand; None if the server cannot test it."""
    if test.path:
        return None
    # The name is part of the text, so that an index on this very expression can be used.
    name = "'" + test.name.replace("'", "''") + "'"
    if test.comparison == "exists":
        return f"value ? {name}", []
    # Raw bytes, and JSON that looks like their wrapper, are wrapped in a record and not in an object.
    if any(item[:1] == b"\0" or item.startswith(b'{"$') for item in test.operands):
        return None
    match test.comparison:
        case "eq" | "in":
            texts = [jsonb_approximation(text) or text for text in map(bytes.decode, test.operands)]
            return f"value -> {name} = ANY ({operand}::text[]::jsonb[])", [texts]
        case "ne" | "not_in":
            # Two values are certainly equal only if jsonb holds both exactly.
            texts = [text for text in map(bytes.decode, test.operands) if jsonb_approximation(text) is None]
            equal = f"(value -> {name})::text = ANY ({operand}::text[]::jsonb[]::text[])"
            return f"(is_lossy OR NOT coalesce({equal}, false))", [texts]
        case comparison:
            # Bounds are inclusive here: two integers of 19 digits may be the same number in double precision.
            sign = "<=" if comparison in ("lt", "le") else ">="
            bound = codec.decode(test.operands[0])
            kind, cast = ("string", 'COLLATE "C"') if isinstance(bound, str) else ("number", "::float8")
            if isinstance(bound, bool) or not isinstance(bound, str | int | float) or "\0" in str(bound):
                return None
            side = f"(value ->> {name}) {cast} {sign} {operand}::{'text' if kind == 'string' else 'float8'}"
            is_within = f"CASE jsonb_typeof(value -> {name}) WHEN '{kind}' THEN {side} ELSE false END"
            return f"(is_lossy OR {is_within})", [bound if kind == "string" else float(bound)]
