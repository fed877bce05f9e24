"""Trajectories: created, found, sealed, packed, deleted."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from services.common.db import Database
from services.common.errors import UnavailableError
from services.trajectories.model import TEXT_FIELDS, Description, Filter, Order, Status, StepValue, Trajectory
from services.trajectories.store import filters
from services.trajectories.store.changes import announced
from services.trajectories.store.packing import Packing, packing
from services.trajectories.store.rows import Row, newest_step_values, trajectories_of, trajectory_of
from services.trajectories.store.tables import (
    ANNOTATIONS,
    BLOB_REFERENCES,
    COUNTS,
    GARBAGE,
    REWARDS,
    STEP_VALUES,
    STEPS,
    TOOLS,
    TRAJECTORIES,
)

_T: Final = TRAJECTORIES.c


@dataclass(frozen=True, slots=True)
class Deleted:
    """What a delete took, or would take."""

    deleted: int
    remaining: int
    text_bytes: int
    open_skipped: int


class TrajectoryStore:
    """Reads and writes the rows of trajectories."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(
        self, tenant: str, description: Description, tools_hash: str, description_hash: str, now: datetime
    ) -> tuple[Trajectory, bool]:
        """Make a trajectory, or find the one of this id; and whether it was described in the same way."""
        values = {
            "tenant": tenant,
            "trajectory_id": description.trajectory_id,
            **{name: getattr(description, name) for name in TEXT_FIELDS},
            "attempt": description.attempt,
            "tools_hash": tools_hash,
            "metadata_json": description.metadata_json,
            "labels": dict(description.labels),
            "description_hash": description_hash,
            "status": Status.OPEN,
            "status_message": "",
            "writer": "",
            **dict.fromkeys(COUNTS, 0),
            "cost_usd": 0.0,
            "object_name": "",
            "content_hash": "",
            "create_time": now,
        }
        async with self._database.transaction() as connection:
            if tools_hash:
                row = {"tenant": tenant, "hash": tools_hash, "body": description.tools_json}
                await connection.execute(insert(TOOLS).values(row).on_conflict_do_nothing())
            made = insert(TRAJECTORIES).values(values).on_conflict_do_nothing().returning(TRAJECTORIES)
            row = (await connection.execute(made)).mappings().first()
            if row is not None:
                return trajectory_of(row, (), description.tools_json), True
            rows = (await connection.execute(_named(tenant, description.trajectory_id))).mappings().all()
            if not rows:
                raise UnavailableError("the trajectory of this id was just deleted; retry", reason="TRAJECTORY_DELETED")
            (found,) = await trajectories_of(connection, rows)
            return found, rows[0]["description_hash"] == description_hash

    async def get(self, tenant: str, trajectory_id: str) -> Trajectory | None:
        """One trajectory."""
        async with self._database.transaction() as connection:
            return await _one(connection, tenant, trajectory_id)

    async def step_values(self, keys: Sequence[int]) -> dict[int, list[StepValue]]:
        """The newest values of steps, by trajectory."""
        async with self._database.transaction() as connection:
            return await newest_step_values(connection, keys)

    async def steps(self, key: int, after: int, most_bytes: int) -> list[tuple[int, bytes]]:
        """Index and body of the steps behind an index that are still rows; `most_bytes` unless one is larger."""
        async with self._database.transaction() as connection:
            return await _read_steps(connection, key, after, most_bytes)

    async def seal(  # noqa: PLR0917 (one statement's values)
        self, tenant: str, trajectory_id: str, status: Status, message: str, expected_steps: int | None, now: datetime
    ) -> tuple[Trajectory | None, bool]:
        """End an open trajectory that has the expected steps; it as it is then, and whether it was ended now."""
        here = sa.and_(_T.tenant == tenant, _T.trajectory_id == trajectory_id)
        change = sa.update(TRAJECTORIES).where(here, _T.status == Status.OPEN)
        if expected_steps is not None:
            change = change.where(_T.steps == expected_steps)
        change = change.values(status=status, status_message=message, seal_time=now)
        async with self._database.transaction() as connection:
            rows = (await connection.execute(change.returning(TRAJECTORIES, announced(_T.key)))).mappings().all()
            if not rows:
                return await _one(connection, tenant, trajectory_id), False
            (sealed,) = await trajectories_of(connection, rows)
            return sealed, True

    async def page(
        self,
        tenant: str,
        wanted: Filter,
        order: Order,
        *,
        ascending: bool,
        after: tuple[bool, Any, int] | None,
        count: int,
    ) -> tuple[Sequence[Trajectory], tuple[bool, Any, int] | None]:
        """A page behind the position `after`, and the position of its last row if more may follow."""
        where = filters.conditions(tenant, wanted)
        without_value = after is not None and after[0]
        async with self._database.transaction() as connection:
            rows = await _page(connection, where, order, ascending, without_value, after and after[1:], count)
            if order is Order.OUTCOME and not without_value and len(rows) < count:
                rest = await _page(connection, where, order, ascending, True, None, count - len(rows))
                without_value = without_value or bool(rest)
                rows += rest
            found = await trajectories_of(connection, rows)
        if len(rows) < count:
            return found, None
        value = rows[-1]["order_value"]
        return found, (without_value, value.isoformat() if isinstance(value, datetime) else value, rows[-1]["key"])

    async def count(self, tenant: str, wanted: Filter) -> int:
        """How many a filter selects."""
        query = sa.select(sa.func.count()).select_from(TRAJECTORIES).where(*filters.conditions(tenant, wanted))
        async with self._database.transaction() as connection:
            return int((await connection.execute(query)).scalar_one())

    async def export_page(
        self, tenant: str, wanted: Filter, after: int, count: int
    ) -> tuple[Sequence[Trajectory], dict[int, list[StepValue]]]:
        """The next trajectories by key, with the values of their steps."""
        query = (
            sa.select(TRAJECTORIES)
            .where(*filters.conditions(tenant, wanted), _T.key > after)
            .order_by(_T.key)
            .limit(count)
        )
        async with self._database.transaction() as connection:
            found = await trajectories_of(connection, (await connection.execute(query)).mappings().all())
            return found, await newest_step_values(connection, [trajectory.key for trajectory in found])

    def packing(self, most_bytes: int) -> AbstractAsyncContextManager[Packing | None]:
        """Sealed trajectories whose steps are rows; see packing.py."""
        return packing(self._database, most_bytes)

    async def delete(
        self, tenant: str, wanted: Filter, *, include_open: bool, limit: int, dry_run: bool, now: datetime
    ) -> Deleted:
        """Delete up to `limit` of what a filter selects; with `dry_run` only say what would go."""
        where = filters.conditions(tenant, wanted)
        closed = sa.true() if include_open else _T.status != Status.OPEN
        async with self._database.transaction() as connection:
            counts = sa.select(
                sa.func.count().filter(closed),
                sa.func.coalesce(sa.func.sum(_T.text_bytes).filter(closed), 0),
                sa.func.count().filter(sa.not_(closed)),
            ).where(*where)
            total, text_bytes, skipped = (await connection.execute(counts)).one()
            if dry_run:
                return Deleted(int(total), 0, int(text_bytes), int(skipped))
            chosen = sa.select(_T.key, _T.object_name, _T.text_bytes).where(*where, closed).order_by(_T.key)
            rows = (await connection.execute(chosen.limit(limit).with_for_update())).all()
            await _delete_rows(connection, [row[0] for row in rows])
            garbage = [{"object_name": row[1], "time": now} for row in rows if row[1]]
            if garbage:
                await connection.execute(insert(GARBAGE).on_conflict_do_nothing(), garbage)
        return Deleted(len(rows), int(total) - len(rows), sum(row[2] for row in rows), int(skipped))


def _named(tenant: str, trajectory_id: str) -> sa.Select[Any]:
    return sa.select(TRAJECTORIES).where(_T.tenant == tenant, _T.trajectory_id == trajectory_id)


async def _one(connection: AsyncConnection, tenant: str, trajectory_id: str) -> Trajectory | None:
    rows = (await connection.execute(_named(tenant, trajectory_id))).mappings().all()
    found = await trajectories_of(connection, rows)
    return found[0] if found else None


async def _page(  # noqa: PLR0917 (a query's parts)
    connection: AsyncConnection,
    where: Sequence[sa.ColumnElement[bool]],
    order: Order,
    ascending: bool,
    without_value: bool,
    after: tuple[Any, int] | None,
    count: int,
) -> list[Row]:
    query = filters.page(where, order, ascending=ascending, without_value=without_value, after=after, count=count)
    return list((await connection.execute(query)).mappings())


async def _read_steps(connection: AsyncConnection, key: int, after: int, most_bytes: int) -> list[tuple[int, bytes]]:
    table = STEPS.c
    size = sa.func.sum(sa.func.octet_length(table.body)).over(order_by=table["index"], rows=(None, -1))
    inner = (
        sa.select(table["index"], table.body, sa.func.coalesce(size, 0).label("before"))
        .where(table.trajectory_key == key, table["index"] > after, table["index"] <= after + 2000)
        .subquery()
    )
    query = sa.select(inner.c["index"], inner.c.body).where(inner.c.before < most_bytes).order_by(inner.c["index"])
    return [(row[0], bytes(row[1])) for row in await connection.execute(query)]


async def _delete_rows(connection: AsyncConnection, keys: Sequence[int]) -> None:
    for table in (STEPS, ANNOTATIONS, REWARDS, STEP_VALUES, BLOB_REFERENCES):
        await connection.execute(sa.delete(table).where(table.c.trajectory_key.in_(keys)))
    await connection.execute(sa.delete(TRAJECTORIES).where(_T.key.in_(keys)))
