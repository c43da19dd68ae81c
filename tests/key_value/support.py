"""The engine of the how-to page, installed as a distribution of its own, and the suite on it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.docs_support import ROOT, SITE, blocks
from tests.processes import bare_pytest, unmeasured

PAGE = SITE / "how-to" / "write-an-engine.md"
SUITE = ROOT / "src" / "limpet" / "conformance"
TABLE = "table:{tmp}/state.table"
COPIED = "copied:{unique}"

HOOKS = {TABLE: "table_hooks", COPIED: "copied"}


def install(folder: Path) -> None:
    """Write the engine and the hooks of the page, and what makes a distribution of them, into a folder.

    A second engine, whose verbs all suspend, is installed with it.
    """
    engine, *_, hooks = [block.text for block in blocks(PAGE) if block.language == "python"]
    (folder / "limpet_table.py").write_text(engine)
    (folder / "limpet_table_hooks.py").write_text(f"import sqlite3\n\n\n{hooks}")
    shutil.copy(Path(__file__).with_name("limpet_copied.py"), folder)
    about = folder / "limpet_table-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: limpet-table\nVersion: 1\n")
    (about / "entry_points.txt").write_text(
        "[limpet.engines]\ntable = limpet_table:open\ncopied = limpet_copied:open\n"
    )
    (folder / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\ntimeout = 120\n")


def judge(folder: Path, url: str, *arguments: str, timeout_s: float = 600) -> str:
    """Run the suite on an installed engine, as its author would, and return the report. Fails if the suite does."""
    options = ["-c", f"{folder}/pytest.ini", f"--confcutdir={SUITE}", "-p", "no:cacheprovider", "-q"]
    plugins = ["-p", "limpet.conformance.plugin", "-p", f"limpet_{HOOKS[url]}", "--limpet-engine", url]
    path = os.pathsep.join([str(folder), str(ROOT / "src")])
    done = subprocess.run(
        [*bare_pytest(), *options, *plugins, *arguments],
        cwd=folder,
        env={**unmeasured(), "PYTHONPATH": path, "LIMPET_MODEL_EXAMPLES": "20"},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout
