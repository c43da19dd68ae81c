"""Engines in front of the engine: errors in plain words, and request ids that belong to their caller.

`Boundary` stands in front of the engine of every server. Whatever an engine says when it fails stays behind it.

`OwnIds` stands in front of that for a caller who does not see and write the whole namespace. Its request ids get the
caller's name in front, so that it can neither use up an id of others nor learn by one what others have written.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Final, TypeVar

import msgspec

from limpet.engine import Engine, Indexing
from limpet.errors import Ambiguous, InvalidKey, LimpetError
from limpet.index import IndexProbe
from limpet.keys import KEY_BYTES_MAX, Span
from limpet.model import (
    Batch,
    Change,
    Commit,
    Entry,
    Expire,
    Family,
    Filter,
    LogPage,
    Refusal,
    ScanPage,
    Status,
    Traits,
    Window,
)
from limpet.server.wording import engine_error
from limpet.session import Session

__all__ = ["Boundary", "OwnIds", "own_ids", "put_boundary"]

T = TypeVar("T")

_SEPARATOR: Final = "/"


class _Front:
    """An engine in front of another."""

    def __init__(self, behind: Engine) -> None:
        self._behind = behind

    @property
    def traits(self) -> Traits:
        """What the engine behind is."""
        return self._behind.traits

    async def _run(self, call: Awaitable[T]) -> T:
        """Await a call of the engine behind."""
        return await call

    async def read(self, namespace: str, keys: Sequence[str], *, family: Family = "data") -> list[Entry | None]:
        """See `Engine.read`."""
        return await self._run(self._behind.read(namespace, keys, family=family))

    async def scan(
        self,
        namespace: str,
        span: Span,
        *,
        family: Family = "data",
        where: Filter | None = None,
        values: bool = True,
        limit: int = 500,
    ) -> ScanPage:
        """See `Engine.scan`."""
        return await self._run(
            self._behind.scan(namespace, span, family=family, where=where, values=values, limit=limit)
        )

    async def commit(self, namespace: str, batch: Batch) -> Commit | Refusal:
        """See `Engine.commit`."""
        return await self._run(self._behind.commit(namespace, batch))

    async def changes(
        self, namespace: str, after: int, *, span: Span | None = None, limit: int = 500, wait_s: float = 0.0
    ) -> LogPage:
        """See `Engine.changes`."""
        return await self._run(self._behind.changes(namespace, after, span=span, limit=limit, wait_s=wait_s))

    async def due(self, namespace: str, *, limit: int = 500) -> list[Expire]:
        """See `Engine.due`."""
        return await self._run(self._behind.due(namespace, limit=limit))

    async def trim(self, namespace: str, window: Window) -> int:
        """See `Engine.trim`."""
        return await self._run(self._behind.trim(namespace, window))

    async def status(self, namespace: str) -> Status:
        """See `Engine.status`."""
        return await self._run(self._behind.status(namespace))

    async def close(self) -> None:
        """See `Engine.close`."""
        await self._behind.close()


class Boundary(_Front):
    """The engine of a server. Its errors keep their kinds, and are put in plain words."""

    async def _run(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except LimpetError as error:
            plain = engine_error(error)
            if plain is error:
                raise
            raise plain from error


class _Indexed(_Front):
    """In front of an engine that keeps indexes."""

    @property
    def _indexing(self) -> Indexing:
        assert isinstance(self._behind, Indexing)
        return self._behind

    async def index(self, namespace: str, field: str) -> None:
        """See `Indexing.index`."""
        await self._run(self._indexing.index(namespace, field))

    async def unindex(self, namespace: str, field: str) -> None:
        """See `Indexing.unindex`."""
        await self._run(self._indexing.unindex(namespace, field))

    async def indexes(self, namespace: str) -> list[str]:
        """See `Indexing.indexes`."""
        return await self._run(self._indexing.indexes(namespace))

    async def candidates(self, namespace: str, span: Span, wanted: Sequence[IndexProbe]) -> list[str] | None:
        """See `Indexing.candidates`."""
        return await self._run(self._indexing.candidates(namespace, span, wanted))


class OwnIds(_Front):
    """The engine as one caller has it, whose request ids are its own.

    Args:
        behind: The engine.
        name: The caller's name, which no other caller has.
        finds_others: Whether the receipt of another caller is found, by the id as the log has it.
    """

    def __init__(self, behind: Engine, name: str, *, finds_others: bool = True) -> None:
        super().__init__(behind)
        self._prefix = name + _SEPARATOR
        self._finds_others = finds_others

    def given(self, request_id: str | None) -> str | None:
        """An id from the log as the caller gave it; that of another caller as it is."""
        return None if request_id is None else request_id.removeprefix(self._prefix)

    async def read(self, namespace: str, keys: Sequence[str], *, family: Family = "data") -> list[Entry | None]:
        """See `Engine.read`. A receipt is looked for among the caller's own first, and then as it is named."""
        if family != "receipt" or not keys:
            return await super().read(namespace, keys, family=family)
        named = [self._prefix + key for key in keys if self._fits(key)]
        if self._finds_others:
            named += keys
        found = dict(zip(named, await super().read(namespace, named, family=family), strict=True)) if named else {}
        own = [found.get(self._prefix + key) for key in keys]
        return [
            found.get(key) if mine is None else msgspec.structs.replace(mine, key=key)
            for key, mine in zip(keys, own, strict=True)
        ]

    async def commit(self, namespace: str, batch: Batch) -> Commit | Refusal:
        """See `Engine.commit`."""
        given = batch.request_id
        if given is None:
            return await super().commit(namespace, batch)
        named = msgspec.structs.replace(batch, request_id=self._named(given))
        try:
            outcome = await super().commit(namespace, named)
        except Ambiguous as error:
            error.request_id = self.given(error.request_id)
            raise
        if isinstance(outcome, Refusal) and outcome.reason == "stale_request":
            return msgspec.structs.replace(outcome, key=given)
        return outcome

    async def changes(
        self, namespace: str, after: int, *, span: Span | None = None, limit: int = 500, wait_s: float = 0.0
    ) -> LogPage:
        """See `Engine.changes`. The caller's own changes name their cause as it was given."""
        feed = await super().changes(namespace, after, span=span, limit=limit, wait_s=wait_s)
        return msgspec.structs.replace(feed, changes=[self._shown(change) for change in feed.changes])

    def _shown(self, change: Change) -> Change:
        cause = self.given(change.cause)
        return change if cause == change.cause else msgspec.structs.replace(change, cause=cause)

    def _named(self, request_id: str) -> str:
        if not self._fits(request_id):
            limit = KEY_BYTES_MAX - len(self._prefix.encode())
            raise InvalidKey(request_id, f"a request id of this caller has up to {limit} bytes")
        return self._prefix + request_id

    def _fits(self, request_id: str) -> bool:
        return len((self._prefix + request_id).encode()) <= KEY_BYTES_MAX


class _IndexedBoundary(Boundary, _Indexed):
    pass


class _IndexedOwnIds(OwnIds, _Indexed):
    pass


def put_boundary(session: Session) -> Session:
    """Put a boundary in front of the engine of a session, unless there is one. Returns the session."""
    engine = session.engine
    if not isinstance(engine, Boundary):
        session.engine = _IndexedBoundary(engine) if isinstance(engine, Indexing) else Boundary(engine)
    return session


def own_ids(engine: Engine, name: str, *, finds_others: bool = True) -> OwnIds:
    """The engine as the caller of this name has it. See `OwnIds`."""
    kind = _IndexedOwnIds if isinstance(engine, Indexing) else OwnIds
    return kind(engine, name, finds_others=finds_others)
