"""What went wrong, as HTTP tells it: ``application/problem+json`` (RFC 9457), whatever it was.

An error of `limpet.errors` keeps its code and its status from `limpet.protocol.codes`, and brings along what it
carries: the key, the version found, how long to wait. What HTTP alone can get wrong (a route, a method, a header) has
a code of its own here. Anything else is the program's fault: the caller learns nothing but that, and the log has the
rest. What an engine says of a failure is not shown either; see `limpet.server.wording`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from limpet.errors import LimpetError
from limpet.protocol.codes import code_of
from limpet.semantic.store import VersionConflict
from limpet.server.audited import conflict_document
from limpet.server.wording import Public, public_error

__all__ = ["PROBLEM_TYPE", "Problem", "document_of", "headers_of", "problem_response"]

PROBLEM_TYPE: Final = "application/problem+json"

# The attributes of our errors that a caller may see. The entry that a conflict found is not among them: it has a value.
_TOLD: Final = (
    *("key", "field", "expected", "path", "name", "holder", "token", "remaining", "oldest", "attempts", "request_id"),
    *("size_bytes", "limit_bytes", "retry_after"),
)
_RENAMED: Final = {"actual_version": "version", "actual_revision": "revision"}


class Problem(Public):
    """Something that only HTTP can get wrong."""

    def __init__(self, status: int, code: str, detail: str, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.code, self.headers = status, code, dict(headers or {})


def problem_response(error: Exception) -> Response:
    """An error as a response."""
    document = document_of(error)
    body = msgspec.json.encode(document)
    return Response(body, document["status"], headers_of(error), media_type=PROBLEM_TYPE)


def document_of(error: Exception) -> dict[str, Any]:
    """An error as a problem document."""
    error = public_error(error)
    if isinstance(error, VersionConflict):
        document = _document(code_of(error).status, error.code, str(error))
        document |= {"retryable": error.retryable, "outcome": error.outcome}
        document |= {name: item for name, item in conflict_document(error).items() if name != "message"}
    elif isinstance(error, LimpetError):
        told = {name: getattr(error, name) for name in _TOLD if getattr(error, name, None) is not None}
        told |= {shown: getattr(error, name) for name, shown in _RENAMED.items() if hasattr(error, name)}
        document = _document(code_of(error).status, error.code, str(error))
        document |= {"retryable": error.retryable, "outcome": error.outcome, **told}
    elif isinstance(error, Problem):
        document = _document(error.status, error.code, str(error))
    elif isinstance(error, HTTPException):
        code = "no_route" if error.status_code == 404 else HTTPStatus(error.status_code).name.lower()
        document = _document(error.status_code, code, HTTPStatus(error.status_code).description)
    else:
        document = _document(500, "internal", "Something went wrong on the server.")
    return {name: _as_text(item) if isinstance(item, str) else item for name, item in document.items()}


def headers_of(error: Exception) -> dict[str, str]:
    """What an error says in headers."""
    retry_after = getattr(error, "retry_after", None)
    found = {} if retry_after is None else {"Retry-After": str(max(1, math.ceil(retry_after)))}
    return found | dict(getattr(error, "headers", None) or {})


def _document(status: int, code: str, detail: str) -> dict[str, Any]:
    return {
        "type": f"urn:limpet:{code}",
        "title": code.replace("_", " ").capitalize(),
        "status": status,
        "detail": detail,
        "code": code,
    }


def _as_text(text: str) -> str:
    """A text that JSON can carry: a key that was refused may hold a lone surrogate."""
    return text.encode(errors="backslashreplace").decode()
