"""The work of other processes in the tests of the cache: ``python -m tests.sqlite.cache_scenes SCENE ARGUMENTS``."""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import sqlite3
import stat
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import limpet
import limpet.sync
from limpet.engines.sqlite.cache import Cache
from limpet.model import Entry
from tests.sqlite.cache_support import UNCACHED, by_hand, disable_cache, engine_of
from tests.sqlite.support import Process, in_place
from tests.sqlite.workers import await_moment, in_child, receive, say


class Peer(Process):
    """A scene of this file in another process."""

    module = "tests.sqlite.cache_scenes"

    def do(self, verb: str, *args: object) -> Any:
        self.send([verb, *args])
        return self.receive()


class Party:
    """A user of a store on the file, here or in a peer: runs the verbs that it is sent."""

    def __init__(self, store: limpet.sync.Store, path: str, clock: limpet.ManualClock) -> None:
        self._store, self._path, self._clock = store, path, clock
        # So that the WAL is folded into the file, and begun anew, all the time.
        engine_of(store)._writer.connection.execute("PRAGMA wal_autocheckpoint = 8")

    def do(self, verb: str, *args: Any) -> Any:
        return getattr(self, verb)(*args)

    def put(self, key: str, value: object, ttl: float | None) -> None:
        self._store.put(key, value, ttl=ttl)

    def put_both(self, one: str, other: str, value: object) -> None:
        self._store.batch().put(one, value).put(other, value).commit()

    def add(self, key: str, by: int) -> int:
        return self._store.add(key, by)

    def touch(self, key: str, ttl: float) -> bool:
        return self._store.touch(key, ttl) is not None

    def delete(self, key: str) -> bool:
        return self._store.delete(key)

    def get(self, key: str) -> Any:
        return self._store.get(key)

    def sweep(self) -> int:
        return self._store.sweep()

    def advance(self, seconds: float) -> None:
        self._clock.advance(seconds)

    def by_hand(self, sql: str) -> None:
        with closing(by_hand(Path(self._path))) as connection:
            connection.execute(sql).fetchall()

    def send(self, key: str) -> float:
        """Add to a counter, and say when that was done."""
        self._store.add(key)
        return time.monotonic()


SCENES: dict[str, Callable[..., None]] = {}


def scene(function: Callable[..., None]) -> Callable[..., None]:
    SCENES[function.__name__] = function
    return function


@scene
def obeys(url: str, path: str, caching: str) -> None:
    """Runs the verbs that it is sent until its input ends."""
    if caching == UNCACHED:
        disable_cache()
    clock = limpet.ManualClock()
    with limpet.sync.open(url, sweep=False, clock=clock) as store:
        party = Party(store, path, clock)
        say("ready")
        while (order := receive()) is not None:
            say(party.do(*order))


# Forks --------------------------------------------------------------------------


@scene
def forks_and_takes_turns(url: str, turns: str) -> None:
    """Parent and child write in turns, and each reads what the other wrote. Reports what they read wrongly."""
    with limpet.sync.open(url, sweep=False) as store:
        store.put("turn", -1)
        store.put("absent", -1)
        assert store.get("turn") == -1
        to_parent, to_child = os.pipe(), os.pipe()

        def play(mine: int, theirs: int, parity: int) -> list[Any]:
            wrong = []
            for turn in range(int(turns)):
                if turn % 2 != parity:
                    os.read(mine, 1)
                elif turn % 4 < 2:
                    store.batch().put("turn", turn).delete("absent").commit()
                else:
                    store.batch().put("turn", turn).put("absent", turn).commit()
                seen = [store.get("turn"), store.get("absent")]
                if seen != [turn, None if turn % 4 < 2 else turn]:
                    wrong.append([turn, *seen])
                if turn % 2 == parity:
                    # Not before now: the other goes on at once.
                    os.write(theirs, b"!")
            return wrong

        outcome = in_child(lambda: play(to_child[0], to_parent[1], 1))
        here = play(to_parent[0], to_child[1], 0)
        say([here, outcome()])


@scene
def forks_among_cached_readers(url: str, forks: str) -> None:
    """Forks while threads read the same few keys. Each child writes, and is read by its parent at once."""
    with limpet.sync.open(url, sweep=False) as store:
        # Threads that read from memory alone give way only so often.
        sys.setswitchinterval(0.0002)
        store.put("count", 0)
        stop, problems, reads = threading.Event(), list[Any](), [0] * 4
        known = 0

        def read(index: int) -> None:
            last = 0
            try:
                while not stop.is_set():
                    floor = max(last, known)
                    last = store.get("count")
                    if last < floor or store.get("absent") is not None:
                        problems.append([last, floor])
                    reads[index] += 1
            except BaseException as error:
                problems.append(repr(error))

        threads = [threading.Thread(target=read, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()

        def work() -> list[Any]:
            before = store.get("count")
            return [before, store.add("count"), store.get("count")]

        for turn in range(0, 2 * int(forks), 2):
            time.sleep(0.005)
            if store.add("count") != turn + 1:
                problems.append("an add was lost")
            try:
                seen = in_child(work)()
            except AssertionError as error:
                problems.append(str(error))
                break
            known = turn + 2
            if seen != [turn + 1, turn + 2, turn + 2] or store.get("count") != turn + 2:
                problems.append([turn, seen])
        stop.set()
        for thread in threads:
            thread.join()
        say([problems, min(reads)])


@scene
def forks_as_a_daemon_does(url: str, opens: str) -> None:
    """The child closes all descriptors that it inherited, and perhaps opens files of its own, which get their numbers.

    Reports what it reads and writes then, and how many of its files it lost.
    """
    with limpet.sync.open(url, sweep=False) as store:
        before = store.add("count")

        def work() -> list[Any]:
            for name in os.listdir("/dev/fd"):
                with suppress(OSError):
                    # All but the pipes, through which it reports.
                    if int(name) > 2 and not stat.S_ISFIFO(os.fstat(int(name)).st_mode):
                        os.close(int(name))
            own = [os.open(sys.executable, os.O_RDONLY) for _ in range(int(opens))]
            seen = [store.get("count"), store.add("count"), store.get("count")]
            lost = 0
            for descriptor in own:
                try:
                    lost += not os.path.samestat(os.fstat(descriptor), os.stat(sys.executable))
                except OSError:
                    lost += 1
            return [*seen, lost]

        say([before, *in_child(work)(), store.get("count")])


# Under load ---------------------------------------------------------------------

COUNTERS = 3
PAIR = COUNTERS
WORKERS_MAX = 16


class Ledger:
    """Shared memory in which each worker writes down, in places of its own, what it began and what was acknowledged."""

    SIZE = 2 * WORKERS_MAX * (COUNTERS + 1) * 8

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._numbers = memoryview(mmap.mmap(file.fileno(), self.SIZE)).cast("Q")

    def _slot(self, worker: int, counter: int) -> int:
        return (worker * (COUNTERS + 1) + counter) * 2

    def begin(self, worker: int, counter: int) -> None:
        self._numbers[self._slot(worker, counter)] += 1

    def acknowledge(self, worker: int, counter: int, value: int) -> None:
        self._numbers[self._slot(worker, counter) + 1] = value

    def begun(self, counter: int) -> int:
        return sum(self._numbers[self._slot(worker, counter)] for worker in range(WORKERS_MAX))

    def acknowledged(self, counter: int) -> int:
        return max(self._numbers[self._slot(worker, counter) + 1] for worker in range(WORKERS_MAX))


class Blocking:
    """The sync API with the interface of the other one: its coroutines never suspend."""

    def __init__(self, store: limpet.sync.Store) -> None:
        self._store = store

    async def get(self, key: str, default: object) -> Any:
        return self._store.get(key, default)

    async def add(self, key: str) -> int:
        return self._store.add(key)

    async def add_both(self, one: str, other: str) -> Any:
        return self._store.batch().add(one).add(other).commit()


class Awaiting:
    """The asynchronous API, with the same verbs."""

    def __init__(self, store: limpet.Store) -> None:
        self._store = store
        self.get, self.add = store.get, store.add

    async def add_both(self, one: str, other: str) -> Any:
        return await self._store.batch().add(one).add(other).commit()


class Reader:
    """Reads and adds, and checks that time goes forward."""

    def __init__(self, worker: int, ledger: Ledger, end: float) -> None:
        self._worker, self._ledger, self._end = worker, ledger, end
        self._seen = [0] * (COUNTERS + 1)
        self.problems: list[Any] = []
        self.reads = self.adds = 0

    async def run(self, store: Any) -> None:
        dice = random.Random(self._worker)
        try:
            while time.monotonic() < self._end and len(self.problems) < 10:
                roll = dice.random()
                if roll < 0.03:
                    await self._add(store, dice.randrange(COUNTERS))
                elif roll < 0.04:
                    await self._add_both(store)
                elif roll < 0.9:
                    await self._read(store, f"count/{(counter := dice.randrange(COUNTERS))}", counter)
                else:
                    # Both are added to together, so whatever was read first cannot be ahead.
                    for key in ("left", "right", "left"):
                        await self._read(store, key, PAIR)
        except Exception as error:
            self.problems.append(repr(error))

    async def _read(self, store: Any, key: str, counter: int) -> None:
        floor = max(self._ledger.acknowledged(counter), self._seen[counter])
        value = await store.get(key, 0)
        # Read afterwards, so that all that began before our read are counted.
        ceiling = self._ledger.begun(counter)
        if not floor <= value <= ceiling:
            self.problems.append([key, floor, value, ceiling])
        self._seen[counter] = value
        self.reads += 1

    async def _add(self, store: Any, counter: int) -> None:
        floor = max(self._ledger.acknowledged(counter), self._seen[counter])
        self._ledger.begin(self._worker, counter)
        value = await store.add(f"count/{counter}")
        self._note(f"count/{counter}", counter, floor, value)

    async def _add_both(self, store: Any) -> None:
        floor = max(self._ledger.acknowledged(PAIR), self._seen[PAIR])
        self._ledger.begin(self._worker, PAIR)
        commit = await store.add_both("left", "right")
        left, right = (entry.value for entry in commit.entries)
        if left != right:
            self.problems.append(["pair", left, right])
        self._note("pair", PAIR, floor, left)

    def _note(self, key: str, counter: int, floor: int, value: int) -> None:
        if value <= floor:
            self.problems.append([key, "added", floor, value])
        self._ledger.acknowledge(self._worker, counter, value)
        self._seen[counter] = value
        self.adds += 1


@scene
def counts(url: str, ledger: str, first: str, api: str, seconds: str) -> None:
    """Four readers, in threads or in tasks. Reports what they read wrongly, and how much they read."""
    fetched = 0
    keep = Cache.keep

    def counted(self: Any, header: bytes, entry_id: Any, entry: Entry | None) -> None:
        nonlocal fetched
        fetched += 1
        keep(self, header, entry_id, entry)

    Cache.keep = counted  # type: ignore[method-assign]
    book = Ledger(ledger)

    def readers() -> list[Reader]:
        say("ready")
        await_moment()
        end = time.monotonic() + float(seconds)
        return [Reader(int(first) + index, book, end) for index in range(4)]

    async def in_tasks() -> list[Reader]:
        async with limpet.open(url, sweep=False) as store:
            working = readers()
            await asyncio.gather(*(reader.run(Awaiting(store)) for reader in working))
            return working

    def in_threads() -> list[Reader]:
        with limpet.sync.open(url, sweep=False) as store:
            working = readers()
            threads = [
                threading.Thread(target=lambda reader=reader: in_place(reader.run(Blocking(store))))
                for reader in working
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return working

    done = in_threads() if api == "threads" else asyncio.run(in_tasks())
    problems = [problem for reader in done for problem in reader.problems]
    say([problems, sum(reader.reads for reader in done), sum(reader.adds for reader in done), fetched])


@scene
def disturbs(url: str, path: str, seconds: str) -> None:
    """Folds the WAL into the file, opens and closes stores, writes to other namespaces, all the time."""
    say("ready")
    await_moment()
    end, dice, done = time.monotonic() + float(seconds), random.Random(13), 0
    while time.monotonic() < end:
        time.sleep(0.01)
        match dice.randrange(3):
            case 0:
                with closing(sqlite3.connect(path, isolation_level=None, timeout=0.01)) as connection:
                    mode = dice.choice(("PASSIVE", "FULL", "RESTART", "TRUNCATE"))
                    connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchall()
            case 1:
                with limpet.sync.open(url, sweep=False) as store:
                    store.get("count/0")
            case _:
                with limpet.sync.open(url, sweep=False) as store:
                    store.namespace("beside").add("count/0")
        done += 1
    say(done)


def main() -> None:
    name, *args = sys.argv[1:]
    SCENES[name](*args)


if __name__ == "__main__":
    main()
