"""Units of a plan as arguments of ``limpet_apply``, and its rows as replies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from limpet.commit.group import EntryId
from limpet.commit.relative import BASE, Moment, resolve_receipt
from limpet.commit.storage import Head, Stale, Unit
from limpet.engines.postgres.rows import columns_from_rows, decode_json, digits, encode_value, entry_from_row
from limpet.model import Entry, StoredFamily

__all__ = ["decode_replies", "encode_units"]


def encode_units(units: Sequence[Unit]) -> list[list[Any]]:
    """Columns of the units, of what they have read, and of what they write."""
    counters = [
        (
            str(unit.counters.revision - BASE),
            str(unit.counters.keys),
            str(unit.counters.size_bytes),
            str(unit.counters.log_bytes),
        )
        for unit in units
    ]
    read: list[tuple[str | None, ...]] = []
    written: list[tuple[str | None, ...]] = []
    for number, unit in enumerate(units, 1):
        name = str(number)
        for (family, key), expected in unit.expected.items():
            flags = str(expected.has_expired), str(expected.needs_value)
            times = str(expected.updated_ms), digits(expected.expires_ms)
            read.append((name, family, key, str(expected.revision), *times, *flags))
        written += _encode_rows(name, unit)
    return [*columns_from_rows(counters, 4), *columns_from_rows(read, 8), *columns_from_rows(written, 19)]


def _encode_rows(name: str, unit: Unit) -> list[tuple[str | None, ...]]:
    rows: list[tuple[str | None, ...]] = []
    # Entries whose value is written by this unit.
    valued: set[EntryId] = set()
    for change, weight_bytes in unit.changes:
        entry, entry_id = change.entry, (change.family, change.entry.key)
        head = (str(change.revision), str(change.commit), change.origin, change.family)
        if change.op == "touch" and entry_id not in valued:
            rows.append((name, "touch", *head, *_encode_entry(entry.without_value(), weight_bytes)))
            continue
        op = "rewrite" if change.op == "touch" else change.op
        rows.append((name, op, *head, *_encode_entry(entry, weight_bytes)))
        (valued.discard if change.after is None else valued.add)(entry_id)
    for (family, _), entry in unit.kept.items():
        rows.append((name, "put", None, None, None, family, *_encode_entry(entry, entry.weight_bytes)))
    return rows


def _encode_entry(entry: Entry, weight_bytes: int) -> tuple[str | None, ...]:
    weight = str(weight_bytes)
    return (
        entry.key,
        *encode_value(entry.stored),
        weight,
        weight,
        str(entry.version),
        str(entry.revision),
        str(entry.created_revision),
        str(entry.created_ms),
        str(entry.updated_ms),
        digits(entry.expires_ms),
        decode_json(entry.meta_json),
    )


def decode_replies(units: Sequence[Unit], rows: Sequence[Any]) -> list[Moment | Stale]:
    """What became of each unit."""
    replies: dict[int, Moment | Stale] = {}
    for row in rows:
        number, before, now_ms, family, key = row[:5]
        if before is not None:
            replies[number] = Moment(before, now_ms)
            continue
        stale = replies.setdefault(number, Stale({}, now_ms))
        assert isinstance(stale, Stale)
        stale.found[family, key] = _decode_head(family, key, row[5:])
    return [replies[number] for number in range(1, len(units) + 1)]


def _decode_head(family: StoredFamily, key: str, row: Sequence[Any]) -> Head:
    kind, stored, version, revision, *rest, size_bytes = row
    if revision is None:
        return Head()
    if family == "superseded":
        return Head(Entry(key, b"null", 1, revision, 0, 0, 0), 0)
    entry = entry_from_row((key, None if stored is None else kind, stored, version, revision, *rest))
    return Head(resolve_receipt(entry) if family == "receipt" and stored is not None else entry, size_bytes)
