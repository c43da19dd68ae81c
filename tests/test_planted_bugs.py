"""The tests must bite: each bug of `tests.planted` has to be caught by them.

A bug is shown to the part of the ordinary run that holds the promise it breaks, on the engine it lives in, with the
cases that the ordinary run has there. The same part passes without the bug, so a failure here is the bug's.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.planted import BUGS
from tests.processes import bare_pytest

ROOT = Path(__file__).parent.parent
SUITE = "src/limpet/conformance"
FAULTS = f"{SUITE}/test_faults.py"
PRIMITIVES = f"{SUITE}/test_primitives.py"
MANY_CHANGES = f"{FAULTS}::test_a_retry_finds_its_first_attempt_among_many_changes"
TRIMMED = f"{PRIMITIVES}::test_what_trimming_drops_is_deleted"
WOKEN = f"{PRIMITIVES}::test_a_wait_ends_soon_when_another"
FIRST_ATTEMPT = f"{SUITE}/test_primitives.py::test_a_first_attempt_that_comes_after_its_retry_does_nothing"

# Where the bug lives, and the tests that must catch it.
JUDGES = {
    "version_not_restarting": ("memory-async", f"{SUITE}/test_writing.py"),
    "revision_reused": ("memory-async", f"{SUITE}/test_writing.py"),
    "early_expiry": ("memory-async", f"{SUITE}/test_time.py"),
    "expired_visible_in_scan": ("memory-async", f"{SUITE}/test_time.py"),
    "refused_batch_leaves_a_trace": ("memory-async", f"{SUITE}/test_batches.py"),
    "group_shares_fate": ("sqlite-async", f"{SUITE}/test_batches.py"),
    "watch_drops_when_full": ("memory-async", f"{SUITE}/test_watch.py"),
    "lock_without_fence_check": ("memory-async", f"{SUITE}/test_locks.py"),
    "receipt_in_a_second_step": ("memory-async", f"{SUITE}/test_retries.py"),
    "late_request_is_done": ("memory-async", FIRST_ATTEMPT),
    "rewritten_entry_is_due": ("memory-async", f"{SUITE}/test_primitives.py"),
    "log_page_without_its_past": ("memory-async", f"{SUITE}/test_watch.py"),
    "stale_cache": ("sqlite-async", f"{SUITE}/test_reading.py"),
    "expired_entry_comes_back": ("sqlite-async", f"{SUITE}/test_time.py"),
    "superseded_request_is_done": ("postgresql-async", FIRST_ATTEMPT),
    "handle_forgets_the_time": ("postgresql-async", f"{SUITE}/test_time.py"),
    "foreign_key_is_overwritten": ("", "tests/redis/test_foreign.py"),
    "seen_expiry_is_not_recorded": ("redis-async", f"{SUITE}/test_time.py"),
    "expected_revision_is_not_compared": ("redis-async", f"{SUITE}/test_guards.py"),
    "patches_are_counted_wrong": ("", "tests/redis/test_short.py"),
    "overwritten_change_is_skipped": ("nats-async", f"{SUITE}/test_log.py"),
    "alarm_is_kept_twice": ("nats-async", f"{SUITE}/test_primitives.py"),
    "lost_reply_is_unavailable": ("redis-async", FAULTS),
    "retry_is_sent_as_new": ("postgresql-async", f"{FAULTS}::test_each_write_is_applied_once_while_connections_break"),
    "recall_reads_the_first_changes": ("memory-async", MANY_CHANGES),
    "recall_reads_the_latest_changes": ("sqlite-async", MANY_CHANGES),
    "trimmed_changes_are_hidden": ("sqlite-async", TRIMMED),
    "superseded_marks_stay": ("memory-async", TRIMMED),
    "commits_wake_no_waiter": ("memory-async", f"{WOKEN}_handle_writes"),
    "other_processes_are_noticed_late": ("sqlite-async", f"{WOKEN}_process_writes"),
    "follower_outlives_its_watches": ("memory-async", f"{SUITE}/test_watch.py"),
    "replaced_follower_goes_on": ("memory-async", f"{SUITE}/test_watch.py"),
    "foreign_hash_is_patched": ("", "tests/redis/test_foreign.py"),
    "expiry_by_the_bare_clock": ("postgresql-async", f"{SUITE}/test_time.py"),
}


def judge(bug: str) -> subprocess.CompletedProcess[str]:
    target, part = JUDGES[bug]
    command = [*bare_pytest(), "-x", "-q", "-p", "tests.planted", part, "-k", target, "--timeout", "120"]
    environment = {**os.environ, "LIMPET_PLANTED": bug}
    # Broken code need not be measured, and the ordinary run has to catch it.
    for name in ("COVERAGE_PROCESS_CONFIG", "LIMPET_WHOLE"):
        environment.pop(name, None)
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=500)


def test_every_planted_bug_has_a_judge() -> None:
    assert JUDGES.keys() == BUGS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_the_suite_catches(bug: str) -> None:
    verdict = judge(bug)

    # pytest returns 1 when tests failed; anything else is a run that went wrong.
    assert verdict.returncode == 1, f"{bug} survived:\n{verdict.stdout[-2000:]}{verdict.stderr[-1000:]}"
    assert "1 failed" in verdict.stdout
