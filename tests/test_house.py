"""Things that should stay true about the code itself: its layers, its weight, its documents."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import limpet
import limpet.sync
from limpet import batch, clock, codec, errors, keys, retry, store
from tests.docs_support import ROOT

PACKAGE = ROOT / "src" / "limpet"
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
REFERENCE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")

# From the ground up: a part imports only what stands in a lower row. A package is one part.
# The engines stand on top, because nothing imports them; what they may import is a test of its own.
LAYERS: list[set[str]] = [
    {"errors"},
    {"keys", "clock"},
    {"codec"},
    {"model"},
    {"transition"},
    {"engine", "schema", "retry"},
    {"batch", "hub"},
    {"sweep"},
    {"session"},
    {"record", "lock"},
    {"store"},
    {"sync"},
    {"__init__"},
    {"conformance", "demo", "cli", "engines"},
]
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}

# Tools and tests explain themselves; the house map names only their packages.
FURNISHED = ("conformance", "cli")

# None of this may come with `import limpet`.
HEAVY = [
    *("sqlite3", "asyncpg", "psycopg", "redis", "nats", "sqlalchemy", "alembic"),
    *("starlette", "uvicorn", "httpx2", "jinja2", "prometheus_client"),
    *("click", "rich", "pytest", "hypothesis"),
    *("limpet.engines", "limpet.schema", "limpet.conformance", "limpet.demo", "limpet.cli"),
]


# The direction of imports -----------------------------------------------------


def source_files(folder: Path = PACKAGE) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def inside(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def part_of(path: Path) -> str:
    """The module, or the package it belongs to: ``store``, ``engines``."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """What a file imports when it runs, as full names. What only the type checker imports does not count."""
    found: set[str] = set()
    for node in running_nodes(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import hides its direction"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def running_nodes(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield child
            yield from running_nodes(child)


def imported_parts(path: Path) -> set[str]:
    """The parts of limpet that a file imports, its own left out."""
    steps = [name.split(".") for name in imported(path)]
    named = {step[1] if len(step) > 1 else "__init__" for step in steps if step[0] == "limpet"}
    # `from limpet import Store` imports the package itself.
    return {part if part in LEVEL else "__init__" for part in named} - {part_of(path)}


@pytest.mark.parametrize("path", source_files(), ids=inside)
def test_imports_point_down(path: Path) -> None:
    assert part_of(path) in LEVEL, "a new part needs a row in LAYERS and in docs/architecture.md"

    assert {part for part in imported_parts(path) if LEVEL[part] >= LEVEL[part_of(path)]} == set()


@pytest.mark.parametrize("path", source_files(PACKAGE / "engines"), ids=inside)
def test_an_engine_stands_on_the_protocol_and_never_on_the_store(path: Path) -> None:
    assert {part for part in imported_parts(path) if LEVEL[part] > LEVEL["engine"]} == set()


@pytest.mark.parametrize("part", ["model", "transition"])
def test_the_pure_core_imports_nothing_that_waits_logs_or_tells_the_time(part: str) -> None:
    roots = {name.split(".")[0] for name in imported(PACKAGE / f"{part}.py")}

    assert roots & {"asyncio", "concurrent", "logging", "os", "random", "socket", "threading", "time"} == set()


# The weight of the import -----------------------------------------------------


def loaded_by(statement: str) -> tuple[set[str], float]:
    """The modules that a fresh interpreter loads for a statement, asyncio aside, and the CPU seconds it takes."""
    script = (
        "import asyncio, json, sys, time; before = set(sys.modules); began = time.process_time()\n"
        f"{statement}\n"
        "print(json.dumps([sorted(set(sys.modules) - before), time.process_time() - began]))"
    )
    # Coverage measures every process that is started, and would load modules of its own.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    modules, seconds = json.loads(done.stdout)
    return set(modules), seconds


def test_importing_limpet_loads_no_driver_no_server_and_no_tool() -> None:
    modules, _ = loaded_by("import limpet")

    assert {name for name in modules for heavy in HEAVY if name == heavy or name.startswith(f"{heavy}.")} == set()


def test_importing_limpet_loads_msgspec_and_the_standard_library_alone() -> None:
    ours, _ = loaded_by("import limpet")
    msgspecs, _ = loaded_by("import msgspec")

    roots = {name.split(".")[0] for name in ours - msgspecs}
    assert roots - sys.stdlib_module_names == {"limpet"}


def test_importing_limpet_is_cheap() -> None:
    """The goal is 100 ms of CPU beyond asyncio. The bound is wide, because a busy machine measures badly."""
    seconds = min(loaded_by("import limpet")[1] for _ in range(3))

    print(f"import limpet takes {seconds * 1000:.0f} ms of CPU beyond asyncio")
    assert seconds < 0.4


# The documents ----------------------------------------------------------------


def rows(text: str) -> list[list[str]]:
    """The rows of all tables in a text, cell by cell."""
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line.startswith("| ")
    ]


def section(text: str, heading: str) -> str:
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def named_in(text: str) -> set[str]:
    """The words that a text sets as code, without arguments."""
    return set(re.findall(r"`(\w+)[^`]*`", text))


def test_the_house_map_says_what_the_modules_say() -> None:
    told = {cells[0].strip("`"): cells[1] for cells in rows(section(ARCHITECTURE, "The house map"))[1:]}
    said = {}
    for path in source_files():
        if part_of(path) not in FURNISHED or path.name == "__init__.py":
            words = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
            assert words, f"{path} does not say what it is concerned with"
            said[inside(path)] = words.splitlines()[0]

    assert told == said


@pytest.mark.parametrize("name", limpet.__all__)
def test_every_public_name_is_explained(name: str) -> None:
    assert inspect.getdoc(getattr(limpet, name)), f"limpet.{name} has no docstring"
    assert name in named_in(section(REFERENCE, "Public names"))


FACES = [
    *((kind, getattr(limpet.sync, kind.__name__)) for kind in (limpet.Store, limpet.Record, limpet.Draft)),
    *((kind, getattr(limpet.sync, kind.__name__)) for kind in (limpet.Lock, limpet.Watch)),
]


def verbs(kind: type) -> dict[str, Any]:
    return {name: verb for name, verb in inspect.getmembers(kind) if not name.startswith("_")}


@pytest.mark.parametrize(("awaited", "blocking"), FACES, ids=[kind.__name__ for kind, _ in FACES])
def test_every_public_verb_is_explained(awaited: type, blocking: type) -> None:
    found = [*verbs(awaited).items(), *verbs(blocking).items()]

    assert [name for name, verb in found if not inspect.getdoc(verb)] == []
    assert {name for name, _ in found} - named_in(REFERENCE) == set()


@pytest.mark.parametrize(("awaited", "blocking"), FACES, ids=[kind.__name__ for kind, _ in FACES])
def test_the_blocking_face_has_the_same_verbs_and_none_to_await(awaited: type, blocking: type) -> None:
    # A blocking watch is ended by `close`: there is nothing to await.
    assert set(verbs(awaited)) - set(verbs(blocking)) - {"aclose"} == set()
    assert [name for name, verb in verbs(blocking).items() if inspect.iscoroutinefunction(verb)] == []


ERRORS = [
    kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, errors.LimpetError)
    if not name.startswith("_")
]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_is_in_the_reference_with_its_code_and_what_to_do(kind: type[errors.LimpetError]) -> None:
    told = {cells[0].strip("`"): cells[1:] for cells in rows(section(REFERENCE, "Errors")) if len(cells) == 5}

    code, retryable, outcome, advice = told[kind.__name__]
    assert (code, retryable, outcome) == (f"`{kind.code}`", "yes" if kind.retryable else "no", f"`{kind.outcome}`")
    assert advice.endswith(".")


def test_the_reference_names_no_error_that_is_not_there() -> None:
    told = {cells[0].strip("`") for cells in rows(section(REFERENCE, "Errors")) if len(cells) == 5}

    assert told - {"error"} == {kind.__name__ for kind in ERRORS}


def test_every_limit_in_the_reference_is_the_limit_in_the_code() -> None:
    window = limpet.Window()
    hours, seconds, megabytes = window.age_ms // 3_600_000, window.age_ms_min // 1000, window.size_bytes // 1_000_000

    assert dict(rows(section(REFERENCE, "Limits"))[1:]) == {
        "key, field name, lock name, request id": f"1 to {keys.KEY_BYTES_MAX:,} bytes of UTF-8, no U+0000",
        "namespace": "1 to 100 characters of `a-z`, `0-9`, `_`, `-`",
        "value, unless opened with another `max_value_bytes`": f"{keys.VALUE_BYTES_MAX:,} bytes",
        "meta": f"{keys.META_BYTES_MAX:,} bytes",
        "nesting of a JSON value": f"{codec.DEPTH_MAX}",
        "integers and counters": "-2^63 to 2^63-1",
        "writes in a batch": f"{keys.BATCH_WRITES_MAX}",
        "keys that a batch guards and does not write": f"{keys.BATCH_GUARDS_MAX}",
        "values of a batch together": f"{keys.BATCH_BYTES_MAX:,} bytes",
        "keys on a page": f"{keys.PAGE_MAX:,}",
        "time to live": "1 ms to a hundred years",
        "attempts of a call that fails for a moment": f"{retry.ATTEMPTS}",
        "attempts of `update`": f"{store.UPDATE_ATTEMPTS}",
        "receipt of a request id": f"{batch.RECEIPT_MS // 60_000} minutes",
        "log of a namespace": f"{hours} hours, {window.changes:,} changes or {megabytes} MB, "
        f"and always the last {seconds} seconds",
    }
    assert clock.TTL_S_MAX // (365 * 86_400) == 100
