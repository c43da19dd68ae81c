"""The state of a butler: five functions over its PostgreSQL pool, or over any store.

Each butler has a schema of its own. A pool's connections work in one, and the state is kept
there, in the namespace ``state``; so a butler sees what is in its schema and nothing else.
Given a store instead of a pool, the functions work on that store's namespace.

A pool is its owner's. The store over it listens to nothing and leaves nothing running, so
that the owner can close the pool at any moment. What a sweeper would do, its writers do.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import TYPE_CHECKING, Any, Final, Literal, overload

from limpet.clock import SystemClock
from limpet.codec import INT_MAX, Fields
from limpet.engine import Engine
from limpet.errors import Closed, Conflict, InvalidValue, LimpetError
from limpet.keys import PAGE_MAX
from limpet.model import Entry, Version, Window
from limpet.opening import encrypt_engine, find_keyring
from limpet.retry import reason_of
from limpet.session import Session
from limpet.store import Store

if TYPE_CHECKING:
    import asyncpg

__all__ = ["CASConflictError", "state_compare_and_set", "state_delete", "state_get", "state_list", "state_set"]

log = logging.getLogger("limpet.faces.state")

NAMESPACE: Final = "state"
TRIM_WRITES: Final = 1000


class CASConflictError(Conflict):
    """The key does not have the version that was expected. Nothing was written.

    It is a `Conflict`, so ``current`` is the entry found: its value and its version, from one moment.

    Attributes:
        key: The key.
        expected_version: The version that the caller expected.
        actual_version: The version found, or None when the key does not exist.
    """

    def __init__(
        self, key: str, expected_version: int, actual_version: int | None, *, current: Entry | None = None
    ) -> None:
        super().__init__(key, expected=f"version {expected_version}", current=current)
        found = "the key does not exist" if actual_version is None else f"found version {actual_version}"
        self.args = (f"conflict on {key!r}: expected version {expected_version}, {found}. Read it again and decide",)
        self.expected_version = expected_version
        self.actual_version = actual_version


async def state_get(pool: asyncpg.Pool | Store, key: str) -> Any:
    """The value under a key, or None when there is none.

    JSON null is None too; `state_list` tells the two apart. What others put there comes
    decoded: raw bytes as bytes, a record as a dict of its fields.

    Args:
        pool: The butler's pool, or a store.
        key: The key.
    """
    store = await _store_of(pool)
    return await store.get(key)


async def state_set(pool: asyncpg.Pool | Store, key: str, value: Any) -> int:
    """Put a JSON value under a key, whatever is there.

    Args:
        pool: The butler's pool, or a store.
        key: The key.
        value: Any JSON value.

    Returns:
        The new version: 1 for a new key, otherwise one more than before.

    Raises:
        InvalidValue: It is not a JSON value.
    """
    store = await _store_of(pool)
    entry = await store.put(key, _json(value))
    await _written(store)
    return entry.version


async def state_compare_and_set(pool: asyncpg.Pool | Store, key: str, expected_version: int, new_value: Any) -> int:
    """Put a JSON value under a key that has the expected version.

    Args:
        pool: The butler's pool, or a store.
        key: The key.
        expected_version: What `state_set`, or this function, returned.
        new_value: Any JSON value.

    Returns:
        The new version.

    Raises:
        CASConflictError: The key has another version, or does not exist.
        InvalidValue: It is not a JSON value, or the version is not an int.
    """
    if type(expected_version) is not int:
        raise InvalidValue(f"expected_version is an int, not of type {type(expected_version).__name__}")
    store = await _store_of(pool)
    # A butler may expect any int. No entry is ever of version 0, so that stands for those that a store refuses.
    expected = Version(expected_version if 0 < expected_version <= INT_MAX else 0)
    try:
        entry = await store.put(key, _json(new_value), expect=expected)
    except Conflict as conflict:
        found = conflict.actual_version
        raise CASConflictError(key, expected_version, found, current=conflict.current) from None
    await _written(store)
    return entry.version


async def state_delete(pool: asyncpg.Pool | Store, key: str) -> None:
    """End a key. A missing one stays missing.

    Args:
        pool: The butler's pool, or a store.
        key: The key.
    """
    store = await _store_of(pool)
    await store.delete(key)
    await _written(store)


@overload
async def state_list(
    pool: asyncpg.Pool | Store, prefix: str | None = None, keys_only: Literal[True] = True
) -> list[str]: ...


@overload
async def state_list(
    pool: asyncpg.Pool | Store, prefix: str | None = None, *, keys_only: Literal[False]
) -> list[dict[str, Any]]: ...


@overload
async def state_list(
    pool: asyncpg.Pool | Store, prefix: str | None = None, keys_only: bool = True
) -> list[str] | list[dict[str, Any]]: ...


async def state_list(
    pool: asyncpg.Pool | Store, prefix: str | None = None, keys_only: bool = True
) -> list[str] | list[dict[str, Any]]:
    """All keys, or all keys with their values, in the order of their code points.

    Args:
        pool: The butler's pool, or a store.
        prefix: Only the keys that start so. No character in it is a wildcard.
        keys_only: Whether to leave the values out.

    Returns:
        The keys; or a ``{"key": …, "value": …}`` for each.
    """
    start = "" if prefix is None else prefix
    store = await _store_of(pool)
    if not keys_only:
        return [{"key": entry.key, "value": entry.value} async for entry in store.scan(start)]
    page = await store.keys(start, limit=PAGE_MAX)
    keys = page.keys
    while page.truncated:
        page = await store.keys(start, limit=PAGE_MAX, after=page.cursor)
        keys += page.keys
    return keys


def _json(value: Any) -> Any:
    """The value, if a butler may write it. A store takes more: raw bytes, and records."""
    if isinstance(value, bytes | bytearray | memoryview):
        raise InvalidValue(f"state holds JSON values, not {type(value).__name__}: encode it as text first")
    return dict(value) if isinstance(value, Fields) else value


# The store over a pool ----------------------------------------------------------


class _PoolStore(Store):
    """The store over somebody's pool, with a count of what was written here."""

    writes = 0


# A pool cannot be referred to weakly. So it is kept until it is closed, or its loop is, and
# let go when the next one comes.
_opened: dict[asyncpg.Pool, asyncio.Task[_PoolStore]] = {}


async def _store_of(pool: asyncpg.Pool | Store) -> Store:
    """The store itself, or the one that is kept over a pool."""
    if isinstance(pool, Store):
        return pool
    # Nobody has a pool of a driver that was not imported.
    driver = sys.modules.get("asyncpg")
    if driver is None or not isinstance(pool, driver.Pool):
        kind = f"{type(pool).__module__}.{type(pool).__qualname__}"
        raise InvalidValue(f"the state functions take an asyncpg.Pool or a limpet.Store, not a {kind}")
    if pool.is_closing():
        _opened.pop(pool, None)
        raise Closed("the pool is closed: make another")
    opening = _opened.get(pool) or _open(pool)
    # Whoever is cancelled while it opens leaves the opening to the others.
    return opening.result() if opening.done() else await asyncio.shield(opening)


def _open(pool: asyncpg.Pool) -> asyncio.Task[_PoolStore]:
    """Begin to open the store over a pool that has none."""
    for known, opened in list(_opened.items()):
        if known.is_closing() or opened.get_loop().is_closed():
            _opened.pop(known, None)

    async def over() -> _PoolStore:
        from limpet.engines.postgres import engine as postgres

        clock = SystemClock()
        # Whoever has set the keys for a process means all that it stores.
        keyring = find_keyring(None, None)
        # Butlers and whatever reads another program's table of that name would each see a state of their own.
        engine: Engine = await postgres.open_over(pool, claims=("state",))
        engine = engine if keyring is None else encrypt_engine(engine, keyring, clock)
        return _PoolStore(Session(engine, clock), NAMESPACE)

    def forget_failure(ended: asyncio.Task[_PoolStore]) -> None:
        if ended.cancelled() or ended.exception() is not None:
            _opened.pop(pool, None)

    opening = _opened[pool] = asyncio.get_running_loop().create_task(over(), name="limpet-state-opening")
    opening.add_done_callback(forget_failure)
    return opening


async def _written(store: Store) -> None:
    """Trim the log after a pool's first write and after every thousandth from there: perhaps nobody else does."""
    if not isinstance(store, _PoolStore):
        return
    store.writes += 1
    if store.writes % TRIM_WRITES != 1:
        return
    try:
        # Once, which drops more than was written since. The caller waits, and should not wait long.
        await store._session.engine.trim(store.name, Window())
    except LimpetError as error:
        log.warning("trimming the log of %s failed and will be tried again: %s", store, reason_of(error))
