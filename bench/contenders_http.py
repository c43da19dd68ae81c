"""Contenders of the HTTP interface: Limpet's server and etcd, each in a process of its own, called by raw requests."""

from __future__ import annotations

import base64
import contextlib
import itertools
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec

from bench import workload
from bench.contenders import BlockingContender, Role
from bench.harness import CALLERS, Slice
from bench.http_load import Callers, exchange
from bench.run import ROOT
from bench.workload import Job
from limpet.protocol import engine_msgpack as wire
from tests.servers import free_port

NO_ETCD: Final = "no etcd on the PATH: install etcd-server of Debian or Ubuntu, or a release of github.com/etcd-io/etcd"
START_S: Final = 60.0


class Served(BlockingContender):
    """A server of its own process. Who opens it sets `process` and `port`."""

    process: subprocess.Popen[str]
    port: int

    def put_request(self, key: str, value: Any) -> bytes:
        raise NotImplementedError

    def get_request(self, key: str) -> bytes:
        raise NotImplementedError

    def found(self, body: bytes) -> Any:
        """The value in the response to a get."""
        raise NotImplementedError

    def put(self, key: str, value: Any) -> None:
        exchange(self.port, self.put_request(key, value))

    def get(self, key: str) -> Any:
        return self.found(exchange(self.port, self.get_request(key)))

    def fill(self, jobs: Iterable[Job]) -> None:
        with contextlib.closing(Callers(self.port, CALLERS)) as callers:
            callers.run(self.put_request(*job) for job in jobs)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()

    def work(self, verb: str, keys: int) -> Callable[[float], Slice]:
        """Send requests from 64 callers for so long. The CPU time is the server's."""
        if verb == "put":
            jobs = itertools.islice(workload.puts(keys), 2 * keys)
            made = [self.put_request(*job) for job in jobs]
        else:
            made = [self.get_request(*job) for job in itertools.islice(workload.gets(keys), keys)]
        requests = itertools.cycle(made)

        def run(seconds: float) -> Slice:
            # New connections for each slice, because a server closes those that wait for their next turn.
            with contextlib.closing(Callers(self.port, CALLERS)) as callers:
                callers.run(requests, 0.0)
                cpu_s, began = self._cpu_s(), time.perf_counter()
                calls = callers.run(requests, seconds)
                return Slice(calls, time.perf_counter() - began, self._cpu_s() - cpu_s)

        return run

    def _start(self, words: list[str]) -> Iterator[str]:
        """Start the process, and return what it prints to standard error."""
        self.process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        return iter(self.process.stderr.readline, "")

    def _cpu_s(self) -> float:
        """The CPU time of all threads of the server, finer than the ticks of ``/proc/PID/stat``."""
        threads = Path(f"/proc/{self.process.pid}/task")
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads.iterdir()) / 1e9


def _http(method: str, path: str, port: int, body: bytes = b"", media: str = "application/json") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
    if body:
        head += f"Content-Type: {media}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}\r\n".encode() + body


class LimpetServe(Served):
    name: ClassVar[str] = "limpet serve"
    role: ClassVar[Role] = "limpet"
    note: ClassVar[str] = "on SQLite; version, revision, log"
    expects: ClassVar[dict[str, str]] = {"durability": "disk"}

    def open(self, folder: Path) -> None:
        store = f"sqlite:///{folder}/state.db"
        printed = self._start([sys.executable, "-m", "limpet", "--url", store, "serve", "--http", "127.0.0.1:0"])
        for line in printed:
            if (found := re.search(r"serving http at http://127\.0\.0\.1:([0-9]+)", line)) is not None:
                self.port = int(found[1])
                # Read the pipe, or the server would block at a warning once it is full.
                threading.Thread(target=lambda: list(printed), daemon=True).start()
                return
        raise RuntimeError("the server did not start")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def settings(self) -> dict[str, str]:
        served = wire.decode(exchange(self.port, _http("GET", "/v1/engine", self.port)), wire.Served)
        return {"durability": served.traits.durability}

    def put_request(self, key: str, value: Any) -> bytes:
        return _http("PUT", f"/v1/bench/entries/{key}", self.port, workload.encode(value))

    def get_request(self, key: str) -> bytes:
        return _http("GET", f"/v1/bench/entries/{key}", self.port)

    def found(self, body: bytes) -> Any:
        return workload.decode(body)


class Etcd(Served):
    name: ClassVar[str] = "etcd, JSON gateway"
    note: ClassVar[str] = "one member; revision, log"
    expects: ClassVar[dict[str, str]] = {"fsync": "on"}

    def open(self, folder: Path) -> None:
        program = shutil.which("etcd")
        if program is None:
            raise FileNotFoundError(NO_ETCD)
        self.port = free_port()
        clients, peers = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{free_port()}"
        printed = self._start(
            [
                *(program, "--data-dir", str(folder), "--logger", "zap", "--log-level", "error"),
                *("--listen-client-urls", clients, "--advertise-client-urls", clients),
                *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
                *("--initial-cluster", f"default={peers}"),
            ]
        )
        threading.Thread(target=lambda: list(printed), daemon=True).start()
        until = time.monotonic() + START_S
        while not self._is_healthy():
            if self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError("etcd did not start")
            time.sleep(0.05)

    def _is_healthy(self) -> bool:
        try:
            return b'"true"' in exchange(self.port, _http("GET", "/health", self.port))
        except (OSError, AssertionError):
            return False

    def settings(self) -> dict[str, str]:
        # It syncs each group of writes unless it is started with this option.
        words = Path(f"/proc/{self.process.pid}/cmdline").read_bytes()
        return {"fsync": "off" if b"unsafe-no-fsync" in words else "on"}

    def put_request(self, key: str, value: Any) -> bytes:
        body = {"key": _base64(key.encode()), "value": _base64(workload.encode(value))}
        return _http("POST", "/v3/kv/put", self.port, msgspec.json.encode(body))

    def get_request(self, key: str) -> bytes:
        return _http("POST", "/v3/kv/range", self.port, msgspec.json.encode({"key": _base64(key.encode())}))

    def found(self, body: bytes) -> Any:
        (entry,) = msgspec.json.decode(body)["kvs"]
        return workload.decode(base64.b64decode(entry["value"]))


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def etcd_version() -> str | None:
    """The version of the etcd on the PATH."""
    program = shutil.which("etcd")
    if program is None:
        return None
    printed = subprocess.run([program, "--version"], check=True, capture_output=True, text=True).stdout
    return printed.partition("\n")[0].rpartition(" ")[2]


def can_measure() -> bool:
    """Whether the CPU time of another process can be read here."""
    return os.path.exists(f"/proc/{os.getpid()}/schedstat")
