"""TenantService: proto to domain and back."""

from __future__ import annotations

from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp
from orchard.admin.v1 import admin_pb2, tenant_service_pb2, tenant_service_pb2_grpc

from services.common import quota_proto
from services.common.interceptor import note_target
from services.common.pages import bad_token, decode_token, encode_token
from services.common.validation import Fields
from services.gateway.tenants import Tenant, Tenants


class TenantServicer(tenant_service_pb2_grpc.TenantServiceServicer):
    """Serves orchard.admin.v1.TenantService; the authenticator has checked the scope."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants

    async def SetTenant(  # noqa: N802 (gRPC's names, here and below)
        self,
        request: tenant_service_pb2.SetTenantRequest,
        context: Any,  # noqa: ARG002
    ) -> tenant_service_pb2.SetTenantResponse:
        """See tenant_service.proto."""
        fields = Fields()
        fields.tenant("tenant", request.tenant)
        quota_proto.check(request.quota, "quota", fields)
        fields.done()
        note_target(request.tenant)
        made = await self._tenants.set(request.tenant, quota_proto.from_proto(request.quota, 0))
        return tenant_service_pb2.SetTenantResponse(tenant=_to_proto(made))

    async def ListTenants(  # noqa: N802
        self,
        request: tenant_service_pb2.ListTenantsRequest,
        context: Any,  # noqa: ARG002
    ) -> tenant_service_pb2.ListTenantsResponse:
        """See tenant_service.proto."""
        fields = Fields()
        size = fields.page_size("page_size", request.page_size, default=100, maximum=1000)
        fields.text("tenant", request.tenant, maximum=63)
        fields.done()
        (after,) = decode_token("page_token", request.page_token, (str,)) if request.page_token else ("",)
        if "\0" in after:
            raise bad_token("page_token")
        found = await self._tenants.list_page(request.tenant, after, size)
        token = encode_token((found[-1].tenant,)) if len(found) == size else ""
        return tenant_service_pb2.ListTenantsResponse(tenants=[_to_proto(one) for one in found], next_page_token=token)


def _to_proto(tenant: Tenant) -> admin_pb2.Tenant:
    message = admin_pb2.Tenant(tenant=tenant.tenant)
    if tenant.update_time is not None:
        message.quota.CopyFrom(quota_proto.to_proto(tenant.quota))
        stamp = Timestamp()
        stamp.FromDatetime(tenant.update_time)
        message.update_time.CopyFrom(stamp)
    return message
