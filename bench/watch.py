"""Ten thousand watchers, and a watcher in another process.

Measured is what a put costs beside watchers of other keys, how long watchers of one prefix hold the loop, and how soon
a watch hears of a change of another process. That process writes the time into a key, so many times:

    python -m bench.watch URL PUTS
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

import limpet
from bench import goals, workload
from bench.engines import serve
from bench.harness import percentile
from bench.run import ROOT, Run, say
from bench.words import brief, table

WATCHERS: Final = 10_000
PUTS: Final = 50
FOREIGN_PUTS: Final = 250
FOREIGN_PAUSE_S: Final = 0.004
PREFIX: Final = "shared/"
FOREIGN: Final = "foreign"


class Hold(NamedTuple):
    """The longest turn of the loop, in milliseconds: by the clock, and by the CPU time of its thread."""

    wall_ms: float
    cpu_ms: float


def measure(run: Run) -> None:
    watchers, rounds = run.options.scaled(WATCHERS, 200), min(run.options.rounds, 7)
    for name in ("memory", "sqlite"):
        with serve(run, name, "watch") as place:
            found = run.runner.run(_beside_others(place.url_of("others"), watchers, rounds))
            _report_others(run, place.title, watchers, *found)
            holds = run.runner.run(_of_one_prefix(place.url_of("prefix"), watchers, rounds))
            line = f"{place.title}: longest hold of the loop, {watchers:,} watchers of one prefix"
            judged = run.findings.judge("watch", line, "ms", [hold.wall_ms for hold in holds], goals.WATCH_HOLD_MS)
            judged.by_cpu = statistics.median(hold.cpu_ms for hold in holds)
    with serve(run, "sqlite", "foreign") as place:
        took_ms = run.runner.run(_from_another_process(run, place.url_of(FOREIGN)))
    _report_foreign(run, took_ms)


# Watchers of other keys -------------------------------------------------------


async def _beside_others(url: str, watchers: int, rounds: int) -> tuple[list[float], list[float]]:
    """The CPU time of a put, in ms: beside one watcher, and beside many of other keys."""
    async with limpet.open(url, sweep=False) as store:
        few, many = [], []
        async with Watchers(store, ["one"]):
            for _ in range(rounds):
                few.append(await _put_ms(store))
        async with Watchers(store, [f"other/{number}" for number in range(watchers)]):
            for _ in range(rounds):
                many.append(await _put_ms(store))
        return few, many


async def _put_ms(store: limpet.Store) -> float:
    began = time.process_time()
    for turn in range(PUTS):
        await store.put("written", workload.value(turn))
    # What a change leaves to later turns of the loop belongs to it.
    await asyncio.sleep(0.02)
    return 1000 * (time.process_time() - began) / PUTS


class Watchers:
    """Tasks that watch, and how many events all of them have got."""

    def __init__(self, store: limpet.Store, patterns: Sequence[str]) -> None:
        self.events = 0
        self._unready = len(patterns)
        self._are_ready = asyncio.Event()
        self._tasks = [asyncio.create_task(self._follow(store, pattern)) for pattern in patterns]

    async def _follow(self, store: limpet.Store, pattern: str) -> None:
        async with store.watch(pattern) as watch:
            self._unready -= 1
            if not self._unready:
                self._are_ready.set()
            async for _ in watch:
                self.events += 1

    async def __aenter__(self) -> Watchers:
        await self._are_ready.wait()
        # The last of them begins to wait in its next turn.
        await asyncio.sleep(0.05)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _report_others(run: Run, engine: str, watchers: int, few: list[float], many: list[float]) -> None:
    run.findings.judge("watch", f"{engine}: CPU of a put beside one watcher of another key", "ms", few).lower = True
    line = f"{engine}: CPU of a put beside {watchers:,} watchers of other keys"
    run.findings.judge("watch", line, "ms", many, goals.WATCH_PUT_MS)
    added = [one - statistics.median(few) for one in many]
    run.findings.judge("watch", f"{engine}: what {watchers:,} watchers of other keys add", "ms", added).lower = True


# Watchers of one prefix -------------------------------------------------------


async def _of_one_prefix(url: str, watchers: int, rounds: int) -> list[Hold]:
    async with limpet.open(url, sweep=False) as store, Watchers(store, [f"{PREFIX}*"] * watchers) as following:
        holds = []
        for turn in range(rounds):
            writing = asyncio.create_task(store.put(f"{PREFIX}{turn}", workload.value(turn)))
            holds.append(await _longest_hold(following, watchers * (turn + 1)))
            await writing
        return holds


async def _longest_hold(following: Watchers, events: int) -> Hold:
    """Run in every turn of the loop until all events have come. Returns the longest time between two turns."""
    wall_s = cpu_s = 0.0
    at, cpu = time.perf_counter(), time.thread_time()
    while following.events < events:
        await asyncio.sleep(0)
        now, cpu_now = time.perf_counter(), time.thread_time()
        wall_s, cpu_s = max(wall_s, now - at), max(cpu_s, cpu_now - cpu)
        at, cpu = now, cpu_now
    return Hold(1000 * wall_s, 1000 * cpu_s)


# Another process --------------------------------------------------------------


async def _from_another_process(run: Run, url: str) -> list[float]:
    """How long after the call of a put its event came, in ms, where the writer is another process."""
    puts, took_ms = run.options.scaled(FOREIGN_PUTS, 20), []
    async with limpet.open(url, sweep=False) as store, store.watch(FOREIGN) as watch:
        writer = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "bench.watch", url, str(puts), cwd=ROOT, stdout=subprocess.DEVNULL
        )
        try:
            async for event in watch:
                took_ms.append(1000 * (time.monotonic() - event.value))
                if len(took_ms) == puts:
                    break
        finally:
            await writer.wait()
    return took_ms


async def _write(url: str, puts: int) -> None:
    async with limpet.open(url, sweep=False) as store:
        for _ in range(puts):
            # The clock of the whole machine, so that the other process can compare.
            await store.put(FOREIGN, time.monotonic())
            await asyncio.sleep(FOREIGN_PAUSE_S)


def _report_foreign(run: Run, took_ms: list[float]) -> None:
    run.findings.samples["watch"] = {"foreign_ms": took_ms}
    say("\nA watch in another process, SQLite FULL: from the call of a put to its event")
    row = [brief(percentile(took_ms, percent)) for percent in (50, 90, 99)]
    say(table(("", "p50 ms", "p90 ms", "p99 ms"), [("SQLite", *row)]))
    rounds = [statistics.median(took_ms[first : first + 50]) for first in range(0, len(took_ms), 50)]
    line = "SQLite: a watch in another process, median from the call of a put to its event"
    run.findings.judge("watch", line, "ms", rounds, goals.WATCH_FOREIGN_MS)


if __name__ == "__main__":
    asyncio.run(_write(sys.argv[1], int(sys.argv[2])))
