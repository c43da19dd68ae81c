"""The memory engine beside other stores in memory, with one caller and with 64."""

from __future__ import annotations

from bench import contenders_memory as in_memory
from bench import goals, workload
from bench.contenders import AnyContender, Contender
from bench.harness import Lane, Race, blocking, in_turn, race, together
from bench.report import race_table
from bench.run import Run, say

KEYS = 20_000
OURS = in_memory.LimpetMemory.name
LITESTAR = (in_memory.LitestarMsgspec.name, in_memory.LitestarOrjson.name)
BEST = "the best peer that isolates values"

_VERBS = (("put", workload.puts, goals.MEMORY_PUT), ("get", workload.gets, goals.MEMORY_GET))


def measure(run: Run) -> None:
    keys = run.options.scaled(KEYS, 1_000)
    setup, findings = run.setup("memory"), run.findings
    with setup.open_all([kind() for kind in in_memory.CONTENDERS], keys) as contenders:
        findings.keep_checks(setup.checks, setup.absent)
        isolating = [check.contender for check in setup.checks if check.role == "peer" and check.isolates == "yes"]
        for verb, jobs, goal in _VERBS:
            result = _race(run, f"memory {verb}", [_lane(run, one, verb, jobs(keys)) for one in contenders])
            say(race_table(f"\nMemory, {verb}, one caller, {keys:,} keys", result, OURS, setup.checks))
            findings.compare("memory", f"memory {verb}, x litestar", "x", result, OURS, LITESTAR, goal)
            findings.compare("memory", f"memory {verb}, x {BEST}", "x", result, OURS, isolating)

        # A peer that gives way to the loop in each call pays less for it when others wait, too.
        chosen = [one for one in contenders if one.name in (OURS, *isolating)]
        for verb, jobs, _ in _VERBS:
            result = _race(run, f"memory {verb}@64", [_lane_of_many(run, one, verb, jobs(keys)) for one in chosen])
            say(race_table(f"\nMemory, {verb}, 64 callers, {keys:,} keys", result, OURS, setup.checks))
            findings.compare("memory", f"memory {verb}@64, x {BEST}", "x", result, OURS, isolating)


def _race(run: Run, name: str, lanes: list[Lane]) -> Race:
    result = race(lanes, rounds=run.options.rounds, slice_s=run.options.slice_s)
    run.findings.keep_race(name, result)
    return result


def _lane(run: Run, contender: AnyContender, verb: str, jobs: workload.Jobs) -> Lane:
    call = getattr(contender, verb)
    if isinstance(contender, Contender):
        return Lane(contender.name, lambda seconds: run.runner.run(in_turn(call, jobs, seconds)))
    return Lane(contender.name, lambda seconds: blocking(call, jobs, seconds))


def _lane_of_many(run: Run, contender: AnyContender, verb: str, jobs: workload.Jobs) -> Lane:
    assert isinstance(contender, Contender), "64 tasks cannot share what blocks"
    call = getattr(contender, verb)
    return Lane(contender.name, lambda seconds: run.runner.run(together(call, jobs, seconds)))
