"""Conversations that the OpenHands SDK (v1) keeps: a folder with `base_state.json` and `events/event-NNNNN-ID.json`.

Events that a model sees become messages: actions of one response become one message with their calls. After a
condensation the model sees another history: the events that are left and the summary are copied into a conversation of
their own, as copied context.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from orchard.data.codecs.base import Carries, Codec
from orchard.data.errors import DataError, Where
from orchard.data.messages import add_data_url
from orchard.data.nodes import Node, compact, read_document
from orchard.data.record import Record, valid_id
from orchard.data.report import Report
from orchard.data.timestamps import parse_time
from orchard.trajectory.v1 import trajectory_pb2 as pb

_EVENT: Final = re.compile(r"event-(\d{5,})-([0-9A-Za-z-]+)\.json")
_ROOT: Final = "__root__"
_ENDS: Final = {
    "finished": pb.TRAJECTORY_STATUS_COMPLETED,
    "stuck": pb.TRAJECTORY_STATUS_FAILED,
    "error": pb.TRAJECTORY_STATUS_ABORTED,
}
_ROLES: Final = {
    "system": pb.ROLE_SYSTEM,
    "user": pb.ROLE_USER,
    "assistant": pb.ROLE_ASSISTANT,
    "tool": pb.ROLE_TOOL,
}
_KEPT: Final = ("security_risk", "summary", "critic_result", "activated_skills", "sender", "thinking_blocks")


@dataclass(slots=True)
class _Reading:
    """What is known while events are read."""

    report: Report
    bodies: dict[str, bytes] = field(default_factory=dict)
    steps: list[pb.Step] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)
    """Index of the last step of the conversation as of each event."""
    sources: dict[int, set[str]] = field(default_factory=dict)
    """Events that each step came from."""
    responses: dict[str, int] = field(default_factory=dict)
    """Index of the step of each response."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    last: int = -1
    """Index of the last step."""


def read(path: Path, report: Report) -> Iterator[Record]:
    """The conversation of a folder, or of each folder within it."""
    if not (path / "base_state.json").is_file():
        inner = sorted(state.parent for state in path.glob("*/base_state.json")) if path.is_dir() else []
        if not inner:
            raise DataError("has no base_state.json", where=Where(str(path)), fix="name the folder of a conversation")
        for child in inner:
            yield from read(child, report)
        return
    state = read_document(path / "base_state.json")
    reading = _Reading(report)
    for name in _event_files(path / "events"):
        _event(read_document(name), reading)
    trajectory = _describe(state, path, reading)
    _usage(state, reading)
    report.records += 1
    yield Record(trajectory, reading.steps, (), reading.bodies)


def _event_files(folder: Path) -> list[Path]:
    found: dict[int, Path] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := _EVENT.fullmatch(path.name):
            number = int(match[1])
            if number in found:
                where = Where(str(path))
                raise DataError(f"has the same number as {found[number].name}", where=where, fix="remove one of them")
            found[number] = path
    if sorted(found) != list(range(len(found))):
        missing = next(number for number in range(len(found)) if number not in found)
        raise DataError(f"event {missing} is missing", where=Where(str(folder)), fix="copy the whole folder")
    return [found[number] for number in sorted(found)]


def _event(event: Node, reading: _Reading) -> None:
    event_id, kind = event.need("id").text(), event.need("kind").text()
    parent = event.text_of("parent_id")
    if parent == _ROOT:
        reading.last = -1
    elif parent:
        reading.last = reading.places.get(parent, reading.last)
    match kind:
        case "SystemPromptEvent":
            _system(event, event_id, reading)
        case "MessageEvent":
            _message(event, event_id, reading)
        case "ActionEvent":
            _action(event, event_id, reading)
        case "ObservationEvent" | "AgentErrorEvent" | "UserRejectObservation":
            _observation(event, event_id, kind, reading)
        case "Condensation":
            _condense(event, reading)
        case "TokenEvent":
            _tokens(event, reading)
        case _:
            reading.report.lost(f"event {kind}", "it is no message of the conversation", event.where)
    reading.places[event_id] = reading.last


def _add(event: Node, event_id: str, role: pb.Role.ValueType, reading: _Reading) -> pb.Step:
    step = pb.Step(index=len(reading.steps), role=role)
    if reading.last != step.index - 1:
        step.parent = reading.last
    stamp = event.get("timestamp")
    if stamp is not None:
        try:
            moment, zoned = parse_time(stamp.text())
        except ValueError:
            stamp.fail(f"is {stamp.text()!r}, which is no moment", "write ISO 8601")
        step.time.CopyFrom(moment)
        if not zoned:
            reading.report.lost("timestamp", "it names no time zone: taken as UTC", event.where)
    reading.steps.append(step)
    reading.sources[step.index] = {event_id}
    reading.last = step.index
    return step


def _system(event: Node, event_id: str, reading: _Reading) -> None:
    step = _add(event, event_id, pb.ROLE_SYSTEM, reading)
    for key in ("system_prompt", "dynamic_context"):
        if (prompt := event.get(key)) is not None:
            step.content.append(pb.Part(text=prompt.text_of("text")))
    for tool in event.items_of("tools"):
        reading.tools.append(_tool(tool, reading))


def _tool(tool: Node, reading: _Reading) -> dict[str, Any]:
    """A tool in OpenAI's form. The SDK saves no schema of its parameters, as a rule."""
    if tool.text_of("type") == "function":
        return tool.object()
    name = tool.text_of("name") or tool.text_of("title") or tool.text_of("kind")
    function: dict[str, Any] = {"name": name, "description": tool.text_of("description")}
    schema = tool.get("parameters") or tool.get("inputSchema") or tool.get("input_schema")
    if schema is not None:
        function["parameters"] = schema.object()
    else:
        reading.report.lost("tools.parameters", "the folder does not hold them", tool.where)
    return {"type": "function", "function": function}


def _message(event: Node, event_id: str, reading: _Reading) -> None:
    message = event.need("llm_message")
    role = message.need("role")
    if role.text() not in _ROLES:
        role.fail(f"is {role.text()!r}", f"use one of {', '.join(_ROLES)}")
    step = _add(event, event_id, _ROLES[role.text()], reading)
    step.reasoning = message.text_of("reasoning_content")
    step.tool_call_id, step.name = message.text_of("tool_call_id"), message.text_of("name")
    _content(message, "content", step, reading)
    _content(event, "extended_content", step, reading)
    for call in message.items_of("tool_calls"):
        step.tool_calls.append(_call(call))
    _note_response(event, step, reading)
    _extra(event, step)


def _action(event: Node, event_id: str, reading: _Reading) -> None:
    response = event.text_of("llm_response_id")
    index = reading.responses.get(response, -1)
    if index >= 0 and reading.last == index:
        step = reading.steps[index]
        reading.sources[index].add(event_id)
    else:
        step = _add(event, event_id, pb.ROLE_ASSISTANT, reading)
        _note_response(event, step, reading)
    step.reasoning = step.reasoning or event.text_of("reasoning_content")
    _content(event, "thought", step, reading)
    step.tool_calls.append(_call(event.need("tool_call")))
    _extra(event, step)


def _note_response(event: Node, step: pb.Step, reading: _Reading) -> None:
    if step.role == pb.ROLE_ASSISTANT and (response := event.text_of("llm_response_id")):
        reading.responses[response] = step.index


def _call(call: Node) -> pb.ToolCall:
    made = pb.ToolCall(call_id=call.need("id").text(), name=call.need("name").text())
    made.arguments = call.text_of("arguments")
    return made


def _observation(event: Node, event_id: str, kind: str, reading: _Reading) -> None:
    step = _add(event, event_id, pb.ROLE_TOOL, reading)
    step.name = event.text_of("tool_name")
    step.tool_call_id = event.need("tool_call_id").text()
    if kind == "ObservationEvent":
        observation = event.need("observation")
        is_error = observation.get("is_error")
        step.is_error = is_error is not None and is_error.boolean()
        _content(observation, "content", step, reading)
        _content(event, "extended_content", step, reading)
        rest = observation.others(frozenset({"content", "is_error"}))
        step.extra_json = _bounded({"openhands": {"observation": rest}}, event, reading)
    else:
        step.is_error = True
        text = event.text_of("error") or f"Action rejected: {event.text_of('rejection_reason')}"
        step.content.append(pb.Part(text=text))
        step.extra_json = _bounded({"openhands": {"kind": kind}}, event, reading)


def _content(node: Node, key: str, step: pb.Step, reading: _Reading) -> None:
    for part in node.items_of(key):
        kind = part.text_of("type")
        if kind == "text":
            if part.text_of("text"):
                step.content.append(pb.Part(text=part.text_of("text")))
        elif kind == "image":
            for address in part.items_of("image_urls"):
                if address.text().startswith("data:"):
                    step.content.append(pb.Part(blob=add_data_url(address.text(), address, reading.bodies)))
                else:
                    reading.report.lost("image", "it lies at an address and is not fetched", address.where)
        else:
            reading.report.lost(f"content of type {kind}", "there is no place for it", part.where)


def _extra(event: Node, step: pb.Step) -> None:
    kept = {key: event.object()[key] for key in _KEPT if event.object().get(key) not in (None, [], "UNKNOWN")}
    if kept and not step.extra_json:
        text = compact({"openhands": kept})
        step.extra_json = text if len(text.encode()) <= 256 << 10 else ""


def _bounded(value: dict[str, Any], event: Node, reading: _Reading) -> str:
    text = compact(value)
    if len(text.encode()) <= 256 << 10:
        return text
    reading.report.lost("observation", "beyond its content it is larger than 256 KiB", event.where)
    return ""


def _condense(event: Node, reading: _Reading) -> None:
    """Begin the conversation that the model sees from here on: what is left of the one before, and the summary."""
    forgotten = {one.text() for one in event.items_of("forgotten_event_ids")}
    left: list[pb.Step] = []
    index = reading.last
    while index >= 0:
        step = reading.steps[index]
        if not reading.sources[index] <= forgotten:
            left.append(step)
        index = step.parent if step.HasField("parent") else index - 1
    left.reverse()
    summary = event.text_of("summary")
    offset = event.get("summary_offset")
    reading.last = -1
    for position in range(len(left) + 1):
        if summary and offset is not None and position == min(offset.integer(), len(left)):
            _copy(pb.Step(role=pb.ROLE_USER, content=[pb.Part(text=summary)]), set(), reading)
        if position < len(left):
            _copy(left[position], reading.sources[left[position].index], reading)


def _copy(step: pb.Step, sources: set[str], reading: _Reading) -> None:
    made = pb.Step()
    made.CopyFrom(step)
    made.index, made.copied_context = len(reading.steps), True
    made.ClearField("parent")
    made.ClearField("model_call")
    if reading.last != made.index - 1:
        made.parent = reading.last
    reading.steps.append(made)
    reading.sources[made.index] = set(sources)
    reading.last = made.index


def _tokens(event: Node, reading: _Reading) -> None:
    """Tokens of the last response: the SDK tells them after its actions and what these gave."""
    index = reading.last
    while index >= 0:
        step = reading.steps[index]
        if step.role == pb.ROLE_ASSISTANT and not step.copied_context:
            break
        index = step.parent if step.HasField("parent") else index - 1
    if index < 0 or len(reading.steps[index].model_call.completion_token_ids):
        reading.report.lost("event TokenEvent", "no response is there that it could belong to", event.where)
        return
    call = reading.steps[index].model_call
    call.prompt_token_ids.extend(token.integer() for token in event.items_of("prompt_token_ids"))
    call.completion_token_ids.extend(token.integer() for token in event.items_of("response_token_ids"))


def _describe(state: Node, path: Path, reading: _Reading) -> pb.Trajectory:
    trajectory = pb.Trajectory(harness="openhands")
    trajectory.trajectory_id = valid_id(state.text_of("id"), path.name)
    status = state.text_of("execution_status", "idle")
    trajectory.status = _ENDS.get(status, pb.TRAJECTORY_STATUS_ABORTED)
    if status != "finished":
        trajectory.status_message = f"the conversation was {status}"
    agent = state.get("agent")
    model = agent.get("llm") if agent else None
    trajectory.model = model.text_of("model") if model else ""
    if reading.tools:
        trajectory.tools_json = compact(reading.tools)
    tags = state.get("tags")
    kept: dict[str, Any] = {"execution_status": status}
    if tags is not None and tags.object():
        kept["tags"] = tags.object()
    trajectory.metadata_json = compact({"openhands": kept})
    return trajectory


def _usage(state: Node, reading: _Reading) -> None:
    """Tokens and costs of each response, where the state has them."""
    stats = state.get("stats")
    metrics = stats.get("usage_to_metrics") if stats else None
    for key in metrics.object() if metrics else ():
        usage = metrics.need(key) if metrics else state
        for one in usage.items_of("token_usages"):
            index = reading.responses.get(one.text_of("response_id"), -1)
            if index < 0:
                continue
            call = reading.steps[index].model_call
            call.prompt_tokens = one.integer_of("prompt_tokens")
            call.completion_tokens = one.integer_of("completion_tokens")
            call.cached_tokens = one.integer_of("cache_read_tokens")
        if usage.number_of("accumulated_cost"):
            reading.report.lost("stats.accumulated_cost", "it is not told by response", usage.where)


def sniff(path: Path) -> bool:
    """Whether a folder holds a conversation, or conversations."""
    return path.is_dir() and next(path.glob("*/base_state.json"), path / "base_state.json").is_file()


CODEC: Final = Codec(
    name="openhands",
    summary="Conversations of the OpenHands SDK (a folder with base_state.json and events/).",
    carries=frozenset(
        {
            Carries.TOOLS,
            Carries.TOOL_CALLS,
            Carries.REASONING,
            Carries.IMAGES,
            Carries.TOKENS,
            Carries.TIMES,
            Carries.BRANCHES,
            Carries.METADATA,
        }
    ),
    sniff=sniff,
    read=read,
)
