"""Two results side by side, the worst line first: ``./dev bench --compare BEFORE AFTER``."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from bench.report import Findings, Line, show_figure, spread
from bench.words import brief, table

WORSE: Final = 0.95
"""A line below this part of what it was counts as worse."""


class Pair(NamedTuple):
    """A line that both results have."""

    before: Line
    after: Line

    @property
    def ratio(self) -> float:
        """What became of it: above 1 is better, whichever side of the line is the good one."""
        old, new = self.before.figure, self.after.figure
        if self.before.lower:
            old, new = new, old
        return new / old if old else math.inf if new else 1.0

    @property
    def verdict(self) -> str:
        if self.ratio >= WORSE:
            return ""
        old, new = self.before.rounds, self.after.rounds
        is_apart = max(old) < min(new) or max(new) < min(old)
        return "worse" if is_apart else "worse, but some rounds were equal"


def pair_lines(before: Findings, after: Findings) -> list[Pair]:
    """The lines that both have figures for, the worst first."""
    known = {(line.group, line.what): line for line in before.lines if line.rounds}
    pairs = [
        Pair(known[line.group, line.what], line)
        for line in after.lines
        if line.rounds and (line.group, line.what) in known
    ]
    return sorted(pairs, key=lambda pair: pair.ratio)


def comparison(before: Findings, after: Findings) -> str:
    """All lines in common as a table, and how many are worse."""
    pairs = pair_lines(before, after)
    rows = [
        (
            old.what,
            show_figure(old.figure, old.unit),
            show_figure(new.figure, new.unit),
            brief(pair.ratio),
            spread(old),
            spread(new),
            pair.verdict,
        )
        for pair in pairs
        for old, new in [pair]
    ]
    worse = sum(bool(pair.verdict) for pair in pairs)
    alone = len(before.lines) + len(after.lines) - 2 * len(pairs)
    names = [f"{one.about['commit']} of {one.about['date']}" for one in (before, after)]
    is_trial = before.about["quick"] or after.about["quick"]
    trial = "\nA trial run is among them: its figures mean nothing." if is_trial else ""
    return (
        f"Before: {names[0]}. After: {names[1]}. A ratio above 1 is better.{trial}\n\n"
        f"{table(('', 'before', 'after', 'ratio', 'rounds before', 'rounds after', ''), rows)}\n\n"
        f"{worse} of {len(pairs)} are worse by more than {100 * (1 - WORSE):.0f} %."
        f" {alone} lines are in one result alone or without a figure."
    )
