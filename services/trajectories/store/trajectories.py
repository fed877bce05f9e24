"""Trajectories: created, found, sealed, packed, deleted."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from psycopg.types.json import Jsonb

from services.common.db import Database
from services.common.errors import UnavailableError
from services.trajectories.model import TEXT_FIELDS, Description, Filter, Order, Status, StepValue, Trajectory
from services.trajectories.store import filters
from services.trajectories.store.changes import CHANNEL
from services.trajectories.store.packing import Packing, packing
from services.trajectories.store.rows import (
    Connection,
    fetch,
    newest_step_values,
    steps_of,
    trajectories_of,
    trajectory_of,
)
from services.trajectories.store.tables import COLUMNS, COUNTS, SCHEMA

_NAMED: Final = f"SELECT {COLUMNS} FROM {SCHEMA}.trajectories WHERE tenant = %s AND trajectory_id = %s"  # noqa: S608 (names of our own, here and below)
_CREATED: Final = (
    *("tenant", "trajectory_id", *TEXT_FIELDS, "attempt", "tools_hash", "metadata_json", "labels"),
    *("description_hash", "status", "create_time"),
)
_EMPTY: Final = {"status_message": "''", "writer": "''", **dict.fromkeys(COUNTS, "0"), "cost_usd": "0"}
_CREATE: Final = f"""
    WITH offered AS (
        INSERT INTO {SCHEMA}.tools (tenant, hash, body)
        SELECT %(tenant)s, %(tools_hash)s, %(tools_json)s WHERE %(tools_hash)s::text <> '' ON CONFLICT DO NOTHING
    )
    INSERT INTO {SCHEMA}.trajectories ({", ".join((*_CREATED, *_EMPTY))}, object_name, content_hash)
    VALUES ({", ".join(f"%({name})s" for name in _CREATED)}, {", ".join(_EMPTY.values())}, '', '')
    ON CONFLICT DO NOTHING RETURNING {COLUMNS}
"""  # noqa: S608
_SEAL: Final = f"""
    UPDATE {SCHEMA}.trajectories SET status = %s, status_message = %s, seal_time = %s
    WHERE tenant = %s AND trajectory_id = %s AND status = {Status.OPEN.value} AND steps = coalesce(%s::bigint, steps)
    RETURNING {COLUMNS}, pg_notify('{CHANNEL}', key::text)
"""  # noqa: S608
_GARBAGE: Final = f"""
    INSERT INTO {SCHEMA}.garbage (object_name, time) SELECT name, %s FROM unnest(%s::text[]) AS name
    ON CONFLICT DO NOTHING
"""  # noqa: S608
_PARTS: Final = ("steps", "annotations", "rewards", "step_values", "blob_references")


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
            "tools_json": description.tools_json,
            "metadata_json": description.metadata_json,
            "labels": Jsonb(dict(description.labels)),
            "description_hash": description_hash,
            "status": Status.OPEN.value,
            "create_time": now,
        }
        async with self._database.driver(autocommit=True) as connection:
            made = await fetch(connection, _CREATE, values)
            if made:
                return trajectory_of(made[0], (), description.tools_json), True
            rows = await fetch(connection, _NAMED, [tenant, description.trajectory_id])
            if not rows:
                raise UnavailableError("the trajectory of this id was just deleted; retry", reason="TRAJECTORY_DELETED")
            (found,) = await trajectories_of(connection, rows)
            return found, rows[0]["description_hash"] == description_hash

    async def get(self, tenant: str, trajectory_id: str) -> Trajectory | None:
        """One trajectory."""
        async with self._database.driver(autocommit=True) as connection:
            return await _one(connection, tenant, trajectory_id)

    async def step_values(self, keys: Sequence[int]) -> dict[int, list[StepValue]]:
        """The newest values of steps, by trajectory."""
        async with self._database.driver(autocommit=True) as connection:
            return await newest_step_values(connection, keys)

    async def steps(self, key: int, after: int, most_bytes: int) -> list[tuple[int, bytes]]:
        """Index and body of the steps behind an index that are still rows; `most_bytes` unless one is larger."""
        async with self._database.driver(autocommit=True) as connection:
            return await steps_of(connection, key, after, most_bytes)

    async def seal(  # noqa: PLR0917 (one statement's values)
        self, tenant: str, trajectory_id: str, status: Status, message: str, expected_steps: int | None, now: datetime
    ) -> tuple[Trajectory | None, bool]:
        """End an open trajectory that has the expected steps; it as it is then, and whether it was ended now."""
        values = [status.value, message, now, tenant, trajectory_id, expected_steps]
        async with self._database.driver(autocommit=True) as connection:
            while not (rows := await fetch(connection, _SEAL, values)):
                found = await _one(connection, tenant, trajectory_id)
                # Else what was missing came between the two.
                if found is None or found.status is not Status.OPEN or expected_steps not in (None, found.totals.steps):
                    return found, False
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
        position = None if after is None else after[1:]
        async with self._database.driver(autocommit=True) as connection:
            query = filters.page(
                where, order, ascending=ascending, without_value=without_value, after=position, count=count
            )
            rows = await fetch(connection, *query)
            if order is Order.OUTCOME and not without_value and len(rows) < count:
                query = filters.page(
                    where, order, ascending=ascending, without_value=True, after=None, count=count - len(rows)
                )
                rest = await fetch(connection, *query)
                without_value = bool(rest)
                rows += rest
            found = await trajectories_of(connection, rows)
        if len(rows) < count:
            return found, None
        value = rows[-1]["order_value"]
        return found, (without_value, value.isoformat() if isinstance(value, datetime) else value, rows[-1]["key"])

    async def count(self, tenant: str, wanted: Filter) -> int:
        """How many a filter selects."""
        where, values = filters.conditions(tenant, wanted)
        async with self._database.driver(autocommit=True) as connection:
            cursor = await connection.execute(f"SELECT count(*) FROM {SCHEMA}.trajectories WHERE {where}", values)  # noqa: S608
            return int((await cursor.fetchall())[0][0])

    async def export_page(
        self, tenant: str, wanted: Filter, after: int, count: int
    ) -> tuple[Sequence[Trajectory], dict[int, list[StepValue]]]:
        """The next trajectories by key, with the values of their steps."""
        where, values = filters.conditions(tenant, wanted)
        query = f"SELECT {COLUMNS} FROM {SCHEMA}.trajectories WHERE {where} AND key > %s ORDER BY key LIMIT %s"  # noqa: S608
        async with self._database.driver(autocommit=True) as connection:
            found = await trajectories_of(connection, await fetch(connection, query, [*values, after, count]))
            return found, await newest_step_values(connection, [trajectory.key for trajectory in found])

    def packing(self, most_bytes: int, later: Collection[int] = ()) -> AbstractAsyncContextManager[Packing | None]:
        """Sealed trajectories whose steps are rows; see packing.py."""
        return packing(self._database, most_bytes, later)

    async def delete(
        self, tenant: str, wanted: Filter, *, include_open: bool, limit: int, dry_run: bool, now: datetime
    ) -> Deleted:
        """Delete up to `limit` of what a filter selects; with `dry_run` only say what would go."""
        where, values = filters.conditions(tenant, wanted)
        closed = "true" if include_open else f"status <> {Status.OPEN.value}"
        counts = f"""
            SELECT count(*) FILTER (WHERE {closed}), coalesce(sum(text_bytes) FILTER (WHERE {closed}), 0),
                count(*) FILTER (WHERE NOT {closed})
            FROM {SCHEMA}.trajectories WHERE {where}
        """  # noqa: S608
        chosen = f"""
            SELECT key, object_name, text_bytes FROM {SCHEMA}.trajectories
            WHERE {where} AND {closed} ORDER BY key LIMIT %s FOR UPDATE
        """  # noqa: S608
        async with self._database.driver() as connection:
            ((total, text_bytes, skipped),) = await (await connection.execute(counts, values)).fetchall()
            if dry_run:
                return Deleted(total, 0, int(text_bytes), skipped)
            rows = await (await connection.execute(chosen, [*values, limit])).fetchall()
            await _delete_rows(connection, [row[0] for row in rows])
            await connection.execute(_GARBAGE, [now, [row[1] for row in rows if row[1]]])
        return Deleted(len(rows), total - len(rows), sum(row[2] for row in rows), skipped)


async def _one(connection: Connection, tenant: str, trajectory_id: str) -> Trajectory | None:
    found = await trajectories_of(connection, await fetch(connection, _NAMED, [tenant, trajectory_id]))
    return found[0] if found else None


async def _delete_rows(connection: Connection, keys: Sequence[int]) -> None:
    for table in _PARTS:
        await connection.execute(f"DELETE FROM {SCHEMA}.{table} WHERE trajectory_key = ANY(%s)", [keys])  # noqa: S608
    await connection.execute(f"DELETE FROM {SCHEMA}.trajectories WHERE key = ANY(%s)", [keys])  # noqa: S608
