"""Best of N: choose one of several attempts by a score, and how good that choice is.

Source: the paper (reranking with a value model).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from orchard.rewards.scores import Score, Scored


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at an instance.

    Attributes:
        score: of its last turn.
        resolved: whether it resolved the instance.
    """

    score: Score
    resolved: bool


@dataclass(frozen=True, slots=True)
class BestOfReport:
    """Rates over instances, each from 0 to 1; None where there is no instance.

    Attributes:
        instances: how many have an attempt to choose.
        without_choice: how many have none, since no attempt was scored; they are in no rate.
        picked: the chosen attempt resolved it.
        oracle: some scored attempt did, so that the best possible choice would have.
        random: the mean over attempts: what a blind choice gets.
    """

    instances: int
    without_choice: int
    picked: float | None
    oracle: float | None
    random: float | None


def pick(attempts: Sequence[Attempt]) -> int | None:
    """The index of the highest score, ties to the lowest index; None if no attempt was scored."""
    scored = [
        (attempt.score.value, -index) for index, attempt in enumerate(attempts) if isinstance(attempt.score, Scored)
    ]
    return -max(scored)[1] if scored else None


def best_of_report(instances: Iterable[Sequence[Attempt]]) -> BestOfReport:
    """Picked, oracle and random rates over instances. Attempts without a score are nobody's choice."""
    picked, oracle, blind, without = [], [], [], 0
    for attempts in instances:
        choice = pick(attempts)
        if choice is None:
            without += 1
            continue
        results = [attempt.resolved for attempt in attempts if isinstance(attempt.score, Scored)]
        picked.append(attempts[choice].resolved)
        oracle.append(any(results))
        blind.append(sum(results) / len(results))
    return BestOfReport(len(picked), without, _mean(picked), _mean(oracle), _mean(blind))


def _mean(numbers: Sequence[float]) -> float | None:
    return sum(numbers) / len(numbers) if numbers else None
