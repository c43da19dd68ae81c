"""Exporting a store into a file, and importing it into another store.

A file is written under the name with ``.part`` behind it, and gets its own name when it is whole. An export that was
interrupted goes on behind the last whole line of that part.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Final, Protocol

import limpet
from limpet.errors import InvalidValue
from limpet.model import Family
from limpet.moving import lines
from limpet.moving.entries import Brought, entries_of
from limpet.moving.lines import Checksum, End, Header
from limpet.moving.loader import Policy, Progress, Report, load

__all__ = ["export_file", "export_stream", "import_file", "import_stream"]

Written = Callable[[int], None]


class Output(Protocol):
    """Where the lines of an export go."""

    def write(self, line: bytes, /) -> object:
        """Write a line."""

    def flush(self) -> object:
        """Send the lines that were written."""


FLUSHED: Final = 1_000
"""So many lines may have to be exported again after an interruption."""


async def export_stream(
    store: limpet.Store, out: Output, namespaces: Sequence[str], *, redact: bool, progress: Written
) -> End:
    """Export namespaces into a stream."""
    out.write(lines.encode(await _make_header(store, namespaces, redact)))
    return await _export_entries(store, out, namespaces, Checksum(), None, redact=redact, progress=progress)


async def export_file(
    store: limpet.Store, file: Path, namespaces: Sequence[str], *, redact: bool, force: bool, progress: Written
) -> End:
    """Export namespaces into a file that only its owner may read.

    Raises:
        InvalidValue: The file exists, or its part belongs to another export.
    """
    part = _part_of(file, force=force)
    header = await _make_header(store, namespaces, redact)
    with _writing(part), _open_own(part) as out:
        checksum, after = _go_on(out, header, part)
        if after is None and not checksum.entries:
            out.write(lines.encode(header))
        end = await _export_entries(store, out, namespaces, checksum, after, redact=redact, progress=progress)
        out.flush()
        os.fsync(out.fileno())
        _finish(part, file)
    return end


async def _export_entries(
    store: limpet.Store,
    out: Output,
    namespaces: Sequence[str],
    checksum: Checksum,
    after: tuple[str, Family, str] | None,
    *,
    redact: bool,
    progress: Written,
) -> End:
    async for item in entries_of(store, namespaces, after=after):
        line = lines.encode_entry(item, redact=redact)
        checksum.add(line)
        out.write(line)
        if not checksum.entries % FLUSHED:
            out.flush()
            progress(checksum.entries)
    out.write(lines.encode(checksum.end))
    progress(checksum.entries)
    return checksum.end


async def _make_header(store: limpet.Store, namespaces: Sequence[str], redact: bool) -> Header:
    session, store_id, now_ms = store._session, "", 0
    revisions: dict[str, int] = {}
    for name in sorted(namespaces):
        status = await session.retry(lambda name=name: session.engine.status(name))  # type: ignore[misc]
        revisions[name], store_id, now_ms = status.revision, status.store_id, max(now_ms, status.now_ms)
    if not revisions:
        raise InvalidValue("there is no namespace to export: nothing was written to this store")
    at = datetime.fromtimestamp(now_ms // 1000, UTC).isoformat()
    return Header("export", lines.FORMAT, at, store.traits.engine, store_id, revisions, redact)


def _part_of(file: Path, *, force: bool) -> Path:
    if file.exists() and not force:
        raise InvalidValue(f"{file} exists: give another name, or replace it with --force")
    return file.with_name(f"{file.name}.part")


def _finish(part: Path, file: Path) -> None:
    part.replace(file)


@contextlib.contextmanager
def _writing(part: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidValue(f"{part} cannot be written: {error.strerror}; run it again when it can") from error


def _open_own(part: Path) -> IO[bytes]:
    """Open a file to read and write, and make it for its owner alone."""
    return os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT, 0o600), "r+b")


def _go_on(out: IO[bytes], header: Header, part: Path) -> tuple[Checksum, tuple[str, Family, str] | None]:
    """Read what an interrupted export has written, and stand behind its last whole line."""
    checksum, last, size_bytes = Checksum(), None, 0
    for number, line in enumerate(out, 1):
        if not line.endswith(b"\n") or line.startswith(b'{"limpet":"end"'):
            break
        if number == 1:
            earlier = lines.decode_header(line)
            same = (earlier.store, list(earlier.namespaces), earlier.redacted) == (
                header.store,
                list(header.namespaces),
                header.redacted,
            )
            if not same:
                raise InvalidValue(f"{part} is a part of another export: delete it, or finish that export first")
        else:
            checksum.add(line)
            last = line
        size_bytes += len(line)
    out.truncate(size_bytes)
    out.seek(size_bytes)
    return checksum, None if last is None else lines.place_of(last)


# Importing ------------------------------------------------------------------------


async def import_file(
    store: limpet.Store, file: Path, namespaces: Sequence[str], *, policy: Policy, dry_run: bool, progress: Progress
) -> Report:
    """Import a file, after it was read once to compare it with its checksum."""
    with _reading(file) as opened:
        for part in lines.split(opened):
            if isinstance(part, Header):
                _check_header(part)
    with _reading(file) as opened:
        source = _entries_in(lines.split(opened), namespaces)
        return await load(store, source, policy=policy, dry_run=dry_run, progress=progress)


async def import_stream(
    store: limpet.Store,
    stream: IO[bytes],
    namespaces: Sequence[str],
    *,
    policy: Policy,
    dry_run: bool,
    progress: Progress,
) -> Report:
    """Import a stream. Its checksum can be compared only at its end, when its entries are written."""
    source = _entries_in(lines.split(stream), namespaces)
    return await load(store, source, policy=policy, dry_run=dry_run, progress=progress)


async def _entries_in(parts: Iterable[Header | bytes | End], namespaces: Sequence[str]) -> AsyncIterator[Brought]:
    for number, part in enumerate(parts, 1):
        if isinstance(part, Header):
            _check_header(part)
        elif isinstance(part, bytes):
            item = lines.decode_entry(part, number)
            if not namespaces or item.namespace in namespaces:
                yield item


def _check_header(header: Header) -> None:
    if header.redacted:
        raise InvalidValue("the export is redacted: it has no values to import")


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[IO[bytes]]:
    try:
        with file.open("rb") as opened:
            yield opened
    except OSError as error:
        raise InvalidValue(f"{file} cannot be read: {error.strerror}") from error
