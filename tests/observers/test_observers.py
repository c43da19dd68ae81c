"""The observers for monitoring systems, each on the system's own library: what a store did is read back from there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

import limpet
import limpet.sync
from limpet.errors import Conflict
from limpet.observers.opentelemetry import OpenTelemetryObserver
from limpet.observers.prometheus import OTHER, PrometheusObserver

# Prometheus ---------------------------------------------------------------------


def count(registry: CollectorRegistry, operation: str, outcome: str, namespace: str = "default") -> float | None:
    labels = {"operation": operation, "namespace": namespace, "outcome": outcome}
    return registry.get_sample_value("limpet_store_operations_total", labels)


def use(observer: limpet.Observer) -> None:
    with limpet.sync.open("memory:", observer=observer) as store:
        store.put("a", 1)
        store.put("a", 2)
        with pytest.raises(Conflict):
            store.create("a", 3)
        with pytest.raises(ZeroDivisionError):
            store.update("a", lambda found: found / 0)


def test_prometheus_counts_operations_by_their_outcomes() -> None:
    registry = CollectorRegistry()

    use(PrometheusObserver(registry))

    assert count(registry, "put", "ok") == 2
    assert count(registry, "create", "conflict") == 1
    assert count(registry, "update", "error") == 1
    assert count(registry, "get", "ok") is None
    seconds = registry.get_sample_value("limpet_store_operation_duration_seconds_count", {"operation": "put"})
    assert seconds == 2


def test_one_prometheus_observer_serves_several_stores() -> None:
    registry = CollectorRegistry()
    observer = PrometheusObserver(registry)

    use(observer)
    use(observer)

    assert count(registry, "put", "ok") == 4


def test_namespaces_from_outside_cannot_fill_prometheus() -> None:
    registry = CollectorRegistry()
    with limpet.sync.open("memory:", observer=PrometheusObserver(registry, namespaces_max=2)) as store:
        for name in ("a", "b", "c"):
            store.namespace(name).put("k", 1)
        with pytest.raises(Conflict):
            store.namespace("never-written").put("k", 1, expect=limpet.PRESENT)

    assert [count(registry, "put", "ok", name) for name in ("a", "b", "c", OTHER)] == [1, 1, None, 1]
    assert count(registry, "put", "conflict", OTHER) == 1


# OpenTelemetry ------------------------------------------------------------------


class Telemetry:
    """A program's OpenTelemetry, kept in memory."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = provider.get_tracer("test")
        self.reader = InMemoryMetricReader()
        self.observer = OpenTelemetryObserver(self.tracer, MeterProvider([self.reader]).get_meter("test"))

    def spans(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())

    def points(self) -> list[Any]:
        data = self.reader.get_metrics_data()
        assert data is not None
        ((metric,),) = [scope.metrics for resource in data.resource_metrics for scope in resource.scope_metrics]
        assert (metric.name, metric.unit) == ("db.client.operation.duration", "s")
        return list(metric.data.data_points)


def test_opentelemetry_has_a_span_of_each_operation() -> None:
    telemetry = Telemetry()

    use(telemetry.observer)

    spans = telemetry.spans()
    assert [span.name for span in spans] == ["limpet put", "limpet put", "limpet create", "limpet update"]
    put, _, create, update = spans
    assert put.attributes == {
        "db.system.name": "limpet",
        "db.operation.name": "put",
        "db.namespace": "default",
    }
    assert create.attributes is not None
    assert create.attributes["error.type"] == "conflict"
    # A refusal is the answer of a store that works.
    assert [span.status.is_ok for span in (put, create, update)] == [True, True, False]
    assert all(span.start_time and span.end_time and span.start_time < span.end_time for span in spans)


def test_opentelemetry_measures_durations() -> None:
    telemetry = Telemetry()

    use(telemetry.observer)

    counts = {(p.attributes["db.operation.name"], p.attributes.get("error.type")): p.count for p in telemetry.points()}
    assert counts == {("put", None): 2, ("create", "conflict"): 1, ("update", "error"): 1}


async def test_a_span_is_below_the_one_of_the_caller() -> None:
    """Each task has a current span of its own."""
    telemetry = Telemetry()

    async def work(store: limpet.Store, name: str) -> None:
        with telemetry.tracer.start_as_current_span(name):
            await asyncio.sleep(0)
            await store.put(name, 1)

    async with limpet.open("memory:", observer=telemetry.observer) as store:
        await asyncio.gather(work(store, "one"), work(store, "other"))

    names = {span.context.span_id: span.name for span in telemetry.spans()}
    parents = [names[span.parent.span_id] for span in telemetry.spans() if span.parent]
    assert sorted(parents) == ["one", "other"]


def test_a_blocking_caller_has_its_span_too_where_another_thread_does_the_work() -> None:
    telemetry = Telemetry()

    store = limpet.sync.open("memory:", observer=telemetry.observer)
    with store, telemetry.tracer.start_as_current_span("mine"), store.lock("l", ttl=30):
        pass

    *inner, mine = telemetry.spans()
    assert [span.name for span in inner] == ["limpet lock.acquire", "limpet lock.release"]
    assert {span.parent.span_id for span in inner if span.parent} == {mine.context.span_id}
    assert trace.get_current_span() is trace.INVALID_SPAN
