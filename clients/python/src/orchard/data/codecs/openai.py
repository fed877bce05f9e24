"""OpenAI chat messages, a conversation a line: `{"messages": [...], "tools": [...], ...}`.

Whatever else a line has is kept as the trajectory's metadata; what has a place in a description, such as a reward, is
told to be no more than that. Written from one of this project's trajectories, a line
has an `orchard` object with its description, so that it comes back whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from orchard.data.codecs.base import Carries, Codec, Container, Row
from orchard.data.messages import inline_images, message_of, step_of
from orchard.data.nodes import Node, compact, parse_object, read_lines
from orchard.data.options import ExportOptions
from orchard.data.protos import to_plain, trajectory_of
from orchard.data.record import Record, valid_id
from orchard.data.report import Report
from orchard.data.training.conversations import conversations
from orchard.trajectory.v1 import trajectory_pb2 as pb

_KNOWN: Final = frozenset({"messages", "tools", "id", "orchard"})
_REWARDS: Final = frozenset({"reward", "rewards", "score", "outcome"})
_REWARD_PLACE: Final = '{"rewards": [{"name": "outcome", "state": "REWARD_STATE_SCORED", "value": 1}]}'
_TASK: Final = frozenset(field.name for field in pb.Task.DESCRIPTOR.fields)
_DESCRIPTION: Final = frozenset(
    {"attempt", "group_id", "harness", "labels", "model", "policy_version", "rollout_id", "status", "teacher"}
)
"""Fields of a description that a line may have in the wrong place."""
_ID_KEYS: Final = ("id", "trajectory_id", "custom_id")


def read(path: Path, report: Report) -> Iterator[Record]:
    """A trajectory of each line."""
    for line in read_lines(path):
        bodies: dict[str, bytes] = {}
        steps = [step_of(message, index, bodies) for index, message in enumerate(line.need("messages").array())]
        given = next((line.text_of(key) for key in _ID_KEYS if isinstance(line.object().get(key), str)), "")
        trajectory = _described(line)
        trajectory.trajectory_id = valid_id(given, f"{path.stem}-{line.where.line}")
        if tools := line.get("tools"):
            trajectory.tools_json = compact([tool.object() for tool in tools.array()])
        others = line.others(_KNOWN)
        if given and given != trajectory.trajectory_id:
            others["id"] = given
        if others:
            _tell_metadata(others, trajectory, line, report)
            metadata = {**parse_object(trajectory.metadata_json), "openai": others}
            trajectory.metadata_json = compact(metadata)
        report.records += 1
        yield Record(trajectory, steps, (), bodies, line.where)


def _described(line: Node) -> pb.Trajectory:
    found = line.get("orchard")
    made = pb.Trajectory() if found is None else trajectory_of(found)
    if made.status == pb.TRAJECTORY_STATUS_UNSPECIFIED:
        # Open are only those that say so: nobody writes what stands in a file.
        made.status = pb.TRAJECTORY_STATUS_COMPLETED
    return made


def _tell_metadata(others: Mapping[str, Any], trajectory: pb.Trajectory, line: Node, report: Report) -> None:
    """Report what is kept as metadata, and says what a description has a place for that is empty."""
    for key in others:
        if key in _REWARDS:
            place, there = _REWARD_PLACE, bool(trajectory.rewards)
        elif key in _TASK:
            place, there = f'{{"task": {{"{key}": ...}}}}', bool(getattr(trajectory.task, key))
        elif key in _DESCRIPTION:
            place, there = f'{{"{key}": ...}}', key in {field.name for field, _ in trajectory.ListFields()}
        else:
            continue
        if not there:
            why = f'it is kept as metadata, which nothing filters, counts or trains by; give it as "orchard": {place}'
            report.lost(key, why, line.where)


def rows(record: Record, options: ExportOptions, report: Report) -> Iterator[Row]:
    """A row for each conversation."""
    del options
    found = conversations(record)
    for conversation in found:
        image = inline_images(record.bodies)
        messages = [message_of(record.steps[index], record.bodies, image) for index in conversation.path]
        value: dict[str, Any] = {"id": row_id(record, conversation.number, len(found)), "messages": messages}
        if record.trajectory.tools_json:
            value["tools"] = json.loads(record.trajectory.tools_json)
        metadata = parse_object(record.trajectory.metadata_json)
        value |= metadata.pop("openai", {})
        described = pb.Trajectory()
        described.CopyFrom(record.trajectory)
        for name in ("trajectory_id", "tools_json", "metadata_json"):
            described.ClearField(name)
        if metadata:
            described.metadata_json = compact(metadata)
        value["orchard"] = to_plain(described)
        yield Row(value, str(value["id"]))
    note_losses(record, report)


def row_id(record: Record, number: int, count: int) -> str:
    """The id of a trajectory's conversation."""
    return record.id if count == 1 else f"{record.id}.b{number}"


def note_losses(record: Record, report: Report) -> None:
    """What of a record OpenAI's messages have no place for."""
    if len(record.values):
        report.lost("values", "messages have no place for them", record.id)
    for step in record.steps:
        if step.HasField("model_call"):
            report.lost("model_call", "messages have no place for tokens, log-probs and costs", record.id)
        if step.HasField("time"):
            report.lost("time", "messages have no place for it", record.id)
        if step.is_error:
            report.lost("is_error", "messages have no place for it", record.id)


def sniff(path: Path) -> bool:
    """Whether the first line has messages."""
    first = next(read_lines(path), None)
    return first is not None and fits(first.value)


def fits(value: Any) -> bool:
    """Whether the value of a line has messages."""
    return isinstance(value, dict) and isinstance(value.get("messages"), list)


CODEC: Final = Codec(
    name="openai",
    summary="OpenAI chat messages, a conversation a line.",
    carries=frozenset(
        {Carries.TOOLS, Carries.TOOL_CALLS, Carries.REASONING, Carries.IMAGES, Carries.REWARDS, Carries.METADATA}
    ),
    lossless=True,
    patterns=("*.jsonl",),
    sniff=sniff,
    fits=fits,
    read=read,
    rows=rows,
    containers=(Container.JSONL,),
)
