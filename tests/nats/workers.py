"""What other processes do in these tests: ``python -m tests.nats.workers URL NAMESPACE COUNT``."""

from __future__ import annotations

import sys

import limpet.sync


def main(url: str, namespace: str, count: str) -> None:
    """Count one key up and move between accounts, as often as asked for, when a line comes."""
    with limpet.sync.open(url, namespace=namespace, sweep=False) as store:
        print("ready", flush=True)
        sys.stdin.readline()
        for number in range(int(count)):
            store.add("count")
            store.batch().add("from", -1).add("to", 1).commit()
            store.record("job").set({f"{sys.argv[4]}/{number}": True})
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:4])
