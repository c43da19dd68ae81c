"""A Limpet server for tests: ``python -m tests.served PORT FOLDER``.

The first step of a path is a place, made when somebody first asks for it: a store with a clock of its own, which
``POST /place/turn`` sets. Everything else under it is what `limpet.server.engine_routes` serves, to anybody and with
every right. A place whose name begins with ``file`` is a file in the folder, and there again after a restart. Others
are memory: a file does not believe a clock that goes back, as it does from one test to the next.
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
from limpet.engines.memory import MemoryEngine
from limpet.keys import Span
from limpet.model import Window
from limpet.opening import open_session
from limpet.server.dispatch import Dispatcher
from limpet.server.engine_routes import routes
from limpet.server.operations import Right


class Turned(SystemClock):
    """The host's clock, unless it was set."""

    def __init__(self) -> None:
        super().__init__()
        self.set_ms: int | None = None

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000 if self.set_ms is None else self.set_ms


class Root:
    """Whoever asks may do anything."""

    name = "root"

    def may(self, namespace: str, right: Right, spans: Sequence[Span]) -> bool:
        return True

    async def caller_of(self, token: str | None, client: str | None) -> Root:
        return self


class Places:
    """All stores of a server."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._making = asyncio.Lock()
        self._apps: dict[str, tuple[Turned, Starlette]] = {}
        self._ending = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        place = scope["path"].split("/")[1]
        if not re.fullmatch(r"[\w-]+", place):
            await PlainTextResponse("there is no such place", 404)(scope, receive, send)
            return
        clock, app = self._apps.get(place) or await self._make(place)
        if scope["path"] == f"/{place}/turn":
            clock.set_ms = json.loads(await Request(scope, receive).body())
            await PlainTextResponse("turned")(scope, receive, send)
            return
        # Tests of the primitives write locks in forms that no lock has, as an admin with a reason may.
        headers = [*scope["headers"], (b"limpet-reason", b"tests of the primitives")]
        await app({**scope, "headers": headers, "root_path": f"/{place}"}, receive, send)

    def end(self) -> None:
        self._ending.set()

    async def _make(self, place: str) -> tuple[Turned, Starlette]:
        async with self._making:
            if place not in self._apps:
                clock = Turned()
                is_file = place.startswith("file")
                url = f"sqlite:///{self._folder}/{place}.db?synchronous=normal" if is_file else "memory:"
                # Nobody sweeps here: when that happens is for the tests to say.
                window = Window(age_ms_min=0)
                session = await open_session(url, clock=clock, max_value_bytes=10_000_000, window=window)
                if isinstance(session.engine, MemoryEngine):
                    # To clients, whose processes it outlives.
                    session.engine.traits = msgspec.structs.replace(session.engine.traits, durability="process")
                given = routes(session, callers=Root(), dispatcher=Dispatcher(session, "http"), ending=self._ending)
                self._apps[place] = clock, Starlette(routes=given)
            return self._apps[place]


async def serve(port: int, folder: Path) -> None:
    places = Places(folder)

    class Server(uvicorn.Server):
        def handle_exit(self, *signal: Any) -> None:
            places.end()
            super().handle_exit(*signal)

    await Server(uvicorn.Config(places, port=port, log_level="warning", lifespan="off", loop="asyncio")).serve()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), Path(sys.argv[2])))
