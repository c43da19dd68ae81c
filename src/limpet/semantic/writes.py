"""Writes of semantic entries as values: one write of one key, and a request with all writes of one commit."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from limpet.codec import encode_field
from limpet.draft import Fence, Fencing
from limpet.model import Entry
from limpet.semantic.keys import check_key
from limpet.semantic.model import (
    Envelope,
    Held,
    InvalidField,
    Semantics,
    check_expected_version,
    check_value,
    semantics_of,
)

__all__ = ["EntryWrite", "Verb", "WriteRequest", "check_put", "purpose_of"]

Verb = Literal["kvPut", "kvDelete", "kvRecover"]


class EntryWrite(msgspec.Struct, frozen=True):
    """One write of one key, checked. Without a value it is a delete."""

    key: str
    value: dict[str, Any] | None
    semantics: Semantics | None
    expected_version: int | None
    spec_ref: str | None
    verb: Verb = "kvPut"

    @property
    def purpose(self) -> str:
        """The purpose that the write names; empty for a delete."""
        return "" if self.semantics is None else self.semantics.purpose

    @property
    def stored(self) -> bytes | None:
        """The value as it is stored; None for a delete."""
        return None if self.value is None else encode_field(self.value)


class WriteRequest(msgspec.Struct, frozen=True):
    """The writes of one commit, with all that they depend on.

    Attributes:
        writes: One for each key.
        writer: Who writes.
        request_id: The request id.
        is_id_given: Whether the caller gave the id, so that a receipt is kept under it.
        held: An entry of purpose lock that must still be held.
        fence: A lock of the store that must still be held.
    """

    writes: list[EntryWrite]
    writer: str
    request_id: str
    is_id_given: bool
    held: Envelope | Held | None = None
    fence: Fencing | Fence | None = None

    @property
    def keys(self) -> list[str]:
        """The keys, in the order of the writes."""
        return [write.key for write in self.writes]

    def encode(self) -> bytes:
        """The request as bytes, by which a repeated request is recognised."""
        return encode_field(
            [
                self.writer,
                *(
                    [
                        write.verb,
                        write.key,
                        write.value,
                        None if write.semantics is None else write.semantics.to_dict(),
                        write.expected_version,
                        write.spec_ref,
                    ]
                    for write in self.writes
                ),
            ]
        )


def check_put(
    key: str,
    value: object,
    semantics: Semantics | dict[str, Any],
    expected_version: object,
    spec_ref: object,
) -> EntryWrite:
    """A put with its arguments checked."""
    checked = semantics_of(semantics)
    version = check_expected_version(expected_version)
    if checked.purpose == "lock" and version is None:
        raise InvalidField("expectedVersion", "a lock needs one: 0 to acquire it, its version to renew it")
    if spec_ref is not None and (not isinstance(spec_ref, str) or not 0 < len(spec_ref) <= 512):
        raise InvalidField("specRef", "it is a reference of 1 to 512 characters")
    return EntryWrite(check_key(key), check_value(value), checked, version, spec_ref)


def purpose_of(entry: Entry | None) -> str:
    """The purpose of an entry; empty when it is absent, or was put without an envelope."""
    semantics = None if entry is None else entry.meta.get("semantics")
    return str(semantics.get("purpose", "")) if isinstance(semantics, dict) else ""
