"""Rubric-based process reward: a weighted sum of a judge's scores, added to the outcome.

Sources: the paper; the weights are the released trainer's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from orchard.rewards.scores import Excluded, Score, Scored, exact

_GRID: Final = 10


@dataclass(frozen=True, slots=True)
class Rubric:
    """Dimensions and their weights, which add up to 1.

    Raises:
        ValueError: there is no dimension, a weight is not positive, or they do not add up to 1.
    """

    weights: Mapping[str, float]

    def __post_init__(self) -> None:
        if not self.weights:
            raise ValueError("weights is empty: a rubric needs at least one dimension")
        for name, weight in self.weights.items():
            if exact(weight) <= 0:
                raise ValueError(f"the weight of {name!r} must be positive, not {weight!r}")
        total = sum(map(exact, self.weights.values()), Fraction(0))
        if total != 1:
            raise ValueError(f"the weights must add up to 1, not to {float(total)!r}")


SOFTWARE_ENGINEERING: Final = Rubric(
    {
        "fix_quality": 0.15,
        "self_test_relevance": 0.18,
        "coverage": 0.12,
        "rigor": 0.15,
        "discriminativeness": 0.14,
        "regression_guard": 0.12,
        "verification_integrity": 0.14,
    }
)
"""The seven dimensions of the paper. The gold patch and the failing tests inform self-test relevance, coverage and
discriminativeness only."""


def combine(rubric: Rubric, scores: Mapping[str, float]) -> float:
    """J: the weighted sum of the scores, from 0 to 1. Each score is from 0 to 1 in steps of 0.1.

    Raises:
        ValueError: a dimension is missing or unknown, or a score is not on the grid.
    """
    if missing := [name for name in rubric.weights if name not in scores]:
        raise ValueError(f"scores are missing for {', '.join(missing)}: a dimension left out would silently count as 0")
    if unknown := [name for name in scores if name not in rubric.weights]:
        raise ValueError(f"the rubric has no dimension {', '.join(unknown)}")
    total = sum((exact(weight) * _on_grid(name, scores[name]) for name, weight in rubric.weights.items()), Fraction(0))
    return float(total)


def process_reward(*, resolved: bool, process: float, alpha: float = 0.5) -> float:
    """Outcome + alpha * J with the outcome +1 or -1 always: with 1 and 0 a failed run could earn something.

    For training alone; evaluation uses the outcome.

    Raises:
        ValueError: `process` is no number from 0 to 1.
    """
    if not 0 <= exact(process) <= 1:
        raise ValueError(f"process must lie between 0 and 1, not at {process!r}")
    return float((1 if resolved else -1) + exact(alpha) * exact(process))


def process_score(outcome: Score, process: Score, *, alpha: float = 0.5) -> Score:
    """`process_reward` of scores: a number only where both are numbers. An outcome above 0 is a success.

    Where one is none, so is the result: excluded if either is, with the first reason.
    """
    if isinstance(outcome, Scored) and isinstance(process, Scored):
        return Scored(process_reward(resolved=outcome.value > 0, process=process.value, alpha=alpha))
    without = [score for score in (outcome, process) if not isinstance(score, Scored)]
    return next((score for score in without if isinstance(score, Excluded)), without[0])


def _on_grid(name: str, score: object) -> Fraction:
    if isinstance(score, bool) or not isinstance(score, (int, float)):
        raise ValueError(f"the score of {name!r} must be a number, not {score!r}")  # noqa: TRY004 (a judge's word)
    value = exact(score)
    if not 0 <= value <= 1 or (value * _GRID).denominator != 1:
        raise ValueError(f"the score of {name!r} must be one of 0, 0.1, ... 1, not {score!r}")
    return value
