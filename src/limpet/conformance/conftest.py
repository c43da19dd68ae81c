"""The fixtures of the suite.

A test asks for ``store`` and perhaps for ``elapse``, which lets time pass: by hand where the
engine uses our clock or the server's can be set, else by waiting.
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
from limpet.conformance.support import Blocking, in_thread, stands_still

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
    """The engine's URL and the face. The plugin gives the values; this is what a run without it gets."""
    raise pytest.UsageError("the suite needs its plugin: add -p limpet.conformance.plugin")


@pytest.fixture
def face(limpet_target: tuple[str, str]) -> str:
    """``async`` or ``sync``."""
    return limpet_target[1]


@pytest.fixture
def url(limpet_target: tuple[str, str], tmp_path: Path) -> str:
    """Where the stores of this test live."""
    return limpet_target[0].replace("{tmp}", str(tmp_path)).replace("{unique}", uuid.uuid4().hex)


@pytest.fixture
def turn(url: str, request: pytest.FixtureRequest) -> Turn:
    """A function that sets the clock of the server, where somebody knows how; None lets it run."""

    async def turn(now_ms: int | None) -> bool:
        return bool(await in_thread(lambda: request.config.hook.pytest_limpet_turn(url=url, now_ms=now_ms)))

    return turn


@pytest_asyncio.fixture
async def open_store(url: str, face: str, clock: limpet.ManualClock, turn: Turn) -> AsyncIterator[OpenStore]:
    """A function that opens stores on the place of this test; it takes the options of `limpet.open`."""
    namespace = f"t-{uuid.uuid4().hex[:12]}"
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


@pytest_asyncio.fixture
async def store(open_store: OpenStore) -> limpet.Store:
    """A store on an empty namespace."""
    return await open_store()


@pytest_asyncio.fixture
async def elapse(store: limpet.Store, clock: limpet.ManualClock, turn: Turn) -> Elapse:
    """A function that lets so many seconds pass for the engine."""

    async def elapse(seconds: float) -> None:
        if not stands_still(store):
            await asyncio.sleep(seconds)
            return
        if store.traits.clock == "server":
            # First the server's: whoever wakes by ours asks it.
            await turn(clock.after(seconds))
        clock.advance(seconds)
        await asyncio.sleep(0.01)

    return elapse


@pytest_asyncio.fixture
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
