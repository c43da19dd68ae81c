"""Verbs on many keys: reading several at one moment, and deleting all that start with a prefix."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from limpet.draft import Fence, Fencing
from limpet.errors import InvalidValue
from limpet.keys import BATCH_WRITES_MAX, KEYS_MAX, Span, check_key, prefix_span
from limpet.model import Entry
from limpet.pages import span_after

if TYPE_CHECKING:
    from limpet.store import Store

__all__ = ["delete_keys", "read_entries", "take_keys"]


async def read_entries(store: Store, keys: list[str]) -> dict[str, Entry | None]:
    """Read several keys in one call of the engine, each of them once. The result has their order."""
    wanted = list(dict.fromkeys(keys))
    if not wanted:
        store._session.check_open()
        return {}
    engine = store._session.engine
    found = await store._session.retry(lambda: engine.read(store.name, wanted))
    return dict(zip(wanted, found, strict=True))


def take_keys(keys: Iterable[str]) -> list[str]:
    """List and check the keys of a caller. They are limited, because all their values are in memory together."""
    if isinstance(keys, str | bytes):
        raise InvalidValue("several keys are a list, such as ['a', 'b'], not one key")
    # At most one more than allowed, so that an iterator without an end is refused as well.
    taken = [check_key(key) for key in itertools.islice(keys, KEYS_MAX + 1)]
    if len(taken) > KEYS_MAX:
        raise InvalidValue(f"one read takes up to {KEYS_MAX:,} keys: read them in parts")
    return taken


async def delete_keys(store: Store, prefix: str, limit: int | None, fence: Fencing | Fence | None) -> int:
    """Delete the keys of a prefix, batch by batch in key order. Returns how many were deleted."""
    if limit is not None and (type(limit) is not int or limit < 1):
        raise InvalidValue("deleting is limited to one key or more")
    rest: Span | None = prefix_span(prefix)
    if fence is not None:
        # Check it also if there is nothing to delete.
        await store.batch().fence(fence).commit()
    # The last key of now ends the work, so that it ends also while others append keys.
    last = await store.keys(prefix, limit=1, reverse=True)
    rest = None if not last.keys or rest is None else Span(rest.start, last.keys[0] + "\0")
    deleted = 0
    while rest is not None and deleted != limit:
        count = BATCH_WRITES_MAX if limit is None else min(BATCH_WRITES_MAX, limit - deleted)
        page = await store._scan_page(rest, values=False, limit=count)
        if page.entries:
            draft = store.batch() if fence is None else store.batch().fence(fence)
            for entry in page.entries:
                draft.delete(entry.key)
            commit = await draft.commit()
            deleted += sum(entry is not None for entry in commit.ended)
        rest = None if page.cursor is None else span_after(rest, page.cursor)
    return deleted
