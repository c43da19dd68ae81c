"""The store behind an adapter: given, or opened from a URL at the first call, for async and sync callers.

The adapters are written once, as coroutines on a `limpet.Store`. A source runs them for callers that await and for
callers that do not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Final, TypeVar

import limpet
from limpet import sync
from limpet.errors import Closed, InvalidValue
from limpet.on_demand import Lazy

__all__ = ["Source"]

R = TypeVar("R")

_END: Final = object()

Work = Callable[[limpet.Store], Coroutine[Any, Any, R]]


class Source:
    """A store for both kinds of callers.

    A URL is opened once for callers that await and once for those that do not. What is opened here is closed here; a
    store that was given stays open.
    """

    def __init__(self, store: limpet.Store | sync.Store | str, namespace: str) -> None:
        if not isinstance(store, limpet.Store | sync.Store | str):
            raise InvalidValue(f"give a store or a URL, not something of type {type(store).__name__}")
        self._lazy = Lazy(store, namespace=namespace) if isinstance(store, str) else None
        self._async = store if isinstance(store, limpet.Store) else None
        self._sync = store if isinstance(store, sync.Store) else None
        self._loop = _running_loop() if self._async is not None else None
        self._closed = False

    # For callers that await ---------------------------------------------------------

    async def arun(self, work: Work[R]) -> R:
        """Run work on the store for a caller that awaits."""
        if self._sync is not None:
            # A store without await blocks, so it gets a thread.
            return await asyncio.to_thread(self.run, work)
        return await work(await self._astore())

    async def aiterate(self, items: Callable[[limpet.Store], AsyncIterator[R]]) -> AsyncIterator[R]:
        """Iterate over what the store has, for a caller that awaits."""
        if self._sync is not None:
            found = self.iterate(items)
            while (item := await asyncio.to_thread(next, found, _END)) is not _END:
                yield item  # type: ignore[misc]
            return
        async for each in items(await self._astore()):
            yield each

    async def _astore(self) -> limpet.Store:
        return self._async if self._async is not None else await self._opened()

    def _opened(self) -> Lazy:
        if self._lazy is None or self._closed:
            raise Closed
        return self._lazy

    # For callers that do not --------------------------------------------------------

    def run(self, work: Work[R]) -> R:
        """Run work on the store for a caller that does not await."""
        return self._run_on_loop(work(self._async)) if self._async is not None else self._store().run(work)

    def iterate(self, items: Callable[[limpet.Store], AsyncIterator[R]]) -> Iterator[R]:
        """Iterate over what the store has, for a caller that does not await."""
        found: list[AsyncIterator[R]] = []

        async def advance(store: limpet.Store) -> Any:
            if not found:
                found.append(items(store))
            return await anext(found[0], _END)

        while (item := self.run(advance)) is not _END:
            yield item

    def _store(self) -> sync.Store:
        return self._sync if self._sync is not None else self._opened().blocking()

    def _run_on_loop(self, work: Coroutine[Any, Any, R]) -> R:
        """Run work on the loop of the store that was given, from another thread."""
        loop = self._loop
        if loop is None or _running_loop() is not None:
            work.close()
            # What LangGraph's own async savers raise for it.
            raise asyncio.InvalidStateError(
                "a method without await was called on an event loop: await the method that starts with 'a', call it "
                "from another thread (asyncio.to_thread), or give limpet.sync.open(…) or a URL"
            )
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    # Closing ------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Close what was opened here."""
        self._closed = True
        if self._lazy is not None:
            await self._lazy.close()
            await asyncio.to_thread(self._lazy.close_blocking)

    def close(self) -> None:
        """Close what was opened here for callers that do not await."""
        self._closed = True
        if self._lazy is not None:
            self._lazy.close_blocking()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
