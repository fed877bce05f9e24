"""One judge at a time for a question, over all replicas.

An advisory lock of the database that a connection of its own holds: when its process dies the lock is free at once, and
the next one goes on from the journal.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

from sqlalchemy.ext.asyncio import AsyncEngine

from services.common.backoff import Backoff
from services.common.errors import UnavailableError
from services.judge.endings import whole
from services.judge.store.lanes import Company, Connection, Lane

_POLL_SECONDS: Final = 1.0
_MOST_HELD: Final = 1000
"""Of one replica at once. The server keeps advisory locks in a table of a fixed size: 6,400, as it is shipped."""
_TRY: Final = "SELECT pg_try_advisory_lock(key) FROM unnest(%s::bigint[]) AS key"
_FREE: Final = "SELECT pg_advisory_unlock(key) FROM unnest(%s::bigint[]) AS key"


class _Turn(NamedTuple):
    """Take a lock, or let it go."""

    key: int
    take: bool


class QuestionLocks:
    """Locks of one replica. Within it a question must come once at a time: the database would let it in twice."""

    def __init__(self, engine: AsyncEngine, company: Company, *, most: int = _MOST_HELD) -> None:
        self._lane = Lane(engine, company, "locks of questions", _take_turns, holds=True)
        self._room = asyncio.Semaphore(most)

    @asynccontextmanager
    async def held(self, name: str) -> AsyncIterator[None]:
        """Hold the lock of a name; waits for whoever has it.

        Raises:
            UnavailableError: the database does not answer.
        """
        key = int.from_bytes(hashlib.sha256(f"orchard:judge:{name}".encode()).digest()[:8], signed=True)
        async with self._room:
            while not await self._try(key):  # noqa: ASYNC110 (another process has it)
                await asyncio.sleep(Backoff(_POLL_SECONDS, _POLL_SECONDS).next())
            try:
                yield
            finally:
                # Whole, whoever is cancelled: a lock that is left behind would be held as long as this process lives.
                await whole(self._release(key))

    async def _try(self, key: int) -> bool:
        trying = asyncio.ensure_future(self._lane.do(_Turn(key, take=True)))
        try:
            return await whole(_result(trying))
        except asyncio.CancelledError:
            if trying.exception() is None and trying.result():
                await whole(self._release(key))
            raise

    async def close(self) -> None:
        """Let go of everything."""
        await self._lane.close()

    async def _release(self, key: int) -> None:
        try:
            await self._lane.do(_Turn(key, take=False))
        except UnavailableError:
            # With the connection the lock is gone too.
            return


async def _take_turns(connection: Connection, turns: Sequence[_Turn]) -> list[bool]:
    # A key that is let go and taken in one group was let go first: nobody takes what this process has.
    results: dict[_Turn, bool] = {}
    for take, statement in ((False, _FREE), (True, _TRY)):
        if keys := [turn.key for turn in turns if turn.take is take]:
            cursor = await connection.execute(statement, [keys])
            results |= {_Turn(key, take): row[0] for key, row in zip(keys, await cursor.fetchall(), strict=True)}
    return [results[turn] for turn in turns]


async def _result(future: asyncio.Future[bool]) -> bool:
    return await future
