"""What a process remembers of the entries that it has seen, to plan on."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec

from limpet.commit.committer import NAMESPACES_MAX, Committer
from limpet.commit.contention import Contention
from limpet.commit.group import EntryId
from limpet.commit.known import BYTES_MAX, KnownEntries
from limpet.model import Batch, Commit, Entry, Guard, Put, Revision


def test_what_is_known_of_namespaces_has_a_bound() -> None:
    """A server with a namespace for each of its users must not grow with all that it has ever seen."""
    storage: Any = None
    committer = Committer(storage, "a store")

    known = [committer.known(f"user-{number}") for number in range(NAMESPACES_MAX + 10)]

    assert len(committer._known) == NAMESPACES_MAX
    assert committer.known(f"user-{NAMESPACES_MAX + 9}") is known[-1]
    assert committer.known("user-0") is not known[0]


A: Final[EntryId] = ("data", "a")
B: Final[EntryId] = ("data", "b")


async def test_a_plan_waits_for_requests_that_name_one_of_its_entries_and_for_no_others() -> None:
    known = KnownEntries()
    await known.reserve({A})
    await asyncio.wait_for(known.reserve({B}), 1)

    waiting = asyncio.create_task(known.reserve({A, B}))
    await asyncio.sleep(0)
    known.release({B})
    await asyncio.sleep(0)
    assert not waiting.done()

    known.release({A})
    await asyncio.wait_for(waiting, 1)


async def test_a_plan_that_no_longer_waits_keeps_no_other_from_its_entries() -> None:
    known = KnownEntries()
    await known.reserve({A})
    gone, waiting = (asyncio.create_task(known.reserve({A})) for _ in range(2))
    await asyncio.sleep(0)

    gone.cancel()
    known.release({A})

    await asyncio.wait_for(waiting, 1)


async def test_a_large_value_is_not_remembered_but_its_weight_is() -> None:
    known, large = KnownEntries(), b'"' + b"x" * BYTES_MAX + b'"'
    batch = Batch((), (Put("a", large),))

    known.learn(batch, Commit(1, (Entry("a", large, 1, 1, 1, 0, 0),), (None,), 0))

    head = known.find(A)
    assert head.entry is not None
    assert head.entry.stored is None
    assert head.weight_bytes == len("a") + len(large)


def make_contended() -> Contention:
    """What a process knows that has lost an entry to another, and has written it since."""
    known, put = KnownEntries(), Batch((), (Put("a", b"1"),))
    known.learn(put, Commit(3, (Entry("a", b"1", 1, 3, 3, 0, 0),), (None,), 0))
    known.note_left_out(msgspec.structs.replace(put, guards=(Guard("a", Revision(3)),)))
    known.learn(put, Commit(5, (Entry("a", b"1", 2, 5, 1, 0, 0),), (None,), 0))
    return known.contention


def test_who_has_won_a_contended_entry_is_told_once() -> None:
    contention, guarded = make_contended(), Batch((Guard("a", Revision(5)),), (Put("a", b"2"),))

    assert not make_contended().has_won([Batch((), (Put("a", b"2"),))])
    assert not make_contended().has_won([Batch((Guard("b", Revision(5)),), (Put("b", b"2"),))])
    assert contention.has_won([guarded])
    assert not contention.has_won([guarded])


def test_who_reads_a_contended_entry_is_not_the_first_to_know_it() -> None:
    """An update reads before each write. If it paused as well, what it has read would be old."""
    contention = make_contended()

    contention.note_read("data", ["a"])

    assert not contention.has_won([Batch((Guard("a", Revision(5)),), (Put("a", b"2"),))])
