"""What clients send and the database would not take is refused by field, and never an error of ours."""

from __future__ import annotations

import math

import grpc
import pytest
from orchard.trajectory.v1 import group_service_pb2, group_service_pb2_grpc
from orchard.trajectory.v1 import trajectory_service_pb2 as pb

from tests.integration.trajectories.conftest import Calls, step, steps

LISTS = [
    field.name
    for field in pb.TrajectoryFilter.DESCRIPTOR.fields
    if field.type == field.TYPE_STRING and field.is_repeated
]
NUL, LONG = "a\0b", "\u00e9" * 129


async def refused(awaitable, *fields: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, caught.value.details()
    for field in fields:
        assert field in caught.value.details()


async def listed(stream) -> list[object]:
    return [one async for one in stream]


@pytest.mark.parametrize("name", LISTS)
async def test_texts_of_a_filter(calls: Calls, name: str) -> None:
    for text in (NUL, LONG):
        wanted = pb.TrajectoryFilter(**{name: ["x", text]})
        where = f"filter.{name}[1]"
        await refused(calls.GetStats(pb.GetStatsRequest(filter=wanted)), where)
        await refused(calls.ListTrajectories(pb.ListTrajectoriesRequest(filter=wanted)), where)
        await refused(calls.DeleteTrajectories(pb.DeleteTrajectoriesRequest(filter=wanted)), where)
        await refused(listed(calls.ExportTrajectories(pb.ExportTrajectoriesRequest(filter=wanted))), where)
    longest = pb.TrajectoryFilter(**{name: ["\u00e9" * 128]})
    assert not (await calls.ListTrajectories(pb.ListTrajectoriesRequest(filter=longest))).trajectories


async def test_the_lists_are_all_there_are() -> None:
    assert len(LISTS) == 12


async def test_texts_of_other_requests(calls: Calls) -> None:
    await refused(listed(calls.GetBlob(pb.GetBlobRequest(sha256="a\0" * 32, offset=-1))), "sha256", "offset")
    groups = group_service_pb2_grpc.GroupServiceStub(calls.channel)
    request = group_service_pb2.ListGroupsRequest(datasets=["x", NUL])
    await refused(groups.ListGroups(request, metadata=calls.process.metadata(), timeout=60), "datasets[1]")


async def test_numbers_at_the_ends_of_their_range(calls: Calls) -> None:
    await calls.create("open")
    await calls.append("open", steps(3))
    for first in ((1 << 15) - 1, (1 << 31) - 1, 1 << 31, 1 << 62, (1 << 63) - 1):
        assert await calls.read("open", first) == []
    dear = step(3, model_call={"cost_usd": 1.7e308})
    await refused(calls.append("open", [dear]), "steps[3].model_call.cost_usd")
    most = [step(index, model_call={"cost_usd": 1e12}) for index in (3, 4)]
    assert await calls.append("open", most) == 5
    (row,) = (await calls.GetStats(pb.GetStatsRequest())).rows
    assert row.cost_usd == 2e12


async def test_rewards_at_the_ends_of_their_range(calls: Calls) -> None:
    """The last report of a group is what its advantages are made at: it would fail for ever."""
    groups = group_service_pb2_grpc.GroupServiceStub(calls.channel)
    metadata = calls.process.metadata()
    create = group_service_pb2.CreateGroupRequest(group_id="g", task={"dataset": "d"}, plan={"group_size": 2})
    await groups.CreateGroup(create, metadata=metadata, timeout=60)

    async def report(index: int, reward: float) -> group_service_pb2.ReportSampleResponse:
        positive, negative = group_service_pb2.SAMPLE_OUTCOME_POSITIVE, group_service_pb2.SAMPLE_OUTCOME_NEGATIVE
        sample = group_service_pb2.Sample(index=index, outcome=positive if reward > 0 else negative, reward=reward)
        request = group_service_pb2.ReportSampleRequest(group_id="g", sample=sample)
        return await groups.ReportSample(request, metadata=metadata, timeout=60)

    for reward in (1.7e308, -1.7e308, float("inf"), float("nan")):
        await refused(report(0, reward), "sample.reward")
    answer, index = await report(0, 1e300), 1
    while not answer.HasField("group"):
        answer, index = await report(index, -1e300 if index % 2 else 1e300), index + 1
    assert len(answer.group.members) == 2
    assert all(math.isfinite(member.advantage) for member in answer.group.members)
