"""What was asked is known by the caller's words alone, and judged only where there is anything to see."""

import json
from dataclasses import asdict, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.judge.backends.limits import Amount
from services.judge.model import Aggregation, Kind, Question, Role, Step, Task, ToolCall, attempts_json
from services.judge.requests import Request, lacks_evidence
from tests.unit.judge.questions import IMAGES, STEPS

REQUEST = Request(Kind.OUTCOME, Task("Do it."), (STEPS,), {})
CHANGES: dict[str, Any] = {
    "kind": Kind.CLAW_EVAL,
    "task": Task("Do that."),
    "attempts": (STEPS[:2],),
    "judges": ("other",),
    "rubric_name": "mine",
    "rubric_version": 2,
    "votes": 2,
    "aggregation": Aggregation.MEAN,
    "quorum": 1,
    "temperature": 0.0,
    "max_output_tokens": 100,
    "fresh": True,
}
"""Of every field but the budget, and but the images, which the steps name by hash."""


def test_every_word_of_the_caller_counts() -> None:
    assert {field.name for field in fields(Request)} == CHANGES.keys() | {"budget", "images"}
    hashes = [REQUEST.hash(), *(replace(REQUEST, **{name: value}).hash() for name, value in CHANGES.items())]
    hashes += [replace(REQUEST, task=Task("Do it.", resolved=resolved)).hash() for resolved in (True, False)]
    assert len(set(hashes)) == len(CHANGES) + 3


def test_what_is_no_part_of_the_question_does_not_count() -> None:
    assert replace(REQUEST, budget=Amount(5), images=IMAGES).hash() == REQUEST.hash()


_TEXTS = st.text() | st.sampled_from(['"', "\\", "\n", "\u2028", "\x7f", "\U0001f600", "\ud800"])
_STEPS = st.builds(
    Step,
    index=st.integers(0, 10_000),
    role=st.sampled_from(Role),
    text=_TEXTS,
    reasoning=_TEXTS,
    calls=st.lists(st.builds(ToolCall, _TEXTS, _TEXTS), max_size=2).map(tuple),
    name=_TEXTS,
    is_error=st.booleans(),
    images=st.lists(_TEXTS, max_size=2).map(tuple),
    copied=st.booleans(),
)


@given(st.lists(st.lists(_STEPS, max_size=3).map(tuple), max_size=2).map(tuple))
def test_steps_are_the_json_that_they_always_were(attempts: tuple[tuple[Step, ...], ...]) -> None:
    """Stored hashes rest on it: what a step has beside its defaults, by name."""
    given_fields = [
        [
            {name: value for name, value in (asdict(step) | {"role": step.role.name}).items() if value}
            for step in attempt
        ]
        for attempt in attempts
    ]
    assert attempts_json(attempts) == json.dumps(given_fields, sort_keys=True)


def test_every_field_of_a_step_counts() -> None:
    plain = Step(1, Role.ASSISTANT)
    changed: dict[str, Any] = {
        "index": 2,
        "role": Role.TOOL,
        "text": "t",
        "reasoning": "r",
        "calls": (ToolCall("a", "b"),),
        "name": "n",
        "is_error": True,
        "images": ("1" * 64,),
        "copied": True,
    }
    assert changed.keys() == {field.name for field in fields(Step)}
    steps = [plain, *(replace(plain, **{name: value}) for name, value in changed.items())]
    steps.append(replace(plain, calls=(ToolCall("a", "c"),)))
    asked = [replace(REQUEST, attempts=((step,),)) for step in steps]
    assert len({one.hash() for one in asked}) == len(asked)
    assert len({Question(Kind.OUTCOME, one.task, one.attempts).trajectory_hash() for one in asked}) == len(asked)


USER = Step(0, Role.USER, "Do it.")
NOTHING = (USER, Step(1, Role.TOOL, "a log", name="bash"), Step(2, Role.ASSISTANT, "  "))
COPIED = (USER, Step(1, Role.ASSISTANT, "It was done before.", copied=True))
SAID, CALLED = (
    (USER, step) for step in (Step(1, Role.ASSISTANT, "Done."), Step(1, Role.ASSISTANT, calls=(ToolCall("a", ""),)))
)
SCREEN = (USER, Step(1, Role.TOOL, images=("1" * 64,)))
TEXT_KINDS = [Kind.OUTCOME, Kind.RUBRIC, Kind.VALUE_CURVE, Kind.CLAW_EVAL]


@pytest.mark.parametrize("kind", TEXT_KINDS)
def test_no_judge_is_asked_about_nothing(kind: Kind) -> None:
    for steps in ((USER,), NOTHING, COPIED):
        assert "attempt 0" in lacks_evidence(Question(kind, Task("Do it."), (steps,)))
    for steps in (SAID, CALLED):
        assert not lacks_evidence(Question(kind, Task("Do it."), (steps,)))


@pytest.mark.parametrize("field", ["patch", "final_response"])
def test_what_an_agent_left_is_something(field: str) -> None:
    left = Task("Do it.", **{field: "this"})
    for kind in TEXT_KINDS:
        assert bool(lacks_evidence(Question(kind, left, ((USER,),)))) == (kind is Kind.VALUE_CURVE)


def test_a_pair_needs_two_attempts_that_show_something() -> None:
    assert not lacks_evidence(Question(Kind.PAIRWISE, Task("Do it."), (SAID, CALLED)))
    for attempts, number in (((NOTHING, SAID), 0), ((SAID, NOTHING), 1)):
        assert f"attempt {number}" in lacks_evidence(Question(Kind.PAIRWISE, Task("Do it."), attempts))


def test_a_graphical_task_needs_a_screenshot() -> None:
    assert "screenshot" in lacks_evidence(Question(Kind.GUI_SUCCESS, Task("Do it.", final_response="x"), (CALLED,)))
    assert not lacks_evidence(Question(Kind.GUI_SUCCESS, Task("Do it."), (SCREEN,)))
