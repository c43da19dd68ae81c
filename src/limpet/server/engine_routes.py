"""The ten primitives of an engine over HTTP, so that Python programs can use the same store through a server.

``POST /v1/{namespace}/engine/{primitive}`` takes msgpack and replies with it; `limpet.protocol.engine_msgpack` defines
both. Every request passes the dispatcher under a name such as ``engine.commit``, a group of commits one by one. What a
caller may not see is removed from the result of a primitive, or the primitive is refused
(`limpet.server.engine_rights`).

A commit that is sent again because its reply was lost must not be applied twice. The engine finds the first attempt in
its log, but not one that still runs here. So a retry waits for a first attempt that runs; and a first attempt that
arrives after its retry was answered is superseded, and refused.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import msgspec
from starlette.requests import ClientDisconnect
from starlette.requests import Request as Incoming
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from limpet.checks import check_window
from limpet.errors import (
    Conflict,
    InvalidValue,
    PermissionDenied,
    RateLimited,
    TransientError,
    Unavailable,
    ValueTooLarge,
)
from limpet.keys import KEYS_MAX, PAGE_MAX, fit, key_span
from limpet.model import Batch, Expire, LogPage, Refusal, ScanPage, Status, Window, fingerprint
from limpet.protocol import engine_msgpack as wire
from limpet.protocol.codes import code_of
from limpet.server import validate
from limpet.server.dispatch import Caller, Callers, Dispatcher
from limpet.server.engine_rights import (
    ALL_KEYS,
    EngineRequest,
    check_batch_rights,
    is_named_by_key,
    is_visible_change,
    is_visible_receipt,
    redact,
    spans_of,
)
from limpet.server.events import until_refused
from limpet.server.http import TokenRefused, identify
from limpet.server.http_headers import headers_of
from limpet.server.http_routes import Reply
from limpet.server.operations import Operation, Reach, Right
from limpet.server.requests import Primitive
from limpet.server.wording import Public, public_error
from limpet.session import Session
from limpet.store import Store
from limpet.sweep import SWEEP_MAX

__all__ = ["LIMITS", "routes"]

LIMITS: Final = wire.Limits(request_bytes=8_000_000, batches=128, keys=KEYS_MAX, wait_s=25.0)
"""The limits of one request. A batch of the largest values fits."""

READ_BYTES_MAX: Final = 64_000_000
"""The limit of the result of one read. Its keys are read at one moment, so that it has no pages."""

CHANGES_MAX: Final = 1_000

BODY_S: Final = 30.0
RETRY_AFTER_S: Final = 1


def routes(
    session: Session, *, callers: Callers, dispatcher: Dispatcher, ending: asyncio.Event | None = None
) -> list[Route]:
    """The routes of the primitives.

    Args:
        session: The opened engine that is served.
        callers: Identifies the callers.
        dispatcher: Runs the requests.
        ending: Set when the server stops, so that no caller is kept waiting. Without it, a wait ends with its task.
    """
    engine_routes = EngineRoutes(session, callers, dispatcher, ending or asyncio.Event())
    return [
        Route("/v1/engine", engine_routes.describe, methods=["GET"]),
        Route("/v1/engine/namespaces", engine_routes.list_namespaces, methods=["POST"]),
        Route("/v1/{namespace}/engine/{primitive}", Primitives(engine_routes), methods=["POST"]),
    ]


class Primitives:
    """The primitives as an application. Around a function, Starlette would put two layers that are not needed here."""

    def __init__(self, engine_routes: EngineRoutes) -> None:
        self._routes = engine_routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run a primitive, and send its result."""
        response = await self._routes.serve(Incoming(scope, receive, send))
        await response(scope, receive, send)


class GuardFailed(Conflict):
    """A guard did not hold. It is for observers, which count conflicts; the caller gets the refusal itself."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.key, expected="what its guard says", current=None)
        self.refusal = refusal


Handler = Callable[[EngineRequest, bytes], Awaitable[Any]]


class EngineRoutes:
    """The handlers of the primitives. Each decodes its request, checks it, and has the dispatcher run it."""

    def __init__(self, session: Session, callers: Callers, dispatcher: Dispatcher, ending: asyncio.Event) -> None:
        self._session = session
        self._callers = callers
        self._dispatcher = dispatcher
        self._ending = ending
        self._in_flight = InFlight()
        self._handlers: dict[str, Handler] = {
            "read": self._read,
            "scan": self._scan,
            "count": self._count,
            "commit": self._commit,
            "changes": self._changes,
            "due": self._due,
            "trim": self._trim,
            "status": self._status,
        }

    async def describe(self, incoming: Incoming) -> Response:
        """The traits of the engine, and the limits of one request."""
        try:
            await self._caller(incoming)
        except Exception as error:
            return _error_response(error)
        return _response(wire.Served(self._session.engine.traits, LIMITS))

    async def list_namespaces(self, incoming: Incoming) -> Response:
        """The namespaces in which the caller may read."""
        try:
            caller = await self._caller(incoming)
            return _response(await self._dispatcher.list_namespaces(caller))
        except Exception as error:
            return _error_response(error)

    async def serve(self, incoming: Incoming) -> Response:
        """Run a primitive."""
        namespace, name = incoming.path_params["namespace"], incoming.path_params["primitive"]
        handler = self._handlers.get(name)
        try:
            caller = await self._caller(incoming)
        except Exception as error:
            return _error_response(error)
        try:
            if handler is None:
                raise InvalidValue(f"an engine has no such primitive; it has {', '.join(self._handlers)}")
            body = await _read_body(incoming)
            return _response(await handler(EngineRequest(caller, namespace, incoming), body))
        except _Observed as observed:
            return _error_response(observed.error)
        except Exception as error:
            self._dispatcher.report_refusal(caller, namespace, f"engine.{name}" if handler else "engine", error)
            return _error_response(error)

    async def _caller(self, incoming: Incoming) -> Caller:
        try:
            return await identify(incoming, self._callers)
        except TokenRefused as error:
            raise _Unauthenticated(str(error)) from error

    async def _run(self, request: EngineRequest, operation: Operation, what: Any, reason: str | None = None) -> Any:
        """Have the dispatcher run a primitive. It has reported an error to its observers, so mark that error."""
        try:
            primitive = Primitive(what=what, reason=reason)
            answer = await self._dispatcher.run(operation, request.namespace, primitive, request.caller)
        except Exception as error:
            raise _Observed(error) from error
        return answer["answer"]

    # Reading --------------------------------------------------------------------

    async def _read(self, request: EngineRequest, body: bytes) -> Any:
        read = wire.decode(body, wire.Read)
        validate.check_read(read)
        # A request id is not a key, so whether the caller may see a receipt is known only after it was read.
        reach = Reach() if read.family == "receipt" else Reach(spans_of(read.family, read.keys), read.keys)
        reveals = read.family != "lock"
        entries = await self._run(request, _reading("read", self._do_read, reach, reveals=reveals), read)
        if read.family == "receipt" and not request.sees_all:
            own = await self._own_receipts(request, read.keys)
            return [
                entry if entry is not None and is_visible_receipt(request, entry, is_own=is_own) else None
                for entry, is_own in zip(entries, own, strict=True)
            ]
        return entries

    async def _own_receipts(self, request: EngineRequest, keys: Sequence[str]) -> list[bool]:
        """Which of these request ids the caller has used itself."""
        if not keys:
            return []
        engine = self._dispatcher.session_of(request.caller, request.namespace, finds_others=False).engine
        return [entry is not None for entry in await engine.read(request.namespace, keys, family="receipt")]

    async def _do_read(self, store: Store, primitive: Primitive) -> dict[str, Any]:
        read: wire.Read = primitive.what
        # Each key once: a caller that repeats a large one would otherwise have it read, and sent, a thousand times.
        once = list(dict.fromkeys(read.keys))
        entries = await store._session.engine.read(store.name, once, family=read.family) if once else []
        found = entries
        if len(once) < len(read.keys):
            by_key = dict(zip(once, entries, strict=True))
            found = [by_key[key] for key in read.keys]
        size_bytes = sum(entry.size_bytes for entry in found if entry is not None)
        if size_bytes > READ_BYTES_MAX:
            raise ValueTooLarge(
                read.keys[0], size_bytes=size_bytes, limit_bytes=READ_BYTES_MAX, what="the answer to a read"
            )
        return {"answer": found}

    async def _scan(self, request: EngineRequest, body: bytes) -> Any:
        scan = wire.decode(body, wire.Scan)
        validate.check_scan(scan)
        # The result of a filter depends on values, too.
        reveals = scan.family != "lock" and (scan.values or scan.where is not None)
        spans = [scan.span] if is_named_by_key(scan.family) else ALL_KEYS
        page: ScanPage = await self._run(request, _reading("scan", self._do_scan, Reach(spans), reveals=reveals), scan)
        return _fit_scan_page(page)

    async def _do_scan(self, store: Store, primitive: Primitive) -> dict[str, Any]:
        scan: wire.Scan = primitive.what
        options: dict[str, Any] = {"family": scan.family, "where": scan.where, "values": scan.values}
        options["reverse"] = scan.reverse
        engine = store._session.engine
        return {"answer": await engine.scan(store.name, scan.span, limit=min(scan.limit, PAGE_MAX), **options)}

    async def _count(self, request: EngineRequest, body: bytes) -> Any:
        count = wire.decode(body, wire.Count)
        validate.check_span(count.span)
        spans = [count.span] if is_named_by_key(count.family) else ALL_KEYS
        return await self._run(request, _reading("count", self._do_count, Reach(spans)), count)

    async def _do_count(self, store: Store, primitive: Primitive) -> dict[str, Any]:
        count: wire.Count = primitive.what
        return {"answer": await store._session.engine.count(store.name, count.span, family=count.family)}

    async def _status(self, request: EngineRequest, _: bytes) -> Any:
        status: Status = await self._run(request, _reading("status", self._do_status, Reach()), None)
        if request.may("read", ALL_KEYS):
            return status
        # Hide the totals from a caller with rights on some keys only. It needs the revisions to follow the log.
        return msgspec.structs.replace(status, keys=0, size_bytes=0, log_changes=0, log_bytes=0)

    async def _do_status(self, store: Store, _: Primitive) -> dict[str, Any]:
        return {"answer": await store._session.engine.status(store.name)}

    # Following ------------------------------------------------------------------

    async def _changes(self, request: EngineRequest, body: bytes) -> Any:
        changes = wire.decode(body, wire.Changes)
        validate.check_changes(changes)
        reach = Reach() if changes.span is None else Reach([changes.span])
        operation = _reading("changes", self._do_changes, reach, reveals=changes.span is not None)
        page: LogPage = await self._run(request, operation, changes)
        if not page.changes and changes.wait_s > 0:
            wait_s = min(changes.wait_s, LIMITS.wait_s)
            page = await self._wait_for_changes(request, operation, changes, wait_s)
        page = _fit_log_page(page)
        if changes.span is None and not request.sees_all:
            visible = [change for change in page.changes if is_visible_change(request, change)]
            # A caller that does not see the last change still has to recognise it when it goes on from there.
            at = fingerprint(page.changes[-1]) if page.changes else None
            page = msgspec.structs.replace(page, changes=visible, at=at)
        return page

    async def _do_changes(self, store: Store, primitive: Primitive) -> dict[str, Any]:
        return {"answer": await _read_log(store._session, store.name, primitive.what, 0.0)}

    async def _wait_for_changes(
        self, request: EngineRequest, operation: Operation, changes: wire.Changes, wait_s: float
    ) -> LogPage:
        """Wait for changes, while the caller is connected and still allowed to see them.

        Observers know of the first read already. The wait, and that the caller left, are not reported to them.
        """
        session = self._dispatcher.session_of(request.caller, request.namespace)
        news = asyncio.ensure_future(_read_log(session, request.namespace, changes, wait_s))
        gone = asyncio.ensure_future(_wait_for_disconnect(request.incoming))
        ending = asyncio.ensure_future(self._ending.wait())
        refused = asyncio.ensure_future(until_refused(lambda: self._check_again(request, operation), self._callers))
        waiting = (news, gone, ending, refused)
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if news.done():
                await self._check_again(request, operation)
                return news.result()
            if refused.done():
                raise refused.result()
            raise _Disconnected("the server is stopping" if ending.done() else "the caller has left")
        except Exception as error:
            raise _Observed(error) from error
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _check_again(self, request: EngineRequest, operation: Operation) -> None:
        """Raise unless the caller is still allowed to see what it waits for."""
        caller = await self._caller(request.incoming)
        self._dispatcher.check_rights(operation, request.namespace, Primitive(what=None), caller)

    # Maintenance ----------------------------------------------------------------

    async def _due(self, request: EngineRequest, body: bytes) -> Any:
        due = wire.decode(body, wire.Due)
        validate.check_due(due)
        return await self._run(request, _maintenance(request, "due", self._do_due), due)

    async def _do_due(self, store: Store, primitive: Primitive) -> dict[str, Any]:
        return {"answer": await store._session.engine.due(store.name, limit=min(primitive.what.limit, SWEEP_MAX))}

    async def _trim(self, request: EngineRequest, body: bytes) -> Any:
        given = wire.decode(body, Window)
        check_window(given)
        # Watchers of other callers rely on the newest part of the log, so no caller may trim it.
        age_ms_min = max(given.age_ms_min, self._session.sweeper.window.age_ms_min)
        window = msgspec.structs.replace(given, age_ms_min=age_ms_min)
        operation = Operation("engine.trim", Primitive, "admin", self._do_trim, lambda _: Reach(ALL_KEYS))
        return await self._run(request, operation, window)

    async def _do_trim(self, store: Store, primitive: Primitive) -> dict[str, Any]:
        return {"answer": await store._session.engine.trim(store.name, primitive.what)}

    # Committing -----------------------------------------------------------------

    async def _commit(self, request: EngineRequest, body: bytes) -> Any:
        commits = wire.decode(body, wire.Commits)
        if len(commits.batches) > LIMITS.batches:
            raise InvalidValue(f"one request has up to {LIMITS.batches} batches, this one {len(commits.batches)}")
        return await asyncio.gather(*(self._commit_one(request, batch) for batch in commits.batches))

    async def _commit_one(self, request: EngineRequest, encoded: msgspec.Raw) -> msgspec.Raw:
        """Commit a batch. An error becomes the result of this batch alone, so that the rest of the group goes on."""
        batch = Batch((), ())
        try:
            try:
                reason = request.reason if request.may("admin", ALL_KEYS) else None
                batch = wire.decode_batch(encoded)
                batch = validate.check_batch(
                    batch,
                    value_bytes_max=self._session.value_bytes_max,
                    any_lock=reason is not None,
                    writer=request.caller.writer,
                )
                is_forced = check_batch_rights(request, batch, reason)
            except Exception as error:
                self._dispatcher.report_refusal(request.caller, request.namespace, "engine.commit", error)
                raise
            operation = self._committing(request, batch)
            result = await self._in_flight.run(
                request, batch, lambda: self._run(request, operation, batch, reason if is_forced else None)
            )
        except _Observed as observed:
            if not isinstance(observed.error, GuardFailed):
                return wire.encode_outcome(public_error(observed.error), batch)
            result = observed.error.refusal
        except Exception as error:
            return wire.encode_outcome(public_error(error), batch)
        return wire.encode_outcome(redact(request, batch, result), batch)

    async def _do_commit(self, store: Store, primitive: Primitive) -> dict[str, Any]:
        batch: Batch = primitive.what
        result = await store._session.commit(store.name, batch)
        if isinstance(result, Refusal):
            if result.reason == "stale_request" or (result.guard is not None and result.guard.family == "data"):
                raise GuardFailed(result)
            if result.reason == "size" and batch.value_bytes_max == self._session.value_bytes_max:
                # The client reports the limit that it was opened with, which may differ from this server's.
                raise ValueTooLarge(
                    result.key, size_bytes=result.size_bytes, limit_bytes=batch.value_bytes_max, what="the record"
                )
        return {"answer": result}

    def _committing(self, request: EngineRequest, batch: Batch) -> Operation:
        """The operation of a batch. It needs one right only; `check_batch_rights` has checked all."""
        parts = (*batch.writes, *batch.guards)
        keys = [write.key for write in batch.writes if write.family == "data" and not isinstance(write, Expire)]
        checked = [part for part in parts if part.family != "lock" and not isinstance(part, Expire)]
        spans = [span for part in checked for span in spans_of(part.family, [part.key])]
        right: Right = "write"
        if all(isinstance(part, Expire) for part in parts):
            right = "write" if request.may("write", ()) else "admin"
        elif not spans:
            spans = [key_span(part.key) for part in parts]
            rights: Sequence[Right] = ("lock", "write", "admin")
            right = next((one for one in rights if request.may(one, spans)), "write")
        return Operation("engine.commit", Primitive, right, self._do_commit, lambda _: Reach(spans, keys))


def _reading(name: str, run: Any, reach: Reach, *, reveals: bool = False) -> Operation:
    """The operation of a primitive that reads."""
    return Operation(f"engine.{name}", Primitive, "read", run, lambda _: reach, reveals=reveals)


def _maintenance(request: EngineRequest, name: str, run: Any) -> Operation:
    """The operation of a primitive that serves expiry: for an admin, or a caller that may write every key."""
    right: Right = "admin" if request.may("admin", ALL_KEYS) else "write"
    return Operation(f"engine.{name}", Primitive, right, run, lambda _: Reach(ALL_KEYS))


class InFlight:
    """The commits that run now. A retry of one of them waits for its result."""

    def __init__(self) -> None:
        self._commits: dict[tuple[str, str, str | None], tuple[Batch, asyncio.Future[Any]]] = {}

    async def run(self, request: EngineRequest, batch: Batch, commit: Callable[[], Awaitable[Any]]) -> Any:
        """Commit a batch, unless the same batch runs already."""
        name = (request.caller.name, request.namespace, batch.request_id)
        if batch.retry_since is not None and name in self._commits:
            first, running = self._commits[name]
            if (first.guards, first.writes) == (batch.guards, batch.writes):
                await asyncio.wait((running,))
                if not running.cancelled() and _has_result(running.exception()):
                    return running.result()
        if name in self._commits:
            return await commit()
        running = asyncio.ensure_future(commit())
        self._commits[name] = batch, running
        try:
            return await running
        finally:
            del self._commits[name]


def _has_result(error: BaseException | None) -> bool:
    """Whether a commit was applied or refused. If not, its retry must run in the engine."""
    return error is None or (isinstance(error, _Observed) and isinstance(error.error, GuardFailed))


# Pages --------------------------------------------------------------------------


def _fit_scan_page(page: ScanPage) -> ScanPage:
    """As much of a page as fits into one reply."""
    count = fit(entry.size_bytes for entry in page.entries)
    if count == len(page.entries):
        return page
    return ScanPage(page.entries[:count], page.entries[count - 1].key)


def _fit_log_page(page: LogPage) -> LogPage:
    """As much of a page as fits into one reply."""
    count = fit(change.entry.size_bytes for change in page.changes)
    if count == len(page.changes):
        return page
    return LogPage(page.changes[:count], page.changes[count - 1].revision, page.before)


async def _read_log(session: Session, namespace: str, changes: wire.Changes, wait_s: float) -> LogPage:
    return await session.engine.changes(
        namespace, changes.after, span=changes.span, limit=min(changes.limit, CHANGES_MAX), wait_s=wait_s
    )


# HTTP ---------------------------------------------------------------------------


class _Observed(Exception):
    """An error that was reported to the observers, or need not be."""

    def __init__(self, error: Exception) -> None:
        super().__init__(type(error).__name__)
        self.error = error


class _Unauthenticated(PermissionDenied):
    """The caller has no valid token. HTTP distinguishes that from a caller that lacks a right."""


class _Disconnected(Public, Unavailable):
    """The server stops or the caller leaves before there is a reply."""


class _BodyTimeout(Public, Unavailable):
    """The body of a request takes too long to arrive."""


async def _read_body(incoming: Incoming) -> bytes:
    """Read the body of a request, within limits of size and time."""
    # A page of another site can make a browser send forms and text without a preflight request, but not this type.
    media = headers_of(incoming.scope).first("Content-Type") or ""
    if media != wire.MEDIA and media.partition(";")[0].strip().lower() != wire.MEDIA:
        raise InvalidValue(f"a request for a primitive has the Content-Type {wire.MEDIA}")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in incoming.stream():
                body += part
                if len(body) > LIMITS.request_bytes:
                    raise ValueTooLarge(
                        incoming.url.path, size_bytes=len(body), limit_bytes=LIMITS.request_bytes, what="the request"
                    )
    except TimeoutError as error:
        raise _BodyTimeout("the request did not arrive in time; send it again") from error
    except ClientDisconnect as error:
        raise _Observed(_Disconnected("the caller has left")) from error
    return bytes(body)


async def _wait_for_disconnect(incoming: Incoming) -> None:
    """Return when the caller has left."""
    while (await incoming.receive())["type"] != "http.disconnect":
        pass


def _response(answer: Any) -> Response:
    return Reply(wire.encode(answer), media_type=wire.MEDIA)


def _error_response(error: Exception) -> Response:
    headers: dict[str, str] = {}
    status = code_of(error).status
    if isinstance(error, _Unauthenticated):
        status, headers = 401, {"WWW-Authenticate": "Bearer"}
    elif isinstance(error, RateLimited):
        headers = {"Retry-After": str(math.ceil(error.retry_after))}
    elif isinstance(error, TransientError):
        headers = {"Retry-After": str(RETRY_AFTER_S)}
    return Response(wire.encode(wire.failure_of(public_error(error))), status, headers, wire.MEDIA)
