"""Which call a judgement goes by: in one message where it fits, else in a stream, which older platforms know alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import orchard
import pytest
from orchard import Judgement
from orchard.judge.v1 import judge_pb2, judge_service_pb2_grpc
from orchard.judge.v1 import judge_service_pb2 as pb

from services.common.errors import InvalidArgumentError, UnavailableError
from tests.integration.client.test_judge_batches import client_of

VERDICT = judge_pb2.Verdict(verdict_id="vd-1", state=judge_pb2.VERDICT_STATE_SCORED, value=1.0)


class Older(judge_service_pb2_grpc.JudgeServiceServicer):
    """A platform that knows the stream alone. `calls`: which came, and how many steps each had."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    async def Judge(self, request_iterator: AsyncIterator[pb.JudgeRequest], context: Any) -> pb.JudgeResponse:
        steps = 0
        async for request in request_iterator:
            steps += sum(len(attempt.steps) for attempt in (*request.first_steps, request.steps))
        self.calls.append(("Judge", steps))
        return pb.JudgeResponse(verdict=VERDICT)

    async def JudgeWhole(self, request: pb.JudgeWholeRequest, context: Any) -> pb.JudgeWholeResponse:
        # What gRPC says where a server has no such method.
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        raise AssertionError


class Newer(Older):
    """The first `away` calls find it away."""

    def __init__(self, away: int = 0) -> None:
        super().__init__()
        self.away = away
        self.ids: list[str] = []

    async def JudgeWhole(self, request: pb.JudgeWholeRequest, context: Any) -> pb.JudgeWholeResponse:
        self.calls.append(("JudgeWhole", sum(len(attempt.steps) for attempt in request.steps)))
        self.ids.append(request.request_id)
        if len(self.calls) <= self.away:
            raise UnavailableError("not now")
        if request.judgement.instruction == "wrong":
            raise InvalidArgumentError.of("judgement.instruction", "is wrong")
        return pb.JudgeWholeResponse(verdict=VERDICT)


def asked(*, steps: int = 2, size: int = 10, instruction: str = "Do it.") -> Judgement:
    return Judgement("outcome", instruction, [{"role": "assistant", "content": "x" * size}] * steps)


@pytest.mark.parametrize(
    ("judges", "judgement", "calls"),
    [
        (Newer(), asked(), [("JudgeWhole", 2)]),
        (Newer(), asked(steps=10, size=100_000), [("Judge", 10)]),
        (Older(), asked(), [("Judge", 2)]),
        (Older(), asked(steps=10, size=100_000), [("Judge", 10)]),
        (Newer(away=2), asked(), [("JudgeWhole", 2)] * 3),
    ],
    ids=["small", "large", "small-older", "large-older", "away"],
)
async def test_each_goes_by_the_call_that_can_take_it(
    judges: Older, judgement: Judgement, calls: list[tuple[str, int]]
) -> None:
    async with client_of(judges, retry_seconds=30) as client:
        verdict = await client.judge.run(judgement)
    assert (verdict.verdict_id, verdict.value) == ("vd-1", 1.0)
    assert judges.calls == calls


async def test_a_repeat_is_the_same_request() -> None:
    judges = Newer(away=2)
    async with client_of(judges, retry_seconds=30) as client:
        await client.judge.run(asked())
    assert len(judges.ids) == 3
    assert len(set(judges.ids)) == 1


async def test_a_refusal_is_told_as_it_is() -> None:
    judges = Newer()
    async with client_of(judges, retry_seconds=30) as client:
        with pytest.raises(orchard.InvalidArgument, match=r"judgement\.instruction"):
            await client.judge.run(asked(instruction="wrong"))
    assert [name for name, _steps in judges.calls] == ["JudgeWhole"]
