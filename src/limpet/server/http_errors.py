"""Errors over HTTP: every one is an ``application/problem+json`` document (RFC 9457).

An error of `limpet.errors` has its code and its status from `limpet.protocol.codes`, and its public fields: the key,
the version found, how long to wait. An error of HTTP alone (a route, a method, a header) is a `Problem` with its own
code. Any other error is a bug: the caller gets status 500 and no details, and the log has the rest. The message of an
engine is not shown either; see `limpet.server.wording`.
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
from limpet.server.wording import Public, public_error

__all__ = ["PROBLEM_TYPE", "Problem", "document_of", "headers_of", "problem_response"]

PROBLEM_TYPE: Final = "application/problem+json"


class Problem(Public):
    """An error of HTTP alone: a route, a method, a header, a body."""

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
    if isinstance(error, LimpetError):
        document = _document(code_of(error).status, error.code, str(error))
        document |= {"retryable": error.retryable, "outcome": error.outcome, **error.public_fields()}
    elif isinstance(error, Problem):
        document = _document(error.status, error.code, str(error))
    elif isinstance(error, HTTPException):
        code = "no_route" if error.status_code == 404 else HTTPStatus(error.status_code).name.lower()
        document = _document(error.status_code, code, HTTPStatus(error.status_code).description)
    else:
        document = _document(500, "internal", "Something went wrong on the server.")
    return {name: _escape_surrogates(item) if isinstance(item, str) else item for name, item in document.items()}


def headers_of(error: Exception) -> dict[str, str]:
    """The headers of a response to an error."""
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


def _escape_surrogates(text: str) -> str:
    """Escape what JSON cannot carry: an invalid key may hold a lone surrogate."""
    return text.encode(errors="backslashreplace").decode()
