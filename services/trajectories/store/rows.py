"""From rows to values, and the parts of a trajectory that live in tables of their own.

Queries go to the driver itself: what SQLAlchemy costs a statement is more than most of these statements do.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from operator import itemgetter
from typing import Any, Final

from psycopg import AsyncConnection
from psycopg.rows import dict_row

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
from services.trajectories.store.tables import SCHEMA

OUTCOME: Final = "outcome"
# For what is done to each of many rows.
_texts: Final = itemgetter(*TEXT_FIELDS)
_totals: Final = itemgetter(*(field.name for field in fields(Totals)))
_STATUSES: Final = {status.value: status for status in Status}
_STATES: Final = {state.value: state for state in RewardState}
Row = Mapping[str, Any]
Connection = AsyncConnection[Any]
_KEY: Final = "trajectory_key, name, judge, rubric"
_REWARDS: Final = f"""
    SELECT DISTINCT ON ({_KEY}) {_KEY}, key, state, value, reason, version, details_json, time
    FROM {SCHEMA}.rewards WHERE trajectory_key = ANY(%s) ORDER BY {_KEY}, key DESC
"""  # noqa: S608 (names of our own, here and below)
_VALUE_KEY: Final = 'trajectory_key, "index", name, judge'
_STEP_VALUES: Final = f"""
    SELECT DISTINCT ON ({_VALUE_KEY}) {_VALUE_KEY}, value, version
    FROM {SCHEMA}.step_values WHERE trajectory_key = ANY(%s) ORDER BY {_VALUE_KEY}, key DESC
"""  # noqa: S608
_TOOLS: Final = f"SELECT hash, body FROM {SCHEMA}.tools WHERE tenant = %s AND hash = ANY(%s)"  # noqa: S608

# Some at a time: as many as there is room for, and one at least. The index is cast: one that fits a smaller type is
# sent as that, and the sum would leave it.
_STEPS: Final = f"""
    SELECT "index", body FROM (
        SELECT "index", body, sum(octet_length(body)) OVER (ORDER BY "index") - octet_length(body) AS before
        FROM {SCHEMA}.steps WHERE trajectory_key = %s AND "index" > %s AND "index" <= %s::bigint + 2000
    ) AS part WHERE before < %s ORDER BY "index"
"""  # noqa: S608


_LAST: Final = 1 << 62  # behind every step, and far enough from where the database's numbers end


def sha256_of(text: str) -> str:
    """Of its UTF-8, hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def columns_of(rows: Iterable[Sequence[Any]]) -> list[list[Any]]:
    """Rows of values as columns, for unnest; at least one row."""
    return [list(column) for column in zip(*rows, strict=True)]


async def fetch(connection: Connection, query: str, values: Sequence[Any] | Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a query, by column."""
    async with connection.cursor(row_factory=dict_row) as cursor:
        await cursor.execute(query, values)
        return await cursor.fetchall()


async def trajectories_of(connection: Connection, rows: Sequence[Row]) -> list[Trajectory]:
    """Whole values of rows of TRAJECTORIES, with their rewards and tools, in the rows' order."""
    if not rows:
        return []
    rewards = await _newest_rewards(connection, [row["key"] for row in rows])
    tools = await _tools(connection, rows[0]["tenant"], {row["tools_hash"] for row in rows if row["tools_hash"]})
    return [trajectory_of(row, rewards.get(row["key"], ()), tools.get(row["tools_hash"], "")) for row in rows]


async def newest_step_values(connection: Connection, keys: Sequence[int]) -> dict[int, list[StepValue]]:
    """The newest value of each step, name and judge, by trajectory."""
    found: dict[int, list[StepValue]] = defaultdict(list)
    for row in await fetch(connection, _STEP_VALUES, [list(keys)]):
        found[row["trajectory_key"]].append(step_value(row))
    return found


async def steps_of(connection: Connection, key: int, after: int, most_bytes: int) -> list[tuple[int, bytes]]:
    """Index and body of a trajectory's next steps behind an index; `most_bytes` unless one is larger."""
    after = min(after, _LAST)
    cursor = await connection.execute(_STEPS, [key, after, after, most_bytes], binary=True)
    return await cursor.fetchall()


def reward(row: Row) -> Reward:
    """A row of REWARDS."""
    return Reward(
        name=row["name"],
        state=_STATES[row["state"]],
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


async def _newest_rewards(connection: Connection, keys: Sequence[int]) -> dict[int, list[tuple[int, Reward]]]:
    found: dict[int, list[tuple[int, Reward]]] = defaultdict(list)
    for row in await fetch(connection, _REWARDS, [list(keys)]):
        found[row["trajectory_key"]].append((row["key"], reward(row)))
    return found


async def _tools(connection: Connection, tenant: str, hashes: set[str]) -> dict[str, str]:
    if not hashes:
        return {}
    cursor = await connection.execute(_TOOLS, [tenant, list(hashes)])
    return {row[0]: row[1] for row in await cursor.fetchall()}


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
            **dict(zip(TEXT_FIELDS, _texts(row), strict=True)),
        ),
        status=_STATUSES[row["status"]],
        status_message=row["status_message"],
        totals=Totals(*_totals(row)),
        rewards=tuple(found for _key, found in rewards),
        outcome=max(outcomes, key=lambda pair: pair[0])[1] if outcomes else None,
        object_name=row["object_name"],
        content_hash=row["content_hash"],
        create_time=row["create_time"],
        seal_time=row["seal_time"],
    )
