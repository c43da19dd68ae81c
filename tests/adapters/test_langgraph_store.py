"""LangGraph's long-term store: the same answers as its own store in memory, on every engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from langgraph.store.base import GetOp, InvalidNamespaceError, Op, PutOp
from langgraph.store.memory import InMemoryStore

import limpet
from limpet import sync
from limpet.adapters.langgraph import Store
from limpet.clock import ManualClock
from limpet.errors import InvalidValue
from tests.engines import ENGINES, unique, url_of

LABELS = ["a", "b", "a b", "a/b", "ü%2F", "%"]
VALUES = [{"n": 1, "s": "x"}, {"n": 2, "t": {"deep": [1, 2]}}, {"n": 3.5}, {"s": None}]
FILTERS: list[dict[str, Any] | None] = [
    None,
    {"n": 1},
    {"n": {"$ne": 1}},
    {"t": {"deep": [1, 2]}},
    {"s": {"$eq": "x"}},
    {"n": 2, "s": None},
]


@pytest.fixture(params=ENGINES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return url_of(request.param, tmp_path)


@pytest.fixture
async def store(url: str) -> AsyncIterator[Store]:
    async with limpet.open(url, namespace=unique("memory")) as opened:
        yield Store(opened)


def found(result: Any) -> Any:
    """What two stores must agree on: not the times, and of a search not the order."""
    if isinstance(result, list) and result and not isinstance(result[0], tuple):
        return sorted((item.namespace, item.key, str(item.value)) for item in result)
    return result and (result if isinstance(result, list) else (result.namespace, result.key, result.value))


async def step(store: Any, dice: random.Random) -> Any:
    """One drawn operation."""
    labels = [dice.choice(LABELS) for _ in range(dice.randint(1, 3))]
    namespace, key = tuple(labels), dice.choice(["k", "a/b", "//", "ü", "*"])
    match dice.randint(0, 5):
        case 0 | 1:
            return await store.aput(namespace, key, dice.choice(VALUES))
        case 2:
            return await store.adelete(namespace, key)
        case 3:
            return await store.aget(namespace, key)
        case 4:
            return await store.asearch(namespace[: dice.randint(0, 2)], filter=dice.choice(FILTERS), limit=1000)
        case _:
            prefix, depth = dice.choice([None, namespace[:1], ("*", labels[-1])]), dice.choice([None, 1, 2])
            return await store.alist_namespaces(prefix=prefix, suffix=dice.choice([None, (key,)]), max_depth=depth)


@pytest.mark.parametrize("seed", range(4))
async def test_a_script_of_any_steps_gives_what_the_store_in_memory_gives(seed: int, store: Store) -> None:
    model, dice, again = InMemoryStore(), random.Random(seed), random.Random(seed)

    for number in range(120):
        expected, got = await step(model, dice), await step(store, again)
        if isinstance(expected, list) and expected and isinstance(expected[0], tuple):
            # A namespace whose items are all deleted stays in the model's list.
            kept = {item.namespace for item in await store.asearch((), limit=1000)}
            expected = [each for each in expected if any(name[: len(each)] == each for name in kept)]
        if isinstance(got, list) and got and isinstance(got[0], tuple):
            assert set(got) <= set(expected), number
        else:
            assert found(got) == found(expected), number


async def test_the_operations_of_a_batch_read_first_and_then_write(store: Store) -> None:
    ops: list[Op] = [PutOp(("n",), "k", {"v": 1}), GetOp(("n",), "k"), PutOp(("n",), "k", {"v": 2})]

    assert await store.abatch(ops) == [None, None, None]
    item = await store.aget(("n",), "k")
    assert item is not None
    assert item.value == {"v": 2}


async def test_a_large_batch_is_written_in_parts(store: Store) -> None:
    ops = [PutOp(("n",), str(number), {"text": "x" * 40_000}) for number in range(150)]

    await store.abatch(ops)

    assert len(await store.asearch(("n",), limit=1000)) == 150
    assert len(await store.asearch(("n",), limit=20, offset=140)) == 10


async def test_large_namespaces_are_listed_by_their_names(store: Store) -> None:
    ops = [PutOp((name,), str(number), {"n": number}) for name in "abc" for number in range(300)]
    await store.abatch(ops)
    await store.aput(("b", "deep"), "k", {"n": 0})

    assert await store.alist_namespaces() == [("a",), ("b",), ("b", "deep"), ("c",)]
    assert await store.alist_namespaces(max_depth=1, limit=2, offset=1) == [("b",), ("c",)]


async def test_filters_compare_numbers(store: Store) -> None:
    for number in range(5):
        await store.aput(("n",), str(number), {"n": number, "name": f"item-{number}"})
    await store.aput(("n",), "none", {"name": "item-x"})

    async def keys(wanted: Any) -> list[str]:
        return [item.key for item in await store.asearch(("n",), filter={"n": wanted})]

    assert await keys({"$gt": 2}) == ["3", "4"]
    assert await keys({"$gte": 2, "$lt": 4}) == ["2", "3"]
    assert await keys({"$lte": 0}) == ["0"]
    with pytest.raises(ValueError, match="Unsupported operator"):
        await keys({"$like": 2})


@pytest.mark.parametrize("engine", ["memory", "sqlite"])
async def test_reading_renews_an_item_unless_it_shall_not(engine: str, tmp_path: Path) -> None:
    clock = ManualClock()
    async with limpet.open(url_of(engine, tmp_path), clock=clock) as opened:
        store = Store(opened, ttl={"default_ttl": 1})
        for key in ("read", "searched", "looked at", "left"):
            await store.aput(("n",), key, {"key": key})
        await store.aput(("n",), "kept", {}, ttl=None)

        clock.advance(40)
        await store.aget(("n",), "read")
        await store.asearch(("n",), filter={"key": "searched"})
        await store.aget(("n",), "looked at", refresh_ttl=False)
        clock.advance(40)

        left = await store.asearch(("n",), refresh_ttl=False)
        assert [item.key for item in left] == ["kept", "read", "searched"]


async def test_items_written_at_once_are_all_kept(store: Store) -> None:
    await asyncio.gather(*(store.aput(("n", str(number % 3)), str(number), {"n": number}) for number in range(60)))

    assert len(await store.asearch(("n",), limit=100)) == 60


async def test_a_query_is_refused_and_not_ignored(store: Store) -> None:
    with pytest.raises(InvalidValue, match="has no vectors"):
        await store.asearch(("n",), query="what")
    with pytest.raises(InvalidNamespaceError):
        await store.abatch([PutOp(("a.b",), "k", {})])


def test_the_methods_without_await_do_the_same(url: str) -> None:
    with sync.open(url, namespace=unique("memory")) as opened:
        store = Store(opened)
        store.put(("users", "ann"), "likes", {"food": "pizza"})
        item = store.get(("users", "ann"), "likes")
        assert item is not None
        assert (item.value, item.namespace, item.key) == ({"food": "pizza"}, ("users", "ann"), "likes")
        assert [found.key for found in store.search(("users",), filter={"food": "pizza"})] == ["likes"]
        assert store.list_namespaces() == [("users", "ann")]
        store.delete(("users", "ann"), "likes")
        assert store.get(("users", "ann"), "likes") is None


def test_a_url_is_opened_when_it_is_needed(tmp_path: Path) -> None:
    with Store(f"sqlite:///{tmp_path}/memory.db") as store:
        store.put(("n",), "k", {"v": 1})
    with Store(f"sqlite:///{tmp_path}/memory.db") as store:
        assert store.get(("n",), "k") is not None
