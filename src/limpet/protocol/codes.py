"""Errors as other programs see them: one table of codes, HTTP statuses, replies and exit codes.

Each error of `limpet.errors` has a row. Its code is unique and the same on every wire. The reply is the word that
plugins get; several errors may share one. The exit code is that of the command line.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from limpet import errors

__all__ = ["CODES", "INTERFACE_CODES", "Code", "code_of"]


class Code(NamedTuple):
    """How an error is reported: its HTTP status, its reply to a plugin, and the exit code of the command line."""

    status: int
    reply: str
    exit: int


CODES: Final[dict[type[errors.LimpetError], Code]] = {
    errors.InvalidKey: Code(400, "VALIDATION_ERROR", 7),
    errors.InvalidNamespace: Code(400, "INVALID_PLUGIN_NAME", 7),
    errors.InvalidValue: Code(400, "VALIDATION_ERROR", 7),
    errors.InvalidTTL: Code(400, "VALIDATION_ERROR", 7),
    errors.ValueTooLarge: Code(413, "VALUE_TOO_LARGE", 7),
    errors.TypeMismatch: Code(409, "TYPE_MISMATCH", 7),
    errors.PermissionDenied: Code(403, "PERMISSION_DENIED", 7),
    # The expectation of a write is a precondition in the sense of HTTP.
    errors.Conflict: Code(412, "CONFLICT", 4),
    errors.NotFound: Code(404, "NOT_FOUND", 3),
    errors.LockHeld: Code(423, "LOCK_HELD", 5),
    errors.LockNotHeld: Code(409, "LOCK_NOT_HELD", 5),
    errors.LockExpired: Code(409, "LOCK_EXPIRED", 5),
    errors.LockLost: Code(409, "LOCK_LOST", 5),
    errors.Compacted: Code(410, "COMPACTED", 7),
    errors.Unavailable: Code(503, "DATABASE_ERROR", 6),
    errors.Contention: Code(503, "CONTENTION", 6),
    errors.RateLimited: Code(429, "RATE_LIMITED", 6),
    errors.Ambiguous: Code(504, "AMBIGUOUS", 6),
    errors.Corrupt: Code(500, "DATABASE_ERROR", 6),
    errors.Closed: Code(503, "DATABASE_ERROR", 6),
}

INTERFACE_CODES: Final = {"version_conflict": Code(409, "CONFLICT", 4)}
"""Errors of the interfaces that are subclasses of the above and are reported differently, by their codes."""

_UNEXPECTED: Final = Code(500, "INTERNAL_ERROR", 1)


def code_of(error: BaseException) -> Code:
    """How an error is reported; an error that is not ours is an internal error."""
    if isinstance(error, errors.LimpetError) and error.code in INTERFACE_CODES:
        return INTERFACE_CODES[error.code]
    return next((code for kind, code in CODES.items() if isinstance(error, kind)), _UNEXPECTED)
