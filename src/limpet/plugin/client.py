"""The plugin's side of a server on NATS subjects: the verbs of a plugin storage, as functions.

A plugin has a connection to NATS and its name, and calls ``client.kv.get("score")``. A refusal of a server is raised
as the same error that a store would raise. A write has a request id that is made once for a call; without a reply it
is sent again under that id, so that it is applied once, whichever server replies.

The driver is not imported before a client is made: a program that has a connection has the driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple, Self

import msgspec

from limpet import errors
from limpet.checks import check_number
from limpet.clock import check_wait
from limpet.codec import DEPTH_MAX, encode_field
from limpet.draft import Fence, as_fields
from limpet.errors import Ambiguous, InvalidTTL, InvalidValue, LimpetError, LockExpired, LockHeld, LockLost, Unavailable
from limpet.keys import check_key, check_namespace, check_text
from limpet.lock import end_all
from limpet.protocol.codes import CODES
from limpet.protocol.json import field_of, plain
from limpet.request_ids import new_request_id
from limpet.retry import pause_s

__all__ = ["PluginClient", "PluginEntry", "PluginEvent", "PluginKV", "PluginLock", "Stamp"]

log = logging.getLogger(__name__)

PAUSE_S: Final = 0.02
PAUSE_S_MAX: Final = 0.25
LOCK_TURN_S: Final = 5.0
LOCK_ANSWER_S: Final = 2.0
BEATS_MISSED_MAX: Final = 3
PENDING_MAX: Final = 65_536


class Stamp(NamedTuple):
    """The version and the revision of a key after a write."""

    version: int
    revision: int


class PluginEntry(msgspec.Struct, frozen=True):
    """The value under a key, with its version, revision, times and meta."""

    key: str
    value: Any
    kind: str
    version: int
    revision: int
    created_revision: int
    created_at: datetime
    updated_at: datetime
    expires_at: datetime | None
    size_bytes: int
    meta: dict[str, Any] | None
    writer: str | None = None


class PluginEvent(msgspec.Struct, frozen=True):
    """A change. ``op`` is put, patch, touch, delete, expire, or synced at the end of the initial entries."""

    op: str
    key: str
    value: Any = None
    kind: str | None = None
    version: int | None = None
    revision: int = 0
    commit: int = 0
    position: str | None = None
    cause: str | None = None
    at: datetime | None = None
    expires_at: datetime | None = None
    meta: dict[str, Any] | None = None
    writer: str | None = None
    omitted: bool = False


class PluginClient:
    """A plugin that stores its state with a server.

    Args:
        nats: A connection to NATS.
        plugin: The plugin's name.
        prefix: What the server's subjects start with.
        timeout: Seconds to wait for a reply, in each attempt.
        list_timeout: Seconds to wait for a reply that may be long.
        attempts: How often to send a request before giving up.

    Attributes:
        kv: The verbs.
    """

    def __init__(
        self,
        nats: Any,
        plugin: str,
        *,
        prefix: str = "db.kv",
        timeout: float = 0.1,
        list_timeout: float = 0.5,
        attempts: int = 3,
    ) -> None:
        if check_number(attempts, "attempts") < 1:
            raise InvalidValue("attempts is 1 or more")
        self.plugin = check_namespace(plugin)
        subject = f"{check_text(prefix, 'a prefix')}.{self.plugin}"
        self.kv = PluginKV(
            _Connection(
                nats, subject, check_wait(timeout, "timeout"), check_wait(list_timeout, "list_timeout"), attempts
            )
        )

    def __repr__(self) -> str:
        return f"PluginClient({self.plugin!r})"


class _Connection:
    """Sends requests to a server, again where that is safe."""

    def __init__(self, nats: Any, subject: str, timeout_s: float, list_timeout_s: float, attempts: int) -> None:
        from nats.errors import Error, NoRespondersError

        self.nats = nats
        self.timeout_s = timeout_s
        self.list_timeout_s = list_timeout_s
        self._subject = subject
        self._attempts = attempts
        self._no_responders: type[Exception] = NoRespondersError
        self._driver_error: type[Exception] = Error

    async def read(self, name: str, members: Mapping[str, Any], *, timeout_s: float | None = None) -> dict[str, Any]:
        """Send a request that changes nothing, or that may be repeated."""
        return await self._request(name, members, timeout_s or self.timeout_s, None)

    async def write(self, name: str, members: Mapping[str, Any]) -> dict[str, Any]:
        """Send a write, with a new request id."""
        request_id = new_request_id()
        return await self._request(name, {**members, "request_id": request_id}, self.timeout_s, request_id)

    async def _request(
        self, name: str, members: Mapping[str, Any], timeout_s: float, request_id: str | None
    ) -> dict[str, Any]:
        body = _encode_request(members)
        may_be_applied = False
        for attempt in range(1, self._attempts + 1):
            if attempt > 1:
                await asyncio.sleep(pause_s(attempt - 1, first=PAUSE_S, longest=PAUSE_S_MAX))
            try:
                reply = await self.nats.request(f"{self._subject}.{name}", body, timeout=timeout_s)
                return decode_reply(reply.data)
            except TimeoutError:
                may_be_applied = True
            except self._no_responders:
                pass
            except self._driver_error as error:
                raise Unavailable(f"{self._subject}.{name}: NATS cannot be reached now") from error
            except errors.TransientError:
                if not may_be_applied or request_id is None:
                    raise
        if may_be_applied and request_id is not None:
            raise Ambiguous(
                f"{self._subject}.{name}: no reply came in {self._attempts} attempts, and it may have been applied; "
                "read kv.outcome(request_id)",
                request_id=request_id,
            )
        why = "no reply came in time" if may_be_applied else "no server listens there"
        raise Unavailable(f"{self._subject}.{name}: {why}")

    async def publish(self, name: str, members: Mapping[str, Any], reply: str = "") -> None:
        """Send a request that gets no reply, or whose reply goes elsewhere."""
        body = _encode_request(members)
        await self.nats.publish(f"{self._subject}.{name}", body, reply=reply)


class PluginKV:
    """The verbs of a plugin storage."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection

    # Reading ------------------------------------------------------------------

    async def get(self, key: str, default: Any = None) -> Any:
        """The value under a key, or the default if the key does not exist."""
        reply = await self._connection.read("get", {"key": key})
        return reply["value"] if reply["exists"] else default

    async def entry(self, key: str) -> PluginEntry | None:
        """The value with its version, revision and times; None if the key does not exist."""
        reply = await self._connection.read("entry", {"key": key})
        return msgspec.convert(reply["entry"], PluginEntry) if reply["exists"] else None

    async def remaining(self, key: str) -> float | None:
        """How many seconds are left until a key expires: None when it never does, 0.0 when there is no such key."""
        found: float | None = (await self._connection.read("remaining", {"key": key}))["remaining"]
        return found

    async def list(self, prefix: str = "", limit: int = 1000) -> list[str]:
        """Keys that start with the prefix, in order, as many as the limit allows. `keys` gives all."""
        return (await self._page(prefix, limit, None))["keys"]  # type: ignore[no-any-return]

    async def keys(self, prefix: str = "", *, page: int = 1000) -> AsyncIterator[str]:
        """All keys that start with the prefix, in order, page by page."""
        after: str | None = None
        while True:
            reply = await self._page(prefix, page, after)
            for key in reply["keys"]:
                yield key
            if not reply["truncated"]:
                return
            after = reply["keys"][-1]

    async def _page(self, prefix: str, limit: int, after: str | None) -> dict[str, Any]:
        members = {"prefix": prefix, "limit": limit, "after": after}
        return await self._connection.read("list", members, timeout_s=self._connection.list_timeout_s)

    async def outcome(self, request_id: str) -> bool:
        """Whether the write of this id was applied. Use it after `Ambiguous`."""
        reply = await self._connection.read(
            "outcome", {"request_id": request_id}, timeout_s=self._connection.list_timeout_s
        )
        return bool(reply["applied"])

    # Writing ------------------------------------------------------------------

    async def set(
        self, key: str, value: Any, ttl: int | None = None, *, fence: PluginLock | Fence | None = None
    ) -> None:
        """Replace the value under a key. Without a time to live, in seconds, it never expires."""
        members = {"key": key, "value": _encode_value(value), "ttl": ttl, "fence": _encode_fence(fence)}
        await self._connection.write("set" if fence is None else "put", members)

    async def delete(self, key: str, *, fence: PluginLock | Fence | None = None) -> bool:
        """End a key. False when there was none."""
        return bool((await self._connection.write("delete", {"key": key, "fence": _encode_fence(fence)}))["deleted"])

    async def cas(
        self,
        key: str,
        value: Any,
        *,
        version: int | None = None,
        revision: int | None = None,
        absent: bool = False,
        ttl: int | None = None,
        fence: PluginLock | Fence | None = None,
    ) -> Stamp:
        """Replace a value if its key has this version or this revision, or does not exist.

        Raises:
            Conflict: It has not; ``actual_version`` and ``actual_revision`` are those that it has.
        """
        expect = {name: given for name, given in (("version", version), ("revision", revision)) if given is not None}
        expect |= {"absent": True} if absent else {}
        members = {
            "key": key,
            "value": _encode_value(value),
            "expect": expect,
            "ttl": ttl,
            "fence": _encode_fence(fence),
        }
        return _stamp(await self._connection.write("cas", members))

    async def incr(self, key: str, by: int = 1, *, fence: PluginLock | Fence | None = None) -> int:
        """Add to a counter, in one step. Returns its new value; a missing key counts as zero."""
        return int(
            (await self._connection.write("incr", {"key": key, "by": by, "fence": _encode_fence(fence)}))["value"]
        )

    async def take(self, key: str, default: Any = None, *, fence: PluginLock | Fence | None = None) -> Any:
        """Get and delete in one step: of several callers, one gets the value."""
        reply = await self._connection.write("take", {"key": key, "fence": _encode_fence(fence)})
        return reply["value"] if reply["exists"] else default

    async def touch(self, key: str, ttl: int | None) -> bool:
        """Change only when a key expires; None for never. False when there is no such key."""
        never = msgspec.Raw(b"null")
        return bool(
            (await self._connection.write("touch", {"key": key, "ttl": never if ttl is None else ttl}))["exists"]
        )

    async def get_fields(self, key: str, *names: str) -> dict[str, Any] | None:
        """Fields of a record, all of them where none is named; None when there is no such record."""
        chosen: Any = list(names) if names else msgspec.Raw(b"null")
        reply = await self._connection.read("fields", {"key": key, "get": chosen})
        return {name: field_of(field) for name, field in reply["fields"].items()} if reply["exists"] else None

    async def set_fields(
        self,
        key: str,
        fields: Mapping[str, Any],
        *,
        unset: Sequence[str] = (),
        if_exists: bool = False,
        fence: PluginLock | Fence | None = None,
    ) -> Stamp:
        """Write some fields of a record and leave the others."""
        given = {name: _encode_field_value(field) for name, field in as_fields(fields).items()}
        if isinstance(unset, str):
            raise InvalidValue("unset is a list of names, such as ['state'], not one name")
        members = {
            "key": key,
            "set": given,
            "unset": [*unset],
            "if_exists": if_exists,
            "fence": _encode_fence(fence),
        }
        return _stamp(await self._connection.write("fields", members))

    async def swap_field(self, key: str, field: str, expected: Any, new: Any) -> bool:
        """Replace one field if it has the expected value. Of several callers, one gets True."""
        swap = {"field": field, "expected": _encode_field_value(expected), "new": _encode_field_value(new)}
        return bool((await self._connection.write("fields", {"key": key, "swap": swap}))["swapped"])

    async def batch(
        self,
        writes: Sequence[Mapping[str, Any]],
        *,
        guards: Sequence[Mapping[str, Any]] = (),
        fences: Sequence[PluginLock | Fence] = (),
    ) -> dict[str, Any]:
        """Guards and writes, as the subject takes them, that happen together or not at all.

        Returns the reply: ``revision``, ``entries`` and ``taken`` in the order of the writes.
        """
        for one in (*writes, *guards):
            if not isinstance(one, Mapping):
                raise InvalidValue(f"writes and guards are documents, not something of type {type(one).__name__}")
        encoded = [
            {name: _encode_value(given) if name == "value" else given for name, given in write.items()}
            for write in writes
        ]
        members = {"writes": encoded, "guards": [*guards], "fences": [_encode_fence(fence) for fence in fences]}
        return await self._connection.write("batch", members)

    # Locking and watching -----------------------------------------------------

    def lock(self, name: str, ttl: int, wait: float = 0.0) -> PluginLock:
        """A lease on a name, to be used with ``async with``. It renews itself.

        Args:
            name: What to lock. Locks and keys never collide.
            ttl: How many seconds the lease lasts without being renewed.
            wait: How many seconds to wait for it; 0 raises `LockHeld` at once.
        """
        return PluginLock(self._connection, name, ttl, wait)

    async def watch(
        self, pattern: str = "*", *, after: str | None = None, initial: bool = False
    ) -> AsyncIterator[PluginEvent]:
        """Changes as they happen, in the order of their revisions, for as long as it is iterated.

        When the server is gone, the watch goes on with another, after the last change that was seen. Only the initial
        entries may then come a second time.

        Args:
            pattern: ``*`` for all keys, ``config/*`` for what starts so, otherwise one exact key.
            after: Resume after this position of an event.
            initial: Begin with the present entries, then one ``synced``, then changes.

        Raises:
            Compacted: The log no longer holds the changes after that position.
        """
        position = after
        while True:
            async with _Inbox(self._connection, pattern, position, initial) as inbox:
                position = inbox.position or position
                async for event in inbox:
                    if event.position is not None:
                        position, initial = event.position, False
                    yield event
                position = inbox.position or position


class _Inbox:
    """A watch on one server: the subject that it sends to, and how long it may be silent."""

    def __init__(self, connection: _Connection, pattern: str, after: str | None, initial: bool) -> None:
        self._connection = connection
        self._members = {"pattern": pattern, "after": after, "initial": initial and after is None}
        self._watch: str | None = None
        self._silence_s = 0.0
        self._messages: asyncio.Queue[bytes] = asyncio.Queue(PENDING_MAX)
        self.position: str | None = None

    async def __aenter__(self) -> Self:
        subject = self._connection.nats.new_inbox()
        self._subscription = await self._connection.nats.subscribe(subject, cb=self._receive)
        try:
            # No request id: a watch whose reply was lost ends by itself when no one is subscribed to it.
            reply = await self._connection.read(
                "watch", {**self._members, "deliver": subject}, timeout_s=self._connection.list_timeout_s
            )
        except BaseException:
            await self._subscription.unsubscribe()
            raise
        self._watch, self.position = reply["watch"], reply["position"]
        self._silence_s = BEATS_MISSED_MAX * reply["heartbeat"]
        return self

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(Exception):
            await self._subscription.unsubscribe()
            await self._connection.publish("unwatch", {"watch": self._watch})

    async def _receive(self, message: Any) -> None:
        # Events of a watch that an earlier attempt began come here too; `_events` drops them by their watch id.
        await self._messages.put(message.data)

    def __aiter__(self) -> AsyncIterator[PluginEvent]:
        return self._events()

    async def _events(self) -> AsyncIterator[PluginEvent]:
        while True:
            try:
                async with asyncio.timeout(self._silence_s):
                    body = await self._messages.get()
            except TimeoutError:
                return
            document = msgspec.json.decode(body)
            if document.get("watch") != self._watch:
                continue
            if document["op"] == "end":
                if "error_code" in document:
                    raise error_of(document)
                return
            self.position = document.get("position") or self.position
            if document["op"] != "heartbeat":
                yield msgspec.convert(document, PluginEvent)


class PluginLock:
    """A lease on a name. As a context it renews itself; when it is lost, the body is cancelled.

    Attributes:
        name: What is locked.
        token: The fencing token of the last holding; None before the first. It stays readable when that is over.
        lost: Whether the lock was held and then lost.
    """

    def __init__(self, connection: _Connection, name: str, ttl: int, wait: float) -> None:
        if type(ttl) is not int or ttl < 1:
            raise InvalidTTL("of a lock is a whole number of seconds, at least one")
        self.name = check_key(name)
        self.token: int | None = None
        self.lost = False
        self._is_held = False
        self._connection = connection
        self._ttl = ttl
        self._wait_s = check_wait(wait, "how long to wait for a lock")
        # A client whose first reply was lost recognises itself by this in `LockHeld`.
        self._holder = f"{connection._subject.rpartition('.')[2]}:{uuid.uuid4().hex[:12]}"
        self._renewal: asyncio.Task[None] | None = None
        self._body: asyncio.Task[Any] | None = None
        self._was_cancelled = False

    @property
    def fence(self) -> Fence:
        """The lock's name and token, to fence writes with."""
        if self.token is None or not self._is_held:
            raise errors.LockNotHeld(self.name)
        return Fence(self.name, self.token)

    async def acquire(self) -> Self:
        """Take the lock, waiting for it up to ``wait`` seconds. Raises `LockHeld`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._wait_s
        while True:
            wait_s = min(LOCK_TURN_S, max(0.0, until - loop.time()))
            members = {"name": self.name, "ttl": self._ttl, "wait": wait_s, "holder": self._holder}
            timeout_s = max(self._connection.timeout_s, LOCK_ANSWER_S) + wait_s
            try:
                self.token = (await self._connection.read("lock", members, timeout_s=timeout_s))["token"]
            except LockHeld as held:
                if held.holder == self._holder:
                    self.token = held.token
                elif loop.time() < until:
                    continue
                else:
                    raise
            self.lost, self._is_held = False, True
            return self

    async def refresh(self) -> None:
        """Extend the lease from now on. Raises `LockExpired` or `LockNotHeld`."""
        fence = self.fence
        await self._connection.read("refresh", {"name": fence.name, "token": fence.token, "ttl": self._ttl})

    async def release(self) -> None:
        """Release the lock. Raises `LockExpired` or `LockNotHeld` if it is not held any more."""
        fence, self._is_held = self.fence, False
        await self._connection.read("unlock", {"name": fence.name, "token": fence.token})

    async def __aenter__(self) -> Self:
        await self.acquire()
        self._body = asyncio.current_task()
        self._renewal = asyncio.get_running_loop().create_task(self._renew(), name=f"limpet-lock-{self.name}")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        assert self._renewal is not None
        body, self._body = self._body, None
        await end_all(self._renewal)
        token = self.token or 0
        if not self.lost:
            await self._release_after(kind)
            return
        if self._was_cancelled and body is not None:
            body.uncancel()
        if kind is None or (self._was_cancelled and issubclass(kind, asyncio.CancelledError)):
            raise LockLost(self.name, token=token) from error

    async def _release_after(self, kind: type[BaseException] | None) -> None:
        """Release the lock after the body. An error of the body matters more than one of the release."""
        try:
            if self._is_held:
                await self.release()
        except (LockExpired, errors.TransientError, Ambiguous) as error:
            self._warn("could not be released, and ends when its time is over", error)
        except Exception as error:
            if kind is None:
                raise
            self._warn("could not be released, and ends when its time is over", error)

    async def _renew(self) -> None:
        loop = asyncio.get_running_loop()
        margin_s = self._ttl / 10
        until = loop.time() + self._ttl - margin_s
        problem: Exception | None = None
        while True:
            await asyncio.sleep(self._ttl / 3)
            sent_at = loop.time()
            try:
                await self.refresh()
                until = sent_at + self._ttl - margin_s
            except (errors.TransientError, Ambiguous) as error:
                # A refresh may be repeated, so it does not matter whether this one was applied.
                self.lost, problem = loop.time() >= until, error
            except Exception as error:
                self.lost, problem = True, error
            if self.lost:
                assert problem is not None
                self._warn("is lost, because it could not be renewed", problem)
                if self._body is not None:
                    self._was_cancelled = True
                    self._body.cancel()
                return

    def _warn(self, what: str, error: Exception) -> None:
        log.warning("lock %r (token %s) %s: %s", self.name, self.token, what, type(error).__name__)

    def __repr__(self) -> str:
        state = "lost" if self.lost else "free" if not self._is_held else f"token {self.token}"
        return f"PluginLock({self.name!r}, {state})"


# Encoding requests, decoding replies -------------------------------------------


def _encode_request(members: Mapping[str, Any]) -> bytes:
    """Encode a request. Members that are None are left out."""
    given = {name: member for name, member in members.items() if member is not None}
    for name, member in given.items():
        _check_member(name, member, 1)
    return msgspec.json.encode(given)


def _check_member(name: str, member: Any, depth: int) -> None:
    """Refuse a member that the encoder would change, such as bytes into text, or could not encode."""
    kind = type(member)
    if depth > DEPTH_MAX:
        raise InvalidValue(f"{name} is nested deeper than {DEPTH_MAX}")
    if kind is dict:
        for inner, item in member.items():
            if type(inner) is not str:
                raise InvalidValue(f"a name in {name} is of type {type(inner).__name__}, not str")
            _check_member(name, inner, depth + 1)
            _check_member(name, item, depth + 1)
    elif kind in (list, tuple):
        for item in member:
            _check_member(name, item, depth + 1)
    elif kind is not msgspec.Raw:
        if kind not in (str, int, float, bool, type(None)):
            raise InvalidValue(f"{name} cannot be of type {kind.__name__}")
        encode_field(member, name)


def _encode_value(value: Any) -> msgspec.Raw:
    """Encode a value as JSON, checked: the encoder alone would turn NaN into null and sets into lists."""
    encoded = encode_field(value)
    if encoded[:1] == b"\0":
        raise InvalidValue("a plugin stores JSON: raw bytes go into the field of a record")
    return msgspec.Raw(encoded)


def _encode_field_value(value: Any) -> Any:
    return plain(value) if isinstance(value, bytes) else _escape(value)


def _escape(value: Any) -> Any:
    looks_special = isinstance(value, dict) and len(value) == 1 and str(next(iter(value))).startswith("$")
    return {"$json": _encode_value(value)} if looks_special else _encode_value(value)


def _encode_fence(fence: PluginLock | Fence | None) -> dict[str, Any] | None:
    if fence is None:
        return None
    held = fence.fence if isinstance(fence, PluginLock) else fence
    if not isinstance(held, Fence):
        raise InvalidValue(
            f"a write is fenced by a lock or a limpet.Fence, not by something of type {type(held).__name__}"
        )
    return {"name": check_key(held.name), "token": check_number(held.token, "a fencing token")}


def _stamp(reply: dict[str, Any]) -> Stamp:
    return Stamp(reply["version"], reply["revision"])


def decode_reply(body: bytes) -> dict[str, Any]:
    """Decode a reply, or raise the error that it holds."""
    try:
        reply: dict[str, Any] = msgspec.json.decode(body)
        success = reply["success"]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise Unavailable("the reply does not come from a Limpet server; is the prefix right?") from error
    if not success:
        raise error_of(reply)
    return reply


_KINDS: Final = {kind.code: kind for kind in CODES}
_BY_REPLY: Final = {code.reply: kind for kind, code in reversed(CODES.items())}
_MEMBERS: Final = {"version": "actual_version", "revision": "actual_revision"}


def error_of(reply: Mapping[str, Any]) -> LimpetError:
    """The error of a reply, with its attributes."""
    kind = _KINDS.get(reply.get("code", ""))
    if kind is None:
        kind = _BY_REPLY.get(reply.get("error_code", ""), InvalidValue if _is_of_request(reply) else Unavailable)
    error = kind.__new__(kind)
    error.args = (str(reply.get("message", "")),)
    vars(error).update(_DEFAULTS.get(kind, {}))
    for name, given in reply.items():
        if name not in ("success", "error_code", "message", "code"):
            setattr(error, _MEMBERS.get(name, name), given)
    return error


def _is_of_request(reply: Mapping[str, Any]) -> bool:
    """Whether an error code that this release does not know blames the request."""
    return str(reply.get("error_code", "")).startswith(("INVALID_", "MISSING_", "VALIDATION_"))


_DEFAULTS: Final[dict[type[LimpetError], dict[str, Any]]] = {
    errors.InvalidKey: {"key": None},
    errors.InvalidValue: {"path": None, "key": None},
    errors.TypeMismatch: {"path": None},
    errors.ValueTooLarge: {"key": ""},
    errors.Conflict: {"expected": "", "current": None, "actual_version": None, "actual_revision": None},
    errors.Ambiguous: {"request_id": None, "since": 0},
}
