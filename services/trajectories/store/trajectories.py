"""Trajectories: created, found, sealed, packed, deleted."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Final

from psycopg.types.json import Jsonb

from services.common.db import Database
from services.common.errors import UnavailableError
from services.trajectories.model import TEXT_FIELDS, Description, Filter, Order, Status, StepValue, Trajectory
from services.trajectories.store import filters
from services.trajectories.store.changes import told
from services.trajectories.store.packing import Packing, packing
from services.trajectories.store.rows import (
    Connection,
    Row,
    fetch,
    newest_step_values,
    sha256_of,
    steps_of,
    trajectories_of,
    trajectory_of,
)
from services.trajectories.store.tables import COLUMNS, COUNTS, SCHEMA

_NAMED: Final = f"SELECT {COLUMNS} FROM {SCHEMA}.trajectories WHERE tenant = %s AND trajectory_id = ANY(%s)"  # noqa: S608 (names of our own, here and below)
_HELD: Final = f"{_NAMED} ORDER BY key FOR UPDATE"
_TEXTS: Final = ("trajectory_id", *TEXT_FIELDS, "tools_hash", "metadata_json", "description_hash")
_SAID: Final = (*_TEXTS, "attempt", "labels")
_EMPTY: Final = {"status_message": "''", "writer": "''", **dict.fromkeys(COUNTS, "0"), "cost_usd": "0"}
# In the order in which they are given, which is then that of their keys and of exports.
_CREATE: Final = f"""
    WITH offered AS (
        INSERT INTO {SCHEMA}.tools (tenant, hash, body)
        SELECT %s, hash, body FROM unnest(%s::text[], %s::text[]) AS t (hash, body) ORDER BY hash ON CONFLICT DO NOTHING
    )
    INSERT INTO {SCHEMA}.trajectories (tenant, status, create_time, {", ".join((*_SAID, *_EMPTY))}, object_name,
        content_hash)
    SELECT %s, {Status.OPEN.value}, %s, {", ".join((*_SAID, *_EMPTY.values()))}, '', ''
    FROM unnest({"%s::text[], " * len(_TEXTS)} %s::integer[], %s::jsonb[]) WITH ORDINALITY
        AS news ({", ".join(_SAID)}, place)
    ORDER BY place ON CONFLICT DO NOTHING RETURNING {COLUMNS}
"""  # noqa: S608
_SEAL: Final = f"""
    WITH sealed AS (
        UPDATE {SCHEMA}.trajectories t SET status = ends.status, status_message = ends.message, seal_time = %s
        FROM unnest(%s::text[], %s::smallint[], %s::text[], %s::bigint[]) AS ends (id, status, message, expected)
        WHERE t.tenant = %s AND t.trajectory_id = ends.id AND t.status = {Status.OPEN.value}
            AND t.steps = coalesce(ends.expected, t.steps)
        RETURNING {", ".join(f"t.{name}" for name in COLUMNS.split(", "))}
    ), told AS ({told("sealed")})
    SELECT {COLUMNS}, (SELECT count(*) FROM told) FROM sealed
"""  # noqa: S608
_GARBAGE: Final = f"""
    INSERT INTO {SCHEMA}.garbage (object_name, time) SELECT name, %s FROM unnest(%s::text[]) AS name
    ON CONFLICT DO NOTHING
"""  # noqa: S608
_PARTS: Final = ("steps", "annotations", "rewards", "step_values", "blob_references")


@dataclass(frozen=True, slots=True)
class End:
    """How a trajectory is to end. `expected_steps`: how many it must have; None: not checked."""

    trajectory_id: str
    status: Status
    message: str
    expected_steps: int | None


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

    async def create(self, tenant: str, description: Description, now: datetime) -> tuple[Trajectory, bool]:
        """Make a trajectory, or find the one of this id; and whether it was described in the same way."""
        async with self._database.driver(autocommit=True) as connection:
            ((row, made, same),) = await create_all(connection, tenant, [description], now, hold=False)
            if made:
                return trajectory_of(row, (), description.tools_json), True
            (found,) = await trajectories_of(connection, [row])
            return found, same

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

    async def seal(self, tenant: str, end: End, now: datetime) -> tuple[Trajectory | None, bool]:
        """End an open trajectory that has the expected steps; it as it is then, and whether it was ended now."""
        async with self._database.driver(autocommit=True) as connection:
            while not (rows := await seal_all(connection, tenant, [end], now)):
                found = await _one(connection, tenant, end.trajectory_id)
                # Else what was missing came between the two.
                if (
                    found is None
                    or found.status is not Status.OPEN
                    or end.expected_steps not in (None, found.totals.steps)
                ):
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


async def create_all(
    connection: Connection, tenant: str, descriptions: Sequence[Description], now: datetime, *, hold: bool
) -> list[tuple[Row, bool, bool]]:
    """Make trajectories, or find those of their ids: of each its row, whether it was made, and whether it is described
    in the same way. With `hold` nobody changes those that were found before the commit.

    Raises:
        UnavailableError: one of them was deleted meanwhile.
    """
    tools = {sha256_of(one.tools_json): one.tools_json for one in descriptions if one.tools_json}
    hashes = [_description_hash(one) for one in descriptions]
    columns: list[list[Any]] = [
        [one.trajectory_id for one in descriptions],
        *([getattr(one, name) for one in descriptions] for name in TEXT_FIELDS),
        [sha256_of(one.tools_json) if one.tools_json else "" for one in descriptions],
        [one.metadata_json for one in descriptions],
        hashes,
        [one.attempt for one in descriptions],
        [Jsonb(dict(one.labels)) for one in descriptions],
    ]
    rows = await fetch(connection, _CREATE, [tenant, list(tools), list(tools.values()), tenant, now, *columns])
    made = {row["trajectory_id"]: row for row in rows}
    missing = [one.trajectory_id for one in descriptions if one.trajectory_id not in made]
    rows = await fetch(connection, _HELD if hold else _NAMED, [tenant, missing]) if missing else []
    found = made | {row["trajectory_id"]: row for row in rows}
    if len(found) < len(descriptions):
        raise UnavailableError("the trajectory of this id was just deleted; retry", reason="TRAJECTORY_DELETED")
    return [
        (row := found[one.trajectory_id], one.trajectory_id in made, row["description_hash"] == said)
        for one, said in zip(descriptions, hashes, strict=True)
    ]


async def seal_all(connection: Connection, tenant: str, ends: Sequence[End], now: datetime) -> list[dict[str, Any]]:
    """End those that are open and have the expected steps; the rows of these."""
    columns: list[list[Any]] = [
        [end.trajectory_id for end in ends],
        [end.status.value for end in ends],
        [end.message for end in ends],
        [end.expected_steps for end in ends],
    ]
    return await fetch(connection, _SEAL, [now, *columns, tenant])


def _description_hash(description: Description) -> str:
    """Of what a repeat must say again."""
    plain = [(field.name, getattr(description, field.name)) for field in fields(description)]
    return sha256_of(repr([(name, sorted(value.items()) if name == "labels" else value) for name, value in plain]))


async def _one(connection: Connection, tenant: str, trajectory_id: str) -> Trajectory | None:
    found = await trajectories_of(connection, await fetch(connection, _NAMED, [tenant, [trajectory_id]]))
    return found[0] if found else None


async def _delete_rows(connection: Connection, keys: Sequence[int]) -> None:
    for table in _PARTS:
        await connection.execute(f"DELETE FROM {SCHEMA}.{table} WHERE trajectory_key = ANY(%s)", [keys])  # noqa: S608
    await connection.execute(f"DELETE FROM {SCHEMA}.trajectories WHERE key = ANY(%s)", [keys])  # noqa: S608
