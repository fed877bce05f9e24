"""Lanes: small statements of many callers go as one, over a connection that is kept.

A verdict needs a handful of them. Each by itself, on a connection that is taken from the pool for it, would cost
several times what the database does for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, Generic, TypeVar

import orjson
from psycopg import AsyncConnection
from sqlalchemy.ext.asyncio import AsyncConnection as PooledConnection
from sqlalchemy.ext.asyncio import AsyncEngine

from services.common.db import AWAY, is_closed
from services.common.errors import UnavailableError

_MOST: Final = 200
"""Callers that share a statement."""
_SECONDS: Final = 15.0
_COMPANY: Final = 8
_GATHERING_SECONDS: Final = 0.015


# Their statements find few rows by their keys, whatever the tables hold: nothing is to be planned anew that was
# planned, and a table that was small then may be large now.
_BY_KEYS: Final = "SET plan_cache_mode = force_generic_plan; SET enable_seqscan = off"
# Of two statements in one round trip the later one sees what was stored when the earlier one was done.
_FRESH: Final = "SET default_transaction_isolation = 'read committed'"
_NO_MEMORY: Final = "53200"
_TOO_MUCH: Final = "54"

T = TypeVar("T")
R = TypeVar("R")
Connection = AsyncConnection[Any]


class NoRoomError(UnavailableError):
    """The database has no memory for a statement now; the connection is well."""


class Line:
    """A connection that is kept; one at a time uses it.

    Args:
        engine: gives the connection, which stays out of its pool.
        holds: the session holds something that would be lost with the connection, so that it is given up only when a
            statement fails on it; otherwise it is replaced before that where the server has closed it.
    """

    def __init__(self, engine: AsyncEngine, *, holds: bool = False) -> None:
        self._engine = engine
        self._holds = holds
        self._turn = asyncio.Lock()
        self._pooled: PooledConnection | None = None
        self.connection: Connection | None = None

    @asynccontextmanager
    async def used(self) -> AsyncIterator[Connection]:
        """The connection; every statement is a transaction.

        Raises:
            UnavailableError: the database does not answer, or has no room (NoRoomError).
        """
        async with self._turn:
            try:
                async with asyncio.timeout(_SECONDS):
                    yield await self._connected()
            except AWAY as error:
                # Of these its class tells nothing: the database is there, and what the session holds stays.
                state = str(getattr(error, "sqlstate", ""))
                if state.startswith(_TOO_MUCH):
                    raise
                if state == _NO_MEMORY:
                    raise NoRoomError("the database is short of memory; retry", reason="DATABASE_FULL") from error
                await self._drop()
                raise UnavailableError("the database does not answer; retry", reason="DATABASE_UNAVAILABLE") from error

    async def close(self) -> None:
        """Let the connection go."""
        async with self._turn:
            await self._drop()

    async def _connected(self) -> Connection:
        if self.connection is not None and not self._holds and is_closed(self.connection):
            await self._drop()
        if self.connection is None:
            self._pooled = await self._engine.connect()
            try:
                connection: Any = (await self._pooled.get_raw_connection()).driver_connection
                await connection.set_autocommit(True)
                await connection.execute(f"{_BY_KEYS}; {_FRESH}")
            except BaseException:
                # Whatever it was: the next one to come takes another from the pool.
                await self._drop()
                raise
            self.connection = connection
        return self.connection

    async def _drop(self) -> None:
        pooled, self._pooled, self.connection = self._pooled, None, None
        if pooled is not None:
            try:
                # Nobody else is to have it as it was set up here.
                await pooled.invalidate()
                await pooled.close()
            except AWAY:
                return


class Lines:
    """The lines of all lanes, which share them where there are fewer.

    Args:
        count: of connections.
    """

    def __init__(self, engine: AsyncEngine, count: int) -> None:
        self._lines = deque(Line(engine) for _ in range(count))
        self.members = 0
        """Judgements under way. In company a lane lets others come: its statement costs more than the wait."""

    @contextmanager
    def joined(self) -> Iterator[None]:
        """One more judgement, for the time of the context."""
        self.members += 1
        try:
            yield
        finally:
            self.members -= 1

    def next(self) -> Line:
        """A line for the next lane."""
        self._lines.rotate(1)
        return self._lines[0]

    async def close(self) -> None:
        """Let the connections go, once the lanes are closed."""
        for line in self._lines:
            await line.close()


class Lane(Generic[T, R]):
    """While one group is at the database, the next gathers.

    Args:
        lines: whose it is.
        name: of the task.
        work: does what a group asks for, by one statement or by several that may each be repeated; gives the result of
            each, in their order.
        line: its own; by default one of the others'.
    """

    def __init__(
        self,
        lines: Lines,
        name: str,
        work: Callable[[Connection, Sequence[T]], Awaitable[Sequence[R]]],
        *,
        line: Line | None = None,
    ) -> None:
        self._lines = lines
        self._name = name
        self._work = work
        self._line = line or lines.next()
        self._waiting: deque[tuple[T, asyncio.Future[R]]] = deque()
        self._running: asyncio.Task[None] | None = None

    async def do(self, item: T) -> R:
        """What `work` gives for an item. It is done also where the caller leaves.

        Raises:
            UnavailableError: the database does not answer; whether it was done is not known.
        """
        return await self.begin(item)

    def begin(self, item: T) -> asyncio.Future[R]:
        """As `do`, for whoever need not wait for it."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._running is None:
            self._running = asyncio.create_task(self._run(), name=self._name)
        return future

    async def close(self) -> None:
        """Do what was asked for already."""
        while self._running is not None:
            await asyncio.gather(self._running, return_exceptions=True)

    async def _run(self) -> None:
        group: list[tuple[T, asyncio.Future[R]]] = []
        try:
            while self._waiting:
                if self._lines.members >= _COMPANY and len(self._waiting) < _MOST:
                    await asyncio.sleep(_GATHERING_SECONDS)
                group = [self._waiting.popleft() for _ in range(min(_MOST, len(self._waiting)))]
                await self._settle(group)
        finally:
            self._running = None
            for _item, future in (*group, *self._waiting):
                if not future.done():  # only where this task was cancelled
                    future.cancel()
            self._waiting.clear()

    async def _settle(self, group: Sequence[tuple[T, asyncio.Future[R]]]) -> None:
        try:
            async with self._line.used() as connection:
                results = await self._work(connection, [item for item, _future in group])
        except Exception as error:  # noqa: BLE001 (raised where it is waited for)
            if len(group) > 1 and (isinstance(error, NoRoomError) or not isinstance(error, UnavailableError)):
                # What the database does not take of one fails for that one alone.
                for one in group:
                    await self._settle([one])
                return
            for _item, future in group:
                if not future.done():
                    future.set_exception(error)
        else:
            for (_item, future), result in zip(group, results, strict=True):
                if not future.done():
                    future.set_result(result)


def recordset(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows for `json_to_recordset`: one parameter, where the driver takes longer for arrays than the server for all."""
    return orjson.dumps(rows).decode()
