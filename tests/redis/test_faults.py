"""A line that fails at the worst moment: each write happens once, and its caller is told the truth."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

import limpet
from limpet.errors import Ambiguous
from limpet.model import Commit, Entry
from tests.redis.proxy import Fault, Proxy
from tests.redis.support import command, server, unique

Act = Callable[[limpet.Store, limpet.Lock], Awaitable[Any]]

VERBS: dict[str, Act] = {
    "put": lambda store, _: store.put("plain", "new", ttl=60, meta={"by": "me"}),
    "put over an older version": lambda store, _: store.put("plain", "new", expect=limpet.Version(1)),
    "put over an equal value": lambda store, _: store.put("plain", "new", expect=limpet.equals("old")),
    "put over a member": lambda store, _: store.put("object", "new", expect=limpet.field("n") == 1),
    "create": lambda store, _: store.create("fresh", "new"),
    "add": lambda store, _: store.add("count", 3),
    "update": lambda store, _: store.update("count", lambda number: number + 3),
    "delete": lambda store, _: store.delete("plain"),
    "take": lambda store, _: store.take("plain"),
    "touch": lambda store, _: store.touch("plain", 60),
    "set": lambda store, _: store.record("job").set(state="done", worker=b"\xff"),
    "swap": lambda store, _: store.record("job").swap("state", "pending", "claimed", set={"worker": "w1"}),
    "fenced put": lambda store, lock: store.put("plain", "new", fence=lock),
    "batch": lambda store, _: store.batch().put("plain", 2).add("count", 1).delete("other").put("fresh", 3).commit(),
    "put with a request id": lambda store, _: store.put("plain", "new", request_id="mine"),
    "add with a request id": lambda store, _: store.add("count", 3, request_id="mine"),
    "take with a request id": lambda store, _: store.take("plain", request_id="mine"),
    "acquire": lambda store, _: store.lock("gate", ttl=60).acquire(),
    "refresh": lambda _, lock: lock.refresh(),
    "release": lambda _, lock: lock.release(),
}


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with Proxy(server()) as running:
        yield running


async def prepared(store: limpet.Store) -> limpet.Lock:
    """Something for every verb to work on."""
    await store.put("plain", "old")
    await store.put("other", "old")
    await store.put("object", {"n": 1})
    await store.add("count", 5)
    await store.record("job").put({"state": "pending"})
    return await store.lock("door", ttl=60).acquire()


def plainly(result: Any) -> Any:
    """A result without its times."""
    match result:
        case Entry():
            return result.key, result.version, result.revision, result.created_revision, result.value, result.meta
        case Commit():
            return result.revision, [*map(plainly, result.entries)], [*map(plainly, result.ended)]
        case limpet.Lock():
            return result.token
        case _:
            return result


async def seen(store: limpet.Store, result: Any) -> Any:
    """Everything that a caller or an onlooker can tell afterwards, but for the times."""
    log = (await store._session.engine.changes(store.name, 0)).changes
    told = [(change.op, change.family, change.commit, plainly(change.entry)) for change in log]
    entries = [plainly(entry) async for entry in store.scan()]
    status = await store.status()
    totals = (status.revision, status.keys, status.size_bytes, status.log_changes, status.log_bytes)
    return plainly(result), told, entries, totals, [(lock.name, lock.token) for lock in await store.locks()]


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
    """The network kept it. The store asked again and went on; what comes now must not come true."""
    async with limpet.open(proxy.url, namespace=unique(), sweep=False) as store:
        expected = await seen(store, await VERBS[verb](store, await prepared(store)))
        late = store.namespace(unique())
        lock = await prepared(late)
        proxy.fault("keep")

        result = await VERBS[verb](late, lock)
        await asyncio.to_thread(proxy.deliver)

        assert await seen(late, result) == expected


async def test_a_late_group_is_refused_whole(proxy: Proxy) -> None:
    """Its members were all asked for again, each by itself."""
    async with limpet.open(proxy.url, namespace=unique(), sweep=False) as store:
        await store.put("first", 0)
        proxy.fault("keep")

        entries = await asyncio.gather(*(store.put(f"key/{number}", number) for number in range(20)))
        answer = await asyncio.to_thread(proxy.deliver)

        assert b"late" in answer
        assert [entry.version for entry in entries] == [1] * 20
        assert (await store.status()).revision == 21


async def test_ambiguous_is_raised_when_the_server_stays_away(proxy: Proxy) -> None:
    async with limpet.open(proxy.url, namespace=unique(), sweep=False) as store:
        await store.put("first", 0)
        proxy.fault("lose")
        engine = store._session.engine
        with pytest.raises(Ambiguous) as unknown:
            await engine.commit(store.name, store.batch().put("key", 1)._batch())

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
