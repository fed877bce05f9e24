"""What a judgement looks up is found by its key, however many there are: no table is read whole."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

import psycopg

from services.judge.answers.reading import Finish
from services.judge.asking import Kept, Place
from services.judge.store.calls import Call
from services.judge.store.claims import NOWHERE, Origin
from tests.integration.judge.stores import USAGE, Stores, stores

TABLES = ["verdicts", "requests", "batch_items", "answers"]
OLD = 3000
"""Rows of each table from before."""
ROUNDS = 8
"""The driver prepares what it has sent five times."""

_FILL = """
CREATE TEMPORARY TABLE old AS SELECT 'old-' || generate_series(1, {old}) AS id;
INSERT INTO judge.verdicts (tenant, verdict_id, question_key, state, value, body, create_time)
SELECT '{tenant}', id, id, 1, 1, '{{}}', now() FROM old;
INSERT INTO judge.requests (tenant, request_id, asked, verdict_id, cached, create_time)
SELECT '{tenant}', id, 'asked', '', false, now() FROM old;
INSERT INTO judge.batch_items (tenant, batch_id, item_id, asked, verdict_id, cached, again)
SELECT '{tenant}', 'b', id, 'asked', '', false, false FROM old;
ANALYZE judge.verdicts, judge.requests, judge.batch_items, judge.answers;
"""


async def test_no_table_is_read_whole(database: str) -> None:
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as admin:
        async with stores(database) as of:
            await admin.execute(_FILL.format(tenant=of.tenant, old=OLD))
            before = await _reads(admin)
            for number in range(ROUNDS):
                await _judged(of, number)
        # Each session tells what it has read at its end.
        async with asyncio.timeout(30):
            while (after := await _reads(admin)).by_key < before.by_key + 4 * ROUNDS:
                await asyncio.sleep(0.05)
        assert after.whole == before.whole
        assert after.rows - before.rows < OLD


async def _judged(of: Stores, number: int) -> None:
    """Everything that a judgement asks of the database, of each kind."""
    day = datetime.now(UTC).date()
    for origin in (Origin("asked", request_id=f"new-{number}"), Origin("asked", batch_id="b", item_id="i"), NOWHERE):
        if origin.request_id:
            earlier = await of.claims.begin(of.tenant, "key", origin, datetime.now(UTC))
            assert earlier.asked == "asked"
        await of.claims.known(of.tenant, "run", "key", origin)
        kept = Kept(Place("j", number, False, 0), "t", "0" * 64, Finish.STOP, "", "m", USAGE, 0.1)
        await of.calls.called(of.owner, USAGE, day, kept, "It did.")
        ending = replace(of.ending(f"vd-{number}-{origin.item_id}{origin.request_id}"), origin=origin)
        await of.endings.add(replace(ending, call=Call(of.owner, USAGE, day, kept, "It did.")))


class _Reads(NamedTuple):
    """How often tables were read whole, and by a key, and how many rows that gave."""

    whole: int
    by_key: int
    rows: int


async def _reads(admin: psycopg.AsyncConnection[Any]) -> _Reads:
    cursor = await admin.execute(
        "SELECT sum(seq_scan)::int, sum(idx_scan)::int, sum(seq_tup_read + idx_tup_fetch)::int"
        " FROM pg_stat_user_tables WHERE schemaname = 'judge' AND relname = ANY(%s)",
        [TABLES],
    )
    row = await cursor.fetchone()
    assert row is not None
    return _Reads(*row)
