"""Redis hashes and strings under a prefix, such as ``gbe:state:``.

The part of a name before the first colon is the namespace, and the rest is the key: so a store without hash tags has
them under the same names. Adopted in place, into such a store on the same server, each hash is renamed before it is
written by the store, which leaves alone what other programs have written. The renamed one is removed when all is done.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any, Final, Self
from urllib.parse import urlsplit

from limpet.codec import Stored
from limpet.errors import InvalidValue, Unavailable
from limpet.moving.entries import Brought, Rejected
from limpet.moving.sources.values import as_item
from limpet.urls import Address

__all__ = ["RedisHashes"]

ASIDE: Final = "before-limpet:"
SCANNED: Final = 500


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
        async for own in self._client.scan_iter(match=pattern, count=SCANNED):
            name = own
            if self._is_in_place and not skip and await self._is_ours(name):
                continue
            if renames:
                name = ASIDE.encode() + own
                if not await self._client.renamenx(own, name):
                    continue
            item = await self._read_one(name, own[skip:] if not renames else own)
            if item is not None:
                yield item

    async def _is_ours(self, name: bytes) -> bool:
        """Whether the store has this name already."""
        namespace, _, key = name.partition(b":")
        return bool(await self._client.hexists(b"limpet:%b:data" % namespace, key))

    async def _read_one(self, name: bytes, shown: bytes) -> Brought | Rejected | None:
        """The hash or string of a name with what is left of its time, all of one moment; None if it is gone."""
        namespace, _, key = shown.partition(b":")
        kind = await self._client.type(name)
        if kind == b"none":
            return None
        text = key.decode(errors="backslashreplace")
        if kind not in (b"hash", b"string"):
            return Rejected(namespace.decode(errors="backslashreplace"), text, f"it is a Redis {kind.decode()}")
        async with self._client.pipeline(transaction=True) as pipeline:
            getattr(pipeline, "hgetall" if kind == b"hash" else "get")(name)
            pipeline.pttl(name)
            pipeline.time()
            found, left_ms, (seconds, micros) = await pipeline.execute()
        if not found:
            return None
        now_ms = seconds * 1000 + micros // 1000
        updated_ms = _time_in(found, b"updated_at") if kind == b"hash" else None
        created_ms = _time_in(found, b"created_at") if kind == b"hash" else None
        return as_item(
            namespace.decode(errors="backslashreplace"),
            text,
            lambda: _stored(found),
            version=1,
            created_ms=min(created_ms or updated_ms or now_ms, now_ms),
            updated_ms=min(updated_ms or now_ms, now_ms),
            expires_ms=now_ms + left_ms if left_ms > 0 else None,
        )

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
