"""State that agents share, on every engine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import limpet
from limpet import errors
from limpet.conformance.support import raising
from limpet.errors import Ambiguous, InvalidValue, LockLost, TypeMismatch, ValueTooLarge
from limpet.faces import shared
from limpet.faces.shared import (
    ErrClosed,
    ErrInvalidKey,
    ErrInvalidTTL,
    ErrLockExpired,
    ErrLockHeld,
    ErrLockNotHeld,
    ErrNotFound,
    KeyValue,
    MemoryStore,
    NATSStore,
    Operation,
    StateStore,
    cached,
    configuration,
    work_off,
)
from tests.engines import ENGINES, unique, url_of
from tests.nats.support import client
from tests.processes import PATIENCE_S
from tests.semantic.support import Hasty

OpenAgent = Callable[..., Awaitable[StateStore]]
SHORT_S = 0.05


@pytest.fixture(params=ENGINES)
async def agent(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[OpenAgent]:
    """A function that opens the same state once more, as another agent would."""
    open_one = functools.partial(StateStore.open, url_of(request.param, tmp_path), namespace=unique("agents"))
    async with contextlib.AsyncExitStack() as opened:

        async def agent(**options: Any) -> StateStore:
            return await opened.enter_async_context(open_one(**options))

        yield agent


@pytest.fixture
async def store(agent: OpenAgent) -> StateStore:
    return await agent()


async def until(fact: Callable[[], Awaitable[bool]]) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(PATIENCE_S):
        while not await fact():  # noqa: ASYNC110 - no event for a moment that passes
            await asyncio.sleep(0.01)


async def is_gone(store: StateStore, key: str) -> bool:
    try:
        await store.get(key)
    except ErrNotFound:
        return True
    return False


async def next_changes(watch: AsyncIterator[KeyValue], count: int) -> list[tuple[str, str, bytes]]:
    """The next changes, in short."""
    async with asyncio.timeout(PATIENCE_S):
        changes = [await anext(watch) for _ in range(count)]
    return [(change.operation.name, change.key, change.value) for change in changes]


# Opening and closing ----------------------------------------------------------


async def test_a_store_is_opened_by_await_or_by_a_context() -> None:
    opened = await StateStore.open("memory:")
    await opened.put("a", b"1")
    await opened.close()
    await opened.close()

    async with StateStore.open("memory:") as other:
        assert await other.keys() == []
    not_open = StateStore.open("memory:")
    with pytest.raises(ErrClosed, match="await it"):
        await not_open.get("a")
    await not_open.close()


async def test_a_closed_store_refuses_every_verb(store: StateStore) -> None:
    lock = await store.lock("job", 60)
    await store.close()

    for verb in (
        lambda: store.get("a"),
        lambda: store.get_key_value("a"),
        lambda: store.put("a", b"1"),
        lambda: store.delete("a"),
        lambda: store.keys("*"),
        lambda: store.keys("a"),
        lambda: anext(store.watch("*")),
        lambda: store.lock("other", 60),
        lock.refresh,
        lock.unlock,
    ):
        with pytest.raises(ErrClosed):
            await verb()


async def test_agents_in_other_namespaces_share_nothing(agent: OpenAgent) -> None:
    mine, theirs = await agent(), await agent(namespace=unique("others"))
    await mine.put("a", b"1")
    await mine.lock("job", 60)

    assert await theirs.keys() == []
    await theirs.lock("job", 60)


# Keys and values --------------------------------------------------------------


async def test_agents_see_what_others_put_and_delete(agent: OpenAgent) -> None:
    one, two = await agent(), await agent()
    value = bytes(range(256))

    await one.put("config.pool", value)
    assert await two.get("config.pool") == value
    await two.put("config.pool", b"")
    assert await one.get("config.pool") == b""
    assert await one.delete("config.pool") is True
    assert await two.delete("config.pool") is False
    with pytest.raises(ErrNotFound):
        await two.get("config.pool")
    with pytest.raises(ErrNotFound):
        await two.get_key_value("config.pool")


async def test_a_key_value_tells_its_revision_its_operation_and_its_times(store: StateStore) -> None:
    await store.put("a", b"1")
    first = await store.get_key_value("a")
    await store.put("b", b"2")
    await store.put("a", b"3")
    second = await store.get_key_value("a")

    assert (first.key, first.value, first.operation) == ("a", b"1", Operation.PUT)
    assert (second.value, second.created) == (b"3", first.created)
    assert first.revision < (await store.get_key_value("b")).revision < second.revision
    assert first.created == first.modified <= second.modified
    assert abs(datetime.now(UTC) - first.created) < timedelta(hours=1)


async def test_only_bytes_are_values(store: StateStore) -> None:
    with pytest.raises(InvalidValue, match="not of type str: encode it first"):
        await store.put("a", "text")  # type: ignore[arg-type]

    await store.store.put("json", {"b": 1, "a": [True]})
    await store.store.record("record").put({"f": 1})
    assert await store.get("json") == b'{"a":[true],"b":1}'
    with pytest.raises(TypeMismatch):
        await store.get("record")


async def test_a_value_is_as_large_as_the_store_allows(agent: OpenAgent) -> None:
    store = await agent()
    await store.put("a", b"x" * 1_000_000)
    with pytest.raises(ValueTooLarge, match="1,000,001 bytes, limit 1,000,000"):
        await store.put("a", b"x" * 1_000_001)

    small = await agent(max_value_size=10)
    await small.put("a", b"x" * 10)
    with pytest.raises(ValueTooLarge):
        await small.put("a", b"x" * 11)


GOOD_KEYS = ["a", "a.b", "a..b", "config.agent-pool", "task_1/x:y", "ключ", "a" * 1024, "é" * 512]
BAD_KEYS = ["", " ", "a b", "a b ", "a\tb", "a\n", ".", ".a", "a.", "a" * 1025, "é" * 513, "a\0", 7]


@pytest.mark.parametrize("key", GOOD_KEYS, ids=range(len(GOOD_KEYS)))
async def test_a_key_of_the_rule_is_taken(store: StateStore, key: str) -> None:
    await store.put(key, b"1")
    await store.lock(key, 60)

    assert await store.keys(key) == await store.keys("*") == [key]


@pytest.mark.parametrize("key", BAD_KEYS, ids=range(len(BAD_KEYS)))
async def test_a_malformed_key_is_refused_by_every_verb(key: Any) -> None:
    async with MemoryStore() as store:
        for verb in (
            lambda: store.get(key),
            lambda: store.get_key_value(key),
            lambda: store.put(key, b"1"),
            lambda: store.delete(key),
            lambda: store.keys(key),
            lambda: anext(store.watch(key)),
            lambda: store.lock(key, 60),
        ):
            with pytest.raises(ErrInvalidKey):
                await verb()


# Patterns ---------------------------------------------------------------------

KEYS = ["a", "config", "config.a", "config.a.b", "config.b", "configuration", "x*y"]
PATTERNS = {
    "*": KEYS,
    "config.*": ["config.a", "config.a.b", "config.b"],
    "config*": ["config", "config.a", "config.a.b", "config.b", "configuration"],
    "config": ["config"],
    "nothing.*": [],
    "nothing": [],
    "x*y": ["x*y"],
}


@pytest.mark.parametrize("pattern", PATTERNS)
async def test_a_pattern_finds_its_keys_in_order(store: StateStore, pattern: str) -> None:
    await asyncio.gather(*(store.put(key, b"1") for key in reversed(KEYS)))

    assert await store.keys(pattern) == PATTERNS[pattern]


async def test_keys_are_found_beyond_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "PAGE_MAX", 3)
    async with MemoryStore() as store:
        for number in range(10):
            await store.put(f"a.{number}", b"")

        assert await store.keys("a.*") == [f"a.{number}" for number in range(10)]


# Time to live -----------------------------------------------------------------


async def test_what_expired_is_not_found(store: StateStore) -> None:
    await store.put("cache.a", b"1", SHORT_S)
    await store.put("cache.b", b"1", timedelta(seconds=SHORT_S))
    await store.put("cache.c", b"1", 60)

    await until(lambda: is_gone(store, "cache.a"))
    await until(lambda: is_gone(store, "cache.b"))
    assert await store.keys() == ["cache.c"]


@pytest.mark.parametrize("never", [0, 0.0, timedelta(0), None])
async def test_a_time_to_live_of_zero_is_never(store: StateStore, never: Any) -> None:
    await store.put("a", b"1", SHORT_S)
    await store.put("a", b"2", never)

    entry = await store.store.entry("a")
    assert entry is not None
    assert entry.expires_at is None


@pytest.mark.parametrize("ttl", [-1, -0.001, timedelta(seconds=-1), float("nan"), True, False, "60"])
async def test_a_time_to_live_below_zero_is_refused(ttl: Any) -> None:
    async with MemoryStore() as store:
        with pytest.raises(ErrInvalidTTL):
            await store.put("a", b"1", ttl)
        assert await store.keys() == []


async def test_a_store_may_have_a_time_to_live_for_what_has_none(agent: OpenAgent) -> None:
    store = await agent(ttl=60)
    await store.put("a", b"1")
    await store.put("b", b"1", 3600)

    now = (await store.get_key_value("a")).modified
    entries = [await store.store.entry(key) for key in ("a", "b")]
    lasting = [entry.expires_at - now for entry in entries if entry is not None and entry.expires_at is not None]
    assert [round(each.total_seconds() / 60) for each in lasting] == [1, 60]


# Watching ---------------------------------------------------------------------


async def test_a_watch_tells_of_puts_and_deletes_of_any_agent(agent: OpenAgent) -> None:
    one, two = await agent(), await agent()
    async with one.watch("config.*") as watch, asyncio.timeout(PATIENCE_S):
        await two.put("config.a", b"1")
        await two.put("other", b"1")
        first = await anext(watch)
        await one.put("config.a", b"2")
        second = await anext(watch)
        await two.store.touch("config.a", 60)
        await two.delete("config.a")
        third = await anext(watch)

    assert (first.operation, first.value) == (Operation.PUT, b"1")
    assert (second.operation, second.value) == (Operation.PUT, b"2")
    assert (third.operation, third.key, third.value) == (Operation.DELETE, "config.a", b"")
    assert first.created == second.created == third.created
    assert first.modified <= second.modified <= third.modified
    assert first.revision < second.revision < third.revision


async def test_a_watch_that_was_not_read_meanwhile_delivers_what_happened(agent: OpenAgent) -> None:
    one, two = await agent(), await agent()
    async with one.watch("config.*") as watch, asyncio.timeout(PATIENCE_S):
        await two.put("config.a", b"1")
        await one.put("config.a", b"2")
        await two.delete("config.a")
        changes = [await anext(watch)]
        while changes[-1].operation is not Operation.DELETE:
            changes.append(await anext(watch))

    happened = [(Operation.PUT, b"1"), (Operation.PUT, b"2"), (Operation.DELETE, b"")]
    delivered = [(change.operation, change.value) for change in changes]
    assert delivered == happened


@pytest.mark.parametrize("pattern", [*PATTERNS])
async def test_a_watch_hears_of_the_keys_of_its_pattern_alone(store: StateStore, pattern: str) -> None:
    async with store.watch(pattern) as watch, store.watch("*") as everything:
        for key in KEYS:
            await store.put(key, b"1")
        expected = PATTERNS[pattern]

        assert [key for _, key, _ in await next_changes(watch, len(expected))] == expected
        assert [key for _, key, _ in await next_changes(everything, len(KEYS))] == KEYS
        await watch.aclose()
        assert [change async for change in watch] == []


async def test_an_expiry_is_delivered_as_a_delete(store: StateStore) -> None:
    async with store.watch("cache.*") as watch:
        await store.put("cache.a", b"1", SHORT_S)

        assert await next_changes(watch, 2) == [("PUT", "cache.a", b"1"), ("DELETE", "cache.a", b"")]
    assert await is_gone(store, "cache.a")


async def test_a_slow_watcher_gets_the_last_64_and_the_number_of_the_others(store: StateStore) -> None:
    """No one waits for it: all the puts are done before it reads."""
    async with store.watch("sensor.*") as watch, store.watch("end") as end:
        for number in range(200):
            await store.put(f"sensor.{number}", b"%d" % number)
        # When the end has arrived, all of it has.
        await store.put("end", b"")
        await next_changes(end, 1)
        got: list[bytes] = []
        while not got or got[-1] != b"199":
            got += [value for _, _, value in await next_changes(watch, 1)]

    assert got[-64:] == [b"%d" % number for number in range(136, 200)]
    assert len(got) + watch.dropped == 200
    assert watch.dropped > 0


async def test_a_watch_ends_when_the_store_closes(store: StateStore) -> None:
    watch = await store.watch("*").__aenter__()
    await store.put("a", b"1")
    assert await next_changes(watch, 1) == [("PUT", "a", b"1")]
    waiting = asyncio.ensure_future(anext(watch, None))
    await asyncio.sleep(0)

    await store.close()

    assert await asyncio.wait_for(waiting, PATIENCE_S) is None
    assert [change async for change in watch] == []


async def test_a_watch_begins_when_it_is_called(store: StateStore) -> None:
    """No task has iterated yet, and nothing was awaited in between."""
    watch = store.watch("config.*")
    await store.put("config.a", b"1")
    await store.put("other", b"2")

    assert await next_changes(watch, 1) == [("PUT", "config.a", b"1")]
    await store.delete("config.a")
    assert await next_changes(watch, 1) == [("DELETE", "config.a", b"")]
    await watch.aclose()
    assert [change async for change in watch] == []


async def test_a_watch_is_called_before_what_is_done_at_once(store: StateStore) -> None:
    watch, beside = store.watch("config.*"), store.watch("config.*")

    await asyncio.gather(*(store.put(f"config.{number}", b"1") for number in range(5)))

    expected = {("PUT", f"config.{number}", b"1") for number in range(5)}
    assert set(await next_changes(watch, 5)) == set(await next_changes(beside, 5)) == expected


async def test_changes_of_another_agent_are_delivered_after_the_next_call(agent: OpenAgent) -> None:
    one, two = await agent(), await agent()
    watch = one.watch("config.*")
    assert await one.keys() == []
    await two.put("config.a", b"1")

    assert await next_changes(watch, 1) == [("PUT", "config.a", b"1")]


async def test_what_is_worked_off_is_delivered_to_a_watch_that_was_called_before(store: StateStore) -> None:
    await store.put("tasks.a", b"1")
    watch = store.watch("results.*")

    async def work(task: bytes) -> bytes:
        return task

    await work_off(store, "a", work)

    assert await next_changes(watch, 1) == [("PUT", "results.a", b"1")]


async def test_a_watch_that_is_dropped_is_not_followed(store: StateStore) -> None:
    """A watch is called and dropped: the store does not go on reading the log for it."""
    hub = store.store._session.hub(store.store.name)
    watch = store.watch("*")
    await store.put("a", b"1")
    assert hub._watchers == 1

    del watch
    await asyncio.sleep(0)

    assert hub._watchers == 0
    store.watch("*")
    await store.close()


async def test_a_watch_that_cannot_begin_says_why_and_harms_no_other_call(
    store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(_: str) -> Any:
        raise errors.PermissionDenied("no")

    with monkeypatch.context() as patch:
        patch.setattr(store.store._session.engine, "status", refuse)
        watch = store.watch("*")
        await store.put("a", b"1")

    for _ in range(2):
        with pytest.raises(errors.PermissionDenied):
            await anext(watch)
    with pytest.raises(errors.PermissionDenied):
        await watch.__aenter__()


async def test_a_watch_that_has_not_begun_ends_when_the_store_closes(store: StateStore) -> None:
    watch = store.watch("*")

    await store.close()

    async with asyncio.timeout(PATIENCE_S):
        assert [change async for change in watch] == []


# Locks ------------------------------------------------------------------------


async def test_a_lock_that_is_held_is_refused_until_it_is_given_back(agent: OpenAgent) -> None:
    one, two = await agent(), await agent()
    lock = await one.lock("resource.db", 60)
    assert lock.key == "resource.db"
    await one.put("resource.db", b"a key of that name")
    for store in (one, two):
        with pytest.raises(ErrLockHeld):
            await store.lock("resource.db", 60)

    token = lock.token
    await lock.unlock()
    with pytest.raises(ErrLockNotHeld):
        await lock.unlock()
    with pytest.raises(ErrLockNotHeld):
        await lock.refresh()
    taken = await two.lock("resource.db", 60)

    assert token is not None
    assert taken.token is not None
    assert taken.token > token


async def test_of_all_agents_who_want_a_lock_one_gets_it(agent: OpenAgent) -> None:
    stores = [await agent() for _ in range(3)]

    answers = await asyncio.gather(
        *(stores[number % 3].lock("job", 60) for number in range(12)), return_exceptions=True
    )

    assert sum(isinstance(answer, shared.Lock) for answer in answers) == 1
    assert sum(isinstance(answer, ErrLockHeld) for answer in answers) == 11


async def test_a_crashed_agent_does_not_keep_its_lock_for_ever(agent: OpenAgent) -> None:
    one, two = await agent(), await agent()
    lost = await one.lock("job", SHORT_S)
    taken: list[shared.Lock] = []

    async def is_taken() -> bool:
        with contextlib.suppress(ErrLockHeld):
            taken.append(await two.lock("job", 60))
        return bool(taken)

    await until(is_taken)

    with pytest.raises(ErrLockExpired):
        await lost.refresh()
    with pytest.raises(ErrLockExpired):
        await lost.unlock()
    # The late unlock took nothing from the new holder.
    await taken[0].refresh()
    with pytest.raises(ErrLockHeld):
        await one.lock("job", 60)


async def test_an_expired_lock_is_expired_though_no_other_holder_took_it(store: StateStore) -> None:
    lock = await store.lock("job", SHORT_S)

    async def is_free() -> bool:
        return await store.store.locks() == []

    await until(is_free)
    with pytest.raises(ErrLockExpired):
        await lock.unlock()
    await store.lock("job", 60)


async def test_refreshing_has_a_lock_for_its_whole_time_again() -> None:
    clock = limpet.ManualClock()
    async with MemoryStore(clock=clock) as store:
        lock = await store.lock("job", 30)
        for _ in range(5):
            clock.advance(20)
            await lock.refresh()
        with pytest.raises(ErrLockHeld):
            await store.lock("job", 30)

        clock.advance(30)
        await store.lock("job", 30)


@pytest.mark.parametrize("ttl", [0, -1, timedelta(0), None])
async def test_a_lock_has_a_time_to_live(ttl: Any) -> None:
    async with MemoryStore() as store:
        with pytest.raises(ErrInvalidTTL):
            await store.lock("job", ttl)


async def test_a_lock_used_as_a_context_is_given_back_on_all_paths(store: StateStore) -> None:
    async with await store.lock("job", 60) as lock:
        with pytest.raises(ErrLockHeld):
            await store.lock("job", 60)
    assert lock.token is not None
    with pytest.raises(ErrLockNotHeld):
        _ = lock.fence

    with pytest.raises(ZeroDivisionError):
        async with await store.lock("job", 60):
            raise ZeroDivisionError
    async with await store.lock("job", 60) as lock:
        await lock.unlock()
    await store.lock("job", 60)


async def test_a_context_that_outlived_its_lock_says_so_unless_something_worse_happened() -> None:
    clock = limpet.ManualClock()
    async with MemoryStore(clock=clock) as store:

        async def outlive(quotient: int) -> None:
            async with await store.lock("job", 30):
                clock.advance(31)
                1 // quotient

        with pytest.raises(ErrLockExpired):
            await outlive(1)
        with pytest.raises(ZeroDivisionError):
            await outlive(0)


@pytest.mark.parametrize("error", [Ambiguous("lost", request_id="1", since=0), RuntimeError("unforeseen")])
async def test_an_error_of_the_body_is_not_hidden_by_a_release_that_fails(error: Exception) -> None:
    async with MemoryStore() as store:
        store.store._session.clock = Hasty()

        async def work() -> None:
            async with await store.lock("job", 30):
                stack.enter_context(raising(store.store, error))
                raise ZeroDivisionError

        with contextlib.ExitStack() as stack, pytest.raises(ZeroDivisionError):
            await work()


async def test_a_lock_that_cannot_be_given_back_just_now_ends_by_itself() -> None:
    async with MemoryStore() as store:
        store.store._session.clock = Hasty()
        with contextlib.ExitStack() as stack:
            async with await store.lock("job", 30):
                stack.enter_context(raising(store.store, Ambiguous("lost", request_id="1", since=0)))

        with pytest.raises(ErrLockHeld):
            await store.lock("job", 30)


async def test_a_fenced_write_of_one_who_lost_the_lock_is_refused(store: StateStore) -> None:
    lock = await store.lock("job", 60)
    await store.put("result", b"1", fence=lock)
    fence = lock.fence
    await lock.unlock()
    await store.lock("job", 60)

    with pytest.raises(LockLost):
        await store.put("result", b"2", fence=fence)
    with pytest.raises(LockLost):
        await store.delete("result", fence=fence)
    assert await store.get("result") == b"1"


async def test_agents_that_count_under_a_lock_lose_nothing(agent: OpenAgent) -> None:
    stores = [await agent() for _ in range(3)]
    await stores[0].put("count", b"0")

    async def count(store: StateStore) -> None:
        for _ in range(5):
            while True:
                try:
                    lock = await store.lock("count", 60)
                    break
                except ErrLockHeld:
                    await asyncio.sleep(0.002)
            async with lock:
                await store.put("count", b"%d" % (int(await store.get("count")) + 1), fence=lock)

    await asyncio.gather(*map(count, stores))

    assert await stores[0].get("count") == b"15"


async def test_writes_that_race_have_an_order_that_all_agents_see(agent: OpenAgent) -> None:
    stores = [await agent() for _ in range(3)]
    async with stores[0].watch("a.*") as one, stores[2].watch("a.*") as two:
        await asyncio.gather(*(stores[number % 3].put(f"a.{number}", b"%d" % number) for number in range(30)))

        changes = await next_changes(one, 30)
        assert await next_changes(two, 30) == changes
    assert sorted(int(value) for _, _, value in changes) == [*range(30)]

    await asyncio.gather(*(stores[number % 3].put("a", b"%d" % number) for number in range(30)))
    assert len({await store.get("a") for store in stores}) == 1


# Errors -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("ErrNotFound", "not_found"),
        ("ErrClosed", "closed"),
        ("ErrLockHeld", "lock_held"),
        ("ErrLockNotHeld", "lock_not_held"),
        ("ErrLockExpired", "lock_expired"),
        ("ErrInvalidKey", "invalid_key"),
        ("ErrInvalidTTL", "invalid_ttl"),
    ],
)
def test_an_error_of_the_document_is_the_error_of_the_store(name: str, code: str) -> None:
    error = getattr(shared, name)

    assert error is getattr(errors, name.removeprefix("Err"))
    assert error.code == code


# The two stores of the document -----------------------------------------------


async def test_a_store_in_memory_ends_what_expired_every_second() -> None:
    clock = limpet.ManualClock()
    async with MemoryStore(ttl=10, clock=clock) as store:
        async with store.watch("*") as watch:
            await store.put("a", b"1")
            await store.put("b", b"2", 3600)
            assert await next_changes(watch, 2) == [("PUT", "a", b"1"), ("PUT", "b", b"2")]
            clock.advance(10)

            assert await next_changes(watch, 1) == [("DELETE", "a", b"")]
        assert "memory" in repr(store)
    async with MemoryStore() as another:
        assert await another.keys() == []


@pytest.mark.parametrize("history", [0, 65, -1, True, "5"])
def test_a_store_on_nats_refuses_a_history_that_it_does_not_keep(history: Any) -> None:
    with pytest.raises(InvalidValue, match=f"history must be 1 to 64 on NATS, not {history!r}"):
        NATSStore(object(), history=history)


async def test_a_store_on_nats_keeps_the_history_that_it_was_opened_with() -> None:
    async with client() as connection, NATSStore(connection, bucket=unique("agents"), history=64) as store:
        for number in range(64):
            await store.put("config.a", b"%d" % number)

        found = [event.value async for event in store.store.history("config.a")]

        bucket = await connection.jetstream().key_value(store.store.name)
        theirs = [entry.value for entry in await bucket.history("config.a")]
    assert found == theirs == [b"%d" % number for number in range(64)]


async def test_a_store_on_nats_is_a_bucket_where_the_connection_leads() -> None:
    """What other tools find in the bucket is the key and its bytes."""
    bucket = unique("agents")
    async with client() as connection:
        async with NATSStore(connection, bucket=bucket, ttl=60) as store:
            await store.put("config.theme", b"dark")
            found = await store.get_key_value("config.theme")
            entry = await store.store.entry("config.theme")
            seen = await (await connection.jetstream().key_value(bucket)).get("config.theme")

        assert (found.value, seen.value, seen.revision) == (b"dark", b"dark", found.revision)
        assert entry is not None
        assert entry.expires_at is not None
        # The connection is the caller's, and stays open.
        assert connection.is_connected


async def test_a_store_on_nats_refuses_what_is_too_large() -> None:
    async with client() as connection, NATSStore(connection, bucket=unique("agents"), max_value_size=10) as store:
        await store.put("fits", b"x" * 10)
        with pytest.raises(ValueTooLarge):
            await store.put("large", b"x" * 11)


# Recipes ----------------------------------------------------------------------


async def test_a_configuration_is_followed_without_a_gap(agent: OpenAgent) -> None:
    writer, reader = await agent(), await agent()
    await writer.put("config.pool", json.dumps({"timeout": "30s"}).encode())
    await writer.put("other", b"1")
    followed = configuration(reader, "config.*")

    async with asyncio.timeout(PATIENCE_S):
        assert await anext(followed) == {"config.pool": b'{"timeout": "30s"}'}
        await writer.put("config.log", b"debug")
        assert await anext(followed) == {"config.pool": b'{"timeout": "30s"}', "config.log": b"debug"}
        await writer.delete("config.pool")
        assert await anext(followed) == {"config.log": b"debug"}
        await reader.close()
        assert [each async for each in followed] == []


async def test_a_task_is_done_by_one_worker_and_leaves_its_result(agent: OpenAgent) -> None:
    one, two = await agent(), await agent()
    await one.put("tasks.t1", b"work")
    started, finish = asyncio.Event(), asyncio.Event()

    async def work(data: bytes) -> bytes:
        started.set()
        await finish.wait()
        return data.upper()

    working = asyncio.ensure_future(work_off(one, "t1", work))
    await asyncio.wait_for(started.wait(), PATIENCE_S)
    with pytest.raises(ErrLockHeld):
        await work_off(two, "t1", work)
    finish.set()

    assert await working == b"WORK"
    assert await two.get("results.t1") == b"WORK"
    entry = await two.store.entry("results.t1")
    assert entry is not None
    assert entry.expires_at is not None
    with pytest.raises(ErrNotFound):
        await work_off(two, "t1", work)
    assert await two.store.locks() == []


async def test_a_task_whose_worker_failed_can_be_done_by_another(store: StateStore) -> None:
    await store.put("tasks.t1", b"work")

    async def fails(data: bytes) -> bytes:
        raise ZeroDivisionError

    async def works(data: bytes) -> bytes:
        return data

    with pytest.raises(ZeroDivisionError):
        await work_off(store, "t1", fails)
    assert await work_off(store, "t1", works) == b"work"


async def test_a_worker_that_lost_its_task_leaves_no_result() -> None:
    clock = limpet.ManualClock()
    async with MemoryStore(clock=clock) as store:
        await store.put("tasks.t1", b"work")

        async def works_too_long(data: bytes) -> bytes:
            clock.advance(61)
            return data

        with pytest.raises(LockLost):
            await work_off(store, "t1", works_too_long)
        assert await store.keys() == ["tasks.t1"]


async def test_a_result_is_computed_when_it_is_not_cached(store: StateStore) -> None:
    computed = 0

    async def compute() -> bytes:
        nonlocal computed
        computed += 1
        return b"%d" % computed

    assert await cached(store, "cache.sum", compute, 60) == b"1"
    assert await cached(store, "cache.sum", compute, 60) == b"1"
    await store.put("cache.sum", b"old", SHORT_S)
    await until(lambda: is_gone(store, "cache.sum"))
    assert await cached(store, "cache.sum", compute, 60) == b"2"


async def test_one_agent_leads_and_another_follows(agent: OpenAgent) -> None:
    one, two = await agent(), await agent()
    async with one.election("leader", 60, candidate="one") as lead:
        leader = await two.election("leader", 60).leader()
        assert leader is not None
        assert (leader.holder, leader.token) == ("one", lead.token)
        await one.put("plan", b"1", fence=lead)
        following = two.election("leader", 60, candidate="two")
        waiting = asyncio.ensure_future(following.campaign())
    await asyncio.wait_for(waiting, PATIENCE_S)

    assert following.token is not None
    await two.put("plan", b"2", fence=following)
    await following.resign()
    with pytest.raises(ErrInvalidKey):
        one.election("no spaces", 60)
