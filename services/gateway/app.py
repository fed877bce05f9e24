"""Composition root of the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
from orchard.admin.v1 import (
    audit_service_pb2_grpc,
    image_service_pb2_grpc,
    key_service_pb2_grpc,
    tenant_service_pb2_grpc,
    usage_service_pb2_grpc,
    version_service_pb2_grpc,
)
from orchard.exec.v1 import (
    endpoint_service_pb2,
    endpoint_service_pb2_grpc,
    exec_service_pb2,
    file_service_pb2,
    port_service_pb2,
)
from orchard.judge.v1 import judge_service_pb2
from orchard.sandbox.v1 import sandbox_service_pb2
from orchard.trajectory.v1 import group_service_pb2, trajectory_service_pb2

from services.common import watch_cache
from services.common.channel import connect as connect_service
from services.common.db import connect
from services.common.health import Health
from services.common.interceptor import CallInterceptor
from services.common.observed import Observed
from services.common.server import Server
from services.common.states import State
from services.common.tasks import TaskGroup
from services.common.telemetry import Telemetry
from services.common.tls import ClientTls
from services.common.tokens import Signer, load_private_key
from services.common.watch_cache import WatchCache
from services.gateway import keys as api_keys
from services.gateway.agents_client import Agents
from services.gateway.audit import AuditLog
from services.gateway.couriers import ActivityReporter, SecretCourier, UsageRecorder
from services.gateway.endpoints_client import Endpoints
from services.gateway.keys import Keys
from services.gateway.node_client import NodeImages
from services.gateway.proxy import AgentProxy, PrincipalProxy, ServiceProxy
from services.gateway.scheduler_client import SchedulerClient
from services.gateway.servicer import KeyServicer, SandboxServicer, UsageServicer, VersionServicer, usage_terms
from services.gateway.servicer_audit import AuditServicer
from services.gateway.servicer_endpoints import EndpointServicer
from services.gateway.servicer_tenants import TenantServicer
from services.gateway.settings import GatewaySettings
from services.gateway.store import GatewayStore
from services.gateway.store_audit import AuditTable
from services.gateway.tenants import Tenants

_SANDBOX = sandbox_service_pb2.DESCRIPTOR.services_by_name["SandboxService"]
_EXEC = exec_service_pb2.DESCRIPTOR.services_by_name["ExecService"]
_FILES = file_service_pb2.DESCRIPTOR.services_by_name["FileService"]
_PORTS = port_service_pb2.DESCRIPTOR.services_by_name["PortService"]
_TRAJECTORIES = trajectory_service_pb2.DESCRIPTOR.services_by_name["TrajectoryService"]
_GROUPS = group_service_pb2.DESCRIPTOR.services_by_name["GroupService"]
_JUDGE = judge_service_pb2.DESCRIPTOR.services_by_name["JudgeService"]
_ENDPOINTS = endpoint_service_pb2.DESCRIPTOR.services_by_name["EndpointService"]
SERVICE_NAMES = (
    _SANDBOX.full_name,
    _EXEC.full_name,
    _FILES.full_name,
    _PORTS.full_name,
    _ENDPOINTS.full_name,
    "orchard.admin.v1.KeyService",
    "orchard.admin.v1.TenantService",
    "orchard.admin.v1.ImageService",
    "orchard.admin.v1.UsageService",
    "orchard.admin.v1.AuditService",
    "orchard.admin.v1.VersionService",
)
TRAJECTORY_NAMES = (_TRAJECTORIES.full_name, _GROUPS.full_name)
JUDGE_NAMES = (_JUDGE.full_name,)


@asynccontextmanager
async def run(settings: GatewaySettings, tasks: TaskGroup, telemetry: Telemetry | None) -> AsyncIterator[None]:
    """Run the gateway while the context is open."""
    health = Health([watch_cache.DEPENDENCY, api_keys.DEPENDENCY])
    tls = settings.client_tls()
    signer = Signer(load_private_key(settings.signing_key_file))
    url, connections = settings.database_url.get_secret_value(), settings.database_connections
    engine = connect(url, pool_size=connections, tls=settings.database_tls())
    store, audit_table = GatewayStore(engine), AuditTable(engine)
    audit = AuditLog(audit_table, commands=settings.audit_commands, flush_seconds=settings.audit_flush_seconds)
    usage = UsageRecorder(store, usage_terms)

    def changed(seen: Observed) -> None:
        usage.saw(seen)
        if seen.state in (State.DELETED, State.FAILED):
            agents.forget(seen.uid)
            courier.forget(seen)

    cache = WatchCache(
        settings.watcher_address,
        health,
        include_spec=True,
        tls=tls,
        on_change=changed,
        on_synced=lambda: usage.synced([seen.uid for seen in cache.living()]),
    )
    agents = Agents(cache, signer, tasks, settings.agent_tls())
    scheduler = SchedulerClient(settings.scheduler_address, signer, tls)
    courier = SecretCourier(cache, agents, scheduler, tasks)
    tenants = Tenants(store, scheduler)
    keys = Keys(store, health, quota_of=tenants.quota_of, look_ups=min(2, connections - 1))
    images = NodeImages(settings.node_address)
    server = Server(
        interceptor=CallInterceptor(authenticator=keys, telemetry=telemetry, observer=audit),
        health=health,
        service_names=SERVICE_NAMES
        + (TRAJECTORY_NAMES if settings.trajectories_address else ())
        + (JUDGE_NAMES if settings.judge_address else ()),
    )
    proxies, channels = _pass_through(
        settings, signer, telemetry, tls=tls, scheduler=scheduler, agents=agents, courier=courier
    )
    server.grpc_server.add_generic_rpc_handlers(tuple(proxies))
    endpoints = Endpoints(agents, settings.endpoints())

    def end_streams() -> None:
        endpoints.end_streams()
        for proxy in proxies:
            proxy.end_streams()

    served = server.grpc_server
    endpoint_service_pb2_grpc.add_EndpointServiceServicer_to_server(EndpointServicer(agents, endpoints), served)
    key_service_pb2_grpc.add_KeyServiceServicer_to_server(KeyServicer(keys), served)
    tenant_service_pb2_grpc.add_TenantServiceServicer_to_server(TenantServicer(tenants), served)
    image_service_pb2_grpc.add_ImageServiceServicer_to_server(images, served)
    usage_service_pb2_grpc.add_UsageServiceServicer_to_server(UsageServicer(store), served)
    audit_service_pb2_grpc.add_AuditServiceServicer_to_server(AuditServicer(audit_table), served)
    version_service_pb2_grpc.add_VersionServiceServicer_to_server(VersionServicer(settings.runtime), served)
    tasks.start("read the keys", keys.run_refresh(settings.key_refresh_seconds))
    tasks.start("read the tenants", tenants.run_refresh(settings.key_refresh_seconds))
    tasks.start("tell of quotas", tenants.run_telling())
    tasks.start("follow the watcher", cache.run())
    tasks.start("write usage", usage.run())
    tasks.start("write the audit log", audit.run())
    tasks.start("forget old audit entries", audit.run_forgetting(settings.audit_retention_days))
    if telemetry is not None:
        telemetry.counter("orchard.audit.entries", "Entries of the audit log, written and dropped.", audit.counts)
        telemetry.gauge("orchard.audit.waiting", "Entries that are not written yet.", audit.waiting)
    tasks.start("report activity", ActivityReporter(agents, scheduler, every_seconds=settings.activity_seconds).run())
    await server.start(settings.listen, tls=settings.server_tls(), health_address=settings.health_listen)
    try:
        yield
    finally:
        await server.stop(notice_seconds=settings.stop_notice_seconds, wake=end_streams)
        await tasks.close()
        await asyncio.gather(audit.close(), usage.close())
        await agents.close()
        await scheduler.close()
        for channel in channels:
            await channel.close()
        await images.close()
        await store.close()


def _pass_through(
    settings: GatewaySettings,
    signer: Signer,
    telemetry: Telemetry | None,
    *,
    tls: ClientTls | None,
    scheduler: SchedulerClient,
    agents: Agents,
    courier: SecretCourier,
) -> tuple[list[ServiceProxy], list[grpc.aio.Channel]]:
    """What is passed on to agents and to services behind the gateway, and the connections that it took."""
    sandboxes = PrincipalProxy(scheduler.channel, signer, telemetry, _SANDBOX)
    sandboxes.override(SandboxServicer(scheduler, courier, agents, sandboxes.metadata).handlers())
    commands = AgentProxy(agents, telemetry, _EXEC, _FILES, _PORTS, on_secret_pending=courier.deliver_again)
    proxies: list[ServiceProxy] = [commands, sandboxes]
    channels: list[grpc.aio.Channel] = []
    for address, services in (
        (settings.trajectories_address, (_TRAJECTORIES, _GROUPS)),
        (settings.judge_address, (_JUDGE,)),
    ):
        if address:
            channels.append(connect_service(address, tls))
            proxies.append(PrincipalProxy(channels[-1], signer, telemetry, *services))
    return proxies, channels
