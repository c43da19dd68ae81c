"""The data of other programs as entries to bring: tables, Redis hashes, NATS buckets, files.

A source reads and changes nothing, except where it is adopted in place: then `hand_over` lets the store take the place
of what was there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from limpet.errors import InvalidValue
from limpet.moving.entries import Brought, Rejected
from limpet.urls import Address

__all__ = ["ForeignData", "WithRows", "open_source"]


class ForeignData(Protocol):
    """Data of another program, opened to be read.

    Attributes:
        shown: What it is and where, for messages; without credentials.
        needs_place: Whether the store can write only when the data has been handed over.
    """

    needs_place: bool
    shown: str

    async def count(self) -> int | None:
        """About how many entries there are; None where that is not known."""

    def read(self) -> AsyncIterator[Brought | Rejected]:
        """Read all of it. It may be read several times."""

    async def hand_over(self) -> str | None:
        """Let the store take its place, and return what was done; None where it stays beside the store."""

    async def finish(self) -> None:
        """Note that all of what `hand_over` has put aside has been written."""

    async def close(self) -> None:
        """Close files and connections."""


@runtime_checkable
class WithRows(Protocol):
    """What a table has beside that."""

    @property
    def is_done(self) -> bool:
        """Whether it was adopted in place before, all of it."""

    async def ended(self, namespace: str, keys: Sequence[str]) -> list[str]:
        """Those of some keys that the table does not have."""

    async def give_back(self) -> str:
        """Put the table back in the place of the view, as it was, and return what was done."""


async def open_source(text: str, into: Address, *, namespace: str, table: str | None) -> ForeignData:
    """Open the data of another program.

    Args:
        text: A URL of a database, or the path of a file or a folder, perhaps with ``json:``, ``shelve:`` or
            ``diskcache:`` before it.
        into: The store that adopts it, which may be in the same place.
        namespace: Where entries go whose source has no namespaces.
        table: The table to adopt, where there are several.
    """
    kind, colon, rest = text.partition(":")
    if "://" in text:
        return await _open_url(Address.parse(text), into, namespace, table)
    from limpet.moving.sources import files

    openers: dict[str, Callable[[Path, str], ForeignData]] = {
        "json": files.JsonFiles,
        "shelve": files.Shelf,
        "diskcache": files.DiskCache,
    }
    if not colon or kind not in openers:
        kind, rest = "json", text
    path = Path(rest)
    return openers[kind](path, namespace)


async def _open_url(address: Address, into: Address, namespace: str, table: str | None) -> ForeignData:
    match address.scheme:
        case "sqlite":
            from limpet.moving.sources.sqlite import SqliteTable

            return SqliteTable(address, into, table)
        case "postgresql" | "postgres":
            from limpet.moving.sources.postgres import PostgresTable

            return await PostgresTable.open(address, into, table)
        case "redis" | "rediss":
            from limpet.moving.sources.redis import RedisHashes

            return await RedisHashes.open(address, into)
        case "nats" | "tls":
            from limpet.moving.sources.nats import NatsBucket

            return await NatsBucket.open(address, namespace)
        case _:
            raise InvalidValue(
                f"{address}: nothing is adopted from {address.scheme}: URLs, but from sqlite:, postgresql:, redis: and "
                "nats: URLs, and from files"
            )
