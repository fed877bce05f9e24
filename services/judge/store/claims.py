"""What is there already of a judgement: its verdict, that of its request or item, and answers to go on from.

One statement each, however many ask at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple

from psycopg import AsyncCursor

from services.common.errors import AlreadyExistsError
from services.judge.asking import Kept
from services.judge.codec import SCORED, verdict_of
from services.judge.model import Verdict
from services.judge.store.calls import kept_of
from services.judge.store.lanes import Connection, Lane, Lines, recordset

Answered = AsyncCursor[Any]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a judgement comes from, so that it is told again when it comes again: a request, an item of a batch.

    Attributes:
        asked: hash of what was asked for.
        request_id: empty where it is no request with an id.
        batch_id: empty where it is no item, as `item_id`.
    """

    asked: str = ""
    request_id: str = ""
    batch_id: str = ""
    item_id: str = ""

    @property
    def repeat(self) -> str:
        """Tells a fresh judgement from others of the same question; empty: it never comes again."""
        if self.request_id:
            return f"request:{self.request_id}"
        return f"{self.batch_id}/{self.item_id}" if self.batch_id else ""

    def taken(self) -> AlreadyExistsError:
        """The error of an id that was used for something else."""
        if self.request_id:
            return AlreadyExistsError(
                f"request {self.request_id!r} was something else; choose another id",
                reason="REQUEST_ID_REUSED",
                request_id=self.request_id,
            )
        return AlreadyExistsError(
            f"item {self.item_id!r} of batch {self.batch_id!r} was something else; choose another id",
            reason="ITEM_EXISTS",
            batch_id=self.batch_id,
            item_id=self.item_id,
        )


NOWHERE: Final = Origin()
"""Of a judgement that is not told again."""


class Earlier(NamedTuple):
    """A request or item as it came before.

    Attributes:
        asked: hash of what was asked for then; empty where that is not known.
        verdict: None where there is none.
        cached: it was found then.
        again: an outage kept the judges from it: it is judged again.
    """

    asked: str
    verdict: Verdict | None
    cached: bool
    again: bool


class Known(NamedTuple):
    """What is there of a judgement.

    Attributes:
        earlier: of its request or item, where that came before.
        verdict: the newest scored one of its question.
        answers: of an earlier run that did not come to its end.
    """

    earlier: Earlier | None
    verdict: Verdict | None
    answers: Sequence[Kept] = ()


class Sought(NamedTuple):
    """A judgement that is looked up. `question_key` empty: it is a fresh one, and nothing may be found by that."""

    tenant: str
    run: str
    question_key: str
    origin: Origin


class _Request(NamedTuple):
    """`question_key` empty: nothing may be found by it."""

    tenant: str
    question_key: str
    origin: Origin
    now: datetime


class ClaimStore:
    """Looks up judgements, and begins requests (rows of REQUESTS, which stay as long as the verdicts do)."""

    def __init__(self, lines: Lines) -> None:
        self._known = Lane(lines, "what is known of judgements", _look)
        self._requests = Lane(lines, "requests that begin", _begin)

    async def close(self) -> None:
        """Write what was asked for already."""
        await self._known.close()
        await self._requests.close()

    async def known(self, tenant: str, run: str, question_key: str, origin: Origin) -> Known:
        """What is there of a judgement; see Sought. Whoever takes its lock is told with that.

        Raises:
            UnavailableError: the database does not answer.
        """
        return await self._known.do(Sought(tenant, run, question_key, origin))

    async def begin(self, tenant: str, question_key: str, origin: Origin, now: datetime) -> Earlier:
        """The request of this id, which this one becomes where there is none: with the verdict of its question, if any.

        Raises:
            UnavailableError: the database does not answer.
        """
        while (earlier := await self._requests.do(_Request(tenant, question_key, origin, now))) is None:
            continue  # another replica has begun it at this moment: the next look sees it
        return earlier


_NEWEST: Final = f"""LATERAL (
    SELECT verdict_id, body, create_time FROM judge.verdicts AS v
    WHERE v.tenant = given.tenant AND v.question_key = given.question_key AND v.state = {SCORED}
    ORDER BY v.create_time DESC LIMIT 1
) AS newest ON given.question_key <> ''"""  # noqa: S608 (numbers and names of our own, here and below)

# Within a bound of one row the planner has no other way than both keys of the index. In a plain join it took 100 rows
# for a list of which it knows nothing, and read all verdicts instead: of 50,000 it took 26 ms for one.
_OWN: Final = """LATERAL (
    SELECT v.verdict_id, v.body, v.create_time FROM judge.verdicts AS v
    WHERE v.tenant = given.tenant AND v.verdict_id = earlier.verdict_id LIMIT 1
) AS own ON true"""

_KNOWN: Final = f"""
SELECT newest.*, earlier.*, own.*,
    (SELECT json_agg(a) FROM judge.answers AS a WHERE a.tenant = given.tenant AND a.run = given.run)
FROM json_to_recordset(%s::json) AS given(
    number integer, tenant text, run text, question_key text, request_id text, batch_id text, item_id text
)
LEFT JOIN {_NEWEST}
LEFT JOIN LATERAL (
    SELECT r.asked, r.verdict_id, r.cached, false AS again FROM judge.requests AS r
    WHERE r.tenant = given.tenant AND r.request_id = given.request_id
    UNION ALL
    SELECT i.asked, i.verdict_id, false, i.again FROM judge.batch_items AS i
    WHERE i.tenant = given.tenant AND i.batch_id = given.batch_id AND i.item_id = given.item_id
) AS earlier ON true
LEFT JOIN {_OWN}
ORDER BY given.number
"""  # noqa: S608

# Two that come in one group under one id are told apart by what they ask for: the first of them begins it.
# Nobody waits for the disk: a request that a crash of the database forgets begins again, and comes back with the newest
# verdict of its question, which is the one that it had unless somebody has judged afresh in between.
_BEGIN: Final = f"""
WITH given AS (
    SELECT given.*, newest.*
    FROM json_to_recordset(%s::json)
        AS given(number integer, tenant text, request_id text, asked text, question_key text, now timestamptz)
    LEFT JOIN {_NEWEST}
), begun AS (
    INSERT INTO judge.requests (tenant, request_id, asked, verdict_id, cached, create_time)
    SELECT DISTINCT ON (tenant, request_id)
        tenant, request_id, asked, coalesce(verdict_id, ''), verdict_id IS NOT NULL, now
    FROM given ORDER BY tenant, request_id, number
    ON CONFLICT DO NOTHING RETURNING tenant, request_id, asked, verdict_id, cached
)
SELECT earlier.asked, own.verdict_id, own.body, own.create_time, earlier.cached,
    set_config('synchronous_commit', 'off', true)
FROM given
LEFT JOIN LATERAL (
    SELECT b.asked, b.verdict_id, b.cached FROM begun AS b
    WHERE b.tenant = given.tenant AND b.request_id = given.request_id
    UNION ALL
    SELECT r.asked, r.verdict_id, r.cached FROM judge.requests AS r
    WHERE r.tenant = given.tenant AND r.request_id = given.request_id
    LIMIT 1
) AS earlier ON true
LEFT JOIN {_OWN}
ORDER BY given.number
"""  # noqa: S608


async def _look(connection: Connection, sought: Sequence[Sought]) -> list[Known]:
    return [known_of(row) for row in await (await ask(connection, sought)).fetchall()]


async def ask(connection: Connection, sought: Sequence[Sought]) -> Answered:
    """What is there of some judgements: a row of each, in their order see known_of. A pipeline does not wait for it."""
    rows = [
        {"number": number, "tenant": tenant, "run": run, "question_key": key, **_ids(origin)}
        for number, (tenant, run, key, origin) in enumerate(sought)
    ]
    return await connection.execute(_KNOWN, [recordset(rows)])


def known_of(row: Sequence[Any]) -> Known:
    """What a row of `ask` says.

    Raises:
        ValueError, KeyError: it has something that a later version has written.
    """
    earlier = None if row[3] is None else Earlier(row[3], _verdict(row[7:10]), row[5], row[6])
    return Known(earlier, _verdict(row[:3]), [kept_of(answer) for answer in row[10] or ()])


async def _begin(connection: Connection, requests: Sequence[_Request]) -> list[Earlier | None]:
    rows = [
        {"number": number, "tenant": tenant, "question_key": key, "asked": origin.asked, "now": now, **_ids(origin)}
        for number, (tenant, key, origin, now) in enumerate(requests)
    ]
    cursor = await connection.execute(_BEGIN, [recordset(rows)])
    return [
        None if row[0] is None else Earlier(row[0], _verdict(row[1:4]), row[4], again=False)
        for row in await cursor.fetchall()
    ]


def _ids(origin: Origin) -> dict[str, str]:
    return {"request_id": origin.request_id, "batch_id": origin.batch_id, "item_id": origin.item_id}


def _verdict(fields: Sequence[Any]) -> Verdict | None:
    return None if fields[0] is None else verdict_of(*fields)
