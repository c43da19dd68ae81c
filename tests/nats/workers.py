"""What other processes do in these tests: ``python -m tests.nats.workers URL NAMESPACE COUNT NAME``."""

from __future__ import annotations

import sys

import limpet.sync
from limpet.engines.nats.writer import _Attempts


def main(url: str, namespace: str, count: str, name: str) -> None:
    """Write keys that others write too, a given number of times, for each line of input."""
    with limpet.sync.open(url, namespace=namespace, sweep=False) as store:
        print("ready", flush=True)
        sys.stdin.readline()
        if name == "hot":
            print(_count(store, int(count)), flush=True)
            return
        for number in range(int(count)):
            store.add("count")
            store.batch().add("from", -1).add("to", 1).commit()
            store.record("job").set({f"{name}/{number}": True})
    print("done", flush=True)


def _count(store: limpet.sync.Store, count: int) -> int:
    """Count one key up, and return how many attempts that took."""
    attempts = count
    pause = _Attempts.pause

    async def pause_and_count(self: _Attempts) -> None:
        nonlocal attempts
        attempts += 1
        await pause(self)

    _Attempts.pause = pause_and_count  # type: ignore[method-assign]
    for _ in range(count):
        store.add("count")
    return attempts


if __name__ == "__main__":
    main(*sys.argv[1:5])
