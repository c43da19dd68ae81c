"""The cost of starting: the import, and one command of the command line. CPU time of whole processes.

The least of many tries is taken: a process cannot use less CPU than it needs, only more. The
processes see what a user would have installed and none of the peers, because a package that
happens to be there can make another import more.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import venv
from pathlib import Path

import limpet.sync
from bench import goals
from bench.run import Run, say
from bench.words import brief, table

INSTALLED = ("limpet", "msgspec", "click")


def measure(run: Run) -> None:
    findings, python = run.findings, _environment(run.folder / "user")
    commands = {
        "python -c pass": ["-c", "pass"],
        "import asyncio": ["-c", "import asyncio"],
        "import limpet": ["-c", "import limpet"],
    }
    tries = run.options.scaled(15, 3)
    found: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(tries):
        for name, arguments in commands.items():
            found[name].append(_cpu_ms([python, *arguments]))
    above = min(found["import limpet"]) - min(found["import asyncio"])
    what = "import limpet, CPU above import asyncio"
    findings.judge("start", what, "ms", [above], goals.IMPORT_MS, f"least of {tries}")

    if importlib.util.find_spec("limpet.__main__") is not None:
        url, tries = f"sqlite:///{run.folder / 'start.db'}", run.options.scaled(10, 2)
        with limpet.sync.open(url) as store:
            store.put("k", "found")
        get = [python, "-m", "limpet", "--url", url, "get", "k"]
        found["limpet get k"] = [_cpu_ms(get, prints='"found"\n') for _ in range(tries)]
        least = min(found["limpet get k"])
        findings.judge("start", "limpet get k, CPU in all", "ms", [least], goals.COMMAND_MS, f"least of {tries}")

    findings.samples["start"] = found
    say("\nStarting, CPU ms")
    rows = [(name, brief(min(times)), brief(sorted(times)[len(times) // 2])) for name, times in found.items()]
    say(table(("", "least", "median"), rows))


def _environment(folder: Path) -> str:
    """Make an environment that holds Limpet and what it depends on. Returns its interpreter."""
    venv.create(folder, symlinks=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    for name in INSTALLED:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        (site_packages / name).symlink_to(Path(spec.origin).parent)
    return str(folder / "bin" / "python")


def _cpu_ms(command: list[str], prints: str = "") -> float:
    """The CPU time of one process from start to end."""
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert child.stdout is not None
    printed = child.stdout.read().decode()
    # Popen's own wait does not return the resources that the process used.
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    child.stdout.close()
    assert (child.returncode, printed) == (0, prints), f"{command} printed {printed!r} and ended {child.returncode}"
    return 1000 * (usage.ru_utime + usage.ru_stime)
