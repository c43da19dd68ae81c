"""What the commands print: results on standard output, everything else on standard error.

Text is for people and pipes: one result a line, columns separated by tabs, no colour. On a terminal the columns are
aligned under a heading, and control characters are escaped. JSON is for programs: one document a line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import IO, Any, Final

import click
import msgspec

from limpet.cli import failure
from limpet.clock import format_duration
from limpet.errors import LimpetError
from limpet.model import Entry, Event
from limpet.protocol.json import plain

ENTRY_COLUMNS: Final = {"version": 8, "revision": 9, "bytes": 8, "expires": 12, "writer": 12, "key": 0}
LOCK_COLUMNS: Final = {"token": 9, "lasts": 12, "holder": 24, "lock": 0}
NAMESPACE_COLUMNS: Final = {"keys": 10, "bytes": 13, "revision": 10, "changes": 9, "namespace": 0}
TOP_COLUMNS: Final = {"changes/s": 10, "keys": 10, "bytes": 13, "locks": 6, "namespace": 0}
EVENT_COLUMNS: Final = {"revision": 9, "time": 25, "op": 7, "version": 8, "writer": 12, "key": 24, "value": 0}

_SHORT: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


class Unwritable(Exception):
    """Standard output cannot be written."""

    def __init__(self, reason: OSError) -> None:
        super().__init__(f"cannot write to standard output: {reason.strerror}")
        self.is_closed = isinstance(reason, BrokenPipeError)


def on_terminal() -> bool:
    """Whether standard output is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()


def write(content: bytes) -> None:
    """Write to standard output, which is buffered until `flush`."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.buffer.write(content)
    except OSError as error:
        raise Unwritable(error) from error


def flush() -> None:
    """Send the buffered output."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError as error:
        raise Unwritable(error) from error


def abandon(stream: IO[str]) -> None:
    """Drop the buffered output, or the interpreter would try again at its exit, and exit with 120."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def flush_or_abandon() -> None:
    """Send the results from before an error. If they cannot be written, only the first error is shown."""
    try:
        flush()
    except Unwritable:
        abandon(sys.stdout)


def show(document: dict[str, Any]) -> None:
    """Print one JSON document on one line."""
    write(msgspec.json.encode(document) + b"\n")


def show_line(text: str) -> None:
    """Print a line, in UTF-8 whatever the locale is."""
    write(text.encode() + b"\n")


def show_value(value: Any, *, raw: bool = False) -> None:
    """Print a value as JSON. Raw, a string or bytes are printed exactly as they are."""
    if raw and isinstance(value, str | bytes):
        write(value.encode() if isinstance(value, str) else value)
    elif isinstance(value, bytes) and not on_terminal():
        write(value)
    else:
        show_line(json_text(value))


def show_heading(columns: dict[str, int]) -> None:
    """Print the names of the columns, on a terminal."""
    if on_terminal():
        show_columns(columns, [name.upper() for name in columns])


def show_columns(columns: dict[str, int], cells: Sequence[str]) -> None:
    """Print one line of columns: under their heading on a terminal, else separated by tabs."""
    if on_terminal():
        padded = [f"{cell:<{width}}" for cell, width in zip(cells, columns.values(), strict=True)]
        show_line(" ".join(padded).rstrip())
    else:
        show_line("\t".join(cells))


def show_stderr(text: str) -> None:
    """Print on standard error. If that cannot be written, the exit code still shows the error."""
    try:
        click.echo(text.encode(errors="backslashreplace"), err=True)
    except OSError:
        abandon(sys.stderr)


def show_note(text: str) -> None:
    """Print a note for a person at a terminal; a program does not need it."""
    if sys.stderr is not None and sys.stderr.isatty():
        show_stderr(f"limpet: {text}")


def show_error(error: LimpetError, *, place: str, as_json: bool) -> None:
    """Print an error."""
    if as_json:
        show_stderr(msgspec.json.encode(failure.as_json(error, place)).decode())
        return
    message, advice = failure.describe(error, place)
    show_stderr(f"limpet: {message}" if advice is None else f"limpet: {message}\n  {advice}")


# As text ----------------------------------------------------------------------


def entry_cells(entry: Entry, now_ms: int) -> list[str]:
    """An entry as columns."""
    expires = "-" if entry.expires_ms is None else format_duration(max(0, entry.expires_ms - now_ms) / 1000)
    numbers = [str(entry.version), str(entry.revision), str(entry.size_bytes)]
    return [*numbers, expires, entry.writer or "-", visible(entry.key)]


def event_cells(event: Event) -> list[str]:
    """An event as columns. The value is empty where the event carries none."""
    entry, at = event.entry, event.at
    has_value = entry is not None and entry.stored is not None
    return [
        str(event.revision),
        "-" if at is None else at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        event.op,
        "-" if entry is None else str(entry.version),
        event.writer or "-",
        visible(event.key),
        json_text(event.value) if has_value else "",
    ]


def visible(text: str) -> str:
    """A key on one line: control characters and line breaks are escaped, as in JSON."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else _escape(letter) for letter in text)


def _escape(letter: str) -> str:
    units = letter.encode("utf-16-be").hex()
    return _SHORT.get(letter) or "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def json_text(value: Any) -> str:
    """A value as JSON, on one line."""
    text = msgspec.json.encode(plain(value)).decode()
    return visible(text) if on_terminal() else text
