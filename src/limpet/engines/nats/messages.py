"""The layout of a namespace in a NATS stream: its subjects, and the messages of a key.

Each change of a key is a message: its body is the value, and one header holds the rest of the entry. The last
message of a key is what it holds, and a message that it has ended stays until it is trimmed. So the stream is the
map and the log at once, and any tool for NATS key-value buckets can read it.

A message names the one that its key had before. So a reader notices when a change was dropped that it has not read.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from limpet.codec import Stored
from limpet.errors import Corrupt
from limpet.model import FAMILIES, Change, Entry, Family, Op

__all__ = [
    "BASE",
    "EntryId",
    "LastMessages",
    "Message",
    "Subjects",
    "decode_name",
    "encode_headers",
    "encode_name",
    "encode_value",
    "parse",
    "parse_floor",
    "parse_head",
    "parse_time",
]

# The revision that a plan starts from. Revisions above it are placeholders until the server has replied.
BASE: Final = 1 << 60

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


_LETTERS: Final[dict[Family, str]] = {
    "lock": "l",
    "receipt": "r",
    "audit": "t",
    "recoverable": "g",
    "sequence": "s",
}
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
    """A message of a key: one change of it, and the whole entry after the change.

    Attributes:
        seq: Its number in the stream, which is the revision of the change.
        entry: The entry after the change; after a delete or expire, the one that ended.
        commit: The number of the last message of its batch.
        origin: That of the change: the request that made it, and its writer.
        size_bytes: The size of its value.
        prev: The number of the message that the key had before, 0 for none; None where another program wrote it
            without a condition.
    """

    seq: int
    op: Op
    entry: Entry
    commit: int
    at_ms: int
    origin: str | None
    size_bytes: int = 0
    prev: int | None = None

    @property
    def held(self) -> Entry | None:
        """The entry that the key holds, expired or not."""
        return None if self.op in ("delete", "expire") else self.entry

    @property
    def weight_bytes(self) -> int:
        """The size of the change in totals: its key and its value."""
        key = self.entry.key
        return self.size_bytes + (len(key) if key.isascii() else len(key.encode()))

    def change(self, family: Family) -> Change:
        """This message as a change of the log, which has no value for a touch."""
        entry = self.entry.without_value() if self.op == "touch" else self.entry
        return Change(self.op, entry, self.seq, self.commit, self.at_ms, self.origin, family)


LastMessages = dict[EntryId, Message | None]
"""The last message of each of some keys, None for a key without one."""

_OPS: Final[dict[str, Op]] = {"put": "put", "patch": "patch", "touch": "touch", "delete": "delete", "expire": "expire"}
# No encoded name is or begins with this.
_NO_ORIGIN: Final = "="
_HEADER: Final = b"\r\nLimpet: "
_META: Final = b"\r\nLimpet-Meta: "
_FLOOR: Final = b"\r\nLimpet-Floor: "
_GUARD: Final = b"\r\nNats-Expected-Last-Subject-Sequence: "
_WORDS: Final = 12
_split_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(dict[str, bytes]).decode
_json = msgspec.json.Encoder().encode


def encode_headers(message: Message, kind: str, expected: int | None, after: int = 0, more: bytes = b"") -> bytes:
    """The headers of the next message of a key.

    ``expected`` is the number of the key's last message, None to write unconditionally; ``after`` is how many changes
    of its batch follow. The number of the message itself, which only the server knows, is written as 0, and that of a
    message before it in the same batch relative to it, as a negative number.
    """
    entry, seq = message.entry, message.seq
    created = 0 if entry.created_revision == seq else entry.created_revision
    prev = message.prev or 0
    if prev >= BASE:
        prev -= seq
    origin = _NO_ORIGIN if message.origin is None else encode_name(message.origin)
    guard = b"" if expected is None else b"Nats-Expected-Last-Subject-Sequence: %d\r\n" % expected
    # Not an f-string, which takes a third longer for so many numbers.
    text = b"NATS/1.0\r\n%bLimpet: %b %b %d %d %d %d %d %d %d %d %d %b\r\n" % (
        guard,
        message.op.encode(),
        kind.encode(),
        entry.version,
        created,
        entry.created_ms,
        entry.updated_ms,
        entry.expires_ms or 0,
        prev,
        after,
        message.at_ms,
        message.size_bytes,
        origin.encode(),
    )
    if entry.meta_json is not None:
        text += b"Limpet-Meta: %b\r\n" % entry.meta_json
    if message.op in ("delete", "expire"):
        text += b"KV-Operation: DEL\r\n"
    return text + more + b"\r\n"


def parse(key: str, seq: int, headers: bytes, body: bytes | None) -> Message:
    """Parse a message of the server; without a body, its entry has no value."""
    words = _words(headers)
    if not words:
        return _parse_foreign(key, seq, headers, body)
    try:
        op, kind, version, created, created_ms, updated_ms, expires_ms, _, after, at_ms, size, origin = words[:_WORDS]
        prev = _parse_prev(seq, words, headers)
        meta = None
        if (at := headers.find(_META)) >= 0:
            meta = headers[at + len(_META) : headers.index(b"\r\n", at + 2)]
        entry = Entry(
            key,
            None if body is None or kind == "-" else _stored(kind, body),
            int(version),
            # The end of a key carries the entry that ended, with its own revision.
            (prev or 0) if op in ("delete", "expire") else seq,
            int(created) or seq,
            int(created_ms),
            int(updated_ms),
            int(expires_ms) or None,
            meta,
        )
        # Streams of an earlier layout mark the origin of a message with a receipt.
        origin = origin.removeprefix("+")
        name = None if origin == _NO_ORIGIN else decode_name(origin)
        return Message(seq, _OPS[op], entry, seq + int(after), int(at_ms), name, int(size), prev)
    except (ValueError, KeyError, msgspec.DecodeError) as error:
        raise Corrupt(f"the message of {key!r} has a header that Limpet did not write") from error


def parse_head(key: str, seq: int, headers: bytes) -> Message:
    """Parse a message without its body. One that cannot be parsed is reported when its key is read."""
    try:
        return parse(key, seq, headers, None)
    except Corrupt:
        return parse(key, seq, b"", None)


def parse_floor(headers: bytes) -> tuple[int, str]:
    """Up to which change the log was trimmed, and the fingerprint of that change."""
    at = headers.index(_FLOOR) + len(_FLOOR)
    floor_print = headers[at : headers.index(b"\r\n", at)].decode()
    return int(floor_print.partition("-")[0]), floor_print


def parse_time(headers: bytes) -> int:
    """The time of the commit of a message; 0 where Limpet did not write it."""
    words = _words(headers)
    return int(words[9]) if len(words) > 9 and words[9].isdigit() else 0


def _words(headers: bytes) -> list[str]:
    """The words of the Limpet header; none where another program wrote the message."""
    at = headers.find(_HEADER)
    return [] if at < 0 else headers[at + len(_HEADER) : headers.index(b"\r\n", at + 2)].decode().split(" ")


def _parse_prev(seq: int, words: list[str], headers: bytes) -> int | None:
    """The number of the message before: in our header, or else in the condition under which it was written."""
    if len(words) == _WORDS:
        prev = int(words[7])
        return seq + prev if prev < 0 else prev
    if (at := headers.find(_GUARD)) < 0 or b"\r\nNats-Expected-Last-Subject-Sequence-Subject: " in headers:
        return None
    return int(headers[at + len(_GUARD) : headers.index(b"\r\n", at + 2)])


def _parse_foreign(key: str, seq: int, headers: bytes, body: bytes | None) -> Message:
    """A message of another program: raw bytes of version 1, or the end of a key."""
    is_end = b"\r\nKV-Operation: " in headers
    stored = None if is_end or body is None else b"\0" + body
    entry = Entry(key, stored, 1, seq, seq, 0, 0)
    return Message(seq, "delete" if is_end else "put", entry, seq, 0, None, prev=_parse_prev(seq, [], headers))


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
