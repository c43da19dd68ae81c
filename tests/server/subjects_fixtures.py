"""The fixtures of the tests of the plugin storage. A test file asks for them with ``pytest_plugins``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.server.subjects_support import ENGINES, Plugins, plugins_on


@pytest.fixture(params=ENGINES)
async def nats(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Plugins]:
    """A server on SQLite, and one on PostgreSQL."""
    async with plugins_on(request.param, tmp_path, request.config) as plugins:
        yield plugins


@pytest.fixture
async def sqlite_nats(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Plugins]:
    """A server on SQLite, for what has nothing to do with the engine."""
    async with plugins_on("sqlite", tmp_path, request.config) as plugins:
        yield plugins
