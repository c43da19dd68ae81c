"""What pytest must know before it collects the suite: which engines, and through which faces.

It is loaded by name, with ``-p limpet.conformance.plugin``. Installing limpet alone changes nothing about
other test runs. The fixtures are in the suite's own conftest.
"""

from __future__ import annotations

import pytest

ENGINES = ("memory:{unique}?skip_revisions=yes", "sqlite:///{tmp}/state.db")
FACES = ("async", "sync")
TARGET = "limpet_target"
"""The parameter of a test that holds the engine and the face it runs on."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the suite."""
    group = parser.getgroup("limpet", "Limpet's conformance suite")
    group.addoption(
        "--limpet-engine",
        action="append",
        metavar="URL",
        help="Test this engine; may be repeated. {tmp} stands for a new folder and {unique} for a new word, "
        "made for each test. Default: memory and SQLite.",
    )
    group.addoption("--limpet-face", action="append", choices=FACES, help="Test through this face only. Default: both.")


class Hooks:
    """What the author of an engine may tell the suite."""

    @pytest.hookspec(firstresult=True)
    def pytest_limpet_turn(self, url: str, now_ms: int | None) -> bool | None:
        """Set the clock of the server behind a URL, where the clock is the server's; None lets it run again.

        True means that it was set. Otherwise the suite lets time pass by waiting, which takes its time.
        """

    @pytest.hookspec(firstresult=True)
    def pytest_limpet_asks(self, config: pytest.Config, test: str, engine: str, face: str, alone: bool) -> bool | None:
        """Whether a test is to be asked on an engine, through a face, which may be the only one that promises it.

        False leaves it out; nobody need answer.
        """


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Make the suite's hooks known."""
    pluginmanager.add_hookspecs(Hooks)


def pytest_configure(config: pytest.Config) -> None:
    """Make the suite's marker known."""
    config.addinivalue_line("markers", "face(name): a promise of one face alone, 'async' or 'sync'")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test of the suite on every engine, through every face that promises it."""
    if TARGET not in metafunc.fixturenames:
        return
    engines = metafunc.config.getoption("--limpet-engine") or ENGINES
    faces = metafunc.config.getoption("--limpet-face") or FACES
    only = metafunc.definition.get_closest_marker("face")
    if only is not None:
        faces = [face for face in faces if face == only.args[0]]
    asks, test = metafunc.config.hook.pytest_limpet_asks, metafunc.definition.nodeid
    targets = [
        (engine, face)
        for engine in engines
        for face in faces
        if asks(config=metafunc.config, test=test, engine=engine, face=face, alone=only is not None) is not False
    ]
    metafunc.parametrize(TARGET, targets, ids=[_named(engine, face) for engine, face in targets])


def _named(engine: str, face: str) -> str:
    kind = "encrypted-" if "encryption=" in engine else ""
    return f"{kind}{engine.partition(':')[0]}-{face}"
