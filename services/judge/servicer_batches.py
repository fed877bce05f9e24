"""A batch on the wire: items as they come in, verdicts as they go out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial

from orchard.judge.v1 import judge_service_pb2 as pb

from services.common.errors import InvalidArgumentError
from services.common.validation import Fields
from services.judge import servicer_values as values
from services.judge.backends.limits import Amount
from services.judge.batches import Given, of_item
from services.judge.held import Share
from services.judge.requests import Request
from services.judge.servicer_intake import Intake, budget_of, whole_of
from services.judge.store.verdicts import Batch, BatchItem


def start_of(message: pb.JudgeBatchRequest | None) -> pb.BatchStart:
    """The start, which the first message has."""
    if message is None or message.WhichOneof("part") != "start":
        raise InvalidArgumentError.of("start", "must be the first message")
    fields = Fields()
    values.check_id(fields, "start.batch_id", message.start.batch_id)
    fields.done()
    return message.start


def budget_of_start(start: pb.BatchStart) -> Amount:
    """What the batch may take."""
    fields = Fields()
    budget = budget_of(fields, "start.budget", start.budget)
    fields.done()
    return budget


async def items(requests: AsyncIterator[pb.JudgeBatchRequest], share: Share) -> AsyncIterator[Given]:
    """Whole items, as they come in."""
    item_id, intake, size = "", None, 0
    async for message in requests:
        part, taken = message.WhichOneof("part"), message.ByteSize()
        await share.take(taken)
        if part == "items" and intake is None:
            if not message.items.items:
                raise InvalidArgumentError.of("items", "must not be empty")
            for given, held in _shared(message.items.items, taken):
                share.whole(held)
                item_id = _item_id("items.item_id", given.item_id)
                yield Given(item_id, _whole(given), partial(share.judged, held))
            continue
        size += taken
        if part == "item" and intake is None:
            item_id = _item_id("item.item_id", message.item.item_id)
            with of_item(item_id):
                intake = Intake(message.item.judgement)
        elif intake is None:
            raise InvalidArgumentError.of("item", "must begin each item")
        elif part == "end":
            share.whole(size)
            with of_item(item_id):
                request = intake.request()
            yield Given(item_id, request, partial(share.judged, size))
            intake, size = None, 0
        else:
            with of_item(item_id):
                intake.piece(part, message)
    if intake is not None:
        raise InvalidArgumentError.of("end", f"the stream ended within item {item_id!r}")


def responses(result: Sequence[BatchItem] | Batch, *, several: bool) -> Iterator[pb.JudgeBatchResponse]:
    """The messages of what a batch told."""
    if isinstance(result, Batch):
        yield pb.JudgeBatchResponse(progress=values.progress_message(result))
        return
    together, size = pb.ItemVerdicts(), 0
    for verdict in map(values.item_message, result):
        if not several:
            yield pb.JudgeBatchResponse(verdict=verdict)
            continue
        if together.verdicts and size + verdict.ByteSize() > values.MESSAGE_BYTES:
            yield pb.JudgeBatchResponse(verdicts=together)
            together, size = pb.ItemVerdicts(), 0
        together.verdicts.append(verdict)
        size += verdict.ByteSize()
    if together.verdicts:
        yield pb.JudgeBatchResponse(verdicts=together)


def _shared(given: Sequence[pb.WholeItem], taken: int) -> Iterator[tuple[pb.WholeItem, int]]:
    """Each item with its share of the bytes that the message of all takes; the last one has what is left."""
    for left, item in zip(range(len(given) - 1, -1, -1), given, strict=True):
        held = item.ByteSize() if left else taken
        taken -= held
        yield item, held


def _whole(given: pb.WholeItem) -> Request:
    with of_item(given.item_id):
        return whole_of(given).request()


def _item_id(field: str, item_id: str) -> str:
    fields = Fields()
    values.check_id(fields, field, item_id)
    fields.done()
    return item_id
