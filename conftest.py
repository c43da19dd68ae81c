"""The servers of a test run: one of each, started before the first test and stopped after the last."""

from __future__ import annotations

import asyncio
import json
import math
import os
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Generator
from typing import Any

import coverage
import pytest

from limpet.conformance.plugin import ENGINES, TARGET
from limpet.encryption.keyring import new_key

POSTGRES = "LIMPET_TEST_POSTGRES"
REDIS = "LIMPET_TEST_REDIS"
NATS = "LIMPET_TEST_NATS"
HTTP = "LIMPET_TEST_HTTP"
KEYS = "LIMPET_TEST_KEYS"

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
    _let_coverage_be_forked()
    os.environ.setdefault(KEYS, ":".join(new_key()))
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
    """Have a server, unless somebody says where one is."""
    if name not in os.environ:
        server = start()
        os.environ[name] = server.__enter__().url
        _running[name] = server


# Leaving out what tells little more; LIMPET_WHOLE=1 asks for all.
#
# Of a promise of both faces, the blocking one is asked for one case on one engine. It runs the very coroutines that
# the other face awaits. The engines take turns, test by test. What the blocking face alone promises is asked on each.
#
# Of a test with three cases or more, an engine behind a server is asked a third, and another engine another third:
# most of them are about what is refused before an engine hears of it. Behind a Limpet server there is an engine that
# is asked by itself, so there it is every other test, and a third of the blocking face's own cases too.
#
# Encryption is asked for a case of every third test, on one engine, and the engines take turns there too. It is the
# same in front of all of them; LIMPET_ENCRYPTED=1 has the whole suite run with it.


@pytest.hookimpl
def pytest_limpet_asks(config: pytest.Config, test: str, engine: str, face: str, alone: bool) -> bool | None:
    """Leave out whose turn it is not."""
    if os.environ.get("LIMPET_WHOLE"):
        return None
    urls: list[str] = config.option.limpet_engine
    plain = _without_encryption(urls)
    if engine not in plain:
        return _is_turn(f"encrypted {test}", urls.index(engine) - len(plain), 3 * len(plain)) and face == "async"
    if engine.startswith(os.environ[HTTP]) and "test_encryption.py" in test:
        return False
    if face == "sync" and not alone:
        return _is_turn(test, plain.index(engine), len(plain))
    return _is_turn(f"served {test}", 0, 2) if engine.startswith(os.environ[HTTP]) else None


def _without_encryption(urls: list[str]) -> list[str]:
    """The engines that are asked as they are; where all are asked with encryption, all of these."""
    return [url for url in urls if not _is_encrypted(url)] or urls


def _is_turn(test: str, place: int, places: int) -> bool:
    return place == zlib.crc32(test.encode()) % places


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out cases."""
    if os.environ.get("LIMPET_WHOLE"):
        return
    chooser = _Chooser(config.option.limpet_engine)
    left_out = [item for item in items if not chooser.takes(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(map(id, left_out))
        items[:] = [item for item in items if id(item) not in gone]


class _Chooser:
    """Goes through the tests of the suite in their order, and takes those that tell something."""

    def __init__(self, urls: list[str]) -> None:
        self._engines = _without_encryption(urls)
        self._met: Counter[tuple[str, Any]] = Counter()

    def takes(self, item: pytest.Item) -> bool:
        target, test = _target(item), _test(item)
        if target is None:
            return True
        engine, face = target
        self._met[test, target] += 1
        met = self._met[test, target]
        is_of_blocking_face = item.get_closest_marker("face") is not None
        if engine not in self._engines or (face == "sync" and not is_of_blocking_face):
            return met == 1
        place = self._engines.index(engine)
        if place < len(ENGINES) or (is_of_blocking_face and not engine.startswith(os.environ[HTTP])):
            return True
        return not _has_many_cases(item) or met % 3 == place % 3


def _has_many_cases(item: pytest.Item) -> bool:
    markers = item.iter_markers("parametrize")
    # The engines and faces are not among them.
    return math.prod(len(list(marker.args[1])) for marker in markers) > 2


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Measure coverage where it tells something: measuring takes more than half as long again.

    The engines take turns, test by test, with the first case of a test of the suite. All other tests are measured.
    """
    measuring = coverage.Coverage.current()
    target = _target(item)
    if measuring is None or target is None or _is_measured(item, target[0]):
        return (yield)
    measuring.stop()
    try:
        return (yield)
    finally:
        measuring.start()


def _let_coverage_be_forked() -> None:
    """Fork while no other thread is in the middle of a measurement, and have a child tell only of itself.

    A child has the lock of the measurements as it was, but not the thread that would let go of it. And it has all
    that was measured before it, which takes seconds to write down at its end.
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


def _is_measured(item: pytest.Item, engine: str) -> bool:
    test = _test(item)
    case = getattr(item, "callspec", None)
    is_first = case is None or not any(case.indices[name] for name in case.indices if name != TARGET)
    engines: list[str] = item.config.option.limpet_engine
    return is_first and zlib.crc32(test.encode()) % 2 == engines.index(engine) % 2


def _target(item: pytest.Item) -> tuple[str, str] | None:
    """The engine and the face that a test of the suite is asked through."""
    case: Any = getattr(item, "callspec", None)
    found: tuple[str, str] | None = None if case is None else case.params.get(TARGET)
    return found if isinstance(found, tuple) else None


def _test(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


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
