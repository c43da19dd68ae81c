"""What is measured of a store with so many keys, one function a figure."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

import limpet
from bench import workload
from bench.engines import Cost, Meter, Place
from bench.harness import CALLERS, in_turn, together

PAGE: Final = 1_000
BATCH: Final = 128
JOBS: Final = 10_000
COLD_GETS: Final = 2_000
TIMES: Final = 5
"""Of a figure of a single call, how often it is called in a round."""

DUE: Final = 1_000
TTL_S: Final = 0.001
AGES_MS: Final = 10**12


@dataclass
class Subject:
    """A store of one size, and how it is to be measured."""

    place: Place
    store: limpet.Store
    size: int
    slice_s: float
    dice: random.Random = field(default_factory=random.Random)

    def key(self) -> str:
        """The key of any entry."""
        return workload.key(self.dice.randrange(self.size))

    def prefix(self) -> str:
        """What any thousand keys begin with."""
        return workload.prefix(self.dice.randrange(self.size // PAGE))

    @property
    def engine(self) -> Any:
        """The engine of the store, for what a store does only by itself."""
        return self.store._session.engine


async def measure_round(place: Place, url: str, store: limpet.Store, size: int, slice_s: float) -> dict[str, Cost]:
    """Every figure once: in a store that was just opened, and in one that has been open for a while."""
    found: dict[str, Cost] = {}
    meter = Meter(place)
    async with limpet.open(url, sweep=False) as fresh:
        subject = Subject(place, fresh, size, slice_s)
        await fresh.get(subject.key())
        found["open"] = meter.stop()
        for name, measure in _FIRST.items():
            found[name] = await measure(subject)
    subject = Subject(place, store, size, slice_s)
    for name, measure in _LATER.items():
        found[name] = await measure(subject)
    return found


async def _timed(subject: Subject, call: Callable[[], Awaitable[object]], times: int = 1) -> Cost:
    meter = Meter(subject.place)
    for _ in range(times):
        await call()
    return meter.stop().by(times)


# In a store that was just opened ----------------------------------------------


async def _get_cold(subject: Subject) -> Cost:
    keys = iter([subject.key() for _ in range(min(COLD_GETS, subject.size))])
    count = min(COLD_GETS, subject.size)

    async def caller() -> None:
        for key in keys:
            assert await subject.store.get(key) is not None

    meter = Meter(subject.place)
    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return meter.stop().by(count)


async def _first_page(subject: Subject) -> Cost:
    return await _timed(subject, lambda: _keys_of(subject, subject.prefix()))


async def _first_watch(subject: Subject) -> Cost:
    return await _timed(subject, lambda: _watch_once(subject))


# In a store that has been open for a while ------------------------------------


async def _put(subject: Subject) -> Cost:
    meter = Meter(subject.place)
    piece = await in_turn(subject.store.put, _puts(subject), subject.slice_s)
    return meter.stop().by(piece.calls)


async def _put_64(subject: Subject) -> Cost:
    meter = Meter(subject.place)
    piece = await together(subject.store.put, _puts(subject), subject.slice_s)
    return meter.stop().by(piece.calls)


def _puts(subject: Subject) -> workload.Jobs:
    numbers = [subject.dice.randrange(subject.size) for _ in range(JOBS)]
    turn = subject.dice.randrange(900)
    return itertools.cycle([(workload.key(number), workload.value(number, turn)) for number in numbers])


async def _page(subject: Subject) -> Cost:
    async def read() -> None:
        entries = [entry async for entry in subject.store.scan(subject.prefix())]
        assert len(entries) == PAGE

    return await _timed(subject, read, TIMES)


async def _keys(subject: Subject) -> Cost:
    return await _timed(subject, lambda: _keys_of(subject, subject.prefix()), TIMES)


async def _all_keys(subject: Subject) -> Cost:
    return await _timed(subject, lambda: _keys_of(subject, "tenant/"), TIMES)


async def _keys_of(subject: Subject, prefix: str) -> None:
    page = await subject.store.keys(prefix, limit=PAGE)
    assert page.count == PAGE


async def _count(subject: Subject) -> Cost:
    span = limpet.keys.prefix_span("tenant/")

    async def count() -> None:
        assert await subject.engine.count(subject.store.name, span) == subject.size

    return await _timed(subject, count)


async def _status(subject: Subject) -> Cost:
    return await _timed(subject, subject.store.status, TIMES)


async def _watch(subject: Subject) -> Cost:
    return await _timed(subject, lambda: _watch_once(subject), TIMES)


async def _watch_once(subject: Subject) -> None:
    """From joining to the event of a put that is made as soon as the watch has begun."""
    key = subject.key()
    async with subject.store.watch(key) as watch:
        event, _ = await asyncio.gather(anext(watch), subject.store.put(key, workload.value(0)))
        assert event.key == key


async def _trim(subject: Subject) -> Cost:
    """Trim the log by a thousand changes."""
    kept = (await subject.store.status()).log_changes - PAGE
    window = limpet.Window(age_ms=AGES_MS, changes=max(0, kept), size_bytes=AGES_MS, age_ms_min=0)
    dropped = 0

    async def trim() -> None:
        nonlocal dropped
        while count := await subject.engine.trim(subject.store.name, window):
            dropped += count

    cost = await _timed(subject, trim)
    assert dropped >= PAGE, f"{dropped} changes were trimmed"
    return cost


async def _sweep(subject: Subject) -> Cost:
    """End a thousand entries that have expired."""
    store = subject.store
    for first in range(0, DUE, BATCH):
        draft = store.batch()
        for number in range(first, min(first + BATCH, DUE)):
            draft.put(f"due/{number}", workload.value(number), ttl=TTL_S)
        await draft.commit()
    await asyncio.sleep(2 * TTL_S)
    meter = Meter(subject.place)
    assert await store.sweep() >= DUE - BATCH
    return meter.stop()


Measure = Callable[[Subject], Awaitable[Cost]]
_FIRST: Final[dict[str, Measure]] = {"get64": _get_cold, "first_page": _first_page, "first_watch": _first_watch}
_LATER: Final[dict[str, Measure]] = {
    "put": _put,
    "put64": _put_64,
    "page": _page,
    "keys": _keys,
    "all_keys": _all_keys,
    "count": _count,
    "status": _status,
    "watch": _watch,
    "trim": _trim,
    "sweep": _sweep,
}
