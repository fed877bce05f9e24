"""Health of one sandbox's agent, under the sandbox's uid: a prober cannot mistake another incarnation for it."""

from __future__ import annotations

from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.health import Health
from services.common.versions import AGENT_VERSION_KEY
from services.exec_agent.settings import VERSION


class AgentHealth(Health):
    """Answers Check for the uid; every other name, the empty one too, is NOT_FOUND. Watch is not offered."""

    def __init__(self, uid: str) -> None:
        super().__init__()
        self._uid = uid
        self._stopping = False

    def register(self, server: grpc.aio.Server, service_names: object = ()) -> None:  # noqa: ARG002
        """Serve grpc.health.v1."""
        health_pb2_grpc.add_HealthServicer_to_server(_Servicer(self), server)

    def status(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus | None:
        """The state of a service, None for one that is not here."""
        if service != self._uid:
            return None
        return health_pb2.HealthCheckResponse.NOT_SERVING if self._stopping else health_pb2.HealthCheckResponse.SERVING

    async def shutdown(self) -> None:
        """NOT_SERVING from now on."""
        self._stopping = True


class _Servicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    def __init__(self, health: AgentHealth) -> None:
        self._health = health

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        """Answer for the uid."""
        status = self._health.status(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "this agent serves another sandbox")
        context.set_trailing_metadata(((AGENT_VERSION_KEY, VERSION),))
        return health_pb2.HealthCheckResponse(status=status)
