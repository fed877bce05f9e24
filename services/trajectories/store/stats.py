"""Counts over trajectories, added up by the database."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

import sqlalchemy as sa
from orchard.rewards.pass_at_k import pass_all_of_k, pass_at_k, pass_power_k

from services.common.db import Database
from services.trajectories.model import Dimension, Filter, PassAtK, RewardState, Stats, Status
from services.trajectories.store import filters
from services.trajectories.store.tables import TRAJECTORIES

_T: Final = TRAJECTORIES.c
_ROWS: Final = 1000


class StatsStore:
    """Counts."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def stats(
        self, tenant: str, wanted: Filter, dimension: Dimension, label: str, ks: Sequence[int]
    ) -> list[Stats]:
        """One row for each value of the dimension, most trajectories first."""
        value = _value(dimension, label)
        where = filters.conditions(tenant, wanted)
        scored = _T.outcome_state == RewardState.SCORED
        resolved = sa.and_(scored, _T.outcome_value > 0)
        query = (
            sa.select(
                value.label("value"),
                sa.func.count(),
                sa.func.count().filter(_T.status == Status.OPEN),
                sa.func.count().filter(_T.status == Status.ABORTED),
                sa.func.count().filter(scored),
                sa.func.count().filter(resolved),
                sa.func.avg(_T.turns),
                sa.func.avg(filters.TOKENS),
                sa.func.sum(_T.cost_usd),
            )
            .where(*where)
            .group_by(sa.text("1"))
            .order_by(sa.text("2 DESC, 1"))
            .limit(_ROWS)
        )
        async with self._database.transaction() as connection:
            rows = (await connection.execute(query)).all()
            attempts = await self._attempts(connection, value, where, scored, resolved) if ks else {}
        return [
            Stats(
                value=row[0],
                trajectories=row[1],
                open=row[2],
                aborted=row[3],
                scored=row[4],
                resolved=row[5],
                mean_turns=float(row[6]),
                mean_tokens=float(row[7]),
                cost_usd=float(row[8]),
                pass_at_k=tuple(_pass_at_k(k, attempts.get(row[0], ())) for k in ks),
            )
            for row in rows
        ]

    @staticmethod
    async def _attempts(
        connection: Any, value: Any, where: Any, scored: Any, resolved: Any
    ) -> dict[str, list[tuple[int, int, int]]]:
        """For each row how many instances had n scored attempts of which c succeeded, as (n, c, instances)."""
        per_instance = (
            sa.select(
                value.label("value"),
                sa.func.count().label("n"),
                sa.func.count().filter(resolved).label("c"),
            )
            .where(*where, scored, _T.instance_id != "")
            .group_by(sa.text("1"), _T.dataset, _T.instance_id)
            .subquery()
        )
        query = sa.select(per_instance.c.value, per_instance.c.n, per_instance.c.c, sa.func.count())
        found: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        for row in await connection.execute(query.group_by(per_instance.c.value, per_instance.c.n, per_instance.c.c)):
            found[row[0]].append((row[1], row[2], row[3]))
        return found


def _value(dimension: Dimension, label: str) -> sa.ColumnElement[str]:
    if dimension is Dimension.ALL:
        return sa.literal_column("''")
    if dimension is Dimension.LABEL:
        return sa.func.coalesce(_T.labels[label].astext, "")
    column: sa.ColumnElement[str] = _T[dimension.value]
    return column


def _pass_at_k(k: int, attempts: Sequence[tuple[int, int, int]]) -> PassAtK:
    sums, instances = [0.0, 0.0, 0.0], 0
    for n, c, count in attempts:
        family = (pass_at_k(n, c, k), pass_power_k(n, c, k), pass_all_of_k(n, c, k))
        if family[0] is None:
            continue
        instances += count
        sums = [total + count * (each or 0.0) for total, each in zip(sums, family, strict=True)]
    if not instances:
        return PassAtK(k, 0, None, None, None)
    return PassAtK(k, instances, *(total / instances for total in sums))
