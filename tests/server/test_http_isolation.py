"""Callers who try to reach, over HTTP, what is not theirs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from limpet.server.dispatch import OWN_NAMESPACE
from limpet.server.operations import OPERATIONS
from limpet.server.requests import request_of
from tests.server.http_support import Face, Scoped, face

ROOT = "http://limpet.test"
SECRET = "a-value-that-no-other-caller-may-see"
HIDDEN = "hidden-name"


@pytest.fixture
async def made() -> AsyncIterator[Face]:
    """A shop where two teams keep state side by side, and a bank."""
    async with face() as found:
        async with found.client("root") as http:
            for path in (f"shop/entries/team/b/{HIDDEN}", f"shop/entries/team/ab/{HIDDEN}", f"bank/entries/{HIDDEN}"):
                await http.put(
                    f"{ROOT}/v1/{path}", json=SECRET, headers={"Limpet-Request-Id": f"put-{path[:4]}-{len(path)}"}
                )
            await http.put("entries/team/a/mine", json="mine")
            await http.post(f"locks/team/b/{HIDDEN}", json={"ttl": 60, "holder": SECRET})
            await http.post(f"{ROOT}/v1/bank/locks/{HIDDEN}", json={"ttl": 60, "holder": SECRET})
        yield found


Attack = tuple[str, str, str, dict[str, Any]]
THEIRS = f"team/b/{HIDDEN}"
SIBLING = f"team/ab/{HIDDEN}"


def guard(key: str) -> dict[str, Any]:
    writes = [{"op": "put", "key": "team/a/x", "value": 1}]
    return {"json": {"writes": writes, "guards": [{"key": key, "expect": {"absent": True}}]}}


def fenced(name: str) -> dict[str, Any]:
    return {"json": {"writes": [{"op": "put", "key": "team/a/x", "value": 1}], "fences": [{"name": name, "token": 1}]}}


# The caller, and its request: a caller of the keys under team/a/ in shop, and one of the namespace bank.
ATTACKS: list[Attack] = [
    # Another namespace.
    ("other", "GET", f"entries/{THEIRS}", {}),
    ("other", "HEAD", f"entries/{THEIRS}", {}),
    ("other", "PUT", f"entries/{THEIRS}", {"json": 1}),
    ("other", "DELETE", f"entries/{THEIRS}", {}),
    ("other", "GET", "keys", {}),
    ("other", "GET", "scan", {}),
    ("other", "GET", f"history/{THEIRS}", {}),
    ("other", "GET", "watch", {}),
    ("other", "GET", "locks", {}),
    ("other", "GET", "status", {}),
    ("other", "GET", "outcome/put-shop-35", {}),
    ("other", "POST", "call/list", {"json": {}}),
    ("other", "POST", "batch", {"json": {"writes": [{"op": "take", "key": THEIRS}]}}),
    ("shop", "GET", f"/v1/bank/entries/{HIDDEN}", {}),
    ("shop", "GET", "/v1/bank/watch?initial=true", {}),
    ("shop", "GET", f"/v1/bank/history/{HIDDEN}", {}),
    ("shop", "POST", f"/v1/bank/locks/{HIDDEN}", {"json": {"ttl": 1}}),
    # Keys beside one's prefix, and prefixes that are siblings of it.
    ("team", "GET", f"entries/{THEIRS}", {}),
    ("team", "GET", f"entries/{SIBLING}", {}),
    ("team", "GET", "entries/team/a", {}),
    ("team", "PUT", f"entries/{THEIRS}", {"json": 1}),
    ("team", "PUT", f"entries/{THEIRS}", {"json": 1, "headers": {"If-None-Match": "*"}}),
    ("team", "DELETE", f"entries/{THEIRS}", {}),
    ("team", "GET", f"records/{THEIRS}", {}),
    ("team", "PATCH", f"records/{THEIRS}", {"json": {"set": {"a": 1}}}),
    ("team", "POST", f"swap/{THEIRS}", {"json": {"field": "a", "new": 1}}),
    ("team", "POST", f"incr/{THEIRS}", {}),
    ("team", "POST", f"take/{THEIRS}", {}),
    ("team", "POST", f"touch/{THEIRS}", {"json": {"ttl": 1}}),
    ("team", "GET", f"history/{THEIRS}", {}),
    ("team", "GET", "keys", {}),
    ("team", "GET", "keys?prefix=team/a", {}),
    ("team", "GET", "keys?prefix=team/", {}),
    ("team", "GET", "scan", {}),
    ("team", "GET", "scan?prefix=team/a&values=false", {}),
    ("team", "GET", "scan?prefix=&where=a:exists", {}),
    ("team", "POST", "scan", {"json": {"prefix": "team/b/"}}),
    ("team", "GET", "watch", {}),
    ("team", "GET", "watch?pattern=*", {}),
    ("team", "GET", "watch?pattern=team/a*", {}),
    ("team", "GET", f"watch?pattern={THEIRS}&initial=true", {}),
    ("team", "GET", "status", {}),
    ("team", "GET", "outcome/put-shop-35", {}),
    ("team", "GET", "locks", {}),
    ("team", "GET", "locks?prefix=team/a", {}),
    ("team", "POST", f"locks/{THEIRS}", {"json": {"ttl": 1}}),
    ("team", "DELETE", f"locks/{THEIRS}?token=5", {}),
    ("team", "PUT", f"locks/{THEIRS}", {"json": {"ttl": 1, "token": 5}}),
    # By way of a batch, a guard or a fence.
    ("team", "POST", "batch", guard(THEIRS)),
    ("team", "POST", "batch", guard(SIBLING)),
    ("team", "POST", "batch", fenced(THEIRS)),
    ("team", "POST", "batch", {"json": {"writes": [{"op": "add", "key": "team/a/n"}, {"op": "take", "key": THEIRS}]}}),
    ("team", "PUT", "entries/team/a/x", {"json": 1, "headers": {"Limpet-Fence": f"{THEIRS};5"}}),
    ("team", "PATCH", "records/team/a/x", {"json": {}, "headers": {"Limpet-Fence": f"{THEIRS};5"}}),
    ("team", "POST", "swap/team/a/x", {"json": {"field": "a", "new": 1}, "headers": {"Limpet-Fence": f"{THEIRS};5"}}),
    # By names that decode, or resolve, to something else.
    ("team", "GET", "entries/team%2Fb%2F" + HIDDEN, {}),
    ("team", "GET", "entries/%74eam/b/" + HIDDEN, {}),
    ("team", "GET", f"entries/TEAM/A/../b/{HIDDEN}", {}),
    ("team", "POST", "call/get", {"json": {"key": THEIRS}}),
    ("team", "POST", "call/history", {"json": {"key": THEIRS}}),
    ("team", "POST", "call/scan", {"json": {"prefix": ""}}),
    # The server's own.
    ("root", "GET", f"/v1/{OWN_NAMESPACE}/keys", {}),
    ("root", "GET", f"/v1/{OWN_NAMESPACE}/scan", {}),
    ("root", "GET", f"/v1/{OWN_NAMESPACE}/watch?initial=true", {}),
    ("root", "PUT", f"/v1/{OWN_NAMESPACE}/entries/namespace/x", {"json": True}),
    ("root", "POST", f"/v1/{OWN_NAMESPACE}/call/list", {"json": {}}),
    ("root", "GET", "/v1/limpet%2Dserver/keys", {}),
    # Values, for callers who may not see any; also by guessing them.
    ("reader", "GET", f"entries/{THEIRS}", {}),
    ("reader", "GET", "scan", {}),
    ("reader", "GET", "scan?values=false&where=a:exists", {}),
    ("reader", "GET", f"history/{THEIRS}", {}),
    ("reader", "GET", "watch", {}),
    ("reader", "PUT", f"entries/{THEIRS}", {"json": 1}),
    ("reader", "POST", "locks/l", {"json": {"ttl": 1}}),
    ("blind", "POST", f"take/{THEIRS}", {}),
    ("blind", "POST", f"incr/{THEIRS}", {}),
    ("blind", "POST", f"touch/{THEIRS}", {"json": {"ttl": 60, "expect": {"value": SECRET}}}),
    ("blind", "POST", "call/cas", {"json": {"key": THEIRS, "value": 1, "expect": {"value": SECRET}}}),
    ("blind", "POST", "call/delete", {"json": {"key": THEIRS, "expect": {"field": "a", "equals": 1}}}),
    ("blind", "POST", "swap/x", {"json": {"field": "a", "expected": 1, "new": 1}}),
    ("blind", "POST", "batch", {"json": {"guards": [{"key": THEIRS, "expect": {"value": SECRET}}]}}),
    ("viewer", "PUT", "entries/x", {"json": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("token", "method", "path", "extra"), ATTACKS)
async def test_what_is_not_theirs_is_refused(
    made: Face, token: str, method: str, path: str, extra: dict[str, Any]
) -> None:
    before = [await made.dispatcher.store(name).status() for name in ("shop", "bank")]

    async with made.client(token) as http:
        refused = await http.request(method, ROOT + path if path.startswith("/") else path, **extra)

    assert refused.status_code == 403, refused.text
    assert SECRET not in refused.text
    after = [await made.dispatcher.store(name).status() for name in ("shop", "bank")]
    assert [status.revision for status in after] == [status.revision for status in before]


@pytest.mark.parametrize(
    "path",
    [
        f"/v1/shop/entries/team/a/..%2F..%2F..%2F..%2Fbank%2Fentries%2F{HIDDEN}",
        f"/v1/shop/entries/team/a/%2e%2e/%2e%2e/b/{HIDDEN}",
        f"/v1/shop/entries/team/a/{HIDDEN}%00",
        f"/v1/shop%2F..%2Fbank/entries/{HIDDEN}",
        f"/v1/shop%2Fentries%2Fteam/a/{HIDDEN}",
        f"/v1/bank%2Fentries%2F{HIDDEN}",
        f"/v1/shop/entries%2Fteam%2Fb%2F{HIDDEN}",
        f"//v1/bank/entries/{HIDDEN}",
        f"/v1//entries/{HIDDEN}",
        f"/v1/BANK/entries/{HIDDEN}",
        f"/v1/ban%6B%00/entries/{HIDDEN}",
        f"/v1/bank'%20OR%201=1--/entries/{HIDDEN}",
        f"/v1/*/entries/{HIDDEN}",
        f"/v1/bank%FF/entries/{HIDDEN}",
        f"/V1/bank/entries/{HIDDEN}",
    ],
)
@pytest.mark.parametrize("token", ["team", "shop"])
async def test_a_path_in_disguise_leads_nowhere(made: Face, token: str, path: str) -> None:
    async with made.client(token) as http:
        # As it is: a client would resolve it.
        request = http.build_request("GET", ROOT)
        request.url = httpx2.URL(ROOT).copy_with(raw_path=path.encode())
        refused = await http.send(request)

    assert refused.status_code in (400, 403, 404), refused.text
    assert SECRET not in refused.text


async def test_a_caller_of_a_prefix_does_all_that_concerns_it(made: Face) -> None:
    """Isolation is of no use if a caller cannot work inside its own prefix."""
    async with made.client("team") as http:
        assert (await http.get("entries/team/a/mine")).json() == "mine"
        assert (await http.get("keys?prefix=team/a/")).json()["keys"] == ["team/a/mine"]
        assert len((await http.get("scan?prefix=team/a/")).json()["entries"]) == 1
        assert (await http.get("history/team/a/mine")).status_code == 200
        token = (await http.post("locks/team/a/l", json={"ttl": 60})).json()["token"]
        fence = {"Limpet-Fence": f"team/a/l;{token}"}
        assert (await http.put("entries/team/a/x", json=1, headers=fence)).status_code == 201
        assert [lock["name"] for lock in (await http.get("locks?prefix=team/a/")).json()["locks"]] == ["team/a/l"]
        page = (await http.get("keys?prefix=team/a/&after=team/a/mine")).json()
        assert page["keys"] == ["team/a/x"]


@pytest.mark.parametrize("after", ["", "a", THEIRS, "zzz", "\U0010ffff"])
async def test_a_cursor_leads_out_of_no_prefix(made: Face, after: str) -> None:
    async with made.client("team") as http:
        for verb in ("keys", "scan"):
            params = {"prefix": "team/a/", "after": after}
            assert HIDDEN not in (await http.get(verb, params=params)).text


async def test_a_caller_who_may_not_see_values_sees_the_rest(made: Face) -> None:
    async with made.client("blind") as http:
        head = await http.head(f"entries/{THEIRS}")
        assert (head.status_code, head.headers["Limpet-Version"]) == (200, "1")
        assert (await http.get("keys")).json()["count"] == 3
        shown = (await http.get("scan?values=false")).json()["entries"]
        assert all("value" not in entry for entry in shown)
        assert (await http.put("entries/new", json=1)).status_code == 201
        assert (await http.patch("records/r", json={"set": {"a": 1}})).status_code == 201
        assert (await http.delete("entries/new", headers={"If-Match": '"99"'})).status_code == 412
        assert (await http.get("status")).status_code == 200


async def test_a_conflict_shows_no_value_to_anybody(made: Face) -> None:
    async with made.client("root") as http:
        for write in (
            await http.put(f"entries/{THEIRS}", json=1, headers={"If-None-Match": "*"}),
            await http.post("batch", json={"guards": [{"key": THEIRS, "expect": {"value": "guess"}}]}),
        ):
            assert write.status_code == 412
            assert SECRET not in write.text


async def test_an_attempt_leaves_no_namespace_behind(made: Face) -> None:
    """A server that kept state for every requested name could be filled by requests."""
    known = set(made.dispatcher._stores)
    async with made.client("shop") as http:
        for number in range(20):
            assert (await http.get(f"{ROOT}/v1/made-up-{number}/keys")).status_code == 403

    assert set(made.dispatcher._stores) == known


def foreign_requests() -> list[tuple[str, dict[str, Any]]]:
    """Requests of every operation that name something foreign in each member that can name something."""
    fence = {"fence": {"name": THEIRS, "token": 1}}
    mine = {"key": "team/a/x"}
    put = {"op": "put", "key": "team/a/x", "value": 1}
    by_key = ["get", "set", "delete", "entry", "remaining", "put", "cas", "incr", "take", "touch", "fields", "history"]
    needed: dict[str, dict[str, Any]] = {
        "set": {"value": 1},
        "put": {"value": 1},
        "cas": {"value": 1, "expect": {"absent": True}},
        "touch": {"ttl": 1},
        "fields": {"get": None},
    }
    named = [(name, {"key": THEIRS, **needed.get(name, {})}) for name in by_key]
    fencing = ["delete", "put", "cas", "incr", "take", "touch", "fields"]
    named += [(name, {**mine, **fence, **needed.get(name, {})}) for name in fencing]
    named += [(name, {"name": THEIRS, "ttl": 1, "token": 1}) for name in ("refresh",)]
    named += [("unlock", {"name": THEIRS, "token": 1}), ("lock", {"name": THEIRS, "ttl": 1})]
    named += [
        (name, {"prefix": prefix})
        for name in ("list", "scan", "locks", "delete_prefix", "children")
        for prefix in ("", "team/a", THEIRS)
    ]
    named += [("watch", {"pattern": pattern}) for pattern in ("*", "team/a*", THEIRS)]
    named += [("outcome", {"request_id": "team/a/x"}), ("status", {})]
    named += [
        ("batch", {"writes": [{**put, "key": THEIRS}]}),
        ("batch", {"writes": [put, {"op": "take", "key": THEIRS}]}),
    ]
    named += [("delete_prefix", {"prefix": "team/a/", **fence})]
    named += [("append", {"prefix": prefix, "value": 1}) for prefix in ("team", "team/a", THEIRS)]
    named += [("append", {"prefix": "team/a/", "value": 1, **fence})]
    named += [("entries", {"keys": ["team/a/x", THEIRS]})]
    named += [("batch", {"writes": [put], "guards": [{"key": THEIRS, "expect": {"absent": True}}]})]
    named += [("batch", {"writes": [put], "fences": [{"name": THEIRS, "token": 1}]})]
    kv_put = {"value": {}, "semantics": {"purpose": "cursor"}}
    by, held = {"lastWriter": "a:b"}, {"held": {"key": THEIRS, "token": 1}}
    named += [
        ("kv_get", {"key": THEIRS}),
        ("kv_put", {"key": THEIRS, **kv_put, **by}),
        ("kv_delete", {"key": THEIRS, **by}),
    ]
    named += [("kv_put", {**mine, **kv_put, **by, **held}), ("kv_delete", {**mine, **by, **held})]
    named += [("kv_list", {"prefix": prefix}) for prefix in ("", "team/a", "team/b/")]
    kv_items = [{"op": "put", **mine, **kv_put}]
    named += [("kv_batch", {"items": [*kv_items, {"op": "delete", "key": THEIRS}], **by})]
    named += [("kv_batch", {"items": [{"op": "put", "key": THEIRS, **kv_put}], **by})]
    named += [("kv_batch", {"items": kv_items, **by, **held})]
    return named


def test_the_reach_of_every_operation_has_whatever_a_request_names() -> None:
    """What a request names and its reach does not would pass the dispatcher unchecked."""
    caller = Scoped("team", "shop", "team/a/")
    named = foreign_requests()
    passed = [
        (name, members)
        for name, members in named
        if caller.may("shop", "read", OPERATIONS[name].reach(request_of(OPERATIONS[name].request, members)).spans)
    ]

    assert passed == []
    assert {name for name, _ in named} == set(OPERATIONS)


def test_there_are_attacks_enough() -> None:
    assert len(ATTACKS) >= 60
