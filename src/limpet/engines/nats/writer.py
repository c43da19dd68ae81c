"""Commits on NATS: messages that the server stores only if their keys are unchanged.

A commit is planned on the last messages of its keys, and its messages carry their numbers as a condition
(see `publisher`). If another writer was faster, the commit is planned again on the keys as they are now.

When the reply to a write was lost, the write is looked up in its receipt, and in the messages of its keys, each of
which names the request that made it. If some of those were dropped meanwhile, the result is unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from limpet.commit.contention import Contention, expects_version, find_named
from limpet.commit.group import Counters, GroupPlan
from limpet.commit.receipts import SUPERSEDED_MS, make_mark, may_be_superseded
from limpet.engines.nats.connection import ApiError, ConnectionLost, NoReply
from limpet.engines.nats.follower import RangeReader
from limpet.engines.nats.messages import BASE, EntryId, LastMessages, Message, parse
from limpet.engines.nats.publisher import MADE_RECEIPT_MS, MaybeStored, Publisher, digest_of
from limpet.engines.nats.stream import (
    BatchAbandoned,
    HalfStored,
    KeyChanged,
    NamespaceStream,
    ReplyLost,
    Server,
    await_ack,
    entry_in,
    is_mark,
    parse_ack,
    seq_of,
    seqs_of,
)
from limpet.errors import Ambiguous, LimpetError
from limpet.model import Batch, Change, Commit, Entry, Expire, Refusal, StoredFamily, Write, live
from limpet.retry import jitter_s
from limpet.transition import Plan, find_plain_write, plan, plan_write, read_receipt

__all__ = ["Writer"]

# How often a request is sent that gets no reply, and one that the server has no room to process.
LOST_MAX: Final = 3
ABANDONED_MAX: Final = 64
# For so long the messages of a key that has ended since are certainly there.
RETRY_MS: Final = 90_000
UNSETTLED_MAX: Final = 16_384


class RequestForgotten(Exception):
    """It can no longer be found out whether a request was applied."""


class Writer:
    """Commits to one namespace, of this process."""

    def __init__(self, server: Server, stream: NamespaceStream) -> None:
        self._server = server
        self._stream = stream
        self._subjects = stream.subjects
        self._name = os.urandom(8).hex()
        self._numbers = itertools.count(1)
        # Requests without a reply, and when they were first sent by this process.
        self._unsettled: dict[str, int | None] = {}
        self._turns: dict[EntryId, deque[asyncio.Future[None]]] = {}
        self.contention = Contention()
        self.publisher = Publisher(server, stream)

    def stop(self) -> None:
        """Cancel the work in the background."""
        self.publisher.stop()

    async def commit(self, batch: Batch) -> Commit | Refusal:
        """See `Engine.commit`."""
        lone = _find_lone(batch)
        if lone is not None:
            if lone in self._turns:
                await self._take_turn(lone)
            else:
                self._turns[lone] = deque()
            try:
                return await self._commit_plain(batch, lone) or await self._commit(batch, lone)
            finally:
                self._release_turn(lone)
        taken: list[EntryId] = []
        try:
            for entry_id in sorted({(write.family, write.key) for write in batch.writes}):
                await self._take_turn(entry_id)
                taken.append(entry_id)
            if not _only_expires(batch):
                return await self._commit(batch, None)
            with contextlib.suppress(KeyChanged, BatchAbandoned, MaybeStored, ReplyLost):
                return await self._expire_together(batch)
        finally:
            for entry_id in taken:
                self._release_turn(entry_id)
        return await self._expire_each(batch)

    async def _take_turn(self, entry_id: EntryId) -> None:
        """Wait for the turn of a key: of two commits that are planned at once, the second would be rejected."""
        queue = self._turns.get(entry_id)
        if queue is None:
            self._turns[entry_id] = deque()
            return
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(waiting)
        try:
            await waiting
        except asyncio.CancelledError:
            if not waiting.cancelled():
                self._release_turn(entry_id)
            # Otherwise the turn was not ours yet, and its holder skips a cancelled waiter.
            raise

    def _release_turn(self, entry_id: EntryId) -> None:
        queue = self._turns[entry_id]
        while queue:
            waiting = queue.popleft()
            if not waiting.done():
                waiting.set_result(None)
                return
        del self._turns[entry_id]

    async def _commit_plain(self, batch: Batch, lone: EntryId) -> Commit | Refusal | None:
        """Commit a plain write of a key whose last message is known, as most writes are; None for any other batch.

        It does what `_commit` would do, in fewer steps.
        """
        write, connection, known = find_plain_write(batch), self._server.live_connection, self._stream.known
        if write is None or connection is None or self._server.syncs or lone not in known:
            return None
        before, now_ms, seen = known[lone], self._stream.now_ms(), self._stream.seen
        current = entry_in(before)
        if current is not None and current.expires_ms is not None:
            return None
        if before is not None and before.at_ms > now_ms:
            now_ms = before.at_ms
        cause = self._make_cause()
        outcome = plan_write(write, current, batch.value_bytes_max, now_ms, BASE + 1, cause)
        # What is known may be old, and so may be the reason to refuse. An entry that expires needs an alarm.
        if isinstance(outcome, Refusal) or outcome.changes[0].entry.expires_ms is not None:
            return None
        started_at = time.monotonic()
        draft, ack = self.publisher.start_one(connection, lone, before, outcome.changes[0])
        try:
            number = parse_ack(*await ack)
        except Exception as error:
            attempts = _Attempts(cause, None, None)
            attempts.start({lone: before}, seen, now_ms)
            is_lost = isinstance(error, ConnectionLost | NoReply)
            await self._prepare_retry(batch, ReplyLost() if is_lost else error, attempts)
            return await self._repeat(batch, None, attempts)
        self._note_written(started_at, (lone,))
        return self.publisher.finish_one(lone, draft, number)

    def _make_cause(self) -> str:
        """The name of a request that its caller has not named."""
        return f"{self._name}-{next(self._numbers):x}"

    async def _commit(self, batch: Batch, lone: EntryId | None) -> Commit | Refusal:
        """Commit a batch of a lone key as one message, and any other as messages that are stored together."""
        cause = batch.request_id or self._make_cause()
        attempts = _Attempts(cause, None if lone else ("receipt", cause), batch.retry_since)
        known = self._stream.known
        cached = {lone: known[lone]} if lone in known and batch.retry_since is None else None
        if batch.guards:
            await self.contention.let_others_write([batch])
        return await self._repeat(batch, cached, attempts)

    async def _repeat(self, batch: Batch, cached: LastMessages | None, attempts: _Attempts) -> Commit | Refusal:
        """Attempt a commit until it has an outcome."""
        while True:
            try:
                answer = await self._attempt(batch, cached, attempts)
                if answer is not None:
                    self._unsettled.pop(attempts.cause, None)
                    return answer
            except Exception as error:
                await self._prepare_retry(batch, error, attempts)
            # What was cached may be old.
            cached = None

    async def _attempt(self, batch: Batch, cached: LastMessages | None, attempts: _Attempts) -> Commit | Refusal | None:
        """Plan a batch on what its keys hold, and send that. None if it must be planned again on newer messages."""
        cause, receipt = attempts.cause, attempts.receipt
        if attempts.must_supersede:
            await self._supersede(cause)
            attempts.must_supersede = False
        found = cached or await self._stream.load_all(_find_keys(batch, receipt))
        mark = await self._load_mark(cause) if may_be_superseded(batch) else None
        now_ms = self._commit_time(found)
        request = batch
        earlier: Sequence[Change] = ()
        # A first attempt with a mark is planned as it came, and so refused. Otherwise it is a retry of those before it.
        if mark is None and (receipt is not None or attempts.since is not None):
            kept_ms = batch.receipt_ms or (None if receipt is None else MADE_RECEIPT_MS)
            request = msgspec.structs.replace(batch, request_id=cause, receipt_ms=kept_ms, retry_since=attempts.since)
            if receipt is not None and is_mark(found[receipt], now_ms):
                if attempts.since is None:
                    attempts.since = seq_of(found[receipt]) - 1
                return await self._complete(request, receipt, found, now_ms)
            if attempts.since is not None:
                earlier = await self._find_earlier(request, found, attempts)
                # The search may have read the server's time.
                now_ms = self._commit_time(found)
        outcome = _plan(request, found, now_ms, cause, earlier, mark)
        if isinstance(outcome, Refusal) or not outcome.changes:
            if cached is not None or not await self._is_of_one_moment(outcome, batch, found):
                return None
            if isinstance(outcome, Refusal):
                return outcome
            if outcome.commit.replayed:
                return outcome.commit
            outcome = await self._unchanged(outcome)
            if batch.receipt_ms is None:
                return outcome.commit
        attempts.start(found, self._stream.seen, now_ms)
        if receipt is not None:
            commit = await self.publisher.send_all(request, receipt, found, outcome, now_ms)
        else:
            ((entry_id, before),) = found.items()
            commit = await self.publisher.send_one(entry_id, before, outcome)
        if outcome.changes:
            entry_ids = [(change.family, change.entry.key) for change in outcome.changes]
            self._note_written(attempts.started_at, entry_ids)
        return commit

    def _note_written(self, started_at: float, entry_ids: Iterable[EntryId]) -> None:
        self._server.notify(self._stream.namespace)
        self.contention.round_trip_s = time.monotonic() - started_at
        for entry_id in entry_ids:
            self.contention.note_written(entry_id)

    async def _prepare_retry(self, batch: Batch, error: Exception, attempts: _Attempts) -> None:
        """Get ready for another attempt after an error, or raise the error that the caller of the commit gets."""
        cause = attempts.cause
        match error:
            case KeyChanged():
                # Another writer was faster, so some writer always makes progress. Attempts are not limited.
                self.contention.note_lost(find_named(batch))
                if not expects_version(batch):
                    await attempts.pause()
                # Otherwise the next attempt only reads what refuses the batch.
                return
            case BatchAbandoned():
                attempts.abandoned += 1
                if attempts.abandoned < ABANDONED_MAX:
                    await attempts.pause()
                    return
            case ReplyLost() | MaybeStored():
                if attempts.since is None:
                    attempts.since = max([attempts.seen, *map(seq_of, attempts.found.values())])
                    attempts.refusal = error.refusal if isinstance(error, MaybeStored) else None
                    self._note_unsettled(cause, attempts.sent_ms)
                else:
                    # It stays unknown: a request that a read did not find may be stored after the read.
                    attempts.refusal = None
                attempts.lost += 1
                if attempts.lost < LOST_MAX:
                    return
            case _:
                pass
        if attempts.since is None:
            self._unsettled.pop(cause, None)
            raise error
        raise self._ambiguous(cause, attempts.since, error) from error

    def _ambiguous(self, cause: str, since: int, error: Exception) -> Ambiguous:
        self._note_unsettled(cause, None)
        if isinstance(error, HalfStored):
            return Ambiguous(str(error), request_id=cause, since=since)
        reason = str(error) if isinstance(error, ApiError | MaybeStored) else type(error).__name__
        return Ambiguous(f"cannot tell whether NATS took the commit: {reason}", request_id=cause, since=since)

    def _note_unsettled(self, cause: str, first_sent_ms: int | None) -> None:
        """Remember that a request may have been applied, and when it was first sent, if this process sent it."""
        if cause not in self._unsettled:
            while len(self._unsettled) >= UNSETTLED_MAX:
                del self._unsettled[next(iter(self._unsettled))]
            self._unsettled[cause] = first_sent_ms

    async def _find_earlier(self, request: Batch, found: LastMessages, attempts: _Attempts) -> list[Change]:
        """The changes of an earlier attempt, from the messages of its keys; none if a receipt has its result."""
        cause, receipt, since = attempts.cause, attempts.receipt, request.retry_since or 0
        if receipt is not None:
            # If a part of the batch was stored, its mark would be there.
            attempts.raise_refusal()
            if (lasting := _find_lasting(found[receipt], request, self._commit_time(found))) is not None:
                found[receipt] = lasting
                return []
        changes: list[Change] = []
        written = {(write.family, write.key): found[write.family, write.key] for write in request.writes}
        for entry_id, message in written.items():
            if message is not None and message.seq > since:
                changes += await self._read_changes(entry_id, request.origin or cause, since, message)
        last = max(changes, key=lambda change: change.revision, default=None)
        if last is None:
            for entry_id, message in written.items():
                await self._check_remembered(cause, entry_id, message, since)
            attempts.raise_refusal()
        elif last.revision != last.commit:
            # The last change of the batch is missing: it was stored in part, or its key has been purged.
            raise RequestForgotten
        return changes

    async def _read_changes(self, entry_id: EntryId, origin: str, since: int, last: Message) -> list[Change]:
        """The changes of a key that have this origin, after a number."""
        messages = [last]
        if last.origin != origin:
            subject, key = self._subjects.of(entry_id), entry_id[1]
            found = await RangeReader(self._stream, self._server.connection, since, last.seq, subject).read()
            seqs = [seq for _, seq, headers, _ in found if parse(key, seq, headers, None).origin == origin]
            read = await asyncio.gather(*(self._stream.at(entry_id, seq) for seq in seqs))
            if None in read:
                raise RequestForgotten
            messages = [message for message in read if message is not None]
        # With the value of a touch, which its message has.
        return [
            Change(message.op, message.entry, message.seq, message.commit, message.at_ms, message.origin, entry_id[0])
            for message in messages
        ]

    async def _check_remembered(self, cause: str, entry_id: EntryId, message: Message | None, since: int) -> None:
        """Refuse to apply a request that may have been applied and forgotten."""
        if message is not None and message.seq <= since:
            return
        if message is None and (first_sent_ms := self._unsettled.get(cause)) is not None:
            # Read the server's time: this host may have been suspended meanwhile.
            await self._stream.info()
            if self._stream.now_ms() - first_sent_ms <= RETRY_MS:
                return
        if not await self._stream.keeps_all_since(entry_id, since):
            raise RequestForgotten

    # A paused server may deliver a first attempt after its retry ran elsewhere. The retry writes a superseded mark
    # before it reads its keys; a first attempt checks for the mark after it has read its keys. If it finds no mark, the
    # retry reads its keys later: either it finds the first attempt there, or it writes them first, and the conditional
    # publish of the first attempt is rejected.

    async def _supersede(self, cause: str) -> None:
        """Mark the first attempt of a request as superseded."""
        connection = await self._server.connection()
        headers = b"NATS/1.0\r\nNats-TTL: %ds\r\n\r\n" % (SUPERSEDED_MS // 1000)
        await await_ack(connection.request(self._subjects.superseded(cause), headers=headers))

    async def _load_mark(self, cause: str) -> Entry | None:
        """The mark that a request is superseded."""
        found = await self._stream.get({"last_by_subj": self._subjects.superseded(cause)})
        return None if found is None else make_mark(cause, self._stream.now_ms())

    def _commit_time(self, found: LastMessages) -> int:
        """The time of a commit: never before its keys' last messages, whose writers may have a clock that is ahead."""
        now_ms = self._stream.now_ms()
        for message in found.values():
            if message is not None and message.at_ms > now_ms:
                now_ms = message.at_ms
        return now_ms

    async def _is_of_one_moment(self, outcome: Plan | Refusal, batch: Batch, found: LastMessages) -> bool:
        """Whether an outcome that sends nothing is true at one moment. Each key was read at a moment of its own.

        What is sent is compared by the server. A receipt, or the first guard, decides by itself.
        """
        if isinstance(outcome, Refusal):
            is_of_one_key = outcome.reason == "stale_request" or outcome.guard in batch.guards[:1]
        else:
            is_of_one_key = outcome.commit.replayed
        return is_of_one_key or len(found) == 1 or seqs_of(await self._stream.load_all(found)) == seqs_of(found)

    async def _unchanged(self, outcome: Plan) -> Plan:
        """A commit that changes nothing gets the latest revision."""
        return Plan(msgspec.structs.replace(outcome.commit, revision=await self._stream.revision()), ())

    async def _expire_together(self, batch: Batch) -> Commit:
        """Expire entries as one batch, which needs no receipt: each expiry is true by itself."""
        found = await self._stream.load_all((write.family, write.key) for write in batch.writes)
        outcome = _plan(batch, found, self._commit_time(found))
        assert not isinstance(outcome, Refusal)
        if not outcome.changes:
            return (await self._unchanged(outcome)).commit
        commit = await self.publisher.send_expiries(found, outcome)
        self._server.notify(self._stream.namespace)
        return commit

    async def _expire_each(self, batch: Batch) -> Commit:
        """Expire each entry by itself: another sweeper that was faster has done the same."""
        each = [msgspec.structs.replace(batch, writes=(write,)) for write in batch.writes]
        commits = [one for one in await asyncio.gather(*map(self.commit, each)) if isinstance(one, Commit)]
        ended = tuple(commit.ended[0] for commit in commits)
        revision, at_ms = max((commit.revision, commit.at_ms) for commit in commits)
        return Commit(revision, (None,) * len(ended), ended, at_ms)

    async def _complete(self, batch: Batch, receipt: EntryId, found: LastMessages, now_ms: int) -> Commit | Refusal:
        """Store the rest of a batch of which the server stored a part.

        Its guards held when the server took it, so they are not checked again. A key that has not been written since
        the mark is written now, and a key that this batch has written stays as it is. Where another request has
        written since, it is unknown what was stored.
        """
        mark = found[receipt]
        assert mark is not None
        if mark.entry.meta_json != digest_of(batch):
            return Refusal("stale_request", receipt[1], None, now_ms)
        stored: list[Message | None] = []
        rest: list[Write] = []
        for write in batch.writes:
            message = found[write.family, write.key]
            if message is None or message.seq < mark.seq or _only_expired(message, mark):
                rest.append(write)
                message = None
            elif message.origin != batch.origin:
                raise HalfStored(receipt[1], f"{write.key!r} has been written since; read the keys and decide again")
            stored.append(message)
        remaining = msgspec.structs.replace(batch, guards=(), writes=tuple(rest), receipt_ms=None)
        outcome = _plan(remaining, found, now_ms, batch.request_id)
        if isinstance(outcome, Refusal):
            raise HalfStored(receipt[1], f"{outcome.key!r} has changed since; read the keys and decide again")
        planned = zip(outcome.commit.entries, outcome.commit.ended, strict=True)
        pairs = [
            next(planned) if one is None else (one.held, None) if one.held is not None else (None, one.entry)
            for one in stored
        ]
        last = max((one.seq for one in stored if one is not None), default=mark.seq)
        entries, ended = tuple(after for after, _ in pairs), tuple(ended for _, ended in pairs)
        commit = Commit(last, entries, ended, now_ms, kept=outcome.commit.kept)
        known = {receipt: mark} | {(write.family, write.key): found[write.family, write.key] for write in rest}
        try:
            commit = await self.publisher.send_all(batch, receipt, known, Plan(commit, outcome.changes), now_ms)
        except (ApiError, MaybeStored) as error:
            reason = f"{error}; make room on the server, then repeat the call with this request id"
            raise HalfStored(receipt[1], reason) from error
        self._server.notify(self._stream.namespace)
        return commit


# Parts ------------------------------------------------------------------------


class _Attempts:
    """The attempts at one commit.

    Attributes:
        cause: The request id that the changes get in the log.
        receipt: The receipt of the request; None for a lone message.
        since: A revision below that of the commit, if it was applied; None while it cannot have been applied.
        must_supersede: Whether the first attempt, of another process, is not marked as superseded yet.
        refusal: The error of the only attempt that may have been applied.
        found: The messages on which the last attempt was planned,
        seen: the highest number that was seen before it was sent, and
        sent_ms, started_at: when it was sent, by the clock of the server and of this process.
    """

    refusal: ApiError | None = None
    lost = abandoned = 0

    def __init__(self, cause: str, receipt: EntryId | None, since: int | None) -> None:
        self.cause, self.receipt, self.since = cause, receipt, since
        self.must_supersede = since is not None
        self.start({}, 0, 0)

    def start(self, found: LastMessages, seen: int, sent_ms: int) -> None:
        """Note what is sent, and when."""
        self.found, self.seen, self.sent_ms = found, seen, sent_ms
        self.started_at = time.monotonic()

    async def pause(self) -> None:
        """Wait a moment, so that other writers can finish."""
        await asyncio.sleep(jitter_s(time.monotonic() - self.started_at))

    def raise_refusal(self) -> None:
        """Raise the error of an attempt, after a read has shown that nothing was stored."""
        if self.refusal is not None:
            self.since = None
            raise self.refusal


def _find_lone(batch: Batch) -> EntryId | None:
    """The key of a batch that can be one message: one write, guards on its own key only, no need of a receipt."""
    if len(batch.writes) != 1 or batch.receipt_ms is not None:
        return None
    write = batch.writes[0]
    if batch.guards and any(guard.key != write.key or guard.family != write.family for guard in batch.guards):
        return None
    return write.family, write.key


def _only_expires(batch: Batch) -> bool:
    """Whether a batch is a sweeper's: no write in it depends on another."""
    if not batch.writes or batch.guards or batch.receipt_ms is not None:
        return False
    return all(type(write) is Expire for write in batch.writes)


def _only_expired(message: Message, mark: Message) -> bool:
    """Whether a key has only expired since the mark of a batch: the batch itself records that before it writes it."""
    return message.op == "expire" and message.prev is not None and message.prev < mark.seq


def _find_lasting(receipt: Message | None, request: Batch, now_ms: int) -> Message | None:
    """The receipt that decides about a retry, as one that does not expire before that; None if there is none.

    One that the request left and that has expired counts if it changed something: the log has its changes.
    """
    held = entry_in(receipt)
    if receipt is None or held is None or held.stored is None:
        return None
    if live(held, now_ms) is None:
        first = read_receipt(held)
        has_changed = any(first.commit.entries) or any(first.commit.ended)
        if first.digest != request.digest or receipt.seq <= (request.retry_since or 0) or not has_changed:
            return None
    return msgspec.structs.replace(receipt, entry=msgspec.structs.replace(held, expires_ms=None))


def _find_keys(batch: Batch, receipt: EntryId | None) -> Iterable[EntryId]:
    """What is read for a batch: its receipt, and the keys that it writes or guards."""
    keys = [(one.family, one.key) for one in (*batch.writes, *batch.guards)]
    return dict.fromkeys(keys if receipt is None else [receipt, *keys])


def _plan(
    batch: Batch,
    found: LastMessages,
    now_ms: int,
    cause: str | None = None,
    earlier: Sequence[Change] = (),
    mark: Entry | None = None,
) -> Plan | Refusal:
    """Decide what a batch does to keys with these last messages. The server will give the revisions after `BASE`."""
    if (write := find_plain_write(batch)) is not None:
        # The most frequent batch, and the shortest way through the rules.
        current = entry_in(found[write.family, write.key])
        if current is None or current.expires_ms is None:
            return plan_write(write, current, batch.value_bytes_max, now_ms, BASE + 1, cause)

    def load(family: StoredFamily, key: str) -> Entry | None:
        return mark if family == "superseded" else entry_in(found[family, key])

    if batch.request_id is None:
        # There is no retry, no mark and no receipt: the plan is all there is to a batch.
        return plan(batch, load, now_ms=now_ms, revision=BASE, cause=cause)
    group = GroupPlan(load, lambda after, request_id: earlier, Counters(BASE), now_ms)
    outcome = group.add(batch, cause)
    if isinstance(outcome, LimpetError):
        raise outcome
    return outcome if isinstance(outcome, Refusal) else Plan(outcome, tuple(change for change, _ in group.changes))
