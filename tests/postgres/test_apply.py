"""Groups that are planned here and compared there: every moment at which the state can change in between."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from limpet.commit import contention, known
from limpet.commit.relative import Moment
from limpet.commit.storage import Stale, Unit
from limpet.engines.postgres import sql
from limpet.engines.postgres.engine import PostgresEngine
from limpet.engines.sql_indexes import quoted
from limpet.errors import Ambiguous, Unavailable
from limpet.model import (
    ABSENT,
    KEEP,
    PRESENT,
    Add,
    Batch,
    Commit,
    Delete,
    Equals,
    Guard,
    HeldBy,
    Patch,
    Put,
    Refusal,
    Revision,
    Touch,
    Window,
    Write,
)
from limpet.request_ids import new_request_id
from tests.postgres.proxy import Proxy
from tests.postgres.support import Spy, batch, connected, contend, open_postgres, put, stored, until, url_of
from tests.postgres.test_decisions import assert_whole

LARGE = b'"' + b"x" * 900_000 + b'"'


@pytest.fixture
async def other(engine: PostgresEngine) -> AsyncIterator[PostgresEngine]:
    """Another process on the same schema: its own handle, which knows nothing of the first."""
    opened = await open_postgres(url_of(engine._schema))
    yield opened
    await opened.close()


async def wait_ms(engine: PostgresEngine, milliseconds: int) -> None:
    """Wait by the clock of the server."""
    await engine._run("SELECT pg_sleep($1)", milliseconds / 1000)


# An entry that expires between plan and apply ---------------------------------------


EXPIRING: dict[str, tuple[Batch, bool]] = {
    "a guard that it is there": (batch(put("other", 1), guards=(Guard("a", PRESENT),)), False),
    "a guard that it is absent": (batch(put("other", 1), guards=(Guard("a", ABSENT),)), True),
    "a guard on its value": (batch(put("other", 1), guards=(Guard("a", Equals(b"1")),)), False),
    "a guard on its revision": (batch(put("other", 1), guards=(Guard("a", Revision(1)),)), False),
    "a fence": (batch(put("other", 1), guards=(Guard("a", HeldBy(1)),)), False),
    "a put that keeps": (batch(Put("a", b"2", ttl_ms=KEEP, meta_json=KEEP)), True),
    "a touch": (batch(Touch("a", 60_000)), True),
    "a delete": (batch(Delete("a")), True),
    "a take": (batch(Delete("a", take=True)), True),
    "an add": (batch(Add("a", 5)), True),
}


@pytest.mark.parametrize("way", ["compared", "held"])
@pytest.mark.parametrize("case", EXPIRING)
async def test_an_entry_that_expires_before_the_plan_is_applied_is_absent(
    engine: PostgresEngine, monkeypatch: pytest.MonkeyPatch, case: str, way: str
) -> None:
    """The plan took it for live: the time between the two is as long as its time to live."""
    request, is_granted = EXPIRING[case]
    await engine.commit("default", batch(Put("a", b"1", ttl_ms=400, meta_json=b'{"by":1}')))
    if way == "held":
        contend(engine, "default", "a")
    apply_on, planned = engine._apply_on, 0

    async def apply_late(
        connection: Any, namespace: str, name: str, units: Sequence[Unit], arguments: list[list[Any]]
    ) -> Sequence[Moment | Stale]:
        nonlocal planned
        expected = units[0].expected.get(("data", "a"))
        if expected is not None and expected.revision >= 0 and not planned:
            planned += 1
            assert not expected.has_expired
            await connection.execute("SELECT pg_sleep(0.41)")
        return await apply_on(connection, namespace, name, units, arguments)

    monkeypatch.setattr(engine, "_apply_on", apply_late)

    outcome = await engine.commit("default", request)

    assert planned == 1
    assert isinstance(outcome, Commit) == is_granted
    (found,) = await engine.read("default", ["a"])
    if isinstance(outcome, Refusal):
        assert outcome.found is None
    elif found is not None:
        # A new life: the first version, and nothing is kept of the one before.
        assert (found.version, found.expires_ms, found.meta_json) == (1, None, None)
        assert found.stored in (b"2", b"5")
    else:
        assert (outcome.entries[0] is None) == (request.writes[0].key == "a")
        assert outcome.ended == (None,)
    await assert_whole(engine)


# Two processes ----------------------------------------------------------------------


async def test_adds_of_several_processes_are_all_counted(engine: PostgresEngine, other: PostgresEngine) -> None:
    async def add(one: PostgresEngine) -> list[int]:
        found = []
        for _ in range(60):
            outcome = await one.commit("default", batch(Add("n", 1)))
            assert isinstance(outcome, Commit)
            found.append(int(outcome.entries[0].stored))  # type: ignore[arg-type, union-attr]
        return found

    counted = await asyncio.gather(*(add(one) for one in (engine, other, engine, other)))

    assert sorted(number for numbers in counted for number in numbers) == [*range(1, 241)]
    assert await stored(engine, ["n"]) == {"n": b"240"}
    await assert_whole(engine)


async def test_two_batches_that_guard_what_the_other_writes_are_not_both_applied(
    engine: PostgresEngine, other: PostgresEngine
) -> None:
    """Each turns one light off if the other light is on. One must stay on."""
    for round_number in range(25):
        left, right = f"left/{round_number}", f"right/{round_number}"
        await engine.commit("default", batch(put(left, 1), put(right, 1)))
        # Both processes know both entries.
        await other.commit("default", batch(put(f"seen/{round_number}", 1), guards=(Guard(left, ABSENT),)))
        await other.commit("default", batch(put(f"seen/{round_number}", 1), guards=(Guard(right, ABSENT),)))

        outcomes = await asyncio.gather(
            engine.commit("default", batch(put(left, 0), guards=(Guard(right, Equals(b"1")),))),
            other.commit("default", batch(put(right, 0), guards=(Guard(left, Equals(b"1")),))),
        )

        assert sorted(type(one).__name__ for one in outcomes) == ["Commit", "Refusal"]


async def test_one_request_of_two_processes_is_applied_once(engine: PostgresEngine, other: PostgresEngine) -> None:
    for number in range(25):
        request = batch(Add("n", 1), request_id=f"mine/{number}", digest=b"d", receipt_ms=60_000)

        outcomes = await asyncio.gather(engine.commit("default", request), other.commit("default", request))

        first, second = sorted(outcomes, key=lambda one: isinstance(one, Commit) and one.replayed)
        assert isinstance(first, Commit)
        assert isinstance(second, Commit)
        assert (first.replayed, second.replayed) == (False, True)
        assert (first.revision, first.entries, first.at_ms) == (second.revision, second.entries, second.at_ms)
    assert await stored(engine, ["n"]) == {"n": b"25"}


async def test_a_stale_unit_leaves_the_others_of_its_group_applied(
    engine: PostgresEngine, other: PostgresEngine, spy: Spy
) -> None:
    """The others are in the log before it, and each has its own cause."""
    await engine.commit("default", batch(put("a", 1), put("b", 1), put("c", 1)))
    await other.commit("default", batch(put("b", 2)))
    await spy.forget()

    outcomes = await asyncio.gather(*(engine.commit("default", batch(Add(key, 10))) for key in "abc"))

    statements = [text for text in await spy.statements() if "limpet_apply" in text]
    # The group, and the stale one under the lock of the namespace: read, and write.
    assert len(statements) == 3
    assert [one.revision for one in outcomes if isinstance(one, Commit)] == [5, 7, 6]
    assert await stored(engine, ["a", "b", "c"]) == {"a": b"11", "b": b"12", "c": b"11"}
    assert len({change.cause for change in (await engine.changes("default", 4)).changes}) == 3
    await assert_whole(engine)


# A retry and its first attempt ------------------------------------------------------


@pytest.mark.parametrize("way", ["compared", "held"])
@pytest.mark.parametrize("undone", [False, True], ids=["stands", "undone by another"])
@pytest.mark.parametrize("moment", ["before the mark", "before the search", "before the apply", "after the apply"])
async def test_a_first_attempt_that_lands_at_any_moment_of_its_retry_is_applied_once(
    engine: PostgresEngine, other: PostgresEngine, monkeypatch: pytest.MonkeyPatch, moment: str, undone: bool, way: str
) -> None:
    """Even if another request has undone it since, so that each entry is as the retry has found it."""
    await engine.commit("default", batch(put("first", 1)))
    request_id = new_request_id()
    first = Batch((), (Put("a", b"1"),), request_id=request_id)
    retry = Batch((), (Put("a", b"1"),), request_id=request_id, retry_since=1)
    if way == "held":
        contend(engine, "default", "a")
    landed: list[object] = []

    async def land() -> None:
        if not landed:
            landed.append(None)
            try:
                landed[0] = await other.commit("default", first)
            except Unavailable as error:
                landed[0] = error
            if undone and isinstance(landed[0], Commit):
                await other.commit("default", batch(Delete("a")))

    find_changes, apply = engine.find_changes, engine.apply
    hold = engine._committer._hold

    async def find_after(namespace: str, after: int, cause: str) -> Any:
        if moment == "before the search":
            await land()
        return await find_changes(namespace, after, cause)

    async def apply_after(namespace: str, name: str, units: Sequence[Unit]) -> Any:
        if moment == ("before the apply" if units[0].expected else "before the mark"):
            await land()
        return await apply(namespace, name, units)

    def hold_after(namespace: str) -> Any:
        class Held:
            async def __aenter__(self) -> Any:
                if moment == "before the apply":
                    await land()
                assert hold is not None
                self.inner = hold(namespace)
                return await self.inner.__aenter__()

            async def __aexit__(self, *error: Any) -> Any:
                return await self.inner.__aexit__(*error)

        return Held()

    monkeypatch.setattr(engine, "find_changes", find_after)
    monkeypatch.setattr(engine, "apply", apply_after)
    monkeypatch.setattr(engine._committer, "_hold", hold_after)

    outcome = await engine.commit("default", retry)
    if moment == "after the apply":
        await land()

    is_first = isinstance(landed[0], Commit)
    # A retry leaves its mark before it searches the log.
    assert is_first == (moment == "before the mark")
    assert isinstance(outcome, Commit)
    assert outcome.replayed == is_first
    changes = (await engine.changes("default", 1)).changes
    assert [change.op for change in changes if change.cause == request_id] == ["put"]
    assert await stored(engine, ["a"]) == ({} if undone and is_first else {"a": b"1"})
    await assert_whole(engine)


async def test_a_first_attempt_beside_its_retry_in_one_group_is_applied_once(engine: PostgresEngine) -> None:
    """A server gets both at once, when the retry comes over another connection than the first attempt."""
    await engine.commit("default", batch(put("n", 1)))
    for number, order in enumerate(["first", "retry"] * 2):
        request_id = new_request_id()
        first = Batch((), (Add("n", 1),), request_id=request_id)
        retry = Batch((), (Add("n", 1),), request_id=request_id, retry_since=1)

        both = [first, retry] if order == "first" else [retry, first]
        outcomes = await asyncio.gather(*(engine.commit("default", one) for one in both), return_exceptions=True)

        assert sorted(type(one).__name__ for one in outcomes) == ["Commit", "Unavailable"]
        assert await stored(engine, ["n"]) == {"n": b"%d" % (number + 2)}


async def test_a_mark_is_kept_in_the_namespace_and_forgotten_later(engine: PostgresEngine) -> None:
    await engine.commit("default", batch(put("n", 1)))
    request_id = new_request_id()
    marks = "SELECT superseded FROM {schema}.limpet_namespaces"

    await engine.commit("default", Batch((), (Add("n", 1),), request_id=f"{request_id}.3", retry_since=1))
    ((kept,),) = await engine._fetch(marks)
    assert request_id in kept
    with pytest.raises(Unavailable, match="superseded"):
        await engine.commit("default", Batch((), (Add("n", 1),), request_id=f"{request_id}.1"))
    # A batch of another group is none of it.
    assert isinstance(await engine.commit("default", Batch((), (Add("n", 1),), request_id="mine")), Commit)

    await engine._fetch("UPDATE {schema}.limpet_namespaces SET superseded = jsonb_build_object('old', 1)")
    await engine.trim("default", Window())
    assert await engine._fetch(marks) == [(None,)]


# Values that are not looked at ------------------------------------------------------


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "not known"])
@pytest.mark.parametrize("write", [Touch("a", 60_000), Delete("a"), Put("a", b"1", ttl_ms=KEEP)], ids=repr)
async def test_a_large_value_does_not_travel_if_no_rule_looks_at_it(
    engine: PostgresEngine, other: PostgresEngine, proxy: Proxy, write: Write, is_known: bool
) -> None:
    await other.commit("default", batch(Put("a", LARGE)))
    through = await open_postgres(url_of(engine._schema, proxy.url))
    try:
        if is_known:
            await through.commit("default", batch(Touch("a", None)))
        before = proxy.passed_bytes

        outcome = await through.commit("default", batch(write))

        assert isinstance(outcome, Commit)
        assert proxy.passed_bytes - before < 20_000
    finally:
        await through.close()
    found = await stored(engine, ["a"])
    assert found == ({"a": LARGE} if isinstance(write, Touch) else {} if isinstance(write, Delete) else {"a": b"1"})
    await assert_whole(engine)


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "not known"])
@pytest.mark.parametrize("size", [2_000, 2_100, 900_000])
async def test_a_refusal_and_a_take_have_the_value_however_large(
    engine: PostgresEngine, other: PostgresEngine, size: int, is_known: bool
) -> None:
    value = b'"' + b"x" * size + b'"'
    await other.commit("default", batch(Put("a", value), Put("b", value)))
    (found,) = await other.read("default", ["a"])
    if is_known:
        await engine.commit("default", batch(Touch("a", None), put("first", 1), guards=(Guard("b", PRESENT),)))
        (found,) = await other.read("default", ["a"])

    refused, also = await asyncio.gather(
        engine.commit("default", batch(put("a", 1), guards=(Guard("a", ABSENT),))),
        engine.commit("default", batch(put("c", 1))),
    )
    taken = await engine.commit("default", batch(Delete("a", take=True)))

    assert isinstance(refused, Refusal)
    assert refused.found == found
    assert isinstance(also, Commit)
    assert isinstance(taken, Commit)
    assert taken.ended[0] is not None
    assert taken.ended[0].stored == value
    await assert_whole(engine)


async def test_a_patch_of_a_large_record_is_exact(engine: PostgresEngine, other: PostgresEngine) -> None:
    fields = {"small": b"1", "large": LARGE}
    await other.commit("default", batch(Put("a", fields)))
    for number in range(3):
        outcome = await engine.commit("default", batch(Patch("a", {"small": b"%d" % number})))
        assert isinstance(outcome, Commit)
    (found,) = await other.read("default", ["a"])

    assert found is not None
    assert found.stored == {"small": b"2", "large": LARGE}
    await assert_whole(engine)


# What is known ------------------------------------------------------------------------


async def test_a_batch_that_changes_nothing_leaves_a_receipt_in_a_fresh_namespace(
    engine: PostgresEngine, other: PostgresEngine
) -> None:
    request = batch(Delete("none"), request_id="mine", digest=b"d", receipt_ms=60_000)

    outcomes = [await one.commit("fresh", request) for one in (engine, other, engine)]

    assert [isinstance(one, Commit) and (one.revision, one.replayed) for one in outcomes] == [
        (0, False),
        (0, True),
        (0, True),
    ]
    assert (await engine.status("fresh")).revision == 0


async def test_more_entries_than_are_known_are_still_exact(
    engine: PostgresEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest is forgotten first, and read again when it is named."""
    monkeypatch.setattr(known, "KNOWN_MAX", 16)
    for _ in range(2):
        await asyncio.gather(*(engine.commit("default", batch(Add(f"n/{number}", 1))) for number in range(50)))
    # One batch with more of them than fit.
    await engine.commit("default", batch(*(Add(f"n/{number}", 1) for number in range(50))))

    assert set((await stored(engine, [f"n/{number}" for number in range(50)])).values()) == {b"3"}
    assert len(engine._committer.known("default")._heads) == 16
    await assert_whole(engine)


@pytest.mark.parametrize("way", ["deleted", "older", "same revision"])
async def test_a_namespace_that_was_restored_costs_another_round_trip_only(
    engine: PostgresEngine, spy: Spy, way: str
) -> None:
    """Known entries are out of date then. A server that lost its last writes gives their revisions to others."""
    await engine.commit("default", batch(put("n", 1)))
    await engine.commit("default", batch(Add("n", 100)))
    table = f"{quoted(engine._schema)}.limpet_entries"
    async with connected() as connection:
        if way == "deleted":
            await connection.execute(f"DELETE FROM {table}")
        elif way == "older":
            await connection.execute(f"UPDATE {table} SET stored = '1', revision = 1")
        else:
            await connection.execute(f"UPDATE {table} SET stored = '7', updated_ms = updated_ms + 20")
    await spy.forget()

    outcome = await engine.commit("default", batch(Add("n", 1)))

    assert isinstance(outcome, Commit)
    assert await stored(engine, ["n"]) == {"n": {"deleted": b"1", "older": b"2", "same revision": b"8"}[way]}
    assert await spy.count("limpet_apply") <= 3


async def test_what_a_lost_transaction_has_written_is_not_known(
    engine: PostgresEngine, other: PostgresEngine, proxy: Proxy
) -> None:
    """Its revision is given to another write, so that a plan on it would find what it expects."""
    through = await open_postgres(url_of(engine._schema, proxy.url))
    try:
        await through.commit("default", batch(put("n", 1)))
        contend(through, "default", "n")
        proxy.fault("cut", "COMMIT;")
        with pytest.raises(Ambiguous):
            await through.commit("default", batch(Add("n", 100)))
        await other.commit("default", batch(put("n", 5)))

        outcome = await through.commit("default", batch(Add("n", 1)))

        assert isinstance(outcome, Commit)
        assert await stored(other, ["n"]) == {"n": b"6"}
    finally:
        await through.close()


# Round trips and random programs ------------------------------------------------------


@pytest.mark.parametrize(
    "write",
    [Add("a", 1), Touch("a", 60_000), Delete("a"), Delete("a", take=True), Put("a", b"2", ttl_ms=KEEP)],
    ids=repr,
)
async def test_a_write_of_a_known_entry_is_one_round_trip(engine: PostgresEngine, spy: Spy, write: Write) -> None:
    await engine.commit("default", batch(put("a", 1)))
    await spy.forget()

    assert isinstance(await engine.commit("default", batch(write)), Commit)

    assert len(await spy.statements()) == 1


async def test_what_is_due_is_ended_in_one_round_trip(engine: PostgresEngine, spy: Spy) -> None:
    """Also by a process that has not seen it before: a sweeper ends what others have left."""
    await engine.commit("default", batch(Put("a", b"1", ttl_ms=1), Put("b", b"2", ttl_ms=1)))
    await asyncio.sleep(0.01)
    engine._committer.forget("default")
    due = await engine.due("default")
    await spy.forget()

    commit = await engine.commit("default", batch(*due))

    assert isinstance(commit, Commit)
    assert [entry.key for entry in commit.ended if entry is not None] == ["a", "b"]
    assert len(await spy.statements()) == 1


async def test_a_contended_entry_is_held_for_a_while_only(
    engine: PostgresEngine, other: PostgresEngine, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contention, "CONTENDED_S", 0.05)
    await engine.commit("default", batch(Add("n", 1)))
    await other.commit("default", batch(Add("n", 1)))
    await spy.forget()

    await engine.commit("default", batch(Add("n", 1)))
    assert await spy.count("BEGIN") == 1
    contended = engine._committer.known("default").contention._until
    await until(lambda: asyncio.sleep(0, time.monotonic() > contended["data", "n"]))
    await spy.forget()

    await engine.commit("default", batch(Add("n", 1)))
    assert await spy.statements() == [engine._sql(sql.APPLY)]


@pytest.mark.parametrize("writes", [True, False])
async def test_only_a_commit_that_writes_waits_for_the_disk(
    engine: PostgresEngine, monkeypatch: pytest.MonkeyPatch, writes: bool
) -> None:
    """One that is refused has only locked a row. One that holds the namespace reads first, and then writes."""
    await engine.commit("default", batch(put("a", 1)))
    apply_on, settings = engine._apply_on, []

    async def apply_in_transaction(connection: Any, *arguments: Any) -> Sequence[Moment | Stale]:
        async with connection.transaction():
            replies = await apply_on(connection, *arguments)
            settings.append(await connection.fetchval("SELECT current_setting('synchronous_commit')"))
            return replies

    monkeypatch.setattr(engine, "_apply_on", apply_in_transaction)
    if writes:
        await engine.commit("default", batch(Add("a", 1)))
        contend(engine, "default", "a")
        await engine.commit("default", batch(Add("a", 1)))
    else:
        # By what is known, by what is found, and where nothing changes.
        await engine.commit("default", batch(put("a", 2), guards=(Guard("a", ABSENT),)))
        engine._committer.forget("default")
        await engine.commit("default", batch(put("a", 2), guards=(Guard("a", Revision(7)),)))
        await engine.commit("default", batch(Delete("none")))

    assert set(settings) == {"on" if writes else "off"}
    assert len(settings) >= 3


async def test_a_refusal_by_what_a_reply_has_found_is_one_round_trip(
    engine: PostgresEngine, other: PostgresEngine, spy: Spy
) -> None:
    """The reply to a comparison that failed is as good as one that held, for a batch that writes nothing."""
    await engine.commit("default", batch(put("a", 1)))
    await other.commit("default", batch(put("a", 2)))
    (found,) = await other.read("default", ["a"])
    await spy.forget()

    outcome = await engine.commit("default", batch(Add("a", 1), guards=(Guard("a", Equals(b"1")),)))

    assert isinstance(outcome, Refusal)
    assert outcome.found == found
    assert await spy.statements() == [engine._sql(sql.APPLY)]


async def test_a_guarded_put_on_a_contended_entry_is_one_round_trip(
    engine: PostgresEngine, other: PostgresEngine, spy: Spy
) -> None:
    """The function for puts would leave it out, and not return what is there."""
    expected = await engine.commit("default", batch(put("a", 1)))
    assert isinstance(expected, Commit)
    for number in range(2):
        await other.commit("default", batch(put("a", number)))
        await spy.forget()
        outcome = await engine.commit("default", Batch((Guard("a", Revision(expected.revision)),), (put("a", 9),)))
        assert isinstance(outcome, Refusal)
        statements = await spy.statements()

    assert statements == [engine._sql(sql.APPLY)]


@pytest.mark.parametrize("seed", range(3))
async def test_counters_are_those_of_what_is_stored_after_random_programs_of_two_processes(
    engine: PostgresEngine, other: PostgresEngine, seed: int
) -> None:
    dice = random.Random(seed)

    def some_write(key: str) -> Write:
        value: Any = dice.choice((b"1", b'"' + b"y" * dice.choice((3, 3_000)) + b'"', {"f": b"1", "g": b"22"}))
        return dice.choice(
            (
                Put(
                    key, value, ttl_ms=dice.choice((None, 1, 60_000, KEEP)), meta_json=dice.choice((None, KEEP, b"{}"))
                ),
                Put(key, value),
                Touch(key, dice.choice((None, 1, 60_000))),
                Delete(key, take=dice.random() < 0.5),
                Add(key, 7),
                Patch(key, {"f": b'"%d"' % dice.randrange(1_000)}),
            )
        )

    def some_batch() -> Batch:
        writes = [some_write(key) for key in dice.sample("abcdef", dice.randrange(1, 4))]
        guards = [Guard(key, dice.choice((ABSENT, PRESENT))) for key in dice.sample("abcdef", dice.randrange(2))]
        receipt = {"digest": b"d", "receipt_ms": 60_000} if dice.random() < 0.2 else {}
        return batch(*writes, guards=tuple(guards), **receipt)

    commits = 0
    for _ in range(30):
        running = [dice.choice((engine, other)).commit("default", some_batch()) for _ in range(dice.randrange(1, 8))]
        commits += sum(isinstance(one, Commit) for one in await asyncio.gather(*running))
    assert commits > 30
    await assert_whole(engine)
