"""A store that is opened by its first use, on the event loop that uses it.

Frameworks make their stores when a module is imported, where there is no loop yet. A store belongs to the loop that it
was opened on, so one adapter that is used on several loops, one after the other or in threads, opens one for each.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
import weakref

from limpet.store import Store
from limpet.store import open as open_store

__all__ = ["LazyStore"]


class _OnLoop:
    """What one loop has: its store, once it is open, and a lock for those that open it."""

    def __init__(self) -> None:
        self.opening = asyncio.Lock()
        self.store: Store | None = None


class LazyStore:
    """A store that is given, or opened by a URL when it is first needed."""

    def __init__(self, store: Store | str | None, namespace: str) -> None:
        if store is not None and not isinstance(store, Store | str):
            raise TypeError(
                f"this takes a URL, or a store from limpet.open(), not something of type {type(store).__name__}"
            )
        self._given = store if isinstance(store, Store) else None
        self._url = None if isinstance(store, Store) else _share_memory(store)
        self._namespace = namespace
        self._lock = threading.Lock()
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _OnLoop] = weakref.WeakKeyDictionary()

    async def open(self) -> Store:
        """Return the store of the running loop, opened if need be."""
        if self._given is not None:
            return self._given
        here = self._here()
        if here.store is None:
            async with here.opening:
                if here.store is None:
                    await self._close_left_behind()
                    here.store = await open_store(self._url, namespace=self._namespace)
        return here.store

    async def close(self) -> None:
        """Close the store of the running loop, unless it was given. The next use opens it again."""
        if self._given is not None:
            return
        here = self._here()
        async with here.opening:
            store, here.store = here.store, None
        if store is not None:
            await store.close()

    def _here(self) -> _OnLoop:
        loop = asyncio.get_running_loop()
        with self._lock:
            found = self._loops.get(loop)
            if found is None:
                found = self._loops[loop] = _OnLoop()
            return found

    async def _close_left_behind(self) -> None:
        """Close stores whose loop has ended without closing them.

        Without its loop, only an engine without connections can still be closed: memory and SQLite.
        """
        with self._lock:
            ended = [self._loops.pop(loop) for loop in list(self._loops) if loop.is_closed()]
        for left in ended:
            if left.store is not None and left.store.traits.inline:
                left.store._session.forget_loop()
                await left.store.close()


def _share_memory(url: str | None) -> str | None:
    """Give a private memory a name, because every opening of ``memory:`` alone makes a new one."""
    if url is not None and url.partition("?")[0] == "memory:":
        return url.replace("memory:", f"memory:{uuid.uuid4().hex}", 1)
    return url
