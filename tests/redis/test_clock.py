"""The test clock: with ``?clock=test`` the time comes from a key of the database, and only then."""

from __future__ import annotations

import pytest

import limpet
from limpet.engines.redis.requests import TEST_CLOCK_KEY, load_script
from limpet.errors import InvalidValue
from tests.engines import unique
from tests.redis.support import command, server


async def test_time_is_that_of_the_key() -> None:
    async with limpet.open(f"{server()}?clock=test", namespace=unique(), sweep=False) as store:
        try:
            await command(store, "SET", TEST_CLOCK_KEY, 1_000_000)
            entry = await store.put("key", 1, ttl=60)
            await command(store, "SET", TEST_CLOCK_KEY, 1_059_999)
            assert await store.get("key") == 1
            await command(store, "SET", TEST_CLOCK_KEY, 1_060_000)
            assert await store.get("key") is None
        finally:
            await command(store, "DEL", TEST_CLOCK_KEY)

    assert entry.created_at.timestamp() == 1000


async def test_without_the_option_the_key_is_not_read() -> None:
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        await command(store, "SET", TEST_CLOCK_KEY, 1_000_000)
        try:
            entry = await store.put("key", 1)
        finally:
            await command(store, "DEL", TEST_CLOCK_KEY)

    assert entry.created_at.year > 2000
    text, _ = load_script()
    assert b"test-clock" not in text
    assert b"test clock" not in text


@pytest.mark.parametrize("url", ["memory:?clock=test", "http://127.0.0.1:1?clock=test"])
async def test_other_engines_refuse_the_option(url: str) -> None:
    with pytest.raises(
        InvalidValue, match=r"the option clock is for redis: and nats: URLs; pass clock= to limpet\.open"
    ):
        await limpet.open(url)
