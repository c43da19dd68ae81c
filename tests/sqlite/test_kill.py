"""Processes killed in the middle of writing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.sqlite.support import ROOT

pytestmark = pytest.mark.slow


def test_what_was_acknowledged_survives_a_kill(tmp_path: Path) -> None:
    """An acknowledged write is there when durable storage is opened again.

    Thirty writers are killed, most of them between BEGIN and the answer. Nothing that was acknowledged is lost,
    nothing is applied by halves or twice, no revision is used again. `python -m tests.sqlite.kill --kills 200`
    does the same at length.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.sqlite.kill", "--kills", "30", "--folder", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "none lost, none doubled, none by halves, no revision twice" in done.stdout
