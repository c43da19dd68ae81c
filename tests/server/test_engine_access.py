"""Who may ask which primitive for what: a store over a server is held to the rights of its token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

import limpet
from limpet.conformance.support import next_event
from limpet.engine import Engine
from limpet.errors import Conflict, LimpetError, LockHeld, PermissionDenied, RateLimited, ValueTooLarge
from limpet.keys import Span, prefix_span
from limpet.model import Batch, Delete, Entry, Expire, Guard, Patch, Put, Touch, Version, Window
from limpet.server.limits import gates_of, limits_of
from limpet.transition import read_receipt
from tests.server.engine_support import Guests, Running, Scope, Somebody, running

ALL = "read write lock reveal"
GUESTS = Guests(
    Somebody("owner", Scope("trivia", "", ALL)),
    Somebody("alice", Scope("trivia", "alice/", ALL)),
    Somebody("harvester", Scope("trivia", "tenant/acme/", ALL)),
    Somebody("reader", Scope("trivia", "", "read")),
    Somebody("seer", Scope("trivia", "", "read reveal")),
    Somebody("writer", Scope("trivia", "", "write")),
    Somebody("locker", Scope("trivia", "", "lock")),
    Somebody("stranger", Scope("quote", "", ALL)),
)
HIDDEN = b'"hunter2"'


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    """A namespace with something of everybody's in it."""
    async with running(GUESTS) as server:
        async with limpet.open(server.as_("owner"), namespace="trivia", sweep=False) as owner:
            await owner.put("alice/1", "a", request_id="of alice")
            await owner.put("bob/1", "hunter2", request_id="of bob")
            await owner.add("bob/count", 7, request_id="bob counts")
            await owner.lock("bob/door", ttl=600).acquire()
        yield server


@pytest.fixture
async def as_(server: Running) -> AsyncIterator[Callable[[str], Awaitable[limpet.Store]]]:
    opened: list[limpet.Store] = []

    async def open_as(token: str) -> limpet.Store:
        opened.append(await limpet.open(server.as_(token), namespace="trivia", sweep=False))
        return opened[-1]

    yield open_as
    for store in opened:
        await store.close()


As = Callable[[str], Awaitable[limpet.Store]]


def engine_of(store: limpet.Store) -> Engine:
    return store._session.engine


async def commit(engine: Engine, *asked: Any, **options: Any) -> Any:
    guards = tuple(one for one in asked if isinstance(one, Guard))
    writes = tuple(one for one in asked if not isinstance(one, Guard))
    return await engine.commit("trivia", Batch(guards, writes, limpet.new_request_id(), **options))


ATTACKS: dict[str, Callable[[Engine], Awaitable[Any]]] = {
    "read": lambda engine: engine.read("trivia", ["bob/1"]),
    "read beside one's own": lambda engine: engine.read("trivia", ["alice/1", "bob/1"]),
    "read a lock": lambda engine: engine.read("trivia", ["bob/door"], family="lock"),
    "scan": lambda engine: engine.scan("trivia", prefix_span("bob/")),
    "scan everything": lambda engine: engine.scan("trivia", Span("", None)),
    "scan from one's own on": lambda engine: engine.scan("trivia", Span("alice/", None)),
    "scan into the neighbour": lambda engine: engine.scan("trivia", Span("alice/", "bob/2")),
    "scan the sibling of a prefix": lambda engine: engine.scan("trivia", prefix_span("alice")),
    "scan for keys alone": lambda engine: engine.scan("trivia", prefix_span("bob/"), values=False),
    "scan for locks": lambda engine: engine.scan("trivia", Span("", None), family="lock"),
    "scan for receipts": lambda engine: engine.scan("trivia", Span("", None), family="receipt"),
    "scan for receipts in one's span": lambda engine: engine.scan("trivia", prefix_span("alice/"), family="receipt"),
    "follow": lambda engine: engine.changes("trivia", 0, span=prefix_span("bob/")),
    "follow everything as a span": lambda engine: engine.changes("trivia", 0, span=Span("", None)),
    "put": lambda engine: commit(engine, Put("bob/1", b"1")),
    "put beside one's own": lambda engine: commit(engine, Put("alice/2", b"1"), Put("bob/1", b"1")),
    "put a sibling of a prefix": lambda engine: commit(engine, Put("alice", b"1")),
    "delete": lambda engine: commit(engine, Delete("bob/1")),
    "take": lambda engine: commit(engine, Delete("bob/1", take=True)),
    "touch": lambda engine: commit(engine, Touch("bob/1", 1)),
    "patch": lambda engine: commit(engine, Patch("bob/1", {})),
    "expire": lambda engine: commit(engine, Expire("bob/1", 1)),
    "read a copy": lambda engine: engine.read("trivia", ["live/bob/1"], family="ghost"),
    "put a copy": lambda engine: commit(engine, Put("live/bob/1", b"1", family="ghost")),
    "put a copy of no key": lambda engine: commit(engine, Put("alice/1", b"1", family="ghost")),
    "scan for copies": lambda engine: engine.scan("trivia", prefix_span("live/alice/"), family="ghost"),
    "guard": lambda engine: commit(engine, Guard("bob/1", Version(9))),
    "guard one's own by another's": lambda engine: commit(engine, Guard("bob/1", Version(1)), Put("alice/2", b"1")),
    "acquire": lambda engine: commit(engine, Put("bob/desk", b'{"holder":"me"}', 1000, family="lock")),
    "release": lambda engine: commit(engine, Delete("bob/door", family="lock")),
    "look at a lock by a guard": lambda engine: commit(engine, Guard("bob/door", limpet.ABSENT, "lock")),
    "read the server's own": lambda engine: engine.read("limpet-server", ["namespace/trivia"]),
    "scan the server's own": lambda engine: engine.scan("limpet-server", Span("", None)),
    "follow the server's own": lambda engine: engine.changes("limpet-server", 0),
    "look at the server's own": lambda engine: engine.status("limpet-server"),
    "write the server's own": lambda engine: engine.commit("limpet-server", Batch((), (Put("token/x", b"1"),), "r")),
    "read of another namespace": lambda engine: engine.read("quote", ["alice/1"]),
    "follow another namespace": lambda engine: engine.changes("quote", 0),
    "look at another namespace": lambda engine: engine.status("quote"),
    "a receipt of another namespace": lambda engine: engine.read("quote", ["of alice"], family="receipt"),
    "write to another namespace": lambda engine: engine.commit("quote", Batch((), (Put("alice/1", b"1"),), "r")),
    "write nothing to another namespace": lambda engine: engine.commit("quote", Batch((), (), "r")),
}


@pytest.mark.parametrize("attack", ATTACKS)
async def test_what_is_beyond_a_token_is_refused(as_: As, server: Running, attack: str) -> None:
    before = await server.session.engine.status("trivia")
    engine = engine_of(await as_("alice"))

    with pytest.raises(PermissionDenied) as refused:
        await ATTACKS[attack](engine)

    assert "hunter2" not in str(refused.value)
    assert (await server.session.engine.status("trivia")).revision == before.revision
    assert server.book.calls[-1].error is not None


async def test_a_token_that_is_not_known_opens_nothing(server: Running) -> None:
    for url in (server.url, server.as_("guess")):
        with pytest.raises(PermissionDenied):
            await limpet.open(url)


async def test_what_is_within_a_token_is_granted(as_: As) -> None:
    """All verbs, though nothing is known of the rest of the namespace."""
    alice = await as_("alice")

    await alice.put("alice/1", "b")
    assert await alice.add("alice/count", 2) == 2
    assert await alice.take("alice/count") == 2
    assert (await alice.keys("alice/")).keys == ["alice/1"]
    assert [event.value async for event in alice.history("alice/1")] == ["a", "b"]
    async with alice.lock("alice/door", ttl=60) as lock:
        await alice.put("alice/1", "c", fence=lock)
        with pytest.raises(LockHeld):
            await alice.lock("alice/door", ttl=60).acquire()
    assert await alice.get("alice/1") == "c"
    with pytest.raises(Conflict) as conflict:
        await alice.put("alice/1", "d", expect=limpet.Version(1))
    assert conflict.value.current is not None
    assert conflict.value.current.value == "c"


async def test_a_log_tells_each_what_it_may_see(as_: As) -> None:
    owner, alice = await as_("owner"), await as_("alice")

    feed = await engine_of(alice).changes("trivia", 0)
    whole = await engine_of(owner).changes("trivia", 0)

    assert [change.key for change in feed.changes] == ["alice/1"]
    assert feed.head == whole.head == 4


async def test_a_watch_of_ones_own_goes_past_what_others_write(as_: As) -> None:
    owner, alice = await as_("owner"), await as_("alice")
    async with alice.watch("alice/*") as watch:
        for number in range(5):
            await owner.put(f"bob/{number}", number)
        await owner.put("alice/2", "for alice")

        event = await next_event(watch)

    assert (event.key, event.value) == ("alice/2", "for alice")


async def test_what_is_counted_in_all_is_for_who_may_read_all(as_: As) -> None:
    owner, alice = await as_("owner"), await as_("alice")

    assert (await owner.status()).keys == 3
    assert (await alice.status()).keys == 0
    assert (await alice.status()).revision == (await owner.status()).revision


async def test_a_receipt_is_for_who_may_see_what_it_tells(as_: As) -> None:
    owner, alice = await as_("owner"), await as_("alice")

    assert await alice.outcome("of alice") is not None
    assert await alice.outcome("of bob") is None
    assert await alice.outcome("bob counts") is None
    assert await owner.outcome("bob counts") is not None


async def test_another_request_under_ones_id_gets_nothing_of_the_first(as_: As) -> None:
    """The id is known, and so is the hash, which a server therefore makes by itself."""
    alice, owner = await as_("alice"), await as_("owner")
    (receipt,) = await engine_of(owner).read("trivia", ["bob counts"], family="receipt")
    assert isinstance(receipt, Entry)
    known = read_receipt(receipt).digest
    forged = Batch((), (Put("alice/1", b"1"), Put("alice/2", b"1")), "bob counts", known, 1000)

    outcome = await engine_of(alice).commit("trivia", forged)

    assert isinstance(outcome, limpet.model.Refusal)
    assert (outcome.reason, outcome.found) == ("stale_request", None)


async def test_who_may_read_but_not_reveal_gets_no_value(as_: As) -> None:
    reader = await as_("reader")
    engine = engine_of(reader)

    assert (await reader.keys()).keys == ["alice/1", "bob/1", "bob/count"]
    assert [lock.name for lock in await reader.locks()] == ["bob/door"]
    for attempt in (
        engine.read("trivia", ["bob/1"]),
        engine.scan("trivia", Span("", None)),
        engine.scan("trivia", Span("", None), values=False, where=limpet.field("a") == 1),
        engine.changes("trivia", 0, span=Span("", None)),
        engine.read("trivia", ["of bob"], family="receipt"),
        commit(engine, Put("bob/1", b"1")),
        commit(engine, Delete("bob/door", family="lock")),
    ):
        with pytest.raises(PermissionDenied):
            await attempt
    # Locks are no secret; data is.
    assert [change.family for change in (await engine.changes("trivia", 0)).changes] == ["lock"]


async def test_who_may_write_but_not_read_learns_no_value(as_: As) -> None:
    writer = await as_("writer")
    engine = engine_of(writer)

    assert (await writer.put("bob/2", "mine")).value == "mine"
    touched = await commit(engine, Touch("bob/1", 60_000))
    refused = await commit(engine, Guard("bob/1", Version(9)), Put("bob/1", b"1"))

    assert (touched.entries[0].stored, refused.found.stored) == (None, None)
    for attempt in (
        commit(engine, limpet.model.Add("bob/count", 1)),
        commit(engine, Delete("bob/1", take=True)),
        commit(engine, Patch("bob/record", {})),
        engine.read("trivia", ["bob/1"]),
        engine.status("trivia"),
    ):
        with pytest.raises(PermissionDenied):
            await attempt


async def test_who_may_lock_may_lock_and_no_more(as_: As) -> None:
    locker = await as_("locker")

    lock = await locker.lock("gate", ttl=60).acquire()
    await lock.refresh()
    await lock.release()
    with pytest.raises(LockHeld):
        await locker.lock("bob/door", ttl=60).acquire()
    with pytest.raises(PermissionDenied):
        await locker.put("gate", 1)


async def test_who_may_not_sweep_has_nothing_to_sweep(as_: As, server: Running) -> None:
    """The server does it. A store with a scope of its own must not complain every second."""
    alice, owner = await as_("alice"), await as_("owner")

    assert await alice.sweep() == 0
    assert await alice.trim() == 0
    asked = len(server.book.calls)
    assert (await alice.sweep(), await alice.trim()) == (0, 0)

    assert len(server.book.calls) == asked
    assert (await owner.sweep(), await owner.trim()) == (0, 0)
    assert len(server.book.calls) == asked + 2


async def test_who_may_write_all_sweeps_locks_as_well() -> None:
    clock = limpet.ManualClock()
    async with (
        running(GUESTS, clock=clock) as server,
        limpet.open(server.as_("owner"), namespace="trivia", sweep=False) as owner,
    ):
        await owner.put("key", 1, ttl=1)
        await owner.lock("door", ttl=1).acquire()
        clock.advance(2)

        assert await owner.sweep() == 2


async def test_a_server_for_reading_refuses_every_write() -> None:
    async with (
        running(read_only=True) as server,
        limpet.open(server.url, namespace="trivia", sweep=False) as store,
    ):
        assert await store.get("key") is None
        with pytest.raises(PermissionDenied):
            await store.put("key", 1)
        with pytest.raises(PermissionDenied):
            await store.lock("door", ttl=5).acquire()
        assert await store.sweep() == 0


# What is held to limits, and told -------------------------------------------------


def limited(**limits: float) -> Any:
    """The options of a desk that holds namespaces to these limits."""
    rates, quotas = gates_of(limits_of(limits), limpet.SystemClock())
    return {"gates": [gate for gate in (rates, quotas) if gate], "observers": [quotas] if quotas else []}


async def test_a_namespace_is_held_to_its_room() -> None:
    async with (
        running(**limited(keys=3)) as server,
        limpet.open(server.url, namespace="trivia", sweep=False) as store,
    ):
        await store.batch().put("a", 1).put("b", 1).commit()
        await store.record("c").set(field=1)
        engine = store._session.engine
        with pytest.raises(RateLimited):
            await engine.commit("trivia", Batch((), (Put("d", b"1"),), "r"))
        with pytest.raises(RateLimited):
            await engine.commit("trivia", Batch((), (limpet.model.Add("d", 1),), "s"))

        assert (await store.put("a", 2)).version == 2
        assert (await store.status()).keys == 3


async def test_a_namespace_is_held_to_its_rate() -> None:
    async with (
        running(**limited(rate=0.01, burst=4)) as server,
        limpet.open(server.url, namespace="trivia", sweep=False) as store,
    ):
        engine = store._session.engine
        for name in ("first", "second"):
            await engine.commit("trivia", Batch((), (Put("a", b"1"), Put("b", b"1")), name))
        with pytest.raises(RateLimited) as refused:
            await engine.commit("trivia", Batch((), (Put("a", b"1"), Put("b", b"1")), "third"))

        assert refused.value.retry_after > 60


async def test_a_value_is_held_to_the_servers_limit_too() -> None:
    async with (
        running(value_bytes_max=100) as server,
        limpet.open(server.url, namespace="trivia", sweep=False) as store,
    ):
        await store.record("r").put({"a": b"x" * 60})
        for attempt in (store.put("k", "x" * 200), store.record("r").set(b=b"x" * 60)):
            with pytest.raises(ValueTooLarge) as refused:
                await attempt
            assert refused.value.limit_bytes == 100


async def test_observers_hear_of_each_commit_of_a_group_and_of_conflicts(server: Running, as_: As) -> None:
    owner = await as_("owner")
    server.book.calls.clear()

    await asyncio.gather(*(owner.put(f"key/{number}", number) for number in range(20)))
    with pytest.raises(Conflict):
        await owner.create("key/1", 1)

    told = [call for call in server.book.calls if call.operation == "engine.commit"]
    assert len(told) == 21
    assert [call.error.code for call in told if isinstance(call.error, LimpetError)] == ["conflict"]
    assert {call.caller for call in told} == {"owner"}


async def test_a_wait_is_told_before_it_is_over(server: Running, as_: As) -> None:
    """How long nothing happened says nothing about a server, and is not to be taken for slowness."""
    owner = await as_("owner")
    head = (await owner.status()).revision
    waiting = asyncio.create_task(engine_of(owner).changes("trivia", head, wait_s=60))
    while not any(call.operation == "engine.changes" for call in server.book.calls):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert not waiting.done()

    await owner.put("news", 1)

    assert [change.key for change in (await waiting).changes] == ["news"]
    assert sum(call.operation == "engine.changes" for call in server.book.calls) == 1


async def test_pages_end_where_an_answer_is_large_enough() -> None:
    async with (
        running() as server,
        limpet.open(server.url, namespace="trivia", sweep=False) as store,
    ):
        for number in range(12):
            await store.put(f"key/{number:02}", b"\xff" * 900_000)
        engine = store._session.engine

        part = await engine.scan("trivia", Span("", None))
        feed = await engine.changes("trivia", 0)

        assert len(part.entries) == 5
        assert part.cursor == "key/04"
        assert (len(feed.changes), feed.head) == (5, 5)
        assert len([entry async for entry in store.scan()]) == 12


async def test_the_window_of_a_trim_is_one(server: Running, as_: As) -> None:
    owner = await as_("owner")

    assert await engine_of(owner).trim("trivia", Window(changes=1, age_ms_min=0)) == 3


@pytest.mark.parametrize("token", ["owner", "harvester", "writer"])
async def test_semantic_entries_that_expire_are_written_and_recovered_by_whoever_may(as_: As, token: str) -> None:
    """A copy of an entry takes the rights on its key. Who may not read leaves none, and can write all the same."""
    from limpet.faces.semantic import SemanticStore

    kept = SemanticStore(await as_(token))
    key = "tenant/acme/project/docs/cursor"
    semantics = {"purpose": "checkpoint", "producer": "harvester", "consumerHints": [], "ttlSeconds": 0.05}
    await kept.kv_put(key, {"n": 1}, writer="harvester", semantics=semantics)
    await asyncio.sleep(0.1)

    if token == "writer":
        await kept.kv_put(key, {"n": 2}, writer="harvester", semantics=semantics)
    else:
        assert (await kept.recover(key, writer="harvester")).value == {"n": 1}
