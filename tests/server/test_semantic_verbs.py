"""The semantic verbs over HTTP and NATS: envelopes, conflicts, rights, and namespaces that are audited."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

import limpet
from limpet import ManualClock
from limpet.errors import Conflict, InvalidValue, PermissionDenied
from limpet.plugin.client import error_of
from limpet.semantic.alarm import ConflictAlarm
from limpet.semantic.audit import Audit
from limpet.semantic.rows import rows_of
from limpet.semantic.store import SemanticStore
from limpet.semantic.verify import verify
from limpet.server.audited import AuditedNamespaces
from limpet.server.requests import KV_PAGE_MAX
from limpet.server.service import Service
from limpet.server.settings import ListenAddress, Settings
from limpet.store import Store
from tests.server.http_support import Face, Scoped, face
from tests.server.subjects_support import Plugins, nats_server, serving

pytest_plugins = ["tests.server.subjects_fixtures"]

KEY = "tenant/acme/project/docs/onedrive/delta"
OTHER = "tenant/acme/project/docs/cursor"
FOREIGN = "tenant/rival/project/docs/delta"
SECRET = "s3cr3t"
CHECKPOINT = {"purpose": "checkpoint", "producer": "harvester", "consumerHints": ["search"]}
PUT = {"value": {"token": SECRET}, "lastWriter": "harvester:nightly", "semantics": CHECKPOINT}
BY = {"lastWriter": "harvester:nightly"}
KEYS = "2026:" + "5e" * 32


@pytest.fixture
async def made() -> AsyncIterator[Face]:
    async with face() as found:
        found.tokens.callers["acme"] = Scoped("acme", "shop", "tenant/acme/")
        found.tokens.callers["hand"] = Scoped("hand", "shop", rights=["write"])
        found.tokens.callers["mole"] = Scoped("mole", "shop", rights=["write", "reveal"])
        yield found


@pytest.fixture
async def http(made: Face) -> AsyncIterator[httpx2.AsyncClient]:
    async with made.client("shop") as client:
        yield client


# Over HTTP --------------------------------------------------------------------


async def test_an_entry_comes_back_in_its_envelope(http: httpx2.AsyncClient) -> None:
    put = await http.put(f"semantic/{KEY}", json={**PUT, "requestId": "r-1", "specRef": "adr/12"})

    assert put.status_code == 201
    assert "value" not in put.json()
    found = (await http.get(f"semantic/{KEY}")).json()
    assert (found["key"], found["value"], found["version"]) == (KEY, {"token": SECRET}, 1)
    assert (found["lastWriter"], found["requestId"], found["specRef"]) == ("harvester:nightly", "r-1", "adr/12")
    assert found["semantics"] == CHECKPOINT
    assert found["updatedAt"].endswith("Z")
    assert (await http.put(f"semantic/{KEY}", json=PUT)).status_code == 200


async def test_a_conflict_is_409_with_what_was_found(http: httpx2.AsyncClient) -> None:
    await http.put(f"semantic/{KEY}", json=PUT)

    refused = await http.put(f"semantic/{KEY}", json={**PUT, "expectedVersion": 7, "requestId": "r-2"})

    assert (refused.status_code, refused.headers["Content-Type"]) == (409, "application/problem+json")
    reply = refused.json()
    assert (reply["code"], reply["key"], reply["reason"]) == ("version_conflict", KEY, "guard")
    assert (reply["expectedVersion"], reply["version"], reply["value"]) == (7, 1, {"token": SECRET})
    assert (reply["requestId"], reply["retryable"], reply["outcome"]) == ("r-2", False, "rejected")


@pytest.mark.parametrize("token", ["hand", "blind", "mole"])
async def test_a_conflict_shows_its_value_only_to_those_who_may_read_and_reveal(made: Face, token: str) -> None:
    async with made.client("root") as http:
        await http.put(f"semantic/{KEY}", json=PUT)

    async with made.client(token) as http:
        refused = [
            await http.put(f"semantic/{KEY}", json={**PUT, "value": {}, "expectedVersion": 0}),
            await http.delete(f"semantic/{KEY}", params={**BY, "expectedVersion": 9}),
            await http.post(
                "semantic", json={"items": [{"op": "delete", "key": KEY, "expectedVersion": 3}], **BY}
            ),
        ]  # fmt: skip

    for one in refused:
        assert (one.status_code, one.json()["code"], one.json()["version"]) == (409, "version_conflict", 1)
        assert SECRET not in one.text
        assert "value" not in one.json()


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"value": [1]}, "value"),
        ({"value": SECRET}, "value"),
        ({"lastWriter": "two words"}, "lastWriter"),
        ({"lastWriter": 7}, "lastWriter"),
        ({"semantics": {"purpose": SECRET}}, "semantics.purpose"),
        ({"semantics": {}}, "semantics.purpose"),
        ({"semantics": {"purpose": "lock"}}, "semantics.ttlSeconds"),
        ({"semantics": {"purpose": "cursor", "ttlSeconds": -1}}, "semantics.ttlSeconds"),
        ({"semantics": {"purpose": "cursor", "consumerHints": [""]}}, "semantics.consumerHints[0]"),
        ({"semantics": {"purpose": "cursor", "colour": 1}}, "semantics.colour"),
        ({"expectedVersion": -1}, "expectedVersion"),
        ({"expectedVersion": "1"}, "expectedVersion"),
        ({"requestId": ""}, "requestId"),
        ({"specRef": ""}, "specRef"),
        ({"held": {"key": KEY}}, "held.token"),
        ({"colour": 1}, "colour"),
    ],
)
async def test_what_is_wrong_with_a_request_is_said_of_its_member(
    http: httpx2.AsyncClient, changed: dict[str, Any], field: str
) -> None:
    refused = await http.put(f"semantic/{KEY}", json={**PUT, "value": {}, **changed})

    assert (refused.status_code, refused.json()["code"]) == (400, "invalid_value")
    assert refused.json()["field"] == field
    assert SECRET not in refused.text


@pytest.mark.parametrize("missing", ["value", "lastWriter", "semantics"])
async def test_what_is_missing_is_named(http: httpx2.AsyncClient, missing: str) -> None:
    refused = await http.put(f"semantic/{KEY}", json={name: item for name, item in PUT.items() if name != missing})

    assert (refused.status_code, refused.json()["field"]) == (400, missing)


@pytest.mark.parametrize(
    ("key", "field"),
    [
        ("tenant/Acme/project/docs/delta", "tenant"),
        ("tenant/acme/project//delta", "project"),
        ("tenant/acme/project/docs/a b", "path[0]"),
        ("docs/delta", "key"),
        (f"tenant/acme/project/docs/{'x' * 128}", "key"),
    ],
)
async def test_what_is_wrong_with_a_key_is_said_of_its_part(http: httpx2.AsyncClient, key: str, field: str) -> None:
    for refused in (await http.put(f"semantic/{key}", json=PUT), await http.get(f"semantic/{key}")):
        assert (refused.status_code, refused.json()["code"], refused.json()["field"]) == (400, "invalid_key", field)


async def test_an_entry_is_ended_by_its_version(http: httpx2.AsyncClient) -> None:
    await http.put(f"semantic/{KEY}", json=PUT)

    assert (await http.delete(f"semantic/{KEY}")).json()["field"] == "lastWriter"
    assert (await http.delete(f"semantic/{KEY}", params={**BY, "expectedVersion": 2})).status_code == 409
    assert (await http.delete(f"semantic/{KEY}", params={**BY, "expectedVersion": 1})).status_code == 204
    assert (await http.delete(f"semantic/{KEY}", params=BY)).status_code == 404
    assert (await http.get(f"semantic/{KEY}")).json()["code"] == "not_found"


async def test_a_list_has_the_entries_of_a_purpose_page_by_page(http: httpx2.AsyncClient) -> None:
    for number in range(3):
        await http.put(f"semantic/{KEY}/{number}", json=PUT)
    await http.put(f"semantic/{OTHER}", json={**PUT, "semantics": {"purpose": "cursor"}})

    params: dict[str, Any] = {"prefix": "tenant/acme/", "purpose": "checkpoint", "limit": 2}
    first = (await http.get("semantic", params=params)).json()
    rest = (await http.get("semantic", params={**params, "after": first["cursor"]})).json()

    assert [one["key"] for one in first["entries"]] == [f"{KEY}/0", f"{KEY}/1"]
    assert (first["truncated"], first["cursor"]) == (True, f"{KEY}/1")
    assert [one["key"] for one in rest["entries"]] == [f"{KEY}/2"]
    assert (rest["truncated"], rest["cursor"]) == (False, None)
    assert (await http.get("semantic", params={"prefix": "tenant/acme"})).json()["field"] == "key"
    too_many = await http.get("semantic", params={**params, "limit": KV_PAGE_MAX + 1})
    assert (too_many.status_code, too_many.json()["field"]) == (400, "limit")


async def test_a_batch_happens_whole_or_not_at_all(http: httpx2.AsyncClient) -> None:
    put = {"op": "put", "value": {"at": 1}, "semantics": {"purpose": "cursor"}}
    await http.put(f"semantic/{KEY}", json=PUT)

    refused = await http.post(
        "semantic",
        json={"items": [{**put, "key": OTHER}, {**put, "key": KEY, "expectedVersion": 5}], **BY},
    )
    assert (refused.status_code, refused.json()["key"], refused.json()["version"]) == (409, KEY, 1)
    assert (await http.get(f"semantic/{OTHER}")).status_code == 404

    both = [{**put, "key": OTHER, "expectedVersion": 0}, {"op": "delete", "key": KEY, "expectedVersion": 1}]
    done = await http.post("semantic", json={"items": both, **BY})
    assert [one and one["version"] for one in done.json()["entries"]] == [1, None]


@pytest.mark.parametrize(
    ("items", "field"),
    [
        ([], "items"),
        ([{"op": "take", "key": KEY}], "items[0].op"),
        ([{"op": "delete", "key": KEY, "by": 1}], "items[0].by"),
        ([{"op": "delete", "key": KEY}, {"op": "put", "key": OTHER}], "items[1].value"),
        ([{"op": "delete", "key": "tenant/Acme/project/docs/a"}], "tenant"),
    ],
)
async def test_what_is_wrong_with_a_batch_is_said_of_its_item(
    http: httpx2.AsyncClient, items: list[dict[str, Any]], field: str
) -> None:
    refused = await http.post("semantic", json={"items": items, **BY})

    assert (refused.status_code, refused.json()["field"]) == (400, field)


@pytest.mark.parametrize("header", [None, "Limpet-Request-Id", "Idempotency-Key"])
async def test_a_request_that_comes_twice_is_done_once(http: httpx2.AsyncClient, header: str | None) -> None:
    body = {**PUT, "requestId": "r-9"} if header is None else PUT
    headers = {} if header is None else {header: "r-9"}

    first = await http.put(f"semantic/{KEY}", json=body, headers=headers)
    again = await http.put(f"semantic/{KEY}", json=body, headers=headers)
    other = await http.put(f"semantic/{KEY}", json={**body, "value": {}}, headers=headers)

    assert (first.json()["version"], first.json()["replayed"]) == (1, False)
    assert (again.json()["version"], again.json()["replayed"]) == (1, True)
    assert (other.status_code, other.json()["reason"]) == (409, "stale_request")


async def test_a_write_under_a_lock_ends_with_the_lock(http: httpx2.AsyncClient) -> None:
    lock = "tenant/acme/project/docs/locks/nightly"
    taken = {**PUT, "semantics": {"purpose": "lock", "ttlSeconds": 30}, "expectedVersion": 0}
    token = (await http.put(f"semantic/{lock}", json=taken)).json()["token"]
    held = {**PUT, "held": {"key": lock, "token": token}}

    assert (await http.put(f"semantic/{KEY}", json=held)).status_code == 201
    await http.delete(f"semantic/{lock}", params={**BY, "expectedVersion": 1})
    lost = await http.put(f"semantic/{KEY}", json=held)
    assert (lost.status_code, lost.json()["code"]) == (409, "lock_lost")


# Who may ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token", "operation", "members"),
    [
        ("reader", "kv_get", {"key": KEY}),
        ("blind", "kv_get", {"key": KEY}),
        ("blind", "kv_list", {"prefix": "tenant/"}),
        ("viewer", "kv_put", {"key": KEY, **PUT}),
        ("viewer", "kv_delete", {"key": KEY, **BY}),
        ("viewer", "kv_batch", {"items": [{"op": "delete", "key": KEY}], **BY}),
        ("other", "kv_get", {"key": KEY}),
        ("other", "kv_put", {"key": KEY, **PUT}),
        ("acme", "kv_get", {"key": FOREIGN}),
        ("acme", "kv_put", {"key": FOREIGN, **PUT}),
        ("acme", "kv_delete", {"key": FOREIGN, **BY}),
        ("acme", "kv_list", {"prefix": "tenant/rival/"}),
        ("acme", "kv_list", {"prefix": "tenant/"}),
        ("acme", "kv_batch", {"items": [{"op": "delete", "key": KEY}, {"op": "delete", "key": FOREIGN}], **BY}),
        ("acme", "kv_put", {"key": KEY, **PUT, "held": {"key": FOREIGN, "token": 1}}),
        ("acme", "kv_batch", {"items": [{"op": "delete", "key": KEY}], **BY, "held": {"key": FOREIGN, "token": 1}}),
    ],
)
async def test_what_is_not_theirs_is_refused(made: Face, token: str, operation: str, members: dict[str, Any]) -> None:
    async with made.client("root") as http:
        for key in (KEY, FOREIGN):
            await http.put(f"semantic/{key}", json=PUT)
    before = (await made.dispatcher.store("shop").status()).revision

    async with made.client(token) as http:
        refused = await http.post(f"call/{operation}", json=members)

    assert (refused.status_code, refused.json()["code"]) == (403, "permission_denied")
    assert SECRET not in refused.text
    assert (await made.dispatcher.store("shop").status()).revision == before


async def test_a_caller_of_a_prefix_does_all_that_concerns_it(made: Face) -> None:
    async with made.client("acme") as http:
        assert (await http.put(f"semantic/{KEY}", json=PUT)).status_code == 201
        assert (await http.get("semantic", params={"prefix": "tenant/acme/"})).json()["entries"][0]["key"] == KEY
        conflict = await http.put(f"semantic/{KEY}", json={**PUT, "expectedVersion": 0})
        assert conflict.json()["value"] == {"token": SECRET}


@pytest.mark.parametrize("after", ["a", FOREIGN, "zzz"])
async def test_a_cursor_leads_out_of_no_prefix(made: Face, after: str) -> None:
    async with made.client("root") as http:
        await http.put(f"semantic/{FOREIGN}", json=PUT)
    async with made.client("acme") as http:
        assert (await http.get("semantic", params={"prefix": "tenant/acme/", "after": after})).json()["entries"] == []


# Over NATS --------------------------------------------------------------------


async def test_a_plugin_has_the_same_verbs(nats: Plugins) -> None:
    assert await nats.ask("kv_get", key=KEY) == {"success": True, "exists": False}
    put = await nats.ask("kv_put", key=KEY, **PUT, requestId="r-1")
    assert (put["success"], put["version"], put["requestId"]) == (True, 1, "r-1")
    found = await nats.ask("kv_get", key=KEY)
    assert (found["exists"], found["value"], found["semantics"]) == (True, {"token": SECRET}, CHECKPOINT)
    listed = await nats.ask("kv_list", prefix="tenant/acme/")
    assert [one["key"] for one in listed["entries"]] == [KEY]
    items = [{"op": "delete", "key": KEY, "expectedVersion": 1}]
    assert (await nats.ask("kv_batch", items=items, **BY))["entries"] == [None]
    assert await nats.ask("kv_delete", key=KEY, **BY) == {"success": True, "deleted": False}


async def test_a_plugin_is_told_of_a_conflict(nats: Plugins) -> None:
    await nats.ask("kv_put", key=KEY, **PUT)

    reply = await nats.ask("kv_put", key=KEY, **PUT, expectedVersion=0)

    assert (reply["success"], reply["error_code"], reply["code"]) == (False, "CONFLICT", "version_conflict")
    assert (reply["expectedVersion"], reply["version"], reply["value"]) == (0, 1, {"token": SECRET})
    with pytest.raises(Conflict):
        raise error_of(reply)


async def test_a_plugin_is_told_which_member_is_wrong(sqlite_nats: Plugins) -> None:
    wrong = {**PUT, "semantics": {"purpose": SECRET}}
    for members, code, field in (
        ({"key": "tenant/Acme/project/docs/a", **PUT}, "VALIDATION_ERROR", "tenant"),
        ({"key": KEY, **wrong}, "VALIDATION_ERROR", "semantics.purpose"),
        ({"key": KEY, "value": {}}, "MISSING_FIELD", "lastWriter"),
    ):
        reply = await sqlite_nats.ask("kv_put", **members)
        assert (reply["success"], reply["error_code"], reply["field"]) == (False, code, field)
        assert SECRET not in json.dumps(reply)


async def test_a_plugin_has_entries_of_its_own(sqlite_nats: Plugins) -> None:
    await sqlite_nats.ask("kv_put", "one", key=KEY, **PUT)

    assert (await sqlite_nats.ask("kv_get", "two", key=KEY))["exists"] is False
    assert (await sqlite_nats.ask("kv_list", "two", prefix="tenant/acme/"))["entries"] == []


async def test_a_page_ends_where_a_message_does(sqlite_nats: Plugins) -> None:
    large = {**PUT, "value": {"text": "x" * 60_000}}
    for number in range(20):
        assert (await sqlite_nats.ask("kv_put", key=f"{KEY}/{number:02}", **large))["success"]

    found, after = [], None
    while True:
        page = await sqlite_nats.ask("kv_list", prefix="tenant/acme/", after=after)
        found += [one["key"] for one in page["entries"]]
        after = page["cursor"]
        if not page["truncated"]:
            break

    assert found == [f"{KEY}/{number:02}" for number in range(20)]


async def test_a_conflict_that_no_message_can_hold_is_told_without_its_value(sqlite_nats: Plugins) -> None:
    """What HTTP lets in may be larger than what NATS carries, and silence would tell nothing."""
    semantic = SemanticStore(Store(sqlite_nats.session, "my-plugin"))
    await semantic.kv_put(KEY, {"text": "x" * 990_000}, writer="a:b", semantics={"purpose": "cursor"})
    sqlite_nats.served._connection._max_payload = 900_000

    reply = await sqlite_nats.ask("kv_put", key=KEY, **PUT, expectedVersion=7)

    assert (reply["code"], reply["version"]) == ("version_conflict", 1)
    assert "value" not in reply


async def test_writes_of_a_key_take_turns(sqlite_nats: Plugins) -> None:
    writes = [sqlite_nats.ask("kv_put", key=KEY, **{**PUT, "value": {"n": n}}) for n in range(20)]
    listed = sqlite_nats.ask("kv_list", prefix="tenant/acme/")

    *written, page = await asyncio.gather(*writes, listed)

    assert [one["version"] for one in written] == list(range(1, 21))
    assert page["entries"][0]["value"] == {"n": 19}


# Audited ----------------------------------------------------------------------


def audit() -> Audit:
    return Audit(bytes.fromhex("5e" * 32), key_id="2026")


@pytest.fixture
async def audited() -> AsyncIterator[Face]:
    audited = AuditedNamespaces(audit(), ["shop"])
    async with face(dispatcher={"checks": [audited], "semantic": audited.semantic_store}) as found:
        yield found


async def test_every_change_of_an_audited_namespace_leaves_a_row(audited: Face) -> None:
    async with audited.client("shop") as http:
        await http.put(f"semantic/{KEY}", json=PUT)
        await http.post("semantic", json={"items": [{"op": "delete", "key": KEY}], **BY})
        await http.put(f"semantic/{KEY}", json={**PUT, "expectedVersion": 4})
    store = audited.dispatcher.store("shop")

    rows = [(row["op"], row["directive"]) async for row in rows_of(store)]
    assert rows == [("put", "nightly"), ("delete", "nightly")]
    report = await verify(store, audit())
    assert (report.is_sound, report.unsealed) == (True, 2)


@pytest.mark.parametrize(
    ("operation", "members"),
    [
        ("set", {"value": 1}),
        ("put", {"value": 1}),
        ("delete", {}),
        ("cas", {"value": 1, "expect": {"absent": True}}),
        ("incr", {}),
        ("take", {}),
        ("touch", {"ttl": 1}),
        ("fields", {"set": {"a": 1}}),
        ("batch", {"writes": [{"op": "delete", "key": KEY}]}),
    ],
)
async def test_what_would_leave_no_row_is_refused(audited: Face, operation: str, members: dict[str, Any]) -> None:
    named = {} if operation == "batch" else {"key": KEY}
    async with audited.client("shop") as http:
        await http.put(f"semantic/{KEY}", json=PUT)
        refused = await http.post(f"call/{operation}", json={**named, **members})

        assert (refused.status_code, refused.json()["code"]) == (403, "permission_denied")
        assert "kv_put" in refused.json()["detail"]
        for path in (f"entries/{KEY}", "keys", "scan", f"history/{KEY}", "status", "locks"):
            assert (await http.get(path)).status_code == 200
        assert (await http.post("locks/l", json={"ttl": 30})).status_code == 201
    assert (await verify(audited.dispatcher.store("shop"), audit())).is_sound


async def test_rows_that_cannot_be_sealed_at_the_end_are_left_to_the_next_server(
    audited: Face, caplog: pytest.LogCaptureFixture
) -> None:
    async with AuditedNamespaces(audit(), ["shop"]).sealing(audited.session):
        await audited.session.close()

    assert "a trail has rows that the next server will seal: Closed" in caplog.text


async def test_other_namespaces_are_written_as_ever(audited: Face) -> None:
    async with audited.client("other") as http:
        assert (await http.put("http://limpet.test/v1/bank/entries/k", json=1)).status_code == 201
        put = await http.put(f"http://limpet.test/v1/bank/semantic/{KEY}", json=PUT)

    assert put.status_code == 201
    assert [row async for row in rows_of(audited.dispatcher.store("bank"))] == []


# A whole server ---------------------------------------------------------------


def sealers() -> int:
    return sum(task.get_name() == "limpet-sealer" for task in asyncio.all_tasks())


def settings(url: str, **others: Any) -> Settings:
    return Settings(url=url, http=ListenAddress("127.0.0.1", 0), audit=["platform"], **others)


async def test_a_server_seals_the_trail_and_lets_no_client_write_past_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIMPET_AUDIT_KEYS", KEYS)
    url, place = f"sqlite:///{tmp_path}/state.db", f"v1/platform/semantic/{KEY}"
    bus = nats_server().url

    async with Service(settings(url, nats=bus, prefix="audited.kv")) as service:
        assert sealers() == 1
        async with httpx2.AsyncClient(base_url=service.addresses["http"]) as http:
            assert (await http.put(place, json=PUT)).status_code == 201
            assert (await http.put("v1/platform/entries/k", json=1)).status_code == 403
        async with limpet.open(service.addresses["http"], namespace="platform") as far:
            assert await far.get(KEY) == {"token": SECRET}
            by_hand = SemanticStore(far, audit=audit())
            for write in (far.put("k", 1), far.delete(KEY), by_hand.kv_delete(KEY, writer="a")):
                with pytest.raises(PermissionDenied, match="audited"):
                    await write
            async with far.lock("l", ttl=5):
                pass
            report = await verify(far, audit())
            assert report.is_sound

    assert sealers() == 0
    async with limpet.open(url, namespace="platform") as store:
        report = await verify(store, audit())
    assert (report.is_sound, report.sealed, report.unsealed) == (True, 1, 0)


async def test_a_server_that_only_reads_seals_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIMPET_AUDIT_KEYS", KEYS)
    url = f"sqlite:///{tmp_path}/state.db"
    async with limpet.open(url, namespace="platform") as store:
        await SemanticStore(store, audit=audit()).kv_put(KEY, {}, writer="a", semantics={"purpose": "cursor"})

        async with Service(settings(url, read_only=True)):
            assert sealers() == 0

        assert (await verify(store, audit())).unsealed == 1


async def test_an_audited_namespace_takes_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIMPET_AUDIT_KEYS", raising=False)

    with pytest.raises(InvalidValue, match="LIMPET_AUDIT_KEYS"):
        async with Service(settings(f"sqlite:///{tmp_path}/state.db")):
            pass


async def test_plugins_of_an_audited_namespace_write_through_the_trail(sqlite_nats: Plugins) -> None:
    audited = AuditedNamespaces(audit(), ["platform"])
    options: dict[str, Any] = {"checks": [audited], "semantic": audited.semantic_store}
    async with serving(sqlite_nats.session, prefix="trail.kv", dispatcher=options):
        body = json.dumps({"key": KEY, **PUT}).encode()
        assert (await sqlite_nats.say("trail.kv.platform.kv_put", body))["success"]
        reply = await sqlite_nats.say("trail.kv.platform.set", b'{"key": "k", "value": 1}')
        assert (reply["error_code"], reply["code"]) == ("PERMISSION_DENIED", "permission_denied")

    assert [row["op"] async for row in rows_of(Store(sqlite_nats.session, "platform"))] == ["put"]


async def test_a_server_counts_semantic_writes_and_hears_of_conflicts_that_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # By a clock that is turned by hand, or this would take as long as a window does.
    clock = ManualClock()
    alarm = ConflictAlarm(clock=clock, writes_min=5)
    monkeypatch.setattr("limpet.server.service.ConflictAlarm", lambda **_: alarm)
    served = Settings(url=f"sqlite:///{tmp_path}/state.db", http=ListenAddress("127.0.0.1", 0))
    async with Service(served) as service, httpx2.AsyncClient(base_url=service.addresses["http"]) as http:
        for _ in range(6):
            await http.put(f"v1/platform/semantic/{KEY}", json={**PUT, "expectedVersion": 7})
            clock.advance(60)
        assert (await http.put(f"v1/platform/semantic/{KEY}", json=PUT)).status_code == 201
        text = (await http.get("metrics")).text

    assert "conflicts in namespace platform go on: 5 of 5 writes in 300 s" in caplog.text
    labels = 'namespace="platform",outcome="success",purpose="checkpoint"'
    assert f"limpet_semantic_writes_total{{{labels}}} 1.0" in text
