"""Lanes: small statements of many callers go as one, over a connection that is kept.

A verdict needs a handful of them. Each by itself, on a connection that is taken from the pool for it, would cost
several times what the database does for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Generic, TypeVar

import orjson
from psycopg import AsyncConnection
from psycopg.types.json import set_json_loads
from sqlalchemy.ext.asyncio import AsyncConnection as PooledConnection
from sqlalchemy.ext.asyncio import AsyncEngine

from services.common.db import AWAY, is_closed
from services.common.errors import UnavailableError

_MOST: Final = 200
"""Callers that share a statement."""
_SECONDS: Final = 15.0
_COMPANY: Final = 8
_GATHERING_SECONDS: Final = 0.015


class Company:
    """How many judgements are under way. In company a lane lets others come: its statement costs more than the wait."""

    def __init__(self) -> None:
        self.members = 0

    @contextmanager
    def joined(self) -> Iterator[None]:
        """One more, for the time of the context."""
        self.members += 1
        try:
            yield
        finally:
            self.members -= 1


T = TypeVar("T")
R = TypeVar("R")
Connection = AsyncConnection[Any]


class Lane(Generic[T, R]):
    """While one group is at the database, the next gathers.

    Args:
        engine: gives the connection, which stays out of its pool.
        company: who may come.
        name: of the task.
        work: does what a group asks for, by one statement or by several that may each be repeated; gives the result of
            each, in their order. Every statement is a transaction.
        holds: the session holds something that would be lost with the connection, so that it is given up only when a
            statement fails on it; otherwise it is replaced before that where the server has closed it.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        company: Company,
        name: str,
        work: Callable[[Connection, Sequence[T]], Awaitable[Sequence[R]]],
        *,
        holds: bool = False,
    ) -> None:
        self._engine = engine
        self._company = company
        self._name = name
        self._work = work
        self._holds = holds
        self._waiting: deque[tuple[T, asyncio.Future[R]]] = deque()
        self._running: asyncio.Task[None] | None = None
        self._pooled: PooledConnection | None = None
        self._connection: Connection | None = None

    async def do(self, item: T) -> R:
        """What `work` gives for an item. It is done also where the caller leaves.

        Raises:
            UnavailableError: the database does not answer; whether it was done is not known.
        """
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._running is None:
            self._running = asyncio.create_task(self._run(), name=self._name)
        return await future

    async def close(self) -> None:
        """Do what was asked for already, and let the connection go."""
        while self._running is not None:
            await asyncio.gather(self._running, return_exceptions=True)
        await self._drop()

    async def _run(self) -> None:
        group: list[tuple[T, asyncio.Future[R]]] = []
        try:
            while self._waiting:
                if self._company.members >= _COMPANY and len(self._waiting) < _MOST:
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
            results = await self._done([item for item, _future in group])
        except Exception as error:  # noqa: BLE001 (raised where it is waited for)
            if len(group) > 1 and not isinstance(error, UnavailableError):
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

    async def _done(self, items: Sequence[T]) -> Sequence[R]:
        try:
            async with asyncio.timeout(_SECONDS):
                return await self._work(await self._connected(), items)
        except AWAY as error:
            await self._drop()
            raise UnavailableError("the database does not answer; retry", reason="DATABASE_UNAVAILABLE") from error

    async def _connected(self) -> Connection:
        if self._connection is not None and not self._holds and is_closed(self._connection):
            await self._drop()
        if self._connection is None:
            self._pooled = await self._engine.connect()
            connection: Any = (await self._pooled.get_raw_connection()).driver_connection
            set_json_loads(orjson.loads, connection)
            await connection.set_autocommit(True)
            self._connection = connection
        return self._connection

    async def _drop(self) -> None:
        pooled, self._pooled, self._connection = self._pooled, None, None
        if pooled is not None:
            try:
                # Nobody else is to have it as it was set up here.
                await pooled.invalidate()
                await pooled.close()
            except AWAY:
                return


def recordset(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows for `json_to_recordset`: one parameter, where the driver takes longer for arrays than the server for all."""
    return orjson.dumps(rows).decode()
