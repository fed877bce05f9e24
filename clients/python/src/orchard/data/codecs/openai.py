"""OpenAI chat messages, a conversation a line: `{"messages": [...], "tools": [...], ...}`.

Whatever else a line has is kept as the trajectory's metadata. Written from one of this project's trajectories, a line
has an `orchard` object with its description, so that it comes back whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from orchard.data.codecs.base import Carries, Codec, Container, Row
from orchard.data.messages import inline_images, message_of, step_of
from orchard.data.nodes import Node, compact, parse_object, read_lines
from orchard.data.options import ExportOptions
from orchard.data.protos import from_plain, to_plain
from orchard.data.record import Record, valid_id
from orchard.data.report import Report
from orchard.data.training.conversations import conversations
from orchard.trajectory.v1 import trajectory_pb2 as pb

_KNOWN: Final = frozenset({"messages", "tools", "id", "orchard"})
_ID_KEYS: Final = ("id", "trajectory_id", "custom_id")


def read(path: Path, report: Report) -> Iterator[Record]:
    """A trajectory of each line."""
    for line in read_lines(path):
        bodies: dict[str, bytes] = {}
        steps = [step_of(message, index, bodies) for index, message in enumerate(line.need("messages").array())]
        given = next((line.text_of(key) for key in _ID_KEYS if isinstance(line.object().get(key), str)), "")
        trajectory = _described(line) or pb.Trajectory(status=pb.TRAJECTORY_STATUS_COMPLETED)
        trajectory.trajectory_id = valid_id(given, f"{path.stem}-{line.where.line}")
        if tools := line.get("tools"):
            trajectory.tools_json = compact([tool.object() for tool in tools.array()])
        others = line.others(_KNOWN)
        if given and given != trajectory.trajectory_id:
            others["id"] = given
        if others:
            metadata = {**parse_object(trajectory.metadata_json), "openai": others}
            trajectory.metadata_json = compact(metadata)
        report.records += 1
        yield Record(trajectory, steps, (), bodies)


def _described(line: Node) -> pb.Trajectory | None:
    found = line.get("orchard")
    return None if found is None else from_plain(found, pb.Trajectory())


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
    return first is not None and isinstance(first.value, dict) and isinstance(first.value.get("messages"), list)


CODEC: Final = Codec(
    name="openai",
    summary="OpenAI chat messages, a conversation a line.",
    carries=frozenset(
        {Carries.TOOLS, Carries.TOOL_CALLS, Carries.REASONING, Carries.IMAGES, Carries.REWARDS, Carries.METADATA}
    ),
    lossless=True,
    patterns=("*.jsonl",),
    sniff=sniff,
    read=read,
    rows=rows,
    containers=(Container.JSONL,),
)
