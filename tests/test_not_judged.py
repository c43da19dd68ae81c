"""A run of the suite says what it could not judge, so that it is not taken for more than it is."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.processes import bare_pytest

SUITE = Path(__file__).parents[1] / "src" / "limpet" / "conformance"


def test_the_report_names_what_was_not_judged_without_a_hook() -> None:
    """Our hooks know the servers of the run by their URLs, and this is another spelling of one of them."""
    url = os.environ["LIMPET_TEST_REDIS"].rpartition("/")[0].replace("127.0.0.1", "localhost") + "/60"
    tests = [
        f"{SUITE}/test_faults.py",
        f"{SUITE}/test_primitives.py::test_what_trimming_drops_is_deleted",
        f"{SUITE}/test_primitives.py::test_the_oldest_changes_go_first",
    ]
    command = [*bare_pytest(), "-q", *tests, "--limpet-engine", url]
    environment = {name: text for name, text in os.environ.items() if name != "LIMPET_WHOLE"}

    done = subprocess.run(
        [*command, "--limpet-face", "async"], env=environment, capture_output=True, text=True, check=False, timeout=120
    )

    assert done.returncode == 0, done.stdout[-2000:]
    assert "= Limpet: not judged =" in done.stdout
    _, _, report = done.stdout.partition("= Limpet: not judged =")
    assert "whether each write on redis is applied once when connections break" in report
    assert "by the hook pytest_limpet_line (8 tests)" in report
    assert "whether trimming deletes anything on redis" in report
    assert "by the hook pytest_limpet_stored (1 test)" in report
    assert "3 passed, 9 skipped" in report
