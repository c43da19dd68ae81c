"""Measures Limpet beside its peers: ``./dev bench``. See docs/benchmarks.md for how to read it."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from bench import (
    compare,
    filters,
    footprint,
    growth,
    hot,
    http,
    lag,
    memory,
    nats,
    plot,
    postgres,
    redis,
    report,
    sqlite,
    startup,
    sweep,
    watch,
)
from bench.engines import ENGINES
from bench.report import Findings
from bench.run import Options, Run, say

RESULTS = Path(__file__).parent / "results"

GROUPS: dict[str, Callable[[Run], None]] = {
    "memory": memory.measure,
    "sqlite": sqlite.measure,
    "postgres": postgres.measure,
    "redis": redis.measure,
    "nats": nats.measure,
    "http": http.measure,
    "hot": hot.measure,
    "filter": filters.measure,
    "lag": lag.measure,
    "watch": watch.measure,
    "sweep": sweep.measure,
    "growth": growth.measure,
    "footprint": footprint.measure,
    "start": startup.measure,
}


def main() -> int:
    chosen = _arguments()
    if chosen.compare:
        return _compare(chosen)
    if chosen.plot or chosen.docs:
        return _show(chosen)

    options = Options(
        rounds=chosen.rounds or (2 if chosen.quick else 11),
        slice_s=chosen.slice or (0.02 if chosen.quick else 0.15),
        quick=chosen.quick,
        engines=tuple(chosen.engine or ()),
        keys=chosen.keys,
    )
    out = chosen.out or RESULTS / f"{datetime.now():%Y-%m-%d-%H%M%S}.json"
    RESULTS.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="files-", dir=chosen.folder or RESULTS) as folder,
        asyncio.Runner() as runner,
    ):
        run = Run(options, Path(folder), runner)
        _introduce(run)
        for name in chosen.only or GROUPS:
            GROUPS[name](run)
            say(f"\n{report.lines_table(line for line in run.findings.lines if line.group == name)}")
    run.findings.about["load_after"] = os.getloadavg()[0]
    run.findings.save(out)
    _conclude(run.findings, out)
    return 1 if chosen.strict and run.findings.missed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./dev bench", description="Measure Limpet beside its peers, in one process and in turn."
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of each race (11)")
    parser.add_argument("--slice", type=float, metavar="S", help="seconds that each contender runs in a round (0.15)")
    parser.add_argument(
        "--only", action="append", choices=GROUPS, help="measure this alone; may be given several times"
    )
    parser.add_argument(
        "--engine", action="append", choices=ENGINES, help="of hot and growth, this engine alone; may be repeated"
    )
    parser.add_argument(
        "--keys", type=int, metavar="N", help="of growth, up to so many keys on every engine (1,000,000 or 100,000)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="try everything out in a few seconds; the figures mean nothing"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the result goes (bench/results/<date>.json)")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="where files are made: on the disk to measure (bench/results)"
    )
    parser.add_argument("--strict", action="store_true", help="fail when a figure misses its line")
    parser.add_argument(
        "--plot", action="store_true", help="draw docs/images/bench.svg and growth.svg; measure nothing"
    )
    parser.add_argument(
        "--docs", action="store_true", help="write the figures into docs/benchmarks.md; measure nothing"
    )
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="FILE", help="the result to show (the newest that is no trial)"
    )
    parser.add_argument(
        "--compare",
        nargs=2,
        type=Path,
        metavar=("BEFORE", "AFTER"),
        help="print the lines that two results have in common, the worst first; with --strict, fail when one is worse",
    )
    return parser.parse_args()


def _introduce(run: Run) -> None:
    about = run.findings.about
    say(
        f"Limpet {about['limpet']} ({about['commit']}), Python {about['python']}, SQLite {about['sqlite']}, "
        f"{about['cores']} cores, load {about['load']:.1f}, {about['file_system']}, sync {about['sync_us']:.0f} µs"
    )
    say(", ".join(f"{name} {version}" for name, version in about["packages"].items()))
    if about["file_system"] in ("tmpfs", "ramfs"):
        say("The files are in memory, where a sync costs nothing: choose a disk with --folder.")
    if about["quick"]:
        say("A trial run: the figures mean nothing.")


def _conclude(findings: Findings, out: Path) -> None:
    judged = [line for line in findings.lines if line.verdict]
    say(f"\n{len(judged) - len(findings.missed)} of {len(judged)} pass.")
    for line in findings.missed:
        say(f"  {line.verdict}  {line.what}")
    for name, reason in findings.absent.items():
        say(f"  not measured: {name} ({reason})")
    say(f"Kept in {out}")


def _compare(chosen: argparse.Namespace) -> int:
    before, after = map(Findings.load, chosen.compare)
    say(compare.comparison(before, after))
    is_worse = any(pair.verdict for pair in compare.pair_lines(before, after))
    return 1 if chosen.strict and is_worse else 0


def _show(chosen: argparse.Namespace) -> int:
    source = chosen.source or _newest()
    if source is None:
        say("There is no result yet: run ./dev bench first, or name one with --from.")
        return 2
    findings = Findings.load(source)
    if chosen.plot:
        for path in plot.draw(findings):
            say(f"drew {path}")
    if chosen.docs:
        report.write_docs(findings)
        say(f"wrote {report.DOCS}")
    return 0


def _newest() -> Path | None:
    found = sorted(RESULTS.glob("*.json"), reverse=True)
    return next((path for path in found if not Findings.load(path).about["quick"]), None)


if __name__ == "__main__":
    sys.exit(main())
