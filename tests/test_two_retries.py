"""Two retries of one request, in two processes, on engines whose server only compares what a plan has read."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import limpet
from limpet.conformance.support import session_of
from limpet.model import ABSENT, Add, Batch, Change, Commit, Guard, Patch, Put, Write
from limpet.request_ids import new_request_id
from tests.engines import unique, url_of

Stores = tuple[limpet.Store, limpet.Store]

WRITES: dict[str, Write] = {"put": Put("a", b"1"), "add": Add("a", 1), "patch": Patch("a", {"f": b"1"})}


@pytest.fixture(params=["postgres", "redis"])
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stores]:
    """Two stores on one namespace, as two processes have them."""
    url, namespace = url_of(request.param, tmp_path), unique()
    async with (
        limpet.open(url, namespace=namespace, sweep=False) as one,
        limpet.open(url, namespace=namespace, sweep=False) as other,
    ):
        yield one, other


async def commit(store: limpet.Store, batch: Batch) -> Any:
    return await session_of(store).engine.commit(store.name, batch)


async def find_caused(store: limpet.Store, request_id: str) -> list[Change]:
    page = await session_of(store).engine.changes(store.name, 0)
    return [change for change in page.changes if change.cause == request_id]


@pytest.mark.parametrize("guards", [(), (Guard("a", ABSENT),)], ids=["plain", "guarded"])
@pytest.mark.parametrize("write", WRITES)
async def test_a_retry_that_is_applied_and_undone_after_another_has_searched_is_not_applied_again(
    stores: Stores, monkeypatch: pytest.MonkeyPatch, write: str, guards: tuple[Guard, ...]
) -> None:
    """Each entry is then as the other retry has found it, and only the mark of the request is another one."""
    one, other = stores
    await one.put("first", 1)
    retry = Batch(guards, (WRITES[write],), request_id=new_request_id(), retry_since=1)
    engine: Any = session_of(one).engine
    find_changes = engine.find_changes
    landed: list[Any] = []

    async def find_before(*args: Any) -> Any:
        found = await find_changes(*args)
        if not landed:
            landed.append(await commit(other, retry))
            await other.delete("a")
        return found

    monkeypatch.setattr(engine, "find_changes", find_before)

    outcome = await commit(one, retry)

    assert isinstance(outcome, Commit)
    assert outcome.replayed
    assert not landed[0].replayed
    assert outcome.revision == landed[0].revision
    assert len(await find_caused(one, retry.request_id or "")) == 1
    assert await one.get("a") is None


async def test_retries_of_a_group_share_their_mark_and_are_each_applied_once(stores: Stores) -> None:
    """The batches of a group whose reply was lost have one mark; their retries come together, perhaps twice."""
    one, other = stores
    await one.put("first", 1)
    group = new_request_id()
    retries = [Batch((), (Add(f"n{n}", 1),), request_id=f"{group}.{n}", retry_since=1) for n in range(1, 33)]

    for _ in range(2):
        sent = [(store, retry) for store in stores for retry in retries]
        random.shuffle(sent)
        await asyncio.gather(*(commit(store, retry) for store, retry in sent))

    for n in range(1, 33):
        assert await other.get(f"n{n}") == 1
    page = await session_of(one).engine.changes(one.name, 1)
    assert len(page.changes) == 32
