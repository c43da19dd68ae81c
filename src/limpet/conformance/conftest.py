"""The fixtures of the suite.

A test takes ``store``, and perhaps ``elapse``, which lets time pass: by hand where the engine uses our clock or the
server's can be set, else by waiting. A test that opens stores itself takes ``open_store``.

The tests of one file share an opened engine where each of them would open the same URL, and each has a namespace of
its own there. After a test that closed its store, the next one opens the engine again.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import limpet
import limpet.sync
from limpet.conformance.plugin import NOT_JUDGED, Line
from limpet.conformance.support import Blocking, InnerLine, in_thread, stands_still
from limpet.engine import Engine
from limpet.opening import open_engine
from limpet.session import Session

Elapse = Callable[[float], Awaitable[None]]
SetBack = Callable[[float], Awaitable[bool]]
OpenStore = Callable[..., Awaitable[limpet.Store]]
Turn = Callable[[int | None], Awaitable[bool]]


@pytest.fixture
def clock() -> limpet.ManualClock:
    """The clock of all stores of a test, for engines that use ours."""
    return limpet.ManualClock()


@pytest.fixture
def limpet_target() -> tuple[str, str]:
    """The engine's URL and the interface. The plugin gives the values; a run without it gets this error."""
    raise pytest.UsageError("the suite needs its plugin: add -p limpet.conformance.plugin")


@pytest.fixture
def face(limpet_target: tuple[str, str]) -> str:
    """``async`` or ``sync``."""
    return limpet_target[1]


@pytest.fixture
def url(limpet_target: tuple[str, str], request: pytest.FixtureRequest) -> str:
    """Where the stores of this test live."""
    url = limpet_target[0].replace("{unique}", uuid.uuid4().hex)
    if "{tmp}" not in url:
        # A folder takes longer to make than most tests to run.
        return url
    folder: Path = request.getfixturevalue("tmp_path")
    return url.replace("{tmp}", str(folder))


@pytest.fixture
def turn(url: str, request: pytest.FixtureRequest) -> Turn:
    """A function that sets the clock of the server, where a hook can do it; None lets it run."""

    async def turn(now_ms: int | None) -> bool:
        return bool(await in_thread(lambda: request.config.hook.pytest_limpet_turn(url=url, now_ms=now_ms)))

    return turn


@pytest.fixture
def namespace() -> str:
    """The namespace of this test."""
    return f"t-{uuid.uuid4().hex[:12]}"


@pytest_asyncio.fixture(loop_scope="module")
async def open_store(
    url: str, face: str, namespace: str, clock: limpet.ManualClock, turn: Turn
) -> AsyncIterator[OpenStore]:
    """A function that opens stores on the URL of this test; it takes the options of `limpet.open`."""
    async with _opening(url, face, namespace, clock, turn) as open_one:
        yield open_one


@contextlib.asynccontextmanager
async def _opening(
    url: str, face: str, namespace: str, clock: limpet.ManualClock, turn: Turn
) -> AsyncIterator[OpenStore]:
    async with contextlib.AsyncExitStack() as opened:

        async def open_one(**options: Any) -> Any:
            options = {"namespace": namespace, "clock": clock, **options}
            if face == "sync":
                blocking = await asyncio.to_thread(limpet.sync.open, url, **options)
                opened.push_async_callback(asyncio.to_thread, blocking.close)
                return Blocking(blocking)
            store = await limpet.open(url, **options)
            opened.push_async_callback(store.close)
            return store

        async def open_on_right_clock(**options: Any) -> Any:
            store = await open_one(**options)
            if store.traits.clock == "server":
                is_ours = options.get("clock", clock) is clock
                if not await turn(clock.now_ms() if is_ours else None) and "clock" not in options:
                    store = await open_one(**options, clock=limpet.SystemClock())
            return store

        yield open_on_right_clock


@pytest_asyncio.fixture(loop_scope="module")
async def line(url: str, request: pytest.FixtureRequest) -> AsyncIterator[Line]:
    """A way to the engine on which connections can be cut. Where there is no connection, replies are lost anyway."""
    given = request.config.hook.pytest_limpet_line(url=url)
    if given is None:
        pytest.skip(
            f"{NOT_JUDGED}whether each write on {url.partition(':')[0]} is applied once when connections break; "
            "give the suite a way to cut them, by the hook pytest_limpet_line"
        )
    if given is False:
        yield InnerLine(url)
        return
    opened: Line = await in_thread(given.__enter__)
    try:
        yield opened
    finally:
        await in_thread(lambda: given.__exit__(None, None, None))


@pytest_asyncio.fixture(loop_scope="module")
async def open_through(
    line: Line, face: str, namespace: str, clock: limpet.ManualClock, turn: Turn
) -> AsyncIterator[OpenStore]:
    """A function that opens stores by the way that can be cut.

    Their time passes by itself, because a store waits a moment before it retries.
    """
    async with _opening(line.url, face, namespace, clock, turn) as open_one:

        async def open_on_line(**options: Any) -> Any:
            store = await open_one(clock=limpet.SystemClock(), sweep=False, **options)
            if isinstance(line, InnerLine):
                line.attach(store)
            return store

        yield open_on_line


class _ClockOfTest:
    """The clock of shared engines: that of the test which runs now."""

    def __init__(self) -> None:
        self.current: limpet.Clock = limpet.SystemClock()

    def now_ms(self) -> int:
        return self.current.now_ms()

    def monotonic(self) -> float:
        return self.current.monotonic()

    async def sleep(self, seconds: float) -> None:
        await self.current.sleep(seconds)


class SharedEngines:
    """The engines that the tests of one file share, by their URLs."""

    def __init__(self) -> None:
        self.clock = _ClockOfTest()
        self._engines: dict[str, Engine | None] = {}

    async def open(self, url: str, *, changes: bool) -> Engine | None:
        """The engine of a URL; None where each test needs one to itself.

        A URL that ``changes`` from test to test has an engine for each. So has an engine that remembers our clock for
        all namespaces together, and encryption, which keeps the clock it was opened with.
        """
        if changes or "encryption=" in url:
            return None
        if url not in self._engines:
            engine = await open_engine(url, self.clock)
            if engine.traits.clock != "server":
                await engine.close()
                self._engines[url] = None
            else:
                self._engines[url] = engine
        return self._engines[url]

    def forget(self, url: str) -> None:
        """Forget an engine that a test has closed."""
        self._engines.pop(url, None)

    async def close(self) -> None:
        """Close all of them."""
        for engine in self._engines.values():
            if engine is not None:
                await engine.close()


class _LeftOpen:
    """Stands for a shared engine when the session of a test is closed, so that the engine stays open."""

    async def close(self) -> None:
        """Leave the engine to the next test."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_engines() -> AsyncIterator[SharedEngines]:
    """The engines of this file."""
    shared = SharedEngines()
    yield shared
    await shared.close()


@pytest_asyncio.fixture(loop_scope="module")
async def store(
    request: pytest.FixtureRequest,
    limpet_target: tuple[str, str],
    url: str,
    face: str,
    namespace: str,
    clock: limpet.ManualClock,
    turn: Turn,
    shared_engines: SharedEngines,
) -> AsyncIterator[limpet.Store]:
    """A store on an empty namespace."""
    opens = face == "sync" or "open_store" in request.fixturenames
    engine = None if opens else await shared_engines.open(url, changes=url != limpet_target[0])
    if engine is None:
        async with _opening(url, face, namespace, clock, turn) as open_one:
            yield await open_one()
        return
    is_set = await turn(clock.now_ms())
    shared_engines.clock.current = clock if is_set else limpet.SystemClock()
    session = Session(engine, shared_engines.clock.current)
    store = limpet.Store(session, namespace)
    session.sweeper.start()
    yield store
    if session.closed:
        shared_engines.forget(url)
    else:
        session.engine = _LeftOpen()  # type: ignore[assignment]
        await session.close()


@pytest_asyncio.fixture(loop_scope="module")
async def elapse(store: limpet.Store, clock: limpet.ManualClock, turn: Turn) -> Elapse:
    """A function that lets so many seconds pass for the engine."""

    async def elapse(seconds: float) -> None:
        if not stands_still(store):
            await asyncio.sleep(seconds)
            return
        if store.traits.clock == "server":
            # First the server's clock: a sleeper that wakes by ours reads the server's.
            await turn(clock.after(seconds))
        clock.advance(seconds)
        await asyncio.sleep(0.01)

    return elapse


@pytest_asyncio.fixture(loop_scope="module")
async def set_back(store: limpet.Store, clock: limpet.ManualClock, turn: Turn) -> SetBack:
    """A function that sets the engine's clock back by so many seconds; False where it cannot be set."""

    async def set_back(seconds: float) -> bool:
        if not stands_still(store):
            return False
        clock.set_back(seconds)
        if store.traits.clock == "server":
            await turn(clock.now_ms())
        return True

    return set_back
