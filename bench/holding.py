"""What a server takes of its machine: memory for many keys, and under attack. See ``./dev load --memory`` and ``--attack``.

The attacks are those of somebody who can reach the port: half requests on many connections, headers that never end,
bodies that trickle, and scans of everything at once. While they last, another caller must be answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from bench.run import say

if TYPE_CHECKING:
    from bench.load import Ask, Board

KEYS: Final = 100_000
VALUE: Final = "x" * 486
"""488 bytes of JSON."""

CONNECTIONS: Final = 500
HEADER_BYTES: Final = 400_000_000
LARGE: Final = 150
SCANS: Final = 4
HELD_S: Final = 15.0


def used_mb(pid: int) -> tuple[float, float]:
    """What a process has for itself, and what of it is resident with the files that it maps."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    kb = {name: int(size) for name, size in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    return (kb["Private_Clean"] + kb["Private_Dirty"] - _mapped_kb(pid)) / 1024, kb["Rss"] / 1024


def _mapped_kb(pid: int) -> int:
    """Pages of a database file that only this process maps are counted as private, and are not its memory."""
    found, is_file = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_file = line.endswith(".db")
        elif is_file and line.startswith("Private_Clean"):
            found += int(line.split()[1])
    return found


async def memory(board: Board, ask: Ask, process: subprocess.Popen[str]) -> None:
    """Many keys of 50 characters and 488 bytes, stored by batches and listed, over NATS."""
    await _store(ask, range(1))
    before = used_mb(process.pid)
    await _store(ask, range(KEYS))
    stored = used_mb(process.pid)
    count, after = 0, None
    while True:
        asked: dict[str, Any] = {"limit": 10_000} if after is None else {"limit": 10_000, "after": after}
        answer = await ask("many-7", "list", asked)
        count, after = count + answer["count"], answer["keys"][-1]
        if not answer["truncated"]:
            break
    listed = used_mb(process.pid)
    assert count == KEYS, count
    say(f"\nMemory for {KEYS:,} keys: {before[0]:.0f} MB private and {before[1]:.0f} MB resident before")
    board.at_most("private memory grows by, when stored", stored[0] - before[0], 50, "MB")
    board.at_most("private memory grows by, when listed", listed[0] - before[0], 50, "MB")
    board.at_most("resident memory grows by, when listed", listed[1] - before[1], 100, "MB")


async def _store(ask: Ask, numbers: range) -> None:
    async def some(few: range) -> None:
        writes = [{"op": "put", "key": f"player/{number:043}", "value": VALUE} for number in few]
        answer = await ask("many-7", "batch", {"writes": writes})
        assert answer.get("success"), answer

    for first in range(0, len(numbers), 400):
        await asyncio.gather(*(some(numbers[one : one + 100]) for one in range(first, min(first + 400, len(numbers)), 100)))
