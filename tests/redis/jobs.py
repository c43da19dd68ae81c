"""Ten workers in a process: they pop the name of a task from a list, claim it, take a step and complete it."""

from __future__ import annotations

import asyncio
import random
import sys

from redis.asyncio import Redis

from limpet.errors import TransientError
from limpet.faces.fields import StateStore

QUEUE, CLAIMS, DONE = "queue", "claims", "done"
WORKERS = 10
TIMEOUT_S = 2.0


async def work(states: StateStore, queue: Redis, root: str, name: str) -> None:
    while True:
        popped = await queue.brpop([QUEUE], timeout=1)
        if popped is None:
            continue
        task = states.task("job", str(popped[1]), root=root)
        try:
            token = await task.claim(name, timeout_s=TIMEOUT_S)
            if token is None:
                continue
            await queue.rpush(CLAIMS, task.task_id)
            await task.step(token, 1, timeout_s=TIMEOUT_S)
            await asyncio.sleep(random.random() * 0.01)
            if await task.complete(token, result_ref=f"by {name}"):
                await queue.rpush(DONE, task.task_id)
        except TransientError:
            # The sweeper will find it.
            continue


async def main(url: str, queue_url: str, root: str, name: str) -> None:
    async with await StateStore.connect(url) as states, Redis.from_url(queue_url, decode_responses=True) as queue:
        await asyncio.gather(*(work(states, queue, root, f"{name}.{number}") for number in range(WORKERS)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
