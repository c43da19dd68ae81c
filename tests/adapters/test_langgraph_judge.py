"""The checkpointer before the judge that LangGraph's authors wrote, with every capability it knows."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.conformance import checkpointer_test, validate
from langgraph.checkpoint.conformance.capabilities import Capability

import limpet
from limpet.adapters.langgraph import Saver
from tests.engines import ENGINES, unique, url_of


@pytest.mark.parametrize("own", [True, False], ids=["own", "free"])
@pytest.mark.parametrize("engine", ENGINES)
async def test_the_judge_passes_every_capability(engine: str, own: bool, tmp_path: Path) -> None:
    async with limpet.open(url_of(engine, tmp_path), namespace=unique("judge")) as store:

        async def made() -> AsyncGenerator[BaseCheckpointSaver[Any], None]:
            yield Saver(store, own)

        report = await validate(checkpointer_test(name=f"limpet on {engine}")(made))

    results = report.results
    assert [each for result in results.values() for each in result.failures or []] == []
    assert {name for name, result in results.items() if result.passed} == {each.value for each in Capability}
    passed = sum(result.tests_passed for result in results.values())
    print(f"{engine}: {passed} tests of {len(results)} capabilities passed")
    assert passed >= 81
