"""Limits: how fast a namespace may be used, and how much it may hold.

Rates are token buckets: so many requests a second, and a burst that is saved up meanwhile. A batch counts as its
writes. Quotas bound the keys and the bytes of a namespace. Reads, deletes, and writes that make nothing larger always
pass, so that whoever has run into a quota can read and make room.

What a namespace holds is asked of the engine at most once a second, and in between reckoned from what passed: what is
under way counts in full. So a burst does not run past a quota by more than other servers let in within that second.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from limpet import codec
from limpet.clock import Clock
from limpet.errors import InvalidValue, RateLimited
from limpet.keys import check_namespace
from limpet.model import Add, Batch, Expire, Patch, Put
from limpet.protocol.json import bytes_of, field_of
from limpet.server import requests
from limpet.server.dispatch import Call
from limpet.server.operations import Operation
from limpet.server.requests import Request
from limpet.store import Store

__all__ = ["Limit", "NamespaceLimits", "Quotas", "Rates", "gates_of", "limits_of"]

NAMESPACES_MAX: Final = 10_000
LOOK_S: Final = 1.0
UNDER_WAY_S_MAX: Final = 60.0
QUOTA_RETRY_S: Final = 10.0

V = TypeVar("V")


# What is allowed --------------------------------------------------------------


class Limit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a namespace is held to. None is no limit.

    Attributes:
        rate: Requests a second.
        burst: How many at once, after a pause; as many as a second has, and at least one, when not given.
        keys: How many keys it may hold.
        bytes: How many bytes its keys and values may have together.
    """

    rate: float | None = None
    burst: float | None = None
    keys: int | None = None
    bytes: int | None = None

    @property
    def room(self) -> float:
        """How many requests may come at once."""
        return max(1.0, self.rate or 0.0) if self.burst is None else self.burst


class NamespaceLimits(NamedTuple):
    """What each namespace is held to."""

    default: Limit
    namespaces: Mapping[str, Limit]

    def of(self, namespace: str) -> Limit:
        """The limit of a namespace."""
        return self.namespaces.get(namespace, self.default)


def limits_of(settings: Mapping[str, Any]) -> NamespaceLimits:
    """Limits as they are written in settings.

    The members of a `Limit` stand at the top for everybody, and under ``namespaces`` by name for those who differ. A
    namespace takes over what it does not say; ``"none"`` lifts a limit, because TOML has no null.
    """
    named = settings.get("namespaces", {})
    if not isinstance(named, Mapping) or not all(isinstance(one, Mapping) for one in named.values()):
        raise InvalidValue("limits.namespaces holds a table for each namespace")
    general = {name: limit for name, limit in settings.items() if name != "namespaces"}
    return NamespaceLimits(
        _limit_of("limits", general),
        {
            check_namespace(name): _limit_of(f"limits.namespaces.{name}", {**general, **own})
            for name, own in named.items()
        },
    )


def _limit_of(path: str, members: Mapping[str, Any]) -> Limit:
    given = {name: None if limit == "none" else limit for name, limit in members.items()}
    for name, limit in given.items():
        if isinstance(limit, bool) or not isinstance(limit, int | float | None):
            raise InvalidValue(f"{path}.{name} is a number, or 'none'")
    try:
        limit = msgspec.convert(given, Limit)
    except msgspec.ValidationError:
        raise InvalidValue(f"{path} has of rate, burst, keys and bytes; the last two are whole numbers") from None
    if limit.rate is not None and not 0 < limit.rate < float("inf"):
        raise InvalidValue(f"{path}.rate is above zero")
    if limit.burst is not None and not 1 <= limit.burst < float("inf"):
        raise InvalidValue(f"{path}.burst is one or more")
    if min(limit.keys or 0, limit.bytes or 0) < 0:
        raise InvalidValue(f"{path} has no quota below zero")
    return limit


def gates_of(limits: NamespaceLimits, clock: Clock) -> tuple[Rates | None, Quotas | None]:
    """The gates that these limits need. The second must be an observer of the dispatcher, too."""
    every = (limits.default, *limits.namespaces.values())
    has_rates = any(one.rate is not None for one in every)
    has_quotas = any(one.keys is not None or one.bytes is not None for one in every)
    return Rates(limits, clock) if has_rates else None, Quotas(limits, clock) if has_quotas else None


class _Latest(Generic[V]):
    """What is known of the namespaces that were used last. The others begin anew."""

    def __init__(self, make: Callable[[str], V], count_max: int = NAMESPACES_MAX) -> None:
        self._make = make
        self._max = count_max
        self._held: OrderedDict[str, V] = OrderedDict()

    def of(self, namespace: str) -> V:
        """What is known of a namespace."""
        held = self._held.get(namespace)
        if held is None:
            held = self._held[namespace] = self._make(namespace)
            if len(self._held) > self._max:
                self._held.popitem(last=False)
        else:
            self._held.move_to_end(namespace)
        return held

    def __len__(self) -> int:
        return len(self._held)


# Rates ------------------------------------------------------------------------


class _Bucket:
    """What is left of a burst, and when that was reckoned."""

    def __init__(self, left: float, at: float) -> None:
        self.left, self.at = left, at


class Rates:
    """Holds namespaces to their rates. A gate of the dispatcher."""

    def __init__(self, limits: NamespaceLimits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._buckets = _Latest(lambda name: _Bucket(limits.of(name).room, clock.monotonic()))

    async def check(self, store: Store, operation: Operation, asked: Request) -> None:
        """Take from the bucket, or raise `RateLimited` with the time until there is enough."""
        limit = self._limits.of(store.name)
        if limit.rate is None:
            return
        bucket, now = self._buckets.of(store.name), self._clock.monotonic()
        bucket.left = min(limit.room, bucket.left + (now - bucket.at) * limit.rate)
        bucket.at = now
        # What is larger than any burst passes when everything is saved up: it would never pass otherwise.
        cost = min(limit.room, float(_writes(asked) or 1))
        if bucket.left < cost:
            raise RateLimited(
                f"namespace {store.name!r} may be asked {limit.rate:g} times a second",
                retry_after=(cost - bucket.left) / limit.rate,
            )
        bucket.left -= cost


# Quotas -----------------------------------------------------------------------


class Growth(NamedTuple):
    """By how much a request may make a namespace larger."""

    keys: int = 0
    size_bytes: int = 0

    def plus(self, other: Growth) -> Growth:
        """Both together."""
        return Growth(self.keys + other.keys, self.size_bytes + other.size_bytes)

    def minus(self, other: Growth) -> Growth:
        """What is left of it."""
        return Growth(self.keys - other.keys, self.size_bytes - other.size_bytes)


_NOTHING: Final = Growth()


class _Holding:
    """What a namespace holds, as far as is known here.

    Attributes:
        told: What the engine said when it was asked last.
        settled: What was written since.
        coming: What is under way.
    """

    def __init__(self) -> None:
        self.told = self.settled = self.coming = _NOTHING
        self.looked_at: float | None = None
        self.looking = asyncio.Lock()

    def reckoned(self) -> Growth:
        """What it may hold by now."""
        return self.told.plus(self.settled).plus(self.coming)


class Quotas:
    """Holds namespaces to their quotas. A check of the dispatcher, and an observer that counts finished requests."""

    def __init__(self, limits: NamespaceLimits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._holdings = _Latest(lambda _: _Holding())
        # By the identity of the request, which lives until the dispatcher has told us of it.
        self._under_way: dict[int, tuple[_Holding, Growth, float]] = {}

    async def check(self, store: Store, operation: Operation, asked: Request) -> None:
        """Let a request pass that fits or makes nothing larger, else raise `RateLimited`."""
        limit = self._limits.of(store.name)
        if limit.keys is None and limit.bytes is None:
            return
        additions = additions_of(asked, with_sizes=limit.bytes is not None)
        if not additions:
            return
        holding = self._holdings.of(store.name)
        if holding.looked_at is None or self._clock.monotonic() - holding.looked_at >= LOOK_S:
            await self._look(store, holding, holding.looked_at)
        growth = _largest(additions)
        if _beyond(limit, holding, growth):
            # So near the edge it matters what the keys hold already.
            growth = await _exact(store, additions)
            await self._check_exactly(store, limit, holding, growth)
        holding.coming = holding.coming.plus(growth)
        self._under_way[id(asked)] = (holding, growth, self._clock.monotonic())

    def done(self, call: Call) -> None:
        """Hear that a request is no longer under way."""
        found = self._under_way.pop(id(call.asked), None)
        if found is not None:
            holding, growth, _ = found
            holding.coming = holding.coming.minus(growth)
            if call.answer is not None:
                holding.settled = holding.settled.plus(growth)

    async def _check_exactly(self, store: Store, limit: Limit, holding: _Holding, growth: Growth) -> None:
        # What was written may be less than it might have been. Where nothing was, another look tells nothing new.
        if _beyond(limit, holding, growth) and holding.settled != _NOTHING:
            await self._look(store, holding, holding.looked_at)
        if beyond := _beyond(limit, holding, growth):
            raise RateLimited(f"namespace {store.name!r} is full: it may hold {beyond}", retry_after=QUOTA_RETRY_S)

    async def _look(self, store: Store, holding: _Holding, known_at: float | None) -> None:
        """Ask the engine, unless somebody did so while we waited."""
        async with holding.looking:
            if holding.looked_at != known_at:
                return
            now, before = self._clock.monotonic(), holding.settled
            status = await store.status()
            # What settled while the engine answered may be in the answer or not, and counts on.
            holding.told, holding.settled = Growth(status.keys, status.size_bytes), holding.settled.minus(before)
            holding.looked_at = now
            self._forget(now)

    def _forget(self, now: float) -> None:
        """Let go of what nobody told us the end of."""
        for asked, (holding, growth, since) in list(self._under_way.items()):
            if now - since > UNDER_WAY_S_MAX:
                holding.coming = holding.coming.minus(growth)
                del self._under_way[asked]


def _beyond(limit: Limit, holding: _Holding, growth: Growth) -> str:
    """Which quota would be passed, in words; empty when none. What does not grow passes none."""
    after = holding.reckoned().plus(growth)
    if limit.keys is not None and growth.keys > 0 and after.keys > limit.keys:
        return f"{limit.keys:,} keys"
    if limit.bytes is not None and growth.size_bytes > 0 and after.size_bytes > limit.bytes:
        return f"{limit.bytes:,} bytes"
    return ""


# What a request adds ----------------------------------------------------------


class Addition(NamedTuple):
    """What a request puts under a key: so many bytes, in place of everything or of certain fields."""

    size_bytes: int
    fields: Sequence[str] | None = None


_COUNTER: Final = Addition(20)


def additions_of(asked: Request, *, with_sizes: bool = True) -> dict[str, Addition]:
    """What a request puts under which keys. Empty for one that only reads, deletes or touches."""
    match asked:
        case requests.Set() | requests.Cas():
            return {asked.key: _content(asked.value, with_sizes)}
        case requests.Put():
            return {asked.key: _written(asked, with_sizes)}
        case requests.Incr():
            return {asked.key: _COUNTER}
        case requests.FieldsOf():
            fields = {} if isinstance(asked.set, UnsetType) else asked.set
            if not isinstance(asked.swap, UnsetType):
                fields = {asked.swap.field: asked.swap.new}
            return {asked.key: _fields(fields, with_sizes)} if fields else {}
        case requests.Batch():
            return {write.key: _written(write, with_sizes) for write in asked.writes if write.op in _ADDING}
        case requests.KvPut():
            return {asked.key: _content(asked.value, with_sizes)}
        case requests.KvBatch():
            return {
                item.key: _content(item.value, with_sizes)
                for item in asked.items
                if isinstance(item, requests.KvItemPut)
            }
        case requests.Primitive(what=Batch() as batch):
            return {
                write.key: _committed(write)
                for write in batch.writes
                if isinstance(write, Put | Add | Patch) and write.family == "data"
            }
        case _:
            return {}


def _committed(write: Put | Add | Patch) -> Addition:
    match write:
        case Put():
            return Addition(codec.size_bytes(write.stored))
        case Patch():
            return Addition(codec.size_bytes(write.fields), tuple(write.fields))
        case Add():
            return _COUNTER


def _writes(asked: Request) -> int:
    """How many writes a request is worth."""
    match asked:
        case requests.Batch():
            return len(asked.writes)
        case requests.KvBatch():
            return len(asked.items)
        case requests.Primitive(what=Batch() as batch):
            # What has expired is ended by whoever comes by, and is nobody's own doing.
            return sum(not isinstance(write, Expire) for write in batch.writes)
        case _:
            return 1


_ADDING: Final = frozenset({"put", "create", "add", "set"})


def _written(asked: requests.Put | requests.BatchWrite, with_sizes: bool) -> Addition:
    op = asked.op if isinstance(asked, requests.BatchWrite) else "put"
    if op == "add":
        return _COUNTER
    if not isinstance(asked.fields, UnsetType):
        addition = _fields(asked.fields, with_sizes)
        return addition if op == "set" else Addition(addition.size_bytes)
    if not isinstance(asked.bytes, UnsetType):
        return Addition(len(bytes_of(asked.bytes)) if with_sizes else 0)
    return _content(None if asked.value is UNSET else asked.value, with_sizes)


def _content(value: Any, with_sizes: bool) -> Addition:
    return Addition(codec.size_bytes(codec.encode(value)) if with_sizes else 0)


def _fields(fields: Mapping[str, Any], with_sizes: bool) -> Addition:
    encoded = codec.encode(codec.Fields({name: field_of(item) for name, item in fields.items()})) if with_sizes else {}
    return Addition(codec.size_bytes(encoded), tuple(fields))


def _largest(additions: Mapping[str, Addition]) -> Growth:
    """By how much the namespace grows if there is none of these keys."""
    return Growth(len(additions), sum(len(key.encode()) + one.size_bytes for key, one in additions.items()))


async def _exact(store: Store, additions: Mapping[str, Addition]) -> Growth:
    """By how much the namespace grows, with what there is. What gets smaller frees nothing until it is written."""
    growth = _NOTHING
    for key, addition in additions.items():
        entry = await store.entry(key)
        if entry is None:
            growth = growth.plus(_largest({key: addition}))
        elif addition.fields is None or not isinstance(entry.stored, Mapping):
            growth = growth.plus(Growth(0, addition.size_bytes - entry.size_bytes))
        else:
            replaced = {name: entry.stored[name] for name in addition.fields if name in entry.stored}
            growth = growth.plus(Growth(0, addition.size_bytes - codec.size_bytes(replaced)))
    return Growth(growth.keys, max(0, growth.size_bytes))
