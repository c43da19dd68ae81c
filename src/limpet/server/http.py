"""HTTP: the application, the checks at its edge, and the way of a request from a socket to the dispatcher and back.

`EdgeMiddleware` checks what concerns every request. `HttpCall` then identifies the caller, reads the parameters and the
body by the row of the route (`limpet.server.http_routes`), has the dispatcher run the operation, and lets the row make
the response. An error anywhere on the way becomes a problem document, in one place, at the edge.

`VerbRouter` finds most routes by the verb in their path. Starlette tries one route after the other, behind two layers
of middleware, which was a fifth of the time of a read. It still has all routes, and serves what the router does not
know.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl

import msgspec
from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as Incoming
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from limpet import __version__
from limpet.errors import Closed, InvalidValue, LimpetError, PermissionDenied
from limpet.keys import Span
from limpet.retry import reason_of
from limpet.server.dispatch import Caller, Callers, Dispatcher, TrustedCaller
from limpet.server.events import STREAMS_MAX, Streams, WatchResponse, until_refused
from limpet.server.fronts import OwnIds
from limpet.server.hosts import host_name, is_known
from limpet.server.http_errors import Problem, problem_response
from limpet.server.http_headers import RequestHeaders, headers_of, raw_name
from limpet.server.http_routes import (
    BYTES_TYPE,
    ENDPOINTS,
    JSON_TYPE,
    RECORD_TYPE,
    VALUE_TYPES,
    Endpoint,
    json_response,
)
from limpet.server.openapi import describe
from limpet.server.operations import OPERATIONS, Operation
from limpet.server.outcome import quote_name, redact
from limpet.server.parameters import Members, Parameter, percent_decode
from limpet.server.requests import InvalidJSON, Request, parse, request_of

__all__ = ["BODY_BYTES_MAX", "TokenRefused", "identify", "make_app", "streams_of"]

BODY_BYTES_MAX: Final = 5_000_000
BODIES_BYTES_MAX: Final = 64_000_000
QUERY_MAX: Final = 200
ACCEPTED_MAX: Final = 100
ACCEPTED_LENGTH_MAX: Final = 100

log = logging.getLogger("limpet.http")


class _Key(Convertor[str]):
    """The rest of a path, with any character: Starlette's own convertor stops at a line break, which a key may hold."""

    regex = r"[\s\S]*"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("key", _Key())


# The application --------------------------------------------------------------


def make_app(
    dispatcher: Dispatcher,
    *,
    callers: Callers,
    ready: Callable[[], bool],
    metrics: Callable[[], Awaitable[bytes]] | None = None,
    more_routes: Sequence[BaseRoute] = (),
    body_bytes_max: int = BODY_BYTES_MAX,
    bodies_bytes_max: int = BODIES_BYTES_MAX,
    hosts: Sequence[str] = (),
    streams_max: int = STREAMS_MAX,
) -> Starlette:
    """The HTTP application of a server.

    Args:
        dispatcher: Runs the operations.
        callers: Identifies a caller by its token.
        ready: Whether requests are served now; False while the server starts and while it drains.
        metrics: Renders ``/metrics``, in the text format of Prometheus.
        more_routes: Routes of other modules. Errors that they raise become problem documents too.
        body_bytes_max: How large the body of a request may be.
        bodies_bytes_max: How large the bodies of all requests under way may be together.
        hosts: The names of the server. A request to another name is refused; if empty, any name is accepted.
        streams_max: How many watches may be open.
    """
    streams = Streams(most=streams_max)
    described = msgspec.json.encode(describe(ENDPOINTS))

    async def alive(_: Incoming) -> Response:
        return json_response({"status": "alive"})

    async def readiness(_: Incoming) -> Response:
        if not ready():
            detail = "the server starts or stops, or its store does not answer; try again later"
            raise Problem(503, "not_ready", detail, headers={"Retry-After": "1"})
        return json_response({"status": "ready"})

    async def openapi(_: Incoming) -> Response:
        return Response(described, media_type=JSON_TYPE)

    async def index(_: Incoming) -> Response:
        paths = {
            "openapi": "/openapi.json",
            "health": "/healthz",
            "readiness": "/readyz",
            "entries": "/v1/{namespace}/entries/{key}",
        }
        return json_response({"name": "limpet", "version": __version__, **paths})

    async def list_namespaces(incoming: Incoming) -> Response:
        caller = await authenticate(incoming, callers)
        return json_response({"namespaces": await dispatcher.list_namespaces(caller)})

    async def show_metrics(incoming: Incoming) -> Response:
        caller = await authenticate(incoming, callers)
        # They are about every namespace, so they take a right on all of them.
        everything = [Span("", None)]
        if not any(caller.may("*", right, everything) for right in ("admin", "read")):
            raise PermissionDenied(f"{caller.name!r} lacks the read right on all namespaces, which metrics take")
        assert metrics is not None
        return Response(await metrics(), media_type="text/plain; version=0.0.4")

    app = Starlette(
        routes=[
            Route("/", index),
            Route("/healthz", alive),
            Route("/readyz", readiness),
            Route("/openapi.json", openapi),
            Route("/v1/namespaces", list_namespaces),
            *([Route("/metrics", show_metrics)] if metrics is not None else []),
            *_routes(dispatcher, callers, streams),
            *more_routes,
        ],
    )
    # In place of Starlette's own middleware, which makes responses of errors: here the edge makes all of them.
    edge = EdgeMiddleware(
        VerbRouter(app.router), body_bytes_max=body_bytes_max, bodies_bytes_max=bodies_bytes_max, hosts=hosts
    )
    app.middleware_stack = edge
    app.router.redirect_slashes = False
    app.state.streams = streams
    return app


def streams_of(app: Starlette) -> Streams:
    """The streams of an application, to be closed when the server ends."""
    streams: Streams = app.state.streams
    return streams


def _routes(dispatcher: Dispatcher, callers: Callers, streams: Streams) -> Iterable[Route]:
    paths: dict[str, dict[str, Endpoint]] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method] = endpoint
    for path, methods in paths.items():
        yield Route(path, _Path(methods, dispatcher, callers, streams))


class _Path:
    """The endpoints of one path."""

    def __init__(
        self, methods: dict[str, Endpoint], dispatcher: Dispatcher, callers: Callers, streams: Streams
    ) -> None:
        self._methods = {"HEAD": methods["GET"], **methods} if "GET" in methods else methods
        self._shared = (dispatcher, callers, streams)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._methods.get(scope["method"])
        if endpoint is None:
            raise _method_not_allowed(sorted(self._methods))
        response = await HttpCall(Incoming(scope, receive, send), endpoint, *self._shared).respond()
        await response(scope, receive, send)


def _method_not_allowed(methods: Sequence[str]) -> Problem:
    *others, last = methods
    choice = f"{', '.join(others)} or {last}" if others else last
    detail = f"method not allowed; use {choice}"
    return Problem(405, "method_not_allowed", detail, headers={"Allow": ", ".join(methods)})


_VERSION: Final = "/v1/"
_VERB_PATH: Final = re.compile(r"/v1/\{namespace\}/([a-z]+)/\{([a-z_]+)(:key)?\}")


class _Road(NamedTuple):
    """A route with a path of the form ``/v1/{namespace}/verb/{rest}``."""

    route: Route
    rest: str
    takes_any: bool


class VerbRouter:
    """Finds the route of ``/v1/{namespace}/verb/{rest}`` by its verb, and leaves every other path to Starlette."""

    def __init__(self, router: Router) -> None:
        self._router = router

    @functools.cached_property
    def _roads(self) -> Mapping[str, _Road]:
        # Made with the first request: routes may be added until then. The first one of a verb counts, as in Starlette.
        roads: dict[str, _Road] = {}
        for route in self._router.routes:
            form = _VERB_PATH.fullmatch(route.path) if isinstance(route, Route) else None
            if form is not None:
                assert isinstance(route, Route)
                roads.setdefault(form[1], _Road(route, form[2], form[3] is not None))
        return roads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to its route."""
        found = self.find(scope)
        if found is None:
            await self._router(scope, receive, send)
            return
        route, scope["path_params"] = found
        await route.app(scope, receive, send)

    def find(self, scope: Scope) -> tuple[Route, dict[str, str]] | None:
        """The route of a request and the parameters in its path, as Starlette would find them; None if it must."""
        if scope["type"] != "http" or not scope["path"].startswith(_VERSION) or scope.get("root_path"):
            return None
        namespace, _, path = scope["path"][len(_VERSION) :].partition("/")
        verb, slash, rest = path.partition("/")
        road = self._roads.get(verb)
        if road is None or not namespace or not slash or not _fits(road, scope["method"], rest):
            return None
        return road.route, {"namespace": namespace, road.rest: rest}


def _fits(road: _Road, method: str, rest: str) -> bool:
    """Whether Starlette would take this route as well."""
    takes_method = road.route.methods is None or method in road.route.methods
    return takes_method and (road.takes_any or (rest != "" and "/" not in rest))


# A call -----------------------------------------------------------------------


class HttpCall:
    """One request over HTTP, until its response.

    Attributes:
        caller: The sender, once it is identified.
        namespace: The namespace in the path.
    """

    caller: Caller = TrustedCaller("unknown")

    def __init__(
        self, incoming: Incoming, endpoint: Endpoint, dispatcher: Dispatcher, callers: Callers, streams: Streams
    ) -> None:
        self.namespace: str = incoming.path_params.get("namespace", "")
        self._incoming = incoming
        self._headers = headers_of(incoming.scope)
        self._endpoint = endpoint
        self._dispatcher = dispatcher
        self._callers = callers
        self._streams = streams
        self._has_run = False

    async def respond(self) -> Response:
        """Run the operation and make its response. A request that is refused before that is reported here."""
        endpoint = self._endpoint
        try:
            self.caller = await authenticate(self._incoming, self._callers)
            members = await self.parameters()
            operation = endpoint.operation or _find_operation(members.pop("operation"))
            if endpoint.shape is not None:
                members = endpoint.shape(members, self.caller.name)
            request = request_of(operation.request, members)
            if endpoint.runs == "stream":
                return await self._watch(operation, request)
            run = self._run_while_connected if endpoint.runs == "wait" else self._run
            return endpoint.reply(await run(operation, request), request, self._headers)
        except ClientDisconnect:
            # The client left before its request was complete. A log line for each would only be noise.
            raise
        except Exception as error:
            if not self._has_run:
                self._dispatcher.report_refusal(self.caller, self.namespace, endpoint.name, error)
            raise

    async def parameters(self) -> Members:
        """The members of a request that the path, the query, the headers and the body have."""
        incoming = self._incoming
        members = {name: part for name, part in incoming.path_params.items() if name != "namespace"}
        query = read_query(incoming.scope["query_string"])
        merge(members, read_parameters(self._endpoint.parameters, query, self._headers), "the path")
        merge(members, await self._read_body(), "the body")
        return members

    async def _run(self, operation: Operation, request: Request) -> dict[str, Any]:
        self._has_run = True
        return await self._dispatcher.run(operation, self.namespace, request, self.caller)

    async def _run_while_connected(self, operation: Operation, request: Request) -> dict[str, Any]:
        """Run an operation that may wait for long, until the client leaves, loses its right, or the server ends."""
        running = asyncio.ensure_future(self._run(operation, request))
        refused = asyncio.ensure_future(self._until_refused(operation, request))
        others = [asyncio.ensure_future(self._disconnected()), asyncio.ensure_future(self._streams.ended()), refused]
        try:
            await asyncio.wait({running, *others}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                return running.result()
            if refused.done():
                raise refused.result()
            raise Closed("the server is about to end: use another, or try again later")
        finally:
            for one in (running, *others):
                one.cancel()
            await asyncio.gather(running, *others, return_exceptions=True)

    async def _watch(self, operation: Operation, request: Any) -> Response:
        """Begin a stream of events."""
        self._streams.check_room(self.caller.name)
        store = await self._dispatcher.admit(operation, self.namespace, request, self.caller)
        watch = store.watch(request.pattern, after=request.after, initial=request.initial)
        await watch.__aenter__()
        engine = self._dispatcher.session_of(self.caller, self.namespace).engine
        return WatchResponse(
            watch,
            self._streams,
            self.caller.name,
            until_refused=lambda: self._until_refused(operation, request),
            given_id=engine.given if isinstance(engine, OwnIds) else None,
        )

    async def _until_refused(self, operation: Operation, request: Request) -> Exception:
        """Wait until the caller may no longer have what it waits for, and return why."""

        async def check() -> None:
            caller = await authenticate(self._incoming, self._callers)
            self._dispatcher.check_rights(operation, self.namespace, request, caller)

        return await until_refused(check, self._callers)

    async def _disconnected(self) -> None:
        while (await self._incoming.receive())["type"] != "http.disconnect":
            pass

    async def _read_body(self) -> Members:
        if self._endpoint.body is None:
            return {}
        body = await _receive_body(self._incoming.receive)
        kind = self._check_content_type(has_body=bool(body))
        if not isinstance(self._endpoint.body, str):
            members = parse(body) if body else {}
            if not isinstance(members, dict):
                raise InvalidJSON("Invalid JSON: a request is an object")
            return members
        if kind == BYTES_TYPE:
            return {"bytes": body}
        is_record = kind == RECORD_TYPE or self._endpoint.body == "record"
        return {"fields" if is_record else "value": parse(body)}

    def _check_content_type(self, *, has_body: bool) -> str:
        """Return the media type of the body, which must be one that this endpoint takes.

        A body without a type is refused as well: a page of another origin can send one, but none of these types.
        """
        takes = self._endpoint.body
        taken = VALUE_TYPES[takes] if isinstance(takes, str) else (JSON_TYPE,)
        sent = self._header("Content-Type")
        if sent in taken and not self._header("Content-Encoding"):
            return sent
        given, _, rest = sent.partition(";")
        charset = rest.strip().lower().replace('"', "")
        is_taken = given.strip().lower() in taken and charset in ("", "charset=utf-8")
        if (has_body or given) and not is_taken:
            raise Problem(415, "unsupported_media_type", f"send {' or '.join(taken)}, in UTF-8")
        if (self._header("Content-Encoding") or "identity").lower() != "identity":
            raise Problem(415, "unsupported_media_type", "send the body as it is, not compressed")
        return given.strip().lower()

    def _header(self, name: str) -> str:
        """A header, all of its lines together; empty if it has none."""
        return ", ".join(self._headers.getlist(name))


async def _receive_body(receive: Receive) -> bytes:
    """The body of a request, whose size the edge limits."""
    parts: list[bytes] = []
    has_more = True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        has_more = message.get("more_body", False)
    return b"".join(parts)


def _find_operation(name: str) -> Operation:
    if name not in OPERATIONS:
        raise Problem(404, "no_operation", "there is no operation of this name")
    return OPERATIONS[name]


# Parameters -------------------------------------------------------------------


def read_query(raw: bytes) -> list[tuple[str, str]]:
    """The names and values of a query, decoded strictly."""
    if not raw:
        return []
    try:
        # A plus sign is a space in a query, and nowhere else.
        percent_decode(raw)
        return parse_qsl(
            raw.decode("ascii"), keep_blank_values=True, encoding="utf-8", errors="strict", max_num_fields=QUERY_MAX
        )
    except ValueError as problem:
        detail = "it is not UTF-8" if isinstance(problem, UnicodeError) else str(problem)
        raise InvalidValue(f"the query cannot be read: {detail}") from None


def read_parameters(
    parameters: Sequence[Parameter], query: Sequence[tuple[str, str]], headers: RequestHeaders
) -> Members:
    """The members of a request that its query and its headers have."""
    if query:
        known = [parameter.name for parameter in parameters if parameter.place == "query"]
        if any(name not in known for name, _ in query):
            raise InvalidValue(f"the query has an unknown parameter; known here: {', '.join(known) or 'none'}")
    members: Members = {}
    sent = headers.by_name
    for parameter in parameters:
        name = parameter.name
        if parameter.place == "query":
            given = [value for other, value in query if other == name]
        elif raw_name(name) in sent:
            given = headers.getlist(name)
        else:
            continue
        if len(given) > 1 and not parameter.repeats:
            raise InvalidValue(f"{name} is given {len(given)} times")
        for value in given:
            merge(members, _read(parameter, value), name, repeats=parameter.repeats)
    return members


def merge(members: Members, more: Members, where: str, *, repeats: bool = False) -> None:
    """Add members, each of which may be given in one place only."""
    for member, item in more.items():
        if repeats:
            members.setdefault(member, []).append(item)
        elif member in members:
            raise InvalidValue(f"{member} is given in {where} and elsewhere too")
        else:
            members[member] = item


def _read(parameter: Parameter, value: str) -> Members:
    try:
        return parameter.read(value)
    except ValueError as problem:
        raise InvalidValue(f"{parameter.name}: {problem}") from None


# Authentication ---------------------------------------------------------------


class TokenRefused(PermissionDenied):
    """The token of a request is missing or not valid. ``problem`` is its error code of RFC 6750, if it has one."""

    def __init__(self, detail: str, problem: str | None) -> None:
        super().__init__(detail)
        self.problem = problem


async def identify(incoming: Incoming, callers: Callers) -> Caller:
    """The caller of a request, by its one Authorization header. Raises `TokenRefused`."""
    given = headers_of(incoming.scope).getlist("Authorization")
    scheme, _, token = given[0].partition(" ") if given else ("", "", "")
    if given and (len(given) > 1 or scheme.lower() != "bearer" or not token.strip()):
        raise TokenRefused("send one Authorization header: Bearer and a token", "invalid_request")
    address = incoming.scope.get("client")
    client = None if address is None else address[0]
    try:
        return await callers.caller_of(token.strip() if given else None, client)
    except PermissionDenied as error:
        raise TokenRefused(str(error), "invalid_token" if given else None) from None


async def authenticate(incoming: Incoming, callers: Callers) -> Caller:
    """The caller of a request. Raises a `Problem` of status 401 when its token is missing or not valid."""
    try:
        return await identify(incoming, callers)
    except TokenRefused as error:
        challenge = 'Bearer realm="limpet"' + (f', error="{error.problem}"' if error.problem else "")
        raise Problem(401, "unauthorized", str(error), headers={"WWW-Authenticate": challenge}) from None


# The edge ---------------------------------------------------------------------

SAFE: Final = ("GET", "HEAD", "OPTIONS")
HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""The headers of every response, unless its route has others."""
_HEADERS: Final = tuple((name.lower().encode(), text.encode()) for name, text in HEADERS.items())


class EdgeMiddleware:
    """Checks the Host, the origin, the path and the size of every request, and turns errors into problem documents."""

    def __init__(self, app: ASGIApp, *, body_bytes_max: int, bodies_bytes_max: int, hosts: Sequence[str]) -> None:
        self._app = app
        self._body_bytes_max = body_bytes_max
        self._bodies_bytes_max = bodies_bytes_max
        self._bodies_bytes = 0
        self._hosts = hosts
        # Hosts of earlier requests that are names of the server.
        self._accepted: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False
        body = _Body(headers_of(scope).first("Content-Length") or "")

        async def send_on(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                sent = message["headers"]
                names = {name for name, _ in sent}
                message["headers"] = [*sent, *(header for header in _HEADERS if header[0] not in names)]
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, self._limit(body, receive), send_on)
        except Exception as error:
            if isinstance(error, ClientDisconnect) and has_begun:
                raise
            if has_begun or not isinstance(error, LimpetError | Problem | HTTPException | ClientDisconnect):
                # The path has the key. The body, stored values and the message of a driver stay out of the log.
                facts = (scope["method"], quote_name(scope["path"]), reason_of(error))
                log.error("%s %s failed: %s", *facts, exc_info=redact(error))
            if has_begun:
                # uvicorn would write the whole error into its own log.
                raise redact(error) from None
            await problem_response(error)(scope, receive, send_on)
        finally:
            self._bodies_bytes -= body.taken_bytes

    def _check(self, scope: Scope) -> None:
        headers = headers_of(scope)
        given = headers.getlist("Host")
        if len(given) > 1:
            # A proxy in front may go by another of them than we do (RFC 9112, section 3.2).
            raise Problem(400, "invalid_request", "a request has one Host")
        host = given[0] if given else ""
        if self._hosts and host not in self._accepted:
            self._check_host(host)
        if scope["method"] not in SAFE and _is_of_another_origin(headers, host):
            raise Problem(403, "cross_origin", "pages of another origin may not send requests here")
        _decode_path(scope)

    def _check_host(self, host: str) -> None:
        """Refuse a name that is not one of the server's, and remember one that is."""
        if not is_known(name := host_name(host), self._hosts):
            quoted = _quote_host(name)
            raise Problem(421, "misdirected", f"this server is not called {quoted!r}: start it with --host {quoted}")
        # A caller can vary its address and port, so there is a bound.
        if len(host) <= ACCEPTED_LENGTH_MAX and len(self._accepted) < ACCEPTED_MAX:
            self._accepted.add(host)

    def _limit(self, body: _Body, receive: Receive) -> Receive:
        """Receive a body, and stop as soon as it, or all bodies together, are over their limits."""
        limit_bytes = self._body_bytes_max

        async def receive_some() -> Message:
            if body.announced_bytes > limit_bytes:
                raise _too_large(limit_bytes)
            message = await receive()
            size_bytes = len(message.get("body", b""))
            body.taken_bytes += size_bytes
            self._bodies_bytes += size_bytes
            if body.taken_bytes > limit_bytes:
                raise _too_large(limit_bytes)
            if self._bodies_bytes > self._bodies_bytes_max:
                raise Problem(
                    503,
                    "busy",
                    "the bodies of all requests together are too large now: try again",
                    headers={"Retry-After": "1"},
                )
            return message

        return receive_some


class _Body:
    """The bytes of a body: how many were announced, and how many have arrived."""

    def __init__(self, announced: str) -> None:
        self.announced_bytes = int(announced[:20]) if announced.isdecimal() else 0
        self.taken_bytes = 0


def _quote_host(name: str) -> str:
    """A name from a header, as a message may quote it."""
    return name[:100] if name.isascii() and name.isprintable() and name else "NAME"


def _too_large(limit_bytes: int) -> Problem:
    return Problem(413, "body_too_large", f"a body holds up to {limit_bytes:,} bytes")


def _is_of_another_origin(headers: RequestHeaders, host: str) -> bool:
    """Whether a browser sent this for a page that is not ours."""
    site = headers.first("Sec-Fetch-Site")
    if site is not None:
        return site not in ("same-origin", "none")
    origin = headers.first("Origin")
    return origin is not None and origin.partition("://")[2] != host


def _decode_path(scope: Scope) -> None:
    """Decode the path once, strictly: uvicorn would put another character for what it cannot decode."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    if raw.isascii() and b"%" not in raw:
        # Nothing to decode: the path is what it looks like.
        scope["path"] = raw.decode("ascii")
        return
    try:
        path = percent_decode(raw)
        start = [percent_decode(part) for part in raw.split(b"/")[:4]]
    except ValueError as problem:
        raise Problem(400, "invalid_path", f"the path cannot be read: {problem}") from None
    # An encoded slash is a character of a key, and must not make another path look like /v1/{namespace}/{verb}.
    if path.split("/")[:4] != start:
        raise Problem(404, "no_route", "there is nothing under this path")
    scope["path"] = path
