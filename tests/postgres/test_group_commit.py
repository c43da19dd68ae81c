"""Commits share statements. No caller notices, except by the time it takes."""

from __future__ import annotations

import asyncio

import pytest

from limpet import codec
from limpet.engines import server_engine
from limpet.engines.postgres import sql
from limpet.engines.postgres.engine import PostgresEngine
from limpet.engines.sql_indexes import quoted
from limpet.errors import InvalidValue, LimpetError
from limpet.model import ABSENT, PRESENT, Add, Batch, Commit, Delete, Guard, Put, Refusal, Revision, Version
from tests.postgres.support import Holder, Spy, batch, connected, put, stored

KEYS = ("a", "b", "c")


async def test_writes_of_one_turn_share_a_statement(engine: PostgresEngine, spy: Spy) -> None:
    """All commits of one turn of the loop are one round trip, up to the size of a group."""
    many = server_engine.GROUP_MAX

    await asyncio.gather(*(engine.commit("default", batch(put(f"key/{n}", n))) for n in range(many)))
    assert await spy.statements() == [engine._sql(sql.APPLY)]

    await asyncio.gather(*(engine.commit("default", batch(put(f"key/{n}", n))) for n in range(many + 2)))
    assert await spy.statements() == [engine._sql(sql.APPLY), *[engine._sql(sql.PUT)] * 2]


async def test_keys_and_values_travel_as_one_text_and_arrive_as_they_are(engine: PostgresEngine, spy: Spy) -> None:
    """Nothing in a key or in a value ends it, and nothing is taken for an escape or for NULL."""
    keys = ['"', "\\", '\\"', '","', "{}", "NULL", "\n", "a\nb", " ", ",", "\x1f", "\x01", "é\U0010ffff", "'"]
    puts = [Put(key, codec.encode([key, "\n", '"\\'])) for key in keys]
    puts += [Put("raw", b'\0\n\\"'), Put("record", {"\n": codec.encode_field("\n")})]
    await engine.commit("default", batch(put("first", 0)))

    await asyncio.gather(*(engine.commit("default", batch(one)) for one in puts))

    assert await spy.count("limpet_put") == 1
    found = await asyncio.gather(*(engine.read("default", [one.key]) for one in puts))
    assert [(entry.key, entry.stored) for (entry,) in found if entry] == [(one.key, one.stored) for one in puts]
    assert await engine.read("default", []) == []


async def test_a_single_put_is_one_round_trip(engine: PostgresEngine, spy: Spy) -> None:
    await engine.commit("default", batch(put("a", 1), Delete("b"), guards=(Guard("c", ABSENT),)))
    await engine.commit("default", batch(put("a", 2)))

    assert await spy.statements() == [engine._sql(sql.APPLY), engine._sql(sql.PUT_ONE)]


async def test_a_put_over_what_has_expired_is_planned(engine: PostgresEngine, spy: Spy) -> None:
    """It makes two changes: the end of the old one, and the new one."""
    await engine.commit("default", batch(Put("a", b"1", ttl_ms=1)))
    await engine._fetch("SELECT pg_sleep(0.003)")

    outcome = await engine.commit("default", batch(put("a", 2), put("b", 2)))

    assert await spy.count("limpet_put") == 1
    assert await spy.count("limpet_apply") == 2
    assert isinstance(outcome, Commit)
    assert [entry.version for entry in outcome.entries if entry is not None] == [1, 1]
    log = await engine.changes("default", 0)
    assert [(change.op, change.key, change.revision, change.commit) for change in log.changes] == [
        ("put", "a", 1, 1),
        ("expire", "a", 2, 4),
        ("put", "a", 3, 4),
        ("put", "b", 4, 4),
    ]


# Puts with an expected revision ------------------------------------------------------


def guarded(key: str, number: int, expected: int) -> Batch:
    """A put that expects a revision of its key, or 0 for no such key; its request has no id."""
    return Batch((Guard(key, Revision(expected) if expected else ABSENT),), (put(key, number),))


async def test_a_single_guarded_put_is_one_round_trip(engine: PostgresEngine, spy: Spy) -> None:
    await engine.commit("default", batch(put("first", 0)))
    await spy.forget()

    created = await engine.commit("default", guarded("a", 1, 0))
    replaced = await engine.commit("default", guarded("a", 2, 2))

    assert await spy.statements() == [engine._sql(sql.PUT_ONE)] * 2
    assert isinstance(created, Commit)
    assert isinstance(replaced, Commit)
    assert (created.revision, replaced.revision) == (2, 3)
    assert await stored(engine, ["a"]) == {"a": b"2"}


@pytest.mark.parametrize("expected", [0, 2, 9], ids=["absent", "older", "never there"])
async def test_a_single_guarded_put_that_fails_is_refused_with_what_was_found(
    engine: PostgresEngine, spy: Spy, expected: int
) -> None:
    await engine.commit("default", batch(put("a", 1)))
    (found,) = await engine.read("default", ["a"])
    await spy.forget()

    outcome = await engine.commit("default", guarded("a", 2, expected))

    assert await spy.statements() == [engine._sql(sql.PUT_ONE), engine._sql(sql.APPLY)]
    assert isinstance(outcome, Refusal)
    assert (outcome.key, outcome.found, outcome.guard) == ("a", found, guarded("a", 2, expected).guards[0])
    status = await engine.status("default")
    assert (status.revision, status.keys, status.log_changes, status.log_bytes) == (1, 1, 1, 2)


async def test_a_single_put_over_a_missing_entry_is_refused(engine: PostgresEngine) -> None:
    """It must not make the entry that it expects to be there."""
    await engine.commit("default", batch(put("a", 1), Delete("b")))

    outcome = await engine.commit("default", guarded("b", 2, 1))

    assert isinstance(outcome, Refusal)
    assert outcome.found is None
    assert await stored(engine, ["b"]) == {}
    assert (await engine.status("default")).revision == 1


async def test_guarded_and_plain_puts_of_one_turn_share_a_statement(engine: PostgresEngine, spy: Spy) -> None:
    await engine.commit("default", batch(*(put(f"key/{number}", 0) for number in range(10))))
    await spy.forget()

    outcomes = await asyncio.gather(
        *(engine.commit("default", guarded(f"key/{number}", 1, number + 1)) for number in range(10)),
        engine.commit("default", Batch((), (put("plain", 1), put("plain/2", 1)))),
        *(engine.commit("default", guarded(f"new/{number}", 1, 0)) for number in range(10)),
    )

    assert await spy.statements() == [engine._sql(sql.PUT)]
    revisions = [one.revision for one in outcomes if isinstance(one, Commit)]
    assert revisions == [*range(11, 21), 22, *range(23, 33)]


async def test_a_put_whose_guard_fails_is_left_out_of_its_group(engine: PostgresEngine, spy: Spy) -> None:
    """The others are applied, with revisions in a row, and what is left out is planned."""
    await engine.commit("default", batch(put("a", 0), put("b", 0), Put("c", b"0", ttl_ms=1), Put("d", b"0", ttl_ms=1)))
    found = await engine.read("default", ["b"])
    await engine._fetch("SELECT pg_sleep(0.003)")
    await spy.forget()

    outcomes = await asyncio.gather(
        engine.commit("default", guarded("a", 1, 1)),
        engine.commit("default", guarded("b", 1, 1)),
        # It has expired, and a put that replaces it makes two changes.
        engine.commit("default", guarded("c", 1, 0)),
        engine.commit("default", Batch((), (put("e", 1), put("f", 1)))),
        engine.commit("default", guarded("d", 1, 4)),
        engine.commit("default", guarded("g", 1, 7)),
        engine.commit("default", guarded("h", 1, 0)),
    )

    assert await spy.statements() == [engine._sql(sql.PUT), engine._sql(sql.APPLY)]
    assert [one.revision if isinstance(one, Commit) else one.found for one in outcomes] == [
        5,
        found[0],
        10,
        7,
        None,
        None,
        8,
    ]
    log = (await engine.changes("default", 4)).changes
    assert [(change.op, change.key, change.revision, change.commit) for change in log] == [
        ("put", "a", 5, 5),
        ("put", "e", 6, 7),
        ("put", "f", 7, 7),
        ("put", "h", 8, 8),
        ("expire", "c", 9, 10),
        ("put", "c", 10, 10),
    ]
    status = await engine.status("default")
    assert (status.revision, status.keys, status.size_bytes) == (10, 7, 14)
    assert (status.log_changes, status.log_bytes) == (10, 8 + 4 * 2 + 1 + 2)
    # Each batch has its own cause, by which a retry would find it.
    causes = [change.cause for change in log if change.cause]
    assert len({*causes}) == 4
    group = causes[0].rpartition(".")[0]
    assert causes[:4] == [f"{group}.{position}" for position in (1, 5, 5, 8)]
    assert causes[4].rpartition(".")[0] != group


@pytest.mark.parametrize(
    "guards",
    [
        # No entry has revision 0; it does not mean that there is none.
        (Guard("a", Revision(0)),),
        (Guard("a", Revision(2**63)),),
        (Guard("a", PRESENT),),
        (Guard("a", Version(7)),),
        (Guard("b", ABSENT),),
        (Guard("a", PRESENT, "lock"),),
        (Guard("a", ABSENT), Guard("b", ABSENT)),
    ],
    ids=str,
)
@pytest.mark.parametrize("group", ["alone", "beside another"])
async def test_other_guards_are_planned(
    engine: PostgresEngine, spy: Spy, group: str, guards: tuple[Guard, ...]
) -> None:
    await engine.commit("default", batch(put("b", 0)))
    await spy.forget()

    outcome, *_ = await asyncio.gather(
        engine.commit("default", Batch(guards, (put("a", 1),))),
        *([engine.commit("default", batch(put("c", 1)))] if group == "beside another" else []),
    )

    assert await spy.statements() == [engine._sql(sql.APPLY)]
    assert isinstance(outcome, Refusal)
    assert outcome.guard == guards[-1]
    assert await stored(engine, ["a"]) == {}


async def test_a_batch_of_two_puts_with_a_guard_is_not_applied_in_part(engine: PostgresEngine, spy: Spy) -> None:
    await engine.commit("default", batch(put("a", 0)))
    await spy.forget()

    outcome, other = await asyncio.gather(
        engine.commit("default", Batch((Guard("a", ABSENT),), (put("a", 1), put("b", 1)))),
        engine.commit("default", guarded("c", 1, 0)),
    )

    assert await spy.statements() == [engine._sql(sql.APPLY)]
    assert (type(outcome), type(other)) == (Refusal, Commit)
    assert await stored(engine, KEYS) == {"a": b"0", "c": b"1"}


async def test_what_was_left_out_and_then_fails_fails_no_other(engine: PostgresEngine, schema: str) -> None:
    """Two were left out; one of them breaks a constraint of the database. The rest of the group is acknowledged."""
    await engine.commit("default", batch(*(Put(key, b"0", ttl_ms=1) for key in ("odd", "even"))))
    await engine._fetch("SELECT pg_sleep(0.003)")
    async with connected() as connection:
        await connection.execute(
            f"ALTER TABLE {quoted(schema)}.limpet_entries ADD CONSTRAINT no_odd CHECK (key <> 'odd') NOT VALID"
        )

    outcomes = await asyncio.gather(
        *(engine.commit("default", guarded(key, 1, 0)) for key in ("a", "odd", "even", "b")), return_exceptions=True
    )

    assert [type(one) for one in outcomes] == [Commit, InvalidValue, Commit, Commit]
    assert await stored(engine, ["a", "odd", "even", "b"]) == {"a": b"1", "even": b"1", "b": b"1"}


# Members of a group ------------------------------------------------------------------


@pytest.mark.parametrize("others", ["puts", "adds"])
async def test_a_constraint_of_the_database_refuses_one_member_alone(
    engine: PostgresEngine, schema: str, others: str
) -> None:
    """Batches that are committed together each have their own outcome: one that fails does not fail another."""
    await engine.commit("default", batch(put("first", 1)))
    async with connected() as connection:
        await connection.execute(
            f"ALTER TABLE {quoted(schema)}.limpet_entries ADD CONSTRAINT no_odd CHECK (key <> 'odd')"
        )
    keys = [*(f"key/{number}" for number in range(10)), "odd", *(f"key/{number}" for number in range(10, 20))]
    batches = [batch(put(key, 1)) if others == "puts" else batch(Add(key, 1)) for key in keys]

    found = await asyncio.gather(*(engine.commit("default", one) for one in batches), return_exceptions=True)

    outcomes = dict(zip(keys, found, strict=True))
    assert isinstance(outcomes.pop("odd"), LimpetError)
    assert all(isinstance(outcome, Commit) for outcome in outcomes.values())
    assert (await engine.status("default")).keys == 21


async def test_adds_of_one_turn_share_a_statement(engine: PostgresEngine, spy: Spy) -> None:
    adding = Batch((), (Add("hits", 1),))
    outcomes = await asyncio.gather(*(engine.commit("default", adding) for _ in range(50)))

    assert await spy.statements() == [engine._sql(sql.APPLY)]
    assert [one.revision for one in outcomes if isinstance(one, Commit)] == [*range(1, 51)]
    assert await stored(engine, ["hits"]) == {"hits": b"50"}


async def test_writes_of_one_key_in_one_turn_are_planned_one_after_the_other(engine: PostgresEngine, spy: Spy) -> None:
    """The function for puts replaces each entry once, so such a group is planned here."""
    outcomes = await asyncio.gather(*(engine.commit("default", batch(put("a", n))) for n in range(5)))

    assert await spy.statements() == [engine._sql(sql.APPLY)]
    assert [one.entries[0].version for one in outcomes if isinstance(one, Commit) and one.entries[0]] == [1, 2, 3, 4, 5]
    assert await stored(engine, ["a"]) == {"a": b"4"}


async def test_a_refused_member_leaves_the_others_untouched(engine: PostgresEngine, spy: Spy) -> None:
    """A guard fails: nothing changes, no revision is used, and the others get theirs in a row."""
    first, refused, last = await asyncio.gather(
        engine.commit("default", batch(put("a", 1), put("b", 1))),
        engine.commit("default", batch(put("c", 2), put("d", 2), guards=(Guard("e", PRESENT),))),
        engine.commit("default", batch(put("f", 3))),
    )

    assert await spy.statements() == [engine._sql(sql.APPLY)]
    assert isinstance(refused, Refusal)
    assert (refused.key, refused.found) == ("e", None)
    assert isinstance(first, Commit)
    assert isinstance(last, Commit)
    assert (first.revision, last.revision) == (2, 3)
    assert await stored(engine, ["a", "b", "c", "d", "f"]) == {"a": b"1", "b": b"1", "f": b"3"}
    assert [change.revision for change in (await engine.changes("default", 0)).changes] == [1, 2, 3]


async def test_a_refused_member_of_a_planned_group_leaves_the_others_untouched(
    engine: PostgresEngine, spy: Spy
) -> None:
    first, refused, last = await asyncio.gather(
        engine.commit("default", batch(put("a", 1), put("b", 1))),
        engine.commit("default", batch(put("a", 2), put("b", 2), guards=(Guard("a", ABSENT),))),
        engine.commit("default", batch(Add("a", 10), guards=(Guard("a", Version(1)),))),
    )

    assert await spy.count("limpet_apply") == 1
    assert isinstance(first, Commit)
    assert isinstance(refused, Refusal)
    # It was decided on what the member before it left, which no table held yet.
    assert refused.found == first.entries[0]
    assert isinstance(last, Commit)
    assert (first.revision, last.revision) == (2, 3)
    assert await stored(engine, KEYS) == {"a": b"11", "b": b"1"}


async def test_a_group_that_is_refused_as_a_whole_leaves_no_trace(engine: PostgresEngine) -> None:
    outcomes = await asyncio.gather(
        *(engine.commit("default", batch(put(key, 1), guards=(Guard(key, PRESENT),))) for key in KEYS),
        engine.commit("default", batch(Delete("a"))),
    )

    assert [type(one) for one in outcomes] == [Refusal, Refusal, Refusal, Commit]
    status = await engine.status("default")
    assert (status.revision, status.keys, status.log_changes) == (0, 0, 0)


async def test_a_repeated_request_within_a_group_is_answered_once(engine: PostgresEngine, spy: Spy) -> None:
    """A write with a request id can be repeated: it returns the first result and applies nothing."""
    repeated: Batch = batch(Add("hits", 1), digest=b"digest", receipt_ms=600_000)

    outcomes = await asyncio.gather(*(engine.commit("default", repeated) for _ in range(5)))

    assert await spy.statements() == [engine._sql(sql.APPLY)]
    assert [isinstance(one, Commit) and one.replayed for one in outcomes] == [False, True, True, True, True]
    assert await stored(engine, ["hits"]) == {"hits": b"1"}


async def test_every_value_can_be_stored_by_the_server(engine: PostgresEngine) -> None:
    """A value that made the statement fail would fail the whole group. No value does."""
    nasty = [b'"\\u0000"', b'{"\\u0000":1}', b"1e308", b"5e-324", b'"' + "\U0010ffff".encode() + b'"', b"\0\0\xff"]
    nasty += [b"[" * 128 + b"]" * 128, b'"' + b"x" * 999_998 + b'"']

    outcomes = await asyncio.gather(
        *(engine.commit("default", batch(Put(f"key/{n}", value))) for n, value in enumerate(nasty))
    )

    assert [type(one) for one in outcomes] == [Commit] * len(nasty)
    assert list((await stored(engine, [f"key/{n}" for n in range(len(nasty))])).values()) == nasty


# Cancelling -----------------------------------------------------------------------


async def test_cancelled_before_its_group_starts_is_not_applied(engine: PostgresEngine, schema: str) -> None:
    """Cancelling a caller leaves the batch done or not done, never half."""
    async with connected() as connection:
        holder = Holder(connection, schema)
        await holder.hold("default")
        # While the first group is held up, three more wait for the second.
        running = asyncio.create_task(engine.commit("default", batch(put("running", 1))))
        await holder.await_waiter()
        waiting = [
            asyncio.create_task(engine.commit("default", batch(put(key, 1), put(f"{key}/2", 1)))) for key in KEYS
        ]
        await asyncio.sleep(0)

        waiting[1].cancel()
        await asyncio.gather(waiting[1], return_exceptions=True)
        await holder.release()
        outcomes = await asyncio.gather(running, *waiting, return_exceptions=True)

    assert [type(outcome) for outcome in outcomes] == [Commit, Commit, asyncio.CancelledError, Commit]
    assert await stored(engine, ["running", *KEYS, "b/2"]) == {"running": b"1", "a": b"1", "c": b"1"}
    assert (await engine.status("default")).revision == 5


async def test_cancelled_after_its_group_started_is_finished(engine: PostgresEngine, schema: str) -> None:
    async with connected() as connection:
        holder = Holder(connection, schema)
        await holder.hold("default")
        tasks = [asyncio.create_task(engine.commit("default", batch(put(key, 1), put(f"{key}/2", 1)))) for key in KEYS]
        await holder.await_waiter()

        tasks[1].cancel()
        await asyncio.gather(tasks[1], return_exceptions=True)
        assert tasks[1].cancelled()
        await holder.release()
        outcomes = await asyncio.gather(tasks[0], tasks[2])

    assert [type(outcome) for outcome in outcomes] == [Commit, Commit]
    assert await stored(engine, [*KEYS, "b/2"]) == {"a": b"1", "b": b"1", "c": b"1", "b/2": b"1"}


async def test_closing_finishes_what_has_begun(engine: PostgresEngine, schema: str) -> None:
    """Commits that began are finished; later calls raise Closed."""
    async with connected() as connection:
        holder = Holder(connection, schema)
        await holder.hold("default")
        running = asyncio.create_task(engine.commit("default", batch(put("a", 1))))
        await holder.await_waiter()
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)

        await holder.release()
        assert isinstance(await running, Commit)
        await closing
        table = f"{quoted(schema)}.limpet_entries"
        assert await connection.fetchval(f"SELECT value FROM {table} WHERE key = 'a'") == "1"


# Namespaces and reads --------------------------------------------------------------


async def test_namespaces_commit_beside_one_that_is_held_up(engine: PostgresEngine, schema: str) -> None:
    """Each namespace locks its own row, and there are enough connections."""
    async with connected() as connection:
        holder = Holder(connection, schema)
        await holder.hold("third")
        stuck = asyncio.create_task(engine.commit("third", batch(put("a", 1))))
        await holder.await_waiter()

        outcomes = await asyncio.gather(
            *(engine.commit(name, batch(write)) for name in ("one", "two") for write in (put("a", 1), Add("hits", 1)))
        )
        assert [type(one) for one in outcomes] == [Commit] * 4
        assert not stuck.done()
        # Nor do its readers wait.
        assert await engine.read("third", ["a"]) == [None]

        await holder.release()
        assert isinstance(await stuck, Commit)


async def test_reads_of_one_turn_are_one_statement(engine: PostgresEngine, spy: Spy) -> None:
    await engine.commit("default", batch(*(put(f"key/{n}", n) for n in range(100))))
    await spy.forget()

    answers = await asyncio.gather(*(engine.read("default", [f"key/{n}", "missing"]) for n in range(30)))

    assert await spy.statements() == [engine._sql(sql.READ)]
    assert [entry and entry.stored for entry, _ in answers] == [b"%d" % n for n in range(30)]
    assert {missing for _, missing in answers} == {None}


async def test_many_reads_of_one_turn_are_two_statements(engine: PostgresEngine, spy: Spy) -> None:
    """So that the server works on one half while this process works on the other."""
    await engine.commit("default", batch(*(put(f"key/{n}", n) for n in range(100))))
    await spy.forget()

    answers = await asyncio.gather(*(engine.read("default", [f"key/{n}"]) for n in range(100)))

    statements = await spy.statements()
    assert [text for text in statements if "limpet_entries" in text] == [engine._sql(sql.READ)] * 2
    assert [entry and entry.stored for (entry,) in answers] == [b"%d" % n for n in range(100)]


async def test_a_cancelled_reader_leaves_the_others_theirs(engine: PostgresEngine) -> None:
    await engine.commit("default", batch(put("a", 1)))
    readers = [asyncio.create_task(engine.read("default", ["a"])) for _ in range(3)]
    await asyncio.sleep(0)

    readers[1].cancel()
    answers = await asyncio.gather(*readers, return_exceptions=True)

    assert isinstance(answers[1], asyncio.CancelledError)
    assert answers[0] == answers[2] != [None]
