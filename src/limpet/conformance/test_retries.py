"""Retries."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import limpet
from limpet.conformance.conftest import Elapse, OpenStore
from limpet.conformance.support import PATIENCE_S, fail, next_event, next_events, session_of, stands_still
from limpet.errors import Ambiguous, Conflict, Contention, LockHeld, NotFound, TypeMismatch, Unavailable

Act = Callable[[limpet.Store, dict[str, Any]], Awaitable[Any]]

# Every kind of write. The second argument takes more options, such as a request id.
WRITES: dict[str, Act] = {
    "put": lambda store, more: store.put("n", 7, **more),
    "put of a record": lambda store, more: store.put("n", limpet.Fields(a=b"1"), ttl=60, meta={"by": "me"}, **more),
    "create": lambda store, more: store.create("new", [1], **more),
    "add": lambda store, more: store.add("n", 5, **more),
    "add to nothing": lambda store, more: store.add("new", 5, **more),
    "delete": lambda store, more: store.delete("n", **more),
    "delete nothing": lambda store, more: store.delete("missing", **more),
    "take": lambda store, more: store.take("text", **more),
    "take nothing": lambda store, more: store.take("missing", "default", **more),
    "touch": lambda store, more: store.touch("n", 60, **more),
    "touch nothing": lambda store, more: store.touch("missing", 60, **more),
    "persist": lambda store, more: store.persist("text", **more),
    "record put": lambda store, more: store.record("record").put({"a": 2}, **more),
    "record set": lambda store, more: store.record("record").set({"b": b"2"}, unset=["a"], **more),
    "record swap": lambda store, more: store.record("record").swap("a", 1, 2, set={"b": 3}, **more),
    "batch": lambda store, more: (
        store.batch(**more).add("n").put("new", 1).delete("text").touch("record", 60).delete("missing").commit()
    ),
    "batch that keeps": lambda store, more: (
        store.batch(**more).create("text", 1, or_keep=True).create("new", 1, or_keep=True).delete("n").commit()
    ),
    "batch that keeps all": lambda store, more: store.batch(**more).create("text", 1, or_keep=True).commit(),
}

# The writes above, and those that take no request id.
ALL_WRITES: dict[str, Act] = {
    **WRITES,
    "update": lambda store, _: store.update("n", lambda found: found * 2),
    "update to nothing": lambda store, _: store.update("n", lambda _: limpet.ABSENT),
    "record delete": lambda store, _: store.record("record").delete(),
    "batch that takes": lambda store, _: store.batch().take("text").set("record", a=5).commit(),
}


async def prepare(store: limpet.Store) -> None:
    await store.put("n", 1)
    await store.put("text", "secret", ttl=1000, meta={"by": "me"})
    await store.record("record").put({"a": 1, "c": b"3"})


def comparable(result: Any) -> Any:
    """The part of a result that does not depend on revisions and times, so that two stores can be compared."""
    if isinstance(result, limpet.Commit):
        entries, ended = [[comparable(entry) for entry in each] for each in (result.entries, result.ended)]
        return [entries, ended, result.kept]
    if isinstance(result, limpet.Entry):
        return (result.key, result.value, result.version, result.meta, result.expires_at is None)
    return result


async def state(store: limpet.Store) -> list[Any]:
    return [comparable(entry) async for entry in store.scan()]


async def while_time_passes(elapse: Elapse, work: Awaitable[Any]) -> Any:
    """Let time pass until the work is done: a store that tries again sleeps on its clock."""
    working = asyncio.ensure_future(work)
    async with asyncio.timeout(PATIENCE_S):
        while not working.done():
            await elapse(0.05)
    return working.result()


# Request ids ------------------------------------------------------------------


@pytest.mark.parametrize("write", WRITES)
async def test_every_write_can_be_repeated(store: limpet.Store, write: str) -> None:
    """A write with a request id can be repeated: it returns the first result and applies nothing."""
    await prepare(store)
    first = await WRITES[write](store, {"request_id": "request-1"})
    after, revision = await state(store), (await store.status()).revision

    again = await WRITES[write](store, {"request_id": "request-1"})

    assert comparable(again) == comparable(first)
    if isinstance(first, limpet.Entry):
        assert again == first
    assert await state(store) == after
    assert (await store.status()).revision == revision


async def test_a_repetition_makes_no_event(store: limpet.Store) -> None:
    """A write with a request id can be repeated: it returns the first result and applies nothing."""
    async with store.watch() as watch:
        for _ in range(3):
            await store.put("a", 1, request_id="request-1")
        await store.put("end", 1)

        assert [event.key for event in await next_events(watch, 2)] == ["a", "end"]


async def test_of_all_who_repeat_at_once_one_applies(store: limpet.Store, open_store: OpenStore) -> None:
    """A write with a request id can be repeated: it returns the first result and applies nothing."""
    other = await open_store()

    answers = await asyncio.gather(
        *((store, other)[number % 2].add("n", 3, request_id="request-1") for number in range(16))
    )

    assert answers == [3] * 16
    assert await store.get("n") == 3


async def test_another_store_may_repeat(open_store: OpenStore) -> None:
    """A write with a request id can be repeated: it returns the first result and applies nothing."""
    first, second = await open_store(), await open_store()
    entry = await first.put("a", [1], request_id="request-1")

    assert await second.put("a", [1], request_id="request-1") == entry


async def test_another_request_id_is_another_write(store: limpet.Store) -> None:
    """A write with a request id can be repeated: it returns the first result and applies nothing."""
    assert await store.add("n", request_id="request-1") == 1
    assert await store.add("n", request_id="request-2") == 2
    assert await store.add("n") == 3


async def test_request_ids_of_two_namespaces_do_not_meet(store: limpet.Store) -> None:
    """A write with a request id can be repeated: it returns the first result and applies nothing."""
    other = store.namespace(f"{store.name}-b")

    assert await store.add("n", 1, request_id="request-1") == 1
    assert await other.add("n", 10, request_id="request-1") == 10


async def test_a_fenced_write_can_be_repeated_after_its_lock(store: limpet.Store) -> None:
    """A write with a request id can be repeated: it returns the first result and applies nothing.

    It was done under a lock that was released since. A new holder repeats it under its own token.
    """
    lock = store.lock("job", ttl=60)
    await lock.acquire()
    fence = lock.fence
    assert await store.add("n", request_id="request-1", fence=fence) == 1
    await lock.release()

    assert await store.add("n", request_id="request-1", fence=fence) == 1
    await lock.acquire()
    assert await store.add("n", request_id="request-1", fence=lock) == 1
    assert await store.get("n") == 1


async def test_a_guarded_write_can_be_repeated(store: limpet.Store) -> None:
    """A write with a request id can be repeated: it returns the first result and applies nothing.

    The guard holds no longer, because the write itself has changed the key.
    """
    before = await store.put("a", 1)
    first = await store.put("a", 2, expect=before, request_id="request-1")

    assert await store.put("a", 2, expect=before, request_id="request-1") == first


async def test_a_repeated_add_gives_the_first_sum(store: limpet.Store) -> None:
    """A repeated add gives the value of the first."""
    assert await store.add("n", 5, request_id="request-1") == 5
    await store.add("n", 100)

    assert await store.add("n", 5, request_id="request-1") == 5
    await store.delete("n")
    assert await store.add("n", 5, request_id="request-1") == 5
    assert await store.entry("n") is None


@pytest.mark.parametrize("value", [None, 0, "secret", [1, {"a": 2.5}], b"", b"raw", limpet.Fields(a=1, b=b"2")])
async def test_a_repeated_take_gives_what_was_taken(store: limpet.Store, value: Any) -> None:
    """A repeated take gives the value that was taken."""
    await store.put("a", value)
    first = await store.take("a", "default", request_id="request-1")
    await store.put("a", "something new")

    again = await store.take("a", "default", request_id="request-1")

    assert (first, again) == (value, value)
    assert type(again) is type(value)
    assert await store.get("a") == "something new"


async def test_a_repeated_take_of_nothing_takes_nothing(store: limpet.Store) -> None:
    """A repeated take gives the value that was taken."""
    assert await store.take("a", "default", request_id="request-1") == "default"
    await store.put("a", "something new")

    assert await store.take("a", "default", request_id="request-1") == "default"
    assert await store.get("a") == "something new"


async def test_a_repeated_put_gives_the_first_entry(store: limpet.Store) -> None:
    """A repeated put, create, delete, touch and set give their first results."""
    first = await store.put("a", [1], ttl=60, meta={"by": "me"}, request_id="request-1")
    await store.put("a", 2)

    assert await store.put("a", [1], ttl=60, meta={"by": "me"}, request_id="request-1") == first
    assert await store.get("a") == 2


async def test_a_repeated_create_does_not_conflict(store: limpet.Store) -> None:
    """A repeated put, create, delete, touch and set give their first results."""
    first = await store.create("a", 1, request_id="request-1")

    assert await store.create("a", 1, request_id="request-1") == first
    with pytest.raises(Conflict):
        await store.create("a", 1, request_id="request-2")


async def test_a_repeated_delete_is_answered_as_the_first_was(store: limpet.Store) -> None:
    """A repeated put, create, delete, touch and set give their first results."""
    await store.put("a", 1)
    assert await store.delete("a", request_id="request-1") is True
    assert await store.delete("b", request_id="request-2") is False
    await store.put("a", 2)
    await store.put("b", 2)

    assert await store.delete("a", request_id="request-1") is True
    assert await store.delete("b", request_id="request-2") is False
    assert (await store.keys()).keys == ["a", "b"]


async def test_a_repeated_touch_gives_the_first_entry(store: limpet.Store, elapse: Elapse) -> None:
    """A repeated put, create, delete, touch and set give their first results."""
    await store.put("a", "value")
    first = await store.touch("a", 60, request_id="request-1")
    await elapse(0.5)
    now = await store.touch("a", 120)

    assert await store.touch("a", 60, request_id="request-1") == first
    assert await store.entry("a") == now


async def test_a_repeated_touch_of_nothing_touches_nothing(store: limpet.Store) -> None:
    """A repeated put, create, delete, touch and set give their first results."""
    assert await store.touch("a", 60, request_id="request-1") is None
    entry = await store.put("a", 1)

    assert await store.touch("a", 60, request_id="request-1") is None
    assert await store.entry("a") == entry


async def test_a_repeated_set_gives_the_first_record(store: limpet.Store) -> None:
    """A repeated put, create, delete, touch and set give their first results."""
    record = store.record("r")
    await record.set(a=1)
    first = await record.set({"b": b"2"}, unset=["a"], request_id="request-1")
    await record.set(b=3, c=4)

    assert await record.set({"b": b"2"}, unset=["a"], request_id="request-1") == first
    assert first.value == {"b": b"2"}
    assert await record.fields() == {"b": 3, "c": 4}


async def test_a_repeated_swap_wins_again(store: limpet.Store) -> None:
    """A repeated put, create, delete, touch and set give their first results."""
    record = store.record("r")
    await record.set(state="new")
    assert await record.swap("state", "new", "taken", request_id="request-1")
    await record.set(state="done")

    assert await record.swap("state", "new", "taken", request_id="request-1")
    assert await record.get("state") == "done"


async def test_a_repeated_batch_is_answered_as_a_whole(store: limpet.Store) -> None:
    """A repeated batch returns its whole first result."""
    await prepare(store)

    async def send() -> limpet.Commit:
        draft = store.batch(request_id="request-1").expect("text", limpet.PRESENT)
        draft.add("n", 5).put("new", {"a": 1}).take("text").delete("missing").set("record", a=2)
        return await draft.commit()

    first = await send()
    await store.batch().put("n", 0).delete("new").put("text", "again").delete("record").commit()
    after = await state(store)

    again = await send()

    assert (again.revision, again.entries, again.ended, again.at_ms) == (
        first.revision,
        first.entries,
        first.ended,
        first.at_ms,
    )
    assert again.ended[2] is not None
    assert again.ended[2].value == "secret"
    assert (first.replayed, again.replayed) == (False, True)
    assert await state(store) == after


async def test_a_repeated_batch_tells_what_it_has_kept(store: limpet.Store) -> None:
    """A repeated batch returns its whole first result."""
    kept = await store.put("kept", {"a": 1}, meta={"by": "me"})

    async def send() -> limpet.Commit:
        draft = store.batch(request_id="request-1")
        return await draft.create("kept", 2, or_keep=True).create("new", {"b": 2}, or_keep=True).commit()

    first = await send()
    await store.batch().put("kept", 0).delete("new").commit()
    again, outcome = await send(), await store.outcome("request-1")

    assert again.entries == first.entries
    assert again.entries[0] == kept
    assert outcome is not None
    assert again.kept == first.kept == outcome.kept == ("kept",)
    assert outcome.entries[0] == kept


async def test_a_lost_answer_does_not_make_up_what_was_kept(
    store: limpet.Store, open_store: OpenStore, elapse: Elapse
) -> None:
    """A batch whose reply was lost tells a kept entry as it was, or None if it has changed since."""
    other = await open_store()
    same = await store.put("same", "kept")
    changed = await store.put("changed", "kept")
    fail(store, after=1)
    async with other.watch("new") as watch:
        draft = store.batch().create("same", 1, or_keep=True).create("changed", 1, or_keep=True).put("new", 1)
        committing = asyncio.ensure_future(draft.commit())
        await next_event(watch)
    await other.put("changed", "theirs")

    commit = await while_time_passes(elapse, committing)

    assert commit.entries[0] == same
    assert commit.entries[1] in (None, changed)
    assert commit.kept == ("same", "changed")
    assert await store.get("changed") == "theirs"


async def test_a_repeated_check_is_answered_as_the_first(store: limpet.Store) -> None:
    """A repeated batch returns its whole first result."""
    await store.put("a", 1)
    await store.batch(request_id="request-1").expect("a", limpet.PRESENT).commit()
    await store.delete("a")

    again = await store.batch(request_id="request-1").expect("a", limpet.PRESENT).commit()

    assert again.replayed


OTHERS: dict[str, Act] = {
    "another value": lambda store, more: store.put("a", 2, **more),
    "another type of value": lambda store, more: store.put("a", 1.0, **more),
    "the same text as bytes": lambda store, more: store.put("a", b"1", **more),
    "another key": lambda store, more: store.put("b", 1, **more),
    "another ttl": lambda store, more: store.put("a", 1, ttl=5, **more),
    "another meta": lambda store, more: store.put("a", 1, meta={"by": "me"}, **more),
    "a guard": lambda store, more: store.put("a", 1, expect=limpet.PRESENT, **more),
    "another guard": lambda store, more: store.create("a", 1, **more),
    "add": lambda store, more: store.add("a", 1, **more),
    "delete": lambda store, more: store.delete("a", **more),
    "take": lambda store, more: store.take("a", **more),
    "touch": lambda store, more: store.touch("a", 60, **more),
    "record": lambda store, more: store.record("a").put({"a": 1}, **more),
    "a larger batch": lambda store, more: store.batch(**more).put("a", 1).put("b", 1).commit(),
    "a check": lambda store, more: store.batch(**more).expect("a", limpet.PRESENT).commit(),
}


@pytest.mark.parametrize("other", OTHERS)
async def test_an_id_names_one_request(store: limpet.Store, other: str) -> None:
    """The same id with another request is Conflict with the reason stale_request."""
    entry = await store.put("a", 1, request_id="request-1")

    with pytest.raises(Conflict) as caught:
        await OTHERS[other](store, {"request_id": "request-1"})

    assert caught.value.reason == "stale_request"
    assert caught.value.key == "request-1"
    assert await store.entry("a") == entry
    assert (await store.status()).revision == entry.revision


async def test_take_and_delete_are_two_requests(store: limpet.Store) -> None:
    """The same id with another request is Conflict with the reason stale_request."""
    await store.delete("a", request_id="request-1")

    with pytest.raises(Conflict) as caught:
        await store.take("a", request_id="request-1")

    assert caught.value.reason == "stale_request"


async def test_a_stale_request_leaves_the_first_receipt(store: limpet.Store) -> None:
    """The same id with another request is Conflict with the reason stale_request."""
    await store.add("n", 1, request_id="request-1")
    with pytest.raises(Conflict):
        await store.add("n", 2, request_id="request-1")

    assert await store.add("n", 1, request_id="request-1") == 1


async def test_a_refused_write_leaves_its_id_free(store: limpet.Store) -> None:
    """A refused write leaves no receipt: the id can be used again."""
    await store.put("a", 1)
    with pytest.raises(Conflict) as caught:
        await store.create("a", 2, request_id="request-1")
    assert caught.value.reason == "guard"

    assert await store.outcome("request-1") is None
    assert await store.add("b", 5, request_id="request-1") == 5


async def test_a_refused_write_can_be_tried_again_when_it_fits(store: limpet.Store) -> None:
    """A refused write leaves no receipt: the id can be used again."""
    await store.put("a", 1)
    with pytest.raises(Conflict):
        await store.create("a", 2, request_id="request-1")
    await store.delete("a")

    first = await store.create("a", 2, request_id="request-1")

    assert first.value == 2
    assert await store.create("a", 2, request_id="request-1") == first


async def test_no_refusal_leaves_a_receipt(store: limpet.Store) -> None:
    """A refused write leaves no receipt: the id can be used again."""
    await store.put("a", "text")
    record = store.record("r")
    await record.set(state="new")

    with pytest.raises(TypeMismatch):
        await store.add("a", request_id="request-1")
    with pytest.raises(NotFound):
        await store.record("missing").set(a=1, if_exists=True, request_id="request-2")
    assert not await record.swap("state", "old", "newer", request_id="request-3")
    with pytest.raises(Conflict):
        await store.batch(request_id="request-4").put("b", 1).expect("a", limpet.ABSENT).commit()

    for number in (1, 2, 3, 4):
        assert await store.outcome(f"request-{number}") is None
        assert await store.add("n", number, request_id=f"request-{number}") > 0
    assert await store.get("n") == 10


# Outcomes ---------------------------------------------------------------------


async def test_the_outcome_of_a_write_is_its_commit(store: limpet.Store) -> None:
    """`outcome` gives the result of a request id, or None when it was not applied."""
    await store.put("old", "value")
    commit = await store.batch(request_id="request-1").put("a", 1).add("n", 5).take("old").commit()
    await store.put("a", 2)

    outcome = await store.outcome("request-1")

    assert outcome is not None
    assert outcome.replayed
    assert (outcome.revision, outcome.at_ms) == (commit.revision, commit.at_ms)
    assert [entry and entry.revision for entry in outcome.entries] == [
        entry and entry.revision for entry in commit.entries
    ]
    assert outcome.entries[1] is not None
    assert outcome.entries[1].value == 5
    assert outcome.ended[2] is not None
    assert outcome.ended[2].value == "value"


async def test_a_request_that_was_never_made_has_no_outcome(store: limpet.Store) -> None:
    """`outcome` gives the result of a request id, or None when it was not applied."""
    await store.put("request-1", "a key of that name")
    await store.namespace(f"{store.name}-b").put("a", 1, request_id="request-1")

    assert await store.outcome("request-1") is None


async def test_what_changed_nothing_has_an_outcome(store: limpet.Store) -> None:
    """`outcome` gives the result of a request id, or None when it was not applied."""
    await store.delete("missing", request_id="request-1")

    outcome = await store.outcome("request-1")

    assert outcome is not None
    assert (outcome.entries, outcome.ended) == ((None,), (None,))


async def test_reading_an_outcome_changes_nothing(store: limpet.Store) -> None:
    """`outcome` gives the result of a request id, or None when it was not applied."""
    entry = await store.put("a", 1, request_id="request-1")
    assert await store.outcome("request-1") == await store.outcome("request-1")
    assert await store.outcome("request-2") is None

    assert (await store.status()).revision == entry.revision
    assert (await store.put("b", 1, request_id="request-2")).value == 1


async def test_an_ambiguous_write_has_an_outcome(store: limpet.Store, elapse: Elapse) -> None:
    """`outcome` gives the result of a request id, or None when it was not applied."""
    failing = fail(store, after=5)
    with pytest.raises(Ambiguous) as caught:
        await while_time_passes(elapse, store.add("n", 5, request_id="request-1"))
    assert failing.after == 0
    assert caught.value.request_id == "request-1"

    outcome = await store.outcome("request-1")

    assert outcome is not None
    assert outcome.entries[0] is not None
    assert outcome.entries[0].value == 5
    assert await store.add("n", 5, request_id="request-1") == 5


async def test_an_ambiguous_write_without_an_id_has_an_outcome_too(store: limpet.Store, elapse: Elapse) -> None:
    """`outcome` gives the result of a request id, or None when it was not applied.

    The caller gave no id. The error has the id that the store made, and with it the outcome can be
    read and the write repeated.
    """
    fail(store, after=5)
    with pytest.raises(Ambiguous) as caught:
        await while_time_passes(elapse, store.add("n", 5))
    assert caught.value.request_id is not None

    outcome = await store.outcome(caught.value.request_id)

    assert outcome is not None
    assert outcome.entries[0] is not None
    assert outcome.entries[0].value == 5


async def test_an_unsent_write_has_no_outcome(store: limpet.Store, elapse: Elapse) -> None:
    """`outcome` gives the result of a request id, or None when it was not applied."""
    failing = fail(store, before=5)
    with pytest.raises(Unavailable):
        await while_time_passes(elapse, store.add("n", 5, request_id="request-1"))
    assert failing.before == 0

    assert await store.outcome("request-1") is None
    assert await store.add("n", 5, request_id="request-1") == 5


# How long ---------------------------------------------------------------------


async def test_a_receipt_is_remembered_for_ten_minutes(store: limpet.Store, elapse: Elapse) -> None:
    """A receipt is remembered for 10 minutes.

    Where the clock is a server's, ten minutes are too long to wait for.
    """
    await store.add("n", 1, request_id="request-1")
    if stands_still(store):
        await elapse(599)
        await store.sweep()
        await store.trim()
    assert await store.outcome("request-1") is not None
    assert await store.add("n", 1, request_id="request-1") == 1


async def test_a_receipt_is_forgotten_after_ten_minutes(store: limpet.Store, elapse: Elapse) -> None:
    """A receipt is remembered for 10 minutes."""
    await store.add("n", 1, request_id="request-1")
    (receipt,) = await receipts(store, "request-1")
    assert receipt.expires_ms is not None
    assert receipt.expires_ms - receipt.created_ms == 600_000
    if stands_still(store):
        await elapse(601)
        assert await store.outcome("request-1") is None
        assert await store.add("n", 1, request_id="request-1") == 2


async def test_a_repetition_does_not_lengthen_the_memory(store: limpet.Store, elapse: Elapse) -> None:
    """A receipt is remembered for 10 minutes."""
    await store.add("n", 1, request_id="request-1")
    before = await receipts(store, "request-1")
    await elapse(0.5)

    await store.add("n", 1, request_id="request-1")

    assert await receipts(store, "request-1") == before


async def test_trimming_the_log_keeps_the_receipts(open_store: OpenStore) -> None:
    """A receipt is remembered for 10 minutes."""
    store = await open_store(window=limpet.Window(changes=1, age_ms_min=0))
    await store.add("n", 1, request_id="request-1")
    for number in range(20):
        await store.put("a", number)
    await store.trim()

    assert await store.add("n", 1, request_id="request-1") == 1


async def receipts(store: limpet.Store, request_id: str) -> list[limpet.Entry]:
    """The receipt of a request, as the engine holds it."""
    engine, name = session_of(store).engine, store.name

    async def read() -> list[limpet.Entry]:
        return [entry for entry in await engine.read(name, [request_id], family="receipt") if entry is not None]

    runner = getattr(getattr(store, "_twin", None), "_runner", None)
    return await read() if runner is None else await asyncio.to_thread(runner.run, read())


async def test_a_receipt_survives_a_restart(open_store: OpenStore) -> None:
    """A receipt survives a restart where entries do."""
    before = await open_store()
    await before.put("text", "secret")
    await before.add("n", 5, request_id="request-1")
    await before.take("text", request_id="request-2")
    entry = await before.put("a", b"raw", request_id="request-3")
    await before.close()

    again = await open_store()

    assert await again.get("n") == 5
    assert await again.add("n", 5, request_id="request-1") == 5
    assert await again.take("text", request_id="request-2") == "secret"
    assert await again.put("a", b"raw", request_id="request-3") == entry
    assert await again.outcome("request-1") is not None
    with pytest.raises(Conflict):
        await again.put("a", b"other", request_id="request-3")


# Lost answers -----------------------------------------------------------------


@pytest.mark.parametrize("lost", [1, 4])
@pytest.mark.parametrize("write", ALL_WRITES)
async def test_a_lost_answer_is_settled(store: limpet.Store, elapse: Elapse, write: str, lost: int) -> None:
    """A write whose reply was lost is retried by the store itself and applied once.

    The same write on a store without failures gives the right result.
    """
    act = ALL_WRITES[write]
    calm = store.namespace(f"{store.name}-calm")
    for each in (store, calm):
        await prepare(each)
    right = await act(calm, {})
    failing = fail(store, after=lost)

    result = await while_time_passes(elapse, act(store, {}))

    assert comparable(result) == comparable(right)
    assert await state(store) == await state(calm)
    assert (await store.status()).log_changes == (await calm.status()).log_changes
    assert failing.commits == lost + 1


@pytest.mark.parametrize("write", WRITES)
async def test_a_lost_answer_under_an_id_is_settled(store: limpet.Store, elapse: Elapse, write: str) -> None:
    """A write whose reply was lost is retried by the store itself and applied once."""
    calm = store.namespace(f"{store.name}-calm")
    for each in (store, calm):
        await prepare(each)
    right = await WRITES[write](calm, {"request_id": "request-1"})
    failing = fail(store, after=2)

    result = await while_time_passes(elapse, WRITES[write](store, {"request_id": "request-1"}))
    again = await WRITES[write](store, {"request_id": "request-1"})

    assert comparable(result) == comparable(again) == comparable(right)
    assert await state(store) == await state(calm)
    assert failing.commits == 4


async def test_others_who_write_meanwhile_are_not_overwritten(
    store: limpet.Store, open_store: OpenStore, elapse: Elapse
) -> None:
    """A write whose reply was lost is retried by the store itself and applied once.

    The write was applied, its reply was lost, and another caller wrote before the store could retry.
    """
    other = await open_store()
    failing = fail(store, after=1)
    async with other.watch("a") as watch:
        putting = asyncio.ensure_future(store.put("a", "mine"))
        await next_event(watch)
    await other.put("a", "theirs")

    entry = await while_time_passes(elapse, putting)

    assert (entry.value, entry.version) == ("mine", 1)
    assert await store.get("a") == "theirs"
    assert failing.commits == 2


async def test_a_lost_take_does_not_take_twice(store: limpet.Store, open_store: OpenStore, elapse: Elapse) -> None:
    """A write whose reply was lost is retried by the store itself and applied once."""
    other = await open_store()
    await store.put("a", "first")
    fail(store, after=1)
    async with other.watch("a") as watch:
        taking = asyncio.ensure_future(store.take("a"))
        await next_event(watch)
    await other.put("a", "second")

    assert await while_time_passes(elapse, taking) == "first"
    assert await store.get("a") == "second"


async def test_concurrent_lost_adds_all_count_once(store: limpet.Store, elapse: Elapse) -> None:
    """A write whose reply was lost is retried by the store itself and applied once."""
    fail(store, after=20)

    numbers = await while_time_passes(elapse, asyncio.gather(*(store.add("n") for _ in range(20))))

    assert sorted(numbers) == list(range(1, 21))
    assert await store.get("n") == 20


async def test_a_lost_lock_answer_is_settled(store: limpet.Store, elapse: Elapse) -> None:
    """A write whose reply was lost is retried by the store itself and applied once.

    Acquiring must not be refused because of its own first attempt.
    """
    lock = store.lock("job", ttl=60)
    failing = fail(store, after=1)
    await while_time_passes(elapse, lock.acquire())
    (found,) = await store.locks()
    assert found.token == lock.token
    assert failing.commits == 2

    failing.after = 1
    await while_time_passes(elapse, lock.refresh())
    failing.after = 1
    await while_time_passes(elapse, lock.release())

    assert await store.locks() == []
    assert not lock.lost


async def test_an_answer_that_stays_lost_is_ambiguous(store: limpet.Store, elapse: Elapse) -> None:
    """A write whose reply was lost is retried by the store itself and applied once.

    The store tries five times and five times the reply is lost. Then it raises Ambiguous.
    """
    failing = fail(store, after=100)

    with pytest.raises(Ambiguous) as caught:
        await while_time_passes(elapse, store.add("n"))

    assert failing.commits == 5
    assert (caught.value.retryable, caught.value.outcome) == (True, "unknown")
    assert await store.get("n") == 1


async def test_a_failure_after_a_lost_answer_is_ambiguous(store: limpet.Store, elapse: Elapse) -> None:
    """A write whose reply was lost is retried by the store itself and applied once.

    The first reply was lost and then nothing could be sent. So the write may have been applied.
    """
    failing = fail(store, after=1)
    async with store.watch("n") as watch:
        adding = asyncio.ensure_future(store.add("n"))
        await next_event(watch)
    failing.before = 100

    with pytest.raises(Ambiguous):
        await while_time_passes(elapse, adding)

    assert failing.commits == 5
    assert await store.get("n") == 1


# Failures that pass -----------------------------------------------------------


@pytest.mark.parametrize("write", ALL_WRITES)
async def test_a_failure_that_passes_is_not_seen(store: limpet.Store, elapse: Elapse, write: str) -> None:
    """A call that fails for a moment is tried again by the store, at most 5 times."""
    act = ALL_WRITES[write]
    calm = store.namespace(f"{store.name}-calm")
    for each in (store, calm):
        await prepare(each)
    right = await act(calm, {})
    failing = fail(store, before=4)

    result = await while_time_passes(elapse, act(store, {}))

    assert comparable(result) == comparable(right)
    assert await state(store) == await state(calm)
    assert failing.commits == 5


@pytest.mark.parametrize("write", WRITES)
async def test_a_failure_that_stays_is_unavailable(store: limpet.Store, elapse: Elapse, write: str) -> None:
    """A call that fails for a moment is tried again by the store, at most 5 times."""
    await prepare(store)
    before, revision = await state(store), (await store.status()).revision
    failing = fail(store, before=5)

    with pytest.raises(Unavailable) as caught:
        await while_time_passes(elapse, WRITES[write](store, {}))

    assert failing.commits == 5
    assert (caught.value.retryable, caught.value.outcome) == (True, "unavailable")
    assert await state(store) == before
    assert (await store.status()).revision == revision


async def test_a_lock_is_acquired_when_the_failure_has_passed(store: limpet.Store, elapse: Elapse) -> None:
    """A call that fails for a moment is tried again by the store, at most 5 times."""
    lock = store.lock("job", ttl=60)
    failing = fail(store, before=4)
    await while_time_passes(elapse, lock.acquire())
    assert failing.commits == 5

    failing.before = 5
    with pytest.raises(Unavailable):
        await while_time_passes(elapse, lock.release())
    await while_time_passes(elapse, lock.release())

    assert await store.locks() == []


async def test_failures_of_both_kinds_are_settled(store: limpet.Store, elapse: Elapse) -> None:
    """A call that fails for a moment is tried again by the store, at most 5 times."""
    failing = fail(store, before=2, after=2)

    assert await while_time_passes(elapse, store.add("n", 3)) == 3

    assert failing.commits == 5
    assert await store.get("n") == 3


class FailingReads:
    """An engine in front of another, one of whose reading primitives fails a given number of times."""

    def __init__(self, engine: Any, failing: str, failures: int) -> None:
        self._engine = engine
        self._failing = failing
        self.failures = failures
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return self._call if name == self._failing else getattr(self._engine, name)

    async def _call(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        if self.failures > 0:
            self.failures -= 1
            raise Unavailable("the connection is lost")
        return await getattr(self._engine, self._failing)(*args, **options)


def fail_reads(store: limpet.Store, failing: str, failures: int) -> FailingReads:
    """Let the reads of a store fail."""
    session: Any = session_of(store)
    session.engine = flaky = FailingReads(session.engine, failing, failures)
    return flaky


async def past(store: limpet.Store) -> list[Any]:
    return [event.value async for event in store.history("n")]


async def present(store: limpet.Store) -> list[Any]:
    async with store.watch("n", initial=True) as watch:
        return [event.value for event in await next_events(watch, 2)]


async def future(store: limpet.Store) -> list[Any]:
    async with store.watch("news") as watch:
        await store.put("news", 1)
        return [(await next_event(watch)).value]


READS: list[tuple[str, Callable[[limpet.Store], Awaitable[Any]], str]] = [
    ("get", lambda store: store.get("n"), "read"),
    ("entry", lambda store: store.entry("n"), "read"),
    ("keys", lambda store: store.keys(), "scan"),
    ("scan", state, "scan"),
    ("outcome", lambda store: store.outcome("request-1"), "read"),
    ("locks", lambda store: store.locks(), "scan"),
    ("history", past, "status"),
    ("history", past, "changes"),
    ("watch", present, "status"),
    ("watch", present, "scan"),
    ("watch", future, "changes"),
]


@pytest.mark.parametrize(("read", "failing"), [case[1:] for case in READS], ids=[f"{a}-{c}" for a, _, c in READS])
async def test_a_read_that_fails_for_a_moment_is_tried_again(
    store: limpet.Store, elapse: Elapse, read: Callable[[limpet.Store], Awaitable[Any]], failing: str
) -> None:
    """A call that fails for a moment is tried again by the store, at most 5 times."""
    await store.put("n", 1, request_id="request-1")
    await store.lock("job", ttl=600).acquire()
    flaky = fail_reads(store, failing, 4)

    result = await while_time_passes(elapse, read(store))

    assert flaky.failures == 0
    assert result


async def test_a_read_that_keeps_failing_is_unavailable(store: limpet.Store, elapse: Elapse) -> None:
    """A call that fails for a moment is tried again by the store, at most 5 times."""
    await store.put("n", 1)
    flaky = fail_reads(store, "read", 1000)

    with pytest.raises(Unavailable):
        await while_time_passes(elapse, store.get("n"))

    assert flaky.calls == 5


# Conflicts --------------------------------------------------------------------

CONFLICTS: dict[str, Callable[[limpet.Store], Awaitable[Any]]] = {
    "put": lambda store: store.put("n", 2, expect=limpet.ABSENT),
    "create": lambda store: store.create("n", 2),
    "add": lambda store: store.add("n", expect=limpet.Version(9)),
    "delete": lambda store: store.delete("n", expect=limpet.Version(9)),
    "take": lambda store: store.take("n", expect=limpet.equals(2)),
    "touch": lambda store: store.touch("n", 5, expect=limpet.Revision(0)),
    "batch": lambda store: store.batch().expect("n", limpet.ABSENT).put("new", 1).commit(),
}


@pytest.mark.parametrize("write", CONFLICTS)
async def test_a_conflict_is_raised_at_once(store: limpet.Store, write: str) -> None:
    """A conflict is never retried by the store, except in `update`."""
    await prepare(store)
    failing = fail(store)

    with pytest.raises(Conflict):
        await CONFLICTS[write](store)

    assert failing.commits == 1


async def test_other_refusals_are_raised_at_once(store: limpet.Store) -> None:
    """A conflict is never retried by the store, except in `update`."""
    await prepare(store)
    await store.lock("job", ttl=60).acquire()
    failing = fail(store)

    assert not await store.record("record").swap("a", 99, 2)
    with pytest.raises(TypeMismatch):
        await store.add("text")
    with pytest.raises(NotFound):
        await store.record("missing").set(a=1, if_exists=True)
    with pytest.raises(LockHeld):
        await store.lock("job", ttl=60).acquire()

    assert failing.commits == 4


def interfering(
    face: str, calls: list[Any], meanwhile: Callable[[], Awaitable[Any]], times: int
) -> Callable[[Any], Any]:
    """A function for `update`. During its first so many calls another caller writes."""
    loop = asyncio.get_running_loop()

    async def write() -> None:
        await meanwhile()

    async def plus_hundred(found: int) -> int:
        calls.append(found)
        if len(calls) <= times:
            await write()
        return found + 100

    def blocking_plus_hundred(found: int) -> int:
        calls.append(found)
        if len(calls) <= times:
            asyncio.run_coroutine_threadsafe(write(), loop).result(PATIENCE_S)
        return found + 100

    return plus_hundred if face == "async" else blocking_plus_hundred


async def test_update_tries_again_after_a_conflict(
    store: limpet.Store, open_store: OpenStore, face: str, elapse: Elapse
) -> None:
    """A conflict is never retried by the store, except in `update`."""
    other, calls = await open_store(), list[Any]()
    await store.put("n", 0)
    failing = fail(store)
    change = interfering(face, calls, lambda: other.add("n"), times=3)

    entry = await while_time_passes(elapse, store.update("n", change))

    assert calls == [0, 1, 2, 3]
    assert entry.value == 103
    assert failing.commits == 4


async def test_update_without_conflict_runs_once(store: limpet.Store, face: str) -> None:
    """A conflict is never retried by the store, except in `update`."""
    calls: list[Any] = []
    await store.put("n", 0)

    await store.update("n", interfering(face, calls, store.status, times=0))

    assert calls == [0]


async def test_a_lost_answer_does_not_run_update_again(store: limpet.Store, face: str, elapse: Elapse) -> None:
    """A conflict is never retried by the store, except in `update`.

    The first attempt has changed the entry that it expected. The retry must not take that for the
    write of another caller.
    """
    calls: list[Any] = []
    await store.put("n", 0)
    fail(store, after=2)

    entry = await while_time_passes(elapse, store.update("n", interfering(face, calls, store.status, times=0)))

    assert calls == [0]
    assert (entry.value, entry.version) == (100, 2)


async def test_update_gives_up(
    store: limpet.Store, open_store: OpenStore, face: str, elapse: Elapse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`update` that never gets through raises Contention."""
    # As many attempts as it has by default take half a minute on a busy machine.
    monkeypatch.setattr("limpet.store.UPDATE_ATTEMPTS", 24)
    other, calls = await open_store(), list[Any]()
    await store.put("n", 0)
    change = interfering(face, calls, lambda: other.add("n"), times=10**6)

    with pytest.raises(Contention) as caught:
        await while_time_passes(elapse, store.update("n", change))

    assert caught.value.key == "n"
    assert caught.value.attempts == len(calls) == 24
    assert (caught.value.retryable, caught.value.outcome) == (True, "unavailable")
    assert await store.get("n") == len(calls)


async def test_writes_of_many_on_one_key_all_get_through(open_store: OpenStore) -> None:
    """Every other write goes on until it succeeds, however many write the same key."""
    stores = [await open_store() for _ in range(4)]
    await stores[0].record("job").put({"n": 0})

    async def write(store: limpet.Store, name: str) -> None:
        for _ in range(5):
            await store.add("count")
            await store.record("job").set({name: True})
            await store.batch().add("from", -1).add("to", 1).commit()

    async with asyncio.TaskGroup() as tasks:
        for number, store in enumerate(stores):
            for task in range(4):
                tasks.create_task(write(store, f"{number}/{task}"))

    assert (await stores[0].get("count"), await stores[0].get("from"), await stores[0].get("to")) == (80, -80, 80)
    fields = await stores[0].record("job").fields()
    assert fields is not None
    assert len(fields) == 17
