"""Plans that know neither the time nor the revision at which they will be applied.

An engine whose server decides about both gets a plan that is made at `NOW` and after `BASE`, numbers that no clock and
no counter reaches. What the plan keeps of an entry that expires later is moved behind `KEPT`, so that the entry counts
as live. When the plan was applied, `Moment` turns all of it into what the server decided.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from limpet.model import Batch, Change, Commit, Entry, Import, Refusal
from limpet.transition import encode_receipt, read_receipt

__all__ = ["BASE", "KEPT", "NOW", "Moment", "as_planned", "batch_as_planned", "resolve_receipt"]

BASE: Final = 1 << 60
NOW: Final = 1 << 50
KEPT: Final = 1 << 51


def as_planned(entry: Entry | None, *, has_expired: bool) -> Entry | None:
    """An entry as a plan reads it: live or expired at `NOW`, as it is at the server's time."""
    if entry is None or entry.expires_ms is None or has_expired:
        return entry
    return msgspec.structs.replace(entry, expires_ms=entry.expires_ms + KEPT)


def batch_as_planned(batch: Batch, now_ms: int) -> Batch:
    """A batch as it is planned: an entry that it imports is live or expired at `NOW`, as it is at the server's time."""
    for write in batch.writes:
        if type(write) is Import:
            break
    else:
        return batch
    return msgspec.structs.replace(
        batch,
        writes=tuple(
            msgspec.structs.replace(write, expires_ms=write.expires_ms + KEPT)
            if type(write) is Import and write.expires_ms is not None and write.expires_ms > now_ms
            else write
            for write in batch.writes
        ),
    )


_NONE: Final[Mapping[int, Entry]] = MappingProxyType({})


class Moment(msgspec.Struct, frozen=True, gc=False):
    """When a plan was applied: after which revision, and at what time."""

    revision: int
    now_ms: int

    def find_revision(self, revision: int) -> int:
        """The revision that the server gave."""
        return revision if revision < BASE else self.revision + revision - BASE

    def find_time(self, time_ms: int) -> int:
        """The time, by the server's clock."""
        if time_ms < NOW:
            return time_ms
        return self.now_ms + time_ms - NOW if time_ms < KEPT else time_ms - KEPT

    def resolve(self, entry: Entry) -> Entry:
        """An entry of the plan as it was stored."""
        revision, created_revision = entry.revision, entry.created_revision
        created_ms, updated_ms, expires_ms = entry.created_ms, entry.updated_ms, entry.expires_ms
        return Entry(
            entry.key,
            entry.stored,
            entry.version,
            revision if revision < BASE else self.find_revision(revision),
            created_revision if created_revision < BASE else self.find_revision(created_revision),
            created_ms if created_ms < NOW else self.find_time(created_ms),
            updated_ms if updated_ms < NOW else self.find_time(updated_ms),
            None if expires_ms is None else self.find_time(expires_ms),
            entry.meta_json,
        )

    def resolve_commit(self, commit: Commit, stored: Mapping[int, Entry] = _NONE) -> Commit:
        """A commit of the plan as it happened. ``stored`` has entries of it, by identity, that are resolved already."""
        entries = tuple([one and (stored.get(id(one)) or self.resolve(one)) for one in commit.entries])
        ended = tuple([one and self.resolve(one) for one in commit.ended])
        revision, at_ms = self.find_revision(commit.revision), self.find_time(commit.at_ms)
        return Commit(revision, entries, ended, at_ms, commit.replayed, commit.kept)

    def resolve_refusal(self, refusal: Refusal) -> Refusal:
        """A refusal of the plan, at the time when it was confirmed."""
        found = None if refusal.found is None else self.resolve(refusal.found)
        return msgspec.structs.replace(refusal, found=found, at_ms=self.find_time(refusal.at_ms))

    def resolve_change(self, change: Change) -> Change:
        """A change of the plan as it is in the log."""
        return Change(
            change.op,
            self.resolve(change.entry),
            self.find_revision(change.revision),
            self.find_revision(change.commit),
            self.find_time(change.at_ms),
            change.origin,
            change.family,
        )


def resolve_receipt(entry: Entry) -> Entry:
    """A receipt whose body was written with its plan: the row itself has the revision and the time of its commit."""
    receipt = read_receipt(entry)
    commit = receipt.commit
    if commit.revision < BASE or entry.expires_ms is None:
        return entry
    moment = Moment(entry.revision - (commit.revision - BASE), entry.created_ms)
    receipt_ms = entry.expires_ms - entry.created_ms
    return encode_receipt(entry.key, receipt.digest, moment.resolve_commit(commit), receipt_ms)
