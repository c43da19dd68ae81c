r"""Entries as lines of a file: one JSON document a line, between a header and an end.

The header names the store that was exported, and the revision of each namespace. The end has the number of entries and
a hash of their lines, by which a file that was cut off or changed is recognised. The lines of entries hold nothing that
differs from store to store, so two exports of the same entries differ in their headers alone:

    {"limpet":"export","format":1,"at":"2026-01-31T12:00:00Z","engine":"sqlite","store":"…","namespaces":{"default":17}}
    {"namespace":"default","key":"theme","kind":"json","value":"dark","version":2,"created_ms":…,"updated_ms":…}
    {"limpet":"end","entries":1,"sha256":"…"}

Values have the form of `limpet.protocol.json`: raw bytes are {"$bytes": base64}.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Iterable, Iterator
from typing import Any, Final, TypeVar

import msgspec

from limpet import codec
from limpet.checks import check_writer
from limpet.codec import Fields, Stored
from limpet.errors import InvalidValue, LimpetError
from limpet.model import Family, Import
from limpet.moving.entries import MOVED_FAMILIES, Brought
from limpet.protocol.json import bytes_of, field_of

__all__ = [
    "FORMAT",
    "Checksum",
    "End",
    "Header",
    "decode_entry",
    "decode_header",
    "encode",
    "encode_entry",
    "place_of",
    "split",
]

T = TypeVar("T")

FORMAT: Final = 1


class Header(msgspec.Struct, omit_defaults=True):
    """The first line: which store was exported, when, and how far each namespace was."""

    limpet: str
    format: int
    at: str
    engine: str
    store: str
    namespaces: dict[str, int]
    redacted: bool = False


class End(msgspec.Struct):
    """The last line."""

    limpet: str
    entries: int
    sha256: str


class Line(msgspec.Struct, omit_defaults=True):
    """The line of an entry. One that is redacted has a size in place of its value."""

    namespace: str
    key: str
    kind: str
    value: msgspec.Raw = msgspec.Raw(b"")
    version: int = 0
    created_ms: int = 0
    updated_ms: int = 0
    expires_ms: int | None = None
    meta: msgspec.Raw = msgspec.Raw(b"")
    writer: str | None = None
    family: str = "data"
    size_bytes: int | None = None


class Checksum:
    """Counts and hashes the lines of entries."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.entries = 0

    def add(self, line: bytes) -> None:
        """Add a line, with its line break."""
        self._hash.update(line)
        self.entries += 1

    @property
    def end(self) -> End:
        """The end that belongs to these lines."""
        return End("end", self.entries, self._hash.hexdigest())


_encoder: Final = msgspec.json.Encoder()
_decode_line: Final = msgspec.json.Decoder(Line, strict=True).decode


def encode(part: Header | End) -> bytes:
    """The line of a header or an end."""
    return _encoder.encode(part) + b"\n"


def encode_entry(item: Brought, *, redact: bool = False) -> bytes:
    """The line of an entry."""
    write = item.write
    meta = write.meta_json if isinstance(write.meta_json, bytes) and not redact else b""
    line = Line(
        item.namespace,
        write.key,
        codec.kind_of(write.stored),
        msgspec.Raw(b"" if redact else _encode_value(write.stored)),
        write.version,
        write.created_ms,
        write.updated_ms,
        write.expires_ms,
        msgspec.Raw(meta),
        write.writer,
        write.family,
        codec.size_bytes(write.stored) if redact else None,
    )
    # A Raw that is empty has no form, and is left out.
    document = {
        name: found
        for name in Line.__struct_fields__
        if (found := getattr(line, name)) not in (None, msgspec.Raw(b"")) and (name, found) != ("family", "data")
    }
    return _encoder.encode(document) + b"\n"


def _encode_value(stored: Stored) -> bytes:
    if isinstance(stored, bytes):
        return _encode_bytes(stored) if stored[:1] == b"\0" else stored
    # In the order of their names, because engines keep them in different orders.
    fields = [_encoder.encode(name) + b":" + _encode_field(stored[name]) for name in sorted(stored)]
    return b"{" + b",".join(fields) + b"}"


def _encode_field(field: bytes) -> bytes:
    if field[:1] == b"\0":
        return _encode_bytes(field)
    found = codec.decode(field) if field[:3] == b'{"$' else None
    return b'{"$json":%b}' % field if isinstance(found, dict) and len(found) == 1 else field


def _encode_bytes(stored: bytes) -> bytes:
    return b'{"$bytes":"%b"}' % b64encode(stored[1:])


def _decode_meta(text: bytes) -> bytes | None:
    if not text:
        return None
    meta = codec.decode(text)
    if not isinstance(meta, dict):
        raise InvalidValue("a meta is an object")
    return codec.encode_field(meta)


def decode_entry(line: bytes, number: int) -> Brought:
    """The entry of a line. Raises `InvalidValue` with the number of the line."""
    try:
        found = _decode_line(line)
        if found.family not in MOVED_FAMILIES:
            raise InvalidValue("it is of a family that is not moved")
        write = Import(
            found.key,
            _decode_value(found.kind, codec.decode(bytes(found.value))),
            meta_json=_decode_meta(bytes(found.meta)),
            family=found.family,
            version=found.version,
            created_ms=found.created_ms,
            updated_ms=found.updated_ms,
            expires_ms=found.expires_ms,
            writer=None if found.writer is None else check_writer(found.writer),
        )
    except (msgspec.MsgspecError, LimpetError, UnicodeDecodeError, RecursionError) as error:
        # Without the message of the decoder, which may show a part of a value.
        raise InvalidValue(f"line {number} of the export is not an entry") from error
    return Brought(found.namespace, write)


def place_of(line: bytes) -> tuple[str, Family, str]:
    """The namespace, the family and the key of a line, redacted or not."""
    try:
        found = _decode_line(line)
    except msgspec.MsgspecError as error:
        raise InvalidValue("the part of an earlier export cannot be read: delete it, and export again") from error
    return found.namespace, "sequence" if found.family == "sequence" else "data", found.key


def _decode_value(kind: str, document: Any) -> Stored:
    if kind == "json":
        return codec.encode_field(document)
    if kind == "bytes" and isinstance(document, dict) and document.keys() == {"$bytes"}:
        return b"\0" + bytes_of(document["$bytes"])
    if kind == "record" and isinstance(document, dict):
        return codec.encode(Fields({name: field_of(field) for name, field in document.items()}))
    raise InvalidValue("a value has another kind")


# Whole files ----------------------------------------------------------------------


def split(lines: Iterable[bytes]) -> Iterator[Header | bytes | End]:
    """The parts of an export: its header, the lines of entries as they are, and its end.

    Raises:
        InvalidValue: It is not an export, was cut off, or was changed.
    """
    checksum, end = Checksum(), None
    for number, line in enumerate(lines, 1):
        if end is not None:
            raise InvalidValue(f"line {number} of the export follows its end")
        if number == 1:
            yield decode_header(line)
        elif line.startswith(b'{"limpet":"end"'):
            end = _decode_part(line, End, "its end")
            if end != checksum.end:
                raise InvalidValue(
                    f"the export does not match its checksum: its end names {end.entries:,} entries, and it has "
                    f"{checksum.entries:,}. It was changed, or parts of it are missing; export again"
                )
            yield end
        else:
            if not line.endswith(b"\n"):
                break
            checksum.add(line)
            yield line
    if end is None:
        raise InvalidValue("the export has no end: it was cut off. Run the export again, it goes on where it ended")


def decode_header(line: bytes) -> Header:
    """The header of an export."""
    header = _decode_part(line, Header, "a header in its first line")
    if header.limpet != "export":
        raise InvalidValue("this is not an export: its first line is no header")
    if header.format != FORMAT:
        raise InvalidValue(f"the export has format {header.format}, and this release knows format {FORMAT}")
    return header


def _decode_part(line: bytes, kind: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise InvalidValue(f"this is not an export of Limpet: it has not {what}") from None
