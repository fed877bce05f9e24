"""Judgements: rewards, values of steps and labels. Nothing is overwritten; the newest of a kind counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from psycopg.types.json import Jsonb

from services.common.db import Database
from services.trajectories.model import Annotation, Reward, RewardState, StepValue, Trajectory
from services.trajectories.store.rows import (
    OUTCOME,
    Connection,
    columns_of,
    fetch,
    reward,
    sha256_of,
    step_value,
    trajectories_of,
)
from services.trajectories.store.tables import COLUMNS, SCHEMA

_LOCK: Final = f"""
    SELECT {COLUMNS} FROM {SCHEMA}.trajectories WHERE tenant = %s AND trajectory_id = ANY(%s) ORDER BY key FOR UPDATE
"""  # noqa: S608 (names of our own, here and below)
_ADD: Final = f"""
    INSERT INTO {SCHEMA}.annotations (trajectory_key, annotation_id, content_hash, labels, time)
    SELECT trajectory_key, annotation_id, content_hash, labels, %s
    FROM unnest(%s::bigint[], %s::text[], %s::text[], %s::jsonb[]) WITH ORDINALITY
        AS news (trajectory_key, annotation_id, content_hash, labels, place)
    ORDER BY place ON CONFLICT DO NOTHING RETURNING key, trajectory_key
"""  # noqa: S608
_KNOWN: Final = f"""
    SELECT trajectory_key, content_hash FROM {SCHEMA}.annotations
    JOIN unnest(%s::bigint[], %s::text[]) AS wanted (trajectory_key, annotation_id)
    USING (trajectory_key, annotation_id)
"""  # noqa: S608
# What is behind counts as newer: rows are numbered in the order in which they are given.
_REWARDS: Final = f"""
    INSERT INTO {SCHEMA}.rewards (trajectory_key, annotation_key, name, state, value, reason, judge, rubric, version,
        details_json, time)
    SELECT trajectory_key, annotation_key, name, state, value, reason, judge, rubric, version, details_json, %s
    FROM unnest(%s::bigint[], %s::bigint[], %s::text[], %s::smallint[], %s::float8[], %s::text[], %s::text[],
        %s::text[], %s::text[], %s::text[]) WITH ORDINALITY AS news (trajectory_key, annotation_key, name, state,
        value, reason, judge, rubric, version, details_json, place)
    ORDER BY place
"""  # noqa: S608
_VALUES: Final = f"""
    INSERT INTO {SCHEMA}.step_values (trajectory_key, annotation_key, "index", name, value, judge, version)
    SELECT trajectory_key, annotation_key, "index", name, value, judge, version
    FROM unnest(%s::bigint[], %s::bigint[], %s::bigint[], %s::text[], %s::float8[], %s::text[], %s::text[])
        WITH ORDINALITY AS news (trajectory_key, annotation_key, "index", name, value, judge, version, place)
    ORDER BY place
"""  # noqa: S608
_CHANGE: Final = f"""
    UPDATE {SCHEMA}.trajectories t SET labels = news.labels, outcome_state = news.outcome_state,
        outcome_value = news.outcome_value
    FROM unnest(%s::bigint[], %s::jsonb[], %s::smallint[], %s::float8[])
        AS news (key, labels, outcome_state, outcome_value)
    WHERE t.key = news.key
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
        self, tenant: str, trajectory_id: str, annotation: Annotation, now: datetime
    ) -> tuple[str, Trajectory | None]:
        """Add an annotation; what became of it (see `annotate_all`), and the trajectory as it is then."""
        async with self._database.driver() as connection:
            ((outcome, row),) = await annotate_all(connection, tenant, {trajectory_id: annotation}, now)
            if row is None:
                return outcome, None
            (found,) = await trajectories_of(connection, [row])
        return outcome, found

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


async def annotate_all(
    connection: Connection, tenant: str, annotations: Mapping[str, Annotation], now: datetime
) -> list[tuple[str, dict[str, Any] | None]]:
    """Add annotations within a transaction, by the ids of their trajectories.

    Returns, of each, added, same (it is there), other (its id has other content), ahead (a value is of a step that is
    not there) or missing; and the trajectory's row.
    """
    found = {row["trajectory_id"]: row for row in await fetch(connection, _LOCK, [tenant, list(annotations)])}
    outcomes = {name: "ahead" if name in found else "missing" for name in annotations}
    # State T, behind the last action, has a value too.
    news = [
        (found[name], annotation)
        for name, annotation in annotations.items()
        if name in found and all(value.index <= found[name]["steps"] for value in annotation.step_values)
    ]
    hashes = [_content_hash(annotation) for _row, annotation in news]
    named: list[list[Any]] = [
        [row["key"] for row, _annotation in news],
        [annotation.annotation_id for _row, annotation in news],
    ]
    labels = [Jsonb(dict(annotation.labels)) for _row, annotation in news]
    rows = await fetch(connection, _ADD, [now, *named, hashes, labels])
    keys = {row["trajectory_key"]: row["key"] for row in rows}
    known = await fetch(connection, _KNOWN, named) if len(keys) < len(news) else ()
    said = {row["trajectory_key"]: row["content_hash"] for row in known}
    for (row, _annotation), content in zip(news, hashes, strict=True):
        there = "same" if said.get(row["key"]) == content else "other"
        outcomes[row["trajectory_id"]] = "added" if row["key"] in keys else there
    await _insert(connection, [(keys[row["key"]], row, one) for row, one in news if row["key"] in keys], now)
    return [(outcomes[name], found.get(name)) for name in annotations]


def _content_hash(annotation: Annotation) -> str:
    return sha256_of(repr((annotation.rewards, annotation.step_values, sorted(annotation.labels.items()))))


async def _insert(
    connection: Connection, news: Sequence[tuple[int, dict[str, Any], Annotation]], now: datetime
) -> None:
    """Write what annotations say, and bring the trajectories' rows in step; each with the annotation's key."""
    rewards = [
        (
            *(row["key"], key, one.name, one.state.value, one.value, one.reason, one.judge, one.rubric),
            *(one.version, one.details_json),
        )
        for key, row, annotation in news
        for one in annotation.rewards
    ]
    values = [
        (row["key"], key, one.index, one.name, one.value, one.judge, one.version)
        for key, row, annotation in news
        for one in annotation.step_values
    ]
    if rewards:
        await connection.execute(_REWARDS, [now, *columns_of(rewards)])
    if values:
        await connection.execute(_VALUES, columns_of(values))
    changed = []
    for _key, row, annotation in news:
        if changes := _changes(row["labels"], annotation):
            row.update(changes)
            changed.append((row["key"], Jsonb(row["labels"]), row["outcome_state"], row["outcome_value"]))
    if changed:
        await connection.execute(_CHANGE, columns_of(changed))


def _changes(labels: Mapping[str, str], annotation: Annotation) -> dict[str, Any]:
    """What brings the trajectory's row in step: its labels, and the outcome that lists are filtered by."""
    changes: dict[str, Any] = {}
    outcomes = [one for one in annotation.rewards if one.name == OUTCOME]
    if outcomes:
        scored = outcomes[-1].state is RewardState.SCORED
        changes |= {"outcome_state": outcomes[-1].state.value, "outcome_value": outcomes[-1].value if scored else None}
    if annotation.labels:
        merged = {**labels, **annotation.labels}
        changes["labels"] = {name: value for name, value in merged.items() if value}
    return changes


async def _of(connection: Connection, table: str, annotation_keys: Sequence[int]) -> list[dict[str, Any]]:
    query = f"SELECT * FROM {SCHEMA}.{table} WHERE annotation_key = ANY(%s) ORDER BY key"  # noqa: S608
    return await fetch(connection, query, [annotation_keys])
