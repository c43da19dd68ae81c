"""Several processes that write the same keys: how much together, how evenly, and how long one call waits.

Each process has opened the store for itself and calls it from a few tasks. All begin at one moment. A process that
hardly gets its turn beside the others is a fault that the sum of all does not show, so the slowest is compared with
the fastest. Afterwards the keys are read: what they hold, and their versions, must count every write that was
acknowledged, and no other. If they do not, the run is void.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple

import limpet
from bench import goals
from bench.contenders import Void
from bench.engines import ENGINES, serve
from bench.run import Run, say
from bench.words import brief, table

VERBS: Final = ("add", "set", "swap", "guarded put", "update")
STAGES: Final = (1, 4, 8)
"""Processes of each stage. Those of the stage before go on."""

CALLERS: Final = 4
KEYS: Final = 100
ROUNDS: Final = 2
ROUND_S: Final = 0.75
"""Long enough that a process which waits for its turn can still get it."""

QUICK_S: Final = 0.1
AHEAD_S: Final = 0.02
"""From the request to begin until the common moment."""

REPLY_S: Final = 120.0
END_S: Final = 10.0
NOTE: Final = "x" * 180


class Cell(NamedTuple):
    """What is measured at one time: a verb, so many processes, so many keys."""

    verb: str
    processes: int
    keys: int
    round: int = 0

    def names(self) -> list[str]:
        """Keys that no other cell uses."""
        place = f"hot/{'-'.join(self.verb.split())}/{self.processes}/{self.keys}/{self.round}"
        return [f"{place}/{number}" for number in range(self.keys)]

    def title(self, engine: str) -> str:
        who = "one process" if self.processes == 1 else f"{self.processes} processes"
        return f"{engine} {self.verb}, {who} on {'one key' if self.keys == 1 else f'{self.keys} keys'}"


class Share(NamedTuple):
    """What one process did."""

    done: int
    """Calls that wrote."""
    in_time: int
    """Those of them that returned before the end of the round."""
    lost: int
    """Calls that wrote nothing because another writer was first."""
    longest_s: float


class Failure(NamedTuple):
    """An error of a process, in words."""

    words: str


def measure(run: Run) -> None:
    for name in run.options.engines or ENGINES:
        stages = STAGES if name != "memory" else STAGES[:1]
        with serve(run, name, "hot") as place, Processes(place.url_of("hot")) as processes:
            found = _shares(run, place.title, processes, stages)
        _report(run, place.title, found)


def cells(processes: int) -> list[Cell]:
    """Every verb on one key; on many keys only by the most processes."""
    counts = (1, KEYS) if processes == STAGES[-1] else (1,)
    return [Cell(verb, processes, keys) for keys in counts for verb in VERBS]


def _shares(run: Run, engine: str, processes: Processes, stages: Sequence[int]) -> dict[Cell, list[list[Share]]]:
    """By cell and round, the share of each process."""
    seconds = QUICK_S if run.options.quick else ROUND_S
    found: dict[Cell, list[list[Share]]] = {}
    for count in stages:
        processes.grow(count)
        for number in range(run.options.scaled(ROUNDS, 1)):
            for cell in cells(count):
                shares = _measure_cell(engine, processes, cell._replace(round=number), seconds)
                found.setdefault(cell, []).append(shares)
    return found


def _measure_cell(engine: str, processes: Processes, cell: Cell, seconds: float) -> list[Share]:
    processes.request(1, "fill", cell)
    processes.request(cell.processes, "load", cell)
    shares: list[Share] = processes.request(cell.processes, "run", time.monotonic() + AHEAD_S, seconds)
    done = sum(share.done for share in shares)
    ((counted, written),) = processes.request(1, "count", cell)
    if not done == counted == written:
        raise Void(
            f"{cell.title(engine)}: {done} writes were acknowledged, the values count {counted}, the versions {written}"
        )
    return shares


# The report -------------------------------------------------------------------


def _report(run: Run, engine: str, found: dict[Cell, list[list[Share]]]) -> None:
    seconds = QUICK_S if run.options.quick else ROUND_S
    rows = []
    for cell, rounds in found.items():
        what = cell.title(engine)
        counts = [[share.in_time for share in shares] for shares in rounds]
        rates = [sum(each) / seconds for each in counts]
        ratios = [min(each) / max(1, *each) for each in counts]
        waits_ms = [1000 * max(share.longest_s for share in shares) for shares in rounds]
        lost = sum(share.lost for shares in rounds for share in shares) / max(1, sum(map(sum, counts)))
        run.findings.samples.setdefault("hot", {})[what] = {
            "rates": rates,
            "counts": counts,
            "ratios": ratios,
            "waits_ms": waits_ms,
            "lost": lost,
        }
        run.findings.judge("hot", what, "/s", rates)
        if cell.processes > 1:
            run.findings.judge("hot", f"{what}: slowest of fastest", "of", ratios, goals.HOT_SLOWEST)
        run.findings.judge("hot", f"{what}: longest wait", "ms", waits_ms).lower = True
        who = (brief(min(map(min, counts))), brief(max(map(max, counts))), brief(statistics.median(ratios)))
        rows.append((what, brief(statistics.median(rates)), *who, brief(max(waits_ms)), brief(lost)))
    say(f"\n{engine}, {CALLERS} callers in each process")
    head = ("", "writes/s", "slowest", "fastest", "slowest of fastest", "longest wait ms", "lost a write")
    say(table(head, rows))


# The processes ----------------------------------------------------------------


class Processes:
    """Processes on one store. They get requests by pipes and are ended by their handles."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._spawn = multiprocessing.get_context("spawn")
        self._members: list[tuple[Any, Connection]] = []

    def __enter__(self) -> Processes:
        return self

    def grow(self, count: int) -> None:
        """Start more, until there are so many, and wait for all of them."""
        for number in range(len(self._members), count):
            ours, theirs = self._spawn.Pipe()
            process = self._spawn.Process(target=_serve, args=(theirs, self._url, number), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))
        self.request(count, "warm_up")

    def request(self, count: int, verb: str, *arguments: Any) -> list[Any]:
        """Send a request to the first so many. Returns their replies."""
        pipes = [pipe for _, pipe in self._members[:count]]
        for pipe in pipes:
            pipe.send((verb, arguments))
        replies = []
        for number, pipe in enumerate(pipes):
            if not pipe.poll(REPLY_S):
                raise Void(f"process {number} has not answered {verb!r} for {REPLY_S:.0f} s")
            try:
                reply = pipe.recv()
            except EOFError:
                raise Void(f"process {number} has ended before it answered {verb!r}") from None
            if isinstance(reply, Failure):
                raise Void(f"process {number} failed to {verb}: {reply.words}")
            replies.append(reply)
        return replies

    def __exit__(self, *_: object) -> None:
        for _process, pipe in self._members:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process, _pipe in self._members:
            process.join(END_S)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(pipe: Connection, url: str, number: int) -> None:
    """The whole life of a process."""
    # The pipe ends with the process at its other end.
    with contextlib.suppress(EOFError):
        asyncio.run(_answer_all(pipe, url, number))


async def _answer_all(pipe: Connection, url: str, number: int) -> None:
    async with limpet.open(url, sweep=False) as store:
        worker = Worker(store, number)
        while (request := await asyncio.to_thread(pipe.recv)) is not None:
            verb, arguments = request
            try:
                reply = await getattr(worker, verb)(*arguments)
            except Exception as error:
                reply = Failure(f"{type(error).__name__}: {error}")
            pipe.send(reply)


class Worker:
    """The requests that a process answers."""

    def __init__(self, store: limpet.Store, number: int) -> None:
        self._store = store
        self._number = number
        self._callers: list[Caller] = []

    async def warm_up(self) -> None:
        """Open all connections, on keys that nothing else uses."""
        await asyncio.gather(*(self._store.add(f"warm/{self._number}/{number}") for number in range(CALLERS)))

    async def fill(self, cell: Cell) -> None:
        """Give each key its first version, which counts nothing."""
        first: dict[str, object] = {"add": 0, "set": limpet.Fields(n=0), "swap": limpet.Fields(n=0)}
        value = first.get(cell.verb, {"n": 0, "note": NOTE})
        await asyncio.gather(*(self._store.put(key, value) for key in cell.names()))

    async def load(self, cell: Cell) -> None:
        """Read the keys, so that a first guard can hold."""
        entries = await self._entries(cell)
        self._callers = [
            Caller(self._store, cell.verb, f"{self._number}-{number}", entries) for number in range(CALLERS)
        ]

    async def run(self, begins_at: float, seconds: float) -> Share:
        """Let all callers call from that moment on, for so long."""
        await asyncio.sleep(begins_at - time.monotonic())
        await asyncio.gather(*(caller.call_until(begins_at + seconds) for caller in self._callers))
        shares = [caller.share for caller in self._callers]
        done, in_time, lost, longest_s = zip(*shares, strict=True)
        return Share(sum(done), sum(in_time), sum(lost), max(longest_s))

    async def count(self, cell: Cell) -> tuple[int, int]:
        """How many writes the values count, and how many the versions."""
        entries = await self._entries(cell)
        written = sum(entry.version - 1 for entry in entries.values())
        return sum(_count(entry.value) for entry in entries.values()), written

    async def _entries(self, cell: Cell) -> dict[str, limpet.Entry]:
        names = cell.names()
        found = await asyncio.gather(*(self._store.entry(key) for key in names))
        return {key: entry for key, entry in zip(names, found, strict=True) if entry is not None}


def _count(value: Any) -> int:
    """A counter, or the counters among the fields."""
    return value if isinstance(value, int) else sum(each for each in value.values() if isinstance(each, int))


class Caller:
    """Writes one key after the other. Where it lost to another writer, it tries the same key again."""

    def __init__(self, store: limpet.Store, verb: str, name: str, entries: dict[str, limpet.Entry]) -> None:
        self.share = Share(0, 0, 0, 0.0)
        self._store = store
        self._name = name
        self._write: Callable[[str], Any] = getattr(self, f"_{'_'.join(verb.split())}")
        dice = random.Random(name)
        keys = list(entries)
        self._keys = iter(lambda: dice.choice(keys), None)
        self._entries: dict[str, Any] = dict(entries)
        self._numbers = {key: _count(entry.value) for key, entry in entries.items()}
        self._own: Counter[str] = Counter()

    async def call_until(self, end: float) -> None:
        done = in_time = lost = 0
        longest_s = 0.0
        key = next(self._keys)
        while (began := time.monotonic()) < end:
            has_written = await self._write(key)
            now = time.monotonic()
            longest_s = max(longest_s, now - began)
            if has_written:
                done += 1
                in_time += now < end
                key = next(self._keys)
            else:
                lost += 1
        self.share = Share(done, in_time, lost, longest_s)

    async def _add(self, key: str) -> bool:
        await self._store.add(key)
        return True

    async def _set(self, key: str) -> bool:
        """Write a field that no other caller writes."""
        self._own[key] += 1
        await self._store.record(key).set({self._name: self._own[key]})
        return True

    async def _swap(self, key: str) -> bool:
        """Write a field that all callers write, over what was last there."""
        number, record = self._numbers[key], self._store.record(key)
        if await record.swap("n", number, number + 1):
            self._numbers[key] = number + 1
            return True
        self._numbers[key] = await record.get("n")
        return False

    async def _guarded_put(self, key: str) -> bool:
        """Put over the entry that was last returned."""
        expected = self._entries[key]
        value = {"n": expected.value["n"] + 1, "note": NOTE}
        try:
            self._entries[key] = await self._store.put(key, value, expect=expected)
        except limpet.errors.Conflict as conflict:
            self._entries[key] = conflict.current
            return False
        return True

    async def _update(self, key: str) -> bool:
        try:
            await self._store.update(key, lambda value: {**value, "n": value["n"] + 1})
        except limpet.errors.Contention:
            return False
        return True
