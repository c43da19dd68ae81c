"""The other processes of these tests: ``python -m tests.postgres.workers NAME ARGUMENTS``.

A worker exchanges lines of JSON. It sends "ready" when it has opened what it needs, and begins on the next message.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import limpet
import limpet.sync
from limpet.commit.group import GroupPlan
from limpet.errors import Ambiguous, Conflict, TransientError
from limpet.model import Commit
from tests.postgres.support import contend, engine_of

WORKERS: dict[str, Callable[..., None]] = {}

# How long a worker waits before it retries while its server is away.
PAUSE_S = 0.05


def worker(function: Callable[..., None]) -> Callable[..., None]:
    WORKERS[function.__name__] = function
    return function


def send(message: Any) -> None:
    print(json.dumps(message), flush=True)


def receive() -> Any:
    line = sys.stdin.readline()
    return json.loads(line) if line else None


# Many writers -------------------------------------------------------------------


class Writer:
    """Writes of every kind, one after the other. Remembers what was acknowledged.

    Each write has a name, which its values carry, so that one write that happened twice differs from two writes. It is
    repeated until it is settled, whatever becomes of the server in the meantime.
    """

    def __init__(self, store: limpet.Store, name: str) -> None:
        self.store = store
        self.name = name
        self.acknowledged: list[list[Any]] = []
        self.conflicts = 0
        self._dice = random.Random(name)

    async def write(self, number: int) -> None:
        tag = f"{self.name}/{number}"
        mine = f"own/{self.name}"
        shared = f"shared/{self._dice.randrange(4)}"
        counter = f"count/{self._dice.randrange(4)}"
        # Some are named by us, so that they can be repeated as they are.
        request_id = tag if self._dice.random() < 0.2 else None
        match self._dice.choices(("put", "add", "update", "batch", "delete"), (4, 2, 2, 2, 1))[0]:
            case "put":
                await self.settle(lambda: self.store.batch(request_id=request_id).put(mine, tag))
            case "add":
                await self.settle(lambda: self.store.batch(request_id=request_id).add(counter, 1))
            case "update":
                await self._update(shared, tag)
            case "batch":
                await self.settle(lambda: self.store.batch(request_id=request_id).put(shared, tag).put(mine, tag))
            case "delete":
                await self.settle(lambda: self.store.batch(request_id=request_id).delete(mine))

    async def _update(self, key: str, tag: str) -> None:
        """Compare and swap, until no other writer came in between."""
        while not await self._swap(key, tag):
            self.conflicts += 1

    async def _swap(self, key: str, tag: str) -> bool:
        found = await self._retry_read(lambda: self.store.entry(key))
        try:
            await self.settle(lambda: self.store.batch().expect(key, found).put(key, tag))
        except Conflict:
            return False
        return True

    async def settle(self, draft: Callable[[], Any]) -> None:
        """Commit, and retry until it is known to be done."""
        commit: Commit | None = None
        while commit is None:
            try:
                commit = await draft().commit()
            except TransientError:
                await asyncio.sleep(PAUSE_S)
            except Ambiguous as unknown:
                commit = await self._retry_read(functools.partial(self.store.outcome, str(unknown.request_id)))
        for entry in (*commit.entries, *commit.ended):
            if entry is not None:
                ended = entry in commit.ended
                self.acknowledged.append([commit.revision, "delete" if ended else "put", entry.key])

    async def _retry_read(self, read: Callable[[], Any]) -> Any:
        while True:
            try:
                return await read()
            except TransientError:
                await asyncio.sleep(PAUSE_S)


@worker
def writes(url: str, name: str, writers: str, count: str) -> None:
    """Run writers on one loop. Sends a number after one and two thirds of the work, and then what was acknowledged."""

    async def write() -> None:
        async with limpet.open(url) as store:
            send("ready")
            await asyncio.to_thread(receive)
            crew = [Writer(store, f"{name}.{number}") for number in range(int(writers))]
            third = int(count) // 3

            async def work(one: Writer) -> None:
                for number in range(int(count)):
                    await one.write(number)
                    if one is crew[0] and number in (third, 2 * third):
                        send(number)

            await asyncio.gather(*map(work, crew))
            send([change for one in crew for change in one.acknowledged])

    asyncio.run(write())


@worker
def watches(url: str) -> None:
    """Sends what a watch delivers, up to the key "end"."""

    async def watch() -> list[list[Any]]:
        delivered = []
        async with limpet.open(url) as store, store.watch() as events:
            send("ready")
            async for event in events:
                if event.key == "end":
                    break
                delivered.append([event.revision, event.commit, event.op, event.key, event.value])
        return delivered

    send(asyncio.run(watch()))


# One at a time --------------------------------------------------------------------


@worker
def opens() -> None:
    """Opens each URL that it receives, and writes there."""
    send("ready")
    while (url := receive()) is not None:
        try:
            with limpet.sync.open(url, sweep=False) as store:
                store.add("hits")
                send([store.status().store_id, None])
        except Exception as error:
            send([None, repr(error)])


@worker
def puts(url: str) -> None:
    """Puts each value that it receives."""
    with limpet.sync.open(url, sweep=False) as store:
        send("ready")
        while (value := receive()) is not None:
            send(store.put("key", value).revision)


@worker
def stops_inside(url: str) -> None:
    """Adds, and stops itself in the middle of the transaction, when it has decided and not yet written."""
    add = GroupPlan.add

    def stop_and_add(self: Any, batch: Any, cause: str | None) -> Any:
        GroupPlan.add = add  # type: ignore[method-assign]
        # Sent to this thread, so that it stops here. The other threads stop with it.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        return add(self, batch, cause)

    with limpet.sync.open(url, sweep=False) as store:
        contend(engine_of(store._twin), store.name, "count")
        GroupPlan.add = stop_and_add  # type: ignore[method-assign]
        send(store.add("count", 3))


def main() -> None:
    name, *args = sys.argv[1:]
    WORKERS[name](*args)


if __name__ == "__main__":
    main()
