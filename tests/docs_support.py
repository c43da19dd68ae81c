"""Runs the examples of a Markdown document.

- ``python`` runs, with await at the top level where it is used. All blocks of a document share
  their names and a working directory that starts empty. A ``print(…)  # text`` must print the text.
- ``console`` runs each ``$ command`` in a shell and compares what it prints.
- ``sql`` runs on ``state.db`` of that directory; the comment lines after a statement are its rows.
- A comment ``<!-- python`` … ``-->`` runs too, and no reader sees it: the set-up that a reader has at home, such as a
  server that is running already.
- ``json`` must parse; the Python behind it finds the last such document as ``document``.
- ``toml`` must parse. ``text`` is a picture. ``sh`` is for the reader's own hands: see `test_docs`.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import json
import os
import re
import sqlite3
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from tests.processes import unmeasured

ROOT = Path(__file__).parent.parent
SITE = ROOT / "docs"
PAGES = sorted(SITE.rglob("*.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *PAGES]

_FENCE = re.compile(r"^(?:```([^\n]*)\n(.*?)^```|<!-- (python)\n(.*?)^-->)$", re.MULTILINE | re.DOTALL)
_EXPECTED = re.compile(r"^\s*print\(.*\)  # (.+)$")
# A comment that a reader takes for what is printed, and that the pattern above does not catch.
_MISPLACED = re.compile(r"^(?:.*\bprint\(.*|\s*)\)\s*#")


class Block(NamedTuple):
    """A fenced block: its language, its text, and the line of the document on which the text starts."""

    language: str
    text: str
    line: int

    def lines(self) -> list[str]:
        """The lines that are not empty."""
        return [line for line in self.text.splitlines() if line.strip()]


def blocks(document: Path) -> list[Block]:
    """The fenced blocks of a document, in order."""
    text = document.read_text(encoding="utf-8")
    found = ((match, 1 if match[1] is not None else 3) for match in _FENCE.finditer(text))
    return [Block(match[at], match[at + 1], text.count("\n", 0, match.start(at + 1)) + 1) for match, at in found]


def prose(document: Path) -> str:
    """The text of a document between its blocks."""
    return _FENCE.sub("", document.read_text(encoding="utf-8"))


class Reader:
    """Does what a document says, block after block, as a reader would."""

    def __init__(self, document: Path) -> None:
        self._document = document
        self._names: dict[str, Any] = {"__name__": "__main__", "print": self._print}
        self._printed: dict[int, list[str]] = defaultdict(list)

    def read(self) -> None:
        """Run every block. One event loop serves the whole document."""
        with asyncio.Runner() as self._loop:
            for block in blocks(self._document):
                run = getattr(self, f"_run_{block.language}", None)
                assert run is not None, f"{self._document.name}:{block.line}: no rule for a {block.language!r} block"
                run(block)

    def _run_python(self, block: Block) -> None:
        # Empty lines in front make a traceback point into the document.
        source = "\n" * (block.line - 1) + block.text
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        # Without the future statements of this module: annotations of a reader are values.
        code = compile(source, self._document, "exec", flags=flags, dont_inherit=True)
        result = eval(code, self._names)  # noqa: S307 - our own documents
        if inspect.iscoroutine(result):
            self._loop.run(result)
        for number, line in enumerate(block.text.splitlines(), block.line):
            if expected := _EXPECTED.match(line):
                printed = self._printed[number]
                assert printed == [expected[1]], f"{self._document.name}:{number}: {line.strip()} prints {printed}"
            else:
                assert not _MISPLACED.match(line), f"{self._document.name}:{number}: no test checks {line.strip()}"

    def _print(self, *values: object) -> None:
        self._printed[sys._getframe(1).f_lineno].append(" ".join(map(str, values)))

    def _run_console(self, block: Block) -> None:
        assert block.text.startswith("$ "), f"{self._document.name}:{block.line}: a console starts with a command"
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        for command, expected in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block.text, re.MULTILINE):
            done = subprocess.run(
                ["sh", "-c", command],
                env={**unmeasured(), "PATH": path},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            assert done.stdout == expected, f"{self._document.name}:{block.line}: $ {command} prints {done.stdout!r}"

    def _run_json(self, block: Block) -> None:
        self._names["document"] = json.loads(block.text)

    def _run_sql(self, block: Block) -> None:
        with contextlib.closing(sqlite3.connect("state.db")) as database:
            for statement, expected in re.findall(r"([^;]+;)\n((?:-- .*\n)*)", block.text):
                rows = [" | ".join(map(str, row)) for row in database.execute(statement)]
                expected_rows = [line.removeprefix("-- ") for line in expected.splitlines()]
                assert rows == expected_rows, f"{self._document.name}:{block.line}: {statement} gives {rows}"

    def _run_toml(self, block: Block) -> None:
        tomllib.loads(block.text)

    def _run_text(self, block: Block) -> None:
        pass

    def _run_sh(self, block: Block) -> None:
        pass
