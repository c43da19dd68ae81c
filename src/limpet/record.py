"""A record: one key whose fields are written one by one, without reading the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from limpet.codec import Fields
from limpet.draft import TTL, Draft, Expectation, Fence, Fencing, Meta, as_fields
from limpet.errors import TypeMismatch
from limpet.keys import check_key
from limpet.model import ANY, KEEP, Entry, FieldEquals, Refusal, Sentinel

if TYPE_CHECKING:
    from limpet.store import Store

__all__ = ["Record"]


class Record:
    """A handle on a key that holds a record."""

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self.key = check_key(key)

    async def entry(self) -> Entry | None:
        """The record with its version, revision and times; None when it does not exist."""
        entry = await self._store.entry(self.key)
        if entry is not None and entry.kind != "record":
            raise TypeMismatch(self.key, expected="a record", found="a plain value")
        return entry

    async def fields(self) -> Fields | None:
        """All fields; None when there is no such record."""
        entry = await self.entry()
        return None if entry is None else entry.value

    async def get(self, name: str, default: Any = None) -> Any:
        """One field, or the default when there is no such record or field."""
        check_key(name)
        fields = await self.fields()
        return default if fields is None else fields.get(name, default)

    async def put(
        self,
        fields: Mapping[str, object],
        *,
        ttl: TTL | Literal[Sentinel.KEEP] = None,
        expect: Expectation = ANY,
        fence: Fencing | Fence | None = None,
        request_id: str | None = None,
        meta: Meta | Literal[Sentinel.KEEP] = None,
    ) -> Entry:
        """Replace the whole record."""
        return await self._store.put(
            self.key, Fields(as_fields(fields)), ttl=ttl, expect=expect, fence=fence, request_id=request_id, meta=meta
        )

    async def set(
        self,
        fields: Mapping[str, object] | None = None,
        /,
        *,
        unset: Iterable[str] = (),
        if_exists: bool = False,
        fence: Fencing | Fence | None = None,
        request_id: str | None = None,
        **more: object,
    ) -> Entry:
        """Write and clear single fields. A missing record is created, unless ``if_exists``."""
        draft = self._draft(fence, request_id).set(
            self.key, {**as_fields(fields), **more}, unset=unset, if_exists=if_exists
        )
        commit = await draft.commit()
        entry = commit.entries[0]
        assert entry is not None
        return entry

    async def swap(
        self,
        name: str,
        expected: object,
        new: object,
        *,
        set: Mapping[str, object] | None = None,
        ttl: TTL | Literal[Sentinel.KEEP] = KEEP,
        fence: Fencing | Fence | None = None,
        request_id: str | None = None,
    ) -> bool:
        """Write a field, and others with it, if it holds the expected value. Of all callers that try, one wins."""
        draft = self._draft(fence, request_id).swap(self.key, name, expected, new, set=set, ttl=ttl)._make_brief()
        outcome = await draft._attempt()
        if not isinstance(outcome, Refusal):
            return True
        is_different = outcome.guard is not None and isinstance(outcome.guard.condition, FieldEquals)
        # A brief batch returns records without their value, and so without their kind; other values have theirs.
        if is_different and (outcome.found is None or outcome.found.kind in ("record", None)):
            return False
        if is_different:
            raise TypeMismatch(self.key, expected="a record", found="a plain value")
        raise draft._error_of(outcome)

    async def touch(
        self,
        ttl: TTL,
        *,
        expect: Expectation = ANY,
        fence: Fencing | Fence | None = None,
        request_id: str | None = None,
    ) -> Entry | None:
        """Change only when the record expires. None when there is no such record."""
        return await self._store.touch(self.key, ttl, expect=expect, fence=fence, request_id=request_id)

    async def delete(
        self,
        *,
        expect: Expectation = ANY,
        fence: Fencing | Fence | None = None,
        request_id: str | None = None,
    ) -> bool:
        """End the record. False when it did not exist."""
        return await self._store.delete(self.key, expect=expect, fence=fence, request_id=request_id)

    def _draft(self, fence: Fencing | Fence | None, request_id: str | None) -> Draft:
        draft = self._store.batch(request_id=request_id)
        return draft if fence is None else draft.fence(fence)

    def __repr__(self) -> str:
        return f"Record({self.key!r} in {self._store!r})"
