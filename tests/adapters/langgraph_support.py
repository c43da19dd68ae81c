"""Graphs for the tests of the checkpointer."""

from __future__ import annotations

import asyncio
import itertools
import operator
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypedDict

from langgraph.graph import END, START, StateGraph
from langgraph.types import interrupt


class State(TypedDict):
    """The steps that were done, in their order."""

    done: Annotated[list[str], operator.add]


Step = Callable[[State], Any]


def config(thread_id: str = "t", **more: Any) -> Any:
    """The config of a run."""
    return {"configurable": {"thread_id": thread_id, **more}}


def chain(saver: Any, *steps: tuple[str, Step], **options: Any) -> Any:
    """A graph of steps, one after the other."""
    graph: Any = StateGraph(State)
    for name, step in steps:
        graph.add_node(name, step)
    names = [START, *(name for name, _ in steps), END]
    for before, after in itertools.pairwise(names):
        graph.add_edge(before, after)
    return graph.compile(checkpointer=saver, **options)


def say(word: str) -> tuple[str, Step]:
    """A step that is done at once."""

    def step(state: State) -> State:
        return {"done": [word]}

    return word, step


def question(word: str) -> tuple[str, Step]:
    """A step that stops until it is answered."""

    def step(state: State) -> State:
        return {"done": [f"{word}={interrupt(word)}"]}

    return word, step


class Gate:
    """A step that waits until the test lets it go on."""

    def __init__(self, word: str) -> None:
        self.word = word
        self.reached, self.open = asyncio.Event(), asyncio.Event()

    @property
    def step(self) -> tuple[str, Callable[[State], Awaitable[State]]]:
        """The step."""
        return self.word, self._wait

    async def _wait(self, state: State) -> State:
        self.reached.set()
        await self.open.wait()
        return {"done": [self.word]}


async def history(graph: Any, thread_id: str = "t") -> list[Any]:
    """The states of a thread, oldest first."""
    states = [state async for state in graph.aget_state_history(config(thread_id))]
    return states[::-1]


async def assert_no_fork(graph: Any, thread_id: str = "t") -> None:
    """Every checkpoint but the first goes on from the one before it."""
    states = await history(graph, thread_id)
    ids = [state.config["configurable"]["checkpoint_id"] for state in states]
    parents = [state.parent_config and state.parent_config["configurable"]["checkpoint_id"] for state in states]
    assert parents == [None, *ids[:-1]]
