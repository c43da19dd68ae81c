"""The suite must bite: each bug of `tests.planted` has to be caught by it.

A bug is shown to the part of the suite that holds the promise it breaks, on the engine it lives in.
The same part passes without the bug in the ordinary run, so a failure here is the bug's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.planted import BUGS

ROOT = Path(__file__).parent.parent
SUITE = "src/limpet/conformance"
MEMORY, SQLITE = "memory:{unique}", "sqlite:///{tmp}/state.db"

JUDGES = {
    "version_not_restarting": (MEMORY, f"{SUITE}/test_writing.py"),
    "revision_reused": (MEMORY, f"{SUITE}/test_writing.py"),
    "early_expiry": (MEMORY, f"{SUITE}/test_time.py"),
    "expired_visible_in_scan": (MEMORY, f"{SUITE}/test_time.py"),
    "refused_batch_leaves_a_trace": (MEMORY, f"{SUITE}/test_batches.py"),
    "group_shares_fate": (SQLITE, f"{SUITE}/test_batches.py"),
    "watch_drops_when_full": (MEMORY, f"{SUITE}/test_watch.py"),
    "lock_without_fence_check": (MEMORY, f"{SUITE}/test_locks.py"),
    "receipt_in_a_second_step": (MEMORY, f"{SUITE}/test_retries.py"),
    "late_request_is_done": (
        MEMORY,
        f"{SUITE}/test_primitives.py::test_a_first_attempt_that_comes_after_its_retry_does_nothing",
    ),
}


def judge(bug: str) -> subprocess.CompletedProcess[str]:
    engine, part = JUDGES[bug]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "tests.planted", "-p", "no:xdist", part]
    command += ["--limpet-engine", engine, "--limpet-face", "async", "--timeout", "60"]
    environment = {**os.environ, "LIMPET_PLANTED": bug}
    # Broken code need not be measured.
    environment.pop("COVERAGE_PROCESS_CONFIG", None)
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=500)


def test_every_planted_bug_has_a_judge() -> None:
    assert JUDGES.keys() == BUGS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_the_suite_catches(bug: str) -> None:
    verdict = judge(bug)

    # 1 is pytest's word for tests that failed; anything else is a run that went wrong.
    assert verdict.returncode == 1, f"{bug} survived:\n{verdict.stdout[-2000:]}{verdict.stderr[-1000:]}"
    assert "1 failed" in verdict.stdout
