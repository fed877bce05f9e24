"""Asks a service's own health, for as long as it lives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from services.local.supervisor.channel import open_channel

_POLL_SECONDS: Final = 0.01
_AGAIN_SECONDS: Final = 0.1


async def watch_health(address: str, report: Callable[[bool], None]) -> None:
    """Report whether the service at "host:port" or "unix:/path" is SERVING, at every change, until cancelled."""
    # Cheaper and quicker than gRPC's own retries while the service still starts.
    while not await _connects(address):  # noqa: ASYNC110 (another process's event)
        await asyncio.sleep(_POLL_SECONDS)
    async with open_channel(address) as channel:
        from grpc.aio import AioRpcError
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            call = stub.Watch(health_pb2.HealthCheckRequest())
            try:
                async for response in call:
                    report(response.status == health_pb2.HealthCheckResponse.SERVING)
            except AioRpcError:
                report(False)
            finally:
                call.cancel()
            await asyncio.sleep(_AGAIN_SECONDS)


async def _connects(address: str) -> bool:
    try:
        async with asyncio.timeout(1.0):
            if address.startswith("unix:"):
                _, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
            else:
                host, _, port = address.rpartition(":")
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
