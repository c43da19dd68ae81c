"""Adopting the data of another program: bring it into a store, and let the store take its place.

What is adopted in place is read twice. First while its writers are at work, which may take a while; then the store
takes its place, and what was written or deleted in between is brought up to date. Each step may be repeated, so an
adoption that was interrupted at any moment is run again.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from typing import Final, NamedTuple

import msgspec

import limpet
from limpet.errors import Compacted, InvalidValue, LimpetError, Unavailable
from limpet.model import Batch, Delete, Entry, Guard, Revision
from limpet.moving.entries import Brought, Rejected
from limpet.moving.loader import Policy, Progress, Report, load
from limpet.moving.sources import ForeignData, WithRows
from limpet.request_ids import new_request_id
from limpet.session import Session

__all__ = ["Adoption", "adopt"]


PAGE: Final = 500


class Adoption(NamedTuple):
    """What was brought, before a hand-over and after it, and what was done then; None without a hand-over."""

    first: Report
    last: Report | None
    handed_over: str | None

    @property
    def total(self) -> Report:
        """What has become of the entries that the source had at the end."""
        if self.last is None:
            return self.first
        written = self.last.written + self.first.written
        return msgspec.structs.replace(self.last, written=written, same=max(0, self.last.same - self.first.written))


async def adopt(
    store: limpet.Store, data: ForeignData, *, policy: Policy, dry_run: bool, progress: Progress
) -> Adoption:
    """Adopt the data of another program into a store."""
    if isinstance(data, WithRows) and data.is_done:
        # What was deleted since would come back.
        raise InvalidValue(f"{data.shown}: the table was adopted before, and a view has its place; --undo puts it back")
    only_looks, cause = dry_run or data.needs_place, _cause_of(data)
    first = await load(store, _read(data), policy=policy, dry_run=only_looks, progress=progress, cause=cause)
    if dry_run or first.rejected:
        # What cannot be stored would be in no place any more.
        return Adoption(first, None, None)
    done = await data.hand_over()
    if done is None:
        return Adoption(first, None, None)
    last = await load(store, _read(data), policy=policy, dry_run=False, progress=progress, cause=cause)
    if isinstance(data, WithRows):
        await _delete_ended(store, data, cause)
    if not last.rejected:
        await data.finish()
    return Adoption(Report() if only_looks else first, last, done)


async def _read(data: ForeignData) -> AsyncIterator[Brought | Rejected]:
    """What a source brings. The errors of its driver are those of something that cannot be reached."""
    items = data.read()
    while True:
        try:
            item = await anext(items)
        except StopAsyncIteration:
            return
        except LimpetError:
            raise
        except Exception as error:
            text = f"{data.shown} cannot be read to its end: {type(error).__name__}. Run it again"
            raise Unavailable(text) from error
        yield item


def _cause_of(data: ForeignData) -> str:
    """What the request ids begin with that bring entries of this source."""
    return f"adopt-{hashlib.blake2b(data.shown.encode(), digest_size=6).hexdigest()}"


async def _delete_ended(store: limpet.Store, data: WithRows, cause: str) -> None:
    """Delete what was brought of rows that were deleted before the hand-over."""
    for namespace in await store.namespaces():
        untouched: list[Entry] = []
        async for entry in store.namespace(namespace).scan():
            if entry.created_revision == entry.revision:
                untouched.append(entry)
            if len(untouched) == PAGE:
                await _delete_those(store, namespace, untouched, data, cause)
                untouched = []
        await _delete_those(store, namespace, untouched, data, cause)


async def _delete_those(store: limpet.Store, namespace: str, entries: list[Entry], data: WithRows, cause: str) -> None:
    """Delete entries without a row, of those that this adoption, or an earlier run of it, has brought."""
    ended = set(await data.ended(namespace, [entry.key for entry in entries]))
    session = store._session
    for entry in entries:
        if entry.key in ended and await _was_brought(session, namespace, entry, cause):
            guard = Guard(entry.key, Revision(entry.revision))
            await session.commit(namespace, Batch((guard,), (Delete(entry.key),), f"{cause}-{new_request_id()}"))


async def _was_brought(session: Session, namespace: str, entry: Entry, cause: str) -> bool:
    """Whether this adoption has brought an entry, by the log. Where that has been trimmed, the entry stays."""
    try:
        page = await session.retry(lambda: session.engine.changes(namespace, entry.revision - 1, limit=1))
    except Compacted:
        return False
    return any(change.revision == entry.revision and cause in (change.cause or "") for change in page.changes)
