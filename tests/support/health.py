"""What a service itself says of its health."""

from __future__ import annotations

import asyncio

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def check(address: str, name: str = "") -> int:
    """The answer to one Check."""
    async with grpc.aio.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=name)
        return (await health_pb2_grpc.HealthStub(channel).Check(request, timeout=110)).status


def wait_reached(address: str, *, seconds: float = 110.0) -> None:
    """Wait until a service answers at all, whatever it says of itself.

    Not with `grpc.channel_ready_future`: its thread goes on asking for the state of the channel, and raises when it is
    closed at that moment.
    """
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest()
        health_pb2_grpc.HealthStub(channel).Check(request, timeout=seconds, wait_for_ready=True)


async def wait_health(address: str, status: int, *, seconds: float = 100.0) -> None:
    """Wait until a service says this of itself; it may be down meanwhile."""
    async with asyncio.timeout(seconds), grpc.aio.insecure_channel(address) as channel:
        while True:
            try:
                async for told in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
                    if told.status == status:
                        return
            except grpc.aio.AioRpcError as error:
                assert error.code() == grpc.StatusCode.UNAVAILABLE, error
