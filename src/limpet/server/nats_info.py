"""The description of the service on NATS, as a NATS micro service (NATS ADR-32).

A client that may use ``$SRV.PING``, ``$SRV.INFO`` and ``$SRV.STATS`` learns which servers run, which subjects they
serve with which schemas of requests and replies, and how many requests they had.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

import limpet
from limpet.server import requests
from limpet.server.nats_requests import KEY_LENGTH_MAX, TTL_S_MAX, NatsEndpoint
from limpet.server.nats_watch import is_answerable

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

__all__ = ["SERVICE", "MicroService", "request_schema"]

SERVICE: Final = "limpet"


class MicroService:
    """Replies to the discovery requests of NATS micro services."""

    def __init__(
        self, connection: Client, server_id: str, endpoints: Mapping[str, NatsEndpoint], *, prefix: str, queue: str
    ) -> None:
        self._connection = connection
        self._id = server_id
        self._endpoints = endpoints
        self._prefix = prefix
        self._queue = queue
        self._started_at = datetime.now(UTC)
        self._subscriptions: list[Subscription] = []

    async def start(self) -> None:
        """Subscribe to the discovery subjects."""
        for verb, describe in (("PING", self.ping), ("INFO", self.info), ("STATS", self.stats)):
            for subject in (f"$SRV.{verb}", f"$SRV.{verb}.{SERVICE}", f"$SRV.{verb}.{SERVICE}.{self._id}"):
                self._subscriptions.append(await self._connection.subscribe(subject, cb=self._replier(describe)))

    async def stop(self) -> None:
        """Reply to no more discovery requests."""
        subscriptions, self._subscriptions = self._subscriptions, []
        for subscription in subscriptions:
            await subscription.unsubscribe()

    def _replier(self, describe: Callable[[], dict[str, Any]]) -> Callable[[Msg], Awaitable[None]]:
        async def reply(message: Msg) -> None:
            if is_answerable(message.reply, None):
                await self._connection.publish(message.reply, msgspec.json.encode(describe()))

        return reply

    def ping(self) -> dict[str, Any]:
        """The identity of this server."""
        return self._identity("ping")

    def info(self) -> dict[str, Any]:
        """The subjects that it serves, with their schemas."""
        return {
            **self._identity("info"),
            "description": "State of plugins: keys and values that must not be lost",
            "endpoints": [
                {
                    "name": name,
                    "subject": self._subject(name),
                    "queue_group": self._queue,
                    "metadata": {
                        "request_schema": msgspec.json.encode(request_schema(endpoint.shape)).decode(),
                        "reply_schema": msgspec.json.encode(_reply_schema(name)).decode(),
                    },
                }
                for name, endpoint in self._endpoints.items()
            ],
        }

    def stats(self) -> dict[str, Any]:
        """How many requests each subject had, and how long they took."""
        return {
            **self._identity("stats"),
            "started": self._started_at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "endpoints": [
                {
                    "name": name,
                    "subject": self._subject(name),
                    "queue_group": self._queue,
                    "num_requests": endpoint.requests,
                    "num_errors": endpoint.errors,
                    "last_error": endpoint.last_error,
                    "processing_time": round(endpoint.seconds * 1e9),
                    "average_processing_time": round(endpoint.seconds * 1e9 / max(1, endpoint.requests)),
                    "data": None,
                }
                for name, endpoint in self._endpoints.items()
            ],
        }

    def _identity(self, verb: str) -> dict[str, Any]:
        return {
            "type": f"io.nats.micro.v1.{verb}_response",
            "name": SERVICE,
            "id": self._id,
            "version": limpet.__version__,
            "metadata": {"prefix": self._prefix},
        }

    def _subject(self, name: str) -> str:
        return f"{self._prefix}.*.{name}"


def request_schema(shape: type[requests.Request]) -> dict[str, Any]:
    """The JSON schema of a request, with the narrower rules of plugins."""
    schema = msgspec.json.schema(shape)
    for part in schema.get("$defs", {}).values():
        properties = part.get("properties", {})
        for name in ("key", "name"):
            if name in properties:
                properties[name] |= {"minLength": 1, "maxLength": KEY_LENGTH_MAX}
        if "ttl" in properties:
            whole = {"type": "integer", "minimum": 1, "maximum": TTL_S_MAX}
            takes_null = {"type": "null"} in properties["ttl"].get("anyOf", [])
            properties["ttl"] = {"anyOf": [whole, {"type": "null"}]} if takes_null else whole
    return schema


def _reply_schema(name: str) -> dict[str, Any]:
    """The JSON schema of a reply: one of a success, or of an error."""
    properties = {"success": {"const": True}, **_REPLIES.get(name, {})}
    success = {"type": "object", "properties": properties, "required": ["success"]}
    return {"oneOf": [success, _ERROR]}


_ERROR: Final = {
    "type": "object",
    "properties": {"success": {"const": False}, "error_code": {"type": "string"}, "message": {"type": "string"}},
    "required": ["success", "error_code", "message"],
}
_BOOLEAN: Final = {"type": "boolean"}
_INTEGER: Final = {"type": "integer"}
_OBJECT: Final = {"type": "object"}
_STAMP: Final = {"version": _INTEGER, "revision": _INTEGER}
_TEXT: Final = {"type": "string"}
_OBJECTS: Final = {"type": "array", "items": _OBJECT}
_ENVELOPE: Final = {
    **dict.fromkeys(("key", "lastWriter", "requestId", "specRef", "updatedAt", "expiresAt"), _TEXT),
    **{"value": _OBJECT, "semantics": _OBJECT, "token": _INTEGER, **_STAMP},
}
_REPLIES: Final[dict[str, dict[str, Any]]] = {
    "get": {"exists": _BOOLEAN, "value": {}},
    "delete": {"deleted": _BOOLEAN},
    "delete_prefix": {"deleted": _INTEGER, "truncated": _BOOLEAN},
    "list": {"keys": {"type": "array", "items": {"type": "string"}}, "count": _INTEGER, "truncated": _BOOLEAN},
    "children": {"children": _OBJECTS, "truncated": _BOOLEAN, "cursor": {"type": ["string", "null"]}},
    "entry": {"exists": _BOOLEAN, "entry": _OBJECT},
    "remaining": {"exists": _BOOLEAN, "remaining": {"type": ["number", "null"]}},
    "entries": {"entries": {"type": "array", "items": {"type": ["object", "null"]}}},
    "put": {"entry": _OBJECT},
    "append": {"entry": _OBJECT},
    "cas": _STAMP,
    "incr": {"value": _INTEGER},
    "take": {"exists": _BOOLEAN, "value": {}},
    "touch": {"exists": _BOOLEAN, "entry": _OBJECT},
    "fields": {"exists": _BOOLEAN, "fields": _OBJECT, "swapped": _BOOLEAN, **_STAMP},
    "watch": {"watch": {"type": "string"}, "subject": {"type": "string"}, "heartbeat": {"type": "number"}},
    "unwatch": {"ended": _BOOLEAN},
    "lock": {"token": _INTEGER},
    "outcome": {"applied": _BOOLEAN, "revision": _INTEGER},
    "kv_get": {"exists": _BOOLEAN, **_ENVELOPE},
    "kv_put": {**_ENVELOPE, "replayed": _BOOLEAN},
    "kv_delete": {"deleted": _BOOLEAN},
    "kv_list": {"entries": _OBJECTS, "truncated": _BOOLEAN, "cursor": {"type": ["string", "null"]}},
    "kv_batch": {"entries": {"type": "array", "items": {"type": ["object", "null"]}}},
}
