"""The gateway's tables in a real PostgreSQL."""

from collections.abc import AsyncIterator

import psycopg
import pytest

from services.common.db import connect, migrate
from services.gateway.__main__ import MIGRATIONS
from services.gateway.store import SCHEMA, GatewayStore


@pytest.fixture(scope="module")
def database(postgres_url: str) -> str:
    migrate(postgres_url, schema=SCHEMA, migrations=MIGRATIONS)
    return postgres_url


@pytest.fixture
async def store(database: str) -> AsyncIterator[GatewayStore]:
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("TRUNCATE gateway.api_keys, gateway.sandbox_usage, gateway.tenants")
    store = GatewayStore(connect(database))
    yield store
    await store.close()
