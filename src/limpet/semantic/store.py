"""Semantic entries: checkpoints, feature flags, cursors and locks, under one key standard and in one envelope.

Keys name tenant and project. An entry records who wrote it, for what purpose, and by which request. A write may name
the version that it expects, and a conflict carries what was found. In an audited namespace every change writes a row of
the trail, in the same commit.

The verbs try once, and raise what went wrong. `SemanticStore.advance` and `SemanticStore.submit` try again by the retry
policy, and escalate when its attempts are used up.
"""

from __future__ import annotations

import inspect
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Self

import msgspec

from limpet.clock import Clock
from limpet.draft import Fence, Fencing
from limpet.errors import Conflict, Corrupt, LimpetError, NotFound
from limpet.keys import PAGE_BYTES
from limpet.model import Commit, Entry, Event
from limpet.request_ids import new_request_id
from limpet.semantic.audit import Audit, Trail
from limpet.semantic.commit import Committer
from limpet.semantic.copies import GRACE_S, RecoverableCopies
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
    check_writer,
    directive_of,
    envelope_of,
    parse_document,
    semantics_of,
)
from limpet.semantic.observe import Observation, WriteReporter, log_event
from limpet.semantic.policy import Escalated, OutageAlert, OutageMonitor, RetryPolicy, run_with_policy
from limpet.semantic.prune import Pruned, prune
from limpet.semantic.seal import Sealer
from limpet.semantic.verify import Report, verify
from limpet.semantic.writes import EntryWrite, WriteRequest, check_put, purpose_of
from limpet.store import Store, take_turn

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

PAGE_MAX: Final = 1000


class Listing(msgspec.Struct, frozen=True):
    """A page of entries, in order of their keys. Pass ``cursor`` as ``after`` for the next page; None on the last."""

    envelopes: list[Envelope]
    cursor: str | None


def request_id_of(workflow: str, at: datetime, *parts: object) -> str:
    """The request id of a write: the same for the same moment, the same workflow and the same further parts.

    The moment is that of the work, such as when a schedule was due, and not of the attempt. Then a workflow that was
    restarted sends the same id again.
    """
    if at.tzinfo is None:
        raise InvalidField("requestId", "the moment of a request id needs a time zone")
    moment = at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return "/".join([moment, workflow, *map(str, parts)])


class SemanticStore:
    """Semantic entries in a namespace.

    With ``async with`` it also records in the background what has expired, whichever process put it, and an audited one
    seals its trail. Closing the store is left to its owner.

    Args:
        store: The namespace.
        audit: Writes a row of every change; None for no trail.
        anchor: The latest known anchor of the trail, from a log or a report: the chain must go through it.
        clock: The clock to wait on between attempts; that of the store when not given.
        policy: How `advance` and `submit` try again after failures.
        dead_letters: Where to keep escalated writes; None to keep nothing.
        observer: Called after each success and each conflict.
        on_outage: Called with an outage that lasts.
        dice: Returns a random number from 0 to 1, for jitter.
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
        self._copies = RecoverableCopies(store, grace_s)
        self._clock = clock or store._session.clock
        self._committer = Committer(store, self._trail, self._copies, self._clock)
        self._reporter = WriteReporter(store.name, observer)
        self._outage = OutageMonitor(store.name, self._clock, self.policy.outage_alert_s, on_outage)
        self._dice = dice

    async def __aenter__(self) -> Self:
        (self._copies if self._sealer is None else self._sealer).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await (self._copies if self._sealer is None else self._sealer).stop()

    # Names --------------------------------------------------------------------

    async def key(self, tenant: str, project: str, *path: str) -> str:
        """The key of some identifiers. Those that the key holds as hashes are stored, for `identifier` to find."""
        key, hashed = join(tenant, project, *path)
        for component, original in hashed.items():
            await self._store_name(component, original)
        return key

    async def identifier(self, component: str) -> str:
        """The identifier that a component of a key stands for."""
        found = await self.store.get(f"names/{component}")
        return component if found is None else str(found["identifier"])

    async def _store_name(self, component: str, original: str) -> None:
        name = f"names/{component}"
        found = await self.store.get(name)
        if found is None:
            try:
                await self.store.create(name, {"identifier": original})
            except Conflict as conflict:
                found = None if conflict.current is None else conflict.current.value
        if found is not None and found["identifier"] != original:
            raise Corrupt(f"{component!r} stands for another identifier already")

    # Reading ------------------------------------------------------------------

    async def kv_get(self, key: str) -> Envelope | None:
        """The entry under a key; None when it is absent or expired."""
        entry = await self.store.entry(check_key(key))
        return None if entry is None else envelope_of(entry)

    async def kv_list(
        self, prefix: str, *, purpose: str | None = None, limit: int = 100, after: str | None = None
    ) -> Listing:
        """The entries under a prefix, which is at least ``tenant/<tenant>/``; with a purpose, only those for it."""
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
        write = check_put(key, value, semantics, expected_version, spec_ref)
        commit = await self._write([write], writer, request_id, held=held, fence=fence)
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
        write = await self._check_delete(key, expected_version)
        commit = await self._write([write], writer, request_id, held=held, fence=fence)
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
            raise InvalidField("items", "a batch needs at least one item")
        writes: list[EntryWrite] = []
        for number, item in enumerate(items):
            field = f"items[{number}]"
            # A struct is checked too: its constructor does not check types.
            one: BatchItem = parse_document(msgspec.to_builtins(item), BatchItem, field)  # type: ignore[arg-type]
            if isinstance(one, Put):
                writes.append(check_put(one.key, one.value, one.semantics, one.expected_version, one.spec_ref))
            else:
                writes.append(await self._check_delete(one.key, one.expected_version))
        commit = await self._write(writes, writer, request_id, held=held, fence=fence)
        return [_envelope(commit, n) if write.value is not None else None for n, write in enumerate(writes)]

    async def recover(self, key: str, *, writer: str, request_id: str | None = None) -> Envelope:
        """Put back the value that a key had when it expired, with the same time to live.

        Raises:
            VersionConflict: The key is there.
            NotFound: The key did not expire, or too long ago.
        """
        check_key(key)
        entry = await self.store.entry(key)
        recoverable = await self._recoverable(key, entry)
        if recoverable is None and entry is None:
            raise NotFound(key)
        if recoverable is None:
            raise VersionConflict(key, expected_version=0, current=entry, request_id=request_id or new_request_id())
        semantics = semantics_of(recoverable.meta["semantics"])
        write = EntryWrite(key, recoverable.value, semantics, 0, recoverable.meta.get("specRef"), "kvRecover")
        commit = await self._write([write], writer, request_id)
        return _envelope(commit, 0)

    async def _recoverable(self, key: str, entry: Entry | None) -> Entry | None:
        """The copy of the entry that expired under a key."""
        trail = self._trail
        if trail is None:
            return await self._copies.recoverable(key)
        (head,) = await trail.heads([key])
        if head is not None and trail.is_pending(entry, head):
            await trail.record_expiry(key, head)
        found = await trail.recoverable(key)
        return None if found is None else found[0]

    async def _check_delete(self, key: str, expected_version: object) -> EntryWrite:
        """A delete with its arguments checked. A lock needs its version: by now it may belong to another holder."""
        version = check_expected_version(expected_version)
        if version is None and purpose_of(await self.store.entry(check_key(key))) == "lock":
            raise InvalidField("expectedVersion", "a lock is ended by the version that its holder knows")
        return EntryWrite(check_key(key), None, None, version, None, "kvDelete")

    async def _write(
        self,
        writes: list[EntryWrite],
        writer: str,
        request_id: str | None,
        *,
        held: Envelope | Held | None = None,
        fence: Fencing | Fence | None = None,
    ) -> Commit:
        """Make writes in one commit, and report them."""
        check_writer(writer)
        if request_id is not None and not 0 < len(request_id) <= 512:
            raise InvalidField("requestId", "it is a text of 1 to 512 characters")
        if held is not None and not isinstance(held, Envelope | Held):
            raise InvalidField("held", f"it is an envelope, or a key and a token, not of type {type(held).__name__}")
        now = datetime.fromtimestamp(self._clock.now_ms() / 1000, UTC)
        named = request_id or request_id_of(new_request_id(), now)
        request = WriteRequest(writes, writer, named, request_id is not None, held, fence)
        try:
            commit = await self._committer.commit(request)
        except VersionConflict as conflict:
            self._reporter.report_conflict(request, conflict)
            raise
        self._reporter.report_success(request, commit)
        return commit

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
        """Change a key by a function of its entry: reload and apply it again after each conflict, by the policy.

        The function gets the envelope found, or None, and returns the new value, or None to leave the entry as it is.
        After a conflict and the pause of the policy it runs again, on the entry that is there then. Callers of one
        opened store take turns, as with `limpet.Store.update`.

        Args:
            key: As of `kv_put`.
            change: Makes the new value; plain or async.
            writer: As of `kv_put`.
            semantics: As of `kv_put`.
            request_id: Each attempt uses this id with its number appended.
            spec_ref: As of `kv_put`.
            held: As of `kv_put`.
            fence: As of `kv_put`.

        Returns:
            The envelope after it; where the function left it as it is, the one found.

        Raises:
            Escalated: The attempts are used up. The write is in a dead letter, if those are kept.
        """
        named = request_id or new_request_id()
        checked = semantics_of(semantics)
        last = EntryWrite(check_key(key), None, checked, None, spec_ref)
        turn = self.store._session.turns.turn(("update", self.store.name, key))

        async def attempt(number: int) -> Envelope | None:
            try:
                await take_turn(turn, number)
                return await attempt_in_turn(number)
            finally:
                turn.leave()

        async def attempt_in_turn(number: int) -> Envelope | None:
            nonlocal last
            found = await self.kv_get(key)
            made = change(found)
            value = await made if inspect.isawaitable(made) else made
            if value is None:
                return found
            expected_version = 0 if found is None else found.version
            last = EntryWrite(key, value, checked, expected_version, spec_ref)
            return await self.kv_put(
                key,
                value,
                writer=writer,
                semantics=checked,
                expected_version=expected_version,
                request_id=f"{named}.{number}",
                spec_ref=spec_ref,
                held=held,
                fence=fence,
            )

        async def give_up(error: LimpetError, attempts: int) -> Escalated:
            return await self._escalate(error, attempts, last, writer, named)

        return await self._run_with_policy(attempt, give_up)

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
        """Put a value as `kv_put` does, and try again after transient failures. A conflict is raised to the caller.

        Raises:
            Escalated: The attempts are used up. The write is in a dead letter, if those are kept.
        """
        named = request_id or new_request_id()
        write = check_put(key, value, semantics, expected_version, spec_ref)
        assert write.semantics is not None
        checked = write.semantics
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
                # Another attempt would expect the same version, and meet the same conflict.
                refused.append(conflict)
                return None

        async def give_up(error: LimpetError, attempts: int) -> Escalated:
            return await self._escalate(error, attempts, write, writer, named)

        envelope = await self._run_with_policy(attempt, give_up)
        if envelope is None:
            raise refused[-1]
        return envelope

    async def wait_until_available(self) -> None:
        """Wait until the store can be reached, checking after 1, 2, 4 … 32 seconds. A long outage raises an alert."""
        pauses_s, number = self.policy.conflict_pauses_s, 0
        while True:
            try:
                await self.store.status()
            except LimpetError as error:
                if not error.retryable:
                    raise
                self._outage.record_failure(error)
            else:
                self._outage.record_success()
                return
            await self._clock.sleep(pauses_s[min(number, len(pauses_s) - 1)])
            number += 1

    async def _run_with_policy(
        self,
        attempt: Callable[[int], Awaitable[Envelope | None]],
        give_up: Callable[[LimpetError, int], Awaitable[Escalated]],
    ) -> Envelope | None:
        return await run_with_policy(
            self.policy, self._clock, attempt, give_up=give_up, outage=self._outage, dice=self._dice
        )

    async def _escalate(
        self, error: LimpetError, attempts: int, write: EntryWrite, writer: str, request_id: str
    ) -> Escalated:
        """Give up a write: keep a dead letter, log it, and return the error to raise."""
        assert write.semantics is not None
        letters, name = self.dead_letters, None
        if letters is not None and write.value is not None:
            at = self._clock.now_ms() / 1000
            letter = DeadLetter(
                letters.new_name(at),
                at,
                self.store.name,
                write.key,
                write.value,
                writer,
                write.semantics.to_dict(),
                write.expected_version,
                request_id,
                error.code,
                attempts,
                error.version if isinstance(error, VersionConflict) else None,
                write.spec_ref,
            )
            try:
                await letters.keep(letter)
                name = letter.letter
            except LimpetError as failed:
                log.error("the dead letter of request %s could not be kept: %s", request_id, failed.code)
        members = {
            "event": "escalated",
            "directive": directive_of(writer),
            "key": write.key,
            "purpose": write.purpose,
            "requestId": request_id,
            "correlationId": request_id,
            "code": error.code,
            "attempts": attempts,
            "letter": name,
        }
        log_event(logging.ERROR, members)
        return Escalated(write.key, attempts=attempts, cause=error, letter=name, request_id=request_id)

    # The trail ----------------------------------------------------------------

    async def seal(self) -> int:
        """Record what expired and seal the new rows of the trail, now. Inside ``async with`` that happens by itself.

        Returns:
            How many rows were sealed.
        """
        if self._sealer is not None:
            return await self._sealer.turn()
        await self._copies.record_expiries()
        return 0

    async def verify(self, *, anchor: str | None = None) -> Report:
        """Verify the trail, and that the entries match it. See `limpet.semantic.verify.verify`."""
        return await verify(self.store, self._audited, anchor=anchor, sealer=self._sealer)

    async def prune(
        self,
        *,
        before: datetime | timedelta,
        anchor: str | None = None,
        dry_run: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> Pruned:
        """Remove the sealed rows that are older than a moment. See `limpet.semantic.prune.prune`."""
        return await prune(self.store, self._audited, before=before, anchor=anchor, dry_run=dry_run, progress=progress)

    @property
    def _audited(self) -> Audit:
        if self._audit is None:
            raise InvalidField("audit", "this store is not audited: open it with audit=")
        return self._audit

    def watch(self, prefix: str, *, initial: bool = True) -> AsyncIterator[tuple[str, Envelope | None]]:
        """The entries under a prefix, and every change of them: a key with its envelope, or None when it ended."""
        return _watch_entries(self.store, check_prefix(prefix), initial)

    def __repr__(self) -> str:
        return f"SemanticStore({self.store!r}{', audited' if self._trail is not None else ''})"


async def _watch_entries(store: Store, prefix: str, initial: bool) -> AsyncIterator[tuple[str, Envelope | None]]:
    async for event in store.watch(f"{prefix}*", initial=initial):
        change = read_change(event)
        if change is not None:
            yield change


def read_change(event: Event) -> tuple[str, Envelope | None] | None:
    """The key of an event and its envelope after it, None when the entry ended; None for an event of no entry."""
    if event.op in ("delete", "expire"):
        return event.key, None
    if event.op in ("put", "patch") and event.entry is not None:
        return event.key, envelope_of(event.entry)
    return None


def _envelope(commit: Commit, number: int) -> Envelope:
    entry = commit.entries[number]
    assert entry is not None
    return envelope_of(entry, replayed=commit.replayed)
