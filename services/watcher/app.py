"""Composition root of the watcher."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from orchard.watch.v1 import watch_service_pb2_grpc

from services.common.health import Health
from services.common.interceptor import CallInterceptor
from services.common.server import Server
from services.common.tasks import TaskGroup
from services.common.telemetry import Telemetry
from services.watcher.agent_client import AgentProber
from services.watcher.model import Runtime
from services.watcher.node_client import NodeRuntime
from services.watcher.service import DEPENDENCY, SILENCE_SECONDS, Watcher
from services.watcher.servicer import WatchServicer
from services.watcher.settings import WatcherSettings

SERVICE_NAMES = ("orchard.watch.v1.WatchService",)


@asynccontextmanager
async def run(settings: WatcherSettings, tasks: TaskGroup, telemetry: Telemetry | None) -> AsyncIterator[None]:
    """Run the watcher while the context is open."""
    async with AsyncExitStack() as stack:
        runtime, silence_seconds = await _runtime(settings, tasks, stack, telemetry)
        await stack.enter_async_context(_serving(settings, tasks, telemetry, runtime, silence_seconds))
        yield


async def _runtime(
    settings: WatcherSettings, tasks: TaskGroup, stack: AsyncExitStack, telemetry: Telemetry | None
) -> tuple[Runtime, float]:
    """The runtime, and after which silence its stream is lost."""
    if settings.runtime != "kubernetes":
        return NodeRuntime(settings.node_address), SILENCE_SECONDS
    # Imported here: it takes a second and 60 MB, which one machine need not pay for.
    from services.common.kubernetes import KubernetesClient
    from services.watcher import kubernetes, pod_watch

    client = await KubernetesClient.connect(settings.kubeconfig)
    stack.push_async_callback(client.close)
    stack.push_async_callback(tasks.close)  # nobody uses it when it is closed
    runtime = kubernetes.KubernetesRuntime(client, settings.namespace)
    if telemetry is not None:
        telemetry.counter("orchard.watch", "What happened to the watch of Pods, by kind.", runtime.counts)
    return runtime, pod_watch.SILENCE_SECONDS


@asynccontextmanager
async def _serving(
    settings: WatcherSettings,
    tasks: TaskGroup,
    telemetry: Telemetry | None,
    runtime: Runtime,
    silence_seconds: float,
) -> AsyncIterator[None]:
    health = Health([DEPENDENCY])
    watcher = Watcher(
        runtime,
        AgentProber(settings.agent_tls()),
        health,
        probe_interval_seconds=settings.probe_interval_seconds,
        silence_seconds=silence_seconds,
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
        telemetry.gauge("orchard.watch.lag", "Milliseconds since the runtime's stream last said anything.", watcher.lag)
    tasks.start("watch the runtime", watcher.run())
    await server.start(settings.listen, tls=settings.server_tls(), health_address=settings.health_listen)
    try:
        yield
    finally:
        await server.stop(notice_seconds=settings.stop_notice_seconds, wake=watcher.wake)
