"""A Limpet server for tests: ``python -m tests.served PORT FOLDER``.

The first step of a path names a store, which is made at the first request for it, with its own clock, which
``POST /name/turn`` sets. ``GET /name/stored/namespace`` counts what a namespace holds. Everything else under it is
served by `limpet.server.engine_routes`, with every right for every caller. A store whose name begins with ``file`` is a
file in the folder, and survives a restart. Others are in memory: a file does not accept a clock that goes back, as it
does from one test to the next.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from limpet.clock import SystemClock
from limpet.engine import Engine
from limpet.engines.memory import MemoryEngine
from limpet.keys import Span
from limpet.model import Window
from limpet.opening import open_session
from limpet.server.dispatch import Dispatcher
from limpet.server.engine_routes import routes
from limpet.server.operations import Right
from tests.lines import count_items


class SettableClock(SystemClock):
    """The host's clock, unless it was set."""

    def __init__(self) -> None:
        super().__init__()
        self.set_ms: int | None = None

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000 if self.set_ms is None else self.set_ms


class Root:
    """The only caller, with every right."""

    name = "root"
    writer = None

    def may(self, namespace: str, right: Right, spans: Sequence[Span]) -> bool:
        return True

    async def caller_of(self, token: str | None, client: str | None) -> Root:
        return self


class Stores:
    """All stores of a server, as one ASGI application."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._making = asyncio.Lock()
        self._apps: dict[str, tuple[SettableClock, Starlette]] = {}
        self._engines: dict[str, Engine] = {}
        self._ending = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        name = scope["path"].split("/")[1]
        if not re.fullmatch(r"[\w-]+", name):
            await PlainTextResponse("not the name of a store", 404)(scope, receive, send)
            return
        clock, app = self._apps.get(name) or await self._make(name)
        if scope["path"] == f"/{name}/turn":
            clock.set_ms = json.loads(await Request(scope, receive).body())
            await PlainTextResponse("turned")(scope, receive, send)
            return
        if scope["path"].startswith(f"/{name}/stored/"):
            held: Any = self._engines[name]
            count = count_items(held._memory.namespaces[scope["path"].rpartition("/")[2]])
            await PlainTextResponse(str(count))(scope, receive, send)
            return
        # Tests of the primitives write locks in forms that no lock has, as an admin with a reason may.
        headers = [*scope["headers"], (b"limpet-reason", b"tests of the primitives")]
        await app({**scope, "headers": headers, "root_path": f"/{name}"}, receive, send)

    def end(self) -> None:
        self._ending.set()

    async def _make(self, name: str) -> tuple[SettableClock, Starlette]:
        async with self._making:
            if name not in self._apps:
                clock = SettableClock()
                is_file = name.startswith("file")
                url = f"sqlite:///{self._folder}/{name}.db?synchronous=normal" if is_file else "memory:"
                # No sweeper runs here: the tests decide when to sweep.
                window = Window(age_ms_min=0)
                session = await open_session(url, clock=clock, max_value_bytes=10_000_000, window=window)
                engine = session.engine
                if isinstance(engine, MemoryEngine):
                    # For its clients, whose processes it outlives.
                    engine.traits = msgspec.structs.replace(engine.traits, durability="process")
                given = routes(session, callers=Root(), dispatcher=Dispatcher(session, "http"), ending=self._ending)
                self._apps[name] = clock, Starlette(routes=given)
                self._engines[name] = engine
            return self._apps[name]


async def serve(port: int, folder: Path) -> None:
    stores = Stores(folder)

    class Uvicorn(uvicorn.Server):
        def handle_exit(self, *signal: Any) -> None:
            stores.end()
            super().handle_exit(*signal)

    await Uvicorn(uvicorn.Config(stores, port=port, log_level="warning", lifespan="off", loop="asyncio")).serve()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), Path(sys.argv[2])))
