"""Counts over trajectories, added up by the database."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

from orchard.rewards.pass_at_k import pass_all_of_k, pass_at_k, pass_power_k

from services.common.db import Database
from services.trajectories.model import Dimension, Filter, PassAtK, RewardState, Stats, Status
from services.trajectories.store import filters
from services.trajectories.store.tables import SCHEMA

_ROWS: Final = 1000
_SCORED: Final = f"outcome_state = {RewardState.SCORED.value}"
_RESOLVED: Final = f"{_SCORED} AND outcome_value > 0"
# Sums of whole numbers as floats: exact up to 2^53, and far cheaper than PostgreSQL's sums of any length.
_SUMS: Final = {
    "trajectories": "count(*)",
    "open": f"count(*) FILTER (WHERE status = {Status.OPEN.value})",
    "aborted": f"count(*) FILTER (WHERE status = {Status.ABORTED.value})",
    "scored": f"count(*) FILTER (WHERE {_SCORED})",
    "resolved": f"count(*) FILTER (WHERE {_RESOLVED})",
    "turns": "sum(turns::float8)",
    "tokens": f"sum({filters.TOKENS}::float8)",
    "cost_usd": "sum(cost_usd)",
}
_COUNTS: Final = ", ".join(f"{sum_} AS {name}" for name, sum_ in _SUMS.items())
# Of one statement: 100,000 instances are 22 MB. With the usual 4 MB they would be sorted, which takes twice as long.
_WORK_MEMORY: Final = "SET LOCAL work_mem = '32MB'"
# At once: a hash table may take twice that of the server's memory.
_LARGE_COUNTS: Final = 2


class StatsStore:
    """Counts. What they are made of stands in one index, so that no row need be read (migration 0004)."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._large = asyncio.Semaphore(_LARGE_COUNTS)

    async def stats(
        self, tenant: str, wanted: Filter, dimension: Dimension, label: str, ks: Sequence[int]
    ) -> list[Stats]:
        """One row for each value of the dimension, most trajectories first."""
        where, values = filters.conditions(tenant, wanted)
        value = _value(dimension)
        query = families_query(value, where) if ks else counts_query(value, where)
        named = [label] if dimension is Dimension.LABEL else []
        async with self._large if ks else nullcontext(), self._database.driver() as connection:
            if ks:
                await connection.execute(_WORK_MEMORY)
            rows = await (await connection.execute(query, [*named, *values])).fetchall()
        return [_stats(value, list(families), ks) for value, families in groupby(rows, itemgetter(0))]


def counts_query(value: str, where: str) -> str:
    """Counts by a value: the value, then the columns of _SUMS."""
    return f"""
        SELECT {value}, {_COUNTS} FROM {SCHEMA}.trajectories WHERE {where} GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT {_ROWS}
    """  # noqa: S608 (names of our own, here and below)


def families_query(value: str, where: str) -> str:
    """The same, also by how many scored attempts and successes an instance had: those two, and how many instances had
    so many, stand behind the sums. What is of no instance has no attempts.

    One pass makes both: to read every row costs more than to add up what it says.
    """
    return f"""
        WITH families AS (
            SELECT value, {", ".join(f"sum({name}) AS {name}" for name in _SUMS)},
                CASE WHEN named THEN one.scored ELSE 0 END AS n, one.resolved AS c, count(*) AS instances
            FROM (
                SELECT {value} AS value, instance_id <> '' AS named, {_COUNTS} FROM {SCHEMA}.trajectories WHERE {where}
                GROUP BY 1, dataset, instance_id
            ) AS one GROUP BY value, named, one.scored, one.resolved
        )
        SELECT value, {", ".join(_SUMS)}, n, c, instances
        FROM families JOIN (
            SELECT value, sum(trajectories) AS most FROM families GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT {_ROWS}
        ) AS largest USING (value) ORDER BY most DESC, value
    """  # noqa: S608


def _stats(value: str, families: Sequence[Sequence[Any]], ks: Sequence[int]) -> Stats:
    """The counts of a value, of its rows of either query."""
    sums = {name: sum(row[position] for row in families) for position, name in enumerate(_SUMS, 1)}
    attempts = [(row[-3], row[-2], row[-1]) for row in families if ks and row[-3]]
    trajectories = int(sums["trajectories"])
    return Stats(
        value=value,
        trajectories=trajectories,
        **{name: int(sums[name]) for name in ("open", "aborted", "scored", "resolved")},
        mean_turns=sums["turns"] / trajectories,
        mean_tokens=sums["tokens"] / trajectories,
        cost_usd=sums["cost_usd"],
        pass_at_k=tuple(_pass_at_k(k, attempts) for k in ks),
    )


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
