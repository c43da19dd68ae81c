"""How much of the log a call reads, by the requests that the script makes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from redis import asyncio as redis

import limpet
from limpet.model import Window
from tests.engines import unique
from tests.redis.support import engine_of, server

BATCHES = 60
OF_EACH = 20
KEEP_ALL = Window(age_ms_min=0)


@pytest.fixture
async def store() -> AsyncIterator[limpet.Store]:
    """A store whose log has few items with many changes each."""
    async with limpet.open(server(), namespace=unique(), sweep=False) as opened:
        for number in range(BATCHES):
            draft = opened.batch()
            for place in range(OF_EACH):
                draft.put(f"{number}/{place}", number)
            await draft.commit()
        yield opened


async def items_read(store: limpet.Store, call: Callable[[], Awaitable[object]]) -> int:
    """How many items of the log the server has read during a call."""
    log, end = engine_of(store)._key(store.name, "log"), f"end of {store.name}"
    client = redis.Redis.from_url(server())
    async with client, client.monitor() as monitor:
        await call()
        await client.echo(end)
        count = 0
        while True:
            line: str = (await asyncio.wait_for(monitor.next_command(), 20))["command"]
            if end in line:
                return count
            if log in line and (found := re.match(r"X(?:REV)?RANGE .* COUNT (\d+)$", line, re.IGNORECASE)):
                count += int(found[1])


async def test_a_trim_without_anything_to_drop_reads_one_item_of_the_log(store: limpet.Store) -> None:
    """It is done every ten seconds in every namespace, and an item may have 256 changes of a megabyte each."""
    engine = engine_of(store)

    assert await items_read(store, lambda: engine.trim(store.name, KEEP_ALL)) == 1


async def test_a_trim_reads_about_as_much_of_the_log_as_it_drops(store: limpet.Store) -> None:
    engine, drop = engine_of(store), 3 * OF_EACH
    window = Window(changes=BATCHES * OF_EACH - drop, age_ms_min=0)

    # The three items, the next one, at which it ends, and what was read together with these; and the floor.
    assert 4 <= await items_read(store, lambda: engine.trim(store.name, window)) <= 7 + 2
    assert (await store.status()).log_changes == BATCHES * OF_EACH - drop


async def test_a_page_of_the_log_is_whole_whatever_is_read_at_a_time(store: limpet.Store) -> None:
    engine = engine_of(store)

    page = await engine.changes(store.name, 0, limit=BATCHES * OF_EACH)

    keys = [change.key for change in page.changes]
    assert keys == [f"{number}/{place}" for number in range(BATCHES) for place in range(OF_EACH)]
