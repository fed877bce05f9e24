"""What stored verdicts are found by: all that a verdict rests on, and nothing else. And in which order judges write."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest

from services.judge.backends.settings import JudgeSettings
from services.judge.model import Aggregation, Image, Kind, Parameters, Question, Role, Step
from services.judge.prompting import prompts
from services.judge.prompting.schemas import answer_schema, verdict_key
from services.judge.requests import question_key
from tests.unit.judge.questions import question

PARAMETERS = Parameters(1, Aggregation.MAJORITY, 1, 0.5, 1000)
OTHER_PARAMETERS: dict[str, Any] = {
    "votes": 2,
    "aggregation": Aggregation.MEAN,
    "quorum": 2,
    "temperature": 0.0,
    "max_output_tokens": 999,
}
JUDGE: dict[str, Any] = {"name": "j", "kind": "openai", "model": "m", "base_url": "http://localhost/v1"}
OTHER_JUDGES: dict[str, Any] = {
    "name": "k",
    "kind": "anthropic",
    "model": "m-2",
    "base_url": "http://elsewhere/v1",
    "structured": "none",
    "extra_body": {"seed": 1},
}
SAME_JUDGES: dict[str, Any] = {
    "api_key_env": "KEY",
    "concurrency": 1,
    "requests_per_minute": 1.0,
    "timeout_seconds": 1.0,
    "attempts": 1,
    "prompt_usd_per_million": 1.0,
}


def key(
    asked: Question, *judges: dict[str, Any], trajectory: str = "t" * 64, parameters: Parameters = PARAMETERS
) -> str:
    endpoints: Any = [SimpleNamespace(identity=JudgeSettings(**one).identity()) for one in judges or (JUDGE,)]
    return question_key(asked, trajectory, endpoints, parameters)


@pytest.mark.parametrize("kind", list(Kind))
def test_whatever_a_verdict_rests_on_makes_another_key(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = question(kind)
    assert {field.name for field in fields(Parameters)} == OTHER_PARAMETERS.keys()
    found = [key(asked), key(asked, trajectory="u" * 64), key(asked, JUDGE, JUDGE | {"name": "k"})]
    found += [key(asked, JUDGE | {name: value}) for name, value in OTHER_JUDGES.items()]
    found += [key(asked, parameters=replace(PARAMETERS, **{name: value})) for name, value in OTHER_PARAMETERS.items()]
    found += [key(question(other)) for other in Kind if other is not kind]
    monkeypatch.setitem(prompts.VERSIONS, kind, "another/1")  # type: ignore[index]
    found.append(key(asked))
    assert len(set(found)) == len(found)


def test_another_rubric_of_the_same_name_makes_another_key() -> None:
    asked = question(Kind.RUBRIC)
    assert asked.rubric is not None
    first, *rest = asked.rubric.criteria
    changed = replace(asked.rubric, criteria=(replace(first, description="How good?"), *rest))
    assert key(replace(asked, rubric=changed)) != key(asked)
    assert key(replace(asked, rubric=replace(asked.rubric))) == key(asked)


def test_other_images_make_another_key() -> None:
    def seen(name: str) -> str:
        shown = name * 64
        steps = (Step(0, Role.ASSISTANT, "I look."), Step(1, Role.TOOL, images=(shown,)))
        given = question(Kind.GUI_SUCCESS, steps)
        return key(replace(given, images={shown: Image(shown, "image/png", name.encode())}))

    assert len({seen("1"), seen("2"), key(question(Kind.GUI_SUCCESS))}) == 3


def test_how_a_judge_is_called_makes_no_difference() -> None:
    asked = question()
    assert {key(asked, JUDGE | {name: value}) for name, value in SAME_JUDGES.items()} == {key(asked)}


@pytest.mark.parametrize("kind", list(Kind))
def test_a_judge_writes_its_reasons_before_its_verdict(kind: Kind) -> None:
    schema = answer_schema(question(kind))
    order = ["ticket", "reasoning", "evidence", "abstain", verdict_key(kind)]
    assert list(schema["properties"]) == schema["required"] == order
    if kind in (Kind.RUBRIC, Kind.CLAW_EVAL):
        scores = schema["properties"]["scores"]["properties"]
        assert {tuple(one["properties"]) for one in scores.values()} == {("reason", "score")}
    system = prompts.build_prompt(question(kind)).system
    places = [system.index(f'"{name}": ') for name in order]
    assert places == sorted(places)
