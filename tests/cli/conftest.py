"""What the tests of the command line share."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.cli.support import Limpet


@pytest.fixture(scope="session", autouse=True)
def ears() -> None:
    """A run under nohup or in the background ignores signals, and would pass that on to every ``limpet`` it starts."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the developer's, and no file in the folder of the tests."""
    names = ("LIMPET_URL", "LIMPET_NAMESPACE", "LIMPET_ENCRYPTION_KEYS", "LIMPET_LOCK", "LIMPET_FENCING_TOKEN")
    for name in (*names, "PYTHONUNBUFFERED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The store of this test, not made yet."""
    return tmp_path / "state.db"


@pytest.fixture
def url(file: Path) -> str:
    return f"sqlite:///{file}"


@pytest.fixture
def run(url: str) -> Limpet:
    """Runs ``limpet`` in this process, on a file of the test's own."""
    return Limpet(url)
