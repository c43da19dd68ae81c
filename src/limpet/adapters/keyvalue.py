"""A store for FastMCP, and for everything else that takes a store of py-key-value-aio.

`KeyValue` has all protocols of that library: get, put, delete and ttl with their forms for many keys, listing keys and
collections, destroying a collection or all, and culling. It implements the protocols and does not inherit the library's
`BaseStore`, whose methods for subclasses are private and have moved between releases.

A collection is a folder of Limpet's keys: key ``a`` of collection ``users`` is ``kv/users/a``. The value is stored as
it is, so that every other tool of Limpet shows it.

What is added to the library's contract: with ``merge``, a put that comes after a write of another merges with it,
member by member, instead of undoing it. See `limpet.adapters.seen`.

Values, names and times that cannot be stored raise the library's errors; everything else that may go wrong raises
Limpet's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, SupportsFloat, TypeVar

import msgspec

from limpet.adapters.lazy import LazyStore
from limpet.adapters.missing import missing_framework
from limpet.adapters.names import HASHED, check_prefix, escape, shorten, unescape
from limpet.adapters.seen import Seen, SeenKeys
from limpet.codec import decode, encode_field
from limpet.errors import Conflict, InvalidTTL, InvalidValue, ValueTooLarge
from limpet.keys import BATCH_WRITES_MAX, KEY_BYTES_MAX, KEYS_MAX, META_BYTES_MAX, PAGE_MAX
from limpet.merge import merge
from limpet.model import Entry
from limpet.store import Store

try:
    from key_value.aio.errors import (
        DeserializationError,
        InvalidKeyError,
        InvalidTTLError,
        SerializationError,
        ValueTooLargeError,
    )
except ModuleNotFoundError as error:
    raise missing_framework("keyvalue", error) from None

__all__ = ["KeyValue"]

DEFAULT_COLLECTION: Final = "default_collection"
COLLECTION_BYTES_MAX: Final = 300

T = TypeVar("T")


class _Place(NamedTuple):
    """Where a key of a collection is stored. ``meta`` holds the names that the key has only as hashes."""

    key: str
    meta: dict[str, str] | None


class KeyValue:
    """A store with the protocols of py-key-value-aio, on any engine of Limpet.

    Args:
        store: A URL, or a store from `limpet.open`; ``LIMPET_URL`` or ``./limpet.db`` when not given. A URL is opened
            by the first call, on its event loop. A store that was given is not closed.
        merge: Whether a put merges with what others wrote since its task has read. Otherwise it replaces the value.
        namespace: The namespace that a URL is opened with.
        prefix: What all keys start with. `destroy` deletes the keys with this prefix, and no others.
        default_collection: The collection of calls that name none.
    """

    def __init__(
        self,
        store: Store | str | None = None,
        merge: bool = True,
        *,
        namespace: str = "default",
        prefix: str = "kv/",
        default_collection: str = DEFAULT_COLLECTION,
    ) -> None:
        self.default_collection = default_collection
        self._lazy = LazyStore(store, namespace)
        self._prefix = check_prefix(prefix)
        self._seen = SeenKeys() if merge else None

    # Opening and closing ------------------------------------------------------

    async def setup(self) -> None:
        """Open the store now, to learn early that it cannot be opened."""
        await self._lazy.open()

    async def close(self) -> None:
        """Close what was opened on this event loop."""
        await self._lazy.close()

    async def __aenter__(self) -> Self:
        await self.setup()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # One key ------------------------------------------------------------------

    async def get(self, key: str, *, collection: str | None = None) -> dict[str, Any] | None:
        """Get the value of a key; None when it is absent."""
        entry = await self._read(self._place(collection, key))
        return None if entry is None else _value_of(entry)

    async def ttl(self, key: str, *, collection: str | None = None) -> tuple[dict[str, Any] | None, float | None]:
        """Get the value and in how many seconds it expires; None for never."""
        entry = await self._read(self._place(collection, key))
        return (None, None) if entry is None else (_value_of(entry), await self._remaining_s(entry))

    async def put(
        self, key: str, value: Mapping[str, Any], *, collection: str | None = None, ttl: SupportsFloat | None = None
    ) -> None:
        """Store a value, merged with what others wrote since this task has read."""
        place, given, ttl_s = self._place(collection, key), _check_value(value), _check_ttl(ttl)
        with _as_their_errors(key, collection):
            await self._write(await self._lazy.open(), place, given, ttl_s)

    async def delete(self, key: str, *, collection: str | None = None) -> bool:
        """Delete a key. False when there was none."""
        place = self._place(collection, key)
        deleted = await (await self._lazy.open()).delete(place.key)
        self._note(place.key, None)
        return deleted

    # Many keys ----------------------------------------------------------------

    async def get_many(self, keys: Sequence[str], *, collection: str | None = None) -> list[dict[str, Any] | None]:
        """Get the values of several keys, in their order."""
        found = await self._read_many(keys, collection)
        return [None if entry is None else _value_of(entry) for entry in found]

    async def ttl_many(
        self, keys: Sequence[str], *, collection: str | None = None
    ) -> list[tuple[dict[str, Any] | None, float | None]]:
        """Get the values of several keys and in how many seconds they expire."""
        found = await self._read_many(keys, collection)
        return [
            (None, None) if entry is None else (_value_of(entry), await self._remaining_s(entry)) for entry in found
        ]

    async def put_many(
        self,
        keys: Sequence[str],
        values: Sequence[Mapping[str, Any]],
        *,
        collection: str | None = None,
        ttl: SupportsFloat | None = None,
    ) -> None:
        """Store several values. Each is merged on its own, and after an error some of them may be stored."""
        if len(keys) != len(values):
            raise ValueError(f"put_many takes a value for each key, not {len(values)} values for {len(keys)} keys")
        ttl_s = _check_ttl(ttl)
        # Check everything before anything is written.
        given = {
            self._place(collection, key).key: (key, _check_value(value))
            for key, value in zip(keys, values, strict=True)
        }
        for some in _slices(list(given.values()), BATCH_WRITES_MAX):
            if not await self._put_batch(some, collection, ttl_s):
                for key, value in some:
                    await self.put(key, value, collection=collection, ttl=ttl_s)

    async def delete_many(self, keys: Sequence[str], *, collection: str | None = None) -> int:
        """Delete several keys. Returns how many there were."""
        store, deleted = await self._lazy.open(), 0
        wanted = list(dict.fromkeys(self._place(collection, key).key for key in keys))
        for some in _slices(wanted, BATCH_WRITES_MAX):
            draft = store.batch()
            for each in some:
                draft.delete(each)
            commit = await draft.commit()
            deleted += sum(entry is not None for entry in commit.ended)
            for each in some:
                self._note(each, None)
        return deleted

    # Listing and destroying -----------------------------------------------------

    async def keys(self, collection: str | None = None, *, limit: int | None = None) -> list[str]:
        """List the keys of a collection, all of them without a limit."""
        store, folder = await self._lazy.open(), self._folder(collection)[0]
        found: list[str] = []
        after: str | None = None
        while limit is None or len(found) < limit:
            count = PAGE_MAX if limit is None else min(PAGE_MAX, limit - len(found))
            page = await store.keys(folder, limit=count, after=after)
            found += await self._names(store, page.keys, folder)
            after = page.cursor
            if not page.truncated:
                break
        return found

    async def collections(self, *, limit: int | None = None) -> list[str]:
        """List the collections that have keys, all of them without a limit."""
        store = await self._lazy.open()
        found: list[str] = []
        after: str | None = None
        while limit is None or len(found) < limit:
            count = PAGE_MAX if limit is None else min(PAGE_MAX, limit - len(found))
            page = await store.children(self._prefix, limit=count, after=after)
            for child in page.children:
                name = await self._collection_name(store, child.key)
                found += [] if name is None else [name]
            after = page.cursor
            if not page.truncated:
                break
        return found

    async def destroy_collection(self, collection: str) -> bool:
        """Delete all keys of a collection. False when there were none."""
        return await self._delete_prefix(self._folder(collection)[0]) > 0

    async def destroy(self) -> bool:
        """Delete the keys of all collections. Other keys of the namespace stay."""
        await self._delete_prefix(self._prefix)
        return True

    async def cull(self) -> None:
        """End the entries that have expired. Happens by itself within two seconds."""
        await (await self._lazy.open()).sweep()

    # Keys and names -------------------------------------------------------------

    def _folder(self, collection: str | None) -> tuple[str, dict[str, str]]:
        """The prefix of a collection's keys, and its name if the prefix has only a hash of it."""
        escaped = escape(_check_name(collection or self.default_collection, "collection"))
        part = shorten(escaped, COLLECTION_BYTES_MAX)
        return f"{self._prefix}{part}/", {} if part == escaped else {"collection": escaped}

    def _place(self, collection: str | None, key: str) -> _Place:
        folder, meta = self._folder(collection)
        escaped = escape(_check_name(key, "key"))
        part = shorten(escaped, KEY_BYTES_MAX - len(folder.encode()))
        if part != escaped:
            meta = {**meta, "key": escaped}
        if len(msgspec.json.encode(meta)) > META_BYTES_MAX:
            raise InvalidKeyError(f"a key and its collection have at most {META_BYTES_MAX:,} bytes together")
        return _Place(folder + part, meta or None)

    async def _names(self, store: Store, keys: list[str], folder: str) -> list[str]:
        """The names of stored keys. Those of hashes are beside the values."""
        parts = [key.removeprefix(folder) for key in keys]
        hashed = [folder + part for part in parts if part.startswith(HASHED)]
        known: dict[str, str] = {}
        for some in _slices(hashed, KEYS_MAX):
            known |= {entry.key: entry.meta["key"] for entry in await store.entries(some) if entry is not None}
        # A hashed key that has expired since it was listed has no name any more.
        names = [known.get(folder + part) if part.startswith(HASHED) else part for part in parts]
        return [unescape(name) for name in names if name is not None]

    async def _collection_name(self, store: Store, folder: str) -> str | None:
        part = folder.removeprefix(self._prefix).removesuffix("/")
        if not part.startswith(HASHED):
            return unescape(part)
        async for entry in store.scan(folder, limit=1):
            return unescape(entry.meta["collection"])
        return None

    # Reading and writing ------------------------------------------------------

    async def _read(self, place: _Place) -> Entry | None:
        entry = await (await self._lazy.open()).entry(place.key)
        self._note(place.key, entry)
        return entry

    async def _read_many(self, keys: Sequence[str], collection: str | None) -> list[Entry | None]:
        store, found = await self._lazy.open(), list[Entry | None]()
        wanted = [self._place(collection, key).key for key in keys]
        for some in _slices(wanted, KEYS_MAX):
            found += await store.entries(some)
        for key, entry in zip(wanted, found, strict=True):
            self._note(key, entry)
        return found

    def _note(self, key: str, entry: Entry | None) -> None:
        if self._seen is not None:
            self._seen.note(key, Seen.of(entry))

    async def _write(self, store: Store, place: _Place, value: dict[str, Any], ttl_s: float | None) -> None:
        seen = None if self._seen is None else self._seen.get(place.key)
        if seen is None:
            self._note(place.key, await store.put(place.key, value, ttl=ttl_s, meta=place.meta))
            return
        if (expected := seen.expectation) is not None:
            # Nearly always no other task wrote, and this is one round trip.
            with contextlib.suppress(Conflict):
                entry = await store.put(place.key, value, ttl=ttl_s, meta=place.meta, expect=expected)
                self._note(place.key, entry)
                return
        await self._merge(store, place, seen, value, ttl_s)

    async def _merge(self, store: Store, place: _Place, seen: Seen, value: dict[str, Any], ttl_s: float | None) -> None:
        base, stored = seen.value, encode_field(value)

        def change(found: Any) -> dict[str, Any]:
            # What has expired or was deleted has no member to keep. Where both changed a member, the later put wins.
            merged = merge(base, decode(stored), found, lambda clash: clash.mine) if type(found) is dict else value
            assert isinstance(merged, dict)
            return merged

        entry = await store.update(place.key, change, ttl=ttl_s, meta=place.meta)
        assert self._seen is not None
        assert entry is not None
        # The caller knows only what it wrote. With the members of others as its base, its next write would delete them.
        self._seen.note(place.key, Seen(stored, entry.revision if entry.stored == stored else None))

    async def _put_batch(
        self, given: list[tuple[str, dict[str, Any]]], collection: str | None, ttl_s: float | None
    ) -> bool:
        """Write keys that this task has not seen in one batch. False when they have to be written one by one."""
        places = [self._place(collection, key) for key, _ in given]
        if self._seen is not None and any(self._seen.get(place.key) is not None for place in places):
            return False
        draft = (await self._lazy.open()).batch()
        try:
            for place, (_, value) in zip(places, given, strict=True):
                draft.put(place.key, value, ttl=ttl_s, meta=place.meta)
            commit = await draft.commit()
        except (InvalidValue, InvalidTTL, ValueTooLarge):
            # One of them is wrong, or all together are too large. Alone, each has the right error.
            return False
        for place, entry in zip(places, commit.entries, strict=True):
            self._note(place.key, entry)
        return True

    async def _delete_prefix(self, prefix: str) -> int:
        deleted = await (await self._lazy.open()).delete_prefix(prefix)
        if self._seen is not None:
            self._seen.note_deleted(prefix)
        return deleted

    async def _remaining_s(self, entry: Entry) -> float | None:
        if entry.expires_ms is None:
            return None
        clock = (await self._lazy.open())._session.clock
        # This process's clock may be ahead of the engine's, for which the entry has not expired.
        return max(0.0, (entry.expires_ms - clock.now_ms()) / 1000)


# What callers send, and what they get -----------------------------------------------


def _check_name(name: object, what: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"a {what} is a str, not something of type {type(name).__name__}")
    return name


def _check_value(value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"a value is a mapping with str keys, not something of type {type(value).__name__}")
    return dict(value)


def _check_ttl(ttl: Any) -> float | None:
    if ttl is None:
        return None
    try:
        seconds = -1.0 if isinstance(ttl, bool) else float(ttl)
    except (TypeError, ValueError):
        seconds = -1.0
    if not seconds > 0:
        raise InvalidTTLError(ttl=ttl, extra_info={"type": type(ttl).__name__})
    return seconds


def _value_of(entry: Entry) -> dict[str, Any]:
    value = entry.value
    if type(value) is not dict:
        raise DeserializationError(f"{entry.key!r} holds no JSON object, so this adapter has not written it")
    return value


@contextlib.contextmanager
def _as_their_errors(key: str, collection: str | None) -> Iterator[None]:
    """Raise what callers of the library expect for a value that cannot be stored."""
    try:
        yield
    except InvalidValue as error:
        raise SerializationError(str(error)) from error
    except InvalidTTL as error:
        raise InvalidTTLError(ttl=None, extra_info={"problem": str(error)}) from error
    except ValueTooLarge as error:
        raise ValueTooLargeError(error.size_bytes, error.limit_bytes, collection, key) from error


def _slices(items: list[T], count: int) -> Iterator[list[T]]:
    return (items[at : at + count] for at in range(0, len(items), count))
