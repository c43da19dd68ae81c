"""The findings of a run: saved as JSON, printed as tables, and written into the documentation."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from bench.contenders import Check
from bench.goals import Goal
from bench.growth_report import HEAD as GROWTH_HEAD
from bench.growth_report import Sizes, growth_rows
from bench.harness import Race, Slice
from bench.words import brief, markdown, table

Unit = Literal["x", "of", "s", "ms", "µs", "MB", "/s"]

DOCS: Final = Path(__file__).parent.parent / "docs" / "benchmarks.md"
IMAGES: Final = DOCS.parent / "images"
BEGIN: Final = "<!-- figures: begin, written by ./dev bench --docs -->"
END: Final = "<!-- figures: end -->"


@dataclass
class Line:
    """One judged figure: the median of its rounds, and its goal if it has one."""

    group: str
    what: str
    unit: Unit
    figure: float
    rounds: list[float]
    passing: float | None = None
    moonshot: float | None = None
    lower: bool = False
    verdict: str = ""
    note: str = ""
    by_cpu: float | None = None
    """The same ratio by CPU time per call, which other work on the machine disturbs least."""


@dataclass
class Findings:
    """All findings of a run, in the form in which they are saved."""

    about: dict[str, Any] = field(default_factory=dict)
    checks: list[dict[str, Any]] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    races: dict[str, dict[str, list[list[float]]]] = field(default_factory=dict)
    samples: dict[str, Any] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)

    def judge(
        self,
        group: str,
        what: str,
        unit: Unit,
        rounds: Sequence[float],
        goal: Goal | None = None,
        note: str = "",
    ) -> Line:
        """Add a figure by its rounds, and judge it by its goal."""
        figure = statistics.median(rounds)
        line = Line(group, what, unit, figure, list(rounds), note=note)
        if goal is not None:
            line.passing, line.moonshot, line.lower = goal.passing, goal.moonshot, goal.lower
            line.verdict = "PASS" if goal.is_met_by(figure) else "MISS"
            if goal.is_surpassed_by(figure):
                line.verdict = "PASS, moonshot"
        self.lines.append(line)
        return line

    def compare(
        self,
        group: str,
        what: str,
        unit: Unit,
        race: Race,
        ours: str,
        theirs: Sequence[str],
        goal: Goal | None = None,
    ) -> None:
        """Add the ratio of ours to the best of theirs: judged by wall time, and reported by CPU time as well."""
        present = [name for name in theirs if name in race.slices]
        if present:
            note = f"best: {race.fastest(present)}" if len(theirs) > 1 else ""
            line = self.judge(group, what, unit, race.ratios(ours, present), goal, note)
            line.by_cpu = statistics.median(race.cpu_ratios(ours, present))
        elif goal is not None:
            self.missing(group, what, unit, goal)

    def missing(self, group: str, what: str, unit: Unit, goal: Goal, why: str = "no such peer here") -> None:
        """A figure that could not be taken."""
        line = Line(group, what, unit, 0.0, [], goal.passing, goal.moonshot, goal.lower, "VOID", why)
        self.lines.append(line)

    def keep_checks(self, checks: Iterable[Check], absent: dict[str, str]) -> None:
        self.checks += [check._asdict() for check in checks]
        self.absent |= absent

    def keep_race(self, name: str, race: Race) -> None:
        self.races[name] = {lane: [list(piece) for piece in slices] for lane, slices in race.slices.items()}

    @property
    def missed(self) -> list[Line]:
        return [line for line in self.lines if line.verdict in ("MISS", "VOID")]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Findings:
        found = json.loads(path.read_text(encoding="utf-8"))
        found["lines"] = [Line(**line) for line in found["lines"]]
        return cls(**found)


# Words ------------------------------------------------------------------------


def show_figure(figure: float, unit: Unit) -> str:
    return f"{brief(figure)}x" if unit == "x" else brief(figure) if unit == "of" else f"{brief(figure)} {unit}"


def aim(line: Line) -> tuple[str, str]:
    """The passing line and the moonshot, with the side on which the figure must be."""
    sign = "≤" if line.lower else "≥"
    return (
        "" if line.passing is None else f"{sign} {brief(line.passing)}",
        "" if line.moonshot is None else f"{sign} {brief(line.moonshot)}",
    )


def spread(line: Line) -> str:
    """Between which figures the rounds lay."""
    return f"{brief(min(line.rounds))} to {brief(max(line.rounds))}" if len(line.rounds) > 1 else ""


def by_cpu(line: Line) -> str:
    return "" if line.by_cpu is None else show_figure(line.by_cpu, line.unit)


# On the terminal --------------------------------------------------------------


def race_table(title: str, race: Race, ours: str, checks: Iterable[Check]) -> str:
    """The rates of all contenders, fastest first, with the settings and isolation of each."""
    known = {check.contender: check for check in checks}
    rows = []
    for name in sorted(race.slices, key=race.rate, reverse=True):
        check = known[name]
        times = "" if name == ours else f"{brief(statistics.median(race.ratios(ours, [name])))}x"
        rows.append(
            (
                name,
                f"{race.rate(name):,.0f}",
                f"{race.cpu_us(name):.1f}",
                times,
                check.role,
                check.isolates,
                " ".join(check.settings.values()),
                check.note,
            )
        )
    head = ("", "calls/s", "CPU µs", f"{ours} is", "role", "isolates", "durability", "what it does")
    return f"{title}\n{table(head, rows)}"


def lines_table(lines: Iterable[Line]) -> str:
    rows = [
        (
            line.what,
            show_figure(line.figure, line.unit) if line.rounds else "",
            *aim(line),
            line.verdict,
            spread(line),
            by_cpu(line),
            line.note,
        )
        for line in lines
    ]
    return table(("", "figure", "pass", "moonshot", "", "rounds", "by CPU", ""), rows)


# In the documentation ---------------------------------------------------------


def write_docs(findings: Findings, path: Path = DOCS) -> None:
    """Put the figures between the two marks of the page, replacing the old ones."""
    page = path.read_text(encoding="utf-8")
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{path} has lost the marks between which the figures belong: {BEGIN} and {END}")
    path.write_text(f"{before}{BEGIN}\n\n{figures(findings)}\n{END}{after}", encoding="utf-8")


def figures(findings: Findings) -> str:
    """The figures of a run as Markdown."""
    about = findings.about
    text = [
        f"Taken on {about['date']} with Limpet {about['limpet']} ({about['commit']}), Python {about['python']}, SQLite "
        f"{about['sqlite']}, {about['cores']} cores, {about['file_system']}, a sync of the disk taking "
        f"{about['sync_us']:.0f} µs. {about['rounds']} rounds of {about['slice_s']} s slices.",
    ]
    if about["quick"]:
        text.append("**A trial run. These figures mean nothing.**")
    pictures = {"bench.svg": "Ratios to peers and limits", "growth.svg": "Cost of a call by number of keys"}
    text += [f"![{words}](images/{name})" for name, words in pictures.items() if (IMAGES / name).exists()]
    rows = [
        (
            line.what,
            show_figure(line.figure, line.unit) if line.rounds else "",
            *aim(line),
            _verdict(line),
            spread(line),
            by_cpu(line),
        )
        for line in findings.lines
        # They have a table of their own.
        if line.group != "hot"
    ]
    text.append(markdown(("figure", "median", "pass", "moonshot", "", "rounds", "by CPU"), rows))
    for name, lanes in findings.races.items():
        race = Race({lane: [Slice(int(calls), *times) for calls, *times in slices] for lane, slices in lanes.items()})
        text += [f"**{name}**", markdown(("contender", "calls/s", "CPU µs a call"), _rates(race))]
    if cells := findings.samples.get("hot"):
        text += ["**Hot keys**, 4 callers in each process", _hot(cells, findings.lines)]
    if engines := findings.samples.get("growth"):
        text += ["**Growth**, medians", _growth(engines)]
    packages = ", ".join(f"{name} {version}" for name, version in about["packages"].items())
    text.append(f"Peers: {packages}.")
    if findings.absent:
        text.append("Not measured: " + "; ".join(f"{name} ({why})" for name, why in findings.absent.items()) + ".")
    return "\n\n".join(text) + "\n"


def _verdict(line: Line) -> str:
    return f"**{line.verdict}**" if line.verdict in ("MISS", "VOID") else line.verdict


def _growth(engines: dict[str, Sizes]) -> str:
    rows = [row for engine, sizes in engines.items() for row in growth_rows(engine, sizes)]
    return markdown(GROWTH_HEAD, rows)


def _hot(cells: dict[str, dict[str, Any]], lines: Iterable[Line]) -> str:
    judged = {line.what.partition(":")[0]: line for line in lines if line.group == "hot" and line.verdict}
    rows = []
    for what, cell in cells.items():
        line = judged.get(what)
        evenness = ("", "") if line is None else (brief(line.figure), _verdict(line))
        rows.append((what, brief(statistics.median(cell["rates"])), *evenness, brief(max(cell["waits_ms"]))))
    return markdown(("", "writes/s", "slowest of fastest", "", "longest wait ms"), rows)


def _rates(race: Race) -> list[tuple[str, ...]]:
    ordered = sorted(race.slices, key=race.rate, reverse=True)
    return [(name, f"{race.rate(name):,.0f}", f"{race.cpu_us(name):.1f}") for name in ordered]
