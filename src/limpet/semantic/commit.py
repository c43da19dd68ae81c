"""Commits semantic writes, each request in one commit of the store.

Beside the data, a commit writes the rows of the audit trail, or the recoverable copies where the namespace is not
audited. Both depend on what is stored, so the state of the keys is read first, and the commit is guarded by it.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from limpet.clock import Clock
from limpet.codec import encode_field
from limpet.draft import Draft, request_digest
from limpet.errors import Conflict
from limpet.model import ABSENT, Commit, Condition, Entry, Guard, HeldBy, Revision, Version
from limpet.retry import jitter_s
from limpet.semantic.audit import Op, Trail
from limpet.semantic.copies import KeyCopies, RecoverableCopies, log_expiry
from limpet.semantic.keys import check_key
from limpet.semantic.model import Semantics, VersionConflict, meta_of
from limpet.semantic.writes import EntryWrite, Verb, WriteRequest
from limpet.store import Store
from limpet.transition import read_receipt

__all__ = ["Committer"]

QUICK_ATTEMPTS: Final = 8
"""How many attempts follow each other without a pause. Later ones wait for a random time."""

_OPS: Final[dict[Verb, Op]] = {"kvPut": "put", "kvDelete": "delete", "kvRecover": "recover"}


class _KeyState(msgspec.Struct, frozen=True):
    """What is stored of a key: its entry and its head where it is audited, else its copies."""

    entry: Entry | None
    head: Entry | None
    copies: KeyCopies


class Committer:
    """Commits write requests in a namespace; with a trail, audited."""

    def __init__(self, store: Store, trail: Trail | None, copies: RecoverableCopies, clock: Clock) -> None:
        self._store = store
        self._trail = trail
        self._copies = copies
        self._clock = clock

    async def commit(self, request: WriteRequest) -> Commit:
        """Commit a request, or return the commit that the same request made earlier.

        Raises:
            VersionConflict: A key has another version, or the request id was used for another request.
        """
        if self._trail is None:
            return await self._commit_in_turn(request)
        # An audited write is refused when its trail has moved since it was read. So callers of this process take turns,
        # key by key, and each takes several keys in the same order.
        turns = [("audit", self._store.name, key) for key in sorted({*request.keys})]
        async with self._store._session.turns.hold(turns):
            return await self._commit_in_turn(request)

    async def _commit_in_turn(self, request: WriteRequest) -> Commit:
        encoded = request.encode()
        attempt = 0
        while True:
            attempt += 1
            started_at = self._clock.monotonic()
            states = await self._load(request.keys)
            # Read the receipt last, so that what this request itself wrote earlier is not taken for a conflict.
            if request.is_id_given and (earlier := await self._load_earlier(request, encoded)) is not None:
                return earlier
            if await self._record_expiries(request.keys, states):
                continue
            draft = self._draft(request, states)
            draft.include(request=encoded)
            try:
                commit = await draft.commit()
            except Conflict as conflict:
                if conflict.reason == "stale_request":
                    raise await self._stale_request(request) from None
                self._check_conflict(request, conflict)
            else:
                self._check_expiries_later(request, states, commit)
                return commit
            pause_s = 0 if attempt < QUICK_ATTEMPTS else jitter_s(self._clock.monotonic() - started_at)
            await self._clock.sleep(pause_s)

    # The state before ---------------------------------------------------------

    async def _load(self, keys: list[str]) -> list[_KeyState]:
        if self._trail is None:
            return [_KeyState(None, None, copies) for copies in await self._copies.load(keys)]
        heads = await self._trail.heads(keys)
        session = self._store._session
        entries = await session.retry(lambda: session.engine.read(self._store.name, keys))
        return [_KeyState(entry, head, KeyCopies(None, None)) for entry, head in zip(entries, heads, strict=True)]

    async def _load_earlier(self, request: WriteRequest, encoded: bytes) -> Commit | None:
        """The commit that this very request made earlier. It cannot be repeated: the state before it is gone."""
        entry = await self._store._session.read(self._store.name, request.request_id, family="receipt")
        if entry is None:
            return None
        receipt = read_receipt(entry)
        # A server appends its own hash to the digest that it received.
        if not receipt.digest.startswith(request_digest(encoded)):
            raise await self._stale_request(request)
        entries = tuple(
            entry if entry is None else msgspec.structs.replace(entry, stored=write.stored)
            for entry, write in zip(receipt.commit.entries, request.writes, strict=False)
        )
        return msgspec.structs.replace(receipt.commit, entries=entries, replayed=True)

    async def _record_expiries(self, keys: list[str], states: list[_KeyState]) -> bool:
        """Record the expiries of these keys before anything else is written to them. False when none expired."""
        any_expired = False
        for key, state in zip(keys, states, strict=True):
            if self._trail is not None:
                if state.head is not None and self._trail.is_pending(state.entry, state.head):
                    await self._trail.record_expiry(key, state.head)
                    any_expired = True
            elif state.copies.live is not None and await self._store.entry(key) is None:
                await self._copies.record_expiry(key, state.copies.live)
                any_expired = True
        return any_expired

    # The commit ---------------------------------------------------------------

    def _draft(self, request: WriteRequest, states: list[_KeyState]) -> Draft:
        # The data comes first: the results of a commit are read by the numbers of its writes.
        draft = self._store.batch(request_id=request.request_id if request.is_id_given else None)
        if request.held is not None:
            draft.include(guards=[Guard(check_key(request.held.key), HeldBy(request.held.token))])
        if request.fence is not None:
            draft.fence(request.fence)
        for write, state in zip(request.writes, states, strict=True):
            if self._trail is not None:
                _check_version(write, state.entry, request.request_id)
            self._include_data(draft, request, write, state.entry)
        for write, state in zip(request.writes, states, strict=True):
            if self._trail is None:
                self._include_copies(draft, request, write, state.copies)
            else:
                self._include_row(self._trail, draft, request, write, state)
        return draft

    def _include_data(self, draft: Draft, request: WriteRequest, write: EntryWrite, entry: Entry | None) -> None:
        """Add the write of the entry and its guard. An audited entry must be the one that was read."""
        condition: Condition | None
        if self._trail is not None:
            condition = ABSENT if entry is None else Revision(entry.revision)
        else:
            version = write.expected_version
            condition = None if version is None else ABSENT if version == 0 else Version(version)
        if condition is not None:
            draft.include(guards=[Guard(write.key, condition)])
        if write.value is None:
            draft.delete(write.key)
            return
        assert write.semantics is not None
        value_hash = None if self._trail is None else self._trail.hash_of(write.key, encode_field(write.value))
        meta = meta_of(request.writer, write.semantics, request.request_id, write.spec_ref, value_hash)
        draft.put(write.key, write.value, ttl=write.semantics.ttl_seconds, meta=meta)

    def _include_row(
        self, trail: Trail, draft: Draft, request: WriteRequest, write: EntryWrite, state: _KeyState
    ) -> None:
        # A delete that ends nothing has no row.
        if write.value is None and state.entry is None:
            return
        planned = trail.plan(
            _OPS[write.verb],
            write.key,
            found=state.entry,
            head_entry=state.head,
            stored=write.stored,
            version=(0 if state.entry is None else state.entry.version) + (write.value is not None),
            writer=request.writer,
            semantics=_semantics_for_row(write, state.entry),
            request_id=request.request_id,
            spec_ref=write.spec_ref,
        )
        draft.include(*planned.writes, guards=planned.guards)

    def _include_copies(self, draft: Draft, request: WriteRequest, write: EntryWrite, copies: KeyCopies) -> None:
        version = None if write.expected_version is None else write.expected_version + 1
        writes, guards = self._copies.plan(
            write.key, copies, write.stored, write.semantics, request.writer, write.spec_ref, version
        )
        draft.include(*writes, guards=guards)

    def _check_expiries_later(self, request: WriteRequest, states: list[_KeyState], commit: Commit) -> None:
        """Check the new entries when their time is over, and log the expiry of those that they replaced."""
        if commit.replayed or self._trail is not None:
            return
        for number, (write, state) in enumerate(zip(request.writes, states, strict=True)):
            entry = commit.entries[number]
            if entry is None:
                continue
            live = state.copies.live
            if live is not None and entry.version == 1:
                log_expiry(write.key, live.meta)
            self._copies.check_later(write.key, entry)

    # Conflicts ----------------------------------------------------------------

    def _check_conflict(self, request: WriteRequest, conflict: Conflict) -> None:
        """Raise a conflict with the version that the caller expects. Any other is one with the state that was read."""
        write = next((write for write in request.writes if write.key == conflict.key), None)
        if write is not None and write.expected_version is not None:
            _check_version(write, conflict.current, request.request_id)

    async def _stale_request(self, request: WriteRequest) -> VersionConflict:
        """The conflict of a request id that was used for another request, with the entry that is there now."""
        write = request.writes[0]
        return VersionConflict(
            write.key,
            expected_version=write.expected_version,
            current=await self._store.entry(write.key),
            request_id=request.request_id,
            reason="stale_request",
        )


def _check_version(write: EntryWrite, entry: Entry | None, request_id: str) -> None:
    expected = write.expected_version
    if expected is None or expected == (0 if entry is None else entry.version):
        return
    is_expired_lock = write.purpose == "lock" and entry is None
    raise VersionConflict(
        write.key,
        expected_version=expected,
        current=entry,
        request_id=request_id,
        reason="lock_expired" if is_expired_lock else "guard",
    )


def _semantics_for_row(write: EntryWrite, entry: Entry | None) -> Semantics | dict[str, Any]:
    """The semantics of a write; for a delete, those of the entry that it ends."""
    if write.semantics is not None:
        return write.semantics
    found = {} if entry is None else entry.meta.get("semantics", {})
    return found if isinstance(found, dict) else {}
