"""Several processes that write the same keys: each write happens once, on what the one before left."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import ExitStack

import pytest

import limpet
from limpet.errors import Contention
from tests.engines import unique
from tests.nats.support import engine_of, server
from tests.processes import ROOT

PROCESSES = 4
COUNT = 25


async def test_processes_that_write_the_same_keys_lose_nothing() -> None:
    """They plan on what they know, come too late, and plan again."""
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        with ExitStack() as stack:
            workers = [stack.enter_context(_worker(store.name, index)) for index in range(PROCESSES)]
            for word in ("ready", "done"):
                for worker in workers:
                    assert worker.stdout is not None
                    assert await asyncio.to_thread(worker.stdout.readline) == f"{word}\n"
                if word == "ready":
                    for worker in workers:
                        assert worker.stdin is not None
                        worker.stdin.write("go\n")
                        worker.stdin.flush()

        counted = await store.entry("count")
        assert counted is not None
        assert counted.value == counted.version == PROCESSES * COUNT
        assert (await store.get("from"), await store.get("to")) == (-PROCESSES * COUNT, PROCESSES * COUNT)
        fields = await store.record("job").fields()
        assert fields is not None
        assert len(fields) == PROCESSES * COUNT


def _worker(namespace: str, index: int) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "tests.nats.workers", server(), namespace, str(COUNT), f"w{index}"]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)


async def test_a_key_that_others_keep_writing_ends_in_contention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody hangs: after so many attempts the caller is told which key it was."""
    monkeypatch.setattr("limpet.engines.nats_writer.ATTEMPTS", 3)
    async with (
        limpet.open(server(), namespace=unique(), sweep=False) as store,
        limpet.open(server(), namespace=store.name, sweep=False) as other,
    ):
        await store.put("hot", 0)
        space = engine_of(store)._spaces[store.name].space
        look = space.last

        async def look_too_early(place: tuple[limpet.model.Family, str]) -> object:
            found = await look(place)
            await other.add("hot")
            return found

        monkeypatch.setattr(space, "last", look_too_early)
        space.known.clear()

        with pytest.raises(Contention, match="'hot' changed under 3 attempts"):
            await engine_of(store).commit(store.name, store.batch().put("hot", 1)._batch())
