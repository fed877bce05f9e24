"""The packer outlives whatever becomes of the object store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest

from services.common.db import Database, connect
from services.common.objects import ObjectStore
from services.trajectories.housekeeping import Housekeeper
from services.trajectories.model import Description, NewStep, Status, Totals
from services.trajectories.store.appends import Append, AppendStore
from services.trajectories.store.blobs import BlobIndex
from services.trajectories.store.trajectories import TrajectoryStore
from tests.support.object_server import BUCKET, FAILURES, ObjectServer, running_object_server

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
async def db(database: str) -> AsyncIterator[Database]:
    made = Database(connect(database))
    yield made
    await made.close()


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ObjectServer]:
    with running_object_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


async def sealed(db: Database, name: str) -> None:
    store = TrajectoryStore(db)
    await store.create("t", Description(trajectory_id=name), "", "hash", NOW)
    await AppendStore(db).append([Append("t", name, "w", False, (NewStep(0, b"step", Totals(steps=1)),))])
    # Before all others, whatever tests before have left.
    await store.seal("t", name, Status.COMPLETED, "", 1, NOW - timedelta(days=1))


async def test_what_cannot_be_packed_now_is_packed_later(db: Database, server: ObjectServer) -> None:
    store = TrajectoryStore(db)
    keeper = Housekeeper(store, BlobIndex(db), ObjectStore(f"s3://{BUCKET}"), lambda: NOW, blob_grace_seconds=0)
    packing = asyncio.create_task(keeper.run_packing())
    try:
        for number, failure in enumerate(FAILURES):
            server.failure, before = failure, server.puts
            await sealed(db, f"packed-{number}")
            keeper.wake()
            async with asyncio.timeout(120):
                while server.puts == before:
                    assert not packing.done()
                    await asyncio.sleep(0.01)  # the packer's next try
            server.failure = ""
            async with asyncio.timeout(120):
                while not (found := await store.get("t", f"packed-{number}")) or not found.object_name:
                    assert not packing.done()
                    await asyncio.sleep(0.01)
            assert f"/{BUCKET}/{found.object_name}" in server.objects
            assert await store.steps(found.key, -1, 1) == []
    finally:
        packing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await packing
