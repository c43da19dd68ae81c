"""An agent, as the tests of the MCP server play one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from mcp import Client
from mcp_types import TextContent, TextResourceContents


class Refused(Exception):
    """A tool has refused a call. Holds what a model would read, and the same as members."""

    def __init__(self, text: str, members: dict[str, Any]) -> None:
        super().__init__(text)
        self.text, self.members = text, members


class Agent:
    """Calls the tools of a server by a client of the SDK."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def __call__(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """The structured answer of a tool, which its text repeats."""
        result = await self.client.call_tool(tool, arguments)
        (content,) = result.content
        assert isinstance(content, TextContent)
        if result.is_error:
            raise Refused(content.text, result.structured_content)
        assert json.loads(content.text) == result.structured_content
        found: dict[str, Any] = result.structured_content
        return found

    async def resource(self, uri: str) -> Any:
        """What a resource holds."""
        (content,) = (await self.client.read_resource(uri)).contents
        assert isinstance(content, TextResourceContents)
        return json.loads(content.text)


@asynccontextmanager
async def connected(server: Any, **options: Any) -> AsyncIterator[Agent]:
    """An agent that is connected. Its client is entered and left in one task, which a fixture cannot promise."""
    entered: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
    is_over = asyncio.Event()

    async def hold() -> None:
        async with Client(server, **options) as client:
            entered.set_result(client)
            await is_over.wait()

    task = asyncio.create_task(hold())
    task.add_done_callback(lambda _: entered.done() or entered.cancel())
    try:
        yield Agent(await entered)
    finally:
        is_over.set()
        await task
