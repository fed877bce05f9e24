"""What judges answered and what it took. Calls that end at the same time are written together.

They all count in the same rows, of their batch and of their judge's day: one transaction each would take turns at them,
each with its own write to disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, Final

import sqlalchemy as sa

from services.judge.answers.reading import Finish
from services.judge.asking import Kept, Place
from services.judge.model import Usage
from services.judge.store.lanes import Connection, Lane, Lines, recordset
from services.judge.store.tables import ANSWERS, COUNTS, USAGE
from services.judge.store.turns import Turns

_U: Final = USAGE.c
SUMS: Final = (*COUNTS, "cost_usd")


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose a call is: its usage is counted by these. `batch_id` empty: of no batch."""

    tenant: str
    run: str
    judge: str
    model: str
    rubric: str
    batch_id: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """One that is to be counted.

    Attributes:
        kept: its answer; None where it gave none.
        text: of the answer, where that is still to be moved to the object store.
    """

    owner: Owner
    usage: Usage
    day: date
    kept: Kept | None
    text: str | None

    def row(self) -> dict[str, Any]:
        """As the columns of `given` have it."""
        owner, usage, kept = self.owner, self.usage, self.kept
        row = {name: getattr(owner, name) for name in ("tenant", "run", "judge", "rubric", "batch_id")}
        row |= {name: getattr(usage, name) for name in SUMS}
        row |= {"asked_model": owner.model, "day": self.day, "answered": kept is not None}
        if kept is not None:
            row |= {name: getattr(kept, name) for name in ("ticket", "sha256", "words", "model", "latency_seconds")}
            row |= {"finish": kept.finish.value, "text": self.text, **kept.place._asdict()}
        return row


class CallStore:
    """Rows of ANSWERS, and the sums of BATCHES and USAGE."""

    def __init__(self, database: Turns, lines: Lines) -> None:
        self._database = database
        self._lane = Lane(lines, "calls of judges", _write)

    async def close(self) -> None:
        """Write what was asked for already."""
        await self._lane.close()

    async def called(
        self, owner: Owner, usage: Usage, day: date, kept: Kept | None = None, text: str | None = None
    ) -> None:
        """Count a call, and keep its answer; it is durable on return. A repeat does nothing.

        With its `text`, where that is still to be moved to the object store.

        Raises:
            UnavailableError: the database does not answer.
        """
        await self._lane.do(Call(owner, usage, day, kept, text))

    async def usage(self, tenant: str, first: date, before: date, most: int) -> list[tuple[str, str, str, Usage]]:
        """Sums by judge, model and rubric over days."""
        by = (_U.judge, _U.model, _U.rubric)
        sums = [sa.func.sum(_U[name]).label(name) for name in SUMS]
        query = sa.select(*by, *sums).where(_U.tenant == tenant, _U.day >= first, _U.day < before)
        async with self._database.reading() as connection:
            rows = await connection.execute(query.group_by(*by).order_by(*by).limit(most))
            return [(row["judge"], row["model"], row["rubric"], usage_of(row)) for row in rows.mappings()]


async def _write(connection: Connection, calls: Sequence[Call]) -> list[None]:
    answered = {(call.owner.tenant, call.owner.run, call.kept.place): call for call in calls if call.kept is not None}
    rows = [call.row() for call in (*answered.values(), *(call for call in calls if call.kept is None))]
    await connection.execute(_WRITE, [recordset(rows)])
    return [None] * len(calls)


_NAMES: Final = ", ".join(column.name for column in ANSWERS.c)
_ADDED: Final = ", ".join(f"sum({name}) AS {name}" for name in SUMS)
COUNTED_COLUMNS: Final = """judge text, asked_model text, rubric text, day date, calls bigint, failed_calls bigint,
        prompt_tokens bigint, completion_tokens bigint, cached_tokens bigint, cost_usd float8, sha256 text, text text"""
"""Columns of `given` that a call is counted by, and its text is kept with."""
WAITING: Final = """waiting AS (
    INSERT INTO judge.waiting_texts (tenant, sha256, text)
    SELECT DISTINCT ON (tenant, sha256) tenant, sha256, text FROM given WHERE text IS NOT NULL
    ORDER BY tenant, sha256 ON CONFLICT DO NOTHING
)"""
"""The texts of `given`."""
ADD_USAGE: Final = f"""
INSERT INTO judge.usage AS total (tenant, day, judge, model, rubric, {", ".join(SUMS)})
SELECT tenant, day, judge, asked_model, rubric, {_ADDED} FROM counted
GROUP BY tenant, day, judge, asked_model, rubric ORDER BY tenant, day, judge, asked_model, rubric
ON CONFLICT (tenant, day, judge, model, rubric)
DO UPDATE SET {", ".join(f"{name} = total.{name} + excluded.{name}" for name in SUMS)}
"""  # noqa: S608 (names of our own, here and below)
"""What the calls of `counted` took, by judge and day."""


def add_to_batches(after: str = "") -> str:
    """What the calls of `counted` took, by batch; once the part of the statement that is called `after` is done."""
    done = f" AND (SELECT count(*) FROM {after}) >= 0" if after else ""  # noqa: S608
    return f"""sums AS (
    SELECT tenant, batch_id, {_ADDED} FROM counted WHERE batch_id <> ''{done} GROUP BY tenant, batch_id
), held AS (
    SELECT tenant, batch_id FROM judge.batches JOIN sums USING (tenant, batch_id)
    ORDER BY tenant, batch_id FOR NO KEY UPDATE OF batches
), batched AS (
    UPDATE judge.batches SET {", ".join(f"{name} = batches.{name} + sums.{name}" for name in SUMS)}
    FROM sums JOIN held USING (tenant, batch_id)
    WHERE (batches.tenant, batches.batch_id) = (sums.tenant, sums.batch_id)
)"""  # noqa: S608


# An answer that is there already was counted with it. In one order everywhere, here and in endings.py (usage, batches,
# texts): whoever counts in the same rows waits for the other, never in a circle.
_WRITE: Final = f"""
WITH given AS (
    SELECT * FROM json_to_recordset(%s::json) AS g(
        answered boolean, tenant text, run text, batch_id text, vote integer, swapped boolean, attempt integer,
        ticket text, finish text, words text, model text, latency_seconds float8,
        {COUNTED_COLUMNS}
    )
), stored AS (
    INSERT INTO judge.answers ({_NAMES}) SELECT {_NAMES} FROM given WHERE answered
    ON CONFLICT DO NOTHING RETURNING tenant, run, judge, vote, swapped, attempt
), {WAITING}, counted AS (
    SELECT given.* FROM given LEFT JOIN stored USING (tenant, run, judge, vote, swapped, attempt)
    WHERE NOT answered OR stored.tenant IS NOT NULL
), {add_to_batches()}
{ADD_USAGE}"""  # noqa: S608


def usage_of(row: Mapping[Any, Any]) -> Usage:
    """The sums of a row."""
    return Usage(**{name: int(row[name]) for name in COUNTS}, cost_usd=float(row["cost_usd"]))


def kept_of(row: Mapping[Any, Any]) -> Kept:
    """The answer of a row of ANSWERS."""
    return Kept(
        place=Place(row["judge"], row["vote"], row["swapped"], row["attempt"]),
        ticket=row["ticket"],
        sha256=row["sha256"],
        finish=Finish(row["finish"]),
        words=row["words"],
        model=row["model"],
        usage=usage_of(row),
        latency_seconds=row["latency_seconds"],
    )
