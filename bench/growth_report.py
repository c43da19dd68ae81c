"""The table of growth: a row for each engine and size, and one that compares the largest with the smallest."""

from __future__ import annotations

import statistics
from typing import Any, Final, NamedTuple

from bench.words import brief, table


class Figure(NamedTuple):
    """A figure as it is shown: its name in a result, its title, and its unit."""

    name: str
    title: str
    unit: str


FIGURES: Final = (
    Figure("open", "open, and one get", "ms"),
    Figure("get64", "get@64, nothing cached", "µs"),
    Figure("first_page", "first page of 1,000 keys", "ms"),
    Figure("first_watch", "first watch", "ms"),
    Figure("put", "put@1", "µs"),
    Figure("put64", "put@64", "µs"),
    Figure("page", "1,000 entries", "ms"),
    Figure("keys", "1,000 keys", "ms"),
    Figure("count", "count of all keys", "ms"),
    Figure("status", "status", "ms"),
    Figure("watch", "watch: join, put, event", "ms"),
    Figure("trim", "trim of 1,000 changes", "ms"),
    Figure("sweep", "sweep of 1,000 due keys", "ms"),
)

Sizes = dict[str, dict[str, Any]]
"""The samples of an engine by number of keys."""

_MILLIONTHS: Final = {"µs": 1.0, "ms": 1000.0}
_SIZES: Final = (("served_bytes", "served MB"), ("listed_bytes", "listed MB"))

HEAD: Final = (
    "engine",
    "keys",
    *(f"{figure.title}, {figure.unit}" for figure in FIGURES),
    *(title for _, title in _SIZES),
    "disk, B a key",
)


def growth_rows(engine: str, sizes: Sizes, clock: str = "wall") -> list[tuple[str, ...]]:
    """The rows of an engine, by wall time or by CPU time."""
    rows = [(engine, f"{int(keys):,}", *_times(size, clock), *_bytes(int(keys), size)) for keys, size in sizes.items()]
    first, last = next(iter(sizes.values())), next(reversed(sizes.values()))
    ratios = [median(last, figure.name, clock) / median(first, figure.name, clock) for figure in FIGURES]
    return [*rows, (engine, "x the first", *map(brief, ratios), *("" for _ in _SIZES), "")]


def growth_table(engine: str, sizes: Sizes) -> str:
    """An engine for the terminal: a line for each figure, a column for each size; then the same by CPU time."""
    parts = []
    for clock, words in (("wall", "wall time"), ("cpu", "CPU time of this process and of the server")):
        columns = list(zip(HEAD[1:], *(row[1:] for row in growth_rows(engine, sizes, clock)), strict=True))
        head, *lines = columns if clock == "wall" else columns[: 1 + len(FIGURES)]
        parts.append(table((f"by {words}", *head[1:]), lines))
    return "\n\n".join(parts)


def median(size: dict[str, Any], name: str, clock: str = "wall") -> float:
    """A figure in seconds, the median of its rounds."""
    return float(statistics.median(size[name][clock]))


def _times(size: dict[str, Any], clock: str) -> list[str]:
    return [brief(1e6 * median(size, figure.name, clock) / _MILLIONTHS[figure.unit]) for figure in FIGURES]


def _bytes(keys: int, size: dict[str, Any]) -> list[str]:
    kept = [brief(size[name] / 1e6) if name in size else "" for name, _ in _SIZES]
    return [*kept, brief(size["disk_bytes"] / keys)]
