"""Judgements come to their end: the verdict, and with it whatever else rests on it, by one statement for many."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson
from sqlalchemy.ext.asyncio import AsyncEngine

from services.judge.codec import state_of, verdict_json
from services.judge.model import Verdict
from services.judge.store.claims import Origin
from services.judge.store.lanes import Connection, Lane, columns

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
    """

    tenant: str
    run: str
    question_key: str
    verdict: Verdict
    settled: Collection[Settled] | None
    origin: Origin


class EndingStore:
    """Writes VERDICTS, and what rests on them: requests and items get theirs, answers are not needed any more."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._lane = Lane(engine, "verdicts", _write)

    async def close(self) -> None:
        """Let the connection go."""
        await self._lane.close()

    async def add(self, ending: Ending) -> None:
        """Store an ending; a verdict that is cached is there already. It is durable on return.

        A request keeps its first verdict, and so does an item, unless that is to be judged again. Neither gets one
        where the budget left it out.

        Raises:
            UnavailableError: the database does not answer.
        """
        await self._lane.do(ending)


async def _write(connection: Connection, endings: Sequence[Ending]) -> list[None]:
    new = [ending for ending in endings if not ending.verdict.cached]
    done = [ending for ending in new if ending.settled is not None]
    kept = [(ending.tenant, ending.run, *place) for ending in done for place in ending.settled or ()]
    paid = [ending for ending in endings if not ending.verdict.is_unpaid]
    items = [_item(ending) for ending in paid if ending.origin.batch_id]
    requests = [_request(ending) for ending in paid if ending.origin.request_id]
    arrays = [
        *columns([_verdict(ending) for ending in new], 7),
        *columns([(ending.tenant, ending.run) for ending in done], 2),
        *columns(kept, 5),
        *columns(items, 7),
        # In one order everywhere: replicas wait for each other, never in a circle.
        *columns(sorted(requests), 4),
    ]
    await connection.execute(_WRITE, arrays)
    return [None] * len(endings)


def _verdict(ending: Ending) -> tuple[Any, ...]:
    verdict = ending.verdict
    body = orjson.dumps(verdict_json(verdict)).decode()
    state, value = state_of(verdict.reading.score), verdict.reading.value
    return (ending.tenant, verdict.verdict_id, ending.question_key, state, value, body, verdict.create_time)


def _item(ending: Ending) -> tuple[Any, ...]:
    origin, verdict = ending.origin, ending.verdict
    found = (verdict.verdict_id, verdict.cached, verdict.is_outage)
    return (ending.tenant, origin.batch_id, origin.item_id, origin.asked, *found)


def _request(ending: Ending) -> tuple[Any, ...]:
    return (ending.tenant, ending.origin.request_id, ending.verdict.verdict_id, ending.verdict.cached)


_WRITE: Final = """
WITH added AS (
    INSERT INTO judge.verdicts (tenant, verdict_id, question_key, state, value, body, create_time)
    SELECT * FROM unnest(
        %s::text[], %s::text[], %s::text[], %s::smallint[], %s::float8[], %s::jsonb[], %s::timestamptz[]
    )
), gone AS (
    DELETE FROM judge.answers AS a
    USING unnest(%s::text[], %s::text[]) AS done(tenant, run)
    WHERE a.tenant = done.tenant AND a.run = done.run AND NOT EXISTS (
        SELECT FROM unnest(%s::text[], %s::text[], %s::text[], %s::integer[], %s::boolean[])
            AS kept(tenant, run, judge, vote, swapped)
        WHERE (kept.tenant, kept.run, kept.judge, kept.vote, kept.swapped)
            = (a.tenant, a.run, a.judge, a.vote, a.swapped)
    )
), settled AS (
    INSERT INTO judge.batch_items AS item (tenant, batch_id, item_id, asked, verdict_id, cached, again)
    SELECT DISTINCT ON (tenant, batch_id, item_id) tenant, batch_id, item_id, asked, verdict_id, cached, again
    FROM unnest(%s::text[], %s::text[], %s::text[], %s::text[], %s::text[], %s::boolean[], %s::boolean[])
        WITH ORDINALITY AS given(tenant, batch_id, item_id, asked, verdict_id, cached, again, number)
    ORDER BY tenant, batch_id, item_id, again, number
    ON CONFLICT (tenant, batch_id, item_id) DO UPDATE
    SET (asked, verdict_id, cached, again) = (excluded.asked, excluded.verdict_id, excluded.cached, excluded.again)
    WHERE item.again
)
UPDATE judge.requests AS request SET verdict_id = given.verdict_id, cached = given.cached
FROM unnest(%s::text[], %s::text[], %s::text[], %s::boolean[]) AS given(tenant, request_id, verdict_id, cached)
WHERE request.tenant = given.tenant AND request.request_id = given.request_id AND request.verdict_id = ''
"""
