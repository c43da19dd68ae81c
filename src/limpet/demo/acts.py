"""The demonstration: nine short acts on a SQLite file in a temporary folder.

    python -m limpet.demo.acts

Each act shows one promise, and what goes wrong without it. The actors print on the left; a live watch of the same store
prints on the right. An act is a function here, its docstring is the line that explains it, and it prints the replies of
the store.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

import limpet
import limpet.sync
from limpet.errors import Conflict, LockHeld, LockLost

BEAT_S: Final = 0.65
SESSION_TTL_S: Final = 0.5
LEASE_S: Final = 2.0
PATIENCE_S: Final = 10.0

STYLES: Final = {"title": "1;36", "why": "3", "good": "32", "bad": "31", "watch": "2", "plain": ""}


# The stage --------------------------------------------------------------------


class Stage:
    """Prints the actors on the left and the watch on the right, and sets the pace."""

    def __init__(self, *, pauses: bool, colours: bool, width: int | None) -> None:
        self._pauses = pauses
        self._colours = colours
        self._width = width
        self._column = 60 if width is None else max(24, min(72, width - 44))
        self._seen = asyncio.Condition()
        self._events: list[limpet.Event] = []

    def title(self, text: str) -> None:
        """Print the title of an act, after an empty line."""
        self._print("", "plain")
        self._print(text, "title")

    def show(self, text: str, style: str = "plain") -> None:
        """Print a line of an actor, wrapped to the left column on a terminal."""
        for line in textwrap.wrap(text, self._column - 4) if self._width else [text]:
            self._print("   " + line, style)

    async def beat(self, beats: float = 1.0) -> None:
        """Pause, to give the reader time."""
        await asyncio.sleep(beats * BEAT_S if self._pauses else 0)

    async def follow(self, watch: limpet.Watch) -> None:
        """Print what the watch delivers, on the right."""
        async for event in watch:
            value = dict(event.value) if isinstance(event.value, limpet.Fields) else event.value
            change = f"┊ {event.revision:>3} {event.op} {event.key}" + ("" if value is None else f" = {value!r}")
            self._print((" " * self._column + change)[: self._width], "watch")
            async with self._seen:
                self._events.append(event)
                self._seen.notify_all()

    async def wait_for_event(self, key: str, op: str, revision: int = 0) -> limpet.Event:
        """Wait until the watch has delivered a change of a key, from a revision on."""

        def delivered() -> list[limpet.Event]:
            return [
                event for event in self._events if (event.key, event.op) == (key, op) and event.revision >= revision
            ]

        async with self._seen:
            await asyncio.wait_for(self._seen.wait_for(delivered), PATIENCE_S)
            return delivered()[0]

    async def wait_for_entry(self, entry: limpet.Entry | None) -> None:
        """Wait until the watch has delivered the put of this entry."""
        assert entry is not None
        await self.wait_for_event(entry.key, "put", entry.revision)

    def _print(self, line: str, style: str) -> None:
        code = STYLES[style] if self._colours else ""
        try:
            print(f"\x1b[{code}m{line}\x1b[0m" if code else line, flush=True)
        except BrokenPipeError:
            # The reader of the pipe has left, as `head` does. Drop the rest, and end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            signal.raise_signal(signal.SIGINT)


# The acts ---------------------------------------------------------------------


async def three_workers(stage: Stage, store: limpet.Store, url: str) -> None:
    """Three workers put and read at once. The watch on the right gets every change once, in order."""

    async def work(name: str, neighbour: str, delay: float) -> None:
        await stage.beat(delay)
        for step in (1, 2):
            entry = await store.put(f"worker/{name}", {"step": step})
            stage.show(f"{name}: put step {step}, now version {entry.version} at revision {entry.revision}")
            await stage.wait_for_entry(entry)
            await stage.beat()
        found = await store.get(f"worker/{neighbour}")
        stage.show(f"{name}: reads that {neighbour} is at step {found['step']}", "good")

    await asyncio.gather(work("ada", "ben", 0), work("ben", "cem", 0.3), work("cem", "ada", 0.6))


async def the_lost_update(stage: Stage, store: limpet.Store, url: str) -> None:
    """Two workers count to six together. Get, add one, put: both read the same number, and steps are lost."""
    workers, steps = 2, 3
    both_have_read = asyncio.Barrier(workers)
    runs = 0

    async def count_carelessly() -> None:
        for _ in range(steps):
            found = await store.get("careless", 0)
            await both_have_read.wait()
            await stage.beat(0.3)
            await store.put("careless", found + 1)

    async def plus_one(found: int | None) -> int:
        nonlocal runs
        runs += 1
        await asyncio.sleep(0.005)
        return (found or 0) + 1

    async def count_safely() -> None:
        for _ in range(steps):
            await store.update("safe", plus_one)

    await asyncio.gather(*(count_carelessly() for _ in range(workers)))
    await stage.wait_for_entry(await store.entry("careless"))
    count = await store.get("careless")
    stage.show(f"get and put: six steps, and the count is {count}; {workers * steps - count} updates are lost", "bad")
    await stage.beat(2)
    await asyncio.gather(*(count_safely() for _ in range(workers)))
    await stage.wait_for_entry(await store.entry("safe"))
    stage.show(f"update: six steps, and the count is {await store.get('safe')}", "good")
    stage.show(f"(the function ran {runs} times: again whenever the other worker was faster)")


async def a_conflict(stage: Stage, store: limpet.Store, url: str) -> None:
    """A guard: write only if nothing changed since I read. The error names what was found."""
    await store.put("theme", "light")
    read_by_ada = await store.entry("theme")
    stage.show("ada reads the theme and thinks about it")
    await stage.beat()
    await stage.wait_for_entry(await store.put("theme", "dark"))
    stage.show("ben writes meanwhile")
    await stage.beat()
    try:
        await store.put("theme", "solar", expect=read_by_ada)
    except Conflict as conflict:
        stage.show(f"ada is refused: {conflict}", "bad")
    stage.show(f"ben's write stands: the theme is {await store.get('theme')!r}", "good")


async def one_winner(stage: Stage, store: limpet.Store, url: str) -> None:
    """Three workers want the same job. Swapping one field lets one of them have it."""
    job = store.record("job/7")
    await job.put({"state": "pending"})

    async def claim(name: str) -> None:
        won = await job.swap("state", "pending", "claimed", set={"worker": name})
        stage.show(f"{name}: {'has the job' if won else 'is too late'}", "good" if won else "plain")

    await asyncio.gather(claim("ada"), claim("ben"), claim("cem"))
    await stage.wait_for_event("job/7", "patch")
    stage.show(f"one winner, written down with the claim: {await job.get('worker')}")


async def an_expiry(stage: Stage, store: limpet.Store, url: str) -> None:
    """A value is absent as soon as its time to live is over, and the watch gets its end once."""
    await store.put("session/ada", {"user": "ada"}, ttl=SESSION_TTL_S)
    stage.show(f"ada's session lives for {SESSION_TTL_S} s: {await store.get('session/ada')}")
    await asyncio.sleep(SESSION_TTL_S)
    stage.show(f"{SESSION_TTL_S} s later, reading it gives {await store.get('session/ada')}", "good")
    ended = await stage.wait_for_event("session/ada", "expire")
    stage.show(f"the sweeper recorded its end at revision {ended.revision}")


async def the_stale_holder(stage: Stage, store: limpet.Store, url: str) -> None:
    """Another process takes a lock and freezes. Its lease expires, and its late write must be refused."""
    async with frozen_holder(url, store.name) as (holder, token):
        stage.show(f"ada (process {holder.pid}) holds the lock with token {token}, and freezes", "bad")
        try:
            await store.lock("report", ttl=LEASE_S).acquire()
        except LockHeld as held:
            stage.show(f"ben tries: {held}")
        async with store.lock("report", ttl=LEASE_S, wait=PATIENCE_S, holder="ben") as lock:
            stage.show(f"ben waited for the lease to end and holds the lock with token {lock.token}", "good")
            await stage.wait_for_entry(await store.put("report", "by ben", fence=lock))
            await stage.beat()
            stage.show("ada wakes up, still sure of her lock, and writes with her fence")
            holder.send_signal(signal.SIGCONT)
            assert holder.stdout is not None
            reply = await asyncio.wait_for(holder.stdout.readline(), PATIENCE_S)
            stage.show(f"ada is refused: {reply.decode().strip()}", "bad")
            await asyncio.wait_for(holder.wait(), PATIENCE_S)
        stage.show(f"the report is still {await store.get('report')!r}", "good")


async def all_or_nothing(stage: Stage, store: limpet.Store, url: str) -> None:
    """Money moves between two accounts in one batch. A guard fails, and neither account changes."""
    ada = await store.put("account/ada", 100)
    await store.put("account/ben", 0)
    await stage.wait_for_entry(await store.put("account/ada", 10))
    stage.show("ada had 100 when the transfer was planned, and has spent 90 since")
    await stage.beat()
    transfer = store.batch().expect("account/ada", ada).add("account/ada", -50).add("account/ben", 50)
    try:
        await transfer.commit()
    except Conflict as conflict:
        stage.show(f"the batch is refused as a whole: {conflict}", "bad")
    balances = [await store.get(f"account/{name}") for name in ("ada", "ben")]
    status = await store.status()
    stage.show(f"ada has {balances[0]}, ben has {balances[1]}, the revision is still {status.revision}", "good")


async def the_retry(stage: Stage, store: limpet.Store, url: str) -> None:
    """The reply to a write was lost. Sent again with the same request id, it is applied only once."""
    for attempt in ("first", "second"):
        number = await store.add("mails-sent", request_id="order-17/mail")
        stage.show(f"{attempt} attempt of request 'order-17/mail': the counter is {number}")
        await stage.beat()
    await stage.wait_for_event("mails-sent", "put")
    outcome = await store.outcome("order-17/mail")
    assert outcome is not None
    stage.show(f"counted once, at revision {outcome.revision}: {await store.get('mails-sent')} mail sent", "good")


async def the_log(stage: Stage, store: limpet.Store, url: str) -> None:
    """All of this is stored: the file holds the entries and the log."""
    status = await store.status()
    stage.show(
        f"{status.keys} keys and {status.log_changes} changes are in {Path(url.removeprefix('sqlite:///')).name}"
    )
    changes = [f"{change.op} at {change.revision}" async for change in store.history("theme")]
    stage.show(f"the history of 'theme': {', '.join(changes)}")
    stage.show(f"durability is {store.traits.durability!r}: what was acknowledged survives a power cut", "good")


ACTS: Final = (
    three_workers,
    the_lost_update,
    a_conflict,
    one_winner,
    an_expiry,
    the_stale_holder,
    all_or_nothing,
    the_retry,
    the_log,
)


# The process that freezes -----------------------------------------------------


@contextlib.asynccontextmanager
async def frozen_holder(url: str, namespace: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """Start a process that takes the lock and stops. Gives the process, and the token that it holds."""
    # In its own process group, Ctrl-C does not reach it; and if this process dies, the kernel ends it.
    holder = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "limpet.demo.acts", "--frozen-holder", url, namespace),
        stdout=asyncio.subprocess.PIPE,
        process_group=0,
    )
    try:
        assert holder.stdout is not None
        yield holder, int(await asyncio.wait_for(holder.stdout.readline(), PATIENCE_S))
    finally:
        with contextlib.suppress(ProcessLookupError):
            holder.kill()
        await holder.wait()


def hold_and_freeze(url: str, namespace: str) -> None:
    """The work of that process: take the lock, stop, and write when it continues."""
    with limpet.sync.open(url, namespace=namespace, sweep=False) as store:
        lock = store.lock("report", ttl=LEASE_S, holder="ada").acquire()
        print(lock.token, flush=True)
        # As a laptop that sleeps or a machine that swaps does, at the worst moment.
        signal.raise_signal(signal.SIGSTOP)
        try:
            store.put("report", "by ada, too late", fence=lock)
        except LockLost as refused:
            print(refused, flush=True)


# The show ---------------------------------------------------------------------


async def perform(url: str, *, once: bool, pauses: bool, colours: bool, width: int | None) -> None:
    """Play round after round, each in its own namespace."""
    number = 0
    async with limpet.open(url) as store:
        while number == 0 or not once:
            number += 1
            stage = Stage(pauses=pauses, colours=colours, width=width)
            await play(stage, store.namespace(f"round-{number}"), url)
            if not once:
                stage.title(f"That was round {number}. The next one follows; Ctrl-C ends the show.")
                await stage.beat(4)


async def play(stage: Stage, store: limpet.Store, url: str) -> None:
    """Play one round."""
    async with store.watch() as watch, asyncio.TaskGroup() as tasks:
        follower = tasks.create_task(stage.follow(watch))
        for number, act in enumerate(ACTS, 1):
            assert act.__doc__ is not None
            stage.title(f"{number}. {act.__name__.replace('_', ' ').capitalize()}")
            stage.show(act.__doc__, "why")
            await stage.beat()
            await act(stage, store, url)
            await stage.beat(2)
        follower.cancel()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m limpet.demo.acts",
        description="Nine short acts of Limpet on a SQLite file in a temporary folder, with a live watch beside them. "
        "On a terminal it goes on until Ctrl-C, otherwise it plays one round.",
    )
    parser.add_argument("--once", action="store_true", help="play one round and end")
    parser.add_argument("--fast", action="store_true", help="leave out the pauses for the reader")
    parser.add_argument("--frozen-holder", nargs=2, metavar=("URL", "NAMESPACE"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.frozen_holder:
        hold_and_freeze(*options.frozen_holder)
        return 0

    ended_by = signal.SIGINT

    def end_like_ctrl_c(*_: object) -> None:
        nonlocal ended_by
        ended_by = signal.SIGTERM
        signal.raise_signal(signal.SIGINT)

    # A shell makes its background jobs ignore Ctrl-C. This one must end anyway.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, end_like_ctrl_c)
    terminal = sys.stdout.isatty()
    try:
        with tempfile.TemporaryDirectory(prefix="limpet-demo-") as folder:
            asyncio.run(
                perform(
                    f"sqlite:///{folder}/state.db",
                    once=options.once or not terminal,
                    pauses=not options.fast,
                    colours=terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb",
                    width=shutil.get_terminal_size().columns if terminal else None,
                )
            )
    except KeyboardInterrupt:
        print("\nThe show is over.")
        return 128 + ended_by
    return 0


if __name__ == "__main__":
    sys.exit(main())
