"""A store that is opened by its first use."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

import limpet
from limpet.errors import InvalidNamespace

URLS = ["memory:", "sqlite:///{tmp}/state.db"]


@pytest.fixture(params=URLS)
def state(request: pytest.FixtureRequest, tmp_path: Path) -> limpet.Lazy:
    return limpet.lazy(request.param.format(tmp=tmp_path), namespace="shop")


def test_each_loop_and_callers_without_one_share_what_is_stored(state: limpet.Lazy) -> None:
    async def add() -> int:
        stores = await asyncio.gather(*(_open(state) for _ in range(5)))
        assert len({id(store) for store in stores}) == 1
        return await stores[0].add("n")

    blocking = state.blocking()
    found = [asyncio.run(add()), blocking.add("n"), asyncio.run(add())]

    assert found == [1, 2, 3]
    assert state.blocking() is blocking
    assert blocking.name == "shop"
    state.close_blocking()


def test_a_closed_one_is_opened_again(state: limpet.Lazy) -> None:
    async def use() -> None:
        first = await state
        await first.put("k", 1)
        await state.close()
        await state.close()
        with pytest.raises(limpet.errors.Closed):
            await first.get("k")
        assert await (await state).add("n") == 1
        await state.close()

    first = state.blocking()
    asyncio.run(use())
    state.close_blocking()
    state.close_blocking()

    assert state.blocking() is not first
    state.close_blocking()


def test_threads_that_come_at_once_get_the_same_store(state: limpet.Lazy) -> None:
    stores: list[limpet.sync.Store] = []
    threads = [threading.Thread(target=lambda: stores.append(state.blocking())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len({id(store) for store in stores}) == 1
    state.close_blocking()


def test_naming_a_store_opens_nothing(tmp_path: Path) -> None:
    limpet.lazy(f"sqlite:///{tmp_path}/state.db")

    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InvalidNamespace):
        limpet.lazy(namespace="Shop")


async def _open(state: limpet.Lazy) -> limpet.Store:
    return await state
