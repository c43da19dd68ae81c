"""Turns: in order, for tasks and threads, and never a deadlock."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Coroutine
from typing import Any

import pytest

from limpet.turns import Turn, Turns, is_inside

LONG_S = 60.0
SHORT_S = 0.02


async def take(turns: Turns, key: str = "n", *, lasts_s: float = LONG_S) -> Turn:
    """A turn that has come."""
    turn = turns.turn(key)
    try:
        if not turn.join(lasts_s=lasts_s):
            await turn.wait()
    except BaseException:
        turn.leave()
        raise
    return turn


def block(work: Coroutine[Any, Any, Turn]) -> Turn:
    """Run something to its end in a thread that has no loop."""
    with pytest.raises(StopIteration) as done:
        work.send(None)
    turn: Turn = done.value.value
    return turn


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def all_of(*work: Awaitable[Any]) -> None:
    async with asyncio.timeout(LONG_S):
        await asyncio.gather(*work)


# Order ------------------------------------------------------------------------


async def test_turns_go_round_in_order() -> None:
    turns, order = Turns(), []

    async def go(number: int) -> None:
        turn = await take(turns)
        order.append(number)
        await asyncio.sleep(0)
        turn.leave()

    await all_of(*map(go, range(20)))

    assert order == list(range(20))
    assert len(turns) == 0


async def test_different_keys_do_not_wait_for_each_other() -> None:
    turns = Turns()

    first, second = await take(turns, "a"), await take(turns, "b")

    assert (first.is_up, second.is_up, len(turns)) == (True, True, 2)


async def test_leaving_wakes_the_next_one_only() -> None:
    turns = Turns()
    first = await take(turns)
    waiting = [asyncio.create_task(take(turns)) for _ in range(5)]
    await settle()

    first.leave()
    await settle()

    assert [task.done() for task in waiting] == [True, False, False, False, False]
    assert turns.waiting("n") == 5
    for task in waiting:
        (await task).leave()


async def test_a_turn_can_join_again_at_the_end() -> None:
    turns = Turns()
    first = await take(turns)
    second = turns.turn("n")
    second.join()

    first.leave()
    first.join()

    assert (first.is_up, second.is_up) == (False, True)
    second.leave()
    assert first.is_up


async def test_leaving_twice_is_allowed() -> None:
    turns = Turns()
    first = await take(turns)
    second = turns.turn("n")
    second.join()

    first.leave()
    first.leave()

    assert second.is_up
    assert turns.waiting("n") == 1


# Leaving in between -----------------------------------------------------------


async def test_a_cancelled_waiter_leaves_the_turn_to_the_next() -> None:
    turns, order = Turns(), []
    first = await take(turns)

    async def go(number: int) -> None:
        turn = await take(turns)
        order.append(number)
        turn.leave()

    waiting = [asyncio.create_task(go(number)) for number in range(4)]
    await asyncio.sleep(0)
    waiting[1].cancel()
    await asyncio.sleep(0)
    # The turn is the first one's, who is cancelled before it runs.
    first.leave()
    waiting[0].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)

    assert order == [2, 3]
    assert len(turns) == 0


async def test_a_waiter_that_is_served_and_cancelled_at_once_passes_the_turn_on() -> None:
    turns = Turns()
    holder = await take(turns)
    first, second = (asyncio.create_task(take(turns)) for _ in range(2))
    await asyncio.sleep(0)
    holder.leave()
    # Its future is done, and it has not run since.
    asyncio.get_running_loop().call_soon(first.cancel)
    await asyncio.gather(first, return_exceptions=True)
    if not first.cancelled():
        first.result().leave()
    (await second).leave()

    assert len(turns) == 0


def test_a_loop_that_is_closed_does_not_keep_the_turn() -> None:
    turns = Turns()
    left: list[Any] = []

    async def leave_a_waiter() -> Turn:
        first = await take(turns)
        waiting = take(turns)
        # Begun, and never finished: as in a loop that was stopped in the middle.
        waiting.send(None)
        left.append(waiting)
        return first

    asyncio.run(leave_a_waiter()).leave()

    assert len(turns) == 0


# Threads ----------------------------------------------------------------------


async def test_threads_and_tasks_take_turns_together() -> None:
    turns, counted = Turns(), [0]

    def count_blocking() -> None:
        for _ in range(200):
            turn = block(take(turns))
            counted[0] += 1
            turn.leave()

    async def count() -> None:
        for _ in range(200):
            turn = await take(turns)
            found = counted[0]
            await asyncio.sleep(0)
            counted[0] = found + 1
            turn.leave()

    threads = [threading.Thread(target=count_blocking) for _ in range(3)]
    for thread in threads:
        thread.start()
    await all_of(count(), count())
    await all_of(*(asyncio.to_thread(thread.join) for thread in threads))

    assert counted == [1000]
    assert len(turns) == 0


async def test_tasks_of_two_loops_take_turns_together() -> None:
    turns, counted = Turns(), [0]

    async def count() -> None:
        for _ in range(100):
            turn = await take(turns)
            found = counted[0]
            await asyncio.sleep(0)
            counted[0] = found + 1
            turn.leave()

    await all_of(count(), asyncio.to_thread(asyncio.run, count()), asyncio.to_thread(asyncio.run, count()))

    assert counted == [300]


def test_a_child_after_a_fork_waits_for_no_one() -> None:
    turns = Turns()
    held = turns.turn("n")
    assert held.join()

    child = os.fork()
    if child == 0:
        is_free = turns.turn("n").join()
        # What the parent holds is not the child's to give back.
        held.leave()
        os._exit(0 if is_free and turns.waiting("n") == 1 else 1)
    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert held.is_up
    held.leave()


# Turns that last too long -----------------------------------------------------


async def test_a_turn_ends_when_it_lasts_too_long_while_others_wait() -> None:
    turns = Turns()
    first = await take(turns, lasts_s=SHORT_S)

    second = await asyncio.wait_for(take(turns), LONG_S)

    assert (first.is_up, second.is_up) == (False, True)
    first.leave()
    assert second.is_up


async def test_a_turn_lasts_while_no_one_waits() -> None:
    turns = Turns()
    first = await take(turns, lasts_s=SHORT_S)

    await asyncio.sleep(3 * SHORT_S)

    assert first.is_up


def test_a_thread_does_not_wait_for_ever_either() -> None:
    turns = Turns()
    first = block(take(turns, lasts_s=SHORT_S))

    second = block(take(turns))

    assert (first.is_up, second.is_up) == (False, True)
    second.leave()
    first.leave()


async def test_only_the_next_one_follows_a_turn_that_lasted_too_long() -> None:
    """Otherwise a slow function would turn a line into a crowd."""
    turns = Turns()
    first = await take(turns, lasts_s=SHORT_S)
    waiting = [asyncio.create_task(take(turns, lasts_s=LONG_S)) for _ in range(4)]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=LONG_S)
    await asyncio.sleep(3 * SHORT_S)

    assert not first.is_up
    assert [task.done() for task in waiting] == [True, False, False, False]
    for task in waiting:
        (await task).leave()


# Inside -----------------------------------------------------------------------


async def test_code_inside_a_turn_and_tasks_started_there_are_inside() -> None:
    turns = Turns()
    assert not is_inside()
    turn = await take(turns)

    async def look() -> bool:
        return is_inside()

    seen = [is_inside(), await asyncio.create_task(look()), await asyncio.to_thread(is_inside)]
    started = asyncio.create_task(look())
    turn.leave()

    assert seen == [True, True, True]
    assert not is_inside()
    # It is in a turn no more, though it was started in one.
    assert not await started


async def test_code_that_waits_for_its_turn_is_not_inside() -> None:
    turns = Turns()
    second = turns.turn("n")

    async def be_first() -> None:
        first = await take(turns)
        second_waits.set()
        await go_on.wait()
        first.leave()

    second_waits, go_on = asyncio.Event(), asyncio.Event()
    being = asyncio.create_task(be_first())
    await second_waits.wait()
    second.join()
    assert not is_inside()
    go_on.set()
    await being
    assert is_inside()
    second.leave()
    assert not is_inside()


async def test_code_inside_a_turn_that_was_cut_short_is_not_inside() -> None:
    turns = Turns()
    first = await take(turns, lasts_s=SHORT_S)

    await asyncio.create_task(take(turns))

    assert not is_inside()
    first.leave()
    assert not is_inside()


async def test_turns_inside_turns_end_one_by_one() -> None:
    turns = Turns()
    outer, inner = await take(turns, "a"), await take(turns, "b")

    assert (is_inside(), is_inside("a"), is_inside("b"), is_inside("c")) == (True, True, True, False)
    inner.leave()
    assert (is_inside(), is_inside("a"), is_inside("b")) == (True, True, False)
    outer.leave()

    assert not is_inside()


async def test_a_turn_that_joins_again_is_inside_once() -> None:
    turns = Turns()
    turn = turns.turn("n")
    for _ in range(3):
        turn.join()
        turn.leave()
    turn.join(lasts_s=SHORT_S)
    other = await asyncio.create_task(take(turns))
    turn.join()
    other.leave()

    assert is_inside("n")
    turn.leave()
    assert not is_inside()
