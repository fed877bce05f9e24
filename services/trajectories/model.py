"""Values of the trajectory service. Times have a zone; texts that the caller chose are kept as they came."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

TEXT_FIELDS = (
    "rollout_id",
    "group_id",
    "dataset",
    "instance_id",
    "repo",
    "website",
    "split",
    "harness",
    "model",
    "policy_version",
    "teacher",
    "sandbox_id",
    "trace_id",
)
"""Fields of Description that are plain text, each a column."""


class Status(enum.IntEnum):
    """See orchard.trajectory.v1.TrajectoryStatus."""

    OPEN = 1
    COMPLETED = 2
    FAILED = 3
    ABORTED = 4


class RewardState(enum.IntEnum):
    """See orchard.trajectory.v1.RewardState."""

    SCORED = 1
    EXCLUDED = 2
    ABSTAINED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What the caller says of a trajectory when it is created."""

    trajectory_id: str
    rollout_id: str = ""
    group_id: str = ""
    attempt: int = 0
    dataset: str = ""
    instance_id: str = ""
    repo: str = ""
    website: str = ""
    split: str = ""
    harness: str = ""
    model: str = ""
    policy_version: str = ""
    teacher: str = ""
    sandbox_id: str = ""
    trace_id: str = ""
    tools_json: str = field(default="", repr=False)
    metadata_json: str = field(default="", repr=False)
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over steps. `longest_tokens`: of the one turn that read and wrote most."""

    steps: int = 0
    turns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cost_usd: float = 0.0
    text_bytes: int = 0
    longest_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Reward:
    """See orchard.trajectory.v1.Reward."""

    name: str
    state: RewardState
    value: float | None
    reason: str = ""
    judge: str = ""
    rubric: str = ""
    version: str = ""
    details_json: str = ""
    time: datetime | None = None


@dataclass(frozen=True, slots=True)
class StepValue:
    """See orchard.trajectory.v1.StepValue."""

    index: int
    name: str
    value: float
    judge: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class Annotation:
    """One entry of a trajectory's history of judgements."""

    annotation_id: str
    rewards: tuple[Reward, ...] = ()
    step_values: tuple[StepValue, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    time: datetime | None = None


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A stored trajectory without its steps.

    Attributes:
        key: its number in the database.
        tenant: its owner.
        description: what its creator said; labels as they are now.
        status: where it is.
        status_message: why it failed or was aborted.
        totals: sums over its steps.
        rewards: the newest of each name, judge and rubric.
        outcome: the newest reward named "outcome".
        object_name: where its steps are packed; empty while they are rows.
        content_hash: SHA-256 of the packed steps, hexadecimal.
        create_time: when it was created.
        seal_time: when it was sealed.
    """

    key: int
    tenant: str
    description: Description
    status: Status
    status_message: str
    totals: Totals
    rewards: tuple[Reward, ...]
    outcome: Reward | None
    object_name: str
    content_hash: str
    create_time: datetime
    seal_time: datetime | None


@dataclass(frozen=True, slots=True)
class BlobReference:
    """A body that is stored once, whatever refers to it."""

    sha256: str
    size: int
    media_type: str


@dataclass(frozen=True, slots=True)
class NewStep:
    """A checked step on its way to the database.

    Attributes:
        index: its position.
        body: the serialised orchard.trajectory.v1.Step.
        totals: what it adds.
        blobs: bodies that it refers to.
    """

    index: int
    body: bytes = field(repr=False)
    totals: Totals
    blobs: tuple[BlobReference, ...] = ()


@dataclass(frozen=True, slots=True)
class Whole:
    """A checked trajectory that is stored in one piece; see orchard.trajectory.v1.NewTrajectory.

    Attributes:
        description: what it is.
        writer: who writes.
        take_over: whether in the place of another writer.
        steps: all of its steps, by index from 0.
        annotation: its judgements; None without any.
        status: how it ended; OPEN: it is not sealed.
        message: why it failed or was aborted.
    """

    description: Description
    writer: str
    take_over: bool
    steps: tuple[NewStep, ...] = field(repr=False)
    annotation: Annotation | None
    status: Status
    message: str

    @property
    def trajectory_id(self) -> str:
        """Its id."""
        return self.description.trajectory_id


@dataclass(frozen=True, slots=True)
class Range:
    """Bounds, both inclusive; None: open."""

    least: float | None = None
    most: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """See orchard.trajectory.v1.TrajectoryFilter. `texts`: allowed values by the name of a column."""

    texts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    statuses: tuple[Status, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    outcome_state: RewardState | None = None
    outcome: Range = Range()
    turns: Range = Range()
    tokens_most: int | None = None
    created_from: datetime | None = None
    created_before: datetime | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it selects everything."""
        return self == Filter()


class Order(enum.Enum):
    """See orchard.trajectory.v1.TrajectoryOrder."""

    CREATED = 1
    OUTCOME = 2
    TURNS = 3
    TOKENS = 4
    COST = 5


class Dimension(enum.Enum):
    """What counts are grouped by; the value is the column, "" is one row in all and "label" a label's value."""

    ALL = ""
    HARNESS = "harness"
    MODEL = "model"
    REPO = "repo"
    DATASET = "dataset"
    WEBSITE = "website"
    POLICY_VERSION = "policy_version"
    LABEL = "label"


@dataclass(frozen=True, slots=True)
class PassAtK:
    """The pass@k family averaged over instances with at least k scored attempts; None where there is none."""

    k: int
    instances: int
    any: float | None
    power: float | None
    all: float | None


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts of one row; see orchard.trajectory.v1.Stats."""

    value: str
    trajectories: int
    open: int
    aborted: int
    scored: int
    resolved: int
    mean_turns: float
    mean_tokens: float
    cost_usd: float
    pass_at_k: tuple[PassAtK, ...] = ()
