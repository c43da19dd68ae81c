"""A commit is decided as `limpet.transition.plan` decides, even if the state changes while it waits.

Another transaction locks the namespace and has changed it, but has not committed. The commit under test begins now, so
its first snapshot is the old state. Then the other one commits. The waiting one must decide what `plan` decides about
the state that the other has left.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from limpet.commit.committer import Committer
from limpet.commit.relative import Moment
from limpet.commit.storage import Stale, Unit
from limpet.engines.postgres import sql
from limpet.engines.postgres.engine import PostgresEngine
from limpet.engines.postgres.rows import entry_from_row
from limpet.engines.postgres.units import encode_units
from limpet.engines.sql_indexes import quoted
from limpet.model import (
    ABSENT,
    KEEP,
    PRESENT,
    Add,
    Batch,
    Change,
    Commit,
    Delete,
    Entry,
    Guard,
    HeldBy,
    Put,
    Refusal,
    Revision,
    Touch,
    Version,
    Write,
)
from limpet.request_ids import new_request_id
from limpet.transition import Plan, plan
from tests.postgres.support import LONG, Spy, batch, blocked_by, connected, open_postgres, put, url_of

ENTRIES = f"SELECT family, {sql.ENTRY_COLUMNS} FROM {{schema}}.limpet_entries WHERE namespace = 'default'"
REVISION = "SELECT revision FROM {schema}.limpet_namespaces WHERE namespace = 'default'"


class State:
    """A namespace at one moment, as `plan` reads it."""

    def __init__(self, revision: int, rows: list[Any]) -> None:
        self.revision = revision
        self._entries: dict[tuple[str, str], Entry] = {(row[0], row[1]): entry_from_row(row[1:]) for row in rows}

    def find(self, family: str, key: str) -> Entry | None:
        return self._entries.get((family, key))

    def decide(self, request: Batch, now_ms: int) -> Commit | Refusal:
        outcome = plan(request, self.find, now_ms=now_ms, revision=self.revision)
        return outcome.commit if isinstance(outcome, Plan) else outcome

    def apply(self, request: Batch, now_ms: int) -> Commit | Refusal:
        """Decide a batch, and change this state by it."""
        outcome = plan(request, self.find, now_ms=now_ms, revision=self.revision)
        if isinstance(outcome, Refusal):
            return outcome
        for change in outcome.changes:
            self.revision = change.revision
            if change.after is None:
                self._entries.pop((change.family, change.key), None)
            else:
                self._entries[change.family, change.key] = change.after
        return outcome.commit


class OneConnection:
    """The storage of a committer that does all on one connection, which another transaction may have begun."""

    def __init__(self, engine: PostgresEngine, connection: Any) -> None:
        self._engine = engine
        self._connection = connection

    async def apply(self, namespace: str, name: str, units: Sequence[Unit]) -> Sequence[Moment | Stale]:
        return await self._engine._apply_on(self._connection, namespace, name, units, encode_units(units))

    async def find_changes(self, namespace: str, after: int, request_id: str) -> list[Change]:
        raise NotImplementedError


@asynccontextmanager
async def held_after(engine: PostgresEngine, other: Batch) -> AsyncIterator[tuple[int, State]]:
    """A transaction that has applied a batch and not committed yet: its backend, and the state that it leaves."""
    async with connected() as connection, connection.transaction():
        (outcome,) = await Committer(OneConnection(engine, connection), "another").commit("default", [other], 0)
        assert isinstance(outcome, Commit)
        revision = await connection.fetchval(engine._sql(REVISION))
        left = State(revision, await connection.fetch(engine._sql(ENTRIES)))
        yield connection.get_server_pid(), left


async def decided_after(engine: PostgresEngine, other: Batch, request: Batch) -> tuple[Commit | Refusal, State]:
    """The result of a batch that waits while another one commits, and the state that the other leaves."""
    async with connected() as observer:
        async with held_after(engine, other) as (pid, left):
            waiting = asyncio.create_task(engine.commit("default", request))
            await blocked_by(observer, pid)
        return await waiting, left


TEST = (Guard("b", Version(1)),)

# The entries before, the batch of the other transaction, the waiting request, and whether it is applied.
CASES: dict[str, tuple[list[Write], Batch, Batch, bool]] = {
    "a guard on a key that is changed": (
        [put("a", 1), put("b", 1)],
        batch(put("b", 2)),
        batch(put("a", 2), guards=TEST),
        False,
    ),
    "a guard on what the change makes of it": (
        [put("a", 1), put("b", 1)],
        batch(put("b", 2)),
        batch(put("a", 2), guards=(Guard("b", Version(2)),)),
        True,
    ),
    "a guard on the revision of a key that is touched": (
        [put("b", 1)],
        batch(Touch("b", 60_000)),
        batch(put("a", 2), guards=(Guard("b", Revision(1)),)),
        False,
    ),
    "a guard on a key that is deleted": ([put("b", 1)], batch(Delete("b")), batch(put("a", 2), guards=TEST), False),
    "a guard on a key that is deleted and comes again": (
        [put("b", 1)],
        batch(Delete("b"), put("c", 1)),
        batch(put("a", 2), guards=(Guard("b", ABSENT), Guard("c", PRESENT))),
        True,
    ),
    "a put of a key that is made": ([], batch(put("a", 1)), batch(put("a", 2)), True),
    "a put of a key that must be absent and is made": (
        [],
        batch(put("a", 1)),
        batch(put("a", 2), guards=(Guard("a", ABSENT),)),
        False,
    ),
    "a put of a key that must be absent and is deleted": (
        [put("a", 1)],
        batch(Delete("a")),
        batch(put("a", 2), guards=(Guard("a", ABSENT),)),
        True,
    ),
    "a put over a revision that is changed": (
        [put("a", 1)],
        batch(put("a", 2)),
        batch(put("a", 3), guards=(Guard("a", Revision(1)),)),
        False,
    ),
    "a put over the revision that the change leaves": (
        [put("a", 1)],
        batch(put("a", 2)),
        batch(put("a", 3), guards=(Guard("a", Revision(2)),)),
        True,
    ),
    "a put over a revision that is touched": (
        [put("a", 1)],
        batch(Touch("a", 60_000)),
        batch(put("a", 3), guards=(Guard("a", Revision(1)),)),
        False,
    ),
    "a put over a revision that is deleted": (
        [put("a", 1)],
        batch(Delete("a")),
        batch(put("a", 3), guards=(Guard("a", Revision(1)),)),
        False,
    ),
    "a put over a revision that expires": (
        [put("a", 1)],
        batch(Touch("a", 0)),
        batch(put("a", 3), guards=(Guard("a", Revision(2)),)),
        False,
    ),
    "a put of a lock that is taken": (
        [],
        batch(Put("door", b'{"holder":"other"}', ttl_ms=60_000, family="lock")),
        batch(Put("door", b'{"holder":"me"}', ttl_ms=60_000, family="lock"), guards=(Guard("door", ABSENT, "lock"),)),
        False,
    ),
    "a put that keeps what is made": (
        [],
        batch(Put("a", b"1", ttl_ms=60_000, meta_json=b'{"by":1}')),
        batch(Put("a", b"2", ttl_ms=KEEP, meta_json=KEEP)),
        True,
    ),
    "a put that keeps what is deleted": (
        [Put("a", b"1", ttl_ms=60_000, meta_json=b'{"by":1}')],
        batch(Delete("a")),
        batch(Put("a", b"2", ttl_ms=KEEP, meta_json=KEEP)),
        True,
    ),
    "a delete of a key that is made": ([], batch(put("a", 1)), batch(Delete("a")), True),
    "a delete of a key that is deleted": ([put("a", 1)], batch(Delete("a")), batch(Delete("a")), True),
    "a take of a key that is changed": ([put("a", 1)], batch(put("a", 2)), batch(Delete("a", take=True)), True),
    "a touch of a key that is made": ([], batch(put("a", 1)), batch(Touch("a", 60_000)), True),
    "a touch of a key that is deleted": ([put("a", 1)], batch(Delete("a")), batch(Touch("a", None)), True),
    "an expired entry that is made again": (
        [Put("a", b"1", ttl_ms=1)],
        batch(put("a", 2)),
        batch(put("a", 3), guards=(Guard("a", ABSENT),)),
        False,
    ),
    "an expired entry that is left": (
        [Put("a", b"1", ttl_ms=1)],
        batch(put("b", 2)),
        batch(put("a", 3), guards=(Guard("a", ABSENT),)),
        True,
    ),
    "a fence whose lock is taken over": (
        [Put("door", b'{"holder":"me"}', ttl_ms=60_000, family="lock")],
        batch(Delete("door", family="lock")),
        batch(put("a", 1), guards=(Guard("door", HeldBy(1), "lock"),)),
        False,
    ),
    "a fence whose lock is refreshed": (
        [Put("door", b'{"holder":"me"}', ttl_ms=60_000, family="lock")],
        batch(Touch("door", 90_000, "lock")),
        batch(put("a", 1), guards=(Guard("door", HeldBy(1), "lock"),)),
        True,
    ),
    "an add of a counter that is made": ([], batch(put("a", 5)), batch(Add("a", 1)), True),
}


@pytest.mark.parametrize("case", CASES)
async def test_a_commit_that_waited_is_decided_on_what_it_finds_then(engine: PostgresEngine, case: str) -> None:
    before, other, request, is_granted = CASES[case]
    # As if this engine had written before, so that puts first try the function for puts.
    engine._latest["default"] = 0
    if before:
        await engine.commit("default", batch(*before))
        # Let the shortest time to live end.
        await engine._fetch("SELECT pg_sleep(0.003)")

    outcome, left = await decided_after(engine, other, request)

    assert isinstance(outcome, Commit) == is_granted
    assert outcome == left.decide(request, outcome.at_ms)
    await assert_whole(engine)


@pytest.mark.parametrize("seed", range(12 if LONG else 2))
async def test_commits_that_waited_agree_with_plan(engine: PostgresEngine, seed: int) -> None:
    """The same with random batches."""
    dice = random.Random(seed)
    granted = refused = 0
    await engine.commit("default", batch(put("a", 0)))
    for _ in range(25):
        other, request = some_batch(dice, guarded=False), some_batch(dice, guarded=True)
        outcome, left = await decided_after(engine, other, request)

        assert outcome == left.decide(request, outcome.at_ms)
        granted += isinstance(outcome, Commit)
        refused += isinstance(outcome, Refusal)
    assert granted > 3
    assert refused > 3
    await assert_whole(engine)


def some_batch(dice: random.Random, *, guarded: bool) -> Batch:
    """A few writes of a few keys, and perhaps guards that may or may not hold."""
    keys = dice.sample("abcd", dice.randrange(1, 4))
    if dice.random() < 0.3:
        return Batch((), tuple(Put(key, b"%d" % dice.randrange(1_000), dice.choice((None, 1))) for key in keys))
    writes: list[Write] = []
    for key in keys:
        number = b"%d" % dice.randrange(1_000)
        writes.append(
            dice.choice(
                (
                    Put(key, number),
                    Put(key, number, ttl_ms=dice.choice((1, 60_000, KEEP)), meta_json=dice.choice((KEEP, b'{"n":1}'))),
                    Delete(key, take=dice.random() < 0.5),
                    Touch(key, dice.choice((1, 60_000, None))),
                )
            )
        )
    guards: tuple[Guard, ...] = ()
    if guarded:
        guards = tuple(
            Guard(key, dice.choice((ABSENT, PRESENT, Version(dice.randrange(1, 4)))))
            for key in dice.sample("abcd", dice.randrange(3))
        )
    return Batch(guards, tuple(writes), request_id=new_request_id())


# Several clients on one key -------------------------------------------------------


@pytest.mark.parametrize("way", ["alone", "in a group"])
async def test_guarded_puts_of_several_clients_never_replace_what_they_did_not_read(schema: str, way: str) -> None:
    """Each success replaced the very entry that its client had read, so successes and versions are as many."""
    engines = [await open_postgres(url_of(schema)) for _ in range(4)]
    rounds = 150 if LONG else 40
    replaced: list[tuple[int, int]] = []
    conflicts = 0

    async def write(engine: PostgresEngine, name: int) -> None:
        nonlocal conflicts
        for number in range(rounds):
            (found,) = await engine.read("default", ["hot"])
            assert found is not None
            writing = [engine.commit("default", Batch((Guard("hot", Revision(found.revision)),), (put("hot", name),)))]
            if way == "in a group":
                writing += [engine.commit("default", Batch((), (put(f"own/{name}", number),)))]
            outcome, *others = await asyncio.gather(*writing)
            assert [type(other) for other in others] == [Commit] * len(others)
            if isinstance(outcome, Commit):
                replaced.append((found.revision, outcome.revision))
            else:
                assert outcome.found is not None
                assert outcome.found.revision > found.revision
                conflicts += 1

    try:
        for number, engine in enumerate(engines):
            await engine.commit("default", batch(put("hot", 0) if not number else put(f"own/{number}", 0)))
        await asyncio.gather(*(write(engine, number) for number, engine in enumerate(engines)))

        (entry,) = await engines[0].read("default", ["hot"])
        assert entry is not None
        assert len(replaced) + conflicts == 4 * rounds
        assert entry.version == 1 + len(replaced)
        # They form a chain: each replaced what the one before it had left.
        replaced.sort()
        assert [before for before, _ in replaced] == [1, *(after for _, after in replaced[:-1])]
        assert conflicts > 0
        await assert_whole(engines[0])
    finally:
        for engine in engines:
            await engine.close()


# Groups of puts ------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12 if LONG else 3))
async def test_groups_of_puts_that_waited_agree_with_plan(engine: PostgresEngine, seed: int, spy: Spy) -> None:
    """Plain puts, and puts whose expected revision is there, was there, never was or has expired, in one group."""
    dice = random.Random(seed)
    await engine.commit("default", batch(put("a", 0)))
    granted = refused = 0
    for _ in range(25):
        # Guarded puts on contended entries are planned at once, and this is about the function for puts.
        engine._committer.forget("default")
        other = some_batch(dice, guarded=False)
        async with connected() as observer:
            before = State(0, await observer.fetch(engine._sql(ENTRIES)))
            async with held_after(engine, other) as (pid, left):
                requests = some_puts(dice, before, left)
                waiting = [asyncio.create_task(engine.commit("default", request)) for request in requests]
                await blocked_by(observer, pid)
            outcomes = await asyncio.gather(*waiting)

        # No member depends on another, so the order of their revisions is an order in which they may have come.
        pairs = sorted(
            zip(requests, outcomes, strict=True), key=lambda one: one[1].revision if isinstance(one[1], Commit) else 0
        )
        for request, outcome in pairs:
            assert outcome == left.apply(request, outcome.at_ms)
            granted += isinstance(outcome, Commit)
            refused += isinstance(outcome, Refusal)
        # What is refused uses no revision.
        assert (await engine.status("default")).revision == left.revision
        await assert_whole(engine)
    assert granted > 30
    assert refused > 8
    assert await spy.count("limpet_put(") > 15
    # Some replaced an entry that had expired.
    assert "expire" in {change.op for change in (await engine.changes("default", 0, limit=5_000)).changes}


def some_puts(dice: random.Random, before: State, left: State) -> list[Batch]:
    """Puts of distinct keys, most of which expect a revision, and most of these the right one."""
    keys = dice.sample("abcdef", dice.randrange(2, 6))
    requests: list[Batch] = []
    while keys:
        key = keys.pop()
        write = Put(key, b"%d" % dice.randrange(1_000), dice.choice((None, None, 1, 60_000)))
        was, found = before.find("data", key), left.find("data", key)
        match dice.randrange(6):
            case 0:
                more = (put(keys.pop(), 1),) if keys else ()
                requests.append(Batch((), (write, *more)))
            case 1:
                requests.append(Batch((Guard(key, Revision(left.revision + 1)),), (write,)))
            case 2 | 3:
                requests.append(Batch((expectation(key, was),), (write,)))
            case number:
                request_id = new_request_id() if number == 4 else None
                requests.append(Batch((expectation(key, found),), (write,), request_id=request_id))
    return requests


def expectation(key: str, entry: Entry | None) -> Guard:
    """The guard that a key still has this entry."""
    return Guard(key, Revision(entry.revision) if entry else ABSENT)


async def assert_whole(engine: PostgresEngine) -> None:
    """The totals agree with the entries, and the entries agree with the log, which has no receipts."""
    schema = quoted(engine._schema)
    async with connected() as connection:
        kept = await connection.fetchrow(
            f"SELECT count(*), coalesce(sum(size_bytes), 0) FROM {schema}.limpet_entries WHERE family = 'data'"
        )
        logged = await connection.fetchrow(
            f"SELECT count(*), coalesce(sum(size_bytes), 0), max(revision) FROM {schema}.limpet_changes"
        )
        rows = await connection.fetch(engine._sql(ENTRIES))
    status = await engine.status("default")
    assert (status.keys, status.size_bytes) == tuple(kept)
    assert (status.log_changes, status.log_bytes, status.revision) == tuple(logged)
    last = {(change.family, change.key): change for change in (await engine.changes("default", 0, limit=5_000)).changes}
    assert {name: change.entry.revision for name, change in last.items() if change.after is not None} == {
        (row[0], row[1]): entry_from_row(row[1:]).revision for row in rows if row[0] != "receipt"
    }
