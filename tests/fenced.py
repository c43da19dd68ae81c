"""The other processes of `tests.test_fencing`: ``python -m tests.fenced NAME URL NAMESPACE …``.

They report in lines of JSON, and end when their standard input is closed.
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


def report(message: Any) -> None:
    print(json.dumps(message), flush=True)


def hold(url: str, namespace: str) -> None:
    """For each line of input: take the lock, stop in the middle of its body, and write when resumed."""
    with limpet.sync.open(url, namespace=namespace, sweep=False) as store:
        while sys.stdin.readline():
            with contextlib.suppress(LockLost), store.lock("job", ttl=TTL_S, wait=60) as lock:
                report(lock.token)
                # Sent to this thread, so that it stops here. The others stop with it.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
                try:
                    store.put("report", "by one who was stopped", fence=lock)
                    report("written")
                except LockLost:
                    report("refused")


def lead(url: str, namespace: str, name: str) -> None:
    """Campaign, and write all the time while it leads. Reports the tokens under which it was refused."""
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
                report(refused.token)


async def _write(store: limpet.Store, election: limpet.Election, name: str) -> None:
    """Write until a write is refused, even if this candidate believes that it does not lead any more."""
    for number in itertools.count():
        with contextlib.suppress(TransientError, Ambiguous):
            await store.put(f"term/{election.token:012}/{number:06}", name, fence=election)
        await asyncio.sleep(PAUSE_S)


WORKERS: dict[str, Callable[..., None]] = {"hold": hold, "lead": lead}

if __name__ == "__main__":
    WORKERS[sys.argv[1]](*sys.argv[2:])
