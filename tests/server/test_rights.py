"""What a caller learns without the right to see values: nothing that depends on one, whatever it sends.

Two stores are alike but for their values, which are of the same kind and size. A caller without ``reveal`` sends the
same to both. What it is answered must be the same, or it must be refused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from starlette.applications import Starlette

import limpet
from limpet import ManualClock
from limpet.errors import LimpetError, PermissionDenied
from limpet.keys import Span
from limpet.model import Add, Batch, Delete, FieldEquals, Guard, Patch, Put, Touch, Version
from limpet.opening import open_session
from limpet.protocol import engine_msgpack as wire
from limpet.semantic.store import SemanticStore
from limpet.server import events
from limpet.server.access import Scope, create_token, revoke_token, rotate_token
from limpet.server.dispatch import OWN_NAMESPACE, Dispatcher, TrustedCaller
from limpet.server.engine_routes import routes
from limpet.server.http_errors import document_of
from limpet.server.nats_errors import reply_of
from limpet.server.operations import OPERATIONS, Right
from limpet.server.requests import request_of
from limpet.server.service import Service
from limpet.server.settings import ListenAddress, Settings
from limpet.session import Session
from tests.server.engine_support import Guest, Guests
from tests.server.engine_support import Scope as Part
from tests.server.http_support import Face, Scoped, face

PATIENCE_S = 120.0


class Blind:
    """A caller with every right but to see values and to operate the server."""

    name = "blind"
    writer = None

    def may(self, namespace: str, right: Right, spans: Sequence[Span]) -> bool:
        return right not in ("reveal", "admin")


PIN = 4711
SECRETS = (PIN, 4712)
ENVELOPE = "tenant/a/project/b/flag"
COPIED = "tenant/a/project/b/lasting"
LASTING: dict[str, Any] = {"purpose": "feature_flag", "ttlSeconds": 1000}


async def filled(secret: int) -> Session:
    """A store with a secret in values of every kind, in its log, and behind request ids that can be guessed."""
    session = await open_session("memory:", clock=ManualClock(), max_value_bytes=1000, window=None)
    store = limpet.Store(session, "shop")
    await store.put("pin", secret, request_id="first")
    await store.record("r").put({"pin": secret, "x": 1})
    await store.put("raw", str(secret).encode())
    await store.put("o", {"pin": secret})
    await store.put("gone", secret)
    await store.take("gone", request_id="taken")
    await store.put(ENVELOPE, {"pin": secret}, meta={"semantics": {"purpose": "feature_flag"}})
    await store.batch(request_id="added").add("n", secret).commit()
    kept = SemanticStore(store)
    await kept.kv_put(COPIED, {"pin": secret}, writer="a:b", semantics=LASTING, expected_version=0, request_id="kept")
    return session


GUESS: dict[str, Any] = {"value": PIN}
OF_RECORD: dict[str, Any] = {"field": "pin", "equals": PIN}
SEMANTIC: dict[str, Any] = {"lastWriter": "a:b"}
KV_ITEMS_BY: dict[str, Any] = {"lastWriter": "a:b", "requestId": "mine"}
KV_PUT: dict[str, Any] = {"value": {"pin": PIN}, "semantics": {"purpose": "feature_flag"}}
KV_REPEATED: dict[str, Any] = {"value": {"pin": PIN}, "semantics": LASTING, "expectedVersion": 0, "requestId": "kept"}
KV_REPEATED |= SEMANTIC
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("get", {"key": "pin"}),
    ("set", {"key": "pin", "value": PIN, "request_id": "first"}),
    ("set", {"key": "new", "value": PIN}),
    ("delete", {"key": "pin", "expect": GUESS}),
    ("delete", {"key": "pin"}),
    ("list", {}),
    ("entry", {"key": "pin"}),
    ("entry", {"key": "pin", "with_value": False}),
    ("remaining", {"key": "pin"}),
    ("entries", {"keys": ["pin", "none", "r"]}),
    ("children", {}),
    ("delete_prefix", {"prefix": "p"}),
    ("append", {"prefix": "p", "value": 1}),
    ("append", {"prefix": "q", "value": 1, "request_id": "append"}),
    ("delete_prefix", {"prefix": ""}),
    ("entries", {"keys": ["pin", "none", "r"], "with_value": False}),
    ("put", {"key": "pin", "value": 1, "expect": GUESS}),
    ("put", {"key": "pin", "value": PIN, "request_id": "first"}),
    ("put", {"key": "r", "value": 1, "expect": OF_RECORD}),
    ("put", {"key": "pin", "value": 1, "expect": {"version": 9}}),
    ("cas", {"key": "pin", "value": 1, "expect": GUESS}),
    ("cas", {"key": "pin", "value": 1, "expect": {"version": 1}}),
    ("batch", {"writes": [{"op": "create", "key": "pin", "value": PIN, "or_keep": True}]}),
    ("incr", {"key": "pin", "by": 0}),
    ("incr", {"key": "pin", "by": 2**63 - PIN}),
    ("take", {"key": "pin"}),
    ("take", {"key": "gone", "request_id": "taken"}),
    ("touch", {"key": "pin", "ttl": 60, "expect": GUESS}),
    ("touch", {"key": "pin", "ttl": 60}),
    ("fields", {"key": "r", "get": ["pin"]}),
    ("fields", {"key": "r", "swap": {"field": "pin", "expected": PIN, "new": 1}}),
    ("fields", {"key": "r", "swap": {"field": "none", "new": 1}}),
    ("fields", {"key": "r", "set": {"y": 1}}),
    ("fields", {"key": "pin", "set": {"y": 1}}),
    ("batch", {"writes": [], "guards": [{"key": "pin", "expect": GUESS}]}),
    ("batch", {"writes": [{"op": "put", "key": "z", "value": 1}], "guards": [{"key": "r", "expect": OF_RECORD}]}),
    ("batch", {"writes": [{"op": "take", "key": "pin"}]}),
    ("batch", {"writes": [{"op": "add", "key": "pin", "by": 2**63 - PIN}]}),
    ("batch", {"writes": [{"op": "add", "key": "n", "by": PIN}], "request_id": "added"}),
    ("batch", {"writes": [{"op": "put", "key": "pin", "value": PIN}], "request_id": "first"}),
    ("batch", {"writes": [{"op": "set", "key": "r", "fields": {"x": 2}}, {"op": "touch", "key": "pin", "ttl": 5}]}),
    ("scan", {"where": [{"field": "pin", "value": PIN}], "values": False}),
    ("scan", {"where": [{"field": "pin", "op": "lt", "value": PIN + 1}], "values": False, "limit": 1}),
    ("scan", {}),
    ("scan", {"values": False}),
    ("history", {"key": "pin"}),
    ("watch", {"pattern": "*"}),
    ("lock", {"name": "pin", "ttl": 5}),
    ("refresh", {"name": "pin", "token": 1, "ttl": 5}),
    ("unlock", {"name": "pin", "token": 1}),
    ("unlock", {"name": "pin", "reason": "because"}),
    ("locks", {}),
    ("outcome", {"request_id": "first"}),
    ("outcome", {"request_id": "taken"}),
    ("outcome", {"request_id": "added"}),
    ("status", {}),
    ("kv_get", {"key": ENVELOPE}),
    ("kv_put", {"key": ENVELOPE, **KV_PUT, **SEMANTIC, "expectedVersion": 9, "requestId": "mine"}),
    ("kv_put", {"key": ENVELOPE, **KV_PUT, **SEMANTIC, "requestId": "first"}),
    ("kv_put", {"key": COPIED, **KV_REPEATED}),
    ("kv_batch", {"items": [{"op": "put", "key": COPIED, **KV_PUT}], **SEMANTIC, "requestId": "kept"}),
    ("kv_delete", {"key": ENVELOPE, **SEMANTIC, "expectedVersion": 9, "requestId": "mine"}),
    ("kv_list", {"prefix": "tenant/a/"}),
    (
        "kv_batch",
        {"items": [{"op": "put", "key": ENVELOPE, **KV_PUT, "expectedVersion": 9}], **SEMANTIC, "requestId": "mine"},
    ),
]


def test_every_operation_is_asked() -> None:
    assert {name for name, _ in REQUESTS} == set(OPERATIONS)


async def answer(session: Session, name: str, members: dict[str, Any]) -> Any:
    row = OPERATIONS[name]
    try:
        found = await Dispatcher(session, "http").run(row, "shop", request_of(row.request, members), Blind())
        # The one thing that differs by chance.
        return {member: item for member, item in found.items() if member != "store_id"}
    except LimpetError as error:
        return document_of(error), reply_of(error)


@pytest.mark.parametrize(("name", "members"), REQUESTS)
async def test_no_answer_depends_on_a_value(name: str, members: dict[str, Any]) -> None:
    """Twice, because the second answer may tell what the first did."""
    sessions = [await filled(secret) for secret in SECRETS]
    for _ in range(2):
        first, second = [await answer(session, name, members) for session in sessions]
        assert first == second
        assert str(PIN) not in str(first).replace(str(members), "")
    for session in sessions:
        await session.close()


def guarded(*parts: Any, **more: Any) -> Batch:
    guards = tuple(part for part in parts if isinstance(part, Guard))
    writes = tuple(part for part in parts if not isinstance(part, Guard))
    return Batch(guards, writes, **{"request_id": "mine", **more})


ENCODED = str(PIN).encode()
BATCHES = {
    "a guess": guarded(Guard("pin", limpet.equals(PIN))),
    "a guess of a field": guarded(Guard("r", FieldEquals("pin", ENCODED))),
    "a guess of a member": guarded(Guard("o", FieldEquals("pin", ENCODED)), Put("z", b"1")),
    "a guess beside a write": guarded(Guard("pin", limpet.equals(PIN)), Touch("pin", 5000)),
    "a version that is wrong": guarded(Guard("pin", Version(9)), Put("pin", b"1")),
    "an add": guarded(Add("pin", 0)),
    "an add that overflows": guarded(Add("pin", 2**63 - PIN)),
    "a patch": guarded(Patch("r", {"x": b"2"})),
    "a take": guarded(Delete("pin", take=True)),
    "a touch": guarded(Touch("pin", 5000)),
    "a put": guarded(Put("pin", ENCODED)),
    "a put under a known id": guarded(Put("pin", ENCODED), request_id="first", receipt_ms=1000),
    "a put that is looked for in the log": guarded(Put("pin", b"1"), request_id="first", retry_since=0),
    "a put for what was taken": guarded(Put("gone", b"1"), request_id="taken", retry_since=0),
    "a touch for what was put": guarded(Touch("pin", 1), request_id="first", retry_since=0),
    "a touch of a copy": guarded(Touch(f"live/{COPIED}", 5000, family="recoverable")),
    "a touch of a copy, under a known id": guarded(
        Touch(f"live/{COPIED}", 5000, family="recoverable"), request_id="kept", retry_since=0
    ),
    "a delete of a copy": guarded(Delete(f"live/{COPIED}", family="recoverable")),
    "a take of a copy": guarded(Delete(f"live/{COPIED}", take=True, family="recoverable")),
    "a delete for what was taken": guarded(Delete("gone"), request_id="taken", retry_since=0),
}


@pytest.mark.parametrize("what", BATCHES)
async def test_no_commit_of_a_primitive_depends_on_a_value(what: str) -> None:
    found = []
    for secret in SECRETS:
        session = await filled(secret)
        blind = Guests(Guest("blind", Part("shop", "", "read write lock")))
        app = Starlette(routes=routes(session, callers=blind, dispatcher=Dispatcher(session, "http")))
        body = wire.encode(wire.Commits([msgspec.Raw(wire.encode_batch(BATCHES[what]))] * 2))
        headers = {"Authorization": "Bearer blind", "Content-Type": wire.MEDIA}
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://limpet.test") as client:
            answered = await client.post("/v1/shop/engine/commit", content=body, headers=headers)
            feed = await client.post("/v1/shop/engine/changes", content=wire.encode(wire.Changes(0)), headers=headers)
            found.append((answered.content, feed.content))
        await session.close()

    assert found[0] == found[1]
    assert str(PIN).encode() not in found[0][0].replace(b'"pin"', b"")


# Rights that overrule others ------------------------------------------------------


@pytest.fixture
async def made() -> AsyncIterator[Face]:
    async with face() as found:
        found.tokens.callers |= {
            "admin": Scoped("admin", "shop", rights=["admin"]),
            "locker": Scoped("locker", "shop", rights=["lock"]),
            "b": Scoped("b", "shop", "b/"),
        }
        yield found


async def test_a_lock_is_ended_by_force_by_an_admin_with_a_reason(made: Face, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with made.client("shop") as shop, made.client("admin") as admin, made.client("locker") as locker:
        token = (await shop.post("locks/job", json={"ttl": 600})).json()["token"]
        for client, query, status in (
            (locker, "?reason=mine", 403),
            (shop, "?reason=mine", 403),
            (admin, f"?token={token}", 403),
            (admin, "", 403),
            (admin, "?reason=", 400),
            (admin, f"?reason={'x' * 501}", 400),
            (shop, "", 400),
            (shop, f"?token={token}&reason=both", 400),
        ):
            answered = await client.delete(f"locks/job{query}")
            assert answered.status_code == status, (query, answered.text)
        assert [lock["token"] for lock in (await shop.get("locks")).json()["locks"]] == [token]

        assert (await admin.delete("locks/job", headers={"Limpet-Reason": "its holder is gone"})).status_code == 204
        assert (await shop.get("locks")).json()["locks"] == []
        # What the holder writes under its fence is refused from then on.
        fenced = await shop.put("entries/report", json=1, headers={"Limpet-Fence": f"job;{token}"})
        assert fenced.status_code == 409
        assert (await admin.post("call/unlock", json={"name": "job", "reason": "again"})).json() == {"released": False}


async def test_over_nats_nobody_ends_a_lock_by_force(made: Face) -> None:
    row = OPERATIONS["unlock"]
    request = request_of(row.request, {"name": "job", "reason": "because"})
    with pytest.raises(PermissionDenied, match="admin"):
        await made.dispatcher.run(row, "shop", request, TrustedCaller("plugin shop"))


async def test_request_ids_of_two_prefixes_do_not_meet(made: Face) -> None:
    """An id that can be predicted, used by another, would refuse its owner."""
    async with made.client("team") as team, made.client("b") as other, made.client("shop") as shop:
        ours = {"Limpet-Request-Id": "order-17"}
        assert (await other.put("entries/b/x", json=1, headers=ours)).status_code == 201
        assert (await team.put("entries/team/a/x", json=1, headers=ours)).status_code == 201
        assert (await shop.put("entries/c", json=1, headers=ours)).status_code == 201

        for client, key in ((other, "b/x"), (team, "team/a/x"), (shop, "c")):
            assert (await client.put(f"entries/{key}", json=1, headers=ours)).status_code == 201
            refused = await client.put(f"entries/{key}", json=2, headers=ours)
            assert (refused.status_code, refused.json()["key"]) == (412, "order-17")
        history = (await team.get("history/team/a/x")).json()["changes"]
        assert [change["cause"] for change in history] == ["order-17"]
        assert [change["cause"] for change in (await shop.get("history/b/x")).json()["changes"]] == ["b/order-17"]
        assert (await shop.get("outcome/order-17")).json()["applied"]


# A whole server -------------------------------------------------------------------


async def test_what_is_open_ends_at_once_when_its_token_is_revoked(tmp_path: Path) -> None:
    """Streams, waits for changes, and waits for a lock; with a server that looks for itself only every hour."""
    url = f"sqlite:///{tmp_path}/state.db"
    before, events.RECHECK_S = events.RECHECK_S, 3600.0  # type: ignore[misc]
    try:
        async with limpet.open(url, namespace=OWN_NAMESPACE, sweep=False) as own:
            issued = await create_token(own, "shop", [Scope("shop", "", ("read", "reveal", "write", "lock"))])
            headers = {"Authorization": f"Bearer {issued.secret}"}
            async with (
                Service(Settings(url=url, http=ListenAddress("127.0.0.1", 0), auth="tokens")) as service,
                httpx2.AsyncClient(base_url=service.addresses["http"], headers=headers, timeout=PATIENCE_S) as client,
            ):
                assert (await client.post("/v1/shop/locks/job", json={"ttl": 3600})).status_code == 201
                waiting: list[asyncio.Task[Any]] = [
                    asyncio.create_task(read_to_the_end(client)),
                    asyncio.create_task(client.post("/v1/shop/locks/job", json={"ttl": 5, "wait": 30})),
                    asyncio.create_task(
                        client.post(
                            "/v1/shop/engine/changes",
                            content=wire.encode(wire.Changes(1, None, 500, 25.0)),
                            headers={"Content-Type": wire.MEDIA},
                        )
                    ),
                ]
                await asyncio.sleep(1)
                assert not any(task.done() for task in waiting)

                began = time.monotonic()
                await revoke_token(own, issued.id)
                stream, lock, changes = await asyncio.gather(*waiting)
                seconds = time.monotonic() - began

        assert "event: unauthorized" in stream
        assert (lock.status_code, changes.status_code) == (401, 401)
        # Moments, on a quiet machine. A server that waited for the end of a wait would take 24 seconds and more.
        assert seconds < 15
    finally:
        events.RECHECK_S = before  # type: ignore[misc]


async def read_to_the_end(client: httpx2.AsyncClient) -> str:
    async with client.stream("GET", "/v1/shop/watch") as stream:
        return "".join([part async for part in stream.aiter_text()])


async def test_a_retry_is_known_again_after_its_token_was_rotated(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/state.db"
    async with limpet.open(url, namespace=OWN_NAMESPACE, sweep=False) as own:
        issued = await create_token(own, "team", [Scope("shop", "team/", ("read", "reveal", "write"))])
        async with (
            Service(Settings(url=url, http=ListenAddress("127.0.0.1", 0), auth="tokens")) as service,
            httpx2.AsyncClient(base_url=service.addresses["http"], timeout=PATIENCE_S) as client,
        ):

            async def count(secret: str) -> httpx2.Response:
                headers = {"Authorization": f"Bearer {secret}", "Limpet-Request-Id": "once"}
                return await client.post("/v1/shop/incr/team/n", headers=headers)

            assert (await count(issued.secret)).json() == {"value": 1}
            rotated = await rotate_token(own, issued.id, grace=0)
            answered = await count(rotated.secret)
            for _ in range(1000):
                if answered.status_code != 401:
                    break
                await asyncio.sleep(0.05)
                answered = await count(rotated.secret)
            assert answered.json() == {"value": 1}
