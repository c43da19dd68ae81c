"""A namespace on NATS: one stream, whose last message of each subject is what a key holds, and the others its log.

This module reads it: one key, several keys at one moment, and the time, which is the server's. The last
message of a key is cached, so that the next write of the key need not read it. Commits are in `writer`.
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

from limpet.clock import Clock
from limpet.engines.nats.connection import ApiError, Connection, ConnectionLost, NoReply, NoResponders
from limpet.engines.nats.messages import BASE, EntryId, LastMessages, Message, Subjects, parse, parse_time
from limpet.errors import Ambiguous, InvalidValue, Unavailable
from limpet.model import Entry, Family, live
from limpet.transition import Receipt, encode_receipt, read_receipt

__all__ = [
    "BatchAbandoned",
    "HalfStored",
    "KeyChanged",
    "NamespaceStream",
    "ReplyLost",
    "Server",
    "await_ack",
    "entry_at",
    "entry_in",
    "is_mark",
    "parse_ack",
    "seq_of",
    "seqs_of",
]

READ_S: Final = 30.0
CLOCK_S: Final = 30.0
KNOWN_MAX: Final = 16_384
KNOWN_BYTES_MAX: Final = 2_048
# How many messages of a key the server keeps. What the log need not keep is purged before (see `mirror`).
KEPT_PER_KEY: Final = 100_000

# A change may be followed by an alarm, a receipt and a floor.
NEAR_THE_END: Final = 4

_KEY_CHANGED: Final = frozenset({10071, 10164})
# The server did not get all messages of a batch, or had too many batches under way.
_ABANDONED: Final = frozenset({10176, 10210, 10211})
_NO_STREAM: Final = 10059
_NO_MESSAGE: Final = 10037
_STREAM_EXISTS: Final = 10058


class _ErrorReply(msgspec.Struct):
    err_code: int = 0
    description: str = ""


class _Ack(msgspec.Struct):
    seq: int = 0
    count: int = 0
    error: _ErrorReply | None = None


class _StoredMessage(msgspec.Struct):
    subject: str
    seq: int
    hdrs: str = ""
    data: str = ""


class _GetReply(msgspec.Struct):
    message: _StoredMessage | None = None
    error: _ErrorReply | None = None


_decode_ack = msgspec.json.Decoder(_Ack).decode
_decode_get = msgspec.json.Decoder(_GetReply).decode
_decode_any = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


class Server(Protocol):
    """What a namespace needs from its engine."""

    replicas: int
    syncs: bool
    storage: str
    test_clock: Clock | None

    @property
    def live_connection(self) -> Connection | None:
        """The connection, if there is one just now."""
        ...

    async def connection(self) -> Connection:
        """The connection; a new one if it broke."""
        ...

    def notify(self, namespace: str) -> None:
        """Wake the waiters for changes of a namespace in this process."""
        ...


class KeyChanged(Exception):
    """A key has changed since the commit was planned."""


class BatchAbandoned(ApiError):
    """The server gave up an atomic batch before it stored any of it."""


class ReplyLost(Exception):
    """A message was sent, and no reply came: it may have been stored."""


class HalfStored(Exception):
    """A part of a batch is stored, and the rest cannot be stored."""

    def __init__(self, request_id: str, reason: str) -> None:
        super().__init__(
            f"NATS has stored a part of the batch of request {request_id!r} and cannot store the rest: {reason}"
        )


async def _request_api(server: Server, subject: str, request: object) -> dict[str, Any]:
    connection = await server.connection()
    headers, body = await connection.request(f"$JS.API.{subject}", b"" if request is None else _encode(request))
    if headers.startswith(b"NATS/1.0 503"):
        raise NoResponders("JetStream is not enabled, or has no leader now")
    reply: dict[str, Any] = _decode_any(body)
    if (error := reply.get("error")) is not None:
        raise ApiError(error.get("err_code", 0), error.get("description", ""))
    return reply


async def list_buckets(server: Server) -> list[str]:
    """The buckets on the server that Limpet has made and written to."""
    # A stream that is created between two pages moves one of the first page to the second, which names it again.
    found: dict[str, None] = {}
    offset = total = 0
    while not offset or offset < total:
        reply = await _request_api(server, "STREAM.LIST", {"offset": offset})
        streams, total = reply.get("streams") or [], reply.get("total", 0)
        for info in streams:
            bucket = info["config"]["name"].removeprefix("KV_")
            if _is_ours(info["config"], Subjects(bucket)) and info["state"]["last_seq"]:
                found[bucket] = None
        if not streams:
            break
        offset += len(streams)
    return [*found]


def _is_ours(config: dict[str, Any], subjects: Subjects) -> bool:
    """Whether a stream was created by Limpet."""
    has_options = config.get("allow_atomic") and config.get("allow_msg_ttl")
    return bool(has_options) and {*config.get("subjects", ())} == {*subjects.all}


class NamespaceStream:
    """The stream of one namespace, as this process knows it."""

    def __init__(self, server: Server, namespace: str, bucket: str) -> None:
        self.namespace = namespace
        self.bucket = bucket
        self.name = f"KV_{bucket}"
        self.subjects = Subjects(bucket)
        self.store_id = ""
        self.direct = False
        # The highest number that was seen in a reply, below which nothing new is stored.
        self.seen = 0
        self._server = server
        self.exists = False
        self.known: LastMessages = {}
        self._clock: tuple[float, float] | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._latest_ms = 0

    # The stream ---------------------------------------------------------------

    async def ensure(self, *, create: bool = True) -> bool:
        """Whether the stream exists; create it if that is wanted."""
        if self.exists:
            return True
        try:
            await self._load_config()
        except ApiError as error:
            if error.code != _NO_STREAM:
                raise
            if not create:
                return False
            await self._create()
            await self._load_config()
        return self.exists

    async def _create(self) -> None:
        config = {
            "name": self.name,
            "subjects": self.subjects.all,
            "storage": self._server.storage,
            "num_replicas": self._server.replicas,
            "max_msgs_per_subject": KEPT_PER_KEY,
            "discard": "new",
            "deny_delete": True,
            "allow_rollup_hdrs": True,
            "allow_msg_ttl": True,
            "allow_atomic": True,
            # A replica may lag behind its leader, and then replies with an old message.
            "allow_direct": self._server.replicas == 1,
        }
        try:
            await self.api(f"STREAM.CREATE.{self.name}", config)
        except ApiError as error:
            if error.code != _STREAM_EXISTS:
                raise

    async def _load_config(self) -> None:
        """Check that the stream is one of ours, and learn its options and its time."""
        info = await self.info()
        config = info["config"]
        if not _is_ours(config, self.subjects):
            raise InvalidValue(
                f"the stream {self.name} was not created by Limpet and is left unchanged: choose another bucket_prefix "
                "or namespace. 'limpet adopt' copies what is in it"
            )
        if config.get("max_msgs_per_subject") == 1:
            # It was created when the log kept the last change of each key.
            await self.api(f"STREAM.UPDATE.{self.name}", config | {"max_msgs_per_subject": KEPT_PER_KEY})
        self.direct = bool(config.get("allow_direct"))
        self.store_id = self._make_id(info)
        await self._latest(info)
        self.exists = True

    async def info(self) -> dict[str, Any]:
        """Read the stream's configuration and state. The server's time is taken from the reply."""
        info = await self.api(f"STREAM.INFO.{self.name}")
        self._clock = (_parse_ms(info["ts"]), time.monotonic())
        if self.exists and self.store_id != self._make_id(info):
            # Another stream has its name now: the next call begins anew.
            self.reset()
        return info

    def _make_id(self, info: dict[str, Any]) -> str:
        return hashlib.sha256(f"{self.name} {info['created']}".encode()).hexdigest()[:16]

    def reset(self) -> None:
        """Forget what is cached: the connection broke, and the stream may be another one now."""
        self.exists = False
        self.known.clear()
        self.seen = 0

    def stop(self) -> None:
        """Cancel the work in the background."""
        if self._renewing is not None:
            self._renewing.cancel()

    def now_ms(self) -> int:
        """The time of the namespace: the server's, or the latest that was seen or recorded here if that is later."""
        now_ms = self._server_ms()
        if now_ms > self._latest_ms:  # noqa: PLR1730 - max() takes longer than reading the time
            self._latest_ms = now_ms
        return self._latest_ms

    def behind_ms(self) -> int:
        """By how much the server's clock is behind the time of the namespace."""
        return max(0, self.now_ms() - self._server_ms())

    def _server_ms(self) -> int:
        """The time of the server: the last that it reported, and what has passed since."""
        if self._server.test_clock is not None:
            return self._server.test_clock.now_ms()
        assert self._clock is not None
        reported_ms, at = self._clock
        passed_s = time.monotonic() - at
        if passed_s > CLOCK_S and (self._renewing is None or self._renewing.done()):
            self._renewing = asyncio.get_running_loop().create_task(self._renew())
        return int(reported_ms + passed_s * 1000)

    async def _renew(self) -> None:
        with contextlib.suppress(Exception):
            # The recorded time first: the server's clock may have been set back since.
            await self._latest(await self.api(f"STREAM.INFO.{self.name}"))
            await self.info()

    def observe_time(self, at_ms: int) -> None:
        """Keep the time of the namespace from going back behind that of a commit that was read."""
        self._latest_ms = max(self._latest_ms, at_ms)

    # Requests -----------------------------------------------------------------

    async def api(self, subject: str, request: object = None) -> dict[str, Any]:
        """Send a request to the JetStream API that may be sent again."""
        return await _request_api(self._server, subject, request)

    async def get(self, request: dict[str, Any]) -> tuple[str, int, bytes, bytes] | None:
        """Read one message of the stream: its subject, number, headers and body; None if there is no such message."""
        if not self.direct:
            return await self._get_from_leader(request)
        connection = self._server.live_connection or await self._server.connection()
        subject = request.get("last_by_subj")
        if subject is None or "*" in subject or ">" in subject:
            headers, body = await connection.request(f"$JS.API.DIRECT.GET.{self.name}", _encode(request))
        else:
            headers, body = await connection.request(f"$JS.API.DIRECT.GET.{self.name}.{subject}")
        if headers.startswith(b"NATS/1.0 "):
            if headers.startswith(b"NATS/1.0 404"):
                return None
            raise NoResponders(headers[9:12].decode())
        at = headers.rindex(b"\r\nNats-Sequence: ") + 17
        seq = int(headers[at : headers.index(b"\r\n", at)])
        if subject is None or ">" in subject:
            at = headers.rindex(b"\r\nNats-Subject: ") + 16
            subject = headers[at : headers.index(b"\r\n", at)].decode()
        return subject, seq, headers, body

    async def _get_from_leader(self, request: dict[str, Any]) -> tuple[str, int, bytes, bytes] | None:
        connection = self._server.live_connection or await self._server.connection()
        headers, body = await connection.request(f"$JS.API.STREAM.MSG.GET.{self.name}", _encode(request))
        if headers.startswith(b"NATS/1.0 503"):
            raise NoResponders("503")
        reply = _decode_get(body)
        if reply.error is not None:
            if reply.error.err_code == _NO_MESSAGE:
                return None
            raise ApiError(reply.error.err_code, reply.error.description)
        message = reply.message
        assert message is not None
        return message.subject, message.seq, b64decode(message.hdrs), b64decode(message.data)

    async def last(self, entry_id: EntryId) -> Message | None:
        """Read the last message of a key."""
        found = await self.get({"last_by_subj": self.subjects.of(entry_id)})
        message = None if found is None else self._message(entry_id, *found[1:])
        self.cache(entry_id, message)
        return message

    async def at(self, entry_id: EntryId, seq: int) -> Message | None:
        """Read the message of a key with this number; None if it was dropped."""
        found = await self.get({"seq": seq})
        return None if found is None else self._message(entry_id, *found[1:])

    async def keeps_all_since(self, entry_id: EntryId, seq: int) -> bool:
        """Whether all messages of a key after a number are still there. The server drops the oldest of a key first."""
        subject = self.subjects.of(entry_id)
        first = await self.get({"seq": 1, "next_by_subj": subject})
        if first is None:
            return await self.floor() <= seq
        if first[1] <= seq:
            return True
        if b"\r\nNats-Rollup: " in first[2]:
            return False
        prev = parse(entry_id[1], first[1], first[2], None).prev
        if prev is not None:
            return prev <= seq
        # Another program has created the key, or the server has dropped what was before.
        info = await self.api(f"STREAM.INFO.{self.name}", {"subjects_filter": subject})
        kept: int = info["config"]["max_msgs_per_subject"]
        count: int = (info["state"].get("subjects") or {}).get(subject, 0)
        return kept < 0 or count < kept

    async def count_messages(self) -> dict[str, int]:
        """Count the messages of each subject."""
        counts: dict[str, int] = {}
        while True:
            request = {"subjects_filter": ">", "offset": len(counts)}
            info = await self.api(f"STREAM.INFO.{self.name}", request)
            found = info["state"].get("subjects") or {}
            counts |= found
            if not found or len(counts) >= info.get("total", 0):
                return counts

    def _message(self, entry_id: EntryId, seq: int, headers: bytes, body: bytes) -> Message:
        message = parse(entry_id[1], seq, headers, body)
        self.observe_time(message.at_ms)
        return message if entry_id[0] != "receipt" else _resolve_receipt(message)

    def cache(self, entry_id: EntryId, message: Message | None) -> None:
        """Remember the last message of a key, so that the next write need not read it."""
        known = self.known
        if message is not None:
            if message.seq > self.seen:  # noqa: PLR1730 - max() takes longer
                self.seen = message.seq
            if message.size_bytes > KNOWN_BYTES_MAX:
                known.pop(entry_id, None)
                return
        if len(known) >= KNOWN_MAX and entry_id not in known:
            del known[next(iter(known))]
        known[entry_id] = message

    async def load_all(self, entry_ids: Iterable[EntryId]) -> LastMessages:
        """Read the last messages of several keys, each at its own moment."""
        wanted = list(entry_ids)
        if len(wanted) == 1:
            return {wanted[0]: await self.last(wanted[0])}
        return dict(zip(wanted, await asyncio.gather(*map(self.last, wanted)), strict=True))

    async def read(self, family: Family, keys: Sequence[str]) -> list[Entry | None]:
        """Read the live entries of these keys, all at one moment."""
        if len(keys) == 1:
            message = await self.last((family, keys[0]))
            if family == "receipt" and is_mark(message, self.now_ms()):
                raise Ambiguous(f"a part of the batch of request {keys[0]!r} is stored", request_id=keys[0])
            held = entry_in(message)
            return [held if held is None or held.expires_ms is None else live(held, self.now_ms())]
        entry_ids = [(family, key) for key in dict.fromkeys(keys)]
        found = await self._read_snapshot(entry_ids)
        now_ms = self.now_ms()
        if family == "receipt" and (half := [one[1] for one, message in found.items() if is_mark(message, now_ms)]):
            raise Ambiguous(f"a part of the batch of request {half[0]!r} is stored", request_id=half[0])
        entries = {entry_id[1]: live(entry_in(message), now_ms) for entry_id, message in found.items()}
        return [entries[key] for key in keys]

    async def _read_snapshot(self, entry_ids: list[EntryId]) -> LastMessages:
        """The last messages of these keys at one moment: read them until two reads in a row are equal."""
        until = time.monotonic() + READ_S
        before = await self.load_all(entry_ids)
        while time.monotonic() < until:
            found = await self.load_all(entry_ids)
            if seqs_of(found) == seqs_of(before):
                return found
            before = found
        raise Unavailable(
            f"{entry_ids[0][1]!r} and {len(entry_ids) - 1} other keys changed during every read for {READ_S:g} s; "
            "read fewer keys at once"
        )

    async def revision(self) -> int:
        """The revision of the latest change."""
        return max(await self.floor(), await self._latest(await self.info()))

    async def _latest(self, info: dict[str, Any]) -> int:
        """The number of the latest change, 0 where the log is empty. Its recorded time is observed."""
        latest = await self._last_logged(info["state"]["last_seq"])
        if latest is None:
            return 0
        self.observe_time(parse_time(latest[2]))
        return latest[1]

    async def _last_logged(self, last_seq: int) -> tuple[str, int, bytes, bytes] | None:
        """The last message that is a change, in a stream whose last message has this number."""
        # Nearly always it is one of the last. For the last of many subjects, the server goes through all of them.
        for seq in range(last_seq, max(0, last_seq - NEAR_THE_END), -1):
            found = await self.get({"seq": seq})
            entry_id = None if found is None else self.subjects.entry_id(found[0])
            if entry_id is not None and entry_id[0] != "receipt":
                return found
        last = await asyncio.gather(*(self.get({"last_by_subj": subject}) for subject in self.subjects.logged))
        return max((one for one in last if one is not None), key=lambda one: one[1], default=None)

    async def first_after(self, seq: int, subject: str) -> Message | None:
        """Read the oldest message of these subjects after a number."""
        found = await self.get({"seq": seq + 1, "next_by_subj": subject})
        entry_id = None if found is None else self.subjects.entry_id(found[0])
        return None if found is None or entry_id is None else self._message(entry_id, *found[1:])

    async def oldest_changes(self, floor: int, state: dict[str, Any]) -> list[Message]:
        """Read the oldest change after the floor; or the oldest of each kind, one of which is that.

        ``state`` is the state of the stream.
        """
        # Nearly always it is the next message. For the next one of any subject, from the first message of the stream
        # on, the server goes through all subjects.
        is_first = floor < state["first_seq"]
        found = await self.get({"seq": state["first_seq"]} if is_first else {"seq": floor + 1, "next_by_subj": ">"})
        entry_id = None if found is None else self.subjects.entry_id(found[0])
        if found is not None and entry_id is not None and entry_id[0] != "receipt":
            return [self._message(entry_id, *found[1:])]
        oldest = [await self.first_after(floor, subject) for subject in self.subjects.logged]
        return [message for message in oldest if message is not None]

    async def floor(self) -> int:
        """Up to where the log was trimmed."""
        found = await self.get({"last_by_subj": self.subjects.floor})
        return 0 if found is None else int(found[3])

    async def raise_floor(self, floor: int, floor_print: str) -> bool:
        """Trim the log up to the change of this fingerprint; False if another process did so first."""
        found = await self.get({"last_by_subj": self.subjects.floor})
        if found is not None and int(found[3]) >= floor:
            return False
        expected = 0 if found is None else found[1]
        guard = f"Nats-Expected-Last-Subject-Sequence: {expected}\r\nNats-Rollup: sub\r\n"
        headers = f"NATS/1.0\r\n{guard}Limpet-Floor: {floor_print}\r\n\r\n"
        connection = await self._server.connection()
        try:
            await await_ack(connection.request(self.subjects.floor, b"%d" % floor, headers.encode()))
        except KeyChanged:
            return False
        except ReplyLost as error:
            raise NoReply from error
        return True

    async def purge(self, subject: str, seq: int) -> None:
        """Drop the messages of these subjects up to a number."""
        await self.api(f"STREAM.PURGE.{self.name}", {"filter": subject, "seq": seq + 1})


# Parts ------------------------------------------------------------------------


def entry_at(entry: Entry, revision: int, created: int) -> Entry:
    """An entry with its real revision; one that was just created also gets its created revision."""
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


def _resolve_receipt(message: Message) -> Message:
    """A receipt with its real revisions: it was written before the server had numbered its batch."""
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


def is_mark(receipt: Message | None, now_ms: int) -> bool:
    """Whether this is the mark of a batch without a receipt after it: the batch is stored in part."""
    held = None if receipt is None else live(receipt.held, now_ms)
    return held is not None and held.stored is None


def entry_in(message: Message | None) -> Entry | None:
    """The entry that a key holds, expired or not."""
    return None if message is None else message.held


def seq_of(message: Message | None) -> int:
    """The number of a key's last message, as the server expects it in a condition: 0 for a key without one."""
    return 0 if message is None else message.seq


def seqs_of(found: LastMessages) -> list[tuple[EntryId, int]]:
    """The numbers of the last messages of several keys."""
    return [(entry_id, seq_of(message)) for entry_id, message in found.items()]


async def await_ack(reply: asyncio.Future[tuple[bytes, bytes]]) -> int:
    """Wait for the number of a published message, which must not be sent twice."""
    try:
        return parse_ack(*await reply)
    except (ConnectionLost, NoReply) as error:
        raise ReplyLost from error


def parse_ack(headers: bytes, body: bytes) -> int:
    """The number that a message got, from the server's reply."""
    if headers:
        raise NoResponders("503")
    ack = _decode_ack(body)
    if ack.error is None:
        return ack.seq
    code = ack.error.err_code
    if code in _KEY_CHANGED:
        raise KeyChanged
    if code in _ABANDONED:
        raise BatchAbandoned(code, ack.error.description)
    raise ApiError(code, ack.error.description)


def _parse_ms(text: str) -> float:
    """Milliseconds since 1970, from a time as the server writes it."""
    whole, _, fraction = text.removesuffix("Z").partition(".")
    seconds = datetime.datetime.fromisoformat(whole).replace(tzinfo=datetime.UTC).timestamp()
    return seconds * 1000 + float(f"0.{fraction or 0}") * 1000
