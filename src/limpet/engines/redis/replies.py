"""What the Redis engine reads: entries and changes as they are stored, and replies of the script.

An entry is its head, its meta and its value; `script.lua` describes the layout.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from limpet.codec import Stored
from limpet.errors import Corrupt
from limpet.model import (
    BEGINNING,
    KEEP,
    Add,
    Batch,
    Change,
    Commit,
    Entry,
    Put,
    Refusal,
    fingerprint,
    join_writer,
)

__all__ = [
    "decode_change",
    "decode_changes",
    "decode_entry",
    "decode_entry_or_error",
    "decode_fingerprint",
    "decode_size",
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


def decode_size(text: bytes) -> int:
    """The size of the value of an entry, which may be missing in the text."""
    size_bytes: int = _unpack_head(text)[6]
    return size_bytes


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


def decode_written(
    batches: list[Batch], at_ms: int, revision: int, packed: bytes, texts: list[bytes]
) -> list[Commit | Refusal | None]:
    """The results of items that were decided one after the other; None for each that was left."""
    results: list[Commit | Refusal | None] = []
    numbers, entries = _unpack_numbers(packed), iter(texts)
    replies = zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
    for batch in batches:
        writes = batch.writes
        meta_json = None if batch.writer is None else join_writer(None, batch.writer)
        if len(writes) != 1:
            results.append(_decode_puts(writes, [next(replies) for _ in writes], revision, at_ms, meta_json))
            revision = revision if results[-1] is None else revision + len(writes)
            continue
        write, (version, created, created_ms) = writes[0], next(replies)
        if not version:
            results.append(_decode_refusal(batch, next(entries), at_ms) if created else None)
            continue
        revision += 1
        if type(write) is Put and write.ttl_ms is KEEP:
            kept = decode_entry(write.key, next(entries), with_value=False)
            entry = msgspec.structs.replace(kept, stored=write.stored)
        elif type(write) is Put:
            entry = Entry(write.key, write.stored, version, revision, created, created_ms, at_ms, None, meta_json)
        else:
            with_value = type(write) is Add or not batch.is_brief
            entry = decode_entry(write.key, next(entries), with_value=with_value)
        results.append(Commit(revision, (entry,), (None,), at_ms))
    return results


def _decode_puts(
    writes: tuple[Any, ...],
    replies: list[tuple[int, int, int]],
    revision: int,
    at_ms: int,
    meta_json: bytes | None,
) -> Commit | None:
    """The result of a batch of puts, of which all were written or all were left."""
    if not replies[0][0]:
        return None
    entries: list[Entry] = []
    for put, (version, created, created_ms) in zip(writes, replies, strict=True):
        revision += 1
        entries.append(Entry(put.key, put.stored, version, revision, created, created_ms, at_ms, None, meta_json))
    return Commit(revision, (*entries,), (None,) * len(entries), at_ms)


def _decode_refusal(batch: Batch, text: bytes, at_ms: int) -> Refusal:
    """The refusal of an item whose expectation did not hold, from the entry that was found or an empty text."""
    (guard,), (write,) = batch.guards, batch.writes
    with_value = type(write) is Put or not batch.is_brief
    found = decode_entry(guard.key, text, with_value=with_value) if text else None
    return Refusal("guard", guard.key, found, at_ms, guard=guard)
