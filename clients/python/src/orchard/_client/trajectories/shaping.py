"""The reward that a policy is trained on, from what is known of a trajectory: its outcome and how well it worked."""

from __future__ import annotations

import datetime as dt
from typing import Final

from orchard._client.errors import InvalidArgument
from orchard._client.trajectories.types import Reward, RewardState, TrajectoryInfo
from orchard.rewards.rubric import process_score
from orchard.rewards.scores import Abstained, Excluded, Score, Scored

_NEVER: Final = dt.datetime.min.replace(tzinfo=dt.UTC)


def process_reward_of(
    info: TrajectoryInfo, process: str = "process", *, alpha: float = 0.5, name: str = "process_reward"
) -> Reward | None:
    """Outcome (+1 or -1) + alpha * the newest reward named `process`; see `orchard.rewards.rubric`. For training alone.

    Returns:
        A reward for `client.trajectories.annotate`, without a number where one of the two has none; None where nobody
        gave one of them yet.

    Raises:
        ValueError: the process reward is not from 0 to 1.
        InvalidArgument: `info` is none.
    """
    if not isinstance(info, TrajectoryInfo):
        what = f"must be a TrajectoryInfo, as `client.trajectories.get(id)` gives one, not {type(info).__name__}"
        raise InvalidArgument.of("info", what)
    judged = newest_reward(info, process)
    if info.outcome is None or judged is None:
        return None
    score = process_score(_score(info.outcome), _score(judged), alpha=alpha)
    if not isinstance(score, Scored):
        without = Reward.excluded if isinstance(score, Excluded) else Reward.abstained
        return without(score.reason, name=name, judge=judged.judge, rubric=judged.rubric)
    details = {"outcome": info.outcome.value, "process": judged.value, "alpha": alpha}
    return Reward.scored(score.value, name=name, judge=judged.judge, rubric=judged.rubric, details=details)


def newest_reward(info: TrajectoryInfo, name: str) -> Reward | None:
    """The newest reward of a name, whoever judged; None where nobody did."""
    named = (one for one in info.rewards if one.name == name)
    return max(named, key=lambda one: one.time or _NEVER, default=None)


def _score(reward: Reward) -> Score:
    if reward.state == RewardState.SCORED and reward.value is not None:
        return Scored(reward.value)
    return Abstained(reward.reason) if reward.state == RewardState.ABSTAINED else Excluded(reward.reason)
