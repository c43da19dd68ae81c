"""The replies of a server when its engine fails: the right code, plain words, and no message of the engine.

An engine or a driver may quote a value, and names files, hosts and ports. None of it may be in an answer, on either
interface, or in a line of the log.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import traceback
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import nats
import pytest

import limpet
from limpet import errors
from limpet.errors import (
    Ambiguous,
    Closed,
    Compacted,
    Corrupt,
    InvalidValue,
    LimpetError,
    PermissionDenied,
    RateLimited,
    Unavailable,
)
from limpet.opening import open_session
from limpet.protocol import engine_msgpack as wire
from limpet.protocol.codes import CODES, code_of
from limpet.server import logs
from limpet.server.access import Scope, create_token
from limpet.server.dispatch import OWN_NAMESPACE
from limpet.server.fronts import Boundary, put_boundary
from limpet.server.http_errors import document_of
from limpet.server.nats_errors import reply_of
from limpet.server.service import Service
from limpet.server.settings import ListenAddress, Settings
from limpet.server.wording import Public, engine_error, public_error, public_message
from tests.postgres.support import connected, new_schema
from tests.server.engine_support import Behind

PLANTED = "S3CRETplanted"
ADDRESS = "postgresql://limpet@db.internal:5439/state"
SAID = f"{ADDRESS}: /var/lib/limpet/state.db: DETAIL: Failing row contains ({PLANTED})"
GIVEN_AWAY = (PLANTED, "db.internal", ":5439", "/var/lib", "DETAIL", "state.db")


def made(kind: type[LimpetError]) -> LimpetError:
    """An error with everything in it that must not get out."""
    if kind is RateLimited:
        return RateLimited(SAID, retry_after=7.0)
    if kind is Ambiguous:
        return Ambiguous(SAID, request_id="r-1", since=41)
    if kind is Compacted:
        return Compacted(SAID, oldest=5)
    if kind is InvalidValue:
        return InvalidValue(SAID, path=f"$.{PLANTED}")
    return kind(SAID)


KINDS = [Unavailable, Corrupt, Closed, Ambiguous, RateLimited, PermissionDenied, InvalidValue, Compacted]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_an_engine_keeps_its_kind_and_its_numbers_and_loses_its_words(kind: type[LimpetError]) -> None:
    plain = engine_error(made(kind))

    assert type(plain) is kind
    assert (plain.code, plain.retryable, plain.outcome) == (kind.code, kind.retryable, kind.outcome)
    for text in (str(plain), repr(plain), str(document_of(plain)), str(reply_of(plain)), str(wire.failure_of(plain))):
        assert not [word for word in GIVEN_AWAY if word in text], text
    assert code_of(plain) == CODES[kind]
    for name, item in (("retry_after", 7.0), ("since", 41), ("request_id", "r-1"), ("oldest", 5)):
        if hasattr(made(kind), name):
            assert getattr(plain, name) == item


@pytest.mark.parametrize("kind", [Unavailable, Corrupt, Closed, Ambiguous])
def test_what_only_engines_say_is_worded_wherever_it_was_raised(kind: type[LimpetError]) -> None:
    for text in (str(document_of(made(kind))), str(reply_of(made(kind))), public_message(made(kind))):
        assert not [word for word in GIVEN_AWAY if word in text], text
    again = wire.error_of(wire.failure_of(public_error(made(kind))))
    assert again is not None
    assert again.retryable == (True if kind is Closed else kind.retryable)


def test_the_servers_own_words_stay() -> None:
    class Late(Public, Unavailable):
        pass

    assert document_of(Late("it came too late"))["detail"] == "it came too late"
    assert public_message(errors.NotFound("k")) == "'k' does not exist"
    assert public_message(ValueError(PLANTED)) == "internal error"


async def test_a_boundary_is_an_engine_like_the_one_behind(tmp_path: Path) -> None:
    session = await open_session(f"sqlite:///{tmp_path}/state.db", clock=None, max_value_bytes=1000, window=None)
    put_boundary(session)
    first = session.engine
    assert put_boundary(session).engine is first
    store = limpet.Store(session, "shop")
    await store.index("state")
    await store.record("a").put({"state": "new"})
    assert await store.indexes() == ["state"]
    assert [entry.key async for entry in store.scan(where=limpet.field("state") == "new")] == ["a"]
    await store.unindex("state")
    await session.close()

    plain = await open_session("memory:", clock=None, max_value_bytes=1000, window=None)
    assert isinstance(put_boundary(plain).engine, Boundary)
    await plain.close()


# A whole server ---------------------------------------------------------------


class Server:
    """A server with both faces, a client of each, and all that it answered and logged."""

    def __init__(self, service: Service, client: httpx2.AsyncClient, bus: Any, log: io.StringIO, token: str) -> None:
        self.service = service
        self.client = client
        self.bus = bus
        self.log = log
        self.token = token
        self.answers: list[str] = []

    async def http(self, method: str, path: str, **more: Any) -> httpx2.Response:
        answered = await self.client.request(method, path, **more)
        self.answers.append(f"{answered.headers} {answered.text}")
        return answered

    async def say(self, operation: str, **members: Any) -> dict[str, Any]:
        answered = await self.bus.request(
            f"wording{os.getpid()}.kv.shop.{operation}", json.dumps(members).encode(), timeout=60
        )
        self.answers.append(answered.data.decode())
        reply: dict[str, Any] = json.loads(answered.data)
        return reply


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Everything that is logged by anybody, as the server writes it."""
    stream = io.StringIO()
    handlers = [logging.StreamHandler(stream), logging.StreamHandler(stream)]
    handlers[0].setFormatter(logs.PlainFormatter())
    handlers[1].setFormatter(logs.JSONFormatter())
    root, ours = logging.getLogger(), logging.getLogger("limpet")
    level = ours.level
    ours.setLevel(logging.DEBUG)
    for handler in handlers:
        root.addHandler(handler)
    yield stream
    ours.setLevel(level)
    for handler in handlers:
        root.removeHandler(handler)


@pytest.fixture
async def schema() -> AsyncIterator[str]:
    name = new_schema()
    yield name
    async with connected() as other:
        await other.execute(f'DROP SCHEMA IF EXISTS "{name}" CASCADE')


@pytest.fixture
async def server(schema: str, log: io.StringIO) -> AsyncIterator[Server]:
    url = f"{os.environ['LIMPET_TEST_POSTGRES']}?schema={schema}"
    bus_url = os.environ["LIMPET_TEST_NATS"]
    async with limpet.open(url, namespace=OWN_NAMESPACE, sweep=False) as own:
        scope = Scope("*", "", ("read", "reveal", "write", "lock", "admin"))
        token = (await create_token(own, "all", [scope])).secret
    settings = Settings(
        url=url,
        http=ListenAddress("127.0.0.1", 0),
        auth="tokens",
        nats=bus_url,
        prefix=f"wording{os.getpid()}.kv",
        metric_names="both",
    )
    bus = await nats.connect(bus_url)
    async with (
        Service(settings) as service,
        httpx2.AsyncClient(
            base_url=service.addresses["http"], headers={"Authorization": f"Bearer {token}"}, timeout=60
        ) as client,
    ):
        yield Server(service, client, bus, log, token)
    await bus.close()


def words_of_the_place(schema: str) -> list[str]:
    parts = urlsplit(os.environ["LIMPET_TEST_POSTGRES"])
    place = f"{parts.hostname}:{parts.port}" if parts.port else "host="
    return [PLANTED, "DETAIL", "Failing row", schema, place, "postgresql://", "check constraint"]


async def provoke(server: Server) -> dict[str, Any]:
    """Everything that a caller can do while the database refuses what it is given. Returns some of the answers."""
    value = {"v": PLANTED}
    semantic = {"value": value, "lastWriter": "a:b", "semantics": {"purpose": "checkpoint"}}
    replies = {
        "put": await server.http("PUT", "/v1/shop/entries/boom", json=value),
        "batch": await server.http(
            "POST", "/v1/shop/batch", json={"writes": [{"op": "put", "key": "boom", "value": value}]}
        ),
        "record": await server.http("PATCH", "/v1/shop/records/boom", json={"set": value}),
        "call": await server.http("POST", "/v1/shop/call/set", json={"key": "boom", "value": value}),
        "semantic": await server.http("PUT", "/v1/shop/semantic/tenant/a/project/b/boom", json=semantic),
        "nats": await server.say("set", key="boom", value=value),
        "nats batch": await server.say("batch", writes=[{"op": "put", "key": "boom", "value": value}]),
    }
    await server.bus.publish(f"wording{os.getpid()}.kv.shop.set", json.dumps({"key": "boom", "value": value}).encode())
    place = str(server.client.base_url).replace("://", f"://{server.token}@")
    async with limpet.open(place, namespace="shop", sweep=False) as store:
        for attempt in (store.put("boom", value), store.put("boom", value, meta={"m": PLANTED})):
            with pytest.raises(LimpetError) as refused:
                await attempt
            server.answers.append("".join(traceback.format_exception_only(refused.value)) + repr(refused.value))
            replies["engine"] = refused.value
    for path in ("/readyz", "/healthz", "/metrics", "/"):
        await server.http("GET", path)
    return replies


async def test_a_constraint_of_the_database_gives_no_value_away(server: Server, schema: str) -> None:
    """As any constraint, trigger or policy does, PostgreSQL quotes the whole row when it refuses one."""
    async with connected() as other:
        await other.execute(f"ALTER TABLE \"{schema}\".limpet_entries ADD CONSTRAINT ours CHECK (key NOT LIKE '%boom')")
        replies = await provoke(server)

    assert {replies[name].status_code for name in ("put", "batch", "record", "call", "semantic")} == {400}
    assert replies["put"].json()["code"] == "invalid_value"
    assert replies["put"].json()["retryable"] is False
    assert (
        replies["put"].json()["detail"]
        == "the database behind the store refuses this; its operator can see why in its log"
    )
    assert (replies["nats"]["error_code"], replies["nats"]["code"]) == ("VALIDATION_ERROR", "invalid_value")
    assert isinstance(replies["engine"], InvalidValue)
    text = server.log.getvalue()
    assert "error=VALIDATION_ERROR" in text
    assert "23514" in text
    check(server, schema)


@pytest.mark.slow
async def test_a_table_that_is_away_gives_nothing_away(server: Server, schema: str) -> None:
    async with connected() as other, server.client.stream("GET", "/v1/shop/watch", params={"pattern": "*"}) as stream:
        lines = stream.aiter_lines()
        await anext(lines)
        await other.execute(f'ALTER TABLE "{schema}".limpet_changes RENAME TO away')
        replies = await provoke(server)
        await server.http("GET", "/v1/shop/history/x")
        # Either it is refused, or it begins and waits for the table.
        async with server.client.stream("GET", "/v1/shop/watch", params={"after": "0"}) as another:
            server.answers.append(f"{another.headers}")
            await asyncio.sleep(2)
        await other.execute(f'ALTER TABLE "{schema}".away RENAME TO limpet_changes')
        async with asyncio.timeout(120):
            # The stream goes on by itself when the table is back.
            put = await server.http("PUT", "/v1/shop/entries/after", json=1)
            while put.status_code == 503:
                # On a slow machine the tokens could not be followed for so long that no caller is let in yet.
                await asyncio.sleep(0.1)
                put = await server.http("PUT", "/v1/shop/entries/after", json=1)
            assert put.status_code == 201, put.text
            async for line in lines:
                server.answers.append(line)
                if line.startswith("event:"):
                    break

    assert replies["put"].status_code >= 500
    check(server, schema)


def check(server: Server, schema: str) -> None:
    text = server.log.getvalue()
    assert len(server.answers) > 10
    for word in words_of_the_place(schema):
        found = [line for line in (*server.answers, *text.splitlines()) if word in line]
        # The server says where it is when it starts, which is its operator's to know.
        assert not [line for line in found if "Server ready" not in line], (word, found[:3])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, ValueError, KeyError])
async def test_whatever_an_engine_says_stays_with_the_server(
    kind: type[Exception], log: io.StringIO, tmp_path: Path
) -> None:
    """On SQLite, with an engine in front of it that fails in every way there is."""
    settings = Settings(url=f"sqlite:///{tmp_path}/state.db", http=ListenAddress("127.0.0.1", 0))
    async with Service(settings) as service, httpx2.AsyncClient(base_url=service.addresses["http"]) as client:
        assert (await client.put("/v1/shop/entries/a", json=1)).status_code == 201
        session = _session_of(service)
        boundary = session.engine
        assert isinstance(boundary, Boundary)
        boundary._engine = Saying(session, kind)
        session.engine = boundary
        answers = [
            await client.get("/v1/shop/entries/a"),
            await client.put("/v1/shop/entries/a", json=2),
            await client.get("/v1/shop/scan"),
            await client.get("/v1/shop/history/a"),
            await client.get("/v1/shop/status"),
            await client.post("/v1/shop/locks/a", json={"ttl": 1}),
            await client.get("/v1/shop/watch"),
            await client.get("/readyz"),
            await client.get("/metrics"),
            await client.post("/v1/shop/engine/status", content=b"\x80", headers={"Content-Type": wire.MEDIA}),
            await client.post(
                "/v1/shop/engine/read",
                content=wire.encode(wire.Read(["a"])),
                headers={"Content-Type": wire.MEDIA},
            ),
        ]
        await asyncio.sleep(1.5)

    text = "\n".join([*(f"{answer.headers} {answer.text}" for answer in answers), log.getvalue()])
    # The folder of the test is where the store is.
    for word in (*GIVEN_AWAY[:-1], str(tmp_path)):
        assert word not in text, next(line for line in text.splitlines() if word in line)
    if issubclass(kind, LimpetError):
        assert {answer.json()["code"] for answer in answers[:6]} == {kind.code}
    else:
        assert {answer.status_code for answer in answers[:6]} == {500}


class Saying(Behind):
    """An engine that fails, and says too much."""

    def __init__(self, session: Any, kind: type[Exception]) -> None:
        behind = session.engine._engine
        super().__init__(session)
        self._engine = behind
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        if name in ("read", "scan", "commit", "changes", "status", "due", "trim"):
            return self._fail
        return super().__getattr__(name)

    async def _fail(self, *_: Any, **__: Any) -> Any:
        kind = self._kind
        raise made(kind) if issubclass(kind, LimpetError) else kind(SAID)


def _session_of(service: Service) -> Any:
    """The session behind a service, found by what it closes."""
    return next(
        callback.__self__
        for _, callback in service._parts._exit_callbacks  # type: ignore[attr-defined]
        for callback in [getattr(callback, "__wrapped__", callback)]
        if hasattr(getattr(callback, "__self__", None), "sweeper")
    )
