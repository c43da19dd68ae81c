"""A cache for Flask-Caching, Flask-Session and everything else that takes a cache of cachelib.

It is cachelib's `BaseCache` over the sync API. Integers are stored as counters, so that `inc` and `dec` count in one
step; everything else is what `serializer` makes of it, which by cachelib's default is a pickle. As with every cache of
cachelib, a program that can write to the store can then run code where the cache is read: set ``serializer`` to
cachelib's `JSONSerializer` where that matters.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from types import TracebackType
from typing import Any, ClassVar, Final, Self

from limpet import sync
from limpet.adapters.missing import missing_framework
from limpet.adapters.names import check_prefix, escape, shorten
from limpet.codec import INT_MAX, INT_MIN
from limpet.errors import Conflict, ValueTooLarge
from limpet.keys import KEY_BYTES_MAX, KEYS_MAX

try:
    from cachelib import BaseCache
    from cachelib.serializers import BaseSerializer
except ModuleNotFoundError as error:
    raise missing_framework("cachelib", error) from None

__all__ = ["Cache"]

log = logging.getLogger("limpet.adapters.cachelib")

PREFIX: Final = "cache/"


class Cache(BaseCache):
    """A cache of cachelib on any engine of Limpet.

    Args:
        store: A URL, or a store from `limpet.sync.open`; ``LIMPET_URL`` or ``./limpet.db`` when not given. A store that
            was given is not closed.
        default_timeout: Seconds until an entry expires if `set` names none; 0 for never.
        key_prefix: What all keys start with. `clear` deletes the keys with this prefix, and no others.
        namespace: The namespace that a URL is opened with.
        ignore_delete_many_errors: See `cachelib.BaseCache`.
    """

    serializer: ClassVar[BaseSerializer] = BaseSerializer()

    def __init__(
        self,
        store: sync.Store | str | None = None,
        default_timeout: int | timedelta = 300,
        key_prefix: str = PREFIX,
        *,
        namespace: str = "default",
        ignore_delete_many_errors: bool = True,
    ) -> None:
        super().__init__(default_timeout, ignore_delete_many_errors)
        if store is not None and not isinstance(store, sync.Store | str):
            raise TypeError(
                f"a cache takes a URL, or a store from limpet.sync.open(), not something of type {type(store).__name__}"
            )
        self._prefix = check_prefix(key_prefix)
        self._is_given = isinstance(store, sync.Store)
        self._store = store if isinstance(store, sync.Store) else sync.open(store, namespace=namespace)

    def get(self, key: str) -> Any:
        """The value of a key; None when it is absent."""
        return self._load(self._store.get(self._key(key)))

    def get_many(self, *keys: str) -> list[Any]:
        """The values of several keys, in their order."""
        wanted, found = [self._key(key) for key in keys], dict[str, Any]()
        for at in range(0, len(wanted), KEYS_MAX):
            found |= self._store.get_many(wanted[at : at + KEYS_MAX])
        return [self._load(found.get(key)) for key in wanted]

    def has(self, key: str) -> bool:
        """Whether there is such a key."""
        return self._store.entry(self._key(key)) is not None

    def set(self, key: str, value: Any, timeout: int | timedelta | None = None) -> bool:
        """Store a value. False when it is too large, or the serializer cannot store it."""
        return self._put(key, value, timeout, only_new=False)

    def add(self, key: str, value: Any, timeout: int | timedelta | None = None) -> bool:
        """Store a value where there is none. Of all callers that try, one gets True."""
        return self._put(key, value, timeout, only_new=True)

    def delete(self, key: str) -> bool:
        """Delete a key. False when there was none."""
        return self._store.delete(self._key(key))

    def clear(self) -> bool:
        """Delete all keys of this cache. Other keys of the namespace stay."""
        self._store.delete_prefix(self._prefix)
        return True

    def inc(self, key: str, delta: int = 1) -> int:
        """Add to a number, in one step. Its time to live stays, and a new key does not expire."""
        return self._store.add(self._key(key), delta)

    def dec(self, key: str, delta: int = 1) -> int:
        """Subtract from a number, in one step."""
        return self.inc(key, -delta)

    def close(self) -> None:
        """Close the store that a URL has opened."""
        if not self._is_given:
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _key(self, key: str) -> str:
        return self._prefix + shorten(escape(key), KEY_BYTES_MAX - len(self._prefix.encode()))

    def _put(self, key: str, value: Any, timeout: int | timedelta | None, *, only_new: bool) -> bool:
        stored = value if type(value) is int and INT_MIN <= value <= INT_MAX else self.serializer.dumps(value)
        if stored is None:
            return False
        write = self._store.create if only_new else self._store.put
        try:
            write(self._key(key), stored, ttl=self._normalize_timeout(timeout) or None)
        except Conflict:
            return False
        except ValueTooLarge as error:
            log.warning("not cached: %s", error)
            return False
        return True

    def _load(self, stored: Any) -> Any:
        return self.serializer.loads(stored) if isinstance(stored, bytes) else stored
