"""Several processes that write the same keys: each write happens once, on what the one before left."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import ExitStack

import pytest

import limpet
from limpet.engines.nats.messages import EntryId, Message
from limpet.retry import JITTER_S_MAX, jitter_s
from tests.engines import unique
from tests.nats.support import server, stream_of
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
    return _start(words)


ATTEMPTS_MAX = 50


async def test_processes_on_one_key_all_get_through() -> None:
    """None of them is left waiting for the others: each needs a few attempts for a write, and finishes."""
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        with ExitStack() as stack:
            words = [sys.executable, "-m", "tests.nats.workers", server(), store.name, str(COUNT), "hot"]
            workers = [stack.enter_context(_start(words)) for _ in range(PROCESSES)]
            attempts = []
            for worker in workers:
                assert worker.stdin is not None
                assert worker.stdout is not None
                assert await asyncio.to_thread(worker.stdout.readline) == "ready\n"
            for worker in workers:
                assert worker.stdin is not None
                worker.stdin.write("go\n")
                worker.stdin.flush()
            for worker in workers:
                assert worker.stdout is not None
                attempts.append(int(await asyncio.to_thread(worker.stdout.readline)))

        assert await store.get("count") == PROCESSES * COUNT
        assert max(attempts) <= COUNT * ATTEMPTS_MAX


@pytest.mark.parametrize("several", [False, True])
async def test_a_write_goes_on_however_often_others_are_first(several: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only `update` gives up: it would run a function of its caller once more each time."""
    async with (
        limpet.open(server(), namespace=unique(), sweep=False) as store,
        limpet.open(server(), namespace=store.name, sweep=False) as other,
    ):
        await store.put("hot", 0)
        stream = stream_of(store)
        look, looks = stream.last, 0

        async def look_too_early(entry_id: EntryId) -> Message | None:
            nonlocal looks
            found = await look(entry_id)
            if entry_id == ("data", "hot"):
                looks += 1
                if looks <= 100:
                    await other.add("hot")
            return found

        monkeypatch.setattr(stream, "last", look_too_early)
        stream.known.clear()

        draft = store.batch().add("hot", 1000)
        await (draft.put("beside", 1) if several else draft).commit()

        assert await other.get("hot") == 1100
        assert looks == 101


async def test_a_pause_does_not_grow() -> None:
    """A process that lost would otherwise wait longer each time, and the one that won write on."""
    assert max(jitter_s(3600) for _ in range(100)) <= JITTER_S_MAX
    assert max(jitter_s(0.002) for _ in range(100)) <= 0.002


def _start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
