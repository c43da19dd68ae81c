"""Resident memory per key, each store alone in a fresh interpreter.

    python -m bench.footprint NAME KEYS

fills one store of `bench.contenders_memory` and prints what its process grew by.
"""

from __future__ import annotations

import asyncio
import gc
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import contenders_memory, goals, workload
from bench.contenders import AnyContender, BlockingContender
from bench.run import Run, say
from bench.words import brief, table

KEYS = 100_000
STATM = Path("/proc/self/statm")
OURS = contenders_memory.LimpetMemory.name
PEER = contenders_memory.PyKeyValueMemory.name


def measure(run: Run) -> None:
    keys, findings = run.options.scaled(KEYS, 5_000), run.findings
    what = f"resident bytes per key at {keys:,}, of {PEER}'s"
    if not STATM.exists():
        findings.missing("footprint", what, "of", goals.FOOTPRINT, "this system does not tell")
        return
    names = [kind.name for kind in contenders_memory.CONTENDERS]
    if run.options.quick:
        names = [OURS, PEER]
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(run.options.scaled(3, 1)):
        for name in list(found):
            try:
                found[name].append(int(run.child("bench.footprint", name, str(keys))) / keys)
            except subprocess.CalledProcessError as error:
                if name == OURS:
                    raise
                findings.absent[name] = str(error.stderr).strip().rpartition("\n")[2]
                del found[name]
    findings.samples["footprint"] = {"keys": keys, "bytes_per_key": found}
    say(f"\nResident bytes per key, {keys:,} keys in memory")
    rows = sorted((statistics.median(sizes), name) for name, sizes in found.items())
    say(table(("", "bytes"), [(name, brief(size)) for size, name in rows]))
    if PEER not in found:
        findings.missing("footprint", what, "of", goals.FOOTPRINT)
        return
    ratios = [ours / theirs for ours, theirs in zip(found[OURS], found[PEER], strict=True)]
    note = "Limpet's includes the log of all these puts"
    findings.judge("footprint", what, "of", ratios, goals.FOOTPRINT, note)


def resident_bytes() -> int:
    """What of this process is in memory now."""
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def _grown_by(name: str, keys: int) -> int:
    (kind,) = (kind for kind in contenders_memory.CONTENDERS if kind.name == name)
    contender = kind()
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(contender, BlockingContender):
            contender.open(Path(folder))
        else:
            await contender.open(Path(folder))
        # The first call imports and allocates what does not belong to the keys.
        await _put(contender, workload.in_order(1))
        gc.collect()
        before = resident_bytes()
        await _put(contender, workload.in_order(keys))
        gc.collect()
        after = resident_bytes()
        found = contender.get(workload.key(keys - 1))
        if not isinstance(contender, BlockingContender):
            found = await found
        assert found == workload.value(keys - 1)
    return after - before


async def _put(contender: AnyContender, jobs: workload.Jobs) -> None:
    for job in jobs:
        if isinstance(contender, BlockingContender):
            contender.put(*job)
        else:
            await contender.put(*job)


if __name__ == "__main__":
    print(asyncio.run(_grown_by(sys.argv[1], int(sys.argv[2]))))
