"""What the tests of the SQLite engine share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import limpet
from limpet.engines.sqlite.engine import SqliteEngine
from tests.sqlite.support import Spy, open_sqlite


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The database file of this test, not made yet."""
    return tmp_path / "state.db"


@pytest.fixture
def url(path: Path) -> str:
    return f"sqlite:///{path}"


@pytest.fixture
def clock() -> limpet.ManualClock:
    return limpet.ManualClock()


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    """Stands on every connection that the engine opens from now on."""
    return Spy(monkeypatch)


@pytest.fixture
async def engine(url: str, clock: limpet.ManualClock, spy: Spy) -> AsyncIterator[SqliteEngine]:
    """An engine on a new file, with the spy on its connections."""
    opened = await open_sqlite(url, clock)
    spy.forget()
    yield opened
    spy.before.clear()
    spy.after.clear()
    await opened.close()
