"""How an export is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from orchard.data.errors import OptionError

if TYPE_CHECKING:
    from orchard.data.counting import TokenCounter

LOSSES: Final = ("resolved", "rises", "all")
TRUNCATIONS: Final = ("drop", "left")
RECIPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "swe": {"advantage": "grpo", "needs_positive": True},
    "gui": {
        "advantage": "grpo",
        "needs_positive": False,
        "clip_low": 0.2,
        "clip_high": 0.28,
        "length_normalisation": False,
        "step_budgets": [15, 30],
    },
    "claw": {
        "advantage": "grpo",
        "needs_positive": False,
        "group_size": 8,
        "step_limit": None,
        "wall_clock_seconds": 600,
    },
}
"""Settings of the paper's trainings; they are the trainer's to apply, and stated beside its data."""


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """How an export is made.

    Attributes:
        loss: which actions have loss: "resolved" those of successes and of what nothing judged, "rises" those of
            successes and, of failures, those that raised the value, "all" every one, whatever the outcome.
        reward: name of the reward that groups are trained on; whether an attempt is a success goes by its outcome.
        max_tokens: longest example, in tokens; None: any.
        truncate: what happens to a longer one: "drop" leaves it out, "left" cuts messages off its beginning.
        counter: counts tokens where a trajectory does not know them; None: the stated estimate.
        recipe: whose training settings are stated in rows of groups: "swe", "gui" or "claw".
        environment: name that trainers show, where they have a place for one.
        files: folder beside the output for bodies.

    Raises:
        OptionError: an option has no such value.
    """

    loss: str = "resolved"
    reward: str = "outcome"
    max_tokens: int | None = None
    truncate: str = "drop"
    counter: TokenCounter | None = None
    recipe: str = "swe"
    environment: str = "orchard"
    files: str = "files"

    def __post_init__(self) -> None:
        known = {"loss": LOSSES, "truncate": TRUNCATIONS, "recipe": tuple(RECIPES)}
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise OptionError(f"{name} is {getattr(self, name)!r}", fix=f"use one of {', '.join(values)}")
