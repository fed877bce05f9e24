"""Counts over trajectories, added up by the database."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

from orchard.rewards.pass_at_k import pass_all_of_k, pass_at_k, pass_power_k

from services.common.db import Database
from services.trajectories.model import Dimension, Filter, PassAtK, RewardState, Stats, Status
from services.trajectories.store import filters
from services.trajectories.store.rows import Connection
from services.trajectories.store.tables import SCHEMA

_ROWS: Final = 1000
_SCORED: Final = f"outcome_state = {RewardState.SCORED.value}"
_RESOLVED: Final = f"{_SCORED} AND outcome_value > 0"


class StatsStore:
    """Counts. What they are made of stands in one index, so that no row need be read (migration 0004)."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def stats(
        self, tenant: str, wanted: Filter, dimension: Dimension, label: str, ks: Sequence[int]
    ) -> list[Stats]:
        """One row for each value of the dimension, most trajectories first."""
        where, values = filters.conditions(tenant, wanted)
        value = _value(dimension)
        named = [label] if dimension is Dimension.LABEL else []
        async with self._database.driver(autocommit=True) as connection:
            rows = await (await connection.execute(counts_query(value, where), [*named, *values])).fetchall()
            attempts = await self._attempts(connection, value, where, [*named, *values]) if ks else {}
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
        connection: Connection, value: str, where: str, values: Sequence[Any]
    ) -> dict[str, list[tuple[int, int, int]]]:
        """For each row how many instances had n scored attempts of which c succeeded, as (n, c, instances)."""
        found: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        for row in await (await connection.execute(attempts_query(value, where), values)).fetchall():
            found[row[0]].append((row[1], row[2], row[3]))
        return found


def counts_query(value: str, where: str) -> str:
    """Counts by a value."""
    return f"""
        SELECT {value}, count(*), count(*) FILTER (WHERE status = {Status.OPEN.value}),
            count(*) FILTER (WHERE status = {Status.ABORTED.value}), count(*) FILTER (WHERE {_SCORED}),
            count(*) FILTER (WHERE {_RESOLVED}), avg(turns), avg({filters.TOKENS}), sum(cost_usd)
        FROM {SCHEMA}.trajectories WHERE {where} GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT {_ROWS}
    """  # noqa: S608 (names of our own, here and below)


def attempts_query(value: str, where: str) -> str:
    """By a value, how many instances had as many attempts and successes."""
    return f"""
        SELECT value, n, c, count(*) FROM (
            SELECT {value} AS value, count(*) AS n, count(*) FILTER (WHERE {_RESOLVED}) AS c
            FROM {SCHEMA}.trajectories WHERE {where} AND {_SCORED} AND instance_id <> ''
            GROUP BY 1, dataset, instance_id
        ) AS instances GROUP BY 1, 2, 3
    """  # noqa: S608


def _value(dimension: Dimension) -> str:
    """What rows are grouped by; of a label, with its name to be given."""
    return {Dimension.ALL: "''", Dimension.LABEL: "coalesce(labels ->> %s, '')"}.get(dimension, dimension.value)


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
