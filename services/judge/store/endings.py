"""Judgements come to their end: the verdict, and with it whatever else rests on it, by one statement for many."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from services.judge.codec import state_of, verdict_json
from services.judge.model import Verdict
from services.judge.store.calls import ADD_USAGE, COUNTED_COLUMNS, WAITING, Call, add_to_batches
from services.judge.store.claims import Origin
from services.judge.store.lanes import Connection, Lane, Lines, recordset

Settled = tuple[str, int, bool]
"""Judge, vote and order."""


@dataclass(frozen=True, slots=True)
class Ending:
    """A judgement that has its verdict.

    Attributes:
        run: by which its answers are kept.
        question_key: what its verdict is found by.
        settled: of the answers that it comes from the journal keeps these, None for all.
        origin: the request or item that has its verdict now.
        call: the one whose answer it comes from, where that was not kept before: it is counted, and its text kept, with
            the verdict.
    """

    tenant: str
    run: str
    question_key: str
    verdict: Verdict
    settled: Collection[Settled] | None
    origin: Origin
    call: Call | None = None


class EndingStore:
    """Writes VERDICTS, and what rests on them: requests and items get theirs, answers are not needed any more."""

    def __init__(self, lines: Lines) -> None:
        self._lane = Lane(lines, "verdicts", _write)

    async def close(self) -> None:
        """Write what was asked for already."""
        await self._lane.close()

    async def add(self, ending: Ending) -> None:
        """Store an ending; a verdict that is cached is there already. It is durable on return.

        A request keeps its first verdict, and so does an item, unless that is to be judged again. Neither gets one
        where the budget left it out. One with a call may be repeated: its verdict is stored, and the call counted,
        once.

        Raises:
            UnavailableError: the database does not answer.
        """
        await self._lane.do(ending)


async def _write(connection: Connection, endings: Sequence[Ending]) -> list[None]:
    # In one order everywhere: replicas wait for each other, never in a circle.
    rows = [_row(number, ending) for number, ending in enumerate(sorted(endings, key=_place))]
    kept = [
        {"tenant": ending.tenant, "run": ending.run, "judge": judge, "vote": vote, "swapped": swapped}
        for ending in endings
        for judge, vote, swapped in ending.settled or ()
    ]
    await connection.execute(_WRITE, [recordset(rows), recordset(kept)])
    return [None] * len(endings)


def _place(ending: Ending) -> tuple[str, str]:
    return ending.tenant, ending.origin.request_id


def _row(number: int, ending: Ending) -> dict[str, Any]:
    verdict, origin = ending.verdict, ending.origin
    row = {
        "number": number,
        "tenant": ending.tenant,
        "verdict_id": verdict.verdict_id,
        "cached": verdict.cached,
        "paid": not verdict.is_unpaid,
        "again": verdict.is_outage,
        "asked": origin.asked,
        "request_id": origin.request_id,
        "batch_id": origin.batch_id,
        "item_id": origin.item_id,
    }
    if not verdict.cached:
        row |= {
            "question_key": ending.question_key,
            "state": state_of(verdict.reading.score),
            "value": verdict.reading.value,
            "body": verdict_json(verdict),
            "create_time": verdict.create_time,
            "done": None if ending.settled is None else ending.run,
        }
    # The batch of a call is that of its item.
    return row if ending.call is None else ending.call.row() | row | {"counted": True}


# A crash of the database may have forgotten that a request began (claims.py): it is there again with its verdict,
# unless its id is something else's by now.
_WRITE: Final = f"""
WITH given AS (
    SELECT * FROM json_to_recordset(%s::json) AS g(
        number integer, tenant text, verdict_id text, cached boolean, paid boolean, again boolean, asked text,
        request_id text, batch_id text, item_id text, question_key text, state smallint, value float8, body jsonb,
        create_time timestamptz, done text, counted boolean,
        {COUNTED_COLUMNS}
    )
), kept AS (
    SELECT * FROM json_to_recordset(%s::json) AS k(tenant text, run text, judge text, vote integer, swapped boolean)
), added AS (
    INSERT INTO judge.verdicts (tenant, verdict_id, question_key, state, value, body, create_time)
    SELECT tenant, verdict_id, question_key, state, value, body, create_time FROM given WHERE NOT cached
    ON CONFLICT DO NOTHING RETURNING tenant, verdict_id
), {WAITING}, counted AS (
    SELECT given.* FROM given JOIN added USING (tenant, verdict_id) WHERE counted
), used AS ({ADD_USAGE} RETURNING 1
), {add_to_batches(after="used")}, gone AS (
    DELETE FROM judge.answers AS a USING given
    WHERE a.tenant = given.tenant AND a.run = given.done AND NOT EXISTS (
        SELECT FROM kept WHERE (kept.tenant, kept.run, kept.judge, kept.vote, kept.swapped)
            = (a.tenant, a.run, a.judge, a.vote, a.swapped)
    )
), settled AS (
    INSERT INTO judge.batch_items AS item (tenant, batch_id, item_id, asked, verdict_id, cached, again)
    SELECT DISTINCT ON (tenant, batch_id, item_id) tenant, batch_id, item_id, asked, verdict_id, cached, again
    FROM given WHERE paid AND batch_id <> '' ORDER BY tenant, batch_id, item_id, again, number
    ON CONFLICT (tenant, batch_id, item_id) DO UPDATE
    SET (asked, verdict_id, cached, again) = (excluded.asked, excluded.verdict_id, excluded.cached, excluded.again)
    WHERE item.again
)
INSERT INTO judge.requests AS request (tenant, request_id, asked, verdict_id, cached, create_time)
SELECT DISTINCT ON (tenant, request_id) tenant, request_id, asked, verdict_id, cached, now()
FROM given WHERE paid AND request_id <> '' ORDER BY tenant, request_id, number
ON CONFLICT (tenant, request_id) DO UPDATE SET (verdict_id, cached) = (excluded.verdict_id, excluded.cached)
WHERE request.verdict_id = '' AND request.asked = excluded.asked
"""  # noqa: S608 (names of our own)
