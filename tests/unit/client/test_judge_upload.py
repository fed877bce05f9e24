"""What a judgement is sent as: a server that does not get all of it must be able to tell."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
from orchard import Body, InvalidArgument, Judgement, Step
from orchard._client.judge.client import AsyncJudge
from orchard._client.judge.messages import of_items
from orchard._client.transport import Transport
from orchard.judge.v1 import judge_service_pb2 as pb

_SHORT: Any = {"role": "user", "content": "short"}


class Taken:
    """A transport that takes what is sent: messages of a stream, or one that is whole."""

    def __init__(self) -> None:
        self.messages: list[pb.JudgeRequest] = []
        self.whole: list[pb.JudgeWholeRequest] = []

    @contextmanager
    def operation(self, name: str) -> Iterator[str]:
        """See Transport."""
        yield name

    def context(self, *_: Any) -> None:
        """See Transport."""

    def retry(self) -> None:
        """See Transport."""

    async def unary(self, _: Any, request: pb.JudgeWholeRequest, **__: Any) -> Any:
        """See Transport."""
        self.whole.append(pb.JudgeWholeRequest.FromString(request.SerializeToString()))
        return pb.JudgeWholeResponse()

    async def upload(self, _: Any, requests: Callable[[], AsyncIterator[pb.JudgeRequest]], **__: Any) -> Any:
        """See Transport."""
        async for message in requests():
            self.messages.append(pb.JudgeRequest.FromString(message.SerializeToString()))
        return pb.JudgeResponse()


def _judge(taken: Taken) -> AsyncJudge:
    return AsyncJudge(cast("Transport", taken), cast("Any", None))


def _messages(count: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "x" * 400_000} for _ in range(count)]


def _indices(*pieces: pb.AttemptSteps) -> list[int]:
    return [step.index for piece in pieces for step in piece.steps]


@pytest.mark.parametrize("count", [2, 3])
async def test_every_message_but_the_last_says_that_another_follows(count: int) -> None:
    taken = Taken()
    await _judge(taken).run(Judgement("outcome", "Do it.", _messages(count)))
    parts = [message.WhichOneof("part") for message in taken.messages]
    assert parts == ["judgement"] + ["steps"] * (count - 1)
    assert [message.more for message in taken.messages] == [True] * (count - 1) + [False]
    assert _indices(*(steps for one in taken.messages for steps in (*one.first_steps, one.steps))) == [*range(count)]
    assert not taken.whole


async def test_what_fits_into_one_message_goes_whole() -> None:
    taken = Taken()
    await _judge(taken).run(Judgement("outcome", "Do it.", _messages(1)), request_id="r")
    (message,) = taken.whole
    assert (message.request_id, message.judgement.instruction, _indices(*message.steps)) == ("r", "Do it.", [0])
    assert not taken.messages


async def test_both_attempts_fit_into_one_message() -> None:
    taken = Taken()
    await _judge(taken).run(Judgement("pairwise", "Do it.", [_SHORT], [_SHORT] * 2))
    (message,) = taken.whole
    assert [(steps.attempt, len(steps.steps)) for steps in message.steps] == [(0, 1), (1, 2)]


def test_small_items_go_together_and_a_large_one_in_pieces_in_their_order() -> None:
    small, large = Judgement("outcome", "Do it.", [_SHORT]), Judgement("outcome", "", _messages(3))
    found = list(of_items([("a", small), ("b", small), ("c", large), ("d", small)]))
    assert [message.WhichOneof("part") for message in found] == [
        "items",
        "item",
        *("steps", "steps", "steps"),
        "end",
        "items",
    ]
    assert [item.item_id for item in found[0].items.items] == ["a", "b"]
    assert found[1].item.item_id == "c"
    assert _indices(*(message.steps for message in found)) == [0, 1, 2]
    assert [item.item_id for item in found[-1].items.items] == ["d"]


def test_no_message_of_items_is_larger_than_a_piece() -> None:
    items = [(f"i{number}", Judgement("outcome", "Do it.", _messages(1))) for number in range(3)]
    found = list(of_items(items))
    assert [[item.item_id for item in message.items.items] for message in found] == [["i0"], ["i1"], ["i2"]]


@pytest.mark.parametrize("large", [1, 3])
def test_what_cannot_be_sent_of_an_item_names_it(large: int) -> None:
    """Also where it has begun already."""
    bad = Judgement("outcome", "Do it.", [*_messages(large), {"role": "user", "content": "x" * (4 << 20)}])
    with pytest.raises(InvalidArgument, match=r"^item 'b': steps\[.\]"):
        list(of_items([("a", Judgement("outcome", "Do it.", [_SHORT])), ("b", bad)]))
    with pytest.raises(InvalidArgument, match=r"^item 'c': aggregation"):
        list(of_items([("c", Judgement("outcome", "Do it.", [_SHORT], aggregation="best"))]))


def test_images_go_with_an_item_that_they_fit_into() -> None:
    step = Step.user([Body(b"picture", "image/png")])
    (message,) = of_items([("a", Judgement("gui_success", "Do it.", [step]))])
    (item,) = message.items.items
    assert [image.data for image in item.images] == [b"picture"]


@pytest.mark.parametrize(("size", "is_whole"), [(1000, True), (600_000, False)])
async def test_images_go_with_a_judgement_that_they_fit_into(size: int, is_whole: bool) -> None:
    taken = Taken()
    step = Step.user([Body(b"p" * size, "image/png")])
    await _judge(taken).run(Judgement("gui_success", "Do it.", [step]))
    whole = [image for message in taken.whole for image in message.images]
    pieces = [message.image for message in taken.messages if message.HasField("image")]
    assert sum(len(image.data) for image in whole or pieces) == size
    assert (bool(whole), bool(pieces)) == (is_whole, not is_whole)


async def test_steps_that_cannot_be_sent_leave_no_shorter_judgement() -> None:
    taken = Taken()
    steps = [*_messages(2), {"role": "user", "content": "x" * (4 << 20)}]
    with pytest.raises(InvalidArgument, match="steps\\[2\\]"):
        await _judge(taken).run(Judgement("outcome", "Do it.", steps))
    assert not taken.whole
    assert all(message.more for message in taken.messages)
