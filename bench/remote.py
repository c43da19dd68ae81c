"""Races of stores that share a server: 64 callers, and one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from bench import workload
from bench.contenders import AnyContender, Contender
from bench.harness import CALLERS, Lane, Race, Slice, in_turn, race, together
from bench.report import race_table
from bench.run import Run, say


def races(
    run: Run,
    engine: str,
    contenders: Sequence[AnyContender],
    checks: Any,
    keys: int,
    *,
    ours: str,
    limits: Collection[str],
) -> dict[str, Race]:
    """Puts and gets of all, by the name of the race: ``put@64``, ``put``, ``get@64`` and ``get``."""
    found = {}
    for verb, jobs in (("put", workload.puts), ("get", workload.gets)):
        lanes = [_many(run, one, verb, jobs(keys), is_limit=one.name in limits) for one in contenders]
        found[f"{verb}@64"] = _race(run, f"{engine} {verb}@64", lanes)
        say(race_table(f"\n{engine}, {verb}, 64 callers, {keys:,} keys", found[f"{verb}@64"], ours, checks))
        lanes = [_single(run, one, verb, jobs(keys)) for one in contenders if one.name not in limits]
        found[verb] = _race(run, f"{engine} {verb}", lanes)
        say(race_table(f"\n{engine}, {verb}, one caller, {keys:,} keys", found[verb], ours, checks))
    return found


def _race(run: Run, name: str, lanes: list[Lane]) -> Race:
    result = race(lanes, rounds=run.options.rounds, slice_s=run.options.slice_s)
    run.findings.keep_race(name, result)
    return result


def _many(run: Run, contender: AnyContender, verb: str, jobs: workload.Jobs, *, is_limit: bool) -> Lane:
    assert isinstance(contender, Contender)
    if is_limit:
        # One caller that has the calls of 64 in hand; each request counts for all of them.
        call = getattr(contender, f"{verb}_all")
        batches = iter(lambda: ([next(jobs) for _ in range(CALLERS)],), None)

        def run_all(seconds: float) -> Slice:
            piece = run.runner.run(in_turn(call, batches, seconds))
            return piece._replace(calls=piece.calls * CALLERS)

        return Lane(contender.name, run_all)
    call = getattr(contender, verb)
    return Lane(contender.name, lambda seconds: run.runner.run(together(call, jobs, seconds)))


def _single(run: Run, contender: AnyContender, verb: str, jobs: workload.Jobs) -> Lane:
    call = getattr(contender, verb)
    return Lane(contender.name, lambda seconds: run.runner.run(in_turn(call, jobs, seconds)))
