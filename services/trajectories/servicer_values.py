"""Between the wire and the values of model.py, with the field rules."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Final

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from orchard.trajectory.v1 import trajectory_pb2, trajectory_service_pb2

from services.common.validation import Fields
from services.trajectories.model import (
    TEXT_FIELDS,
    Annotation,
    Description,
    Dimension,
    Filter,
    Order,
    PassAtK,
    Range,
    Reward,
    RewardState,
    Stats,
    Status,
    StepValue,
    Trajectory,
)
from services.trajectories.servicer_steps import SHA256, check_json

ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
ID_RULE: Final = "must be 1 to 128 of A-Z, a-z, 0-9, '-', '_', '.', beginning with a letter or digit"
_NAME: Final = re.compile(r"[a-z0-9_-]{1,64}\Z")
_TRACE: Final = re.compile(r"([0-9a-f]{32})?\Z")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_TASK_FIELDS: Final = ("dataset", "instance_id", "repo", "website", "split")
_OWN_FIELDS: Final = (*(name for name in TEXT_FIELDS if name not in _TASK_FIELDS), "tools_json", "metadata_json")
_REWARD_TEXTS: Final = ("reason", "judge", "rubric", "version", "details_json")
_SHORT: Final = {"rollout_id", "group_id", "harness", "policy_version", "sandbox_id"}
_LISTS: Final = {
    "trajectory_id": "trajectory_ids",
    "rollout_id": "rollout_ids",
    "group_id": "group_ids",
    "dataset": "datasets",
    "instance_id": "instance_ids",
    "repo": "repos",
    "website": "websites",
    "split": "splits",
    "harness": "harnesses",
    "model": "models",
    "policy_version": "policy_versions",
    "teacher": "teachers",
}


def check_id(fields: Fields, field: str, value: str, *, optional: bool = False) -> None:
    """A trajectory's or group's id."""
    if optional and not value:
        return
    fields.check(ID.match(value) is not None, field, ID_RULE if value else "is required")


def check_texts(fields: Fields, field: str, texts: Sequence[str]) -> None:
    """What may be selected: at most 1,000 texts, none longer than any that is kept."""
    if fields.check(len(texts) <= 1000, field, "must be at most 1,000"):
        for position, text in enumerate(texts):
            fields.text(f"{field}[{position}]", text, maximum=256)


def check_sha256(fields: Fields, field: str, value: str) -> None:
    """The hash of a body."""
    fields.check(SHA256.match(value) is not None, field, "must be 64 of 0-9, a-f")


def description(message: trajectory_pb2.Trajectory) -> Description:
    """What a create says.

    Raises:
        InvalidArgumentError: a field breaks its rule.
    """
    fields = Fields()
    check_id(fields, "trajectory.trajectory_id", message.trajectory_id, optional=True)
    texts = {name: getattr(message.task if name in _TASK_FIELDS else message, name) for name in TEXT_FIELDS}
    for name, text in texts.items():
        where = f"trajectory.task.{name}" if name in _TASK_FIELDS else f"trajectory.{name}"
        fields.text(where, text, maximum=128 if name in _SHORT else 64 if name == "split" else 256)
    fields.check(_TRACE.match(message.trace_id) is not None, "trajectory.trace_id", "must be 32 of 0-9, a-f")
    fields.check(message.attempt >= 0, "trajectory.attempt", "must not be negative")
    fields.labels("trajectory.labels", message.labels)
    check_json(fields, "trajectory.tools_json", message.tools_json, list, 512 << 10)
    check_json(fields, "trajectory.metadata_json", message.metadata_json, dict, 64 << 10)
    fields.done()
    return Description(
        trajectory_id=message.trajectory_id,
        attempt=message.attempt,
        tools_json=message.tools_json,
        metadata_json=message.metadata_json,
        labels=dict(message.labels),
        **texts,
    )


def check_end(fields: Fields, status: int, message: str, *, opened: bool = False) -> None:
    """How a trajectory ends; with `opened` it may also stay open."""
    names = ("OPEN", "COMPLETED", "FAILED", "ABORTED")[0 if opened else 1 :]
    known = status in {Status[name].value for name in names}
    fields.check(known, "status", f"must be {', '.join(names[:-1])} or {names[-1]}")
    fields.text("message", message, maximum=4096)


def trajectory_message(found: Trajectory) -> trajectory_pb2.Trajectory:
    """The wire form."""
    message = trajectory_pb2.Trajectory()
    write_trajectory(message, found)
    return message


def write_trajectory(message: trajectory_pb2.Trajectory, found: Trajectory) -> None:
    """The wire form, into an empty message that may be a part of another: what is put together from messages is copied,
    and what is set field by field costs half as much.
    """
    said, totals = found.description, found.totals
    message.trajectory_id = said.trajectory_id
    message.tenant = found.tenant
    message.task.SetInParent()
    _write_texts(message, said, _OWN_FIELDS)
    _write_texts(message.task, said, _TASK_FIELDS)
    message.attempt = said.attempt
    if said.labels:
        message.labels.update(said.labels)
    message.status = found.status.value  # type: ignore[assignment]  # the numbers are the proto's
    if found.status_message:
        message.status_message = found.status_message
    for reward in found.rewards:
        written = message.rewards.add()
        _write_reward(written, reward)
        if reward is found.outcome:
            message.outcome.CopyFrom(written)
    wire = message.totals
    wire.steps, wire.turns, wire.text_bytes = totals.steps, totals.turns, totals.text_bytes
    wire.prompt_tokens, wire.completion_tokens = totals.prompt_tokens, totals.completion_tokens
    wire.cached_tokens, wire.cost_usd = totals.cached_tokens, totals.cost_usd
    _write_time(message.create_time, found.create_time)
    if found.seal_time is not None:
        _write_time(message.seal_time, found.seal_time)
    message.content_hash = found.content_hash


def _write_texts(message: Message, value: object, names: Sequence[str]) -> None:
    """Those texts of a value that say something; most are empty."""
    for name in names:
        if text := getattr(value, name):
            setattr(message, name, text)


def reward_message(reward: Reward) -> trajectory_pb2.Reward:
    """The wire form."""
    message = trajectory_pb2.Reward()
    _write_reward(message, reward)
    return message


def _write_reward(message: trajectory_pb2.Reward, reward: Reward) -> None:
    message.name = reward.name
    message.state = reward.state.value  # type: ignore[assignment]
    message.value = reward.value or 0.0
    _write_texts(message, reward, _REWARD_TEXTS)
    if reward.time is not None:
        _write_time(message.time, reward.time)


def step_value_message(value: StepValue) -> trajectory_pb2.StepValue:
    """The wire form."""
    return trajectory_pb2.StepValue(
        index=value.index, name=value.name, value=value.value, judge=value.judge, version=value.version
    )


def annotation(request: trajectory_service_pb2.AnnotateTrajectoryRequest) -> Annotation:
    """What an annotation says.

    Raises:
        InvalidArgumentError: a field breaks its rule.
    """
    fields = Fields()
    check_id(fields, "trajectory_id", request.trajectory_id)
    fields.token_id("annotation_id", request.annotation_id, optional=True)
    fields.labels("labels", request.labels)
    fields.check(len(request.rewards) <= 100, "rewards", "must be at most 100")
    fields.check(len(request.step_values) <= 10_000, "step_values", "must be at most 10,000")
    something = bool(request.rewards or request.step_values or request.labels)
    fields.check(something, "rewards", "the annotation is empty; give rewards, step_values or labels")
    for position, reward in enumerate(request.rewards):
        _check_reward(fields, f"rewards[{position}]", reward)
    for position, value in enumerate(request.step_values):
        where = f"step_values[{position}]"
        fields.check(value.index >= 0, f"{where}.index", "must not be negative")
        fields.check(math.isfinite(value.value), f"{where}.value", "must be a finite number")
        _check_source(fields, where, value)
    fields.done()
    return Annotation(
        request.annotation_id,
        tuple(_reward(reward) for reward in request.rewards),
        tuple(StepValue(v.index, v.name, v.value, v.judge, v.version) for v in request.step_values),
        dict(request.labels),
    )


def annotation_message(found: Annotation) -> trajectory_service_pb2.Annotation:
    """The wire form."""
    return trajectory_service_pb2.Annotation(
        annotation_id=found.annotation_id,
        rewards=map(reward_message, found.rewards),
        step_values=map(step_value_message, found.step_values),
        labels=found.labels,
        time=timestamp(found.time),
    )


def filter_of(message: trajectory_service_pb2.TrajectoryFilter) -> Filter:
    """The filter.

    Raises:
        InvalidArgumentError: a field breaks its rule.
    """
    fields = Fields()
    for name in _LISTS.values():
        check_texts(fields, f"filter.{name}", getattr(message, name))
    fields.labels("filter.labels", message.labels)
    _known(fields, "filter.statuses", message.statuses, Status)
    if message.outcome_state:
        _known(fields, "filter.outcome_state", [message.outcome_state], RewardState)
    for name in ("created_from", "created_before"):
        if message.HasField(name):  # type: ignore[arg-type]
            fields.timestamp(f"filter.{name}", getattr(message, name))
    fields.done()

    def optional(name: str) -> float | None:
        return getattr(message, name) if message.HasField(name) else None  # type: ignore[arg-type]

    tokens = optional("tokens_most")
    return Filter(
        texts={column: tuple(getattr(message, name)) for column, name in _LISTS.items() if getattr(message, name)},
        statuses=tuple(Status(status) for status in message.statuses),
        labels=dict(message.labels),
        outcome_state=RewardState(message.outcome_state) if message.outcome_state else None,
        outcome=Range(optional("outcome_least"), optional("outcome_most")),
        turns=Range(optional("turns_least"), optional("turns_most")),
        tokens_most=None if tokens is None else int(tokens),
        created_from=moment(message.created_from) if message.HasField("created_from") else None,
        created_before=moment(message.created_before) if message.HasField("created_before") else None,
    )


def order_of(fields: Fields, number: int) -> Order:
    """The order of a list."""
    known = fields.check(0 <= number <= max(order.value for order in Order), "order", "is not a known order")
    return Order(number or Order.CREATED.value) if known else Order.CREATED


def dimension_of(fields: Fields, number: int, label: str) -> Dimension:
    """What counts are grouped by."""
    dimensions = list(Dimension)
    if not fields.check(0 <= number < len(dimensions), "group_by", "is not a known dimension"):
        return Dimension.ALL
    if dimensions[number] is Dimension.LABEL:
        fields.check(bool(label), "label", "is required to group by a label")
        fields.labels("label", {label: ""} if label else {})
    return dimensions[number]


def stats_message(row: Stats) -> trajectory_service_pb2.Stats:
    """The wire form."""
    return trajectory_service_pb2.Stats(
        value=row.value,
        trajectories=row.trajectories,
        open=row.open,
        aborted=row.aborted,
        scored=row.scored,
        resolved=row.resolved,
        resolve_rate=row.resolved / row.scored if row.scored else None,
        mean_turns=row.mean_turns,
        mean_tokens=row.mean_tokens,
        cost_usd=row.cost_usd,
        pass_at_k=map(_pass_message, row.pass_at_k),
    )


def timestamp(time: datetime | None) -> Timestamp | None:
    """A Timestamp; None of None."""
    if time is None:
        return None
    message = Timestamp()
    _write_time(message, time)
    return message


def _write_time(message: Timestamp, time: datetime) -> None:
    since = time - _EPOCH  # as Timestamp.FromDatetime, in a fifth of its time
    message.seconds = since.days * 86_400 + since.seconds
    message.nanos = since.microseconds * 1000


def moment(message: Timestamp) -> datetime:
    """The time of a Timestamp."""
    return message.ToDatetime(tzinfo=UTC)


def _pass_message(family: PassAtK) -> trajectory_service_pb2.PassAtK:
    return trajectory_service_pb2.PassAtK(
        k=family.k, instances=family.instances, any=family.any, power=family.power, all=family.all
    )


def _reward(message: trajectory_pb2.Reward) -> Reward:
    state = RewardState(message.state)
    return Reward(
        name=message.name,
        state=state,
        value=message.value if state is RewardState.SCORED else None,
        reason=message.reason,
        judge=message.judge,
        rubric=message.rubric,
        version=message.version,
        details_json=message.details_json,
    )


def _check_reward(fields: Fields, where: str, reward: trajectory_pb2.Reward) -> None:
    _check_source(fields, where, reward)
    fields.text(f"{where}.rubric", reward.rubric, maximum=256)
    fields.text(f"{where}.reason", reward.reason, maximum=4096)
    check_json(fields, f"{where}.details_json", reward.details_json, object, 64 << 10)
    _known(fields, f"{where}.state", [reward.state], RewardState)
    fields.check(math.isfinite(reward.value), f"{where}.value", "must be a finite number")
    if reward.state != trajectory_pb2.REWARD_STATE_SCORED:
        fields.check(reward.value == 0, f"{where}.value", "only a SCORED reward has a value; a missing one is never 0")
        fields.check(bool(reward.reason), f"{where}.reason", "is required where there is no score")


def _check_source(fields: Fields, where: str, message: trajectory_pb2.Reward | trajectory_pb2.StepValue) -> None:
    fields.check(_NAME.match(message.name) is not None, f"{where}.name", "must be 1 to 64 of a-z, 0-9, '-', '_'")
    fields.text(f"{where}.judge", message.judge, maximum=256)
    fields.text(f"{where}.version", message.version, maximum=128)


def _known(fields: Fields, field: str, numbers: Iterable[int], kind: type[Status | RewardState]) -> None:
    known = {member.value for member in kind}
    names = ", ".join(member.name for member in kind)
    fields.check(all(number in known for number in numbers), field, f"must be {names}")
