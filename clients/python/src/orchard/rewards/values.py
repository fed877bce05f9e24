"""Training data of a value model: targets for each turn, from finished trajectories.

Sources: the paper; Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation"
(2016).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Final, TypeVar

GAMMA: Final = 0.98
LAMBDA: Final = 0.95

T = TypeVar("T")


def gae_targets(values: Sequence[float], reward: float, *, gamma: float = GAMMA, lam: float = LAMBDA) -> list[float]:
    """The target of each turn: its advantage plus its value. The reward comes with the last turn; nothing follows it.

    Args:
        values: V read just before each action, one for each contiguous assistant response.
        reward: +1 or -1.
        gamma: discount of the next value.
        lam: decay of later errors.
    """
    targets = [0.0] * len(values)
    advantage = 0.0
    for turn in range(len(values) - 1, -1, -1):
        last = turn == len(values) - 1
        error = (reward if last else gamma * values[turn + 1]) - values[turn]
        advantage = error + gamma * lam * advantage
        targets[turn] = advantage + values[turn]
    return targets


def capped(items: Iterable[T], instance: Callable[[T], Hashable], most: int) -> list[T]:
    """The first `most` items of each instance, in their order."""
    if most < 1:
        raise ValueError(f"most must be at least 1, not {most}")
    counts: dict[Hashable, int] = {}
    kept = []
    for item in items:
        key = instance(item)
        counts[key] = counts.get(key, 0) + 1
        if counts[key] <= most:
            kept.append(item)
    return kept


def balanced(items: Sequence[T], positive: Callable[[T], bool], *, seed: int) -> list[T]:
    """As many positive as negative items: the larger class is sampled down, in its order. Same seed, same choice."""
    classes: tuple[list[int], list[int]] = ([], [])
    for index, item in enumerate(items):
        classes[bool(positive(item))].append(index)
    size = min(map(len, classes))
    chosen = random.Random(seed)  # noqa: S311 (a draw that must be repeatable)
    kept = {index for members in classes for index in chosen.sample(members, size)}
    return [item for index, item in enumerate(items) if index in kept]
