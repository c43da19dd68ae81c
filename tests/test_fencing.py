"""Holders and leaders that are stopped past their time, or killed: what they write late is refused.

``LIMPET_LOCKS_LONG=1`` plays a hundred rounds instead of three.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from bisect import bisect_right
from contextlib import ExitStack
from pathlib import Path

import pytest

import limpet
from limpet.errors import LockLost
from tests import processes
from tests.engines import ENGINES, unique, url_of
from tests.fenced import TTL_S
from tests.processes import PATIENCE_S

LONG = bool(os.environ.get("LIMPET_LOCKS_LONG"))
ROUNDS = 100 if LONG else 3
CANDIDATES = 5

# A holder that was stopped within its transaction may block all others. Then none takes over, and it is continued.
STOPPED_S_MAX = 3.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800 if LONG else 600)]
across_processes = pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "memory"])


class Process(processes.Process):
    """A function of ``tests.fenced`` in a process of its own."""

    module = "tests.fenced"


# Locks ------------------------------------------------------------------------


@across_processes
async def test_a_holder_that_was_stopped_past_its_time_writes_nothing(engine: str, tmp_path: Path) -> None:
    """Whether its successor still holds the lock, or is done with it, when it goes on."""
    url, namespace = url_of(engine, tmp_path), unique("fencing")
    async with limpet.open(url, namespace=namespace) as store:
        with Process("hold", url, namespace) as holder:
            for number in range(ROUNDS):
                holder.send("hold")
                token = await holder.receive_async()
                _, status = await asyncio.to_thread(os.waitpid, holder.pid, os.WUNTRACED)
                assert os.WIFSTOPPED(status)

                successor = await store.lock("job", ttl=60, wait=PATIENCE_S).acquire()
                written = await store.put("report", number, fence=successor)
                if number % 2:
                    await successor.release()
                os.kill(holder.pid, signal.SIGCONT)

                assert await holder.receive_async() == "refused"
                assert await store.entry("report") == written
                assert successor.token is not None
                assert successor.token > token
                if not number % 2:
                    await successor.release()


async def test_a_task_that_was_held_up_past_its_time_writes_nothing() -> None:
    async with limpet.open("memory:") as store:
        for number in range(ROUNDS):
            holder = await store.lock("job", ttl=0.02).acquire()
            goes_on = asyncio.Event()

            async def write_late(lock: limpet.Lock = holder, goes_on: asyncio.Event = goes_on) -> None:
                await goes_on.wait()
                await store.put("report", "by one who was held up", fence=lock)

            late = asyncio.ensure_future(write_late())
            async with store.lock("job", ttl=60, wait=PATIENCE_S) as successor:
                written = await store.put("report", number, fence=successor)
                goes_on.set()
                with pytest.raises(LockLost):
                    await late

                assert await store.entry("report") == written


# Elections --------------------------------------------------------------------


@across_processes
async def test_no_two_leaders_write_in_one_term_though_leaders_are_killed_and_stopped(
    engine: str, tmp_path: Path
) -> None:
    """Five candidates. Of each write, the next term begins after it: tokens and revisions are one order."""
    url, namespace = url_of(engine, tmp_path), unique("election")
    dice = random.Random(7)
    with ExitStack() as stack:
        crew: dict[str, Process] = {}

        def join() -> None:
            name = f"candidate-{len(crew)}"
            crew[name] = stack.enter_context(Process("lead", url, namespace, name))

        for _ in range(CANDIDATES):
            join()
        async with limpet.open(url, namespace=namespace, sweep=False) as store:
            rounds = 0
            while rounds < ROUNDS:
                leader = await next_leader(store)
                assert leader is not None
                process = crew[leader.holder]
                await asyncio.sleep(dice.random() * TTL_S)
                if rounds % 3 == 0:
                    process.kill()
                    join()
                    rounds += await next_leader(store, leader.token) is not None
                    continue
                os.kill(process.pid, signal.SIGSTOP)
                following = await next_leader(store, leader.token, longest_s=STOPPED_S_MAX)
                os.kill(process.pid, signal.SIGCONT)
                if following is not None:
                    rounds += 1
                    # It goes on where it was, and so it tries.
                    while await process.receive_async() != leader.token:
                        pass

            entries = [entry async for entry in store.scan("term/")]
    terms = sorted({int(entry.key.split("/")[1]) for entry in entries})
    assert len(terms) > ROUNDS
    writers: dict[int, set[str]] = {token: set() for token in terms}
    for entry in entries:
        token = terms[bisect_right(terms, entry.revision) - 1]
        assert entry.key.startswith(f"term/{token:012}/"), (
            f"{entry.key} was written at {entry.revision}, in another term"
        )
        writers[token].add(entry.value)
    assert {len(names) for names in writers.values()} == {1}


async def next_leader(store: limpet.Store, after: int = 0, *, longest_s: float = PATIENCE_S) -> limpet.LockInfo | None:
    """The first leader seen with a greater token that has written; None when there was none for so long."""
    election = store.election("leader", ttl=TTL_S)
    give_up = time.monotonic() + longest_s
    while time.monotonic() < give_up:
        leader = await election.leader()
        if leader is not None and leader.token > after:
            page = await store.keys(f"term/{leader.token:012}/", limit=1)
            if page.count:
                return leader
        await asyncio.sleep(0.02)
    return None
