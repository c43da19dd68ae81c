"""Wrappers around the engine of a server: errors without details, and request ids that belong to their caller.

`Boundary` wraps the engine of every server. The message of an engine's error stays behind it.

`OwnIds` wraps that again for a caller that does not see and write the whole namespace. Its request ids get the
caller's name as a prefix, so that it can neither use up an id of others nor learn by one what others have written.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar, cast

import msgspec

from limpet.engine import Engine, Indexing
from limpet.errors import Ambiguous, InvalidKey, LimpetError
from limpet.keys import KEY_BYTES_MAX, Span
from limpet.model import Batch, Change, Commit, Entry, Family, LogPage, Refusal, Traits
from limpet.server.wording import engine_error
from limpet.session import Session

__all__ = ["Boundary", "OwnIds", "own_ids", "put_boundary"]

T = TypeVar("T")
M = TypeVar("M", bound=Callable[..., Awaitable[Any]])

_SEPARATOR: Final = "/"


def _forward(primitive: M) -> M:
    """A method that calls the same primitive of the wrapped engine, through `_EngineWrapper._call`."""
    name = primitive.__name__

    @functools.wraps(primitive)
    def forward(self: _EngineWrapper, *args: Any, **options: Any) -> Awaitable[Any]:
        return self._call(getattr(self._engine, name)(*args, **options))

    return cast(M, forward)


class _EngineWrapper:
    """An engine that forwards every primitive to another."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def traits(self) -> Traits:
        """The traits of the wrapped engine."""
        return self._engine.traits

    async def _call(self, call: Awaitable[T]) -> T:
        """Await a call of the wrapped engine."""
        return await call

    read = _forward(Engine.read)
    scan = _forward(Engine.scan)
    count = _forward(Engine.count)
    namespaces = _forward(Engine.namespaces)
    commit = _forward(Engine.commit)
    changes = _forward(Engine.changes)
    due = _forward(Engine.due)
    trim = _forward(Engine.trim)
    status = _forward(Engine.status)

    async def close(self) -> None:
        """See `Engine.close`."""
        await self._engine.close()


class _IndexingWrapper(_EngineWrapper):
    """A wrapper around an engine that keeps indexes."""

    index = _forward(Indexing.index)
    unindex = _forward(Indexing.unindex)
    indexes = _forward(Indexing.indexes)
    candidates = _forward(Indexing.candidates)


class Boundary(_EngineWrapper):
    """The engine of a server. Its errors keep their classes and get fixed messages."""

    async def _call(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except LimpetError as error:
            public = engine_error(error)
            if public is error:
                raise
            raise public from error


class OwnIds(_EngineWrapper):
    """The engine for one caller, whose request ids no other caller shares.

    Args:
        engine: The engine.
        name: The caller's name, which no other caller has.
        finds_others: Whether the caller finds the receipt of another caller, by the id that the log has.
    """

    def __init__(self, engine: Engine, name: str, *, finds_others: bool = True) -> None:
        super().__init__(engine)
        self._prefix = name + _SEPARATOR
        self._finds_others = finds_others

    def given(self, request_id: str | None) -> str | None:
        """An id from the log as the caller gave it; the id of another caller unchanged."""
        return None if request_id is None else request_id.removeprefix(self._prefix)

    async def read(self, namespace: str, keys: Sequence[str], *, family: Family = "data") -> list[Entry | None]:
        """See `Engine.read`. A receipt is read by the caller's prefixed id first, and then by the id as given."""
        if family != "receipt" or not keys:
            return await super().read(namespace, keys, family=family)
        ids = [self._prefix + key for key in keys if self._fits(key)]
        if self._finds_others:
            ids += keys
        found = dict(zip(ids, await super().read(namespace, ids, family=family), strict=True)) if ids else {}
        own_receipts = [found.get(self._prefix + key) for key in keys]
        return [
            found.get(key) if own is None else msgspec.structs.replace(own, key=key)
            for key, own in zip(keys, own_receipts, strict=True)
        ]

    async def commit(self, namespace: str, batch: Batch) -> Commit | Refusal:
        """See `Engine.commit`."""
        given = batch.request_id
        if given is None:
            return await super().commit(namespace, batch)
        prefixed = msgspec.structs.replace(batch, request_id=self._add_prefix(given))
        try:
            result = await super().commit(namespace, prefixed)
        except Ambiguous as error:
            error.request_id = self.given(error.request_id)
            raise
        if isinstance(result, Refusal) and result.reason == "stale_request":
            return msgspec.structs.replace(result, key=given)
        return result

    async def changes(
        self, namespace: str, after: int, *, span: Span | None = None, limit: int = 500, wait_s: float = 0.0
    ) -> LogPage:
        """See `Engine.changes`. The caller's own changes have their cause without the prefix."""
        page = await super().changes(namespace, after, span=span, limit=limit, wait_s=wait_s)
        return msgspec.structs.replace(page, changes=[self._strip_cause(change) for change in page.changes])

    def _strip_cause(self, change: Change) -> Change:
        # The prefix of the id is that of the origin as well.
        origin = self.given(change.origin)
        return change if origin == change.origin else msgspec.structs.replace(change, origin=origin)

    def _add_prefix(self, request_id: str) -> str:
        if not self._fits(request_id):
            limit = KEY_BYTES_MAX - len(self._prefix.encode())
            raise InvalidKey(request_id, f"a request id of this caller has up to {limit} bytes")
        return self._prefix + request_id

    def _fits(self, request_id: str) -> bool:
        return len((self._prefix + request_id).encode()) <= KEY_BYTES_MAX


class _IndexingBoundary(Boundary, _IndexingWrapper):
    pass


class _IndexingOwnIds(OwnIds, _IndexingWrapper):
    pass


def put_boundary(session: Session) -> Session:
    """Wrap the engine of a session in a boundary, unless it is wrapped already. Returns the session."""
    engine = session.engine
    if not isinstance(engine, Boundary):
        session.engine = _IndexingBoundary(engine) if isinstance(engine, Indexing) else Boundary(engine)
    return session


def own_ids(engine: Engine, name: str, *, finds_others: bool = True) -> OwnIds:
    """The engine for the caller of this name. See `OwnIds`."""
    kind = _IndexingOwnIds if isinstance(engine, Indexing) else OwnIds
    return kind(engine, name, finds_others=finds_others)
