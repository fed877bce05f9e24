"""From rows to values, and the parts of a trajectory that live in tables of their own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import distinct_on
from sqlalchemy.ext.asyncio import AsyncConnection

from services.trajectories.model import (
    TEXT_FIELDS,
    Description,
    Reward,
    RewardState,
    Status,
    StepValue,
    Totals,
    Trajectory,
)
from services.trajectories.store.tables import COUNTS, REWARDS, STEP_VALUES, TOOLS

OUTCOME: Final = "outcome"
Row = sa.RowMapping


async def trajectories_of(connection: AsyncConnection, rows: Sequence[Row]) -> list[Trajectory]:
    """Whole values of rows of TRAJECTORIES, with their rewards and tools, in the rows' order."""
    if not rows:
        return []
    rewards = await _newest_rewards(connection, [row["key"] for row in rows])
    tools = await _tools(connection, rows[0]["tenant"], {row["tools_hash"] for row in rows if row["tools_hash"]})
    return [trajectory_of(row, rewards.get(row["key"], ()), tools.get(row["tools_hash"], "")) for row in rows]


async def newest_step_values(connection: AsyncConnection, keys: Sequence[int]) -> dict[int, list[StepValue]]:
    """The newest value of each step, name and judge, by trajectory."""
    table = STEP_VALUES.c
    order = (table.trajectory_key, table["index"], table.name, table.judge)
    query = (
        sa.select(STEP_VALUES)
        .ext(distinct_on(*order))
        .where(table.trajectory_key.in_(keys))
        .order_by(*order, table.key.desc())
    )
    found: dict[int, list[StepValue]] = defaultdict(list)
    for row in (await connection.execute(query)).mappings():
        found[row["trajectory_key"]].append(step_value(row))
    return found


def reward(row: Row) -> Reward:
    """A row of REWARDS."""
    return Reward(
        name=row["name"],
        state=RewardState(row["state"]),
        value=row["value"],
        reason=row["reason"],
        judge=row["judge"],
        rubric=row["rubric"],
        version=row["version"],
        details_json=row["details_json"],
        time=row["time"],
    )


def step_value(row: Row) -> StepValue:
    """A row of STEP_VALUES."""
    return StepValue(row["index"], row["name"], row["value"], row["judge"], row["version"])


async def _newest_rewards(connection: AsyncConnection, keys: Sequence[int]) -> dict[int, list[tuple[int, Reward]]]:
    table = REWARDS.c
    order = (table.trajectory_key, table.name, table.judge, table.rubric)
    query = sa.select(REWARDS).ext(distinct_on(*order)).where(table.trajectory_key.in_(keys))
    found: dict[int, list[tuple[int, Reward]]] = defaultdict(list)
    for row in (await connection.execute(query.order_by(*order, table.key.desc()))).mappings():
        found[row["trajectory_key"]].append((row["key"], reward(row)))
    return found


async def _tools(connection: AsyncConnection, tenant: str, hashes: set[str]) -> dict[str, str]:
    if not hashes:
        return {}
    query = sa.select(TOOLS.c.hash, TOOLS.c.body).where(TOOLS.c.tenant == tenant, TOOLS.c.hash.in_(hashes))
    return {row[0]: row[1] for row in await connection.execute(query)}


def trajectory_of(row: Row, rewards: Sequence[tuple[int, Reward]], tools_json: str) -> Trajectory:
    """The whole value of a row of TRAJECTORIES; each reward with its key."""
    outcomes = [(key, found) for key, found in rewards if found.name == OUTCOME]
    return Trajectory(
        key=row["key"],
        tenant=row["tenant"],
        description=Description(
            trajectory_id=row["trajectory_id"],
            attempt=row["attempt"],
            tools_json=tools_json,
            metadata_json=row["metadata_json"],
            labels=row["labels"],
            **{name: row[name] for name in TEXT_FIELDS},
        ),
        status=Status(row["status"]),
        status_message=row["status_message"],
        totals=Totals(cost_usd=row["cost_usd"], **{name: row[name] for name in COUNTS}),
        rewards=tuple(found for _key, found in rewards),
        outcome=max(outcomes, key=lambda pair: pair[0])[1] if outcomes else None,
        object_name=row["object_name"],
        content_hash=row["content_hash"],
        create_time=row["create_time"],
        seal_time=row["seal_time"],
    )
