"""A real OTLP receiver: the official gRPC services of OpenTelemetry's collector protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class Receiver(trace_service_pb2_grpc.TraceServiceServicer, metrics_service_pb2_grpc.MetricsServiceServicer):
    """Keeps what arrives."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []  # service name and span
        self.metrics: dict[str, Any] = {}
        self.arrived = asyncio.Event()

    async def Export(self, request: Any, context: Any) -> Any:
        if isinstance(request, trace_service_pb2.ExportTraceServiceRequest):
            for resource in request.resource_spans:
                service = attributes(resource.resource)["service.name"]
                self.spans += [(service, span) for scope in resource.scope_spans for span in scope.spans]
            self.arrived.set()
            return trace_service_pb2.ExportTraceServiceResponse()
        for resource in request.resource_metrics:
            for scope in resource.scope_metrics:
                self.metrics.update({metric.name: metric for metric in scope.metrics})
        self.arrived.set()
        return metrics_service_pb2.ExportMetricsServiceResponse()


def attributes(owner: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in owner.attributes}


@asynccontextmanager
async def receiver() -> AsyncIterator[tuple[Receiver, str]]:
    """A receiver and its endpoint."""
    received = Receiver()
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(received, server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(received, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield received, f"http://127.0.0.1:{port}"
    finally:
        await server.stop(None)
