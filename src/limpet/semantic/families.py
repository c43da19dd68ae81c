"""Reading the families of a namespace that stand beside its data: ``audit`` and ``recoverable``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from limpet.keys import Span, prefix_span
from limpet.model import Entry, Family, ScanPage
from limpet.store import Store

__all__ = ["read_family", "scan_family"]


async def scan_family(store: Store, where: str | Span, family: Family, *, values: bool = True) -> AsyncIterator[Entry]:
    """The entries of a family, in order of their keys: those with a prefix, or those in a span."""
    session = store._session
    span = prefix_span(where) if isinstance(where, str) else where
    while True:
        rest = span

        async def load_page(part: Span = rest) -> ScanPage:
            return await session.engine.scan(store.name, part, family=family, values=values)

        page = await session.retry(load_page)
        for entry in page.entries:
            yield entry
        if page.cursor is None:
            return
        span = Span(page.cursor + "\0", rest.stop)
        # Some engines reply without suspending. The task that renews the lock of this work needs the loop, too.
        await session.clock.sleep(0)


async def read_family(store: Store, keys: Sequence[str], family: Family) -> list[Entry | None]:
    """Entries of a family by key."""
    session = store._session
    return await session.retry(lambda: session.engine.read(store.name, keys, family=family))
