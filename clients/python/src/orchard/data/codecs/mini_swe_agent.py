"""What mini-swe-agent saves of a run: `NAME.traj.json`, format mini-swe-agent-1.1 (2.x of the package).

Messages of chat completions and items of the responses API are both read. The last message, of role `exit`, is no
message of the conversation: it says how the run ended and what was handed in.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from orchard.data.codecs.base import Carries, Codec
from orchard.data.codecs.swebench import submission_step
from orchard.data.messages import step_of
from orchard.data.nodes import Node, compact, parse_object, read_document
from orchard.data.record import Record, valid_id
from orchard.data.report import Report
from orchard.data.timestamps import time_of
from orchard.trajectory.v1 import trajectory_pb2 as pb

FORMATS: Final = ("mini-swe-agent-1.1", "mini-swe-agent-1")
OWN_ENDS: Final = frozenset(
    {"LimitsExceeded", "TimeExceeded", "RepeatedFormatError", "FormatError", "ContextWindowExceededError"}
)
"""Ends that are the agent's own; any other exception is the machinery's."""
_SEPARATE: Final = ("timestamp", "cost", "response")
_MOST_METADATA: Final = 60 << 10


def read(path: Path, report: Report) -> Iterator[Record]:
    """The one trajectory of a file."""
    document = read_document(path)
    version = document.text_of("trajectory_format", FORMATS[0])
    if version not in FORMATS:
        document.need("trajectory_format").fail(f"is {version!r}", f"one of {', '.join(FORMATS)} can be read")
    bodies: dict[str, bytes] = {}
    steps: list[pb.Step] = []
    for message in document.need("messages").array():
        if message.text_of("role") == "exit":
            continue
        steps += _steps(message, len(steps), bodies, report)
    trajectory = _describe(document, path, report)
    info = document.get("info")
    submission = info.get("submission") if info else None
    if submission is not None and submission.text():
        steps.append(submission_step(len(steps), submission.text()))
    report.records += 1
    yield Record(trajectory, steps, (), bodies)


def _steps(message: Node, index: int, bodies: dict[str, bytes], report: Report) -> list[pb.Step]:
    if message.text_of("object") == "response":
        step = _of_response(message, index)
    elif message.text_of("type") == "function_call_output":
        step = pb.Step(index=index, role=pb.ROLE_TOOL, tool_call_id=message.text_of("call_id"))
        step.content.append(pb.Part(text=message.text_of("output")))
    else:
        step = step_of(Node({k: v for k, v in message.object().items() if k != "extra"}, message.where), index, bodies)
    extra = message.get("extra")
    if extra is not None:
        _apply(extra, step, report)
    return [step]


def _of_response(message: Node, index: int) -> pb.Step:
    step = pb.Step(index=index, role=pb.ROLE_ASSISTANT)
    for item in message.items_of("output"):
        kind = item.text_of("type")
        if kind == "message":
            for part in item.items_of("content"):
                step.content.append(pb.Part(text=part.text_of("text")))
        elif kind == "function_call":
            call_id = item.text_of("call_id") or item.text_of("id")
            step.tool_calls.add(call_id=call_id, name=item.text_of("name"), arguments=item.text_of("arguments"))
        elif kind == "reasoning":
            step.reasoning += "".join(part.text_of("text") for part in item.items_of("summary"))
    return step


def _apply(extra: Node, step: pb.Step, report: Report) -> None:
    """What the harness noted beside a message."""
    if extra.get("timestamp") is not None:
        step.time.CopyFrom(time_of(extra.number_of("timestamp")))
    if step.role == pb.ROLE_ASSISTANT:
        step.model_call.cost_usd = extra.number_of("cost")
        response = extra.get("response")
        if response is not None and isinstance(response.value, dict):
            _usage(response, step.model_call)
            report.lost("extra.response", "the raw answer is not kept beyond its usage", extra.where)
    step.is_error = step.role == pb.ROLE_TOOL and bool(extra.text_of("exception_info"))
    rest = {key: value for key, value in extra.object().items() if key not in _SEPARATE}
    if rest:
        kept = compact({**parse_object(step.extra_json), "mini_swe_agent": rest})
        if len(kept.encode()) <= 256 << 10:
            step.extra_json = kept
        else:
            report.lost("extra", "it is larger than 256 KiB", extra.where)


def _usage(response: Node, call: pb.ModelCall) -> None:
    usage = response.get("usage")
    if usage is not None:
        call.prompt_tokens = usage.integer_of("prompt_tokens") or usage.integer_of("input_tokens")
        call.completion_tokens = usage.integer_of("completion_tokens") or usage.integer_of("output_tokens")
        details = usage.get("prompt_tokens_details")
        call.cached_tokens = details.integer_of("cached_tokens") if details else 0
    for choice in response.items_of("choices"):
        call.finish_reason = choice.text_of("finish_reason")


def _describe(document: Node, path: Path, report: Report) -> pb.Trajectory:
    trajectory = pb.Trajectory(harness="mini-swe-agent")
    trajectory.task.instance_id = document.text_of("instance_id")
    stem = path.name.removesuffix(".json").removesuffix(".traj")
    trajectory.trajectory_id = valid_id(trajectory.task.instance_id, stem)
    info = document.get("info")
    status = info.text_of("exit_status") if info else ""
    trajectory.status = end_of(status)
    if trajectory.status != pb.TRAJECTORY_STATUS_COMPLETED:
        trajectory.status_message = status or "it was saved before its end"
    kept: dict[str, Any] = {"trajectory_format": document.text_of("trajectory_format", FORMATS[0])}
    if info:
        kept["info"] = {key: value for key, value in info.object().items() if key != "submission"}
        trajectory.model = _model_name(info)
    kept |= document.others(frozenset({"info", "messages", "instance_id", "trajectory_format"}))
    text = compact({"mini_swe_agent": kept})
    if len(text.encode()) > _MOST_METADATA:
        report.lost("info.config", "it is larger than what metadata may hold", path.name)
        kept.get("info", {}).pop("config", None)
        text = compact({"mini_swe_agent": {"info": kept.get("info", {})}})
    trajectory.metadata_json = text
    return trajectory


def _model_name(info: Node) -> str:
    config = info.get("config")
    model = config.get("model") if config else None
    return model.text_of("model_name") if model else ""


def end_of(exit_status: str) -> pb.TrajectoryStatus.ValueType:
    """How a run ended, by its exit status."""
    if exit_status == "Submitted":
        return pb.TRAJECTORY_STATUS_COMPLETED
    return pb.TRAJECTORY_STATUS_FAILED if exit_status in OWN_ENDS else pb.TRAJECTORY_STATUS_ABORTED


CODEC: Final = Codec(
    name="mini-swe-agent",
    summary="Runs that mini-swe-agent saved (.traj.json, 1.1).",
    carries=frozenset(
        {
            Carries.TOOL_CALLS,
            Carries.REASONING,
            Carries.IMAGES,
            Carries.TIMES,
            Carries.COSTS,
            Carries.METADATA,
            Carries.SUBMISSION,
        }
    ),
    patterns=("*.traj.json", "*.traj"),
    read=read,
)
