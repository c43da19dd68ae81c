"""Figures and tables as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def brief(figure: float) -> str:
    """A figure with three significant digits."""
    if figure >= 100 or figure == int(figure):
        return f"{figure:,.0f}"
    return f"{figure:.1f}" if figure >= 10 else f"{figure:.2f}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as they need to be; the first to the left, numbers to the right."""
    body = [list(row) for row in rows]
    widths = [max(len(row[column]) for row in (head, *body)) for column in range(len(head))]
    right = [column > 0 and all(row[column][:1] in "≤≥-0123456789" for row in body) for column in range(len(head))]

    def lined_up(row: Sequence[str]) -> str:
        cells = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        )
        return "  ".join(cells).rstrip()

    return "\n".join((lined_up(head), lined_up(["─" * width for width in widths]), *map(lined_up, body)))


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The same as a table of the documentation."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
