"""The gateway's own calls to the scheduler: creates, whose secrets it keeps back, deletes, and reports of activity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import grpc
import grpc.aio
from orchard.sandbox.v1 import lease_service_pb2, lease_service_pb2_grpc, sandbox_service_pb2, sandbox_service_pb2_grpc

from services.common import quota_proto
from services.common.channel import connect
from services.common.errors import UnavailableError
from services.common.quota import Quota
from services.common.states import State
from services.common.times import now_ms, to_timestamp
from services.common.tls import ClientTls
from services.common.tokens import PRINCIPAL_KEY, Principal, Signer
from services.gateway.agents_client import Agent

_REPORT_SECONDS: Final = 5.0
_GET_SECONDS: Final = 5.0
_GATEWAY: Final = Principal(tenant="", key_id="gateway", roles=frozenset({"gateway"}))


class SchedulerClient:
    """The connection to the scheduler."""

    def __init__(self, address: str, signer: Signer, tls: ClientTls | None = None) -> None:
        self.channel = connect(address, tls)
        self._signer = signer
        self._sandboxes = sandbox_service_pb2_grpc.SandboxServiceStub(self.channel)
        self._leases = lease_service_pb2_grpc.LeaseServiceStub(self.channel)

    async def create(
        self,
        request: sandbox_service_pb2.CreateSandboxRequest,
        metadata: tuple[tuple[str, str], ...],
        timeout: float | None,
    ) -> sandbox_service_pb2.CreateSandboxResponse:
        """Pass a create on. Raises grpc.aio.AioRpcError, which the interceptor passes to the caller."""
        response: Any = await self._sandboxes.CreateSandbox(request, metadata=metadata, timeout=timeout)
        assert isinstance(response, sandbox_service_pb2.CreateSandboxResponse)  # noqa: S101 (for the type checker)
        return response

    async def delete(
        self,
        request: sandbox_service_pb2.DeleteSandboxRequest,
        metadata: tuple[tuple[str, str], ...],
        timeout: float | None,
    ) -> sandbox_service_pb2.DeleteSandboxResponse:
        """Pass a delete on. Raises as `create`."""
        response: Any = await self._sandboxes.DeleteSandbox(request, metadata=metadata, timeout=timeout)
        assert isinstance(response, sandbox_service_pb2.DeleteSandboxResponse)  # noqa: S101 (for the type checker)
        return response

    async def is_over(self, who: Principal, sandbox_id: str, request_id: str) -> bool:
        """See couriers.SandboxRecords."""
        try:
            found: Any = await self._sandboxes.GetSandbox(
                sandbox_service_pb2.GetSandboxRequest(sandbox_id=sandbox_id),
                metadata=((PRINCIPAL_KEY, self._signer.principal_token(who)),),
                timeout=_GET_SECONDS,
            )
        except grpc.aio.AioRpcError as error:
            return error.code() is grpc.StatusCode.NOT_FOUND
        return found.sandbox.request_id != request_id or State(found.sandbox.state).terminal

    async def report(self, agents: list[Agent]) -> None:
        """See couriers.ActivitySink."""
        now = to_timestamp(now_ms())
        request = lease_service_pb2.ReportActivityRequest(
            activities=[
                lease_service_pb2.SandboxActivity(
                    tenant=agent.tenant, sandbox_id=agent.sandbox_id, uid=agent.uid, last_active_time=now
                )
                for agent in agents
            ]
        )
        try:
            await self._leases.ReportActivity(
                request,
                metadata=((PRINCIPAL_KEY, self._signer.principal_token(_GATEWAY)),),
                timeout=_REPORT_SECONDS,
            )
        except grpc.aio.AioRpcError as error:
            raise UnavailableError(f"the scheduler did not take it: {error.code().name}") from None

    async def note_quotas(self, quotas: Mapping[str, Quota]) -> None:
        """See tenants.QuotaSink."""
        request = lease_service_pb2.NoteQuotasRequest(
            quotas=[
                lease_service_pb2.TenantQuota(tenant=tenant, quota=quota_proto.to_proto(quota), revision=quota.revision)
                for tenant, quota in quotas.items()
            ]
        )
        try:
            await self._leases.NoteQuotas(
                request, metadata=((PRINCIPAL_KEY, self._signer.principal_token(_GATEWAY)),), timeout=_REPORT_SECONDS
            )
        except grpc.aio.AioRpcError as error:
            raise UnavailableError(f"the scheduler did not take them: {error.code().name}") from None

    async def close(self) -> None:
        """Close the connection."""
        await self.channel.close()
