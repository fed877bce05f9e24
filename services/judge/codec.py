"""Verdicts and rubrics as JSON values, as they are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any, Final

from orchard.rewards.scores import Abstained, Excluded, Score, Scored

from services.judge.model import (
    Aggregation,
    Cut,
    Kind,
    Parameters,
    Provenance,
    Reading,
    Usage,
    Verdict,
    Vote,
    shallow,
)
from services.judge.rubrics import Criterion, Rubric
from services.judge.texts import plain

SCORED: Final = 1
EXCLUDED: Final = 2
ABSTAINED: Final = 3


def state_of(score: Score) -> int:
    """The state's number, here and on the wire."""
    return {Scored: SCORED, Excluded: EXCLUDED, Abstained: ABSTAINED}[type(score)]


def rubric_json(rubric: Rubric) -> dict[str, Any]:
    """All but name and version."""
    body = asdict(rubric)
    del body["name"], body["version"]
    return body


def rubric_of(name: str, version: int, body: Mapping[str, Any]) -> Rubric:
    """The rubric of a stored body."""
    criteria = tuple(Criterion(**criterion) for criterion in body["criteria"])
    return Rubric(name, body["description"], criteria, body["step"], version)


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """A verdict without its number in the store and its time."""
    given = verdict.provenance
    parameters = shallow(given.parameters) | {"aggregation": given.parameters.aggregation.value}
    provenance = shallow(given) | {"parameters": parameters, "cuts": [shallow(cut) for cut in given.cuts]}
    return {
        "kind": verdict.kind.value,
        "reading": _reading_json(verdict.reading),
        "passed": verdict.passed,
        "votes": [
            {
                "judge": vote.judge,
                "model": plain(vote.model),
                "reading": _reading_json(vote.reading),
                "answers": list(vote.answers),
                "usage": shallow(vote.usage),
                "latency_seconds": vote.latency_seconds,
            }
            for vote in verdict.votes
        ],
        "provenance": provenance,
        "usage": shallow(verdict.usage),
        "latency_seconds": verdict.latency_seconds,
        "action_steps": list(verdict.action_steps),
    }


def verdict_of(verdict_id: str, body: Mapping[str, Any], create_time: datetime) -> Verdict:
    """The verdict of a stored body."""
    given = body["provenance"]
    parameters = given["parameters"]
    provenance = {
        "parameters": Parameters(**{**parameters, "aggregation": Aggregation(parameters["aggregation"])}),
        "image_hashes": tuple(given["image_hashes"]),
        "cuts": tuple(Cut(**cut) for cut in given["cuts"]),
    }
    return Verdict(
        verdict_id=verdict_id,
        kind=Kind(body["kind"]),
        reading=_reading_of(body["reading"]),
        passed=body["passed"],
        votes=tuple(
            Vote(
                vote["judge"],
                vote["model"],
                _reading_of(vote["reading"]),
                tuple(vote["answers"]),
                Usage(**vote["usage"]),
                vote["latency_seconds"],
            )
            for vote in body["votes"]
        ),
        provenance=Provenance(**{**given, **provenance}),
        usage=Usage(**body["usage"]),
        latency_seconds=body["latency_seconds"],
        create_time=create_time,
        action_steps=tuple(body["action_steps"]),
    )


def _reading_json(reading: Reading) -> dict[str, Any]:
    return {
        "state": state_of(reading.score),
        "value": reading.value,
        "reason": "" if isinstance(reading.score, Scored) else reading.score.reason,
        "message": plain(reading.message),
        "scores": [list(pair) for pair in reading.scores.items()],  # JSONB keeps no order of keys
        "values": [list(point) for point in reading.values],
        "reasoning": plain(reading.reasoning),
        "evidence": list(reading.evidence),
    }


def _reading_of(body: Mapping[str, Any]) -> Reading:
    score: Score
    if body["state"] == SCORED:
        score = Scored(body["value"])
    else:
        score = (Excluded if body["state"] == EXCLUDED else Abstained)(body["reason"])
    return Reading(
        score=score,
        message=body["message"],
        scores={name: score for name, score in body["scores"]},  # noqa: C416 (typed pairs)
        values=tuple((state, value) for state, value in body["values"]),
        reasoning=body["reasoning"],
        evidence=tuple(body["evidence"]),
    )
