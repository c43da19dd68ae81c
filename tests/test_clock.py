"""Time: turned by hand, never going back, and rounded up."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from limpet.clock import ManualClock, SystemClock, call_on, has_loop, ttl_to_ms, wake
from limpet.errors import InvalidTTL

TTL_MS_MAX = 100 * 366 * 86_400_000

thorough = settings(max_examples=300, deadline=None)
PATIENCE_S = 120.0


def complete(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in this thread, without a loop: it must not suspend."""
    with pytest.raises(StopIteration):
        work.send(None)


def in_thread(work: Coroutine[Any, Any, None]) -> threading.Thread:
    thread = threading.Thread(target=complete, args=(work,), daemon=True)
    thread.start()
    return thread


def wait_for_sleepers(clock: ManualClock, count: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while clock.sleepers != count:
        assert time.monotonic() < deadline, f"{clock.sleepers} asleep, not {count}"
        time.sleep(0.001)


# By hand ----------------------------------------------------------------------


def test_a_manual_clock_stands_still() -> None:
    clock = ManualClock(5.0)

    assert (clock.now_ms(), clock.monotonic()) == (5000, 5.0)
    assert (clock.now_ms(), clock.monotonic()) == (5000, 5.0)


@pytest.mark.parametrize(("seconds", "ms"), [(0, 0), (1, 1000), (0.25, 250), (0.0001, 1), (1.0001, 1001)])
def test_turning_a_clock_moves_it_and_never_too_little(seconds: float, ms: int) -> None:
    clock = ManualClock(0.0)

    clock.advance(seconds)

    assert clock.now_ms() == ms


@thorough
@given(st.integers(1, 10_000_000))
def test_whole_milliseconds_move_a_clock_exactly(ms: int) -> None:
    """0.069 s is 69 ms, although 0.069 * 1000 is a little more."""
    clock = ManualClock(0.0)

    clock.advance(ms / 1000)

    assert clock.now_ms() == ms


async def test_a_clock_that_is_set_back_still_measures_what_has_passed() -> None:
    clock = ManualClock(100.0)
    began = clock.monotonic()
    sleeping = asyncio.ensure_future(clock.sleep(5))
    await asyncio.sleep(0)

    clock.set_back(60)
    assert (clock.now_ms(), clock.monotonic() - began) == (40_000, 0)
    clock.advance(4.999)
    await asyncio.sleep(0)
    assert not sleeping.done()
    clock.advance(0.001)
    await sleeping

    assert (clock.now_ms(), clock.monotonic() - began) == (45_000, 5)


async def test_a_task_wakes_when_its_moment_has_come() -> None:
    clock = ManualClock()
    sleeper = asyncio.ensure_future(clock.sleep(2))
    await asyncio.sleep(0)

    clock.advance(1.999)
    await asyncio.sleep(0.01)
    assert not sleeper.done()
    assert clock.sleepers == 1

    clock.advance(0.001)
    await asyncio.wait_for(sleeper, PATIENCE_S)
    assert clock.sleepers == 0


async def test_tasks_wake_each_in_its_time() -> None:
    clock = ManualClock()
    woken: list[int] = []

    async def sleep(seconds: int) -> None:
        await clock.sleep(seconds)
        woken.append(seconds)

    sleepers = [asyncio.ensure_future(sleep(seconds)) for seconds in (3, 1, 2)]
    await asyncio.sleep(0)
    for expected in ([1], [1, 2], [1, 2, 3]):
        clock.advance(1)
        await asyncio.sleep(0.01)
        assert woken == expected
    await asyncio.gather(*sleepers)


async def test_a_turn_past_many_wakes_all_of_them() -> None:
    clock = ManualClock()
    sleepers = [asyncio.ensure_future(clock.sleep(seconds / 10)) for seconds in range(1, 50)]
    await asyncio.sleep(0)

    clock.advance(5)

    await asyncio.wait_for(asyncio.gather(*sleepers), PATIENCE_S)
    assert clock.sleepers == 0


async def test_a_cancelled_sleeper_leaves() -> None:
    clock = ManualClock()
    sleeper, other = asyncio.ensure_future(clock.sleep(1)), asyncio.ensure_future(clock.sleep(1))
    await asyncio.sleep(0)
    assert clock.sleepers == 2

    sleeper.cancel()
    await asyncio.gather(sleeper, return_exceptions=True)

    assert sleeper.cancelled()
    assert clock.sleepers == 1
    clock.advance(1)
    await asyncio.wait_for(other, PATIENCE_S)


async def test_a_sleeper_cancelled_in_the_turn_that_wakes_it_does_no_harm() -> None:
    clock = ManualClock()
    sleeper = asyncio.ensure_future(clock.sleep(1))
    await asyncio.sleep(0)

    clock.advance(1)
    sleeper.cancel()
    await asyncio.gather(sleeper, return_exceptions=True)
    await asyncio.sleep(0)

    assert clock.sleepers == 0


@pytest.mark.parametrize("seconds", [0, -1, -0.5])
async def test_no_time_is_one_turn_of_the_loop(seconds: float) -> None:
    clock = ManualClock()
    others_ran = False

    def run() -> None:
        nonlocal others_ran
        others_ran = True

    asyncio.get_running_loop().call_soon(run)
    await clock.sleep(seconds)

    assert others_ran
    assert clock.sleepers == 0


def test_no_time_is_nothing_in_a_thread() -> None:
    complete(ManualClock().sleep(0))
    complete(ManualClock().sleep(-1))


def test_a_thread_wakes_when_its_moment_has_come() -> None:
    clock = ManualClock()
    thread = in_thread(clock.sleep(2))
    wait_for_sleepers(clock, 1)

    clock.advance(1.999)
    thread.join(0.02)
    assert thread.is_alive()

    clock.advance(0.001)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert clock.sleepers == 0


async def test_a_clock_is_turned_for_a_loop_from_another_thread() -> None:
    clock = ManualClock()
    sleeper = asyncio.ensure_future(clock.sleep(1))
    await asyncio.sleep(0)

    await asyncio.to_thread(clock.advance, 1)

    await asyncio.wait_for(sleeper, PATIENCE_S)


def test_a_callback_on_a_closed_loop_is_dropped() -> None:
    loop = asyncio.new_event_loop()
    called: list[int] = []
    call_on(loop, called.append, 1)
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()

    call_on(loop, called.append, 2)

    assert called == [1]


async def test_a_wait_is_ended_once() -> None:
    sleeper: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    wake(sleeper)
    wake(sleeper)

    assert sleeper.done()
    sleeper = asyncio.get_running_loop().create_future()
    sleeper.cancel()
    wake(sleeper)
    assert sleeper.cancelled()


@pytest.fixture
def restless_threads() -> Iterator[None]:
    """Let threads interrupt each other after every few steps."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(0.000_001)
    yield
    sys.setswitchinterval(interval_s)


@pytest.mark.usefixtures("restless_threads")
def test_no_sleeper_is_forgotten_while_the_clock_is_turned() -> None:
    """Who lies down while the clock is being turned sleeps until a later turn, not for ever."""
    clock = ManualClock()
    rounds, people = 400, 4

    def sleep_often() -> None:
        for _ in range(rounds):
            complete(clock.sleep(0.001))

    threads = [threading.Thread(target=sleep_often, daemon=True) for _ in range(people)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + PATIENCE_S
    while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
        clock.advance(0.001)

    assert not any(thread.is_alive() for thread in threads)


# The host's -------------------------------------------------------------------


def test_the_system_clock_tells_the_time() -> None:
    before = time.time_ns() // 1_000_000
    now_ms = SystemClock().now_ms()

    assert before <= now_ms <= time.time_ns() // 1_000_000
    first = SystemClock().monotonic()
    assert SystemClock().monotonic() >= first


@thorough
@given(st.lists(st.integers(0, 2**62), min_size=1, max_size=20))
def test_the_system_clock_never_goes_back(times_ns: list[int]) -> None:
    clock = SystemClock()
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        for now_ns in times_ns:
            patch.setattr(time, "time_ns", lambda now_ns=now_ns: now_ns)
            seen.append(clock.now_ms())

    assert seen == [max(times_ns[: index + 1]) // 1_000_000 for index in range(len(times_ns))]


async def test_the_system_clock_suspends_on_a_loop() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.001)

    counting = asyncio.ensure_future(count())
    began = time.monotonic()
    await SystemClock().sleep(0.03)
    counting.cancel()

    assert time.monotonic() - began >= 0.029
    assert turns > 3


def test_the_system_clock_blocks_a_thread() -> None:
    began = time.monotonic()

    complete(SystemClock().sleep(0.02))
    complete(SystemClock().sleep(0))
    complete(SystemClock().sleep(-1))

    assert 0.019 <= time.monotonic() - began < PATIENCE_S


def test_a_loop_is_known_where_it_runs() -> None:
    async def check() -> tuple[bool, bool]:
        return has_loop(), await asyncio.to_thread(has_loop)

    assert not has_loop()
    assert asyncio.run(check()) == (True, False)
    assert not has_loop()


# Times to live ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("ttl", "ms"),
    [
        (1, 1000),
        (0.001, 1),
        (0.0001, 1),
        (1e-12, 1),
        (5e-324, 1),
        (0.07, 70),
        (0.0701, 71),
        (1.0005, 1001),
        (1.001, 1001),
        (timedelta(milliseconds=5), 5),
        (timedelta(microseconds=1), 1),
        (timedelta(milliseconds=5, microseconds=1), 6),
        (timedelta(days=1), 86_400_000),
        (100 * 366 * 86_400, TTL_MS_MAX),
        (timedelta(days=36_600), TTL_MS_MAX),
    ],
)
def test_a_time_to_live_rounds_up_to_milliseconds(ttl: float | timedelta, ms: int) -> None:
    assert ttl_to_ms(ttl) == ms


@thorough
@given(st.integers(1, TTL_MS_MAX))
def test_whole_milliseconds_stay_as_they_are(ms: int) -> None:
    assert ttl_to_ms(ms / 1000) == ms


@thorough
@given(st.integers(1, 10_000_000) | st.integers(1, TTL_MS_MAX * 1000))
def test_a_timedelta_is_rounded_up_exactly(us: int) -> None:
    assert ttl_to_ms(timedelta(microseconds=us)) == -(-us // 1000)


@thorough
@given(st.floats(min_value=0, max_value=1e9, exclude_min=True))
def test_a_time_to_live_is_never_early_and_less_than_a_millisecond_late(ttl: float) -> None:
    """Early by less than a nanosecond is the noise of floats: 0.07 * 1000 is more than 70."""
    exact = Fraction(ttl) * 1000
    noise = max(Fraction(1, 1_000_000), exact / 2**50)

    assert exact - noise <= ttl_to_ms(ttl) < exact + 1 + noise


@pytest.mark.parametrize(
    "ttl",
    [
        0,
        0.0,
        -0.0,
        -1,
        -5e-324,
        True,
        False,
        math.nan,
        math.inf,
        -math.inf,
        "1",
        b"1",
        None,
        [1],
        Decimal("1"),
        timedelta(0),
        timedelta(seconds=-1),
        timedelta.max,
        TTL_MS_MAX / 1000 + 0.001,
        1e300,
        sys.float_info.max,
        10**15,
        10**400,
        -(10**400),
    ],
    ids=lambda ttl: repr(ttl)[:24],
)
def test_what_is_no_time_to_live_is_refused(ttl: Any) -> None:
    with pytest.raises(InvalidTTL):
        ttl_to_ms(ttl)
