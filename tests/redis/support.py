"""What tests of the Redis engine share."""

from __future__ import annotations

import os
from typing import Any

import limpet
from limpet.engines.redis import RedisEngine


def server() -> str:
    return os.environ["LIMPET_TEST_REDIS"].rpartition("/")[0] + "/62"


def engine_of(store: limpet.Store) -> RedisEngine:
    engine = store._session.engine
    assert isinstance(engine, RedisEngine)
    return engine


async def command(store: limpet.Store, *words: Any) -> Any:
    """Say something to the server, beside the store."""
    engine = engine_of(store)
    async with engine._connection() as line:
        return await line.ask(*words)
