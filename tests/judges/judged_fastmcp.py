"""A pytest plugin for FastMCP's tests: the store in memory that they and FastMCP make is one on the judged engine.

It is loaded before FastMCP, which imports the class by name.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from key_value.aio.stores import memory

from limpet.adapters.keyvalue import KeyValue

_made: list[KeyValue] = []


class JudgedStore(KeyValue):
    """What FastMCP takes for its store in memory."""

    def __init__(self, *_: Any, default_collection: str | None = None, **__: Any) -> None:
        namespace = f"judged-{uuid.uuid4().hex[:12]}"
        super().__init__(
            os.environ["LIMPET_JUDGED_URL"],
            namespace=namespace,
            default_collection=default_collection or "default_collection",
        )
        _made.append(self)
        with Path(os.environ["LIMPET_JUDGED_STORES"]).open("a") as stores:
            stores.write(f"{namespace}\n")


memory.MemoryStore = JudgedStore  # type: ignore[assignment, misc]


@pytest.fixture(autouse=True)
async def close_judged_stores() -> AsyncIterator[None]:
    """Close what a test has made, as nothing in FastMCP's tests does."""
    yield
    while _made:
        await _made.pop().close()
