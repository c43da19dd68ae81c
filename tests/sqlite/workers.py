"""The work of other processes in these tests: ``python -m tests.sqlite.workers NAME ARGUMENTS``.

A worker writes and reads lines of JSON. It writes "ready" when it has opened what it needs, and begins at the moment
that it is sent, which is the same for all that begin together.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import limpet
import limpet.sync
from limpet.engines.sqlite import connections
from limpet.engines.sqlite.engine import SqliteEngine
from limpet.errors import LimpetError, LockHeld

WORKERS: dict[str, Callable[..., None]] = {}


def worker(function: Callable[..., None]) -> Callable[..., None]:
    WORKERS[function.__name__] = function
    return function


def say(word: Any) -> None:
    print(json.dumps(word), flush=True)


def receive() -> Any:
    line = sys.stdin.readline()
    return json.loads(line) if line else None


def await_moment() -> None:
    moment = receive()
    while time.monotonic() < moment:
        pass


# Several processes on one file --------------------------------------------------


@worker
def adds(url: str, count: str) -> None:
    with limpet.sync.open(url) as store:
        say("ready")
        await_moment()
        say([store.add("hits") for _ in range(int(count))])


@worker
def writes(url: str, name: str, count: str) -> None:
    """Puts, batches and deletes. Reports the revision and key of each acknowledged change."""
    with limpet.sync.open(url) as store:
        say("ready")
        await_moment()
        made = []
        for number in range(int(count)):
            match number % 3:
                case 0:
                    commit = store.batch().put(f"{name}/one", number).commit()
                case 1:
                    commit = store.batch().put(f"{name}/two", number).put("shared", name).commit()
                case _:
                    commit = store.batch().delete(f"{name}/one").put("shared", name).commit()
                    made.append([commit.revision - 1, "delete", f"{name}/one"])
            made += [[entry.revision, "put", entry.key] for entry in commit.entries if entry is not None]
        say(made)


@worker
def watches(url: str, count: str) -> None:
    """Reports what a watch delivers."""

    async def watch() -> list[list[Any]]:
        async with limpet.open(url) as store, store.watch() as events:
            say("ready")
            return [[event.revision, event.op, event.key] async for event in take(events, int(count))]

    say(asyncio.run(watch()))


async def take(events: limpet.Watch, count: int) -> Any:
    for _ in range(count):
        yield await anext(events)


@worker
def swaps(url: str, rounds: str) -> None:
    """Tries to win each round of a record's field."""
    with limpet.sync.open(url) as store:
        record = store.record("state")
        say("ready")
        for number in range(int(rounds)):
            await_moment()
            say(record.swap("round", number, number + 1, set={"winner": os.getpid()}))


@worker
def opens(folder: str, rounds: str) -> None:
    """Opens a new file each round, at the same moment as others do, and writes to it."""
    say("ready")
    for number in range(int(rounds)):
        await_moment()
        try:
            with limpet.sync.open(f"sqlite:///{folder}/{number}.db", sweep=False) as store:
                store.add("hits")
                say([store.status().store_id, None])
        except Exception as error:
            say([None, repr(error)])


@worker
def locks(url: str, count: str) -> None:
    """Adds to a number by reading and writing, which only a lock makes safe. Reports its tokens."""
    with limpet.sync.open(url) as store:
        say("ready")
        await_moment()
        tokens = []
        for _ in range(int(count)):
            with store.lock("door", ttl=10, wait=20) as lock:
                tokens.append(lock.token)
                store.put("guarded", store.get("guarded", 0) + 1, fence=lock)
        say(tokens)


@worker
def holds(url: str, ttl: str) -> None:
    """Takes a lock and never gives it back."""
    with limpet.sync.open(url) as store:
        lock = store.lock("door", ttl=float(ttl))
        say(lock.acquire().token)
        receive()


@worker
def tries_to_lock(url: str) -> None:
    """Tries to take the lock that another process holds."""
    with limpet.sync.open(url) as store:
        try:
            store.lock("door", ttl=10).acquire()
        except LockHeld as held:
            say([held.holder, held.token])


@worker
def adds_until(url: str, total: str) -> None:
    """Adds to a number until all have added so much together. Reports the values of its own adds."""
    with limpet.sync.open(url, sweep=False) as store:
        say("ready")
        await_moment()
        values = []
        while (value := store.add("hits")) <= int(total):
            values.append(value)
        say(values)


@worker
def comes_next(url: str) -> None:
    """Takes the place of the next writer, and never begins."""
    with limpet.sync.open(url, sweep=False) as store:
        engine: Any = store._twin._session.engine
        wal = engine._cached.wal
        say(wal.next_writer.take())
        receive()


@worker
def writes_without_end(url: str) -> None:
    """Begins a transaction, and never commits."""
    with limpet.sync.open(url, sweep=False) as store:
        engine: Any = store._twin._session.engine
        engine._writer.begin().execute("UPDATE limpet_store SET epoch = 99")
        say("begun")
        receive()


@worker
def visits(url: str, *keys: str) -> None:
    """Opens, reads and closes: the shortest life of a process."""
    with limpet.sync.open(url, sweep=False) as store:
        say([store.get(key) for key in keys])


# Closing and limits -------------------------------------------------------------


@worker
def closes_under_readers(url: str, rounds: str) -> None:
    """Closes a store while threads read it. Each read is answered or refused as Closed; the process lives."""
    for _ in range(int(rounds)):
        store = limpet.sync.open(url, sweep=False)
        store.put("key", "value")
        others: list[str] = []
        running = threading.Barrier(5)

        def read(store: Any = store, others: list[str] = others, running: threading.Barrier = running) -> None:
            running.wait()
            try:
                while True:
                    if store.get("key") != "value" or [entry.key for entry in store.scan()] != ["key"]:
                        others.append("a wrong answer")
            except limpet.errors.Closed:
                pass
            except BaseException as error:
                others.append(repr(error))

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        running.wait()
        # Often while they are still opening their connections, sometimes when they have read for a while.
        time.sleep(random.choice((0, 0.0005, 0.001, 0.002, 0.005)))
        store.close()
        for thread in threads:
            thread.join()
        say(others)


@worker
def outgrows(url: str, limit_bytes: str) -> None:
    """Writes until files may not grow any more; then is allowed to again."""

    connections.BUSY_TIMEOUT_MS = 50  # type: ignore[misc]
    # Python ignores SIGXFSZ, so the write fails as on a full disk.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with limpet.sync.open(url, sweep=False, clock=Impatient()) as store:
        store.put("before", "x")
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit_bytes), hard))
        failure = None
        written = 0
        while failure is None:
            try:
                store.put(f"key/{written}", "x" * 20_000)
                written += 1
            except LimpetError as error:
                failure = error
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        found = store.keys("key/").count
        store.put("after", "x")
        say([type(failure).__name__, str(failure), written, found, store.get("before"), store.get("after")])


class Impatient(limpet.SystemClock):
    async def sleep(self, seconds: float) -> None:
        await super().sleep(min(seconds, 0.001))


@worker
def opens_as_another_user(url: str) -> None:
    """Opens a file with the rights of another user, where we are root and no right is refused."""
    connections.BUSY_TIMEOUT_MS = 50  # type: ignore[misc]
    if os.geteuid() == 0:
        os.setegid(65_534)
        os.seteuid(65_534)
    try:
        with limpet.sync.open(url, sweep=False) as store:
            say(["opened", store.get("key")])
    except LimpetError as error:
        say([type(error).__name__, str(error)])


@worker
def runs_out_of_descriptors(url: str, verb: str) -> None:
    """Does something while no further file can be opened, reports what that raised, and does it again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def open_and_read() -> Any:
        with limpet.sync.open(url, sweep=False) as opened:
            return opened.get("key")

    def in_thread(work: Callable[[], Any]) -> Any:
        """Where a thread has no connection yet, it needs another."""
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            return threads.submit(work).result()

    with limpet.sync.open(url, sweep=False, clock=Impatient()) as store:
        writer = store._twin._session.engine
        assert isinstance(writer, SqliteEngine)

        def write() -> Any:
            store.put("key", 1)
            return store.get("key")

        work: Callable[[], Any] = {
            "open": open_and_read,
            "reopen": lambda: asyncio.run(_open_and_read(url)),
            "read": lambda: in_thread(lambda: store.get("key")),
            "write": write,
        }[verb]
        if verb == "write":
            writer._writer.abandon()
        loop = asyncio.new_event_loop() if verb == "reopen" else None
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, hard))
        try:
            if loop is not None:
                loop.run_until_complete(_open_and_read(url))
            else:
                work()
            raised = ["nothing", False]
        except LimpetError as error:
            raised = [type(error).__name__, error.retryable]
        except Exception as error:
            raised = [type(error).__name__, False]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            if loop is not None:
                loop.close()
        say(raised)
        say(work())


async def _open_and_read(url: str) -> Any:
    async with limpet.open(url, sweep=False) as store:
        return await store.get("key")


# Forks --------------------------------------------------------------------------


def in_child(work: Callable[[], Any]) -> Callable[[], Any]:
    """Fork, and do this in the child. Returns a function that waits for the child and gives what it returned."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            reply = [work(), None]
        except BaseException as error:
            reply = [None, repr(error)]
        os.write(writing, json.dumps(reply).encode())
        os._exit(0)
    os.close(writing)

    def outcome() -> Any:
        with os.fdopen(reading, "rb") as pipe:
            reply = pipe.read()
        _, status = os.waitpid(pid, 0)
        if not reply:
            raise AssertionError(f"the child ended without a reply, status {os.waitstatus_to_exitcode(status)}")
        result, error = json.loads(reply)
        if error is not None:
            raise AssertionError(f"the child failed: {error}")
        return result

    return outcome


@worker
def forks_among_threads(url: str, forks: str) -> None:
    """Forks while threads write. Parent and children each report what was acknowledged to them."""
    connections.BUSY_TIMEOUT_MS = 1_000  # type: ignore[misc]
    with limpet.sync.open(url) as store:
        stop = threading.Event()
        written = [0] * 4

        def write(index: int) -> None:
            while not stop.is_set():
                store.add(f"thread/{index}")
                written[index] += 1

        threads = [threading.Thread(target=write, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        problems = []
        for number in range(int(forks)):
            time.sleep(0.01)
            prefix = f"child/{number}"

            def work(prefix: str = prefix) -> int:
                store.put(f"{prefix}/kept", prefix)
                return [store.add(f"{prefix}/count") for _ in range(5)][-1]

            try:
                assert in_child(work)() == 5
            except AssertionError as error:
                problems.append(str(error))
        stop.set()
        for thread in threads:
            thread.join()
        say([written, problems])


@worker
def forks_and_closes(url: str) -> None:
    """The parent closes its store while the child still writes through its own."""
    store = limpet.sync.open(url, sweep=False)
    store.put("parent", 1)
    ready, go = os.pipe(), os.pipe()

    def work() -> str:
        store.put("child/before", 1)
        os.write(ready[1], b"!")
        os.read(go[0], 1)
        store.put("child/after", 2)
        return "acknowledged"

    outcome = in_child(work)
    os.read(ready[0], 1)
    store.close()
    os.write(go[1], b"!")
    say(outcome())


@worker
def forks_and_closes_at_once(url: str) -> None:
    """The parent closes its store before the child has had time to do anything at all."""
    store = limpet.sync.open(url, sweep=False)
    store.put("parent", 1)
    engine: Any = store._twin._session.engine
    start = engine.start

    def slow_start() -> None:
        if os.getpid() != parent:
            # Wherever the engine stands in getting ready for the child, its parent is faster.
            os.read(closed[0], 1)
        start()

    parent, closed = os.getpid(), os.pipe()
    engine.start = slow_start

    def work() -> str:
        store.put("child/before", 1)
        os.write(ready[1], b"!")
        os.read(go[0], 1)
        store.put("child/after", 2)
        return "acknowledged"

    ready, go = os.pipe(), os.pipe()
    outcome = in_child(work)
    store.close()
    os.write(closed[1], b"!")
    os.read(ready[0], 1)
    with limpet.sync.open(url, sweep=False) as again:
        again.put("parent", 2)
    os.write(go[1], b"!")
    say(outcome())


@worker
def forks_among_openers(url: str, forks: str) -> None:
    """Forks while threads come, open a connection, read once and go."""
    connections.BUSY_TIMEOUT_MS = 1_000  # type: ignore[misc]
    with limpet.sync.open(url, sweep=False) as store:
        store.put("key", 1)
        stop = threading.Event()

        def visit() -> None:
            while not stop.is_set():
                thread = threading.Thread(target=lambda: store.get("key"))
                thread.start()
                thread.join()

        visitors = [threading.Thread(target=visit) for _ in range(4)]
        for visitor in visitors:
            visitor.start()
        problems = []
        for number in range(int(forks)):
            time.sleep(0.003)

            def work(number: int = number) -> Any:
                signal.alarm(3)
                store.put(f"child/{number}", number)
                return store.get("key")

            try:
                assert in_child(work)() == 1
            except AssertionError as error:
                problems.append(str(error))
        stop.set()
        for visitor in visitors:
            visitor.join()
        say(problems)


@worker
def forks_at_a_bad_moment(url: str, what: str) -> None:
    """Forks while another thread is in the middle of something, which it can never finish in the child."""
    connections.BUSY_TIMEOUT_MS = 300  # type: ignore[misc]
    store = limpet.sync.open(url, sweep=False)
    store.put("parent", 1)
    engine: Any = store._twin._session.engine
    within, go_on = threading.Event(), threading.Event()

    def hold_wakeup() -> None:
        with engine._wakeup._lock:
            within.set()
            go_on.wait()

    def hold_transaction() -> None:
        begin = engine._writer.begin

        def begin_and_wait() -> Any:
            writer = begin()
            within.set()
            go_on.wait(1.0)
            return writer

        engine._writer.begin = begin_and_wait
        try:
            store.put("parent", 2)
        finally:
            del engine._writer.begin

    thread = threading.Thread(target={"wakeup": hold_wakeup, "transaction": hold_transaction}[what])
    thread.start()
    within.wait()

    def work() -> Any:
        signal.alarm(5)
        store.put("child", 1)
        return store.get("child")

    # A fork may wait for the transaction to end, so another thread must end it.
    outcome = in_child(work)
    go_on.set()
    thread.join()
    say(outcome())
    store.close()


@worker
def forks_after_the_clock_was_set_back(url: str) -> None:
    """Reports the time in the child of a process that has seen a later time than its clock's."""
    with limpet.sync.open(url, sweep=False, clock=limpet.ManualClock(2_000)) as store:
        store.put("key", 1)
    with limpet.sync.open(url, sweep=False, clock=limpet.ManualClock(1_000)) as store:
        here = store.status().now_ms
        say([here, in_child(lambda: store.status().now_ms)()])


@worker
def forks_a_memory(_: str) -> None:
    """The child of a fork gets a copy of a memory, whole, and goes its own way."""
    store = limpet.sync.open("memory:shared", sweep=False)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            store.batch().add("left").add("right").commit()

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()

    def work() -> list[Any]:
        signal.alarm(10)
        here = [store.get("left"), store.get("right")]
        return [*here, store.add("left", 1_000_000), [entry.key for entry in store.scan()]]

    replies = []
    for _number in range(20):
        time.sleep(0.002)
        replies.append(in_child(work)())
    stop.set()
    for thread in threads:
        thread.join()
    say([replies, store.get("left"), store.get("right")])
    store.close()


def main() -> None:
    name, *args = sys.argv[1:]
    WORKERS[name](*args)


if __name__ == "__main__":
    main()
