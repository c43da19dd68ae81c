"""The headers of a request, found by their names.

Starlette compares a name that is looked for with every header that was sent. A request is searched for about ten names,
most of which it does not have, so here its headers are put into a dictionary once, which travels in its scope.
"""

from __future__ import annotations

import functools
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.types import Scope

__all__ = ["RequestHeaders", "headers_of", "raw_name"]

_PLACE: Final = "limpet.headers"


class RequestHeaders(Headers):
    """Starlette's headers, with an index."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope=scope)
        self.by_name: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            self.by_name.setdefault(name, []).append(value)

    def getlist(self, key: str) -> list[str]:
        """The values of all headers of this name."""
        return [value.decode("latin-1") for value in self.by_name.get(raw_name(key), ())]

    def first(self, key: str) -> str | None:
        """The value of the first header of this name."""
        values = self.by_name.get(raw_name(key))
        return None if values is None else values[0].decode("latin-1")

    def __getitem__(self, key: str) -> str:
        values = self.by_name[raw_name(key)]
        return values[0].decode("latin-1")

    def __contains__(self, key: Any) -> bool:
        return raw_name(key) in self.by_name


def headers_of(scope: Scope) -> RequestHeaders:
    """The headers of the request of this scope."""
    found: RequestHeaders | None = scope.get(_PLACE)
    if found is None:
        found = scope[_PLACE] = RequestHeaders(scope)
    return found


@functools.lru_cache(maxsize=256)
def raw_name(name: str) -> bytes:
    """The name of a header as ASGI has it. Only names that this program looks for come here."""
    return name.lower().encode("latin-1")
