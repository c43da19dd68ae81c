"""A pytest plugin for the tests of limits: its storages in memory are ones on the judged engine.

The tests look at windows of a second or two by the clock. A busy machine may let one pass between two of their lines,
whatever the storage is, so that a test has three tries.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from _pytest.runner import runtestprotocol
from limits.storage import SCHEMES  # type: ignore[attr-defined]

from limpet.adapters.limits import AsyncStorage, Storage

TRIES: Final = 3

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


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test, and again where it fails. Only the last try is reported."""
    assert isinstance(item, pytest.Function)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for left in reversed(range(TRIES)):
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        if not left or not any(report.failed for report in reports):
            break
        item._initrequest()
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
