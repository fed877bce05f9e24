"""Whole trajectories, several in a call: stored as by calls of their own, each all or nothing, and never twice."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from orchard.trajectory.v1 import trajectory_pb2
from orchard.trajectory.v1 import trajectory_service_pb2 as pb

from services.common.errors import reason_of
from tests.integration.trajectories.conftest import Calls, exported, step, steps
from tests.support.wire import details

COMPLETED, OPEN = trajectory_pb2.TRAJECTORY_STATUS_COMPLETED, trajectory_pb2.TRAJECTORY_STATUS_OPEN
SCORED = trajectory_pb2.REWARD_STATE_SCORED
LARGE = "l" * (70 << 10)
PATIENCE = 110


def whole(trajectory_id: str, count: int = 3, **fields: Any) -> pb.NewTrajectory:
    """A trajectory with everything that an import has of one."""
    description = trajectory_pb2.Trajectory(
        trajectory_id=trajectory_id,
        group_id="g",
        model="m",
        labels={"a": "b"},
        tools_json='[{"type": "function"}]',
        metadata_json='{"a": 1}',
    )
    description.task.dataset = "d"
    made = {
        "trajectory": description,
        "steps": [step(index, model_call={"prompt_tokens": 7, "completion_tokens": index}) for index in range(count)],
        "writer": "import",
        "status": COMPLETED,
        "annotation_id": "a1",
        "rewards": [
            {"name": "outcome", "state": SCORED, "value": 0.5, "judge": "tests"},
            {"name": "outcome", "state": SCORED, "value": 1.0, "judge": "person"},
        ],
        "step_values": [{"index": 1, "name": "value", "value": 0.25}],
    }
    return pb.NewTrajectory(**{**made, **fields})


async def store(calls: Calls, *wholes: pb.NewTrajectory) -> list[bool]:
    """Whether each was sealed before."""
    answer = await calls.StoreTrajectories(pb.StoreTrajectoriesRequest(trajectories=wholes))
    assert [one.trajectory_id for one in answer.trajectories] == [one.trajectory.trajectory_id for one in wholes]
    return [one.was_sealed for one in answer.trajectories]


async def by_calls(calls: Calls, made: pb.NewTrajectory, upto: int = 4) -> None:
    """Store it by the calls of their own, the first so many of them."""
    name = made.trajectory.trajectory_id
    judged = {"annotation_id": made.annotation_id, "rewards": made.rewards, "step_values": made.step_values}
    annotation = pb.AnnotateTrajectoryRequest(trajectory_id=name, **judged)
    stages: list[Callable[[], Any]] = [
        lambda: calls.CreateTrajectory(pb.CreateTrajectoryRequest(trajectory=made.trajectory)),
        lambda: calls.append(name, list(made.steps), writer=made.writer),
        lambda: calls.AnnotateTrajectory(annotation),
        lambda: calls.seal(name, made.status, message=made.message, expected_steps=len(made.steps)),
    ]
    is_judged = made.rewards or made.step_values
    for number, stage in enumerate(stages[:upto]):
        if (number != 2 or is_judged) and (number != 3 or made.status != OPEN):
            await stage()


async def history(calls: Calls, name: str) -> list[pb.Annotation]:
    found = await calls.ListAnnotations(pb.ListAnnotationsRequest(trajectory_id=name))
    return list(found.annotations)


async def said(calls: Calls, name: str) -> dict[str, Any]:
    """All that is known of a trajectory, without its id and times."""
    found = await calls.get(name)
    found.trajectory.trajectory_id = found.trajectory.content_hash = ""  # the hash comes a moment after the seal
    for times in (found.trajectory, *found.trajectory.rewards, found.trajectory.outcome):
        for field in ("create_time", "seal_time", "time"):
            if field in times.DESCRIPTOR.fields_by_name:
                times.ClearField(field)
    annotations = await history(calls, name)
    for one in annotations:
        one.ClearField("time")
        for reward in one.rewards:
            reward.ClearField("time")
    return {"trajectory": found, "annotations": annotations, "steps": await calls.read(name)}


async def refused(calls: Calls, code: grpc.StatusCode, *wholes: pb.NewTrajectory) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await store(calls, *wholes)
    assert caught.value.code() is code, caught.value.details()
    return caught.value


def named(error: grpc.aio.AioRpcError) -> str:
    """The trajectory that an error names, for programs."""
    (info,) = details(error)[error_details_pb2.ErrorInfo]
    return str(info.metadata["trajectory_id"])


async def is_there(calls: Calls, name: str) -> bool:
    try:
        await calls.get(name)
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.NOT_FOUND
        return False
    return True


FORMS: dict[str, dict[str, Any]] = {
    "whole": {},
    "open": {"status": OPEN},
    "failed": {"status": trajectory_pb2.TRAJECTORY_STATUS_FAILED, "message": "no room"},
    "no-steps": {"steps": [], "step_values": []},
    "not-judged": {"rewards": [], "step_values": [], "annotation_id": ""},
    "large-text": {"steps": [step(0, LARGE), step(1, role=trajectory_pb2.ROLE_TOOL)]},
    "abstained": {
        "rewards": [{"name": "outcome", "state": trajectory_pb2.REWARD_STATE_ABSTAINED, "reason": "unclear"}]
    },
}


@pytest.mark.parametrize("form", FORMS)
async def test_it_is_what_calls_of_their_own_make_of_it(calls: Calls, form: str) -> None:
    await by_calls(calls, whole("one", **FORMS[form]))
    assert await store(calls, whole("two", **FORMS[form])) == [False]
    if form != "open":
        hashes = {(await calls.packed(name)).content_hash for name in ("one", "two")}
        assert len(hashes) == 1
    assert await said(calls, "one") == await said(calls, "two")
    listed = (await calls.ListTrajectories(pb.ListTrajectoriesRequest(order=pb.TRAJECTORY_ORDER_OUTCOME))).trajectories
    assert {one.trajectory_id for one in listed} == {"one", "two"}
    (row,) = (await calls.GetStats(pb.GetStatsRequest())).rows
    assert (row.trajectories, row.open) == (2, 2 if form == "open" else 0)


async def test_several_are_stored_in_their_order(calls: Calls) -> None:
    names = [f"t{number * 7 % 60}" for number in range(60)]
    assert await store(calls, *map(whole, names)) == [False] * 60
    assert [one.trajectory.trajectory_id for one in await exported(calls, several=True)] == names


async def test_a_repeat_adds_nothing(calls: Calls) -> None:
    assert await store(calls, whole("a"), whole("open", status=OPEN)) == [False, False]
    before = [await said(calls, name) for name in ("a", "open")]
    assert await store(calls, whole("a"), whole("open", status=OPEN), whole("b")) == [True, False, False]
    assert [await said(calls, name) for name in ("a", "open")] == before
    await calls.packed("a")
    assert await store(calls, whole("a")) == [True]
    assert len(await calls.read("a")) == 3
    # What was left open is sealed by who says so.
    assert await store(calls, whole("open")) == [False]
    assert (await calls.get("open")).trajectory.status == COMPLETED


@pytest.mark.parametrize("upto", [2, 3])
@pytest.mark.parametrize("part", [0, 2, 3])
async def test_what_calls_of_their_own_began_is_gone_on_with(calls: Calls, upto: int, part: int) -> None:
    """As an import of an earlier client that was cut at any moment behind its first step."""
    begun = whole("t", part)
    del begun.step_values[:]
    begun.annotation_id = "of-the-half"
    await by_calls(calls, begun, upto)
    assert await store(calls, whole("t")) == [False]
    found = await calls.get("t")
    assert (found.trajectory.status, found.trajectory.totals.steps) == (COMPLETED, 3)
    assert found.trajectory.totals.completion_tokens == 0 + 1 + 2
    assert await calls.read("t") == list(whole("t").steps)
    assert len(await history(calls, "t")) == upto - 1


async def test_judgements_are_added_to_what_is_sealed(calls: Calls) -> None:
    await store(calls, whole("t", rewards=[], step_values=[], annotation_id=""))
    assert await store(calls, whole("t")) == [True]
    assert (await calls.get("t")).trajectory.outcome.value == 1.0


async def _begin(calls: Calls, name: str, **fields: Any) -> None:
    await calls.CreateTrajectory(pb.CreateTrajectoryRequest(trajectory=whole(name, **fields).trajectory))


async def _other_description(calls: Calls) -> pb.NewTrajectory:
    await calls.create("bad", model="other")
    return whole("bad")


async def _other_writer(calls: Calls) -> pb.NewTrajectory:
    await _begin(calls, "bad")
    await calls.append("bad", steps(1), writer="somebody")
    return whole("bad")


async def _nobody_wrote(calls: Calls) -> pb.NewTrajectory:
    await _begin(calls, "bad")
    return whole("bad")


async def _other_steps(calls: Calls) -> pb.NewTrajectory:
    await _begin(calls, "bad")
    await calls.append("bad", [step(0, "another")], writer="import")
    return whole("bad")


async def _more_steps(calls: Calls) -> pb.NewTrajectory:
    await _begin(calls, "bad")
    await calls.append("bad", list(whole("bad", 5).steps), writer="import")
    return whole("bad")


async def _other_judgement(calls: Calls) -> pb.NewTrajectory:
    await store(calls, whole("bad"))
    return whole("bad", step_values=[])


async def _no_body(calls: Calls) -> pb.NewTrajectory:
    blob = {"blob": {"sha256": "a" * 64, "size": 1}}
    return whole(
        "bad", steps=[trajectory_pb2.Step(index=0, role=trajectory_pb2.ROLE_USER, content=[blob])], step_values=[]
    )


async def _value_beyond(calls: Calls) -> pb.NewTrajectory:
    return whole("bad", step_values=[{"index": 4, "name": "value", "value": 1.0}])


async def _too_many(calls: Calls) -> pb.NewTrajectory:
    return whole("bad", steps=[trajectory_pb2.Step(index=n, role=trajectory_pb2.ROLE_USER) for n in range(100_001)])


CODE = grpc.StatusCode
REFUSALS = {
    "TRAJECTORY_EXISTS": (_other_description, CODE.ALREADY_EXISTS),
    "WRITER_CONFLICT": (_other_writer, CODE.ABORTED),
    "WRITER_CONFLICT ": (_nobody_wrote, CODE.ABORTED),
    "STEP_CONFLICT": (_other_steps, CODE.ABORTED),
    "STEPS_MISSING": (_more_steps, CODE.FAILED_PRECONDITION),
    "ANNOTATION_EXISTS": (_other_judgement, CODE.ALREADY_EXISTS),
    "BLOB_NOT_FOUND": (_no_body, CODE.FAILED_PRECONDITION),
    "STEP_NOT_FOUND": (_value_beyond, CODE.FAILED_PRECONDITION),
    "TOO_MANY_STEPS": (_too_many, CODE.RESOURCE_EXHAUSTED),
}


@pytest.mark.parametrize("reason", REFUSALS)
async def test_the_first_that_is_refused_is_named_and_those_before_it_are_stored(calls: Calls, reason: str) -> None:
    prepare, code = REFUSALS[reason]
    bad = await prepare(calls)
    before = await said(calls, "bad") if await is_there(calls, "bad") else None
    # The second bad one is refused at an earlier stage than the first one, and behind it all the same.
    later = await _other_judgement(calls.of("t2"))
    later.trajectory.trajectory_id = "later"
    later.trajectory.model = "x"
    await calls.create("later", model="y")
    error = await refused(calls, code, whole("first"), bad, later, whole("last"))
    assert reason_of(error) == reason.strip()
    assert named(error) == "bad"
    assert "'bad'" in (error.details() or "")
    assert (await calls.get("first")).trajectory.status == COMPLETED
    assert len(await calls.read("first")) == 3
    assert not await is_there(calls, "last")
    assert (await said(calls, "bad") if await is_there(calls, "bad") else None) == before


BAD: dict[str, dict[str, Any]] = {
    "trajectory.trajectory_id": {"trajectory": {"trajectory_id": "-bad"}},
    "trajectory.task.split": {"trajectory": {"trajectory_id": "bad", "task": {"split": "s" * 65}}},
    "trajectory.labels['a b']": {"trajectory": {"trajectory_id": "bad", "labels": {"a b": ""}}},
    "trajectory.tools_json": {"trajectory": {"trajectory_id": "bad", "tools_json": "{}"}},
    "writer": {"writer": ""},
    "status": {"status": 9},
    "message": {"message": "m" * 5000},
    "annotation_id": {"annotation_id": ""},
    "steps[1].index": {"steps": steps(1, first=1)},
    "steps[3].index": {"steps": [*steps(2), step(3)]},
    "steps[1].role": {"steps": [step(0), trajectory_pb2.Step(index=1)]},
    "steps[0].content[0]": {"steps": [trajectory_pb2.Step(role=trajectory_pb2.ROLE_USER, content=[{}])]},
    "steps[0].model_call.cost_usd": {"steps": [step(0, model_call={"cost_usd": -1.0})]},
    "rewards[0].name": {"rewards": [{"name": "UP", "state": SCORED}]},
    "step_values[0].value": {"step_values": [{"index": 0, "name": "value", "value": float("nan")}]},
}


@pytest.mark.parametrize("field", BAD)
async def test_what_breaks_a_rule_is_named_with_its_trajectory(calls: Calls, field: str) -> None:
    bad = whole("bad", **BAD[field])
    name = bad.trajectory.trajectory_id
    error = await refused(calls, CODE.INVALID_ARGUMENT, whole("first"), bad, whole("last"))
    (bad_request,) = details(error)[error_details_pb2.BadRequest]
    assert f"trajectories[1].{field}" in [one.field for one in bad_request.field_violations]
    assert named(error) == name
    assert f"trajectory {name!r}" in (error.details() or "")
    assert [await is_there(calls, one) for one in ("first", "bad", "last")] == [True, False, False]


@pytest.mark.parametrize(
    "names", [[], ["a", "b", "a"], [f"t{number}" for number in range(1001)]], ids=["none", "twice", "too-many"]
)
async def test_a_call_has_trajectories_that_can_be_told_apart(calls: Calls, names: Sequence[str]) -> None:
    error = await refused(calls, CODE.INVALID_ARGUMENT, *(whole(name, 0) for name in names))
    assert re.search(r"trajectories(\[2\]\.trajectory\.trajectory_id)?: must|is in this call", error.details() or "")
    assert not await is_there(calls, "a")


async def test_another_writer_is_driven_out_by_who_takes_over(calls: Calls) -> None:
    await _begin(calls, "t")
    await calls.append("t", list(whole("t").steps[:1]), writer="somebody")
    assert await store(calls, whole("t", take_over=True)) == [False]
    assert len(await calls.read("t")) == 3
    with pytest.raises(grpc.aio.AioRpcError, match="sealed"):
        await calls.append("t", steps(1, first=1), writer="somebody")


async def test_each_tenant_has_its_own(calls: Calls) -> None:
    assert await store(calls, whole("t")) == [False]
    assert await store(calls.of("other"), whole("t", 2)) == [False]
    assert [len(await one.read("t")) for one in (calls, calls.of("other"))] == [3, 2]


async def test_who_follows_sees_it(calls: Calls) -> None:
    await _begin(calls, "t")
    await calls.append("t", [], writer="import")
    follow = aiter(calls.ReadSteps(pb.ReadStepsRequest(trajectory_id="t", follow=True)))
    assert not (await anext(follow)).steps  # a sign of life
    await store(calls, whole("t"))
    async with asyncio.timeout(PATIENCE):
        assert [one.index async for response in follow for one in response.steps] == [0, 1, 2]
