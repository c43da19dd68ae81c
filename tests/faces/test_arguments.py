"""Odd arguments of the faces: a function succeeds, or raises an error of ours or a TypeError and changes nothing."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, Final

import pytest

import limpet
from limpet import sync
from limpet.conformance.oddities import calls, shown
from limpet.errors import LimpetError
from limpet.faces import fields, shared, state
from limpet.semantic import deadletters
from limpet.semantic import store as semantic
from limpet.semantic import sync as blocking
from limpet.semantic.audit import Audit

PATIENCE_S: Final = 120.0

KEY: Final = "tenant/a/project/b/k"
SEMANTICS: Final = {"purpose": "checkpoint"}


async def made(result: Any) -> None:
    """What a function comes to: it is awaited, and a little of what it iterates is taken."""
    if inspect.isawaitable(result):
        result = await result
    if hasattr(result, "__aenter__") and hasattr(result, "aclose"):
        async with result:
            return
    if isinstance(result, AsyncIterator):
        async for _ in result:
            break
        if hasattr(result, "aclose"):
            await result.aclose()


async def failures(
    store: limpet.Store, functions: Mapping[str, Callable[..., Any]], good: Mapping[str, object]
) -> list[str]:
    """The calls that did something else than they may."""
    found: list[str] = []
    for name, function in functions.items():
        for parameter, odd, arguments in calls(function, good):
            call = f"{name}({parameter}={shown(odd)})"
            before = (await store.status()).revision
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await made(function(*arguments.args, **arguments.kwargs))
            except (LimpetError, TypeError) as error:
                if (await store.status()).revision != before and "lock" not in name:
                    found.append(f"{call} changed something and raised {type(error).__name__}")
            except Exception as error:
                found.append(f"{call}: {type(error).__name__}: {error}")
    return found


def verbs(item: object, *but: str) -> dict[str, Callable[..., Any]]:
    """The public functions of an object."""
    found = inspect.getmembers(item, inspect.ismethod)
    return {name: method for name, method in found if not name.startswith("_") and name not in but}


def listed(found: list[str]) -> str:
    return f"{len(found)} calls:\n" + "\n".join(found)


@pytest.fixture
async def store() -> AsyncIterator[limpet.Store]:
    async with limpet.open("memory:", sweep=False) as store:
        yield store


async def test_the_state_of_a_butler(store: limpet.Store) -> None:
    functions: dict[str, Callable[..., Any]] = {
        name: getattr(state, name) for name in state.__all__ if "state_" in name
    }
    good = {"pool": store, "key": "k", "value": 1, "expected_version": 1, "new_value": 1}

    found = await failures(store, functions, good)

    assert not found, listed(found)


async def test_records_of_byte_fields(store: limpet.Store) -> None:
    states = fields.StateStore(store)
    space = store.namespace("gbe")
    good = {
        "key": "gbe.state.x",
        "record": {"a": b"1"},
        "ttl": 60,
        "field": "a",
        "value": b"1",
        "fields": {"a": b"1"},
        "expected": b"1",
        "new": b"2",
        "prefix": "gbe.",
        "task_type": "type",
        "task_id": "id",
        "token": "token",
        "number": 1,
        "timeout_s": 1.0,
        "worker": "worker",
        "error": "error",
    }
    task = states.task("type", "id")
    await task.create()

    found = await failures(space, verbs(states, "close", "connect"), good)
    found += await failures(space, verbs(task), good)

    assert not found, listed(found)


async def test_state_that_agents_share() -> None:
    async with shared.StateStore.open("memory:") as states:
        good = {"key": "k", "value": b"1", "ttl": 60}

        found = await failures(states.store, verbs(states, "close", "open"), good)

    assert not found, listed(found)


NO_PAUSES: Final = semantic.RetryPolicy(conflict_pauses_s=(), transient_attempts=1)

GOOD: Final = {
    "tenant": "a",
    "project": "b",
    "component": "c",
    "key": KEY,
    "prefix": "tenant/a/",
    "value": {"a": 1},
    "writer": "agent:directive",
    "semantics": SEMANTICS,
    "items": [{"op": "put", "key": KEY, "value": {}, "semantics": SEMANTICS}],
    "change": lambda value: {"a": 2},
    "before": timedelta(days=1),
}


async def test_semantic_entries(store: limpet.Store) -> None:
    entries = semantic.SemanticStore(store, audit=Audit(bytes(32)), policy=NO_PAUSES)
    await entries.kv_put(KEY, {"a": 1}, writer="agent:directive", semantics=SEMANTICS)

    found = await failures(store, verbs(entries, "wait_until_available", "seal", "watch"), GOOD)

    assert not found, listed(found)


async def test_dead_letters(store: limpet.Store) -> None:
    letters = deadletters.DeadLetters(store)

    found = await failures(store, verbs(letters, "beside", "keep", "replay", "new_name"), {"name": "letter"})

    assert not found, listed(found)


def test_semantic_entries_without_await() -> None:
    found: list[str] = []
    with sync.open("memory:", sweep=False) as store:
        entries = blocking.SemanticStore(store, policy=NO_PAUSES)
        for name, method in verbs(entries, "close", "wait_until_available", "seal", "watch").items():
            for parameter, odd, arguments in calls(method, GOOD):
                try:
                    result = method(*arguments.args, **arguments.kwargs)
                    if isinstance(result, Iterator):
                        next(result, None)
                except (LimpetError, TypeError):
                    pass
                except Exception as error:
                    found.append(f"{name}({parameter}={shown(odd)}): {type(error).__name__}: {error}")

    assert not found, listed(found)
