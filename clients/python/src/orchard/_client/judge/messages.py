"""Judgements as the messages that they are sent in: what is small whole, all else in pieces."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Final

from orchard._client.errors import InvalidArgument
from orchard._client.judge import types
from orchard._client.judge.convert import judgement_message
from orchard._client.trajectories.types import Body
from orchard._client.trajectories.writer import AnyStep, prepared
from orchard.judge.v1 import judge_pb2
from orchard.judge.v1 import judge_service_pb2 as pb
from orchard.trajectory.v1 import trajectory_pb2

STEP_BYTES: Final = 3 << 20
"""Of one step, its texts included: a message must hold it."""
_MESSAGE_BYTES: Final = 512 << 10
_SCREENSHOTS: Final = 3
_UNREAD: Final = ("model_call", "extra_json", "time")
"""What of a step no judge reads."""

Piece = pb.AttemptSteps | pb.ImageChunk


def of_judgement(asked: judge_pb2.Judgement, given: types.Judgement, request_id: str) -> Iterator[pb.JudgeRequest]:
    """The messages of one judgement. Every one but the last says that another follows.

    Args:
        asked: the message of `given`.
        given: with the steps and images.
        request_id: of the request.

    Raises:
        InvalidArgument: a step cannot be sent.
    """
    message = pb.JudgeRequest(judgement=asked, request_id=request_id)
    room = _MESSAGE_BYTES - message.ByteSize()
    for piece in _pieces(given):
        size = piece.ByteSize()
        if size <= room and isinstance(piece, pb.AttemptSteps):
            message.first_steps.append(piece)
            room -= size
            continue
        room = 0
        message.more = True
        yield message
        message = pb.JudgeRequest(steps=piece) if isinstance(piece, pb.AttemptSteps) else pb.JudgeRequest(image=piece)
    yield message


def whole_of(asked: judge_pb2.Judgement, given: types.Judgement, request_id: str) -> pb.JudgeWholeRequest | None:
    """The one message of a judgement; None where that cannot hold it. As `of_judgement`."""
    message = pb.JudgeWholeRequest(judgement=asked, request_id=request_id)
    return message if _filled(message, _pieces(given)) is None else None


def of_items(items: Iterable[tuple[str, types.Judgement]]) -> Iterator[pb.JudgeBatchRequest]:
    """The messages of some items of a batch, in their order: small ones together.

    Raises:
        InvalidArgument: a value cannot be meant, or a step cannot be sent.
    """
    together = pb.WholeItems()
    size = 0
    for item_id, given in items:
        with _of_item(item_id):
            item = together.items.add(item_id=item_id, judgement=judgement_message(given))
            rest = _filled(item, _pieces(given))
        held = item.ByteSize()
        if rest is None and size + held <= _MESSAGE_BYTES:
            size += held
            continue
        item = together.items.pop()
        if together.items:
            yield pb.JudgeBatchRequest(items=together)
        together, size = pb.WholeItems(), 0
        if rest is None:
            together.items.append(item)
            size = held
        else:
            yield from _in_pieces(item, rest)
    if together.items:
        yield pb.JudgeBatchRequest(items=together)


def _filled(item: pb.WholeItem | pb.JudgeWholeRequest, pieces: Iterator[Piece]) -> Iterator[Piece] | None:
    """Give it the pieces that a message holds beside it; and give back the others, where those are not all."""
    size = item.ByteSize()
    for piece in pieces:
        size += piece.ByteSize()
        if size > _MESSAGE_BYTES:
            return chain((piece,), pieces)
        if isinstance(piece, pb.AttemptSteps):
            item.steps.append(piece)
        else:
            item.images.append(piece)
    return None


def _in_pieces(begun: pb.WholeItem, rest: Iterator[Piece]) -> Iterator[pb.JudgeBatchRequest]:
    yield pb.JudgeBatchRequest(item=pb.ItemStart(item_id=begun.item_id, judgement=begun.judgement))
    for piece in chain(begun.steps, begun.images, _named(begun.item_id, rest)):
        if isinstance(piece, pb.AttemptSteps):
            yield pb.JudgeBatchRequest(steps=piece)
        else:
            yield pb.JudgeBatchRequest(image=piece)
    yield pb.JudgeBatchRequest(end=pb.ItemEnd())


@contextmanager
def _of_item(item_id: str) -> Iterator[None]:
    """What cannot be sent says of which item it is: a batch has many."""
    try:
        yield
    except InvalidArgument as error:
        error.message = f"item {item_id!r}: {error.message}"
        raise


def _named(item_id: str, pieces: Iterator[Piece]) -> Iterator[Piece]:
    with _of_item(item_id):
        yield from pieces


def _pieces(given: types.Judgement) -> Iterator[Piece]:
    """Its steps, then the images that the judge is shown.

    Raises:
        InvalidArgument: a step cannot be sent.
    """
    shown: dict[str, Body] = {}
    for attempt, steps in enumerate((given.steps, given.other_steps)):
        batch, size = pb.AttemptSteps(attempt=attempt), 0
        for index, step in enumerate(steps):
            message, images, step_size = _step(index, step)
            for sha256, image in images.items():
                shown.pop(sha256, None)  # one that comes again is among the last
                shown[sha256] = image
            if batch.steps and size + step_size > _MESSAGE_BYTES:
                yield batch
                batch, size = pb.AttemptSteps(attempt=attempt), 0
            batch.steps.append(message)
            size += step_size
        if batch.steps:
            yield batch
    if str(given.kind) == types.JudgementKind.GUI_SUCCESS:
        for sha256, body in list(shown.items())[-_SCREENSHOTS:]:
            for start in range(0, max(len(body.data), 1), _MESSAGE_BYTES):
                data = body.data[start : start + _MESSAGE_BYTES]
                yield pb.ImageChunk(sha256=sha256, media_type=body.media_type, data=data)


def _step(index: int, step: AnyStep) -> tuple[trajectory_pb2.Step, dict[str, Body], int]:
    """A step with its texts inline, its images by hash, in order, and its bytes."""
    message, given = prepared(step)
    message.index = index
    for unread in _UNREAD:
        message.ClearField(unread)
    images: dict[str, Body] = {}
    if not all(part.HasField("text") for part in message.content):
        bodies = {hashlib.sha256(body.data).hexdigest(): body for body in given}
        for position, part in enumerate(message.content):
            if part.HasField("blob"):
                _inline(f"steps[{index}].content[{position}]", part, bodies, images)
    size = message.ByteSize()
    if size > STEP_BYTES:
        raise InvalidArgument.of(f"steps[{index}]", "is over 3 MiB; shorten its texts")
    return message, images, size


def _inline(where: str, part: trajectory_pb2.Part, bodies: Mapping[str, Body], images: dict[str, Body]) -> None:
    """Put the text of a part into it, or its image to the others."""
    blob, body = part.blob, bodies.get(part.blob.sha256)
    if blob.media_type.startswith("image/"):
        if body is not None:
            images[blob.sha256] = body
    elif body is not None and blob.media_type == "text/plain":
        part.text = body.data.decode(errors="replace")
    elif blob.media_type == "text/plain":
        raise InvalidArgument.of(
            where, "is a stored text; give the text itself, or let `client.judge.of_trajectory` read it"
        )
    else:
        part.text = f"({blob.media_type or 'a body'}, {blob.size:,} bytes)"
