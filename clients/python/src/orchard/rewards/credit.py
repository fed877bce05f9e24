"""Credit assignment for unresolved trajectories: which actions raised the chance to resolve the task.

A teacher that sees the whole trajectory and the outcome gives V(s_t), the probability of resolving, at a few steps. T
actions have T + 1 states; action t leads from state t to state t + 1.

Sources: the paper; keeping the value constant outside the annotated range, and the shape test, are our own choices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

RISE_THRESHOLD: Final = 0.05
_TOLERANCE: Final = 1e-9
"""0.15 - 0.10 counts as 0.05."""


@dataclass(frozen=True, slots=True)
class RiseSegment:
    """A maximal run of actions `first` to `end` - 1 that each raised the value; states `first` to `end`."""

    first: int
    end: int


@dataclass(frozen=True, slots=True)
class ActionMask:
    """What of a trajectory to train on.

    Attributes:
        kept: actions 0 to kept - 1 stay in the input with what was observed; what follows is cut.
        loss: for each kept action whether its tokens have loss. Observations never have.
    """

    kept: int
    loss: tuple[bool, ...]


def interpolate_values(annotations: Iterable[tuple[int, float]], actions: int) -> list[float]:
    """V of every state 0 to `actions`: linear between annotated steps, constant before the first and after the last.

    Raises:
        ValueError: no annotation, a step twice or out of range, or a value that is no number from 0 to 1.
    """
    points: dict[int, float] = {}
    for step, value in annotations:
        if not 0 <= step <= actions:
            raise ValueError(f"step {step} is no state of {actions} actions (0 to {actions})")
        if step in points:
            raise ValueError(f"step {step} is annotated twice")
        points[step] = _probability(value, step)
    if not points:
        raise ValueError("there is no annotation")
    steps = sorted(points)
    values = [points[steps[0]]] * steps[0]
    for left, right in itertools.pairwise(steps):
        slope = (points[right] - points[left]) / (right - left)
        values += [points[left] + slope * (step - left) for step in range(left, right)]
    return values + [points[steps[-1]]] * (actions - steps[-1] + 1)


def credits_of(values: Sequence[float]) -> list[float]:
    """c_t = V(s_t+1) - V(s_t) for each action."""
    return [after - before for before, after in itertools.pairwise(values)]


def rise_segments(values: Sequence[float], *, threshold: float = RISE_THRESHOLD) -> list[RiseSegment]:
    """Maximal runs of actions with a credit of at least `threshold`, in their order.

    Args:
        values: V of every state.
        threshold: the least credit, compared with a tolerance of 1e-9.
    """
    segments: list[RiseSegment] = []
    for action, credit in enumerate(credits_of(values)):
        if credit < threshold - _TOLERANCE:
            continue
        if segments and segments[-1].end == action:
            segments[-1] = RiseSegment(segments[-1].first, action + 1)
        else:
            segments.append(RiseSegment(action, action + 1))
    return segments


def unresolved_mask(segments: Sequence[RiseSegment]) -> ActionMask | None:
    """Loss on the actions inside the segments of an unresolved trajectory; None: no segment, so no example."""
    if not segments:
        return None
    trained = {action for segment in segments for action in range(segment.first, segment.end)}
    kept = segments[-1].end
    return ActionMask(kept, tuple(action in trained for action in range(kept)))


def resolved_mask(actions: int) -> ActionMask:
    """A resolved trajectory is kept whole and has loss on every action."""
    return ActionMask(actions, (True,) * actions)


def is_inverted_u(values: Sequence[float], *, drop: float = RISE_THRESHOLD) -> bool:
    """Whether a curve rises and then falls: its maximum is at neither end, and the last value lies `drop` below it."""
    peak = max(values)
    return values[0] < peak and values[-1] < peak and values[-1] <= peak - drop + _TOLERANCE


def inverted_u_share(curves: Iterable[Sequence[float]]) -> float | None:
    """The share of curves that are inverted U; None of no curves. The paper reports 98.9 %."""
    shapes = [is_inverted_u(curve) for curve in curves]
    return sum(shapes) / len(shapes) if shapes else None


def _probability(value: float, step: int) -> float:
    if isinstance(value, bool) or not math.isfinite(value) or not 0 <= value <= 1:
        raise ValueError(f"the value at step {step} must be a number from 0 to 1, not {value!r}")
    return float(value)
