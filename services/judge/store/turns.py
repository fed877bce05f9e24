"""Transactions that wait for their turn: more of them than connections is no outage of the database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from services.common.db import Database


class Turns(Database):
    """A database whose pool is never asked for more connections than it has; whoever comes first is served first.

    Args:
        engine: its pool may have connections besides, for whatever does not come through here.
        most: transactions at once.
    """

    def __init__(self, engine: AsyncEngine, most: int) -> None:
        super().__init__(engine)
        self._turns = asyncio.Semaphore(most)
        # The same pool. What reads one thing needs no transaction, and saves its begin and end.
        self._reading = Database(engine.execution_options(isolation_level="AUTOCOMMIT"))

    @asynccontextmanager
    async def transaction(self, *, timeout_seconds: float | None = None) -> AsyncIterator[AsyncConnection]:
        """See Database; its time begins with the turn."""
        async with self._turns, super().transaction(timeout_seconds=timeout_seconds) as connection:
            yield connection

    @asynccontextmanager
    async def driver(self, *, autocommit: bool = False) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        """See Database; its time begins with the turn."""
        async with self._turns, super().driver(autocommit=autocommit) as connection:
            yield connection

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """A connection for a statement that reads.

        Raises:
            UnavailableError: the database does not answer.
        """
        async with self._turns, self._reading.transaction() as connection:
            yield connection
