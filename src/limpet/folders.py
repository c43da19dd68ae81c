"""One level of keys: those directly below a prefix, and the folders there with the number of keys in each.

A folder is what several keys begin with, up to the next delimiter. A large folder is not read key by key: the engine
counts its keys, and the listing goes on behind it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from limpet.errors import InvalidValue
from limpet.keys import PAGE_MAX, Span, check_text, prefix_span
from limpet.pages import SCAN_PAGE, span_after

if TYPE_CHECKING:
    from limpet.store import Store

__all__ = ["Child", "ChildPage", "list_children"]

FIRST_PAGE: Final = 32
"""How many keys are read before the engine counts. The next pages are larger, while folders are small."""


class Child(msgspec.Struct, frozen=True):
    """A key directly below a prefix, or a folder: then its ``key`` ends with the delimiter, and ``keys`` are in it."""

    key: str
    is_folder: bool
    keys: int = 1


class ChildPage(msgspec.Struct, frozen=True):
    """Some keys and folders, in order. When ``truncated``, pass ``cursor`` as ``after`` to go on."""

    children: list[Child]
    truncated: bool
    cursor: str | None


async def list_children(store: Store, prefix: str, *, delimiter: str, limit: int, after: str | None) -> ChildPage:
    """List one level below a prefix. What is read and what is counted are not of one moment."""
    if type(limit) is not int or not 1 <= limit <= PAGE_MAX:
        raise InvalidValue(f"a page holds 1 to {PAGE_MAX:,} keys and folders")
    whole, delimiter = prefix_span(prefix), check_text(delimiter, "a delimiter")
    rest: Span | None = span_after(whole, after)
    if after is not None and after.startswith(prefix) and (folder := _folder_of(after, prefix, delimiter)) is not None:
        rest = _span_behind(whole, folder)
    found: list[Child] = []
    count = FIRST_PAGE
    while rest is not None:
        page = await store._scan_page(rest, values=False, limit=count)
        count = min(SCAN_PAGE, 4 * count)
        for entry in page.entries:
            folder = _folder_of(entry.key, prefix, delimiter)
            if folder is not None and found and found[-1].key == folder:
                found[-1] = Child(folder, True, found[-1].keys + 1)
                continue
            if len(found) == limit:
                return ChildPage(found, True, found[-1].key)
            found.append(Child(entry.key, False) if folder is None else Child(folder, True))
        if page.cursor is None:
            break
        rest = span_after(rest, page.cursor)
        if found and found[-1].is_folder and _folder_of(page.cursor, prefix, delimiter) == found[-1].key:
            # The page ended inside a folder: count the rest of it, and go on behind it.
            more = await _count(store, Span(rest.start, prefix_span(found[-1].key).stop))
            found[-1] = Child(found[-1].key, True, found[-1].keys + more)
            rest, count = _span_behind(whole, found[-1].key), FIRST_PAGE
    return ChildPage(found, False, None)


async def _count(store: Store, span: Span) -> int:
    return await store._session.retry(lambda: store._session.engine.count(store.name, span))


def _folder_of(key: str, prefix: str, delimiter: str) -> str | None:
    """The folder below the prefix that a key is in; None for a key directly below."""
    at = key.find(delimiter, len(prefix))
    return None if at < 0 else key[: at + len(delimiter)]


def _span_behind(whole: Span, folder: str) -> Span | None:
    """The part of a span behind a folder; None if the folder reaches to the end of all keys."""
    stop = prefix_span(folder).stop
    return None if stop is None else Span(stop, whole.stop)
