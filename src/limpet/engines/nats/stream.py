"""A namespace on NATS: one stream, whose last message of each subject is what a key holds.

It is looked at here: at one key, at several of one moment, at the time, which is the server's. What was
seen of a key is kept, so that whoever writes it next need not look again. Commits are in `writer`.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import time
from base64 import b64decode
from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol

import msgspec

from limpet.engines.nats.connection import Link, LinkLost, Refused, Silent, Unheard
from limpet.engines.nats.messages import Message, Place, Subjects, parse, time_in
from limpet.errors import Ambiguous, InvalidValue, Unavailable
from limpet.model import Entry, Family, live
from limpet.transition import Receipt, encode_receipt, read_receipt

__all__ = [
    "BASE",
    "Abandoned",
    "HalfStored",
    "Lost",
    "Server",
    "Space",
    "TooLate",
    "entry_at",
    "held_in",
    "is_mark",
    "number_in",
    "number_of",
    "seq_of",
    "seqs_of",
]

READ_S: Final = 30.0
CLOCK_S: Final = 30.0
KNOWN_MAX: Final = 16_384
KNOWN_BYTES_MAX: Final = 2_048

# What a plan takes for the revision before it. What lies above is not known before the server has answered.
BASE: Final = 1 << 60

_TOO_LATE: Final = frozenset({10071, 10164})
# The server could not gather a batch, or had too many under way.
_ABANDONED: Final = frozenset({10176, 10210, 10211})
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


class Abandoned(Refused):
    """The server gave up an atomic batch before it stored anything of it."""


class Lost(Exception):
    """Something was sent, and no answer came."""


class HalfStored(Exception):
    """A part of a batch is stored, and the rest cannot be stored."""

    def __init__(self, request_id: str, problem: str) -> None:
        super().__init__(
            f"NATS has stored a part of the batch of request {request_id!r} and cannot store the rest: {problem}"
        )


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
        self.is_there = False
        self.known: dict[Place, Message | None] = {}
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
        is_ours = config.get("max_msgs_per_subject") == 1 and config.get("allow_atomic") and config.get("allow_msg_ttl")
        if not is_ours or {*config.get("subjects", ())} != {*self.subjects.all}:
            raise InvalidValue(
                f"the stream {self.stream} was not made by Limpet, and is left as it is: choose another bucket_prefix "
                "or namespace; taking over such data is not supported yet"
            )
        self.direct = bool(config.get("allow_direct"))
        self.store_id = hashlib.sha256(f"{self.stream} {info['created']}".encode()).hexdigest()[:16]
        await self._latest()
        self.is_there = True

    async def info(self) -> dict[str, Any]:
        """What the server says of the stream. Its time is taken from this."""
        info = await self.api(f"STREAM.INFO.{self.stream}")
        self._clock = (_ms(info["ts"]), time.monotonic())
        return info

    def forget(self) -> None:
        """Look again at everything: the line broke, and the world may have changed."""
        self.is_there = False
        self.known.clear()

    def rest(self) -> None:
        """Do nothing more in the background."""
        if self._renewing is not None:
            self._renewing.cancel()

    def now_ms(self) -> int:
        """The time of the namespace: the server's, or the latest that was seen or recorded here if that is later."""
        now_ms = self._server_ms()
        if now_ms > self._latest_ms:  # noqa: PLR1730 - max() takes longer than asking for the time
            self._latest_ms = now_ms
        return self._latest_ms

    def behind_ms(self) -> int:
        """By how much the server's clock is behind the time of the namespace."""
        return max(0, self.now_ms() - self._server_ms())

    def _server_ms(self) -> int:
        """The time of the server: as it last told, and what has passed since."""
        assert self._clock is not None
        told_ms, at = self._clock
        passed_s = time.monotonic() - at
        if passed_s > CLOCK_S and (self._renewing is None or self._renewing.done()):
            self._renewing = asyncio.get_running_loop().create_task(self._renew())
        return int(told_ms + passed_s * 1000)

    async def _renew(self) -> None:
        with contextlib.suppress(Exception):
            # First what is recorded: the server's clock may have been set back since.
            await self._latest()
            await self.info()

    def see_time(self, at_ms: int) -> None:
        """Keep time from going back behind that of a commit that was seen."""
        self._latest_ms = max(self._latest_ms, at_ms)

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
        self.keep(place, message)
        return message

    def _message(self, place: Place, seq: int, headers: bytes, body: bytes) -> Message:
        message = parse(place[1], seq, headers, body)
        self.see_time(message.at_ms)
        return message if place[0] != "receipt" else _receipt_in(message)

    def keep(self, place: Place, message: Message | None) -> None:
        """Remember what a key holds, so that the next write need not ask."""
        known = self.known
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
            if family == "receipt" and is_mark(message):
                raise Ambiguous(f"a part of the batch of request {keys[0]!r} is stored", request_id=keys[0])
            held = held_in(message)
            return [held if held is None or held.expires_ms is None else live(held, self.now_ms())]
        places = [(family, key) for key in dict.fromkeys(keys)]
        found = await self._at_one_moment(places)
        if family == "receipt" and (half := [place[1] for place in places if is_mark(found[place])]):
            raise Ambiguous(f"a part of the batch of request {half[0]!r} is stored", request_id=half[0])
        now_ms = self.now_ms()
        entries = {place[1]: live(held_in(message), now_ms) for place, message in found.items()}
        return [entries[key] for key in keys]

    async def _at_one_moment(self, places: list[Place]) -> dict[Place, Message | None]:
        """What all these keys held at one moment: what they hold when a second look finds nothing changed."""
        until = time.monotonic() + READ_S
        before = await self.lasts(places)
        while time.monotonic() < until:
            found = await self.lasts(places)
            if seqs_of(found) == seqs_of(before):
                return found
            before = found
        raise Unavailable(
            f"{places[0][1]!r} and {len(places) - 1} other keys were never unchanged for as long as a look takes, "
            f"for {READ_S:g} s; read fewer keys at once"
        )

    async def revision(self) -> int:
        """The revision of the latest change."""
        return max(await self.floor(), await self._latest())

    async def _latest(self) -> int:
        """The number of the latest change, 0 where there is none. The time that was recorded with it is seen."""
        found = await asyncio.gather(*(self.get({"last_by_subj": subject}) for subject in self.subjects.logged))
        latest = max((one for one in found if one is not None), key=lambda one: one[1], default=None)
        if latest is None:
            return 0
        self.see_time(time_in(latest[2]))
        return latest[1]

    async def first_after(self, seq: int, subject: str) -> Message | None:
        """The oldest message of these subjects after a number."""
        found = await self.get({"seq": seq + 1, "next_by_subj": subject})
        place = None if found is None else self.subjects.place(found[0])
        return None if found is None or place is None else self._message(place, *found[1:])

    async def floor(self) -> int:
        """Up to where the log was trimmed."""
        found = await self.get({"last_by_subj": self.subjects.floor})
        return 0 if found is None else int(found[3])

    async def raise_floor(self, floor: int, floor_print: str) -> bool:
        """Trim the log up to the change of this fingerprint; False when somebody else did it first."""
        found = await self.get({"last_by_subj": self.subjects.floor})
        if found is not None and int(found[3]) >= floor:
            return False
        expected = 0 if found is None else found[1]
        headers = f"NATS/1.0\r\nNats-Expected-Last-Subject-Sequence: {expected}\r\nLimpet-Floor: {floor_print}\r\n\r\n"
        link = await self._server.link()
        try:
            await number_of(link.ask(self.subjects.floor, b"%d" % floor, headers.encode()))
        except TooLate:
            return False
        except Lost as error:
            raise Silent from error
        return True

    async def purge(self, subject: str, seq: int) -> None:
        """Drop what these subjects held up to a number."""
        await self.api(f"STREAM.PURGE.{self.stream}", {"filter": subject, "seq": seq + 1})


# Parts ------------------------------------------------------------------------


def entry_at(entry: Entry, revision: int, created: int) -> Entry:
    """An entry with its revision; one that was just created, with that as well."""
    return Entry(
        entry.key,
        entry.stored,
        entry.version,
        revision,
        entry.created_revision if entry.created_revision < BASE else created,
        entry.created_ms,
        entry.updated_ms,
        entry.expires_ms,
        entry.meta_json,
    )


def _receipt_in(message: Message) -> Message:
    """A receipt, whose numbers were counted before they were known."""
    entry = message.entry
    if entry.stored is None:
        return message
    receipt: Receipt = read_receipt(entry)
    commit = receipt.commit
    # The receipt is the last message of its batch, and the last change the one before it.
    base = message.seq - 1 - commit.revision
    entries = tuple(
        one if one is None or one.revision < BASE else entry_at(one, base + one.revision, one.created_revision + base)
        for one in commit.entries
    )
    revision = commit.revision if commit.revision < BASE else base + commit.revision
    commit = msgspec.structs.replace(commit, revision=revision, entries=entries)
    assert entry.expires_ms is not None
    kept = encode_receipt(entry.key, receipt.digest, commit, entry.expires_ms - commit.at_ms)
    return msgspec.structs.replace(message, entry=kept)


def is_mark(receipt: Message | None) -> bool:
    """Whether this stands in the place of a receipt because its batch is stored in part."""
    return receipt is not None and receipt.held is not None and receipt.held.stored is None


def held_in(message: Message | None) -> Entry | None:
    """What a key holds, expired or not."""
    return None if message is None else message.held


def seq_of(message: Message | None) -> int:
    """The number of a key's last message, as the server wants to have it: 0 where there is none."""
    return 0 if message is None else message.seq


def seqs_of(found: dict[Place, Message | None]) -> list[tuple[Place, int]]:
    """The numbers of the last messages of several keys."""
    return [(place, seq_of(message)) for place, message in found.items()]


async def number_of(asked: asyncio.Future[tuple[bytes, bytes]]) -> int:
    """The number that a message got, which must not be sent twice."""
    try:
        return number_in(*await asked)
    except (LinkLost, Silent) as error:
        raise Lost from error


def number_in(headers: bytes, body: bytes) -> int:
    """The number that a message got, by the server's answer."""
    if headers:
        raise Unheard("503")
    answer = _ack(body)
    if answer.error is None:
        return answer.seq
    code = answer.error.err_code
    if code in _TOO_LATE:
        raise TooLate
    if code in _ABANDONED:
        raise Abandoned(code, answer.error.description)
    raise Refused(code, answer.error.description)


def _ms(text: str) -> float:
    """Milliseconds since 1970 of a time as the server writes it."""
    whole, _, fraction = text.removesuffix("Z").partition(".")
    seconds = datetime.datetime.fromisoformat(whole).replace(tzinfo=datetime.UTC).timestamp()
    return seconds * 1000 + float(f"0.{fraction or 0}") * 1000
