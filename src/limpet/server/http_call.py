"""One exchange over HTTP: what came is made into a request of an operation, and its answer into a response.

Who asks is known first. Then the path, the query, the headers and the body each give members of the request, and the
dispatcher does the rest. Nothing here knows what an operation does.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from limpet.errors import Closed, PermissionDenied
from limpet.server.dispatch import Caller, Callers, Dispatcher, TrustedCaller
from limpet.server.events import Streams, WatchResponse, until_refused
from limpet.server.fronts import OwnIds
from limpet.server.http_errors import Problem
from limpet.server.operations import OPERATIONS
from limpet.server.parameters import Parameter, add, gather, query_of
from limpet.server.requests import InvalidJSON, Watch, parse, request_of

__all__ = [
    "BYTES_TYPE",
    "JSON_TYPE",
    "RECORD_TYPE",
    "VALUE_TYPES",
    "Answered",
    "Endpoint",
    "HttpCall",
    "TokenRefused",
    "bearer_of",
    "caller_of",
    "json_response",
]

JSON_TYPE: Final = "application/json"
BYTES_TYPE: Final = "application/octet-stream"
RECORD_TYPE: Final = "application/vnd.limpet.record+json"

VALUE_TYPES: Final[Mapping[str, Sequence[str]]] = {
    "value": (JSON_TYPE, BYTES_TYPE, RECORD_TYPE),
    "bytes": (BYTES_TYPE,),
    "record": (RECORD_TYPE, JSON_TYPE),
}
"""The media types of a body that is a value to store, by what an endpoint takes."""


class Answered(NamedTuple):
    """What a status brings along, for whoever reads the description: a media type and the name of a schema."""

    schema: str | None = None
    media_types: Sequence[str] = (JSON_TYPE,)
    headers: Sequence[str] = ()


class Endpoint(NamedTuple):
    """A row of the table of routes.

    Attributes:
        path: As Starlette takes it. Its parameters are members of the request, the namespace aside.
        answer: What makes the response. The first line of its docstring is the summary in the description.
        parameters: What may stand in the query and in the headers.
        body: What may be in the body: a value to store, or the members of this shape that the path does not give.
        answers: What comes back, by status, if all is well.
    """

    method: str
    path: str
    answer: Callable[[HttpCall], Awaitable[Response]]
    answers: Mapping[int, Answered]
    parameters: Sequence[Parameter] = ()
    body: type[msgspec.Struct] | Literal["value", "bytes", "record"] | None = None


class HttpCall:
    """A request over HTTP on its way to the dispatcher.

    Attributes:
        request: As it came.
        caller: Who asks.
        namespace: Where.
    """

    caller: Caller = TrustedCaller("unknown")

    def __init__(
        self, request: Request, endpoint: Endpoint, dispatcher: Dispatcher, callers: Callers, streams: Streams
    ) -> None:
        self.request = request
        self.namespace: str = request.path_params.get("namespace", "")
        self._endpoint = endpoint
        self._desk = dispatcher
        self._callers = callers
        self._streams = streams
        self._has_run = False

    async def respond(self) -> Response:
        """Answer it. What fails before the dispatcher hears of it is told there too."""
        try:
            self.caller = await caller_of(self.request, self._callers)
            return await self._endpoint.answer(self)
        except ClientDisconnect:
            # It left before it had said what it wants: no request, and nothing for the log to say of each.
            raise
        except Exception as error:
            if not self._has_run:
                self._desk.refused(self.caller, self.namespace, self._endpoint.answer.__name__, error)
            raise

    async def members(self) -> dict[str, Any]:
        """What the path, the query, the headers and the body say."""
        named = {name: part for name, part in self.request.path_params.items() if name != "namespace"}
        beside = gather(
            self._endpoint.parameters, query_of(self.request.scope["query_string"]), self.request.headers.getlist
        )
        add(named, beside, "the path")
        body = await self._body()
        add(named, body, "the body")
        return named

    def header(self, name: str) -> str | None:
        """A header, all of its lines together."""
        found = self.request.headers.getlist(name)
        return ", ".join(found) if found else None

    async def run(self, name: str, members: Mapping[str, Any]) -> dict[str, Any]:
        """Run an operation."""
        operation = OPERATIONS[name]
        asked = request_of(operation.request, members)
        self._has_run = True
        return await self._desk.run(operation, self.namespace, asked, self.caller)

    async def run_while_wanted(self, name: str, members: Mapping[str, Any]) -> dict[str, Any]:
        """Run an operation that may wait for long, until the client goes or the server ends."""
        running = asyncio.ensure_future(self.run(name, members))

        async def check() -> None:
            caller = await caller_of(self.request, self._callers)
            operation = OPERATIONS[name]
            self._desk.check_rights(operation, self.namespace, request_of(operation.request, members), caller)

        refused = asyncio.ensure_future(until_refused(check, self._callers))
        others = [asyncio.ensure_future(self._gone()), asyncio.ensure_future(self._streams.ended()), refused]
        try:
            await asyncio.wait({running, *others}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                return running.result()
            if refused.done():
                raise refused.result()
            raise Closed("the server is about to end: ask another, or try again later")
        finally:
            for one in (running, *others):
                one.cancel()
            await asyncio.gather(running, *others, return_exceptions=True)

    async def watch(self, members: Mapping[str, Any]) -> Response:
        """Begin a stream of events."""
        operation = OPERATIONS["watch"]
        asked = request_of(Watch, members)
        self._streams.check_room(self.caller.name)
        store = await self._desk.admit(operation, self.namespace, asked, self.caller)
        watch = store.watch(asked.pattern, after=asked.after, initial=asked.initial)
        await watch.__aenter__()

        async def check() -> None:
            caller = await caller_of(self.request, self._callers)
            self._desk.check_rights(operation, self.namespace, asked, caller)

        engine = self._desk.session_of(self.caller, self.namespace).engine
        return WatchResponse(
            watch,
            self._streams,
            self.caller.name,
            until_refused=lambda: until_refused(check, self._callers),
            given_id=engine.given if isinstance(engine, OwnIds) else None,
        )

    async def _gone(self) -> None:
        while (await self.request.receive())["type"] != "http.disconnect":
            pass

    async def _body(self) -> dict[str, Any]:
        if self._endpoint.body is None:
            return {}
        body = await self.request.body()
        kind = self._content_type(has_body=bool(body))
        if not isinstance(self._endpoint.body, str):
            members = parse(body) if body else {}
            if not isinstance(members, dict):
                raise InvalidJSON("Invalid JSON: a request is an object")
            return members
        if kind == BYTES_TYPE:
            return {"bytes": b64encode(body).decode()}
        is_record = kind == RECORD_TYPE or self._endpoint.body == "record"
        return {"fields" if is_record else "value": parse(body)}

    def _content_type(self, *, has_body: bool) -> str:
        """The media type of the body, which must be one that this endpoint takes.

        A body without a type is refused as well: a page of another origin can send one, but none of these types.
        """
        takes = self._endpoint.body
        taken = VALUE_TYPES[takes] if isinstance(takes, str) else (JSON_TYPE,)
        given, _, rest = (self.header("Content-Type") or "").partition(";")
        charset = rest.strip().lower().replace('"', "")
        known = given.strip().lower() in taken and charset in ("", "charset=utf-8")
        if (has_body or given) and not known:
            raise Problem(415, "unsupported_media_type", f"send {' or '.join(taken)}, in UTF-8")
        if (self.header("Content-Encoding") or "identity").lower() != "identity":
            raise Problem(415, "unsupported_media_type", "send the body as it is, not compressed")
        return given.strip().lower()


class TokenRefused(PermissionDenied):
    """The token of a request is missing, or is not good. ``problem`` is the word of RFC 6750, if there is one."""

    def __init__(self, detail: str, problem: str | None) -> None:
        super().__init__(detail)
        self.problem = problem


async def bearer_of(request: Request, callers: Callers) -> Caller:
    """Who sent a request, by its one Authorization header. Every route that asks uses this. Raises `TokenRefused`."""
    given = request.headers.getlist("Authorization")
    scheme, _, token = given[0].partition(" ") if given else ("", "", "")
    if given and (len(given) > 1 or scheme.lower() != "bearer" or not token.strip()):
        raise TokenRefused("send one Authorization header: Bearer and a token", "invalid_request")
    client = None if request.client is None else request.client.host
    try:
        return await callers.caller_of(token.strip() if given else None, client)
    except PermissionDenied as error:
        raise TokenRefused(str(error), "invalid_token" if given else None) from None


async def caller_of(request: Request, callers: Callers) -> Caller:
    """Who sent a request. Raises a `Problem` of status 401 when its token is missing or is not good."""
    try:
        return await bearer_of(request, callers)
    except TokenRefused as error:
        challenge = 'Bearer realm="limpet"' + (f', error="{error.problem}"' if error.problem else "")
        raise Problem(401, "unauthorized", str(error), headers={"WWW-Authenticate": challenge}) from None


def json_response(document: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON document as a response."""
    return Response(msgspec.json.encode(document), status, dict(headers or {}), media_type=JSON_TYPE)
