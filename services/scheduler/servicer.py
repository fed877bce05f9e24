"""SandboxService and LeaseService: proto to domain and back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

from orchard.sandbox.v1 import (
    lease_service_pb2,
    lease_service_pb2_grpc,
    sandbox_pb2,
    sandbox_service_pb2,
    sandbox_service_pb2_grpc,
)

from services.common import quota_proto
from services.common.auth import EXPECTS_SECRET_ENV_KEY, principal
from services.common.errors import PermissionDeniedError
from services.common.pages import decode_token, encode_token
from services.common.states import State
from services.common.times import ms_of_duration, now_ms, to_timestamp
from services.common.validation import DAY_SECONDS, Fields
from services.scheduler import servicer_specs
from services.scheduler.records import Record
from services.scheduler.service import Scheduler
from services.scheduler.servicer_specs import Defaults

_HEARTBEAT_IDS: Final = 1000
_ACTIVITIES: Final = 10_000
_QUOTAS: Final = 1000


class SandboxServicer(sandbox_service_pb2_grpc.SandboxServiceServicer):
    """Serves orchard.sandbox.v1.SandboxService to gateways."""

    def __init__(self, scheduler: Scheduler, defaults: Defaults, stopping: asyncio.Event) -> None:
        self._scheduler = scheduler
        self._defaults = defaults
        self._stopping = stopping

    async def CreateSandbox(  # noqa: N802 (gRPC's names, here and below)
        self, request: sandbox_service_pb2.CreateSandboxRequest, context: Any
    ) -> sandbox_service_pb2.CreateSandboxResponse:
        """See sandbox_service.proto."""
        fields = Fields()
        fields.sandbox_id("sandbox_id", request.sandbox_id, optional=True)
        fields.token_id("request_id", request.request_id, optional=True)
        servicer_specs.check(request.spec, fields)
        fields.check(not request.secret_env, "secret_env", "must not reach the scheduler")
        who = principal()
        lifetime_ms = self._scheduler.lifetime_ms(who.quota)
        servicer_specs.check_lifetime(request.spec, lifetime_ms, fields)
        fields.done()
        expects_secret = any(key == EXPECTS_SECRET_ENV_KEY for key, _ in context.invocation_metadata())
        spec = servicer_specs.admitted(request.spec, self._defaults, lifetime_ms)
        record = await self._scheduler.create(
            who.tenant,
            request.sandbox_id,
            request.request_id,
            spec.SerializeToString(deterministic=True),
            servicer_specs.spec_hash(request.sandbox_id, request.spec, expects_secret_env=expects_secret),
            expects_secret_env=expects_secret,
            quota=who.quota,
        )
        return sandbox_service_pb2.CreateSandboxResponse(sandbox=to_proto(record))

    async def GetSandbox(  # noqa: N802
        self,
        request: sandbox_service_pb2.GetSandboxRequest,
        context: Any,  # noqa: ARG002
    ) -> sandbox_service_pb2.GetSandboxResponse:
        """See sandbox_service.proto."""
        _check_id(request.sandbox_id)
        record = await self._scheduler.get(principal().tenant, request.sandbox_id)
        return sandbox_service_pb2.GetSandboxResponse(sandbox=to_proto(record))

    async def ListSandboxes(  # noqa: N802
        self,
        request: sandbox_service_pb2.ListSandboxesRequest,
        context: Any,  # noqa: ARG002
    ) -> sandbox_service_pb2.ListSandboxesResponse:
        """See sandbox_service.proto."""
        fields = Fields()
        size = fields.page_size("page_size", request.page_size, default=100, maximum=1000)
        fields.labels("labels", request.labels)
        for index, state in enumerate(request.states):
            fields.check(0 < state <= max(State), f"states[{index}]", "is not a known state")
        fields.done()
        before = decode_token("page_token", request.page_token, (int, str)) if request.page_token else None
        records, after = await self._scheduler.list_page(
            principal().tenant,
            states=frozenset(State(state) for state in request.states),
            labels=request.labels,
            labels_of=servicer_specs.labels_of,
            before=before,
            count=size,
        )
        return sandbox_service_pb2.ListSandboxesResponse(
            sandboxes=[to_proto(record) for record in records],
            next_page_token=encode_token(after) if after else "",
        )

    async def WaitSandbox(  # noqa: N802
        self,
        request: sandbox_service_pb2.WaitSandboxRequest,
        context: Any,  # noqa: ARG002
    ) -> AsyncIterator[sandbox_service_pb2.WaitSandboxResponse]:
        """See sandbox_service.proto."""
        _check_id(request.sandbox_id)
        async for record in self._scheduler.wait(
            principal().tenant, request.sandbox_id, until_terminal=request.until_terminal, stopping=self._stopping
        ):
            yield sandbox_service_pb2.WaitSandboxResponse(sandbox=to_proto(record))

    async def UpdateSandbox(  # noqa: N802
        self,
        request: sandbox_service_pb2.UpdateSandboxRequest,
        context: Any,  # noqa: ARG002
    ) -> sandbox_service_pb2.UpdateSandboxResponse:
        """See sandbox_service.proto."""
        fields = Fields()
        fields.sandbox_id("sandbox_id", request.sandbox_id)
        fields.duration("ttl", request.ttl, minimum=1, maximum=30 * DAY_SECONDS)
        fields.done()
        record = await self._scheduler.update(principal().tenant, request.sandbox_id, ms_of_duration(request.ttl))
        return sandbox_service_pb2.UpdateSandboxResponse(sandbox=to_proto(record))

    async def DeleteSandbox(  # noqa: N802
        self,
        request: sandbox_service_pb2.DeleteSandboxRequest,
        context: Any,  # noqa: ARG002
    ) -> sandbox_service_pb2.DeleteSandboxResponse:
        """See sandbox_service.proto."""
        fields = Fields()
        fields.sandbox_id("sandbox_id", request.sandbox_id)
        fields.text("uid", request.uid, maximum=128)
        fields.done()
        record = await self._scheduler.delete(principal().tenant, request.sandbox_id, request.uid)
        return sandbox_service_pb2.DeleteSandboxResponse(sandbox=to_proto(record))

    async def Heartbeat(  # noqa: N802
        self,
        request: sandbox_service_pb2.HeartbeatRequest,
        context: Any,  # noqa: ARG002
    ) -> sandbox_service_pb2.HeartbeatResponse:
        """See sandbox_service.proto."""
        fields = Fields()
        fields.check(
            1 <= len(request.sandbox_ids) <= _HEARTBEAT_IDS, "sandbox_ids", f"must hold 1 to {_HEARTBEAT_IDS:,} ids"
        )
        for index, sandbox_id in enumerate(request.sandbox_ids[:_HEARTBEAT_IDS]):
            fields.sandbox_id(f"sandbox_ids[{index}]", sandbox_id)
        fields.done()
        missing = await self._scheduler.heartbeat(principal().tenant, request.sandbox_ids)
        return sandbox_service_pb2.HeartbeatResponse(missing_sandbox_ids=missing, renew_time=to_timestamp(now_ms()))


class LeaseServicer(lease_service_pb2_grpc.LeaseServiceServicer):
    """Serves orchard.sandbox.v1.LeaseService to gateways."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    async def ReportActivity(  # noqa: N802
        self,
        request: lease_service_pb2.ReportActivityRequest,
        context: Any,  # noqa: ARG002
    ) -> lease_service_pb2.ReportActivityResponse:
        """See lease_service.proto."""
        _gateways_only()
        fields = Fields()
        fields.check(len(request.activities) <= _ACTIVITIES, "activities", f"must be at most {_ACTIVITIES:,}")
        fields.done()
        if request.activities:
            await self._scheduler.report_activity([(one.tenant, one.sandbox_id, one.uid) for one in request.activities])
        return lease_service_pb2.ReportActivityResponse()

    async def NoteQuotas(  # noqa: N802
        self,
        request: lease_service_pb2.NoteQuotasRequest,
        context: Any,  # noqa: ARG002
    ) -> lease_service_pb2.NoteQuotasResponse:
        """See lease_service.proto."""
        _gateways_only()
        fields = Fields()
        fields.check(len(request.quotas) <= _QUOTAS, "quotas", f"must be at most {_QUOTAS:,}")
        for index, one in enumerate(request.quotas[:_QUOTAS]):
            fields.tenant(f"quotas[{index}].tenant", one.tenant)
            quota_proto.check(one.quota, f"quotas[{index}].quota", fields)
        fields.done()
        await self._scheduler.note_quotas(
            {one.tenant: quota_proto.from_proto(one.quota, one.revision) for one in request.quotas}
        )
        return lease_service_pb2.NoteQuotasResponse()


def _gateways_only() -> None:
    if "gateway" not in principal().roles:
        raise PermissionDeniedError("this is for gateways alone", reason="GATEWAY_ONLY")


def _check_id(sandbox_id: str) -> None:
    fields = Fields()
    fields.sandbox_id("sandbox_id", sandbox_id)
    fields.done()


def to_proto(record: Record) -> sandbox_pb2.Sandbox:
    """The wire form of a record."""
    return sandbox_pb2.Sandbox(
        sandbox_id=record.sandbox_id,
        uid=record.uid,
        tenant=record.tenant,
        spec=sandbox_pb2.SandboxSpec.FromString(record.spec),
        state=record.state.value,  # type: ignore[arg-type]  # the numbers are the proto's
        reason=record.reason.value,  # type: ignore[arg-type]
        message=record.message,
        create_time=to_timestamp(record.create_ms),
        ready_time=to_timestamp(record.ready_ms),
        end_time=to_timestamp(record.end_ms),
        expire_time=to_timestamp(record.expire_ms),
        request_id=record.request_id,
    )
