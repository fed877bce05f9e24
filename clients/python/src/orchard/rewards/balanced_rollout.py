"""Balanced adaptive rollout (BAR): sample attempts at a prompt until a group with a useful mix can be made of them.

Sources: the paper; numbers and details from the released trainer, and our own where it is silent: decisions use exact
decimal fractions, since in floating point ceil(0.07 * 100) is 8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from orchard.rewards.scores import exact


class Outcome(Enum):
    """What an attempt came to."""

    POSITIVE = "positive"
    NEGATIVE = "negative"
    UNSCORED = "unscored"
    """Aborted, excluded or over its budget."""


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """How a prompt is sampled. The defaults are the released trainer's.

    Attributes:
        group_size: members of a group (N).
        maximum: attempts at most.
        stride: attempts between two tries to make a group; the last stride is what remains up to the maximum.
        low: least share of positive members.
        high: largest share of positive members.
        eager: try after every attempt that ends, not only after each stride, and cancel what still runs once a group
            closes. Our own addition: it saves the wait for a stride's last attempts, at the price of preferring fast
            ones.

    Raises:
        ValueError: the maximum is below the group size, the stride below 1, low above high, or no whole number of
            members lies in the band.
    """

    group_size: int = 4
    maximum: int = 8
    stride: int = 8
    low: float = 0.25
    high: float = 0.75
    eager: bool = False

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ValueError(f"group_size must be at least 1, not {self.group_size}")
        if self.maximum < self.group_size:
            raise ValueError(f"maximum must be at least group_size = {self.group_size}, not {self.maximum}")
        if self.stride < 1:
            raise ValueError(f"stride must be at least 1, not {self.stride}")
        low, high = exact(self.low), exact(self.high)
        if not 0 <= low <= high <= 1:
            raise ValueError(f"0 <= low <= high <= 1 is needed, not low = {self.low!r}, high = {self.high!r}")
        least, most, _target = band(self.group_size, self.low, self.high)
        if least > most:
            raise ValueError(
                f"no whole number of {self.group_size} members is between {self.low!r} and {self.high!r} of them"
            )


@dataclass(frozen=True, slots=True)
class Sample:
    """A finished attempt. `index` is its number in the order of starting."""

    index: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Group:
    """What the trainer gets.

    Attributes:
        members: by index; in a short group the scored ones as they arrived, then the unscored ones.
        short: fewer attempts were scored than the group has members: the unscored ones are masked.
        fallback: the band could not be kept up to the maximum. The group filter decides what it is worth.
    """

    members: tuple[Sample, ...]
    short: bool = False
    fallback: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do after an attempt finished.

    Attributes:
        start: so many attempts more.
        group: the group, once it is closed.
        cancel: attempts that still run and are not needed any more.
    """

    start: int = 0
    group: Group | None = None
    cancel: tuple[int, ...] = ()


def band(size: int, low: float, high: float) -> tuple[int, int, int]:
    """The least and the most positive members of a group of `size`, and the target between them (half to even)."""
    exact_low, exact_high = exact(low), exact(high)
    return math.ceil(exact_low * size), math.floor(exact_high * size), round((exact_low + exact_high) / 2 * size)


def assemble(samples: Sequence[Sample], size: int, low: float, high: float) -> tuple[Sample, ...] | None:
    """A group of scored samples whose share of positives lies in the band and nearest to its middle; None: not yet.

    Within a class the earliest by index are taken; the group is in the order of indices.
    """
    by_index = sorted(samples, key=lambda sample: sample.index)
    positives = [sample for sample in by_index if sample.outcome is Outcome.POSITIVE]
    negatives = [sample for sample in by_index if sample.outcome is Outcome.NEGATIVE]
    least, most, target = band(size, low, high)
    least, most = max(least, size - len(negatives)), min(most, len(positives))
    if least > most:
        return None
    count = min(max(target, least), most)
    members = positives[:count] + negatives[: size - count]
    return tuple(sorted(members, key=lambda sample: sample.index))


def close(plan: RolloutPlan, samples: Sequence[Sample], *, final: bool) -> Group | None:
    """The group that can be made of the finished samples, given as they arrived.

    Before the maximum (`final` false) only a group within the band closes. At the maximum any mix does, and where too
    few were scored, unscored ones fill it up.
    """
    members = assemble(samples, plan.group_size, plan.low, plan.high)
    if members is not None:
        return Group(members)
    if not final:
        return None
    members = assemble(samples, plan.group_size, 0, 1)
    if members is not None:
        return Group(members, fallback=True)
    scored = [sample for sample in samples if sample.outcome is not Outcome.UNSCORED]
    unscored = [sample for sample in samples if sample.outcome is Outcome.UNSCORED]
    return Group(tuple((scored + unscored)[: plan.group_size]), short=True, fallback=True)


@dataclass(slots=True)
class BalancedRollout:
    """The state of one prompt. Whoever keeps `plan`, `started` and `finished` can go on after a restart.

    Attributes:
        plan: how it is sampled.
        started: attempts that were asked for.
        finished: attempts that ended, as they arrived.
        group: the group once it is closed.
    """

    plan: RolloutPlan
    started: int = 0
    finished: list[Sample] = field(default_factory=list)
    group: Group | None = None

    def begin(self) -> Decision:
        """The first stride. Called again it asks for nothing more."""
        return Decision(start=self._grow(0))

    def report(self, index: int, outcome: Outcome) -> Decision:
        """Attempt `index` ended. The same report again changes nothing.

        Raises:
            ValueError: no attempt of this index was asked for, or it ended otherwise before.
        """
        if not 0 <= index < self.started:
            raise ValueError(f"attempt {index} was not asked for; {self.started} were")
        for sample in self.finished:
            if sample.index == index:
                if sample.outcome is not outcome:
                    raise ValueError(f"attempt {index} was reported as {sample.outcome.value} before")
                return Decision(group=self.group)
        if self.group is not None:
            return Decision(group=self.group)  # it came too late and changes nothing
        self.finished.append(Sample(index, outcome))
        stride_ended = len(self.finished) == self.started
        if stride_ended or self.plan.eager:
            final = stride_ended and self.started == self.plan.maximum
            self.group = close(self.plan, self.finished, final=final)
        if self.group is not None:
            return Decision(group=self.group, cancel=self._running())
        return Decision(start=self._grow(self.started) if stride_ended else 0)

    def _running(self) -> tuple[int, ...]:
        ended = {sample.index for sample in self.finished}
        return tuple(index for index in range(self.started) if index not in ended)

    def _grow(self, at: int) -> int:
        if self.started != at or self.group is not None:
            return 0
        more = min(self.plan.stride, self.plan.maximum - self.started)
        self.started += more
        return more
