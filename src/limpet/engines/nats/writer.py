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
from collections.abc import Callable
from typing import Final

import msgspec

from limpet.commit.receipts import SUPERSEDED_MS, may_be_superseded, superseded_error
from limpet.engines.nats.connection import ApiError
from limpet.engines.nats.follower import RangeReader
from limpet.engines.nats.messages import BASE, EntryId, LastMessages, Message, parse
from limpet.engines.nats.publisher import MADE_RECEIPT_MS, MaybeStored, Publisher, commit_of, digest_of
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
    seq_of,
    seqs_of,
)
from limpet.errors import Ambiguous
from limpet.model import Batch, Change, Commit, Entry, Expire, Family, Refusal, Write, live
from limpet.retry import jitter_s
from limpet.transition import Plan, plan, recall

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
        self.publisher = Publisher(server, stream)

    def stop(self) -> None:
        """Cancel the work in the background."""
        self.publisher.stop()

    async def commit(self, batch: Batch) -> Commit | Refusal:
        """See `Engine.commit`."""
        if _is_lone(batch):
            write = batch.writes[0]
            entry_id = (write.family, write.key)
            if entry_id in self._turns:
                await self._take_turn(entry_id)
            else:
                self._turns[entry_id] = deque()
            try:
                return await self._commit_one(batch, entry_id)
            finally:
                self._release_turn(entry_id)
        taken: list[EntryId] = []
        try:
            for entry_id in sorted({(write.family, write.key) for write in batch.writes}):
                await self._take_turn(entry_id)
                taken.append(entry_id)
            if not _only_expires(batch):
                return await self._commit_all(batch)
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

    async def _commit_one(self, batch: Batch, entry_id: EntryId) -> Commit | Refusal:
        """Commit a batch of one write, as one message."""
        cause = batch.request_id or f"{self._name}-{next(self._numbers):x}"
        attempts = _Attempts(batch.retry_since)
        must_supersede = batch.retry_since is not None
        answer: Commit | Refusal
        known = batch.retry_since is None and entry_id in self._stream.known
        message = self._stream.known[entry_id] if known else None
        now_ms = since = 0
        while True:
            try:
                if must_supersede:
                    await self._supersede(cause)
                    must_supersede = False
                if not known:
                    message = await self._stream.last(entry_id)
                if may_be_superseded(batch):
                    await self._check_not_superseded(cause)
                if attempts.since is not None:
                    earlier = await self._find_answer(batch, cause, {entry_id: message}, attempts.since)
                    if earlier is not None:
                        answer = earlier
                        break
                    attempts.raise_refusal()
                now_ms = self._commit_time(message)
                outcome = plan(batch, _always(entry_in(message)), now_ms=now_ms, revision=BASE, cause=cause)
                if isinstance(outcome, Refusal) or not outcome.changes:
                    if known:
                        # The cached message may be old: read the key before a refusal.
                        known = False
                        continue
                    answer = outcome if isinstance(outcome, Refusal) else await self._unchanged(outcome.commit)
                    break
                since = max(seq_of(message), self._stream.seen)
                attempts.start_clock()
                answer = await self.publisher.send_one(entry_id, message, outcome, cause)
                self._server.notify(self._stream.namespace)
                break
            except Exception as error:
                await self._prepare_retry(error, attempts, cause, since, now_ms)
            known = False
        self._unsettled.pop(cause, None)
        return answer

    async def _prepare_retry(self, error: Exception, attempts: _Attempts, cause: str, since: int, now_ms: int) -> None:
        """Get ready for another attempt after an error, or raise the error that the caller of the commit gets."""
        match error:
            case KeyChanged():
                # Another writer was faster, so some writer always makes progress. Attempts are not limited.
                await attempts.pause()
                return
            case BatchAbandoned():
                attempts.abandoned += 1
                if attempts.abandoned < ABANDONED_MAX:
                    await attempts.pause()
                    return
            case ReplyLost() | MaybeStored():
                if attempts.since is None:
                    attempts.since = since
                    attempts.refusal = error.refusal if isinstance(error, MaybeStored) else None
                    self._note_unsettled(cause, now_ms)
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

    async def _find_answer(self, batch: Batch, cause: str, found: LastMessages, since: int) -> Commit | None:
        """The result of an earlier attempt, from the messages of its keys; None if it was not applied.

        ``found`` has the last message of each key that is written.
        """
        named = msgspec.structs.replace(batch, request_id=cause)
        changes: list[Change] = []
        for entry_id, message in found.items():
            if message is not None and message.seq > since:
                changes += await self._read_changes(entry_id, cause, since, message)
        last = max(changes, key=lambda change: change.revision, default=None)
        if last is not None and last.revision != last.commit:
            # The last change of the batch is missing: it was stored in part, or its key has been purged.
            raise RequestForgotten
        earlier = recall(named, changes, lambda family, key: entry_in(found[family, key]))
        if earlier is None:
            for entry_id, message in found.items():
                await self._check_remembered(cause, entry_id, message, since)
        return earlier

    async def _read_changes(self, entry_id: EntryId, cause: str, since: int, last: Message) -> list[Change]:
        """The changes of a key that a request has made after a number."""
        messages = [last]
        if last.cause != cause:
            subject, key = self._subjects.of(entry_id), entry_id[1]
            found = await RangeReader(self._stream, self._server.connection, since, last.seq, subject).read()
            seqs = [seq for _, seq, headers, _ in found if parse(key, seq, headers, None).cause == cause]
            read = await asyncio.gather(*(self._stream.at(entry_id, seq) for seq in seqs))
            if None in read:
                raise RequestForgotten
            messages = [message for message in read if message is not None]
        # With the value of a touch, which its message has.
        return [
            Change(message.op, message.entry, message.seq, message.commit, message.at_ms, message.cause, entry_id[0])
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

    async def _check_not_superseded(self, cause: str) -> None:
        """Refuse a first attempt that arrives after its retry."""
        if await self._stream.get({"last_by_subj": self._subjects.superseded(cause)}) is not None:
            raise superseded_error()

    def _commit_time(self, *messages: Message | None) -> int:
        """The time of a commit: never before its keys' last messages, whose writers may have a clock that is ahead."""
        now_ms = self._stream.now_ms()
        for message in messages:
            if message is not None and message.at_ms > now_ms:
                now_ms = message.at_ms
        return now_ms

    async def _unchanged(self, commit: Commit) -> Commit:
        """A commit that changed nothing gets the latest revision."""
        return msgspec.structs.replace(commit, revision=await self._stream.revision())

    async def _expire_together(self, batch: Batch) -> Commit:
        """Expire entries as one batch, which needs no receipt: each expiry is true by itself."""
        found = await self._stream.load_all((write.family, write.key) for write in batch.writes)
        now_ms = self._commit_time(*found.values())
        outcome = plan(batch, _finder(found), now_ms=now_ms, revision=BASE)
        assert not isinstance(outcome, Refusal)
        if not outcome.changes:
            return await self._unchanged(outcome.commit)
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

    async def _commit_all(self, batch: Batch) -> Commit | Refusal:
        """Commit a batch as messages that are stored together, with a receipt among them."""
        request_id = batch.request_id or f"{self._name}-{next(self._numbers):x}"
        receipt_ms = MADE_RECEIPT_MS if batch.receipt_ms is None else batch.receipt_ms
        named = msgspec.structs.replace(batch, request_id=request_id, receipt_ms=receipt_ms)
        receipt: EntryId = ("receipt", request_id)
        entry_ids = list(dict.fromkeys([receipt, *((one.family, one.key) for one in (*batch.writes, *batch.guards))]))
        attempts = _Attempts(batch.retry_since)
        must_supersede = batch.retry_since is not None
        written = [(write.family, write.key) for write in batch.writes]
        found: LastMessages = {}
        now_ms = since = 0
        while True:
            try:
                if must_supersede:
                    await self._supersede(request_id)
                    must_supersede = False
                found = await self._stream.load_all(entry_ids)
                if may_be_superseded(batch):
                    await self._check_not_superseded(request_id)
                now_ms = self._commit_time(*found.values())
                if is_mark(found[receipt], now_ms):
                    if attempts.since is None:
                        attempts.since = seq_of(found[receipt]) - 1
                    answer = await self._complete(named, receipt, found, now_ms)
                    self._server.notify(self._stream.namespace)
                    break
                attempts.raise_refusal()
                if attempts.since is not None:
                    earlier = _replay_receipt(named, found[receipt], attempts.since, now_ms)
                    if earlier is None:
                        last = {entry_id: found[entry_id] for entry_id in written}
                        earlier = await self._find_answer(named, request_id, last, attempts.since)
                    if earlier is not None:
                        answer = earlier
                        break
                outcome = plan(named, _finder(found), now_ms=now_ms, revision=BASE)
                if _needs_one_moment(outcome, batch):
                    again = await self._stream.load_all(entry_ids)
                    if any(seq_of(again[entry_id]) != seq_of(message) for entry_id, message in found.items()):
                        continue
                if isinstance(outcome, Refusal) or outcome.commit.replayed:
                    answer = outcome if isinstance(outcome, Refusal) else outcome.commit
                    break
                commit = outcome.commit
                if not outcome.changes:
                    answer = commit = await self._unchanged(commit)
                    if batch.receipt_ms is None:
                        break
                since = max(self._stream.seen, *(seq for _, seq in seqs_of(found)))
                attempts.start_clock()
                answer = await self.publisher.send_all(named, receipt, found, commit, outcome.changes, now_ms)
                if outcome.changes:
                    self._server.notify(self._stream.namespace)
                break
            except Exception as error:
                await self._prepare_retry(error, attempts, request_id, since, now_ms)
        self._unsettled.pop(request_id, None)
        return answer

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
        stored: dict[EntryId, Message] = {}
        rest: list[Write] = []
        for write in batch.writes:
            entry_id = (write.family, write.key)
            message = found[entry_id]
            if message is None or message.seq < mark.seq or _only_expired(message, mark):
                rest.append(write)
            elif message.cause != batch.request_id:
                raise HalfStored(receipt[1], f"{write.key!r} has been written since; read the keys and decide again")
            else:
                stored[entry_id] = message
        remaining = msgspec.structs.replace(batch, guards=(), writes=tuple(rest), receipt_ms=None)
        outcome = plan(remaining, _finder(found), now_ms=now_ms, revision=BASE)
        if isinstance(outcome, Refusal):
            raise HalfStored(receipt[1], f"{outcome.key!r} has changed since; read the keys and decide again")
        planned = outcome.commit
        entries, ended = iter(planned.entries), iter(planned.ended)
        earlier = {entry_id: commit_of(message) for entry_id, message in stored.items()}
        pairs = [
            (earlier[entry_id].entries[0], earlier[entry_id].ended[0])
            if entry_id in earlier
            else (next(entries), next(ended))
            for entry_id in ((write.family, write.key) for write in batch.writes)
        ]
        last = max((message.seq for message in stored.values()), default=mark.seq)
        commit = Commit(last, tuple(one for one, _ in pairs), tuple(two for _, two in pairs), now_ms)
        known = {receipt: mark} | {(write.family, write.key): found[write.family, write.key] for write in rest}
        try:
            return await self.publisher.send_all(batch, receipt, known, commit, outcome.changes, now_ms)
        except (ApiError, MaybeStored) as error:
            reason = f"{error}; make room on the server, then repeat the call with this request id"
            raise HalfStored(receipt[1], reason) from error


# Parts ------------------------------------------------------------------------


class _Attempts:
    """The attempts at one commit.

    Attributes:
        since: A revision below that of the commit, if it was applied; None while it cannot have been applied.
        refusal: The error of the only attempt that may have been applied.
    """

    def __init__(self, since: int | None) -> None:
        self.since = since
        self.refusal: ApiError | None = None
        self.lost = 0
        self.abandoned = 0
        self._started_at = time.monotonic()

    def start_clock(self) -> None:
        """Note when a request is sent."""
        self._started_at = time.monotonic()

    async def pause(self) -> None:
        """Wait a moment, so that other writers can finish."""
        await asyncio.sleep(jitter_s(time.monotonic() - self._started_at))

    def raise_refusal(self) -> None:
        """Raise the error of an attempt, after a read has shown that nothing was stored."""
        if self.refusal is not None:
            self.since = None
            raise self.refusal


def _is_lone(batch: Batch) -> bool:
    """Whether a batch can be one message: one write, guards on its own key only, no need of a receipt."""
    if len(batch.writes) != 1 or batch.receipt_ms is not None:
        return False
    write = batch.writes[0]
    return not batch.guards or all(guard.key == write.key and guard.family == write.family for guard in batch.guards)


def _needs_one_moment(outcome: Plan | Refusal, batch: Batch) -> bool:
    """Whether an outcome that sends nothing depends on several keys, each of which was read at its own moment.

    What is sent is compared by the server. A receipt, or the first guard, refuses by itself.
    """
    if isinstance(outcome, Refusal):
        return outcome.reason != "stale_request" and (outcome.guard is None or outcome.guard != batch.guards[0])
    return not outcome.changes and not outcome.commit.replayed


def _only_expires(batch: Batch) -> bool:
    """Whether a batch is a sweeper's: no write in it depends on another."""
    if not batch.writes or batch.guards or batch.receipt_ms is not None:
        return False
    return all(type(write) is Expire for write in batch.writes)


def _only_expired(message: Message, mark: Message) -> bool:
    """Whether a key has only expired since the mark of a batch: the batch itself records that before it writes it."""
    return message.op == "expire" and message.prev is not None and message.prev < mark.seq


def _replay_receipt(batch: Batch, receipt: Message | None, since: int, now_ms: int) -> Commit | Refusal | None:
    """The result of a retry from the receipt that it left after ``since``.

    Also if the receipt has expired, but only of a batch that changed something: the log has its changes.
    """
    if receipt is None or receipt.held is None or receipt.held.stored is None or receipt.seq <= since:
        # There is none, or it is the mark of a batch that was stored in part, which has ended: see `is_mark`.
        return None
    named = msgspec.structs.replace(batch, receipt_ms=batch.receipt_ms or MADE_RECEIPT_MS)
    outcome = plan(named, _always(receipt.held), now_ms=receipt.at_ms, revision=BASE)
    if isinstance(outcome, Refusal):
        # Another request had this id: it is refused now, not at the time of the receipt, unless that has expired.
        return None if live(receipt.held, now_ms) is None else msgspec.structs.replace(outcome, at_ms=now_ms)
    commit = outcome.commit
    has_changed = any(commit.entries) or any(commit.ended)
    return commit if has_changed or live(receipt.held, now_ms) is not None else None


def _finder(found: LastMessages) -> Callable[[Family, str], Entry | None]:
    return lambda family, key: entry_in(found[family, key])


def _always(held: Entry | None) -> Callable[[Family, str], Entry | None]:
    return lambda family, key: held
