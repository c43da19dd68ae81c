"""The entries of a store, as they are brought to another one."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Final, NamedTuple

import limpet
from limpet.keys import Span
from limpet.model import Entry, Family, Import, split_writer
from limpet.pages import SCAN_PAGE, span_after

__all__ = ["MOVED_FAMILIES", "Brought", "Rejected", "Source", "entries_of", "to_import"]

MOVED_FAMILIES: Final[tuple[Family, ...]] = ("data", "sequence")
"""The data, and the counters of `append`, without which its numbers would begin again.

A lock belongs to a process at work on one store, and a receipt to a request that was made there. The audit trail proves
in which order things happened in one store, by its revisions.
"""


class Brought(NamedTuple):
    """An entry to write into a namespace.

    ``is_exact`` tells whether the source knows version and times, or only the value.
    """

    namespace: str
    write: Import
    is_exact: bool = True


class Rejected(NamedTuple):
    """Something that a store cannot hold, and why."""

    namespace: str
    key: str
    reason: str


Source = AsyncIterator[Brought] | AsyncIterator[Brought | Rejected]


async def entries_of(
    store: limpet.Store,
    namespaces: Iterable[str],
    *,
    after: tuple[str, Family, str] | None = None,
    families: Sequence[Family] = MOVED_FAMILIES,
) -> AsyncIterator[Brought]:
    """The live entries of some namespaces, in the order of namespace, family and key, or those after one of them.

    They are read page by page while others write, so each is as it was when its page was read.
    """
    session = store._session
    for namespace in sorted(namespaces):
        for family in families:
            span: Span | None = Span("", None)
            if after is not None and (namespace, families.index(family)) < (after[0], families.index(after[1])):
                continue
            if after is not None and (namespace, family) == after[:2]:
                span = span_after(Span("", None), after[2])
            while span is not None:
                scan = functools.partial(session.engine.scan, namespace, span, family=family, limit=SCAN_PAGE)
                page = await session.retry(scan)
                for entry in page.entries:
                    yield Brought(namespace, to_import(entry, family))
                span = None if page.cursor is None else span_after(span, page.cursor)


def to_import(entry: Entry, family: Family = "data") -> Import:
    """The write that makes such an entry elsewhere."""
    assert entry.stored is not None
    writer, meta_json = split_writer(entry.meta_json)
    return Import(
        entry.key,
        entry.stored,
        meta_json=meta_json,
        family=family,
        version=entry.version,
        created_ms=entry.created_ms,
        updated_ms=entry.updated_ms,
        expires_ms=entry.expires_ms,
        writer=writer,
    )
