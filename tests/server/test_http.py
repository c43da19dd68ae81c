"""HTTP: routes, entity tags, headers and problems, by requests to the application itself."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import msgspec
import pytest
from starlette.routing import Match, Route

import limpet
from limpet import errors
from limpet.clock import ManualClock
from limpet.protocol.codes import CODES
from limpet.server.dispatch import Dispatcher
from limpet.server.engine_routes import routes as primitives
from limpet.server.http import VerbRouter, streams_of
from limpet.server.http_routes import ENDPOINTS
from limpet.server.operations import OPERATIONS
from tests.server.http_support import Face, face, until

RECORD = "application/vnd.limpet.record+json"
BYTES = "application/octet-stream"
ROOT = "http://limpet.test"


@pytest.fixture
async def made() -> AsyncIterator[Face]:
    async with face() as found:
        yield found


@pytest.fixture
async def http(made: Face) -> AsyncIterator[httpx2.AsyncClient]:
    async with made.client() as client:
        yield client


def problem(response: httpx2.Response, status: int, code: str) -> dict[str, Any]:
    """The problem document of a response, which must be this one."""
    document: dict[str, Any] = response.json()
    assert (response.status_code, document["code"]) == (status, code), document
    assert response.headers["Content-Type"] == "application/problem+json"
    assert document["status"] == status
    assert document["type"] == f"urn:limpet:{code}"
    assert document["title"]
    assert document["detail"]
    return document


# Entries ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [None, True, 1, 1.0, -0.0, 1e22, "text", [], {}, {"a": [1, {"b": "\0 é"}]}, 2**63 - 1]
)
async def test_a_json_value_comes_back_as_it_was(http: httpx2.AsyncClient, value: Any) -> None:
    body = msgspec.json.encode(value)
    put = await http.put("entries/k", content=body, headers={"Content-Type": "application/json; charset=UTF-8"})
    got = await http.get("entries/k")

    assert (put.status_code, got.status_code) == (201, 200)
    assert got.headers["Content-Type"] == "application/json"
    assert repr(msgspec.json.decode(got.content)) == repr(value)


async def test_raw_bytes_go_both_ways_as_they_are(http: httpx2.AsyncClient) -> None:
    blob = bytes(range(256))
    await http.put("entries/k", content=blob, headers={"Content-Type": BYTES})

    got = await http.get("entries/k")
    assert got.headers["Content-Type"] == BYTES
    assert got.content == blob


async def test_a_record_is_put_and_read_as_its_fields(http: httpx2.AsyncClient) -> None:
    fields = {"state": "new", "blob": {"$bytes": "/w=="}, "odd": {"$json": {"$bytes": "x"}}}
    await http.put("entries/k", content=msgspec.json.encode(fields), headers={"Content-Type": RECORD})

    got = await http.get("entries/k")
    assert got.headers["Content-Type"] == RECORD
    assert got.json() == fields
    assert (await http.get("records/k")).json() == fields


@pytest.mark.parametrize(
    "key",
    ["a", "a/b", "/a", "a//b", "a/", "%", "%2F", "a b", "a+b", "?", "#", ";", "é", "日本", "a\nb\n", "entries/x", "*"],
)
async def test_any_key_can_be_named_in_a_path(http: httpx2.AsyncClient, key: str) -> None:
    path = "".join(f"%{byte:02X}" for byte in key.encode())
    put = await http.put(f"{ROOT}/v1/shop/entries/{path}", json=key)

    assert put.status_code == 201
    assert put.json()["key"] == key
    assert (await http.get("keys")).json()["keys"] == [key]


async def test_keys_that_a_client_would_resolve_go_by_the_call(http: httpx2.AsyncClient) -> None:
    for key in (".", "..", "a/../b"):
        assert (await http.post("call/put", json={"key": key, "value": 1})).status_code == 200

    assert (await http.get("keys")).json()["keys"] == [".", "..", "a/../b"]


async def test_the_headers_tell_what_an_entry_is(http: httpx2.AsyncClient) -> None:
    meta = {"by": "Zoë"}
    put = await http.put("entries/k", json=1, headers={b"Limpet-TTL": b"60", b"Limpet-Meta": msgspec.json.encode(meta)})
    got = await http.get("entries/k")
    head = await http.head("entries/k")

    for response in (put, got, head):
        assert response.headers["ETag"] == '"1"'
        assert response.headers["Limpet-Version"] == response.headers["Limpet-Revision"] == "1"
        assert response.headers["Limpet-Expires-At"].endswith("Z")
        assert response.headers["Last-Modified"].endswith("GMT")
        assert msgspec.json.decode(response.headers["Limpet-Meta"]) == meta
        assert response.headers["Cache-Control"] == "no-store"
        assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert head.content == b""
    assert head.headers["Content-Type"] == "application/json"
    assert "Access-Control-Allow-Origin" not in got.headers


async def test_a_large_meta_stays_out_of_the_headers(http: httpx2.AsyncClient) -> None:
    await http.post("call/put", json={"key": "k", "value": 1, "meta": {"m": "x" * 8000}})

    assert "Limpet-Meta" not in (await http.get("entries/k")).headers
    assert len((await http.post("call/entry", json={"key": "k"})).json()["entry"]["meta"]["m"]) == 8000


async def test_creating_is_201_and_replacing_200(http: httpx2.AsyncClient) -> None:
    statuses = [(await http.put("entries/k", json=turn)).status_code for turn in range(3)]

    assert statuses == [201, 200, 200]


async def test_a_key_that_is_not_there_is_404(http: httpx2.AsyncClient) -> None:
    for response in (
        await http.get("entries/k"),
        await http.delete("entries/k"),
        await http.get("records/k"),
        await http.post("take/k"),
        await http.post("touch/k", json={"ttl": 5}),
        await http.patch("records/k", json={"set": {"a": 1}, "if_exists": True}),
    ):
        assert problem(response, 404, "not_found")["key"] == "k"
    assert (await http.head("entries/k")).status_code == 404


async def test_deleting_is_204(http: httpx2.AsyncClient) -> None:
    await http.put("entries/k", json=1)

    deleted = await http.delete("entries/k")
    assert (deleted.status_code, deleted.content) == (204, b"")
    assert (await http.get("entries/k")).status_code == 404


# Entity tags ------------------------------------------------------------------

# What a GET names, and whether it has what there is, which is at revision 2.
KNOWN = {
    '"2"': True,
    'W/"2"': True,
    '"1", "2"': True,
    '"1","x" , W/"2"': True,
    "*": True,
    '"1"': False,
    '"02"': False,
    '"x"': False,
    '""': False,
}


@pytest.mark.parametrize(("tags", "is_known"), KNOWN.items())
async def test_a_value_that_the_caller_has_is_304(http: httpx2.AsyncClient, tags: str, is_known: bool) -> None:
    await http.put("entries/other", json=0)
    await http.put("entries/k", json=1)

    for method in ("GET", "HEAD"):
        got = await http.request(method, "entries/k", headers={"If-None-Match": tags})
        assert got.status_code == (304 if is_known else 200)
        assert got.headers["ETag"] == '"2"'
        assert not is_known or got.content == b""


async def test_several_lines_of_if_none_match_are_one_list(http: httpx2.AsyncClient) -> None:
    await http.put("entries/k", json=1)

    got = await http.get("entries/k", headers=[("If-None-Match", '"7"'), ("If-None-Match", '"1"')])
    assert got.status_code == 304


# What a write expects of a key at revision 2, and what comes of it; and of a key that is not there.
EXPECTED = [
    ({"If-Match": '"2"'}, 200, 412),
    ({"If-Match": "*"}, 200, 412),
    ({"If-None-Match": "*"}, 412, 201),
    ({"If-Match": '"1"'}, 412, 412),
    ({"If-Match": 'W/"2"'}, 412, 412),
    ({"If-Match": '"02"'}, 412, 412),
    ({"If-Match": '"two"'}, 412, 412),
    ({"If-Match": '"99999999999999999999999"'}, 412, 412),
    ({"If-Match": '"1", "2"'}, 400, 400),
    ({"If-Match": "2"}, 400, 400),
    ({"If-Match": ""}, 400, 400),
    ({"If-None-Match": '"2"'}, 400, 400),
    ({"If-Match": '"2"', "If-None-Match": "*"}, 400, 400),
]


@pytest.mark.parametrize(("headers", "there", "gone"), EXPECTED)
async def test_a_write_happens_only_if_its_tags_agree(
    http: httpx2.AsyncClient, headers: dict[str, str], there: int, gone: int
) -> None:
    await http.put("entries/other", json=0)
    await http.put("entries/k", json="old")

    put = await http.put("entries/k", json="new", headers=headers)
    assert put.status_code == there
    assert (await http.get("entries/k")).json() == ("new" if there < 300 else "old")
    assert (await http.put("entries/none", json=1, headers=headers)).status_code == gone


async def test_a_refused_write_reports_what_it_found_and_no_value(http: httpx2.AsyncClient) -> None:
    await http.put("entries/k", json="secret")

    refused = await http.put("entries/k", json=2, headers={"If-Match": '"9"'})
    found = problem(refused, 412, "conflict")
    assert (found["key"], found["expected"], found["version"], found["revision"]) == ("k", "revision 9", 1, 1)
    assert "secret" not in refused.text


@pytest.mark.parametrize("verb", ["delete", "patch", "incr", "take", "touch"])
async def test_every_write_honours_if_match(http: httpx2.AsyncClient, verb: str) -> None:
    async def write(tag: str) -> httpx2.Response:
        headers = {"If-Match": tag}
        if verb == "delete":
            return await http.delete("entries/k", headers=headers)
        if verb == "patch":
            return await http.patch("records/k", json={"set": {"a": 2}}, headers=headers)
        return await http.post(f"{verb}/k", json={"ttl": 9} if verb == "touch" else {}, headers=headers)

    kind = RECORD if verb == "patch" else "application/json"
    await http.put("entries/k", content=b'{"a":1}' if verb == "patch" else b"1", headers={"Content-Type": kind})

    problem(await write('"7"'), 412, "conflict")
    assert (await write('"1"')).status_code in (200, 204)


# What else a write says -------------------------------------------------------


async def test_a_time_to_live_is_given_by_header_or_query_and_not_by_both(http: httpx2.AsyncClient) -> None:
    assert (await http.put("entries/a", json=1, headers={"Limpet-TTL": "60"})).json()["expires_at"] is not None
    assert (await http.put("entries/a?ttl=0.5", json=1)).json()["expires_at"] is not None
    assert (await http.put("entries/a?ttl=keep", json=1)).json()["expires_at"] is not None
    assert (await http.put("entries/a", json=1)).json()["expires_at"] is None
    problem(await http.put("entries/a?ttl=5", json=1, headers={"Limpet-TTL": "5"}), 400, "invalid_value")


async def test_an_expired_entry_is_gone() -> None:
    clock = ManualClock()
    async with face(clock=clock) as made, made.client() as http:
        await http.put("entries/k?ttl=10", json=1)
        clock.advance(10)

        assert (await http.get("entries/k")).status_code == 404
        assert (await http.put("entries/k", json=1, headers={"If-None-Match": "*"})).status_code == 201


@pytest.mark.parametrize("header", ["Limpet-Request-Id", "Idempotency-Key"])
async def test_a_repeated_request_gets_the_first_answer(http: httpx2.AsyncClient, header: str) -> None:
    first = await http.post("incr/n", headers={header: '"once"'})
    again = await http.post("incr/n", headers={header: "once"})

    assert first.json() == again.json() == {"value": 1}
    assert (await http.get("outcome/once")).json()["applied"] is True
    assert (await http.get("outcome/never")).json() == {"applied": False}


async def test_a_request_id_that_was_used_for_something_else_is_a_conflict(http: httpx2.AsyncClient) -> None:
    await http.post("incr/n", headers={"Limpet-Request-Id": "once"})

    problem(await http.post("incr/m", headers={"Limpet-Request-Id": "once"}), 412, "conflict")


async def test_a_deletion_that_is_repeated_is_204_again(http: httpx2.AsyncClient) -> None:
    await http.put("entries/k", json=1)
    statuses = [(await http.delete("entries/k", headers={"Limpet-Request-Id": "once"})).status_code for _ in range(2)]

    assert statuses == [204, 204]


async def test_a_write_behind_a_fence_needs_the_lock(http: httpx2.AsyncClient) -> None:
    token = (await http.post("locks/a%2Fb;c", json={"ttl": 30})).json()["token"]

    good, bad = {"Limpet-Fence": f"a%2Fb%3Bc;{token}"}, {"Limpet-Fence": f"a/b;c;{token + 1}"}
    assert (await http.put("entries/k", json=1, headers=good)).status_code == 201
    assert problem(await http.put("entries/k", json=2, headers=bad), 409, "lock_lost")["name"] == "a/b;c"
    assert (await http.patch("records/r", json={"set": {"a": 1}}, headers=good)).status_code == 201
    problem(await http.patch("records/r", json={"set": {"a": 1}}, headers=bad), 409, "lock_lost")


# Records, counters, pages, batches --------------------------------------------


async def test_fields_are_set_dropped_read_and_swapped(http: httpx2.AsyncClient) -> None:
    made = await http.patch("records/job", json={"set": {"state": "new", "tries": 0, "note": "x"}})
    changed = await http.patch("records/job", json={"set": {"tries": 1}, "unset": ["note"], "ttl": 60})

    assert (made.status_code, changed.status_code) == (201, 200)
    assert changed.headers["ETag"] == '"2"'
    assert changed.json()["expires_at"] is not None
    assert (await http.get("records/job")).json() == {"state": "new", "tries": 1}
    assert (await http.get("records/job?field=tries&field=nothing")).json() == {"tries": 1}
    swap = {"field": "state", "expected": "new", "new": "claimed"}
    assert [(await http.post("swap/job", json=swap)).json() for _ in range(2)] == [
        {"swapped": True},
        {"swapped": False},
    ]
    assert (await http.post("swap/job", json={"field": "owner", "new": "me"})).json() == {"swapped": True}


async def test_a_counter_counts_and_a_value_is_taken_once(http: httpx2.AsyncClient) -> None:
    assert (await http.post("incr/n")).json() == {"value": 1}
    assert (await http.post("incr/n", json={"by": -3})).json() == {"value": -2}
    assert (await http.post("take/n")).json() == {"value": -2}
    assert (await http.post("take/n")).status_code == 404


async def test_touching_changes_only_when_a_key_expires(http: httpx2.AsyncClient) -> None:
    await http.put("entries/k", json=1)

    touched = await http.post("touch/k", json={"ttl": 60})
    assert (touched.status_code, touched.json()["version"]) == (200, 1)
    assert touched.json()["expires_at"] is not None
    assert (await http.post("touch/k?ttl=never")).json()["expires_at"] is None


async def test_pages_go_on_after_their_cursor(http: httpx2.AsyncClient) -> None:
    for number in range(5):
        await http.put(f"entries/job/{number}", json={"n": number})
    await http.put("entries/other", json=0)

    keys = (await http.get("keys", params={"prefix": "job/", "limit": 3})).json()
    rest = (await http.get("keys", params={"prefix": "job/", "after": keys["cursor"]})).json()
    assert [*keys["keys"], *rest["keys"]] == [f"job/{number}" for number in range(5)]
    assert (keys["truncated"], rest["truncated"], rest["cursor"]) == (True, False, None)

    found = (await http.get("scan", params={"prefix": "job/", "limit": 2, "where": ["n:ge:1", "n:ne:2"]})).json()
    assert [entry["value"]["n"] for entry in found["entries"]] == [1, 3]
    assert (found["truncated"], found["cursor"]) == (True, "job/3")
    body = {"prefix": "job/", "where": [{"field": "n", "op": "in", "value": [0, 4]}], "values": False}
    posted = (await http.post("scan", json=body)).json()
    assert [entry["key"] for entry in posted["entries"]] == ["job/0", "job/4"]
    assert "value" not in posted["entries"][0]
    assert (await http.get("scan?where=n:exists&limit=1")).json()["entries"][0]["key"] == "job/0"


async def test_pages_in_reverse_go_on_before_their_cursor(http: httpx2.AsyncClient) -> None:
    for number in range(5):
        await http.put(f"entries/job/{number}", json={"n": number})
    backwards = {"prefix": "job/", "reverse": "true"}

    keys = (await http.get("keys", params={**backwards, "limit": 3})).json()
    rest = (await http.get("keys", params={**backwards, "after": keys["cursor"]})).json()
    found = (await http.get("scan", params={**backwards, "limit": 2, "where": "n:ne:3"})).json()
    posted = (await http.post("scan", json={"reverse": True, "after": found["cursor"]})).json()

    assert [*keys["keys"], *rest["keys"]] == [f"job/{number}" for number in (4, 3, 2, 1, 0)]
    assert [entry["key"] for entry in found["entries"]] == ["job/4", "job/2"]
    assert [entry["key"] for entry in posted["entries"]] == ["job/1", "job/0"]
    problem(await http.get("keys", params={"reverse": "yes"}), 400, "invalid_value")


async def test_the_keys_of_a_prefix_are_deleted(http: httpx2.AsyncClient) -> None:
    for number in range(5):
        await http.put(f"entries/job/{number}", json=number)
    await http.put("entries/other", json=0)

    first = await http.delete("keys", params={"prefix": "job/", "limit": 3})
    rest = await http.delete("keys", params={"prefix": "job/"})

    assert (first.json(), rest.json()) == ({"deleted": 3, "truncated": True}, {"deleted": 2, "truncated": False})
    assert (await http.get("keys")).json()["keys"] == ["other"]
    problem(await http.delete("keys"), 400, "invalid_value")
    problem(await http.delete("keys", params={"prefix": "job/", "limit": 0}), 400, "invalid_value")


async def test_children_are_one_level_of_keys(http: httpx2.AsyncClient) -> None:
    for key in ("job/1", "job/2/a", "job/2/b", "other"):
        await http.put(f"entries/{key}", json=0)

    whole = (await http.get("children", params={"prefix": "job/"})).json()
    first = (await http.get("children", params={"limit": 1})).json()
    rest = (await http.get("children", params={"after": first["cursor"]})).json()

    assert whole == {
        "children": [
            {"key": "job/1", "folder": False, "keys": 1},
            {"key": "job/2/", "folder": True, "keys": 2},
        ],
        "truncated": False,
        "cursor": None,
    }
    assert (first["truncated"], first["cursor"]) == (True, "job/")
    assert [child["key"] for child in rest["children"]] == ["other"]
    problem(await http.get("children", params={"delimiter": ""}), 400, "invalid_value")


async def test_the_namespaces_are_listed(http: httpx2.AsyncClient) -> None:
    await http.put("entries/k", json=0)
    await http.put(f"{ROOT}/v1/trivia/entries/k", json=0)

    assert (await http.get(f"{ROOT}/v1/namespaces")).json() == {"namespaces": ["shop", "trivia"]}


async def test_a_counter_keeps_a_minimum_or_a_maximum(http: httpx2.AsyncClient) -> None:
    assert (await http.post("incr/n", json={"maximum": 7, "ttl_if_new": 60})).json() == {"value": 7}
    assert (await http.post("incr/n", json={"minimum": 5})).json() == {"value": 5}
    assert (await http.get("entries/n")).headers["Limpet-Version"] == "2"
    writes = [{"op": "add", "key": "n", "maximum": 9}, {"op": "add", "key": "m", "by": 2, "ttl_if_new": 60}]
    found = (await http.post("batch", json={"writes": writes})).json()["entries"]
    assert [entry["expires_at"] is None for entry in found] == [False, False]
    problem(await http.post("incr/n", json={"maximum": 7, "by": 1}), 400, "invalid_value")
    problem(await http.post("incr/n", json={"ttl": 7, "ttl_if_new": 1}), 400, "invalid_ttl")


async def test_a_scan_takes_alternatives_and_members_below(http: httpx2.AsyncClient) -> None:
    for key, value in {"a": {"n": {"x": 1}}, "b": {"n": 2}, "c": {"n": 3}}.items():
        await http.put(f"entries/{key}", json=value)
    below, two = {"field": "n", "path": ["x"], "value": 1}, {"field": "n", "value": 2}

    async def scan(*where: Any) -> list[str]:
        found = await http.post("scan", json={"where": where})
        return [entry["key"] for entry in found.json()["entries"]]

    assert await scan(below) == ["a"]
    assert await scan({"any": [[below], [two]]}) == ["a", "b"]
    assert await scan({"any": [[below], [two]]}, {"field": "n", "op": "gt", "value": 1}) == ["b"]
    refused: list[Any] = [{}, {"any": []}, {"any": [[], [two]]}, {"any": [[two]], "field": "n", "value": 1}]
    for wrong in refused:
        problem(await http.post("scan", json={"where": [wrong]}), 400, "invalid_value")


async def test_an_append_makes_a_new_key(http: httpx2.AsyncClient) -> None:
    first = await http.post("append/log/", json={"x": 1}, headers={"Limpet-Request-Id": "once"})
    again = await http.post("append/log/", json={"x": 1}, headers={"Limpet-Request-Id": "once"})
    raw = await http.post(
        "append/log/", content=b"\x01", headers={"Content-Type": "application/octet-stream", "Limpet-TTL": "60"}
    )

    assert (first.status_code, first.json()["key"]) == (201, "log/0000000000000001")
    assert again.json() == first.json()
    assert raw.json()["key"] == "log/0000000000000002"
    assert raw.json()["expires_at"] is not None
    assert (await http.get("entries/log/0000000000000001")).json() == {"x": 1}
    problem(await http.post("append/" + "k" * 1009, json=1), 400, "invalid_key")


async def test_several_entries_are_read_in_the_order_of_their_keys(http: httpx2.AsyncClient) -> None:
    await http.put("entries/b", json=[1])
    await http.put("entries/a", json=2)

    found = (await http.post("read", json={"keys": ["b", "none", "a", "b"]})).json()["entries"]
    brief = (await http.post("read", json={"keys": ["a"], "with_value": False})).json()["entries"]

    assert [entry and entry["value"] for entry in found] == [[1], None, 2, [1]]
    assert (brief[0]["version"], "value" in brief[0]) == (1, False)
    problem(await http.post("read", json={"keys": ["k"] * 1001}), 400, "invalid_value")
    problem(await http.post("read", json={"keys": [""]}), 400, "invalid_key")


async def test_the_history_of_a_key_comes_oldest_first(http: httpx2.AsyncClient) -> None:
    for turn in range(3):
        await http.put("entries/k", json=turn)
    await http.delete("entries/k")

    found = (await http.get("history/k?limit=3")).json()
    assert [(change["op"], change["value"]) for change in found["changes"]] == [
        ("put", 1),
        ("put", 2),
        ("delete", None),
    ]
    assert found["truncated"] is True
    assert (await http.get("history/none")).json() == {"changes": [], "truncated": False, "cursor": None}


async def test_a_batch_happens_entirely_or_not_at_all(http: httpx2.AsyncClient) -> None:
    writes = [{"op": "put", "key": "a", "value": 1}, {"op": "add", "key": "n"}]
    done = await http.post("batch", json={"writes": writes}, headers={"Idempotency-Key": "b1"})
    again = await http.post("batch", json={"writes": writes}, headers={"Idempotency-Key": "b1"})
    guards = [{"key": "a", "expect": {"version": 9}}]
    refused = await http.post("batch", json={"writes": [{"op": "delete", "key": "a"}], "guards": guards})

    assert [entry["version"] for entry in done.json()["entries"]] == [1, 1]
    assert (done.json()["replayed"], again.json()["replayed"]) == (False, True)
    assert problem(refused, 412, "conflict")["key"] == "a"
    assert (await http.get("keys")).json()["keys"] == ["a", "n"]


async def test_a_batch_tells_what_it_has_kept(http: httpx2.AsyncClient) -> None:
    there = (await http.put("entries/a", json="secret")).json()
    writes = [{"op": "create", "key": key, "value": 1, "or_keep": True} for key in ("a", "b")]

    done = (await http.post("batch", json={"writes": writes}, headers={"Idempotency-Key": "b1"})).json()
    await http.put("entries/a", json="changed")
    again = (await http.post("batch", json={"writes": writes}, headers={"Idempotency-Key": "b1"})).json()

    assert done["kept"] == again["kept"] == ["a"]
    assert done["entries"][0]["revision"] == there["revision"]
    assert again["entries"] == done["entries"]
    assert [(await http.get(f"entries/{key}")).json() for key in ("a", "b")] == ["changed", 1]


async def test_a_key_tells_how_long_it_has_left(http: httpx2.AsyncClient) -> None:
    await http.put("entries/short", json=1, headers={"Limpet-TTL": "60"})
    await http.put("entries/lasting", json=1)

    left = (await http.get("remaining/short")).json()["remaining"]

    assert 0 < left <= 60
    assert (await http.get("remaining/lasting")).json() == {"remaining": None}
    problem(await http.get("remaining/none"), 404, "not_found")


async def test_the_status_describes_the_namespace(http: httpx2.AsyncClient) -> None:
    await http.put("entries/k", json=1)

    assert (await http.get("status")).json()["keys"] == 1


# Locks ------------------------------------------------------------------------


async def test_a_lock_is_taken_refreshed_shown_and_given_back(http: httpx2.AsyncClient) -> None:
    taken = await http.post("locks/nightly/run", json={"ttl": 30})
    token = taken.json()["token"]

    assert taken.status_code == 201
    held = problem(await http.post("locks/nightly/run", json={"ttl": 30}), 423, "lock_held")
    assert (held["name"], held["holder"], held["token"]) == ("nightly/run", "root", token)
    (shown,) = (await http.get("locks?prefix=nightly/")).json()["locks"]
    assert (shown["name"], shown["holder"]) == ("nightly/run", "root")
    assert (await http.put("locks/nightly/run", json={"ttl": 60, "token": token})).status_code == 204
    problem(await http.put("locks/nightly/run", json={"ttl": 60, "token": token + 1}), 409, "lock_expired")
    problem(await http.delete(f"locks/nightly/run?token={token + 1}"), 409, "lock_expired")
    assert (await http.delete("locks/nightly/run", headers={"Limpet-Token": str(token)})).status_code == 204
    assert (await http.get("locks")).json() == {"locks": [], "truncated": False, "cursor": None}


async def test_a_lock_is_waited_for(http: httpx2.AsyncClient) -> None:
    token = (await http.post("locks/l", json={"ttl": 30})).json()["token"]

    waiting = asyncio.ensure_future(http.post("locks/l", json={"ttl": 30, "wait": 20, "holder": "second"}))
    await asyncio.sleep(0)
    await http.delete(f"locks/l?token={token}")
    assert (await waiting).json()["token"] > token


async def test_a_wait_for_a_lock_ends_with_the_server(made: Face, http: httpx2.AsyncClient) -> None:
    await http.post("locks/l", json={"ttl": 30})

    waiting = asyncio.ensure_future(http.post("locks/l", json={"ttl": 30, "wait": 30}))
    await until(lambda: len(made.session._hubs) == 1)
    streams_of(made.app).close()
    problem(await waiting, 503, "closed")


KV = "tenant/acme/project/docs/delta"

# The call ---------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "watch"])
async def test_every_operation_can_be_called_by_its_name(http: httpx2.AsyncClient, name: str) -> None:
    needed: dict[str, dict[str, Any]] = {
        "entries": {"keys": ["k"]},
        "delete_prefix": {"prefix": "k"},
        "append": {"prefix": "k", "value": 1},
        "set": {"value": 1},
        "put": {"value": 1},
        "cas": {"value": 1, "expect": {"absent": True}},
        "touch": {"ttl": 1},
        "fields": {"set": {"a": 1}},
        "batch": {"writes": [{"op": "put", "key": "a", "value": 1}]},
        "lock": {"ttl": 30},
        "refresh": {"ttl": 30, "token": 1},
        "unlock": {"token": 1},
        "outcome": {"request_id": "x"},
        "kv_get": {"key": KV},
        "kv_put": {"key": KV, "value": {}, "lastWriter": "a:b", "semantics": {"purpose": "cursor"}},
        "kv_delete": {"key": KV, "lastWriter": "a:b"},
        "kv_list": {"prefix": "tenant/acme/"},
        "kv_batch": {"items": [{"op": "delete", "key": KV}], "lastWriter": "a:b"},
    }
    fields = OPERATIONS[name].request.__struct_fields__
    named = {member: "k" for member in ("key", "name") if member in fields}

    answered = await http.post(f"call/{name}", json={**named, **needed.get(name, {})})
    assert answered.status_code == (409 if name in ("refresh", "unlock") else 200), answered.text


async def test_a_watch_and_an_unknown_operation_cannot_be_called(http: httpx2.AsyncClient) -> None:
    problem(await http.post("call/watch", json={}), 400, "invalid_value")
    problem(await http.post("call/nothing", json={}), 404, "no_operation")


# Around the entries -----------------------------------------------------------


async def test_health_needs_no_token_and_readiness_follows_the_service(made: Face) -> None:
    async with made.client(None) as http:
        assert (await http.get(f"{ROOT}/healthz")).status_code == 200
        assert (await http.get(f"{ROOT}/readyz")).status_code == 200
        made.is_ready = False
        problem(await http.get(f"{ROOT}/readyz"), 503, "not_ready")
        assert (await http.get(f"{ROOT}/healthz")).status_code == 200
        index = (await http.get(f"{ROOT}/")).json()
        assert (index["name"], index["version"]) == ("limpet", limpet.__version__)
        problem(await http.get(f"{ROOT}/metrics"), 404, "no_route")


async def test_metrics_are_for_those_who_may_see_all_namespaces() -> None:
    async def rendered() -> bytes:
        return b"limpet_up 1\n"

    async with face(metrics=rendered) as made:
        async with made.client("root") as http:
            shown = await http.get(f"{ROOT}/metrics")
            assert (shown.status_code, shown.content) == (200, b"limpet_up 1\n")
        async with made.client("shop") as http:
            problem(await http.get(f"{ROOT}/metrics"), 403, "permission_denied")
        async with made.client(None) as http:
            problem(await http.get(f"{ROOT}/metrics"), 401, "unauthorized")


async def test_routes_of_other_parts_are_served_and_their_errors_become_problems() -> None:
    async def broken(_: Any) -> Any:
        raise errors.RateLimited("too fast", retry_after=2.5)

    async with face(more_routes=[Route("/extra", broken)]) as made, made.client() as http:
        refused = await http.get(f"{ROOT}/extra")
        assert problem(refused, 429, "rate_limited")["retry_after"] == 2.5
        assert refused.headers["Retry-After"] == "3"
        assert refused.headers["Cache-Control"] == "no-store"


# What is refused --------------------------------------------------------------


@pytest.mark.parametrize(
    ("authorization", "error"),
    [
        (None, None),
        ("Bearer wrong", "invalid_token"),
        ("Basic cm9vdDpyb290", "invalid_request"),
        ("Bearer", "invalid_request"),
        ("Bearer ", "invalid_request"),
        ("root", "invalid_request"),
    ],
)
async def test_without_a_good_token_there_is_401(made: Face, authorization: str | None, error: str | None) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    async with made.client(None) as http:
        for path in ("entries/k", "watch", "status"):
            refused = await http.get(path, headers=headers)
            problem(refused, 401, "unauthorized")
            challenge = 'Bearer realm="limpet"' + (f', error="{error}"' if error else "")
            assert refused.headers["WWW-Authenticate"] == challenge
    assert {call.caller for call in made.notes.calls} == {"unknown"}


async def test_two_tokens_are_none(made: Face) -> None:
    async with made.client(None) as http:
        both = [("Authorization", "Bearer root"), ("Authorization", "Bearer shop")]
        problem(await http.get("status", headers=both), 401, "unauthorized")


async def test_a_method_that_a_path_does_not_have_is_405(http: httpx2.AsyncClient) -> None:
    for method, path, allowed in [
        ("POST", "entries/k", "DELETE, GET, HEAD, PUT"),
        ("DELETE", "status", "GET, HEAD"),
        ("OPTIONS", "batch", "POST"),
        ("TRACE", "scan", "GET, HEAD, POST"),
        ("BREW", "keys", "DELETE, GET, HEAD"),
    ]:
        refused = await http.request(method, path)
        problem(refused, 405, "method_not_allowed")
        assert refused.headers["Allow"] == allowed


@pytest.mark.parametrize(
    "path", ["/v1", "/v1/shop", "/v1/shop/entries", "/v1/shop/nothing/k", "/v2/shop/keys", "/healthz/"]
)
async def test_a_path_that_is_not_there_is_404(http: httpx2.AsyncClient, path: str) -> None:
    problem(await http.get(ROOT + path), 404, "no_route")


# Requests that cannot be read, and the error that each gets.
BAD: list[tuple[str, str, dict[str, Any], int, str]] = [
    ("GET", "entries/%ff", {}, 400, "invalid_path"),
    ("GET", "entries/%zz", {}, 400, "invalid_path"),
    ("GET", "entries/%", {}, 400, "invalid_path"),
    ("GET", "entries/%ed%a0%80", {}, 400, "invalid_path"),
    ("GET", "entries/a%00b", {}, 400, "invalid_key"),
    ("GET", "entries/", {}, 400, "invalid_key"),
    ("GET", "entries/" + "k" * 1025, {}, 400, "invalid_key"),
    ("GET", "/v1/Bad.Name/keys", {}, 400, "invalid_namespace"),
    ("GET", "/v1/%20/keys", {}, 400, "invalid_namespace"),
    ("GET", "keys?prefix=%ff", {}, 400, "invalid_value"),
    ("GET", "keys?prefix=%z", {}, 400, "invalid_value"),
    ("GET", "keys?limit=ten", {}, 400, "invalid_value"),
    ("GET", "keys?limit=1&limit=2", {}, 400, "invalid_value"),
    ("GET", "keys?limit=0", {}, 400, "invalid_value"),
    ("GET", "keys?limit=10001", {}, 400, "invalid_value"),
    ("GET", "keys?limit=99999999999999999999", {}, 400, "invalid_value"),
    ("GET", "keys?limits=1", {}, 400, "invalid_value"),
    ("GET", "keys?" + "&".join(["prefix=a"] * 300), {}, 400, "invalid_value"),
    ("GET", "scan?where=a", {}, 400, "invalid_value"),
    ("GET", "scan?where=a:eq:nope", {}, 400, "invalid_value"),
    ("GET", "scan?where=a:in:1", {}, 400, "invalid_value"),
    ("GET", "scan?values=yes", {}, 400, "invalid_value"),
    ("GET", "entries/k", {"headers": {"If-None-Match": "1"}}, 404, "not_found"),
    ("GET", "entries/there", {"headers": {"If-None-Match": "1"}}, 400, "invalid_value"),
    ("GET", "history/k?limit=0", {}, 400, "invalid_value"),
    ("GET", "watch?initial=perhaps", {}, 400, "invalid_value"),
    ("GET", "watch?initial=true&after=1", {}, 400, "invalid_value"),
    ("GET", "watch?after=elsewhere:shop:1:5", {}, 410, "compacted"),
    ("GET", "watch?after=999", {}, 410, "compacted"),
    ("GET", "outcome/", {}, 400, "invalid_key"),
    ("PUT", "entries/k", {"json": 1, "headers": {"Limpet-TTL": "soon"}}, 400, "invalid_value"),
    ("PUT", "entries/k", {"json": 1, "headers": {"Limpet-TTL": "-1"}}, 400, "invalid_ttl"),
    ("PUT", "entries/k", {"json": 1, "headers": {"Limpet-TTL": "0"}}, 400, "invalid_ttl"),
    ("PUT", "entries/k", {"json": 1, "headers": {"Limpet-Fence": "name"}}, 400, "invalid_value"),
    ("PUT", "entries/k", {"json": 1, "headers": {"Limpet-Fence": "name;x"}}, 400, "invalid_value"),
    ("PUT", "entries/k", {"json": 1, "headers": {"Limpet-Fence": "%ff;1"}}, 400, "invalid_value"),
    ("PUT", "entries/k", {"json": 1, "headers": {"Limpet-Fence": ";1"}}, 400, "invalid_key"),
    ("PUT", "entries/k", {"json": 1, "headers": {"Limpet-Meta": "{"}}, 400, "invalid_value"),
    ("PUT", "entries/k", {"json": 1, "headers": {"Limpet-Meta": "[]"}}, 400, "invalid_value"),
    ("PUT", "entries/k", {"json": 1, "headers": {"Limpet-Meta": b"\xff"}}, 400, "invalid_value"),
    ("PUT", "entries/k", {"json": 1, "headers": {"Limpet-Request-Id": "a b"}}, 400, "invalid_value"),
    ("PUT", "entries/k", {"json": 1, "headers": {"Limpet-Request-Id": b"\xc3\xa9"}}, 400, "invalid_value"),
    ("POST", "incr/k", {"headers": {"Limpet-Request-Id": "a", "Idempotency-Key": "a"}}, 400, "invalid_value"),
    ("PUT", "entries/k", {"content": b"", "headers": {"Content-Type": "application/json"}}, 400, "invalid_value"),
    ("PUT", "entries/k", {"content": b"1"}, 415, "unsupported_media_type"),
    ("PUT", "entries/k", {"content": b"1", "headers": {"Content-Type": "text/plain"}}, 415, "unsupported_media_type"),
    (
        "PUT",
        "entries/k",
        {"content": b"1", "headers": {"Content-Type": "application/json; charset=latin-1"}},
        415,
        "unsupported_media_type",
    ),
    ("PUT", "entries/k", {"json": 1, "headers": {"Content-Encoding": "gzip"}}, 415, "unsupported_media_type"),
    ("POST", "batch", {"content": b"{}"}, 415, "unsupported_media_type"),
    ("POST", "batch", {"json": {}}, 400, "invalid_value"),
    ("POST", "batch", {"json": []}, 400, "invalid_value"),
    ("POST", "batch", {"json": {"writes": [{"op": "explode", "key": "k"}]}}, 400, "invalid_value"),
    ("POST", "batch", {"json": {"writes": [{"op": "put", "key": "k", "value": 1}] * 2}}, 400, "invalid_key"),
    ("POST", "incr/k", {"json": {"by": 2**64}}, 400, "invalid_value"),
    ("POST", "incr/k", {"json": {"by": 1.5}}, 400, "invalid_value"),
    ("POST", "incr/k", {"json": {"key": "other"}}, 400, "invalid_value"),
    ("POST", "incr/k", {"json": {"expect": {"revision": 2**70}}}, 400, "invalid_value"),
    ("POST", "incr/k", {"json": {"expect": {}}}, 400, "invalid_value"),
    ("POST", "incr/text", {}, 409, "type_mismatch"),
    ("POST", "swap/there", {"json": {"field": "a", "new": 1}}, 409, "type_mismatch"),
    ("POST", "swap/k", {"json": {}}, 400, "invalid_value"),
    ("PATCH", "records/there", {"json": {"set": {"a": 1}}}, 409, "type_mismatch"),
    ("PATCH", "records/k", {"json": {"sets": {}}}, 400, "invalid_value"),
    ("POST", "touch/k", {}, 400, "invalid_value"),
    ("POST", "touch/k", {"json": {"ttl": 1e30}}, 400, "invalid_ttl"),
    ("POST", "locks/l", {"json": {}}, 400, "invalid_value"),
    ("POST", "locks/l", {"json": {"ttl": 1, "wait": 31}}, 400, "invalid_value"),
    ("POST", "locks/l", {"json": {"ttl": 1, "wait": -1}}, 400, "invalid_value"),
    ("DELETE", "locks/l", {}, 400, "invalid_value"),
    ("DELETE", "locks/l?token=x", {}, 400, "invalid_value"),
    ("POST", "call/put", {"json": {"key": "\ud800", "value": 1}}, 400, "invalid_value"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "extra", "status", "code"), BAD)
async def test_a_bad_request_gets_its_error_and_changes_nothing(
    http: httpx2.AsyncClient, method: str, path: str, extra: dict[str, Any], status: int, code: str
) -> None:
    await http.put("entries/there", json={"plain": "object"})
    await http.put("entries/text", json="text")
    before = (await http.get("status")).json()
    if "json" in extra:
        given = dict(extra)
        headers = {"Content-Type": "application/json", **given.pop("headers", {})}
        # msgspec would refuse a lone surrogate, which a client may well send.
        extra = {"content": json.dumps(given.pop("json")).encode(), "headers": headers, **given}

    refused = await http.request(method, ROOT + path if path.startswith("/") else path, **extra)

    problem(refused, status, code)
    assert (await http.get("status")).json() == before


# Bodies that are no JSON value of ours.
BODIES = {
    "no utf-8": b'"\xff"',
    "cut short": b'{"a":',
    "a bomb": b"[" * 100_000,
    "too deep": b"[" * 200 + b"]" * 200,
    "a huge integer": b"1" * 5000,
    "an integer of 65 bits": b"18446744073709551616",
    "a number beyond all": b"1e999",
    "no number": b"NaN",
    "a lone surrogate": b'"\\ud800"',
    "two values": b"1 2",
    "a byte order mark": b"\xef\xbb\xbf1",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
async def test_a_body_that_is_no_json_value_is_400(http: httpx2.AsyncClient, body: bytes) -> None:
    for path, kind in (("entries/k", "application/json"), ("entries/k", RECORD)):
        problem(await http.put(path, content=body, headers={"Content-Type": kind}), 400, "invalid_value")
    problem(await http.post("batch", content=body, headers={"Content-Type": "application/json"}), 400, "invalid_value")


async def test_a_value_over_its_limit_is_413(http: httpx2.AsyncClient) -> None:
    found = problem(await http.put("entries/k", json="x" * 1_000_000), 413, "value_too_large")

    assert (found["size_bytes"], found["limit_bytes"]) == (1_000_002, 1_000_000)
    assert (await http.put("entries/k", json="x" * 999_998)).status_code == 201


async def test_a_body_over_its_limit_is_refused_while_it_is_read() -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1
            yield b"x" * 1000

    async with face(body_bytes_max=10_000) as made, made.client() as http:
        refused = await http.put("entries/k", content=endless(), headers={"Content-Type": BYTES})
        problem(refused, 413, "body_too_large")
        assert sent == 11
        announced = await http.put("entries/k", content=b"x" * 10_001, headers={"Content-Type": BYTES})
        problem(announced, 413, "body_too_large")
        fits = await http.put("entries/k", content=b"x" * 10_000, headers={"Content-Type": BYTES})
        assert fits.status_code == 201


async def test_pages_of_other_origins_may_not_write(http: httpx2.AsyncClient) -> None:
    for headers in (
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "https://limpet.test.evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Origin": "http://limpet.test"},
    ):
        problem(await http.post("incr/k", headers=headers), 403, "cross_origin")
    for headers in ({"Origin": "http://limpet.test"}, {"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"}):
        assert (await http.post("incr/k", headers=headers)).status_code == 200


async def test_a_server_answers_to_its_names_alone() -> None:
    async with face(hosts=["limpet.test", "::1"]) as made, made.client() as http:
        assert (await http.get("keys")).status_code == 200
        assert (await http.get("keys", headers={"Host": "[::1]:8080"})).status_code == 200
        for host in ("evil.example", "limpet.test.evil.example", "", "["):
            problem(await http.get("keys", headers={"Host": host}), 421, "misdirected")
        two = [("Host", "limpet.test"), ("Host", "evil.example")]
        problem(await http.get("keys", headers=two), 400, "invalid_request")


async def test_bodies_have_a_bound_together() -> None:
    """Each may be within its own, and a hundred of them would still fill the memory."""
    async with face(bodies_bytes_max=1_000) as made, made.client() as http:
        begun, held = asyncio.Event(), asyncio.Event()

        async def slowly() -> AsyncIterator[bytes]:
            yield b'"' + b"x" * 700
            begun.set()
            await held.wait()
            yield b'"'

        json_type = {"Content-Type": "application/json"}
        slow = asyncio.ensure_future(http.put("entries/slow", content=slowly(), headers=json_type))
        await begun.wait()
        response = await http.put("entries/fast", json="x" * 700)
        problem(response, 503, "busy")
        assert response.headers["Retry-After"] == "1"

        held.set()
        assert (await slow).status_code == 201
        assert (await http.put("entries/fast", json="x" * 700)).status_code == 201


async def test_a_server_for_reading_refuses_writes() -> None:
    async with face(dispatcher={"read_only": True}) as made, made.client() as http:
        problem(await http.put("entries/k", json=1), 403, "permission_denied")
        assert (await http.get("keys")).status_code == 200


# Every row of the codes -------------------------------------------------------


def one_of(kind: type[errors.LimpetError]) -> errors.LimpetError:
    """An error of each kind, as it is raised."""
    made: dict[type[errors.LimpetError], errors.LimpetError] = {
        errors.InvalidKey: errors.InvalidKey("\ud800", "it is odd"),
        errors.InvalidNamespace: errors.InvalidNamespace("X"),
        errors.ValueTooLarge: errors.ValueTooLarge("k", size_bytes=2, limit_bytes=1),
        errors.TypeMismatch: errors.TypeMismatch("k", expected="a record", found="raw bytes"),
        errors.Conflict: errors.Conflict("k", expected="version 3", current=None),
        errors.NotFound: errors.NotFound("k"),
        errors.LockHeld: errors.LockHeld("l", holder="h", token=3, remaining=1.5),
        errors.LockNotHeld: errors.LockNotHeld("l"),
        errors.LockExpired: errors.LockExpired("l", token=3),
        errors.LockLost: errors.LockLost("l", token=3),
        errors.Compacted: errors.Compacted("gone", oldest=5),
        errors.Contention: errors.Contention("k", attempts=64),
        errors.RateLimited: errors.RateLimited("too fast", retry_after=0.2),
        errors.Ambiguous: errors.Ambiguous("unknown", request_id="r1"),
        errors.Closed: errors.Closed(),
    }
    return made.get(kind) or kind("as it is")


@pytest.mark.parametrize("kind", CODES, ids=lambda kind: kind.__name__)
async def test_every_error_is_reported_by_its_row_in_the_table(
    made: Face, kind: type[errors.LimpetError], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object) -> Any:
        raise one_of(kind)

    monkeypatch.setattr(Dispatcher, "run", fails)
    async with made.client() as http:
        refused = await http.get("keys")

    found = problem(refused, CODES[kind].status, kind.code)
    assert (found["retryable"], found["outcome"]) == (kind.retryable, kind.outcome)
    assert ("Retry-After" in refused.headers) == (kind is errors.RateLimited)
    assert "current" not in found


async def test_an_unexpected_error_is_500_with_nothing_but_a_traceback_in_the_log(
    made: Face, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(*_: object) -> Any:
        raise KeyError("postgresql://user:password@host")

    monkeypatch.setattr(Dispatcher, "run", fails)
    with caplog.at_level(logging.DEBUG):
        async with made.client() as http:
            refused = await http.put("entries/k", json="secret")

    assert problem(refused, 500, "internal")["detail"] == "Something went wrong on the server."
    assert "password" not in refused.text
    (record,) = [one for one in caplog.records if one.name == "limpet.http"]
    assert record.exc_info is not None
    assert "secret" not in caplog.text


async def test_a_request_that_is_refused_early_is_reported_once(made: Face) -> None:
    async with made.client() as http:
        await http.get("keys?limit=x")
        await http.get("keys?limit=0")
        await http.get("keys")

    found = [(call.operation, type(call.error).__name__) for call in made.notes.calls]
    assert found == [("list_keys", "InvalidValue"), ("list", "InvalidValue"), ("list", "NoneType")]


PATHS = [
    "/v1/shop/entries/a",
    "/v1/shop/entries/",
    "/v1/shop/entries",
    "/v1/shop/entries/a/b//c/",
    "/v1/shop/locks/nightly/report",
    "/v1/shop/locks",
    "/v1/shop/outcome/",
    "/v1/shop/outcome/x",
    "/v1/shop/call/put",
    "/v1/shop/call/",
    "/v1/shop/call/put/x",
    "/v1/shop/engine/read",
    "/v1/shop/engine/read/x",
    "/v1//entries/a",
    "/v1/entries/a",
    "/v1/shop/nothing/a",
    "/v1/shop//a",
    "/v1/namespaces",
    "/v1/",
    "/v1",
    "/",
    "/v2/shop/entries/a",
    "//v1/shop/entries/a",
    "v1/shop/entries/a",
    "/v1/engine/namespaces",
    "*",
]


@pytest.mark.parametrize("path", [*PATHS, "", "/v1/shop/entries/\n"])
async def test_a_route_that_is_found_by_its_verb_is_the_one_that_starlette_finds(made: Face, path: str) -> None:
    """Every path goes to one of the two, and to the same route with the same parameters."""
    made.app.router.routes.extend(primitives(made.session, callers=made.tokens, dispatcher=made.dispatcher))
    router = VerbRouter(made.app.router)
    for method in ("GET", "HEAD", "PUT", "POST", "PATCH", "DELETE", "OPTIONS", "BREW"):
        scope: dict[str, Any] = {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}
        matches = ((route, route.matches(scope)) for route in made.app.routes)
        wanted = next(((route, child["path_params"]) for route, (match, child) in matches if match is Match.FULL), None)

        found = router.find(scope)

        assert found is None or found == wanted
        # What callers send most is found by its verb.
        assert found == wanted or not path.startswith(("/v1/shop/entries/", "/v1/shop/engine/read"))


def test_every_operation_has_a_route() -> None:
    """By its own name, or by the call."""
    assert any(endpoint.path.endswith("/call/{operation}") for endpoint in ENDPOINTS)
    assert {endpoint.path.split("/")[3] for endpoint in ENDPOINTS} == {
        *(
            "entries",
            "bytes",
            "records",
            "swap",
            "incr",
            "append",
            "take",
            "touch",
            "batch",
            "keys",
            "scan",
            "read",
            "remaining",
            "history",
            "children",
        ),
        *("watch", "locks", "outcome", "status", "semantic", "call"),
    }
