"""A store that is opened by its first use: on the event loop that uses it, or for callers that do not await.

Modules and frameworks make their stores when they are imported, where there is no loop yet. A store belongs to the loop
that it was opened on, so one that is used on several loops, one after the other or in threads, is opened once for each,
and once more for all callers that do not await.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import uuid
import weakref
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from limpet import store as _store
from limpet import sync
from limpet.clock import Clock
from limpet.keys import VALUE_BYTES_MAX, check_namespace
from limpet.model import Window

if TYPE_CHECKING:
    from limpet.encryption.keyring import Keyring

__all__ = ["Lazy", "lazy"]


class _OnLoop:
    """What one loop has: its store, once it is open, and a lock for those that open it."""

    def __init__(self) -> None:
        self.opening = asyncio.Lock()
        self.store: _store.Store | None = None


class Lazy:
    """A store that is opened by its first use: ``store = await lazy``, or ``store = lazy.blocking()``."""

    def __init__(self, url: str | None, **options: Any) -> None:
        shared = _share_memory(url)
        self._open = functools.partial(_store.open, shared, **options)
        self._open_blocking = functools.partial(sync.open, shared, **options)
        self._lock = threading.Lock()
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _OnLoop] = weakref.WeakKeyDictionary()
        self._blocking: sync.Store | None = None

    def __await__(self) -> Generator[Any, None, _store.Store]:
        return self._get().__await__()

    async def _get(self) -> _store.Store:
        here = self._here()
        if here.store is None:
            async with here.opening:
                if here.store is None:
                    await self._close_left_behind()
                    here.store = await self._open()
        return here.store

    async def close(self) -> None:
        """Close the store of the running loop. The next use opens it again."""
        here = self._here()
        async with here.opening:
            store, here.store = here.store, None
        if store is not None:
            await store.close()

    def blocking(self) -> sync.Store:
        """The store for callers that do not await, in any thread."""
        with self._lock:
            if self._blocking is None:
                self._blocking = self._open_blocking()
            return self._blocking

    def close_blocking(self) -> None:
        """Close the store of the callers that do not await. The next use opens it again."""
        with self._lock:
            store, self._blocking = self._blocking, None
        if store is not None:
            store.close()

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


def lazy(
    url: str | None = None,
    *,
    namespace: str = "default",
    clock: Clock | None = None,
    max_value_bytes: int = VALUE_BYTES_MAX,
    window: Window | None = None,
    sweep: bool = True,
    encryption: Keyring | None = None,
) -> Lazy:
    """Name a store for a module, to be opened by its first use; see `limpet.open` for the arguments.

    ``await`` it for the store of the running event loop, or call `Lazy.blocking` for the one without await.
    """
    check_namespace(namespace)
    return Lazy(
        url,
        namespace=namespace,
        clock=clock,
        max_value_bytes=max_value_bytes,
        window=window,
        sweep=sweep,
        encryption=encryption,
    )


def _share_memory(url: str | None) -> str | None:
    """Give a private memory a name, because every opening of ``memory:`` alone makes a new one."""
    if url is not None and url.partition("?")[0] == "memory:":
        return url.replace("memory:", f"memory:{uuid.uuid4().hex}", 1)
    return url
