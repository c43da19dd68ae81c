"""Who wrote it, as a server says: the name of a token or of a plugin, and never a name that a caller makes up."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest

import limpet
from limpet.errors import InvalidValue
from limpet.model import Batch, Put
from limpet.opening import open_session
from limpet.server.access import Scope as Grant
from limpet.server.access import Tokens, create_token
from limpet.server.namespaces import OWN_NAMESPACE
from limpet.store import Store
from tests.server.engine_support import Guest, Guests, Running, Scope, running
from tests.server.http_support import Scoped, face
from tests.server.subjects_support import Plugins

pytest_plugins = ["tests.server.subjects_fixtures"]

ALL = "read write lock reveal"
GUESTS = Guests(
    Guest("known", Scope("trivia", "", ALL), writer="team-a"),
    Guest("folder", Scope("trivia", "f/", ALL), writer="team-f"),
    Guest("nameless", Scope("trivia", "", ALL)),
)


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(GUESTS) as server:
        yield server


@pytest.mark.parametrize(
    ("token", "own", "shown"),
    [
        ("known", None, "team-a"),
        ("known", "agent-7", "team-a/agent-7"),
        ("nameless", "agent-7", "agent-7"),
        ("nameless", None, None),
        ("folder", "agent-7", "team-f/agent-7"),
    ],
)
async def test_a_store_over_a_server_appears_behind_its_token(
    server: Running, token: str, own: str | None, shown: str | None
) -> None:
    async with limpet.open(server.as_(token), namespace="trivia", sweep=False, writer=own) as store:
        assert (await store.put("f/a", 1, request_id="mine")).writer == shown
        await store.add("f/n")
        await store.delete("f/n")

        # With the same id, the same request: also by a program of another name.
        async with limpet.open(server.as_(token), namespace="trivia", sweep=False, writer="other") as other:
            assert (await other.put("f/a", 1, request_id="mine")).writer == shown
        events = [event for key in ("f/a", "f/n") async for event in store.history(key)]

    assert [(event.op, event.writer) for event in events] == [("put", shown), ("put", shown), ("delete", shown)]
    assert events[0].cause == "mine"


async def test_a_batch_with_a_name_that_is_none_is_refused(server: Running) -> None:
    async with limpet.open(server.as_("nameless"), namespace="trivia", sweep=False) as store:
        for batch in (
            Batch((), (Put("k", b"1"),), request_id="r", writer="x" * 65),
            Batch((), (Put("k", b"1"),), request_id="r", writer="a\nb"),
            # The form in which a name is stored: no caller may send it as a meta.
            Batch((), (Put("k", b"1", meta_json=b'["forged",{}]'),), request_id="r"),
        ):
            with pytest.raises(InvalidValue):
                await store._session.commit("trivia", batch)
        assert await store.entry("k") is None


async def test_http_shows_who_wrote() -> None:
    async with face() as shop:
        caller = Scoped("ann#1", "shop")
        caller.writer = "änn"
        shop.tokens.callers["ann"] = caller
        ann, root = shop.client("ann"), shop.client()

        assert (await ann.put("entries/k", json=1)).status_code == 201
        read = await root.get("entries/k")
        several = (await root.post("read", json={"keys": ["k"]})).json()
        await root.put("entries/k", json=2)
        changes = (await root.get("history/k")).json()["changes"]

    assert json.loads(read.headers["limpet-writer"]) == "änn"
    assert [entry["writer"] for entry in several["entries"]] == ["änn"]
    assert [change["writer"] for change in changes] == ["änn", None]


async def test_a_token_names_what_it_writes() -> None:
    session = await open_session("memory:", clock=None, max_value_bytes=1_000_000, window=None)
    own = Store(session, OWN_NAMESPACE)
    issued = await create_token(own, "team-a", [Grant("trivia", "", ("write",))])
    tokens = Tokens(session)
    await tokens.start()
    try:
        caller = await tokens.caller_of(issued.secret, None)
        assert (caller.writer, caller.name) == ("team-a", f"team-a#{issued.id}")
    finally:
        await tokens.close()
        await session.close()


async def test_a_plugin_names_what_it_writes(sqlite_nats: Plugins) -> None:
    await sqlite_nats.ask("set", key="k", value=1)
    await sqlite_nats.ask("delete", key="k")

    await sqlite_nats.ask("put", key="k", value=2)
    entry = (await sqlite_nats.ask("entry", key="k"))["entry"]
    changes = (await sqlite_nats.ask("history", key="k"))["changes"]

    assert entry["writer"] == "my-plugin"
    assert [(change["op"], change["writer"]) for change in changes] == [
        ("put", "my-plugin"),
        ("delete", "my-plugin"),
        ("put", "my-plugin"),
    ]
