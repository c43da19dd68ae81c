"""The test clock: with ``?clock=test`` the time is that of the store's own clock, and only then."""

from __future__ import annotations

import limpet
from tests.engines import unique
from tests.nats.support import server


async def test_time_is_that_of_the_clock_of_the_store() -> None:
    clock = limpet.ManualClock(1000)
    async with limpet.open(f"{server()}?clock=test", namespace=unique(), clock=clock, sweep=False) as store:
        entry = await store.put("key", 1, ttl=60)
        clock.advance(59)
        assert await store.get("key") == 1
        clock.advance(1)
        assert await store.get("key") is None

    assert entry.created_at.timestamp() == 1000


async def test_without_the_option_time_is_that_of_the_server() -> None:
    async with limpet.open(server(), namespace=unique(), clock=limpet.ManualClock(1000), sweep=False) as store:
        entry = await store.put("key", 1)

    assert entry.created_at.year > 2000
