"""Composition root of the node daemon."""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from orchard.node.v1 import node_service_pb2, node_service_pb2_grpc

from services.common.health import Health
from services.common.interceptor import CallInterceptor
from services.common.server import Server
from services.common.tasks import TaskGroup
from services.common.telemetry import Telemetry
from services.local.node.journal import Journal
from services.local.node.service import Node
from services.local.node.servicer import PROCESS, NodeServicer, Offer
from services.local.node.settings import NodeSettings
from services.local.runtime.images import ImageStore
from services.local.runtime.process import ProcessRuntime
from services.local.runtime.reaper import Reaper
from services.local.runtime.setup import prepare

_SERVICE = node_service_pb2.DESCRIPTOR.services_by_name["NodeService"].full_name


@asynccontextmanager
async def node(settings: NodeSettings, tasks: TaskGroup, telemetry: Telemetry | None) -> AsyncIterator[Server]:
    """Start the daemon; on exit stop it. Its sandboxes live on.

    Calls are not authenticated: the socket lies in a folder that only this user can enter.
    """
    lifeline, own_end = _lifeline(settings)
    node_of = docker_node if settings.runtime == "docker" else process_node
    async with node_of(settings, tasks, lifeline) as (service, offer):
        health = Health()
        interceptor = CallInterceptor(authenticator=None, telemetry=telemetry)
        server = Server(interceptor=interceptor, health=health, service_names=[_SERVICE])
        node_service_pb2_grpc.add_NodeServiceServicer_to_server(NodeServicer(service, offer), server.grpc_server)
        tasks.start("end of watches", service.end_watches(server.stopping), forever=False)
        await server.start(settings.listen)
        await health.publish()
        try:
            yield server
        finally:
            if own_end is not None:
                os.close(own_end)
            await server.stop(notice_seconds=settings.stop_notice_seconds)


@asynccontextmanager
async def process_node(settings: NodeSettings, tasks: TaskGroup, lifeline: int) -> AsyncIterator[tuple[Node, Offer]]:
    """A node whose sandboxes are processes. If the platform has ended on exit, they end too."""
    reaper = Reaper()
    data = settings.data_directory / "node"
    machine, zygote = await prepare(
        data,
        settings.run_directory,
        lifeline,
        agent_module=settings.agent_module,
        launcher_file=settings.launcher_file,
    )
    runtime = ProcessRuntime(
        machine,
        zygote,
        public_keys_pem=settings.public_keys_file.read_text,
        spare_sandboxes=settings.spare_sandboxes,
    )
    images = ImageStore(machine, runtime.remove_tree)
    journal = Journal(data / "journal")
    await images.load(record.request.image for record in await asyncio.to_thread(journal.read_all))
    service = Node(runtime, images, journal, tasks, concurrent_starts=settings.concurrent_starts)
    await service.start()
    tasks.start("spare sandboxes", runtime.keep_spares(), forever=settings.spare_sandboxes > 0)
    try:
        yield service, PROCESS
    finally:
        await tasks.close()
        await runtime.close(platform_ends=has_ended(lifeline))
        zygote.close()
        reaper.close()


@asynccontextmanager
async def docker_node(settings: NodeSettings, tasks: TaskGroup, lifeline: int) -> AsyncIterator[tuple[Node, Offer]]:
    """A node whose sandboxes are containers. If the platform has ended on exit, they are removed."""
    # Imported here: nobody else needs an HTTP client.
    from services.local.docker.app import docker_node as parts

    async with parts(settings, tasks, lambda: has_ended(lifeline)) as node_and_offer:
        yield node_and_offer


def has_ended(lifeline: int) -> bool:
    """Whether the platform that holds the other end is no more."""
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    return any(event & select.POLLHUP for _, event in poll.poll(0))


def _lifeline(settings: NodeSettings) -> tuple[int, int | None]:
    """The supervisor's; without one, ours: the sandboxes then end with this daemon."""
    if settings.lifeline_fd is not None:
        return settings.lifeline_fd, None
    return os.pipe()
