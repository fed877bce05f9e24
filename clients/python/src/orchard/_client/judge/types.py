"""Values of judging: what is asked, verdicts, rubrics, calibration, usage."""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from orchard._client.trajectories.types import Reward, RewardState, StepValue
from orchard._client.trajectories.writer import AnyStep


class JudgementKind(enum.StrEnum):
    """What a judge is asked."""

    OUTCOME = "outcome"
    """Did the agent do its task? 1 or 0."""
    GUI_SUCCESS = "gui_success"
    """Did it, in a graphical interface, by the last 3 screenshots and its actions? 1 or 0."""
    RUBRIC = "rubric"
    """How well did it work, by the criteria of a rubric? Their weighted sum, 0 to 1."""
    VALUE_CURVE = "value_curve"
    """How likely was a success before each of some actions? 0 to 1."""
    PAIRWISE = "pairwise"
    """Which of two attempts is better? 1 (the first), 0 (the second) or 0.5."""
    CLAW_EVAL = "claw_eval"
    """Completion, robustness and safety in one number, 0 to 1."""
    UNKNOWN = "unknown"
    """One that this SDK does not know yet."""


class Aggregation(enum.StrEnum):
    """How votes become one verdict."""

    MAJORITY = "majority"
    MEAN = "mean"
    MEDIAN = "median"
    MINIMUM = "minimum"


@dataclass(frozen=True)
class Judgement:
    """What is asked, of whom, and about what.

    Images that a step has as a Body are shown to judges of GUI_SUCCESS; texts must be inline, not stored.
    """

    kind: JudgementKind | str
    instruction: str
    """What was to be done, in words."""
    steps: Sequence[AnyStep] = field(repr=False)
    """What the agent did: steps, or messages in OpenAI's form."""
    other_steps: Sequence[AnyStep] = field(default=(), repr=False)
    """The second attempt; with PAIRWISE, and only then."""
    judges: str | Sequence[str] = ()
    """Names of configured judges. Default: the service's first."""
    rubric: str = ""
    """Name of a rubric, or "name@version"; with RUBRIC, and only then."""
    votes: int = 0
    """Of each judge, 1 to 16. Default: 1."""
    aggregation: Aggregation | str = ""
    """How votes become one. Default: the majority of verdicts, the median of numbers."""
    quorum: int = 0
    """Votes that must be scored. Default: more than half."""
    temperature: float | None = None
    """Default: the judge's own."""
    max_output_tokens: int = 0
    """Of one answer, reasoning included. Default: 4,096."""
    patch: str = field(default="", repr=False)
    """The patch that the agent left."""
    gold_patch: str = field(default="", repr=False)
    """The reference solution."""
    tests: str = field(default="", repr=False)
    """The tests that the task is about."""
    final_response: str = field(default="", repr=False)
    """The agent's final words, where they are not in its steps."""
    tool_statuses: Sequence[tuple[str, int]] = field(default=(), repr=False)
    """Tool and HTTP status of each call, for CLAW_EVAL. Default: from the steps."""
    resolved: bool | None = None
    """Whether the agent did its task, as tests or people found; judges of VALUE_CURVE are told."""
    fresh: bool = False
    """Judge anew, whatever is stored."""
    tokens: int = 0
    """What this judgement may take. Default: no limit."""
    cost_usd: float = 0.0
    """What it may cost. Default: no limit."""


@dataclass(frozen=True)
class JudgeUsage:
    """What calls of judges took. Failed ones are among the calls."""

    calls: int = 0
    failed_calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cost_usd: float = 0.0


@dataclass(frozen=True)
class StateEstimate:
    """The judged chance of success when `state` actions were done."""

    state: int
    step_index: int
    """The step of the action that follows; of the last state the number of steps."""
    value: float
    final: bool = False
    """It is the last state: no action follows."""


@dataclass(frozen=True)
class Vote:
    """One answer of one judge."""

    judge: str
    model: str
    """As it names itself."""
    state: RewardState
    value: float | None
    """The number; with SCORED alone."""
    reason: str
    """Why there is none."""
    message: str
    """The same for people."""
    scores: Mapping[str, float]
    """By criterion."""
    values: tuple[StateEstimate, ...]
    """Of VALUE_CURVE."""
    reasoning: str
    """What the judge wrote before its verdict."""
    evidence: tuple[int, ...]
    """Steps that it rests on."""
    answers: tuple[str, ...]
    """SHA-256 of each raw answer; `client.judge.answer` reads them."""
    usage: JudgeUsage
    latency_seconds: float


@dataclass(frozen=True)
class Provenance:
    """What a verdict was computed from."""

    judges: Sequence[Any]
    """Each as configured."""
    prompt_version: str
    rubric: str
    """With its version; empty without one."""
    rubric_hash: str
    trajectory_hash: str
    image_hashes: tuple[str, ...]
    cuts: tuple[tuple[str, int, int, int], ...]
    """What was left out of the prompt: part, step (-1: of none), size, and how much of it was shown."""


_REWARDS: Final = {
    JudgementKind.OUTCOME: "outcome",
    JudgementKind.GUI_SUCCESS: "outcome",
    JudgementKind.RUBRIC: "process",
}


@dataclass(frozen=True)
class Verdict:
    """What came of a judgement."""

    verdict_id: str
    kind: JudgementKind
    state: RewardState
    """SCORED: there is a number. EXCLUDED: the judge failed, which says nothing of the agent. ABSTAINED: it would not
    decide.
    """
    value: float | None
    """The number; with SCORED alone."""
    reason: str
    """Why there is none: JUDGE_UNAVAILABLE, ANSWER_INVALID, VOTES_TIED, EVIDENCE_MISSING, ..."""
    message: str
    """The same for people."""
    scores: Mapping[str, float]
    """By criterion, of RUBRIC and CLAW_EVAL."""
    values: tuple[StateEstimate, ...]
    """Of VALUE_CURVE, by state."""
    passed: bool | None
    """Of CLAW_EVAL."""
    votes: tuple[Vote, ...]
    provenance: Provenance
    usage: JudgeUsage
    """What it took; nothing where it was found."""
    latency_seconds: float
    cached: bool
    """It was found and not judged anew."""
    create_time: dt.datetime | None

    def reward(self, name: str = "") -> Reward:
        """The verdict as a reward for `client.trajectories.annotate`: what is excluded stays excluded.

        Args:
            name: what the reward is. Default: "outcome" where the question was whether the agent did its task,
                "process" of a rubric, else the kind: nothing but an outcome says what is a success.
        """
        return Reward(
            name or _REWARDS.get(self.kind, str(self.kind)),
            self.state,
            self.value,
            reason=self.reason,
            judge=self._judges(),
            rubric=self.provenance.rubric,
            version=self.provenance.prompt_version,
            details={"verdict_id": self.verdict_id, "scores": dict(self.scores)},
        )

    def step_values(self, name: str = "value") -> tuple[StepValue, ...]:
        """The curve of VALUE_CURVE for `client.trajectories.annotate`; without a curve nothing.

        Each value stands at the action that its state comes before. That of the last state is called `final_value` and
        stands at the last step.
        """
        judge, version = self._judges(), self.provenance.prompt_version
        return tuple(
            StepValue(one.step_index - one.final, f"final_{name}" if one.final else name, one.value, judge, version)
            for one in self.values
        )

    def _judges(self) -> str:
        return ",".join(dict.fromkeys(vote.judge for vote in self.votes))


@dataclass(frozen=True)
class ItemVerdict:
    """The verdict of an item of a batch."""

    item_id: str
    verdict: Verdict


@dataclass(frozen=True)
class BatchProgress:
    """How far a batch is."""

    batch_id: str
    scored: int
    excluded: int
    abstained: int
    usage: JudgeUsage
    budget_exhausted: bool
    """Some items were not judged."""
    create_time: dt.datetime | None


@dataclass(frozen=True)
class Calibration:
    """How well verdicts agree with labels that people gave."""

    true_positive: int
    false_positive: int
    false_negative: int
    true_negative: int
    accuracy: float | None
    """Share of those on which both say the same; None where no verdict is scored."""
    kappa: float | None
    """Cohen's kappa; None where it is undefined."""
    unscored: int
    """Verdicts without a number, in no count above."""


@dataclass(frozen=True)
class Criterion:
    """What one score of a rubric is about."""

    name: str
    description: str
    weight: float
    uses_gold: bool = False
    """Whether the judge may use the reference solution and the tests for it."""


@dataclass(frozen=True)
class Rubric:
    """Criteria with weights that add up to 1. What is after `step` is the platform's."""

    name: str
    criteria: Sequence[Criterion]
    description: str = ""
    step: float = 0.1
    """Scores are 0 to 1 in steps of this: 0.1, 0.2, 0.5 or 1."""
    version: int = 0
    hash: str = ""
    used: bool = False
    """Whether a verdict rests on it; it cannot be changed then."""
    create_time: dt.datetime | None = None
    """None of a built-in one."""


@dataclass(frozen=True)
class UsageOf:
    """What one judge, model and rubric took."""

    judge: str
    model: str
    rubric: str
    """Or the kind, where there is none."""
    usage: JudgeUsage
