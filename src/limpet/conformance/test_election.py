"""Elections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import limpet
from limpet.conformance.conftest import Elapse, OpenStore
from limpet.conformance.support import PATIENCE_S, fail, raising, wait_for_queue
from limpet.errors import Ambiguous, InvalidTTL, InvalidValue, LockExpired, LockHeld, LockLost, LockNotHeld

TTL_S = 0.8
LONG_S = 60.0


def candidate(store: limpet.Store, name: str, *, ttl: float = LONG_S, wait: float = LONG_S) -> limpet.Election:
    return store.election("leader", ttl=ttl, wait=wait, candidate=name)


async def leading(store: limpet.Store, name: str, *, ttl: float = LONG_S) -> limpet.Election:
    """A candidate that was just elected."""
    election = candidate(store, name, ttl=ttl)
    await election.campaign()
    return election


async def name_of_leader(election: limpet.Election) -> str | None:
    leader = await election.leader()
    return None if leader is None else leader.holder


async def while_time_passes(elapse: Elapse, fact: Callable[[], bool]) -> None:
    """Let time pass until the condition holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not fact():
            await elapse(0.05)


async def replace_leader(
    store: limpet.Store, other: limpet.Store, first: limpet.Election, elapse: Elapse
) -> limpet.Election:
    """Let the leader's commits fail until its lease is over and another leads, and then succeed again."""
    failing = fail(store, before=10**9)
    second = candidate(other, "second")
    following = asyncio.ensure_future(second.campaign())
    await while_time_passes(elapse, following.done)
    await following
    await while_time_passes(elapse, lambda: first.lost)
    failing.before = 0
    return second


async def end_unnoticed(store: limpet.Store, election: limpet.Election) -> None:
    """End a lead without the leader's knowledge, by a lock that has its token."""
    await store.lock("leader", ttl=LONG_S, token=election.token).release()


async def await_renewal(election: limpet.Election, elapse: Elapse) -> None:
    """Let time pass until a lead of two seconds has renewed itself."""
    # First give the renewal a moment to begin its sleep, or it would begin it at the later time.
    await elapse(0.001)
    await elapse(0.7)
    async with asyncio.timeout(PATIENCE_S):
        while (leader := await election.leader()) is not None and leader.remaining < 1.5:
            await elapse(0.005)


@contextlib.asynccontextmanager
async def observing(election: limpet.Election) -> AsyncIterator[list[str | None]]:
    """The leaders that an observer has seen so far, beginning with the present one."""
    seen: list[str | None] = []

    async def observe() -> None:
        async for leader in election.observe():
            seen.append(None if leader is None else leader.holder)

    observer = asyncio.ensure_future(observe())
    await wait_for_count(seen, 1)
    yield seen
    observer.cancel()


async def wait_for_count(seen: list[Any], count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while len(seen) < count:  # noqa: ASYNC110 - an observer of the sync API is in a thread
            await asyncio.sleep(0.005)


# Campaigning ------------------------------------------------------------------


async def test_one_of_many_candidates_leads(store: limpet.Store, open_store: OpenStore) -> None:
    """Of all candidates, one leads."""
    stores = [store, await open_store()]
    elections = [candidate(stores[number % 2], f"c{number}", wait=0) for number in range(8)]

    answers = await asyncio.gather(*(election.campaign() for election in elections), return_exceptions=True)

    leaders = [number for number, answer in enumerate(answers) if not isinstance(answer, LockHeld)]
    assert len(leaders) == 1
    assert [number for number, election in enumerate(elections) if election.token is not None] == leaders
    assert await name_of_leader(elections[0]) == f"c{leaders[0]}"


async def test_a_leader_does_not_campaign_again(store: limpet.Store) -> None:
    """Of all candidates, one leads."""
    election = await leading(store, "first")

    with pytest.raises(InvalidValue):
        await election.campaign()
    await store.put("plan", 1, fence=election)


async def test_an_election_needs_a_time_to_live(store: limpet.Store) -> None:
    """A leader that stops renewing is replaced when its lease is over."""
    with pytest.raises(InvalidTTL):
        store.election("leader", ttl=0)


async def test_campaigning_waits_for_the_lead(store: limpet.Store) -> None:
    """Campaigning waits until no one else leads, and a wait that times out raises LockHeld."""
    first = await leading(store, "first")
    with pytest.raises(LockHeld) as held:
        await candidate(store, "hasty", wait=0).campaign()
    assert (held.value.holder, held.value.token) == ("first", first.token)

    second = store.election("leader", ttl=LONG_S, candidate="second")
    waiting = asyncio.ensure_future(second.campaign())
    await asyncio.sleep(0.02)
    assert not waiting.done()
    await first.resign()
    await asyncio.wait_for(waiting, PATIENCE_S)

    assert await name_of_leader(first) == "second"


async def test_tokens_grow_from_lead_to_lead(store: limpet.Store, elapse: Elapse) -> None:
    """Each lead has a token that is greater than every earlier one of that election."""
    election = candidate(store, "first")
    tokens: list[int | None] = []
    for _ in range(3):
        await election.campaign()
        tokens.append(election.token)
        await election.resign()

    assert None not in tokens
    assert tokens == sorted({*tokens})  # type: ignore[type-var]


# Keeping and losing the lead --------------------------------------------------


async def test_a_lead_outlasts_its_time_to_live(store: limpet.Store, elapse: Elapse) -> None:
    """A lead renews itself until it is resigned or lost."""
    election = await leading(store, "first", ttl=2)
    token = election.token

    for _ in range(6):
        await await_renewal(election, elapse)

    election.check()
    assert (election.token, election.lost) == (token, False)
    assert await name_of_leader(election) == "first"


async def test_a_lead_whose_renewal_is_not_answered_is_renewed_again(store: limpet.Store, elapse: Elapse) -> None:
    """A lead renews itself until it is resigned or lost.

    A renewal whose outcome stayed unknown once ended all further renewals.
    """
    election = await leading(store, "first", ttl=4)
    failing = fail(store, after=5)
    await while_time_passes(elapse, lambda: failing.after == 0)
    renewals = failing.commits
    await while_time_passes(elapse, lambda: failing.commits >= renewals + 4)

    election.check()
    assert await name_of_leader(election) == "first"


@pytest.mark.parametrize(
    "error",
    [RuntimeError("unforeseen"), Ambiguous("the answer is lost", request_id="1", since=0)],
    ids=lambda error: type(error).__name__,
)
async def test_a_lead_by_hand_that_cannot_be_renewed_is_lost(
    store: limpet.Store, elapse: Elapse, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """A lead whose renewal fails for good is lost, also when it was campaigned for by hand."""
    election = await leading(store, "first", ttl=TTL_S)

    with raising(store, error):
        await while_time_passes(elapse, lambda: election.lost)

    with pytest.raises(LockLost):
        election.check()
    (line,) = [record.getMessage() for record in caplog.records if record.name == "limpet.lock"]
    assert "'leader'" in line
    assert str(election.token) in line
    again = asyncio.ensure_future(election.campaign())
    await while_time_passes(elapse, again.done)
    await again
    election.check()


async def test_candidates_lead_in_the_order_they_campaigned(store: limpet.Store) -> None:
    """Candidates of one opened store lead in the order they campaigned."""
    first = await leading(store, "first")
    order: list[int] = []

    async def lead(number: int) -> None:
        election = store.election("leader", ttl=LONG_S)
        await election.campaign()
        order.append(number)
        await election.resign()

    campaigning = []
    for number in range(6):
        campaigning.append(asyncio.ensure_future(lead(number)))
        await wait_for_queue(store, number + 1, "lock", store.name, "leader")
    await first.resign()
    await asyncio.wait_for(asyncio.gather(*campaigning), PATIENCE_S)

    assert order == list(range(6))


async def test_resigning_frees_the_lead(store: limpet.Store) -> None:
    """Resigning ends the lead at once."""
    first = await leading(store, "first")

    await first.resign()

    assert await first.leader() is None
    with pytest.raises(LockNotHeld):
        first.check()
    with pytest.raises(LockNotHeld):
        _ = first.fence
    assert first.token is not None
    await candidate(store, "second", wait=0).campaign()


async def test_only_a_leader_resigns(store: limpet.Store, elapse: Elapse) -> None:
    """Resigning without leading is LockNotHeld, and after the lease is over LockExpired."""
    with pytest.raises(LockNotHeld):
        await candidate(store, "never").resign()
    election = await leading(store, "first", ttl=TTL_S)
    failing = fail(store, before=10**9)
    await while_time_passes(elapse, lambda: election.lost)
    failing.before = 0

    with pytest.raises(LockExpired):
        await election.resign()


async def test_a_silent_leader_is_followed_by_another(
    store: limpet.Store, open_store: OpenStore, elapse: Elapse
) -> None:
    """A leader that stops renewing is replaced when its lease is over."""
    first = await leading(store, "first", ttl=TTL_S)
    token = first.token
    assert token is not None

    second = await replace_leader(store, await open_store(), first, elapse)

    leader = await first.leader()
    assert leader is not None
    assert (leader.holder, leader.token) == ("second", second.token)
    assert leader.token > token


async def test_losing_the_lead_is_reported(store: limpet.Store, open_store: OpenStore, elapse: Elapse) -> None:
    """Losing the lead sets `lost` and makes `check` raise LockLost, and the candidate may campaign again."""
    first = await leading(store, "first", ttl=TTL_S)
    second = await replace_leader(store, await open_store(), first, elapse)

    assert first.lost
    with pytest.raises(LockLost):
        first.check()
    await second.resign()
    await first.campaign()

    first.check()
    await store.put("plan", "mine again", fence=first)


async def test_a_leader_that_learns_of_the_loss_by_a_refused_write_may_campaign_at_once(
    store: limpet.Store, open_store: OpenStore
) -> None:
    """Losing the lead sets `lost` and makes `check` raise LockLost, and the candidate may campaign again.

    Its renewal still sleeps and does not know of the loss. A campaign once failed here as if it were still leading.
    """
    first = await leading(store, "first")
    other = await open_store()
    await end_unnoticed(other, first)
    second = await leading(other, "second")
    with pytest.raises(LockLost):
        await store.put("plan", 1, fence=first)
    await second.resign()

    await first.campaign()

    await store.put("plan", 2, fence=first)
    assert await name_of_leader(second) == "first"


async def test_a_body_runs_while_it_leads(store: limpet.Store) -> None:
    """An election used as a context leads while its body runs, and losing the lead ends it as losing a lock does."""
    async with candidate(store, "first") as election:
        assert await name_of_leader(election) == "first"
        await store.put("plan", 1, fence=election)

    assert await election.leader() is None


async def test_a_body_that_lost_the_lead_ends_with_lock_lost(
    store: limpet.Store, open_store: OpenStore, elapse: Elapse
) -> None:
    """An election used as a context leads while its body runs, and losing the lead ends it as losing a lock does."""
    first = candidate(store, "first", ttl=TTL_S)
    other = await open_store()

    async def body() -> None:
        async with first:
            started.set()
            while not first.lost:  # noqa: ASYNC110 - the sync API has no event for it
                await asyncio.sleep(0.01)

    started = asyncio.Event()
    working = asyncio.ensure_future(body())
    await asyncio.wait_for(started.wait(), PATIENCE_S)
    await replace_leader(store, other, first, elapse)

    with pytest.raises(LockLost):
        await working


# Fencing ----------------------------------------------------------------------


async def test_a_leader_writes_under_its_fence(store: limpet.Store, elapse: Elapse) -> None:
    """`fence=election` lets a write happen while it leads."""
    election = await leading(store, "first", ttl=2)

    for number in range(4):
        await store.put("plan", number, fence=election)
        await await_renewal(election, elapse)

    assert election.token is not None
    await store.put("plan", 4, fence=limpet.Fence("leader", election.token))
    assert await store.get("plan") == 4


async def test_a_former_leader_writes_nothing(store: limpet.Store, open_store: OpenStore, elapse: Elapse) -> None:
    """A fenced write of a former leader is LockLost and changes nothing."""
    first = await leading(store, "first", ttl=TTL_S)
    await store.put("plan", "first's", fence=first)
    other = await open_store()
    second = await replace_leader(store, other, first, elapse)
    plan = await other.put("plan", "second's", fence=second)

    with pytest.raises(LockLost):
        await store.put("plan", "too late", fence=first)
    with pytest.raises(LockLost):
        await store.batch().fence(first).delete("plan").put("other", 1).commit()

    assert await store.entry("plan") == plan
    assert await store.get("other") is None


# Observing --------------------------------------------------------------------


async def test_leader_gives_who_leads(store: limpet.Store, open_store: OpenStore) -> None:
    """`leader` gives the leader's name, token and remaining time, or None when no one leads."""
    onlooker = candidate(await open_store(), "onlooker")
    assert await onlooker.leader() is None
    election = await leading(store, "first")

    leader = await onlooker.leader()

    assert leader is not None
    assert (leader.name, leader.holder, leader.token) == ("leader", "first", election.token)
    assert 0 < leader.remaining <= LONG_S
    assert [info.token for info in await store.locks()] == [leader.token]
    assert await store.election("other", ttl=LONG_S).leader() is None


async def test_an_observer_sees_every_change(store: limpet.Store, open_store: OpenStore) -> None:
    """Observing gives the current leader, and again whenever the leader changes."""
    other = await open_store()
    async with observing(candidate(other, "onlooker")) as seen:
        first = await leading(store, "first")
        await wait_for_count(seen, 2)
        await store.put("something", "else")
        await first.resign()
        await wait_for_count(seen, 3)
        second = await leading(other, "second")
        await wait_for_count(seen, 4)
        await second.resign()
        await wait_for_count(seen, 5)

    assert seen == [None, "first", None, "second", None]


async def test_an_observer_that_comes_late_sees_who_leads(store: limpet.Store, elapse: Elapse) -> None:
    """Observing gives the current leader, and again whenever the leader changes.

    A renewal is not a change of the leader, and the end of the lease is one.
    """
    election = await leading(store, "first", ttl=2)
    async with observing(election) as seen:
        for _ in range(4):
            await await_renewal(election, elapse)
        assert seen == ["first"]

        failing = fail(store, before=10**9)
        await while_time_passes(elapse, lambda: election.lost)
        failing.before = 0
        await while_time_passes(elapse, lambda: len(seen) > 1)

    assert seen == ["first", None]


async def test_closing_the_store_ends_the_observing(store: limpet.Store) -> None:
    """Closing the store ends observing normally."""
    election = await leading(store, "first")
    observed = election.observe()
    first = await anext(observed)
    assert first is not None
    following = asyncio.ensure_future(anext(observed, "ended"))
    await asyncio.sleep(0.02)

    await store.close()

    assert await asyncio.wait_for(following, PATIENCE_S) == "ended"
