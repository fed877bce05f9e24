"""Tenants and what they may have."""

from __future__ import annotations

import datetime as dt
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from orchard._client.arguments import explained
from orchard._client.paging import paged
from orchard._client.transport import Transport
from orchard._client.units import Seconds, datetime_of, duration, duration_seconds, parse_size
from orchard.admin.v1 import admin_pb2, tenant_service_pb2


@dataclass(frozen=True)
class Quota:
    """What a tenant's sandboxes may take together. None bounds nothing."""

    sandboxes: int | None = None
    cpu: float | None = None
    memory_bytes: int | None = None
    creates_per_second: float | None = None
    maximum_lifetime: float | None = None
    """Seconds."""


@dataclass(frozen=True)
class Tenant:
    """A tenant. One whose quota was never set has no update_time."""

    tenant: str
    quota: Quota
    update_time: dt.datetime | None


@explained
class AsyncTenants:
    """Tenants and their quotas; needs the scope tenants, which the role admin has."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def set(
        self,
        tenant: str,
        *,
        sandboxes: int | None = None,
        cpu: float | None = None,
        memory: int | str | None = None,
        creates_per_second: float | None = None,
        maximum_lifetime: Seconds | None = None,
    ) -> Tenant:
        """Set a tenant's quota as a whole: what is left out is not bounded any more. It holds within seconds.

        Args:
            tenant: whose; it need not have a key yet.
            sandboxes: how many there may be at once; further ones wait in the queue.
            cpu: virtual CPUs together.
            memory: bytes together, or like "512GiB".
            creates_per_second: how many leave the queue each second.
            maximum_lifetime: how long each may live, however often its end is moved.

        Raises:
            InvalidArgument, PermissionDenied: as their names say.
        """
        quota = admin_pb2.Quota(
            sandboxes=sandboxes,
            cpu=cpu,
            memory_bytes=None if memory is None else parse_size("memory", memory),
            creates_per_second=creates_per_second,
        )
        if maximum_lifetime is not None:
            quota.maximum_lifetime.CopyFrom(duration("maximum_lifetime", maximum_lifetime))
        request = tenant_service_pb2.SetTenantRequest(tenant=tenant, quota=quota)
        response = await self._transport.unary(lambda c: c.tenant.SetTenant, request)
        return _tenant(response.tenant)

    def list(self, *, tenant: str = "") -> AsyncGenerator[Tenant, None]:
        """Tenants that have a quota or a key, by name; or only one."""
        request = tenant_service_pb2.ListTenantsRequest(page_size=1000, tenant=tenant)
        return paged(self._transport, lambda c: c.tenant.ListTenants, request, lambda page: page.tenants, _tenant)


def _tenant(message: admin_pb2.Tenant) -> Tenant:
    quota = message.quota
    return Tenant(
        message.tenant,
        Quota(
            sandboxes=quota.sandboxes if quota.HasField("sandboxes") else None,
            cpu=quota.cpu if quota.HasField("cpu") else None,
            memory_bytes=quota.memory_bytes if quota.HasField("memory_bytes") else None,
            creates_per_second=quota.creates_per_second if quota.HasField("creates_per_second") else None,
            maximum_lifetime=(duration_seconds(quota.maximum_lifetime) if quota.HasField("maximum_lifetime") else None),
        ),
        datetime_of(message.update_time) if message.HasField("update_time") else None,
    )
