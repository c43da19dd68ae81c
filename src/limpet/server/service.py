"""The service: one opened engine behind its faces, from the first request to the last.

It opens the engine, then what watches over requests, then the faces; it is ready when all of that stands. On the way
out it goes backwards: it is no longer ready, takes no more requests, finishes those under way, ends the streams, and
lets go of the engine. Waiting for slow clients has an end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final, cast

from limpet.errors import Compacted, InvalidValue, Unavailable
from limpet.opening import open_session
from limpet.retry import Outage, reason_of
from limpet.semantic.alarm import ConflictAlarm
from limpet.semantic.audit import Audit
from limpet.server.access import Tokens
from limpet.server.audited import AuditedNamespaces
from limpet.server.dispatch import OWN_NAMESPACE, Caller, Callers, Dispatcher, Observer, TrustedCaller
from limpet.server.fronts import put_boundary
from limpet.server.limits import gates_of
from limpet.server.logs import Logs
from limpet.server.metrics import Metrics
from limpet.server.namespaces import WrittenNamespaces
from limpet.server.settings import CONNECTIONS, Place, Settings
from limpet.session import Session

__all__ = ["Service", "serve"]

log = logging.getLogger("limpet.server")

PLUGIN_VALUE_BYTES_MAX: Final = 65_536
VALUE_BYTES_MAX: Final = 1_000_000
LOOK_S: Final = 1.0
_NO_KEY: Final = "none"
"""A key that the server does not use. That it can be asked for is what counts."""
CONNECT_S: Final = 5
UNREAD_S: Final = 30.0
FILES_MAX: Final = 65_536
FILES_KEPT: Final = 128
"""How many open files are kept for the engine, NATS and the log: connections over HTTP get the others."""
GRACE_S: Final = 1.0
"""How long requests that are under way may take when the server ends."""


class Service:
    """A server. Use it with ``async with``; `wait` returns when one of its parts has ended by itself."""

    def __init__(self, settings: Settings) -> None:
        settings.check()
        self.settings = settings
        self.places: dict[str, str] = {}
        self._parts = contextlib.AsyncExitStack()
        self._answers = False
        self._tokens: Tokens | None = None
        self._failed: asyncio.Future[None] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken, the engine answers, and tokens can be checked."""
        return self._answers and (self._tokens is None or self._tokens.is_following)

    async def __aenter__(self) -> Service:
        self._failed = asyncio.get_running_loop().create_future()
        try:
            await self._open()
        except BaseException:
            await self._parts.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._answers = False
        assert self._failed is not None
        # From here on, parts end because they are told to.
        self._failed.cancel()
        log.info("Server stopping")
        await self._parts.aclose()
        log.info("Server stopped")

    async def wait(self) -> None:
        """Wait until a part has ended by itself, and raise what ended it."""
        assert self._failed is not None
        await self._failed

    async def _open(self) -> None:
        settings, enter = self.settings, self._parts.enter_async_context
        session = await open_session(settings.url, clock=None, max_value_bytes=VALUE_BYTES_MAX, window=None)
        put_boundary(session)
        self._parts.push_async_callback(session.close)
        written = WrittenNamespaces(session)
        self._parts.push_async_callback(written.close)
        metrics = Metrics(session, names=settings.metric_names)
        logs = Logs(session.clock, cleanup_interval_s=settings.cleanup_interval)
        rates, quotas = gates_of(settings.limits, session.clock)
        observers: list[Observer] = [metrics, logs]
        if quotas is not None:
            observers.append(quotas)
        alarm = ConflictAlarm(clock=session.clock)
        kept = AuditedNamespaces(_audit_of(settings), settings.audit, [metrics.observe, alarm])
        options: dict[str, Any] = {
            "checks": [check for check in (kept, rates, quotas) if check is not None],
            "observers": observers,
            "read_only": settings.read_only,
            "semantic": kept.of,
            "namespaces": written,
        }
        if not settings.read_only:
            session.sweeper.listeners += [metrics.swept, logs.swept]
            session.sweeper.start()
            namespaces = await written.load()
            log.info("Sweeping %d namespaces", len(namespaces))
            await enter(kept.sealing(session))
        if settings.http is not None:
            await enter(self._http(session, settings.http, metrics, options))
        if settings.nats is not None:
            plugins = session.limited(PLUGIN_VALUE_BYTES_MAX)
            await enter(self._subjects(Dispatcher(plugins, "nats", **options), settings.nats))
        await enter(_running(self._look(session), "limpet-look"))
        self._answers = True
        log.info("Server ready: %s", ", ".join(f"{name} {place}" for name, place in self.places.items()))

    async def _look(self, session: Session) -> None:
        """Ask the engine now and then whether it is there: for the state of a namespace, and for its log."""
        outage = Outage(log, "asking the engine whether it serves")
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                status = await session.engine.status(OWN_NAMESPACE)
                await session.engine.read(OWN_NAMESPACE, [_NO_KEY])
                await session.engine.changes(OWN_NAMESPACE, status.floor, limit=1)
            except Compacted:
                # Trimmed between the two questions, and so it serves.
                pass
            except Exception as error:
                outage.failed(error)
                self._answers = False
                continue
            outage.over()
            self._answers = True

    # HTTP -----------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _http(
        self, session: Session, place: Place, metrics: Metrics, options: dict[str, Any]
    ) -> AsyncIterator[None]:
        import uvicorn

        from limpet.server import engine_routes as primitives
        from limpet.server.connections import Bounds, Connections
        from limpet.server.events import STREAMS_MAX
        from limpet.server.http import make_app, streams_of

        class Server(uvicorn.Server):
            """Leaves signals to whoever started it."""

            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield

        dispatcher = Dispatcher(session, "http", **options)
        async with contextlib.AsyncExitStack() as parts:
            callers: Callers = _NoAuth()
            if self.settings.auth == "tokens":
                callers = tokens = self._tokens = Tokens(session)
                await tokens.start()
                parts.push_async_callback(tokens.close)
            ending = asyncio.Event()
            most = _connections_max(self.settings.connections)
            connections = Connections(Bounds(connections=most))
            app = make_app(
                dispatcher,
                callers=callers,
                ready=lambda: self.is_ready,
                metrics=metrics.render,
                more_routes=primitives.routes(session, callers=callers, dispatcher=dispatcher, ending=ending),
                # A group of commits is the largest that is sent.
                body_bytes_max=primitives.LIMITS.request_bytes,
                hosts=self.settings.hosts,
                # Watches leave room for others.
                streams_max=min(STREAMS_MAX, most * 3 // 4),
            )
            with _bound(place) as listening:
                config = uvicorn.Config(
                    app,
                    http=cast(Any, connections.make),
                    ws="none",
                    timeout_keep_alive=int(connections.bounds.idle_s),
                    log_config=None,
                    access_log=False,
                    lifespan="off",
                    server_header=False,
                    timeout_graceful_shutdown=int(GRACE_S),
                    ssl_certfile=self.settings.certificate,
                    ssl_keyfile=self.settings.certificate_key,
                )
                try:
                    config.load()
                except OSError as error:
                    files = f"{self.settings.certificate} and {self.settings.certificate_key}"
                    raise InvalidValue(f"cannot use {files} for TLS: {error.strerror or error}") from error
                logging.getLogger("uvicorn.error").addFilter(_is_no_cancellation)
                server = Server(config)
                scheme = "https" if self.settings.certificate else "http"
                found = Place(place.host, listening.getsockname()[1])
                self.places["http"] = f"{scheme}://{found.shown}"
                await parts.enter_async_context(_running(connections.check_deadlines(), "limpet-connections"))
                async with _running(server.serve(sockets=[listening]), "limpet-http", self._failed) as task:
                    while not server.started and not task.done():  # noqa: ASYNC110 - it tells nobody
                        await asyncio.sleep(0.01)
                    try:
                        yield
                    finally:
                        streams_of(app).close()
                        ending.set()
                        server.should_exit = True
                        await asyncio.wait([task], timeout=2 * GRACE_S)
                        connections.sum_up()

    # NATS -----------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _subjects(self, dispatcher: Dispatcher, url: str) -> AsyncIterator[None]:
        import nats
        from nats.errors import Error as DriverError

        from limpet.server.subjects import Subjects
        from limpet.urls import Address

        is_ending = False

        async def lost() -> None:
            if not is_ending:
                log.warning("NATS: the connection is lost")

        options: dict[str, Any] = {}
        if self.settings.nats_credentials is not None:
            options["user_credentials"] = self.settings.nats_credentials
        try:
            # The driver would try for ever, also before it was ever connected.
            async with asyncio.timeout(CONNECT_S):
                connection = await nats.connect(
                    url.split(","),
                    name="limpet",
                    connect_timeout=CONNECT_S,
                    max_reconnect_attempts=-1,
                    allow_reconnect=True,
                    error_cb=_complain,
                    disconnected_cb=lost,
                    reconnected_cb=_found_again,
                    **options,
                )
        except (DriverError, OSError, TimeoutError) as error:
            raise Unavailable(f"{Address.parse(url)} cannot be reached: {type(error).__name__}") from error
        subjects = Subjects(dispatcher, connection, prefix=self.settings.prefix)
        try:
            await subjects.start()
            self.places["nats"] = f"{self.settings.prefix}.<plugin>.* on {Address.parse(url)}"
            yield
        finally:
            is_ending = True
            await subjects.drain(within_s=GRACE_S)
            with contextlib.suppress(Exception):
                await connection.close()


def _audit_of(settings: Settings) -> Audit | None:
    """The keys of the trails, where there are any to keep."""
    if not settings.audit:
        return None
    audit = Audit.from_environment()
    if audit is None:
        raise InvalidValue("--audit takes keys: set LIMPET_AUDIT_KEYS, or name a file by LIMPET_AUDIT_KEYS_FILE")
    return audit


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """Whether a line of uvicorn's log may pass: each answer that nobody takes until the end is one with a traceback.

    How many there were it says in a line of its own.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, asyncio.CancelledError)


class _NoAuth:
    """Asks nobody who they are: what reaches this server may use it."""

    async def caller_of(self, token: str | None, client: str | None) -> Caller:
        return TrustedCaller()


async def _complain(error: Exception) -> None:
    # What a driver says may hold an address.
    log.warning("NATS: %s", reason_of(error))


async def _found_again() -> None:
    log.info("NATS: connected again")


def raise_file_limit() -> None:
    """Let this process open as many files as the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, FILES_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # Some systems have another limit behind this one, and refuse.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _connections_max(wanted: int) -> int:
    """How many connections there may be, so that the engine can still open files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = wanted if files == resource.RLIM_INFINITY else max(1, files - FILES_KEPT)
    if room < wanted:
        # Whoever asked for more should know; what is left of the default is enough for most.
        level = logging.INFO if wanted == CONNECTIONS else logging.WARNING
        log.log(level, "HTTP: up to %d connections and not %d, because %d files may be open", room, wanted, files)
    return min(wanted, room)


@contextlib.contextmanager
def _bound(place: Place) -> Iterator[socket.socket]:
    """A socket at a place; at port 0, wherever there is room."""
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    # By its number: only of such a socket does asyncio know that it may send at once. Otherwise the body of an answer
    # would wait until its head was acknowledged, which takes 40 ms.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # A caller that takes nothing of its answer for so long is left by the kernel. Connections inherit it.
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * UNREAD_S))
        try:
            listening.bind((place.host, place.port))
        except OSError as error:
            raise InvalidValue(f"cannot listen at {place.shown}: {error.strerror}") from error
        yield listening


@contextlib.asynccontextmanager
async def _running(
    work: Any, name: str, failed: asyncio.Future[None] | None = None
) -> AsyncIterator[asyncio.Task[None]]:
    """A task for as long as the body runs. One that ends by itself tells ``failed``."""
    task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work, name=name)

    def ended(task: asyncio.Task[None]) -> None:
        if failed is not None and not failed.done() and not task.cancelled():
            error = task.exception() or Unavailable(f"{name} ended by itself")
            failed.set_exception(error)

    task.add_done_callback(ended)
    try:
        yield task
    finally:
        task.remove_done_callback(ended)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def serve(settings: Settings, started: Callable[[Service], None]) -> None:
    """Serve until a signal asks to end, or a part cannot go on, which is raised."""
    raise_file_limit()
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asked.set)
    try:
        async with Service(settings) as service:
            started(service)
            ends = [asyncio.ensure_future(asked.wait()), asyncio.ensure_future(service.wait())]
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                end.cancel()
            for end in done:
                end.result()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
