"""A server whose memory is full: a call is refused without a trace, or done entirely."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

import limpet
from limpet.errors import Unavailable
from limpet.model import Window
from tests.faults import plainly
from tests.redis.support import command
from tests.servers import redis


@pytest.fixture(scope="module")
def url() -> Any:
    with redis() as server:
        yield server.url


@pytest.fixture(params=[False, True], ids=["plain", "indexed"])
async def stores(url: str, request: pytest.FixtureRequest) -> AsyncIterator[tuple[limpet.Store, limpet.Store]]:
    """Two namespaces that hold the same."""
    async with limpet.open(url, sweep=False) as opened:
        await command(opened, "FLUSHALL")
        pair = opened.namespace("full"), opened.namespace("sound")
        for store in pair:
            await store.put("plain", 1)
            await store.put("for a while", 1, ttl=60)
            await store.add("count", 1)
            await store.record("job").put({"state": "open", "n": 1})
            if request.param:
                await store.index("n")
        try:
            yield pair
        finally:
            await command(opened, "CONFIG", "SET", "maxmemory", 0)


async def everything(store: limpet.Store) -> Any:
    engine = store._session.engine
    status = await store.status()
    log = [(change.op, plainly(change.entry)) for change in (await engine.changes(store.name, status.floor)).changes]
    found = [entry.key async for entry in store.scan(where=limpet.field("n") == 1)]
    totals = (status.revision, status.floor, status.keys, status.size_bytes, status.log_changes, status.log_bytes)
    return log, [plainly(entry) async for entry in store.scan()], totals, found


ACTS: dict[str, Any] = {
    "put": lambda store: store.put("plain", 2),
    "put for a while": lambda store: store.put("plain", 2, ttl=1),
    "delete": lambda store: store.delete("plain"),
    "delete a record": lambda store: store.delete("job"),
    "take": lambda store: store.take("job"),
    "clear a field": lambda store: store.record("job").set(unset=["n"]),
    "persist": lambda store: store.persist("for a while"),
    "add": lambda store: store.add("count"),
    "batch": lambda store: store.batch().delete("plain").delete("job").commit(),
    "request": lambda store: store.delete("plain", request_id="mine"),
    "lock": lambda store: store.lock("door", ttl=5).acquire(),
    "trim": lambda store: store._session.engine.trim(store.name, Window(changes=0, age_ms_min=0)),
    "index": lambda store: store.index("state"),
}


REFUSED = {"put", "add", "lock"}


@pytest.mark.parametrize("act", ACTS)
async def test_a_call_is_refused_without_a_trace_or_done(stores: tuple[limpet.Store, limpet.Store], act: str) -> None:
    store, sound = stores
    before = await everything(store)
    await ACTS[act](sound)
    after = await everything(sound)
    await command(store, "CONFIG", "SET", "maxmemory", 1)

    is_done = True
    try:
        await ACTS[act](store)
    except Unavailable:
        is_done = False

    assert await everything(store) == (after if is_done else before)
    assert not (is_done and act in REFUSED) or await store.indexes()

    await command(store, "CONFIG", "SET", "maxmemory", 0)
    await store.put("plain", 3)
    assert (await everything(store))[2][4] == len((await everything(store))[0])
