"""The order of requests, without a server: who may begin, and who waits for whom."""

from __future__ import annotations

import itertools
import random

from limpet.server.key_queue import Order, Place


def read(*keys: str, namespace: str = "a") -> Place:
    return Place(namespace, keys, writes=False)


def write(*keys: str, namespace: str = "a") -> Place:
    return Place(namespace, keys, writes=True)


def everything(namespace: str = "a") -> Place:
    return Place(namespace, (), writes=False, after_writes=True)


def test_a_request_with_nothing_ahead_begins_at_once() -> None:
    order = Order()

    assert order.enter(read("k"))
    assert order.enter(write("other"))


def test_reads_of_one_key_run_side_by_side() -> None:
    order = Order()

    assert [order.enter(read("k")) for _ in range(5)] == [True] * 5


def test_a_write_waits_for_every_read_before_it() -> None:
    order = Order()
    first, second, third = read("k"), read("k"), write("k")
    assert (order.enter(first), order.enter(second), order.enter(third)) == (True, True, False)

    assert order.leave(first) == []
    assert order.leave(second) == [third]


def test_reads_wait_for_the_write_before_them_and_then_run_together() -> None:
    order = Order()
    first, second, third = write("k"), read("k"), read("k")
    assert (order.enter(first), order.enter(second), order.enter(third)) == (True, False, False)

    assert order.leave(first) == [second, third]


def test_writes_of_one_key_follow_each_other() -> None:
    order = Order()
    places = [write("k") for _ in range(4)]
    assert [order.enter(place) for place in places] == [True, False, False, False]

    for place, following in itertools.pairwise(places):
        assert order.leave(place) == [following]
    assert order.leave(places[-1]) == []


def test_a_batch_waits_for_each_of_its_keys() -> None:
    order = Order()
    first, second, batch = write("k"), write("l"), write("k", "l")
    order.enter(first)
    order.enter(second)
    assert not order.enter(batch)

    assert order.leave(second) == []
    assert order.leave(first) == [batch]


def test_a_list_waits_for_the_writes_of_its_namespace_and_for_nothing_else() -> None:
    order = Order()
    first, foreign, listing, later = write("k"), write("k", namespace="b"), everything(), write("m")
    order.enter(first)
    order.enter(foreign)
    assert not order.enter(listing)
    assert order.enter(later)

    assert order.leave(first) == [listing]


def test_keys_of_different_namespaces_never_meet() -> None:
    order = Order()

    assert [order.enter(write("k", namespace=name)) for name in "abc"] == [True] * 3


def test_nothing_is_left_behind_and_conflicting_requests_never_run_together() -> None:
    """A thousand requests at random: each begins after those it must wait for, and the books end empty."""
    dice = random.Random(7)
    order = Order()
    running: list[Place] = []
    begun: list[Place] = []
    for _ in range(1000):
        keys = dice.sample("abcdef", dice.randint(1, 3))
        place = dice.choice([read, write])(*keys, namespace=dice.choice("xy"))
        if order.enter(place):
            running.append(place)
            begun.append(place)
        while running and dice.random() < 0.5:
            done = running.pop(dice.randrange(len(running)))
            ready = order.leave(done)
            running += ready
            begun += ready
        for one in running:
            for other in running:
                meets = one is not other and one.namespace == other.namespace and {*one.keys} & {*other.keys}
                assert not meets or not (one.writes or other.writes)
    while running:
        ready = order.leave(running.pop())
        running += ready
        begun += ready

    assert len(begun) == 1000
    assert len(order) == 0
    assert order._writes == {}
