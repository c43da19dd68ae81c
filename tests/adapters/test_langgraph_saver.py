"""Real graphs on the checkpointer: interrupted, killed, resumed, branched, and run twice at once."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from langgraph._internal._constants import CONFIG_KEY_RUNTIME
from langgraph.runtime import RunControl, Runtime
from langgraph.types import Command

import limpet
from limpet import sync
from limpet.adapters.langgraph import Saver, ThreadLost, ThreadOwned
from limpet.adapters.langgraph.saver import RUNTIME
from limpet.clock import ManualClock
from tests.adapters.langgraph_support import Gate, State, assert_no_fork, chain, config, history, question, say
from tests.engines import ENGINES, unique, url_of
from tests.processes import unmeasured

ROOT = Path(__file__).parents[2]
INPUT: State = {"done": ["input"]}


@pytest.fixture(params=ENGINES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return url_of(request.param, tmp_path)


@pytest.fixture
def namespace() -> str:
    return unique("threads")


@pytest.fixture
async def store(url: str, namespace: str) -> AsyncIterator[limpet.Store]:
    async with limpet.open(url, namespace=namespace) as store:
        yield store


def test_langgraph_has_the_parts_that_are_used() -> None:
    """When this fails after an upgrade, all runs look like one, and threads have no owner."""
    assert CONFIG_KEY_RUNTIME == RUNTIME
    assert "control" in Runtime.__dataclass_fields__
    assert "stream_writer" in Runtime.__dataclass_fields__
    assert Runtime(control=RunControl()).control is not None


# One run ------------------------------------------------------------------------------


async def test_a_graph_goes_on_where_it_was_interrupted(store: limpet.Store) -> None:
    graph = chain(Saver(store), say("first"), question("name"), say("last"))

    stopped = await graph.ainvoke(INPUT, config())
    assert stopped["__interrupt__"][0].value == "name"
    answered = await graph.ainvoke(Command(resume="ann"), config())

    assert answered == {"done": ["input", "first", "name=ann", "last"]}
    await assert_no_fork(graph)
    assert await store.locks() == []


async def test_turns_of_a_conversation_follow_each_other(store: limpet.Store) -> None:
    """Each run ends by releasing its thread, so a run in another process can follow at once."""
    first, second = (chain(Saver(store), say("reply")) for _ in range(2))

    for graph in (first, second, first, second):
        await graph.ainvoke(INPUT, config())

    assert (await first.aget_state(config())).values == {"done": ["input", "reply"] * 4}
    await assert_no_fork(first)


async def test_a_checkpoint_that_is_named_can_be_branched(store: limpet.Store) -> None:
    graph = chain(Saver(store), say("first"), say("last"))
    await graph.ainvoke(INPUT, config())
    after_first = next(state for state in await history(graph) if state.next == ("last",))

    await graph.ainvoke(None, after_first.config)

    states = await history(graph)
    parents = [state.parent_config["configurable"]["checkpoint_id"] for state in states[1:]]
    assert len(parents) - len(set(parents)) == 1
    assert states[-1].values == {"done": ["input", "first", "last"]}


async def test_a_subgraph_writes_under_the_run_of_its_graph(store: limpet.Store) -> None:
    inner = chain(None, say("inner"), question("deep"))
    graph = chain(Saver(store), say("first"), ("sub", inner), say("last"))

    await graph.ainvoke(INPUT, config())
    done = await graph.ainvoke(Command(resume="yes"), config())

    assert done["done"][-1] == "last"
    assert "deep=yes" in done["done"]
    await assert_no_fork(graph)
    assert await store.locks() == []


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
async def test_every_durability_leaves_the_thread_free(durability: str, store: limpet.Store) -> None:
    graph = chain(Saver(store), say("first"), say("last"))

    for _ in range(2):
        await graph.ainvoke(INPUT, config(), durability=durability)

    assert (await graph.aget_state(config())).values == {"done": ["input", "first", "last"] * 2}
    assert await store.locks() == []


async def test_a_run_that_failed_leaves_the_thread_free(store: limpet.Store) -> None:
    calls = []

    def fails_once(state: State) -> State:
        calls.append(state)
        if len(calls) == 1:
            raise ValueError("not yet")
        return {"done": ["worked"]}

    graph = chain(Saver(store), say("first"), ("flaky", fails_once))
    with pytest.raises(ValueError, match="not yet"):
        await graph.ainvoke(INPUT, config())

    assert await store.locks() == []
    assert await graph.ainvoke(None, config()) == {"done": ["input", "first", "worked"]}


async def test_a_run_that_stopped_at_a_breakpoint_can_be_followed_in_its_process(store: limpet.Store) -> None:
    """Nothing is written at a static breakpoint, so that the run is over shows in the process alone."""
    graph = chain(Saver(store), say("first"), say("last"), interrupt_before=["last"])
    await graph.ainvoke(INPUT, config())

    await graph.aupdate_state(config(), {"done": ["by hand"]})
    assert await graph.ainvoke(None, config()) == {"done": ["input", "first", "by hand", "last"]}


async def test_a_run_that_was_cancelled_can_be_followed_in_its_process(store: limpet.Store) -> None:
    gate = Gate("second")
    graph = chain(Saver(store), say("first"), gate.step)
    running = asyncio.create_task(graph.ainvoke(INPUT, config()))
    await gate.reached.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    del running
    await asyncio.sleep(0.01)

    gate.open.set()
    assert await graph.ainvoke(None, config()) == {"done": ["input", "first", "second"]}
    await assert_no_fork(graph)


async def test_tasks_of_one_step_write_side_by_side(store: limpet.Store) -> None:
    from langgraph.types import Send

    saver = Saver(store)
    graph = chain(saver, say("first"), ("spread", lambda state: Command(goto=[Send("one", n) for n in range(20)])))
    graph.builder.add_node("one", lambda number: {"done": [str(number)]})
    graph = graph.builder.compile(checkpointer=saver)

    result = await graph.ainvoke(INPUT, config())

    assert result["done"] == ["input", "first", *(str(number) for number in range(20))]
    await assert_no_fork(graph)
    assert await store.locks() == []


# Two runs ----------------------------------------------------------------------------


@pytest.mark.parametrize("savers", [1, 2], ids=["one saver", "two savers"])
async def test_of_two_runs_at_once_the_second_gets_an_error(savers: int, store: limpet.Store) -> None:
    gate = Gate("second")
    made = [Saver(store) for _ in range(savers)]
    graphs = [chain(saver, say("first"), gate.step) for saver in (made[0], made[-1])]
    running = asyncio.create_task(graphs[0].ainvoke(INPUT, config()))
    await gate.reached.wait()

    with pytest.raises(ThreadOwned, match="thread 't' is owned by another run") as refused:
        await graphs[1].ainvoke(INPUT, config())
    gate.open.set()

    assert refused.value.thread_id == "t"
    assert 0 < refused.value.remaining <= 60
    assert await running == {"done": ["input", "first", "second"]}
    await assert_no_fork(graphs[0])


async def test_of_many_runs_at_once_none_is_lost_and_none_forks(store: limpet.Store) -> None:
    graphs = [chain(Saver(store), say("first"), say("second")) for _ in range(4)]

    async def run(number: int) -> str | None:
        try:
            await graphs[number % 4].ainvoke({"done": [f"input-{number}"]}, config())
        except (ThreadOwned, ThreadLost):
            return None
        return f"input-{number}"

    finished = {name for name in await asyncio.gather(*(run(number) for number in range(12))) if name}
    state = (await graphs[0].aget_state(config())).values["done"]

    assert finished
    assert finished <= set(state)
    await assert_no_fork(graphs[0])


async def test_the_state_of_a_running_thread_is_not_changed_by_hand(store: limpet.Store) -> None:
    gate = Gate("second")
    graph = chain(Saver(store), say("first"), gate.step)
    running = asyncio.create_task(graph.ainvoke(INPUT, config()))
    await gate.reached.wait()

    other = chain(Saver(store), say("first"), gate.step)
    with pytest.raises(ThreadOwned):
        await other.aupdate_state(config(), {"done": ["by hand"]})
    with pytest.raises(ThreadOwned):
        await Saver(store).adelete_thread("t")
    gate.open.set()
    await running

    await other.aupdate_state(config(), {"done": ["by hand"]})
    assert (await graph.aget_state(config())).values["done"][-1] == "by hand"


async def test_a_run_that_was_taken_over_is_refused(store: limpet.Store) -> None:
    gate = Gate("second")
    zombie = chain(Saver(store), say("first"), gate.step)
    running = asyncio.create_task(zombie.ainvoke(INPUT, config(), durability="sync"))
    await gate.reached.wait()

    saver = Saver(store)
    assert await saver.atake_over("t")
    follower = chain(saver, say("first"), say("second"))
    assert await follower.ainvoke(None, config()) == {"done": ["input", "first", "second"]}
    gate.open.set()

    with pytest.raises(ThreadLost, match="was continued by another run"):
        await running
    await assert_no_fork(follower)
    assert await store.locks() == []


async def test_a_run_that_was_taken_over_is_refused_before_the_next_one_starts(store: limpet.Store) -> None:
    gate = Gate("second")
    zombie = chain(Saver(store), say("first"), gate.step)
    running = asyncio.create_task(zombie.ainvoke(INPUT, config(), durability="sync"))
    await gate.reached.wait()

    saver = Saver(store)
    await saver.atake_over("t")
    gate.open.set()
    with pytest.raises(ThreadLost):
        await running

    assert await chain(saver, say("first"), say("second")).ainvoke(None, config()) == {
        "done": ["input", "first", "second"]
    }


async def test_taking_over_a_free_thread_changes_nothing(store: limpet.Store) -> None:
    saver = Saver(store)
    graph = chain(saver, say("first"))

    assert not await saver.atake_over("t")
    assert await graph.ainvoke(INPUT, config()) == {"done": ["input", "first"]}
    assert await store.locks() == []


# Leases ------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "sqlite"])
async def timed(request: pytest.FixtureRequest, tmp_path: Path, namespace: str) -> AsyncIterator[Any]:
    """A store and its clock, which is turned by hand."""
    clock = ManualClock()
    async with limpet.open(url_of(request.param, tmp_path), namespace=namespace, clock=clock) as store:
        yield store, clock


async def test_a_lease_that_is_over_can_be_taken_and_fences_the_run_that_had_it(timed: Any) -> None:
    store, clock = timed
    gate = Gate("second")
    zombie = chain(Saver(store, lease=60), say("first"), gate.step)
    running = asyncio.create_task(zombie.ainvoke(INPUT, config(), durability="sync"))
    await gate.reached.wait()

    clock.advance(61)
    follower = chain(Saver(store), say("first"), question("second"))
    await follower.ainvoke(None, config())
    gate.open.set()

    # The follower has added no checkpoint: only that it has owned the thread refuses the late write.
    with pytest.raises(ThreadLost):
        await running
    assert (await follower.aget_state(config())).next == ("second",)
    await assert_no_fork(follower)


async def test_a_run_goes_on_after_its_lease_if_no_other_took_the_thread(timed: Any) -> None:
    store, clock = timed
    gate = Gate("second")
    graph = chain(Saver(store, lease=60), say("first"), gate.step, say("third"))
    running = asyncio.create_task(graph.ainvoke(INPUT, config()))
    await gate.reached.wait()

    clock.advance(3600)
    gate.open.set()

    assert await running == {"done": ["input", "first", "second", "third"]}
    await assert_no_fork(graph)


async def test_writes_renew_the_lease(timed: Any) -> None:
    store, clock = timed
    gates = [Gate(f"step-{number}") for number in range(4)]
    graph = chain(Saver(store, lease=60), *(gate.step for gate in gates))
    running = asyncio.create_task(graph.ainvoke(INPUT, config(), durability="sync"))
    for gate in gates:
        await gate.reached.wait()
        assert len(await store.locks()) == 1
        clock.advance(40)
        gate.open.set()

    assert await running == {"done": ["input", "step-0", "step-1", "step-2", "step-3"]}


# Processes ----------------------------------------------------------------------------


def run_and_kill(url: str, namespace: str) -> None:
    """Start a run in a process of its own, and kill that in the middle of the run."""
    words = [sys.executable, "-m", "tests.adapters.langgraph_workers", url, namespace]
    with subprocess.Popen(words, cwd=ROOT, env=unmeasured(), stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "in the second step\n"
        worker.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("engine", [each for each in ENGINES if each != "memory"])
async def test_a_run_that_was_killed_goes_on_in_a_new_process(engine: str, namespace: str, tmp_path: Path) -> None:
    url = url_of(engine, tmp_path)
    await asyncio.to_thread(run_and_kill, url, namespace)

    async with limpet.open(url, namespace=namespace) as store:
        saver = Saver(store)
        graph = chain(saver, say("first"), say("second"))
        with pytest.raises(ThreadOwned):
            await graph.ainvoke(None, config())
        assert await saver.atake_over("t")

        assert await graph.ainvoke(None, config()) == {"done": ["input", "first", "second"]}
        await assert_no_fork(graph)


# Without await ---------------------------------------------------------------------------


def test_the_methods_without_await_do_the_same(url: str, namespace: str) -> None:
    with sync.open(url, namespace=namespace) as store:
        saver = Saver(store)
        graph = chain(saver, say("first"), question("name"), say("last"))
        graph.invoke(INPUT, config())
        assert graph.invoke(Command(resume="ann"), config()) == {"done": ["input", "first", "name=ann", "last"]}

        states = list(graph.get_state_history(config()))
        assert states[0].values == {"done": ["input", "first", "name=ann", "last"]}
        assert store.locks() == []
        saver.copy_thread("t", "copy")
        assert graph.get_state(config("copy")).values == states[0].values
        saver.prune(["copy"])
        assert len(list(graph.get_state_history(config("copy")))) == 1
        saver.delete_thread("t")
        assert graph.get_state(config()).values == {}
        assert not saver.take_over("t")


def test_a_url_is_opened_when_it_is_needed(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/threads.db"

    async def turn() -> Any:
        async with Saver(url) as saver:
            return await chain(saver, say("reply")).ainvoke(INPUT, config())

    assert asyncio.run(turn()) == {"done": ["input", "reply"]}
    with Saver(url) as saver:
        assert chain(saver, say("reply")).invoke(INPUT, config()) == {"done": ["input", "reply"] * 2}


async def test_a_store_of_the_other_kind_serves_as_well(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/threads.db"
    blocking = await asyncio.to_thread(sync.open, url)
    try:
        assert await chain(Saver(blocking), say("reply")).ainvoke(INPUT, config()) == {"done": ["input", "reply"]}
    finally:
        await asyncio.to_thread(blocking.close)
    async with limpet.open(url) as store:
        graph = chain(Saver(store), say("reply"))
        assert (await asyncio.to_thread(graph.invoke, INPUT, config()))["done"] == ["input", "reply"] * 2
        with pytest.raises(asyncio.InvalidStateError, match="await the method that starts with 'a'"):
            graph.get_state(config())


# Writes -------------------------------------------------------------------------------


async def test_writes_that_come_again_stay_as_they_are(store: limpet.Store) -> None:
    saver = Saver(store)
    named = config(checkpoint_ns="")
    from langgraph.checkpoint.base import empty_checkpoint

    at: Any = await saver.aput(named, empty_checkpoint(), {"source": "loop", "step": 0}, {})
    await saver.aput_writes(at, [("a", 1), ("__error__", "first")], "task")
    await saver.aput_writes(at, [("a", 2), ("__error__", "again"), ("b", 3)], "task")

    found = await saver.aget_tuple(at)
    assert found is not None
    assert sorted(found.pending_writes or []) == [
        ("task", "__error__", "again"),
        ("task", "a", 1),
        ("task", "b", 3),
    ]


async def test_names_of_any_characters_are_kept_apart(store: limpet.Store) -> None:
    saver = Saver(store)
    graph = chain(saver, say("reply"))
    names = ["a/b", "a", "a%2Fb", "ü", "x" * 600, "\0", ""]

    for name in names:
        await graph.ainvoke({"done": [repr(name)]}, config(name))

    for name in names:
        assert (await graph.aget_state(config(name))).values == {"done": [repr(name), "reply"]}
    await saver.adelete_thread("a")
    assert (await graph.aget_state(config("a"))).values == {}
    assert (await graph.aget_state(config("a/b"))).values != {}
