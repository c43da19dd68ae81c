"""OpenTelemetry of a store: a span for each operation, and how long operations took.

Names are those of OpenTelemetry's conventions for databases. Spans have the operation, the namespace and the outcome,
and neither keys nor values.
"""

from __future__ import annotations

import time
from typing import Final

from opentelemetry import metrics, trace

from limpet.observed import Operation
from limpet.protocol.codes import CODES

__all__ = ["OpenTelemetryObserver"]

BUCKETS_S: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0)

# A refusal, such as a conflict, is an answer of a store that works.
_FAILURES: Final = frozenset({"error", *(kind.code for kind, code in CODES.items() if code.status >= 500)})


class OpenTelemetryObserver:
    """Makes a span of each operation, under the span that is current where the store was called.

    Args:
        tracer: Makes the spans; that of the program's provider when not given.
        meter: Measures the durations, as ``db.client.operation.duration``; likewise.
    """

    def __init__(self, tracer: trace.Tracer | None = None, meter: metrics.Meter | None = None) -> None:
        self._tracer = tracer or trace.get_tracer("limpet")
        self._seconds = (meter or metrics.get_meter("limpet")).create_histogram(
            "db.client.operation.duration",
            unit="s",
            description="Duration of database client operations.",
            explicit_bucket_boundaries_advisory=BUCKETS_S,
        )

    def __call__(self, operation: Operation) -> None:
        """Make the span of an operation that has ended."""
        attributes = {
            "db.system.name": "limpet",
            "db.operation.name": operation.name,
            "db.namespace": operation.namespace,
        }
        if operation.outcome != "ok":
            attributes["error.type"] = operation.outcome
        ended_ns = time.time_ns()
        span = self._tracer.start_span(
            f"limpet {operation.name}",
            kind=trace.SpanKind.CLIENT,
            attributes=attributes,
            start_time=ended_ns - round(operation.seconds * 1e9),
        )
        if operation.outcome in _FAILURES:
            span.set_status(trace.StatusCode.ERROR, operation.outcome)
        span.end(ended_ns)
        self._seconds.record(operation.seconds, attributes)
