"""Questions for the tests, and answers as a judge would write them."""

import json
from typing import Any

from services.judge.model import Image, Kind, Question, Role, Step, Task, ToolCall
from services.judge.prompting.prompts import Prompt, build_prompt
from services.judge.prompting.schemas import criteria_of, verdict_key
from services.judge.rubrics import SOFTWARE_ENGINEERING

STEPS = (
    Step(0, Role.USER, "Fix the bug."),
    Step(1, Role.ASSISTANT, "I look.", reasoning="where is it?", calls=(ToolCall("bash", '{"cmd": "ls"}'),)),
    Step(2, Role.TOOL, "a.py", name="bash"),
    Step(3, Role.ASSISTANT, "Done."),
)
IMAGES = {digit * 64: Image(digit * 64, "image/png", digit.encode()) for digit in "1234"}


def question(kind: Kind = Kind.OUTCOME, steps: tuple[Step, ...] = STEPS, **task: Any) -> Question:
    attempts = (steps, STEPS) if kind is Kind.PAIRWISE else (steps,)
    rubric = SOFTWARE_ENGINEERING if kind is Kind.RUBRIC else None
    return Question(kind, Task(**{"instruction": "Fix it.", **task}), attempts, rubric, IMAGES)


def prompted(kind: Kind = Kind.OUTCOME, **given: Any) -> tuple[Question, Prompt]:
    asked = question(kind, **given)
    return asked, build_prompt(asked)


def verdict_of(asked: Question, good: bool = True) -> Any:
    """A verdict that is well-formed."""
    if asked.kind is Kind.PAIRWISE:
        return "first" if good else "second"
    if asked.kind in (Kind.OUTCOME, Kind.GUI_SUCCESS):
        return "success" if good else "failure"
    if asked.kind is Kind.VALUE_CURVE:
        return [{"state": 0, "value": 0.1}, {"state": 2, "value": 0.9 if good else 0.0}]
    return {name: {"reason": "so", "score": 1 if good else 0} for name in criteria_of(asked)}


def answer_object(asked: Question, prompt: Prompt, **changes: Any) -> dict[str, Any]:
    return {
        "ticket": prompt.ticket,
        "reasoning": "It ran the tests.",
        "evidence": [1],
        "abstain": False,
        verdict_key(asked.kind): verdict_of(asked),
    } | changes


def answer(asked: Question, prompt: Prompt, **changes: Any) -> str:
    return json.dumps(answer_object(asked, prompt, **changes))
