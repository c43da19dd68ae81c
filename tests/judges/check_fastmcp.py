"""FastMCP on the adapter: a real server and a real client, over streamable HTTP.

`tests.judges.run` runs this file, in the environment that has FastMCP. Its name keeps other runs from collecting it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fastmcp import Client, Context, FastMCP
from fastmcp.server.dependencies import get_session
from fastmcp.server.event_store import EventStore
from fastmcp.server.middleware.caching import ResponseCachingMiddleware
from fastmcp.server.sessions import SessionId, SessionProvider
from fastmcp.utilities.tests import run_server_async
from key_value.aio.protocols import AsyncKeyValue

from limpet.adapters.keyvalue import KeyValue
from tests.engines import ENGINES, unique, url_of

PAGES = 20


def make_server(store: AsyncKeyValue) -> FastMCP:
    """A server whose tools keep notes in a session."""
    server = FastMCP("notes", session_state_store=store)
    server.add_provider(SessionProvider())

    @server.tool
    async def read(page: int, session_id: SessionId) -> None:
        session = await get_session(session_id)
        await session.set(f"page-{page}", "read")

    @server.tool
    async def list_read(session_id: SessionId) -> list[int]:
        session = await get_session(session_id)
        return [page for page in range(PAGES) if await session.get(f"page-{page}") is not None]

    @server.tool
    async def forget(page: int, session_id: SessionId) -> None:
        session = await get_session(session_id)
        await session.delete(f"page-{page}")

    return server


@contextlib.asynccontextmanager
async def connect(store: AsyncKeyValue) -> AsyncIterator[Client[Any]]:
    """A client of a server over streamable HTTP."""
    async with run_server_async(make_server(store)) as url, Client(url) as client:
        yield client


async def read_all(client: Client[Any], session: str) -> list[int]:
    """Call twenty tools at once, then list what they left."""
    calls = (client.call_tool("read", {"page": page, "session_id": session}) for page in range(PAGES))
    await asyncio.gather(*calls)
    found = await client.call_tool("list_read", {"session_id": session})
    return [int(page) for page in found.data]


@pytest.fixture(params=ENGINES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return url_of(request.param, tmp_path)


async def test_twenty_parallel_tools_of_one_session_keep_all_they_set(url: str) -> None:
    async with KeyValue(url, namespace=unique()) as store, connect(store) as client:
        session = (await client.call_tool("create_session", {})).data

        assert await read_all(client, session) == list(range(PAGES))

        await asyncio.gather(
            *(client.call_tool("forget", {"page": page, "session_id": session}) for page in range(0, PAGES, 2))
        )
        found = await client.call_tool("list_read", {"session_id": session})
        assert found.data == list(range(1, PAGES, 2))


async def test_without_merging_they_lose_some(tmp_path: Path) -> None:
    """Why it matters. On a store in memory the calls happen not to overlap; on a file they do."""
    async with (
        KeyValue(f"sqlite:///{tmp_path}/state.db", merge=False) as store,
        connect(store) as client,
    ):
        session = (await client.call_tool("create_session", {})).data
        assert len(await read_all(client, session)) < PAGES


async def test_two_servers_share_a_session(url: str) -> None:
    namespace = unique()
    async with (
        KeyValue(url, namespace=namespace) as one,
        KeyValue(url, namespace=namespace) as other,
        connect(one) as first,
        connect(other) as second,
    ):
        session = (await first.call_tool("create_session", {})).data
        calls = [(page, [first, second][page % 2]) for page in range(PAGES)]
        await asyncio.gather(*(each.call_tool("read", {"page": page, "session_id": session}) for page, each in calls))
        found = await second.call_tool("list_read", {"session_id": session})
        assert found.data == list(range(PAGES))


async def test_an_ended_session_stays_ended(url: str) -> None:
    async with KeyValue(url, namespace=unique()) as store, connect(store) as client:
        session = (await client.call_tool("create_session", {})).data
        await client.call_tool("end_session", {"session_id": session})

        result = await client.call_tool("list_read", {"session_id": session}, raise_on_error=False)
        assert result.is_error


async def test_state_of_a_context_and_events_and_cached_responses_are_kept(url: str) -> None:
    """The three other places where FastMCP takes a store."""
    async with KeyValue(url, namespace=unique()) as store:
        server = FastMCP("all", session_state_store=store)
        server.add_middleware(ResponseCachingMiddleware(cache_storage=store))
        calls: list[int] = []

        @server.tool
        async def square(number: int, context: Context) -> int:
            calls.append(number)
            await context.set_state("last", number)
            assert await context.get_state("last") == number
            return number * number

        async with Client(server) as client:
            assert [(await client.call_tool("square", {"number": 3})).data for _ in range(2)] == [9, 9]
        assert calls == [3]

        events = EventStore(storage=store)
        stored = [await events.store_event("stream", None) for _ in range(3)]
        assert await events.replay_events_after(stored[0], lambda _: asyncio.sleep(0)) == "stream"
        assert len(await store.collections()) >= 3
