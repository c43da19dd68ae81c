"""The layout of a namespace in a NATS stream: its subjects, and the message of a key.

A key is one message: its body is the value, and one header holds the rest of the entry. After a key has
ended, a message without a body records that until it is trimmed. So the stream is the map and the log at
once, and any tool for NATS key-value buckets can read it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import msgspec

from limpet import codec
from limpet.codec import Stored
from limpet.errors import Corrupt
from limpet.model import FAMILIES, Change, Entry, Family, Op

__all__ = [
    "EntryId",
    "Message",
    "Subjects",
    "carry_requests",
    "decode_name",
    "decode_touched",
    "encode_headers",
    "encode_name",
    "encode_touched",
    "encode_value",
    "find_request",
    "is_past_full",
    "parse",
    "parse_time",
]

EntryId = tuple[Family, str]
"""An entry's family and key."""

# Names ------------------------------------------------------------------------
#
# A subject is words between dots, none of them empty. Letters, digits, '_', '-' and '/' stand for
# themselves, and so does a dot between two words. Every other byte is '=' and two hexadecimal digits.

_PLAIN: Final = re.compile(r"[A-Za-z0-9_/-]+(?:\.[A-Za-z0-9_/-]+)*\Z")
_UNSAFE: Final = re.compile(rb"[^A-Za-z0-9_/.-]|(?:\A|(?<=\.))\.|\.\Z")
_ESCAPED: Final = re.compile(rb"=([0-9A-F]{2})")


def encode_name(name: str) -> str:
    """A key, a lock's name or a request id as words of a subject."""
    if _PLAIN.match(name):
        return name
    return _UNSAFE.sub(lambda unsafe: b"=%02X" % unsafe[0][0], name.encode()).decode()


def decode_name(words: str) -> str:
    """The name that `encode_name` made these words of."""
    if "=" not in words:
        return words
    return _ESCAPED.sub(lambda escaped: bytes([int(escaped[1], 16)]), words.encode()).decode()


_LETTERS: Final[dict[Family, str]] = {"lock": "l", "receipt": "r", "audit": "t", "recoverable": "g"}
_FAMILIES: Final[dict[str, Family]] = {letter: family for family, letter in _LETTERS.items()}
_NAMED: Final[dict[str, Family]] = {family: family for family in FAMILIES}


class Subjects:
    """The subjects of a namespace: ``$KV.<bucket>.`` for data, ``$LMP.<bucket>.`` for all else."""

    def __init__(self, bucket: str) -> None:
        self.data = f"$KV.{bucket}."
        self.own = f"$LMP.{bucket}."
        self.floor = f"{self.own}floor"
        self.alarms = f"{self.own}a.>"
        letters = [letter for family, letter in _LETTERS.items() if family != "receipt"]
        self.logged = (f"{self.data}>", *(f"{self.own}{letter}.>" for letter in letters))
        self.all = [f"{self.data}>", f"{self.own}>"]

    def of(self, entry_id: EntryId) -> str:
        """The subject of an entry."""
        family, key = entry_id
        return self.data + encode_name(key) if family == "data" else f"{self.own}{_LETTERS[family]}.{encode_name(key)}"

    def entry_id(self, subject: str) -> EntryId | None:
        """The entry of a subject; None if it is not the subject of an entry."""
        if subject.startswith(self.data):
            return "data", decode_name(subject[len(self.data) :])
        family = _FAMILIES.get(subject[len(self.own) : subject.find(".", len(self.own))])
        return None if family is None else (family, decode_name(subject[len(self.own) + 2 :]))

    def alarm(self, entry_id: EntryId, expires_ms: int) -> str:
        """The subject of an alarm: the time at which an entry expires."""
        return f"{self.alarms_of(expires_ms // 1000)}{expires_ms}.{entry_id[0]}.{encode_name(entry_id[1])}"

    def alarms_of(self, second: int) -> str:
        """The prefix of the subjects of all alarms of a second."""
        return f"{self.own}a.{second}."

    def parse_alarm(self, subject: str) -> tuple[int, EntryId]:
        """When an alarm is due, and for which entry."""
        _, expires_ms, family, name = subject[len(self.own) + 2 :].split(".", 3)
        return int(expires_ms), (_NAMED[family], decode_name(name))

    def superseded(self, request_id: str) -> str:
        """The subject of the mark that a request was retried, which makes its first attempt superseded."""
        return f"{self.own}o.{encode_name(request_id)}"

    def carrier(self, number: int) -> str:
        """The subject of a message that only carries a guard."""
        return f"{self.own}c.{number}"


# Messages ---------------------------------------------------------------------


class Message(msgspec.Struct, frozen=True, gc=False):
    """The last message of a key.

    Attributes:
        seq: Its number in the stream, which is the revision of the change.
        entry: The entry after the change; after a delete or expire, the one that ended.
        value_seq: The number of the message that wrote the value; a touch does not change it.
        commit: The number of the last message of its batch.
        cause: The request that made it; None for an expiry.
        size_bytes: The size of its value.
        lost: Requests up to this number may be missing in ``past``.
        past: Earlier requests that changed this key and may still be retried.
        touched: Of a touch, what is not in its own message of the write before it: see `decode_touched`.
        has_receipt: Whether the request that made it left a receipt.
    """

    seq: int
    op: Op
    entry: Entry
    value_seq: int
    commit: int
    at_ms: int
    cause: str | None
    size_bytes: int = 0
    lost: int = 0
    past: str = ""
    touched: str = ""
    has_receipt: bool = False

    @property
    def held(self) -> Entry | None:
        """The entry that the key holds, expired or not."""
        return None if self.op in ("delete", "expire") else self.entry

    def change(self, family: Family) -> Change:
        """This message as a change of the log."""
        return Change(self.op, self.entry, self.seq, self.commit, self.at_ms, self.cause, family)


_OPS: Final[dict[str, Op]] = {"put": "put", "patch": "patch", "touch": "touch", "delete": "delete", "expire": "expire"}
# No encoded name is or begins with one of these.
_NO_CAUSE: Final = "="
_WITH_RECEIPT: Final = "+"
_HEADER: Final = b"\r\nLimpet: "
_META: Final = b"\r\nLimpet-Meta: "
_split_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(dict[str, bytes]).decode
_json = msgspec.json.Encoder().encode


def encode_headers(message: Message, kind: str, expected: int | None, after: int = 0, more: bytes = b"") -> bytes:
    """The headers of the next message of a key.

    ``expected`` is the number of the key's last message, None to write unconditionally; ``after`` is how many changes
    of its batch follow. The number of the message itself, which only the server knows, is written as 0.
    """
    entry, seq = message.entry, message.seq
    created = 0 if entry.created_revision == seq else entry.created_revision
    value_seq = "0" if message.value_seq == seq else f"{message.value_seq},{message.touched}"
    cause = _NO_CAUSE if message.cause is None else encode_name(message.cause)
    if message.has_receipt:
        cause = _WITH_RECEIPT + cause
    guard = "" if expected is None else f"Nats-Expected-Last-Subject-Sequence: {expected}\r\n"
    text = (
        f"NATS/1.0\r\n{guard}"
        f"Limpet: {message.op} {kind} {entry.version} {created} {entry.created_ms} {entry.updated_ms} "
        f"{entry.expires_ms or 0} {value_seq} {after} {message.at_ms} {message.size_bytes} {cause} {message.lost} "
        f"{message.past}\r\n"
    ).encode()
    if entry.meta_json is not None:
        text += b"Limpet-Meta: %b\r\n" % entry.meta_json
    if message.op in ("delete", "expire"):
        text += b"KV-Operation: DEL\r\n"
    return text + more + b"\r\n"


def parse(key: str, seq: int, headers: bytes, body: bytes | None) -> Message:
    """Parse a message of the server; without a body, its entry has no value."""
    at = headers.find(_HEADER)
    if at < 0:
        return _parse_foreign(key, seq, headers, body)
    line = headers[at + len(_HEADER) : headers.index(b"\r\n", at + 2)].decode()
    try:
        (op, kind, version, created, created_ms, updated_ms, expires_ms, value_seq, after, at_ms, size, *rest) = (
            line.split(" ")
        )
        cause, lost, past = rest
        has_receipt = cause.startswith(_WITH_RECEIPT)
        cause = cause.removeprefix(_WITH_RECEIPT)
        value_seq, _, touched = value_seq.partition(",")
        meta = None
        if (at := headers.find(_META)) >= 0:
            meta = headers[at + len(_META) : headers.index(b"\r\n", at + 2)]
        entry = Entry(
            key,
            None if body is None or kind == "-" else _stored(kind, body),
            int(version),
            seq,
            int(created) or seq,
            int(created_ms),
            int(updated_ms),
            int(expires_ms) or None,
            meta,
        )
        if op in ("delete", "expire"):
            # It carries the entry that ended, with its own revision.
            entry = msgspec.structs.replace(entry, revision=int(value_seq))
        return Message(
            seq,
            _OPS[op],
            entry,
            int(value_seq) or seq,
            seq + int(after),
            int(at_ms),
            None if cause == _NO_CAUSE else decode_name(cause),
            int(size),
            int(lost),
            past,
            touched,
            has_receipt,
        )
    except (ValueError, KeyError, msgspec.DecodeError) as error:
        raise Corrupt(f"the message of {key!r} has a header that Limpet did not write") from error


def parse_time(headers: bytes) -> int:
    """The time of the commit of a message; 0 where Limpet did not write it."""
    at = headers.find(_HEADER)
    words = [] if at < 0 else headers[at + len(_HEADER) : headers.index(b"\r\n", at + 2)].split(b" ")
    return int(words[9]) if len(words) > 9 and words[9].isdigit() else 0


def _parse_foreign(key: str, seq: int, headers: bytes, body: bytes | None) -> Message:
    """A message of another program: raw bytes of version 1, or the end of a key."""
    is_end = b"\r\nKV-Operation: " in headers
    stored = None if is_end or body is None else b"\0" + body
    return Message(seq, "delete" if is_end else "put", Entry(key, stored, 1, seq, seq, 0, 0), seq, seq, 0, None)


# A touch replaces the message of its key, though it does not change the value. A reader of the log gets both
# changes, so a touch carries what its message lacks of the write before it.


def encode_touched(before: Message) -> str:
    """What a touch of this message must carry of it."""
    if before.op == "touch":
        return before.touched
    cause = _NO_CAUSE if before.cause is None else encode_name(before.cause)
    return f"{before.op},{before.commit},{before.entry.expires_ms or 0},{cause}"


def decode_touched(touch: Message) -> Message:
    """The write before a touch, as the message that it was."""
    op, commit, expires_ms, cause = touch.touched.split(",")
    seq, at_ms = touch.value_seq, touch.entry.updated_ms
    entry = msgspec.structs.replace(touch.entry, revision=seq, expires_ms=int(expires_ms) or None)
    name = None if cause == _NO_CAUSE else decode_name(cause)
    return Message(seq, _OPS[op], entry, seq, int(commit), at_ms, name, touch.size_bytes)


def encode_value(stored: Stored) -> tuple[str, bytes]:
    """The kind and the body of a value."""
    if isinstance(stored, bytes):
        return ("b", stored[1:]) if stored[:1] == b"\0" else ("j", stored)
    if any(field[:1] == b"\0" for field in stored.values()):
        return "m", _pack(dict(stored))
    return "o", b"{%b}" % b",".join(_json(name) + b":" + field for name, field in stored.items())


def _stored(kind: str, body: bytes) -> Stored:
    match kind:
        case "j":
            return body
        case "b":
            return b"\0" + body
        case "m":
            return _unpack(body)
        case _:
            return {name: bytes(field) for name, field in _split_fields(body).items()}


# Requests that a key remembers --------------------------------------------------
#
# A writer may lose the reply, and another writer may change the key before the first can check whether it was
# applied. So a message carries the requests before it, with what the reply to a retry needs.
#
# A request is carried until it is old, or until the process that made it knows that it was answered. A request
# that left a receipt is not carried, because requests with ids would soon take all the room. Where there is no
# room, the next request leaves a receipt too.

PAST_MAX: Final = 32
PAST_MS: Final = 120_000


def carry_requests(message: Message, now_ms: int, is_settled: Callable[[str], bool]) -> tuple[int, str]:
    """What the next message of a key must carry: up to which number requests may be missing, and the requests."""
    cause = None if message.has_receipt else message.cause
    if not message.past and (cause is None or is_settled(cause)):
        return message.lost, ""
    lost = message.lost
    items = message.past.split(";") if message.past else []
    if cause is not None:
        items.append(_item(message))
    kept: list[str] = []
    for item in items:
        name, _, seq, at_ms, *_ = item.split(",")
        if is_settled(decode_name(name)):
            continue
        if now_ms - int(at_ms) > PAST_MS:
            lost = max(lost, int(seq))
        else:
            kept.append(item)
    return lost, ";".join(kept)


def is_past_full(past: str) -> bool:
    """Whether a key has no room for one more request."""
    return past.count(";") + 1 >= PAST_MAX


def _item(message: Message) -> str:
    """A request as the next messages of its key carry it: the entry that it left, with the value only of a counter."""
    entry = message.entry
    counter = "" if entry.stored is None or codec.counter(entry.stored) is None else str(entry.value)
    numbers = (
        message.seq,
        message.at_ms,
        message.commit,
        entry.version,
        entry.revision,
        entry.created_revision,
        entry.created_ms,
        entry.updated_ms,
        entry.expires_ms or 0,
    )
    return ",".join([encode_name(message.cause or ""), message.op, *map(str, numbers), counter])


def find_request(message: Message, cause: str) -> Message | None:
    """The message that a request left, if this is it or carries it; a carried one has its value only for a counter."""
    if message.cause == cause:
        return message
    name = encode_name(cause)
    for item in message.past.split(";"):
        if item.startswith(f"{name},"):
            _, op, seq, at_ms, commit, *numbers, counter = item.split(",")
            version, revision, created, created_ms, updated_ms, expires_ms = map(int, numbers)
            stored = counter.encode() or None
            key = message.entry.key
            entry = Entry(key, stored, version, revision, created, created_ms, updated_ms, expires_ms or None)
            return Message(int(seq), _OPS[op], entry, int(seq), int(commit), int(at_ms), cause)
    return None
