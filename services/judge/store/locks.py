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
from services.judge.endings import whole
from services.judge.store.lanes import Connection, Lane, Line, Lines

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

    def __init__(self, engine: AsyncEngine, lines: Lines, *, most: int = _MOST_HELD) -> None:
        self._line = Line(engine, holds=True)
        self._lane = Lane(lines, "locks of questions", _take_turns, line=self._line)
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
                self._release(key)

    async def _try(self, key: int) -> bool:
        trying = asyncio.ensure_future(self._lane.do(_Turn(key, take=True)))
        try:
            return await whole(_result(trying))
        except asyncio.CancelledError:
            if trying.exception() is None and trying.result():
                self._release(key)
            raise

    async def close(self) -> None:
        """Let go of everything."""
        await self._lane.close()
        await self._line.close()

    def _release(self, key: int) -> None:
        # Nobody waits for it: who takes it next here stands behind it. Where it fails, the connection is gone, and with
        # it the lock.
        self._lane.begin(_Turn(key, take=False)).add_done_callback(lambda done: done.cancelled() or done.exception())


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
