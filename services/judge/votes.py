"""Many answers become one: both orders of a pair, the votes of a judge, the judges of a panel."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Final

from orchard.rewards.claw_eval import task_score
from orchard.rewards.credit import interpolate_values
from orchard.rewards.scores import Abstained, Excluded, Scored, exact

from services.judge.model import CATEGORICAL, Aggregation, Kind, Parameters, Question, Reading, Reason, actions_of


def _mean(values: Sequence[Fraction]) -> Fraction:
    return sum(values, Fraction(0)) / len(values)


_NUMBERS: Final[Mapping[Aggregation, Callable[[Sequence[Fraction]], Fraction]]] = {
    Aggregation.MEAN: _mean,
    Aggregation.MEDIAN: statistics.median,
    Aggregation.MINIMUM: min,
}


def default_aggregation(kind: Kind) -> Aggregation:
    """What a kind uses where nothing is said."""
    return Aggregation.MAJORITY if kind in CATEGORICAL else Aggregation.MEDIAN


def both_orders(forward: Reading, backward: Reading) -> Reading:
    """One vote of a pair, from the answer in each order. `backward` speaks of the attempts the other way round.

    Only where both prefer the same attempt, or neither does, is there a preference. Anything else rests on the order.
    """
    for without in (Excluded, Abstained):
        for reading in (forward, backward):
            if isinstance(reading.score, without):
                return reading
    first, second = forward.score, backward.score
    assert isinstance(first, Scored)  # noqa: S101 (for the type checker)
    assert isinstance(second, Scored)  # noqa: S101
    reasoning = f"{forward.reasoning}\n\nIn the other order: {backward.reasoning}"
    if first.value != 1 - second.value:
        message = "the judge's preference changed with the order of the attempts"
        return Reading(Abstained(Reason.ORDER), message, reasoning=reasoning)
    return replace(forward, reasoning=reasoning)


def combine(question: Question, readings: Sequence[Reading], parameters: Parameters) -> Reading:
    """One reading of all votes, in the order of the votes.

    Votes without a number are left out of it; with fewer scored ones than the quorum there is no number. MEAN, MEDIAN
    and MINIMUM go criterion by criterion and state by state, and the sum is taken of the result.
    """
    scored = [reading for reading in readings if isinstance(reading.score, Scored)]
    if len(scored) < parameters.quorum:
        return _missed(readings, len(scored), parameters.quorum)
    evidence = tuple(sorted({index for reading in scored for index in reading.evidence}))
    if len(scored) == 1:
        return replace(scored[0], again=False)
    if parameters.aggregation is Aggregation.MAJORITY:
        counts = Counter(reading.value for reading in scored)
        value, votes = counts.most_common(1)[0]
        if votes * 2 <= len(scored) or value is None:
            return _tied(readings, len(scored), votes)
        chosen = next(reading for reading in scored if reading.value == value)
        return Reading(Scored(value), reasoning=chosen.reasoning, evidence=evidence)
    together = _NUMBERS[parameters.aggregation]
    if question.kind is Kind.VALUE_CURVE:
        actions = len(actions_of(question.attempts[0]))
        curves = [interpolate_values(reading.values, actions) for reading in scored]
        values = tuple(
            (state, float(together([exact(curve[state]) for curve in curves]))) for state in range(actions + 1)
        )
        return Reading(Scored(values[-1][1]), values=values, evidence=evidence)
    scores = {name: float(together([exact(reading.scores[name]) for reading in scored])) for name in scored[0].scores}
    if question.rubric is not None:
        total = question.rubric.weighted(scores)
    elif question.kind is Kind.CLAW_EVAL:
        total = task_score(**scores).score
    else:
        total = float(together([exact(reading.score.value) for reading in scored if isinstance(reading.score, Scored)]))
    return Reading(Scored(total), scores=scores, evidence=evidence)


def _tied(readings: Sequence[Reading], scored: int, most: int) -> Reading:
    """No answer has more than half. Where votes that were lost might have decided, that is nobody's judgement."""
    lost = [reading for reading in readings if isinstance(reading.score, Excluded)]
    tie = f"no answer has more than half of {scored} votes"
    if (most + len(lost)) * 2 <= scored + len(lost):
        return Reading(Abstained(Reason.TIED), tie)
    reasons = {reading.score for reading in lost}
    score = reasons.pop() if len(reasons) == 1 else Excluded(Reason.QUORUM)
    return Reading(score, f"{tie}, and {len(lost)} that might have decided are missing: {lost[0].message}")


def _missed(readings: Sequence[Reading], scored: int, quorum: int) -> Reading:
    """Too few votes. A single reason is told as it is; where any judge failed the whole is excluded."""
    failed = [reading for reading in readings if isinstance(reading.score, Excluded)]
    without = failed or [reading for reading in readings if isinstance(reading.score, Abstained)]
    first = without[0]
    if not isinstance(first.score, (Excluded, Abstained)):
        raise TypeError("a reading without a number has a reason")
    if len({reading.score for reading in without}) == 1:
        return replace(first, again=False)
    kind = Excluded if failed else Abstained
    message = (
        f"{scored} of {len(readings)} votes are scored, {quorum} are needed; the first that is not: {first.message}"
    )
    return Reading(kind(Reason.QUORUM), message)
