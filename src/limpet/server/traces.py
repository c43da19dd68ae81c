"""Traces: a span of OpenTelemetry for every request, for programs that embed a server and trace it.

Limpet does not depend on OpenTelemetry. A program that has it hands over a tracer, ``opentelemetry.trace.get_tracer``
of any name, and puts this among the observers of the dispatcher. Spans have the operation, the namespace
and the outcome, and neither keys nor values: traces go to other systems than logs do, and stay longer.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from typing import Any, Protocol

from limpet.server.dispatch import Call
from limpet.server.operations import OPERATIONS
from limpet.server.outcome import error_code, status_of

__all__ = ["Span", "Tracer", "Traces"]


class Span(Protocol):
    """The part of an OpenTelemetry span that is used here."""

    def set_status(self, status: Any, description: str | None = None) -> None:
        """Set how it ended."""
        ...

    def end(self, end_time: int | None = None) -> None:
        """End it, at this time in nanoseconds."""
        ...


class Tracer(Protocol):
    """The part of an OpenTelemetry tracer that is used here."""

    def start_span(
        self, name: str, *, attributes: Mapping[str, str] | None = None, start_time: int | None = None
    ) -> Span:
        """Begin a span, under the one that is current where it is called."""
        ...


class Traces:
    """Makes a span of every request. An observer of the dispatcher."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._error = _error_status()

    def done(self, call: Call) -> None:
        """Make the span of a request that is over."""
        operation = call.operation if call.operation in OPERATIONS else "other"
        attributes = {
            "db.system.name": "limpet",
            "db.operation.name": operation,
            "db.namespace": call.namespace,
            "limpet.face": call.face,
            "limpet.caller": call.caller,
        }
        code = None if call.error is None else error_code(call.error)
        if code is not None:
            attributes["error.type"] = code
        now_ns = time.time_ns()
        began_ns = now_ns - round(call.seconds * 1e9)
        span = self._tracer.start_span(f"limpet {operation}", attributes=attributes, start_time=began_ns)
        # A mistake of a caller is no failure of the server that is traced.
        if call.error is not None and self._error is not None and status_of(call.error) >= 500:
            span.set_status(self._error, code)
        span.end(now_ns)


def _error_status() -> Any:
    """OpenTelemetry's status for a failure; None where it is not installed, and the tracer is of another library."""
    try:
        return importlib.import_module("opentelemetry.trace").StatusCode.ERROR
    except ModuleNotFoundError:
        return None
