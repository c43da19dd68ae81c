"""Another program writes over a record. That is this record's trouble, and nobody else's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import limpet
from limpet.errors import Corrupt
from tests.engines import unique
from tests.redis.support import command, server


@pytest.fixture
async def store() -> AsyncIterator[limpet.Store]:
    """A store with a record whose hash somebody has replaced by a text."""
    async with limpet.open(server(), namespace=unique(), sweep=False) as opened:
        await opened.put("sound", 1)
        await opened.record("job").put({"x": 1})
        await command(opened, "SET", f"{{{opened.name}}}:job", "foreign")
        yield opened


async def settled(*calls: Any) -> list[str]:
    return [type(one).__name__ for one in await asyncio.gather(*calls, return_exceptions=True)]


async def assert_whole(store: limpet.Store) -> None:
    """The log has every change of the map, the totals count both, and writing goes on."""
    engine = store._session.engine
    status = await store.status()
    log = (await engine.changes(store.name, 0)).changes
    keys = (await store.keys()).keys
    assert [change.revision for change in log] == sorted({change.revision for change in log})
    last = {change.key: change for change in log}
    assert {key for key, change in last.items() if change.after is not None} == set(keys)
    assert (status.keys, status.log_changes) == (len(keys), len(log))
    assert (await store.put("after", 1)).revision > log[-1].revision


async def test_only_the_write_of_that_record_fails(store: limpet.Store) -> None:
    record = store.record("job")

    told = await settled(store.put("b", 1), record.set(y=2), store.touch("job", 60), store.put("c", 1))

    assert told == ["Entry", "Corrupt", "Corrupt", "Entry"]
    assert await store.get("b") == await store.get("c") == 1
    await assert_whole(store)


async def test_a_batch_with_that_record_leaves_no_trace(store: limpet.Store) -> None:
    with pytest.raises(Corrupt):
        await store.batch().put("sound", 2).set("job", {"y": 2}).put("fresh", 1).commit()

    assert await store.get("sound") == 1
    assert await store.get("fresh") is None
    await assert_whole(store)


async def test_only_the_read_of_that_record_fails(store: limpet.Store) -> None:
    assert await settled(store.get("sound"), store.get("job"), store.get("missing")) == ["int", "Corrupt", "NoneType"]


async def test_it_can_be_put_anew_and_deleted(store: limpet.Store) -> None:
    assert (await store.record("job").put({"y": 2})).version == 2
    assert dict(await store.record("job").fields() or {}) == {"y": 2}

    await command(store, "SET", f"{{{store.name}}}:job", "foreign")
    assert await store.delete("job")
    await assert_whole(store)


async def test_a_record_that_is_made_takes_over_no_foreign_fields(store: limpet.Store) -> None:
    await command(store, "HSET", f"{{{store.name}}}:fresh", "foreign", "1")

    entry = await store.record("fresh").set(own=1)

    assert dict(entry.value) == {"own": 1}
    assert dict(await store.record("fresh").fields() or {}) == {"own": 1}
