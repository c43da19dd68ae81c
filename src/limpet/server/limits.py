"""Limits: how fast a namespace may be used, and how much it may hold.

Rates are token buckets: a number of requests a second, and a burst that is saved up in quiet times. A batch counts as
its writes. Quotas limit the keys and the bytes of a namespace. Reads, deletes, and writes that make nothing larger
always pass, so that a caller that has reached a quota can read and free space.

The size of a namespace is read from the engine at most once a second, and estimated in between from the requests that
passed: running requests count in full. So a burst exceeds a quota at most by what other servers let in within that
second.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec

from limpet import codec
from limpet.clock import Clock
from limpet.errors import InvalidValue, RateLimited
from limpet.keys import check_namespace
from limpet.model import Batch, Expire
from limpet.server import requests
from limpet.server.additions import Addition, additions_of
from limpet.server.dispatch import Call
from limpet.server.operations import Operation
from limpet.server.requests import Request
from limpet.store import Store

__all__ = ["Limit", "NamespaceLimits", "Quotas", "Rates", "checks_of", "limits_of"]

NAMESPACES_MAX: Final = 10_000
REFRESH_S: Final = 1.0
RUNNING_S_MAX: Final = 60.0
QUOTA_RETRY_S: Final = 10.0

V = TypeVar("V")


# What is allowed --------------------------------------------------------------


class Limit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits of a namespace. None is no limit.

    Attributes:
        rate: Requests a second.
        burst: How many requests may come at once after a pause. The default is the rate, and at least one.
        keys: How many keys it may hold.
        bytes: How many bytes its keys and values may have together.
    """

    rate: float | None = None
    burst: float | None = None
    keys: int | None = None
    bytes: int | None = None

    @property
    def burst_max(self) -> float:
        """How many requests may come at once."""
        return max(1.0, self.rate or 0.0) if self.burst is None else self.burst


class NamespaceLimits(NamedTuple):
    """The limits of each namespace."""

    default: Limit
    namespaces: Mapping[str, Limit]

    def of(self, namespace: str) -> Limit:
        """The limit of a namespace."""
        return self.namespaces.get(namespace, self.default)


def limits_of(settings: Mapping[str, Any]) -> NamespaceLimits:
    """Read the limits from the settings.

    The members of a `Limit` at the top are for all namespaces; those under ``namespaces``, by name, are for one. A
    namespace inherits what it does not set; ``"none"`` removes a limit, because TOML has no null.
    """
    by_name = settings.get("namespaces", {})
    if not isinstance(by_name, Mapping) or not all(isinstance(one, Mapping) for one in by_name.values()):
        raise InvalidValue("limits.namespaces holds a table for each namespace")
    general = {name: limit for name, limit in settings.items() if name != "namespaces"}
    return NamespaceLimits(
        _limit_of("limits", general),
        {
            check_namespace(name): _limit_of(f"limits.namespaces.{name}", {**general, **own})
            for name, own in by_name.items()
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
        raise InvalidValue(f"{path} may have rate, burst, keys and bytes; the last two are whole numbers") from None
    if limit.rate is not None and not 0 < limit.rate < float("inf"):
        raise InvalidValue(f"{path}.rate is a number above zero")
    if limit.burst is not None and not 1 <= limit.burst < float("inf"):
        raise InvalidValue(f"{path}.burst is one or more")
    if min(limit.keys or 0, limit.bytes or 0) < 0:
        raise InvalidValue(f"{path}.keys and {path}.bytes are zero or more")
    return limit


def checks_of(limits: NamespaceLimits, clock: Clock) -> tuple[Rates | None, Quotas | None]:
    """The checks that these limits need. The second must be an observer of the dispatcher, too."""
    every = (limits.default, *limits.namespaces.values())
    has_rates = any(one.rate is not None for one in every)
    has_quotas = any(one.keys is not None or one.bytes is not None for one in every)
    return Rates(limits, clock) if has_rates else None, Quotas(limits, clock) if has_quotas else None


class _RecentNamespaces(Generic[V]):
    """One item for each of the namespaces that were used last. An item that was dropped is made anew."""

    def __init__(self, make: Callable[[str], V], count_max: int = NAMESPACES_MAX) -> None:
        self._make = make
        self._max = count_max
        self._items: OrderedDict[str, V] = OrderedDict()

    def of(self, namespace: str) -> V:
        """The item of a namespace."""
        item = self._items.get(namespace)
        if item is None:
            item = self._items[namespace] = self._make(namespace)
            if len(self._items) > self._max:
                self._items.popitem(last=False)
        else:
            self._items.move_to_end(namespace)
        return item

    def __len__(self) -> int:
        return len(self._items)


# Rates ------------------------------------------------------------------------


class _Bucket:
    """How much is left of a burst, and when that was computed."""

    def __init__(self, left: float, at: float) -> None:
        self.left, self.at = left, at


class Rates:
    """Enforces the rates of namespaces. A check of the dispatcher."""

    def __init__(self, limits: NamespaceLimits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._buckets = _RecentNamespaces(lambda name: _Bucket(limits.of(name).burst_max, clock.monotonic()))

    async def check(self, store: Store, operation: Operation, request: Request) -> None:
        """Take from the bucket, or raise `RateLimited` with the time until it holds enough."""
        limit = self._limits.of(store.name)
        if limit.rate is None:
            return
        bucket, now = self._buckets.of(store.name), self._clock.monotonic()
        bucket.left = min(limit.burst_max, bucket.left + (now - bucket.at) * limit.rate)
        bucket.at = now
        # A batch larger than the burst passes with a full bucket, or it would never pass.
        cost = min(limit.burst_max, float(_count_writes(request) or 1))
        if bucket.left < cost:
            raise RateLimited(
                f"namespace {store.name!r} takes {limit.rate:g} requests a second; try again later",
                retry_after=(cost - bucket.left) / limit.rate,
            )
        bucket.left -= cost


# Quotas -----------------------------------------------------------------------


class Growth(NamedTuple):
    """A number of keys and bytes by which a namespace grows."""

    keys: int = 0
    size_bytes: int = 0

    def plus(self, other: Growth) -> Growth:
        """The sum of both."""
        return Growth(self.keys + other.keys, self.size_bytes + other.size_bytes)

    def minus(self, other: Growth) -> Growth:
        """The difference of both."""
        return Growth(self.keys - other.keys, self.size_bytes - other.size_bytes)


_NOTHING: Final = Growth()


class _Usage:
    """The size of a namespace, as far as this server knows.

    Attributes:
        measured: The size at the last status of the engine.
        written: What was written since.
        pending: What running requests may write.
        measured_at: When the engine was read last.
    """

    def __init__(self) -> None:
        self.measured = self.written = self.pending = _NOTHING
        self.measured_at: float | None = None
        self.refreshing = asyncio.Lock()

    def estimate(self) -> Growth:
        """The size that it may have by now."""
        return self.measured.plus(self.written).plus(self.pending)


class Quotas:
    """Enforces the quotas of namespaces. A check of the dispatcher, and an observer that counts finished requests."""

    def __init__(self, limits: NamespaceLimits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._usages = _RecentNamespaces(lambda _: _Usage())
        # By the identity of the request, which lives until the dispatcher has called `done`.
        self._running: dict[int, tuple[_Usage, Growth, float]] = {}

    async def check(self, store: Store, operation: Operation, request: Request) -> None:
        """Raise `RateLimited` for a request that makes the namespace larger than its quota."""
        limit = self._limits.of(store.name)
        if limit.keys is None and limit.bytes is None:
            return
        additions = additions_of(request, with_sizes=limit.bytes is not None)
        if not additions:
            return
        usage = self._usages.of(store.name)
        if usage.measured_at is None or self._clock.monotonic() - usage.measured_at >= REFRESH_S:
            await self._refresh(store, usage, usage.measured_at)
        growth = _growth_max(additions)
        if _exceeded_quota(limit, usage, growth):
            # So near the quota, subtract the size of the entries that are replaced.
            growth = await _exact_growth(store, additions)
            await self._check_exactly(store, limit, usage, growth)
        usage.pending = usage.pending.plus(growth)
        self._running[id(request)] = (usage, growth, self._clock.monotonic())

    def done(self, call: Call) -> None:
        """Count a finished request: as written if it succeeded, else not at all."""
        found = self._running.pop(id(call.request), None)
        if found is not None:
            usage, growth, _ = found
            usage.pending = usage.pending.minus(growth)
            if call.answer is not None:
                usage.written = usage.written.plus(growth)

    async def _check_exactly(self, store: Store, limit: Limit, usage: _Usage, growth: Growth) -> None:
        # Less may have been written than was counted. If nothing was written, a refresh would change nothing.
        if _exceeded_quota(limit, usage, growth) and usage.written != _NOTHING:
            await self._refresh(store, usage, usage.measured_at)
        if quota := _exceeded_quota(limit, usage, growth):
            raise RateLimited(f"namespace {store.name!r} is full: it may hold {quota}", retry_after=QUOTA_RETRY_S)

    async def _refresh(self, store: Store, usage: _Usage, known_at: float | None) -> None:
        """Read the size from the engine, unless another request did so while this one waited."""
        async with usage.refreshing:
            if usage.measured_at != known_at:
                return
            now, before = self._clock.monotonic(), usage.written
            status = await store.status()
            # Writes that finished during this read may be in its result or not, so they stay counted.
            usage.measured, usage.written = Growth(status.keys, status.size_bytes), usage.written.minus(before)
            usage.measured_at = now
            self._forget_lost(now)

    def _forget_lost(self, now: float) -> None:
        """Drop requests whose end was not reported within a minute."""
        for request_id, (usage, growth, since) in list(self._running.items()):
            if now - since > RUNNING_S_MAX:
                usage.pending = usage.pending.minus(growth)
                del self._running[request_id]


def _exceeded_quota(limit: Limit, usage: _Usage, growth: Growth) -> str:
    """The quota that would be exceeded, in words; empty when none. What does not grow exceeds none."""
    after = usage.estimate().plus(growth)
    if limit.keys is not None and growth.keys > 0 and after.keys > limit.keys:
        return f"{limit.keys:,} keys"
    if limit.bytes is not None and growth.size_bytes > 0 and after.size_bytes > limit.bytes:
        return f"{limit.bytes:,} bytes"
    return ""


def _count_writes(request: Request) -> int:
    """How many writes a request counts as."""
    match request:
        case requests.Batch():
            return len(request.writes)
        case requests.KvBatch():
            return len(request.items)
        case requests.Primitive(what=Batch() as batch):
            # Any caller may remove expired entries, so they are not counted as its own writes.
            return sum(not isinstance(write, Expire) for write in batch.writes)
        case _:
            return 1


def _growth_max(additions: Mapping[str, Addition]) -> Growth:
    """By how much the namespace grows if none of these keys exists."""
    return Growth(len(additions), sum(len(key.encode()) + one.size_bytes for key, one in additions.items()))


async def _exact_growth(store: Store, additions: Mapping[str, Addition]) -> Growth:
    """By how much the namespace grows, by its entries. A write that makes it smaller counts only once it is done."""
    growth = _NOTHING
    for key, addition in additions.items():
        entry = await store.entry(key)
        if entry is None:
            growth = growth.plus(_growth_max({key: addition}))
        elif addition.fields is None or not isinstance(entry.stored, Mapping):
            growth = growth.plus(Growth(0, addition.size_bytes - entry.size_bytes))
        else:
            replaced = {name: entry.stored[name] for name in addition.fields if name in entry.stored}
            growth = growth.plus(Growth(0, addition.size_bytes - codec.size_bytes(replaced)))
    return Growth(growth.keys, max(0, growth.size_bytes))
