"""Verdicts and batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from services.judge.backends.limits import Amount
from services.judge.codec import ABSTAINED, EXCLUDED, SCORED, verdict_of
from services.judge.model import Usage, Verdict
from services.judge.store.calls import SUMS, usage_of
from services.judge.store.tables import BATCH_ITEMS, BATCHES, VERDICTS
from services.judge.store.turns import Turns

_V: Final = VERDICTS.c
_B: Final = BATCHES.c
_I: Final = BATCH_ITEMS.c


@dataclass(frozen=True, slots=True)
class Batch:
    """How far a batch is."""

    batch_id: str
    scored: int
    excluded: int
    abstained: int
    usage: Usage
    budget_exhausted: bool
    create_time: datetime


@dataclass(frozen=True, slots=True)
class BatchItem:
    """An item that has its verdict.

    Attributes:
        asked: hash of its request; empty where that is not known.
        again: an outage kept the judges from it: it is judged again when the batch goes on.
    """

    item_id: str
    asked: str
    verdict: Verdict
    again: bool = False


class VerdictStore:
    """Rows of VERDICTS, BATCHES and BATCH_ITEMS."""

    def __init__(self, database: Turns) -> None:
        self._database = database

    async def probe(self) -> None:
        """Raise UnavailableError where the database does not answer."""
        async with self._database.transaction() as connection:
            await connection.execute(sa.select(1))

    # Verdicts

    async def get(self, tenant: str, verdict_ids: Sequence[str]) -> dict[str, Verdict]:
        """Verdicts by id, those that there are."""
        query = sa.select(VERDICTS).where(_V.tenant == tenant, _V.verdict_id.in_(verdict_ids))
        async with self._database.reading() as connection:
            return {row["verdict_id"]: verdict_of_row(row) for row in (await connection.execute(query)).mappings()}

    async def values(self, tenant: str, verdict_ids: Sequence[str]) -> dict[str, float | None]:
        """The number of each verdict, those that there are."""
        query = sa.select(_V.verdict_id, _V.value).where(_V.tenant == tenant, _V.verdict_id.in_(verdict_ids))
        async with self._database.reading() as connection:
            return {row[0]: row[1] for row in await connection.execute(query)}

    # Batches

    async def begin_batch(self, tenant: str, batch_id: str, now: datetime) -> None:
        """Begin a batch, or go on with it."""
        values: dict[str, Any] = {"tenant": tenant, "batch_id": batch_id, "create_time": now}
        values |= dict.fromkeys(SUMS, 0) | {"budget_exhausted": False}
        statement = insert(BATCHES).values(values)
        statement = statement.on_conflict_do_update(
            index_elements=["tenant", "batch_id"], set_={"budget_exhausted": False}
        )
        async with self._database.transaction() as connection:
            await connection.execute(statement)

    async def exhausted(self, tenant: str, batch_id: str) -> None:
        """A batch's budget is spent."""
        statement = sa.update(BATCHES).where(_B.tenant == tenant, _B.batch_id == batch_id)
        async with self._database.transaction() as connection:
            await connection.execute(statement.values(budget_exhausted=True))

    async def spent(self, tenant: str, batch_id: str) -> Amount:
        """What the calls of a batch have taken, over all replicas."""
        query = sa.select(_B.prompt_tokens + _B.completion_tokens, _B.cost_usd)
        async with self._database.reading() as connection:
            row = (await connection.execute(query.where(_B.tenant == tenant, _B.batch_id == batch_id))).one()
            return Amount(int(row[0]), float(row[1]))

    async def batch(self, tenant: str, batch_id: str) -> Batch | None:
        """How far a batch is."""
        counts = (
            sa.select(_V.state, sa.func.count())
            .join_from(BATCH_ITEMS, VERDICTS, sa.and_(_V.tenant == _I.tenant, _V.verdict_id == _I.verdict_id))
            .where(_I.tenant == tenant, _I.batch_id == batch_id)
            .group_by(_V.state)
        )
        query = sa.select(BATCHES).where(_B.tenant == tenant, _B.batch_id == batch_id)
        async with self._database.transaction() as connection:
            row = (await connection.execute(query)).mappings().first()
            if row is None:
                return None
            states = {found[0]: found[1] for found in await connection.execute(counts)}
        return Batch(
            batch_id=batch_id,
            scored=states.get(SCORED, 0),
            excluded=states.get(EXCLUDED, 0),
            abstained=states.get(ABSTAINED, 0),
            usage=usage_of(row),
            budget_exhausted=row["budget_exhausted"],
            create_time=row["create_time"],
        )

    async def items(self, tenant: str, batch_id: str, after: str, count: int) -> Sequence[BatchItem]:
        """Items that have their verdict, by id, behind an id."""
        query = (
            sa.select(_I.item_id, _I.asked, _I.again, VERDICTS)
            .join_from(BATCH_ITEMS, VERDICTS, sa.and_(_V.tenant == _I.tenant, _V.verdict_id == _I.verdict_id))
            .where(_I.tenant == tenant, _I.batch_id == batch_id, _I.item_id > after)
            .order_by(_I.item_id)
            .limit(count)
        )
        async with self._database.reading() as connection:
            rows = (await connection.execute(query)).mappings()
            return [BatchItem(row["item_id"], row["asked"], verdict_of_row(row), row["again"]) for row in rows]


def verdict_of_row(row: Mapping[Any, Any]) -> Verdict:
    """The verdict of a row of VERDICTS."""
    return verdict_of(row["verdict_id"], row["body"], row["create_time"])
