"""The packer outlives whatever becomes of the object store."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from services.common.db import Database, connect
from services.common.errors import UnavailableError
from services.common.objects import ObjectStore
from services.trajectories.housekeeping import Housekeeper
from services.trajectories.model import Annotation, Description, Filter, NewStep, Status, Totals
from services.trajectories.packing import frame, unpacked
from services.trajectories.store.annotations import AnnotationStore
from services.trajectories.store.appends import Append, AppendStore
from services.trajectories.store.blobs import BlobIndex
from services.trajectories.store.trajectories import End, TrajectoryStore
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


async def sealed(db: Database, name: str, tenant: str = "t", *, age_days: int = 1, body: bytes = b"step") -> None:
    store = TrajectoryStore(db)
    await store.create(tenant, Description(trajectory_id=name), NOW)
    await AppendStore(db).append([Append(tenant, name, "w", False, (NewStep(0, body, Totals(steps=1)),))])
    # Before all others, whatever tests before have left.
    await store.seal(tenant, End(name, Status.COMPLETED, "", 1), NOW - timedelta(days=age_days))


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


async def test_small_ones_are_packed_together_and_a_large_one_alone(db: Database, tmp_path: Path) -> None:
    store, objects = TrajectoryStore(db), ObjectStore(f"file://{tmp_path}")
    keeper = Housekeeper(store, BlobIndex(db), objects, lambda: NOW, blob_grace_seconds=0)
    while await keeper.pack_some():
        pass  # what tests before have left
    wanted = {f"small-{number}": [b"%d-%d" % (number, index) for index in range(number)] for number in range(40)}
    wanted["large"] = [random.Random(index).randbytes(1 << 20) for index in range(18)]
    wanted["last"] = [b"last"]
    for name, bodies in wanted.items():
        await store.create("t", Description(trajectory_id=name), NOW)
        new = tuple(NewStep(index, body, Totals(steps=1)) for index, body in enumerate(bodies))
        for start in range(0, len(new), 4):
            await AppendStore(db).append([Append("t", name, "w", False, new[start : start + 4])])
        await store.seal("t", End(name, Status.COMPLETED, "", len(bodies)), NOW)
    while await keeper.pack_some():
        pass
    for name, bodies in wanted.items():
        found = await store.get("t", name)
        assert found is not None
        assert await store.steps(found.key, -1, 1) == []
        content = b"".join([piece async for piece in unpacked(objects.chunks(found.object_name))])
        assert content == b"".join(map(frame, bodies))
        assert found.content_hash == hashlib.sha256(content).hexdigest()


async def test_of_a_batch_that_the_object_store_refuses_nothing_is_lost(db: Database, server: ObjectServer) -> None:
    store = TrajectoryStore(db)
    keeper = Housekeeper(store, BlobIndex(db), ObjectStore(f"s3://{BUCKET}"), lambda: NOW, blob_grace_seconds=0)
    while await keeper.pack_some():
        pass
    for number in range(3):
        await sealed(db, f"refused-{number}")
    server.failure = "forbidden"
    with pytest.raises(UnavailableError):
        await keeper.pack_some()
    for number in range(3):
        found = await store.get("t", f"refused-{number}")
        assert found is not None
        assert (found.object_name, await store.steps(found.key, -1, 1)) == ("", [(0, b"step")])
    server.failure = ""
    assert await keeper.pack_some()


async def test_who_annotates_deletes_or_appends_never_waits_for_the_object_store(
    db: Database, server: ObjectServer, tmp_path: Path
) -> None:
    """While the objects of 32 trajectories are put; the pool has five connections."""
    store, annotations, blobs = TrajectoryStore(db), AnnotationStore(db), BlobIndex(db)
    keeper = Housekeeper(store, blobs, ObjectStore(f"s3://{BUCKET}"), lambda: NOW, blob_grace_seconds=0)
    other = Housekeeper(store, blobs, ObjectStore(f"file://{tmp_path}"), lambda: NOW, blob_grace_seconds=0)
    while await keeper.pack_some():
        pass
    names = [f"held-{number}" for number in range(32)]
    for name in names:
        await sealed(db, name)
    await store.create("t", Description(trajectory_id="goes-on"), NOW)
    server.open.clear()
    before = server.puts
    packing = asyncio.create_task(keeper.pack_some())
    try:
        async with asyncio.timeout(110):
            while server.puts == before:
                assert not packing.done()
                await asyncio.sleep(0.01)  # its first put
        annotation = Annotation("a", labels={"seen": "yes"})
        answers = await asyncio.gather(*(annotations.add("t", name, annotation, NOW) for name in names))
        assert {outcome for outcome, _found in answers} == {"added"}
        assert await AppendStore(db).append(
            [Append("t", "goes-on", "w", False, (NewStep(0, b"step", Totals(steps=1)),))]
        ) == [1]
        gone = await store.get("t", "held-0")
        assert gone is not None
        one = Filter(texts={"trajectory_id": ("held-0",)})
        deleted = await store.delete("t", one, include_open=False, limit=1, dry_run=False, now=NOW)
        assert deleted.deleted == 1
        # Another packer has what the first one has not, and no more.
        await sealed(db, "thirty-third")
        assert await other.pack_some()
        assert not await other.pack_some()
        assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1
        assert not packing.done()
    finally:
        server.open.set()
    assert await packing
    for name in names[1:]:
        found = await store.get("t", name)
        assert found is not None
        assert found.description.labels == {"seen": "yes"}
        assert f"/{BUCKET}/{found.object_name}" in server.objects
        assert await store.steps(found.key, -1, 1) == []
    # What was deleted meanwhile leaves no object.
    assert any(f"/{gone.key}-" in path for path in server.objects)
    await keeper.sweep_once()
    assert not any(f"/{gone.key}-" in path for path in server.objects)


async def object_of(store: TrajectoryStore, name: str) -> str:
    found = await store.get("t", name)
    assert found is not None
    assert bool(await store.steps(found.key, -1, 1)) == (not found.object_name)
    return found.object_name


@pytest.mark.parametrize("count", [3, 32], ids=["some of a group", "a whole group"])
async def test_what_cannot_be_put_stops_no_others(db: Database, server: ObjectServer, count: int) -> None:
    """Those of one tenant are the oldest, and cannot be put."""
    store = TrajectoryStore(db)
    now = NOW
    keeper = Housekeeper(store, BlobIndex(db), ObjectStore(f"s3://{BUCKET}"), lambda: now, blob_grace_seconds=0)
    while await keeper.pack_some():
        pass
    refused = [f"refused-{count}-{number}" for number in range(count)]
    for name in refused:
        await sealed(db, name, "refused", age_days=2)
    taken = [f"taken-{count}-{number}" for number in range(4)]
    for name in taken[:2]:
        await sealed(db, name)
    server.refused = {"/refused/"}
    with pytest.raises(UnavailableError):
        await keeper.pack_some()
    if count == 32:
        assert await keeper.pack_some()  # the younger ones go first now
    assert all([await object_of(store, name) for name in taken[:2]])
    with pytest.raises(UnavailableError):
        await keeper.pack_some()  # there are no others: they are tried again
    for name in taken[2:]:
        await sealed(db, name)
    assert await keeper.pack_some()
    assert all([await object_of(store, name) for name in taken])
    # After a while they have their turn again, by their age.
    await sealed(db, f"last-{count}")
    now += timedelta(minutes=2)
    with pytest.raises(UnavailableError):
        await keeper.pack_some()
    server.refused = set()
    while await keeper.pack_some():
        pass
    waiting = [await store.get("refused", name) for name in refused]
    assert all(one is not None and one.object_name for one in waiting)


async def test_a_large_one_that_cannot_be_put_stops_no_others(db: Database, server: ObjectServer) -> None:
    store = TrajectoryStore(db)
    keeper = Housekeeper(store, BlobIndex(db), ObjectStore(f"s3://{BUCKET}"), lambda: NOW, blob_grace_seconds=0)
    while await keeper.pack_some():
        pass
    await sealed(db, "too-large", "refused", age_days=2, body=bytes(17 << 20))
    await sealed(db, "small")
    server.refused = {"/refused/"}
    with pytest.raises(UnavailableError):
        await keeper.pack_some()
    assert await keeper.pack_some()
    assert await object_of(store, "small")
    server.refused = set()
    assert await keeper.pack_some()
    large = await store.get("refused", "too-large")
    assert large is not None
    assert large.object_name
