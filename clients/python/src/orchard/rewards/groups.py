"""Groups: the attempts at one prompt, their GRPO advantages, and whether a trainer should use them.

Sources: Shao et al., "DeepSeekMath" (2024) for GRPO; the paper and the released trainer for the filters.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from orchard.rewards.scores import Score, Scored

_EPSILON: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Advantages:
    """Of the members of one group, in their order.

    Attributes:
        values: given to every turn of a member; 0 where it is not trainable.
        trainable: whether a member has loss at all; the others are masked and moved no mean.
        mean: of the trainable rewards; None without any.
        std: their sample standard deviation; 0 with fewer than two.
    """

    values: tuple[float, ...]
    trainable: tuple[bool, ...]
    mean: float | None
    std: float


@dataclass(frozen=True, slots=True)
class GroupVerdict:
    """Whether dynamic sampling keeps a group, and why not."""

    keep: bool
    reason: str = ""


def grpo_advantages(scores: Sequence[Score]) -> Advantages:
    """(r - mean) / (std + 1e-6) over the scored members, with the sample standard deviation (ddof 1).

    What was excluded or abstained has advantage 0. A single scored member has advantage 0: nothing to compare it with.
    """
    rewards = [score.value for score in scores if isinstance(score, Scored)]
    mean = statistics.fmean(rewards) if rewards else None
    std = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
    values = [
        (score.value - mean) / (std + _EPSILON) if isinstance(score, Scored) and mean is not None else 0.0
        for score in scores
    ]
    return Advantages(tuple(values), tuple(isinstance(score, Scored) for score in scores), mean, std)


def dynamic_sampling(scores: Sequence[Score], *, positive: Sequence[bool] | None = None) -> GroupVerdict:
    """Whether a group teaches anything: at least two scored members whose rewards differ.

    Args:
        scores: of the members, as they are trained on.
        positive: for each member whether its outcome, before any shaping, is a success. Given, at least one scored
            member must be one (as for software engineering); None does not ask.

    Raises:
        ValueError: `positive` has another length than `scores`.
    """
    advantages = grpo_advantages(scores)
    count = sum(advantages.trainable)
    if count < 2:
        return GroupVerdict(False, f"{count} of {len(scores)} members are scored; a comparison needs two")
    if advantages.std <= _EPSILON:
        return GroupVerdict(False, "all scored members have the same reward")
    if positive is not None:
        pairs = zip(advantages.trainable, positive, strict=True)
        if not any(trainable and good for trainable, good in pairs):
            return GroupVerdict(False, "no scored member has a positive outcome")
    return GroupVerdict(True)
