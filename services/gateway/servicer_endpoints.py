"""EndpointService: proto to domain and back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc.aio
from orchard.exec.v1 import endpoint_service_pb2, endpoint_service_pb2_grpc

from services.common.auth import principal
from services.common.interceptor import note_target
from services.common.validation import Fields
from services.gateway.agents_client import Agents
from services.gateway.endpoints_client import Endpoints

_LONGEST_NAME = 63


class EndpointServicer(endpoint_service_pb2_grpc.EndpointServiceServicer):
    """Serves orchard.exec.v1.EndpointService; the authenticator has checked the scope."""

    def __init__(self, agents: Agents, endpoints: Endpoints) -> None:
        self._agents = agents
        self._endpoints = endpoints

    async def OpenEndpoint(  # noqa: N802 (gRPC's name)
        self, request: endpoint_service_pb2.OpenEndpointRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[endpoint_service_pb2.OpenEndpointResponse]:
        """See the proto."""
        fields = Fields()
        fields.sandbox_id("sandbox_id", request.sandbox_id)
        fields.text("endpoint", request.endpoint, maximum=_LONGEST_NAME, required=True)
        fields.between("port", request.port, 1, 65_535)
        fields.token_id("request_id", request.request_id)
        fields.done()
        note_target(request.sandbox_id)
        self._endpoints.find(request.endpoint)
        agent = await self._agents.find(principal().tenant, request.sandbox_id)
        serving = self._endpoints.serve(agent, request.endpoint, request.port, request.request_id, context)
        async with aclosing(serving) as ports:
            async for port in ports:
                opened = endpoint_service_pb2.EndpointOpened(port=port)
                yield endpoint_service_pb2.OpenEndpointResponse(opened=opened)
