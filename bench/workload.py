"""The keys and values that every contender stores, in the same order."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from typing import Any, Final

import msgspec

KEY_BYTES: Final = 40
VALUE_BYTES: Final = 204
KEYS_PER_PREFIX: Final = 1_000

Job = tuple[Any, ...]
"""The arguments of one call: a key and a value for a put, a key for a get."""

Jobs = Iterator[Job]
"""Calls without end."""

encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder().decode


def key(number: int) -> str:
    """The key of a number. A thousand keys share the prefix that `prefix` gives."""
    return f"{prefix(number // KEYS_PER_PREFIX)}session/{number % KEYS_PER_PREFIX:06d}/state/value"


def prefix(number: int) -> str:
    """The n-th prefix."""
    return f"tenant/{number:06d}/"


def value(number: int, turn: int = 0) -> dict[str, Any]:
    """A JSON object that names its key, differs from turn to turn and always has the same size."""
    return {
        "id": f"{number:08d}",
        "owner": "agent-worker-7",
        "state": "running",
        "step": 100 + turn % 900,
        "score": 0.8125,
        "done": False,
        "parent": None,
        "tags": ["alpha", "beta", "gamma"],
        "note": "what this agent was doing when it was last found.",
    }


def in_order(count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each key with its value, once. Nothing here keeps a value that the store has taken."""
    return ((key(number), value(number)) for number in range(count))


def puts(count: int) -> Jobs:
    """Keys with values without end, in an order that is mixed but the same for every contender.

    Each put of a key changes its value. SQLite neither writes nor syncs a row that stays the same, so a
    store that keeps nothing but the value would otherwise be measured doing nothing.
    """
    return itertools.cycle(_changes(count))


def gets(count: int) -> Jobs:
    """Keys without end, in the same order."""
    return itertools.cycle([(key(number),) for number in _mixed(count)])


@functools.cache
def _changes(count: int) -> list[Job]:
    # The stores are filled with turn 0.
    return [(key(number), value(number, turn)) for turn in (1, 2) for number in _mixed(count)]


@functools.cache
def _mixed(count: int) -> list[int]:
    numbers = list(range(count))
    random.Random(VALUE_BYTES).shuffle(numbers)
    return numbers


assert len(key(0)) == KEY_BYTES
assert len(encode(value(0))) == VALUE_BYTES
