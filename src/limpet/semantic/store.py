"""Semantic entries: checkpoints, feature flags, cursors and locks, under one key standard and in one envelope.

Keys name tenant and project. An entry says who wrote it, for what, and by which request. A write may name the version
that it expects, and a conflict brings what was found. Of an audited namespace every change leaves a row in the trail,
in the same commit.

The verbs try once, and say what went wrong. `SemanticStore.advance` and `SemanticStore.submit` go on by the retry
policy, and escalate when that is spent.
"""

from __future__ import annotations

import inspect
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, Self

import msgspec

from limpet.clock import Clock
from limpet.codec import Stored, encode_field
from limpet.draft import Fence, Fencing, request_digest
from limpet.errors import Conflict, Corrupt, LimpetError, NotFound
from limpet.keys import PAGE_BYTES
from limpet.model import ABSENT, Commit, Condition, Entry, Event, Guard, HeldBy, Revision, Version, Write
from limpet.request_ids import new_request_id
from limpet.retry import jitter_s
from limpet.semantic.audit import Audit, Trail
from limpet.semantic.copies import GRACE_S, Copies, Copy, log_expiry
from limpet.semantic.deadletters import DeadLetter, DeadLetters
from limpet.semantic.keys import InvalidKeyField, check_key, check_prefix, join
from limpet.semantic.model import (
    BatchItem,
    Delete,
    Envelope,
    Held,
    InvalidField,
    Put,
    Semantics,
    VersionConflict,
    check_expected_version,
    check_value,
    check_writer,
    directive_of,
    envelope_of,
    meta_of,
    semantics_of,
    shaped,
)
from limpet.semantic.policy import Escalated, Outage, OutageAlert, RetryPolicy, retrying
from limpet.semantic.seal import Pruned, Report, Sealer, prune, verify
from limpet.store import Store, take_turn
from limpet.transition import read_receipt

__all__ = [
    "Audit",
    "DeadLetter",
    "DeadLetters",
    "Delete",
    "Envelope",
    "Escalated",
    "Held",
    "InvalidField",
    "InvalidKeyField",
    "Listing",
    "Observation",
    "OutageAlert",
    "Put",
    "RetryPolicy",
    "SemanticStore",
    "Semantics",
    "VersionConflict",
    "request_id_of",
]

log = logging.getLogger("limpet.semantic")

CROWD: Final = 8
PAGE_MAX: Final = 1000

Verb = Literal["kvPut", "kvDelete", "kvRecover"]
Outcome = Literal["success", "replayed", "conflict"]


class Observation(msgspec.Struct, frozen=True):
    """What an observer is told of a write.

    Attributes:
        verb: ``kvPut``, ``kvDelete`` or ``kvRecover``.
        outcome: ``success``, ``replayed`` or ``conflict``.
        namespace: The namespace.
        purpose: What the entry is for; empty where that is not known.
        key: The key.
        request_id: The request id.
    """

    verb: Verb
    outcome: Outcome
    namespace: str
    purpose: str
    key: str
    request_id: str


class Listing(msgspec.Struct, frozen=True):
    """Some entries, in the order of their keys. Pass ``cursor`` as ``after`` to go on; None when there are no more."""

    envelopes: list[Envelope]
    cursor: str | None


def request_id_of(workflow: str, at: datetime, *parts: object) -> str:
    """The request id of a write: the same for the same moment of the same workflow, and for what else tells it apart.

    The moment is that of the work, such as when a schedule was due, and not of the attempt: then a workflow that was
    restarted asks under the same id.
    """
    if at.tzinfo is None:
        raise InvalidField("requestId", "the moment of a request id has a time zone")
    moment = at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return "/".join([moment, workflow, *map(str, parts)])


class _Asked(msgspec.Struct):
    """One change of one key, checked."""

    key: str
    value: dict[str, Any] | None
    semantics: Semantics | None
    expected_version: int | None
    spec_ref: str | None
    verb: Verb = "kvPut"

    @property
    def purpose(self) -> str:
        return "" if self.semantics is None else self.semantics.purpose


class SemanticStore:
    """Semantic entries in a namespace.

    With ``async with`` it also notices in the background what has expired, whoever put it, and an audited one seals its
    trail. The store stays its owner's.

    Args:
        store: The namespace.
        audit: Leaves a row of every change; None for no trail.
        anchor: The end of the trail as it was last known, from a log or a report: what is sealed must go through it.
        clock: What to wait on between attempts; the store's own when not given.
        policy: What `advance` and `submit` do about failures.
        dead_letters: Where to keep what is escalated; None to keep nothing.
        observer: Is told of each success and each conflict.
        on_outage: Is told of an outage that lasts.
        dice: A number from 0 to 1, for jitter.
        grace_s: How long an entry that expired can be recovered. An audited namespace goes by its `Audit`.
    """

    def __init__(
        self,
        store: Store,
        *,
        audit: Audit | None = None,
        anchor: str | None = None,
        clock: Clock | None = None,
        policy: RetryPolicy | None = None,
        dead_letters: DeadLetters | None = None,
        observer: Callable[[Observation], None] | None = None,
        on_outage: Callable[[OutageAlert], None] | None = None,
        dice: Callable[[], float] = random.random,
        grace_s: float = GRACE_S,
    ) -> None:
        self.store = store
        self.dead_letters = dead_letters
        self.policy = policy or RetryPolicy()
        self._audit = audit
        self._trail = None if audit is None else Trail(store, audit)
        self._sealer = None if audit is None else Sealer(store, audit, anchor=anchor)
        self._copies = Copies(store, grace_s)
        self._clock = clock or store._session.clock
        self._observer = observer
        self._outage = Outage(store.name, self._clock, self.policy.outage_alert_s, on_outage)
        self._dice = dice

    async def __aenter__(self) -> Self:
        (self._copies if self._sealer is None else self._sealer).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await (self._copies if self._sealer is None else self._sealer).stop()

    # Names --------------------------------------------------------------------

    async def key(self, tenant: str, project: str, *path: str) -> str:
        """The key of some identifiers. Which of them it has as hashes is kept, so that `identifier` can tell."""
        key, hashed = join(tenant, project, *path)
        for component, original in hashed.items():
            await self._keep_name(component, original)
        return key

    async def identifier(self, component: str) -> str:
        """The identifier that a component of a key stands for."""
        found = await self.store.get(f"names/{component}")
        return component if found is None else str(found["identifier"])

    async def _keep_name(self, component: str, original: str) -> None:
        place = f"names/{component}"
        found = await self.store.get(place)
        if found is None:
            try:
                await self.store.create(place, {"identifier": original})
            except Conflict as conflict:
                found = None if conflict.current is None else conflict.current.value
        if found is not None and found["identifier"] != original:
            raise Corrupt(f"{component!r} stands for another identifier already")

    # Reading ------------------------------------------------------------------

    async def kv_get(self, key: str) -> Envelope | None:
        """The entry under a key, or None when there is none or it expired."""
        entry = await self.store.entry(check_key(key))
        return None if entry is None else envelope_of(entry)

    async def kv_list(
        self, prefix: str, *, purpose: str | None = None, limit: int = 100, after: str | None = None
    ) -> Listing:
        """The entries whose keys begin so, which is ``tenant/<tenant>/`` at least; with a purpose, those for it."""
        if type(limit) is not int or not 1 <= limit <= PAGE_MAX:
            raise InvalidField("limit", f"a page holds 1 to {PAGE_MAX:,} entries")
        found: list[Envelope] = []
        size_bytes = 0
        async for entry in self.store.scan(check_prefix(prefix), after=after):
            envelope = envelope_of(entry)
            if purpose is not None and envelope.semantics.purpose != purpose:
                continue
            if len(found) == limit or size_bytes > PAGE_BYTES:
                return Listing(found, found[-1].key)
            found.append(envelope)
            size_bytes += entry.size_bytes
        return Listing(found, None)

    # Writing ------------------------------------------------------------------

    async def kv_put(
        self,
        key: str,
        value: dict[str, Any],
        *,
        writer: str,
        semantics: Semantics | dict[str, Any],
        expected_version: int | None = None,
        request_id: str | None = None,
        spec_ref: str | None = None,
        held: Envelope | Held | None = None,
        fence: Fencing | Fence | None = None,
    ) -> Envelope:
        """Put a value under a key.

        Args:
            key: ``tenant/<tenant>/project/<project>/…``
            value: A JSON object.
            writer: ``<agent>:<directive>``, or a service account.
            semantics: What it is for.
            expected_version: The version that the key must have; 0 for no such key, None for whatever is there. An
                entry of purpose lock needs one: 0 to acquire it, its version to renew it.
            request_id: Makes the call safe to repeat for ten minutes. One is made when none is given.
            spec_ref: The specification or decision that governs it.
            held: An entry of purpose lock that must still be held: its envelope, or its key and token.
            fence: A lock of the store that must still be held.

        Raises:
            InvalidKeyField: The key breaks the standard.
            InvalidField: Something else in the request is wrong.
            VersionConflict: The key has another version, or the request id was used for another request.
            LockLost: The lock is no longer held.
        """
        asked = self._asked_put(key, value, semantics, expected_version, spec_ref)
        commit, request_id = await self._change([asked], writer, request_id, held=held, fence=fence)
        return _envelope(commit, 0)

    async def kv_delete(
        self,
        key: str,
        *,
        writer: str,
        expected_version: int | None = None,
        request_id: str | None = None,
        held: Envelope | Held | None = None,
        fence: Fencing | Fence | None = None,
    ) -> bool:
        """End a key. False when there was none. The arguments are those of `kv_put`."""
        asked = await self._asked_delete(key, expected_version)
        commit, _ = await self._change([asked], writer, request_id, held=held, fence=fence)
        return commit.ended[0] is not None

    async def kv_batch(
        self,
        items: Sequence[BatchItem | Mapping[str, Any]],
        *,
        writer: str,
        request_id: str | None = None,
        held: Envelope | Held | None = None,
        fence: Fencing | Fence | None = None,
    ) -> list[Envelope | None]:
        """Change several keys, all of them or none: each with the version that it must have.

        Args:
            items: `Put` and `Delete`, or documents of them with ``op``. Each key once.
            writer: As of `kv_put`.
            request_id: As of `kv_put`, for all of them.
            held: As of `kv_put`.
            fence: As of `kv_put`.

        Returns:
            The envelope of each put, and None for each delete.

        Raises:
            VersionConflict: Of the first key that has another version.
        """
        if not items:
            raise InvalidField("items", "a batch of nothing asks for nothing")
        asked: list[_Asked] = []
        for number, item in enumerate(items):
            field = f"items[{number}]"
            # What comes as a struct may be made of anything, too.
            one: BatchItem = shaped(msgspec.to_builtins(item), BatchItem, field)  # type: ignore[arg-type]
            if isinstance(one, Put):
                asked.append(self._asked_put(one.key, one.value, one.semantics, one.expected_version, one.spec_ref))
            else:
                asked.append(await self._asked_delete(one.key, one.expected_version))
        commit, _ = await self._change(asked, writer, request_id, held=held, fence=fence)
        return [_envelope(commit, n) if one.value is not None else None for n, one in enumerate(asked)]

    async def recover(self, key: str, *, writer: str, request_id: str | None = None) -> Envelope:
        """Put back what a key held when it expired, for as long again. Raises `NotFound` when that is over.

        Raises:
            VersionConflict: The key is there.
            NotFound: It did not expire, or too long ago.
        """
        check_key(key)
        entry = await self.store.entry(key)
        recoverable = await self._recoverable(key, entry)
        if recoverable is None and entry is None:
            raise NotFound(key)
        if recoverable is None:
            raise VersionConflict(key, expected_version=0, current=entry, request_id=request_id or new_request_id())
        semantics = semantics_of(recoverable.meta["semantics"])
        asked = _Asked(key, recoverable.value, semantics, 0, recoverable.meta.get("specRef"), "kvRecover")
        commit, _ = await self._change([asked], writer, request_id)
        return _envelope(commit, 0)

    async def _recoverable(self, key: str, entry: Entry | None) -> Entry | None:
        """The copy of what a key held when it expired."""
        trail = self._trail
        if trail is None:
            return await self._copies.recoverable(key)
        (head,) = await trail.heads([key])
        if head is not None and trail.is_pending(entry, head):
            await trail.record_expiry(key, head)
        found = await trail.recoverable(key)
        return None if found is None else found[0]

    def _asked_put(
        self,
        key: str,
        value: object,
        semantics: Semantics | dict[str, Any],
        expected_version: object,
        spec_ref: object,
    ) -> _Asked:
        """A put, checked."""
        checked = semantics_of(semantics)
        version = check_expected_version(expected_version)
        if checked.purpose == "lock" and version is None:
            raise InvalidField("expectedVersion", "a lock needs one: 0 to acquire it, its version to renew it")
        if spec_ref is not None and (not isinstance(spec_ref, str) or not 0 < len(spec_ref) <= 512):
            raise InvalidField("specRef", "it is a reference of 1 to 512 characters")
        return _Asked(check_key(key), check_value(value), checked, version, spec_ref)

    async def _asked_delete(self, key: str, expected_version: object) -> _Asked:
        """A delete, checked. Whoever ends a lock must know it, or it may be another's by now."""
        version = check_expected_version(expected_version)
        if version is None:
            entry = await self.store.entry(check_key(key))
            if entry is not None and _purpose(entry) == "lock":
                raise InvalidField("expectedVersion", "a lock is ended by the version that its holder knows")
        return _Asked(check_key(key), None, None, version, None, "kvDelete")

    async def _change(
        self,
        asked: list[_Asked],
        writer: str,
        request_id: str | None,
        *,
        held: Envelope | Held | None = None,
        fence: Fencing | Fence | None = None,
    ) -> tuple[Commit, str]:
        """Make changes in one commit, under the ids and guards that they came with."""
        check_writer(writer)
        if request_id is not None and not 0 < len(request_id) <= 512:
            raise InvalidField("requestId", "it is a text of 1 to 512 characters")
        now = datetime.fromtimestamp(self._clock.now_ms() / 1000, UTC)
        named = request_id or request_id_of(new_request_id(), now)
        try:
            commit = await self._commit(asked, writer, named, request_id is not None, held, fence)
        except VersionConflict as conflict:
            self._tell_conflict(conflict, asked, writer)
            raise
        self._tell_success(commit, asked, writer, named)
        return commit, named

    async def _commit(
        self,
        asked: list[_Asked],
        writer: str,
        request_id: str,
        is_given: bool,
        held: Envelope | Held | None,
        fence: Fencing | Fence | None,
    ) -> Commit:
        if held is not None and not isinstance(held, Envelope | Held):
            raise InvalidField("held", f"it is an envelope, or a key and a token, not of type {type(held).__name__}")
        if self._trail is None:
            return await self._commit_in_turn(asked, writer, request_id, is_given, held, fence)
        # What is audited is written on the condition that its trail stands as it was read. So callers of this process
        # take turns, key by key, and each takes several keys in the same order.
        places = [("audit", self.store.name, key) for key in sorted({one.key for one in asked})]
        async with self.store._session.turns.hold(places):
            return await self._commit_in_turn(asked, writer, request_id, is_given, held, fence)

    async def _commit_in_turn(
        self,
        asked: list[_Asked],
        writer: str,
        request_id: str,
        is_given: bool,
        held: Envelope | Held | None,
        fence: Fencing | Fence | None,
    ) -> Commit:
        trail, request = self._trail, _request(asked, writer)
        keys = [one.key for one in asked]
        attempt = 0
        while True:
            attempt += 1
            started_at = self._clock.monotonic()
            found: list[Entry | None] = [None] * len(asked)
            heads: list[Entry | None] = [None] * len(asked)
            copies: list[Copy] = []
            if trail is not None:
                heads = await trail.heads(keys)
                found = await self._entries(keys)
            else:
                copies = await self._copies.look(keys)
            # Last of all: what this request may have made of them earlier is not taken for another's work.
            if is_given and (earlier := await self._earlier(request_id, request, asked)) is not None:
                return earlier
            if trail is not None and await self._record_expiries(trail, keys, found, heads):
                continue
            if await self._notice_expiries(keys, copies):
                continue
            draft = self.store.batch(request_id=request_id if is_given else None)
            if held is not None:
                draft.include(guards=[Guard(check_key(held.key), HeldBy(held.token))])
            if fence is not None:
                draft.fence(fence)
            for one, entry in zip(asked, found, strict=True):
                if trail is not None:
                    self._check_version(one, entry, request_id)
                self._draft(draft, one, entry, writer, request_id, is_audited=trail is not None)
            for one, entry, head in zip(asked, found, heads, strict=True):
                # Of a delete that ends nothing there is nothing to tell.
                if trail is None or (one.value is None and entry is None):
                    continue
                stored = None if one.value is None else encode_field(one.value)
                planned = trail.plan(
                    {"kvPut": "put", "kvDelete": "delete", "kvRecover": "recover"}[one.verb],  # type: ignore[arg-type]
                    one.key,
                    found=entry,
                    head_entry=head,
                    stored=stored,
                    version=(0 if entry is None else entry.version) + (one.value is not None),
                    writer=writer,
                    semantics=_told(one, entry),
                    request_id=request_id,
                    spec_ref=one.spec_ref,
                )
                draft.include(*planned.writes, guards=planned.guards)
            for one, copy in zip(asked, copies, strict=trail is None):
                writes, guards = self._copy(one, copy, writer)
                draft.include(*writes, guards=guards)
            draft.include(request=request)
            try:
                commit = await draft.commit()
                self._expect_expiries(asked, copies, commit)
                return commit
            except Conflict as conflict:
                if conflict.reason == "stale_request":
                    raise await self._stale(asked, request_id) from None
                self._check_found(asked, conflict, request_id)
            await self._clock.sleep(0 if attempt < CROWD else jitter_s(self._clock.monotonic() - started_at))

    def _draft(
        self, draft: Any, one: _Asked, entry: Entry | None, writer: str, request_id: str, *, is_audited: bool
    ) -> None:
        """The write of the data, and its guard. What is audited must be what was looked at."""
        condition: Condition | None
        if is_audited:
            condition = ABSENT if entry is None else Revision(entry.revision)
        else:
            version = one.expected_version
            condition = None if version is None else ABSENT if version == 0 else Version(version)
        if condition is not None:
            draft.include(guards=[Guard(one.key, condition)])
        if one.value is None:
            draft.delete(one.key)
            return
        assert one.semantics is not None
        hashed = None if self._trail is None else self._trail.hash_of(one.key, encode_field(one.value))
        meta = meta_of(writer, one.semantics, request_id, one.spec_ref, hashed)
        draft.put(one.key, one.value, ttl=one.semantics.ttl_seconds, meta=meta)

    async def _entries(self, keys: list[str]) -> list[Entry | None]:
        session = self.store._session
        return await session.retry(lambda: session.engine.read(self.store.name, keys))

    async def _record_expiries(
        self, trail: Trail, keys: list[str], found: list[Entry | None], heads: list[Entry | None]
    ) -> bool:
        """Tell of what expired under these keys, before anything else is told of them. False when nothing did."""
        any_expired = False
        for key, entry, head in zip(keys, found, heads, strict=True):
            if head is not None and trail.is_pending(entry, head):
                await trail.record_expiry(key, head)
                any_expired = True
        return any_expired

    async def _notice_expiries(self, keys: list[str], copies: list[Copy]) -> bool:
        """Tell of what expired under these keys, of which there are copies alone. False when nothing did."""
        any_expired = False
        for key, copy in zip(keys, copies, strict=False):
            if copy.live is not None and await self.store.entry(key) is None:
                await self._copies.notice(key, copy.live)
                any_expired = True
        return any_expired

    def _copy(self, one: _Asked, copy: Copy, writer: str) -> tuple[list[Write], list[Guard]]:
        """What a change makes of the copy of its key."""
        stored = None if one.value is None else encode_field(one.value)
        version = None if one.expected_version is None else one.expected_version + 1
        return self._copies.plan(one.key, copy, stored, one.semantics, writer, one.spec_ref, version)

    def _expect_expiries(self, asked: list[_Asked], copies: list[Copy], commit: Commit) -> None:
        """Look at what was put when its time is over; and tell of what expired just before it was written over."""
        if commit.replayed:
            return
        for number, (one, copy) in enumerate(zip(asked, copies, strict=False)):
            entry = commit.entries[number]
            if entry is None:
                continue
            if copy.live is not None and entry.version == 1:
                log_expiry(one.key, copy.live.meta)
            self._copies.expect(one.key, entry)

    # Conflicts ----------------------------------------------------------------

    def _check_version(self, one: _Asked, entry: Entry | None, request_id: str) -> None:
        expected = one.expected_version
        if expected is not None and expected != (0 if entry is None else entry.version):
            raise _conflict(one, entry, request_id)

    def _check_found(self, asked: list[_Asked], conflict: Conflict, request_id: str) -> None:
        """Raise the conflict, unless it is only that somebody else was quicker and the caller does not mind."""
        one = next((one for one in asked if one.key == conflict.key), None)
        if one is not None and one.expected_version is not None:
            self._check_version(one, conflict.current, request_id)

    async def _stale(self, asked: list[_Asked], request_id: str) -> VersionConflict:
        """The conflict of a request id that was used for another request, with what is there now."""
        one = asked[0]
        current = await self.store.entry(one.key)
        return VersionConflict(
            one.key,
            expected_version=one.expected_version,
            current=current,
            request_id=request_id,
            reason="stale_request",
        )

    async def _earlier(self, request_id: str, request: bytes, asked: list[_Asked]) -> Commit | None:
        """The commit that this very request made earlier. It may not be asked again: what it was made on is gone."""
        kept = await self.store._session.read(self.store.name, request_id, family="receipt")
        if kept is None:
            return None
        receipt = read_receipt(kept)
        # A server puts a hash of its own behind the digest that it was sent.
        if not receipt.digest.startswith(request_digest(request)):
            raise await self._stale(asked, request_id)
        values: list[Stored | None] = [None if one.value is None else encode_field(one.value) for one in asked]
        entries = tuple(
            entry if entry is None else msgspec.structs.replace(entry, stored=value)
            for entry, value in zip(receipt.commit.entries, values, strict=False)
        )
        return msgspec.structs.replace(receipt.commit, entries=entries, replayed=True)

    # Telling ------------------------------------------------------------------

    def _tell_success(self, commit: Commit, asked: list[_Asked], writer: str, request_id: str) -> None:
        for number, one in enumerate(asked):
            entry = commit.entries[number] if one.value is not None else commit.ended[number]
            if entry is None:
                continue
            purpose = one.purpose or _purpose(entry)
            self._log(logging.INFO, one, writer, request_id, purpose, entry.version, commit.replayed)
            outcome: Outcome = "replayed" if commit.replayed else "success"
            self._observe(one, outcome, purpose, request_id)

    def _tell_conflict(self, conflict: VersionConflict, asked: list[_Asked], writer: str) -> None:
        one = next(one for one in asked if one.key == conflict.key)
        # A delete says nothing of a purpose, and what it would have ended does.
        purpose = one.purpose or ("" if conflict.current is None else _purpose(conflict.current))
        self._log(logging.WARNING, one, writer, conflict.request_id, purpose, conflict.version, False, conflict)
        self._observe(one, "conflict", purpose, conflict.request_id)

    def _log(
        self,
        level: int,
        one: _Asked,
        writer: str,
        request_id: str,
        purpose: str,
        version: int | None,
        replayed: bool,
        conflict: VersionConflict | None = None,
    ) -> None:
        """One line of the log. Never a value."""
        told = {
            "event": one.verb,
            "directive": directive_of(writer),
            "key": one.key,
            "purpose": purpose,
            "requestId": request_id,
            "version": version,
        }
        if conflict is not None:
            told |= {"conflict": conflict.reason, "expectedVersion": one.expected_version, "correlationId": request_id}
        elif replayed:
            told["replayed"] = True
        # The key named `name` and some others are the record's own; ours are not among them.
        text = " ".join(f"{name}={member}" for name, member in told.items() if name != "event")
        log.log(level, "%s %s", one.verb, text, extra=told)

    def _observe(self, one: _Asked, outcome: Outcome, purpose: str, request_id: str) -> None:
        if self._observer is not None:
            self._observer(Observation(one.verb, outcome, self.store.name, purpose, one.key, request_id))

    # Under the policy ---------------------------------------------------------

    async def advance(
        self,
        key: str,
        change: Callable[[Envelope | None], dict[str, Any] | Awaitable[dict[str, Any] | None] | None],
        *,
        writer: str,
        semantics: Semantics | dict[str, Any],
        request_id: str | None = None,
        spec_ref: str | None = None,
        held: Envelope | Held | None = None,
        fence: Fencing | Fence | None = None,
    ) -> Envelope | None:
        """Change a key by a function of what is there: reload and replay, until it holds or the policy is spent.

        The function is given the envelope found, or None, and returns the new value, or None to leave it as it is. It
        runs again after each conflict, on what is there then, after the pauses of the policy. Callers of one opened
        store take turns, as with `limpet.Store.update`.

        Args:
            key: As of `kv_put`, as are the others.
            change: Makes the new value; plain or async.
            writer: As of `kv_put`.
            semantics: As of `kv_put`.
            request_id: Attempts ask under this id with their number behind it.
            spec_ref: As of `kv_put`.
            held: As of `kv_put`.
            fence: As of `kv_put`.

        Returns:
            The envelope after it; where the function left it as it is, the one found.

        Raises:
            Escalated: Trying is over. What was to be written is in a dead letter, if those are kept.
        """
        named = request_id or new_request_id()
        checked = semantics_of(semantics)
        last: dict[str, Any] = {"value": None, "expected": None}
        turn = self.store._session.turns.turn(("update", self.store.name, check_key(key)))

        async def attempt(number: int) -> Envelope | None:
            try:
                await take_turn(turn, number)
                return await attempt_in_turn(number)
            finally:
                turn.leave()

        async def attempt_in_turn(number: int) -> Envelope | None:
            found = await self.kv_get(key)
            made = change(found)
            value = await made if inspect.isawaitable(made) else made
            if value is None:
                return found
            last["value"], last["expected"] = value, 0 if found is None else found.version
            return await self.kv_put(
                key,
                value,
                writer=writer,
                semantics=checked,
                expected_version=last["expected"],
                request_id=f"{named}.{number}",
                spec_ref=spec_ref,
                held=held,
                fence=fence,
            )

        async def give_up(error: LimpetError, attempts: int) -> Escalated:
            return await self._escalate(
                error, attempts, key, last["value"], writer, checked, last["expected"], named, spec_ref
            )

        return await self._retrying(attempt, give_up)

    async def submit(
        self,
        key: str,
        value: dict[str, Any],
        *,
        writer: str,
        semantics: Semantics | dict[str, Any],
        expected_version: int | None = None,
        request_id: str | None = None,
        spec_ref: str | None = None,
        held: Envelope | Held | None = None,
        fence: Fencing | Fence | None = None,
    ) -> Envelope:
        """Put a value as `kv_put` does, and again where a failure will pass. A conflict is the caller's to decide.

        Raises:
            Escalated: Trying is over. What was to be written is in a dead letter, if those are kept.
        """
        named = request_id or new_request_id()
        asked = self._asked_put(key, value, semantics, expected_version, spec_ref)
        assert asked.semantics is not None
        checked = asked.semantics
        refused: list[VersionConflict] = []

        async def attempt(_: int) -> Envelope | None:
            try:
                return await self.kv_put(
                    key,
                    value,
                    writer=writer,
                    semantics=checked,
                    expected_version=expected_version,
                    request_id=named,
                    spec_ref=spec_ref,
                    held=held,
                    fence=fence,
                )
            except VersionConflict as conflict:
                # The same version would be expected in a second, and in vain.
                refused.append(conflict)
                return None

        async def give_up(error: LimpetError, attempts: int) -> Escalated:
            return await self._escalate(error, attempts, key, value, writer, checked, expected_version, named, spec_ref)

        envelope = await self._retrying(attempt, give_up)
        if envelope is None:
            raise refused[-1]
        return envelope

    async def wait_until_available(self) -> None:
        """Wait until the store can be reached, looking after 1, 2, 4 … 32 seconds; an outage that lasts is told."""
        pauses_s, number = self.policy.conflict_pauses_s, 0
        while True:
            try:
                await self.store.status()
            except LimpetError as error:
                if not error.retryable:
                    raise
                self._outage.heard(error)
            else:
                self._outage.ended()
                return
            await self._clock.sleep(pauses_s[min(number, len(pauses_s) - 1)])
            number += 1

    async def _retrying(
        self,
        attempt: Callable[[int], Awaitable[Envelope | None]],
        give_up: Callable[[LimpetError, int], Awaitable[Escalated]],
    ) -> Envelope | None:
        return await retrying(self.policy, self._clock, attempt, give_up=give_up, outage=self._outage, dice=self._dice)

    async def _escalate(
        self,
        error: LimpetError,
        attempts: int,
        key: str,
        value: dict[str, Any] | None,
        writer: str,
        semantics: Semantics,
        expected_version: int | None,
        request_id: str,
        spec_ref: str | None,
    ) -> Escalated:
        """Give up: keep a dead letter, tell somebody, and make the error that says so."""
        letters, name = self.dead_letters, None
        if letters is not None and value is not None:
            at = self._clock.now_ms() / 1000
            letter = DeadLetter(
                letters.new_name(at),
                at,
                self.store.name,
                key,
                value,
                writer,
                semantics.to_dict(),
                expected_version,
                request_id,
                error.code,
                attempts,
                error.version if isinstance(error, VersionConflict) else None,
                spec_ref,
            )
            try:
                await letters.keep(letter)
                name = letter.letter
            except LimpetError as failed:
                log.error("the dead letter of request %s could not be kept: %s", request_id, failed.code)
        told = {
            "event": "escalated",
            "directive": directive_of(writer),
            "key": key,
            "purpose": semantics.purpose,
            "requestId": request_id,
            "correlationId": request_id,
            "code": error.code,
            "attempts": attempts,
            "letter": name,
        }
        text = " ".join(f"{word}={member}" for word, member in told.items() if word != "event")
        log.error("escalated %s", text, extra=told)
        return Escalated(key, attempts=attempts, cause=error, letter=name, request_id=request_id)

    # The trail ----------------------------------------------------------------

    async def seal(self) -> int:
        """Tell of what expired, and seal what is new in the trail, now. Happens by itself inside ``async with``.

        Returns:
            How many rows were sealed.
        """
        if self._sealer is not None:
            return await self._sealer.turn()
        await self._copies.notice_all()
        return 0

    async def verify(self, *, anchor: str | None = None) -> Report:
        """Verify the trail, and that the entries are as it tells. See `limpet.semantic.seal.verify`."""
        return await verify(self.store, self._audited, anchor=anchor, sealer=self._sealer)

    async def prune(
        self,
        *,
        before: datetime | timedelta,
        anchor: str | None = None,
        dry_run: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> Pruned:
        """Remove what is sealed in the trail and older than a moment. See `limpet.semantic.seal.prune`."""
        return await prune(self.store, self._audited, before=before, anchor=anchor, dry_run=dry_run, progress=progress)

    @property
    def _audited(self) -> Audit:
        if self._audit is None:
            raise InvalidField("audit", "this store is not audited")
        return self._audit

    def watch(self, prefix: str, *, initial: bool = True) -> AsyncIterator[tuple[str, Envelope | None]]:
        """The entries whose keys begin so, and every change of them: a key with its envelope, or None when it ended."""
        return _watched(self.store, check_prefix(prefix), initial)

    def __repr__(self) -> str:
        return f"SemanticStore({self.store!r}{', audited' if self._trail is not None else ''})"


async def _watched(store: Store, prefix: str, initial: bool) -> AsyncIterator[tuple[str, Envelope | None]]:
    async for event in store.watch(f"{prefix}*", initial=initial):
        told = told_by(event)
        if told is not None:
            yield told


def told_by(event: Event) -> tuple[str, Envelope | None] | None:
    """What an event of the store tells of an entry: the envelope after it, or None when it ended."""
    if event.op in ("delete", "expire"):
        return event.key, None
    if event.op in ("put", "patch") and event.entry is not None:
        return event.key, envelope_of(event.entry)
    return None


def _request(asked: list[_Asked], writer: str) -> bytes:
    """What is asked, by which a repeated request is known."""
    return encode_field(
        [
            writer,
            *(
                [
                    one.verb,
                    one.key,
                    one.value,
                    None if one.semantics is None else one.semantics.to_dict(),
                    one.expected_version,
                    one.spec_ref,
                ]
                for one in asked
            ),
        ]
    )


def _purpose(entry: Entry) -> str:
    """What an entry is for; nothing where it was put without an envelope."""
    told = entry.meta.get("semantics")
    return str(told.get("purpose", "")) if isinstance(told, dict) else ""


def _told(one: _Asked, entry: Entry | None) -> Semantics | dict[str, Any]:
    """The semantics of a change: those that were given, or of an end those of what ended."""
    if one.semantics is not None:
        return one.semantics
    told = {} if entry is None else entry.meta.get("semantics", {})
    return told if isinstance(told, dict) else {}


def _conflict(one: _Asked, entry: Entry | None, request_id: str) -> VersionConflict:
    is_over = one.purpose == "lock" and entry is None
    return VersionConflict(
        one.key,
        expected_version=one.expected_version,
        current=entry,
        request_id=request_id,
        reason="lock_expired" if is_over else "guard",
    )


def _envelope(commit: Commit, number: int) -> Envelope:
    entry = commit.entries[number]
    assert entry is not None
    return envelope_of(entry, replayed=commit.replayed)
