"""Judgements: rewards, values of steps and labels. Nothing is overwritten; the newest of a kind counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from services.common.db import Database
from services.trajectories.model import Annotation, Reward, RewardState, StepValue, Trajectory
from services.trajectories.store.rows import OUTCOME, reward, step_value, trajectories_of
from services.trajectories.store.tables import ANNOTATIONS, REWARDS, STEP_VALUES, TRAJECTORIES

_T: Final = TRAJECTORIES.c
_A: Final = ANNOTATIONS.c


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
        query = sa.select(TRAJECTORIES).where(_T.tenant == tenant, _T.trajectory_id == trajectory_id)
        async with self._database.transaction() as connection:
            rows = (await connection.execute(query.with_for_update())).mappings().all()
            if not rows:
                return "missing", None
            row: Any = dict(rows[0])
            outcome = await self._add(connection, row, annotation, content_hash, now)
            (found,) = await trajectories_of(connection, [row])
        return outcome, found

    @staticmethod
    async def _add(
        connection: AsyncConnection, row: dict[str, Any], annotation: Annotation, content_hash: str, now: datetime
    ) -> str:
        key: int = row["key"]
        # State T, behind the last action, has a value too.
        if any(value.index > row["steps"] for value in annotation.step_values):
            return "ahead"
        values = {
            "trajectory_key": key,
            "annotation_id": annotation.annotation_id,
            "content_hash": content_hash,
            "labels": dict(annotation.labels),
            "time": now,
        }
        added = insert(ANNOTATIONS).values(values).on_conflict_do_nothing().returning(_A.key)
        annotation_key = (await connection.execute(added)).scalar_one_or_none()
        if annotation_key is None:
            known = sa.select(_A.content_hash).where(
                _A.trajectory_key == key, _A.annotation_id == annotation.annotation_id
            )
            return "same" if (await connection.execute(known)).scalar_one() == content_hash else "other"
        await _insert(connection, key, annotation_key, annotation, now)
        changes = _changes(row["labels"], annotation)
        if changes:
            await connection.execute(sa.update(TRAJECTORIES).where(_T.key == key).values(changes))
            row.update(changes)
        return "added"

    async def page(self, key: int, before: int | None, count: int) -> tuple[list[Annotation], int | None]:
        """Annotations behind the position `before`, newest first, and the position of the last if more may follow."""
        query = sa.select(ANNOTATIONS).where(_A.trajectory_key == key).order_by(_A.key.desc()).limit(count)
        if before is not None:
            query = query.where(_A.key < before)
        async with self._database.transaction() as connection:
            rows = (await connection.execute(query)).mappings().all()
            keys = [row["key"] for row in rows]
            rewards: dict[int, list[Reward]] = defaultdict(list)
            values: dict[int, list[StepValue]] = defaultdict(list)
            for row in await _of(connection, REWARDS, keys):
                rewards[row["annotation_key"]].append(reward(row))
            for row in await _of(connection, STEP_VALUES, keys):
                values[row["annotation_key"]].append(step_value(row))
        found = [
            Annotation(
                row["annotation_id"], tuple(rewards[row["key"]]), tuple(values[row["key"]]), row["labels"], row["time"]
            )
            for row in rows
        ]
        return found, keys[-1] if len(rows) == count else None


async def _insert(
    connection: AsyncConnection, key: int, annotation_key: int, annotation: Annotation, now: datetime
) -> None:
    owner = {"trajectory_key": key, "annotation_key": annotation_key}
    if annotation.rewards:
        rows = [
            owner
            | {
                "name": one.name,
                "state": one.state,
                "value": one.value,
                "reason": one.reason,
                "judge": one.judge,
                "rubric": one.rubric,
                "version": one.version,
                "details_json": one.details_json,
                "time": now,
            }
            for one in annotation.rewards
        ]
        await connection.execute(sa.insert(REWARDS), rows)
    if annotation.step_values:
        rows = [
            owner
            | {"index": one.index, "name": one.name, "value": one.value, "judge": one.judge, "version": one.version}
            for one in annotation.step_values
        ]
        await connection.execute(sa.insert(STEP_VALUES), rows)


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


async def _of(connection: AsyncConnection, table: sa.Table, annotation_keys: Sequence[int]) -> Sequence[Any]:
    query = sa.select(table).where(table.c.annotation_key.in_(annotation_keys)).order_by(table.c.key)
    return (await connection.execute(query)).mappings().all()
