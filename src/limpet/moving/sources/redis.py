"""Redis hashes and strings under a prefix, such as ``gbe:state:``.

The part of a name before the first colon is the namespace, and the rest is the key: so a store without hash tags has
them under the same names. Adopted in place, into such a store on the same server, each hash is renamed before it is
written by the store, which leaves alone what other programs have written. The renamed one is removed when all is done.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Final, Self
from urllib.parse import urlsplit

from limpet.codec import Stored
from limpet.errors import InvalidValue, Unavailable
from limpet.moving.entries import Brought, Rejected
from limpet.moving.sources.values import as_item
from limpet.urls import Address

__all__ = ["RedisHashes"]

ASIDE: Final = "before-limpet:"
SCANNED: Final = 200


class RedisHashes:
    """The hashes and strings whose names start with a prefix."""

    def __init__(self, client: Any, prefix: str, shown: str, is_in_place: bool) -> None:
        self._client = client
        self._prefix = prefix
        self.shown = shown
        self._is_in_place = self.needs_place = is_in_place
        self._renames = False

    @classmethod
    async def open(cls, address: Address, into: Address) -> Self:
        """Connect, and check that there is a prefix."""
        address.allow("prefix")
        prefix = address.options.get("prefix", "")
        if ":" not in prefix:
            raise InvalidValue(
                f"{address}: name the hashes by a prefix that ends its first part with a colon, as in "
                "redis://host:6379/0?prefix=gbe:state:"
            )
        try:
            from redis.asyncio import Redis
            from redis.exceptions import RedisError
        except ModuleNotFoundError as missing:
            raise InvalidValue(f"{address} needs redis: pip install 'limpet[redis]'") from missing
        client = Redis.from_url(address.url.partition("?")[0])
        try:
            await client.ping()
        except (RedisError, OSError) as error:
            raise Unavailable(f"{address} cannot be reached: {type(error).__name__}") from None
        return cls(client, prefix, str(address), _is_same_place(address, into))

    async def count(self) -> int | None:
        """See `ForeignData.count`. The names would have to be counted one by one."""
        return None

    async def read(self) -> AsyncIterator[Brought | Rejected]:
        """See `ForeignData.read`."""
        if self._is_in_place:
            # What an earlier run has renamed, and perhaps not written.
            async for item in self._read_under(ASIDE + self._prefix, len(ASIDE), renames=False):
                yield item
        async for item in self._read_under(self._prefix, 0, renames=self._renames):
            yield item

    async def _read_under(self, prefix: str, skip: int, *, renames: bool) -> AsyncIterator[Brought | Rejected]:
        pattern = re.sub(r"([\\*?\[\]])", r"\\\1", prefix) + "*"
        cursor = 0
        while True:
            cursor, names = await self._client.scan(cursor, match=pattern, count=SCANNED)
            if self._is_in_place and not skip:
                names = await self._leave_ours(names)
            shown = {name: name[skip:] for name in names}
            if renames:
                renamed = await self._all([("RENAMENX", name, ASIDE.encode() + name) for name in names], may_fail=True)
                # An error is one of a name that has gone, or that the scan has given twice.
                shown = {ASIDE.encode() + name: name for name, done in zip(names, renamed, strict=True) if done == 1}
            for item in await self._read_names(shown):
                yield item
            if not cursor:
                return

    async def _leave_ours(self, names: list[bytes]) -> list[bytes]:
        """Those of some names that are not the store's own."""
        parts = [name.partition(b":") for name in names]
        heads = await self._all([("HEXISTS", b"limpet:%b:data" % namespace, key) for namespace, _, key in parts])
        return [name for name, is_ours in zip(names, heads, strict=True) if not is_ours]

    async def _read_names(self, shown: dict[bytes, bytes]) -> list[Brought | Rejected]:
        """The hashes and strings of some names, each with what is left of its time."""
        kinds = await self._all([("TYPE", name) for name in shown])
        wanted = {name: kind for name, kind in zip(shown, kinds, strict=True) if kind in (b"hash", b"string")}
        # In one transaction, so that the times to live are of the moment that TIME gives.
        commands: list[tuple[Any, ...]] = [("TIME",)]
        for name, kind in wanted.items():
            commands += [("HGETALL" if kind == b"hash" else "GET", name), ("PTTL", name)]
        (seconds, micros), *found = await self._all(commands, transaction=True)
        now_ms = int(seconds) * 1000 + int(micros) // 1000
        items: list[Brought | Rejected] = []
        for (name, kind), content, left_ms in zip(wanted.items(), found[::2], found[1::2], strict=True):
            # It may have ended since it was listed.
            if content:
                items.append(_item(shown[name], kind, content, left_ms, now_ms))
        for name, kind in zip(shown, kinds, strict=True):
            if name not in wanted and kind != b"none":
                namespace, key = _split(shown[name])
                items.append(Rejected(namespace, key, f"it is a Redis {kind.decode()}"))
        return items

    async def _all(
        self, commands: list[tuple[Any, ...]], *, transaction: bool = False, may_fail: bool = False
    ) -> list[Any]:
        """The replies to several commands, in one round trip; of one that may fail, perhaps its error."""
        from redis.exceptions import RedisError

        if not commands:
            return []
        try:
            async with self._client.pipeline(transaction=transaction) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                return list(await pipeline.execute(raise_on_error=not may_fail))
        except (RedisError, OSError) as error:
            raise Unavailable(f"{self.shown} cannot be read now: {type(error).__name__}; run it again") from error

    async def hand_over(self) -> str | None:
        """See `ForeignData.hand_over`."""
        self._renames = self._is_in_place
        return "the hashes are entries of the store, under the same names" if self._renames else None

    async def finish(self) -> None:
        """See `ForeignData.finish`."""
        if self._renames:
            pattern = re.sub(r"([\\*?\[\]])", r"\\\1", ASIDE + self._prefix) + "*"
            async for name in self._client.scan_iter(match=pattern, count=SCANNED):
                await self._client.unlink(name)

    async def close(self) -> None:
        """See `ForeignData.close`."""
        await self._client.aclose()


def _is_same_place(address: Address, into: Address) -> bool:
    """Whether the store keeps its records under the names of the hashes."""
    if into.scheme not in ("redis", "rediss") or into.options.get("hash_tag") != "none":
        return False
    one, other = (urlsplit(each.url.partition("?")[0]) for each in (address, into))
    return (one.hostname, one.port or 6379, one.path.strip("/") or "0") == (
        other.hostname,
        other.port or 6379,
        other.path.strip("/") or "0",
    )


def _split(name: bytes) -> tuple[str, str]:
    """The namespace and the key of a name."""
    namespace, _, key = name.partition(b":")
    return namespace.decode(errors="backslashreplace"), key.decode(errors="backslashreplace")


def _item(name: bytes, kind: bytes, content: Any, left_ms: int, now_ms: int) -> Brought | Rejected:
    """A hash or a string as an entry."""
    namespace, key = _split(name)
    fields = content if kind == b"hash" else {}
    updated_ms = _time_in(fields, b"updated_at")
    created_ms = _time_in(fields, b"created_at")
    return as_item(
        namespace,
        key,
        partial(_stored, content),
        version=1,
        created_ms=min(created_ms or updated_ms or now_ms, now_ms),
        updated_ms=min(updated_ms or now_ms, now_ms),
        expires_ms=now_ms + left_ms if left_ms > 0 else None,
    )


def _stored(found: Any) -> Stored:
    """A hash as a record of raw fields, a string as raw bytes."""
    if isinstance(found, bytes):
        return b"\0" + found
    try:
        return {name.decode(): b"\0" + field for name, field in found.items()}
    except UnicodeDecodeError:
        raise InvalidValue("the name of a field is not UTF-8") from None


def _time_in(fields: dict[bytes, bytes], name: bytes) -> int | None:
    """A time that the record itself holds, in milliseconds."""
    text = fields.get(name, b"")
    return int(text) if text.isdigit() and len(text) == 13 else None
