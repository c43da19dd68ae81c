"""Things that should stay true about the code itself: its layers, its weight, its documents."""

from __future__ import annotations

import ast
import graphlib
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import limpet
import limpet.sync
from limpet import errors, keys
from limpet.protocol.codes import CODES
from tests.docs_support import ROOT

PACKAGE = ROOT / "src" / "limpet"
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
REFERENCE = ROOT / "docs" / "reference"
ERRATA, LIMITS = ((REFERENCE / f"{page}.md").read_text(encoding="utf-8") for page in ("errors", "limits"))
# One page a class, read as one text.
API = "\n".join(
    page.read_text(encoding="utf-8") for page in (REFERENCE / "api.md", *sorted((REFERENCE / "api").glob("*.md")))
)

# From the ground up. A part imports what stands in a lower row, or in its own row without a cycle. A package is one
# part; a module at the root is one too.
LAYERS: list[set[str]] = [
    {
        *("errors", "keys", "clock", "codec", "model", "index", "checks", "transition", "merge"),
        *("engine", "urls", "request_ids", "retry", "turns"),
    },
    {"commit", "protocol", "isolation", "schema", "engines", "encryption"},
    {
        *("waiters", "hub", "sweep", "session", "opening", "draft", "record", "lock", "election", "pages"),
        *("append", "edit", "many", "folders", "observed"),
        *("store", "sync", "__init__"),
    },
    {"semantic", "faces", "plugin", "adapters", "observers"},
    {"server"},
    {"cli", "conformance", "demo", "testing"},
    {"__main__"},
]
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}

# None of this may come with `import limpet`.
HEAVY = [
    *("sqlite3", "asyncpg", "psycopg", "redis", "nats", "sqlalchemy", "alembic"),
    *("starlette", "uvicorn", "aiohttp", "httpx2", "jinja2", "prometheus_client", "opentelemetry"),
    *("click", "rich", "pytest", "hypothesis", "cryptography", "key_value", "cachelib"),
    *("langgraph", "langchain_core"),
    *("limpet.engines", "limpet.schema", "limpet.conformance", "limpet.demo", "limpet.cli", "limpet.faces"),
    *("limpet.testing", "limpet.adapters", "limpet.observers"),
    *("limpet.plugin", "limpet.encryption", "limpet.semantic", "limpet.server", "limpet.protocol"),
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

    assert {part for part in imported_parts(path) if LEVEL[part] > LEVEL[part_of(path)]} == set()


def test_no_part_imports_itself_by_way_of_others() -> None:
    imports: dict[str, set[str]] = {}
    for path in source_files():
        imports.setdefault(part_of(path), set()).update(imported_parts(path))

    # Raises CycleError, which names the parts.
    list(graphlib.TopologicalSorter(imports).static_order())


@pytest.mark.parametrize("path", source_files(PACKAGE / "server"), ids=inside)
def test_the_server_serves_any_engine_and_knows_none(path: Path) -> None:
    assert imported_parts(path) & {"engines", "encryption"} == set()


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


# The words ----------------------------------------------------------------------

BANNED = re.compile(
    r"\b(?:asked|told|whoever|whomever|somebody|nobody|heard|overtaken|tally|desk|ghost|doorway|lent|reckon|reckoned"
    r"|bell|walls|thereof|word of)\b",
    re.IGNORECASE,
)
PLAIN = [
    *("src/limpet", "tests", "bench", "docs"),
    *("README.md", "CONTRIBUTING.md", "SECURITY.md", "conftest.py", "dev", "pyproject.toml", "Makefile"),
]

READ = (".py", ".md", ".lua", ".sql")


def texts(name: str) -> list[Path]:
    """The files of a folder that people read, or the one file."""
    path = ROOT / name
    inside = [each for each in sorted(path.rglob("*")) if each.suffix in READ and each != Path(__file__)]
    return [path] if path.is_file() else inside


@pytest.mark.parametrize("name", PLAIN)
def test_the_words_are_plain(name: str) -> None:
    """One word for each concept, and none that only we use: requested, reported, no caller, superseded, counters."""
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in texts(name)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        # A user of Unix has this name.
        if BANNED.search(line.replace('getpwnam("nobody")', ""))
    ]

    assert texts(name), f"{name} is not there"
    assert found == []


# The documents ----------------------------------------------------------------


def rows(text: str) -> list[list[str]]:
    """The rows of all tables in a text, cell by cell."""
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines() if line.startswith("| ")]


def section(text: str, heading: str, level: str = "##") -> str:
    """What stands under a heading, up to the next one of its level or above."""
    found = text.partition(f"\n{level} {heading}\n")[2]
    assert found, f"there is no heading {heading!r}"
    return re.split(rf"^#{{1,{len(level)}}} ", found, maxsplit=1, flags=re.MULTILINE)[0]


def named_in(text: str) -> set[str]:
    """The words that a text sets as code, without arguments."""
    return set(re.findall(r"`(\w+)[^`]*`", text))


def test_the_house_map_names_every_part() -> None:
    named = [name for cells in rows(section(ARCHITECTURE, "The house map"))[1:] for name in named_in(cells[1])]

    assert sorted(named) == sorted(LEVEL)


@pytest.mark.parametrize("path", source_files(), ids=inside)
def test_every_module_says_what_it_is_concerned_with(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


# The reference ----------------------------------------------------------------


@pytest.mark.parametrize("name", limpet.__all__)
def test_every_public_name_is_explained(name: str) -> None:
    assert inspect.getdoc(getattr(limpet, name)), f"limpet.{name} has no docstring"
    assert name in named_in(section(API, "Public names"))
    # By its docstring, or by hand where the generator finds none.
    assert re.search(rf"^(?:::: |### )limpet\.{name}$", API, re.MULTILINE)


def test_the_reference_names_no_public_name_that_is_not_there() -> None:
    listed = {name for cells in rows(section(API, "Public names"))[1:] for name in named_in(cells[0])}

    assert listed == set(limpet.__all__)


@pytest.mark.parametrize("name", limpet.sync.__all__)
def test_every_name_of_the_blocking_face_is_explained(name: str) -> None:
    assert inspect.getdoc(getattr(limpet.sync, name)), f"limpet.sync.{name} has no docstring"
    assert name in named_in(section(API, "The sync API"))


FACES = [
    *((kind, getattr(limpet.sync, kind.__name__)) for kind in (limpet.Store, limpet.Record, limpet.Draft)),
    *((kind, getattr(limpet.sync, kind.__name__)) for kind in (limpet.Lock, limpet.Election, limpet.Watch)),
]
SECTIONS = {
    limpet.Store: "The verbs of a store",
    limpet.Record: "The verbs of a record",
    limpet.Draft: "The verbs of a batch",
    limpet.Lock: "The verbs of a lock",
    limpet.Election: "The verbs of an election",
    limpet.Watch: "The verbs of a watch",
}


def verbs(kind: type) -> dict[str, Any]:
    return {name: verb for name, verb in inspect.getmembers(kind) if not name.startswith("_")}


@pytest.mark.parametrize(("awaited", "blocking"), FACES, ids=[kind.__name__ for kind, _ in FACES])
def test_every_public_verb_is_explained(awaited: type, blocking: type) -> None:
    found = [*verbs(awaited).items(), *verbs(blocking).items()]

    assert [name for name, verb in found if not inspect.getdoc(verb)] == []
    # A table has its verbs in the first column.
    listed = {name for cells in rows(section(API, SECTIONS[awaited])) for name in named_in(cells[0])}
    assert {name for name, _ in found} - listed == set()


@pytest.mark.parametrize("kind", SECTIONS, ids=lambda kind: kind.__name__)
def test_every_verb_is_listed_with_arguments_that_it_takes(kind: type) -> None:
    """A table may leave out what every verb takes; it may not name what none does, or another default."""
    twin = getattr(limpet.sync, kind.__name__)
    calls = re.findall(r"`(\w+)\(([^`…]*)\)`", section(API, SECTIONS[kind]))
    for name, arguments in calls:
        verb = getattr(kind, name, None) or getattr(twin, name, None)
        if verb is None:  # A name in the text, such as `equals(value)`.
            assert name in limpet.__all__, f"{kind.__name__} has no {name}"
            continue
        taken = inspect.signature(verb).parameters
        for argument in ast.parse(f"f({arguments})", mode="eval").body.args:  # type: ignore[attr-defined]
            assert argument.id in taken, f"{name} takes no {argument.id}"
        for argument in ast.parse(f"f({arguments})", mode="eval").body.keywords:  # type: ignore[attr-defined]
            default = eval(ast.unparse(argument.value), vars(limpet))  # noqa: S307 - our own document
            assert taken[argument.arg].default == default, f"{name} has another default for {argument.arg}"


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
LEAVES = [kind for kind in ERRORS if kind.code != "error"]


def listed_errors() -> dict[str, list[str]]:
    """What the tables say of each error: its code, whether to retry, its outcome; of a leaf, its exit code too."""
    return {
        found[0]: cells[1:]
        for cells in rows(section(ERRATA, "All errors"))
        if (found := re.findall("`(.+)`", cells[0]))
    }


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_is_in_the_reference_with_its_code(kind: type[errors.LimpetError]) -> None:
    listed = listed_errors()[kind.__name__]

    assert listed[:3] == [f"`{kind.code}`", "yes" if kind.retryable else "no", f"`{kind.outcome}`"]


@pytest.mark.parametrize("kind", LEAVES, ids=lambda kind: kind.__name__)
def test_every_error_is_in_the_reference_with_how_the_command_line_exits(kind: type[errors.LimpetError]) -> None:
    assert listed_errors()[kind.__name__][3] == str(CODES[kind].exit)


@pytest.mark.parametrize("kind", LEAVES, ids=lambda kind: kind.__name__)
def test_every_error_is_in_the_reference_with_how_a_server_reports_it(kind: type[errors.LimpetError]) -> None:
    assert listed_errors()[kind.__name__][4:] == [str(CODES[kind].status), f"`{CODES[kind].reply}`"]


@pytest.mark.parametrize("kind", LEAVES, ids=lambda kind: kind.__name__)
def test_every_error_is_explained(kind: type[errors.LimpetError]) -> None:
    """When it is raised, what to do next, and what it carries besides its message."""
    listed = section(ERRATA, kind.__name__, "###")
    raised, following, *carried = listed.strip().split("\n\n")

    assert re.match(r"\*\*Raised\*\* (?:when|by) ", raised)
    assert following.startswith("**Next:** ")
    assert [text[:8] for text in carried] == (["**Has** "] if attributes(kind) else [])
    assert attributes(kind) - named_in("".join(carried)) == set()


def attributes(kind: type[errors.LimpetError]) -> set[str]:
    """The attributes that the constructors of an error set."""
    constructors = [
        vars(base)["__init__"]
        for base in kind.__mro__
        if base.__module__ == errors.__name__ and "__init__" in vars(base)
    ]
    sources = (ast.parse(textwrap.dedent(inspect.getsource(constructor))) for constructor in constructors)
    stored = (node for source in sources for node in ast.walk(source) if isinstance(node, ast.Attribute))
    return {node.attr for node in stored if isinstance(node.ctx, ast.Store)}


def test_the_reference_names_no_error_that_is_not_there() -> None:
    listed = [*re.findall(r"^### (.+)$", ERRATA, re.MULTILINE), *listed_errors()]

    assert set(listed) == {kind.__name__ for kind in ERRORS}


def test_the_reference_draws_the_tree_of_errors_as_the_code_does() -> None:
    assert errors.__doc__ is not None
    tree = textwrap.dedent(errors.__doc__.split("\n\n")[1])

    assert f"```text\n{tree}\n```" in ERRATA


# A name in the code that a row of the limits refers to: `keys.PAGE_MAX`, `Window.changes`.
LIMIT_ROWS = [(cells, name) for cells in rows(LIMITS) for name in re.findall(r"`([\w.]+)`", cells[2]) if "." in name]


@pytest.mark.parametrize(("cells", "name"), LIMIT_ROWS, ids=[name for _, name in LIMIT_ROWS])
def test_every_limit_in_the_reference_is_the_limit_in_the_code(cells: list[str], name: str) -> None:
    module, _, constant = name.rpartition(".")
    place = limpet.Window() if module == "Window" else importlib.import_module(f"limpet.{module}")
    number = getattr(place, constant)

    shown = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    assert re.search(rf"(?<![\d,.]){re.escape(shown)}(?![\d,.]\d)", cells[1]), f"{name} is {shown}"


def test_every_limit_at_the_door_is_in_the_reference() -> None:
    limits = {f"keys.{name}" for name, limit in vars(keys).items() if name.isupper() and isinstance(limit, int)}
    others = {"codec.DEPTH_MAX", "codec.INT_MIN", "codec.INT_MAX", "clock.TTL_S_MAX"}
    others |= {"retry.ATTEMPTS", "store.UPDATE_ATTEMPTS", "draft.RECEIPT_MS"}
    others |= {f"Window.{name}" for name in limpet.Window.__struct_fields__}

    assert (limits | others) - {name for _, name in LIMIT_ROWS} == set()


@pytest.mark.parametrize(("cells", "name"), LIMIT_ROWS, ids=[name for _, name in LIMIT_ROWS])
def test_what_is_beyond_a_limit_is_an_error_that_is_there(cells: list[str], name: str) -> None:
    listed = re.findall(r"`([A-Z]\w+)`", "".join(cells[3:]))

    assert set(listed) <= {kind.__name__ for kind in LEAVES}
