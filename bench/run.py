"""One run: its options, its folder and its findings. Every measurement gets one."""

from __future__ import annotations

import asyncio
import os
import platform
import sqlite3
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import limpet
from bench.contenders import Setup
from bench.report import Findings

ROOT = Path(__file__).parent.parent

PEERS = (
    *("litestar", "aiocache", "py-key-value-aio", "langgraph-checkpoint", "langgraph-checkpoint-sqlite"),
    *("cachetools", "aiosqlite", "diskcache", "orjson", "msgspec"),
    *("asyncpg", "langgraph-checkpoint-postgres", "psycopg", "redis", "hiredis", "nats-py"),
)


@dataclass(frozen=True)
class Options:
    """How much is measured."""

    rounds: int
    slice_s: float
    quick: bool
    engines: tuple[str, ...] = ()
    """Those to measure in the groups ``hot`` and ``growth``; all when there is none."""
    keys: int | None = None
    """Up to how many keys the group ``growth`` measures each engine; as many as it takes minutes for when not given."""

    def scaled(self, full: int, quick: int) -> int:
        """A number of keys or repetitions, small in a trial run."""
        return quick if self.quick else full


class Run:
    """The state that the measurements share."""

    def __init__(self, options: Options, folder: Path, runner: asyncio.Runner) -> None:
        self.options = options
        self.folder = folder
        self.runner = runner
        self.findings = Findings(about=_about(options, folder))

    def setup(self, name: str) -> Setup:
        """A setup to open contenders in, with its own folder."""
        return Setup(self.runner, self.folder / name)

    def child(self, *arguments: str) -> str:
        """The output of a fresh interpreter, started where ``bench`` can be imported."""
        command = [sys.executable, "-m", *arguments]
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def say(text: str = "") -> None:
    """Print without buffering, so that a long run shows its progress."""
    print(text, flush=True)


def _about(options: Options, folder: Path) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "limpet": limpet.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "file_system": _file_system(folder),
        "sync_us": _sync_us(folder),
        "packages": {name: found for name in PEERS if (found := _version(name)) is not None},
        "rounds": options.rounds,
        "slice_s": options.slice_s,
        "quick": options.quick,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    """The commit that is measured, with a plus sign when the files are not as committed."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"], cwd=ROOT, check=True, capture_output=True, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "no checkout"
    return found.stdout.strip()


def _file_system(folder: Path) -> str:
    """What kind of file system the files are on. One in memory makes every sync free."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return "an unknown file system"
    place = str(folder.resolve())
    fitting = [mount for mount in mounts if place == mount[1] or place.startswith(mount[1].rstrip("/") + "/")]
    return max(fitting, key=lambda mount: len(mount[1]))[2] if fitting else "an unknown file system"


def _sync_us(folder: Path) -> float:
    """How long the disk takes to make one page safe, the median of 50."""
    path, took = folder / "sync", []
    with path.open("wb", buffering=0) as file:
        for _ in range(50):
            file.write(bytes(4096))
            began = time.perf_counter()
            os.fsync(file.fileno())
            took.append(time.perf_counter() - began)
    path.unlink()
    return 1e6 * sorted(took)[25]
