"""The store for Litestar."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from litestar import Litestar, Request, get
from litestar.middleware.session.server_side import ServerSideSessionConfig
from litestar.stores.memory import MemoryStore
from litestar.stores.registry import StoreRegistry
from litestar.testing import AsyncTestClient

import limpet
from limpet.adapters.litestar import Store
from tests.engines import unique


@pytest.fixture
async def store(url: str) -> AsyncIterator[Store]:
    """A store on an engine."""
    opened = Store(url, namespace=unique())
    async with opened:
        yield opened


async def test_it_answers_as_the_store_of_litestar_does(store: Store) -> None:
    """The same random calls, one after the other, to both."""
    theirs, dice = MemoryStore(), random.Random(3)
    for step in range(150):
        key = dice.choice(["a", "b/c", "", "\0", "ä" * 2000])
        expires = dice.choice([None, 0, 100, timedelta(seconds=200)])
        calls: list[tuple[str, dict[str, Any]]] = [
            ("set", {"key": key, "value": dice.choice([b"\xff\0", "text", "", b"", f"{step}"]), "expires_in": expires}),
            ("get", {"key": key, "renew_for": expires}),
            ("exists", {"key": key}),
            ("delete", {"key": key}),
            ("delete_all", {}),
        ]
        call, arguments = dice.choice([*calls, *calls[:2] * 4])
        assert await getattr(store, call)(**arguments) == await getattr(theirs, call)(**arguments), (step, call)
        # For a value without an end the interface says None, and the store in memory -1.
        mine, reference = await store.expires_in(key), await theirs.expires_in(key)
        assert (mine is None) == (reference in (None, -1)), (step, call)
        assert mine is None or abs(mine - (reference or 0)) <= 1, (step, call)


async def test_a_value_expires_and_is_renewed(store: Store) -> None:
    await store.set("short", "x", expires_in=timedelta(milliseconds=300))
    await store.set("renewed", "x", expires_in=timedelta(milliseconds=300))
    assert await store.get("renewed", renew_for=100) == b"x"
    assert await store.expires_in("short") == 0

    await asyncio.sleep(0.35)
    assert await store.get("short", renew_for=100) is None
    assert not await store.exists("short")
    assert await store.get("renewed") == b"x"


async def test_a_namespace_is_apart_and_goes_with_its_parent(url: str) -> None:
    async with limpet.open(url, namespace=unique()) as opened:
        await opened.put("mine", 1)
        parent = Store(opened)
        child, other = parent.with_namespace("a"), parent.with_namespace("a/b" * 50)
        grandchild = child.with_namespace("a")
        stores = [parent, child, other, grandchild]
        for number, each in enumerate(stores):
            await each.set("a", str(number))
        assert [await each.get("a") for each in stores] == [b"0", b"1", b"2", b"3"]

        await child.delete_all()
        assert [await each.get("a") for each in stores] == [b"0", None, b"2", None]
        await parent.delete_all()
        assert (await opened.keys()).keys == ["mine"]


async def test_renewing_does_not_end_what_another_has_made_for_ever() -> None:
    async with limpet.open("memory:") as opened:
        store = Store(opened)
        await store.set("k", "x", expires_in=100)
        await asyncio.gather(*(store.get("k", renew_for=200) for _ in range(10)), store.set("k", "y"))
        assert await store.get("k", renew_for=100) == b"y"
        assert await store.expires_in("k") is None


async def test_two_workers_share_sessions(url: str) -> None:
    @get("/count")
    async def count(request: Request[Any, Any, Any]) -> int:
        request.session["count"] = request.session.get("count", 0) + 1
        return int(request.session["count"])

    namespace, answers, cookies = unique(), [], None
    for _ in range(2):
        root = Store(url, namespace=namespace)
        app = Litestar(
            [count],
            middleware=[ServerSideSessionConfig().middleware],
            stores=StoreRegistry(default_factory=root.with_namespace),
            on_shutdown=[root.close],
        )
        async with AsyncTestClient(app, cookies=cookies) as client:
            answers += [(await client.get("/count")).json() for _ in range(2)]
            cookies = client.cookies

    assert answers == [1, 2, 3, 4]


async def test_closing_ends_what_a_url_has_opened_and_leaves_a_given_store_open() -> None:
    async with limpet.open("memory:") as opened:
        store = Store(opened)
        async with store:
            await store.set("k", "x")
        assert await store.get("k") == b"x"
    with pytest.raises(limpet.errors.Closed):
        await store.get("k")
    with pytest.raises(TypeError, match=r"limpet\.open"):
        Store(5)  # type: ignore[arg-type]
