"""HTTP: the operations under paths, methods and headers that browsers, proxies and curl understand.

The table of routes is at the top. Each row names the function that answers it, which makes members of a request out of
what came (see `limpet.server.http_call`), has the dispatcher run an operation, and shapes the answer. What goes wrong
anywhere becomes a problem document, in one place, at the door.
"""

from __future__ import annotations

import logging
from base64 import b64decode
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType
from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import limpet
from limpet.errors import LimpetError, NotFound, PermissionDenied, TypeMismatch
from limpet.keys import Span
from limpet.retry import reason_of
from limpet.server import parameters, requests
from limpet.server.dispatch import Callers, Dispatcher
from limpet.server.events import STREAMS_MAX, Streams
from limpet.server.hosts import host_name, is_known
from limpet.server.http_call import (
    BYTES_TYPE,
    JSON_TYPE,
    RECORD_TYPE,
    Answered,
    Endpoint,
    HttpCall,
    caller_of,
    json_response,
)
from limpet.server.http_errors import Problem, problem_response
from limpet.server.logs import failure_of, shown
from limpet.server.openapi import describe
from limpet.server.operations import OPERATIONS
from limpet.server.parameters import (
    AFTER,
    BEFORE,
    CONDITIONS,
    EXPECTED_VERSION,
    FENCE,
    FIELD,
    IDEMPOTENCY_KEY,
    INITIAL,
    KV_ONCE,
    LAST_EVENT_ID,
    LAST_WRITER,
    LIMIT,
    META,
    PATTERN,
    POSITION,
    PREFIX,
    PURPOSE,
    REASON,
    REASON_QUERY,
    REQUEST_ID,
    TOKEN,
    TOKEN_QUERY,
    TTL,
    TTL_QUERY,
    UNLESS_CURRENT,
    VALUES,
    WHERE,
    entry_headers,
)

__all__ = ["BODY_BYTES_MAX", "make_app", "streams_of"]

BODY_BYTES_MAX: Final = 5_000_000
BODIES_BYTES_MAX: Final = 64_000_000

SPACE: Final = "/v1/{namespace}"
# A verb stands before the key, which may be anything.
ENTRIES: Final = f"{SPACE}/entries/{{key:key}}"
BYTES: Final = f"{SPACE}/bytes/{{key:key}}"
RECORDS: Final = f"{SPACE}/records/{{key:key}}"
SEMANTIC: Final = f"{SPACE}/semantic/{{key:key}}"
LOCKS: Final = f"{SPACE}/locks/{{name:key}}"
TOLD: Final = ("ETag", "Limpet-Version", "Limpet-Revision")

log = logging.getLogger("limpet.http")


# What there is to ask ---------------------------------------------------------


class _Key(Convertor[str]):
    """The rest of a path, whatever it is: Starlette's own stops at a line break, which a key may hold."""

    regex = r"[\s\S]*"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("key", _Key())


class Patch(requests.Strict, frozen=True, kw_only=True):
    """Fields of a record to write, and fields to drop."""

    set: dict[str, Any] = msgspec.field(default_factory=dict)
    unset: list[str] = msgspec.field(default_factory=list)
    if_exists: bool = False
    ttl: requests.TTL | UnsetType = UNSET


def _endpoints() -> Sequence[Endpoint]:
    value = Answered(None, (JSON_TYPE, BYTES_TYPE, RECORD_TYPE), (*TOLD, "Last-Modified"))
    raw = Answered(None, (BYTES_TYPE,), (*TOLD, "Last-Modified"))
    entry = Answered("EntryDocument", headers=TOLD)
    known = {200: Answered(), 304: Answered()}
    written, touched, done = {200: entry, 201: entry}, {200: entry}, {204: Answered()}
    timed = [*CONDITIONS, TTL, TTL_QUERY]
    once = [REQUEST_ID, IDEMPOTENCY_KEY]
    put_away = Answered("EnvelopePut")
    page = [PREFIX, LIMIT, AFTER]
    resumed = [PATTERN, POSITION, INITIAL, LAST_EVENT_ID]
    return [
        Endpoint("GET", ENTRIES, get_entry, {**known, 200: value}, [UNLESS_CURRENT]),
        Endpoint("HEAD", ENTRIES, head_entry, known, [UNLESS_CURRENT]),
        Endpoint("PUT", ENTRIES, put_entry, written, [*timed, META], "value"),
        Endpoint("DELETE", ENTRIES, delete_entry, done, CONDITIONS),
        Endpoint("GET", BYTES, get_bytes, {**known, 200: raw}, [UNLESS_CURRENT]),
        Endpoint("PUT", BYTES, put_bytes, written, [*timed, META], "bytes"),
        Endpoint("PUT", RECORDS, put_record, written, [*timed, META], "record"),
        Endpoint("GET", RECORDS, get_record, _ok("FieldsDocument"), [FIELD]),
        Endpoint("PATCH", RECORDS, patch_record, written, CONDITIONS, Patch),
        Endpoint("POST", f"{SPACE}/swap/{{key:key}}", swap_field, _ok("SwapAnswer"), [FENCE, *once], requests.Swap),
        Endpoint("POST", f"{SPACE}/incr/{{key:key}}", increment, _ok("CounterAnswer"), timed, requests.Incr),
        Endpoint("POST", f"{SPACE}/take/{{key:key}}", take, _ok("ValueAnswer"), CONDITIONS, requests.Take),
        Endpoint("POST", f"{SPACE}/touch/{{key:key}}", touch, touched, timed, requests.Touch),
        Endpoint("POST", f"{SPACE}/batch", batch, _ok("BatchAnswer"), once, requests.Batch),
        Endpoint("GET", f"{SPACE}/keys", list_keys, _ok("KeysPage"), page),
        Endpoint("GET", f"{SPACE}/scan", scan, _ok("EntriesPage"), [*page, WHERE, VALUES]),
        Endpoint("POST", f"{SPACE}/scan", scan, _ok("EntriesPage"), [], requests.Scan),
        Endpoint("GET", f"{SPACE}/history/{{key:key}}", history, _ok("Changes"), [LIMIT, BEFORE]),
        Endpoint("GET", f"{SPACE}/watch", watch, {200: Answered(None, ["text/event-stream"])}, resumed),
        Endpoint("GET", f"{SPACE}/locks", list_locks, _ok("Locks"), page),
        Endpoint("POST", LOCKS, acquire_lock, {201: Answered("LockAnswer")}, [], requests.Lock),
        Endpoint("PUT", LOCKS, refresh_lock, done, [TOKEN], requests.Refresh),
        Endpoint("DELETE", LOCKS, release_lock, done, [TOKEN, TOKEN_QUERY, REASON, REASON_QUERY]),
        Endpoint("GET", f"{SPACE}/outcome/{{request_id:key}}", outcome, _ok("OutcomeAnswer")),
        Endpoint("GET", f"{SPACE}/status", status, _ok("StatusAnswer")),
        Endpoint("GET", SEMANTIC, get_semantic, _ok("Envelope")),
        Endpoint("PUT", SEMANTIC, put_semantic, {200: put_away, 201: put_away}, KV_ONCE, requests.KvPut),
        Endpoint("DELETE", SEMANTIC, delete_semantic, done, [LAST_WRITER, EXPECTED_VERSION, *KV_ONCE]),
        Endpoint("GET", f"{SPACE}/semantic", list_semantic, _ok("Envelopes"), [PREFIX, PURPOSE, LIMIT, AFTER]),
        Endpoint("POST", f"{SPACE}/semantic", batch_semantic, _ok("EnvelopesPut"), KV_ONCE, requests.KvBatch),
        Endpoint("POST", f"{SPACE}/call/{{operation}}", call, _ok("Answer"), [], requests.Request),
    ]


def _ok(schema: str) -> dict[int, Answered]:
    return {200: Answered(schema)}


# What answers -----------------------------------------------------------------


async def get_entry(exchange: HttpCall) -> Response:
    """The value of a key."""
    return _value_response(exchange, await _entry(exchange, with_value=True))


def _value_response(exchange: HttpCall, entry: dict[str, Any]) -> Response:
    if _is_known(exchange, entry):
        return Response(status_code=304, headers=entry_headers(entry))
    kind, value = entry["kind"], entry["value"]
    if kind == "bytes":
        return Response(b64decode(value["$bytes"]), headers=entry_headers(entry), media_type=BYTES_TYPE)
    media_type = RECORD_TYPE if kind == "record" else JSON_TYPE
    return Response(msgspec.json.encode(value), headers=entry_headers(entry), media_type=media_type)


async def head_entry(exchange: HttpCall) -> Response:
    """The version, revision and times of a key; its value is not looked at."""
    entry = await _entry(exchange, with_value=False)
    response = Response(status_code=304 if _is_known(exchange, entry) else 200, headers=entry_headers(entry))
    response.headers["Content-Type"] = {"bytes": BYTES_TYPE, "record": RECORD_TYPE}.get(entry["kind"], JSON_TYPE)
    # How long the body would be is not known here.
    del response.headers["Content-Length"]
    return response


async def _entry(exchange: HttpCall, *, with_value: bool) -> dict[str, Any]:
    members = await exchange.members()
    answer = await exchange.run("entry", {**members, "with_value": with_value})
    if not answer["exists"]:
        raise NotFound(members["key"])
    entry: dict[str, Any] = answer["entry"]
    return entry


def _is_known(exchange: HttpCall, entry: dict[str, Any]) -> bool:
    known = exchange.header("If-None-Match")
    return known is not None and parameters.is_current(known, entry["revision"])


async def put_entry(exchange: HttpCall) -> Response:
    """Replace the value of a key: JSON, raw bytes, or a record."""
    return _entry_response((await exchange.run("put", await exchange.members()))["entry"])


async def get_bytes(exchange: HttpCall) -> Response:
    """The value of a key that holds raw bytes."""
    entry = await _entry(exchange, with_value=True)
    if entry["kind"] != "bytes":
        raise TypeMismatch(entry["key"], expected="raw bytes", found=entry["kind"])
    return _value_response(exchange, entry)


async def put_bytes(exchange: HttpCall) -> Response:
    """Replace the value of a key by raw bytes."""
    return await put_entry(exchange)


async def put_record(exchange: HttpCall) -> Response:
    """Replace the value of a key by a record."""
    return await put_entry(exchange)


async def delete_entry(exchange: HttpCall) -> Response:
    """End a key."""
    members = await exchange.members()
    answer = await exchange.run("delete", members)
    if not answer["deleted"]:
        raise NotFound(members["key"])
    return Response(status_code=204)


async def get_record(exchange: HttpCall) -> Response:
    """The fields of a record, or some of them."""
    members = {"get": None, **await exchange.members()}
    answer = await exchange.run("fields", members)
    if not answer["exists"]:
        raise NotFound(members["key"])
    return json_response(answer["fields"])


async def patch_record(exchange: HttpCall) -> Response:
    """Write some fields of a record, or drop them, without touching the rest."""
    members = await exchange.members()
    key, conditions = members.pop("key"), {name: members.pop(name, None) for name in ("expect", "fence", "request_id")}
    asked = requests.request_of(Patch, members)
    write = {"op": "set", "key": key, "fields": asked.set, "unset": asked.unset, "if_exists": asked.if_exists}
    if asked.ttl is not UNSET:
        write["ttl"] = asked.ttl
    members = {"writes": [write], "request_id": conditions["request_id"]}
    if conditions["expect"] is not None:
        members["guards"] = [{"key": key, "expect": conditions["expect"]}]
    if conditions["fence"] is not None:
        members["fences"] = [conditions["fence"]]
    return _entry_response((await exchange.run("batch", members))["entries"][0])


async def swap_field(exchange: HttpCall) -> Response:
    """Change a field of a record if it holds what is expected: of all who try, one wins."""
    members = await exchange.members()
    beside: dict[str, Any] = {name: members.pop(name) for name in ("key", "fence", "request_id") if name in members}
    return json_response(await exchange.run("fields", {**beside, "swap": members}))


async def increment(exchange: HttpCall) -> Response:
    """Add to a counter."""
    return json_response(await exchange.run("incr", await exchange.members()))


async def take(exchange: HttpCall) -> Response:
    """Get a value and end its key in one step."""
    members = await exchange.members()
    answer = await exchange.run("take", members)
    if not answer["exists"]:
        raise NotFound(members["key"])
    return json_response({"value": answer["value"]})


async def touch(exchange: HttpCall) -> Response:
    """Change only when a key expires."""
    members = await exchange.members()
    answer = await exchange.run("touch", members)
    if not answer["exists"]:
        raise NotFound(members["key"])
    return _entry_response(answer["entry"], created=False)


async def list_keys(exchange: HttpCall) -> Response:
    """A page of keys."""
    answer = await exchange.run("list", await exchange.members())
    return json_response({**answer, "cursor": answer["keys"][-1] if answer["truncated"] else None})


async def scan(exchange: HttpCall) -> Response:
    """A page of entries, filtered."""
    return json_response(await exchange.run("scan", await exchange.members()))


async def history(exchange: HttpCall) -> Response:
    """The latest changes of a key that are still in the log, oldest first."""
    return json_response(await exchange.run("history", await exchange.members()))


async def batch(exchange: HttpCall) -> Response:
    """Guards and writes that happen together or not at all."""
    return json_response(await exchange.run("batch", await exchange.members()))


async def list_locks(exchange: HttpCall) -> Response:
    """The locks that are held now."""
    return json_response(await exchange.run("locks", await exchange.members()))


async def acquire_lock(exchange: HttpCall) -> Response:
    """Take a lock. What comes back is its fencing token."""
    members = {"holder": exchange.caller.name, **await exchange.members()}
    return json_response(await exchange.run_while_wanted("lock", members), 201)


async def refresh_lock(exchange: HttpCall) -> Response:
    """Extend a lock from now on."""
    await exchange.run("refresh", await exchange.members())
    return Response(status_code=204)


async def release_lock(exchange: HttpCall) -> Response:
    """Give a lock back by its token; or end another's, with the right `admin` and a reason."""
    await exchange.run("unlock", await exchange.members())
    return Response(status_code=204)


async def get_semantic(exchange: HttpCall) -> Response:
    """A semantic entry in its envelope."""
    members = await exchange.members()
    answer = await exchange.run("kv_get", members)
    if not answer.pop("exists"):
        raise NotFound(members["key"])
    return json_response(answer)


async def put_semantic(exchange: HttpCall) -> Response:
    """Put a semantic entry, if its key has the version that is expected."""
    answer = await exchange.run("kv_put", await exchange.members())
    return json_response(answer, 201 if answer["version"] == 1 else 200)


async def delete_semantic(exchange: HttpCall) -> Response:
    """End a semantic entry, if its key has the version that is expected."""
    members = await exchange.members()
    answer = await exchange.run("kv_delete", members)
    if not answer["deleted"]:
        raise NotFound(members["key"])
    return Response(status_code=204)


async def list_semantic(exchange: HttpCall) -> Response:
    """A page of semantic entries, of one purpose or of all."""
    return json_response(await exchange.run("kv_list", await exchange.members()))


async def batch_semantic(exchange: HttpCall) -> Response:
    """Puts and deletes of semantic entries that happen together or not at all."""
    return json_response(await exchange.run("kv_batch", await exchange.members()))


async def outcome(exchange: HttpCall) -> Response:
    """What became of a request."""
    return json_response(await exchange.run("outcome", await exchange.members()))


async def status(exchange: HttpCall) -> Response:
    """The namespace at a glance."""
    return json_response(await exchange.run("status", await exchange.members()))


async def watch(exchange: HttpCall) -> Response:
    """Changes as they happen, as server-sent events."""
    members = await exchange.members()
    # A browser that lost its connection comes back to the same URL, and says how far it was.
    if (last := members.pop("last_event_id", None)) is not None:
        members |= {"after": last, "initial": False}
    return await exchange.watch(members)


async def call(exchange: HttpCall) -> Response:
    """Run any operation by its name, with the members of its request as JSON."""
    members = await exchange.members()
    name = members.pop("operation")
    if name not in OPERATIONS:
        raise Problem(404, "no_operation", "there is no operation of this name")
    return json_response(await exchange.run(name, members))


def _entry_response(entry: dict[str, Any], *, created: bool = True) -> Response:
    """An entry that was written. The first version of a key is one that was created."""
    return json_response(entry, 201 if created and entry["version"] == 1 else 200, entry_headers(entry))


ENDPOINTS: Final = _endpoints()


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
    """The HTTP face of a server.

    Args:
        dispatcher: What runs the operations.
        callers: Who may ask.
        ready: Whether requests are served now; False while the server starts and while it drains.
        metrics: What ``/metrics`` shows, in the text format of Prometheus.
        more_routes: Routes of other parts. Errors that they raise become problem documents too.
        body_bytes_max: How large the body of a request may be.
        bodies_bytes_max: How large the bodies of all requests under way may be together.
        hosts: The names by which the server is called. A request that names another is refused; any is taken if empty.
        streams_max: How many watches may be open.
    """
    streams = Streams(most=streams_max)
    described = msgspec.json.encode(describe(ENDPOINTS))

    async def alive(_: Request) -> Response:
        return json_response({"status": "alive"})

    async def readiness(_: Request) -> Response:
        if not ready():
            detail = "the server starts or stops, or its store does not answer; try again later"
            raise Problem(503, "not_ready", detail, headers={"Retry-After": "1"})
        return json_response({"status": "ready"})

    async def openapi(_: Request) -> Response:
        return Response(described, media_type=JSON_TYPE)

    async def index(_: Request) -> Response:
        shown = {
            "openapi": "/openapi.json",
            "health": "/healthz",
            "readiness": "/readyz",
            "entries": "/v1/{namespace}/entries/{key}",
        }
        return json_response({"name": "limpet", "version": limpet.__version__, **shown})

    async def show_metrics(request: Request) -> Response:
        caller = await caller_of(request, callers)
        # They tell of every namespace, so they take a right on all of them.
        everything = [Span("", None)]
        if not any(caller.may("*", right, everything) for right in ("admin", "read")):
            raise PermissionDenied(f"{caller.name} may not see what concerns all namespaces")
        assert metrics is not None
        return Response(await metrics(), media_type="text/plain; version=0.0.4")

    app = Starlette(
        routes=[
            Route("/", index),
            Route("/healthz", alive),
            Route("/readyz", readiness),
            Route("/openapi.json", openapi),
            *([Route("/metrics", show_metrics)] if metrics is not None else []),
            *_routes(dispatcher, callers, streams),
            *more_routes,
        ],
        middleware=[
            Middleware(EdgeMiddleware, body_bytes_max=body_bytes_max, bodies_bytes_max=bodies_bytes_max, hosts=hosts)
        ],
        exception_handlers={HTTPException: _told_by_starlette},
    )
    app.router.redirect_slashes = False
    app.state.streams = streams
    return app


def streams_of(app: Starlette) -> Streams:
    """What stays open for long in an application, to be closed when the server ends."""
    streams: Streams = app.state.streams
    return streams


def _routes(dispatcher: Dispatcher, callers: Callers, streams: Streams) -> Iterable[Route]:
    paths: dict[str, dict[str, Endpoint]] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method] = endpoint
    for path, methods in paths.items():
        yield Route(path, _Place(methods, dispatcher, callers, streams))


class _Place:
    """The endpoints of one path."""

    def __init__(
        self, methods: dict[str, Endpoint], dispatcher: Dispatcher, callers: Callers, streams: Streams
    ) -> None:
        self._methods = {"HEAD": methods["GET"], **methods} if "GET" in methods else methods
        self._shared = (dispatcher, callers, streams)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._methods.get(scope["method"])
        if endpoint is None:
            allowed = ", ".join(sorted(self._methods))
            raise Problem(405, "method_not_allowed", f"here are only {allowed}", headers={"Allow": allowed})
        response = await HttpCall(Request(scope, receive, send), endpoint, *self._shared).respond()
        await response(scope, receive, send)


async def _told_by_starlette(_: Request, error: Exception) -> Response:
    return problem_response(error)


# The door ---------------------------------------------------------------------

SAFE: Final = ("GET", "HEAD", "OPTIONS")
HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""What every response says, unless its route says otherwise."""


class EdgeMiddleware:
    """Checks what concerns every request, and turns whatever goes wrong into a problem document."""

    def __init__(self, app: ASGIApp, *, body_bytes_max: int, bodies_bytes_max: int, hosts: Sequence[str]) -> None:
        self._app = app
        self._body_bytes_max = body_bytes_max
        self._bodies_bytes_max = bodies_bytes_max
        self._bodies_bytes = 0
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or say why not."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False
        body = _Body(Headers(scope=scope).get("Content-Length", "0"))

        async def send_on(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                headers = MutableHeaders(scope=message)
                for name, text in HEADERS.items():
                    headers.setdefault(name, text)
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, self._limited(body, receive), send_on)
        except Exception as error:
            if isinstance(error, ClientDisconnect) and has_begun:
                raise
            if has_begun or not isinstance(error, LimpetError | Problem | ClientDisconnect):
                # The path names a key. What was sent, what is stored and what a driver says stay out of the log.
                said = (scope["method"], shown(scope["path"]), reason_of(error))
                log.error("%s %s failed: %s", *said, exc_info=failure_of(error))
            if has_begun:
                # The server in front of us would write the whole error into its own log.
                raise failure_of(error) from None
            await problem_response(error)(scope, receive, send_on)
        finally:
            self._bodies_bytes -= body.taken_bytes

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        named = headers.getlist("Host")
        if len(named) > 1:
            # A proxy in front may go by another of them than we do (RFC 9112, section 3.2).
            raise Problem(400, "invalid_request", "a request has one Host")
        host = named[0] if named else ""
        if self._hosts and not is_known(name := host_name(host), self._hosts):
            shown = _shown_host(name)
            raise Problem(421, "misdirected", f"this server is not called {shown!r}: start it with --host {shown}")
        if scope["method"] not in SAFE and _is_of_another_origin(headers, host):
            raise Problem(403, "cross_origin", "pages of another origin may not ask here")
        _decode_path(scope)

    def _limited(self, body: _Body, receive: Receive) -> Receive:
        """Receive a body while it, and all bodies together, are within their limits, and not a part of it beyond."""
        most = self._body_bytes_max

        async def receive_some() -> Message:
            if body.announced_bytes > most:
                raise _too_large(most)
            message = await receive()
            size_bytes = len(message.get("body", b""))
            body.taken_bytes += size_bytes
            self._bodies_bytes += size_bytes
            if body.taken_bytes > most:
                raise _too_large(most)
            if self._bodies_bytes > self._bodies_bytes_max:
                raise Problem(503, "busy", "too much is being sent at once: try again", headers={"Retry-After": "1"})
            return message

        return receive_some


class _Body:
    """How much of a body was announced, and came."""

    def __init__(self, announced: str) -> None:
        self.announced_bytes = int(announced[:20]) if announced.isdecimal() else 0
        self.taken_bytes = 0


def _shown_host(name: str) -> str:
    """A name from a header as a message may quote it."""
    return name[:100] if name.isascii() and name.isprintable() and name else "NAME"


def _too_large(most: int) -> Problem:
    return Problem(413, "body_too_large", f"a body holds up to {most:,} bytes")


def _is_of_another_origin(headers: Headers, host: str) -> bool:
    """Whether a browser sent this for a page that is not ours."""
    site = headers.get("Sec-Fetch-Site")
    if site is not None:
        return site not in ("same-origin", "none")
    origin = headers.get("Origin")
    return origin is not None and origin.partition("://")[2] != host


def _decode_path(scope: Scope) -> None:
    """Decode the path once, strictly: a server would put another character for what it cannot decode."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    try:
        path = parameters.percent_decoded(raw)
        start = [parameters.percent_decoded(part) for part in raw.split(b"/")[:4]]
    except ValueError as problem:
        raise Problem(400, "invalid_path", f"the path cannot be read: {problem}") from None
    # An encoded slash is a letter of a key, and may not make /v1/{namespace}/{verb} out of something else.
    if path.split("/")[:4] != start:
        raise Problem(404, "no_route", "there is nothing under this path")
    scope["path"] = path
