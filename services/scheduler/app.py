"""Composition root of the scheduler."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import NamedTuple

from orchard.sandbox.v1 import lease_service_pb2_grpc, sandbox_service_pb2_grpc

from services.common import watch_cache
from services.common.auth import PrincipalAuthenticator
from services.common.health import Health
from services.common.interceptor import CallInterceptor
from services.common.server import Server
from services.common.tasks import TaskGroup
from services.common.telemetry import Telemetry
from services.common.tokens import INTERNAL_AUDIENCE, PublicKeysFile, Verifier
from services.common.watch_cache import WatchCache
from services.scheduler import reconcile, servicer_specs
from services.scheduler.dispatch import Dispatcher
from services.scheduler.injection import Delivery, injection_of
from services.scheduler.node_client import NodeRuntime
from services.scheduler.reconcile import Reconciler
from services.scheduler.service import Runtime, Scheduler
from services.scheduler.servicer import LeaseServicer, SandboxServicer
from services.scheduler.servicer_pods import pod_terms_of
from services.scheduler.servicer_specs import Defaults
from services.scheduler.settings import SchedulerSettings
from services.scheduler.store import LeaseStore

SERVICE_NAMES = ("orchard.sandbox.v1.SandboxService", "orchard.sandbox.v1.LeaseService")


class _Runtime(NamedTuple):
    """A runtime, and what goes with it."""

    runtime: Runtime
    close: Callable[[], Awaitable[None]]
    prepare: Callable[[], Awaitable[None]]
    """Awaited before anything is created."""
    defaults: Defaults
    maximum_lifetime_ms: int
    stuck_seconds: float
    show_keys: Callable[[], Coroutine[object, object, None]] | None = None
    """Keeps the public keys of running sandboxes in step with the file, for ever; None: nobody needs to."""


async def _runtime(settings: SchedulerSettings, keys: PublicKeysFile) -> _Runtime:
    if settings.runtime != "kubernetes":
        node = NodeRuntime(settings.node_address, host_root=settings.runtime == "process")

        async def ready() -> None:
            """Nothing to prepare."""

        return _Runtime(node, node.close, ready, Defaults(), 0, math.inf)
    # Imported here: it takes a second and 60 MB, which one machine need not pay for.
    from services.common.kubernetes import KubernetesClient
    from services.scheduler.kubernetes import KubernetesRuntime
    from services.scheduler.payload_probe import find_delivery
    from services.scheduler.pod_api import PodApi
    from services.scheduler.pod_keys import PodKeys
    from services.scheduler.throttle import Throttle

    client = await KubernetesClient.connect(settings.kubeconfig)
    api = PodApi(client, settings.namespace, Throttle(settings.api_requests_per_second, settings.api_burst))
    profile = settings.pod_profile(keys.pem)
    pods = KubernetesRuntime(api, profile, terms_of=pod_terms_of)

    async def inject() -> None:
        image, policy = settings.payload_image, settings.payload_pull_policy
        if settings.payload_delivery == "auto":
            delivery = await find_delivery(api, image, policy, settings.probe_placement())
        else:
            delivery = Delivery(settings.payload_delivery)
        pods.inject(injection_of(delivery, image, policy))

    defaults = Defaults(settings.default_cpu, settings.default_memory_bytes, settings.default_disk_bytes)
    lifetime_ms = settings.maximum_lifetime_seconds * 1000
    show_keys = PodKeys(keys, api, pods.use_keys).run
    return _Runtime(pods, api.close, inject, defaults, lifetime_ms, settings.stuck_delete_seconds, show_keys)


@asynccontextmanager
async def run(settings: SchedulerSettings, tasks: TaskGroup, telemetry: Telemetry | None) -> AsyncIterator[None]:
    """Run the scheduler while the context is open."""
    health = Health([watch_cache.DEPENDENCY, reconcile.STORE_DEPENDENCY])
    store = LeaseStore(settings.redis_url.get_secret_value(), settings.redis_tls())
    keys = PublicKeysFile(settings.public_keys_file)
    chosen = await _runtime(settings, keys)
    dispatcher = Dispatcher(
        store, chosen.runtime, claim_seconds=settings.claim_seconds, starts_in_flight=settings.starts_in_flight
    )
    reconciler = Reconciler(
        store,
        chosen.runtime,
        dispatcher,
        health,
        grace_seconds=settings.grace_seconds,
        stuck_seconds=chosen.stuck_seconds,
    )
    cache = WatchCache(
        settings.watcher_address,
        health,
        include_spec=True,
        tls=settings.client_tls(),
        on_change=reconciler.saw,
        on_synced=reconciler.synced,
    )
    scheduler = Scheduler(
        store,
        chosen.runtime,
        cache,
        terms_of=servicer_specs.terms_of,
        queue_limit=settings.queue_limit_per_tenant,
        maximum_lifetime_ms=chosen.maximum_lifetime_ms,
        wake_dispatcher=dispatcher.wake,
        delete_soon=dispatcher.delete_soon,
        is_starting=dispatcher.is_starting,
    )
    dispatcher.attach(scheduler.rebuild)
    reconciler.attach(cache, scheduler)
    verifier = Verifier(keys, INTERNAL_AUDIENCE)
    server = Server(
        interceptor=CallInterceptor(authenticator=PrincipalAuthenticator(verifier), telemetry=telemetry),
        health=health,
        service_names=SERVICE_NAMES,
    )
    sandbox_service_pb2_grpc.add_SandboxServiceServicer_to_server(
        SandboxServicer(scheduler, chosen.defaults, server.stopping), server.grpc_server
    )
    lease_service_pb2_grpc.add_LeaseServiceServicer_to_server(LeaseServicer(scheduler), server.grpc_server)
    if telemetry is not None:
        telemetry.gauge("orchard.queue.length", "Queued creates, by tenant and in all.", reconciler.queue_counts)
        telemetry.gauge("orchard.starting", "Creates sent to the runtime.", lambda: {"starting": dispatcher.starting})
    tasks.start("follow the watcher", cache.run())
    tasks.start("write what the watcher sees", reconciler.run_writes())
    tasks.start("wake waiters", reconciler.run_changes())
    tasks.start("end leases", reconciler.run_reaper())
    tasks.start("reconcile", reconciler.run_rounds())
    if chosen.show_keys is not None:
        tasks.start("show public keys to Pods", chosen.show_keys())
    tasks.start("start sandboxes", _start_sandboxes(chosen.prepare, dispatcher))
    for number in range(settings.starts_in_flight):
        tasks.start(f"delete sandboxes {number}", dispatcher.run_deletes())
    await server.start(settings.listen, tls=settings.server_tls(), health_address=settings.health_listen)
    try:
        yield
    finally:
        await server.stop(notice_seconds=settings.stop_notice_seconds, wake=scheduler.notify_all)
        await tasks.close()
        await chosen.close()
        await store.close()


async def _start_sandboxes(prepare: Callable[[], Awaitable[None]], dispatcher: Dispatcher) -> None:
    await prepare()
    await dispatcher.run_starts()
