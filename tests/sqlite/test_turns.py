"""Writers of one file take turns, and none of them depends on another's being well."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import limpet
import limpet.sync
from limpet.engines.sqlite import connections, turns
from limpet.engines.sqlite.turns import NextWriter
from limpet.errors import Unavailable
from tests.processes import PATIENCE_S
from tests.sqlite.cache_support import disable_cache, engine_of
from tests.sqlite.support import Process, together, until

PROCESSES = 4


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Each wait for the place of the next writer in this process: whether it got it."""
    found: list[bool] = []
    take_or_begin = turns._take_or_begin

    def take(*args: Any) -> bool:
        try:
            found.append(take_or_begin(*args))
        except BaseException:
            found.append(False)
            raise
        return found[-1]

    monkeypatch.setattr(turns, "_take_or_begin", take)
    return found


@pytest.fixture
def store(url: str) -> Iterator[limpet.sync.Store]:
    with limpet.sync.open(url, sweep=False) as opened:
        yield opened


def place_of(store: limpet.sync.Store) -> NextWriter:
    place = engine_of(store)._cached.wal.next_writer
    assert isinstance(place, NextWriter)
    return place


def add_together(url: str, total: int) -> list[list[int]]:
    """Have several processes add to one number, as fast as they can. Returns the values that each of them got."""
    with ExitStack() as stack:
        adders = [stack.enter_context(Process("adds_until", url, total)) for _ in range(PROCESSES)]
        assert [adder.receive() for adder in adders] == ["ready"] * PROCESSES
        together(adders)
        return [adder.receive() for adder in adders]


# Turns --------------------------------------------------------------------------


@pytest.mark.slow
def test_processes_that_write_without_a_pause_take_turns(url: str) -> None:
    """A process that has just committed must not begin again and again while the others sleep.

    With SQLite's busy timeout alone, one of four processes made most of the writes and another often none.
    """
    total = 2_000
    answers = add_together(url, total)

    assert sorted(value for answer in answers for value in answer) == [*range(1, total + 1)]
    counts = sorted(map(len, answers))
    assert counts[0] >= counts[-1] / 4, counts


@pytest.mark.slow
def test_a_write_waits_for_few_others(url: str) -> None:
    """No process waits while the others make a large part of all writes."""
    total = 2_000
    for answer in add_together(url, total):
        steps = [after - before for before, after in zip([0, *answer], [*answer, total + 1], strict=True)]
        assert max(steps) < total / 2, max(steps)


def test_a_writer_alone_takes_no_place(store: limpet.sync.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without other writers a commit costs one question to the kernel more, and nothing is waited for."""
    monkeypatch.setattr(NextWriter, "take", lambda _: pytest.fail("it took the place"))

    for number in range(50):
        store.put("key", number)

    assert not place_of(store).is_taken()


def test_a_writer_lets_the_next_one_begin_first(
    url: str, store: limpet.sync.Store, waits: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that comes back finds the place taken, and waits until it is given back."""
    monkeypatch.setattr(turns, "PLACE_S", PATIENCE_S)
    with Process("comes_next", url) as other:
        assert other.receive() is True
        assert place_of(store).is_taken()
        writer = threading.Thread(target=store.put, args=("key", 1))
        writer.start()
        writer.join(0.05)
        assert store.get("key") is None
        other.send("end")
        writer.join(PATIENCE_S)

    assert waits == [True]
    assert store.get("key") == 1
    assert not place_of(store).is_taken()


def test_two_stores_of_one_process_have_one_place(url: str, store: limpet.sync.Store) -> None:
    """They share the descriptor of the shared memory, to which a lock of the kernel belongs."""
    with limpet.sync.open(url, sweep=False) as second:
        assert place_of(store).take()

        assert place_of(second).is_taken()
        assert not place_of(second).take()

        place_of(store).give_back()
        assert not place_of(second).is_taken()
        assert place_of(second).take()
        place_of(second).give_back()


@pytest.mark.parametrize("stores", [1, 2])
def test_threads_of_one_process_take_turns(url: str, stores: int) -> None:
    """SQLite lets two stores of a process write one at a time as well, and gives them no order either."""
    total, threads = 600, 4
    values: list[list[int]] = [[] for _ in range(threads)]
    begin = threading.Barrier(threads)

    def add(index: int, store: limpet.sync.Store) -> None:
        begin.wait(PATIENCE_S)
        while (value := store.add("hits")) <= total:
            values[index].append(value)

    with ExitStack() as stack:
        opened = [stack.enter_context(limpet.sync.open(url, sweep=False)) for _ in range(stores)]
        running = [threading.Thread(target=add, args=(index, opened[index % stores])) for index in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(PATIENCE_S)

    assert sorted(value for each in values for value in each) == [*range(1, total + 1)]
    assert min(map(len, values)) >= total / threads / 5, [len(each) for each in values]


# Processes that are stopped or killed -----------------------------------------------


def test_a_stopped_process_that_comes_next_delays_others_once(
    url: str, store: limpet.sync.Store, waits: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is free. So the others wait for the place for a moment, and do without it for a while."""
    monkeypatch.setattr(turns, "ALONE_S", PATIENCE_S)
    with Process("comes_next", url) as other:
        assert other.receive() is True
        os.kill(other.pid, signal.SIGSTOP)
        try:
            for number in range(5):
                store.put("key", number)
            assert waits == [False]
        finally:
            os.kill(other.pid, signal.SIGCONT)

    assert store.get("key") == 4


def test_a_stopped_process_that_writes_makes_the_file_unavailable(
    url: str, monkeypatch: pytest.MonkeyPatch, waits: list[bool]
) -> None:
    """As it is without turns: the wait for another writer is bounded, and writing goes on afterwards."""
    with limpet.sync.open(url, sweep=False):
        pass
    monkeypatch.setattr(connections, "BUSY_TIMEOUT_MS", 50)
    with limpet.sync.open(url, sweep=False) as store, Process("writes_without_end", url) as other:
        assert other.receive() == "begun"
        os.kill(other.pid, signal.SIGSTOP)
        try:
            with pytest.raises(Unavailable, match=r"state\.db.*locked"):
                store.put("key", 1)
        finally:
            os.kill(other.pid, signal.SIGCONT)
        # In each of five attempts this process was the next writer, and it has given the place back.
        assert len(waits) == 5
        assert not place_of(store).is_taken()
        other.kill()

        assert store.put("key", 2).version == 1
        assert store.status().epoch != 99


@pytest.mark.parametrize("work", ["comes_next", "writes_without_end"])
def test_a_killed_process_leaves_no_lock(url: str, store: limpet.sync.Store, waits: list[bool], work: str) -> None:
    """The kernel releases the locks of a process that ends."""
    with Process(work, url) as other:
        assert other.receive() in (True, "begun")
        other.kill()

        until(lambda: not place_of(store).is_taken())
        for number in range(5):
            store.put("key", number)

    assert waits == []
    assert store.get("key") == 4


# Where there is no place ----------------------------------------------------------


@pytest.fixture(params=["no shared memory", "no such locks", "no locks on this disk"])
def without_place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it impossible to agree on who comes next, in one of several ways."""
    call = fcntl.fcntl

    def refused(descriptor: int, command: int, *more: Any) -> Any:
        if command in (fcntl.F_OFD_GETLK, fcntl.F_OFD_SETLK):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        return call(descriptor, command, *more)

    match request.param:
        case "no shared memory":
            disable_cache(monkeypatch.setattr)
        case "no such locks":
            monkeypatch.delattr(fcntl, "F_OFD_GETLK")
        case _:
            monkeypatch.setattr(fcntl, "fcntl", refused)


@pytest.mark.usefixtures("without_place")
def test_without_a_place_writers_wait_for_each_other_all_the_same(url: str, waits: list[bool]) -> None:
    """Nothing but the order of writers depends on it."""
    with limpet.sync.open(url, sweep=False) as store, Process("adds", url, 50) as other:
        wal = engine_of(store)._cached.wal
        assert wal is None or wal.next_writer is None
        assert other.receive() == "ready"
        together([other])
        mine = [store.add("hits") for _ in range(50)]
        assert sorted([*mine, *other.receive()]) == [*range(1, 101)]

    assert waits == []


def test_the_place_is_no_file(path: Path, store: limpet.sync.Store) -> None:
    """Nothing more stands beside the file, to be copied, restored or removed with it."""
    assert place_of(store).take()
    store.get("key")
    place_of(store).give_back()

    assert {file.name for file in path.parent.iterdir()} == {"state.db", "state.db-wal", "state.db-shm"}
