"""Outcome rewards: what a whole rollout earned, before any shaping.

Sources: "Orchard: An Open-Source Agentic Modeling Framework" (the paper), and its authors' released trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from orchard.rewards.scores import Abstained, Excluded, Score, Scored


def outcome_of_tests(*, resolved: bool, failure: float = -1.0) -> Scored:
    """+1 if every named test passed, else `failure`: -1 as in the released trainer, or 0.

    For software engineering "every named test" is FAIL_TO_PASS and PASS_TO_PASS, for Claw tasks every test script.
    """
    return Scored(1.0 if resolved else failure)


class GuiEnd(Enum):
    """How a GUI rollout ended."""

    DONE = "done"
    STEP_LIMIT = "step limit"
    FORMAT_FAILURES = "format failures"
    """Three answers in a row did not parse (released trainer)."""
    ENVIRONMENT_FAILED = "environment failed"
    CAPTCHA = "captcha"


def gui_outcome(
    end: GuiEnd, *, turns_parsed: Sequence[bool], response: str = "", judged: bool | Excluded | Abstained | None = None
) -> Score:
    """The outcome of a GUI rollout (the paper; 3 failures in a row are the released trainer's).

    +1: every assistant turn parsed as thought and tool calls, and the judge calls the final response a success.
    -1: it ended from repeated format failures. 0: anything else, the step limit and an empty response included.
    Without a verdict, because the judge or the environment failed or a captcha stood in the way: excluded.

    Args:
        end: how it ended.
        turns_parsed: for each assistant turn whether it parsed.
        response: what the final done(response) said.
        judged: the verdict on the screenshots. Needed after a done that is not empty and where every turn parsed.

    Raises:
        ValueError: a verdict is needed and missing.
    """
    if end in (GuiEnd.ENVIRONMENT_FAILED, GuiEnd.CAPTCHA):
        return Excluded(end.value)
    if end is GuiEnd.FORMAT_FAILURES:
        return Scored(-1.0)
    if end is GuiEnd.STEP_LIMIT or not response.strip() or not all(turns_parsed):
        return Scored(0.0)
    if judged is None:
        raise ValueError("judged is missing: a finished rollout with a response needs the judge's verdict")
    if isinstance(judged, (Excluded, Abstained)):
        return judged
    return Scored(1.0 if judged else 0.0)
