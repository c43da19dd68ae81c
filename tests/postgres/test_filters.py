"""Filters on the server: what is joined by ``|`` is tested there too, so that other entries are not read."""

from __future__ import annotations

import pytest

import limpet
from limpet.engines.postgres.filters import filter_sql
from limpet.model import Filter

N, S, DEEP = limpet.field("n"), limpet.field("s"), limpet.field("s", "below")


@pytest.mark.parametrize(
    ("where", "alternatives", "operands"),
    [
        ((N == 1) | (S == "x"), 1, 2),
        ((N == 1) & ((N > 1) | (S == "x")), 1, 3),
        (((N == 1) & (S == "x")) | ((N == 2) & S.exists()), 1, 3),
        (((N == 1) | (N == 2)) & ((S == "x") | (S == "y")), 2, 4),
        ((N == 1) | ((S == "x") & ((N > 1) | (N < 0))), 2, 4),
        # One alternative that the server cannot test leaves its group out, and no operand of it behind.
        (((N == 1) | (DEEP == 2)) & (S == "x"), 0, 1),
        ((N == 1) | ((S == "x") & (DEEP == 2)), 1, 2),
    ],
)
def test_groups_become_conditions(where: Filter, alternatives: int, operands: int) -> None:
    text, given = filter_sql(where)

    assert text.count(" OR (") - text.count("(is_lossy OR (") == alternatives
    assert len(given) == operands
    assert [number for number in range(7, 12) if f"${number}:" in text] == [*range(7, 7 + operands)]
    assert text.count("(") == text.count(")")
