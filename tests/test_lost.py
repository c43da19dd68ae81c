"""What ``./dev lost`` counts: the ways that lose writes do, and Limpet's keep all. The command runs more engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import lost


@pytest.mark.parametrize("name", ["a JSON file", "LangGraph's InMemoryStore", "py-key-value in memory"])
async def test_get_and_put_lose_writes(name: str, tmp_path: Path) -> None:
    ways = dict(lost.rows(tmp_path, {"Redis": "redis://127.0.0.1"}))

    assert lost.WRITES <= await lost.measure(ways[name], 3) < 3 * lost.WRITES


@pytest.mark.parametrize("way", [lost.edit, lost.mcp], ids=lambda way: way.__name__)
async def test_what_merges_keeps_all(way: object, tmp_path: Path) -> None:
    assert callable(way)

    assert await lost.measure(way(f"sqlite:///{tmp_path}/state.db"), 3) == 3 * lost.WRITES
