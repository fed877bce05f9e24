"""Which tool answered, where a step names the call and not the tool."""

from typing import Any

import pytest
from orchard.judge.v1 import judge_pb2
from orchard.judge.v1 import judge_service_pb2 as pb
from orchard.trajectory.v1 import trajectory_pb2

from services.judge.answers.reading import claw_robustness
from services.judge.model import Kind, Question, Step, Task
from services.judge.servicer_intake import Intake


def taken_in(*given: dict[str, Any]) -> tuple[Step, ...]:
    intake = Intake(judge_pb2.Judgement(kind=judge_pb2.JUDGEMENT_KIND_CLAW_EVAL, instruction="Do it."))
    for index, fields in enumerate(given):
        intake.steps(pb.AttemptSteps(steps=[trajectory_pb2.Step(index=index, **fields)]))
    return intake.request().attempts[0]


def calls(*names: str, ids: bool = True) -> dict[str, Any]:
    made = [{"name": name, "call_id": f"c{name}" if ids else ""} for name in names]
    return {"role": trajectory_pb2.ROLE_ASSISTANT, "tool_calls": made}


def answer(call_id: str = "", *, error: bool = False, name: str = "") -> dict[str, Any]:
    return {"role": trajectory_pb2.ROLE_TOOL, "tool_call_id": call_id, "is_error": error, "name": name}


def tools(steps: tuple[Step, ...]) -> list[str]:
    return [step.name for step in steps if step.role == trajectory_pb2.ROLE_TOOL]


@pytest.mark.parametrize(
    ("steps", "names"),
    [
        ((calls("A", "B"), answer("cB"), answer("cA")), ["B", "A"]),
        ((calls("A"), calls("B"), answer("cA")), ["A"]),
        ((calls("A", "B", ids=False), answer(), answer()), ["A", "B"]),
        ((calls("A", "B"), answer("cB"), answer()), ["B", "A"]),
        ((calls("A"), answer(name="own")), ["own"]),
        ((answer(), answer("c?")), ["unknown-0", "unknown-1"]),
    ],
)
def test_the_name_comes_from_the_call(steps: tuple[dict[str, Any], ...], names: list[str]) -> None:
    assert tools(taken_in(*steps)) == names


def test_claw_evals_robustness_tells_nameless_tools_apart() -> None:
    """rewards.md: A500 B500 B500 C200 is .25. Taken for one tool, C's success would recover all of them: 1."""
    rounds = [("A", True), ("B", True), ("B", True), ("C", False)]
    steps = [part for name, error in rounds for part in (calls(name), answer(f"c{name}", error=error))]
    asked = Question(Kind.CLAW_EVAL, Task("Do it."), (taken_in(*steps),))
    assert claw_robustness(asked) == pytest.approx(0.25, abs=1e-5)
