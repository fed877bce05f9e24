"""What was asked for, and everything that it refers to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from services.common.errors import InvalidArgumentError
from services.judge.backends.endpoint import Endpoint
from services.judge.backends.limits import UNLIMITED, Amount
from services.judge.model import Aggregation, Image, Kind, Parameters, Question, Step, Task, attempts_json, shallow
from services.judge.prompting.prompts import VERSIONS, shown_images
from services.judge.votes import default_aggregation

DEFAULT_OUTPUT_TOKENS: Final = 4096


@dataclass(frozen=True, slots=True)
class Request:
    """A judgement as it was asked for; see orchard.judge.v1.Judgement. Zeros and None: the default."""

    kind: Kind
    task: Task
    attempts: tuple[tuple[Step, ...], ...]
    images: Mapping[str, Image]
    judges: tuple[str, ...] = ()
    rubric_name: str = ""
    rubric_version: int = 0
    votes: int = 0
    aggregation: Aggregation | None = None
    quorum: int = 0
    temperature: float | None = None
    max_output_tokens: int = 0
    fresh: bool = False
    budget: Amount = UNLIMITED

    def hash(self, attempts: str = "") -> str:
        """SHA-256 of what was asked for: by it a repeat is told from something else that came under the same id.

        The words of the caller alone, so that neither an upgrade nor another setting of a judge makes a repeat
        something else; what is at its default is left out, so that a new field makes no difference to those without it.
        The budget is no part of the question.

        Args:
            attempts: its attempts as JSON, where they are at hand: they are most of it.
        """
        asked = {
            "kind": self.kind.name,
            "task": _given(shallow(self.task)),
            "resolved": self.task.resolved,
            "judges": self.judges,
            "rubric": [self.rubric_name, self.rubric_version],
            "votes": [self.votes, self.aggregation and self.aggregation.name, self.quorum],
            "temperature": self.temperature,
            "max_output_tokens": self.max_output_tokens,
            "fresh": self.fresh,
        }
        # As if the attempts were among these: they come first by their name.
        attempts = attempts or attempts_json(self.attempts)
        rest = json.dumps(asked, sort_keys=True)
        return hashlib.sha256(f'{{"attempts": {attempts}, {rest[1:]}'.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request with everything that it refers to.

    Attributes:
        asked: hash of the request.
        key: what its verdict is found by.
        trajectory_hash: of the question.
    """

    question: Question
    asked: str
    key: str
    trajectory_hash: str
    endpoints: tuple[Endpoint, ...]
    parameters: Parameters
    fresh: bool
    budget: Amount

    @property
    def sought(self) -> str:
        """The key by which a stored verdict may be found; empty where a new one is wanted."""
        return "" if self.fresh else self.key


def question_key(
    question: Question, trajectory_hash: str, endpoints: Sequence[Endpoint], parameters: Parameters
) -> str:
    """SHA-256 of all that a verdict rests on: judges, parameters, prompt, rubric, trajectory and images."""
    content = [
        [endpoint.identity for endpoint in endpoints],
        shallow(parameters),
        VERSIONS[question.kind],
        question.rubric.hash if question.rubric else "",
        trajectory_hash,
        shown_images(question),
    ]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def parameters_of(request: Request, judges: int) -> Parameters:
    """The parameters, defaults filled in.

    Raises:
        InvalidArgumentError: the quorum is above the votes.
    """
    votes = request.votes or 1
    total = votes * judges
    if request.quorum > total:
        raise InvalidArgumentError.of("judgement.parameters.quorum", f"must be at most {total}, the number of votes")
    return Parameters(
        votes=votes,
        aggregation=request.aggregation or default_aggregation(request.kind),
        quorum=request.quorum or total // 2 + 1,
        temperature=request.temperature,
        max_output_tokens=request.max_output_tokens or DEFAULT_OUTPUT_TOKENS,
    )


def lacks_evidence(question: Question) -> str:
    """Why no judge could see anything of what the agent did; empty where one can.

    A judge that is asked about nothing answers all the same, and its answer would look like a verdict on the agent.
    """
    if question.kind is Kind.GUI_SUCCESS:
        return "" if shown_images(question) else "no step refers to a screenshot; send at least the last one"
    elsewhere = ""
    if question.kind not in {Kind.PAIRWISE, Kind.VALUE_CURVE}:
        elsewhere = question.task.patch.strip() or question.task.final_response.strip()
    for number, steps in enumerate(question.attempts):
        if not elsewhere and not any(_shows(step) for step in steps):
            return f"attempt {number} has nothing that the agent did; send its steps"
    return ""


def _shows(step: Step) -> bool:
    """Whether a step shows what the agent said, thought or did."""
    return step.is_action and bool(step.calls or step.text.strip() or step.reasoning.strip())


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value}
