"""Answers have a bound in bytes: whatever is listed comes in pages of 4 MB, and a cursor leads to the next."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

import limpet
from limpet.errors import InvalidValue
from limpet.keys import OPERANDS_MAX, PAGE_BYTES, TESTS_MAX, Span, fit
from limpet.model import Filter, Test
from limpet.protocol import engine_msgpack as wire
from limpet.server import engine_routes as primitives
from limpet.server import validate as nouns
from limpet.server.requests import Scan, request_of
from limpet.store import Store
from tests.server.http_support import Face, face

LARGE = "x" * 900_000
PAGE_LARGE = 5  # The fifth is what makes a page large enough.


@pytest.fixture
async def made() -> AsyncIterator[Face]:
    async with face() as found:
        yield found


@pytest.fixture
async def http(made: Face) -> AsyncIterator[httpx2.AsyncClient]:
    async with made.client() as client:
        yield client


@pytest.fixture
def store(made: Face) -> Store:
    return Store(made.session, "shop")


@pytest.mark.parametrize(
    ("sizes", "count"),
    [([], 0), ([10 * PAGE_BYTES, 1], 1), ([PAGE_BYTES, 1, 1], 2), ([1] * 9, 9), ([PAGE_BYTES - 1, 1, 1, 1], 3)],
)
def test_a_page_ends_with_the_item_that_makes_it_large_enough(sizes: list[int], count: int) -> None:
    assert fit(sizes) == count


async def test_a_scan_ends_a_page_by_its_size_and_says_where_to_go_on(store: Store, http: httpx2.AsyncClient) -> None:
    for number in range(12):
        await store.put(f"large/{number:02}", LARGE)

    found: list[str] = []
    sizes: list[int] = []
    parameters: dict[str, Any] = {"prefix": "large/", "limit": 10_000}
    while True:
        page = (await http.get("scan", params=parameters)).json()
        found += [entry["key"] for entry in page["entries"]]
        sizes.append(len(page["entries"]))
        assert page["truncated"] == (page["cursor"] is not None)
        if not page["truncated"]:
            break
        parameters["after"] = page["cursor"]

    assert found == [f"large/{number:02}" for number in range(12)]
    assert sizes == [PAGE_LARGE, PAGE_LARGE, 2]


async def test_a_scan_without_values_has_them_all_on_a_page(store: Store, http: httpx2.AsyncClient) -> None:
    for number in range(12):
        await store.put(f"large/{number:02}", LARGE)

    page = (await http.get("scan", params={"values": "false"})).json()

    assert (len(page["entries"]), page["truncated"]) == (12, False)


async def test_entries_that_are_too_large_together_are_refused(store: Store, http: httpx2.AsyncClient) -> None:
    """They are read at one moment, so that they cannot come in pages."""
    keys = [f"large/{number}" for number in range(PAGE_LARGE)]
    for key in keys:
        await store.put(key, LARGE)

    refused = await http.post("read", json={"keys": keys})
    brief = await http.post("read", json={"keys": keys, "with_value": False})

    assert (refused.status_code, refused.json()["code"]) == (413, "value_too_large")
    assert [entry["size_bytes"] for entry in brief.json()["entries"]] == [len(LARGE) + 2] * PAGE_LARGE


async def test_semantic_entries_come_in_pages_too(http: httpx2.AsyncClient) -> None:
    for number in range(7):
        put = {
            "value": {"text": LARGE},
            "lastWriter": "agent:one",
            "semantics": {"purpose": "checkpoint"},
        }
        answer = await http.put(f"semantic/tenant/t/project/p/{number}", json=put)
        assert answer.status_code == 201, answer.text

    first = (await http.get("semantic", params={"prefix": "tenant/t/"})).json()
    rest = (await http.get("semantic", params={"prefix": "tenant/t/", "after": first["cursor"]})).json()

    assert (len(first["entries"]), first["truncated"]) == (PAGE_LARGE, True)
    assert (len(rest["entries"]), rest["truncated"], rest["cursor"]) == (2, False, None)


async def test_keys_come_in_pages_of_bytes_too(store: Store, http: httpx2.AsyncClient) -> None:
    for number in range(4_100):
        await store.put(f"{number:04}" + "k" * 1_000, 1)

    page = (await http.get("keys", params={"limit": 10_000})).json()

    assert page["truncated"]
    assert page["count"] == len(page["keys"]) == PAGE_BYTES // 1_004 + 1
    assert page["cursor"] == page["keys"][-1]
    rest = (await http.get("keys", params={"limit": 10_000, "after": page["cursor"]})).json()
    assert page["count"] + rest["count"] == 4_100


async def test_locks_come_in_pages(store: Store, http: httpx2.AsyncClient) -> None:
    for number in range(5):
        await store.lock(f"l{number}", ttl=60).acquire()

    first = (await http.get("locks", params={"limit": 3})).json()
    rest = (await http.get("locks", params={"limit": 3, "after": first["cursor"]})).json()

    assert ([lock["name"] for lock in first["locks"]], first["truncated"]) == (["l0", "l1", "l2"], True)
    assert ([lock["name"] for lock in rest["locks"]], rest["truncated"], rest["cursor"]) == (["l3", "l4"], False, None)
    assert (await http.get("locks", params={"limit": 0})).status_code == 400


# History ------------------------------------------------------------------------


async def history(http: httpx2.AsyncClient, key: str, **parameters: Any) -> list[list[int]]:
    """The versions on each page of a history, from the latest page to the first."""
    pages: list[list[int]] = []
    while True:
        page = (await http.get(f"history/{key}", params=parameters)).json()
        pages.append([change["version"] for change in page["changes"]])
        assert page["truncated"] == (page["cursor"] is not None)
        if not page["truncated"]:
            return pages
        parameters["before"] = page["cursor"]


async def test_a_history_begins_with_the_latest_changes_and_goes_back(store: Store, http: httpx2.AsyncClient) -> None:
    for number in range(1, 8):
        for _ in range(number):
            await store.put("other", number)
        await store.put("k", number)

    assert await history(http, "k") == [[1, 2, 3, 4, 5, 6, 7]]
    assert await history(http, "k", limit=7) == [[1, 2, 3, 4, 5, 6, 7]]
    assert [page for page in await history(http, "k", limit=3) if page] == [[5, 6, 7], [2, 3, 4], [1]]
    assert await history(http, "none") == [[]]
    assert await history(http, "k", before=1) == [[]]
    assert (await http.get("history/k", params={"before": 10**9})).json()["changes"][-1]["version"] == 7


async def test_a_history_ends_a_page_by_its_size(store: Store, http: httpx2.AsyncClient) -> None:
    for _ in range(8):
        await store.put("k", LARGE)

    pages = await history(http, "k", limit=1_000)

    assert [page for page in pages if page] == [[4, 5, 6, 7, 8], [1, 2, 3]]


async def test_one_change_is_not_looked_for_in_the_whole_log(store: Store, http: httpx2.AsyncClient) -> None:
    for _ in range(300):
        await store.put("k", "x" * 1_000)
    read = 0
    engine = store._session.engine
    changes = engine.changes

    async def counted(*given: Any, **options: Any) -> Any:
        nonlocal read
        feed = await changes(*given, **options)
        read += len(feed.changes)
        return feed

    engine.changes = counted  # type: ignore[method-assign]
    assert len((await http.get("history/k", params={"limit": 1})).json()["changes"]) == 1
    assert read <= 16


async def test_a_history_goes_on_where_the_log_was_trimmed(store: Store, http: httpx2.AsyncClient) -> None:
    for _ in range(50):
        await store.put("k", 1)
    await store._session.engine.trim("shop", limpet.Window(age_ms=0, changes=10, size_bytes=0, age_ms_min=0))

    assert sum(len(page) for page in await history(http, "k", limit=3)) <= 10


# Operands -----------------------------------------------------------------------


def test_a_test_compares_with_a_bounded_number_of_values() -> None:
    """Every entry of a scan is compared with all of them, on one thread."""
    many = range(OPERANDS_MAX + 1)
    assert limpet.field("n").in_(many[:-1]).tests
    for build in (limpet.field("n").in_, limpet.field("n").not_in):
        with pytest.raises(InvalidValue, match="up to 1,000 values"):
            build(many)
    for op in ("in", "not_in"):
        parameters = request_of(Scan, {"where": [{"field": "n", "op": op, "value": [*many]}]})
        with pytest.raises(InvalidValue, match="up to 1,000 values"):
            parameters.where[0].filter()
    sent = Filter((Test("n", "in", tuple(b"%d" % number for number in many)),))
    with pytest.raises(InvalidValue, match="up to 1,000 values"):
        nouns.check_scan(wire.Scan(Span("", None), where=sent))


def test_a_filter_has_a_bounded_number_of_tests() -> None:
    where = limpet.field("n") == 0
    for number in range(1, TESTS_MAX):
        where = where & (limpet.field("n") != number)
    with pytest.raises(InvalidValue, match="up to 32 tests"):
        where & (limpet.field("n") != -1)


async def test_too_many_operands_over_http_are_refused(http: httpx2.AsyncClient) -> None:
    parameters = {"where": [{"field": "n", "op": "in", "value": [*range(OPERANDS_MAX + 1)]}]}
    answer = await http.post("scan", json=parameters)
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_value")
    assert "1,000" in answer.json()["detail"]


# Reads --------------------------------------------------------------------------


async def test_a_read_that_repeats_a_key_is_bounded(store: Store, made: Face) -> None:
    await store.put("large", LARGE)
    app = made.app
    app.router.routes.extend(primitives.routes(made.session, callers=made.tokens, dispatcher=made.dispatcher))

    async with made.client() as http:
        for count, status in ((10, 200), (1_000, 413)):
            body = wire.encode(wire.Read(["large"] * count))
            answer = await http.post("engine/read", content=body, headers={"Content-Type": wire.MEDIA})
            assert answer.status_code == status
