"""Judgements: rewards, values of steps and labels. Nothing is overwritten; the newest of a kind counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from psycopg.types.json import Jsonb

from services.common.db import Database
from services.trajectories.model import Annotation, Reward, RewardState, StepValue, Trajectory
from services.trajectories.store.rows import OUTCOME, Connection, fetch, reward, step_value, trajectories_of
from services.trajectories.store.tables import COLUMNS, SCHEMA

_LOCK: Final = f"""
    SELECT {COLUMNS} FROM {SCHEMA}.trajectories WHERE tenant = %s AND trajectory_id = %s FOR UPDATE
"""  # noqa: S608 (names of our own, here and below)
_ADD: Final = f"""
    INSERT INTO {SCHEMA}.annotations (trajectory_key, annotation_id, content_hash, labels, time)
    VALUES (%s, %s, %s, %s, %s) ON CONFLICT DO NOTHING RETURNING key
"""  # noqa: S608
_KNOWN: Final = f"""
    SELECT content_hash FROM {SCHEMA}.annotations WHERE trajectory_key = %s AND annotation_id = %s
"""  # noqa: S608
_REWARD: Final = f"""
    INSERT INTO {SCHEMA}.rewards (trajectory_key, annotation_key, name, state, value, reason, judge, rubric, version,
        details_json, time) VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)
"""  # noqa: S608
_VALUE: Final = f"""
    INSERT INTO {SCHEMA}.step_values (trajectory_key, annotation_key, "index", name, value, judge, version)
    VALUES (%s, %s, %s, %s, %s, %s, %s)
"""  # noqa: S608
_CHANGE: Final = f"""
    UPDATE {SCHEMA}.trajectories SET labels = %(labels)s, outcome_state = %(outcome_state)s,
        outcome_value = %(outcome_value)s WHERE key = %(key)s
"""  # noqa: S608
_BEHIND: Final = 9223372036854775807
_PAGE: Final = f"""
    SELECT key, annotation_id, labels, time FROM {SCHEMA}.annotations WHERE trajectory_key = %s AND key < %s
    ORDER BY key DESC LIMIT %s
"""  # noqa: S608


class AnnotationStore:
    """Writes and reads judgements."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(
        self, tenant: str, trajectory_id: str, annotation: Annotation, content_hash: str, now: datetime
    ) -> tuple[str, Trajectory | None]:
        """Add an annotation; returns added, same (it is there), other (its id has other content), ahead (a value is of
        a step that is not there) or missing, and the trajectory as it is then.
        """
        async with self._database.driver() as connection:
            rows = await fetch(connection, _LOCK, [tenant, trajectory_id])
            if not rows:
                return "missing", None
            outcome = await self._add(connection, rows[0], annotation, content_hash, now)
            (found,) = await trajectories_of(connection, rows)
        return outcome, found

    @staticmethod
    async def _add(
        connection: Connection, row: dict[str, Any], annotation: Annotation, content_hash: str, now: datetime
    ) -> str:
        key: int = row["key"]
        # State T, behind the last action, has a value too.
        if any(value.index > row["steps"] for value in annotation.step_values):
            return "ahead"
        values = [key, annotation.annotation_id, content_hash, Jsonb(dict(annotation.labels)), now]
        added = await fetch(connection, _ADD, values)
        if not added:
            (known,) = await fetch(connection, _KNOWN, [key, annotation.annotation_id])
            return "same" if known["content_hash"] == content_hash else "other"
        await _insert(connection, key, added[0]["key"], annotation, now)
        changes = _changes(row["labels"], annotation)
        if changes:
            row.update(changes)
            await connection.execute(_CHANGE, row | {"labels": Jsonb(row["labels"])})
        return "added"

    async def page(self, key: int, before: int | None, count: int) -> tuple[list[Annotation], int | None]:
        """Annotations behind the position `before`, newest first, and the position of the last if more may follow."""
        async with self._database.driver(autocommit=True) as connection:
            rows = await fetch(connection, _PAGE, [key, _BEHIND if before is None else before, count])
            keys = [row["key"] for row in rows]
            rewards: dict[int, list[Reward]] = defaultdict(list)
            values: dict[int, list[StepValue]] = defaultdict(list)
            for row in await _of(connection, "rewards", keys):
                rewards[row["annotation_key"]].append(reward(row))
            for row in await _of(connection, "step_values", keys):
                values[row["annotation_key"]].append(step_value(row))
        found = [
            Annotation(
                row["annotation_id"], tuple(rewards[row["key"]]), tuple(values[row["key"]]), row["labels"], row["time"]
            )
            for row in rows
        ]
        return found, keys[-1] if len(rows) == count else None


async def _insert(connection: Connection, key: int, annotation_key: int, annotation: Annotation, now: datetime) -> None:
    rewards = [
        (one.name, one.state.value, one.value, one.reason, one.judge, one.rubric, one.version, one.details_json, now)
        for one in annotation.rewards
    ]
    values = [(one.index, one.name, one.value, one.judge, one.version) for one in annotation.step_values]
    async with connection.cursor() as cursor:
        for query, rows in ((_REWARD, rewards), (_VALUE, values)):
            if rows:
                await cursor.executemany(query, [(key, annotation_key, *row) for row in rows])


def _changes(labels: Mapping[str, str], annotation: Annotation) -> dict[str, Any]:
    """What brings the trajectory's row in step: its labels, and the outcome that lists are filtered by."""
    changes: dict[str, Any] = {}
    outcomes = [one for one in annotation.rewards if one.name == OUTCOME]
    if outcomes:
        scored = outcomes[-1].state is RewardState.SCORED
        changes |= {"outcome_state": outcomes[-1].state, "outcome_value": outcomes[-1].value if scored else None}
    if annotation.labels:
        merged = {**labels, **annotation.labels}
        changes["labels"] = {name: value for name, value in merged.items() if value}
    return changes


async def _of(connection: Connection, table: str, annotation_keys: Sequence[int]) -> list[dict[str, Any]]:
    query = f"SELECT * FROM {SCHEMA}.{table} WHERE annotation_key = ANY(%s) ORDER BY key"  # noqa: S608
    return await fetch(connection, query, [annotation_keys])
