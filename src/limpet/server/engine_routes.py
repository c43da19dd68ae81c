"""The eight primitives of an engine over HTTP, so that Python programs have the same store on the far side of a server.

``POST /v1/{namespace}/engine/{primitive}`` takes msgpack and answers with it; `limpet.protocol.engine_msgpack` is the
form of both. Every request passes the dispatcher under a name such as ``engine.commit``, a group of commits singly.
What a caller may not see is left out of what a primitive answers, or the primitive is refused.

A commit that comes again because its answer was lost must not be done twice. The engine finds it in the log. What it
cannot find is a commit that is still on its way, here, so whoever comes again waits for that one; and a first attempt
that arrives after its retry is refused.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from starlette.requests import ClientDisconnect
from starlette.requests import Request as Incoming
from starlette.responses import Response
from starlette.routing import Route

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
from limpet.keys import PAGE_MAX, Span, fit, key_span
from limpet.model import (
    Batch,
    Change,
    Commit,
    Entry,
    Expire,
    Family,
    LogPage,
    Patch,
    Put,
    Refusal,
    ScanPage,
    Status,
    Window,
    Write,
    fingerprint,
)
from limpet.protocol import engine_msgpack as wire
from limpet.protocol.codes import code_of
from limpet.server import validate as nouns
from limpet.server.dispatch import Caller, Callers, Dispatcher
from limpet.server.events import until_refused
from limpet.server.http import TokenRefused, identify
from limpet.server.operations import Operation, Reach, Right, depends_on_value
from limpet.server.requests import REASON_MAX, Primitive
from limpet.server.wording import Public, public_error
from limpet.session import Session
from limpet.store import Store
from limpet.sweep import SWEEP_MAX
from limpet.transition import read_receipt

__all__ = ["LIMITS", "routes"]

LIMITS: Final = wire.Limits(request_bytes=8_000_000, batches=128, keys=nouns.KEYS_MAX, wait_s=25.0)
"""What one request may ask. A batch of the largest values fits into it."""

READ_BYTES_MAX: Final = 64_000_000
"""How much one read may answer with. Its keys are read at one moment, so that it has no pages."""

CHANGES_MAX: Final = 1_000

BODY_S: Final = 30.0
RETRY_AFTER_S: Final = 1

REASON: Final = "Limpet-Reason"

_EVERYTHING: Final = (Span("", None),)


def routes(
    session: Session, *, callers: Callers, dispatcher: Dispatcher, ending: asyncio.Event | None = None
) -> list[Route]:
    """The routes of the primitives.

    Args:
        session: The opened engine that is served.
        callers: Who knows who asks.
        dispatcher: What every request passes.
        ending: Set when the server ends, so that nobody is kept waiting. Without it, a wait ends with its task.
    """
    counter = _Counter(session, callers, dispatcher, ending or asyncio.Event())
    return [
        Route("/v1/engine", counter.tell, methods=["GET"]),
        Route("/v1/{namespace}/engine/{primitive}", counter.serve, methods=["POST"]),
    ]


class Refused(Conflict):
    """A guard did not hold, for observers to count. Whoever asked gets the refusal itself."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.key, expected="what its guard says", current=None)
        self.refusal = refusal


Serve = Callable[["_Visit", bytes], Awaitable[Any]]


class _Visit(NamedTuple):
    """Somebody who asks something of a namespace."""

    caller: Caller
    namespace: str
    incoming: Incoming

    def may(self, right: Right, spans: Sequence[Span]) -> bool:
        return self.caller.may(self.namespace, right, spans)

    def sees(self, key: str, *, with_value: bool = True) -> bool:
        """Whether it may read a key."""
        spans = (key_span(key),)
        return self.may("read", spans) and (not with_value or self.may("reveal", spans))

    def sees_in(self, family: Family, key: str, *, with_value: bool = True) -> bool:
        """Whether it may read what is under a name in a family."""
        concerned = _key_of(family, key)
        return self.sees_all if concerned is None else self.sees(concerned, with_value=with_value)

    def sees_value(self, write: Write) -> bool:
        """Whether it may see a value where it writes."""
        return self.may("reveal", _spans_of(write.family, [write.key]))

    @property
    def sees_all(self) -> bool:
        return self.may("read", _EVERYTHING) and self.may("reveal", _EVERYTHING)

    @property
    def reason(self) -> str | None:
        """Why it does what only an admin may, if it said so."""
        given = self.incoming.headers.get(REASON, "").strip()
        return given[:REASON_MAX] or None

    def demand(self, right: Right, spans: Sequence[Span], *others: Right) -> None:
        """Raise unless it has the right, or one of the others, on all of these keys."""
        if not any(self.may(one, spans) for one in (right, *others)):
            raise PermissionDenied(f"{self.caller.name} may not {right} there in namespace {self.namespace!r}")


class _Counter:
    """Where primitives are asked for."""

    def __init__(self, session: Session, callers: Callers, dispatcher: Dispatcher, ending: asyncio.Event) -> None:
        self._session = session
        self._callers = callers
        self._desk = dispatcher
        self._ending = ending
        self._attempts = _Attempts()
        self._primitives: dict[str, Serve] = {
            "read": self._read,
            "scan": self._scan,
            "commit": self._commit,
            "changes": self._changes,
            "due": self._due,
            "trim": self._trim,
            "status": self._status,
        }

    async def tell(self, incoming: Incoming) -> Response:
        """What the engine is, and what one request may ask."""
        try:
            await self._caller(incoming)
        except Exception as error:
            return _failed(error)
        return _answered(wire.Served(self._session.engine.traits, LIMITS))

    async def serve(self, incoming: Incoming) -> Response:
        """Run a primitive."""
        namespace, name = incoming.path_params["namespace"], incoming.path_params["primitive"]
        primitive = self._primitives.get(name)
        try:
            caller = await self._caller(incoming)
        except Exception as error:
            return _failed(error)
        try:
            if primitive is None:
                raise InvalidValue(f"an engine has no such primitive; it has {', '.join(self._primitives)}")
            body = await _body(incoming)
            return _answered(await primitive(_Visit(caller, namespace, incoming), body))
        except _Noted as noted:
            return _failed(noted.error)
        except Exception as error:
            self._desk.report_refusal(caller, namespace, f"engine.{name}" if primitive else "engine", error)
            return _failed(error)

    async def _caller(self, incoming: Incoming) -> Caller:
        try:
            return await identify(incoming, self._callers)
        except TokenRefused as error:
            raise _Unknown(str(error)) from error

    async def _run(self, visit: _Visit, operation: Operation, what: Any, reason: str | None = None) -> Any:
        """Have the dispatcher run a primitive. What goes wrong there it has told its observers."""
        try:
            asked = Primitive(what=what, reason=reason)
            answer = await self._desk.run(operation, visit.namespace, asked, visit.caller)
        except Exception as error:
            raise _Noted(error) from error
        return answer["answer"]

    # Reading --------------------------------------------------------------------

    async def _read(self, visit: _Visit, body: bytes) -> Any:
        asked = wire.decode(body, wire.Read)
        nouns.check_read(asked)
        # A request id is no key, so who may read a receipt is known when it has been read.
        reach = Reach() if asked.family == "receipt" else Reach(_spans_of(asked.family, asked.keys), asked.keys)
        reveals = asked.family != "lock"
        entries = await self._run(visit, self._reading("read", self._do_read, reach, reveals=reveals), asked)
        if asked.family == "receipt" and not visit.sees_all:
            own = await self._own_receipts(visit, asked.keys)
            return [
                entry if entry is not None and _is_for(visit, entry, is_own=mine) else None
                for entry, mine in zip(entries, own, strict=True)
            ]
        return entries

    async def _own_receipts(self, visit: _Visit, keys: Sequence[str]) -> list[bool]:
        """Which of these request ids the caller has used itself."""
        if not keys:
            return []
        engine = self._desk.session_of(visit.caller, visit.namespace, finds_others=False).engine
        return [entry is not None for entry in await engine.read(visit.namespace, keys, family="receipt")]

    async def _do_read(self, store: Store, asked: Primitive) -> dict[str, Any]:
        what: wire.Read = asked.what
        keys = what.keys
        # Each key once: whoever repeats a large one would otherwise have it read, and sent, a thousand times.
        once = list(dict.fromkeys(keys))
        entries = await store._session.engine.read(store.name, once, family=what.family) if once else []
        found = entries
        if len(once) < len(keys):
            by_key = dict(zip(once, entries, strict=True))
            found = [by_key[key] for key in keys]
        size_bytes = sum(entry.size_bytes for entry in found if entry is not None)
        if size_bytes > READ_BYTES_MAX:
            raise ValueTooLarge(keys[0], size_bytes=size_bytes, limit_bytes=READ_BYTES_MAX, what="the answer to a read")
        return {"answer": found}

    async def _scan(self, visit: _Visit, body: bytes) -> Any:
        asked = wire.decode(body, wire.Scan)
        nouns.check_scan(asked)
        # A filter tells of values, too.
        reveals = asked.family != "lock" and (asked.values or asked.where is not None)
        spans = [asked.span] if asked.family in _BY_KEY else _EVERYTHING
        found: ScanPage = await self._run(
            visit, self._reading("scan", self._do_scan, Reach(spans), reveals=reveals), asked
        )
        return _short_slice(found)

    async def _do_scan(self, store: Store, asked: Primitive) -> dict[str, Any]:
        what: wire.Scan = asked.what
        options: dict[str, Any] = {"family": what.family, "where": what.where, "values": what.values}
        engine = store._session.engine
        return {"answer": await engine.scan(store.name, what.span, limit=min(what.limit, PAGE_MAX), **options)}

    async def _status(self, visit: _Visit, _: bytes) -> Any:
        status: Status = await self._run(visit, self._reading("status", self._do_status, Reach()), None)
        if visit.may("read", _EVERYTHING):
            return status
        # What there is in all is not for everybody. Where the log is must be, or nobody could follow it.
        return msgspec.structs.replace(status, keys=0, size_bytes=0, log_changes=0, log_bytes=0)

    async def _do_status(self, store: Store, _: Primitive) -> dict[str, Any]:
        return {"answer": await store._session.engine.status(store.name)}

    # Following ------------------------------------------------------------------

    async def _changes(self, visit: _Visit, body: bytes) -> Any:
        asked = wire.decode(body, wire.Changes)
        nouns.check_changes(asked)
        reach = Reach() if asked.span is None else Reach([asked.span])
        operation = self._reading("changes", self._do_changes, reach, reveals=asked.span is not None)
        feed: LogPage = await self._run(visit, operation, asked)
        if not feed.changes and asked.wait_s > 0:
            waiting = msgspec.structs.replace(asked, wait_s=min(asked.wait_s, LIMITS.wait_s))
            feed = await self._news(visit, operation, waiting)
        feed = _short_feed(feed)
        if asked.span is None and not visit.sees_all:
            seen = [change for change in feed.changes if _is_seen(visit, change)]
            # Who does not see the change at the head still has to recognise it when going on from there.
            at = fingerprint(feed.changes[-1]) if feed.changes else None
            feed = msgspec.structs.replace(feed, changes=seen, at=at)
        return feed

    async def _do_changes(self, store: Store, asked: Primitive) -> dict[str, Any]:
        return {"answer": await _feed(store._session, store.name, asked.what, 0.0)}

    async def _news(self, visit: _Visit, operation: Operation, asked: wire.Changes) -> LogPage:
        """Wait for changes, while the caller is there and still allowed to see them.

        Observers have heard of the look before. How long nothing came, and that the caller left, is no news to them.
        """
        session = self._desk.session_of(visit.caller, visit.namespace)
        news = asyncio.ensure_future(_feed(session, visit.namespace, asked, asked.wait_s))
        gone = asyncio.ensure_future(_gone(visit.incoming))
        ending = asyncio.ensure_future(self._ending.wait())
        refused = asyncio.ensure_future(until_refused(lambda: self._check_again(visit, operation), self._callers))
        waiting = (news, gone, ending, refused)
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if news.done():
                await self._check_again(visit, operation)
                return news.result()
            if refused.done():
                raise refused.result()
            raise _Gone("the server is stopping" if ending.done() else "the caller has left")
        except Exception as error:
            raise _Noted(error) from error
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _check_again(self, visit: _Visit, operation: Operation) -> None:
        """Raise unless the caller is still allowed to see what it waits for."""
        caller = await self._caller(visit.incoming)
        self._desk.check_rights(operation, visit.namespace, Primitive(what=None), caller)

    # Care -----------------------------------------------------------------------

    async def _due(self, visit: _Visit, body: bytes) -> Any:
        asked = wire.decode(body, wire.Due)
        nouns.check_due(asked)
        return await self._run(visit, self._caring(visit, "due", self._do_due), asked)

    async def _do_due(self, store: Store, asked: Primitive) -> dict[str, Any]:
        return {"answer": await store._session.engine.due(store.name, limit=min(asked.what.limit, SWEEP_MAX))}

    async def _trim(self, visit: _Visit, body: bytes) -> Any:
        asked = wire.decode(body, Window)
        check_window(asked)
        # Watchers of other callers count on the last of the log, and nobody may take it from them.
        age_ms_min = max(asked.age_ms_min, self._session.sweeper.window.age_ms_min)
        window = msgspec.structs.replace(asked, age_ms_min=age_ms_min)
        operation = Operation("engine.trim", Primitive, "admin", self._do_trim, lambda _: Reach(_EVERYTHING))
        return await self._run(visit, operation, window)

    async def _do_trim(self, store: Store, asked: Primitive) -> dict[str, Any]:
        return {"answer": await store._session.engine.trim(store.name, asked.what)}

    # Committing -----------------------------------------------------------------

    async def _commit(self, visit: _Visit, body: bytes) -> Any:
        asked = wire.decode(body, wire.Commits)
        if len(asked.batches) > LIMITS.batches:
            raise InvalidValue(f"one request has up to {LIMITS.batches} batches, this one {len(asked.batches)}")
        return await asyncio.gather(*(self._commit_one(visit, batch) for batch in asked.batches))

    async def _commit_one(self, visit: _Visit, sent: msgspec.Raw) -> msgspec.Raw:
        """Commit a batch. What goes wrong is an outcome, for the others of the group are not concerned."""
        batch = Batch((), ())
        try:
            try:
                reason = visit.reason if visit.may("admin", _EVERYTHING) else None
                batch = wire.decode_batch(sent)
                batch = nouns.checked_batch(
                    batch, value_bytes_max=self._session.value_bytes_max, any_lock=reason is not None
                )
                forced = _check_rights(visit, batch, reason)
            except Exception as error:
                self._desk.report_refusal(visit.caller, visit.namespace, "engine.commit", error)
                raise
            outcome = await self._attempts.run(
                visit,
                batch,
                lambda: self._run(visit, self._committing(visit, batch), batch, reason if forced else None),
            )
        except _Noted as noted:
            if not isinstance(noted.error, Refused):
                return wire.encode_outcome(public_error(noted.error), batch)
            outcome = noted.error.refusal
        except Exception as error:
            return wire.encode_outcome(public_error(error), batch)
        return wire.encode_outcome(_concealed(visit, batch, outcome), batch)

    async def _do_commit(self, store: Store, asked: Primitive) -> dict[str, Any]:
        batch: Batch = asked.what
        outcome = await store._session.commit(store.name, batch)
        if isinstance(outcome, Refusal):
            if outcome.reason == "stale_request" or (outcome.guard is not None and outcome.guard.family == "data"):
                raise Refused(outcome)
            if outcome.reason == "size" and batch.value_bytes_max == self._session.value_bytes_max:
                # The client names the limit that it was opened with. This one may be another.
                raise ValueTooLarge(
                    outcome.key, size_bytes=outcome.size_bytes, limit_bytes=batch.value_bytes_max, what="the record"
                )
        return {"answer": outcome}

    # Rows for the dispatcher ------------------------------------------------------------

    def _reading(self, name: str, run: Any, reach: Reach, *, reveals: bool = False) -> Operation:
        return Operation(f"engine.{name}", Primitive, "read", run, lambda _: reach, reveals=reveals)

    def _caring(self, visit: _Visit, name: str, run: Any) -> Operation:
        right: Right = "admin" if visit.may("admin", _EVERYTHING) else "write"
        return Operation(f"engine.{name}", Primitive, right, run, lambda _: Reach(_EVERYTHING))

    def _committing(self, visit: _Visit, batch: Batch) -> Operation:
        """The row for a batch. It asks for one right only; `_check_rights` has asked for all."""
        asked = (*batch.writes, *batch.guards)
        keys = [write.key for write in batch.writes if write.family == "data" and not isinstance(write, Expire)]
        weighed = [one for one in asked if one.family != "lock" and not isinstance(one, Expire)]
        spans = [span for one in weighed for span in _spans_of(one.family, [one.key])]
        right: Right = "write"
        if all(isinstance(one, Expire) for one in asked):
            right = "write" if visit.may("write", ()) else "admin"
        elif not spans:
            spans = [key_span(one.key) for one in asked]
            rights: Sequence[Right] = ("lock", "write", "admin")
            right = next((one for one in rights if visit.may(one, spans)), "write")
        return Operation("engine.commit", Primitive, right, self._do_commit, lambda _: Reach(spans, keys))


class _Attempts:
    """Commits that are under way. What is asked again meanwhile waits for the first answer."""

    def __init__(self) -> None:
        self._under_way: dict[tuple[str, str, str | None], tuple[Batch, asyncio.Future[Any]]] = {}

    async def run(self, visit: _Visit, batch: Batch, commit: Callable[[], Awaitable[Any]]) -> Any:
        """Commit a batch, unless it is under way already."""
        name = (visit.caller.name, visit.namespace, batch.request_id)
        if batch.retry_since is not None:
            earlier = self._under_way.get(name)
            if earlier is not None and _is_same(earlier[0], batch):
                await asyncio.wait((earlier[1],))
                if not earlier[1].cancelled() and _is_settled(earlier[1].exception()):
                    return earlier[1].result()
        if name in self._under_way:
            return await commit()
        work = asyncio.ensure_future(commit())
        self._under_way[name] = batch, work
        try:
            return await work
        finally:
            del self._under_way[name]


def _is_same(first: Batch, again: Batch) -> bool:
    return (first.guards, first.writes) == (again.guards, again.writes)


def _is_settled(error: BaseException | None) -> bool:
    """Whether a commit came to an answer. If not, its retry asks the engine."""
    return error is None or (isinstance(error, _Noted) and isinstance(error.error, Refused))


# Rights -------------------------------------------------------------------------

_BY_KEY: Final[tuple[Family, ...]] = ("data", "lock")


def _spans_of(family: Family, keys: Sequence[str]) -> Sequence[Span]:
    """What names in a family concern: see `_key_of`; where that is no key, the whole namespace."""
    concerned = [_key_of(family, key) for key in keys]
    return _EVERYTHING if None in concerned else [key_span(key) for key in concerned if key is not None]


def _key_of(family: Family, name: str) -> str | None:
    """The key that a name in a family concerns: keys and locks themselves, and of a copy the key that it is of."""
    if family in _BY_KEY:
        return name
    kind, _, key = name.partition("/")
    return key if family == "recoverable" and kind in ("live", "over") and key else None


def _check_rights(visit: _Visit, batch: Batch, reason: str | None) -> bool:
    """What a batch takes: the right to write each key that it writes or names, and to see what its answer depends on.

    Returns whether it writes a lock that its caller does not hold, which an admin may who gives a reason.
    """
    is_forced = False
    for write in batch.writes:
        spans = _spans_of(write.family, [write.key])
        if isinstance(write, Expire):
            # It ends only what has ended.
            visit.demand("write", spans, "lock", "admin")
        elif write.family == "lock":
            if nouns.is_ownership_proven(write, batch):
                visit.demand("lock", spans)
            elif reason is None:
                raise PermissionDenied(
                    f"lock {write.key!r} is written by its holder, under its token, or when it is free; "
                    f"an admin ends it with a reason, in the header {REASON}"
                )
            else:
                is_forced = True
        else:
            visit.demand("write", spans)
            # A patch answers with the whole record.
            if depends_on_value(write) or isinstance(write, Patch):
                visit.demand("reveal", spans)
    for guard in batch.guards:
        spans = _spans_of(guard.family, [guard.key])
        if guard.family == "lock":
            visit.demand("lock", spans, "write")
        else:
            visit.demand("write", spans)
            if depends_on_value(guard.condition):
                visit.demand("reveal", spans)
    return is_forced


def _concealed(visit: _Visit, batch: Batch, outcome: Commit | Refusal) -> Commit | Refusal:
    """An outcome without the values that the caller may not see."""
    if isinstance(outcome, Refusal):
        found = outcome.found
        family = "data" if outcome.guard is None else outcome.guard.family
        if found is None or family == "lock" or visit.sees_in(family, found.key):
            return outcome
        return msgspec.structs.replace(outcome, found=found.without_value())
    entries = tuple(
        entry.without_value() if entry is not None and write.family != "lock" and not _may_have(visit, write) else entry
        for entry, write in zip(outcome.entries, batch.writes, strict=True)
    )
    ended = tuple(
        entry.without_value() if entry is not None and not visit.sees_value(write) else entry
        for entry, write in zip(outcome.ended, batch.writes, strict=True)
    )
    return msgspec.structs.replace(outcome, entries=entries, ended=ended)


def _may_have(visit: _Visit, write: Write) -> bool:
    return isinstance(write, Put) or visit.sees_value(write)


def _is_seen(visit: _Visit, change: Change) -> bool:
    return visit.sees_in(change.family, change.key, with_value=change.family != "lock")


def _is_for(visit: _Visit, receipt: Entry, *, is_own: bool) -> bool:
    """Whether a receipt tells of nothing that the caller may not see.

    Entries in a receipt have no family. What a caller has written itself may be the copy of a key that it sees.
    """
    commit = read_receipt(receipt).commit
    return all(
        visit.sees(entry.key) or (is_own and visit.sees_in("recoverable", entry.key))
        for entry in (*commit.entries, *commit.ended)
        if entry is not None
    )


# Pages --------------------------------------------------------------------------


def _short_slice(found: ScanPage) -> ScanPage:
    """As much of a slice as one answer holds."""
    count = fit(entry.size_bytes for entry in found.entries)
    if count == len(found.entries):
        return found
    return ScanPage(found.entries[:count], found.entries[count - 1].key)


def _short_feed(feed: LogPage) -> LogPage:
    """As much of the log as one answer holds."""
    count = fit(change.entry.size_bytes for change in feed.changes)
    if count == len(feed.changes):
        return feed
    return LogPage(feed.changes[:count], feed.changes[count - 1].revision, feed.before)


# HTTP ---------------------------------------------------------------------------


class _Noted(Exception):
    """An error that the observers have heard of, or need not."""

    def __init__(self, error: Exception) -> None:
        super().__init__(type(error).__name__)
        self.error = error


class _Unknown(PermissionDenied):
    """The caller is not known, which HTTP tells apart from one that lacks a right."""


class _Gone(Public, Unavailable):
    """The server or the caller goes away before there is an answer."""


class _Late(Public, Unavailable):
    """A request that takes too long to arrive."""


async def _feed(session: Session, namespace: str, asked: wire.Changes, wait_s: float) -> LogPage:
    return await session.engine.changes(
        namespace, asked.after, span=asked.span, limit=min(asked.limit, CHANGES_MAX), wait_s=wait_s
    )


async def _body(incoming: Incoming) -> bytes:
    """What was sent, if it is not too much and does not take for ever."""
    # A page of another site can have a browser send forms and text, but not this, without asking first.
    if incoming.headers.get("Content-Type", "").partition(";")[0].strip().lower() != wire.MEDIA:
        raise InvalidValue(f"a primitive is asked for in {wire.MEDIA}")
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
        raise _Late("the request did not arrive in time") from error
    except ClientDisconnect as error:
        raise _Noted(_Gone("the caller has left")) from error
    return bytes(body)


async def _gone(incoming: Incoming) -> None:
    """Wait until whoever asked has left."""
    while (await incoming.receive())["type"] != "http.disconnect":
        pass


def _answered(answer: Any) -> Response:
    return Response(wire.encode(answer), media_type=wire.MEDIA)


def _failed(error: Exception) -> Response:
    headers: dict[str, str] = {}
    status = code_of(error).status
    if isinstance(error, _Unknown):
        status, headers = 401, {"WWW-Authenticate": "Bearer"}
    elif isinstance(error, RateLimited):
        headers = {"Retry-After": str(math.ceil(error.retry_after))}
    elif isinstance(error, TransientError):
        headers = {"Retry-After": str(RETRY_AFTER_S)}
    return Response(wire.encode(wire.failure_of(public_error(error))), status, headers, wire.MEDIA)
