"""Composition root of the watcher."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from orchard.watch.v1 import watch_service_pb2_grpc

from services.common.health import Health
from services.common.interceptor import CallInterceptor
from services.common.server import Server
from services.common.tasks import TaskGroup
from services.common.telemetry import Telemetry
from services.watcher.process import AgentProber, NodeRuntime
from services.watcher.service import DEPENDENCY, Watcher
from services.watcher.servicer import WatchServicer
from services.watcher.settings import WatcherSettings

SERVICE_NAMES = ("orchard.watch.v1.WatchService",)


@asynccontextmanager
async def run(settings: WatcherSettings, tasks: TaskGroup, telemetry: Telemetry | None) -> AsyncIterator[None]:
    """Run the watcher while the context is open."""
    health = Health([DEPENDENCY])
    watcher = Watcher(
        NodeRuntime(settings.node_address),
        AgentProber(settings.agent_tls()),
        health,
        probe_interval_seconds=settings.probe_interval_seconds,
    )
    # Callers are gateways and schedulers that reach this socket or port; a principal would say nothing more.
    server = Server(
        interceptor=CallInterceptor(authenticator=None, telemetry=telemetry),
        health=health,
        service_names=SERVICE_NAMES,
    )
    watch_service_pb2_grpc.add_WatchServiceServicer_to_server(
        WatchServicer(watcher, server.stopping), server.grpc_server
    )
    if telemetry is not None:
        telemetry.gauge("orchard.sandboxes", "Sandboxes that the runtime has, by state.", watcher.counts)
    tasks.start("watch the runtime", watcher.run())
    await server.start(settings.listen, tls=settings.server_tls(), health_address=settings.health_listen)
    try:
        yield
    finally:
        await server.stop(notice_seconds=settings.stop_notice_seconds, wake=watcher.wake)
