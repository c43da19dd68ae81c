"""Load on a server: ten plugins over NATS on durable SQLite, as ``./dev load`` measures it.

A NATS server, ``limpet serve`` and the plugins are separate processes. Latencies are measured at a set pace, so that
a slow reply delays no other request. Throughput is measured with ten plugins that send as fast as they can. An echo
service on the same driver shows the limit of NATS itself on this machine.

Exits with 1 when a figure misses its limit.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import count, cycle
from pathlib import Path
from typing import Any, Final, NamedTuple

import nats

from bench import holding
from bench.harness import percentile
from bench.run import ROOT, say
from bench.words import brief
from tests.servers import nats as nats_server

PLUGINS: Final = 10
TIMEOUT_S: Final = 5.0
VALUE: Final = {"turn": "alice", "round": 3, "players": ["alice", "bob"], "note": "x" * 60}

Send = Callable[[str, str, dict[str, Any]], Awaitable[dict[str, Any]]]
"""Sends a request: plugin, operation, parameters."""


class Measurement(NamedTuple):
    """A figure and its limit."""

    what: str
    figure: float
    limit: float
    unit: str
    lower: bool

    @property
    def passes(self) -> bool:
        return self.figure <= self.limit if self.lower else self.figure >= self.limit


class Board:
    """The figures of a run."""

    def __init__(self) -> None:
        self.measurements: list[Measurement] = []

    def at_most(self, what: str, figure: float, limit: float, unit: str = "ms") -> None:
        self._add(Measurement(what, figure, limit, unit, lower=True))

    def at_least(self, what: str, figure: float, limit: float, unit: str = "/s") -> None:
        self._add(Measurement(what, figure, limit, unit, lower=False))

    def _add(self, measured: Measurement) -> None:
        self.measurements.append(measured)
        sign = "≤" if measured.lower else "≥"
        verdict = "PASS" if measured.passes else "MISS"
        say(f"  {verdict}  {measured.what}: {brief(measured.figure)} {measured.unit} ({sign} {brief(measured.limit)})")


# The processes ----------------------------------------------------------------


@contextlib.contextmanager
def server(url: str, store: str, *more: str) -> Iterator[subprocess.Popen[str]]:
    """``limpet serve``, ready."""
    words = [sys.executable, "-m", "limpet", "--url", store, "serve", "--nats", url, *more]
    with subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            while "serving nats" not in (line := process.stderr.readline()):
                assert line, "the server did not start"
            # Read the pipe, or the server would block at a warning once it is full.
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield process
        finally:
            process.terminate()


@contextlib.contextmanager
def echo(url: str) -> Iterator[None]:
    """A service that replies with the request, in its own process."""
    words = [sys.executable, "-m", "bench.load", "--echo", url]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            yield
        finally:
            process.terminate()


async def run_echo(url: str) -> None:
    """Run the echo service. This is the main function of its process."""
    connection = await nats.connect(url)

    async def answer(message: Any) -> None:
        await connection.publish(message.reply, message.data)

    await connection.subscribe("echo.>", cb=answer)
    await connection.flush()
    print("ready", flush=True)
    await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def plugins(url: str, prefix: str = "db.kv") -> AsyncIterator[Send]:
    """Ten plugins, each with its own connection."""
    connections = [await nats.connect(url) for _ in range(PLUGINS)]

    async def send(plugin: str, operation: str, parameters: dict[str, Any]) -> dict[str, Any]:
        connection = connections[int(plugin.rpartition("-")[2]) % PLUGINS]
        message = await connection.request(
            f"{prefix}.{plugin}.{operation}", json.dumps(parameters).encode(), timeout=TIMEOUT_S
        )
        answer: dict[str, Any] = json.loads(message.data)
        return answer

    try:
        yield send
    finally:
        for connection in connections:
            await connection.close()


# The measurements -------------------------------------------------------------


async def at_pace(send: Callable[[int], Awaitable[Any]], rate: float, seconds: float) -> list[float]:
    """Milliseconds of each call. Calls begin at a set pace, whether or not those before have ended."""
    times: list[float] = []
    calls: set[asyncio.Task[None]] = set()

    async def one(number: int, due: float) -> None:
        await send(number)
        # Count from when it was due: a late start is part of the wait of a real caller.
        times.append(1000 * (time.perf_counter() - due))

    began = time.perf_counter()
    for number in range(int(rate * seconds)):
        due = began + number / rate
        if (left := due - time.perf_counter()) > 0:
            await asyncio.sleep(left)
        task = asyncio.create_task(one(number, due))
        calls.add(task)
        task.add_done_callback(calls.discard)
    while calls:
        await asyncio.gather(*calls)
    return times


async def flat_out(send: Callable[[int], Awaitable[Any]], callers: int, seconds: float) -> tuple[float, list[float]]:
    """Calls a second that so many callers get through together, and how long each took in milliseconds."""
    times: list[float] = []
    numbers = count()
    began = time.perf_counter()

    async def caller() -> None:
        while time.perf_counter() - began < seconds:
            start = time.perf_counter()
            await send(next(numbers))
            times.append(1000 * (time.perf_counter() - start))

    await asyncio.gather(*(caller() for _ in range(callers)))
    return len(times) / (time.perf_counter() - began), times


class Errors:
    """Counts failed requests."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.count = 0

    async def __call__(self, plugin: str, operation: str, parameters: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = await self._send(plugin, operation, parameters)
        except Exception:
            self.count += 1
            return {}
        self.count += not answer.get("success", False)
        return answer


def of(number: int) -> str:
    return f"plugin-{number % PLUGINS}"


async def measure(board: Board, url: str, process: subprocess.Popen[str], options: argparse.Namespace) -> None:
    short = options.seconds
    async with plugins(url) as bare:
        send = Errors(bare)
        await flat_out(lambda n: send(of(n), "set", {"key": f"k{n % 1000}", "value": VALUE}), PLUGINS, 1)

        say("\nLatency at a set pace")
        times = await at_pace(lambda n: send(of(n), "set", {"key": f"k{n % 5000}", "value": VALUE}), 1000, short)
        _latency(board, "set at 1,000/s", times, (50, 5), (95, 10), (99, 20))
        times = await at_pace(lambda n: send(of(n), "get", {"key": f"k{n % 5000}"}), 2000, short)
        _latency(board, "get at 2,000/s", times, (50, 5), (95, 10), (99, 15))
        times = await at_pace(lambda n: send(of(n), "delete", {"key": f"k{n}"}), 500, short)
        _latency(board, "delete at 500/s", times, (50, 5), (95, 10))
        for keys, percent, limit in ((100, 50, 10), (1_000, 95, 50), (10_000, 99, 100)):
            plugin = f"list-{keys}"
            await _fill(send, plugin, keys)
            times = await at_pace(lambda _, p=plugin: send(p, "list", {"limit": 10_000}), 20, short)  # type: ignore[misc]
            _latency(board, f"list of {keys:,} keys", times, (percent, limit))

        say("\nAs fast as ten plugins can")
        mixed = mixture()
        rate, times = await flat_out(lambda n: send(*mixed(n)), PLUGINS, options.sustained)
        board.at_least(f"70 % get, 30 % set for {options.sustained:.0f} s", rate, 3000)
        board.at_most("its p95", percentile(times, 95), 10)
        rate, _ = await flat_out(lambda n: send(of(n), "set", {"key": f"k{n % 5000}", "value": VALUE}), 64, short)
        board.at_least("burst of set, 64 at a time", rate, 5000)
        rate, _ = await flat_out(lambda n: send(of(n), "get", {"key": f"k{n % 5000}"}), 64, short)
        board.at_least("burst of get, 64 at a time", rate, 5000)
        board.at_most("failed requests", send.count, 0, "")

        say("\nMemory")
        before = _resident_mb(process.pid)
        await _fill(send, "many-7", 100_000)
        board.at_most("growth for 100,000 keys", _resident_mb(process.pid) - before, 50, "MB")


async def against_echo(url: str, seconds: float) -> None:
    """Compare the throughput with that of the echo service."""
    async with plugins(url) as send, plugins(url, "echo") as send_echo:
        mixed = mixture()
        rates: dict[str, list[float]] = {"limpet": [], "echo": []}
        for _ in range(5):
            for name, one in (("limpet", send), ("echo", send_echo)):
                rate, _ = await flat_out(lambda n, one=one: one(*mixed(n)), PLUGINS, seconds)  # type: ignore[misc]
                rates[name].append(rate)
    ratios = [ours / theirs for ours, theirs in zip(rates["limpet"], rates["echo"], strict=True)]
    say(
        f"\nMixed, ten plugins: {brief(statistics.median(rates['limpet']))}/s, an echo service on nats-py "
        f"{brief(statistics.median(rates['echo']))}/s: {statistics.median(ratios):.2f} of it"
    )


async def large(board: Board, url: str, keys: int) -> None:
    """Many plugins and many keys: everything is still there, and still quick."""
    names, each = 1_000, keys // 1_000
    async with plugins(url) as bare:
        send = Errors(bare)
        began = time.perf_counter()
        for first in range(0, names, PLUGINS):
            await asyncio.gather(*(_fill(send, f"p-{number}", each) for number in range(first, first + PLUGINS)))
            if (done := first + PLUGINS) % 100 == 0:
                say(f"  {done * each:,} keys, {time.perf_counter() - began:.0f} s")
        board.at_least(f"{keys:,} keys of {names:,} plugins stored", keys / (time.perf_counter() - began), 1000)
        times = await at_pace(lambda n: send(f"p-{n * 7 % names}", "get", {"key": f"k{n % each}"}), 1000, 5)
        _latency(board, f"get among {keys:,} keys", times, (95, 10))
        answer = await bare("p-7", "list", {"limit": 10_000})
        board.at_least("keys listed of one plugin", answer["count"], each, "")
        board.at_most("failed requests", send.count, 0, "")


async def _memory(board: Board, url: str, process: subprocess.Popen[str]) -> None:
    async with plugins(url) as send:
        await holding.memory(board, send, process)


async def _fill(send: Send, plugin: str, keys: int) -> None:
    """Store so many keys, a hundred in a batch."""

    async def some(first: int) -> None:
        numbers = range(first, min(first + 100, keys))
        writes = [{"op": "put", "key": f"k{number}", "value": VALUE} for number in numbers]
        answer = await send(plugin, "batch", {"writes": writes})
        assert answer.get("success"), answer

    for first in range(0, keys, 400):
        await asyncio.gather(*(some(one) for one in range(first, min(first + 400, keys), 100)))


def mixture() -> Callable[[int], tuple[str, str, dict[str, Any]]]:
    """Seven gets to three sets, on existing keys."""
    verbs = cycle(["get", "get", "set", "get", "get", "set", "get", "get", "set", "get"])

    def make_request(number: int) -> tuple[str, str, dict[str, Any]]:
        key = f"k{number * 7 % 5000}"
        verb = next(verbs)
        return of(number), verb, {"key": key} if verb == "get" else {"key": key, "value": VALUE}

    return make_request


def _latency(board: Board, what: str, times: list[float], *limits: tuple[int, float]) -> None:
    for percent, limit in limits:
        board.at_most(f"{what}, p{percent}", percentile(times, percent), limit)


def _resident_mb(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="./dev load", description="Put load on a server, and check it against its limits."
    )
    parser.add_argument("--url", help="the store to serve (default: a new SQLite file)")
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S", help="how long each measurement takes (10)")
    parser.add_argument("--sustained", type=float, default=60.0, metavar="S", help="how long the mixed load lasts (60)")
    parser.add_argument("--large", type=int, metavar="KEYS", help="only this: so many keys of 1,000 plugins")
    parser.add_argument("--memory", action="store_true", help="only this: the server's memory for 100,000 keys")
    parser.add_argument(
        "--attack", action="store_true", help="only this: whether other callers are answered under attack"
    )
    parser.add_argument("--echo", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.echo:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(run_echo(options.echo))
        return 0
    board = Board()
    if options.attack:
        with tempfile.TemporaryDirectory(prefix="load-") as files:
            asyncio.run(holding.attack(board, options.url or f"sqlite:///{files}/state.db"))
        return verdict(board)
    folder = ROOT / "bench" / "results"
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="load-", dir=folder) as files, nats_server() as bus:
        store = options.url or f"sqlite:///{files}/state.db"
        with server(bus.url, store, "--log-level", "warning") as process:
            if options.memory:
                asyncio.run(_memory(board, bus.url, process))
            elif options.large:
                asyncio.run(large(board, bus.url, options.large))
                say(f"  {os.path.getsize(f'{files}/state.db') / 1e9:.2f} GB" if not options.url else "")
            else:
                asyncio.run(measure(board, bus.url, process, options))
                with echo(bus.url):
                    asyncio.run(against_echo(bus.url, min(3.0, options.seconds)))
    return verdict(board)


def verdict(board: Board) -> int:
    """The exit code."""
    missed = [each for each in board.measurements if not each.passes]
    say(f"\n{len(board.measurements) - len(missed)} of {len(board.measurements)} pass.")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
