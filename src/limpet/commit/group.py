"""Batches that are committed together: each is planned on what those before it leave, and each has its own outcome.

An engine loads entries and stores what a `GroupPlan` collects. Everything in between is here, once for all engines: the
earlier result of a retry, superseded requests, receipts, counters, and a batch that fails without failing another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final, get_args

import msgspec

from limpet.commit.receipts import make_mark, may_be_superseded, superseded_error
from limpet.errors import InvalidValue, LimpetError
from limpet.model import Add, Batch, Change, Commit, Entry, Guard, Patch, Put, Refusal, StoredFamily, Write, live
from limpet.request_ids import request_group
from limpet.transition import find_plain_write, plan, plan_write, recall

__all__ = [
    "Counters",
    "EntryId",
    "FindChanges",
    "GroupPlan",
    "Load",
    "NotApplied",
    "commit_error",
    "is_fault_of_one",
]

EntryId = tuple[StoredFamily, str]
"""The family and the key of an entry."""

Load = Callable[[StoredFamily, str], Entry | None]
"""Reads the map: the entry stored under a key of a family, expired or not."""

FindChanges = Callable[[int, str], Iterable[Change]]
"""Reads the log: the changes after a revision that have this origin."""


class Counters(msgspec.Struct, gc=False):
    """The counters of a namespace, while a group changes them.

    Attributes:
        revision: The latest revision.
        at_ms: The time of the latest commit.
        keys: Entries of the data.
        size_bytes: Their keys and values together.
        log_changes: Changes in the log.
        log_bytes: Their keys and values together.
    """

    revision: int = 0
    at_ms: int = 0
    keys: int = 0
    size_bytes: int = 0
    log_changes: int = 0
    log_bytes: int = 0

    def count(self, change: Change, before_bytes: int | None, change_bytes: int) -> None:
        """Count a change: the weight of the entry that it found, None for an absent one, and its own weight."""
        self.revision = change.revision
        self.log_changes += 1
        self.log_bytes += change_bytes
        if change.family != "data":
            return
        has_ended = change.op in ("delete", "expire")
        if before_bytes is not None:
            self.size_bytes += -before_bytes if has_ended else change_bytes - before_bytes
            self.keys -= has_ended
        elif not has_ended:
            self.size_bytes += change_bytes
            self.keys += 1


_NOTHING: Final[Mapping[EntryId, Entry]] = MappingProxyType({})


class GroupPlan:
    """What the batches of a group do to one namespace, collected to be stored at once.

    Attributes:
        counters: The counters as the group leaves them.
        entries: The entries that batches have read or written, as the last of them leaves each.
        changes: The changes, in the order of their revisions, each with its weight: the size of its key and value.
        kept: Receipts and marks of superseded requests, which leave no change in the log.
        weights: The weights of entries, where they are known: always of an entry that was loaded without its value.
    """

    __slots__ = ("_find_changes", "_load", "_now_ms", "changes", "counters", "entries", "kept", "weights")

    def __init__(self, load: Load, find_changes: FindChanges, counters: Counters, now_ms: int) -> None:
        """Begin with a namespace that stays as it is meanwhile."""
        self._load = load
        self._find_changes = find_changes
        self._now_ms = now_ms
        self.counters = counters
        self.entries: dict[EntryId, Entry | None] = {}
        self.changes: list[tuple[Change, int]] = []
        # Replaced by a dictionary of its own when there is something to keep, which is rare.
        self.kept: Mapping[EntryId, Entry] = _NOTHING
        self.weights: dict[EntryId, int] = {}

    def find(self, family: StoredFamily, key: str) -> Entry | None:
        """The entry as the batches so far leave it."""
        entry_id = (family, key)
        entries = self.entries
        if entry_id in entries:
            return entries[entry_id]
        found = entries[entry_id] = self._load(family, key)
        return found

    def add(self, batch: Batch, cause: str | None) -> Commit | Refusal | LimpetError:
        """Decide what a batch does, and add that to what the group does.

        ``cause`` is the request id that the changes get in the log.
        """
        now_ms = self._now_ms
        write = find_plain_write(batch)
        if write is not None:
            current = self.find(write.family, write.key)
            if current is None or current.expires_ms is None:
                return self._add_write(write, current, batch.value_bytes_max, cause)
        if batch.request_id is not None:
            earlier = self._check_request(batch, batch.request_id)
            if earlier is not None:
                return earlier
        outcome = plan(batch, self.find, now_ms=now_ms, revision=self.counters.revision, cause=cause)
        if isinstance(outcome, Refusal):
            return outcome
        # Weigh all before the first is applied: if one cannot be weighed, the batch fails and leaves nothing here.
        weights = [self._weigh_change(change) for change in outcome.changes]
        for change, weight_bytes in zip(outcome.changes, weights, strict=True):
            self._apply(change, weight_bytes)
        if outcome.receipt is not None:
            self._keep("receipt", outcome.receipt)
        self.counters.at_ms = now_ms
        return outcome.commit

    def _check_request(self, batch: Batch, request_id: str) -> Commit | LimpetError | None:
        """What became of a request that was sent before: its earlier result, or the error of a superseded one."""
        if batch.retry_since is not None:
            # Another retry of it may be in this group, and not in the log yet.
            origin = batch.origin or request_id
            together = [change for change, _ in self.changes if change.origin == origin]
            earlier = recall(batch, [*self._find_changes(batch.retry_since, origin), *together], self.find)
            if earlier is None:
                self._keep("superseded", make_mark(request_id, self._now_ms))
            return earlier
        if may_be_superseded(batch) and live(self.find("superseded", request_group(request_id)), self._now_ms):
            return superseded_error()
        return None

    def _add_write(
        self, write: Put | Add | Patch, current: Entry | None, bytes_max: int, cause: str | None
    ) -> Commit | Refusal:
        """Add one write without a guard: the most frequent batch, and the shortest way through the rules."""
        counters = self.counters
        planned = plan_write(write, current, bytes_max, self._now_ms, counters.revision + 1, cause)
        if isinstance(planned, Refusal):
            return planned
        (change,) = planned.changes
        self._apply(change, change.entry.weight_bytes)
        counters.at_ms = self._now_ms
        return planned.commit

    def _apply(self, change: Change, weight_bytes: int) -> None:
        entry_id: EntryId = (change.family, change.entry.key)
        before = self.entries[entry_id]
        before_bytes = None if before is None or change.family != "data" else self._weigh(entry_id, before)
        self.counters.count(change, before_bytes, weight_bytes)
        self.entries[entry_id] = change.after
        self.weights[entry_id] = weight_bytes
        self.changes.append((change, weight_bytes))

    def _weigh_change(self, change: Change) -> int:
        entry = change.entry
        return self._weigh((change.family, entry.key), entry) if change.op == "touch" else entry.weight_bytes

    def _weigh(self, entry_id: EntryId, entry: Entry) -> int:
        weight_bytes = self.weights.get(entry_id)
        return entry.weight_bytes if weight_bytes is None else weight_bytes

    def _keep(self, family: StoredFamily, entry: Entry) -> None:
        self.entries[family, entry.key] = entry
        self.kept = {**self.kept, (family, entry.key): entry}


# A batch that fails --------------------------------------------------------------


class NotApplied(Exception):
    """Nothing of a group of batches was applied, and one of them may be the reason: commit each by itself.

    Attributes:
        meaning: The error of a batch that fails also when it is committed by itself.
    """

    def __init__(self, meaning: Exception) -> None:
        super().__init__(type(meaning).__name__)
        self.meaning = meaning


def is_fault_of_one(error: Exception) -> bool:
    """Whether the error of a group, of which nothing was applied, may be the fault of one batch in it.

    A `LimpetError` concerns all of them: the engine cannot be reached, is closed, or refuses the caller.
    """
    return not isinstance(error, LimpetError)


def commit_error(batch: Batch, error: Exception) -> LimpetError:
    """Make the error for the caller of a batch that failed also when it was committed by itself.

    A draft never makes a batch that an engine cannot encode, so the batch was made by hand, or Limpet has a bug. It is
    a `LimpetError` in any case, so that background work handles it like any other.
    """
    meaning = error.meaning if isinstance(error, NotApplied) else error
    if isinstance(meaning, LimpetError):
        meaning.__cause__ = meaning.__cause__ or error.__cause__
        return meaning
    named = [one.key for one in (*batch.writes, *batch.guards) if isinstance(one, _KEYED)]
    about = f"the batch on {named[0]!r}" if named else "the batch"
    made = InvalidValue(f"{about} cannot be committed and nothing changed: {type(meaning).__name__}")
    made.__cause__ = meaning
    return made


_KEYED: Final = (*get_args(Write), Guard)
