"""Entries, events and locks as JSON documents: one form for the command line and for every wire.

JSON stays as it is. Raw bytes are ``{"$bytes": base64}``, alone or as the field of a record; a field that is an
object of that form is wrapped in ``{"$json": …}``. A value that stands alone has its kind beside it.
"""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from limpet.codec import Fields
from limpet.errors import InvalidValue
from limpet.model import Entry, Event, Status

if TYPE_CHECKING:
    from limpet.lock import LockInfo

__all__ = [
    "bytes_of",
    "entry_as_json",
    "event_as_json",
    "field_of",
    "lock_as_json",
    "plain",
    "status_as_json",
]


def entry_as_json(entry: Entry, *, with_value: bool) -> dict[str, Any]:
    """An entry as a JSON document."""
    document = {
        "key": entry.key,
        "kind": entry.kind,
        "version": entry.version,
        "revision": entry.revision,
        "created_revision": entry.created_revision,
        "created_at": entry.created_at,
        "updated_at": entry.updated_at,
        "expires_at": entry.expires_at,
        "size_bytes": entry.size_bytes,
        "meta": entry.meta,
        "writer": entry.writer,
    }
    if with_value:
        document["value"] = plain(entry.value)
    return document


def event_as_json(event: Event) -> dict[str, Any]:
    """An event as a JSON document. Without an entry, or where an event carries no value, the member is null."""
    entry = event.entry
    return {
        "op": event.op,
        "key": event.key,
        "kind": None if entry is None else entry.kind,
        "version": None if entry is None else entry.version,
        "revision": event.revision,
        "commit": event.commit,
        "position": event.position,
        "cause": event.cause,
        "at": event.at,
        "expires_at": None if entry is None else entry.expires_at,
        "meta": None if entry is None else entry.meta,
        "writer": event.writer,
        "value": plain(event.value),
    }


def status_as_json(status: Status) -> dict[str, Any]:
    """The counters of a namespace as a JSON document."""
    return {
        "keys": status.keys,
        "bytes": status.size_bytes,
        "revision": status.revision,
        "log_changes": status.log_changes,
        "log_bytes": status.log_bytes,
        "log_after": status.floor,
        "store_id": status.store_id,
        "epoch": status.epoch,
    }


def lock_as_json(lock: LockInfo) -> dict[str, Any]:
    """The holder of a lock as a JSON document."""
    return {"name": lock.name, "holder": lock.holder, "token": lock.token, "remaining": lock.remaining}


def plain(value: Any) -> Any:
    """A value as JSON can hold it: bytes are ``{"$bytes": base64}``.

    Bytes stand alone or as a record's field. A field that is an object of that form is wrapped in
    ``{"$json": …}``; a value that stands alone has its kind beside it.
    """
    if isinstance(value, bytes):
        return {"$bytes": b64encode(value).decode()}
    if isinstance(value, Fields):
        return {name: _plain_field(field) for name, field in value.items()}
    return value


def _plain_field(field: Any) -> Any:
    looks_special = isinstance(field, dict) and len(field) == 1 and next(iter(field)).startswith("$")
    return {"$json": field} if looks_special else plain(field)


def field_of(document: Any) -> Any:
    """A field that came in as `plain` encodes it: the inverse of `plain`."""
    if isinstance(document, Mapping) and len(document) == 1:
        ((mark, inner),) = document.items()
        if mark == "$bytes":
            return bytes_of(inner)
        if mark == "$json":
            return inner
    return document


def bytes_of(text: Any) -> bytes:
    """Raw bytes that came in as base64."""
    try:
        return b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise InvalidValue("raw bytes are written as base64") from None
