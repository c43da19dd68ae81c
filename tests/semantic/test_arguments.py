"""Odd arguments of the semantic store: see `tests.odd_arguments`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import Final

import pytest

import limpet
from limpet import sync
from limpet.conformance.oddities import calls, format_argument
from limpet.errors import LimpetError
from limpet.semantic import deadletters
from limpet.semantic import store as semantic
from limpet.semantic import sync as blocking
from limpet.semantic.audit import Audit
from tests.odd_arguments import describe, failures, verbs

KEY: Final = "tenant/a/project/b/k"
SEMANTICS: Final = {"purpose": "checkpoint"}
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


@pytest.fixture
async def store() -> AsyncIterator[limpet.Store]:
    async with limpet.open("memory:", sweep=False) as store:
        yield store


async def test_semantic_entries(store: limpet.Store) -> None:
    entries = semantic.SemanticStore(store, audit=Audit(bytes(32)), policy=NO_PAUSES)
    await entries.kv_put(KEY, {"a": 1}, writer="agent:directive", semantics=SEMANTICS)

    found = await failures(store, verbs(entries, "wait_until_available", "seal", "watch"), GOOD)

    assert not found, describe(found)


async def test_dead_letters(store: limpet.Store) -> None:
    letters = deadletters.DeadLetters(store)

    found = await failures(store, verbs(letters, "beside", "keep", "replay", "new_name"), {"name": "letter"})

    assert not found, describe(found)


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
                    found.append(f"{name}({parameter}={format_argument(odd)}): {type(error).__name__}: {error}")

    assert not found, describe(found)
