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
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol

import msgspec

from limpet.commit.group import Counters, EntryId, GroupPlan, commit_error, is_fault_of_one
from limpet.commit.receipts import make_mark
from limpet.commit.relative import BASE, NOW, Moment, as_planned
from limpet.errors import Ambiguous, LimpetError, Unavailable
from limpet.model import (
    Batch,
    Change,
    Commit,
    Entry,
    Equals,
    FieldEquals,
    HeldBy,
    Refusal,
    Revision,
    StoredFamily,
    Version,
)
from limpet.request_ids import new_request_id, request_group
from limpet.retry import JITTER_S_MAX, jitter_s
from limpet.transition import find_values_read

__all__ = ["CommitResult", "Committer", "Expected", "Head", "ReplyLost", "Stale", "Storage", "Unit"]

KNOWN_MAX: Final = 16_384
KNOWN_BYTES_MAX: Final = 2_048
NAMESPACES_MAX: Final = 1_024
CONTENDED_S: Final = 0.5
"""How long an entry counts as contended after another process was faster."""
ABSENT_REVISION: Final = -1
"""Expected where there is no entry. Not 0, which the receipt of a request that changes nothing may have."""
UNKNOWN_REVISION: Final = -2
"""Expected of an entry that must be read, in any case."""

CommitResult = Commit | Refusal | LimpetError


class Head(msgspec.Struct, frozen=True, gc=False):
    """What is stored under a key: an entry, perhaps without its value, and its weight; no entry for an absent key."""

    entry: Entry | None = None
    weight_bytes: int = 0


class Expected(msgspec.Struct, frozen=True, gc=False):
    """What a plan has read.

    Attributes:
        revision: The revision of the entry, `ABSENT_REVISION` or `UNKNOWN_REVISION`.
        has_expired: Whether the entry has expired, by the time of the engine.
        needs_value: Whether the reply must have the value if the entry is another.
        updated_ms: When the entry was updated, and
        expires_ms: when it expires. A server that lost its last writes gives their revisions again, to others.
    """

    revision: int = ABSENT_REVISION
    has_expired: bool = False
    needs_value: bool = False
    updated_ms: int = 0
    expires_ms: int | None = None


class Unit(msgspec.Struct, gc=False):
    """Batches that depend on each other: they are applied together or not at all.

    Revisions and times are those of a plan: see `limpet.commit.relative`.

    Attributes:
        expected: What the plan has read.
        changes: The changes, in the order of their revisions, each with its weight.
        kept: Receipts and marks of superseded requests, which leave no change in the log.
        counters: What the changes add to the counters of the namespace; the revision is the last one that is used.
    """

    expected: dict[EntryId, Expected]
    changes: list[tuple[Change, int]]
    kept: Mapping[EntryId, Entry]
    counters: Counters


class Stale(msgspec.Struct, frozen=True, gc=False):
    """A unit that was not applied, because an entry is not as expected: what is there for each that differs."""

    found: dict[EntryId, Head]
    now_ms: int


class ReplyLost(Exception):
    """A request was sent and its reply was lost: it may have been applied. Its cause is the error."""


class Storage(Protocol):
    """What the committer needs of an engine."""

    async def apply(self, namespace: str, name: str, units: Sequence[Unit]) -> Sequence[Moment | Stale | LimpetError]:
        """Apply each unit whose entries are all as expected, and return when that was.

        ``name`` is the name of the request: if a superseded mark has it, nothing is applied. The revisions of a unit
        follow its moment's without a gap. A unit without changes is only compared. An error in place of a unit means
        that this one was not applied. An error that is raised means that nothing was applied; `ReplyLost` means that
        this is unknown.
        """
        ...

    async def find_changes(self, namespace: str, after: int, request_id: str) -> list[Change]:
        """The changes of a request in the log after a revision."""
        ...


Apply = Callable[[str, Sequence[Unit]], Awaitable[Sequence[Moment | Stale | LimpetError]]]
"""Applies units to a namespace, under a name: `Storage.apply` of one namespace."""

Hold = Callable[[str], AbstractAsyncContextManager[Apply]]
"""Keeps other writers from a namespace, so that what is read does not change before it is written."""


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
        self._round_trip_s = 0.0

    def known(self, namespace: str) -> KnownEntries:
        """What this process knows of the entries of a namespace."""
        found = self._known.get(namespace)
        if found is None:
            if len(self._known) >= NAMESPACES_MAX:
                # Nothing is answered from it, so that to forget costs no more than a second round trip.
                del self._known[next(iter(self._known))]
            found = self._known[namespace] = KnownEntries()
        return found

    def learn(self, namespace: str, batch: Batch, commit: Commit) -> None:
        """Remember the entries that a batch has left which was committed in another way."""
        known = self.known(namespace)
        for write, entry in zip(batch.writes, commit.entries, strict=True):
            if entry is None or entry.stored is None:
                known.drop((write.family, write.key))
            else:
                known.set((write.family, write.key), Head(entry, entry.weight_bytes))

    def is_contended(self, namespace: str, batches: Iterable[Batch]) -> bool:
        """Whether a guarded one of the batches names a contended entry."""
        known = self._known.get(namespace)
        return known is not None and any(batch.guards and known.names_contended(batch) for batch in batches)

    def note_left_out(self, namespace: str, batch: Batch) -> None:
        """Note that an entry had not the revision that a batch expects, which was sent in another way.

        If this process itself wrote the entry since, no other is known to contend for it.
        """
        known = self.known(namespace)
        for guard in batch.guards:
            entry = known.find((guard.family, guard.key)).entry
            condition = guard.condition
            if isinstance(condition, Revision) and entry is not None and entry.revision <= condition.number:
                known.contend([(guard.family, guard.key)])

    def note_refused(self, namespace: str, batch: Batch, refusal: Refusal) -> None:
        """Note that a batch was refused which was sent in another way, and remember the entry found."""
        self.note_left_out(namespace, batch)
        guard, found = refusal.guard, refusal.found
        if guard is not None and found is not None and found.stored is not None:
            self.known(namespace).set((guard.family, guard.key), Head(found, found.weight_bytes))

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
        name = new_request_id()
        pending = [
            _Member(position, batch, batch.request_id or f"{name}.{position + 1}")
            for position, batch in enumerate(batches)
        ]
        results: dict[int, CommitResult] = {}
        if self.known(namespace).has_won(batches):
            # The others have just lost. Without a pause they would lose again: this process is the first to know what
            # it has written.
            await asyncio.sleep(self._round_trip_s)
        while pending:
            started_at = time.monotonic()
            try:
                done, stale = await self._commit_once(namespace, name, pending)
                results |= done
                self._round_trip_s = min(time.monotonic() - started_at, JITTER_S_MAX)
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
        return [results[position] for position in range(len(batches))]

    async def _commit_once(
        self, namespace: str, name: str, pending: list[_Member]
    ) -> tuple[dict[int, CommitResult], list[_Member]]:
        """Send the batches once. Returns the results of those that were applied, and the others."""
        known = self.known(namespace)
        await self._search_log(namespace, name, pending)
        if self._hold is None or not known.is_contended(pending):
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
            member.logged = await self._storage.find_changes(namespace, member.batch.retry_since, member.cause)

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
                has_lost = known.note_contended(one.unit, reply)
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
            known.advance(one.unit, reply)
            for member, outcome in zip(one.members, one.outcomes, strict=True):
                if isinstance(outcome, Refusal) and outcome.found is not None and outcome.found.stored is None:
                    # The caller gets the entry found with its value, which was too large to be known.
                    member.needs_value = one.unit.expected.keys()
                    stale.append(member)
                    continue
                result = _resolve(outcome, reply)
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
                (results[one.position],) = await self.commit(namespace, [one.batch], since)
            except Exception as own:
                results[one.position] = commit_error(one.batch, own)
        return results

    def _ambiguous(self, request_id: str, since: int, error: ReplyLost) -> Ambiguous:
        text = f"cannot tell whether {self._display_name} took the commit: {type(error.__cause__).__name__}"
        return Ambiguous(text, request_id=request_id, since=since)


class KnownEntries:
    """What this process has last seen of the entries of a namespace, and of its time. Any of it may be out of date."""

    def __init__(self) -> None:
        self._heads: dict[EntryId, Head] = {}
        # Until when each entry counts as contended.
        self._contended: dict[EntryId, float] = {}
        # Contended entries that this process was the last to write, as far as it knows.
        self._won: set[EntryId] = set()
        self._seen_ms = 0
        self._seen_at = 0.0

    def find(self, entry_id: EntryId) -> Head:
        """The entry as it was last seen; absent if it was never seen."""
        return self._heads.get(entry_id, _ABSENT)

    def now_ms(self) -> int:
        """About the time of the server: the last that was seen, and what has passed since."""
        return self._seen_ms + int((time.monotonic() - self._seen_at) * 1000)

    def set(self, entry_id: EntryId, head: Head) -> None:
        """Remember an entry, with its value if that is small."""
        heads = self._heads
        if entry_id[0] in ("receipt", "superseded"):
            # Each is of use once at most.
            return
        if head.entry is not None and head.weight_bytes > KNOWN_BYTES_MAX:
            head = Head(head.entry.without_value(), head.weight_bytes)
        if len(heads) >= KNOWN_MAX and entry_id not in heads:
            del heads[next(iter(heads))]
        heads[entry_id] = head

    def drop(self, entry_id: EntryId) -> None:
        """Forget an entry."""
        self._heads.pop(entry_id, None)

    def correct(self, stale: Stale) -> None:
        """Learn what is there instead of what was expected."""
        self._see_time(stale.now_ms)
        for entry_id, head in stale.found.items():
            self.set(entry_id, head)

    def advance(self, unit: Unit, moment: Moment) -> None:
        """Learn what a unit has left."""
        self._see_time(moment.now_ms)
        for change, weight_bytes in unit.changes:
            after = change.after
            head = _ABSENT if after is None else Head(moment.resolve(after), weight_bytes)
            entry_id: EntryId = (change.family, change.entry.key)
            self.set(entry_id, head)
            if entry_id in self._contended:
                self._won.add(entry_id)

    def note_contended(self, unit: Unit, stale: Stale) -> bool:
        """Note the entries that have changed under a unit, and return whether there are any.

        One that was only not known yet is not among them.
        """
        changed = []
        for entry_id, expected in unit.expected.items():
            found = stale.found.get(entry_id, _ABSENT).entry
            if expected.revision >= 0 and (found is None or found.revision != expected.revision):
                changed.append(entry_id)
        self.contend(changed)
        return bool(changed)

    def contend(self, entry_ids: Iterable[EntryId]) -> None:
        """Let entries count as contended for a while."""
        until = time.monotonic() + CONTENDED_S
        self._contended.update((entry_id, until) for entry_id in entry_ids)

    def has_won(self, batches: Iterable[Batch]) -> bool:
        """Whether this process was the last to write a contended entry that one of the batches expects as it is.

        Says so once for each time.
        """
        if not self._won:
            return False
        found = any(
            _expects_version(batch) and not self._won.isdisjoint(_find_named(batch)) and self.names_contended(batch)
            for batch in batches
        )
        self._won.clear()
        return found

    def names_contended(self, batch: Batch) -> bool:
        """Whether a batch names a contended entry."""
        if not self._contended:
            return False
        now = time.monotonic()
        self._contended = {entry_id: until for entry_id, until in self._contended.items() if until > now}
        return any(entry_id in self._contended for entry_id in _find_named(batch))

    def is_contended(self, members: Iterable[_Member]) -> bool:
        """Whether one of the batches names a contended entry, and holding it helps that batch."""
        return any(
            self.names_contended(member.batch)
            for member in members
            if member.is_stale or not _expects_version(member.batch)
        )

    def _see_time(self, now_ms: int) -> None:
        self._seen_ms, self._seen_at = now_ms, time.monotonic()


# Planning -------------------------------------------------------------------------


class _Member:
    """A batch of a group, until it has a result.

    Attributes:
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
        self.mark_revision: int | None = None
        self.is_stale = False
        self.found: dict[EntryId, Head] = {}
        self.needs_value: Iterable[EntryId] = ()
        self.has_lost = False
        self.is_alone = False

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
        logged = {member.cause: member.logged for member in members if member.logged}
        self._plan = GroupPlan(self._load, lambda _, cause: logged.get(cause, ()), Counters(BASE), NOW)
        self.outcomes = [self._add(member) for member in members]
        plan = self._plan
        for member in members:
            if member.mark_revision is not None and member.mark_id in plan.kept:
                self._expect_mark(member.mark_id, member.mark_revision)
        self.unit = Unit(self._expected, plan.changes, plan.kept, plan.counters)

    def _add(self, member: _Member) -> CommitResult:
        try:
            return self._plan.add(member.batch, member.cause)
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


def _find_named(batch: Batch) -> Iterable[EntryId]:
    """The entries that a batch names."""
    return ((one.family, one.key) for one in (*batch.writes, *batch.guards))


def _expects_version(batch: Batch) -> bool:
    """Whether a batch is refused if another writer was faster. Then holding only keeps the others waiting."""
    return any(isinstance(guard.condition, Revision | Version | Equals | FieldEquals) for guard in batch.guards)


def _read_all(members: list[_Member]) -> dict[EntryId, Expected]:
    """Expect of all entries that batches name what none has, so that they are read."""
    needed = {entry_id for member in members for entry_id in _find_needed_values(member)}
    return {
        entry_id: Expected(UNKNOWN_REVISION, needs_value=entry_id in needed)
        for member in members
        for entry_id in _find_named(member.batch)
    }


def _find_needed_values(member: _Member) -> Iterable[EntryId]:
    """The entries whose values the plan of a batch needs, or its caller."""
    yield from find_values_read(member.batch)
    yield from member.needs_value


def _split(members: list[_Member]) -> list[list[_Member]]:
    """Split batches into units: those that name an entry which one of them writes depend on each other."""
    if len(members) == 1 or any(member.is_alone for member in members):
        return [[member] for member in members]
    unit_of: dict[int, list[_Member]] = {id(member): [member] for member in members}
    named: dict[EntryId, list[_Member]] = {}
    written: set[EntryId] = set()
    for member in members:
        batch = member.batch
        for entry_id in _find_named(batch):
            named.setdefault(entry_id, []).append(member)
        written.update((write.family, write.key) for write in batch.writes)
        if batch.request_id is not None:
            named.setdefault(("receipt", batch.request_id), []).append(member)
            written.add(("receipt", batch.request_id))
        if member.is_retry:
            named.setdefault(member.mark_id, []).append(member)
            written.add(member.mark_id)
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


def _resolve(outcome: CommitResult, moment: Moment) -> CommitResult:
    if isinstance(outcome, Commit):
        return moment.resolve_commit(outcome)
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


_ABSENT: Final = Head()
