"""Commits on an engine that only compares and writes.

The batches of a group are planned here, on what this process knows of their entries, and sent as one request: what each
plan has read, and what it writes. The engine compares all that was read with what is there. Where it is the same, it
writes. Where not, it writes nothing and returns what is there, and the batches are planned again.

So an entry that is not known is taken for absent, and the reply tells what it is. And nothing is answered from what
this process knows: a refusal, too, is compared before a caller gets it.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from limpet.commit.contention import expects_version, find_named
from limpet.commit.group import Counters, EntryId, GroupPlan, commit_error, is_fault_of_one
from limpet.commit.known import KnownEntries
from limpet.commit.receipts import make_mark
from limpet.commit.relative import BASE, NOW, Moment, as_planned, batch_as_planned
from limpet.commit.storage import UNKNOWN_REVISION, Apply, Expected, Head, Hold, ReplyLost, Stale, Storage, Unit
from limpet.errors import Ambiguous, LimpetError, Unavailable
from limpet.model import Batch, Change, Commit, Entry, HeldBy, Refusal, Revision, StoredFamily
from limpet.request_ids import new_request_id, request_group
from limpet.retry import jitter_s
from limpet.transition import find_values_read

__all__ = ["CommitResult", "Committer"]

NAMESPACES_MAX: Final = 1_024

CommitResult = Commit | Refusal | LimpetError


class Committer:
    """Commits to the namespaces of one engine, of this process.

    An entry that has changed before it could be written is *contended* for a while. On an engine that can hold a
    namespace, commits that name it hold the namespace meanwhile: all processes then get their turn.
    """

    def __init__(self, storage: Storage, display_name: str, hold: Hold | None = None) -> None:
        self._storage = storage
        self._display_name = display_name
        self._hold = hold
        self._known: dict[str, KnownEntries] = {}

    def known(self, namespace: str) -> KnownEntries:
        """What this process knows of the entries of a namespace."""
        found = self._known.get(namespace)
        if found is None:
            if len(self._known) >= NAMESPACES_MAX:
                # Nothing is answered from it, so that to forget costs no more than a second round trip.
                del self._known[next(iter(self._known))]
            found = self._known[namespace] = KnownEntries()
        return found

    def is_contended(self, namespace: str, batches: Iterable[Batch]) -> bool:
        """Whether a guarded one of the batches names a contended entry."""
        known = self._known.get(namespace)
        return known is not None and any(batch.guards and known.contention.names_contended(batch) for batch in batches)

    def forget(self, namespace: str) -> None:
        """Forget the entries of a namespace: the server is another one, or has lost writes."""
        self._known.pop(namespace, None)

    async def commit(
        self, namespace: str, batches: Sequence[Batch], since: int, is_wanted: Callable[[int], bool] = lambda _: True
    ) -> Sequence[CommitResult]:
        """Commit batches in their order, and return the result of each. All of them are later than ``since``.

        An error that is raised means that nothing was applied. ``is_wanted`` says whether the caller of a batch, by its
        position, still waits: if not, a batch that was not applied yet is dropped.
        """
        known, name = self.known(namespace), new_request_id()
        members = [
            _Member(position, batch, batch.request_id or f"{name}.{position + 1}")
            for position, batch in enumerate(batches)
        ]
        named = {entry_id for member in members for entry_id in member.named}
        await known.reserve(named)
        try:
            await known.contention.let_others_write(batches)
            return await self._commit_members(namespace, name, members, since, is_wanted)
        finally:
            known.release(named)

    async def _commit_members(
        self, namespace: str, name: str, members: Sequence[_Member], since: int, is_wanted: Callable[[int], bool]
    ) -> Sequence[CommitResult]:
        pending = [*members]
        results: dict[int, CommitResult] = {}
        while pending:
            started_at = time.monotonic()
            try:
                done, stale = await self._commit_once(namespace, name, pending)
                results |= done
                self.known(namespace).contention.round_trip_s = time.monotonic() - started_at
            except ReplyLost as error:
                results |= {one.position: self._ambiguous(one.cause, since, error) for one in pending}
                break
            except Exception as error:
                if not results:
                    raise
                # Other batches are applied, so that this must not fail the whole group.
                results |= await self._commit_each(namespace, pending, since, error)
                break
            results |= {one.position: _dropped() for one in stale if not is_wanted(one.position)}
            pending = [one for one in stale if one.position not in results]
            if any(one.has_lost for one in pending):
                # Another process was faster. About one round trip, so that no process is always the slower one.
                await asyncio.sleep(jitter_s(time.monotonic() - started_at))
        return [results[member.position] for member in members]

    async def _commit_once(
        self, namespace: str, name: str, pending: list[_Member]
    ) -> tuple[dict[int, CommitResult], list[_Member]]:
        """Send the batches once. Returns the results of those that were applied, and the others."""
        known = self.known(namespace)
        await self._search_log(namespace, name, pending)
        if self._hold is None or not _is_helped_by_hold(known, pending):
            return await self._plan_and_apply(functools.partial(self._storage.apply, namespace), name, known, pending)
        try:
            async with self._hold(namespace) as apply:
                unit = Unit(_read_all(pending), [], {}, Counters(BASE))
                (reply,) = await apply(name, [unit])
                assert isinstance(reply, Stale), "no entry has the revision that is expected"
                known.correct(reply)
                for member in pending:
                    member.found = reply.found
                return await self._plan_and_apply(apply, name, known, pending)
        except BaseException:
            # What was learned of the writes may be rolled back, and their revisions given to others.
            self.forget(namespace)
            raise

    async def _search_log(self, namespace: str, name: str, pending: list[_Member]) -> None:
        """Find what retries have done earlier.

        Each leaves its mark first: its first attempt is then in the log already, or comes to nothing. What another
        retry of it does meanwhile makes another mark, which is compared with this one. One with a receipt does not look
        for marks, and the receipt is compared with what the plan has read.
        """
        retries = [one for one in pending if one.is_retry]
        unmarked = [one for one in retries if one.batch.receipt_ms is None and one.mark_revision is None]
        if unmarked:
            kept: dict[EntryId, Entry] = {one.mark_id: make_mark(one.cause, NOW) for one in unmarked}
            (reply,) = await self._storage.apply(namespace, name, [Unit({}, [], kept, Counters(BASE))])
            if isinstance(reply, LimpetError):
                raise reply
            assert isinstance(reply, Moment), "nothing is expected"
            for one in unmarked:
                one.mark_revision = reply.revision
        for member in retries:
            assert member.batch.retry_since is not None
            # Each time before it is planned: another retry of it may be applied in between.
            member.logged = await self._storage.find_changes(namespace, member.batch.retry_since, member.origin)

    async def _plan_and_apply(
        self, apply: Apply, name: str, known: KnownEntries, pending: list[_Member]
    ) -> tuple[dict[int, CommitResult], list[_Member]]:
        planned = [_PlannedUnit(known, members, known.now_ms()) for members in _split(pending)]
        replies = await apply(name, [one.unit for one in planned])
        results: dict[int, CommitResult] = {}
        stale: list[_Member] = []
        for one, reply in zip(planned, replies, strict=True):
            if isinstance(reply, Stale):
                known.correct(reply)
                has_lost = known.note_stale(one.unit, reply)
                for member in one.members:
                    member.note_stale(reply, has_lost=has_lost)
                refused = _refuse(known, one.members, reply)
                results |= refused
                stale += [member for member in one.members if member.position not in refused]
                continue
            if isinstance(reply, LimpetError):
                if len(one.members) > 1:
                    # One of them is the reason: the next attempt sends each by itself.
                    for member in one.members:
                        member.is_alone = True
                    stale += one.members
                else:
                    results[one.members[0].position] = reply
                continue
            stored = known.advance(one.unit, reply)
            for member, outcome in zip(one.members, one.outcomes, strict=True):
                if isinstance(outcome, Refusal) and outcome.found is not None and outcome.found.stored is None:
                    # The caller gets the entry found with its value, which was too large to be known.
                    member.needs_value = one.unit.expected.keys()
                    stale.append(member)
                    continue
                result = _resolve(outcome, reply, stored)
                if isinstance(result, Refusal) and _has_come_true(result):
                    member.found = {}
                    stale.append(member)
                else:
                    results[member.position] = result
        return results, stale

    async def _commit_each(
        self, namespace: str, pending: list[_Member], since: int, error: Exception
    ) -> dict[int, CommitResult]:
        if not is_fault_of_one(error) or len(pending) == 1:
            return {one.position: commit_error(one.batch, error) for one in pending}
        results: dict[int, CommitResult] = {}
        for one in pending:
            try:
                name = new_request_id()
                member = _Member(0, one.batch, one.batch.request_id or f"{name}.1")
                (results[one.position],) = await self._commit_members(namespace, name, [member], since, lambda _: True)
            except Exception as own:
                results[one.position] = commit_error(one.batch, own)
        return results

    def _ambiguous(self, request_id: str, since: int, error: ReplyLost) -> Ambiguous:
        text = f"cannot tell whether {self._display_name} took the commit: {type(error.__cause__).__name__}"
        return Ambiguous(text, request_id=request_id, since=since)


# Planning -------------------------------------------------------------------------


class _Member:
    """A batch of a group, until it has a result.

    Attributes:
        named: What it may share with other batches: the entries that it names, its receipt, and the mark of a retry.
        logged: What a retry has found of itself in the log.
        is_retry: Whether it may have been applied before.
        mark_revision: The revision of that mark when the log was last searched; None before the mark was left.
        found: What the last attempt has found.
        is_stale: Whether an attempt has failed.
        needs_value: Entries whose value is needed, beside those that the batch itself names.
        has_lost: Whether another process was faster at the last attempt.
        is_alone: Whether it must not be in a unit with others, one of which cannot be applied.
    """

    def __init__(self, position: int, batch: Batch, cause: str) -> None:
        self.position = position
        self.batch = batch
        self.cause = cause
        self.logged: list[Change] = []
        self.is_retry = batch.retry_since is not None and batch.request_id is not None
        self.named = find_named(batch)
        if batch.request_id is not None:
            self.named.append(("receipt", batch.request_id))
            if self.is_retry:
                self.named.append(self.mark_id)
        self.mark_revision: int | None = None
        self.is_stale = False
        self.found: dict[EntryId, Head] = {}
        self.needs_value: Iterable[EntryId] = ()
        self.has_lost = False
        self.is_alone = False

    @property
    def origin(self) -> str:
        """What the log has as the origin of its changes."""
        return self.batch.origin or self.cause

    @property
    def mark_id(self) -> EntryId:
        """The mark by which the first attempt of a retry is superseded."""
        return "superseded", request_group(self.cause)

    def note_stale(self, stale: Stale, *, has_lost: bool) -> None:
        """Note that an attempt has failed, and what it has found."""
        self.found, self.has_lost, self.is_stale = stale.found, has_lost, True
        mark = stale.found.get(self.mark_id) if self.is_retry else None
        if mark is not None:
            self.mark_revision = None if mark.entry is None else mark.entry.revision


class _PlannedUnit:
    """A unit, and the outcome of each of its batches if it is applied."""

    def __init__(self, known: KnownEntries, members: list[_Member], now_ms: int) -> None:
        self.members = members
        self._known = known
        self._now_ms = now_ms
        self._found = {entry_id: head for member in members for entry_id, head in member.found.items()}
        self._needs_value = {entry_id for member in members for entry_id in _find_needed_values(member)}
        self._expected: dict[EntryId, Expected] = {}
        # The first attempt of a retry may be in the same group, and has searched for nothing.
        logged = {member.origin: member.logged for member in members if member.logged}
        self._plan = GroupPlan(self._load, lambda _, origin: logged.get(origin, ()), Counters(BASE), NOW)
        self.outcomes = [self._add(member) for member in members]
        plan = self._plan
        for member in members:
            if member.mark_revision is not None and member.mark_id in plan.kept:
                self._expect_mark(member.mark_id, member.mark_revision)
        self.unit = Unit(self._expected, plan.changes, plan.kept, plan.counters)

    def _add(self, member: _Member) -> CommitResult:
        try:
            return self._plan.add(batch_as_planned(member.batch, self._now_ms), member.cause)
        except Exception as error:
            # A batch that cannot be planned fails alone.
            return commit_error(member.batch, error)

    def _expect_mark(self, mark_id: EntryId, revision: int) -> None:
        # Of several batches that share a mark, one may have searched the log before the others.
        earlier = self._expected.get(mark_id)
        self._expected[mark_id] = Expected(revision if earlier is None else min(revision, earlier.revision))

    def _load(self, family: StoredFamily, key: str) -> Entry | None:
        entry_id: EntryId = (family, key)
        head = self._found.get(entry_id) or self._known.find(entry_id)
        entry, needs_value = head.entry, entry_id in self._needs_value
        if entry is None:
            self._expected[entry_id] = Expected(needs_value=needs_value)
            return None
        has_expired = entry.expires_ms is not None and entry.expires_ms <= self._now_ms
        is_unknown = needs_value and entry.stored is None
        revision = UNKNOWN_REVISION if is_unknown else entry.revision
        self._expected[entry_id] = Expected(revision, has_expired, needs_value, entry.updated_ms, entry.expires_ms)
        if head.weight_bytes is not None:
            self._plan.weights[entry_id] = head.weight_bytes
        return as_planned(entry, has_expired=has_expired)


def _refuse(known: KnownEntries, members: list[_Member], stale: Stale) -> dict[int, CommitResult]:
    """The results of batches that are all refused by what a reply has found. It is no older than their comparison."""
    planned = _PlannedUnit(known, members, stale.now_ms)
    if planned.unit.changes or planned.unit.kept or not planned.unit.expected.keys() <= stale.found.keys():
        return {}
    moment = Moment(0, stale.now_ms)
    results: dict[int, CommitResult] = {}
    for member, outcome in zip(members, planned.outcomes, strict=True):
        if isinstance(outcome, Refusal) and (outcome.found is None or outcome.found.stored is not None):
            results[member.position] = moment.resolve_refusal(outcome)
    return results


def _is_helped_by_hold(known: KnownEntries, members: Iterable[_Member]) -> bool:
    """Whether one of the batches names a contended entry, and holding it helps that batch."""
    return any(
        known.contention.names_contended(member.batch)
        for member in members
        if member.is_stale or not expects_version(member.batch)
    )


def _read_all(members: list[_Member]) -> dict[EntryId, Expected]:
    """Expect of all entries that batches name what none has, so that they are read."""
    needed = {entry_id for member in members for entry_id in _find_needed_values(member)}
    return {
        entry_id: Expected(UNKNOWN_REVISION, needs_value=entry_id in needed)
        for member in members
        for entry_id in find_named(member.batch)
    }


def _find_needed_values(member: _Member) -> Iterable[EntryId]:
    """The entries whose values the plan of a batch needs, or its caller."""
    yield from find_values_read(member.batch)
    yield from member.needs_value


def _split(members: list[_Member]) -> list[list[_Member]]:
    """Split batches into units: those that name an entry which one of them writes depend on each other."""
    if len(members) == 1 or any(member.is_alone for member in members):
        return [[member] for member in members]
    if len({entry_id for member in members for entry_id in member.named}) == sum(len(one.named) for one in members):
        return [[member] for member in members]
    named: dict[EntryId, list[_Member]] = {}
    for member in members:
        for entry_id in member.named:
            named.setdefault(entry_id, []).append(member)
    unit_of: dict[int, list[_Member]] = {id(member): [member] for member in members}
    written: set[EntryId] = {(write.family, write.key) for member in members for write in member.batch.writes}
    written.update(entry_id for entry_id in named if entry_id[0] in ("receipt", "superseded"))
    for entry_id in written:
        first, *others = named[entry_id]
        for other in others:
            into, unit = unit_of[id(first)], unit_of[id(other)]
            if into is not unit:
                into += unit
                for member in unit:
                    unit_of[id(member)] = into
    units = {id(unit): unit for unit in unit_of.values()}
    for unit in units.values():
        unit.sort(key=lambda member: member.position)
    return list(units.values())


def _resolve(outcome: CommitResult, moment: Moment, stored: Mapping[int, Entry]) -> CommitResult:
    if isinstance(outcome, Commit):
        return moment.resolve_commit(outcome, stored)
    return moment.resolve_refusal(outcome) if isinstance(outcome, Refusal) else outcome


def _has_come_true(refusal: Refusal) -> bool:
    """Whether a batch expects the very revision that a batch before it got, which no plan can know."""
    guard, found = refusal.guard, refusal.found
    if guard is None or found is None:
        return False
    return guard.condition in (Revision(found.revision), HeldBy(found.created_revision))


def _dropped() -> LimpetError:
    """The result of a batch whose caller is gone, which no caller sees."""
    return Unavailable("the caller no longer waits for this commit, which was not applied")
