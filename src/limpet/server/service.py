"""The service: one opened engine with its interfaces, from the first request to the last.

It opens the engine, then limits, logs and metrics, then HTTP and NATS; it is ready when all of that runs. It stops in
the opposite order: it is no longer ready, takes no more requests, finishes the running ones, ends the streams, and
closes the engine. It waits for slow clients only so long.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from limpet.errors import Compacted, InvalidValue, Unavailable
from limpet.opening import open_session
from limpet.retry import Outage, reason_of
from limpet.semantic.alarm import ConflictAlarm
from limpet.semantic.audit import Audit
from limpet.server.access import Tokens
from limpet.server.audited import AuditedNamespaces
from limpet.server.dispatch import OWN_NAMESPACE, Caller, Callers, Dispatcher, Observer, TrustedCaller
from limpet.server.fronts import put_boundary
from limpet.server.limits import checks_of, limits_of
from limpet.server.logs import Logs
from limpet.server.metrics import Metrics
from limpet.server.namespaces import WrittenNamespaces
from limpet.server.settings import CONNECTIONS, ListenAddress, Settings
from limpet.session import Session
from limpet.urls import Address

if TYPE_CHECKING:
    import uvicorn
    from nats.aio.client import Client

__all__ = ["Service", "serve", "serve_in_process"]

log = logging.getLogger("limpet.server")

PLUGIN_VALUE_BYTES_MAX: Final = 65_536
VALUE_BYTES_MAX: Final = 1_000_000
PROBE_S: Final = 1.0
_PROBE_KEY: Final = "none"
"""A key that the server does not use. The probe needs only that it can be read."""
CONNECT_S: Final = 5
UNREAD_S: Final = 30.0
FILES_MAX: Final = 65_536
FILES_RESERVED: Final = 128
"""How many open files are reserved for the engine, NATS and the log. HTTP connections get the others."""
GRACE_S: Final = 1.0
"""How long running requests may take when the server stops."""


class Service:
    """A server. Use it with ``async with``; `wait` raises when one of its parts has ended by itself.

    Attributes:
        settings: Its settings.
        addresses: Where it serves, by ``http`` and ``nats``.
    """

    def __init__(self, settings: Settings) -> None:
        settings.check()
        self.settings = settings
        self.addresses: dict[str, str] = {}
        self._parts = contextlib.AsyncExitStack()
        self._is_serving = False
        self._is_stopping = False
        self._tokens: Tokens | None = None
        self._failed: asyncio.Future[None] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken, the engine replies, and tokens can be checked."""
        return self._is_serving and (self._tokens is None or self._tokens.is_following)

    @property
    def http_url(self) -> str:
        """The URL of its HTTP interface, with the port that it has. `limpet.open` takes it."""
        return self.addresses["http"]

    async def __aenter__(self) -> Service:
        self._failed = asyncio.get_running_loop().create_future()
        try:
            await self._open()
        except BaseException:
            self._is_stopping = True
            await self._parts.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_serving, self._is_stopping = False, True
        assert self._failed is not None
        # From here on, a part that ends was stopped, and has not failed.
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
        rates, quotas = checks_of(settings.limits, session.clock)
        observers: list[Observer] = [metrics, logs]
        if quotas is not None:
            observers.append(quotas)
        alarm = ConflictAlarm(clock=session.clock)
        audited = AuditedNamespaces(_load_audit(settings), settings.audit, [metrics.observe, alarm])
        options: dict[str, Any] = {
            "checks": [check for check in (audited, rates, quotas) if check is not None],
            "observers": observers,
            "read_only": settings.read_only,
            "semantic": audited.semantic_store,
            "namespaces": written,
        }
        if not settings.read_only:
            session.sweeper.listeners += [metrics.swept, logs.swept]
            session.sweeper.start()
            namespaces = await written.load()
            log.info("Sweeping %d namespaces", len(namespaces))
            await enter(audited.sealing(session))
        if settings.http is not None:
            await enter(self._http(session, settings.http, metrics, options))
        if settings.nats is not None:
            plugins = session.with_value_limit(PLUGIN_VALUE_BYTES_MAX)
            await enter(self._nats(Dispatcher(plugins, "nats", **options), settings.nats))
        await enter(_running(self._probe(session), "limpet-probe"))
        self._is_serving = True
        log.info("Server ready: %s", ", ".join(f"{name} {address}" for name, address in self.addresses.items()))

    async def _probe(self, session: Session) -> None:
        """Check every second that the engine replies: read a status, a key, and the log."""
        outage = Outage(log, "probing the engine")
        while True:
            await asyncio.sleep(PROBE_S)
            try:
                status = await session.engine.status(OWN_NAMESPACE)
                await session.engine.read(OWN_NAMESPACE, [_PROBE_KEY])
                await session.engine.changes(OWN_NAMESPACE, status.floor, limit=1)
            except Compacted:
                # The log was trimmed between the two reads, so the engine works.
                pass
            except Exception as error:
                outage.record_failure(error)
                self._is_serving = False
                continue
            outage.record_success()
            self._is_serving = True

    # HTTP -----------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _http(
        self, session: Session, address: ListenAddress, metrics: Metrics, options: dict[str, Any]
    ) -> AsyncIterator[None]:
        from limpet.server import engine_routes
        from limpet.server.connections import Bounds, Connections
        from limpet.server.events import STREAMS_MAX
        from limpet.server.http import make_app, streams_of

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
                more_routes=engine_routes.routes(session, callers=callers, dispatcher=dispatcher, ending=ending),
                # A group of commits is the largest request.
                body_bytes_max=engine_routes.LIMITS.request_bytes,
                hosts=self.settings.hosts,
                # Watches leave connections for other requests.
                streams_max=min(STREAMS_MAX, most * 3 // 4),
            )
            with _listen(address) as listening:
                server = self._make_uvicorn(
                    app, http=cast(Any, connections.make), timeout_keep_alive=int(connections.bounds.idle_s)
                )
                scheme = "https" if self.settings.certificate else "http"
                bound = ListenAddress(address.host, listening.getsockname()[1])
                self.addresses["http"] = f"{scheme}://{bound}"
                await parts.enter_async_context(_running(connections.check_deadlines(), "limpet-connections"))
                async with _running(server.serve(sockets=[listening]), "limpet-http", self._failed) as task:
                    while not server.started and not task.done():  # noqa: ASYNC110 - uvicorn sets no event
                        await asyncio.sleep(0.01)
                    try:
                        yield
                    finally:
                        streams_of(app).close()
                        ending.set()
                        server.should_exit = True
                        await asyncio.wait([task], timeout=2 * GRACE_S)
                        connections.sum_up()

    def _make_uvicorn(self, app: Any, **options: Any) -> uvicorn.Server:
        import uvicorn

        class Uvicorn(uvicorn.Server):
            """Leaves signals to the program that started the server."""

            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield

        config = uvicorn.Config(
            app,
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=int(GRACE_S),
            ssl_certfile=self.settings.certificate,
            ssl_keyfile=self.settings.certificate_key,
            **options,
        )
        try:
            config.load()
        except OSError as error:
            files = f"{self.settings.certificate} and {self.settings.certificate_key}"
            raise InvalidValue(f"cannot use {files} for TLS: {error.strerror or error}") from error
        logging.getLogger("uvicorn.error").addFilter(_is_not_cancellation)
        return Uvicorn(config)

    # NATS -----------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _nats(self, dispatcher: Dispatcher, nats: str | Client) -> AsyncIterator[None]:
        from limpet.server.subjects import PluginSubjects

        async with contextlib.AsyncExitStack() as parts:
            if isinstance(nats, str):
                connection, server = await parts.enter_async_context(self._connect(nats)), str(Address.parse(nats))
            else:
                connection, server = nats, "a given connection"
            subjects = PluginSubjects(dispatcher, connection, prefix=self.settings.prefix)
            try:
                await subjects.start()
                self.addresses["nats"] = f"{self.settings.prefix}.<plugin>.* on {server}"
                yield
            finally:
                await subjects.drain(within_s=GRACE_S)

    @contextlib.asynccontextmanager
    async def _connect(self, url: str) -> AsyncIterator[Client]:
        """A connection to NATS that is ours to close."""
        import nats
        from nats.errors import Error as DriverError

        async def warn_of_loss() -> None:
            if not self._is_stopping:
                log.warning("NATS: the connection is lost")

        options: dict[str, Any] = {}
        if self.settings.nats_credentials is not None:
            options["user_credentials"] = self.settings.nats_credentials
        try:
            # The driver would try forever, even if it was never connected.
            async with asyncio.timeout(CONNECT_S):
                connection = await nats.connect(
                    url.split(","),
                    name="limpet",
                    connect_timeout=CONNECT_S,
                    max_reconnect_attempts=-1,
                    allow_reconnect=True,
                    error_cb=_log_nats_error,
                    disconnected_cb=warn_of_loss,
                    reconnected_cb=_log_reconnect,
                    **options,
                )
        except (DriverError, OSError, TimeoutError) as error:
            raise Unavailable(f"{Address.parse(url)} cannot be reached: {type(error).__name__}") from error
        try:
            yield connection
        finally:
            with contextlib.suppress(Exception):
                await connection.close()


def _load_audit(settings: Settings) -> Audit | None:
    """The keys of the audit trails; None when no namespace is audited."""
    if not settings.audit:
        return None
    audit = Audit.from_environment()
    if audit is None:
        raise InvalidValue("--audit takes keys: set LIMPET_AUDIT_KEYS, or name a file by LIMPET_AUDIT_KEYS_FILE")
    return audit


def _is_not_cancellation(record: logging.LogRecord) -> bool:
    """Whether a record of uvicorn's log is not a cancelled response.

    At the end, uvicorn logs a traceback for each response that it has to cancel, and besides a line with their number.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, asyncio.CancelledError)


class _NoAuth:
    """No authentication: every caller that reaches this server may use it."""

    async def caller_of(self, token: str | None, client: str | None) -> Caller:
        return TrustedCaller()


async def _log_nats_error(error: Exception) -> None:
    # The message of a driver may hold an address.
    log.warning("NATS: %s", reason_of(error))


async def _log_reconnect() -> None:
    log.info("NATS: connected again")


def raise_file_limit() -> None:
    """Let this process open as many files as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, FILES_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # Some systems have a second, lower limit, and refuse.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _connections_max(wanted: int) -> int:
    """How many connections may be open, so that the engine can still open files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = wanted if files == resource.RLIM_INFINITY else max(1, files - FILES_RESERVED)
    if room < wanted:
        # Warn only about a number that was configured; less than the default is enough for most.
        level = logging.INFO if wanted == CONNECTIONS else logging.WARNING
        log.log(level, "HTTP: up to %d connections and not %d, because %d files may be open", room, wanted, files)
    return min(wanted, room)


@contextlib.contextmanager
def _listen(address: ListenAddress) -> Iterator[socket.socket]:
    """A socket that is bound to an address; with port 0, to a free port."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    # With the number of the protocol: asyncio sets TCP_NODELAY only on such a socket. Without it the body of a response
    # would wait until its head was acknowledged, which takes 40 ms.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # The kernel drops a caller that reads nothing of its response for so long. Connections inherit this option.
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * UNREAD_S))
        try:
            listening.bind((address.host, address.port))
        except OSError as error:
            raise InvalidValue(f"cannot listen at {address}: {error.strerror}") from error
        yield listening


@contextlib.asynccontextmanager
async def _running(
    work: Any, name: str, failed: asyncio.Future[None] | None = None
) -> AsyncIterator[asyncio.Task[None]]:
    """A task that runs while the body runs. If it ends by itself, its error is set on ``failed``."""
    task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work, name=name)

    def report(task: asyncio.Task[None]) -> None:
        if failed is not None and not failed.done() and not task.cancelled():
            error = task.exception() or Unavailable(f"{name} ended by itself")
            failed.set_exception(error)

    task.add_done_callback(report)
    try:
        yield task
    finally:
        task.remove_done_callback(report)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def serve(settings: Settings, started: Callable[[Service], None]) -> None:
    """Serve until SIGINT or SIGTERM, or until a part fails, whose error is raised."""
    raise_file_limit()
    loop = asyncio.get_running_loop()
    signalled = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled.set)
    try:
        async with Service(settings) as service:
            started(service)
            ends = [asyncio.ensure_future(signalled.wait()), asyncio.ensure_future(service.wait())]
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                end.cancel()
            for end in done:
                end.result()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


@contextlib.asynccontextmanager
async def serve_in_process(
    url: str = "memory:",
    *,
    http: str | None = "127.0.0.1:0",
    nats: str | Client | None = None,
    limits: Mapping[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[Service]:
    """Run a server inside this program, for as long as the body runs.

    Example::

        async with limpet.server.serve_in_process("sqlite:///state.db") as server:
            async with limpet.open(server.http_url, namespace="trivia") as store:
                await store.put("score", 42)

    It takes the options of ``limpet serve``. Signals, logging and the event loop stay the program's own.

    Args:
        url: The store to serve.
        http: Where to serve HTTP, ``host:port``. Port 0 is a free port, which `Service.http_url` has. None for no HTTP.
        nats: Where to serve plugins over NATS: a URL, or an open connection, which stays open at the end.
        limits: Rates and quotas, as in the table ``limits`` of a configuration file.
        options: The other options of ``limpet serve`` by their names, such as ``prefix``, ``auth`` and ``audit``.

    Raises:
        InvalidValue: An option is unknown or not valid, or the address cannot be used.
        Unavailable: The store or NATS cannot be reached.
    """
    if unknown := options.keys() - {*Settings.__struct_fields__}:
        raise InvalidValue(f"a server has no option {min(unknown)!r}; it has {', '.join(Settings.__struct_fields__)}")
    address = None if http is None else ListenAddress.parse(http)
    settings = Settings(url=url, http=address, nats=nats, limits=limits_of(limits or {}), **options)
    async with Service(settings) as service:
        yield service
