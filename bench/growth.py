"""Whether a call costs more where there are more keys, on every engine.

An engine gets a store of each size first, filled through the store itself. Then the sizes are measured in turn, as
everything else: what the first calls of a process cost, and what all later ones do. What a process holds in memory
after it has served keys, and after it has listed them, is measured in a separate process:

    python -m bench.growth URL SIZE SERVED
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import limpet
from bench import crowds, goals, workload
from bench.engines import ENGINES, Cost, Place, serve
from bench.footprint import STATM, resident_bytes
from bench.growth_figures import BATCH, PAGE, measure_round
from bench.growth_report import growth_table
from bench.run import Run, say

FIRST: Final = 1_000
LARGEST: Final = {"memory": 1_000_000, "sqlite": 1_000_000, "postgres": 1_000_000, "redis": 100_000, "nats": 100_000}
"""The number of keys up to which each engine is measured, unless ``--keys`` says otherwise."""

QUICK: Final = 5_000
ROUNDS: Final = 5
SERVED: Final = 100_000
AT_ONCE: Final = 16
"""Batches under way at a time while a store is filled."""

SAY_S: Final = 10.0
STATUS: Final = Path("/proc/self/status")

Samples = dict[str, Any]
"""Of one size: by figure, wall and CPU seconds of each round; and the sizes in memory and on the disk."""


def measure(run: Run) -> None:
    found: dict[str, dict[int, Samples]] = {}
    for name in run.options.engines or ENGINES:
        with serve(run, name, "growth") as place:
            found[name] = _measure_engine(run, place, _sizes(run, name))
            crowds.measure_on(run, place)
        by_size = {str(size): samples for size, samples in found[name].items()}
        run.findings.samples.setdefault("growth", {})[place.title] = by_size
        say(f"\nGrowth on {place.title}, medians of {_rounds(run)} rounds")
        say(growth_table(place.title, by_size))
        _judge(run, place.title, found[name])
    if "sqlite" in found:
        _judge_sqlite(run, found["sqlite"])
    if 100_000 in found.get("nats", {}):
        status_ms = [1000 * took for took in found["nats"][100_000]["status"]["wall"]]
        run.findings.judge("growth", "NATS status at 100,000 keys", "ms", status_ms, goals.NATS_STATUS_MS)


def _sizes(run: Run, engine: str) -> list[int]:
    """From a thousand on, each ten times the one before; the last may be less."""
    largest = run.options.scaled(run.options.keys or LARGEST[engine], QUICK)
    sizes = [FIRST * 10**power for power in range(10) if FIRST * 10**power < largest]
    return [*sizes, largest]


def _rounds(run: Run) -> int:
    return min(run.options.rounds, ROUNDS)


def _measure_engine(run: Run, place: Place, sizes: list[int]) -> dict[int, Samples]:
    found: dict[int, Samples] = {}
    for size in sizes:
        before = place.size_bytes()
        run.runner.run(_fill(place.url_of(f"keys{size}"), size, f"{place.title}: {size:,} keys"))
        found[size] = {"disk_bytes": place.size_bytes() - before}
    for size, samples in run.runner.run(_in_turn(run, place, sizes)).items():
        found[size] |= samples
    if STATM.exists():
        served = run.options.scaled(SERVED, 2_000)
        for size in sizes:
            found[size] |= json.loads(
                run.child("bench.growth", place.url_of(f"keys{size}"), str(size), str(min(size, served)))
            )
    return found


# Filling ----------------------------------------------------------------------


async def _fill(url: str, size: int, what: str) -> None:
    """Fill a store. Its log ends up as long as a log is kept: the rest is trimmed."""
    began = said = time.perf_counter()
    fast = f"{url}?synchronous=normal" if url.startswith("sqlite:") else url
    async with limpet.open(fast, sweep=False, window=limpet.Window(age_ms_min=0)) as store:
        batches = _batches(size)
        for done in itertools.count(AT_ONCE * BATCH, AT_ONCE * BATCH):
            if not (group := list(itertools.islice(batches, AT_ONCE))):
                break
            await asyncio.gather(*(_commit(store, batch) for batch in group))
            if time.perf_counter() - said > SAY_S:
                said = time.perf_counter()
                say(f"  {what}: {min(done, size):,} after {said - began:.0f} s")
        await store.trim()
    say(f"{what}, made in {time.perf_counter() - began:.1f} s")


def _batches(size: int) -> Iterator[range]:
    return (range(first, min(first + BATCH, size)) for first in range(0, size, BATCH))


async def _commit(store: limpet.Store, numbers: range) -> None:
    draft = store.batch()
    for number in numbers:
        draft.put(workload.key(number), workload.value(number))
    await draft.commit()


# Measuring --------------------------------------------------------------------


async def _in_turn(run: Run, place: Place, sizes: list[int]) -> dict[int, Samples]:
    """The figures of each size, round by round."""
    urls = {size: place.url_of(f"keys{size}") for size in sizes}
    stores = {size: await limpet.open(url, sweep=False) for size, url in urls.items()}
    found: dict[int, dict[str, list[Cost]]] = {size: {} for size in sizes}
    try:
        order = list(sizes)
        for turn in range(-1, _rounds(run)):
            for size in order:
                figures = await measure_round(place, urls[size], stores[size], size, run.options.slice_s)
                # The first round warms up.
                if turn >= 0:
                    for name, cost in figures.items():
                        found[size].setdefault(name, []).append(cost)
            order = [*order[1:], order[0]]
    finally:
        for store in stores.values():
            await store.close()
    return {size: {name: _columns(costs) for name, costs in figures.items()} for size, figures in found.items()}


def _columns(costs: list[Cost]) -> dict[str, list[float]]:
    return {"wall": [cost.wall_s for cost in costs], "cpu": [cost.cpu_s for cost in costs]}


# Judging ----------------------------------------------------------------------


def _judge(run: Run, engine: str, found: dict[int, Samples]) -> None:
    """How much more a call costs in the largest store than in the smallest."""
    first, last = min(found), max(found)
    for what, name in (("put@64", "put64"), ("get@64", "get64"), ("a watch", "watch")):
        line = f"{engine} {what} at {last:,} random keys, x the cost at {first:,}"
        goal = goals.GROWTH_OF_SQLITE_PUT if (engine, name) == ("SQLite", "put64") else None
        ratios = {clock: _ratios(found[last][name][clock], found[first][name][clock]) for clock in ("wall", "cpu")}
        judged = run.findings.judge("growth", line, "x", ratios["wall"], goal)
        judged.lower, judged.by_cpu = True, statistics.median(ratios["cpu"])


def _ratios(large: list[float], small: list[float]) -> list[float]:
    return [one / other for one, other in zip(large, small, strict=True)]


def _judge_sqlite(run: Run, found: dict[int, Samples]) -> None:
    last = max(found)
    for what, name in (("by a prefix of their own", "keys"), ("by a prefix of all", "all_keys")):
        took_ms = [1000 * took for took in found[last][name]["wall"]]
        run.findings.judge("growth", f"{PAGE:,} of {last:,} keys {what}", "ms", took_ms, goals.PREFIX_MS)
    served = run.options.scaled(SERVED, 2_000)
    size = 100_000 if 100_000 in found else last
    line = f"RSS growth after serving {min(size, served):,} keys of {size:,}"
    if STATM.exists():
        run.findings.judge("growth", line, "MB", [found[size]["served_bytes"] / 1e6], goals.SERVED_MB)
    else:
        run.findings.missing("growth", line, "MB", goals.SERVED_MB, "this system does not tell")


# In a separate process --------------------------------------------------------


async def _serve(url: str, size: int, served: int) -> dict[str, float]:
    """What a process grows by when it reads so many keys and writes a tenth of them, and then lists all keys."""
    async with limpet.open(url, sweep=False) as store:
        await store.put(workload.key(0), workload.value(0))
        before = _memory()
        if url.startswith("memory:"):
            await asyncio.gather(*(_commit(store, batch) for batch in _batches(size)))
        for first in range(0, served, 64):
            numbers = [turn * 7919 % size for turn in range(first, first + 64)]
            assert None not in await asyncio.gather(*(store.get(workload.key(number)) for number in numbers))
            if first % 640 == 0:
                await asyncio.gather(*(store.put(workload.key(number), workload.value(number)) for number in numbers))
        has_served = _memory()
        await store.keys(limit=PAGE)
        await store.status()
        async with store.watch(workload.key(0)):
            has_listed = _memory()
    return {
        "served_bytes": has_served[0] - before[0],
        "served_private_bytes": has_served[1] - before[1],
        "listed_bytes": has_listed[0] - has_served[0],
    }


def _memory() -> tuple[int, int]:
    """What of this process is in memory, and what of that is no page of a file, which the system may take back."""
    gc.collect()
    for line in STATUS.read_text().splitlines():
        if line.startswith("RssAnon:"):
            return resident_bytes(), int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))))
