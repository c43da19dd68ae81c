"""Error replies on NATS: how an error becomes a JSON document for a plugin.

Every reply has ``success``. One that failed also has an ``error_code``, by the table of `limpet.protocol.codes`, and a
message for people. ``code`` is the error's own code, from which a client can raise the same error, and some errors add
members that a program needs to go on. The message of an engine is never sent; see `limpet.server.wording`.
"""

from __future__ import annotations

from typing import Any, Final

from limpet import errors
from limpet.semantic.store import InvalidField, InvalidKeyField, VersionConflict
from limpet.server.outcome import reply_code
from limpet.server.requests import MissingField
from limpet.server.wording import public_error, public_message

__all__ = ["reply_of"]

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


def reply_of(error: Exception) -> dict[str, Any]:
    """The reply to a request that failed."""
    reply: dict[str, Any] = {
        "success": False,
        "error_code": reply_code(error),
        "message": _message(error),
    }
    error = public_error(error)
    if isinstance(error, VersionConflict):
        reply |= error.public_fields()
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
