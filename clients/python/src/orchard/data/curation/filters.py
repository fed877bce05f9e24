"""Filters: each looks at one trajectory and gives the reason to drop it, or none.

Sources: the paper for the length, the tool list and the parsing of actions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from orchard.data.counting import TokenCounter, tokens_of
from orchard.data.errors import DataError, NoExampleError
from orchard.data.record import Record
from orchard.data.training.conversations import conversations, is_action, rises
from orchard.rewards.scores import Scored
from orchard.trajectory.v1 import trajectory_pb2 as pb

MOST_TOKENS: Final = 65_536
"""64K, as in the paper."""
OUTCOMES: Final = ("resolved", "unresolved", "scored", "any")
_STATUSES: Final = {
    "open": pb.TRAJECTORY_STATUS_OPEN,
    "completed": pb.TRAJECTORY_STATUS_COMPLETED,
    "failed": pb.TRAJECTORY_STATUS_FAILED,
    "aborted": pb.TRAJECTORY_STATUS_ABORTED,
}
_FIELDS: Final = ("dataset", "instance_id", "repo", "website", "split", "harness", "model", "policy_version", "teacher")


@dataclass(frozen=True, slots=True)
class Filter:
    """A filter.

    Attributes:
        name: as in a plan.
        options: as in a plan.
        reason: why a trajectory is dropped; empty: it stays.
    """

    name: str
    options: Mapping[str, Any]
    reason: Callable[[Record, TokenCounter], str]


def status(statuses: Sequence[str]) -> Filter:
    """Only trajectories that ended in one of these ways."""
    for one in statuses:
        if one not in _STATUSES:
            raise DataError(f"there is no status {one!r}", fix=f"use {', '.join(_STATUSES)}")
    wanted = {_STATUSES[one] for one in statuses}

    def reason(record: Record, counter: TokenCounter) -> str:
        del counter
        if record.trajectory.status in wanted:
            return ""
        name = next((name for name, one in _STATUSES.items() if one == record.trajectory.status), "unknown")
        return f"its status is {name}"

    return Filter("status", {"statuses": list(statuses)}, reason)


def outcome(outcome: str) -> Filter:
    """Only successes ("resolved"), only failures, or only what has a number. Excluded outcomes are none of these."""
    if outcome not in OUTCOMES:
        raise DataError(f"there is no outcome {outcome!r}", fix=f"use {', '.join(OUTCOMES)}")

    def reason(record: Record, counter: TokenCounter) -> str:
        del counter
        if outcome == "any":
            return ""
        if not isinstance(record.score, Scored):
            return "nothing judged it" if record.score is None else "its outcome is excluded or was not decided"
        if outcome != "scored" and record.resolved is not (outcome == "resolved"):
            return "it is unresolved" if outcome == "resolved" else "it is resolved"
        return ""

    return Filter("outcome", {"is": outcome}, reason)


def max_tokens(most: int = MOST_TOKENS) -> Filter:
    """No trajectory with a conversation of more tokens."""

    def reason(record: Record, counter: TokenCounter) -> str:
        longest = max((tokens_of(record, one.path, counter) for one in conversations(record)), default=0)
        return f"longer than {most} tokens" if longest > most else ""

    return Filter("max_tokens", {"most": most}, reason)


def turns(least: int = 0, most: int | None = None) -> Filter:
    """Only trajectories with so many responses of the model."""

    def reason(record: Record, counter: TokenCounter) -> str:
        del counter
        count = sum(map(is_action, record.steps))
        if count < least:
            return f"fewer than {least} turns"
        return f"more than {most} turns" if most is not None and count > most else ""

    return Filter("turns", {"least": least, **({} if most is None else {"most": most})}, reason)


def known_tools(tools: Sequence[str] | None = None) -> Filter:
    """No trajectory with a call of a tool that was not offered.

    Args:
        tools: their names; None: those that each trajectory says were offered.
    """

    def reason(record: Record, counter: TokenCounter) -> str:
        del counter
        offered = set(tools) if tools is not None else offered_tools(record)
        called = {call.name for step in record.steps if is_action(step) for call in step.tool_calls}
        if called and not offered:
            return "it does not say which tools were offered"
        return f"calls {min(called - offered)!r}, which was not offered" if called - offered else ""

    return Filter("known_tools", {} if tools is None else {"tools": list(tools)}, reason)


def offered_tools(record: Record) -> set[str]:
    """Names of the tools that a trajectory says were offered."""
    if not record.trajectory.tools_json:
        return set()
    found = set()
    for tool in json.loads(record.trajectory.tools_json):
        if isinstance(tool, dict):
            inner = tool.get("function", tool)
            if isinstance(inner, dict) and isinstance(inner.get("name"), str):
                found.add(inner["name"])
    return found


def parsable_actions(calls: bool = False, reasoning: bool = False) -> Filter:
    """No trajectory with an action that does not parse: arguments that are no JSON object.

    Args:
        calls: every response must call a tool, the last apart.
        reasoning: every response must say what it thought: apart, or within <think> tags.
    """

    def reason(record: Record, counter: TokenCounter) -> str:
        del counter
        actions = [step for step in record.steps if is_action(step)]
        for number, step in enumerate(actions):
            for call in step.tool_calls:
                if not _is_object(call.arguments):
                    return f"the arguments of a call of {call.name!r} are no JSON object"
            if calls and not step.tool_calls and number < len(actions) - 1:
                return "a response calls no tool"
            if reasoning and not (step.reasoning or _thinks(step)):
                return "a response does not say what it thought"
        return ""

    return Filter("parsable_actions", {"calls": calls, "reasoning": reasoning}, reason)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _thinks(step: pb.Step) -> bool:
    text = "".join(part.text for part in step.content)
    start = text.find("<think>")
    return start >= 0 and text.find("</think>", start) > 0


def has_rise() -> Filter:
    """No failure without an action that raised its value; successes stay."""

    def reason(record: Record, counter: TokenCounter) -> str:
        del counter
        try:
            rises(record)
        except NoExampleError as error:
            return str(error)
        return ""

    return Filter("has_rise", {}, reason)


def where(fields: Mapping[str, Sequence[str]], exclude: bool = False) -> Filter:
    """Only trajectories whose fields have one of these values; or, with `exclude`, only those whose have none.

    Args:
        fields: dataset, instance_id, repo, website, split, harness, model, policy_version, teacher, or label.KEY.
        exclude: drop those that match.
    """
    for name in fields:
        if name not in _FIELDS and not name.startswith("label."):
            raise DataError(f"there is no field {name!r}", fix=f"use {', '.join(_FIELDS)} or label.KEY")

    def reason(record: Record, counter: TokenCounter) -> str:
        del counter
        for name, values in fields.items():
            matches = field_of(record, name) in values
            if matches is exclude:
                return f"its {name} is {'one' if exclude else 'none'} of those that are named"
        return ""

    options: dict[str, Any] = {"fields": {name: list(values) for name, values in fields.items()}}
    return Filter("where", options | {"exclude": exclude}, reason)


def field_of(record: Record, name: str) -> str:
    """A field of a trajectory by its name in plans."""
    trajectory = record.trajectory
    if name.startswith("label."):
        return trajectory.labels.get(name.removeprefix("label."), "")
    holder = trajectory if name in {"harness", "model", "policy_version", "teacher"} else trajectory.task
    return str(getattr(holder, name))
