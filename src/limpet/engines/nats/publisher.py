"""The messages of a commit on NATS: how they are built, grouped and sent.

A commit of one key is one conditional message; where the key had expired, an atomic batch of two, of which the first
records the expiry. A commit of several keys, or one that must leave a receipt, is an atomic batch as well: a key that
is only guarded has a message that carries just the guard.

A server without room may store the first messages of an atomic batch and not the others. So a batch begins
with a mark under the subject of its receipt and ends with the receipt. Where the mark is still there, a part
of the batch is stored: it is not acknowledged, and a repeated request stores the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from limpet.engines.nats.connection import ApiError, Connection, ConnectionLost, NoReply
from limpet.engines.nats.messages import BASE, EntryId, LastMessages, Message, encode_headers, encode_value
from limpet.engines.nats.stream import (
    BatchAbandoned,
    KeyChanged,
    NamespaceStream,
    ReplyLost,
    Server,
    await_ack,
    entry_at,
    is_mark,
    parse_ack,
    seq_of,
)
from limpet.errors import ValueTooLarge
from limpet.model import Batch, Change, Commit, Entry
from limpet.transition import Plan, make_receipt

__all__ = ["MADE_RECEIPT_MS", "MaybeStored", "Publisher", "digest_of"]

# How long a receipt is kept that the caller did not request.
MADE_RECEIPT_MS: Final = 120_000
# Allowed clock skew between processes, plus a margin.
CLOCK_SKEW_MS: Final = 1_000
BATCHES_MAX: Final = 24
GROUP_MIN: Final = 16
GROUP_MAX: Final = 900
SMALL_BYTES: Final = 100_000
# A receipt is dropped by the server a little later than it expires by our time.
RECEIPT_MARGIN_S: Final = 5
# A message that only carries a guard has done its work when it was stored.
CARRIER_TTL: Final = b"Nats-TTL: 1s\r\n"

_Headers = Callable[[bytes], bytes]
"""Makes the headers of a message, with some more that are known only when it is sent."""
_Outgoing = tuple[str, _Headers, bytes]
"""A message before it is sent: its subject, its headers, its body."""


class MaybeStored(Exception):
    """The server refused an atomic batch, of which it may have stored a part."""

    def __init__(self, refusal: ApiError) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


class Publisher:
    """Sends the messages of one namespace, of this process."""

    def __init__(self, server: Server, stream: NamespaceStream) -> None:
        self._server = server
        self._stream = stream
        self._subjects = stream.subjects
        self._batches = asyncio.Semaphore(BATCHES_MAX)
        self._group: list[tuple[_Outgoing, asyncio.Future[int]]] = []
        self._grouping: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """Cancel the work in the background."""
        if self._grouping is not None:
            self._grouping.cancel()

    # One message ----------------------------------------------------------------

    def start_one(
        self, connection: Connection, entry_id: EntryId, before: Message | None, change: Change
    ) -> tuple[Message, asyncio.Future[tuple[bytes, bytes]]]:
        """Send a change that is its commit and does not expire. Returns its message, and the reply to come."""
        expected = seq_of(before)
        draft = _make_draft(change, expected)
        kind, body = _encode_body(draft)
        _check_size(entry_id[1], body, draft, connection)
        headers = encode_headers(draft, kind, expected)
        return draft, connection.request(self._subjects.of(entry_id), body, headers)

    def finish_one(self, entry_id: EntryId, draft: Message, number: int) -> Commit:
        """The commit of a message that was stored under this number, and is alone in its batch."""
        message = _with_seq(draft, number, number)
        self._stream.cache(entry_id, message)
        if message.op in ("delete", "expire"):
            return Commit(number, (None,), (message.entry,), message.at_ms)
        return Commit(number, (message.entry,), (None,), message.at_ms)

    async def send_one(self, entry_id: EntryId, before: Message | None, outcome: Plan) -> Commit:
        """Send the changes of a commit of one key."""
        expected, changes = seq_of(before), outcome.changes
        draft = _make_draft(changes[-1], expected if len(changes) == 1 else changes[0].revision)
        kind, body = _encode_body(draft)
        connection = self._server.live_connection or await self._server.connection()
        _check_size(entry_id[1], body, draft, connection)
        alarm = None if draft.entry.expires_ms is None else self._new_alarm(entry_id, before, draft)
        # Before the entry, on the same connection: an entry without its alarm would never expire.
        alarm_ack = None if alarm is None else _send_alarm(connection, alarm)
        subject = self._subjects.of(entry_id)
        if len(changes) > 1:
            number = await self._send_after_expiry(connection, subject, expected, changes[0], draft)
        elif self._server.syncs:
            headers = _make_headers(draft, kind, expected, 0)
            # Make them once before they join a group: an error here must not fail the others.
            headers(b"")
            number = await self._join_group((subject, headers, body))
        else:
            try:
                number = parse_ack(*await connection.request(subject, body, encode_headers(draft, kind, expected)))
            except (ConnectionLost, NoReply) as error:
                raise ReplyLost from error
        if alarm is not None and alarm_ack is not None:
            await self._confirm_alarm(alarm, alarm_ack)
        return self.finish_one(entry_id, draft, number)

    async def _send_after_expiry(
        self, connection: Connection, subject: str, expected: int, expiry: Change, draft: Message
    ) -> int:
        """Send a change of a key that had expired, which is recorded first. Returns the number of the change.

        Of a server without room, the expiry may be stored alone: it is true by itself.
        """
        kind, body = _encode_body(draft)
        first = (subject, _make_headers(_make_draft(expiry, expected), "-", expected, 1), b"")
        async with self._batches:
            number = await self.send_batch(connection, [first, (subject, _make_headers(draft, kind, None, 0), body)])
        return number + 1

    def _new_alarm(self, entry_id: EntryId, before: Message | None, draft: Message) -> str | None:
        """The subject of the alarm that an entry needs and does not have yet."""
        expires_ms = draft.entry.expires_ms
        if expires_ms is None or draft.held is None:
            return None
        if before is not None and before.held is not None and before.held.expires_ms == expires_ms:
            return None
        return self._subjects.alarm(entry_id, expires_ms)

    async def _confirm_alarm(self, alarm: str, alarm_ack: asyncio.Future[tuple[bytes, bytes]]) -> None:
        """Make sure that an alarm was stored, and that no sweeper met it before its entry was there.

        In doubt the alarm is sent again, which does no harm.
        """
        must_repeat = self._stream.now_ms() >= self._subjects.parse_alarm(alarm)[0] - CLOCK_SKEW_MS
        with contextlib.suppress(Exception):
            try:
                await await_ack(alarm_ack)
            except Exception:
                must_repeat = True
            if must_repeat:
                connection = await self._server.connection()
                await await_ack(connection.request(alarm))

    # Groups: where each message is synced to disk, many are sent as one batch -----

    def _join_group(self, message: _Outgoing) -> asyncio.Future[int]:
        """Send a message together with others of the same moment: the server then syncs once for all of them."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[int] = loop.create_future()
        self._group.append((message, waiter))
        if self._grouping is None or self._grouping.done():
            self._grouping = loop.create_task(self._send_groups())
        return waiter

    async def _send_groups(self) -> None:
        while self._group:
            group, self._group = self._group[:GROUP_MAX], self._group[GROUP_MAX:]
            group = [(message, waiter) for message, waiter in group if not waiter.cancelled()]
            try:
                await self._send_group(await self._server.connection(), group)
            except Exception as error:
                for _, waiter in group:
                    _resolve(waiter, error)

    async def _send_group(self, connection: Connection, group: list[tuple[_Outgoing, asyncio.Future[int]]]) -> None:
        if len(group) >= GROUP_MIN:
            # If the key of one has changed, none is stored; then each is sent by itself.
            with contextlib.suppress(KeyChanged):
                first = await self.send_batch(connection, [message for message, _ in group])
                for number, (_, waiter) in enumerate(group, first):
                    _resolve(waiter, number)
                return
        acks = [connection.request(subject, body, headers(b"")) for (subject, headers, body), _ in group]
        for (_, waiter), ack in zip(group, acks, strict=True):
            try:
                _resolve(waiter, await await_ack(ack))
            except Exception as error:
                _resolve(waiter, error)

    # Several messages -----------------------------------------------------------

    async def send_batch(self, connection: Connection, messages: list[_Outgoing]) -> int:
        """Send messages that are stored together or not at all. Returns the number of the first."""
        name = os.urandom(9).hex().encode()
        *others, (subject, headers, body) = messages
        for number, (one, its_headers, its_body) in enumerate(others, 1):
            position = b"Nats-Batch-Id: %b\r\nNats-Batch-Sequence: %d\r\n" % (name, number)
            connection.send(one, its_body, its_headers(position))
        last = b"Nats-Batch-Id: %b\r\nNats-Batch-Sequence: %d\r\nNats-Batch-Commit: 1\r\n" % (name, len(messages))
        try:
            return await await_ack(connection.request(subject, body, headers(last))) - len(others)
        except BatchAbandoned:
            # The server refuses it before it stores anything.
            raise
        except ApiError as error:
            raise MaybeStored(error) from error

    async def send_all(
        self,
        batch: Batch,
        receipt: EntryId,
        found: LastMessages,
        outcome: Plan,
        now_ms: int,
    ) -> Commit:
        """Send the changes of a commit: after the guards on keys that it does not change, and before its receipt."""
        commit, changes = outcome.commit, outcome.changes
        connection = await self._server.connection()
        drafts = _make_drafts(changes, found)
        # Of a key that had expired, there are two changes; the second is what it holds.
        last = dict(drafts)
        guarded = [entry_id for entry_id in found if entry_id != receipt and entry_id not in last]
        alarms = {}
        for entry_id, draft in last.items():
            if (alarm := self._new_alarm(entry_id, found[entry_id], draft)) is not None:
                alarms[alarm] = _send_alarm(connection, alarm)

        has_mark = is_mark(found[receipt], now_ms)
        messages: list[_Outgoing] = []
        if drafts and not has_mark:
            messages.append(self._mark_message(batch, receipt, found[receipt], now_ms))
        for number, entry_id in enumerate(guarded):
            guard = _make_guard(self._subjects.of(entry_id), seq_of(found[entry_id]))
            messages.append((self._subjects.carrier(number), guard, b""))
        offsets = {draft.seq: number for number, (_, draft) in enumerate(drafts, len(messages))}
        end = len(messages) + len(drafts) - 1
        for entry_id, draft in drafts:
            kind, body = _encode_body(draft)
            _check_size(entry_id[1], body, draft, connection)
            # The server refuses a guard on a subject that the same batch has written.
            expected = seq_of(found[entry_id]) if (draft.prev or 0) < BASE else None
            headers = _make_headers(draft, kind, expected, end - offsets[draft.seq])
            messages.append((self._subjects.of(entry_id), headers, body))
        relative = _commit_at(commit, offsets, BASE, end) if changes else commit
        expected = seq_of(found[receipt]) if has_mark or not drafts else None
        messages.append(self._receipt_message(connection, batch, receipt, expected, relative, now_ms))

        async with self._batches:
            if len(messages) == 1:
                subject, headers, body = messages[0]
                first = await await_ack(connection.request(subject, body, headers(b"")))
            else:
                first = await self.send_batch(connection, messages)
        if alarms:
            await asyncio.gather(*(self._confirm_alarm(alarm, alarm_ack) for alarm, alarm_ack in alarms.items()))
        for entry_id, draft in last.items():
            self._stream.cache(entry_id, _with_seq(draft, first + offsets[draft.seq], first + end))
        return _commit_at(commit, offsets, first, end) if changes else commit

    async def send_expiries(self, found: LastMessages, outcome: Plan) -> Commit:
        """Send the changes of a commit that only expires entries."""
        connection = await self._server.connection()
        drafts = _make_drafts(outcome.changes, found)
        end = len(drafts) - 1
        messages: list[_Outgoing] = [
            (self._subjects.of(entry_id), _make_headers(draft, "-", draft.prev, end - number), b"")
            for number, (entry_id, draft) in enumerate(drafts)
        ]
        async with self._batches:
            first = await self.send_batch(connection, messages)
        for number, (entry_id, draft) in enumerate(drafts, first):
            self._stream.cache(entry_id, _with_seq(draft, number, first + end))
        return msgspec.structs.replace(outcome.commit, revision=first + end)

    def _mark_message(self, batch: Batch, entry_id: EntryId, before: Message | None, now_ms: int) -> _Outgoing:
        """The mark under the subject of a receipt, for as long as a batch is stored in part.

        It stays below the receipt, and ends before it by our time: when the server has dropped the receipt, the mark
        that may then be the last message means nothing any more.
        """
        receipt_ms = batch.receipt_ms or MADE_RECEIPT_MS
        entry = Entry(entry_id[1], None, 1, BASE, BASE, now_ms, now_ms, now_ms + receipt_ms, digest_of(batch))
        headers = _make_headers(Message(BASE, "put", entry, BASE, now_ms, None), "-", seq_of(before), 0)
        ttl = _make_receipt_ttl(receipt_ms)
        return self._subjects.of(entry_id), lambda more: headers(ttl + more), b""

    def _receipt_message(
        self,
        connection: Connection,
        batch: Batch,
        entry_id: EntryId,
        expected: int | None,
        commit: Commit,
        now_ms: int,
    ) -> _Outgoing:
        receipt_ms = batch.receipt_ms or MADE_RECEIPT_MS
        entry = make_receipt(batch, commit, receipt_ms)
        entry = msgspec.structs.replace(entry, revision=BASE, created_revision=BASE)
        draft = Message(BASE, "put", entry, BASE, now_ms, None)
        kind, body = _encode_body(draft)
        # It contains values that were taken, and whole records after a field was set.
        _check_size(entry_id[1], body, draft, connection)
        ttl = _make_receipt_ttl(receipt_ms)
        headers = _make_headers(draft, kind, expected, 0)
        return self._subjects.of(entry_id), lambda more: headers(ttl + more), body


# Parts ------------------------------------------------------------------------


def digest_of(batch: Batch) -> bytes:
    """What distinguishes a request from another one with the same id, in the form of a meta."""
    return b'"%b"' % batch.digest.hex().encode()


def _make_receipt_ttl(receipt_ms: int) -> bytes:
    """Rounded up, and a little longer: the server must not drop a receipt before it expires by our time."""
    return b"Nats-TTL: %ds\r\n" % (receipt_ms // 1000 + RECEIPT_MARGIN_S)


def _make_draft(change: Change, prev: int) -> Message:
    """The message of a change, before it has a number."""
    entry, op = change.entry, change.op
    return Message(change.revision, op, entry, 0, change.at_ms, change.origin, entry.size_bytes, prev)


def _make_drafts(changes: Sequence[Change], found: LastMessages) -> list[tuple[EntryId, Message]]:
    """The messages of a batch, before they have numbers. The second of a key follows the first."""
    drafts: list[tuple[EntryId, Message]] = []
    before = {entry_id: seq_of(message) for entry_id, message in found.items()}
    for change in changes:
        entry_id = (change.family, change.key)
        drafts.append((entry_id, _make_draft(change, before[entry_id])))
        before[entry_id] = change.revision
    return drafts


def _send_alarm(connection: Connection, alarm: str) -> asyncio.Future[tuple[bytes, bytes]]:
    """Send an alarm. If its entry is refused, nothing awaits the reply, so its error is retrieved here."""
    ack = connection.request(alarm)
    ack.add_done_callback(lambda done: done.cancelled() or done.exception())
    return ack


def _check_size(key: str, body: bytes, draft: Message, connection: Connection) -> None:
    if len(body) < SMALL_BYTES:
        return
    limit_bytes = int(connection.server_info.get("max_payload", 1_048_576))
    size_bytes = len(body) + len(draft.entry.meta_json or b"") + 4_096
    if size_bytes > limit_bytes:
        raise ValueTooLarge(key, size_bytes=size_bytes, limit_bytes=limit_bytes, what="message")


def _with_seq(draft: Message, seq: int, commit: int) -> Message:
    """A message with the number that the server gave it."""
    entry = draft.entry
    if draft.op in ("delete", "expire"):
        # The entry that ended keeps its own revision.
        return msgspec.structs.replace(draft, seq=seq, commit=commit)
    entry = entry_at(entry, seq, seq)
    prev = draft.prev or 0
    if prev >= BASE:
        prev += seq - draft.seq
    return Message(seq, draft.op, entry, commit, draft.at_ms, draft.origin, draft.size_bytes, prev)


def _commit_at(commit: Commit, offsets: dict[int, int], first: int, end: int) -> Commit:
    """A commit with its revisions, from the number of its first message and the offset of its last change."""

    def resolve(entry: Entry) -> Entry:
        if entry.revision < BASE:
            # It was stored by an earlier attempt.
            return entry
        number = first + offsets[entry.revision]
        return entry_at(entry, number, number)

    entries = tuple(None if entry is None else resolve(entry) for entry in commit.entries)
    return msgspec.structs.replace(commit, revision=first + end, entries=entries)


def _encode_body(draft: Message) -> tuple[str, bytes]:
    stored = draft.entry.stored
    return ("-", b"") if stored is None else encode_value(stored)


def _make_headers(draft: Message, kind: str, expected: int | None, after: int) -> _Headers:
    return lambda more: encode_headers(draft, kind, expected, after, more)


def _make_guard(subject: str, seq: int) -> _Headers:
    """The headers of a message that is stored only if this is the number of a subject's last message."""
    text = (
        f"NATS/1.0\r\nNats-Expected-Last-Subject-Sequence: {seq}\r\n"
        f"Nats-Expected-Last-Subject-Sequence-Subject: {subject}\r\n"
    ).encode()
    return lambda more: text + CARRIER_TTL + more + b"\r\n"


def _resolve(waiter: asyncio.Future[int], result: int | Exception) -> None:
    if waiter.done():
        return
    if isinstance(result, Exception):
        waiter.set_exception(result)
    else:
        waiter.set_result(result)
