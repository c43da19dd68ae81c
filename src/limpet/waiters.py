"""The callers that wait for changes of a namespace, found by the keys that they wait for.

Callers that wait for the same keys are one group. A change makes those groups due whose keys it concerns, and takes
no time for the others, however many they are. The callers of due groups are woken in slices, one in each turn of the
event loop, so that ten thousand of them do not block it.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final, Literal, NamedTuple

from limpet.clock import wake
from limpet.keys import Span, shared_prefix
from limpet.model import Change, Family

__all__ = ["Point", "Topic", "Waiter", "Waiters", "topic_of"]

EVENTS_PER_TURN: Final = 250
"""How many events the callers that are woken in one turn of the loop may have to deliver, unless one has more."""

Topic = tuple[Family, Literal["key", "prefix"], str]
"""What a caller waits for: changes of one key of a family, or of all keys with a prefix."""


def topic_of(span: Span, family: Family = "data") -> Topic:
    """Make the topic of a span. It may contain more keys, so that a caller may be woken for nothing."""
    if span.stop == span.start + "\0":
        return family, "key", span.start
    return family, "prefix", shared_prefix(span)


class Point(NamedTuple):
    """A point in the log: a revision, and the fingerprint of the change there or of the last one before it."""

    revision: int
    fingerprint: str


class Waiter:
    """One caller that waits until its keys have changed."""

    __slots__ = ("_group", "future")

    def __init__(self, group: _Group) -> None:
        self._group = group
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def due_after(self) -> Point | None:
        """The point before the change that this caller waits for; None while there is no such change.

        It is known before the caller is woken.
        """
        return self._group.due_after


class Waiters:
    """All callers that wait for changes of one namespace, on one event loop."""

    def __init__(self) -> None:
        self._groups: dict[Topic, _Group] = {}
        self._prefix_lengths: Counter[int] = Counter()
        self._due: deque[_Due] = deque()
        self._changes = 0
        self._next_turn: asyncio.Handle | None = None

    def add(self, topic: Topic) -> Waiter:
        """Add a caller that waits for the next change."""
        group = self._groups.get(topic)
        if group is None:
            group = self._groups[topic] = _Group(topic)
            if topic[1] == "prefix":
                self._prefix_lengths[len(topic[2])] += 1
        waiter = Waiter(group)
        group.waiting[waiter] = None
        return waiter

    def remove(self, waiter: Waiter) -> None:
        """Remove a caller, whether it was woken or not."""
        group = waiter._group
        group.waiting.pop(waiter, None)
        if group.due_after is None and not group.waiting:
            self._remove_group(group)

    def notify(self, changes: Sequence[Change], after: Point) -> None:
        """Wake the callers that wait for these changes, all of which are after that point."""
        self._changes += len(changes)
        events = Counter(group for change in changes for group in self._find(change))
        for group, count in events.items():
            self._make_due(group, after, count)
        self._wake_soon()

    def notify_all(self, after: Point) -> None:
        """Wake all callers, so that they check what has happened."""
        for group in [*self._groups.values()]:
            self._make_due(group, after, 1)
        self._wake_soon()

    def _find(self, change: Change) -> Iterator[_Group]:
        """Find the groups that wait for a change."""
        groups, family, key = self._groups, change.family, change.entry.key
        found = groups.get((family, "key", key))
        if found is not None:
            yield found
        for length in self._prefix_lengths:
            if length <= len(key) and (found := groups.get((family, "prefix", key[:length]))) is not None:
                yield found

    def _make_due(self, group: _Group, after: Point, events: int) -> None:
        # From here on it is no longer found, so a caller that waits again joins a new group.
        group.due_after = after
        self._remove_group(group)
        self._due.append(_Due(iter([*group.waiting]), events - self._changes))

    def _remove_group(self, group: _Group) -> None:
        del self._groups[group.topic]
        _, kind, text = group.topic
        if kind == "prefix":
            self._prefix_lengths[len(text)] -= 1
            if not self._prefix_lengths[len(text)]:
                del self._prefix_lengths[len(text)]

    def _wake_soon(self) -> None:
        if self._due and self._next_turn is None:
            self._wake_slice()

    def _wake_slice(self) -> None:
        """Wake as many callers as one turn of the loop can bear, and the others from the next turn on."""
        self._next_turn = None
        events_left = EVENTS_PER_TURN
        while self._due and events_left > 0:
            waiters, events = self._due[0]
            # Each of them also gets what has come since its group became due, as far as it concerns its keys.
            events += self._changes
            for waiter in islice(waiters, math.ceil(events_left / events)):
                wake(waiter.future)
                events_left -= events
            if events_left > 0:
                self._due.popleft()
        if self._due:
            self._next_turn = asyncio.get_running_loop().call_soon(self._wake_slice)


class _Group:
    """Callers that wait for changes of the same keys.

    Attributes:
        waiting: The callers, in the order in which they came.
        due_after: See `Waiter.due_after`.
    """

    __slots__ = ("due_after", "topic", "waiting")

    def __init__(self, topic: Topic) -> None:
        self.topic = topic
        self.waiting: dict[Waiter, None] = {}
        self.due_after: Point | None = None


class _Due(NamedTuple):
    """Callers of a group that is due.

    Attributes:
        waiters: Those that are still to be woken.
        events: How many events each of them has to deliver, less the number of all changes up to then.
    """

    waiters: Iterator[Waiter]
    events: int
