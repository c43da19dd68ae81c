"""The plugin storage: requests on NATS subjects, ``<prefix>.<plugin>.<operation>``.

The subject alone identifies the caller; NATS permissions decide who may use it. One subscription in a queue group
receives everything below the prefix, so that several servers share the load and each of them receives requests in the
order in which they were sent. Requests run concurrently up to a limit, in the order of their keys
(`limpet.server.key_queue`). Every request that expects a reply gets one, however malformed it is.

A request without a reply subject is carried out all the same, and its errors go to the log alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

import msgspec

from limpet.errors import Ambiguous, InvalidNamespace, InvalidValue, RateLimited, Unavailable, ValueTooLarge
from limpet.keys import check_namespace
from limpet.retry import reason_of
from limpet.server import requests
from limpet.server.dispatch import Dispatcher, TrustedCaller
from limpet.server.key_queue import KeyQueue, Slot
from limpet.server.nats_errors import reply_of
from limpet.server.nats_info import MicroService
from limpet.server.nats_requests import NatsEndpoint, decode_request, request_keys
from limpet.server.nats_watch import Deliveries, is_answerable
from limpet.server.operations import OPERATIONS, Operation, Reach
from limpet.server.outcome import redact

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

__all__ = ["PluginSubjects"]

log = logging.getLogger("limpet.server")

DRAIN_S: Final = 5.0
FLUSH_S: Final = 1
BACKLOG_MAX: Final = 65_536
BACKLOG_BYTES_MAX: Final = 64 * 1024 * 1024
REFUSALS_MAX: Final = 4096
LOCKS_WAITING_MAX: Final = 1024
CALLERS_MAX: Final = 10_000
DELAY_WARNING_S: Final = 1.0
NAME_SHOWN_MAX: Final = 100

_LOCK_WAIT: Final = "limpet-lock-wait"
_PAGES: Final = {
    "list": "keys",
    "scan": "entries",
    "children": "children",
    "kv_list": "entries",
    "history": "changes",
    "locks": "locks",
}
"""Replies that may end early, and the member that is cut."""
_CURSOR_MEMBERS: Final = {"locks": "name"}
_AFTER_WRITES: Final = frozenset({"children", "delete_prefix", "list", "scan", "outcome", "status", "kv_list"})


async def _never(*_: Any) -> dict[str, Any]:
    raise InvalidValue("a watch is ended by the server that runs it")


_UNWATCH: Final = Operation("unwatch", requests.Unwatch, "read", _never, lambda _: Reach())

_encode = msgspec.json.Encoder().encode


class _Message:
    """A message with a valid request."""

    __slots__ = ("caller", "endpoint", "plugin", "received_at", "reply", "request")

    def __init__(
        self,
        endpoint: NatsEndpoint,
        plugin: str,
        request: Any,
        reply: str,
        caller: TrustedCaller,
        received_at: float,
    ) -> None:
        self.endpoint = endpoint
        self.plugin = plugin
        self.request = request
        self.reply = reply
        self.caller = caller
        self.received_at = received_at


class PluginSubjects:
    """Serves a dispatcher on NATS.

    Args:
        dispatcher: Runs the requests. Its session limits values to 65,536 bytes.
        connection: A connection to NATS. Its owner closes it.
        prefix: The beginning of the subjects.
        queue: The queue group that servers share.
        at_once: How many requests run at once. Others wait.
        slow_s: A request that waited longer than this is counted in a warning.
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
        self._dispatcher = dispatcher
        self._connection = connection
        self._prefix = check_prefix(prefix)
        self._queue_group = queue
        self._at_once = at_once
        self._slow_s = slow_s
        self.server_id: str = connection.new_inbox().rpartition(".")[2]
        self._endpoints = _make_endpoints()
        self._deliveries = Deliveries(connection, self.server_id)
        self._service = MicroService(connection, self.server_id, self._endpoints, prefix=prefix, queue=queue)
        self._subscription: Subscription | None = None
        self._interceptor: Callable[..., Any] | None = None
        self._queue = KeyQueue()
        self._running = 0
        self._waiting_for_locks = 0
        self._backlog: deque[tuple[str, str, bytes, float]] = deque()
        self._backlog_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._callers: dict[str, TrustedCaller] = {}
        self._delayed = 0
        self._warned_at = 0.0
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop = asyncio.get_running_loop()

    @property
    def watches(self) -> int:
        """The number of watches."""
        return len(self._deliveries)

    async def start(self) -> None:
        """Start to serve."""
        await self._deliveries.start()
        subscription = await self._connection.subscribe(f"{self._prefix}.>", queue=self._queue_group, cb=self._receive)
        self._subscription = subscription
        self._intercept(subscription._id)
        await self._service.start()
        await settle(self._connection)

    async def drain(self, within_s: float = DRAIN_S) -> None:
        """Take no more requests, finish the running ones, end watches.

        A request that is not finished in time is cancelled, and its caller gets an error.
        """
        subscription, self._subscription = self._subscription, None
        if subscription is None:
            return
        until = self._loop.time() + within_s
        with contextlib.suppress(Exception):
            async with asyncio.timeout_at(until):
                await self._service.stop()
                # Messages that NATS has sent until then still get a reply.
                await subscription.drain()  # type: ignore[no-untyped-call]
                await settle(self._connection)
        for task in [*self._tasks]:
            if task.get_name() == _LOCK_WAIT:
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
        self._stop_intercepting()
        with contextlib.suppress(Exception):
            await settle(self._connection, FLUSH_S)

    # Receiving ----------------------------------------------------------------

    def _intercept(self, own_sid: int) -> None:
        """Take the messages of our subscription before the driver parses them.

        The driver stops reading for good, and keeps the connection, when a subject or a reply subject is not UTF-8 or
        headers are broken: any caller could make a server deaf. Besides, each message would pass through a queue and
        a header parser that are not needed here.
        """
        process_msg = self._connection._process_msg

        async def intercept(sid: int, subject: bytes, reply: bytes, body: bytes, headers: bytes) -> None:
            if sid != own_sid:
                try:
                    await process_msg(sid, subject, reply, body, headers)
                except (UnicodeDecodeError, IndexError, ValueError) as error:
                    log.warning("a message from NATS cannot be parsed: %s", type(error).__name__)
                return
            self._connection.stats["in_msgs"] += 1
            self._connection.stats["in_bytes"] += len(body)
            try:
                reply_subject = reply.decode()
            except UnicodeDecodeError:
                reply_subject = ""
            self._accept(subject.decode(errors="replace"), reply_subject, body)

        self._interceptor = intercept
        self._connection._process_msg = intercept  # type: ignore[method-assign, assignment]

    def _stop_intercepting(self) -> None:
        if vars(self._connection).get("_process_msg") is self._interceptor:
            del self._connection._process_msg

    async def _receive(self, message: Msg) -> None:
        """Receive a message from a driver that has no `_process_msg` to intercept."""
        self._accept(message.subject, message.reply, message.data)

    def _accept(self, subject: str, reply: str, body: bytes) -> None:
        """Start a request, or put it into the backlog while as many as allowed run."""
        received_at = time.perf_counter()
        if self._running < self._at_once and not self._backlog:
            self._start(subject, reply, body, received_at)
        elif len(self._backlog) < BACKLOG_MAX and self._backlog_bytes + len(body) <= BACKLOG_BYTES_MAX:
            self._backlog.append((subject, reply, body, received_at))
            self._backlog_bytes += len(body)
        else:
            plugin, _, name = subject[len(self._prefix) + 1 :].partition(".")
            # When even refusals pile up unsent, drop the request without a reply.
            reply = reply if len(self._tasks) < REFUSALS_MAX else ""
            error = RateLimited("too many requests wait already; try again later", retry_after=1.0)
            self._refuse(plugin, name, reply, error, subject)

    def _start(self, subject: str, reply: str, body: bytes, received_at: float) -> None:
        plugin, _, name = subject[len(self._prefix) + 1 :].partition(".")
        try:
            endpoint = self._endpoints.get(name)
            if endpoint is None:
                raise requests.InvalidSubject(subject)
            endpoint.requests += 1
            check_namespace(plugin)
            if reply and not is_answerable(reply, plugin):
                raise requests.InvalidReply(plugin)
            request = decode_request(endpoint, body)
        except Exception as error:
            self._refuse(plugin, name, reply, error, subject)
            return
        message = _Message(endpoint, plugin, request, reply, self._caller(plugin), received_at)
        if name == "lock" and message.request.wait > 0:
            self._start_lock_wait(message)
            return
        # Requests for locks and watches name no keys, and so they wait for no other.
        slot = Slot(
            plugin,
            request_keys(request),
            writes=endpoint.operation.right_for(request) == "write",
            after_writes=name in _AFTER_WRITES,
            request=message,
        )
        self._running += 1
        if self._queue.enter(slot):
            self._spawn(self._serve(slot))

    def _start_lock_wait(self, message: _Message) -> None:
        """Wait for a lock outside the limit of running requests: it may take half a minute, and does no work."""
        if self._waiting_for_locks >= LOCKS_WAITING_MAX:
            error = RateLimited("too many requests wait for locks already; try again later", retry_after=1.0)
            self._refuse(message.plugin, "lock", message.reply, error)
        else:
            self._waiting_for_locks += 1
            self._spawn(self._wait_for_lock(message), name=_LOCK_WAIT)

    def _spawn(self, coroutine: Coroutine[Any, Any, None], name: str | None = None) -> None:
        task = self._loop.create_task(coroutine, name=name)
        self._tasks.add(task)
        self._idle.clear()
        task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[None]) -> None:
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
            caller = self._callers[plugin] = TrustedCaller(f"plugin {plugin}", writer=plugin)
        return caller

    # Serving ------------------------------------------------------------------

    async def _serve(self, slot: Slot) -> None:
        """Run a request whose turn it is, then start those that waited for it."""
        message: _Message = slot.request
        if (waited_s := time.perf_counter() - message.received_at) > self._slow_s:
            self._note_delay(waited_s)
        try:
            match message.endpoint.operation.name:
                case "watch":
                    await self._watch(message)
                case "unwatch":
                    await self._unwatch(message)
                case _:
                    await self._reply(message)
        finally:
            for ready in self._queue.leave(slot):
                self._spawn(self._serve(ready))
            self._start_next()

    def _start_next(self) -> None:
        """Count one running request less, and start what waits in the backlog."""
        self._running -= 1
        while self._backlog and self._running < self._at_once:
            subject, reply, body, received_at = self._backlog.popleft()
            self._backlog_bytes -= len(body)
            self._start(subject, reply, body, received_at)

    async def _reply(self, message: _Message) -> None:
        began = time.perf_counter()
        endpoint = message.endpoint
        try:
            answer = await self._dispatcher.run(
                endpoint.operation, message.plugin, message.request, message.caller, has_reply=bool(message.reply)
            )
            body = self._encode_reply(endpoint.operation.name, answer)
        except asyncio.CancelledError:
            body = self._encode_error(endpoint, _cancelled_error(endpoint.operation, message.request))
        except Exception as error:
            body = self._encode_error(endpoint, error)
        endpoint.seconds += time.perf_counter() - began
        if message.reply:
            await self._send(message.reply, body)

    async def _wait_for_lock(self, message: _Message) -> None:
        try:
            await self._reply(message)
        finally:
            self._waiting_for_locks -= 1

    async def _watch(self, message: _Message) -> None:
        operation, plugin, request = message.endpoint.operation, message.plugin, message.request
        try:
            store = await self._dispatcher.admit(operation, plugin, request, message.caller)
            delivery, answer = await self._deliveries.begin(plugin, store, request, message.reply)
        except Exception as error:
            self._refuse(plugin, operation.name, message.reply, error)
            return
        if message.reply:
            await self._send(message.reply, _encode({"success": True, **answer}))
        self._deliveries.run(delivery)

    async def _unwatch(self, message: _Message) -> None:
        ended = await self._deliveries.end(message.plugin, message.request.watch)
        if message.reply:
            await self._send(message.reply, _encode({"success": True, "ended": ended}))

    def _refuse(self, plugin: str, name: str, reply: str, error: Exception, subject: str | None = None) -> None:
        """Refuse a request that did not get as far as an operation. The log names its subject."""
        endpoint = self._endpoints.get(name)
        reply = reply if is_answerable(reply, plugin) else ""
        is_known = endpoint is not None and not isinstance(error, InvalidNamespace)
        # Do not keep unvalidated subject text as the name of a caller.
        caller = self._caller(plugin) if is_known else TrustedCaller(f"plugin {plugin[:NAME_SHOWN_MAX]}")
        self._dispatcher.report_refusal(
            caller, plugin[:NAME_SHOWN_MAX], name[:NAME_SHOWN_MAX], error, has_reply=bool(reply), subject=subject
        )
        body = _encode(reply_of(error)) if endpoint is None else self._encode_error(endpoint, error)
        if reply:
            self._running += 1
            self._spawn(self._send_refusal(reply, body))

    async def _send_refusal(self, reply: str, body: bytes) -> None:
        try:
            await self._send(reply, body)
        finally:
            self._start_next()

    def _encode_error(self, endpoint: NatsEndpoint, error: Exception) -> bytes:
        reply = reply_of(error)
        endpoint.errors += 1
        endpoint.last_error = reply["error_code"]
        body = _encode(reply)
        if len(body) > self._connection.max_payload:
            # The value that a conflict found does not fit. A reply without it is better than no reply.
            reply.pop("value", None)
            body = _encode(reply)
        return body

    def _encode_reply(self, name: str, answer: dict[str, Any]) -> bytes:
        """Encode a reply that fits into a NATS message. A page may end early; any other that is too large fails."""
        body = _encode({"success": True, **answer})
        limit_bytes = self._connection.max_payload
        while len(body) > limit_bytes:
            member = _PAGES.get(name, "")
            items = answer.get(member)
            if not items or len(items) == 1:
                raise ValueTooLarge(name, size_bytes=len(body), limit_bytes=limit_bytes, what="the reply")
            count = max(1, len(items) * limit_bytes // (len(body) + len(body) // 8))
            # A history keeps its latest items; its next page has older ones.
            kept = items[-count:] if name == "history" else items[:count]
            answer = {member: kept, "truncated": True}
            if name == "list":
                answer["count"] = len(kept)
            else:
                answer["cursor"] = (
                    kept[0]["revision"] if name == "history" else kept[-1][_CURSOR_MEMBERS.get(name, "key")]
                )
            body = _encode({"success": True, **answer})
        return body

    async def _send(self, reply: str, body: bytes) -> None:
        try:
            await self._connection.publish(reply, body)
        except Exception as error:
            # The connection is lost, or the reply subject is invalid. The caller runs into its timeout and tries again.
            log.warning("a reply could not be sent: %s", type(error).__name__)

    def _note_delay(self, seconds: float) -> None:
        """Warn about requests that waited for their turn, once a second and not once a request."""
        self._delayed += 1
        now = time.monotonic()
        if now - self._warned_at >= DELAY_WARNING_S:
            log.warning("%d requests waited for their turn, the latest %.0f ms", self._delayed, seconds * 1000)
            self._warned_at, self._delayed = now, 0


async def settle(connection: Client, timeout_s: int = 10) -> None:
    """Wait until NATS has received everything that was sent on a connection."""
    # The driver writes its ping ahead of data that still waits to be written, so the first pong proves nothing.
    await connection.flush(timeout_s)
    await connection.flush(timeout_s)


def _make_endpoints() -> dict[str, NatsEndpoint]:
    shapes: dict[str, type[requests.Request]] = {"watch": requests.Deliver}
    rows = (*OPERATIONS.values(), _UNWATCH)
    return {row.name: NatsEndpoint(row, shapes.get(row.name, row.request)) for row in rows}


def _cancelled_error(operation: Operation, request: Any) -> Exception:
    """The error of a request that was cancelled because the server stops."""
    if operation.right_for(request) != "write":
        return Unavailable("the server is stopping; try again later")
    request_id = getattr(request, "request_id", None)
    return Ambiguous("the server stopped before it knew whether the write was applied", request_id=request_id)


def check_prefix(prefix: str) -> str:
    """Return the prefix of subjects if it is valid, or raise `InvalidValue`."""
    words = prefix.split(".")
    if not all(word and word.isprintable() and not set(word) & set(" *>$") for word in words):
        raise InvalidValue("a prefix is words joined by dots, such as db.kv, without spaces, wildcards and '$'")
    return prefix
