"""Fifty workers in five processes share the tasks of a store, some are killed, and two sweepers give tasks back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import pytest
from redis.asyncio import Redis

from limpet.faces.fields import Record, StateStore, requeue_stuck
from limpet.model import Change
from tests.redis.jobs import CLAIMS, DONE, QUEUE
from tests.servers import redis

pytestmark = pytest.mark.slow

JOBS = 5_000 if os.environ.get("LIMPET_REDIS_LONG") else 400
PROCESSES = 5
ROOT = "gbe.state.tasks"
STUCK_S = 1.0
PATIENCE_S = 300.0


class Crew:
    """Processes of workers. A process that is killed is replaced."""

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments
        self._hired = 0
        self._running = [self._hire() for _ in range(PROCESSES)]

    def _hire(self) -> subprocess.Popen[bytes]:
        self._hired += 1
        return subprocess.Popen([sys.executable, "-m", "tests.redis.jobs", *self._arguments, f"worker-{self._hired}"])

    def kill_one(self) -> None:
        victim = random.randrange(PROCESSES)
        self._running[victim].kill()
        self._running[victim].wait()
        self._running[victim] = self._hire()

    def end(self) -> None:
        for process in self._running:
            process.kill()
            process.wait()


@pytest.fixture
def url() -> Iterator[str]:
    with redis({"appendonly": "yes", "appendfsync": "everysec"}) as server:
        yield server.url


@contextlib.asynccontextmanager
async def queue_of(url: str) -> AsyncIterator[Redis]:
    async with Redis.from_url(_beside(url)) as queue:
        yield queue


def _beside(url: str) -> str:
    return url.rpartition("/")[0] + "/1"


async def created(states: StateStore, queue: Redis, *, copies: int) -> None:
    """All tasks, pending, each announced so many times."""
    names = [f"job_{number}" for number in range(JOBS)]
    await asyncio.gather(*(states.task("job", name, root=ROOT).create() for name in names))
    announced = names * copies
    random.shuffle(announced)
    await queue.rpush(QUEUE, *announced)


async def log_of(states: StateStore) -> list[Change]:
    store, after, found = states._store.namespace("gbe"), 0, []
    while True:
        feed = await store._session.engine.changes("gbe", after)
        found += feed.changes
        if not feed.changes:
            return found
        after = feed.changes[-1].revision


def times_completed(log: list[Change]) -> Counter[str]:
    """How often each task became completed, by the log."""
    was: dict[str, object] = {}
    counts: Counter[str] = Counter()
    for change in log:
        state = change.entry.value.get("state") if change.op in ("put", "patch") else None
        counts[change.entry.key] += state == b"completed" != was.get(change.entry.key)
        was[change.entry.key] = state
    return counts


async def until_done(states: StateStore) -> int:
    """Wait until every task is completed, and return how many are."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        ends = [record.fields["state"] == b"completed" async for _, record in states.scan(f"{ROOT}.")]
        if all(ends) and len(ends) == JOBS:
            return len(ends)
        await asyncio.sleep(0.3)
    raise AssertionError(f"{sum(ends)} of {JOBS} tasks were completed in {PATIENCE_S} seconds")


async def test_every_job_is_claimed_once_and_completed_once(url: str) -> None:
    """Each is announced three times, to workers of different processes."""
    async with await StateStore.connect(url) as states, queue_of(url) as queue:
        await created(states, queue, copies=3)
        crew = Crew(url, _beside(url), ROOT)
        try:
            assert await until_done(states) == JOBS
            while await queue.llen(QUEUE):  # noqa: ASYNC110 - it is emptied by other processes
                await asyncio.sleep(0.05)
        finally:
            crew.end()

        claims, done = await queue.lrange(CLAIMS, 0, -1), await queue.lrange(DONE, 0, -1)
        assert len(claims) == len({*claims}) == JOBS
        assert len(done) == len({*done}) >= JOBS - 10 * PROCESSES
        assert set(times_completed(await log_of(states)).values()) == {1}


async def test_jobs_of_killed_workers_are_given_back_and_completed_once(url: str) -> None:
    async with await StateStore.connect(url) as states, queue_of(url) as queue:
        await states.index("gbe.", "updated_at")
        await created(states, queue, copies=1)
        published: list[str] = []

        async def publish(key: str, record: Record) -> None:
            published.append(key)
            await queue.rpush(QUEUE, key.rpartition(".")[2])

        async def sweep() -> None:
            async with await StateStore.connect(url) as own:
                while True:
                    await requeue_stuck(own, f"{ROOT}.", publish, threshold_s=STUCK_S)
                    await asyncio.sleep(0.2)

        crew = Crew(url, _beside(url), ROOT)
        sweepers = [asyncio.create_task(sweep()) for _ in range(2)]
        done = asyncio.create_task(until_done(states))
        kills = 0
        try:
            while not done.done():
                await asyncio.sleep(0.1)
                if kills < 12:
                    await asyncio.to_thread(crew.kill_one)
                    kills += 1
            assert await done == JOBS
        finally:
            for sweeper in sweepers:
                sweeper.cancel()
            await asyncio.gather(*sweepers, return_exceptions=True)
            crew.end()

        reported = await queue.lrange(DONE, 0, -1)
        assert len(reported) == len({*reported})
        assert set(times_completed(await log_of(states)).values()) == {1}
        assert kills > 2
        assert published
