"""What a caller of the engine's primitives may do, and which parts of a result it may see.

A right is granted on keys. A lock has the rights of the key of the same name, a recoverable copy those of the key that
it is a copy of; anything else that an engine stores takes the right on the whole namespace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
from starlette.requests import Request as Incoming

from limpet.errors import PermissionDenied
from limpet.keys import Span, key_span, prefix_span
from limpet.model import Batch, Change, Commit, Entry, Expire, Family, Import, Patch, Put, Refusal, Write
from limpet.server import validate
from limpet.server.dispatch import Caller
from limpet.server.http_headers import headers_of
from limpet.server.operations import Right, depends_on_value
from limpet.server.requests import REASON_MAX
from limpet.transition import read_receipt

__all__ = [
    "ALL_KEYS",
    "EngineRequest",
    "check_batch_rights",
    "is_named_by_key",
    "is_visible_change",
    "is_visible_receipt",
    "redact",
    "spans_of",
]

REASON: Final = "Limpet-Reason"
"""The header in which an admin gives the reason of a forced write."""

ALL_KEYS: Final = (Span("", None),)


class EngineRequest(NamedTuple):
    """A request for a primitive: who sent it, and for which namespace."""

    caller: Caller
    namespace: str
    incoming: Incoming

    def may(self, right: Right, spans: Sequence[Span]) -> bool:
        """Whether the caller has a right on all of these keys."""
        return self.caller.may(self.namespace, right, spans)

    def sees(self, key: str, *, with_value: bool = True) -> bool:
        """Whether the caller may read a key."""
        spans = (key_span(key),)
        return self.may("read", spans) and (not with_value or self.may("reveal", spans))

    def sees_in(self, family: Family, name: str, *, with_value: bool = True) -> bool:
        """Whether the caller may read the entry of this name in a family."""
        spans = spans_of(family, [name])
        return self.may("read", spans) and (not with_value or self.may("reveal", spans))

    def sees_value(self, write: Write) -> bool:
        """Whether the caller may see the value that a write replaces or makes."""
        return self.may("reveal", spans_of(write.family, [write.key]))

    @property
    def sees_all(self) -> bool:
        """Whether the caller may read every key with its value."""
        return self.may("read", ALL_KEYS) and self.may("reveal", ALL_KEYS)

    @property
    def reason(self) -> str | None:
        """The reason that the caller gave for a forced write."""
        given = (headers_of(self.incoming.scope).first(REASON) or "").strip()
        return given[:REASON_MAX] or None

    def require(self, right: Right, spans: Sequence[Span], *alternatives: Right) -> None:
        """Raise unless the caller has the right, or one of the alternatives, on all of these keys."""
        if not any(self.may(one, spans) for one in (right, *alternatives)):
            raise PermissionDenied(
                f"{self.caller.name!r} lacks the {right} right on namespace {self.namespace!r}, or on these keys of it"
            )


def is_named_by_key(family: Family) -> bool:
    """Whether the names in a family are keys."""
    return family in ("data", "lock")


def spans_of(family: Family, names: Sequence[str]) -> Sequence[Span]:
    """The keys on which a caller needs a right for these names in a family."""
    if family == "sequence":
        # It numbers the keys under a prefix.
        return [prefix_span(name) for name in names]
    keys = [_key_of(family, name) for name in names]
    return ALL_KEYS if None in keys else [key_span(key) for key in keys if key is not None]


def _key_of(family: Family, name: str) -> str | None:
    """The key whose rights count for a name in a family; None where the whole namespace counts."""
    if is_named_by_key(family):
        return name
    kind, _, key = name.partition("/")
    return key if family == "recoverable" and kind in ("live", "over") and key else None


def check_batch_rights(request: EngineRequest, batch: Batch, reason: str | None) -> bool:
    """Check every right that a batch needs: to write its keys, and to see values that its result depends on.

    Returns whether it writes a lock that the caller does not hold, which takes an admin and a reason.
    """
    is_forced = False
    for write in batch.writes:
        spans = spans_of(write.family, [write.key])
        if isinstance(write, Import):
            # It says itself which version it has, and when it was written.
            request.require("admin", spans)
        if isinstance(write, Expire):
            # It removes only entries that have expired already, so a lesser right is enough.
            request.require("write", spans, "lock", "admin")
        elif write.family == "lock":
            if validate.is_ownership_proven(write, batch):
                request.require("lock", spans)
            elif reason is None:
                raise PermissionDenied(
                    f"lock {write.key!r} is written by its holder, under its token, or when it is free; "
                    f"an admin ends it with a reason, in the header {REASON}"
                )
            else:
                is_forced = True
        else:
            request.require("write", spans)
            # The result of a patch has the whole record.
            if depends_on_value(write) or isinstance(write, Patch):
                request.require("reveal", spans)
    for guard in batch.guards:
        spans = spans_of(guard.family, [guard.key])
        if guard.family == "lock":
            request.require("lock", spans, "write")
        else:
            request.require("write", spans)
            if depends_on_value(guard.condition):
                request.require("reveal", spans)
    return is_forced


def redact(request: EngineRequest, batch: Batch, result: Commit | Refusal) -> Commit | Refusal:
    """Remove the values that the caller may not see from the result of a commit."""
    if isinstance(result, Refusal):
        found = result.found
        family = "data" if result.guard is None else result.guard.family
        if found is None or family == "lock" or request.sees_in(family, found.key):
            return result
        return msgspec.structs.replace(result, found=found.without_value())

    def hides_written(write: Write) -> bool:
        # A put and a lock hold what the caller has sent itself.
        return write.family != "lock" and not isinstance(write, Put) and not request.sees_value(write)

    entries = tuple(
        entry.without_value() if entry is not None and hides_written(write) else entry
        for entry, write in zip(result.entries, batch.writes, strict=True)
    )
    ended = tuple(
        entry.without_value() if entry is not None and not request.sees_value(write) else entry
        for entry, write in zip(result.ended, batch.writes, strict=True)
    )
    return msgspec.structs.replace(result, entries=entries, ended=ended)


def is_visible_change(request: EngineRequest, change: Change) -> bool:
    """Whether the caller may see a change in the log."""
    return request.sees_in(change.family, change.key, with_value=change.family != "lock")


def is_visible_receipt(request: EngineRequest, receipt: Entry, *, is_own: bool) -> bool:
    """Whether the caller may see everything in a receipt.

    Entries in a receipt have no family. An entry that the caller wrote itself may be a recoverable copy of a key.
    """
    commit = read_receipt(receipt).commit
    return all(
        request.sees(entry.key) or (is_own and request.sees_in("recoverable", entry.key))
        for entry in (*commit.entries, *commit.ended)
        if entry is not None
    )
