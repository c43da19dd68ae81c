"""Commits share transactions. No caller may notice, except by the time it takes."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
import threading
from collections.abc import Callable
from typing import Any

import pytest

import limpet
from limpet import codec
from limpet.commit import group
from limpet.engines.sqlite.engine import SqliteEngine
from limpet.engines.sqlite.group import GROUP_MAX
from limpet.errors import LimpetError
from limpet.model import (
    ABSENT,
    PRESENT,
    Add,
    Batch,
    Commit,
    Delete,
    Entry,
    Family,
    Guard,
    Patch,
    Put,
    Refusal,
    Touch,
    Version,
    Write,
)
from limpet.transition import Plan, plan
from tests.processes import PATIENCE_S
from tests.sqlite.support import Gate, Queue, Spy, batch, open_sqlite, put, stored

KEYS = ("a", "b", "c")


def some_batches(count: int, seed: int) -> list[Batch]:
    """Batches of every kind of write, some with guards that may or may not hold, some with a receipt."""
    dice = random.Random(seed)

    def write(key: str) -> Write:
        kinds: list[Callable[[], Write]] = [
            lambda: put(key, dice.randrange(1_000)),
            lambda: Put(key, codec.encode("text"), ttl_ms=dice.choice((None, 60_000)), meta_json=b'{"by":1}'),
            lambda: Add(key, dice.randrange(10)),
            lambda: Patch(key, {"field": b"%d" % dice.randrange(10)}),
            lambda: Touch(key, 60_000),
            lambda: Delete(key, take=dice.random() < 0.5),
        ]
        return dice.choice(kinds)()

    def guards() -> tuple[Guard, ...]:
        if dice.random() < 0.6:
            return ()
        return (Guard(dice.choice(KEYS), dice.choice((ABSENT, PRESENT, Version(dice.randrange(1, 4))))),)

    made = []
    for _ in range(count):
        keys = dice.sample(KEYS, dice.randrange(1, 4))
        receipt: dict[str, Any] = {"digest": b"digest", "receipt_ms": 600_000} if dice.random() < 0.3 else {}
        made.append(batch(*map(write, keys), guards=guards(), **receipt))
    return made


class Model:
    """The state that `plan` leaves, batch after batch."""

    def __init__(self) -> None:
        self.revision = 0
        self.entries: dict[tuple[Family, str], Entry] = {}

    def plan(self, batch: Batch, now_ms: int) -> Plan | Refusal:
        return plan(batch, lambda family, key: self.entries.get((family, key)), now_ms=now_ms, revision=self.revision)

    def apply(self, done: Plan) -> None:
        for change in done.changes:
            if change.after is None:
                del self.entries[change.family, change.key]
            else:
                self.entries[change.family, change.key] = change.after
            self.revision = change.revision
        if done.receipt is not None:
            self.entries["receipt", done.receipt.key] = done.receipt


@pytest.mark.parametrize("seed", range(8))
async def test_a_group_is_what_plan_makes_of_it_in_some_order(
    engine: SqliteEngine, clock: limpet.ManualClock, spy: Spy, seed: int
) -> None:
    """Concurrent batches leave a state that some order of them would leave."""
    requests = some_batches(64, seed)

    outcomes = await asyncio.gather(*(engine.commit("default", one) for one in requests))

    assert spy.count("BEGIN IMMEDIATE") < 16, "they were not grouped"
    model, now_ms = Model(), clock.now_ms()
    applied = [(one, outcome) for one, outcome in zip(requests, outcomes, strict=True) if isinstance(outcome, Commit)]
    refused = [(one, outcome) for one, outcome in zip(requests, outcomes, strict=True) if isinstance(outcome, Refusal)]
    assert len(applied) >= 16
    assert len(refused) >= 4
    # A refusal has no revision, so it must fit somewhere in the order.
    unexplained = {one.request_id for one, _ in refused}
    for one, outcome in sorted(applied, key=lambda pair: pair[1].revision):
        unexplained -= {no.request_id for no, refusal in refused if model.plan(no, now_ms) == refusal}
        planned = model.plan(one, now_ms)
        assert isinstance(planned, Plan)
        assert planned.commit == outcome
        model.apply(planned)
    unexplained -= {no.request_id for no, refusal in refused if model.plan(no, now_ms) == refusal}
    assert unexplained == set()
    assert await engine.read("default", KEYS) == [model.entries.get(("data", key)) for key in KEYS]
    status = await engine.status("default")
    log = (await engine.changes("default", 0)).changes
    assert (status.revision, status.keys) == (model.revision, sum(family == "data" for family, _ in model.entries))
    assert [change.revision for change in log] == [*range(1, model.revision + 1)]


async def test_writes_of_one_turn_share_a_transaction(engine: SqliteEngine, spy: Spy) -> None:
    """All that was requested in one turn of the loop is committed at once, up to the size of a group."""

    await asyncio.gather(*(engine.commit("default", batch(put(f"key/{n}", n))) for n in range(GROUP_MAX)))
    assert (spy.count("BEGIN IMMEDIATE"), spy.count("COMMIT")) == (1, 1)

    await asyncio.gather(*(engine.commit("default", batch(put(f"key/{n}", n))) for n in range(GROUP_MAX + 1)))
    assert (spy.count("BEGIN IMMEDIATE"), spy.count("COMMIT")) == (3, 3)


async def test_a_group_that_changes_nothing_commits_nothing(engine: SqliteEngine, spy: Spy) -> None:
    """A refused batch leaves no trace: no change, no event, no revision."""

    outcomes = await asyncio.gather(
        engine.commit("default", batch(put("a", 1), guards=(Guard("a", PRESENT),))),
        engine.commit("default", batch(Delete("a"))),
    )

    assert isinstance(outcomes[0], Refusal)
    assert isinstance(outcomes[1], Commit)
    assert (spy.count("ROLLBACK"), spy.count("COMMIT")) == (1, 0)
    assert (await engine.status("default")).revision == 0
    assert isinstance(await engine.commit("default", batch(put("a", 1))), Commit)


async def test_a_refused_member_leaves_the_others_untouched(engine: SqliteEngine, spy: Spy) -> None:
    """When a guard fails, nothing changes, no revision is used, and Conflict is raised."""

    first, refused, last = await asyncio.gather(
        engine.commit("default", batch(put("a", 1), put("b", 1))),
        engine.commit("default", batch(put("a", 2), put("b", 2), guards=(Guard("a", ABSENT),))),
        engine.commit("default", batch(Add("a", 10))),
    )

    assert spy.count("BEGIN IMMEDIATE") == 1
    assert isinstance(first, Commit)
    assert isinstance(last, Commit)
    assert isinstance(refused, Refusal)
    # It was decided on what the member before it left, which no file held yet.
    assert refused.found == first.entries[0]
    assert (first.revision, last.revision) == (2, 3)
    assert await stored(engine, KEYS) == {"a": b"11", "b": b"1"}


async def test_a_trigger_of_the_file_refuses_one_member_alone(engine: SqliteEngine) -> None:
    """Batches that are committed together each have their own outcome: one that fails does not fail another."""
    with contextlib.closing(sqlite3.connect(engine._path)) as other, other:
        other.execute(
            "CREATE TRIGGER no_odd BEFORE INSERT ON limpet_entries WHEN NEW.key = 'odd' "
            "BEGIN SELECT RAISE(ABORT, 'no odd ones'); END"
        )
    keys = [*(f"key/{number}" for number in range(10)), "odd", *(f"key/{number}" for number in range(10, 20))]

    commits = (engine.commit("default", batch(put(key, 1))) for key in keys)
    outcomes = dict(zip(keys, await asyncio.gather(*commits, return_exceptions=True), strict=True))

    assert isinstance(outcomes.pop("odd"), LimpetError)
    assert all(isinstance(outcome, Commit) for outcome in outcomes.values())
    assert (await engine.status("default")).keys == 20


async def test_members_of_several_namespaces_count_apart(engine: SqliteEngine, spy: Spy) -> None:
    """Nothing crosses a namespace: no read, scan, batch, watch, history, receipt or lock."""

    outcomes = await asyncio.gather(
        *(
            engine.commit(f"n{number % 3}", batch(Add("hits", 1), request_id=f"same-{number // 3}"))
            for number in range(9)
        )
    )

    assert spy.count("BEGIN IMMEDIATE") == 1
    assert [outcome.revision for outcome in outcomes if isinstance(outcome, Commit)] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    for name in ("n0", "n1", "n2"):
        assert await stored(engine, ["hits"], name) == {"hits": b"3"}
        assert (await engine.status(name)).revision == 3


async def test_a_repeated_request_within_a_group_is_answered_once(engine: SqliteEngine, spy: Spy) -> None:
    """A write with a request id can be repeated: it returns the first result and applies nothing."""
    repeated = batch(Add("hits", 1), digest=b"digest", receipt_ms=600_000)

    outcomes = await asyncio.gather(*(engine.commit("default", repeated) for _ in range(5)))

    assert spy.count("BEGIN IMMEDIATE") == 1
    assert [isinstance(one, Commit) and one.replayed for one in outcomes] == [False, True, True, True, True]
    assert {one.revision for one in outcomes if isinstance(one, Commit)} == {1}
    assert await stored(engine, ["hits"]) == {"hits": b"1"}


# Cancelling -----------------------------------------------------------------------


async def test_cancelled_before_its_group_starts_is_not_applied(engine: SqliteEngine, spy: Spy) -> None:
    """Cancelling a caller leaves the batch done or not done, never half."""
    gate = Gate()
    spy.before["BEGIN IMMEDIATE"] = gate
    # While the first group is held, three more wait for the second.
    running = asyncio.create_task(engine.commit("default", batch(put("running", 1))))
    await asyncio.sleep(0)
    await asyncio.to_thread(gate.await_thread)
    waiting = [asyncio.create_task(engine.commit("default", batch(put(key, 1), put("all", 1)))) for key in KEYS]
    await asyncio.sleep(0)

    waiting[1].cancel()
    await asyncio.gather(waiting[1], return_exceptions=True)
    gate.open()
    outcomes = await asyncio.gather(running, *waiting, return_exceptions=True)

    assert waiting[1].cancelled()
    assert [type(outcome) for outcome in outcomes] == [Commit, Commit, asyncio.CancelledError, Commit]
    assert await stored(engine, ["running", *KEYS]) == {"running": b"1", "a": b"1", "c": b"1"}
    assert (await engine.status("default")).revision == 5


@pytest.mark.parametrize("statement", ["BEGIN IMMEDIATE", "COMMIT"])
async def test_cancelled_after_its_group_started_is_finished(engine: SqliteEngine, spy: Spy, statement: str) -> None:
    """Cancelling a caller leaves the batch done or not done, never half."""
    gate = Gate()
    spy.before[statement] = gate
    tasks = [asyncio.create_task(engine.commit("default", batch(put(key, 1), Add("count", 1)))) for key in KEYS]
    await asyncio.sleep(0)
    await asyncio.to_thread(gate.await_thread)

    tasks[1].cancel()
    await asyncio.gather(tasks[1], return_exceptions=True)
    assert tasks[1].cancelled()
    gate.open()
    outcomes = await asyncio.gather(tasks[0], tasks[2])

    assert [type(outcome) for outcome in outcomes] == [Commit, Commit]
    assert await stored(engine, [*KEYS, "count"]) == {"a": b"1", "b": b"1", "c": b"1", "count": b"3"}


async def test_all_callers_of_a_group_may_be_cancelled(engine: SqliteEngine) -> None:
    """Cancelling a caller leaves the batch done or not done, never half.

    Some are cancelled in the queue and some in the middle of their group; each is applied entirely or not at all.
    """
    dice = random.Random(4)
    for _ in range(30):
        tasks = [
            asyncio.create_task(engine.commit("default", batch(*(Add(f"{key}/{n}", 1) for key in KEYS))))
            for n in range(32)
        ]
        for _ in range(dice.randrange(4)):
            await asyncio.sleep(0)
        for task in dice.sample(tasks, 16):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    await engine.commit("default", batch(put("end", 1)))
    for number in range(32):
        counts = await stored(engine, [f"{key}/{number}" for key in KEYS])
        assert len(set(counts.values())) <= 1
        assert len(counts) in (0, 3)


# A member in trouble ----------------------------------------------------------------


async def test_a_member_that_cannot_be_decided_fails_alone(
    engine: SqliteEngine, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug in the rules would fail its caller, and no other."""

    def sometimes(batch: Batch, *args: Any, **more: Any) -> Plan | Refusal:
        if batch.request_id == "bad":
            raise ZeroDivisionError
        return plan(batch, *args, **more)

    monkeypatch.setattr(group, "plan", sometimes)

    outcomes = await asyncio.gather(
        engine.commit("default", batch(put("a", 1))),
        engine.commit("default", batch(put("b", 1), request_id="bad")),
        engine.commit("default", batch(put("c", 1))),
        return_exceptions=True,
    )

    assert spy.count("BEGIN IMMEDIATE") == 1
    assert [type(outcome) for outcome in outcomes] == [Commit, ZeroDivisionError, Commit]
    assert await stored(engine, KEYS) == {"a": b"1", "c": b"1"}


async def test_a_member_that_cannot_be_recalled_fails_alone(
    engine: SqliteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking for an earlier attempt is part of deciding, and fails as privately."""

    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(group, "recall", broken)

    outcomes = await asyncio.gather(
        engine.commit("default", batch(put("a", 1))),
        engine.commit("default", batch(put("b", 1), request_id="mine", retry_since=0)),
        engine.commit("default", batch(put("c", 1))),
        return_exceptions=True,
    )

    assert [type(outcome) for outcome in outcomes] == [Commit, ZeroDivisionError, Commit]
    assert await stored(engine, KEYS) == {"a": b"1", "c": b"1"}


# When the answer comes ----------------------------------------------------------------


def test_a_thread_is_not_answered_before_the_commit_is_durable(url: str, clock: limpet.ManualClock, spy: Spy) -> None:
    """An acknowledged write is there when durable storage is opened again.

    A thread commits for another as well. The other looks for its answer at the worst moment: everything is decided
    and nothing is committed yet.
    """
    engine = asyncio.run(open_sqlite(url, clock))
    queued, committing = Gate(), Gate()
    answers: list[object] = []

    def commit(key: str) -> None:
        try:
            engine.commit("default", batch(put(key, 1))).send(None)
        except StopIteration as done:
            answers.append((key, type(done.value)))

    early = threading.Thread(target=commit, args=("early",))
    engine._writer.queue = Queue(after=lambda: queued() if threading.current_thread() is early else None)
    early.start()
    queued.await_thread()
    spy.before["COMMIT"] = committing
    leader = threading.Thread(target=commit, args=("leader",))
    leader.start()
    committing.await_thread()

    queued.open()
    early.join(0.2)
    assert answers == []

    committing.open()
    early.join(PATIENCE_S)
    leader.join(PATIENCE_S)
    assert sorted(answers, key=str) == [("early", Commit), ("leader", Commit)]
    asyncio.run(engine.close())


async def test_a_task_is_not_answered_before_the_commit_is_durable(engine: SqliteEngine, spy: Spy) -> None:
    """An acknowledged write is there when durable storage is opened again."""
    gate = Gate()
    spy.before["COMMIT"] = gate
    task = asyncio.create_task(engine.commit("default", batch(put("key", 1))))
    await asyncio.sleep(0)
    await asyncio.to_thread(gate.await_thread)

    for _ in range(20):
        await asyncio.sleep(0)
    assert not task.done()
    assert await engine.read("default", ["key"]) == [None]

    gate.open()
    assert isinstance(await task, Commit)
