"""The probe of a sandbox's agent, on its Unix socket or its Pod's address."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.channel import connect
from services.common.tls import ClientTls
from services.common.versions import AGENT_VERSION_KEY

_PROBE_SECONDS: Final = 1.0
_ACCEPT_SECONDS: Final = 0.25


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
