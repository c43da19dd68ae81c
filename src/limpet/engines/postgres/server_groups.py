"""Puts that functions on the server decide: their arguments, and their rows as results.

``limpet_put``, or ``limpet_put_one`` for a single put, takes puts. A batch of one put may have a guard on the key that
it puts: that the key is absent, or has a certain revision. These functions apply a put or leave it out, and refuse
nothing: what they leave out is planned.

In these calls a batch is identified by the position of its last write in the group. Unless its caller gave it a
request id, the log names it by the name of the group and that position.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from limpet import codec
from limpet.engines.postgres.rows import (
    array_text,
    decode_json,
    digits,
    encode_value,
)
from limpet.engines.server_engine import Ticket, weight_bytes, with_last_positions
from limpet.model import (
    ABSENT,
    KEEP,
    Batch,
    Commit,
    Entry,
    Put,
    Revision,
    join_origin,
    join_writer,
)

__all__ = [
    "LEFT_TO_PLAN",
    "SUPERSEDED",
    "plain_puts",
    "put_arguments",
    "put_results",
]

LEFT_TO_PLAN: Final = "LP001"
"""The SQLSTATE by which the functions refuse a group that must be planned."""
SUPERSEDED: Final = "LP002"
"""The SQLSTATE by which they refuse a group with a request that was superseded by its own retry."""


def plain_puts(group: list[Ticket]) -> list[Put] | None:
    """The puts of a group that ``limpet_put`` can write: distinct keys, no ttl or meta to keep, no odd guards."""
    puts: list[Put] = []
    for ticket in group:
        batch = ticket.batch
        if batch.receipt_ms is not None or batch.retry_since is not None or not batch.writes:
            return None
        if batch.request_id is not None and batch.origin != batch.request_id:
            # The function takes the origin of a change for the id of a request, which may be superseded.
            return None
        if batch.guards and not _has_expected_revision(batch):
            return None
        for write in batch.writes:
            if type(write) is not Put or write.ttl_ms is KEEP or write.meta_json is KEEP:
                return None
            if batch.writer is not None and write.family == "data":
                write = msgspec.structs.replace(write, meta_json=join_writer(write.meta_json, batch.writer))  # noqa: PLW2901
            puts.append(write)
    is_distinct = len(puts) == 1 or len({(put.family, put.key) for put in puts}) == len(puts)
    return puts if is_distinct else None


def _has_expected_revision(batch: Batch) -> bool:
    """Whether the guards of a batch are one expected revision of the only key that it writes."""
    if len(batch.guards) > 1 or len(batch.writes) > 1:
        return False
    guard, write = batch.guards[0], batch.writes[0]
    if guard.key != write.key or guard.family != write.family:
        return False
    # No entry has revision 0, by which the functions understand that there is none.
    condition = guard.condition
    return condition is ABSENT or (type(condition) is Revision and 0 < condition.number <= codec.INT_MAX)


def _expected_revision(batch: Batch) -> int | None:
    """The revision that a batch of `plain_puts` expects: 0 if its key must be absent, None if nothing is expected."""
    if not batch.guards:
        return None
    condition = batch.guards[0].condition
    return condition.number if isinstance(condition, Revision) else 0


# Puts -------------------------------------------------------------------------


def put_arguments(group: list[Ticket], puts: list[Put], name: str) -> Iterable[object]:
    """Puts as arguments of ``limpet_put``, or of ``limpet_put_one`` if it is a single one."""
    return _many_puts(group, puts, name) if len(puts) > 1 else _one_put(group[0], puts[0], name)


def _one_put(ticket: Ticket, put: Put, name: str) -> Iterable[object]:
    kind, text, approximation = encode_value(put.stored)
    meta, origin, expected = decode_json(put.meta_json), _origin(ticket, name, 1), _expected_revision(ticket.batch)
    return ticket.weight_bytes, put.key, text, put.family, kind, approximation, put.ttl_ms, meta, origin, expected


def _origin(ticket: Ticket, name: str, position: int) -> str | None:
    """The origin of the changes of a batch, if it is not the name that the function itself makes."""
    batch = ticket.batch
    return batch.request_id if batch.writer is None else join_origin(f"{name}.{position}", batch.writer)


def _many_puts(group: list[Ticket], puts: list[Put], name: str) -> Iterable[object]:
    """Columns of the puts. A column that has the usual item in every row is NULL."""
    count = len(puts)
    kinds, values, approximations = zip(*[encode_value(put.stored) for put in puts], strict=True)
    last_positions = causes = expectations = None
    if count > len(group):
        last_positions = [str(position) for position, ticket in with_last_positions(group) for _ in ticket.batch.writes]
    if any(ticket.batch.request_id or ticket.batch.writer for ticket in group):
        origins = [(_origin(one, name, position), one.batch) for position, one in with_last_positions(group)]
        causes = [origin for origin, batch in origins for _ in batch.writes]
    if any(ticket.batch.guards for ticket in group):
        expectations = [digits(_expected_revision(one.batch)) for one in group for _ in one.batch.writes]

    def unless_all(usual: object, column: Sequence[Any]) -> Sequence[Any] | None:
        return None if column.count(usual) == count else column

    return (
        sum(ticket.weight_bytes for ticket in group),
        array_text([put.key for put in puts]),
        # Stored JSON has no line breaks, and neither have hexadecimal digits.
        "\n".join(values),
        unless_all("data", [put.family for put in puts]),
        unless_all("json", kinds),
        unless_all(None, approximations),
        # The server counts JSON by itself, because its text is what is stored.
        None if kinds.count("json") == count else [str(weight_bytes(put)) for put in puts],
        unless_all(None, [digits(put.ttl_ms) for put in puts]),
        unless_all(None, [decode_json(put.meta_json) for put in puts]),
        last_positions,
        causes,
        expectations,
    )


def put_results(group: list[Ticket], puts: list[Put], rows: Sequence[Any]) -> list[Commit | None]:
    """The commit of each batch, or None if the server left it out."""
    if len(puts) == 1:
        entry = _put_entry(puts[0], rows[0])
        return [Commit(entry.revision, (entry,), (None,), entry.updated_ms)]
    entries: list[Any] = [None] * len(puts)
    for number, *row in rows:
        entries[number - 1] = _put_entry(puts[number - 1], row)
    commits: list[Commit | None] = []
    for position, ticket in with_last_positions(group):
        last, count = entries[position - 1], len(ticket.batch.writes)
        written = tuple(entries[position - count : position])
        commits.append(None if last is None else Commit(last.revision, written, (None,) * count, last.updated_ms))
    return commits


def _put_entry(put: Any, row: Sequence[Any]) -> Entry:
    revision, version, created_revision, created_ms, at_ms = row
    expires_ms = None if put.ttl_ms is None else at_ms + put.ttl_ms
    return Entry(put.key, put.stored, version, revision, created_revision, created_ms, at_ms, expires_ms, put.meta_json)
