"""Metrics of a store for Prometheus: how many operations it ran, how they ended, and how long they took.

A namespace has its own label with its first operation that succeeds, up to `NAMESPACES_MAX`; the others share
``other``. So names from outside cannot fill the memory of Prometheus, or of this process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

from limpet.observed import Operation

__all__ = ["BUCKETS_S", "NAMESPACES_MAX", "OTHER", "NamespaceLabels", "PrometheusObserver"]

BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
NAMESPACES_MAX: Final = 100
OTHER: Final = "other"


class NamespaceLabels:
    """The labels of namespaces: their names for the first so many, and one label for the others."""

    def __init__(self, namespaces_max: int) -> None:
        self._namespaces_max = namespaces_max
        self._named: set[str] = set()

    def label(self, namespace: str, *, is_known: bool = False) -> str:
        """The label of a namespace; ``is_known`` if something shows that it was not made up."""
        if namespace in self._named:
            return namespace
        if is_known and namespace != OTHER and len(self._named) < self._namespaces_max:
            self._named.add(namespace)
            return namespace
        return OTHER


class PrometheusObserver:
    """Counts the operations of stores. One observer serves any number of them.

    Args:
        registry: Where the metrics are registered; that of the process when not given.
        buckets: The upper bounds of the durations, in seconds.
        namespaces_max: How many namespaces have a label of their own.
    """

    def __init__(
        self,
        registry: CollectorRegistry = REGISTRY,
        *,
        buckets: Sequence[float] = BUCKETS_S,
        namespaces_max: int = NAMESPACES_MAX,
    ) -> None:
        self._labels = NamespaceLabels(namespaces_max)
        self._operations = Counter(
            "limpet_store_operations",
            "Operations of stores, by how they ended.",
            ("operation", "namespace", "outcome"),
            registry=registry,
        )
        self._seconds = Histogram(
            "limpet_store_operation_duration_seconds",
            "How long operations of stores took.",
            ("operation",),
            registry=registry,
            buckets=buckets,
        )

    def __call__(self, operation: Operation) -> None:
        """Count an operation."""
        namespace = self._labels.label(operation.namespace, is_known=operation.outcome == "ok")
        self._operations.labels(operation.name, namespace, operation.outcome).inc()
        self._seconds.labels(operation.name).observe(operation.seconds)
