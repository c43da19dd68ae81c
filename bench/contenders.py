"""Contenders, and the checks that each must pass before it is timed.

Every contender, Limpet included, is called through one ``put`` and one ``get`` of its class, so
that all pay for the same extra call. A contender that does not return the values it was given, or
whose file does not have the stated settings, voids the run. One that cannot be opened at all is
left out, and the report gives the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import limpet
from bench import workload
from bench.harness import CALLERS
from bench.workload import Job

Role = Literal["limpet", "peer", "limit", "floor"]

SAMPLE = 100
"""Values read back from each contender before it is timed."""


def load(module: str) -> Any:
    """A peer's module. Peers are installed for the benchmarks alone, so nothing imports them by name."""
    return importlib.import_module(module)


async def gather_all(call: Callable[[str], Awaitable[Any]], keys: Iterable[str]) -> list[Any]:
    """The results of a call for each key, of some keys at a time."""
    pending, found = iter(keys), []
    while some := list(islice(pending, CALLERS)):
        found += await asyncio.gather(*map(call, some))
    return found


class Contender:
    """A store with coroutines."""

    name: ClassVar[str]
    role: ClassVar[Role] = "peer"
    note: ClassVar[str] = ""
    expects: ClassVar[dict[str, str]] = {}
    """The settings that `settings` must return."""
    keeps_files: ClassVar[bool] = True
    """Whether it writes to files in its folder, and not to a server."""

    async def open(self, folder: Path) -> None:
        """Make an empty store. The folder is for its files alone."""

    async def put(self, key: str, value: Any) -> Any:
        raise NotImplementedError

    async def get(self, key: str) -> Any:
        raise NotImplementedError

    async def fill(self, jobs: Iterable[Job]) -> None:
        """Store all of this, by the fastest way: it is not timed."""
        pending = iter(jobs)
        while some := list(islice(pending, CALLERS)):
            await asyncio.gather(*(self.put(*job) for job in some))

    async def settings(self) -> dict[str, str]:
        """The durability settings, read from its own connection."""
        return {}

    async def close(self) -> None:
        """Close the store and its connections."""


class Writer(Contender):
    """A store that also puts under a guard, and several keys in one step."""

    lacks: ClassVar[frozenset[str]] = frozenset()
    """The verbs in which it does not race."""

    async def load(self, keys: Iterable[str]) -> int:
        """Read what the guards must expect. Returns how many writes the store has counted."""
        raise NotImplementedError

    async def guarded(self, key: str, value: Any) -> None:
        """Put over what was last put or loaded. An error when something else is there."""
        raise NotImplementedError

    async def batch(self, jobs: Sequence[Job]) -> None:
        """Put all of these, each under its own key."""
        raise NotImplementedError


class LimpetWriter(Writer):
    """Limpet on any engine. Who opens it sets `store`."""

    role: ClassVar[Role] = "limpet"
    store: limpet.Store

    async def put(self, key: str, value: Any) -> None:
        await self.store.put(key, value)

    async def get(self, key: str) -> Any:
        return await self.store.get(key)

    async def load(self, keys: Iterable[str]) -> int:
        entries = await gather_all(self.store.entry, keys)
        self._entries = {entry.key: entry for entry in entries}
        return sum(entry.version for entry in self._entries.values())

    async def guarded(self, key: str, value: Any) -> None:
        self._entries[key] = await self.store.put(key, value, expect=self._entries[key])

    async def batch(self, jobs: Sequence[Job]) -> None:
        draft = self.store.batch()
        for key, value in jobs:
            draft.put(key, value)
        await draft.commit()

    async def close(self) -> None:
        await self.store.close()


class BlockingContender:
    """A store without coroutines."""

    name: ClassVar[str]
    role: ClassVar[Role] = "peer"
    note: ClassVar[str] = ""
    expects: ClassVar[dict[str, str]] = {}
    keeps_files: ClassVar[bool] = True

    def open(self, folder: Path) -> None:
        """Make an empty store. The folder is for its files alone."""

    def put(self, key: str, value: Any) -> Any:
        raise NotImplementedError

    def get(self, key: str) -> Any:
        raise NotImplementedError

    def fill(self, jobs: Iterable[Job]) -> None:
        """Store all of this, by the fastest way: it is not timed."""
        for job in jobs:
            self.put(*job)

    def settings(self) -> dict[str, str]:
        """The durability settings, read from its own connection."""
        return {}

    def close(self) -> None:
        """Close the store and its connections."""


AnyContender = Contender | BlockingContender


class Check(NamedTuple):
    """The results of checking a contender."""

    contender: str
    role: Role
    settings: dict[str, str]
    equal: int
    """Values that came back as they were put, of `SAMPLE`."""
    isolates: str
    """Whether the store keeps its own copy of a value: ``yes``, or with which callers it shares an object."""
    note: str


class Void(Exception):
    """A contender does not do what its figures would claim; the run is void."""


class Setup:
    """Opens contenders, fills them and checks them."""

    def __init__(self, runner: asyncio.Runner, folder: Path) -> None:
        self.checks: list[Check] = []
        self.absent: dict[str, str] = {}
        self._runner = runner
        self._folder = folder

    @contextlib.contextmanager
    def open_all(self, contenders: Sequence[AnyContender], keys: int) -> Iterator[list[AnyContender]]:
        """The contenders that could be opened, each holding so many keys."""
        present: list[AnyContender] = []
        try:
            for contender in contenders:
                folder = self._folder / f"{len(present)}-{'-'.join(contender.name.lower().split())}"
                folder.mkdir(parents=True, exist_ok=True)
                try:
                    self.call(contender.open, folder)
                except Exception as error:
                    if contender.role == "limpet":
                        raise
                    self.absent[contender.name] = f"{type(error).__name__}: {error}"
                    continue
                present.append(contender)
                self.call(contender.fill, workload.in_order(keys))
                self.checks.append(self._check(contender, keys))
                if contender.expects and contender.keeps_files:
                    self._check_that_a_put_is_written(contender, folder)
            yield present
        finally:
            for contender in present:
                self.call(contender.close)

    def call(self, method: Any, *args: Any) -> Any:
        """Call a method of either kind: on the loop, or where no loop runs."""
        result = method(*args)
        return self._runner.run(result) if inspect.iscoroutine(result) else result

    def _check(self, contender: AnyContender, keys: int) -> Check:
        settings = self.call(contender.settings)
        for name, expected in contender.expects.items():
            if settings.get(name) != expected:
                raise Void(f"{contender.name}: {name} is {settings.get(name)!r}, and should be {expected!r}")
        step = max(1, keys // SAMPLE)
        numbers = range(0, keys, step)[:SAMPLE]
        equal = sum(self.call(contender.get, workload.key(number)) == workload.value(number) for number in numbers)
        if equal != len(numbers):
            raise Void(f"{contender.name}: only {equal} of {len(numbers)} values came back as they were put")
        return Check(contender.name, contender.role, settings, equal, self._isolation(contender), contender.note)

    def _check_that_a_put_is_written(self, contender: AnyContender, folder: Path) -> None:
        """Check that a put has written to a file when it returns: a sync setting is worth nothing otherwise."""
        before = _state_of(folder)
        # Longer than the resolution of the file system's clock.
        time.sleep(0.02)
        self.call(contender.put, workload.key(0), workload.value(0, turn=1))
        if _state_of(folder) == before:
            raise Void(f"{contender.name}: a put has returned and left no trace in {folder}")
        self.call(contender.put, workload.key(0), workload.value(0))

    def _isolation(self, contender: AnyContender) -> str:
        """Change the object that was put and the one that was read, and check whether the stored value changes."""
        key, given = workload.key(0), workload.value(0)
        self.call(contender.put, key, given)
        given["id"] = "changed by the writer"
        keeps_own = self.call(contender.get, key) == workload.value(0)
        self.call(contender.put, key, workload.value(0))
        self.call(contender.get, key)["id"] = "changed by a reader"
        hands_out_copies = self.call(contender.get, key) == workload.value(0)
        self.call(contender.put, key, workload.value(0))
        if keeps_own and hands_out_copies:
            return "yes"
        if keeps_own or hands_out_copies:
            return "shares with its readers" if keeps_own else "shares with its writers"
        return "no"


def _state_of(folder: Path) -> dict[Path, tuple[int, int]]:
    found = {path: path.stat() for path in folder.rglob("*")}
    return {path: (status.st_size, status.st_mtime_ns) for path, status in found.items()}
