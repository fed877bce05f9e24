"""Client spans through OpenTelemetry, where OTEL_EXPORTER_OTLP_ENDPOINT is set and OpenTelemetry is installed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer


class Operation:
    """A span and the metadata that makes the gateway's span its child."""

    def __init__(self, span: Span) -> None:
        self._span = span
        context = span.get_span_context()
        parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
        self.metadata: tuple[tuple[str, str], ...] = (("traceparent", parent),)

    def set(self, **attributes: Any) -> None:
        """Add attributes, prefixed with "orchard."."""
        for key, value in attributes.items():
            self._span.set_attribute(f"orchard.{key}", value)


class Tracing:
    """Makes the client's spans, below whatever span is current in the caller."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    @classmethod
    def from_environment(cls) -> Tracing | None:
        """Tracing to the environment's OTLP endpoint, or None. A tracer provider that the program has set up is used
        as it is.
        """
        if not os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
            return None
        try:
            from opentelemetry import trace
        except ImportError:
            return None
        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            provider = _provider()
            if provider is None:
                return None
            trace.set_tracer_provider(provider)
        return cls(trace.get_tracer("orchard"))

    @contextmanager
    def span(self, name: str, attributes: Mapping[str, str]) -> Iterator[Operation]:
        """A client span around a block; an exception marks it as failed."""
        from opentelemetry.trace import SpanKind, StatusCode

        # Not made current: a stream's span outlives the caller's steps, which may run in different contexts.
        span = self._tracer.start_span(
            f"orchard {name}",
            kind=SpanKind.CLIENT,
            attributes={f"orchard.{key}": value for key, value in attributes.items()},
        )
        try:
            yield Operation(span)
        except BaseException as error:
            span.set_status(StatusCode.ERROR, type(error).__name__)
            raise
        finally:
            span.end()


def _provider() -> Any:
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        return None
    provider = TracerProvider(resource=Resource.create({"service.name": "orchard-client"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
