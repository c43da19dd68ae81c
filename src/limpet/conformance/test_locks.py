"""Locks."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

import limpet
from limpet.conformance.conftest import Elapse, OpenStore
from limpet.conformance.support import PATIENCE_S, count, fail, raising, session_of, wait_for_queue
from limpet.errors import (
    Ambiguous,
    Conflict,
    Corrupt,
    InvalidTTL,
    InvalidValue,
    LockExpired,
    LockHeld,
    LockLost,
    LockNotHeld,
    Unavailable,
)
from limpet.model import Batch, Commit, Refusal

TTL_S = 0.8
LONG_S = 60.0


async def acquire_lock(
    store: limpet.Store, name: str, *, ttl: float = LONG_S, holder: str | None = None
) -> limpet.Lock:
    """Acquire a lock and return it."""
    lock = store.lock(name, ttl=ttl, holder=holder)
    await lock.acquire()
    return lock


async def take_and_release(store: limpet.Store, name: str) -> None:
    """Wait for a lock, and release it at once."""
    lock = store.lock(name, ttl=LONG_S, wait=10 * LONG_S)
    await lock.acquire()
    await lock.release()


def token_of(lock: limpet.Lock) -> int:
    assert lock.token is not None
    return lock.token


async def while_time_passes(elapse: Elapse, work: Awaitable[Any], step_s: float = 0.05) -> Any:
    """Let time pass until the work is done."""
    working = asyncio.ensure_future(work)
    async with asyncio.timeout(PATIENCE_S):
        while not working.done():
            await elapse(step_s)
    return working.result()


async def until(elapse: Elapse, fact: Callable[[], bool], step_s: float = 0.05) -> None:
    """Let time pass until the condition holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not fact():
            await elapse(step_s)


class Slow:
    """An engine in front of another, whose commits are applied but not answered until `answers` is set."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.committed, self.answers = asyncio.Event(), asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def commit(self, namespace: str, batch: Batch) -> Commit | Refusal:
        outcome: Commit | Refusal = await self._engine.commit(namespace, batch)
        self.committed.set()
        await self.answers.wait()
        return outcome


async def take_over(store: limpet.Store, other: limpet.Store, lock: limpet.Lock, elapse: Elapse) -> limpet.Lock:
    """Let the holder's commits fail until its lease is over and another takes the lock, and then succeed again."""
    failing = fail(store, before=10**9)
    thief = other.lock(lock.name, ttl=LONG_S, wait=LONG_S)
    await while_time_passes(elapse, thief.acquire())
    failing.before = 0
    return thief


def patient_lock(store: limpet.Store, face: str, name: str, *, ttl: float = TTL_S) -> limpet.Lock:
    """A lock whose body is not cancelled. In the sync API every lock is one."""
    return store.lock(name, ttl=ttl) if face == "sync" else store.lock(name, ttl=ttl, cancel=False)


async def cancellations_left_by(body: Awaitable[None]) -> int:
    """How many cancellations a lost lock leaves on the task that caught LockLost."""
    with pytest.raises(LockLost):
        await body
    await asyncio.sleep(0.01)
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


# Tokens -----------------------------------------------------------------------


async def test_tokens_grow_over_release(store: limpet.Store) -> None:
    """Acquiring gives a token that is greater than every earlier one on that name."""
    tokens: list[int] = []
    for _ in range(5):
        lock = await acquire_lock(store, "job")
        tokens.append(token_of(lock))
        await lock.release()

    assert tokens == sorted({*tokens})


async def test_tokens_grow_over_expiry(store: limpet.Store, elapse: Elapse) -> None:
    """Acquiring gives a token that is greater than every earlier one on that name."""
    tokens: list[int] = []
    for turn in range(4):
        tokens.append(token_of(await acquire_lock(store, "job", ttl=0.2)))
        await elapse(0.3)
        if turn % 2:
            await store.sweep()

    assert tokens == sorted({*tokens})


async def test_tokens_grow_over_refreshing_and_other_handles(store: limpet.Store, open_store: OpenStore) -> None:
    """Acquiring gives a token that is greater than every earlier one on that name."""
    first = await acquire_lock(store, "job")
    await first.refresh()
    await first.refresh()
    await store.put("something", "else")
    await first.release()
    tokens = [token_of(await acquire_lock(await open_store(), "job"))]

    again = store.lock("other", ttl=LONG_S)
    for _ in range(3):
        await again.acquire()
        tokens.append(token_of(again))
        await again.release()

    assert tokens[0] > 0
    assert tokens == sorted({*tokens})


async def test_of_all_who_try_one_acquires(store: limpet.Store) -> None:
    """Acquiring gives a token that is greater than every earlier one on that name."""
    locks = [store.lock("job", ttl=LONG_S) for _ in range(16)]

    answers = await asyncio.gather(*(lock.acquire() for lock in locks), return_exceptions=True)

    winners = [lock for lock, answer in zip(locks, answers, strict=True) if not isinstance(answer, LockHeld)]
    assert len(winners) == 1
    assert sum(isinstance(answer, LockHeld) for answer in answers) == 15
    assert [lock.token for lock in locks if lock not in winners] == [None] * 15
    assert winners[0].token is not None


# Held -------------------------------------------------------------------------


async def test_a_held_lock_says_who_holds_it(store: limpet.Store) -> None:
    """A lock that is held raises LockHeld, with its holder, token and remaining time."""
    lock = await acquire_lock(store, "job", ttl=50, holder="worker-7")

    with pytest.raises(LockHeld) as caught:
        await store.lock("job", ttl=1).acquire()

    assert caught.value.name == "job"
    assert caught.value.holder == "worker-7"
    assert caught.value.token == lock.token
    assert 45 < caught.value.remaining <= 50


async def test_the_remaining_time_shrinks(store: limpet.Store, elapse: Elapse) -> None:
    """A lock that is held raises LockHeld, with its holder, token and remaining time."""
    await acquire_lock(store, "job", ttl=30)
    await elapse(0.5)

    with pytest.raises(LockHeld) as caught:
        await store.lock("job", ttl=1).acquire()

    assert 20 < caught.value.remaining <= 29.5


async def test_a_lock_is_held_for_other_stores_too(store: limpet.Store, open_store: OpenStore) -> None:
    """A lock that is held raises LockHeld, with its holder, token and remaining time."""
    await acquire_lock(store, "job", holder="first")
    other = await open_store()

    with pytest.raises(LockHeld) as caught:
        await other.lock("job", ttl=1).acquire()

    assert caught.value.holder == "first"
    await acquire_lock(other, "another job")
    await acquire_lock(other.namespace(f"{other.name}-b"), "job")


async def test_a_refused_handle_does_not_disturb_the_holder(store: limpet.Store) -> None:
    """A lock that is held raises LockHeld, with its holder, token and remaining time."""
    lock = await acquire_lock(store, "job")

    for _ in range(3):
        with pytest.raises(LockHeld):
            await store.lock("job", ttl=LONG_S).acquire()

    lock.check()
    await store.put("a", 1, fence=lock)
    await lock.release()


# Waiting ----------------------------------------------------------------------


async def test_a_waiter_gets_the_lock_when_it_is_released(store: limpet.Store) -> None:
    """With `wait`, acquiring waits for the release.

    The test does not advance the clock: the release itself wakes the waiter.
    """
    first = await acquire_lock(store, "job")
    second = store.lock("job", ttl=LONG_S, wait=LONG_S)
    waiting = asyncio.ensure_future(second.acquire())
    await asyncio.sleep(0.1)
    assert not waiting.done()
    token = token_of(first)

    await first.release()

    await asyncio.wait_for(waiting, PATIENCE_S)
    assert token_of(second) > token


async def test_a_waiter_is_woken_by_a_release_of_another_store(store: limpet.Store, open_store: OpenStore) -> None:
    """With `wait`, acquiring waits for the release."""
    other = await open_store()
    first = await acquire_lock(other, "job")
    waiting = asyncio.ensure_future(store.lock("job", ttl=LONG_S, wait=LONG_S).acquire())
    await asyncio.sleep(0.1)

    await first.release()

    await asyncio.wait_for(waiting, PATIENCE_S)


async def test_a_refresh_is_no_release(store: limpet.Store) -> None:
    """With `wait`, acquiring waits for the release."""
    first = await acquire_lock(store, "job")
    waiting = asyncio.ensure_future(store.lock("job", ttl=LONG_S, wait=LONG_S).acquire())
    other = await acquire_lock(store, "another job")
    await asyncio.sleep(0.05)

    await first.refresh()
    await other.release()
    await store.put("job", "a key of the same name")
    await store.delete("job")
    await asyncio.sleep(0.1)

    assert not waiting.done()
    await first.release()
    await asyncio.wait_for(waiting, PATIENCE_S)


async def test_waiters_get_the_lock_one_after_the_other(store: limpet.Store) -> None:
    """With `wait`, acquiring waits for the release."""
    inside: list[str] = []
    tokens: list[int] = []

    async def work(name: str) -> None:
        lock = store.lock("job", ttl=LONG_S, wait=LONG_S)
        await lock.acquire()
        inside.append(name)
        assert inside == [name]
        tokens.append(token_of(lock))
        await asyncio.sleep(0.01)
        inside.remove(name)
        await lock.release()

    await asyncio.wait_for(asyncio.gather(*(work(f"worker-{number}") for number in range(8))), PATIENCE_S)

    assert tokens == sorted({*tokens})
    assert len(tokens) == 8


async def test_a_waiter_takes_over_when_the_time_is_over(store: limpet.Store, elapse: Elapse) -> None:
    """With `wait`, acquiring takes over when the holder's lease is over."""
    first = await acquire_lock(store, "job", ttl=1)
    second = store.lock("job", ttl=LONG_S, wait=LONG_S)
    waiting = asyncio.ensure_future(second.acquire())
    await elapse(0.5)
    await asyncio.sleep(0.05)
    assert not waiting.done()

    await while_time_passes(elapse, waiting)

    assert token_of(second) > token_of(first)


async def test_an_expired_lock_needs_no_waiting(store: limpet.Store, elapse: Elapse) -> None:
    """With `wait`, acquiring takes over when the holder's lease is over."""
    first = await acquire_lock(store, "job", ttl=0.2)
    await elapse(0.3)

    second = await acquire_lock(store, "job")

    assert token_of(second) > token_of(first)


async def test_a_waiter_does_not_take_over_from_one_who_refreshes(store: limpet.Store, elapse: Elapse) -> None:
    """With `wait`, acquiring takes over when the holder's lease is over."""
    first = await acquire_lock(store, "job", ttl=2)
    waiting = asyncio.ensure_future(store.lock("job", ttl=LONG_S, wait=LONG_S).acquire())
    for _ in range(4):
        await elapse(1)
        await first.refresh()
    assert not waiting.done()

    await while_time_passes(elapse, waiting, step_s=0.2)

    with pytest.raises(LockExpired):
        await first.refresh()


async def test_a_wait_ends(store: limpet.Store, elapse: Elapse) -> None:
    """A wait that times out raises LockHeld."""
    first = await acquire_lock(store, "job", holder="first")
    before = await store.status()
    waiting = asyncio.ensure_future(store.lock("job", ttl=1, wait=0.5).acquire())

    with pytest.raises(LockHeld) as caught:
        await while_time_passes(elapse, waiting)

    assert (await store.status()).now_ms - before.now_ms >= 500
    assert (caught.value.holder, caught.value.token) == ("first", first.token)
    first.check()


async def test_no_wait_is_no_wait(store: limpet.Store) -> None:
    """A wait that times out raises LockHeld."""
    await acquire_lock(store, "job")

    with pytest.raises(LockHeld):
        await asyncio.wait_for(store.lock("job", ttl=1, wait=0).acquire(), PATIENCE_S)


@pytest.mark.face("async")
async def test_a_cancelled_waiter_does_not_get_the_lock(store: limpet.Store) -> None:
    """A wait that times out raises LockHeld."""
    first = await acquire_lock(store, "job")
    waiting = asyncio.create_task(store.lock("job", ttl=LONG_S, wait=LONG_S).acquire())
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting

    await first.release()

    assert await store.locks() == []


# The queue --------------------------------------------------------------------


async def test_waiters_are_served_in_the_order_they_came(store: limpet.Store) -> None:
    """Callers of one opened store that wait for a lock get it in the order they came."""
    first = await acquire_lock(store, "job")
    order: list[int] = []

    async def work(number: int) -> None:
        lock = store.lock("job", ttl=LONG_S, wait=LONG_S)
        await lock.acquire()
        order.append(number)
        await lock.release()

    working = []
    for number in range(10):
        working.append(asyncio.ensure_future(work(number)))
        await wait_for_queue(store, number + 1, "lock", store.name, "job")
    await first.release()
    await asyncio.wait_for(asyncio.gather(*working), PATIENCE_S)

    assert order == list(range(10))


async def test_namespaces_and_names_have_separate_queues(store: limpet.Store) -> None:
    """Callers of one opened store that wait for a lock get it in the order they came."""
    first = await acquire_lock(store, "job")
    waiting = asyncio.ensure_future(store.lock("job", ttl=LONG_S, wait=LONG_S).acquire())
    await wait_for_queue(store, 1, "lock", store.name, "job")

    await asyncio.wait_for(store.lock("other", ttl=LONG_S, wait=LONG_S).acquire(), PATIENCE_S)
    elsewhere = store.namespace(f"{store.name}-b").lock("job", ttl=LONG_S, wait=LONG_S)
    await asyncio.wait_for(elsewhere.acquire(), PATIENCE_S)

    assert not waiting.done()
    await first.release()
    await asyncio.wait_for(waiting, PATIENCE_S)


async def test_waiters_of_several_stores_are_all_served(store: limpet.Store, open_store: OpenStore) -> None:
    """Between stores that were opened separately waiters have no order, and each of them is served."""
    stores = [store, await open_store()]
    first = await acquire_lock(store, "job")
    order: list[tuple[int, int]] = []

    async def work(store_number: int, number: int) -> None:
        lock = stores[store_number].lock("job", ttl=LONG_S, wait=LONG_S)
        await lock.acquire()
        order.append((store_number, number))
        await lock.release()

    working = []
    for number in range(5):
        for store_number, each in enumerate(stores):
            working.append(asyncio.ensure_future(work(store_number, number)))
            await wait_for_queue(each, number + 1, "lock", store.name, "job")
    await first.release()
    await asyncio.wait_for(asyncio.gather(*working), PATIENCE_S)

    for store_number in range(2):
        assert [number for its, number in order if its == store_number] == list(range(5))


async def test_without_waiting_a_line_changes_nothing(store: limpet.Store) -> None:
    """With `wait=0` no caller queues: a free lock is taken, and a held one is LockHeld."""
    first = await acquire_lock(store, "job", holder="first")
    waiting = [asyncio.ensure_future(take_and_release(store, "job")) for _ in range(3)]
    await wait_for_queue(store, 3, "lock", store.name, "job")

    with pytest.raises(LockHeld) as caught:
        await asyncio.wait_for(store.lock("job", ttl=1).acquire(), PATIENCE_S)

    assert (caught.value.holder, caught.value.token) == ("first", first.token)
    assert 0 < caught.value.remaining <= LONG_S
    await first.release()
    await asyncio.wait_for(asyncio.gather(*waiting), PATIENCE_S)
    await acquire_lock(store, "job")


async def test_a_waiter_that_gives_up_leaves_the_queue(store: limpet.Store, elapse: Elapse) -> None:
    """A waiter that gives up or is cancelled leaves the queue, and delays no other."""
    first = await acquire_lock(store, "job", holder="first")
    queue = ("lock", store.name, "job")
    ahead = asyncio.ensure_future(take_and_release(store, "job"))
    await wait_for_queue(store, 1, *queue)
    hasty = asyncio.ensure_future(store.lock("job", ttl=LONG_S, wait=0.3).acquire())
    await wait_for_queue(store, 2, *queue)
    behind = asyncio.ensure_future(take_and_release(store, "job"))
    await wait_for_queue(store, 3, *queue)

    with pytest.raises(LockHeld) as caught:
        await while_time_passes(elapse, hasty)
    assert (caught.value.holder, caught.value.token) == ("first", first.token)
    assert caught.value.remaining > 0
    await wait_for_queue(store, 2, *queue)
    await first.release()
    await asyncio.wait_for(asyncio.gather(ahead, behind), PATIENCE_S)

    await wait_for_queue(store, 0, *queue)


async def test_the_first_in_the_queue_gives_up_and_the_next_takes_over(store: limpet.Store, elapse: Elapse) -> None:
    """A waiter that gives up or is cancelled leaves the queue, and delays no other."""
    await acquire_lock(store, "job", ttl=2)
    hasty = asyncio.ensure_future(store.lock("job", ttl=LONG_S, wait=0.3).acquire())
    await wait_for_queue(store, 1, "lock", store.name, "job")
    behind = asyncio.ensure_future(store.lock("job", ttl=LONG_S, wait=LONG_S).acquire())
    await wait_for_queue(store, 2, "lock", store.name, "job")

    with pytest.raises(LockHeld):
        await while_time_passes(elapse, hasty)

    await while_time_passes(elapse, behind)


@pytest.mark.face("async")
@pytest.mark.parametrize("number", [0, 1, 2])
async def test_a_cancelled_waiter_leaves_the_queue(store: limpet.Store, number: int) -> None:
    """A waiter that gives up or is cancelled leaves the queue, and delays no other."""
    first = await acquire_lock(store, "job")
    waiting = [asyncio.ensure_future(take_and_release(store, "job")) for _ in range(3)]
    await wait_for_queue(store, 3, "lock", store.name, "job")

    waiting.pop(number).cancel()
    await wait_for_queue(store, 2, "lock", store.name, "job")
    await first.release()
    await asyncio.wait_for(asyncio.gather(*waiting), PATIENCE_S)

    assert await store.locks() == []


async def test_a_handover_tries_once_however_many_wait(store: limpet.Store) -> None:
    """Handing a lock over costs the same, however many callers wait.

    Each waiter tries in vain when it is first in the queue, tries again after the release, and releases the lock.
    When each release woke all waiters, forty of them made more than eight hundred commits.
    """
    first = await acquire_lock(store, "job")
    engine, waiters = count(store), 40

    working = [asyncio.ensure_future(take_and_release(store, "job")) for _ in range(waiters)]
    await wait_for_queue(store, waiters, "lock", store.name, "job")
    await first.release()
    await asyncio.wait_for(asyncio.gather(*working), 3 * PATIENCE_S)

    assert engine.commits <= 4 * waiters + 20


# Time to live -----------------------------------------------------------------


@pytest.mark.refused_early
@pytest.mark.parametrize("ttl", [0, -1, 0.0, True, None, "1", math.nan, math.inf, timedelta(0)])
async def test_a_ttl_that_is_none_is_refused(store: limpet.Store, ttl: Any) -> None:
    """A lock needs a ttl, under the rules of every ttl."""
    with pytest.raises(InvalidTTL):
        await store.lock("job", ttl=ttl).acquire()

    assert await store.locks() == []


async def test_a_lock_cannot_be_made_without_a_ttl(store: limpet.Store) -> None:
    """A lock needs a ttl, under the rules of every ttl."""
    lock: Any = store.lock

    with pytest.raises(TypeError):
        await lock("job").acquire()


@pytest.mark.parametrize(("ttl", "seconds"), [(2, 2), (1.5, 1.5), (timedelta(minutes=1), 60), (0.0001, 0.001)])
async def test_a_ttl_is_seconds_or_a_timedelta(store: limpet.Store, ttl: Any, seconds: float) -> None:
    """A lock needs a ttl, under the rules of every ttl."""
    await store.lock("job", ttl=ttl).acquire()

    if seconds > 1:
        (found,) = await store.locks()
        assert seconds - 1 < found.remaining <= seconds


@pytest.mark.parametrize("ttl", [0, -1, True, "1", math.nan, math.inf])
async def test_a_refresh_takes_no_other_ttl(store: limpet.Store, ttl: Any) -> None:
    """A lock needs a ttl, under the rules of every ttl."""
    lock = await acquire_lock(store, "job")

    with pytest.raises(InvalidTTL):
        await lock.refresh(ttl)

    await lock.refresh()
    await lock.release()


# Ownership --------------------------------------------------------------------


async def test_another_handle_cannot_release(store: limpet.Store, open_store: OpenStore) -> None:
    """Ownership is the handle: another handle cannot release it."""
    lock = await acquire_lock(store, "job", holder="me")

    for other in (store, await open_store()):
        with pytest.raises(LockNotHeld):
            await other.lock("job", ttl=LONG_S, holder="me").release()
        with pytest.raises(LockNotHeld):
            await other.lock("job", ttl=LONG_S, holder="me").refresh()

    lock.check()
    assert [found.token for found in await store.locks()] == [lock.token]


async def test_a_stale_handle_cannot_release_its_successor(store: limpet.Store, elapse: Elapse) -> None:
    """Ownership is the handle: another handle cannot release it."""
    stale = await acquire_lock(store, "job", ttl=0.2)
    await elapse(0.3)
    lock = await acquire_lock(store, "job")

    with pytest.raises(LockExpired):
        await stale.release()

    lock.check()
    assert [found.token for found in await store.locks()] == [lock.token]


async def test_any_task_may_use_the_handle(store: limpet.Store) -> None:
    """Ownership is the handle: another handle cannot release it."""
    lock = store.lock("job", ttl=LONG_S)

    async def elsewhere(work: Callable[[], Awaitable[Any]]) -> None:
        await work()

    await asyncio.create_task(elsewhere(lock.acquire))
    await asyncio.create_task(elsewhere(lock.refresh))
    await asyncio.create_task(elsewhere(lock.release))

    assert await store.locks() == []


async def test_a_released_lock_is_free(store: limpet.Store) -> None:
    """Releasing frees the lock at once."""
    lock = await acquire_lock(store, "job")

    await lock.release()

    assert not lock.lost
    assert await store.locks() == []
    await acquire_lock(store, "job")


async def test_leaving_the_context_frees_the_lock(store: limpet.Store) -> None:
    """Releasing frees the lock at once."""
    async with store.lock("job", ttl=LONG_S) as lock:
        assert [found.token for found in await store.locks()] == [lock.token]

    assert await store.locks() == []


async def test_the_token_can_be_read_after_the_release(store: limpet.Store) -> None:
    """The last token stays readable after the release, while `fence` and `check` raise."""
    tokens: list[int] = []
    lock = store.lock("job", ttl=LONG_S)
    assert lock.token is None

    async with lock:
        tokens.append(token_of(lock))
    tokens.append(token_of(lock))
    with pytest.raises(LockNotHeld):
        lock.check()
    with pytest.raises(LockNotHeld):
        _ = lock.fence
    with pytest.raises(LockNotHeld):
        await lock.release()
    await lock.acquire()
    tokens.append(token_of(lock))

    assert tokens[0] == tokens[1] < tokens[2]
    lock.check()


async def test_a_released_handle_can_be_used_again(store: limpet.Store) -> None:
    """Releasing frees the lock at once."""
    lock = store.lock("job", ttl=LONG_S)
    for _ in range(3):
        async with lock:
            lock.check()

    assert await store.locks() == []


# Refreshing -------------------------------------------------------------------


async def test_refreshing_extends_the_lease(store: limpet.Store, elapse: Elapse) -> None:
    """Refreshing extends the lease from now on and keeps the token."""
    lock = await acquire_lock(store, "job", ttl=1)
    token = lock.token
    for _ in range(4):
        await elapse(0.6)
        await lock.refresh()

    assert lock.token == token
    lock.check()
    with pytest.raises(LockHeld) as caught:
        await store.lock("job", ttl=1).acquire()
    assert caught.value.token == token
    assert caught.value.remaining > 0.5


async def test_refreshing_counts_from_now_on(store: limpet.Store, elapse: Elapse) -> None:
    """Refreshing extends the lease from now on and keeps the token.

    It does not add to what is left.
    """
    lock = await acquire_lock(store, "job", ttl=10)
    await lock.refresh()
    await lock.refresh()
    assert (await store.locks())[0].remaining <= 10

    await elapse(0.5)
    await lock.refresh()

    assert 9.5 < (await store.locks())[0].remaining <= 10


async def test_refreshing_with_another_ttl(store: limpet.Store, elapse: Elapse) -> None:
    """Refreshing extends the lease from now on and keeps the token."""
    lock = await acquire_lock(store, "job", ttl=10)
    await lock.refresh(100)
    assert 95 < (await store.locks())[0].remaining <= 100

    await lock.refresh(timedelta(seconds=0.3))
    assert (await store.locks())[0].remaining <= 0.3
    await elapse(0.4)

    assert await store.locks() == []


async def test_a_context_renews_its_lock(store: limpet.Store, elapse: Elapse) -> None:
    """A lock used as a context renews itself while its body runs.

    The body lasts several times as long as the lease.
    """
    async with store.lock("job", ttl=2) as lock:
        token = token_of(lock)
        for _ in range(8):
            await elapse(0.7)
            async with asyncio.timeout(PATIENCE_S):
                while not any(found.remaining > 1.5 for found in await store.locks()):
                    await elapse(0.005)
            lock.check()

        assert (await store.locks())[0].token == token
        with pytest.raises(LockHeld):
            await store.lock("job", ttl=1).acquire()
        await store.put("a", 1, fence=lock)

    assert not lock.lost
    assert await store.locks() == []


async def test_renewal_rides_out_a_short_failure(store: limpet.Store, elapse: Elapse) -> None:
    """A lock used as a context renews itself while its body runs."""
    async with store.lock("job", ttl=4) as lock:
        failing = fail(store, before=3)
        await until(elapse, lambda: failing.before == 0)
        async with asyncio.timeout(PATIENCE_S):
            while not any(found.remaining > 3 for found in await store.locks()):
                await elapse(0.05)

        lock.check()

    assert not lock.lost


async def test_a_lock_by_hand_does_not_renew_itself(store: limpet.Store, elapse: Elapse) -> None:
    """A lock used as a context renews itself while its body runs."""
    lock = await acquire_lock(store, "job", ttl=0.3)
    for _ in range(4):
        await elapse(0.1)

    assert await store.locks() == []
    with pytest.raises(LockExpired):
        await lock.refresh()


# Expired, and not held --------------------------------------------------------


async def test_what_expired_cannot_be_refreshed(store: limpet.Store, elapse: Elapse) -> None:
    """Refreshing or releasing after the lease is over is LockExpired, even if no one took the lock since."""
    lock = await acquire_lock(store, "job", ttl=0.2)
    token = lock.token
    await elapse(0.3)

    with pytest.raises(LockExpired) as caught:
        await lock.refresh()

    assert (caught.value.name, caught.value.token) == ("job", token)
    assert await store.locks() == []
    with pytest.raises(LockExpired):
        await lock.refresh()


async def test_what_expired_cannot_be_released(store: limpet.Store, elapse: Elapse) -> None:
    """Refreshing or releasing after the lease is over is LockExpired, even if no one took the lock since."""
    lock = await acquire_lock(store, "job", ttl=0.2)
    await elapse(0.3)

    with pytest.raises(LockExpired):
        await lock.release()

    with pytest.raises(LockExpired):
        await lock.release()


async def test_what_was_swept_is_expired_as_well(store: limpet.Store, elapse: Elapse) -> None:
    """Refreshing or releasing after the lease is over is LockExpired, even if no one took the lock since."""
    locks = [await acquire_lock(store, name, ttl=0.2) for name in ("a", "b")]
    await elapse(0.3)
    await store.sweep()

    with pytest.raises(LockExpired):
        await locks[0].refresh()
    with pytest.raises(LockExpired):
        await locks[1].release()


async def test_what_was_taken_over_is_expired_as_well(store: limpet.Store, elapse: Elapse) -> None:
    """Refreshing or releasing after the lease is over is LockExpired, even if no one took the lock since."""
    locks = [await acquire_lock(store, name, ttl=0.2) for name in ("a", "b")]
    await elapse(0.3)
    await acquire_lock(store, "a")
    thief = await acquire_lock(store, "b")

    with pytest.raises(LockExpired):
        await locks[0].refresh()
    with pytest.raises(LockExpired):
        await locks[1].release()
    thief.check()
    assert [found.name for found in await store.locks()] == ["a", "b"]


async def test_an_expired_handle_can_acquire_again(store: limpet.Store, elapse: Elapse) -> None:
    """Refreshing or releasing after the lease is over is LockExpired, even if no one took the lock since."""
    lock = await acquire_lock(store, "job", ttl=0.2)
    token = token_of(lock)
    await elapse(0.3)
    with pytest.raises(LockExpired):
        await lock.release()

    await lock.acquire()

    assert token_of(lock) > token
    assert not lock.lost
    await lock.release()


async def test_what_was_never_acquired_is_not_held(store: limpet.Store) -> None:
    """Refreshing or releasing a lock that was never acquired, or was released, is LockNotHeld."""
    lock = store.lock("job", ttl=LONG_S)

    with pytest.raises(LockNotHeld) as caught:
        await lock.refresh()
    assert caught.value.name == "job"
    with pytest.raises(LockNotHeld):
        await lock.release()
    with pytest.raises(LockNotHeld):
        lock.check()


async def test_what_was_given_back_is_not_held(store: limpet.Store) -> None:
    """Refreshing or releasing a lock that was never acquired, or was released, is LockNotHeld."""
    lock = await acquire_lock(store, "job")
    await lock.release()
    other = await acquire_lock(store, "job")

    with pytest.raises(LockNotHeld):
        await lock.refresh()
    with pytest.raises(LockNotHeld):
        await lock.release()

    other.check()


async def test_a_lock_given_back_inside_its_body_is_fine(store: limpet.Store) -> None:
    """Refreshing or releasing a lock that was never acquired, or was released, is LockNotHeld."""
    async with store.lock("job", ttl=LONG_S) as lock:
        await lock.release()
        other = await acquire_lock(store, "job")

    other.check()
    assert not lock.lost


# Loss -------------------------------------------------------------------------


async def test_a_lost_lock_is_reported_in_and_after_its_body(
    store: limpet.Store, open_store: OpenStore, face: str, elapse: Elapse
) -> None:
    """Losing a lock sets `lost`, makes `check` raise LockLost, and raises LockLost at the end of its body."""
    other = await open_store()
    lock = patient_lock(store, face, "job")
    seen: list[Any] = []

    async def work() -> None:
        async with lock:
            seen.extend([lock.token, lock.lost])
            await take_over(store, other, lock, elapse)
            await until(elapse, lambda: lock.lost)
            with pytest.raises(LockLost) as checked:
                lock.check()
            seen.append(checked.value.token)

    with pytest.raises(LockLost) as caught:
        await work()

    token = caught.value.token
    assert caught.value.name == "job"
    assert seen == [token, False, token]
    assert lock.lost
    assert [found.token > token for found in await store.locks()] == [True]


async def test_a_lock_whose_line_is_cut_is_lost_before_its_time_is_over(
    store: limpet.Store, face: str, elapse: Elapse
) -> None:
    """Losing a lock sets `lost`, makes `check` raise LockLost, and raises LockLost at the end of its body."""
    lock = patient_lock(store, face, "job")

    async def work() -> None:
        async with lock:
            fail(store, before=10**9)
            await until(elapse, lambda: lock.lost)

    with pytest.raises(LockLost):
        await work()


async def test_a_renewal_whose_answer_is_lost_is_tried_again(store: limpet.Store, elapse: Elapse) -> None:
    """A renewal that fails for a moment, or whose reply is lost, is tried again until the lease may be over.

    A renewal whose outcome stayed unknown once ended all further renewals, without an error.
    """
    async with store.lock("job", ttl=4) as lock:
        failing = fail(store, after=5)
        await until(elapse, lambda: failing.after == 0)
        renewals = failing.commits
        await until(elapse, lambda: failing.commits >= renewals + 4)

        lock.check()
        assert [found.token for found in await store.locks()] == [lock.token]
    assert not lock.lost


async def test_a_renewal_that_is_refused_for_a_moment_is_tried_again(store: limpet.Store, elapse: Elapse) -> None:
    """A renewal that fails for a moment, or whose reply is lost, is tried again until the lease may be over."""
    async with store.lock("job", ttl=4) as lock:
        failing = fail(store, before=5)
        await until(elapse, lambda: failing.before == 0)
        renewals = failing.commits
        await until(elapse, lambda: failing.commits >= renewals + 4)

        lock.check()
    assert not lock.lost


async def test_a_renewal_that_stays_unknown_loses_the_lock(store: limpet.Store, face: str, elapse: Elapse) -> None:
    """A renewal that fails for a moment, or whose reply is lost, is tried again until the lease may be over."""
    lock = patient_lock(store, face, "job")

    async def work() -> None:
        async with lock:
            with raising(store, Ambiguous("the connection is lost, and the reply with it", request_id="1", since=0)):
                await until(elapse, lambda: lock.lost)
            with pytest.raises(LockLost):
                lock.check()

    with pytest.raises(LockLost):
        await work()


@pytest.mark.parametrize("error", [RuntimeError("secret"), asyncio.CancelledError("secret"), Corrupt("broken")])
async def test_a_renewal_that_fails_in_an_unforeseen_way_loses_the_lock(
    store: limpet.Store, face: str, elapse: Elapse, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    """A renewal that fails for any other reason loses the lock, and a warning in the log names the lock and its token.

    The text of the error may contain a value, and is not logged.
    """
    lock = patient_lock(store, face, "job")

    async def work() -> None:
        async with lock:
            with raising(store, error):
                await until(elapse, lambda: lock.lost)

    with pytest.raises(LockLost):
        await work()

    (line,) = [record.getMessage() for record in caplog.records if record.name == "limpet.lock"]
    assert "'job'" in line
    assert str(lock.token) in line
    assert type(error).__name__ in line
    assert "secret" not in line


@pytest.mark.face("async")
async def test_an_unforeseen_failure_cancels_the_body(store: limpet.Store, elapse: Elapse) -> None:
    """Losing a lock cancels the body of `async with`, unless `cancel=False`."""

    async def work() -> None:
        async with store.lock("job", ttl=TTL_S):
            entered.set()
            await asyncio.Event().wait()

    entered = asyncio.Event()
    working = asyncio.create_task(work())
    await entered.wait()
    with raising(store, RuntimeError("an unforeseen error")), pytest.raises(LockLost):
        await while_time_passes(elapse, working)


@pytest.mark.face("async")
async def test_a_renewal_that_is_not_answered_loses_the_lock_in_time(store: limpet.Store, elapse: Elapse) -> None:
    """Losing a lock cancels the body of `async with`, unless `cancel=False`.

    The engine neither answers nor fails, and the lease ends meanwhile.
    """
    session = session_of(store)
    slow = Slow(session.engine)

    async def work() -> None:
        async with store.lock("job", ttl=TTL_S):
            session.engine = slow
            await asyncio.Event().wait()

    working = asyncio.create_task(work())
    with pytest.raises(LockLost):
        await while_time_passes(elapse, working)
    slow.answers.set()


async def test_check_looks_at_the_clock(store: limpet.Store, elapse: Elapse) -> None:
    """Losing a lock sets `lost`, makes `check` raise LockLost, and raises LockLost at the end of its body.

    The holder gets no notice. The time that passed is enough.
    """
    lock = await acquire_lock(store, "job", ttl=TTL_S)
    lock.check()
    await elapse(TTL_S)

    with pytest.raises(LockLost) as caught:
        lock.check()

    assert caught.value.token == lock.token
    assert lock.lost


async def test_a_long_pause_loses_the_lock(store: limpet.Store, open_store: OpenStore, elapse: Elapse) -> None:
    """Losing a lock sets `lost`, makes `check` raise LockLost, and raises LockLost at the end of its body.

    The holder stands still for longer than its lease, and another takes over.
    """
    lock = await acquire_lock(store, "job", ttl=TTL_S)
    await elapse(10 * TTL_S)
    thief = await acquire_lock(await open_store(), "job")

    with pytest.raises(LockExpired):
        await lock.refresh()

    assert lock.lost
    with pytest.raises(LockLost):
        lock.check()
    thief.check()


@pytest.mark.face("async")
async def test_losing_a_lock_cancels_its_body(store: limpet.Store, open_store: OpenStore, elapse: Elapse) -> None:
    """Losing a lock cancels the body of `async with`, unless `cancel=False`."""
    other = await open_store()
    lock, entered, seen = store.lock("job", ttl=TTL_S), asyncio.Event(), []

    async def work() -> None:
        async with lock:
            entered.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                seen.append("cancelled")
                raise

    working = asyncio.create_task(work())
    await entered.wait()
    await take_over(store, other, lock, elapse)

    with pytest.raises(LockLost):
        await while_time_passes(elapse, working)
    assert seen == ["cancelled"]
    assert not working.cancelled()


@pytest.mark.face("async")
async def test_with_cancel_off_the_body_goes_on(store: limpet.Store, open_store: OpenStore, elapse: Elapse) -> None:
    """Losing a lock cancels the body of `async with`, unless `cancel=False`."""
    other = await open_store()
    lock, done = store.lock("job", ttl=TTL_S, cancel=False), asyncio.Event()

    async def work() -> None:
        async with lock:
            await take_over(store, other, lock, elapse)
            await until(elapse, lambda: lock.lost)
            await asyncio.sleep(0.05)
            done.set()

    with pytest.raises(LockLost):
        await work()

    assert done.is_set()


@pytest.mark.face("async")
async def test_a_lost_lock_leaves_its_task_uncancelled(
    store: limpet.Store, open_store: OpenStore, elapse: Elapse
) -> None:
    """Losing a lock cancels the body of `async with`, unless `cancel=False`.

    A caller that catches LockLost goes on in the same task, as if it had never been cancelled.
    """
    other = await open_store()
    lock, entered = store.lock("job", ttl=TTL_S), asyncio.Event()

    async def body() -> None:
        async with lock:
            entered.set()
            await asyncio.Event().wait()

    working = asyncio.create_task(cancellations_left_by(body()))
    await entered.wait()
    await take_over(store, other, lock, elapse)

    assert await while_time_passes(elapse, working) == 0


@pytest.mark.face("async")
async def test_a_body_that_outlasts_its_cancellation_still_gets_lock_lost(
    store: limpet.Store, open_store: OpenStore, elapse: Elapse
) -> None:
    """Losing a lock cancels the body of `async with`, unless `cancel=False`.

    The body swallows the cancellation. It ends with LockLost all the same, in a task that does not
    count as cancelled.
    """
    other = await open_store()
    lock, entered = store.lock("job", ttl=TTL_S), asyncio.Event()

    async def body() -> None:
        async with lock:
            entered.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await asyncio.sleep(0)

    working = asyncio.create_task(cancellations_left_by(body()))
    await entered.wait()
    await take_over(store, other, lock, elapse)

    assert await while_time_passes(elapse, working) == 0


@pytest.mark.face("async")
async def test_a_cancellation_from_outside_stays_one(store: limpet.Store) -> None:
    """Losing a lock cancels the body of `async with`, unless `cancel=False`.

    The lock is fine: a caller who cancels gets a cancellation, and the lock is free.
    """
    entered = asyncio.Event()

    async def work() -> None:
        async with store.lock("job", ttl=LONG_S):
            entered.set()
            await asyncio.Event().wait()

    working = asyncio.create_task(work())
    await entered.wait()
    working.cancel()

    with pytest.raises(asyncio.CancelledError):
        await working
    assert working.cancelled()
    assert await store.locks() == []


@pytest.mark.face("async")
async def test_a_timeout_around_a_lock_is_a_timeout(store: limpet.Store) -> None:
    """Losing a lock cancels the body of `async with`, unless `cancel=False`."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05), store.lock("job", ttl=LONG_S):
            await asyncio.Event().wait()

    assert await store.locks() == []


@pytest.mark.face("async")
@pytest.mark.parametrize("cancels", [1, 2])
async def test_a_lock_granted_to_a_cancelled_caller_is_given_back(store: limpet.Store, cancels: int) -> None:
    """A caller that is cancelled while acquiring a lock holds nothing afterwards.

    The engine has granted it and the reply is on its way: without a release the lock would be held, by no caller,
    until its lease is over.
    """
    session = session_of(store)
    slow = Slow(session.engine)
    session.engine = slow
    asking = asyncio.ensure_future(store.lock("job", ttl=LONG_S).acquire())
    await slow.committed.wait()

    for _ in range(cancels):
        asking.cancel()
        await asyncio.sleep(0)
    slow.answers.set()

    with pytest.raises(asyncio.CancelledError):
        await asking
    async with asyncio.timeout(PATIENCE_S):
        while await store.locks():  # noqa: ASYNC110 - a release has no event
            await asyncio.sleep(0.001)


@pytest.mark.face("async")
async def test_a_cancellation_from_outside_is_not_hidden_by_a_loss(
    store: limpet.Store, open_store: OpenStore, elapse: Elapse
) -> None:
    """Losing a lock cancels the body of `async with`, unless `cancel=False`.

    The lock is lost and the caller cancels as well: the cancellation wins.
    """
    other = await open_store()
    lock, entered, lost = store.lock("job", ttl=TTL_S), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        async with lock:
            entered.set()
            try:
                await asyncio.Event().wait()
            finally:
                lost.set()
                await asyncio.sleep(LONG_S)

    working = asyncio.create_task(work())
    await entered.wait()
    await take_over(store, other, lock, elapse)
    await while_time_passes(elapse, lost.wait())
    working.cancel()

    with pytest.raises(asyncio.CancelledError):
        await while_time_passes(elapse, working)


async def test_an_error_of_the_body_comes_through(store: limpet.Store) -> None:
    """An error of the body itself is not hidden by the lock."""
    with pytest.raises(ZeroDivisionError):
        async with store.lock("job", ttl=LONG_S):
            _ = 1 / 0

    assert await store.locks() == []


async def test_an_error_of_the_body_comes_through_a_loss(
    store: limpet.Store, open_store: OpenStore, face: str, elapse: Elapse
) -> None:
    """An error of the body itself is not hidden by the lock."""
    other = await open_store()
    lock = patient_lock(store, face, "job")

    async def work() -> None:
        async with lock:
            await take_over(store, other, lock, elapse)
            await until(elapse, lambda: lock.lost)
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        await work()

    assert lock.lost


@pytest.mark.face("async")
async def test_an_error_on_being_cancelled_comes_through(
    store: limpet.Store, open_store: OpenStore, elapse: Elapse
) -> None:
    """An error of the body itself is not hidden by the lock."""
    other = await open_store()
    lock, entered = store.lock("job", ttl=TTL_S), asyncio.Event()

    async def work() -> None:
        async with lock:
            entered.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise KeyError("on the way out") from None

    working = asyncio.create_task(work())
    await entered.wait()
    await take_over(store, other, lock, elapse)

    with pytest.raises(KeyError, match="on the way out"):
        await while_time_passes(elapse, working)


async def test_an_error_of_the_body_comes_through_a_failing_release(store: limpet.Store, elapse: Elapse) -> None:
    """An error of the body itself is not hidden by the lock."""

    async def work() -> None:
        async with store.lock("job", ttl=LONG_S):
            fail(store, before=10**9)
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        await while_time_passes(elapse, work())


@pytest.mark.parametrize(
    "error",
    [Ambiguous("the answer is lost", request_id="1", since=0), Corrupt("broken"), RuntimeError("unforeseen")],
    ids=lambda error: type(error).__name__,
)
async def test_an_error_of_the_body_comes_through_whatever_the_release_raises(
    store: limpet.Store, elapse: Elapse, error: Exception
) -> None:
    """An error of the body itself is not hidden by the lock."""

    async def work() -> None:
        async with lock:
            stack.enter_context(raising(store, error))
            _ = 1 / 0

    lock = store.lock("job", ttl=LONG_S)
    with contextlib.ExitStack() as stack, pytest.raises(ZeroDivisionError):
        await while_time_passes(elapse, work())

    with pytest.raises(LockNotHeld):
        lock.check()


@pytest.mark.parametrize(
    "error",
    [Ambiguous("the answer is lost", request_id="1", since=0), Unavailable("the connection is lost")],
    ids=lambda error: type(error).__name__,
)
async def test_a_lock_that_cannot_be_given_back_ends_by_itself(
    store: limpet.Store, elapse: Elapse, error: Exception
) -> None:
    """A lock that cannot be released at the end of its body ends when its lease is over."""

    async def work() -> str:
        async with lock:
            stack.enter_context(raising(store, error))
            return "done"

    lock = store.lock("job", ttl=3)
    with contextlib.ExitStack() as stack:
        assert await while_time_passes(elapse, work()) == "done"

    assert not lock.lost
    token = token_of(lock)
    again = store.lock("job", ttl=LONG_S, wait=LONG_S)
    await while_time_passes(elapse, again.acquire(), step_s=0.2)
    assert token_of(again) > token


# Names and lists --------------------------------------------------------------


async def test_a_lock_and_a_key_of_one_name_do_not_meet(store: limpet.Store) -> None:
    """A lock and a key of the same name are independent."""
    entry = await store.put("job", "a key")
    lock = await acquire_lock(store, "job")

    assert await store.entry("job") == entry
    await store.create("other", 1)
    await acquire_lock(store, "other")
    assert await store.delete("job")
    assert [found.name for found in await store.locks()] == ["job", "other"]
    await lock.release()
    assert await store.get("other") == 1


async def test_a_key_does_not_stand_in_for_a_lock(store: limpet.Store) -> None:
    """A lock and a key of the same name are independent."""
    entry = await store.put("job", {"holder": "me"})

    with pytest.raises(LockLost):
        await store.put("a", 1, fence=limpet.Fence("job", entry.created_revision))

    await acquire_lock(store, "job")
    with pytest.raises(Conflict):
        await store.put("no such key", 1, expect=limpet.PRESENT)


async def test_locks_are_listed_with_their_holders(store: limpet.Store) -> None:
    """`locks` lists the held locks with their holders."""
    b = await acquire_lock(store, "b", ttl=20, holder="worker-b")
    a = await acquire_lock(store, "a", ttl=40, holder="worker-a")
    gone = await acquire_lock(store, "c")
    await gone.release()

    found = await store.locks()

    assert [(each.name, each.holder, each.token) for each in found] == [
        ("a", "worker-a", a.token),
        ("b", "worker-b", b.token),
    ]
    assert 35 < found[0].remaining <= 40
    assert 15 < found[1].remaining <= 20


async def test_expired_locks_are_not_listed(store: limpet.Store, elapse: Elapse) -> None:
    """`locks` lists the held locks with their holders."""
    await acquire_lock(store, "short", ttl=0.2)
    await acquire_lock(store, "long")
    await elapse(0.3)

    assert [found.name for found in await store.locks()] == ["long"]


async def test_locks_are_listed_by_prefix(store: limpet.Store) -> None:
    """`locks` lists the held locks with their holders."""
    for name in ["a", "a/1", "a/2", "a0", "b"]:
        await acquire_lock(store, name)
    await acquire_lock(store.namespace(f"{store.name}-b"), "a/3")
    await store.put("a/4", "a key")

    assert [found.name for found in await store.locks("a/")] == ["a/1", "a/2"]
    assert [found.name for found in await store.locks()] == ["a", "a/1", "a/2", "a0", "b"]


async def test_many_locks_are_listed_whole(store: limpet.Store) -> None:
    """`locks` lists the held locks with their holders."""
    names = [f"job-{number:04}" for number in range(600)]
    await asyncio.gather(*(acquire_lock(store, name) for name in names))

    assert [found.name for found in await store.locks()] == names


async def test_a_holder_is_named_even_if_no_name_was_given(store: limpet.Store) -> None:
    """`locks` lists the held locks with their holders."""
    await acquire_lock(store, "job")

    (found,) = await store.locks()

    assert found.holder


# Fences -----------------------------------------------------------------------

Fenced = Callable[[limpet.Store, Any], Awaitable[Any]]


async def _record_touch(store: limpet.Store, fence: Any) -> None:
    record: Any = store.record("record")
    await record.touch(9, fence=fence)


WRITES: dict[str, Fenced] = {
    "put": lambda store, fence: store.put("key", 2, fence=fence),
    "create": lambda store, fence: store.create("new", 2, fence=fence),
    "update": lambda store, fence: store.update("key", lambda found: found + 1, fence=fence),
    "update to nothing": lambda store, fence: store.update("key", lambda _: limpet.ABSENT, fence=fence),
    "add": lambda store, fence: store.add("key", fence=fence),
    "delete": lambda store, fence: store.delete("key", fence=fence),
    "delete nothing": lambda store, fence: store.delete("missing", fence=fence),
    "take": lambda store, fence: store.take("key", fence=fence),
    "touch": lambda store, fence: store.touch("key", 9, fence=fence),
    "persist": lambda store, fence: store.persist("key", fence=fence),
    "record put": lambda store, fence: store.record("record").put({"a": 2}, fence=fence),
    "record set": lambda store, fence: store.record("record").set(a=2, fence=fence),
    "record swap": lambda store, fence: store.record("record").swap("a", 1, 2, fence=fence),
    "record delete": lambda store, fence: store.record("record").delete(fence=fence),
    "record touch": _record_touch,
    "batch": lambda store, fence: store.batch().fence(fence).put("key", 2).delete("record").commit(),
    "check": lambda store, fence: store.batch().fence(fence).expect("key", limpet.PRESENT).commit(),
}


async def prepare_entries(store: limpet.Store) -> list[limpet.Entry]:
    """Write one key and one record."""
    await store.delete("new")
    await store.put("key", 1)
    await store.record("record").put({"a": 1})
    return [entry async for entry in store.scan()]


@pytest.mark.parametrize("write", WRITES)
async def test_a_fence_fits_every_write(store: limpet.Store, elapse: Elapse, write: str) -> None:
    """A fence fits every write, and batches."""
    before = await prepare_entries(store)
    lock = await acquire_lock(store, "job", ttl=1)
    token = token_of(lock)

    await WRITES[write](store, lock)
    after = [entry async for entry in store.scan()]
    await elapse(1.1)
    before_again = await prepare_entries(store)
    with pytest.raises(LockLost) as caught:
        await WRITES[write](store, lock)

    assert (after != before) == (write not in ("check", "delete nothing"))
    assert (caught.value.name, caught.value.token) == ("job", token)
    assert [entry async for entry in store.scan()] == before_again


async def test_a_fenced_write_happens_while_the_lock_is_held(store: limpet.Store) -> None:
    """`fence=lock` lets a write happen while the lock is held."""
    async with store.lock("job", ttl=LONG_S) as lock:
        entry = await store.put("a", 1, fence=lock)
        assert await store.add("a", 4, fence=lock) == 5

    assert entry.version == 1
    assert await store.get("a") == 5


async def test_a_fence_and_a_guard_must_both_hold(store: limpet.Store) -> None:
    """`fence=lock` lets a write happen while the lock is held."""
    lock = await acquire_lock(store, "job")
    entry = await store.put("a", 1)

    with pytest.raises(Conflict):
        await store.put("a", 2, expect=limpet.ABSENT, fence=lock)
    await store.put("a", 3, expect=entry, fence=lock)

    assert await store.get("a") == 3


async def test_two_fences_must_both_hold(store: limpet.Store, elapse: Elapse) -> None:
    """`fence=lock` lets a write happen while the lock is held."""
    long, short = await acquire_lock(store, "long"), await acquire_lock(store, "short", ttl=0.5)
    await store.batch().fence(long).fence(short).put("a", 1).commit()
    await elapse(0.6)

    with pytest.raises(LockLost) as caught:
        await store.batch().fence(long).fence(short).put("a", 2).commit()

    assert caught.value.name == "short"
    assert await store.get("a") == 1


async def test_a_fence_serves_another_store_of_the_namespace(store: limpet.Store, open_store: OpenStore) -> None:
    """`fence=lock` lets a write happen while the lock is held."""
    lock = await acquire_lock(store, "job")

    await (await open_store()).put("a", 1, fence=lock)

    assert await store.get("a") == 1


async def test_a_write_under_a_lock_taken_over_changes_nothing(store: limpet.Store, elapse: Elapse) -> None:
    """A fenced write after the lock was taken over is LockLost and changes nothing."""
    await store.put("a", "old")
    stale = await acquire_lock(store, "job", ttl=0.3)
    await elapse(0.4)
    lock = await acquire_lock(store, "job")
    await store.put("a", "new", fence=lock)
    before = await store.status()

    with pytest.raises(LockLost) as caught:
        await store.put("a", "stale", fence=stale)

    assert (caught.value.name, caught.value.token) == ("job", stale.token)
    assert await store.get("a") == "new"
    assert (await store.status()).revision == before.revision


async def test_a_paused_holder_cannot_write(store: limpet.Store, open_store: OpenStore, elapse: Elapse) -> None:
    """A fenced write after the lock was taken over is LockLost and changes nothing.

    The holder was paused in the middle of its body, past its lease, and does not know it. The next
    holder has begun. Without the fence the late write would destroy what the next holder wrote.
    """
    other = await open_store()
    stale = await acquire_lock(store, "job", ttl=0.3)
    plan = await store.batch().fence(stale).put("a", 1).commit()
    assert plan.entries[0] is not None
    await elapse(5)
    async with other.lock("job", ttl=LONG_S) as lock:
        await other.put("a", "successor", fence=lock)
        with pytest.raises(LockLost):
            await store.batch().put("a", "late").put("b", "late").fence(stale).commit()

    assert await store.get("a") == "successor"
    assert await store.get("b") is None


async def test_a_write_under_a_lock_given_back_is_refused(store: limpet.Store) -> None:
    """A fenced write after the lock was taken over is LockLost and changes nothing.

    The caller kept the fence from before the release.
    """
    lock = await acquire_lock(store, "job")
    fence = lock.fence
    await lock.release()

    with pytest.raises(LockLost):
        await store.put("a", 1, fence=fence)
    await lock.acquire()
    with pytest.raises(LockLost):
        await store.put("a", 1, fence=fence)

    assert await store.get("a") is None


async def test_a_write_under_an_expired_lock_is_refused(store: limpet.Store, elapse: Elapse) -> None:
    """A fenced write after the lock expired is LockLost, even if no one took the lock since."""
    lock = await acquire_lock(store, "job", ttl=0.3)
    await elapse(0.4)

    with pytest.raises(LockLost):
        await store.put("a", 1, fence=lock)
    await store.sweep()
    with pytest.raises(LockLost):
        await store.put("a", 1, fence=lock)

    assert await store.get("a") is None


async def test_a_fence_holds_to_the_last_moment(store: limpet.Store, elapse: Elapse) -> None:
    """A fenced write after the lock expired is LockLost, even if no one took the lock since."""
    lock = await acquire_lock(store, "job", ttl=2)
    (entry,) = await store.locks()
    await elapse(entry.remaining - 0.5)
    await store.put("a", "in time", fence=lock)
    await elapse(0.5)

    with pytest.raises(LockLost):
        await store.put("a", "late", fence=lock)

    assert await store.get("a") == "in time"


async def test_a_refresh_keeps_the_fence(store: limpet.Store, elapse: Elapse) -> None:
    """The holder's own refresh does not break its fence."""
    lock = await acquire_lock(store, "job", ttl=1)
    fence = lock.fence
    for number in range(4):
        await elapse(0.6)
        await lock.refresh()
        await store.put("a", number, fence=fence)
        await store.put("b", number, fence=lock)

    assert lock.fence == fence
    assert (await store.get("a"), await store.get("b")) == (3, 3)


async def test_renewal_keeps_the_fence(store: limpet.Store, elapse: Elapse) -> None:
    """The holder's own refresh does not break its fence."""
    async with store.lock("job", ttl=TTL_S) as lock:
        fence = lock.fence
        revision = (await store.status()).revision
        async with asyncio.timeout(PATIENCE_S):
            while (await store.status()).revision == revision:
                await elapse(TTL_S / 10)

        await store.put("a", 1, fence=fence)


async def test_a_fence_of_another_namespace_is_refused(store: limpet.Store) -> None:
    """A fence from another namespace is InvalidValue."""
    other = store.namespace(f"{store.name}-b")
    lock = await acquire_lock(other, "job")
    await acquire_lock(store, "job")

    with pytest.raises(InvalidValue):
        await store.put("a", 1, fence=lock)
    with pytest.raises(InvalidValue):
        await store.batch().fence(lock).put("a", 1).commit()
    with pytest.raises(InvalidValue):
        await store.put("a", 1, fence=limpet.Fence("job", token_of(lock), other.name))

    assert await store.get("a") is None
    await other.put("a", 1, fence=lock)


async def test_a_fence_is_a_name_and_a_token(store: limpet.Store, open_store: OpenStore) -> None:
    """A fence can be given by name and token."""
    lock = await acquire_lock(store, "job")
    other = await open_store()

    await other.put("a", 1, fence=limpet.Fence("job", token_of(lock)))
    await other.batch().fence(limpet.Fence("job", token_of(lock), store.name)).add("a").commit()

    assert await store.get("a") == 2


async def test_a_fence_with_another_token_is_refused(store: limpet.Store) -> None:
    """A fence can be given by name and token."""
    token = token_of(await acquire_lock(store, "job"))

    for wrong in (token - 1, token + 1, 0):
        with pytest.raises(LockLost) as caught:
            await store.put("a", 1, fence=limpet.Fence("job", wrong))
        assert caught.value.token == wrong
    with pytest.raises(LockLost):
        await store.put("a", 1, fence=limpet.Fence("another job", token))

    assert await store.get("a") is None


async def test_a_lock_that_was_never_acquired_cannot_fence(store: limpet.Store) -> None:
    """A lock that is not held cannot fence."""
    lock = store.lock("job", ttl=LONG_S)
    await acquire_lock(store, "job")

    with pytest.raises(LockNotHeld):
        await store.put("a", 1, fence=lock)
    with pytest.raises(LockNotHeld):
        await store.batch().fence(lock).put("a", 1).commit()

    assert await store.get("a") is None


async def test_a_lock_that_was_given_back_cannot_fence(store: limpet.Store) -> None:
    """A lock that is not held cannot fence."""
    lock = await acquire_lock(store, "job")
    await lock.release()

    with pytest.raises(LockNotHeld):
        await store.put("a", 1, fence=lock)

    assert await store.get("a") is None


async def test_a_lock_of_another_holder_cannot_fence(store: limpet.Store) -> None:
    """A lock that is not held cannot fence."""
    await acquire_lock(store, "job")
    lock = store.lock("job", ttl=1)
    with pytest.raises(LockHeld):
        await lock.acquire()

    with pytest.raises(LockNotHeld):
        await store.put("a", 1, fence=lock)

    assert await store.get("a") is None


async def test_a_lock_is_taken_up_by_its_token(store: limpet.Store, open_store: OpenStore) -> None:
    """A lock can be taken up by its token: another handle then refreshes and releases it."""
    token = token_of(await acquire_lock(store, "job"))
    other = (await open_store()).lock("job", ttl=LONG_S, token=token)
    with pytest.raises(LockNotHeld):
        other.check()

    await other.refresh()
    other.check()
    await store.put("a", 1, fence=other)
    await other.release()

    assert token_of(other) == token
    assert await store.locks() == []


async def test_a_lock_that_was_taken_up_can_be_a_context(store: limpet.Store) -> None:
    """A lock can be taken up by its token: another handle then refreshes and releases it."""
    token = token_of(await acquire_lock(store, "job"))

    async with store.lock("job", ttl=LONG_S, token=token) as other:
        other.check()
        assert [held.token for held in await store.locks()] == [token]

    assert await store.locks() == []


@pytest.mark.parametrize("call", ["refresh", "release"])
async def test_a_lock_cannot_be_taken_up_by_another_token(store: limpet.Store, call: str) -> None:
    """A lock that is taken up by a token that is not its holder's is LockExpired at the first call."""
    token = token_of(await acquire_lock(store, "job"))
    other = store.lock("job", ttl=LONG_S, token=token + 1)

    with pytest.raises(LockExpired):
        await getattr(other, call)()
    assert other.lost
    assert [held.token for held in await store.locks()] == [token]
    with pytest.raises(InvalidValue):
        store.lock("job", ttl=LONG_S, token=True)
