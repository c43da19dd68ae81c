"""What other processes do in `tests.test_fencing`: ``python -m tests.fenced NAME URL NAMESPACE …``.

They talk in lines of JSON, and end when there is nobody left to talk to.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import limpet
import limpet.sync
from limpet.errors import Ambiguous, LockLost, TransientError

TTL_S = 0.3
PAUSE_S = 0.02


def say(word: Any) -> None:
    print(json.dumps(word), flush=True)


def hold(url: str, namespace: str) -> None:
    """Each time it is told to: take the lock, stop in the middle of its body, and write when it goes on."""
    with limpet.sync.open(url, namespace=namespace, sweep=False) as store:
        while sys.stdin.readline():
            with contextlib.suppress(LockLost), store.lock("job", ttl=TTL_S, wait=60) as lock:
                say(lock.token)
                # To this thread, so that it is here that it stops. The others stop with it.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
                try:
                    store.put("report", "by one who was stopped", fence=lock)
                    say("written")
                except LockLost:
                    say("refused")


def lead(url: str, namespace: str, name: str) -> None:
    """Campaign, and write as fast as one likes while it leads. Tells under which tokens it was refused."""
    asyncio.run(_lead(url, namespace, name))


async def _lead(url: str, namespace: str, name: str) -> None:
    async with limpet.open(url, namespace=namespace) as store:
        election = store.election("leader", ttl=TTL_S, candidate=name)
        async with asyncio.TaskGroup() as group:
            leading = group.create_task(_write_when_elected(store, election, name))
            await asyncio.to_thread(sys.stdin.readline)
            leading.cancel()


async def _write_when_elected(store: limpet.Store, election: limpet.Election, name: str) -> None:
    while True:
        with contextlib.suppress(TransientError, Ambiguous):
            await election.campaign()
            try:
                await _write(store, election, name)
            except LockLost as refused:
                say(refused.token)


async def _write(store: limpet.Store, election: limpet.Election, name: str) -> None:
    """Write until it is refused, whatever this candidate itself believes."""
    for number in itertools.count():
        with contextlib.suppress(TransientError, Ambiguous):
            await store.put(f"term/{election.token:012}/{number:06}", name, fence=election)
        await asyncio.sleep(PAUSE_S)


WORKERS: dict[str, Callable[..., None]] = {"hold": hold, "lead": lead}

if __name__ == "__main__":
    WORKERS[sys.argv[1]](*sys.argv[2:])
