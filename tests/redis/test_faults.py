"""A connection that fails at the worst moment: each write happens once, and its caller gets the true result."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

import limpet
from limpet.errors import Ambiguous, Unavailable
from tests.engines import unique
from tests.faults import VERBS, prepared, seen
from tests.proxy import Fault, Proxy
from tests.redis.support import command, engine_of, proxy_of, server


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with proxy_of(server()) as running:
        yield running


@pytest.mark.parametrize("fault", ["lose", "cut"])
@pytest.mark.parametrize("verb", VERBS)
async def test_a_line_that_breaks_at_a_write_leaves_it_done_once(proxy: Proxy, verb: str, fault: Fault) -> None:
    """A reply that is lost, and a request that never arrives, look alike to a client."""
    async with limpet.open(proxy.url, namespace=unique(), sweep=False) as store:
        expected = await seen(store, await VERBS[verb](store, await prepared(store)))
        broken = store.namespace(unique())
        lock = await prepared(broken)
        proxy.fault(fault)

        result = await VERBS[verb](broken, lock)

        assert proxy.is_done
        assert await seen(broken, result) == expected


@pytest.mark.parametrize("verb", VERBS)
async def test_a_request_that_arrives_after_its_retry_was_answered_changes_nothing(proxy: Proxy, verb: str) -> None:
    """The network delayed it, and the store retried and went on. It must not be applied when it arrives."""
    async with limpet.open(proxy.url, namespace=unique(), sweep=False) as store:
        expected = await seen(store, await VERBS[verb](store, await prepared(store)))
        late = store.namespace(unique())
        lock = await prepared(late)
        proxy.fault("keep")

        result = await VERBS[verb](late, lock)
        await asyncio.to_thread(proxy.deliver)

        assert await seen(late, result) == expected


SINGLE_WRITES: dict[str, Callable[[limpet.Store, str, int], Awaitable[Any]]] = {
    "put": lambda store, key, number: store.put(key, number),
    "add": lambda store, key, number: store.batch().add(key, number).commit(),
    "set": lambda store, key, number: store.record(key).set(n=number),
}


@pytest.mark.parametrize("write", SINGLE_WRITES.values(), ids=SINGLE_WRITES)
async def test_a_superseded_group_is_refused_whole(proxy: Proxy, write: Any) -> None:
    """All its members were retried, each by itself."""
    async with limpet.open(proxy.url, namespace=unique(), sweep=False) as store:
        await store.put("first", 0)
        proxy.fault("keep")

        await asyncio.gather(*(write(store, f"key/{number}", number) for number in range(20)))
        reply = await asyncio.to_thread(proxy.deliver)

        assert b"superseded" in reply
        assert [entry.version async for entry in store.scan("key/")] == [1] * 20
        assert (await store.status()).revision == 21


async def test_a_lost_reply_is_looked_for_from_before_other_groups_came_back(proxy: Proxy) -> None:
    """Two groups are on their way; the later one is answered first, and the store knows of newer revisions."""
    async with limpet.open(proxy.url, namespace=unique(), sweep=False) as store:
        await store.put("first", 0)
        proxy.fault("lose", after_s=0.3)
        slow = asyncio.create_task(store.add("count", 1))
        while not proxy.is_done:  # noqa: ASYNC110 - it runs on a thread of its own
            await asyncio.sleep(0)

        for number in range(20):
            await store.put("other", number)

        assert not slow.done()
        assert await slow == 1
        assert await store.get("count") == 1
        assert len([event async for event in store.history("count")]) == 1


@pytest.mark.parametrize("write", SINGLE_WRITES.values(), ids=SINGLE_WRITES)
async def test_a_lone_write_whose_caller_is_cancelled_is_finished_and_its_line_goes_on(write: Any) -> None:
    """It went out from its caller's own task. Its answer must not be taken for that of the next."""
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        await write(store, "key", 100)
        for turns in range(8):
            caller = asyncio.create_task(write(store, "key", turns))
            for _ in range(turns):
                await asyncio.sleep(0)
            caller.cancel()
            await asyncio.gather(caller, return_exceptions=True)

            assert (await store.put("other", turns)).version == turns + 1
            assert await store.get("other") == turns
        connections = len(engine_of(store)._replication_ids)
        changes = [event async for event in store.history("key")]

    assert [event.entry.version for event in changes if event.entry] == [*range(1, len(changes) + 1)]
    assert connections <= 2


@pytest.mark.parametrize("write", SINGLE_WRITES.values(), ids=SINGLE_WRITES)
async def test_a_lone_write_that_has_begun_is_finished_by_a_close(write: Any) -> None:
    url, namespace = server(), unique()
    store = await limpet.open(url, namespace=namespace, sweep=False)
    await write(store, "key", 1)
    caller = asyncio.create_task(write(store, "key", 2))
    await asyncio.sleep(0)

    await store.close()

    await caller
    async with limpet.open(url, namespace=namespace, sweep=False) as again:
        entry = await again.entry("key")
        assert entry is not None
        assert (entry.version, entry.revision) == (2, 2)


async def test_ambiguous_is_raised_when_the_server_stays_away(proxy: Proxy) -> None:
    async with limpet.open(proxy.url, namespace=unique(), sweep=False) as store:
        await store.put("first", 0)
        proxy.fault("lose")
        engine = store._session.engine
        with pytest.raises(Ambiguous) as unknown:
            await engine.commit(store.name, store.batch().put("key", 1)._make_batch())

        assert unknown.value.request_id is not None
        commit = await store.outcome(unknown.value.request_id)
        assert commit is not None
        assert commit.revision == 2


async def test_a_server_that_forgot_the_script_is_told_it_again() -> None:
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        await store.put("key", 1)
        await command(store, "SCRIPT", "FLUSH")

        assert (await store.put("key", 2)).version == 2
        assert await store.get("key") == 2


async def test_what_a_group_has_done_before_its_server_left_is_not_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch whose entry is not known is sent a second time. Others of its group are applied by then, and stay so."""
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        await store.put("object", {"n": 1})
        engine = engine_of(store)
        engine._committer.forget(store.name)
        apply, calls = engine.apply, 0

        async def leave_after_the_first(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise Unavailable("the server is away")
            return await apply(*args)

        monkeypatch.setattr(engine, "apply", leave_after_the_first)
        await asyncio.gather(
            store.put("object", "new", expect=limpet.field("n") == 1), *(store.add("count", 1) for _ in range(4))
        )

        assert calls > 2
        assert await store.get("object") == "new"
        assert await store.get("count") == 4
