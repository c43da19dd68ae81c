"""Several processes on one file: nothing lost, nothing twice, one winner, and all see it."""

from __future__ import annotations

import os
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

import limpet
import limpet.sync
from tests.processes import PATIENCE_S
from tests.sqlite.support import Process, together

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_that_add_at_once_lose_nothing(url: str, processes: int) -> None:
    """Concurrent adds all count."""
    with ExitStack() as stack:
        adders = [stack.enter_context(Process("adds", url, 200)) for _ in range(processes)]
        assert [adder.receive() for adder in adders] == ["ready"] * processes

        together(adders)
        answers = [adder.receive() for adder in adders]

    # Each add answered with its own value, so no two were counted as one.
    assert sorted(value for answer in answers for value in answer) == [*range(1, 200 * processes + 1)]
    assert all(answer == sorted(answer) for answer in answers)
    with limpet.sync.open(url) as store:
        entry = store.entry("hits")
        assert entry is not None
        assert (entry.value, entry.version) == (200 * processes, 200 * processes)


@pytest.mark.parametrize("writers", [1, 3])
def test_a_watch_in_another_process_sees_everything_in_order(url: str, writers: int) -> None:
    """Writes through one store wake the watchers of another.

    Two watchers in two processes, and up to three processes that write: each watch delivers every change once, in
    the order of revisions, exactly as they were acknowledged to the writers.
    """
    count = 60
    with ExitStack() as stack:
        # Of three writes, one makes one change and two make two; the first deletes come one write late.
        total = writers * (count // 3) * 5
        watchers = [stack.enter_context(Process("watches", url, total)) for _ in range(2)]
        assert [watcher.receive() for watcher in watchers] == ["ready"] * 2
        processes = [stack.enter_context(Process("writes", url, f"w{index}", count)) for index in range(writers)]
        assert [process.receive() for process in processes] == ["ready"] * writers

        together(processes)
        acknowledged = [change for process in processes for change in process.receive()]
        watched = [watcher.receive() for watcher in watchers]

    revisions = [revision for revision, _, _ in acknowledged]
    assert len(set(revisions)) == len(revisions) == total
    assert watched == [sorted(acknowledged), sorted(acknowledged)]


async def test_a_watch_is_woken_by_another_process(url: str) -> None:
    """A wait ends early when a change arrives, from this process or another.

    The wait would last half a minute; the test's own patience is shorter.
    """
    async with limpet.open(url) as store:
        engine = store._session.engine
        before = (await store.status()).revision
        with Process("adds", url, 1) as adder:
            adder.receive()
            together([adder])
            feed = await engine.changes("default", before, wait_s=30.0)

    assert [(change.op, change.key) for change in feed.changes] == [("put", "hits")]


@pytest.mark.parametrize("processes", [2, 4])
def test_a_swap_has_one_winner_among_processes(url: str, processes: int) -> None:
    """Of all callers that swap the same field at once, one wins."""
    rounds = 25
    with ExitStack() as stack:
        store = stack.enter_context(limpet.sync.open(url))
        record = store.record("state")
        record.put({"round": 0})
        players = [stack.enter_context(Process("swaps", url, rounds)) for _ in range(processes)]
        assert [player.receive() for player in players] == ["ready"] * processes

        for number in range(rounds):
            together(players)
            won = [player.receive() for player in players]

            assert sum(won) == 1
            assert record.fields() == {"round": number + 1, "winner": players[won.index(True)].pid}

        entry = record.entry()
        assert entry is not None
        assert entry.version == rounds + 1


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_may_create_the_file_at_the_same_moment(tmp_path: Path, processes: int) -> None:
    """Two stores opened on the same storage see each other's writes.

    Making the tables and switching to WAL are two moments at which processes meet on a file that none has
    prepared yet. All of them must come through, on the same store.
    """
    rounds = 40
    with ExitStack() as stack:
        openers = [stack.enter_context(Process("opens", tmp_path, rounds)) for _ in range(processes)]
        assert [opener.receive() for opener in openers] == ["ready"] * processes

        for number in range(rounds):
            together(openers)
            answers = [opener.receive() for opener in openers]

            assert [problem for _, problem in answers] == [None] * processes
            assert len({store_id for store_id, _ in answers}) == 1
            with limpet.sync.open(f"sqlite:///{tmp_path}/{number}.db", sweep=False) as store:
                assert store.get("hits") == processes


def test_a_lock_keeps_processes_apart(url: str) -> None:
    """With `wait`, acquiring waits for the release.

    Between them they count by reading and writing, which without a lock would lose steps.
    """
    with ExitStack() as stack:
        takers = [stack.enter_context(Process("locks", url, 10)) for _ in range(3)]
        assert [taker.receive() for taker in takers] == ["ready"] * 3

        together(takers)
        tokens = [taker.receive() for taker in takers]

    # Acquiring gives a token that is greater than every earlier one on that name.
    assert Counter(token for own in tokens for token in own).most_common(1)[0][1] == 1
    assert all(own == sorted(own) for own in tokens)
    with limpet.sync.open(url) as store:
        assert store.get("guarded") == 30
        assert store.locks() == []


def test_a_lock_of_another_process_is_respected(url: str) -> None:
    """A lock that is held raises LockHeld, with its holder, token and remaining time."""
    with limpet.sync.open(url) as store, Process("holds", url, 60) as holder:
        token = holder.receive()

        with Process("tries_to_lock", url) as other:
            held_by, held_token = other.receive()

        assert held_by.endswith(f":{holder.pid}")
        assert held_token == token
        assert [info.token for info in store.locks()] == [token]
        holder.kill()


def test_the_lock_of_a_killed_process_is_taken_over(url: str) -> None:
    """With `wait`, acquiring takes over when the holder's lease is over.

    The holder is killed and can neither release nor renew.
    """
    with limpet.sync.open(url) as store:
        with Process("holds", url, 0.4) as holder:
            first = holder.receive()
            holder.kill()

        lock = store.lock("door", ttl=10, wait=15)
        lock.acquire()

        assert lock.token is not None
        assert lock.token > first
        with pytest.raises(limpet.errors.LockLost):
            store.put("guarded", 1, fence=limpet.Fence("door", first))


def test_two_stores_of_one_process_are_safe_from_the_end_of_another_process(url: str) -> None:
    """An acknowledged write is there when durable storage is opened again.

    SQLite's locks on a file belong to the process, and the system drops all of them when the process closes any
    descriptor of that file. If opening a second store did that, the next process to end would take itself for the
    last one, and would remove the WAL in which the first store goes on writing.
    """
    first, second = limpet.sync.open(url, sweep=False), limpet.sync.open(url, sweep=False)
    try:
        first.put("before", 1)
        with Process("visits", url, "before") as visitor:
            assert visitor.receive() == [1]

        first.put("first", 2)
        second.put("second", 3)

        # Seen from outside, while we are still open: nothing waits for our good manners at the end.
        with Process("visits", url, "before", "first", "second") as visitor:
            assert visitor.receive() == [1, 2, 3]
        assert [first.get("second"), second.get("first")] == [3, 2]
    finally:
        first.close()
        second.close()


def test_a_store_opened_while_another_makes_the_file_is_safe(
    url: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An acknowledged write is there when durable storage is opened again.

    One thread has just made the file and is about to close its descriptor, when another opens a store on it.
    That must not cost the other its locks.
    """
    opened: list[limpet.sync.Store] = []
    close = os.close

    def slow_close(descriptor: int) -> None:
        if not opened and path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
            opening = threading.Thread(target=lambda: opened.append(limpet.sync.open(url, sweep=False)))
            opening.start()
            opening.join(PATIENCE_S)
        close(descriptor)

    monkeypatch.setattr(os, "close", slow_close)
    limpet.sync.open(url, sweep=False).close()
    monkeypatch.undo()
    with opened.pop() if opened else limpet.sync.open(url, sweep=False) as other:
        other.put("before", 1)
        with Process("visits", url, "before") as visitor:
            assert visitor.receive() == [1]

        other.put("after", 2)

        with Process("visits", url, "before", "after") as visitor:
            assert visitor.receive() == [1, 2]


def test_closing_one_of_two_stores_leaves_the_other_safe(url: str) -> None:
    """An acknowledged write is there when durable storage is opened again."""
    with limpet.sync.open(url, sweep=False) as first:
        limpet.sync.open(url, sweep=False).close()
        with Process("visits", url, "first") as visitor:
            assert visitor.receive() == [None]

        first.put("first", 1)

        with Process("visits", url, "first") as visitor:
            assert visitor.receive() == [1]


def test_closing_a_store_under_its_readers_harms_none_of_them(url: str) -> None:
    """A closed store raises Closed from every verb, and closing twice is allowed.

    Threads are in the middle of reading, or of opening a connection, when the store is closed beneath them.
    """
    with Process("closes_under_readers", url, 150) as process:
        assert [process.receive() for _ in range(150)] == [[]] * 150


def test_a_worker_is_another_process(url: str) -> None:
    """The tests above would prove little if their workers ran here."""
    with Process("adds", url, 0) as process:
        assert process.receive() == "ready"
        assert process.pid != os.getpid()
        together([process])
        assert process.receive() == []
