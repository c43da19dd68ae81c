"""Error replies on NATS: how an error becomes a JSON document for a plugin.

Every reply has ``success``. One that failed also has an ``error_code``, by the table of `limpet.protocol.codes`, and a
message for people. ``code`` is the error's own code, from which a client can raise the same error, and some errors add
members that a program needs to go on. The message of an engine is never sent; see `limpet.server.wording`.
"""

from __future__ import annotations

from typing import Any, Final

from limpet import errors
from limpet.protocol.codes import code_of
from limpet.semantic.store import InvalidField, InvalidKeyField, VersionConflict
from limpet.server.audited import conflict_document
from limpet.server.requests import InvalidJSON, InvalidSubject, MissingField
from limpet.server.wording import public_error, public_message

__all__ = ["reply_code", "reply_of"]

_BY_SHAPE: Final = {
    InvalidJSON: "INVALID_JSON",
    MissingField: "MISSING_FIELD",
    InvalidSubject: "INVALID_SUBJECT",
}

_MEMBERS: Final[dict[type[errors.LimpetError], dict[str, str]]] = {
    errors.Conflict: {"key": "key", "reason": "reason", "version": "actual_version", "revision": "actual_revision"},
    InvalidField: {"field": "field"},
    InvalidKeyField: {"field": "field"},
    MissingField: {"field": "field"},
    errors.NotFound: {"key": "key"},
    errors.ValueTooLarge: {"size_bytes": "size_bytes", "limit_bytes": "limit_bytes"},
    errors.RateLimited: {"retry_after": "retry_after"},
    errors.LockHeld: {"name": "name", "holder": "holder", "token": "token", "remaining": "remaining"},
    errors.LockExpired: {"name": "name", "token": "token"},
    errors.LockLost: {"name": "name", "token": "token"},
    errors.LockNotHeld: {"name": "name"},
    errors.Compacted: {"oldest": "oldest"},
    errors.Ambiguous: {"request_id": "request_id"},
}
"""The attributes of an error that its reply has, by the name of the member."""


def reply_code(error: Exception) -> str:
    """The ``error_code`` of an error. An error of an interface itself, with a status below 500, is the caller's."""
    if isinstance(error, errors.LimpetError):
        return _BY_SHAPE.get(type(error)) or code_of(error).reply
    status = getattr(error, "status", None) or getattr(error, "status_code", None)
    is_of_caller = isinstance(status, int) and status < 500
    return "VALIDATION_ERROR" if is_of_caller else code_of(error).reply


def reply_of(error: Exception) -> dict[str, Any]:
    """The reply to a request that failed."""
    reply: dict[str, Any] = {
        "success": False,
        "error_code": reply_code(error),
        "message": _message(error),
    }
    error = public_error(error)
    if isinstance(error, VersionConflict):
        reply |= conflict_document(error)
    elif isinstance(error, errors.LimpetError):
        reply["code"] = error.code
        for member, attribute in _MEMBERS.get(type(error), {}).items():
            reply[member] = getattr(error, attribute)
    return reply


def _message(error: Exception) -> str:
    if isinstance(error, errors.ValueTooLarge) and error.limit_bytes % 1024 == 0 and error.limit_bytes >= 65_536:
        size, limit = error.size_bytes, error.limit_bytes
        return (
            f"Value size exceeds {limit // 1024}KB limit (got {size / 1024:.1f}KB): "
            f"{size:,} bytes, and {limit:,} are allowed"
        )
    return public_message(error)
