"""Asks a service's own health, for as long as it lives."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Final

_POLL_SECONDS: Final = 0.01
_AGAIN_SECONDS: Final = 0.1


async def watch_health(address: str, report: Callable[[bool], None]) -> None:
    """Report whether the service at "host:port" or "unix:/path" is SERVING, at every change, until cancelled."""
    # Cheaper and quicker than gRPC's own retries while the service still starts.
    while not await _connects(address):  # noqa: ASYNC110 (another process's event)
        await asyncio.sleep(_POLL_SECONDS)
    # Every fork of ours is followed by an exec; gRPC's fork support would only warn about its threads.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    import grpc.aio
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    options = (
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.max_reconnect_backoff_ms", 500),
    )
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            call = stub.Watch(health_pb2.HealthCheckRequest())
            try:
                async for response in call:
                    report(response.status == health_pb2.HealthCheckResponse.SERVING)
            except grpc.aio.AioRpcError:
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
