"""Lists, filters, judgements, counts, exports, deletes and bodies over gRPC."""

import asyncio
import hashlib
import itertools
import secrets

import grpc
import pytest
from orchard.trajectory.v1 import trajectory_pb2
from orchard.trajectory.v1 import trajectory_service_pb2 as pb

from services.common.peer_status import peer_status
from tests.integration.trajectories.conftest import Calls, exported, step, steps
from tests.integration.trajectories.test_lifecycle import fails

SCORED, EXCLUDED = trajectory_pb2.REWARD_STATE_SCORED, trajectory_pb2.REWARD_STATE_EXCLUDED


async def judge(calls: Calls, name: str, *rewards, annotation_id: str = "", **fields) -> trajectory_pb2.Trajectory:
    request = pb.AnnotateTrajectoryRequest(trajectory_id=name, annotation_id=annotation_id, rewards=rewards, **fields)
    return (await calls.AnnotateTrajectory(request)).trajectory


def outcome(value: float, **fields) -> trajectory_pb2.Reward:
    return trajectory_pb2.Reward(**({"name": "outcome", "state": SCORED, "value": value, "judge": "tests"} | fields))


async def pages(calls: Calls, size: int = 3, **fields) -> list[str]:
    names, token = [], ""
    while True:
        page = await calls.ListTrajectories(pb.ListTrajectoriesRequest(page_size=size, page_token=token, **fields))
        names += [found.trajectory_id for found in page.trajectories]
        if not (token := page.next_page_token):
            return names


@pytest.fixture
async def some(calls: Calls) -> list[str]:
    """Ten trajectories; even ones of model a, odd ones of b; every third without an outcome."""
    names = [f"t{number}" for number in range(10)]
    for number, name in enumerate(names):
        task = {"dataset": "d", "instance_id": f"i{number // 4}", "repo": f"r{number % 3}"}
        await calls.create(name, model="ab"[number % 2], task=task, labels={"n": str(number % 2)})
        call = {"prompt_tokens": 10 * number, "completion_tokens": 1, "cost_usd": number / 8}
        await calls.append(name, [step(index, model_call=call if index == 0 else None) for index in range(number + 1)])
        if number % 3:
            await judge(calls, name, outcome(number - 5))
    return names


async def test_every_order_pages_through_everything_once(calls: Calls, some: list[str]) -> None:
    for order, ascending, size in itertools.product(range(6), (False, True), (1, 3, 10, 100)):
        names = await pages(calls, size, order=order, ascending=ascending)
        assert sorted(names) == sorted(some), (order, ascending, size)
        if order != pb.TRAJECTORY_ORDER_OUTCOME:
            assert names == (some if ascending else some[::-1])
    names = await pages(calls, order=pb.TRAJECTORY_ORDER_OUTCOME)
    assert names == ["t8", "t7", "t5", "t4", "t2", "t1", "t9", "t6", "t3", "t0"]
    names = await pages(calls, order=pb.TRAJECTORY_ORDER_OUTCOME, ascending=True)
    assert names == ["t1", "t2", "t4", "t5", "t7", "t8", "t0", "t3", "t6", "t9"]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"models": ["a"]}, [0, 2, 4, 6, 8]),
        ({"models": ["a", "b"], "repos": ["r1"]}, [1, 4, 7]),
        ({"labels": {"n": "1"}}, [1, 3, 5, 7, 9]),
        ({"trajectory_ids": ["t3", "t4", "nobody"]}, [3, 4]),
        ({"outcome_state": SCORED}, [1, 2, 4, 5, 7, 8]),
        ({"outcome_least": 0, "outcome_most": 2}, [5, 7]),
        ({"turns_least": 9}, [8, 9]),
        ({"tokens_most": 31}, [0, 1, 2, 3]),
        ({"statuses": [trajectory_pb2.TRAJECTORY_STATUS_COMPLETED]}, []),
        ({"instance_ids": ["i2"]}, [8, 9]),
    ],
)
async def test_filters(calls: Calls, some: list[str], wanted: dict[str, object], expected: list[int]) -> None:
    names = await pages(calls, ascending=True, filter=pb.TrajectoryFilter(**wanted))
    assert names == [some[number] for number in expected]
    assert await pages(calls.of("other"), filter=pb.TrajectoryFilter(**wanted)) == []


async def test_a_token_belongs_to_its_order(calls: Calls, some: list[str]) -> None:
    page = await calls.ListTrajectories(pb.ListTrajectoriesRequest(page_size=2))
    for request in (
        pb.ListTrajectoriesRequest(page_token=page.next_page_token, order=pb.TRAJECTORY_ORDER_TURNS),
        pb.ListTrajectoriesRequest(page_token=page.next_page_token, ascending=True),
        pb.ListTrajectoriesRequest(page_token="x"),
    ):
        assert (await fails(calls.ListTrajectories(request)))[0] is grpc.StatusCode.INVALID_ARGUMENT


async def test_judgements_are_superseded_and_never_overwritten(calls: Calls) -> None:
    await calls.create("one")
    await calls.append("one", steps(3))
    value = trajectory_pb2.StepValue(index=3, name="value", value=0.5)
    await judge(calls, "one", outcome(1), outcome(0.5, name="process"), annotation_id="a", step_values=[value])
    excluded = trajectory_pb2.Reward(name="outcome", state=EXCLUDED, reason="sandbox lost", judge="tests")
    found = await judge(calls, "one", excluded, labels={"x": "1"})
    assert (found.outcome.state, found.outcome.reason) == (EXCLUDED, "sandbox lost")
    assert {(reward.name, reward.state) for reward in found.rewards} == {("outcome", EXCLUDED), ("process", SCORED)}
    assert found.labels == {"x": "1"}
    again = await judge(calls, "one", outcome(1), outcome(0.5, name="process"), annotation_id="a", step_values=[value])
    assert again.outcome.state == EXCLUDED
    used = (grpc.StatusCode.ALREADY_EXISTS, "ANNOTATION_EXISTS")
    assert await fails(judge(calls, "one", outcome(0), annotation_id="a")) == used
    history = await calls.ListAnnotations(pb.ListAnnotationsRequest(trajectory_id="one"))
    assert [[reward.name for reward in entry.rewards] for entry in history.annotations] == [
        ["outcome"],
        ["outcome", "process"],
    ]
    assert [v.value for v in (await calls.get("one")).step_values] == [0.5]
    assert (await judge(calls, "one", labels={"x": ""})).labels == {}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rewards": [{"name": "outcome", "state": SCORED, "value": float("nan")}]}, "rewards[0].value"),
        ({"rewards": [{"name": "outcome", "state": EXCLUDED, "value": 0.5, "reason": "x"}]}, "never 0"),
        ({"rewards": [{"name": "outcome", "state": EXCLUDED}]}, "rewards[0].reason"),
        ({"rewards": [{"name": "outcome"}]}, "rewards[0].state"),
        ({"rewards": [{"name": "No Name", "state": SCORED}]}, "rewards[0].name"),
        ({"step_values": [{"index": -1, "name": "value"}]}, "step_values[0].index"),
        ({}, "empty"),
    ],
)
async def test_bad_judgements(calls: Calls, fields: dict[str, object], message: str) -> None:
    await calls.create("one")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await calls.AnnotateTrajectory(pb.AnnotateTrajectoryRequest(trajectory_id="one", **fields))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert message in caught.value.details()


async def test_counts(calls: Calls, some: list[str]) -> None:
    await calls.seal("t0", trajectory_pb2.TRAJECTORY_STATUS_ABORTED)
    rows = (await calls.GetStats(pb.GetStatsRequest(ks=[1, 2, 9]))).rows
    (row,) = rows
    assert (row.trajectories, row.open, row.aborted, row.scored, row.resolved) == (10, 9, 1, 6, 2)
    assert row.resolve_rate == pytest.approx(2 / 6)
    assert row.mean_turns == pytest.approx(5.5)
    # i0: t1 t2 fail (n=2, c=0); i1: t4 t5 fail, t7 succeeds (n=3, c=1); i2: t8 succeeds (n=1, c=1).
    one, two, nine = row.pass_at_k
    assert (one.instances, two.instances, nine.instances) == (3, 2, 0)
    assert (one.any, two.any) == (pytest.approx((0 + 1 / 3 + 1) / 3), pytest.approx((0 + 2 / 3) / 2))
    assert (two.power, two.all) == (pytest.approx((1 / 9) / 2), 0)
    assert not nine.HasField("any")
    by_repo = (await calls.GetStats(pb.GetStatsRequest(group_by=pb.STATS_DIMENSION_REPO))).rows
    assert [(row.value, row.trajectories) for row in by_repo] == [("r0", 4), ("r1", 3), ("r2", 3)]
    by_label = pb.GetStatsRequest(group_by=pb.STATS_DIMENSION_LABEL, label="n")
    assert [(row.value, row.trajectories) for row in (await calls.GetStats(by_label)).rows] == [("0", 5), ("1", 5)]
    assert (await calls.of("other").GetStats(pb.GetStatsRequest())).rows == []


async def test_counts_with_attempts_are_those_without_them(calls: Calls, some: list[str]) -> None:
    """By every dimension; what is of no instance counts, and has no attempts."""
    await calls.create("alone", model="b", labels={"n": "2"}, task={"repo": "r0"})
    await judge(calls, "alone", outcome(1))
    for dimension in pb.StatsDimension.values():
        wanted = {"group_by": dimension, "label": "n" if dimension == pb.STATS_DIMENSION_LABEL else ""}
        plain = (await calls.GetStats(pb.GetStatsRequest(**wanted))).rows
        rows = (await calls.GetStats(pb.GetStatsRequest(**wanted, ks=[1]))).rows
        assert sum(row.trajectories for row in rows) == 11
        for row in rows:
            row.ClearField("pass_at_k")
        assert rows == plain, dimension
    by_model = (await calls.GetStats(pb.GetStatsRequest(group_by=pb.STATS_DIMENSION_MODEL, ks=[1, 2]))).rows
    # Of a: i0: t2 fails; i1: t4 fails; i2: t8 succeeds. Of b: i0: t1 fails; i1: t5 fails, t7 succeeds.
    found = {row.value: [(one.instances, one.any) for one in row.pass_at_k] for row in by_model}
    assert found == {"a": [(3, pytest.approx(1 / 3)), (0, 0)], "b": [(2, pytest.approx(1 / 4)), (1, 1)]}


@pytest.mark.parametrize("several", [False, True], ids=["pieces", "several"])
async def test_an_export_is_whole_and_goes_on_where_it_broke(calls: Calls, some: list[str], several: bool) -> None:
    for name in some[::2]:
        await calls.seal(name)
        await calls.packed(name)
    everything = await exported(calls, several=several)
    names = [(one.trajectory.trajectory_id, len(one.steps)) for one in everything]
    assert names == [(name, number + 1) for number, name in enumerate(some)]
    for last, one in enumerate(everything):
        assert await exported(calls, several=several, resume_token=one.resume_token) == everything[last + 1 :]


@pytest.mark.parametrize("several", [False, True], ids=["pieces", "several"])
async def test_an_export_of_small_open_and_large_ones_is_in_order_and_in_messages_of_a_mebibyte(
    calls: Calls, several: bool
) -> None:
    texts = {f"x{number:02}": [f"{number} {index}" for index in range(3)] for number in range(40)}
    texts["x07"] = [secrets.token_hex(30_000) for _ in range(40)]
    for number in range(21, 30):  # together more than one message
        texts[f"x{number}"] = [secrets.token_hex(30_000) for _ in range(number % 10)]
    for name, contents in texts.items():
        await calls.create(name)
        for start in range(0, len(contents), 10):
            batch = [step(start + place, text) for place, text in enumerate(contents[start : start + 10])]
            await calls.append(name, batch)
        if name != "x11":
            await calls.seal(name)
    for name in texts:
        if name != "x11":
            await calls.packed(name)
    found = await exported(calls, several=several)
    assert {one.trajectory.trajectory_id: [step.content[0].text for step in one.steps] for one in found} == texts
    assert [one.trajectory.trajectory_id for one in found] == list(texts)
    assert len({one.resume_token for one in found}) == len(texts)
    bare = await exported(calls, several=several, metadata_only=True)
    for one in found:
        one.ClearField("steps")
    assert bare == found
    messages = [one async for one in calls.ExportTrajectories(pb.ExportTrajectoriesRequest(several=several))]
    assert (len(messages) < len(texts)) == several


async def test_an_export_brings_what_was_said_of_steps_in_either_form(calls: Calls, some: list[str]) -> None:
    value = trajectory_pb2.StepValue(index=0, name="advantage", value=0.5, judge="j")
    await calls.AnnotateTrajectory(pb.AnnotateTrajectoryRequest(trajectory_id=some[0], step_values=[value]))
    pieces, several = await exported(calls), await exported(calls, several=True)
    assert pieces == several
    assert list(several[0].step_values) == [value]


async def test_deletes_are_asked_for_twice_and_take_everything_along(calls: Calls, some: list[str]) -> None:
    assert (await fails(calls.DeleteTrajectories(pb.DeleteTrajectoriesRequest())))[
        0
    ] is grpc.StatusCode.INVALID_ARGUMENT
    wanted = pb.TrajectoryFilter(models=["a"])
    dry = await calls.DeleteTrajectories(pb.DeleteTrajectoriesRequest(filter=wanted, dry_run=True))
    assert (dry.deleted, dry.open_skipped) == (0, 5)
    for name in ("t0", "t2"):
        await calls.seal(name)
        await calls.packed(name)
    dry = await calls.DeleteTrajectories(pb.DeleteTrajectoriesRequest(filter=wanted, dry_run=True))
    assert (dry.deleted, dry.open_skipped) == (2, 3)
    gone = await calls.DeleteTrajectories(pb.DeleteTrajectoriesRequest(filter=wanted, limit=1))
    assert (gone.deleted, gone.remaining) == (1, 1)
    gone = await calls.DeleteTrajectories(pb.DeleteTrajectoriesRequest(filter=wanted, include_open=True))
    assert gone.deleted == 4
    assert await pages(calls, ascending=True) == some[1::2]
    every = await calls.DeleteTrajectories(pb.DeleteTrajectoriesRequest(all=True, include_open=True))
    assert every.deleted == 5


async def test_a_body_is_stored_once_and_refused_when_it_is_cut(calls: Calls) -> None:
    data = bytes(range(256)) * 5000
    sha256 = hashlib.sha256(data).hexdigest()

    async def put(sent: bytes, *, end: bool = True, sha: str = "") -> trajectory_pb2.BlobReference:
        async def requests():
            yield pb.PutBlobRequest(blob={"media_type": "image/png", "sha256": sha})
            pieces = [sent[start : start + 60_000] for start in range(0, len(sent), 60_000)]
            for number, piece in enumerate(pieces):
                yield pb.PutBlobRequest(data=piece, end=end and number == len(pieces) - 1)

        call = calls.PutBlob(requests())
        with peer_status(call):
            return (await call).blob

    stored = await asyncio.gather(*(put(data, sha=sha256) for _ in range(4)))
    assert {(blob.sha256, blob.size) for blob in stored} == {(sha256, len(data))}
    request = pb.GetBlobRequest(sha256=sha256, offset=1000)
    assert b"".join([piece.data async for piece in calls.GetBlob(request)]) == data[1000:]
    assert (await fails(put(data + b"x", end=False)))[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert (await fails(put(data, sha="0" * 64)))[0] is grpc.StatusCode.INVALID_ARGUMENT

    await calls.create("one")
    part = {"blob": {"sha256": sha256, "size": len(data), "media_type": "image/png"}}
    image = trajectory_pb2.Step(index=0, role=trajectory_pb2.ROLE_USER, content=[part])
    assert await calls.append("one", [image]) == 1
    missing = trajectory_pb2.Step(index=1, role=trajectory_pb2.ROLE_USER, content=[{"blob": {"sha256": "1" * 64}}])
    assert await fails(calls.append("one", [missing])) == (grpc.StatusCode.FAILED_PRECONDITION, "BLOB_NOT_FOUND")
    theirs = [piece async for piece in _quiet(calls.of("other").GetBlob(pb.GetBlobRequest(sha256=sha256)))]
    assert theirs == []


async def _quiet(call):
    try:
        async for piece in call:
            yield piece
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.NOT_FOUND
