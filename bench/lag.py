"""How long a busy store delays other tasks on the loop, measured by a task that only sleeps 1 ms.

The figure is the 99th percentile of how long those sleeps took, the millisecond included,
compared with that of an idle loop. A store that completes its calls without ever yielding to the
loop shows here as one sleep as long as the whole slice.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Coroutine
from typing import NamedTuple

from bench import contenders_sqlite as on_sqlite
from bench import goals, workload
from bench.contenders import Contender
from bench.harness import percentile, together
from bench.run import Run, say
from bench.words import brief, table

TICK_S = 0.001
SLICE_S = 0.6
"""Longer than elsewhere: a percentile needs some hundreds of ticks."""
KEYS = 10_000
IDLE = "an idle loop"


class Ticks(NamedTuple):
    """How long the sleeps of one slice took, in milliseconds."""

    p50_ms: float
    p99_ms: float
    longest_ms: float
    calls_per_s: float


def measure(run: Run) -> None:
    keys = run.options.scaled(KEYS, 500)
    slice_s = 0.1 if run.options.quick else max(run.options.slice_s, SLICE_S)
    setup, findings = run.setup("lag"), run.findings
    kinds = (on_sqlite.LimpetFull, on_sqlite.LanggraphSqlite, on_sqlite.Aiosqlite, on_sqlite.PyKeyValueDisk)
    with setup.open_all([kind() for kind in kinds], keys) as contenders:
        findings.keep_checks(setup.checks, setup.absent)
        loads: dict[str, Callable[[float], Ticks]] = {IDLE: lambda seconds: run.runner.run(_beside(None, seconds))}
        for contender in contenders:
            assert isinstance(contender, Contender)
            loads[f"{contender.name}, 64 writers"] = _load(run, contender, "put", keys)
            loads[f"{contender.name}, 64 readers"] = _load(run, contender, "get", keys)
        found: dict[str, list[Ticks]] = {name: [] for name in loads}
        order = list(loads)
        for _ in range(run.options.rounds):
            for name in order:
                found[name].append(loads[name](slice_s))
            order = [*order[1:], order[0]]

    findings.samples["lag"] = {name: [ticks._asdict() for ticks in rounds] for name, rounds in found.items()}
    rows = [_row(name, rounds, found[IDLE]) for name, rounds in found.items()]
    say("\nEvent-loop lag: how long a sleep of 1 ms takes beside SQLite FULL")
    say(table(("beside", "p50 ms", "p99 ms", "longest ms", "p99 x idle", "calls/s"), rows))
    for who, goal in (("writers", goals.LAG_OF_WRITERS), ("readers", goals.LAG_OF_READERS)):
        rounds = _times_idle(found[f"{on_sqlite.LimpetFull.name}, 64 {who}"], found[IDLE])
        findings.judge("lag", f"event-loop lag p99 beside 64 {who}, x an idle loop", "x", rounds, goal)


def _load(run: Run, contender: Contender, verb: str, keys: int) -> Callable[[float], Ticks]:
    call, jobs = getattr(contender, verb), (workload.puts if verb == "put" else workload.gets)(keys)

    async def many(seconds: float) -> float:
        return (await together(call, jobs, seconds)).rate

    return lambda seconds: run.runner.run(_beside(many, seconds))


async def _beside(load: Callable[[float], Coroutine[None, None, float]] | None, seconds: float) -> Ticks:
    """Tick for so many seconds beside a load."""
    took: list[float] = []
    busy = None if load is None else asyncio.ensure_future(load(seconds))
    until = time.perf_counter() + seconds
    while (began := time.perf_counter()) < until or not took:
        await asyncio.sleep(TICK_S)
        took.append(1000 * (time.perf_counter() - began))
    rate = 0.0 if busy is None else await busy
    return Ticks(percentile(took, 50), percentile(took, 99), max(took), rate)


def _times_idle(rounds: list[Ticks], idle: list[Ticks]) -> list[float]:
    return [ticks.p99_ms / quiet.p99_ms for ticks, quiet in zip(rounds, idle, strict=True)]


def _row(name: str, rounds: list[Ticks], idle: list[Ticks]) -> tuple[str, ...]:
    return (
        name,
        brief(statistics.median(ticks.p50_ms for ticks in rounds)),
        brief(statistics.median(ticks.p99_ms for ticks in rounds)),
        brief(max(ticks.longest_ms for ticks in rounds)),
        f"{brief(statistics.median(_times_idle(rounds, idle)))}x",
        f"{statistics.median(ticks.calls_per_s for ticks in rounds):,.0f}",
    )
