"""What tests of the Redis engine share."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import limpet
from limpet.engines.redis.engine import RedisEngine
from tests.proxy import Proxy


def server() -> str:
    return os.environ["LIMPET_TEST_REDIS"].rpartition("/")[0] + "/62"


def proxy_of(url: str) -> Proxy:
    """A proxy before a Redis server."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: bytes) -> None:
        writer.write(b"SELECT %s\r\n" % url.rpartition("/")[2].encode())
        await reader.readline()

    return Proxy(url, rb"\r\n(apply|write)\r\n", greet)


def engine_of(store: limpet.Store) -> RedisEngine:
    engine = store._session.engine
    assert isinstance(engine, RedisEngine)
    return engine


async def command(store: limpet.Store, *words: Any) -> Any:
    """Send a command to the server, beside the store."""
    engine = engine_of(store)
    async with engine._borrow_connection() as connection:
        return await connection.request(*words)
