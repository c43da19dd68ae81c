"""What all engines stand on: addresses, finding an engine, waking waiters, the budget."""

from __future__ import annotations

import asyncio
import importlib.metadata
import itertools
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

import limpet
import limpet.sync
from limpet.engines.budget import Budget
from limpet.engines.memory import MemoryEngine
from limpet.engines.wakeup import Wakeup
from limpet.errors import InvalidValue
from limpet.opening import open_engine
from limpet.urls import Address
from tests.processes import PATIENCE_S
from tests.sqlite.support import VanishingLoop

# Addresses ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "scheme", "path", "options"),
    [
        ("memory:", "memory", "", {}),
        ("memory:name", "memory", "name", {}),
        ("MEMORY:Name", "memory", "Name", {}),
        ("sqlite:///a.db", "sqlite", "///a.db", {}),
        ("sqlite:////abs/a%20b%3F.db", "sqlite", "////abs/a b?.db", {}),
        ("sqlite:///a.db?synchronous=normal", "sqlite", "///a.db", {"synchronous": "normal"}),
        ("x://h:1/db?a=1&b=&c=d%26e", "x", "//h:1/db", {"a": "1", "b": "", "c": "d&e"}),
        ("nats://one,two:4222", "nats", "//one,two:4222", {}),
        ("x:a?b?c=1", "x", "a", {"b?c": "1"}),
    ],
)
def test_a_url_is_taken_apart(url: str, scheme: str, path: str, options: dict[str, str]) -> None:
    address = Address.parse(url)

    assert (address.url, address.scheme, address.path, address.options) == (url, scheme, path, options)


def test_the_driver_in_a_url_of_sqlalchemy_is_left_out() -> None:
    assert Address.parse("postgresql+asyncpg://u:p@h/d?schema=s") == Address.parse("postgresql://u:p@h/d?schema=s")


async def test_a_url_of_sqlalchemy_opens_the_same_file(tmp_path: Path) -> None:
    async with limpet.open(f"sqlite:///{tmp_path}/state.db") as store:
        await store.put("k", 1)
    async with limpet.open(f"sqlite+aiosqlite:///{tmp_path}/state.db") as store:
        assert await store.get("k") == 1


async def test_sqlites_name_for_memory_is_refused_with_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to make a file of that name."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidValue, match="write memory:"):
        await limpet.open("sqlite:///:memory:")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("wrong", ["", "state.db", ":", ":memory:", "memory", "/abs/state.db"])
def test_what_is_no_url_is_refused_with_advice(wrong: str) -> None:
    with pytest.raises(InvalidValue, match="sqlite:///state.db"):  # noqa: RUF043 - a dot is a dot
        Address.parse(wrong)


SECRET = "s3cr3t"


@pytest.mark.parametrize(
    "url",
    [
        f"postgres://user:{SECRET}@host/db",
        f"redis://:{SECRET}@host:6379/0",
        f"nats://user:{SECRET}@one:4222,two:4222",
        f"postgres://user:{SECRET}@[::1]:5432/db",
        # Characters that ought to be escaped, and in practice are not.
        f"postgres://user:{SECRET}@{SECRET}@host/db",
        f"postgres://user:{SECRET}/{SECRET}@host/db",
        f"postgres://user:{SECRET}#{SECRET}@host/db",
        f"postgres://user:{SECRET}?{SECRET}@host/db",
        f"postgres://user:[{SECRET}@host/db",
        f"postgres:user:{SECRET}@host/db",
        # Several servers, each with its own.
        f"nats://a:{SECRET}@one:4222,b:{SECRET}@two:4222",
        f"nats://{SECRET}@host:4222",
        # Passwords travel as options as well.
        f"postgres://user@host/db?password={SECRET}",
        f"postgres://user@host/db?sslmode=off&PassWord={SECRET}",
        f"redis://host/0?token={SECRET}",
        f"postgres://user@host/db?sslpassword={SECRET}",
        f"postgres://user:{SECRET}@host/db?password={SECRET}",
    ],
)
async def test_a_password_never_shows(url: str) -> None:
    """A password in a URL never appears in an error or a repr."""
    address = Address.parse(url)

    assert SECRET not in str(address)
    assert SECRET not in repr(address)
    assert SECRET not in f"{address!s:>10} {address!r}"
    assert str(address).startswith(url.partition(":")[0] + ":")
    # A question mark before the last @ is part of the credentials.
    joint = "&" if "?" in url.rpartition("@")[2] else "?"
    with pytest.raises(InvalidValue) as unknown_option:
        Address.parse(f"{url}{joint}colour=red").allow()
    with pytest.raises(InvalidValue) as wrong_option:
        Address.parse(f"{url}{joint}tls=maybe").take("tls", "no", ("yes", "no"))
    with pytest.raises(InvalidValue) as unknown_engine:
        await limpet.open(url.replace("postgres:", "postgros:").replace("nats:", "gnats:").replace("redis:", "rodis:"))
    for caught in (unknown_option, wrong_option, unknown_engine):
        assert SECRET not in str(caught.value)
        assert SECRET not in repr(caught.value)


@pytest.mark.parametrize(
    "url", ["postgres://host:5432/db", "sqlite:////abs/state.db", "memory:name", "redis://host:1/0"]
)
def test_what_holds_no_password_is_shown_as_it_is(url: str) -> None:
    assert str(Address.parse(url)) == repr(Address.parse(url)) == url


def test_the_place_is_shown_without_the_password() -> None:
    """A password in a URL never appears in an error or a repr. What helps to find the place does."""
    shown = str(Address.parse(f"postgres://user:{SECRET}@host:5432/db?sslmode=off"))

    assert shown.startswith("postgres://")
    assert "@host:5432/db" in shown


async def test_what_is_no_url_shows_no_password_either() -> None:
    """A password in a URL never appears in an error or a repr."""
    with pytest.raises(InvalidValue) as caught:
        await limpet.open(f"://user:{SECRET}@host/db")

    assert SECRET not in str(caught.value)


def test_an_unknown_option_is_refused_by_name() -> None:
    """An unknown option in the URL is refused, not ignored."""
    address = Address.parse("x:place?depth=1&colour=red")

    address.allow("colour", "depth")
    with pytest.raises(InvalidValue, match="unknown option 'colour', known: depth, width"):
        address.allow("depth", "width")
    with pytest.raises(InvalidValue, match="unknown option 'depth', known: none"):
        address.allow()


def test_an_option_is_one_of_a_few_words() -> None:
    """An unknown option in the URL is refused, not ignored."""
    address = Address.parse("x:place?mode=FAST&other=")

    assert address.take("mode", "safe", ("safe", "fast")) == "fast"
    assert address.take("absent", "safe", ("safe", "fast")) == "safe"
    with pytest.raises(InvalidValue, match="mode is one of safe, slow"):
        address.take("mode", "safe", ("safe", "slow"))
    with pytest.raises(InvalidValue, match="other is one of"):
        address.take("other", "safe", ("safe", "slow"))


# Finding an engine ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "nearest"), [("sqllite:///a.db", "sqlite"), ("memmory:", "memory"), ("Memery:x", "memory")]
)
async def test_a_misspelt_engine_is_refused_with_the_nearest(url: str, nearest: str) -> None:
    """An unknown engine is refused by a message that names the known ones and the nearest."""
    with pytest.raises(InvalidValue, match=f"did you mean '{nearest}'") as caught:
        await limpet.open(url)

    assert "memory" in str(caught.value)
    assert "sqlite" in str(caught.value)


def test_an_engine_that_resembles_none_is_refused_without_a_guess() -> None:
    """An unknown engine is refused by a message that names the known ones and the nearest."""
    with pytest.raises(InvalidValue, match="unknown engine 'xyz'") as caught:
        limpet.sync.open("xyz:place")

    assert "did you mean" not in str(caught.value)
    assert "memory" in str(caught.value)


class ThirdParty(MemoryEngine):
    """An engine from elsewhere, which happens to keep its state in memory."""


async def open_third_party(address: Address, clock: limpet.Clock) -> ThirdParty:
    """Where the entry point leads."""
    from limpet.engines import memory

    address.allow("depth")
    return ThirdParty(memory._Memory(clock, skips=False))


@pytest.fixture
def third_party(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An engine installed under the name ``elsewhere``. Returns the groups that were requested."""
    requested: list[str] = []
    point = EntryPoint("elsewhere", f"{__name__}:open_third_party", "limpet.engines")

    def entry_points(**selection: Any) -> EntryPoints:
        requested.append(selection["group"])
        return EntryPoints([point]).select(**selection)

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    monkeypatch.setattr(EntryPoint, "load", lambda self: open_third_party)
    return requested


async def test_an_engine_of_a_third_party_is_opened(third_party: list[str]) -> None:
    """An unknown engine is refused by a message that names the known ones and the nearest.

    Other distributions join through the entry-point group ``limpet.engines``, and are known then.
    """
    async with limpet.open("elsewhere://place?depth=3") as store:
        await store.put("key", 1)
        assert await store.get("key") == 1
        assert isinstance(store._session.engine, ThirdParty)

    assert third_party == ["limpet.engines"]
    with pytest.raises(InvalidValue, match="unknown option 'width'"):
        await limpet.open("elsewhere://place?width=3")


async def test_an_engine_of_a_third_party_is_known_to_the_message(third_party: list[str]) -> None:
    """An unknown engine is refused by a message that names the known ones and the nearest."""
    with pytest.raises(InvalidValue, match="did you mean 'elsewhere'") as caught:
        await limpet.open("elsewere:place")

    assert "elsewhere, http, memory" in str(caught.value)
    assert third_party == ["limpet.engines"]


async def test_what_is_built_in_does_not_look_at_what_is_installed(third_party: list[str]) -> None:
    """Looking at the installed distributions takes longer than opening a store."""
    async with limpet.open("memory:"):
        pass

    assert third_party == []


def test_an_address_can_be_sent_to_another_process() -> None:
    address = Address.parse("x://h/db?a=1")

    assert pickle.loads(pickle.dumps(address)) == address  # noqa: S301 - our own


# Waking waiters -------------------------------------------------------------------


async def test_a_notification_between_reading_and_waiting_is_not_missed() -> None:
    """A waiter takes its token before it reads, so a change committed in between ends the wait at once."""
    wakeup = Wakeup()
    seen = wakeup.token("default")

    wakeup.notify("default")

    await asyncio.wait_for(wakeup.wait("default", seen, 60.0), 30)


async def test_a_notification_wakes_only_its_namespace() -> None:
    wakeup = Wakeup()
    tasks = {name: asyncio.create_task(wakeup.wait(name, wakeup.token(name), 60.0)) for name in ("one", "other")}
    await asyncio.sleep(0)

    wakeup.notify("one")
    await asyncio.wait_for(tasks["one"], 60)

    assert not tasks["other"].done()
    wakeup.notify_all()
    await asyncio.wait_for(tasks["other"], 60)


async def test_a_notification_of_all_between_reading_and_waiting_is_not_missed() -> None:
    """Callers that wait for changes are woken and get Closed.

    A closing engine notifies all. A caller may have read just before, and begin to wait just after.
    """
    wakeup = Wakeup()
    seen = wakeup.token("default")

    wakeup.notify_all()

    await asyncio.wait_for(wakeup.wait("default", seen, 60.0), 30)


async def test_a_wait_ends_with_its_time() -> None:
    wakeup = Wakeup()

    seen = wakeup.token("default")

    await asyncio.wait_for(wakeup.wait("default", seen, 0.01), 60)

    assert wakeup.token("default") is seen


async def test_those_who_left_are_forgotten() -> None:
    """Every queue, buffer, page and loop has a bound: waits that are over leave nothing behind."""
    wakeup = Wakeup()
    tasks = [asyncio.create_task(wakeup.wait("default", wakeup.token("default"), 60.0)) for _ in range(100)]
    await asyncio.sleep(0)
    for task in tasks[:50]:
        task.cancel()
    await asyncio.gather(*tasks[:50], return_exceptions=True)
    for _ in range(50):
        await wakeup.wait("default", wakeup.token("default"), 0.0)

    assert sum(map(len, wakeup._waiting.values())) == 50
    wakeup.notify("default")
    await asyncio.wait_for(asyncio.gather(*tasks[50:]), 60)
    assert sum(map(len, wakeup._waiting.values())) == 0


def test_a_notification_reaches_loops_in_all_threads() -> None:
    """Many watchers each see every change.

    Three threads with loops, five waiters in each, notified by a thread without a loop.
    """
    wakeup = Wakeup()
    ready, woken = threading.Barrier(4), []

    async def wait() -> None:
        waits = [asyncio.create_task(wakeup.wait("default", wakeup.token("default"), 60.0)) for _ in range(5)]
        await asyncio.sleep(0)
        ready.wait(PATIENCE_S)
        await asyncio.wait_for(asyncio.gather(*waits), PATIENCE_S)
        woken.append(len(waits))

    threads = [threading.Thread(target=lambda: asyncio.run(wait())) for _ in range(3)]
    for thread in threads:
        thread.start()
    ready.wait(PATIENCE_S)
    wakeup.notify("default")
    for thread in threads:
        thread.join(PATIENCE_S)

    assert woken == [5, 5, 5]


def test_no_notification_is_missed_by_a_caller_that_reads_and_waits() -> None:
    """A wait ends early when a change arrives, from this process or another.

    A thread changes a number and notifies, at any moment, and goes on once the number was seen. A loop reads and
    waits. If a notification between the two were lost, both would wait for ever.
    """
    wakeup = Wakeup()
    last = 3_000
    number = seen = 0

    async def follow() -> None:
        nonlocal seen
        while seen < last:
            token = wakeup.token("default")
            seen = number
            await wakeup.wait("default", token, 0.0 if seen == last else 60.0)

    def change() -> None:
        nonlocal number
        for _ in range(last):
            number += 1
            wakeup.notify("default")
            while seen < number and following.is_alive():
                time.sleep(0)

    following = threading.Thread(target=lambda: asyncio.run(follow()), daemon=True)
    following.start()
    changing = threading.Thread(target=change, daemon=True)
    changing.start()
    changing.join(PATIENCE_S)

    assert seen == last


def test_every_notification_leaves_another_token() -> None:
    """A waiter must be able to distinguish one notification from the next."""
    wakeup = Wakeup()
    tokens = [wakeup.token("default")]
    for notify in [lambda: wakeup.notify("default"), wakeup.notify_all] * 10:
        notify()
        tokens.append(wakeup.token("default"))

    assert len({id(token) for token in tokens}) == 21


def test_a_loop_that_was_closed_with_a_waiter_is_passed_over() -> None:
    wakeup = Wakeup()
    gone = VanishingLoop()
    task = gone.leave(wakeup.wait("default", wakeup.token("default"), 60.0))
    gone.vanishes = False
    gone.close()

    wakeup.notify("default")

    assert sum(map(len, wakeup._waiting.values())) == 0
    del task


def test_a_loop_that_closes_during_a_notification_does_not_fail_the_notifier() -> None:
    """Its owner closes it after we saw it open and before we call it. The others are still to be woken."""
    wakeup = Wakeup()
    gone, stays = VanishingLoop(), VanishingLoop()
    task = gone.leave(wakeup.wait("default", wakeup.token("default"), 60.0))
    waiting = stays.leave(wakeup.wait("default", wakeup.token("default"), 60.0))
    stays.vanishes = False

    wakeup.notify("default")

    assert gone.is_closed()
    stays.run_until_complete(asyncio.wait_for(waiting, 60))
    stays.close()
    del task


# The budget -----------------------------------------------------------------------


def counting(calls: int) -> Budget:
    """A budget whose turn is over whenever it reads the clock, which is after so many calls."""
    return Budget(0.0, calls, timer=itertools.count(1).__next__)


async def test_a_turn_lasts_until_its_time_is_over() -> None:
    """When a turn of the loop has lasted long enough, each further call waits for the next."""
    now = 100.0
    budget = Budget(0.002, 10, timer=lambda: now)
    await budget.renewed()

    assert not any(budget.spent() for _ in range(1_000))
    now += 0.003
    assert [budget.spent() for _ in range(11)].index(True) <= 10
    await budget.renewed()
    assert not any(budget.spent() for _ in range(1_000))


async def test_a_call_worth_several_makes_the_budget_look_sooner() -> None:
    now = 100.0
    budget = Budget(0.002, 10, timer=lambda: now)
    await budget.renewed()
    now += 0.003

    assert budget.spent(11)


async def spend(budget: Budget, calls: int, done: Callable[[], None]) -> None:
    """Calls that would never suspend, if it were not for the budget."""
    for _ in range(calls):
        if budget.spent():
            await budget.renewed()
        done()


async def test_a_budget_bounds_what_happens_in_one_turn() -> None:
    """After so many calls in one turn of the loop, each further call waits for the next turn."""
    budget = counting(10)
    turns: list[int] = [0]

    async def tick() -> None:
        while True:
            await asyncio.sleep(0)
            turns.append(0)

    def done() -> None:
        turns[-1] += 1

    ticking = asyncio.create_task(tick())
    await asyncio.gather(*(spend(budget, 100, done) for _ in range(5)))
    ticking.cancel()

    assert sum(turns) == 500
    # Ten, and one for each of the five that had been counted in the turn before.
    assert max(turns) <= 15
    assert len(turns) >= 500 // 15


async def test_a_budget_lets_everybody_go_on_each_turn() -> None:
    """A caller that had to wait is counted already, and goes on in the next turn, however many others there are."""
    budget = counting(10)
    counts = [0] * 8
    finished: list[list[int]] = []

    async def work(index: int) -> None:
        def done() -> None:
            counts[index] += 1

        await spend(budget, 330, done)
        finished.append([*counts])

    await asyncio.gather(*(work(index) for index in range(8)))

    assert counts == [330] * 8
    # The greediest has had eleven in a turn, so thirty turns have passed, and one call of each caller in each.
    assert min(finished[0]) >= 28


def test_a_budget_without_a_loop_is_never_spent() -> None:
    """Without a loop no task is starved, and a blocking call must not suspend."""
    budget = counting(10)

    assert not any(budget.spent() for _ in range(1_000))


async def test_a_budget_overdrawn_by_threads_is_renewed_on_a_loop() -> None:
    """Threads spend from the same budget and never renew it; that must not cost a task more than a turn."""
    budget = counting(10)
    await asyncio.to_thread(lambda: [budget.spent() for _ in range(10_000)])
    calls = 0

    def done() -> None:
        nonlocal calls
        calls += 1

    await asyncio.wait_for(spend(budget, 100, done), 60)

    assert calls == 100


def test_a_budget_outlives_a_loop_that_ended_in_debt() -> None:
    """A loop that ends before its budget is renewed must not leave the next one without."""
    budget = counting(10)
    ended = asyncio.new_event_loop()

    async def overdraw() -> None:
        for _ in range(11):
            budget.spent()
        await budget.renewed()

    task = ended.create_task(overdraw())
    ended.call_soon(ended.stop)
    ended.run_forever()
    ended.close()
    del task
    calls = 0

    def done() -> None:
        nonlocal calls
        calls += 1

    asyncio.run(asyncio.wait_for(spend(budget, 100, done), 60))
    assert calls == 100


def test_a_budget_serves_several_loops() -> None:
    budget = counting(10)
    counts = [0] * 4

    def work(index: int) -> None:
        def done() -> None:
            counts[index] += 1

        async def both() -> None:
            await asyncio.gather(spend(budget, 500, done), spend(budget, 500, done))

        asyncio.run(asyncio.wait_for(both(), PATIENCE_S))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)

    assert counts == [1_000] * 4


async def test_an_engine_is_found_by_its_scheme_alone() -> None:
    engine = await open_engine("MEMORY:", limpet.ManualClock())

    assert engine.traits.engine == "memory"
    await engine.close()


@pytest.mark.parametrize(
    "url",
    [5.0, b"memory:", ["memory:"], object(), True, "\0", "memory:\ud800", "sqlite:///\ud800", "sqlite:///\0.db"]
    + [
        f"{scheme}:{rest}"
        for scheme in ("redis", "rediss")
        for rest in ("//u:hunter2[@h/0", "//u:hunter2]@h/0", "//[::1")
    ]
    + ["postgresql://u:hunter2[@h/d", "nats://[::1", "http://h:99999999", "redis://h:99999999/0"],
)
async def test_what_no_driver_can_read_is_refused_in_our_words(url: Any) -> None:
    with pytest.raises(InvalidValue) as refused:
        await limpet.open(url)

    assert "hunter2" not in "".join(traceback.format_exception(refused.value))


ODD_OPTIONS: dict[str, list[Any]] = {
    "clock": [5, "x", limpet.ManualClock],
    "max_value_bytes": [None, 0, True, 1.5, "x", 2**70],
    "window": [5, {}, limpet.Window(age_ms=-1), limpet.Window(changes=2**70)],
    "encryption": [5, "x", b"x", limpet.Keyring],
}


@pytest.mark.parametrize("name", ODD_OPTIONS)
async def test_odd_options_are_refused_before_anything_is_opened(name: str) -> None:
    for odd in ODD_OPTIONS[name]:
        with pytest.raises(InvalidValue):
            await limpet.open("memory:", **{name: odd})
