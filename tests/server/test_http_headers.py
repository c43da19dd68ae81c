"""The headers of a request: found at once, and as Starlette finds them."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.datastructures import Headers

from limpet.server.http_headers import RequestHeaders, headers_of

SENT = [
    (b"host", b"a"),
    (b"if-none-match", b'"1"'),
    (b"if-none-match", b'"2"'),
    (b"x-name", b"caf\xe9"),
    (b"empty", b""),
]


def scope() -> dict[str, Any]:
    return {"type": "http", "headers": [*SENT]}


@pytest.mark.parametrize("name", ["Host", "host", "HOST", "If-None-Match", "X-Name", "Empty", "Missing"])
def test_headers_are_those_of_starlette(name: str) -> None:
    theirs, ours = Headers(scope=scope()), RequestHeaders(scope())

    assert ours.getlist(name) == theirs.getlist(name)
    assert ours.get(name, "none") == theirs.get(name, "none")
    assert ours.first(name) == theirs.get(name)
    assert (name in ours) == (name in theirs)
    assert ours.items() == theirs.items()


def test_headers_are_read_once_for_a_request() -> None:
    request = scope()

    assert headers_of(request) is headers_of(request)
    assert headers_of(scope()) is not headers_of(request)
