"""Reading an answer: exactly what was asked for, each number within its range, or a stated reason why not."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from enum import Enum
from typing import Any, Final

from orchard.rewards.claw_eval import ToolCall, robustness, task_score
from orchard.rewards.scores import Abstained, Excluded, Scored

from services.judge.answers.json_text import AnswerError, find_answer
from services.judge.model import Kind, Question, Reading, Reason, Role, actions_of
from services.judge.prompting.prompts import Prompt
from services.judge.prompting.schemas import CHOICES, COMMON_KEYS, criteria_of, verdict_key
from services.judge.rubrics import on_grid

_MOST_DECIMALS: Final = 4
_ERROR_STATUS: Final = 500
_VALUES: Final = {"success": 1.0, "failure": 0.0, "first": 1.0, "second": 0.0, "tie": 0.5}
_MOST_REASONING: Final = 8192


class Finish(Enum):
    """Why a judge stopped writing."""

    STOP = "stop"
    LENGTH = "length"
    REFUSAL = "refusal"
    OTHER = "other"


def read_answer(question: Question, prompt: Prompt, text: str, finish: Finish, words: str = "") -> Reading:
    """What an answer says. `words`: what the server told of the finish."""
    if finish is Finish.REFUSAL:
        return Reading(Abstained(Reason.REFUSED), f"the judge refused to answer: {words or text}"[:1000])
    if finish is Finish.LENGTH:
        message = "the answer reached its limit of tokens, reasoning included; raise max_output_tokens"
        return Reading(Excluded(Reason.CUT_OFF), message)
    if not text.strip():
        return Reading(Excluded(Reason.EMPTY), "the answer is empty", again=True)
    if finish is not Finish.STOP:
        return Reading(Excluded(Reason.CUT_OFF), f"the answer did not come to its end ({words[:200]})", again=True)
    try:
        return _read(question, prompt, find_answer(text, prompt.ticket))
    except AnswerError as error:
        reason = Reason.AMBIGUOUS if error.ambiguous else Reason.CUT_OFF if error.cut_off else Reason.INVALID
        return Reading(Excluded(reason), str(error), again=True)


def claw_robustness(question: Question) -> float:
    """Robustness of an attempt, from the statuses that were given or from the errors of its steps."""
    given = [ToolCall(tool, status) for tool, status in question.task.tool_statuses]
    if not given:
        observations = [step for step in question.attempts[0] if step.role is Role.TOOL]
        given = [ToolCall(step.name, _ERROR_STATUS if step.is_error else 200) for step in observations]
    return robustness(given)


def _read(question: Question, prompt: Prompt, answer: Mapping[str, Any]) -> Reading:
    key = verdict_key(question.kind)
    missing = [name for name in COMMON_KEYS if name not in answer]
    extra = [name for name in answer if name not in (*COMMON_KEYS, key)]
    if missing or extra:
        raise AnswerError(f"the answer lacks {missing!r} and has {extra!r} too many"[:500])
    reasoning = answer["reasoning"]
    if not isinstance(reasoning, str):
        raise AnswerError("reasoning must be a string")
    if not isinstance(answer["abstain"], bool):
        raise AnswerError("abstain must be true or false")
    if answer["abstain"]:
        return Reading(Abstained(Reason.ABSTAINED), reasoning[:1000], reasoning=reasoning[:_MOST_REASONING])
    if not reasoning.strip():
        raise AnswerError("reasoning is empty: a verdict without reasons does not count")
    if key not in answer:
        raise AnswerError(f"the answer lacks {key!r}")
    evidence = _evidence(answer["evidence"], prompt.steps)
    if not evidence:
        raise AnswerError("evidence is empty: a verdict that rests on no step does not count")
    verdict = answer[key]
    values: tuple[tuple[int, float], ...] = ()
    scores: dict[str, float] = {}
    if question.kind in CHOICES:
        if not isinstance(verdict, str) or verdict not in CHOICES[question.kind]:
            raise AnswerError(f"verdict must be one of {CHOICES[question.kind]}, not {verdict!r}"[:500])
        value = _VALUES[verdict]
    elif question.kind is Kind.VALUE_CURVE:
        values = _curve(verdict, len(actions_of(question.attempts[0])))
        value = values[-1][1]
    else:
        scores = _scores(question, verdict)
        value = _combined(question, scores)
    return Reading(
        Scored(value), scores=scores, values=values, reasoning=reasoning[:_MOST_REASONING], evidence=evidence
    )


def _evidence(given: Any, shown: frozenset[int]) -> tuple[int, ...]:
    if not isinstance(given, list) or not all(type(index) is int for index in given):
        raise AnswerError("evidence must be a list of integers")
    if unknown := [index for index in given if index not in shown]:
        raise AnswerError(f"evidence names steps that were not shown: {unknown[:10]}")
    return tuple(dict.fromkeys(given))


def _scores(question: Question, given: Any) -> dict[str, float]:
    names = criteria_of(question)
    if not isinstance(given, dict):
        raise AnswerError("scores must be an object")
    missing = [name for name in names if name not in given]
    extra = [name for name in given if name not in names]
    if missing or extra:
        raise AnswerError(f"scores lacks {missing!r} and has {extra!r} too many"[:500])
    scores = {}
    for name in names:
        entry = given[name]
        if not isinstance(entry, dict) or set(entry) != {"reason", "score"} or not isinstance(entry["reason"], str):
            raise AnswerError(f"scores[{name!r}] must be an object of a reason and a score")
        score = _number(f"the score of {name!r}", entry["score"])
        if question.rubric is not None and not on_grid(score, question.rubric.step):
            raise AnswerError(f"the score of {name!r} must be in steps of {question.rubric.step:g}, not {score!r}")
        scores[name] = score
    if question.kind is Kind.CLAW_EVAL:
        scores["robustness"] = claw_robustness(question)
    return scores


def _combined(question: Question, scores: Mapping[str, float]) -> float:
    if question.rubric is not None:
        return question.rubric.combine(scores)
    return task_score(**scores).score


def _curve(given: Any, actions: int) -> tuple[tuple[int, float], ...]:
    if not isinstance(given, list) or not given:
        raise AnswerError("values must be a list with at least one entry")
    points: dict[int, float] = {}
    for entry in given:
        if not isinstance(entry, dict) or set(entry) != {"state", "value"}:
            raise AnswerError("each entry of values must be an object of a state and a value")
        state = entry["state"]
        if type(state) is not int or not 0 <= state <= actions:
            raise AnswerError(f"a state must be 0 to {actions}, not {state!r}"[:500])
        if state in points:
            raise AnswerError(f"state {state} is there twice")
        points[state] = _number(f"the value of state {state}", entry["value"])
    return tuple(sorted(points.items()))


def _number(name: str, value: Any) -> float:
    """A number from 0 to 1 of at most four decimals, and nothing that only looks like one."""
    if isinstance(value, bool) or not isinstance(value, (int, Decimal)):
        raise AnswerError(f"{name} must be a number, not {value!r}"[:500])
    if not 0 <= value <= 1:
        raise AnswerError(f"{name} must be from 0 to 1, not {value}"[:500])
    if isinstance(value, Decimal) and -int(value.as_tuple().exponent) > _MOST_DECIMALS:
        raise AnswerError(f"{name} has more than {_MOST_DECIMALS} decimals: {value}"[:500])
    return float(value)
