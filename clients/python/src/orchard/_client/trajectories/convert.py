"""Between the values of types.py and their messages. Nothing is lost either way."""

from __future__ import annotations

import enum
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from orchard._client.convert import enum_value, time_of
from orchard._client.errors import InvalidArgument
from orchard._client.trajectories import types
from orchard._client.units import timestamp
from orchard.trajectory.v1 import trajectory_pb2 as pb
from orchard.trajectory.v1 import trajectory_service_pb2 as service_pb

TEXT_INLINE_BYTES: Final = 64 << 10
"""Longer texts are bodies of their own."""


def json_text(field: str, value: Any) -> str:
    """A JSON text; empty for None.

    Raises:
        InvalidArgument: it cannot be JSON.
    """
    if value is None:
        return ""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidArgument.of(field, f"cannot be written as JSON: {error}") from None


def json_value(text: str, empty: Any) -> Any:
    """The value of a JSON text."""
    return json.loads(text) if text else empty


def task_message(task: types.Task) -> pb.Task:
    """To the wire."""
    return pb.Task(
        dataset=task.dataset, instance_id=task.instance_id, repo=task.repo, website=task.website, split=task.split
    )


def task_of(message: pb.Task) -> types.Task:
    """From the wire."""
    return types.Task(
        instance_id=message.instance_id,
        dataset=message.dataset,
        repo=message.repo,
        website=message.website,
        split=message.split,
    )


def number_of(field: str, enumeration: Any, prefix: str, kind: type[enum.StrEnum], value: str) -> Any:
    """The number of an enum's value by its short name.

    Raises:
        InvalidArgument: there is none.
    """
    number = _numbers(enumeration, prefix, kind).get(str(value))
    if number is None:
        known = ", ".join(one for one in kind if one != "unknown")
        raise InvalidArgument.of(field, f"{str(value)!r} is none of {known}")
    return number


@functools.cache
def _numbers(enumeration: Any, prefix: str, kind: type[enum.StrEnum]) -> Mapping[str, int]:
    """The numbers of an enumeration that the SDK has a name for, by that name."""
    return {one.value: enumeration.Value(f"{prefix}{one.name}") for one in kind if one != "unknown"}


def status_number(field: str, status: types.TrajectoryStatus | str) -> pb.TrajectoryStatus.ValueType:
    """A status on the wire."""
    number: pb.TrajectoryStatus.ValueType = number_of(
        field, pb.TrajectoryStatus, "TRAJECTORY_STATUS_", types.TrajectoryStatus, status
    )
    return number


def reward_state_number(field: str, state: types.RewardState | str) -> pb.RewardState.ValueType:
    """A reward's state on the wire."""
    number: pb.RewardState.ValueType = number_of(field, pb.RewardState, "REWARD_STATE_", types.RewardState, state)
    return number


def blob_message(blob: types.Blob) -> pb.BlobReference:
    """To the wire."""
    return pb.BlobReference(sha256=blob.sha256, size=blob.size, media_type=blob.media_type)


def blob_of(message: pb.BlobReference) -> types.Blob:
    """From the wire."""
    return types.Blob(message.sha256, message.size, message.media_type)


def step_message(step: types.Step) -> tuple[pb.Step, list[types.Body]]:
    """To the wire, and the bodies that it refers to and that must be stored before it. Long texts are bodies too.

    Raises:
        InvalidArgument: a value cannot be meant.
    """
    # Field by field, since a message that is put together from messages has copied them.
    message = pb.Step(role=number_of("role", pb.Role, "ROLE_", types.Role, step.role), parent=step.parent)
    for name in ("reasoning", "tool_call_id", "name", "copied_context", "is_error"):
        if value := getattr(step, name):
            setattr(message, name, value)
    if step.extra is not None:
        message.extra_json = json_text("extra", step.extra)
    for call in step.tool_calls:
        extra_json = json_text("tool_calls.extra", call.extra)
        message.tool_calls.add(call_id=call.call_id, name=call.name, arguments=call.arguments, extra_json=extra_json)
    if step.time is not None:
        message.time.CopyFrom(timestamp(step.time))
    if step.model_call is not None:
        message.model_call.CopyFrom(_model_call_message(step.model_call))
    bodies: list[types.Body] = []
    for part in step.parts:
        _write_part(message.content.add(), part, bodies)
    return message, bodies


def _write_part(message: pb.Part, part: types.Part, bodies: list[types.Body]) -> None:
    if isinstance(part, str):
        if len(part) <= TEXT_INLINE_BYTES and part.isascii():
            message.text = part
            return
        # A lone surrogate, as of a file's name, cannot be sent.
        data = part.encode(errors="replace")
        if len(data) <= TEXT_INLINE_BYTES:
            message.text = data.decode()
            return
        part = types.Body(data, "text/plain")
    if isinstance(part, types.Body):
        bodies.append(part)
        digest = hashlib.sha256(part.data).hexdigest()
        part = types.Blob(digest, len(part.data), part.media_type)
    if not isinstance(part, types.Blob):
        raise InvalidArgument.of("content", f"must be texts, Blob or Body, not {type(part).__name__}")
    message.blob.CopyFrom(blob_message(part))


def _model_call_message(call: types.ModelCall) -> pb.ModelCall:
    return pb.ModelCall(
        model=call.model,
        policy_version=call.policy_version,
        prompt_tokens=call.prompt_tokens,
        completion_tokens=call.completion_tokens,
        cached_tokens=call.cached_tokens,
        cost_usd=call.cost_usd,
        finish_reason=call.finish_reason,
        prompt_token_ids=call.prompt_token_ids,
        completion_token_ids=call.completion_token_ids,
        logprobs=call.logprobs,
        parameters_json=json_text("model_call.parameters", call.parameters),
    )


def step_of(message: pb.Step) -> types.Step:
    """From the wire."""
    content = [blob_of(part.blob) if part.WhichOneof("kind") == "blob" else part.text for part in message.content]
    return types.Step(
        role=enum_value(types.Role, pb.Role, message.role, "ROLE_"),
        content=content[0] if len(content) == 1 else tuple(content),
        reasoning=message.reasoning,
        tool_calls=tuple(
            types.ToolCall(call.call_id, call.name, call.arguments, json_value(call.extra_json, None))
            for call in message.tool_calls
        ),
        tool_call_id=message.tool_call_id,
        name=message.name,
        time=time_of(message, "time"),
        model_call=_model_call_of(message.model_call) if message.HasField("model_call") else None,
        is_error=message.is_error,
        parent=message.parent if message.HasField("parent") else None,
        copied_context=message.copied_context,
        extra=json_value(message.extra_json, None),
        index=message.index,
    )


def _model_call_of(message: pb.ModelCall) -> types.ModelCall:
    return types.ModelCall(
        model=message.model,
        policy_version=message.policy_version,
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        cached_tokens=message.cached_tokens,
        cost_usd=message.cost_usd,
        finish_reason=message.finish_reason,
        prompt_token_ids=tuple(message.prompt_token_ids),
        completion_token_ids=tuple(message.completion_token_ids),
        logprobs=tuple(message.logprobs),
        parameters=json_value(message.parameters_json, None),
    )


def reward_message(reward: types.Reward) -> pb.Reward:
    """To the wire."""
    return pb.Reward(
        name=reward.name,
        state=reward_state_number("state", reward.state),
        value=reward.value or 0.0,
        reason=reward.reason,
        judge=reward.judge,
        rubric=reward.rubric,
        version=reward.version,
        details_json=json_text("details", reward.details),
    )


def reward_of(message: pb.Reward) -> types.Reward:
    """From the wire."""
    state = enum_value(types.RewardState, pb.RewardState, message.state, "REWARD_STATE_")
    return types.Reward(
        name=message.name,
        state=state,
        value=message.value if state is types.RewardState.SCORED else None,
        reason=message.reason,
        judge=message.judge,
        rubric=message.rubric,
        version=message.version,
        details=json_value(message.details_json, None),
        time=time_of(message, "time"),
    )


def value_message(value: types.StepValue) -> pb.StepValue:
    """To the wire."""
    return pb.StepValue(index=value.index, name=value.name, value=value.value, judge=value.judge, version=value.version)


def value_of(message: pb.StepValue) -> types.StepValue:
    """From the wire."""
    return types.StepValue(message.index, message.name, message.value, message.judge, message.version)


def trajectory_of(message: pb.Trajectory) -> types.TrajectoryInfo:
    """From the wire."""
    totals = message.totals
    outcome = reward_of(message.outcome) if message.HasField("outcome") else None
    return types.TrajectoryInfo(
        trajectory_id=message.trajectory_id,
        tenant=message.tenant,
        rollout_id=message.rollout_id,
        group_id=message.group_id,
        attempt=message.attempt,
        task=task_of(message.task),
        harness=message.harness,
        model=message.model,
        policy_version=message.policy_version,
        teacher=message.teacher,
        tools=json_value(message.tools_json, []),
        labels=dict(message.labels.items()),
        status=enum_value(types.TrajectoryStatus, pb.TrajectoryStatus, message.status, "TRAJECTORY_STATUS_"),
        status_message=message.status_message,
        outcome=outcome,
        # One of them is the outcome, so that no more is made of it twice than need be.
        rewards=tuple(
            outcome if outcome is not None and one == message.outcome else reward_of(one) for one in message.rewards
        ),
        totals=types.Totals(
            totals.steps,
            totals.turns,
            totals.prompt_tokens,
            totals.completion_tokens,
            totals.cached_tokens,
            totals.cost_usd,
            totals.text_bytes,
        ),
        sandbox_id=message.sandbox_id,
        trace_id=message.trace_id,
        metadata=json_value(message.metadata_json, {}),
        create_time=time_of(message, "create_time"),
        seal_time=time_of(message, "seal_time"),
        content_hash=message.content_hash,
    )


def annotation_of(message: service_pb.Annotation) -> types.Annotation:
    """From the wire."""
    return types.Annotation(
        annotation_id=message.annotation_id,
        rewards=tuple(map(reward_of, message.rewards)),
        values=tuple(map(value_of, message.step_values)),
        labels=dict(message.labels),
        time=time_of(message, "time"),
    )


def stats_of(message: service_pb.Stats) -> types.TrajectoryStats:
    """From the wire."""
    return types.TrajectoryStats(
        value=message.value,
        trajectories=message.trajectories,
        open=message.open,
        aborted=message.aborted,
        scored=message.scored,
        resolved=message.resolved,
        resolve_rate=message.resolve_rate if message.HasField("resolve_rate") else None,
        mean_turns=message.mean_turns,
        mean_tokens=message.mean_tokens,
        cost_usd=message.cost_usd,
        pass_at_k=tuple(
            types.PassAtK(
                one.k, one.instances, *(getattr(one, n) if one.HasField(n) else None for n in ("any", "power", "all"))
            )
            for one in message.pass_at_k
        ),
    )


def openai_step(message: Mapping[str, Any]) -> types.Step:
    """A step of a message in OpenAI's form: role, content (a string or parts of type text), tool_calls, tool_call_id.

    Raises:
        InvalidArgument: a field is of another type, or it has a part that is no text; give a Step with a Body.
    """
    known = {"role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning"}
    rest = {key: value for key, value in message.items() if key not in known and value is not None}
    content = message.get("content")
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, (list, tuple)):
        raise InvalidArgument.of("tool_calls", f"must be a list of calls, not {type(calls).__name__}")
    return types.Step(
        role=str(message.get("role", "")),
        content=() if content is None else content if isinstance(content, str) else _openai_parts(content),
        reasoning=message.get("reasoning_content") or message.get("reasoning") or "",
        tool_calls=tuple(_openai_call(call) for call in calls),
        tool_call_id=message.get("tool_call_id") or "",
        name=message.get("name") or "",
        extra=rest or None,
    )


def _openai_parts(parts: Any) -> tuple[types.Part, ...]:
    if not isinstance(parts, (list, tuple)):
        raise InvalidArgument.of("content", f"must be a string or a list of parts, not {type(parts).__name__}")
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            raise InvalidArgument.of("content", "only parts of type text can be taken as they are; give a Step")
    return tuple(str(part["text"]) for part in parts)


def _openai_call(call: Any) -> types.ToolCall:
    function = (call.get("function") or {}) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        form = '{"id": ..., "function": {"name": ..., "arguments": ...}}'
        raise InvalidArgument.of("tool_calls", f"each must be {form}, not {type(call).__name__}")
    return types.ToolCall(str(call.get("id", "")), str(function.get("name", "")), str(function.get("arguments", "")))


def openai_call(call: types.ToolCall | pb.ToolCall) -> dict[str, Any]:
    """A tool call in OpenAI's form."""
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def openai_message(
    step: types.Step | pb.Step,
    role: str,
    content: Any,
    *,
    reasoning_field: str = "reasoning_content",
    call: Callable[[Any], dict[str, Any]] = openai_call,
) -> dict[str, Any]:
    """A step as a message in OpenAI's form; fields that are empty are left out.

    Args:
        step: a value, or the message of the wire.
        role: its role in that form.
        content: what stands for its content.
        reasoning_field: where its reasoning goes.
        call: makes the form of a tool call.
    """
    message: dict[str, Any] = {"role": role, "content": content}
    if step.reasoning:
        message[reasoning_field] = step.reasoning
    if step.tool_calls:
        message["tool_calls"] = [call(one) for one in step.tool_calls]
    for name in ("tool_call_id", "name"):
        if getattr(step, name):
            message[name] = getattr(step, name)
    return message
