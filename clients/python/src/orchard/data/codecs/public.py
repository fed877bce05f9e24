"""The layout of the public Orchard dataset: `swe`, a trajectory a row, and `gui`, a decision a row.

swe: `tools` (a string), `messages` with `tool_calls`, `metadata` (a JSON string with `verify_status`).
gui: `messages`, `images`, `reward`, `status`, `metadata`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from orchard.data import schemas
from orchard.data.bodies import media_type_of
from orchard.data.codecs.base import Carries, Codec, Container, Row
from orchard.data.errors import NoExampleError, Where
from orchard.data.messages import add_data_url, step_of
from orchard.data.nodes import Node, compact, parse_object, read_lines
from orchard.data.options import ExportOptions
from orchard.data.parquet import read_rows
from orchard.data.record import Record, blob_of, valid_id
from orchard.data.report import Report
from orchard.data.training.conversations import conversations, turns
from orchard.data.training.examples import IMAGE, plain_messages, refuse_unusable
from orchard.rewards.scores import Abstained, Excluded, Scored
from orchard.trajectory.v1 import trajectory_pb2 as pb

PASSED: Final = frozenset({"passed", "pass", "success", "resolved", "true"})
FAILED: Final = frozenset({"failed", "fail", "failure", "unresolved", "false"})
_TASK: Final = ("dataset", "instance_id", "repo", "website", "split")


def _lines(path: Path) -> Iterator[Node]:
    if path.suffix == ".parquet":
        for number, row in enumerate(read_rows(path), 1):
            yield Node(row, Where(str(path), number))
    else:
        yield from read_lines(path)


def read_swe(path: Path, report: Report) -> Iterator[Record]:
    """A trajectory of each row."""
    for line in _lines(path):
        bodies: dict[str, bytes] = {}
        steps = [step_of(_without_nulls(one), index, bodies) for index, one in enumerate(line.need("messages").array())]
        metadata = _metadata(line)
        trajectory = _described(metadata, path, line)
        trajectory.tools_json = line.text_of("tools")
        trajectory.outcome.CopyFrom(_verdict(metadata.get("verify_status"), line, report))
        trajectory.rewards.append(trajectory.outcome)
        report.records += 1
        yield Record(trajectory, steps, (), bodies, line.where)


def _without_nulls(message: Node) -> Node:
    """A message without the empty fields that columns give every row."""
    value = {key: item for key, item in message.object().items() if item is not None and item != []}
    return Node(value, message.where)


def _metadata(line: Node) -> dict[str, Any]:
    text = line.text_of("metadata")
    try:
        value = json.loads(text) if text else {}
    except ValueError:
        line.need("metadata").fail("is no JSON", "it is an object in a string")
    if not isinstance(value, dict):
        line.need("metadata").fail("is no object in a string")
    return value


def _described(metadata: dict[str, Any], path: Path, line: Node) -> pb.Trajectory:
    trajectory = pb.Trajectory(status=pb.TRAJECTORY_STATUS_COMPLETED)
    given = metadata.get("trajectory_id")
    name = f"{path.stem}-{line.where.line}"
    trajectory.trajectory_id = valid_id(given if isinstance(given, str) else "", name)
    for key in _TASK:
        if isinstance(metadata.get(key), str):
            setattr(trajectory.task, key, metadata[key][: 64 if key == "split" else 256])
    for key in ("model", "harness", "teacher", "group_id"):
        if isinstance(metadata.get(key), str):
            setattr(trajectory, key, metadata[key][:128])
    trajectory.metadata_json = compact({"public": metadata}) if metadata else ""
    return trajectory


def _verdict(status: Any, line: Node, report: Report) -> pb.Reward:
    text = str(status).lower()
    if text in PASSED | FAILED:
        value = 1.0 if text in PASSED else -1.0
        return pb.Reward(name="outcome", judge="tests", state=pb.REWARD_STATE_SCORED, value=value)
    report.lost("metadata.verify_status", f"{status!r} is no verdict: the outcome is undecided", line.where)
    reason = f"verify_status is {status!r}"
    return pb.Reward(name="outcome", judge="tests", state=pb.REWARD_STATE_ABSTAINED, reason=reason)


def swe_rows(record: Record, options: ExportOptions, report: Report) -> Iterator[Row]:
    """A row for each conversation."""
    del options
    refuse_open(record)
    found = [(one, *plain_messages(record, one.path)) for one in conversations(record)]
    for conversation, messages, images in found:
        if images:
            raise NoExampleError("it has images; swe holds text")
        for index, message in zip(conversation.path, messages, strict=True):
            if not record.steps[index].content:
                message["content"] = None
            for key in ("reasoning_content", "name"):
                if message.pop(key, None):
                    report.lost(key, "the layout has no column for it", record.id)
        name = record.id if len(found) == 1 else f"{record.id}.b{conversation.number}"
        metadata = _public_metadata(record, name)
        value = {"tools": record.trajectory.tools_json, "messages": messages, "metadata": compact(metadata)}
        yield Row(value, name)


def refuse_open(record: Record) -> None:
    """Raise NoExampleError for a trajectory that is still open or was aborted."""
    if record.score is None or isinstance(record.score, Scored):
        refuse_unusable(record)
    elif record.trajectory.status in {pb.TRAJECTORY_STATUS_OPEN, pb.TRAJECTORY_STATUS_ABORTED}:
        raise NoExampleError("it is still open or was aborted")


def _public_metadata(record: Record, name: str) -> dict[str, Any]:
    trajectory, score = record.trajectory, record.score
    metadata = parse_object(trajectory.metadata_json).get("public")
    if metadata is not None:
        return dict(metadata)
    status = {True: "passed", False: "failed", None: "unverified"}[record.resolved]
    if isinstance(score, (Excluded, Abstained)):
        status = "undecided"
    made: dict[str, Any] = {"trajectory_id": name, "verify_status": status}
    made |= {key: getattr(trajectory.task, key) for key in _TASK if getattr(trajectory.task, key)}
    made |= {
        key: getattr(trajectory, key) for key in ("model", "harness", "teacher", "group_id") if getattr(trajectory, key)
    }
    return made


def read_gui(path: Path, report: Report) -> Iterator[Record]:
    """A trajectory of each row: a decision, and what led to it."""
    for line in _lines(path):
        bodies: dict[str, bytes] = {}
        images = [_image(one, bodies) for one in line.items_of("images")]
        messages = list(line.need("messages").array())
        steps = [_gui_step(one, index, images, bodies) for index, one in enumerate(messages)]
        if images:
            line.need("images").fail(f"has {len(images)} more than the messages have places for", f"mark each {IMAGE}")
        # Earlier decisions have rows of their own.
        for step in steps[:-1]:
            step.copied_context = step.role == pb.ROLE_ASSISTANT
        metadata = _metadata(line)
        trajectory = _described(metadata, path, line)
        if line.get("reward") is not None:
            reward = pb.Reward(name="outcome", state=pb.REWARD_STATE_SCORED, value=line.number_of("reward"))
            trajectory.outcome.CopyFrom(reward)
            trajectory.rewards.append(reward)
        kept = parse_object(trajectory.metadata_json) | {"public_status": line.text_of("status")}
        trajectory.metadata_json = compact(kept)
        report.records += 1
        yield Record(trajectory, steps, (), bodies, line.where)


def _image(node: Node, bodies: dict[str, bytes]) -> pb.BlobReference:
    if isinstance(node.value, str):
        return add_data_url(node.text(), node, bodies)
    value = node.object().get("bytes")
    if isinstance(value, str):
        value = base64.b64decode(value)
    if not isinstance(value, bytes):
        node.fail("has no bytes", "an image is its bytes, or a data address")
    blob = blob_of(value, media_type_of(value))
    bodies[blob.sha256] = value
    return blob


def _gui_step(node: Node, index: int, images: list[pb.BlobReference], bodies: dict[str, bytes]) -> pb.Step:
    message = _without_nulls(node)
    step = step_of(Node({"role": message.need("role").value}, message.where), index, bodies)
    pieces = message.text_of("content").split(IMAGE)
    for position, piece in enumerate(pieces):
        if position:
            if not images:
                message.need("content").fail(f"has more {IMAGE} than the row has images")
            step.content.append(pb.Part(blob=images.pop(0)))
        if piece or len(pieces) == 1:
            step.content.append(pb.Part(text=piece))
    return step


def gui_rows(record: Record, options: ExportOptions, report: Report) -> Iterator[Row]:
    """A row for each response of the model, with what led to it and the images in it."""
    del options
    refuse_open(record)
    found = [(turn, *plain_messages(record, turn.path)) for turn in turns(record)]
    kept = parse_object(record.trajectory.metadata_json)
    score = record.score
    status = kept.get("public_status") or {True: "success", False: "failure", None: "unverified"}[record.resolved]
    for turn, messages, images in found:
        for message in messages:
            for key in ("reasoning_content", "name", "tool_calls", "tool_call_id"):
                if message.pop(key, None):
                    report.lost(key, "the layout has no column for it", record.id)
        name = f"{record.id}.t{turn.path[-1]}" if "public" not in kept else record.id
        value = {
            "messages": messages,
            "images": images,
            "reward": score.value if isinstance(score, Scored) else None,
            "status": status,
            "metadata": compact(_public_metadata(record, name)),
        }
        yield Row(value, name)


def _fits(*columns: str) -> Callable[[Any], bool]:
    def fits(value: Any) -> bool:
        return isinstance(value, dict) and set(columns) <= set(value) and isinstance(value["metadata"], str)

    return fits


def _sniff(fits: Callable[[Any], bool]) -> Callable[[Path], bool]:
    def sniff(path: Path) -> bool:
        first = next(_lines(path), None)
        return first is not None and fits(first.value)

    return sniff


_SWE_FITS: Final = _fits("tools", "messages", "metadata")
_GUI_FITS: Final = _fits("messages", "images", "reward", "status", "metadata")


SWE: Final = Codec(
    name="public-swe",
    summary="The public Orchard dataset's swe layout: a trajectory a row.",
    carries=frozenset({Carries.TOOLS, Carries.TOOL_CALLS, Carries.REWARDS, Carries.METADATA}),
    lossless=True,
    patterns=("*.parquet", "*.jsonl"),
    sniff=_sniff(_SWE_FITS),
    fits=_SWE_FITS,
    read=read_swe,
    rows=swe_rows,
    containers=(Container.PARQUET, Container.JSONL),
    schema=schemas.public_swe,
)
GUI: Final = replace(
    SWE,
    name="public-gui",
    summary="The public Orchard dataset's gui layout: a decision a row, with its images.",
    carries=frozenset({Carries.IMAGES, Carries.REWARDS, Carries.METADATA}),
    sniff=_sniff(_GUI_FITS),
    fits=_GUI_FITS,
    read=read_gui,
    rows=gui_rows,
    schema=schemas.public_gui,
)
