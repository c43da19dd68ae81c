"""The uses that semantic entries are for, on every engine; two harvesters that are killed again and again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import limpet
from limpet.errors import LockLost
from limpet.semantic.rows import rows_of
from limpet.semantic.store import Envelope, Put, Semantics, SemanticStore, VersionConflict
from tests.engines import ENGINES, unique, url_of
from tests.processes import PATIENCE_S
from tests.semantic.harvesters import CHECKPOINT, HOME, PAGE, Harvester, harvest
from tests.semantic.support import audit, lock_of

ITEMS = int(os.environ.get("LIMPET_HARVEST_ITEMS", "600"))


@pytest.fixture(params=ENGINES)
async def kept(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SemanticStore]:
    async with limpet.open(url_of(request.param, tmp_path), namespace=unique("uses")) as store:
        kept = SemanticStore(store, audit=audit())
        yield kept
        assert (await kept.verify()).problems == ()


async def effects(kept: SemanticStore) -> list[Envelope]:
    found, after = [], None
    while True:
        listing = await kept.kv_list(f"{HOME}/done/", limit=1000, after=after)
        found += listing.envelopes
        after = listing.cursor
        if after is None:
            return found


async def assert_each_once(kept: SemanticStore, items: int) -> None:
    found = await effects(kept)
    assert {one.key for one in found} == {f"{HOME}/done/{number}" for number in range(items)}
    assert {one.version for one in found} == {1}
    # The trail has each effect once, and of the checkpoint in order.
    rows = [row async for row in rows_of(kept.store)]
    done = [row["key"] for row in rows if row["key"].startswith(f"{HOME}/done/")]
    assert len(done) == len({*done}) == items
    steps = [row["version"] for row in rows if row["key"] == CHECKPOINT]
    assert steps == list(range(1, -(-items // PAGE) + 1))


# A checkpoint -----------------------------------------------------------------


async def test_two_harvesters_work_on_every_item_once(kept: SemanticStore, capsys: pytest.CaptureFixture[str]) -> None:
    await asyncio.gather(harvest(kept, "h-1", 90), harvest(kept, "h-2", 90))
    capsys.readouterr()

    await assert_each_once(kept, 90)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sqlite", "postgres"])
async def test_harvesters_that_are_killed_leave_nothing_out_and_do_nothing_twice(engine: str, tmp_path: Path) -> None:
    """Two work at a time. Whenever some pages were done, one of them is killed, and another takes its place."""
    url, name, dice = url_of(engine, tmp_path), unique("harvest"), random.Random(5)
    pages = kills = 0
    listening: dict[asyncio.Future[Any], Harvester] = {}
    with contextlib.ExitStack() as working:

        def listen(harvester: Harvester) -> None:
            listening[asyncio.ensure_future(harvester.receive_async())] = harvester

        def start() -> None:
            listen(working.enter_context(Harvester(url, name, unique("h"), ITEMS)))

        start()
        start()
        async with asyncio.timeout(10 * PATIENCE_S + ITEMS / 10):
            while listening:
                printed, _ = await asyncio.wait(listening, return_when=asyncio.FIRST_COMPLETED)
                for answer in printed:
                    speaker = listening.pop(answer)
                    # One that was killed prints no more.
                    if answer.exception() is not None or answer.result() == "done":
                        continue
                    pages += 1
                    if pages % 5 == 0 and answer.result() < ITEMS:
                        dice.choice([speaker, *listening.values()]).kill()
                        kills += 1
                        start()
                    listen(speaker)
    async with limpet.open(url, namespace=name) as store:
        kept = SemanticStore(store, audit=audit())
        await assert_each_once(kept, ITEMS)
        async with asyncio.timeout(PATIENCE_S):
            # A sealer that was killed is waited for, as long as its lock lasts.
            while (report := await kept.verify()).unsealed:
                await kept.seal()
        assert (report.problems, report.unsealed) == ((), 0)
    assert kills >= 3


# Flags ------------------------------------------------------------------------


async def test_flags_of_a_tenant_are_followed_live_and_others_are_not_notified(kept: SemanticStore) -> None:
    flag = {"purpose": "feature_flag", "producer": "console", "consumerHints": ["web"]}
    flags: dict[str, Any] = {}
    news = asyncio.Event()

    async def follow() -> None:
        async for key, envelope in kept.watch("tenant/acme/project/docs/flags/"):
            flags[key.rpartition("/")[2]] = None if envelope is None else envelope.value
            news.set()

    async def put(tenant: str, value: dict[str, Any]) -> None:
        await kept.kv_put(f"tenant/{tenant}/project/docs/flags/search", value, writer="alice", semantics=flag)

    async def until(value: Any) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while flags.get("search") != value:
                news.clear()
                await news.wait()

    await put("acme", {"on": False})
    following = asyncio.ensure_future(follow())
    await until({"on": False})
    await put("other", {"on": "never seen"})
    await put("acme", {"on": True})
    await until({"on": True})
    await kept.kv_delete("tenant/acme/project/docs/flags/search", writer="alice")
    await until(None)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


# A lock -----------------------------------------------------------------------


async def test_a_lock_outlives_the_crash_of_its_holder_and_no_longer(kept: SemanticStore) -> None:
    key = f"{HOME}/locks/nightly"

    async def acquire(name: str, ttl_s: float) -> Envelope | None:
        with contextlib.suppress(VersionConflict):
            return await kept.kv_put(
                key, {"by": name}, writer=f"{name}:nightly", semantics=lock_of(ttl_s), expected_version=0
            )
        return None

    async def report(name: str, held: Envelope) -> None:
        await kept.kv_put(f"{HOME}/report", {"by": name}, writer=name, semantics={"purpose": "checkpoint"}, held=held)

    crashed = await acquire("a", 0.3)
    assert crashed is not None
    assert await acquire("b", 60) is None
    async with asyncio.timeout(PATIENCE_S):
        while (second := await acquire("b", 60)) is None:  # noqa: ASYNC110 - no event for a moment that passes
            await asyncio.sleep(0.02)
    await report("b", second)
    with pytest.raises(LockLost):
        await report("a", crashed)
    found = await kept.kv_get(f"{HOME}/report")
    assert found is not None
    assert found.value == {"by": "b"}
    assert [row["op"] async for row in rows_of(kept.store, prefix=key)] == ["put", "expire", "put"]


# An index ---------------------------------------------------------------------


async def test_a_new_index_version_is_reindexed_once(kept: SemanticStore) -> None:
    semantics = Semantics("checkpoint", producer="search", consumer_hints=("reindexer", "cache"))
    index, done, seen = f"{HOME}/index/main/version", [], asyncio.Event()

    async def work(name: str) -> None:
        async for _, envelope in kept.watch(f"{HOME}/index/main/"):
            assert envelope is not None
            assert envelope.value is not None
            job = Put(f"{HOME}/reindex/{envelope.value['model']}", {"by": name}, semantics, expected_version=0)
            with contextlib.suppress(VersionConflict):
                await kept.kv_batch([job], writer=name)
                done.append(envelope.value["model"])
            seen.set()

    workers = [asyncio.ensure_future(work(f"w-{number}")) for number in range(3)]
    async with asyncio.timeout(PATIENCE_S):
        for model in ("one", "two", "three"):
            await kept.kv_put(index, {"model": model}, writer="alice", semantics=semantics)
            while model not in done:
                seen.clear()
                await seen.wait()
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)
    assert done == ["one", "two", "three"]
