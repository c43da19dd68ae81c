"""Storages for limits, the library behind slowapi and Flask-Limiter: rates that all processes count together.

`Storage` and `AsyncStorage` serve all strategies of the library. A fixed window is a counter with a time to live. A
moving window and a sliding one are a value each, changed in one step: of any number of callers at the same moment, a
limit of five lets five through, and a hit that is refused writes nothing. The strategies are written once, as
coroutines on a store.

After an import of this module, the library makes the storages from strings: ``limpet+sqlite:///limits.db``, and
``async+limpet+sqlite:///limits.db``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import floor
from typing import Any, Final, TypedDict, TypeVar

import limits.aio.storage
import limits.storage
from limits.storage.base import TimestampedSlidingWindow

from limpet import store as _store
from limpet import sync
from limpet.adapters.lazy import LazyStore
from limpet.adapters.names import check_prefix, escape, shorten
from limpet.clock import has_loop
from limpet.errors import LimpetError
from limpet.keys import KEY_BYTES_MAX
from limpet.model import UNCHANGED

__all__ = ["AsyncStorage", "Storage"]

PREFIX: Final = "limits/"
SCHEMES: Final = [
    f"limpet+{scheme}"
    for scheme in ("memory", "sqlite", "postgresql", "postgres", "redis", "rediss", "nats", "http", "https")
]

R = TypeVar("R")
Work = Callable[[_store.Store], Coroutine[Any, Any, R]]


_Hit = Sequence[Any]
"""A hit of a moving window: when it was, and what it costs."""


class _Windows(TypedDict):
    """The hits of a sliding window: in the window with this number, and in the one before."""

    number: int
    current: int
    previous: int


class _Hits:
    """What is counted, and how. Each method gives the work to do on a store."""

    def __init__(self, prefix: str) -> None:
        self._prefix = check_prefix(prefix)

    def _key(self, kind: str, key: str) -> str:
        folder = f"{self._prefix}{kind}/"
        return folder + shorten(escape(key), KEY_BYTES_MAX - len(folder.encode()))

    def incr(self, key: str, expiry: float, amount: int) -> Work[int]:
        return lambda store: store.add(self._key("fixed", key), amount, ttl_if_new=expiry)

    def get(self, key: str) -> Work[int]:
        return lambda store: store.get(self._key("fixed", key), 0)

    def get_expiry(self, key: str) -> Work[float]:
        async def work(store: _store.Store) -> float:
            entry = await store.entry(self._key("fixed", key))
            return time.time() if entry is None or entry.expires_at is None else entry.expires_at.timestamp()

        return work

    def check(self) -> Work[bool]:
        async def work(store: _store.Store) -> bool:
            await store.entry(self._key("fixed", ""))
            return True

        return work

    def reset(self) -> Work[int]:
        return lambda store: store.delete_prefix(self._prefix)

    def clear(self, key: str, *kinds: str) -> Work[None]:
        async def work(store: _store.Store) -> None:
            draft = store.batch()
            for kind in kinds:
                draft.delete(self._key(kind, key))
            await draft.commit()

        return work

    def hit_moving(self, key: str, limit: int, expiry: float, amount: int) -> Work[bool]:
        async def work(store: _store.Store) -> bool:
            accepted = False

            def change(found: list[_Hit] | None) -> Any:
                nonlocal accepted
                now = time.time()
                recent = [hit for hit in found or [] if hit[0] >= now - expiry]
                accepted = sum(count for _, count in recent) + amount <= limit
                return [*recent, (now, amount)] if accepted else UNCHANGED

            if amount <= limit:
                await store.update(self._key("moving", key), change, ttl=expiry)
            return accepted

        return work

    def get_moving(self, key: str, expiry: float) -> Work[tuple[float, int]]:
        async def work(store: _store.Store) -> tuple[float, int]:
            now = time.time()
            found: list[_Hit] = await store.get(self._key("moving", key), [])
            recent = [hit for hit in found if hit[0] > now - expiry]
            return min((at for at, _ in recent), default=now), sum(count for _, count in recent)

        return work

    def hit_sliding(self, key: str, limit: int, expiry: float, amount: int) -> Work[bool]:
        async def work(store: _store.Store) -> bool:
            accepted = False

            def change(found: _Windows | None) -> Any:
                nonlocal accepted
                now = time.time()
                windows = _windows_at(found, now, expiry)
                previous, remaining_s, current, _ = _sliding(windows, now, expiry)
                accepted = floor(previous * remaining_s / expiry + current) + amount <= limit
                return {**windows, "current": current + amount} if accepted else UNCHANGED

            if amount <= limit:
                await store.update(self._key("sliding", key), change, ttl=2 * expiry)
            return accepted

        return work

    def get_sliding(self, key: str, expiry: float) -> Work[tuple[int, float, int, float]]:
        async def work(store: _store.Store) -> tuple[int, float, int, float]:
            found, now = await store.get(self._key("sliding", key)), time.time()
            return _sliding(_windows_at(found, now, expiry), now, expiry)

        return work


def _windows_at(found: _Windows | None, now: float, expiry: float) -> _Windows:
    """The windows of now. What was the current one may be the previous one by now, or forgotten."""
    number = int(now / expiry)
    if found is None or found["number"] not in (number, number - 1):
        return {"number": number, "current": 0, "previous": 0}
    if found["number"] == number:
        return found
    return {"number": number, "current": 0, "previous": found["current"]}


def _sliding(windows: _Windows, now: float, expiry: float) -> tuple[int, float, int, float]:
    """Both counts, and for how long each counts still, as the library wants them."""
    remaining_s = (1 - now / expiry % 1) * expiry
    previous = windows["previous"]
    return previous, remaining_s if previous else 0.0, windows["current"], remaining_s + expiry


def _url(given: str | None) -> str | None:
    return None if given is None else given.removeprefix("async+").removeprefix("limpet+")


def _off_loop(call: Callable[[], R]) -> R:
    """Call in a thread that has no event loop. slowapi counts without await, also in coroutines."""
    if not has_loop():
        return call()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


class Storage(
    limits.storage.Storage,
    limits.storage.MovingWindowSupport,
    limits.storage.SlidingWindowCounterSupport,
    TimestampedSlidingWindow,
):
    """A storage for `limits.strategies`.

    Args:
        uri: A URL, with or without ``limpet+`` in front, or a store from `limpet.sync.open`; ``LIMPET_URL`` or
            ``./limpet.db`` when not given. A store that was given is not closed.
        wrap_exceptions: Whether errors of Limpet come as `limits.errors.StorageError`.
        namespace: The namespace that a URL is opened with.
        prefix: What all keys start with. `reset` deletes the keys with this prefix, and no others.
    """

    STORAGE_SCHEME = SCHEMES

    def __init__(
        self,
        uri: sync.Store | str | None = None,
        wrap_exceptions: bool = False,
        *,
        namespace: str = "default",
        prefix: str = PREFIX,
    ) -> None:
        if uri is not None and not isinstance(uri, sync.Store | str):
            raise TypeError(
                f"a storage takes a URL, or a store from limpet.sync.open(), not something of type {type(uri).__name__}"
            )
        super().__init__(uri if isinstance(uri, str) else None, wrap_exceptions)
        self._hits = _Hits(prefix)
        self._is_given = isinstance(uri, sync.Store)
        self._store = (
            uri if isinstance(uri, sync.Store) else _off_loop(lambda: sync.open(_url(uri), namespace=namespace))
        )

    @property
    def base_exceptions(self) -> type[Exception]:
        """What `wrap_exceptions` wraps."""
        return LimpetError

    def incr(self, key: str, expiry: float, amount: int = 1) -> int:
        """Count hits of a fixed window, which begins with the first."""
        return self._run(self._hits.incr(key, expiry, amount))

    def get(self, key: str) -> int:
        """The hits of a fixed window."""
        return self._run(self._hits.get(key))

    def get_expiry(self, key: str) -> float:
        """When a fixed window ends, in seconds since 1970."""
        return self._run(self._hits.get_expiry(key))

    def check(self) -> bool:
        """Whether the store answers."""
        try:
            return self._run(self._hits.check())
        except LimpetError:
            return False

    def reset(self) -> int | None:
        """Forget all hits. Returns how many keys there were."""
        return self._run(self._hits.reset())

    def clear(self, key: str) -> None:
        """Forget the hits of a fixed or moving window."""
        self._run(self._hits.clear(key, "fixed", "moving"))

    def acquire_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> bool:
        """Count hits of a moving window, if that many are still allowed."""
        return self._run(self._hits.hit_moving(key, limit, expiry, amount))

    def get_moving_window(self, key: str, limit: int, expiry: int) -> tuple[float, int]:
        """When the oldest hit that counts was, and how many count."""
        return self._run(self._hits.get_moving(key, expiry))

    def acquire_sliding_window_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> bool:
        """Count hits of a sliding window, if that many are still allowed."""
        return self._run(self._hits.hit_sliding(key, limit, expiry, amount))

    def get_sliding_window(self, key: str, expiry: int) -> tuple[int, float, int, float]:
        """The hits of the previous and of the current window, each with the seconds for which it counts."""
        return self._run(self._hits.get_sliding(key, expiry))

    def clear_sliding_window(self, key: str, expiry: int) -> None:
        """Forget the hits of a sliding window."""
        self._run(self._hits.clear(key, "sliding"))

    def close(self) -> None:
        """Close the store that a URL has opened."""
        if not self._is_given:
            _off_loop(self._store.close)

    def _run(self, work: Work[R]) -> R:
        return _off_loop(lambda: self._store._runner.run(work(self._store._twin)))


class AsyncStorage(
    limits.aio.storage.Storage,
    limits.aio.storage.MovingWindowSupport,
    limits.aio.storage.SlidingWindowCounterSupport,
    TimestampedSlidingWindow,
):
    """A storage for `limits.aio.strategies`. The arguments are those of `Storage`, with a store from `limpet.open`.

    A URL is opened by the first call, on its event loop.
    """

    STORAGE_SCHEME = [f"async+{scheme}" for scheme in SCHEMES]  # noqa: RUF012 - the library declares it so

    def __init__(
        self,
        uri: _store.Store | str | None = None,
        wrap_exceptions: bool = False,
        *,
        namespace: str = "default",
        prefix: str = PREFIX,
    ) -> None:
        super().__init__(uri if isinstance(uri, str) else None, wrap_exceptions)
        self._hits = _Hits(prefix)
        self._lazy = LazyStore(_url(uri) if isinstance(uri, str) else uri, namespace)

    @property
    def base_exceptions(self) -> type[Exception]:
        """What `wrap_exceptions` wraps."""
        return LimpetError

    async def incr(self, key: str, expiry: float, amount: int = 1) -> int:
        """Count hits of a fixed window, which begins with the first."""
        return await self._run(self._hits.incr(key, expiry, amount))

    async def get(self, key: str) -> int:
        """The hits of a fixed window."""
        return await self._run(self._hits.get(key))

    async def get_expiry(self, key: str) -> float:
        """When a fixed window ends, in seconds since 1970."""
        return await self._run(self._hits.get_expiry(key))

    async def check(self) -> bool:
        """Whether the store answers."""
        try:
            return await self._run(self._hits.check())
        except LimpetError:
            return False

    async def reset(self) -> int | None:
        """Forget all hits. Returns how many keys there were."""
        return await self._run(self._hits.reset())

    async def clear(self, key: str) -> None:
        """Forget the hits of a fixed or moving window."""
        await self._run(self._hits.clear(key, "fixed", "moving"))

    async def acquire_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> bool:
        """Count hits of a moving window, if that many are still allowed."""
        return await self._run(self._hits.hit_moving(key, limit, expiry, amount))

    async def get_moving_window(self, key: str, limit: int, expiry: int) -> tuple[float, int]:
        """When the oldest hit that counts was, and how many count."""
        return await self._run(self._hits.get_moving(key, expiry))

    async def acquire_sliding_window_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> bool:
        """Count hits of a sliding window, if that many are still allowed."""
        return await self._run(self._hits.hit_sliding(key, limit, expiry, amount))

    async def get_sliding_window(self, key: str, expiry: int) -> tuple[int, float, int, float]:
        """The hits of the previous and of the current window, each with the seconds for which it counts."""
        return await self._run(self._hits.get_sliding(key, expiry))

    async def clear_sliding_window(self, key: str, expiry: int) -> None:
        """Forget the hits of a sliding window."""
        await self._run(self._hits.clear(key, "sliding"))

    async def close(self) -> None:
        """Close what was opened on this event loop."""
        await self._lazy.close()

    async def _run(self, work: Work[R]) -> R:
        return await work(await self._lazy.open())
