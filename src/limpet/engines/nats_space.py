"""A namespace on NATS: one stream, whose last message of each subject is what a key holds.

A commit of one key is one message that the server takes only if the key's last message is still the
one that the commit was planned on. A commit of several keys, or one that must leave a receipt, is an
atomic batch of such messages: a key that is only guarded is named by a message that does nothing else.
Whoever comes too late plans again on what is there now.

A write whose answer was lost is looked for in the key itself, which carries the requests that changed
it of late, or in the receipt of its batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import itertools
import os
import random
import time
from base64 import b64decode
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

import msgspec

from limpet.engines.nats_link import Link, LinkLost, Refused, Silent, Unheard
from limpet.engines.nats_wire import (
    Message,
    Place,
    Subjects,
    body_of,
    headers_of,
    parse,
    recalled,
    remembered,
    under,
)
from limpet.errors import Ambiguous, Contention, InvalidValue, Unavailable, ValueTooLarge
from limpet.model import Batch, Change, Commit, Delete, Entry, Expire, Family, Put, Refusal, live
from limpet.transition import Receipt, keep, plan, read_receipt, remember

__all__ = ["Server", "Space"]

ATTEMPTS: Final = 64
READS_MAX: Final = 200
CLOCK_S: Final = 30.0
KNOWN_MAX: Final = 16_384
KNOWN_BYTES_MAX: Final = 2_048
MADE_RECEIPT_MS: Final = 120_000
# What two processes may differ in what time it is, and some more.
LATE_MS: Final = 1_000
BATCHES_MAX: Final = 24
GROUP_MIN: Final = 16
GROUP_MAX: Final = 900
UNSETTLED_MAX: Final = 1000
SMALL_BYTES: Final = 100_000

# What a plan takes for the revision before it. What lies above is not known before the server has answered.
_BASE: Final = 1 << 60

_TOO_LATE: Final = frozenset({10071, 10164, 10176})
_TOO_MANY: Final = frozenset({10210, 10211})
_NO_STREAM: Final = 10059
_NO_MESSAGE: Final = 10037
_STREAM_EXISTS: Final = 10058


class _Problem(msgspec.Struct):
    err_code: int = 0
    description: str = ""


class _Ack(msgspec.Struct):
    seq: int = 0
    count: int = 0
    error: _Problem | None = None


class _Told(msgspec.Struct):
    subject: str
    seq: int
    hdrs: str = ""
    data: str = ""


class _Found(msgspec.Struct):
    message: _Told | None = None
    error: _Problem | None = None


_ack = msgspec.json.Decoder(_Ack).decode
_found = msgspec.json.Decoder(_Found).decode
_any = msgspec.json.Decoder().decode
_json = msgspec.json.Encoder().encode


class Server(Protocol):
    """What a namespace needs of its engine."""

    replicas: int
    syncs: bool
    storage: str

    @property
    def live_link(self) -> Link | None:
        """The line, if there is one just now."""
        ...

    async def link(self) -> Link:
        """The line, laid anew if it broke."""
        ...

    def changed(self, namespace: str) -> None:
        """Tell whoever waits for changes here."""
        ...


class TooLate(Exception):
    """A key is not as it was when the commit was planned."""


class Lost(Exception):
    """Something was sent, and no answer came."""


_Sent = tuple[str, Callable[[bytes], bytes], bytes, "asyncio.Future[int]"]
"""A message on its way: its subject, its headers when the rest of them is known, its body, its number."""


class Space:
    """One namespace, as this process knows it."""

    def __init__(self, server: Server, namespace: str, bucket: str) -> None:
        self.namespace = namespace
        self.bucket = bucket
        self.stream = f"KV_{bucket}"
        self.subjects = Subjects(bucket)
        self.store_id = ""
        self.direct = False
        self._server = server
        self._writer = os.urandom(8).hex()
        self._numbers = itertools.count(1)
        self._unsettled: dict[str, None] = {}
        self._known: dict[Place, Message | None] = {}
        self._turns: dict[Place, deque[asyncio.Future[None]]] = {}
        self._batches = asyncio.Semaphore(BATCHES_MAX)
        self._group: list[_Sent] = []
        self._grouping: asyncio.Task[None] | None = None
        self.is_there = False
        self._clock: tuple[float, float] | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._latest_ms = 0

    # The stream ---------------------------------------------------------------

    async def ensure(self, *, create: bool = True) -> bool:
        """Whether there is such a namespace; made if it is wanted."""
        if self.is_there:
            return True
        try:
            await self._look()
        except Refused as no:
            if no.code != _NO_STREAM:
                raise
            if not create:
                return False
            await self._create()
            await self._look()
        return self.is_there

    async def _create(self) -> None:
        config = {
            "name": self.stream,
            "subjects": self.subjects.all,
            "storage": self._server.storage,
            "num_replicas": self._server.replicas,
            "max_msgs_per_subject": 1,
            "discard": "new",
            "deny_delete": True,
            "allow_rollup_hdrs": True,
            "allow_msg_ttl": True,
            "allow_atomic": True,
            # A copy may lag behind its leader, and then answers with what was.
            "allow_direct": self._server.replicas == 1,
        }
        try:
            await self.api(f"STREAM.CREATE.{self.stream}", config)
        except Refused as no:
            if no.code != _STREAM_EXISTS:
                raise

    async def _look(self) -> None:
        """Learn what the stream is, and what time it is there."""
        info = await self.info()
        config = info["config"]
        if config.get("max_msgs_per_subject") != 1 or not config.get("allow_atomic") or not config.get("allow_msg_ttl"):
            raise InvalidValue(
                f"the stream {self.stream} was not made by Limpet: it must keep one message per subject and allow "
                "atomic batches and times to live; choose another bucket_prefix or namespace"
            )
        self.direct = bool(config.get("allow_direct"))
        self.store_id = hashlib.sha256(f"{self.stream} {info['created']}".encode()).hexdigest()[:16]
        self.is_there = True

    async def info(self) -> dict[str, Any]:
        """What the server says of the stream. Its time is taken from this."""
        info = await self.api(f"STREAM.INFO.{self.stream}")
        self._clock = (_ms(info["ts"]), time.monotonic())
        return info

    def forget(self) -> None:
        """Look again at everything: the line broke, and the world may have changed."""
        self.is_there = False
        self._known.clear()

    def rest(self) -> None:
        """Do nothing more in the background."""
        for task in (self._renewing, self._grouping):
            if task is not None:
                task.cancel()

    def now_ms(self) -> int:
        """The time of the server: as it last told, and what has passed since."""
        assert self._clock is not None
        told_ms, at = self._clock
        passed_s = time.monotonic() - at
        if passed_s > CLOCK_S and (self._renewing is None or self._renewing.done()):
            self._renewing = asyncio.get_running_loop().create_task(self._renew())
        now_ms = int(told_ms + passed_s * 1000)
        if now_ms > self._latest_ms:  # noqa: PLR1730 - max() takes longer than asking for the time
            self._latest_ms = now_ms
        return self._latest_ms

    async def _renew(self) -> None:
        with contextlib.suppress(Exception):
            await self.info()

    # Asking -------------------------------------------------------------------

    async def api(self, subject: str, asked: object = None) -> dict[str, Any]:
        """Ask for something that may be asked again."""
        link = await self._server.link()
        headers, body = await link.ask(f"$JS.API.{subject}", b"" if asked is None else _json(asked))
        if headers.startswith(b"NATS/1.0 503"):
            raise Unheard("JetStream is not enabled, or has no leader now")
        answer: dict[str, Any] = _any(body)
        if (error := answer.get("error")) is not None:
            raise Refused(error.get("err_code", 0), error.get("description", ""))
        return answer

    async def get(self, asked: dict[str, Any]) -> tuple[str, int, bytes, bytes] | None:
        """One message of the stream: its subject, its number, its headers and its body; None when there is none."""
        if not self.direct:
            return await self._get_from_leader(asked)
        link = self._server.live_link or await self._server.link()
        subject = asked.get("last_by_subj")
        if subject is None or "*" in subject or ">" in subject:
            headers, body = await link.ask(f"$JS.API.DIRECT.GET.{self.stream}", _json(asked))
        else:
            headers, body = await link.ask(f"$JS.API.DIRECT.GET.{self.stream}.{subject}")
        if headers.startswith(b"NATS/1.0 "):
            if headers.startswith(b"NATS/1.0 404"):
                return None
            raise Unheard(headers[9:12].decode())
        at = headers.rindex(b"\r\nNats-Sequence: ") + 17
        seq = int(headers[at : headers.index(b"\r\n", at)])
        if subject is None or ">" in subject:
            at = headers.rindex(b"\r\nNats-Subject: ") + 16
            subject = headers[at : headers.index(b"\r\n", at)].decode()
        return subject, seq, headers, body

    async def _get_from_leader(self, asked: dict[str, Any]) -> tuple[str, int, bytes, bytes] | None:
        link = self._server.live_link or await self._server.link()
        headers, body = await link.ask(f"$JS.API.STREAM.MSG.GET.{self.stream}", _json(asked))
        if headers.startswith(b"NATS/1.0 503"):
            raise Unheard("503")
        answer = _found(body)
        if answer.error is not None:
            if answer.error.err_code == _NO_MESSAGE:
                return None
            raise Refused(answer.error.err_code, answer.error.description)
        told = answer.message
        assert told is not None
        return told.subject, told.seq, b64decode(told.hdrs), b64decode(told.data)

    async def last(self, place: Place) -> Message | None:
        """The last message of a key."""
        found = await self.get({"last_by_subj": self.subjects.of(place)})
        message = None if found is None else self._message(place, *found[1:])
        self._keep(place, message)
        return message

    def _message(self, place: Place, seq: int, headers: bytes, body: bytes) -> Message:
        message = parse(place[1], seq, headers, body)
        return message if place[0] != "receipt" else _receipt_in(message)

    def _keep(self, place: Place, message: Message | None) -> None:
        """Remember what a key holds, so that the next write need not ask."""
        known = self._known
        if message is not None and (message.size_bytes > KNOWN_BYTES_MAX or len(message.past) > KNOWN_BYTES_MAX):
            known.pop(place, None)
            return
        if len(known) >= KNOWN_MAX and place not in known:
            del known[next(iter(known))]
        known[place] = message

    async def lasts(self, places: Iterable[Place]) -> dict[Place, Message | None]:
        """The last messages of several keys, each from a moment of its own."""
        wanted = list(places)
        if len(wanted) == 1:
            return {wanted[0]: await self.last(wanted[0])}
        return dict(zip(wanted, await asyncio.gather(*map(self.last, wanted)), strict=True))

    async def read(self, family: Family, keys: Sequence[str]) -> list[Entry | None]:
        """The live entries of these keys, all of one moment."""
        if len(keys) == 1:
            message = await self.last((family, keys[0]))
            held = _held(message)
            return [held if held is None or held.expires_ms is None else live(held, self.now_ms())]
        places = [(family, key) for key in dict.fromkeys(keys)]
        found = await self._at_one_moment(places)
        now_ms = self.now_ms()
        entries = {place[1]: live(_held(message), now_ms) for place, message in found.items()}
        return [entries[key] for key in keys]

    async def _at_one_moment(self, places: list[Place]) -> dict[Place, Message | None]:
        """What all these keys held at one moment: what they hold when a second look finds nothing changed."""
        before = await self.lasts(places)
        for _ in range(READS_MAX):
            found = await self.lasts(places)
            if _seqs(found) == _seqs(before):
                return found
            before = found
        raise Contention(places[0][1], attempts=READS_MAX)

    async def revision(self) -> int:
        """The revision of the latest change."""
        found = await asyncio.gather(*(self.get({"last_by_subj": subject}) for subject in self.subjects.logged))
        return max(await self.floor(), *(0 if one is None else one[1] for one in found))

    async def first_after(self, seq: int, subject: str) -> Message | None:
        """The oldest message of these subjects after a number."""
        found = await self.get({"seq": seq + 1, "next_by_subj": subject})
        place = None if found is None else self.subjects.place(found[0])
        return None if found is None or place is None else self._message(place, *found[1:])

    async def floor(self) -> int:
        """Up to where the log was trimmed."""
        found = await self.get({"last_by_subj": self.subjects.floor})
        return 0 if found is None else int(found[3])

    async def raise_floor(self, floor: int) -> bool:
        """Trim the log up to there; False when somebody else did it first."""
        found = await self.get({"last_by_subj": self.subjects.floor})
        if found is not None and int(found[3]) >= floor:
            return False
        expected = 0 if found is None else found[1]
        headers = f"NATS/1.0\r\nNats-Expected-Last-Subject-Sequence: {expected}\r\nLimpet-Floor: {floor}\r\n\r\n"
        link = await self._server.link()
        try:
            await _number(link.ask(self.subjects.floor, b"%d" % floor, headers.encode()))
        except TooLate:
            return False
        except Lost as error:
            raise Silent from error
        return True

    async def purge(self, subject: str, seq: int) -> None:
        """Drop what these subjects held up to a number."""
        await self.api(f"STREAM.PURGE.{self.stream}", {"filter": subject, "seq": seq + 1})

    # Committing ---------------------------------------------------------------

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
        cause = batch.request_id or f"{self._writer}-{next(self._numbers):x}"
        since = batch.retry_since
        known = since is None and place in self._known
        message = self._known[place] if known else None
        for attempt in range(ATTEMPTS):
            if not known:
                message = await self._last_of(place, cause, since)
            if since is not None:
                earlier = self._answered(batch, cause, message, since)
                if earlier is not None:
                    return earlier
                since = None
            now_ms = self._time_of(message)
            outcome = plan(batch, _always(_held(message)), now_ms=now_ms, revision=_BASE, cause=cause)
            if isinstance(outcome, Refusal) or not outcome.changes:
                if known:
                    # By now it may be otherwise.
                    known = False
                    continue
                return outcome if isinstance(outcome, Refusal) else await self._unchanged(outcome.commit)
            try:
                told = await self._publish(place, message, outcome.changes[-1], cause, now_ms)
            except TooLate:
                await _pause(attempt)
            except Lost:
                since = 0 if message is None else message.seq
            else:
                self._keep(place, told)
                self._unsettled.pop(cause, None)
                self._server.changed(self.namespace)
                return _commit_of(told)
            known = False
        raise Contention(place[1], attempts=ATTEMPTS)

    async def _last_of(self, place: Place, cause: str, since: int | None) -> Message | None:
        """The last message of a key; while a request is unsettled, whoever cannot look cannot tell."""
        try:
            return await self.last(place)
        except (LinkLost, Silent, Unheard, Refused, Unavailable, OSError) as error:
            if since is None:
                raise
            raise self._unknown(cause, since, error) from error

    def _unknown(self, cause: str, since: int, problem: object) -> Ambiguous:
        while len(self._unsettled) >= UNSETTLED_MAX:
            del self._unsettled[next(iter(self._unsettled))]
        self._unsettled[cause] = None
        text = f"cannot tell whether NATS took the commit: {type(problem).__name__}"
        return Ambiguous(text, request_id=cause, since=since)

    def _answered(self, batch: Batch, cause: str, message: Message | None, since: int) -> Commit | None:
        """What a request was answered earlier, when its answer may have been lost; None when it was not applied."""
        if message is None:
            return None
        mine = recalled(message, cause)
        if mine is None:
            if message.lost > since:
                raise self._unknown(cause, since, TooLate())
            return None
        self._unsettled.pop(cause, None)
        write = batch.writes[0]
        if isinstance(write, Put) and mine.entry.stored is None:
            meta = write.meta_json if isinstance(write.meta_json, bytes) else None
            entry = msgspec.structs.replace(mine.entry, stored=write.stored, meta_json=meta)
            mine = msgspec.structs.replace(mine, entry=entry)
        return msgspec.structs.replace(_commit_of(mine), replayed=True)

    def _expect_no_trace(self, batch: Batch, cause: str, found: dict[Place, Message | None], since: int) -> None:
        """Refuse to apply a batch whose receipt may have been dropped, since it would then be applied twice."""
        for write in batch.writes:
            message = found[write.family, write.key]
            mine = None if message is None else recalled(message, cause)
            # An id may have been used before, and is free again when its receipt is gone.
            if message is not None and (message.lost > since or (mine is not None and mine.seq > since)):
                raise self._unknown(cause, since, TooLate())

    def _is_settled(self, cause: str) -> bool:
        """Whether a request is this process's own and was answered, so that it will not come back."""
        return cause.startswith(self._writer) and cause not in self._unsettled

    def _time_of(self, *messages: Message | None) -> int:
        """The time of a commit: never before what is there, though another process may have told it a little later."""
        now_ms = self.now_ms()
        for message in messages:
            if message is not None and message.at_ms > now_ms:
                now_ms = message.at_ms
        return now_ms

    async def _unchanged(self, commit: Commit) -> Commit:
        """A commit that changed nothing names the latest revision."""
        return msgspec.structs.replace(commit, revision=await self.revision())

    async def _expire(self, batch: Batch) -> Commit:
        """End what is due, each by itself: whoever was there first has done the same."""
        each = [msgspec.structs.replace(batch, writes=(write,)) for write in batch.writes]
        commits = [one for one in await asyncio.gather(*map(self.commit, each)) if isinstance(one, Commit)]
        ended = tuple(commit.ended[0] for commit in commits)
        revision, at_ms = max((commit.revision, commit.at_ms) for commit in commits)
        return Commit(revision, (None,) * len(ended), ended, at_ms)

    # One message ----------------------------------------------------------------

    def _next(self, before: Message | None, change: Change, cause: str, now_ms: int) -> Message:
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
        return Message(change.revision, op, entry, value_seq, 0, change.at_ms, name, size_bytes, lost, past, lies_on)

    async def _publish(self, place: Place, before: Message | None, change: Change, cause: str, now_ms: int) -> Message:
        """Send a change; returns the message as it now stands."""
        draft = self._next(before, change, cause, now_ms)
        kind, body = _body(draft)
        expected = 0 if before is None else before.seq
        subject = self.subjects.of(place)
        link = self._server.live_link or await self._server.link()
        self._check_size(place[1], body, draft, link)
        alarm = self._alarm(place, before, draft)
        # Before the entry, on the same line: an entry without its alarm would stay for ever.
        ringing = None if alarm is None else link.ask(alarm)
        if self._server.syncs:
            number = await self._send_grouped(subject, _headers(draft, kind, expected, 0), body)
        else:
            number = await _number(link.ask(subject, body, headers_of(draft, kind, expected)))
        if alarm is not None and ringing is not None:
            await self._ring(alarm, ringing)
        return _numbered(draft, number, number)

    def _alarm(self, place: Place, before: Message | None, draft: Message) -> str | None:
        """The subject of the alarm that an entry needs and does not have yet."""
        expires_ms = None if draft.held is None else draft.held.expires_ms
        if expires_ms is None or (before is not None and before.held and before.held.expires_ms == expires_ms):
            return None
        return self.subjects.alarm(place, expires_ms)

    async def _ring(self, alarm: str, ringing: asyncio.Future[tuple[bytes, bytes]]) -> None:
        """See that an alarm was taken, and not met by a sweeper before its entry was there. It may be set twice."""
        is_late = self.now_ms() >= self.subjects.alarmed(alarm)[0] - LATE_MS
        with contextlib.suppress(Exception):
            try:
                await _number(ringing)
            except Exception:
                is_late = True
            if is_late:
                link = await self._server.link()
                await _number(link.ask(alarm))

    def _check_size(self, key: str, body: bytes, draft: Message, link: Link) -> None:
        if len(body) < SMALL_BYTES:
            return
        most = int(link.facts.get("max_payload", 1_048_576))
        size = len(body) + len(draft.past) + len(draft.entry.meta_json or b"") + 4_096
        if size > most:
            raise ValueTooLarge(key, size_bytes=size, limit_bytes=most, what="message")

    # Where each message is synced to disk, many go as one ------------------------

    async def _send_grouped(self, subject: str, headers: Callable[[bytes], bytes], body: bytes) -> int:
        """Send a message with others that are on their way at the same time: the server then syncs once for all."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[int] = loop.create_future()
        self._group.append((subject, headers, body, answer))
        if self._grouping is None or self._grouping.done():
            self._grouping = loop.create_task(self._send_groups())
        return await answer

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
                _settle(answer, await _number(one))
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
        return await _number(link.ask(subject, body, headers(last))) - len(others)

    async def _commit_all(self, batch: Batch) -> Commit | Refusal:
        """Commit a batch as messages that are taken together, with a receipt among them."""
        request_id = batch.request_id or f"{self._writer}-{next(self._numbers):x}"
        receipt_ms = MADE_RECEIPT_MS if batch.receipt_ms is None else batch.receipt_ms
        asked = msgspec.structs.replace(batch, request_id=request_id, receipt_ms=receipt_ms)
        receipt: Place = ("receipt", request_id)
        places = list(dict.fromkeys([receipt, *((one.family, one.key) for one in (*batch.writes, *batch.guards))]))
        since: int | None = None
        for attempt in range(ATTEMPTS):
            try:
                found = await self.lasts(places)
            except (LinkLost, Silent, Unheard, Refused, Unavailable, OSError) as error:
                if since is None:
                    raise
                raise self._unknown(request_id, since, error) from error
            now_ms = self._time_of(*found.values())
            if batch.retry_since is not None and live(_finder(found)(*receipt), now_ms) is None:
                self._expect_no_trace(batch, request_id, found, batch.retry_since)
            outcome = plan(asked, _finder(found), now_ms=now_ms, revision=_BASE)
            if isinstance(outcome, Refusal):
                return outcome
            if outcome.commit.replayed:
                self._unsettled.pop(request_id, None)
                return outcome.commit
            if not outcome.changes:
                if _seqs(await self.lasts(places)) != _seqs(found):
                    continue
                outcome = msgspec.structs.replace(outcome, commit=await self._unchanged(outcome.commit))
                if batch.receipt_ms is None:
                    return outcome.commit
            try:
                commit = await self._send_all(asked, receipt, found, outcome.commit, outcome.changes, now_ms)
            except TooLate:
                await _pause(attempt)
            except Lost:
                since = max([0, *(seq for _, seq in _seqs(found))])
            else:
                self._unsettled.pop(request_id, None)
                if outcome.changes:
                    self._server.changed(self.namespace)
                return commit
        raise Contention(places[-1][1], attempts=ATTEMPTS)

    async def _send_all(
        self,
        batch: Batch,
        receipt: Place,
        found: dict[Place, Message | None],
        commit: Commit,
        changes: Sequence[Change],
        now_ms: int,
    ) -> Commit:
        """Send what a commit changes, after what it leaves untouched and its receipt."""
        # A log of the last change of each key has no room for an end that was followed by a beginning.
        last = {(change.family, change.key): change for change in changes}
        untouched = [place for place in found if place != receipt and place not in last]
        offsets = {change.revision: number for number, change in enumerate(last.values(), 1 + len(untouched))}
        count = 1 + len(untouched) + len(last)
        link = await self._server.link()
        cause = batch.request_id or ""
        drafts = {place: self._next(found[place], change, cause, now_ms) for place, change in last.items()}
        alarms = {}
        for place, draft in drafts.items():
            if (alarm := self._alarm(place, found[place], draft)) is not None:
                alarms[alarm] = link.ask(alarm)

        relative = _commit_at(commit, lambda planned: _BASE + offsets.get(planned, 0), _BASE + count - 1)
        messages = [self._receipt_message(batch, receipt, found[receipt], relative if changes else commit, now_ms)]
        for number, place in enumerate(untouched):
            messages.append((self.subjects.carrier(number), _guard(self.subjects.of(place), _seq(found[place])), b""))
        for place, draft in drafts.items():
            kind, body = _body(draft)
            self._check_size(place[1], body, draft, link)
            after = count - 1 - offsets[draft.seq]
            messages.append((self.subjects.of(place), _headers(draft, kind, _seq(found[place]), after), body))

        async with self._batches:
            if count == 1:
                subject, headers, body = messages[0]
                first = await _number(link.ask(subject, body, headers(b"")))
            else:
                first = await self._send_batch(link, messages)
        if alarms:
            await asyncio.gather(*(self._ring(alarm, ringing) for alarm, ringing in alarms.items()))
        for place, draft in drafts.items():
            self._keep(place, _numbered(draft, first + offsets[draft.seq], first + count - 1))
        if not changes:
            return commit
        return _commit_at(commit, lambda planned: first + offsets.get(planned, 0), first + count - 1)

    def _receipt_message(
        self, batch: Batch, place: Place, before: Message | None, commit: Commit, now_ms: int
    ) -> tuple[str, Callable[[bytes], bytes], bytes]:
        receipt_ms = batch.receipt_ms or MADE_RECEIPT_MS
        entry = keep(batch, commit, receipt_ms)
        entry = msgspec.structs.replace(entry, revision=_BASE, created_revision=_BASE)
        draft = Message(_BASE, "put", entry, _BASE, _BASE, now_ms, None)
        kind, body = _body(draft)
        # Rounded up, and a little longer: what the server drops by its own time may not be asked for by ours.
        ttl = b"Nats-TTL: %ds\r\n" % (receipt_ms // 1000 + 5)
        headers = _headers(draft, kind, _seq(before), 0)
        return self.subjects.of(place), lambda more: headers(ttl + more), body


# Parts ------------------------------------------------------------------------


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
    entry = _entry_at(entry, seq, seq)
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
    )


def _entry_at(entry: Entry, revision: int, created: int) -> Entry:
    """An entry with its revision; one that was just created, with that as well."""
    return Entry(
        entry.key,
        entry.stored,
        entry.version,
        revision,
        entry.created_revision if entry.created_revision < _BASE else created,
        entry.created_ms,
        entry.updated_ms,
        entry.expires_ms,
        entry.meta_json,
    )


def _commit_at(commit: Commit, number: Callable[[int], int], last: int) -> Commit:
    """A commit whose revisions are known."""
    entries = tuple(
        None if entry is None else _entry_at(entry, number(entry.revision), number(entry.revision))
        for entry in commit.entries
    )
    return msgspec.structs.replace(commit, revision=last, entries=entries)


def _receipt_in(message: Message) -> Message:
    """A receipt, whose numbers were counted from its own before that was known."""
    entry = message.entry
    if entry.stored is None:
        return message
    receipt: Receipt = read_receipt(entry)
    base, commit = message.seq - _BASE, receipt.commit
    entries = tuple(
        one if one is None or one.revision < _BASE else _entry_at(one, base + one.revision, one.created_revision + base)
        for one in commit.entries
    )
    revision = commit.revision if commit.revision < _BASE else base + commit.revision
    commit = msgspec.structs.replace(commit, revision=revision, entries=entries)
    assert entry.expires_ms is not None
    kept = remember(entry.key, receipt.digest, commit, entry.expires_ms - commit.at_ms)
    return msgspec.structs.replace(message, entry=kept)


def _finder(found: dict[Place, Message | None]) -> Callable[[Family, str], Entry | None]:
    return lambda family, key: _held(found[family, key])


def _always(held: Entry | None) -> Callable[[Family, str], Entry | None]:
    return lambda family, key: held


def _held(message: Message | None) -> Entry | None:
    return None if message is None else message.held


def _body(draft: Message) -> tuple[str, bytes]:
    stored = draft.entry.stored
    return ("-", b"") if draft.held is None or stored is None else body_of(stored)


def _headers(draft: Message, kind: str, expected: int, after: int) -> Callable[[bytes], bytes]:
    return lambda more: headers_of(draft, kind, expected, after, more)


def _guard(subject: str, seq: int) -> Callable[[bytes], bytes]:
    """The headers of a message that is taken only if a subject's last message is this one."""
    text = (
        f"NATS/1.0\r\nNats-Expected-Last-Subject-Sequence: {seq}\r\n"
        f"Nats-Expected-Last-Subject-Sequence-Subject: {subject}\r\n"
    ).encode()
    return lambda more: text + more + b"\r\n"


def _seq(message: Message | None) -> int:
    return 0 if message is None else message.seq


def _seqs(found: dict[Place, Message | None]) -> list[tuple[Place, int]]:
    return [(place, _seq(message)) for place, message in found.items()]


def _settle(answer: asyncio.Future[int], outcome: int | Exception) -> None:
    if answer.done():
        return
    if isinstance(outcome, Exception):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)


async def _number(asked: asyncio.Future[tuple[bytes, bytes]]) -> int:
    """The number that a message got, which must not be sent twice."""
    try:
        headers, body = await asked
    except (LinkLost, Silent) as error:
        raise Lost from error
    if headers:
        raise Unheard("503")
    answer = _ack(body)
    if answer.error is None:
        return answer.seq
    code = answer.error.err_code
    if code in _TOO_LATE or code in _TOO_MANY:
        raise TooLate
    raise Refused(code, answer.error.description)


async def _pause(attempt: int) -> None:
    """Let others finish; a crowd is spread over time."""
    longest_s = min(0.05, 0.0005 * 2**attempt)
    await asyncio.sleep(random.uniform(0, longest_s))


def _ms(text: str) -> float:
    """Milliseconds since 1970 of a time as the server writes it."""
    whole, _, fraction = text.removesuffix("Z").partition(".")
    seconds = datetime.datetime.fromisoformat(whole).replace(tzinfo=datetime.UTC).timestamp()
    return seconds * 1000 + float(f"0.{fraction or 0}") * 1000
