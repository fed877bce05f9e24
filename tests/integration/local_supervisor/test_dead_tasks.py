"""A background task that dies takes its service down loudly, and the supervisor starts the service anew.

What kills the tasks is what no retry would mend: a store that answers, and answers something that cannot be.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import psycopg
import pytest
import redis.asyncio as redis
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.health import NOT_SERVING, SERVING, wait_health
from tests.support.platform import PlatformProcess, wait_until


@asynccontextmanager
async def leases_of_another_type(platform: PlatformProcess) -> AsyncIterator[None]:
    async with redis.Redis.from_url(f"unix://{platform.run}/valkey.sock") as store:
        await store.set("orchard:leases", "not a sorted set")
        try:
            yield
        finally:
            await store.delete("orchard:leases")


@asynccontextmanager
async def keys_without_roles(platform: PlatformProcess) -> AsyncIterator[None]:
    url = f"postgresql://orchard@/postgres?host={platform.run}/pg"
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as database:
        await database.execute("ALTER TABLE gateway.api_keys RENAME COLUMN roles TO parts")
        try:
            yield
        finally:
            await database.execute("ALTER TABLE gateway.api_keys RENAME COLUMN parts TO roles")


# With each damage the tasks that may meet it first.
DAMAGES = {
    "scheduler": (leases_of_another_type, {"end leases", "reconcile"}),
    "gateway": (keys_without_roles, {"read the keys"}),
}


@pytest.mark.parametrize("service", DAMAGES)
async def test_its_service_says_so_ends_and_is_started_again(shared: PlatformProcess, service: str) -> None:
    damage, tasks = DAMAGES[service]
    await wait_health(shared.address(service), SERVING)
    before = shared.service_pid(service)
    said = len(shared.output())
    async with grpc.aio.insecure_channel(shared.address(service)) as channel:
        health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await health.read()).status == SERVING
        async with damage(shared):
            assert (await asyncio.wait_for(health.read(), 110)).status == NOT_SERVING
            await asyncio.to_thread(
                wait_until, lambda: f"{service} ended with exit code 1" in shared.output()[said:], "its end"
            )
        died = re.search(r"background task died task=(.*)", shared.output()[said:])
        assert died is not None
        assert died[1].strip('"') in tasks
    after = await asyncio.to_thread(shared.wait_ready, service, not_pid=before)
    assert after != before
    await wait_health(shared.address(service), SERVING)
