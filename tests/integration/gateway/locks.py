"""Tables that a test holds, and who waits for them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psycopg

BACKSTOP = 110


@asynccontextmanager
async def held_up(database: str, table: str) -> AsyncIterator[None]:
    """Nobody else gets at a table."""
    async with await psycopg.AsyncConnection.connect(database) as connection:
        await connection.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
        yield


async def waiting_for_locks(connection: psycopg.AsyncConnection) -> list[int]:
    """Who waits for a lock; at least one does."""
    query = "SELECT DISTINCT pid FROM pg_locks WHERE NOT granted AND locktype = 'relation'"
    async with asyncio.timeout(BACKSTOP):
        while not (rows := await (await connection.execute(query)).fetchall()):
            await asyncio.sleep(0.02)
    return [pid for (pid,) in rows]
