"""What the commands print."""

from __future__ import annotations

import sys
from base64 import b64encode
from typing import Any

import click
import msgspec

from limpet.errors import LimpetError
from limpet.model import Entry, Event, Status


def show(document: dict[str, Any]) -> None:
    """Print one JSON document on one line."""
    click.echo(msgspec.json.encode(document))


def show_value(value: Any) -> None:
    """Print a value: JSON as JSON, bytes as they are."""
    if isinstance(value, bytes):
        show_raw(value)
    else:
        click.echo(msgspec.json.encode(_printable(value)))


def show_raw(value: Any) -> None:
    """Print a string or bytes exactly as they are; anything else as JSON."""
    if isinstance(value, str):
        value = value.encode()
    if not isinstance(value, bytes):
        show_value(value)
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(value)
    sys.stdout.buffer.flush()


def show_columns(columns: list[str]) -> None:
    """Print one line of columns, separated by tabs."""
    click.echo("\t".join(columns))


def show_error(error: LimpetError, *, as_json: bool) -> None:
    """Print what went wrong on standard error."""
    if as_json:
        document = {"error": error.code, "message": str(error), "retryable": error.retryable, "outcome": error.outcome}
        click.echo(msgspec.json.encode(document), err=True)
    else:
        click.echo(f"limpet: {error}", err=True)


def entry_as_json(entry: Entry, *, with_value: bool = True) -> dict[str, Any]:
    """An entry as a JSON document. Bytes are ``{"$bytes": base64}``."""
    document = {
        "key": entry.key,
        "kind": entry.kind,
        "version": entry.version,
        "revision": entry.revision,
        "created_revision": entry.created_revision,
        "created_at": entry.created_at,
        "updated_at": entry.updated_at,
        "expires_at": entry.expires_at,
        "meta": entry.meta,
    }
    if with_value:
        document["value"] = _printable(entry.value)
    return document


def entry_columns(entry: Entry, now_ms: int) -> list[str]:
    """An entry as columns: version, revision, size, time to live, key."""
    ttl = "-" if entry.expires_ms is None else f"{max(0, entry.expires_ms - now_ms) / 1000:.0f}s"
    return [str(entry.version), str(entry.revision), str(entry.size_bytes), ttl, entry.key]


def event_as_json(event: Event) -> dict[str, Any]:
    """An event as a JSON document."""
    return {
        "op": event.op,
        "key": event.key,
        "version": None if event.entry is None else event.entry.version,
        "revision": event.revision,
        "commit": event.commit,
        "position": event.position,
        "cause": event.cause,
        "value": _printable(event.value),
    }


def event_columns(event: Event) -> list[str]:
    """An event as columns: revision, operation, key, value."""
    shown = (
        ""
        if event.entry is None or event.entry.stored is None
        else msgspec.json.encode(_printable(event.value)).decode()
    )
    return [str(event.revision), event.op, event.key, shown]


def status_as_json(status: Status) -> dict[str, Any]:
    """What a namespace holds."""
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


def _printable(value: Any) -> Any:
    """A value with bytes, which stand alone or in a record's fields, as ``{"$bytes": base64}``."""
    if isinstance(value, bytes):
        return {"$bytes": b64encode(value).decode()}
    if isinstance(value, dict):
        return {name: _printable(item) if isinstance(item, bytes) else item for name, item in value.items()}
    return value
