"""Calls to schedulers as a gateway makes them: at whichever answers, until one does."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from orchard.sandbox.v1 import sandbox_pb2, sandbox_service_pb2, sandbox_service_pb2_grpc

from services.common.quota import UNLIMITED, Quota
from services.common.tokens import PRINCIPAL_KEY, Principal, Signer
from tests.support.services import ServiceProcess

BACKSTOP = 120
TENANT = "t"
ENDED = (sandbox_pb2.SANDBOX_STATE_DELETED, sandbox_pb2.SANDBOX_STATE_FAILED)


class Schedulers:
    """Several, any of which may be down at any time."""

    def __init__(self, services: Sequence[ServiceProcess], signer: Signer, spec: sandbox_pb2.SandboxSpec) -> None:
        """`spec` is of creates that name none."""
        self.services = services
        self.quota: Quota = UNLIMITED
        self._signer = signer
        self._spec = spec

    @asynccontextmanager
    async def _stub(self) -> AsyncIterator[Any]:
        async with grpc.aio.insecure_channel(random.choice(self.services).address) as channel:
            yield sandbox_service_pb2_grpc.SandboxServiceStub(channel)

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        who = Principal(TENANT, "key", frozenset({"user"}), self.quota)
        return ((PRINCIPAL_KEY, self._signer.principal_token(who)),)

    async def call(self, method: str, request: Any) -> Any:
        """One idempotent call."""
        async with asyncio.timeout(BACKSTOP):
            while True:
                async with self._stub() as stub:
                    try:
                        return await getattr(stub, method)(request, metadata=self._metadata(), timeout=20)
                    except grpc.aio.AioRpcError as error:
                        if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                            raise
                await asyncio.sleep(0.05)

    async def create(
        self, name: str, spec: sandbox_pb2.SandboxSpec | None = None, *, request_id: str = ""
    ) -> sandbox_pb2.Sandbox:
        """Idempotent: of one name and request id there is one."""
        request = sandbox_service_pb2.CreateSandboxRequest(
            sandbox_id=name, request_id=request_id or f"r-{name}", spec=spec or self._spec
        )
        made: sandbox_pb2.Sandbox = (await self.call("CreateSandbox", request)).sandbox
        return made

    async def get(self, name: str) -> sandbox_pb2.Sandbox:
        request = sandbox_service_pb2.GetSandboxRequest(sandbox_id=name)
        found: sandbox_pb2.Sandbox = (await self.call("GetSandbox", request)).sandbox
        return found

    async def update(self, name: str, seconds: int) -> sandbox_pb2.Sandbox:
        request = sandbox_service_pb2.UpdateSandboxRequest(sandbox_id=name, ttl=Duration(seconds=seconds))
        found: sandbox_pb2.Sandbox = (await self.call("UpdateSandbox", request)).sandbox
        return found

    async def delete(self, name: str) -> None:
        await self.call("DeleteSandbox", sandbox_service_pb2.DeleteSandboxRequest(sandbox_id=name))

    async def until(self, name: str, state: sandbox_pb2.SandboxState.ValueType) -> sandbox_pb2.Sandbox:
        """Wait, by stream; it may not end otherwise."""
        request = sandbox_service_pb2.WaitSandboxRequest(sandbox_id=name, until_terminal=True)
        async with asyncio.timeout(BACKSTOP):
            while True:
                async with self._stub() as stub:
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        async for response in stub.WaitSandbox(request, metadata=self._metadata(), timeout=BACKSTOP):
                            now: sandbox_pb2.Sandbox = response.sandbox
                            if now.state == state:
                                return now
                            assert now.state not in ENDED, now
                await asyncio.sleep(0.05)

    async def ready(self, name: str) -> sandbox_pb2.Sandbox:
        return await self.until(name, sandbox_pb2.SANDBOX_STATE_READY)


async def kill_again_and_again(services: Sequence[ServiceProcess], chosen: random.Random) -> None:
    """kill -9 of either, for ever; each is up again before the next goes."""
    while True:
        await asyncio.sleep(chosen.uniform(0.2, 1.5))
        victim = chosen.choice(services)
        victim.kill()
        victim.start()
        await victim.serving()
