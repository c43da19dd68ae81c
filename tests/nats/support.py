"""What tests of the NATS engine share."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import limpet
from limpet.engines.nats.engine import NatsEngine
from limpet.engines.nats.stream import NamespaceStream
from limpet.engines.nats.writer import Writer
from tests.proxy import Proxy


def server() -> str:
    return os.environ["LIMPET_TEST_NATS"]


def engine_of(store: limpet.Store) -> NatsEngine:
    engine = store._session.engine
    assert isinstance(engine, NatsEngine)
    return engine


def stream_of(store: limpet.Store) -> NamespaceStream:
    return engine_of(store)._namespaces[store.name].stream


def writer_of(store: limpet.Store) -> Writer:
    return engine_of(store)._namespaces[store.name].writer


@asynccontextmanager
async def client(url: str = "") -> AsyncIterator[Any]:
    """The driver itself, as another program would use it."""
    import nats

    connected = await nats.connect(url or server())
    try:
        yield connected
    finally:
        await connected.close()


def proxy_of(url: str) -> Proxy:
    """A proxy before a NATS server. A write is a message with headers: nothing else of ours has any."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytes) -> None:
        await reader.readline()
        writer.write(b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\nPING\r\n')
        await reader.readline()
        # The reply goes to the subscribers of its inbox, so subscribe to get it too.
        for inbox in re.findall(rb"HPUB \S+ (\S+) \d+ \d+\r\n", kept):
            writer.write(b"SUB %b 1\r\n" % inbox)

    return Proxy(url, rb"HPUB \$(KV|LMP)\.", greet)
