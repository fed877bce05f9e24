"""One judge at a time for a question, over all replicas.

An advisory lock of the database that a connection of its own holds: when its process dies the lock is free at once, and
the next one goes on from the journal. Where the connection alone is lost, all that it held is taken again on the next
before anything else, and whoever holds what somebody else took meanwhile is told before it asks a judge again.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final, NamedTuple

import psycopg
from sqlalchemy.ext.asyncio import AsyncEngine

from services.common.backoff import Backoff
from services.common.db import is_closed
from services.common.errors import UnavailableError
from services.common.logs import get_logger
from services.judge.endings import whole
from services.judge.store.claims import Answered, Known, Sought, ask, known_of
from services.judge.store.lanes import Connection, Lane, Line, Lines

_log = get_logger(__name__)

_POLL_SECONDS: Final = 1.0
_WATCH_SECONDS: Final = 0.2
_GRACE_SECONDS: Final = 3.0
"""After a connection was lost. An outage of the database takes those of all: whoever held a question comes first."""
_MOST_HELD: Final = 1000
"""Of one replica at once. The server keeps advisory locks in a table of a fixed size: 6,400, as it is shipped."""
_TRY: Final = "SELECT pg_try_advisory_lock(key) FROM unnest(%s::bigint[]) AS key"
_FREE: Final = "SELECT pg_advisory_unlock(key) FROM unnest(%s::bigint[]) AS key"
_FREE_ALL: Final = "SELECT pg_advisory_unlock_all()"
_NAMED: Final = "SET application_name = 'orchard-judge-locks'"
"""For whoever asks the server which connection holds them."""


class LockLostError(UnavailableError):
    """The connection was lost, and another process has taken the lock meanwhile."""


class HeldLock(NamedTuple):
    """A lock that is held.

    Attributes:
        sure: makes sure that it is held still; raises LockLostError.
        known: what was there of the judgement when it was taken, where that was asked for.
    """

    sure: Callable[[], Awaitable[None]]
    known: Known | None


class _Turn(NamedTuple):
    """Take a lock, and look a judgement up then; or let it go. None looks whether the connection is well."""

    key: int
    take: bool | None
    sought: Sought | None = None


class _Outcome(NamedTuple):
    """Whether a turn was had, and the row of what is known of its judgement."""

    done: bool
    row: Sequence[Any] | None = None


_LOOK: Final = _Turn(0, None)


class QuestionLocks:
    """Locks of one replica. Within it a question must come once at a time: the database would let it in twice.

    Args:
        engine: gives the connection.
        lines: tell how many judgements there are.
        most: held at once.
        grace_seconds: for so long after the connection was lost nothing is taken but what was held.
    """

    def __init__(
        self, engine: AsyncEngine, lines: Lines, *, most: int = _MOST_HELD, grace_seconds: float = _GRACE_SECONDS
    ) -> None:
        self._line = Line(engine, holds=True)
        self._lane = Lane(lines, "locks of questions", self._take_turns, line=self._line)
        self._room = asyncio.Semaphore(most)
        self._held: set[int] = set()
        self._session: Connection | None = None
        """What holds them."""
        self._grace_seconds = grace_seconds
        self._grace_until = 0.0
        self._watching: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def held(self, name: str, sought: Sought | None = None) -> AsyncIterator[HeldLock]:
        """Hold the lock of a name; waits for whoever has it. A judgement is looked up on the way, after it was taken.

        Raises:
            UnavailableError: the database does not answer.
            LockLostError: it is not held any more.
        """
        key = key_of(name)
        async with self._room:
            while not (taken := await self._try(key, sought)).done:  # noqa: ASYNC110 (another process has it, or may)
                await asyncio.sleep(Backoff(_POLL_SECONDS, _POLL_SECONDS).next())
            if self._watching is None:
                self._watching = asyncio.create_task(self._watch(), name="watch the locks of questions")
            try:
                # Read only here: where one cannot be, that is told to whom it concerns, and its lock let go.
                known = None if taken.row is None else known_of(taken.row)
                yield HeldLock(partial(self._sure, key), known)
            finally:
                self._release(key)

    async def _try(self, key: int, sought: Sought | None) -> _Outcome:
        trying = self._lane.begin(_Turn(key, take=True, sought=sought))
        try:
            return await asyncio.shield(trying)
        except asyncio.CancelledError:
            # Nobody comes after us before it is known whether we have it.
            with suppress(asyncio.CancelledError, Exception):
                await whole(_result(trying))
            if not trying.cancelled() and trying.exception() is None and trying.result().done:
                self._release(key)
            raise

    async def close(self) -> None:
        """Let go of everything."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._lane.close()
        await self._line.close()

    def _release(self, key: int) -> None:
        if key not in self._held:
            return  # it was lost
        self._held.discard(key)
        # Nobody waits for it: who takes it next here stands behind it. Where it fails, the connection is gone, and with
        # it the lock.
        self._lane.begin(_Turn(key, take=False)).add_done_callback(lambda done: done.cancelled() or done.exception())

    def _is_sound(self) -> bool:
        connection = self._line.connection
        return connection is not None and connection is self._session and not is_closed(connection)

    async def _sure(self, key: int) -> None:
        if not self._is_sound():
            await self._look()
        if key not in self._held:
            raise LockLostError("another replica judges this question now; retry", reason="QUESTION_TAKEN")

    async def _look(self) -> None:
        """Have a connection that is well, on which everything is held again that could be."""
        try:
            await self._lane.do(_LOOK)
        except UnavailableError:
            await self._lane.do(_LOOK)  # it has found out that the connection is gone; this one makes another

    async def _watch(self) -> None:
        """While anything is held: the sooner it is held again, the fewer find it free."""
        backoff = Backoff(_WATCH_SECONDS, _POLL_SECONDS)
        try:
            while self._held:
                await asyncio.sleep(_WATCH_SECONDS)
                if self._is_sound():
                    continue
                try:
                    await self._look()
                except UnavailableError as error:
                    _log.warning("the locks of questions are not held now", why=error.message)
                    await asyncio.sleep(backoff.next())
                else:
                    backoff.reset()
        finally:
            self._watching = None

    async def _take_turns(self, connection: Connection, turns: Sequence[_Turn]) -> list[_Outcome]:
        if connection is not self._session:
            await self._take_again(connection)
        # A key that is let go and taken in one group was let go first: nobody takes what this process has.
        results: dict[_Turn, _Outcome] = {_LOOK: _Outcome(True)}
        if gone := [turn for turn in turns if turn.take is False]:
            await connection.execute(_FREE, [[turn.key for turn in gone]])
            results |= dict.fromkeys(gone, _Outcome(True))
        if any(turn.take is not False for turn in turns):
            wanted = [turn for turn in turns if turn.take]
            in_grace = asyncio.get_running_loop().time() < self._grace_until
            try:
                found = await _taken_and_known(connection, [] if in_grace else wanted)
            except Exception:
                # The session keeps those that it took before it failed, and each may be tried again by itself.
                with suppress(psycopg.Error):
                    await connection.execute(_FREE, [[turn.key for turn in wanted]])
                raise
            self._held |= {turn.key for turn, outcome in found.items() if outcome.done}
            results |= dict.fromkeys(wanted, _Outcome(False)) | found
        return [results[turn] for turn in turns]

    async def _take_again(self, connection: Connection) -> None:
        # Where this was begun on it before and failed, some would be held twice.
        await connection.execute(_FREE_ALL)
        await connection.execute(_NAMED)
        if self._held:
            taken = await _taken(connection, sorted(self._held))
            # Those that were let go meanwhile stand in line to be.
            self._held &= {key for key, is_taken in taken.items() if is_taken}
            _log.warning("locks of questions were taken again", held=len(self._held), of=len(taken))
        if self._session is not None:
            self._grace_until = asyncio.get_running_loop().time() + self._grace_seconds
        self._session = connection


def key_of(name: str) -> int:
    """The advisory lock of a name."""
    return int.from_bytes(hashlib.sha256(f"orchard:judge:{name}".encode()).digest()[:8], signed=True)


async def _taken(connection: Connection, keys: Sequence[int]) -> dict[int, bool]:
    return await _rows(await connection.execute(_TRY, [keys]), keys)


async def _rows(taking: Answered, keys: Sequence[int]) -> dict[int, bool]:
    return {key: row[0] for key, row in zip(keys, await taking.fetchall(), strict=True)}


async def _taken_and_known(connection: Connection, turns: Sequence[_Turn]) -> dict[_Turn, _Outcome]:
    """By one round trip. The statement that looks comes second, so it sees what was stored under the lock before."""
    keys, sought = [turn.key for turn in turns], {turn: turn.sought for turn in turns if turn.sought is not None}
    if not sought:
        taken = await _taken(connection, keys)
        return {turn: _Outcome(taken[turn.key]) for turn in turns}
    async with connection.pipeline():
        taking = await connection.execute(_TRY, [keys])
        asked = await ask(connection, list(sought.values()))
        # The first one's error says what is wrong; that of the second would only say that there was one.
        taken = await _rows(taking, keys)
        rows = dict(zip(sought, await asked.fetchall(), strict=True))
    return {turn: _Outcome(taken[turn.key], rows.get(turn)) for turn in turns}


async def _result(future: asyncio.Future[_Outcome]) -> _Outcome:
    return await future
