"""A store for Litestar: sessions, cached responses and rate limits that all workers share.

`Store` has Litestar's interface for stores with namespaces. A namespace is a folder of Limpet's keys, so that deleting
all of it deletes those inside it as well, and nothing else.
"""

from __future__ import annotations

import math
from datetime import timedelta
from types import TracebackType
from typing import Final

import litestar.stores.base

from limpet.adapters.lazy import LazyStore
from limpet.adapters.names import check_prefix, escape, shorten
from limpet.errors import Conflict
from limpet.keys import KEY_BYTES_MAX
from limpet.model import Revision
from limpet.store import Store as _Store

__all__ = ["Store"]

PREFIX: Final = "litestar/"


class Store(litestar.stores.base.NamespacedStore):
    """A store of Litestar on any engine of Limpet.

    Args:
        store: A URL, or a store from `limpet.open`; ``LIMPET_URL`` or ``./limpet.db`` when not given. A URL is opened
            by the first call, on its event loop. A store that was given is not closed.
        namespace: The namespace of Limpet that a URL is opened with.
        prefix: What all keys start with.
    """

    __slots__ = ("_lazy", "_prefix")

    def __init__(self, store: _Store | str | None = None, *, namespace: str = "default", prefix: str = PREFIX) -> None:
        self._use(LazyStore(store, namespace), prefix)

    def _use(self, lazy: LazyStore, prefix: str) -> None:
        self._lazy, self._prefix = lazy, check_prefix(prefix)
        self.namespace = prefix

    def with_namespace(self, namespace: str) -> Store:
        """A store inside this one. `delete_all` of this one deletes its keys, too."""
        child = Store.__new__(Store)
        child._use(self._lazy, f"{self._prefix}{shorten(escape(namespace), 65)}/")
        return child

    async def set(self, key: str, value: str | bytes, expires_in: int | timedelta | None = None) -> None:
        """Store a value, for ever if it does not say for how many seconds."""
        stored = value.encode() if isinstance(value, str) else value
        await (await self._lazy.open()).put(self._key(key), stored, ttl=expires_in or None)

    async def get(self, key: str, renew_for: int | timedelta | None = None) -> bytes | None:
        """The value of a key; None when it is absent. A value that expires can be renewed by this."""
        store, stored_at = await self._lazy.open(), self._key(key)
        entry = await store.entry(stored_at)
        while entry is not None and entry.expires_at is not None and renew_for:
            try:
                entry = await store.touch(stored_at, renew_for, expect=Revision(entry.revision))
                break
            except Conflict as conflict:
                # Another has written it or renewed it.
                entry = conflict.current
        value: bytes | None = None if entry is None else entry.value
        return value

    async def delete(self, key: str) -> None:
        """Delete a key, if there is one."""
        await (await self._lazy.open()).delete(self._key(key))

    async def delete_all(self) -> None:
        """Delete the keys of this store and of the namespaces inside it."""
        await (await self._lazy.open()).delete_prefix(self._prefix)

    async def exists(self, key: str) -> bool:
        """Whether there is such a key."""
        return await (await self._lazy.open()).entry(self._key(key)) is not None

    async def expires_in(self, key: str) -> int | None:
        """In how many seconds a key expires; None when it is absent or does not expire."""
        store = await self._lazy.open()
        entry = await store.entry(self._key(key))
        if entry is None or entry.expires_ms is None:
            return None
        return max(0, math.floor((entry.expires_ms - store._session.clock.now_ms()) / 1000))

    async def close(self) -> None:
        """Close what was opened on this event loop."""
        await self._lazy.close()

    async def __aenter__(self) -> None:
        await self._lazy.open()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        await self.close()

    def _key(self, key: str) -> str:
        return self._prefix + shorten(escape(key), KEY_BYTES_MAX - len(self._prefix.encode()))
