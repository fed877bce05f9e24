"""Values of trajectories, their steps and their judgements."""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchard._client.errors import InvalidArgument


class TrajectoryStatus(enum.StrEnum):
    """Where a trajectory is in its life; all but `open` are final."""

    UNKNOWN = "unknown"
    OPEN = "open"
    """Steps can be appended."""
    COMPLETED = "completed"
    """The agent came to its own end, right or wrong."""
    FAILED = "failed"
    """The agent could not go on, for a reason of its own."""
    ABORTED = "aborted"
    """Something that is not the agent's fault ended it: it counts as nothing, good or bad."""


class RewardState(enum.StrEnum):
    """Whether a reward is a number."""

    UNKNOWN = "unknown"
    SCORED = "scored"
    EXCLUDED = "excluded"
    """Infrastructure failed; the sample leaves its group."""
    ABSTAINED = "abstained"
    """The judge worked and would not decide."""


class Role(enum.StrEnum):
    """Who speaks."""

    UNKNOWN = "unknown"
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class TrajectoryOrder(enum.StrEnum):
    """What a list is ordered by."""

    CREATED = "created"
    OUTCOME = "outcome"
    TURNS = "turns"
    TOKENS = "tokens"
    COST = "cost"


class StatsDimension(enum.StrEnum):
    """What counts are grouped by."""

    HARNESS = "harness"
    MODEL = "model"
    REPO = "repo"
    DATASET = "dataset"
    WEBSITE = "website"
    POLICY_VERSION = "policy_version"
    LABEL = "label"


@dataclass(frozen=True)
class Task:
    """What an attempt is an attempt at."""

    instance_id: str = ""
    dataset: str = ""
    repo: str = ""
    """Of a software-engineering task."""
    website: str = ""
    """Of a task in a browser."""
    split: str = ""


@dataclass(frozen=True)
class Blob:
    """A body that is stored once, whatever refers to it."""

    sha256: str
    size: int
    media_type: str = ""


@dataclass(frozen=True)
class Body:
    """Bytes to store as a body of a step: an image, or anything else that is no short text."""

    data: bytes = field(repr=False)
    media_type: str


Part = str | Blob | Body
"""A piece of a message: a text, a body that is stored, or one to store with the step."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool."""

    call_id: str
    name: str
    arguments: str
    """As the model wrote them: JSON, if it wrote any."""
    extra: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class ModelCall:
    """What is known of the model call behind a message."""

    model: str = ""
    policy_version: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cost_usd: float = 0.0
    finish_reason: str = ""
    prompt_token_ids: Sequence[int] = ()
    completion_token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    """Of each token written."""
    parameters: Mapping[str, Any] | None = None
    """Sampling parameters."""


@dataclass(frozen=True)
class Step:
    """One message of a conversation, in OpenAI's sense."""

    role: Role | str
    content: Part | Sequence[Part] = ()
    reasoning: str = ""
    """The assistant's, apart from what it said."""
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str = ""
    """The call that a tool's message answers."""
    name: str = ""
    """Of the speaker or of the tool."""
    time: dt.datetime | None = None
    model_call: ModelCall | None = None
    is_error: bool = False
    """Whether an error came back, of a tool's message."""
    parent: int | None = None
    """Index of the message before it. None: the step before it; -1: it begins a conversation."""
    copied_context: bool = False
    """Copied from another conversation: never trained on."""
    extra: Mapping[str, Any] | None = None
    """What a format had beyond this."""
    index: int = -1
    """Its position; -1 until it is stored."""

    @property
    def parts(self) -> Sequence[Part]:
        """Its content, piece by piece."""
        return (self.content,) if isinstance(self.content, (str, Blob, Body)) else self.content

    @property
    def text(self) -> str:
        """Its texts, joined; stored bodies are left out."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @classmethod
    def system(cls, content: Part | Sequence[Part]) -> Step:
        """Instructions."""
        return cls(Role.SYSTEM, content)

    @classmethod
    def user(cls, content: Part | Sequence[Part]) -> Step:
        """The task, or whoever answers in its place."""
        return cls(Role.USER, content)

    @classmethod
    def assistant(
        cls,
        content: Part | Sequence[Part] = (),
        *,
        reasoning: str = "",
        tool_calls: Sequence[ToolCall] = (),
        model_call: ModelCall | None = None,
    ) -> Step:
        """What the model said and called."""
        return cls(Role.ASSISTANT, content, reasoning=reasoning, tool_calls=tool_calls, model_call=model_call)

    @classmethod
    def tool(cls, tool_call_id: str, content: Part | Sequence[Part], *, name: str = "", is_error: bool = False) -> Step:
        """A tool's answer: the observation."""
        return cls(Role.TOOL, content, tool_call_id=tool_call_id, name=name, is_error=is_error)


@dataclass(frozen=True)
class Reward:
    """A judgement of a whole trajectory. Make one with `scored`, `excluded` or `abstained`."""

    name: str
    """What it is: "outcome" (the one that counts), "process", "safety", ..."""
    state: RewardState
    value: float | None = None
    """The number; with `scored` alone."""
    reason: str = ""
    """Why there is none."""
    judge: str = ""
    """A model, "tests", a person."""
    rubric: str = ""
    """With its version."""
    version: str = ""
    """Of the prompt or script that judged."""
    details: Any = None
    """What it rests on, as a JSON value."""
    time: dt.datetime | None = None

    @classmethod
    def scored(
        cls,
        value: float,
        *,
        name: str = "outcome",
        judge: str = "",
        rubric: str = "",
        version: str = "",
        details: Any = None,
    ) -> Reward:
        """A number.

        Raises:
            InvalidArgument: it is none.
        """
        try:
            number = float(value)
        except (TypeError, ValueError):
            what = f"must be a number, not {value!r}; what has none is Reward.excluded or Reward.abstained"
            raise InvalidArgument.of("value", what) from None
        return cls(name, RewardState.SCORED, number, judge=judge, rubric=rubric, version=version, details=details)

    @classmethod
    def excluded(cls, reason: str, *, name: str = "outcome", judge: str = "", rubric: str = "") -> Reward:
        """Infrastructure failed, which says nothing of the agent: never a 0."""
        return cls(name, RewardState.EXCLUDED, reason=_required("reason", reason), judge=judge, rubric=rubric)

    @classmethod
    def abstained(cls, reason: str, *, name: str = "outcome", judge: str = "", rubric: str = "") -> Reward:
        """The judge would not decide."""
        return cls(name, RewardState.ABSTAINED, reason=_required("reason", reason), judge=judge, rubric=rubric)


@dataclass(frozen=True)
class StepValue:
    """A judgement of one state or action."""

    index: int
    """The step."""
    name: str
    """"value", "credit", ..."""
    value: float
    judge: str = ""
    version: str = ""


@dataclass(frozen=True)
class Totals:
    """Sums over the steps of a trajectory."""

    steps: int
    turns: int
    """Steps of the assistant, copied context apart."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cost_usd: float
    text_bytes: int


@dataclass(frozen=True)
class TrajectoryInfo:
    """All that is known of a trajectory but its steps."""

    trajectory_id: str
    tenant: str
    rollout_id: str
    group_id: str
    attempt: int
    task: Task
    harness: str
    model: str
    policy_version: str
    teacher: str
    tools: Sequence[Any]
    """Definitions in OpenAI's form."""
    labels: Mapping[str, str]
    status: TrajectoryStatus
    status_message: str
    outcome: Reward | None
    """The newest reward named "outcome"."""
    rewards: tuple[Reward, ...]
    """The newest of each name, judge and rubric."""
    totals: Totals
    sandbox_id: str
    trace_id: str
    metadata: Mapping[str, Any]
    create_time: dt.datetime | None
    seal_time: dt.datetime | None
    content_hash: str
    """Over its steps as they are stored; set soon after the seal."""


@dataclass(frozen=True)
class Annotation:
    """One entry of the history of a trajectory's judgements."""

    annotation_id: str
    rewards: tuple[Reward, ...]
    values: tuple[StepValue, ...]
    labels: Mapping[str, str]
    time: dt.datetime | None


@dataclass(frozen=True)
class Deleted:
    """What a delete removed, or with dry_run would."""

    trajectories: int
    text_bytes: int
    open_skipped: int
    """Open ones that were left."""


@dataclass(frozen=True)
class PassAtK:
    """The pass@k family, averaged over instances with at least k scored attempts. None where there is none."""

    k: int
    instances: int
    any: float | None
    """At least one of k succeeds."""
    power: float | None
    """k independent attempts all succeed."""
    all: float | None
    """k of the attempts all succeeded."""


@dataclass(frozen=True)
class TrajectoryStats:
    """Counts of one row."""

    value: str
    """What was grouped by."""
    trajectories: int
    open: int
    aborted: int
    scored: int
    """With an outcome that is a number."""
    resolved: int
    """Of those, with a positive one."""
    resolve_rate: float | None
    """resolved / scored."""
    mean_turns: float
    mean_tokens: float
    cost_usd: float
    pass_at_k: tuple[PassAtK, ...]


def _required(field_name: str, text: str) -> str:
    if not text:
        raise InvalidArgument.of(field_name, "is required where there is no number")
    return text
