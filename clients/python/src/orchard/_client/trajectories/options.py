"""Descriptions of trajectories and filters over them, and how they become requests."""

from __future__ import annotations

import datetime as dt
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypedDict

from orchard._client.errors import InvalidArgument
from orchard._client.options import check_names
from orchard._client.trajectories import convert
from orchard._client.trajectories.types import RewardState, Task, TrajectoryStatus
from orchard._client.units import timestamp
from orchard.trajectory.v1 import trajectory_pb2 as pb
from orchard.trajectory.v1 import trajectory_service_pb2 as service_pb

_PLAIN: Final = (
    "rollout_id",
    "group_id",
    "attempt",
    "harness",
    "model",
    "policy_version",
    "teacher",
    "sandbox_id",
    "trace_id",
)
_LISTS: Final = (
    "trajectory_ids",
    "rollout_ids",
    "group_ids",
    "datasets",
    "instance_ids",
    "repos",
    "websites",
    "splits",
    "harnesses",
    "models",
    "policy_versions",
    "teachers",
)
_NUMBERS: Final = ("outcome_least", "outcome_most", "turns_least", "turns_most", "tokens_most")


class TrajectoryOptions(TypedDict, total=False):
    """What a trajectory is described by; everything is optional."""

    trajectory_id: str
    """Choose its id: 1 to 128 of A-Z, a-z, 0-9, '-', '_', '.'. Default: a new one."""
    rollout_id: str
    """The rollout that it is part of. Sub-agents of one rollout share it."""
    group_id: str
    """The group of attempts at one prompt."""
    attempt: int
    """Its number among the attempts at its task, from 0."""
    harness: str
    """What drove the agent."""
    model: str
    """The model that acted."""
    policy_version: str
    """Version of the weights that acted."""
    teacher: str
    """The teacher model, where the attempt was made to be learnt from."""
    tools: Sequence[Mapping[str, Any]]
    """Definitions of the tools that were offered, in OpenAI's form."""
    labels: Mapping[str, str]
    """Labels to find it by."""
    sandbox_id: str
    """The sandbox that it acts in."""
    trace_id: str
    """Trace of the run, 32 hexadecimal digits."""
    metadata: Mapping[str, Any]
    """Anything else, as a JSON object."""


class TrajectoryFilter(TypedDict, total=False):
    """Which trajectories; all given conditions must hold. A list holds alternatives."""

    trajectory_ids: str | Sequence[str]
    """Only these ids, at most 1,000."""
    rollout_ids: str | Sequence[str]
    """Only these rollouts."""
    group_ids: str | Sequence[str]
    """Only these groups."""
    datasets: str | Sequence[str]
    """Only these datasets."""
    instance_ids: str | Sequence[str]
    """Only these instances."""
    repos: str | Sequence[str]
    """Only these repositories."""
    websites: str | Sequence[str]
    """Only these websites."""
    splits: str | Sequence[str]
    """Only these splits."""
    harnesses: str | Sequence[str]
    """Only these harnesses."""
    models: str | Sequence[str]
    """Only these models."""
    policy_versions: str | Sequence[str]
    """Only these policy versions."""
    teachers: str | Sequence[str]
    """Only these teachers."""
    statuses: TrajectoryStatus | str | Sequence[TrajectoryStatus | str]
    """Only these: "open", "completed", "failed", "aborted"."""
    labels: Mapping[str, str]
    """Only those that have every one of these labels with this value."""
    outcome_state: RewardState | str
    """Only those whose outcome is "scored", "excluded" or "abstained"."""
    outcome_least: float
    """Only those whose outcome is at least this."""
    outcome_most: float
    """Only those whose outcome is at most this."""
    created_from: dt.datetime
    """Only those created at or after this."""
    created_before: dt.datetime
    """Only those created before this."""
    turns_least: int
    """Only those with at least so many turns."""
    turns_most: int
    """Only those with at most so many turns."""
    tokens_most: int
    """Only those with at most so many tokens in their longest turn."""


def new_trajectory_id() -> str:
    """An id that no other trajectory has; chosen here, so that a create that was cut off can be repeated."""
    return "tr-" + secrets.token_hex(12)


def new_writer() -> str:
    """The name of one writer, kept over its retries."""
    return "w-" + secrets.token_hex(8)


def new_claim_id() -> str:
    """The name of one claim of samples, kept over its retries."""
    return "c-" + secrets.token_hex(12)


def new_annotation_id() -> str:
    """The name of one annotation, kept over its retries."""
    return "a-" + secrets.token_hex(12)


def trajectory_message(task: Task | str | None, options: TrajectoryOptions) -> pb.Trajectory:
    """The description of a new trajectory. A task that is a string is an instance's id.

    Raises:
        InvalidArgument: a value cannot be meant.
        TypeError: an option that does not exist.
    """
    check_names("create", options, TrajectoryOptions)
    plain: dict[str, Any] = {name: value for name, value in options.items() if name in _PLAIN}
    message = pb.Trajectory(
        trajectory_id=options.get("trajectory_id") or new_trajectory_id(),
        tools_json=convert.json_text("tools", list(options["tools"])) if options.get("tools") else "",
        metadata_json=convert.json_text("metadata", options.get("metadata") or None),
        labels=options.get("labels"),
        **plain,
    )
    message.task.CopyFrom(task_message(task))
    return message


def task_message(task: Task | str | None) -> pb.Task:
    """A task on the wire."""
    if task is None or isinstance(task, str):
        task = Task(instance_id=task or "")
    if not isinstance(task, Task):
        raise InvalidArgument.of("task", f"must be a Task or the id of an instance, not {type(task).__name__}")
    return convert.task_message(task)


def filter_message(function: str, given: TrajectoryFilter) -> service_pb.TrajectoryFilter:
    """A filter on the wire.

    Raises:
        InvalidArgument: a value cannot be meant.
        TypeError: a condition that does not exist.
    """
    check_names(function, given, TrajectoryFilter)
    numbers: dict[str, Any] = {name: value for name, value in given.items() if name in _NUMBERS and value is not None}
    message = service_pb.TrajectoryFilter(labels=given.get("labels"), **numbers)
    for name in _LISTS:
        getattr(message, name).extend(_several(given.get(name)))
    message.statuses.extend(convert.status_number("statuses", status) for status in _several(given.get("statuses")))
    if given.get("outcome_state"):
        message.outcome_state = convert.reward_state_number("outcome_state", given["outcome_state"])
    for name in ("created_from", "created_before"):
        moment = given.get(name)
        if moment is not None:
            # What is no time must not pass for "any time".
            if not isinstance(moment, dt.datetime):
                raise InvalidArgument.of(name, f"must be a datetime, not {type(moment).__name__}")
            getattr(message, name).CopyFrom(timestamp(moment))
    return message


def _several(value: Any) -> Sequence[str]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)
