"""Fixtures of the tests of the PostgreSQL engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

import limpet
from limpet.engines.postgres.engine import PostgresEngine
from limpet.engines.sql_indexes import quoted
from tests.postgres.proxy import Proxy
from tests.postgres.support import Spy, connected, new_schema, open_postgres, server, url_of
from tests.servers import Postgres, postgres


@pytest.fixture
async def schema() -> AsyncIterator[str]:
    """The name of a schema for this test alone. It is not created yet, and is dropped afterwards."""
    name = new_schema()
    yield name
    async with connected() as connection:
        await connection.execute(f"DROP SCHEMA IF EXISTS {quoted(name)} CASCADE")


@pytest.fixture
def url(schema: str) -> str:
    return url_of(schema)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    """Records the statements of every connection that engines open from now on."""
    return Spy(monkeypatch)


@pytest.fixture
async def engine(url: str, spy: Spy) -> AsyncIterator[PostgresEngine]:
    """An engine on a new schema, with the spy on its connections."""
    opened = await open_postgres(url)
    await spy.forget()
    yield opened
    await opened.close()


@pytest.fixture
async def store(url: str) -> AsyncIterator[limpet.Store]:
    """A store on a new schema, without a sweeper."""
    async with limpet.open(url, sweep=False) as opened:
        yield opened


@pytest.fixture
def own_server() -> Iterator[Postgres]:
    """A server that this test may stop, start and damage."""
    with postgres() as running:
        yield running


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """A proxy to the shared server, which can break, delay and record connections."""
    with Proxy(server()) as running:
        yield running
