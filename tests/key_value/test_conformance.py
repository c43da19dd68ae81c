"""The engine of the how-to page keeps the contract: the suite judges it, as it judges ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs_support import blocks
from tests.key_value.support import COPIED, PAGE, SUITE, TABLE, install, judge

LINES_MAX = 100
CHOSEN = [
    "test_primitives.py",
    "test_faults.py",
    "test_retries.py",
]


def test_the_engine_of_the_page_is_small() -> None:
    engine = next(block for block in blocks(PAGE) if block.language == "python")

    assert len(engine.lines()) < LINES_MAX


@pytest.mark.part
@pytest.mark.timeout(300)
def test_the_engine_of_the_page_keeps_the_main_promises(tmp_path: Path) -> None:
    install(tmp_path)

    report = judge(tmp_path, TABLE, *(f"{SUITE}/{name}" for name in CHOSEN), "--limpet-face", "async")

    assert "not judged" not in report


@pytest.mark.timeout(300)
def test_a_store_whose_verbs_suspend_keeps_the_promises_about_one_moment(tmp_path: Path) -> None:
    install(tmp_path)

    report = judge(tmp_path, COPIED, f"{SUITE}/test_primitives.py", "--limpet-face", "async")

    assert "not judged" not in report


PARTS = 4


# In parts, so that no worker is left alone with it at the end of a run.
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
def test_the_engine_of_the_page_keeps_the_whole_contract(tmp_path: Path, part: int) -> None:
    install(tmp_path)
    files = [str(file) for file in sorted(SUITE.glob("test_*.py"))[part::PARTS]]

    # Without an event loop the same coroutines run, and our own engines show that.
    report = judge(tmp_path, TABLE, *files, "--limpet-face", "async", timeout_s=800)

    assert "not judged" not in report
