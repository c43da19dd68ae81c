"""The picture of growth: a small panel for each figure, a line for each engine, all scales in steps of ten.

A line that rises is a cost that grows with the number of keys. Each line carries the first letter of its engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any, Final, NamedTuple

from bench.growth_report import FIGURES, Sizes, median

COLUMNS: Final = 3
PANEL_WIDTH: Final = 286
PANEL_HEIGHT: Final = 178
LEFT: Final = 56
RIGHT: Final = 26
TOP: Final = 30
BOTTOM: Final = 28
HEAD: Final = 58
LETTER: Final = 12
"""What a letter at the end of a line needs from top to bottom."""

Points = list[tuple[int, float]]
"""The line of an engine: numbers of keys, and what was measured."""


class Panel(NamedTuple):
    """One figure of all engines, and how its numbers are written."""

    title: str
    lines: dict[str, Points]
    write: Callable[[float], str]


def growth_panels(engines: dict[str, Sizes], write_time: Callable[[float], str]) -> list[Panel]:
    """The panels of all figures, in the order of the table."""

    def took_us(name: str) -> dict[str, Points]:
        return _lines(engines, lambda _, size: 1e6 * median(size, name))

    served = _lines(engines, lambda _, size: size.get("served_bytes", 0))
    kept = _lines(engines, lambda keys, size: size["disk_bytes"] / keys)
    return [
        *(Panel(figure.title, took_us(figure.name), write_time) for figure in FIGURES),
        Panel("memory after reading 100,000 keys", served, _write_bytes),
        Panel("disk for each key", kept, _write_bytes),
    ]


def _lines(engines: dict[str, Sizes], value: Callable[[int, dict[str, Any]], float]) -> dict[str, Points]:
    """What is not above zero has no place on such a scale, and is left out."""
    lines = {}
    for engine, sizes in engines.items():
        points = [(int(keys), value(int(keys), size)) for keys, size in sizes.items()]
        lines[engine] = [point for point in points if point[1] > 0]
    return {engine: points for engine, points in lines.items() if points}


def draw_panels(panels: Sequence[Panel], under: str) -> tuple[int, list[str]]:
    """The height of the picture, and what is in it."""
    engines = list(dict.fromkeys(engine for panel in panels for engine in panel.lines))
    body = ['<text class="title" x="12" y="28">What a call costs by the number of keys, wall time</text>']
    at = 12
    for engine in engines:
        body.append(f'<text class="{_css(engine)} letter" x="{at}" y="48">{engine[0].upper()} {engine}</text>')
        at += 30 + 8 * len(engine)
    for number, panel in enumerate(panels):
        x, y = PANEL_WIDTH * (number % COLUMNS), HEAD + PANEL_HEIGHT * (number // COLUMNS)
        body += [f'<g transform="translate({x},{y})">', *_panel(panel), "</g>"]
    bottom = HEAD + PANEL_HEIGHT * math.ceil(len(panels) / COLUMNS)
    body.append(f'<text class="faint" x="12" y="{bottom + 14}">{escape(under)}</text>')
    return bottom + 26, body


def _panel(panel: Panel) -> list[str]:
    points = [point for line in panel.lines.values() for point in line]
    counts = [count for count, _ in points]
    x = Scale(math.log10(min(counts)), math.log10(max(counts)), LEFT, PANEL_WIDTH - RIGHT)
    y = _scale([value for _, value in points], PANEL_HEIGHT - BOTTOM, TOP)
    body = [f'<text x="{LEFT}" y="18">{escape(panel.title)}</text>']
    for value in y.steps:
        at = y.place(value)
        body += [
            f'<line class="grid" x1="{LEFT}" x2="{PANEL_WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>',
            f'<text class="faint" x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{panel.write(value)}</text>',
        ]
    for count in x.steps:
        words = _write_count(count)
        body.append(
            f'<text class="faint" x="{x.place(count):.1f}" y="{PANEL_HEIGHT - 8}" text-anchor="middle">{words}</text>'
        )
    return [*body, *_drawn(panel, x, y)]


def _drawn(panel: Panel, x: Scale, y: Scale) -> list[str]:
    """The lines, and the letters at their ends, one below the other where several lines end at one place."""
    body, lowest = [], dict[float, float]()
    for engine, line in sorted(panel.lines.items(), key=lambda item: y.place(item[1][-1][1])):
        css = _css(engine)
        points = " ".join(f"{x.place(count):.1f},{y.place(value):.1f}" for count, value in line)
        body.append(f'<polyline class="line {css}" points="{points}"/>')
        end = x.place(line[-1][0])
        lowest[end] = max(y.place(line[-1][1]), lowest.get(end, 0.0) + LETTER)
        letter = engine[0].upper()
        body.append(f'<text class="{css} letter" x="{end + 5:.1f}" y="{lowest[end] + 4:.1f}">{letter}</text>')
    return body


class Scale(NamedTuple):
    """A scale whose steps are factors of ten."""

    low: float
    high: float
    start: float
    end: float

    @property
    def steps(self) -> list[float]:
        """The values that get a line and a name: at most five of them."""
        between = math.ceil((self.high - self.low) / 4)
        return [10.0**power for power in range(math.ceil(self.low), math.floor(self.high) + 1, max(1, between))]

    def place(self, value: float) -> float:
        """Where a value is."""
        return self.start + (self.end - self.start) * (math.log10(value) - self.low) / (self.high - self.low)


def _scale(values: Sequence[float], start: float, end: float) -> Scale:
    """From the step below the smallest value to the one above the largest."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return Scale(low, max(high, low + 1), start, end)


def _css(engine: str) -> str:
    return f"e-{engine.lower()}"


def _write_count(count: float) -> str:
    return f"{count / 1e6:g}M" if count >= 1e6 else f"{count / 1e3:g}k"


def _write_bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:g} {unit}"
    return f"{count:g} B"
