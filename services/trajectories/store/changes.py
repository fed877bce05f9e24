"""Which trajectories have changed, told to every replica by PostgreSQL's own notifications."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from services.common.db import AWAY
from services.common.errors import UnavailableError

CHANNEL: Final = "orchard_trajectories"
KEYS_A_NOTICE: Final = 350  # a payload may have 8,000 bytes, and a key up to 20 and a comma
_QUIET_SECONDS: Final = 5.0
_ANSWER_SECONDS: Final = 10.0  # a server that stands still keeps its connections and answers nothing


NOTIFY: Final = f"SELECT pg_notify('{CHANNEL}', %s)"
"""Tells of changes, for the driver itself, once the transaction is committed; takes one of `payloads`."""


def told(changed: str) -> str:
    """The same as a part of a statement, of keys of a part before it."""
    return f"""
        SELECT pg_notify('{CHANNEL}', string_agg(key::text, ','))
        FROM (SELECT key, row_number() OVER () / {KEYS_A_NOTICE} AS part FROM {changed}) AS parts GROUP BY part
    """  # noqa: S608 (names of our own)


def payloads(keys: Sequence[int]) -> list[str]:
    """What notices say of changed trajectories."""
    return [",".join(map(str, keys[start : start + KEYS_A_NOTICE])) for start in range(0, len(keys), KEYS_A_NOTICE)]


async def changes(engine: AsyncEngine, connected: Callable[[], None]) -> AsyncIterator[list[int]]:
    """Keys of changed trajectories as they change; calls `connected` once none can be missed any more.

    Raises:
        UnavailableError: the connection broke. Changes since are lost, so re-read what matters.
    """
    try:
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(_ANSWER_SECONDS):
                connection = await stack.enter_async_context(engine.connect())
                await connection.execution_options(isolation_level="AUTOCOMMIT")
                await connection.execute(sa.text(f"LISTEN {CHANNEL}"))
            connected()
            raw: Any = (await connection.get_raw_connection()).driver_connection
            while True:
                async for notice in raw.notifies(timeout=_QUIET_SECONDS):
                    yield [int(key) for key in notice.payload.split(",")]
                # Nothing changed; asking makes a dead connection known.
                async with asyncio.timeout(_ANSWER_SECONDS):
                    await connection.execute(sa.text("SELECT 1"))
    except AWAY as error:
        raise UnavailableError("the database does not answer; retry", reason="DATABASE_UNAVAILABLE") from error
