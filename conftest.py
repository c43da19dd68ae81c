"""The servers of a test run: one of each, started before the first test and stopped after the last."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import threading
import zlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import coverage
import pytest

from limpet.conformance.plugin import ENGINES, TARGET, SuiteTest, deselect, name_of, target_of
from limpet.encryption.keyring import new_key
from tests.engines import ENGINES as ENGINE_NAMES

POSTGRES = "LIMPET_TEST_POSTGRES"
REDIS = "LIMPET_TEST_REDIS"
NATS = "LIMPET_TEST_NATS"
HTTP = "LIMPET_TEST_HTTP"
KEYS = "LIMPET_TEST_KEYS"
COVERAGE = "COVERAGE_PROCESS_CONFIG"

# The folders of the tests of layers over the store.
LAYERS = [Path(__file__).parent / "tests" / name for name in ("faces", "semantic")]

_running: dict[str, Any] = {}


def pytest_configure(config: pytest.Config) -> None:
    """Start the servers in the process that the others are started by, and test on them too."""
    if not hasattr(config, "workerinput"):
        from tests.servers import nats, postgres, redis, served

        # A killed server loses nothing by this; a power cut is another matter, with tests of its own.
        _run(POSTGRES, lambda: postgres({"fsync": "off", "full_page_writes": "off", "shared_buffers": "64MB"}))
        _run(REDIS, lambda: redis({"databases": "64", "appendonly": "yes"}))
        _run(NATS, nats)
        _run(HTTP, served)
    for marker in (
        "part: a part of a slow test, in the ordinary run in its place; the whole run leaves it out",
        "unmeasured: other tests cover what it runs, and with coverage it takes twice as long",
    ):
        config.addinivalue_line("markers", marker)
    _let_coverage_be_forked()
    os.environ.setdefault(KEYS, ":".join(new_key()))
    os.environ.setdefault("LIMPET_MODEL_EXAMPLES", "100" if WHOLE else "20")
    # Where engines are named, all their cases run.
    config.option.limpet_sampled = not config.option.limpet_engine
    if not config.option.limpet_engine:
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        # A schema and a database of its own, because the time of each is turned by itself.
        number = int(worker.removeprefix("gw")) if worker != "main" else 63
        engines = [
            *ENGINES,
            f"{os.environ[POSTGRES]}?schema=suite_{worker}_{os.getpid()}",
            f"{os.environ[REDIS].rpartition('/')[0]}/{number}?clock=test",
            f"{os.environ[NATS]}?bucket_prefix={worker}-&clock=test",
            f"{os.environ[HTTP]}/suite-{worker}",
        ]
        # Behind a Limpet server, encryption is the server's.
        encrypted = [_encrypted(url) for url in engines[:-1]]
        config.option.limpet_engine = encrypted if os.environ.get("LIMPET_ENCRYPTED") else [*engines, *encrypted]


def _encrypted(url: str) -> str:
    """The same engine with encryption in front of it."""
    return f"{url}{'&' if '?' in url else '?'}encryption=env:{KEYS}"


def _is_encrypted(url: str) -> bool:
    return "encryption=" in url


def _run(name: str, start: Callable[[], Any]) -> None:
    """Have a server, unless the environment names one."""
    if name not in os.environ:
        server = start()
        os.environ[name] = server.__enter__().url
        _running[name] = server


# Which tests run --------------------------------------------------------------------------------------------
#
# The whole run (./dev test --all, or LIMPET_WHOLE=1) runs every test. The ordinary run leaves out the tests that are
# marked slow, and some cases of the others.

WHOLE = bool(os.environ.get("LIMPET_WHOLE"))

# In this order, engines take turns. The last is a Limpet server, which has an engine of its own behind it.
SCHEMES = ("memory", "sqlite", "postgresql", "redis", "nats", "http")


def runs(test: SuiteTest, case: int, engine: str, face: str) -> bool:
    """Whether a case of a test runs on an engine, through an interface.

    Every test runs on every engine: with all its cases on memory, with a third of them on the others, and with one
    there if the request is refused before an engine sees it. The sync API, a Limpet server and encryption work the
    same in front of every engine, so each gets one case by turns: of every test, of every second, and of every third.
    A test of a layer over the store (tests/faces, tests/semantic) runs on memory and on one other engine by turns.

    The whole run has all cases on every engine that a request reaches, and the layers on all of them.
    """
    place, turn = SCHEMES.index(engine.partition(":")[0]), zlib.crc32(test.name.encode())
    is_memory, is_server = place == 0, place == len(SCHEMES) - 1
    is_its_turn = case == (turn + place) % test.cases
    if _is_encrypted(engine) and not os.environ.get("LIMPET_ENCRYPTED"):
        return is_its_turn and face == "async" and turn % 15 == place
    if face == "sync" and "face" not in test.marks:
        return is_its_turn and turn % 5 == place
    if is_server:
        return is_its_turn and turn % 2 == 0
    if "refused_early" in test.marks and not is_memory:
        return is_its_turn
    if WHOLE:
        return True
    if "layer" in test.marks:
        return is_memory or turn % 4 == place - 1
    return is_memory or test.cases < 3 or case % 3 == place % 3


@pytest.hookimpl
def pytest_limpet_runs(config: pytest.Config, test: SuiteTest, case: int, engine: str, face: str) -> bool | None:
    """Leave out cases of the conformance suite, unless the engines are named on the command line."""
    if not config.option.limpet_sampled:
        return None
    if engine.startswith(os.environ[HTTP]) and "test_encryption.py" in test.name:
        # Behind a Limpet server, encryption is the server's.
        return False
    return runs(test, case, engine, face)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out slow tests, and engines of the layers over the store; or what slow tests do too."""
    deselect(config, items, [item for item in items if not _belongs_to_this_run(item)])


def _belongs_to_this_run(item: pytest.Item) -> bool:
    if WHOLE:
        return item.get_closest_marker("part") is None
    return item.get_closest_marker("slow") is None and _runs_on_its_engine(item)


def _runs_on_its_engine(item: pytest.Item) -> bool:
    """Whether a test of a layer over the store runs on the engine that is its parameter."""
    case: Any = getattr(item, "callspec", None)
    if case is None or item.path.parent not in LAYERS or item.path.name == "test_use_cases.py":
        return True
    values = [value for value in case.params.values() if isinstance(value, str) and value in ENGINE_NAMES]
    engines = [value.replace("postgres", "postgresql") for value in values]
    test = SuiteTest(name_of(item), 1, frozenset({"layer"}))
    return all(runs(test, 0, engine, "async") for engine in engines)


def pytest_collection_finish() -> None:
    """Have garbage be looked for among what tests make, and not among all tests and modules each time."""
    gc.collect()
    gc.freeze()
    # What is frozen counts no more when Python decides how often to look at everything.
    gc.set_threshold(700, 10, 100)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Measure coverage in a part of the tests, because measuring takes nearly as long again."""
    measuring = coverage.Coverage.current()
    if measuring is None or _is_measured(item):
        return (yield)
    measuring.stop()
    # With this variable, coverage is measured in the processes that a test starts.
    for_processes = os.environ.pop(COVERAGE, None)
    try:
        return (yield)
    finally:
        if for_processes is not None:
            os.environ[COVERAGE] = for_processes
        # Each start would wrap it once more, until a child of a fork cannot get through all the wrappers.
        leave = os._exit
        measuring.start()
        os._exit = leave


def _let_coverage_be_forked() -> None:
    """Fork while no other thread is in the middle of a measurement, and have a child report only itself.

    A child inherits the lock of the measurements, but not the thread that would release it. It also inherits all that
    was measured before the fork, which takes seconds to write at its end.
    """
    measuring = coverage.Coverage.current()
    collector = None if measuring is None else measuring._collector
    if collector is None or collector.data_lock is None:
        return
    # The first lines of the child are measured too, by the thread that holds it.
    collector.data_lock = threading.RLock()

    def begin_anew() -> None:
        collector._clear_data()
        collector.unlock_data()

    os.register_at_fork(before=collector.lock_data, after_in_parent=collector.unlock_data, after_in_child=begin_anew)


# One in so many is measured: of the engines that a test of the suite runs on, and of the further cases of the others.
MEASURED_EVERY = 4


def _is_measured(item: pytest.Item) -> bool:
    """Whether coverage is measured in a test: in every test once at least, unless its mark says that others do.

    With the first case of a test of the suite, the engines take turns, test by test.
    """
    if item.get_closest_marker("unmeasured") is not None:
        return False
    case: Any = getattr(item, "callspec", None)
    is_first = case is None or not any(case.indices[name] for name in case.indices if name != TARGET)
    target = target_of(item)
    if target is None:
        return is_first or zlib.crc32(item.nodeid.encode()) % MEASURED_EVERY == 0
    engines: list[str] = item.config.option.limpet_engine
    return is_first and (zlib.crc32(name_of(item).encode()) - engines.index(target[0])) % MEASURED_EVERY == 0


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop the servers that were started here."""
    _clockmaker.stop()
    while _running:
        name, server = _running.popitem()
        server.__exit__(None, None, None)
        del os.environ[name]


@pytest.hookimpl
def pytest_limpet_turn(url: str, now_ms: int | None) -> bool | None:
    """Set the clock of a schema on PostgreSQL, of a database on Redis, of our buckets on NATS, of a place on Limpet."""
    if url.startswith(os.environ[REDIS].rpartition("/")[0]):
        import redis

        from limpet.engines.redis.requests import TEST_CLOCK_KEY

        with redis.Redis.from_url(url.partition("?")[0]) as client:
            client.delete(TEST_CLOCK_KEY) if now_ms is None else client.set(TEST_CLOCK_KEY, now_ms)
        return True
    if url.startswith(os.environ[NATS]):
        # Its time is that of the clock that each store was opened with.
        return True
    if url.startswith(os.environ[HTTP]):
        import urllib.request

        place = url.partition("?")[0]
        with urllib.request.urlopen(f"{place}/turn", json.dumps(now_ms).encode(), timeout=30):  # noqa: S310
            return True
    if not url.startswith(os.environ[POSTGRES]):
        return None
    _clockmaker.run(url.partition("?schema=")[2].partition("&")[0], now_ms)
    return True


@pytest.hookimpl
def pytest_limpet_line(url: str) -> Any:
    """Put a proxy in front of one of our servers, which loses replies."""
    from tests.lines import is_ours, line_of

    return line_of(url) if is_ours(url) else None


@pytest.hookimpl
def pytest_limpet_stored(url: str, namespace: str) -> int | None:
    """Count what one of our engines stores."""
    from tests.lines import count_stored, is_ours

    return count_stored(url, namespace) if is_ours(url) or url.startswith(("memory:", "sqlite:")) else None


class _Clockmaker:
    """Sets the clocks of schemas, on a loop and a connection of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connection: Any = None
        self._known: set[str] = set()

    def run(self, schema: str, now_ms: int | None) -> None:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, daemon=True).start()
            asyncio.run_coroutine_threadsafe(self._turn(schema, now_ms), self._loop).result()

    def stop(self) -> None:
        if self._loop is not None and self._connection is not None:
            asyncio.run_coroutine_threadsafe(self._connection.close(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)

    async def _turn(self, schema: str, now_ms: int | None) -> None:
        import asyncpg

        if self._connection is None:
            self._connection = await asyncpg.connect(os.environ[POSTGRES])
        if schema not in self._known:
            await self._connection.execute(
                f"""
                CREATE TABLE "{schema}".test_clock (now_ms bigint);
                INSERT INTO "{schema}".test_clock VALUES (NULL);
                CREATE OR REPLACE FUNCTION "{schema}".limpet_now_ms() RETURNS bigint LANGUAGE sql VOLATILE
                RETURN coalesce(
                    (SELECT now_ms FROM "{schema}".test_clock),
                    floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint
                );
                """
            )
            self._known.add(schema)
        await self._connection.execute(f'UPDATE "{schema}".test_clock SET now_ms = $1', now_ms)


_clockmaker = _Clockmaker()
