"""A process that runs a graph, to be killed: python -m tests.adapters.langgraph_workers URL NAMESPACE."""

from __future__ import annotations

import asyncio
import sys

import limpet
from limpet.adapters.langgraph import Saver
from tests.adapters.langgraph_support import Gate, State, chain, config, say


async def work(url: str, namespace: str) -> None:
    async with limpet.open(url, namespace=namespace) as store:
        await _stop_at_gate(Saver(store))


async def _stop_at_gate(saver: Saver) -> None:
    gate = Gate("second")
    graph = chain(saver, say("first"), gate.step)
    state: State = {"done": ["input"]}
    running = asyncio.create_task(graph.ainvoke(state, config(), durability="sync"))
    await gate.reached.wait()
    print("in the second step", flush=True)
    await running


if __name__ == "__main__":
    asyncio.run(work(*sys.argv[1:]))
