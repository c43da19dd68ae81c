"""Sessions of the SDK's client with a server, in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import limpet
from limpet.mcp.server import make_server
from tests.mcp.support import Agent, connected


@pytest.fixture
async def store() -> AsyncIterator[limpet.Store]:
    """A store of this test's own, in memory."""
    async with limpet.open("memory:") as opened:
        yield opened


@pytest.fixture
async def agent(store: limpet.Store) -> AsyncIterator[Agent]:
    """An agent that uses the store by a server."""
    async with connected(make_server(store)) as found:
        yield found
