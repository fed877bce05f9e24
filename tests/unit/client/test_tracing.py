"""Client spans, against the real OpenTelemetry SDK."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from orchard._client.profile import Profile
from orchard._client.tracing import Tracing
from orchard._client.transport import Transport


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def transport(exporter: InMemorySpanExporter) -> Transport:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Transport(Profile("127.0.0.1:1", "k"), retry_seconds=1, tracing=Tracing(provider.get_tracer("test")))


def test_an_operation_is_a_span_whose_id_goes_with_the_call(
    transport: Transport, exporter: InMemorySpanExporter
) -> None:
    with transport.operation("exec", sandbox_id="s", exec_id="e") as operation:
        metadata = dict(transport.context(operation).metadata)
        assert operation is not None
        operation.set(exit_code=3)
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.kind) == ("orchard exec", SpanKind.CLIENT)
    assert dict(span.attributes or {}) == {
        "orchard.sandbox_id": "s",
        "orchard.exec_id": "e",
        "orchard.exit_code": 3,
    }
    parent = f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-"
    assert metadata["traceparent"].startswith(parent)
    assert int(metadata["traceparent"].removeprefix(parent), 16) & 1  # sampled
    assert metadata["authorization"] == "Bearer k"


def test_a_failed_operation_is_a_failed_span(transport: Transport, exporter: InMemorySpanExporter) -> None:
    with pytest.raises(ValueError, match="no"), transport.operation("exec"):
        raise ValueError("no")
    assert exporter.get_finished_spans()[0].status.status_code is StatusCode.ERROR


def test_without_an_endpoint_there_is_no_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert Tracing.from_environment() is None
    off = Transport(Profile("127.0.0.1:1", "k"), retry_seconds=1, tracing=None)
    with off.operation("exec") as operation:
        assert operation is None
        assert "traceparent" not in dict(off.context(operation).metadata)
