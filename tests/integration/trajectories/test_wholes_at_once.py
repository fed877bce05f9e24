"""Calls that store whole trajectories at once, more than there is room for, and over a service that is killed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import psycopg
from orchard.trajectory.v1 import trajectory_service_pb2 as pb

from services.common.errors import reason_of
from services.trajectories.store.tables import SCHEMA
from tests.integration.trajectories.conftest import Calls, ServiceProcess, exported
from tests.integration.trajectories.test_wholes import CODE, COMPLETED, PATIENCE, history, store, whole


async def patiently(calls: Calls, wholes: Sequence[pb.NewTrajectory]) -> None:
    """Store, again while the service or its database cannot."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                await store(calls, *wholes)
            except grpc.aio.AioRpcError as error:
                assert error.code() is CODE.UNAVAILABLE, error.details()
                await asyncio.sleep(0.05)
            else:
                return


async def all_once(calls: Calls, names: Sequence[str]) -> None:
    wholes = await exported(calls, several=True)
    assert sorted(one.trajectory.trajectory_id for one in wholes) == sorted(names)
    assert all(len(one.steps) == one.trajectory.totals.steps == 3 for one in wholes)
    assert all(one.trajectory.status == COMPLETED and len(one.trajectory.rewards) == 2 for one in wholes)
    assert [len(await history(calls, name)) for name in names[::7]] == [1] * len(names[::7])


async def test_calls_that_store_the_same_at_once_store_it_once(calls: Calls) -> None:
    """In opposite orders, so that they meet in the middle."""
    names = [f"t{number}" for number in range(80)]
    made = [whole(name) for name in names]
    await asyncio.gather(*(patiently(calls, made[:: 1 if turn % 2 else -1]) for turn in range(6)))
    await all_once(calls, names)


async def test_no_more_wait_than_there_is_room_for(calls: Calls, process: ServiceProcess) -> None:
    names = [f"t{number}" for number in range(70)]
    with psycopg.connect(process.database) as connection:
        connection.execute(f"LOCK TABLE {SCHEMA}.trajectories IN EXCLUSIVE MODE")
        answers = {name: asyncio.create_task(store(calls, whole(name))) for name in names}
        done, _ = await asyncio.wait(answers.values(), return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE)
        error = done.pop().exception()
        assert isinstance(error, grpc.aio.AioRpcError)
        assert reason_of(error) == "STORE_BACKLOG"
        assert error.code() is CODE.UNAVAILABLE
    told = await asyncio.gather(*answers.values(), return_exceptions=True)
    stored = [name for name, answer in zip(names, told, strict=True) if isinstance(answer, list)]
    assert 64 <= len(stored) < 70
    for name in names:
        await patiently(calls, [whole(name)])
    await all_once(calls, names)


async def test_a_service_that_is_killed_in_the_middle_has_each_whole_or_not_at_all(
    calls: Calls, process: ServiceProcess
) -> None:
    names = [f"t{number}" for number in range(400)]
    made = [whole(name) for name in names]
    batches = [made[start : start + 20] for start in range(0, len(made), 20)]
    answers = [asyncio.create_task(store(calls, *batch)) for batch in batches]
    await next(asyncio.as_completed(answers))
    process.kill()
    told = await asyncio.gather(*answers, return_exceptions=True)
    process.start()
    there = {one.trajectory.trajectory_id: one for one in await exported(calls, several=True)}
    assert all(len(one.steps) == 3 and one.trajectory.status == COMPLETED for one in there.values())
    for batch, answer in zip(batches, told, strict=True):
        stored = [one.trajectory.trajectory_id in there for one in batch]
        # What was acknowledged is there; of what was not, nobody can tell.
        assert all(stored) if isinstance(answer, list) else len(set(stored)) == 1
    assert 0 < len(there) < len(names)
    for batch in batches:
        await patiently(calls, batch)
    await all_once(calls, names)
