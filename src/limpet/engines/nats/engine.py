"""The NATS engine: state in JetStream, on one server or on three that outlive the loss of one.

A namespace is a stream that any tool for NATS key-value buckets can read: each change of a key is a
message, the last one is what the key holds, and its number is the revision. So the map and the log are
the same messages.

Commits are planned in `writer` and sent by `publisher`. Single keys are read in `stream`, all that needs an
order of keys or of changes in `mirror`, which follows the stream (`follower`, `log`). What expires is in `alarms`.
`connection` is the connection to the server, and `messages` the layout of a message.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from nats.errors import Error as DriverError

from limpet.clock import Clock
from limpet.commit.log import check_after
from limpet.engines.nats.alarms import Alarms
from limpet.engines.nats.connection import ApiError, Connection, ConnectionLost, NoReply, NoResponders
from limpet.engines.nats.log import LogItem
from limpet.engines.nats.log_follower import LogFollower
from limpet.engines.nats.mirror import Mirror
from limpet.engines.nats.stream import KeyChanged, NamespaceStream, ReplyLost, list_buckets
from limpet.engines.nats.writer import Writer
from limpet.engines.wakeup import Wakeup
from limpet.errors import Closed, InvalidValue, LimpetError, PermissionDenied, Unavailable
from limpet.keys import Span
from limpet.model import (
    Batch,
    Commit,
    Durability,
    Entry,
    Expire,
    Family,
    Filter,
    LogPage,
    Refusal,
    ScanPage,
    Status,
    Traits,
    Window,
    live,
)
from limpet.urls import Address

VERSION_MIN: Final = (2, 12)
POLL_S: Final = 0.5
PAGE_BYTES_MAX: Final = 4_000_000
PAGE: Final = 500

_PREFIX: Final = re.compile(r"[A-Za-z0-9_-]{0,100}\Z")


async def open(address: Address, clock: Clock) -> NatsEngine:
    """Open ``nats://host:4222``, or several servers of a cluster: ``nats://one:4222,two:4222``."""
    address.allow("bucket_prefix", "replicas", "sync", "storage", "credentials", "inbox", "clock")
    replicas = address.take("replicas", "1", ("1", "3", "5"))
    syncs = address.take("sync", "default", ("default", "always")) == "always"
    storage = address.take("storage", "file", ("file", "memory"))
    test_clock = clock if address.take("clock", "server", ("server", "test")) == "test" else None
    options: dict[str, Any] = {}
    servers, credentials = _parse_servers(address)
    if credentials:
        user, colon, password = credentials.partition(":")
        options = {"user": unquote(user), "password": unquote(password)} if colon else {"token": unquote(user)}
    if "credentials" in address.options:
        options["user_credentials"] = address.options["credentials"]
    if "inbox" in address.options:
        options["inbox_prefix"] = address.options["inbox"]
    prefix = address.options.get("bucket_prefix", "limpet-")
    engine = NatsEngine(
        servers,
        str(address),
        options,
        bucket_prefix=prefix,
        replicas=int(replicas),
        syncs=syncs,
        storage=storage,
        test_clock=test_clock,
    )
    return await _prepare(engine)


async def adopt(connection: Any, *, bucket_prefix: str = "limpet-") -> NatsEngine:
    """Open the servers of a connection of nats-py, on our own connection with the same credentials."""
    options = {name: connection.options[name] for name in _LOGIN if connection.options.get(name)}
    options |= {name: found for name in _KEYS if (found := getattr(connection, f"_{name}", None)) is not None}
    options["inbox_prefix"] = bytes(connection._inbox_prefix)
    servers = [server.geturl() for server in connection.servers]
    display_name = ",".join(f"{server.scheme}://{server.hostname}:{server.port}" for server in connection.servers)
    return await _prepare(NatsEngine(servers, display_name, options, bucket_prefix=bucket_prefix))


_LOGIN: Final = ("user", "password", "token", "tls", "tls_hostname", "tls_handshake_first")
_KEYS: Final = ("user_credentials", "nkeys_seed", "nkeys_seed_str", "user_jwt_cb", "signature_cb")


async def _prepare(engine: NatsEngine) -> NatsEngine:
    try:
        await engine.prepare()
    except BaseException:
        await engine.close()
        raise
    return engine


def _parse_servers(address: Address) -> tuple[list[str], str]:
    """The servers that a URL names, and the credentials before the first, which apply to all."""
    scheme, _, rest = address.url.partition("://")
    credentials, _, hosts = rest.rpartition("@")
    servers = [f"{scheme}://{host}" for host in hosts.partition("?")[0].strip("/").split(",")]
    for server in servers:
        try:
            parts = urlsplit(server)
            usable = bool(parts.hostname) and (parts.port or 4222) > 0 and not parts.path.strip("/")
        except ValueError:
            usable = False
        if not usable:
            raise InvalidValue(f"{address}: the driver cannot use this URL; check its host and port")
    return servers, credentials


class NatsEngine:
    """A handle on NATS."""

    def __init__(
        self,
        servers: list[str],
        display_name: str,
        options: dict[str, Any],
        *,
        bucket_prefix: str = "limpet-",
        replicas: int = 1,
        syncs: bool = False,
        storage: str = "file",
        test_clock: Clock | None = None,
    ) -> None:
        if not _PREFIX.match(bucket_prefix):
            raise InvalidValue(f"{display_name}: bucket_prefix is up to 100 of A-Z a-z 0-9 _ -")
        self.replicas = replicas
        self.syncs = syncs
        self.storage = storage
        self.test_clock = test_clock
        self.bucket_prefix = bucket_prefix
        durability = _durability(replicas, syncs, storage)
        self.traits = Traits(engine="nats", durability=durability, clock="server", inline=False)
        self._servers = servers
        self._options = options
        self._display_name = display_name
        self._closed = False
        self._init_process_state()
        _engines.add(self)

    def _init_process_state(self) -> None:
        """Set up the state that belongs to one process. Runs again in a child after a fork."""
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[Connection] | None = None
        self._namespaces: dict[str, _NamespaceHandle] = {}
        self._wakeup = Wakeup()
        self._calls = 0
        self._idle: asyncio.Future[None] | None = None

    async def prepare(self) -> None:
        """Check that the server has what is needed: JetStream, and a version that is new enough."""
        try:
            connection = await self.connection()
            stream = NamespaceStream(self, "", "")
            try:
                await stream.api("INFO")
            except (NoResponders, ApiError) as error:
                raise InvalidValue(f"{self._display_name}: JetStream is not enabled there: {error}") from error
        except Exception as error:
            raise self._translate(error) from error
        version = str(connection.server_info.get("version", "0"))
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < VERSION_MIN:
            raise InvalidValue(f"{self._display_name}: NATS {version} is too old, Limpet needs 2.12 or later")

    # The ten primitives -------------------------------------------------------

    async def read(self, namespace: str, keys: Sequence[str], *, family: Family = "data") -> list[Entry | None]:
        """See `Engine.read`."""
        with self._enter(namespace) as handle:
            if not keys or not (handle.stream.exists or await handle.stream.ensure(create=False)):
                return [None] * len(keys)
            handle.writer.contention.note_read(family, keys)
            return await handle.stream.read(family, keys)

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
        with self._enter(namespace) as handle:
            if not await handle.stream.ensure(create=False):
                return ScanPage([], None)
            await handle.mirror.catch_up()
            keys = handle.mirror.keys(family, span, reverse=reverse)
            return await self._read_page(handle, family, keys, where, values, limit)

    async def count(self, namespace: str, span: Span, *, family: Family = "data") -> int:
        """See `Engine.count`."""
        with self._enter(namespace) as handle:
            if not await handle.stream.ensure(create=False):
                return 0
            await handle.mirror.catch_up()
            return handle.mirror.count(family, span)

    async def namespaces(self) -> list[str]:
        """See `Engine.namespaces`."""
        if self._closed:
            raise Closed
        try:
            buckets = await list_buckets(self)
        except Exception as error:
            translated = self._translate(error)
            if translated is error:
                raise
            raise translated from error
        names = [bucket.removeprefix(self.bucket_prefix) for bucket in buckets if bucket.startswith(self.bucket_prefix)]
        return sorted(names)

    async def commit(self, namespace: str, batch: Batch) -> Commit | Refusal:
        """See `Engine.commit`."""
        with self._enter(namespace) as handle:
            if not handle.stream.exists:
                await handle.stream.ensure()
            return await handle.writer.commit(batch)

    async def changes(
        self, namespace: str, after: int, *, span: Span | None = None, limit: int = 500, wait_s: float = 0.0
    ) -> LogPage:
        """See `Engine.changes`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            token = self._wakeup.token(namespace)
            with self._enter(namespace) as handle:
                await handle.stream.ensure()
                await handle.mirror.load_log()
                page = await self._read_log(handle, after, limit, span)
            left = deadline - loop.time()
            if page.changes or left <= 0:
                return page
            await self._wakeup.wait(namespace, token, min(left, POLL_S))

    async def due(self, namespace: str, *, limit: int = 500) -> list[Expire]:
        """See `Engine.due`."""
        with self._enter(namespace) as handle:
            if not await handle.stream.ensure(create=False):
                return []
            await handle.alarms.catch_up()
            return await handle.alarms.due(limit)

    async def trim(self, namespace: str, window: Window) -> int:
        """See `Engine.trim`."""
        with self._enter(namespace) as handle:
            if not await handle.stream.ensure(create=False):
                return 0
            if not await self._is_excessive(handle, window):
                await handle.mirror.purge_more()
                return 0
            # The mirror has all of it.
            handle.log.stop()
            handle.log.clear()
            await handle.mirror.load_log()
            return await handle.mirror.trim(window)

    async def status(self, namespace: str) -> Status:
        """See `Engine.status`."""
        with self._enter(namespace) as handle:
            await handle.stream.ensure()
            await handle.mirror.load_log()
            return handle.mirror.status()

    async def close(self) -> None:
        """See `Engine.close`."""
        if self._closed:
            return
        self._closed = True
        self._wakeup.notify_all()
        if self._calls:
            self._idle = asyncio.get_running_loop().create_future()
            await self._idle
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        for handle in self._namespaces.values():
            handle.stop()
        if self._connection is not None:
            await self._connection.close()

    # Reading many ---------------------------------------------------------------

    async def _read_page(
        self,
        handle: _NamespaceHandle,
        family: Family,
        keys: Iterable[str],
        where: Filter | None,
        values: bool,
        limit: int,
    ) -> ScanPage:
        now_ms, heads = handle.stream.now_ms(), handle.mirror.heads[family]
        keys = (key for key in keys if live(heads[key].held, now_ms) is not None)
        page: list[str] = []
        size_bytes, more = 0, False
        for key in keys:
            # With a filter, it is unknown how many of a page will match.
            more = len(page) == (limit if where is None else PAGE) or size_bytes > PAGE_BYTES_MAX
            if more:
                break
            page.append(key)
            size_bytes += heads[key].size_bytes if values or where is not None else 0
        cursor = page[-1] if more else None
        if where is None and not values:
            return ScanPage([heads[key].entry for key in page], cursor)
        messages = await handle.stream.load_all((family, key) for key in page)
        entries = [live(message.held, now_ms) for message in messages.values() if message is not None]
        found = [entry for entry in entries if entry is not None and (where is None or _matches(where, entry))]
        if len(found) > limit:
            found, cursor = found[:limit], found[limit - 1].key
        return ScanPage(found if values else [entry.without_value() for entry in found], cursor)

    async def _read_log(self, handle: _NamespaceHandle, after: int, limit: int, span: Span | None) -> LogPage:
        mirror, log = handle.mirror, handle.mirror.log
        revision = max(mirror.revision, log.floor)
        check_after(after, floor=log.oldest, revision=revision)
        if not limit:
            return LogPage([], after, await mirror.before(after))
        items: list[LogItem] = []
        next_after, size_bytes = revision, 0
        for item in log.after(after):
            if span is not None and (item.entry_id[0] != "data" or item.entry_id[1] not in span):
                continue
            if len(items) == limit or size_bytes > PAGE_BYTES_MAX:
                next_after = items[-1].seq
                break
            items.append(item)
            size_bytes += item.weight_bytes
        before = await mirror.before(after)
        messages = await mirror.messages_of(items)
        if items:
            mirror.remember_print(items[-1], messages[-1])
        changes = [message.change(item.entry_id[0]) for item, message in zip(items, messages, strict=True)]
        return LogPage(changes, next_after, before)

    async def _is_excessive(self, handle: _NamespaceHandle, window: Window) -> bool:
        """Whether the log is beyond the window, so that it is worth following all keys to trim it.

        There are at most as many changes as numbers since it was trimmed, and as messages, and they take less room
        than the stream. A process that only writes need not follow its own writes while these are within the window.
        """
        state = (await handle.stream.info())["state"]
        floor = await handle.stream.floor()
        changes = min(state["last_seq"] - floor, state["messages"])
        may_be: bool = changes > window.changes or state["bytes"] > window.size_bytes
        if not may_be:
            now_ms, oldest = handle.stream.now_ms(), await handle.stream.oldest_changes(floor, state)
            may_be = any(now_ms - message.at_ms > window.age_ms for message in oldest)
        if not may_be or handle.mirror.has_log:
            return may_be
        await handle.log.catch_up()
        return handle.log.is_beyond(window)

    # The connection -------------------------------------------------------------

    @property
    def live_connection(self) -> Connection | None:
        """The connection, if there is one just now."""
        connection = self._connection
        return None if connection is None or connection.is_lost else connection

    async def connection(self) -> Connection:
        """The connection; a new one if it broke."""
        connection = self._connection
        if connection is not None and not connection.is_lost:
            return connection
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())
        return await asyncio.shield(self._connecting)

    async def _connect(self) -> Connection:
        try:
            # In random order, so that not all processes connect to the same server.
            servers = random.sample(self._servers, len(self._servers))
            self._connection = connection = await Connection.connect(servers, **self._options)
        finally:
            self._connecting = None
        for handle in self._namespaces.values():
            handle.stream.reset()
        self._servers = list(dict.fromkeys([*self._servers, *connection.servers]))
        return connection

    def notify(self, namespace: str) -> None:
        """Wake the waiters for changes of a namespace in this process."""
        self._wakeup.notify(namespace)

    # Calls ----------------------------------------------------------------------

    def _enter(self, namespace: str) -> _NamespaceHandle:
        if self._closed:
            raise Closed
        handle = self._namespaces.get(namespace)
        if handle is None:
            handle = self._namespaces[namespace] = _NamespaceHandle(self, namespace)
        return handle

    def _translate(self, error: Exception) -> Exception:
        """Our error for an error of the driver, of a request that was not applied or that may be sent again."""
        display_name = self._display_name
        match error:
            case LimpetError():
                return error
            case _ if self._closed:
                return Closed()
            case NoResponders():
                return Unavailable(f"{display_name}: no one listens there now, the stream may be without a leader")
            case ConnectionLost() | NoReply() | ReplyLost() | KeyChanged():
                return Unavailable(f"{display_name} cannot be reached now: {type(error).__name__}")
            case ApiError(code=code) if code in _PASSING:
                return Unavailable(f"{display_name}: {error}")
            case ApiError():
                return InvalidValue(f"{display_name}: {error} ({error.code})")
            case DriverError() if "authorization" in str(error).lower() or "authentication" in str(error).lower():
                return PermissionDenied(f"{display_name}: {error}")
            case FileNotFoundError() | IsADirectoryError() | NotADirectoryError() | PermissionError():
                # Not from a socket, which never raises these.
                return InvalidValue(f"{display_name}: its file of credentials cannot be read: {error.strerror}")
            case DriverError() | OSError() | TimeoutError():
                return Unavailable(f"{display_name} cannot be reached now: {type(error).__name__}")
            case ModuleNotFoundError():
                return InvalidValue(f"{display_name}: its credentials need {error.name}: pip install 'nats-py[nkeys]'")
            case ValueError():
                # Without its message, which may contain a part of a key.
                return InvalidValue(f"{display_name}: the driver cannot use this URL or these credentials")
            case _:
                return error


# No leader, no quorum, not enough room, a stream that is being created or was removed meanwhile, a batch that the
# server gave up.
_PASSING: Final = frozenset(
    {10002, 10005, 10008, 10009, 10014, 10023, 10028, 10047, 10059, 10074, 10077, 10118, 10176, 10210, 10211}
)


class _NamespaceHandle:
    """A namespace and its readers and writers. As a context, it counts a call that closing the engine waits for."""

    def __init__(self, engine: NatsEngine, namespace: str) -> None:
        self._engine = engine
        self.stream = NamespaceStream(engine, namespace, f"{engine.bucket_prefix}{namespace}")
        self.writer = Writer(engine, self.stream)
        self.mirror = Mirror(self.stream, engine.connection, lambda: engine.notify(namespace))
        self.log = LogFollower(self.stream, engine.connection)
        self.alarms = Alarms(self.stream, engine.connection)

    def stop(self) -> None:
        self.stream.stop()
        self.writer.stop()
        self.mirror.stop()
        self.log.stop()
        self.alarms.stop()

    def __enter__(self) -> _NamespaceHandle:
        self._engine._calls += 1
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        engine = self._engine
        engine._calls -= 1
        if engine._idle is not None and not engine._calls and not engine._idle.done():
            engine._idle.set_result(None)
        if error is not None and isinstance(error, Exception):
            if isinstance(error, NoResponders) or (isinstance(error, ApiError) and error.code == 10059):
                self.stream.reset()
            translated = engine._translate(error)
            if translated is not error:
                raise translated from error


def _durability(replicas: int, syncs: bool, storage: str) -> Durability:
    if storage == "memory":
        return "none"
    if not syncs:
        return "process"
    return "quorum" if replicas > 1 else "disk"


def _matches(where: Filter, entry: Entry) -> bool:
    return entry.stored is not None and where.matches(entry.stored)


# Forks ------------------------------------------------------------------------

_engines: weakref.WeakSet[NatsEngine] = weakref.WeakSet()
_inherited: list[object] = []


def _after_fork_in_child() -> None:
    for engine in list(_engines):
        # Two processes cannot share a connection: the child leaves its parent's alone and opens its own.
        _inherited.append((engine._connection, engine._namespaces, engine._connecting))
        engine._init_process_state()


os.register_at_fork(after_in_child=_after_fork_in_child)
