"""Histories of many concurrent clients, and whether some order of their operations explains them.

Eight clients use a few keys through several stores, while watches read the changes. Afterwards the
judges of `limpet.conformance.linearizability` decide. ``LIMPET_HISTORIES`` sets how many histories
run on each engine and interface. ``LIMPET_SEED`` repeats the calls of the clients, but not their
timing.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import pytest_asyncio

import limpet
from limpet.conformance.conftest import OpenStore
from limpet.conformance.linearizability import (
    Expected,
    KeyState,
    Kind,
    Operation,
    Recorder,
    check_order,
    check_register,
    check_watch,
)
from limpet.conformance.support import PATIENCE_S, in_thread, next_event
from limpet.errors import Ambiguous, Conflict, TransientError
from limpet.model import ABSENT, PRESENT, Entry, Event, Revision, Version

HISTORIES = int(os.environ.get("LIMPET_HISTORIES") or 20)
CLIENTS = 8
CALLS = 32
KEYS = ("left", "right", "middle")
COUNTER = "count"
END = "end"

# For the async interface, so many clients run in their own thread and loop, as those of another process would.
SEPARATE_CLIENTS = 5

MISSING = object()

each_history = pytest.mark.parametrize("number", range(-(-HISTORIES // 3)))


@each_history
async def test_reads_see_what_was_acknowledged(history: History) -> None:
    """A read sees every commit that was acknowledged before it began.

    Most calls read here, among single writes of all kinds.
    """
    await history.run(get=10, put=3, guarded=3, create=2, delete=2, take=2, add=4, batch=1)


@each_history
async def test_racing_batches_have_an_order(history: History) -> None:
    """Concurrent batches leave a state that some order of them would leave.

    Most calls write two keys here, and many expect something of one of them or of a third.
    """
    await history.run(get=4, put=1, guarded=1, create=1, delete=1, take=1, add=1, batch=8)


@each_history
async def test_watches_deliver_what_races(history: History) -> None:
    """A watch delivers each change once, in revision order.

    Most calls write here, and each of two watches on two stores has to deliver every change.
    """
    await history.run(get=2, put=4, guarded=2, create=2, delete=2, take=2, add=2, batch=2)


async def test_no_read_falls_into_a_batch(open_store: OpenStore, url: str, face: str) -> None:
    """All writes of a batch happen, or none.

    A client that has seen the first write of a batch must see the last.
    """
    ours, theirs = await open_store(clock=limpet.SystemClock()), await open_store(clock=limpet.SystemClock())
    keys = [f"key {number:02}" for number in range(100)]

    async def write(store: limpet.Store) -> None:
        for number in range(1, 81):
            draft = store.batch()
            for key in keys:
                draft = draft.put(key, number)
            await draft.commit()

    async def write_elsewhere() -> None:
        async with limpet.open(url, namespace=ours.name, clock=limpet.SystemClock()) as own:
            await write(own)

    elsewhere = in_thread(lambda: asyncio.run(write_elsewhere())) if face == "async" else write(theirs)
    writing = asyncio.ensure_future(elsewhere)
    torn = []
    while not writing.done():
        first, last = await ours.get(keys[0], 0), await ours.get(keys[-1], 0)
        torn += [(first, last)] if last < first else []
        await asyncio.sleep(0)
    await writing

    assert torn == []


@pytest_asyncio.fixture(loop_scope="module")
async def history(open_store: OpenStore, url: str, face: str, number: int) -> History:
    """A history that has not been run yet."""
    seed = int(os.environ.get("LIMPET_SEED") or random.randrange(2**32)) + number
    stores = [await open_store(clock=limpet.SystemClock()) for _ in range(3)]
    return History(stores, url, face, seed)


@pytest.fixture(autouse=True)
def restless_threads() -> Iterator[None]:
    """Let threads interrupt each other inside an operation, not only between two."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(0.000_02)
    yield
    sys.setswitchinterval(interval_s)


class History:
    """Clients at work on a namespace, and the check of the operations they recorded."""

    def __init__(self, stores: list[limpet.Store], url: str, face: str, seed: int) -> None:
        self.recorder = Recorder()
        self.values = itertools.count(1)
        self._stores = stores
        self._url = url
        self._face = face
        self._seed = seed
        # Clients that first have to open a store would otherwise begin when the others are done.
        self._ready = threading.Barrier(1 + (SEPARATE_CLIENTS if face == "async" else 0), timeout=PATIENCE_S)
        self._started = asyncio.Event()

    async def run(self, **mix: int) -> None:
        """Let all clients make their calls, with these weights of each kind, and fail if a judge finds a violation."""
        first, second, third = self._stores
        async with first.watch() as one, second.watch() as other, asyncio.TaskGroup() as tasks:
            watches = [tasks.create_task(_until_the_end(watch)) for watch in (one, other)]
            clients = [tasks.create_task(self._client(number, mix)) for number in range(CLIENTS)]
            await in_thread(self._ready.wait)
            self._started.set()
            await asyncio.wait(clients)
            last = Client(self, CLIENTS, third, {})
            await last.put(END)
            watched = [await watch for watch in watches]
        for key in (*KEYS, COUNTER, END):
            await last.get(key)
        self._judge(watched, last.known, CLIENTS * CALLS + 6)

    def dice(self, number: int) -> random.Random:
        """The random numbers of a client."""
        return random.Random(self._seed * (CLIENTS + 1) + number)

    async def _client(self, number: int, mix: dict[str, int]) -> None:
        if self._face == "async" and number < SEPARATE_CLIENTS:
            await in_thread(lambda: asyncio.run(self._run_separately(number, mix)))
        else:
            await self._started.wait()
            await Client(self, number, self._stores[number % 3], mix).work()

    async def _run_separately(self, number: int, mix: dict[str, int]) -> None:
        async with limpet.open(self._url, namespace=self._stores[0].name, clock=limpet.SystemClock()) as own:
            self._ready.wait()
            await Client(self, number, own, mix).work()

    def _judge(self, watched: list[list[Event]], final: dict[str, Entry | None], planned: int) -> None:
        operations = self.recorder.operations
        one, other = watched
        verdicts = [
            check_watch(one, operations, final),
            check_watch(other, operations, final),
            check_order(operations, one),
            check_register(operations),
        ]
        answered = len({op.call for op in operations if op.outcome != "unknown"})
        if answered < planned:
            verdicts.append(f"the history is void: only {answered} of {planned} calls were answered")
        if not any(itertools.starmap(_overlap, itertools.pairwise(operations))):
            verdicts.append("the history is void: no two calls overlapped")
        problems = [problem for problem in verdicts if problem is not None]
        if problems:
            pytest.fail(f"LIMPET_SEED={self._seed}\n\n" + "\n\n".join(problems), pytrace=False)


class Client:
    """A client that makes random calls and records the replies."""

    def __init__(self, history: History, number: int, store: limpet.Store, mix: dict[str, int]) -> None:
        self.known: dict[str, Entry | None] = {}
        self._name = f"client {number}"
        self._store = store
        self._recorder = history.recorder
        self._values = history.values
        self._dice = history.dice(number)
        self._mix = mix
        self._calls = itertools.count(1)

    async def work(self) -> None:
        """Make all calls."""
        kinds, weights = list(self._mix), list(self._mix.values())
        for kind in self._dice.choices(kinds, weights, k=CALLS):
            await getattr(self, kind)(self._dice.choice(KEYS))
            await asyncio.sleep(0)

    async def get(self, key: str) -> None:
        """Read."""
        op = await self._call(key, "get")
        self.known[key] = await self._store.entry(key)
        self._recorder.note_success(op, seen=KeyState.of(self.known[key]))

    async def put(self, key: str) -> None:
        """Write without a guard."""
        await self._put(key, None)

    async def create(self, key: str) -> None:
        """Write if the key is absent."""
        await self._put(key, ABSENT)

    async def guarded(self, key: str) -> None:
        """Write if the key is as this client last saw it."""
        await self._put(key, self._expectation(key))

    async def delete(self, key: str) -> None:
        """Delete a key."""
        cause = self._verb_request_id()
        op = await self._call(key, "delete", cause=cause)
        try:
            if cause is not None:
                ended = await self._store.delete(key, request_id=cause)
                self._recorder.note_success(op, seen=KeyState() if ended else None)
            else:
                self._record_delete(op, await self._store.batch().delete(key).commit())
        except (Ambiguous, TransientError) as error:
            self._record_error(error, op)

    async def take(self, key: str) -> None:
        """Delete a key and get its value."""
        cause = self._verb_request_id()
        op = await self._call(key, "delete", cause=cause)
        try:
            if cause is not None:
                value = await self._store.take(key, MISSING, request_id=cause)
                self._recorder.note_success(op, seen=None if value is MISSING else KeyState(value=value))
            else:
                self._record_delete(op, await self._store.batch().take(key).commit())
        except (Ambiguous, TransientError) as error:
            self._record_error(error, op)

    async def add(self, _: str) -> None:
        """Add to the counter."""
        cause, by = self._verb_request_id(), self._dice.randrange(1, 10)
        op = await self._call(COUNTER, "add", by, cause=cause)
        try:
            if cause is not None:
                self._recorder.note_success(
                    op, made=KeyState(value=await self._store.add(COUNTER, by, request_id=cause))
                )
            else:
                commit = await self._store.batch().add(COUNTER, by).commit()
                self._recorder.note_success(op, made=KeyState.of(commit.entries[0]))
        except (Ambiguous, TransientError) as error:
            self._record_error(error, op)

    async def batch(self, _: str) -> None:
        """Write two keys at once, perhaps under a guard."""
        here, there, third = self._dice.sample(KEYS, k=3)
        deletes = self._dice.random() < 0.3
        guarded = self._dice.choice([None, here, there, third])
        expect = {guarded: self._expectation(guarded)} if guarded is not None else {}
        one, two = next(self._values), next(self._values)
        draft = self._store.batch()
        for key, expected in expect.items():
            draft = draft.expect(key, expected)
        draft = draft.put(here, one)
        draft = draft.delete(there) if deletes else draft.put(there, two)
        first = await self._call(here, "put", one, expect=expect.get(here))
        second = await self._call(there, "delete" if deletes else "put", two, expect=expect.get(there), part_of=first)
        parts = [first, second]
        if guarded == third:
            parts.append(await self._call(third, "check", expect=expect[third], part_of=first))
        try:
            commit = await draft.commit()
        except (Conflict, Ambiguous, TransientError) as error:
            self._record_error(error, *parts)
            return
        self._recorder.note_success(first, made=KeyState.of(commit.entries[0]))
        if deletes:
            self._record_delete(second, commit)
        else:
            self._recorder.note_success(second, made=KeyState.of(commit.entries[1]))
        for check in parts[2:]:
            self._recorder.note_success(check)
        self.known[here], self.known[there] = commit.entries

    async def _put(self, key: str, expect: Expected) -> None:
        value = next(self._values)
        op = await self._call(key, "put", value, expect=expect)
        try:
            if expect is ABSENT:
                entry = await self._store.create(key, value)
            else:
                entry = await self._store.put(key, value, expect=limpet.ANY if expect is None else expect)
        except (Conflict, Ambiguous, TransientError) as error:
            self._record_error(error, op)
            return
        self._recorder.note_success(op, made=KeyState.of(entry))
        self.known[key] = entry

    async def _call(
        self,
        key: str,
        kind: Kind,
        argument: int | None = None,
        *,
        expect: Expected = None,
        cause: str | None = None,
        part_of: Operation | None = None,
    ) -> Operation:
        """Record a call, and at random let other tasks run before it is made."""
        op = self._recorder.call(self._name, key, kind, argument, expect=expect, cause=cause, part_of=part_of)
        if self._dice.random() < 0.5:
            await asyncio.sleep(0)
        return op

    def _expectation(self, key: str) -> Expected:
        """A guard that may hold: the entry last seen, or a guess."""
        entry = self.known.get(key)
        if entry is None:
            return self._dice.choice([ABSENT, PRESENT])
        return self._dice.choice([Revision(entry.revision), Revision(entry.revision), Version(entry.version), PRESENT])

    def _verb_request_id(self) -> str | None:
        """A request id, to call a verb that does not return its revision; None to use a batch instead."""
        return None if self._dice.random() < 0.5 else f"{self._name}, call {next(self._calls)}"

    def _record_delete(self, op: Operation, commit: limpet.Commit) -> None:
        """Record a delete, the last write of its commit."""
        ended = commit.ended[-1]
        self._recorder.note_success(op, seen=KeyState.of(ended), revision=None if ended is None else commit.revision)

    def _record_error(self, error: Exception, *parts: Operation) -> None:
        if isinstance(error, Conflict):
            self.known[error.key] = error.current
            found = next(op for op in parts if op.key == error.key)
            self._recorder.note_refusal(found, KeyState.of(error.current))
            parts = tuple(op for op in parts if op is not found)
        for op in parts:
            if isinstance(error, Ambiguous):
                op.cause = error.request_id
            else:
                self._recorder.forget(op)


def _overlap(one: Operation, other: Operation) -> bool:
    return one.call != other.call and one.returned is not None and other.called < one.returned


async def _until_the_end(watch: Any) -> list[Event]:
    events = [await next_event(watch)]
    while events[-1].key != END:
        events.append(await next_event(watch))
    return events
