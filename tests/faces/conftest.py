"""Fixtures of these tests: agents on the test server, and every store that can hold their state."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import limpet
from tests.faces.support import Pools


@pytest.fixture(scope="session")
def server() -> str:
    """The URL of the test server, as its superuser."""
    return os.environ["LIMPET_TEST_POSTGRES"]


@pytest.fixture
async def admin(server: str) -> AsyncIterator[Any]:
    """A connection of the superuser, who sees every schema."""
    connection = await asyncpg.connect(server)
    yield connection
    await connection.close()


@pytest.fixture
async def pools(server: str, admin: Any) -> AsyncIterator[Pools]:
    """Makes schemas, and pools that work in them."""
    made = Pools(server, admin)
    yield made
    await made.close()


@pytest.fixture
async def schema(pools: Pools) -> str:
    """The schema of one agent."""
    return await pools.schema()


@pytest.fixture
async def pool(pools: Pools, schema: str) -> Any:
    """The pool of that agent."""
    return await pools.pool(schema)


@pytest.fixture
async def store(server: str, schema: str) -> AsyncIterator[limpet.Store]:
    """The same state as a store, as another program would open it."""
    async with limpet.open(f"{server}?schema={schema}", namespace="state") as store:
        yield store


@pytest.fixture(params=["pool", "decoding-pool", "sqlite", "memory"])
async def place(request: pytest.FixtureRequest, server: str, tmp_path: Path) -> AsyncIterator[Any]:
    """Each kind of first argument of the functions."""
    if request.param.endswith("pool"):
        pools = Pools(server, await asyncpg.connect(server))
        yield await pools.pool(await pools.schema(), decodes=request.param == "decoding-pool")
        await pools.close()
        await pools.admin.close()
        return
    urls = {"sqlite": f"sqlite:///{tmp_path}/state.db", "memory": "memory:"}
    async with limpet.open(urls[request.param], namespace="state") as store:
        yield store
