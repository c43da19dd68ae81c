"""What pytest must know before it collects the suite: which engines, through which interfaces, and which cases.

It is loaded by name, with ``-p limpet.conformance.plugin``. Installing limpet alone changes nothing about
other test runs. The fixtures are in the suite's own conftest.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Final, Literal, NamedTuple, Protocol

import pytest

ENGINES = ("memory:{unique}?skip_revisions=yes", "sqlite:///{tmp}/state.db")
FACES = ("async", "sync")
TARGET = "limpet_target"
"""The parameter of a test that holds the engine and the interface it runs on."""
NOT_JUDGED: Final = "not judged: "
"""How the reason of a skipped test begins that needs a hook which the author of the engine has not given."""


class SuiteTest(NamedTuple):
    """A test of the suite: its name, the number of its cases on one engine, and its marks."""

    name: str
    cases: int
    marks: frozenset[str]


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
    group.addoption(
        "--limpet-face",
        action="append",
        choices=FACES,
        help="Test through this interface only. Default: both.",
    )


class Line(Protocol):
    """A way to the server of an engine, such as a proxy, on which the suite cuts connections.

    Attributes:
        url: The URL of the engine by this way.
        cuts: How many connections were cut so far.
    """

    url: str

    @property
    def cuts(self) -> int:
        """How many connections were cut so far."""
        ...

    def cut(self) -> None:
        """Have the server apply the next commit, then close its connection without passing the reply on.

        Returns at once; the commit may come later.
        """
        ...


class Hooks:
    """What the author of an engine can set."""

    @pytest.hookspec(firstresult=True)
    def pytest_limpet_turn(self, url: str, now_ms: int | None) -> bool | None:
        """Set the clock of the server behind a URL, where the clock is the server's; None lets it run again.

        Return True when the clock was set. Otherwise the suite lets time pass by waiting, which takes longer.
        """

    @pytest.hookspec(firstresult=True)
    def pytest_limpet_line(self, url: str) -> AbstractContextManager[Line] | Literal[False] | None:
        """Open a way to the server behind a URL on which connections can be cut after a commit was applied.

        Return False for an engine without a connection, whose replies cannot be lost. With None, the suite cannot
        judge whether each write is applied once when connections break, and its report says so.
        """

    @pytest.hookspec(firstresult=True)
    def pytest_limpet_stored(self, url: str, namespace: str) -> int | None:
        """Count everything that is stored for a namespace: rows, messages or items, visible to readers or not.

        What the server deletes by itself when its time is over need not be counted. With None, the suite cannot judge
        whether trimming deletes anything, and its report says so.
        """

    @pytest.hookspec(firstresult=True)
    def pytest_limpet_runs(
        self, config: pytest.Config, test: SuiteTest, case: int, engine: str, face: str
    ) -> bool | None:
        """Whether a case of a test runs on an engine, through an interface. False leaves it out; None runs it."""


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Register the suite's hooks."""
    pluginmanager.add_hookspecs(Hooks)


def pytest_configure(config: pytest.Config) -> None:
    """Register the suite's markers."""
    for marker in (
        "face(name): a promise of one interface alone, 'async' or 'sync'",
        "refused_early: the request is refused before any engine sees it",
        "slow: takes long or needs many processes; the ordinary run leaves it out",
    ):
        config.addinivalue_line("markers", marker)


@pytest.hookimpl(trylast=True)
def pytest_limpet_line(url: str) -> Literal[False] | None:
    """The engines of this package that work inside the process have no connection."""
    return False if url.startswith(("memory:", "sqlite:")) else None


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name the promises that were not judged, so that a run without failures is not taken for more than it is."""
    reasons = Counter(
        reason.partition(NOT_JUDGED)[2]
        for report in terminalreporter.stats.get("skipped", ())
        if isinstance(report.longrepr, tuple) and NOT_JUDGED in (reason := str(report.longrepr[2]))
    )
    if reasons:
        terminalreporter.section("Limpet: not judged", yellow=True)
        for reason, times in sorted(reasons.items()):
            terminalreporter.line(f"{reason} ({times} test{'s' * (times > 1)})")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test of the suite on every engine, through every interface that promises it."""
    if TARGET not in metafunc.fixturenames:
        return
    config = metafunc.config
    engines = config.getoption("--limpet-engine") or ENGINES
    faces = config.getoption("--limpet-face") or FACES
    only = metafunc.definition.get_closest_marker("face")
    test = _test(metafunc.definition)
    targets = [
        (engine, face)
        for engine in engines
        for face in faces
        if only is None or face == only.args[0]
        # A target without any case is not worth collecting.
        if any(_runs(config, test, case, engine, face) for case in range(test.cases))
    ]
    metafunc.parametrize(TARGET, targets, ids=[_target_name(engine, face) for engine, face in targets])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out cases, and run the tests of one file on one event loop, which its shared engines need."""
    met: Counter[tuple[str, tuple[str, str]]] = Counter()
    left_out = set()
    tests: dict[str, SuiteTest] = {}
    for item in items:
        target = target_of(item)
        if target is None:
            continue
        name = name_of(item)
        test = tests.get(name) or tests.setdefault(name, _test(item))
        if not _runs(config, test, met[name, target], *target):
            left_out.add(item)
        met[name, target] += 1
        if inspect.iscoroutinefunction(getattr(item, "obj", None)):
            item.add_marker(pytest.mark.asyncio(loop_scope="module"), append=False)
    deselect(config, items, left_out)


def deselect(config: pytest.Config, items: list[pytest.Item], left_out: Iterable[pytest.Item]) -> None:
    """Take items out of a run, and have pytest report how many."""
    gone = set(left_out)
    if gone:
        config.hook.pytest_deselected(items=[item for item in items if item in gone])
        items[:] = [item for item in items if item not in gone]


def target_of(item: pytest.Item) -> tuple[str, str] | None:
    """The URL of the engine and the interface that a test of the suite runs on; None for another test."""
    case: Any = getattr(item, "callspec", None)
    found: tuple[str, str] | None = None if case is None else case.params.get(TARGET)
    return found if isinstance(found, tuple) else None


def name_of(item: pytest.Item) -> str:
    """The name of a test without its parameters."""
    return item.nodeid.partition("[")[0]


def _test(definition: pytest.Item) -> SuiteTest:
    # The engines and interfaces are no marker, so they are not counted.
    cases = math.prod(len(list(marker.args[1])) for marker in definition.iter_markers("parametrize"))
    return SuiteTest(name_of(definition), max(1, cases), frozenset(marker.name for marker in definition.iter_markers()))


def _runs(config: pytest.Config, test: SuiteTest, case: int, engine: str, face: str) -> bool:
    found = config.hook.pytest_limpet_runs(config=config, test=test, case=case, engine=engine, face=face)
    return found is not False


def _target_name(engine: str, face: str) -> str:
    kind = "encrypted-" if "encryption=" in engine else ""
    return f"{kind}{engine.partition(':')[0]}-{face}"
