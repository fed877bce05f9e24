"""A trajectory in hand: its description, its steps, their values and the bodies that they refer to."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from orchard.data.errors import DataError, Where
from orchard.rewards.scores import Abstained, Excluded, Score, Scored
from orchard.trajectory.v1 import trajectory_pb2 as pb

_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_BAD: Final = re.compile(r"[^A-Za-z0-9._-]+")

SUBMISSION: Final = "submission"
"""Name of the tool step that holds what an agent handed in. It is no message of the conversation."""


@dataclass(frozen=True, slots=True)
class Record:
    """One trajectory.

    Attributes:
        trajectory: all but its steps.
        steps: by index, without holes.
        values: values and credit of steps.
        bodies: images and large texts by SHA-256; may read them when they are asked for.
        where: the file that it was read from, and the line; empty for any other.
    """

    trajectory: pb.Trajectory
    steps: Sequence[pb.Step]
    values: Sequence[pb.StepValue] = ()
    bodies: Mapping[str, bytes] = field(default_factory=dict)
    where: Where = field(default=Where(), compare=False)

    @property
    def id(self) -> str:
        """Its id."""
        return self.trajectory.trajectory_id

    @property
    def score(self) -> Score | None:
        """Its outcome; None where nothing judged it."""
        return score_of(self.trajectory.outcome) if self.trajectory.HasField("outcome") else None

    @property
    def resolved(self) -> bool | None:
        """Whether its outcome is a success; None where no number says so."""
        score = self.score
        return score.value > 0 if isinstance(score, Scored) else None

    def described(self, *, dataset: str = "", labels: Mapping[str, str] | None = None) -> Record:
        """The same in a dataset, in place of its own, and with these labels beside its own.

        Args:
            dataset: empty: its own.
            labels: by key; one of its own that has such a key is replaced.
        """
        trajectory = pb.Trajectory()
        trajectory.CopyFrom(self.trajectory)
        trajectory.task.dataset = dataset or trajectory.task.dataset
        trajectory.labels.update(labels or {})
        return replace(self, trajectory=trajectory)

    def values_named(self, name: str) -> dict[int, float]:
        """The newest value of this name for each step that has one."""
        found: dict[int, float] = {}
        for value in self.values:
            if value.name == name:
                found.setdefault(value.index, value.value)
        return found


def score_of(reward: pb.Reward) -> Score:
    """The state of a reward."""
    if reward.state == pb.REWARD_STATE_SCORED:
        return Scored(reward.value)
    if reward.state == pb.REWARD_STATE_ABSTAINED:
        return Abstained(reward.reason)
    return Excluded(reward.reason)


def parent_of(step: pb.Step) -> int:
    """Index of the message before a step; -1: none."""
    return step.parent if step.HasField("parent") else step.index - 1


def is_message(step: pb.Step) -> bool:
    """Whether a step is a message of the conversation: all but what was handed in."""
    return not (step.role == pb.ROLE_TOOL and step.name == SUBMISSION and not step.tool_call_id)


def submission_of(record: Record) -> str | None:
    """What the agent handed in, a patch as a rule; None if it handed nothing in."""
    for step in reversed(record.steps):
        if not is_message(step):
            return text_of(step, record.bodies)
    return None


def text_of(step: pb.Step, bodies: Mapping[str, bytes]) -> str:
    """The text of a step, large texts included, images not."""
    pieces = []
    for part in step.content:
        if part.WhichOneof("kind") == "text":
            pieces.append(part.text)
        elif part.blob.media_type == "text/plain":
            pieces.append(body_of(part.blob, bodies).decode("utf-8", "replace"))
    return "".join(pieces)


def body_of(blob: pb.BlobReference, bodies: Mapping[str, bytes]) -> bytes:
    """The bytes of a body.

    Raises:
        DataError: it is not at hand.
    """
    try:
        return bodies[blob.sha256]
    except KeyError:
        problem = f"the body {blob.sha256[:12]}... ({blob.media_type}, {blob.size} bytes) is missing"
        raise DataError(problem, fix="export again, with its blobs folder beside it") from None


def blob_of(data: bytes, media_type: str) -> pb.BlobReference:
    """The reference of a body."""
    return pb.BlobReference(sha256=hashlib.sha256(data).hexdigest(), size=len(data), media_type=media_type)


def valid_id(*candidates: str) -> str:
    """The first candidate that is not empty, as an id: as it is, or its legal characters and a hash."""
    name = next((candidate for candidate in candidates if candidate), "")
    if _ID.fullmatch(name):
        return name
    readable = _BAD.sub("-", name).lstrip("._-")[:100]
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{readable}-{digest}" if readable else f"t-{digest}"
