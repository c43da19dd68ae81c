"""Requests on NATS subjects: how the body of a message becomes a request, and the rules that only plugins have.

Plugins have shorter keys than other callers, and their times to live are whole seconds. The shapes themselves are in
`limpet.server.requests`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET

from limpet.errors import InvalidKey, InvalidTTL
from limpet.server import requests
from limpet.server.operations import Operation

__all__ = ["KEY_LENGTH_MAX", "TTL_S_MAX", "NatsEndpoint", "decode_request", "request_keys"]

KEY_LENGTH_MAX: Final = 255
TTL_S_MAX: Final = 2_147_483_647


class NatsEndpoint:
    """One operation on NATS: the decoder of its requests, and how often it was used."""

    __slots__ = ("decode", "errors", "last_error", "operation", "requests", "seconds", "shape")

    def __init__(self, operation: Operation, shape: type[requests.Request]) -> None:
        self.operation = operation
        self.shape = shape
        # One step, which is enough for a valid request; `requests.parse` finds what is wrong with any other.
        self.decode: Callable[[bytes], requests.Request] = msgspec.json.Decoder(shape).decode
        self.requests = 0
        self.errors = 0
        self.seconds = 0.0
        self.last_error = ""


def decode_request(endpoint: NatsEndpoint, body: bytes) -> requests.Request:
    """Decode a body by the shape of its operation, and check it by the narrower rules of plugins."""
    try:
        request = endpoint.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # Decode again step by step: this raises an error that names the fault.
        request = requests.request_of(endpoint.shape, requests.parse(body))
    _check(request)
    if isinstance(request, requests.Batch):
        for part in _batch_parts(request):
            _check(part)
    return request


def _check(request: Any) -> None:
    key = getattr(request, "key", None) or getattr(request, "name", None)
    for one in [key, *getattr(request, "keys", ())]:
        if one is not None and len(one) > KEY_LENGTH_MAX:
            raise InvalidKey(one, f"it is {len(one):,} characters, limit {KEY_LENGTH_MAX}")
    ttl = getattr(request, "ttl", None)
    if ttl is not None and ttl is not UNSET and (type(ttl) is not int or not 1 <= ttl <= TTL_S_MAX):
        error = InvalidTTL("")
        error.args = (f"ttl is a whole number of seconds from 1 to {TTL_S_MAX}, or null for never",)
        raise error


def _batch_parts(batch: requests.Batch) -> list[requests.BatchWrite | requests.BatchGuard]:
    return [*batch.writes, *batch.guards]


def request_keys(request: Any) -> Sequence[str]:
    """The keys that a request names, each once."""
    if isinstance(request, requests.Batch):
        return [*dict.fromkeys(part.key for part in _batch_parts(request))]
    if isinstance(request, requests.Entries):
        return [*dict.fromkeys(request.keys)]
    if isinstance(request, requests.KvPut | requests.KvDelete | requests.KvBatch):
        written = [item.key for item in request.items] if isinstance(request, requests.KvBatch) else [request.key]
        return [*dict.fromkeys([*written, *([] if request.held is None else [request.held.key])])]
    key = getattr(request, "key", None)
    return () if key is None else (key,)
