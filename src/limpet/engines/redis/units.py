"""Units of a plan as the script takes them, and what it replies about each.

A Lua number is exact up to 2^53. So a revision that counts from the latest one, and a time that counts from now, are
sent as their negative distance less one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from limpet.commit.group import EntryId
from limpet.commit.relative import BASE, KEPT, NOW, Moment, resolve_receipt
from limpet.commit.storage import Head, Stale, Unit
from limpet.engines.redis.replies import decode_entry, decode_size
from limpet.engines.redis.requests import encode_fields, encode_text
from limpet.model import Change, Entry

__all__ = ["decode_reply", "encode_units"]

_pack = msgspec.msgpack.Encoder().encode


def encode_units(units: Sequence[Unit]) -> bytes:
    """What each unit has read, its rows, what it keeps beside the log, and what it adds to the counters."""
    return _pack([_encode_unit(unit) for unit in units])


def _encode_unit(unit: Unit) -> list[Any]:
    read = [
        (family, key, expected.revision, expected.has_expired, expected.needs_value)
        for (family, key), expected in unit.expected.items()
    ]
    kept = [_encode_kept(*entry_id, entry) for entry_id, entry in unit.kept.items()]
    counters = unit.counters
    added = [counters.revision - BASE, counters.keys, counters.size_bytes, counters.log_bytes]
    return [read, [_encode_row(*change) for change in unit.changes], kept, added]


def _encode_row(change: Change, weight_bytes: int) -> tuple[Any, ...]:
    entry, op, family = change.entry, change.op, change.family
    key, stored = entry.key, entry.stored
    # Both count from the latest revision.
    revision, last, cause = BASE - change.revision - 1, BASE - change.commit - 1, change.origin or ""
    if op in ("delete", "expire"):
        is_taken = op == "delete" and stored is not None
        return "take" if is_taken else op, family, key, revision, last, cause
    created, expires = _encode_revision(entry.created_revision), _encode_time(entry.expires_ms)
    times = _encode_time(entry.created_ms), _encode_time(entry.updated_ms), expires
    if op == "touch":
        return op, family, key, revision, last, cause, entry.version, created, *times
    assert stored is not None
    kind: str
    value: Any
    if not isinstance(stored, bytes):
        kind, value = "r", encode_fields(stored)
    elif stored[:1] == b"\0":
        kind, value = "b", encode_text(stored[1:])
    else:
        kind, value = "j", stored.decode()
    meta = "" if entry.meta_json is None else entry.meta_json.decode()
    size_bytes = weight_bytes - (len(key) if key.isascii() else len(key.encode()))
    return op, family, key, revision, last, cause, entry.version, created, *times, size_bytes, meta, kind, value


def _encode_kept(family: str, key: str, entry: Entry) -> list[Any]:
    assert isinstance(entry.stored, bytes)
    return [
        family,
        key,
        _encode_revision(entry.revision),
        _encode_time(entry.expires_ms),
        encode_text(entry.stored[1:]),
    ]


def _encode_revision(revision: int) -> int:
    return revision if revision < BASE else BASE - revision - 1


def _encode_time(time_ms: int | None) -> int:
    """A time, or 0 for never."""
    if time_ms is None:
        return 0
    if time_ms < NOW:
        return time_ms
    return NOW - time_ms - 1 if time_ms < KEPT else time_ms - KEPT


def decode_reply(unit: Unit, reply: list[Any], now_ms: int) -> Moment | Stale:
    """What became of a unit that was applied, or that was stale."""
    if reply[0] == b"done":
        return Moment(reply[1], now_ms)
    found = zip(unit.expected, reply[1:], strict=True)
    return Stale({entry_id: _decode_head(entry_id, text) for entry_id, text in found}, now_ms)


def _decode_head(entry_id: EntryId, text: bytes | None) -> Head:
    family, key = entry_id
    if text is None:
        return Head()
    if family == "superseded":
        at_ms, _, revision = text.partition(b" ")
        return Head(Entry(key, b"null", 1, int(revision), 0, int(at_ms), int(at_ms)), 0)
    entry, size_bytes = decode_entry(key, text[1:], with_value=text[:1] == b"+"), decode_size(text[1:])
    if family == "receipt" and entry.stored is not None:
        entry = resolve_receipt(entry)
    return Head(entry, size_bytes + len(key.encode()))
