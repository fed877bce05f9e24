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

_POLL_SECONDS: Final = 1.0
_STATEMENT_SECONDS: Final = 15.0


class QuestionLocks:
    """Locks of one replica. Within it a question must come once at a time: the database would let it in twice."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._connection: AsyncConnection | None = None
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def held(self, name: str) -> AsyncIterator[None]:
        """Hold the lock of a name; waits for whoever has it.

        Raises:
            UnavailableError: the database does not answer.
        """
        key = int.from_bytes(hashlib.sha256(f"orchard:judge:{name}".encode()).digest()[:8], signed=True)
        backoff = Backoff(_POLL_SECONDS, _POLL_SECONDS)
        while not await self._try(key):  # noqa: ASYNC110 (another process has it)
            await asyncio.sleep(backoff.next())
        try:
            yield
        finally:
            await asyncio.shield(self._release(key))

    async def _try(self, key: int) -> bool:
        # Whole, whoever is cancelled: a statement that is cut short would cost the connection, and with it every lock.
        trying = asyncio.ensure_future(self._call(sa.func.pg_try_advisory_lock(key)))
        try:
            return await asyncio.shield(trying)
        except asyncio.CancelledError:
            if await trying:
                await self._release(key)
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
