"""Pictures for the README and the benchmarks page, drawn from a result: ratios as bars, growth as panels of lines.

SVG is written by hand, because three pictures do not need a plotting library. Colours follow the
reader's light or dark setting; every bar and line also carries its name and number in text.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Final

from bench.growth_report import Sizes
from bench.panels import draw_panels, growth_panels
from bench.report import IMAGES, Findings, Line, show_figure
from bench.words import brief

WIDTH: Final = 860
LABELS: Final = 400
ROW: Final = 26

# The bars of the README: a write and a read on each kind of engine, against the peer that a user would otherwise take.
SIX: Final = (
    "SQLite FULL put@64, x LangGraph AsyncSqliteStore",
    "SQLite get@64, x the best peer on a loop",
    "PostgreSQL put@64, x LangGraph AsyncPostgresStore",
    "PostgreSQL get@64, x LangGraph AsyncPostgresStore",
    "Redis put@64, x the best peer",
    "NATS put@64, x nats-py KV",
)

_STYLE: Final = """<style>
text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #24292f }
.title { font-weight: 600; font-size: 15px }
.faint { fill: #59636e; font-size: 12px }
.bar { fill: #1a7f64 } .missed { fill: #bc4c00 }
.grid { stroke: #d1d9e0; stroke-width: 1 } .mark { stroke: #24292f; stroke-width: 2 }
.e-memory { stroke: #59636e; fill: #59636e } .e-sqlite { stroke: #0969da; fill: #0969da }
.e-postgresql { stroke: #8250df; fill: #8250df } .e-redis { stroke: #bc4c00; fill: #bc4c00 }
.e-nats { stroke: #1a7f64; fill: #1a7f64 }
.line { fill: none; stroke-width: 2 } .letter { stroke: none; font-weight: 600; font-size: 12px }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .faint { fill: #9198a1 }
  .bar { fill: #3fb18e } .missed { fill: #f0883e }
  .grid { stroke: #3d444d } .mark { stroke: #e6edf3 }
  .e-memory { stroke: #9198a1; fill: #9198a1 } .e-sqlite { stroke: #58a6ff; fill: #58a6ff }
  .e-postgresql { stroke: #bc8cff; fill: #bc8cff } .e-redis { stroke: #f0883e; fill: #f0883e }
  .e-nats { stroke: #3fb18e; fill: #3fb18e }
  .line { fill: none } .letter { stroke: none }
}
</style>"""


def draw(findings: Findings, folder: Path = IMAGES) -> list[Path]:
    """Draw the pictures that the result has figures for. Returns the files written."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    ratios = [line for line in findings.lines if line.unit in ("x", "of") and line.passing is not None and line.rounds]
    # Leave out audits, whose ratio is always one, and ratios of thousands, which would hide all others.
    ratios = [line for line in ratios if line.moonshot is not None and line.group != "filter"]
    if ratios:
        drawn.append(folder / "bench.svg")
        drawn[-1].write_text(bars(ratios, _under(findings)), encoding="utf-8")
    if six := [line for what in SIX for line in ratios if line.what == what]:
        drawn.append(folder / "peers.svg")
        drawn[-1].write_text(peers(six, _under(findings)), encoding="utf-8")
    if engines := findings.samples.get("growth"):
        drawn.append(folder / "growth.svg")
        drawn[-1].write_text(growth(engines, _under(findings)), encoding="utf-8")
    return drawn


def _under(findings: Findings) -> str:
    about = findings.about
    trial = "A trial run, the figures mean nothing. " if about["quick"] else ""
    return f"{trial}Limpet {about['limpet']}, Python {about['python']}, {about['cores']} cores, {about['date']}"


# Bars -------------------------------------------------------------------------


def bars(lines: Sequence[Line], under: str) -> str:
    """A bar for each ratio, those where more is better first, with its passing line as a mark."""
    better = [line for line in lines if not line.lower]
    smaller = [line for line in lines if line.lower]
    body, y = [], 12
    for title, part in (
        ("Limpet beside its peers: longer is better", better),
        ("Shorter is better", smaller),
    ):
        if part:
            body.append(f'<text class="title" x="12" y="{y + 16}">{title}</text>')
            y += 32
            body += _bars(part, y)
            y += ROW * len(part) + 12
    body.append(f'<text class="faint" x="12" y="{y + 12}">| passing line. {escape(under)}</text>')
    return _svg(y + 24, body, "Ratios of Limpet to its peers")


def peers(lines: Sequence[Line], under: str) -> str:
    """A few ratios with a line at 1, where Limpet is as fast as the peer."""
    room, top = WIDTH - LABELS - 90, 44
    longest = max(line.figure for line in lines)
    one = LABELS + room / longest
    bottom = top + ROW * len(lines)
    body = ['<text class="title" x="12" y="28">Calls a second, 64 callers: Limpet as a multiple of its peer</text>']
    for place, line in enumerate(lines):
        y = top + place * ROW
        length = room * line.figure / longest
        body += [
            f'<text x="{LABELS - 10}" y="{y + 15}" text-anchor="end">{escape(_short(line))}</text>',
            f'<rect class="bar" x="{LABELS}" y="{y + 3}" width="{max(length, 1):.1f}" height="{ROW - 9}" rx="2"/>',
            f'<text x="{LABELS + length + 8:.1f}" y="{y + 15}">{show_figure(line.figure, line.unit)}</text>',
        ]
    legend = f"Bar: Limpet. Line: the peer, at 1. Longer is faster. {under}"
    body += [
        f'<line class="mark" x1="{one:.1f}" x2="{one:.1f}" y1="{top - 4}" y2="{bottom + 4}"/>',
        f'<text class="faint" x="12" y="{bottom + 26}">{escape(legend)}</text>',
    ]
    return _svg(bottom + 38, body, "Calls a second of Limpet as multiples of its peers")


def _bars(lines: Sequence[Line], top: int) -> list[str]:
    room = WIDTH - LABELS - 90
    longest = max(max(line.figure, line.passing or 0) for line in lines)
    body = []
    for place, line in enumerate(lines):
        y = top + place * ROW
        length = room * line.figure / longest
        mark = LABELS + room * (line.passing or 0) / longest
        kind = "missed" if line.verdict == "MISS" else "bar"
        body += [
            f'<text x="{LABELS - 10}" y="{y + 15}" text-anchor="end">{escape(_short(line))}</text>',
            f'<rect class="{kind}" x="{LABELS}" y="{y + 3}" width="{max(length, 1):.1f}" height="{ROW - 9}" rx="2"/>',
            f'<line class="mark" x1="{mark:.1f}" x2="{mark:.1f}" y1="{y}" y2="{y + ROW - 3}"/>',
            f'<text x="{max(LABELS + length, mark) + 8:.1f}" y="{y + 15}">{show_figure(line.figure, line.unit)}</text>',
        ]
    return body


def _short(line: Line) -> str:
    return line.what.replace("event-loop ", "")


# Growth -----------------------------------------------------------------------


def growth(engines: dict[str, Sizes], under: str) -> str:
    """What each figure of growth is by the number of keys."""
    height, body = draw_panels(growth_panels(engines, _time), under)
    return _svg(height, body, "Cost of a call by number of keys")


def _time(microseconds: float) -> str:
    return f"{brief(microseconds / 1000)} ms" if microseconds >= 1000 else f"{brief(microseconds)} µs"


def _svg(height: int, body: Sequence[str], words: str) -> str:
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{words}">'
    return "\n".join((frame, f"<title>{words}</title>", _STYLE, *body, "</svg>")) + "\n"
