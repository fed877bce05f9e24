"""Values of the judge service: questions, votes, verdicts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import IntEnum
from typing import Any, Final, NamedTuple

from orchard.rewards.scores import Excluded, Score, Scored

from services.judge.rubrics import Rubric


class Kind(IntEnum):
    """What a judge is asked; orchard.judge.v1.JudgementKind."""

    OUTCOME = 1
    GUI_SUCCESS = 2
    RUBRIC = 3
    VALUE_CURVE = 4
    PAIRWISE = 5
    CLAW_EVAL = 6


class Aggregation(IntEnum):
    """How votes become one; orchard.judge.v1.Aggregation."""

    MAJORITY = 1
    MEAN = 2
    MEDIAN = 3
    MINIMUM = 4


CATEGORICAL: Final = frozenset({Kind.OUTCOME, Kind.GUI_SUCCESS, Kind.PAIRWISE})
"""Kinds whose answer is a choice and not a number."""


class Reason:
    """Why there is no number. The stable words of Verdict.reason."""

    # Excluded: the judge, or the way to it, failed.
    RATE_LIMITED: Final = "JUDGE_RATE_LIMITED"
    UNAVAILABLE: Final = "JUDGE_UNAVAILABLE"
    TIMEOUT: Final = "JUDGE_TIMEOUT"
    REJECTED: Final = "JUDGE_REJECTED"
    UNAUTHENTICATED: Final = "JUDGE_UNAUTHENTICATED"
    EMPTY: Final = "ANSWER_EMPTY"
    CUT_OFF: Final = "ANSWER_CUT_OFF"
    INVALID: Final = "ANSWER_INVALID"
    AMBIGUOUS: Final = "ANSWER_AMBIGUOUS"
    BUDGET: Final = "BUDGET_EXHAUSTED"
    QUORUM: Final = "QUORUM_MISSED"
    NO_EVIDENCE: Final = "EVIDENCE_MISSING"
    # Abstained: the judge worked and would not decide.
    REFUSED: Final = "JUDGE_REFUSED"
    ABSTAINED: Final = "JUDGE_ABSTAINED"
    TIED: Final = "VOTES_TIED"
    ORDER: Final = "ORDER_DEPENDENT"


OUTAGES: Final = frozenset(
    {Reason.RATE_LIMITED, Reason.UNAVAILABLE, Reason.TIMEOUT, Reason.REJECTED, Reason.UNAUTHENTICATED}
)
"""Reasons that lie in the way to a judge, not in what it answers: another time it may be well."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """How judges are asked, defaults filled in; orchard.judge.v1.JudgementParameters."""

    votes: int
    aggregation: Aggregation
    quorum: int
    temperature: float | None
    max_output_tokens: int


class Role(IntEnum):
    """Who speaks; orchard.trajectory.v1.Role."""

    SYSTEM = 1
    USER = 2
    ASSISTANT = 3
    TOOL = 4


_ROLE_NAMES: Final = ("", *(role.name for role in Role))


class ToolCall(NamedTuple):
    """A call of a tool: its name, and its arguments as the model wrote them."""

    name: str
    arguments: str


@dataclass(slots=True)  # not frozen, though nobody changes one: it would take five times as long to make thousands
class Step:
    """One message of an attempt. `images`: SHA-256 of each, in order."""

    index: int
    role: Role
    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    name: str = ""
    is_error: bool = False
    images: tuple[str, ...] = ()
    copied: bool = False

    @property
    def is_action(self) -> bool:
        """Whether the agent acted here: a message of its own, not one that was copied from elsewhere."""
        return self.role is Role.ASSISTANT and not self.copied


@dataclass(frozen=True, slots=True)
class Image:
    """An image that a step refers to."""

    sha256: str
    media_type: str
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Task:
    """What was to be done and what is known of it. `tool_statuses`: tool and HTTP status of each call.

    Attributes:
        resolved: whether the agent did its task, where that is known; value curves show it to the judge.
    """

    instruction: str
    patch: str = ""
    gold_patch: str = ""
    tests: str = ""
    final_response: str = ""
    tool_statuses: tuple[tuple[str, int], ...] = ()
    resolved: bool | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, about what. Attempts: one, of PAIRWISE two.

    Attributes:
        images: those that the kind shows, by hash.
    """

    kind: Kind
    task: Task
    attempts: tuple[tuple[Step, ...], ...]
    rubric: Rubric | None = None
    images: Mapping[str, Image] = field(default_factory=dict)

    def trajectory_hash(self, attempts: str = "") -> str:
        """SHA-256 of the task and of every step that was given, before any cutting.

        Args:
            attempts: its attempts as JSON, where they are at hand.
        """
        task = json.dumps(shallow(self.task), sort_keys=True)
        return hashlib.sha256(f"[{task}, {attempts or attempts_json(self.attempts)}]".encode()).hexdigest()


def attempts_json(attempts: tuple[tuple[Step, ...], ...]) -> str:
    """What every step has, as JSON; what is at its default is left out."""
    return json.dumps([[_fields(step) for step in attempt] for attempt in attempts], sort_keys=True)


def shallow(value: Any) -> dict[str, Any]:
    """The fields of a dataclass as they are; `asdict` copies whatever is in them, and takes ten times as long."""
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _fields(step: Step) -> dict[str, Any]:
    # By hand: for thousands of steps `asdict` takes longer than everything else that is done with them.
    found: dict[str, Any] = {"role": _ROLE_NAMES[step.role]}
    if step.index:
        found["index"] = step.index
    if step.text:
        found["text"] = step.text
    if step.reasoning:
        found["reasoning"] = step.reasoning
    if step.calls:
        found["calls"] = step.calls
    if step.name:
        found["name"] = step.name
    if step.is_error:
        found["is_error"] = True
    if step.images:
        found["images"] = step.images
    if step.copied:
        found["copied"] = True
    return found


def actions_of(steps: tuple[Step, ...]) -> list[Step]:
    """The agent's actions. T actions have T + 1 states: state t is what was so before action t."""
    return [step for step in steps if step.is_action]


@dataclass(frozen=True, slots=True)
class Cut:
    """A text that was too long for the prompt; orchard.judge.v1.Cut."""

    part: str
    step_index: int
    original: int
    kept: int


@dataclass(frozen=True, slots=True)
class Usage:
    """What calls took. `cost_usd` by the prices of the judge's settings."""

    calls: int = 0
    failed_calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cost_usd: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        """Both together."""
        return Usage(
            self.calls + other.calls,
            self.failed_calls + other.failed_calls,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
            self.cost_usd + other.cost_usd,
        )

    @property
    def tokens(self) -> int:
        """Read and written."""
        return self.prompt_tokens + self.completion_tokens


NOTHING: Final = Usage()


@dataclass(frozen=True, slots=True)
class Reading:
    """What one answer, one vote or all votes together say.

    Attributes:
        score: the number, or why there is none; the words of Reason.
        message: the same for people.
        scores: by criterion, 0 to 1.
        values: (state, value), by state.
        reasoning: what the judge wrote before its verdict.
        evidence: steps that it rests on.
        again: whether asking once more may help.
    """

    score: Score
    message: str = ""
    scores: Mapping[str, float] = field(default_factory=dict)
    values: tuple[tuple[int, float], ...] = ()
    reasoning: str = ""
    evidence: tuple[int, ...] = ()
    again: bool = False

    @property
    def value(self) -> float | None:
        """The number, if there is one."""
        return self.score.value if isinstance(self.score, Scored) else None


@dataclass(frozen=True, slots=True)
class Vote:
    """One vote of one judge. `answers`: SHA-256 of each raw answer."""

    judge: str
    model: str
    reading: Reading
    answers: tuple[str, ...] = ()
    usage: Usage = NOTHING
    latency_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a verdict was computed from; orchard.judge.v1.Provenance."""

    judges_json: str
    parameters: Parameters
    prompt_version: str
    rubric_name: str
    rubric_version: int
    rubric_hash: str
    trajectory_hash: str
    image_hashes: tuple[str, ...]
    cuts: tuple[Cut, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a judgement; orchard.judge.v1.Verdict. `passed`: of CLAW_EVAL."""

    verdict_id: str
    kind: Kind
    reading: Reading
    passed: bool | None
    votes: tuple[Vote, ...]
    provenance: Provenance
    usage: Usage
    latency_seconds: float
    create_time: datetime
    action_steps: tuple[int, ...] = ()
    """Of VALUE_CURVE: the step of each action, then the number of steps."""
    cached: bool = False

    @property
    def is_unpaid(self) -> bool:
        """Whether there is no number because the budget was spent: with a larger one there may be."""
        return self.reading.score == Excluded(Reason.BUDGET)

    @property
    def is_outage(self) -> bool:
        """Whether there is no number because judges could not be asked."""
        readings = [self.reading, *(vote.reading for vote in self.votes)]
        reasons = {reading.score.reason for reading in readings if isinstance(reading.score, Excluded)}
        return isinstance(self.reading.score, Excluded) and bool(reasons & OUTAGES)
