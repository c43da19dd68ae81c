"""What is installed is what was written: wheel and sdist in a fresh environment, and the drivers beneath."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from asyncio import Transport
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path
from unittest.mock import Mock

import pytest

from limpet.server.connections import JoiningTransport

ROOT = Path(__file__).parents[1]

OTHER_PEOPLES_TESTS = """
import pytest

@pytest.fixture
def target():
    return "their own"

def test_fixture(target):
    assert target == "their own"

@pytest.mark.parametrize("target", ["one", "two"])
def test_parameter(target):
    assert target in ("one", "two")
"""

FIRST_VALUE = """
import limpet

with limpet.sync.open("sqlite:///state.db") as store:
    store.put("game/1", {"turn": "alice"})
    assert store.get("game/1") == {"turn": "alice"}
print(limpet.__file__)
"""


def run(*words: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("COVERAGE", "LIMPET"))}
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Wheel and sdist, built from this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-d", folder, cwd=ROOT)
    return {"wheel": next(folder.glob("*.whl")), "sdist": next(folder.glob("*.tar.gz"))}


@pytest.fixture
def install(tmp_path: Path) -> Callable[[Path], Path]:
    """A function that installs a distribution in an environment of its own and returns its interpreter.

    The packages that Limpet needs come from the development environment by path. Limpet itself does not: the
    editable install is found through a .pth file there, and Python reads those only in its own site-packages.
    """

    def install(distribution: Path) -> Path:
        environment = tmp_path / "environment"
        run(sys.executable, "-m", "uv", "venv", "--quiet", "--python", sys.executable, environment, cwd=tmp_path)
        python = environment / "bin" / "python"
        packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
        Path(packages, "development.pth").write_text(sysconfig.get_path("purelib") + "\n")
        offline = ("--offline", "--no-deps", "--no-build-isolation")
        run(
            sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", python, *offline, distribution,
            cwd=tmp_path,
        )  # fmt: skip
        return python

    return install


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_a_distribution_works_in_a_fresh_environment(
    kind: str, distributions: dict[str, Path], install: Callable[[Path], Path], tmp_path: Path
) -> None:
    python = install(distributions[kind])

    place = run(python, "-c", FIRST_VALUE, cwd=tmp_path)
    assert str(tmp_path / "environment") in place
    command = python.with_name("limpet")
    assert "alice" in run(command, "--url", "sqlite:///state.db", "get", "game/1", cwd=tmp_path)

    suite = ("--pyargs", "limpet.conformance.test_append", "--limpet-engine", "sqlite:///{tmp}/state.db")
    plugins = ("-p", "no:cacheprovider", "-p", "limpet.conformance.plugin", "--asyncio-mode=auto")
    said = run(python, "-m", "pytest", "-q", *plugins, *suite, cwd=tmp_path)
    assert " passed" in said

    without_plugin = subprocess.run(
        [python, "-m", "pytest", "-q", "--asyncio-mode=auto", "--pyargs", "limpet.conformance.test_reading"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "add -p limpet.conformance.plugin" in without_plugin.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_installing_limpet_changes_nothing_about_other_tests(
    distributions: dict[str, Path], install: Callable[[Path], Path], tmp_path: Path
) -> None:
    """A test suite with a fixture or parameter called ``target`` used to be taken for a part of ours."""
    python = install(distributions["wheel"])
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "test_theirs.py").write_text(OTHER_PEOPLES_TESTS)

    said = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_theirs.py", cwd=theirs)
    assert "3 passed" in said

    loaded = "import sys, pytest; pytest.main(['--collect-only', '-q']); print('limpet' in sys.modules)"
    assert run(python, "-c", loaded, cwd=theirs).splitlines()[-1] == "False"


def test_the_sdist_holds_what_its_tests_need(distributions: dict[str, Path]) -> None:
    with tarfile.open(distributions["sdist"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    for name in (
        "conftest.py",
        "dev",
        "requirements/dev.txt",
        "tests/test_keys.py",
        "src/limpet/py.typed",
        "README.md",
    ):
        assert name in names


def test_every_extra_is_used(distributions: dict[str, Path]) -> None:
    """An extra whose packages nothing imports is a promise that is not kept."""
    with zipfile.ZipFile(distributions["wheel"]) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith("METADATA"))
        described = Parser().parsestr(archive.read(metadata).decode())
        source = "\n".join(archive.read(name).decode() for name in archive.namelist() if name.endswith(".py"))
    extras = described.get_all("Requires-Dist", [])
    imported_as = {
        "nats-py": "nats",
        "py-key-value-aio": "key_value",
        "sse-starlette": "sse_starlette",
        "prometheus-client": "prometheus_client",
        "opentelemetry-api": "opentelemetry",
        "pytest-asyncio": "pytest_asyncio",
        "openai-agents": "agents",
        "pydantic-ai-slim": "pydantic_ai",
        "openfeature-sdk": "openfeature",
    }
    # These two are found by uvicorn itself.
    by_uvicorn = {"httptools", "uvloop"}
    for requirement in extras:
        name = requirement.partition(";")[0].partition("<")[0].partition(">")[0].partition("[")[0].strip()
        if name not in by_uvicorn and name != "limpet":
            module = imported_as.get(name, name)
            assert f"import {module}" in source or f"from {module}" in source, f"{name} is required and never imported"


# The parts of drivers that are used and are not public. When one of these fails after an upgrade, the engine must be
# adapted before the ceiling in pyproject.toml is raised.


def test_nats_py_has_the_parts_that_are_used() -> None:
    from nats.aio.client import Client
    from nats.protocol.parser import Parser as NatsParser

    client = Client()
    missing = [name for name in ("_ps", "_transport", "_server_info", "_inbox_prefix") if not hasattr(client, name)]
    assert missing == [], "nats-py's Client lost parts that limpet.engines.nats.connection uses"
    assert isinstance(client._ps, NatsParser), "nats-py no longer parses by Client._ps"
    assert inspect.iscoroutinefunction(NatsParser.parse), "nats-py's Parser.parse is no longer a coroutine"
    assert list(inspect.signature(NatsParser.parse).parameters) == ["self", "data"]
    assert callable(NatsParser.reset)


def test_redis_py_has_the_parts_that_are_used() -> None:
    from redis.asyncio import Connection

    connection = Connection()
    missing = [name for name in ("_reader", "_writer", "_parser") if not hasattr(connection, name)]
    assert missing == [], "redis-py's Connection lost parts that limpet.engines.redis.connection uses"
    assert callable(connection._parser.parse_error), "redis-py's parser no longer has parse_error"


def test_the_mcp_sdk_has_the_parts_that_are_used() -> None:
    from mcp.server import connection, session

    made = inspect.getsource(session.ServerSession.__init__)
    assert "self._connection = connection" in made, "a session no longer has the connection that limpet.mcp.server uses"
    assert "exit_stack" in connection.Connection.__annotations__, "a connection no longer ends what belongs to it"


def test_uvicorn_has_the_parts_that_are_used() -> None:
    from uvicorn import Server
    from uvicorn.protocols import utils
    from uvicorn.protocols.http import flow_control, httptools_impl
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

    overridden = (
        *("connection_made", "connection_lost", "data_received", "on_message_begin", "on_url", "on_header"),
        *("on_headers_complete", "on_body", "on_message_complete", "on_response_complete"),
        "_unset_keepalive_if_required",
    )
    missing = [name for name in overridden if not callable(getattr(HttpToolsProtocol, name, None))]
    assert missing == [], "uvicorn's HttpToolsProtocol lost parts that limpet.server.connections uses"
    made = inspect.getsource(HttpToolsProtocol.__init__)
    kept = ("self.parser", "self.flow", "self.pipeline", "self.cycle", "self.headers", "self.transport")
    assert [name for name in kept if name not in made] == []
    cycle = inspect.getsource(RequestResponseCycle.__init__)
    assert [name for name in ("response_started", "response_complete") if name not in cycle] == []
    used = set(
        re.findall(r"transport\.(\w+)\(", "".join(map(inspect.getsource, (httptools_impl, flow_control, utils))))
    )
    # It takes a protocol of websockets, which are switched off.
    assert used - {"set_protocol"} <= {*vars(JoiningTransport), *vars(JoiningTransport(Transport(), Mock()))}
    assert callable(Server._serve), "uvicorn's Server lost _serve, which limpet.server.service uses"
