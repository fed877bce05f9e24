"""Between the values of types.py and their messages."""

from __future__ import annotations

import dataclasses
import json

from orchard._client.convert import enum_value, time_of
from orchard._client.errors import InvalidArgument
from orchard._client.judge import types
from orchard._client.trajectories.convert import number_of
from orchard._client.trajectories.types import RewardState
from orchard._client.units import duration_seconds
from orchard.judge.v1 import judge_pb2 as pb
from orchard.judge.v1 import judge_service_pb2 as service_pb


def judgement_message(given: types.Judgement) -> pb.Judgement:
    """What is asked, without its steps.

    Raises:
        InvalidArgument: a value cannot be meant.
    """
    if not isinstance(given, types.Judgement):
        what = f"must be a Judgement, as `judge.of_trajectory(id)` makes one, not {type(given).__name__}"
        raise InvalidArgument.of("judgement", what)
    name, _, version = given.rubric.partition("@")
    if version and not version.isdecimal():
        raise InvalidArgument.of("rubric", f"{given.rubric!r} must be a name, or name@version with a number")
    parameters = pb.JudgementParameters(
        votes=given.votes,
        quorum=given.quorum,
        temperature=given.temperature,
        max_output_tokens=given.max_output_tokens,
    )
    if given.aggregation:
        parameters.aggregation = number_of(
            "aggregation", pb.Aggregation, "AGGREGATION_", types.Aggregation, given.aggregation
        )
    return pb.Judgement(
        kind=kind_number(given.kind),
        judges=(given.judges,) if isinstance(given.judges, str) else given.judges,
        rubric=pb.RubricReference(name=name, version=int(version or 0)) if name else None,
        parameters=parameters,
        instruction=given.instruction,
        patch=given.patch,
        gold_patch=given.gold_patch,
        tests=given.tests,
        final_response=given.final_response,
        tool_statuses=[pb.ToolStatus(tool=tool, status=status) for tool, status in given.tool_statuses],
        resolved=given.resolved,
        fresh=given.fresh,
        budget=budget_message(given.tokens, given.cost_usd),
    )


def kind_number(kind: types.JudgementKind | str) -> pb.JudgementKind.ValueType:
    """A kind on the wire.

    Raises:
        InvalidArgument: there is none of this name.
    """
    number: pb.JudgementKind.ValueType = number_of(
        "kind", pb.JudgementKind, "JUDGEMENT_KIND_", types.JudgementKind, kind
    )
    return number


def budget_message(tokens: int, cost_usd: float) -> pb.Budget | None:
    """What may be spent; None for no limit."""
    return pb.Budget(tokens=tokens, cost_usd=cost_usd) if tokens or cost_usd else None


def verdict_of(message: pb.Verdict) -> types.Verdict:
    """From the wire."""
    return types.Verdict(
        verdict_id=message.verdict_id,
        kind=enum_value(types.JudgementKind, pb.JudgementKind, message.kind, "JUDGEMENT_KIND_"),
        state=_state(message.state),
        value=message.value if message.HasField("value") else None,
        reason=message.reason,
        message=message.message,
        scores={score.name: score.score for score in message.scores},
        values=tuple(map(_estimate_of, message.values)),
        passed=message.passed if message.HasField("passed") else None,
        votes=tuple(map(_vote_of, message.votes)),
        provenance=_provenance_of(message.provenance),
        usage=usage_of(message.usage),
        latency_seconds=duration_seconds(message.latency),
        cached=message.cached,
        create_time=time_of(message, "create_time"),
    )


def item_of(message: service_pb.ItemVerdict) -> types.ItemVerdict:
    """From the wire."""
    return types.ItemVerdict(message.item_id, verdict_of(message.verdict))


def usage_of(message: pb.Usage) -> types.JudgeUsage:
    """From the wire."""
    return types.JudgeUsage(
        **{field.name: getattr(message, field.name) for field in dataclasses.fields(types.JudgeUsage)}
    )


def progress_of(message: service_pb.BatchProgress) -> types.BatchProgress:
    """From the wire."""
    return types.BatchProgress(
        batch_id=message.batch_id,
        scored=message.scored,
        excluded=message.excluded,
        abstained=message.abstained,
        usage=usage_of(message.usage),
        budget_exhausted=message.budget_exhausted,
        create_time=time_of(message, "create_time"),
    )


def calibration_of(message: service_pb.CalibrateResponse) -> types.Calibration:
    """From the wire."""
    return types.Calibration(
        true_positive=message.true_positive,
        false_positive=message.false_positive,
        false_negative=message.false_negative,
        true_negative=message.true_negative,
        accuracy=message.accuracy if message.HasField("accuracy") else None,
        kappa=message.kappa if message.HasField("kappa") else None,
        unscored=message.unscored,
    )


def rubric_message(rubric: types.Rubric) -> pb.Rubric:
    """To the wire."""
    return pb.Rubric(
        name=rubric.name,
        description=rubric.description,
        step=rubric.step,
        criteria=[pb.Criterion(**dataclasses.asdict(criterion)) for criterion in rubric.criteria],
    )


def rubric_of(message: pb.Rubric) -> types.Rubric:
    """From the wire."""
    return types.Rubric(
        name=message.name,
        criteria=tuple(
            types.Criterion(one.name, one.description, one.weight, one.uses_gold) for one in message.criteria
        ),
        description=message.description,
        step=message.step,
        version=message.version,
        hash=message.hash,
        used=message.used,
        create_time=time_of(message, "create_time"),
    )


def _vote_of(message: pb.Vote) -> types.Vote:
    return types.Vote(
        judge=message.judge,
        model=message.model,
        state=_state(message.state),
        value=message.value if message.HasField("value") else None,
        reason=message.reason,
        message=message.message,
        scores={score.name: score.score for score in message.scores},
        values=tuple(map(_estimate_of, message.values)),
        reasoning=message.reasoning,
        evidence=tuple(message.evidence),
        answers=tuple(message.answers),
        usage=usage_of(message.usage),
        latency_seconds=duration_seconds(message.latency),
    )


def _estimate_of(message: pb.StateValue) -> types.StateEstimate:
    return types.StateEstimate(message.state, message.step_index, message.value, message.final)


def _provenance_of(message: pb.Provenance) -> types.Provenance:
    rubric = message.rubric
    return types.Provenance(
        judges=json.loads(message.judges_json or "[]"),
        prompt_version=message.prompt_version,
        rubric=f"{rubric.name}@{rubric.version}" if rubric.name else "",
        rubric_hash=message.rubric_hash,
        trajectory_hash=message.trajectory_hash,
        image_hashes=tuple(message.image_hashes),
        cuts=tuple((cut.part, cut.step_index, cut.original, cut.kept) for cut in message.cuts),
    )


def _state(number: int) -> RewardState:
    return enum_value(RewardState, pb.VerdictState, number, "VERDICT_STATE_")
