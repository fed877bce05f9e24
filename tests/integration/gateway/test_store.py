"""A database that is away, stands still or is moved from one schema to another."""

import asyncio

import psycopg
import pytest
import sqlalchemy as sa

from services.common.db import connect, migrate
from services.common.errors import (
    UnavailableError,
)
from services.common.health import Health
from services.common.tasks import TaskGroup
from services.gateway.__main__ import MIGRATIONS
from services.gateway.keys import Keys
from services.gateway.store import SCHEMA, GatewayStore
from tests.support.stores import stoppable

BACKSTOP = 110


async def test_a_database_that_is_away_is_unavailable_and_names_no_driver() -> None:
    store = GatewayStore(connect("postgresql://nobody@/none?host=/nonexistent"))
    with pytest.raises(UnavailableError) as caught:
        await store.find_key("x")
    assert caught.value.reason == "DATABASE_UNAVAILABLE"
    assert "psycopg" not in caught.value.message
    await store.close()


async def test_a_mistake_of_ours_is_not_called_the_database_being_away(store: GatewayStore) -> None:
    with pytest.raises(sa.exc.ProgrammingError):
        async with store.transaction() as connection:
            await connection.execute(sa.text("SELECT nothing_of_that_name"))


async def test_a_database_that_stands_still_is_noticed_and_found_again(database: str) -> None:
    health = Health(["database"])
    store = GatewayStore(connect(database), timeout_seconds=0.5)
    with stoppable(database) as (stop, go_on):
        async with TaskGroup() as tasks:
            tasks.start("read the keys", Keys(store, health).run_refresh(0.01))
            await until_wrong(health, False)
            stop()
            await until_wrong(health, True)
            go_on()
            await until_wrong(health, False)
            assert not tasks.failed.done()
    await store.close()


async def until_wrong(health: Health, wrong: bool) -> None:
    async with asyncio.timeout(BACKSTOP):
        while bool(health.wrong) is not wrong:
            await asyncio.sleep(0.01)


def test_migrations_go_up_and_down_on_data(postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA IF EXISTS gateway CASCADE")
        migrate(postgres_url, schema=SCHEMA, migrations=MIGRATIONS, revision="0001")
        connection.execute("INSERT INTO gateway.api_keys VALUES ('k', 't', 'n', '\\x00', '{user}', now())")
        migrate(postgres_url, schema=SCHEMA, migrations=MIGRATIONS)
        migrate(postgres_url, schema=SCHEMA, migrations=MIGRATIONS)
        assert connection.execute("SELECT count(*) FROM gateway.sandbox_usage").fetchone() == (0,)
        assert connection.execute("SELECT count(*) FROM gateway.tenants").fetchone() == (0,)
        migrate(postgres_url, schema=SCHEMA, migrations=MIGRATIONS, revision="-4")
        for table in ("sandbox_usage", "tenants"):
            assert connection.execute(f"SELECT to_regclass('gateway.{table}')").fetchone() == (None,)
        assert connection.execute("SELECT key_id FROM gateway.api_keys").fetchall() == [("k",)]
        migrate(postgres_url, schema=SCHEMA, migrations=MIGRATIONS)
