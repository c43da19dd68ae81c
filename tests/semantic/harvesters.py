"""A harvester as a process, to be killed at any moment."""

from __future__ import annotations

import asyncio
import json
import sys

import limpet
from limpet.semantic.store import Put, Semantics, SemanticStore, VersionConflict
from tests.processes import Process
from tests.semantic.support import audit

HOME = "tenant/acme/project/docs"
CHECKPOINT = f"{HOME}/source/delta"
PAGE = 20


class Harvester(Process):
    module = "tests.semantic.harvesters"


async def harvest(kept: SemanticStore, name: str, items: int) -> None:
    """Work until there is nothing left, and print after each page how far it is."""
    while True:
        found = await kept.kv_get(CHECKPOINT)
        token, version = (0, 0) if found is None or found.value is None else (found.value["token"], found.version)
        if token == items:
            return
        # The bounds of a page: a harvester that counts wrong works twice on an item, or on none.
        page = range(token, min(items, token + PAGE))
        effects = [Put(f"{HOME}/done/{n}", {"by": name}, Semantics("cursor"), expected_version=0) for n in page]
        moved = {"token": page.stop, "snapshot": version + 1}
        try:
            await kept.kv_batch(
                [Put(CHECKPOINT, moved, Semantics("checkpoint"), expected_version=version), *effects],
                writer=f"{name}:harvest",
            )
        except VersionConflict:
            continue
        print(json.dumps(page.stop), flush=True)


async def main(url: str, namespace: str, name: str, items: str) -> None:
    async with (
        limpet.open(url, namespace=namespace) as store,
        SemanticStore(store, audit=audit()) as kept,
    ):
        await harvest(kept, name, int(items))
        print(json.dumps("done"), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
