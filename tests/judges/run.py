"""``./dev judges``: the frameworks' own tests, run against the adapters on every engine.

The tests of a framework are fetched at run time, from its source distribution, in the release that is pinned and with
the hash that is pinned. None of them is kept here. A test that makes a store of the framework gets one of ours: the
modules beside this one see to that.

py-key-value-aio leaves its tests out of its source distribution. They run when a checkout of its repository is named.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests.servers import Missing, nats, postgres, redis

ROOT: Final = Path(__file__).parents[2]
HERE: Final = Path(__file__).parent
FETCHED: Final = ROOT / ".venv-judges" / "sources"
PINS: Final = ("requirements/judges.txt", "requirements/dev.txt")

PAGES: Final = {"docs/how-to/fastmcp.md": "fastmcp"}
"""Pages of the documentation that need a framework: `tests.test_docs` runs them where it is installed, as here."""

ENGINES: Final = ("memory", "sqlite", "redis", "postgres", "nats")

# What FastMCP keeps in a store: sessions and their visibility, the event store, cached responses.
FASTMCP_TESTS: Final = ("test_*session*.py", "test_*event_store*.py", "test_*caching*.py")


class Counts(NamedTuple):
    """How a run ended. ``stores`` counts the stores of ours that it made; None where every test makes one."""

    passed: int
    failed: int
    skipped: int
    stores: int | None
    seconds: float


# Fetching ---------------------------------------------------------------------


def fetch(name: str) -> Path:
    """The unpacked source distribution of a package, in the pinned release."""
    pin = find_pin(name)
    release = re.match(r"\S+==(\S+)", pin)
    assert release is not None
    folder = FETCHED / f"{name}-{release[1]}"
    if not folder.exists():
        print(f"Fetching the source distribution of {name} {release[1]}", flush=True)
        FETCHED.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FETCHED) as made:
            unpack(download(name, pin, Path(made)), Path(made) / "unpacked")
            next((Path(made) / "unpacked").iterdir()).rename(folder)
    return folder


def find_pin(name: str) -> str:
    """The lines of a package in the pinned requirements, with its hashes."""
    lines = re.compile(rf"^{re.escape(name)}(?:\[[^\]]*\])?==.*?(?=^\S|\Z)", re.MULTILINE | re.DOTALL)
    for file in PINS:
        found = lines.search((ROOT / file).read_text())
        if found:
            return found[0]
    raise SystemExit(f"{name} is pinned in none of {', '.join(PINS)}")


def download(name: str, pin: str, folder: Path) -> Path:
    requirements = folder / "requirements.txt"
    requirements.write_text(pin)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    words = ["--no-binary", name, "--require-hashes", "-r", str(requirements), "-d", str(folder)]
    subprocess.run([*pip, *words], check=True)
    return next(folder.glob("*.tar.gz"))


def unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")


# Running ----------------------------------------------------------------------


def run_pytest(words: Sequence[str], cwd: Path, environment: dict[str, str]) -> Counts:
    """Run pytest in a process of its own, and count."""
    with tempfile.TemporaryDirectory() as made:
        report, stores = Path(made) / "report.xml", Path(made) / "stores"
        environment = {**os.environ, **environment, "LIMPET_JUDGED_STORES": str(stores)}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        # Of our own environment, these load long and serve none of the judges.
        command += ["-p", "no:langsmith_plugin", "-p", "no:schemathesis", *words]
        began = time.monotonic()
        done = subprocess.run(
            command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        seconds = time.monotonic() - began
        if done.returncode != 0:
            print(done.stdout, flush=True)
        if not report.exists():
            return Counts(0, 1, 0, None, seconds)
        made_stores = len(stores.read_text().splitlines()) if stores.exists() else None
        return count(report, made_stores, seconds)


def count(report: Path, stores: int | None, seconds: float) -> Counts:
    suites = list(ET.parse(report).getroot().iter("testsuite"))  # noqa: S314 - pytest has just written it

    def total(name: str) -> int:
        return sum(int(suite.get(name, "0")) for suite in suites)

    failed, skipped = total("failures") + total("errors"), total("skipped")
    return Counts(total("tests") - failed - skipped, failed, skipped, stores, seconds)


def judge_cachelib(url: str, work: Path) -> Counts:
    """cachelib's tests of what every cache does, and of what a cache may do."""
    folder = work / "cachelib"
    shutil.copytree(fetch("cachelib") / "tests", folder)
    shutil.copy(HERE / "judged_cachelib.py", folder / "test_limpet.py")
    words = ["-c", os.devnull, "--rootdir", str(folder), "test_limpet.py"]
    return run_pytest(words, folder, {"LIMPET_JUDGED_URL": url})


def judge_fastmcp(url: str, work: Path) -> Counts:
    """FastMCP's tests of what it keeps in a store."""
    folder = work / "fastmcp"
    fetched = fetch("fastmcp")
    folder.mkdir()
    shutil.copytree(fetched / "tests", folder / "tests")
    shutil.copy(fetched / "pyproject.toml", folder)
    tests = sorted(path for name in FASTMCP_TESTS for path in (folder / "tests" / "server").rglob(name))
    # Its own limit of five seconds is for a store in memory.
    words = ["-p", "judged_fastmcp", "-o", "timeout=60", "-o", "pythonpath=", *map(str, tests)]
    return run_pytest(words, folder, {"LIMPET_JUDGED_URL": url, "PYTHONPATH": str(HERE)})


def judge_openai_agents(url: str, work: Path) -> Counts:
    """The tests that the OpenAI Agents SDK has for its session on SQLite, without those that look into a database."""
    folder = work / "openai-agents"
    shutil.copytree(fetch("openai-agents") / "tests", folder / "tests")
    words = ["-p", "judged_openai_agents", "-c", os.devnull, "--rootdir", str(folder), "-o", "asyncio_mode=auto"]
    environment = {"LIMPET_JUDGED_URL": url, "PYTHONPATH": str(HERE)}
    return run_pytest([*words, "tests/extensions/memory/test_async_sqlite_session.py"], folder, environment)


def judge_limits(url: str, work: Path) -> Counts:
    """The tests that limits has for its strategies, one after the other and all at once, on its storages in memory."""
    folder = work / "limits"
    shutil.copytree(fetch("limits") / "tests", folder / "tests")
    # It connects to the servers of the other storages.
    (folder / "tests" / "conftest.py").unlink()
    words = ["-p", "judged_limits", "-c", os.devnull, "--rootdir", str(folder), "-o", "asyncio_mode=auto"]
    environment = {"LIMPET_JUDGED_URL": url, "PYTHONPATH": f"{HERE}{os.pathsep}{folder}"}
    tests = ["tests/test_strategy.py", "tests/aio/test_strategy.py", "tests/integration/test_concurrency.py"]
    # Nearly all of their time is spent waiting for windows to end.
    return run_pytest([*words, "-n", "3", "-m", "memory", *tests], folder, environment)


def judge_key_value(url: str, work: Path, checkout: Path) -> Counts:
    """The tests that py-key-value has for every store, with and without merging."""
    folder = work / "key-value"
    shutil.copytree(checkout / "tests", folder / "tests")
    shutil.copy(HERE / "judged_keyvalue.py", folder / "tests" / "stores" / "test_limpet.py")
    words = ["-c", os.devnull, "--rootdir", str(folder), "-o", "asyncio_mode=auto", "tests/stores/test_limpet.py"]
    return run_pytest(words, folder, {"LIMPET_JUDGED_URL": url})


JUDGES: Final = {
    "cachelib": judge_cachelib,
    "FastMCP": judge_fastmcp,
    "OpenAI-Agents": judge_openai_agents,
    "limits": judge_limits,
}
"""The judges that every run has, by the name of the framework."""


def judge_by_own_tests() -> Counts:
    """Our own tests that need a framework, on all engines, and the pages that do."""
    pages = [f"tests/test_docs.py::test_every_example_of_a_document_runs[{page}]" for page in PAGES]
    # FastMCP's helper for servers in tests leaves their sockets open, which would be an error here.
    return run_pytest(["-o", "filterwarnings=default", "tests/judges/check_fastmcp.py", *pages], ROOT, {})


# Engines ----------------------------------------------------------------------


@contextlib.contextmanager
def urls(engines: Sequence[str], work: Path) -> Iterator[dict[str, str]]:
    """URLs of engines, with their servers started. The tests of this project find the servers too."""
    with contextlib.ExitStack() as running:
        starters = {
            "postgres": ("LIMPET_TEST_POSTGRES", lambda: postgres({"fsync": "off"}), ""),
            "redis": ("LIMPET_TEST_REDIS", lambda: redis({"databases": "64", "appendonly": "yes"}), ""),
            "nats": ("LIMPET_TEST_NATS", nats, "?bucket_prefix=judged-"),
        }
        found: dict[str, str] = {}
        for engine in engines:
            if engine not in starters:
                found[engine] = "memory:" if engine == "memory" else f"sqlite:///{work}/judged.db"
                continue
            variable, start, options = starters[engine]
            try:
                url = os.environ.get(variable) or running.enter_context(start()).url
            except Missing as missing:
                print(f"NOT JUDGED on {engine}: {missing}", flush=True)
                continue
            os.environ[variable] = url
            found[engine] = url + options
        yield found


def has_failed(counts: Counts) -> bool:
    """Whether a test failed, or none ran: its files may have other names in another release."""
    return counts.failed > 0 or counts.passed == 0


# The command ------------------------------------------------------------------


def print_table(results: list[tuple[str, str, Counts]]) -> None:
    print(f"\n{'judge':<18}{'engine':<10}{'passed':>8}{'failed':>8}{'skipped':>9}{'our stores':>12}{'seconds':>9}")
    for judge, engine, counts in results:
        stores = "" if counts.stores is None else str(counts.stores)
        row = f"{counts.passed:>8}{counts.failed:>8}{counts.skipped:>9}{stores:>12}{counts.seconds:>9.1f}"
        print(f"{judge:<18}{engine:<10}{row}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev judges", description=__doc__.partition("\n")[0])
    parser.add_argument("--engine", action="append", choices=ENGINES, help="judge on this one; may be repeated")
    parser.add_argument("--judge", action="append", choices=JUDGES, help="run this one alone; may be repeated")
    parser.add_argument("--py-key-value", type=Path, metavar="CHECKOUT", help="a checkout of its repository")
    given = parser.parse_args()
    results: list[tuple[str, str, Counts]] = []
    with tempfile.TemporaryDirectory() as made, urls(given.engine or ENGINES, Path(made)) as found:
        for engine, url in found.items():
            work = Path(made) / engine
            work.mkdir()
            print(f"Judging on {engine}", flush=True)
            for judge in given.judge or JUDGES:
                results.append((judge, engine, JUDGES[judge](url, work)))
            if given.py_key_value is not None:
                results.append(("py-key-value", engine, judge_key_value(url, work, given.py_key_value.resolve())))
        if not given.judge:
            print("Running our own tests with FastMCP, on all engines", flush=True)
            results.append(("own, with FastMCP", "all", judge_by_own_tests()))
    print_table(results)
    if given.py_key_value is None:
        print("\npy-key-value: NOT JUDGED. Its source distribution has no tests: name a checkout, --py-key-value PATH")
    return int(any(has_failed(counts) for _, _, counts in results))


if __name__ == "__main__":
    sys.exit(main())
