"""The node daemon's stream, whatever it runs sandboxes with, and the probe of any sandbox's agent."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from orchard.node.v1 import node_pb2, node_service_pb2, node_service_pb2_grpc

from services.common.channel import connect
from services.common.errors import UnavailableError
from services.common.observed import Observed
from services.common.states import Reason, State
from services.common.times import to_ms
from services.common.tls import ClientTls
from services.common.validation import seconds_of
from services.common.versions import AGENT_VERSION_KEY
from services.watcher.model import Bookmark, Seen, Synced

_STATES: Final = {
    node_pb2.NODE_SANDBOX_PHASE_STARTING: State.STARTING,
    node_pb2.NODE_SANDBOX_PHASE_RUNNING: State.STARTING,
    node_pb2.NODE_SANDBOX_PHASE_STOPPING: State.DELETING,
    node_pb2.NODE_SANDBOX_PHASE_FAILED: State.FAILED,
    node_pb2.NODE_SANDBOX_PHASE_GONE: State.DELETED,
}
_PROBE_SECONDS: Final = 1.0
_ACCEPT_SECONDS: Final = 0.25


class NodeRuntime:
    """Watches one node daemon."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def watch(self) -> AsyncIterator[Seen | Synced | Bookmark]:
        """See model.Runtime."""
        async with connect(self._address) as channel:
            stub = node_service_pb2_grpc.NodeServiceStub(channel)
            call = stub.WatchSandboxes(node_service_pb2.WatchSandboxesRequest())
            try:
                async for response in call:
                    event, complete = response.WhichOneof("event"), response.complete_revision
                    if event == "sandbox":
                        yield _seen(response.sandbox, complete)
                    else:
                        yield Synced(complete) if event == "synced" else Bookmark(complete)
            except grpc.aio.AioRpcError as error:
                raise UnavailableError(f"the node daemon's stream broke: {error.code().name}") from None
            finally:
                call.cancel()


def _seen(sandbox: node_pb2.NodeSandbox, complete_revision: int) -> Seen:
    running = sandbox.phase == node_pb2.NODE_SANDBOX_PHASE_RUNNING
    return Seen(
        Observed(
            tenant=sandbox.tenant,
            sandbox_id=sandbox.sandbox_id,
            uid=sandbox.uid,
            revision=sandbox.revision,
            state=_STATES[sandbox.phase],
            reason=Reason(sandbox.reason),
            message=sandbox.message,
            endpoint=sandbox.endpoint if running else "",
            create_ms=to_ms(sandbox.create_time),
            expire_ms=to_ms(sandbox.expire_time),
            request_id=sandbox.request_id,
            spec_hash=sandbox.spec_hash,
            spec=sandbox.spec.SerializeToString(deterministic=True),
        ),
        start_timeout_seconds=seconds_of(sandbox.spec.start_timeout) or 60.0,
        complete_revision=complete_revision,
    )


class AgentProber:
    """Asks an agent's health over its own connection."""

    def __init__(self, tls: ClientTls | None = None) -> None:
        self._tls = tls

    async def answers(self, endpoint: str, uid: str) -> str | None:
        """See model.Prober."""
        if not (_listens(endpoint.removeprefix("unix:")) if endpoint.startswith("unix:") else await _accepts(endpoint)):
            return None
        async with connect(endpoint, self._tls) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            call = stub.Check(health_pb2.HealthCheckRequest(service=uid), timeout=_PROBE_SECONDS)
            try:
                reply = await call
                told = dict(await call.trailing_metadata())
            except grpc.aio.AioRpcError:
                return None
        if reply.status != health_pb2.HealthCheckResponse.SERVING:
            return None
        return str(told.get(AGENT_VERSION_KEY, ""))


def _listens(path: str) -> bool:
    """Whether anybody listens on a Unix socket. Costs so little beside a gRPC call that it can be asked often."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(path) == 0


async def _accepts(endpoint: str) -> bool:
    """Whether anybody accepts connections at "address:port". A packet lost to a network not yet set up costs little."""
    address, _, port = endpoint.rpartition(":")
    family = socket.AF_INET6 if address.startswith("[") else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            async with asyncio.timeout(_ACCEPT_SECONDS):
                await asyncio.get_running_loop().sock_connect(probe, (address.strip("[]"), int(port)))
        except (OSError, TimeoutError):
            return False
    return True
