"""Commits on NATS: messages that the server takes only if their keys are as they were.

A commit of one key is one message that the server takes only if the key's last message is still the
one that the commit was planned on. A commit of several keys, or one that must leave a receipt, is an
atomic batch of such messages: a key that is only guarded is named by a message that does nothing else.
Whoever comes too late plans again on what is there now.

A write whose answer was lost is looked for in the key itself, which carries the requests that changed
it of late, and in its receipt. It may be asked for again for a minute and a half. Both are kept longer.

A server without room may store the first messages of an atomic batch and not the others. So a batch starts
with a mark in the place of its receipt and ends with the receipt. Where the mark is still there, a part of
the batch is stored: it is not acknowledged, and a repeated request stores the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from limpet.commit.receipts import SUPERSEDED_MS, may_be_superseded, superseded_error
from limpet.engines.nats.connection import Link, LinkLost, Refused, Silent
from limpet.engines.nats.messages import Message, Place, body_of, headers_of, is_full, recalled, remembered, under
from limpet.engines.nats.stream import (
    BASE,
    Abandoned,
    HalfStored,
    Lost,
    Server,
    Space,
    TooLate,
    entry_at,
    held_in,
    is_mark,
    number_in,
    number_of,
    seq_of,
    seqs_of,
)
from limpet.errors import Ambiguous, ValueTooLarge
from limpet.model import Batch, Change, Commit, Delete, Entry, Expire, Family, Put, Refusal, Write
from limpet.retry import jitter_s
from limpet.transition import Plan, make_receipt, plan

__all__ = ["Writer"]

# How often a request is sent that nobody answers, and one that the server has no room to look at.
LOST_MAX: Final = 3
ABANDONED_MAX: Final = 64
MADE_RECEIPT_MS: Final = 120_000
# How long a request may be asked for again. What it left is kept longer, as clocks differ a little.
ASKED_MS: Final = 90_000
# What two processes may differ in what time it is, and some more.
LATE_MS: Final = 1_000
BATCHES_MAX: Final = 24
GROUP_MIN: Final = 16
GROUP_MAX: Final = 900
UNSETTLED_MAX: Final = 16_384
SMALL_BYTES: Final = 100_000
# How long the mark of a batch that was stored in part stays.
MARK_S: Final = 86_400


class Forgotten(Exception):
    """What became of a request cannot be told any more."""


class Unsure(Exception):
    """The server refused an atomic batch, of which it may have stored a part."""

    def __init__(self, refusal: Refused) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


_Sent = tuple[str, Callable[[bytes], bytes], bytes, "asyncio.Future[int]"]
"""A message on its way: its subject, its headers when the rest of them is known, its body, its number."""


class Writer:
    """Commits to one namespace, of this process."""

    def __init__(self, server: Server, space: Space) -> None:
        self._server = server
        self._space = space
        self._subjects = space.subjects
        self._name = os.urandom(8).hex()
        self._numbers = itertools.count(1)
        # Requests of which nobody heard, and when they were first made here.
        self._unsettled: dict[str, int | None] = {}
        self._turns: dict[Place, deque[asyncio.Future[None]]] = {}
        self._batches = asyncio.Semaphore(BATCHES_MAX)
        self._group: list[_Sent] = []
        self._grouping: asyncio.Task[None] | None = None

    def rest(self) -> None:
        """Do nothing more in the background."""
        if self._grouping is not None:
            self._grouping.cancel()

    async def commit(self, batch: Batch) -> Commit | Refusal:
        """See `Engine.commit`."""
        if _is_lone(batch):
            write = batch.writes[0]
            place = (write.family, write.key)
            if place in self._turns:
                await self._take_turn(place)
            else:
                self._turns[place] = deque()
            try:
                return await self._commit_one(batch, place)
            finally:
                self._pass_on(place)
        if _only_expires(batch):
            return await self._expire(batch)
        taken: list[Place] = []
        try:
            for place in sorted((write.family, write.key) for write in batch.writes):
                await self._take_turn(place)
                taken.append(place)
            return await self._commit_all(batch)
        finally:
            for place in taken:
                self._pass_on(place)

    async def _take_turn(self, place: Place) -> None:
        """One commit of a key at a time: others of this process would only come too late."""
        queue = self._turns.get(place)
        if queue is None:
            self._turns[place] = deque()
            return
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(waiting)
        try:
            await waiting
        except asyncio.CancelledError:
            if not waiting.cancelled():
                self._pass_on(place)
            # Otherwise whoever passes the turn on finds nobody waiting here.
            raise

    def _pass_on(self, place: Place) -> None:
        queue = self._turns[place]
        while queue:
            waiting = queue.popleft()
            if not waiting.done():
                waiting.set_result(None)
                return
        del self._turns[place]

    async def _commit_one(self, batch: Batch, place: Place) -> Commit | Refusal:
        """Commit a batch that is one write of one key, as one message."""
        cause = batch.request_id or f"{self._name}-{next(self._numbers):x}"
        attempts = _Attempts(batch.retry_since)
        must_tell = batch.retry_since is not None
        known = batch.retry_since is None and place in self._space.known
        message = self._space.known[place] if known else None
        now_ms = 0
        while True:
            try:
                if must_tell:
                    await self._supersede(cause)
                    must_tell = False
                if not known:
                    message = await self._space.last(place)
                if may_be_superseded(batch):
                    await self._expect_first(cause)
                if attempts.since is not None:
                    answer = await self._answered(batch, cause, place, message, attempts.since)
                    if answer is not None:
                        break
                    attempts.raise_refusal()
                now_ms = self._time_of(message)
                outcome = plan(batch, _always(held_in(message)), now_ms=now_ms, revision=BASE, cause=cause)
                if isinstance(outcome, Refusal) or not outcome.changes:
                    if known:
                        # By now it may be otherwise.
                        known = False
                        continue
                    answer = outcome if isinstance(outcome, Refusal) else await self._unchanged(outcome.commit)
                    break
                attempts.start_clock()
                answer = await self._send_one(batch, place, message, outcome, cause, now_ms)
                self._server.changed(self._space.namespace)
                break
            except Exception as error:
                await self._prepare_retry(error, attempts, cause, seq_of(message), now_ms)
            known = False
        self._unsettled.pop(cause, None)
        return answer

    async def _prepare_retry(self, error: Exception, attempts: _Attempts, cause: str, since: int, now_ms: int) -> None:
        """Get ready for another attempt after an error, or raise what the caller of a commit is to know."""
        match error:
            case TooLate():
                # Others have written, so there is always somebody who gets on. This may take any number of attempts.
                await attempts.pause()
                return
            case Abandoned():
                attempts.abandoned += 1
                if attempts.abandoned < ABANDONED_MAX:
                    await attempts.pause()
                    return
            case Lost() | Unsure():
                if attempts.since is None:
                    attempts.since = since
                    attempts.refusal = error.refusal if isinstance(error, Unsure) else None
                    self._doubt(cause, now_ms)
                else:
                    # It stays unknown: what a look did not find may be stored after it.
                    attempts.refusal = None
                attempts.lost += 1
                if attempts.lost < LOST_MAX:
                    return
            case _:
                pass
        if attempts.since is None:
            self._unsettled.pop(cause, None)
            raise error
        raise self._unknown(cause, attempts.since, error) from error

    def _unknown(self, cause: str, since: int, problem: Exception) -> Ambiguous:
        self._doubt(cause, None)
        if isinstance(problem, HalfStored):
            return Ambiguous(str(problem), request_id=cause, since=since)
        found = str(problem) if isinstance(problem, Refused | Unsure) else type(problem).__name__
        return Ambiguous(f"cannot tell whether NATS took the commit: {found}", request_id=cause, since=since)

    def _doubt(self, cause: str, asked_ms: int | None) -> None:
        """Remember that a request may have been taken, and since when, if it was made here."""
        if cause not in self._unsettled:
            while len(self._unsettled) >= UNSETTLED_MAX:
                del self._unsettled[next(iter(self._unsettled))]
            self._unsettled[cause] = asked_ms

    async def _answered(
        self, batch: Batch, cause: str, place: Place, message: Message | None, since: int
    ) -> Commit | Refusal | None:
        """What a request was answered earlier, when its answer may have been lost; None when it was not applied."""
        mine = None if message is None else recalled(message, cause)
        if mine is None:
            # After the key. If the request is taken in between, the key is not as it was found, and what is sent
            # on account of this look comes too late. The other way round, the key might have been written by others
            # since, who do not carry it on.
            receipt: Place = ("receipt", cause)
            found = {receipt: await self._space.last(receipt), place: message}
            named = msgspec.structs.replace(batch, request_id=cause, receipt_ms=MADE_RECEIPT_MS)
            if is_mark(found[receipt]):
                return await self._complete(named, receipt, found, self._time_of(*found.values()))
            earlier = _replayed(named, found[receipt], since)
            if earlier is None:
                await self._expect_remembered(cause, since, 0 if message is None else message.lost)
            return earlier
        write = batch.writes[0]
        if isinstance(write, Put) and mine.entry.stored is None:
            meta = write.meta_json if isinstance(write.meta_json, bytes) else None
            entry = msgspec.structs.replace(mine.entry, stored=write.stored, meta_json=meta)
            mine = msgspec.structs.replace(mine, entry=entry)
        return msgspec.structs.replace(_commit_of(mine), replayed=True)

    async def _expect_remembered(self, cause: str, since: int, lost: int = 0) -> None:
        """Refuse to do again what may have been done and forgotten."""
        asked_ms = self._unsettled.get(cause)
        if asked_ms is None:
            # It was first made elsewhere, nobody knows when.
            is_forgotten = lost > since
        else:
            # Whoever slept meanwhile does not know for how long.
            await self._space.info()
            is_forgotten = self._space.now_ms() - asked_ms > ASKED_MS
        if is_forgotten:
            raise Forgotten

    # A server that stood still may come back with a request that was asked for again elsewhere. The retry leaves word
    # before it looks at its keys; a first attempt looks for that after its keys. So if it finds none, then whatever the
    # retry writes comes after that look, and the first attempt is too late for its keys; or else the retry finds it.

    async def _supersede(self, cause: str) -> None:
        """Leave word that a request was asked for again."""
        link = await self._server.link()
        headers = b"NATS/1.0\r\nNats-TTL: %ds\r\n\r\n" % (SUPERSEDED_MS // 1000)
        await number_of(link.ask(self._subjects.superseded(cause), headers=headers))

    async def _expect_first(self, cause: str) -> None:
        """Refuse a first attempt that comes after its retry."""
        if await self._space.get({"last_by_subj": self._subjects.superseded(cause)}) is not None:
            raise superseded_error()

    def _is_settled(self, cause: str) -> bool:
        """Whether a request is this process's own and was answered, so that it will not come back."""
        return cause.startswith(self._name) and cause not in self._unsettled

    def _time_of(self, *messages: Message | None) -> int:
        """The time of a commit: never before what is there, though another process may have told it a little later."""
        now_ms = self._space.now_ms()
        for message in messages:
            if message is not None and message.at_ms > now_ms:
                now_ms = message.at_ms
        return now_ms

    async def _unchanged(self, commit: Commit) -> Commit:
        """A commit that changed nothing names the latest revision."""
        return msgspec.structs.replace(commit, revision=await self._space.revision())

    async def _expire(self, batch: Batch) -> Commit:
        """End what is due, each by itself: whoever was there first has done the same."""
        each = [msgspec.structs.replace(batch, writes=(write,)) for write in batch.writes]
        commits = [one for one in await asyncio.gather(*map(self.commit, each)) if isinstance(one, Commit)]
        ended = tuple(commit.ended[0] for commit in commits)
        revision, at_ms = max((commit.revision, commit.at_ms) for commit in commits)
        return Commit(revision, (None,) * len(ended), ended, at_ms)

    # One message ----------------------------------------------------------------

    def _next(
        self, before: Message | None, change: Change, cause: str, now_ms: int, *, has_receipt: bool = False
    ) -> Message:
        """The message that a change is, before it has a number."""
        lost, past = (0, "") if before is None else remembered(before, now_ms, self._is_settled)
        entry, op = change.entry, change.op
        if op in ("delete", "expire"):
            value_seq, size_bytes = entry.revision, 0
        else:
            value_seq = before.value_seq if op == "touch" and before is not None else change.revision
            size_bytes = entry.size_bytes
        name = None if op == "expire" else cause
        lies_on = under(before) if op == "touch" and before is not None else ""
        return Message(
            change.revision,
            op,
            entry,
            value_seq,
            0,
            change.at_ms,
            name,
            size_bytes,
            lost,
            past,
            lies_on,
            has_receipt,
        )

    async def _send_one(
        self, batch: Batch, place: Place, before: Message | None, outcome: Plan, cause: str, now_ms: int
    ) -> Commit:
        """Send what a commit of one key changes."""
        draft = self._next(before, outcome.changes[-1], cause, now_ms)
        if draft.past and draft.cause is not None and is_full(draft.past):
            receipt: Place = ("receipt", cause)
            found = {receipt: await self._space.last(receipt), place: before}
            asked = msgspec.structs.replace(batch, request_id=cause, receipt_ms=MADE_RECEIPT_MS)
            return await self._send_all(asked, receipt, found, outcome.commit, outcome.changes, now_ms)
        kind, body = _body(draft)
        expected = seq_of(before)
        subject = self._subjects.of(place)
        link = self._server.live_link or await self._server.link()
        self._check_size(place[1], body, draft, link)
        alarm = None if draft.entry.expires_ms is None else self._alarm(place, before, draft)
        # Before the entry, on the same line: an entry without its alarm would stay for ever.
        ringing = None if alarm is None else _set_alarm(link, alarm)
        if self._server.syncs:
            headers = _headers(draft, kind, expected, 0)
            # Once before they join others, whom they would fail with them.
            headers(b"")
            number = await self._grouped(subject, headers, body)
        else:
            try:
                number = number_in(*await link.ask(subject, body, headers_of(draft, kind, expected)))
            except (LinkLost, Silent) as error:
                raise Lost from error
        if alarm is not None and ringing is not None:
            await self._ring(alarm, ringing)
        told = _numbered(draft, number, number)
        self._space.keep(place, told)
        return _commit_of(told)

    def _alarm(self, place: Place, before: Message | None, draft: Message) -> str | None:
        """The subject of the alarm that an entry needs and does not have yet."""
        expires_ms = draft.entry.expires_ms
        if expires_ms is None or draft.held is None:
            return None
        if before is not None and before.held is not None and before.held.expires_ms == expires_ms:
            return None
        return self._subjects.alarm(place, expires_ms)

    async def _ring(self, alarm: str, ringing: asyncio.Future[tuple[bytes, bytes]]) -> None:
        """See that an alarm was taken, and not met by a sweeper before its entry was there. It may be set twice."""
        is_late = self._space.now_ms() >= self._subjects.alarmed(alarm)[0] - LATE_MS
        with contextlib.suppress(Exception):
            try:
                await number_of(ringing)
            except Exception:
                is_late = True
            if is_late:
                link = await self._server.link()
                await number_of(link.ask(alarm))

    def _check_size(self, key: str, body: bytes, draft: Message, link: Link) -> None:
        if len(body) < SMALL_BYTES:
            return
        most = int(link.facts.get("max_payload", 1_048_576))
        size = len(body) + len(draft.past) + len(draft.entry.meta_json or b"") + 4_096
        if size > most:
            raise ValueTooLarge(key, size_bytes=size, limit_bytes=most, what="message")

    # Where each message is synced to disk, many go as one ------------------------

    def _grouped(self, subject: str, headers: Callable[[bytes], bytes], body: bytes) -> asyncio.Future[int]:
        """Send a message with others that are on their way at the same time: the server then syncs once for all."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[int] = loop.create_future()
        self._group.append((subject, headers, body, answer))
        if self._grouping is None or self._grouping.done():
            self._grouping = loop.create_task(self._send_groups())
        return answer

    async def _send_groups(self) -> None:
        while self._group:
            group, self._group = self._group[:GROUP_MAX], self._group[GROUP_MAX:]
            group = [one for one in group if not one[3].cancelled()]
            try:
                await self._send_group(await self._server.link(), group)
            except Exception as error:
                for *_, answer in group:
                    _settle(answer, error)

    async def _send_group(self, link: Link, group: list[_Sent]) -> None:
        if len(group) >= GROUP_MIN:
            # Where one of them comes too late, none is taken, and each is told by itself.
            with contextlib.suppress(TooLate):
                first = await self._send_batch(link, [(subject, headers, body) for subject, headers, body, _ in group])
                for number, (*_, answer) in enumerate(group, first):
                    _settle(answer, number)
                return
        asked = [link.ask(subject, body, headers(b"")) for subject, headers, body, _ in group]
        for (*_, answer), one in zip(group, asked, strict=True):
            try:
                _settle(answer, await number_of(one))
            except Exception as error:
                _settle(answer, error)

    # Several messages -----------------------------------------------------------

    async def _send_batch(self, link: Link, messages: list[tuple[str, Callable[[bytes], bytes], bytes]]) -> int:
        """Send messages that are taken together or not at all. Returns the number of the first."""
        name = os.urandom(9).hex().encode()
        *others, (subject, headers, body) = messages
        for number, (one, its_headers, its_body) in enumerate(others, 1):
            link.tell(one, its_body, its_headers(b"Nats-Batch-Id: %b\r\nNats-Batch-Sequence: %d\r\n" % (name, number)))
        last = b"Nats-Batch-Id: %b\r\nNats-Batch-Sequence: %d\r\nNats-Batch-Commit: 1\r\n" % (name, len(messages))
        try:
            return await number_of(link.ask(subject, body, headers(last))) - len(others)
        except Abandoned:
            # The server refuses it before it stores anything.
            raise
        except Refused as no:
            raise Unsure(no) from no

    async def _commit_all(self, batch: Batch) -> Commit | Refusal:
        """Commit a batch as messages that are taken together, with a receipt among them."""
        request_id = batch.request_id or f"{self._name}-{next(self._numbers):x}"
        receipt_ms = MADE_RECEIPT_MS if batch.receipt_ms is None else batch.receipt_ms
        asked = msgspec.structs.replace(batch, request_id=request_id, receipt_ms=receipt_ms)
        receipt: Place = ("receipt", request_id)
        places = list(dict.fromkeys([receipt, *((one.family, one.key) for one in (*batch.writes, *batch.guards))]))
        attempts = _Attempts(batch.retry_since)
        must_tell = batch.retry_since is not None
        found: dict[Place, Message | None] = {}
        now_ms = 0
        while True:
            try:
                if must_tell:
                    await self._supersede(request_id)
                    must_tell = False
                found = await self._space.lasts(places)
                if may_be_superseded(batch):
                    await self._expect_first(request_id)
                now_ms = self._time_of(*found.values())
                if is_mark(found[receipt]):
                    if attempts.since is None:
                        attempts.since = seq_of(found[receipt]) - 1
                    answer = await self._complete(asked, receipt, found, now_ms)
                    self._server.changed(self._space.namespace)
                    break
                attempts.raise_refusal()
                if attempts.since is not None:
                    earlier = _replayed(asked, found[receipt], attempts.since)
                    if earlier is not None:
                        answer = earlier
                        break
                    await self._expect_remembered(request_id, attempts.since)
                outcome = plan(asked, _finder(found), now_ms=now_ms, revision=BASE)
                if isinstance(outcome, Refusal) or outcome.commit.replayed:
                    answer = outcome if isinstance(outcome, Refusal) else outcome.commit
                    break
                commit = outcome.commit
                if not outcome.changes:
                    if seqs_of(await self._space.lasts(places)) != seqs_of(found):
                        continue
                    answer = commit = await self._unchanged(commit)
                    if batch.receipt_ms is None:
                        break
                attempts.start_clock()
                answer = await self._send_all(asked, receipt, found, commit, outcome.changes, now_ms)
                if outcome.changes:
                    self._server.changed(self._space.namespace)
                break
            except Exception as error:
                since = max((seq for _, seq in seqs_of(found)), default=0)
                await self._prepare_retry(error, attempts, request_id, since, now_ms)
        self._unsettled.pop(request_id, None)
        return answer

    async def _complete(
        self, batch: Batch, receipt: Place, found: dict[Place, Message | None], now_ms: int
    ) -> Commit | Refusal:
        """Store the rest of a batch of which the server stored a part.

        Its guards held when the server took it, so they are not checked again. A key that has not been written since
        the mark was set is written now, and one that this batch has written stays as it is. Where others have written
        since, nobody can tell what was stored.
        """
        mark = found[receipt]
        assert mark is not None
        if mark.entry.meta_json != _digest_of(batch):
            return Refusal("stale_request", receipt[1], None, now_ms)
        stored: dict[Place, Message] = {}
        rest: list[Write] = []
        for write in batch.writes:
            place = (write.family, write.key)
            message = found[place]
            if message is None or message.seq < mark.seq:
                rest.append(write)
            elif message.cause != batch.request_id:
                raise HalfStored(receipt[1], f"{write.key!r} has been written since; read the keys and decide anew")
            elif isinstance(write, Delete) and write.take:
                raise HalfStored(receipt[1], f"what {write.key!r} held is gone; read the keys and decide anew")
            else:
                stored[place] = message
        asked = msgspec.structs.replace(batch, guards=(), writes=tuple(rest), receipt_ms=None)
        outcome = plan(asked, _finder(found), now_ms=now_ms, revision=BASE)
        if isinstance(outcome, Refusal):
            raise HalfStored(receipt[1], f"{outcome.key!r} has changed since; read the keys and decide anew")
        planned = outcome.commit
        entries, ended = iter(planned.entries), iter(planned.ended)
        earlier = {place: _commit_of(message) for place, message in stored.items()}
        pairs = [
            (earlier[place].entries[0], earlier[place].ended[0]) if place in earlier else (next(entries), next(ended))
            for place in ((write.family, write.key) for write in batch.writes)
        ]
        last = max((message.seq for message in stored.values()), default=mark.seq)
        commit = Commit(last, tuple(one for one, _ in pairs), tuple(two for _, two in pairs), now_ms)
        known = {receipt: mark} | {(write.family, write.key): found[write.family, write.key] for write in rest}
        try:
            return await self._send_all(batch, receipt, known, commit, outcome.changes, now_ms)
        except (Refused, Unsure) as no:
            problem = f"{no}; make room on the server, then repeat the call with this request id"
            raise HalfStored(receipt[1], problem) from no

    async def _send_all(
        self,
        batch: Batch,
        receipt: Place,
        found: dict[Place, Message | None],
        commit: Commit,
        changes: Sequence[Change],
        now_ms: int,
    ) -> Commit:
        """Send what a commit changes, after what it leaves untouched and before its receipt."""
        # A log of the last change of each key has no room for an end that was followed by a beginning.
        last = {(change.family, change.key): change for change in changes}
        untouched = [place for place in found if place != receipt and place not in last]
        link = await self._server.link()
        cause = batch.request_id or ""
        drafts = {
            place: self._next(found[place], change, cause, now_ms, has_receipt=True) for place, change in last.items()
        }
        alarms = {}
        for place, draft in drafts.items():
            if (alarm := self._alarm(place, found[place], draft)) is not None:
                alarms[alarm] = _set_alarm(link, alarm)

        has_mark = is_mark(found[receipt])
        messages: list[tuple[str, Callable[[bytes], bytes], bytes]] = []
        if drafts and not has_mark:
            messages.append(self._mark_message(batch, receipt, found[receipt], now_ms))
        for number, place in enumerate(untouched):
            messages.append(
                (self._subjects.carrier(number), _guard(self._subjects.of(place), seq_of(found[place])), b"")
            )
        offsets = {draft.seq: number for number, draft in enumerate(drafts.values(), len(messages))}
        end = len(messages) + len(drafts) - 1
        for place, draft in drafts.items():
            kind, body = _body(draft)
            self._check_size(place[1], body, draft, link)
            after = end - offsets[draft.seq]
            messages.append((self._subjects.of(place), _headers(draft, kind, seq_of(found[place]), after), body))
        relative = _commit_at(commit, offsets, BASE, end) if changes else commit
        # The server refuses a guard on what the same batch has written.
        expected = seq_of(found[receipt]) if has_mark or not drafts else None
        messages.append(self._receipt_message(link, batch, receipt, expected, relative, now_ms))

        async with self._batches:
            if len(messages) == 1:
                subject, headers, body = messages[0]
                first = await number_of(link.ask(subject, body, headers(b"")))
            else:
                first = await self._send_batch(link, messages)
        if alarms:
            await asyncio.gather(*(self._ring(alarm, ringing) for alarm, ringing in alarms.items()))
        for place, draft in drafts.items():
            self._space.keep(place, _numbered(draft, first + offsets[draft.seq], first + end))
        return _commit_at(commit, offsets, first, end) if changes else commit

    def _mark_message(
        self, batch: Batch, place: Place, before: Message | None, now_ms: int
    ) -> tuple[str, Callable[[bytes], bytes], bytes]:
        """What stands in the place of a receipt while a batch is stored in part."""
        entry = Entry(place[1], None, 1, BASE, BASE, now_ms, now_ms, now_ms + MARK_S * 1000, _digest_of(batch))
        headers = _headers(Message(BASE, "put", entry, BASE, BASE, now_ms, None), "-", seq_of(before), 0)
        return self._subjects.of(place), lambda more: headers(b"Nats-TTL: %ds\r\n%b" % (MARK_S, more)), b""

    def _receipt_message(
        self, link: Link, batch: Batch, place: Place, expected: int | None, commit: Commit, now_ms: int
    ) -> tuple[str, Callable[[bytes], bytes], bytes]:
        receipt_ms = batch.receipt_ms or MADE_RECEIPT_MS
        entry = make_receipt(batch, commit, receipt_ms)
        entry = msgspec.structs.replace(entry, revision=BASE, created_revision=BASE)
        draft = Message(BASE, "put", entry, BASE, BASE, now_ms, None)
        kind, body = _body(draft)
        # What was taken, and records after a field was set, are in it whole.
        self._check_size(place[1], body, draft, link)
        # Rounded up, and a little longer: what the server drops by its own time may not be asked for by ours.
        ttl = b"Nats-TTL: %ds\r\n" % (receipt_ms // 1000 + 5)
        headers = _headers(draft, kind, expected, 0)
        return self._subjects.of(place), lambda more: headers(ttl + more), body


# Parts ------------------------------------------------------------------------


class _Attempts:
    """What is known of the attempts at one commit.

    Attributes:
        since: A number below the one that the commit may have got; None while it cannot have been applied.
        refusal: What the server said to the only attempt that may have been applied.
    """

    def __init__(self, since: int | None) -> None:
        self.since = since
        self.refusal: Refused | None = None
        self.lost = 0
        self.abandoned = 0
        self._started_at = time.monotonic()

    def start_clock(self) -> None:
        """Note when a request is sent."""
        self._started_at = time.monotonic()

    async def pause(self) -> None:
        """Let others finish."""
        await asyncio.sleep(jitter_s(time.monotonic() - self._started_at))

    def raise_refusal(self) -> None:
        """Raise what the server said to an attempt, when a look after it found that nothing was stored."""
        if self.refusal is not None:
            self.since = None
            raise self.refusal


def _set_alarm(link: Link, alarm: str) -> asyncio.Future[tuple[bytes, bytes]]:
    """Send an alarm. Where its entry is refused, nobody waits for the answer."""
    answer = link.ask(alarm)
    answer.add_done_callback(lambda done: done.cancelled() or done.exception())
    return answer


def _digest_of(batch: Batch) -> bytes:
    """What tells a request from another under the same id, in the form of a meta."""
    return b'"%b"' % batch.digest.hex().encode()


def _is_lone(batch: Batch) -> bool:
    """Whether a batch is one message: one write, guards on its own key alone, nothing that a receipt must hold."""
    if len(batch.writes) != 1 or batch.receipt_ms is not None:
        return False
    write = batch.writes[0]
    if type(write) is Delete and write.take:
        return False
    return not batch.guards or all(guard.key == write.key and guard.family == write.family for guard in batch.guards)


def _only_expires(batch: Batch) -> bool:
    """Whether a batch is what a sweeper asks for: nothing in it depends on the rest."""
    if not batch.writes or batch.guards or batch.receipt_ms is not None:
        return False
    return all(type(write) is Expire for write in batch.writes)


def _replayed(batch: Batch, receipt: Message | None, since: int) -> Commit | Refusal | None:
    """What a retry is answered from the receipt that it left after that number, also if that is past its time."""
    if receipt is None or receipt.held is None or receipt.seq <= since:
        return None
    asked = msgspec.structs.replace(batch, receipt_ms=batch.receipt_ms or MADE_RECEIPT_MS)
    outcome = plan(asked, _always(receipt.held), now_ms=receipt.at_ms, revision=BASE)
    return outcome if isinstance(outcome, Refusal) else outcome.commit


def _commit_of(message: Message) -> Commit:
    if message.op in ("delete", "expire"):
        return Commit(message.commit, (None,), (message.entry,), message.at_ms)
    return Commit(message.commit, (message.entry,), (None,), message.at_ms)


def _numbered(draft: Message, seq: int, commit: int) -> Message:
    """A message with the number that the server gave it."""
    entry = draft.entry
    if draft.op in ("delete", "expire"):
        # What ended has its own numbers.
        return msgspec.structs.replace(draft, seq=seq, commit=commit)
    value_seq = seq if draft.value_seq == draft.seq else draft.value_seq
    entry = entry_at(entry, seq, seq)
    return Message(
        seq,
        draft.op,
        entry,
        value_seq,
        commit,
        draft.at_ms,
        draft.cause,
        draft.size_bytes,
        draft.lost,
        draft.past,
        draft.under,
        draft.has_receipt,
    )


def _commit_at(commit: Commit, offsets: dict[int, int], first: int, end: int) -> Commit:
    """A commit with its revisions, of which the first message has that number, and the last change the ``end``-th."""

    def place(entry: Entry) -> Entry:
        if entry.revision < BASE:
            # It was stored by an earlier attempt.
            return entry
        number = first + offsets[entry.revision]
        return entry_at(entry, number, number)

    entries = tuple(None if entry is None else place(entry) for entry in commit.entries)
    return msgspec.structs.replace(commit, revision=first + end, entries=entries)


def _finder(found: dict[Place, Message | None]) -> Callable[[Family, str], Entry | None]:
    return lambda family, key: held_in(found[family, key])


def _always(held: Entry | None) -> Callable[[Family, str], Entry | None]:
    return lambda family, key: held


def _body(draft: Message) -> tuple[str, bytes]:
    stored = draft.entry.stored
    return ("-", b"") if draft.held is None or stored is None else body_of(stored)


def _headers(draft: Message, kind: str, expected: int | None, after: int) -> Callable[[bytes], bytes]:
    return lambda more: headers_of(draft, kind, expected, after, more)


def _guard(subject: str, seq: int) -> Callable[[bytes], bytes]:
    """The headers of a message that is taken only if a subject's last message is this one."""
    text = (
        f"NATS/1.0\r\nNats-Expected-Last-Subject-Sequence: {seq}\r\n"
        f"Nats-Expected-Last-Subject-Sequence-Subject: {subject}\r\n"
    ).encode()
    return lambda more: text + more + b"\r\n"


def _settle(answer: asyncio.Future[int], outcome: int | Exception) -> None:
    if answer.done():
        return
    if isinstance(outcome, Exception):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)
