"""The engine of the how-to page, installed as a distribution of its own, and the suite on it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.docs_support import ROOT, SITE, blocks
from tests.processes import unmeasured

PAGE = SITE / "how-to" / "write-an-engine.md"
SUITE = ROOT / "src" / "limpet" / "conformance"
URL = "table:{tmp}/state.table"


def install(folder: Path) -> None:
    """Write the engine and the hooks of the page, and what makes a distribution of them, into a folder."""
    engine, *_, hooks = [block.text for block in blocks(PAGE) if block.language == "python"]
    (folder / "limpet_table.py").write_text(engine)
    (folder / "limpet_table_hooks.py").write_text(f"import sqlite3\n\n\n{hooks}")
    about = folder / "limpet_table-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: limpet-table\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[limpet.engines]\ntable = limpet_table:open\n")
    (folder / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\ntimeout = 120\n")


def judge(folder: Path, *arguments: str, timeout_s: float = 600) -> str:
    """Run the suite on the installed engine, as its author would, and return the report. Fails if the suite does."""
    options = ["-c", f"{folder}/pytest.ini", f"--confcutdir={SUITE}", "-p", "no:cacheprovider", "-q"]
    plugins = ["-p", "limpet.conformance.plugin", "-p", "limpet_table_hooks", "--limpet-engine", URL]
    path = os.pathsep.join([str(folder), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *plugins, *arguments],
        cwd=folder,
        env={**unmeasured(), "PYTHONPATH": path, "LIMPET_MODEL_EXAMPLES": "20"},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout
