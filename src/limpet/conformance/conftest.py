"""The fixtures of the suite.

A test asks for ``store`` and perhaps for ``elapse``, which lets time pass: by hand where the
engine uses our clock, by waiting where the clock is a server's.
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
from limpet.conformance.support import Blocking

Elapse = Callable[[float], Awaitable[None]]
OpenStore = Callable[..., Awaitable[limpet.Store]]


@pytest.fixture
def clock() -> limpet.ManualClock:
    """The clock of all stores of a test, for engines that use ours."""
    return limpet.ManualClock()


@pytest.fixture
def face(target: tuple[str, str]) -> str:
    """``async`` or ``sync``."""
    return target[1]


@pytest.fixture
def url(target: tuple[str, str], tmp_path: Path) -> str:
    """Where the stores of this test live."""
    return target[0].replace("{tmp}", str(tmp_path)).replace("{unique}", uuid.uuid4().hex)


@pytest_asyncio.fixture
async def open_store(url: str, face: str, clock: limpet.ManualClock) -> AsyncIterator[OpenStore]:
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
            if store.traits.clock == "server" and "clock" not in options:
                store = await open_one(**options, clock=limpet.SystemClock())
            return store

        yield open_on_right_clock


@pytest_asyncio.fixture
async def store(open_store: OpenStore) -> limpet.Store:
    """A store on an empty namespace."""
    return await open_store()


@pytest_asyncio.fixture
async def elapse(store: limpet.Store, clock: limpet.ManualClock) -> Elapse:
    """A function that lets so many seconds pass for the engine."""

    async def elapse(seconds: float) -> None:
        if store.traits.clock == "host":
            clock.advance(seconds)
            await asyncio.sleep(0.01)
        else:
            await asyncio.sleep(seconds)

    return elapse
