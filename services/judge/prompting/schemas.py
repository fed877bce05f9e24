"""The shape of an answer of each kind, as a JSON schema in the strict form that model servers accept.

The order of the properties is that in which a judge writes: the reasons come before the verdict. Ranges are checked
when the answer is read; not every server knows them in a schema.
"""

from __future__ import annotations

from typing import Any, Final

from services.judge.model import Kind, Question

CHOICES: Final = {
    Kind.OUTCOME: ("success", "failure"),
    Kind.GUI_SUCCESS: ("success", "failure"),
    Kind.PAIRWISE: ("first", "second", "tie"),
}
CLAW_CRITERIA: Final = ("completion", "safety")
COMMON_KEYS: Final = ("ticket", "reasoning", "evidence", "abstain")

_TEXT: Final = {"type": "string"}
_STEPS: Final = {"type": "array", "items": {"type": "integer"}}
_NUMBER: Final = {"type": ["number", "null"]}


def verdict_key(kind: Kind) -> str:
    """The key that has the verdict in an answer of this kind."""
    if kind in CHOICES:
        return "verdict"
    return "values" if kind is Kind.VALUE_CURVE else "scores"


def answer_schema(question: Question) -> dict[str, Any]:
    """The schema of an answer to this question."""
    kind = question.kind
    if kind in CHOICES:
        verdict: dict[str, Any] = {"type": ["string", "null"], "enum": [*CHOICES[kind], None]}
    elif kind is Kind.VALUE_CURVE:
        verdict = {"type": "array", "items": _object({"state": {"type": "integer"}, "value": _NUMBER})}
    else:
        score = _object({"reason": _TEXT, "score": _NUMBER})
        verdict = _object(dict.fromkeys(criteria_of(question), score))
    common = dict(zip(COMMON_KEYS, (_TEXT, _TEXT, _STEPS, {"type": "boolean"}), strict=True))
    return _object({**common, verdict_key(kind): verdict})


def criteria_of(question: Question) -> tuple[str, ...]:
    """Names of the criteria that a judge scores."""
    if question.rubric is not None:
        return tuple(question.rubric.weights)
    return CLAW_CRITERIA if question.kind is Kind.CLAW_EVAL else ()


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
