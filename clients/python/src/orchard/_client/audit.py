"""The audit log: who changed what, and what was refused."""

from __future__ import annotations

import datetime as dt
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from orchard._client.paging import paged
from orchard._client.transport import Transport
from orchard._client.units import datetime_of, timestamp
from orchard.admin.v1 import audit_service_pb2


@dataclass(frozen=True)
class AuditEntry:
    """One call. What is not known is empty."""

    time: dt.datetime
    """When the call ended."""
    tenant: str
    """The tenant of the key; empty if the key was not valid."""
    key_id: str
    """The key that was shown, also one that is not valid."""
    method: str
    """Like "orchard.sandbox.v1.SandboxService/CreateSandbox"."""
    target: str
    """Id or name of what was changed or used."""
    request_id: str
    """The id under which the platform logged the call."""
    status: str
    """The gRPC status, like "OK" or "PERMISSION_DENIED"."""
    client_address: str
    """Where the call came from."""


def list_audit(
    transport: Transport,
    *,
    tenant: str,
    key_id: str,
    method: str,
    target: str,
    status: str,
    start: dt.datetime | None,
    end: dt.datetime | None,
    page_size: int,
) -> AsyncGenerator[AuditEntry, None]:
    """Entries, newest first."""
    request = audit_service_pb2.ListAuditRequest(
        page_size=page_size, tenant=tenant, key_id=key_id, method=method, target=target, status=status
    )
    if start is not None:
        request.start_time.CopyFrom(timestamp(start))
    if end is not None:
        request.end_time.CopyFrom(timestamp(end))
    return paged(transport, lambda c: c.audit.ListAudit, request, lambda page: page.entries, _entry)


def _entry(message: audit_service_pb2.AuditEntry) -> AuditEntry:
    return AuditEntry(
        datetime_of(message.time),
        message.tenant,
        message.key_id,
        message.method,
        message.target,
        message.request_id,
        message.status,
        message.client_address,
    )
