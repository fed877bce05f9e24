"""Traces and metrics through OpenTelemetry, set up only where OTEL_EXPORTER_OTLP_ENDPOINT is.

Without it nothing of OpenTelemetry is imported and every call here is one comparison with None.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.metrics import CallbackOptions, Counter, Histogram, Meter, Observation
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

TRACEPARENT: Final = "traceparent"
AGENT_SPAN_KEY: Final = "orchard-agent-span-bin"
"""Trailing metadata in which an agent, which may have no network, hands its span to the gateway."""


class Telemetry:
    """The tracer and the meter of one service."""

    def __init__(self, tracer_provider: TracerProvider, meter_provider: MeterProvider, service: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracers = tracer_provider
        self._meters = meter_provider
        self._propagator = TraceContextTextMapPropagator()
        self.tracer: Tracer = tracer_provider.get_tracer(service)
        self.meter: Meter = meter_provider.get_meter(service)
        self.calls: Counter = self.meter.create_counter(
            "orchard.calls", description="Calls served, by method and status."
        )
        self.latency: Histogram = self.meter.create_histogram(
            "orchard.call.duration", unit="ms", description="Duration of calls, by method."
        )

    @classmethod
    def from_environment(cls, service: str) -> Telemetry | None:
        """Telemetry to the OTLP endpoint of the environment, or None without one."""
        if not os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
            return None
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": f"orchard-{service}"})
        tracers = TracerProvider(resource=resource)
        tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        meters = MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())], resource=resource)
        return cls(tracers, meters, service)

    def start_span(self, name: str, metadata: Iterable[tuple[str, Any]], *, server: bool = True) -> Span:
        """A span below the caller's, which `metadata` names in its traceparent."""
        from opentelemetry.trace import SpanKind

        kind = SpanKind.SERVER if server else SpanKind.CLIENT
        return self.tracer.start_span(name, context=self._context(metadata), kind=kind)

    def traceparent(self, span: Span) -> str:
        """The W3C traceparent that makes the next service's span a child of `span`."""
        context = span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    def record_agent_span(self, payload: bytes, parent: Span) -> None:
        """Export the span that an agent measured, as a child of `parent`."""
        from opentelemetry import trace

        try:
            measured = json.loads(payload)
            span = self.tracer.start_span(
                str(measured["name"]),
                context=trace.set_span_in_context(parent),
                kind=trace.SpanKind.SERVER,
                start_time=int(measured["start"]),
                attributes=measured["attributes"],
            )
            span.end(int(measured["end"]))
        except (ValueError, KeyError, TypeError):
            parent.add_event("unreadable agent span")

    def gauge(self, name: str, description: str, read: Callable[[], Mapping[str, int]]) -> None:
        """A gauge that is read when metrics are exported, in another thread; the keys become the attribute `kind`."""
        self.meter.create_observable_gauge(name, [_observing(read)], description=description)

    def counter(self, name: str, description: str, read: Callable[[], Mapping[str, int]]) -> None:
        """Like a gauge, of numbers that only grow."""
        self.meter.create_observable_counter(name, [_observing(read)], description=description)

    def _context(self, metadata: Iterable[tuple[str, Any]]) -> Context:
        carrier = {key: value for key, value in metadata if key == TRACEPARENT}
        return self._propagator.extract(carrier)

    def close(self) -> None:
        """Send what is left. Blocks up to a few seconds; call it in a thread."""
        self._tracers.shutdown()
        self._meters.shutdown(timeout_millis=3000)


def _observing(read: Callable[[], Mapping[str, int]]) -> Callable[[CallbackOptions], Iterable[Observation]]:
    from opentelemetry.metrics import Observation

    return lambda _options: [Observation(value, {"kind": kind}) for kind, value in read().items()]


def agent_span(name: str, start_ns: int, attributes: Mapping[str, str | int]) -> bytes:
    """A finished span in the form that `record_agent_span` reads; it ends now."""
    return json.dumps({"name": name, "start": start_ns, "end": time.time_ns(), "attributes": attributes}).encode()
