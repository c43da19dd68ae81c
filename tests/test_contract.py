"""The contract, its Behaviour lists and the suite say the same, word for word."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

from limpet.engine import Engine

ROOT = Path(__file__).parent.parent
SUITE = ROOT / "src/limpet/conformance"
TESTS_MIN = 250


def one_line(text: str) -> str:
    return " ".join(text.split())


def promises() -> set[str]:
    """The dash lines of the contract, and of the Behaviour lists beside the primitives."""
    lines = re.findall(r"^- (.+)$", (ROOT / "docs/contract.md").read_text(encoding="utf-8"), re.MULTILINE)
    for name in vars(Engine):
        behaviour = (inspect.getdoc(getattr(Engine, name)) or "").partition("Behaviour:\n")[2]
        lines += re.findall(r"^- (.+?)(?=^- |\Z)", behaviour, re.MULTILINE | re.DOTALL)
    return {one_line(line) for line in lines}


def quotes() -> dict[str, str]:
    """What each test function of the suite quotes: the first paragraph of its docstring."""
    found: dict[str, str] = {}
    for path in sorted(SUITE.glob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                first = (ast.get_docstring(node) or "").partition("\n\n")[0]
                found[f"{path.name}::{node.name}"] = one_line(first)
    return found


def test_every_promise_is_quoted_by_a_test() -> None:
    missing = promises() - set(quotes().values())

    assert missing == set(), "no test quotes:\n" + "\n".join(sorted(missing))


def test_every_test_of_the_suite_quotes_a_promise() -> None:
    strangers = {name: quote for name, quote in quotes().items() if quote not in promises()}

    assert strangers == {}, "not in the contract:\n" + "\n".join(f"{name}: {quote}" for name, quote in strangers.items())


def test_the_suite_is_as_large_as_it_claims() -> None:
    assert len(quotes()) >= TESTS_MIN


def test_the_contract_and_the_primitives_are_read() -> None:
    """A pattern that matches nothing would let everything pass."""
    assert len(promises()) > 250
    assert "Guards see the state before the batch." in promises()
    assert "Asking changes nothing; two who ask get the same answer." in promises()
