"""How many writes are lost when several writers change one value: ``./dev lost``, or ``python -m bench.lost``.

Every writer does what a tool of an agent does, ten times: it reads the value, works for a moment, and writes it back
with a member of its own. At the end there should be one member for each write. What keeps the value is the only
difference between the rows: a file, the stores that come with frameworks, Limpet on each engine. FastMCP takes part
where it is installed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

import limpet
from limpet.adapters.keyvalue import KeyValue
from tests.servers import nats, postgres, redis

WRITERS: Final = (2, 5, 20)
WRITES: Final = 10
WORK_S: Final = 0.005


class Kept(NamedTuple):
    """One way to keep a value: how a writer adds a member to it, and how many members it has."""

    add: Callable[[str], Awaitable[None]]
    left: Callable[[], Awaitable[int]]


Way = Callable[[], AbstractAsyncContextManager[Kept]]


async def work() -> None:
    """What a writer does between reading and writing. An LLM takes a thousand times as long."""
    await asyncio.sleep(random.uniform(0, WORK_S))


async def measure(way: Way, writers: int) -> int:
    """How many writes are left of those that all writers have made, without an error."""
    async with way() as kept:

        async def write(writer: int) -> None:
            for number in range(WRITES):
                await kept.add(f"{writer}-{number}")

        await asyncio.gather(*map(write, range(writers)))
        return await kept.left()


# A file, and stores of frameworks ---------------------------------------------


def json_file(folder: Path) -> Way:
    """A JSON file, read and written whole."""

    @contextlib.asynccontextmanager
    async def way() -> AsyncIterator[Kept]:
        file = folder / "plan.json"
        file.write_text("{}")

        async def add(name: str) -> None:
            plan = json.loads(file.read_text())
            await work()
            file.write_text(json.dumps({**plan, name: "done"}))

        async def count() -> int:
            return len(json.loads(file.read_text()))

        yield Kept(add, count)

    return way


@contextlib.asynccontextmanager
async def opened(store: Any) -> AsyncIterator[Any]:
    """A store of py-key-value. Some are to be closed, and some have nothing to close."""
    if hasattr(store, "__aenter__"):
        async with store:
            yield store
    else:
        yield store


def key_value(make: Callable[[], Any]) -> Way:
    """A store of py-key-value: get and put."""

    @contextlib.asynccontextmanager
    async def way() -> AsyncIterator[Kept]:
        async with opened(make()) as store:
            await store.put("plan", {})

            async def add(name: str) -> None:
                plan = await store.get("plan")
                await work()
                await store.put("plan", {**plan, name: "done"})

            async def count() -> int:
                return len(await store.get("plan"))

            yield Kept(add, count)

    return way


@contextlib.asynccontextmanager
async def langgraph() -> AsyncIterator[Kept]:
    """The long-term store of LangGraph, in memory: get and put."""
    from langgraph.store.memory import InMemoryStore

    store = InMemoryStore()
    await store.aput(("plans",), "plan", {})

    async def read() -> dict[str, Any]:
        found = await store.aget(("plans",), "plan")
        assert found is not None
        return found.value

    async def add(name: str) -> None:
        plan = await read()
        await work()
        await store.aput(("plans",), "plan", {**plan, name: "done"})

    async def count() -> int:
        return len(await read())

    yield Kept(add, count)


def fastmcp(make: Callable[[], Any]) -> Way:
    """A session of FastMCP, whose tools each set a member of their own, on a store of py-key-value."""

    @contextlib.asynccontextmanager
    async def way() -> AsyncIterator[Kept]:
        from fastmcp import Client, FastMCP
        from fastmcp.server.dependencies import get_session
        from fastmcp.server.sessions import SessionId, SessionProvider

        async with opened(make()) as store:
            server = FastMCP("plans", session_state_store=store)
            server.add_provider(SessionProvider())

            # FastMCP reads the annotations of a tool, which are text in this module.
            async def note(name: Any, session_id: Any) -> None:
                await work()
                await (await get_session(session_id)).set(name, "done")

            async def noted(names: Any, session_id: Any) -> int:
                session = await get_session(session_id)
                return len([name for name in names if await session.get(name)])

            note.__annotations__ = {"name": str, "session_id": SessionId}
            noted.__annotations__ = {"names": list[str], "session_id": SessionId, "return": int}
            server.tool(note)
            server.tool(noted)
            names: list[str] = []
            async with Client(server) as client:
                session = (await client.call_tool("create_session")).data

                async def add(name: str) -> None:
                    names.append(name)
                    await client.call_tool("note", {"name": name, "session_id": session})

                async def count() -> int:
                    found = await client.call_tool("noted", {"names": names, "session_id": session})
                    return int(found.data)

                yield Kept(add, count)

    return way


# Limpet -----------------------------------------------------------------------


def edit(url: str) -> Way:
    """`limpet.Store.edit`: a copy to work on, merged at the end."""

    @contextlib.asynccontextmanager
    async def way() -> AsyncIterator[Kept]:
        async with limpet.open(url, namespace=_unique()) as store:

            async def add(name: str) -> None:
                async with store.edit("plan") as plan:
                    await work()
                    plan[name] = "done"

            async def count() -> int:
                return len(await store.get("plan"))

            yield Kept(add, count)

    return way


def mcp(url: str) -> Way:
    """``limpet mcp``: the tools get and edit, each writer with a client of its own."""

    @contextlib.asynccontextmanager
    async def way() -> AsyncIterator[Kept]:
        from mcp import Client

        from limpet.mcp.server import make_server

        async with limpet.open(url, namespace=_unique()) as store, Client(make_server(store)) as client:

            async def call(tool: str, **arguments: Any) -> Any:
                result = await client.call_tool(tool, {"key": "plan", **arguments})
                assert not result.is_error, result.content
                return result.structured_content

            async def add(name: str) -> None:
                revision = (await call("get"))["revision"]
                await work()
                await call("edit", revision=revision, set={f"/{name}": "done"})

            async def count() -> int:
                return len((await call("get"))["value"])

            yield Kept(add, count)

    return way


def _unique() -> str:
    return f"lost-{random.getrandbits(48):012x}"


# The table --------------------------------------------------------------------


@contextlib.contextmanager
def engines(folder: Path) -> Iterator[dict[str, str]]:
    """The URLs of the engines, with their servers."""
    with contextlib.ExitStack() as servers:
        yield {
            "memory": "memory:lost",
            "SQLite": f"sqlite:///{folder}/state.db",
            "PostgreSQL": servers.enter_context(postgres()).url,
            "Redis": servers.enter_context(redis()).url,
            "NATS": servers.enter_context(nats()).url,
        }


def rows(folder: Path, urls: dict[str, str]) -> Iterator[tuple[str, Way]]:
    """The ways to keep a value, in the order of the table."""
    from key_value.aio.stores.memory import MemoryStore
    from key_value.aio.stores.redis import RedisStore

    def files() -> Any:
        # It comes with FastMCP.
        from key_value.aio.stores.filetree import FileTreeStore

        path = folder / _unique()
        path.mkdir()
        return FileTreeStore(data_directory=path)

    def on_redis() -> RedisStore:
        return RedisStore(url=urls["Redis"])

    def adapter(url: str) -> Callable[[], KeyValue]:
        return lambda: KeyValue(url, namespace=_unique())

    yield "a JSON file", json_file(folder)
    yield "py-key-value in memory", key_value(MemoryStore)
    yield "py-key-value on Redis", key_value(on_redis)
    yield "LangGraph's InMemoryStore", langgraph
    if find_spec("fastmcp") is not None:
        yield "FastMCP's session, in files", fastmcp(files)
        yield "FastMCP's session, on Redis", fastmcp(on_redis)
        for name, url in urls.items():
            yield f"FastMCP's session, on Limpet, {name}", fastmcp(adapter(url))
    for name, url in urls.items():
        yield f"Limpet's edit, {name}", edit(url)
    for name, url in urls.items():
        yield f"limpet mcp, {name}", mcp(url)


async def show(folder: Path, urls: dict[str, str], writers: tuple[int, ...]) -> None:
    """Print the table, a row as soon as it is measured."""
    print(f"| {'writes kept of':40} | " + " | ".join(f"{count * WRITES:4}" for count in writers) + " |")
    print(f"|{'-' * 42}|" + "------|" * len(writers))
    for name, way in rows(folder, urls):
        kept = [await measure(way, count) for count in writers]
        print(f"| {name:40} | " + " | ".join(f"{count:4}" for count in kept) + " |", flush=True)


def main() -> None:
    """Measure what is kept."""
    parser = argparse.ArgumentParser(prog="./dev lost", description=__doc__)
    parser.add_argument(
        "--writers", type=int, nargs="+", default=WRITERS, metavar="N", help="how many write at once: 2 5 20"
    )
    writers = tuple(parser.parse_args().writers)
    with tempfile.TemporaryDirectory(prefix="limpet-lost-") as name, engines(Path(name)) as urls:
        asyncio.run(show(Path(name), urls, writers))


if __name__ == "__main__":
    main()
