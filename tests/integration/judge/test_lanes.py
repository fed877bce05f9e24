"""Statements that many share: what the database does not take of one fails for that one alone."""

import asyncio
from collections.abc import Sequence

import psycopg
import pytest

from services.common.db import connect
from services.common.errors import UnavailableError
from services.judge.store.lanes import Connection, Lane, Line, Lines


async def raising(connection: Connection, states: Sequence[str]) -> list[str]:
    """Each item is the state that the database ends its statement in; those without one are well."""
    for state in filter(None, states):
        await connection.execute(f"DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{state}'; END $$")
    return list(states)


@pytest.mark.parametrize(
    ("state", "error"),
    [("53200", UnavailableError), ("54000", psycopg.errors.ProgramLimitExceeded), ("22000", psycopg.DataError)],
)
async def test_one_that_is_too_much_takes_neither_the_others_nor_the_connection(
    database: str, state: str, error: type[Exception]
) -> None:
    """The line holds locks, say, which are lost with its connection."""
    engine = connect(database)
    lines = Lines(engine, 1)
    line = Line(engine, holds=True)
    lane = Lane(lines, "lane", raising, line=line)
    try:
        assert await lane.do("") == ""
        before = line.connection
        assert before is not None
        results = await asyncio.gather(*(lane.do(one) for one in ("", state, "")), return_exceptions=True)
        assert [results[0], results[2]] == ["", ""]
        assert isinstance(results[1], error)
        assert line.connection is before
        assert not before.closed
    finally:
        await lane.close()
        await line.close()
        await engine.dispose()


async def test_a_connection_that_is_gone_is_replaced(database: str) -> None:
    engine = connect(database)
    line = Line(engine, holds=True)
    lane = Lane(Lines(engine, 1), "lane", raising, line=line)
    try:
        await lane.do("")
        before = line.connection
        with pytest.raises(UnavailableError) as raised:
            await lane.do("57P01")
        assert raised.value.reason == "DATABASE_UNAVAILABLE"
        assert await lane.do("") == ""
        assert line.connection is not before
    finally:
        await lane.close()
        await line.close()
        await engine.dispose()
