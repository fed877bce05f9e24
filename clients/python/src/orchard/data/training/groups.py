"""Groups of attempts at one prompt: who is in one, who counts, and with which advantage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from orchard.data.errors import DataError
from orchard.data.options import RECIPES, ExportOptions
from orchard.data.record import Record, score_of
from orchard.rewards.groups import Advantages, dynamic_sampling, grpo_advantages
from orchard.rewards.scores import Abstained, Excluded, Score, Scored
from orchard.trajectory.v1 import trajectory_pb2 as pb

_MOST_HELD: Final = 4 << 30
"""Bytes of steps in groups that are not whole yet."""


@dataclass(frozen=True, slots=True)
class Group:
    """Attempts at one prompt, in their order.

    Attributes:
        key: their group, or dataset and instance where they have none.
        number: of the group in this export, from 0.
        first: members of the groups before it.
        members: the attempts.
    """

    key: str
    number: int
    first: int
    members: Sequence[Record]


def key_of(trajectory: pb.Trajectory) -> str:
    """The group of a trajectory; where it names none, its dataset and instance; empty without those."""
    if trajectory.group_id:
        return trajectory.group_id
    task = trajectory.task
    return f"{task.dataset}/{task.instance_id}" if task.instance_id else ""


def grouped(
    headers: Iterable[pb.Trajectory],
    records: Iterable[Record],
    alone: Callable[[Record], None] | None = None,
    torn: Callable[[str], None] | None = None,
) -> Iterator[Group]:
    """Groups, each as soon as its last member came.

    Args:
        headers: of the same trajectories as `records`, so that it is known how many each group has.
        records: the trajectories.
        alone: told of those that have no group.
        torn: told the keys of groups that never became whole: trajectories came or went while they were read.

    Raises:
        DataError: more is held in groups that are not whole than memory should hold.
    """
    counts = Counter(key for header in headers if (key := key_of(header)))
    missing = set(counts)
    waiting: dict[str, list[Record]] = {}
    held = number = first = 0
    for record in records:
        key = key_of(record.trajectory)
        if not key:
            if alone is not None:
                alone(record)
            continue
        members = waiting.setdefault(key, [])
        members.append(record)
        held += _size(record)
        if len(members) == counts[key]:
            del waiting[key]
            missing.discard(key)
            held -= sum(map(_size, members))
            members.sort(key=lambda member: (member.trajectory.attempt, member.id))
            yield Group(key, number, first, members)
            number, first = number + 1, first + len(members)
        if held > _MOST_HELD:
            raise DataError(
                f"{len(waiting)} groups are not whole and hold more than {_MOST_HELD >> 30} GiB",
                fix="order the trajectories by group, or export fewer at once",
            )
    if torn is not None:
        for key in sorted(missing | waiting.keys()):
            torn(key)


def _size(record: Record) -> int:
    return sum(step.ByteSize() for step in record.steps)


def score_in_group(record: Record, options: ExportOptions) -> Score:
    """What an attempt is trained on; without a number it leaves the group."""
    if record.trajectory.status in {pb.TRAJECTORY_STATUS_ABORTED, pb.TRAJECTORY_STATUS_OPEN}:
        return Excluded(record.trajectory.status_message or "it was aborted or is still open")
    outcome = record.score
    if isinstance(outcome, (Excluded, Abstained)):
        return outcome
    if options.reward == "outcome":
        return outcome or Excluded("nothing judged it")
    found = next((reward for reward in record.trajectory.rewards if reward.name == options.reward), None)
    return score_of(found) if found else Excluded(f"it has no reward {options.reward!r}")


@dataclass(frozen=True, slots=True)
class Judged:
    """A group with its scores.

    Attributes:
        scores: of the members, in their order.
        advantages: of the members; see `grpo_advantages`.
        reason: why dynamic sampling drops the group; empty: it keeps it.
    """

    scores: tuple[Score, ...]
    advantages: Advantages
    reason: str

    def value(self, member: int) -> float | None:
        """The reward of a member; None where it has none."""
        score = self.scores[member]
        return score.value if isinstance(score, Scored) else None


def judge(group: Group, options: ExportOptions) -> Judged:
    """Scores, advantages and verdict of a group."""
    recipe = RECIPES[options.recipe]
    scores = tuple(score_in_group(member, options) for member in group.members)
    positive = [bool(member.resolved) for member in group.members] if recipe["needs_positive"] else None
    verdict = dynamic_sampling(scores, positive=positive)
    return Judged(scores, grpo_advantages(scores), "" if verdict.keep else verdict.reason)
