"""Rubrics: criteria with weights, checked, hashed, and combined into one number.

Sources of the built-in one: the paper for its dimensions; the released trainer for the weights. The wording is our own.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Final

from orchard.rewards import rubric as rewards
from orchard.rewards.scores import exact

STEPS: Final = (0.1, 0.2, 0.5, 1.0)
"""Distances between scores that divide 1 and lie on the grid of tenths that `orchard.rewards.rubric` combines."""
MOST_CRITERIA: Final = 32
MOST_DESCRIPTION_BYTES: Final = 4096
BUILT_IN_PREFIX: Final = "orchard-"
_NAME: Final = re.compile(r"[a-z][a-z0-9_-]{0,63}\Z")
_CRITERION: Final = re.compile(r"[a-z][a-z0-9_]{0,63}\Z")


@dataclass(frozen=True, slots=True)
class Criterion:
    """What one score is about. `uses_gold`: the judge may use the reference solution and the tests for it."""

    name: str
    description: str
    weight: float
    uses_gold: bool = False


@dataclass(frozen=True, slots=True)
class Rubric:
    """Criteria with weights. Version 0 is one that was not stored yet."""

    name: str
    description: str
    criteria: tuple[Criterion, ...]
    step: float = 0.1
    version: int = 0

    @property
    def hash(self) -> str:
        """SHA-256 of all but the version."""
        content = asdict(self)
        del content["version"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def weights(self) -> dict[str, float]:
        """By criterion."""
        return {criterion.name: criterion.weight for criterion in self.criteria}

    def combine(self, scores: Mapping[str, float]) -> float:
        """J of scores that one judge gave.

        Raises:
            ValueError: a criterion is missing or unknown, or a score is not one of the rubric's steps.
        """
        for name, score in scores.items():
            if not on_grid(score, self.step):
                raise ValueError(f"the score of {name!r} must be 0 to 1 in steps of {self.step:g}, not {score!r}")
        return rewards.combine(rewards.Rubric(self.weights), scores)

    def weighted(self, scores: Mapping[str, float]) -> float:
        """J of scores that were put together from several votes, and may lie between the steps."""
        return float(sum((exact(c.weight) * Fraction(scores[c.name]) for c in self.criteria), Fraction(0)))


def on_grid(score: float, step: float) -> bool:
    """Whether a score is 0 to 1 in steps of `step`."""
    value = exact(score)
    return 0 <= value <= 1 and (value / exact(step)).denominator == 1


def problems(rubric: Rubric) -> list[tuple[str, str]]:
    """What is wrong with a rubric that somebody puts: the field, and what it must be."""
    found = []

    def check(holds: bool, field: str, description: str) -> None:
        if not holds:
            found.append((field, description))

    check(
        _NAME.match(rubric.name) is not None,
        "name",
        "must be 1 to 64 of a-z, 0-9, '-' and '_', beginning with a letter",
    )
    check(
        not rubric.name.startswith(BUILT_IN_PREFIX),
        "name",
        f"names that begin with {BUILT_IN_PREFIX!r} are built in; choose another",
    )
    check(len(rubric.description.encode()) <= MOST_DESCRIPTION_BYTES, "description", "must be at most 4 KiB")
    check("\0" not in rubric.description, "description", "must not contain a NUL")
    check(rubric.step in STEPS, "step", "must be 0.1, 0.2, 0.5 or 1")
    check(1 <= len(rubric.criteria) <= MOST_CRITERIA, "criteria", f"must be 1 to {MOST_CRITERIA}")
    names: set[str] = set()
    for position, criterion in enumerate(rubric.criteria):
        where = f"criteria[{position}]"
        check(
            _CRITERION.match(criterion.name) is not None,
            f"{where}.name",
            "must be 1 to 64 of a-z, 0-9 and '_', beginning with a letter",
        )
        check(criterion.name not in names, f"{where}.name", f"{criterion.name[:80]!r} is there twice")
        names.add(criterion.name)
        size = len(criterion.description.encode())
        check(1 <= size <= MOST_DESCRIPTION_BYTES, f"{where}.description", "must be 1 byte to 4 KiB")
        check("\0" not in criterion.description, f"{where}.description", "must not contain a NUL")
    if not found:
        try:
            rewards.Rubric(rubric.weights)
        except ValueError as error:
            check(False, "criteria", str(error))
    return found


_DESCRIPTIONS: Final = {
    "fix_quality": "How good is the change as engineering: does it mend the cause at the right place, small and clear?",
    "self_test_relevance": "Do the tests and checks that the agent ran or wrote exercise the behaviour of the task?",
    "coverage": "How much of what the task asks for do those checks reach, edge cases included?",
    "rigor": "How carefully did the agent check: exact expectations, results read, failures followed up?",
    "discriminativeness": "Would its checks fail on a wrong solution and pass on a right one?",
    "regression_guard": "Did the agent make sure that what worked before still works?",
    "verification_integrity": "Are its checks honest: nothing weakened, skipped, faked or claimed without a run?",
}
_USE_GOLD: Final = frozenset({"self_test_relevance", "coverage", "discriminativeness"})

SOFTWARE_ENGINEERING: Final = Rubric(
    name="orchard-software-engineering",
    description="How an agent worked on a software-engineering task: the change and how it was verified.",
    criteria=tuple(
        Criterion(name, _DESCRIPTIONS[name], weight, name in _USE_GOLD)
        for name, weight in rewards.SOFTWARE_ENGINEERING.weights.items()
    ),
    version=1,
)
BUILT_IN: Final = {SOFTWARE_ENGINEERING.name: SOFTWARE_ENGINEERING}
