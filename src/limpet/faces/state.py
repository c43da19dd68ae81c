"""The state of an agent: five functions over its PostgreSQL pool, or over any store.

Each agent ("butler", in the programs that this interface serves) has its own schema. The connections of a pool work in
one schema, and the state is kept there, in the namespace ``state``; so an agent sees only what is in its schema. Given
a store instead of a pool, the functions work on the namespace of that store.

The pool belongs to the caller. The store over it subscribes to nothing and leaves nothing running, so that the caller
can close the pool at any moment. Its writers do the work of a sweeper.
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
    """The value under a key, or None when it is absent.

    JSON null is None too; `state_list` distinguishes the two. Values of other interfaces are decoded: raw bytes as
    bytes, a record as a dict of its fields.

    Args:
        pool: The agent's pool, or a store.
        key: The key.
    """
    store = await _store_of(pool)
    return await store.get(key)


async def state_set(pool: asyncpg.Pool | Store, key: str, value: Any) -> int:
    """Put a JSON value under a key, whether or not it exists.

    Args:
        pool: The agent's pool, or a store.
        key: The key.
        value: Any JSON value.

    Returns:
        The new version: 1 for a new key, otherwise one more than before.

    Raises:
        InvalidValue: It is not a JSON value.
    """
    store = await _store_of(pool)
    entry = await store.put(key, _check_json(value))
    await _trim_after_write(store)
    return entry.version


async def state_compare_and_set(pool: asyncpg.Pool | Store, key: str, expected_version: int, new_value: Any) -> int:
    """Put a JSON value under a key that has the expected version.

    Args:
        pool: The agent's pool, or a store.
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
        raise InvalidValue(f"expected_version must be an int, not of type {type(expected_version).__name__}")
    store = await _store_of(pool)
    # The caller may expect any int. No entry has version 0, so it stands for the ints that a store refuses.
    expected = Version(expected_version if 0 < expected_version <= INT_MAX else 0)
    try:
        entry = await store.put(key, _check_json(new_value), expect=expected)
    except Conflict as conflict:
        found = conflict.actual_version
        raise CASConflictError(key, expected_version, found, current=conflict.current) from None
    await _trim_after_write(store)
    return entry.version


async def state_delete(pool: asyncpg.Pool | Store, key: str) -> None:
    """End a key. An absent one stays absent.

    Args:
        pool: The agent's pool, or a store.
        key: The key.
    """
    store = await _store_of(pool)
    await store.delete(key)
    await _trim_after_write(store)


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
        pool: The agent's pool, or a store.
        prefix: Only the keys with this prefix. No character in it is a wildcard.
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


def _check_json(value: Any) -> Any:
    """Return the value, or raise if it is not JSON. A store accepts more: raw bytes, and records."""
    if isinstance(value, bytes | bytearray | memoryview):
        raise InvalidValue(f"state holds JSON values, not {type(value).__name__}: encode it as text first")
    return dict(value) if isinstance(value, Fields) else value


# The store over a pool ----------------------------------------------------------


class _PoolStore(Store):
    """The store over a pool of the caller, with a count of its writes."""

    writes = 0


# A pool supports no weak references. So it stays here until it is closed, or its loop is, and the next pool is opened.
_opened: dict[asyncpg.Pool, asyncio.Task[_PoolStore]] = {}


async def _store_of(pool: asyncpg.Pool | Store) -> Store:
    """The store itself, or the one that is kept over a pool."""
    if isinstance(pool, Store):
        return pool
    # No caller has a pool of a driver that was not imported.
    driver = sys.modules.get("asyncpg")
    if driver is None or not isinstance(pool, driver.Pool):
        kind = f"{type(pool).__module__}.{type(pool).__qualname__}"
        raise InvalidValue(f"the state functions take an asyncpg.Pool or a limpet.Store, not a {kind}")
    if pool.is_closing():
        _opened.pop(pool, None)
        raise Closed("the pool is closed: make a new one")
    opening = _opened.get(pool) or _open(pool)
    # A caller that is cancelled meanwhile must not cancel the opening for the others.
    return opening.result() if opening.done() else await asyncio.shield(opening)


def _open(pool: asyncpg.Pool) -> asyncio.Task[_PoolStore]:
    """Begin to open the store over a pool."""
    for known, opened in list(_opened.items()):
        if known.is_closing() or opened.get_loop().is_closed():
            _opened.pop(known, None)

    async def open_store() -> _PoolStore:
        from limpet.engines.postgres import engine as postgres

        clock = SystemClock()
        # The keys of the environment apply to every store of the process.
        keyring = find_keyring(None, None)
        # If another program has a table of that name, its readers and the agents would see different states.
        engine: Engine = await postgres.open_over(pool, claims=("state",))
        engine = engine if keyring is None else encrypt_engine(engine, keyring, clock)
        return _PoolStore(Session(engine, clock), NAMESPACE)

    def forget_failure(ended: asyncio.Task[_PoolStore]) -> None:
        if ended.cancelled() or ended.exception() is not None:
            _opened.pop(pool, None)

    opening = _opened[pool] = asyncio.get_running_loop().create_task(open_store(), name="limpet-state-opening")
    opening.add_done_callback(forget_failure)
    return opening


async def _trim_after_write(store: Store) -> None:
    """Trim the log after the first write of a pool and after every thousandth: maybe no other process does."""
    if not isinstance(store, _PoolStore):
        return
    store.writes += 1
    if store.writes % TRIM_WRITES != 1:
        return
    try:
        # One call, because the caller waits for it. It drops more than was written since the last one.
        await store._session.engine.trim(store.name, Window())
    except LimpetError as error:
        log.warning("trimming the log of %s failed and will be tried again: %s", store, reason_of(error))
