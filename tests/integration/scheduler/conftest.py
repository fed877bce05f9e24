from collections.abc import AsyncIterator

import pytest
import redis.asyncio as redis

from services.scheduler.store import LeaseStore


@pytest.fixture
async def valkey(valkey_url: str) -> AsyncIterator[redis.Redis]:
    """The server itself, emptied."""
    async with redis.Redis.from_url(valkey_url) as client:
        await client.flushall()
        yield client


@pytest.fixture
async def store(valkey: redis.Redis, valkey_url: str) -> AsyncIterator[LeaseStore]:
    """Depends on `valkey`, which empties the server; it knows that there is nothing."""
    store = LeaseStore(valkey_url)
    await store.mark_rebuilt()
    yield store
    await store.close()
