"""Verbs on many keys: reading several of them at one moment."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from limpet.errors import InvalidValue
from limpet.keys import KEYS_MAX, check_key
from limpet.model import Entry

if TYPE_CHECKING:
    from limpet.store import Store

__all__ = ["read_entries", "take_keys"]


async def read_entries(store: Store, keys: list[str]) -> dict[str, Entry | None]:
    """Read several keys in one call of the engine, each of them once. The result has their order."""
    wanted = list(dict.fromkeys(keys))
    if not wanted:
        store._session.check_open()
        return {}
    engine = store._session.engine
    found = await store._session.retry(lambda: engine.read(store.name, wanted))
    return dict(zip(wanted, found, strict=True))


def take_keys(keys: Iterable[str]) -> list[str]:
    """List and check the keys of a caller. They are limited, because all their values are in memory together."""
    if isinstance(keys, str | bytes):
        raise InvalidValue("several keys are a list, such as ['a', 'b'], not one key")
    # At most one more than allowed, so that an iterator without an end is refused as well.
    taken = [check_key(key) for key in itertools.islice(keys, KEYS_MAX + 1)]
    if len(taken) > KEYS_MAX:
        raise InvalidValue(f"one read takes up to {KEYS_MAX:,} keys: read them in parts")
    return taken
