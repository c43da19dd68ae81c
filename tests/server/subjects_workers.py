"""A server in a process of its own, to be killed."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import ClassVar

import nats

from limpet.opening import open_session
from limpet.server.dispatch import Dispatcher
from limpet.server.subjects import PluginSubjects
from tests.processes import Process


class Worker(Process):
    """A process that runs a function of this module."""

    module: ClassVar[str] = "tests.server.subjects_workers"


async def serve(url: str, nats_url: str) -> None:
    """Serve until stdin is closed."""
    session = await open_session(url, clock=None, max_value_bytes=1_000_000, window=None)
    connection = await nats.connect(nats_url)
    served = PluginSubjects(Dispatcher(session.with_value_limit(65_536), "nats"), connection)
    await served.start()
    print(json.dumps({"serving": served.server_id}), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await served.drain()
    await connection.close()
    await session.close()


if __name__ == "__main__":
    asyncio.run(globals()[sys.argv[1]](*sys.argv[2:]))
