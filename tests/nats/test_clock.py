"""The test clock: with ``?clock=test`` the time is that of the store's own clock, and only then."""

from __future__ import annotations

import limpet
from limpet.model import Batch, Put, Refusal
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


async def test_a_retry_under_the_id_of_another_request_is_refused_at_the_present_time() -> None:
    clock = limpet.ManualClock(1000)
    url = f"{server()}?clock=test"
    async with limpet.open(url, namespace=unique(), clock=clock, sweep=False) as store:
        engine = store._session.engine
        first = Batch((), (Put("a", b"1"), Put("b", b"1")), "one", b"first", 60_000)
        await engine.commit(store.name, first)
        clock.advance(5)
        other = Batch((), first.writes, "one", b"other", 60_000, retry_since=0)

        refusal = await engine.commit(store.name, other)

    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.at_ms) == ("stale_request", 1_005_000)
