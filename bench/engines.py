"""Places to measure: each engine with a server of its own, where it has one, and the CPU time that the server takes."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from bench.run import Run
from limpet.engines import memory
from tests.servers import nats, postgres, redis

PROC: Final = Path("/proc")


@dataclass(frozen=True)
class Place:
    """Where stores of one engine are made.

    Attributes:
        title: The name of the engine, as in the tables.
        url_of: The URL of a store of this name, apart from all others.
        folder: What the stores take on the disk is in it; None for memory.
        pid: The process of the server; None where there is none.
    """

    title: str
    url_of: Callable[[str], str]
    folder: Path | None = None
    pid: int | None = None

    def size_bytes(self) -> int:
        """What all stores together take on the disk now."""
        if self.folder is None:
            return 0
        return sum(_file_bytes(path) for path in self.folder.rglob("*"))


def serve(run: Run, engine: str, name: str) -> AbstractContextManager[Place]:
    """A place of an engine for as long as the context lasts. Its files are on the disk that is measured."""
    folder = run.folder / f"{name}-{engine}"
    if engine not in ("memory", "sqlite"):
        run.folder.chmod(0o711)
        if not _is_open_to_all(run.folder):
            # Servers do not run as root, and could not get there.
            folder = Path(tempfile.mkdtemp(prefix=f"limpet-{name}-"))
    return _PLACES[engine](folder)


def _is_open_to_all(folder: Path) -> bool:
    return os.geteuid() != 0 or all(parent.stat().st_mode & stat.S_IXOTH for parent in folder.resolve().parents)


# CPU time ---------------------------------------------------------------------


class Cost(NamedTuple):
    """What something took: wall time, and CPU time of this process and of the server together."""

    wall_s: float
    cpu_s: float

    def by(self, calls: int) -> Cost:
        """The same for one of so many calls."""
        return Cost(self.wall_s / calls, self.cpu_s / calls)


class Meter:
    """Measures from its making to `stop`."""

    def __init__(self, place: Place) -> None:
        self._pid = place.pid
        self._server = _server_ns(self._pid)
        self._cpu_s = time.process_time()
        self._began = time.perf_counter()

    def stop(self) -> Cost:
        """What was taken until now."""
        wall_s, own_s = time.perf_counter() - self._began, time.process_time() - self._cpu_s
        # A process that has ended meanwhile, as a connection's of PostgreSQL does, is left out.
        server_ns = sum(ns - self._server.get(task, 0) for task, ns in _server_ns(self._pid).items())
        return Cost(wall_s, own_s + server_ns / 1e9)


def _server_ns(pid: int | None) -> dict[str, int]:
    """The CPU time of each thread of a server and of its child processes; nothing where the system does not tell."""
    found: dict[str, int] = {}
    pids = [] if pid is None else [str(pid)]
    while pids:
        for task in _tasks(pids.pop()):
            # A thread may end between two of these lines.
            with contextlib.suppress(OSError):
                found[task.name] = int((task / "schedstat").read_text().split()[0])
                pids += (task / "children").read_text().split()
    return found


def _tasks(pid: str) -> list[Path]:
    with contextlib.suppress(OSError):
        return list((PROC / pid / "task").iterdir())
    return []


def _file_bytes(path: Path) -> int:
    # What the file takes, not how long it is: servers make files longer than what is in them.
    with contextlib.suppress(OSError):
        return path.lstat().st_blocks * 512
    return 0


# The engines ------------------------------------------------------------------


@contextlib.contextmanager
def _on_memory(folder: Path) -> Iterator[Place]:
    prefix = f"{folder.name}-"
    yield Place("memory", lambda name: f"memory:{prefix}{name}")
    # A shared store would stay as long as the process, and be in the way of what is measured next.
    for name in [name for name in memory._shared if name.startswith(prefix)]:
        del memory._shared[name]


@contextlib.contextmanager
def _on_sqlite(folder: Path) -> Iterator[Place]:
    folder.mkdir(parents=True, exist_ok=True)
    yield Place("SQLite", lambda name: f"sqlite:///{folder / name}.db", folder)
    # Before the next engine needs the room.
    shutil.rmtree(folder)


@contextlib.contextmanager
def _on_postgres(folder: Path) -> Iterator[Place]:
    with postgres(folder=folder) as server:
        # Without the log of the server, which it keeps for itself and uses again.
        files = folder / "data" / "base"
        yield Place("PostgreSQL", lambda name: f"{server.url}?schema={name}", files, server.pid)


@contextlib.contextmanager
def _on_redis(folder: Path) -> Iterator[Place]:
    with redis({"appendonly": "yes", "appendfsync": "everysec", "databases": "64"}, folder=folder) as server:
        numbers: dict[str, int] = {}
        following = itertools.count()

        def url_of(name: str) -> str:
            number = numbers[name] if name in numbers else numbers.setdefault(name, next(following))
            return f"{server.url.rpartition('/')[0]}/{number}"

        yield Place("Redis", url_of, folder, server.pid)


@contextlib.contextmanager
def _on_nats(folder: Path) -> Iterator[Place]:
    with nats(folder=folder) as server:
        yield Place("NATS", lambda name: f"{server.url}?bucket_prefix={name}-", folder, server.pid)


_PLACES: Final[dict[str, Callable[[Path], AbstractContextManager[Place]]]] = {
    "memory": _on_memory,
    "sqlite": _on_sqlite,
    "postgres": _on_postgres,
    "redis": _on_redis,
    "nats": _on_nats,
}
ENGINES: Final = tuple(_PLACES)
