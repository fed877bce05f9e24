"""JudgeService: the wire on one side, use cases on the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, date, datetime
from typing import Any, Final, TypeVar

from google.protobuf.message import Message
from orchard.judge.v1 import judge_service_pb2 as pb
from orchard.judge.v1 import judge_service_pb2_grpc

from services.common.auth import principal
from services.common.errors import InvalidArgumentError, ResourceExhaustedError, UnavailableError
from services.common.pages import bad_token, decode_token, encode_token
from services.common.validation import Fields
from services.judge import servicer_batches as batches
from services.judge import servicer_values as values
from services.judge.batches import Batches
from services.judge.held import Held, Share
from services.judge.journal import Answers
from services.judge.model import Verdict
from services.judge.rubric_shelf import RubricShelf
from services.judge.service import Judging
from services.judge.servicer_intake import Intake, whole_of
from services.judge.store.calls import CallStore
from services.judge.texts import plain

_CHUNK_BYTES: Final = 64 << 10
_MOST_LABELS: Final = 10_000
_MOST_USAGE: Final = 10_000

T = TypeVar("T")


class JudgeServicer(judge_service_pb2_grpc.JudgeServiceServicer):
    """Serves orchard.judge.v1.JudgeService."""

    def __init__(  # noqa: PLR0917
        self,
        judging: Judging,
        batches: Batches,
        shelf: RubricShelf,
        calls: CallStore,
        answers: Answers,
        stopping: asyncio.Event,
        most_judgements: int,
        held: Held,
    ) -> None:
        self._judging = judging
        self._batches = batches
        self._shelf = shelf
        self._calls = calls
        self._answers = answers
        self._stopping = stopping
        self._most = most_judgements
        self._held = held
        self.running = 0
        """Judgements and batches under way."""

    async def Judge(  # noqa: N802 (gRPC's names, here and below)
        self,
        request_iterator: AsyncIterator[pb.JudgeRequest],
        context: Any,  # noqa: ARG002
    ) -> pb.JudgeResponse:
        """See judge_service.proto."""
        intake, request_id, more = None, "", False
        async with self._room() as share:
            async for message in request_iterator:
                more = message.more
                await share.take(message.ByteSize())
                if intake is None:
                    if message.WhichOneof("part") != "judgement":
                        raise InvalidArgumentError.of("judgement", "must be the first message")
                    request_id = _request_id(message)
                    intake = Intake(message.judgement)
                    for steps in message.first_steps:
                        intake.steps(steps)
                elif message.first_steps:
                    raise InvalidArgumentError.of("first_steps", "must be in the first message")
                else:
                    intake.piece(message.WhichOneof("part"), message)
            if intake is None:
                raise InvalidArgumentError.of("judgement", "the stream ended before its first message")
            if more:  # a caller that is gone reads as the end of its messages before it reads as gone
                raise UnavailableError("the stream ended before its last message; repeat it", reason="UPLOAD_CUT")
            verdict = await self._judged(request_id, intake)
        return pb.JudgeResponse(verdict=values.verdict_message(verdict))

    async def JudgeWhole(self, request: pb.JudgeWholeRequest, context: Any) -> pb.JudgeWholeResponse:  # noqa: ARG002, N802
        """See judge_service.proto."""
        async with self._room() as share:
            await share.take(request.ByteSize())
            verdict = await self._judged(_request_id(request), whole_of(request))
        return pb.JudgeWholeResponse(verdict=values.verdict_message(verdict))

    async def _judged(self, request_id: str, intake: Intake) -> Verdict:
        tenant = principal().tenant
        prepared = await self._judging.prepare(tenant, intake.request())
        return await self._judging.judge_request(tenant, request_id, prepared)

    async def JudgeBatch(  # noqa: N802
        self,
        request_iterator: AsyncIterator[pb.JudgeBatchRequest],
        context: Any,  # noqa: ARG002
    ) -> AsyncIterator[pb.JudgeBatchResponse]:
        """See judge_service.proto."""
        tenant = principal().tenant
        async with self._room() as share:
            requests = aiter(request_iterator)
            start = batches.start_of(await anext(requests, None))
            given = batches.items(requests, share)
            run = self._batches.run(tenant, start.batch_id, batches.budget_of_start(start), given)
            async with aclosing(run), aclosing(self._until_stop(run)) as results:
                async for result in results:
                    for response in batches.responses(result, several=start.several):
                        yield response

    async def GetVerdict(self, request: pb.GetVerdictRequest, context: Any) -> pb.GetVerdictResponse:  # noqa: ARG002, N802
        """See judge_service.proto."""
        found = await self._judging.verdict(principal().tenant, _required("verdict_id", request.verdict_id))
        return pb.GetVerdictResponse(verdict=values.verdict_message(found))

    async def GetBatch(self, request: pb.GetBatchRequest, context: Any) -> pb.GetBatchResponse:  # noqa: ARG002, N802
        """See judge_service.proto."""
        tenant, fields = principal().tenant, Fields()
        values.check_id(fields, "batch_id", request.batch_id)
        size = fields.page_size("page_size", request.page_size, default=100, maximum=1000)
        fields.done()
        found = await self._batches.get(tenant, request.batch_id)
        items = await self._batches.items(tenant, request.batch_id, _after(request.page_token), size)
        page = values.page_of(map(values.item_message, items))
        return pb.GetBatchResponse(
            progress=values.progress_message(found),
            items=page,
            next_page_token=_next(page, items, size, "item_id"),
        )

    async def GetAnswer(self, request: pb.GetAnswerRequest, context: Any) -> AsyncIterator[pb.GetAnswerResponse]:  # noqa: ARG002, N802
        """See judge_service.proto."""
        fields = Fields()
        good = len(request.sha256) == 64 and set(request.sha256) <= set("0123456789abcdef")
        fields.check(good, "sha256", "must be 64 of 0-9, a-f")
        fields.done()
        async for chunk in self._answers.chunks(principal().tenant, request.sha256):
            for start in range(0, len(chunk), _CHUNK_BYTES):
                yield pb.GetAnswerResponse(data=chunk[start : start + _CHUNK_BYTES])

    async def ListRubrics(self, request: pb.ListRubricsRequest, context: Any) -> pb.ListRubricsResponse:  # noqa: ARG002, N802
        """See judge_service.proto."""
        fields = Fields()
        size = fields.page_size("page_size", request.page_size, default=100, maximum=1000)
        fields.done()
        found = await self._shelf.page(principal().tenant, _after(request.page_token), size)
        page = values.page_of(map(values.rubric_message, found))
        return pb.ListRubricsResponse(rubrics=page, next_page_token=_next(page, found, size, "name"))

    async def GetRubric(self, request: pb.GetRubricRequest, context: Any) -> pb.GetRubricResponse:  # noqa: ARG002, N802
        """See judge_service.proto."""
        fields = Fields()
        fields.text("rubric.name", request.rubric.name, maximum=256, required=True)
        fields.check(request.rubric.version >= 0, "rubric.version", "must not be negative")
        fields.done()
        found = await self._shelf.get(principal().tenant, request.rubric.name, request.rubric.version)
        return pb.GetRubricResponse(rubric=values.rubric_message(found))

    async def PutRubric(self, request: pb.PutRubricRequest, context: Any) -> pb.PutRubricResponse:  # noqa: ARG002, N802
        """See judge_service.proto."""
        stored = await self._shelf.put(principal().tenant, values.rubric_of(request.rubric))
        return pb.PutRubricResponse(rubric=values.rubric_message(stored))

    async def Calibrate(self, request: pb.CalibrateRequest, context: Any) -> pb.CalibrateResponse:  # noqa: ARG002, N802
        """See judge_service.proto."""
        fields = Fields()
        fields.check(1 <= len(request.labels) <= _MOST_LABELS, "labels", "must be 1 to 10,000")
        for place, label in enumerate(request.labels[:_MOST_LABELS]):
            fields.text(f"labels[{place}].verdict_id", label.verdict_id, maximum=256, required=True)
        labels = {label.verdict_id: label.positive for label in request.labels}
        fields.check(len(labels) == len(request.labels), "labels", "must have each verdict once")
        threshold = request.threshold if request.HasField("threshold") else 0.5
        fields.check(0 <= threshold <= 1, "threshold", "must be from 0 to 1")
        fields.done()
        found = await self._judging.calibrate(principal().tenant, labels, threshold)
        counts = found.counts
        return pb.CalibrateResponse(
            true_positive=counts.true_positive,
            false_positive=counts.false_positive,
            false_negative=counts.false_negative,
            true_negative=counts.true_negative,
            accuracy=counts.accuracy,
            kappa=counts.kappa,
            unscored=found.unscored,
        )

    async def GetUsage(self, request: pb.GetUsageRequest, context: Any) -> pb.GetUsageResponse:  # noqa: ARG002, N802
        """See judge_service.proto."""
        first = _day(request, "from_time", date.min)
        before = _day(request, "before_time", date.max)
        found = await self._calls.usage(principal().tenant, first, before, _MOST_USAGE)
        return pb.GetUsageResponse(
            usage=[
                pb.UsageOf(judge=judge, model=model, rubric=rubric, usage=values.usage_message(usage))
                for judge, model, rubric, usage in found
            ]
        )

    @asynccontextmanager
    async def _room(self) -> AsyncIterator[Share]:
        if self.running >= self._most:
            raise ResourceExhaustedError(
                f"{self._most} judgements are under way; retry later", reason="TOO_MANY_JUDGEMENTS", limit=self._most
            )
        self.running += 1
        try:
            with self._held.share() as share:
                yield share
        finally:
            self.running -= 1

    async def _until_stop(self, run: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """What the generator gives, until the server stops."""
        stopping = asyncio.create_task(self._stopping.wait(), name="batch sees the stop")
        following: asyncio.Future[T] | None = None
        try:
            while True:
                following = asyncio.ensure_future(anext(run))
                await asyncio.wait({following, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if not following.done():
                    raise UnavailableError("the server stops; begin the batch again", reason="SERVER_STOPPING")
                try:
                    yield following.result()
                except StopAsyncIteration:
                    return
        finally:
            stopping.cancel()
            if following is not None:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)


def _request_id(message: pb.JudgeRequest | pb.JudgeWholeRequest) -> str:
    if message.request_id:
        fields = Fields()
        values.check_id(fields, "request_id", message.request_id)
        fields.done()
    return message.request_id


def _after(token: str) -> str:
    if not token:
        return ""
    (after,) = decode_token("page_token", token, (str,))
    if plain(after) != after:  # no name has it, and the database takes none
        raise bad_token("page_token")
    return str(after)


def _next(page: Sequence[Message], found: Sequence[Any], size: int, key: str) -> str:
    """The token of the next page: where one of `size` was asked for, and of what was found the page has not all."""
    more = len(page) < len(found) or len(found) == size
    return encode_token((getattr(page[-1], key),)) if more else ""


def _required(field: str, value: str) -> str:
    fields = Fields()
    fields.text(field, value, maximum=256, required=True)
    fields.done()
    return value


def _day(request: pb.GetUsageRequest, field: str, unset: date) -> date:
    if not request.HasField(field):  # type: ignore[arg-type]
        return unset
    fields, time = Fields(), getattr(request, field)
    fields.timestamp(field, time)
    fields.done()
    return datetime.fromtimestamp(time.seconds, UTC).date()
