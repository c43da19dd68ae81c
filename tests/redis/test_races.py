"""Another process is faster: between a plan and its comparison on the server, and at the search of a retry."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

import limpet
from limpet.engines.redis.requests import TEST_CLOCK_KEY
from limpet.engines.server_engine import Ticket
from limpet.errors import Conflict, LockLost, TypeMismatch, Unavailable
from limpet.keys import prefix_span
from limpet.model import KEEP, PRESENT, Batch, Commit, Guard, Patch, Put, Refusal, Touch
from tests.engines import unique
from tests.redis.support import command, engine_of, server
from tests.redis.test_replies import Replies

Stores = tuple[limpet.Store, limpet.Store]


@pytest.fixture
async def stores() -> AsyncIterator[Stores]:
    """Two stores on one namespace, as two processes have them."""
    namespace = unique()
    async with (
        limpet.open(server(), namespace=namespace, sweep=False) as one,
        limpet.open(server(), namespace=namespace, sweep=False) as other,
    ):
        yield one, other


@pytest.fixture
async def clocked(worker_id: str) -> AsyncIterator[Stores]:
    """Two stores whose time is set by `command`."""
    database = worker_id.removeprefix("gw") if worker_id != "master" else "63"
    url, namespace = f"{server().rpartition('/')[0]}/{database}?clock=test", unique()
    async with (
        limpet.open(url, namespace=namespace, sweep=False) as one,
        limpet.open(url, namespace=namespace, sweep=False) as other,
    ):
        await command(one, "SET", TEST_CLOCK_KEY, 1_000_000)
        yield one, other
        await command(one, "DEL", TEST_CLOCK_KEY)


def before(
    monkeypatch: pytest.MonkeyPatch, store: limpet.Store, name: str, happens: Callable[[], Awaitable[Any]]
) -> None:
    """Let something happen once, right before an engine calls its own method of this name."""
    engine = engine_of(store)
    method, has_happened = getattr(engine, name), False

    async def late(*args: Any) -> Any:
        nonlocal has_happened
        if not has_happened:
            has_happened = True
            await happens()
        return await method(*args)

    monkeypatch.setattr(engine, name, late)


async def log_of(store: limpet.Store) -> list[tuple[str, str, str | None]]:
    page = await engine_of(store).changes(store.name, 0, limit=10_000)
    return [(change.op, change.key, change.cause) for change in page.changes]


# An entry that expires between plan and comparison ---------------------------------------------------------------


EXPIRING: dict[str, Batch] = {
    "guard": Batch((Guard("lease", PRESENT),), (Put("key", b"2"),)),
    "keep": Batch((), (Put("lease", b"2", KEEP),)),
    "touch": Batch((), (Touch("lease", 60_000),)),
    "patch": Batch((), (Patch("lease", {"n": b"2"}, ("m",), if_exists=True),)),
}


@pytest.mark.parametrize("name", EXPIRING)
async def test_an_entry_that_expires_after_its_plan_counts_as_expired(
    clocked: Stores, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    store, _ = clocked
    await store.put("lease", limpet.Fields(n=1) if name == "patch" else 1, ttl=0.05)
    before(monkeypatch, store, "apply", lambda: command(store, "SET", TEST_CLOCK_KEY, 1_000_050))

    result = await engine_of(store).commit(store.name, EXPIRING[name])

    match name:
        case "guard" | "patch":
            assert isinstance(result, Refusal)
            assert result.found is None
            assert await log_of(store) == [("put", "lease", (await log_of(store))[0][2])]
        case "keep":
            assert isinstance(result, Commit)
            (entry,) = result.entries
            assert entry is not None
            assert (entry.version, entry.expires_ms) == (1, None)
            assert [op for op, *_ in await log_of(store)] == ["put", "expire", "put"]
        case _:
            assert isinstance(result, Commit)
            assert result.entries == (None,)
            assert [op for op, *_ in await log_of(store)] == ["put"]


async def test_a_lock_that_expires_after_a_plan_fences_its_holder_off(
    clocked: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = clocked
    lock = await store.lock("door", ttl=5).acquire()

    async def lose() -> None:
        await command(store, "SET", TEST_CLOCK_KEY, 1_005_000)
        await other.lock("door", ttl=60).acquire()

    before(monkeypatch, store, "apply", lose)

    with pytest.raises(LockLost):
        await store.put("key", 1, fence=lock.fence)

    assert await other.get("key") is None


# Two processes on one entry -----------------------------------------------------------------------------------


async def test_sums_are_exact_whether_adds_are_short_or_planned(stores: Stores) -> None:
    """A ttl, a guard on another key and a second write each make an add one that is planned."""
    one, other = stores
    await one.put("there", 1)
    adds: list[Callable[[limpet.Store], Awaitable[Any]]] = [
        lambda store: store.add("count"),
        lambda store: store.add("count", ttl=60),
        lambda store: store.batch().add("count", 1).put("beside", 1).commit(),
        lambda store: store.batch().expect("there", PRESENT).add("count", 1).commit(),
        lambda store: store.add("count", request_id=unique()),
    ]

    async def work(store: limpet.Store, seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(20):
            await dice.choice(adds)(store)

    await asyncio.gather(*(work(store, seed) for seed in range(4) for store in stores))

    entry = await other.entry("count")
    assert entry is not None
    assert entry.value == entry.version == 160
    assert sum(key == "count" for _, key, _ in await log_of(one)) == 160


async def test_a_guard_on_a_key_that_is_not_written_is_compared(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = stores
    seen = await one.put("config", 1)
    before(monkeypatch, one, "apply", lambda: other.put("config", 2))

    with pytest.raises(Conflict):
        await one.batch().expect("config", seen).put("key", 1).commit()

    assert await other.get("key") is None


async def test_of_two_requests_with_one_id_the_later_gets_the_result_of_the_first(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = stores
    before(monkeypatch, one, "apply", lambda: other.add("count", 5, request_id="mine"))

    assert await one.add("count", 5, request_id="mine") == 5

    assert await one.get("count") == 5
    assert len(await log_of(one)) == 1


async def test_of_a_group_the_stale_one_is_planned_again_and_the_others_are_written_once(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = stores
    await one.put("b", 1, ttl=60)
    before(monkeypatch, one, "apply", lambda: other.add("b", 10))

    await asyncio.gather(*(one.add(key, 1, ttl=60) for key in "abc"))

    assert [(entry.key, entry.value) async for entry in other.scan()] == [("a", 1), ("b", 12), ("c", 1)]
    assert (await other.status()).revision == 5


async def test_a_foreign_key_fails_only_its_own_batch_of_those_that_depend_on_each_other(stores: Stores) -> None:
    one, _ = stores
    await command(one, "SET", f"{{{one.name}}}:foreign", "another program's")
    drafts = [
        one.batch().add("count", 1).put("a", 1),
        one.batch().add("count", 10).put("foreign", 1),
        one.batch().add("count", 100).put("c", 1),
    ]
    loop = asyncio.get_running_loop()
    group = [Ticket(draft._make_batch(), loop.create_future()) for draft in drafts]

    results = await engine_of(one)._commit_group(one.name, group, 0)

    assert [type(result) for result in results] == [Commit, TypeMismatch, Commit]
    assert await one.get("count") == 101
    assert (await one.keys()).keys == ["a", "c", "count"]


# Retries --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["before its mark", "before its search", "after its search"])
async def test_a_retry_and_its_first_attempt_are_done_once_whichever_is_first(
    stores: Stores, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The first attempt arrives while the retry is on its way, and another process undoes it at once."""
    one, other = stores
    first = Batch((), (Put("key", b"1", 60_000),), "first.1")
    retry = Batch((), (Put("key", b"1", 60_000),), "first.1", retry_since=0)

    async def arrive() -> None:
        with contextlib.suppress(Unavailable):
            await engine_of(other).commit(other.name, first)
        await other.delete("key")

    if moment != "after its search":
        before(monkeypatch, one, "apply" if moment == "before its mark" else "find_changes", arrive)
    else:
        engine = engine_of(one)
        search = engine.find_changes

        async def search_and_wait(*args: Any) -> Any:
            found = await search(*args)
            await arrive()
            return found

        monkeypatch.setattr(engine, "find_changes", search_and_wait)

    result = await engine_of(one).commit(one.name, retry)

    assert isinstance(result, Commit)
    assert result.replayed == (moment == "before its mark")
    assert [cause for op, _, cause in await log_of(one) if op == "put"] == ["first.1"]


async def test_a_first_attempt_that_arrives_after_its_retry_was_applied_does_nothing(stores: Stores) -> None:
    one, other = stores
    retry = Batch((), (Put("key", b"1", 60_000),), "first.1", retry_since=0)
    await engine_of(one).commit(one.name, retry)
    await one.delete("key")

    with pytest.raises(Unavailable, match="superseded"):
        await engine_of(other).commit(other.name, Batch((), (Put("key", b"1", 60_000),), "first.1"))

    assert [op for op, *_ in await log_of(one)] == ["put", "delete"]


async def test_a_receipt_that_is_kept_for_no_time_fails_nothing(stores: Stores) -> None:
    one, _ = stores
    batch = Batch((), (Put("key", b"1"),), "mine", b"digest", receipt_ms=0)

    assert isinstance(await engine_of(one).commit(one.name, batch), Commit)

    assert (await one.status()).log_changes == 1


# Large values ---------------------------------------------------------------------------------------------------


LARGE: dict[str, Callable[[limpet.Store], Awaitable[Any]]] = {
    "touch": lambda store: store.touch("large", 60),
    "delete": lambda store: store.delete("large"),
    "put": lambda store: store.put("large", 1, ttl=60),
    "guard": lambda store: store.batch().expect("large", PRESENT).put("small", 1).commit(),
}


@pytest.mark.parametrize("name", LARGE)
async def test_a_large_value_that_does_not_matter_is_not_sent(
    stores: Stores, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    one, other = stores
    await other.put("large", "x" * 999_998)
    replies = Replies(monkeypatch)

    size_bytes = await replies.size_bytes(LARGE[name](one))

    assert 0 < size_bytes < 1000
    status = await one.status()
    entries = [entry async for entry in other.scan()]
    assert status.size_bytes == sum(entry.weight_bytes for entry in entries)


# Servers that change ----------------------------------------------------------------------------------------------


async def test_after_a_lost_counter_nothing_is_applied_on_what_was_known(stores: Stores) -> None:
    """The server has lost an entry that this process knows. A touch must not bring it back."""
    one, _ = stores
    await one.put("kept", 1, ttl=60)
    await one.put("lost", 1, ttl=60)
    engine, base = engine_of(one), f"limpet:{{{one.name}}}:"
    for key in ("data", "log", "due", "data:keys"):
        await command(one, "DEL", base + key)

    assert not await one.touch("lost", 60)
    assert await one.add("kept", 1, ttl=60) == 1

    assert (await one.entry("lost"), await one.get("kept")) == (None, 1)
    status = await one.status()
    assert (status.keys, status.log_changes) == (1, 1)
    assert status.revision > 100_000
    assert (await engine.scan(one.name, prefix_span(""))).entries == [await one.entry("kept")]


async def test_an_index_knows_what_was_planned_and_what_went_the_short_way(stores: Stores) -> None:
    one, other = stores
    await one.record("short").set(n=1)
    await one.index("n")
    await one.put("planned", limpet.Fields(n=2), ttl=60)
    await other.record("short").set(n=3)
    await one.record("planned").set(n=4)
    await other.put("plain", limpet.Fields(n=5))
    await one.put("plain", 5)
    await one.put("gone", limpet.Fields(n=6))
    await other.delete("gone")

    for low, high, keys in ((1, 2, []), (3, 3, ["short"]), (4, 9, ["planned"])):
        where = (limpet.field("n") >= low) & (limpet.field("n") <= high)
        assert [entry.key async for entry in one.scan(where=where)] == keys
    members = await command(one, "ZRANGE", f"limpet:{{{one.name}}}:index:n:n", 0, -1)
    assert sorted(members) == [b"planned", b"short"]
    assert await engine_of(one).indexes(one.name) == ["n"]


async def test_an_entry_under_which_a_guard_failed_counts_as_contended(stores: Stores) -> None:
    """Then the process that wrote it last pauses before it writes it again, so that each gets its turn."""
    one, other = stores
    entry = await one.put("key", 0)
    assert not engine_of(one)._committer.is_contended(one.name, [Batch((Guard("key", PRESENT),), ())])
    await other.put("key", 1)

    with pytest.raises(Conflict):
        await one.put("key", 2, expect=entry)

    assert engine_of(one)._committer.is_contended(one.name, [Batch((Guard("key", PRESENT),), ())])
    found = await one.entry("key")
    assert (await one.put("key", 3, expect=found)).version == 3
