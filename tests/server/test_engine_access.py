"""Who may ask which primitive for what: a store over a server is held to the rights of its token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx2
import msgspec
import pytest

import limpet
from limpet.conformance.support import next_event
from limpet.engine import Engine
from limpet.errors import (
    Compacted,
    Conflict,
    InvalidKey,
    LimpetError,
    LockHeld,
    PermissionDenied,
    RateLimited,
    ValueTooLarge,
)
from limpet.keys import Span, prefix_span
from limpet.model import (
    Batch,
    Delete,
    Entry,
    Expire,
    FieldEquals,
    Guard,
    HeldBy,
    Import,
    Patch,
    Put,
    Touch,
    Version,
    Window,
)
from limpet.protocol import engine_msgpack as wire
from limpet.semantic.store import SemanticStore, VersionConflict
from limpet.server.limits import checks_of, limits_of
from limpet.server.logs import Logs
from limpet.transition import read_receipt
from tests.server.engine_support import Guest, Guests, Running, Scope, running

ALL = "read write lock reveal"
GUESTS = Guests(
    Guest("owner", Scope("trivia", "", ALL)),
    Guest("alice", Scope("trivia", "alice/", ALL)),
    Guest("harvester", Scope("trivia", "tenant/acme/", ALL)),
    Guest("reader", Scope("trivia", "", "read")),
    Guest("seer", Scope("trivia", "", "read reveal")),
    Guest("writer", Scope("trivia", "", "write")),
    Guest("locker", Scope("trivia", "", "lock")),
    Guest("stranger", Scope("quote", "", ALL)),
    Guest("admin", Scope("trivia", "", "admin")),
    Guest("mover", Scope("trivia", "", "read write reveal admin")),
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


async def commit(engine: Engine, *parts: Any, **options: Any) -> Any:
    guards = tuple(one for one in parts if isinstance(one, Guard))
    writes = tuple(one for one in parts if not isinstance(one, Guard))
    return await engine.commit("trivia", Batch(guards, writes, limpet.new_request_id(), **options))


def imported(key: str) -> Import:
    return Import(key, b"1", version=7, created_ms=1_600_000_000_000, updated_ms=1_600_000_000_000)


ATTACKS: dict[str, Callable[[Engine], Awaitable[Any]]] = {
    "read": lambda engine: engine.read("trivia", ["bob/1"]),
    "read beside one's own": lambda engine: engine.read("trivia", ["alice/1", "bob/1"]),
    "read a lock": lambda engine: engine.read("trivia", ["bob/door"], family="lock"),
    "scan": lambda engine: engine.scan("trivia", prefix_span("bob/")),
    "count": lambda engine: engine.count("trivia", prefix_span("bob/")),
    "count everything": lambda engine: engine.count("trivia", Span("", None)),
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
    "import": lambda engine: commit(engine, imported("bob/1")),
    "import one's own, which only an admin does": lambda engine: commit(engine, imported("alice/1")),
    "patch": lambda engine: commit(engine, Patch("bob/1", {})),
    "expire": lambda engine: commit(engine, Expire("bob/1", 1)),
    "read a counter": lambda engine: engine.read("trivia", ["bob/"], family="sequence"),
    "read a counter of more than one's own": lambda engine: engine.read("trivia", ["alice"], family="sequence"),
    "put a counter": lambda engine: commit(engine, Put("bob/", b"1", family="sequence")),
    "put a counter of more than one's own": lambda engine: commit(engine, Put("alice", b"1", family="sequence")),
    "scan for counters": lambda engine: engine.scan("trivia", prefix_span("alice/"), family="sequence"),
    "read a copy": lambda engine: engine.read("trivia", ["live/bob/1"], family="recoverable"),
    "put a copy": lambda engine: commit(engine, Put("live/bob/1", b"1", family="recoverable")),
    "put a copy of no key": lambda engine: commit(engine, Put("alice/1", b"1", family="recoverable")),
    "scan for copies": lambda engine: engine.scan("trivia", prefix_span("live/alice/"), family="recoverable"),
    "guard": lambda engine: commit(engine, Guard("bob/1", Version(9))),
    "guard one's own by another's": lambda engine: commit(engine, Guard("bob/1", Version(1)), Put("alice/2", b"1")),
    "acquire": lambda engine: commit(engine, Put("bob/dispatcher", b'{"holder":"me"}', 1000, family="lock")),
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


async def test_an_import_takes_the_admin_right_beside_write(as_: As) -> None:
    mover = await as_("mover")

    await commit(engine_of(mover), imported("bob/9"))

    entry = await mover.entry("bob/9")
    assert entry is not None
    assert (entry.version, entry.created_ms) == (7, 1_600_000_000_000)
    for name in ("owner", "admin"):
        with pytest.raises(PermissionDenied):
            await commit(engine_of(await as_(name)), imported("bob/9"))


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


async def test_keys_are_appended_to_a_prefix_of_ones_own(as_: As) -> None:
    alice = await as_("alice")

    made = [await alice.append("alice/log/", number, request_id=f"append {number}") for number in range(2)]

    assert await alice.append("alice/log/", 0, request_id="append 0") == made[0]
    assert (await alice.append("alice/", 0)).key == "alice/0000000000000001"
    for prefix in ("alice", "bob/log/"):
        with pytest.raises(PermissionDenied):
            await alice.append(prefix, 1)


async def test_a_log_tells_each_what_it_may_see(as_: As) -> None:
    owner, alice = await as_("owner"), await as_("alice")

    feed = await engine_of(alice).changes("trivia", 0)
    whole = await engine_of(owner).changes("trivia", 0)

    assert [change.key for change in feed.changes] == ["alice/1"]
    assert feed.next_after == whole.next_after == 4


async def test_a_position_on_what_others_wrote_can_be_resumed(as_: As) -> None:
    """The change that it stands on is hidden. It is recognised all the same, while the watch runs and after it."""
    alice, owner = await as_("alice"), await as_("owner")
    async with alice.watch("alice/*") as watch:
        for turn in range(3):
            for _ in range(3):
                await owner.put("bob/2", turn)
            await owner.put("alice/2", turn)
            assert (await next_event(watch)).value == turn
            await owner.put("bob/2", turn)
        position = watch.position
        await owner.put("bob/3", 1)
        await owner.put("alice/3", 1)
        assert (await next_event(watch)).key == "alice/3"
    assert position is not None

    async with alice.watch("alice/*", after=position) as resumed:
        assert (await next_event(resumed)).key == "alice/3"
    with pytest.raises(Compacted):
        async with alice.watch("alice/*", after=position[:-1] + ("0" if position[-1] != "0" else "1")):
            pass


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


async def test_a_request_id_of_a_prefix_is_its_own(as_: As) -> None:
    """A predictable id is not used up by others, and repeating one tells nothing of what others sent under it."""
    alice, owner = await as_("alice"), await as_("owner")
    (receipt,) = await engine_of(owner).read("trivia", ["bob counts"], family="receipt")
    assert isinstance(receipt, Entry)
    known = read_receipt(receipt).digest
    writes = (Put("alice/1", b"1"), Put("alice/2", b"1"))

    first = await engine_of(alice).commit("trivia", Batch((), writes, "bob counts", known, 600_000))
    again = await engine_of(alice).commit("trivia", Batch((), writes, "bob counts", known, 600_000))
    other = await engine_of(alice).commit("trivia", Batch((), writes[:1], "bob counts", known, 600_000))

    assert isinstance(first, limpet.model.Commit)
    assert isinstance(again, limpet.model.Commit)
    assert (first.replayed, again.replayed, again.revision) == (False, True, first.revision)
    assert isinstance(other, limpet.model.Refusal)
    assert (other.reason, other.key, other.found) == ("stale_request", "bob counts", None)
    found = await alice.outcome("bob counts")
    assert found is not None
    assert found.revision == first.revision
    assert await owner.add("bob/count", 7, request_id="bob counts") == 7


async def test_a_change_names_its_cause_as_its_own_caller_gave_it(as_: As) -> None:
    alice, owner = await as_("alice"), await as_("owner")
    await alice.put("alice/3", "c", request_id="mine")
    with pytest.raises(Conflict, match="request id 'mine' was used before") as stale:
        await alice.put("alice/4", "d", request_id="mine")

    assert stale.value.key == "mine"
    assert [event.cause async for event in alice.history("alice/3")] == ["mine"]
    # Others see whose it is, and find its outcome by that.
    assert [event.cause async for event in owner.history("alice/3")] == ["alice/mine"]
    assert await owner.outcome("alice/mine") is not None
    assert await owner.outcome("mine") is None


@pytest.mark.parametrize("request_id", ["mine", "of/mine", None])
async def test_a_watch_of_a_prefix_resumes_after_its_own_request(as_: As, request_id: str | None) -> None:
    """Its cause is shown as it was given, and stored with the caller's name: the position is that of one change."""
    alice = await as_("alice")
    async with alice.watch("alice/*") as watch:
        await alice.put("alice/3", "c", request_id=request_id)
        position = (await next_event(watch)).position
        await alice.put("alice/4", "d", request_id=None if request_id is None else f"{request_id} again")
        assert (await next_event(watch)).key == "alice/4"

    again = await as_("alice")
    async with again.watch("alice/*", after=position) as watch:
        assert (await next_event(watch)).key == "alice/4"
        assert watch.position is not None
        async with again.watch("alice/*", after=watch.position) as later:
            await alice.put("alice/5", "e")
            assert (await next_event(later)).key == "alice/5"


async def test_a_request_id_of_ones_own_that_is_too_long_is_refused(as_: As) -> None:
    alice = await as_("alice")
    await alice.put("alice/3", "c", request_id="x" * (1024 - len("alice/")))
    with pytest.raises(InvalidKey, match="up to 1018 bytes"):
        await alice.put("alice/3", "c", request_id="x" * 1024)
    assert await alice.outcome("x" * 1024) is None


async def test_a_repeated_request_tells_nothing_to_who_may_not_see_values(as_: As) -> None:
    """By a known id, the answer would tell whether the value is the one that was sent under it."""
    owner, writer = await as_("owner"), await as_("writer")
    await owner.put("bob/pin", 4711, request_id="first")
    await owner.put("bob/pin", 4711, request_id="second")
    await owner.take("bob/1", request_id="taken")
    engine = engine_of(writer)

    for request_id, guess in (("first", b"1"), ("second", b"4711")):
        outcome = await engine.commit("trivia", Batch((), (Put("bob/pin", guess),), request_id, b"", 600_000))
        assert isinstance(outcome, limpet.model.Commit)
        assert not outcome.replayed
    # The log would give the value that was taken.
    forged = Batch((), (Put("bob/1", b"1"),), "taken", retry_since=0)
    outcome = await engine.commit("trivia", forged)
    assert isinstance(outcome, limpet.model.Commit)
    assert outcome.ended == (None,)
    assert HIDDEN not in repr(outcome).encode()


@pytest.mark.parametrize("prefix", ["", "tenant/a/"])
@pytest.mark.parametrize("lasting", [{}, {"ttlSeconds": 1000}])
async def test_a_semantic_write_may_be_repeated_through_a_server(prefix: str, lasting: dict[str, int]) -> None:
    """Also after another write; and a token for a prefix can read its outcome, whose receipt names a copy as well."""
    key = "tenant/a/project/b/flag"
    semantics = {"purpose": "feature_flag", **lasting}
    guests = Guests(Guest("app", Scope("trivia", prefix, "read reveal write")))
    async with running(guests) as server, limpet.open(server.as_("app"), namespace="trivia", sweep=False) as store:
        kept = SemanticStore(store)

        async def put(number: int, *, expected: int, request_id: str) -> tuple[int, bool]:
            envelope = await kept.kv_put(
                key,
                {"number": number},
                writer="a:b",
                semantics=semantics,
                expected_version=expected,
                request_id=request_id,
            )
            return envelope.version, envelope.replayed

        assert await put(1, expected=0, request_id="first") == (1, False)
        assert await put(1, expected=0, request_id="first") == (1, True)
        assert await put(2, expected=1, request_id="second") == (2, False)
        assert await put(1, expected=0, request_id="first") == (1, True)
        with pytest.raises(VersionConflict, match="used before for another request"):
            await put(3, expected=2, request_id="first")
        assert await store.outcome("second") is not None


GUESSES = {
    "a value": Guard("bob/count", limpet.equals(7)),
    "a value that is wrong": Guard("bob/count", limpet.equals(8)),
    "a field": Guard("bob/count", FieldEquals("pin", b"7")),
    "that there is no such field": Guard("bob/count", FieldEquals("pin", limpet.ABSENT)),
    "a value of the trail": Guard("head/x", limpet.equals(7), "audit"),
    "a value that can be recovered": Guard("live/x", limpet.equals(7), "recoverable"),
}


@pytest.mark.parametrize("guess", GUESSES)
async def test_a_guess_of_a_value_takes_the_right_to_see_it(as_: As, guess: str) -> None:
    """A batch that is granted or refused by a value tells it to a caller who asks often enough."""
    writer, owner = engine_of(await as_("writer")), engine_of(await as_("owner"))

    for writes in ((), (Put("bob/other", b"1"),)):
        with pytest.raises(PermissionDenied, match="reveal"):
            await commit(writer, GUESSES[guess], *writes)
    await commit(owner, GUESSES[guess])


async def test_a_counter_is_not_measured_by_what_overflows_it(as_: As) -> None:
    writer = engine_of(await as_("writer"))
    with pytest.raises(PermissionDenied, match="reveal"):
        await commit(writer, limpet.model.Add("bob/count", 2**63 - 7))


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
    kept = await commit(engine, limpet.model.Create("bob/1", b"1"), limpet.model.Create("bob/3", b"3"))
    assert [entry.stored for entry in kept.entries] == [None, b"3"]
    assert kept.kept == ("bob/1",)
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
    calls = len(server.book.calls)
    assert (await alice.sweep(), await alice.trim()) == (0, 0)

    assert len(server.book.calls) == calls
    assert (await owner.sweep(), await owner.trim()) == (0, 0)
    assert len(server.book.calls) == calls + 2


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


# Limits and observers -------------------------------------------------


def with_value_limit(**limits: float) -> Any:
    """The options of a dispatcher that holds namespaces to these limits."""
    rates, quotas = checks_of(limits_of(limits), limpet.SystemClock())
    return {"checks": [check for check in (rates, quotas) if check], "observers": [quotas] if quotas else []}


async def test_a_namespace_is_held_to_its_room() -> None:
    async with (
        running(**with_value_limit(keys=3)) as server,
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
        running(**with_value_limit(rate=0.01, burst=4)) as server,
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

    commits = [call for call in server.book.calls if call.operation == "engine.commit"]
    assert len(commits) == 21
    assert [call.error.code for call in commits if isinstance(call.error, LimpetError)] == ["conflict"]
    assert {call.caller for call in commits} == {"owner"}


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
        assert (len(feed.changes), feed.next_after) == (5, 5)
        assert len([entry async for entry in store.scan()]) == 12


# What overrules others ------------------------------------------------------------

GREEDY = Window(0, 0, 0, 0)


@pytest.mark.parametrize("caller", ["owner", "writer", "alice"])
async def test_the_log_is_trimmed_by_an_admin_alone(server: Running, as_: As, caller: str) -> None:
    log_changes = (await server.session.engine.status("trivia")).log_changes

    assert await engine_of(await as_(caller)).trim("trivia", GREEDY) == 0

    assert isinstance(server.book.calls[-1].error, PermissionDenied)
    assert (await server.session.engine.status("trivia")).log_changes == log_changes


async def test_an_admin_leaves_the_last_minute_of_the_log_too() -> None:
    clock = limpet.ManualClock()
    async with (
        running(GUESTS, clock=clock) as server,
        limpet.open(server.as_("admin"), namespace="trivia", sweep=False) as admin,
        limpet.open(server.as_("owner"), namespace="trivia", sweep=False) as owner,
    ):
        await owner.put("old", 1)
        clock.advance(59.999)
        assert await engine_of(admin).trim("trivia", GREEDY) == 0
        clock.advance(0.001)
        await owner.put("new", 1)
        assert await engine_of(admin).trim("trivia", GREEDY) == 1
        assert await engine_of(admin).trim("trivia", Window(changes=0, age_ms_min=3_600_000)) == 0


HELD_BY_BOB = Guard("bob/door", HeldBy(4), "lock")
BY_FORCE: dict[str, tuple[Any, ...]] = {
    "delete": (Delete("bob/door", family="lock"),),
    "take": (Delete("bob/door", take=True, family="lock"),),
    "touch": (Touch("bob/door", 600_000, family="lock"),),
    "put over it": (Put("bob/door", b'{"holder":"me"}', 1000, family="lock"),),
    "put where it is there": (
        Guard("bob/door", limpet.PRESENT, "lock"),
        Put("bob/door", b'{"holder":"me"}', 1000, family="lock"),
    ),
    "under a guard of another lock": (Guard("bob/gate", limpet.ABSENT, "lock"), Delete("bob/door", family="lock")),
    "under a guard of a key of that name": (Guard("bob/door", HeldBy(4)), Delete("bob/door", family="lock")),
    "under its version": (Guard("bob/door", Version(1), "lock"), Delete("bob/door", family="lock")),
    "a delete of what is not there": (Guard("bob/door", limpet.ABSENT, "lock"), Delete("bob/door", family="lock")),
}


@pytest.mark.parametrize("caller", ["owner", "locker", "admin"])
@pytest.mark.parametrize("way", BY_FORCE)
async def test_a_lock_is_written_by_its_holder_alone(server: Running, as_: As, way: str, caller: str) -> None:
    """An admin included, who gives no reason."""
    before = await server.session.engine.read("trivia", ["bob/door"], family="lock")

    with pytest.raises(PermissionDenied, match=r"written by its holder|write"):
        await commit(engine_of(await as_(caller)), *BY_FORCE[way])

    assert await server.session.engine.read("trivia", ["bob/door"], family="lock") == before


async def test_under_its_token_a_lock_is_refreshed_and_given_back(as_: As) -> None:
    locker = engine_of(await as_("locker"))
    await commit(locker, HELD_BY_BOB, Touch("bob/door", 5000, family="lock"))
    wrong = await commit(locker, Guard("bob/door", HeldBy(3), "lock"), Delete("bob/door", family="lock"))
    done = await commit(locker, HELD_BY_BOB, Delete("bob/door", family="lock"))

    assert isinstance(wrong, limpet.model.Refusal)
    assert done.ended[0] is not None


async def test_an_admin_ends_a_lock_with_a_reason_which_is_noted(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    async def send(token: str, reason: str | None) -> tuple[int, Any]:
        batch = wire.encode_batch(Batch((), (Delete("bob/door", family="lock"),), limpet.new_request_id()))
        headers = {"Authorization": f"Bearer {token}", "Content-Type": wire.MEDIA}
        if reason is not None:
            headers["Limpet-Reason"] = reason
        async with httpx2.AsyncClient(base_url=server.url, headers=headers) as client:
            body = wire.encode(wire.Commits([msgspec.Raw(batch)]))
            answered = await client.post("/v1/trivia/engine/commit", content=body)
            return answered.status_code, wire.decode(answered.content, wire.Outcomes)[0]

    for token, reason in (("owner", "mine now"), ("locker", "mine now"), ("admin", None), ("admin", "")):
        _, outcome = await send(token, reason)
        assert b"permission_denied" in bytes(outcome), (token, reason)
    _, outcome = await send("admin", "its holder is gone")

    assert b"commit" in bytes(outcome)
    assert await server.session.engine.read("trivia", ["bob/door"], family="lock") == [None]
    caplog.clear()
    Logs().done(server.book.calls[-1])
    assert [record.getMessage() for record in caplog.records] == [
        'KV engine.commit of a lock by force: plugin=trivia lock=bob/door caller=admin reason="its holder is gone"'
    ]


# Who it is ------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/engine", "/v1/trivia/engine/status"])
async def test_two_authorization_headers_are_refused(server: Running, path: str) -> None:
    """Or what stands in front of the server may have looked at the other one."""
    tokens = [("Authorization", "Bearer owner"), ("Authorization", "Bearer reader"), ("Content-Type", wire.MEDIA)]
    async with httpx2.AsyncClient(base_url=server.url) as client:
        for headers in (tokens, [tokens[0], tokens[0], tokens[2]], [("Authorization", "Basic owner"), tokens[2]]):
            method = "GET" if path == "/v1/engine" else "POST"
            answered = await client.request(method, path, headers=headers, content=b"\x80")
            assert answered.status_code == 401
        answered = await client.request(method, path, headers=[tokens[0], tokens[2]], content=b"\x80")
        assert answered.status_code == 200


@pytest.mark.parametrize("token", ["owner", "harvester", "writer"])
async def test_semantic_entries_that_expire_are_written_and_recovered_by_whoever_may(as_: As, token: str) -> None:
    """A copy of an entry takes the rights on its key. Who may not read leaves none, and can write all the same."""
    from limpet.semantic.store import SemanticStore

    kept = SemanticStore(await as_(token))
    key = "tenant/acme/project/docs/cursor"
    semantics = {"purpose": "checkpoint", "producer": "harvester", "consumerHints": [], "ttlSeconds": 0.05}
    await kept.kv_put(key, {"n": 1}, writer="harvester", semantics=semantics)
    await asyncio.sleep(0.1)

    if token == "writer":
        await kept.kv_put(key, {"n": 2}, writer="harvester", semantics=semantics)
    else:
        assert (await kept.recover(key, writer="harvester")).value == {"n": 1}
