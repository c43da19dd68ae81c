"""How things are measured: short slices in turn, ratios inside each round, medians over rounds.

A machine that does other work gives any one contender a bad second. So all contenders of a
race run in one process, each for a short slice, one after the other; the order moves on by
one place each round. A ratio is taken between slices of the same round, and the median of
those is the result. Every slice is kept.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

from bench.workload import Job

CALLERS: Final = 64
"""Tasks that call at once, and calls in one transaction of a limit."""

_CHUNK: Final = 16
"""Calls between two looks at the clock, where a call takes less time than the look."""


class Slice(NamedTuple):
    """One contender's turn: how many calls it made, in how many seconds, at what price in CPU time."""

    calls: int
    seconds: float
    cpu_s: float

    @property
    def rate(self) -> float:
        """Calls per second."""
        return self.calls / self.seconds

    @property
    def cpu_us(self) -> float:
        """CPU time of the whole process per call, in microseconds."""
        return 1e6 * self.cpu_s / self.calls


class Lane(NamedTuple):
    """A contender with its work: runs for about so many seconds and returns its slice."""

    name: str
    run: Callable[[float], Slice]


class Race:
    """All slices of all lanes, round by round."""

    def __init__(self, slices: dict[str, list[Slice]]) -> None:
        self.slices = slices

    def rates(self, name: str) -> list[float]:
        """Calls per second in each round."""
        return [piece.rate for piece in self.slices[name]]

    def rate(self, name: str) -> float:
        """Calls per second, the median of the rounds."""
        return statistics.median(self.rates(name))

    def cpu_us(self, name: str) -> float:
        """CPU time of the whole process per call, the median of the rounds."""
        return statistics.median(piece.cpu_us for piece in self.slices[name])

    def ratios(self, name: str, others: Sequence[str]) -> list[float]:
        """In each round, how many times faster than the fastest of the others in that round."""
        rounds = zip(*(self.rates(other) for other in others), strict=True)
        return [own / max(theirs) for own, theirs in zip(self.rates(name), rounds, strict=True)]

    def cpu_ratios(self, name: str, others: Sequence[str]) -> list[float]:
        """The same by CPU time per call: how many times cheaper than the cheapest of the others."""
        rounds = zip(*(self.slices[other] for other in others), strict=True)
        return [
            min(piece.cpu_us for piece in theirs) / own.cpu_us
            for own, theirs in zip(self.slices[name], rounds, strict=True)
        ]

    def fastest(self, names: Sequence[str]) -> str:
        """The fastest of these by median."""
        return max(names, key=self.rate)


def race(lanes: Sequence[Lane], *, rounds: int, slice_s: float) -> Race:
    """Let the lanes run in turn, so many rounds, after one short turn each that does not count."""
    slices: dict[str, list[Slice]] = {lane.name: [] for lane in lanes}
    assert len(slices) == len(lanes), "two lanes of one name"
    for lane in lanes:
        lane.run(slice_s / 4)
    # Not frozen: a collector without old objects examines the new ones again and again, and only contenders
    # that keep a log would pay for that.
    gc.collect()
    for number in range(rounds):
        first = number % len(lanes)
        for lane in (*lanes[first:], *lanes[:first]):
            slices[lane.name].append(lane.run(slice_s))
    return Race(slices)


class Watch:
    """Measures a slice from its making to `stop`."""

    def __init__(self) -> None:
        self._cpu_s = time.process_time()
        self._began = time.perf_counter()

    def stop(self, calls: int) -> Slice:
        """The slice that ends now."""
        return Slice(calls, time.perf_counter() - self._began, time.process_time() - self._cpu_s)


async def in_turn(call: Callable[..., Awaitable[Any]], jobs: Iterator[Job], seconds: float) -> Slice:
    """One caller on an event loop, one call after the other."""
    calls, watch, until = 0, Watch(), time.perf_counter() + seconds
    while calls == 0 or time.perf_counter() < until:
        for job in islice(jobs, _CHUNK):
            await call(*job)
        calls += _CHUNK
    return watch.stop(calls)


async def together(
    call: Callable[..., Awaitable[Any]], jobs: Iterator[Job], seconds: float, callers: int = CALLERS
) -> Slice:
    """Many callers on one event loop, each one call after the other."""
    watch, until = Watch(), time.perf_counter() + seconds

    async def caller() -> int:
        # At least one: on a busy machine a short slice can be over before it has begun.
        calls = 0
        while calls == 0 or time.perf_counter() < until:
            await call(*next(jobs))
            calls += 1
        return calls

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(caller()) for _ in range(callers)]
    return watch.stop(sum(task.result() for task in tasks))


def blocking(call: Callable[..., Any], jobs: Iterator[Job], seconds: float) -> Slice:
    """One caller without a loop, one call after the other."""
    calls, watch, until = 0, Watch(), time.perf_counter() + seconds
    while calls == 0 or time.perf_counter() < until:
        for job in islice(jobs, _CHUNK):
            call(*job)
        calls += _CHUNK
    return watch.stop(calls)


def in_batches(call: Callable[[Sequence[Job]], Any], jobs: Iterator[Job], seconds: float, size: int = CALLERS) -> Slice:
    """What many callers would do, handed over as one list per call."""
    calls, watch, until = 0, Watch(), time.perf_counter() + seconds
    while calls == 0 or time.perf_counter() < until:
        call(list(islice(jobs, size)))
        calls += size
    return watch.stop(calls)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which so many percent lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
