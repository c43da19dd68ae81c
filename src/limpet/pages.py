"""Pages that are put together from several reads: the locks of a namespace, and the latest changes of a key."""

from __future__ import annotations

import functools
from collections import deque
from typing import TYPE_CHECKING, Final

from limpet.errors import Compacted
from limpet.hub import event_of, position_prefix
from limpet.keys import PAGE_BYTES, Span, check_key, fit, key_span, prefix_span
from limpet.lock import LockInfo, lock_info
from limpet.model import Change, Event

if TYPE_CHECKING:
    from limpet.store import Store

__all__ = ["SCAN_PAGE", "latest_changes", "lock_page", "span_after"]

SCAN_PAGE: Final = 500
"""How many entries a scan reads at a time."""


async def lock_page(
    store: Store, prefix: str, *, after: str | None = None, limit: int | None = None
) -> tuple[list[LockInfo], bool]:
    """List the locks that are held now, in the order of their names, and whether there are more."""
    engine, status = store._session.engine, await store.status()
    span: Span | None = span_after(prefix_span(prefix), after)
    found: list[LockInfo] = []
    while span is not None and (limit is None or len(found) < limit):
        count = SCAN_PAGE if limit is None else min(SCAN_PAGE, limit - len(found))
        scan = functools.partial(engine.scan, store.name, span, family="lock", limit=count)
        page = await store._session.retry(scan)
        found += [lock_info(entry, status.now_ms) for entry in page.entries]
        span = None if page.cursor is None else span_after(span, page.cursor)
    return found, span is not None


async def latest_changes(store: Store, key: str, *, limit: int, before: int | None = None) -> tuple[list[Event], bool]:
    """List the latest changes of a key, up to before a revision if one is given, and whether there may be older ones.

    They come oldest first, and the page ends after `PAGE_BYTES`. A log can only be read forwards, so this goes
    backwards in steps: the first covers a few revisions, and each later one four times as many.
    """
    span, status = key_span(key), await store.status()
    prefix, floor = position_prefix(status, store.name), status.floor
    stop, step = status.revision if before is None else min(before - 1, status.revision), 4
    found: deque[Change] = deque()
    size_bytes, has_more = 0, False
    while stop > floor and len(found) <= limit and size_bytes <= PAGE_BYTES:
        part: deque[Change] = deque()
        after = start = max(floor, stop - step)
        while after < stop:
            try:
                page = await store._log_page(after, span)
            except Compacted as gone:
                after = floor = start = stop if gone.oldest is None else gone.oldest
                continue
            part.extend(change for change in page.changes if change.revision <= stop)
            after = page.next_after
            has_more |= _drop_oldest(part, limit - len(found) + 1)
        found.extendleft(reversed(part))
        size_bytes = sum(change.entry.size_bytes for change in found)
        stop, step = start, 4 * step
    has_more |= _drop_oldest(found, limit) or stop > floor
    return [event_of(change, prefix) for change in found], has_more


def _drop_oldest(changes: deque[Change], most: int) -> bool:
    """Keep the latest changes that make up a page. Returns whether any was dropped."""
    kept = fit([change.entry.size_bytes for change in reversed(changes)][:most])
    has_more = kept < len(changes)
    while len(changes) > kept:
        changes.popleft()
    return has_more


def span_after(span: Span, after: str | None, *, reverse: bool = False) -> Span:
    """Cut off the part of a span up to a key, in the order of a scan."""
    if after is None:
        return span
    key = check_key(after)
    if reverse:
        return Span(span.start, key if span.stop is None else min(span.stop, key))
    # No key contains U+0000, so no key lies in between.
    return Span(max(span.start, key + "\0"), span.stop)
