"""Odd arguments of the smaller interfaces: see `tests.odd_arguments`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import limpet
from limpet.faces import fields, shared, state
from tests.odd_arguments import describe, failures, verbs


@pytest.fixture
async def store() -> AsyncIterator[limpet.Store]:
    async with limpet.open("memory:", sweep=False) as store:
        yield store


async def test_the_state_of_an_agent(store: limpet.Store) -> None:
    functions: dict[str, Callable[..., Any]] = {
        name: getattr(state, name) for name in state.__all__ if "state_" in name
    }
    good = {"pool": store, "key": "k", "value": 1, "expected_version": 1, "new_value": 1}

    found = await failures(store, functions, good)

    assert not found, describe(found)


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

    assert not found, describe(found)


async def test_state_that_agents_share() -> None:
    async with shared.StateStore.open("memory:") as states:
        good = {"key": "k", "value": b"1", "ttl": 60}

        found = await failures(states.store, verbs(states, "close", "open"), good)

    assert not found, describe(found)
