"""The store of an adapter: one that is given, or one that is opened by its first use; see `limpet.on_demand`."""

from __future__ import annotations

from limpet.on_demand import Lazy
from limpet.store import Store

__all__ = ["LazyStore"]


class LazyStore:
    """A store that is given, or opened by a URL when it is first needed."""

    def __init__(self, store: Store | str | None, namespace: str) -> None:
        if store is not None and not isinstance(store, Store | str):
            raise TypeError(
                f"this takes a URL, or a store from limpet.open(), not something of type {type(store).__name__}"
            )
        self._source = store if isinstance(store, Store) else Lazy(store, namespace=namespace)

    async def open(self) -> Store:
        """Return the store of the running loop, opened if need be."""
        return self._source if isinstance(self._source, Store) else await self._source

    async def close(self) -> None:
        """Close the store of the running loop, unless it was given. The next use opens it again."""
        if isinstance(self._source, Lazy):
            await self._source.close()
