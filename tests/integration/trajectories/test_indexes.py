"""Lists and counts are read from an index, however many trajectories there are; and the migration that made them so."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from services.common.db import Database, connect, migrate
from services.trajectories.__main__ import MIGRATIONS
from services.trajectories.model import Description, Filter, Order, Reward, RewardState
from services.trajectories.store import filters, stats
from services.trajectories.store.annotations import Annotation, AnnotationStore
from services.trajectories.store.tables import SCHEMA, TRAJECTORIES
from services.trajectories.store.trajectories import TrajectoryStore

NOW = datetime(2026, 1, 1, tzinfo=UTC)
WANTED = Filter(texts={"dataset": ("d",)})


@pytest.fixture(scope="module")
def own_database(postgres_url: str) -> str:
    """A database that nobody else is connected to."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("CREATE DATABASE own_trajectories")
    base, query = (postgres_url.partition("?")[part] for part in (0, 2))
    url = f"{base.rpartition('/')[0]}/own_trajectories?{query}"
    migrate(url, schema=SCHEMA, migrations=MIGRATIONS)
    return url


@pytest.fixture
def planner(own_database: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection that sorts and reads whole tables only where nothing else is possible."""
    with psycopg.connect(own_database, autocommit=True, cursor_factory=psycopg.ClientCursor) as connection:
        for way in ("seqscan", "sort", "bitmapscan"):
            connection.execute(f"SET enable_{way} = off")
        yield connection


def plan(connection: psycopg.Connection[Any], query: str, values: list[Any]) -> str:
    return "\n".join(row[0] for row in connection.execute("EXPLAIN " + query, values))


@pytest.mark.parametrize("ascending", [False, True])
@pytest.mark.parametrize("order", Order)
def test_a_page_anywhere_in_a_list_is_read_in_its_order(
    planner: psycopg.Connection[Any], order: Order, ascending: bool
) -> None:
    where = filters.conditions("t", WANTED)
    value: Any = NOW if order is Order.CREATED else 7
    for without_value in (False, True) if order is Order.OUTCOME else (False,):
        for after in (None, (value, 1000)):
            query = filters.page(where, order, ascending=ascending, without_value=without_value, after=after, count=100)
            found = plan(planner, *query)
            assert f"using trajectories_{order.name.lower()}" in found, found
            assert "Sort" not in found, found


async def test_counts_read_no_row(own_database: str, planner: psycopg.Connection[Any]) -> None:
    db = Database(connect(own_database))
    await TrajectoryStore(db).create("counted", Description(trajectory_id="0", dataset="d"), NOW)
    await db.close()
    columns = ", ".join(column.name for column in TRAJECTORIES.c if column.name not in ("key", "trajectory_id"))
    planner.execute(
        f"INSERT INTO {SCHEMA}.trajectories (trajectory_id, {columns}) "
        f"SELECT number, {columns} FROM {SCHEMA}.trajectories, generate_series(1, 2000) AS number "
        "WHERE tenant = 'counted'"
    )
    planner.execute(f"VACUUM (ANALYZE) {SCHEMA}.trajectories")
    planner.execute("SET enable_sort = on")
    where, values = filters.conditions("counted", WANTED)
    for value in ("''", "harness", "model", "repo", "dataset", "website", "policy_version"):
        for query in (stats.counts_query(value, where), stats.families_query(value, where)):
            found = plan(planner, query, values)
            assert "Index Only Scan" in found, found
            assert "using trajectories_counts" in found, found


async def index_of_outcomes(url: str) -> str:
    async with await psycopg.AsyncConnection.connect(url) as connection:
        cursor = await connection.execute("SELECT indexdef FROM pg_indexes WHERE indexname = 'trajectories_outcome'")
        return str((await cursor.fetchall())[0][0])


async def test_outcomes_of_before_are_listed_after_the_migration_and_back(own_database: str) -> None:
    """Migration 0004 on a database with trajectories, and back."""
    migrate(own_database, schema=SCHEMA, migrations=MIGRATIONS, revision="-1")
    db = Database(connect(own_database))
    store, annotations = TrajectoryStore(db), AnnotationStore(db)

    async def listed() -> list[str]:
        found, _ = await store.page("t", Filter(), Order.OUTCOME, ascending=False, after=None, count=10)
        return [one.description.trajectory_id for one in found]

    try:
        for number, value in enumerate((0.5, None, 1.0)):
            await store.create("t", Description(trajectory_id=f"t{number}"), NOW)
            if value is not None:
                reward = Reward("outcome", RewardState.SCORED, value)
                await annotations.add("t", f"t{number}", Annotation("a", (reward,)), NOW)
        before = await listed()
        assert "IS NULL" in await index_of_outcomes(own_database)
        migrate(own_database, schema=SCHEMA, migrations=MIGRATIONS)
        after = await listed()
        assert "IS NULL" not in await index_of_outcomes(own_database)
        migrate(own_database, schema=SCHEMA, migrations=MIGRATIONS, revision="-1")
        assert before == after == await listed() == ["t2", "t0", "t1"]
    finally:
        await db.close()
        migrate(own_database, schema=SCHEMA, migrations=MIGRATIONS)
