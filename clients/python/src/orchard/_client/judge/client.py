"""AsyncJudge: verdicts of language models on what agents did."""

from __future__ import annotations

import dataclasses
import datetime as dt
import secrets
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, Final

from orchard._client.arguments import explained
from orchard._client.errors import InvalidArgument, Unimplemented
from orchard._client.judge import batches, convert, messages
from orchard._client.judge.batches import Items
from orchard._client.judge.types import (
    BatchProgress,
    Calibration,
    ItemVerdict,
    Judgement,
    JudgementKind,
    Rubric,
    UsageOf,
    Verdict,
)
from orchard._client.paging import paged
from orchard._client.status import CallFailed
from orchard._client.trajectories.client import AsyncTrajectories
from orchard._client.trajectories.types import Blob, Body, Part, Role, Step
from orchard._client.transport import Transport
from orchard._client.units import timestamp
from orchard.judge.v1 import judge_pb2
from orchard.judge.v1 import judge_service_pb2 as pb

_SCREENSHOTS: Final = 3


@explained
class AsyncJudge:
    """Judges of the platform; needs the scopes judgements:read and judgements:write.

    A judge that fails raises nothing: its verdict is EXCLUDED and says why, and has no number.
    """

    def __init__(self, transport: Transport, trajectories: AsyncTrajectories) -> None:
        self._transport = transport
        self._trajectories = trajectories

    async def run(self, judgement: Judgement, *, request_id: str = "") -> Verdict:
        """Judge, or find the verdict that is stored. It waits as long as the judge takes.

        Args:
            judgement: what is asked.
            request_id: names this judgement, so that another program's repeat returns the same verdict. Default: a new
                one for this call and its own repeats.

        Raises:
            InvalidArgument: a value breaks a rule, or a judge is unknown (JUDGE_UNKNOWN).
            NotFound: there is no such rubric (RUBRIC_NOT_FOUND).
            AlreadyExists: the request id was used for something else.
            QuotaExceeded: it is too large, or too many judgements are under way.
        """
        asked = convert.judgement_message(judgement)
        request_id = request_id or f"j-{secrets.token_hex(12)}"

        with self._transport.operation("Judge") as operation:
            context, retry = self._transport.context(operation), self._transport.retry()
            if (whole := messages.whole_of(asked, judgement, request_id)) is not None:
                # Platforms before this one know the stream alone.
                with suppress(Unimplemented):
                    told = await self._transport.unary(
                        lambda c: c.judge.JudgeWhole, whole, timeout=None, context=context, retry=retry
                    )
                    return convert.verdict_of(told.verdict)

            async def requests() -> AsyncIterator[pb.JudgeRequest]:
                for message in messages.of_judgement(asked, judgement, request_id):
                    yield message

            response = await self._transport.upload(
                lambda c: c.judge.Judge, requests, sandbox_id="", context=context, retry=retry
            )
        return convert.verdict_of(response.verdict)

    def batch(
        self, batch_id: str, items: Items, *, tokens: int = 0, cost_usd: float = 0.0
    ) -> AsyncGenerator[ItemVerdict, None]:
        """Judge many items, each verdict as soon as it is there; connections that break are made again.

        A batch that was broken off goes on under the same id: the verdicts that it has come first, nothing that was
        answered is paid for again, and what an outage or the budget left out is judged.

        Args:
            batch_id: chosen by the caller: 1 to 128 of A-Z, a-z, 0-9, '-', '_', '.'.
            items: judgements by item id, as a mapping or as pairs; pairs may come slowly.
            tokens: what all of it may take. Default: no limit.
            cost_usd: what all of it may cost. Default: no limit.

        Raises, while it is iterated:
            InvalidArgument: a value of an item breaks a rule.
            AlreadyExists: an item id of this batch was used for something else (ITEM_EXISTS).
        """
        if isinstance(items, str) or not isinstance(items, (Iterable, AsyncIterable)):
            what = f"must be judgements by item id, as a mapping or as pairs, not {type(items).__name__}"
            raise InvalidArgument.of("items", what)
        start = pb.BatchStart(batch_id=batch_id, budget=convert.budget_message(tokens, cost_usd), several=True)
        return batches.run(self._transport, start, items)

    async def progress(self, batch_id: str) -> BatchProgress:
        """How far a batch is.

        Raises:
            NotFound: there is none (BATCH_NOT_FOUND).
        """
        response = await self._transport.unary(lambda c: c.judge.GetBatch, pb.GetBatchRequest(batch_id=batch_id))
        return convert.progress_of(response.progress)

    def items(self, batch_id: str) -> AsyncGenerator[ItemVerdict, None]:
        """Verdicts of a batch by item id.

        Raises, while it is iterated:
            NotFound: there is none (BATCH_NOT_FOUND).
        """
        request = pb.GetBatchRequest(batch_id=batch_id, page_size=200)
        return paged(self._transport, lambda c: c.judge.GetBatch, request, lambda page: page.items, convert.item_of)

    async def get(self, verdict_id: str) -> Verdict:
        """A verdict.

        Raises:
            NotFound: there is none (VERDICT_NOT_FOUND).
        """
        request = pb.GetVerdictRequest(verdict_id=verdict_id)
        return convert.verdict_of((await self._transport.unary(lambda c: c.judge.GetVerdict, request)).verdict)

    async def answer(self, sha256: str) -> str:
        """A raw answer of a judge, by its hash in a vote.

        Raises:
            NotFound: there is none (ANSWER_NOT_FOUND).
        """
        retry, context, request = self._transport.retry(), self._transport.context(), pb.GetAnswerRequest(sha256=sha256)
        while True:
            data = b""
            try:
                async with self._transport.stream(lambda c: c.judge.GetAnswer, request, context) as stream:
                    async for response in stream:
                        data += response.data
            except CallFailed as error:
                await self._transport.pause_or_raise(error, retry, "")
            else:
                return data.decode()

    async def calibrate(self, labels: Mapping[str, bool], *, threshold: float = 0.5) -> Calibration:
        """Compare verdicts with labels that people gave.

        Args:
            labels: yes or no by verdict id, at most 10,000.
            threshold: a verdict says yes where its value is at least this.

        Raises:
            NotFound: one of the verdicts is not there (VERDICT_NOT_FOUND).
        """
        request = pb.CalibrateRequest(
            labels=[pb.Label(verdict_id=verdict_id, positive=positive) for verdict_id, positive in labels.items()],
            threshold=threshold,
        )
        return convert.calibration_of(await self._transport.unary(lambda c: c.judge.Calibrate, request))

    async def usage(self, *, start: dt.datetime | None = None, before: dt.datetime | None = None) -> list[UsageOf]:
        """What judging took, by judge, model and rubric; of whole days in UTC."""
        request = pb.GetUsageRequest()
        if start is not None:
            request.from_time.CopyFrom(timestamp(start))
        if before is not None:
            request.before_time.CopyFrom(timestamp(before))
        response = await self._transport.unary(lambda c: c.judge.GetUsage, request)
        return [UsageOf(one.judge, one.model, one.rubric, convert.usage_of(one.usage)) for one in response.usage]

    def rubrics(self) -> AsyncGenerator[Rubric, None]:
        """The newest version of each rubric, by name, built-in ones included."""
        request = pb.ListRubricsRequest(page_size=1000)
        return paged(
            self._transport, lambda c: c.judge.ListRubrics, request, lambda page: page.rubrics, convert.rubric_of
        )

    async def rubric(self, name: str, version: int = 0) -> Rubric:
        """A rubric, by default its newest version.

        Raises:
            NotFound: there is none (RUBRIC_NOT_FOUND).
        """
        request = pb.GetRubricRequest(rubric=judge_pb2.RubricReference(name=name, version=version))
        return convert.rubric_of((await self._transport.unary(lambda c: c.judge.GetRubric, request)).rubric)

    async def put_rubric(self, rubric: Rubric) -> Rubric:
        """Store a rubric. One that a verdict rests on is never changed: the new one becomes its next version.

        Raises:
            InvalidArgument: it cannot be used; the field is named.
        """
        request = pb.PutRubricRequest(rubric=convert.rubric_message(rubric))
        return convert.rubric_of((await self._transport.unary(lambda c: c.judge.PutRubric, request)).rubric)

    async def of_trajectory(
        self, trajectory_id: str, kind: JudgementKind | str = JudgementKind.OUTCOME, **given: Any
    ) -> Judgement:
        """A judgement of a trajectory that the platform keeps; its stored texts and screenshots are read.

        Args:
            trajectory_id: which one.
            kind: what is asked.
            given: the other fields of Judgement. `instruction` is by default the first message of the user; `resolved`,
                of VALUE_CURVE, whether the trajectory's outcome is positive.

        Raises:
            TrajectoryNotFound: there is none of this id.
            InvalidArgument: there is no such kind, or no instruction and no message of a user in its place.
        """
        convert.kind_number(kind)
        async with aclosing(self._trajectories.steps(trajectory_id)) as stored:
            steps = [step async for step in stored]
        steps = [await self._readable(step) for step in steps]
        if str(kind) == JudgementKind.GUI_SUCCESS:
            steps = await self._with_screenshots(steps)
        if not given.get("instruction"):
            given["instruction"] = next((step.text for step in steps if step.role == Role.USER and step.text), "")
        if not given["instruction"]:
            raise InvalidArgument.of(
                "instruction", f"trajectory {trajectory_id!r} has no message of a user; say the task"
            )
        if str(kind) == JudgementKind.VALUE_CURVE and given.get("resolved") is None:
            outcome = (await self._trajectories.get(trajectory_id)).outcome
            if outcome is not None and outcome.value is not None:
                given["resolved"] = outcome.value > 0
        return Judgement(kind, steps=steps, **given)

    async def _readable(self, step: Step) -> Step:
        """The step with its stored texts in the place of their references."""
        parts: list[Part] = []
        for part in step.parts:
            if isinstance(part, Blob) and part.media_type == "text/plain":
                parts.append((await self._trajectories.bodies.get(part)).decode(errors="replace"))
            else:
                parts.append(part)
        return dataclasses.replace(step, content=tuple(parts))

    async def _with_screenshots(self, steps: Sequence[Step]) -> list[Step]:
        """The steps with the data of the last images, which the judge is shown."""
        found, left = [], _SCREENSHOTS
        for step in reversed(steps):
            parts: list[Part] = []
            for part in reversed(step.parts):
                if left and isinstance(part, Blob) and part.media_type.startswith("image/"):
                    left -= 1
                    parts.append(Body(await self._trajectories.bodies.get(part), part.media_type))
                else:
                    parts.append(part)
            found.append(dataclasses.replace(step, content=tuple(reversed(parts))))
        return found[::-1]
