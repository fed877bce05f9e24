"""The node daemon as the scheduler sees it, whatever that runs sandboxes with: create, delete and update."""

from __future__ import annotations

from typing import Final

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2
from orchard.node.v1 import node_service_pb2, node_service_pb2_grpc
from orchard.sandbox.v1 import sandbox_pb2

from services.common.channel import connect
from services.common.errors import (
    STATUS_DETAILS_KEY,
    InvalidArgumentError,
    NotFoundError,
    OrchardError,
    UnavailableError,
)
from services.common.times import to_timestamp
from services.scheduler.records import Incarnation, Record

_CREATE_SECONDS: Final = 30.0
_DELETE_SECONDS: Final = 30.0
_PLAIN_MODES: Final = (
    sandbox_pb2.NETWORK_MODE_UNSPECIFIED,
    sandbox_pb2.NETWORK_MODE_NONE,
    sandbox_pb2.NETWORK_MODE_HOST,
)


class NodeRuntime:
    """One node daemon."""

    def __init__(self, address: str, *, host_root: bool = True) -> None:
        """`host_root`: every node can make a sandbox without an image."""
        self._host_root = host_root
        self._channel = connect(address)
        self._stub = node_service_pb2_grpc.NodeServiceStub(self._channel)

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def check(self, tenant: str, sandbox_id: str, spec: bytes) -> None:
        """See service.Runtime. What every node can do is not asked."""
        parsed = sandbox_pb2.SandboxSpec.FromString(spec)
        plain = self._host_root and not parsed.image and parsed.network.mode in _PLAIN_MODES
        of_clusters = parsed.image_pull_secret or parsed.node_selector or parsed.runtime_class
        if plain and not (parsed.resources.gpu or parsed.resources.disk_bytes or of_clusters):
            return
        request = node_service_pb2.CreateSandboxRequest(
            tenant=tenant, sandbox_id=sandbox_id, spec=parsed, validate_only=True
        )
        try:
            await self._stub.CreateSandbox(request, timeout=_CREATE_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise _translated(error) from None

    async def create(self, record: Record) -> str:
        """See service.Runtime."""
        request = node_service_pb2.CreateSandboxRequest(
            tenant=record.tenant,
            sandbox_id=record.sandbox_id,
            request_id=record.request_id,
            spec_hash=record.spec_hash,
            spec=sandbox_pb2.SandboxSpec.FromString(record.spec),
            expire_time=to_timestamp(record.expire_ms),
            create_time=to_timestamp(record.create_ms),
            expects_secret_env=record.expects_secret_env,
        )
        try:
            response = await self._stub.CreateSandbox(request, timeout=_CREATE_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise _translated(error) from None
        return response.sandbox.uid

    async def delete(self, gone: Incarnation, *, force: bool = False) -> None:  # noqa: ARG002 (the node always ends it)
        """See service.Runtime."""
        request = node_service_pb2.DeleteSandboxRequest(uid=gone.uid)
        try:
            await self._stub.DeleteSandbox(request, timeout=_DELETE_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise _translated(error) from None

    async def is_gone(self, missing: Incarnation) -> bool:  # noqa: ARG002
        """See service.Runtime. The watcher's stream is the node's own word: there is nobody else to ask."""
        return True

    async def update(self, kept: Incarnation, expire_ms: int) -> None:
        """See service.Runtime."""
        request = node_service_pb2.UpdateSandboxRequest(uid=kept.uid, expire_time=to_timestamp(expire_ms))
        try:
            await self._stub.UpdateSandbox(request, timeout=_CREATE_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise _translated(error) from None


def _translated(error: grpc.aio.AioRpcError) -> OrchardError:
    """The node's error as ours: what will never work keeps its reason, everything else may work later."""
    reason, metadata = "", {}
    status = status_pb2.Status()
    for key, value in error.trailing_metadata() or ():
        if key == STATUS_DETAILS_KEY and isinstance(value, bytes):
            status.ParseFromString(value)
    bad = error_details_pb2.BadRequest()
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            reason, metadata = info.reason, {key: value for key, value in info.metadata.items() if key != "reason"}
        detail.Unpack(bad)
    message = error.details() or error.code().name
    if error.code() is grpc.StatusCode.NOT_FOUND:
        return NotFoundError(message, reason=reason or None, **metadata)
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
        field = bad.field_violations[0] if bad.field_violations else None
        return InvalidArgumentError.of(
            field.field if field else "spec", field.description if field else message, reason=reason or None, **metadata
        )
    away = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
    what = "does not answer" if away else "cannot do it now"
    return UnavailableError(f"the node daemon {what}: {message}", reason="RUNTIME_UNAVAILABLE")
