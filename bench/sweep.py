"""How long a sweep of 10,000 expired keys takes, and how much it delays other callers.

The entries have expired before the measurement starts, and were not swept. Eight tasks put and get
other keys while one sweep ends all expired ones. Afterwards a query of the database, in plain SQL,
checks that each of them has its expire change in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import limpet
from bench import goals, workload
from bench.harness import percentile
from bench.run import Run, say
from bench.words import brief, table

EXPIRED = 10_000
LIVE = 1_000
CALLERS = 8
TTL_S = 0.5
BATCH = 128
ENDED_ONCE = "SELECT key FROM {schema}limpet_changes WHERE op = 'expire' GROUP BY key HAVING count(*) = 1"

Count = Callable[[], Awaitable[int]]
"""Counts, in the database, the keys with exactly one expire change in the log."""


class Sweep(NamedTuple):
    """One sweep, and the calls of the foreground beside it and before it."""

    seconds: float
    swept: int
    logged: int
    longest_ms: float
    p99_ms: float
    calls: int
    quiet_longest_ms: float
    quiet_p99_ms: float


def measure(run: Run) -> None:
    def new_database(number: int) -> tuple[str, Count]:
        path = run.folder / f"sweep-{number}.db"
        return f"sqlite:///{path}", lambda: asyncio.to_thread(_expire_changes, path)

    measure_on(run, "sweep", "SQLite FULL", new_database, goals.SWEEP_S)


def measure_on(
    run: Run, group: str, engine: str, new_database: Callable[[int], tuple[str, Count]], goal: goals.Goal
) -> None:
    """The same on any engine, each round in a new database."""
    expired, findings = run.options.scaled(EXPIRED, 1_000), run.findings
    found = [run.runner.run(_sweep(*new_database(number), expired)) for number in range(run.options.scaled(5, 1))]
    findings.samples[f"sweep, {engine}"] = [sweep._asdict() for sweep in found]
    say(f"\nSweep of {expired:,} expired keys beside {CALLERS} callers, {engine}")
    head = (
        "seconds",
        "swept",
        "in the log",
        "longest call ms",
        "p99 ms",
        "calls",
        "longest without ms",
        "p99 without ms",
    )
    say(table(head, [tuple(brief(figure) for figure in sweep) for sweep in found]))
    worst = f"worst of all rounds {brief(max(sweep.longest_ms for sweep in found))} ms"
    seconds = [sweep.seconds for sweep in found]
    findings.judge(group, f"{engine}: sweep of {expired:,} expired keys", "s", seconds, goal)
    stalls = [sweep.longest_ms for sweep in found]
    findings.judge(group, f"{engine}: longest call beside the sweep", "ms", stalls, goals.SWEEP_STALL_MS, worst)
    audit = [sweep.logged / expired for sweep in found]
    what = f"{engine}: expire changes in the log, of the keys that expired"
    line = findings.judge(group, what, "of", audit, goals.SWEEP_AUDIT)
    if min(audit) != 1 or max(audit) != 1:
        line.verdict = "MISS"


async def _sweep(url: str, count: Count, expired: int) -> Sweep:
    async with limpet.open(url, sweep=False) as store:
        await _fill(store, expired)
        await asyncio.sleep(TTL_S + 0.05)
        _, _, quiet = await _beside(store, asyncio.sleep(0.3))
        swept, seconds, beside = await _beside(store, store.sweep())
    return Sweep(
        seconds,
        swept,
        await count(),
        1000 * max(beside),
        1000 * percentile(beside, 99),
        len(beside),
        1000 * max(quiet),
        1000 * percentile(quiet, 99),
    )


async def _fill(store: limpet.Store, expired: int) -> None:
    pending = list(workload.in_order(expired))
    for start in range(0, expired, BATCH):
        draft = store.batch()
        for key, value in pending[start : start + BATCH]:
            draft.put(key, value, ttl=TTL_S)
        await draft.commit()


async def _beside(store: limpet.Store, work: Any) -> tuple[Any, float, list[float]]:
    """Do some work while callers go on. Returns its result, its time, and the time of each of their calls."""
    took: list[float] = []
    done = False

    async def caller(name: int) -> None:
        turn = 0
        while not done:
            key = f"live/{(name * LIVE // CALLERS + turn) % LIVE}"
            began = time.perf_counter()
            if turn % 2:
                await store.get(key)
            else:
                await store.put(key, workload.value(turn))
            took.append(time.perf_counter() - began)
            turn += 1

    async with asyncio.TaskGroup() as group:
        for name in range(CALLERS):
            group.create_task(caller(name))
        began = time.perf_counter()
        result = await work
        seconds = time.perf_counter() - began
        done = True
    return result, seconds, took


def _expire_changes(path: Path) -> int:
    with contextlib.closing(sqlite3.connect(path)) as file:
        return len(file.execute(ENDED_ONCE.format(schema="")).fetchall())
