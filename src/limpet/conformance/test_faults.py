"""Connections that break after a commit was applied, and before its reply arrives.

The author of an engine gives the suite a way to cut its connections, by the hook `pytest_limpet_line`. An engine
without a connection cannot lose a reply; there the store loses it, and what is judged is how the engine answers the
retry.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import msgspec
import pytest

import limpet
from limpet.conformance.conftest import OpenStore
from limpet.conformance.plugin import Line
from limpet.conformance.support import PATIENCE_S
from limpet.conformance.test_primitives import Primitives, put
from limpet.errors import Ambiguous, TransientError, Unavailable
from limpet.model import Add, Batch, Commit, Delete, Entry, FieldEquals, Guard, Patch, Refusal, Revision, Write

T = TypeVar("T")

WRITERS: Final = 4
ROUNDS: Final = 6
CUTS: Final = 10

# Commits -----------------------------------------------------------------------

Request = Callable[[Entry], tuple[tuple[Guard, ...], tuple[Write, ...]]]

REQUESTS: dict[str, Request] = {
    "put with a guard": lambda a: ((Guard("a", Revision(a.revision)),), (put("a", "new"),)),
    "add": lambda a: ((), (Add("n", 3),)),
    "batch": lambda a: ((), (put("b"), Add("n", 3), Delete("a", take=True))),
    "delete": lambda a: ((), (Delete("a"),)),
    "swap": lambda a: ((Guard("r", FieldEquals("state", b"1")),), (Patch("r", {"state": b"2"}),)),
}


# A writer's name is logged with the name of the request, by which its retry finds it.
@pytest.mark.parametrize(
    ("request_of", "writer"), [*((name, None) for name in REQUESTS), ("put with a guard", "ann"), ("batch", "ann")]
)
async def test_a_lost_reply_is_not_taken_for_a_lost_request(
    line: Line, open_through: OpenStore, request_of: str, writer: str | None
) -> None:
    """A commit whose reply was lost raises Ambiguous; where Unavailable is raised, nothing was applied."""
    store = await open_through()
    primitives = Primitives(store)
    (a, *_) = (await primitives.must_commit(put("a", "old"), put("n", 5), Patch("r", {"state": b"1"}))).entries
    assert a is not None
    guards, writes = REQUESTS[request_of](a)
    before = await primitives.status()
    batch, line_cuts = Batch(guards, writes, writer=writer), line.cuts

    line.cut()
    try:
        outcome = await primitives.run(primitives.engine.commit(primitives.name, batch))
    except Ambiguous as unknown:
        outcome = await settle(primitives, batch, unknown)
    except Unavailable:
        after = await patiently(primitives.status)
        pytest.fail(
            f"the engine raised Unavailable, and the commit was applied: revision {before.revision} became "
            f"{after.revision}; raise Ambiguous, with the request id and the revision from before"
        )

    assert line.cuts == line_cuts + 1
    assert isinstance(outcome, Commit)
    found = await primitives.read(*(write.key for write in writes))
    assert [entry and (entry.version, entry.revision) for entry in found] == [
        entry and (entry.version, entry.revision) for entry in outcome.entries
    ]
    log = await primitives.log()
    assert sum(change.revision > before.revision for change in log) == len(writes)
    assert len({change.cause for change in log if change.revision > before.revision}) == 1
    assert {change.writer for change in log if change.revision > before.revision} == {writer}


async def settle(primitives: Primitives, batch: Batch, unknown: Ambiguous) -> Commit | Refusal:
    """Retry a commit as a store does, until it is answered."""
    retry = msgspec.structs.replace(batch, request_id=unknown.request_id, retry_since=unknown.since)
    return await patiently(lambda: primitives.run(primitives.engine.commit(primitives.name, retry)))


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """Call again while the connection is down."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await call()
            except (TransientError, Ambiguous):
                await asyncio.sleep(0.01)


# Many writes -------------------------------------------------------------------


class Writer:
    """Writes of every kind by one caller, and what it may expect of them.

    Attributes:
        done: How many writes of a kind have returned their result.
        unknown: How many ended as Ambiguous, and may have been applied.
    """

    def __init__(self, store: limpet.Store, number: int) -> None:
        self._store = store
        self._own = f"writer-{number}"
        self._round = 0
        self._entry: Entry | None = None
        self._state = 0
        self.done: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()

    async def prepare(self) -> None:
        await self._store.record(f"{self._own}/record").put({"state": 0})

    async def write_all(self) -> None:
        """Do one write of each kind, in turns."""
        self._round += 1
        await self._call("add", self._store.add("add"))
        draft = self._store.batch().add("batch", 1).put(f"{self._own}/batch", self._round)
        await self._call("batch", draft.commit())
        await self._call("append", self._store.append("log/", [self._own, self._round]))
        await self._put_with_guard()
        await self._add_with_id()
        await self._swap()
        await self._delete()

    async def _put_with_guard(self) -> None:
        """A second attempt of a put that was applied must not fail on its own guard."""
        key = f"{self._own}/guarded"
        entry = await self._call("guarded", self._store.put(key, self._round, expect=self._entry))
        if entry is None:
            entry = await patiently(lambda: self._store.entry(key))
        self._entry = entry

    async def _add_with_id(self) -> None:
        """The caller itself repeats a request that has an id, until it is answered."""
        request_id = f"{self._own}/{self._round}"
        await patiently(lambda: self._store.add("named", request_id=request_id))
        self.done["named"] += 1

    async def _swap(self) -> None:
        record = self._store.record(f"{self._own}/record")
        swapped = await self._call("swap", record.swap("state", self._state, self._state + 1))
        if swapped is None:
            self._state = await patiently(lambda: record.get("state"))
        else:
            assert swapped, "a swap was refused by its own first attempt"
            self._state += 1

    async def _delete(self) -> None:
        key = f"{self._own}/short/{self._round}"
        if await self._call("put", self._store.put(key, 1)) is not None:
            existed = await self._call("delete", self._store.delete(key))
            assert existed is not False, "a delete found its own first attempt"

    async def _call(self, kind: str, call: Awaitable[T]) -> T | None:
        """The result of a write; None if it has none. Any other error is a failure."""
        try:
            result = await call
        except Ambiguous as unknown:
            request_id = unknown.request_id
            assert request_id is not None
            commit = await patiently(lambda: self._store.outcome(request_id))
            (self.unknown if commit is None else self.done)[kind] += 1
            return None
        except Unavailable:
            return None
        self.done[kind] += 1
        return result


async def test_each_write_is_applied_once_while_connections_break(line: Line, open_through: OpenStore) -> None:
    """When connections break, a write is applied at most once, and exactly once if its result is returned."""
    await write_while_connections_break(line, await open_through(), WRITERS, CUTS)


@pytest.mark.slow
async def test_each_write_is_applied_once_while_many_connections_break(line: Line, open_through: OpenStore) -> None:
    """When connections break, a write is applied at most once, and exactly once if its result is returned."""
    await write_while_connections_break(line, await open_through(), 2 * WRITERS, 10 * CUTS)


async def write_while_connections_break(line: Line, store: limpet.Store, callers: int, cuts: int) -> None:
    """Let several callers write until so many connections were cut, and compare what is there with their results."""
    writers = [Writer(store, number) for number in range(callers)]
    for writer in writers:
        await writer.prepare()
    breaking = asyncio.create_task(break_connections(line, cuts))

    async def write(writer: Writer) -> None:
        rounds = 0
        while rounds < ROUNDS or not breaking.done():
            await writer.write_all()
            rounds += 1

    try:
        async with asyncio.timeout(2 * PATIENCE_S):
            await asyncio.gather(breaking, *map(write, writers))
    finally:
        breaking.cancel()

    done = sum((writer.done for writer in writers), Counter())
    unknown = sum((writer.unknown for writer in writers), Counter())
    for name in ("add", "batch", "named"):
        found = await patiently(lambda name=name: store.get(name))  # type: ignore[misc]
        assert done[name] <= found <= done[name] + unknown[name], f"{name}: {done[name]} done, {unknown[name]} unknown"
    appended = [entry async for entry in store.scan("log/")]
    assert done["append"] <= len(appended) <= done["append"] + unknown["append"]
    assert [entry.revision for entry in appended] == sorted(entry.revision for entry in appended)
    assert len({str(entry.value) for entry in appended}) == len(appended)
    for number, writer in enumerate(writers):
        guarded = await patiently(lambda number=number: store.entry(f"writer-{number}/guarded"))  # type: ignore[misc]
        version = 0 if guarded is None else guarded.version
        assert writer.done["guarded"] <= version <= writer.done["guarded"] + writer.unknown["guarded"]
    await assert_no_cause_twice(Primitives(store))


async def break_connections(line: Line, cuts: int) -> None:
    """Cut so many connections, each at the first commit after a random moment."""
    dice = random.Random(13)
    for _ in range(cuts):
        await asyncio.sleep(dice.uniform(0.01, 0.08))
        before = line.cuts
        line.cut()
        while line.cuts == before:  # noqa: ASYNC110 - a commit cuts it, perhaps on another thread
            await asyncio.sleep(0.001)


async def assert_no_cause_twice(primitives: Primitives) -> None:
    """Fail if a request has made the changes of two commits."""
    commits: defaultdict[str | None, set[int]] = defaultdict(set)
    for change in await primitives.log():
        commits[change.cause].add(change.commit)
    assert {cause for cause, found in commits.items() if len(found) > 1} - {None} == set()


# Long gaps ---------------------------------------------------------------------


@pytest.mark.parametrize("where", ["before it", "after it"])
async def test_a_retry_finds_its_first_attempt_among_many_changes(open_store: OpenStore, where: str) -> None:
    """A retry finds its first result also behind thousands of other changes."""
    primitives = Primitives(await open_store(sweep=False))
    await primitives.must_commit(put("n", 1))
    since = (await primitives.status()).revision
    writes = (Add("n", 5), Patch("r", {"x": b"1"}))

    if where == "before it":
        await write_many(primitives)
    first = await primitives.must_commit(*writes, request_id="request-1")
    if where == "after it":
        await write_many(primitives)
    again = await primitives.must_commit(*writes, request_id="request-1", retry_since=since)

    assert again.replayed
    assert (again.revision, again.entries) == (first.revision, first.entries)
    assert await primitives.read("n") == [first.entries[0]]


async def write_many(primitives: Primitives) -> None:
    """Make 1,100 changes of other keys."""
    for start in range(0, 1100, 100):
        await primitives.must_commit(*(put(f"k{number}") for number in range(start, start + 100)))
