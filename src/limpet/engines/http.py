"""The HTTP engine: state behind a Limpet server, through the same eight primitives.

Reads of one turn of the loop are one request, and so are commits of one namespace; each commit is answered by itself.
The server decides, by its own engine and its own clock, and it holds whoever asks to the rights of a token.

Every commit that is sent has a name. So when its answer is lost, the store asks again under that name, and the engine
behind the server tells whether it was applied. What was surely not sent is `Unavailable`.
"""

from __future__ import annotations

import asyncio
import math
import os
import ssl
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar
from urllib.parse import unquote, urlsplit

import httpx2
import msgspec

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
ANSWER_S: Final = 30.0
CALLS_MAX: Final = 32
IDLE_S: Final = 3.0
"""How long a connection is kept for the next call. Servers close idle ones after five seconds or so, and a request
that crosses with the closing would have to be sent again."""
GROUP_BYTES: Final = 2_000_000
"""When a request is large enough to go. It may be larger by one batch."""
KEYS_GROUPED: Final = 128
"""How many keys of several callers one request asks for. Their values come back in one answer."""
TOKEN: Final = "LIMPET_TOKEN"  # noqa: S105 - the name of a variable

T = TypeVar("T")


async def open(address: Address, clock: Clock) -> HttpEngine:
    """Open ``http://127.0.0.1:8080``, or ``https://token@host``, perhaps with a path in front of the server's own.

    The token may also be in the variable ``LIMPET_TOKEN``.
    """
    if "token" in address.options:
        raise InvalidValue(
            f"{address}: what stands behind a question mark ends up in logs; "
            f"give the token as https://token@host, or in the variable {TOKEN}"
        )
    address.allow("ca", "timeout")
    base, token = _place(address)
    engine = HttpEngine(
        base, str(address), token=token, security=_security(address), answer_s=_seconds(address, "timeout", ANSWER_S)
    )
    try:
        await engine.prepare()
    except BaseException:
        await engine.close()
        raise
    return engine


def _place(address: Address) -> tuple[str, str | None]:
    """Where the server is, and the token, which is never part of it."""
    scheme, _, rest = address.url.partition("://")
    credentials, _, place = rest.rpartition("@")
    base = f"{scheme.lower()}://{place.partition('?')[0].rstrip('/')}"
    try:
        parts = urlsplit(base)
        usable = bool(parts.hostname) and (parts.port or 80) > 0 and base.isascii() and base.isprintable()
        httpx2.URL(base)
    except (ValueError, httpx2.InvalidURL):
        usable = False
    if not usable:
        raise InvalidValue(f"{address}: the driver cannot use this URL, look at its host and port")
    if ":" in credentials:
        raise InvalidValue(
            f"{address}: there are no users and passwords here; give a token alone, as https://token@host"
        )
    token = unquote(credentials) or os.environ.get(TOKEN) or None
    if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
        raise InvalidValue(f"{address}: a token is of visible ASCII characters, without spaces")
    return base, token


def _security(address: Address) -> ssl.SSLContext:
    """Whose certificates are trusted: the system's, or those of a file."""
    if address.scheme == "http":
        if "ca" in address.options:
            raise InvalidValue(f"{address}: ca is for https: URLs")
        # Loading the system's certificates takes its time, and nobody would look at them.
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        return ssl.create_default_context(cafile=address.options.get("ca"))
    except (OSError, ssl.SSLError) as error:
        raise InvalidValue(f"{address}: ca is a file with certificates, and this one cannot be used") from error


def _seconds(address: Address, name: str, default: float) -> float:
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
        self, base: str, display_name: str, *, token: str | None, security: ssl.SSLContext, answer_s: float = ANSWER_S
    ) -> None:
        self.traits = Traits(engine="http", durability="none", log="every", clock="server", inline=False)
        self._base = base
        self._security = security
        self._answer_s = answer_s
        self._headers = {"Content-Type": wire.MEDIA, "Accept": wire.MEDIA}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._limits = wire.Limits(request_bytes=0, batches=1, keys=1, wait_s=0.0)
        super().__init__(display_name)

    def _init_process_state(self) -> None:
        super()._init_process_state()
        self._line: _Line | None = None
        self._urls: dict[tuple[str, str], httpx2.URL] = {}
        self._polls: set[asyncio.Task[LogPage]] = set()
        # Where the server sweeps, or trims, alone, because it does not let us.
        self._swept: set[str] = set()
        self._trimmed: set[str] = set()

    async def prepare(self) -> None:
        """Ask the server what it is."""
        try:
            content = await self._send(
                httpx2.Request("GET", httpx2.URL(f"{self._base}/v1/engine"), headers=self._headers)
            )
        except _Lost as lost:
            raise self._translate(lost) from lost.__cause__
        try:
            served = wire.decode(content, wire.Served)
        except InvalidValue as error:
            raise InvalidValue(f"{self._display_name}: what answers there is no Limpet server") from error
        self.traits = msgspec.structs.replace(served.traits, engine="http", clock="server", inline=False)
        self._limits = served.limits
        self._keys_at_once = min(KEYS_GROUPED, served.limits.keys)

    # The eight primitives, but for those that are shared ------------------------

    async def scan(
        self,
        namespace: str,
        span: Span,
        *,
        family: Family = "data",
        where: Filter | None = None,
        values: bool = True,
        limit: int = 500,
    ) -> ScanPage:
        """See `Engine.scan`."""
        return await self._ask(namespace, "scan", wire.Scan(span, family, where, values, limit), ScanPage)

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
            asked = wire.Changes(after, span, limit, min(left, self._limits.wait_s))
            feed = await self._poll(namespace, asked)
            before, at = before or feed.before, feed.at or (None if feed.changes else at)
            if feed.changes or loop.time() >= deadline:
                return msgspec.structs.replace(feed, before=before, at=at)
            # Changes that this token may not see, or a wait that the server did not want to be longer.
            after = feed.next_after

    async def due(self, namespace: str, *, limit: int = 500) -> list[Expire]:
        """See `Engine.due`. Who may not end entries has nothing to do: the server sweeps by itself."""
        self._check_open()
        if namespace in self._swept:
            return []
        try:
            return await self._ask(namespace, "due", wire.Due(limit), wire.Expiries)
        except PermissionDenied:
            self._swept.add(namespace)
            return []

    async def trim(self, namespace: str, window: Window) -> int:
        """See `Engine.trim`. Without the right `admin` there is nothing to do: the server trims by itself."""
        self._check_open()
        if namespace in self._trimmed:
            return 0
        try:
            return await self._ask(namespace, "trim", window, int)
        except PermissionDenied:
            self._trimmed.add(namespace)
            return 0

    async def status(self, namespace: str) -> Status:
        """See `Engine.status`."""
        status = await self._ask(namespace, "status", {}, Status)
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
        line, self._line = self._line, None
        if line is not None:
            await line.close()

    # Reading and following ------------------------------------------------------

    async def _read_all(self, namespace: str, family: Family, keys: list[str]) -> Sequence[ReadResult]:
        # Several callers may want the same key at the same moment.
        asked = list(dict.fromkeys(keys))
        found = await self._ask(namespace, "read", wire.Read(asked, family), wire.Entries)
        if len(found) != len(asked):
            raise Unavailable(f"{self._display_name}: the answer cannot be understood")
        entries = dict(zip(asked, found, strict=True))
        return [entries[key] for key in keys]

    async def _poll(self, namespace: str, asked: wire.Changes) -> LogPage:
        """Ask for changes; whoever waits for an answer when the engine is closed is told."""
        self._check_open()
        poll = asyncio.get_running_loop().create_task(
            self._ask(namespace, "changes", asked, LogPage, patience_s=asked.wait_s, polls=asked.wait_s > 0)
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
        # All are encoded before any is sent: one that cannot be fails while nothing has been applied.
        for part in list(self._parts([_named(ticket.batch) for ticket in group])):
            outcomes += await self._commit_part(namespace, part, since)
        return outcomes

    def _parts(self, batches: list[Batch]) -> Iterator[list[tuple[Batch, bytes]]]:
        """Batches as they travel, as many together as fit into a request."""
        part: list[tuple[Batch, bytes]] = []
        size_bytes = 0
        for batch in batches:
            body = wire.encode_batch(batch)
            is_full = len(part) == self._limits.batches or size_bytes + len(body) > self._limits.request_bytes - 64
            if part and (is_full or size_bytes > GROUP_BYTES):
                yield part
                part, size_bytes = [], 0
            part.append((batch, body))
            # Each costs a few bytes more than itself.
            size_bytes += len(body) + 8
        yield part

    async def _commit_part(self, namespace: str, part: list[tuple[Batch, bytes]], since: int) -> Sequence[CommitResult]:
        batches = [batch for batch, _ in part]
        size_bytes = sum(len(body) for _, body in part)
        if size_bytes > self._limits.request_bytes - 64:
            # It is alone then.
            key, limit_bytes = _first_key(batches[0]), self._limits.request_bytes
            return [ValueTooLarge(key, size_bytes=size_bytes, limit_bytes=limit_bytes, what="the request")]
        request = self._request(namespace, "commit", wire.Commits([msgspec.Raw(body) for _, body in part]))
        try:
            content = await self._send(request)
        except _Lost as lost:
            return [self._ambiguous(_name(batch), since, lost.__cause__) for batch in batches]
        except LimpetError as error:
            return [error] * len(batches)
        except Exception as error:
            # Not what the driver should raise. It may have been sent.
            return [self._ambiguous(_name(batch), since, error) for batch in batches]
        try:
            answers = wire.decode(content, wire.Outcomes)
            found = [wire.decode_outcome(answer, batch) for batch, answer in zip(batches, answers, strict=True)]
        except Exception as error:
            # An answer that nobody understands is as good as none.
            return [self._ambiguous(_name(batch), since, error) for batch in batches]
        outcomes = [self._outcome(batch, one, since) for batch, one in zip(batches, found, strict=True)]
        self._record_revision(namespace, max((one.revision for one in outcomes if isinstance(one, Commit)), default=0))
        return outcomes

    def _outcome(self, batch: Batch, found: Commit | Refusal | wire.Failure, since: int) -> CommitResult:
        if not isinstance(found, wire.Failure):
            return found
        error = wire.error_of(found)
        if isinstance(error, Ambiguous):
            return Ambiguous(str(error), request_id=_name(batch), since=min(since, error.since))
        # A server that failed in the midst of a commit does not know either.
        return error or self._ambiguous(_name(batch), since, _Unexpected(found.message))

    # Requests -------------------------------------------------------------------

    async def _ask(
        self,
        namespace: str,
        primitive: str,
        asked: Any,
        shape: type[T],
        *,
        patience_s: float = 0.0,
        polls: bool = False,
    ) -> T:
        """Ask something that may be asked again."""
        self._check_open()
        try:
            content = await self._send(self._request(namespace, primitive, asked), patience_s=patience_s, polls=polls)
        except _Lost as lost:
            raise self._translate(lost) from lost.__cause__
        try:
            return wire.decode(content, shape)
        except InvalidValue as error:
            raise Unavailable(f"{self._display_name}: the answer cannot be understood") from error

    def _request(self, namespace: str, primitive: str, asked: Any) -> httpx2.Request:
        url = self._urls.get((namespace, primitive))
        if url is None:
            url = httpx2.URL(f"{self._base}/v1/{namespace}/engine/{primitive}")
            self._urls[namespace, primitive] = url
        return httpx2.Request("POST", url, headers=self._headers, content=wire.encode(asked))

    async def _send(self, request: httpx2.Request, *, patience_s: float = 0.0, polls: bool = False) -> bytes:
        """Send a request and return what is answered.

        Raises `_Lost` when nobody can say what the server made of it, and our own errors when that is known.
        """
        answer_s = self._answer_s
        request.extensions["timeout"] = {
            "connect": CONNECT_S,
            "pool": answer_s,
            "write": answer_s,
            "read": answer_s + patience_s,
        }
        line = self._here()
        try:
            response = await (line.polls if polls else line.calls).handle_async_request(request)
            try:
                content = await response.aread()
            finally:
                await response.aclose()
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout) as error:
            raise self._translate(error) from error
        except (httpx2.HTTPError, OSError) as error:
            raise _Lost from error
        if response.status_code == 200:
            return content
        raise self._refused(response, content)

    def _here(self) -> _Line:
        """The connections of the running loop."""
        loop = asyncio.get_running_loop()
        line = self._line
        if line is None or line.loop is not loop:
            line = self._line = _Line(loop, self._security)
        return line

    def _refused(self, response: httpx2.Response, content: bytes) -> Exception:
        """What a status other than 200 means."""
        status, display_name = response.status_code, self._display_name
        failure = _failure(response.headers.get("Content-Type", ""), content)
        error = None if failure is None else wire.error_of(failure)
        if error is not None:
            return error
        match status:
            case 401 | 403:
                return PermissionDenied(f"{display_name}: the server does not know this token, or asks for one")
            case 404 | 405:
                return InvalidValue(f"{display_name}: what answers there serves no engine, look at the URL")
            case 408:
                return Unavailable(f"{display_name}: the request did not arrive in time")
            case 413:
                return InvalidValue(f"{display_name}: the request is too large for what stands before the server")
            case 429:
                return RateLimited(f"{display_name} is asked too often", retry_after=_retry_after(response))
            case _ if status >= 500:
                # It may be from something between us and the server, which may have it all the same.
                lost = _Lost()
                lost.__cause__ = _Unexpected(f"status {status}")
                return lost
            case _:
                return InvalidValue(f"{display_name} answers with status {status}")

    def _translate_driver_error(self, error: Exception) -> Exception:
        display_name = self._display_name
        cause = error.__cause__ if isinstance(error, _Lost) else error
        if isinstance(cause, _Unexpected):
            return Unavailable(f"{display_name} cannot serve now: {cause}")
        if isinstance(cause, httpx2.HTTPError | OSError):
            if _is_untrusted(cause):
                return InvalidValue(f"{display_name}: its certificate is not trusted; ?ca=FILE names another to trust")
            return Unavailable(f"{display_name} cannot be reached now: {type(cause).__name__}")
        return error


class _Lost(Exception):
    """Nobody can say what the server made of a request. Why is its cause."""


class _Unexpected(Exception):
    """An answer that no Limpet server gives on purpose."""


class _Line:
    """The connections of one loop: for calls, and for waits, which must not keep calls from theirs."""

    def __init__(self, loop: asyncio.AbstractEventLoop, security: ssl.SSLContext) -> None:
        self.loop = loop
        self.calls = _connections(security, CALLS_MAX)
        self.polls = _connections(security, None)

    async def close(self) -> None:
        await self.calls.aclose()
        await self.polls.aclose()


def _connections(security: ssl.SSLContext, most: int | None) -> httpx2.AsyncHTTPTransport:
    # The transport and not the client: nothing is sent twice, redirected, kept as a cookie, or logged, and no
    # proxy of the environment gets to see the token.
    limits = httpx2.Limits(max_connections=most, max_keepalive_connections=most, keepalive_expiry=IDLE_S)
    return httpx2.AsyncHTTPTransport(verify=security, trust_env=False, limits=limits, retries=0)


def _named(batch: Batch) -> Batch:
    """A batch that can be asked for again."""
    if batch.request_id is not None:
        return batch
    return msgspec.structs.replace(batch, request_id=new_request_id())


def _name(batch: Batch) -> str:
    assert batch.request_id is not None, "it was named before it was sent"
    return batch.request_id


def _first_key(batch: Batch) -> str:
    return next((asked.key for asked in (*batch.writes, *batch.guards)), "")


_OF_PROBLEMS: Final = ("type", "title", "status", "instance")


def _failure(media: str, content: bytes) -> wire.Failure | None:
    """What a server tells of an error, in either of its forms; None when it is not one of ours."""
    try:
        if media.startswith(wire.MEDIA):
            return wire.decode(content, wire.Failure)
        if media.startswith("application/problem+json"):
            problem = msgspec.json.decode(content, type=dict[str, Any])
            code, told = str(problem.pop("code", "")), str(problem.pop("detail", ""))
            carried = {
                name: item
                for name, item in problem.items()
                if name not in _OF_PROBLEMS and isinstance(item, str | int | float | None)
            }
            return wire.Failure(code, told, carried)
    except (InvalidValue, msgspec.DecodeError, UnicodeDecodeError):
        pass
    return None


def _retry_after(response: httpx2.Response) -> float:
    try:
        return max(0.0, float(response.headers.get("Retry-After", "1")))
    except ValueError:
        return 1.0


def _is_untrusted(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        error = error.__cause__ or error.__context__
    return False
