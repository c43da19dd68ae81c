"""The NATS engine: state in JetStream, on one server or on three that outlive the loss of one.

A namespace is a stream that any tool for NATS key-value buckets can read: the last message of a
subject is what a key holds, and its number is the revision. So the map and the log are the same
messages, and the log holds the last change of each key.

Commits are in `writer`, a look at single keys in `stream`, all that needs an order of keys or of
changes in `mirror`, the line to the server in `connection`, and what a message looks like in `messages`.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import weakref
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import msgspec
from nats.errors import Error as DriverError

from limpet.clock import Clock
from limpet.engines.nats.connection import Link, LinkLost, Refused, Silent, Unheard
from limpet.engines.nats.messages import Message, Place
from limpet.engines.nats.mirror import Alarms, Mirror
from limpet.engines.nats.stream import Lost, Space, TooLate
from limpet.engines.nats.writer import Writer
from limpet.engines.wakeup import Wakeup
from limpet.errors import Closed, Compacted, InvalidValue, LimpetError, PermissionDenied, Unavailable
from limpet.keys import Span
from limpet.model import (
    Batch,
    Change,
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
SLICE_BYTES_MAX: Final = 4_000_000
PAGE: Final = 500

_PREFIX: Final = re.compile(r"[A-Za-z0-9_-]{0,100}\Z")


async def open(address: Address, clock: Clock) -> NatsEngine:
    """Open ``nats://host:4222``, or several servers of a cluster: ``nats://one:4222,two:4222``."""
    address.allow("bucket_prefix", "replicas", "sync", "storage", "credentials", "inbox")
    replicas = address.take("replicas", "1", ("1", "3", "5"))
    syncs = address.take("sync", "default", ("default", "always")) == "always"
    storage = address.take("storage", "file", ("file", "memory"))
    options: dict[str, Any] = {}
    servers, credentials = _servers(address)
    if credentials:
        user, colon, password = credentials.partition(":")
        options = {"user": unquote(user), "password": unquote(password)} if colon else {"token": unquote(user)}
    if "credentials" in address.options:
        options["user_credentials"] = address.options["credentials"]
    if "inbox" in address.options:
        options["inbox_prefix"] = address.options["inbox"]
    prefix = address.options.get("bucket_prefix", "limpet-")
    engine = NatsEngine(
        servers, str(address), options, bucket_prefix=prefix, replicas=int(replicas), syncs=syncs, storage=storage
    )
    return await _prepared(engine)


async def adopt(connection: Any, *, bucket_prefix: str = "limpet-") -> NatsEngine:
    """Open where a connection of nats-py leads, on a line of our own with the same credentials."""
    options = {name: connection.options[name] for name in _LOGIN if connection.options.get(name)}
    options |= {name: found for name in _KEYS if (found := getattr(connection, f"_{name}", None)) is not None}
    options["inbox_prefix"] = bytes(connection._inbox_prefix)
    servers = [server.geturl() for server in connection.servers]
    shown = ",".join(f"{server.scheme}://{server.hostname}:{server.port}" for server in connection.servers)
    return await _prepared(NatsEngine(servers, shown, options, bucket_prefix=bucket_prefix))


_LOGIN: Final = ("user", "password", "token", "tls", "tls_hostname", "tls_handshake_first")
_KEYS: Final = ("user_credentials", "nkeys_seed", "nkeys_seed_str", "user_jwt_cb", "signature_cb")


async def _prepared(engine: NatsEngine) -> NatsEngine:
    try:
        await engine.prepare()
    except BaseException:
        await engine.close()
        raise
    return engine


def _servers(address: Address) -> tuple[list[str], str]:
    """The servers that a URL names, and the credentials before the first, which hold for all."""
    scheme, _, rest = address.url.partition("://")
    credentials, _, places = rest.rpartition("@")
    servers = [f"{scheme}://{place}" for place in places.partition("?")[0].strip("/").split(",")]
    for server in servers:
        try:
            parts = urlsplit(server)
            usable = bool(parts.hostname) and (parts.port or 4222) > 0 and not parts.path.strip("/")
        except ValueError:
            usable = False
        if not usable:
            raise InvalidValue(f"{address}: the driver cannot use this URL, look at its host and port")
    return servers, credentials


class NatsEngine:
    """A handle on NATS."""

    def __init__(
        self,
        servers: list[str],
        shown: str,
        options: dict[str, Any],
        *,
        bucket_prefix: str = "limpet-",
        replicas: int = 1,
        syncs: bool = False,
        storage: str = "file",
    ) -> None:
        if not _PREFIX.match(bucket_prefix):
            raise InvalidValue(f"{shown}: bucket_prefix is up to 100 of A-Z a-z 0-9 _ -")
        self.replicas = replicas
        self.syncs = syncs
        self.storage = storage
        self.bucket_prefix = bucket_prefix
        durability = _durability(replicas, syncs, storage)
        self.traits = Traits(engine="nats", durability=durability, log="last", clock="server", inline=False)
        self._servers = servers
        self._options = options
        self._shown = shown
        self._closed = False
        self._begin()
        _engines.add(self)

    def _begin(self) -> None:
        """What a process must have of its own. Runs again in a child after a fork."""
        self._link: Link | None = None
        self._connecting: asyncio.Task[Link] | None = None
        self._spaces: dict[str, _Held] = {}
        self._wakeup = Wakeup()
        self._busy = 0
        self._quiet: asyncio.Future[None] | None = None

    async def prepare(self) -> None:
        """See that the server can do what is needed."""
        try:
            link = await self.link()
            space = Space(self, "", "")
            try:
                await space.api("INFO")
            except (Unheard, Refused) as error:
                raise InvalidValue(f"{self._shown}: JetStream is not enabled there: {error}") from error
        except Exception as error:
            raise self._translated(error) from error
        version = str(link.facts.get("version", "0"))
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < VERSION_MIN:
            raise InvalidValue(f"{self._shown}: NATS {version} is too old, Limpet needs 2.12 or later")

    # The eight primitives -------------------------------------------------------

    async def read(self, namespace: str, keys: Sequence[str], *, family: Family = "data") -> list[Entry | None]:
        """See `Engine.read`."""
        with self._at_work(namespace) as held:
            if not keys or not (held.space.is_there or await held.space.ensure(create=False)):
                return [None] * len(keys)
            return await held.space.read(family, keys)

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
        with self._at_work(namespace) as held:
            if not await held.space.ensure(create=False):
                return ScanPage([], None)
            await held.mirror.catch_up()
            return await self._slice(held, family, span, where, values, limit)

    async def commit(self, namespace: str, batch: Batch) -> Commit | Refusal:
        """See `Engine.commit`."""
        with self._at_work(namespace) as held:
            if not held.space.is_there:
                await held.space.ensure()
            return await held.writer.commit(batch)

    async def changes(
        self, namespace: str, after: int, *, span: Span | None = None, limit: int = 500, wait_s: float = 0.0
    ) -> LogPage:
        """See `Engine.changes`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            token = self._wakeup.token(namespace)
            with self._at_work(namespace) as held:
                await held.space.ensure()
                await held.mirror.catch_up()
                feed = await self._feed(held, after, limit, span)
            left = deadline - loop.time()
            if feed.changes or left <= 0:
                return feed
            await self._wakeup.wait(namespace, token, min(left, POLL_S))

    async def due(self, namespace: str, *, limit: int = 500) -> list[Expire]:
        """See `Engine.due`."""
        with self._at_work(namespace) as held:
            if not await held.space.ensure(create=False):
                return []
            await held.alarms.catch_up()
            return await held.alarms.due(limit)

    async def trim(self, namespace: str, window: Window) -> int:
        """See `Engine.trim`."""
        with self._at_work(namespace) as held:
            if not await held.space.ensure(create=False) or not await self._is_excessive(held, window):
                return 0
            await held.mirror.catch_up()
            return await held.mirror.trim(window)

    async def status(self, namespace: str) -> Status:
        """See `Engine.status`."""
        with self._at_work(namespace) as held:
            await held.space.ensure()
            await held.mirror.catch_up()
            return held.mirror.status()

    async def close(self) -> None:
        """See `Engine.close`."""
        if self._closed:
            return
        self._closed = True
        self._wakeup.notify_all()
        if self._busy:
            self._quiet = asyncio.get_running_loop().create_future()
            await self._quiet
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        for held in self._spaces.values():
            held.rest()
        if self._link is not None:
            await self._link.close()

    # Reading many ---------------------------------------------------------------

    async def _slice(
        self, held: _Held, family: Family, span: Span, where: Filter | None, values: bool, limit: int
    ) -> ScanPage:
        now_ms, heads = held.space.now_ms(), held.mirror.heads[family]
        keys = (key for key in held.mirror.keys(family, span) if live(heads[key].held, now_ms) is not None)
        page: list[str] = []
        size_bytes, more = 0, False
        for key in keys:
            # Of a filter nobody knows how many it lets through.
            more = len(page) == (limit if where is None else PAGE) or size_bytes > SLICE_BYTES_MAX
            if more:
                break
            page.append(key)
            size_bytes += heads[key].size_bytes if values or where is not None else 0
        cursor = page[-1] if more else None
        if where is None and not values:
            return ScanPage([heads[key].entry for key in page], cursor)
        messages = await held.space.lasts((family, key) for key in page)
        entries = [live(message.held, now_ms) for message in messages.values() if message is not None]
        found = [entry for entry in entries if entry is not None and (where is None or _matches(where, entry))]
        if len(found) > limit:
            found, cursor = found[:limit], found[limit - 1].key
        return ScanPage(found if values else [entry.without_value() for entry in found], cursor)

    async def _feed(self, held: _Held, after: int, limit: int, span: Span | None) -> LogPage:
        mirror, space = held.mirror, held.space
        revision = max(mirror.revision, mirror.floor)
        if after < mirror.floor:
            raise Compacted(f"revision {after} was trimmed, the log starts after {mirror.floor}", oldest=mirror.floor)
        if after > revision:
            raise Compacted(f"revision {after} lies ahead of this store, which is at {revision}")
        if not limit:
            return LogPage([], after, mirror.before(after))
        told: list[tuple[Place, Message]] = []
        head, size_bytes, before = revision, 0, mirror.before(after)
        for place, message in mirror.after(after):
            if span is not None and (place[0] != "data" or place[1] not in span):
                continue
            if len(told) == limit or size_bytes > SLICE_BYTES_MAX:
                head = told[-1][1].seq
                break
            told.append((place, message))
            size_bytes += message.size_bytes
        changes = await asyncio.gather(*(self._change(space, place, message) for place, message in told))
        return LogPage([change for change in changes if change is not None], head, before)

    async def _change(self, space: Space, place: Place, message: Message) -> Change | None:
        """A change with its value; None when the value was written again since, which is told later."""
        if message.op in ("delete", "expire", "touch"):
            return message.change(place[0])
        last = await space.last(place)
        if last is None or last.held is None or last.value_seq != message.seq:
            return None
        entry = msgspec.structs.replace(message.entry, stored=last.held.stored)
        return msgspec.structs.replace(message, entry=entry).change(place[0])

    async def _is_excessive(self, held: _Held, window: Window) -> bool:
        """Whether it is worth following a stream to trim it.

        There are at most as many changes as numbers, and of a key at most two: a touch, and the write it lies on. Keys
        that are written over and over use up numbers, and whoever only writes them need not follow what he writes.
        """
        state = (await held.space.info())["state"]
        floor = await held.space.floor()
        changes = min(state["last_seq"] - floor, 2 * state["messages"])
        if changes > window.changes or state["bytes"] > window.size_bytes:
            return True
        oldest = [await held.space.first_after(floor, subject) for subject in held.space.subjects.logged]
        return any(message is not None and held.space.now_ms() - message.at_ms > window.age_ms for message in oldest)

    # The line -------------------------------------------------------------------

    @property
    def live_link(self) -> Link | None:
        """The line, if there is one just now."""
        link = self._link
        return None if link is None or link.is_lost else link

    async def link(self) -> Link:
        """The line, laid anew if it broke."""
        link = self._link
        if link is not None and not link.is_lost:
            return link
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())
        return await asyncio.shield(self._connecting)

    async def _connect(self) -> Link:
        try:
            # Not all processes on the same server.
            servers = random.sample(self._servers, len(self._servers))
            self._link = link = await Link.connect(servers, **self._options)
        finally:
            self._connecting = None
        for held in self._spaces.values():
            held.space.forget()
        self._servers = list(dict.fromkeys([*self._servers, *link.servers]))
        return link

    def changed(self, namespace: str) -> None:
        """Tell whoever waits for changes here."""
        self._wakeup.notify(namespace)

    # Work -----------------------------------------------------------------------

    def _at_work(self, namespace: str) -> _Held:
        if self._closed:
            raise Closed
        held = self._spaces.get(namespace)
        if held is None:
            held = self._spaces[namespace] = _Held(self, namespace)
        return held

    def _translated(self, error: Exception) -> Exception:
        """A driver's error as ours, for something that was not applied or that may be asked again."""
        shown = self._shown
        match error:
            case LimpetError():
                return error
            case _ if self._closed:
                return Closed()
            case Unheard():
                return Unavailable(f"{shown}: nobody answers there, the stream may be without a leader")
            case LinkLost() | Silent() | Lost() | TooLate():
                return Unavailable(f"{shown} cannot be reached now: {type(error).__name__}")
            case Refused(code=code) if code in _PASSING:
                return Unavailable(f"{shown}: {error}")
            case Refused():
                return InvalidValue(f"{shown}: {error} ({error.code})")
            case DriverError() if "authorization" in str(error).lower() or "authentication" in str(error).lower():
                return PermissionDenied(f"{shown}: {error}")
            case FileNotFoundError() | IsADirectoryError() | NotADirectoryError() | PermissionError():
                # No socket says this.
                return InvalidValue(f"{shown}: its file of credentials cannot be read: {error.strerror}")
            case DriverError() | OSError() | TimeoutError():
                return Unavailable(f"{shown} cannot be reached now: {type(error).__name__}")
            case ModuleNotFoundError():
                return InvalidValue(f"{shown}: its credentials need {error.name}: pip install 'nats-py[nkeys]'")
            case ValueError():
                # Not what it says, which may hold a part of a key.
                return InvalidValue(f"{shown}: the driver cannot use this URL or these credentials")
            case _:
                return error


# No leader, no quorum, not enough room, a stream that is being made or was removed meanwhile, a batch that the server
# gave up.
_PASSING: Final = frozenset(
    {10002, 10005, 10008, 10009, 10014, 10023, 10028, 10047, 10059, 10074, 10077, 10118, 10176, 10210, 10211}
)


class _Held:
    """A namespace, and what follows it. A call is under way within it: so it ends before the engine does."""

    def __init__(self, engine: NatsEngine, namespace: str) -> None:
        self._engine = engine
        self.space = Space(engine, namespace, f"{engine.bucket_prefix}{namespace}")
        self.writer = Writer(engine, self.space)
        self.mirror = Mirror(self.space, engine.link, lambda: engine.changed(namespace))
        self.alarms = Alarms(self.space, engine.link)

    def rest(self) -> None:
        self.space.rest()
        self.writer.rest()
        self.mirror.rest()
        self.alarms.rest()

    def __enter__(self) -> _Held:
        self._engine._busy += 1
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        engine = self._engine
        engine._busy -= 1
        if engine._quiet is not None and not engine._busy and not engine._quiet.done():
            engine._quiet.set_result(None)
        if error is not None and isinstance(error, Exception):
            if isinstance(error, Unheard) or (isinstance(error, Refused) and error.code == 10059):
                self.space.forget()
            translated = engine._translated(error)
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
        # A connection cannot be used by two processes: the child leaves its parent's alone and makes its own.
        _inherited.append((engine._link, engine._spaces, engine._connecting))
        engine._begin()


os.register_at_fork(after_in_child=_after_fork_in_child)
