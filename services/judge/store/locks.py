"""One judge at a time for a question, over all replicas.

An advisory lock of the database that a connection of its own holds: when its process dies the lock is free at once, and
the next one goes on from the journal.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from services.common.backoff import Backoff
from services.common.db import AWAY
from services.common.errors import UnavailableError
from services.judge.endings import whole

_POLL_SECONDS: Final = 1.0
_STATEMENT_SECONDS: Final = 15.0
_MOST_HELD: Final = 1000
"""Of one replica at once. The server keeps advisory locks in a table of a fixed size: 6,400, as it is shipped."""


class QuestionLocks:
    """Locks of one replica. Within it a question must come once at a time: the database would let it in twice."""

    def __init__(self, engine: AsyncEngine, *, most: int = _MOST_HELD) -> None:
        self._engine = engine
        self._connection: AsyncConnection | None = None
        self._turn = asyncio.Lock()
        self._room = asyncio.Semaphore(most)

    @asynccontextmanager
    async def held(self, name: str) -> AsyncIterator[None]:
        """Hold the lock of a name; waits for whoever has it.

        Raises:
            UnavailableError: the database does not answer.
        """
        key = int.from_bytes(hashlib.sha256(f"orchard:judge:{name}".encode()).digest()[:8], signed=True)
        backoff = Backoff(_POLL_SECONDS, _POLL_SECONDS)
        async with self._room:
            while not await self._try(key):  # noqa: ASYNC110 (another process has it)
                await asyncio.sleep(backoff.next())
            try:
                yield
            finally:
                # Whole, whoever is cancelled: a lock that is left behind would be held as long as this process lives.
                await whole(self._release(key))

    async def _try(self, key: int) -> bool:
        # A statement that is cut short would cost the connection, and with it every lock.
        trying = asyncio.ensure_future(self._call(sa.func.pg_try_advisory_lock(key)))
        try:
            return await whole(_result(trying))
        except asyncio.CancelledError:
            if trying.exception() is None and trying.result():
                await whole(self._release(key))
            raise

    async def close(self) -> None:
        """Let go of everything."""
        async with self._turn:
            await self._drop()

    async def _release(self, key: int) -> None:
        try:
            await self._call(sa.func.pg_advisory_unlock(key))
        except UnavailableError:
            # With the connection the lock is gone too.
            return

    async def _call(self, function: sa.Function[bool]) -> bool:
        async with self._turn:
            try:
                async with asyncio.timeout(_STATEMENT_SECONDS):
                    if self._connection is None:
                        connection = await self._engine.connect()
                        self._connection = await connection.execution_options(isolation_level="AUTOCOMMIT")
                    return bool(await self._connection.scalar(sa.select(function)))
            except AWAY as error:
                await self._drop()
                raise UnavailableError("the database does not answer; retry", reason="DATABASE_UNAVAILABLE") from error

    async def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                await connection.invalidate()
                await connection.close()
            except AWAY:
                return


async def _result(future: asyncio.Future[bool]) -> bool:
    return await future
