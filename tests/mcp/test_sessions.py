"""Whole sessions: processes over stdio, HTTP with tokens, subscriptions, every engine."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp_types import ResourceUpdatedNotification

import limpet
from limpet.cli.mcp import _with_token
from limpet.errors import Unavailable
from limpet.mcp import http, resources
from limpet.mcp.http import Anyone, make_app
from limpet.mcp.server import SUBSCRIPTIONS_MAX, make_server
from limpet.server import serve_in_process
from limpet.server.access import Issued, Scope, create_token, revoke_token
from limpet.server.dispatch import OWN_NAMESPACE
from limpet.server.operations import Right
from limpet.server.settings import ListenAddress, Settings
from tests.cli.support import command
from tests.engines import ENGINES, unique, url_of
from tests.mcp.support import Agent, Refused, connected

# The newer protocol has another way, which is tested too.
pytestmark = pytest.mark.filterwarnings("ignore:resources/(un)?subscribe is removed")

ALL: tuple[Right, ...] = ("read", "reveal", "write", "lock")


class Notices:
    """The notifications that a client has received."""

    def __init__(self) -> None:
        self.uris: asyncio.Queue[str] = asyncio.Queue()

    async def __call__(self, message: Any) -> None:
        if isinstance(message, ResourceUpdatedNotification):
            self.uris.put_nowait(message.params.uri)

    async def next(self) -> str:
        return await asyncio.wait_for(self.uris.get(), 30)


# Engines ----------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
async def test_agents_share_a_plan_on_every_engine(engine: str, tmp_path: Path) -> None:
    async with limpet.open(url_of(engine, tmp_path), namespace=unique()) as store:
        server = make_server(store)
        async with connected(server) as one, connected(server) as other:
            start = (await one("put", key="plan", value={"a": 0, "b": 0}, revision=0))["revision"]
            await asyncio.gather(
                one("edit", key="plan", revision=start, set={"/a": 1}),
                other("edit", key="plan", revision=start, set={"/b": 1}),
            )
            found = await one("get", key="plan")
            assert found["value"] == {"a": 1, "b": 1}
            with pytest.raises(Refused, match="/a"):
                await other("put", key="plan", value=0, revision=start)
            with pytest.raises(Refused, match="/a"):
                await other("edit", key="plan", revision=start, set={"/a": 2})

            lock = await one("lock", name="plan")
            with pytest.raises(Refused, match="is held"):
                await other("lock", name="plan")
            await one("append", prefix="log/", value="x", lock="plan", token=lock["token"])
            await one("unlock", name="plan", token=lock["token"])
            changes = await other("wait", prefix="", after=found["revision"])
            assert [change["key"][:4] for change in changes["changes"]] == ["log/"]
            assert len((await other("list", prefix="", values=True))["entries"]) == 2
            await other("delete", key="plan", revision=found["revision"])
            assert not (await one("get", key="plan"))["exists"]


# Resources --------------------------------------------------------------------


async def test_entries_are_resources(agent: Agent, store: limpet.Store) -> None:
    keys = ["plan", "a b/ü?#%", "task/1"]
    for key in keys:
        await store.put(key, {"of": key})

    listed = (await agent.client.list_resources()).resources
    assert [each.name for each in listed] == sorted(keys)
    for each in listed:
        found = await agent.resource(each.uri)
        assert (found["key"], found["value"]) == (each.name, {"of": each.name})
    assert [line["key"] for line in (await agent.resource("limpet://prefix/task/"))["entries"]] == ["task/1"]
    templates = (await agent.client.list_resource_templates()).resource_templates
    assert {each.uri_template for each in templates} == {*resources.TEMPLATES}


async def test_a_list_of_resources_goes_on(agent: Agent, store: limpet.Store) -> None:
    for number in range(60):
        await store.put(f"{number:02}", number)

    first = await agent.client.list_resources()
    second = await agent.client.list_resources(cursor=first.next_cursor)

    assert [each.name for each in (*first.resources, *second.resources)] == [f"{number:02}" for number in range(60)]
    assert second.next_cursor is None


@pytest.mark.parametrize("uri", ["file:///etc/passwd", "limpet://other/x", "limpet://entry/%ff", "limpet://entry/"])
async def test_an_unknown_resource_is_an_error_that_names_those_there_are(agent: Agent, uri: str) -> None:
    with pytest.raises(MCPError, match=r"resources are|not allowed|utf-8"):
        await agent.client.read_resource(uri)
    assert not (await agent("get", key="a"))["exists"]


@pytest.mark.parametrize("uri", ["limpet://entry/task/1", "limpet://prefix/task/", "limpet://prefix/"])
async def test_a_subscriber_is_notified_of_changes_until_it_unsubscribes(store: limpet.Store, uri: str) -> None:
    notices = Notices()
    async with connected(make_server(store), mode="legacy", message_handler=notices) as agent:
        await agent.client.subscribe_resource(uri)
        await store.put("task/1", "open")
        assert await notices.next() == uri
        for number in range(50):
            await store.put("task/1", number)
        last = 0
        while last != 49:
            assert await notices.next() == uri
            found = await agent.resource("limpet://entry/task/1")
            last = found["value"]
        await agent.client.unsubscribe_resource(uri)
        await asyncio.sleep(3 * resources.PAUSE_S)
        while not notices.uris.empty():
            notices.uris.get_nowait()
        await store.delete("task/1")
        await asyncio.sleep(3 * resources.PAUSE_S)
        assert notices.uris.empty()


async def test_many_changes_in_a_row_are_few_notifications(store: limpet.Store) -> None:
    notices = Notices()
    async with connected(make_server(store), mode="legacy", message_handler=notices) as agent:
        await agent.client.subscribe_resource("limpet://prefix/")
        for number in range(500):
            await store.put("count", number)
        await asyncio.sleep(4 * resources.PAUSE_S)
        assert 1 <= notices.uris.qsize() < 50


async def test_a_client_of_the_newer_protocol_listens_on_one_stream(store: limpet.Store) -> None:
    async with connected(make_server(store)) as agent:
        uris = ["limpet://entry/a", "limpet://prefix/b/"]

        async def listen() -> set[str]:
            async with agent.client.listen(resource_subscriptions=uris) as stream:
                await store.put("a", 1)
                first = await anext(aiter(stream))
                await store.put("b/1", 1)
                return {first.uri, (await anext(aiter(stream))).uri}  # type: ignore[union-attr]

        assert await asyncio.wait_for(listen(), 30) == {*uris}
        # The stream has ended; the session goes on.
        assert (await agent("get", key="a"))["value"] == 1


async def test_a_stream_goes_on_after_the_store_has_failed(
    store: limpet.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = store._session.engine
    status, failures = engine.status, asyncio.Event()

    async def fail(name: str) -> Any:
        if not failures.is_set():
            return await status(name)
        raise Unavailable("out of order")

    monkeypatch.setattr(engine, "status", fail)
    monkeypatch.setattr(resources, "RETRY_S", 0.01)
    async with connected(make_server(store)) as agent:

        async def listen() -> None:
            async with agent.client.listen(resource_subscriptions=["limpet://entry/a"]) as stream:
                failures.set()
                await store.put("a", 1)
                await asyncio.sleep(0.2)
                failures.clear()
                await anext(aiter(stream))
                await store.put("a", 2)
                await anext(aiter(stream))

        await asyncio.wait_for(listen(), 30)


async def test_a_stream_that_is_not_allowed_says_why(served: tuple[str, str]) -> None:
    url, store_url = served
    issued = await issue(store_url, Scope("team", "task/", ("read",)))
    async with over_http(url, issued.secret) as agent:
        with pytest.raises(MCPError, match="right"):
            async with agent.client.listen(resource_subscriptions=["limpet://entry/plan"]):
                pass


async def test_a_session_has_a_limit_of_subscriptions(store: limpet.Store) -> None:
    async with connected(make_server(store), mode="legacy") as agent:
        for number in range(SUBSCRIPTIONS_MAX):
            await agent.client.subscribe_resource(f"limpet://entry/{number}")
        await agent.client.subscribe_resource("limpet://entry/0")
        with pytest.raises(MCPError, match="at most"):
            await agent.client.subscribe_resource("limpet://entry/one-more")


async def test_the_tasks_of_a_session_end_with_it(store: limpet.Store) -> None:
    async with connected(make_server(store), mode="legacy") as agent:
        await agent.client.subscribe_resource("limpet://entry/a")
        assert _following()
    for _ in range(100):
        if not _following():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("a task still follows a resource for a session that has ended")


def _following() -> list[str]:
    return [task.get_name() for task in asyncio.all_tasks() if task.get_name() == "limpet-mcp-follow"]


# Processes --------------------------------------------------------------------


def program(url: str, *options: str) -> StdioServerParameters:
    """``limpet mcp`` as a client starts it."""
    first, *rest = command("--url", url, "mcp", *options)
    # The client passes few variables on.
    return StdioServerParameters(command=first, args=rest, env=dict(os.environ))


async def test_two_agents_with_a_process_each_lose_nothing(tmp_path: Path) -> None:
    url, notices = f"sqlite:///{tmp_path}/state.db", Notices()
    async with (
        connected(program(url)) as one,
        connected(program(url), mode="legacy", message_handler=notices) as other,
    ):
        start = (await one("put", key="plan", value={}, revision=0))["revision"]
        await other.client.subscribe_resource("limpet://entry/plan")

        async def work(agent: Agent, name: str) -> None:
            for number in range(20):
                await agent("edit", key="plan", revision=start, set={f"/{name}-{number}": "done"})

        await asyncio.gather(work(one, "one"), work(other, "other"))

        assert len((await one("get", key="plan"))["value"]) == 40
        assert await notices.next() == "limpet://entry/plan"


def test_it_ends_when_its_client_has_closed_the_pipe(tmp_path: Path) -> None:
    done = subprocess.run(
        command("--url", f"sqlite:///{tmp_path}/state.db", "mcp"),
        input=b"not json\n",
        capture_output=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0
    place = f"limpet: serving namespace 'default' of {tmp_path}/state.db to the MCP client on standard input"
    assert done.stderr.decode().splitlines() == [place]


# HTTP -------------------------------------------------------------------------


@asynccontextmanager
async def over_http(
    app_or_url: Any, token: str | None = None, headers: dict[str, str] | None = None, **options: Any
) -> AsyncIterator[Agent]:
    sent = {**(headers or {}), **({} if token is None else {"Authorization": f"Bearer {token}"})}
    async with httpx2.AsyncClient(headers=sent, timeout=30) as client:
        transport = streamable_http_client(app_or_url, http_client=client)
        async with connected(transport, **options) as agent:
            yield agent


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """``limpet mcp`` over HTTP with tokens, as a process: its URL, and that of its store."""
    store = f"sqlite:///{tmp_path_factory.mktemp('mcp')}/state.db"
    words = command("--url", store, "-n", "team", "mcp", "--http", "127.0.0.1:0", "--auth", "tokens")
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("limpet: serving namespace 'team' of "), line + process.stderr.read()
        try:
            yield line.split()[-1], store
        finally:
            process.terminate()
            assert process.wait(30) in (0, -15)


async def issue(url: str, *scopes: Scope) -> Issued:
    async with limpet.open(url, namespace=OWN_NAMESPACE) as own:
        return await create_token(own, "agent", scopes)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_a_token_has_its_rights_and_its_namespace(served: tuple[str, str], mode: str) -> None:
    url, store_url = served
    mine = Scope(unique(), "", ALL)
    full = await issue(store_url, mine)
    blind = await issue(store_url, Scope(mine.namespace, "", ("read", "write")))
    part = await issue(store_url, Scope("*", "task/", ALL))

    async with (
        over_http(url, full.secret, mode=mode) as agent,
        over_http(url, blind.secret, mode=mode) as other,
        over_http(url, part.secret, mode=mode) as third,
    ):
        made = await agent("put", key="plan", value={"secret": "s3cret"}, revision=0)
        seen = await other("get", key="plan")
        assert (seen["is_hidden"], seen["revision"]) == (True, made["revision"])
        assert "s3cret" not in str([seen, await other("list", values=True), await other.resource("limpet://prefix/")])
        with pytest.raises(Refused, match="reveal"):
            await other("edit", key="plan", revision=made["revision"], set={"/a": 1})
        with pytest.raises(Refused, match="lock"):
            await other("lock", name="l")
        with pytest.raises(Refused) as refused:
            await other("put", key="plan", value=1, revision=0)
        assert "s3cret" not in str([refused.value.text, refused.value.members])

        await third("put", key="task/1", value=mode, revision=(await third("get", key="task/1"))["revision"])
        with pytest.raises(Refused, match="right"):
            await third("get", key="plan")
        with pytest.raises(Refused, match="right"):
            await third("list")
        # A client that asks for all resources when it connects goes on.
        assert (await third.client.list_resources()).resources == []
        assert await third.resource("limpet://entry/task/1")
    async with limpet.open(store_url, namespace=mine.namespace) as store:
        assert await store.get("plan") == {"secret": "s3cret"}
        assert await store.namespace("team").get("task/1") == mode


async def test_without_a_valid_token_there_is_nothing(served: tuple[str, str]) -> None:
    url, store_url = served
    issued = await issue(store_url, Scope("team", "", ALL))
    async with limpet.open(store_url, namespace=OWN_NAMESPACE) as own:
        await revoke_token(own, issued.id)

    async with httpx2.AsyncClient() as client:
        for headers in ({}, {"Authorization": "Bearer lmp_no"}, {"Authorization": f"Bearer {issued.secret}"}):
            for _ in range(100):
                response = await client.post(url, json={}, headers=headers)
                if response.status_code == 401:
                    break
                await asyncio.sleep(0.05)
            assert response.status_code == 401
            assert "Bearer" in response.headers["WWW-Authenticate"]


async def test_a_subscription_over_http_ends_with_its_token(served: tuple[str, str]) -> None:
    url, store_url = served
    issued, notices = await issue(store_url, Scope("team", "", ("read",))), Notices()
    async with (
        over_http(url, issued.secret, mode="legacy", message_handler=notices) as agent,
        limpet.open(store_url, namespace="team") as store,
    ):
        await agent.client.subscribe_resource("limpet://entry/news")
        await store.put("news", 1)
        assert await notices.next() == "limpet://entry/news"
        await revoke_token(store.namespace(OWN_NAMESPACE), issued.id)
        await asyncio.sleep(0.5)
        await store.put("news", 2)
        await asyncio.sleep(0.5)
        assert notices.uris.empty()


async def test_a_session_belongs_to_the_token_that_opened_it(served: tuple[str, str]) -> None:
    url, store_url = served
    one, other = [await issue(store_url, Scope("team", "", ALL)) for _ in "12"]
    greeting = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "initialize",
        "params": {
            "protocolVersion": "2025-06-18",
            "capabilities": {},
            "clientInfo": {"name": "test", "version": "1"},
        },
    }
    call = {"jsonrpc": "2.0", "id": 2, "method": "tools/list"}
    accept = {"Accept": "application/json, text/event-stream"}
    async with httpx2.AsyncClient(headers=accept) as client:
        opened = await client.post(url, json=greeting, headers={"Authorization": f"Bearer {one.secret}"})
        session = {"Mcp-Session-Id": opened.headers["Mcp-Session-Id"], "MCP-Protocol-Version": "2025-06-18"}
        for issued, status in ((other, 404), (one, 200)):
            headers = {**session, "Authorization": f"Bearer {issued.secret}"}
            assert (await client.post(url, json=call, headers=headers)).status_code == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Origin": "http://evil.example"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        # Passed on, and refused because it is no message of the protocol.
        ({"Origin": "http://127.0.0.1:8090"}, 400),
    ],
)
async def test_a_web_page_of_another_origin_is_refused(
    store: limpet.Store, headers: dict[str, str], status: int
) -> None:
    settings = Settings(url="memory:", http=ListenAddress("127.0.0.1", 8090))
    app: Any = make_app(make_server(store), Anyone(), settings)
    async with httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app=app, raise_app_exceptions=False), base_url="http://127.0.0.1:8090"
    ) as client:
        async with _lifespan(app):
            response = await client.post(http.PATH, json={}, headers=headers)
        assert response.status_code == status


@asynccontextmanager
async def _lifespan(app: Any) -> AsyncIterator[None]:
    """Starts and stops an application, as uvicorn does."""
    words: asyncio.Queue[Any] = asyncio.Queue()
    answers: asyncio.Queue[Any] = asyncio.Queue()
    task = asyncio.create_task(app({"type": "lifespan", "state": {}}, words.get, answers.put))
    for word in ("startup", "shutdown"):
        await words.put({"type": f"lifespan.{word}"})
        assert (await answers.get())["type"] == f"lifespan.{word}.complete"
        if word == "startup":
            yield
    await task


# In front of another server ---------------------------------------------------


async def test_a_token_for_another_server_shows_what_that_server_shows(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/state.db"
    async with serve_in_process(url, auth="tokens") as server:
        full = await issue(url, Scope("team", "", ALL))
        blind = await issue(url, Scope("team", "", ("read", "write")))
        await _wait_for_token(server.http_url, blind.secret)
        async with (
            limpet.open(_with_token(server.http_url, full.secret), namespace="team") as store,
            limpet.open(_with_token(server.http_url, blind.secret), namespace="team") as hidden,
            connected(make_server(store)) as agent,
            connected(make_server(hidden)) as other,
        ):
            made = await agent("put", key="plan", value={"secret": "s3cret", "a": 1}, revision=0)
            await agent("edit", key="plan", revision=made["revision"], set={"/a": 2})
            seen: list[Any] = [await other("get", key="plan"), await other("list", values=True)]
            assert seen[0]["is_hidden"]
            for tool, rest in (("put", {"value": 1}), ("edit", {"set": {"/a": 3}}), ("delete", {})):
                with pytest.raises(Refused) as refused:
                    await other(tool, key="plan", revision=made["revision"], **rest)
                seen += [refused.value.text, refused.value.members]
            assert "s3cret" not in str(seen)
            assert (await agent("get", key="plan"))["value"] == {"secret": "s3cret", "a": 2}


async def _wait_for_token(url: str, secret: str) -> None:
    """A new token reaches a server within moments."""
    async with httpx2.AsyncClient(headers={"Authorization": f"Bearer {secret}"}) as client:
        for _ in range(200):
            if (await client.get(f"{url}/v1/team/keys")).status_code == 200:
                return
            await asyncio.sleep(0.02)
    raise AssertionError("the token is not known")
