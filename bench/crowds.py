"""A thousand namespaces in one store, and a thousand callers that wait for a lock, on each engine.

    python -m bench.crowds URL COUNT

prints what a process grows by when it writes to so many namespaces, in bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final

import limpet
from bench import workload
from bench.engines import Cost, Meter, Place
from bench.footprint import STATM, resident_bytes
from bench.run import Run, say
from bench.words import table

MANY: Final = 1_000
AT_ONCE: Final = 16
IDLE_S: Final = 10.0
HANDOVERS: Final = 20
TTL_S: Final = 60.0
WAIT_S: Final = 300.0
OF_A_SECOND: Final = ", CPU of a second"


def measure_on(run: Run, place: Place) -> None:
    """All of it on one engine, as lines of the group ``growth``."""
    count = run.options.scaled(MANY, 30)
    idle_s = 0.5 if run.options.quick else IDLE_S
    namespaces = run.runner.run(_namespaces(place, count, idle_s))
    locks = run.runner.run(_locks(place, count, idle_s))
    costs = {f"{count:,} namespaces: {what}": cost for what, cost in namespaces.items()}
    costs |= {f"{count:,} waiting for {what}": cost for what, cost in locks.items()}
    for what, cost in costs.items():
        # By the clock, a second of idling takes a second.
        figure = cost.cpu_s if what.endswith(OF_A_SECOND) else cost.wall_s
        line = run.findings.judge("growth", f"{place.title}, {what}", "ms", [1000 * figure])
        line.lower, line.by_cpu = True, 1000 * cost.cpu_s
    if STATM.exists():
        grown_mb = int(run.child("bench.crowds", place.url_of("namespaces"), str(count))) / 1e6
        what = f"{place.title}, {count:,} namespaces: memory of a process that has written to each"
        run.findings.judge("growth", what, "MB", [grown_mb]).lower = True
    say(f"\n{place.title}")
    rows = [(what, f"{1000 * cost.wall_s:,.2f} ms", f"{1000 * cost.cpu_s:,.2f} ms") for what, cost in costs.items()]
    say(table(("", "wall time", "CPU time"), rows))


# Namespaces -------------------------------------------------------------------


async def _namespaces(place: Place, count: int, idle_s: float) -> dict[str, Cost]:
    url, names = place.url_of("namespaces"), _names(count)
    found: dict[str, Cost] = {}
    async with limpet.open(url, sweep=False) as store:
        await store.put(workload.key(0), workload.value(0))
        for which in ("first", "next"):
            meter = Meter(place)
            await _put_in_each(store, names)
            found[f"{which} put in each"] = meter.stop().by(count)
        found["namespaces()"] = await _timed(place, store.namespaces)
        assert len(await store.namespaces()) >= count
    found["open and status of one"] = await _timed(place, lambda: _open_one(url, names[-1]))
    async with limpet.open(url) as store:
        meter = Meter(place)
        await asyncio.sleep(idle_s)
        idle_cpu_s = meter.stop().cpu_s
        for name in names:
            store.namespace(name)
        meter = Meter(place)
        await asyncio.sleep(idle_s)
        wall_s, cpu_s = meter.stop()
        cost = Cost(wall_s, cpu_s - idle_cpu_s).by(max(1, int(idle_s)))
        found[f"sweeping all while idle{OF_A_SECOND}"] = cost
    return found


def _names(count: int) -> list[str]:
    return [f"tenant-{number:06}" for number in range(count)]


async def _put_in_each(store: limpet.Store, names: Sequence[str]) -> None:
    """One put in each namespace, a few at a time."""
    waiting = iter(names)

    async def caller() -> None:
        for name in waiting:
            await store.namespace(name).put(workload.key(0), workload.value(0))

    await asyncio.gather(*(caller() for _ in range(AT_ONCE)))


async def _open_one(url: str, name: str) -> None:
    async with limpet.open(url, namespace=name, sweep=False) as store:
        assert (await store.status()).keys == 1


async def _timed(place: Place, call: Callable[[], Awaitable[object]]) -> Cost:
    meter = Meter(place)
    await call()
    return meter.stop()


# Locks ------------------------------------------------------------------------


async def _locks(place: Place, count: int, idle_s: float) -> dict[str, Cost]:
    """Callers that wait for one lock, and as many that wait for a lock each."""
    found: dict[str, Cost] = {}
    url = place.url_of("locks")
    async with limpet.open(url, sweep=False) as holder, limpet.open(url, sweep=False) as store:
        async with _waiting(holder, store, ["one"] * count) as given:
            found[f"one lock{OF_A_SECOND}"] = await _idle(place, idle_s)
            found["one lock, until the next has it"] = await _hand_over(place, given, min(HANDOVERS, count))
        names = [f"lock/{number}" for number in range(count)]
        async with _waiting(holder, store, names):
            found[f"a lock each{OF_A_SECOND}"] = await _idle(place, idle_s)
    return found


@contextlib.asynccontextmanager
async def _waiting(
    holder: limpet.Store, store: limpet.Store, names: Sequence[str]
) -> AsyncIterator[asyncio.Queue[limpet.Lock]]:
    """A caller that waits for each of these names, all of which are held. Those that got theirs come in the queue."""
    held = [await holder.lock(name, ttl=TTL_S + WAIT_S).acquire() for name in dict.fromkeys(names)]
    given: asyncio.Queue[limpet.Lock] = asyncio.Queue()

    async def wait(name: str) -> None:
        given.put_nowait(await store.lock(name, ttl=TTL_S, wait=WAIT_S).acquire())

    waiters = [asyncio.create_task(wait(name)) for name in names]
    try:
        await asyncio.sleep(1)
        # The first of them has been held until now.
        given.put_nowait(held[0])
        yield given
    finally:
        for waiter in waiters:
            waiter.cancel()
        await asyncio.gather(*waiters, return_exceptions=True)


async def _idle(place: Place, idle_s: float) -> Cost:
    meter = Meter(place)
    await asyncio.sleep(idle_s)
    return meter.stop().by(max(1, int(idle_s)))


async def _hand_over(place: Place, given: asyncio.Queue[limpet.Lock], times: int) -> Cost:
    """From a release until the next caller has the lock: the median."""
    meter, took = Meter(place), []
    for _ in range(times):
        lock = given.get_nowait()
        began = time.perf_counter()
        await lock.release()
        given.put_nowait(await given.get())
        took.append(time.perf_counter() - began)
    return Cost(statistics.median(took), meter.stop().by(times).cpu_s)


# In a separate process --------------------------------------------------------


async def _grown_by(url: str, count: int) -> int:
    async with limpet.open(url, sweep=False) as store:
        await store.put(workload.key(0), workload.value(0))
        gc.collect()
        before = resident_bytes()
        await _put_in_each(store, _names(count))
        gc.collect()
        return resident_bytes() - before


if __name__ == "__main__":
    print(asyncio.run(_grown_by(sys.argv[1], int(sys.argv[2]))))
