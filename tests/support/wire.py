"""The platform through generated stubs alone, as any language would see it."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from orchard.admin.v1 import key_service_pb2_grpc, usage_service_pb2_grpc, version_service_pb2_grpc
from orchard.exec.v1 import (
    exec_pb2,
    exec_service_pb2,
    exec_service_pb2_grpc,
    file_service_pb2_grpc,
    port_service_pb2_grpc,
)
from orchard.sandbox.v1 import sandbox_pb2, sandbox_service_pb2, sandbox_service_pb2_grpc


class Wire:
    """Stubs and the key, and the few calls that nearly every test makes.

    `image` is what sandboxes are made of where a test names none; a platform of one machine needs no name.
    """

    def __init__(self, channel: grpc.aio.Channel, api_key: str, *, image: str = "") -> None:
        self.channel = channel
        self.image = image
        self.metadata = (("authorization", f"Bearer {api_key}"),)
        self.sandboxes: Any = sandbox_service_pb2_grpc.SandboxServiceStub(channel)
        self.execs: Any = exec_service_pb2_grpc.ExecServiceStub(channel)
        self.files: Any = file_service_pb2_grpc.FileServiceStub(channel)
        self.ports: Any = port_service_pb2_grpc.PortServiceStub(channel)
        self.keys: Any = key_service_pb2_grpc.KeyServiceStub(channel)
        self.usage: Any = usage_service_pb2_grpc.UsageServiceStub(channel)
        self.version: Any = version_service_pb2_grpc.VersionServiceStub(channel)

    def with_key(self, api_key: str) -> Wire:
        """The same platform as another key sees it."""
        return Wire(self.channel, api_key, image=self.image)

    async def call(self, method: Any, request: Message, *, timeout: float = 110) -> Any:
        return await method(request, metadata=self.metadata, timeout=timeout)

    async def create(
        self, sandbox_id: str = "", *, request_id: str = "", secret_env: Mapping[str, str] | None = None, **spec: Any
    ) -> sandbox_pb2.Sandbox:
        request = sandbox_service_pb2.CreateSandboxRequest(
            sandbox_id=sandbox_id,
            request_id=request_id,
            spec=sandbox_pb2.SandboxSpec(**{"image": self.image, **spec}),
            secret_env=secret_env,
        )
        return (await self.call(self.sandboxes.CreateSandbox, request)).sandbox

    async def wait(
        self, sandbox_id: str, *, until_terminal: bool = False, timeout: float = 110
    ) -> list[sandbox_pb2.Sandbox]:
        """Every state that was told."""
        request = sandbox_service_pb2.WaitSandboxRequest(sandbox_id=sandbox_id, until_terminal=until_terminal)
        call = self.sandboxes.WaitSandbox(request, metadata=self.metadata, timeout=timeout)
        return [response.sandbox async for response in call]

    async def ready(self, sandbox_id: str = "", **more: Any) -> str:
        created = await self.create(sandbox_id, **more)
        last = (await self.wait(created.sandbox_id))[-1]
        assert last.state == sandbox_pb2.SANDBOX_STATE_READY, last
        return created.sandbox_id

    async def get(self, sandbox_id: str) -> sandbox_pb2.Sandbox:
        request = sandbox_service_pb2.GetSandboxRequest(sandbox_id=sandbox_id)
        return (await self.call(self.sandboxes.GetSandbox, request)).sandbox

    async def delete(self, sandbox_id: str, uid: str = "") -> sandbox_pb2.Sandbox:
        request = sandbox_service_pb2.DeleteSandboxRequest(sandbox_id=sandbox_id, uid=uid)
        return (await self.call(self.sandboxes.DeleteSandbox, request)).sandbox

    async def run(
        self, sandbox_id: str, shell: str, *, exec_id: str = "", wait: float = 60, **spec: Any
    ) -> exec_service_pb2.StartExecResponse:
        request = exec_service_pb2.StartExecRequest(
            sandbox_id=sandbox_id,
            exec_id=exec_id or f"e-{secrets.token_hex(6)}",
            spec=exec_pb2.ExecSpec(shell=shell, **spec),
            wait=seconds(wait),
        )
        return await self.call(self.execs.StartExec, request)

    async def output(self, sandbox_id: str, shell: str, **more: Any) -> bytes:
        """What a short command writes; it must succeed."""
        reply = await self.run(sandbox_id, shell, **more)
        assert reply.output_complete, reply.exec
        data = b"".join(chunk.data for chunk in reply.output)
        assert reply.exec.result.exit_code == 0, (reply.exec.result, data)
        return data


@asynccontextmanager
async def wire_to(endpoint: str, api_key: str, *, image: str = "") -> AsyncIterator[Wire]:
    async with grpc.aio.insecure_channel(endpoint, options=[("grpc.max_receive_message_length", 4 << 20)]) as channel:
        yield Wire(channel, api_key, image=image)


def seconds(value: float) -> Duration:
    result = Duration()
    result.FromNanoseconds(int(value * 1e9))
    return result


def details(error: grpc.aio.AioRpcError) -> dict[type[Message], list[Any]]:
    """The google.rpc details of an error, by type."""
    found: dict[type[Message], list[Any]] = {}
    for key, value in error.trailing_metadata() or ():
        if key != "grpc-status-details-bin":
            continue
        for packed in status_pb2.Status.FromString(value).details:
            for kind in (
                error_details_pb2.ErrorInfo,
                error_details_pb2.BadRequest,
                error_details_pb2.RetryInfo,
                error_details_pb2.PreconditionFailure,
                error_details_pb2.QuotaFailure,
            ):
                message = kind()
                if packed.Unpack(message):
                    found.setdefault(kind, []).append(message)
    return found


def reason_of(error: grpc.aio.AioRpcError) -> str:
    return str(details(error)[error_details_pb2.ErrorInfo][0].reason)


def fields_of(error: grpc.aio.AioRpcError) -> list[str]:
    return [
        violation.field for bad in details(error)[error_details_pb2.BadRequest] for violation in bad.field_violations
    ]
