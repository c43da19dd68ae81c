"""The contract and its tests have the same sentences, word for word.

A line of docs/contract.md, or of a Behaviour list in `limpet.engine`, that no conformance test
quotes is a promise that nothing checks. A test that quotes no such line holds engines to
something they never promised. And each line is tested on each engine, in every run.
"""

from __future__ import annotations

import ast
import inspect
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from limpet.conformance.plugin import FACES, target_of

ROOT = Path(__file__).parent.parent
CONTRACT = ROOT / "docs" / "contract.md"
ENGINE = ROOT / "src" / "limpet" / "engine.py"
SUITE = ROOT / "src" / "limpet" / "conformance"

TESTS_MIN = 250

# A Limpet server stands before one of these.
ENGINES = {"memory", "sqlite", "postgresql", "redis", "nats"}


class Quotation(NamedTuple):
    """A conformance test and the line it quotes."""

    file: str
    test: str
    line: str

    def __str__(self) -> str:
        return f"{self.file}::{self.test}: {self.line or '(no docstring)'}"


def one_line(text: str) -> str:
    return " ".join(text.split())


def dash_lines(text: str) -> list[str]:
    """The items of the lists in a text. An indented line goes on with the item before it."""
    found: list[str] = []
    inside = False
    for line in text.splitlines():
        if line.startswith("- "):
            found.append(line[2:])
            inside = True
        elif inside and line.startswith("  ") and line.strip():
            found[-1] += " " + line
        else:
            inside = False
    return [one_line(each) for each in found]


def behaviour_lines(source: str) -> list[str]:
    """The items of the Behaviour lists in the docstrings of the protocol `Engine`."""
    (engine,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "Engine")
    found: list[str] = []
    for method in engine.body:
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
            _, mark, rest = (ast.get_docstring(method) or "").partition("Behaviour:\n")
            found += dash_lines(rest) if mark else []
    return found


def quotations(path: Path) -> Iterator[Quotation]:
    """The tests of a file, each with the first paragraph of its docstring."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            first, _, _ = (ast.get_docstring(node) or "").partition("\n\n")
            yield Quotation(path.name, node.name, one_line(first))


def listed(lines: Iterable[object]) -> str:
    return "\n".join(f"  - {line}" for line in lines)


@pytest.fixture(scope="module")
def contract() -> list[str]:
    """Every promise, in the order of the contract."""
    return dash_lines(CONTRACT.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def behaviour() -> list[str]:
    """Every line of the Behaviour lists."""
    return behaviour_lines(ENGINE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def quoted() -> list[Quotation]:
    """Every conformance test."""
    return [each for path in sorted(SUITE.glob("test_*.py")) for each in quotations(path)]


def test_every_line_of_the_contract_is_quoted(contract: list[str], quoted: list[Quotation]) -> None:
    missing = [line for line in contract if line not in {each.line for each in quoted}]

    assert not missing, (
        f"{len(missing)} lines of docs/contract.md are quoted by no conformance test:\n{listed(missing)}"
    )


def test_every_line_of_the_primitives_is_quoted(behaviour: list[str], quoted: list[Quotation]) -> None:
    missing = [line for line in behaviour if line not in {each.line for each in quoted}]

    assert not missing, f"{len(missing)} Behaviour lines are quoted by no conformance test:\n{listed(missing)}"


def test_every_conformance_test_quotes_a_line(
    contract: list[str], behaviour: list[str], quoted: list[Quotation]
) -> None:
    strangers = [each for each in quoted if each.line not in {*contract, *behaviour}]

    assert not strangers, (
        f"{len(strangers)} conformance tests quote no line of docs/contract.md or limpet.engine:\n{listed(strangers)}"
    )


def test_every_line_meets_every_engine_and_both_interfaces(
    contract: list[str], behaviour: list[str], request: pytest.FixtureRequest
) -> None:
    """The ordinary run leaves out cases, and no line may lose an engine by that."""
    config = request.config
    is_everything = config.args_source is pytest.Config.ArgsSource.TESTPATHS and config.option.limpet_sampled
    if not is_everything or config.option.keyword or config.option.markexpr or config.option.limpet_face:
        pytest.skip("only a run of everything has all conformance tests")
    met: dict[str, set[str]] = defaultdict(set)
    expected: dict[str, set[str]] = defaultdict(lambda: set(ENGINES))
    for item in request.session.items:
        target = target_of(item)
        if target is not None and "encryption=" not in target[0]:
            line = one_line((inspect.getdoc(getattr(item, "obj", None)) or "").partition("\n\n")[0])
            met[line] |= {target[0].partition(":")[0], target[1]}
            only = item.get_closest_marker("face")
            expected[line] |= set(FACES) if only is None else set(only.args)
    # A line without any engine, such as that errors have codes, is tested without one.
    lost = [f"{line} ({missing})" for line in met if (missing := ", ".join(sorted(expected[line] - met[line])))]

    assert len(met.keys() & {*contract, *behaviour}) > 300
    assert not lost, f"{len(lost)} lines are not tested on every engine and through both interfaces:\n{listed(lost)}"


def test_no_line_is_promised_twice(contract: list[str], behaviour: list[str]) -> None:
    for lines in (contract, behaviour):
        twice = [line for line, times in Counter(lines).items() if times > 1]
        assert not twice, f"promised more than once:\n{listed(twice)}"


def test_no_test_hides_another(quoted: list[Quotation]) -> None:
    """Of two tests with one name in one file, Python keeps the second."""
    names = Counter(f"{each.file}::{each.test}" for each in quoted)
    twice = [name for name, times in names.items() if times > 1]

    assert not twice, f"defined more than once:\n{listed(twice)}"


def test_the_suite_is_as_large_as_it_says(quoted: list[Quotation]) -> None:
    count = len({(each.file, each.test) for each in quoted})

    assert count >= TESTS_MIN, f"{count} conformance tests, and there should be at least {TESTS_MIN}"


def test_the_lists_are_read_whole(contract: list[str], behaviour: list[str]) -> None:
    """A reader that understands nothing would find everything in order."""
    text = CONTRACT.read_text(encoding="utf-8")

    assert len(contract) == sum(line.startswith("- ") for line in text.splitlines()) > 200
    assert "The clock never goes back." in contract
    assert len(behaviour) > 20
    assert "Callers that wait for changes are woken and get Closed." in behaviour


def test_a_line_may_be_broken() -> None:
    assert dash_lines("text\n- one\n  and more\n- two\n\n  not this\n- three") == ["one and more", "two", "three"]
