"""A pytest plugin for the tests of limits: its storages in memory are ones on the judged engine."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from limits.storage import SCHEMES  # type: ignore[attr-defined]

from limpet.adapters.limits import AsyncStorage, Storage

_made: list[Storage] = []


def _namespace() -> str:
    namespace = f"judged-{uuid.uuid4().hex[:12]}"
    with Path(os.environ["LIMPET_JUDGED_STORES"]).open("a") as stores:
        stores.write(f"{namespace}\n")
    return namespace


class JudgedStorage(Storage):
    """What ``memory:`` is for the tests."""

    def __init__(self, _: str, **options: Any) -> None:
        super().__init__(os.environ["LIMPET_JUDGED_URL"], namespace=_namespace(), **options)
        _made.append(self)


class JudgedAsyncStorage(AsyncStorage):
    """What ``async+memory:`` is for the tests."""

    def __init__(self, _: str, **options: Any) -> None:
        super().__init__(os.environ["LIMPET_JUDGED_URL"], namespace=_namespace(), **options)


SCHEMES["memory"], SCHEMES["async+memory"] = JudgedStorage, JudgedAsyncStorage


@pytest.fixture(autouse=True)
def close_judged_storages() -> Iterator[None]:
    """Close what a test has made, as nothing in the tests of limits does."""
    yield
    while _made:
        _made.pop().close()
