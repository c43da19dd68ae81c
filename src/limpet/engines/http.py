"""The HTTP engine: state behind a Limpet server, through the same ten primitives.

Reads of one turn of the loop are one request, and so are commits of one namespace; each commit has its own result.
The server decides, by its own engine and its own clock, and enforces the rights of the caller's token.

Every commit that is sent has a request id. So when its reply is lost, the store retries it under that id, and the
engine behind the server knows whether it was applied. A request that was certainly not sent is `Unavailable`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

import aiohttp
import msgspec
import yarl

from limpet.clock import Clock
from limpet.engines.server_engine import CommitResult, GroupingEngine, ReadResult, Ticket
from limpet.errors import (
    Ambiguous,
    Closed,
    InvalidValue,
    LimpetError,
    PermissionDenied,
    RateLimited,
    Unavailable,
    ValueTooLarge,
)
from limpet.keys import Span
from limpet.model import (
    Batch,
    Commit,
    Expire,
    Family,
    Filter,
    LogPage,
    Refusal,
    ScanPage,
    Status,
    Traits,
    Window,
)
from limpet.protocol import engine_msgpack as wire
from limpet.request_ids import new_request_id
from limpet.urls import Address

CONNECT_S: Final = 10.0
REPLY_S: Final = 30.0
CALLS_MAX: Final = 32
IDLE_S: Final = 3.0
"""How long an idle connection is kept. Servers close idle connections after about five seconds, and a request that
crosses with the close would have to be sent again."""
GROUP_BYTES: Final = 2_000_000
"""The size at which a request of several batches is sent. It may be larger by one batch."""
PIECE_BYTES: Final = 60_000
"""A larger body is sent in pieces. One of this size is taken by the connection at once."""
KEYS_GROUPED: Final = 128
"""How many keys of several callers go into one request. All their values come in one reply."""
TOKEN: Final = "LIMPET_TOKEN"  # noqa: S105 - the name of a variable

T = TypeVar("T")


async def open(address: Address, clock: Clock) -> HttpEngine:
    """Open ``http://127.0.0.1:8080``, or ``https://token@host``, perhaps with a path in front of the server's own.

    The token may also be in the variable ``LIMPET_TOKEN``.
    """
    if "token" in address.options:
        raise InvalidValue(
            f"{address}: options of a URL end up in logs; "
            f"give the token as https://token@host, or in the variable {TOKEN}"
        )
    address.allow("ca", "timeout")
    base, token = _parse_address(address)
    engine = HttpEngine(
        base,
        str(address),
        token=token,
        security=_load_security(address),
        reply_s=_parse_seconds(address, "timeout", REPLY_S),
    )
    try:
        await engine.prepare()
    except BaseException:
        await engine.close()
        raise
    return engine


def _parse_address(address: Address) -> tuple[str, str | None]:
    """The base URL of the server, and the token, which is never part of it."""
    scheme, _, rest = address.url.partition("://")
    credentials, _, host = rest.rpartition("@")
    base = f"{scheme.lower()}://{host.partition('?')[0].rstrip('/')}"
    try:
        parts = urlsplit(base)
        usable = bool(parts.hostname) and (parts.port or 80) > 0 and base.isascii() and base.isprintable()
        yarl.URL(base)
    except ValueError:
        usable = False
    if not usable:
        raise InvalidValue(f"{address}: the driver cannot use this URL; check its host and port")
    if ":" in credentials:
        raise InvalidValue(
            f"{address}: users and passwords are not supported; give a token alone, as https://token@host"
        )
    token = unquote(credentials) or os.environ.get(TOKEN) or None
    if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
        raise InvalidValue(f"{address}: a token consists of visible ASCII characters, without spaces")
    return base, token


def _load_security(address: Address) -> ssl.SSLContext:
    """The certificates that are trusted: the system's, or those of a file."""
    if address.scheme == "http":
        if "ca" in address.options:
            raise InvalidValue(f"{address}: ca is for https: URLs")
        # Not the system's certificates: loading them takes time, and they would not be used.
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        return ssl.create_default_context(cafile=address.options.get("ca"))
    except (OSError, ssl.SSLError) as error:
        raise InvalidValue(f"{address}: ca is a file with certificates, and this one cannot be used") from error


def _parse_seconds(address: Address, name: str, default: float) -> float:
    try:
        seconds = float(address.options.get(name, default))
    except ValueError:
        seconds = 0.0
    if not (math.isfinite(seconds) and seconds > 0):
        raise InvalidValue(f"{address}: {name} is a number of seconds above zero")
    return seconds


class HttpEngine(GroupingEngine):
    """A handle on a Limpet server."""

    _reads_at_once = 2
    _commits_at_once = 2

    def __init__(
        self, base: str, display_name: str, *, token: str | None, security: ssl.SSLContext, reply_s: float = REPLY_S
    ) -> None:
        self.traits = Traits(engine="http", durability="none", clock="server", inline=False)
        self._base = base
        self._security = security
        self._reply_s = reply_s
        self._headers = {"Content-Type": wire.MEDIA, "Accept": wire.MEDIA}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._reply_times = self._times()
        self._limits = wire.Limits(request_bytes=0, batches=1, keys=1, wait_s=0.0)
        super().__init__(display_name)

    def _init_process_state(self) -> None:
        super()._init_process_state()
        self._connections: dict[asyncio.AbstractEventLoop, _Connections] = {}
        self._urls: dict[tuple[str, str], yarl.URL] = {}
        self._polls: set[asyncio.Task[LogPage]] = set()
        # Namespaces that only the server sweeps, or trims, because this token may not.
        self._swept_by_server: set[str] = set()
        self._trimmed_by_server: set[str] = set()

    async def prepare(self) -> None:
        """Read the server's traits and limits."""
        try:
            content = await self._send(_Request("GET", yarl.URL(f"{self._base}/v1/engine")))
        except _ReplyLost as lost:
            raise self._translate(lost) from lost.__cause__
        try:
            served = wire.decode(content, wire.Served)
        except InvalidValue as error:
            raise InvalidValue(f"{self._display_name}: no Limpet server replies at this URL") from error
        self.traits = msgspec.structs.replace(served.traits, engine="http", clock="server", inline=False)
        self._limits = served.limits
        self._keys_at_once = min(KEYS_GROUPED, served.limits.keys)

    # The ten primitives, but for those that are shared ------------------------

    async def scan(
        self,
        namespace: str,
        span: Span,
        *,
        family: Family = "data",
        where: Filter | None = None,
        values: bool = True,
        limit: int = 500,
        reverse: bool = False,
    ) -> ScanPage:
        """See `Engine.scan`."""
        return await self._call(namespace, "scan", wire.Scan(span, family, where, values, limit, reverse), ScanPage)

    async def count(self, namespace: str, span: Span, *, family: Family = "data") -> int:
        """See `Engine.count`."""
        return await self._call(namespace, "count", wire.Count(span, family), int)

    async def namespaces(self) -> list[str]:
        """See `Engine.namespaces`. The server lists those in which the token may read."""
        return await self._call("", "namespaces", {}, list[str])

    async def changes(
        self, namespace: str, after: int, *, span: Span | None = None, limit: int = 500, wait_s: float = 0.0
    ) -> LogPage:
        """See `Engine.changes`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        before: str | None = None
        at: str | None = None
        while True:
            left = max(0.0, deadline - loop.time())
            request = wire.Changes(after, span, limit, min(left, self._limits.wait_s))
            page = await self._poll(namespace, request)
            before, at = before or page.before, page.at or (None if page.changes else at)
            if page.changes or loop.time() >= deadline:
                return msgspec.structs.replace(page, before=before, at=at)
            # Only changes that this token may not see, or a wait that the server has cut short.
            after = page.next_after

    async def due(self, namespace: str, *, limit: int = 500) -> list[Expire]:
        """See `Engine.due`. Nothing is due for a token that may not expire entries: the server sweeps by itself."""
        self._check_open()
        if namespace in self._swept_by_server:
            return []
        try:
            return await self._call(namespace, "due", wire.Due(limit), wire.Expiries)
        except PermissionDenied:
            self._swept_by_server.add(namespace)
            return []

    async def trim(self, namespace: str, window: Window) -> int:
        """See `Engine.trim`. Without the right `admin` nothing is trimmed here: the server trims by itself."""
        self._check_open()
        if namespace in self._trimmed_by_server:
            return 0
        try:
            return await self._call(namespace, "trim", window, int)
        except PermissionDenied:
            self._trimmed_by_server.add(namespace)
            return 0

    async def status(self, namespace: str) -> Status:
        """See `Engine.status`."""
        status = await self._call(namespace, "status", {}, Status)
        self._record_revision(namespace, status.revision)
        return status

    async def close(self) -> None:
        """See `Engine.close`."""
        if self._closed:
            return
        self._closed = True
        self._wakeup.notify_all()
        for poll in list(self._polls):
            poll.cancel()
        await self._finish_tasks()
        connections, self._connections = self._connections, {}
        for one in connections.values():
            await one.close()

    # Reading and following ------------------------------------------------------

    async def _read_all(self, namespace: str, family: Family, keys: list[str]) -> Sequence[ReadResult]:
        # Several callers may want the same key at the same moment.
        distinct = list(dict.fromkeys(keys))
        found = await self._call(namespace, "read", wire.Read(distinct, family), wire.Entries)
        if len(found) != len(distinct):
            raise Unavailable(f"{self._display_name}: the reply cannot be decoded")
        entries = dict(zip(distinct, found, strict=True))
        return [entries[key] for key in keys]

    async def _poll(self, namespace: str, request: wire.Changes) -> LogPage:
        """Wait for changes. Closing the engine ends the wait with `Closed`."""
        self._check_open()
        poll = asyncio.get_running_loop().create_task(
            self._call(namespace, "changes", request, LogPage, patience_s=request.wait_s, polls=request.wait_s > 0)
        )
        self._polls.add(poll)
        try:
            return await poll
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and (task is None or not task.cancelling()):
                raise Closed from None
            raise
        finally:
            self._polls.discard(poll)

    # Committing -----------------------------------------------------------------

    async def _commit_group(self, namespace: str, group: list[Ticket], since: int) -> Sequence[CommitResult]:
        outcomes: list[CommitResult] = []
        # Encode all before any is sent: a batch that cannot be encoded fails while nothing has been applied.
        for part in list(self._split([_with_request_id(ticket.batch) for ticket in group])):
            outcomes += await self._commit_part(namespace, part, since)
        return outcomes

    def _split(self, batches: list[Batch]) -> Iterator[list[tuple[Batch, bytes]]]:
        """Encoded batches, in groups that fit into one request."""
        part: list[tuple[Batch, bytes]] = []
        size_bytes = 0
        for batch in batches:
            body = wire.encode_batch(batch)
            is_full = len(part) == self._limits.batches or size_bytes + len(body) > self._limits.request_bytes - 64
            if part and (is_full or size_bytes > GROUP_BYTES):
                yield part
                part, size_bytes = [], 0
            part.append((batch, body))
            # Each costs a few bytes of framing.
            size_bytes += len(body) + 8
        yield part

    async def _commit_part(self, namespace: str, part: list[tuple[Batch, bytes]], since: int) -> Sequence[CommitResult]:
        batches = [batch for batch, _ in part]
        size_bytes = sum(len(body) for _, body in part)
        if size_bytes > self._limits.request_bytes - 64:
            # Only a batch that is alone in its request can be this large.
            key, limit_bytes = _first_key(batches[0]), self._limits.request_bytes
            return [ValueTooLarge(key, size_bytes=size_bytes, limit_bytes=limit_bytes, what="the request")]
        request = self._build_request(namespace, "commit", wire.Commits([msgspec.Raw(body) for _, body in part]))
        try:
            content = await self._send(request)
        except _ReplyLost as lost:
            return [self._ambiguous(_request_id(batch), since, lost.__cause__) for batch in batches]
        except LimpetError as error:
            return [error] * len(batches)
        except Exception as error:
            # An error that the driver should not raise: the request may have been sent.
            return [self._ambiguous(_request_id(batch), since, error) for batch in batches]
        try:
            replies = wire.decode(content, wire.Outcomes)
            found = [wire.decode_outcome(reply, batch) for batch, reply in zip(batches, replies, strict=True)]
        except Exception as error:
            # A reply that cannot be decoded counts as a lost one.
            return [self._ambiguous(_request_id(batch), since, error) for batch in batches]
        outcomes = [self._translate_failure(batch, one, since) for batch, one in zip(batches, found, strict=True)]
        self._record_revision(namespace, max((one.revision for one in outcomes if isinstance(one, Commit)), default=0))
        return outcomes

    def _translate_failure(self, batch: Batch, found: Commit | Refusal | wire.Failure, since: int) -> CommitResult:
        if not isinstance(found, wire.Failure):
            return found
        error = wire.error_of(found)
        if isinstance(error, Ambiguous):
            return Ambiguous(str(error), request_id=_request_id(batch), since=min(since, error.since))
        # An unexpected failure in the server: the commit may have been applied.
        return error or self._ambiguous(_request_id(batch), since, _Unexpected(found.message))

    # Requests -------------------------------------------------------------------

    async def _call(
        self,
        namespace: str,
        primitive: str,
        request: Any,
        shape: type[T],
        *,
        patience_s: float = 0.0,
        polls: bool = False,
    ) -> T:
        """Send a request that may be sent again, and decode its reply."""
        self._check_open()
        try:
            content = await self._send(
                self._build_request(namespace, primitive, request), patience_s=patience_s, polls=polls
            )
        except _ReplyLost as lost:
            raise self._translate(lost) from lost.__cause__
        try:
            return wire.decode(content, shape)
        except InvalidValue as error:
            raise Unavailable(f"{self._display_name}: the reply cannot be decoded") from error

    def _build_request(self, namespace: str, primitive: str, request: Any) -> _Request:
        url = self._urls.get((namespace, primitive))
        if url is None:
            place = f"{namespace}/engine" if namespace else "engine"
            url = yarl.URL(f"{self._base}/v1/{place}/{primitive}")
            self._urls[namespace, primitive] = url
        return _Request("POST", url, wire.encode(request))

    async def _send(self, request: _Request, *, patience_s: float = 0.0, polls: bool = False) -> bytes:
        """Send a request and return the content of the reply.

        Raises `_ReplyLost` when the server may or may not have handled it, and our own errors when that is known.
        """
        connections = self._current_connections()
        session = connections.polls if polls else connections.calls
        times = self._times(patience_s) if patience_s else self._reply_times
        try:
            if len(request.body) <= PIECE_BYTES:
                status, headers, content = await _exchange(session, request, times)
            else:
                status, headers, content = await _exchange_in_pieces(session, request, times, self._reply_s)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise self._translate(error) from error
        except (aiohttp.ClientError, OSError) as error:
            raise _ReplyLost from error
        if status == 200:
            return content
        raise self._translate_status(status, headers, content)

    def _times(self, patience_s: float = 0.0) -> aiohttp.ClientTimeout:
        """How long each step of a request may take. The wait for a free connection is the time of a reply."""
        return aiohttp.ClientTimeout(
            total=None,
            connect=self._reply_s + CONNECT_S,
            sock_connect=CONNECT_S,
            sock_read=self._reply_s + patience_s,
        )

    def _current_connections(self) -> _Connections:
        """The connections of the running loop."""
        loop = asyncio.get_running_loop()
        found = self._connections.get(loop)
        if found is None:
            for other in [one for one in self._connections if one.is_closed()]:
                del self._connections[other]
            found = self._connections[loop] = _Connections(loop, self._security, self._headers)
        return found

    def _translate_status(self, status: int, headers: Mapping[str, str], content: bytes) -> Exception:
        """Our error for a status other than 200."""
        display_name = self._display_name
        failure = _decode_failure(headers.get("Content-Type", ""), content)
        error = None if failure is None else wire.error_of(failure)
        if error is not None:
            return error
        match status:
            case 401 | 403:
                return PermissionDenied(f"{display_name}: the server does not accept this token, or requires one")
            case 404 | 405:
                return InvalidValue(f"{display_name}: the server there serves no engine; check the URL")
            case 408:
                return Unavailable(f"{display_name}: the request did not arrive in time")
            case 413:
                return InvalidValue(f"{display_name}: the request is too large for a proxy in front of the server")
            case 429:
                return RateLimited(f"{display_name} receives too many requests", retry_after=_retry_after(headers))
            case _ if status >= 500:
                # A proxy may have sent it, and the server may have handled the request all the same.
                lost = _ReplyLost()
                lost.__cause__ = _Unexpected(f"status {status}")
                return lost
            case _:
                return InvalidValue(f"{display_name} replies with status {status}")

    def _translate_driver_error(self, error: Exception) -> Exception:
        display_name = self._display_name
        cause = error.__cause__ if isinstance(error, _ReplyLost) else error
        if isinstance(cause, _Unexpected):
            return Unavailable(f"{display_name} cannot serve now: {cause}")
        if isinstance(cause, aiohttp.ClientError | OSError):
            if _is_untrusted(cause):
                return InvalidValue(f"{display_name}: its certificate is not trusted; ?ca=FILE names another to trust")
            return Unavailable(f"{display_name} cannot be reached now: {type(cause).__name__}")
        return error


class _ReplyLost(Exception):
    """The server may or may not have handled a request; the reason is the cause of this error."""


class _Unexpected(Exception):
    """A reply that a Limpet server gives only by mistake."""


class _Request(NamedTuple):
    """A request, whose headers are those of its session."""

    method: str
    url: yarl.URL
    body: bytes = b""


_Reply = tuple[int, Mapping[str, str], bytes]
"""The status, the headers and the content of a reply."""


async def _exchange(
    session: aiohttp.ClientSession,
    request: _Request,
    times: aiohttp.ClientTimeout,
    body: bytes | AsyncIterator[bytes] | None = None,
    headers: Mapping[str, str] | None = None,
) -> _Reply:
    async with session.request(
        request.method,
        request.url,
        data=body or request.body or None,
        headers=headers,
        timeout=times,
        allow_redirects=False,
    ) as response:
        return response.status, response.headers, await response.read()


async def _exchange_in_pieces(
    session: aiohttp.ClientSession, request: _Request, times: aiohttp.ClientTimeout, piece_s: float
) -> _Reply:
    """Send a large body. Raises `TimeoutError` when the server takes nothing of it for so long.

    The driver begins to wait for the reply only when the body is written, and has no limit for the writing.
    """
    async with asyncio.timeout(None) as limit:
        headers = {"Content-Length": str(len(request.body))}
        return await _exchange(session, request, times, _cut(request.body, limit, piece_s), headers)


async def _cut(body: bytes, limit: asyncio.Timeout, piece_s: float) -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    # A server may reply before it has taken all, and then there is nothing left to limit.
    with contextlib.suppress(RuntimeError):
        for start in range(0, len(body), PIECE_BYTES):
            limit.reschedule(loop.time() + piece_s)
            yield body[start : start + PIECE_BYTES]
        limit.reschedule(None)


class _Connections:
    """The connections of one loop: some for calls, others for long polls, which must not keep calls waiting."""

    def __init__(self, loop: asyncio.AbstractEventLoop, security: ssl.SSLContext, headers: Mapping[str, str]) -> None:
        self._loop = loop
        self.calls = _create_session(security, headers, CALLS_MAX)
        self.polls = _create_session(security, headers, 0)

    async def close(self) -> None:
        """Close them, if they belong to the running loop. Those of another are closed with their sockets."""
        if self._loop is asyncio.get_running_loop():
            await self.calls.close()
            await self.polls.close()

    def __del__(self) -> None:
        # Without this, the driver would log an error about a store that was not closed, and in a child process
        # that ends it would close connections of the parent.
        for session in (self.calls, self.polls):
            session.detach()


class _Connector(aiohttp.TCPConnector):
    """Leaves connections that were not closed to their sockets. See `_Connections.__del__`."""

    def __del__(self, _warnings: Any = None) -> None:
        pass


class _Resolver(aiohttp.ThreadedResolver):
    """Finds the address of a host, within the time to connect. The driver has no limit for that alone."""

    async def resolve(self, *place: Any, **options: Any) -> list[aiohttp.abc.ResolveResult]:
        """See `aiohttp.abc.AbstractResolver.resolve`."""
        async with asyncio.timeout(CONNECT_S):
            return await super().resolve(*place, **options)


def _create_session(
    security: ssl.SSLContext, headers: Mapping[str, str], connections_max: int
) -> aiohttp.ClientSession:
    # Nothing is sent twice, redirected, or kept as a cookie, and no proxy of the environment gets the token. The driver
    # repeats requests of some methods, but never a POST. Zero is no limit of connections.
    connector = _Connector(
        limit=connections_max, keepalive_timeout=IDLE_S, ssl=security, resolver=_Resolver(), use_dns_cache=False
    )
    return aiohttp.ClientSession(
        connector=connector,
        headers=headers,
        skip_auto_headers=("User-Agent", "Accept-Encoding"),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )


def _with_request_id(batch: Batch) -> Batch:
    """The batch with a request id, so that it can be retried."""
    if batch.request_id is not None:
        return batch
    return msgspec.structs.replace(batch, request_id=new_request_id())


def _request_id(batch: Batch) -> str:
    assert batch.request_id is not None, "it got an id before it was sent"
    return batch.request_id


def _first_key(batch: Batch) -> str:
    return next((one.key for one in (*batch.writes, *batch.guards)), "")


_PROBLEM_MEMBERS: Final = ("type", "title", "status", "instance")


def _decode_failure(media: str, content: bytes) -> wire.Failure | None:
    """An error of a Limpet server, in either of its forms; None if it is not one."""
    try:
        if media.startswith(wire.MEDIA):
            return wire.decode(content, wire.Failure)
        if media.startswith("application/problem+json"):
            problem = msgspec.json.decode(content, type=dict[str, Any])
            code, message = str(problem.pop("code", "")), str(problem.pop("detail", ""))
            attributes = {
                name: item
                for name, item in problem.items()
                if name not in _PROBLEM_MEMBERS and isinstance(item, str | int | float | None)
            }
            return wire.Failure(code, message, attributes)
    except (InvalidValue, msgspec.DecodeError, UnicodeDecodeError):
        pass
    return None


def _retry_after(headers: Mapping[str, str]) -> float:
    try:
        return max(0.0, float(headers.get("Retry-After", "1")))
    except ValueError:
        return 1.0


def _is_untrusted(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        error = error.__cause__ or error.__context__
    return False
