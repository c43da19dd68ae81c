"""Whether a call costs more when there are more keys: SQLite at 1,000, 100,000 and 1,000,000.

The three files are made first. Then all are open in one process and are measured in turn, as
everything else. What a process holds in memory after serving 100,000 keys of each file is
measured in a separate process:

    python -m bench.growth URL KEYS
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import limpet
from bench import goals, workload
from bench.footprint import STATM, resident_bytes
from bench.harness import together
from bench.report import growth_rows, table
from bench.run import Run, say

SIZES = (1_000, 100_000, 1_000_000)
QUICK_SIZES = (1_000, 2_000, 5_000)
SERVED = 100_000
PAGE = 1_000
BATCH = 128
PAGES_PER_ROUND = 5
WAKES_PER_ROUND = 20
JOBS_PER_ROUND = 10_000

STATUS = Path("/proc/self/status")

Samples = dict[str, Any]


def measure(run: Run) -> None:
    sizes, findings = QUICK_SIZES if run.options.quick else SIZES, run.findings
    paths = {size: run.folder / f"growth-{size}.db" for size in sizes}
    for size, path in paths.items():
        began = time.perf_counter()
        run.runner.run(_make(path, size))
        say(f"made {size:,} keys in {time.perf_counter() - began:.1f} s")
    found = run.runner.run(_in_turn(paths, run.options.rounds, run.options.slice_s))
    served = run.options.scaled(SERVED, 2_000)
    for size, path in paths.items():
        found[size] |= {"served_mb": 0.0, "served_private_mb": 0.0}
        if STATM.exists():
            found[size] |= json.loads(run.child("bench.growth", f"sqlite:///{path}", str(size), str(served)))
        found[size]["file_mb"] = path.stat().st_size / 1e6

    samples = {str(size): found[size] for size in sizes}
    findings.samples["growth"] = samples
    say(f"\nGrowth on SQLite FULL; RSS after serving {served:,} keys")
    say(table(*growth_rows(samples)))
    largest, middle = sizes[-1], sizes[1]
    for what, kind in (("by a prefix of their own", "prefix_ms"), ("by a prefix of all", "page_ms")):
        line = f"{PAGE:,} of {largest:,} keys {what}"
        findings.judge("growth", line, "ms", found[largest][kind], goals.PREFIX_MS)
    line = f"RSS growth after serving {served:,} keys of {middle:,}"
    if STATM.exists():
        findings.judge("growth", line, "MB", [found[middle]["served_mb"]], goals.SERVED_MB)
    else:
        findings.missing("growth", line, "MB", goals.SERVED_MB, "this system does not tell")
    for what, kind in (("put@64", "put_us"), ("get@64", "get_us"), ("wake-up of a watch", "wake_ms")):
        pairs = zip(found[largest][kind], found[sizes[0]][kind], strict=True)
        line = f"{what} at {largest:,} keys, x the cost at {sizes[0]:,}"
        findings.judge("growth", line, "x", [large / small for large, small in pairs]).lower = True


async def _make(path: Path, size: int) -> None:
    """Fill a file, quickly and not durably. Its log ends up as long as a log is kept: the rest is trimmed."""
    window = limpet.Window(age_ms_min=0)
    async with limpet.open(f"sqlite:///{path}?synchronous=normal", sweep=False, window=window) as store:
        jobs = workload.in_order(size)
        while some := list(itertools.islice(jobs, 16 * BATCH)):
            await asyncio.gather(*(_commit(store, some[start : start + BATCH]) for start in range(0, len(some), BATCH)))
        await store.trim()


async def _commit(store: limpet.Store, jobs: list[tuple[str, dict[str, Any]]]) -> None:
    draft = store.batch()
    for job in jobs:
        draft.put(*job)
    await draft.commit()


async def _in_turn(paths: dict[int, Path], rounds: int, slice_s: float) -> dict[int, Samples]:
    """Each file's figures, round by round."""
    stores = {size: await limpet.open(f"sqlite:///{path}") for size, path in paths.items()}
    found: dict[int, Samples] = {
        size: {"put_us": [], "get_us": [], "page_ms": [], "prefix_ms": [], "wake_ms": []} for size in paths
    }
    try:
        order = list(paths)
        for turn in range(-1, rounds):
            for size in order:
                figures = await _round(stores[size], size, slice_s)
                # The first round warms up.
                if turn >= 0:
                    for name, figure in figures.items():
                        found[size][name].append(figure)
            order = [*order[1:], order[0]]
    finally:
        for store in stores.values():
            await store.close()
    return found


async def _round(store: limpet.Store, size: int, slice_s: float) -> dict[str, float]:
    dice = random.Random()
    numbers = [dice.randrange(size) for _ in range(JOBS_PER_ROUND)]
    turn = dice.randrange(900)
    puts = itertools.cycle([(workload.key(number), workload.value(number, turn)) for number in numbers])
    gets = itertools.cycle([(workload.key(number),) for number in numbers])
    put = await together(store.put, puts, slice_s)
    get = await together(store.get, gets, slice_s)
    wakes = [await _wake_ms(store, workload.key(dice.randrange(size))) for _ in range(WAKES_PER_ROUND)]
    return {
        "put_us": 1e6 / put.rate,
        "get_us": 1e6 / get.rate,
        "page_ms": statistics.median([await _page_ms(store, "tenant/") for _ in range(PAGES_PER_ROUND)]),
        "prefix_ms": statistics.median(
            [await _page_ms(store, workload.prefix(dice.randrange(size // PAGE))) for _ in range(PAGES_PER_ROUND)]
        ),
        "wake_ms": statistics.median(wakes),
    }


async def _page_ms(store: limpet.Store, prefix: str) -> float:
    began = time.perf_counter()
    page = await store.keys(prefix, limit=PAGE)
    took = time.perf_counter() - began
    assert page.count == PAGE
    return 1000 * took


async def _wake_ms(store: limpet.Store, key: str) -> float:
    """From the call of a put to the arrival of its event at a watch of that key."""
    async with store.watch(key) as watch:
        waiting = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0)
        began = time.perf_counter()
        writing = asyncio.ensure_future(store.put(key, workload.value(0)))
        await waiting
        took = time.perf_counter() - began
        await writing
    return 1000 * took


# In a separate process --------------------------------------------------------


async def _serve(url: str, size: int, calls: int) -> dict[str, float]:
    """What a process grows by when it reads so many keys and writes a tenth of them."""
    async with limpet.open(url) as store:
        await store.put(workload.key(0), workload.value(0))
        await store.get(workload.key(0))
        gc.collect()
        resident, private = resident_bytes(), _private_bytes()
        for turn in range(calls):
            number = turn * 7919 % size
            assert await store.get(workload.key(number)) is not None
            if turn % 640 == 0:
                await asyncio.gather(
                    *(store.put(workload.key((number + i) % size), workload.value(i)) for i in range(64))
                )
        gc.collect()
        return {
            "served_mb": (resident_bytes() - resident) / 1e6,
            "served_private_mb": (_private_bytes() - private) / 1e6,
        }


def _private_bytes() -> int:
    """What is not a page of a file that the system can take back at any time."""
    for line in STATUS.read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))))
