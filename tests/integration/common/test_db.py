"""Engines on a real PostgreSQL: dead connections, limits, and the driver's own connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from services.common.db import Database, connect
from services.common.errors import UnavailableError

POOL = 3
PID = sa.text("SELECT pg_backend_pid()")


@pytest.fixture
async def engine(postgres_url: str) -> AsyncIterator[AsyncEngine]:
    engine = connect(postgres_url, pool_size=POOL)
    yield engine
    await engine.dispose()


@pytest.fixture
def database(engine: AsyncEngine) -> Database:
    return Database(engine)


async def pids(database: Database) -> set[int]:
    """The servers of all pooled connections, each in use at the same time."""
    all_here = asyncio.Barrier(POOL)

    async def one() -> int:
        async with database.transaction() as connection:
            found: int = (await connection.execute(PID)).scalar_one()
            await all_here.wait()
            return found

    return set(await asyncio.gather(*(one() for _ in range(POOL))))


async def test_connections_that_the_server_closed_are_replaced_when_they_are_taken(
    database: Database, postgres_url: str
) -> None:
    before = await pids(database)
    assert len(before) == POOL
    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as other:
        for pid in before:
            await other.execute("SELECT pg_terminate_backend(%s, 60000)", [pid])
    after = await pids(database)
    assert len(after) == POOL
    assert not before & after
    assert await pids(database) == after


async def test_a_connection_that_dies_in_use_is_told_and_the_next_works(database: Database, postgres_url: str) -> None:
    for use in (database.transaction, database.driver, lambda: database.driver(autocommit=True)):
        with pytest.raises(UnavailableError) as caught:
            async with use() as connection:
                statement = PID if use == database.transaction else "SELECT pg_backend_pid()"
                pid = (await connection.execute(statement)).fetchone()
                pid = pid if isinstance(pid, tuple | sa.Row) else await pid
                async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as other:
                    await other.execute("SELECT pg_terminate_backend(%s, 60000)", [pid[0]])
                await connection.execute(statement)
        assert caught.value.reason == "DATABASE_UNAVAILABLE"
        assert len(await pids(database)) == POOL


async def shown(database: Database, name: str, seconds: float | None = None) -> str:
    async with database.transaction(timeout_seconds=seconds) as connection:
        value: str = (await connection.execute(sa.text(f"SHOW {name}"))).scalar_one()
        return value


async def test_the_server_bounds_statements_and_idle_transactions(database: Database, postgres_url: str) -> None:
    assert await shown(database, "statement_timeout") == "10s"
    assert await shown(database, "idle_in_transaction_session_timeout") == "30s"
    # Work that holds a transaction for longer says so, for itself alone.
    assert await shown(database, "idle_in_transaction_session_timeout", 600.0) == "615s"
    assert await shown(database, "idle_in_transaction_session_timeout") == "30s"
    with pytest.raises(UnavailableError):
        async with database.transaction() as connection:
            await connection.execute(sa.text("SET LOCAL statement_timeout = 50"))
            await connection.execute(sa.text("SELECT pg_sleep(60)"))


async def test_a_client_that_stands_still_loses_its_locks(database: Database, postgres_url: str) -> None:
    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as other:
        await other.execute("CREATE TABLE held (x int)")
        try:
            with pytest.raises(UnavailableError):
                async with database.transaction() as connection:
                    await connection.execute(sa.text("SET LOCAL idle_in_transaction_session_timeout = 50"))
                    await connection.execute(sa.text("LOCK TABLE held"))
                    await other.execute("INSERT INTO held VALUES (1)")
                    await connection.execute(PID)
        finally:
            await other.execute("DROP TABLE held")


async def test_a_peer_that_is_gone_is_found_by_keepalives(database: Database) -> None:
    async with database.driver() as connection:
        said = connection.info.get_parameters()
    assert (said["keepalives"], said["keepalives_idle"], said["tcp_user_timeout"]) == ("1", "10", "20000")


@pytest.mark.parametrize("autocommit", [False, True])
async def test_the_drivers_own_connection_keeps_what_is_whole_and_its_mode(
    database: Database, postgres_url: str, autocommit: bool
) -> None:
    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as other:
        await other.execute("CREATE TABLE kept (x int)")
        try:
            async with database.driver(autocommit=autocommit) as connection:
                await connection.execute("INSERT INTO kept VALUES (1)")
            with pytest.raises(psycopg.DataError):
                async with database.driver(autocommit=autocommit) as connection:
                    await connection.execute("INSERT INTO kept VALUES (2)")
                    await connection.execute("SELECT 1 / 0")
            rows = await (await other.execute("SELECT x FROM kept ORDER BY x")).fetchall()
            assert [row[0] for row in rows] == ([1, 2] if autocommit else [1])
            # Whoever has the connection next is in a transaction of its own.
            for _ in range(POOL):
                with pytest.raises(psycopg.DataError):
                    async with database.driver() as connection:
                        await connection.execute("INSERT INTO kept VALUES (3)")
                        await connection.execute("SELECT 1 / 0")
            rows = await (await other.execute("SELECT count(*) FROM kept WHERE x = 3")).fetchall()
            assert rows == [(0,)]
        finally:
            await other.execute("DROP TABLE kept")
