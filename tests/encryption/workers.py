"""Processes that read and write an encrypted store, and report what they did and what failed."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import limpet
from tests.processes import Process

KEYS = 8


class Worker(Process):
    module = "tests.encryption.workers"


def receive() -> Any:
    return json.loads(sys.stdin.readline())


def send(message: object) -> None:
    print(json.dumps(message), flush=True)


async def work(url: str, namespace: str, name: str) -> None:
    """Count, set fields and read in a loop. On a number n, report failures after n more steps; on null, end."""
    done: dict[str, int] = {}
    failed: list[str] = []
    steps = 0
    stepped, ending = asyncio.Condition(), asyncio.Event()

    async def loop(store: limpet.Store) -> None:
        nonlocal steps
        while not ending.is_set():
            key = f"{steps % KEYS}"
            try:
                await store.add(f"counter/{key}")
                done[f"counter/{key}"] = done.get(f"counter/{key}", 0) + 1
                await store.record(f"record/{key}").set({name: steps})
                await store.put(f"own/{name}/{key}", steps, meta={"step": steps}, ttl=3600)
                done[f"own/{name}/{key}"] = steps
                assert await store.get(f"own/{name}/{key}") == steps
                async for entry in store.scan("counter/"):
                    assert entry.value >= done.get(entry.key, 0)
                async for entry in store.scan("still/"):
                    assert entry.value == {"key": entry.key}
            except Exception as error:
                failed.append(f"{type(error).__name__}: {error}")
            steps += 1
            async with stepped:
                stepped.notify_all()
            if failed:
                return

    async with limpet.open(url, namespace=namespace) as store:
        working = asyncio.create_task(loop(store))
        send("ready")
        while (more := await asyncio.to_thread(receive)) is not None:
            goal = steps + more
            async with stepped:
                await stepped.wait_for(lambda: bool(failed) or steps >= goal)  # noqa: B023 - waited for right here
            send(failed)
        ending.set()
        await working
        send({"done": done, "failed": failed})


if __name__ == "__main__":
    asyncio.run(work(*sys.argv[2:]))
