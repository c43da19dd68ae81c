"""What the Redis engine reads: entries and changes as they are stored, and replies of the script.

An entry is its head, its meta and its value; `script.lua` describes the layout.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from limpet import codec
from limpet.codec import Stored
from limpet.errors import Corrupt
from limpet.model import (
    BEGINNING,
    Add,
    Batch,
    Change,
    Commit,
    Entry,
    FieldEquals,
    Guard,
    Put,
    Refusal,
    Revision,
    fingerprint,
)
from limpet.transition import encode_receipt

__all__ = [
    "check_member",
    "decode_change",
    "decode_changes",
    "decode_commit",
    "decode_entry",
    "decode_entry_or_error",
    "decode_fingerprint",
    "decode_found",
    "decode_receipt",
    "decode_written",
    "needs_script",
]

_HEAD: Final = struct.Struct(">6QIHc")
_HEAD_BYTES: Final = _HEAD.size
_unpack_head = _HEAD.unpack_from
_unpack_numbers = msgspec.msgpack.Decoder(list[int]).decode

# Entries ------------------------------------------------------------------------


def decode_entry(key: str, text: bytes, *, with_value: bool = True) -> Entry:
    """An entry from its head, its meta and its value."""
    version, revision, created, created_ms, updated_ms, expires_ms, _, meta_bytes, kind = _unpack_head(text)
    value_at = _HEAD_BYTES + meta_bytes
    meta = text[_HEAD_BYTES:value_at] if meta_bytes else None
    stored = _decode_value(kind, text[value_at:]) if with_value else None
    return Entry(key, stored, version, revision, created, created_ms, updated_ms, expires_ms or None, meta)


def decode_entry_or_error(key: str, found: bytes | list[bytes]) -> Entry | Exception:
    """An entry; or an error, where another program has replaced the hash of a record."""
    if isinstance(found, bytes):
        return decode_entry(key, found)
    return Corrupt(f"another program has written over the record {key!r}: {found[0].decode()}")


def _decode_value(kind: bytes, value: bytes) -> Stored:
    if kind == b"j":
        return value
    if kind == b"b":
        return b"\0" + value
    fields: dict[str, bytes] = {}
    at, name = 0, None
    while at < len(value):
        colon = value.index(b":", at)
        end = colon + 1 + int(value[at:colon])
        piece, at = value[colon + 1 : end], end
        if name is None:
            name = piece.decode()
        else:
            fields[name], name = _decode_field(piece), None
    return fields


def _decode_field(field: bytes) -> bytes:
    """A field of a Redis hash as Limpet stores it: the inverse of `requests.encode_field`."""
    if field[:1] != b"\0":
        return b"\0" + field
    return field if field[1:2] == b"\0" else field[1:]


def needs_script(entry: Entry) -> bool:
    """Whether a plain command cannot read this entry: it takes the server's time, or the hash of a record."""
    return entry.expires_ms is not None or not isinstance(entry.stored, bytes)


def decode_found(batch: Batch, key: str, text: bytes | None) -> Entry | None:
    """The entry that a refusal carries. For a brief batch, a record comes without its fields."""
    entry = None if text is None else decode_entry(key, text)
    return entry.without_value() if entry is not None and batch.is_brief and entry.kind == "record" else entry


# Changes ------------------------------------------------------------------------


def decode_changes(item: list[bytes], last: int) -> Iterator[Change]:
    """The changes of one item of the log, whose last change has the revision ``last``."""
    at_ms = int(item[1])
    if item[2] != b"puts":
        return (decode_change(label, text, at_ms) for label, text in zip(item[2::2], item[3::2], strict=True))
    call, first = item[3].decode(), last - len(item) // 2 + 2
    puts = enumerate(zip(item[4::2], item[5::2], strict=True), 1)
    return (
        Change(
            "put", decode_entry(key.decode(), text), first + number, first + number, at_ms, f"{call}.{number}", "data"
        )
        for number, (key, text) in puts
    )


def decode_change(label: bytes, text: bytes, at_ms: int) -> Change:
    """A change from its label, its entry and its time."""
    op, revision, last, family, cause_bytes, names = label.split(b" ", 5)
    key_at = int(cause_bytes)
    change_op: Any = "delete" if op == b"take" else op.decode()
    entry = decode_entry(names[key_at:].decode(), text, with_value=op in (b"put", b"patch", b"take"))
    change_family: Any = family.decode()
    cause = names[:key_at].decode() or None
    return Change(change_op, entry, int(revision), int(last), at_ms, cause, change_family)


def decode_fingerprint(logged: list[bytes] | None) -> str:
    """The fingerprint of a change, from its label, the head of its entry and its time."""
    return BEGINNING if logged is None else fingerprint(decode_change(logged[0], logged[1], int(logged[2])))


# Commits ------------------------------------------------------------------------


def decode_commit(
    batch: Batch, revision: int, keys: list[str], results: list[bytes], at_ms: int, *, replayed: bool = False
) -> Commit:
    """The commit of a batch: for each write, the entry after it or the one that it ended."""
    entries: list[Entry | None] = []
    ended: list[Entry | None] = []
    for write, key, text in zip(batch.writes, keys, results, strict=True):
        after = before = None
        if text[:1] == b"=":
            assert isinstance(write, Put)
            after = msgspec.structs.replace(decode_entry(key, text[1:], with_value=False), stored=write.stored)
        elif text[:1] in (b"+", b"^"):
            after = decode_entry(key, text[1:], with_value=text[:1] == b"+")
        elif text:
            before = decode_entry(key, text[1:], with_value=text[:1] == b"~")
        entries.append(after)
        ended.append(before)
    return Commit(revision, tuple(entries), tuple(ended), at_ms, replayed)


def decode_written(
    batches: list[Batch], at_ms: int, revision: int, packed: bytes, texts: list[bytes]
) -> list[Commit | None]:
    """The commits of items that were applied one after the other; None for each that was left."""
    commits: list[Commit | None] = []
    numbers, entries = _unpack_numbers(packed), iter(texts)
    for batch, version, created, created_ms in zip(batches, numbers[::3], numbers[1::3], numbers[2::3], strict=True):
        if not version:
            commits.append(None)
            continue
        revision += 1
        write = batch.writes[0]
        if type(write) is Put:
            entry = Entry(write.key, write.stored, version, revision, created, created_ms, at_ms, None, None)
        else:
            with_value = type(write) is Add or not batch.is_brief
            entry = decode_entry(write.key, next(entries), with_value=with_value)
        commits.append(Commit(revision, (entry,), (None,), at_ms))
    return commits


def decode_receipt(key: str, kept: list[bytes]) -> Entry:
    """A receipt in the form in which other engines keep it."""
    digest, at_ms, revision, until_ms, *rest = kept
    entries: list[Entry | None] = []
    ended: list[Entry | None] = []
    for name, text in zip(rest[::2], rest[1::2], strict=True):
        whole = decode_entry(name.decode(), text[1:], with_value=text[:1] in (b"+", b"~")) if text else None
        entries.append(whole if text[:1] in (b"=", b"+") else None)
        ended.append(whole if text[:1] in (b"-", b"~") else None)
    commit = Commit(int(revision), tuple(entries), tuple(ended), int(at_ms))
    return encode_receipt(key, bytes.fromhex(digest.decode()), commit, int(until_ms) - int(at_ms))


def check_member(batch: Batch, number: int, text: bytes, at_ms: int) -> Batch | Refusal:
    """Check a guard on a member of a JSON object, which the script does not decode.

    If it holds, the batch is returned with a guard on the revision of the entry that was checked, to be sent again.
    """
    guard = batch.guards[number]
    entry = decode_entry(guard.key, text)
    assert isinstance(guard.condition, FieldEquals)
    assert entry.stored is not None
    found, expected = codec.member(entry.stored, guard.condition.name), guard.condition.stored
    if found != (expected if isinstance(expected, bytes) else None):
        return Refusal("guard", guard.key, entry, at_ms, guard=guard)
    guards = [*batch.guards]
    guards[number] = Guard(guard.key, Revision(entry.revision), guard.family)
    return msgspec.structs.replace(batch, guards=tuple(guards))
