"""Indexes are used: a scan by one reads what it finds, on every engine that keeps any."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import limpet
from limpet.engine import Indexing
from limpet.index import CANDIDATES_MAX, IndexProbe, make_probes
from limpet.keys import prefix_span
from tests.engines import ENGINES, unique, url_of

EVERYTHING = prefix_span("")
COUNT = 400


@pytest.fixture(params=[name for name in ENGINES if name not in ("memory", "nats")])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[limpet.Store]:
    async with limpet.open(url_of(request.param, tmp_path), namespace=unique(), sweep=False) as opened:
        for number in range(COUNT):
            await opened.put(f"job/{number:03}", limpet.Fields(n=number, raw=b"%d" % number, state="open", who=b"me"))
        for name in ("n", "raw", "state", "who"):
            assert await opened.index(name)
        yield opened


async def found(store: limpet.Store, where: limpet.Filter) -> list[str] | None:
    engine = store._session.engine
    assert isinstance(engine, Indexing)
    keys = await engine.candidates(store.name, EVERYTHING, make_probes(where))
    return None if keys is None else sorted(keys)


async def test_it_finds_little_more_than_what_matches(store: limpet.Store) -> None:
    n: Any = limpet.field("n")

    assert await found(store, n < 3) == ["job/000", "job/001", "job/002", "job/003"]
    assert await found(store, n >= 398) == ["job/398", "job/399"]
    assert await found(store, n == 7) == ["job/007"]
    assert await found(store, n == 7.5) == []
    assert await found(store, limpet.field("raw") == b"007") == ["job/007"]
    assert await found(store, limpet.field("who") == b"you") == []
    assert await found(store, limpet.field("state") == "shut") == []


async def test_the_one_that_finds_least_is_used(store: limpet.Store) -> None:
    both = (limpet.field("state") == "open") & (limpet.field("n") == 7)

    assert await found(store, both) == ["job/007"]
    assert await found(store, limpet.field("state") == "open") == [f"job/{number:03}" for number in range(COUNT)]


async def test_what_no_index_serves_is_scanned(store: limpet.Store) -> None:
    assert await found(store, limpet.field("state") != "open") is None
    assert await found(store, limpet.field("state") > "open") is None
    assert await found(store, limpet.field("other") == 1) is None
    assert [entry.key async for entry in store.scan(where=limpet.field("state") != "open")] == []


async def test_too_many_are_no_help(store: limpet.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    module = __import__(type(store._session.engine).__module__, fromlist=["CANDIDATES_MAX"])
    monkeypatch.setattr(module, "CANDIDATES_MAX", COUNT - 1)

    assert await found(store, limpet.field("state") == "open") is None
    assert await found(store, limpet.field("n") == 7) == ["job/007"]
    assert len([entry async for entry in store.scan(where=limpet.field("state") == "open")]) == COUNT


async def test_one_that_is_dropped_is_used_no_more(store: limpet.Store) -> None:
    await store.unindex("n")

    assert await found(store, limpet.field("n") == 7) is None
    assert [entry.key async for entry in store.scan(where=limpet.field("n") == 7)] == ["job/007"]


def test_a_part_that_can_hold_nothing_is_known() -> None:
    assert not IndexProbe("n").has_numbers
    assert make_probes(limpet.field("n").in_([])) == [IndexProbe("n")]
    assert CANDIDATES_MAX == 50_000
