"""Metrics: what the server counts, for Prometheus.

Operations, errors, conflicts, latencies and expiries are counted as they happen. Keys, bytes and locks are read from
the engine when the metrics are scraped, at most once in a few seconds.

A namespace gets its own label with the first request that succeeds, up to `NAMESPACES_MAX`; the others share ``other``.
So no caller can fill the memory of Prometheus, or of this server, with made-up names.

The names are ``limpet_*``. ``names="rosey"`` has the ``rosey_kv_*`` of earlier dashboards instead, ``"both"`` has both,
from the same counts.
"""

from __future__ import annotations

import asyncio
import logging
import platform
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, get_args

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from limpet import __version__
from limpet.clock import Clock
from limpet.errors import Conflict, LimpetError
from limpet.keys import Span
from limpet.observers.prometheus import BUCKETS_S, NAMESPACES_MAX, OTHER, NamespaceLabels
from limpet.retry import reason_of
from limpet.semantic.model import Purpose
from limpet.semantic.store import Observation
from limpet.server.dispatch import OWN_NAMESPACE, Call
from limpet.server.operations import OPERATIONS
from limpet.server.outcome import error_code, reply_code
from limpet.session import Session
from limpet.sweep import Round

__all__ = ["CONTENT_TYPE", "Metrics"]

log = logging.getLogger("limpet.server")

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

READ_INTERVAL_S: Final = 5.0
READ_S_MAX: Final = 3.0
READS_MAX: Final = 500
LOCKS_MAX: Final = 1000
Names = Literal["limpet", "rosey", "both"]

_PURPOSES: Final = frozenset(get_args(Purpose))


class _Histogram:
    """Counts of durations, by bucket."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.sum_s += seconds

    def merge(self, other: _Histogram) -> None:
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.sum_s += other.sum_s

    def buckets(self) -> list[tuple[str, float]]:
        """As Prometheus counts: each bucket holds those before it too."""
        total, found = 0, []
        for bound, count in zip((*BUCKETS_S, "+Inf"), self.counts, strict=True):
            total += count
            found.append((str(bound), float(total)))
        return found


class _Usage(NamedTuple):
    """What a namespace held when its status was last read."""

    keys: int
    size_bytes: int
    locks: int
    at: float


class Metrics:
    """Counts for one server. Observes the dispatcher, semantic writes (`observe`) and the sweeper (`swept`)."""

    def __init__(self, session: Session, *, names: Names = "limpet", namespaces_max: int = NAMESPACES_MAX) -> None:
        self._session = session
        self._clock: Clock = session.clock
        self._names = names
        self._label = NamespaceLabels(namespaces_max).label
        self._operations: Counter[tuple[str, str, str]] = Counter()
        self._errors: Counter[tuple[str, str]] = Counter()
        self._replies: Counter[tuple[str, str]] = Counter()
        self._conflicts: Counter[str] = Counter()
        self._semantic: Counter[tuple[str, str, str]] = Counter()
        self._latency: defaultdict[tuple[str, str], _Histogram] = defaultdict(_Histogram)
        self._expired: Counter[str] = Counter()
        self._rounds = _Histogram()
        self._round_s = 0.0
        self._failed_rounds = 0
        self._usage: dict[str, _Usage] = {}
        self._read_at: float | None = None
        self._reading = asyncio.Lock()
        self._is_up = True
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    # Counted as it happens -----------------------------------------------------

    def done(self, call: Call) -> None:
        """Count a request."""
        namespace = self._label(call.namespace, is_known=call.answer is not None)
        operation = call.operation if call.operation in OPERATIONS else OTHER
        self._operations[call.face, namespace, operation] += 1
        error = call.error
        if call.request is not None:
            self._latency[operation, namespace].add(call.seconds)
        if error is not None:
            self._errors[namespace, error_code(error)] += 1
            self._replies[namespace, reply_code(error)] += 1
        if isinstance(error, Conflict) or (call.answer is not None and call.answer.get("swapped") is False):
            self._conflicts[namespace] += 1

    def observe(self, observation: Observation) -> None:
        """Count a semantic write, or its conflict."""
        namespace = self._label(observation.namespace, is_known=observation.outcome != "conflict")
        # An entry that was put by other verbs, and ends by these, may have any purpose.
        purpose = observation.purpose if observation.purpose in _PURPOSES else OTHER
        self._semantic[namespace, purpose, observation.outcome] += 1

    def swept(self, done: Round) -> None:
        """Count a round of the sweeper."""
        for namespace, count in done.ended.items():
            self._expired[self._label(namespace)] += count
        self._rounds.add(done.seconds)
        self._round_s = done.seconds
        self._failed_rounds += bool(done.failed)

    # Read when metrics are scraped ---------------------------------------------

    async def render(self) -> bytes:
        """Everything as Prometheus reads it."""
        async with self._reading:
            now = self._clock.monotonic()
            if self._read_at is None or now - self._read_at >= READ_INTERVAL_S:
                self._read_at = now
                await self._read_usage(now)
        return generate_latest(self.registry)

    async def _read_usage(self, now: float) -> None:
        """Read what the namespaces hold, the one that was read longest ago first, and `READS_MAX` at most."""
        served = [name for name in self._session.sweeper.namespaces if name != OWN_NAMESPACE]
        self._usage = {name: self._usage[name] for name in served if name in self._usage}
        served.sort(key=lambda name: self._usage[name].at if name in self._usage else float("-inf"))
        self._is_up = False
        try:
            async with asyncio.timeout(READ_S_MAX):
                await self._session.engine.status(OWN_NAMESPACE)
                self._is_up = True
                for name in served[:READS_MAX]:
                    usage = self._usage[name] = await self._read_one(name, now)
                    # A namespace that holds keys was not made up, so it has its label after a restart too.
                    self._label(name, is_known=usage.keys > 0)
        except LimpetError as error:
            log.debug("metrics show earlier numbers of keys and bytes: %s", reason_of(error))
        except TimeoutError:
            log.debug("metrics show earlier numbers of keys and bytes: the engine takes too long")

    async def _read_one(self, namespace: str, now: float) -> _Usage:
        engine = self._session.engine
        status = await engine.status(namespace)
        locks = await engine.scan(namespace, Span("", None), family="lock", values=False, limit=LOCKS_MAX)
        return _Usage(status.keys, status.size_bytes, len(locks.entries), now)

    # Collected for Prometheus --------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """The metrics, for the registry."""
        if self._names != "rosey":
            yield from self._collect_limpet()
        if self._names != "limpet":
            yield from self._collect_rosey()

    def _collect_limpet(self) -> Iterator[Metric]:
        build = {"version": __version__, "engine": self._session.engine.traits.engine}
        build["python"] = platform.python_version()
        yield _gauge("limpet_build_info", "What runs here.", tuple(build), {tuple(build.values()): 1})
        yield _gauge("limpet_engine_up", "Whether the engine answered the last time.", (), {(): self._is_up})
        labels = ("face", "namespace", "operation")
        yield _counter("limpet_operations", "Requests, whatever came of them.", labels, self._operations)
        yield _counter("limpet_errors", "Requests that were not granted.", ("namespace", "code"), self._errors)
        yield _counter("limpet_conflicts", "Writes that found another state.", ("namespace",), _each(self._conflicts))
        labels = ("namespace", "purpose", "outcome")
        yield _counter("limpet_semantic_writes", "Writes of semantic entries.", labels, self._semantic)
        yield _histogram(
            "limpet_operation_duration_seconds", "How long requests took.", ("operation",), self._latency_by_operation()
        )
        yield _counter("limpet_expired", "Entries that the sweeper ended.", ("namespace",), _each(self._expired))
        yield _histogram(
            "limpet_sweep_duration_seconds", "How long rounds of the sweeper took.", (), {(): self._rounds}
        )
        yield _counter("limpet_sweep_failures", "Rounds of the sweeper that failed.", (), {(): self._failed_rounds})
        watched = self._watched()
        counts, lags = ({name: function(lag) for name, lag in watched.items()} for function in (len, max))
        yield _gauge("limpet_watches", "Watches that are open.", ("namespace",), _each(counts))
        yield _gauge("limpet_watch_lag_revisions", "How far behind the slowest watch is.", ("namespace",), _each(lags))
        yield _gauge("limpet_locks", "Locks that are held.", ("namespace",), self._sums("locks"))
        yield _gauge("limpet_keys", "Keys that are stored.", ("namespace",), self._sums("keys"))
        yield _gauge("limpet_storage_bytes", "Bytes of keys and values.", ("namespace",), self._sums("size_bytes"))

    def _collect_rosey(self) -> Iterator[Metric]:
        for operation in ("set", "get", "delete", "list"):
            by_plugin: Counter[tuple[str, ...]] = Counter()
            for (_, namespace, name), count in self._operations.items():
                if name == operation:
                    by_plugin[namespace,] += count
            yield _counter(f"rosey_kv_{operation}", f"Total {operation} operations.", ("plugin",), by_plugin)
        for operation in ("set", "get"):
            found: dict[tuple[str, ...], _Histogram] = {
                (plugin,): taken for (name, plugin), taken in self._latency.items() if name == operation
            }
            yield _histogram(f"rosey_kv_{operation}_duration_seconds", f"{operation} latency.", ("plugin",), found)
        yield _counter("rosey_kv_errors", "Errors by type.", ("plugin", "error_code"), self._replies)
        yield _gauge("rosey_kv_keys_total", "Total keys per plugin.", ("plugin",), self._sums("keys"))
        yield _gauge("rosey_kv_storage_bytes", "Storage used per plugin.", ("plugin",), self._sums("size_bytes"))
        yield _gauge("rosey_kv_cleanup_duration_seconds", "Cleanup task duration.", (), {(): self._round_s})
        removed = sum(self._expired.values())
        yield _counter("rosey_kv_cleanup_deleted", "Keys deleted by cleanup.", (), {(): removed})

    def _latency_by_operation(self) -> dict[tuple[str, ...], _Histogram]:
        found: defaultdict[tuple[str, ...], _Histogram] = defaultdict(_Histogram)
        for (operation, _), taken in self._latency.items():
            found[operation,].merge(taken)
        return found

    def _watched(self) -> dict[str, list[int]]:
        found: defaultdict[str, list[int]] = defaultdict(list)
        for namespace, lags in self._session.watch_lags().items():
            if namespace != OWN_NAMESPACE:
                found[self._label(namespace)] += lags
        return found

    def _sums(self, member: str) -> dict[tuple[str, ...], int]:
        found: Counter[tuple[str, ...]] = Counter()
        for namespace, usage in self._usage.items():
            found[self._label(namespace),] += getattr(usage, member)
        return found


def _each(counts: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    return {(name,): count for name, count in counts.items()}


Samples = Mapping[Any, float]


def _counter(name: str, text: str, labels: Sequence[str], samples: Samples) -> Metric:
    return _fill(CounterMetricFamily(name, text, labels=labels), samples.items())


def _gauge(name: str, text: str, labels: Sequence[str], samples: Samples) -> Metric:
    return _fill(GaugeMetricFamily(name, text, labels=labels), samples.items())


def _fill(family: Any, samples: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    for labels, number in samples:
        family.add_metric(labels, number)
    found: Metric = family
    return found


def _histogram(
    name: str, text: str, labels: Sequence[str], samples: Mapping[tuple[str, ...], _Histogram]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, taken in samples.items():
        family.add_metric(values, taken.buckets(), taken.sum_s)
    return family
