"""Groups over gRPC: the worked streams, restarts, claims, and many at once."""

import asyncio

import grpc
import psycopg
import pytest
from orchard.trajectory.v1 import group_service_pb2 as pb
from orchard.trajectory.v1 import group_service_pb2_grpc
from sqlalchemy import event

from services.common.db import Database, connect
from services.trajectories.store.groups import GroupStore
from tests.integration.trajectories.conftest import Calls, ServiceProcess
from tests.integration.trajectories.test_lifecycle import fails

OUTCOMES = {"+": pb.SAMPLE_OUTCOME_POSITIVE, "-": pb.SAMPLE_OUTCOME_NEGATIVE, "a": pb.SAMPLE_OUTCOME_UNSCORED}
LETTERS = {number: letter for letter, number in OUTCOMES.items()}


class GroupCalls(Calls):
    def __init__(self, calls: Calls) -> None:
        super().__init__(calls.process, calls.channel, calls.tenant)
        self.stub = group_service_pb2_grpc.GroupServiceStub(calls.channel)

    async def begin(self, group_id: str, **plan) -> pb.CreateGroupResponse:
        task = {"dataset": "d", "instance_id": group_id}
        return await self.CreateGroup(pb.CreateGroupRequest(group_id=group_id, task=task, plan=plan))

    async def report(self, group_id: str, index: int, letter: str, **fields) -> pb.ReportSampleResponse:
        given = {"reason": "aborted"} if letter == "a" else {"reward": 1.0 if letter == "+" else 0.0}
        sample = pb.Sample(**({"index": index, "outcome": OUTCOMES[letter]} | given | fields))
        return await self.ReportSample(pb.ReportSampleRequest(group_id=group_id, sample=sample))

    async def run(self, group_id: str, stream: str, **plan) -> tuple[int, pb.Group]:
        asked = len((await self.begin(group_id, **plan)).start)
        for index, letter in enumerate(stream):
            response = await self.report(group_id, index, letter)
            asked += len(response.start)
            if response.HasField("group"):
                return asked, response.group
        raise AssertionError("the group never closed")


@pytest.fixture
def groups(calls: Calls) -> GroupCalls:
    return GroupCalls(calls)


def letters(group: pb.Group) -> str:
    return "".join(LETTERS[member.sample.outcome] for member in group.members)


@pytest.mark.parametrize(
    ("stream", "plan", "asked", "members", "keep"),
    [
        ("+---", {"stride": 4}, 4, "+---", True),
        ("----+---", {"stride": 4}, 8, "---+", True),
        ("+++a+++-", {"stride": 4}, 8, "+++-", True),
        ("++++-+++", {}, 8, "+++-", True),
        ("--------", {"stride": 4}, 8, "----", False),
        ("aaaaaa+-", {"stride": 4}, 8, "+-aa", True),
        ("++--+", {"group_size": 5, "maximum": 10, "stride": 5}, 5, "++--+", True),
    ],
)
async def test_worked_streams(  # noqa: PLR0917 (a row of the table)
    groups: GroupCalls, stream: str, plan: dict[str, int], asked: int, members: str, keep: bool
) -> None:
    got, group = await groups.run("one", stream, **plan)
    assert (got, letters(group), group.verdict.keep) == (asked, members, keep)
    assert [member.trainable for member in group.members] == [letter != "a" for letter in members]
    assert group == (await groups.GetGroup(pb.GetGroupRequest(group_id="one"))).group


async def test_advantages_of_a_short_group(groups: GroupCalls) -> None:
    _asked, group = await groups.run("one", "aaaaaa+-", stride=4)
    advantages = [member.advantage for member in group.members]
    assert advantages == pytest.approx([0.707106, -0.707106, 0, 0], abs=1e-5)
    assert group.short
    assert group.fallback


async def test_a_report_whose_answer_was_lost_gets_it_again(groups: GroupCalls) -> None:
    await groups.begin("one", stride=4)
    for index in range(3):
        await groups.report("one", index, "-")
    first = await groups.report("one", 3, "-")
    assert list(first.start) == [4, 5, 6, 7]
    assert await groups.report("one", 3, "-") == first
    reported = (grpc.StatusCode.ALREADY_EXISTS, "SAMPLE_REPORTED")
    assert await fails(groups.report("one", 3, "+")) == reported


async def test_a_trainer_that_was_restarted_learns_what_is_still_to_be_made(groups: GroupCalls) -> None:
    assert list((await groups.begin("one", stride=4)).start) == [0, 1, 2, 3]
    await groups.report("one", 1, "+")
    again = await groups.begin("one", stride=4)
    assert list(again.start) == [0, 2, 3]
    assert [sample.index for sample in again.group.samples] == [1]
    other = (grpc.StatusCode.ALREADY_EXISTS, "GROUP_EXISTS")
    assert await fails(groups.begin("one", stride=2)) == other


async def test_a_group_is_read_as_of_one_moment(groups: GroupCalls, database: str) -> None:
    await groups.begin("one", stride=4)
    engine = connect(database)

    def close(*_: object) -> None:
        """Another has all samples ended and the group closed while it is read, or just after."""
        with psycopg.connect(database) as other:
            other.execute("UPDATE trajectories.samples SET outcome = 1, reward = 1, arrival = index, place = index")
            other.execute("UPDATE trajectories.samples SET advantage = 0, trainable = true")
            other.execute("UPDATE trajectories.groups SET closed = true, close_time = now()")

    store = GroupStore(Database(engine))
    event.listen(engine.sync_engine, "after_cursor_execute", close, once=True)
    first = await store.get("default", "one")
    second = await store.get("default", "one")
    await engine.dispose()
    assert first is not None and second is not None
    assert [(one.closed, len(one.samples), len(one.running)) for one in (first, second)] == [
        (False, 0, 4),
        (True, 4, 0),
    ]


async def test_an_eager_group_closes_early_and_cancels_the_rest(groups: GroupCalls) -> None:
    await groups.begin("one", eager=True)
    for index in (0, 5, 2):
        assert not (await groups.report("one", index, "+" if index == 0 else "-")).HasField("group")
    response = await groups.report("one", 7, "-")
    assert letters(response.group) == "+---"
    assert list(response.cancel) == [1, 3, 4, 6]


async def test_each_sample_is_claimed_by_one_worker_until_its_lease_runs_out(groups: GroupCalls) -> None:
    for name in ("a", "b"):
        await groups.begin(name, stride=4)

    async def claim(count: int, **fields) -> list[tuple[str, int]]:
        request = pb.ClaimSamplesRequest(count=count, worker="w", **fields)
        return [(found.group_id, found.index) for found in (await groups.ClaimSamples(request)).samples]

    claims = await asyncio.gather(*(claim(1) for _ in range(10)))
    flat = sorted(found for claimed in claims for found in claimed)
    assert flat == [(name, index) for name in ("a", "b") for index in range(4)]
    assert list((await groups.begin("a", stride=4)).start) == []
    await groups.begin("c", stride=4)
    assert await claim(1, group_id="c", lease={"seconds": 1}) == [("c", 0)]
    async with asyncio.timeout(110):
        while ("c", 0) not in await claim(10, group_id="c", lease={"seconds": 1}):
            pass


async def test_a_claim_whose_answer_was_lost_gets_the_same_samples_again(groups: GroupCalls) -> None:
    for name in ("a", "b"):
        await groups.begin(name, stride=4)

    async def claim(request_id: str, calls: GroupCalls = groups, **fields) -> list[tuple[str, int]]:
        given = {"count": 3, "worker": "w", "request_id": request_id} | fields
        answer = await calls.ClaimSamples(pb.ClaimSamplesRequest(**given))
        return [(found.group_id, found.index) for found in answer.samples]

    first = [("a", 0), ("a", 1), ("a", 2)]
    # Repeats that come together with it, too.
    assert await asyncio.gather(*(claim("one") for _ in range(5))) == [first] * 5
    assert await claim("two") == [("a", 3), ("b", 0), ("b", 1)]
    await groups.report("a", 1, "-")
    assert await claim("one") == [("a", 0), ("a", 2)]
    exists = (grpc.StatusCode.ALREADY_EXISTS, "CLAIM_EXISTS")
    for other in ({"count": 4}, {"worker": "x"}, {"group_id": "b"}, {"lease": {"seconds": 5}}):
        assert await fails(claim("one", **other)) == exists
    # Another tenant's claim of this name, and claims without one, are others.
    theirs = GroupCalls(groups.of("other"))
    await theirs.begin("a", stride=4)
    assert await claim("one", theirs) == first
    assert await claim("") == [("b", 2), ("b", 3)]
    assert await claim("three") == []
    await groups.begin("c", stride=4)
    assert await claim("three") == [("c", 0), ("c", 1), ("c", 2)]
    for bad in ("a b", "x" * 65):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await claim(bad)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "request_id" in caught.value.details()


async def test_a_claim_that_ran_out_is_no_repeat_of_anything(groups: GroupCalls) -> None:
    await groups.begin("one", stride=4)

    async def claim(request_id: str, seconds: int) -> list[int]:
        given = {"count": 4, "request_id": request_id, "lease": {"seconds": seconds}}
        return [found.index for found in (await groups.ClaimSamples(pb.ClaimSamplesRequest(**given))).samples]

    assert await claim("first", 1) == [0, 1, 2, 3]
    async with asyncio.timeout(110):
        while not (again := await claim("second", 600)):
            pass
    assert again == [0, 1, 2, 3]
    # The first was handed on: whoever repeats it takes nothing away from its new holder.
    assert await claim("first", 1) == []
    assert await claim("second", 600) == again


async def test_state_survives_kills_of_the_service(groups: GroupCalls, process: ServiceProcess) -> None:
    await groups.begin("one", stride=4)
    for index, letter in enumerate("----+--"):
        if index % 3 == 0:
            process.kill()
            process.start()
        async with grpc.aio.insecure_channel(process.address) as channel:
            response = await GroupCalls(Calls(process, channel)).report("one", index, letter)
    async with grpc.aio.insecure_channel(process.address) as channel:
        response = await GroupCalls(Calls(process, channel)).report("one", 7, "-")
    assert letters(response.group) == "---+"


async def test_a_thousand_groups_at_once(groups: GroupCalls) -> None:
    names = [f"group-{number}" for number in range(1000)]
    gate = asyncio.Semaphore(12)

    async def within(call):
        async with gate:
            return await call

    await asyncio.gather(*(within(groups.begin(name, stride=4)) for name in names))
    closed = await asyncio.gather(*(within(groups.run(name, "+--+", stride=4)) for name in names[::20]))
    assert {letters(group) for _asked, group in closed} == {"+--+"}

    async def listed(state: int) -> set[str]:
        found, token = set(), ""
        while True:
            page = await groups.ListGroups(pb.ListGroupsRequest(page_size=300, page_token=token, state=state))
            found |= {group.group_id for group in page.groups}
            if not (token := page.next_page_token):
                return found

    assert await listed(pb.GROUP_STATE_CLOSED) == set(names[::20])
    assert await listed(pb.GROUP_STATE_OPEN) == set(names) - set(names[::20])


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"maximum": 2}, "maximum"),
        ({"low": 0.3, "high": 0.4}, "no whole number"),
        ({"low": 0.9, "high": 0.1}, "low"),
        ({"stride": -1}, "plan.stride"),
        ({"low": float("nan")}, "plan.low"),
    ],
)
async def test_plans_that_cannot_be(groups: GroupCalls, plan: dict[str, float], message: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await groups.begin("one", **plan)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert message in caught.value.details()


async def test_reports_that_cannot_be(groups: GroupCalls) -> None:
    await groups.begin("one")
    for index, letter, fields, message in (
        (99, "+", {}, "not asked for"),
        (0, "a", {"reward": 0.0}, "never 0"),
        (0, "a", {"reason": ""}, "sample.reason"),
        (0, "+", {"reward": float("nan")}, "sample.reward"),
        (0, "+", {"outcome": 0}, "sample.outcome"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await groups.report("one", index, letter, **fields)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert message in caught.value.details()
    assert await fails(groups.report("none", 0, "+")) == (grpc.StatusCode.NOT_FOUND, "GROUP_NOT_FOUND")
