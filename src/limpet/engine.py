"""The engine protocol: a map and a log behind eight primitives.

The map holds the current entries of a namespace; the log holds the ordered changes that
made it. An engine stores both, runs a batch under its own exclusion by the rules of
`limpet.transition`, and tells what changed. Everything else is written once, above it.

Each line of a Behaviour list is a test in `limpet.conformance` with the same words.
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
    """Where state lives. Every call names its namespace; nothing crosses it."""

    @property
    def traits(self) -> Traits:
        """What this engine is, where engines may differ."""
        ...

    async def read(self, namespace: str, keys: Sequence[str], *, family: Family = "data") -> list[Entry | None]:
        """Read entries by key, in the order asked.

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
    ) -> ScanPage:
        """Read live entries of a span in key order, at most ``limit`` of them.

        Behaviour:
        - Order is code-point order of the keys.
        - A slice that ends early says where to go on; a slice without a cursor was the last.
        - Without values, entries come with their numbers and times alone.
        """
        ...

    async def commit(self, namespace: str, batch: Batch) -> Commit | Refusal:
        """Apply a batch entirely or not at all.

        Behaviour:
        - Guards see the state before the batch.
        - A refused batch leaves no trace: no change, no event, no revision.
        - Each change has its own revision, growing in the order of the writes.
        - Revisions may skip; nobody may count on density.
        - A refusal carries the entry found, so the caller need not read again.
        - A request seen before answers with its first result and changes nothing.
        - A request that arrives after its own retry was answered does nothing.
        - A commit writes several families together; the same key in two of them is two entries.
        - Batches that are committed together have an outcome each: one that cannot be committed fails no other.
        - A brief batch does the same, and is told the same, but that entries of records may lack their value.
        """
        ...

    async def changes(
        self, namespace: str, after: int, *, span: Span | None = None, limit: int = 500, wait_s: float = 0.0
    ) -> LogPage:
        """Read the log after a revision, in revision order; wait for news when there is none.

        With a span, only the data of its keys; without, all families. With a limit of 0, none at all: then it is
        asked what they would follow.

        Behaviour:
        - When a revision is readable, every smaller one is readable or will never exist.
        - A revision that was trimmed, or that lies in the future, is refused as compacted.
        - A wait ends early when a change arrives, from this process or another.
        - A feed names the change that it follows: that of the revision asked for, or the last one before it.
        """
        ...

    async def due(self, namespace: str, *, limit: int = 500) -> list[Expire]:
        """The entries whose time has come, receipts aside, as the writes that end them.

        Behaviour:
        - An entry is due from the millisecond it expires, and not before.
        - Asking changes nothing; two who ask get the same answer.
        """
        ...

    async def trim(self, namespace: str, window: Window) -> int:
        """Drop what the log need not keep any more, and receipts past their time. Returns changes dropped.

        Behaviour:
        - The oldest changes go first, and what is younger than the minimum stays.
        - Trimming moves the floor, so that a watcher behind it is told.
        """
        ...

    async def status(self, namespace: str) -> Status:
        """The namespace at a glance; one that was never written has revision 0.

        Behaviour:
        - The revision is that of the latest change.
        - Keys and bytes count what is stored.
        - Its time is what decides about expiry, and never goes back.
        - It tells by how much the engine's clock is behind that time, which stands still for so long.
        """
        ...

    async def close(self) -> None:
        """Let go of files and connections. Safe to call twice.

        Behaviour:
        - Commits that began are finished; later calls raise Closed.
        - Whoever waits for changes is woken and told.
        """
        ...


@runtime_checkable
class Indexing(Protocol):
    """What an engine can do beside its primitives where it pays: find entries by a field without reading them all.

    Behaviour:
    - An index changes no answer of a scan, only how long it takes.
    - It holds what was written before it was made and what is written after, by whomever.
    - Making one that there is, or dropping one that there is not, changes nothing.
    """

    async def index(self, namespace: str, field: str) -> None:
        """Keep an index of a field from now on."""
        ...

    async def unindex(self, namespace: str, field: str) -> None:
        """Keep it no more."""
        ...

    async def indexes(self, namespace: str) -> list[str]:
        """The fields that have an index, in their order."""
        ...

    async def candidates(self, namespace: str, span: Span, wanted: Sequence[IndexProbe]) -> list[str] | None:
        """The keys of a span that an index finds, in any order; None when there is none to help, or it finds too many.

        Each of ``wanted`` finds all that match; so one of them is enough.
        """
        ...


@runtime_checkable
class Sealing(Protocol):
    """What an engine can do beside its primitives where values are encrypted: tell of its keys, and change them."""

    @property
    def key_id(self) -> str:
        """The id of the key that seals what is written now."""
        ...

    async def reseal(self, namespace: str, *, after: str | None = None, limit: int = 500) -> Resealed:
        """Seal with the current key what is sealed with another, or not at all; go on behind a cursor."""
        ...

    async def seals(self, namespace: str) -> list[Seals]:
        """How much is sealed with which key, the current one first."""
        ...


@runtime_checkable
class Restoring(Protocol):
    """What an engine can do beside its primitives after its data was put back from a backup: leave the past behind.

    What was read, seen and locked in the time that the backup does not know has revisions that would be used again.

    Behaviour:
    - In a new epoch every position of the old one is Compacted.
    - In a new epoch no revision and no token is given that an earlier one may have given.
    - A new epoch changes no entry, and the log goes on.
    """

    async def raise_epoch(self, skip: int) -> int:
        """Begin a new epoch, in which each namespace leaves out so many revisions. Returns the epoch."""
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
