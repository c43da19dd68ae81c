"""The engine of the how-to page keeps the contract: the suite judges it, as it judges ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs_support import blocks
from tests.key_value.support import PAGE, SUITE, install, judge

LINES_MAX = 100
CHOSEN = [
    "test_primitives.py",
    "test_faults.py",
    "test_retries.py",
]


def test_the_engine_of_the_page_is_small() -> None:
    engine = next(block for block in blocks(PAGE) if block.language == "python")

    assert len(engine.lines()) < LINES_MAX


@pytest.mark.timeout(300)
def test_the_engine_of_the_page_keeps_the_main_promises(tmp_path: Path) -> None:
    install(tmp_path)

    report = judge(tmp_path, *(f"{SUITE}/{name}" for name in CHOSEN), "--limpet-face", "async")

    assert "not judged" not in report


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_engine_of_the_page_keeps_the_whole_contract(tmp_path: Path) -> None:
    install(tmp_path)

    report = judge(tmp_path, str(SUITE), timeout_s=1700)

    assert "not judged" not in report
