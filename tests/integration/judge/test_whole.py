"""A judgement in one message: the same as one that comes in a stream, with whatever is told of it."""

import asyncio
import hashlib
from typing import Any

import grpc
import pytest
from orchard.judge.v1 import judge_pb2
from orchard.judge.v1 import judge_service_pb2 as pb
from orchard.trajectory.v1 import trajectory_pb2

from tests.integration.judge.conftest import STEPS, Calls, judgement, step
from tests.integration.judge.test_service import SCORED, fails
from tests.support.judge_server import JudgeServer

SCREENSHOT = {"blob": trajectory_pb2.BlobReference(sha256="a" * 64, media_type="image/png")}


def whole(*, request_id: str = "", steps: list[trajectory_pb2.Step] = STEPS, **fields: Any) -> pb.JudgeWholeRequest:
    attempts = [pb.AttemptSteps(steps=steps)] if steps else []
    return pb.JudgeWholeRequest(judgement=judgement(**fields), request_id=request_id, steps=attempts)


async def test_it_is_the_same_judgement_however_it_comes(calls: Calls, server: JudgeServer) -> None:
    first = (await calls.JudgeWhole(whole())).verdict
    assert (first.state, first.cached) == (SCORED, False)
    found = await calls.judge()
    assert (found.verdict_id, found.cached) == (first.verdict_id, True)
    assert found.provenance == first.provenance
    again = (await calls.JudgeWhole(whole())).verdict
    assert (again.verdict_id, again.cached) == (first.verdict_id, True)
    assert len(server.requests) == 1


async def test_a_request_is_judged_once_whichever_call_names_it(calls: Calls, server: JudgeServer) -> None:
    first = (await calls.JudgeWhole(whole(request_id="r", fresh=True))).verdict
    again = await calls.judge(request_id="r", fresh=True)
    assert again.verdict_id == first.verdict_id
    assert len(server.requests) == 1
    other = calls.JudgeWhole(whole(request_id="r", fresh=True, instruction="Something else."))
    assert await fails(other, grpc.StatusCode.ALREADY_EXISTS, "r") == "REQUEST_ID_REUSED"


async def test_both_at_once_ask_the_judge_once(calls: Calls, server: JudgeServer) -> None:
    server.behave("wait")
    asked = [asyncio.create_task(calls.judge()), asyncio.ensure_future(calls.JudgeWhole(whole()))]
    await asyncio.wait_for(server.arrived.wait(), 90)
    server.go_on.set()
    streamed, sent = await asyncio.gather(*asked)
    assert streamed.verdict_id == sent.verdict.verdict_id
    assert len(server.requests) == 1


async def test_images_come_with_it(calls: Calls, server: JudgeServer) -> None:
    data = b"not really a picture"
    sha256 = hashlib.sha256(data).hexdigest()
    shown = step(1, content=[{"blob": trajectory_pb2.BlobReference(sha256=sha256, media_type="image/png")}])
    request = whole(kind="GUI_SUCCESS", steps=[step(0, "Click."), shown])
    request.images.add(sha256=sha256, media_type="image/png", data=data)
    verdict = (await calls.JudgeWhole(request)).verdict
    assert (verdict.state, list(verdict.provenance.image_hashes)) == (SCORED, [sha256])


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (pb.JudgeWholeRequest(), ["judgement.kind"]),
        (whole(steps=[]), ["steps", "attempt 0 has no step"]),
        (whole(request_id="no id!"), ["request_id"]),
        (whole(kind="GUI_SUCCESS", steps=[step(0, "Click.", content=[SCREENSHOT])]), ["image", "was not sent"]),
    ],
    ids=["nothing", "no-step", "id", "image"],
)
async def test_what_is_wrong_is_told_before_a_judge_is_asked(
    calls: Calls, server: JudgeServer, request_: pb.JudgeWholeRequest, words: list[str]
) -> None:
    await fails(calls.JudgeWhole(request_), grpc.StatusCode.INVALID_ARGUMENT, *words)
    assert not server.requests


async def test_a_failing_judge_is_no_error_of_the_call(calls: Calls, server: JudgeServer) -> None:
    server.behave(*["500"] * 10)
    verdict = (await calls.JudgeWhole(whole(judges=["model"]))).verdict
    assert verdict.state == judge_pb2.VERDICT_STATE_EXCLUDED
    assert not verdict.HasField("value")
