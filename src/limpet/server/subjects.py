"""The plugin storage: requests on NATS subjects, ``<prefix>.<plugin>.<operation>``.

Who asks is told by the subject and by nothing else; the permissions of NATS say who may use it. One subscription in a
queue group hears everything below the prefix, so that several servers share the load and each of them hears requests
in the order in which they were sent. They run side by side, as many as are allowed at once, in the order of their keys
(`limpet.server.key_queue`). Every request that wants an answer gets one, however malformed it is.

A request without a reply subject is carried out all the same, and what goes wrong is for the log alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import UNSET

from limpet.errors import (
    Ambiguous,
    InvalidKey,
    InvalidNamespace,
    InvalidTTL,
    InvalidValue,
    RateLimited,
    Unavailable,
    ValueTooLarge,
)
from limpet.keys import check_namespace
from limpet.retry import reason_of
from limpet.server import requests
from limpet.server.dispatch import Dispatcher, TrustedCaller
from limpet.server.key_queue import Order, Place
from limpet.server.nats_errors import reply_of
from limpet.server.nats_info import KEY_LENGTH_MAX, TTL_S_MAX, Endpoint, MicroService
from limpet.server.nats_watch import Deliveries, is_answerable
from limpet.server.operations import OPERATIONS, Operation, Reach
from limpet.server.outcome import redact

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

__all__ = ["Subjects"]

log = logging.getLogger("limpet.server")

DRAIN_S: Final = 5.0
FLUSH_S: Final = 1
BACKLOG_MAX: Final = 65_536
BACKLOG_BYTES_MAX: Final = 64 * 1024 * 1024
REFUSALS_MAX: Final = 4096
LOCKS_WAITING_MAX: Final = 1024
CALLERS_MAX: Final = 10_000
COMPLAIN_S: Final = 1.0
NAME_SHOWN_MAX: Final = 100

_WAITING: Final = "limpet-lock-wait"
_PAGES: Final = {"list": "keys", "scan": "entries", "kv_list": "entries", "history": "changes", "locks": "locks"}
"""Answers that may end early, and what they list."""
_NAMED: Final = {"locks": "name"}
_AFTER_WRITES: Final = frozenset({"list", "scan", "outcome", "status", "kv_list"})


async def _never(*_: Any) -> dict[str, Any]:
    raise InvalidValue("a watch is ended by the server that has it")


_UNWATCH: Final = Operation("unwatch", requests.Unwatch, "read", _never, lambda _: Reach())

_encode = msgspec.json.Encoder().encode


class _Request:
    """A request that was understood."""

    __slots__ = ("asked", "caller", "came", "endpoint", "plugin", "reply")

    def __init__(
        self, endpoint: Endpoint, plugin: str, asked: Any, reply: str, caller: TrustedCaller, came: float
    ) -> None:
        self.endpoint = endpoint
        self.plugin = plugin
        self.asked = asked
        self.reply = reply
        self.caller = caller
        self.came = came


class Subjects:
    """Serves a dispatcher on NATS.

    Args:
        dispatcher: What runs the requests. Its session holds values to 65,536 bytes.
        connection: A connection to NATS, which stays its owner's to close.
        prefix: What the subjects start with.
        queue: The queue group that servers share.
        at_once: How many requests run at once. Others wait.
        slow_s: After waiting that long for its turn, a request is worth a warning.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        connection: Client,
        *,
        prefix: str = "db.kv",
        queue: str = "limpet",
        at_once: int = 256,
        slow_s: float = 0.1,
    ) -> None:
        self._desk = dispatcher
        self._connection = connection
        self._prefix = check_prefix(prefix)
        self._queue = queue
        self._at_once = at_once
        self._slow_s = slow_s
        self.server_id: str = connection.new_inbox().rpartition(".")[2]
        self._endpoints = _endpoints()
        self._deliveries = Deliveries(connection, self.server_id)
        self._service = MicroService(connection, self.server_id, self._endpoints, prefix=prefix, queue=queue)
        self._subscription: Subscription | None = None
        self._hearing: Callable[..., Any] | None = None
        self._order = Order()
        self._running = 0
        self._waiting_for_locks = 0
        self._backlog: deque[tuple[str, str, bytes, float]] = deque()
        self._backlog_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._callers: dict[str, TrustedCaller] = {}
        self._delays = 0
        self._complained = 0.0
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop = asyncio.get_running_loop()

    @property
    def watches(self) -> int:
        """How many watches there are."""
        return len(self._deliveries)

    async def start(self) -> None:
        """Begin to serve."""
        await self._deliveries.start()
        subscription = await self._connection.subscribe(f"{self._prefix}.>", queue=self._queue, cb=self._heard)
        self._subscription = subscription
        self._hear_everything(subscription._id)
        await self._service.start()
        await settle(self._connection)

    async def drain(self, within_s: float = DRAIN_S) -> None:
        """Take no more requests, finish those under way, end watches.

        Whatever is not finished in time is cut off, and whoever asked is told so.
        """
        subscription, self._subscription = self._subscription, None
        if subscription is None:
            return
        until = self._loop.time() + within_s
        with contextlib.suppress(Exception):
            async with asyncio.timeout_at(until):
                await self._service.stop()
                # What NATS has sent until then is still answered.
                await subscription.drain()  # type: ignore[no-untyped-call]
                await settle(self._connection)
        for task in [*self._tasks]:
            if task.get_name() == _WAITING:
                task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._idle.wait()
        self._backlog.clear()
        while left := [*self._tasks]:
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        with contextlib.suppress(Exception):
            await self._deliveries.close()
        self._hear_as_before()
        with contextlib.suppress(Exception):
            await settle(self._connection, FLUSH_S)

    # Hearing ------------------------------------------------------------------

    def _hear_everything(self, number: int) -> None:
        """Take messages of our subscription before the driver looks at them.

        The driver stops reading for good, and keeps the connection, when a subject or a reply subject is not UTF-8 or
        headers are broken: anybody who may ask could make a server deaf. Besides, each message would pass through a
        queue and headers that nobody here reads.
        """
        heard = self._connection._process_msg

        async def hear(sid: int, subject: bytes, reply: bytes, body: bytes, headers: bytes) -> None:
            if sid != number:
                try:
                    await heard(sid, subject, reply, body, headers)
                except (UnicodeDecodeError, IndexError, ValueError) as error:
                    log.warning("a message that NATS passed on cannot be read: %s", type(error).__name__)
                return
            self._connection.stats["in_msgs"] += 1
            self._connection.stats["in_bytes"] += len(body)
            try:
                answer_to = reply.decode()
            except UnicodeDecodeError:
                answer_to = ""
            self._take(subject.decode(errors="replace"), answer_to, body)

        self._hearing = hear
        self._connection._process_msg = hear  # type: ignore[method-assign, assignment]

    def _hear_as_before(self) -> None:
        if vars(self._connection).get("_process_msg") is self._hearing:
            del self._connection._process_msg

    async def _heard(self, message: Msg) -> None:
        """The way of a message through a driver that has no such door."""
        self._take(message.subject, message.reply, message.data)

    def _take(self, subject: str, reply: str, body: bytes) -> None:
        """Begin a request, or let it wait while as many as are allowed run."""
        came = time.perf_counter()
        if self._running < self._at_once and not self._backlog:
            self._begin(subject, reply, body, came)
        elif len(self._backlog) < BACKLOG_MAX and self._backlog_bytes + len(body) <= BACKLOG_BYTES_MAX:
            self._backlog.append((subject, reply, body, came))
            self._backlog_bytes += len(body)
        else:
            plugin, _, name = subject[len(self._prefix) + 1 :].partition(".")
            # Where not even refusals get away any more, silence is all that is left.
            heard = reply if len(self._tasks) < REFUSALS_MAX else ""
            error = RateLimited("too many requests wait already", retry_after=1.0)
            self._refuse(plugin, name, heard, error, subject)

    def _begin(self, subject: str, reply: str, body: bytes, came: float) -> None:
        plugin, _, name = subject[len(self._prefix) + 1 :].partition(".")
        try:
            endpoint = self._endpoints.get(name)
            if endpoint is None:
                raise requests.InvalidSubject(subject)
            endpoint.requests += 1
            check_namespace(plugin)
            if reply and not is_answerable(reply, plugin):
                raise requests.InvalidReply(plugin)
            asked = _understood(endpoint, body)
        except Exception as error:
            self._refuse(plugin, name, reply, error, subject)
            return
        request = _Request(endpoint, plugin, asked, reply, self._caller(plugin), came)
        if name == "lock" and request.asked.wait > 0:
            self._begin_waiting(request)
            return
        # Locks and watches name no keys, and so they wait for nobody.
        place = Place(
            plugin,
            _keys(asked),
            writes=endpoint.operation.right_for(asked) == "write",
            after_writes=name in _AFTER_WRITES,
            request=request,
        )
        self._running += 1
        if self._order.enter(place):
            self._spawn(self._serve(place))

    def _begin_waiting(self, request: _Request) -> None:
        """Let somebody wait for a lock, beside what runs at once: it may take half a minute, and does no work."""
        if self._waiting_for_locks >= LOCKS_WAITING_MAX:
            error = RateLimited("too many wait for locks already", retry_after=1.0)
            self._refuse(request.plugin, "lock", request.reply, error)
        else:
            self._waiting_for_locks += 1
            self._spawn(self._wait_for_lock(request), name=_WAITING)

    def _spawn(self, serving: Any, name: str | None = None) -> None:
        task = self._loop.create_task(serving, name=name)
        self._tasks.add(task)
        self._idle.clear()
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not self._tasks and not self._backlog:
            self._idle.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a request could not be finished: %s", reason_of(error), exc_info=redact(error))

    def _caller(self, plugin: str) -> TrustedCaller:
        caller = self._callers.get(plugin)
        if caller is None:
            if len(self._callers) >= CALLERS_MAX:
                self._callers.clear()
            caller = self._callers[plugin] = TrustedCaller(f"plugin {plugin}")
        return caller

    # Serving ------------------------------------------------------------------

    async def _serve(self, place: Place) -> None:
        """Run a request whose turn it is, and let those behind it begin."""
        request: _Request = place.request
        if (waited := time.perf_counter() - request.came) > self._slow_s:
            self._note_delay(waited)
        try:
            match request.endpoint.operation.name:
                case "watch":
                    await self._watch(request)
                case "unwatch":
                    await self._unwatch(request)
                case _:
                    await self._answer(request)
        finally:
            for following in self._order.leave(place):
                self._spawn(self._serve(following))
            self._make_room()

    def _make_room(self) -> None:
        """One request less is under way: another may begin."""
        self._running -= 1
        while self._backlog and self._running < self._at_once:
            subject, reply, body, came = self._backlog.popleft()
            self._backlog_bytes -= len(body)
            self._begin(subject, reply, body, came)

    async def _answer(self, request: _Request) -> None:
        began = time.perf_counter()
        endpoint = request.endpoint
        try:
            answer = await self._desk.run(
                endpoint.operation, request.plugin, request.asked, request.caller, has_reply=bool(request.reply)
            )
            body = self._fitting(endpoint.operation.name, answer)
        except asyncio.CancelledError:
            body = self._error(endpoint, _cut_off(endpoint.operation, request.asked))
        except Exception as error:
            body = self._error(endpoint, error)
        endpoint.seconds += time.perf_counter() - began
        if request.reply:
            await self._send(request.reply, body)

    async def _wait_for_lock(self, request: _Request) -> None:
        try:
            await self._answer(request)
        finally:
            self._waiting_for_locks -= 1

    async def _watch(self, request: _Request) -> None:
        operation, plugin, asked = request.endpoint.operation, request.plugin, request.asked
        try:
            store = await self._desk.admit(operation, plugin, asked, request.caller)
            delivery, answer = await self._deliveries.begin(plugin, store, asked, request.reply)
        except Exception as error:
            self._refuse(plugin, operation.name, request.reply, error)
            return
        if request.reply:
            await self._send(request.reply, _encode({"success": True, **answer}))
        self._deliveries.run(delivery)

    async def _unwatch(self, request: _Request) -> None:
        ended = await self._deliveries.end(request.plugin, request.asked.watch)
        if request.reply:
            await self._send(request.reply, _encode({"success": True, "ended": ended}))

    def _refuse(self, plugin: str, name: str, reply: str, error: Exception, subject: str | None = None) -> None:
        """Answer a request that did not get as far as an operation. The log has what its subject said."""
        endpoint = self._endpoints.get(name)
        reply = reply if is_answerable(reply, plugin) else ""
        is_known = endpoint is not None and not isinstance(error, InvalidNamespace)
        # A caller is remembered only by a name that is one.
        caller = self._caller(plugin) if is_known else TrustedCaller(f"plugin {plugin[:NAME_SHOWN_MAX]}")
        self._desk.report_refusal(
            caller, plugin[:NAME_SHOWN_MAX], name[:NAME_SHOWN_MAX], error, has_reply=bool(reply), subject=subject
        )
        body = _encode(reply_of(error)) if endpoint is None else self._error(endpoint, error)
        if reply:
            self._running += 1
            self._spawn(self._send_refusal(reply, body))

    async def _send_refusal(self, reply: str, body: bytes) -> None:
        try:
            await self._send(reply, body)
        finally:
            self._make_room()

    def _error(self, endpoint: Endpoint, error: Exception) -> bytes:
        told = reply_of(error)
        endpoint.errors += 1
        endpoint.last_error = told["error_code"]
        body = _encode(told)
        if len(body) > self._connection.max_payload:
            # The value that a conflict found. Better a reply without it than none.
            told.pop("value", None)
            body = _encode(told)
        return body

    def _fitting(self, name: str, answer: dict[str, Any]) -> bytes:
        """An answer as NATS can carry it. A page may end early; anything else that is too large is an error."""
        body = _encode({"success": True, **answer})
        limit_bytes = self._connection.max_payload
        while len(body) > limit_bytes:
            listed = _PAGES.get(name, "")
            held = answer.get(listed)
            if not held or len(held) == 1:
                raise ValueTooLarge(name, size_bytes=len(body), limit_bytes=limit_bytes, what="the reply")
            count = max(1, len(held) * limit_bytes // (len(body) + len(body) // 8))
            # Of a history the latest are kept, and it goes on with older ones.
            kept = held[-count:] if name == "history" else held[:count]
            answer = {listed: kept, "truncated": True}
            if name == "list":
                answer["count"] = len(kept)
            else:
                answer["cursor"] = kept[0]["revision"] if name == "history" else kept[-1][_NAMED.get(name, "key")]
            body = _encode({"success": True, **answer})
        return body

    async def _send(self, reply: str, body: bytes) -> None:
        try:
            await self._connection.publish(reply, body)
        except Exception as error:
            # The connection is gone, or the reply subject is none. Whoever asked will ask again.
            log.warning("a reply could not be sent: %s", type(error).__name__)

    def _note_delay(self, seconds: float) -> None:
        """Warn of requests that waited for their turn, once a second and not once a request."""
        self._delays += 1
        now = time.monotonic()
        if now - self._complained >= COMPLAIN_S:
            log.warning("%d requests waited for their turn, the latest %.0f ms", self._delays, seconds * 1000)
            self._complained, self._delays = now, 0


async def settle(connection: Client, timeout_s: int = 10) -> None:
    """Wait until NATS has heard everything that was said on a connection."""
    # The driver writes its ping past what is still waiting to be written, so the first answer tells nothing.
    await connection.flush(timeout_s)
    await connection.flush(timeout_s)


def _endpoints() -> dict[str, Endpoint]:
    shapes: dict[str, type[requests.Request]] = {"watch": requests.Deliver}
    rows = (*OPERATIONS.values(), _UNWATCH)
    return {row.name: Endpoint(row, shapes.get(row.name, row.request)) for row in rows}


def _cut_off(operation: Operation, asked: Any) -> Exception:
    """What to say of a request that the end of the server did not wait for."""
    if operation.right_for(asked) != "write":
        return Unavailable("the server is stopping")
    request_id = getattr(asked, "request_id", None)
    return Ambiguous("the server stopped before it knew what became of the write", request_id=request_id)


def check_prefix(prefix: str) -> str:
    """Return a prefix of subjects, or raise `InvalidValue`."""
    words = prefix.split(".")
    if not all(word and word.isprintable() and not set(word) & set(" *>$") for word in words):
        raise InvalidValue("a prefix is words joined by dots, such as db.kv, without spaces, wildcards and '$'")
    return prefix


# What a request of this face must be ------------------------------------------


def _understood(endpoint: Endpoint, body: bytes) -> requests.Request:
    """A request, by the shape of its operation and the narrower rules of this face."""
    try:
        asked = endpoint.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # Once more, step by step, to tell what is wrong.
        asked = requests.request_of(endpoint.shape, requests.parse(body))
    _check(asked)
    if isinstance(asked, requests.Batch):
        for part in _parts(asked):
            _check(part)
    return asked


def _check(asked: Any) -> None:
    key = getattr(asked, "key", None) or getattr(asked, "name", None)
    if key is not None and len(key) > KEY_LENGTH_MAX:
        raise InvalidKey(key, f"it is {len(key):,} characters, limit {KEY_LENGTH_MAX}")
    ttl = getattr(asked, "ttl", None)
    if ttl is not None and ttl is not UNSET and (type(ttl) is not int or not 1 <= ttl <= TTL_S_MAX):
        error = InvalidTTL("")
        error.args = (f"ttl is a whole number of seconds from 1 to {TTL_S_MAX}, or null for never",)
        raise error


def _parts(batch: requests.Batch) -> list[requests.BatchWrite | requests.BatchGuard]:
    return [*batch.writes, *batch.guards]


def _keys(asked: Any) -> Sequence[str]:
    """The keys that a request names, each once."""
    if isinstance(asked, requests.Batch):
        return [*dict.fromkeys(part.key for part in _parts(asked))]
    if isinstance(asked, requests.KvPut | requests.KvDelete | requests.KvBatch):
        written = [item.key for item in asked.items] if isinstance(asked, requests.KvBatch) else [asked.key]
        return [*dict.fromkeys([*written, *([] if asked.held is None else [asked.held.key])])]
    key = getattr(asked, "key", None)
    return () if key is None else (key,)
