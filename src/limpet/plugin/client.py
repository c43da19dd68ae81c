"""The plugin's side of a server on NATS subjects: the verbs of a plugin storage, as functions.

A plugin has a connection to NATS and its name, and asks with ``client.kv.get("score")``. What a server refuses is
raised as the same error that a store would raise. A write carries a request id that is made once for a call; when no
answer comes it is sent again under that id, so whichever server answers, it is applied once.

Nothing of the driver is imported before a client is made: whoever has a connection has the driver.
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
    """What a write left: the version and the revision of its key."""

    version: int
    revision: int


class PluginEntry(msgspec.Struct, frozen=True):
    """What is stored under a key, with everything that is known of it."""

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


class PluginEvent(msgspec.Struct, frozen=True):
    """A change. ``op`` is put, patch, touch, delete, expire, or synced after what there was at first."""

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
    omitted: bool = False


class PluginClient:
    """A plugin that stores its state with a server.

    Args:
        nats: A connection to NATS.
        plugin: The plugin's name.
        prefix: What the server's subjects start with.
        timeout: Seconds to wait for an answer, each time it is asked for.
        list_timeout: Seconds to wait for an answer that may be long.
        attempts: How often to ask before giving up.

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
            raise InvalidValue("a client asks at least once")
        self.plugin = check_namespace(plugin)
        subject = f"{check_text(prefix, 'a prefix')}.{self.plugin}"
        self.kv = PluginKV(
            _Line(nats, subject, check_wait(timeout, "timeout"), check_wait(list_timeout, "list_timeout"), attempts)
        )

    def __repr__(self) -> str:
        return f"PluginClient({self.plugin!r})"


class _Line:
    """Asks a server, again where that is safe."""

    def __init__(self, nats: Any, subject: str, timeout_s: float, list_timeout_s: float, attempts: int) -> None:
        from nats.errors import Error, NoRespondersError

        self.nats = nats
        self.timeout_s = timeout_s
        self.list_timeout_s = list_timeout_s
        self._subject = subject
        self._attempts = attempts
        self._unheard: type[Exception] = NoRespondersError
        self._trouble: type[Exception] = Error

    async def read(self, name: str, members: Mapping[str, Any], *, timeout_s: float | None = None) -> dict[str, Any]:
        """Ask for something that changes nothing."""
        return await self._ask(name, members, timeout_s or self.timeout_s, None)

    async def write(self, name: str, members: Mapping[str, Any]) -> dict[str, Any]:
        """Ask for a write, under an id of its own."""
        request_id = new_request_id()
        return await self._ask(name, {**members, "request_id": request_id}, self.timeout_s, request_id)

    async def _ask(
        self, name: str, members: Mapping[str, Any], timeout_s: float, request_id: str | None
    ) -> dict[str, Any]:
        body = _body(members)
        may_be_applied = False
        for attempt in range(1, self._attempts + 1):
            if attempt > 1:
                await asyncio.sleep(pause_s(attempt - 1, first=PAUSE_S, longest=PAUSE_S_MAX))
            try:
                answer = await self.nats.request(f"{self._subject}.{name}", body, timeout=timeout_s)
                return granted(answer.data)
            except TimeoutError:
                may_be_applied = True
            except self._unheard:
                pass
            except self._trouble as trouble:
                raise Unavailable(f"{self._subject}.{name}: NATS cannot be reached now") from trouble
            except errors.TransientError:
                if not may_be_applied or request_id is None:
                    raise
        if may_be_applied and request_id is not None:
            raise Ambiguous(
                f"{self._subject}.{name}: no answer came in {self._attempts} attempts, and it may have been applied; "
                "ask kv.outcome(request_id)",
                request_id=request_id,
            )
        why = "no answer came in time" if may_be_applied else "no server listens there"
        raise Unavailable(f"{self._subject}.{name}: {why}")

    async def publish(self, name: str, members: Mapping[str, Any], reply: str = "") -> None:
        """Say something that is not answered, or whose answer goes elsewhere."""
        body = _body(members)
        await self.nats.publish(f"{self._subject}.{name}", body, reply=reply)


class PluginKV:
    """The verbs of a plugin storage."""

    def __init__(self, line: _Line) -> None:
        self._line = line

    # Reading ------------------------------------------------------------------

    async def get(self, key: str, default: Any = None) -> Any:
        """The value under a key, or the default when there is none."""
        answer = await self._line.read("get", {"key": key})
        return answer["value"] if answer["exists"] else default

    async def entry(self, key: str) -> PluginEntry | None:
        """The value with its version, revision and times; None when there is none."""
        answer = await self._line.read("entry", {"key": key})
        return msgspec.convert(answer["entry"], PluginEntry) if answer["exists"] else None

    async def list(self, prefix: str = "", limit: int = 1000) -> list[str]:
        """Keys that start with the prefix, in order, as many as the limit allows. `keys` gives all."""
        return (await self._page(prefix, limit, None))["keys"]  # type: ignore[no-any-return]

    async def keys(self, prefix: str = "", *, page: int = 1000) -> AsyncIterator[str]:
        """All keys that start with the prefix, in order, page by page."""
        after: str | None = None
        while True:
            answer = await self._page(prefix, page, after)
            for key in answer["keys"]:
                yield key
            if not answer["truncated"]:
                return
            after = answer["keys"][-1]

    async def _page(self, prefix: str, limit: int, after: str | None) -> dict[str, Any]:
        asked = {"prefix": prefix, "limit": limit, "after": after}
        return await self._line.read("list", asked, timeout_s=self._line.list_timeout_s)

    async def outcome(self, request_id: str) -> bool:
        """Whether the write of this id was applied: what to ask after `Ambiguous`."""
        answer = await self._line.read("outcome", {"request_id": request_id}, timeout_s=self._line.list_timeout_s)
        return bool(answer["applied"])

    # Writing ------------------------------------------------------------------

    async def set(
        self, key: str, value: Any, ttl: int | None = None, *, fence: PluginLock | Fence | None = None
    ) -> None:
        """Replace the value under a key. Without a time to live, in seconds, it never expires."""
        asked = {"key": key, "value": _encoded(value), "ttl": ttl, "fence": _fence(fence)}
        await self._line.write("set" if fence is None else "put", asked)

    async def delete(self, key: str, *, fence: PluginLock | Fence | None = None) -> bool:
        """End a key. False when there was none."""
        return bool((await self._line.write("delete", {"key": key, "fence": _fence(fence)}))["deleted"])

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
            Conflict: It is not so; ``actual_version`` and ``actual_revision`` tell how it is.
        """
        expect = {name: given for name, given in (("version", version), ("revision", revision)) if given is not None}
        expect |= {"absent": True} if absent else {}
        asked = {"key": key, "value": _encoded(value), "expect": expect, "ttl": ttl, "fence": _fence(fence)}
        return _stamp(await self._line.write("cas", asked))

    async def incr(self, key: str, by: int = 1, *, fence: PluginLock | Fence | None = None) -> int:
        """Add to a counter, in one step. Returns its new value; a missing key counts as zero."""
        return int((await self._line.write("incr", {"key": key, "by": by, "fence": _fence(fence)}))["value"])

    async def take(self, key: str, default: Any = None, *, fence: PluginLock | Fence | None = None) -> Any:
        """Get and delete in one step: of all who try, one gets the value."""
        answer = await self._line.write("take", {"key": key, "fence": _fence(fence)})
        return answer["value"] if answer["exists"] else default

    async def touch(self, key: str, ttl: int | None) -> bool:
        """Change only when a key expires; None for never. False when there is no such key."""
        never = msgspec.Raw(b"null")
        return bool((await self._line.write("touch", {"key": key, "ttl": never if ttl is None else ttl}))["exists"])

    async def get_fields(self, key: str, *names: str) -> dict[str, Any] | None:
        """Fields of a record, all of them where none is named; None when there is no such record."""
        chosen: Any = list(names) if names else msgspec.Raw(b"null")
        answer = await self._line.read("fields", {"key": key, "get": chosen})
        return {name: field_of(field) for name, field in answer["fields"].items()} if answer["exists"] else None

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
        given = {name: _encoded_field(field) for name, field in as_fields(fields).items()}
        if isinstance(unset, str):
            raise InvalidValue("unset is a list of names, such as ['state'], not one name")
        asked = {"key": key, "set": given, "unset": [*unset], "if_exists": if_exists, "fence": _fence(fence)}
        return _stamp(await self._line.write("fields", asked))

    async def swap_field(self, key: str, field: str, expected: Any, new: Any) -> bool:
        """Replace one field if it holds what is expected. Of all who try, one gets True."""
        swap = {"field": field, "expected": _encoded_field(expected), "new": _encoded_field(new)}
        return bool((await self._line.write("fields", {"key": key, "swap": swap}))["swapped"])

    async def batch(
        self,
        writes: Sequence[Mapping[str, Any]],
        *,
        guards: Sequence[Mapping[str, Any]] = (),
        fences: Sequence[PluginLock | Fence] = (),
    ) -> dict[str, Any]:
        """Guards and writes, as the subject takes them, that happen together or not at all.

        Returns the answer: ``revision``, ``entries`` and ``taken`` in the order of the writes.
        """
        for one in (*writes, *guards):
            if not isinstance(one, Mapping):
                raise InvalidValue(f"writes and guards are documents, not something of type {type(one).__name__}")
        encoded = [
            {name: _encoded(given) if name == "value" else given for name, given in write.items()} for write in writes
        ]
        asked = {"writes": encoded, "guards": [*guards], "fences": [_fence(fence) for fence in fences]}
        return await self._line.write("batch", asked)

    # Locking and watching -----------------------------------------------------

    def lock(self, name: str, ttl: int, wait: float = 0.0) -> PluginLock:
        """A lease on a name, to be used with ``async with``. It renews itself.

        Args:
            name: What to lock. Locks and keys never collide.
            ttl: How many seconds the lease lasts without being renewed.
            wait: How many seconds to wait for it; 0 raises `LockHeld` at once.
        """
        return PluginLock(self._line, name, ttl, wait)

    async def watch(
        self, pattern: str = "*", *, after: str | None = None, initial: bool = False
    ) -> AsyncIterator[PluginEvent]:
        """Changes as they happen, in the order of their revisions, for as long as it is iterated.

        When the server is gone, the watch goes on with another, after the last change that was seen. Only what
        ``initial`` shows may then come a second time.

        Args:
            pattern: ``*`` for all keys, ``config/*`` for what starts so, otherwise one exact key.
            after: Resume after this position of an event.
            initial: Begin with what there is, then one ``synced``, then changes.

        Raises:
            Compacted: The log no longer holds the changes after that position.
        """
        position = after
        while True:
            async with _Inbox(self._line, pattern, position, initial) as inbox:
                position = inbox.position or position
                async for event in inbox:
                    if event.position is not None:
                        position, initial = event.position, False
                    yield event
                position = inbox.position or position


class _Inbox:
    """A watch on one server: a subject that it sends to, and when it was last heard of."""

    def __init__(self, line: _Line, pattern: str, after: str | None, initial: bool) -> None:
        self._line = line
        self._asked = {"pattern": pattern, "after": after, "initial": initial and after is None}
        self._watch: str | None = None
        self._silence_s = 0.0
        self._messages: asyncio.Queue[bytes] = asyncio.Queue(PENDING_MAX)
        self.position: str | None = None

    async def __aenter__(self) -> Self:
        subject = self._line.nats.new_inbox()
        self._subscription = await self._line.nats.subscribe(subject, cb=self._heard)
        try:
            # No request id: a watch that was begun without our hearing of it ends when nobody listens to it.
            answer = await self._line.read(
                "watch", {**self._asked, "deliver": subject}, timeout_s=self._line.list_timeout_s
            )
        except BaseException:
            await self._subscription.unsubscribe()
            raise
        self._watch, self.position = answer["watch"], answer["position"]
        self._silence_s = BEATS_MISSED_MAX * answer["heartbeat"]
        return self

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(Exception):
            await self._subscription.unsubscribe()
            await self._line.publish("unwatch", {"watch": self._watch})

    async def _heard(self, message: Any) -> None:
        # An event of a watch that an earlier attempt began comes here too, and is told apart by its id.
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

    def __init__(self, line: _Line, name: str, ttl: int, wait: float) -> None:
        if type(ttl) is not int or ttl < 1:
            raise InvalidTTL("of a lock is a whole number of seconds, at least one")
        self.name = check_key(name)
        self.token: int | None = None
        self.lost = False
        self._is_held = False
        self._line = line
        self._ttl = ttl
        self._wait_s = check_wait(wait, "how long to wait for a lock")
        # Whoever asks twice, because the first answer was not heard, recognizes itself by this.
        self._holder = f"{line._subject.rpartition('.')[2]}:{uuid.uuid4().hex[:12]}"
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
        """Take the lock, waiting for it as long as was asked for. Raises `LockHeld`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._wait_s
        while True:
            wait_s = min(LOCK_TURN_S, max(0.0, until - loop.time()))
            asked = {"name": self.name, "ttl": self._ttl, "wait": wait_s, "holder": self._holder}
            timeout_s = max(self._line.timeout_s, LOCK_ANSWER_S) + wait_s
            try:
                self.token = (await self._line.read("lock", asked, timeout_s=timeout_s))["token"]
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
        await self._line.read("refresh", {"name": fence.name, "token": fence.token, "ttl": self._ttl})

    async def release(self) -> None:
        """Give the lock back. Only one's own: raises `LockExpired` or `LockNotHeld`."""
        fence, self._is_held = self.fence, False
        await self._line.read("unlock", {"name": fence.name, "token": fence.token})

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
        """Give the lock back after the body. What the body did, or its own error, matters more than how that ends."""
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
            asked = loop.time()
            try:
                await self.refresh()
                until = asked + self._ttl - margin_s
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


# What goes out and what comes back --------------------------------------------


def _body(members: Mapping[str, Any]) -> bytes:
    """A request. Members that are None are left out."""
    given = {name: member for name, member in members.items() if member is not None}
    for name, member in given.items():
        _check_member(name, member, 1)
    return msgspec.json.encode(given)


def _check_member(name: str, member: Any, depth: int) -> None:
    """Refuse what the encoder would turn into something else, such as bytes into text, or could not encode."""
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


def _encoded(value: Any) -> msgspec.Raw:
    """A value as JSON, checked: the encoder alone would turn NaN into null and sets into lists."""
    encoded = encode_field(value)
    if encoded[:1] == b"\0":
        raise InvalidValue("a plugin stores JSON: raw bytes go into the field of a record")
    return msgspec.Raw(encoded)


def _encoded_field(value: Any) -> Any:
    return plain(value) if isinstance(value, bytes) else _escaped(value)


def _escaped(value: Any) -> Any:
    looks_special = isinstance(value, dict) and len(value) == 1 and str(next(iter(value))).startswith("$")
    return {"$json": _encoded(value)} if looks_special else _encoded(value)


def _fence(fence: PluginLock | Fence | None) -> dict[str, Any] | None:
    if fence is None:
        return None
    held = fence.fence if isinstance(fence, PluginLock) else fence
    if not isinstance(held, Fence):
        raise InvalidValue(
            f"a write is fenced by a lock or a limpet.Fence, not by something of type {type(held).__name__}"
        )
    return {"name": check_key(held.name), "token": check_number(held.token, "a fencing token")}


def _stamp(answer: dict[str, Any]) -> Stamp:
    return Stamp(answer["version"], answer["revision"])


def granted(body: bytes) -> dict[str, Any]:
    """An answer, or the error that it tells of."""
    try:
        answer: dict[str, Any] = msgspec.json.decode(body)
        success = answer["success"]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError) as strange:
        raise Unavailable("somebody answered who is not a server of Limpet") from strange
    if not success:
        raise error_of(answer)
    return answer


_KINDS: Final = {kind.code: kind for kind in CODES}
_BY_REPLY: Final = {code.reply: kind for kind, code in reversed(CODES.items())}
_MEMBERS: Final = {"version": "actual_version", "revision": "actual_revision"}


def error_of(reply: Mapping[str, Any]) -> LimpetError:
    """The error that a reply tells of, with what it carries."""
    kind = _KINDS.get(reply.get("code", ""))
    if kind is None:
        kind = _BY_REPLY.get(reply.get("error_code", ""), InvalidValue if _is_ours(reply) else Unavailable)
    error = kind.__new__(kind)
    error.args = (str(reply.get("message", "")),)
    vars(error).update(_DEFAULTS.get(kind, {}))
    for name, given in reply.items():
        if name not in ("success", "error_code", "message", "code"):
            setattr(error, _MEMBERS.get(name, name), given)
    return error


def _is_ours(reply: Mapping[str, Any]) -> bool:
    """Whether the request was at fault, of an error that has no name of its own here."""
    return str(reply.get("error_code", "")).startswith(("INVALID_", "MISSING_", "VALIDATION_"))


_DEFAULTS: Final[dict[type[LimpetError], dict[str, Any]]] = {
    errors.InvalidKey: {"key": None},
    errors.InvalidValue: {"path": None},
    errors.ValueTooLarge: {"key": ""},
    errors.Conflict: {"expected": "", "current": None, "actual_version": None, "actual_revision": None},
    errors.Ambiguous: {"request_id": None, "since": 0},
}
