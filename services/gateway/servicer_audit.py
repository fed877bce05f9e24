"""AuditService: proto to domain and back."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from google.protobuf.timestamp_pb2 import Timestamp
from orchard.admin.v1 import audit_service_pb2, audit_service_pb2_grpc

from services.common.auth import principal
from services.common.pages import bad_token, decode_token, encode_token
from services.common.validation import Fields
from services.gateway.audit import AuditStore, Entry, Wanted
from services.gateway.scopes import ADMIN, check_tenant

_EPOCH = datetime.fromtimestamp(0, UTC)
_MICROSECOND = timedelta(microseconds=1)


class AuditServicer(audit_service_pb2_grpc.AuditServiceServicer):
    """Serves orchard.admin.v1.AuditService; the authenticator has checked the scope."""

    def __init__(self, store: AuditStore) -> None:
        self._store = store

    async def ListAudit(  # noqa: N802 (gRPC's name)
        self,
        request: audit_service_pb2.ListAuditRequest,
        context: Any,  # noqa: ARG002
    ) -> audit_service_pb2.ListAuditResponse:
        """See audit_service.proto."""
        fields = Fields()
        size = fields.page_size("page_size", request.page_size, default=100, maximum=1000)
        for name in ("tenant", "key_id", "method", "target", "status"):
            fields.text(name, getattr(request, name), maximum=256)
            fields.check("\0" not in getattr(request, name), name, "must not contain a NUL")
        start, end = (_time(fields, request, name) for name in ("start_time", "end_time"))
        fields.check(start is None or end is None or start < end, "start_time", "must be before end_time")
        fields.done()
        who = principal()
        tenant = request.tenant or ("" if ADMIN in who.roles else who.tenant)
        if tenant:
            check_tenant(who, tenant, "audit log")
        wanted = Wanted(tenant, request.key_id, request.method.lstrip("/"), request.target, request.status, start, end)
        entries = await self._store.page(wanted, _position(request.page_token), size)
        token = ""
        if len(entries) == size:
            token = encode_token(((entries[-1].time - _EPOCH) // _MICROSECOND, entries[-1].entry_id.hex))
        return audit_service_pb2.ListAuditResponse(entries=map(_to_proto, entries), next_page_token=token)


def _position(token: str) -> tuple[datetime, UUID] | None:
    if not token:
        return None
    microseconds, entry_id = decode_token("page_token", token, (int, str))
    try:
        return _EPOCH + timedelta(microseconds=microseconds), UUID(hex=entry_id)
    except (OverflowError, ValueError):
        raise bad_token("page_token") from None


def _time(fields: Fields, request: audit_service_pb2.ListAuditRequest, name: str) -> datetime | None:
    if not request.HasField(name):  # type: ignore[arg-type]
        return None
    value: Timestamp = getattr(request, name)
    return value.ToDatetime(UTC) if fields.timestamp(name, value) else None


def _to_proto(entry: Entry) -> audit_service_pb2.AuditEntry:
    message = audit_service_pb2.AuditEntry(
        tenant=entry.tenant,
        key_id=entry.key_id,
        method=entry.method,
        target=entry.target,
        request_id=entry.request_id,
        status=entry.status,
        client_address=entry.client_address,
    )
    message.time.FromDatetime(entry.time)
    return message
