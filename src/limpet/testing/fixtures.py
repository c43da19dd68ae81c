"""Fixtures for pytest, on request.

In a conftest.py: ``pytest_plugins = ["limpet.testing.fixtures"]``. Then ``store`` and ``sync_store`` are empty stores
in memory, with the clock of the fixture ``clock``, which a test turns. They open the URL of the fixture ``limpet_url``;
override it to run the same tests on other engines, or with faults.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, Final

import pytest

import limpet
import limpet.sync

try:
    import pytest_asyncio
except ImportError as missing:
    raise ImportError("limpet.testing.fixtures needs pytest-asyncio: pip install pytest-asyncio") from missing

__all__ = ["clock", "limpet_url", "store", "sync_store"]

_BY_OUR_CLOCK: Final = ("memory:", "sqlite:", "chaos:memory:", "chaos:sqlite:")


@pytest.fixture
def limpet_url() -> str:
    """The URL of the stores of a test. Every opening of `memory:` is an empty store of its own."""
    return "memory:"


@pytest.fixture
def clock(limpet_url: str) -> limpet.ManualClock:
    """The clock of the stores of a test, which stands still until it is turned."""
    if not limpet_url.startswith(_BY_OUR_CLOCK):
        pytest.fail("this engine goes by its server's clock, which no fixture can turn: see 'Test your code'")
    return limpet.ManualClock()


def _clock_if_wanted(request: pytest.FixtureRequest) -> limpet.ManualClock | None:
    found: limpet.ManualClock | None = request.getfixturevalue("clock") if "clock" in request.fixturenames else None
    return found


async def _store(request: pytest.FixtureRequest, limpet_url: str) -> AsyncIterator[limpet.Store]:
    """An open store."""
    async with limpet.open(limpet_url, clock=_clock_if_wanted(request)) as opened:
        yield opened


if TYPE_CHECKING:
    store: Any
else:
    store = pytest_asyncio.fixture(_store, name="store")


@pytest.fixture
def sync_store(request: pytest.FixtureRequest, limpet_url: str) -> Iterator[limpet.sync.Store]:
    """An open store of the blocking kind."""
    with limpet.sync.open(limpet_url, clock=_clock_if_wanted(request)) as opened:
        yield opened
