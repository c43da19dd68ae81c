"""The order of requests, without a server: which may start, and which wait for which."""

from __future__ import annotations

import itertools
import random

from limpet.server.key_queue import KeyQueue, Slot


def read(*keys: str, namespace: str = "a") -> Slot:
    return Slot(namespace, keys, writes=False)


def write(*keys: str, namespace: str = "a") -> Slot:
    return Slot(namespace, keys, writes=True)


def everything(namespace: str = "a") -> Slot:
    return Slot(namespace, (), writes=False, after_writes=True)


def test_a_request_with_nothing_ahead_begins_at_once() -> None:
    queue = KeyQueue()

    assert queue.enter(read("k"))
    assert queue.enter(write("other"))


def test_reads_of_one_key_run_side_by_side() -> None:
    queue = KeyQueue()

    assert [queue.enter(read("k")) for _ in range(5)] == [True] * 5


def test_a_write_waits_for_every_read_before_it() -> None:
    queue = KeyQueue()
    first, second, third = read("k"), read("k"), write("k")
    assert (queue.enter(first), queue.enter(second), queue.enter(third)) == (True, True, False)

    assert queue.leave(first) == []
    assert queue.leave(second) == [third]


def test_reads_wait_for_the_write_before_them_and_then_run_together() -> None:
    queue = KeyQueue()
    first, second, third = write("k"), read("k"), read("k")
    assert (queue.enter(first), queue.enter(second), queue.enter(third)) == (True, False, False)

    assert queue.leave(first) == [second, third]


def test_writes_of_one_key_follow_each_other() -> None:
    queue = KeyQueue()
    slots = [write("k") for _ in range(4)]
    assert [queue.enter(slot) for slot in slots] == [True, False, False, False]

    for slot, following in itertools.pairwise(slots):
        assert queue.leave(slot) == [following]
    assert queue.leave(slots[-1]) == []


def test_a_batch_waits_for_each_of_its_keys() -> None:
    queue = KeyQueue()
    first, second, batch = write("k"), write("l"), write("k", "l")
    queue.enter(first)
    queue.enter(second)
    assert not queue.enter(batch)

    assert queue.leave(second) == []
    assert queue.leave(first) == [batch]


def test_a_list_waits_for_the_writes_of_its_namespace_and_for_nothing_else() -> None:
    queue = KeyQueue()
    first, foreign, listing, later = write("k"), write("k", namespace="b"), everything(), write("m")
    queue.enter(first)
    queue.enter(foreign)
    assert not queue.enter(listing)
    assert queue.enter(later)

    assert queue.leave(first) == [listing]


def test_keys_of_different_namespaces_never_meet() -> None:
    queue = KeyQueue()

    assert [queue.enter(write("k", namespace=name)) for name in "abc"] == [True] * 3


def test_nothing_is_left_behind_and_conflicting_requests_never_run_together() -> None:
    """A thousand requests at random: each begins after those it must wait for, and the queue ends empty."""
    dice = random.Random(7)
    queue = KeyQueue()
    running: list[Slot] = []
    begun: list[Slot] = []
    for _ in range(1000):
        keys = dice.sample("abcdef", dice.randint(1, 3))
        slot = dice.choice([read, write])(*keys, namespace=dice.choice("xy"))
        if queue.enter(slot):
            running.append(slot)
            begun.append(slot)
        while running and dice.random() < 0.5:
            done = running.pop(dice.randrange(len(running)))
            ready = queue.leave(done)
            running += ready
            begun += ready
        for one in running:
            for other in running:
                meets = one is not other and one.namespace == other.namespace and {*one.keys} & {*other.keys}
                assert not meets or not (one.writes or other.writes)
    while running:
        ready = queue.leave(running.pop())
        running += ready
        begun += ready

    assert len(begun) == 1000
    assert len(queue) == 0
    assert queue._writes == {}
