"""Brings trajectories into a store by the ten thousand, sealed and packed, past the wire.

What the service does to a step and to a sealed trajectory is done by the service's own code: the same checks and sums,
the same packing, the same object and row. Only the calls, the commits and the rows of steps in between are left out.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import psycopg
from orchard import Task
from orchard._client.trajectories.convert import step_message
from psycopg.types.json import Jsonb

from services.trajectories.housekeeping import object_name
from services.trajectories.model import TEXT_FIELDS, RewardState, Status
from services.trajectories.packing import pack
from services.trajectories.servicer_steps import new_step
from services.trajectories.store.appends import sum_of
from services.trajectories.store.tables import COUNTS, SCHEMA
from tests.bench.trajectory_texts import Generator

_CHUNK: Final = 250
_MODELS: Final = ("small", "medium", "large")
_TENANT: Final = "default"
_COLUMNS: Final = (
    *("key", "tenant", "trajectory_id", *TEXT_FIELDS, "attempt", "tools_hash", "metadata_json", "labels"),
    *("description_hash", "status", "status_message", "writer", *COUNTS, "cost_usd", "outcome_state", "outcome_value"),
    *("object_name", "content_hash", "create_time", "seal_time"),
)


@dataclass(frozen=True, slots=True)
class Target:
    """Where to: PostgreSQL, the folder of objects, and the dataset that tells what is the benchmark's."""

    database: str
    objects: Path
    dataset: str


def task(dataset: str, number: int) -> Task:
    """What a trajectory is an attempt at: four attempts at each instance."""
    return Task(f"instance-{number // 4}", dataset, f"repo-{number // 4 % 50}")


def model(number: int) -> str:
    """Whose attempt it is; an instance's four are of one model."""
    return _MODELS[number // 4 % len(_MODELS)]


def outcome(number: int) -> float:
    """Every third attempt resolves its instance."""
    return float(number % 3 == 0)


def load(target: Target, numbers: range) -> float:
    """Write these, and say how far it is; returns the seconds that it took."""
    started, done = time.perf_counter(), 0
    chunks = [numbers[start : start + _CHUNK] for start in range(0, len(numbers), _CHUNK)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), context, _prepare, (target,)) as workers:
        for size in workers.map(_chunk, chunks):
            done += size
            took = time.perf_counter() - started
            left = took / done * (len(numbers) - done)
            print(f"\r  {done:,} of {len(numbers):,} loaded, {left:,.0f} s left  ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    with psycopg.connect(target.database, autocommit=True) as connection:
        # As autovacuum does after so many rows, within its minute.
        connection.execute(f"VACUUM (ANALYZE) {SCHEMA}.trajectories, {SCHEMA}.rewards")
    return time.perf_counter() - started


class _Worker:
    """One process's part."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._generator = Generator()

    def chunk(self, numbers: Sequence[int]) -> int:
        """Write some in one transaction."""
        with psycopg.connect(self._target.database) as connection:
            keys = _keys(connection, "trajectories", len(numbers))
            rows = [self._row(key, number) for key, number in zip(keys, numbers, strict=True)]
            _copy(connection, "trajectories", _COLUMNS, rows)
            now, annotations = datetime.now(UTC), _keys(connection, "annotations", len(numbers))
            judged = list(zip(annotations, keys, numbers, strict=True))
            columns: tuple[str, ...] = ("key", "trajectory_key", "annotation_id", "content_hash", "labels", "time")
            _copy(connection, "annotations", columns, [(one, key, "a", "", Jsonb({}), now) for one, key, _ in judged])
            columns = ("annotation_key", "trajectory_key", "name", "state", "value", "reason", "judge", "rubric")
            scored = RewardState.SCORED.value
            _copy(
                connection,
                "rewards",
                (*columns, "version", "details_json", "time"),
                [(one, key, "outcome", scored, outcome(n), "", "tests", "", "", "", now) for one, key, n in judged],
            )
        return len(numbers)

    def _row(self, key: int, number: int) -> tuple[Any, ...]:
        messages = [step_message(step)[0] for step in self._generator.steps(number)]
        for index, message in enumerate(messages):
            message.index = index
            message.time.GetCurrentTime()
        # No text is large enough for a body of its own.
        steps = asyncio.run(_checked(messages))
        totals = sum_of([step.totals for step in steps])
        packed, content_hash = pack([step.body for step in steps])
        name = object_name(_TENANT, key, content_hash)
        path = self._target.objects / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(packed)
        about = task(self._target.dataset, number)
        texts = dict.fromkeys(TEXT_FIELDS, "") | {
            "dataset": about.dataset,
            "instance_id": about.instance_id,
            "repo": about.repo,
            "model": model(number),
        }
        now, counts = datetime.now(UTC), [getattr(totals, count) for count in COUNTS]
        return (
            *(key, _TENANT, f"{self._target.dataset}-{number}", *texts.values(), number % 4, "", "", Jsonb({})),
            *("", Status.COMPLETED.value, "", "w", *counts, totals.cost_usd, RewardState.SCORED.value, outcome(number)),
            *(name, content_hash, now, now),
        )


_worker: _Worker


def _prepare(target: Target) -> None:
    global _worker  # noqa: PLW0603 (a process of a pool has nowhere else to keep what it made ready)
    _worker = _Worker(target)


def _chunk(numbers: Sequence[int]) -> int:
    return _worker.chunk(numbers)


async def _checked(messages: Sequence[Any]) -> list[Any]:
    return [await new_step(message, _TENANT, None) for message in messages]  # type: ignore[arg-type]


def _keys(connection: psycopg.Connection[Any], table: str, count: int) -> list[int]:
    query = f"SELECT nextval(pg_get_serial_sequence('{SCHEMA}.{table}', 'key')) FROM generate_series(1, %s)"
    return [row[0] for row in connection.execute(query, [count])]


def _copy(
    connection: psycopg.Connection[Any], table: str, columns: Sequence[str], rows: Sequence[tuple[Any, ...]]
) -> None:
    with connection.cursor().copy(f"COPY {SCHEMA}.{table} ({', '.join(columns)}) FROM STDIN") as copy:
        for row in rows:
            copy.write_row(row)
