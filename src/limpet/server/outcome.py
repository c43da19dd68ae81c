"""The outcome of a request, for logs, metrics, traces and replies: its code, its status, and its error without secrets.

An error of `limpet.errors` has its row in `limpet.protocol.codes`. An error that an interface defines for itself, such
as an unsupported media type, carries its status.
"""

from __future__ import annotations

import json
from typing import Final

from limpet.errors import LimpetError
from limpet.protocol.codes import code_of
from limpet.retry import reason_of
from limpet.server.requests import InvalidJSON, InvalidSubject, MissingField

__all__ = ["Redacted", "error_code", "quote_name", "redact", "reply_code", "status_of"]

_NAME_MAX: Final = 200
_BREAKS_FIELDS: Final = frozenset(' "=\\')
_BY_SHAPE: Final = {
    InvalidJSON: "INVALID_JSON",
    MissingField: "MISSING_FIELD",
    InvalidSubject: "INVALID_SUBJECT",
}


def error_code(error: Exception) -> str:
    """The stable code of an error, ``internal`` for an unexpected one."""
    code = getattr(error, "code", None)
    return code if isinstance(code, str) else "internal"


def status_of(error: Exception) -> int:
    """The HTTP status of an error."""
    status = None if isinstance(error, LimpetError) else _own_status(error)
    return code_of(error).status if status is None else status


def reply_code(error: Exception) -> str:
    """The ``error_code`` of a reply to a plugin. An error of an interface below 500 is a mistake of its caller."""
    if isinstance(error, LimpetError):
        return _BY_SHAPE.get(type(error)) or code_of(error).reply
    status = _own_status(error)
    return "VALIDATION_ERROR" if status is not None and status < 500 else code_of(error).reply


def _own_status(error: Exception) -> int | None:
    """The status that an error of an interface carries."""
    status = getattr(error, "status", None) or getattr(error, "status_code", None)
    return status if isinstance(status, int) else None


def quote_name(name: str) -> str:
    """A name for a line of text: as it is, or quoted and escaped where it could forge another part of the line."""
    cut = name if len(name) <= _NAME_MAX else f"{name[:_NAME_MAX]}…"
    if cut and cut.isprintable() and _BREAKS_FIELDS.isdisjoint(cut):
        return cut
    return json.dumps(cut)


class Redacted(Exception):
    """An error as a log may show it: its kind and its traceback, without its message."""


def redact(error: BaseException, depth: int = 8) -> Redacted:
    """An error and its causes, with their tracebacks and without their messages, which may quote a value."""
    made = Redacted(reason_of(error).partition(" from ")[0])
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    made.__cause__ = None if cause is None or depth == 0 else redact(cause, depth - 1)
    return made.with_traceback(error.__traceback__)
