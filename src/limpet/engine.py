"""The engine protocol: a map and a log behind ten primitives.

The map holds the current entries of a namespace; the log holds the ordered changes that
made it. An engine stores both, runs a batch under its own exclusion by the rules of
`limpet.transition`, and wakes the callers that wait for changes. Everything else is
written once, above it.

Each line of a Behaviour list is quoted, word for word, by a test in `limpet.conformance`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from limpet.index import IndexProbe
from limpet.keys import Span
from limpet.model import (
    Batch,
    Commit,
    Entry,
    Expire,
    Family,
    Filter,
    LogPage,
    Refusal,
    Resealed,
    ScanPage,
    Seals,
    Status,
    Traits,
    Window,
)

__all__ = ["Engine", "Finding", "FindingLevel", "Indexing", "Restoring", "Sealing", "WithTables"]


class Engine(Protocol):
    """Where state lives. Every call names its namespace; nothing crosses it.

    Errors:
    - A driver's errors become ours here, in one place, with `from`. No message holds a value or a secret.
    - `Unavailable`: nothing of this call was applied, and nothing will be. The caller sends the batch again as it is.
    - `Ambiguous`: the commit may have been applied. Its ``request_id`` is the cause of its changes in the log, and
      ``since`` a revision before them. The caller sends the batch again with both, as ``retry_since``. In doubt, this.
    - `Compacted`: the log does not have what follows the given revision. `Corrupt`: what is stored cannot be read.
      `Closed`: the engine was closed.
    - A batch that the rules refuse is no error but a `Refusal`.

    Duties:
    - Time: where processes or hosts share a place, their clocks differ. The latest time of a namespace is kept there,
      and reads and commits use it if it is later than the clock.
    - Forks: a child has its own connections and locks. It does not use, and does not close, those of its parent.
    - Cancellation: a call that is cancelled ends as cancelled. A commit that has begun is finished without its caller,
      and one that has not begun never begins.
    - Closing: commits that began are finished first; callers that wait get `Closed`.
    - Bounds: a caller may send a thousand keys, 128 writes, 4 MB; no group, page or queue grows without an end.
    """

    @property
    def traits(self) -> Traits:
        """Describe this engine, where engines may differ."""
        ...

    async def read(self, namespace: str, keys: Sequence[str], *, family: Family = "data") -> list[Entry | None]:
        """Read entries by key; the result has the order of the keys.

        Behaviour:
        - A read sees every commit that was acknowledged before it began.
        - An expired entry reads as absent, swept or not.
        - Several keys in one read come from one moment.
        """
        ...

    async def scan(
        self,
        namespace: str,
        span: Span,
        *,
        family: Family = "data",
        where: Filter | None = None,
        values: bool = True,
        limit: int = 500,
        reverse: bool = False,
    ) -> ScanPage:
        """Read live entries of a span in key order, at most ``limit`` of them; with ``reverse`` the last ones first.

        Behaviour:
        - Order is code-point order of the keys.
        - A page that ends early has a cursor to continue after; a page without a cursor was the last.
        - In reverse, the order is the opposite, and a page continues before its cursor.
        - Without values, entries come with everything else.
        """
        ...

    async def count(self, namespace: str, span: Span, *, family: Family = "data") -> int:
        """Count the live entries of a span without sending them.

        Behaviour:
        - A count is the number of entries that a scan of the span would give.
        """
        ...

    async def namespaces(self) -> list[str]:
        """List the namespaces that were written to, sorted.

        Behaviour:
        - Every namespace that any process has written to is listed, and one that was not used is not.
        """
        ...

    async def commit(self, namespace: str, batch: Batch) -> Commit | Refusal:
        """Apply a batch entirely or not at all.

        Behaviour:
        - Guards see the state before the batch.
        - A refused batch leaves no trace: no change, no event, no revision.
        - Each change has its own revision, growing in the order of the writes.
        - Revisions may skip numbers; do not count on consecutive ones.
        - A refusal carries the entry found, so the caller need not read again.
        - A request that was applied before returns its first result and changes nothing.
        - A retry finds its first result also behind thousands of other changes.
        - A commit whose reply was lost raises Ambiguous; where Unavailable is raised, nothing was applied.
        - A superseded request, which arrives after its own retry was answered, does nothing.
        - A commit writes several families together; the same key in two of them is two entries.
        - Batches that are committed together each have their own outcome: one that fails does not fail another.
        - A brief batch does and returns the same, except that entries of records may lack their value.
        """
        ...

    async def changes(
        self, namespace: str, after: int, *, span: Span | None = None, limit: int = 500, wait_s: float = 0.0
    ) -> LogPage:
        """Read the log after a revision, in revision order; wait for a change when there is none yet.

        With a span, only the data of its keys; without, all families. With a limit of 0 the page has no change and
        only names the change that the next ones follow.

        Behaviour:
        - When a revision is readable, every smaller one is readable or will never exist.
        - A revision that was trimmed, or that lies in the future, is refused as compacted.
        - A wait ends early when a change arrives, from this process or another.
        - A wait ends within a second of the commit that ends it, from this process or another.
        - A wait that is cancelled ends at once, and as cancelled.
        - A page of the log names the change that it follows: the one at the given revision, or the last one before it.
        """
        ...

    async def due(self, namespace: str, *, limit: int = 500) -> list[Expire]:
        """List the entries that have expired, receipts aside, as the writes that end them.

        Behaviour:
        - An entry is due from the millisecond it expires, and not before.
        - Listing them changes nothing; two callers get the same list.
        """
        ...

    async def trim(self, namespace: str, window: Window) -> int:
        """Drop changes that the log need not keep, and expired receipts. Returns how many changes were dropped.

        Behaviour:
        - The oldest changes go first, and changes younger than the minimum stay.
        - Trimming moves the floor, so that a watcher behind it gets Compacted.
        - After trimming, the counters of the log are those of the changes that are left.
        - What trimming drops is deleted, and so are expired receipts and expired marks of superseded requests.
        """
        ...

    async def status(self, namespace: str) -> Status:
        """Read the counters of a namespace; one that was never written has revision 0.

        Behaviour:
        - The revision is that of the latest change.
        - Keys and bytes count what is stored.
        - `now_ms` is the time that decides about expiry, and it never goes back.
        - `behind_ms` is how far the engine's clock is behind that time, which stands still meanwhile.
        """
        ...

    async def close(self) -> None:
        """Close files and connections. Safe to call twice.

        Behaviour:
        - Commits that began are finished; later calls raise Closed.
        - Callers that wait for changes are woken and get Closed.
        """
        ...


@runtime_checkable
class Indexing(Protocol):
    """An optional part of an engine: it finds entries by a field without reading them all.

    Behaviour:
    - An index changes no result of a scan, only how long it takes.
    - An index covers entries written before and after it was made, by any process.
    - Making an index that exists, or dropping one that does not, changes nothing.
    """

    async def index(self, namespace: str, field: str) -> None:
        """Keep an index of a field from now on."""
        ...

    async def unindex(self, namespace: str, field: str) -> None:
        """Drop the index of a field."""
        ...

    async def indexes(self, namespace: str) -> list[str]:
        """List the fields that have an index, sorted."""
        ...

    async def candidates(self, namespace: str, span: Span, wanted: Sequence[IndexProbe]) -> list[str] | None:
        """List the keys of a span that an index finds, in any order.

        Each probe in ``wanted`` finds every matching entry, so one of them is enough. None when no index serves any of
        them, or when it finds too many keys to help.
        """
        ...


@runtime_checkable
class Sealing(Protocol):
    """An optional part of an engine whose values are encrypted: it counts the uses of each key, and replaces keys."""

    @property
    def key_id(self) -> str:
        """The id of the key that encrypts new writes."""
        ...

    async def reseal(self, namespace: str, *, after: str | None = None, limit: int = 500) -> Resealed:
        """Encrypt with the current key the entries that another key, or none, has encrypted; go on after a cursor."""
        ...

    async def seals(self, namespace: str) -> list[Seals]:
        """Count what each key has encrypted, the current key first."""
        ...


@runtime_checkable
class Restoring(Protocol):
    """An optional part of an engine, used after its data was restored from a backup: it begins a new epoch.

    Revisions and tokens that were given out after the backup would otherwise be given out a second time.

    Behaviour:
    - In a new epoch every position of the old one is Compacted.
    - In a new epoch no revision and no token is given that an earlier one may have given.
    - A new epoch changes no entry, and the log goes on.
    """

    async def raise_epoch(self, skip: int) -> int:
        """Begin a new epoch, in which each namespace skips so many revisions. Returns the epoch."""
        ...


@runtime_checkable
class WithTables(Protocol):
    """What an engine has beside its primitives where its state is in tables, which share their names with others."""

    @property
    def taken(self) -> tuple[str, ...] | None:
        """The names of our views that tables or views of other programs have; None for no tables."""
        ...


FindingLevel = Literal["ok", "warn", "bad"]


class Finding(NamedTuple):
    """The result of one check of a store's health. ``warn`` needs attention, ``bad`` needs action."""

    check: str
    level: FindingLevel
    finding: str
    advice: str | None = None
