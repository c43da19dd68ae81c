"""Counters."""

from __future__ import annotations

import asyncio

import pytest

import limpet
from limpet.errors import InvalidValue, TypeMismatch

INT_MAX = 2**63 - 1


async def test_add_counts_from_zero(store: limpet.Store) -> None:
    """`add` returns the new value, and a missing key counts as zero."""
    assert await store.add("hits") == 1
    assert await store.add("hits", 41) == 42


@pytest.mark.parametrize("other", [1.0, True, None, "1", [1], b"1"])
async def test_add_needs_an_integer(store: limpet.Store, other: object) -> None:
    """`add` to anything but an integer is TypeMismatch and changes nothing."""
    before = await store.put("hits", other)

    with pytest.raises(TypeMismatch):
        await store.add("hits")

    assert await store.entry("hits") == before


async def test_a_counter_does_not_overflow(store: limpet.Store) -> None:
    """A counter that would leave -2^63 to 2^63-1 is an error and stays as it was."""
    await store.put("hits", INT_MAX)

    with pytest.raises(InvalidValue):
        await store.add("hits")

    assert await store.get("hits") == INT_MAX


async def test_concurrent_adds_all_count(store: limpet.Store) -> None:
    """Concurrent adds all count."""
    await asyncio.gather(*(store.add("hits") for _ in range(64)))

    assert await store.get("hits") == 64
