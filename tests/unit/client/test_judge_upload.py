"""What a judgement is sent as: a server that does not get all of it must be able to tell."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
from orchard import InvalidArgument, Judgement
from orchard._client.judge.client import AsyncJudge
from orchard._client.transport import Transport
from orchard.judge.v1 import judge_service_pb2 as pb


class Taken:
    """A transport that takes what is uploaded."""

    def __init__(self) -> None:
        self.messages: list[pb.JudgeRequest] = []

    @contextmanager
    def operation(self, name: str) -> Iterator[str]:
        """See Transport."""
        yield name

    def context(self, *_: Any) -> None:
        """See Transport."""

    def retry(self) -> None:
        """See Transport."""

    async def upload(self, _: Any, requests: Callable[[], AsyncIterator[pb.JudgeRequest]], **__: Any) -> Any:
        """See Transport."""
        async for message in requests():
            self.messages.append(pb.JudgeRequest.FromString(message.SerializeToString()))
        return pb.JudgeResponse()


def _judge(taken: Taken) -> AsyncJudge:
    return AsyncJudge(cast("Transport", taken), cast("Any", None))


def _messages(count: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "x" * 400_000} for _ in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_every_message_but_the_last_says_that_another_follows(count: int) -> None:
    taken = Taken()
    await _judge(taken).run(Judgement("outcome", "Do it.", _messages(count)))
    assert [message.WhichOneof("part") for message in taken.messages] == ["judgement"] + ["steps"] * count
    assert [message.more for message in taken.messages] == [True] * count + [False]


async def test_steps_that_cannot_be_sent_leave_no_shorter_judgement() -> None:
    taken = Taken()
    steps = [*_messages(2), {"role": "user", "content": "x" * (4 << 20)}]
    with pytest.raises(InvalidArgument, match="steps\\[2\\]"):
        await _judge(taken).run(Judgement("outcome", "Do it.", steps))
    assert all(message.more for message in taken.messages)
