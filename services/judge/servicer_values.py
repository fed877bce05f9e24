"""Values of the judge service as messages, and rubrics from the wire."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime
from typing import Final, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from orchard.judge.v1 import judge_pb2, judge_service_pb2
from orchard.rewards.scores import Scored

from services.common.validation import Fields
from services.judge.codec import state_of
from services.judge.model import Provenance, Reading, Usage, Verdict, Vote
from services.judge.rubrics import Criterion, Rubric
from services.judge.store.rubrics import StoredRubric
from services.judge.store.verdicts import Batch, BatchItem
from services.judge.texts import plain

MESSAGE_BYTES: Final = 1 << 20
"""Of what goes together in one message; far below what a client takes."""

_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}\Z")

M = TypeVar("M", bound=Message)


def check_id(fields: Fields, field: str, value: str) -> None:
    """A batch id or item id."""
    good = _ID.match(value) is not None
    fields.check(good, field, "must be 1 to 128 of A-Z, a-z, 0-9, '-', '_', '.', beginning with a letter or digit")


def page_of(messages: Iterable[M]) -> list[M]:
    """The first of the messages that go together; one at least."""
    page: list[M] = []
    size = 0
    for message in messages:
        size += message.ByteSize()
        if page and size > MESSAGE_BYTES:
            break
        page.append(message)
    return page


def verdict_message(verdict: Verdict) -> judge_pb2.Verdict:
    """A verdict."""
    reading = verdict.reading
    return judge_pb2.Verdict(
        verdict_id=verdict.verdict_id,
        kind=judge_pb2.JudgementKind.ValueType(verdict.kind.value),
        state=judge_pb2.VerdictState.ValueType(state_of(reading.score)),
        value=reading.value,
        reason=_reason(reading),
        message=plain(reading.message),
        scores=_scores(reading),
        values=_values(reading, verdict),
        passed=verdict.passed,
        votes=[_vote(vote, verdict) for vote in verdict.votes],
        provenance=_provenance(verdict.provenance),
        usage=usage_message(verdict.usage),
        latency=_duration(verdict.latency_seconds),
        cached=verdict.cached,
        create_time=_timestamp(verdict.create_time),
    )


def usage_message(usage: Usage) -> judge_pb2.Usage:
    """What calls took."""
    return judge_pb2.Usage(
        calls=usage.calls,
        failed_calls=usage.failed_calls,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        cost_usd=usage.cost_usd,
    )


def rubric_of(message: judge_pb2.Rubric) -> Rubric:
    """A rubric as somebody puts it; not yet checked."""
    criteria = tuple(
        Criterion(criterion.name, criterion.description, criterion.weight, criterion.uses_gold)
        for criterion in message.criteria
    )
    return Rubric(message.name, message.description, criteria, message.step or 0.1)


def rubric_message(stored: StoredRubric) -> judge_pb2.Rubric:
    """A stored rubric."""
    rubric = stored.rubric
    return judge_pb2.Rubric(
        name=rubric.name,
        version=rubric.version,
        description=rubric.description,
        criteria=[
            judge_pb2.Criterion(
                name=criterion.name,
                description=criterion.description,
                weight=criterion.weight,
                uses_gold=criterion.uses_gold,
            )
            for criterion in rubric.criteria
        ],
        step=rubric.step,
        hash=rubric.hash,
        used=stored.used,
        create_time=None if stored.create_time is None else _timestamp(stored.create_time),
    )


def item_message(item: BatchItem) -> judge_service_pb2.ItemVerdict:
    """An item that has its verdict."""
    return judge_service_pb2.ItemVerdict(item_id=item.item_id, verdict=verdict_message(item.verdict))


def progress_message(batch: Batch) -> judge_service_pb2.BatchProgress:
    """How far a batch is."""
    return judge_service_pb2.BatchProgress(
        batch_id=batch.batch_id,
        scored=batch.scored,
        excluded=batch.excluded,
        abstained=batch.abstained,
        usage=usage_message(batch.usage),
        budget_exhausted=batch.budget_exhausted,
        create_time=_timestamp(batch.create_time),
    )


def _vote(vote: Vote, verdict: Verdict) -> judge_pb2.Vote:
    reading = vote.reading
    return judge_pb2.Vote(
        judge=vote.judge,
        model=plain(vote.model),
        state=judge_pb2.VerdictState.ValueType(state_of(reading.score)),
        value=reading.value,
        reason=_reason(reading),
        message=plain(reading.message),
        scores=_scores(reading),
        values=_values(reading, verdict),
        reasoning=plain(reading.reasoning),
        evidence=reading.evidence,
        answers=vote.answers,
        usage=usage_message(vote.usage),
        latency=_duration(vote.latency_seconds),
    )


def _provenance(provenance: Provenance) -> judge_pb2.Provenance:
    parameters = provenance.parameters
    return judge_pb2.Provenance(
        judges_json=provenance.judges_json,
        parameters=judge_pb2.JudgementParameters(
            votes=parameters.votes,
            aggregation=judge_pb2.Aggregation.ValueType(parameters.aggregation.value),
            quorum=parameters.quorum,
            temperature=parameters.temperature,
            max_output_tokens=parameters.max_output_tokens,
        ),
        prompt_version=provenance.prompt_version,
        rubric=judge_pb2.RubricReference(name=provenance.rubric_name, version=provenance.rubric_version)
        if provenance.rubric_name
        else None,
        rubric_hash=provenance.rubric_hash,
        trajectory_hash=provenance.trajectory_hash,
        image_hashes=provenance.image_hashes,
        cuts=[
            judge_pb2.Cut(part=cut.part, step_index=cut.step_index, original=cut.original, kept=cut.kept)
            for cut in provenance.cuts
        ],
    )


def _scores(reading: Reading) -> list[judge_pb2.CriterionScore]:
    return [judge_pb2.CriterionScore(name=name, score=score) for name, score in reading.scores.items()]


def _values(reading: Reading, verdict: Verdict) -> list[judge_pb2.StateValue]:
    steps = verdict.action_steps
    return [
        judge_pb2.StateValue(state=state, step_index=steps[state], value=value, final=state == len(steps) - 1)
        for state, value in reading.values
    ]


def _reason(reading: Reading) -> str:
    return "" if isinstance(reading.score, Scored) else reading.score.reason


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration


def _timestamp(time: datetime) -> Timestamp:
    message = Timestamp()
    message.FromDatetime(time)
    return message
