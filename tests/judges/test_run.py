"""What ``./dev judges`` does beside running tests: finding pins, and counting."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.judges.run import Counts, count, find_pin, has_failed


@pytest.mark.parametrize("name", ["cachelib", "fastmcp", "limits", "openai-agents", "py-key-value-aio"])
def test_the_pin_of_a_framework_has_hashes(name: str) -> None:
    first, *rest = find_pin(name).splitlines()

    assert first.startswith((f"{name}==", f"{name}["))
    # One of the source distribution, one of a wheel.
    assert len([line for line in rest if "--hash=sha256:" in line]) == 2
    assert not [line for line in rest if line[:1].isalnum()]


def test_a_package_that_is_not_pinned_is_named() -> None:
    with pytest.raises(SystemExit, match="nothing-of-this-name"):
        find_pin("nothing-of-this-name")


def test_a_report_of_pytest_is_counted(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text('<testsuites><testsuite tests="9" failures="1" errors="2" skipped="3"/></testsuites>')

    assert count(report, 4, 1.5) == Counts(3, 3, 3, 4, 1.5)


def test_a_judge_that_ran_nothing_has_failed() -> None:
    """A pattern that matches no file of the next release must not look like success."""
    assert has_failed(Counts(0, 0, 5, None, 1.0))
    assert has_failed(Counts(5, 1, 0, None, 1.0))
    assert not has_failed(Counts(5, 0, 1, None, 1.0))
