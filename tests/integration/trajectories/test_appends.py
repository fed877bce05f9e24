"""Appends of many writers in one batch: what simply goes on and what has to be looked at share it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import psycopg
import pytest

from services.common.db import Database, connect
from services.common.errors import (
    AbortedError,
    FailedPreconditionError,
    NotFoundError,
    OrchardError,
    ResourceExhaustedError,
    UnavailableError,
)
from services.trajectories.appender import Appender
from services.trajectories.model import BlobReference, Description, NewStep, Status, Totals, Trajectory
from services.trajectories.store import trajectories
from services.trajectories.store.appends import STEPS_MOST, Append, AppendStore
from services.trajectories.store.blobs import BlobIndex
from services.trajectories.store.changes import CHANNEL, KEYS_A_NOTICE
from services.trajectories.store.rows import Connection
from services.trajectories.store.tables import SCHEMA, TRAJECTORIES
from services.trajectories.store.trajectories import End, TrajectoryStore
from tests.integration.trajectories.conftest import TABLES

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ONE = Totals(steps=1, turns=1, prompt_tokens=5, completion_tokens=2, cached_tokens=1, cost_usd=0.5, longest_tokens=7)
BLOB = BlobReference("a" * 64, 1, "image/png")


@pytest.fixture
async def db(database: str) -> AsyncIterator[Database]:
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("TRUNCATE " + ", ".join(f"{SCHEMA}.{name}" for name in TABLES.split(", ")))
    made = Database(connect(database))
    yield made
    await made.close()


@pytest.fixture
def store(db: Database) -> TrajectoryStore:
    return TrajectoryStore(db)


async def create(store: TrajectoryStore, *names: str) -> None:
    for name in names:
        await store.create("t", Description(trajectory_id=name), NOW)


def an_append(name: str, first: int, *bodies: bytes, writer: str = "w", **fields) -> Append:
    blobs = fields.pop("blobs", ())
    steps = tuple(NewStep(first + place, body, ONE, blobs) for place, body in enumerate(bodies))
    return Append("t", name, writer, fields.pop("take_over", False), steps)


async def test_a_batch_of_every_kind_of_append_gets_each_its_own_answer(db: Database, store: TrajectoryStore) -> None:
    await create(
        store, "new", "goes-on", "repeated", "other", "gap", "twice", "taken", "sealed", "blob", "opened", "full"
    )
    appends = AppendStore(db)
    begun = [an_append(name, 0, b"0", b"1") for name in ("goes-on", "repeated", "other", "gap", "twice", "sealed")]
    assert await appends.append([*begun, an_append("taken", 0, b"0", writer="first")]) == [2] * 6 + [1]
    await store.seal("t", End("sealed", Status.COMPLETED, "", None), NOW)
    async with BlobIndex(db).storing("t", BLOB, NOW):
        pass
    batch: list[tuple[Append, int | type[OrchardError]]] = [
        (an_append("new", 0, b"0"), 1),
        (an_append("goes-on", 2, b"2", b"3"), 4),
        (an_append("repeated", 0, b"0", b"1", b"2"), 3),
        (an_append("other", 1, b"x"), AbortedError),
        (an_append("gap", 3, b"3"), FailedPreconditionError),
        (an_append("twice", 2, b"2"), 3),
        (an_append("twice", 3, b"3"), 4),
        (an_append("taken", 1, b"1", writer="second"), AbortedError),
        (an_append("sealed", 2, b"2"), FailedPreconditionError),
        (an_append("nobody", 0, b"0"), NotFoundError),
        (an_append("blob", 0, b"0", blobs=(BLOB,)), 1),
        (an_append("opened", 0), 0),
        (an_append("full", STEPS_MOST, b"0"), ResourceExhaustedError),
    ]
    results = await appends.append([append for append, _ in batch])
    found = [result if isinstance(result, int) else type(result) for result in results]
    assert found == [wanted for _, wanted in batch]
    # A repeat of the whole batch adds nothing; each learns where its trajectory ends now.
    found[5] = 4
    again = await appends.append([append for append, _ in batch])
    assert [result if isinstance(result, int) else type(result) for result in again] == found
    wanted = {"new": 1, "goes-on": 4, "repeated": 3, "other": 2, "gap": 2, "twice": 4, "taken": 1, "blob": 1, "full": 0}
    for name, count in wanted.items():
        kept = await store.get("t", name)
        assert kept is not None
        bodies = [body for _index, body in await store.steps(kept.key, -1, 1 << 20)]
        assert bodies == [str(index).encode() for index in range(count)]
        assert kept.totals == Totals(count, count, 5 * count, 2 * count, count, 0.5 * count, 0, 7 if count else 0)


async def test_what_is_changed_meanwhile_is_looked_at_again(
    db: Database, store: TrajectoryStore, database: str
) -> None:
    """Another transaction has the row: the append waits, and goes by what that one left."""
    appends = AppendStore(db)
    for change, wanted in (
        ('labels = \'{"a": "b"}\'', 1),
        ("writer = 'second'", AbortedError),
        (f"status = {Status.COMPLETED.value}", FailedPreconditionError),
    ):
        name = f"x-{wanted if isinstance(wanted, int) else wanted.__name__}"
        await create(store, name)
        async with (
            await psycopg.AsyncConnection.connect(database) as other,
            await psycopg.AsyncConnection.connect(database, autocommit=True) as watching,
        ):
            await other.execute(f"UPDATE {SCHEMA}.trajectories SET {change} WHERE trajectory_id = '{name}'")
            appending = asyncio.ensure_future(appends.append([an_append(name, 0, b"0")]))
            waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%%wanted%%'"
            async with asyncio.timeout(110):
                while (await (await watching.execute(waits)).fetchone()) == (0,):
                    assert not appending.done()
            await other.commit()
        (result,) = await appending
        assert (result if isinstance(result, int) else type(result)) == wanted


async def test_a_seal_takes_the_step_that_comes_as_it_looks(
    db: Database, store: TrajectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create(store, "late", "never")
    look = trajectories._one

    async def late(connection: Connection, tenant: str, name: str) -> Trajectory | None:
        await AppendStore(db).append([an_append("late", 0, b"0")])
        return await look(connection, tenant, name)

    monkeypatch.setattr(trajectories, "_one", late)
    for name, expected in (("late", (Status.COMPLETED, 1, True)), ("never", (Status.OPEN, 0, False))):
        found, sealed = await store.seal("t", End(name, Status.COMPLETED, "", 1), NOW)
        assert found is not None
        assert (found.status, found.totals.steps, sealed) == expected


async def test_changes_of_more_than_a_notice_holds_are_all_told(
    db: Database, store: TrajectoryStore, database: str
) -> None:
    names = [f"n-{number}" for number in range(2 * KEYS_A_NOTICE + 5)]
    await create(store, names[0])
    columns = ", ".join(column.name for column in TRAJECTORIES.c if column.name not in ("key", "trajectory_id"))
    copies = f"SELECT 'n-' || number, {columns} FROM {SCHEMA}.trajectories, generate_series(1, {len(names) - 1}) number"
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(f"INSERT INTO {SCHEMA}.trajectories (trajectory_id, {columns}) {copies}")
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as listener:
        await listener.execute(f"LISTEN {CHANNEL}")
        assert await AppendStore(db).append([an_append(name, 0, b"0") for name in names]) == [1] * len(names)
        told: set[int] = set()
        async for notice in listener.notifies(timeout=60):
            told |= set(map(int, notice.payload.split(",")))
            if len(told) == len(names):
                break
    found = [await store.get("t", name) for name in (names[0], names[-1])]
    assert {one.key for one in found if one is not None} <= told


async def test_whoever_waits_for_a_row_delays_and_fails_no_others(
    db: Database, store: TrajectoryStore, database: str
) -> None:
    """Another transaction has the rows for longer than a statement may take."""
    await create(store, "held", "held-too", "free")
    batch = [an_append("held", 0, b"0"), an_append("held-too", 0, b"0", take_over=True), an_append("free", 0, b"0")]
    free = await store.get("t", "free")
    assert free is not None
    async with await psycopg.AsyncConnection.connect(database) as other:
        await other.execute(f"SELECT FROM {SCHEMA}.trajectories WHERE trajectory_id LIKE 'held%' FOR UPDATE")
        appender = Appender(AppendStore(db))
        appending = [asyncio.create_task(appender.append(one)) for one in batch]
        worker = asyncio.create_task(appender.run())
        async with asyncio.timeout(110):
            assert await appending[2] == 1
        assert await store.steps(free.key, -1, 1) == [(0, b"0")]
        results = await asyncio.gather(*appending, return_exceptions=True)
        assert [type(result) for result in results] == [UnavailableError, UnavailableError, int]
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
        await other.rollback()
    # A row that is locked is not missing: it is there as soon as it is free, and what was added stays so.
    assert await AppendStore(db).append(batch) == [1, 1, 1]
    assert await store.steps(free.key, -1, 1) == [(0, b"0")]
